"""The product of tokens with experts that lie in pages, in Gluon, for few tokens per expert.

A program multiplies two blocks of rows of one linear (of gate and of up the same rows) with a tile
of tokens that chose its expert. Width and pages are data: bit-planes are turned into codes in
registers (`bit_words`), codes into bfloat16 weights by tables in registers or in shared memory, and
these are the first factor of the matrix units without leaving the registers. A thread holds two
rows g and g + 8 of 16, and 32 columns of 128 at a time: what the layout of planes gives it in one
word.

Columns of tokens are stored so that a thread finds in 16 bytes what it multiplies in two steps, see
`to_fragments`. Tokens beyond the tile's are not read. Loops are not unrolled further than that: a
program with few steps waits for its instructions to come from memory.
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
    out, bias, expert, gate, up, row, is_token,
    WIDTH: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Stores what goes into down, where `to_fragments` puts this row of a token."""
    inside = row < WIDTH
    if HAS_BIAS:
        of_gate = bias + expert.to(gl.int64) * (2 * WIDTH) + row
        gate += gl.load(of_gate, mask=inside, other=0).to(gl.float32)
        up += gl.load(of_gate + WIDTH, mask=inside, other=0).to(gl.float32)
    y = gl.where(inside, _activate(gate, up, ACTIVATION, ALPHA, LIMIT), 0.0)
    at = row // 128 * 128 + row % 4 * 32 + row // 32 % 4 * 8 + row // 16 % 2 * 4 + row // 4 % 4
    gl.store(out + at, y.to(gl.bfloat16), mask=is_token)


@gluon.jit
def product_kernel(
    pages,  # uint32[pages, words]
    host,  # uint32[host pages, words]
    table,  # int32[rows, slots]
    tiles,  # int32[tiles, 8]: row, first place, tokens, widths of gate_up and down, expert
    valid,  # bool[1]: where ONE_TOKEN
    widths,  # int32[rows, 2]: where ONE_TOKEN
    layer,  # int32: where ONE_TOKEN
    x,  # bfloat16[rows, steps * 128]: fragments of tokens
    row_of_place,  # int32[places]: which row of x a place has
    bias,  # bfloat16[experts, 2, width] or [experts, rows]
    out,  # bfloat16[places, ...]: fragments of gate_up, rows of down
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
    ONE_TOKEN: gl.constexpr,  # tiles has its experts, each a tile of its own
    EXPERTS: gl.constexpr,
    HAS_ROWS: gl.constexpr,  # otherwise place n has row n,
    ONE_ROW: gl.constexpr,  # or x has only one
    OUT_VALUES: gl.constexpr,  # of a token's fragments that gate_up writes
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
    if ONE_TOKEN:
        expert = gl.load(tiles + tile)
        row = expert + gl.load(layer) * EXPERTS
        start = tile
        count = gl.where((expert >= 0) & (expert < EXPERTS), gl.load(valid).to(gl.int32), 0)
    else:
        header = tiles + tile * 8
        row = gl.load(header)
        start = gl.load(header + 1)
        count = gl.load(header + 2)
        expert = gl.load(header + 5)
    if count > 0:
        if ONE_TOKEN:
            width = gl.load(widths + row * 2 + WHICH)
        else:
            width = gl.load(tiles + tile * 8 + 3 + WHICH)
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [ROW_WARPS * K_WARPS], [0])
        tid = gl.arange(0, THREADS, layout=ONE)
        memory = shared_address(SHARED, THREADS)
        slots = table + row.to(gl.int64) * SLOTS
        if WHICH == 0:
            row0 = gl.program_id(0) * BLOCK
            row1 = row0 + (ROWS + 63) // 64 * 64
        else:
            row0 = gl.program_id(0) * (2 * BLOCK)
            row1 = row0 + BLOCK
        g = tid % 32 // 4
        words = x.to(gl.pointer_type(gl.uint32), bitcast=True)
        used_tokens = ()
        tokens = ()
        for n in gl.static_range(TILES):
            used = g + n * 8 < count
            place = start + g + n * 8
            if HAS_ROWS:
                place = gl.load(row_of_place + place, mask=used, other=0)
            elif ONE_ROW:
                place = g * 0
            used_tokens = used_tokens + (used,)
            tokens = tokens + (words + place.to(gl.int64) * ((COLUMNS + 127) // 128 * 64),)
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
                        zeros, pages, host, slots, TABLE_SLOTS[bits - SEED_BITS], tokens,
                        used_tokens, memory, tid, row0, row1,
                        bits, PLANE_PAGES, PAGE_WORDS, COLUMNS, ROWS_PER_TABLE, LEAST_LINE,
                        TILES, ROW_WARPS, K_WARPS, HAS_HOST,
                    )  # fmt: skip
        if HAS_DENSE:
            if width == 16:
                acc = dense_product(
                    zeros, pages, host, slots, tokens, used_tokens, tid, row0, row1,
                    PAGE_WORDS, COLUMNS, TILES, ROW_WARPS, K_WARPS, HAS_HOST,
                )  # fmt: skip
        if K_WARPS > 1:
            acc = add_warps(acc, memory, tid, 8 * TILES, ROW_WARPS, K_WARPS)
        stores = tid < 32 * ROW_WARPS
        first = tid // 32 % ROW_WARPS * 16 + g
        token = tid % 4 * 2
        for n in gl.static_range(TILES):
            for j in gl.static_range(4):
                # Entries 0 and 1 are neighbouring tokens of row g, 2 and 3 those of row g + 8.
                t = token + n * 8 + j % 2
                is_token = stores & (t < count)
                r0 = row0 + first + j // 2 * 8
                if WHICH == 0:
                    _store_gated(
                        out + (start + t).to(gl.int64) * OUT_VALUES, bias, expert,
                        acc[8 * n + j], acc[8 * n + 4 + j], r0, is_token,
                        ROWS, HAS_BIAS, ACTIVATION, ALPHA, LIMIT,
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
