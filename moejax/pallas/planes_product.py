"""The product with bit-planes of one width, in Gluon: see `product_kernel`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moejax.pallas import product
from moejax.pallas.bit_words import codes_of, nibbles_of
from moejax.pallas.page_reads import atom_at, load_4, load_tokens, page_at
from moejax.pallas.ptx import (
    barrier,
    look_up,
    multiply,
    pick_entries,
    split_entries,
    store_entries,
)

NIBBLE_BITS = gl.constexpr(product.NIBBLE_BITS)


@gluon.jit
def _find_pages(
    slots, atom,
    BITS: gl.constexpr, PLANE_PAGES: gl.constexpr, ATOMS: gl.constexpr, HAS_HOST: gl.constexpr,
):  # fmt: skip
    """The page of an atom in each plane, of so many atoms a page."""
    found = ()
    for plane in gl.static_range(BITS):
        page = gl.load(slots + plane * PLANE_PAGES + atom // ATOMS)
        if not HAS_HOST:
            # Without a pool on the host its pages read as poison.
            page = gl.maximum(page, 0)
        found = found + (page,)
    return found


@gluon.jit
def _load_planes(
    pages, host, slots, near, far, first, step, within, used,
    BITS: gl.constexpr, PLANE_PAGES: gl.constexpr, PAGE_WORDS: gl.constexpr,
    SPAN: gl.constexpr, HAS_HOST: gl.constexpr,
):  # fmt: skip
    """Of each plane a word of row g, and then one of row g + 8 each: two tuples of BITS.

    `near`, `far`: the pages of the first atom and of the last, where a band spans so many.
    """
    ATOMS: gl.constexpr = PAGE_WORDS // 256
    atom = first + step
    inside = atom % ATOMS * 256 + within
    upper = ()
    lower = ()
    for plane in gl.static_range(BITS):
        if SPAN == 0:
            of_plane = slots + plane * PLANE_PAGES
            at = atom_at(pages, host, of_plane, atom, used, PAGE_WORDS, HAS_HOST) + within
        else:
            page = near[plane]
            if SPAN == 2:
                page = gl.where(atom // ATOMS == first // ATOMS, page, far[plane])
            if HAS_HOST:
                at = page_at(pages, host, page, PAGE_WORDS, HAS_HOST) + inside
            else:
                at = (pages + inside) + page.to(gl.int64) * PAGE_WORDS
        upper = upper + (gl.load(at, mask=used, other=0),)
        lower = lower + (gl.load(at + 32, mask=used, other=0),)
    return upper, lower


@gluon.jit
def _load_step(
    pages, host, slots, near, far, bands, step, within, STEPS: gl.constexpr,
    BITS: gl.constexpr, PLANE_PAGES: gl.constexpr, PAGE_WORDS: gl.constexpr,
    SPAN: gl.constexpr, HAS_HOST: gl.constexpr,
):  # fmt: skip
    """What both blocks of rows need of a step: upper and lower of one, then of the other."""
    upper0, lower0 = _load_planes(
        pages, host, slots, near[0], far[0], bands[0], step, within[0], step < STEPS,
        BITS, PLANE_PAGES, PAGE_WORDS, SPAN, HAS_HOST,
    )  # fmt: skip
    upper1, lower1 = _load_planes(
        pages, host, slots, near[1], far[1], bands[1], step, within[1], step < STEPS,
        BITS, PLANE_PAGES, PAGE_WORDS, SPAN, HAS_HOST,
    )  # fmt: skip
    return upper0, lower0, upper1, lower1


@gluon.jit
def _table_at(
    pages, host, slots, row, WORDS: gl.constexpr, ROWS_PER_TABLE: gl.constexpr,
    PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr,
):  # fmt: skip
    """Where the table of a row begins."""
    first = row // ROWS_PER_TABLE * WORDS
    page = gl.load(slots + first // PAGE_WORDS)
    return page_at(pages, host, page, PAGE_WORDS, HAS_HOST) + first % PAGE_WORDS


@gluon.jit
def _load_table(
    pages, host, slots, row,
    BITS: gl.constexpr, ROWS_PER_TABLE: gl.constexpr,
    PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """The table of a row in registers, as `pick_entries` reads it."""
    WORDS: gl.constexpr = (1 << BITS) // 2
    at = _table_at(pages, host, slots, row, WORDS, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST)
    always = row >= 0
    if BITS == 2:
        low0, high0 = split_entries(gl.load(at), gl.load(at + 1))
        found = (low0, low0, high0, high0)
    else:
        w0, w1, w2, w3 = load_4(at, always, THREADS)
        low0, high0 = split_entries(w0, w1)
        low1, high1 = split_entries(w2, w3)
        found = (low0, low1, high0, high1)
    return found


@gluon.jit
def _fill_tables(
    pages, host, slots, row0, row1, table0, table1, part,
    BITS: gl.constexpr, LINE: gl.constexpr, PARTS: gl.constexpr, ROWS_PER_TABLE: gl.constexpr,
    PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Brings tables to shared memory: of rows `row` and `row` + 8 of both blocks.

    Threads that share a copy bring a part each. All words of two turns are under way at a time:
    few programs run beside, so that nothing else hides how long the first word takes.
    """
    WORDS: gl.constexpr = (1 << BITS) // 2
    TURNS: gl.constexpr = WORDS // (4 * PARTS)
    ABREAST: gl.constexpr = 2 if TURNS % 2 == 0 else 1
    always = row0 >= 0
    sources = ()
    for row in gl.static_range(4):
        of_block = row0 if row < 2 else row1
        at = _table_at(
            pages, host, slots, of_block + row % 2 * 8, WORDS, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST
        )
        sources = sources + (at + part * 4,)
    moved = (part * (8 * LINE)).to(gl.uint32)
    for turn in range(TURNS // ABREAST):
        words = ()
        for n in gl.static_range(ABREAST):
            for row in gl.static_range(4):
                at = sources[row] + (turn * ABREAST + n) * (4 * PARTS)
                words = words + (load_4(at, always, THREADS),)
        for n in gl.static_range(ABREAST):
            for block in gl.static_range(2):
                address = (table0 if block == 0 else table1) + moved
                upper = words[4 * n + 2 * block]
                lower = words[4 * n + 2 * block + 1]
                for j in gl.static_range(4):
                    store_entries(address + 2 * j * LINE, upper[j], lower[j], LINE)
            moved += 8 * LINE * PARTS


@gluon.jit
def planes_product(
    acc, pages, host, slots, table_slots, tokens, used_tokens, memory, tid, row0, row1,
    BITS: gl.constexpr, PLANE_PAGES: gl.constexpr, PAGE_WORDS: gl.constexpr,
    COLUMNS: gl.constexpr, ROWS_PER_TABLE: gl.constexpr, LEAST_LINE: gl.constexpr,
    TILES: gl.constexpr, ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr, HAS_HOST: gl.constexpr,
):  # fmt: skip
    """Products of both blocks of rows with all tokens of the tile; of this warp's steps only."""
    THREADS: gl.constexpr = 32 * ROW_WARPS * K_WARPS
    # Of an atom each.
    STEPS: gl.constexpr = (COLUMNS + 127) // 128
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
    within = ((row0 % 64 + offset) * 4 + i, (row1 % 64 + offset) * 4 + i)
    bands = (row0 // 64 * STEPS, row1 // 64 * STEPS)
    # Where a band lies in a page or two, their ids are read once.
    ATOMS: gl.constexpr = PAGE_WORDS // 256
    SPAN: gl.constexpr = 1 if ATOMS % STEPS == 0 else (2 if STEPS <= ATOMS else 0)
    near = ()
    far = ()
    for n in gl.static_range(2):
        last = bands[n] + STEPS - 1
        near = near + (_find_pages(slots, bands[n], BITS, PLANE_PAGES, ATOMS, HAS_HOST),)
        far = far + (_find_pages(slots, last, BITS, PLANE_PAGES, ATOMS, HAS_HOST),)
    step = k_warp
    upper0, lower0, upper1, lower1 = _load_step(
        pages, host, slots, near, far, bands, step, within, STEPS,
        BITS, PLANE_PAGES, PAGE_WORDS, SPAN, HAS_HOST,
    )  # fmt: skip
    # The first planes are under way meanwhile.
    tables = slots + table_slots
    if BITS <= NIBBLE_BITS:
        upper_table0 = _load_table(
            pages, host, tables, row0 + offset,
            BITS, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        lower_table0 = _load_table(
            pages, host, tables, row0 + offset + 8,
            BITS, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        upper_table1 = _load_table(
            pages, host, tables, row1 + offset,
            BITS, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        lower_table1 = _load_table(
            pages, host, tables, row1 + offset + 8,
            BITS, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
    else:
        # So many threads of a row share a copy of its table, and warps that share rows do.
        SHARE: gl.constexpr = 128 // LINE
        QUADS: gl.constexpr = (1 << BITS) // 8
        PARTS: gl.constexpr = SHARE * K_WARPS if SHARE * K_WARPS < QUADS else QUADS
        _fill_tables(
            pages, host, tables, row0 + offset, row1 + offset, table0, table1,
            (k_warp * SHARE + i % SHARE) % PARTS,
            BITS, LINE, PARTS, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST, THREADS,
        )  # fmt: skip
        barrier()
    for _ in range((STEPS + K_WARPS - 1) // K_WARPS):
        next_upper0, next_lower0, next_upper1, next_lower1 = _load_step(
            pages, host, slots, near, far, bands, step + K_WARPS, within, STEPS,
            BITS, PLANE_PAGES, PAGE_WORDS, SPAN, HAS_HOST,
        )  # fmt: skip
        in_columns = step * 4 + i < (COLUMNS + 31) // 32
        reads = ()
        for n in gl.static_range(TILES):
            reads = reads + (used_tokens[n] & in_columns,)
        if BITS <= NIBBLE_BITS:
            upper0 = nibbles_of(upper0, 0, BITS)
            lower0 = nibbles_of(lower0, 0, BITS)
            upper1 = nibbles_of(upper1, 0, BITS)
            lower1 = nibbles_of(lower1, 0, BITS)
        else:
            upper0 = codes_of(upper0, BITS)
            lower0 = codes_of(lower0, BITS)
            upper1 = codes_of(upper1, BITS)
            lower1 = codes_of(lower1, BITS)
        for q in gl.static_range(4):
            x = load_tokens(tokens, step * 64 + q * 16 + i * 4, reads, TILES, THREADS)
            if BITS <= NIBBLE_BITS:
                u0 = pick_entries(upper0[q], upper_table0)
                l0 = pick_entries(lower0[q], lower_table0)
                u1 = pick_entries(upper1[q], upper_table1)
                l1 = pick_entries(lower1[q], lower_table1)
                for half in gl.static_range(2):
                    first = (u0[2 * half], l0[2 * half], u0[2 * half + 1], l0[2 * half + 1])
                    second = (u1[2 * half], l1[2 * half], u1[2 * half + 1], l1[2 * half + 1])
                    acc = multiply(acc, first, second, x, half, TILES)
            else:
                for half in gl.static_range(2):
                    first = look_up(
                        upper0[q], upper0[4 + q], lower0[q], lower0[4 + q], table0, half, LINE
                    )
                    second = look_up(
                        upper1[q], upper1[4 + q], lower1[q], lower1[4 + q], table1, half, LINE
                    )
                    acc = multiply(acc, first, second, x, half, TILES)
        step += K_WARPS
        upper0 = next_upper0
        lower0 = next_lower0
        upper1 = next_upper1
        lower1 = next_lower1
    return acc
