"""Layers with random weights in place of zeros and ones, and small parts in float64."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.config import Activation, ClampedSwiglu


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def fill[Layer: nnx.Module](layer: Layer, *, seed: int = 0) -> Layer:
    """Normal weights that keep the size of what passes, in every parameter."""
    rng = np.random.default_rng(seed)

    def make(leaf: jax.Array) -> jax.Array:
        scale = leaf.shape[-1] ** -0.5 if leaf.ndim > 1 else 1.0
        return jnp.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype)

    nnx.update(layer, jax.tree.map(make, nnx.state(layer, nnx.Param)))
    return layer


def wide(param: Any) -> np.ndarray:
    """A parameter in float64."""
    return np.asarray(param[...], np.float64)


def rms(x: np.ndarray, epsilon: float, weight: np.ndarray | float = 1.0) -> np.ndarray:
    """RMS norm over the last axis, in float64."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def activated(gate: np.ndarray, up: np.ndarray, activation: Activation) -> np.ndarray:
    """As the model families define it, in float64."""
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inner)) * up
    assert isinstance(activation, ClampedSwiglu)
    gate = np.minimum(gate, activation.limit)
    up = np.clip(up, -activation.limit, activation.limit)
    return (up + 1) * gate / (1 + np.exp(-activation.alpha * gate))


def mlp(layer: Any, x: np.ndarray, activation: Activation) -> np.ndarray:
    """A gated MLP, in float64."""
    gate, up, down = (wide(part.weight) for part in (layer.gate, layer.up, layer.down))
    return activated(x @ gate.T, x @ up.T, activation) @ down.T
