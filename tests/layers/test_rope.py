"""Rotary positions, against complex numbers in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import Rope
from moejax.layers.rope import rotate

ROPE = Rope(theta=10000.0)
HEADS, SIZE = 2, 16

jit_rotate = jax.jit(rotate, static_argnames="rope")


def make_x(tokens: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(size).standard_normal((tokens, HEADS, size), np.float32)


def run(x: np.ndarray, positions: list[int], rope: Rope = ROPE) -> np.ndarray:
    return np.asarray(jit_rotate(jnp.asarray(x), jnp.array(positions, jnp.int32), rope=rope))


def by_complex_numbers(x: np.ndarray, positions: list[int], theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    frequency = theta ** (-np.arange(half) / half)
    turn = np.exp(1j * np.array(positions)[:, None, None] * frequency)
    z = (x[..., :half].astype(np.float64) + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def test_the_first_half_turns_with_the_second() -> None:
    x = np.zeros((1, 1, 4), np.float32)
    x[0, 0] = [1, 0, 0, 2]  # pairs (1, 0) and (0, 2)
    y = run(x, [1], Rope(theta=100.0))[0, 0]
    # Angles 1 and 1 * 100^(-1/2) = 0.1.
    wanted = [np.cos(1), -2 * np.sin(0.1), np.sin(1), 2 * np.cos(0.1)]
    np.testing.assert_allclose(y, wanted, atol=1e-6)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_angles_are_position_times_a_power_of_theta(theta: float) -> None:
    positions = [0, 1, 7, 300]
    x = make_x(len(positions))
    wanted = by_complex_numbers(x, positions, theta)
    # float32 knows an angle of 300 to 2e-5.
    np.testing.assert_allclose(run(x, positions, Rope(theta=theta)), wanted, atol=1e-4)


def test_position_0_changes_nothing() -> None:
    x = make_x(3)
    np.testing.assert_array_equal(run(x, [0, 0, 0]), x)


@given(position=st.integers(0, 2**18))
def test_lengths_stay(position: int) -> None:
    x = make_x(1)
    y = run(x, [position])
    half = SIZE // 2
    before = np.hypot(x[..., :half], x[..., half:])
    np.testing.assert_allclose(np.hypot(y[..., :half], y[..., half:]), before, rtol=1e-5)


@given(distance=st.integers(0, 50), start=st.integers(0, 1000))
def test_scores_depend_on_the_distance_only(distance: int, start: int) -> None:
    q, k = make_x(2)[0], make_x(2)[1]

    def score(at: int) -> np.ndarray:
        turned = run(np.stack([q, k]), [at + distance, at]).astype(np.float64)
        return (turned[0] * turned[1]).sum(axis=-1)

    np.testing.assert_allclose(score(start), score(0), atol=2e-3)


def test_bfloat16_tells_neighbouring_positions_apart() -> None:
    x = make_x(1).astype(ml_dtypes.bfloat16)
    y = {position: run(x, [position]) for position in (256, 257)}
    assert y[257].dtype == ml_dtypes.bfloat16
    for position, found in y.items():
        wanted = by_complex_numbers(x.astype(np.float32), [position], 10000.0)
        np.testing.assert_allclose(found.astype(np.float64), wanted, atol=0.04)
    assert np.abs(y[256].astype(np.float32) - y[257].astype(np.float32)).max() > 0.5
