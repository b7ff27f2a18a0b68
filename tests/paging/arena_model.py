"""A model of an arena whose pages say what they hold, for tests of what changes its tables."""

import dataclasses
import functools

import numpy as np

from models.small_configs import make_config
from moejax.arena.geometry import Geometry, Runs, choose_geometry
from moejax.config import Quantization
from moejax.paging.weight_table import Change, WeightTable

BITS = Quantization(seed_bits=3, parent_bits=6, has_dense=True)
WIDTHS = (3, 4, 5, 6, 16)
LAYERS, EXPERTS = 2, 2
NUM_LINEARS = LAYERS * EXPERTS * 2
NUM_PAGES = 2000


@functools.cache
def small_geometry() -> Geometry:
    config = make_config("abcbc")
    geometry = choose_geometry(config, "float32", BITS)
    # Several pages per run: one page of all would hide what the places of pages get wrong.
    shape = dataclasses.replace(geometry.gate_up, rows=200, columns=300)
    down = dataclasses.replace(geometry.down, rows=300, columns=200)
    return dataclasses.replace(
        geometry,
        page_bytes=16384,
        gate_up=shape,
        down=down,
        num_moe_layers=LAYERS,
        num_experts=EXPERTS,
    )


class Model:
    """An arena in which each page says what it holds, and the tables of the device."""

    def __init__(self, width: int, with_host: bool) -> None:
        self.geometry = small_geometry()
        self.runs = self.geometry.expert_runs
        self.contents: dict[int, object] = {}
        self.reserved: set[int] = set()
        self.free = list(range(NUM_PAGES, 0, -1))
        self.num_host = 0
        widths = np.full((LAYERS, EXPERTS, 2), width, np.int32)
        shapes = [(LAYERS, EXPERTS, runs.num_slots) for runs in self.runs]
        slots = [np.zeros(shape, np.int32) for shape in shapes]
        host = [np.zeros(shape, np.int32) for shape in shapes]
        for linear in range(NUM_LINEARS):
            kind, row = linear % 2, linear // 2
            for name, pages in self.bring(linear, self.runs[kind].resident(width)).items():
                first = self.runs[kind].first_slot(name)
                slots[kind].reshape(-1, shapes[kind][-1])[row, first : first + len(pages)] = pages
            # Planes and dense rows share slots; on the host are planes and tables.
            for name in self.runs[kind].sizes:
                if name != "dense":
                    self._put_on_host(linear, name, host[kind].reshape(-1, shapes[kind][-1])[row])
        self.device_slots = [table.reshape(-1, table.shape[-1]).copy() for table in slots]
        self.device_widths = widths.reshape(-1, 2).copy()
        self.table = WeightTable(self.geometry, widths, slots, host if with_host else None)

    def _put_on_host(self, linear: int, name: str, slots: np.ndarray) -> None:
        runs = self.runs[linear % 2]
        for i in range(runs.pages(name)):
            page = -1 - self.num_host
            self.num_host += 1
            self.contents[page] = (linear, name, i)
            slots[runs.first_slot(name) + i] = page

    def bring(self, linear: int, names: tuple[str, ...]) -> dict[str, list[int]]:
        """Pages that hold these runs."""
        found = {}
        for name in names:
            count = self.runs[linear % 2].pages(name)
            found[name] = [self.free.pop() for _ in range(count)]
            self.contents |= {page: (linear, name, i) for i, page in enumerate(found[name])}
        return found

    def apply(self, change: Change) -> None:
        """A step with these edits, after which freed pages hold something else."""
        for kind, row, slot, value in change.edits:
            if slot == -1:
                self.device_widths[row, kind] = value
            else:
                self.device_slots[kind][row, slot] = value
        for page in change.freed:
            assert page > 0 and page not in self.free
            self.contents[page] = "another's"
        self.free += change.freed

    def check(self) -> None:
        np.testing.assert_array_equal(self.device_widths, self.table.experts())
        for linear in range(len(self.table)):
            kind, row = linear % 2, linear // 2
            width, runs = int(self.device_widths[row, kind]), self.runs[kind]
            for name in read_at(runs, width):
                first = runs.first_slot(name)
                for i in range(runs.pages(name)):
                    page = int(self.device_slots[kind][row, first + i])
                    assert self.contents[page] == (linear, name, i)
        owned = self.table.owned()
        assert len(set(owned)) == len(owned)
        assert not set(owned) & set(self.free) and min(owned, default=1) > 0
        assert not self.reserved & {*owned, *self.free}
        assert len(owned) + len(self.free) + len(self.reserved) == NUM_PAGES, "a page is lost"


def read_at(runs: Runs, width: int) -> tuple[str, ...]:
    """What a kernel reads of a linear."""
    return ("dense",) if width == 16 else (*(f"plane.{p}" for p in range(width)), f"table.{width}")
