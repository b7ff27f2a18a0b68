"""Attention of queries over keys and values that lie in pages, in Triton.

A program takes an item: some neighbouring queries of one row. It multiplies them, for some of the
heads that share a KV head, with tiles of the keys that they see, by the online softmax of Milakov
and Gimelshein (2018) and Dao (2023, FlashAttention-2, algorithm 1). The keys of a single query may
be shared out among several programs, whose results `combine_kernel` adds up (Dao, Haziza, Massa and
Sizov 2023, Flash-Decoding).

Columns of keys are cut in two, MAIN and REST, where padding them to one power of two would take
more: 80 = 64 + 16, 192 = 128 + 64, and 576 = 512 + 64, a latent and the rotated part of its key.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The oldest key that a query sees."""
    found = position * 0
    if WINDOW > 0:
        found = tl.maximum(position - (WINDOW - 1), 0)
    if CHUNK > 0:
        found = tl.maximum(position, 0) // CHUNK * CHUNK
    return found


@triton.jit
def _share(number, KEYS: tl.constexpr, SPLITS: tl.constexpr, LEAST_TILES: tl.constexpr):
    """How many of `number` keys each split takes: whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(number, KEYS), SPLITS), LEAST_TILES) * KEYS


@triton.jit
def _blocks_of(table, start, end, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Blocks of the keys from `start` on. What the table says of others is not read: block 0."""
    key = start + tl.arange(0, KEYS)
    return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)


