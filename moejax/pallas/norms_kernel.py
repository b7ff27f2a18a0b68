"""RMS norm of tokens, in Triton: see `norms`."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    layer,  # int32
    x,  # [tokens, size]
    added,  # [tokens, size]: what is added to x first
    weight,  # [layers, size]
    total,  # [tokens, size]: x + added
    out,  # [tokens, size]
    EPSILON: tl.constexpr,
    SIZE: tl.constexpr,
    ADDS: tl.constexpr,
    ROUNDS_LATE: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least SIZE
):
    """One program per token."""
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    value = tl.load(x + at, mask=is_column, other=0)
    if ADDS:
        value = (value.to(tl.float32) + tl.load(added + at, mask=is_column, other=0)).to(
            x.dtype.element_ty
        )
        tl.store(total + at, value, mask=is_column)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + EPSILON)
    of_layer = weight + tl.load(layer).to(tl.int64) * SIZE
    w = tl.load(of_layer + column, mask=is_column, other=0).to(tl.float32)
    if not ROUNDS_LATE:
        wide = wide.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (wide * w).to(x.dtype.element_ty), mask=is_column)
