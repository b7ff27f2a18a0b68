"""Calls the kernels of `product_kernel`: what `run_experts` computes, for experts in pages.

Tokens are grouped into tiles of one expert each, and go through two launches: gate_up with the
activation, and down. What they cost follows the experts that have tokens; nothing of widths or
routing is known to the host.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from moejax.arena.experts import ExpertBias, Paged
from moejax.arena.format import ATOM_ROWS, ceil_div, pad_to
from moejax.arena.geometry import Runs
from moejax.config import Activation, ClampedSwiglu
from moejax.pallas.bridge import triton_call
from moejax.pallas.grouping import group
from moejax.pallas.places import join_biases, sum_of_experts, tokens_at

STEP_COLUMNS = 128
"""Columns of a step of the kernel, of which each of four neighbouring threads has 32."""
NIBBLE_BITS = 3
"""Up to this width tables are in registers, and byte permutes look up."""
REGISTERS = {8: 128, 16: 168, 32: 168}
"""Of a thread, by tokens of a tile: as few as let another program of four warps run beside."""
FULL_LINE_BITS = 6
"""Up to this width each thread has its own copy of the tables in shared memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a product is cut. The best depends on shape and device."""

    tokens: int
    """Of a tile: 8, 16, 32 or 64."""
    row_warps: int
    """Warps of a program with rows of their own: 16 of each of its two blocks."""
    k_warps: int
    """Warps that share rows and take turns at the columns."""

    def block_rows(self) -> int:
        return 16 * self.row_warps

    def shared_bytes(self, runs: Runs) -> int:
        """Shared memory of a program: tables of the widest codes, later sums of warps."""
        found = 32 * self.row_warps * self.k_warps * 4
        if runs.quantization is not None:
            bits = runs.quantization
            for width in range(max(bits.seed_bits, NIBBLE_BITS + 1), bits.parent_bits + 1):
                line = 128 if width <= FULL_LINE_BITS else 32
                found = max(found, 2 * self.row_warps * (line << width))
        if self.k_warps > 1:
            found = max(found, self.k_warps * self.tokens * self.row_warps * 128)
        return found


class OneToken(NamedTuple):
    """The experts of a single token: each is a tile, and nothing is to be grouped."""

    experts: Int32[Array, " k"]
    valid: Bool[Array, " 1"]


Tiles = OneToken | Int32[Array, "tiles 8"]
"""Of several tokens: as in `Grouping`."""


def fragment_size(columns: int) -> int:
    """Values of a token as fragments."""
    return ceil_div(columns, STEP_COLUMNS) * STEP_COLUMNS


def to_fragments(x: Float[Array, "tokens columns"]) -> Float[Array, "tokens values"]:
    """Columns in the order in which the threads of a warp read them.

    Thread 4 g + i multiplies token g (and g + 8, ...) with columns 32 i to 32 i + 32 of a step,
    four of 16 at a time, which lie 4 apart, as `bit_words` leaves their codes.
    """
    tokens, columns = x.shape
    x = jnp.pad(x, ((0, 0), (0, fragment_size(columns) - columns)))
    #             token   step i half e  q
    x = x.reshape(tokens, -1, 4, 2, 4, 4)
    return x.transpose(0, 1, 5, 2, 3, 4).reshape(tokens, -1)


def run_experts_paged(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens k"],
    topk_weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    experts: Paged,
    *,
    tilings: tuple[Tiling, Tiling],
    activation: Activation = "silu",
    weights_input: bool = False,
    bias: ExpertBias | None = None,
) -> Float[Array, "tokens hidden"]:
    """What `run_experts` gives, by kernels, in bfloat16. `tilings`: of gate_up and of down."""
    tokens, k = topk_ids.shape
    place = jnp.arange(tokens * k, dtype=jnp.int32)
    tiles: Tiles
    if tokens == 1:
        tiles, row_of_place = OneToken(topk_ids[0], valid), None
        is_here = valid & (topk_ids[0] >= 0) & (topk_ids[0] < experts.num_experts)
        place_of_slot = jnp.where(is_here, place, k)
    else:
        size, number = tilings[0].tokens, experts.num_experts
        grouping = group(topk_ids, valid, experts.widths, experts.layer, size=size, experts=number)
        tiles, place_of_slot = grouping.tiles, grouping.place_of_slot
        row_of_place = grouping.token_of_place
    fragments = to_fragments(x)
    if weights_input:
        rows = jnp.zeros_like(place) if row_of_place is None else row_of_place
        fragments = tokens_at(place, fragments, rows, place_of_slot, topk_weights)
        row_of_place = None
    of_gate_up, of_down = join_biases(bias)
    options = (activation, of_gate_up, tokens * k, row_of_place)
    gated = product(fragments, tiles, experts, 0, tilings[0], *options)
    y = product(gated, tiles, experts, 1, tilings[1], activation, of_down, tokens * k)
    return sum_of_experts(y, place_of_slot, topk_weights, weights_input=weights_input)


def product(
    x: Float[Array, "rows values"],
    tiles: Tiles,
    experts: Paged,
    which: int,
    tiling: Tiling,
    activation: Activation = "silu",
    bias: Float[Array, "*shape"] | None = None,
    places: int = 0,
    row_of_place: Int32[Array, " places"] | None = None,
) -> Float[Array, "places _"]:
    """One launch: fragments for down (which 0), or the outputs of down (which 1).

    Places of no tile are not written.

    Args:
        x: tokens, as `to_fragments` gives them.
        tiles: what is multiplied with which expert.
        places: how many there are.
        row_of_place: the row of x that belongs into each place; None: row n into place n, or the
            only one into all.
    """
    from moejax.pallas.product_kernel import product_kernel

    if x.dtype != jnp.bfloat16:
        raise NotImplementedError("the product kernel computes in bfloat16")
    runs = (experts.gate_up, experts.down)[which]
    table = (experts.gate_up_pages, experts.down_pages)[which]
    shape, bits = runs.shape, runs.quantization
    stored = pad_to(shape.rows, ATOM_ROWS)
    if which == 1 and stored % (2 * tiling.block_rows()):
        tiling = dataclasses.replace(tiling, row_warps=2)
    blocks = stored // tiling.block_rows() // (1 if which == 0 else 2)
    values = fragment_size(shape.rows) if which == 0 else shape.rows
    clamped = activation if isinstance(activation, ClampedSwiglu) else None
    host = experts.host
    # A kernel reads what it is given for a single token only where there is one.
    numbers, valid = tiles if isinstance(tiles, OneToken) else (tiles, tiles)
    layer = jnp.zeros((), jnp.int32) if experts.layer is None else experts.layer
    found = triton_call(
        experts.pages,
        experts.pages if host is None else host,
        table,
        numbers,
        valid,
        experts.widths,
        layer,
        x,
        experts.widths if row_of_place is None else row_of_place,
        x if bias is None else bias,
        kernel=product_kernel,
        out_type=jax.ShapeDtypeStruct((places, values), x.dtype),
        grid=(blocks, len(numbers)),
        num_warps=tiling.row_warps * tiling.k_warps,
        backend_options={"maxnreg": REGISTERS[tiling.tokens]}
        if tiling.tokens in REGISTERS
        else None,
        WHICH=which,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        SLOTS=table.shape[1],
        PLANE_PAGES=runs.plane_pages,
        PAGE_WORDS=runs.page_bytes // 4,
        SEED_BITS=0 if bits is None else bits.seed_bits,
        PARENT_BITS=0 if bits is None else bits.parent_bits,
        TABLE_SLOTS=()
        if bits is None
        else tuple(runs.table_slot(b) for b in range(bits.seed_bits, bits.parent_bits + 1)),
        ROWS_PER_TABLE=shape.rows_per_table,
        HAS_DENSE=bits is None or bits.has_dense,
        LEAST_LINE=FULL_LINE_BITS,
        ONE_TOKEN=isinstance(tiles, OneToken),
        EXPERTS=experts.num_experts,
        HAS_ROWS=row_of_place is not None,
        ONE_ROW=len(x) == 1,
        OUT_VALUES=values,
        ACTIVATION="clamped_swiglu" if clamped else activation,
        ALPHA=clamped.alpha if clamped else 0.0,
        LIMIT=clamped.limit if clamped else 0.0,
        HAS_BIAS=bias is not None,
        TILES=tiling.tokens // 8,
        ROW_WARPS=tiling.row_warps,
        K_WARPS=tiling.k_warps,
        HAS_HOST=host is not None,
        SHARED=tiling.shared_bytes(runs),
    )
    return found
