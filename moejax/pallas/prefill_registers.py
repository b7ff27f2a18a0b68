"""What each thread of `prefill_kernel` does with its registers: planes, tables, rows.

Thread 4 g + i of warp w of a warpgroup holds rows 16 w + g and 8 rows further of a block of 64, and
of 128 columns those of word i of each plane: columns 32 i to 32 i + 32. These are functions within
`inline_mgpu`, of values in MLIR. `ptx` says the same in Gluon.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from moejax.pallas.prefill_spec import ATOM_WORDS, Spec


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def const(value: int) -> Any:
    return mgpu.c(value, i32())


def asm(results: list[ir.Type], args: list[Any], text: str, constraints: str) -> list[Any]:
    """Inline PTX that is neither dropped nor moved past other such."""
    if not results:
        kind = ir.Type.parse("!llvm.void")
    elif len(results) == 1:
        kind = results[0]
    else:
        kind = llvm.StructType.get_literal(results)
    found = llvm.inline_asm(kind, args, text, constraints, has_side_effects=True)
    if len(results) < 2:
        return [found]
    return [llvm.extractvalue(t, found, [n]) for n, t in enumerate(results)]


def scalar(array: Any) -> Any:
    return array.registers.item()


def shared(ref: Any) -> Any:
    """The address of a reference in shared memory."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))


def thread() -> tuple[Any, Any, Any]:
    """(w, g, i) of this thread."""
    number = arith.andi(mgpu.utils.thread_idx(), const(127))
    g = arith.andi(arith.shrui(number, const(2)), const(7))
    return arith.shrui(number, const(5)), g, arith.andi(number, const(3))


def add(*values: Any) -> Any:
    total = values[0]
    for value in values[1:]:
        total = arith.addi(total, value)
    return total


def mul(a: Any, b: int) -> Any:
    return arith.muli(a, const(b))


def _word(value: Any) -> mgpu.FragmentedArray:
    """A word of each thread as an array."""
    vector = ir.VectorType.get((1,), i32())
    return mgpu.FragmentedArray(
        _registers=np.array([llvm.bitcast(vector, value)], dtype=object),
        _layout=mgpu.WGStridedFragLayout(shape=(128,), vec_size=1),
        _is_signed=False,
    )


def _of_word(array: Any) -> Any:
    return llvm.bitcast(i32(), array.registers.item())


