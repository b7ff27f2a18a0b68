"""Who owns which page of the arena. Plain Python."""

import enum
from collections.abc import Iterable


class Owner(enum.Enum):
    """What a page holds."""

    KV = "kv"
    WEIGHTS = "weights"
    RESERVED = "reserved"
    """Of a transfer that has not been committed."""


class PagePool:
    """Hands out pages of one arena. Page 0 is poison and never handed out."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._owner: dict[int, Owner] = {}
        self._counts = dict.fromkeys(Owner, 0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def unowned(self) -> set[int]:
        """The pages that are free."""
        return set(self._free)

    def count(self, owner: Owner) -> int:
        """Pages that hold this."""
        return self._counts[owner]

    def take(self, n: int, owner: Owner) -> list[int] | None:
        """Takes n pages, or none at all: None means that there are too few."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        self._owner.update(dict.fromkeys(pages, owner))
        self._counts[owner] += n
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Frees pages. Raises, and frees none, if one of them is not owned."""
        given: dict[int, Owner] = {}
        for page in pages:
            if page not in self._owner or page in given:
                raise ValueError(f"page {page} is not owned")
            given[page] = self._owner[page]
        for page, owner in given.items():
            del self._owner[page]
            self._counts[owner] -= 1
        self._free.extend(given)

    def hand_over(self, pages: Iterable[int], owner: Owner) -> None:
        """Pages that are owned belong to another. Raises, and changes none, if one is free."""
        given = list(pages)
        if unowned := [page for page in given if page not in self._owner]:
            raise ValueError(f"page {unowned[0]} is not owned")
        for page in given:
            self._counts[self._owner[page]] -= 1
            self._owner[page] = owner
        self._counts[owner] += len(given)

    def owned_by(self, owner: Owner) -> set[int]:
        """The pages that hold this."""
        return {page for page, found in self._owner.items() if found is owner}

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
