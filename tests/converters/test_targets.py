"""The tensors of a model, by hand."""

import math

import pytest

from converters import checkpoints
from moejax_converters import families, targets


def test_expected_tensors_by_hand():
    config = families.model_config(
        checkpoints.config_of(
            "qwen2_moe",
            num_experts=1,
            num_experts_per_tok=1,
            num_hidden_layers=2,
            tie_word_embeddings=True,
        )
    )
    attention = {
        "attention_norm.weight": (32,),
        "attention.q.weight": (32, 32),
        "attention.k.weight": (16, 32),
        "attention.v.weight": (16, 32),
        "attention.o.weight": (32, 32),
        "attention.q.bias": (32,),
        "attention.k.bias": (16,),
        "attention.v.bias": (16,),
        "feed_forward_norm.weight": (32,),
    }
    sparse = attention | {
        "feed_forward.router.weight": (1, 32),
        "feed_forward.shared.gate.weight": (56, 32),
        "feed_forward.shared.up.weight": (56, 32),
        "feed_forward.shared.down.weight": (32, 56),
        "feed_forward.shared.router.weight": (1, 32),
        "experts.0.gate": (24, 32),
        "experts.0.up": (24, 32),
        "experts.0.down": (32, 24),
    }
    dense = attention | {
        "feed_forward.gate.weight": (72, 32),
        "feed_forward.up.weight": (72, 32),
        "feed_forward.down.weight": (32, 72),
    }
    assert targets.expected_tensors(config) == {
        "embed.weight": (96, 32),
        "norm.weight": (32,),
        **{f"layers.0.{name}": shape for name, shape in sparse.items()},
        **{f"layers.1.{name}": shape for name, shape in dense.items()},
    }


def test_expected_tensors_of_latent_attention_by_hand():
    shapes = targets.expected_tensors(families.model_config(checkpoints.config_of("deepseek_v3")))
    at = "layers.1.attention."
    found = {name.removeprefix(at): shape for name, shape in shapes.items() if name.startswith(at)}
    assert found == {
        "q_down.weight": (16, 32),
        "q_down.bias": (16,),
        "q_latent_norm.weight": (16,),
        "q_up.weight": (64, 16),
        "kv_down.weight": (24, 32),
        "kv_down.bias": (24,),
        "latent_norm.weight": (20,),
        "k_up": (4, 12, 20),
        "v_up": (4, 10, 20),
        "o.weight": (32, 40),
        "o.bias": (32,),
    }
    assert shapes["layers.1.feed_forward.router.choice_bias"] == (4,)


def test_expected_tensors_beside_the_experts_by_hand():
    config = families.model_config(checkpoints.config_of("gemma4_text"))
    at = "layers.2."
    found = {
        name.removeprefix(at): shape
        for name, shape in targets.expected_tensors(config).items()
        if name.startswith(at) and ".experts." not in name
    }
    norms = ("attention_norm", "attention_post_norm", "feed_forward_post_norm")
    norms += tuple(
        f"feed_forward.{part}{post}_norm" for part in ("mlp", "moe") for post in ("", "_post")
    )
    assert found == {
        **{f"{norm}.weight": (32,) for norm in norms},
        # Keys are values too.
        "attention.q.weight": (64, 32),
        "attention.k.weight": (16, 32),
        "attention.o.weight": (32, 64),
        "attention.q_norm.weight": (16,),
        "attention.k_norm.weight": (16,),
        "feed_forward.mlp.gate.weight": (72, 32),
        "feed_forward.mlp.up.weight": (72, 32),
        "feed_forward.mlp.down.weight": (32, 72),
        "feed_forward.moe.router.weight": (4, 32),
        "feed_forward.moe.router.input_scale": (32,),
        "feed_forward.moe.router.expert_scale": (4,),
        "output_scale": (1,),
    }


def test_expected_tensors_with_biases_by_hand():
    shapes = targets.expected_tensors(families.model_config(checkpoints.config_of("gpt_oss")))
    assert {name: shapes[f"layers.0.{name}"] for name in SINKS_AND_BIASES} == SINKS_AND_BIASES
    shapes = targets.expected_tensors(families.model_config(checkpoints.config_of("phimoe")))
    assert {name: shapes[name] for name in HEAD_AND_NORMS} == HEAD_AND_NORMS


SINKS_AND_BIASES = {
    "attention.sinks": (4,),
    "attention.o.bias": (32,),
    "feed_forward.router.bias": (4,),
    "feed_forward.expert_bias.gate": (4, 24),
    "feed_forward.expert_bias.up": (4, 24),
    "feed_forward.expert_bias.down": (4, 32),
}
HEAD_AND_NORMS = {
    "head.bias": (96,),
    "norm.bias": (32,),
    "layers.2.attention_norm.bias": (32,),
    "layers.2.feed_forward_norm.bias": (32,),
}


def test_norms_of_q_and_k_are_as_wide_as_what_they_norm():
    for family, q, k in (("qwen3_moe", 16, 16), ("olmoe", 32, 16)):
        config = families.model_config(checkpoints.config_of(family))
        shapes = targets.expected_tensors(config)
        assert shapes["layers.0.attention.q_norm.weight"] == (q,)
        assert shapes["layers.0.attention.k_norm.weight"] == (k,)


def test_layers_that_share_a_place_in_the_period_are_stacked():
    config = families.model_config(checkpoints.config_of("qwen3_moe"))  # dense, MoE, dense, MoE
    stacks = targets.dense_stacks(config)
    assert stacks["embed.weight"] == ("embed.weight",)
    assert stacks["segments.0.0.feed_forward.up.weight"] == (
        "layers.0.feed_forward.up.weight",
        "layers.2.feed_forward.up.weight",
    )
    assert stacks["segments.0.1.feed_forward.router.weight"] == (
        "layers.1.feed_forward.router.weight",
        "layers.3.feed_forward.router.weight",
    )
    stacked = [target for targets in stacks.values() for target in targets]
    experts = [name for name in targets.expected_tensors(config) if ".experts." in name]
    assert sorted(stacked + experts) == sorted(targets.expected_tensors(config))


# Published settings, and the number of parameters that the authors, or transformers, count.
PUBLISHED = {
    "Mixtral-8x7B": (46.70, {"model_type": "mixtral"}),
    "Mixtral-8x22B": (
        140.62,
        {
            "model_type": "mixtral",
            "num_hidden_layers": 56,
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_attention_heads": 48,
        },
    ),
    "Qwen1.5-MoE-A2.7B": (14.32, {"model_type": "qwen2_moe"}),
    "Qwen2-57B-A14B": (
        57.41,
        {
            "model_type": "qwen2_moe",
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "moe_intermediate_size": 2560,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 20480,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "Qwen3-30B-A3B": (
        30.53,
        {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128},
    ),
    "Qwen3-235B-A22B": (
        235.09,
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 94,
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "head_dim": 128,
        },
    ),
    "OLMoE-1B-7B": (6.92, {"model_type": "olmoe", "intermediate_size": 1024}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters_as_published(name):
    billions, hf = PUBLISHED[name]
    config = families.model_config(hf | {"torch_dtype": "bfloat16"})
    shapes = targets.expected_tensors(config)
    assert round(sum(math.prod(shape) for shape in shapes.values()) / 1e9, 2) == billions
