"""Which sequences run: examples by hand, then any order of events."""

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from moejax.errors import CapacityError
from moejax_serving.pages import BlockPool, PagePool
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.scheduler import RowPlan, Scheduler, StepPlan
from moejax_serving.sequence import Sequence

LAYERS = 2
PARAMS = SamplingParams(max_tokens=1000)


def make_sequence(
    name: str, prompt: int, max_tokens: int, params: SamplingParams = PARAMS
) -> Sequence:
    return Sequence(
        request_id=name,
        prompt=None,
        prompt_token_ids=list(range(prompt)),
        params=params,
        max_tokens=max_tokens,
        seed=0,
    )


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
    ) -> None:
        self.pages = PagePool(1 + LAYERS * num_blocks)
        self.blocks = BlockPool(self.pages, LAYERS, num_blocks + 1)
        self.scheduler = Scheduler(
            self.blocks,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_prefill_seqs=max_prefill_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )

    def add(self, name: str, prompt: int, max_tokens: int) -> Sequence:
        sequence = make_sequence(name, prompt, max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def check(self) -> None:
        self.scheduler.check()
        self.pages.check()


def complete(plan: StepPlan) -> list[Sequence]:
    """What the engine does with a step's result; returns the sequences that got a token."""
    sampled = []
    for row in plan.rows:
        sample = row.sample
        row.sequence.num_cached = row.start + row.count
        if sample:
            row.sequence.output_token_ids.append(7)
            sampled.append(row.sequence)
    return sampled


def shown(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.sequence.request_id, row.start, row.count) for row in plan.rows]


# Steps by hand.


def test_a_prompt_is_cut_into_chunks_and_then_decoded() -> None:
    setup = Setup()
    sequence = setup.add("a", prompt=10, max_tokens=3)
    plan = setup.plan()
    assert shown(plan) == [("a", 0, 8)]
    assert not plan.rows[0].sample
    assert [index for _, index, _ in plan.new_blocks] == [0, 1]
    complete(plan)
    plan = setup.plan()
    assert shown(plan) == [("a", 8, 2)]
    assert plan.rows[0].sample  # the last prompt token chooses the first of the output
    assert [index for _, index, _ in plan.new_blocks] == [2]
    complete(plan)
    plan = setup.plan()
    assert shown(plan) == [("a", 10, 1)]
    assert plan.new_blocks == ()
    complete(plan)
    assert shown(setup.plan()) == [("a", 11, 1)]
    assert len(sequence.blocks) == 3  # 12 cached tokens; the 13th is only given out


def test_chunks_of_several_prompts_share_a_step() -> None:
    setup = Setup()
    for name, prompt in (("a", 3), ("b", 9), ("c", 2)):
        setup.add(name, prompt, max_tokens=2)
    plan = setup.plan()
    assert shown(plan) == [("a", 0, 3), ("b", 0, 5)]
    assert [row.sample for row in plan.rows] == [True, False]
    assert plan.num_tokens == 8
    complete(plan)
    assert shown(setup.plan()) == [("b", 5, 4), ("c", 0, 2)]


def test_a_step_processes_no_more_prompts_than_allowed() -> None:
    setup = Setup(max_prefill_seqs=2)
    for name in "abc":
        setup.add(name, prompt=1, max_tokens=2)
    plan = setup.plan()
    assert shown(plan) == [("a", 0, 1), ("b", 0, 1)]
    complete(plan)
    assert shown(setup.plan()) == [("c", 0, 1)]


def test_prompts_come_before_decode() -> None:
    setup = Setup()
    setup.add("a", prompt=2, max_tokens=5)
    complete(setup.plan())
    setup.add("b", prompt=2, max_tokens=5)
    assert shown(setup.plan()) == [("b", 0, 2)]


def test_all_running_sequences_decode_together() -> None:
    setup = Setup(max_prefill_seqs=3)
    for name in "abc":
        setup.add(name, prompt=2, max_tokens=5)
    complete(setup.plan())
    plan = setup.plan()
    assert shown(plan) == [("a", 2, 1), ("b", 2, 1), ("c", 2, 1)]
    assert plan.is_decode


