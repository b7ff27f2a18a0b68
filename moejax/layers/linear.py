"""Products with weights, RMS norm and embedding.

Weights are stored `[out, in]`, as in Hugging Face checkpoints. Modules are made with a `stack`: the
leading axes under which a segment's layers are stacked; a scan takes them off again.
"""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

Stack = tuple[int, ...]


def product(x: Float[Array, "*n k"], w: Float[Array, "m k"]) -> Float[Array, "*n m"]:
    """x times the transpose of w, summed in float32, in the dtype of x."""
    return product_float32(x, w).astype(x.dtype)


def product_float32(x: Float[Array, "*n k"], w: Float[Array, "m k"]) -> Float[Array, "*n m"]:
    """x times the transpose of w, in float32."""
    if x.size == x.shape[-1] and x.dtype != jnp.float32:
        # XLA multiplies a single row outside of the matrix units, and widens all of w for that.
        twice = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
        return product_float32(twice, w)[:1].reshape(*x.shape[:-1], -1)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x, w, contract, precision=precision_of(x), preferred_element_type=jnp.float32
    )


def precision_of(x: Float[Array, "..."]) -> lax.Precision:
    """The precision of products with x: a GPU would round float32 factors to TF32."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


class Linear(nnx.Module):
    """x W^T (+ b)."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = False, stack: Stack = (), dtype: str
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((*stack, outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((*stack, outputs), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*n k"]) -> Float[Array, "*n m"]:
        y = product_float32(x, self.weight[...])
        if self.bias is not None:
            bias = self.bias[...].astype(jnp.float32)
            y = y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)
        return y.astype(x.dtype)


class RmsNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) in float32, rounded to the dtype of x, times a weight."""

    def __init__(self, size: int, *, epsilon: float, stack: Stack = (), dtype: str) -> None:
        self.weight = nnx.Param(jnp.ones((*stack, size), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*n size"]) -> Float[Array, "*n size"]:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        weight = self.weight[...]
        return (wide * scale).astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


class Embedding(nnx.Module):
    """One row per token; also the head of models with tied embeddings."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: str) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, tokens: Int32[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")
