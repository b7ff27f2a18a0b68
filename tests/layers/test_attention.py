"""Attention over cached keys and values, whole and by parts, against NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import Attention, Mla, Reach, Rope
from moejax.layers.attention import (
    Qkv,
    add_keys,
    attend,
    attend_rows,
    finish_partial,
    join_kv,
    num_kv_heads,
    split_kv,
    start_partial,
    value_size,
    visible,
)

SCALE = 0.3
QUERIES, KEYS, HEADS, SIZE = 4, 10, 6, 8

jit_attend = jax.jit(attend, static_argnames="scale")
jit_rows = jax.jit(attend_rows, static_argnums=4)
jit_start = jax.jit(start_partial, static_argnames="part")
jit_add = jax.jit(add_keys, static_argnames="scale")
jit_finish = jax.jit(finish_partial)


def make_qkv(*, kv_heads: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(QUERIES, HEADS, SIZE), (KEYS, kv_heads, SIZE), (KEYS, kv_heads, SIZE)]
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return q, k, v


def make_sinks() -> np.ndarray:
    """Among the scores, far below all of them and far above."""
    return np.array([0.5, -1.0, 2.0, -80.0, 80.0, 0.0], np.float32)


def by_loops(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, sinks: np.ndarray | None = None
) -> np.ndarray:
    """Each query and head alone, over the keys that it sees, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    o = np.zeros((*q.shape[:2], v.shape[2]))
    for i, head in np.ndindex(*q.shape[:2]):
        group = head * k.shape[1] // q.shape[1]
        seen = np.flatnonzero(mask[i])
        weights = np.exp(SCALE * k[seen, group] @ q[i, head])
        total = weights.sum() + (0 if sinks is None else np.exp(np.float64(sinks[head])))
        if len(seen):
            o[i, head] = weights / total @ v[seen, group]
    return o


def run(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, sinks: np.ndarray | None = None
) -> np.ndarray:
    inputs = map(jnp.asarray, (q, k, v, mask))
    return np.asarray(
        jit_attend(*inputs, scale=SCALE, sinks=None if sinks is None else jnp.asarray(sinks))
    )


CAUSAL = np.arange(QUERIES)[:, None] + 3 >= np.arange(KEYS)


def make_part(**options: Any) -> Attention:
    shape: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": 2, "head_size": SIZE}
    return Attention(**shape | {"scale": SCALE, "rope": Rope(theta=100.0)} | options)


MLA = Mla(
    num_heads=HEADS,
    q_latent_size=None,
    latent_size=6,
    nope_size=5,
    rope_size=4,
    value_size=3,
    scale=SCALE,
    rope=Rope(theta=100.0),
    latent_norm_epsilon=1e-6,
)


# What a query sees.


@pytest.mark.parametrize(
    ("reach", "seen"),
    [
        (Reach(), [[0, 1, 2], [0, 1, 2, 3, 4, 5]]),
        (Reach(window=1), [[2], [5]]),
        (Reach(window=2), [[1, 2], [4, 5]]),
        (Reach(window=4), [[0, 1, 2], [2, 3, 4, 5]]),
        (Reach(window=100), [[0, 1, 2], [0, 1, 2, 3, 4, 5]]),
        (Reach(chunk=1), [[2], [5]]),
        (Reach(chunk=2), [[2], [4, 5]]),
        (Reach(chunk=3), [[0, 1, 2], [3, 4, 5]]),
        (Reach(chunk=4), [[0, 1, 2], [4, 5]]),
        (Reach(chunk=100), [[0, 1, 2], [0, 1, 2, 3, 4, 5]]),
    ],
    ids=str,
)
def test_a_token_sees_itself_and_those_before_it_as_far_as_it_reaches(
    reach: Reach, seen: list[list[int]]
) -> None:
    mask = visible(jnp.array([2, 5], jnp.int32), jnp.arange(8, dtype=jnp.int32), reach)
    assert [np.flatnonzero(row).tolist() for row in np.asarray(mask)] == seen


