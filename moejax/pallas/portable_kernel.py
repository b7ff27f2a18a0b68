"""The product of tokens with a linear that lies in pages, in plain Triton: right before fast.

A program multiplies a block of rows of one linear (of gate and of up the same rows) with a tile of
tokens that chose its expert. Width and pages are data. Codes come from the words of planes by shift
and mask, weights from the tables in the arena by code, and `tl.dot` multiplies in the dtype of the
tokens and adds in float32. Nothing here depends on how a GPU lays out its registers, so Triton's
interpreter runs it too.
"""

import triton
import triton.language as tl


@triton.jit
def _page(pages, host, ids, PAGE_WORDS: tl.constexpr, HAS_HOST: tl.constexpr):
    """Where pages of these signed ids begin."""
    if HAS_HOST:
        on_host = host + (-1 - ids).to(tl.int64) * PAGE_WORDS
        return tl.where(ids >= 0, pages + ids.to(tl.int64) * PAGE_WORDS, on_host)
    # Without a host pool there is nothing below 0: the page of poison is read instead.
    return pages + tl.maximum(ids, 0).to(tl.int64) * PAGE_WORDS


@triton.jit
def _atom(
    pages, host, slots, band, column, used,
    PAGE_WORDS: tl.constexpr, ATOMS: tl.constexpr, HAS_HOST: tl.constexpr,
):  # fmt: skip
    """Where atoms of the run at these slots begin: ATOMS of each band of 64 rows."""
    PAGE_ATOMS: tl.constexpr = PAGE_WORDS // 256
    atom = band * ATOMS + column
    ids = tl.load(slots + atom // PAGE_ATOMS, mask=used, other=0)
    return _page(pages, host, ids, PAGE_WORDS, HAS_HOST) + (atom % PAGE_ATOMS) * 256


@triton.jit
def _load_codes(
    pages, host, slots, row, first, width,
    PARENT_BITS: tl.constexpr, PLANE_PAGES: tl.constexpr, PAGE_WORDS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, HAS_HOST: tl.constexpr,
):  # fmt: skip
    """int32[BLOCK, STEP]: codes of `width` bits of these rows, from column `first` on."""
    ATOMS: tl.constexpr = (COLUMNS + 127) // 128
    WORDS: tl.constexpr = STEP // 32
    word = first % 128 // 32 + tl.arange(0, WORDS)
    within = (row % 64)[:, None] * 4 + word[None, :]
    words = ()
    # All loads are under way before the first one is needed.
    for plane in tl.static_range(PARENT_BITS):
        of_plane = slots + plane * PLANE_PAGES
        used = (row >= 0) & (plane < width)
        at = _atom(
            pages, host, of_plane, row // 64, first // 128, used, PAGE_WORDS, ATOMS, HAS_HOST
        )
        words = words + (tl.load(at[:, None] + within, mask=used[:, None], other=0),)
    place = tl.arange(0, 32)[None, None, :]
    codes = tl.zeros([BLOCK, WORDS, 32], tl.int32)
    for plane in tl.static_range(PARENT_BITS):
        bit = (words[plane][:, :, None] >> place) & 1
        codes = codes * 2 + bit.to(tl.int32)
    # Planes beyond the width were taken for zeros.
    return tl.reshape(codes >> (PARENT_BITS - width), [BLOCK, STEP])


@triton.jit
def _find_tables(
    pages, host, slots, row, width,
    SEED_BITS: tl.constexpr, PARENT_BITS: tl.constexpr, TABLE_SLOTS: tl.constexpr,
    ROWS_PER_TABLE: tl.constexpr, PAGE_WORDS: tl.constexpr, HAS_HOST: tl.constexpr,
):  # fmt: skip
    """Where the tables of these rows begin, as pointers to float16. No table crosses a page."""
    first = 0
    for bits in tl.static_range(SEED_BITS, PARENT_BITS + 1):
        if width == bits:
            first = TABLE_SLOTS[bits - SEED_BITS]
    word = ((row // ROWS_PER_TABLE) << width) // 2
    ids = tl.load(slots + first + word // PAGE_WORDS)
    at = _page(pages, host, ids, PAGE_WORDS, HAS_HOST) + word % PAGE_WORDS
    return at.to(tl.pointer_type(tl.float16), bitcast=True)


@triton.jit
def _load_tokens(x, place, used, first, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """[tokens, STEP]: zeros beyond the columns and for places that are not used."""
    column = first + tl.arange(0, STEP)
    at = x + place.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    return tl.load(at, mask=used[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def _multiply(
    pages, host, slots, x, place, used, row, width,
    SEED_BITS: tl.constexpr, PARENT_BITS: tl.constexpr, TABLE_SLOTS: tl.constexpr,
    PLANE_PAGES: tl.constexpr, ROWS_PER_TABLE: tl.constexpr, HAS_DENSE: tl.constexpr,
    PAGE_WORDS: tl.constexpr, COLUMNS: tl.constexpr, DENSE_ATOM: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, HAS_HOST: tl.constexpr,
):  # fmt: skip
    """float32[TOKENS, BLOCK]: products of tokens with rows; NaN at a width that is not stored."""
    STEPS: tl.constexpr = (COLUMNS + STEP - 1) // STEP
    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.full([TOKENS, BLOCK], float("nan"), tl.float32)
    if PARENT_BITS > 0:
        if (width >= SEED_BITS) & (width <= PARENT_BITS):
            acc = tl.zeros([TOKENS, BLOCK], tl.float32)
            tables = _find_tables(
                pages, host, slots, row, width,
                SEED_BITS, PARENT_BITS, TABLE_SLOTS, ROWS_PER_TABLE, PAGE_WORDS, HAS_HOST,
            )  # fmt: skip
            for step in range(STEPS):
                codes = _load_codes(
                    pages, host, slots, row, step * STEP, width,
                    PARENT_BITS, PLANE_PAGES, PAGE_WORDS, COLUMNS, BLOCK, STEP, HAS_HOST,
                )  # fmt: skip
                # Beyond the columns codes are 0, which tables have, and tokens are zeros.
                w = tl.load(tables[:, None] + codes)
                tokens = _load_tokens(x, place, used, step * STEP, COLUMNS, STEP)
                acc = tl.dot(tokens, tl.trans(w.to(dtype)), acc, input_precision="ieee")
    if HAS_DENSE:
        if width == 16:
            ATOMS: tl.constexpr = (COLUMNS + DENSE_ATOM - 1) // DENSE_ATOM
            acc = tl.zeros([TOKENS, BLOCK], tl.float32)
            for step in range(STEPS):
                column = (step * STEP + tl.arange(0, STEP))[None, :]
                is_column = (column < COLUMNS) & (row >= 0)[:, None]
                at = _atom(
                    pages, host, slots, (row // 64)[:, None], column // DENSE_ATOM, is_column,
                    PAGE_WORDS, ATOMS, HAS_HOST,
                )  # fmt: skip
                at = at.to(tl.pointer_type(dtype), bitcast=True)
                within = (row % 64)[:, None] * DENSE_ATOM + column % DENSE_ATOM
                w = tl.load(at + within, mask=is_column, other=0.0)
                tokens = _load_tokens(x, place, used, step * STEP, COLUMNS, STEP)
                acc = tl.dot(tokens, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _activate(
    gate, up, dtype: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """moejax.layers.mlp.activate, in float32 on rounded factors. NaN stays NaN."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        # tl.minimum takes the other number where one is NaN.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        gated = (up + 1) * gate / (1 + tl.exp(-ALPHA * gate))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gated = (0.5 * gate * (1 + _tanh(inner))).to(dtype).to(tl.float32) * up
    else:
        gated = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    return gated


@triton.jit
def portable_kernel(
    pages,  # uint32[pages, words]
    host,  # uint32[host pages, words]
    table,  # int32[experts, slots]
    widths,  # int32[experts, 2]
    tile_expert,  # int32[tiles]
    tile_start,  # int32[tiles]
    tile_count,  # int32[tiles]: tokens, 0 where there is no tile
    x,  # [places, COLUMNS], float32 or bfloat16
    bias,  # [experts, PARTS, ROWS]
    out,  # [places, ROWS]
    WHICH: tl.constexpr,  # which of the two widths
    PARTS: tl.constexpr,  # 2: gate and up, and the activation; 1: a product alone
    ROWS: tl.constexpr,  # of a part
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    PLANE_PAGES: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    SEED_BITS: tl.constexpr,
    PARENT_BITS: tl.constexpr,  # 0: no planes
    TABLE_SLOTS: tl.constexpr,
    ROWS_PER_TABLE: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    DENSE_ATOM: tl.constexpr,  # columns of an atom of the dense run
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HOST: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile
    BLOCK: tl.constexpr,  # rows of a program, a power of two: of each part up to 64
    STEP: tl.constexpr,  # columns at once: 32, 64 or 128
):
    tile = tl.program_id(1)
    count = tl.load(tile_count + tile)
    if count > 0:
        expert = tl.load(tile_expert + tile)
        width = tl.load(widths + expert * 2 + WHICH)
        slots = table + expert.to(tl.int64) * SLOTS
        token = tl.arange(0, TOKENS)
        place = tl.load(tile_start + tile) + token
        used = token < count
        # Rows of the run: with two parts the first half of them is of gate, the other half of up.
        PART: tl.constexpr = BLOCK // PARTS
        first = tl.program_id(0) * PART
        number = tl.arange(0, BLOCK)
        row = first + number % PART + number // PART * ((ROWS + 63) // 64 * 64)
        y = _multiply(
            pages, host, slots, x, place, used, row, width,
            SEED_BITS, PARENT_BITS, TABLE_SLOTS, PLANE_PAGES, ROWS_PER_TABLE, HAS_DENSE,
            PAGE_WORDS, COLUMNS, DENSE_ATOM, TOKENS, BLOCK, STEP, HAS_HOST,
        )  # fmt: skip
        dtype: tl.constexpr = out.dtype.element_ty
        row = first + tl.arange(0, PART)
        is_row = row < ROWS
        of_bias = bias + expert.to(tl.int64) * (PARTS * ROWS) + row
        if PARTS == 2:
            gate, up = tl.split(tl.permute(tl.reshape(y, [TOKENS, 2, PART]), (0, 2, 1)))
            if HAS_BIAS:
                gate += tl.load(of_bias, mask=is_row, other=0.0).to(tl.float32)[None, :]
                up += tl.load(of_bias + ROWS, mask=is_row, other=0.0).to(tl.float32)[None, :]
            y = _activate(gate, up, dtype, ACTIVATION, ALPHA, LIMIT)
        elif HAS_BIAS:
            y += tl.load(of_bias, mask=is_row, other=0.0).to(tl.float32)[None, :]
        at = out + place.to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(at, y.to(dtype), mask=used[:, None] & is_row[None, :])
