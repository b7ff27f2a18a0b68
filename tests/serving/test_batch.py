"""Buckets, and what the device is told of a plan."""

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from moejax.arena.control import KvEdits, KvLayout, RowControl
from moejax.arena.kinds import KvKind
from moejax_serving.batch import (
    Buckets,
    make_buckets,
    make_control,
    places,
    wants_logprobs,
    wants_targets,
)
from moejax_serving.kv_blocks import KvBlock
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.scheduler import KvPlan, RowPlan, StepPlan
from moejax_serving.sequence import Sequence
from serving.scheduling import make_kind

KIND = make_kind(layers=2, block_size=16)
GREEDY = SamplingParams(temperature=0.0)


def make_sequence(prompt: list[int], row: int | None = 0, **fields: Any) -> Sequence:
    defaults = {"number": 0, "max_tokens": 5, "seed": 0, "params": GREEDY}
    return Sequence(prompt_token_ids=prompt, row=row, **(defaults | fields))


def make_plan(
    prefill: SequenceOf[RowPlan] = (),
    decode: SequenceOf[RowPlan] = (),
    kinds: SequenceOf[KvPlan] = (KvPlan(),),
) -> StepPlan:
    return StepPlan(tuple(prefill), tuple(decode), tuple(kinds))


def chunk(sequence: Sequence, start: int, count: int, *, sample: bool = False) -> RowPlan:
    return RowPlan(sequence, start, count, sample)


def token_of(sequence: Sequence, position: int) -> RowPlan:
    return RowPlan(sequence, position, 1, sample=True)


def rows_of(prefill: SequenceOf[int] = (), decode: int = 0) -> StepPlan:
    """A plan of prompt chunks of these sizes, and of as many single tokens."""
    chunks = [chunk(make_sequence([1] * (n + 1), i), 0, n) for i, n in enumerate(prefill)]
    first = len(chunks)
    return make_plan(
        chunks, [token_of(make_sequence([1] * 9, first + i), 8) for i in range(decode)]
    )


def buckets_of(*kinds: KvKind, **changes: int) -> Buckets:
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 1600}
    return make_buckets(kinds=kinds or (KIND,), **(sizes | changes))


# Buckets.


def test_sizes_grow_by_four_up_to_the_limits() -> None:
    buckets = buckets_of()
    assert buckets.decode_rows == (1, 4, 16)
    assert buckets.prefill_tokens == (32, 128, 512)
    assert buckets.prefill_rows == 8
    odd = buckets_of(max_num_seqs=6, max_num_batched_tokens=200)
    assert odd.decode_rows == (1, 4, 6)
    assert odd.prefill_tokens == (32, 128, 200)
    assert odd.prefill_rows == 6
    tiny = buckets_of(max_num_seqs=1, max_num_batched_tokens=3)
    assert (tiny.decode_rows, tiny.prefill_tokens, tiny.prefill_rows) == ((1,), (3,), 1)
    assert buckets_of(max_num_batched_tokens=2).prefill_rows == 2


WINDOW = make_kind(layers=3, block_size=8, window=100)
CHUNK = make_kind(layers=1, block_size=24, chunk=64)


def test_a_decode_bucket_has_a_token_and_a_block_of_each_kind_for_each_row() -> None:
    bucket = buckets_of(KIND, WINDOW).decode(4)
    layout = bucket.layout
    assert (layout.tokens, layout.rows) == (4, 4)
    assert layout.kinds == (
        KvLayout(layers=2, blocks=4, row_edits=4),
        KvLayout(layers=3, blocks=4, row_edits=4),
    )
    assert (bucket.prefill_rows, bucket.max_query) == (0, 1)


def test_a_prefill_bucket_has_places_for_all_rows_to_decode() -> None:
    bucket = buckets_of(KIND, WINDOW, CHUNK).prefill(128)
    layout = bucket.layout
    assert (layout.tokens, layout.rows) == (128 + 16, 8 + 16)
    assert [kind.layers for kind in layout.kinds] == [2, 3, 1]
    assert [kind.blocks for kind in layout.kinds] == [
        8 + 128 // 16 + 16,
        8 + 128 // 8 + 16,
        8 + 128 // 24 + 16,
    ]
    assert (bucket.prefill_rows, bucket.max_query) == (8, 128)


