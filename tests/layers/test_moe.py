"""Layers of routed and shared experts, and of a dense MLP beside them, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.filled import activated, fill, mlp, normal, rms, wide
from moejax.config import Mlp, MlpAndMoe, Moe, Router, SharedExpert
from moejax.layers.experts import Stacked
from moejax.layers.moe import MlpAndMoeLayer, MoeLayer

HIDDEN, WIDTH, SHARED_WIDTH, TOKENS, EXPERTS = 10, 6, 7, 4, 3
EPSILON = 1e-3


def make_router(**options: Any) -> Router:
    shape: dict[str, Any] = {"num_experts": EXPERTS, "experts_per_token": 2, "renormalize": True}
    return Router(**shape | {"float32_weights": True} | options)


def make_moe(**options: Any) -> Moe:
    return Moe(**{"router": make_router(), "expert_width": WIDTH} | options)


GATE_UP = normal(EXPERTS, 2, WIDTH, HIDDEN, seed=8)
DOWN = normal(EXPERTS, HIDDEN, WIDTH, seed=9)
STACKED = Stacked(jnp.asarray(GATE_UP), jnp.asarray(DOWN))


def make_layer(part: Moe) -> MoeLayer:
    return fill(MoeLayer(part, HIDDEN, epsilon=EPSILON, stack=(), dtype="float32"))


def run(layer: Any, x: np.ndarray, *inputs: np.ndarray) -> np.ndarray:
    more = map(jnp.asarray, inputs)
    return np.asarray(jax.jit(layer)(jnp.asarray(x), jnp.ones(len(x), bool), STACKED, *more))


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def routed(layer: MoeLayer, x: np.ndarray, read: np.ndarray) -> np.ndarray:
    """What the experts give for x where the router reads `read`: softmax, renormalised."""
    part, router = layer.part, layer.router
    if part.router.input_norm:
        read = rms(read, EPSILON) * wide(router.input_scale) * HIDDEN**-0.5
    p = softmax(read @ wide(router.weight).T)
    y = np.zeros(x.shape)
    for token in range(len(x)):
        chosen = np.argsort(-p[token])[:2]
        for e in chosen:
            weight = p[token, e] / p[token, chosen].sum()
            if part.router.expert_scale:
                weight *= wide(router.expert_scale)[e]
            given = x[token] * weight if part.weights_input else x[token]
            gate, up = GATE_UP[e].astype(np.float64) @ given
            if layer.expert_bias is not None:
                gate, up = (
                    gate + wide(layer.expert_bias.gate)[e],
                    up + wide(layer.expert_bias.up)[e],
                )
            out = DOWN[e].astype(np.float64) @ activated(gate, up, part.activation)
            if layer.expert_bias is not None:
                out = out + wide(layer.expert_bias.down)[e]
            y[token] += out * (1 if part.weights_input else weight)
    return y


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared": SharedExpert(width=SHARED_WIDTH, gated=False)},
        {"shared": SharedExpert(width=SHARED_WIDTH, gated=True)},
        {"expert_bias": True, "activation": "gelu_tanh"},
        {"weights_input": True, "shared": SharedExpert(width=SHARED_WIDTH, gated=False)},
    ],
    ids=["routed only", "shared", "shared and gated", "bias", "weights on inputs"],
)
def test_a_layer_adds_what_its_experts_give(options: dict[str, Any]) -> None:
    layer = make_layer(make_moe(**options))
    x = normal(TOKENS, HIDDEN, seed=10)
    wanted = routed(layer, x, x)
    if layer.shared is not None:
        y = mlp(layer.shared, x, "silu")
        if layer.shared.router is not None:
            y /= 1 + np.exp(-x @ wide(layer.shared.router.weight).T)
        wanted += y
    np.testing.assert_allclose(run(layer, x), wanted, atol=2e-5)


def test_the_router_may_read_something_else_than_the_experts() -> None:
    layer = make_layer(make_moe())
    x, read = normal(TOKENS, HIDDEN, seed=10), normal(TOKENS, HIDDEN, seed=11)
    wanted = routed(layer, x, read)
    assert np.abs(wanted - routed(layer, x, x)).max() > 0.1
    np.testing.assert_allclose(run(layer, x, read), wanted, atol=2e-5)


def test_biases_of_experts_are_stacked_like_other_weights() -> None:
    part = make_moe(expert_bias=True)
    layer = MoeLayer(part, HIDDEN, epsilon=EPSILON, stack=(5,), dtype="bfloat16")
    bias = layer.expert_bias
    assert bias is not None
    shapes = [part[...].shape for part in (bias.gate, bias.up, bias.down)]
    assert shapes == [(5, EXPERTS, WIDTH)] * 2 + [(5, EXPERTS, HIDDEN)]
    assert make_layer(make_moe()).expert_bias is None


# An MLP beside the experts.


def make_both(norm: Any) -> MlpAndMoeLayer:
    moe = make_moe(router=make_router(input_norm=True, expert_scale=True), activation="gelu_tanh")
    part = MlpAndMoe(mlp=Mlp(width=SHARED_WIDTH, activation="gelu_tanh"), moe=moe)
    return fill(MlpAndMoeLayer(part, HIDDEN, norm=norm, epsilon=EPSILON, stack=(), dtype="float32"))


@pytest.mark.parametrize("norm", ["rms", "rms_float32", "layer"])
def test_mlp_and_experts_read_norms_of_the_residual_and_the_router_itself(norm: str) -> None:
    layer = make_both(norm)
    x = 3 * normal(TOKENS, HIDDEN, seed=10)

    def normed(part: Any, y: np.ndarray) -> np.ndarray:
        if norm == "layer":
            centred = y - y.mean(axis=-1, keepdims=True)
            return rms(centred, EPSILON, wide(part.weight)) + wide(part.bias)
        return rms(y, EPSILON, wide(part.weight))

    dense = normed(layer.mlp_post_norm, mlp(layer.mlp, normed(layer.mlp_norm, x), "gelu_tanh"))
    experts = routed(layer.moe, normed(layer.moe_norm, x), read=x)
    wanted = dense + normed(layer.moe_post_norm, experts)
    np.testing.assert_allclose(run(layer, x), wanted, atol=5e-5)
