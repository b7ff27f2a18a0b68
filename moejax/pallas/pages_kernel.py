"""Kernels that write pages of the arena in place: see `pages`.

The arena may have more than 2^31 words, so places in it are int64.
"""

import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    pages,  # uint32[pages, words]; written
    k,  # [tokens, K_VALUES]
    v,  # [tokens, V_VALUES]
    block_pages,  # int32[layers, KV_BLOCKS]
    block_tables,  # int32[rows, blocks]
    layer,  # int32[1]: of block_pages
    rows,  # int32[tokens]
    positions,  # int32[tokens]
    valid,  # bool[tokens]
    PAGES: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
    KV_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens
    K_VALUES: tl.constexpr,
    V_VALUES: tl.constexpr,  # 0: there are none
    K_BLOCK: tl.constexpr,  # a power of two, at least K_VALUES
    V_BLOCK: tl.constexpr,
):
    """One program for each token."""
    token = tl.program_id(0)
    # The values are read while the page is looked up.
    k_lane = tl.arange(0, K_BLOCK)
    v_lane = tl.arange(0, V_BLOCK)
    k_values = tl.load(k + token.to(tl.int64) * K_VALUES + k_lane, mask=k_lane < K_VALUES)
    v_values = k_values
    if V_VALUES > 0:
        v_values = tl.load(v + token.to(tl.int64) * V_VALUES + v_lane, mask=v_lane < V_VALUES)
    row = tl.load(rows + token)
    position = tl.load(positions + token)
    keep = tl.load(valid + token) != 0
    keep = keep & (row >= 0) & (row < ROWS) & (position >= 0)
    number = position // BLOCK_SIZE
    keep = keep & (number < BLOCKS)
    block = tl.load(block_tables + row.to(tl.int64) * BLOCKS + number, mask=keep, other=-1)
    keep = keep & (block >= 0) & (block < KV_BLOCKS)
    block_pages += tl.load(layer).to(tl.int64) * KV_BLOCKS
    page = tl.load(block_pages + block, mask=keep, other=0)
    keep = (page > 0) & (page < PAGES)
    out = pages.to(tl.pointer_type(k.dtype.element_ty), bitcast=True)
    out += page.to(tl.int64) * PAGE_VALUES + position % BLOCK_SIZE * (K_VALUES + V_VALUES)
    tl.store(out + k_lane, k_values, mask=keep & (k_lane < K_VALUES))
    if V_VALUES > 0:
        tl.store(out + K_VALUES + v_lane, v_values, mask=keep & (v_lane < V_VALUES))


@triton.jit
def copy_pages_kernel(
    pages,  # uint32[pages, words]; written
    other,  # uint32[other pages, words]: staged pages, or pages on the host
    sources,  # int32[n]: signed page ids; not read where pages are staged
    targets,  # int32[n]
    PAGES: tl.constexpr,
    OTHER_PAGES: tl.constexpr,  # 0: there are none
    STAGED: tl.constexpr,  # page i of `other` is the i-th source
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,  # words of a program
):
    """One program for each part of each copied page."""
    PARTS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    number = tl.program_id(0) // PARTS
    target = tl.load(targets + number)
    if (target > 0) & (target < PAGES):
        lane = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
        out = pages + target.to(tl.int64) * WORDS + lane
        inside = lane < WORDS
        if STAGED:
            words = tl.load(other + number.to(tl.int64) * WORDS + lane, mask=inside)
            tl.store(out, words, mask=inside)
        else:
            source = tl.load(sources + number)
            if (source > 0) & (source < PAGES):
                words = tl.load(pages + source.to(tl.int64) * WORDS + lane, mask=inside)
                tl.store(out, words, mask=inside)
            if (source < 0) & (~source < OTHER_PAGES):
                words = tl.load(other + (~source).to(tl.int64) * WORDS + lane, mask=inside)
                tl.store(out, words, mask=inside)
