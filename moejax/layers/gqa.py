"""Grouped-query attention: the projections before and after it."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from moejax.config import Attention, AttentionTemperature
from moejax.layers.attention import Qkv
from moejax.layers.linear import LayerVector, Linear, RmsNorm, Stack, run_linears
from moejax.layers.rope import rotate
from moejax.pallas.norms import unit_rms


class AttentionLayer(nnx.Module):
    """The projections around attention. What it attends to is the caller's."""

    def __init__(
        self,
        part: Attention,
        hidden_size: int,
        *,
        epsilon: float,
        rounds_late: bool,
        stack: Stack,
        dtype: str,
    ) -> None:
        q_size = part.num_heads * part.head_size
        kv_size = part.num_kv_heads * part.head_size
        options: Any = {"stack": stack, "dtype": dtype}
        self.part = part
        self.epsilon = epsilon
        self.q = Linear(hidden_size, q_size, bias=part.qkv_bias, **options)
        self.k = Linear(hidden_size, kv_size, bias=part.qkv_bias, **options)
        if not part.keys_are_values:
            self.v = Linear(hidden_size, kv_size, bias=part.qkv_bias, **options)
        self.o = Linear(q_size, hidden_size, bias=part.output_bias, **options)
        if part.qk_norm in ("head", "projection"):
            per_head = part.qk_norm == "head"
            options |= {"epsilon": epsilon, "rounds_late": rounds_late}
            self.q_norm = RmsNorm(part.head_size if per_head else q_size, **options)
            self.k_norm = RmsNorm(part.head_size if per_head else kv_size, **options)
        if part.sinks:
            self.sinks = nnx.Param(jnp.zeros((*stack, part.num_heads), dtype))

    def project(
        self,
        x: Float[Array, "tokens hidden"],
        positions: Int32[Array, " tokens"],
        uses_long: Bool[Array, " tokens"],
    ) -> Qkv:
        """Queries, keys and values: norm, clip, then rotation."""
        part = self.part
        q, k, *rest = run_linears(
            x, [self.q, self.k] if part.keys_are_values else [self.q, self.k, self.v]
        )
        v = rest[0] if rest else k
        if part.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.reshape(len(x), -1, part.head_size) for y in (q, k, v))
        if part.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if part.v_norm:
            v = unit_rms(v, self.epsilon).astype(v.dtype)
        if part.qkv_clip is not None:
            q, k, v = (jnp.clip(y, -part.qkv_clip, part.qkv_clip) for y in (q, k, v))
        if part.rope is not None:
            q, k = (rotate(y, positions, part.rope, uses_long) for y in (q, k))
        if part.qk_norm == "rotated":
            q, k = (unit_rms(y, self.epsilon).astype(y.dtype) for y in (q, k))
        if part.temperature is not None:
            q = heat(q, positions, part.temperature)
        sinks = self.sinks[...] if part.sinks else None
        return Qkv(q, k, v, sinks.row() if isinstance(sinks, LayerVector) else sinks)

    def output(self, o: Float[Array, "tokens heads size"]) -> Float[Array, "tokens hidden"]:
        """The output projection."""
        return self.o(o.reshape(len(o), -1))


def heat(
    q: Float[Array, "tokens heads size"],
    positions: Int32[Array, " tokens"],
    temperature: AttentionTemperature,
) -> Float[Array, "tokens heads size"]:
    """Queries times 1 + scale * ln(1 + floor((position + 1) / floor)): sharper further back."""
    steps = jnp.floor((positions.astype(jnp.float32) + 1) / temperature.floor)
    factor = 1 + temperature.scale * jnp.log1p(steps)
    return (q.astype(jnp.float32) * factor[:, None, None]).astype(q.dtype)
