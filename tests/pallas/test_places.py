"""Tokens to places and back, against loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.arena.experts import ExpertBias
from moejax.pallas.grouping import Grouping, group
from moejax.pallas.places import join_biases, sum_of_experts, tokens_of_tiles
from pallas.paged_experts import Case, Experts, make_experts


def group_all(experts: Experts, size: int) -> Grouping:
    arrays = (experts.topk_ids, experts.valid, experts.widths)
    return group(*map(jnp.asarray, arrays), size=size)


@pytest.mark.parametrize("size", [8, 64])
def test_each_tile_has_rows_of_its_own(size: int) -> None:
    """Whatever the places where tiles start; multiplied with weights in the dtype of x."""
    experts = make_experts(Case(experts=5, tokens=150, k=3))
    grouping = group_all(experts, size)
    x, weights = jnp.asarray(experts.x), jnp.asarray(experts.topk_weights)
    plain, found = (
        np.asarray(tokens_of_tiles(x, grouping, size, of), np.float32) for of in (None, weights)
    )
    assert found.shape == plain.shape == (len(grouping.tiles), size, x.shape[1])
    seen = []
    for t, (expert, _, count, *_) in enumerate(np.asarray(grouping.tiles)):
        for n in range(count):
            (token,) = np.flatnonzero((experts.x.astype(np.float32) == plain[t, n]).all(1))
            (slot,) = np.flatnonzero(experts.topk_ids[token] == expert)
            wanted = experts.x[token] * experts.topk_weights[token, slot].astype(experts.x.dtype)
            np.testing.assert_array_equal(found[t, n], wanted.astype(np.float32))
            seen.append((token, slot))
    assert len(seen) == len(set(seen)) == 3 * experts.valid.sum()
    assert (np.asarray(grouping.tiles)[:, 1] % 8 > 0).any()


def test_a_token_gets_what_its_places_hold() -> None:
    """Three tokens of two experts each; the second token is invalid, and place 4 holds NaN."""
    y = jnp.array([[1.0, 10], [2, 20], [3, 30], [4, 40], [np.nan, np.nan], [np.nan, 0]])
    place_of_slot = jnp.array([2, 0, 6, 6, 1, 3], jnp.int32)
    weights = jnp.array([[0.5, 2], [1, 1], [3, 0.25]])
    found = sum_of_experts(y, place_of_slot, weights, weights_input=False)
    np.testing.assert_array_equal(found, [[3.5, 35], [0, 0], [7, 70]])
    found = sum_of_experts(y, place_of_slot, weights, weights_input=True)
    np.testing.assert_array_equal(found, [[4, 40], [0, 0], [6, 60]])


@pytest.mark.parametrize("weights_input", [False, True])
def test_sums_are_rounded_once(weights_input: bool) -> None:
    """Over 1 by more than half a unit of bfloat16; were each sum rounded, it would be 1."""
    y = jnp.array([[1], [2**-9], [2**-9 + 2**-16]], jnp.bfloat16)
    weights = jnp.ones((1, 3), jnp.float32)
    place_of_slot = jnp.arange(3, dtype=jnp.int32)
    found = sum_of_experts(y, place_of_slot, weights, weights_input=weights_input)
    assert found.dtype == jnp.bfloat16
    assert float(found[0, 0]) == 1 + 2**-7


def test_biases_lie_as_kernels_read_them() -> None:
    gate, up = (np.arange(6, dtype=np.float32).reshape(2, 3) + n for n in (0, 100))
    down = np.ones((2, 5), np.float32)
    of_gate_up, of_down = join_biases(ExpertBias(*map(jnp.asarray, (gate, up, down))))
    np.testing.assert_array_equal(of_gate_up, np.stack([gate, up], axis=1))
    np.testing.assert_array_equal(of_down, down)
    assert join_biases(None) == (None, None)
