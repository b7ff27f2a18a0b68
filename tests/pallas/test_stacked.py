"""Products with matrices of one layer in arrays of all layers, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from moejax.layers.linear import LayerMatrix, LayerVector, Linear, run_linears
from moejax.pallas import stacked

LAYERS = 3
# tokens, columns, rows of the matrices
SHAPES = [
    (1, 256, (64,)),
    (1, 2048, (2048, 512, 512)),
    (2, 1408, (60,)),
    (7, 136, (1, 33, 257)),
    (8, 64, (16, 16)),
    (9, 2048, (2816, 2816, 1)),
    (16, 4096, (1024, 128)),
    (31, 520, (100, 200)),
    (33, 2048, (8192, 8193)),
    (64, 2880, (640, 32, 5120)),
]


def make(tokens: int, columns: int, rows: tuple[int, ...]) -> tuple[jax.Array, list[jax.Array]]:
    keys = jax.random.split(jax.random.key(tokens), 1 + len(rows))
    x = jax.random.normal(keys[0], (tokens, columns), jnp.bfloat16)
    matrices = [
        jax.random.normal(key, (LAYERS, m, columns), jnp.bfloat16)
        for key, m in zip(keys[1:], rows, strict=True)
    ]
    return x, matrices


def check(tokens: int, columns: int, rows: tuple[int, ...], dtype: str, layer: int) -> None:
    x, matrices = make(tokens, columns, rows)
    # The second matrix has a bias, if there is one.
    biases = [w[:, :, 0] * 16 if n == 1 else None for n, w in enumerate(matrices)]
    run = jax.jit(lambda *a: stacked.multiply(*a, dtype=jnp.dtype(dtype)))
    found = run(x, matrices, biases, jnp.int32(layer))
    assert len(found) == len(rows)
    # The sum's rounding, of terms of variance 1, and that of the result.
    tolerance = 2.0**-22 * columns + (2.0**-8 if dtype == "bfloat16" else 0) * (
        columns**0.5 * 6 + 64
    )
    for y, w, bias in zip(found, matrices, biases, strict=True):
        assert y.dtype == dtype
        wanted = np.asarray(x, np.float64) @ np.asarray(w[layer], np.float64).T
        if bias is not None:
            wanted = wanted + np.asarray(bias[layer], np.float64)
        np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_the_reference(shape: tuple[int, int, tuple[int, ...]]) -> None:
    check(*shape, "float32", layer=1)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel(shape: tuple[int, int, tuple[int, ...]]) -> None:
    for dtype, layer in (("float32", 2), ("bfloat16", 0)):
        check(*shape, dtype, layer)


@pytest.mark.gpu
def test_layers_beyond_2_31_values() -> None:
    layers, rows, columns = 130, 4096, 4096
    stack = jax.jit(lambda: jnp.zeros((layers, rows, columns), jnp.bfloat16).at[-1].set(1))()
    x = jnp.ones((3, columns), jnp.bfloat16)
    (y,) = jax.jit(stacked.multiply)(x, [stack], [None], jnp.int32(layers - 1))
    np.testing.assert_array_equal(np.asarray(y, np.float32), 4096)


@pytest.mark.parametrize(
    ("x", "matrices"),
    [
        ((0, 8), [(1, 4, 8)]),
        ((65, 8), [(1, 4, 8)]),
        ((2, 12), [(1, 4, 12)]),
        ((2, 8), []),
        ((2, 8), [(1, 4, 8)] * 4),
    ],
)
def test_what_is_not_taken(x: tuple[int, ...], matrices: list[tuple[int, ...]]) -> None:
    arrays = [jnp.zeros(shape, jnp.bfloat16) for shape in matrices]
    with pytest.raises(ValueError, match="does not multiply"):
        stacked.multiply(jnp.zeros(x, jnp.bfloat16), arrays, [None] * len(arrays), jnp.int32(0))


def test_float32_is_not_taken() -> None:
    assert stacked.takes(2, 8, jnp.bfloat16)
    assert not stacked.takes(2, 8, jnp.float32)
    with pytest.raises(ValueError, match="does not multiply"):
        stacked.multiply(jnp.zeros((2, 8)), [jnp.zeros((1, 4, 8))], [None], jnp.int32(0))


@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_linears_of_one_input_are_as_one_after_the_other(biases: tuple[bool, bool]) -> None:
    x, matrices = make(3, 64, (32, 48))
    alone, together = [], []
    for w, has_bias in zip(matrices, biases, strict=True):
        for linears, weight in ((alone, w[2]), (together, LayerMatrix(w, jnp.int32(2)))):
            linear = Linear(64, w.shape[1], bias=has_bias, dtype="bfloat16")
            linear.weight[...] = w[2]
            if linear.bias is not None:
                row = jnp.arange(w.shape[1], dtype=jnp.bfloat16)
                linear.bias[...] = row
                if linears is together:
                    stack = jnp.stack([0 * row, 2 * row, row])
                    linear.bias.set_value(LayerVector(stack, jnp.int32(2)))
            linear.weight.set_value(weight)
            linears.append(linear)
    one_by_one = [linear(x) for linear in together]
    for found in (run_linears(x, together), run_linears(x, alone), one_by_one):
        for y, linear in zip(found, alone, strict=True):
            np.testing.assert_array_equal(y, linear(x))


def test_one_launch_and_no_copies_on_an_h200() -> None:
    shape = jax.ShapeDtypeStruct
    stacks = [shape((24, m, 2048), jnp.bfloat16) for m in (2048, 512, 512)]
    compiled = aot.compile_for(
        aot.h200_mesh(),
        stacked.multiply,
        shape((16, 2048), jnp.bfloat16),
        stacks,
        [shape((24, 2048), jnp.bfloat16), None, None],
        shape((), jnp.int32),
    )
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
