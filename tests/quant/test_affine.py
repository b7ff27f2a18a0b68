"""Affine rounding: examples by hand, bounds, and what a searched range is worth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moejax.quant import affine
from moejax.quant.affine import affine_bits, affine_codes, affine_round

BITS = st.integers(2, 8)
GROUPS = st.sampled_from([None, 1, 3, 8, 100])
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 20))
# Small ones too: scales below float16's normal numbers are rounded coarsely.
NUMBERS = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
    st.sampled_from([-65504.0, 65504.0, float(np.float32(0.1)), 0.0]),
)
WEIGHTS = hnp.arrays(np.float32, SHAPES, elements=NUMBERS)


def weighted(weights: np.ndarray, stored: np.ndarray, importance: np.ndarray) -> float:
    missed = weights.astype(np.float64) - stored.astype(np.float64)
    return float(np.sum(importance * missed**2))


def test_by_hand() -> None:
    weights = np.array([[0.0, 1.0, 2.0, 3.0], [-1.0, 0.0, 2.0, 1.4], [5.0, 5.0, 5.0, 5.0]])
    found = affine_codes(weights, 2)
    assert found.codes.tolist() == [[0, 1, 2, 3], [0, 1, 3, 2], [0, 0, 0, 0]]
    assert found.low.tolist() == [[0.0], [-1.0], [5.0]]
    assert found.scale.tolist() == [[1.0], [1.0], [0.0]]
    assert found.decode().tolist() == [[0, 1, 2, 3], [-1, 0, 2, 1], [5, 5, 5, 5]]


def test_groups_have_ranges_of_their_own() -> None:
    weights = np.array([[0.0, 3.0, 10.0, 40.0, 8.0, 7.0]])
    found = affine_codes(weights, 2, 4)
    assert found.low.tolist() == [[0.0, 7.0]]
    assert found.codes.tolist() == [[0, 0, 1, 3, 3, 0]]
    np.testing.assert_array_equal(affine_round(weights, 2, 2)[0, :4], weights[0, :4])


@pytest.mark.parametrize(
    ("columns", "bits", "group", "expected"),
    [
        (2048, 4, 128, 4.25),
        (2048, 4, None, 4 + 32 / 2048),
        (704, 3, 128, 3 + 6 * 32 / 704),
        (64, 8, 128, 8.5),
    ],
)
def test_bits_per_weight(columns: int, bits: int, group: int | None, expected: float) -> None:
    assert affine_bits(columns, bits, group) == expected
    found = affine_codes(np.ones((5, columns), np.float32), bits, group)
    numbers = 8 * (found.scale.nbytes + found.low.nbytes)
    assert found.codes.size * bits + numbers == expected * found.codes.size


@given(WEIGHTS, BITS, GROUPS)
def test_no_weight_moves_by_more_than_half_a_scale(
    weights: np.ndarray, bits: int, group: int | None
) -> None:
    found = affine_codes(weights, bits, group)
    scale = np.repeat(found.scale.astype(np.float64), found.group, axis=1)[:, : weights.shape[1]]
    missed = np.abs(found.decode().astype(np.float64) - weights)
    assert np.all(found.codes < 2**bits)
    # A scale is no wider than the range needs, but for the rounding of float16.
    size, rounding = found.group, 2.0**-10
    for at in range(found.scale.shape[1]):
        part = weights[:, at * size : (at + 1) * size].astype(np.float64)
        least, most = part.min(axis=1), part.max(axis=1)
        need = (most - least + rounding * np.abs(least) + 2.0**-24) / (2**bits - 1)
        assert np.all(found.scale[:, at] <= need * (1 + rounding) + 2.0**-24)
    # float32 rounds the products and sums of numbers as large as the weights.
    assert np.all(missed <= scale / 2 + 2.0**-21 * np.max(np.abs(weights)))


@given(WEIGHTS, BITS, GROUPS, st.booleans())
def test_weights_lie_on_the_grid_of_their_group(
    weights: np.ndarray, bits: int, group: int | None, is_searched: bool
) -> None:
    found = affine_codes(weights, bits, group, np.ones_like(weights) if is_searched else None)
    for row, column in np.ndindex(*weights.shape):
        at = row, column // found.group
        grid = found.low[at].astype(np.float32) + found.scale[at].astype(np.float32) * np.arange(
            2**bits, dtype=np.float32
        )
        assert found.decode()[row, column] == grid[found.codes[row, column]]
        # No other value of the grid is nearer.
        nearest = np.min(np.abs(grid.astype(np.float64) - weights[row, column]))
        missed = abs(float(grid[found.codes[row, column]]) - weights[row, column])
        assert missed <= nearest + 2.0**-21 * np.max(np.abs(weights[row]))


@given(hnp.arrays(np.float32, SHAPES, elements=st.floats(-100, 100, width=16)), BITS, GROUPS)
def test_equal_weights_stay_as_they_are(weights: np.ndarray, bits: int, group: int | None) -> None:
    constant = np.broadcast_to(weights[:, :1], weights.shape)
    np.testing.assert_array_equal(affine_round(constant, bits, group), constant)


@given(WEIGHTS, BITS, GROUPS, st.integers(0, 2**32 - 1))
def test_a_searched_range_is_never_worse(
    weights: np.ndarray, bits: int, group: int | None, seed: int
) -> None:
    importance = np.random.default_rng(seed).lognormal(0, 3, weights.shape).astype(np.float32)
    searched = weighted(weights, affine_round(weights, bits, group, importance), importance)
    whole = weighted(weights, affine_round(weights, bits, group), importance)
    assert searched <= whole * (1 + 1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_at_least_as_good_as_every_cut_of_both_ends(seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_t(3, (1, 40)).astype(np.float32)
    importance = rng.lognormal(0, 1, weights.shape).astype(np.float32)
    least, most = weights.min(), weights.max()
    errors = []
    for cut in np.linspace(0, 0.5, 11):
        low = least + cut * (most - least) / 2
        scale = (most - least) * (1 - cut) / (2**bits - 1)
        codes = np.clip(np.round((weights - low) / scale), 0, 2**bits - 1)
        errors.append(weighted(weights, low + scale * codes, importance))
    found = weighted(weights, affine_round(weights, bits, None, importance), importance)
    # The reference does not round its scale and low to float16.
    assert found <= min(errors) * 1.02


@pytest.mark.parametrize("sign", [1, -1])
def test_a_lone_outlier_loses_its_place(sign: int) -> None:
    weights = np.append(np.linspace(-1, 1, 127, dtype=np.float32), np.float32(2))[None] * sign
    importance = np.ones_like(weights)
    importance[0, -1] = 1e-4
    # Cut at the outlier's end alone: the other weights need the rest of the range.
    found = affine_codes(weights, 3, None, importance)
    ends = np.sort([found.low[0, 0], found.low[0, 0] + 7 * found.scale[0, 0]])
    assert np.max(np.abs(ends)) < 1.3
    whole = weighted(weights, affine_round(weights, 3), importance)
    assert weighted(weights, found.decode(), importance) < 0.6 * whole


def test_each_end_is_cut_as_it_needs() -> None:
    weights = np.concatenate([np.linspace(-1, 1, 126), [-1.4, 1.8]]).astype(np.float32)[None]
    importance = np.append(np.ones(126), [1e-4, 1e-4]).astype(np.float32)[None]
    found = affine_codes(weights, 4, None, importance)
    # The grid of cuts has steps of 0.08 here.
    assert float(found.low[0, 0]) == pytest.approx(-1, abs=0.1)
    assert float(found.low[0, 0] + 15 * found.scale[0, 0]) == pytest.approx(1, abs=0.1)


def test_the_whole_range_where_nothing_counts() -> None:
    weights = np.random.default_rng(0).normal(size=(4, 30)).astype(np.float32)
    found = affine_round(weights, 3, 8, np.zeros_like(weights))
    np.testing.assert_array_equal(found, affine_round(weights, 3, 8))


@pytest.mark.parametrize("is_searched", [False, True])
def test_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch, is_searched: bool) -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 5, 20)).astype(np.float32)
    importance = rng.lognormal(size=weights.shape) if is_searched else None
    at_once = affine_round(weights, 3, 8, importance)
    assert at_once.shape == weights.shape
    monkeypatch.setattr(affine, "_WEIGHTS_AT_ONCE", 50)
    np.testing.assert_array_equal(affine_round(weights, 3, 8, importance), at_once)
    each = importance[1, 2:3] if importance is not None else None
    np.testing.assert_array_equal(affine_round(weights[1, 2:3], 3, 8, each), at_once[1, 2:3])


def test_a_short_group_is_not_filled_up() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_t(2, size=(50, 20)).astype(np.float32) + 1
    importance = rng.lognormal(0, 2, size=weights.shape)
    last = affine_round(weights, 2, 8, importance)[:, 16:]
    np.testing.assert_array_equal(last, affine_round(weights[:, 16:], 2, 4, importance[:, 16:]))


@pytest.mark.parametrize(
    ("weights", "importance", "message"),
    [
        ([[1.0, np.inf]], None, "a weight is not finite"),
        ([[1.0, np.nan]], None, "a weight is not finite"),
        ([[1.0, -65505.0]], None, "a weight is beyond 65504, the largest float16"),
        ([[1.0, 2.0]], [[1.0, -1.0]], "an importance is negative or not finite"),
        ([[1.0, 2.0]], [[1.0, np.nan]], "an importance is negative or not finite"),
    ],
)
def test_numbers_that_are_refused(
    weights: list[list[float]], importance: list[list[float]] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        affine_codes(
            np.array(weights, np.float32),
            4,
            importance=None if importance is None else np.array(importance, np.float32),
        )


@pytest.mark.parametrize(
    ("columns", "bits", "group", "message"),
    [
        (8, 1, None, "1 bits: needs 2 to 8"),
        (8, 9, None, "9 bits: needs 2 to 8"),
        (8, 4, 0, "groups of 0 of 8 columns"),
        (0, 4, None, "groups of None of 0 columns"),
    ],
)
def test_forms_that_are_refused(columns: int, bits: int, group: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        affine_bits(columns, bits, group)
    with pytest.raises(ValueError, match=message):
        affine_round(np.zeros((2, columns), np.float32), bits, group)
