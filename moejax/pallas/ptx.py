"""What kernels in Gluon write in PTX: shared memory by address, lookup tables in it, mma.

Tensors here have one element per thread, so an operation stands for one instruction of each thread,
and a thread's place in its warp says what it holds. Gluon of triton 3.6 cannot gather from shared
memory; by address it can be done in one instruction per element.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Waits for all threads of a program. The first is its name from triton 3.7 on."""


@gluon.jit
def shared_address(SIZE: gl.constexpr, threads: gl.constexpr):
    """The address of SIZE bytes of shared memory, for each thread; the program's only ones."""
    zero = gl.zeros([threads], gl.uint32, gl.BlockedLayout([1], [32], [threads // 32], [0]))
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # As the only allocation it begins where the symbol of all shared memory points to.
    memory = gl.allocate_shared_memory(gl.uint32, [SIZE // 4], layout)
    memory.slice(0, threads).store(zero)
    barrier()
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem; add.u32 $0, $0, $1;",
        "=&r,r",
        [zero],
        dtype=gl.uint32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_shared(address, value):
    """Stores a float32 for each thread."""
    gl.inline_asm_elementwise(
        "st.shared.f32 [$1], $2; mov.u32 $0, $1;",
        "=r,r,f",
        [address, value],
        dtype=gl.uint32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_shared(address):
    """Loads a float32 for each thread."""
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [address], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def copy_16(address, pointer, used):
    """Starts to copy 16 bytes of each thread to shared memory; zeros where not used.

    Unlike a load to registers, no compiler moves it to where the result is waited for.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 size;
        setp.ne.u32 p, $3, 0;
        selp.b32 size, 16, 0, p;
        cp.async.cg.shared.global [$1], [$2], 16, size;
        mov.u32 $0, $1;
        }""",
        "=r,r,l,r",
        [address, pointer.to(gl.uint64), used.to(gl.uint32)],
        dtype=gl.uint32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def end_copies(address):
    """Ends a group of copies, of each thread's own."""
    gl.inline_asm_elementwise(
        "cp.async.commit_group; mov.u32 $0, $1;",
        "=r,r",
        [address],
        dtype=gl.uint32,
        is_pure=False,
        pack=1,
    )


_WAITS = gl.constexpr(tuple(f"cp.async.wait_group {left}; mov.u32 $0, $1;" for left in range(8)))


@gluon.jit
def wait_for_copies(address, LEFT: gl.constexpr):
    """Each thread waits until all but the last LEFT, 7 at most, of its groups have come."""
    gl.inline_asm_elementwise(
        _WAITS[LEFT], "=r,r", [address], dtype=gl.uint32, is_pure=False, pack=1
    )


@gluon.jit
def load_16(address):
    """Four words of each thread from shared memory."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        [address],
        dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def add_warps(
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


# Four float16 entries, in operands 2 and 3, as float32.
_ENTRIES = """{
        .reg .b16 a, b, c, d;
        .reg .f32 fa, fb, fc, fd;
        .reg .b32 x, y;
        mov.b32 {a, b}, $2;
        mov.b32 {c, d}, $3;
        cvt.f32.f16 fa, a;
        cvt.f32.f16 fb, b;
        cvt.f32.f16 fc, c;
        cvt.f32.f16 fd, d;
"""
_STORE_ENTRIES = (
    _ENTRIES
    + """
        cvt.rn.bf16x2.f32 x, fc, fa;
        cvt.rn.bf16x2.f32 y, fd, fb;
        st.shared.b32 [$1], x;
        st.shared.b32 [$1 + LINE], y;
        mov.u32 $0, $1;
        }"""
)
_STORE_ENTRIES_128 = gl.constexpr(_STORE_ENTRIES.replace("LINE", "128"))
_STORE_ENTRIES_32 = gl.constexpr(_STORE_ENTRIES.replace("LINE", "32"))
_SPLIT_ENTRIES = gl.constexpr(
    _ENTRIES
    + """
        cvt.rn.bf16x2.f32 x, fb, fa;
        cvt.rn.bf16x2.f32 y, fd, fc;
        prmt.b32 $0, x, y, 0x6420;
        prmt.b32 $1, x, y, 0x7531;
        }"""
)


@gluon.jit
def store_entries(address, upper, lower, LINE: gl.constexpr):
    """Stores two neighbouring entries of two tables, LINE bytes apart.

    `upper` and `lower` are words of two float16 entries each. A stored word has one entry of both
    tables as bfloat16, that of `upper` in its low half.
    """
    text: gl.constexpr = _STORE_ENTRIES_128 if LINE == 128 else _STORE_ENTRIES_32
    gl.inline_asm_elementwise(
        text,
        "=r,r,r,r",
        [address, upper, lower],
        dtype=gl.uint32,
        is_pure=False,
        pack=1,
    )


# One instruction turns a byte of a word into an address: the dot product of the word's bytes with
# a byte that is 1 in the entry size, plus the address of the table (dp4a runs beside the integer
# units, which are the busy ones).
_LOOK_UP = """{
        .reg .b32 p<8>, v<8>;
        dp4a.u32.u32 p0, $4, FIRST, $8;
        dp4a.u32.u32 p1, $5, FIRST, $8;
        dp4a.u32.u32 p2, $4, SECOND, $8;
        dp4a.u32.u32 p3, $5, SECOND, $8;
        dp4a.u32.u32 p4, $6, FIRST, $8;
        dp4a.u32.u32 p5, $7, FIRST, $8;
        dp4a.u32.u32 p6, $6, SECOND, $8;
        dp4a.u32.u32 p7, $7, SECOND, $8;
        ld.shared.b32 v0, [p0];
        ld.shared.b32 v1, [p1];
        ld.shared.b32 v2, [p2];
        ld.shared.b32 v3, [p3];
        ld.shared.b32 v4, [p4];
        ld.shared.b32 v5, [p5];
        ld.shared.b32 v6, [p6];
        ld.shared.b32 v7, [p7];
        prmt.b32 $0, v0, v1, 0x5410;
        prmt.b32 $1, v4, v5, 0x7632;
        prmt.b32 $2, v2, v3, 0x5410;
        prmt.b32 $3, v6, v7, 0x7632;
        }"""
_LOOK_UP_128_0 = gl.constexpr(_LOOK_UP.replace("FIRST", "0x80").replace("SECOND", "0x8000"))
_LOOK_UP_128_1 = gl.constexpr(_LOOK_UP.replace("FIRST", "0x800000").replace("SECOND", "0x80000000"))
_LOOK_UP_32_0 = gl.constexpr(_LOOK_UP.replace("FIRST", "0x20").replace("SECOND", "0x2000"))
_LOOK_UP_32_1 = gl.constexpr(_LOOK_UP.replace("FIRST", "0x200000").replace("SECOND", "0x20000000"))


@gluon.jit
def look_up(upper0, upper1, lower0, lower1, table, HALF: gl.constexpr, LINE: gl.constexpr):
    """The weights of four codes of two rows, as a fragment of the first factor of `mma`.

    The codes are bytes 2 HALF and 2 HALF + 1, in turn of the first and of the second word: `upper`
    of row g, `lower` of row g + 8, where g is the thread's place in its warp // 4. `table`: the
    address of entry 0 for this thread, see `store_entries`.
    """
    if LINE == 128:
        text: gl.constexpr = _LOOK_UP_128_0 if HALF == 0 else _LOOK_UP_128_1
    else:
        text: gl.constexpr = _LOOK_UP_32_0 if HALF == 0 else _LOOK_UP_32_1
    return gl.inline_asm_elementwise(
        text,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [upper0, upper1, lower0, lower1, table],
        dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def split_entries(first, second):
    """Four float16 entries, in two words, as bfloat16: their low bytes, and their high bytes."""
    return gl.inline_asm_elementwise(
        _SPLIT_ENTRIES,
        "=&r,=&r,r,r",
        [first, second],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pick_entries(codes, table):
    """The weights of eight codes of up to 3 bits, each in a nibble: four words of two.

    `table`: low bytes of entries 0 to 3 and of 4 to 7, then their high bytes. A byte permute looks
    up four codes at once.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, rest;
        shr.u32 rest, $4, 16;
        prmt.b32 low, $5, $6, $4;
        prmt.b32 high, $7, $8, $4;
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
        prmt.b32 low, $5, $6, rest;
        prmt.b32 high, $7, $8, rest;
        prmt.b32 $2, low, high, 0x5140;
        prmt.b32 $3, low, high, 0x7362;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [codes, table[0], table[1], table[2], table[3]],
        dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pick_pair(first, second, HALF: gl.constexpr):
    """The low halves (HALF 0) or the high halves of two words, as one word."""
    text: gl.constexpr = (
        "prmt.b32 $0, $1, $2, 0x5410;" if HALF == 0 else "prmt.b32 $0, $1, $2, 0x7632;"
    )
    return gl.inline_asm_elementwise(
        text, "=r,r,r", [first, second], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """c + a b of a warp: a is 16 x 16, b 16 x 8, of bfloat16; c is 16 x 8, of float32.

    Of a thread at place 4 g + i: a0 and a1 are columns 2 i and 2 i + 1 of rows g and g + 8, a2 and
    a3 those 8 columns further; b0 and b1 the same of column g of b; c0 and c1 columns 2 i and
    2 i + 1 of row g, c2 and c3 of row g + 8 (PTX ISA, mma.m16n8k16).
    """
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def multiply(acc, upper, lower, tokens, HALF: gl.constexpr, TILES: gl.constexpr):
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
