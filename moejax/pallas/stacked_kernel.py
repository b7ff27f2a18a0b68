"""Products of few tokens with up to three matrices of a layer, in Gluon.

A program multiplies 16 rows of one matrix for each of its row warps with all tokens. Rows of
weights are read as they lie: a thread has rows g and g + 8 of 16, and of every 32 columns 8
neighbouring ones, which are the first factor of two steps of the matrix units, whatever the order
of columns within them is, as long as it is that of the tokens. Warps that share rows take turns at
the columns. Weights come through shared memory, where each thread finds what it asked for itself,
so that all of a matrix is under way at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moejax.pallas import stacked
from moejax.pallas.page_reads import load_4
from moejax.pallas.ptx import (
    add_warps,
    copy_16,
    end_copies,
    load_16,
    mma,
    shared_address,
    wait_for_copies,
)

CHUNKS = gl.constexpr(stacked.STEP_COLUMNS // 32)
"""Of 32 columns in a step."""


@gluon.jit
def _copy_weights(
    address, w, row, column,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Starts to bring a step's weights: of each chunk 8 columns of rows g and g + 8."""
    for c in gl.static_range(CHUNKS):
        inside = column + c * 32 < COLUMNS
        # In words of two values.
        at = w + (row.to(gl.int64) * COLUMNS + column + c * 32) // 2
        copy_16(address + c * (32 * THREADS), at, inside & (row < ROWS))
        lower = address + c * (32 * THREADS) + 16 * THREADS
        copy_16(lower, at + 4 * COLUMNS, inside & (row + 8 < ROWS))
    end_copies(address)


@gluon.jit
def _load_weights(address, THREADS: gl.constexpr):
    """What `_copy_weights` brought: a tuple of 8 * CHUNKS words."""
    found = ()
    for n in gl.static_range(2 * CHUNKS):
        found = found + load_16(address + n * (16 * THREADS))
    return found


@gluon.jit
def _add_products(
    acc, weights, tokens, CHUNK: gl.constexpr, HALF: gl.constexpr, TILES: gl.constexpr
):
    """Adds the products of a step of 16 columns."""
    added = ()
    for n in gl.static_range(TILES):
        added = added + mma(
            weights[CHUNK * 8 + 2 * HALF],
            weights[CHUNK * 8 + 2 * HALF + 4],
            weights[CHUNK * 8 + 2 * HALF + 1],
            weights[CHUNK * 8 + 2 * HALF + 5],
            tokens[4 * n + 2 * HALF], tokens[4 * n + 2 * HALF + 1],
            acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3],
        )  # fmt: skip
    return added


