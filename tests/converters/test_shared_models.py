"""Checkpoints that transformers wrote, tiny ones with random weights and small trained ones."""

import numpy as np
import pytest
from safetensors import safe_open

from converters import checkpoints, hf_names
from moejax.checkpoint import Checkpoint
from moejax.errors import ConfigError
from moejax_converters.convert import convert
from moejax_converters.source import Source

BOTH_LAYOUTS = {
    "mixtral": "mixtral",
    "mixtral_swa": "mixtral",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_moe_mixed": "qwen3_moe",
    "olmoe": "olmoe",
    "olmoe_clip": "olmoe",
    "phimoe": "phimoe",
    "phimoe_long": "phimoe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v2_lite": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}
"""Tiny models of one tensor per expert, and fused → their family."""
FUSED = {
    "llama4": "llama4",
    "llama4_text": "llama4_text",
    "llama4_interleaved": "llama4_text",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4_text",
    "gpt_oss": "gpt_oss",
}
"""Tiny models whose experts are always fused → their model type."""
TRAINED = {"ref": "qwen2_moe", "wide": "mixtral", "demo": "mixtral"}


def source_tensors(folder):
    """Every tensor of a folder, by the name in its file, through the safetensors library."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors


def is_text(name):
    return not any(part in name for part in ("vision", "multi_modal"))


@pytest.mark.parametrize("name", BOTH_LAYOUTS)
def test_both_layouts_of_a_tiny_model_decode_to_its_source(name, shared_dir, tmp_path):
    folder = shared_dir / "tiny_models" / "out"
    outputs = []
    for folder_name, layout in ((name, "per_expert"), (f"{name}-fused", "fused")):
        convert(folder / folder_name, tmp_path / layout)
        outputs.append(checkpoints.decoded(tmp_path / layout))
        family = Checkpoint.open(tmp_path / layout).config.family
        assert family == BOTH_LAYOUTS[name]
        renamed = hf_names.hf_tensors(outputs[-1], family, layout)
        checkpoints.assert_same(renamed, source_tensors(folder / folder_name))
    checkpoints.assert_same(outputs[1], outputs[0])
    assert {array.dtype for array in outputs[0].values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_tiny_model_decodes_to_its_source(name, shared_dir, tmp_path):
    folder = shared_dir / "tiny_models" / "out" / name
    convert(folder, tmp_path / "out")
    found = hf_names.hf_tensors(checkpoints.decoded(tmp_path / "out"), FUSED[name], "fused")
    source = source_tensors(folder)
    checkpoints.assert_same(found, {n: array for n, array in source.items() if is_text(n)})
    assert (len(found) < len(source)) == (name in ("llama4", "gemma4"))


@pytest.mark.parametrize(
    ("name", "layout"), [("deepseek_v3-fp8", "per_expert"), ("gpt_oss-mxfp4", "fused")]
)
def test_a_quantized_tiny_model_decodes_to_what_its_codes_mean(name, layout, shared_dir, tmp_path):
    folder = shared_dir / "tiny_models" / "out" / name
    convert(folder, tmp_path / "out")
    family = Checkpoint.open(tmp_path / "out").config.family
    found = hf_names.hf_tensors(checkpoints.decoded(tmp_path / "out"), family, layout)
    source = Source(folder)
    assert sorted(found) == sorted(source.tensors)
    for tensor, array in found.items():
        wanted = source.read(tensor)
        assert np.array_equal(array.astype(np.float32), wanted.astype(np.float32)), tensor


def test_a_layout_of_each_kind_by_hand(shared_dir, tmp_path):
    folder = shared_dir / "tiny_models" / "out"
    found, source = {}, {}
    for name in ("deepseek_v2", "gpt_oss", "llama4"):
        convert(folder / name, tmp_path / name)
        found[name] = checkpoints.decoded(tmp_path / name)
        source[name] = source_tensors(folder / name)

    # Four heads, each with 16 rows of its key, then 16 of its value.
    heads = source["deepseek_v2"]["model.layers.1.self_attn.kv_b_proj.weight"]
    for head in range(4):
        rows = heads[32 * head : 32 * head + 32]
        k_up = found["deepseek_v2"]["layers.1.attention.k_up"]
        v_up = found["deepseek_v2"]["layers.1.attention.v_up"]
        assert np.array_equal(k_up[head], rows[:16])
        assert np.array_equal(v_up[head], rows[16:])

    at = "model.layers.2.mlp.experts."
    gate_up, bias = (source["gpt_oss"][at + n] for n in ("gate_up_proj", "gate_up_proj_bias"))
    for unit in (0, 1, 47):
        for part, column in (("gate", 2 * unit), ("up", 2 * unit + 1)):
            rows = found["gpt_oss"][f"layers.2.experts.5.{part}"]
            assert np.array_equal(rows[unit], gate_up[5, :, column])
            values = found["gpt_oss"][f"layers.2.feed_forward.expert_bias.{part}"]
            assert np.array_equal(values[:, unit], bias[:, column])

    at = "language_model.model.layers.1.feed_forward.experts."
    gate_up, down = (source["llama4"][at + n] for n in ("gate_up_proj", "down_proj"))
    for unit in (0, 47):
        for part, column in (("gate", unit), ("up", 48 + unit)):
            rows = found["llama4"][f"layers.1.experts.3.{part}"]
            assert np.array_equal(rows[unit], gate_up[3, :, column])
        columns = found["llama4"]["layers.1.experts.3.down"]
        assert np.array_equal(columns[:, unit], down[3, unit])


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_model_decodes_to_its_source(name, shared_dir, tmp_path):
    folder = shared_dir / "models" / name
    convert(folder, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    decoded = checkpoints.decoded(tmp_path / "out")
    renamed = hf_names.hf_tensors(decoded, TRAINED[name], "per_expert")
    checkpoints.assert_same(renamed, source_tensors(folder))
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.config.tie_embeddings
    assert checkpoint.generation == {
        "eos_token_ids": [0],
        "bos_token_id": 0,
        "temperature": 0.8,
        "top_p": 0.95,
    }
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.parametrize("name", ["glm4_moe", "granitemoe", "minimax_m2"])
def test_families_that_are_not_supported_are_refused_by_name(name, shared_dir, tmp_path):
    with pytest.raises(
        ConfigError,
        match=rf"model type '{name}' is not supported \(supported: deepseek_v2, deepseek_v3, gem",
    ):
        convert(shared_dir / "tiny_models" / "out" / name, tmp_path / "out")
