"""kv_blocks: made of pages, shared by sequences, kept for prompts that begin the same.

A block that is full of known tokens has a key, which says what it holds. It stays in the cache when
its last user leaves, until its pages are needed: the block that was left longest ago goes first,
whatever its kind.
"""

import collections
import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Sequence

from moejax.arena.kinds import KvKind
from moejax_serving.pages import Owner, PagePool


@dataclasses.dataclass(slots=True, eq=False)
class KvBlock:
    """`block_size` tokens of all layers of one kind: one page per layer."""

    number: int
    """Among the blocks of its kind."""
    kind: int
    pages: tuple[int, ...]
    users: int = 1
    key: bytes | None = None


class BlockPool:
    """kv_blocks made of pages of a pool. Block 0 of each kind is poison and never handed out."""

    def __init__(self, pages: PagePool, kinds: Sequence[KvKind], max_blocks: Sequence[int]) -> None:
        """`max_blocks`: of each kind, numbers that there are, that of poison included."""
        if len(kinds) != len(max_blocks):
            raise ValueError(f"{len(max_blocks)} numbers of kv_blocks for {len(kinds)} kinds")
        self.max_blocks = tuple(max_blocks)
        self._pages = pages
        self._pages_per_block = tuple(kind.pages_per_block for kind in kinds)
        self._free = [list(range(most - 1, 0, -1)) for most in max_blocks]
        self._blocks: set[KvBlock] = set()
        self._cached: dict[bytes, KvBlock] = {}
        self._idle: collections.OrderedDict[KvBlock, None] = collections.OrderedDict()
        self._num_idle_pages = 0

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return len(self._blocks) - len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that only the cache holds."""
        return len(self._idle)

    @property
    def num_used_pages(self) -> int:
        """Pages of the blocks that sequences hold."""
        return self._pages.count(Owner.KV) - self._num_idle_pages

    @property
    def num_available_pages(self) -> int:
        """Pages that blocks could be made of: free ones, and those of blocks that only the cache
        holds."""
        return self._pages.num_free + self._num_idle_pages

    def take(self, kind: int) -> KvBlock | None:
        """A block of one user, from free pages or those of the cache; None if there are too few.

        What the cache holds is dropped only as far as the block needs it.
        """
        count = self._pages_per_block[kind]
        if self.num_available_pages < count:
            return None
        if not self._free[kind]:
            oldest = next((block for block in self._idle if block.kind == kind), None)
            if oldest is None:
                return None
            self._drop(oldest)
        self.free_pages(count)
        pages = self._pages.take(count, Owner.KV)
        if pages is None:
            raise AssertionError("blocks that were dropped gave back too few pages")
        block = KvBlock(self._free[kind].pop(), kind, tuple(pages))
        self._blocks.add(block)
        return block

    def free_pages(self, n: int) -> bool:
        """Drops what only the cache holds until so many pages are free; says whether they are."""
        if self.num_available_pages < n:
            return False
        while self._pages.num_free < n:
            self._drop(next(iter(self._idle)))
        return True

    def get(self, key: bytes) -> KvBlock | None:
        """The block that holds what a key stands for, if the cache has one."""
        return self._cached.get(key)

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
            self._leave_idle(block)
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
                raise ValueError(f"{_name(block)} has no user")
            block.users -= 1
            if block.users == 0 and block.key is None:
                self._drop(block)
            elif block.users == 0:
                self._idle[block] = None
                self._num_idle_pages += len(block.pages)

    def forget(self, blocks: Iterable[KvBlock]) -> None:
        """Takes blocks out of the cache: what they hold is not to be used again."""
        for block in blocks:
            self._require(block)
            if block.users == 0:
                self._drop(block)
            elif block.key is not None:
                del self._cached[block.key]
                block.key = None

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """Takes out of the cache what it holds under these keys."""
        for key in keys:
            block = self._cached.get(key)
            if block is not None:
                self.forget([block])

    def forget_all(self) -> None:
        """Empties the cache."""
        self.forget(list(self._cached.values()))

    def _leave_idle(self, block: KvBlock) -> None:
        del self._idle[block]
        self._num_idle_pages -= len(block.pages)

    def _drop(self, block: KvBlock) -> None:
        """A block without users goes: its pages and its number are free."""
        if block in self._idle:
            self._leave_idle(block)
        if block.key is not None:
            del self._cached[block.key]
            block.key = None
        self._blocks.remove(block)
        self._pages.give_back(block.pages)
        self._free[block.kind].append(block.number)

    def _require(self, block: KvBlock) -> None:
        if block not in self._blocks:
            raise ValueError(f"{_name(block)} is not held")

    def check(self) -> None:
        """Raises if a block is lost, or in two states, or its pages are not accounted as KV."""
        for kind, most in enumerate(self.max_blocks):
            held = [block.number for block in self._blocks if block.kind == kind]
            if sorted(held + self._free[kind]) != list(range(1, most)):
                raise AssertionError(
                    f"kind {kind}: {len(self._free[kind])} free + {len(held)} held + poison "
                    f"are not the numbers of {most} kv_blocks"
                )
        pages = [page for block in self._blocks for page in block.pages]
        if len(set(pages)) != len(pages) or len(pages) != self._pages.count(Owner.KV):
            raise AssertionError(
                f"kv_blocks hold {len(pages)} pages, the pool counts {self._pages.count(Owner.KV)}"
            )
        idle_pages = sum(len(block.pages) for block in self._idle)
        if idle_pages != self._num_idle_pages:
            raise AssertionError(f"{idle_pages} pages are idle, {self._num_idle_pages} are counted")
        for block in self._blocks:
            if (block.users == 0) != (block in self._idle):
                raise AssertionError(f"{_name(block)} has {block.users} users")
            if block.users == 0 and block.key is None:
                raise AssertionError(f"{_name(block)} is kept for nobody")
        for key, block in self._cached.items():
            if block.key != key or block not in self._blocks:
                raise AssertionError(f"the cache holds {_name(block)}, which is not")


def _name(block: KvBlock) -> str:
    return f"kv_block {block.number} of kind {block.kind}"


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block that follows another: it stands for all tokens up to its end.

    SHA-256, since blocks are shared between clients: a collision would show one the other's text.
    """
    return hashlib.sha256(parent + array("i", tokens).tobytes()).digest()


def root_key(*parts: str) -> bytes:
    """The key before the first block: what beside its tokens decides what a block holds."""
    return hashlib.sha256("\0".join(parts).encode()).digest()
