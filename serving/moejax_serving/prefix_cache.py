"""What sequences find and leave in the prefix cache. Plain Python: no device, no arrays.

Each kind of KV has its own chain of keys over the tokens of a sequence, since blocks of different
kinds may differ in size.
"""

import collections.abc
import dataclasses
import math

from moejax.arena.kinds import KvKind
from moejax_serving.kv_blocks import BlockPool, KvBlock, next_key
from moejax_serving.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Hits:
    """What a sequence need not compute."""

    num_tokens: int
    """From its start."""
    blocks: tuple[tuple[KvBlock, ...], ...]
    """Per kind those that the token after these sees, up to `num_tokens`."""

    @property
    def num_idle_pages(self) -> int:
        """Pages of the blocks that only the cache holds."""
        return sum(len(b.pages) for blocks in self.blocks for b in blocks if b.users == 0)


class PrefixCache:
    """Finds and registers blocks by the tokens that they stand for."""

    def __init__(
        self, blocks: BlockPool, kinds: collections.abc.Sequence[KvKind], root: bytes | None
    ) -> None:
        """`root`: what the keys start from; None: nothing is ever found."""
        self._blocks = blocks
        self._kinds = tuple(kinds)
        self._root = root
        # Where the blocks of all kinds end together.
        self._step = math.lcm(*(kind.block_size for kind in kinds))

    @property
    def is_on(self) -> bool:
        return self._root is not None

    def find(self, sequence: Sequence) -> Hits:
        """The longest part of a sequence that is there, but never its last token."""
        # The log-probabilities of a prompt need all of it to be computed.
        if self._root is None or sequence.wants_prompt_logprobs:
            return Hits(0, ((),) * len(self._kinds))
        length = self._floor(sequence.num_known - 1)
        for number, kind in enumerate(self._kinds):
            if not kind.forgets:
                found = self._blocks.find(self._keys(sequence, number, length))
                length = self._floor(len(found) * kind.block_size)
        runs = [
            (kind, self._runs(sequence, number, length))
            for number, kind in enumerate(self._kinds)
            if kind.forgets
        ]
        while any(run[length // kind.block_size] > kind.first_block(length) for kind, run in runs):
            length -= self._step
        return Hits(length, tuple(self._seen(sequence, n, length) for n in range(len(self._kinds))))

    def _floor(self, num_tokens: int) -> int:
        return num_tokens // self._step * self._step

    def _runs(self, sequence: Sequence, number: int, length: int) -> list[int]:
        """Before each block and at the end: the first of the cached blocks that lead up to it."""
        runs = [0]
        for index, key in enumerate(self._keys(sequence, number, length)):
            runs.append(index + 1 if self._blocks.get(key) is None else runs[-1])
        return runs

    def _seen(self, sequence: Sequence, number: int, length: int) -> tuple[KvBlock, ...]:
        """The blocks of a kind that a token at position `length` sees, without its own."""
        first = self._kinds[number].first_block(length)
        return tuple(self._blocks.find(self._keys(sequence, number, length)[first:]))

    def _keys(self, sequence: Sequence, number: int, num_tokens: int) -> list[bytes]:
        """The keys of the blocks of a kind that are full of the first so many known tokens."""
        if self._root is None:
            raise AssertionError("there is no prefix cache")
        keys, size = sequence.kv[number].keys, self._kinds[number].block_size
        count = num_tokens // size
        while len(keys) < count:
            at = len(keys) * size
            parent = keys[-1] if keys else self._chain_root(self._root, number, sequence)
            keys.append(next_key(parent, sequence.tokens(at, at + size)))
        return keys[:count]

    @staticmethod
    def _chain_root(root: bytes, number: int, sequence: Sequence) -> bytes:
        """Blocks of other kinds, or turned by other factors, hold something else."""
        return next_key(root, (number, sequence.uses_long_rope))

    def offer(self, sequence: Sequence) -> None:
        """Registers the blocks that are full of known tokens and that the sequence still holds.

        A block may be found before its step has run: steps run in order, and within one each layer
        writes all KV before it reads any.
        """
        if self._root is None:
            return
        length = min(sequence.num_cached, sequence.num_known)
        for number, kind in enumerate(self._kinds):
            kv = sequence.kv[number]
            full = length // kind.block_size
            if full <= kv.num_registered:
                continue
            keys = self._keys(sequence, number, length)
            # Blocks may have left the window before their tokens were known.
            for index in range(max(kv.first, kv.num_registered), full):
                self._blocks.register(kv.blocks[index - kv.first], keys[index])
            kv.num_registered = full

    def forget(self, sequence: Sequence) -> None:
        """Forgets all that the sequence may have written, also what it has given back."""
        for kv in sequence.kv:
            self._blocks.forget_keys(kv.keys)
