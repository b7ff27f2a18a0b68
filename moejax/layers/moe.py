"""The Mixture-of-Experts layer: router, experts, shared expert, and a dense MLP beside them."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from moejax.arena.experts import ExpertBias
from moejax.config import MlpAndMoe, Moe
from moejax.layers.every_token import EveryToken, run_every_token
from moejax.layers.experts import Experts, run_experts
from moejax.layers.linear import Norm, NormKind, Stack, make_norm
from moejax.layers.mlp import MlpLayer, SharedExpertLayer
from moejax.layers.router import RouterLayer


class ExpertBiasLayer(nnx.Module):
    """The biases of all experts: small, so they are not where the experts' matrices lie."""

    def __init__(self, part: Moe, hidden_size: int, *, stack: Stack, dtype: str) -> None:
        experts = (*stack, part.router.num_experts)
        self.gate = nnx.Param(jnp.zeros((*experts, part.expert_width), dtype))
        self.up = nnx.Param(jnp.zeros((*experts, part.expert_width), dtype))
        self.down = nnx.Param(jnp.zeros((*experts, hidden_size), dtype))

    def __call__(self) -> ExpertBias:
        return ExpertBias(self.gate[...], self.up[...], self.down[...])


class MoeLayer(nnx.Module):
    """Routed experts, whose weights lie elsewhere, plus the model's shared expert, if any."""

    def __init__(
        self, part: Moe, hidden_size: int, *, epsilon: float, stack: Stack, dtype: str
    ) -> None:
        self.part = part
        self.router = RouterLayer(
            part.router, hidden_size, epsilon=epsilon, stack=stack, dtype=dtype
        )
        self.expert_bias = (
            ExpertBiasLayer(part, hidden_size, stack=stack, dtype=dtype)
            if part.expert_bias
            else None
        )
        self.shared = (
            None
            if part.shared is None
            else SharedExpertLayer(hidden_size, part.shared, stack=stack, dtype=dtype)
        )

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        valid: Bool[Array, " tokens"],
        experts: Experts,
        router_input: Float[Array, "tokens hidden"] | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """`router_input`: what the router reads; None: x, as the experts do."""
        routing = self.router(x if router_input is None else router_input)
        options: Any = {
            "activation": self.part.activation,
            "weights_input": self.part.weights_input,
            "bias": None if self.expert_bias is None else self.expert_bias(),
        }
        chosen = (x, routing.topk_ids, routing.topk_weights, valid)
        if isinstance(experts, EveryToken):
            y = run_every_token(*chosen, experts, **options)
        else:
            y = run_experts(*chosen, experts, **options)
        return y if self.shared is None else y + self.shared(x)


class MlpAndMoeLayer(nnx.Module):
    """A dense MLP beside routed experts, each with a norm before and one after it."""

    def __init__(
        self,
        part: MlpAndMoe,
        hidden_size: int,
        *,
        norm: NormKind,
        epsilon: float,
        stack: Stack,
        dtype: str,
    ) -> None:
        def make() -> Norm:
            return make_norm(norm, hidden_size, epsilon=epsilon, stack=stack, dtype=dtype)

        self.mlp_norm, self.mlp_post_norm = make(), make()
        self.moe_norm, self.moe_post_norm = make(), make()
        self.mlp = MlpLayer(
            hidden_size, part.mlp.width, part.mlp.activation, stack=stack, dtype=dtype
        )
        self.moe = MoeLayer(part.moe, hidden_size, epsilon=epsilon, stack=stack, dtype=dtype)

    def __call__(
        self, x: Float[Array, "tokens hidden"], valid: Bool[Array, " tokens"], experts: Experts
    ) -> Float[Array, "tokens hidden"]:
        """x is the residual: the router reads it as it is."""
        dense = self.mlp_post_norm(self.mlp(self.mlp_norm(x)))
        routed = self.moe(self.moe_norm(x), valid, experts, router_input=x)
        return dense + self.moe_post_norm(routed)
