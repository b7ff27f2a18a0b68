"""The control array of a step: FORMAT.md section 4. Packed by the host, unpacked in the program.

`pack` and `unpack` share one description of the sections, so the two cannot drift apart; the
numbers of FORMAT.md are checked by the tests.
"""

import dataclasses
import enum
import functools
import itertools
import math
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
    PRESENCE = 12
    FREQUENCY = 13
    REPETITION = 14


_WHOLE = [
    Field.ROW,
    Field.TOKEN_START,
    Field.NUM_TOKENS,
    Field.CACHED,
    Field.FLAGS,
    Field.FORCED,
    Field.TOP_K,
]
_FLOATS = [
    Field.TEMPERATURE,
    Field.TOP_P,
    Field.MIN_P,
    Field.PRESENCE,
    Field.FREQUENCY,
    Field.REPETITION,
]


class Flag(enum.IntFlag):
    """Bits of Field.FLAGS."""

    SAMPLE = 1
    EXACT_ROUTING = 2
    CHANGES_LOGITS = 4
    BANS_STOPS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a control array's sections. Static in a compiled program."""

    tokens: int
    rows: int
    blocks: int
    row_edits: int
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
            "row_edits": (self.row_edits, 3),
            "expert_edits": (self.expert_edits, 4),
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Name → first index in the array."""
        return dict(_offsets(self))

    @property
    def size(self) -> int:
        """Length of the array."""
        return sum(math.prod(shape) for shape in self.sections.values())


@functools.cache
def _offsets(layout: Layout) -> dict[str, int]:
    sizes = [math.prod(shape) for shape in layout.sections.values()]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    return dict(zip(layout.sections, starts, strict=True))


class RowControl(NamedTuple):
    """One row of a step, as the host describes it."""

    row: int
    tokens: Sequence[int]
    """Ids; -1 takes the row's last sampled token. Without any the row stays empty."""
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    changes_logits: bool = False
    """Whether penalties and biases count."""
    bans_stops: bool = False
    """Whether no token may end the sequence; needs `changes_logits`."""


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


def pack(control: Control, layout: Layout) -> Int32[np.ndarray, " size"]:
    """The control array of a step. Raises ValueError where something does not fit its section."""
    array = np.zeros(layout.size, np.int32)
    offsets = _offsets(layout)
    views = {
        name: array[offsets[name] :][: math.prod(shape)].reshape(shape)
        for name, shape in layout.sections.items()
    }
    views["targets"][:] = -1
    at = 0
    if len(control.rows) > layout.rows:
        raise ValueError(f"{len(control.rows)} rows do not fit a bucket of {layout.rows}")
    fields = []
    for row in control.rows:
        n = len(row.tokens)
        if at + n > layout.tokens:
            raise ValueError(f"{at + n} tokens do not fit a bucket of {layout.tokens}")
        views["tokens"][at : at + n] = row.tokens
        if len(row.targets) not in (0, n):
            raise ValueError(f"{len(row.targets)} targets for {n} tokens")
        if row.targets:
            views["targets"][at : at + n] = row.targets
        fields.append(_row_fields(row, at))
        at += n
    if fields:
        _write_fields(views["rows"][: len(fields)], control.rows, fields)
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
    """The whole numbers of a row; the seed's place holds nothing yet."""
    flags = (
        Flag.SAMPLE.value * row.sample
        | Flag.EXACT_ROUTING.value * row.exact_routing
        | Flag.CHANGES_LOGITS.value * row.changes_logits
        | Flag.BANS_STOPS.value * row.bans_stops
    )
    return [row.row, token_start, len(row.tokens), row.cached, flags, row.forced, row.top_k]


def _write_fields(
    view: Int32[np.ndarray, "rows fields"], rows: Sequence[RowControl], fields: list[list[int]]
) -> None:
    """All rows at once: NumPy is slow with single numbers."""
    view[:, _WHOLE] = fields
    view[:, Field.SEED_LOW : Field.SEED_HIGH + 1] = np.array([row.seed for row in rows], np.int64)[
        :, None
    ].view(np.int32)
    floats = [
        (
            row.temperature,
            row.top_p,
            row.min_p,
            row.presence_penalty,
            row.frequency_penalty,
            row.repetition_penalty,
        )
        for row in rows
    ]
    view[:, _FLOATS] = np.array(floats, np.float32).view(np.int32)


def unpack(array: Int32[jax.Array, " size"], layout: Layout) -> dict[str, jax.Array]:
    """Section name → its part of the array. Offsets are static."""
    if array.shape != (layout.size,):
        raise ValueError(f"a control array of {layout.size} words is needed, got {array.shape}")
    offsets = _offsets(layout)
    return {
        name: array[offsets[name] : offsets[name] + math.prod(shape)].reshape(shape)
        for name, shape in layout.sections.items()
    }