def test_sequences_wait_for_a_row() -> None:
    setup = Setup(max_num_seqs=2, num_blocks=20)
    first, *_ = (setup.add(name, prompt=1, max_tokens=4) for name in "abc")
    setup.plan()
    assert [sequence.request_id for sequence in setup.scheduler.running] == ["a", "b"]
    setup.scheduler.finish(first)
    setup.plan()
    assert [sequence.request_id for sequence in setup.scheduler.running] == ["b", "c"]
    assert {sequence.row for sequence in setup.scheduler.running} == {0, 1}


def test_a_sequence_waits_until_all_blocks_that_it_may_need_are_there() -> None:
    setup = Setup(num_blocks=5)
    first = setup.add("a", prompt=1, max_tokens=12)  # 12 cached tokens: 3 blocks
    setup.add("b", prompt=1, max_tokens=12)
    setup.plan()
    assert [sequence.request_id for sequence in setup.scheduler.running] == ["a"]
    assert setup.blocks.num_held == 1  # promised are 3
    setup.scheduler.finish(first)
    assert shown(setup.plan()) == [("b", 0, 1)]


def test_nobody_overtakes_one_that_waits() -> None:
    setup = Setup(num_blocks=5)
    first = setup.add("a", prompt=1, max_tokens=12)
    setup.add("large", prompt=1, max_tokens=12)
    setup.add("small", prompt=1, max_tokens=1)
    setup.plan()
    assert [sequence.request_id for sequence in setup.scheduler.running] == ["a"]
    setup.scheduler.finish(first)
    setup.plan()
    names = [sequence.request_id for sequence in setup.scheduler.running]
    assert names == ["large", "small"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "needed"), [(1, 1, 1), (4, 1, 1), (5, 1, 2), (1, 4, 1), (1, 41, 11)]
)
def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers(
    prompt: int, max_tokens: int, needed: int
) -> None:
    setup = Setup(num_blocks=needed)
    setup.add("fits", prompt, max_tokens)
    if needed > 1:
        setup = Setup(num_blocks=needed - 1)
        message = (
            f"{prompt + max_tokens} tokens need {needed} kv_blocks of 4 tokens, "
            f"the memory holds {needed - 1}"
        )
        with pytest.raises(CapacityError, match=message):
            setup.add("refused", prompt, max_tokens)
        assert not setup.scheduler.waiting


def test_nothing_to_do_is_no_plan() -> None:
    assert Setup().scheduler.plan() is None


def test_finish_gives_blocks_and_row_back() -> None:
    setup = Setup()
    sequence = setup.add("a", prompt=7, max_tokens=2)
    setup.plan()
    held = list(sequence.blocks)
    assert len(held) == 2
    assert setup.scheduler.finish(sequence) == held
    assert (sequence.row, sequence.blocks, setup.blocks.num_held) == (None, [], 0)
    assert setup.pages.num_free == setup.pages.num_pages - 1
    setup.check()


def test_a_waiting_sequence_can_be_taken_out() -> None:
    setup = Setup(max_num_seqs=1)
    setup.add("a", prompt=1, max_tokens=1)
    waiting = setup.add("b", prompt=1, max_tokens=1)
    setup.plan()
    assert setup.scheduler.finish(waiting) == []
    assert not setup.scheduler.waiting
    setup.check()


@pytest.mark.parametrize(
    ("rows", "is_decode"),
    [([(0, 1), (5, 1)], True), ([(0, 2)], False), ([(0, 1), (0, 2)], False)],
    ids=["ones", "two", "one and two"],
)
def test_a_step_of_single_tokens_is_a_decode(rows: list[tuple[int, int]], is_decode: bool) -> None:
    plan = StepPlan(tuple(RowPlan(make_sequence("a", 9, 1), *row) for row in rows), ())
    assert plan.is_decode == is_decode


def test_targets_are_wanted_while_a_prompt_is_processed() -> None:
    params = SamplingParams(prompt_logprobs=0)
    scored, plain = make_sequence("a", 4, 2, params), make_sequence("b", 4, 2)
    plan = StepPlan((RowPlan(plain, 0, 4), RowPlan(scored, 0, 4)), ())
    assert plan.with_targets
    scored.num_cached = 4
    assert not plan.with_targets


def break_promise(setup: Setup) -> None:
    setup.scheduler._promised += 1


def break_block(setup: Setup) -> None:
    setup.scheduler.running[0].blocks.pop()


