"""What threads of `prefill_kernel` do with their products; as in `prefill_registers`, in MLIR."""

import math
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from moejax.pallas.prefill_registers import add, asm, const, i32, mul, scalar, shared, thread
from moejax.pallas.prefill_spec import Spec

GATE_BARRIER = 8
"""A hardware barrier that Mosaic GPU does not use: it takes one per warpgroup."""


def _load_bias(bias: Any, place: Any, inside: Any) -> Any:
    """A bfloat16 as float32; 0 where not inside."""
    i64 = ir.IntegerType.get_signless(64)
    at = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(bias))
    at = arith.addi(at, arith.muli(arith.extui(i64, place), mgpu.c(2, i64)))
    text = (
        "{.reg .pred p; .reg .b32 x; .reg .b16 h; setp.ne.s32 p, $2, 0; mov.b16 h, 0; "
        "@p ld.global.b16 h, [$1]; cvt.u32.u16 x, h; shl.b32 $0, x, 16;}"
    )
    kept = arith.extui(i32(), inside)
    return llvm.bitcast(ir.F32Type.get(), asm([i32()], [at, kept], text, "=r,l,r")[0])


def _less(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def _pointer(out: Any, row: Any, columns: int, column: Any) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    at = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(out))
    place = arith.muli(arith.extui(i64, row), mgpu.c(2 * columns, i64))
    return arith.addi(at, arith.addi(place, arith.extui(i64, mul(column, 2))))


def _values(array: Any) -> list[Any]:
    """float32 of a thread, by 8 tokens: rows g, g, g + 8, g + 8 of tokens 2 i, 2 i + 1."""
    f32 = ir.F32Type.get()
    found = []
    for register in array.registers.flat:
        for n in range(2):
            found.append(llvm.extractelement(register, const(n)))
    assert all(value.type == f32 for value in found)
    return found


def _to_pair(low: Any, high: Any) -> Any:
    """Two float32, rounded to bfloat16, in a word."""
    return asm([i32()], [low, high], "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f")[0]


def _of_pair(word: Any) -> tuple[Any, Any]:
    f32 = ir.F32Type.get()
    low = llvm.bitcast(f32, arith.shli(word, const(16)))
    return low, llvm.bitcast(f32, arith.andi(word, const(-65536)))


