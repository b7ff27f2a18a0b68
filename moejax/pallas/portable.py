"""Calls `portable_kernel`: products with experts and other linears in pages, on any GPU.

For float32, which the kernels of `product` do not take, and for devices that they do not know; in
float32 what comes out is as exact as `run_experts`. What it costs follows the experts that have
tokens; nothing of widths or routing is known to the host.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from moejax.arena.experts import ExpertBias, Paged
from moejax.arena.format import ATOM_WORDS, DTYPES, ceil_div
from moejax.arena.geometry import Runs
from moejax.config import Activation, ClampedSwiglu
from moejax.pallas.bridge import triton_call
from moejax.pallas.places import join_biases, sum_of_experts, tokens_at
from moejax.pallas.tiles import make_tiles

BLOCK_ROWS = 32
"""Rows of a program, of gate and up together: a power of two."""
LEAST_TILE, LARGEST_TILE = 16, 64
# Of a step. In float32 a thread holds its factors of all columns of a step at once.
STEP_COLUMNS = {"float32": 64, "bfloat16": 128}


class Grouped(NamedTuple):
    """Tokens of one expert each, which lie next to each other."""

    expert: Int32[Array, " tiles"]
    start: Int32[Array, " tiles"]
    """Place of the first token."""
    tokens: Int32[Array, " tiles"]
    """How many; 0: there is no tile."""


class Pages(NamedTuple):
    """Linears of one shape in pages."""

    pages: UInt32[Array, "pages words"]
    host: UInt32[Array, "host_pages words"] | None
    table: Int32[Array, "experts slots"]
    widths: Int32[Array, "experts 2"]
    runs: Runs


def tile_size(slots: int, experts: int) -> int:
    """Tokens of a tile: those of an expert if all had as many, up to a power of two."""
    size = LEAST_TILE
    while size < LARGEST_TILE and size * experts < slots:
        size *= 2
    return size


def run_experts_portable(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens k"],
    topk_weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    experts: Paged,
    *,
    activation: Activation = "silu",
    weights_input: bool = False,
    bias: ExpertBias | None = None,
) -> Float[Array, "tokens hidden"]:
    """What `run_experts` gives, by the kernel, in float32 or bfloat16.

    At a width that is not stored the outputs are NaN. Raises NotImplementedError where the dtype of
    x is not that of the arena.
    """
    tokens, k = topk_ids.shape
    if tokens == 0:
        return x
    experts = experts.one_layer()
    size = tile_size(tokens * k, experts.num_experts)
    tiles = make_tiles(topk_ids, valid, experts.num_experts, size)
    count = jnp.where(tiles.used, jnp.minimum(tiles.end - tiles.start, size), 0)
    grouped = Grouped(tiles.expert, tiles.start, count)
    place = jnp.arange(tokens * k, dtype=jnp.int32)
    place_of_slot = jnp.zeros_like(place).at[tiles.order].set(place, unique_indices=True)
    # Places of invalid tokens are not written.
    place_of_slot = jnp.where(jnp.repeat(valid, k), place_of_slot, tokens * k)
    weights = topk_weights if weights_input else None
    rows = tokens_at(place, x, tiles.order // k, place_of_slot, weights)
    of_gate_up, of_down = join_biases(bias)
    if of_down is not None:
        of_down = of_down[:, None]
    gate_up, down = (
        Pages(experts.pages, experts.host, table, experts.widths, runs)
        for table, runs in (
            (experts.gate_up_pages, experts.gate_up),
            (experts.down_pages, experts.down),
        )
    )
    gated = _multiply(rows, grouped, gate_up, 0, size, of_gate_up, activation)
    y = _multiply(gated, grouped, down, 1, size, of_down)
    return sum_of_experts(y, place_of_slot, topk_weights, weights_input=weights_input)


def linear_portable(
    x: Float[Array, "tokens columns"],
    pages: UInt32[Array, "pages words"],
    host: UInt32[Array, "host_pages words"] | None,
    slots: Int32[Array, " slots"],
    width: Int32[Array, ""],
    runs: Runs,
) -> Float[Array, "tokens rows"]:
    """x times the transpose of a linear in pages, whose width is data: NaN if it is not stored.

    Rounded once to the dtype of x. Raises NotImplementedError where that is not the dtype of the
    arena, and for a linear of two matrices.
    """
    if runs.shape.parts != 1:
        raise NotImplementedError(
            "linear_portable multiplies with one matrix, not with gate and up"
        )
    tokens = len(x)
    if tokens == 0:
        return jnp.zeros((0, runs.shape.rows), x.dtype)
    size = tile_size(tokens, 1)
    start = jnp.arange(0, tokens, size, dtype=jnp.int32)
    grouped = Grouped(jnp.zeros_like(start), start, jnp.minimum(tokens - start, size))
    widths = jnp.broadcast_to(width, (1, 2))
    return _multiply(x, grouped, Pages(pages, host, slots[None], widths, runs), 1, size)


def _multiply(
    x: Float[Array, "places columns"],
    grouped: Grouped,
    linears: Pages,
    which: int,
    size: int,
    bias: Float[Array, "experts parts rows"] | None = None,
    activation: Activation = "silu",
) -> Float[Array, "places rows"]:
    """One launch: tokens in tiles of `size`, each times the linear of its expert.

    `which` of the two widths. Gate and up go through the activation. Places that no tile has are
    not written.
    """
    runs, host = linears.runs, linears.host
    if x.dtype != DTYPES[runs.dtype]:
        raise NotImplementedError(f"tokens of {x.dtype} cannot meet weights of {runs.dtype}")
    from moejax.pallas.portable_kernel import portable_kernel

    shape, bits = runs.shape, runs.quantization
    clamped = activation if isinstance(activation, ClampedSwiglu) else None
    return triton_call(
        linears.pages,
        linears.pages if host is None else host,
        linears.table,
        linears.widths,
        *grouped,
        x,
        x if bias is None else bias,
        kernel=portable_kernel,
        out_type=jax.ShapeDtypeStruct((len(x), shape.rows), x.dtype),
        grid=(ceil_div(shape.rows, BLOCK_ROWS // shape.parts), len(grouped.expert)),
        num_warps=4,
        # With stages for loads a thread has more than twice as many registers.
        num_stages=1,
        WHICH=which,
        PARTS=shape.parts,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        SLOTS=linears.table.shape[1],
        PLANE_PAGES=0 if bits is None else runs.plane_pages,
        PAGE_WORDS=runs.page_bytes // 4,
        SEED_BITS=0 if bits is None else bits.seed_bits,
        PARENT_BITS=0 if bits is None else bits.parent_bits,
        TABLE_SLOTS=()
        if bits is None
        else tuple(runs.table_slot(b) for b in range(bits.seed_bits, bits.parent_bits + 1)),
        ROWS_PER_TABLE=shape.rows_per_table,
        HAS_DENSE=bits is None or bits.has_dense,
        DENSE_ATOM=ATOM_WORDS * 4 // x.dtype.itemsize,
        ACTIVATION="clamped_swiglu" if clamped else activation,
        ALPHA=clamped.alpha if clamped else 0.0,
        LIMIT=clamped.limit if clamped else 0.0,
        HAS_BIAS=bias is not None,
        HAS_HOST=host is not None,
        TOKENS=size,
        BLOCK=BLOCK_ROWS,
        STEP=STEP_COLUMNS[runs.dtype],
    )
