"""RMS norms with a weight of one layer among those of all, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from moejax.layers.linear import LayerVector, RmsNorm, add_and_norm
from moejax.pallas import norms

LAYERS = 3
SHAPES = [(1, 8), (2, 64), (3, 100), (16, 2048), (33, 2880), (64, 5120), (512, 128)]
EPSILON = 1e-5


def make(tokens: int, size: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(size), 3)
    shapes = ((tokens, size), (tokens, size), (LAYERS, size))
    x, y, w = (3 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    return x.astype(dtype), y.astype(dtype), w.astype(dtype)


def expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPSILON) * w


def check(tokens: int, size: int, dtype: str, *, rounds_late: bool, layer: int) -> None:
    x, y, w = make(tokens, size, dtype)
    options = {"epsilon": EPSILON, "rounds_late": rounds_late}
    # Roundings of the normed value and of the product; XLA may leave out that of the sum before.
    roundings = 2 if rounds_late else 3
    tolerance = {
        "rtol": 1.01 * roundings * 2.0 ** (-8 if dtype == "bfloat16" else -21),
        "atol": 1e-6,
    }
    weight = np.asarray(w[layer], np.float64)
    found = jax.jit(partial(norms.rms_norm, **options))(x, w, jnp.int32(layer))
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected(np.asarray(x), weight), **tolerance
    )
    total, found = jax.jit(partial(norms.add_rms_norm, **options))(x, y, w, jnp.int32(layer))
    np.testing.assert_array_equal(total, x + y)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected(np.asarray(total), weight), **tolerance
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounds_late", [False, True])
def test_the_reference(dtype: str, rounds_late: bool) -> None:
    for tokens, size in SHAPES[:4]:
        check(tokens, size, dtype, rounds_late=rounds_late, layer=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounds_late", [False, True])
def test_the_kernel(dtype: str, rounds_late: bool) -> None:
    for number, (tokens, size) in enumerate(SHAPES):
        check(tokens, size, dtype, rounds_late=rounds_late, layer=number % LAYERS)


@pytest.mark.parametrize("late", [False, True])
def test_modules_in_place_are_as_others(late: bool) -> None:
    x, y, w = make(3, 64, "bfloat16")
    plain, in_place = (
        RmsNorm(64, epsilon=EPSILON, rounds_late=late, dtype="bfloat16") for _ in range(2)
    )
    plain.weight[...] = w[2]
    in_place.weight.set_value(LayerVector(w, jnp.int32(2)))
    np.testing.assert_array_equal(in_place(x), plain(x))
    heads = x.reshape(3, 2, 32)
    halves = [RmsNorm(32, epsilon=EPSILON, rounds_late=late, dtype="bfloat16") for _ in range(2)]
    halves[0].weight[...] = w[2, :32]
    halves[1].weight.set_value(LayerVector(w[:, :32], jnp.int32(2)))
    np.testing.assert_array_equal(halves[1](heads), halves[0](heads))
    for norm in (plain, in_place):
        total, found = add_and_norm(x, y, norm)
        np.testing.assert_array_equal(total, x + y)
        np.testing.assert_array_equal(found, plain(x + y))


def test_one_launch_on_an_h200() -> None:
    shape = jax.ShapeDtypeStruct
    x, w = shape((16, 2048), jnp.bfloat16), shape((24, 2048), jnp.bfloat16)
    program = partial(norms.add_rms_norm, epsilon=EPSILON, rounds_late=False)
    compiled = aot.compile_for(aot.h200_mesh(), program, x, x, w, shape((), jnp.int32))
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1
    assert compiled.memory_analysis().temp_size_in_bytes == 0
