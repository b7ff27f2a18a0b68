"""The kv_blocks that sequences hold, and how many more they may need. Plain Python.

Of a kind with a window or with chunks a sequence holds only what its further tokens see.
"""

import collections
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from moejax.arena.kinds import KvKind
from moejax_serving.kv_blocks import BlockPool
from moejax_serving.prefix_cache import Hits
from moejax_serving.sequence import Sequence


class Holdings:
    """Blocks of all kinds in the hands of sequences."""

    def __init__(self, blocks: BlockPool, kinds: SequenceOf[KvKind], max_query: int) -> None:
        """`max_query`: most tokens of a sequence in one step."""
        self._blocks = blocks
        self._kinds = tuple(kinds)
        self._limited = [n for n, kind in enumerate(kinds) if kind.forgets]
        self._max_query = max_query

    def most_blocks(self, num_tokens: int, num_left: int) -> list[int]:
        """Per kind, most blocks that a sequence holds at once until it has cached so many tokens.

        `num_left` of them are still to be processed.
        """
        max_query = min(self._max_query, num_left)
        return [kind.most_blocks(num_tokens, max_query) for kind in self._kinds]

    def pages_of(self, counts: Iterable[int]) -> int:
        """Pages of so many blocks of each kind."""
        return sum(
            count * kind.pages_per_block for count, kind in zip(counts, self._kinds, strict=True)
        )

    def most_pages(self, sequence: Sequence) -> int:
        """Most pages that a sequence holds at once from its start to its end."""
        # The last token is never cached: it is only given out.
        num_tokens = sequence.max_num_tokens - 1
        return self.pages_of(self.most_blocks(num_tokens, num_tokens))

    def pages_to_take(self, sequence: Sequence) -> int:
        """Pages that a running sequence is still to take for the tokens that there are."""
        left = sequence.num_left
        if left == 0:
            return 0
        most = self.most_blocks(sequence.num_tokens, left)
        return self.pages_of(
            max(0, count - len(kv.blocks)) for count, kv in zip(most, sequence.kv, strict=True)
        )

    def share(self, sequence: Sequence, hits: Hits) -> None:
        """Gives a sequence that starts the blocks that are there for it."""
        for kind, kv, blocks in zip(self._kinds, sequence.kv, hits.blocks, strict=True):
            kv.first = kind.first_block(hits.num_tokens)
            kv.num_registered = hits.num_tokens // kind.block_size
            kv.blocks.extend(blocks)
            for block in blocks:
                self._blocks.share(block)
        sequence.num_cached = hits.num_tokens

    def give_back(self, sequence: Sequence) -> None:
        """Gives back the blocks that no further token of a sequence sees.

        Steps in flight may see them: they run before any step that writes to them anew.
        """
        for number in self._limited:
            kv = sequence.kv[number]
            unseen = self._kinds[number].first_block(sequence.num_cached) - kv.first
            if unseen > 0:
                self._blocks.release(kv.blocks[:unseen])
                del kv.blocks[:unseen]
                kv.first += unseen

    def give_all_back(self, sequence: Sequence) -> None:
        """Leaves a sequence nothing that is cached."""
        for kv in sequence.kv:
            self._blocks.release(kv.blocks)
            kv.first, kv.blocks, kv.num_registered = 0, [], 0
        sequence.num_cached = 0

    def check(self, running: SequenceOf[Sequence]) -> None:
        """Raises if users of blocks do not add up, or a sequence holds other blocks than it may."""
        users = collections.Counter(block for s in running for kv in s.kv for block in kv.blocks)
        if any(block.users != count for block, count in users.items()):
            raise AssertionError("a kv_block has other users than the sequences that run")
        if len(users) != self._blocks.num_used:
            raise AssertionError(f"{len(users)} blocks in use, {self._blocks.num_used} held")
        for sequence in running:
            num_tokens = sequence.max_num_tokens - 1
            most = self.most_blocks(num_tokens, num_tokens)
            for number in range(len(self._kinds)):
                self._check_kind(sequence, number, most[number])
        self._blocks.check()

    def _check_kind(self, sequence: Sequence, number: int, most: int) -> None:
        kind, kv, cached = self._kinds[number], sequence.kv[number], sequence.num_cached
        if any(block.kind != number for block in kv.blocks):
            raise AssertionError(f"kind {number}: a block of another kind is held")
        if kv.end != kind.blocks_for(cached):
            raise AssertionError(f"kind {number}: {kv.end} blocks for {cached} tokens")
        if kv.first > kind.first_block(cached):
            raise AssertionError(f"kind {number}: token {cached} sees a block before {kv.first}")
        if len(kv.blocks) > most:
            raise AssertionError(f"kind {number}: {len(kv.blocks)} blocks are held, of {most}")
