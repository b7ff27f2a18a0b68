"""Which sequences run: examples by hand, with one kind of KV that sees everything."""

from collections.abc import Callable, Sequence

import pytest

from moejax.arena.kinds import KvKind
from moejax.errors import CapacityError
from moejax_serving.kv_blocks import BlockPool
from moejax_serving.pages import PagePool
from moejax_serving.scheduler import Scheduler
from serving.scheduling import Setup, entries, held, make_kind, make_pool

# Steps by hand.


def test_a_prompt_is_cut_into_chunks_and_then_decoded() -> None:
    setup = Setup()
    sequence = setup.add("a", prompt=10, max_tokens=3)
    plan = setup.step()
    assert setup.shown(plan) == [("a", 0, 8)]
    assert not plan.rows[0].sample and plan.rows[0].starts_row
    assert entries(plan, sequence) == [0, 1]
    assert len(plan.prefill) == 1 and plan.decode == ()
    plan = setup.step()
    assert setup.shown(plan) == [("a", 8, 2)]
    assert plan.rows[0].sample  # the last prompt token chooses the first of the output
    assert not plan.rows[0].starts_row
    assert entries(plan, sequence) == [2]
    plan = setup.step()
    assert setup.shown(plan) == [("a", 10, 1)]
    assert plan.new_blocks == () and plan.prefill == ()
    assert setup.shown(setup.plan()) == [("a", 11, 1)]
    assert len(held(sequence)) == 3  # 12 cached tokens; the 13th is only given out


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
    message = "^14 tokens need 8 pages of KV, the memory holds 6$"
    with pytest.raises(CapacityError, match=message):
        setup.add("a", prompt=10, max_tokens=4)
    setup.add("b", prompt=10, max_tokens=3)  # its last token is not cached
    setup.run()


def test_a_prompt_is_admitted_when_all_of_it_fits() -> None:
    """The second one would fit by its first chunk, and then push the first one out."""
    setup = Setup(num_blocks=5, block_size=4, has_cache=False)
    setup.add("a", prompt=8, max_tokens=2)
    setup.add("b", prompt=12, max_tokens=2)
    assert setup.shown(setup.step()) == [("a", 0, 8)]
    assert setup.shown(setup.step()) == [("a", 8, 1)]
    assert setup.shown(setup.step()) == [("b", 0, 8)]
    assert setup.scheduler.counts.preemptions == 0


@pytest.mark.parametrize(
    ("max_tokens", "num_blocks", "fits"), [(2, 3, False), (2, 4, True), (1, 3, True)]
)
def test_room_is_left_for_what_those_that_run_are_still_to_take(
    max_tokens: int, num_blocks: int, fits: bool
) -> None:
    """One block for the second token of a, if there is one, and one more that a may need later."""
    setup = Setup(num_blocks=num_blocks, block_size=4, has_cache=False)
    setup.add("a", prompt=4, max_tokens=max_tokens)
    setup.add("b", prompt=4, max_tokens=1)
    assert setup.shown(setup.step()) == [("a", 0, 4)] + [("b", 0, 4)] * fits


# Preemption.


def test_where_blocks_run_out_the_youngest_gives_its_own_back() -> None:
    setup = Setup(num_blocks=5, block_size=2, max_num_batched_tokens=8, has_cache=False)
    a = setup.add("a", prompt=3, max_tokens=5)
    b = setup.add("b", prompt=3, max_tokens=5)
    assert setup.shown(setup.step()) == [("a", 0, 3), ("b", 0, 3)]
    assert setup.shown(setup.step()) == [("a", 3, 1), ("b", 3, 1)]
    assert setup.shown(setup.step()) == [("a", 4, 1)]  # takes the last block; b has none
    assert setup.scheduler.counts.preemptions == 1
    assert (b.row, held(b), b.num_cached, len(b.output_token_ids)) == (None, [], 0, 2)
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
    assert held(b)[:2] == held(a)[:2] and held(b)[2] is not held(a)[2]
    assert [block.users for block in held(b)] == [2, 2, 1]
    # The table of b's row is told of the shared blocks; their pages it knows.
    assert entries(plan, b) == [0, 1, 2]
    assert plan.new_blocks == (held(b)[2],)
    counts = setup.scheduler.counts
    assert (counts.prefix_queries, counts.prefix_hits) == (20, 8)


def test_blocks_that_others_use_take_no_room() -> None:
    """b needs one block, and one is to be left for a."""
    for num_blocks, fits in ((4, False), (5, True)):
        setup = Setup(num_blocks=num_blocks, max_num_batched_tokens=32)
        setup.add("a", list(range(9)), max_tokens=3)
        setup.step()
        assert setup.blocks.num_used == 3
        setup.add("b", [*range(8), 99], max_tokens=1)
        assert setup.shown(setup.step()) == [("a", 9, 1)] + [("b", 8, 1)] * fits


