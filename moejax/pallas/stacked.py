"""Products of few tokens with matrices of one layer that lie in arrays of all layers.

XLA multiplies with one matrix after the other, and for kernels of its own it copies a layer's
matrix out of the array first. Here one launch multiplies with up to three matrices where they lie:
queries, keys and values, or gate and up.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from moejax.arena.format import ceil_div
from moejax.pallas.bridge import triton_call, with_reference

MAX_MATRICES = 3
MAX_TOKENS = 64
STEP_COLUMNS = 128
SHARED_BYTES = 128 << 10
"""Shared memory of a program, at most."""
# Of a load of 16 bytes.
_COLUMNS = 8
# Programs up to which a multiprocessor has one at a time, on GPUs with as many as an H200.
_FEW_PROGRAMS = 132
# Up to so many more warps share the rows of a program, or read them together.
_FEW_TOKENS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a product is cut."""

    row_warps: int
    """Warps of a program with rows of their own: 16 of each."""
    k_warps: int
    """Warps that share rows and take turns at the columns."""

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps


def takes(tokens: int, columns: int, dtype: Any) -> bool:
    """Whether the kernel multiplies so many tokens with matrices of so many columns."""
    return 0 < tokens <= MAX_TOKENS and columns % _COLUMNS == 0 and dtype == jnp.bfloat16


def multiply(
    x: Float[Array, "tokens k"],
    matrices: Sequence[Float[Array, "layers _ k"]],
    biases: Sequence[Float[Array, "layers _"] | None],
    layer: Int32[Array, ""],
    dtype: jnp.dtype | None = None,
) -> list[Float[Array, "tokens _"]]:
    """x times the transpose of each matrix of a layer, plus its bias, summed in float32.

    `dtype`: of the results; None: that of x. Raises ValueError for no or too many matrices, and
    where `takes` says no.
    """
    arrays = [*matrices, *(b for b in biases if b is not None)]
    takes_all = all(takes(len(x), x.shape[1], w.dtype) and w.dtype == x.dtype for w in arrays)
    if not 0 < len(matrices) <= MAX_MATRICES or not takes_all:
        raise ValueError("the kernel does not multiply these")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    joined = with_reference(partial(_reference, dtype=dtype), partial(_multiply, dtype=dtype))
    found: list[Array] = joined(x, list(matrices), list(biases), layer)
    return found


def _reference(
    x: Float[Array, "tokens k"],
    matrices: list[Float[Array, "layers _ k"]],
    biases: list[Float[Array, "layers _"] | None],
    layer: Int32[Array, ""],
    *,
    dtype: jnp.dtype,
) -> list[Float[Array, "tokens _"]]:
    found = []
    for stack, bias in zip(matrices, biases, strict=True):
        w = lax.dynamic_index_in_dim(stack, layer, keepdims=False)
        y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if bias is not None:
            added = lax.dynamic_index_in_dim(bias, layer, keepdims=False)
            y = y + added.astype(jnp.float32)[None, :]
        found.append(y.astype(dtype))
    return found


def choose_tiling(tokens: int, rows: int) -> Tiling:
    """What was best on an H200 for the matrices of Qwen1.5-MoE. `rows`: of all matrices."""
    if ceil_div(rows, 16) > _FEW_PROGRAMS:
        return Tiling(row_warps=2 if tokens <= _FEW_TOKENS else 1, k_warps=4)
    return Tiling(row_warps=1, k_warps=16 if tokens <= _FEW_TOKENS else 8)


def choose_stages(columns: int, tiling: Tiling, programs: int) -> int:
    """Steps of a warp that are under way, of 128 bytes of each thread: a power of two."""
    turns = ceil_div(ceil_div(columns, STEP_COLUMNS), tiling.k_warps)
    if turns == 1:
        return 1
    wanted = 4 if turns >= 4 and programs <= _FEW_PROGRAMS else 2
    return min(wanted, SHARED_BYTES // (128 * tiling.threads))


def _multiply(
    x: Float[Array, "tokens k"],
    matrices: list[Float[Array, "layers _ k"]],
    biases: list[Float[Array, "layers _"] | None],
    layer: Int32[Array, ""],
    *,
    dtype: jnp.dtype,
    tiling: Tiling | None = None,
) -> list[Float[Array, "tokens _"]]:
    from moejax.pallas.stacked_kernel import stacked_kernel

    tokens, columns = x.shape
    rows = [w.shape[1] for w in matrices]
    tiling = tiling or choose_tiling(tokens, sum(rows))
    missing = MAX_MATRICES - len(rows)
    block = 16 * tiling.row_warps
    tiles = 1
    while 8 * tiles < tokens:
        tiles *= 2
    programs = sum(ceil_div(m, block) for m in rows)
    stages = choose_stages(columns, tiling, programs)
    shapes = [(tokens, m) for m in rows] + [(1, 1)] * missing
    found = triton_call(
        layer,
        x,
        *matrices,
        *[x] * missing,
        *(x if bias is None else bias for bias in biases),
        *[x] * missing,
        kernel=stacked_kernel,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        grid=programs,
        num_warps=tiling.row_warps * tiling.k_warps,
        TOKENS=tokens,
        ROWS=(*rows, *[0] * missing),
        COLUMNS=columns,
        HAS_BIAS=(*(bias is not None for bias in biases), *[False] * missing),
        TILES=tiles,
        ROW_WARPS=tiling.row_warps,
        K_WARPS=tiling.k_warps,
        STAGES=stages,
        SHARED=tiling.threads * max(16 * tiles, STEP_COLUMNS * stages),
    )
    return list(found[: len(rows)])
