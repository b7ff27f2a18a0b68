"""kv_blocks: wrong calls are refused, and books that do not add up are found."""

from collections.abc import Callable

import pytest

from moejax_serving.kv_blocks import BlockPool, KvBlock
from moejax_serving.pages import Owner
from serving.block_pools import counts, make_pool, page_counts, take

A, B, C, D = b"A", b"B", b"C", b"D"


# Wrong calls.


@pytest.mark.parametrize("is_forged", [False, True], ids=["given back", "forged"])
@pytest.mark.parametrize(
    "call",
    [
        lambda pool, block: pool.share(block),
        lambda pool, block: pool.register(block, B),
        lambda pool, block: pool.release([block]),
        lambda pool, block: pool.forget([block]),
    ],
    ids=["share", "register", "release", "forget"],
)
def test_a_block_that_is_not_held_is_refused(
    call: Callable[[BlockPool, KvBlock], None], is_forged: bool
) -> None:
    pool = make_pool(2)
    block = take(pool)
    if is_forged:
        wrong = KvBlock(block.number, block.kind, block.pages)
    else:
        wrong = take(pool)
        pool.release([wrong])
    before = counts(pool)
    with pytest.raises(ValueError, match=f"kv_block {wrong.number} of kind 0 is not held"):
        call(pool, wrong)
    assert counts(pool) == before
    assert (block.users, block.key) == (1, None)
    pool.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, block: pool.release([block]),
        lambda pool, block: pool.forget([block]),
        lambda pool, block: pool.share(block),
    ],
    ids=["release", "forget", "share"],
)
def test_a_block_that_the_cache_has_dropped_is_refused(
    call: Callable[[BlockPool, KvBlock], None],
) -> None:
    """Its number and its key may be another's by now."""
    pool = make_pool(1)
    old = take(pool, A)
    pool.release([old])
    new = take(pool, A)
    assert new.number == old.number
    with pytest.raises(ValueError, match=f"kv_block {old.number} of kind 0 is not held"):
        call(pool, old)
    assert pool.find([A]) == [new]
    pool.check()


def test_a_block_without_users_cannot_be_released() -> None:
    pool = make_pool(1)
    block = take(pool, A)
    pool.release([block])
    with pytest.raises(ValueError, match=f"kv_block {block.number} of kind 0 has no user"):
        pool.release([block])
    assert (counts(pool), page_counts(pool)) == ((0, 1), (0, 2))
    pool.check()


# Broken books.


def break_lost(pool: BlockPool) -> None:
    pool._free[0].pop()


def break_number(pool: BlockPool) -> None:
    pool._free[0][0] = 0


def break_both(pool: BlockPool) -> None:
    pool._free[0][0] = pool.find([A])[0].number


def break_pages(pool: BlockPool) -> None:
    assert pool._pages.take(1, Owner.KV) is not None


def break_twice(pool: BlockPool) -> None:
    pool.find([A])[0].pages = pool.find([B])[0].pages


def break_idle_pages(pool: BlockPool) -> None:
    pool._num_idle_pages = 0


def break_users(pool: BlockPool) -> None:
    pool.find([A])[0].users = 0


def break_idle(pool: BlockPool) -> None:
    pool.find([B])[0].users = 1


def break_nobody(pool: BlockPool) -> None:
    block = pool.find([B])[0]
    del pool._cached[B]
    block.key = None


def break_key(pool: BlockPool) -> None:
    pool._cached[C] = pool._cached[A]


def break_cached(pool: BlockPool) -> None:
    pool._cached[C] = KvBlock(2, 0, (), key=C)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (break_lost, r"kind 0: 1 free \+ 2 held \+ poison are not the numbers of 5 kv_blocks"),
        (break_number, r"kind 0: 2 free \+ 2 held \+ poison are not the numbers of 5 kv_blocks"),
        (break_both, r"kind 0: 2 free \+ 2 held \+ poison are not the numbers of 5 kv_blocks"),
        (break_pages, "kv_blocks hold 4 pages, the pool counts 5"),
        (break_twice, "kv_blocks hold 4 pages, the pool counts 4"),
        (break_idle_pages, "2 pages are idle, 0 are counted"),
        (break_users, "kv_block 1 of kind 0 has 0 users"),
        (break_idle, "kv_block 2 of kind 0 has 1 users"),
        (break_nobody, "kv_block 2 of kind 0 is kept for nobody"),
        (break_key, "the cache holds kv_block 1 of kind 0, which is not"),
        (break_cached, "the cache holds kv_block 2 of kind 0, which is not"),
    ],
)
def test_broken_books_are_found(break_it: Callable[[BlockPool], None], message: str) -> None:
    pool = make_pool(4)
    _, idle = take(pool, A), take(pool, B)
    pool.release([idle])
    pool.check()
    break_it(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()
