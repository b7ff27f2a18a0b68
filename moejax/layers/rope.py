"""Rotary positions (Su et al. 2021, RoFormer) and the ways to stretch them to longer contexts."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32

from moejax.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)


def rotate(
    x: Float[Array, "tokens heads size"],
    positions: Int32[Array, " tokens"],
    rope: Rope,
    uses_long: Bool[Array, " tokens"] | None = None,
) -> Float[Array, "tokens heads size"]:
    """Turns each pair of dimensions by position * frequency.

    `uses_long`: which tokens take the long factors of longrope; None: none does.
    Angles are computed in float32, since bfloat16 turns position 257 into 256. Where halves are
    paired, cosine and sine are rounded to the dtype of x; where neighbours are, the result is: as
    the models that have them were trained.
    """
    size = x.shape[-1]
    frequency, magnitude = frequencies(rope, size)
    if isinstance(rope.scaling, LongRopeScaling) and uses_long is not None:
        long_frequency, long_magnitude = frequencies(rope, size, uses_long=True)
        picked = jnp.where(uses_long[:, None], long_frequency, frequency)[:, None, :]
        factor = jnp.where(uses_long, long_magnitude, magnitude).astype(jnp.float32)
        factor = factor[:, None, None]
    else:
        picked = jnp.asarray(frequency)[None, None, :]
        factor = jnp.float32(magnitude)
    angle = positions.astype(jnp.float32)[:, None, None] * picked
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    if rope.pairing == "half":
        cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
        low, high = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], size // 2, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def frequencies(
    rope: Rope, size: int, *, uses_long: bool = False
) -> tuple[Float32[np.ndarray, " pairs"], float]:
    """Radians per position of each of the size / 2 pairs, and the factor on cosine and sine."""
    plain = rope.theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    scaled, magnitude = _scale(plain, rope, size, uses_long)
    if rope.active_pairs is not None:
        scaled[rope.active_pairs :] = 0.0
    return scaled.astype(np.float32), magnitude


def _scale(
    plain: Float64[np.ndarray, " pairs"], rope: Rope, size: int, uses_long: bool
) -> tuple[Float64[np.ndarray, " pairs"], float]:
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling), 1.0
    if isinstance(scaling, YarnScaling):
        kept = _yarn_kept(rope.theta, size, scaling)
        return plain * kept + plain / scaling.factor * (1 - kept), scaling.magnitude
    if isinstance(scaling, LongRopeScaling):
        if uses_long:
            return plain / np.array(scaling.long_factors), scaling.long_magnitude
        return plain / np.array(scaling.short_factors), scaling.short_magnitude
    return plain, 1.0


def _llama3(
    plain: Float64[np.ndarray, " pairs"], scaling: Llama3Scaling
) -> Float64[np.ndarray, " pairs"]:
    """Kept from `high` turns over the original length, divided up to `low`, blended between."""
    turns = scaling.original_length * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # Where the two borders coincide nothing lies between them.
    blend = (turns - low) / (high - low) if high != low else np.zeros_like(plain)
    kept: np.ndarray = np.where(turns < low, 0.0, np.where(turns > high, 1.0, blend))
    scaled: np.ndarray = kept * plain + (1 - kept) * plain / scaling.factor
    return scaled


def _yarn_kept(theta: float, size: int, scaling: YarnScaling) -> Float64[np.ndarray, " pairs"]:
    """The share of each frequency that is kept: a ramp over the pairs (YaRN, section 3.2)."""

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns so often over the original length."""
        longest = scaling.original_length / (2 * math.pi * turns)
        return size * math.log(longest) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    # A ramp of no width is a step.
    width = last - first or 1e-3
    divided: np.ndarray = np.clip((np.arange(size // 2) - first) / width, 0, 1)
    return 1 - divided