@triton.jit
def _columns(
    base, at, rows_used, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Columns FIRST to FIRST + SIZE of rows that begin at `at`; zeros beyond and in unused rows."""
    column = tl.arange(0, PADDED)
    mask = rows_used[:, None]
    if SIZE < PADDED:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(base + at[:, None] + (FIRST + column)[None, :], mask=mask, other=0.0)


@triton.jit
def _store_columns(
    base, at, rows_used, values,
    FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, PADDED)
    mask = rows_used[:, None] & (column < SIZE)[None, :]
    values = values.to(base.dtype.element_ty)
    tl.store(base + at[:, None] + (FIRST + column)[None, :], values, mask=mask)


@triton.jit
def attend_kernel(
    q,  # [tokens, HEADS, KEY_SIZE]
    pages,  # uint32[pages, PAGE_VALUES / values per word]
    block_pages,  # int32[layers, KV_BLOCKS]
    block_tables,  # int32[table rows, TABLE_BLOCKS]
    layer,  # int32[1]: of block_pages
    items,  # int32[items, 4]: first token, queries, row of the tables, position of the first query
    sinks,  # [HEADS]
    out,  # [tokens, HEADS, VALUE_SIZE], or float32[items, SPLITS, HEADS, PARTIAL]
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share a KV head
    TILE_HEADS: tl.constexpr,  # of them, those of a program
    M: tl.constexpr,  # heads times queries of a program, at most
    KEYS: tl.constexpr,  # of a tile
    MAIN: tl.constexpr,
    MAIN_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    SHARED: tl.constexpr,  # the main columns of a key are its value
    KV_HEADS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
    TOKEN_VALUES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TABLE_BLOCKS: tl.constexpr,
    KV_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    BY_ITEM: tl.constexpr,  # out has a place for each item, not for each token
    SPLITS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    KEY_SIZE: tl.constexpr = MAIN + REST
    VALUE_SIZE: tl.constexpr = MAIN if SHARED else MAIN + REST
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(0) // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    split = tl.program_id(1)
    item = tl.program_id(2)
    token = tl.load(items + item * 4)
    count = tl.load(items + item * 4 + 1)
    table = block_tables + tl.load(items + item * 4 + 2).to(tl.int64) * TABLE_BLOCKS
    position = tl.load(items + item * 4 + 3)
    if count == 0:
        return
    first = _first_seen(position, WINDOW, CHUNK)
    end = position + count
    if SPLITS > 1:
        share = _share(end - first, KEYS, SPLITS, LEAST_TILES)
        first += split * share
        end = tl.minimum(end, first + share)
        # The first split always has a result: that of the sinks, where there are no keys.
        if (split > 0) & (first >= end):
            return

    row = tl.arange(0, M)
    query = row // TILE_HEADS
    in_group = head_tile * TILE_HEADS + row % TILE_HEADS
    head = kv_head * GROUP + in_group
    used = (query < count) & (in_group < GROUP)
    q_at = ((token + query).to(tl.int64) * HEADS + head) * KEY_SIZE
    q_main = _columns(q, q_at, used, 0, MAIN, MAIN_PADDED)
    if REST > 0:
        q_rest = _columns(q, q_at, used, MAIN, REST, REST_PADDED)

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if HAS_SINKS:
        if split == 0:
            sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32)
            top = sink * _LOG2_E
            total += 1.0
    o_main = tl.zeros([M, MAIN_PADDED], tl.float32)
    if REST > 0 and not SHARED:
        o_rest = tl.zeros([M, REST_PADDED], tl.float32)

    block_pages += tl.load(layer).to(tl.int64) * KV_BLOCKS
    kv = pages.to(tl.pointer_type(q.dtype.element_ty), bitcast=True)
    v_first: tl.constexpr = 0 if SHARED else KV_HEADS * KEY_SIZE
    # Where keys lie is looked up two tiles ahead: no lookup waits for the one before it.
    page = tl.load(block_pages + _blocks_of(table, first, end, KEYS, BLOCK_SIZE))
    block = _blocks_of(table, first + KEYS, end, KEYS, BLOCK_SIZE)
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        within = (key % BLOCK_SIZE) * TOKEN_VALUES + kv_head * KEY_SIZE
        at = page.to(tl.int64) * PAGE_VALUES + within
        page = tl.load(block_pages + block)
        block = _blocks_of(table, start + 2 * KEYS, end, KEYS, BLOCK_SIZE)
        k_main = _columns(kv, at, inside, 0, MAIN, MAIN_PADDED)
        scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if REST > 0:
            k_rest = _columns(kv, at, inside, MAIN, REST, REST_PADDED)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")

        if ONE_QUERY:
            scores = tl.where(inside[None, :], scores * (SCALE * _LOG2_E), float("-inf"))
        else:
            place = position + query
            seen = inside[None, :] & (key[None, :] <= place[:, None])
            if WINDOW + CHUNK > 0:
                seen = seen & (key[None, :] >= _first_seen(place, WINDOW, CHUNK)[:, None])
            scores = tl.where(seen, scores * (SCALE * _LOG2_E), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A query may have seen no key yet.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        kept = tl.exp2(top - level)
        top = higher
        total = total * kept + tl.sum(weights, 1)

        weights = weights.to(q.dtype.element_ty)
        o_main *= kept[:, None]
        if SHARED:
            o_main = tl.dot(weights, k_main, o_main, input_precision="ieee")
        else:
            v_main = _columns(kv, at, inside, v_first, MAIN, MAIN_PADDED)
            o_main = tl.dot(weights, v_main, o_main, input_precision="ieee")
            if REST > 0:
                v_rest = _columns(kv, at, inside, v_first + MAIN, REST, REST_PADDED)
                o_rest *= kept[:, None]
                o_rest = tl.dot(weights, v_rest, o_rest, input_precision="ieee")

    divisor = tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS > 1:
        o_at = ((item.to(tl.int64) * SPLITS + split) * HEADS + head) * PARTIAL
        tl.store(out + o_at + (PARTIAL - 1), top + tl.log2(total), mask=used)
    else:
        place = token + query
        if BY_ITEM:
            place = item + query
        o_at = (place.to(tl.int64) * HEADS + head) * VALUE_SIZE
    _store_columns(out, o_at, used, o_main / divisor, 0, MAIN, MAIN_PADDED)
    if REST > 0 and not SHARED:
        _store_columns(out, o_at, used, o_rest / divisor, MAIN, REST, REST_PADDED)


@triton.jit
def combine_kernel(
    partial,  # float32[items, SPLITS, HEADS, PARTIAL]: means, and at the end the log2 of the weight
    items,  # int32[items, 4]
    out,  # [items, HEADS, VALUE_SIZE]
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a program
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """The mean of a head over all keys, from those over the shares of the splits."""
    PIECES: tl.constexpr = (VALUE_SIZE + COLUMNS - 1) // COLUMNS
    head = tl.program_id(0) // PIECES
    piece = tl.program_id(0) % PIECES
    item = tl.program_id(1)
    count = tl.load(items + item * 4 + 1)
    position = tl.load(items + item * 4 + 3)
    if count == 0:
        return
    number = position + count - _first_seen(position, WINDOW, CHUNK)
    share = _share(number, KEYS, SPLITS, LEAST_TILES)
    split = tl.arange(0, SPLITS_PADDED)
    used = (split == 0) | (split * share < number)
    at = ((item.to(tl.int64) * SPLITS + split) * HEADS + head) * PARTIAL
    level = tl.load(partial + at + (PARTIAL - 1), mask=used, other=float("-inf"))
    top = tl.max(level, 0)
    weights = tl.exp2(level - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < VALUE_SIZE
    mask = used[:, None] & inside[None, :]
    means = tl.load(partial + at[:, None] + column[None, :], mask=mask, other=0.0)
    o = tl.sum(means * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    o_at = (item.to(tl.int64) * HEADS + head) * VALUE_SIZE
    tl.store(out + o_at + column, o.to(out.dtype.element_ty), mask=inside)
