"""Experts with biases, other activations, and weights on their inputs, against loops in float64."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.filled import activated, normal
from moejax.arena.experts import ExpertBias
from moejax.config import Activation, ClampedSwiglu
from moejax.layers.experts import Stacked, run_experts

HIDDEN, WIDTH, EXPERTS, K = 12, 9, 6, 2
CLAMPED = ClampedSwiglu(limit=1.5, alpha=1.702)


class Case(NamedTuple):
    x: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    valid: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    bias: ExpertBias


def make_case(tokens: int) -> Case:
    """Experts 0 and 4 have no tokens, or invalid ones only: they and their biases are NaN."""
    rng = np.random.default_rng(tokens)
    used = np.array([1, 2, 3, 5], np.int32)
    topk_ids = np.stack([rng.permutation(used)[:K] for _ in range(tokens)])
    valid = np.ones(tokens, bool)
    valid[2::7] = False
    topk_ids[2::7] = [4, 1]
    case = Case(
        x=normal(tokens, HIDDEN),
        topk_ids=topk_ids,
        topk_weights=rng.random((tokens, K), np.float32),
        valid=valid,
        gate_up=normal(EXPERTS, 2, WIDTH, HIDDEN, seed=1) / 2,
        down=normal(EXPERTS, HIDDEN, WIDTH, seed=2),
        bias=ExpertBias(
            normal(EXPERTS, WIDTH, seed=3),
            normal(EXPERTS, WIDTH, seed=4),
            normal(EXPERTS, HIDDEN, seed=5),
        ),
    )
    for part in (case.gate_up, case.down, *case.bias):
        part[[0, 4]] = np.nan
    return case


@partial(jax.jit, static_argnames=("activation", "weights_input"))
def jit_experts(case: Any, bias: Any, activation: Activation, weights_input: bool) -> jax.Array:
    inputs = case.x, case.topk_ids, case.topk_weights, case.valid
    return run_experts(
        *inputs,
        Stacked(case.gate_up, case.down),
        activation=activation,
        weights_input=weights_input,
        bias=bias,
    )


def run(
    case: Case, *, bias: bool, activation: Activation = "silu", weights_input: bool = False
) -> np.ndarray:
    case = jax.tree.map(jnp.asarray, case)
    return np.asarray(jit_experts(case, case.bias if bias else None, activation, weights_input))


def by_loops(
    case: Case, *, bias: bool, activation: Activation = "silu", weights_input: bool = False
) -> np.ndarray:
    """Token by token, expert by expert."""
    y = np.zeros(case.x.shape)
    for token in np.flatnonzero(case.valid):
        for e, weight in zip(case.topk_ids[token], case.topk_weights[token], strict=True):
            x = case.x[token].astype(np.float64) * (weight if weights_input else 1)
            gate, up = case.gate_up[e].astype(np.float64) @ x
            if bias:
                gate, up = gate + case.bias.gate[e], up + case.bias.up[e]
            out = case.down[e].astype(np.float64) @ activated(gate, up, activation)
            if bias:
                out = out + case.bias.down[e]
            y[token] += out * (1 if weights_input else weight)
    return y


@pytest.mark.parametrize("tokens", [1, 9, 200])  # one, a tile, several tiles
def test_biases_are_those_of_the_chosen_experts(tokens: int) -> None:
    case = make_case(tokens)
    wanted = by_loops(case, bias=True)
    np.testing.assert_allclose(run(case, bias=True), wanted, atol=1e-4)
    assert np.abs(wanted - by_loops(case, bias=False)).max() > 0.1


@pytest.mark.parametrize("weights_input", [False, True], ids=["output", "input"])
@pytest.mark.parametrize("activation", ["gelu_tanh", CLAMPED], ids=str)
def test_the_options_go_together(activation: Activation, weights_input: bool) -> None:
    case = make_case(9)
    options: Any = {"activation": activation, "weights_input": weights_input}
    np.testing.assert_allclose(
        run(case, bias=True, **options), by_loops(case, bias=True, **options), atol=1e-4
    )


@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_weights_may_multiply_the_inputs_of_experts(tokens: int) -> None:
    case = make_case(tokens)
    wanted = by_loops(case, bias=False, weights_input=True)
    np.testing.assert_allclose(run(case, bias=False, weights_input=True), wanted, atol=1e-4)
    assert np.abs(wanted - by_loops(case, bias=False)).max() > 0.1


def test_invalid_tokens_give_zero_whatever_they_hold() -> None:
    case = make_case(9)
    for weights_input in (False, True):
        clean = run(case, bias=True, weights_input=weights_input)
        assert (clean[2] == 0).all() and (clean[[0, 1, *range(3, 9)]] != 0).all()
        x, weights = case.x.copy(), case.topk_weights.copy()
        x[2] = weights[2] = np.nan
        bad = case._replace(x=x, topk_weights=weights)
        np.testing.assert_array_equal(run(bad, bias=True, weights_input=weights_input), clean)


def test_a_weight_on_the_input_is_rounded_to_the_dtype_of_the_tokens() -> None:
    # 1.5 times 1 + 2^-8 would be rounded up; but that weight itself is rounded to 1.
    x = jnp.full((1, HIDDEN), 1.5, jnp.bfloat16)
    ids, valid = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, bool)
    gate_up, down = jnp.ones((1, 2, 1, HIDDEN)), jnp.ones((1, HIDDEN, 1))
    ones = Stacked(gate_up.astype(jnp.bfloat16), down.astype(jnp.bfloat16))
    run = jax.jit(partial(run_experts, weights_input=True))
    found = [
        run(x, ids, jnp.full((1, 1), weight), valid, ones).tolist()
        for weight in (1.0, 1 + 2**-8, 1 + 2**-7)
    ]
    assert found[0] == found[1] != found[2]