def store_down(spec: Spec, acc: Any, biases: Any, out: Any, scalars: Any) -> None:
    """Stores the products of tokens of the tile, rounded, rows of a token next to each other."""
    expert, start, count, row0 = map(scalar, scalars)
    w, g, i = thread()
    first = add(row0, mul(w, 16), g)
    values = _values(acc)
    token = mul(i, 2)
    for half in range(2):
        row = add(first, const(8 * half))
        inside = _less(row, const(spec.rows))
        bias = None
        if spec.has_bias:
            bias = _load_bias(biases[0], add(mul(expert, spec.rows), row), inside)
        at = _pointer(out, add(start, token), spec.rows, row)
        limit = arith.select(inside, arith.subi(count, token), const(0))
        for n in range(spec.tokens // 8):
            for j in range(2):
                value = values[4 * n + 2 * half + j]
                if bias is not None:
                    value = arith.addf(value, bias)
                t = 8 * n + j
                asm(
                    [],
                    [value, at, limit],
                    f"{{.reg .pred p; .reg .b16 h; setp.gt.s32 p, $2, {t}; "
                    f"cvt.rn.bf16.f32 h, $0; @p st.global.b16 [$1 + {t * spec.rows * 2}], h;}}",
                    "f,l,r",
                )


def store_gated(
    spec: Spec, mine: int, acc: Any, biases: Any, out: Any, atoms: Any, scalars: Any
) -> None:
    """Stores what goes into down, in the order of columns in which it is multiplied there.

    Warpgroup 0 has gate and 1 has up: each gives the other half of the tokens of its own.
    """
    expert, start, count, row0 = map(scalar, scalars)
    w, g, i = thread()
    first = add(row0, mul(w, 16), g)
    values = _values(acc)
    insides, biased = [], []
    for half in range(2):
        row = add(first, const(8 * half))
        insides.append(_less(row, const(spec.rows)))
        if spec.has_bias:
            place = add(mul(add(mul(expert, 2), const(mine)), spec.rows), row)
            biased.append(_load_bias(biases[0], place, insides[half]))
    if spec.has_bias:
        values = [arith.addf(v, biased[n // 2 % 2]) for n, v in enumerate(values)]
    pairs = [_to_pair(values[n], values[n + 1]) for n in range(0, len(values), 2)]
    kept, given = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    if mine == 1:
        kept, given = given, kept
    number = arith.andi(mgpu.utils.thread_idx(), const(127))
    buffer = add(shared(atoms), mul(number, 4))
    bytes_each = len(given) * 512
    meet = f"bar.sync {GATE_BARRIER}, 256;"
    # Tables and weights are no longer read.
    asm([], [], meet, "")
    for n, word in enumerate(given):
        asm([], [buffer, word], f"st.shared.b32 [$0 + {mine * bytes_each + n * 512}], $1;", "r,r")
    asm([], [], meet, "")

    # Rows g and g + 8 lie next to each other: columns 8 e + s of an even e and the next.
    column = add(
        mul(arith.divsi(row0, const(128)), 128),
        mul(g, 16),
        mul(arith.divsi(arith.remsi(row0, const(128)), const(64)), 4),
        mul(arith.shrui(w, const(1)), 2),
        mul(arith.andi(w, const(1)), 8),
    )
    token = mul(i, 2)
    at = _pointer(out, add(start, token), spec.out_columns, column)
    limit = arith.subi(count, token)
    zero = mgpu.c(0.0, ir.F32Type.get())
    for n in range(spec.tokens // 16):
        both = []
        for half in range(2):
            index = 2 * n + half
            offset = (1 - mine) * bytes_each + index * 512
            other = asm([i32()], [buffer], f"ld.shared.b32 $0, [$1 + {offset}];", "=r,r")[0]
            gate, up = (kept[index], other) if mine == 0 else (other, kept[index])
            gated = [
                arith.select(insides[half], _activate(spec, a, b), zero)
                for a, b in zip(_of_pair(gate), _of_pair(up), strict=True)
            ]
            both.append(gated)
        for j in range(2):
            t = 8 * (n + mine * spec.tokens // 16) + j
            word = _to_pair(both[0][j], both[1][j])
            asm(
                [],
                [word, at, limit],
                f"{{.reg .pred p; setp.gt.s32 p, $2, {t}; "
                f"@p st.global.b32 [$1 + {t * spec.out_columns * 2}], $0;}}",
                "r,l,r",
            )


def _activate(spec: Spec, gate: Any, up: Any) -> Any:
    """moejax.layers.mlp.activate, in float32 on rounded factors."""
    f32 = ir.F32Type.get()

    def real(value: float) -> Any:
        return mgpu.c(value, f32)

    def exp(x: Any, scale: float) -> Any:
        """e^(scale x)."""
        x = arith.mulf(x, real(scale * math.log2(math.e)))
        return asm([f32], [x], "ex2.approx.f32 $0, $1;", "=f,f")[0]

    def over(a: Any, b: Any) -> Any:
        return asm([f32], [a, b], "div.full.f32 $0, $1, $2;", "=f,f,f")[0]

    def rounded(x: Any) -> Any:
        return _of_pair(_to_pair(x, real(0.0)))[0]

    one = real(1.0)
    if spec.activation == "clamped_swiglu":
        gate = arith.minimumf(gate, real(spec.limit))
        up = arith.minimumf(arith.maximumf(up, real(-spec.limit)), real(spec.limit))
        product = arith.mulf(arith.addf(up, one), gate)
        return over(product, arith.addf(one, exp(gate, -spec.alpha)))
    if spec.activation == "gelu_tanh":
        cube = arith.mulf(arith.mulf(gate, gate), gate)
        inner = arith.addf(gate, arith.mulf(cube, real(0.044715)))
        # 1 + tanh(y) = 2 - 2 / (e^(2 y) + 1)
        power = exp(inner, 2 * math.sqrt(2 / math.pi))
        tail = over(one, arith.addf(power, one))
        return arith.mulf(rounded(arith.mulf(gate, arith.subf(one, tail))), up)
    return arith.mulf(rounded(over(gate, arith.addf(one, exp(gate, -1.0)))), up)
