"""Rotary positions."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from moejax.config import Rope


def rotate(
    x: Float[Array, "tokens heads size"], positions: Int32[Array, " tokens"], rope: Rope
) -> Float[Array, "tokens heads size"]:
    """Turns the pair of dimensions (i, i + size / 2) by position * theta^(-2i / size).

    Angles are computed in float32, since bfloat16 turns position 257 into 256; cosine and sine
    are rounded to the dtype of x, as Hugging Face does.
    """
    size = x.shape[-1]
    frequency = jnp.float32(rope.theta) ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency[None, None, :]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
