"""Tokens grouped by expert, and cut into tiles that belong to one expert each."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Tiles(NamedTuple):
    """Slots (a token and one of its experts) sorted by expert, and cut into tiles."""

    order: Int32[Array, " slots"]
    """order[i]: the slot in place i; slot s is token s // experts_per_token."""
    expert: Int32[Array, " tiles"]
    start: Int32[Array, " tiles"]
    """First place of the tile; the number of slots where the tile is empty."""
    used: Bool[Array, " tiles"]
    end: Int32[Array, " tiles"]
    """The place after the last one of the tile's expert."""


def make_tiles(
    topk_ids: Int32[Array, "tokens k"], valid: Bool[Array, " tokens"], num_experts: int, size: int
) -> Tiles:
    """Groups slots by expert. Slots of invalid tokens come last and belong to no tile."""
    slots = topk_ids.size
    expert = jnp.where(valid[:, None], topk_ids, num_experts).reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    group_starts = jnp.cumsum(group_sizes) - group_sizes
    group_tiles = -(-group_sizes // size)
    tile_ends = jnp.cumsum(group_tiles)
    # Each non-empty group has at most one tile that is not full.
    number = jnp.arange(min(num_experts, slots) + slots // size, dtype=jnp.int32)
    owner = jnp.searchsorted(tile_ends, number, side="right").astype(jnp.int32)
    used = number < tile_ends[-1]
    owner = jnp.where(used, owner, 0)
    within = number - (tile_ends - group_tiles)[owner]
    start = jnp.where(used, group_starts[owner] + within * size, slots)
    end = jnp.where(used, (group_starts + group_sizes)[owner], slots)
    return Tiles(order, owner, start, used, end)
