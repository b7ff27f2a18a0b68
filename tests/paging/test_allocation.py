"""Widths by hull steps: worked examples, and what holds beside every possible choice."""

import itertools
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from moejax.errors import CapacityError
from moejax.paging import allocation
from moejax.paging.allocation import Choices, allocate, hull_steps, lower_hull, total

# Two linears: 90 bytes at least, 19 of damage. Saved per byte: 0.6 and 0.3, 0.2 and 0.05.
HAND = ([[30, 40, 50], [60, 80, 100]], [[10, 4, 1], [9, 5, 4]])


def make(sizes: list[list[int]], damage: list[list[float]]) -> Choices:
    return Choices(sizes=np.array(sizes, np.int64), damage=np.array(damage, np.float64))


@st.composite
def many_choices(draw: st.DrawFn) -> Choices:
    """A few linears; some widths are missing, needless, or cost as much as others."""
    linears, widths = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    amount = st.one_of(st.integers(0, 4).map(float), st.floats(0, 100))
    table = [
        [(draw(st.integers(-2, 30)), draw(amount)) for _ in range(widths)] for _ in range(linears)
    ]
    assume(all(any(size >= 0 for size, _ in row) for row in table))
    return make([[s for s, _ in row] for row in table], [[d for _, d in row] for row in table])


def every_result(choices: Choices) -> list[tuple[int, float]]:
    """Bytes and damage of all possible picks."""
    columns = [np.nonzero(row)[0] for row in choices.available]
    return [total(choices, np.array(picks)) for picks in itertools.product(*columns)]


def picks_of(choices: Choices, budget: int) -> list[int]:
    picks: list[int] = allocate(choices, budget).tolist()
    return picks


@pytest.mark.parametrize(
    ("budget", "picks"),
    [
        (90, [0, 0]),
        (99, [0, 0]),
        (100, [1, 0]),
        (110, [2, 0]),
        (119, [2, 0]),
        (120, [1, 1]),  # not by steps, but column 1 of both has 9 of damage, [2, 0] has 10
        (129, [1, 1]),
        (130, [2, 1]),
        (149, [2, 1]),
        (150, [2, 2]),
        (10**15, [2, 2]),
    ],
)
def test_the_best_steps_come_first(budget: int, picks: list[int]) -> None:
    assert picks_of(make(*HAND), budget) == picks


def test_steps_are_sorted_by_what_they_save() -> None:
    steps = hull_steps(make(*HAND))
    assert steps.start.tolist() == [0, 0]
    assert steps.linear.tolist() == [0, 0, 1, 1]
    assert steps.source.tolist() == [0, 1, 0, 1]
    assert steps.target.tolist() == [1, 2, 1, 2]
    assert steps.bytes.tolist() == [10, 10, 20, 20]
    assert steps.rate.tolist() == [0.6, 0.3, 0.2, 0.05]


def test_totals() -> None:
    assert total(make(*HAND), np.array([2, 1])) == (130, 6.0)


def test_rounding_keeps_the_order_of_steps() -> None:
    # On one line; computed, the last step saves 4e-19 per byte more than the others.
    steps = hull_steps(make([[10, 19, 28, 37]], [[0.11, 0.08, 0.05, 0.02]]))
    assert steps.source.tolist() == [0, 1, 2]
    assert np.all(np.diff(steps.rate) <= 0)


def test_a_later_step_takes_what_an_earlier_one_leaves() -> None:
    # 50 bytes of linear 0 do not fit into 30; those of linear 1 save less per byte, and fit.
    assert picks_of(make([[10, 60], [10, 20]], [[100, 0], [3, 2]]), 50) == [0, 1]


@pytest.mark.parametrize(
    ("left", "picks"),
    [(5, [0, 0, 0]), (6, [0, 0, 1]), (11, [0, 0, 1]), (12, [0, 1, 1]), (99, [0, 1, 1])],
)
def test_what_is_left_goes_to_the_best_steps_first(left: int, picks: list[int]) -> None:
    # 100 bytes of linear 0 never fit; 6 of linear 1 save 3, 6 of linear 2 save 4.
    choices = make([[10, 110], [10, 16], [10, 16]], [[999, 0], [3, 0], [4, 0]])
    assert picks_of(choices, 30 + left) == picks


def test_a_linear_changes_again_from_where_it_is() -> None:
    # Of 9 bytes linear 1 needs 4 and then 1, not 5 on top: 4 are left for linear 2.
    choices = make(
        [[10, 110, -1], [10, 14, 15], [10, 14, -1]], [[999, 0, 0], [10, 6, 5.5], [1, 0, 0]]
    )
    assert picks_of(choices, 39) == [0, 2, 1]


def test_a_step_waits_for_the_one_before_it() -> None:
    # Linear 0 goes up by 40, then by 1: 10 bytes pay for the second alone, which is no step.
    assert picks_of(make([[10, 50, 51]], [[100, 10, 9]]), 20) == [0]


def test_columns_off_the_hull_take_what_is_left() -> None:
    assert lower_hull(np.array([10, 20, 40]), np.array([10, 9.5, 0])).tolist() == [0, 2]
    assert picks_of(make([[10, 20, 40]], [[10, 9.5, 0]]), 39) == [1]


def test_a_uniform_width_may_use_the_budget_better() -> None:
    # The first step of linear 0 leaves too little for linear 1: damage 28, of column 1 only 21.5.
    choices = make([[10, 18, 22], [10, 22, 34]], [[20, 13, 8], [20, 8.5, 8.5]])
    assert picks_of(choices, 40) == [1, 1]
    # A third linear goes on to what column 1 of all leaves.
    more = make(
        [[10, 18, 22], [10, 22, 34], [10, 12, 13]], [[20, 13, 8], [20, 8.5, 8.5], [1, 0.5, 0]]
    )
    assert picks_of(more, 53) == [1, 1, 2]


