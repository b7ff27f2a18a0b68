"""Activations, the gated MLP and the shared expert, against NumPy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.filled import activated, fill, mlp, normal, wide
from moejax.config import Activation, ClampedSwiglu, SharedExpert
from moejax.layers.mlp import MlpLayer, SharedExpertLayer, activate

CLAMPED = ClampedSwiglu(limit=1.5, alpha=1.702)
ACTIVATIONS: list[Activation] = ["silu", "gelu_tanh", CLAMPED]


# Activations.


@pytest.mark.parametrize(
    ("gate", "up", "wanted"),
    [
        (0.0, 5.0, 0),
        (1.0, 0.0, 1 / (1 + math.exp(-1.702))),  # up counts from -1
        (1.0, -1.0, 0),
        (9.0, 9.0, 2.5 * 1.5 / (1 + math.exp(-1.702 * 1.5))),  # both are cut at 1.5
        (1.5, -9.0, -0.5 * 1.5 / (1 + math.exp(-1.702 * 1.5))),
        (-9.0, 0.0, -9 / (1 + math.exp(1.702 * 9))),  # the gate is not cut below
    ],
)
def test_the_clamped_swiglu_by_hand(gate: float, up: float, wanted: float) -> None:
    found = activate(jnp.array([gate]), jnp.array([up]), CLAMPED)
    assert float(found[0]) == pytest.approx(wanted, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_are_those_of_float64(activation: Activation) -> None:
    gate, up = 3 * normal(200), 3 * normal(200, seed=1)
    found = activate(jnp.asarray(gate), jnp.asarray(up), activation)
    np.testing.assert_allclose(found, activated(gate, up, activation), atol=1e-5)


def test_activations_keep_the_dtype() -> None:
    x = jnp.asarray(normal(8), jnp.bfloat16)
    assert {activate(x, x, activation).dtype for activation in ACTIVATIONS} == {x.dtype}


# Layers.

HIDDEN, WIDTH, TOKENS = 10, 6, 4


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_an_mlp_activates_between_its_products(activation: Activation) -> None:
    layer = fill(MlpLayer(HIDDEN, WIDTH, activation, stack=(), dtype="float32"))
    x = 2 * normal(TOKENS, HIDDEN)
    found = jax.jit(layer)(jnp.asarray(x))
    np.testing.assert_allclose(found, mlp(layer, x, activation), atol=1e-5)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_shared_expert_may_be_gated(gated: bool) -> None:
    part = SharedExpert(width=WIDTH, gated=gated, activation="gelu_tanh")
    layer = fill(SharedExpertLayer(HIDDEN, part, stack=(), dtype="float32"))
    x = 2 * normal(TOKENS, HIDDEN)
    wanted = mlp(layer, x, "gelu_tanh")
    if layer.router is not None:
        wanted /= 1 + np.exp(-x @ wide(layer.router.weight).T)
    assert (layer.router is not None) == gated
    np.testing.assert_allclose(jax.jit(layer)(jnp.asarray(x)), wanted, atol=1e-5)
