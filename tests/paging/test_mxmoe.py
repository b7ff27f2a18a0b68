"""MxMoE's integer program beside every choice there is, and its losses beside a whole layer."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from moejax.errors import CapacityError
from moejax.paging.mxmoe import Matrices, allocate_mxmoe, layer_losses, swiglu

TOKENS, HIDDEN, INNER, EXPERTS, K = 9, 6, 5, 4, 2


def best_of_all(loss: np.ndarray, sizes: np.ndarray, share: int) -> float | None:
    """The least loss of a layer within its share; None if nothing fits."""
    loss, sizes = loss.reshape(-1, loss.shape[-1]), sizes.reshape(-1, loss.shape[-1])
    columns = [np.nonzero(row >= 0)[0] for row in sizes]
    at = np.arange(len(loss))
    fitting = [
        float(loss[at, picks].sum())
        for picks in map(list, itertools.product(*columns))
        if sizes[at, picks].sum() <= share
    ]
    return min(fitting, default=None)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 250), st.booleans())
def test_the_optimum_of_every_layer(seed: int, budget: int, has_missing: bool) -> None:
    rng = np.random.default_rng(seed)
    loss = rng.lognormal(0, 2, (2, 2, 2, 3))
    sizes = rng.integers(0, 40, loss.shape)
    if has_missing:
        sizes[..., 1] -= 20
    best = [best_of_all(loss[n], sizes[n], budget // 2) for n in range(2)]
    if None in best:
        with pytest.raises(CapacityError, match=f"layer {best.index(None)} needs at least"):
            allocate_mxmoe(loss, sizes, budget)
        return
    picks = allocate_mxmoe(loss, sizes, budget, relative_gap=0.0)[..., None]
    chosen = np.take_along_axis(sizes, picks, axis=-1)
    assert np.all(chosen >= 0)
    assert np.all(chosen.sum(axis=(1, 2, 3)) <= budget // 2)
    found = np.take_along_axis(loss, picks, axis=-1).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(found, np.array(best, np.float64), rtol=1e-9)


def test_by_hand() -> None:
    # Per layer 2 * (10 + 5) bytes at least. 10 more: both down, or the gate_up of one expert.
    sizes = np.array([[10, 20], [5, 10]])
    cheap_down = [[[4.0, 3.0], [3.0, 1.0]], [[4.0, 1.5], [3.0, 1.0]]]
    cheap_up = [[[9.0, 1.0], [3.0, 1.0]], [[4.0, 3.0], [3.0, 1.0]]]
    loss = np.array([cheap_down, cheap_up])
    assert allocate_mxmoe(loss, sizes, 80).tolist() == [[[0, 1], [0, 1]], [[1, 0], [0, 0]]]
    # What is left over in one layer, another one does not get.
    assert allocate_mxmoe(loss, sizes, 79).tolist() == [[[0, 1], [0, 0]], [[0, 1], [0, 0]]]
    assert allocate_mxmoe(loss, sizes, 1000).tolist() == [[[1, 1], [1, 1]]] * 2


def test_experts_count_by_their_frequency() -> None:
    sizes = np.array([[10, 20], [10, 20]])
    loss = np.array([[[[4.0, 1.0], [4.0, 1.0]], [[5.0, 1.0], [5.0, 1.0]]]])
    assert allocate_mxmoe(loss, sizes, 60).tolist() == [[[0, 0], [1, 1]]]
    frequency = np.array([[0.8, 0.2]])
    assert allocate_mxmoe(loss, sizes, 60, frequency=frequency).tolist() == [[[1, 1], [0, 0]]]


def test_losses_of_any_scale() -> None:
    sizes = np.array([[360_448 * 3, 360_448 * 4], [720_896 * 3, 720_896 * 4]])
    loss = np.array([[[[4.0, 1.0], [5.0, 1.0]]]])
    for scale in (1e-12, 1e12):
        assert allocate_mxmoe(loss * scale, sizes, 360_448 * 11).tolist() == [[[0, 1]]]
    assert allocate_mxmoe(loss * 0, sizes, 360_448 * 9).tolist() == [[[0, 0]]]


def test_too_few_bytes_for_a_layer_are_refused() -> None:
    message = "layer 1 needs at least 31 bytes, its share of the budget is 30$"
    sizes = np.array([[[[10, 20], [20, 30]]], [[[10, 20], [21, 30]]]])
    with pytest.raises(CapacityError, match=message):
        allocate_mxmoe(np.ones((2, 1, 2, 2)), sizes, 61)


def test_losses_that_make_no_sense() -> None:
    loss = np.ones((1, 2, 2, 2))
    loss[0, 1, 0, 1] = np.nan
    with pytest.raises(ValueError, match="damage of linear 2 in column 1 is nan"):
        allocate_mxmoe(loss, np.array([[1, 2], [1, 2]]), 100)


def test_no_result_in_time() -> None:
    rng = np.random.default_rng(0)
    loss = np.sort(rng.uniform(0, 1, (1, 60, 2, 4)))[..., ::-1].copy()
    sizes = np.cumsum(rng.integers(1, 10**6, loss.shape), axis=-1)
    with pytest.raises(RuntimeError, match=r"layer 0: no widths within 0\.0 of the optimum in"):
        allocate_mxmoe(loss, sizes, int(sizes[..., 1].sum()), time_limit_s=0.0, relative_gap=0.0)


def test_a_result_beyond_the_bytes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds_badly(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(success=True, x=np.array([0.0, 1, 0, 1]))

    monkeypatch.setattr(optimize, "milp", rounds_badly)
    with pytest.raises(RuntimeError, match="layer 0: the solver exceeds the layer's 30 bytes"):
        allocate_mxmoe(np.ones((1, 1, 2, 2)), np.array([[10, 20], [10, 20]]), 30)


def make_layer(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Matrices]:
    """Inputs, routing and experts; expert 2 has no tokens."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    ids = np.array([rng.permutation([0, 1, 3])[:K] for _ in range(TOKENS)])
    weights = rng.uniform(size=ids.shape).astype(np.float32)
    gate_up = rng.normal(size=(EXPERTS, 2, INNER, HIDDEN)).astype(np.float32)
    down = rng.normal(size=(EXPERTS, HIDDEN, INNER)).astype(np.float32)
    return x, ids, weights, Matrices(gate_up, down)


