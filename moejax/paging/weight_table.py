"""Where the linears of the experts are, and at which width: the table that plans change.

PagedWeight's weight page table (Yang, Yifan et al. 2026). Of each linear it knows the committed
width, whether its pages are on the device or on the host, and which run is on its way. Changes are
values: edits for the device's tables, and pages that are free once those edits are made. NumPy and
plain Python; nothing here touches a device.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from moejax.arena.geometry import Geometry, Runs

Edit = tuple[int, int, int, int]
"""(LinearKind, moe layer * experts + expert, slot or -1 for the width, value): FORMAT.md 4"""


class Change(NamedTuple):
    """What a step must be told, and which pages nothing points to after it."""

    edits: tuple[Edit, ...]
    freed: tuple[int, ...]


class WeightTable:
    """The committed state of all linears of experts.

    A linear's number is 2 * (moe layer * experts + expert), plus 1 for down. At a width q the
    planes 0 to q - 1 are resident, table q, and table q - 1 but for a while after the width has
    sunk: then it is still on its way, and `has_lower` is false.
    """

    def __init__(
        self,
        geometry: Geometry,
        widths: Int32[np.ndarray, "moe_layers experts 2"],
        slots: Sequence[Int32[np.ndarray, "moe_layers experts _"]],
        host_slots: Sequence[Int32[np.ndarray, "moe_layers experts _"]] | None = None,
    ) -> None:
        """All linears start on the device, with the pages that `slots` names.

        Args:
            geometry: of the model.
            widths: of gate_up and down.
            slots: page ids of gate_up, and of down.
            host_slots: negative page ids of all that is stored; None: nothing can go to the host.
        """
        self.runs = geometry.expert_runs
        self.widths: Int32[np.ndarray, " linears"] = widths.reshape(-1).copy()
        self.has_lower: Bool[np.ndarray, " linears"] = np.ones(len(self.widths), bool)
        self.on_host: Bool[np.ndarray, " linears"] = np.zeros(len(self.widths), bool)
        self._slots = [table.reshape(-1, table.shape[-1]).copy() for table in slots]
        self._host_slots = (
            None
            if host_slots is None
            else [table.reshape(-1, table.shape[-1]) for table in host_slots]
        )

    def __len__(self) -> int:
        return len(self.widths)

    def runs_of(self, linear: int) -> Runs:
        return self.runs[linear % 2]

    def present(self, linear: int) -> tuple[str, ...]:
        """The runs of a linear that are on the device."""
        if self.on_host[linear]:
            return ()
        width = int(self.widths[linear])
        names = self.runs_of(linear).resident(width)
        return names if self.has_lower[linear] else tuple(n for n in names if n != _lower(width))

    def missing(self, linear: int, width: int) -> tuple[str, ...]:
        """The runs that must come to the device for a linear to be there at a width."""
        have = self.present(linear)
        return tuple(n for n in self.runs_of(linear).resident(width) if n not in have)

    def pages_of(self, linear: int, names: Iterable[str]) -> tuple[int, ...]:
        """The pages that runs have on the device."""
        runs, slots = self.runs_of(linear), self._slots[linear % 2][linear // 2]
        found: list[int] = []
        for name in names:
            first = runs.first_slot(name)
            found += slots[first : first + runs.pages(name)].tolist()
        return tuple(found)

    def settle(self, linear: int, width: int, arrived: Mapping[str, Sequence[int]]) -> Change:
        """A linear is on the device at a width, with the runs that it has and those that arrived.

        Table width - 1 may be missing. Raises ValueError, and changes nothing, if another run is,
        if one that arrived was there already or is not wanted, or has another number of pages.
        """
        runs, had = self.runs_of(linear), self.present(linear)
        wanted = runs.resident(width)
        for name, pages in arrived.items():
            if name in had or name not in wanted or len(pages) != runs.pages(name):
                raise ValueError(f"linear {linear}: {len(pages)} pages of {name} are not needed")
        have = {*had, *arrived}
        missing = [name for name in wanted if name not in have and name != _lower(width)]
        if missing:
            raise ValueError(f"linear {linear} has no {', '.join(missing)} for width {width}")
        freed = self.pages_of(linear, (name for name in had if name not in wanted))
        kind, row, edits = linear % 2, linear // 2, []
        slots = self._slots[kind][row]
        for name, pages in arrived.items():
            first = runs.first_slot(name)
            slots[first : first + len(pages)] = pages
            edits += [(kind, row, first + i, page) for i, page in enumerate(pages)]
        self.on_host[linear] = False
        if width != self.widths[linear]:
            edits.append((kind, row, -1, width))
        self.widths[linear] = width
        self.has_lower[linear] = _lower(width) in have or _lower(width) not in wanted
        return Change(tuple(edits), freed)

    def evict(self, linear: int, width: int) -> Change:
        """A linear is read from the host from now on, at any stored width; its pages are free."""
        if self._host_slots is None:
            raise ValueError("there is no pool on the host")
        runs, kind, row = self.runs_of(linear), linear % 2, linear // 2
        freed = self.pages_of(linear, self.present(linear))
        host, slots, edits = self._host_slots[kind][row], self._slots[kind][row], []
        for name in runs.resident(width):
            first = runs.first_slot(name)
            for slot in range(first, first + runs.pages(name)):
                slots[slot] = host[slot]
                edits.append((kind, row, slot, int(host[slot])))
        edits.append((kind, row, -1, width))
        self.widths[linear] = width
        self.on_host[linear], self.has_lower[linear] = True, True
        return Change(tuple(edits), freed)

    def owned(self) -> list[int]:
        """Every page that a linear has, as often as it has it."""
        return [page for n in range(len(self)) for page in self.pages_of(n, self.present(n))]

    def experts(self) -> Int32[np.ndarray, "rows 2"]:
        """The widths, as the device's table has them."""
        return self.widths.reshape(-1, 2)


def _lower(width: int) -> str:
    return f"table.{width - 1}"
