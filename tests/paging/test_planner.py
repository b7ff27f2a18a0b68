"""Plans of single steps of width, against a search over all sets of steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.paging.allocation import Choices, lower_hull
from moejax.paging.planner import Rates, Situation, WeightPlan, make_rates, plan_release, plan_spend

WIDTHS = (3, 4, 5, 6)


@st.composite
def choices(draw: st.DrawFn, most: int = 8) -> Choices:
    count = draw(st.integers(1, most))

    def table(values: st.SearchStrategy) -> np.ndarray:
        row = st.lists(values, min_size=4, max_size=4)
        return np.array(draw(st.lists(row, min_size=count, max_size=count)))

    steps = table(st.integers(1, 9))
    damage = table(st.floats(0, 10, allow_subnormal=False))
    return Choices(sizes=np.cumsum(steps, axis=1), damage=-np.sort(-damage, axis=1))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Choices, Situation]:
    given_choices = draw(choices())
    count = len(given_choices.damage)

    def numbers(least: int, most: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(least, most), min_size=count, max_size=count)))

    now = Situation(
        column=numbers(0, 3),
        least=numbers(0, 3),
        most=numbers(0, 3),
        weight=numbers(1, 4) / 2,
        can_sink=numbers(0, 3) > 0,
        can_rise=numbers(0, 3) > 0,
    )
    return given_choices, now


@settings(max_examples=200)
@given(choices())
def test_steps_of_the_hull_are_those_of_each_linear_alone(given_choices: Choices) -> None:
    rates = make_rates(given_choices, WIDTHS)
    for linear, (sizes, damage) in enumerate(
        zip(given_choices.sizes, given_choices.damage, strict=True)
    ):
        hull = lower_hull(sizes, damage)
        values = np.interp(sizes, sizes[hull], damage[hull])
        np.testing.assert_allclose(rates.damage[linear], -np.diff(values), rtol=1e-9, atol=1e-9)
        per_page = rates.damage[linear] / rates.pages[linear]
        assert np.all(np.diff(per_page) <= 1e-9), "the first bits that go cost the least"


def sinking(now: Situation) -> np.ndarray:
    return np.nonzero(now.can_sink & (now.column > now.least))[0]


@settings(max_examples=300)
@given(situations(), st.integers(0, 40))
def test_a_release_frees_enough_if_it_can(case: tuple[Choices, Situation], needed: int) -> None:
    rates, now = make_rates(case[0], WIDTHS), case[1]
    plan = plan_release(rates, now, needed)
    possible = sinking(now)
    step = now.column[possible] - 1
    assert set(plan.linears) <= set(possible)
    assert len(set(plan.linears)) == len(plan.linears)
    at = now.column[plan.linears] - 1
    assert plan.pages == rates.pages[plan.linears, at].sum()
    cost = rates.damage[plan.linears, at] * now.weight[plan.linears]
    assert plan.damage == pytest.approx(cost.sum())
    assert plan.pages >= min(needed, rates.pages[possible, step].sum())
    # Nothing in it can be done without.
    if plan.pages >= needed:
        for pages in rates.pages[plan.linears, at]:
            assert plan.pages - pages < needed


@settings(max_examples=150)
@given(situations(), st.integers(1, 30))
def test_a_release_is_near_the_best_of_all(case: tuple[Choices, Situation], needed: int) -> None:
    """Within the one step by which the greedy choice may free too much."""
    rates, now = make_rates(case[0], WIDTHS), case[1]
    plan = plan_release(rates, now, needed)
    possible = sinking(now)
    cost = rates.damage[possible, now.column[possible] - 1] * now.weight[possible]
    pages = rates.pages[possible, now.column[possible] - 1]
    sets = itertools.chain.from_iterable(
        itertools.combinations(range(len(possible)), n) for n in range(len(possible) + 1)
    )
    enough = [sum(cost[list(s)]) for s in sets if sum(pages[list(s)]) >= needed]
    if enough:
        assert plan.damage <= min(enough) + max(cost, default=0.0) + 1e-9
    else:
        assert set(plan.linears) == set(possible)


@settings(max_examples=300)
@given(situations(), st.integers(0, 40))
def test_what_is_spent_fits_and_saves(case: tuple[Choices, Situation], spare: int) -> None:
    rates, now = make_rates(case[0], WIDTHS), case[1]
    plan = plan_spend(rates, now, spare)
    possible = np.nonzero(now.can_rise & (now.column < now.most))[0]
    assert set(plan.linears) <= set(possible)
    assert len(set(plan.linears)) == len(plan.linears)
    at = now.column[plan.linears]
    gain = rates.damage[plan.linears, at] * now.weight[plan.linears]
    assert plan.pages == rates.pages[plan.linears, at].sum() <= max(spare, 0)
    assert plan.damage == pytest.approx(gain.sum()) and np.all(gain > 0)
    # Whatever is left out saves less per page than all that is in it, or did not fit after it.
    rate = gain / rates.pages[plan.linears, at]
    assert np.all(np.diff(rate) <= 1e-12)
    for other in set(possible.tolist()) - set(plan.linears.tolist()):
        column = now.column[other]
        saved = rates.damage[other, column] * now.weight[other]
        if saved > 0 and len(rate) and saved / rates.pages[other, column] > rate[-1] + 1e-12:
            raise AssertionError(f"linear {other} saves more per page than the last of the plan")


def example() -> tuple[Rates, Situation]:
    """Three linears of 4 bits; per page the second costs least, the third is used most."""
    damage = np.array([[9.0, 4.0, 2.0, 1.0], [5.0, 2.0, 1.0, 0.5], [5.0, 2.0, 1.0, 0.5]])
    sizes = np.tile(np.array([10, 14, 18, 22], np.int64), (3, 1))
    rates = make_rates(Choices(sizes=sizes, damage=damage), WIDTHS)
    three = np.ones(3, np.int64)
    now = Situation(
        column=three,
        least=0 * three,
        most=3 * three,
        weight=np.array([1.0, 1.0, 2.0]),
        can_sink=np.ones(3, bool),
        can_rise=np.ones(3, bool),
    )
    return rates, now


def chosen(plan: WeightPlan) -> list[int]:
    return plan.linears.tolist()


def test_a_worked_example() -> None:
    rates, now = example()
    np.testing.assert_allclose(rates.damage[0], [5, 2, 1])
    # Down: 5, 3 and 2 * 3 nats for four pages each.
    assert chosen(plan_release(rates, now, 1)) == [1]
    assert chosen(plan_release(rates, now, 5)) == [1, 0]
    assert chosen(plan_release(rates, now, 9)) == [1, 0, 2]
    assert chosen(plan_release(rates, now, 100)) == [1, 0, 2]
    assert chosen(plan_release(rates, now, 0)) == []
    # Up: 2, 1 and 2 * 1 nats.
    assert chosen(plan_spend(rates, now, 3)) == []
    assert chosen(plan_spend(rates, now, 4)) == [0]
    assert chosen(plan_spend(rates, now, 11)) == [0, 2]
    assert plan_spend(rates, now, 12).damage == pytest.approx(5.0)


def test_ten_thousand_linears_are_planned_in_milliseconds() -> None:
    rng = np.random.default_rng(0)
    n = 10_000
    sizes = np.cumsum(rng.integers(5, 12, (n, 4)), axis=1)
    damage = -np.sort(-rng.random((n, 4)), axis=1)
    rates = make_rates(Choices(sizes=sizes, damage=damage), WIDTHS)
    column = rng.integers(0, 4, n)
    now = Situation(
        column=column,
        least=np.zeros(n, np.int64),
        most=np.full(n, 3),
        weight=rng.random(n) + 1,
        can_sink=np.ones(n, bool),
        can_rise=np.ones(n, bool),
    )
    assert plan_release(rates, now, 20_000).pages >= 20_000
    assert 19_900 < plan_spend(rates, now, 20_000).pages <= 20_000


def test_widths_that_are_missing_are_refused() -> None:
    sizes = np.array([[10, 10, 12, 14]], np.int64)
    with pytest.raises(ValueError, match="wider ones must take more pages"):
        make_rates(Choices(sizes=sizes, damage=np.ones((1, 4))), WIDTHS)
    sizes = np.array([[10, -1, 12, 14]], np.int64)
    with pytest.raises(ValueError, match="every width must be stored"):
        make_rates(Choices(sizes=sizes, damage=np.ones((1, 4))), WIDTHS)
