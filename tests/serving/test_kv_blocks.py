"""kv_blocks: shared, kept for prompts that begin the same, and taken again when they are needed."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax_serving.kv_blocks import BlockPool, next_key, root_key
from moejax_serving.pages import Owner, PagePool
from serving.block_pools import counts, make_pool, page_counts, pool_of, take
from serving.scheduling import make_kind

A, B, C, D = b"A", b"B", b"C", b"D"


# Taking.


def test_blocks_by_hand() -> None:
    pages = PagePool(8)
    pool = pool_of(pages, pages_per_block=3, max_blocks=10)
    assert (counts(pool), page_counts(pool)) == ((0, 0), (0, 7))
    first, second = take(pool), take(pool)
    assert (first.number, second.number) == (1, 2)  # block 0 is poison
    assert sorted(first.pages + second.pages) == [1, 2, 3, 4, 5, 6]
    assert (first.kind, first.users, first.key) == (0, 1, None)
    assert pages.count(Owner.KV) == 6
    assert pool.take(0) is None  # one page is left
    assert (counts(pool), page_counts(pool)) == ((2, 0), (6, 1))
    pool.release([first])
    assert (counts(pool), page_counts(pool)) == ((1, 0), (3, 4))
    assert pages.num_free == 4
    assert take(pool).number == first.number
    pool.check()


def test_numbers_may_run_out_before_pages_and_take_no_page() -> None:
    pages = PagePool(100)
    pool = pool_of(pages, max_blocks=3)
    take(pool), take(pool)
    assert pool.take(0) is None
    assert pages.count(Owner.KV) == 4
    pool.check()


def test_pages_that_weights_hold_are_no_blocks() -> None:
    pages = PagePool(10)
    pool = pool_of(pages, max_blocks=5)
    assert pages.take(6, Owner.WEIGHTS) is not None
    assert page_counts(pool) == (0, 3)
    take(pool)
    assert pool.take(0) is None
    pool.check()


# Kinds.


def test_each_kind_has_its_own_numbers_and_all_take_the_same_pages() -> None:
    pages = PagePool(9)
    pool = BlockPool(pages, [make_kind(layers=3), make_kind(layers=1)], [3, 9])
    a, b, c = take(pool), take(pool, kind=1), take(pool)
    assert [(block.kind, block.number) for block in (a, b, c)] == [(0, 1), (1, 1), (0, 2)]
    assert [len(block.pages) for block in (a, b, c)] == [3, 1, 3]
    assert sorted(a.pages + b.pages + c.pages) == [1, 2, 3, 4, 5, 6, 7]
    assert page_counts(pool) == (7, 1)
    assert pool.take(0) is None
    assert take(pool, kind=1).number == 2
    assert pool.take(1) is None
    pool.check()


def test_a_block_takes_the_pages_of_cached_blocks_of_any_kind_and_no_more_than_it_needs() -> None:
    """Left in this order: A of kind 1, B of kind 0, C and D of kind 1."""
    pages = PagePool(1 + 3 + 3 * 1)
    pool = BlockPool(pages, [make_kind(layers=3), make_kind(layers=1)], [3, 7])
    for key, kind in ((A, 1), (B, 0), (C, 1), (D, 1)):
        pool.release([take(pool, key, kind)])
    assert page_counts(pool) == (0, 6)
    block = take(pool, kind=0)
    assert [pool.get(key) is not None for key in (A, B, C, D)] == [False, False, True, True]
    assert len(block.pages) == 3
    assert page_counts(pool) == (3, 3)
    pool.check()
    pool.release([take(pool, kind=1)])  # of the page that was left of A and B
    assert pool.get(C) is not None


def test_a_block_that_does_not_fit_drops_nothing() -> None:
    pool = BlockPool(PagePool(4), [make_kind(layers=3), make_kind(layers=1)], [2, 4])
    pool.release([take(pool, A, 1), take(pool, B, 1)])
    used = take(pool, kind=1)
    assert pool.take(0) is None
    assert pool.num_idle == 2
    pool.release([used])
    assert take(pool).kind == 0
    assert pool.num_idle == 0


def test_where_a_number_is_missing_a_cached_block_of_that_kind_goes() -> None:
    """Though one of another kind was left before."""
    pool = BlockPool(PagePool(9), [make_kind(layers=1), make_kind(layers=2)], [3, 9])
    for key, kind in ((A, 1), (B, 0), (C, 0)):
        pool.release([take(pool, key, kind)])
    block = take(pool)
    assert [pool.get(key) is not None for key in (A, B, C)] == [True, False, True]
    assert block.number == 1
    pool.check()


def test_a_kind_whose_numbers_are_in_use_takes_none_from_others() -> None:
    pool = BlockPool(PagePool(9), [make_kind(layers=1), make_kind(layers=2)], [2, 9])
    take(pool)
    pool.release([take(pool, A, 1)])
    assert pool.take(0) is None
    assert pool.get(A) is not None


def test_each_kind_needs_its_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="3 numbers of kv_blocks for 2 kinds"):
        BlockPool(PagePool(9), [make_kind(), make_kind()], [1, 2, 3])


# Users.


def test_a_block_comes_back_with_its_last_user() -> None:
    pool = make_pool(2)
    block = take(pool)
    pool.share(block)
    assert block.users == 2
    pool.release([block])
    assert counts(pool) == (1, 0)
    pool.release([block])
    assert (counts(pool), page_counts(pool)) == ((0, 0), (0, 4))
    pool.check()


def test_a_block_with_a_key_stays_for_the_next_user() -> None:
    pool = make_pool(2)
    block = take(pool, A)
    pool.release([block])
    assert (counts(pool), page_counts(pool)) == ((0, 1), (0, 4))
    assert pool.find([A]) == [block]
    pool.share(block)
    assert (block.users, counts(pool), page_counts(pool)) == (1, (1, 0), (2, 2))
    pool.check()
    pool.release([block])
    assert pool.find([A]) == [block]


def test_found_blocks_belong_to_nobody_until_they_are_shared() -> None:
    pool = make_pool(1)
    block = take(pool, A)
    pool.release([block])
    assert pool.find([A]) == [block]
    assert block.users == 0
    assert take(pool).number == block.number
    assert pool.find([A]) == []


# The cache.


def test_blocks_are_found_up_to_the_first_that_is_not_there() -> None:
    pool = make_pool(4)
    a, b, d = take(pool, A), take(pool, B), take(pool, D)
    assert pool.find([]) == []
    assert pool.find([A, B, C, D]) == [a, b]
    assert pool.find([C, A]) == []
    assert pool.find([D, A]) == [d, a]
    assert [pool.get(key) for key in (A, B, C, D)] == [a, b, None, d]


def test_keys_are_asked_for_no_further_than_they_are_found() -> None:
    pool = make_pool(2)
    a = take(pool, A)
    asked = iter([A, B, C])
    assert pool.find(asked) == [a]
    assert list(asked) == [C]


def test_of_two_blocks_with_one_key_the_first_is_found_and_the_second_is_not_kept() -> None:
    pool = make_pool(3)
    first, second = take(pool, A), take(pool, A)
    assert pool.find([A]) == [first]
    assert second.key is None
    pool.release([first])
    pool.release([second])
    assert pool.find([A]) == [first]
    assert (counts(pool), page_counts(pool)) == ((0, 1), (0, 6))
    pool.check()


def test_a_block_keeps_its_first_key() -> None:
    pool = make_pool(2)
    block = take(pool, A)
    pool.register(block, B)
    assert block.key == A
    assert pool.find([B]) == []
    pool.check()


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = make_pool(3)
    pool.release([take(pool, A), take(pool, B)])
    take(pool)
    assert pool.num_idle == 2
    take(pool)
    assert pool.num_idle == 1


def test_what_was_left_longest_ago_goes_first_and_of_a_sequence_its_end() -> None:
    """Left in this order: A B C, then D; but then somebody uses A once more."""
    pool = make_pool(4)
    a, b, c, d = (take(pool, key) for key in (A, B, C, D))
    pool.release([a, b, c])
    pool.release([d])
    pool.share(a)
    pool.release([a])
    gone = []
    for _ in range(4):
        left = set(pool._cached)
        take(pool)
        gone += left - set(pool._cached)
        pool.check()
    assert gone == [C, B, D, A]


def test_a_block_in_use_is_never_taken_though_it_was_left_before() -> None:
    pool = make_pool(2)
    a, b = take(pool, A), take(pool, B)
    pool.release([a])
    pool.release([b])
    pool.share(a)
    assert take(pool).number == b.number
    assert pool.take(0) is None
    assert pool.find([A]) == [a]
    pool.check()


def test_a_block_goes_when_weights_have_taken_the_free_pages() -> None:
    """Numbers are left, pages are not."""
    pages = PagePool(7)
    pool = pool_of(pages, max_blocks=6)
    pool.release([take(pool, A)])
    assert pages.take(3, Owner.WEIGHTS) is not None  # one is left
    assert page_counts(pool) == (0, 3)
    take(pool)
    assert pool.find([A]) == []
    assert pages.num_free == 1
    pool.check()


# What is not to be used again.


def test_a_forgotten_block_is_not_found_and_its_users_keep_it() -> None:
    pool = make_pool(2)
    used, idle = take(pool, A), take(pool, B)
    pool.release([idle])
    pool.forget([used, idle])
    assert pool.find([A]) == pool.find([B]) == []
    assert (used.users, used.key) == (1, None)
    assert (counts(pool), page_counts(pool)) == ((1, 0), (2, 2))
    pool.check()
    pool.release([used])
    assert (counts(pool), page_counts(pool)) == ((0, 0), (0, 4))


def test_a_block_without_a_key_may_be_forgotten() -> None:
    pool = make_pool(1)
    block = take(pool)
    pool.forget([block])
    assert (counts(pool), page_counts(pool)) == ((1, 0), (2, 0))
    pool.check()


def test_the_key_of_a_forgotten_block_is_free_for_another() -> None:
    pool = make_pool(2)
    pool.forget([take(pool, A)])
    second = take(pool, A)
    assert pool.find([A]) == [second]


def test_forget_all_leaves_only_what_is_in_use() -> None:
    pool = make_pool(4)
    used, *idle = (take(pool, key) for key in (A, B, C))
    pool.release(idle)
    pool.forget_all()
    assert [pool.find([key]) for key in (A, B, C)] == [[], [], []]
    assert (counts(pool), page_counts(pool)) == ((1, 0), (2, 6))
    pool.check()
    pool.release([used])
    assert (counts(pool), page_counts(pool)) == ((0, 0), (0, 8))


def test_keys_are_forgotten_whether_their_blocks_are_in_use_or_not() -> None:
    pool = make_pool(4)
    used, idle, other = take(pool, A), take(pool, B), take(pool, C)
    pool.release([idle])
    pool.forget_keys([B, D, A, A])
    assert pool.get(A) is pool.get(B) is None
    assert pool.get(C) is other
    assert (used.users, used.key) == (1, None)
    assert (counts(pool), page_counts(pool)) == ((2, 0), (4, 4))
    pool.check()


# Keys.


def test_a_key_is_a_hash_of_the_key_before_and_of_the_tokens() -> None:
    parent = root_key("model", "float32")
    words = parent + struct.pack("=3i", 5, 2**31 - 1, 0)
    assert next_key(parent, [5, 2**31 - 1, 0]) == hashlib.sha256(words).digest()


def test_roots_of_other_models_dtypes_and_routings_differ() -> None:
    roots = {
        root_key(model, dtype, routing)
        for model in ("a", "b", "ab")
        for dtype in ("float32", "bfloat16")
        for routing in ("exact", "fast")
    }
    assert len(roots) == 12
    assert root_key("ab", "c") != root_key("a", "bc")
    assert root_key("a", "b") == root_key("a", "b")


def chain(root: bytes, tokens: list[int], size: int) -> list[bytes]:
    keys = [root]
    for at in range(0, len(tokens) - size + 1, size):
        keys.append(next_key(keys[-1], tokens[at : at + size]))
    return keys[1:]


TOKENS = st.lists(st.integers(0, 2), max_size=24)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_keys_agree_as_far_as_all_tokens_before_do(
    one: list[int], other: list[int], size: int
) -> None:
    """The n-th keys are equal if and only if the first n blocks of tokens are."""
    root = root_key("model")
    pairs = zip(chain(root, one, size), chain(root, other, size), strict=False)
    for n, (first, second) in enumerate(pairs, 1):
        assert (first == second) == (one[: n * size] == other[: n * size])


@given(TOKENS, st.integers(1, 4))
def test_keys_of_other_roots_never_agree(tokens: list[int], size: int) -> None:
    keys = chain(root_key("a"), tokens, size)
    assert not set(keys) & set(chain(root_key("b"), tokens, size))
