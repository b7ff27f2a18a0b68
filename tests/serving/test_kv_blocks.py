"""kv_blocks: shared, kept for prompts that begin the same, and taken again when they are needed."""

import hashlib
import struct
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import given, stateful
from hypothesis import strategies as st

from moejax_serving.kv_blocks import BlockPool, KvBlock, next_key, root_key
from moejax_serving.pages import Owner, PagePool

KEYS = [bytes([65 + i]) for i in range(6)]
A, B, C, D, *_ = KEYS


def make_pool(num_blocks: int, pages_per_block: int = 2) -> BlockPool:
    """A pool whose pages suffice for exactly its blocks."""
    pages = PagePool(1 + num_blocks * pages_per_block)
    return BlockPool(pages, pages_per_block, num_blocks + 1)


def take(pool: BlockPool, key: bytes | None = None) -> KvBlock:
    """A block of one user; with a key it is in the cache."""
    block = pool.take()
    assert block is not None
    if key is not None:
        pool.register(block, key)
    return block


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_used, pool.num_idle, pool.num_available


# Taking.


def test_blocks_by_hand() -> None:
    pages = PagePool(8)
    pool = BlockPool(pages, pages_per_block=3, max_blocks=10)
    assert counts(pool) == (0, 0, 2)
    first, second = take(pool), take(pool)
    assert (first.number, second.number) == (1, 2)  # block 0 is poison
    assert sorted(first.pages + second.pages) == [1, 2, 3, 4, 5, 6]
    assert (first.users, first.key) == (1, None)
    assert pages.count(Owner.KV) == 6
    assert pool.take() is None  # one page is left
    assert counts(pool) == (2, 0, 0)
    pool.release([first])
    assert counts(pool) == (1, 0, 1)
    assert pages.num_free == 4
    assert take(pool).number == first.number
    pool.check()


def test_numbers_may_run_out_before_pages_and_take_no_page() -> None:
    pages = PagePool(100)
    pool = BlockPool(pages, pages_per_block=2, max_blocks=3)
    assert pool.num_available == 2
    take(pool), take(pool)
    assert pool.take() is None
    assert pages.count(Owner.KV) == 4


def test_pages_that_weights_hold_are_no_blocks() -> None:
    pages = PagePool(10)
    pool = BlockPool(pages, pages_per_block=2, max_blocks=5)
    assert pages.take(6, Owner.WEIGHTS) is not None
    assert pool.num_available == 1
    take(pool)
    assert pool.take() is None
    pool.check()


# Users.


def test_a_block_comes_back_with_its_last_user() -> None:
    pool = make_pool(2)
    block = take(pool)
    pool.share(block)
    assert block.users == 2
    pool.release([block])
    assert counts(pool) == (1, 0, 1)
    pool.release([block])
    assert counts(pool) == (0, 0, 2)
    pool.check()


def test_a_block_with_a_key_stays_for_the_next_user() -> None:
    pool = make_pool(2)
    block = take(pool, A)
    pool.release([block])
    assert counts(pool) == (0, 1, 2)
    assert pool.find([A]) == [block]
    pool.share(block)
    assert (block.users, counts(pool)) == (1, (1, 0, 1))
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
    assert counts(pool) == (0, 1, 3)
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
    assert pool.take() is None
    assert pool.find([A]) == [a]
    pool.check()


def test_a_block_goes_when_weights_have_taken_the_free_pages() -> None:
    """Numbers are left, pages are not."""
    pages = PagePool(7)
    pool = BlockPool(pages, pages_per_block=2, max_blocks=6)
    pool.release([take(pool, A)])
    assert pages.take(3, Owner.WEIGHTS) is not None  # one is left
    assert pool.num_available == 1
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
    assert counts(pool) == (1, 0, 1)
    pool.check()
    pool.release([used])
    assert counts(pool) == (0, 0, 2)


