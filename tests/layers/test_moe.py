"""The router and the layer of routed and shared experts, against NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.config import Moe, Router, SharedExpert
from moejax.layers.experts import Stacked
from moejax.layers.moe import MoeLayer, route

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def make_router(experts: int, k: int, *, renormalize: bool, float32: bool = True) -> Router:
    return Router(
        num_experts=experts, experts_per_token=k, renormalize=renormalize, float32_weights=float32
    )


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


# The router.


def test_a_routing_by_hand() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]], jnp.float32))
    routing = route(logits, make_router(4, 2, renormalize=False))
    assert routing.topk_ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(routing.topk_weights, [[0.4, 0.3]], rtol=1e-6)
    routing = route(logits, make_router(4, 2, renormalize=True))
    assert routing.topk_ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(routing.topk_weights, [[4 / 7, 3 / 7]], rtol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True], ids=["as they are", "renormalised"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_likeliest_experts_are_chosen(k: int, renormalize: bool) -> None:
    logits = 3 * normal(20, 8)
    routing = route(jnp.asarray(logits), make_router(8, k, renormalize=renormalize))
    p = softmax(logits)
    ids = np.argsort(-p, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(p, ids, axis=1)
    if renormalize:
        weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(routing.topk_ids, ids)
    np.testing.assert_allclose(routing.topk_weights, weights, rtol=1e-5)


def test_of_equal_experts_the_first_is_chosen() -> None:
    routing = route(jnp.ones((1, 5), jnp.float32), make_router(5, 3, renormalize=False))
    assert routing.topk_ids.tolist() == [[0, 1, 2]]


def test_large_logits_do_not_overflow() -> None:
    logits = jnp.array([[1e4, -1e4, 9999.0]], jnp.float32)
    routing = route(logits, make_router(3, 2, renormalize=True))
    np.testing.assert_allclose(routing.topk_weights, softmax(np.array([[1.0, 0.0]])), rtol=1e-6)


@pytest.mark.parametrize("float32", [True, False], ids=["float32", "the model's dtype"])
def test_weights_are_kept_or_rounded_after_float32(float32: bool) -> None:
    logits = normal(20, 8).astype(BFLOAT16)
    routing = route(jnp.asarray(logits), make_router(8, 2, renormalize=True, float32=float32))
    p = np.sort(softmax(logits.astype(np.float32)), axis=1)[:, :-3:-1]
    wanted = (p / p.sum(axis=1, keepdims=True)).astype(np.float32)
    assert routing.topk_weights.dtype == (jnp.float32 if float32 else jnp.bfloat16)
    if float32:
        np.testing.assert_allclose(routing.topk_weights, wanted, rtol=1e-6)
    else:
        np.testing.assert_array_equal(np.asarray(routing.topk_weights), wanted.astype(BFLOAT16))


# The layer.

HIDDEN, WIDTH, SHARED_WIDTH, TOKENS = 10, 6, 7, 4


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def fill(layer: MoeLayer) -> None:
    """Random weights in every linear."""
    modules = [layer.router]
    if layer.shared is not None:
        modules += [layer.shared.gate, layer.shared.up, layer.shared.down]
        modules += [] if layer.shared.router is None else [layer.shared.router]
    for seed, module in enumerate(modules):
        module.weight[...] = jnp.asarray(normal(*module.weight.shape, seed=seed))


@pytest.mark.parametrize(
    "shared",
    [
        None,
        SharedExpert(width=SHARED_WIDTH, gated=False),
        SharedExpert(width=SHARED_WIDTH, gated=True),
    ],
    ids=["routed only", "shared", "shared and gated"],
)
def test_a_layer_adds_what_its_experts_give(shared: SharedExpert | None) -> None:
    part = Moe(router=make_router(3, 2, renormalize=True), expert_width=WIDTH, shared=shared)
    layer = MoeLayer(part, HIDDEN, stack=(), dtype="float32")
    fill(layer)
    gate_up, down = normal(3, 2, WIDTH, HIDDEN, seed=8), normal(3, HIDDEN, WIDTH, seed=9)
    x = normal(TOKENS, HIDDEN, seed=10)
    found = jax.jit(layer)(
        jnp.asarray(x), jnp.ones(TOKENS, bool), Stacked(jnp.asarray(gate_up), jnp.asarray(down))
    )
    p = softmax(x @ np.asarray(layer.router.weight[...]).T)
    wanted = np.zeros(x.shape)
    for token in range(TOKENS):
        chosen = np.argsort(-p[token])[:2]
        for e in chosen:
            gate, up = gate_up[e] @ x[token]
            wanted[token] += p[token, e] / p[token, chosen].sum() * (down[e] @ (silu(gate) * up))
    if layer.shared is not None:
        gate_w, up_w, down_w = (
            np.asarray(linear.weight[...])
            for linear in (layer.shared.gate, layer.shared.up, layer.shared.down)
        )
        y = (silu(x @ gate_w.T) * (x @ up_w.T)) @ down_w.T
        if layer.shared.router is not None:
            y /= 1 + np.exp(-x @ np.asarray(layer.shared.router.weight[...]).T)
        wanted += y
    np.testing.assert_allclose(found, wanted, atol=2e-5)
