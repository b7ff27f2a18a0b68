"""Trades the precision of experts for pages of KV cache, and back, between steps.

PagedWeight's loop (Yang, Yifan et al. 2026, equation 7 and algorithm 1). When few pages are left
the linears that matter least sink by one width each: their freed pages are KV pages in the very
next step, since the table of the lower width is there already. When many are left, those that
matter most rise again, as soon as their planes have arrived. It plans with NumPy, acts on the
tables of the host, and leaves the device to edits and transfers.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int32, Int64

from moejax.paging.mover import Mover
from moejax.paging.planner import Rates, Situation, plan_release, plan_spend
from moejax.paging.weight_table import Change, Edit, WeightTable
from moejax_serving.pages import Owner, PagePool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a trader acts, and how much at once."""

    low_pages: int
    """Available pages below which linears sink: free ones, and those of the prefix cache alone."""
    high_pages: int
    """Available pages above which they rise: more than `low_pages`, or they would sink again."""
    most_edits: int
    """Of a step."""
    residence: int
    """Steps for which a linear keeps a width before it rises."""

    def __post_init__(self) -> None:
        if not 0 <= self.low_pages < self.high_pages:
            raise ValueError(f"low {self.low_pages} must be below high {self.high_pages}")


@dataclasses.dataclass(slots=True)
class Counts:
    """What has happened since the start, in linears."""

    sunk: int = 0
    risen: int = 0
    cancelled: int = 0


