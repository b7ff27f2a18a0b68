"""Calls the kernels of `grouping_kernel`: `make_tiles` in one launch, in the form products read.

What stands between the router and the products is small and has many steps; as operations of XLA
each of them is a launch of its own.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from moejax.pallas.bridge import triton_call, with_reference
from moejax.pallas.tiles import make_tiles

TILE_COLUMNS = 8
MAX_EXPERTS = 512
ONE_BLOCK = 1024
"""Up to so many slots one program does everything."""
BLOCK = 1024
"""Slots that each program places where there are more."""
COUNT_BLOCK = 4096
"""Slots that each of these programs counts at once."""


class Grouping(NamedTuple):
    """Slots (a token and one of its experts) sorted by expert, and cut into tiles."""

    tiles: Int32[Array, "tiles 8"]
    """Of each tile the row of its expert in the tables, first place, number of tokens, widths of
    the expert's gate_up and down, and the expert; the rest is 0. Used tiles come first, in order of
    experts; the rows of the others are 0."""
    token_of_place: Int32[Array, " slots"]
    """The token in each place; 0 in places behind the last."""
    place_of_slot: Int32[Array, " slots"]
    """The place of slot s, which is of token s // k; the number of slots where it has none."""


def num_tiles(slots: int, experts: int, size: int) -> int:
    """Tiles that are enough for any routing: a group has at most one that is not full."""
    return min(experts, slots) + slots // size


def group(
    topk_ids: Int32[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    widths: Int32[Array, "rows 2"],
    layer: Int32[Array, ""] | None = None,
    *,
    size: int,
    experts: int | None = None,
) -> Grouping:
    """Groups slots by expert, in the order of slots, into tiles of at most `size` places.

    Slots of invalid tokens, and of experts that do not exist, have no place. `widths` has
    the rows of several layers one after the other; `layer`: which one this is. `experts`: how many
    a layer has; None: as many as there are rows.
    """
    layer = jnp.zeros((), jnp.int32) if layer is None else layer
    options: Any = {"size": size, "experts": len(widths) if experts is None else experts}
    if topk_ids.size == 0:
        return group_reference(topk_ids, valid, widths, layer, **options)
    joined = with_reference(partial(group_reference, **options), partial(_group, **options))
    found: Grouping = joined(topk_ids, valid, widths, layer)
    return found


def group_reference(
    topk_ids: Int32[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    widths: Int32[Array, "rows 2"],
    layer: Int32[Array, ""],
    *,
    size: int,
    experts: int,
) -> Grouping:
    """The same in plain jax.numpy."""
    k, slots = topk_ids.shape[1], topk_ids.size
    exists = (topk_ids >= 0) & (topk_ids < experts)
    topk_ids = jnp.where(exists, topk_ids, experts)
    found = make_tiles(topk_ids, valid, experts, size)
    count = jnp.minimum(found.end - found.start, size)
    row = found.expert + layer * experts
    values = [row, found.start, count, *widths[row].T, found.expert]
    columns = jnp.stack(values, axis=1)
    columns = jnp.pad(columns, ((0, 0), (0, TILE_COLUMNS - columns.shape[1])))
    place = jnp.arange(slots, dtype=jnp.int32)
    is_used = place < jnp.sum(exists & valid[:, None], dtype=jnp.int32)
    return Grouping(
        tiles=jnp.where(found.used[:, None], columns, 0),
        token_of_place=jnp.where(is_used, found.order // max(k, 1), 0),
        place_of_slot=jnp.zeros(slots, jnp.int32)
        .at[found.order]
        .set(jnp.where(is_used, place, slots), unique_indices=True),
    )


def _group(
    topk_ids: Int32[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    widths: Int32[Array, "rows 2"],
    layer: Int32[Array, ""],
    *,
    size: int,
    experts: int,
) -> Grouping:
    from moejax.pallas.grouping_kernel import group_block_kernel, group_kernel

    slots = topk_ids.size
    if experts > MAX_EXPERTS:
        raise NotImplementedError(f"the grouping kernel takes up to {MAX_EXPERTS} experts")
    tiles = num_tiles(slots, experts, size)
    call = partial(
        triton_call,
        topk_ids,
        valid,
        widths,
        layer,
        out_type=[
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in ((tiles, TILE_COLUMNS), (slots,), (slots,))
        ],
        SLOTS=slots,
        K=topk_ids.shape[1],
        EXPERTS=experts,
        TILES=tiles,
        SIZE=size,
    )
    if slots <= ONE_BLOCK:
        # A thread has four slots: more warps would wait for each other more often.
        block = max(32, _power_of_two(slots))
        warps = max(1, min(block // 128, 8))
        return Grouping(*call(kernel=group_block_kernel, grid=1, num_warps=warps, BLOCK=block))
    found = call(
        kernel=group_kernel,
        grid=-(-slots // BLOCK),
        num_warps=8,
        BLOCK=BLOCK,
        BINS=max(32, _power_of_two(experts)),
        COUNT_BLOCK=COUNT_BLOCK,
    )
    return Grouping(*found)


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
