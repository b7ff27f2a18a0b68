"""What transformers' own classes write for a family is read as a file without those keys is."""

import json
import logging

import pytest

from converters import checkpoints
from moejax_converters.families import model_config

# What the classes do not set, or set to what is refused.
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}
NEEDED["gemma4"] = {"text_config": NEEDED["gemma4_text"]}
FAMILIES = sorted({*checkpoints.FAMILIES, *checkpoints.WRAPPERS} - {"kimi_k2"})


def written_config(family, settings):
    """The config.json that transformers saves, after JSON."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **settings)
    return json.loads(json.dumps(config.to_dict(), default=str)) | {"dtype": "bfloat16"}


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_the_defaults_of_transformers(family):
    needed = NEEDED.get(family, {})
    bare = {"model_type": family, "dtype": "bfloat16"} | needed
    assert model_config(bare) == model_config(written_config(family, needed))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_makes_of_a_file_means_the_same(family):
    hf = checkpoints.config_of(family)
    settings = {key: value for key, value in hf.items() if key != "model_type"}
    assert model_config(written_config(family, settings)) == model_config(hf)
