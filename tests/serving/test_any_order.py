"""Sequences over any kinds of KV, in any order of events: every token finds what it sees."""

import collections
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from moejax.arena.kinds import KvKind
from moejax.errors import CapacityError
from moejax_serving.kv_blocks import KvBlock, next_key, root_key
from moejax_serving.scheduler import RowPlan, StepPlan
from moejax_serving.sequence import Sequence
from serving.scheduling import KIND_SIZES, Setup, make_kind, sees

ROWS, PREFILL_ROWS, MAX_LEN = 4, 2, 21


Value = tuple[int, int, bool, tuple[int, ...]]
"""Kind, layer, whether the long factors turn it, and the tokens up to there."""


def key_of(kind: KvKind, value: Value) -> bytes:
    """The key of a block that ends with a value."""
    number, _, is_long, tokens = value
    key, size = next_key(root_key("model"), (number, is_long)), kind.block_size
    for at in range(0, len(tokens), size):
        key = next_key(key, tokens[at : at + size])
    return key


def most_pages(kinds: SequenceOf[KvKind], num_tokens: int, budget: int) -> int:
    """Pages of a sequence that comes to so many tokens, the last of which is never cached."""
    return sum(kind.pages_per_block * kind.most_blocks(num_tokens - 1, budget) for kind in kinds)


