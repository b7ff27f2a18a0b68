"""Kinds of KV: layers whose tokens take as many bytes and are seen for as long.

Plain Python: the scheduler uses it.
"""

import dataclasses

from moejax.config import Reach


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvKind:
    """Layers that cache as much of a token, for as long."""

    layers: tuple[int, ...]
    """Their numbers; a kv_block of this kind has one page for each."""
    token_bytes: int
    """Of one token in one layer."""
    reach: Reach
    block_size: int
    """Tokens of a kv_block, that is, of a page."""

    @property
    def forgets(self) -> bool:
        """Whether tokens are out of sight one day."""
        return self.reach != Reach()

    @property
    def pages_per_block(self) -> int:
        return len(self.layers)

    @property
    def token_words(self) -> int:
        return self.token_bytes // 4

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that the first tokens of a sequence begin."""
        return -(-num_tokens // self.block_size)

    def first_block(self, position: int) -> int:
        """The first block that a token at `position`, or one after it, still sees."""
        return max(0, int(self.reach.oldest(position))) // self.block_size

    def most_blocks(self, num_tokens: int, max_query: int) -> int:
        """Most blocks that a sequence holds at once while it comes to `num_tokens` tokens.

        A step brings at most `max_query` of them, and needs all that the first of these sees.
        """
        most = self.blocks_for(num_tokens)
        seen = self.reach.window or self.reach.chunk
        if seen is None:
            return most
        # Tokens from the first that is seen to the last that is new lie in so many blocks at most.
        return min(most, -(-(seen + max_query - 2) // self.block_size) + 1)