def test_a_step_has_edits_for_the_blocks_of_the_largest_and_for_all_of_one_row() -> None:
    """Of a window of 100 tokens and 512 new ones: 611 tokens lie in at most 78 blocks of 8."""
    buckets = buckets_of(KIND, WINDOW, CHUNK)
    edits = (
        8 + 512 // 16 + 16 + 100,
        8 + 512 // 8 + 16 + 78,
        8 + 512 // 24 + 16 + 25,
    )
    assert buckets.max_row_edits == edits
    for tokens in buckets.prefill_tokens:
        kinds = buckets.prefill(tokens).layout.kinds
        assert tuple(kind.row_edits for kind in kinds) == edits


def test_a_layout_has_no_room_for_expert_edits() -> None:
    assert [bucket.layout.expert_edits for bucket in buckets_of().all()] == [0] * 6


def test_all_buckets_are_those_that_a_step_may_choose_the_largest_first() -> None:
    buckets = buckets_of()
    assert buckets.all() == [
        *(buckets.decode(rows) for rows in (16, 4, 1)),
        *(buckets.prefill(tokens) for tokens in (512, 128, 32)),
    ]
    assert buckets.largest() == (buckets.decode(16), buckets.prefill(512))


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 16), (16, 16)])
def test_a_decode_takes_the_smallest_bucket_of_rows(rows: int, bucket: int) -> None:
    assert buckets_of().choose(rows_of(decode=rows)) == buckets_of().decode(bucket)


@pytest.mark.parametrize(
    ("counts", "bucket"),
    [((2,), 32), ((32,), 32), ((20, 13), 128), ((128,), 128), ((500, 12), 512), ((1, 2), 32)],
)
@pytest.mark.parametrize("decode", [0, 1, 8])
def test_a_step_with_prompts_takes_the_smallest_bucket_of_their_tokens(
    counts: tuple[int, ...], bucket: int, decode: int
) -> None:
    assert buckets_of().choose(rows_of(counts, decode)) == buckets_of().prefill(bucket)


@pytest.mark.parametrize(
    ("edits", "fits"), [((4, 4), True), ((4, 0), True), ((5, 0), False), ((4, 5), False)]
)
def test_a_decode_with_a_long_cached_prompt_takes_a_bucket_with_room_for_its_blocks(
    edits: tuple[int, int], fits: bool
) -> None:
    plan = rows_of(decode=3)
    kinds = tuple(
        KvPlan((), tuple((plan.rows[0].sequence, i, KvBlock(i + 1, k, ())) for i in range(count)))
        for k, count in enumerate(edits)
    )
    buckets = buckets_of(KIND, WINDOW)
    wanted = buckets.decode(4) if fits else buckets.prefill(32)
    assert buckets.choose(dataclasses.replace(plan, kinds=kinds)) == wanted


# Places.


@pytest.mark.parametrize(
    ("prefill", "decode", "wanted"),
    [((5, 6), 2, [0, 1, 8, 9]), ((5,), 0, [0]), ((), 3, [0, 1, 2])],
    ids=["both", "prompts", "single tokens"],
)
def test_single_tokens_stand_behind_the_places_of_prompts(
    prefill: tuple[int, ...], decode: int, wanted: list[int]
) -> None:
    plan = rows_of(prefill, decode)
    found = places(plan, buckets_of().choose(plan))
    assert [place for place, _ in found] == wanted
    assert [row for _, row in found] == [*plan.prefill, *plan.decode]


@pytest.mark.parametrize(
    ("prefill", "decode", "rows"),
    [
        ((2, 3), 2, [0, 1, None, None, None, None, None, None, 2, 3]),
        ((2,) * 8, 1, [*range(9)]),
        ((2, 3), 0, [0, 1]),
        ((), 3, [0, 1, 2]),
    ],
    ids=["few prompts", "as many as there may be", "prompts", "single tokens"],
)
def test_places_between_prompts_and_single_tokens_are_empty(
    prefill: tuple[int, ...], decode: int, rows: list[int | None]
) -> None:
    plan = rows_of(prefill, decode)
    bucket = buckets_of().choose(plan)
    control = make_control(plan, bucket)
    assert [row.row if row.tokens else None for row in control.rows] == rows
    assert not any(row.sample for row in control.rows if not row.tokens)
    for place, row in places(plan, bucket):
        assert control.rows[place].row == row.sequence.row
        assert len(control.rows[place].tokens) == row.count


