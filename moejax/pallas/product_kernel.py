"""The product of tokens with experts that lie in pages, in Gluon, for few tokens per expert.

A program multiplies two blocks of rows of one linear (of gate and of up the same rows) with a tile
of tokens that chose its expert. Width and pages are data: bit-planes are turned into codes in
registers (`bit_words`), codes into bfloat16 weights by tables in registers or in shared memory, and
these are the first factor of the matrix units without leaving the registers. A thread holds two
rows g and g + 8 of 16, and 64 columns of 256 at a time: what the layout of planes gives it in 8
bytes.

The second factor is stored so that a thread finds in 16 bytes what it multiplies in two steps:
`fragment_index` says where. Tokens beyond the tile's are not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moejax.pallas.dense_product import dense_product
from moejax.pallas.planes_product import planes_product
from moejax.pallas.ptx import add_warps, shared_address


@gluon.jit
def _round(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _tanh(x):
    return 1 - 2 / (gl.exp(2 * x) + 1)


@gluon.jit
def _activate(gate, up, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    """moejax.layers.mlp.activate, in float32 on rounded factors."""
    gate = _round(gate)
    up = _round(up)
    if ACTIVATION == "clamped_swiglu":
        # Unlike minimum and maximum, these keep NaN.
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
        gated = (up + 1) * gate / (1 + gl.exp(-ALPHA * gate))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gated = _round(0.5 * gate * (1 + _tanh(inner))) * up
    else:
        gated = _round(gate / (1 + gl.exp(-gate))) * up
    return gated


@gluon.jit
def _store_gated(
    out, bias, expert, gate, up, row, token, is_token,
    WIDTH: gl.constexpr, TILES: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Stores what goes into down, where the fragments of its tokens are (see fragment_index)."""
    inside = row < WIDTH
    if HAS_BIAS:
        of_gate = bias + expert.to(gl.int64) * (2 * WIDTH) + row
        gate += gl.load(of_gate, mask=inside, other=0).to(gl.float32)
        up += gl.load(of_gate + WIDTH, mask=inside, other=0).to(gl.float32)
    y = gl.where(inside, _activate(gate, up, ACTIVATION, ALPHA, LIMIT), 0.0)
    chunk = row // 256 * 8 + row // 32 % 2 * 4 + row % 4
    at = (chunk * (8 * TILES) + token) * 32 + row // 64 % 4 * 8 + row // 16 % 2 * 4 + row // 4 % 4
    gl.store(out + at, y.to(gl.bfloat16), mask=is_token)


