"""Gluon kernels on a CPU: what they compute, in NumPy, with one array element per thread.

Triton's interpreter knows neither Gluon nor inline PTX. Kernels of this repository use a small part
of both: tensors of one element per thread, loads and stores by address, and PTX of a dozen kinds of
instructions (`ptx_emulator`). Their modules are imported anew over this part, so that a kernel is a
Python function, which runs program by program. All threads of a program are in step, so no
race is found. A load or store outside of the arrays that a kernel was given ends with an error.
"""

import contextlib
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.pallas import product, stacked
from ptx_emulator import Warps

MODULES = (
    *("ptx", "bit_words", "page_reads", "planes_product", "dense_product"),
    *("product_kernel", "stacked_kernel"),
)
"""Of moejax.pallas, in order of their imports."""
_ALIGNMENT = 256


class Type:
    """A dtype as kernels name it."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)


class PointerType(Type):
    """Of a pointer: `dtype` is what it points at."""

    @property
    def element_ty(self) -> Type:
        return Type(self.dtype)


def _data(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


class Tensor:
    """An array with the operators of Triton."""

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)

    def to(self, kind: Type, bitcast: bool = False) -> "Tensor":
        if bitcast:
            return Tensor(self.data.view(kind.dtype))
        with np.errstate(invalid="ignore", over="ignore"):
            return Tensor(self.data.astype(kind.dtype))

    def __getitem__(self, at: Any) -> "Tensor":
        return Tensor(self.data[at])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> "Tensor":
        return Tensor(-self.data)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


def _binary(name: str, function: Callable[[Any, Any], Any]) -> None:
    def forward(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        with np.errstate(all="ignore"):
            return Tensor(function(self.data, _data(other)))

    def backward(self: Tensor, other: Any) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(function(_data(other), self.data))

    setattr(Tensor, f"__{name}__", forward)
    setattr(Tensor, f"__r{name}__", backward)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "xor"):
    _binary(_name, getattr(operator, _name))
_binary("and", operator.and_)
_binary("or", operator.or_)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _compare = getattr(operator, _name)
    setattr(Tensor, f"__{_name}__", lambda a, b, f=_compare: Tensor(f(a.data, _data(b))))


class Pointer:
    """Addresses, as bytes in the memory of all arrays."""

    def __init__(self, address: Any, dtype: PointerType) -> None:
        self.address = np.asarray(address, np.int64)
        self.dtype = dtype

    def __add__(self, offset: Any) -> "Pointer":
        size = self.dtype.dtype.itemsize
        return Pointer(self.address + np.asarray(_data(offset), np.int64) * size, self.dtype)

    __radd__ = __add__

    def __getitem__(self, at: Any) -> "Pointer":
        return Pointer(self.address[at], self.dtype)

    def to(self, kind: Type, bitcast: bool = False) -> "Pointer | Tensor":
        if bitcast:
            return Pointer(self.address, PointerType(kind.dtype))
        return Tensor(self.address.astype(kind.dtype))


class Memory:
    """The arrays of a kernel, far from each other in one block of bytes."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.starts: list[int] = []
        end = _ALIGNMENT
        for array in arrays:
            self.starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
        self.bytes = np.zeros(end, np.uint8)
        self.owned = np.zeros(end, np.bool_)
        for start, array in zip(self.starts, arrays, strict=True):
            self.bytes[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            self.owned[start : start + array.nbytes] = True

    def pointers(self) -> list[Pointer]:
        return [
            Pointer(start, PointerType(array.dtype))
            for start, array in zip(self.starts, self.arrays, strict=True)
        ]

    def read(self, number: int) -> np.ndarray:
        start, array = self.starts[number], self.arrays[number]
        return self.bytes[start : start + array.nbytes].view(array.dtype).reshape(array.shape)

    def read_bytes(self, address: np.ndarray, size: int) -> np.ndarray:
        """Neighbouring bytes from each address."""
        at = address[:, None] + np.arange(size)
        if not self.owned[at].all():
            raise AssertionError("an address outside of the arrays")
        return self.bytes[at]

    def places(self, pointer: Pointer, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """(elements in the memory as one array of this dtype, which are used)."""
        size = pointer.dtype.dtype.itemsize
        used = np.broadcast_to(
            np.asarray(True if mask is None else _data(mask)), pointer.address.shape
        )
        address = np.where(used, pointer.address, _ALIGNMENT)
        if (address % size)[used].any():
            raise AssertionError("an address that is not aligned")
        if not self.owned[address[used]].all():
            raise AssertionError("an address outside of the arrays")
        return address // size, used


def _language(memory: Memory, program: list[int], warps: Warps) -> types.ModuleType:
    """What kernels know as `gl`."""
    gl = types.ModuleType("language")

    def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
        at, used = memory.places(pointer, mask)
        values = memory.bytes.view(pointer.dtype.dtype)[at]
        return Tensor(
            values if mask is None else np.where(used, values, np.asarray(other, values.dtype))
        )

    def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
        at, used = memory.places(pointer, mask)
        values = np.broadcast_to(np.asarray(_data(value), pointer.dtype.dtype), at.shape)
        memory.bytes.view(pointer.dtype.dtype)[at[used]] = values[used]

    def where(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(a, Pointer):
            return Pointer(np.where(_data(condition), a.address, b.address), a.dtype)
        a, b = _data(a), _data(b)
        dtype = a.dtype if isinstance(a, np.ndarray) else np.asarray(b).dtype
        return Tensor(np.where(_data(condition), a, b).astype(dtype))

    def inline_asm_elementwise(
        text: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        several = isinstance(dtype, tuple)
        kinds = [kind.dtype for kind in (dtype if several else (dtype,))]
        found = warps.run(text, [np.asarray(_data(a)) for a in args], kinds)
        tensors = tuple(map(Tensor, found))
        return tensors if several else tensors[0]

    class Shared:
        def slice(self, start: int, size: int) -> "Shared":
            return self

        def store(self, value: Any) -> None: ...

    names: dict[str, Any] = {
        "constexpr": lambda value: value,
        "static_range": range,
        "arange": lambda start, end, layout: Tensor(np.arange(start, end, dtype=np.int32)),
        "zeros": lambda shape, kind, layout: Tensor(np.zeros(shape, kind.dtype)),
        "full": lambda shape, value, kind, layout: Tensor(np.full(shape, value, kind.dtype)),
        "maximum": lambda a, b: Tensor(np.maximum(_data(a), _data(b))),
        "exp": lambda x: Tensor(np.exp(x.data)),
        "convert_layout": lambda x, layout: x,
        "split": lambda x: (x[..., 0], x[..., 1]),
        "reshape": lambda x, shape: Tensor(x.data.reshape(shape)),
        "program_id": lambda axis: Tensor(np.int32(program[axis])),
        "pointer_type": lambda kind: PointerType(kind.dtype),
        "barrier": lambda: None,
        "allocate_shared_memory": lambda kind, shape, layout: Shared(),
        **{n: lambda *a: None for n in ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout")},
        **{n: Type(n) for n in ("uint32", "uint64", "int32", "int64", "float32")},
        "bfloat16": Type(ml_dtypes.bfloat16),
        "load": load,
        "store": store,
        "where": where,
        "inline_asm_elementwise": inline_asm_elementwise,
    }
    for name, value in names.items():
        setattr(gl, name, value)
    return gl


@contextlib.contextmanager
def _imported(gl: types.ModuleType) -> Iterator[None]:
    """The modules of kernels, over this language."""
    gluon = types.ModuleType("gluon")
    gluon.jit = lambda function: function  # type: ignore[attr-defined]
    gluon.language = gl  # type: ignore[attr-defined]
    stubs = {
        "triton": types.ModuleType("triton"),
        "triton.experimental": types.ModuleType("experimental"),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gl,
    }
    stubs["triton.experimental"].gluon = gluon  # type: ignore[attr-defined]
    names = [f"moejax.pallas.{name}" for name in MODULES]
    before = {name: sys.modules.get(name) for name in (*stubs, *names)}
    try:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(stubs)
        for name in names:
            importlib.import_module(name)
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _run(
    name: str, arrays: list[np.ndarray], grid: Sequence[int], threads: int, constants: Mapping
) -> Memory:
    memory, program = Memory(arrays), [0, 0]
    warps = Warps(threads, int(constants["SHARED"]), memory.read_bytes)
    with _imported(_language(memory, program, warps)):
        kernel = getattr(sys.modules[f"moejax.pallas.{name}"], name)
        for program[1] in range(grid[1]):
            for program[0] in range(grid[0]):
                warps.forget()
                kernel(*memory.pointers(), **constants)
    return memory


def call(
    *args: Any,
    kernel: Any,
    out_type: Any,
    grid: Any,
    num_warps: int,
    backend_options: Any = None,
    **constants: Any,
) -> Any:
    """In place of `bridge.triton_call`; `kernel` is its name, results hold garbage before."""
    outs = out_type if isinstance(out_type, list) else [out_type]
    arrays = [np.ascontiguousarray(a).reshape(np.shape(a) or (1,)) for a in args]
    arrays += [
        np.full(int(np.prod(o.shape)) * np.dtype(o.dtype).itemsize, 0x7F, np.uint8)
        .view(o.dtype)
        .reshape(o.shape)
        for o in outs
    ]
    sizes = (*grid, 1) if isinstance(grid, tuple) else (grid, 1)
    memory = _run(kernel, arrays, sizes, 32 * num_warps, constants)
    found = [jnp.asarray(memory.read(len(args) + n)) for n in range(len(outs))]
    return found if isinstance(out_type, list) else found[0]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a test, products by Gluon kernels are computed here; outside of jax.jit."""
    for module, name in ((product, "product_kernel"), (stacked, "stacked_kernel")):
        fake = types.ModuleType(name)
        setattr(fake, name, name)
        monkeypatch.setitem(sys.modules, f"moejax.pallas.{name}", fake)
        monkeypatch.setattr(module, "triton_call", call)
