"""Pools of one kind of kv_blocks, for tests."""

from moejax_serving.kv_blocks import BlockPool, KvBlock
from moejax_serving.pages import PagePool
from serving.scheduling import make_kind


def pool_of(pages: PagePool, *, pages_per_block: int = 2, max_blocks: int) -> BlockPool:
    """A pool of one kind."""
    return BlockPool(pages, [make_kind(layers=pages_per_block)], [max_blocks])


def make_pool(num_blocks: int, pages_per_block: int = 2) -> BlockPool:
    """A pool of one kind, whose pages suffice for exactly its blocks."""
    pages = PagePool(1 + num_blocks * pages_per_block)
    return pool_of(pages, pages_per_block=pages_per_block, max_blocks=num_blocks + 1)


def take(pool: BlockPool, key: bytes | None = None, kind: int = 0) -> KvBlock:
    """A block of one user; with a key it is in the cache."""
    block = pool.take(kind)
    assert block is not None
    if key is not None:
        pool.register(block, key)
    return block


def counts(pool: BlockPool) -> tuple[int, int]:
    return pool.num_used, pool.num_idle


def page_counts(pool: BlockPool) -> tuple[int, int]:
    return pool.num_used_pages, pool.num_available_pages
