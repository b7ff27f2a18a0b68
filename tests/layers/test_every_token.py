"""Experts that every token passes through, against `run_experts` over tiles."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.filled import normal
from moejax.arena.experts import ExpertBias
from moejax.config import Activation, ClampedSwiglu
from moejax.layers.every_token import EveryToken, run_every_token
from moejax.layers.experts import Stacked, run_experts

HIDDEN, WIDTH = 12, 9
CLAMPED = ClampedSwiglu(limit=1.5, alpha=1.702)
# These programs are small and run a few times: compiling takes longer than running them.
QUICK = {"xla_backend_optimization_level": 0}


class Inputs(NamedTuple):
    """What a layer is given; all of it but ids and validity has a gradient."""

    x: Any
    topk_ids: Any
    topk_weights: Any
    valid: Any
    experts: Any
    bias: Any


class Options(NamedTuple):
    activation: Activation = "silu"
    weights_input: bool = False
    has_bias: bool = False


class Shape(NamedTuple):
    tokens: int
    k: int
    num_experts: int


def make_inputs(shape: Shape, seed: int = 0, empty: int = 0, has_bias: bool = True) -> Inputs:
    """Random inputs of which some are invalid; nobody chooses the first `empty` experts."""
    rng = np.random.default_rng(seed)
    tokens, k, experts = shape
    scores = rng.random((tokens, experts - empty))
    return Inputs(
        x=normal(tokens, HIDDEN, seed=seed),
        topk_ids=(empty + np.argsort(scores, axis=1)[:, :k]).astype(np.int32),
        topk_weights=rng.random((tokens, k), np.float32),
        valid=rng.random(tokens) < 0.8,
        experts=Stacked(
            normal(experts, 2, WIDTH, HIDDEN, seed=seed + 1) / 2,
            normal(experts, HIDDEN, WIDTH, seed=seed + 2),
        ),
        bias=ExpertBias(
            normal(experts, WIDTH, seed=seed + 3),
            normal(experts, WIDTH, seed=seed + 4),
            normal(experts, HIDDEN, seed=seed + 5),
        )
        if has_bias
        else None,
    )


@partial(jax.jit, static_argnames=("options", "every"), compiler_options=QUICK)
def _run(inputs: Inputs, slope: jax.Array, options: Options, every: bool) -> tuple[Any, Any]:
    def output(x: Any, weights: Any, experts: Stacked, bias: Any) -> jax.Array:
        given = EveryToken(experts.gate_up, experts.down) if every else experts
        return (run_every_token if every else run_experts)(
            x,
            inputs.topk_ids,
            weights,
            inputs.valid,
            given,
            activation=options.activation,
            weights_input=options.weights_input,
            bias=bias,
        )

    parts = inputs.x, inputs.topk_weights, inputs.experts, inputs.bias
    y, pull = jax.vjp(output, *parts)
    return y, pull(slope)


def run(inputs: Inputs, options: Options, *, every: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """The output, and the gradient of its product with something fixed."""
    slope = normal(*inputs.x.shape, seed=9).astype(inputs.x.dtype)
    y, gradient = _run(jax.tree.map(jnp.asarray, inputs), jnp.asarray(slope), options, every)
    return np.asarray(y), [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]


def assert_near(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * max(1, np.abs(wanted).max()))


# Every option, and: one token, every expert, several tiles.
CASES = [
    (Options(), Shape(tokens=150, k=2, num_experts=4)),
    (Options("gelu_tanh", weights_input=True), Shape(tokens=9, k=3, num_experts=3)),
    (Options(CLAMPED, has_bias=True), Shape(tokens=9, k=2, num_experts=5)),
    (Options(CLAMPED, weights_input=True, has_bias=True), Shape(tokens=1, k=1, num_experts=4)),
]


@settings(max_examples=60)
@given(case=st.sampled_from(CASES), seed=st.integers(0, 2**16), data=st.data())
def test_values_and_gradients_are_those_of_the_tiles(
    case: tuple[Options, Shape], seed: int, data: st.DataObject
) -> None:
    options, shape = case
    empty = data.draw(st.integers(0, shape.num_experts - shape.k))
    inputs = make_inputs(shape, seed, empty, options.has_bias)
    if data.draw(st.booleans()):
        inputs = inputs._replace(valid=np.ones_like(inputs.valid))
    y, gradient = run(inputs, options, every=True)
    wanted, slopes = run(inputs, options, every=False)
    assert_near(y, wanted)
    for found, slope in zip(gradient, slopes, strict=True):
        assert_near(found, slope)
    assert (y[~inputs.valid] == 0).all()


def test_two_tokens_by_hand() -> None:
    # gate = up = x0, so an expert gives silu(x0) * x0 times its number; token 1 is invalid.
    gate_up = np.zeros((3, 2, 1, 2), np.float32)
    gate_up[:, :, 0, 0] = 1
    down = np.array([0, 1, 2], np.float32)[:, None, None] * np.ones((3, 2, 1), np.float32)
    inputs = Inputs(
        x=np.array([[3, 5], [3, 5]], np.float32),
        topk_ids=np.array([[2, 1], [2, 1]], np.int32),
        topk_weights=np.array([[0.5, 0.25], [0.5, 0.25]], np.float32),
        valid=np.array([True, False]),
        experts=Stacked(gate_up, down),
        bias=None,
    )
    y, _ = run(inputs, Options(), every=True)
    value = (0.5 * 2 + 0.25 * 1) * 9 / (1 + np.exp(-3))
    np.testing.assert_allclose(y, [[value, value], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("weights_input", [False, True], ids=["output", "input"])
def test_what_invalid_tokens_hold_changes_nothing(weights_input: bool) -> None:
    options = Options(weights_input=weights_input, has_bias=True)
    inputs = make_inputs(Shape(tokens=7, k=2, num_experts=5))
    inputs = inputs._replace(valid=np.arange(7) != 3)
    clean = run(inputs, options, every=True)
    x, weights = inputs.x.copy(), inputs.topk_weights.copy()
    x[3] = weights[3] = np.nan
    bad = run(inputs._replace(x=x, topk_weights=weights), options, every=True)
    jax.tree.map(np.testing.assert_array_equal, bad, clean)
    assert (bad[0][3] == 0).all() and all(np.isfinite(leaf).all() for leaf in bad[1])


def test_a_token_overflows_only_in_the_experts_that_it_chose() -> None:
    inputs = make_inputs(Shape(tokens=7, k=2, num_experts=5), empty=1, has_bias=False)
    wanted, slopes = run(inputs, Options(), every=True)
    inputs.experts.gate_up[0] = 1e38
    y, gradient = run(inputs, Options(), every=True)
    np.testing.assert_array_equal(y, wanted)
    # Of x and of the routing weights.
    for found, slope in zip(gradient[:2], slopes[:2], strict=True):
        np.testing.assert_array_equal(found, slope)


# bfloat16.


def narrow(inputs: Inputs, *, experts: bool = True) -> Inputs:
    """With tokens, and experts or not, in bfloat16; routing weights stay in float32."""
    x = np.asarray(jnp.asarray(inputs.x, jnp.bfloat16))
    found = jax.tree.map(lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16)), inputs.experts)
    # What is not rounded holds the same values.
    wide = jax.tree.map(lambda a: a.astype(np.float32), found)
    return inputs._replace(x=x, experts=found if experts else wide)


@pytest.mark.parametrize("weights_input", [False, True], ids=["output", "input"])
def test_bfloat16_is_rounded_where_the_tiles_round_it(weights_input: bool) -> None:
    options = Options(weights_input=weights_input)
    inputs = narrow(make_inputs(Shape(tokens=150, k=2, num_experts=4), has_bias=False))
    y, _ = run(inputs, options, every=True)
    wanted, _ = run(inputs, options, every=False)
    assert y.dtype == wanted.dtype == jnp.bfloat16
    # Sums of the same numbers in another order: hardly one is rounded to the other side.
    assert (y != wanted).mean() < 0.01
    np.testing.assert_allclose(y.astype(np.float32), wanted.astype(np.float32), atol=0.05)


def test_gradients_of_float32_weights_are_not_rounded() -> None:
    inputs = make_inputs(Shape(tokens=7, k=2, num_experts=5), has_bias=False)
    y, gradient = run(narrow(inputs), Options(), every=True)
    same, wide = run(narrow(inputs, experts=False), Options(), every=True)
    np.testing.assert_array_equal(same, y)
    for found, rounded in zip(wide[2:], gradient[2:], strict=True):
        assert found.dtype == np.float32 and rounded.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found.astype(rounded.dtype), rounded)
        assert (found != rounded.astype(np.float32)).mean() > 0.3


def test_reverse_mode_holds_the_gradients_of_all_experts_once() -> None:
    tokens, k, experts, width = 8, 2, 64, 64
    shapes = Inputs(
        x=jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        topk_ids=jax.ShapeDtypeStruct((tokens, k), jnp.int32),
        topk_weights=jax.ShapeDtypeStruct((tokens, k), jnp.float32),
        valid=jax.ShapeDtypeStruct((tokens,), bool),
        experts=Stacked(
            jax.ShapeDtypeStruct((experts, 2, width, width), jnp.float32),
            jax.ShapeDtypeStruct((experts, width, width), jnp.float32),
        ),
        bias=None,
    )
    found = []
    for every in (True, False):
        program = _run.lower(shapes, shapes.x, options=Options(), every=every).compile()
        found.append(program.memory_analysis().temp_size_in_bytes)
    of_all = 3 * experts * width * width * 4
    assert found[0] < of_all / 4 < of_all < found[1]
