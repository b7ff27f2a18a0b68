"""Nested clusters against an independent version in NumPy: all borders tried, in float64."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.quant.clusters import nested_clusters

ROWS, VALUES = 4, 40
SEED, PARENT = 3, 6
EPSILON = 2.0**-24  # half a unit in the last place of a float32


@cache
def program(seed_bits: int, parent_bits: int, max_borders: int) -> Any:
    with jax.enable_x64(True):
        return jax.jit(
            partial(
                nested_clusters,
                seed_bits=seed_bits,
                parent_bits=parent_bits,
                max_borders=max_borders,
            ),
            compiler_options={"xla_backend_optimization_level": 0},
        )


class Found(NamedTuple):
    """Of one row: the codes, and the tables by width."""

    codes: np.ndarray
    tables: dict[int, np.ndarray]


def cluster(
    values: np.ndarray,
    importance: np.ndarray,
    *,
    seed_bits: int = SEED,
    parent_bits: int = PARENT,
    max_borders: int = 256,
) -> list[Found]:
    with jax.enable_x64(True):
        found = program(seed_bits, parent_bits, max_borders)(values, importance)
    codes, tables = jax.device_get(found)
    assert codes.dtype == np.uint8 and codes.shape == values.shape
    assert [table.shape for table in tables] == [
        (len(values), 1 << bits) for bits in range(seed_bits, parent_bits + 1)
    ]
    assert all(table.dtype == np.float32 for table in tables)
    return [
        Found(codes[r], {bits: table[r] for bits, table in enumerate(tables, seed_bits)})
        for r in range(len(values))
    ]


# The independent version.


def flushed(values: np.ndarray) -> np.ndarray:
    """In float64, without denormal numbers: the device takes them for 0."""
    return np.where(np.abs(values) < 2.0**-126, 0.0, values.astype(np.float64))


def weights_of(importance: np.ndarray) -> np.ndarray:
    """What a value counts: its importance, and a millionth of the mean one; 1 where all are 0."""
    f = flushed(importance)
    return f + 1e-6 * f.mean() if f.mean() > 0 else np.ones_like(f)


def spread(x: np.ndarray, f: np.ndarray) -> float:
    """The weighted squared error of values around their mean."""
    mean = np.sum(f * x) / np.sum(f)
    return float(np.sum(f * (x - mean) ** 2))


def least_error(x: np.ndarray, f: np.ndarray, clusters: int) -> float:
    """Of sorted values in so many clusters: dynamic programming over all borders."""
    n = len(x)
    # Sums of squares lose half of the digits beside a value that is far away.
    x, f = x.astype(np.longdouble), f.astype(np.longdouble)
    centred = x - np.sum(f * x) / np.sum(f)
    sums = [np.concatenate([[0.0], np.cumsum(f * centred**k)]) for k in range(3)]
    mass, moment, square = (s[None, :] - s[:, None] for s in sums)
    safe = np.where(mass > 0, mass, 1.0)
    costs = np.maximum(square - moment**2 / safe, 0.0)
    costs[np.tril_indices(n + 1, -1)] = np.inf
    best = costs[0]
    for _ in range(clusters - 1):
        best = np.min(best[:, None] + costs, axis=0)
    return float(best[n])


def best_split(x: np.ndarray, f: np.ndarray) -> float:
    """The least error of sorted values in two parts: that of one, less what a split saves."""
    x, f = x.astype(np.longdouble), f.astype(np.longdouble)
    mean = np.sum(f * x) / np.sum(f)
    mass, moment = np.cumsum(f)[:-1], np.cumsum(f * (x - mean))[:-1]
    return max(0.0, spread(x, f) - float(np.max(moment**2 / mass + moment**2 / (np.sum(f) - mass))))


def error_of(codes: np.ndarray, x: np.ndarray, f: np.ndarray) -> float:
    """Of the clusters that codes make, around their means."""
    return sum(spread(x[codes == c], f[codes == c]) for c in np.unique(codes))


def check(values: np.ndarray, importance: np.ndarray, found: Found, *, is_best: bool) -> None:
    """All that must hold for a row, whatever it is made of."""
    x, f = flushed(values), weights_of(importance)
    f = f / f.max()
    order = np.lexsort((np.arange(len(x)), x))
    x, f, codes = x[order], f[order], found.codes[order]
    seed_bits, parent_bits = min(found.tables), max(found.tables)
    total = spread(x, f)
    # Prefix sums are exact to the last digits of the row, not of a cluster.
    reach = float(np.max(np.abs(x - np.sum(f * x) / np.sum(f)))) + 1e-15 * float(np.abs(x).max())
    noise = 1e-12 * total + 1e-28 * float(np.sum(f * x**2))
    # A small mass far away is the difference of two large ones.
    noise += 1e-15 * float(np.sum(f) * min(reach**2, total / f.min()))
    assert int(codes.max()) < 1 << parent_bits
    assert (np.diff(codes.astype(int)) >= 0).all(), "clusters are ranges of the sorted values"
    if is_best:
        seed_error = error_of(codes >> (parent_bits - seed_bits), x, f)
        assert seed_error <= least_error(x, f, 1 << seed_bits) * (1 + 1e-9) + noise
    before = np.inf
    for bits, table in found.tables.items():
        cut = codes >> (parent_bits - bits)
        assert np.isfinite(table).all()
        assert (np.diff(table) >= 0).all()
        # A table rises: what rounding adds to a cluster moves those after it.
        least = min(np.sum(f[cut == c]) for c in np.unique(cut))
        slack = 2e-15 * reach * np.sum(f) / least
        for c in np.unique(cut):
            own = cut == c
            mean = np.sum(f[own] * x[own]) / np.sum(f[own])
            assert abs(table[c] - mean) <= 2 * EPSILON * abs(mean) + slack + 1e-37
            if bits < parent_bits and own.sum() > 1:
                halves = error_of(codes[own] >> (parent_bits - bits - 1), x[own], f[own])
                assert halves <= best_split(x[own], f[own]) * (1 + 1e-9) + noise
        error = float(np.sum(f * (x - table[cut].astype(np.float64)) ** 2))
        rounding = float(np.sum(f * (2 * EPSILON * x) ** 2))
        assert error <= before + rounding + noise
        before = error


def check_all(values: np.ndarray, importance: np.ndarray, *, is_best: bool = True) -> list[Found]:
    values, importance = (np.asarray(a, np.float32) for a in (values, importance))
    found = cluster(values, importance)
    for row, of_row, result in zip(values, importance, found, strict=True):
        check(row, of_row, result, is_best=is_best)
    return found


# Examples.


def random_rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Normal, uniform, of heavy tails, and nearly all in one place."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((ROWS, VALUES))
    values[1] = rng.uniform(-3, 5, VALUES)
    values[2] = rng.standard_t(2, VALUES)
    values[3] = np.where(rng.random(VALUES) < 0.8, 1e-3, 1.0) * values[3]
    return values.astype(np.float32), rng.lognormal(0, 2, (ROWS, VALUES)).astype(np.float32)


def test_an_example_by_hand() -> None:
    values = np.array([[9.0, 1.0, 2.0, 8.0, 20.0, 30.0, -4.0, -5.0, 8.0]], np.float32)
    (found,) = cluster(values, np.ones_like(values), seed_bits=1, parent_bits=3)
    # -5 -4 1 2 8 8 9 | 20 30; then -5 -4 1 2 | 8 8 9 | 20 | 30; then -5 -4 | 1 2 | 8 8 | 9.
    assert found.tables[1].tolist() == [np.float32(19 / 7), 25.0]
    assert found.tables[2].tolist() == [-1.5, np.float32(25 / 3), 20.0, 30.0]
    assert found.tables[3].tolist() == [-4.5, 1.5, 8.0, 9.0, 20.0, 20.0, 30.0, 30.0]
    assert found.codes[:4].tolist() == [3, 1, 1, 2]
    assert (found.codes >> 2).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert (found.codes >> 1).tolist() == [1, 0, 0, 1, 2, 3, 0, 0, 1]


def test_a_value_that_counts_a_thousand_times_pulls_its_cluster() -> None:
    values = np.array([[0.0, 1.0, 5.0, 6.0]], np.float32)
    (found,) = cluster(
        values, np.array([[999.0, 1.0, 1.0, 1.0]], np.float32), seed_bits=1, parent_bits=2
    )
    np.testing.assert_allclose(found.tables[1], [0.001, 5.5], rtol=1e-3)
    assert found.tables[2].tolist() == [0, 1, 5, 6]


@pytest.mark.parametrize("seed", range(3))
def test_seed_and_splits_are_the_best_there_are(seed: int) -> None:
    check_all(*random_rows(seed))


def test_without_importances_all_values_count_the_same() -> None:
    values, _ = random_rows()
    nothing, ones = (check_all(values, np.full_like(values, f)) for f in (0, 1))
    for of_nothing, of_ones in zip(nothing, ones, strict=True):
        np.testing.assert_array_equal(of_nothing.codes, of_ones.codes)


def test_values_without_importance_have_their_own_place_and_move_no_other() -> None:
    values, importance = random_rows(5)
    importance[:, ::2] = 0
    found = check_all(values, importance)
    for row, f, result in zip(values, importance, found, strict=True):
        parent = result.codes
        for c in np.unique(parent[f > 0]):
            own = (parent == c) & (f > 0)
            mean = np.sum(f[own] * row[own].astype(np.float64)) / np.sum(f[own])
            assert result.tables[PARENT][c] == pytest.approx(mean, abs=1e-3)


def test_importances_may_span_twenty_orders_of_magnitude() -> None:
    values, _ = random_rows(6)
    exponents = np.random.default_rng(7).uniform(-30, -10, values.shape)
    found = check_all(values, (10.0**exponents).astype(np.float32))
    assert all(len(np.unique(result.codes)) > 15 for result in found)


@pytest.mark.parametrize("constant", [0.0, -0.0, 3.25, -65504.0, 1e-8])
def test_a_constant_row_is_itself(constant: float) -> None:
    values = np.full((ROWS, VALUES), constant, np.float32)
    _, importance = random_rows()
    for result in check_all(values, importance):
        for bits, table in result.tables.items():
            np.testing.assert_allclose(table[result.codes >> (PARENT - bits)], constant, rtol=1e-7)


@pytest.mark.parametrize("distinct", [2, 5, 8, 9, 17])
def test_few_distinct_values_are_stored_as_they_are(distinct: int) -> None:
    rng = np.random.default_rng(distinct)
    levels = rng.standard_normal(distinct).astype(np.float32)
    values = levels[rng.integers(0, distinct, (ROWS, VALUES))]
    found = check_all(values, np.ones_like(values))
    # A seed of 8 clusters holds 8 values; each split doubles what there is room for.
    for row, result in zip(values, found, strict=True):
        bits = SEED if distinct <= 8 else PARENT
        stored = result.tables[bits][result.codes >> (PARENT - bits)]
        np.testing.assert_allclose(stored, row, rtol=1e-6)


@pytest.mark.parametrize("outlier", [6e4, -6e4, 1e30])
def test_an_outlier_is_stored_and_the_others_are_not_merged(outlier: float) -> None:
    values, importance = random_rows(8)
    values[:, 7] = outlier
    for row, result in zip(values, check_all(values, importance), strict=True):
        stored = result.tables[PARENT][result.codes]
        assert stored[7] == pytest.approx(outlier, rel=1e-6)
        if abs(outlier) < 1e5:
            assert np.abs(np.delete(stored - row, 7)).max() < np.ptp(np.delete(row, 7)) / 2


def test_numbers_next_to_zero_are_finite() -> None:
    values, importance = random_rows(9)
    check_all(values * np.float32(1e-40), importance, is_best=False)
    check_all(values, importance * np.float32(1e-40), is_best=False)


def test_one_value_is_its_own_cluster() -> None:
    (found,) = cluster(np.array([[-2.5]], np.float32), np.array([[3.0]], np.float32))
    assert all((table == -2.5).all() for table in found.tables.values())


# Longer rows.


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "two heaps"])
def test_long_rows_are_within_a_percent_of_the_best_seed(kind: str) -> None:
    n = 500
    rng = np.random.default_rng(3)
    values = {
        "normal": rng.standard_normal((2, n)),
        "heavy tails": rng.standard_t(3, (2, n)),
        "two heaps": rng.standard_normal((2, n)) * 0.1 + rng.choice([-1, 3], (2, n)),
    }[kind].astype(np.float32)
    importance = rng.lognormal(0, 1, (2, n)).astype(np.float32)
    for row, f, result in zip(
        values, importance, cluster(values, importance, max_borders=128), strict=True
    ):
        check(row, f, result, is_best=False)
        order = np.argsort(row, kind="stable")
        x, weights = row[order].astype(np.float64), weights_of(f)[order]
        found = error_of(result.codes[order] >> (PARENT - SEED), x, weights)
        assert found <= 1.01 * least_error(x, weights, 1 << SEED)


# Anything.

numbers = st.one_of(
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 1e-7, 2.0**-149]),
)
importances = st.one_of(
    st.just(0.0), st.floats(0, 1, width=32), st.sampled_from([1e-20, 1e-10, 1e10, 1e20])
)


def rows_of(
    levels: list[float], levels_of_f: list[float], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Few numbers, many times: values with duplicates, and importances."""
    rng = np.random.default_rng(seed)
    values = np.asarray(levels, np.float32)[rng.integers(0, len(levels), (ROWS, VALUES))]
    values[1] += rng.standard_normal(VALUES).astype(np.float32)
    return values, np.asarray(levels_of_f)[rng.integers(0, len(levels_of_f), (ROWS, VALUES))]


@pytest.mark.parametrize(
    ("levels", "levels_of_f", "seed"),
    [
        ([0.0, 1.25, 1.0, 65504.0, 1e-7], [0.0], 0),  # the first cluster is empty
        ([0.0, 0.0, 65504.0, 0.0], [0.0, 0.0, 1.0, 0.0], 1),
        ([65504.0 if i == 3 else 0.0 for i in range(10)], [1.0, 0.0], 38874),
    ],
)
def test_rows_that_were_found(levels: list[float], levels_of_f: list[float], seed: int) -> None:
    check_all(*rows_of(levels, levels_of_f, seed))


@settings(max_examples=50)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_any_row(data: st.DataObject, seed: int) -> None:
    levels = data.draw(st.lists(numbers, min_size=1, max_size=12))
    levels_of_f = data.draw(st.lists(importances, min_size=1, max_size=6))
    check_all(*rows_of(levels, levels_of_f, seed))