@gluon.jit
def product_kernel(
    pages,  # uint32[pages, words]
    host,  # uint32[host pages, words]
    table,  # int32[rows, slots]
    tiles,  # int32[tiles, 8]: row, first place, tokens, widths of gate_up and down, expert
    x,  # bfloat16[tiles, steps * 2048 * TILES]: fragments of tokens
    bias,  # bfloat16[experts, 2, width] or [experts, rows]
    out,  # bfloat16: fragments [tiles, ...] of gate_up, [places, rows] of down
    WHICH: gl.constexpr,  # 0: gate_up, 1: down
    ROWS: gl.constexpr,  # of a part
    COLUMNS: gl.constexpr,
    SLOTS: gl.constexpr,
    PLANE_PAGES: gl.constexpr,
    PAGE_WORDS: gl.constexpr,
    SEED_BITS: gl.constexpr,
    PARENT_BITS: gl.constexpr,  # 0: no planes
    TABLE_SLOTS: gl.constexpr,
    ROWS_PER_TABLE: gl.constexpr,
    HAS_DENSE: gl.constexpr,
    LEAST_LINE: gl.constexpr,
    OUT_WORDS: gl.constexpr,  # of a tile's fragments that gate_up writes, in bfloat16
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    TILES: gl.constexpr,  # of 8 tokens
    ROW_WARPS: gl.constexpr,
    K_WARPS: gl.constexpr,
    HAS_HOST: gl.constexpr,
    SHARED: gl.constexpr,  # bytes
):
    THREADS: gl.constexpr = 32 * ROW_WARPS * K_WARPS
    BLOCK: gl.constexpr = 16 * ROW_WARPS
    tile = gl.program_id(1)
    header = tiles + tile * 8
    count = gl.load(header + 2)
    expert = gl.load(header + 5)
    width = gl.load(header + 3 + WHICH)
    start = gl.load(header + 1)
    if count > 0:
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [ROW_WARPS * K_WARPS], [0])
        tid = gl.arange(0, THREADS, layout=ONE)
        memory = shared_address(SHARED, THREADS)
        slots = table + gl.load(header).to(gl.int64) * SLOTS
        if WHICH == 0:
            row0 = gl.program_id(0) * BLOCK
            row1 = row0 + (ROWS + 63) // 64 * 64
        else:
            row0 = gl.program_id(0) * (2 * BLOCK)
            row1 = row0 + BLOCK
        g = tid % 32 // 4
        used_tokens = ()
        for n in gl.static_range(TILES):
            used_tokens = used_tokens + (g + n * 8 < count,)
        words = x.to(gl.pointer_type(gl.uint32), bitcast=True)
        words += tile.to(gl.int64) * ((COLUMNS + 255) // 256 * (1024 * TILES))
        # A width that is not stored: there is no instance, and its weights read as NaN.
        nothing = gl.full([THREADS], float("nan"), gl.float32, ONE)
        zero = gl.zeros([THREADS], gl.float32, ONE)
        acc = ()
        zeros = ()
        for _j in gl.static_range(8 * TILES):
            acc = acc + (nothing,)
            zeros = zeros + (zero,)
        if PARENT_BITS > 0:
            for bits in gl.static_range(SEED_BITS, PARENT_BITS + 1):
                if width == bits:
                    acc = planes_product(
                        zeros, pages, host, slots, TABLE_SLOTS[bits - SEED_BITS], words,
                        used_tokens, memory, tid, row0, row1,
                        bits, PLANE_PAGES, PAGE_WORDS, COLUMNS, ROWS_PER_TABLE, LEAST_LINE,
                        TILES, ROW_WARPS, K_WARPS, HAS_HOST,
                    )  # fmt: skip
        if HAS_DENSE:
            if width == 16:
                acc = dense_product(
                    zeros, pages, host, slots, words, used_tokens, tid, row0, row1,
                    PAGE_WORDS, COLUMNS, TILES, ROW_WARPS, K_WARPS, HAS_HOST,
                )  # fmt: skip
        if K_WARPS > 1:
            acc = add_warps(acc, memory, tid, 8 * TILES, ROW_WARPS, K_WARPS)
        stores = tid < 32 * ROW_WARPS
        row = tid // 32 % ROW_WARPS * 16 + g
        token = tid % 4 * 2
        for n in gl.static_range(TILES):
            for j in gl.static_range(4):
                # Entries 0 and 1 are neighbouring tokens of row g, 2 and 3 those of row g + 8.
                t = token + n * 8 + j % 2
                is_token = stores & (t < count)
                r0 = row0 + row + j // 2 * 8
                if WHICH == 0:
                    _store_gated(
                        out + tile.to(gl.int64) * OUT_WORDS, bias, expert,
                        acc[8 * n + j], acc[8 * n + 4 + j], r0, t, is_token,
                        ROWS, TILES, HAS_BIAS, ACTIVATION, ALPHA, LIMIT,
                    )  # fmt: skip
                else:
                    for part in gl.static_range(2):
                        r = r0 + part * BLOCK
                        y = acc[8 * n + 4 * part + j]
                        keep = is_token & (r < ROWS)
                        if HAS_BIAS:
                            at = bias + expert.to(gl.int64) * ROWS + r
                            y += gl.load(at, mask=keep, other=0).to(gl.float32)
                        at = out + (start + t).to(gl.int64) * ROWS + r
                        gl.store(at, y.to(gl.bfloat16), mask=keep)
