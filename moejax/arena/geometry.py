"""Sizes: what a linear, a table and the kinds of kv_blocks occupy; the page of least waste.

Plain arithmetic on a ModelConfig, see FORMAT.md sections 1 to 3. Sizes are in bytes unless a name
says otherwise.
"""

import dataclasses
import math
from collections.abc import Sequence

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
from moejax.config import AnyAttention, ModelConfig, Reach
from moejax.errors import ConfigError

PAGE_SIZES = (16 << 10, 32 << 10, 64 << 10)
# A page holds a multiple of this many tokens, if it holds as many.
TOKEN_STEP = 8
# A smaller page is not chosen if it would hold fewer tokens than this: tables would grow long.
LEAST_TOKENS = 4
# The widths that page sizes are judged by.
SEED_BITS = 3
PARENT_BITS = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A linear's matrix: `parts` matrices of `rows x columns`, one over the other."""

    parts: int
    rows: int
    columns: int

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
        """Bytes of the lookup table of a width."""
        return table_bytes(self.stored_rows, 1 << bits)

    def resident_runs(self, bits: int) -> list[int]:
        """Bytes of each run that is resident at a width: planes, this table and the one below."""
        tables = [self.table_bytes(b) for b in (bits, bits - 1) if b >= SEED_BITS]
        return [self.plane_bytes()] * bits + tables


def linear_shapes(config: ModelConfig) -> tuple[LinearShape, LinearShape]:
    """The shapes of an expert's gate_up and down."""
    width, hidden = config.moe.expert_width, config.hidden_size
    return (
        LinearShape(parts=2, rows=width, columns=hidden),
        LinearShape(parts=1, rows=hidden, columns=width),
    )


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
    def dense_pages(self) -> tuple[int, int]:
        """Pages of one expert's gate_up and down at width 16; also their slots."""
        return (
            ceil_div(self.gate_up.dense_bytes(self.dtype), self.page_bytes),
            ceil_div(self.down.dense_bytes(self.dtype), self.page_bytes),
        )

    @property
    def expert_pages(self) -> int:
        """Pages of all experts of all layers at width 16."""
        return self.num_moe_layers * self.num_experts * sum(self.dense_pages)


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
    page_bytes, shapes = geometry.page_bytes, (geometry.gate_up, geometry.down)

    def waste(runs: Sequence[int]) -> float:
        pages = sum(ceil_div(run, page_bytes) for run in runs)
        return 1 - sum(runs) / (pages * page_bytes)

    found = {"width 16": waste([shape.dense_bytes(geometry.dtype) for shape in shapes])}
    for bits in range(SEED_BITS, PARENT_BITS + 1):
        found[f"width {bits}"] = waste([n for shape in shapes for n in shape.resident_runs(bits)])
    for kind in geometry.kinds:
        used = kind.block_size * kind.token_bytes
        found[f"KV of {kind.token_bytes} bytes"] = 1 - used / page_bytes
    return found


def page_waste(geometry: Geometry) -> float:
    """What a page size is judged by: the largest share of padding of experts and kinds of KV.

    Of the widths, those of most bytes count: 16, and all planes.
    """
    waste = waste_by_use(geometry)
    return max(waste[use] for use in waste if not use.startswith("width") or use in _JUDGED)


_JUDGED = ("width 16", f"width {PARENT_BITS}")


def make_geometry(config: ModelConfig, dtype: str, page_bytes: int) -> Geometry:
    """The geometry of a model for a given page size."""
    gate_up, down = linear_shapes(config)
    return Geometry(
        dtype=dtype,
        page_bytes=page_bytes,
        gate_up=gate_up,
        down=down,
        num_layers=len(config.layers),
        num_moe_layers=len(config.moe_layers),
        num_experts=config.moe.router.num_experts,
        kinds=kv_kinds(config, dtype, page_bytes),
    )


def choose_geometry(config: ModelConfig, dtype: str) -> Geometry:
    """The geometry with the page size of least waste; the larger page where two waste the same.

    Raises ConfigError if no page holds a token.
    """
    found = [make_geometry(config, dtype, size) for size in PAGE_SIZES]
    least = {g.page_bytes: min(kind.block_size for kind in g.kinds) for g in found}
    most = max(least.values())
    if most == 0:
        token_bytes = max(kind.token_bytes for kind in found[-1].kinds)
        raise ConfigError(
            f"a token needs {token_bytes} bytes of KV in each layer, a page has {max(PAGE_SIZES)}"
        )
    enough = [g for g in found if least[g.page_bytes] >= min(LEAST_TOKENS, most)]
    return min(enough, key=lambda g: (round(page_waste(g), 3), -g.page_bytes))
