"""The programs of a calibration: one sequence through one layer, forward or backward.

Each is compiled once for each kind of layer: the weights of the layer are arguments.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from moejax.arena.geometry import LinearShape
from moejax.arena.state import decode_dense
from moejax.config import LayerKind, ModelConfig
from moejax.layers.every_token import EveryToken
from moejax.models.decoder import Decoder, Params, bind, bind_block, nest_params
from moejax.models.whole import WholeMemory, takes_long_rope

# Places whose logits exist at the same time.
_TILE = 128


class Sums(NamedTuple):
    """Sums over sequences of squared gradients, in float32."""

    experts: EveryToken | None
    linears: dict[str, Float32[Array, "rows columns"]]


class Backward(NamedTuple):
    """What a sequence on its way back through a layer gives beside `Sums`."""

    slopes: Float[Array, "length hidden"]
    """The gradient with respect to the layer's input."""
    tokens: Int32[Array, " experts"] | None
    """How many of the sequence's tokens each expert was chosen by."""
    is_finite: Bool[Array, ""]


@partial(jax.jit, static_argnames=("config", "dtype"))
def embed(
    params: Params, tokens: Int32[Array, " length"], *, config: ModelConfig, dtype: str
) -> Float[Array, "length hidden"]:
    """The input of the first layer."""
    return bind(config, dtype, params).embedded(tokens)


@partial(jax.jit, static_argnames=("kind", "config", "dtype"))
def forward(
    weights: dict[str, Array],
    experts: EveryToken | None,
    x: Float[Array, "length hidden"],
    *,
    kind: LayerKind,
    config: ModelConfig,
    dtype: str,
) -> tuple[Float[Array, "length hidden"], Bool[Array, ""]]:
    """The layer's output, and whether it is finite."""
    y, _ = _layer(weights, experts, x, kind, config, dtype)
    return y, jnp.all(jnp.isfinite(y))


@partial(jax.jit, static_argnames=("kind", "config", "dtype"), donate_argnames="sums")
def backward(
    sums: Sums,
    weights: dict[str, Array],
    experts: EveryToken | None,
    x: Float[Array, "length hidden"],
    slopes: Float[Array, "length hidden"],
    *,
    kind: LayerKind,
    config: ModelConfig,
    dtype: str,
) -> tuple[Sums, Backward]:
    """Adds the squares of a sequence's gradients to the sums, which are donated.

    Args:
        sums: its `linears` say which of the weights' gradients are wanted.
        experts: in float32, and then so are their gradients, whatever the dtype of x is.
        x: the layer's input.
        slopes: the gradient of the loss with respect to the layer's output.
    """

    def output(
        x: Array, experts: EveryToken | None, linears: dict[str, Array]
    ) -> tuple[Array, Array | None]:
        rounded = {name: w.astype(weights[name].dtype) for name, w in linears.items()}
        return _layer(weights | rounded, experts, x, kind, config, dtype)

    wide = {name: weights[name].astype(jnp.float32) for name in sums.linears}
    _, pull, topk_ids = jax.vjp(output, x, experts, wide, has_aux=True)
    of_x, of_experts, of_linears = pull(slopes)
    added = jax.tree.map(lambda s, g: s + g * g, sums, Sums(of_experts, of_linears))
    tokens = None
    if topk_ids is not None and experts is not None:
        zeros = jnp.zeros(experts.num_experts, jnp.int32)
        tokens = zeros.at[topk_ids.reshape(-1)].add(1)
    return added, Backward(of_x, tokens, jnp.all(jnp.isfinite(of_x)))


def _layer(
    weights: dict[str, Array],
    experts: EveryToken | None,
    x: Float[Array, "length hidden"],
    kind: LayerKind,
    config: ModelConfig,
    dtype: str,
) -> tuple[Float[Array, "length hidden"], Int32[Array, "length k"] | None]:
    """The output, and the experts that each token chose."""
    block = bind_block(kind, config, dtype, nest_params(weights))
    memory = WholeMemory(config, 1, len(x), {}, takes_long_rope(config, len(x)))
    x, _ = block.add_attention(x, None, experts, memory)
    topk_ids = None if kind.moe is None else block.route(x).topk_ids
    return block.add_feed_forward(x, None, experts, memory), topk_ids


@partial(jax.jit, static_argnames=("config", "dtype"))
def start_backward(
    params: Params,
    x: Float[Array, "length hidden"],
    tokens: Int32[Array, " length"],
    *,
    config: ModelConfig,
    dtype: str,
) -> tuple[Float[Array, "length hidden"], Float32[Array, ""]]:
    """The gradient with respect to x, the last layer's output, of the loss; and the loss.

    The loss is the sum over the places but the last of -log p(the next token).
    """
    length = len(x)
    size = min(_TILE, length)
    number = -(-length // size)

    def tiled(values: Array) -> Array:
        padding = [(0, number * size - length)] + [(0, 0)] * (values.ndim - 1)
        return jnp.pad(values, padding).reshape(number, size, *values.shape[1:])

    decoder = bind(config, dtype, params)

    def of_tile(tile: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        return jax.value_and_grad(partial(_loss, decoder))(*tile)

    counts = jnp.arange(length, dtype=jnp.int32) < length - 1
    losses, slopes = lax.map(of_tile, (tiled(x), tiled(jnp.roll(tokens, -1)), tiled(counts)))
    return slopes.reshape(number * size, -1)[:length], jnp.sum(losses)


def _loss(
    decoder: Decoder,
    x: Float[Array, "tile hidden"],
    targets: Int32[Array, " tile"],
    counts: Bool[Array, " tile"],
) -> Float32[Array, ""]:
    logits = decoder.logits(decoder.norm(x))
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return -jnp.sum(jnp.where(counts, logprobs, 0))


@jax.jit
def take_layer(stacked: dict[str, Array], repeat: Int32[Array, ""]) -> dict[str, Array]:
    """The weights of one layer."""
    return {
        name: lax.dynamic_index_in_dim(w, repeat, keepdims=False) for name, w in stacked.items()
    }


@partial(jax.jit, static_argnames=("shape", "dtype"))
def decode_experts(
    runs: UInt32[Array, "experts words"], *, shape: LinearShape, dtype: str
) -> Float32[Array, "experts parts rows columns"]:
    """The matrices of dense runs of a dtype."""

    def decode(run: Array) -> Array:
        return decode_dense(run, shape, dtype).astype(jnp.float32)

    found: Float32[Array, "experts parts rows columns"] = lax.map(decode, runs)
    return found


@partial(jax.jit, donate_argnums=0)
def finish(sums: Sums, count: Float32[Array, ""]) -> tuple[Sums, Any]:
    """The sums divided by `count`, and for each of them whether all of it is finite."""
    means = jax.tree.map(lambda s: s / count, sums)
    return means, jax.tree.map(lambda s: jnp.all(jnp.isfinite(s)), means)
