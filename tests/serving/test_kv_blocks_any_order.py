"""kv_blocks of any kinds, in any order of events."""

import itertools

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from moejax_serving.kv_blocks import BlockPool, KvBlock
from moejax_serving.pages import Owner, PagePool
from serving.scheduling import make_kind

KEYS = [bytes([65 + i]) for i in range(6)]


class Machine(stateful.RuleBasedStateMachine):
    """Sequences take blocks, share, name, leave and forget them; weights take pages.

    The model: what each sequence holds, the keys that are known, and who was left when.
    """

    @stateful.initialize(
        kinds=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=3),
        num_pages=st.integers(0, 14),
    )
    def start(self, kinds: list[tuple[int, int]], num_pages: int) -> None:
        """`kinds`: pages per block, and blocks that have numbers."""
        self.per_block = [per_block for per_block, _ in kinds]
        self.free_numbers = [num for _, num in kinds]
        self.pages = PagePool(1 + num_pages)
        self.pool = BlockPool(
            self.pages,
            [make_kind(layers=per_block) for per_block in self.per_block],
            [1 + num for num in self.free_numbers],
        )
        self.free_pages = num_pages
        self.weights: list[list[int]] = []
        self.sequences: list[list[KvBlock]] = []
        self.keys: dict[bytes, KvBlock] = {}
        self.idle: list[KvBlock] = []
        """The one that was left longest ago first."""

    def users(self, block: KvBlock) -> int:
        return sum(held is block for sequence in self.sequences for held in sequence)

    def key(self, block: KvBlock) -> bytes | None:
        return next((key for key, held in self.keys.items() if held is block), None)

    def count(self, block: KvBlock, sign: int) -> None:
        """A block is made (-1) or dropped (1)."""
        self.free_pages += sign * self.per_block[block.kind]
        self.free_numbers[block.kind] += sign

    @property
    def idle_pages(self) -> int:
        return sum(self.per_block[block.kind] for block in self.idle)

    def evicted(self, kind: int) -> list[KvBlock] | None:
        """The blocks that must go for one of a kind; None if it cannot be made."""
        needed = self.per_block[kind]
        if self.free_pages + self.idle_pages < needed:
            return None
        if self.free_numbers[kind] == 0:
            return [block for block in self.idle if block.kind == kind][:1] or None
        freed = [0, *itertools.accumulate(self.per_block[block.kind] for block in self.idle)]
        return self.idle[: next(n for n, f in enumerate(freed) if self.free_pages + f >= needed)]

    @stateful.rule(wanted=st.lists(st.integers(0, 2), max_size=3), data=st.data())
    def take(self, wanted: list[int], data: st.DataObject) -> None:
        """A sequence grows, or a new one starts."""
        grown = data.draw(st.sampled_from([*self.sequences, []]))
        if not any(sequence is grown for sequence in self.sequences):
            self.sequences.append(grown)
        for kind in (number % len(self.per_block) for number in wanted):
            gone = self.evicted(kind)
            block = self.pool.take(kind)
            assert (block is None) == (gone is None)
            if block is None or gone is None:
                break
            assert block.kind == kind
            for old in gone:
                self.idle.remove(old)
                self.keys = {key: held for key, held in self.keys.items() if held is not old}
                self.count(old, 1)
            grown.append(block)
            self.count(block, -1)

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
                    self.count(block, 1)
                else:
                    self.idle.append(block)

    def forget_model(self, blocks: list[KvBlock]) -> None:
        for block in blocks:
            key = self.key(block)
            if key is not None:
                del self.keys[key]
            if block in self.idle:
                self.idle.remove(block)
                self.count(block, 1)

    @stateful.rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A sequence's blocks, or some of the cache's."""
        blocks = data.draw(st.sampled_from([*self.sequences, list(self.keys.values()), self.idle]))
        blocks = list(blocks)
        self.pool.forget(blocks)
        self.forget_model(blocks)

    @stateful.rule(keys=st.lists(st.sampled_from(KEYS)))
    def forget_keys(self, keys: list[bytes]) -> None:
        self.pool.forget_keys(keys)
        self.forget_model([self.keys[key] for key in set(keys) & set(self.keys)])

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
        held = {block for sequence in self.sequences for block in sequence}
        assert self.pool.num_used == len(held)
        assert self.pool.num_used_pages == sum(self.per_block[block.kind] for block in held)
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.num_available_pages == self.free_pages + self.idle_pages
        assert self.pages.num_free == self.free_pages

    @stateful.invariant()
    def blocks_say_what_the_model_says(self) -> None:
        for block in [*(b for s in self.sequences for b in s), *self.idle]:
            assert block.users == self.users(block)
            assert block.key == self.key(block)

    @stateful.invariant()
    def exactly_the_keys_of_the_model_are_found(self) -> None:
        for key in KEYS:
            assert self.pool.get(key) is self.keys.get(key)
            assert self.pool.find([key]) == ([self.keys[key]] if key in self.keys else [])

    @stateful.invariant()
    def no_two_blocks_share_a_page_or_a_number(self) -> None:
        blocks = {id(b): b for b in [*(b for s in self.sequences for b in s), *self.idle]}.values()
        pages = [page for block in blocks for page in block.pages]
        pages += [page for taken in self.weights for page in taken]
        assert len(set(pages)) == len(pages)
        assert 0 not in pages
        numbers = [(block.kind, block.number) for block in blocks]
        assert len(set(numbers)) == len(numbers)
        assert all(number > 0 for _, number in numbers)

    def teardown(self) -> None:
        """Everything can be taken, one block after the other, once all sequences have left."""
        for sequence in self.sequences:
            self.pool.release(sequence)
        left = self.pool.num_available_pages
        for kind, per_block in enumerate(self.per_block):
            count = min(self.pool.max_blocks[kind] - 1, left // per_block)
            for _ in range(count):
                assert self.pool.take(kind) is not None
            assert self.pool.take(kind) is None
            left -= count * per_block
        self.pool.check()


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = hypothesis.settings(deadline=None, max_examples=100, stateful_step_count=40)
