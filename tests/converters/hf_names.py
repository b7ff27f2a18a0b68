"""The way back: targets as Hugging Face names and lays out the tensors of each family.

Names and layouts are spelled here a second time, in the other direction than in the rules.
"""

import re

import numpy as np

Tensors = dict[str, np.ndarray]

PREFIXES = {"llama4": "language_model.", "gemma4": ""}
"""Family → what stands before `model.` and `lm_head.`."""
MODELS = {"gemma4": "model.language_model."}
"""Family → what its decoder is called, where not `model.`."""

_COMMON = (
    (r"attention_norm\.(\w+)", r"input_layernorm.\1"),
    (r"feed_forward_norm\.(\w+)", r"post_attention_layernorm.\1"),
    (r"attention\.([qkvo])\.(\w+)", r"self_attn.\1_proj.\2"),
    (r"attention\.([qk])_norm\.weight", r"self_attn.\1_norm.weight"),
    (r"feed_forward\.(gate|up|down)\.weight", r"mlp.\1_proj.weight"),
    (r"feed_forward\.router\.weight", "mlp.gate.weight"),
    (r"experts\.(\d+)\.(\w+)", r"mlp.experts.\1.\2_proj.weight"),
)
_MIXTRAL = (
    (r"feed_forward\.router\.weight", "block_sparse_moe.gate.weight"),
    (r"experts\.(\d+)\.gate", r"block_sparse_moe.experts.\1.w1.weight"),
    (r"experts\.(\d+)\.up", r"block_sparse_moe.experts.\1.w3.weight"),
    (r"experts\.(\d+)\.down", r"block_sparse_moe.experts.\1.w2.weight"),
)
_DEEPSEEK = (
    (r"attention\.q_down\.(\w+)", r"self_attn.q_a_proj.\1"),
    (r"attention\.q_latent_norm\.weight", "self_attn.q_a_layernorm.weight"),
    (r"attention\.q_up\.weight", "self_attn.q_b_proj.weight"),
    (r"attention\.kv_down\.(\w+)", r"self_attn.kv_a_proj_with_mqa.\1"),
    (r"attention\.latent_norm\.weight", "self_attn.kv_a_layernorm.weight"),
    (r"feed_forward\.shared\.(\w+)\.weight", r"mlp.shared_experts.\1_proj.weight"),
    (r"feed_forward\.router\.choice_bias", "mlp.gate.e_score_correction_bias"),
)
_LLAMA4 = (
    (r"feed_forward\.shared\.(\w+)\.weight", r"feed_forward.shared_expert.\1_proj.weight"),
    (r"feed_forward\.(gate|up|down)\.weight", r"feed_forward.\1_proj.weight"),
    (r"feed_forward\.router\.weight", "feed_forward.router.weight"),
)
_GEMMA4 = (
    (r"attention_post_norm\.weight", "post_attention_layernorm.weight"),
    (r"feed_forward\.mlp_norm\.weight", "pre_feedforward_layernorm.weight"),
    (r"feed_forward\.moe_norm\.weight", "pre_feedforward_layernorm_2.weight"),
    (r"feed_forward\.mlp_post_norm\.weight", "post_feedforward_layernorm_1.weight"),
    (r"feed_forward\.moe_post_norm\.weight", "post_feedforward_layernorm_2.weight"),
    (r"feed_forward_post_norm\.weight", "post_feedforward_layernorm.weight"),
    (r"feed_forward\.mlp\.(\w+)\.weight", r"mlp.\1_proj.weight"),
    (r"feed_forward\.moe\.router\.weight", "router.proj.weight"),
    (r"feed_forward\.moe\.router\.input_scale", "router.scale"),
    (r"feed_forward\.moe\.router\.expert_scale", "router.per_expert_scale"),
    (r"output_scale", "layer_scalar"),
)
_GPT_OSS = (
    (r"attention\.sinks", "self_attn.sinks"),
    (r"feed_forward\.router\.(\w+)", r"mlp.router.\1"),
    (r"feed_forward\.expert_bias\.down", "mlp.experts.down_proj_bias"),
)
_OWN = {
    "mixtral": _MIXTRAL,
    "phimoe": _MIXTRAL,
    "qwen2_moe": (
        (r"feed_forward\.shared\.router\.weight", "mlp.shared_expert_gate.weight"),
        (r"feed_forward\.shared\.(\w+)\.weight", r"mlp.shared_expert.\1_proj.weight"),
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gpt_oss": _GPT_OSS,
}
# Where the fused layout has other names.
_FUSED_OWN = {
    "mixtral": (),
    "phimoe": ((r"feed_forward\.router\.weight", "mlp.router.weight"),),
}
_FUSED_EXPERTS = {
    "llama4": "feed_forward.experts",
    "llama4_text": "feed_forward.experts",
    "gemma4": "experts",
    "gemma4_text": "experts",
}
"""Family → where its fused experts stand in a layer, if not in `mlp.experts`."""


def hf_tensors(model: Tensors, family: str, layout: str) -> Tensors:
    """Tensors by target, as a checkpoint of this family and layout has them."""
    tensors, fused = {}, {}
    for target, array in model.items():
        if key := _fused_key(target, layout):
            fused.setdefault(key[0], {}).setdefault(key[1], []).append(array)
        else:
            tensors[hf_name(target, family, layout)] = array
    for at, parts in fused.items():
        tensors |= _fuse(at, parts, family)
    return tensors


def hf_name(target: str, family: str, layout: str) -> str:
    """The name of a target that is a tensor of its own."""
    prefix, decoder = PREFIXES.get(family, ""), MODELS.get(family, "model.")
    if target.startswith("head."):
        return f"{prefix}lm_{target}"
    if target == "embed.weight":
        return f"{prefix}{decoder}embed_tokens.weight"
    if target.startswith("norm."):
        return f"{prefix}{decoder}{target}"
    _, layer, rest = target.split(".", 2)
    own = _OWN.get(family, ())
    if layout == "fused":
        own = _FUSED_OWN.get(family, own)
    for pattern, name in (*own, *_COMMON):
        if match := re.fullmatch(pattern, rest):
            return f"{prefix}{decoder}layers.{layer}.{match.expand(name)}"
    raise ValueError(f"{family} has no name for {target}")


def _fused_key(target: str, layout: str) -> tuple[str, str] | None:
    """The place of the tensor that a target is only a part of, and which part that is."""
    experts = r"(layers\.\d+\.experts)\.\d+\.(gate|up|down)"
    heads = r"(layers\.\d+\.attention)\.(k_up|v_up)"
    biases = r"(layers\.\d+\.feed_forward\.expert_bias)\.(gate|up)"
    patterns = [heads, biases, *[experts] * (layout == "fused")]
    match = next((m for pattern in patterns if (m := re.fullmatch(pattern, target))), None)
    return (match[1], match[2]) if match else None


def _fuse(at: str, parts: dict[str, list[np.ndarray]], family: str) -> Tensors:
    _, layer, kind = at.split(".", 2)
    prefix = f"{PREFIXES.get(family, '')}{MODELS.get(family, 'model.')}layers.{layer}"
    if kind == "attention":
        heads = np.concatenate([parts["k_up"][0], parts["v_up"][0]], axis=1)
        return {f"{prefix}.self_attn.kv_b_proj.weight": heads.reshape(-1, heads.shape[-1])}
    if kind == "feed_forward.expert_bias":
        return {
            f"{prefix}.mlp.experts.gate_up_proj_bias": _alternate(parts["gate"], parts["up"])[0]
        }
    gate, up, down = (np.stack(parts[name]) for name in ("gate", "up", "down"))
    if family in ("llama4", "llama4_text"):
        gate_up = np.concatenate([gate.swapaxes(1, 2), up.swapaxes(1, 2)], axis=2)
        down = down.swapaxes(1, 2)
    elif family == "gpt_oss":
        gate_up = _alternate(gate.swapaxes(1, 2), up.swapaxes(1, 2))
        down = down.swapaxes(1, 2)
    else:
        gate_up = np.concatenate([gate, up], axis=1)
    name = f"{prefix}.{_FUSED_EXPERTS.get(family, 'mlp.experts')}"
    fused = {f"{name}.gate_up_proj": gate_up, f"{name}.down_proj": down}
    return {name: np.ascontiguousarray(array) for name, array in fused.items()}


def _alternate(
    even: np.ndarray | list[np.ndarray], odd: np.ndarray | list[np.ndarray]
) -> np.ndarray:
    """Two arrays as the even and the odd columns of one."""
    pairs = np.stack([np.asarray(even), np.asarray(odd)], axis=-1)
    return pairs.reshape(*pairs.shape[:-2], -1)
