"""config.json → ModelConfig: the spellings, the defaults, and what is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters import checkpoints
from converters.checkpoints import FAMILIES
from moejax.config import Attention, LayerKind, Mlp, Moe, Rope, Router, Segment, SharedExpert
from moejax.errors import ConfigError
from moejax_converters.families import model_config


def test_mixtral_by_hand():
    config = model_config(
        {
            "model_type": "mixtral",
            "dtype": "float32",
            "head_dim": None,
            "hidden_size": 64,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
            "num_attention_heads": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
            "sliding_window": 8,
            "vocab_size": 128,
        }
    )
    layer = LayerKind(
        attention=Attention(
            num_heads=4,
            num_kv_heads=2,
            head_size=16,
            scale=0.25,
            rope=Rope(theta=500.0),
            window=8,
        ),
        feed_forward=Moe(
            router=Router(
                num_experts=8, experts_per_token=2, renormalize=True, float32_weights=True
            ),
            expert_width=96,
        ),
    )
    assert config.segments == (Segment(period=(layer,), repeats=3),)
    assert (config.norm_epsilon, config.tie_embeddings, config.dtype) == (1e-5, False, "float32")
    assert (config.vocab_size, config.hidden_size, config.max_position_embeddings) == (128, 64, 256)


def test_qwen2_moe_by_hand():
    config = model_config(checkpoints.config_of("qwen2_moe"))
    dense, sparse = config.layers[1], config.layers[0]
    assert config.layers == (sparse, dense, sparse)
    assert dense.feed_forward == Mlp(width=72)
    assert sparse.feed_forward == Moe(
        router=Router(num_experts=4, experts_per_token=2, renormalize=False, float32_weights=False),
        expert_width=24,
        shared=SharedExpert(width=56, gated=True),
    )
    assert sparse.attention.qkv_bias and not sparse.attention.output_bias


def test_qwen3_moe_by_hand():
    config = model_config(checkpoints.config_of("qwen3_moe"))
    assert [isinstance(kind.feed_forward, Moe) for kind in config.layers] == [0, 1, 0, 1]
    assert [segment.num_layers for segment in config.segments] == [4]
    attention = config.layers[0].attention
    assert (attention.head_size, attention.qk_norm) == (16, "head")
    assert attention.qkv_bias and attention.output_bias
    assert config.moe.router.renormalize and not config.moe.router.float32_weights


def test_olmoe_by_hand():
    config = model_config(checkpoints.config_of("olmoe"))
    attention = config.layers[0].attention
    assert (attention.qk_norm, attention.qkv_clip, attention.head_size) == ("projection", 8.0, 8)
    assert config.moe.expert_width == 24


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_absent_keys_mean_the_defaults_of_transformers(family):
    config = model_config({"model_type": family, "dtype": "bfloat16"})
    attention = config.layers[0].attention
    theta = {"mixtral": 1e6}.get(family, 1e4)
    heads = {"mixtral": (32, 8), "qwen2_moe": (16, 16), "qwen3_moe": (32, 4), "olmoe": (16, 16)}
    experts = {
        "mixtral": (8, 2, 14336),
        "qwen2_moe": (60, 4, 1408),
        "qwen3_moe": (128, 8, 768),
        "olmoe": (64, 8, 2048),
    }
    layers = {"mixtral": 32, "qwen2_moe": 24, "qwen3_moe": 24, "olmoe": 16}
    router = config.moe.router
    assert attention.rope.theta == theta
    assert (attention.num_heads, attention.num_kv_heads) == heads[family]
    assert (router.num_experts, router.experts_per_token, config.moe.expert_width) == experts[
        family
    ]
    assert len(config.layers) == layers[family]
    assert attention.qkv_bias == (family == "qwen2_moe")
    assert attention.window is None and attention.qkv_clip is None
    assert router.renormalize == (family == "mixtral")
    assert not config.tie_embeddings


@pytest.mark.parametrize(
    "family",
    # The others have no rotary positions of type default, or not in all layers.
    sorted(set(FAMILIES) - {"phimoe", "gemma4_text", "gpt_oss"}),
)
def test_both_spellings_mean_the_same(family):
    old = checkpoints.config_of(family, rope_theta=12345.0)
    new = checkpoints.config_of(
        family,
        rope_theta=None,
        torch_dtype=None,
        num_experts=None,
        num_local_experts=None,
        rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
        dtype="bfloat16",
    )
    new["num_experts" if family == "mixtral" else "num_local_experts"] = 4
    assert model_config(new) == model_config(old)
    assert model_config(old).layers[0].attention.rope.theta == 12345.0


def test_old_rope_scaling_of_type_default_is_accepted():
    config = checkpoints.config_of("qwen3_moe", rope_scaling={"type": "default"})
    assert model_config(config).layers[0].attention.rope.theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": True}, [8] * 4),
        ({"use_sliding_window": True}, [4096] * 4),
    ],
)
def test_qwen3_has_a_window_only_if_it_is_used(changes, windows):
    config = model_config(checkpoints.config_of("qwen3_moe", **changes))
    assert [kind.attention.window for kind in config.layers] == windows


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8, "max_window_layers": 2}, [None] * 3),
        (
            {"sliding_window": 8, "max_window_layers": 2, "use_sliding_window": True},
            [8, None, None],
        ),
        ({"sliding_window": 8, "use_sliding_window": True}, [8, None, 8]),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            [None, 8, None],
        ),
    ],
)
def test_qwen2_has_a_window_on_the_layers_that_transformers_gives_one(changes, windows):
    config = model_config(checkpoints.config_of("qwen2_moe", **changes))
    assert [kind.attention.window for kind in config.layers] == windows


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
NESTED = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"model type 'gpt2' is not supported \(supported: deepseek_v2, deepseek_v3, gemma4, ",
        ),
        ({"model_type": None}, r"model type 'None' is not supported \(supported: deepseek_v2, "),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported \(supported: silu\)"),
        (
            {"rope_parameters": DYNAMIC},
            r"rope type 'dynamic' is not supported \(supported: default, linear, llama3, long",
        ),
        ({"rope_parameters": NESTED}, r"differ by layer \(full_attention, sliding_attention\)"),
        ({"rope_scaling": 4}, r"rope_scaling is 4, needed an object"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, r"partial_rotary_factor 0\.25 is "),
        ({"torch_dtype": "float64"}, r"dtype 'float64' is not supported \(supported: bfloat16, "),
        ({"num_local_experts": 3, "num_experts": 4}, r"num_local_experts 3 and num_experts 4 dis"),
        ({"num_hidden_layers": "3"}, r"num_hidden_layers is '3', needed an integer of at least 1"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0, needed an integer of at least 1"),
        ({"hidden_size": True}, r"hidden_size is True, needed an integer"),
        ({"rms_norm_eps": -1}, r"rms_norm_eps is -1, needed a positive number"),
        ({"rope_theta": "1e6"}, r"rope_theta is '1e6', needed a positive number"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings is 'no', needed true or false"),
        ({"sliding_window": 0}, r"sliding_window is 0, needed an integer of at least 1"),
        ({"num_experts_per_tok": 5}, r"5 experts per token of 4 experts"),
        ({"num_key_value_heads": 3}, r"4 query heads are not a multiple of 3 KV heads"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan, needed a positive number"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps is 1e\+300, needed a positive number"),
        ({"sliding_window": 2**31}, r"sliding_window is 2147483648, .* at most 2147483647"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, .* at most 4096"),
        ({"num_attention_heads": 64, "head_dim": None}, r"hidden_size 32 is less than num_atten"),
        ({"rope_parameters": []}, r"rope_parameters is \[\], needed an object"),
        ({"rope_scaling": False}, r"rope_scaling is False, needed an object"),
        (
            {"rope_parameters": {"factor": 4.0}},
            r"rope_parameters\.factor is 4\.0, but rope type 'default' does not have it",
        ),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [2, 2]}},
            r"rope_scaling\.mrope_section is \[2, 2\], but rope type 'default' does not have it",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            r"layer_types says 'sliding_attention' for layer 1, which by .* is 'full_attention'",
        ),
        ({"layer_types": ["full_attention"] * 2}, r"layer_types is .*, needed a list of 3, one"),
        (
            {"layer_types": ["linear_attention"] * 3},
            r"layer_types is .*, one per layer, of full_at",
        ),
        (
            {"per_layer_config": {"0": {"head_dim": 8}}},
            r"per_layer_config \{'0': \{'head_dim': 8\}\} is not supported",
        ),
        ({"layer_types": "full_attention"}, r"layer_types is 'full_attention', needed a list of 3"),
    ],
)
def test_refuses_by_name_and_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_config(checkpoints.config_of("mixtral", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": "1"}, r"mlp_only_layers is '1', needed a list of integers"),
        ({"mlp_only_layers": [0, 1, 2]}, r"qwen2_moe: no layer has routed experts"),
        ({"decoder_sparse_step": 0}, r"decoder_sparse_step is 0, needed an integer of at least 1"),
        ({"norm_topk_prob": 1}, r"norm_topk_prob is 1, needed true or false"),
        ({"layer_types": ["full_attention"]}, r"layer_types is .*, needed a list of 3, one per"),
        (
            {"layer_types": ["sliding_attention"] * 3},
            r"needed a list of 3, one per layer, of full_attention$",
        ),
    ],
)
def test_refuses_by_name_and_value_for_qwen2(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_config(checkpoints.config_of("qwen2_moe", **changes))


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
def test_layer_types_that_are_true_change_nothing(family):
    plain = checkpoints.config_of(family)
    types = ["full_attention"] * plain["num_hidden_layers"]
    assert model_config(plain | {"layer_types": types}) == model_config(plain)


def test_mixtral_has_no_biases_in_transformers_whatever_attention_bias_says():
    plain = checkpoints.config_of("mixtral")
    assert model_config(plain | {"attention_bias": True}) == model_config(plain)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=400)
@given(
    family=st.sampled_from(FAMILIES),
    key=st.sampled_from(
        sorted({key for family in FAMILIES for key in checkpoints.CONFIGS[family]})
        + ["dtype", "sliding_window", "use_sliding_window", "layer_types", "rope_parameters"]
        + ["per_layer_config", "no_rope_layers", "moe_layers", "final_logit_softcapping"]
        + ["attn_temperature_tuning", "router_jitter_noise", "rope_interleave", "swiglu_limit"]
    ),
    value=ANY_JSON,
)
def test_no_value_of_a_key_breaks_the_reader(family, key, value):
    hf = json.loads(json.dumps(checkpoints.CONFIGS[family] | {key: value}))
    hf["num_hidden_layers"] = 3 if key == "num_hidden_layers" else hf["num_hidden_layers"]
    try:
        model_config(hf)
    except ConfigError as error:
        assert "\n" not in str(error)


@settings(max_examples=50)
@given(family=st.sampled_from(sorted(checkpoints.WRAPPERS)), text=ANY_JSON)
def test_no_text_part_breaks_the_reader(family, text):
    try:
        model_config({"model_type": family, "dtype": "bfloat16", "text_config": text})
    except ConfigError as error:
        assert "\n" not in str(error)