@pytest.mark.parametrize(
    ("sizes", "damage", "hull"),
    [
        ([10, 20, 30, 40], [5.0, 6.0, 2.0, 2.0], [0, 2]),
        ([10, 20, 30], [9.0, 8.0, 1.0], [0, 2]),
        ([10, 10, 20], [5.0, 4.0, 0.0], [1, 2]),
        ([10, 10, 20], [4.0, 4.0, 4.0], [0]),
        ([30, 20, 10], [0.0, 1.0, 5.0], [2, 1, 0]),
        ([-1, 20, 30], [0.0, 5.0, 1.0], [1, 2]),
        ([10, -1, 30], [5.0, np.nan, 1.0], [0, 2]),
        ([0, 10], [0.0, 0.0], [0]),
    ],
    ids=[
        "more damage for more bytes",
        "above the line",
        "two of the same bytes",
        "nothing to save",
        "falling sizes",
        "the least is missing",
        "one between is missing",
        "no bytes, no damage",
    ],
)
def test_hulls(sizes: list[int], damage: list[float], hull: list[int]) -> None:
    assert lower_hull(np.array(sizes), np.array(damage)).tolist() == hull


def test_the_lower_number_wins_a_tie() -> None:
    assert picks_of(make([[10, 20]] * 3, [[5, 1]] * 3), 50) == [1, 1, 0]


def test_widths_that_are_missing_are_not_chosen() -> None:
    choices = make([[10, -1, 30], [10, 20, -1]], [[5, 0, 1], [5, 4, 0]])
    assert picks_of(choices, 1000) == [2, 1]


@given(many_choices(), st.integers(0, 130))
@example(make(*HAND), 125)
def test_near_the_best_of_all_choices(choices: Choices, budget: int) -> None:
    fitting = [damage for size, damage in every_result(choices) if size <= budget]
    if not fitting:
        with pytest.raises(CapacityError, match=f"the budget is {budget}$"):
            allocate(choices, budget)
        return
    size, damage = total(choices, allocate(choices, budget))
    steps = hull_steps(choices)
    step = np.max(steps.rate * steps.bytes, initial=0.0)
    assert size <= budget
    assert min(fitting) - 1e-9 <= damage <= min(fitting) + step + 1e-9


@given(many_choices(), st.integers(0, 130))
def test_no_worse_than_a_uniform_width(choices: Choices, budget: int) -> None:
    widths = np.nonzero(np.all(choices.available, axis=0))[0]
    uniform = [total(choices, np.full(len(choices.sizes), width)) for width in widths]
    fitting = [damage for size, damage in uniform if size <= budget]
    assume(fitting)
    assert total(choices, allocate(choices, budget))[1] <= min(fitting)


@given(many_choices())
def test_whole_steps_are_the_best_there_is(choices: Choices) -> None:
    steps = hull_steps(choices)
    picks = steps.start.copy()
    results = every_result(choices)
    assert np.all(np.diff(steps.rate) <= 0)
    assert np.all(steps.bytes > 0)
    for step in range(len(steps.linear) + 1):
        size, damage = total(choices, picks)
        best = min(other for bytes_, other in results if bytes_ <= size)
        assert damage == pytest.approx(best, abs=1e-9)
        assert total(choices, allocate(choices, size))[1] == pytest.approx(best, abs=1e-9)
        if step < len(steps.linear):
            linear, target = steps.linear[step], steps.target[step]
            assert picks[linear] == steps.source[step]
            assert choices.damage[linear, target] < choices.damage[linear, picks[linear]]
            picks[linear] = target


def lines_run(choices: Choices, budget: int) -> int:
    """How many lines of the module `allocate` runs."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != allocation.__file__:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        allocate(choices, budget)
    finally:
        sys.settrace(before)
    return lines


def test_ten_thousand_linears_are_no_more_work_than_a_hundred() -> None:
    def work(linears: int) -> int:
        rng = np.random.default_rng(0)
        widths = np.arange(3, 9)
        scale = rng.lognormal(0, 2, (linears, 1))
        sizes = np.tile(np.array([[360_448], [720_896]]), (linears // 2, 1)) * widths
        damage = scale * 4.0**-widths * rng.uniform(0.8, 1.2, sizes.shape)
        return lines_run(Choices(sizes=sizes, damage=damage), int(sizes[:, 2].sum()))

    few, many = work(100), work(10_000)
    assert 0 < few < 1000
    assert many < 2 * few


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(CapacityError, match="2 linears need at least 90 bytes, the budget is 89$"):
        allocate(make(*HAND), 89)


@pytest.mark.parametrize(
    ("sizes", "damage", "message"),
    [
        ([[1, 2], [-1, -1]], [[1.0, 0.0]] * 2, "linear 1 has no width"),
        ([[1, 2]], [[1.0, -0.5]], "damage of linear 0 in column 1 is -0.5"),
        ([[1, 2]], [[np.inf, 0.0]], "damage of linear 0 in column 0 is inf"),
        ([[1, 2]], [[np.nan, 0.0]], "damage of linear 0 in column 0 is nan"),
    ],
)
def test_choices_that_make_no_sense(
    sizes: list[list[int]], damage: list[list[float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(sizes, damage)


@pytest.mark.parametrize("column", [-1, 1, 3])
def test_totals_of_widths_that_are_missing(column: int) -> None:
    choices = make([[10, 20, 30], [10, -1, 30]], [[3, 2, 1]] * 2)
    with pytest.raises(ValueError, match=f"linear 1 has no width in column {column}$"):
        total(choices, np.array([0, column]))