class Trader:
    """Decides which linears sink and rise, and keeps the edits for the next step."""

    def __init__(
        self, table: WeightTable, mover: Mover, rates: Rates, pages: PagePool, limits: Limits
    ) -> None:
        """`rates`: of all linears of the table, with the widths that they may have."""
        self._table = table
        self._mover = mover
        self._rates = rates
        self._pages = pages
        self._limits = limits
        self._num_others = pages.count(Owner.WEIGHTS) - len(table.owned())
        self._edits: list[Edit] = []
        self._step = 0
        self._changed = np.full(len(table), -limits.residence, np.int64)
        self._rising: dict[int, int] = {}
        self._without_lower: dict[int, None] = {}
        self.weight: Float64[np.ndarray, " linears"] = np.ones(len(table))
        self.floor: Int64[np.ndarray, " linears"] = np.zeros(len(table), np.int64)
        self.counts = Counts()

    @property
    def shipment_pages(self) -> int:
        """Pages that are committed at once."""
        return self._mover.shipment_pages

    @property
    def widths(self) -> Int32[np.ndarray, " linears"]:
        """Of all linears, as the next step has them."""
        return self._table.widths.copy()

    @property
    def spare_pages(self) -> int:
        """Pages that linears give away if all sink to their floors; what rises may be given up."""
        column = self._column()
        steps = np.arange(self._rates.pages.shape[1])
        below = (steps >= self.floor[:, None]) & (steps < column[:, None])
        return int(np.sum(self._rates.pages, where=below))

    def before_step(self, available: int) -> None:
        """Takes what has arrived; plans, if few pages are available, or many.

        `available`: pages of which KV could be made, those that only the prefix cache holds among
        them.
        """
        self._step += 1
        for change in self._mover.poll(self._room_for_edits() // 2):
            self._take(change)
        for linear in [n for n in self._rising if not self._mover.is_moving(n)]:
            width = self._rising.pop(linear)
            self.counts.risen += int(self._table.widths[linear] == width)
            self._changed[linear] = self._step
        if self._step % self._limits.residence == 0:  # those that failed are tried again
            self._without_lower |= dict.fromkeys(np.nonzero(~self._table.has_lower)[0].tolist())
        for linear in list(self._without_lower):
            self._bring_lower(linear)
        if available < self._limits.low_pages:
            self.make_room(self._limits.low_pages - available)
        elif available > self._limits.high_pages:
            self._rise(available - self._limits.high_pages)

    def make_room(self, needed: int) -> bool:
        """Frees at least so many pages now, if linears can give them; says whether it did.

        What rises is given up first, the last to start first. Where linears that could sink wait
        for their lower tables, these are waited for: better than to compute a sequence again.
        """
        before = self._pages.num_free
        in_flight = sum(self._pages_in_flight(linear) for linear in self._rising)
        if needed > self.spare_pages + in_flight:
            return False
        while self._pages.num_free - before < needed and self._rising:
            linear, _ = self._rising.popitem()
            self._mover.cancel(linear)
            self.counts.cancelled += 1
        while (missing := needed - (self._pages.num_free - before)) > 0:
            if not self._sink(missing) and not self._wait_for_lower():
                return False
        return True

    def take_edits(self) -> tuple[Edit, ...]:
        """The edits for the next step, which must carry them."""
        found, self._edits = tuple(self._edits), []
        return found

    def give_back_edits(self, edits: Sequence[Edit]) -> None:
        """Edits of a step that did not start: they come first in the next one."""
        self._edits = [*edits, *self._edits]

    def check(self) -> None:
        """Raises if the pages of linears and of transfers are not accounted as theirs."""
        owned = self._table.owned()
        weights, reserved = map(self._pages.owned_by, (Owner.WEIGHTS, Owner.RESERVED))
        if len(set(owned)) != len(owned) or not set(owned) <= weights:
            raise AssertionError("linears share pages, or have some that are not weights")
        if len(weights) != len(owned) + self._num_others:
            raise AssertionError(f"{len(weights)} pages are weights, {len(owned)} of experts")
        if sorted(self._mover.reserved) != sorted(reserved):
            raise AssertionError(f"{len(reserved)} pages are reserved for other transfers")

    def _column(self) -> Int64[np.ndarray, " linears"]:
        return np.searchsorted(self._rates.widths, self._table.widths).astype(np.int64)

    def _column_of(self, linear: int) -> int:
        return self._rates.widths.index(int(self._table.widths[linear]))

    def _room_for_edits(self) -> int:
        return self._limits.most_edits - len(self._edits)

    def _situation(self) -> Situation:
        count = len(self._table)
        here = ~self._table.on_host
        here[self._mover.moving] = False
        rested = self._step - self._changed >= self._limits.residence
        return Situation(
            column=self._column(),
            least=self.floor,
            most=np.full(count, len(self._rates.widths) - 1, np.int64),
            weight=self.weight,
            can_sink=here & self._table.has_lower,
            can_rise=here & self._table.has_lower & rested,
        )

    def _sink(self, needed: int) -> bool:
        """One step of width for as many linears as that takes; False if none can sink."""
        plan = plan_release(self._rates, self._situation(), needed)
        sunk = 0
        for linear in plan.linears.tolist():
            if self._room_for_edits() == 0:
                break
            width = self._rates.widths[self._column_of(linear) - 1]
            self._take(self._table.settle(linear, width, {}))
            self._changed[linear] = self._step
            self._bring_lower(linear)
            sunk += 1
        self.counts.sunk += sunk
        return sunk > 0

    def _bring_lower(self, linear: int) -> None:
        """Asks for the table below a linear's width; later, where there is no page for it."""
        self._without_lower.pop(linear, None)
        if self._table.has_lower[linear] or self._mover.is_moving(linear):
            return
        if not self._mover.order(linear, int(self._table.widths[linear])):
            self._without_lower[linear] = None

    def _wait_for_lower(self) -> bool:
        """Waits for a transfer, after which a linear may sink again; False if none is of use."""
        if self._mover.is_idle or self._room_for_edits() == 0:
            return False
        before = self._mover.counts
        self._mover.poll(0)
        self._mover.wait()
        changes = self._mover.poll(self._room_for_edits())
        for change in changes:
            self._take(change)
        return bool(changes) or self._mover.counts != before or self._mover.is_sending

    def _rise(self, spare: int) -> None:
        plan = plan_spend(self._rates, self._situation(), spare)
        for linear in plan.linears.tolist():
            width = self._rates.widths[self._column_of(linear) + 1]
            # It holds the table that it gives away until the width is committed.
            if not self._mover.order(linear, width):
                break
            self._rising[linear] = width

    def _pages_in_flight(self, linear: int) -> int:
        runs = self._table.runs_of(linear)
        return sum(map(runs.pages, self._table.missing(linear, self._rising[linear])))

    def _take(self, change: Change) -> None:
        self._edits += change.edits
        self._pages.give_back(change.freed)
