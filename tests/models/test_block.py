"""What a layer adds to what passes it, and what comes before the first layer and after the last."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from layers.filled import activated, fill, normal, rms, wide
from models.small_configs import HIDDEN, VOCAB, make_config
from moejax.config import (
    AnyAttention,
    Attention,
    LayerKind,
    Mlp,
    MlpAndMoe,
    ModelConfig,
    Moe,
    Router,
)
from moejax.layers.attention import Qkv
from moejax.layers.experts import Stacked
from moejax.models.decoder import Block, Decoder

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOKENS, EPSILON = 5, 1e-3
ATTENTION = Attention(num_heads=2, num_kv_heads=2, head_size=8, scale=1.0, rope=None)
MOE = Moe(
    router=Router(num_experts=2, experts_per_token=2, renormalize=True, float32_weights=True),
    expert_width=6,
)
GATE_UP, DOWN = normal(2, 2, 6, HIDDEN, seed=1), normal(2, HIDDEN, 6, seed=2)


class Tokens(NamedTuple):
    """Tokens that do not see each other: attention gives the values."""

    experts_of_layers: Stacked = Stacked(jnp.asarray(GATE_UP), jnp.asarray(DOWN))

    @property
    def positions(self) -> jax.Array:
        return jnp.arange(TOKENS, dtype=jnp.int32)

    @property
    def valid(self) -> jax.Array:
        return jnp.ones(TOKENS, bool)

    @property
    def uses_long_rope(self) -> jax.Array:
        return jnp.zeros(TOKENS, bool)

    def start(self) -> None:
        return None

    def layers(self, segment: int) -> tuple[Any, ...]:
        return (jnp.zeros(1),)

    def at(self, layer: Any, repeat: jax.Array) -> Any:
        return layer

    def in_place(self, weights: Any) -> tuple[str, ...]:
        return ()

    def linears(self, carry: None, segment: int, index: int, layer: Any) -> dict[str, jax.Array]:
        return {}

    def attend(
        self, carry: None, layer: Any, qkv: Qkv, part: AnyAttention
    ) -> tuple[None, jax.Array]:
        assert qkv.v is not None
        return None, qkv.v

    def experts(self, carry: None, layer: Any) -> Stacked:
        return self.experts_of_layers


def make_model(kind: LayerKind, **options: Any) -> ModelConfig:
    """As a small model, with this epsilon."""
    config = make_config("b")
    # A model needs routed experts somewhere.
    layers = (
        (kind,)
        if kind.moe is not None
        else (kind, LayerKind(attention=ATTENTION, feed_forward=MOE))
    )
    segments = tuple(dataclasses.replace(config.segments[0], period=(layer,)) for layer in layers)
    return dataclasses.replace(config, segments=segments, norm_epsilon=EPSILON, **options)


def normed(norm: Any, x: np.ndarray) -> np.ndarray:
    if hasattr(norm, "bias"):
        centred = x - x.mean(axis=-1, keepdims=True)
        return rms(centred, EPSILON, wide(norm.weight)) + wide(norm.bias)
    return rms(x, EPSILON, wide(norm.weight))


def attended(block: Block, x: np.ndarray) -> np.ndarray:
    """What attention adds, before any norm of it."""
    v = normed(block.attention_norm, x) @ wide(block.attention.v.weight).T
    return v @ wide(block.attention.o.weight).T


def gated(layer: Any, x: np.ndarray) -> np.ndarray:
    gate, up, down = (wide(part.weight) for part in (layer.gate, layer.up, layer.down))
    return activated(x @ gate.T, x @ up.T, "silu") @ down.T


def run(block: Block, x: np.ndarray) -> np.ndarray:
    y, carry = jax.jit(lambda x: block(x, None, None, Tokens()))(jnp.asarray(x))
    assert carry is None
    return np.asarray(y)


# A layer.


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("output_scale", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("post_norms", [False, True], ids=["", "post-norms"])
def test_what_parts_add_may_be_normed_and_the_sum_scaled(
    post_norms: bool, output_scale: bool, norm: str
) -> None:
    kind = LayerKind(
        attention=ATTENTION,
        feed_forward=Mlp(width=7),
        post_norms=post_norms,
        output_scale=output_scale,
    )
    block = fill(Block(kind, make_model(kind, norm=norm), stack=(), dtype="float32"))
    x = wanted = normal(TOKENS, HIDDEN)
    y = attended(block, wanted)
    wanted = wanted + (normed(block.attention_post_norm, y) if post_norms else y)
    y = gated(block.feed_forward, normed(block.feed_forward_norm, wanted))
    wanted = wanted + (normed(block.feed_forward_post_norm, y) if post_norms else y)
    if output_scale:
        wanted = wanted * wide(block.output_scale)[0]
    np.testing.assert_allclose(run(block, x), wanted, atol=2e-5)
    assert hasattr(block, "attention_post_norm") == post_norms
    assert hasattr(block, "output_scale") == output_scale


def test_an_mlp_beside_experts_norms_the_residual_itself() -> None:
    part = MlpAndMoe(mlp=Mlp(width=7), moe=MOE)
    kind = LayerKind(attention=ATTENTION, feed_forward=part, post_norms=True)
    block = fill(Block(kind, make_model(kind), stack=(), dtype="float32"))
    x = normal(TOKENS, HIDDEN)
    middle = x + normed(block.attention_post_norm, attended(block, x))
    layer = block.feed_forward
    dense = normed(layer.mlp_post_norm, gated(layer.mlp, normed(layer.mlp_norm, middle)))
    # Both experts are chosen: their weights are a softmax of the logits.
    logits = middle @ wide(layer.moe.router.weight).T
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    given = normed(layer.moe_norm, middle)
    routed = sum(
        weights[:, e, None]
        * (activated(given @ GATE_UP[e, 0].T, given @ GATE_UP[e, 1].T, "silu") @ DOWN[e].T)
        for e in range(2)
    )
    added = dense + normed(layer.moe_post_norm, routed)
    wanted = middle + normed(block.feed_forward_post_norm, added)
    np.testing.assert_allclose(run(block, x), wanted, atol=5e-5)
    assert not hasattr(block, "feed_forward_norm")


# Before the first layer.


@pytest.mark.parametrize("scale", [None, 53.066], ids=["plain", "scaled"])
def test_the_factor_on_embeddings_is_rounded_to_the_dtype_of_the_weights(
    scale: float | None,
) -> None:
    kind = LayerKind(attention=ATTENTION, feed_forward=MOE)
    config = make_model(kind, embedding_scale=scale)
    # So large an epsilon that the last norm keeps the size of what passes.
    config = dataclasses.replace(config, norm_epsilon=1e6)
    # Layers that add nothing.
    decoder = Decoder(config, dtype="bfloat16")
    nothing = Stacked(jnp.zeros(GATE_UP.shape, jnp.bfloat16), jnp.zeros(DOWN.shape, jnp.bfloat16))
    table = normal(VOCAB, HIDDEN).astype(BFLOAT16)
    decoder.embed.weight[...] = jnp.asarray(table)
    tokens = np.arange(TOKENS, dtype=np.int32)
    hidden, _ = decoder(jnp.asarray(tokens), Tokens(nothing))

    def last_norm(factor: float) -> np.ndarray:
        x = (table[:TOKENS].astype(np.float64) * factor).astype(BFLOAT16).astype(np.float64)
        return rms(x, 1e6).astype(BFLOAT16)

    found = np.asarray(hidden)
    rounded, exact = last_norm(1.0 if scale is None else 53.0), last_norm(53.066)
    assert found.dtype == BFLOAT16
    assert (found != rounded).sum() <= 1
    assert (found != exact).sum() > 10


# After the last layer.


def make_decoder(name: str, **options: Any) -> Decoder:
    config = dataclasses.replace(make_config(name), **options)
    return fill(Decoder(config, dtype="float32"))


def test_a_head_may_have_a_bias() -> None:
    decoder, hidden = make_decoder("phi"), normal(3, HIDDEN)
    assert decoder.head is not None
    wanted = hidden @ wide(decoder.head.weight).T + wide(decoder.head.bias)
    np.testing.assert_allclose(decoder.logits(jnp.asarray(hidden)), wanted, atol=1e-5)
    without = make_decoder("phi", head_bias=False)
    assert without.head is not None and without.head.bias is None


def test_logits_may_be_capped_softly() -> None:
    decoder, hidden = make_decoder("gemma"), 3 * normal(3, HIDDEN)
    logits = hidden @ wide(decoder.embed.weight).T  # tied
    assert decoder.head is None and np.abs(logits).max() > 6
    found = np.asarray(decoder.logits(jnp.asarray(hidden)))
    np.testing.assert_allclose(found, 3 * np.tanh(logits / 3), atol=1e-5)
    assert np.abs(found).max() <= 3


def test_a_bias_and_a_cap_of_bfloat16_are_applied_in_float32() -> None:
    decoder = Decoder(dataclasses.replace(make_config("phi"), logit_softcap=30.0), dtype="bfloat16")
    assert isinstance(decoder.head, nnx.Module) and decoder.head.bias is not None
    decoder.head.weight[...] = jnp.ones_like(decoder.head.weight[...])
    decoder.head.bias[...] = jnp.full_like(decoder.head.bias[...], 2**-8)
    hidden = jnp.zeros((1, HIDDEN), jnp.bfloat16).at[0, 0].set(1)
    logits = decoder.logits(hidden)
    assert logits.dtype == jnp.float32
    # 1 + 2^-8 is 1 in bfloat16.
    np.testing.assert_allclose(logits, 30 * np.tanh((1 + 2**-8) / 30), rtol=1e-6)