@given(
    size=st.integers(1, 40),
    is_window=st.booleans(),
    first=st.integers(0, 60),
    key=st.integers(0, 90),
)
def test_windows_and_chunks_are_those_of_their_definitions(
    size: int, is_window: bool, first: int, key: int
) -> None:
    reach = Reach(window=size) if is_window else Reach(chunk=size)
    queries = np.arange(first, first + 30, dtype=np.int32)
    mask = visible(jnp.asarray(queries), jnp.array([key], jnp.int32), reach)
    same = queries - size < key if is_window else queries // size == key // size
    np.testing.assert_array_equal(np.asarray(mask)[:, 0], (key <= queries) & same)


# Attention.


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_query_heads_share_kv_heads_in_order(kv_heads: int) -> None:
    q, k, v = make_qkv(kv_heads=kv_heads)
    np.testing.assert_allclose(run(q, k, v, CAUSAL), by_loops(q, k, v, CAUSAL), atol=2e-6)


@pytest.mark.parametrize("reach", [Reach(window=1), Reach(window=3), Reach(chunk=4)], ids=str)
def test_windows_and_chunks_hide_what_is_too_far_behind(reach: Reach) -> None:
    q, k, v = make_qkv(kv_heads=2)
    positions = jnp.arange(QUERIES, dtype=jnp.int32) + 3
    mask = np.asarray(visible(positions, jnp.arange(KEYS, dtype=jnp.int32), reach))
    wanted = by_loops(q, k, v, mask)
    np.testing.assert_allclose(run(q, k, v, mask), wanted, atol=2e-6)
    if reach.window == 1:  # only itself: the value comes back
        np.testing.assert_allclose(wanted[:, 0], v[3:7, 0], atol=1e-12)
    if reach.chunk == 4:  # position 4 begins a chunk
        np.testing.assert_allclose(wanted[1, 0], v[4, 0], atol=1e-12)


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
    sinks = make_sinks()
    found = jit_rows(*stacked, jnp.asarray(masks), SCALE, jnp.asarray(sinks))
    for o, row, mask in zip(np.asarray(found), rows, masks, strict=True):
        np.testing.assert_allclose(o, by_loops(*row, mask, sinks), atol=2e-6)


# Sinks.


def test_a_sink_by_hand() -> None:
    # One key of score ln 3 and a sink of ln 1: three quarters of the value are left.
    q = np.full((1, 1, 1), np.log(3) / SCALE, np.float32)
    one = np.ones((1, 1, 1), np.float32)
    o = run(q, one, 8 * one, np.ones((1, 1), bool), np.zeros(1, np.float32))
    assert o[0, 0, 0] == pytest.approx(6, rel=1e-6)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_each_head_loses_the_share_of_its_sink(kv_heads: int) -> None:
    q, k, v = make_qkv(kv_heads=kv_heads)
    sinks = make_sinks()
    found = run(q, k, v, CAUSAL, sinks)
    np.testing.assert_allclose(found, by_loops(q, k, v, CAUSAL, sinks), atol=2e-6)
    # A sink far below changes nothing, one far above leaves nothing.
    np.testing.assert_allclose(found[:, 3], run(q, k, v, CAUSAL)[:, 3], atol=2e-6)
    assert np.abs(found[:, 4]).max() < 1e-20


def test_a_query_that_sees_nothing_but_its_sink_gives_zeros() -> None:
    q, k, v = make_qkv(kv_heads=2)
    k[:] = v[:] = np.nan
    assert (run(q, k, v, np.zeros_like(CAUSAL), make_sinks()) == 0).all()


def test_a_sink_in_bfloat16_joins_the_softmax_in_float32() -> None:
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in make_qkv(kv_heads=2))
    sinks = make_sinks().astype(ml_dtypes.bfloat16)
    o = jit_attend(*map(jnp.asarray, (q, k, v, CAUSAL)), scale=SCALE, sinks=jnp.asarray(sinks))
    wanted = by_loops(q, k, v, CAUSAL, sinks.astype(np.float64))
    assert o.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(o, np.float64), wanted, atol=0.02)


