"""kv_blocks: made of pages, shared by sequences, kept for prompts that begin the same.

A block that is full of known tokens has a key, which says what it holds. It stays in the cache when
its last user leaves, until its pages are needed: the block that was left longest ago goes first.
"""

import collections
import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Sequence

from moejax_serving.pages import Owner, PagePool


@dataclasses.dataclass(slots=True, eq=False)
class KvBlock:
    """`block_size` tokens of all layers: one page per layer."""

    number: int
    pages: tuple[int, ...]
    users: int = 1
    key: bytes | None = None


class BlockPool:
    """kv_blocks made of pages of a pool. Block 0 is poison and never handed out."""

    def __init__(self, pages: PagePool, pages_per_block: int, max_blocks: int) -> None:
        self._pages = pages
        self._pages_per_block = pages_per_block
        self._free = list(range(max_blocks - 1, 0, -1))
        self._blocks: dict[int, KvBlock] = {}
        self._cached: dict[bytes, KvBlock] = {}
        self._idle: collections.OrderedDict[int, KvBlock] = collections.OrderedDict()
        self.max_blocks = max_blocks

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return len(self._blocks) - len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that only the cache holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that could be taken."""
        fresh = min(len(self._free), self._pages.num_free // self._pages_per_block)
        return fresh + self.num_idle

    def take(self) -> KvBlock | None:
        """A block of one user, from free pages or from the cache; None if there is none."""
        if not self._free or self._pages.num_free < self._pages_per_block:
            if not self._idle:
                return None
            _, oldest = self._idle.popitem(last=False)
            self._drop(oldest)
        pages = self._pages.take(self._pages_per_block, Owner.KV)
        if pages is None:
            raise AssertionError("a block that was dropped gave back too few pages")
        block = KvBlock(self._free.pop(), tuple(pages))
        self._blocks[block.number] = block
        return block

    def find(self, keys: Iterable[bytes]) -> list[KvBlock]:
        """The blocks of the first keys, up to the first that is not there."""
        found = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, block: KvBlock) -> None:
        """Adds a user to a block that was found."""
        self._require(block)
        if block.users == 0:
            del self._idle[block.number]
        block.users += 1

    def register(self, block: KvBlock, key: bytes) -> None:
        """Says what a full block holds. Of two with the same key the first one is found."""
        self._require(block)
        if block.key is None and key not in self._cached:
            block.key = key
            self._cached[key] = block

    def release(self, blocks: Sequence[KvBlock]) -> None:
        """Takes a user from each of a sequence's blocks; its last block will go first."""
        for block in reversed(blocks):
            self._require(block)
            if block.users == 0:
                raise ValueError(f"kv_block {block.number} has no user")
            block.users -= 1
            if block.users == 0 and block.key is None:
                self._drop(block)
            elif block.users == 0:
                self._idle[block.number] = block

    def forget(self, blocks: Iterable[KvBlock]) -> None:
        """Takes blocks out of the cache: what they hold is not to be used again."""
        for block in blocks:
            self._require(block)
            if block.key is not None:
                del self._cached[block.key]
                block.key = None
            if block.users == 0:
                del self._idle[block.number]
                self._drop(block)

    def forget_all(self) -> None:
        """Empties the cache."""
        self.forget(list(self._cached.values()))

    def _drop(self, block: KvBlock) -> None:
        if block.key is not None:
            del self._cached[block.key]
        del self._blocks[block.number]
        self._pages.give_back(block.pages)
        self._free.append(block.number)

    def _require(self, block: KvBlock) -> None:
        if self._blocks.get(block.number) is not block:
            raise ValueError(f"kv_block {block.number} is not held")

    def check(self) -> None:
        """Raises if a block is lost, or in two states, or its pages are not accounted as KV."""
        if len(self._free) + len(self._blocks) + 1 != self.max_blocks:
            raise AssertionError(
                f"{len(self._free)} free + {len(self._blocks)} held + poison != {self.max_blocks}"
            )
        pages = [page for block in self._blocks.values() for page in block.pages]
        if len(set(pages)) != len(pages) or len(pages) != self._pages.count(Owner.KV):
            raise AssertionError(
                f"kv_blocks hold {len(pages)} pages, the pool counts {self._pages.count(Owner.KV)}"
            )
        for block in self._blocks.values():
            if (block.users == 0) != (block.number in self._idle):
                raise AssertionError(f"kv_block {block.number} has {block.users} users")
            if block.users == 0 and block.key is None:
                raise AssertionError(f"kv_block {block.number} is kept for nobody")
        for key, block in self._cached.items():
            if block.key != key or self._blocks.get(block.number) is not block:
                raise AssertionError(f"the cache holds kv_block {block.number}, which is not")


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block that follows another: it stands for all tokens up to its end.

    SHA-256, since blocks are shared between clients: a collision would show one the other's text.
    """
    return hashlib.sha256(parent + array("i", tokens).tobytes()).digest()


def root_key(*parts: str) -> bytes:
    """The key before the first block: what beside its tokens decides what a block holds."""
    return hashlib.sha256("\0".join(parts).encode()).digest()