def break_waiting(setup: Setup) -> None:
    setup.scheduler.waiting.append(setup.scheduler.running.pop())
    setup.scheduler._promised = 0
    setup.blocks._held.clear()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (break_promise, "blocks promised"),
        (break_block, "1 blocks in use, 2 held"),
        (break_waiting, "a waiting sequence holds blocks"),
    ],
    ids=["promise", "block", "waiting"],
)
def test_a_broken_scheduler_is_found(break_it, message: str) -> None:  # type: ignore[no-untyped-def]
    setup = Setup()
    setup.add("a", prompt=7, max_tokens=2)
    setup.plan()
    setup.check()
    break_it(setup)
    with pytest.raises(AssertionError, match=message):
        setup.check()


# Any order of events.

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_PREFILL, MAX_TOKENS = 9, 4, 3, 2, 7


class Machine(stateful.RuleBasedStateMachine):
    """Requests come, run, end and are dropped, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.setup = Setup(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_SEQS,
            max_prefill_seqs=MAX_PREFILL,
            max_num_batched_tokens=MAX_TOKENS,
        )
        self.live: list[Sequence] = []
        """In the order in which they came."""

    @stateful.rule(prompt=st.integers(1, 40), max_tokens=st.integers(1, 20))
    def add(self, prompt: int, max_tokens: int) -> None:
        sequence = make_sequence(str(prompt), prompt, max_tokens)
        if prompt + max_tokens - 1 > NUM_BLOCKS * BLOCK_SIZE:
            with pytest.raises(CapacityError, match=f"the memory holds {NUM_BLOCKS}"):
                self.setup.scheduler.add(sequence)
        else:
            self.setup.scheduler.add(sequence)
            self.live.append(sequence)

    @stateful.rule(ends=st.sets(st.integers(0, MAX_SEQS - 1)))
    def step(self, ends: set[int]) -> None:
        """Plans and completes; of the sequences with a new token, those of `ends` stop there."""
        plan = self.setup.scheduler.plan()
        if plan is None:
            assert not self.live
            return
        self.check_plan(plan)
        for i, sequence in enumerate(complete(plan)):
            if i in ends or len(sequence.output_token_ids) == sequence.max_tokens:
                self.finish(sequence)

    def check_plan(self, plan: StepPlan) -> None:
        rows = [row.sequence for row in plan.rows]
        assert len(set(map(id, rows))) == len(rows) <= MAX_SEQS
        assert all(row.count > 0 and row.start == row.sequence.num_cached for row in plan.rows)
        if any(sequence.in_prefill for sequence in rows):
            assert all(sequence.in_prefill for sequence in rows)
            assert len(rows) <= MAX_PREFILL
            assert plan.num_tokens <= MAX_TOKENS
            # Chunks go to the first that came, and only the last is cut short.
            waiting = [sequence for sequence in self.running() if sequence.in_prefill]
            assert rows == waiting[: len(rows)]
            assert all(row.sample for row in plan.rows[:-1])
        else:
            assert rows == self.running()
            assert plan.is_decode
        assert all(
            row.start + row.count <= len(row.sequence.blocks) * BLOCK_SIZE for row in plan.rows
        )
        for sequence, index, block in plan.new_blocks:
            assert sequence.blocks[index] is block

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.live if sequence.row is not None]

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.live)))

    def finish(self, sequence: Sequence) -> None:
        held = list(sequence.blocks)
        assert self.setup.scheduler.finish(sequence) == held
        self.live.remove(sequence)

    @stateful.invariant()
    def nothing_is_lost(self) -> None:
        self.setup.check()

    @stateful.invariant()
    def first_come_first_served(self) -> None:
        running = len(self.running())
        assert running <= MAX_SEQS
        assert self.setup.scheduler.running == self.live[:running]
        assert list(self.setup.scheduler.waiting) == self.live[running:]

    @stateful.invariant()
    def rows_are_apart(self) -> None:
        rows = [sequence.row for sequence in self.running()]
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(range(MAX_SEQS))

    @stateful.invariant()
    def blocks_are_apart(self) -> None:
        pages = [page for s in self.live for block in s.blocks for page in block.pages]
        assert len(set(pages)) == len(pages)
        assert 0 not in pages

    def teardown(self) -> None:
        """Everything that is left ends, and all blocks come back."""
        steps = 0
        while self.live:
            self.step(set())
            steps += 1
            assert steps < 10_000
        assert self.setup.blocks.num_held == 0
        assert self.setup.pages.num_free == self.setup.pages.num_pages - 1
        self.setup.check()


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = hypothesis.settings(deadline=None, max_examples=60, stateful_step_count=40)