def rounded(expert: Matrices, width: int) -> Matrices:
    return Matrices(*(np.round(part * 2**width) / np.float32(2**width) for part in expert))


def layer_output(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, gate_up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    """The layer, token by token."""
    y = np.zeros(x.shape)
    for token, slot in np.ndindex(*ids.shape):
        gate, up = gate_up[ids[token, slot]].astype(np.float64) @ x[token]
        inner = gate / (1 + np.exp(-gate)) * up
        y[token] += weights[token, slot] * (down[ids[token, slot]] @ inner)
    return y


def test_losses_are_those_of_the_whole_layer() -> None:
    x, ids, weights, experts = make_layer(0)
    widths = (1, 3)
    found = layer_losses(
        x,
        ids,
        weights,
        experts,
        lambda e, w: rounded(Matrices(*(p[e] for p in experts)), w),
        widths,
    )
    before = layer_output(x, ids, weights, *experts)
    for expert, (column, width) in itertools.product(range(EXPERTS), enumerate(widths)):
        stored = rounded(experts, width)
        norms = []
        for part in range(3):
            gate_up, down = experts.gate_up.copy(), experts.down.copy()
            if part < 2:
                gate_up[expert, part] = stored.gate_up[expert, part]
            else:
                down[expert] = stored.down[expert]
            after = layer_output(x, ids, weights, gate_up, down)
            norms.append(float(np.linalg.norm(after - before)))
        expected = [norms[0] + norms[1], norms[2]]
        np.testing.assert_allclose(found[expert, :, column], expected, rtol=1e-4)
    assert np.all(found[2] == 0)
    assert np.all(found[[0, 1, 3], :, 0] > found[[0, 1, 3], :, 1])


def test_other_activations() -> None:
    x, ids, weights, experts = make_layer(1)

    def gate_alone(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return gate

    def change_up(expert: int, width: int) -> Matrices:
        gate_up = experts.gate_up[expert].copy()
        gate_up[1] += 1
        return Matrices(gate_up, experts.down[expert])

    assert np.all(layer_losses(x, ids, weights, experts, change_up, (3,), gate_alone) == 0)
    assert np.any(layer_losses(x, ids, weights, experts, change_up, (3,)) > 0)


def test_swiglu_of_large_numbers() -> None:
    gate = np.array([[-1e4, -1.0, 0.0, 1.0, 1e4]], np.float32)
    expected = [[0, -1 / (1 + np.e), 0, np.e / (1 + np.e), 1e4]]
    np.testing.assert_allclose(swiglu(gate, np.ones_like(gate)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [-1, EXPERTS])
def test_an_id_that_is_no_expert(bad: int) -> None:
    x, ids, weights, experts = make_layer(2)
    ids[4, 1] = bad
    with pytest.raises(ValueError, match=f"a token has expert {bad} of {EXPERTS}$"):
        layer_losses(x, ids, weights, experts, lambda e, w: experts, (3,))