def _factor(values: list[Any]) -> mgpu.FragmentedArray:
    """16 words, four for each 16 columns, as the first factor of wgmma: bfloat16[64, 64]."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    flat = np.array([llvm.bitcast(pair, v) for v in values], dtype=object)
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64, 64))
    return mgpu.FragmentedArray(
        _registers=flat.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )


def load_planes(width: int, atoms: Any, first: Any) -> list[mgpu.FragmentedArray]:
    """A word of each plane of the upper row, then of the lower, of planes from atom `first` on."""
    w, g, i = thread()
    row = add(mul(w, 16), g)
    at = add(shared(atoms), mul(scalar(first), 1024), mul(row, 16), mul(i, 4))
    found = []
    for offset in (0, 128):
        for plane in range(width):
            text = f"ld.shared.b32 $0, [$1 + {plane * 1024 + offset}];"
            found.append(_word(asm([i32()], [at], text, "=r,r")[0]))
    return found


# See ptx.look_up.
_LOOK_UP = """{
.reg .b32 p<8>, v<8>;
dp4a.u32.u32 p0, $4, $7, $6;
dp4a.u32.u32 p1, $4, $8, $6;
dp4a.u32.u32 p2, $4, $9, $6;
dp4a.u32.u32 p3, $4, $10, $6;
dp4a.u32.u32 p4, $5, $7, $6;
dp4a.u32.u32 p5, $5, $8, $6;
dp4a.u32.u32 p6, $5, $9, $6;
dp4a.u32.u32 p7, $5, $10, $6;
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


def look_up(upper: Any, lower: Any, table: Any, line: Any) -> mgpu.FragmentedArray:
    """The weights of four words of codes of both rows, 64 columns: bfloat16[64, 64]."""
    address = _of_word(table)
    # A factor for each of the bytes.
    lines = [arith.shli(scalar(line), const(8 * e)) for e in range(4)]
    found = []
    for codes in zip(upper, lower, strict=True):
        args = [*map(_of_word, codes), address, *lines]
        found += asm([i32()] * 4, args, _LOOK_UP, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r")
    return _factor(found)


def fill_table(
    spec: Spec, width: int, slot: int, pages: Any, table: Any, atoms: Any, scalars: Any
) -> mgpu.FragmentedArray:
    """Brings the tables of a warp's 16 rows to shared memory; the address of a thread's entry 0.

    An entry there has the bfloat16 of rows g and g + 8, in its halves. Threads have copies of
    their own where there is room, else two or four share one, and fill it together.
    """
    expert, stored, group = map(scalar, scalars)
    w, g, i = thread()
    line = spec.table_line(width)
    share = 128 // line
    words = (1 << width) // 2
    own = words // share
    vector = min(4, own)
    unroll = min(4, own // vector)
    warp = add(shared(atoms), mul(add(mul(group, 4), w), line << width))
    # Of `share` neighbours with one copy, each fills a part.
    part = arith.shrui(i, const({1: 2, 2: 1, 4: 0}[share]))
    column = add(mul(g, line // 8), mul(arith.andi(i, const(4 // share - 1)), 4))
    address = add(warp, column)
    row = add(stored, mul(w, 16), g)
    slots = _slots(table, expert, slot)
    pointers = []
    for r in (row, add(row, const(8))):
        word = mul(arith.shrui(r, const(spec.rows_per_table.bit_length() - 1)), words)
        at = _page_pointer(spec, pages, slots, word)
        pointers.append(arith.addi(at, arith.extui(at.type, mul(part, own * 4))))
    text = _fill_text(line, vector, unroll, own // (vector * unroll))
    into = add(address, mul(part, 2 * own * line))
    asm([], [*pointers, into], text, "l,l,r")
    return _word(address)


START_BARRIER = 9
"""A hardware barrier that Mosaic GPU does not use: it takes one per warpgroup."""


def start_barriers(count: int, full: Any) -> None:
    """Makes barriers that four warps arrive at, for all threads of the program."""
    lines = ["{ .reg .pred p;", "setp.eq.s32 p, $1, 0;"]
    lines += [f"@p mbarrier.init.shared::cta.b64 [$0 + {8 * n}], 4;" for n in range(count)]
    # As Mosaic GPU makes its own.
    lines += ["fence.mbarrier_init.release.cluster;", f"bar.sync {START_BARRIER}, 384;", "}"]
    asm([], [shared(full), mgpu.utils.thread_idx()], "\n".join(lines), "r,r")


def wait_full(full: Any, stage: Any, parity: Any) -> None:
    """Waits until the atoms of a stage are there."""
    text = """{
.reg .pred done;
again:
mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
@!done bra again;
}"""
    at = add(shared(full), mul(scalar(stage), 8))
    asm([], [at, scalar(parity)], text, "r,r")


def bring_atoms(spec: Spec, pages: Any, table: Any, atoms: Any, full: Any, scalars: Any) -> None:
    """Starts copies of the atoms of a step, one by each of `copies` threads of all four warps.

    The first half is of warpgroup 0, whose rows have the atoms from `band` on, the others of
    warpgroup 1. Of planes each has atom `at`; of values (`is_dense` 1) the atoms from `at` on, but
    none behind `last`: beyond the last columns any weights do, as long as they are numbers.
    """
    expert, copies, band, other_band, at, last, is_dense, into, stage = map(scalar, scalars)
    thread_number = arith.andi(mgpu.utils.thread_idx(), const(127))
    warp = arith.shrui(thread_number, const(5))
    lane = arith.andi(thread_number, const(31))
    # Threads of a warp start their copies one after the other.
    number = add(mul(lane, 4), warp)
    of_warp = arith.shrui(arith.subi(add(copies, const(3)), warp), const(2))
    half = arith.shrui(copies, const(1))
    is_other = arith.cmpi(arith.CmpIPredicate.sge, number, half)
    within = arith.select(is_other, arith.subi(number, half), number)
    # Threads without an atom read an address that exists.
    is_mine = arith.cmpi(arith.CmpIPredicate.slt, number, copies)
    within = arith.select(is_mine, within, const(0))
    along = arith.muli(within, is_dense)
    plane = arith.subi(within, along)
    atom = add(arith.select(is_other, other_band, band), arith.minsi(add(at, along), last))
    i64 = ir.IntegerType.get_signless(64)
    slots = _slots(table, expert, 0)
    slots = arith.addi(slots, arith.extui(i64, mul(plane, 4 * spec.plane_pages)))
    source = _page_pointer(spec, pages, slots, mul(atom, ATOM_WORDS))
    text = """{
.reg .pred p;
setp.eq.s32 p, $0, 0;
@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], $3;
bar.warp.sync 0xffffffff;
setp.lt.s32 p, $6, $1;
@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$4], [$5], 1024, [$2];
}"""
    barrier = add(shared(full), mul(stage, 8))
    to = add(shared(atoms), mul(add(into, number), 1024))
    args = [lane, copies, barrier, mul(of_warp, 1024), to, source, number]
    asm([], args, text, "r,r,r,r,r,l,r")


def _slots(table: Any, expert: Any, slot: int) -> Any:
    """The address of a slot of an expert."""
    i64 = ir.IntegerType.get_signless(64)
    per_expert = ir.MemRefType(table.type).shape[1]
    at = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(table))
    offset = arith.muli(arith.extui(i64, expert), mgpu.c(4 * per_expert, i64))
    return arith.addi(at, arith.addi(offset, mgpu.c(4 * slot, i64)))


def _page_pointer(spec: Spec, pages: Any, slots: Any, word: Any) -> Any:
    """The address of a word of a run, given that of its first slot."""
    i64 = ir.IntegerType.get_signless(64)
    shift = spec.page_words.bit_length() - 1
    at = arith.addi(slots, arith.extui(i64, mul(arith.shrui(word, const(shift)), 4)))
    page = asm([i32()], [at], "ld.global.b32 $0, [$1];", "=r,l")[0]
    base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(pages))
    offset = arith.muli(arith.extui(i64, page), mgpu.c(4 * spec.page_words, i64))
    within = arith.extui(i64, mul(arith.andi(word, const(spec.page_words - 1)), 4))
    return arith.addi(base, arith.addi(offset, within))


def _fill_text(line: int, vector: int, unroll: int, rounds: int) -> str:
    """PTX: of two rows words of two float16 entries each, to entries of two bfloat16."""
    kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[vector]
    lines = [
        "{",
        f".reg .b32 u<{vector * unroll}>, l<{vector * unroll}>, x, y, to, left;",
        ".reg .b16 a, b, c, d;",
        ".reg .f32 fa, fb, fc, fd;",
        ".reg .b64 up, low;",
        ".reg .pred more;",
        "mov.b64 up, $0; mov.b64 low, $1; mov.b32 to, $2;",
        f"mov.b32 left, {rounds};",
        "again:",
    ]
    for n in range(unroll):
        for name, at in (("u", "up"), ("l", "low")):
            names = [f"{name}{vector * n + k}" for k in range(vector)]
            into = names[0] if vector == 1 else "{" + ", ".join(names) + "}"
            lines.append(f"ld.global.{kind} {into}, [{at} + {16 * n}];")
    for n in range(vector * unroll):
        lines += [
            f"mov.b32 {{a, b}}, u{n}; mov.b32 {{c, d}}, l{n};",
            "cvt.f32.f16 fa, a; cvt.f32.f16 fb, b; cvt.f32.f16 fc, c; cvt.f32.f16 fd, d;",
            "cvt.rn.bf16x2.f32 x, fc, fa; cvt.rn.bf16x2.f32 y, fd, fb;",
            f"st.shared.b32 [to + {2 * n * line}], x;",
            f"st.shared.b32 [to + {(2 * n + 1) * line}], y;",
        ]
    words = vector * unroll
    lines += [
        f"add.s64 up, up, {4 * words}; add.s64 low, low, {4 * words};",
        f"add.s32 to, to, {2 * words * line}; sub.s32 left, left, 1;",
        "setp.ne.s32 more, left, 0;",
        "@more bra again;",
        "bar.warp.sync 0xffffffff;",
        "}",
    ]
    return "\n".join(lines)


def load_dense(atoms: Any, first: Any) -> tuple[mgpu.FragmentedArray, mgpu.FragmentedArray]:
    """bfloat16[64, 64] twice: rows as they are stored, the columns of a word of codes together."""
    w, g, i = thread()
    row = add(mul(w, 16), g)
    at = add(shared(atoms), mul(scalar(first), 1024), mul(row, 16), mul(i, 4096))
    quads = [
        [
            asm(
                [i32()] * 4,
                [at],
                f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {1024 * e + offset}];",
                "=r,=r,=r,=r,r",
            )
            for e in range(4)
        ]
        for offset in (0, 128)
    ]
    halves = []
    for half in range(2):
        found = []
        for step in range(4 * half, 4 * half + 4):
            pick = "0x7632" if step % 2 else "0x5410"
            for e in (0, 2):
                for quad in quads:
                    args = [quad[e][step // 2], quad[e + 1][step // 2]]
                    found += asm([i32()], args, f"prmt.b32 $0, $1, $2, {pick};", "=r,r,r")
        halves.append(_factor(found))
    return halves[0], halves[1]
