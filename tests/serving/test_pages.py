"""Pages: each has one owner, and none is lost."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax_serving.pages import Owner, PagePool


def take(pool: PagePool, n: int, owner: Owner = Owner.KV) -> list[int]:
    pages = pool.take(n, owner)
    assert pages is not None
    return pages


def test_pages_by_hand() -> None:
    pool = PagePool(6)
    assert pool.num_free == 5
    weights = take(pool, 2, Owner.WEIGHTS)
    kv = take(pool, 3)
    assert sorted(weights + kv) == [1, 2, 3, 4, 5]  # page 0 is poison
    assert (pool.count(Owner.WEIGHTS), pool.count(Owner.KV), pool.num_free) == (2, 3, 0)
    pool.give_back([kv[0], weights[0]])
    assert (pool.count(Owner.WEIGHTS), pool.count(Owner.KV), pool.num_free) == (1, 2, 2)
    assert pool.unowned() == {kv[0], weights[0]}
    assert set(take(pool, 2, Owner.WEIGHTS)) == {kv[0], weights[0]}
    assert (pool.count(Owner.WEIGHTS), pool.count(Owner.KV), pool.num_free) == (3, 2, 0)


def test_too_few_pages_give_none_and_take_none() -> None:
    pool = PagePool(4)
    assert pool.take(4, Owner.KV) is None
    assert pool.num_free == 3
    assert pool.count(Owner.KV) == 0
    assert take(pool, 0) == []
    assert len(take(pool, 3)) == 3


@pytest.mark.parametrize("wrong", [[0], [3], [1, 3], [1, 1], [-1], [9]], ids=str)
def test_what_is_not_owned_is_not_given_back_nor_anything_with_it(wrong: list[int]) -> None:
    pool = PagePool(6)
    assert take(pool, 2) == [1, 2]
    with pytest.raises(ValueError, match=f"page {wrong[-1]} is not owned"):
        pool.give_back(wrong)
    pool.check()
    assert (pool.num_free, pool.count(Owner.KV)) == (3, 2)
    assert pool.unowned() == {3, 4, 5}


def test_a_page_that_was_given_back_is_not_owned() -> None:
    pool = PagePool(3)
    pages = take(pool, 1)
    pool.give_back(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} is not owned"):
        pool.give_back(pages)


def test_the_free_pages_that_one_sees_are_a_copy() -> None:
    pool = PagePool(4)
    pool.unowned().clear()
    assert pool.num_free == 3
    pool.check()


NUM_PAGES = 10
OWNERS = st.sampled_from(Owner)
TAKES = st.tuples(st.integers(0, 6), OWNERS)
GIVES = st.lists(st.integers(0, NUM_PAGES), max_size=4)


@given(st.lists(st.one_of(TAKES, GIVES), max_size=40))
def test_a_pool_does_what_a_table_of_owners_does(
    steps: list[tuple[int, Owner] | list[int]],
) -> None:
    """A pair takes pages for an owner; a list gives these pages back, if they are owned."""
    pool = PagePool(NUM_PAGES)
    owners: dict[int, Owner] = {}
    for step in steps:
        free = set(range(1, NUM_PAGES)) - set(owners)
        if isinstance(step, tuple):
            n, owner = step
            pages = pool.take(n, owner)
            assert (pages is None) == (n > len(free))
            if pages is not None:
                assert len(set(pages)) == len(pages) == n
                assert set(pages) <= free
                owners.update(dict.fromkeys(pages, owner))
        elif set(step) <= set(owners) and len(set(step)) == len(step):
            pool.give_back(step)
            for page in step:
                del owners[page]
        else:
            with pytest.raises(ValueError, match="is not owned"):
                pool.give_back(step)
        pool.check()
        assert pool.unowned() == set(range(1, NUM_PAGES)) - set(owners)
        assert pool.num_free == len(pool.unowned())
        for owner in Owner:
            assert pool.count(owner) == list(owners.values()).count(owner)


def break_free(pool: PagePool) -> None:
    pool._free.append(pool._free[0])


def break_owner(pool: PagePool) -> None:
    pool._owner[pool._free[0]] = Owner.KV


def break_lost(pool: PagePool) -> None:
    pool._free.pop()


def break_poison(pool: PagePool) -> None:
    pool._free[0] = 0


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (break_free, "a page is free twice"),
        (break_owner, "pages free and owned: "),
        (break_lost, r"2 free \+ 2 owned \+ poison != 6 pages"),
        (break_poison, r"3 free \+ 2 owned \+ poison != 6 pages"),
    ],
    ids=["free twice", "free and owned", "lost", "poison"],
)
def test_a_broken_pool_is_found(break_it: Callable[[PagePool], None], message: str) -> None:
    pool = PagePool(6)
    take(pool, 2)
    pool.check()
    break_it(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()


def test_pages_change_hands() -> None:
    pool = PagePool(6)
    taken = pool.take(3, Owner.RESERVED)
    assert taken is not None
    pool.hand_over(taken[:2], Owner.WEIGHTS)
    assert pool.owned_by(Owner.WEIGHTS) == set(taken[:2])
    assert pool.owned_by(Owner.RESERVED) == {taken[2]}
    assert (pool.count(Owner.WEIGHTS), pool.count(Owner.RESERVED)) == (2, 1)
    pool.check()
    free = next(iter(pool.unowned()))
    with pytest.raises(ValueError, match=f"page {free} is not owned"):
        pool.hand_over([taken[2], free], Owner.WEIGHTS)
    assert pool.owned_by(Owner.RESERVED) == {taken[2]}
    pool.give_back(taken)
    assert pool.num_free == 5
    pool.check()
