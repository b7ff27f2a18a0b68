"""Any requests over any kinds of KV: each gets its own tokens, and every step fits its bucket."""

import dataclasses
from collections.abc import Sequence as SequenceOf

from hypothesis import event, example, given
from hypothesis import strategies as st

from moejax.arena.control import Control, Header, RowControl, pack
from moejax.arena.kinds import KvKind
from moejax.models.step import Bucket
from moejax_serving.batch import Buckets, make_buckets, make_control, places
from moejax_serving.kv_blocks import root_key
from moejax_serving.pages import PagePool
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.scheduler import Scheduler, StepPlan
from moejax_serving.sequence import Sequence
from serving.scheduling import KIND_SIZES, make_kind, make_pool, sees

MAX_LEN, VOCAB, STOP = 48, 29, 0


class Model:
    """The model of these tests: in each layer a token's value comes from all those that it sees."""

    def __init__(self, kinds: SequenceOf[KvKind]) -> None:
        """Layer by layer, the kinds take turns."""
        self.kinds = kinds
        most = max(kind.pages_per_block for kind in kinds)
        self.layers = [
            (number, layer)
            for layer in range(most)
            for number, kind in enumerate(kinds)
            if layer < kind.pages_per_block
        ]
        """The kind of each layer, and its place among those of the kind."""

    @staticmethod
    def embed(token: int, is_long: bool) -> int:
        return hash((token, is_long))

    @staticmethod
    def choose(value: int) -> int:
        """The next token, of the last one's value after the last layer."""
        return value // 2 % VOCAB

    def alone(self, prompt: list[int], max_tokens: int, is_long: bool) -> list[int]:
        """The output of a request, without anything around it."""
        tokens = list(prompt)
        kv: list[list[int]] = [[] for _ in self.layers]
        while tokens[-1] != STOP and len(tokens) < len(prompt) + max_tokens:
            for position in range(len(kv[0]), len(tokens)):
                value = self.embed(tokens[position], is_long)
                for values, (number, _) in zip(kv, self.layers, strict=True):
                    values.append(value)
                    value = self.mix(value, values, number)
            tokens.append(self.choose(value))
        return tokens[len(prompt) :]

    def mix(self, value: int, before: SequenceOf[int], number: int) -> int:
        """A token's value after a layer of a kind: `before` are those of all up to itself."""
        query = len(before) - 1
        kind = self.kinds[number]
        return hash((value, *(v for p, v in enumerate(before) if sees(kind, query, p))))


