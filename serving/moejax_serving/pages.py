"""Who owns which page of the arena, and the kv_blocks that are made of pages. Plain Python."""

import dataclasses
import enum
from collections.abc import Iterable


class Owner(enum.Enum):
    """What a page holds."""

    KV = "kv"
    WEIGHTS = "weights"


class PagePool:
    """Hands out pages of one arena. Page 0 is poison and never handed out."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._owner: dict[int, Owner] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, owner: Owner) -> int:
        """Pages that hold this."""
        return sum(1 for held in self._owner.values() if held is owner)

    def take(self, n: int, owner: Owner) -> list[int] | None:
        """Takes n pages, or none at all: None means that there are too few."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        self._owner.update(dict.fromkeys(pages, owner))
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Frees pages. Raises, and frees none, if one of them is not owned."""
        given: dict[int, Owner] = {}
        for page in pages:
            if page not in self._owner or page in given:
                raise ValueError(f"page {page} is not owned")
            given[page] = self._owner[page]
        for page in given:
            del self._owner[page]
        self._free.extend(given)

    def check(self) -> None:
        """Raises if a page is lost, owned and free at once, or free twice."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is free twice")
        if free & set(self._owner):
            raise AssertionError(f"pages free and owned: {sorted(free & set(self._owner))[:5]}")
        if len(free) + len(self._owner) + 1 != self.num_pages or 0 in free or 0 in self._owner:
            raise AssertionError(
                f"{len(free)} free + {len(self._owner)} owned + poison != {self.num_pages} pages"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class KvBlock:
    """`block_size` tokens of all layers: one page per layer."""

    number: int
    pages: tuple[int, ...]


class BlockPool:
    """kv_blocks made of pages of a pool. Block 0 is poison and never handed out."""

    def __init__(self, pages: PagePool, pages_per_block: int, max_blocks: int) -> None:
        self._pages = pages
        self._pages_per_block = pages_per_block
        self._free = list(range(max_blocks - 1, 0, -1))
        self._held: dict[int, KvBlock] = {}
        self.max_blocks = max_blocks

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take(self) -> KvBlock | None:
        """A block of free pages, or None if there are too few."""
        if not self._free:
            return None
        pages = self._pages.take(self._pages_per_block, Owner.KV)
        if pages is None:
            return None
        block = KvBlock(self._free.pop(), tuple(pages))
        self._held[block.number] = block
        return block

    def give_back(self, block: KvBlock) -> None:
        """Frees a block and its pages. Raises if it is not held."""
        if self._held.get(block.number) is not block:
            raise ValueError(f"kv_block {block.number} is not held")
        del self._held[block.number]
        self._pages.give_back(block.pages)
        self._free.append(block.number)

    def check(self) -> None:
        """Raises if a block is lost or its pages are not accounted as KV."""
        if len(self._free) + len(self._held) + 1 != self.max_blocks:
            raise AssertionError(
                f"{len(self._free)} free + {len(self._held)} held + poison != {self.max_blocks}"
            )
        pages = [page for block in self._held.values() for page in block.pages]
        if len(set(pages)) != len(pages) or len(pages) != self._pages.count(Owner.KV):
            raise AssertionError(
                f"kv_blocks hold {len(pages)} pages, the pool counts {self._pages.count(Owner.KV)}"
            )
