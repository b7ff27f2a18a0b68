"""The Mixture-of-Experts layer: router, experts, shared expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from moejax.config import Moe, Router
from moejax.layers.experts import Experts, run_experts
from moejax.layers.linear import Linear, Stack
from moejax.layers.mlp import SharedExpertLayer


class Routing(NamedTuple):
    """Which experts each token goes to, and their weights."""

    topk_ids: Int32[Array, "tokens k"]
    topk_weights: Float[Array, "tokens k"]


def route(router_logits: Float[Array, "tokens experts"], part: Router) -> Routing:
    """Softmax over all experts in float32, the largest k of it, renormalised where asked."""
    p = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    weights, ids = lax.top_k(p, part.experts_per_token)
    if part.renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if not part.float32_weights:
        weights = weights.astype(router_logits.dtype)
    return Routing(ids.astype(jnp.int32), weights)


class MoeLayer(nnx.Module):
    """Routed experts, whose weights lie elsewhere, plus the model's shared expert, if any."""

    def __init__(self, part: Moe, hidden_size: int, *, stack: Stack, dtype: str) -> None:
        self.part = part
        self.router = Linear(hidden_size, part.router.num_experts, stack=stack, dtype=dtype)
        self.shared = (
            None
            if part.shared is None
            else SharedExpertLayer(hidden_size, part.shared, stack=stack, dtype=dtype)
        )

    def __call__(
        self, x: Float[Array, "tokens hidden"], valid: Bool[Array, " tokens"], experts: Experts
    ) -> Float[Array, "tokens hidden"]:
        routing = route(self.router(x), self.part.router)
        y = run_experts(x, routing.topk_ids, routing.topk_weights, valid, experts)
        return y if self.shared is None else y + self.shared(x)
