"""Linears of random codes and tables, and pages in any order to hold them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moejax.arena import format
from moejax.arena.geometry import Geometry, LinearShape, Runs
from moejax.arena.widths import Widths
from moejax.config import DENSE_WIDTH, Quantization


class Coded(NamedTuple):
    """A linear: what is stored of it, and what that stands for. Each width has other weights."""

    shape: LinearShape
    bits: Quantization
    codes: np.ndarray
    """uint8[stored rows, columns]"""
    tables: dict[int, np.ndarray]
    """Width → float16[tables, 2^width]"""
    dense: np.ndarray
    """float32[parts, rows, columns], exact in bfloat16"""

    def runs(self, dtype: str) -> dict[str, np.ndarray]:
        """All runs that are stored, by name; the dense one in a dtype."""
        planes = format.encode_planes(self.codes, self.bits.parent_bits)
        found = {f"plane.{p}": plane for p, plane in enumerate(planes)}
        for width, table in self.tables.items():
            found[f"table.{width}"] = format.encode_table(table)
        if self.bits.has_dense:
            values = self.dense.astype(format.DTYPES[dtype])
            matrix = format.stack_halves(*values) if self.shape.parts == 2 else values[0]
            found["dense"] = format.encode_dense(matrix)
        return found

    def weights(self, width: int, dtype: str = "float32") -> np.ndarray:
        """[parts, rows, columns] at a width, looked up one by one."""
        if width == DENSE_WIDTH:
            return self.dense.astype(format.DTYPES[dtype])
        rows = np.arange(len(self.codes)) // self.shape.rows_per_table
        codes = self.codes >> (self.bits.parent_bits - width)
        found = self.tables[width][rows[:, None], codes].reshape(
            self.shape.parts, -1, *codes.shape[1:]
        )
        return found[:, : self.shape.rows].astype(format.DTYPES[dtype])


def random_coded(shape: LinearShape, bits: Quantization, seed: int) -> Coded:
    """Weights that keep the size of what passes, at every width."""
    rng = np.random.default_rng(seed)
    scale = shape.columns**-0.5
    codes = rng.integers(0, 1 << bits.parent_bits, (shape.stored_rows, shape.columns), np.uint8)
    count = shape.stored_rows // shape.rows_per_table
    tables = {
        width: np.sort(scale * rng.standard_normal((count, 1 << width))).astype(np.float16)
        for width in range(bits.seed_bits, bits.parent_bits + 1)
    }
    dense = scale * rng.standard_normal((shape.parts, shape.rows, shape.columns))
    rounded = dense.astype(format.DTYPES["bfloat16"]).astype(np.float32)
    return Coded(shape, bits, codes, tables, rounded)


class Pool:
    """Pages on the device and on the host, handed out in a random order; the rest is poison."""

    def __init__(self, num_pages: int, page_words: int, *, host_share: int = 3) -> None:
        self.arena = np.full((num_pages, page_words), format.POISON_WORD, np.uint32)
        self.host = self.arena.copy()
        self._host_share = host_share
        self._free = (1 + np.random.default_rng(0).permutation(num_pages - 1)).tolist()

    def put(self, run: np.ndarray) -> list[int]:
        """Stores a run; the signed ids of its pages, of which every third lies on the host."""
        ids = []
        for page in format.to_pages(run, self.arena.shape[1]):
            number = self._free.pop()
            is_host = self._host_share > 0 and number % self._host_share == 0
            (self.host if is_host else self.arena)[number] = page
            ids.append(~number if is_host else number)
        return ids


class Placed(NamedTuple):
    """A linear in pages."""

    runs: Runs
    ids: Mapping[str, Sequence[int]]
    """Run → its pages."""

    def slots(self, width: int, *, of: int | None = None) -> np.ndarray:
        """The slots at a width; `of`: with what is resident at another one."""
        found = np.zeros(self.runs.num_slots, np.int32)
        for name in self.runs.resident(width if of is None else of):
            first = self.runs.first_slot(name)
            found[first : first + len(self.ids[name])] = self.ids[name]
        return found


def place(coded: Coded, runs: Runs, pool: Pool) -> Placed:
    """Puts all runs of a linear into pages."""
    return Placed(runs, {name: pool.put(run) for name, run in coded.runs(runs.dtype).items()})


def pages_of(runs: Runs) -> int:
    """Pages of everything that is stored of a linear."""
    return sum(runs.pages(name) for name in runs.sizes)


def widths_to_json(widths: Widths, geometry: Geometry) -> dict[str, Any]:
    """`{"experts": [layer][expert][gate_up, down], "linears": {name: [repeat]}}`."""
    return {
        "experts": widths.experts.tolist(),
        "linears": {
            linear.name: widths.linears[linear.first : linear.first + linear.repeats].tolist()
            for linear in geometry.linears
        },
    }
