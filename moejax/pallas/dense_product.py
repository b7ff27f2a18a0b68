"""The product with rows of bfloat16, in Gluon: see `product_kernel`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moejax.pallas.page_reads import atom_at, load_4, load_tokens
from moejax.pallas.ptx import multiply, pick_pair


@gluon.jit
def _load_dense(
    pages, host, slots, atom, within, columns_left,
    PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Of four neighbouring atoms 8 columns of row g and of row g + 8: a tuple of 32 words."""
    found = ()
    for e in gl.static_range(4):
        used = columns_left > e
        at = atom_at(pages, host, slots, atom + e, used, PAGE_WORDS, HAS_HOST) + within
        found = found + load_4(at, used, THREADS) + load_4(at + 32, used, THREADS)
    return found


@gluon.jit
def _dense_fragment(words, STEP: gl.constexpr):
    """The fragment of step STEP of 8, of what `_load_dense` gives."""
    # Columns r, 4 + r, 8 + r and 12 + r of 16, which are in atoms 2 * (STEP % 2) and the next.
    r: gl.constexpr = STEP // 2
    w: gl.constexpr = STEP % 2 * 16 + r // 2
    half: gl.constexpr = r % 2
    return (
        pick_pair(words[w], words[w + 2], half),
        pick_pair(words[w + 4], words[w + 6], half),
        pick_pair(words[w + 8], words[w + 10], half),
        pick_pair(words[w + 12], words[w + 14], half),
    )


@gluon.jit
def dense_product(
    acc, pages, host, slots, tokens, used_tokens, tid, row0, row1,
    PAGE_WORDS: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr,
    ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr, HAS_HOST: gl.constexpr,
):  # fmt: skip
    """As `planes_product`, of rows of bfloat16."""
    THREADS: gl.constexpr = 32 * ROW_WARPS * K_WARPS
    ATOMS: gl.constexpr = (COLUMNS + 7) // 8
    STEPS: gl.constexpr = (COLUMNS + 127) // 128
    warp = tid // 32
    k_warp = warp // ROW_WARPS
    row_warp = warp % ROW_WARPS
    lane = tid % 32
    i = lane % 4
    offset = row_warp * 16 + lane // 4
    within0 = (row0 % 64 + offset) * 4
    within1 = (row1 % 64 + offset) * 4
    step = k_warp
    for _ in range((STEPS + K_WARPS - 1) // K_WARPS):
        # Nothing is read ahead: other warps wait for memory meanwhile, and registers are few.
        atom = step * 16 + i * 4
        upper = _load_dense(
            pages, host, slots, row0 // 64 * ATOMS + atom, within0, ATOMS - atom,
            PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        lower = _load_dense(
            pages, host, slots, row1 // 64 * ATOMS + atom, within1, ATOMS - atom,
            PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        in_columns = step * 4 + i < (COLUMNS + 31) // 32
        reads = ()
        for n in gl.static_range(TILES):
            reads = reads + (used_tokens[n] & in_columns,)
        for q in gl.static_range(4):
            x = load_tokens(tokens, step * 64 + q * 16 + i * 4, reads, TILES, THREADS)
            for half in gl.static_range(2):
                first = _dense_fragment(upper, 2 * q + half)
                second = _dense_fragment(lower, 2 * q + half)
                acc = multiply(acc, first, second, x, half, TILES)
        step += K_WARPS
    return acc