def test_single_tokens_in_a_prefill_bucket_stand_behind_its_empty_places() -> None:
    """As when the blocks of a cached prompt do not fit a decode bucket."""
    plan = rows_of(decode=2)
    control = make_control(plan, buckets_of().prefill(32))
    assert [len(row.tokens) for row in control.rows] == [0] * 8 + [1, 1]


# Control.


def only_row(plan: RowPlan) -> RowControl:
    """What is told of a row that is alone in its step."""
    is_decode = plan.count == 1
    step = make_plan(decode=[plan]) if is_decode else make_plan([plan])
    (row,) = make_control(step, buckets_of().choose(step)).rows
    return row


def test_a_chunk_of_a_prompt() -> None:
    sequence = make_sequence([10, 11, 12, 13, 14], row=3)
    row = only_row(chunk(sequence, 1, 3))
    assert (row.row, list(row.tokens), row.cached) == (3, [11, 12, 13], 1)
    assert not row.sample
    assert list(row.targets) == []
    assert row.forced == -1
    assert only_row(chunk(sequence, 1, 4, sample=True)).sample


def test_a_decode_feeds_the_last_token_of_the_output() -> None:
    sequence = make_sequence([10, 11], output_token_ids=[20, 21])
    row = only_row(token_of(sequence, 3))
    assert (list(row.tokens), row.cached, row.sample) == ([21], 3, True)


def test_a_token_that_is_still_on_the_device_is_taken_there() -> None:
    sequence = make_sequence([10, 11], output_token_ids=[20], num_pending=1)
    row = only_row(token_of(sequence, 3))
    assert (list(row.tokens), row.cached) == ([-1], 3)
    sequence.output_token_ids.append(21)  # it came
    assert list(only_row(token_of(sequence, 3)).tokens) == [21]


def test_a_chunk_of_one_that_was_computed_before_holds_its_output() -> None:
    sequence = make_sequence([10, 11], output_token_ids=[20, 21, 22])
    row = only_row(chunk(sequence, 1, 4, sample=True))
    assert (list(row.tokens), row.cached) == ([11, 20, 21, 22], 1)


@pytest.mark.parametrize(
    ("start", "count", "targets"),
    [(0, 2, [11, 12]), (2, 1, [13]), (2, 2, [13, -1]), (3, 1, [-1]), (0, 4, [11, 12, 13, -1])],
)
def test_the_target_of_a_prompt_token_is_the_next_one(
    start: int, count: int, targets: list[int]
) -> None:
    sequence = make_sequence([10, 11, 12, 13], wants_prompt_logprobs=True)
    assert list(only_row(chunk(sequence, start, count)).targets) == targets


def test_output_tokens_have_no_targets() -> None:
    sequence = make_sequence([10, 11], wants_prompt_logprobs=True, output_token_ids=[5, 6])
    assert list(only_row(token_of(sequence, 3)).targets) == [-1]
    assert list(only_row(chunk(sequence, 0, 4)).targets) == [11, -1, -1, -1]


def test_only_the_sequence_that_wants_them_has_targets() -> None:
    params = SamplingParams(prompt_logprobs=0)
    first = make_sequence([10, 11], 0, params=params, wants_prompt_logprobs=True)
    second = make_sequence([10, 11], 1, params=params)  # another answer to the same prompt
    plan = make_plan([chunk(first, 0, 2), chunk(second, 0, 2)])
    control = make_control(plan, buckets_of().choose(plan))
    assert [list(row.targets) for row in control.rows] == [[11, -1], []]
    assert wants_targets(plan)
    assert not wants_targets(make_plan([chunk(second, 0, 2)]))
    assert not wants_targets(make_plan([chunk(second, 0, 2)], [token_of(first, 1)]))


@pytest.mark.parametrize(("made", "forced"), [(0, 7), (1, 8), (2, -1)])
def test_forced_tokens_are_taken_by_their_position(made: int, forced: int) -> None:
    """Whether the tokens before are known or on their way."""
    for known in range(made + 1):
        sequence = make_sequence(
            [1, 2],
            forced_token_ids=(7, 8),
            output_token_ids=[7, 8][:known],
            num_pending=made - known,
        )
        assert only_row(token_of(sequence, 1 + made)).forced == forced


@pytest.mark.parametrize("made", range(4))
def test_no_token_may_end_a_sequence_before_its_smallest_length(made: int) -> None:
    params = SamplingParams(min_tokens=2)
    sequence = make_sequence([1, 2], params=params, num_pending=made)
    row = only_row(token_of(sequence, 1 + made))
    assert row.bans_stops == (made < 2)
    assert row.changes_logits


