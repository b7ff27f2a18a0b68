"""Calls `routing_kernel`: from a router's logits to experts and their weights, in one launch.

The steps between are small and many; of XLA each of them is a launch, and copies for sorting too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from moejax.config import Router
from moejax.pallas.bridge import triton_call

LEAST_SUM = 1e-20
"""A sum of scores may be zero."""
_MAX_EXPERTS = 1024
# Experts up to which one warp, which waits for no other, has few in each thread.
_ONE_WARP = 256


def takes(part: Router) -> bool:
    """Whether the kernel routes as this router says."""
    return part.score != "sparsemixer" and part.groups is None and part.num_experts <= _MAX_EXPERTS


def route_tokens(
    logits: Float32[Array, "tokens experts"],
    layer: Int32[Array, ""],
    bias: Float[Array, "layers experts"] | None,
    choice_bias: Float32[Array, "layers experts"] | None,
    expert_scale: Float[Array, "layers experts"] | None,
    *,
    part: Router,
    dtype: Any,
) -> tuple[Int32[Array, "tokens k"], Float[Array, "tokens k"]]:
    """(experts with the largest scores, their weights), computed in float32.

    `bias` is added to the logits, `choice_bias` to the scores that are compared, `expert_scale`
    multiplies the weights: of each the row `layer`. `dtype`: what logits are rounded to; weights
    have it too, unless the part says float32.

    Raises NotImplementedError where `takes` says no.
    """
    from moejax.pallas.routing_kernel import route_kernel

    if not takes(part):
        raise NotImplementedError("the routing kernel has no groups and no sparsemixer")
    beside = (bias, choice_bias, expert_scale)
    shape = (len(logits), part.experts_per_token)
    weights_dtype = jnp.float32 if part.float32_weights else dtype
    ids, weights = triton_call(
        layer,
        logits,
        *(logits if array is None else array for array in beside),
        kernel=route_kernel,
        out_type=[
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, weights_dtype),
        ],
        grid=len(logits),
        num_warps=1 if part.num_experts <= _ONE_WARP else 4,
        **constants(part, dtype, *(array is not None for array in beside)),
    )
    return ids, weights


def constants(
    part: Router, dtype: Any, has_bias: bool, has_choice_bias: bool, has_scale: bool
) -> dict[str, Any]:
    """What the kernel is made for."""
    return {
        "EXPERTS": part.num_experts,
        "K": part.experts_per_token,
        "ROUNDED": jnp.dtype(dtype) == jnp.bfloat16,
        "SIGMOID": part.score == "sigmoid",
        "HAS_BIAS": has_bias,
        "HAS_CHOICE_BIAS": has_choice_bias,
        "HAS_SCALE": has_scale,
        "RENORMALIZE": part.renormalize,
        "LEAST_SUM": LEAST_SUM,
        "SCALE": part.scale,
        "BLOCK": max(32, 1 << (part.num_experts - 1).bit_length()),
        "SLOTS": 1 << (part.experts_per_token - 1).bit_length(),
    }
