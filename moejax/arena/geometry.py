"""Sizes: what a linear, a lookup table and a kv_block occupy, and the page size that wastes least.

Plain arithmetic on a ModelConfig, see FORMAT.md sections 1 to 3. Sizes are in bytes unless a name
says otherwise.
"""

import dataclasses

from moejax.arena.format import (
    ATOM_ROWS,
    DTYPES,
    ceil_div,
    dense_words,
    pad_to,
    plane_words,
    table_bytes,
)
from moejax.config import Attention, ModelConfig
from moejax.errors import ConfigError

PAGE_SIZES = (16 << 10, 32 << 10, 64 << 10)
# A page holds a multiple of this many tokens.
TOKEN_STEP = 8


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


def linear_shapes(config: ModelConfig) -> tuple[LinearShape, LinearShape]:
    """The shapes of an expert's gate_up and down."""
    width, hidden = config.moe.expert_width, config.hidden_size
    return (
        LinearShape(parts=2, rows=width, columns=hidden),
        LinearShape(parts=1, rows=hidden, columns=width),
    )


def kv_token_bytes(attention: Attention, dtype: str) -> int:
    """Bytes that one token of one layer occupies in a KV page."""
    values = 2 * attention.num_kv_heads * attention.head_size
    return values * DTYPES[dtype].itemsize


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
    token_bytes: int
    """KV bytes of one token of one layer; the largest, where layers differ."""

    @property
    def page_words(self) -> int:
        return self.page_bytes // 4

    @property
    def token_words(self) -> int:
        return self.token_bytes // 4

    @property
    def block_size(self) -> int:
        """Tokens of a kv_block, that is, of a page: as many as fit, in eights if eight fit."""
        tokens = self.page_bytes // self.token_bytes
        return tokens // TOKEN_STEP * TOKEN_STEP if tokens >= TOKEN_STEP else tokens

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

    @property
    def block_pages(self) -> int:
        """Pages of one kv_block: one per layer."""
        return self.num_layers


def page_waste(config: ModelConfig, dtype: str, page_bytes: int) -> float:
    """The share of pages that is padding, over dense runs and KV; 1 if a page holds too few tokens.

    Both kinds count by their own share, so that neither hides the other: the larger is returned.
    """
    geometry = make_geometry(config, dtype, page_bytes)
    if geometry.block_size == 0:
        return 1.0
    used = sum(shape.dense_bytes(dtype) for shape in (geometry.gate_up, geometry.down))
    experts = 1 - used / (sum(geometry.dense_pages) * page_bytes)
    cache = 1 - geometry.block_size * geometry.token_bytes / page_bytes
    return max(experts, cache)


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
        token_bytes=max(kv_token_bytes(kind.attention, dtype) for kind in config.layers),
    )


def choose_geometry(config: ModelConfig, dtype: str) -> Geometry:
    """The geometry with the page size of least waste; the larger page where two waste the same."""
    waste = {size: page_waste(config, dtype, size) for size in PAGE_SIZES}
    best = min(PAGE_SIZES, key=lambda size: (round(waste[size], 3), -size))
    if waste[best] >= 1:
        token_bytes = make_geometry(config, dtype, best).token_bytes
        raise ConfigError(
            f"a token needs {token_bytes} bytes of KV in each layer, a page has {max(PAGE_SIZES)}"
        )
    return make_geometry(config, dtype, best)