def test_a_prompt_bans_stops_of_its_first_output_token() -> None:
    sequence = make_sequence([1, 2, 3], params=SamplingParams(min_tokens=1))
    assert only_row(chunk(sequence, 0, 3, sample=True)).bans_stops
    assert not only_row(chunk(make_sequence([1, 2, 3]), 0, 3, sample=True)).bans_stops


@pytest.mark.parametrize(("logprobs", "wanted"), [(None, False), (0, True), (5, True)])
def test_log_probabilities_are_computed_where_one_row_wants_them(
    logprobs: int | None, wanted: bool
) -> None:
    sequences = [
        make_sequence([1], i, params=SamplingParams(logprobs=n))
        for i, n in enumerate((None, logprobs))
    ]
    plan = make_plan(decode=[token_of(sequence, 0) for sequence in sequences])
    assert wants_logprobs(plan) is wanted
    assert make_control(plan, buckets_of().decode(4)).want_logprobs is wanted


def test_forced_tokens_want_log_probabilities() -> None:
    plan = make_plan(decode=[token_of(make_sequence([1], forced_token_ids=[3]), 0)])
    assert make_control(plan, buckets_of().decode(1)).want_logprobs


def test_a_row_that_does_not_sample_wants_no_log_probabilities() -> None:
    sequence = make_sequence([1] * 9, params=SamplingParams(logprobs=1))
    plan = make_plan([chunk(sequence, 0, 4)])
    assert not make_control(plan, buckets_of().prefill(32)).want_logprobs


def test_sampling_settings_are_passed_on() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.25, min_p=0.125, top_k=-1)
    row = only_row(token_of(make_sequence([1], params=params, seed=9), 0))
    assert (row.temperature, row.top_p, row.min_p, row.top_k, row.seed) == (0.5, 0.25, 0.125, 0, 9)
    assert not row.changes_logits
    row = only_row(token_of(make_sequence([1], params=SamplingParams(top_k=40)), 0))
    assert (row.top_k, row.temperature) == (40, 1.0)


def test_penalties_are_passed_on() -> None:
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5, temperature=0.0
    )
    row = only_row(token_of(make_sequence([1], params=params), 0))
    found = row.presence_penalty, row.frequency_penalty, row.repetition_penalty
    assert found == (0.5, -0.25, 1.5)
    assert row.changes_logits


def test_a_bias_alone_changes_logits() -> None:
    params = SamplingParams(logit_bias={3: 1.0})
    assert only_row(token_of(make_sequence([1], params=params), 0)).changes_logits


def test_the_factors_of_a_sequence_are_passed_on() -> None:
    for uses_long_rope in (False, True):
        sequence = make_sequence([1, 2], uses_long_rope=uses_long_rope)
        assert only_row(token_of(sequence, 1)).long_rope is uses_long_rope
        assert only_row(chunk(sequence, 0, 2)).long_rope is uses_long_rope


def test_blocks_become_edits_of_both_tables_of_their_kind_and_shared_ones_of_one() -> None:
    first, second = make_sequence([1] * 40, row=4), make_sequence([1] * 9, row=1)
    shared, a = KvBlock(7, 0, (70, 71), users=2), KvBlock(3, 0, (30, 31))
    b, c = KvBlock(5, 0, (50, 51)), KvBlock(3, 1, (60, 61, 62))
    plan = make_plan(
        [chunk(first, 16, 20), chunk(second, 0, 9)],
        kinds=[
            KvPlan((a, b), ((first, 0, shared), (first, 1, a), (second, 0, b))),
            KvPlan((c,), ((second, 0, c),)),
            KvPlan(),
        ],
    )
    buckets = buckets_of(KIND, WINDOW, CHUNK)
    control = make_control(plan, buckets.choose(plan))
    assert list(control.kv_edits) == [
        KvEdits([(3, 30, 31), (5, 50, 51)], [(4, 0, 7), (4, 1, 3), (1, 0, 5)]),
        KvEdits([(3, 60, 61, 62)], [(1, 0, 3)]),
        KvEdits([], []),
    ]
    assert list(control.expert_edits) == []


def test_a_sequence_without_a_row_is_in_no_step() -> None:
    plan = make_plan(decode=[token_of(make_sequence([1], row=None), 0)])
    with pytest.raises(AssertionError, match="a sequence without a row is in a step"):
        make_control(plan, buckets_of().decode(1))
