"""The control array of a step: FORMAT.md section 4. Packed by the host, unpacked in the program.

`pack` and `unpack` share one description of the sections, so the two cannot drift apart; the
numbers of FORMAT.md are checked by the tests.
"""

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from moejax.arena.format import VERSION

HEADER_SIZE = 16
ROW_FIELDS = 16


class Header(enum.IntEnum):
    """Index of a value in the header."""

    VERSION = 0
    ROWS = 1
    TOKENS = 2
    BLOCK_EDITS = 3
    ROW_EDITS = 4
    EXPERT_EDITS = 5
    ROUTING_ACTIVE = 6
    WANT_LOGPROBS = 7


class Field(enum.IntEnum):
    """Index of a value in the fields of a row."""

    ROW = 0
    TOKEN_START = 1
    NUM_TOKENS = 2
    CACHED = 3
    FLAGS = 4
    FORCED = 5
    SEED_LOW = 6
    SEED_HIGH = 7
    TEMPERATURE = 8
    TOP_P = 9
    MIN_P = 10
    TOP_K = 11


class Flag(enum.IntFlag):
    """Bits of Field.FLAGS."""

    SAMPLE = 1
    EXACT_ROUTING = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a control array's sections. Static in a compiled program."""

    tokens: int
    rows: int
    blocks: int
    expert_edits: int
    layers: int

    @property
    def sections(self) -> dict[str, tuple[int, ...]]:
        """Name → shape, in the order in which they stand in the array."""
        return {
            "header": (HEADER_SIZE,),
            "tokens": (self.tokens,),
            "targets": (self.tokens,),
            "rows": (self.rows, ROW_FIELDS),
            "block_edits": (self.blocks, 1 + self.layers),
            "row_edits": (self.blocks, 3),
            "expert_edits": (self.expert_edits, 4),
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Name → first index in the array."""
        sizes = [int(np.prod(shape)) for shape in self.sections.values()]
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return dict(zip(self.sections, starts, strict=True))

    @property
    def size(self) -> int:
        """Length of the array."""
        return sum(int(np.prod(shape)) for shape in self.sections.values())


class RowControl(NamedTuple):
    """One row of a step, as the host describes it."""

    row: int
    tokens: Sequence[int]
    """Ids; -1 takes the row's last sampled token."""
    cached: int
    sample: bool
    exact_routing: bool = False
    targets: Sequence[int] = ()
    """As many as tokens, or none."""
    forced: int = -1
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0


class Control(NamedTuple):
    """Everything a step is told."""

    rows: Sequence[RowControl]
    block_edits: Sequence[tuple[int, ...]] = ()
    """(kv_block, page of layer 0, page of layer 1, …)"""
    row_edits: Sequence[tuple[int, int, int]] = ()
    """(row, index, kv_block)"""
    expert_edits: Sequence[tuple[int, int, int, int]] = ()
    """(0 gate_up | 1 down, moe layer * experts + expert, slot or -1, value)"""
    routing_active: bool = False
    want_logprobs: bool = False


def float_bits(value: float) -> int:
    """A float32 as the int32 with the same bits."""
    return int(np.float32(value).view(np.int32))


def pack(control: Control, layout: Layout) -> Int32[np.ndarray, " size"]:
    """The control array of a step. Raises ValueError where something does not fit its section."""
    array = np.zeros(layout.size, np.int32)
    views = {
        name: array[layout.offsets[name] :][: int(np.prod(shape))].reshape(shape)
        for name, shape in layout.sections.items()
    }
    views["targets"][:] = -1
    at = 0
    if len(control.rows) > layout.rows:
        raise ValueError(f"{len(control.rows)} rows do not fit a bucket of {layout.rows}")
    for i, row in enumerate(control.rows):
        n = len(row.tokens)
        if at + n > layout.tokens:
            raise ValueError(f"{at + n} tokens do not fit a bucket of {layout.tokens}")
        views["tokens"][at : at + n] = row.tokens
        if len(row.targets) not in (0, n):
            raise ValueError(f"{len(row.targets)} targets for {n} tokens")
        if row.targets:
            views["targets"][at : at + n] = row.targets
        views["rows"][i] = _row_fields(row, at)
        at += n
    for name in ("block_edits", "row_edits", "expert_edits"):
        edits = getattr(control, name)
        if len(edits) > len(views[name]):
            raise ValueError(f"{len(edits)} {name} do not fit {len(views[name])}")
        for edit in edits:
            if len(edit) != views[name].shape[1]:
                raise ValueError(f"{name} have {views[name].shape[1]} values each, got {len(edit)}")
        if edits:
            views[name][: len(edits)] = edits
    header = views["header"]
    header[Header.VERSION] = VERSION
    header[Header.ROWS] = len(control.rows)
    header[Header.TOKENS] = at
    header[Header.BLOCK_EDITS] = len(control.block_edits)
    header[Header.ROW_EDITS] = len(control.row_edits)
    header[Header.EXPERT_EDITS] = len(control.expert_edits)
    header[Header.ROUTING_ACTIVE] = control.routing_active
    header[Header.WANT_LOGPROBS] = control.want_logprobs
    return array


def _row_fields(row: RowControl, token_start: int) -> list[int]:
    fields = [0] * ROW_FIELDS
    seed = np.array([row.seed], np.int64).view(np.int32)
    flags = Flag.SAMPLE * row.sample | Flag.EXACT_ROUTING * row.exact_routing
    fields[Field.ROW] = row.row
    fields[Field.TOKEN_START] = token_start
    fields[Field.NUM_TOKENS] = len(row.tokens)
    fields[Field.CACHED] = row.cached
    fields[Field.FLAGS] = int(flags)
    fields[Field.FORCED] = row.forced
    fields[Field.SEED_LOW], fields[Field.SEED_HIGH] = int(seed[0]), int(seed[1])
    fields[Field.TEMPERATURE] = float_bits(row.temperature)
    fields[Field.TOP_P] = float_bits(row.top_p)
    fields[Field.MIN_P] = float_bits(row.min_p)
    fields[Field.TOP_K] = row.top_k
    return fields


def unpack(array: Int32[jax.Array, " size"], layout: Layout) -> dict[str, jax.Array]:
    """Section name → its part of the array. Offsets are static."""
    if array.shape != (layout.size,):
        raise ValueError(f"a control array of {layout.size} words is needed, got {array.shape}")
    return {
        name: array[layout.offsets[name] : layout.offsets[name] + int(np.prod(shape))].reshape(
            shape
        )
        for name, shape in layout.sections.items()
    }
