"""Products, RMS norm and embedding: values in float64, and the places where they are rounded."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.layers.linear import (
    Embedding,
    LayerNorm,
    Linear,
    RmsNorm,
    make_norm,
    product,
    product_float32,
    unit_rms,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# Products.


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
def test_a_product_is_with_the_transpose(leading: tuple[int, ...]) -> None:
    x, w = normal(*leading, 50), normal(7, 50, seed=1)
    wanted = x.astype(np.float64) @ w.T
    np.testing.assert_allclose(product(jnp.asarray(x), jnp.asarray(w)), wanted, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (1,), (1, 1), (2, 1)], ids=str)
def test_a_single_row_of_bfloat16_is_a_product_like_any_other(leading: tuple[int, ...]) -> None:
    x, w = normal(*leading, 50).astype(BFLOAT16), normal(7, 50, seed=1).astype(BFLOAT16)
    found = product_float32(jnp.asarray(x), jnp.asarray(w))
    assert found.shape == (*leading, 7)
    wanted = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_bfloat16_products_are_summed_in_float32() -> None:
    # In bfloat16, 1 + 2^-8 is 1: a sum in it would stay at 1.
    x = jnp.ones((1, 257), jnp.bfloat16)
    w = jnp.full((1, 257), 2.0**-8, jnp.bfloat16).at[0, 0].set(1)
    assert product(x, w).dtype == jnp.bfloat16
    assert product(x, w).tolist() == [[2.0]]
    assert product_float32(x[:, :2], w[:, :2]).tolist() == [[1 + 2**-8]]


def test_a_bias_is_added_before_rounding() -> None:
    layer = Linear(2, 1, bias=True, dtype="bfloat16")
    layer.weight[...] = jnp.array([[1.0, 2**-8]], jnp.bfloat16)
    assert layer.bias is not None
    layer.bias[...] = jnp.array([2**-8], jnp.bfloat16)
    # 1 + 2^-8 would be rounded to 1, twice.
    assert layer(jnp.ones((1, 2), jnp.bfloat16)).tolist() == [[1 + 2**-7]]


def test_a_linear_is_a_product_and_a_bias() -> None:
    layer = Linear(5, 3, bias=True, dtype="float32")
    weight, bias, x = normal(3, 5), normal(3, seed=1), normal(4, 5, seed=2)
    layer.weight[...] = jnp.asarray(weight)
    assert layer.bias is not None
    layer.bias[...] = jnp.asarray(bias)
    np.testing.assert_allclose(layer(jnp.asarray(x)), x @ weight.T + bias, atol=1e-5)


def test_a_stack_leads_the_shapes_of_weights() -> None:
    layer = Linear(5, 3, bias=True, stack=(4, 2), dtype="bfloat16")
    assert layer.weight[...].shape == (4, 2, 3, 5)
    assert layer.bias is not None and layer.bias[...].shape == (4, 2, 3)
    assert RmsNorm(5, epsilon=1e-6, stack=(4,), dtype="bfloat16").weight[...].shape == (4, 5)
    assert Linear(5, 3, dtype="float32").bias is None
    norm = LayerNorm(5, epsilon=1e-6, stack=(4,), dtype="bfloat16")
    assert norm.weight[...].shape == norm.bias[...].shape == (4, 5)


# RMS norm.


def rms_norm(weight: np.ndarray, epsilon: float, *, rounds_late: bool = False) -> RmsNorm:
    norm = RmsNorm(len(weight), epsilon=epsilon, rounds_late=rounds_late, dtype=weight.dtype.name)
    norm.weight[...] = jnp.asarray(weight)
    return norm


@pytest.mark.parametrize("epsilon", [1e-6, 1e-5, 0.5])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_norm_divides_by_the_root_of_the_mean_square(scale: float, epsilon: float) -> None:
    x, weight = np.float32(scale) * normal(3, 40), normal(40, seed=1)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + epsilon) * weight
    found = rms_norm(weight, epsilon)(jnp.asarray(x))
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)


def test_a_norm_by_hand() -> None:
    # Mean square of 3, 4 and 0, 0 is 6.25, its root 2.5.
    norm = rms_norm(np.array([1, 10, 1, 1], np.float32), 1e-12)
    found = norm(jnp.array([3.0, 4.0, 0.0, 0.0], jnp.float32))
    np.testing.assert_allclose(found, [1.2, 16.0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("rounds_late", [False, True], ids=["early", "late"])
def test_bfloat16_is_rounded_before_the_weight_and_after_or_once(rounds_late: bool) -> None:
    x, weight = normal(20, 64).astype(BFLOAT16), normal(64, seed=1).astype(BFLOAT16)
    wide = x.astype(np.float64)
    unit = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6)
    rounded_first = unit.astype(BFLOAT16) * weight
    rounded_once = (unit * weight.astype(np.float64)).astype(BFLOAT16)
    assert 100 < (rounded_first != rounded_once).sum()
    norm = rms_norm(weight, 1e-6, rounds_late=rounds_late)
    found = np.asarray(jax.jit(norm)(jnp.asarray(x)))
    assert found.dtype == BFLOAT16
    # float32 and float64 may round to different sides, though rarely.
    assert (found != (rounded_once if rounds_late else rounded_first)).sum() <= 2


def test_a_norm_without_a_weight_is_in_float32() -> None:
    x = normal(3, 40).astype(BFLOAT16)
    wide = x.astype(np.float64)
    found = unit_rms(jnp.asarray(x), 1e-3)
    assert found.dtype == jnp.float32
    wanted = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


# Layer norm.


def layer_norm(weight: np.ndarray, bias: np.ndarray, epsilon: float) -> LayerNorm:
    norm = LayerNorm(len(weight), epsilon=epsilon, dtype=weight.dtype.name)
    norm.weight[...], norm.bias[...] = jnp.asarray(weight), jnp.asarray(bias)
    return norm


def test_a_layer_norm_by_hand() -> None:
    # 1, 5, 1, 5 are two away from their mean; their variance is 4.
    norm = layer_norm(
        np.array([1, 1, 10, 1], np.float32), np.array([0, 7, 0, 0], np.float32), 1e-12
    )
    found = norm(jnp.array([1.0, 5.0, 1.0, 5.0], jnp.float32))
    np.testing.assert_allclose(found, [-1, 8, -10, 1], rtol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_a_layer_norm_divides_by_the_deviation(offset: float, epsilon: float) -> None:
    x = normal(3, 40) + np.float32(offset)
    weight, bias = normal(40, seed=1), normal(40, seed=2)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    found = layer_norm(weight, bias, epsilon)(jnp.asarray(x))
    np.testing.assert_allclose(found, centred / deviation * weight + bias, atol=2e-5)


def test_a_layer_norm_of_bfloat16_is_rounded_once() -> None:
    x, weight, bias = (normal(n, seed=n).astype(BFLOAT16) for n in (640, 64, 65))
    x, bias = x.reshape(10, 64), bias[:64]
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    wanted = (unit * weight.astype(np.float64) + bias.astype(np.float64)).astype(BFLOAT16)
    found = np.asarray(jax.jit(layer_norm(weight, bias, 1e-5))(jnp.asarray(x)))
    assert found.dtype == BFLOAT16
    assert (found != wanted).sum() <= 2
    assert (found != (unit.astype(BFLOAT16) * weight + bias)).sum() > 50


def test_the_norm_of_a_configuration() -> None:
    norms = {
        kind: make_norm(kind, 5, epsilon=0.5, stack=(2,), dtype="bfloat16")
        for kind in ("rms", "rms_float32", "layer")
    }
    rms, late, layer = norms["rms"], norms["rms_float32"], norms["layer"]
    assert isinstance(rms, RmsNorm) and isinstance(late, RmsNorm) and isinstance(layer, LayerNorm)
    assert (rms.rounds_late, late.rounds_late) == (False, True)
    assert {norm.epsilon for norm in norms.values()} == {0.5}
    assert {norm.weight[...].shape for norm in norms.values()} == {(2, 5)}


# Embedding.


def test_an_embedding_gives_the_rows_of_its_tokens() -> None:
    embedding = Embedding(6, 3, dtype="bfloat16")
    table = normal(6, 3).astype(BFLOAT16)
    embedding.weight[...] = jnp.asarray(table)
    found = embedding(jnp.array([5, 0, 5, 2], jnp.int32))
    np.testing.assert_array_equal(np.asarray(found), table[[5, 0, 5, 2]])


def test_a_token_outside_of_the_vocabulary_gives_no_nan() -> None:
    # Padding may hold anything: a NaN would go through the whole model.
    embedding = Embedding(6, 3, dtype="float32")
    embedding.weight[...] = jnp.asarray(normal(6, 3))
    assert np.isfinite(embedding(jnp.array([-1, 6, 2**31 - 1], jnp.int32))).all()
