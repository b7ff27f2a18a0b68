"""Routers: which experts a token goes to, and with which weights."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from moejax.config import ExpertGroups, Router
from moejax.layers.linear import LayerMatrix, LayerVector, Stack, product_float32
from moejax.pallas import norms, routing
from moejax.pallas.bridge import with_reference
from moejax.pallas.routing import LEAST_SUM


class Routing(NamedTuple):
    """Which experts each token goes to, and their weights."""

    topk_ids: Int32[Array, "tokens k"]
    topk_weights: Float[Array, "tokens k"]


def route(
    router_logits: Float[Array, "tokens experts"],
    part: Router,
    choice_bias: Float32[Array, " experts"] | None = None,
    expert_scale: Float[Array, " experts"] | None = None,
) -> Routing:
    """The experts with the largest scores, and their weights; computed in float32.

    `choice_bias` is added to the scores that are compared, `expert_scale` multiplies the weights.
    """
    logits = router_logits.astype(jnp.float32)
    if part.score == "sparsemixer":
        ids, weights = sparsemixer(logits, part.jitter)
    else:
        softmax = part.score == "softmax"
        scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
        # Scores grow with the logits, but may be rounded to the same number.
        choice = logits if choice_bias is None and part.groups is None else scores
        if choice_bias is not None:
            choice = choice + choice_bias[None, :]
        if part.groups is not None:
            choice = keep_best_groups(choice, part.groups)
        _, ids = lax.top_k(choice, part.experts_per_token)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
    if part.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + LEAST_SUM)
    if part.scale != 1.0:
        weights = weights * part.scale
    if expert_scale is not None:
        weights = weights * expert_scale.astype(jnp.float32)[ids]
    if not part.float32_weights:
        weights = weights.astype(router_logits.dtype)
    return Routing(ids.astype(jnp.int32), weights)


def keep_best_groups(
    scores: Float[Array, "tokens experts"], groups: ExpertGroups
) -> Float[Array, "tokens experts"]:
    """The scores of experts in the best groups, -inf for the others (DeepSeek-V2, 2.2.2)."""
    by_group = scores.reshape(len(scores), groups.count, -1)
    group_scores = jnp.sum(lax.top_k(by_group, groups.best)[0], axis=-1)
    _, kept = lax.top_k(group_scores, groups.kept)
    number = jnp.arange(groups.count, dtype=kept.dtype)
    is_kept = jnp.any(kept[:, :, None] == number[None, None, :], axis=1)
    return jnp.where(is_kept[:, :, None], by_group, -jnp.inf).reshape(scores.shape)


def sparsemixer(
    logits: Float[Array, "tokens experts"], jitter: float
) -> tuple[Int32[Array, "tokens 2"], Float[Array, "tokens 2"]]:
    """SparseMixer's two rounds, as at inference (Liu et al. 2023, GRIN MoE, section 2.2).

    Each round takes the best expert that is left. Its weight is its softmax among those that are
    left and no further from it than 2 * jitter, as a share of the larger of the two logits.
    """
    left = logits
    ids, weights = [], []
    for _ in range(2):
        best = jnp.max(left, axis=-1, keepdims=True)
        chosen = jnp.argmax(left, axis=-1).astype(jnp.int32)[:, None]
        is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter
        near = jax.nn.softmax(jnp.where(is_far, -jnp.inf, left), axis=-1)
        ids.append(chosen)
        weights.append(jnp.take_along_axis(near, chosen, axis=-1))
        number = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        left = jnp.where(number[None, :] == chosen, -jnp.inf, left)
    return jnp.concatenate(ids, axis=-1), jnp.concatenate(weights, axis=-1)


class RouterLayer(nnx.Module):
    """The learned projection to one logit per expert, and what is learned beside it."""

    def __init__(
        self, part: Router, hidden_size: int, *, epsilon: float, stack: Stack, dtype: str
    ) -> None:
        experts = (*stack, part.num_experts)
        own = "float32" if part.float32_logits else dtype
        self.part = part
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.zeros((*experts, hidden_size), own))
        if part.bias:
            self.bias = nnx.Param(jnp.zeros(experts, own))
        if part.choice_bias:
            self.choice_bias = nnx.Param(jnp.zeros(experts, "float32"))
        if part.input_norm:
            self.input_scale = nnx.Param(jnp.ones((*stack, hidden_size), dtype))
        if part.expert_scale:
            self.expert_scale = nnx.Param(jnp.ones(experts, dtype))

    def inputs(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """What the weight multiplies, in the dtype of the logits."""
        if self.part.input_norm:
            scale = self.input_scale[...]
            if isinstance(scale, LayerVector):
                x = norms.rms_norm(
                    x, scale.stack, scale.layer, epsilon=self.epsilon, rounds_late=False
                )
            else:
                x = norms.normed(x, scale, self.epsilon, rounds_late=False)
            x = x * x.shape[-1] ** -0.5
        return x.astype(jnp.float32) if self.part.float32_logits else x

    def logits(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens experts"]:
        """In float32 or in the dtype of x, as the part says."""
        x = self.inputs(x)
        logits = product_float32(x, self.weight[...])
        if self.part.bias:
            logits = logits + self.bias[...].astype(jnp.float32)[None, :]
        return logits.astype(x.dtype)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Routing:
        part, weight = self.part, self.weight[...]
        if isinstance(weight, LayerMatrix):
            return self.route_in_place(weight.product_float32(self.inputs(x)), weight, x.dtype)
        return route(
            self.logits(x),
            part,
            self.choice_bias[...] if part.choice_bias else None,
            self.expert_scale[...] if part.expert_scale else None,
        )

    def route_in_place(
        self, product: Float32[Array, "tokens experts"], weight: LayerMatrix, dtype: Any
    ) -> Routing:
        """The same, from the product with a weight that is read in place."""
        part = self.part
        learned = [
            getattr(self, name)[...] if has else None
            for name, has in (
                ("bias", part.bias),
                ("choice_bias", part.choice_bias),
                ("expert_scale", part.expert_scale),
            )
        ]
        if not routing.takes(part):
            return _round_and_route(product, *learned, part=part, dtype=dtype)
        stacks = [v.stack if isinstance(v, LayerVector) else v for v in learned]
        joined = with_reference(
            partial(_route_reference, part=part, dtype=dtype),
            partial(routing.route_tokens, part=part, dtype=dtype),
        )
        return Routing(*joined(product, weight.layer, *stacks))


def _round_and_route(
    product: Float32[Array, "tokens experts"],
    bias: Float[Array, " experts"] | None,
    choice_bias: Float32[Array, " experts"] | None,
    expert_scale: Float[Array, " experts"] | None,
    *,
    part: Router,
    dtype: Any,
) -> Routing:
    if bias is not None:
        product = product + bias.astype(jnp.float32)[None, :]
    return route(product.astype(dtype), part, choice_bias, expert_scale)


def _route_reference(
    product: Float32[Array, "tokens experts"],
    layer: Int32[Array, ""],
    *stacks: Float[Array, "layers experts"] | None,
    part: Router,
    dtype: Any,
) -> tuple[Array, Array]:
    of_layer = [
        None if stack is None else lax.dynamic_index_in_dim(stack, layer, keepdims=False)
        for stack in stacks
    ]
    found = _round_and_route(product, *of_layer, part=part, dtype=dtype)
    return found.topk_ids, found.topk_weights
