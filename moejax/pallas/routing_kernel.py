"""From logits to experts and weights, in Triton: see `routing`."""

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    layer,  # int32
    logits,  # float32[tokens, experts]
    bias,  # [layers, experts]: added to the logits
    choice_bias,  # float32[layers, experts]: added to the scores that are compared
    expert_scale,  # [layers, experts]
    topk_ids,  # int32[tokens, k]
    topk_weights,  # [tokens, k]
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    ROUNDED: tl.constexpr,  # logits are rounded to bfloat16
    SIGMOID: tl.constexpr,  # else softmax
    HAS_BIAS: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least EXPERTS
    SLOTS: tl.constexpr,  # a power of two, at least K
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < EXPERTS
    of_layer = tl.load(layer).to(tl.int64) * EXPERTS + expert
    logit = tl.load(logits + token * EXPERTS + expert, mask=exists, other=0)
    if HAS_BIAS:
        logit += tl.load(bias + of_layer, mask=exists, other=0).to(tl.float32)
    if ROUNDED:
        logit = logit.to(tl.bfloat16).to(tl.float32)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    else:
        least = tl.where(exists, logit, float("-inf"))
        power = tl.where(exists, tl.exp(logit - tl.max(least, axis=0)), 0)
        score = power / tl.sum(power, axis=0)
    # Scores grow with the logits, but may be rounded to the same number.
    choice = logit
    if HAS_CHOICE_BIAS:
        choice = score + tl.load(choice_bias + of_layer, mask=exists, other=0)
    # What is no number is chosen first, so that it is seen.
    choice = tl.where(choice == choice, choice, float("inf"))
    # Experts that were chosen and places without one are below any that is left.
    left = exists
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros([SLOTS], tl.int32)
    weights = tl.zeros([SLOTS], tl.float32)
    for n in tl.static_range(K):
        best = tl.max(tl.where(left, choice, float("-inf")), axis=0)
        # Of equal scores the first.
        one = tl.min(tl.where(left & (choice == best), expert, BLOCK), axis=0)
        weight = tl.sum(tl.where(expert == one, score, 0), axis=0)
        ids = tl.where(slot == n, one, ids)
        weights = tl.where(slot == n, weight, weights)
        left = left & (expert != one)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + LEAST_SUM)
    if SCALE != 1.0:
        weights = weights * SCALE
    is_slot = slot < K
    if HAS_SCALE:
        at = expert_scale + tl.load(layer).to(tl.int64) * EXPERTS + ids
        weights *= tl.load(at, mask=is_slot, other=0).to(tl.float32)
    at = token * K + slot
    tl.store(topk_ids + at, ids, mask=is_slot)
    tl.store(topk_weights + at, weights.to(topk_weights.dtype.element_ty), mask=is_slot)
