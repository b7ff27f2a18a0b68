"""The PTX that kernels write, executed in NumPy for all threads of a program at once.

A register is an array with an element per thread. Of each instruction only the forms that occur are
known; another one ends with an error.
"""

import functools
import re
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

Registers = dict[str, np.ndarray]
_GARBAGE = 0xAB


class Warps:
    """The threads of a program and their shared memory."""

    def __init__(
        self, threads: int, shared: int, read: Callable[[np.ndarray, int], np.ndarray]
    ) -> None:
        """`read`: bytes of global memory, from addresses and a size."""
        self.threads = threads
        self.read = read
        self.shared = np.empty(shared, np.uint8)
        self.forget()

    def forget(self) -> None:
        """Shared memory holds anything when a program begins."""
        self.shared[:] = _GARBAGE

    def run(
        self, text: str, arguments: Sequence[np.ndarray], kinds: Sequence[np.dtype]
    ) -> list[np.ndarray]:
        """The results of a block of inline assembly, whose operands $n come first."""
        registers: Registers = {}
        for n, argument in enumerate(arguments, len(kinds)):
            wide = np.ascontiguousarray(np.broadcast_to(argument, (self.threads,)))
            registers[f"${n}"] = wide if wide.dtype.itemsize == 8 else wide.view(np.uint32)
        for instruction in _parse(text):
            self._execute(*instruction, registers)
        return [registers[f"${n}"].view(kind) for n, kind in enumerate(kinds)]

    def _execute(self, name: str, operands: tuple[str, ...], registers: Registers) -> None:
        def value(operand: str) -> np.ndarray:
            if operand == "global_smem":
                return np.zeros(self.threads, np.uint32)
            if operand in registers:
                return registers[operand]
            return np.full(self.threads, int(operand, 0), np.uint32)

        if name.startswith("mma."):
            self._multiply(operands, registers)
        elif name.startswith("st.shared."):
            self._words()[self._places(operands[0], value)] = value(operands[1])
        elif name == "ld.shared.v4.b32":
            place = self._places(operands[1], value)
            for n, register in enumerate(operands[0].strip("{}").split(",")):
                registers[register.strip()] = self._words()[place + n]
        elif name.startswith("cp.async.cg."):
            # At once: threads wait for their own copies before they read them.
            place = self._places(operands[0], value) * 4
            used = value(operands[3]) == 16
            found = np.zeros((self.threads, 16), np.uint8)
            found[used] = self.read(value(operands[1].strip("[]"))[used].astype(np.int64), 16)
            self.shared[place[:, None] + np.arange(16)] = found
        elif name.startswith("cp.async."):
            pass
        elif name.startswith("ld.shared."):
            registers[operands[0]] = self._words()[self._places(operands[1], value)]
        elif operands[0].startswith("{"):
            low, high = operands[0].strip("{}").split(",")
            halves = value(operands[1])
            registers[low.strip()] = halves & 0xFFFF
            registers[high.strip()] = halves >> 16
        else:
            registers[operands[0]] = _FUNCTIONS[name](*map(value, operands[1:]))

    def _words(self) -> np.ndarray:
        return self.shared.view(np.uint32)

    def _places(self, operand: str, value: Callable[[str], np.ndarray]) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        address = value(base.strip()).astype(np.int64) + int(offset or 0)
        if (address % 4).any() or (address + 4 > len(self.shared)).any():
            raise AssertionError("an address outside of shared memory")
        return address // 4

    def _multiply(self, operands: tuple[str, ...], registers: Registers) -> None:
        """mma.m16n8k16 (PTX ISA): of thread 4 g + i in a warp."""
        d, a, b, c = ([n.strip() for n in group.strip("{}").split(",")] for group in operands)
        warps = self.threads // 32

        def pairs(name: str) -> np.ndarray:
            words = registers[name].reshape(warps, 8, 4)
            return words.view(ml_dtypes.bfloat16).astype(np.float64).reshape(warps, 8, 8)

        left = np.zeros((warps, 16, 16))
        for n, name in enumerate(a):
            rows, columns = n % 2 * 8, n // 2 * 8
            left[:, rows : rows + 8, columns : columns + 8] = pairs(name)
        right = np.concatenate([pairs(name) for name in b], axis=2)
        # NaN in one row of the first factor does not reach another.
        with np.errstate(invalid="ignore"):
            product = left @ right.swapaxes(1, 2)
        for n, name in enumerate(d):
            rows = product[:, n // 2 * 8 : n // 2 * 8 + 8, n % 2 :: 2]
            added = registers[c[n]].view(np.float32).astype(np.float64) + rows.reshape(-1)
            registers[name] = added.astype(np.float32).view(np.uint32)


@functools.cache
def _parse(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """(name, operands) of each instruction."""
    found = []
    for part in re.sub(r"^\s*\{\s*\n|\n\s*\}\s*$", "", text).split(";"):
        name, _, rest = part.strip().partition(" ")
        if name and not name.startswith(".reg"):
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest)
            found.append((name, tuple(operands)))
    return found


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = np.concatenate([a[:, None], b[:, None]], axis=1).view(np.uint8)
    found = np.zeros((len(a), 4), np.uint8)
    for n in range(4):
        nibble = selector >> (4 * n) & 0xF
        byte = np.take_along_axis(both, (nibble & 7).astype(np.int64)[:, None], axis=1)[:, 0]
        sign = np.where(byte >> 7 == 1, 0xFF, 0).astype(np.uint8)
        found[:, n] = np.where(nibble >> 3 == 1, sign, byte)
    return found.view(np.uint32)[:, 0]


def _dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    left, right = (x[:, None].copy().view(np.uint8).astype(np.uint32) for x in (a, b))
    return (left * right).sum(axis=1, dtype=np.uint32) + c


def _choose(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    found = np.zeros_like(a)
    for n in range(8):
        is_n = (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        found |= np.where(table >> n & 1 == 1, is_n, 0).astype(np.uint32)
    return found


def _to_float32(a: np.ndarray) -> np.ndarray:
    return a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


def _to_bfloat16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    halves = [
        x.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
        for x in (high, low)
    ]
    return halves[0] << 16 | halves[1]


_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.u32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "setp.ne.u32": lambda a, b: (a != b).astype(np.uint32),
    "selp.b32": lambda a, b, p: np.where(p != 0, a, b).astype(np.uint32),
    "prmt.b32": _permute,
    "dp4a.u32.u32": _dot,
    "lop3.b32": _choose,
    "cvt.f32.f16": _to_float32,
    "cvt.rn.bf16x2.f32": _to_bfloat16,
}
