"""Which sequences run: examples by hand, then any order of events."""

import collections
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from moejax.errors import CapacityError
from moejax_serving.kv_blocks import BlockPool, root_key
from moejax_serving.pages import PagePool
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.scheduler import RowPlan, Scheduler, StepPlan
from moejax_serving.sequence import Sequence

LAYERS = 2


class Setup:
    """A scheduler over its pools."""

    def __init__(
        self,
        *,
        num_blocks: int = 10,
        block_size: int = 4,
        max_num_seqs: int = 3,
        max_prefill_seqs: int = 2,
        max_num_batched_tokens: int = 8,
        max_row_edits: int = 100,
        has_cache: bool = True,
    ) -> None:
        self.block_size = block_size
        self.pages = PagePool(1 + LAYERS * num_blocks)
        self.blocks = BlockPool(self.pages, LAYERS, num_blocks + 1)
        self.scheduler = Scheduler(
            self.blocks,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_prefill_seqs=max_prefill_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_row_edits=max_row_edits,
            cache_root=root_key("model") if has_cache else None,
        )
        self.names: dict[int, str] = {}

    def add(self, name: str, prompt: int | list[int], max_tokens: int, **options: bool) -> Sequence:
        number = len(self.names)
        # Prompts of a length alone share nothing.
        ids = [1000 * number + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        sequence = Sequence(
            number=number,
            prompt_token_ids=ids,
            params=SamplingParams(max_tokens=1000),
            max_tokens=max_tokens,
            seed=0,
            **options,
        )
        self.names[number] = name
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.check()
        return plan

    def step(self) -> StepPlan:
        """A step whose results have come."""
        plan = self.plan()
        self.land(plan)
        return plan

    def land(self, plan: StepPlan) -> None:
        """What the engine does with a step's results."""
        for row in plan.rows:
            sequence = row.sequence
            sequence.num_pending -= row.sample
            if row.sample and not sequence.is_finished:
                sequence.output_token_ids.append(7)
                self.scheduler.offer(sequence)
                if len(sequence.output_token_ids) == sequence.max_tokens:
                    self.scheduler.finish(sequence)
        self.check()

    def shown(self, plan: StepPlan) -> list[tuple[str, int, int]]:
        return [(self.names[row.sequence.number], row.start, row.count) for row in plan.rows]

    def check(self) -> None:
        self.scheduler.check()
        self.pages.check()


# Steps by hand.


def test_a_prompt_is_cut_into_chunks_and_then_decoded() -> None:
    setup = Setup()
    sequence = setup.add("a", prompt=10, max_tokens=3)
    plan = setup.step()
    assert setup.shown(plan) == [("a", 0, 8)]
    assert not plan.rows[0].sample and plan.rows[0].starts_row
    assert [index for _, index, _ in plan.row_blocks] == [0, 1]
    assert len(plan.prefill) == 1 and plan.decode == ()
    plan = setup.step()
    assert setup.shown(plan) == [("a", 8, 2)]
    assert plan.rows[0].sample  # the last prompt token chooses the first of the output
    assert not plan.rows[0].starts_row
    assert [index for _, index, _ in plan.row_blocks] == [2]
    plan = setup.step()
    assert setup.shown(plan) == [("a", 10, 1)]
    assert plan.new_blocks == () and plan.prefill == ()
    assert setup.shown(setup.plan()) == [("a", 11, 1)]
    assert len(sequence.blocks) == 3  # 12 cached tokens; the 13th is only given out


def test_a_plan_runs_ahead_of_the_results() -> None:
    setup = Setup()
    sequence = setup.add("a", prompt=3, max_tokens=3)
    plans = [setup.plan() for _ in range(3)]
    assert [setup.shown(plan) for plan in plans] == [[("a", 0, 3)], [("a", 3, 1)], [("a", 4, 1)]]
    assert sequence.num_pending == 3
    assert setup.scheduler.plan() is None  # the last token is on its way
    for plan in plans:
        setup.land(plan)
    assert sequence.is_finished and setup.blocks.num_used == 0


def test_chunks_of_several_prompts_share_a_step() -> None:
    setup = Setup()
    for name, prompt in (("a", 3), ("b", 9), ("c", 2)):
        setup.add(name, prompt, max_tokens=2)
    plan = setup.step()
    assert setup.shown(plan) == [("a", 0, 3), ("b", 0, 5)]
    assert [row.sample for row in plan.rows] == [True, False]
    assert plan.num_tokens == 8
    assert setup.shown(setup.plan()) == [("b", 5, 4), ("c", 0, 2), ("a", 3, 1)]


def test_a_step_processes_no_more_prompts_than_allowed() -> None:
    setup = Setup(max_prefill_seqs=2)
    for name in "abc":
        setup.add(name, prompt=2, max_tokens=2)
    assert setup.shown(setup.step()) == [("a", 0, 2), ("b", 0, 2)]
    assert setup.shown(setup.step()) == [("c", 0, 2), ("a", 2, 1), ("b", 2, 1)]


def test_sequences_wait_for_a_row() -> None:
    setup = Setup(max_num_seqs=2, num_blocks=20, max_prefill_seqs=4)
    for name in "abc":
        setup.add(name, prompt=2, max_tokens=2)
    assert setup.shown(setup.step()) == [("a", 0, 2), ("b", 0, 2)]
    assert setup.shown(setup.step()) == [("a", 2, 1), ("b", 2, 1)]
    assert setup.shown(setup.step()) == [("c", 0, 2)]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    setup = Setup(num_blocks=3, block_size=4)
    with pytest.raises(CapacityError, match="14 tokens need 4 kv_blocks of 4 tokens, .* holds 3"):
        setup.add("a", prompt=10, max_tokens=4)
    setup.add("b", prompt=10, max_tokens=3)  # its last token is not cached
    while setup.scheduler.running or setup.scheduler.waiting:
        setup.step()


def test_a_prompt_is_admitted_when_all_of_it_fits() -> None:
    """The second one would fit by its first chunk, and then push the first one out."""
    setup = Setup(num_blocks=5, block_size=4, has_cache=False)
    setup.add("a", prompt=8, max_tokens=2)
    setup.add("b", prompt=12, max_tokens=2)
    assert setup.shown(setup.step()) == [("a", 0, 8)]
    assert setup.shown(setup.step()) == [("a", 8, 1)]
    assert setup.shown(setup.step()) == [("b", 0, 8)]
    assert setup.scheduler.counts.preemptions == 0


# Preemption.


def test_where_blocks_run_out_the_youngest_gives_its_own_back() -> None:
    setup = Setup(num_blocks=5, block_size=2, max_num_batched_tokens=8, has_cache=False)
    a = setup.add("a", prompt=3, max_tokens=5)
    b = setup.add("b", prompt=3, max_tokens=5)
    assert setup.shown(setup.step()) == [("a", 0, 3), ("b", 0, 3)]
    assert setup.shown(setup.step()) == [("a", 3, 1), ("b", 3, 1)]
    assert setup.shown(setup.step()) == [("a", 4, 1)]  # takes the last block; b has none
    assert setup.scheduler.counts.preemptions == 1
    assert (b.row, b.blocks, b.num_cached, len(b.output_token_ids)) == (None, [], 0, 2)
    while not a.is_finished:
        assert setup.shown(setup.step())[0][0] == "a"
    plan = setup.step()
    assert setup.shown(plan) == [("b", 0, 5)]  # prompt and output once more
    assert plan.rows[0].starts_row and plan.rows[0].sample
    while not b.is_finished:
        setup.step()


def test_a_preempted_sequence_waits_for_its_token_in_flight() -> None:
    setup = Setup(num_blocks=5, block_size=2, has_cache=False)
    a = setup.add("a", prompt=3, max_tokens=4)
    b = setup.add("b", prompt=3, max_tokens=4)
    setup.step()
    plan = setup.plan()  # the fourth token of each fills its blocks
    ahead = setup.plan()  # b is preempted with a token in flight
    assert setup.shown(ahead) == [("a", 4, 1)]
    setup.scheduler.finish(a)
    assert setup.scheduler.plan() is None
    assert (b.row, b.num_pending) == (None, 1)
    setup.land(plan)
    assert setup.shown(setup.plan()) == [("b", 0, 5)]


def test_who_came_first_is_never_preempted() -> None:
    setup = Setup(num_blocks=6, block_size=2, max_num_seqs=3, max_prefill_seqs=3, has_cache=False)
    sequences = [setup.add(name, prompt=2, max_tokens=8) for name in "abc"]
    finished = []
    while not all(s.is_finished for s in sequences):
        first = next(s for s in sequences if not s.is_finished)
        plan = setup.step()
        assert any(row.sequence is first for row in plan.rows)
        finished += [s for s in sequences if s.is_finished and s not in finished]
    assert finished == sequences
    assert setup.scheduler.counts.preemptions > 0


# The prefix cache.


def test_a_prompt_that_begins_the_same_takes_the_blocks_that_are_there() -> None:
    setup = Setup(max_num_batched_tokens=32)
    prompt = list(range(10))
    a = setup.add("a", prompt, max_tokens=3)
    setup.step()
    b = setup.add("b", [*prompt[:9], 99], max_tokens=2)
    plan = setup.step()
    assert setup.shown(plan) == [("b", 8, 2), ("a", 10, 1)]
    assert b.num_hits == 8 and a.num_hits == 0
    assert b.blocks[:2] == a.blocks[:2] and b.blocks[2] is not a.blocks[2]
    assert [block.users for block in b.blocks] == [2, 2, 1]
    # The table of b's row is told of the shared blocks; their pages it knows.
    shown = [(index, block) for sequence, index, block in plan.row_blocks if sequence is b]
    assert [index for index, _ in shown] == [0, 1, 2]
    assert plan.new_blocks == (b.blocks[2],)
    counts = setup.scheduler.counts
    assert (counts.prefix_queries, counts.prefix_hits) == (20, 8)


def test_prompts_of_one_step_share_too() -> None:
    setup = Setup(max_num_batched_tokens=32, max_num_seqs=3, max_prefill_seqs=3)
    sequences = [setup.add(name, list(range(9)), max_tokens=2) for name in "abc"]
    plan = setup.step()
    # One token is left of each: such rows are decodes.
    assert setup.shown(plan) == [("a", 0, 9), ("b", 8, 1), ("c", 8, 1)]
    assert [s.blocks[:2] == sequences[0].blocks[:2] for s in sequences] == [True] * 3


def test_the_last_token_is_always_computed() -> None:
    setup = Setup()
    for name in "ab":
        sequence = setup.add(name, list(range(8)), max_tokens=1)
        plan = setup.step()
        assert plan.rows[0].sample
        assert sequence.num_hits == (0 if name == "a" else 4)


def test_blocks_stay_after_their_sequence_until_they_are_needed() -> None:
    setup = Setup(num_blocks=4)
    setup.add("a", list(range(8)), max_tokens=1)
    setup.step()
    assert (setup.blocks.num_used, setup.blocks.num_idle) == (0, 2)
    b = setup.add("b", [*range(4), 50], max_tokens=1)
    setup.step()
    assert b.num_hits == 4
    setup.add("c", prompt=15, max_tokens=1)
    setup.step()
    assert (setup.blocks.num_used, setup.blocks.num_idle) == (2, 2)
    plan = setup.plan()
    assert (setup.blocks.num_used, setup.blocks.num_idle) == (4, 0)
    setup.land(plan)
    assert (setup.blocks.num_used, setup.blocks.num_idle) == (0, 3)


def test_blocks_of_output_are_found_by_the_next_turn_of_a_conversation() -> None:
    setup = Setup(max_num_batched_tokens=32)
    setup.add("a", [1, 2, 3], max_tokens=6)
    for _ in range(6):
        setup.step()
    b = setup.add("b", [1, 2, 3, 7, 7, 7, 7, 7, 7, 9], max_tokens=1)
    setup.step()
    assert b.num_hits == 8  # the KV of eight of its nine tokens was computed


def test_log_probabilities_of_a_prompt_need_all_of_it() -> None:
    setup = Setup()
    setup.add("a", list(range(8)), max_tokens=1)
    setup.step()
    sequence = setup.add("b", list(range(8)), max_tokens=1, wants_prompt_logprobs=True)
    assert setup.shown(setup.step()) == [("b", 0, 8)]
    assert sequence.num_hits == 0


def test_without_a_cache_nothing_is_kept() -> None:
    setup = Setup(has_cache=False)
    for _ in range(2):
        sequence = setup.add("a", list(range(8)), max_tokens=1)
        setup.step()
        assert sequence.num_hits == 0
        assert setup.pages.num_free == 20


def test_what_a_broken_sequence_cached_is_not_found() -> None:
    setup = Setup(max_num_batched_tokens=32)
    a = setup.add("a", list(range(12)), max_tokens=5)
    setup.plan()
    setup.scheduler.finish(a, is_broken=True)
    setup.check()
    assert setup.pages.num_free == 20
    b = setup.add("b", list(range(12)), max_tokens=5)
    setup.step()
    assert b.num_hits == 0


def test_a_sequence_whose_table_does_not_fit_the_step_waits_for_the_next() -> None:
    setup = Setup(num_blocks=20, max_row_edits=4, max_num_batched_tokens=32)
    setup.add("a", prompt=12, max_tokens=2)
    setup.add("b", prompt=8, max_tokens=2)
    assert setup.shown(setup.step()) == [("a", 0, 12)]
    assert setup.shown(setup.step()) == [("b", 0, 8), ("a", 12, 1)]


# Failures.


def test_after_a_failed_step_all_is_computed_again() -> None:
    setup = Setup(max_num_batched_tokens=32)
    a = setup.add("a", prompt=9, max_tokens=4)
    b = setup.add("b", prompt=9, max_tokens=4)
    setup.step()
    setup.plan()
    setup.scheduler.restart()
    setup.check()
    assert setup.pages.num_free == 20  # the cache is empty: nobody knows what it holds
    assert [a.num_pending, b.num_pending] == [0, 0]
    plan = setup.step()
    assert setup.shown(plan) == [("a", 0, 10), ("b", 0, 10)]
    while not (a.is_finished and b.is_finished):
        setup.step()
    assert len(a.output_token_ids) == len(b.output_token_ids) == 4


# Any order of events.


class AnyOrder(stateful.RuleBasedStateMachine):
    """Sequences come, go and run, with up to two steps in flight, in a pool that is too small.

    A model of the device says what each page holds: for each layer, the tokens up to there of the
    sequence that wrote it. Every row must find its own tokens before it.
    """

    NUM_BLOCKS, BLOCK_SIZE, ROWS = 7, 2, 4

    @stateful.initialize(has_cache=st.booleans(), budget=st.integers(1, 9))
    def start(self, has_cache: bool, budget: int) -> None:
        self.setup = Setup(
            num_blocks=self.NUM_BLOCKS,
            block_size=self.BLOCK_SIZE,
            max_num_seqs=self.ROWS,
            max_prefill_seqs=2,
            max_num_batched_tokens=budget,
            max_row_edits=self.NUM_BLOCKS + self.ROWS + 5,
            has_cache=has_cache,
        )
        self.in_flight: collections.deque[StepPlan] = collections.deque()
        self.sequences: list[Sequence] = []
        self.pages: dict[int, list[tuple[int, ...] | None]] = {}
        self.block_pages: dict[int, tuple[int, ...]] = {}
        self.tables: dict[tuple[int, int], int] = {}
        self.rows: dict[int, list[int]] = {}

    @stateful.rule(
        family=st.integers(0, 2),
        length=st.integers(1, 9),
        max_tokens=st.integers(1, 6),
        wants_prompt=st.booleans(),
    )
    def add(self, family: int, length: int, max_tokens: int, wants_prompt: bool) -> None:
        """Prompts of a family begin the same."""
        prompt = [100 * family + i for i in range(length)]
        fits = -(-(length + max_tokens - 1) // self.BLOCK_SIZE) <= self.NUM_BLOCKS
        try:
            sequence = self.setup.add("x", prompt, max_tokens, wants_prompt_logprobs=wants_prompt)
        except CapacityError:
            assert not fits
        else:
            assert fits
            self.sequences.append(sequence)

    @stateful.precondition(lambda self: any(not s.is_finished for s in self.sequences))
    @stateful.rule(data=st.data(), is_broken=st.booleans())
    def abort(self, data: st.DataObject, is_broken: bool) -> None:
        alive = [s for s in self.sequences if not s.is_finished]
        self.setup.scheduler.finish(data.draw(st.sampled_from(alive)), is_broken=is_broken)

    @stateful.precondition(lambda self: len(self.in_flight) < 2)
    @stateful.rule()
    def plan(self) -> None:
        plan = self.setup.scheduler.plan()
        if plan is None:
            # Only what is in flight can hold a sequence up.
            assert self.in_flight or all(s.is_finished for s in self.sequences)
            return
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

    @stateful.rule()
    def fail(self) -> None:
        """A step failed: those in flight are lost, and all pages with them."""
        self.in_flight.clear()
        self.pages.clear()
        self.setup.scheduler.restart()

    @staticmethod
    def chosen(sequence: Sequence, place: int) -> int:
        """What the model chooses depends on the tokens before."""
        return 1000 + hash((tuple(sequence.prompt_token_ids), place)) % 1000

    def run_on_device(self, plan: StepPlan) -> None:
        size = self.BLOCK_SIZE
        assert len(plan.decode) <= self.ROWS and len(plan.prefill) <= 2
        assert len({id(row.sequence) for row in plan.rows}) == len(plan.rows)
        numbers = [block.number for block in plan.new_blocks]
        assert len(set(numbers)) == len(numbers)
        for block in plan.new_blocks:
            self.block_pages[block.number] = block.pages
            for page in block.pages:
                self.pages[page] = [None] * size
        for sequence, index, block in plan.row_blocks:
            assert sequence.row is not None
            self.tables[sequence.row, index] = block.number
        # All rows of a step are written before any is read.
        for row in plan.rows:
            for page, place, tokens in self.places(row, row.start):
                self.pages[page][place] = tokens
        for row in plan.rows:
            for page, place, tokens in self.places(row, 0):
                assert self.pages[page][place] == tokens

    def places(self, row: RowPlan, first: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(page, place in it, tokens up to there) of positions from `first` on."""
        sequence, end = row.sequence, row.start + row.count
        tokens = [
            *sequence.prompt_token_ids,
            *sequence.output_token_ids,
            *(self.chosen(sequence, i) for i in range(len(sequence.output_token_ids), end)),
        ]
        assert sequence.row is not None
        for position in range(first, end):
            block = self.tables[sequence.row, position // self.BLOCK_SIZE]
            for page in self.block_pages[block]:
                yield page, position % self.BLOCK_SIZE, tuple(tokens[: position + 1])

    @stateful.invariant()
    def the_books_are_in_order(self) -> None:
        if hasattr(self, "setup"):
            self.setup.check()

    def teardown(self) -> None:
        """Everything that was added comes to its end, and then nothing is held."""
        if not hasattr(self, "setup"):
            return
        for _ in range(1000):
            if self.in_flight:
                self.land()
            if all(s.is_finished for s in self.sequences):
                break
            self.plan()
        assert all(s.is_finished for s in self.sequences)
        self.setup.blocks.forget_all()
        assert self.setup.pages.num_free == LAYERS * self.NUM_BLOCKS
        assert self.setup.blocks.num_used == 0


AnyOrder.TestCase.settings = hypothesis.settings(max_examples=100, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
