"""What sequences find in the prefix cache where KV is of several kinds, with windows and chunks."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moejax.arena.kinds import KvKind
from moejax_serving.kv_blocks import KvBlock
from moejax_serving.sequence import Sequence
from serving.scheduling import KIND_SIZES, Setup, entries, held, indices, make_kind, sees

FULL = make_kind(layers=1, block_size=4)


def fill(setup: Setup, num_tokens: int, **options: bool) -> list[list[KvBlock]]:
    """Computes all of a prompt; then its blocks are idle. By kind, in the order of its tokens."""
    sequence = setup.add(
        "first", list(range(num_tokens)), max_tokens=1, wants_prompt_logprobs=True, **options
    )
    setup.run()
    return [setup.blocks.find(kv.keys) for kv in sequence.kv]


def start(setup: Setup, num_tokens: int, **options: bool) -> tuple[Sequence, list[list[int]]]:
    """Begins with the same prompt: the entries that the first step brings, by kind."""
    sequence = setup.add("next", list(range(num_tokens)), max_tokens=2, **options)
    plan = setup.plan()
    return sequence, [entries(plan, sequence, number) for number in range(len(setup.kinds))]


def hits(setup: Setup, num_tokens: int, **options: bool) -> int | None:
    return start(setup, num_tokens, **options)[0].num_hits


# The last window.


def test_a_hit_needs_the_blocks_of_the_last_window_only() -> None:
    """Token 12 sees 9 and those after it."""
    setup = Setup(make_kind(window=4, block_size=2), max_num_batched_tokens=32)
    (blocks,) = fill(setup, 13)
    assert len(blocks) == 6
    setup.blocks.forget(blocks[:4])
    sequence, changed = start(setup, 13)
    assert sequence.num_hits == 12
    assert changed == [[4, 5, 6]]
    assert indices(sequence) == [4, 5, 6] and held(sequence)[:2] == blocks[4:]
    assert [block.users for block in held(sequence)] == [1, 1, 1]
    counts = setup.scheduler.counts
    assert (counts.prefix_queries, counts.prefix_hits) == (26, 12)


@pytest.mark.parametrize(
    ("gone", "wanted"),
    [
        ([], 12),
        ([3], 12),
        ([4], 8),
        ([5], 10),
        ([1, 4], 8),
        ([2, 4], 4),
        ([0, 2, 4], 0),
        ([3, 5], 6),
    ],
)
def test_a_hit_is_shorter_where_a_block_of_its_window_was_evicted(
    gone: list[int], wanted: int
) -> None:
    """Tokens 12, 10, 8, 6, 4 and 2 see blocks from the fifth, fourth … first on, two each."""
    setup = Setup(make_kind(window=4, block_size=2), max_num_batched_tokens=32)
    (blocks,) = fill(setup, 13)
    setup.blocks.forget([blocks[index] for index in gone])
    sequence, changed = start(setup, 13)
    assert sequence.num_hits == wanted
    assert changed == [[*range(max(0, wanted - 3) // 2, 7)]]


@pytest.mark.parametrize(
    ("window", "gone", "wanted"), [(5, 0, 8), (5, 1, 4), (6, 0, 0), (6, 1, 4), (1, 1, 8)]
)
def test_a_window_that_begins_with_a_block_needs_none_before(
    window: int, gone: int, wanted: int
) -> None:
    """Token 8 sees the four before it, or five."""
    setup = Setup(make_kind(window=window), max_num_batched_tokens=32)
    (blocks,) = fill(setup, 9)
    assert len(blocks) == 2
    setup.blocks.forget([blocks[gone]])
    assert hits(setup, 9) == wanted


@pytest.mark.parametrize(("chunk", "length"), [(8, 8), (8, 16), (6, 12), (4, 12)])
def test_at_the_end_of_a_chunk_nothing_before_is_needed(chunk: int, length: int) -> None:
    setup = Setup(FULL, make_kind(chunk=chunk), num_pages=60, max_num_batched_tokens=32)
    setup.blocks.forget(fill(setup, length + 1)[1])
    sequence, changed = start(setup, length + 1)
    assert sequence.num_hits == length
    assert changed == [[*range(length // 4 + 1)], [length // 4]]


def test_within_a_chunk_its_tokens_are_needed() -> None:
    """Token 12 is in the chunk from 8 to 15, token 8 begins it."""
    setup = Setup(FULL, make_kind(chunk=8), num_pages=60, max_num_batched_tokens=32)
    blocks = fill(setup, 13)[1]
    setup.blocks.forget(blocks[2:])
    sequence, changed = start(setup, 13)
    assert sequence.num_hits == 8
    assert changed == [[0, 1, 2, 3], [2, 3]]


def test_where_no_token_sees_another_nothing_is_needed() -> None:
    setup = Setup(make_kind(window=1), make_kind(window=1, block_size=2))
    sequence, changed = start(setup, 14)
    assert sequence.num_hits == 12
    assert changed == [[3], [6]]


def test_a_prompt_that_fills_its_blocks_is_computed_from_the_last_one_on() -> None:
    setup = Setup(FULL, make_kind(window=5), num_pages=60, max_num_batched_tokens=32)
    fill(setup, 12)
    sequence, changed = start(setup, 12)
    assert sequence.num_hits == 8
    assert changed == [[0, 1, 2], [1, 2]]


# Several kinds.


def test_blocks_of_all_kinds_end_where_a_hit_ends() -> None:
    """Blocks of 4 and of 6 tokens: prefixes of 12."""
    kinds = FULL, make_kind(block_size=6), make_kind(block_size=6, window=2)
    for num_tokens, wanted in ((11, 0), (12, 0), (13, 12), (24, 12), (25, 24), (30, 24)):
        setup = Setup(*kinds, num_pages=100, max_num_batched_tokens=32)
        fill(setup, 30)
        sequence, changed = start(setup, num_tokens)
        assert sequence.num_hits == wanted
        new = [range(wanted // 4, -(-num_tokens // 4)), range(wanted // 6, -(-num_tokens // 6))]
        last = [wanted // 6 - 1] if wanted else []
        assert changed[0] == [*range(wanted // 4), *new[0]]
        assert changed[1] == [*range(wanted // 6), *new[1]]
        assert changed[2] == [*last, *new[1]]


@pytest.mark.parametrize(
    ("number", "index", "wanted"),
    [(0, 0, 0), (0, 3, 12), (1, 0, 0), (1, 2, 8), (2, 0, 16), (2, 3, 16)],
)
def test_all_kinds_that_see_everything_need_all_blocks(
    number: int, index: int, wanted: int
) -> None:
    setup = Setup(
        FULL,
        make_kind(layers=1),
        make_kind(layers=1, window=1),
        num_pages=100,
        max_num_batched_tokens=32,
    )
    blocks = fill(setup, 17)
    setup.blocks.forget([blocks[number][index]])
    assert hits(setup, 17) == wanted


def test_equal_tokens_of_other_kinds_are_other_blocks() -> None:
    """Kinds of the same sizes."""
    setup = Setup(FULL, make_kind(layers=1, window=100), num_pages=60)
    blocks = fill(setup, 8)
    assert [[block.kind for block in part] for part in blocks] == [[0, 0], [1, 1]]
    sequence, _ = start(setup, 9)
    assert [held(sequence, number)[:2] for number in range(2)] == blocks


def test_a_block_of_any_kind_is_evicted_for_one_of_another_and_shortens_the_hit() -> None:
    """The window's blocks were given back before those of the other kind were left."""
    setup = Setup(FULL, make_kind(layers=1, window=3), num_pages=8, max_num_batched_tokens=4)
    blocks = fill(setup, 16)
    assert setup.blocks.num_idle == 8
    setup.add("other", prompt=5, max_tokens=1)
    setup.run()  # four pages
    assert [[block.key is not None for block in part] for part in blocks] == [
        [True, True, False, False],
        [False, False, True, True],
    ]
    assert hits(setup, 16) == 0


