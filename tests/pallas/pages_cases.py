"""What pages are written with, and what is in them afterwards, by loops."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def random_words(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)


class Case(NamedTuple):
    tokens: int
    kv_heads: int
    size: int
    value_size: int
    """0: keys only."""
    block_size: int
    dtype: np.dtype = BF16
    words: int = 1024
    """Of a page."""


CASES = {
    "one token": Case(1, 2, 64, 64, 8),
    "odd number of tokens": Case(13, 2, 64, 64, 8),
    "float32": Case(13, 2, 64, 64, 4, F32),
    "latent": Case(7, 1, 80, 0, 24),
    "latent, float32": Case(7, 1, 72, 0, 8, F32),
    "odd values": Case(9, 3, 5, 5, 16, words=256),
    "keys and values of other sizes": Case(9, 2, 24, 16, 8),
    "a page that is not full": Case(9, 1, 64, 64, 11, words=768),
}
LARGE = {
    "8 heads of 128": Case(64, 8, 128, 128, 16, words=16384),
    "prefill": Case(2048, 4, 128, 128, 32, words=16384),
    "latent of 576": Case(300, 1, 576, 0, 56, words=16384),
    "2 heads of 256, float32": Case(33, 2, 256, 256, 8, F32, words=8192),
}


class Inputs(NamedTuple):
    pages: np.ndarray
    k: np.ndarray
    v: np.ndarray | None
    block_pages: np.ndarray
    block_tables: np.ndarray
    layer: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    valid: np.ndarray


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Tokens at different places; of nine or more some are out of range, poison or invalid."""
    rng = np.random.default_rng(seed)
    rows, blocks = 3, max(9, -(-2 * case.tokens // (3 * case.block_size)))
    kv_blocks = rows * blocks + 2
    pages = random_words(kv_blocks + 5, case.words, seed=seed)
    tables = rng.permutation(kv_blocks)[: rows * blocks].reshape(rows, blocks)
    block_pages = 1 + rng.permutation(len(pages) - 1)[:kv_blocks]
    at = rng.permutation(rows * blocks * case.block_size)[: case.tokens]
    row, position = at // (blocks * case.block_size), at % (blocks * case.block_size)
    valid = rng.random(case.tokens) < 0.9
    block_pages[0] = 0
    if case.tokens >= 9:
        valid[:9] = np.arange(9) > 0
        # Rows end where the next one begins: its neighbour must not be read instead.
        position[1] = blocks * case.block_size
        row[2], row[3] = -1, rows
        number = tables.reshape(-1)[at // case.block_size]
        block_pages[number[4:7]] = [-1, len(pages), 0]
        tables.reshape(-1)[at[7:9] // case.block_size] = [-1, kv_blocks]

    def values(size: int) -> np.ndarray:
        # Any bits, of which many are NaN: values are moved, not computed with.
        count = case.tokens * case.kv_heads * size * case.dtype.itemsize
        bits = rng.integers(0, 256, count, np.uint8)
        return bits.view(case.dtype).reshape(case.tokens, case.kv_heads, size)

    return Inputs(
        pages,
        values(case.size),
        values(case.value_size) if case.value_size else None,
        np.stack([np.roll(block_pages, 1), block_pages]).astype(np.int32),
        tables.astype(np.int32),
        np.array(1, np.int32),
        row.astype(np.int32),
        position.astype(np.int32),
        valid,
    )


def expected_kv(inputs: Inputs, block_size: int) -> np.ndarray:
    pages, block_pages = inputs.pages.copy(), inputs.block_pages[inputs.layer]
    for token in np.flatnonzero(inputs.valid):
        row, position = inputs.rows[token], inputs.positions[token]
        parts = [part[token].reshape(-1) for part in (inputs.k, inputs.v) if part is not None]
        words = np.concatenate(parts).view(np.uint32)
        inside = 0 <= row < len(inputs.block_tables)
        inside = inside and position // block_size < inputs.block_tables.shape[1]
        block = inputs.block_tables[row, position // block_size] if inside else -1
        page = block_pages[block] if 0 <= block < len(block_pages) else 0
        if 0 < page < len(pages):
            place = position % block_size
            pages[page, place * len(words) : (place + 1) * len(words)] = words
    return pages


class Copy(NamedTuple):
    pages: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    staged: np.ndarray
    host: np.ndarray


def make_copy(words: int, seed: int = 0, pages: int = 60, count: int = 20) -> Copy:
    """Sources and targets, of which some are 0 or out of range."""
    rng = np.random.default_rng(seed)
    ids = 1 + rng.permutation(pages - 1)[: 2 * count]
    host_pages = 7
    sources = np.where(rng.random(count) < 0.4, ~rng.integers(0, host_pages, count), ids[:count])
    targets = ids[count:]
    out = [0, pages, 2**31 - 1, -(2**31), -host_pages - 1]
    number = rng.permutation(count)
    sources[number[: len(out)]] = out
    targets[number[len(out) : 2 * len(out) + 1]] = [*out, -1]
    return Copy(
        random_words(pages, words, seed=seed),
        sources.astype(np.int32),
        targets.astype(np.int32),
        random_words(count, words, seed=seed + 1),
        random_words(host_pages, words, seed=seed + 2),
    )


def expected_commit(copy: Copy) -> np.ndarray:
    pages = copy.pages.copy()
    for target, words in zip(copy.targets, copy.staged, strict=True):
        if 0 < target < len(pages):
            pages[target] = words
    return pages


def expected_move(copy: Copy, has_host: bool) -> np.ndarray:
    pages = copy.pages.copy()
    for source, target in zip(copy.sources, copy.targets, strict=True):
        if not 0 < target < len(pages):
            continue
        if 0 < source < len(pages):
            pages[target] = copy.pages[source]
        elif has_host and -len(copy.host) <= source < 0:
            pages[target] = copy.host[~source]
    return pages
