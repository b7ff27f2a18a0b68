"""The projections around grouped-query attention, against NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.filled import fill, normal, rms, wide
from moejax.config import Attention, AttentionTemperature, Rope
from moejax.layers.attention import Qkv
from moejax.layers.gqa import AttentionLayer, heat

HIDDEN, TOKENS, EPSILON = 12, 3, 1e-3
HEADS, KV_HEADS, SIZE = 4, 2, 6
POSITIONS = np.array([0, 5, 12], np.int32)


def make_part(**options: Any) -> Attention:
    shape: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE}
    return Attention(**shape | {"scale": 1.0, "rope": Rope(theta=100.0)} | options)


def make_layer(part: Attention, *, dtype: str = "float32") -> AttentionLayer:
    options: Any = {"epsilon": EPSILON, "rounds_late": False, "stack": (), "dtype": dtype}
    return fill(AttentionLayer(part, HIDDEN, **options))


def project(layer: AttentionLayer, x: np.ndarray, positions: np.ndarray = POSITIONS) -> Qkv:
    uses_long = jnp.zeros(len(x), bool)
    return jax.jit(layer.project)(jnp.asarray(x), jnp.asarray(positions), uses_long)


def rotated(x: np.ndarray, rope: Rope) -> np.ndarray:
    """Dimensions i and i + 3, or 2 i and 2 i + 1, as one complex number, turned."""
    turn = np.exp(1j * POSITIONS[:, None, None] * 100.0 ** (-np.arange(3) / 3))
    if rope.pairing == "half":
        z = (x[..., :3] + 1j * x[..., 3:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def by_the_book(layer: AttentionLayer, x: np.ndarray) -> dict[str, np.ndarray]:
    """q, k and v of a layer: projection, norm, clip, rotation, norm, temperature."""
    part, found = layer.part, {}
    for name in ("q", "k", "v"):
        linear = layer.k if name == "v" and part.keys_are_values else getattr(layer, name)
        y = x @ wide(linear.weight).T
        if part.qkv_bias:
            y = y + wide(linear.bias)
        if name != "v" and part.qk_norm == "projection":
            y = rms(y, EPSILON, wide(getattr(layer, f"{name}_norm").weight))
        y = y.reshape(TOKENS, -1, SIZE)
        if name != "v" and part.qk_norm == "head":
            y = rms(y, EPSILON, wide(getattr(layer, f"{name}_norm").weight))
        if name == "v" and part.v_norm:
            y = rms(y, EPSILON)
        if part.qkv_clip is not None:
            y = np.clip(y, -part.qkv_clip, part.qkv_clip)
        if name != "v" and part.rope is not None:
            y = rotated(y, part.rope)
        if name != "v" and part.qk_norm == "rotated":
            y = rms(y, EPSILON)
        if name == "q" and part.temperature is not None:
            steps = np.floor((POSITIONS + 1) / part.temperature.floor)
            y = y * (1 + part.temperature.scale * np.log(1 + steps))[:, None, None]
        found[name] = y
    return found


PARTS = {
    "plain": {},
    "bias": {"qkv_bias": True},
    "head": {"qkv_bias": True, "qk_norm": "head"},
    "projection": {"qk_norm": "projection"},
    "clip": {"qkv_clip": 0.75},
    "head, clip": {"qk_norm": "head", "qkv_clip": 0.75},
    "projection, clip": {"qk_norm": "projection", "qkv_clip": 0.75},
    "rotated": {"qk_norm": "rotated", "rope": Rope(theta=100.0, pairing="neighbors")},
    "v_norm": {"v_norm": True, "qk_norm": "head"},
    "keys are values": {"keys_are_values": True, "qkv_bias": True},
    "keys are values, norms": {"keys_are_values": True, "qk_norm": "head", "v_norm": True},
    "keys are values, projection": {"keys_are_values": True, "qk_norm": "projection"},
    "no positions": {"rope": None},
    "temperature": {"rope": None, "temperature": AttentionTemperature(scale=0.5, floor=4.0)},
}


@pytest.mark.parametrize("name", PARTS)
def test_projections_are_normed_clipped_and_rotated_in_this_order(name: str) -> None:
    layer = make_layer(make_part(**PARTS[name]))
    x = normal(TOKENS, HIDDEN, seed=1)
    found, wanted = project(layer, x), by_the_book(layer, x)
    assert found.v is not None and found.sinks is None
    for part, y in (("q", found.q), ("k", found.k), ("v", found.v)):
        np.testing.assert_allclose(y, wanted[part], atol=1e-5, err_msg=part)


def test_every_option_changes_something() -> None:
    """What the test above compares is not the same for all of them."""
    x = normal(TOKENS, HIDDEN, seed=1)
    found = {}
    for name, options in PARTS.items():
        layer = make_layer(make_part(**options))
        found[name] = np.concatenate([y.reshape(-1) for y in by_the_book(layer, x).values()])
    names = list(found)
    for i, name in enumerate(names):
        for other in names[:i]:
            assert np.abs(found[name] - found[other]).max() > 0.01, (name, other)


def test_without_rotary_positions_a_token_is_the_same_everywhere() -> None:
    layer = make_layer(make_part(rope=None, qk_norm="head"))
    x = np.repeat(normal(1, HIDDEN), TOKENS, axis=0)
    found = project(layer, x)
    for y in (found.q, found.k, found.v):
        np.testing.assert_array_equal(y, np.repeat(y[:1], TOKENS, axis=0))


@pytest.mark.parametrize("parts", [{}, {"qk_norm": "head"}], ids=["plain", "norm"])
def test_where_keys_are_values_there_is_no_projection_of_values(parts: dict[str, Any]) -> None:
    assert hasattr(make_layer(make_part(**parts)), "v")
    assert not hasattr(make_layer(make_part(keys_are_values=True, **parts)), "v")


def test_sinks_go_along_with_the_queries() -> None:
    layer = make_layer(make_part(sinks=True))
    found = project(layer, normal(TOKENS, HIDDEN))
    assert found.sinks is not None and found.sinks.shape == (HEADS,)
    np.testing.assert_array_equal(found.sinks, layer.sinks[...])


# The temperature.


def test_a_temperature_by_hand() -> None:
    # Floor 4: positions 0 to 2 are below one step, 3 has one, 11 has three.
    positions = jnp.array([0, 2, 3, 6, 11], jnp.int32)
    temperature = AttentionTemperature(scale=0.5, floor=4.0)
    found = heat(jnp.ones((5, 1, 1)), positions, temperature)
    ln2, ln4 = np.log(2), np.log(4)
    wanted = [1, 1, 1 + ln2 / 2, 1 + ln2 / 2, 1 + ln4 / 2]
    np.testing.assert_allclose(np.asarray(found)[:, 0, 0], wanted, rtol=1e-6)


def test_a_temperature_is_rounded_once() -> None:
    # In bfloat16 the factor 1.0693 would be 1.0703 before it multiplies.
    q = jnp.asarray(normal(1, 1, 64), jnp.bfloat16)
    temperature = AttentionTemperature(scale=0.1, floor=8192.0)
    found = heat(q, jnp.array([8191], jnp.int32), temperature)
    factor = np.float32(1 + 0.1 * np.log(2))
    wanted = jnp.asarray(np.asarray(q, np.float32) * factor, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    assert (np.asarray(found) != np.asarray(wanted)).sum() <= 1
    assert (np.asarray(found) != np.asarray(q * jnp.bfloat16(factor))).sum() > 5


# The output, and what there is.


def test_the_output_projection_takes_heads_in_order() -> None:
    layer = make_layer(make_part(output_bias=True))
    o = normal(TOKENS, HEADS, SIZE, seed=2)
    assert layer.o.weight[...].shape == (HIDDEN, 24)
    wanted = o.reshape(TOKENS, 24) @ wide(layer.o.weight).T + wide(layer.o.bias)
    np.testing.assert_allclose(layer.output(jnp.asarray(o)), wanted, atol=1e-5)


def test_biases_norms_and_sinks_are_there_only_where_asked() -> None:
    options: Any = {"epsilon": 1e-6, "rounds_late": False, "stack": (3,), "dtype": "bfloat16"}
    layer = AttentionLayer(make_part(), HIDDEN, **options)
    assert layer.q.bias is None and layer.o.bias is None
    assert not hasattr(layer, "q_norm") and not hasattr(layer, "sinks")
    assert layer.k.weight[...].shape == (3, 12, HIDDEN)
    assert layer.k.weight[...].dtype == jnp.bfloat16
    assert not hasattr(AttentionLayer(make_part(qk_norm="rotated"), HIDDEN, **options), "q_norm")
    layer = AttentionLayer(make_part(sinks=True, qk_norm="head"), HIDDEN, **options)
    assert layer.sinks[...].shape == (3, HEADS)
    assert layer.q_norm.weight[...].shape == layer.k_norm.weight[...].shape == (3, SIZE)