# Classes of rotary factors.


def test_sequences_with_other_rotary_factors_share_nothing() -> None:
    setup = Setup(num_blocks=20)
    fill(setup, 9, uses_long_rope=True)
    assert hits(setup, 9) == 0
    assert hits(setup, 9, uses_long_rope=True) == 8
    assert hits(setup, 9) == 8


# Broken sequences.


def test_what_a_broken_sequence_has_given_back_is_forgotten() -> None:
    kinds = make_kind(window=5, block_size=4), make_kind(window=4, block_size=2)
    setup = Setup(*kinds, num_pages=60)
    broken = setup.add("a", list(range(17)), max_tokens=9)
    setup.step(), setup.step()
    plan = setup.plan()
    assert [indices(broken, number)[0] for number in range(2)] == [3, 6]
    assert setup.blocks.num_idle == 3 + 6
    setup.scheduler.finish(broken, is_broken=True)
    setup.land(plan)
    assert setup.pages.num_free == setup.num_pages
    assert hits(setup, 17) == 0


def test_what_others_have_cached_stays_where_a_sequence_breaks() -> None:
    setup = Setup(FULL, make_kind(window=4, block_size=2), num_pages=100)
    fill(setup, 9)
    broken = setup.add("a", [*range(100, 109)], max_tokens=9)
    setup.step()
    setup.scheduler.finish(broken, is_broken=True)
    assert hits(setup, 9) == 8