class Device:
    """Does what control arrays say, in plain Python."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.block_pages: dict[tuple[int, int], tuple[int, ...]] = {}
        self.tables: dict[tuple[int, int, int], int] = {}
        self.last: dict[int, int] = {}
        self.kv: dict[tuple[int, int], int] = {}

    def run(self, control: Control) -> dict[int, int]:
        """The tokens by place."""
        for kind, edits in enumerate(control.kv_edits):
            for number, *pages in edits.blocks:
                self.block_pages[kind, number] = tuple(pages)
            for row, index, number in edits.rows:
                self.tables[kind, row, index] = number
        values = [
            [
                self.model.embed(self.last[row.row] if token < 0 else token, row.long_rope)
                for token in row.tokens
            ]
            for row in control.rows
        ]
        for kind, layer in self.model.layers:
            # A layer writes the KV of all rows before it reads any.
            for row, new in zip(control.rows, values, strict=True):
                for i, value in enumerate(new):
                    self.kv[self.at(row, kind, layer, row.cached + i)] = value
            values = [
                [
                    hash((value, *self.seen(row, kind, layer, row.cached + i)))
                    for i, value in enumerate(new)
                ]
                for row, new in zip(control.rows, values, strict=True)
            ]
        chosen = {
            place: self.model.choose(new[-1])
            for place, (row, new) in enumerate(zip(control.rows, values, strict=True))
            if row.sample
        }
        self.last |= {control.rows[place].row: token for place, token in chosen.items()}
        return chosen

    def seen(self, row: RowControl, kind: int, layer: int, query: int) -> list[int]:
        sight = self.model.kinds[kind]
        return [
            self.kv[self.at(row, kind, layer, position)]
            for position in range(query + 1)
            if sees(sight, query, position)
        ]

    def at(self, row: RowControl, kind: int, layer: int, position: int) -> tuple[int, int]:
        index, place = divmod(position, self.model.kinds[kind].block_size)
        number = self.tables[kind, row.row, index]
        return self.block_pages[kind, number][layer], place


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests, and the sizes under which they run."""

    prompts: list[list[int]]
    max_tokens: list[int]
    arrivals: list[int]
    """Steps that have begun before each comes."""
    kinds: list[dict[str, int]]
    spare_pages: int
    """Beyond those of a sequence of MAX_LEN tokens."""
    max_num_seqs: int
    max_num_batched_tokens: int
    long_rope_after: int = MAX_LEN
    """Sequences that may come to more tokens take the long factors."""
    has_cache: bool = True

    def is_long(self, index: int) -> bool:
        return len(self.prompts[index]) + self.max_tokens[index] > self.long_rope_after


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
        kinds=draw(st.lists(KIND_SIZES, min_size=1, max_size=3)),
        spare_pages=draw(st.integers(0, 16)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 70)),
        long_rope_after=draw(st.sampled_from([24, MAX_LEN])),
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
        assert any(len(kind.row_blocks) > len(plan.decode) for kind in plan.kinds)
    assert len(plan.prefill) <= bucket.prefill_rows
    assert all(row.count <= bucket.max_query for row in plan.prefill)
    assert all(row.count == 1 for row in plan.decode)


class Run:
    """A scheduler over the device, one step ahead of it, as the engine is."""

    def __init__(self, case: Case) -> None:
        self.case, kinds = case, [make_kind(**size) for size in case.kinds]
        self.buckets = make_buckets(
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            kinds=kinds,
            max_model_len=MAX_LEN,
        )
        max_query = self.buckets.prefill_tokens[-1]
        num_pages = case.spare_pages + sum(
            kind.pages_per_block * kind.most_blocks(MAX_LEN, max_query) for kind in kinds
        )
        pages = PagePool(1 + num_pages)
        self.pool = make_pool(pages, kinds)
        self.scheduler = Scheduler(
            self.pool,
            kinds=kinds,
            num_pages=num_pages,
            max_num_seqs=case.max_num_seqs,
            max_prefill_seqs=self.buckets.prefill_rows,
            max_num_batched_tokens=max_query,
            max_row_edits=self.buckets.max_row_edits,
            cache_root=root_key("model") if case.has_cache else None,
        )
        self.model = Model(kinds)
        self.device = Device(self.model)
        self.plans: list[StepPlan] = []

    def alone(self) -> list[list[int]]:
        """What the requests must get."""
        case = self.case
        return [
            self.model.alone(prompt, case.max_tokens[i], case.is_long(i))
            for i, prompt in enumerate(case.prompts)
        ]

    def outputs(self) -> list[list[int]]:
        """Runs all requests to their end."""
        case = self.case
        sequences = [
            Sequence(
                number=i,
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=0.0),
                max_tokens=case.max_tokens[i],
                seed=0,
                uses_long_rope=case.is_long(i),
            )
            for i, prompt in enumerate(case.prompts)
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


