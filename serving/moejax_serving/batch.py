"""From a step's plan to its bucket and its control array."""

import dataclasses
from collections.abc import Sequence as SequenceOf

from moejax.arena.control import Control, Layout, RowControl
from moejax.models.step import Bucket
from moejax_serving.scheduler import RowPlan, StepPlan
from moejax_serving.sequence import Sequence

# Sequences whose prompts one step may process.
MAX_PREFILL_SEQS = 8
_GROWTH = 4
_EMPTY = RowControl(row=0, tokens=(), cached=0, sample=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The sizes that steps are padded to.

    A step of decodes alone has the smallest number of rows that holds it. A step with prompts has
    places for all rows to decode, and the smallest number of prompt tokens.
    """

    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    prefill_rows: int
    block_size: int
    blocks_per_row: int
    layers: int

    def all(self) -> list[Bucket]:
        """All buckets, the largest of each kind first."""
        return [
            *(self.decode(rows) for rows in reversed(self.decode_rows)),
            *(self.prefill(tokens) for tokens in reversed(self.prefill_tokens)),
        ]

    def largest(self) -> tuple[Bucket, Bucket]:
        """The largest decode bucket and the largest prefill bucket."""
        return self.decode(self.decode_rows[-1]), self.prefill(self.prefill_tokens[-1])

    def decode(self, rows: int) -> Bucket:
        """One token per row."""
        layout = Layout(
            tokens=rows,
            rows=rows,
            blocks=rows,
            row_edits=rows,
            expert_edits=0,
            layers=self.layers,
        )
        return Bucket(layout=layout, prefill_rows=0, max_query=1)

    def prefill(self, tokens: int) -> Bucket:
        """Chunks of prompts, and one token of every other row."""
        decode_rows = self.decode_rows[-1]
        # n tokens of a row begin at most ceil(n / block_size) blocks.
        blocks = self.prefill_rows + tokens // self.block_size + decode_rows
        layout = Layout(
            tokens=tokens + decode_rows,
            rows=self.prefill_rows + decode_rows,
            blocks=blocks,
            row_edits=self.max_row_edits,
            expert_edits=0,
            layers=self.layers,
        )
        return Bucket(layout=layout, prefill_rows=self.prefill_rows, max_query=tokens)

    @property
    def max_row_edits(self) -> int:
        """Entries of block tables that one step may change: all of a row's may come at once."""
        blocks = self.prefill_rows + self.prefill_tokens[-1] // self.block_size
        return blocks + self.decode_rows[-1] + self.blocks_per_row

    def choose(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds a plan."""
        if not plan.prefill:
            bucket = self.decode(next(n for n in self.decode_rows if n >= len(plan.decode)))
            if len(plan.row_blocks) <= bucket.layout.row_edits:
                return bucket
        wanted = plan.num_prefill_tokens
        return self.prefill(next(n for n in self.prefill_tokens if n >= wanted))


def make_buckets(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    blocks_per_row: int,
    layers: int,
) -> Buckets:
    """Sizes that grow by a factor of four up to the limits."""
    return Buckets(
        decode_rows=_sizes(1, max_num_seqs),
        prefill_tokens=_sizes(min(32, max_num_batched_tokens), max_num_batched_tokens),
        prefill_rows=min(MAX_PREFILL_SEQS, max_num_seqs, max_num_batched_tokens),
        block_size=block_size,
        blocks_per_row=blocks_per_row,
        layers=layers,
    )


def _sizes(first: int, last: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * _GROWTH, last))
    return tuple(sizes)


def places(plan: StepPlan, bucket: Bucket) -> list[tuple[int, RowPlan]]:
    """(row of the step, plan) of all rows: those of one token stand behind those of prompts."""
    return [*enumerate(plan.prefill), *enumerate(plan.decode, bucket.prefill_rows)]


def make_control(plan: StepPlan, bucket: Bucket) -> Control:
    """What the device is told of a plan."""
    num_empty = bucket.prefill_rows - len(plan.prefill) if plan.decode else 0
    return Control(
        rows=[
            *map(_row, plan.prefill),
            *[_EMPTY] * num_empty,
            *map(_row, plan.decode),
        ],
        block_edits=[(block.number, *block.pages) for block in plan.new_blocks],
        row_edits=[
            (_row_number(sequence), index, block.number)
            for sequence, index, block in plan.row_blocks
        ],
        want_logprobs=wants_logprobs(plan),
    )


def wants_logprobs(plan: StepPlan) -> bool:
    """Whether a row of the step wants the log-probabilities of its new token."""
    return any(
        row.sequence.params.logprobs is not None or row.sequence.forced_token_ids
        for row in plan.rows
        if row.sample
    )


def wants_targets(plan: StepPlan) -> bool:
    """Whether a row of the step wants log-probabilities of its prompt."""
    return any(row.sequence.wants_prompt_logprobs for row in plan.prefill)


def _row_number(sequence: Sequence) -> int:
    if sequence.row is None:
        raise AssertionError("a sequence without a row is in a step")
    return sequence.row


def _row(row: RowPlan) -> RowControl:
    sequence, params = row.sequence, row.sequence.params
    end = row.start + row.count
    tokens = sequence.tokens(row.start, end)
    # The newest token may still be on the device.
    tokens += [-1] * (row.count - len(tokens))
    # Of the token that this step chooses: as many are made before it.
    made = max(end - len(sequence.prompt_token_ids), 0)
    forced = sequence.forced_token_ids
    return RowControl(
        row=_row_number(sequence),
        tokens=tokens,
        cached=row.start,
        sample=row.sample,
        targets=_targets(row),
        forced=forced[made] if made < len(forced) else -1,
        seed=sequence.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=params.top_k,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        changes_logits=params.changes_logits,
        bans_stops=made < params.min_tokens,
    )


def _targets(row: RowPlan) -> SequenceOf[int]:
    if not row.sequence.wants_prompt_logprobs:
        return ()
    prompt = row.sequence.prompt_token_ids
    after = prompt[row.start + 1 : row.start + row.count + 1]
    return [*after, *[-1] * (row.count - len(after))]