# Keys that come in parts.


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize(
    ("kv_heads", "cuts"), [(2, []), (1, [5]), (2, [1, 2, 9]), (6, [3, 3, 3])], ids=str
)
def test_keys_may_come_in_parts(kv_heads: int, cuts: list[int], with_sinks: bool) -> None:
    """Large scores first, last or in the middle; a part that nobody sees holds NaN."""
    q, k, v = make_qkv(kv_heads=kv_heads)
    k[4] *= 30
    mask = CAUSAL & (np.arange(KEYS) != 7)
    k[7] = v[7] = np.nan
    sinks = make_sinks() if with_sinks else None
    start = None if sinks is None else jnp.asarray(sinks)
    partial = jit_start(jnp.asarray(q), part=make_part(num_kv_heads=kv_heads), sinks=start)
    for first, last in zip([0, *cuts], [*cuts, KEYS], strict=True):
        part = (jnp.asarray(x) for x in (k[first:last], v[first:last], mask[:, first:last]))
        if first < last:
            partial = jit_add(partial, jnp.asarray(q), *part, scale=SCALE)
    found = np.asarray(jit_finish(partial))
    wanted = by_loops(q, np.nan_to_num(k), np.nan_to_num(v), mask, sinks)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    whole = run(q, np.nan_to_num(k), np.nan_to_num(v), mask, sinks)
    np.testing.assert_allclose(found, whole, atol=1e-5)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_a_query_without_keys_gives_zeros_however_many_parts_there_are(with_sinks: bool) -> None:
    q, k, v = map(jnp.asarray, make_qkv(kv_heads=2))
    nothing = jnp.zeros((QUERIES, KEYS), bool)
    sinks = jnp.asarray(make_sinks()) if with_sinks else None
    partial = jit_start(q, part=make_part(), sinks=sinks)
    for _ in range(3):
        np.testing.assert_array_equal(jit_finish(partial), np.zeros(q.shape))
        partial = jit_add(partial, q, k, v, nothing, scale=SCALE)


# What is cached.


def test_grouped_query_attention_caches_all_keys_and_then_all_values() -> None:
    part = make_part()
    _, k, v = map(jnp.asarray, make_qkv(kv_heads=2))
    rows = join_kv(Qkv(jnp.zeros((KEYS, HEADS, SIZE)), k, v))
    assert rows.shape == (KEYS, part.cached_values)
    np.testing.assert_array_equal(rows[3], np.concatenate([k[3, 0], k[3, 1], v[3, 0], v[3, 1]]))
    # Any number of leading axes.
    found = split_kv(rows.reshape(2, 5, -1), part)
    for one, wanted in zip(found, (k, v), strict=True):
        np.testing.assert_array_equal(one, np.asarray(wanted).reshape(2, 5, 2, SIZE))
    assert (num_kv_heads(part), value_size(part)) == (2, SIZE)


def test_latent_attention_caches_one_key_whose_start_is_the_value() -> None:
    k = np.random.default_rng(0).standard_normal((KEYS, 1, 10), np.float32)
    rows = join_kv(Qkv(jnp.zeros((KEYS, HEADS, 10)), jnp.asarray(k), None))
    np.testing.assert_array_equal(rows, k[:, 0])
    keys, values = split_kv(rows, MLA)
    np.testing.assert_array_equal(keys, k)
    np.testing.assert_array_equal(values, k[..., :6])
    assert (num_kv_heads(MLA), value_size(MLA)) == (1, 6)


def test_values_may_be_shorter_than_keys() -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((QUERIES, HEADS, 10), np.float32)
    k = rng.standard_normal((KEYS, 1, 10), np.float32)
    wanted = by_loops(q, k, k[..., :6], CAUSAL)
    assert wanted.shape == (QUERIES, HEADS, 6)
    np.testing.assert_allclose(run(q, k, k[..., :6], CAUSAL), wanted, atol=2e-6)
    inputs = [jnp.asarray(x) for x in (q, k, k[..., :6], CAUSAL)]
    found = jit_finish(jit_add(jit_start(inputs[0], part=MLA), *inputs, scale=SCALE))
    np.testing.assert_allclose(found, wanted, atol=2e-6)
