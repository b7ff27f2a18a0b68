"""One decoder for every family: embedding, segments of layers, norm, head.

A segment is scanned over its repeats, with its period unrolled. What the layers attend to and where
their experts lie is a `Memory`: the arena (`paged.py`), or plain arrays (`whole.py`).
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from moejax.config import AnyAttention, LayerKind, Mla, Mlp, MlpAndMoe, ModelConfig, Moe
from moejax.layers.attention import Qkv
from moejax.layers.experts import Experts
from moejax.layers.gqa import AttentionLayer
from moejax.layers.linear import (
    Embedding,
    LayerMatrix,
    LayerVector,
    Linear,
    Norm,
    Stack,
    add_and_norm,
    make_norm,
    product_float32,
)
from moejax.layers.mla import MlaLayer
from moejax.layers.mlp import MlpLayer
from moejax.layers.moe import MlpAndMoeLayer, MoeLayer
from moejax.layers.router import Routing

Params = dict[Any, Any]
"""The decoder's weights, without routed experts, as a plain nested dictionary."""


@runtime_checkable
class Memory(Protocol):
    """What layers read and write beside their weights.

    `carry` is threaded through all layers. `layer` is what `at` gives for one layer.
    """

    @property
    def positions(self) -> Int32[Array, " tokens"]: ...

    @property
    def valid(self) -> Bool[Array, " tokens"]: ...

    @property
    def uses_long_rope(self) -> Bool[Array, " tokens"]:
        """Which tokens take the long factors of longrope."""
        ...

    def start(self) -> Any:
        """The carry before the first layer."""
        ...

    def layers(self, segment: int) -> tuple[Any, ...]:
        """For each kind of the segment's period, its layers' inputs, stacked over the repeats."""
        ...

    def at(self, layer: Any, repeat: Int32[Array, ""]) -> Any:
        """A layer, from its part of `layers(segment)` and its number in the scan."""
        ...

    def in_place(self, weights: Mapping[str, Float[Array, "..."]]) -> Collection[str]:
        """Which of the weights of all layers of a segment are read in place, by kernels.

        The others are sliced by the scan over layers.
        """
        ...

    def linears(self, carry: Any, segment: int, index: int, layer: Any) -> dict[str, Any]:
        """The matrices of a layer that are not among the decoder's weights, by their names in it.

        Each is an array [rows, columns], or a StoredMatrix that reads the memory when it is used.
        `segment` and `index` say which block of which period the layer is of.
        """
        ...

    def attend(
        self, carry: Any, layer: Any, qkv: Qkv, part: AnyAttention
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
        options: Any = {"stack": stack, "dtype": dtype}
        rounds_late = config.norm == "rms_float32"

        def norm() -> Norm:
            return make_norm(config.norm, hidden, epsilon=epsilon, **options)

        self.kind = kind
        self.attention_norm = norm()
        self.attention: AttentionLayer | MlaLayer
        if isinstance(kind.attention, Mla):
            self.attention = MlaLayer(kind.attention, hidden, rounds_late=rounds_late, **options)
        else:
            self.attention = AttentionLayer(
                kind.attention, hidden, epsilon=epsilon, rounds_late=rounds_late, **options
            )
        part = kind.feed_forward
        self.feed_forward: MlpLayer | MoeLayer | MlpAndMoeLayer
        if isinstance(part, Mlp):
            self.feed_forward = MlpLayer(hidden, part.width, part.activation, **options)
        elif isinstance(part, Moe):
            self.feed_forward = MoeLayer(part, hidden, epsilon=epsilon, **options)
        else:
            self.feed_forward = MlpAndMoeLayer(
                part, hidden, norm=config.norm, epsilon=epsilon, **options
            )
        if not isinstance(part, MlpAndMoe):
            self.feed_forward_norm = norm()
        if kind.post_norms:
            self.attention_post_norm, self.feed_forward_post_norm = norm(), norm()
        if kind.output_scale:
            self.output_scale = nnx.Param(jnp.ones((*stack, 1), dtype))

    def __call__(
        self, x: Float[Array, "tokens hidden"], carry: Any, layer: Any, memory: Memory
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        y, carry = self._attention(x, carry, layer, memory)
        if isinstance(self.feed_forward, MlpAndMoeLayer):
            x, normed = x + y, None
        else:
            x, normed = add_and_norm(x, y, self.feed_forward_norm)
        return self._add_feed_forward(x, normed, carry, layer, memory), carry

    def add_attention(
        self, x: Float[Array, "tokens hidden"], carry: Any, layer: Any, memory: Memory
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        """The first half: x + attention(norm(x)), and the carry."""
        y, carry = self._attention(x, carry, layer, memory)
        return x + y, carry

    def _attention(
        self, x: Float[Array, "tokens hidden"], carry: Any, layer: Any, memory: Memory
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        qkv = self.attention.project(
            self.attention_norm(x), memory.positions, memory.uses_long_rope
        )
        carry, o = memory.attend(carry, layer, qkv, self.kind.attention)
        y = self.attention.output(o)
        return self.attention_post_norm(y) if self.kind.post_norms else y, carry

    def route(self, x: Float[Array, "tokens hidden"]) -> Routing:
        """Where the second half sends tokens, of a layer with routed experts."""
        part = self.feed_forward
        if isinstance(part, MlpLayer):
            raise ValueError("a layer without routed experts sends tokens nowhere")
        if isinstance(part, MlpAndMoeLayer):
            return part.moe.router(x)
        return part.router(self.feed_forward_norm(x))

    def add_feed_forward(
        self, x: Float[Array, "tokens hidden"], carry: Any, layer: Any, memory: Memory
    ) -> Float[Array, "tokens hidden"]:
        """The second half: x + feed_forward(norm(x)), scaled where the kind says so."""
        normed = None
        if not isinstance(self.feed_forward, MlpAndMoeLayer):
            normed = self.feed_forward_norm(x)
        return self._add_feed_forward(x, normed, carry, layer, memory)

    def _add_feed_forward(
        self,
        x: Float[Array, "tokens hidden"],
        normed: Float[Array, "tokens hidden"] | None,
        carry: Any,
        layer: Any,
        memory: Memory,
    ) -> Float[Array, "tokens hidden"]:
        """`normed`: the norm of x; None for layers that have none of their own."""
        y = self._feed_forward(x if normed is None else normed, carry, layer, memory)
        x = x + (self.feed_forward_post_norm(y) if self.kind.post_norms else y)
        return x * self.output_scale[...][None, :] if self.kind.output_scale else x

    def _feed_forward(
        self, x: Float[Array, "tokens hidden"], carry: Any, layer: Any, memory: Memory
    ) -> Float[Array, "tokens hidden"]:
        part = self.feed_forward
        if isinstance(part, MlpAndMoeLayer):
            return part(x, memory.valid, memory.experts(carry, layer))
        if isinstance(part, MlpLayer):
            return part(x)
        return part(x, memory.valid, memory.experts(carry, layer))


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
        self.norm = make_norm(
            config.norm, config.hidden_size, epsilon=config.norm_epsilon, dtype=dtype
        )
        # flax.nnx wants an attribute set once: None is static, a module is not.
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=config.head_bias, dtype=dtype)
        )

    def __call__(
        self, tokens: Int32[Array, " tokens"], memory: Memory
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        """The normed hidden states after the last layer, and the final carry."""
        state = self.embedded(tokens), memory.start()
        for number, blocks in enumerate(self.segments):
            graph, weights = nnx.split(blocks)
            named = flatten_params(nnx.to_pure_dict(weights))
            # What `bind` was not given lies in the memory.
            present = {n: w for n, w in named.items() if not isinstance(w, jax.ShapeDtypeStruct)}
            names_in_place = memory.in_place(present)
            stacks = {n: w for n, w in present.items() if n in names_in_place}
            scanned = {n: w for n, w in present.items() if n not in stacks}

            def body(
                state: Any,
                inputs: Any,
                graph: Any = graph,
                names: tuple[str, ...] = tuple(named),
                number: int = number,
                stacks: dict[str, Array] = stacks,
            ) -> tuple[Any, None]:
                x, carry, repeat = state
                weights, layers = inputs
                layers = tuple(memory.at(layer, repeat) for layer in layers)
                in_place = {
                    n: LayerMatrix(w, repeat) if w.ndim == 3 else LayerVector(w, repeat)
                    for n, w in stacks.items()
                }
                elsewhere = {
                    f"{index}.{name}": weight
                    for index, layer in enumerate(layers)
                    for name, weight in memory.linears(carry, number, index, layer).items()
                }
                arrays = {n: w for n, w in elsewhere.items() if isinstance(w, jax.Array)}
                if arrays:
                    # They are read before the carry changes: else XLA may copy it.
                    carry, arrays = lax.optimization_barrier((carry, arrays))
                found = weights | in_place | elsewhere | arrays
                weights = nest_params({name: found[name] for name in names})
                for block, layer in zip(nnx.merge(graph, nnx.State(weights)), layers, strict=True):
                    x, carry = block(x, carry, layer, memory)
                return (x, carry, repeat + 1), None

            # Layers are counted in the carry: numbers that are scanned would be copied.
            x, carry = state
            (x, carry, _), _ = lax.scan(
                body,
                (x, carry, jnp.int32(0)),
                (scanned, memory.layers(number)),
                length=self.config.segments[number].repeats,
            )
            state = x, carry
        x, carry = state
        return self.norm(x), carry

    def embedded(self, tokens: Int32[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """What goes into the first layer."""
        x = self.embed(tokens)
        if self.config.embedding_scale is not None:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        return x

    def logits(self, hidden: Float[Array, "tokens hidden"]) -> Float[Array, "tokens vocab"]:
        """The scores of the next token, in float32."""
        head = self.embed if self.head is None else self.head
        logits = product_float32(hidden, head.weight[...])
        if isinstance(head, Linear) and head.bias is not None:
            logits = logits + head.bias[...].astype(jnp.float32)[None, :]
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def abstract_params(config: ModelConfig, dtype: str) -> Params:
    """Shapes and dtypes of a decoder's weights; no memory is taken."""
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype))
    params: Params = nnx.to_pure_dict(nnx.state(decoder))
    return params


def bind(config: ModelConfig, dtype: str, params: Params) -> Decoder:
    """A decoder with these weights. Called while a program is traced; costs no device time.

    Matrices of layers may be missing: those that the memory gives.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype)))
    nnx.replace_by_pure_dict(state, params)
    decoder: Decoder = nnx.merge(graph, state)
    return decoder


def bind_block(kind: LayerKind, config: ModelConfig, dtype: str, params: Params) -> Block:
    """One layer with these weights, which are not stacked. Like `bind`."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Block(kind, config, stack=(), dtype=dtype)))
    nnx.replace_by_pure_dict(state, params)
    block: Block = nnx.merge(graph, state)
    return block


def flatten_params(params: Params) -> dict[str, Any]:
    """The weights by name, such as `segments.0.0.attention.q.weight`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def nest_params(named: dict[str, Any]) -> Params:
    """The inverse of `flatten_params`. Parts of names that are numbers become numbers."""
    params: Params = {}
    for name, leaf in named.items():
        *path, last = (int(part) if part.isdigit() else part for part in name.split("."))
        at: Any = params
        for part in path:
            at = at.setdefault(part, {})
        at[last] = leaf
    return params


def params_bytes(params: Params) -> int:
    """Bytes of all weights, of arrays or of their shapes."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(params))
