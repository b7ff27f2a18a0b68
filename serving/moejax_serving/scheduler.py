"""Which sequences run in the next step. Plain Python: no device, no arrays.

First come, first served. Each step has one token of every sequence that decodes, and chunks of
prompts up to a budget. A sequence takes kv_blocks of each kind as it grows, and gives back those
that have left the window; where no pages are left the youngest sequence gives all its blocks back
and waits to be computed again. Plans run ahead of the device: a sequence's newest token may still
be unknown.
"""

import bisect
import collections
import collections.abc
import dataclasses

from moejax.arena.kinds import KvKind
from moejax.errors import CapacityError
from moejax_serving.holdings import Holdings
from moejax_serving.kv_blocks import BlockPool, KvBlock
from moejax_serving.prefix_cache import Hits, PrefixCache
from moejax_serving.sequence import Sequence, SequenceKv


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
class KvPlan:
    """What a step changes in the tables of one kind of KV."""

    new_blocks: tuple[KvBlock, ...] = ()
    row_blocks: tuple[tuple[Sequence, int, KvBlock], ...] = ()
    """(sequence, index in its block table, block): new ones, and those of the prefix cache"""


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does."""

    prefill: tuple[RowPlan, ...]
    """Rows of several tokens."""
    decode: tuple[RowPlan, ...]
    """Rows of one token."""
    kinds: tuple[KvPlan, ...]

    @property
    def rows(self) -> tuple[RowPlan, ...]:
        return self.prefill + self.decode

    @property
    def new_blocks(self) -> tuple[KvBlock, ...]:
        """Of all kinds."""
        return tuple(block for kind in self.kinds for block in kind.new_blocks)

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

    def __init__(self, budget: int, num_kinds: int) -> None:
        self.prefill: list[RowPlan] = []
        self.decode: list[RowPlan] = []
        self.new_blocks: list[list[KvBlock]] = [[] for _ in range(num_kinds)]
        self.row_blocks: list[list[tuple[Sequence, int, KvBlock]]] = [[] for _ in range(num_kinds)]
        self.budget = budget

    def finish(self) -> StepPlan | None:
        if not self.prefill and not self.decode:
            return None
        kinds = zip(map(tuple, self.new_blocks), map(tuple, self.row_blocks), strict=True)
        return StepPlan(tuple(self.prefill), tuple(self.decode), tuple(KvPlan(*k) for k in kinds))


class Scheduler:
    """Queues of sequences over a pool of blocks."""

    def __init__(
        self,
        blocks: BlockPool,
        *,
        kinds: collections.abc.Sequence[KvKind],
        num_pages: int,
        max_num_seqs: int,
        max_prefill_seqs: int,
        max_num_batched_tokens: int,
        max_row_edits: collections.abc.Sequence[int],
        cache_root: bytes | None = None,
        make_room: collections.abc.Callable[[int], bool] | None = None,
    ) -> None:
        """Makes empty queues.

        Args:
            blocks: the blocks of all kinds; a kind may have as many as the pages make.
            kinds: of KV.
            num_pages: most pages that KV may take.
            max_num_seqs: rows.
            max_prefill_seqs: rows of several tokens that a step may have.
            max_num_batched_tokens: tokens of all of these.
            max_row_edits: of each kind, entries of block tables that a step may change.
            cache_root: what keys of blocks start from; None: no prefix cache.
            make_room: asked for so many more pages before a sequence is preempted or has to wait;
                says whether they are there now. None: nobody has any to give.
        """
        for number, (kind, most) in enumerate(zip(kinds, blocks.max_blocks, strict=True)):
            if most <= num_pages // kind.pages_per_block:
                raise ValueError(f"kind {number}: {most} numbers are too few for {num_pages} pages")
        if len(max_row_edits) != len(kinds):
            raise ValueError(f"{len(max_row_edits)} numbers of row edits for {len(kinds)} kinds")
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.counts = Counts()
        self._blocks = blocks
        self._kinds = tuple(kinds)
        self._num_pages = num_pages
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._max_prefill_seqs = max_prefill_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_row_edits = tuple(max_row_edits)
        self._make_room = make_room or (lambda pages: False)
        self._cache = PrefixCache(blocks, kinds, cache_root)
        self._holdings = Holdings(blocks, kinds, max_num_batched_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises CapacityError if it could not run even alone."""
        needed = self._holdings.most_pages(sequence)
        if needed > self._num_pages:
            raise CapacityError(
                f"{sequence.max_num_tokens} tokens need {needed} pages of KV, "
                f"the memory holds {self._num_pages}"
            )
        sequence.kv = tuple(SequenceKv() for _ in self._kinds)
        self.waiting.append(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None if no sequence can go on. Takes the blocks that it needs."""
        draft = _Draft(self._max_num_batched_tokens, len(self._kinds))
        preempted = self.counts.preemptions
        # Before any sequence takes blocks.
        for sequence in self.running:
            self._holdings.give_back(sequence)
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
        grown = []
        for number, kind in enumerate(self._kinds):
            kv = sequence.kv[number]
            for index in range(kv.end, kind.blocks_for(num_tokens)):
                block = self._take(number, sequence)
                if block is None:
                    return False
                kv.blocks.append(block)
                grown.append((number, index, block))
        for number, index, block in grown:
            draft.new_blocks[number].append(block)
            draft.row_blocks[number].append((sequence, index, block))
        return True

    def _take(self, number: int, sequence: Sequence) -> KvBlock | None:
        """A block for a sequence; None if it was the one that had to give up its own."""
        pages = self._kinds[number].pages_per_block
        while (block := self._blocks.take(number)) is None:
            missing = pages - self._blocks.num_available_pages
            if missing > 0 and self._make_room(missing):
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
        return block

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
        self._holdings.give_all_back(sequence)

    def _admit(self, draft: _Draft) -> None:
        while self.waiting and self._free_rows and not self._is_full(draft):
            sequence = self.waiting[0]
            if sequence.num_pending:  # it was preempted with a token in flight, which will come
                return
            hits = self._cache.find(sequence)
            if not self._fits(sequence, hits, draft):
                return
            self.waiting.popleft()
            self._start(sequence, hits, draft)

    def _fits(self, sequence: Sequence, hits: Hits, draft: _Draft) -> bool:
        """Whether all known tokens fit beside what runs, and its blocks into the step's edits."""
        most = self._holdings.most_blocks(sequence.num_known, sequence.num_known - hits.num_tokens)
        for number, count in enumerate(most):
            if len(draft.row_blocks[number]) + count > self._max_row_edits[number]:
                return False
        # One block of each kind for the decodes among those that run.
        spare = bool(self.running)
        needed = self._holdings.pages_of(
            count - len(blocks) + spare for count, blocks in zip(most, hits.blocks, strict=True)
        )
        reserved = sum(map(self._holdings.pages_to_take, self.running))
        wanted = needed + reserved + hits.num_idle_pages
        missing = wanted - self._blocks.num_available_pages
        return missing <= 0 or self._make_room(missing)

    def _start(self, sequence: Sequence, hits: Hits, draft: _Draft) -> None:
        self._holdings.share(sequence, hits)
        for number, kv in enumerate(sequence.kv):
            for index, block in enumerate(kv.blocks, kv.first):
                draft.row_blocks[number].append((sequence, index, block))
        sequence.row = self._free_rows.pop()
        if sequence.num_hits is None:  # not when it comes back to its own blocks
            sequence.num_hits = sequence.num_cached
            if self._cache.is_on:
                self.counts.prefix_queries += sequence.num_known
                self.counts.prefix_hits += sequence.num_cached
        bisect.insort(self.running, sequence, key=lambda running: running.number)
        self._plan_row(sequence, draft, starts_row=True)

    def offer(self, sequence: Sequence) -> None:
        """Offers the blocks that are full of known tokens to the prefix cache."""
        if sequence.row is not None:
            self._cache.offer(sequence)

    def finish(self, sequence: Sequence, *, is_broken: bool = False) -> None:
        """Takes a sequence out, running or waiting. What a broken one has cached is forgotten."""
        sequence.is_finished = True
        if is_broken:
            self._cache.forget(sequence)
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def restart(self) -> None:
        """After a step that failed: all that ran is to be computed again, and nothing is cached."""
        for sequence in reversed(list(self.running)):
            self._leave(sequence)
            self.waiting.appendleft(sequence)
        for sequence in self.waiting:
            sequence.num_pending = 0
        self._blocks.forget_all()

    @property
    def num_available_pages(self) -> int:
        """Pages that blocks could be made of now."""
        return self._blocks.num_available_pages

    @property
    def kv_usage(self) -> float:
        """The share of the cache that sequences hold."""
        return self._blocks.num_used_pages / self._num_pages

    def check(self) -> None:
        """Raises if rows, blocks or users do not add up. Tests call it after every step."""
        rows = [sequence.row for sequence in self.running]
        if None in rows or len(set(rows)) != len(rows) or set(rows) & set(self._free_rows):
            raise AssertionError(f"rows {rows} run, {self._free_rows} are free")
        numbers = [sequence.number for sequence in self.running]
        if numbers != sorted(numbers):
            raise AssertionError("sequences do not run in the order of their arrival")
        for sequence in self.waiting:
            held = [kv.blocks for kv in sequence.kv if kv.blocks or kv.first or kv.num_registered]
            if held or sequence.num_cached or sequence.row is not None:
                raise AssertionError("a waiting sequence holds something")
        self._holdings.check(self.running)
