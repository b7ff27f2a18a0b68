"""Checkpoints that transformers wrote, tiny ones with random weights and small trained ones."""

import numpy as np
import pytest
from safetensors import safe_open

from converters import checkpoints
from moejax.checkpoint import Checkpoint
from moejax.errors import ConfigError
from moejax_converters.convert import convert

TINY = ("mixtral", "mixtral_swa", "qwen2_moe", "qwen3_moe", "olmoe", "olmoe_clip")
TRAINED = {"ref": "qwen2_moe", "wide": "mixtral", "demo": "mixtral"}


def source_tensors(folder):
    """Every tensor of a folder, by the name in its file, through the safetensors library."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors


@pytest.mark.parametrize("name", TINY)
def test_both_layouts_of_a_tiny_model_decode_to_its_source(name, shared_dir, tmp_path):
    folder = shared_dir / "tiny_models" / "out"
    source = source_tensors(folder / name)
    outputs = []
    for layout in (name, f"{name}-fused"):
        convert(folder / layout, tmp_path / layout)
        outputs.append(checkpoints.decoded(tmp_path / layout))
    checkpoints.assert_same(outputs[1], outputs[0])
    family = Checkpoint.open(tmp_path / name).config.family
    renamed = {checkpoints.hf_name(target, family): array for target, array in outputs[0].items()}
    checkpoints.assert_same(renamed, source)
    assert {array.dtype for array in source.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_model_decodes_to_its_source(name, shared_dir, tmp_path):
    folder = shared_dir / "models" / name
    convert(folder, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    renamed = {
        checkpoints.hf_name(target, TRAINED[name]): array
        for target, array in checkpoints.decoded(tmp_path / "out").items()
    }
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


def test_windows_and_clips_of_the_tiny_models_are_read(shared_dir, tmp_path):
    folder = shared_dir / "tiny_models" / "out"
    for name in ("mixtral_swa", "olmoe_clip"):
        convert(folder / name, tmp_path / name)
    attention = Checkpoint.open(tmp_path / "mixtral_swa").config.layers[0].attention
    assert (attention.window, attention.head_size) == (8, 32)
    assert Checkpoint.open(tmp_path / "olmoe_clip").config.layers[0].attention.qkv_clip == 1.0


def test_a_tiny_model_with_scaled_positions_is_refused(shared_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"rope type 'yarn' is not supported"):
        convert(shared_dir / "tiny_models" / "out" / "qwen3_moe_mixed", tmp_path / "out")


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "gemma4", "llama4", "phimoe"])
def test_families_that_are_not_supported_are_refused_by_name(name, shared_dir, tmp_path):
    with pytest.raises(
        ConfigError,
        match=rf"model type '{name}' is not supported \(supported: mixtral, olmoe, qwen2_moe, qwe",
    ):
        convert(shared_dir / "tiny_models" / "out" / name, tmp_path / "out")
