"""Which sequences run in the next step. Plain Python: no device, no arrays.

First come, first served. Each step has one token of every sequence that decodes, and chunks of
prompts up to a budget. A sequence takes kv_blocks as it grows; where none is left the youngest
sequence gives its blocks back and waits to be computed again. Plans run ahead of the device: a
sequence's newest token may still be unknown.
"""

import bisect
import collections
import dataclasses

from moejax.errors import CapacityError
from moejax_serving.kv_blocks import BlockPool, KvBlock, next_key
from moejax_serving.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlan:
    """A sequence's part of a step: `count` tokens from position `start`."""

    sequence: Sequence
    start: int
    count: int
    sample: bool
    """Whether the step sees the last token, so that the next one is chosen."""
    starts_row: bool = False
    """Whether the sequence has got its row with this step."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does."""

    prefill: tuple[RowPlan, ...]
    """Rows of several tokens."""
    decode: tuple[RowPlan, ...]
    """Rows of one token."""
    new_blocks: tuple[KvBlock, ...]
    row_blocks: tuple[tuple[Sequence, int, KvBlock], ...]
    """(sequence, index in its block table, block): new ones, and those of the prefix cache"""

    @property
    def rows(self) -> tuple[RowPlan, ...]:
        return self.prefill + self.decode

    @property
    def num_prefill_tokens(self) -> int:
        return sum(row.count for row in self.prefill)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + len(self.decode)


