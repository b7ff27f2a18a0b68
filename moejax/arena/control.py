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
from moejax.errors import ConfigError

HEADER_SIZE = 16
ROW_FIELDS = 16


class Header(enum.IntEnum):
    """Index of a value in the header."""

    VERSION = 0
    ROWS = 1
    TOKENS = 2
    EXPERT_EDITS = 3
    ROUTING_ACTIVE = 4
    WANT_LOGPROBS = 5
    # Block edits and row edits of the first kind of KV; two more values for each further kind.
    KV_EDITS = 6


MAX_KV_KINDS = (HEADER_SIZE - Header.KV_EDITS) // 2


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


class LinearKind(enum.IntEnum):
    """First value of an expert edit: which table it is for."""

    GATE_UP = 0
    DOWN = 1
    # A linear that is no expert's; its number takes the place of the expert's.
    OTHER = 2


class Flag(enum.IntFlag):
    """Bits of Field.FLAGS."""

    SAMPLE = 1
    EXACT_ROUTING = 2
    CHANGES_LOGITS = 4
    BANS_STOPS = 8
    LONG_ROPE = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Sizes of the sections of one kind of KV."""

    layers: int
    blocks: int
    """kv_blocks that a step may add."""
    row_edits: int
    """Entries of block tables that it may change."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a control array's sections. Static in a compiled program."""

    tokens: int
    rows: int
    expert_edits: int
    kinds: tuple[KvLayout, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.kinds) <= MAX_KV_KINDS:
            raise ConfigError(f"{len(self.kinds)} kinds of KV, 1 to {MAX_KV_KINDS} are supported")

    @property
    def sections(self) -> dict[str, tuple[int, ...]]:
        """Name → shape, in the order in which they stand in the array."""
        sections: dict[str, tuple[int, ...]] = {
            "header": (HEADER_SIZE,),
            "tokens": (self.tokens,),
            "targets": (self.tokens,),
            "rows": (self.rows, ROW_FIELDS),
        }
        for i, kind in enumerate(self.kinds):
            sections[f"block_edits.{i}"] = (kind.blocks, 1 + kind.layers)
            sections[f"row_edits.{i}"] = (kind.row_edits, 3)
        return sections | {"expert_edits": (self.expert_edits, 4)}

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
    long_rope: bool = False
    """Whether the long factors of longrope turn its tokens."""


class KvEdits(NamedTuple):
    """What changes in the tables of one kind of KV."""

    blocks: Sequence[tuple[int, ...]] = ()
    """(kv_block, page of the kind's first layer, page of its second, …)"""
    rows: Sequence[tuple[int, int, int]] = ()
    """(row, index, kv_block)"""


class Control(NamedTuple):
    """Everything a step is told."""

    rows: Sequence[RowControl]
    kv_edits: Sequence[KvEdits] = ()
    """One per kind, or none at all."""
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
    if len(control.kv_edits) not in (0, len(layout.kinds)):
        raise ValueError(f"edits of {len(control.kv_edits)} kinds of KV, of {len(layout.kinds)}")
    header = views["header"]
    for i, kind in enumerate(control.kv_edits):
        at_kind = Header.KV_EDITS + 2 * i
        header[at_kind] = _put_edits(views, f"block_edits.{i}", kind.blocks)
        header[at_kind + 1] = _put_edits(views, f"row_edits.{i}", kind.rows)
    header[Header.VERSION] = VERSION
    header[Header.ROWS] = len(control.rows)
    header[Header.TOKENS] = at
    header[Header.EXPERT_EDITS] = _put_edits(views, "expert_edits", control.expert_edits)
    header[Header.ROUTING_ACTIVE] = control.routing_active
    header[Header.WANT_LOGPROBS] = control.want_logprobs
    return array


def _put_edits(views: dict[str, np.ndarray], name: str, edits: Sequence[tuple[int, ...]]) -> int:
    """Writes a list of edits into its section, and gives back their number."""
    view = views[name]
    if len(edits) > len(view):
        raise ValueError(f"{len(edits)} {name} do not fit {len(view)}")
    for edit in edits:
        if len(edit) != view.shape[1]:
            raise ValueError(f"{name} have {view.shape[1]} values each, got {len(edit)}")
    if edits:
        view[: len(edits)] = edits
    return len(edits)


def _row_fields(row: RowControl, token_start: int) -> list[int]:
    """The whole numbers of a row; the seed's place holds nothing yet."""
    flags = (
        Flag.SAMPLE.value * row.sample
        | Flag.EXACT_ROUTING.value * row.exact_routing
        | Flag.CHANGES_LOGITS.value * row.changes_logits
        | Flag.BANS_STOPS.value * row.bans_stops
        | Flag.LONG_ROPE.value * row.long_rope
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
