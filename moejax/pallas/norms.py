"""RMS norms with the weight of one layer in an array of all layers, in one launch.

XLA would copy the layer's weight out of the array first. Besides the launch that is dear because
XLA records a CUDA graph with such a copy anew for each layer of each step.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from moejax.pallas.bridge import triton_call, with_reference


def rms_norm(
    x: Float[Array, "tokens size"],
    weight: Float[Array, "layers size"],
    layer: Int32[Array, ""],
    *,
    epsilon: float,
    rounds_late: bool,
) -> Float[Array, "tokens size"]:
    """x / sqrt(mean(x^2) + epsilon) times a layer's weight, in the dtype of x.

    It is rounded to that before the weight multiplies; `rounds_late`: only after it.
    """
    options: Any = {"epsilon": epsilon, "rounds_late": rounds_late}
    joined = with_reference(partial(_norm_reference, **options), partial(_norm, **options))
    found: Array = joined(x, weight, layer)
    return found


def add_rms_norm(
    x: Float[Array, "tokens size"],
    added: Float[Array, "tokens size"],
    weight: Float[Array, "layers size"],
    layer: Int32[Array, ""],
    *,
    epsilon: float,
    rounds_late: bool,
) -> tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]]:
    """(x + added, `rms_norm` of it)."""
    options: Any = {"epsilon": epsilon, "rounds_late": rounds_late}
    joined = with_reference(partial(_add_reference, **options), partial(_add_norm, **options))
    found: tuple[Array, Array] = joined(x, added, weight, layer)
    return found


def unit_rms(x: Float[Array, "*n size"], epsilon: float) -> Float[Array, "*n size"]:
    """x / sqrt(mean(x^2) + epsilon), in float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)


def normed(
    x: Float[Array, "*n size"], weight: Float[Array, " size"], epsilon: float, *, rounds_late: bool
) -> Float[Array, "*n size"]:
    """`rms_norm` in plain jax.numpy, with one weight, over any leading axes."""
    wide = unit_rms(x, epsilon)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if rounds_late:
        return (wide * weight.astype(jnp.float32)).astype(x.dtype)
    return wide.astype(x.dtype) * weight


def _norm_reference(
    x: Array, weight: Array, layer: Array, *, epsilon: float, rounds_late: bool
) -> Array:
    of_layer = lax.dynamic_index_in_dim(weight, layer, keepdims=False)
    found: Array = normed(x, of_layer, epsilon, rounds_late=rounds_late)
    return found


def _add_reference(
    x: Array, added: Array, weight: Array, layer: Array, *, epsilon: float, rounds_late: bool
) -> tuple[Array, Array]:
    x = x + added
    return x, _norm_reference(x, weight, layer, epsilon=epsilon, rounds_late=rounds_late)


def _norm(x: Array, weight: Array, layer: Array, *, epsilon: float, rounds_late: bool) -> Array:
    return _call(x, None, weight, layer, epsilon, rounds_late)[1]


def _add_norm(
    x: Array, added: Array, weight: Array, layer: Array, *, epsilon: float, rounds_late: bool
) -> tuple[Array, Array]:
    total, out = _call(x, added, weight, layer, epsilon, rounds_late)
    return total, out


def _call(
    x: Array,
    added: Array | None,
    weight: Array,
    layer: Array,
    epsilon: float,
    rounds_late: bool,
) -> tuple[Array, Array]:
    from moejax.pallas.norms_kernel import rms_norm_kernel

    tokens, size = x.shape
    block = 1 << (size - 1).bit_length()
    total, out = triton_call(
        layer,
        x,
        x if added is None else added,
        weight,
        kernel=rms_norm_kernel,
        out_type=[
            jax.ShapeDtypeStruct((1, 1) if added is None else x.shape, x.dtype),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
        ],
        grid=tokens,
        num_warps=max(1, min(8, block // 256)),
        EPSILON=epsilon,
        SIZE=size,
        ADDS=added is not None,
        ROUNDS_LATE=rounds_late,
        BLOCK=block,
    )
    return total, out