@dataclasses.dataclass(slots=True)
class Counts:
    """What has happened since the counts were last taken."""

    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens that were looked for in the prefix cache."""
    prefix_hits: int = 0


class _Draft:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.prefill: list[RowPlan] = []
        self.decode: list[RowPlan] = []
        self.new_blocks: list[KvBlock] = []
        self.row_blocks: list[tuple[Sequence, int, KvBlock]] = []
        self.budget = budget

    def finish(self) -> StepPlan | None:
        if not self.prefill and not self.decode:
            return None
        return StepPlan(
            tuple(self.prefill), tuple(self.decode), tuple(self.new_blocks), tuple(self.row_blocks)
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
        max_row_edits: int,
        cache_root: bytes | None = None,
    ) -> None:
        """`cache_root`: what keys of blocks start from; None: no prefix cache."""
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.counts = Counts()
        self._blocks = blocks
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._max_prefill_seqs = max_prefill_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_row_edits = max_row_edits
        self._cache_root = cache_root

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises CapacityError if it could not run even alone."""
        # The last token is never cached: it is only given out.
        needed = self._blocks_for(sequence.max_num_tokens - 1)
        if needed > self._num_blocks:
            raise CapacityError(
                f"{sequence.max_num_tokens} tokens need {needed} kv_blocks of {self._block_size} "
                f"tokens, the memory holds {self._num_blocks}"
            )
        self.waiting.append(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None if no sequence can go on. Takes the blocks that it needs."""
        draft = _Draft(self._max_num_batched_tokens)
        preempted = self.counts.preemptions
        for sequence in list(self.running):
            if sequence.row is not None:  # not preempted for one before it
                self._plan_row(sequence, draft, starts_row=False)
        if self.counts.preemptions == preempted:
            self._admit(draft)
        return draft.finish()

    def _plan_row(self, sequence: Sequence, draft: _Draft, *, starts_row: bool) -> None:
        left = sequence.num_left
        is_decode = left == 1
        if left == 0 or (not is_decode and self._is_full(draft)):
            return
        count = 1 if is_decode else min(left, draft.budget)
        start = sequence.num_cached
        if not self._grow(sequence, start + count, draft):
            return
        row = RowPlan(sequence, start, count, count == left, starts_row)
        if is_decode:
            draft.decode.append(row)
        else:
            draft.prefill.append(row)
            draft.budget -= count
        sequence.num_cached += count
        sequence.num_pending += row.sample
        self.offer(sequence)

    def _is_full(self, draft: _Draft) -> bool:
        return draft.budget == 0 or len(draft.prefill) == self._max_prefill_seqs

    def _grow(self, sequence: Sequence, num_tokens: int, draft: _Draft) -> bool:
        """Gives a sequence blocks for as many tokens; False if it had to give up its own."""
        before = len(draft.new_blocks), len(draft.row_blocks)
        while len(sequence.blocks) * self._block_size < num_tokens:
            block = self._blocks.take()
            while block is None:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    del draft.new_blocks[before[0] :], draft.row_blocks[before[1] :]
                    return False
                block = self._blocks.take()
            draft.new_blocks.append(block)
            draft.row_blocks.append((sequence, len(sequence.blocks), block))
            sequence.blocks.append(block)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.counts.preemptions += 1
        self._leave(sequence)
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of those that run: its row and its blocks go back."""
        if sequence.row is None:
            raise AssertionError("a sequence without a row runs")
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = None
        self._blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_cached = sequence.num_registered = 0

    def _admit(self, draft: _Draft) -> None:
        while self.waiting and self._free_rows and not self._is_full(draft):
            sequence = self.waiting[0]
            if sequence.num_pending:  # it was preempted with a token in flight, which will come
                return
            hits = self._find_hits(sequence)
            if len(draft.row_blocks) + self._row_edits(sequence) > self._max_row_edits:
                return
            # What running prompts are still to take, and one block for the decodes among them.
            reserved = sum(
                max(0, self._blocks_for(other.num_tokens) - len(other.blocks))
                for other in self.running
            )
            needed = self._blocks_for(sequence.num_known) - len(hits) + bool(self.running)
            idle = sum(block.users == 0 for block in hits)
            if needed + reserved > self._blocks.num_available - idle:
                return
            self.waiting.popleft()
            self._start(sequence, hits, draft)

    def _row_edits(self, sequence: Sequence) -> int:
        return self._blocks_for(sequence.num_known)

    def _start(self, sequence: Sequence, hits: list[KvBlock], draft: _Draft) -> None:
        for index, block in enumerate(hits):
            self._blocks.share(block)
            sequence.blocks.append(block)
            draft.row_blocks.append((sequence, index, block))
        sequence.row = self._free_rows.pop()
        sequence.num_cached = len(hits) * self._block_size
        sequence.num_registered = len(hits)
        if sequence.num_hits is None:  # not when it comes back to its own blocks
            sequence.num_hits = sequence.num_cached
            if self._cache_root is not None:
                self.counts.prefix_queries += sequence.num_known
                self.counts.prefix_hits += sequence.num_cached
        bisect.insort(self.running, sequence, key=lambda running: running.number)
        self._plan_row(sequence, draft, starts_row=True)

    def _find_hits(self, sequence: Sequence) -> list[KvBlock]:
        """Blocks of the prefix cache that hold its first tokens, but never the last one."""
        # The log-probabilities of a prompt need all of it to be computed.
        if self._cache_root is None or sequence.wants_prompt_logprobs:
            return []
        full = (sequence.num_known - 1) // self._block_size
        return self._blocks.find(self._keys(sequence, full))

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """The keys of the first blocks of known tokens."""
        if self._cache_root is None:
            raise AssertionError("there is no prefix cache")
        keys, size = sequence.keys, self._block_size
        while len(keys) < count:
            at = len(keys) * size
            parent = keys[-1] if keys else self._cache_root
            keys.append(next_key(parent, sequence.tokens(at, at + size)))
        return keys[:count]

    def offer(self, sequence: Sequence) -> None:
        """Offers the blocks that are full of known tokens to the prefix cache.

        A block may be found before its step has run: steps run in order, and within one each layer
        writes all KV before it reads any.
        """
        if self._cache_root is None or sequence.row is None:
            return
        full = min(sequence.num_cached, sequence.num_known) // self._block_size
        if full > sequence.num_registered:
            keys = self._keys(sequence, full)
            for index in range(sequence.num_registered, full):
                self._blocks.register(sequence.blocks[index], keys[index])
            sequence.num_registered = full

    def finish(self, sequence: Sequence, *, is_broken: bool = False) -> None:
        """Takes a sequence out, running or waiting. What a broken one has cached is forgotten."""
        sequence.is_finished = True
        if sequence.row is None:
            self.waiting.remove(sequence)
            return
        if is_broken:
            self._blocks.forget(sequence.blocks)
        self._leave(sequence)

    def restart(self) -> None:
        """After a step that failed: all that ran is to be computed again, and nothing is cached."""
        for sequence in reversed(list(self.running)):
            self._leave(sequence)
            self.waiting.appendleft(sequence)
        for sequence in self.waiting:
            sequence.num_pending = 0
        self._blocks.forget_all()

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    @property
    def kv_usage(self) -> float:
        """The share of the cache that sequences hold."""
        return self._blocks.num_used / self._num_blocks

    def check(self) -> None:
        """Raises if rows, blocks or users do not add up. Tests call it after every step."""
        users = collections.Counter(
            block.number for sequence in self.running for block in sequence.blocks
        )
        held = {block.number: block for s in self.running for block in s.blocks}
        if any(held[number].users != count for number, count in users.items()):
            raise AssertionError("a kv_block has other users than the sequences that run")
        if len(held) != self._blocks.num_used:
            raise AssertionError(f"{len(held)} blocks in use, {self._blocks.num_used} held")
        rows = [sequence.row for sequence in self.running]
        if None in rows or len(set(rows)) != len(rows) or set(rows) & set(self._free_rows):
            raise AssertionError(f"rows {rows} run, {self._free_rows} are free")
        numbers = [sequence.number for sequence in self.running]
        if numbers != sorted(numbers):
            raise AssertionError("sequences do not run in the order of their arrival")
        if any(s.blocks or s.num_cached or s.row is not None for s in self.waiting):
            raise AssertionError("a waiting sequence holds something")
        for sequence in self.running:
            if len(sequence.blocks) * self._block_size < sequence.num_cached:
                raise AssertionError("tokens are cached in no block")
        self._blocks.check()