class AnyOrder(stateful.RuleBasedStateMachine):
    """Sequences come, go and run, with up to three steps in flight, in a pool that is too small.

    A model of the device says what each page holds: who wrote a token's place, and the tokens up to
    there. Every row must find its own tokens wherever it sees them, in all layers of all kinds.
    """

    @stateful.initialize(
        sizes=st.lists(KIND_SIZES, min_size=1, max_size=3),
        longest=st.integers(6, MAX_LEN),
        spare=st.integers(0, 6),
        budget=st.integers(1, 9),
        has_cache=st.booleans(),
    )
    def start(
        self, sizes: list[dict[str, int]], longest: int, spare: int, budget: int, has_cache: bool
    ) -> None:
        """There are pages for one sequence of the longest length that fits, and spare ones."""
        kinds = [make_kind(**size) for size in sizes]
        self.most_begun = [PREFILL_ROWS + budget // kind.block_size + ROWS for kind in kinds]
        self.max_row_edits = [
            begun + kind.most_blocks(MAX_LEN, budget)
            for begun, kind in zip(self.most_begun, kinds, strict=True)
        ]
        self.setup = Setup(
            *kinds,
            num_pages=most_pages(kinds, longest, budget) + spare,
            max_num_seqs=ROWS,
            max_prefill_seqs=PREFILL_ROWS,
            max_num_batched_tokens=budget,
            max_row_edits=self.max_row_edits,
            has_cache=has_cache,
        )
        self.budget = budget
        self.in_flight: collections.deque[StepPlan] = collections.deque()
        self.sequences: list[Sequence] = []
        self.broken: set[int] = set()
        self.pages: dict[int, dict[int, tuple[int, Value]]] = {}
        """Page → place → who wrote there, and what."""
        self.block_pages: dict[tuple[int, int], tuple[int, ...]] = {}
        self.tables: dict[tuple[int, int, int], int] = {}

    @stateful.rule(
        family=st.integers(0, 2),
        length=st.integers(1, 9),
        max_tokens=st.integers(1, MAX_LEN - 9),
        count=st.integers(1, 3),
        wants_prompt=st.booleans(),
        is_long=st.booleans(),
    )
    def add(
        self,
        family: int,
        length: int,
        max_tokens: int,
        count: int,
        wants_prompt: bool,
        is_long: bool,
    ) -> None:
        """Some sequences of one prompt; prompts of a family begin the same."""
        setup, prompt = self.setup, [100 * family + i for i in range(length)]
        needed = most_pages(setup.kinds, length + max_tokens, self.budget)
        options = {"wants_prompt_logprobs": wants_prompt, "uses_long_rope": is_long}
        for _ in range(count):
            try:
                self.sequences.append(setup.add("x", prompt, max_tokens, **options))
            except CapacityError:
                assert needed > setup.num_pages
            else:
                assert needed <= setup.num_pages

    @stateful.precondition(lambda self: any(not s.is_finished for s in self.sequences))
    @stateful.rule(data=st.data(), is_broken=st.booleans())
    def abort(self, data: st.DataObject, is_broken: bool) -> None:
        alive = [s for s in self.sequences if not s.is_finished]
        sequence = data.draw(st.sampled_from(alive))
        self.setup.scheduler.finish(sequence, is_broken=is_broken)
        if is_broken:
            self.broken.add(sequence.number)

    def cached(self) -> list[KvBlock]:
        return list(self.setup.blocks._cached.values())

    @stateful.precondition(lambda self: len(self.in_flight) < 3)
    @stateful.rule()
    def plan(self) -> None:
        plan = self.setup.scheduler.plan()
        if plan is None:
            # Only what is in flight can hold a sequence up.
            assert self.in_flight or all(s.is_finished for s in self.sequences)
            return
        self.check_sizes(plan)
        self.run_on_device(plan)
        self.in_flight.append(plan)

    @stateful.precondition(lambda self: self.in_flight)
    @stateful.rule()
    def land(self) -> None:
        plan = self.in_flight.popleft()
        for row in plan.rows:
            sequence = row.sequence
            sequence.num_pending -= row.sample
            if row.sample and not sequence.is_finished:
                place = len(sequence.output_token_ids)
                sequence.output_token_ids.append(self.chosen(sequence, place))
                self.setup.scheduler.offer(sequence)
                if len(sequence.output_token_ids) == sequence.max_tokens:
                    self.setup.scheduler.finish(sequence)

    @stateful.rule(steps=st.integers(2, 9))
    def go_on(self, steps: int) -> None:
        """As the engine does it, one step ahead."""
        for _ in range(steps):
            while len(self.in_flight) > 1:
                self.land()
            self.plan()
            self.setup.check()

    @stateful.rule()
    def fail(self) -> None:
        """A step failed: those in flight are lost, and all pages with them."""
        self.in_flight.clear()
        self.pages.clear()
        self.setup.scheduler.restart()
        assert self.cached() == []

    @staticmethod
    def chosen(sequence: Sequence, place: int) -> int:
        """What the model chooses depends on the tokens before."""
        return 1000 + hash((tuple(sequence.prompt_token_ids), place)) % 1000

    def check_sizes(self, plan: StepPlan) -> None:
        """A step fits the bucket of a step with prompts."""
        assert len(plan.decode) <= ROWS and len(plan.prefill) <= PREFILL_ROWS
        assert plan.num_prefill_tokens <= self.budget
        assert all(row.count == 1 for row in plan.decode)
        assert len({id(row.sequence) for row in plan.rows}) == len(plan.rows)
        for number, kind in enumerate(plan.kinds):
            assert len(kind.new_blocks) <= self.most_begun[number]
            assert len(kind.row_blocks) <= self.max_row_edits[number]
            assert {block.kind for block in kind.new_blocks} <= {number}
            assert len({block.number for block in kind.new_blocks}) == len(kind.new_blocks)

    def run_on_device(self, plan: StepPlan) -> None:
        # What is free may hold anything.
        for page in self.setup.pages.unowned():
            self.pages.pop(page, None)
        for number, kind in enumerate(plan.kinds):
            for block in kind.new_blocks:
                self.block_pages[number, block.number] = block.pages
                self.pages |= {page: {} for page in block.pages}
            for sequence, index, block in kind.row_blocks:
                assert sequence.row is not None
                self.tables[number, sequence.row, index] = block.number
        # All rows of a step are written before any is read.
        for row in plan.rows:
            new = range(row.start, row.start + row.count)
            for page, place, value in self.places(row, {p: new for p in new}):
                self.pages[page][place] = row.sequence.number, value
        for row in plan.rows:
            end = row.start + row.count
            queries = {p: range(max(p, row.start), end) for p in range(end)}
            for page, place, value in self.places(row, queries):
                assert self.pages[page][place][1] == value

    def places(self, row: RowPlan, queries: dict[int, range]) -> Iterator[tuple[int, int, Value]]:
        """(page, place in it, what must be there) of positions that one of their queries sees."""
        sequence, end = row.sequence, row.start + row.count
        tokens = [
            *sequence.prompt_token_ids,
            *sequence.output_token_ids,
            *(self.chosen(sequence, i) for i in range(len(sequence.output_token_ids), end)),
        ]
        assert sequence.row is not None
        for number, kind in enumerate(self.setup.kinds):
            for position, wanted in queries.items():
                if not any(sees(kind, query, position) for query in wanted):
                    continue
                index, place = divmod(position, kind.block_size)
                block = self.tables[number, sequence.row, index]
                before = tuple(tokens[: position + 1])
                for layer, page in enumerate(self.block_pages[number, block]):
                    yield page, place, (number, layer, sequence.uses_long_rope, before)

    @stateful.invariant()
    def the_books_are_in_order(self) -> None:
        if hasattr(self, "setup"):
            self.setup.check()

    @stateful.invariant()
    def what_is_cached_is_what_its_key_says_and_of_no_broken_sequence(self) -> None:
        if not hasattr(self, "setup"):
            return
        for block in self.cached():
            kind = self.setup.kinds[block.kind]
            for layer, page in enumerate(block.pages):
                places = [self.pages[page][place] for place in range(kind.block_size)]
                last = places[-1][1]
                assert last[:2] == (block.kind, layer)
                assert key_of(kind, last) == block.key
                tokens = last[3]
                ends = range(len(tokens) - kind.block_size + 1, len(tokens) + 1)
                assert [value for _, value in places] == [(*last[:3], tokens[:end]) for end in ends]
                assert not self.broken & {writer for writer, _ in places}

    def teardown(self) -> None:
        """Everything that was added comes to its end, and then nothing is held."""
        if not hasattr(self, "setup"):
            return
        for _ in range(100 * (1 + len(self.sequences))):
            if self.in_flight:
                self.land()
            if all(s.is_finished for s in self.sequences):
                break
            self.plan()
            self.setup.check()
        assert all(s.is_finished for s in self.sequences)
        assert self.setup.blocks.num_used == 0 and self.setup.scheduler.kv_usage == 0
        self.setup.blocks.forget_all()
        assert self.setup.pages.num_free == self.setup.num_pages


AnyOrder.TestCase.settings = hypothesis.settings(max_examples=100, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
