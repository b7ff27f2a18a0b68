"""Triton kernels on a CPU: NumPy arrays as arguments under TRITON_INTERPRET=1, without torch.

Triton's interpreter takes objects that look like torch tensors only; `NpTensor` is the part of a
tensor that it touches. It shows what a kernel computes on integers and float32. It does not on
bfloat16: the interpreter's tl.dot multiplies the raw bits of it.
"""

import os
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np


class _Storage:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> Self:
        return self

    def copy_(self, other: Self) -> None:
        """From "the host" back to "the device", which are one array here."""
        if other.data_ptr() != self.data_ptr():
            raise AssertionError("the interpreter made a copy")


class NpTensor:
    """A contiguous array: what a kernel stores is in the array afterwards."""

    def __init__(self, array: np.ndarray) -> None:
        if not array.flags.c_contiguous:
            raise ValueError("the array must be contiguous")
        self.array = array

    @property
    def dtype(self) -> str:
        """Triton takes names: uint32, bfloat16."""
        return self.array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Storage:
        return _Storage(self.array)

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def new_empty(self, shape: int, device: str) -> "NpTensor":
        return NpTensor(self.array)

    def set_(self, storage: _Storage, *layout: Any) -> None:
        self.array = storage.array


def interpret(
    *args: Any, kernel: Any, out_type: Any, grid: Any, num_warps: int = 4, **constants: Any
) -> jax.Array:
    """`moejax.pallas.bridge.triton_call` by the interpreter, outside of jit. Unwritten: NaN.

    Raises RuntimeError where TRITON_INTERPRET was not set when triton was imported.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or "Interpreted" not in type(kernel).__name__:
        raise RuntimeError("TRITON_INTERPRET=1 must be set before triton is imported")
    out = np.full(out_type.shape, np.nan, out_type.dtype)
    # No copies: an argument may be larger than memory. Kernels store into the last one only.
    tensors = [NpTensor(np.asarray(arg)) for arg in (*args, out)]
    kernel[grid](*tensors, **constants)
    return jnp.asarray(tensors[-1].array)
