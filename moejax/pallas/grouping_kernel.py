"""Slots sorted by expert and cut into tiles: see `grouping`.

A slot's key is its expert above its number, so that sorting keys is sorting by expert, stably, and
positions of the sorted keys are places. What is asked of neighbours in that order are segmented
scans (Blelloch 1990, Prefix sums and their applications, section 1.5), whose cost does not depend
on the number of experts.
"""

import triton
import triton.language as tl


@triton.jit
def _add_of_expert(left_expert, left, right_expert, right):
    return right_expert, tl.where(left_expert == right_expert, left + right, right)


@triton.jit
def _load_experts(
    topk_ids, valid, slot, SLOTS: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr
):
    """The experts of slots; EXPERTS for those that are left out."""
    is_slot = slot < SLOTS
    expert = tl.load(topk_ids + slot, mask=is_slot, other=-1)
    keep = tl.load(valid + slot // K, mask=is_slot, other=0) != 0
    keep = keep & (expert >= 0) & (expert < EXPERTS)
    return tl.where(keep, expert, EXPERTS)


@triton.jit
def _sort(expert, BLOCK: tl.constexpr):
    """Experts in order, the numbers of their slots in the block, and ranks among their own."""
    key = tl.sort(expert * BLOCK + tl.arange(0, BLOCK))
    expert = key // BLOCK
    ones = tl.full([BLOCK], 1, tl.int32)
    _, rank = tl.associative_scan((expert, ones), 0, _add_of_expert)
    return expert, key % BLOCK, rank - 1


@triton.jit
def _store_tiles(
    tiles, widths, layer, number, expert, start, count, is_tile, EXPERTS: tl.constexpr
):
    """Stores the rows of tiles, which are few among the elements of a block."""
    at = tiles + number * 8
    row = expert + tl.load(layer) * EXPERTS
    tl.store(at, row, mask=is_tile)
    tl.store(at + 1, start, mask=is_tile)
    tl.store(at + 2, count, mask=is_tile)
    tl.store(at + 3, tl.load(widths + row * 2, mask=is_tile, other=0), mask=is_tile)
    tl.store(at + 4, tl.load(widths + row * 2 + 1, mask=is_tile, other=0), mask=is_tile)
    tl.store(at + 5, expert, mask=is_tile)
    for column in tl.static_range(6, 8):
        tl.store(at + column, tl.zeros_like(expert), mask=is_tile)


@triton.jit
def _store_zeros(out, start, end, BLOCK: tl.constexpr):
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out + at, tl.zeros([BLOCK], tl.int32), mask=at < end)


@triton.jit
def group_block_kernel(
    topk_ids,  # int32[tokens, k]
    valid,  # bool[tokens]
    widths,  # int32[rows, 2]
    layer,  # int32: its number among those in widths
    tiles,  # int32[tiles, 8]
    token_of_place,  # int32[slots]
    place_of_slot,  # int32[slots]
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,  # of a tile
    BLOCK: tl.constexpr,  # a power of two, at least SLOTS
):
    """All slots at once."""
    place = tl.arange(0, BLOCK)
    expert = _load_experts(topk_ids, valid, place, SLOTS, K, EXPERTS)
    expert, slot, rank = _sort(expert, BLOCK)
    ones = tl.full([BLOCK], 1, tl.int32)
    _, left = tl.associative_scan((expert, ones), 0, _add_of_expert, reverse=True)
    used = expert < EXPERTS
    # Of the block's end; it has no place, and there is nothing to store.
    is_slot = slot < SLOTS
    tl.store(token_of_place + place, tl.where(used, slot // K, 0), mask=place < SLOTS)
    tl.store(place_of_slot + slot, tl.where(used, place, SLOTS), mask=is_slot)
    is_tile = used & (rank % SIZE == 0)
    number = tl.cumsum(is_tile.to(tl.int32), 0)
    count = tl.minimum(left, SIZE)
    _store_tiles(tiles, widths, layer, number - 1, expert, place, count, is_tile, EXPERTS)
    _store_zeros(tiles, tl.max(number, 0) * 8, TILES * 8, BLOCK)


@triton.jit
def _count(
    topk_ids, valid, start, end,
    SLOTS: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """How often each expert is chosen by the slots from `start` to `end`."""
    counts = tl.zeros([BINS], tl.int32)
    for first in range(start, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        expert = _load_experts(topk_ids, valid, slot, SLOTS, K, EXPERTS)
        keep = (expert < EXPERTS) & (slot < end)
        counts += tl.histogram(tl.minimum(expert, BINS - 1), BINS, mask=keep)
    return counts


@triton.jit
def group_kernel(
    topk_ids,  # int32[tokens, k]
    valid,  # bool[tokens]
    widths,  # int32[rows, 2]
    layer,  # int32: its number among those in widths
    tiles,  # int32[tiles, 8]
    token_of_place,  # int32[slots]
    place_of_slot,  # int32[slots]
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,  # of a tile
    BLOCK: tl.constexpr,  # a power of two: slots that a program sorts
    BINS: tl.constexpr,  # a power of two, at least EXPERTS
    COUNT_BLOCK: tl.constexpr,  # a power of two: slots that are counted at once
):
    """Each program places a block of slots, and counts all the others for itself."""
    first = tl.program_id(0) * BLOCK
    before = _count(topk_ids, valid, 0, first, SLOTS, K, EXPERTS, BINS, COUNT_BLOCK)
    behind = _count(topk_ids, valid, first, SLOTS, SLOTS, K, EXPERTS, BINS, COUNT_BLOCK)
    counts = before + behind
    starts = tl.cumsum(counts, 0) - counts
    tiles_of = (counts + (SIZE - 1)) // SIZE
    first_tiles = tl.cumsum(tiles_of, 0) - tiles_of
    if first == 0:
        _store_zeros(token_of_place, tl.sum(counts, 0), SLOTS, BLOCK)
        _store_zeros(tiles, tl.sum(tiles_of, 0) * 8, TILES * 8, BLOCK)
    slot = first + tl.arange(0, BLOCK)
    expert = _load_experts(topk_ids, valid, slot, SLOTS, K, EXPERTS)
    expert, slot, rank = _sort(expert, BLOCK)
    slot += first
    used = expert < EXPERTS
    own = tl.minimum(expert, BINS - 1)
    rank += tl.gather(before, own, 0)
    place = tl.gather(starts, own, 0) + rank
    tl.store(token_of_place + place, slot // K, mask=used)
    tl.store(place_of_slot + slot, tl.where(used, place, SLOTS), mask=slot < SLOTS)
    number = tl.gather(first_tiles, own, 0) + rank // SIZE
    count = tl.minimum(tl.gather(counts, own, 0) - rank, SIZE)
    is_tile = used & (rank % SIZE == 0)
    _store_tiles(tiles, widths, layer, number, expert, place, count, is_tile, EXPERTS)