@gluon.jit
def _multiply(
    out, acc, w, bias, x, memory, tid, block,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, HAS_BIAS: gl.constexpr,
    TILES: gl.constexpr, ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What a program does, with a block of rows of one matrix."""
    THREADS: gl.constexpr = 32 * ROW_WARPS * K_WARPS
    STEP: gl.constexpr = CHUNKS * 32
    STEPS: gl.constexpr = (COLUMNS + STEP - 1) // STEP
    w = w.to(gl.pointer_type(gl.uint32), bitcast=True)
    g = tid % 32 // 4
    i = tid % 4
    row = block * (16 * ROW_WARPS) + tid // 32 % ROW_WARPS * 16 + g
    column = tid // 32 // ROW_WARPS * STEP + i * 8
    STAGE: gl.constexpr = 32 * CHUNKS * THREADS
    TURNS: gl.constexpr = (STEPS + K_WARPS - 1) // K_WARPS
    own = memory + (tid * 16).to(gl.uint32)
    for s in gl.static_range(STAGES):
        _copy_weights(
            own + s * STAGE, w, row, column + s * (K_WARPS * STEP), ROWS, COLUMNS, THREADS
        )
    for turn in range(TURNS):
        wait_for_copies(own, STAGES - 1)
        stage = own + turn % STAGES * STAGE
        weights = _load_weights(stage, THREADS)
        for c in gl.static_range(CHUNKS):
            inside = column + c * 32 < COLUMNS
            at = x + (g * COLUMNS + column + c * 32) // 2
            tokens = ()
            for n in gl.static_range(TILES):
                used = inside & (g + n * 8 < TOKENS)
                tokens = tokens + load_4(at + n * (4 * COLUMNS), used, THREADS)
            for half in gl.static_range(2):
                acc = _add_products(acc, weights, tokens, c, half, TILES)
        # What was read here is in registers, since it was multiplied.
        _copy_weights(stage, w, row, column + STAGES * (K_WARPS * STEP), ROWS, COLUMNS, THREADS)
        column += K_WARPS * STEP
    # The memory is used anew.
    wait_for_copies(own, 0)
    if K_WARPS > 1:
        acc = add_warps(acc, memory, tid, 4 * TILES, ROW_WARPS, K_WARPS)
    stores = tid < 32 * ROW_WARPS
    for j in gl.static_range(4):
        # Entries 0 and 1 are neighbouring tokens of row g, 2 and 3 those of row g + 8.
        r = row + j // 2 * 8
        if HAS_BIAS:
            added = gl.load(bias + r, mask=stores & (r < ROWS), other=0).to(gl.float32)
        for n in gl.static_range(TILES):
            t = i * 2 + n * 8 + j % 2
            y = acc[4 * n + j]
            if HAS_BIAS:
                y += added
            is_result = stores & (t < TOKENS) & (r < ROWS)
            gl.store(out + t * ROWS + r, y.to(out.dtype.element_ty), mask=is_result)


@gluon.jit
def stacked_kernel(
    layer,  # int32
    x,  # bfloat16[tokens, columns]
    w0,  # bfloat16[layers, rows, columns]
    w1,
    w2,
    b0,  # bfloat16[layers, rows]
    b1,
    b2,
    y0,  # [tokens, rows], of bfloat16 or float32
    y1,
    y2,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,  # of each matrix, 0 where there is none
    COLUMNS: gl.constexpr,
    HAS_BIAS: gl.constexpr,  # of each matrix
    TILES: gl.constexpr,  # of 8 tokens
    ROW_WARPS: gl.constexpr,
    K_WARPS: gl.constexpr,
    STAGES: gl.constexpr,  # steps of a warp that are under way
    SHARED: gl.constexpr,  # bytes
):
    THREADS: gl.constexpr = 32 * ROW_WARPS * K_WARPS
    BLOCK: gl.constexpr = 16 * ROW_WARPS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [ROW_WARPS * K_WARPS], [0])
    tid = gl.arange(0, THREADS, layout=ONE)
    memory = shared_address(SHARED, THREADS)
    acc = ()
    for _ in gl.static_range(4 * TILES):
        acc = acc + (gl.zeros([THREADS], gl.float32, ONE),)
    number = gl.load(layer).to(gl.int64)
    words = x.to(gl.pointer_type(gl.uint32), bitcast=True)
    # Programs of the first matrix come first, then those of the second.
    block = gl.program_id(0)
    for m in gl.static_range(3):
        w = w0 if m == 0 else (w1 if m == 1 else w2)
        b = b0 if m == 0 else (b1 if m == 1 else b2)
        y = y0 if m == 0 else (y1 if m == 1 else y2)
        if ROWS[m] > 0:
            if (block >= 0) & (block * BLOCK < ROWS[m]):
                _multiply(
                    y, acc, w + number * (ROWS[m] * COLUMNS), b + number * ROWS[m], words, memory,
                    tid, block, TOKENS, ROWS[m], COLUMNS, HAS_BIAS[m], TILES, ROW_WARPS, K_WARPS,
                    STAGES,
                )  # fmt: skip
            block -= (ROWS[m] + BLOCK - 1) // BLOCK
