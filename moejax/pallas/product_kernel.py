"""The product of tokens with experts that lie in pages, in Gluon, for few tokens per expert.

A program multiplies two blocks of rows of one linear (of gate and of up the same rows) with a tile
of tokens that chose its expert. Width and pages are data: bit-planes are turned into codes in
registers (`bit_words`), codes into bfloat16 weights by tables in shared memory, and these are the
first factor of the matrix units without leaving the registers. A thread holds two rows g and g + 8
of 16, and 64 columns of 256 at a time: what the layout of planes gives it in 8 bytes.

The second factor is stored so that a thread finds in 16 bytes what it multiplies in two steps:
`fragment_index` says where. Tokens beyond the tile's are not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moejax.pallas.bit_words import codes_of
from moejax.pallas.ptx import (
    barrier,
    load_shared,
    look_up,
    mma,
    pick_pair,
    shared_address,
    store_entries,
    store_shared,
)


@gluon.jit
def _page(pages, host, ids, PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr):
    """Where pages of these signed ids begin."""
    # Without a pool on the host its pages read as poison.
    at = pages + gl.maximum(ids, 0).to(gl.int64) * PAGE_WORDS
    if HAS_HOST:
        at = gl.where(ids >= 0, at, host + (-1 - ids).to(gl.int64) * PAGE_WORDS)
    return at


@gluon.jit
def _atom(pages, host, slots, atom, used, PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr):
    """Where an atom of the run at these slots begins."""
    PAGE_ATOMS: gl.constexpr = PAGE_WORDS // 256
    ids = gl.load(slots + atom // PAGE_ATOMS, mask=used, other=0)
    return _page(pages, host, ids, PAGE_WORDS, HAS_HOST) + (atom % PAGE_ATOMS) * 256


@gluon.jit
def _load_2(at, used, THREADS: gl.constexpr):
    """Two neighbouring words of each thread; zeros where not used."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [THREADS // 32, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [THREADS // 32], [0])
    word = gl.arange(0, 2, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = gl.convert_layout(at, gl.SliceLayout(1, LAYOUT))[:, None] + word
    used = gl.convert_layout(used, gl.SliceLayout(1, LAYOUT))[:, None] & (word >= 0)
    w0, w1 = gl.split(gl.load(at, mask=used, other=0))
    return gl.convert_layout(w0, ONE), gl.convert_layout(w1, ONE)


@gluon.jit
def _load_4(at, used, THREADS: gl.constexpr):
    """Four neighbouring words of each thread; zeros where not used."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [THREADS // 32, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [THREADS // 32], [0])
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = gl.convert_layout(at, gl.SliceLayout(1, LAYOUT))[:, None] + word
    used = gl.convert_layout(used, gl.SliceLayout(1, LAYOUT))[:, None] & (word >= 0)
    words = gl.load(at, mask=used, other=0)
    even, odd = gl.split(gl.reshape(words, (THREADS, 2, 2)))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return (
        gl.convert_layout(w0, ONE),
        gl.convert_layout(w1, ONE),
        gl.convert_layout(w2, ONE),
        gl.convert_layout(w3, ONE),
    )


@gluon.jit
def _load_planes(
    pages, host, slots, atom, within, used,
    BITS: gl.constexpr, PLANE_PAGES: gl.constexpr, PAGE_WORDS: gl.constexpr,
    HAS_HOST: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Of each plane two words of row g and two of row g + 8: a tuple of 4 * BITS."""
    found = ()
    for plane in gl.static_range(BITS):
        of_plane = slots + plane * PLANE_PAGES
        at = _atom(pages, host, of_plane, atom, used, PAGE_WORDS, HAS_HOST) + within
        found = found + _load_2(at, used, THREADS) + _load_2(at + 32, used, THREADS)
    return found


@gluon.jit
def _fill_table(
    pages, host, slots, row, i, address,
    BITS: gl.constexpr, LINE: gl.constexpr, ROWS_PER_TABLE: gl.constexpr,
    PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Brings the tables of rows `row` and `row` + 8 to shared memory.

    With lines of 128 bytes each thread has a copy of its own, with 32 the four of a row share it.
    """
    WORDS: gl.constexpr = (1 << BITS) // 2
    always = row >= 0
    upper = (row // ROWS_PER_TABLE) * WORDS
    lower = ((row + 8) // ROWS_PER_TABLE) * WORDS
    upper_id = gl.load(slots + upper // PAGE_WORDS)
    lower_id = gl.load(slots + lower // PAGE_WORDS)
    upper_at = _page(pages, host, upper_id, PAGE_WORDS, HAS_HOST) + upper % PAGE_WORDS
    lower_at = _page(pages, host, lower_id, PAGE_WORDS, HAS_HOST) + lower % PAGE_WORDS
    if BITS == 2:
        u0, u1 = _load_2(upper_at, always, THREADS)
        l0, l1 = _load_2(lower_at, always, THREADS)
        store_entries(address, u0, l0, LINE)
        store_entries(address + 2 * LINE, u1, l1, LINE)
    else:
        SHARE: gl.constexpr = 1 if LINE == 128 else 4
        if SHARE == 4:
            upper_at += i * 4
            lower_at += i * 4
            address += (i * (8 * LINE)).to(gl.uint32)
        for _ in range(WORDS // (4 * SHARE)):
            u0, u1, u2, u3 = _load_4(upper_at, always, THREADS)
            l0, l1, l2, l3 = _load_4(lower_at, always, THREADS)
            store_entries(address, u0, l0, LINE)
            store_entries(address + 2 * LINE, u1, l1, LINE)
            store_entries(address + 4 * LINE, u2, l2, LINE)
            store_entries(address + 6 * LINE, u3, l3, LINE)
            upper_at += 4 * SHARE
            lower_at += 4 * SHARE
            address += 8 * LINE * SHARE


@gluon.jit
def _load_tokens(x, place, used, TILES: gl.constexpr, THREADS: gl.constexpr):
    """Fragments of two steps of 16 columns, for each 8 tokens: a tuple of 4 * TILES words."""
    found = ()
    for n in gl.static_range(TILES):
        found = found + _load_4(x + place + n * 128, used[n], THREADS)
    return found


@gluon.jit
def _multiply(acc, upper, lower, tokens, HALF: gl.constexpr, TILES: gl.constexpr):
    """Adds a step's products: of fragments of both blocks of rows with 8 tokens at a time."""
    added = ()
    for n in gl.static_range(TILES):
        b0 = tokens[4 * n + 2 * HALF]
        b1 = tokens[4 * n + 2 * HALF + 1]
        added = added + mma(
            upper[0], upper[1], upper[2], upper[3], b0, b1,
            acc[8 * n], acc[8 * n + 1], acc[8 * n + 2], acc[8 * n + 3],
        )  # fmt: skip
        added = added + mma(
            lower[0], lower[1], lower[2], lower[3], b0, b1,
            acc[8 * n + 4], acc[8 * n + 5], acc[8 * n + 6], acc[8 * n + 7],
        )  # fmt: skip
    return added


@gluon.jit
def _planes_product(
    acc, pages, host, slots, table_slots, x, used_tokens, memory, tid, row0, row1,
    BITS: gl.constexpr, PLANE_PAGES: gl.constexpr, PAGE_WORDS: gl.constexpr,
    COLUMNS: gl.constexpr, ROWS_PER_TABLE: gl.constexpr, LEAST_LINE: gl.constexpr,
    TILES: gl.constexpr, ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr, HAS_HOST: gl.constexpr,
):  # fmt: skip
    """Products of both blocks of rows with all tokens of the tile; of this warp's steps only."""
    THREADS: gl.constexpr = 32 * ROW_WARPS * K_WARPS
    ATOMS: gl.constexpr = (COLUMNS + 127) // 128
    STEPS: gl.constexpr = (COLUMNS + 255) // 256
    # A copy of a table for each thread has no conflicts of banks, as long as there is room.
    LINE: gl.constexpr = 128 if BITS <= LEAST_LINE else 32
    warp = tid // 32
    k_warp = warp // ROW_WARPS
    row_warp = warp % ROW_WARPS
    lane = tid % 32
    g = lane // 4
    i = lane % 4
    offset = row_warp * 16 + g
    if LINE == 128:
        entry = lane * 4
    else:
        entry = g * 4
    table0 = memory + (row_warp * (LINE << BITS) + entry).to(gl.uint32)
    table1 = table0 + ROW_WARPS * (LINE << BITS)
    within0 = (row0 % 64 + offset) * 4 + i % 2 * 2
    within1 = (row1 % 64 + offset) * 4 + i % 2 * 2
    band0 = row0 // 64 * ATOMS
    band1 = row1 // 64 * ATOMS
    atom = k_warp * 2 + i // 2
    used = atom < ATOMS
    planes0 = _load_planes(
        pages, host, slots, band0 + atom, within0, used,
        BITS, PLANE_PAGES, PAGE_WORDS, HAS_HOST, THREADS,
    )  # fmt: skip
    planes1 = _load_planes(
        pages, host, slots, band1 + atom, within1, used,
        BITS, PLANE_PAGES, PAGE_WORDS, HAS_HOST, THREADS,
    )  # fmt: skip
    # The first planes are under way meanwhile.
    # Warps that share rows fill the same tables with the same values.
    _fill_table(
        pages, host, slots + table_slots, row0 + offset, i, table0,
        BITS, LINE, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST, THREADS,
    )  # fmt: skip
    _fill_table(
        pages, host, slots + table_slots, row1 + offset, i, table1,
        BITS, LINE, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST, THREADS,
    )  # fmt: skip
    barrier()
    step = k_warp
    for _ in range((STEPS + K_WARPS - 1) // K_WARPS):
        atom += 2 * K_WARPS
        used = atom < ATOMS
        next0 = _load_planes(
            pages, host, slots, band0 + atom, within0, used,
            BITS, PLANE_PAGES, PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        next1 = _load_planes(
            pages, host, slots, band1 + atom, within1, used,
            BITS, PLANE_PAGES, PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        in_columns = step * 4 + i < (COLUMNS + 63) // 64
        reads = ()
        for n in gl.static_range(TILES):
            reads = reads + (used_tokens[n] & in_columns,)
        place = step * (1024 * TILES) + lane * 4
        for v in gl.static_range(2):
            upper0 = ()
            lower0 = ()
            upper1 = ()
            lower1 = ()
            for plane in gl.static_range(BITS):
                upper0 = upper0 + (planes0[4 * plane + v],)
                lower0 = lower0 + (planes0[4 * plane + 2 + v],)
                upper1 = upper1 + (planes1[4 * plane + v],)
                lower1 = lower1 + (planes1[4 * plane + 2 + v],)
            upper0 = codes_of(upper0, BITS)
            lower0 = codes_of(lower0, BITS)
            upper1 = codes_of(upper1, BITS)
            lower1 = codes_of(lower1, BITS)
            for q in gl.static_range(4):
                tokens = _load_tokens(x, place + (v * 4 + q) * (128 * TILES), reads, TILES, THREADS)
                for half in gl.static_range(2):
                    first = look_up(upper0[2 * q + half], lower0[2 * q + half], table0, LINE)
                    second = look_up(upper1[2 * q + half], lower1[2 * q + half], table1, LINE)
                    acc = _multiply(acc, first, second, tokens, half, TILES)
        step += K_WARPS
        planes0 = next0
        planes1 = next1
    return acc


@gluon.jit
def _load_dense(
    pages, host, slots, atom, within, columns_left,
    PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Of four neighbouring atoms 8 columns of row g and of row g + 8: a tuple of 32 words."""
    found = ()
    for e in gl.static_range(4):
        used = columns_left > e
        at = _atom(pages, host, slots, atom + e, used, PAGE_WORDS, HAS_HOST) + within
        found = found + _load_4(at, used, THREADS) + _load_4(at + 32, used, THREADS)
    return found


@gluon.jit
def _dense_fragment(words, STEP: gl.constexpr):
    """The fragment of step STEP of 8, of what `_load_dense` gives."""
    w: gl.constexpr = STEP // 2
    half: gl.constexpr = STEP % 2
    return (
        pick_pair(words[w], words[8 + w], half),
        pick_pair(words[4 + w], words[12 + w], half),
        pick_pair(words[16 + w], words[24 + w], half),
        pick_pair(words[20 + w], words[28 + w], half),
    )


@gluon.jit
def _dense_product(
    acc, pages, host, slots, x, used_tokens, tid, row0, row1,
    PAGE_WORDS: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr,
    ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr, HAS_HOST: gl.constexpr,
):  # fmt: skip
    """As `_planes_product`, of rows of bfloat16."""
    THREADS: gl.constexpr = 32 * ROW_WARPS * K_WARPS
    ATOMS: gl.constexpr = (COLUMNS + 7) // 8
    STEPS: gl.constexpr = (COLUMNS + 255) // 256
    warp = tid // 32
    k_warp = warp // ROW_WARPS
    row_warp = warp % ROW_WARPS
    lane = tid % 32
    i = lane % 4
    offset = row_warp * 16 + lane // 4
    within0 = (row0 % 64 + offset) * 4
    within1 = (row1 % 64 + offset) * 4
    # Half steps of 128 columns: 32 of each thread.
    atom = k_warp * 32 + i * 8
    first0 = _load_dense(
        pages, host, slots, row0 // 64 * ATOMS + atom, within0, ATOMS - atom,
        PAGE_WORDS, HAS_HOST, THREADS,
    )  # fmt: skip
    first1 = _load_dense(
        pages, host, slots, row1 // 64 * ATOMS + atom, within1, ATOMS - atom,
        PAGE_WORDS, HAS_HOST, THREADS,
    )  # fmt: skip
    step = k_warp
    v = 0
    for _ in range(2 * ((STEPS + K_WARPS - 1) // K_WARPS)):
        step_after = step + v * K_WARPS
        v_after = 1 - v
        atom = step_after * 32 + i * 8 + v_after * 4
        next0 = _load_dense(
            pages, host, slots, row0 // 64 * ATOMS + atom, within0, ATOMS - atom,
            PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        next1 = _load_dense(
            pages, host, slots, row1 // 64 * ATOMS + atom, within1, ATOMS - atom,
            PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        in_columns = step * 4 + i < (COLUMNS + 63) // 64
        reads = ()
        for n in gl.static_range(TILES):
            reads = reads + (used_tokens[n] & in_columns,)
        place = step * (1024 * TILES) + v * (512 * TILES) + lane * 4
        for q in gl.static_range(4):
            tokens = _load_tokens(x, place + q * (128 * TILES), reads, TILES, THREADS)
            for half in gl.static_range(2):
                upper = _dense_fragment(first0, 2 * q + half)
                lower = _dense_fragment(first1, 2 * q + half)
                acc = _multiply(acc, upper, lower, tokens, half, TILES)
        first0 = next0
        first1 = next1
        step = step_after
        v = v_after
    return acc


@gluon.jit
def _add_warps(
    acc, memory, tid, COUNT: gl.constexpr, ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr
):
    """The sums over the warps that share rows, in a fixed order; right in the first of them."""
    ROW_THREADS: gl.constexpr = 32 * ROW_WARPS
    mine = memory + (tid % ROW_THREADS * 4).to(gl.uint32)
    barrier()
    for j in gl.static_range(COUNT):
        of_warp = (tid // ROW_THREADS * (COUNT * ROW_THREADS * 4)).to(gl.uint32)
        store_shared(mine + of_warp + j * (ROW_THREADS * 4), acc[j])
    barrier()
    added = ()
    for j in gl.static_range(COUNT):
        total = load_shared(mine + j * (ROW_THREADS * 4))
        for k in gl.static_range(1, K_WARPS):
            total += load_shared(mine + (k * COUNT + j) * (ROW_THREADS * 4))
        added = added + (total,)
    return added


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
    chunk = row // 256 * 8 + row // 32 % 2 * 4 + row % 8 // 2
    at = (chunk * (8 * TILES) + token) * 32 + row // 64 % 4 * 8 + row % 2 * 4 + row // 8 % 4
    gl.store(out + at, y.to(gl.bfloat16), mask=is_token)


@gluon.jit
def product_kernel(
    pages,  # uint32[pages, words]
    host,  # uint32[host pages, words]
    table,  # int32[experts, slots]
    tiles,  # int32[tiles, 8]: expert, first place, tokens, widths of gate_up and down
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
    expert = gl.load(header)
    width = gl.load(header + 3 + WHICH)
    start = gl.load(header + 1)
    if count > 0:
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [ROW_WARPS * K_WARPS], [0])
        tid = gl.arange(0, THREADS, layout=ONE)
        memory = shared_address(SHARED, THREADS)
        slots = table + expert.to(gl.int64) * SLOTS
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
                    acc = _planes_product(
                        zeros, pages, host, slots, TABLE_SLOTS[bits - SEED_BITS], words,
                        used_tokens, memory, tid, row0, row1,
                        bits, PLANE_PAGES, PAGE_WORDS, COLUMNS, ROWS_PER_TABLE, LEAST_LINE,
                        TILES, ROW_WARPS, K_WARPS, HAS_HOST,
                    )  # fmt: skip
        if HAS_DENSE:
            if width == 16:
                acc = _dense_product(
                    zeros, pages, host, slots, words, used_tokens, tid, row0, row1,
                    PAGE_WORDS, COLUMNS, TILES, ROW_WARPS, K_WARPS, HAS_HOST,
                )  # fmt: skip
        if K_WARPS > 1:
            acc = _add_warps(acc, memory, tid, 8 * TILES, ROW_WARPS, K_WARPS)
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
