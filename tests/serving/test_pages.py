"""Pages and kv_blocks: each has one owner, and none is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax_serving.pages import BlockPool, KvBlock, Owner, PagePool


def take(pool: PagePool, n: int, owner: Owner = Owner.KV) -> list[int]:
    pages = pool.take(n, owner)
    assert pages is not None
    return pages


# Pages.


def test_pages_by_hand() -> None:
    pool = PagePool(6)
    assert pool.num_free == 5
    weights = take(pool, 2, Owner.WEIGHTS)
    kv = take(pool, 3)
    assert sorted(weights + kv) == [1, 2, 3, 4, 5]  # page 0 is poison
    assert (pool.count(Owner.WEIGHTS), pool.count(Owner.KV), pool.num_free) == (2, 3, 0)
    pool.give_back(kv[:1])
    assert (pool.count(Owner.WEIGHTS), pool.count(Owner.KV), pool.num_free) == (2, 2, 1)
    assert take(pool, 1, Owner.WEIGHTS) == kv[:1]


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


def test_a_page_that_was_given_back_is_not_owned() -> None:
    pool = PagePool(3)
    pages = take(pool, 1)
    pool.give_back(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} is not owned"):
        pool.give_back(pages)


@given(st.lists(st.one_of(st.integers(0, 6), st.just(-1)), max_size=30))
def test_pages_are_free_or_owned_whatever_is_done(steps: list[int]) -> None:
    """A number takes as many pages; -1 gives the oldest back."""
    pool = PagePool(10)
    held: list[list[int]] = []
    for step in steps:
        if step == -1:
            if held:
                pool.give_back(held.pop(0))
        else:
            free = pool.num_free
            pages = pool.take(step, Owner.KV)
            assert (pages is None) == (step > free)
            if pages is not None:
                held.append(pages)
        pool.check()
        flat = [page for pages in held for page in pages]
        assert len(set(flat)) == len(flat) == 9 - pool.num_free
        assert 0 not in flat


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
def test_a_broken_pool_is_found(break_it, message: str) -> None:  # type: ignore[no-untyped-def]
    pool = PagePool(6)
    take(pool, 2)
    pool.check()
    break_it(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()


# kv_blocks.


def test_blocks_by_hand() -> None:
    pages = PagePool(8)
    blocks = BlockPool(pages, pages_per_block=3, max_blocks=10)
    first, second = blocks.take(), blocks.take()
    assert first is not None and second is not None
    assert {first.number, second.number} == {1, 2}  # block 0 is poison
    assert sorted(first.pages + second.pages) == [1, 2, 3, 4, 5, 6]
    assert pages.count(Owner.KV) == 6
    assert blocks.take() is None  # one page is left
    assert blocks.num_held == 2
    blocks.give_back(first)
    assert (blocks.num_held, pages.num_free) == (1, 4)
    again = blocks.take()
    assert again is not None and again.number == first.number
    blocks.check()


def test_numbers_may_run_out_before_pages_and_take_no_page() -> None:
    pages = PagePool(100)
    blocks = BlockPool(pages, pages_per_block=2, max_blocks=3)
    assert blocks.take() is not None and blocks.take() is not None
    assert blocks.take() is None
    assert pages.count(Owner.KV) == 4


def test_a_block_that_is_not_held_is_not_given_back() -> None:
    pages = PagePool(10)
    blocks = BlockPool(pages, pages_per_block=2, max_blocks=5)
    block = blocks.take()
    assert block is not None
    forged = KvBlock(block.number, (8, 9))
    with pytest.raises(ValueError, match=f"kv_block {block.number} is not held"):
        blocks.give_back(forged)
    blocks.check()
    assert blocks.num_held == 1
    blocks.give_back(block)
    with pytest.raises(ValueError, match=f"kv_block {block.number} is not held"):
        blocks.give_back(block)
    blocks.check()
    pages.check()


def test_a_lost_block_is_found() -> None:
    blocks = BlockPool(PagePool(10), pages_per_block=2, max_blocks=5)
    assert blocks.take() is not None
    blocks._free.pop()
    with pytest.raises(AssertionError, match=r"2 free \+ 1 held \+ poison != 5"):
        blocks.check()


def test_kv_pages_outside_of_blocks_are_found() -> None:
    pages = PagePool(10)
    blocks = BlockPool(pages, pages_per_block=2, max_blocks=5)
    assert blocks.take() is not None
    take(pages, 1)
    with pytest.raises(AssertionError, match="kv_blocks hold 2 pages, the pool counts 3"):
        blocks.check()
