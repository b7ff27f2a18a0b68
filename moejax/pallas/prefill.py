"""Calls `prefill_kernel`: what `run_experts` computes, for many tokens per expert in pages.

Tokens are grouped into tiles of one expert each, their columns in the order in which the kernel
multiplies them, and go through two launches: gate_up with the activation, and down. What they cost
follows the experts that have tokens; nothing of widths or routing is known to the host.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from moejax.arena.experts import ExpertBias, Paged
from moejax.arena.format import ceil_div
from moejax.config import DENSE_WIDTH, Activation, ClampedSwiglu
from moejax.pallas.grouping import group
from moejax.pallas.places import join_biases, sum_of_experts, tokens_of_tiles

STEP_COLUMNS = 128
"""Columns of a step of the kernel, of which each of four neighbouring threads has 32."""
TILE_TOKENS = (64, 128, 256)


def permuted_columns(x: Float[Array, "rows columns"]) -> Float[Array, "rows padded"]:
    """Columns in the order in which the kernel multiplies them, padded to whole steps.

    Thread 4 g + i multiplies columns 32 i to 32 i + 32 of a step, four at a time, which lie 8
    apart, as `bit_words` leaves their codes; wgmma takes two of them from the first 8 of 16
    places, and two from the others.
    """
    rows, columns = x.shape
    steps = ceil_div(columns, STEP_COLUMNS)
    x = jnp.pad(x, ((0, 0), (0, steps * STEP_COLUMNS - columns)))
    #             row   step   i  e // 2  e % 2  s
    x = x.reshape(rows, steps, 4, 2, 2, 8)
    return x.transpose(0, 1, 5, 3, 2, 4).reshape(rows, -1)


def find_refusal(dtype: jnp.dtype, has_host: bool, bias: jnp.dtype | None) -> str | None:
    """Says why the kernel cannot multiply, or None.

    Args:
        dtype: of the tokens.
        has_host: some pages lie on the host.
        bias: the dtype of the bias; None: there is none.
    """
    if dtype != jnp.bfloat16:
        return "the prefill kernel computes in bfloat16"
    if bias is not None and bias != dtype:
        return f"the prefill kernel adds biases of bfloat16, not {bias}"
    if has_host:
        return "the prefill kernel does not read pages on the host"
    return None


def run_experts_prefill(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens k"],
    topk_weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    experts: Paged,
    *,
    tile_tokens: int,
    activation: Activation = "silu",
    weights_input: bool = False,
    bias: ExpertBias | None = None,
) -> Float[Array, "tokens hidden"]:
    """What `run_experts` gives, by kernels, in bfloat16. `tile_tokens`: 64, 128 or 256.

    Raises NotImplementedError for other tiles and dtypes, and where experts have pages on the host.
    """
    tokens, k = topk_ids.shape
    grouping = group(
        topk_ids,
        valid,
        experts.widths,
        experts.layer,
        size=tile_tokens,
        experts=experts.num_experts,
    )
    tiles = grouping.tiles
    weights = topk_weights if weights_input else None
    rows = tokens_of_tiles(permuted_columns(x), grouping, tile_tokens, weights)
    rows = rows.reshape(len(tiles) * tile_tokens, -1)
    of_gate_up, of_down = join_biases(bias)
    gated = product_prefill(rows, tiles, experts, 0, tile_tokens, activation, of_gate_up)
    y = product_prefill(gated, tiles, experts, 1, tile_tokens, activation, of_down, tokens * k)
    return sum_of_experts(y, grouping.place_of_slot, topk_weights, weights_input=weights_input)


def product_prefill(
    x: Float[Array, "rows columns"],
    tiles: Int32[Array, "tiles 8"],
    experts: Paged,
    which: int,
    tile_tokens: int,
    activation: Activation = "silu",
    bias: Float[Array, "*shape"] | None = None,
    places: int = 0,
) -> Float[Array, "..."]:
    """One launch: what goes into down (which 0), or [places, hidden] of down (which 1).

    `x`: the tokens of tile t from row t * tile_tokens on, columns as `permuted_columns` gives them;
    rows behind its last token hold anything. What goes into down has the same form. Copies to
    shared memory bring groups of 8 rows that begin at a multiple of 8: tiles do, places do not.
    `tiles`: as in `Grouping`. Places of no tile are not written.

    Raises NotImplementedError for what run_experts_prefill does not take.
    """
    from moejax.pallas.prefill_kernel import make_kernel
    from moejax.pallas.prefill_spec import Spec

    if tile_tokens not in TILE_TOKENS:
        raise NotImplementedError(f"tiles of {tile_tokens} tokens: the kernel has 64, 128 and 256")
    bias_dtype = None if bias is None else bias.dtype
    refusal = find_refusal(x.dtype, experts.host is not None, bias_dtype)
    if refusal is not None:
        raise NotImplementedError(refusal)
    runs = (experts.gate_up, experts.down)[which]
    table = (experts.gate_up_pages, experts.down_pages)[which]
    bits = runs.quantization
    widths = (DENSE_WIDTH,) if bits is None else bits.widths
    clamped = activation if isinstance(activation, ClampedSwiglu) else None
    spec = Spec(
        which=which,
        rows=runs.shape.rows,
        columns=runs.shape.columns,
        tokens=tile_tokens,
        plane_pages=runs.plane_pages,
        page_words=runs.page_bytes // 4,
        widths=widths,
        table_slots=tuple(runs.table_slot(w) for w in widths if w != DENSE_WIDTH),
        rows_per_table=runs.shape.rows_per_table,
        has_bias=bias is not None,
        activation="clamped_swiglu" if clamped else str(activation),
        alpha=clamped.alpha if clamped else 0.0,
        limit=clamped.limit if clamped else 0.0,
    )
    out = (len(x), spec.out_columns) if which == 0 else (places, spec.rows)
    kernel = make_kernel(spec, len(tiles), jax.ShapeDtypeStruct(out, x.dtype))
    biases = () if bias is None else (bias,)
    found: Array = kernel(experts.pages, table, tiles, x, *biases)
    return found