def test_prompts_of_one_step_share_too() -> None:
    setup = Setup(max_num_batched_tokens=32, max_num_seqs=3, max_prefill_seqs=3)
    sequences = [setup.add(name, list(range(9)), max_tokens=2) for name in "abc"]
    plan = setup.step()
    # One token is left of each: such rows are decodes.
    assert setup.shown(plan) == [("a", 0, 9), ("b", 8, 1), ("c", 8, 1)]
    assert [held(s)[:2] == held(sequences[0])[:2] for s in sequences] == [True] * 3


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


def test_what_a_broken_sequence_cached_is_not_offered_by_those_who_share_it() -> None:
    setup = Setup(max_num_batched_tokens=32)
    a = setup.add("a", list(range(9)), max_tokens=9)
    b = setup.add("b", list(range(9)), max_tokens=9)
    setup.step()
    assert b.num_hits == 8
    setup.scheduler.finish(a, is_broken=True)
    for _ in range(4):
        setup.step()
    assert [block.key is not None for block in held(b)] == [False, False, True, False]
    c = setup.add("c", list(range(9)), max_tokens=1)
    setup.step()
    assert c.num_hits == 0


def test_a_broken_sequence_that_waits_has_cached_something_too() -> None:
    """It was preempted before the token came that shows that it is broken."""
    setup = Setup(num_blocks=5, block_size=2)
    a = setup.add("a", prompt=3, max_tokens=5)
    b = setup.add("b", [501, 502, 503], max_tokens=5)
    plan = setup.plan()
    setup.plan()
    assert setup.shown(setup.plan()) == [("a", 4, 1)]
    assert b.row is None and setup.blocks.num_idle == 1
    setup.scheduler.finish(b, is_broken=True)
    assert setup.blocks.num_idle == 0
    setup.land(plan)
    setup.scheduler.finish(a)
    c = setup.add("c", [501, 502, 503], max_tokens=1)
    setup.step()
    assert c.num_hits == 0


@pytest.mark.parametrize(
    ("max_row_edits", "fits"),
    [((5, 10), True), ((4, 10), False), ((5, 9), False), ((100, 9), False), ((4, 100), False)],
)
def test_a_sequence_whose_table_does_not_fit_the_step_waits_for_the_next(
    max_row_edits: tuple[int, int], fits: bool
) -> None:
    """a brings 3 blocks of one kind and 6 of the other, b 2 and 4."""
    setup = Setup(
        make_kind(block_size=4),
        make_kind(block_size=2, window=30),
        num_pages=60,
        max_row_edits=max_row_edits,
        max_num_batched_tokens=32,
    )
    setup.add("a", prompt=12, max_tokens=2)
    setup.add("b", prompt=8, max_tokens=2)
    assert setup.shown(setup.step()) == [("a", 0, 12)] + [("b", 0, 8)] * fits
    if not fits:
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


# Numbers that do not fit together.


def test_a_kind_has_a_number_for_every_block_that_the_pages_make() -> None:
    pages = PagePool(7)
    kinds = [make_kind(layers=2)]
    blocks = BlockPool(pages, kinds, [3])
    with pytest.raises(ValueError, match="kind 0: 3 numbers are too few for 6 pages"):
        make_scheduler(blocks, kinds, [9])


def test_each_kind_has_a_limit_of_its_row_edits() -> None:
    kinds = [make_kind(), make_kind()]
    with pytest.raises(ValueError, match="1 numbers of row edits for 2 kinds"):
        make_scheduler(make_pool(PagePool(7), kinds), kinds, [9])


def make_scheduler(
    blocks: BlockPool, kinds: Sequence[KvKind], max_row_edits: Sequence[int]
) -> Scheduler:
    return Scheduler(
        blocks,
        kinds=kinds,
        num_pages=6,
        max_num_seqs=1,
        max_prefill_seqs=1,
        max_num_batched_tokens=8,
        max_row_edits=max_row_edits,
    )


# Broken books.


def break_users(setup: Setup) -> None:
    held(setup.scheduler.running[0])[0].users += 1


def break_held(setup: Setup) -> None:
    held(setup.scheduler.running[0]).pop()


def break_rows(setup: Setup) -> None:
    setup.scheduler.running[0].row = setup.scheduler.running[1].row


def break_order(setup: Setup) -> None:
    setup.scheduler.running.reverse()


def break_waiting(setup: Setup) -> None:
    setup.scheduler.waiting[0].kv[0].first = 1


def break_cached(setup: Setup) -> None:
    setup.scheduler.running[0].num_cached += 4


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (break_users, "a kv_block has other users than the sequences that run"),
        (break_held, "3 blocks in use, 4 held"),
        (break_rows, r"rows \[1, 1\] run"),
        (break_order, "sequences do not run in the order of their arrival"),
        (break_waiting, "a waiting sequence holds something"),
        (break_cached, "kind 0: 2 blocks for 9 tokens"),
    ],
)
def test_broken_books_are_found(break_it: Callable[[Setup], None], message: str) -> None:
    setup = Setup(max_num_batched_tokens=32)
    for name in "abc":
        setup.add(name, prompt=5, max_tokens=2)
    setup.plan()
    break_it(setup)
    with pytest.raises(AssertionError, match=message):
        setup.scheduler.check()
