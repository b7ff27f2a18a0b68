"""What DeepSeek V2 and V3 share: latent attention, dense layers first, shared experts."""

from typing import Literal

from moejax.config import LayerKind, Mla, Mlp, ModelConfig, Moe, Router, SharedExpert
from moejax_converters import fused, hf_config, hf_rope, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

# The norms of the latents do not read rms_norm_eps.
_LATENT_NORM_EPSILON = 1e-6


def decoder(family: str, fields: Fields, attention: Mla, router: Router) -> ModelConfig:
    """The ModelConfig of a decoder with this attention and this router in its layers."""
    hf_config.check_plain(fields)
    fields.only("moe_layer_freq", None, 1)
    width = fields.integer("moe_intermediate_size")
    moe = Moe(
        router=router,
        expert_width=width,
        shared=SharedExpert(width=width * fields.integer("n_shared_experts"), gated=False),
    )
    dense = Mlp(width=fields.integer("intermediate_size"))
    first = fields.integer("first_k_dense_replace", least=0)
    layers = [
        LayerKind(attention=attention, feed_forward=dense if n < first else moe)
        for n in range(hf_config.num_layers(fields))
    ]
    return hf_config.decoder(family, fields, layers)


def attention(fields: Fields, pairing: Literal["half", "neighbors"]) -> Mla:
    """Latent attention."""
    heads = fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", None, heads)
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    return Mla(
        num_heads=heads,
        q_latent_size=fields.optional_integer("q_lora_rank"),
        latent_size=fields.integer("kv_lora_rank"),
        nope_size=nope,
        rope_size=rope,
        value_size=fields.integer("v_head_dim"),
        scale=(nope + rope) ** -0.5 * _scale_factor(fields),
        rope=hf_rope.rope(fields, pairing=pairing),
        latent_norm_epsilon=_LATENT_NORM_EPSILON,
        bias=fields.flag("attention_bias"),
    )


def _scale_factor(fields: Fields) -> float:
    """What YaRN multiplies the scores with, where it does not multiply cosine and sine."""
    parameters = hf_rope.rope_parameters(fields)
    weight = parameters.value("mscale_all_dim")
    if not weight:
        return 1.0
    factor = hf_rope.stretch(fields, parameters)
    magnitude = hf_rope.yarn_magnitude(factor, parameters.number("mscale_all_dim"))
    return magnitude**2


def tensor_rules(config: ModelConfig) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    attention = rules.LAYER + r"self_attn\."
    target = r"layers.\1.attention."
    return (
        *rules.decoder_rules(config),
        Rule(attention + r"q_a_proj\.(weight|bias)", target + r"q_down.\2"),
        Rule(attention + r"q_a_layernorm\.weight", target + "q_latent_norm.weight"),
        Rule(attention + r"q_b_proj\.weight", target + "q_up.weight"),
        Rule(attention + r"kv_a_proj_with_mqa\.(weight|bias)", target + r"kv_down.\2"),
        Rule(attention + r"kv_a_layernorm\.weight", target + "latent_norm.weight"),
        Rule(attention + r"kv_b_proj\.weight", r"layers.\1.attention", fused.keys_and_values),
        *rules.MLP_RULES,
        *rules.ROUTER_RULES,
        *rules.MOE_RULES,
        *rules.FUSED_MOE_RULES,
        Rule(
            rules.LAYER + r"mlp\.shared_experts\.(gate|up|down)_proj\.weight",
            r"layers.\1.feed_forward.shared.\2.weight",
        ),
    )
