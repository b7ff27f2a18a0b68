"""Routers: which experts are chosen, and their weights, against NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from layers.filled import fill, normal, rms, wide
from moejax.config import ExpertGroups, Router
from moejax.layers.router import RouterLayer, Routing, keep_best_groups, route, sparsemixer

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def make_router(experts: int, k: int, **options: Any) -> Router:
    shape: dict[str, Any] = {"num_experts": experts, "experts_per_token": k}
    return Router(**shape | {"renormalize": False, "float32_weights": True} | options)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Places of the k largest, the first of equal ones first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def assert_routed(
    routing: Routing, ids: np.ndarray, weights: np.ndarray, rtol: float = 1e-5
) -> None:
    assert routing.topk_ids.dtype == jnp.int32
    np.testing.assert_array_equal(routing.topk_ids, ids)
    np.testing.assert_allclose(routing.topk_weights, weights, rtol=rtol)


# Softmax.


def test_a_routing_by_hand() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]], jnp.float32))
    routing = route(logits, make_router(4, 2))
    assert_routed(routing, np.array([[1, 3]]), np.array([[0.4, 0.3]]))
    routing = route(logits, make_router(4, 2, renormalize=True))
    assert_routed(routing, np.array([[1, 3]]), np.array([[4 / 7, 3 / 7]]))
    routing = route(logits, make_router(4, 2, renormalize=True, scale=3.5))
    assert_routed(routing, np.array([[1, 3]]), np.array([[2.0, 1.5]]))


@pytest.mark.parametrize("renormalize", [False, True], ids=["as they are", "renormalised"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_likeliest_experts_are_chosen(k: int, renormalize: bool) -> None:
    logits = 3 * normal(20, 8)
    routing = route(jnp.asarray(logits), make_router(8, k, renormalize=renormalize))
    p = softmax(logits)
    ids = best(p, k)
    weights = np.take_along_axis(p, ids, axis=1)
    if renormalize:
        weights /= weights.sum(axis=1, keepdims=True)
    assert_routed(routing, ids, weights)


def test_renormalised_weights_are_the_softmax_of_the_chosen_logits() -> None:
    # As gpt-oss and Granite compute it: the experts that are not chosen do not matter.
    logits = 3 * normal(20, 8)
    routing = route(jnp.asarray(logits), make_router(8, 3, renormalize=True))
    ids = best(logits, 3)
    assert_routed(routing, ids, softmax(np.take_along_axis(logits, ids, axis=1)))


def test_of_equal_experts_the_first_is_chosen() -> None:
    routing = route(jnp.ones((1, 5), jnp.float32), make_router(5, 3))
    assert routing.topk_ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_that_are_rounded_to_the_same_are_told_apart_by_their_logits(score: str) -> None:
    # Of both functions, 1 and 0 in float32.
    logits = jnp.array([[-300.0, -200.0, 40.0, 80.0, -250.0]], jnp.float32)
    routing = route(logits, make_router(5, 4, score=score))
    assert routing.topk_ids.tolist() == [[3, 2, 1, 4]]


def test_large_logits_do_not_overflow() -> None:
    logits = jnp.array([[1e4, -1e4, 9999.0]], jnp.float32)
    routing = route(logits, make_router(3, 2, renormalize=True))
    np.testing.assert_allclose(routing.topk_weights, softmax(np.array([[1.0, 0.0]])), rtol=1e-6)


@pytest.mark.parametrize("float32", [True, False], ids=["float32", "the model's dtype"])
def test_weights_are_kept_or_rounded_after_float32(float32: bool) -> None:
    logits = normal(20, 8).astype(BFLOAT16)
    part = make_router(8, 2, renormalize=True, float32_weights=float32, scale=2.5)
    routing = route(jnp.asarray(logits), part)
    p = np.sort(softmax(logits.astype(np.float32)), axis=1)[:, :-3:-1]
    wanted = (2.5 * p / p.sum(axis=1, keepdims=True)).astype(np.float32)
    assert routing.topk_weights.dtype == (jnp.float32 if float32 else jnp.bfloat16)
    if float32:
        np.testing.assert_allclose(routing.topk_weights, wanted, rtol=1e-6)
    else:
        np.testing.assert_array_equal(np.asarray(routing.topk_weights), wanted.astype(BFLOAT16))


# Sigmoid, and a bias that chooses.


def test_a_choice_bias_by_hand() -> None:
    # Scores 1/2, 1/2 and 0.9; the bias makes the worse ones better, and leaves their weights.
    logits = jnp.array([[0.0, 0.0, np.log(9)]], jnp.float32)
    bias = jnp.array([0.5, 0.45, 0.0], jnp.float32)
    part = make_router(3, 2, score="sigmoid", choice_bias=True)
    assert_routed(route(logits, part, bias), np.array([[0, 1]]), np.array([[0.5, 0.5]]))
    assert_routed(route(logits, part), np.array([[2, 0]]), np.array([[0.9, 0.5]]))


@pytest.mark.parametrize("renormalize", [False, True], ids=["as they are", "renormalised"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_choice_bias_chooses_and_weighs_nothing(score: str, renormalize: bool) -> None:
    logits, bias = 2 * normal(40, 8), 0.3 * normal(8, seed=1)
    part = make_router(8, 3, score=score, choice_bias=True, renormalize=renormalize, scale=2.5)
    routing = jax.jit(route, static_argnums=1)(jnp.asarray(logits), part, jnp.asarray(bias))
    scores = softmax(logits) if score == "softmax" else sigmoid(logits)
    ids = best(scores + bias, 3)
    assert (ids != best(scores, 3)).any()
    weights = np.take_along_axis(scores, ids, axis=1)
    if renormalize:
        weights /= weights.sum(axis=1, keepdims=True)
    assert_routed(routing, ids, 2.5 * weights)


def test_weights_that_are_all_zero_are_not_divided_by_zero() -> None:
    logits = jnp.full((1, 4), -200.0, jnp.float32)
    routing = route(logits, make_router(4, 2, score="sigmoid", renormalize=True))
    assert routing.topk_weights.tolist() == [[0, 0]]


# Groups.


def test_groups_by_hand() -> None:
    scores = jnp.array([[9.0, 0, 5, 5, 8, 1, 3, 3]], jnp.float32)
    inf = -np.inf
    # The best of each of the groups of two: 9, 5, 8 and 3. The sums of both: 9, 10, 9 and 6.
    one = keep_best_groups(scores, ExpertGroups(count=4, kept=2, best=1))
    assert one.tolist() == [[9, 0, inf, inf, 8, 1, inf, inf]]
    two = keep_best_groups(scores, ExpertGroups(count=4, kept=2, best=2))
    assert two.tolist() == [[9, 0, 5, 5, inf, inf, inf, inf]]  # of equal groups the first


@pytest.mark.parametrize("best_of", [1, 2])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_only_experts_of_the_best_groups_are_chosen(with_bias: bool, best_of: Any) -> None:
    logits, bias = 2 * normal(60, 12), normal(12, seed=1)
    groups = ExpertGroups(count=4, kept=2, best=best_of)
    part = make_router(12, 5, score="sigmoid", choice_bias=with_bias, groups=groups)
    given = jnp.asarray(bias) if with_bias else None
    routing = jax.jit(route, static_argnums=1)(jnp.asarray(logits), part, given)
    scores = sigmoid(logits)
    choice = scores + bias if with_bias else scores
    assert (choice < 0).any() == with_bias
    ids = []
    for row in choice:
        in_group = np.sort(row.reshape(4, 3), axis=1)[:, ::-1]
        kept = best(in_group[:, :best_of].sum(axis=1), 2)
        allowed = [expert for expert in range(12) if expert // 3 in kept]
        ids.append(sorted(allowed, key=lambda expert: -row[expert])[:5])
    assert (np.array(ids) != best(choice, 5)).any()
    assert_routed(routing, np.array(ids), np.take_along_axis(scores, np.array(ids), axis=1))


# SparseMixer.


@pytest.mark.parametrize(
    ("logits", "jitter", "ids", "weights"),
    [
        # 3 is a quarter of 4 away from it: too far for 2 * 0.01, near for 2 * 0.2.
        ([4.0, 3, 1, -2], 0.01, [0, 1], [1, 1]),
        ([4.0, 3, 1, -2], 0.2, [0, 1], [1 / (1 + np.e**-1), 1]),
        # For 2 * 0.4, 1 is near to 4 and to 3; -2 is not.
        ([4.0, 3, 1, -2], 0.4, [0, 1], [1 / (1 + np.e**-1 + np.e**-3), 1 / (1 + np.e**-2)]),
        # The share is of the larger absolute value: -2 is a half away from -1, -4 three quarters.
        ([-4.0, -1, -2], 0.3, [1, 2], [1 / (1 + np.e**-1), 1 / (1 + np.e**-2)]),
        ([2.0, 5, 2, 5], 0.01, [1, 3], [0.5, 1]),
        ([0.0, 0, 0, 0], 0.01, [0, 1], [1 / 4, 1 / 3]),
        ([1.0, 7, 7, 7], 0.0, [1, 2], [1 / 3, 1 / 2]),
    ],
)
def test_sparsemixer_by_hand(
    logits: list[float], jitter: float, ids: list[int], weights: list[float]
) -> None:
    found = sparsemixer(jnp.array([logits], jnp.float32), jitter)
    assert_routed(Routing(*found), np.array([ids]), np.array([weights]))


@pytest.mark.parametrize("jitter", [0.01, 0.25])
def test_sparsemixer_takes_the_best_expert_twice(jitter: float) -> None:
    logits = 2 * normal(50, 6)
    part = make_router(6, 2, score="sparsemixer", jitter=jitter)
    ids, weights = [], []
    for row in logits.astype(np.float64):
        left = list(range(6))
        for _ in range(2):
            top = max(left, key=lambda expert: row[expert])
            near = [
                expert
                for expert in left
                if (row[top] - row[expert]) / max(abs(row[expert]), row[top]) <= 2 * jitter
            ]
            ids.append(top)
            weights.append(1 / np.exp(row[near] - row[top]).sum())
            left.remove(top)
    routing = route(jnp.asarray(logits), part)
    assert_routed(routing, np.reshape(ids, (50, 2)), np.reshape(weights, (50, 2)))
    # Weights are not divided by their sum.
    assert (np.asarray(routing.topk_weights).sum(axis=1) > 1.01).any()


# The layer.

HIDDEN = 16


def make_layer(part: Router, *, dtype: str = "float32") -> RouterLayer:
    return fill(RouterLayer(part, HIDDEN, epsilon=1e-3, stack=(), dtype=dtype))


def test_logits_are_a_product_and_a_bias() -> None:
    x = normal(9, HIDDEN)
    for bias in (False, True):
        layer = make_layer(make_router(5, 2, bias=bias))
        wanted = x @ wide(layer.weight).T + (wide(layer.bias) if bias else 0)
        np.testing.assert_allclose(layer.logits(jnp.asarray(x)), wanted, atol=1e-5)
        routing = layer(jnp.asarray(x))
        ids = best(wanted, 2)
        assert_routed(routing, ids, np.take_along_axis(softmax(wanted), ids, axis=1))


def test_a_router_may_read_a_norm_of_its_own_and_scale_each_expert() -> None:
    part = make_router(5, 2, input_norm=True, expert_scale=True, renormalize=True)
    layer, x = make_layer(part), 30 * normal(9, HIDDEN)
    read = rms(x, 1e-3) * wide(layer.input_scale) / 4  # the root of 16
    p = softmax(read @ wide(layer.weight).T)
    ids = best(p, 2)
    weights = np.take_along_axis(p, ids, axis=1)
    weights = weights / weights.sum(axis=1, keepdims=True) * wide(layer.expert_scale)[ids]
    assert_routed(jax.jit(layer)(jnp.asarray(x)), ids, weights)


def test_a_layer_passes_its_choice_bias() -> None:
    layer, x = make_layer(make_router(5, 2, score="sigmoid", choice_bias=True)), normal(9, HIDDEN)
    scores = sigmoid(x @ wide(layer.weight).T)
    ids = best(scores + wide(layer.choice_bias), 2)
    assert_routed(layer(jnp.asarray(x)), ids, np.take_along_axis(scores, ids, axis=1))


@pytest.mark.parametrize("float32", [True, False], ids=["float32", "the model's dtype"])
def test_logits_of_a_bfloat16_model_may_be_in_float32(float32: bool) -> None:
    part = make_router(2, 1, float32_logits=float32, bias=True)
    layer = RouterLayer(part, HIDDEN, epsilon=1e-3, stack=(), dtype="bfloat16")
    dtype = "float32" if float32 else "bfloat16"
    assert layer.weight[...].dtype == layer.bias[...].dtype == dtype
    # 64 and 64.25, which bfloat16 rounds to 64 both.
    weight = np.zeros((2, HIDDEN), np.float32)
    weight[:, 0], weight[1, 1] = 8, 0.25
    layer.weight[...] = jnp.asarray(weight, dtype)
    x = jnp.zeros((1, HIDDEN), jnp.bfloat16).at[0, :2].set(jnp.array([8, 1], jnp.bfloat16))
    logits = layer.logits(x)
    assert logits.dtype == dtype
    assert logits.tolist() == ([[64, 64.25]] if float32 else [[64, 64]])
    assert layer(x).topk_ids.tolist() == [[1 if float32 else 0]]


def test_what_is_learned_has_the_dtypes_of_its_use() -> None:
    options = {"input_norm": True, "expert_scale": True, "choice_bias": True}
    layer = RouterLayer(
        make_router(5, 2, **options), HIDDEN, epsilon=1e-3, stack=(3,), dtype="bfloat16"
    )
    assert layer.choice_bias[...].shape == layer.expert_scale[...].shape == (3, 5)
    assert layer.input_scale[...].shape == (3, HIDDEN)
    assert layer.choice_bias[...].dtype == jnp.float32  # it is added to scores in float32
    assert layer.input_scale[...].dtype == layer.expert_scale[...].dtype == jnp.bfloat16
    assert layer.weight[...].dtype == jnp.bfloat16
    plain = RouterLayer(make_router(5, 2), HIDDEN, epsilon=1e-3, stack=(3,), dtype="bfloat16")
    assert len(jax.tree.leaves(plain)) == 1
