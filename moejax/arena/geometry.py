"""Sizes: what a linear, a table and the kinds of kv_blocks occupy; the page of least waste.

Plain arithmetic on a ModelConfig, see FORMAT.md sections 1 to 3. Sizes are in bytes unless a name
says otherwise.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence

from moejax.arena.format import (
    ATOM_ROWS,
    DTYPES,
    ceil_div,
    dense_words,
    pad_to,
    plane_words,
    table_bytes,
)
from moejax.arena.kinds import KvKind
from moejax.config import DENSE_WIDTH, AnyAttention, ModelConfig, Quantization, Reach
from moejax.errors import ConfigError

PAGE_SIZES = (16 << 10, 32 << 10, 64 << 10)
# A page holds a multiple of this many tokens, if it holds as many.
TOKEN_STEP = 8
# A smaller page is not chosen if it would hold fewer tokens than this: tables would grow long.
LEAST_TOKENS = 4
# What page sizes are judged by where nothing is quantised, so that they stay when it will be.
_USUAL = Quantization(seed_bits=3, parent_bits=6, has_dense=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A linear's matrix: `parts` matrices of `rows x columns`, one over the other."""

    parts: int
    rows: int
    columns: int
    rows_per_table: int = 1
    """Neighbouring stored rows that share their lookup tables."""

    @property
    def stored_rows(self) -> int:
        """Rows of the run: each part padded to whole atoms."""
        return self.parts * pad_to(self.rows, ATOM_ROWS)

    def dense_bytes(self, dtype: str) -> int:
        """Bytes of the dense run."""
        return self.stored_rows * dense_words(self.columns, DTYPES[dtype].itemsize) * 4

    def plane_bytes(self) -> int:
        """Bytes of one bit-plane."""
        return self.stored_rows * plane_words(self.columns) * 4

    def table_bytes(self, bits: int) -> int:
        """Bytes of the lookup tables of a width."""
        return table_bytes(self.stored_rows // self.rows_per_table, 1 << bits)


def linear_shapes(
    config: ModelConfig, quantization: Quantization | None = None
) -> tuple[LinearShape, LinearShape]:
    """The shapes of an expert's gate_up and down."""
    width, hidden = config.moe.expert_width, config.hidden_size
    rows = quantization or _USUAL
    return (
        LinearShape(
            parts=2, rows=width, columns=hidden, rows_per_table=rows.gate_up_rows_per_table
        ),
        LinearShape(parts=1, rows=hidden, columns=width, rows_per_table=rows.down_rows_per_table),
    )


def linear_shape(quantization: Quantization, name: str, shape: tuple[int, ...]) -> LinearShape:
    """The shape of a layer's matrix in a stacked dense tensor that is stored as codes."""
    rows = dict(quantization.linears).get(name)
    if rows is None:
        raise ValueError(f"{name} is not stored as codes")
    return LinearShape(parts=1, rows=shape[1], columns=shape[2], rows_per_table=rows)


@functools.cache
def run_sizes(
    shape: LinearShape, dtype: str, quantization: Quantization | None
) -> Mapping[str, int]:
    """Bytes of each run that is stored of a linear: `dense`, `plane.0` …, `table.3` …."""
    found = {}
    if quantization is None or quantization.has_dense:
        found["dense"] = shape.dense_bytes(dtype)
    if quantization is not None:
        for plane in range(quantization.parent_bits):
            found[f"plane.{plane}"] = shape.plane_bytes()
        for bits in range(quantization.seed_bits, quantization.parent_bits + 1):
            found[f"table.{bits}"] = shape.table_bytes(bits)
    return types.MappingProxyType(found)


def width_bytes(
    shape: LinearShape, dtype: str, quantization: Quantization | None, width: int
) -> int:
    """Bytes of what a linear is read from at a width: planes and one table, or the dense run."""
    if width == DENSE_WIDTH:
        return run_sizes(shape, dtype, quantization)["dense"]
    return width * shape.plane_bytes() + shape.table_bytes(width)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs of a linear, and the slots of their pages (FORMAT.md section 2)."""

    shape: LinearShape
    dtype: str
    """Of the dense run."""
    page_bytes: int
    quantization: Quantization | None
    """None: the dense run is all there is."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each run, by name."""
        return run_sizes(self.shape, self.dtype, self.quantization)

    def pages(self, name: str) -> int:
        """Pages of a run."""
        return ceil_div(self.sizes[name], self.page_bytes)

    @property
    def plane_pages(self) -> int:
        """Pages of a bit-plane."""
        return ceil_div(self.shape.plane_bytes(), self.page_bytes)

    def table_slot(self, bits: int) -> int:
        """The first slot of the table of a width."""
        if self.quantization is None:
            raise ValueError("there are no tables")
        below = range(self.quantization.seed_bits, bits)
        planes = self.quantization.parent_bits * self.plane_pages
        return planes + sum(self.pages(f"table.{b}") for b in below)

    def first_slot(self, name: str) -> int:
        """The first slot of a run."""
        kind, _, number = name.partition(".")
        if kind == "plane":
            return int(number) * self.plane_pages
        return self.table_slot(int(number)) if kind == "table" else 0

    @property
    def num_slots(self) -> int:
        return max(self.first_slot(name) + self.pages(name) for name in self.sizes)

    def resident(self, width: int) -> tuple[str, ...]:
        """The runs that are on a device at a width: with its table, the one below."""
        if width == 0:
            return ()
        if width == DENSE_WIDTH:
            return ("dense",)
        tables = (f"table.{b}" for b in (width - 1, width) if f"table.{b}" in self.sizes)
        return (*(f"plane.{p}" for p in range(width)), *tables)

    def pages_at(self, width: int) -> int:
        """Pages that are on a device at a width."""
        return sum(self.pages(name) for name in self.resident(width))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackedLinear:
    """A stacked dense tensor that is stored as codes: one linear per repeat."""

    name: str
    """Of the tensor: `segments.S.I.…`."""
    shape: LinearShape
    repeats: int
    first: int
    """The number of the first of its linears among those of all such tensors."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a model's experts and KV cache are cut into pages of one size."""

    dtype: str
    page_bytes: int
    gate_up: LinearShape
    down: LinearShape
    num_layers: int
    num_moe_layers: int
    num_experts: int
    quantization: Quantization | None = None
    """None: experts are stored at width 16 only."""
    linears: tuple[StackedLinear, ...] = ()
    """In the order of their names."""
    kinds: tuple[KvKind, ...]
    """In the order of their first layers."""

    @property
    def page_words(self) -> int:
        return self.page_bytes // 4

    @property
    def block_size(self) -> int:
        """Tokens after which the blocks of all kinds are full: prefixes of so many are shared."""
        return math.lcm(*(kind.block_size for kind in self.kinds))

    @property
    def block_pages(self) -> int:
        """Pages of `block_size` tokens in all layers, before any has left a window."""
        return sum(kind.pages_per_block * self.block_size // kind.block_size for kind in self.kinds)

    def most_pages(self, num_tokens: int, max_query: int) -> int:
        """Most pages that a sequence holds at once while it comes to `num_tokens` tokens."""
        return sum(
            kind.pages_per_block * kind.most_blocks(num_tokens, max_query) for kind in self.kinds
        )

    def place_of(self, layer: int) -> tuple[int, int]:
        """The kind of a layer, and its place among the kind's layers."""
        for number, kind in enumerate(self.kinds):
            if layer in kind.layers:
                return number, kind.layers.index(layer)
        raise ValueError(f"there is no layer {layer}")

    def kind_of(self, part: AnyAttention) -> int:
        """The number of the kind of layers with this attention."""
        wanted = _token_bytes(part, self.dtype), part.reach
        found = [(kind.token_bytes, kind.reach) for kind in self.kinds]
        return found.index(wanted)

    @property
    def expert_runs(self) -> tuple[Runs, Runs]:
        """The runs of an expert's gate_up and down."""
        return self.runs_of(self.gate_up), self.runs_of(self.down)

    def runs_of(self, shape: LinearShape) -> Runs:
        """The runs of a linear."""
        return Runs(
            shape=shape,
            dtype=self.dtype,
            page_bytes=self.page_bytes,
            quantization=self.quantization,
        )

    @property
    def num_linears(self) -> int:
        """Linears that are not experts."""
        return sum(linear.repeats for linear in self.linears)

    @property
    def linear_slots(self) -> int:
        """Slots of such a linear: as many as the largest needs."""
        return max((self.runs_of(linear.shape).num_slots for linear in self.linears), default=0)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that are stored, rising."""
        return (DENSE_WIDTH,) if self.quantization is None else self.quantization.widths


def kv_kinds(config: ModelConfig, dtype: str, page_bytes: int) -> tuple[KvKind, ...]:
    """The kinds of a model's layers. Where a page holds no token of one, its block_size is 0."""
    found: dict[tuple[int, Reach], list[int]] = {}
    for n, kind in enumerate(config.layers):
        key = _token_bytes(kind.attention, dtype), kind.attention.reach
        found.setdefault(key, []).append(n)
    return tuple(
        KvKind(
            layers=tuple(layers),
            token_bytes=token_bytes,
            reach=reach,
            block_size=_block_size(page_bytes, token_bytes),
        )
        for (token_bytes, reach), layers in found.items()
    )


def _token_bytes(part: AnyAttention, dtype: str) -> int:
    return part.cached_values * DTYPES[dtype].itemsize


def _block_size(page_bytes: int, token_bytes: int) -> int:
    """As many tokens as fit, in eights if eight fit."""
    tokens = page_bytes // token_bytes
    return tokens // TOKEN_STEP * TOKEN_STEP if tokens >= TOKEN_STEP else tokens


def waste_by_use(geometry: Geometry) -> dict[str, float]:
    """Use of pages → the share of them that is padding: of experts by width, and of KV by kind."""
    page_bytes = geometry.page_bytes
    judged = dataclasses.replace(geometry, quantization=geometry.quantization or _USUAL)

    def waste(sizes: Sequence[int]) -> float:
        pages = sum(ceil_div(size, page_bytes) for size in sizes)
        return 1 - sum(sizes) / (pages * page_bytes)

    found = {}
    for width in reversed(judged.widths):
        runs = judged.expert_runs
        found[f"width {width}"] = waste([r.sizes[n] for r in runs for n in r.resident(width)])
    for kind in geometry.kinds:
        used = kind.block_size * kind.token_bytes
        found[f"KV of {kind.token_bytes} bytes"] = 1 - used / page_bytes
    return found


def page_waste(geometry: Geometry) -> float:
    """What a page size is judged by: the largest share of padding of experts and kinds of KV.

    Of the widths, those of most bytes count: 16, and all planes.
    """
    parent = (geometry.quantization or _USUAL).parent_bits
    judged = (f"width {DENSE_WIDTH}", f"width {parent}")
    waste = waste_by_use(geometry)
    return max(waste[use] for use in waste if not use.startswith("width") or use in judged)


def make_geometry(
    config: ModelConfig,
    dtype: str,
    page_bytes: int,
    quantization: Quantization | None = None,
    tensors: Mapping[str, Sequence[int]] | None = None,
) -> Geometry:
    """The geometry of a model for a given page size.

    `tensors`: the shapes of the stacked dense tensors that are stored as codes.
    """
    gate_up, down = linear_shapes(config, quantization)
    return Geometry(
        dtype=dtype,
        page_bytes=page_bytes,
        gate_up=gate_up,
        down=down,
        num_layers=len(config.layers),
        num_moe_layers=len(config.moe_layers),
        num_experts=config.moe.router.num_experts,
        quantization=quantization,
        linears=_stacked_linears(quantization, tensors or {}),
        kinds=kv_kinds(config, dtype, page_bytes),
    )


def _stacked_linears(
    quantization: Quantization | None, tensors: Mapping[str, Sequence[int]]
) -> tuple[StackedLinear, ...]:
    found: list[StackedLinear] = []
    first = 0
    for name, rows in () if quantization is None else quantization.linears:
        repeats, *matrix = tensors[name]
        shape = LinearShape(parts=1, rows=matrix[0], columns=matrix[1], rows_per_table=rows)
        found.append(StackedLinear(name=name, shape=shape, repeats=repeats, first=first))
        first += repeats
    return tuple(found)


def choose_geometry(
    config: ModelConfig,
    dtype: str,
    quantization: Quantization | None = None,
    tensors: Mapping[str, Sequence[int]] | None = None,
) -> Geometry:
    """The geometry with the page size of least waste; the larger page where two waste the same.

    `tensors`: the shapes of the stacked dense tensors that are stored as codes.

    Raises ConfigError if no page holds a token.
    """
    found = [make_geometry(config, dtype, size, quantization, tensors) for size in PAGE_SIZES]
    least = {g.page_bytes: min(kind.block_size for kind in g.kinds) for g in found}
    most = max(least.values())
    if most == 0:
        token_bytes = max(kind.token_bytes for kind in found[-1].kinds)
        raise ConfigError(
            f"a token needs {token_bytes} bytes of KV in each layer, a page has {max(PAGE_SIZES)}"
        )
    enough = [g for g in found if least[g.page_bytes] >= min(LEAST_TOKENS, most)]
    return min(enough, key=lambda g: (round(page_waste(g), 3), -g.page_bytes))
