"""One decoder for every family: embedding, segments of layers, norm, head.

A segment is scanned over its repeats, with its period unrolled. What the layers attend to and where
their experts lie is a `Memory`: the arena (`paged.py`), or plain arrays (`whole.py`).
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from moejax.config import LayerKind, Mlp, ModelConfig
from moejax.layers.attention import AttentionLayer, Qkv
from moejax.layers.experts import Experts
from moejax.layers.linear import Embedding, Linear, RmsNorm, Stack, product_float32
from moejax.layers.mlp import MlpLayer
from moejax.layers.moe import MoeLayer

Params = dict[str, Any]
"""The decoder's weights, without routed experts, as a plain nested dictionary."""


@runtime_checkable
class Memory(Protocol):
    """What layers read and write beside their weights.

    `carry` is threaded through all layers. `layer` is one layer's part of `layers(segment)`.
    """

    @property
    def positions(self) -> Int32[Array, " tokens"]: ...

    @property
    def valid(self) -> Bool[Array, " tokens"]: ...

    def start(self) -> Any:
        """The carry before the first layer."""
        ...

    def layers(self, segment: int) -> tuple[Any, ...]:
        """For each kind of the segment's period, its layers' inputs, stacked over the repeats."""
        ...

    def attend(
        self, carry: Any, layer: Any, qkv: Qkv, window: int | None, scale: float
    ) -> tuple[Any, Float[Array, "tokens heads size"]]:
        """Keeps the new keys and values, and attends to all that the tokens see."""
        ...

    def experts(self, carry: Any, layer: Any) -> Experts:
        """The routed experts of a layer."""
        ...


class Block(nnx.Module):
    """One layer: x += attention(norm(x)), then x += feed_forward(norm(x))."""

    def __init__(self, kind: LayerKind, config: ModelConfig, *, stack: Stack, dtype: str) -> None:
        hidden, epsilon = config.hidden_size, config.norm_epsilon
        self.attention_norm = RmsNorm(hidden, epsilon=epsilon, stack=stack, dtype=dtype)
        self.attention = AttentionLayer(
            kind.attention, hidden, epsilon=epsilon, stack=stack, dtype=dtype
        )
        self.feed_forward_norm = RmsNorm(hidden, epsilon=epsilon, stack=stack, dtype=dtype)
        part = kind.feed_forward
        self.feed_forward: MlpLayer | MoeLayer
        if isinstance(part, Mlp):
            self.feed_forward = MlpLayer(hidden, part.width, stack=stack, dtype=dtype)
        else:
            self.feed_forward = MoeLayer(part, hidden, stack=stack, dtype=dtype)

    def __call__(
        self, x: Float[Array, "tokens hidden"], carry: Any, layer: Any, memory: Memory
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        part = self.attention.part
        qkv = self.attention.project(self.attention_norm(x), memory.positions)
        carry, o = memory.attend(carry, layer, qkv, part.window, part.scale)
        x = x + self.attention.output(o)
        y = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, MlpLayer):
            return x + self.feed_forward(y), carry
        return x + self.feed_forward(y, memory.valid, memory.experts(carry, layer)), carry


class Decoder(nnx.Module):
    """A decoder-only model without its routed experts."""

    def __init__(self, config: ModelConfig, *, dtype: str) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.segments = nnx.List(
            [
                nnx.List(
                    [
                        Block(kind, config, stack=(segment.repeats,), dtype=dtype)
                        for kind in segment.period
                    ]
                )
                for segment in config.segments
            ]
        )
        self.norm = RmsNorm(config.hidden_size, epsilon=config.norm_epsilon, dtype=dtype)
        # flax.nnx wants an attribute set once: None is static, a module is not.
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, dtype=dtype)
        )

    def __call__(
        self, tokens: Int32[Array, " tokens"], memory: Memory
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        """The normed hidden states after the last layer, and the final carry."""
        state = self.embed(tokens), memory.start()
        for number, blocks in enumerate(self.segments):
            graph, weights = nnx.split(blocks)

            def body(state: Any, inputs: Any, graph: Any = graph) -> tuple[Any, None]:
                x, carry = state
                weights, layers = inputs
                for block, layer in zip(nnx.merge(graph, weights), layers, strict=True):
                    x, carry = block(x, carry, layer, memory)
                return (x, carry), None

            state, _ = lax.scan(body, state, (weights, memory.layers(number)))
        x, carry = state
        return self.norm(x), carry

    def logits(self, hidden: Float[Array, "tokens hidden"]) -> Float[Array, "tokens vocab"]:
        """The scores of the next token, in float32."""
        head = self.embed if self.head is None else self.head
        return product_float32(hidden, head.weight[...])


def abstract_params(config: ModelConfig, dtype: str) -> Params:
    """Shapes and dtypes of a decoder's weights; no memory is taken."""
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype))
    params: Params = nnx.to_pure_dict(nnx.state(decoder))
    return params


def bind(config: ModelConfig, dtype: str, params: Params) -> Decoder:
    """A decoder with these weights. Called while a program is traced; costs no device time."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype)))
    nnx.replace_by_pure_dict(state, params)
    decoder: Decoder = nnx.merge(graph, state)
    return decoder


def flatten_params(params: Params) -> dict[str, Any]:
    """The weights by name, such as `segments.0.0.attention.q.weight`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def unflatten_params(named: dict[str, Any], like: Params) -> Params:
    """The inverse of `flatten_params`, for the structure of `like`."""
    names = list(flatten_params(like))
    params: Params = jax.tree.unflatten(jax.tree.structure(like), [named[n] for n in names])
    return params


def params_bytes(params: Params) -> int:
    """Bytes of all weights, of arrays or of their shapes."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(params))
