"""From a step's plan to its bucket and its control array."""

import dataclasses

from moejax.arena.control import Control, Layout, RowControl
from moejax.models.step import Bucket
from moejax_serving.scheduler import RowPlan, StepPlan

# Sequences whose prompts one step may process.
MAX_PREFILL_SEQS = 8
_GROWTH = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The sizes that steps are padded to."""

    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    prefill_rows: int
    block_size: int
    layers: int

    def largest(self) -> tuple[Bucket, Bucket]:
        """The largest decode bucket and the largest prefill bucket."""
        return (
            self.decode(self.decode_rows[-1]),
            self.prefill(self.prefill_tokens[-1], with_targets=True),
        )

    def decode(self, rows: int) -> Bucket:
        """One token per row."""
        layout = self._layout(rows, rows)
        return Bucket(layout=layout, max_query=1, with_targets=False)

    def prefill(self, tokens: int, *, with_targets: bool) -> Bucket:
        """Chunks of prompts."""
        layout = self._layout(tokens, self.prefill_rows)
        return Bucket(layout=layout, max_query=tokens, with_targets=with_targets)

    def _layout(self, tokens: int, rows: int) -> Layout:
        # n tokens of a row begin at most ceil(n / block_size) blocks.
        blocks = rows + tokens // self.block_size
        return Layout(tokens=tokens, rows=rows, blocks=blocks, expert_edits=0, layers=self.layers)

    def choose(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds a plan."""
        if plan.is_decode and not plan.with_targets:
            rows = next(n for n in self.decode_rows if n >= len(plan.rows))
            return self.decode(rows)
        tokens = next(n for n in self.prefill_tokens if n >= plan.num_tokens)
        return self.prefill(tokens, with_targets=plan.with_targets)


def make_buckets(
    *, max_num_seqs: int, max_num_batched_tokens: int, block_size: int, layers: int
) -> Buckets:
    """Sizes that grow by a factor of four up to the limits."""
    return Buckets(
        decode_rows=_sizes(1, max_num_seqs),
        prefill_tokens=_sizes(min(32, max_num_batched_tokens), max_num_batched_tokens),
        prefill_rows=min(MAX_PREFILL_SEQS, max_num_seqs, max_num_batched_tokens),
        block_size=block_size,
        layers=layers,
    )


def _sizes(first: int, last: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * _GROWTH, last))
    return tuple(sizes)


def make_control(plan: StepPlan) -> Control:
    """What the device is told of a plan."""
    return Control(
        rows=[_row(row) for row in plan.rows],
        block_edits=[(block.number, *block.pages) for _, _, block in plan.new_blocks],
        row_edits=[
            (_row_number(sequence.row), index, block.number)
            for sequence, index, block in plan.new_blocks
        ],
        want_logprobs=any(
            row.sequence.params.logprobs is not None or row.sequence.forced_token_ids
            for row in plan.rows
        ),
    )


def _row_number(row: int | None) -> int:
    if row is None:
        raise AssertionError("a sequence without a row is in a step")
    return row


def _row(row: RowPlan) -> RowControl:
    sequence, params = row.sequence, row.sequence.params
    tokens = [sequence.token(row.start + i) for i in range(row.count)]
    targets: list[int] = []
    if params.prompt_logprobs is not None and sequence.in_prefill:
        prompt = sequence.prompt_token_ids
        after = prompt[row.start + 1 : row.start + row.count + 1]
        targets = after + [-1] * (row.count - len(after))
    made = len(sequence.output_token_ids)
    return RowControl(
        row=_row_number(sequence.row),
        tokens=tokens,
        cached=row.start,
        sample=row.sample,
        targets=targets,
        forced=sequence.forced_token_ids[made] if made < len(sequence.forced_token_ids) else -1,
        seed=sequence.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=max(params.top_k, 0),
    )
