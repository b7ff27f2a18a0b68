"""From a step's plan to its bucket and its control array."""

import dataclasses
from collections.abc import Sequence as SequenceOf

from moejax.arena.control import Control, KvEdits, KvLayout, Layout, RowControl
from moejax.arena.kinds import KvKind
from moejax.models.step import Bucket
from moejax_serving.scheduler import KvPlan, RowPlan, StepPlan
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
    kinds: tuple[KvKind, ...]
    max_model_len: int
    expert_edits: int = 0
    """Edits of expert tables that a step may carry."""

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
        kinds = tuple(
            KvLayout(layers=kind.pages_per_block, blocks=rows, row_edits=rows)
            for kind in self.kinds
        )
        layout = Layout(tokens=rows, rows=rows, expert_edits=self.expert_edits, kinds=kinds)
        return Bucket(layout=layout, prefill_rows=0, max_query=1)

    def prefill(self, tokens: int) -> Bucket:
        """Chunks of prompts, and one token of every other row."""
        decode_rows = self.decode_rows[-1]
        kinds = tuple(
            KvLayout(
                layers=kind.pages_per_block,
                blocks=self._most_begun(kind, tokens),
                row_edits=row_edits,
            )
            for kind, row_edits in zip(self.kinds, self.max_row_edits, strict=True)
        )
        layout = Layout(
            tokens=tokens + decode_rows,
            rows=self.prefill_rows + decode_rows,
            expert_edits=self.expert_edits,
            kinds=kinds,
        )
        return Bucket(layout=layout, prefill_rows=self.prefill_rows, max_query=tokens)

    def _most_begun(self, kind: KvKind, tokens: int) -> int:
        """Blocks of a kind that begin in a step: n tokens of a row begin ceil(n / block_size)."""
        return self.prefill_rows + tokens // kind.block_size + self.decode_rows[-1]

    @property
    def max_row_edits(self) -> tuple[int, ...]:
        """Per kind, entries of block tables that one step may change.

        The blocks that it begins, and all of one row: those of a hit come at once.
        """
        tokens = self.prefill_tokens[-1]
        return tuple(
            self._most_begun(kind, tokens) + kind.most_blocks(self.max_model_len, tokens)
            for kind in self.kinds
        )

    def choose(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds a plan."""
        if not plan.prefill:
            bucket = self.decode(next(n for n in self.decode_rows if n >= len(plan.decode)))
            pairs = zip(plan.kinds, bucket.layout.kinds, strict=True)
            if all(len(kind.row_blocks) <= layout.row_edits for kind, layout in pairs):
                return bucket
        wanted = plan.num_prefill_tokens
        return self.prefill(next(n for n in self.prefill_tokens if n >= wanted))


def make_buckets(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kinds: SequenceOf[KvKind],
    max_model_len: int,
    expert_edits: int = 0,
) -> Buckets:
    """Sizes that grow by a factor of four up to the limits."""
    return Buckets(
        decode_rows=_sizes(1, max_num_seqs),
        prefill_tokens=_sizes(min(32, max_num_batched_tokens), max_num_batched_tokens),
        prefill_rows=min(MAX_PREFILL_SEQS, max_num_seqs, max_num_batched_tokens),
        kinds=tuple(kinds),
        max_model_len=max_model_len,
        expert_edits=expert_edits,
    )


def _sizes(first: int, last: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * _GROWTH, last))
    return tuple(sizes)


def places(plan: StepPlan, bucket: Bucket) -> list[tuple[int, RowPlan]]:
    """(row of the step, plan) of all rows: those of one token stand behind those of prompts."""
    return [*enumerate(plan.prefill), *enumerate(plan.decode, bucket.prefill_rows)]


def make_control(
    plan: StepPlan, bucket: Bucket, expert_edits: SequenceOf[tuple[int, int, int, int]] = ()
) -> Control:
    """What the device is told of a plan, and of the experts."""
    num_empty = bucket.prefill_rows - len(plan.prefill) if plan.decode else 0
    return Control(
        rows=[
            *map(_row, plan.prefill),
            *[_EMPTY] * num_empty,
            *map(_row, plan.decode),
        ],
        kv_edits=[*map(_kv_edits, plan.kinds)],
        expert_edits=expert_edits,
        want_logprobs=wants_logprobs(plan),
    )


def _kv_edits(kind: KvPlan) -> KvEdits:
    return KvEdits(
        blocks=[(block.number, *block.pages) for block in kind.new_blocks],
        rows=[(_row_number(seq), index, block.number) for seq, index, block in kind.row_blocks],
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
        long_rope=sequence.uses_long_rope,
    )


def _targets(row: RowPlan) -> SequenceOf[int]:
    if not row.sequence.wants_prompt_logprobs:
        return ()
    prompt = row.sequence.prompt_token_ids
    after = prompt[row.start + 1 : row.start + row.count + 1]
    return [*after, *[-1] * (row.count - len(after))]
