"""Buckets, and what the device is told of a plan."""

import dataclasses
import itertools
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from moejax.arena.control import Control, Header, RowControl, pack
from moejax.models.step import Bucket
from moejax_serving.batch import (
    Buckets,
    make_buckets,
    make_control,
    places,
    wants_logprobs,
    wants_targets,
)
from moejax_serving.kv_blocks import BlockPool, KvBlock, root_key
from moejax_serving.pages import PagePool
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.scheduler import RowPlan, Scheduler, StepPlan
from moejax_serving.sequence import Sequence

LAYERS = 2
GREEDY = SamplingParams(temperature=0.0)


def make_sequence(prompt: list[int], row: int | None = 0, **fields: Any) -> Sequence:
    defaults = {"number": 0, "max_tokens": 5, "seed": 0, "params": GREEDY}
    return Sequence(prompt_token_ids=prompt, row=row, **(defaults | fields))


def make_plan(
    prefill: SequenceOf[RowPlan] = (),
    decode: SequenceOf[RowPlan] = (),
    new_blocks: SequenceOf[KvBlock] = (),
    row_blocks: SequenceOf[tuple[Sequence, int, KvBlock]] = (),
) -> StepPlan:
    return StepPlan(tuple(prefill), tuple(decode), tuple(new_blocks), tuple(row_blocks))


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


def buckets_of(**changes: int) -> Buckets:
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 16}
    return make_buckets(**(sizes | {"blocks_per_row": 100} | changes), layers=LAYERS)


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


def test_a_decode_bucket_has_a_token_and_a_block_for_each_row() -> None:
    bucket = buckets_of().decode(4)
    layout = bucket.layout
    assert (layout.tokens, layout.rows, layout.blocks, layout.row_edits) == (4, 4, 4, 4)
    assert (bucket.prefill_rows, bucket.max_query) == (0, 1)


def test_a_prefill_bucket_has_places_for_all_rows_to_decode() -> None:
    bucket = buckets_of().prefill(128)
    layout = bucket.layout
    assert (layout.tokens, layout.rows) == (128 + 16, 8 + 16)
    assert layout.blocks == 8 + 128 // 16 + 16
    assert layout.row_edits == 8 + 512 // 16 + 16 + 100  # of the largest, and all of one row
    assert (bucket.prefill_rows, bucket.max_query) == (8, 128)


def test_a_layout_has_room_for_layers_and_for_no_expert_edits() -> None:
    for bucket in buckets_of().all():
        assert (bucket.layout.layers, bucket.layout.expert_edits) == (LAYERS, 0)


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


@pytest.mark.parametrize(("edits", "fits"), [(4, True), (5, False)])
def test_a_decode_with_a_long_cached_prompt_takes_a_bucket_with_room_for_its_blocks(
    edits: int, fits: bool
) -> None:
    plan = rows_of(decode=3)
    blocks = [(plan.decode[0].sequence, i, KvBlock(i + 1, (0, 0))) for i in range(edits)]
    buckets = buckets_of()
    wanted = buckets.decode(4) if fits else buckets.prefill(32)
    assert buckets.choose(dataclasses.replace(plan, row_blocks=tuple(blocks))) == wanted


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


def test_blocks_become_edits_of_both_tables_and_shared_ones_of_one() -> None:
    first, second = make_sequence([1] * 40, row=4), make_sequence([1] * 9, row=1)
    shared, a, b = KvBlock(7, (70, 71), users=2), KvBlock(3, (30, 31)), KvBlock(5, (50, 51))
    plan = make_plan(
        [chunk(first, 16, 20), chunk(second, 0, 9)],
        new_blocks=(a, b),
        row_blocks=((first, 0, shared), (first, 1, a), (second, 0, b)),
    )
    control = make_control(plan, buckets_of().choose(plan))
    assert list(control.block_edits) == [(3, 30, 31), (5, 50, 51)]
    assert list(control.row_edits) == [(4, 0, 7), (4, 1, 3), (1, 0, 5)]
    assert list(control.expert_edits) == []


def test_a_sequence_without_a_row_is_in_no_step() -> None:
    plan = make_plan(decode=[token_of(make_sequence([1], row=None), 0)])
    with pytest.raises(AssertionError, match="a sequence without a row is in a step"):
        make_control(plan, buckets_of().decode(1))


# Any requests: what the device is told suffices for every sequence to get its own tokens.

MAX_LEN, VOCAB, STOP = 48, 29, 0