def test_a_block_without_a_key_may_be_forgotten() -> None:
    pool = make_pool(1)
    block = take(pool)
    pool.forget([block])
    assert counts(pool) == (1, 0, 0)
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
    assert counts(pool) == (1, 0, 3)
    pool.check()
    pool.release([used])
    assert counts(pool) == (0, 0, 4)


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
        wrong = KvBlock(block.number, block.pages)
    else:
        wrong = take(pool)
        pool.release([wrong])
    before = counts(pool)
    with pytest.raises(ValueError, match=f"kv_block {wrong.number} is not held"):
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
    with pytest.raises(ValueError, match=f"kv_block {old.number} is not held"):
        call(pool, old)
    assert pool.find([A]) == [new]
    pool.check()


def test_a_block_without_users_cannot_be_released() -> None:
    pool = make_pool(1)
    block = take(pool, A)
    pool.release([block])
    with pytest.raises(ValueError, match=f"kv_block {block.number} has no user"):
        pool.release([block])
    assert counts(pool) == (0, 1, 1)
    pool.check()


# Broken books.


def break_lost(pool: BlockPool) -> None:
    pool._free.pop()


def break_pages(pool: BlockPool) -> None:
    assert pool._pages.take(1, Owner.KV) is not None


def break_twice(pool: BlockPool) -> None:
    first, second, *_ = pool._blocks.values()
    second.pages = first.pages


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
    pool._cached[C] = KvBlock(2, (), key=C)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (break_lost, r"1 free \+ 2 held \+ poison != 5"),
        (break_pages, "kv_blocks hold 4 pages, the pool counts 5"),
        (break_twice, "kv_blocks hold 4 pages, the pool counts 4"),
        (break_users, "kv_block 1 has 0 users"),
        (break_idle, "kv_block 2 has 1 users"),
        (break_nobody, "kv_block 2 is kept for nobody"),
        (break_key, "the cache holds kv_block 1, which is not"),
        (break_cached, "the cache holds kv_block 2, which is not"),
    ],
    ids=["lost", "pages", "twice", "users", "idle", "nobody", "key", "cached"],
)
def test_broken_books_are_found(break_it: Callable[[BlockPool], None], message: str) -> None:
    pool = make_pool(4)
    _, idle = take(pool, A), take(pool, B)
    pool.release([idle])
    pool.check()
    break_it(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()


# Any order of events.


class Machine(stateful.RuleBasedStateMachine):
    """Sequences take blocks, share, name, leave and forget them; weights take pages.

    The model: what each sequence holds, the keys that are known, and who was left when.
    """

    @stateful.initialize(
        pages_per_block=st.integers(1, 3),
        num_pages=st.integers(0, 14),
        num_numbers=st.integers(0, 6),
    )
    def start(self, pages_per_block: int, num_pages: int, num_numbers: int) -> None:
        self.per_block = pages_per_block
        self.pages = PagePool(1 + num_pages)
        self.pool = BlockPool(self.pages, pages_per_block, 1 + num_numbers)
        self.free_pages, self.free_numbers = num_pages, num_numbers
        self.weights: list[list[int]] = []
        self.sequences: list[list[KvBlock]] = []
        self.keys: dict[bytes, KvBlock] = {}
        self.idle: list[KvBlock] = []
        """The one that was left longest ago first."""

    def users(self, block: KvBlock) -> int:
        return sum(held is block for sequence in self.sequences for held in sequence)

    def key(self, block: KvBlock) -> bytes | None:
        return next((key for key, held in self.keys.items() if held is block), None)

    @property
    def num_fresh(self) -> int:
        return min(self.free_numbers, self.free_pages // self.per_block)

    def drop(self, count: int = 1) -> None:
        self.free_pages += count * self.per_block
        self.free_numbers += count

    @stateful.rule(n=st.integers(0, 3), data=st.data())
    def take(self, n: int, data: st.DataObject) -> None:
        """A sequence grows, or a new one starts."""
        grown = data.draw(st.sampled_from([*self.sequences, []]))
        if not any(sequence is grown for sequence in self.sequences):
            self.sequences.append(grown)
        for _ in range(n):
            must_evict, can_evict = self.num_fresh == 0, bool(self.idle)
            block = self.pool.take()
            assert (block is None) == (must_evict and not can_evict)
            if block is None:
                break
            if must_evict:
                oldest = self.idle.pop(0)
                del self.keys[self.key(oldest) or b""]
                self.drop()
                assert block is not oldest
            grown.append(block)
            self.drop(-1)

    @stateful.rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def share(self, keys: list[bytes]) -> None:
        """A sequence starts with what the cache has."""
        found = self.pool.find(keys)
        for block in found:
            self.pool.share(block)
            if block in self.idle:
                self.idle.remove(block)
        self.sequences.append(list(found))

    @stateful.precondition(lambda self: any(self.sequences))
    @stateful.rule(key=st.sampled_from(KEYS), data=st.data())
    def register(self, key: bytes, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for s in self.sequences for b in s]))
        self.pool.register(block, key)
        if self.key(block) is None:
            self.keys.setdefault(key, block)

    @stateful.precondition(lambda self: self.sequences)
    @stateful.rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.sequences) - 1))
        left = self.sequences.pop(at)
        self.pool.release(left)
        for block in reversed(left):
            if self.users(block) == 0:
                if self.key(block) is None:
                    self.drop()
                else:
                    self.idle.append(block)

    def forget_model(self, blocks: list[KvBlock]) -> None:
        for block in blocks:
            key = self.key(block)
            if key is not None:
                del self.keys[key]
            if block in self.idle:
                self.idle.remove(block)
                self.drop()

    @stateful.rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A sequence's blocks, or some of the cache's."""
        blocks = data.draw(st.sampled_from([*self.sequences, list(self.keys.values()), self.idle]))
        blocks = list(blocks)
        self.pool.forget(blocks)
        self.forget_model(blocks)

    @stateful.rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.forget_model(list(self.keys.values()))

    @stateful.rule(n=st.integers(0, 4))
    def take_weights(self, n: int) -> None:
        pages = self.pages.take(n, Owner.WEIGHTS)
        assert (pages is None) == (n > self.free_pages)
        if pages is not None:
            self.weights.append(pages)
            self.free_pages -= n

    @stateful.precondition(lambda self: self.weights)
    @stateful.rule()
    def give_weights_back(self) -> None:
        pages = self.weights.pop()
        self.pages.give_back(pages)
        self.free_pages += len(pages)

    @stateful.invariant()
    def the_books_are_in_order(self) -> None:
        self.pool.check()
        self.pages.check()

    @stateful.invariant()
    def it_counts_what_the_model_counts(self) -> None:
        held = {block.number for sequence in self.sequences for block in sequence}
        assert self.pool.num_used == len(held)
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.num_available == self.num_fresh + len(self.idle)
        assert self.pages.num_free == self.free_pages

    @stateful.invariant()
    def blocks_say_what_the_model_says(self) -> None:
        for block in [*(b for s in self.sequences for b in s), *self.idle]:
            assert block.users == self.users(block)
            assert block.key == self.key(block)

    @stateful.invariant()
    def exactly_the_keys_of_the_model_are_found(self) -> None:
        for key in KEYS:
            assert self.pool.find([key]) == ([self.keys[key]] if key in self.keys else [])

    @stateful.invariant()
    def no_two_blocks_share_a_page_or_a_number(self) -> None:
        blocks = {id(b): b for b in [*(b for s in self.sequences for b in s), *self.idle]}.values()
        pages = [page for block in blocks for page in block.pages]
        pages += [page for taken in self.weights for page in taken]
        assert len(set(pages)) == len(pages)
        assert 0 not in pages
        numbers = [block.number for block in blocks]
        assert len(set(numbers)) == len(numbers)
        assert 0 not in numbers

    def teardown(self) -> None:
        """Everything can be taken, one block after the other, once all sequences have left."""
        for sequence in self.sequences:
            self.pool.release(sequence)
        free = min(
            self.pool.max_blocks - 1,
            (self.pages.num_free + self.per_block * self.pool.num_idle) // self.per_block,
        )
        while self.pool.take() is not None:
            free -= 1
        assert free == 0
        self.pool.check()


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = hypothesis.settings(deadline=None, max_examples=100, stateful_step_count=40)


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
