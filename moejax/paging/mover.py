"""Brings runs of linears from the host to pages of the device, while steps run.

Nobody waits for a transfer: what has arrived is committed between two steps (PagedWeight, Yang,
Yifan et al. 2026, figure 4: pages first, then the width). An order that cannot be carried out
leaves the linear as it was. There is no thread: `poll` is called before each step.
"""

import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32, UInt32

from moejax.errors import MoejaxError
from moejax.paging.weight_table import Change, WeightTable

logger = logging.getLogger(__name__)

# As an index it is beyond every array: such pages are left out.
_OUT_OF_RANGE = 2**31 - 1


class Ports(NamedTuple):
    """What a mover needs of the rest of a server."""

    read: Callable[[int, str], UInt32[np.ndarray, "pages words"]]
    """The pages of a run of a linear, from the host. May raise MoejaxError or OSError."""
    take: Callable[[int], Sequence[int] | None]
    """Reserves so many pages of the arena; None: there are too few."""
    give_back: Callable[[Sequence[int]], None]
    """Gives back reserved pages."""
    own: Callable[[Sequence[int]], None]
    """Reserved pages hold weights from now on."""
    commit: Callable[[Int32[np.ndarray, " n"], Any], None]
    """Copies pages that have arrived, uint32[n, words], to these pages, behind the steps that the
    device has. Ids out of range are left out."""
    send: Callable[[UInt32[np.ndarray, "n words"]], Any] = jax.device_put
    """Starts a transfer to the device."""


@dataclasses.dataclass(slots=True, eq=False)
class _Order:
    """A linear that is to come to a width."""

    linear: int
    width: int
    pages: dict[str, list[int]]
    """Of the runs that must come."""
    left: int
    """Pages that have not been committed."""
    is_dropped: bool = False


class _Piece(NamedTuple):
    """Pages of a run, and what belongs into them."""

    order: _Order
    pages: list[int]
    values: UInt32[np.ndarray, "n words"]


class _Part(NamedTuple):
    """Places of a transfer, from and to."""

    order: _Order
    first: int
    end: int


@dataclasses.dataclass(slots=True, eq=False)
class _Shipment:
    """Pages on their way."""

    pages: Any
    """uint32[n, words], on the device once it is ready"""
    ids: Int32[np.ndarray, " n"]
    parts: list[_Part]


class Counts(NamedTuple):
    """What a mover has done so far."""

    settled: int = 0
    failed: int = 0
    cancelled: int = 0
    bytes_sent: int = 0


