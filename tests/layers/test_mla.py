"""Latent attention in absorbed form, against each head's own keys and values in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.filled import fill, normal, rms, wide
from moejax.config import Mla, Reach, Rope
from moejax.layers.attention import attend, join_kv, split_kv, visible
from moejax.layers.mla import MlaLayer, per_head

HIDDEN, TOKENS = 20, 7
HEADS, LATENT, NOPE, ROPE, VALUE, Q_LATENT = 3, 10, 6, 4, 5, 8
EPSILON = 1e-3
POSITIONS = np.arange(TOKENS, dtype=np.int32)


def make_part(*, q_latent: int | None, pairing: Any = "neighbors", bias: bool = False) -> Mla:
    return Mla(
        num_heads=HEADS,
        q_latent_size=q_latent,
        latent_size=LATENT,
        nope_size=NOPE,
        rope_size=ROPE,
        value_size=VALUE,
        scale=0.7,
        rope=Rope(theta=50.0, pairing=pairing),
        latent_norm_epsilon=EPSILON,
        bias=bias,
    )


def make_layer(part: Mla, *, dtype: str = "float32") -> MlaLayer:
    return fill(MlaLayer(part, HIDDEN, rounds_late=False, stack=(), dtype=dtype))


def run(layer: MlaLayer, x: np.ndarray) -> np.ndarray:
    """The layer over a whole sequence, through what it caches."""

    @jax.jit
    def attention(x: jax.Array) -> jax.Array:
        positions = jnp.arange(len(x), dtype=jnp.int32)
        qkv = layer.project(x, positions, jnp.zeros(len(x), bool))
        k, v = split_kv(join_kv(qkv), layer.part)
        mask = visible(positions, positions, Reach())
        return layer.output(attend(qkv.q, k, v, mask, layer.part.scale))

    return np.asarray(attention(jnp.asarray(x)))


def rotated(x: np.ndarray, pairing: str) -> np.ndarray:
    """[tokens, heads, size] turned by theta^(-2 i / size) per position."""
    half = ROPE // 2
    turn = np.exp(1j * np.arange(len(x))[:, None, None] * 50.0 ** (-np.arange(half) / half))
    if pairing == "half":
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def linear(layer: Any, x: np.ndarray) -> np.ndarray:
    y = x @ wide(layer.weight).T
    return y if layer.bias is None else y + wide(layer.bias)


def expanded(layer: MlaLayer, x: np.ndarray) -> np.ndarray:
    """Keys and values of every head, and softmax attention over them, in float64."""
    part, x = layer.part, x.astype(np.float64)
    if part.q_latent_size is None:
        q = linear(layer.q, x)
    else:
        latent = rms(linear(layer.q_down, x), EPSILON, wide(layer.q_latent_norm.weight))
        q = linear(layer.q_up, latent)
    q = q.reshape(len(x), HEADS, NOPE + ROPE)
    compressed = linear(layer.kv_down, x)
    latent = rms(compressed[:, :LATENT], EPSILON, wide(layer.latent_norm.weight))
    shared = rotated(compressed[:, None, LATENT:], part.rope.pairing)[:, 0]
    q_rope = rotated(q[..., NOPE:], part.rope.pairing)
    heads = []
    for head in range(HEADS):
        k = np.concatenate([latent @ wide(layer.k_up)[head].T, shared], axis=1)
        v = latent @ wide(layer.v_up)[head].T
        scores = np.concatenate([q[:, head, :NOPE], q_rope[:, head]], axis=1) @ k.T * part.scale
        weights = np.where(np.tri(len(x), dtype=bool), np.exp(scores - scores.max()), 0)
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ v)
    return linear(layer.o, np.concatenate(heads, axis=1))


@pytest.mark.parametrize(
    "options",
    [
        {"q_latent": None},
        {"q_latent": Q_LATENT},
        {"q_latent": Q_LATENT, "bias": True},
        {"q_latent": None, "pairing": "half", "bias": True},
    ],
    ids=str,
)
def test_absorbed_attention_is_that_of_expanded_heads(options: dict[str, Any]) -> None:
    layer = make_layer(make_part(**options))
    x = normal(TOKENS, HIDDEN)
    wanted = expanded(layer, x)
    np.testing.assert_allclose(run(layer, x), wanted, atol=1e-5)
    assert np.abs(wanted).max() > 0.1


def test_a_token_caches_its_normed_latent_and_its_rotated_key() -> None:
    layer = make_layer(make_part(q_latent=None))
    x = normal(TOKENS, HIDDEN)
    inputs = jnp.asarray(x), jnp.asarray(POSITIONS), jnp.zeros(TOKENS, bool)
    qkv = jax.jit(layer.project)(*inputs)
    compressed = linear(layer.kv_down, x)
    latent = rms(compressed[:, :LATENT], EPSILON, wide(layer.latent_norm.weight))
    key = rotated(compressed[:, None, LATENT:], "neighbors")[:, 0]
    assert qkv.v is None and qkv.q.shape == (TOKENS, HEADS, LATENT + ROPE)
    np.testing.assert_allclose(join_kv(qkv), np.concatenate([latent, key], axis=1), atol=1e-5)


def test_a_single_token_in_bfloat16_is_like_any_other() -> None:
    layer = make_layer(make_part(q_latent=Q_LATENT), dtype="bfloat16")
    x = np.asarray(jnp.asarray(normal(1, HIDDEN), jnp.bfloat16))
    found = run(layer, x)
    assert found.shape == (1, HIDDEN) and found.dtype == x.dtype
    wanted = expanded(layer, x.astype(np.float64))
    np.testing.assert_allclose(found.astype(np.float64), wanted, atol=0.02 * np.abs(wanted).max())
    # The first of several tokens sees itself only: the same.
    several = run(layer, np.repeat(x, 3, axis=0))
    one, first = (y[0].astype(np.float64) for y in (found, several))
    np.testing.assert_allclose(first, one, rtol=2**-6, atol=2**-6 * np.abs(one).max())


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("axis", [1, 2])
def test_each_head_has_a_matrix_of_its_own(axis: int, tokens: int) -> None:
    x, w = normal(tokens, 3, 4), normal(3, 4, 4, seed=1)
    for dtype, atol in (("float32", 1e-5), ("bfloat16", 0.05)):
        found = per_head(jnp.asarray(x, dtype), jnp.asarray(w, dtype), axis)
        wanted = np.einsum("thk,hkm->thm" if axis == 1 else "thk,hmk->thm", x, w)
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=atol)


def test_products_of_heads_are_summed_in_float32() -> None:
    # In bfloat16, 1 + 2^-8 is 1: a sum in it would stay at 1.
    x = jnp.ones((2, 1, 257), jnp.bfloat16)
    w = jnp.full((1, 1, 257), 2.0**-8, jnp.bfloat16).at[0, 0, 0].set(1)
    assert per_head(x, w, 2).tolist() == [[[2.0]], [[2.0]]]
    assert per_head(x[:1], w, 2).tolist() == [[[2.0]]]


def test_biases_are_on_latents_and_output() -> None:
    for bias in (False, True):
        layer = make_layer(make_part(q_latent=Q_LATENT, bias=bias))
        assert all(
            (part.bias is not None) == bias for part in (layer.q_down, layer.kv_down, layer.o)
        )
        assert layer.q_up.bias is None
    assert make_layer(make_part(q_latent=None, bias=True)).q.bias is None


def test_a_stack_leads_the_shapes_of_weights() -> None:
    part = make_part(q_latent=Q_LATENT)
    layer = MlaLayer(part, HIDDEN, rounds_late=False, stack=(2,), dtype="bfloat16")
    assert layer.k_up[...].shape == (2, HEADS, NOPE, LATENT)
    assert layer.v_up[...].shape == (2, HEADS, VALUE, LATENT)
    assert layer.kv_down.weight[...].shape == (2, LATENT + ROPE, HIDDEN)
    assert layer.q_latent_norm.weight[...].shape == (2, Q_LATENT)
    assert layer.o.weight[...].shape == (2, HIDDEN, HEADS * VALUE)
    assert {leaf.dtype for leaf in jax.tree.leaves(layer)} == {jnp.dtype("bfloat16")}
