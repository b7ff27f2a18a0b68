"""What products with experts begin and end with: tokens go to places, and outputs back to tokens.

A slot is a token and one of its experts, a place what a slot has once slots are sorted by expert;
see `Grouping`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from moejax.arena.experts import ExpertBias
from moejax.pallas.grouping import Grouping


def tokens_at(
    place: Int32[Array, "*places"],
    x: Float[Array, "tokens columns"],
    token_of_place: Int32[Array, " slots"],
    place_of_slot: Int32[Array, " slots"],
    weights: Float[Array, "tokens k"] | None,
) -> Float[Array, "*places columns"]:
    """The tokens in places, in the dtype of x; places that do not exist hold any token.

    `weights`: what each token is multiplied with for each of its experts; None: nothing.
    """
    rows = x[token_of_place.at[place].get(mode="clip")]
    if weights is None:
        return rows
    at_place = jnp.zeros(weights.size, x.dtype)
    at_place = at_place.at[place_of_slot].set(weights.reshape(-1).astype(x.dtype), mode="drop")
    return rows * at_place.at[place].get(mode="clip")[..., None]


def tokens_of_tiles(
    x: Float[Array, "tokens columns"],
    grouping: Grouping,
    size: int,
    weights: Float[Array, "tokens k"] | None,
) -> Float[Array, "tiles size columns"]:
    """The tokens of each tile; rows behind its last one hold others. `weights` as above."""
    place = grouping.tiles[:, 1:2] + jnp.arange(size, dtype=jnp.int32)[None, :]
    return tokens_at(place, x, grouping.token_of_place, grouping.place_of_slot, weights)


def sum_of_experts(
    y: Float[Array, "places hidden"],
    place_of_slot: Int32[Array, " slots"],
    weights: Float[Array, "tokens k"],
    *,
    weights_input: bool,
) -> Float[Array, "tokens hidden"]:
    """The weighted sum of the outputs of each token's experts, in the dtype of y.

    It is computed in the dtype of the weights. Slots without a place, such as those of invalid
    tokens, give nothing. `weights_input`: the weights were multiplied into the inputs already.
    """
    tokens, k = weights.shape
    y = y.at[place_of_slot].get(mode="fill", fill_value=0).reshape(tokens, k, -1)
    factors = jnp.ones_like(weights) if weights_input else weights
    total = jnp.sum(y.astype(weights.dtype) * factors[:, :, None], axis=1)
    return total.astype(y.dtype)


def join_biases(
    bias: ExpertBias | None,
) -> tuple[Float[Array, "experts 2 width"] | None, Float[Array, "experts hidden"] | None]:
    """Of gate_up and of down, as kernels take them."""
    if bias is None:
        return None, None
    return jnp.stack([bias.gate, bias.up], axis=1), bias.down
