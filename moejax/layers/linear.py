"""Products with weights, norms and embedding.

Weights are stored `[out, in]`, as in Hugging Face checkpoints. Modules are made with a `stack`: the
leading axes under which a segment's layers are stacked; a scan takes them off again.
"""

import dataclasses
from types import EllipsisType
from typing import Any, Literal, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from moejax.pallas import norms, stacked
from moejax.pallas.norms import unit_rms

Stack = tuple[int, ...]
NormKind = Literal["rms", "rms_float32", "layer"]


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


def product_with_bias(
    x: Float[Array, "*n k"], w: Float[Array, "m k"], bias: Float[Array, " m"]
) -> Float[Array, "*n m"]:
    """x times the transpose of w, plus a bias: summed in float32, in the dtype of x."""
    # With the bias as its epilogue cuBLAS would get a copy of the weights, not a slice of a stack.
    y = lax.optimization_barrier(product_float32(x, w))
    return _add_bias(y, bias).astype(x.dtype)


def _add_bias(y: Float[Array, "*n m"], bias: Float[Array, " m"]) -> Float[Array, "*n m"]:
    wide = bias.astype(jnp.float32)
    return y + wide.reshape((1,) * (y.ndim - 1) + wide.shape)


def precision_of(x: Float[Array, "..."]) -> lax.Precision:
    """The precision of products with x: a GPU would round float32 factors to TF32."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


@runtime_checkable
class StoredMatrix(Protocol):
    """A matrix that is not an array, and knows how to multiply."""

    def product(self, x: Float[Array, "tokens k"], bias: Any) -> Float[Array, "tokens m"]:
        """x times the transpose of the matrix, plus a bias [m] or None, in the dtype of x."""
        ...

    def __getitem__(self, at: EllipsisType) -> "StoredMatrix":
        """Itself: a parameter gives its value so."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class LayerMatrix:
    """A StoredMatrix: that of one layer in the array of all layers, which is not copied."""

    stack: Float[Array, "layers m k"]
    layer: Int32[Array, ""]

    def product(self, x: Float[Array, "tokens k"], bias: Any) -> Float[Array, "tokens m"]:
        stack = None
        if bias is not None:
            if not isinstance(bias, LayerVector):
                raise TypeError("a bias is read in place where its matrix is")
            stack = bias.stack
        return stacked.multiply(x, [self.stack], [stack], self.layer)[0]

    def product_float32(self, x: Float[Array, "tokens k"]) -> Float[Array, "tokens m"]:
        """The same without a bias, in float32."""
        (y,) = stacked.multiply(x, [self.stack], [None], self.layer, jnp.dtype(jnp.float32))
        return y

    def __getitem__(self, at: EllipsisType) -> "LayerMatrix":
        return self


@dataclasses.dataclass(frozen=True, eq=False)
class LayerVector:
    """A small weight of one layer in the array of all layers, which is not sliced."""

    stack: Float[Array, "layers size"]
    layer: Int32[Array, ""]

    def row(self) -> Float[Array, " size"]:
        """The weight, chosen among all: XLA makes copies of slices, and these are computed."""
        number = jnp.arange(len(self.stack), dtype=jnp.int32)
        zero = jnp.zeros((), self.stack.dtype)
        chosen = jnp.where((number == self.layer)[:, None], self.stack, zero)
        return jnp.sum(chosen, axis=0, dtype=jnp.float32).astype(self.stack.dtype)

    def __getitem__(self, at: EllipsisType) -> "LayerVector":
        return self


class Linear(nnx.Module):
    """x W^T (+ b). The weight may be a StoredMatrix."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = False, stack: Stack = (), dtype: str
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((*stack, outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((*stack, outputs), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*n k"]) -> Float[Array, "*n m"]:
        weight = self.weight[...]
        if isinstance(weight, StoredMatrix):
            return weight.product(x, None if self.bias is None else self.bias[...])
        if self.bias is None:
            return product(x, weight)
        return product_with_bias(x, weight, self.bias[...])


def run_linears(x: Float[Array, "tokens k"], linears: list[Linear]) -> list[Array]:
    """What each of these gives for x, by one launch where a kernel multiplies with all."""
    weights: list[object] = [linear.weight[...] for linear in linears]
    matrices = [w for w in weights if isinstance(w, LayerMatrix)]
    if len(matrices) < len(linears):
        return [linear(x) for linear in linears]
    biases = [None if linear.bias is None else linear.bias[...] for linear in linears]
    return stacked.multiply(
        x,
        [w.stack for w in matrices],
        [b.stack if isinstance(b, LayerVector) else None for b in biases],
        matrices[0].layer,
    )


class RmsNorm(nnx.Module):
    """RMS norm times a weight: rounded to the dtype of x before that, or after it.

    `rounds_late`: the weight multiplies in float32.
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float,
        rounds_late: bool = False,
        stack: Stack = (),
        dtype: str,
    ) -> None:
        self.weight = nnx.Param(jnp.ones((*stack, size), dtype))
        self.epsilon = epsilon
        self.rounds_late = rounds_late

    def __call__(self, x: Float[Array, "*n size"]) -> Float[Array, "*n size"]:
        weight = self.weight[...]
        if isinstance(weight, LayerVector):
            y = norms.rms_norm(
                x.reshape(-1, x.shape[-1]),
                weight.stack,
                weight.layer,
                epsilon=self.epsilon,
                rounds_late=self.rounds_late,
            )
            return y.reshape(x.shape)
        return norms.normed(x, weight, self.epsilon, rounds_late=self.rounds_late)


def add_and_norm(
    x: Float[Array, "tokens size"], y: Float[Array, "tokens size"], norm: "Norm"
) -> tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]]:
    """(x + y, the norm of it), by one launch where a kernel does both."""
    if isinstance(norm, RmsNorm) and isinstance(weight := norm.weight[...], LayerVector):
        return norms.add_rms_norm(
            x,
            y,
            weight.stack,
            weight.layer,
            epsilon=norm.epsilon,
            rounds_late=norm.rounds_late,
        )
    return x + y, norm(x + y)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, in float32 (Ba et al. 2016)."""

    def __init__(self, size: int, *, epsilon: float, stack: Stack = (), dtype: str) -> None:
        self.weight = nnx.Param(jnp.ones((*stack, size), dtype))
        self.bias = nnx.Param(jnp.zeros((*stack, size), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*n size"]) -> Float[Array, "*n size"]:
        wide = x.astype(jnp.float32)
        y = unit_rms(wide - jnp.mean(wide, axis=-1, keepdims=True), self.epsilon)
        weight, bias = (
            part[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + part.shape)
            for part in (self.weight, self.bias)
        )
        return (y * weight + bias).astype(x.dtype)


Norm = RmsNorm | LayerNorm


def make_norm(
    kind: NormKind,
    size: int,
    *,
    epsilon: float,
    stack: Stack = (),
    dtype: str,
) -> Norm:
    """The norm that a ModelConfig names."""
    if kind == "layer":
        return LayerNorm(size, epsilon=epsilon, stack=stack, dtype=dtype)
    late = kind == "rms_float32"
    return RmsNorm(size, epsilon=epsilon, rounds_late=late, stack=stack, dtype=dtype)


class Embedding(nnx.Module):
    """One row per token; also the head of models with tied embeddings."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: str) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, tokens: Int32[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")
