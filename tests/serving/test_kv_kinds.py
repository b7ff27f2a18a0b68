"""Kinds of KV with windows and chunks: what sequences hold, and when they give it back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.arena.kinds import KvKind
from moejax.errors import CapacityError
from serving.scheduling import KIND_SIZES, Setup, entries, held, indices, make_kind, sees

FULL = make_kind(layers=1, block_size=4)
SIZES = st.lists(KIND_SIZES, min_size=1, max_size=3)


# One token after the other.


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (make_kind(window=1), {3: [0], 4: [1], 5: [1], 7: [1], 8: [2]}),
        (make_kind(window=2), {3: [0], 4: [0, 1], 5: [1], 7: [1], 8: [1, 2], 9: [2]}),
        (make_kind(window=4), {4: [0, 1], 6: [0, 1], 7: [1], 8: [1, 2], 10: [1, 2], 11: [2]}),
        (make_kind(window=5), {4: [0, 1], 7: [0, 1], 8: [1, 2], 11: [1, 2], 12: [2, 3]}),
        (make_kind(window=6), {8: [0, 1, 2], 9: [1, 2], 12: [1, 2, 3], 13: [2, 3]}),
        (make_kind(window=3, block_size=1), {1: [0, 1], 2: [0, 1, 2], 3: [1, 2, 3]}),
        (make_kind(window=1, block_size=1), {1: [1], 2: [2], 3: [3]}),
        (make_kind(chunk=4), {3: [0], 4: [1], 7: [1], 8: [2]}),
        (make_kind(chunk=8), {4: [0, 1], 7: [0, 1], 8: [2], 12: [2, 3]}),
        (make_kind(chunk=6), {5: [0, 1], 6: [1], 8: [1, 2], 11: [1, 2], 12: [3]}),
        (make_kind(chunk=3), {3: [0], 4: [0, 1], 5: [0, 1], 6: [1], 8: [1, 2], 9: [2]}),
        (make_kind(chunk=1), {3: [0], 4: [1], 5: [1], 8: [2]}),
        (make_kind(window=100), {0: [0], 4: [0, 1], 13: [0, 1, 2, 3]}),
        (make_kind(), {0: [0], 4: [0, 1], 13: [0, 1, 2, 3]}),
    ],
)
def test_blocks_that_are_held_while_a_token_is_computed(
    kind: KvKind, wanted: dict[int, list[int]]
) -> None:
    """The block that leaves does so in the step whose token does not see it, no sooner or later."""
    setup = Setup(kind)
    sequence = setup.add("a", prompt=1, max_tokens=14)
    found = {}
    while not sequence.is_finished:
        plan = setup.plan()
        found[plan.rows[0].start] = indices(sequence)
        setup.land(plan)
    assert {start: found[start] for start in wanted} == wanted


@given(SIZES, st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_a_step_holds_exactly_what_its_tokens_see_and_themselves(
    sizes: list[dict[str, int]], prompt: int, max_tokens: int, budget: int
) -> None:
    kinds = [make_kind(**size) for size in sizes]
    setup = Setup(*kinds, num_pages=300, max_num_batched_tokens=budget)
    sequence = setup.add("a", prompt, max_tokens)
    while not sequence.is_finished:
        plan = setup.plan()
        (row,) = plan.rows
        queries = range(row.start, row.start + row.count)
        for number, kind in enumerate(kinds):
            seen = [p for q in queries for p in range(q + 1) if sees(kind, q, p)]
            blocks = sorted({position // kind.block_size for position in seen})
            assert indices(sequence, number) == blocks
            new = sorted({q // kind.block_size for q in queries if q % kind.block_size == 0})
            assert entries(plan, sequence, number) == new
        setup.land(plan)


# Pages.


def test_blocks_that_have_left_the_window_are_free_for_others() -> None:
    setup = Setup(make_kind(window=4, block_size=2), num_blocks=12, has_cache=False)
    sequence = setup.add("a", prompt=20, max_tokens=2)
    found = []
    for _ in range(4):
        plan = setup.plan()
        found.append((setup.shown(plan)[0][1:], indices(sequence), setup.blocks.num_used_pages))
        setup.land(plan)
    assert found == [
        ((0, 8), [0, 1, 2, 3], 8),
        ((8, 8), [2, 3, 4, 5, 6, 7], 12),  # token 8 sees 5 and those after it
        ((16, 4), [6, 7, 8, 9], 8),
        ((20, 1), [8, 9, 10], 6),
    ]
    assert setup.scheduler.kv_usage == 0


def test_blocks_that_have_left_the_window_stay_in_the_cache_until_they_are_needed() -> None:
    setup = Setup(make_kind(window=4, block_size=2), num_blocks=8)
    setup.add("a", prompt=16, max_tokens=2)
    setup.step()
    plan = setup.plan()
    assert (setup.blocks.num_used, setup.blocks.num_idle) == (6, 2)
    setup.land(plan)
    assert (setup.blocks.num_used, setup.blocks.num_idle) == (6, 2)
    plan = setup.plan()  # tokens 13 to 16: two idle blocks are dropped for a new one, and no more
    assert (setup.blocks.num_used, setup.blocks.num_idle) == (3, 5)


def test_a_step_may_take_what_the_same_step_gives_back() -> None:
    """A window of two blocks in a cache of three: the third is there for the next one."""
    setup = Setup(make_kind(window=5), num_blocks=3, max_num_batched_tokens=1)
    sequence = setup.add("a", prompt=1, max_tokens=50)
    pages = set()
    while not sequence.is_finished:
        plan = setup.step()
        pages |= {page for block in plan.new_blocks for page in block.pages}
    assert setup.scheduler.counts.preemptions == 0
    assert pages == set(range(1, 7))


def test_kinds_give_back_by_themselves() -> None:
    kinds = FULL, make_kind(layers=2, block_size=2, window=3), make_kind(layers=1, chunk=8)
    setup = Setup(*kinds, num_pages=40)
    sequence = setup.add("a", prompt=11, max_tokens=6)
    setup.step(), setup.step(), setup.step()
    assert setup.shown(setup.plan()) == [("a", 12, 1)]
    assert [indices(sequence, number) for number in range(3)] == [[0, 1, 2, 3], [5, 6], [2, 3]]
    assert setup.blocks.num_used_pages == 4 + 2 * 2 + 2
    assert setup.scheduler.kv_usage == 10 / 40
    assert [{block.kind for block in held(sequence, n)} for n in range(3)] == [{0}, {1}, {2}]


def test_a_plan_shows_blocks_by_kind_and_those_of_all() -> None:
    setup = Setup(FULL, make_kind(layers=2, block_size=2, window=3), num_pages=40)
    sequence = setup.add("a", prompt=3, max_tokens=6)
    plan = setup.plan()
    first, second = plan.kinds
    assert first.new_blocks == tuple(held(sequence)) and len(first.new_blocks) == 1
    assert second.new_blocks == tuple(held(sequence, 1)) and len(second.new_blocks) == 2
    assert plan.new_blocks == first.new_blocks + second.new_blocks
    assert second.row_blocks == tuple((sequence, i, held(sequence, 1)[i]) for i in range(2))


# What fits.


def test_what_can_never_fit_is_refused_with_the_pages_of_all_kinds() -> None:
    """20 tokens: 5 blocks of 1 page; and 3 before and 8 in a step, in 6 blocks of 2 pages."""
    kinds = FULL, make_kind(layers=2, block_size=2, window=4)
    setup = Setup(*kinds, num_pages=16)
    with pytest.raises(CapacityError, match="^21 tokens need 17 pages of KV, .* holds 16$"):
        setup.add("a", prompt=10, max_tokens=11)
    setup.add("b", prompt=10, max_tokens=7)
    setup.run()


@given(SIZES, st.integers(1, 12), st.integers(1, 12), st.integers(1, 9), st.booleans())
def test_a_sequence_that_alone_fits_is_never_preempted(
    sizes: list[dict[str, int]], prompt: int, max_tokens: int, budget: int, has_cache: bool
) -> None:
    """Nor are those that come after it, to a cache that is full. One page less is refused."""
    kinds = [make_kind(**size) for size in sizes]
    num_pages = sum(
        kind.pages_per_block * kind.most_blocks(prompt + max_tokens - 1, budget) for kind in kinds
    )
    options = {"max_num_batched_tokens": budget, "has_cache": has_cache}
    setup = Setup(*kinds, num_pages=num_pages, **options)
    for ids in (list(range(prompt)), list(range(50, 50 + prompt)), list(range(prompt))):
        setup.add("a", ids, max_tokens)
        setup.run()
    assert setup.scheduler.counts.preemptions == 0
    assert setup.blocks.num_used == 0
    with pytest.raises(CapacityError, match=f"need {num_pages} pages of KV, .* {num_pages - 1}$"):
        Setup(*kinds, num_pages=num_pages - 1, **options).add("a", prompt, max_tokens)


def test_a_prompt_is_admitted_when_all_of_it_fits_in_all_kinds() -> None:
    """a holds 3 + 2 * 3 pages. b needs as many, and a block of each kind is left for a: 12 more,
    though its first step would take 2 + 2 * 2."""
    kinds = FULL, make_kind(layers=2, window=6)
    for num_pages, fits in ((20, False), (21, True)):
        setup = Setup(*kinds, num_pages=num_pages, max_num_batched_tokens=8, has_cache=False)
        setup.add("a", prompt=8, max_tokens=4)
        setup.add("b", prompt=12, max_tokens=2)
        setup.step()
        assert setup.shown(setup.step()) == [("b", 0, 8)] * fits + [("a", 8, 1)]
        setup.run()
        assert setup.scheduler.counts.preemptions == 0


# Preemption.


def test_what_one_sequence_gives_back_serves_an_older_one_first() -> None:
    """Both give back in the step in which the older one grows: nobody is preempted."""
    kinds = make_kind(layers=1, block_size=2), make_kind(layers=1, block_size=2, window=2)
    setup = Setup(*kinds, num_pages=11, has_cache=False)
    setup.add("a", prompt=2, max_tokens=6)
    b = setup.add("b", prompt=3, max_tokens=6)
    for _ in range(5):
        setup.step()
    assert setup.blocks.num_used_pages == 3 + 1 + 4 + 2 == setup.num_pages - 1
    plan = setup.plan()
    # a has taken two blocks, of which one was b's.
    assert setup.shown(plan) == [("a", 6, 1), ("b", 7, 1)]
    assert setup.blocks.num_used_pages == 4 + 2 + 4 + 1 == setup.num_pages
    assert b.kv[1].first == 3
    setup.land(plan)
    assert setup.scheduler.counts.preemptions == 0


def test_a_sequence_is_preempted_after_blocks_have_left_and_begins_anew() -> None:
    kinds = FULL, make_kind(layers=1, window=4)
    setup = Setup(*kinds, num_pages=10, max_num_seqs=2, has_cache=False)
    a = setup.add("a", prompt=4, max_tokens=17)
    b = setup.add("b", prompt=4, max_tokens=13)
    for _ in range(9):
        setup.step()
    assert (indices(b), indices(b, 1)) == ([0, 1, 2], [2])
    assert setup.shown(setup.step()) == [("a", 12, 1)]
    assert [(kv.first, kv.blocks, kv.num_registered) for kv in b.kv] == [(0, [], 0)] * 2
    while not a.is_finished:
        setup.step()
    plan = setup.step()
    assert setup.shown(plan) == [("b", 0, 8)] and plan.rows[0].starts_row
    assert [entries(plan, b, number) for number in range(2)] == [[0, 1], [0, 1]]
    plan = setup.step()
    assert setup.shown(plan) == [("b", 8, 5)]
    assert [entries(plan, b, number) for number in range(2)] == [[2, 3], [2, 3]]
    assert (indices(b), indices(b, 1)) == ([0, 1, 2, 3], [1, 2, 3])
    setup.run()
    assert len(b.output_token_ids) == 13


# Ahead of the results.


def test_a_block_may_leave_before_its_tokens_are_known_and_is_not_kept() -> None:
    setup = Setup(make_kind(layers=1, window=2, block_size=1))
    sequence = setup.add("a", prompt=2, max_tokens=5)
    plans = [setup.plan() for _ in range(4)]
    assert [entries(plan, sequence) for plan in plans] == [[0, 1], [2], [3], [4]]
    assert indices(sequence) == [3, 4]
    # Those of the prompt are in the cache, the first token of the output is not.
    assert (setup.blocks.num_used, setup.blocks.num_idle) == (2, 2)
    for plan in plans:
        setup.land(plan)
    assert [block.key for block in held(sequence)] == sequence.kv[0].keys[3:]
    assert len(sequence.kv[0].keys) == 5
    setup.run()
    assert (setup.blocks.num_used, setup.blocks.num_idle) == (0, 5)


def test_blocks_that_are_held_are_registered_when_their_tokens_come() -> None:
    setup = Setup(make_kind(layers=1, window=6, block_size=2))
    sequence = setup.add("a", prompt=3, max_tokens=5)
    plans = [setup.plan() for _ in range(3)]
    assert [block.key is not None for block in held(sequence)] == [True, False, False]
    setup.land(plans[0])
    assert [block.key is not None for block in held(sequence)] == [True, True, False]