def next_token(tokens: SequenceOf[int]) -> int:
    """The model of these tests."""
    return (sum(token * (i + 3) for i, token in enumerate(tokens)) // 2) % VOCAB


def fold(tokens: SequenceOf[int]) -> list[int]:
    """A number for each token that depends on it and on all before it."""
    return list(
        itertools.accumulate(tokens, lambda before, token: hash((before, token)), initial=0)
    )[1:]


class Device:
    """Does what control arrays say, in plain Python.

    The KV of the first layer is the token, that of the second one depends on all before it too.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_pages: dict[int, tuple[int, ...]] = {}
        self.tables: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}
        self.kv: dict[tuple[int, int], Any] = {}

    def run(self, control: Control) -> dict[int, int]:
        """The tokens by place."""
        for number, *pages in control.block_edits:
            self.block_pages[number] = tuple(pages)
        for row, index, number in control.row_edits:
            self.tables[row, index] = number
        inputs = [
            [self.last[row.row] if token < 0 else token for token in row.tokens]
            for row in control.rows
        ]
        # Each layer writes the KV of all rows before it reads any.
        for row, tokens in zip(control.rows, inputs, strict=True):
            self.write(row, 0, tokens)
        contexts = [self.read(row, 0) for row in control.rows]
        for row, context in zip(control.rows, contexts, strict=True):
            self.write(row, 1, fold(context)[row.cached :])
        chosen = {}
        for place, (row, context) in enumerate(zip(control.rows, contexts, strict=True)):
            assert self.read(row, 1) == fold(context), "a block holds what followed other tokens"
            if row.sample:
                chosen[place] = next_token(context)
        self.last |= {control.rows[place].row: token for place, token in chosen.items()}
        return chosen

    def write(self, row: RowControl, layer: int, values: SequenceOf[Any]) -> None:
        for i, value in enumerate(values):
            self.kv[self.at(row, layer, row.cached + i)] = value

    def read(self, row: RowControl, layer: int) -> list[Any]:
        if not row.tokens:
            return []
        end = row.cached + len(row.tokens)
        return [self.kv[self.at(row, layer, position)] for position in range(end)]

    def at(self, row: RowControl, layer: int, position: int) -> tuple[int, int]:
        number = self.tables[row.row, position // self.block_size]
        return self.block_pages[number][layer], position % self.block_size


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests, and the sizes under which they run."""

    prompts: list[list[int]]
    max_tokens: list[int]
    arrivals: list[int]
    """Steps that have begun before each comes."""
    block_size: int
    spare_blocks: int
    """Beyond those of the longest sequence."""
    max_num_seqs: int
    max_num_batched_tokens: int
    has_cache: bool = True


@st.composite
def cases(draw: st.DrawFn) -> Case:
    base = draw(st.lists(st.integers(1, VOCAB - 1), min_size=MAX_LEN, max_size=MAX_LEN))
    num = draw(st.integers(2, 8))
    prompts = []
    for _ in range(num):
        shared = draw(st.sampled_from([0, 7, 16, 20]))
        tail = draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=8))
        prompts.append(base[:shared] + tail)
    return Case(
        prompts=prompts,
        max_tokens=draw(st.lists(st.integers(1, 20), min_size=num, max_size=num)),
        arrivals=draw(st.lists(st.integers(0, 5), min_size=num, max_size=num)),
        block_size=draw(st.sampled_from([2, 3, 8])),
        spare_blocks=draw(st.integers(0, 8)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 70)),
        has_cache=draw(st.booleans()),
    )


def check_bucket(buckets: Buckets, bucket: Bucket, plan: StepPlan) -> None:
    """The smallest of its kind, and every row where it may be."""
    assert bucket in buckets.all()
    if plan.prefill:
        smaller = [n for n in buckets.prefill_tokens if n < bucket.max_query]
        assert all(n < plan.num_prefill_tokens for n in smaller)
    elif bucket.prefill_rows == 0:
        smaller = [n for n in buckets.decode_rows if n < bucket.layout.rows]
        assert all(n < len(plan.decode) for n in smaller)
    else:
        assert len(plan.row_blocks) > len(plan.decode)
    assert len(plan.prefill) <= bucket.prefill_rows
    assert all(row.count <= bucket.max_query for row in plan.prefill)
    assert all(row.count == 1 for row in plan.decode)


