"""Products of tokens with the experts that the router chose for them.

Tokens are sorted by expert and cut into tiles that belong to one expert each; the tiles are worked
off one after the other, so memory holds the weights of one expert at a time, and experts without
tokens cost nothing. This is the plain path for every backend, and the reference of the kernels.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from moejax.arena.geometry import Runs
from moejax.arena.state import read_linear
from moejax.config import Activation
from moejax.layers.linear import product, product_with_bias
from moejax.layers.mlp import activate

MAX_TILE = 64


class ExpertWeights(NamedTuple):
    """The matrices of one expert."""

    gate: Float[Array, "width hidden"]
    up: Float[Array, "width hidden"]
    down: Float[Array, "hidden width"]


class ExpertBias(NamedTuple):
    """The biases of all experts of a layer."""

    gate: Float[Array, "experts width"]
    up: Float[Array, "experts width"]
    down: Float[Array, "experts hidden"]


@runtime_checkable
class Experts(Protocol):
    """The experts of one layer, wherever their weights lie."""

    @property
    def num_experts(self) -> int: ...

    def weights(self, expert: Int32[Array, ""]) -> ExpertWeights:
        """The matrices of an expert whose number is known on the device only."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """Experts as ordinary arrays: for training, calibration and gradients.

    A scan over layers stacks them: outside of it both have a leading axis.
    """

    gate_up: Any
    """float[experts, 2, width, hidden]"""
    down: Any
    """float[experts, hidden, width]"""

    @property
    def num_experts(self) -> int:
        return int(self.gate_up.shape[0])

    def weights(self, expert: Int32[Array, ""]) -> ExpertWeights:
        gate_up = lax.dynamic_index_in_dim(self.gate_up, expert, keepdims=False)
        down = lax.dynamic_index_in_dim(self.down, expert, keepdims=False)
        return ExpertWeights(gate_up[0], gate_up[1], down)


@dataclasses.dataclass(frozen=True)
class Paged:
    """Experts in the pages of an arena, through the expert table of one layer, at any widths."""

    pages: UInt32[Array, "pages words"]
    host: UInt32[Array, "host_pages words"] | None
    gate_up_pages: Int32[Array, "experts slots"]
    down_pages: Int32[Array, "experts slots2"]
    widths: Int32[Array, "experts 2"]
    """Of gate_up and down."""
    gate_up: Runs
    down: Runs

    @property
    def num_experts(self) -> int:
        return self.gate_up_pages.shape[0]

    def weights(self, expert: Int32[Array, ""]) -> ExpertWeights:
        gate_up, down = lax.dynamic_index_in_dim(self.widths, expert, keepdims=False)
        gate, up = self._matrices(self.gate_up_pages, self.gate_up, expert, gate_up)
        (only,) = self._matrices(self.down_pages, self.down, expert, down)
        return ExpertWeights(gate, up, only)

    def _matrices(
        self,
        table: Int32[Array, "experts slots"],
        runs: Runs,
        expert: Int32[Array, ""],
        width: Int32[Array, ""],
    ) -> Float[Array, "parts rows columns"]:
        slots = lax.dynamic_index_in_dim(table, expert, keepdims=False)
        return read_linear(self.pages, self.host, slots, width, runs)


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


def run_experts(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens k"],
    topk_weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    experts: Experts,
    *,
    activation: Activation = "silu",
    weights_input: bool = False,
    bias: ExpertBias | None = None,
) -> Float[Array, "tokens hidden"]:
    """The weighted sum of the outputs of each token's experts; zero for invalid tokens.

    Products are rounded to the dtype of x, weighted and summed in the dtype of the weights (that
    of x, or float32), and rounded once. `weights_input`: the weights multiply the inputs of the
    experts instead, in the dtype of x.
    """
    tokens, k = topk_ids.shape
    size = min(MAX_TILE, tokens)
    tiles = make_tiles(topk_ids, valid, experts.num_experts, size)
    place = jnp.arange(size, dtype=jnp.int32)

    def compute(expert: Int32[Array, ""], rows: Float[Array, "m hidden"]) -> Array:
        gate, up, down = experts.weights(expert)
        if bias is None:
            return product(activate(product(rows, gate), product(rows, up), activation), down)
        of = ExpertBias(*(lax.dynamic_index_in_dim(part, expert, keepdims=False) for part in bias))
        gated = activate(
            product_with_bias(rows, gate, of.gate), product_with_bias(rows, up, of.up), activation
        )
        return product_with_bias(gated, down, of.down)

    def body(
        places: Float[Array, "places hidden"], tile: tuple[Array, Array, Array, Array]
    ) -> tuple[Array, None]:
        expert, start, used, end = tile
        rows = lax.dynamic_slice_in_dim(places, start, size)
        y = lax.cond(used, compute, lambda _, rows: rows, expert, rows)
        # Rows beyond the group's end are the input of the next group.
        y = jnp.where((start + place < end)[:, None], y, rows)
        return lax.dynamic_update_slice_in_dim(places, y, start, axis=0), None

    # Outputs take the places of their inputs; padding, since a tile may reach beyond the last slot.
    order = jnp.pad(tiles.order, (0, size))
    places = x[order // k]
    if weights_input:
        places = places * topk_weights.reshape(-1)[order].astype(x.dtype)[:, None]
    places, _ = lax.scan(body, places, (tiles.expert, tiles.start, tiles.used, tiles.end))
    place_of = (
        jnp.zeros(tokens * k, jnp.int32)
        .at[tiles.order]
        .set(jnp.arange(tokens * k, dtype=jnp.int32), unique_indices=True)
    )
    y = places[place_of].reshape(tokens, k, -1)
    weights = jnp.ones_like(topk_weights) if weights_input else topk_weights
    total = jnp.sum(y.astype(weights.dtype) * weights[:, :, None], axis=1)
    return jnp.where(valid[:, None], total, 0).astype(x.dtype)
