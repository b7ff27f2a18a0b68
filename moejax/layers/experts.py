"""Products of tokens with the experts that the router chose for them.

Tokens are sorted by expert and cut into tiles that belong to one expert each; the tiles are worked
off one after the other, so memory holds the weights of one expert at a time, and experts without
tokens cost nothing. This is the plain path for every backend, and the reference of the kernels.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from moejax.arena.experts import ExpertBias, ExpertWeights, Paged
from moejax.config import Activation
from moejax.layers.linear import product, product_with_bias
from moejax.layers.mlp import activate
from moejax.pallas import dispatch
from moejax.pallas.dispatch import Kernels
from moejax.pallas.tiles import make_tiles

MAX_TILE = 64


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
class ByKernels:
    """Experts in the pages of an arena, and the kernels that multiply with them."""

    paged: Paged
    kernels: Kernels

    @property
    def num_experts(self) -> int:
        return self.paged.num_experts

    def weights(self, expert: Int32[Array, ""]) -> ExpertWeights:
        return self.paged.weights(expert)


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
    if isinstance(experts, ByKernels):
        return dispatch.run_experts(
            x,
            topk_ids,
            topk_weights,
            valid,
            experts.paged,
            experts.kernels,
            activation=activation,
            weights_input=weights_input,
            bias=bias,
        )
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
