"""Which sequences run in the next step. Plain Python: no device, no arrays.

First come, first served. A sequence is admitted when the blocks that it can come to need are not
promised to others, so a running sequence never lacks memory. Prompts come first, in chunks.
"""

import collections
import dataclasses

from moejax.errors import CapacityError
from moejax_serving.pages import BlockPool, KvBlock
from moejax_serving.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlan:
    """A sequence's part of a step: `count` tokens from position `start`."""

    sequence: Sequence
    start: int
    count: int

    @property
    def sample(self) -> bool:
        """Whether the step sees the last token, so that the next one is chosen."""
        return self.start + self.count == self.sequence.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does."""

    rows: tuple[RowPlan, ...]
    new_blocks: tuple[tuple[Sequence, int, KvBlock], ...]
    """(sequence, index in its block table, block)"""

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return all(row.count == 1 for row in self.rows)

    @property
    def with_targets(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted."""
        return any(
            row.sequence.params.prompt_logprobs is not None and row.sequence.in_prefill
            for row in self.rows
        )


class Scheduler:
    """Queues of sequences over a pool of blocks."""

    def __init__(
        self,
        blocks: BlockPool,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_prefill_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self._blocks = blocks
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._promised = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._max_prefill_seqs = max_prefill_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def _needed(self, sequence: Sequence) -> int:
        # The last token is never cached: it is only given out.
        return -(-(sequence.max_num_tokens - 1) // self._block_size)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises CapacityError if it could not run even alone."""
        needed = self._needed(sequence)
        if needed > self._num_blocks:
            raise CapacityError(
                f"{sequence.max_num_tokens} tokens need {needed} kv_blocks of {self._block_size} "
                f"tokens, the memory holds {self._num_blocks}"
            )
        self.waiting.append(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do. Takes the blocks that it needs."""
        self._admit()
        rows = self._prefill_rows() or [
            RowPlan(sequence, sequence.num_cached, 1) for sequence in self.running
        ]
        if not rows:
            return None
        new = []
        for row in rows:
            blocks = row.sequence.blocks
            while len(blocks) * self._block_size < row.start + row.count:
                block = self._blocks.take()
                if block is None:
                    raise AssertionError("a promised kv_block is not there")
                new.append((row.sequence, len(blocks), block))
                blocks.append(block)
        return StepPlan(tuple(rows), tuple(new))

    def _admit(self) -> None:
        while self.waiting and self._free_rows:
            needed = self._needed(self.waiting[0])
            if self._promised + needed > self._num_blocks:
                return
            sequence = self.waiting.popleft()
            self._promised += needed
            sequence.row = self._free_rows.pop()
            self.running.append(sequence)

    def _prefill_rows(self) -> list[RowPlan]:
        rows: list[RowPlan] = []
        left = self._max_num_batched_tokens
        for sequence in self.running:
            if left == 0 or len(rows) == self._max_prefill_seqs:
                break
            if sequence.in_prefill:
                start = sequence.num_cached
                count = min(len(sequence.prompt_token_ids) - start, left)
                rows.append(RowPlan(sequence, start, count))
                left -= count
        return rows

    def finish(self, sequence: Sequence) -> list[KvBlock]:
        """Takes a sequence out, running or waiting; returns the blocks that became free."""
        if sequence.row is None:
            self.waiting.remove(sequence)
            return []
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        self._promised -= self._needed(sequence)
        sequence.row = None
        freed, sequence.blocks = sequence.blocks, []
        for block in freed:
            self._blocks.give_back(block)
        return freed

    def check(self) -> None:
        """Raises if blocks or promises do not add up. Tests call it after every step."""
        held = [block for sequence in self.running for block in sequence.blocks]
        if len(set(held)) != len(held) or len(held) != self._blocks.num_held:
            raise AssertionError(f"{len(held)} blocks in use, {self._blocks.num_held} held")
        if self._promised != sum(map(self._needed, self.running)):
            raise AssertionError(f"{self._promised} blocks promised")
        if any(sequence.blocks for sequence in self.waiting):
            raise AssertionError("a waiting sequence holds blocks")
        self._blocks.check()
