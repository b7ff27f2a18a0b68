"""Products of every token with every expert, for calibration: what `run_experts` gives, otherwise.

Reverse mode of a loop over tiles adds a cotangent of the size of all experts for every tile. Here a
scan over the experts has their weights as its inputs: the gradient of each is written once. That
costs the products of every token with every expert, most of which count nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from moejax.arena.experts import ExpertBias
from moejax.config import Activation
from moejax.layers.experts import Stacked
from moejax.layers.linear import precision_of, product_float32
from moejax.layers.mlp import activate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EveryToken(Stacked):
    """Experts as arrays, each of which every token passes through.

    Weights wider than the tokens are rounded to the dtype of the tokens where they multiply. Their
    gradients are sums in float32, in the dtype of the weights: float32 weights lose nothing.
    """


def run_every_token(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens k"],
    topk_weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    experts: Stacked,
    *,
    activation: Activation = "silu",
    weights_input: bool = False,
    bias: ExpertBias | None = None,
) -> Float[Array, "tokens hidden"]:
    """What `run_experts` gives, with its rounding; an expert stands once in a token's row of ids.

    Reverse mode holds the hidden values of one expert at a time: they are computed again.
    """

    def body(
        total: Float32[Array, "tokens hidden"],
        inputs: tuple[Int32[Array, ""], Stacked, ExpertBias | None],
    ) -> tuple[Array, None]:
        expert, weights, of = inputs
        chosen = (topk_ids == expert) & valid[:, None]
        # As zeros, other tokens cannot overflow to something that times zero is not zero.
        is_in = jnp.any(chosen, axis=1)[:, None]
        rows = jnp.where(is_in, x, 0)
        weight = jnp.sum(jnp.where(chosen, topk_weights, 0), axis=1)[:, None]
        if weights_input:
            rows = rows * weight.astype(x.dtype)
        gate, up = (
            _product(rows, matrix, None if of is None else part)
            for matrix, part in zip(
                weights.gate_up, (None, None) if of is None else of[:2], strict=True
            )
        )
        y = _product(
            activate(gate, up, activation), weights.down, None if of is None else of.down
        ).astype(weight.dtype)
        if not weights_input:
            y = y * weight
        return total + jnp.where(is_in, y, 0).astype(jnp.float32), None

    number = jnp.arange(experts.num_experts, dtype=jnp.int32)
    total, _ = lax.scan(
        jax.checkpoint(body, prevent_cse=False),
        jnp.zeros(x.shape, jnp.float32),
        (number, experts, bias),
    )
    return total.astype(topk_weights.dtype).astype(x.dtype)


def _product(
    x: Float[Array, "m k"], w: Float[Array, "n k"], bias: Float[Array, " n"] | None
) -> Float[Array, "m n"]:
    """x times the transpose of w, plus a bias: summed in float32, in the dtype of x."""
    y = _product_float32(x, w)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    return y.astype(x.dtype)


@jax.custom_vjp
def _product_float32(x: Float[Array, "m k"], w: Float[Array, "n k"]) -> Float32[Array, "m n"]:
    """x times the transpose of w, in float32. The result must be rounded to the dtype of x."""
    return product_float32(x, w.astype(x.dtype))


def _forward(
    x: Float[Array, "m k"], w: Float[Array, "n k"]
) -> tuple[Float32[Array, "m n"], tuple[Array, Array]]:
    return _product_float32(x, w), (x, w)


def _backward(saved: tuple[Array, Array], slope: Float32[Array, "m n"]) -> tuple[Array, Array]:
    x, w = saved
    # It comes through a rounding to the dtype of x, so nothing is lost: the products stay narrow.
    narrow = slope.astype(x.dtype)
    of_x = product_float32(narrow, w.astype(x.dtype).T)
    of_w = lax.dot_general(
        narrow,
        x,
        (((0,), (0,)), ((), ())),
        precision=precision_of(x),
        preferred_element_type=jnp.float32,
    )
    return of_x.astype(x.dtype), of_w.astype(w.dtype)


_product_float32.defvjp(_forward, _backward)
