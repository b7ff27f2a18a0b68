"""Attention over cached keys and values, and its projections, against NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.config import Attention, Rope
from moejax.layers.attention import (
    AttentionLayer,
    Qkv,
    add_keys,
    attend,
    attend_rows,
    finish_partial,
    start_partial,
    visible,
)

SCALE = 0.3
QUERIES, KEYS, HEADS, SIZE = 4, 10, 6, 8

jit_attend = jax.jit(attend, static_argnames="scale")


def make_qkv(*, kv_heads: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(QUERIES, HEADS, SIZE), (KEYS, kv_heads, SIZE), (KEYS, kv_heads, SIZE)]
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return q, k, v


def by_loops(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Each query and head alone, over the keys that it sees, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    o = np.zeros(q.shape)
    for i, head in np.ndindex(*q.shape[:2]):
        group = head * k.shape[1] // q.shape[1]
        seen = np.flatnonzero(mask[i])
        if len(seen):
            scores = np.exp(SCALE * k[seen, group] @ q[i, head])
            o[i, head] = scores / scores.sum() @ v[seen, group]
    return o


def run(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.asarray(jit_attend(*map(jnp.asarray, (q, k, v, mask)), scale=SCALE))


CAUSAL = np.arange(QUERIES)[:, None] + 3 >= np.arange(KEYS)


# What a query sees.


@pytest.mark.parametrize(
    ("window", "seen"),
    [
        (None, [[0, 1, 2], [0, 1, 2, 3, 4, 5]]),
        (1, [[2], [5]]),
        (2, [[1, 2], [4, 5]]),
        (4, [[0, 1, 2], [2, 3, 4, 5]]),
        (100, [[0, 1, 2], [0, 1, 2, 3, 4, 5]]),
    ],
)
def test_a_token_sees_itself_and_those_before_it_within_the_window(
    window: int | None, seen: list[list[int]]
) -> None:
    mask = visible(jnp.array([2, 5], jnp.int32), jnp.arange(8, dtype=jnp.int32), window)
    assert [np.flatnonzero(row).tolist() for row in np.asarray(mask)] == seen


# Attention.


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_query_heads_share_kv_heads_in_order(kv_heads: int) -> None:
    q, k, v = make_qkv(kv_heads=kv_heads)
    np.testing.assert_allclose(run(q, k, v, CAUSAL), by_loops(q, k, v, CAUSAL), atol=2e-6)


@pytest.mark.parametrize("window", [1, 3])
def test_windows_hide_what_is_too_far_behind(window: int) -> None:
    q, k, v = make_qkv(kv_heads=2)
    positions = jnp.arange(QUERIES, dtype=jnp.int32) + 3
    mask = np.asarray(visible(positions, jnp.arange(KEYS, dtype=jnp.int32), window))
    wanted = by_loops(q, k, v, mask)
    np.testing.assert_allclose(run(q, k, v, mask), wanted, atol=2e-6)
    if window == 1:  # only itself: the value comes back
        np.testing.assert_allclose(wanted[:, 0], v[3:7, 0], atol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_keys_and_values_that_nobody_sees_may_hold_anything(bad: float) -> None:
    q, k, v = make_qkv(kv_heads=2)
    mask = CAUSAL.copy()
    mask[:, 1] = False
    clean = run(q, k, v, mask)
    unseen = ~mask.any(axis=0)
    assert np.flatnonzero(unseen).tolist() == [1, 7, 8, 9]
    k[unseen] = v[unseen] = bad
    np.testing.assert_array_equal(run(q, k, v, mask), clean)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k, v = make_qkv(kv_heads=2)
    mask = CAUSAL.copy()
    mask[2] = False
    o = run(q, k, v, mask)
    assert (o[2] == 0).all()
    np.testing.assert_allclose(o, by_loops(q, k, v, mask), atol=2e-6)
    k[:] = v[:] = np.nan
    assert (run(q, k, v, np.zeros_like(mask)) == 0).all()


def test_large_scores_do_not_overflow() -> None:
    q, k, v = make_qkv(kv_heads=6)
    o = run(1000 * q, k, v, CAUSAL)
    winner = np.where(CAUSAL[:, None], np.einsum("qhd,shd->qhs", q, k), -np.inf).argmax(axis=2)
    wanted = v[winner, np.arange(HEADS)]
    np.testing.assert_allclose(o, wanted, atol=1e-4)


def test_bfloat16_keeps_scores_in_float32() -> None:
    # Scores of 64 and 64.25, which bfloat16 would round to 64 both.
    q = np.array([[[8.0, 0.25]]], ml_dtypes.bfloat16)
    k = np.array([[[8.0, 0.0]], [[8.0, 1.0]]], ml_dtypes.bfloat16)
    v = np.array([[[0.0, 1.0]], [[1.0, 1.0]]], ml_dtypes.bfloat16)
    o = attend(*map(jnp.asarray, (q, k, v)), jnp.ones((1, 2), bool), 1.0)
    assert o.dtype == jnp.bfloat16
    weight = 1 / (1 + np.exp(-0.25))  # 0.562
    np.testing.assert_allclose(o[0, 0].astype(jnp.float32), [weight, 1], atol=2**-8)


def test_rows_attend_apart() -> None:
    rows = [make_qkv(kv_heads=2, seed=seed) for seed in range(3)]
    masks = np.stack([CAUSAL, np.roll(CAUSAL, 1, axis=0), ~CAUSAL])
    stacked = [jnp.stack(part) for part in zip(*rows, strict=True)]
    found = attend_rows(*stacked, jnp.asarray(masks), SCALE)
    for o, row, mask in zip(np.asarray(found), rows, masks, strict=True):
        np.testing.assert_allclose(o, by_loops(*row, mask), atol=2e-6)


# Projections.

HIDDEN, TOKENS = 12, 3
POSITIONS = np.array([0, 5, 2], np.int32)


def make_layer(part: Attention) -> AttentionLayer:
    """A layer with random weights; norms and biases too."""
    layer = AttentionLayer(part, HIDDEN, epsilon=1e-6, stack=(), dtype="float32")
    rng = np.random.default_rng(7)
    for module in (layer.q, layer.k, layer.v, layer.o):
        for param in (module.weight, module.bias):
            if param is not None:
                param[...] = jnp.asarray(rng.standard_normal(param.shape, np.float32))
    if part.qk_norm != "none":
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight[...] = jnp.asarray(1 + rng.random(norm.weight.shape, np.float32))
    return layer


def make_part(**options: object) -> Attention:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 6, "scale": 1.0}
    return Attention(**shape, rope=Rope(theta=100.0), **options)  # type: ignore[arg-type]


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def rotated(x: np.ndarray) -> np.ndarray:
    """Dimension i and i + 3 as one complex number, turned."""
    turn = np.exp(1j * POSITIONS[:, None, None] * 100.0 ** (-np.arange(3) / 3))
    z = (x[..., :3] + 1j * x[..., 3:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("clip", [None, 0.75], ids=["no clip", "clip"])
@pytest.mark.parametrize("norm", ["none", "head", "projection"])
def test_projections_are_biased_normed_clipped_and_then_rotated(
    norm: str, clip: float | None
) -> None:
    layer = make_layer(make_part(qkv_bias=True, qk_norm=norm, qkv_clip=clip))
    x = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN), np.float32)
    found = layer.project(jnp.asarray(x), jnp.asarray(POSITIONS))
    wanted = {}
    for name, module in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
        weight, bias = (np.asarray(p[...], np.float64) for p in (module.weight, module.bias))
        y = x @ weight.T + bias
        norm_layer = getattr(layer, f"{name}_norm", None)
        if norm == "projection" and norm_layer is not None:
            y = normed(y, np.asarray(norm_layer.weight[...], np.float64))
        y = y.reshape(TOKENS, -1, 6)
        if norm == "head" and norm_layer is not None:
            y = normed(y, np.asarray(norm_layer.weight[...], np.float64))
        if clip is not None:
            y = np.clip(y, -clip, clip)
        wanted[name] = y if name == "v" else rotated(y)
    assert isinstance(found, Qkv)
    for name, y in wanted.items():
        np.testing.assert_allclose(getattr(found, name), y, atol=1e-5, err_msg=name)


def test_the_output_projection_takes_heads_in_order() -> None:
    layer = make_layer(make_part(output_bias=True))
    o = np.random.default_rng(2).standard_normal((TOKENS, 4, 6), np.float32)
    weight, bias = (np.asarray(p[...]) for p in (layer.o.weight, layer.o.bias))
    assert weight.shape == (HIDDEN, 24)
    wanted = o.reshape(TOKENS, 24) @ weight.T + bias
    np.testing.assert_allclose(layer.output(jnp.asarray(o)), wanted, atol=1e-5)


def test_biases_and_norms_are_there_only_where_asked() -> None:
    layer = AttentionLayer(make_part(), HIDDEN, epsilon=1e-6, stack=(3,), dtype="bfloat16")
    assert layer.q.bias is None and layer.o.bias is None
    assert not hasattr(layer, "q_norm")
    assert layer.k.weight[...].shape == (3, 12, HIDDEN)
    assert layer.k.weight[...].dtype == jnp.bfloat16


# Keys that come in parts.


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("cuts", [[], [5], [1, 2, 9], [3, 3, 3]], ids=str)
def test_keys_may_come_in_parts(kv_heads: int, cuts: list[int]) -> None:
    """Large scores first, last or in the middle; a part that nobody sees holds NaN."""
    q, k, v = make_qkv(kv_heads=kv_heads)
    k[4] *= 30
    mask = CAUSAL & (np.arange(KEYS) != 7)
    k[7] = v[7] = np.nan
    partial = start_partial(jnp.asarray(q), kv_heads)
    for first, last in zip([0, *cuts], [*cuts, KEYS], strict=True):
        part = (jnp.asarray(x) for x in (k[first:last], v[first:last], mask[:, first:last]))
        if first < last:
            partial = add_keys(partial, jnp.asarray(q), *part, SCALE)
    wanted = by_loops(q, np.nan_to_num(k), np.nan_to_num(v), mask)
    np.testing.assert_allclose(finish_partial(partial), wanted, atol=1e-5)


def test_a_query_without_keys_gives_zeros_however_many_parts_there_are() -> None:
    q, k, v = map(jnp.asarray, make_qkv(kv_heads=2))
    nothing = jnp.zeros((QUERIES, KEYS), bool)
    partial = start_partial(q, 2)
    for _ in range(3):
        np.testing.assert_array_equal(finish_partial(partial), np.zeros(q.shape))
        partial = add_keys(partial, q, k, v, nothing, SCALE)