# Room.


def test_idle_hits_are_not_room_for_the_rest_of_a_prompt() -> None:
    """a holds 3 + 2 * 2 pages when b comes. b needs 3 + 2 * 3, of which 1 + 2 are there but idle,
    and a block of each kind more is left for a: 7 + 9 + 3."""
    kinds = FULL, make_kind(window=5)
    for num_pages, fits in ((18, False), (19, True)):
        setup = Setup(*kinds, num_pages=num_pages, max_num_batched_tokens=12)
        fill(setup, 5)
        assert setup.blocks.num_idle == 2
        setup.add("a", prompt=8, max_tokens=3)
        setup.step()
        assert setup.blocks.num_used_pages == 2 + 2 * 2
        b = setup.add("b", list(range(10)), max_tokens=2)
        setup.step()
        assert (b.row is not None) == fits
        assert setup.scheduler.counts.preemptions == 0


# Any blocks.


@given(
    st.lists(KIND_SIZES, min_size=1, max_size=3),
    st.integers(2, 30),
    st.lists(st.booleans(), min_size=60, max_size=60),
    st.integers(1, 40),
)
@example([{"window": 3, "block_size": 2}, {"window": 5, "block_size": 3}], 30, [True] * 60, 40)
def test_a_hit_is_the_longest_for_which_all_that_is_seen_is_there(
    sizes: list[dict[str, int]], num_tokens: int, are_kept: list[bool], budget: int
) -> None:
    """Each block that was cached is kept or not."""
    kinds = [make_kind(**size) for size in sizes]
    setup = Setup(*kinds, num_pages=800, max_num_batched_tokens=budget)
    blocks = fill(setup, num_tokens)
    kept = iter(are_kept)
    gone = [block for part in blocks for block in part if not next(kept, True)]
    setup.blocks.forget(gone)

    def needed(kind: KvKind, length: int) -> set[int]:
        """Blocks of a kind that the token at `length` sees, without its own."""
        return {p // kind.block_size for p in range(length) if sees(kind, length, p)}

    def is_there(length: int) -> bool:
        return all(
            length % kind.block_size == 0
            and all(blocks[number][index] not in gone for index in needed(kind, length))
            for number, kind in enumerate(kinds)
        )

    wanted = max(length for length in range(num_tokens) if is_there(length))
    sequence, changed = start(setup, num_tokens)
    assert sequence.num_hits == wanted
    assert wanted % math.lcm(*(kind.block_size for kind in kinds)) == 0
    for number, kind in enumerate(kinds):
        shared = sorted(needed(kind, wanted))
        assert changed[number][: len(shared)] == shared
        assert held(sequence, number)[: len(shared)] == [blocks[number][i] for i in shared]
        # The first step brings the rest, as far as it goes.
        end = kind.blocks_for(min(num_tokens, wanted + budget))
        assert changed[number][len(shared) :] == [*range(wanted // kind.block_size, end)]