class Mover:
    """Orders, and pages on their way. One thread calls it."""

    def __init__(
        self,
        table: WeightTable,
        ports: Ports,
        *,
        page_words: int,
        shipment_pages: int,
        most_in_flight: int,
    ) -> None:
        """Makes a mover without orders.

        Args:
            table: of the linears; this changes it as pages arrive.
            ports: to the rest of the server.
            page_words: of a page.
            shipment_pages: pages of one transfer; all are as large, so that one program commits.
            most_in_flight: transfers that have not been committed: so many are staged at once.
        """
        self._table = table
        self._ports = ports
        self._page_words = page_words
        self.shipment_pages = shipment_pages
        self._most_in_flight = most_in_flight
        self._orders: dict[int, _Order] = {}
        self._queue: collections.deque[tuple[_Order, str]] = collections.deque()
        self._rest: _Piece | None = None
        self._in_flight: collections.deque[_Shipment] = collections.deque()
        self._arrived: collections.deque[_Order] = collections.deque()
        self.counts = Counts()

    @property
    def staging_bytes(self) -> int:
        """The most that transfers take on the device beside the arena."""
        return self._most_in_flight * self.shipment_pages * self._page_words * 4

    @property
    def is_idle(self) -> bool:
        return not self._orders

    @property
    def is_sending(self) -> bool:
        """Whether a transfer has not been committed."""
        return bool(self._in_flight)

    @property
    def moving(self) -> list[int]:
        """The linears of which something is on its way."""
        return list(self._orders)

    @property
    def reserved(self) -> list[int]:
        """The pages that wait for what is on its way."""
        orders = self._orders.values()
        return [page for order in orders for pages in order.pages.values() for page in pages]

    def is_moving(self, linear: int) -> bool:
        """Whether something of a linear is on its way."""
        return linear in self._orders

    def order(self, linear: int, width: int) -> bool:
        """Asks for what a linear needs to be on the device at a width; False: no pages for it.

        The linear keeps its width until all has arrived. Raises ValueError if it is moving.
        """
        if linear in self._orders:
            raise ValueError(f"linear {linear} is moving")
        runs = self._table.runs_of(linear)
        names = self._table.missing(linear, width)
        taken = self._ports.take(sum(map(runs.pages, names)))
        if taken is None:
            return False
        rest, pages = list(taken), {}
        for name in names:
            count = runs.pages(name)
            pages[name], rest = rest[:count], rest[count:]
        order = _Order(linear, width, pages, len(taken))
        self._orders[linear] = order
        if names:
            self._queue.extend((order, name) for name in names)
        else:
            self._arrived.append(order)
        return True

    def cancel(self, linear: int) -> None:
        """Gives up what is on its way for a linear, which stays as it is; its pages are free."""
        order = self._orders.get(linear)
        if order is not None:
            self._drop(order)
            self.counts = self.counts._replace(cancelled=self.counts.cancelled + 1)

    def poll(self, most_edits: int) -> list[Change]:
        """Commits what has arrived, and sends what is next.

        Args:
            most_edits: of all changes together; what does not fit waits for the next call.

        Returns:
            Changes for the next step. Pages that they free may be used by that step.
        """
        while self._in_flight and self._in_flight[0].pages.is_ready():
            self._receive(self._in_flight.popleft())
        while len(self._in_flight) < self._most_in_flight:
            shipment = self._pack()
            if shipment is None:
                break
            self._in_flight.append(shipment)
        found = []
        while self._arrived:
            order = self._arrived[0]
            edits = sum(map(len, order.pages.values())) + 1
            if edits > most_edits:
                break
            most_edits -= edits
            self._arrived.popleft()
            found.append(self._settle(order))
        return found

    def wait(self) -> None:
        """Waits for the oldest transfer, if there is one; the next `poll` commits it."""
        if self._in_flight:
            jax.block_until_ready(self._in_flight[0].pages)

    def _settle(self, order: _Order) -> Change:
        del self._orders[order.linear]
        self._ports.own([page for pages in order.pages.values() for page in pages])
        self.counts = self.counts._replace(settled=self.counts.settled + 1)
        return self._table.settle(order.linear, order.width, order.pages)

    def _receive(self, shipment: _Shipment) -> None:
        self._ports.commit(shipment.ids, shipment.pages)
        for order, first, end in shipment.parts:
            order.left -= end - first
            if order.left == 0 and not order.is_dropped:
                self._arrived.append(order)

    def _drop(self, order: _Order) -> None:
        order.is_dropped = True
        del self._orders[order.linear]
        if order in self._arrived:
            self._arrived.remove(order)
        # What is on its way to these pages must not be written to them: they are another's now.
        for shipment in self._in_flight:
            for of, first, end in shipment.parts:
                if of is order:
                    shipment.ids[first:end] = _OUT_OF_RANGE
        self._ports.give_back([page for pages in order.pages.values() for page in pages])

    def _pack(self) -> _Shipment | None:
        """The next transfer, which has been started; None: there is nothing to send."""
        values: UInt32[np.ndarray, "n words"] | None = None
        ids = np.full(self.shipment_pages, _OUT_OF_RANGE, np.int32)
        parts: list[_Part] = []
        used = 0
        while used < len(ids) and (piece := self._next_piece(len(ids) - used)) is not None:
            if values is None:
                # Each time anew: a transfer may read it for as long as it lasts.
                values = np.zeros((len(ids), self._page_words), np.uint32)
            end = used + len(piece.pages)
            values[used:end], ids[used:end] = piece.values, piece.pages
            parts.append(_Part(piece.order, used, end))
            used = end
        for part in parts:  # an order may fail at a later run
            if part.order.is_dropped:
                ids[part.first : part.end] = _OUT_OF_RANGE
        if values is None or all(part.order.is_dropped for part in parts):
            return None
        try:
            sent = self._ports.send(values)
        except (MoejaxError, OSError, RuntimeError) as error:
            for part in parts:
                self._fail(part.order, error)
            return None
        self.counts = self.counts._replace(
            bytes_sent=self.counts.bytes_sent + used * self._page_words * 4
        )
        return _Shipment(sent, ids, parts)

    def _next_piece(self, most: int) -> _Piece | None:
        """At most so many pages of the run that is next."""
        while self._rest is None or self._rest.order.is_dropped:
            self._rest = None
            if not self._queue:
                return None
            order, name = self._queue.popleft()
            if order.is_dropped:
                continue
            try:
                read = self._ports.read(order.linear, name)
            except (MoejaxError, OSError) as error:
                self._fail(order, error)
                continue
            self._rest = _Piece(order, order.pages[name], read)
        order, pages, values = self._rest
        self._rest = None if len(pages) <= most else _Piece(order, pages[most:], values[most:])
        return _Piece(order, pages[:most], values[:most])

    def _fail(self, order: _Order, error: Exception) -> None:
        if not order.is_dropped:
            logger.warning("linear %d stays at its width: %s", order.linear, error)
            self._drop(order)
            self.counts = self.counts._replace(failed=self.counts.failed + 1)
