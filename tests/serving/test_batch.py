"""Buckets, and what the device is told of a plan."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.arena.control import Control, RowControl, pack
from moejax_serving.batch import Buckets, make_buckets, make_control
from moejax_serving.pages import BlockPool, KvBlock, PagePool
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.scheduler import RowPlan, Scheduler, StepPlan
from moejax_serving.sequence import Sequence

LAYERS = 2


def make_sequence(prompt: list[int], row: int | None = 0, **fields: Any) -> Sequence:
    defaults = {"max_tokens": 5, "seed": 0, "params": SamplingParams(temperature=0.0)}
    return Sequence(
        request_id="id", prompt=None, prompt_token_ids=prompt, row=row, **(defaults | fields)
    )


def make_plan(*rows: RowPlan, new_blocks: tuple[Any, ...] = ()) -> StepPlan:
    return StepPlan(rows, new_blocks)


def rows_of(*counts: int, params: SamplingParams | None = None) -> StepPlan:
    """A plan of prompt chunks of these sizes."""
    params = params or SamplingParams()
    return make_plan(
        *(
            RowPlan(make_sequence([1] * (n + 1), i, params=params), 0, n)
            for i, n in enumerate(counts)
        )
    )


def buckets_of(**changes: int) -> Buckets:
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 16}
    return make_buckets(**(sizes | changes), layers=LAYERS)


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


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 16), (16, 16)])
def test_a_decode_takes_the_smallest_bucket_of_rows(rows: int, bucket: int) -> None:
    found = buckets_of().choose(rows_of(*[1] * rows))
    assert (found.layout.rows, found.layout.tokens) == (bucket, bucket)
    assert found.max_query == 1
    assert not found.with_targets


@pytest.mark.parametrize(
    ("counts", "bucket"),
    [((2,), 32), ((32,), 32), ((20, 13), 128), ((128,), 128), ((500, 12), 512), ((1, 2), 32)],
)
def test_a_prefill_takes_the_smallest_bucket_of_tokens(
    counts: tuple[int, ...], bucket: int
) -> None:
    found = buckets_of().choose(rows_of(*counts))
    assert (found.layout.rows, found.layout.tokens) == (8, bucket)
    assert found.max_query == bucket
    assert not found.with_targets


def test_log_probabilities_of_a_prompt_take_a_program_of_their_own() -> None:
    params = SamplingParams(prompt_logprobs=0)
    for counts in ((3,), (1,), (1, 1)):
        found = buckets_of().choose(rows_of(*counts, params=params))
        assert found.with_targets
        assert found.layout.tokens == found.max_query == 32


def test_the_largest_buckets_are_the_largest_of_each_kind() -> None:
    decode, prefill = buckets_of().largest()
    assert (decode.layout.rows, decode.max_query, decode.with_targets) == (16, 1, False)
    assert (prefill.layout.tokens, prefill.max_query, prefill.with_targets) == (512, 512, True)


def test_a_layout_has_room_for_layers_and_for_no_expert_edits() -> None:
    layout = buckets_of().decode(4).layout
    assert (layout.layers, layout.expert_edits) == (LAYERS, 0)


@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    block_size=st.sampled_from([8, 16, 24]),
    max_num_batched_tokens=st.integers(1, 70),
    max_num_seqs=st.integers(1, 6),
)
def test_every_step_of_a_scheduler_fits_its_bucket(
    prompts: list[int], block_size: int, max_num_batched_tokens: int, max_num_seqs: int
) -> None:
    buckets = make_buckets(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        layers=LAYERS,
    )
    num_blocks = 40
    pool = BlockPool(PagePool(1 + LAYERS * num_blocks), LAYERS, num_blocks + 1)
    scheduler = Scheduler(
        pool,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_prefill_seqs=buckets.prefill_rows,
        max_num_batched_tokens=buckets.prefill_tokens[-1],
    )
    for prompt in prompts:
        scheduler.add(make_sequence([3] * prompt, None, max_tokens=3))
    while (plan := scheduler.plan()) is not None:
        bucket = buckets.choose(plan)
        control = make_control(plan)
        array = pack(control, bucket.layout)  # refuses what does not fit
        assert array[1] == len(plan.rows) and array[2] == plan.num_tokens
        assert max(row.count for row in plan.rows) <= bucket.max_query
        for row in plan.rows:
            sample = row.sample
            row.sequence.num_cached = row.start + row.count
            if sample:
                row.sequence.output_token_ids.append(4)
                if len(row.sequence.output_token_ids) == 3:
                    scheduler.finish(row.sequence)
    assert pool.num_held == 0


# Control.


def only_row(control: Control) -> RowControl:
    (row,) = control.rows
    return row


def test_a_chunk_of_a_prompt() -> None:
    sequence = make_sequence([10, 11, 12, 13, 14], row=3, num_cached=1)
    row = only_row(make_control(make_plan(RowPlan(sequence, 1, 3))))
    assert (row.row, list(row.tokens), row.cached) == (3, [11, 12, 13], 1)
    assert not row.sample
    assert list(row.targets) == []
    assert row.forced == -1


def test_the_last_chunk_samples() -> None:
    sequence = make_sequence([10, 11, 12], num_cached=1)
    assert only_row(make_control(make_plan(RowPlan(sequence, 1, 2)))).sample


def test_a_decode_feeds_the_last_token_of_the_output() -> None:
    sequence = make_sequence([10, 11], output_token_ids=[20, 21], num_cached=3)
    row = only_row(make_control(make_plan(RowPlan(sequence, 3, 1))))
    assert (list(row.tokens), row.cached, row.sample) == ([21], 3, True)


@pytest.mark.parametrize(
    ("start", "count", "targets"),
    [(0, 2, [11, 12]), (2, 1, [13]), (2, 2, [13, -1]), (3, 1, [-1]), (0, 4, [11, 12, 13, -1])],
)
def test_the_target_of_a_prompt_token_is_the_next_one(
    start: int, count: int, targets: list[int]
) -> None:
    params = SamplingParams(prompt_logprobs=2)
    sequence = make_sequence([10, 11, 12, 13], params=params, num_cached=start)
    row = only_row(make_control(make_plan(RowPlan(sequence, start, count))))
    assert list(row.targets) == targets


def test_output_tokens_have_no_targets() -> None:
    params = SamplingParams(prompt_logprobs=2)
    sequence = make_sequence([10, 11], params=params, output_token_ids=[5], num_cached=2)
    assert list(only_row(make_control(make_plan(RowPlan(sequence, 2, 1)))).targets) == []


@pytest.mark.parametrize(("made", "forced"), [(0, 7), (1, 8), (2, -1)])
def test_forced_tokens_are_taken_one_after_the_other(made: int, forced: int) -> None:
    sequence = make_sequence(
        [1], forced_token_ids=(7, 8), output_token_ids=[7, 8][:made], num_cached=made
    )
    control = make_control(make_plan(RowPlan(sequence, made, 1)))
    assert only_row(control).forced == forced
    assert control.want_logprobs


@pytest.mark.parametrize(("logprobs", "wanted"), [(None, False), (0, True), (5, True)])
def test_log_probabilities_are_computed_where_one_row_wants_them(
    logprobs: int | None, wanted: bool
) -> None:
    rows = [
        RowPlan(make_sequence([1], i, params=SamplingParams(logprobs=n)), 0, 1)
        for i, n in enumerate((None, logprobs))
    ]
    assert make_control(make_plan(*rows)).want_logprobs is wanted


def test_sampling_settings_are_passed_on() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.25, min_p=0.125, top_k=-1)
    row = only_row(
        make_control(make_plan(RowPlan(make_sequence([1], params=params, seed=9), 0, 1)))
    )
    assert (row.temperature, row.top_p, row.min_p, row.top_k, row.seed) == (0.5, 0.25, 0.125, 0, 9)
    params = SamplingParams(top_k=40)
    row = only_row(make_control(make_plan(RowPlan(make_sequence([1], params=params), 0, 1))))
    assert (row.top_k, row.temperature) == (40, 1.0)


def test_new_blocks_become_edits_of_both_tables() -> None:
    first, second = make_sequence([1] * 20, row=4), make_sequence([1] * 9, row=1)
    plan = make_plan(
        RowPlan(first, 0, 20),
        RowPlan(second, 0, 9),
        new_blocks=(
            (first, 0, KvBlock(7, (70, 71))),
            (first, 1, KvBlock(3, (30, 31))),
            (second, 0, KvBlock(5, (50, 51))),
        ),
    )
    control = make_control(plan)
    assert list(control.block_edits) == [(7, 70, 71), (3, 30, 31), (5, 50, 51)]
    assert list(control.row_edits) == [(4, 0, 7), (4, 1, 3), (1, 0, 5)]
    assert list(control.expert_edits) == []


def test_a_sequence_without_a_row_is_in_no_step() -> None:
    with pytest.raises(AssertionError, match="a sequence without a row is in a step"):
        make_control(make_plan(RowPlan(make_sequence([1], row=None), 0, 1)))