class Run:
    """A scheduler over the device, one step ahead of it, as the engine is."""

    def __init__(self, case: Case) -> None:
        self.case, size = case, case.block_size
        blocks_per_row = -(-MAX_LEN // size)
        self.buckets = make_buckets(
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            block_size=size,
            blocks_per_row=blocks_per_row,
            layers=LAYERS,
        )
        num_blocks = blocks_per_row + case.spare_blocks
        self.pool = BlockPool(PagePool(1 + LAYERS * num_blocks), LAYERS, num_blocks + 1)
        self.scheduler = Scheduler(
            self.pool,
            block_size=size,
            num_blocks=num_blocks,
            max_num_seqs=case.max_num_seqs,
            max_prefill_seqs=self.buckets.prefill_rows,
            max_num_batched_tokens=self.buckets.prefill_tokens[-1],
            max_row_edits=self.buckets.max_row_edits,
            cache_root=root_key("model") if case.has_cache else None,
        )
        self.device = Device(size)
        self.plans: list[StepPlan] = []

    def outputs(self) -> list[list[int]]:
        """Runs all requests to their end."""
        case = self.case
        sequences = [
            make_sequence(prompt, None, number=number, max_tokens=max_tokens)
            for number, (prompt, max_tokens) in enumerate(
                zip(case.prompts, case.max_tokens, strict=True)
            )
        ]
        # Numbers are given as requests come.
        coming = sorted(range(len(sequences)), key=lambda i: case.arrivals[i])
        for number, i in enumerate(coming):
            sequences[i].number = number
        before, steps = None, 0
        while before is not None or not all(sequence.is_finished for sequence in sequences):
            while coming and case.arrivals[coming[0]] <= steps:
                self.scheduler.add(sequences[coming.pop(0)])
            now = self.start()
            if before is not None:
                self.take(*before)
            self.scheduler.check()
            before, steps = now, steps + 1
            assert steps < 2000
        return [sequence.output_token_ids for sequence in sequences]

    def start(self) -> tuple[StepPlan, Bucket, dict[int, int]] | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self.plans.append(plan)
        bucket = self.buckets.choose(plan)
        check_bucket(self.buckets, bucket, plan)
        control = make_control(plan, bucket)
        array = pack(control, bucket.layout)  # refuses what does not fit
        assert array[Header.TOKENS] == plan.num_tokens
        assert array[Header.ROWS] == 1 + max(place for place, _ in places(plan, bucket))
        return plan, bucket, self.device.run(control)

    def take(self, plan: StepPlan, bucket: Bucket, chosen: dict[int, int]) -> None:
        for place, row in places(plan, bucket):
            sequence = row.sequence
            sequence.num_pending -= row.sample
            if sequence.is_finished or not row.sample:
                continue
            sequence.output_token_ids.append(chosen[place])
            self.scheduler.offer(sequence)
            if chosen[place] == STOP or len(sequence.output_token_ids) == sequence.max_tokens:
                self.scheduler.finish(sequence)


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    """The output of a request, without anything around it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]


TIGHT = Case(
    prompts=[[1 + i % 7 for i in range(20)], [2] * 20, [4] * 19],
    max_tokens=[10, 10, 10],
    arrivals=[0, 0, 0],
    block_size=2,
    spare_blocks=1,
    max_num_seqs=3,
    max_num_batched_tokens=70,
)
AGAIN = Case(
    prompts=[[1 + i % 7 for i in range(28)]] * 3,
    max_tokens=[3, 3, 3],
    arrivals=[0, 0, 9],
    block_size=3,
    spare_blocks=20,
    max_num_seqs=2,
    max_num_batched_tokens=70,
)


# A prompt that is in the cache as a whole: its last token must be computed nevertheless.
WHOLE = dataclasses.replace(
    AGAIN, prompts=[[1 + i % 7 for i in range(27)]] * 2, max_tokens=[2, 2], arrivals=[0, 5]
)
# More blocks of the cache than one step may put into tables.
MANY = dataclasses.replace(
    AGAIN,
    prompts=[[1 + i % 7 for i in range(40)]] * 5,
    max_tokens=[1] * 5,
    arrivals=[0, 50, 50, 50, 50],
    max_num_seqs=4,
    max_num_batched_tokens=1,
)
# While the second prompt is computed, the first sequence takes the blocks for its last chunk.
SHORT = dataclasses.replace(
    TIGHT,
    prompts=[[6] * 15, [1 + i % 7 for i in range(30)]],
    max_tokens=[20, 2],
    arrivals=[0, 1],
    spare_blocks=0,
    max_num_batched_tokens=8,
)


@given(cases())
@example(TIGHT)
@example(AGAIN)
@example(WHOLE)
@example(MANY)
@example(SHORT)
def test_every_step_of_a_scheduler_fits_its_bucket_and_every_request_gets_its_tokens(
    case: Case,
) -> None:
    run = Run(case)
    outputs = run.outputs()
    assert outputs == [
        alone(prompt, n) for prompt, n in zip(case.prompts, case.max_tokens, strict=True)
    ]
    assert run.pool.num_used == 0
    counts = run.scheduler.counts
    event(f"preempted: {counts.preemptions > 0}, hits: {counts.prefix_hits > 0}")


def test_the_examples_hold_what_the_property_is_about() -> None:
    tight, again = Run(TIGHT), Run(AGAIN)
    tight.outputs()
    assert tight.scheduler.counts.preemptions > 0
    again.outputs()
    assert again.scheduler.counts.prefix_hits == 2 * 27
    first, *_, last = (plan for plan in again.plans if plan.row_blocks and plan.rows[0].start < 28)
    # The second request finds what the first one computes in the same step.
    assert [len(first.prefill), len(first.decode)] == [1, 1]
    # The last one brings nine blocks from the cache for a step of a single token.
    assert [len(last.prefill), len(last.decode), len(last.row_blocks)] == [0, 1, 10]
    assert again.buckets.choose(last).prefill_rows > 0
    many = Run(MANY)
    many.outputs()
    hits = 39 // 3
    assert many.scheduler.counts.prefix_hits == 4 * 3 * hits
    assert 4 * hits > many.buckets.max_row_edits