TIGHT = Case(
    prompts=[[1 + i % 7 for i in range(20)], [2] * 20, [4] * 19],
    max_tokens=[10, 10, 10],
    arrivals=[0, 0, 0],
    kinds=[{"block_size": 2}],
    spare_pages=2,
    max_num_seqs=3,
    max_num_batched_tokens=70,
)
AGAIN = Case(
    prompts=[[1 + i % 7 for i in range(28)]] * 3,
    max_tokens=[3, 3, 3],
    arrivals=[0, 0, 9],
    kinds=[{"block_size": 3}],
    spare_pages=40,
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
    spare_pages=0,
    max_num_batched_tokens=8,
)
# The same over kinds that end together after 12 tokens only, and over some without a kind that sees
# everything.
MIXED = [{"block_size": 3}, {"layers": 1, "block_size": 2, "window": 5}, {"chunk": 8}]
TIGHT_MIXED = dataclasses.replace(
    TIGHT,
    prompts=[[6] * 15, [1] * 3, [2] * 9],
    max_tokens=[20] * 3,
    kinds=MIXED,
    spare_pages=0,
    max_num_batched_tokens=4,
)
TIGHT_LIMITED = dataclasses.replace(
    TIGHT_MIXED, prompts=[[1, 2, 3], [4, 5, 6], [7, 8, 9]], kinds=MIXED[1:]
)
AGAIN_MIXED = dataclasses.replace(AGAIN, kinds=MIXED)
AGAIN_LIMITED = dataclasses.replace(AGAIN, kinds=MIXED[1:])
MANY_MIXED = dataclasses.replace(MANY, kinds=MIXED)
SHORT_LIMITED = dataclasses.replace(SHORT, kinds=MIXED[1:])


@given(cases())
@example(TIGHT)
@example(AGAIN)
@example(WHOLE)
@example(MANY)
@example(SHORT)
@example(TIGHT_MIXED)
@example(TIGHT_LIMITED)
@example(AGAIN_MIXED)
@example(AGAIN_LIMITED)
@example(MANY_MIXED)
@example(SHORT_LIMITED)
def test_every_step_of_a_scheduler_fits_its_bucket_and_every_request_gets_its_tokens(
    case: Case,
) -> None:
    run = Run(case)
    assert run.outputs() == run.alone()
    assert run.pool.num_used == 0
    counts = run.scheduler.counts
    event(f"preempted: {counts.preemptions > 0}, hits: {counts.prefix_hits > 0}")


def test_the_examples_hold_what_the_property_is_about() -> None:
    tight, again = Run(TIGHT), Run(AGAIN)
    tight.outputs()
    assert tight.scheduler.counts.preemptions > 0
    again.outputs()
    assert again.scheduler.counts.prefix_hits == 2 * 27
    first, *_, last = (
        plan for plan in again.plans if plan.kinds[0].row_blocks and plan.rows[0].start < 28
    )
    # The second request finds what the first one computes in the same step.
    assert [len(first.prefill), len(first.decode)] == [1, 1]
    # The last one brings nine blocks from the cache for a step of a single token.
    assert [len(last.prefill), len(last.decode), len(last.kinds[0].row_blocks)] == [0, 1, 10]
    assert again.buckets.choose(last).prefill_rows > 0
    many = Run(MANY)
    many.outputs()
    hits = 39 // 3
    assert many.scheduler.counts.prefix_hits == 4 * 3 * hits
    assert 4 * hits > many.buckets.max_row_edits[0]


def test_the_examples_over_several_kinds_hold_it_too() -> None:
    for case in (TIGHT_MIXED, TIGHT_LIMITED):
        tight = Run(case)
        tight.outputs()
        assert tight.scheduler.counts.preemptions > 0
    again, limited = Run(AGAIN_MIXED), Run(AGAIN_LIMITED)
    again.outputs()
    assert again.scheduler.counts.prefix_hits == 2 * 24
    hits = [plan for plan in again.plans if plan.rows[-1].start == 24 and plan.rows[-1].count == 4]
    # All blocks of the kind that sees everything, the last two of the window, none of the chunk.
    last = [[index for _, index, _ in kind.row_blocks] for kind in hits[-1].kinds]
    assert last == [[*range(10)], [10, 11, 12, 13], [6]]
    limited.outputs()
    assert limited.scheduler.counts.prefix_hits == 2 * 24
