"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1), in absorbed form.

A head's key is k_up times the latent, its value v_up times the latent. The product of a query with
such a key is that of k_up^T times the query with the latent, so queries are brought to the latents,
and what attention gives is brought back by v_up: the cache holds no head's keys or values.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from moejax.config import Mla
from moejax.layers.attention import Qkv
from moejax.layers.linear import Linear, RmsNorm, Stack, precision_of, run_linears
from moejax.layers.rope import rotate


class MlaLayer(nnx.Module):
    """The projections around latent attention. What it attends to is the caller's."""

    def __init__(
        self, part: Mla, hidden_size: int, *, rounds_late: bool, stack: Stack, dtype: str
    ) -> None:
        q_size = part.num_heads * (part.nope_size + part.rope_size)
        options: Any = {"stack": stack, "dtype": dtype}
        norm: Any = options | {"epsilon": part.latent_norm_epsilon, "rounds_late": rounds_late}
        self.part = part
        if part.q_latent_size is None:
            self.q = Linear(hidden_size, q_size, **options)
        else:
            self.q_down = Linear(hidden_size, part.q_latent_size, bias=part.bias, **options)
            self.q_latent_norm = RmsNorm(part.q_latent_size, **norm)
            self.q_up = Linear(part.q_latent_size, q_size, **options)
        self.kv_down = Linear(hidden_size, part.cached_values, bias=part.bias, **options)
        self.latent_norm = RmsNorm(part.latent_size, **norm)
        heads = (*stack, part.num_heads)
        self.k_up = nnx.Param(jnp.zeros((*heads, part.nope_size, part.latent_size), dtype))
        self.v_up = nnx.Param(jnp.zeros((*heads, part.value_size, part.latent_size), dtype))
        self.o = Linear(part.num_heads * part.value_size, hidden_size, bias=part.bias, **options)

    def project(
        self,
        x: Float[Array, "tokens hidden"],
        positions: Int32[Array, " tokens"],
        uses_long: Bool[Array, " tokens"],
    ) -> Qkv:
        """Queries over what is cached, and the one key that each token caches."""
        part = self.part
        if part.q_latent_size is None:
            q, compressed = run_linears(x, [self.q, self.kv_down])
        else:
            q, compressed = run_linears(x, [self.q_down, self.kv_down])
            q = self.q_up(self.q_latent_norm(q))
        q = q.reshape(len(x), part.num_heads, -1)
        q_nope, q_rope = q[..., : part.nope_size], q[..., part.nope_size :]
        latent = self.latent_norm(compressed[:, : part.latent_size])
        k_rope = compressed[:, None, part.latent_size :]
        q_rope, k_rope = (rotate(y, positions, part.rope, uses_long) for y in (q_rope, k_rope))
        q = jnp.concatenate([per_head(q_nope, self.k_up[...], 1), q_rope], axis=-1)
        return Qkv(q, jnp.concatenate([latent[:, None], k_rope], axis=-1), None)

    def output(self, o: Float[Array, "tokens heads latent"]) -> Float[Array, "tokens hidden"]:
        """From weighted latents to each head's values, and the output projection."""
        return self.o(per_head(o, self.v_up[...], 2).reshape(len(o), -1))


def per_head(
    x: Float[Array, "tokens heads k"], w: Float[Array, "heads a b"], axis: int
) -> Float[Array, "tokens heads m"]:
    """Each head's x times its own matrix, along `axis` of w; summed in float32."""
    if len(x) == 1 and x.dtype != jnp.float32:
        # XLA multiplies a single row outside of the matrix units, and widens all of w for that.
        return per_head(jnp.broadcast_to(x, (2, *x.shape[1:])), w, axis)[:1]
    contract = (((2,), (axis,)), ((1,), (0,)))
    y = lax.dot_general(
        x, w, contract, precision=precision_of(x), preferred_element_type=jnp.float32
    )
    return y.swapaxes(0, 1).astype(x.dtype)
