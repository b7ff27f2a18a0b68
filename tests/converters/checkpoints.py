"""Small Hugging Face folders of all families, and the way back from a converted one."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from converters import hf_names
from moejax.arena import format
from moejax.checkpoint import Checkpoint
from moejax.config import ModelConfig, Moe
from moejax_converters import families, targets

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "moe_intermediate_size": 24,
    "intermediate_size": 72,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": _COMMON
    | {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 40, "head_dim": 16},
    "qwen2_moe": _COMMON
    | {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 56,
        "intermediate_size": 72,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": _COMMON
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "intermediate_size": 72,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "attention_bias": True,
        "norm_topk_prob": True,
    },
    "olmoe": _COMMON
    | {"model_type": "olmoe", "num_experts": 4, "intermediate_size": 24, "clip_qkv": 8.0},
    "phimoe": _COMMON
    | {
        "model_type": "phimoe",
        "num_local_experts": 4,
        "intermediate_size": 40,
        "attention_bias": True,
        "lm_head_bias": True,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "short_mscale": 1.1,
            "long_mscale": 1.3,
        },
    },
    "llama4_text": _COMMON
    | {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 24,
        "intermediate_size_mlp": 72,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
    },
    "deepseek_v2": _COMMON
    | _LATENT
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
    },
    "deepseek_v3": _COMMON
    | _LATENT
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 16,
        "attention_bias": True,
        "n_group": 2,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    },
    "gemma4_text": _COMMON
    | {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "intermediate_size": 72,
        "tie_word_embeddings": True,
    },
    "gpt_oss": _COMMON
    | {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "intermediate_size": 24,
        "sliding_window": 8,
    },
}
CONFIGS["kimi_k2"] = CONFIGS["deepseek_v3"] | {"model_type": "kimi_k2"}
FAMILIES = tuple(CONFIGS)
WRAPPERS = {"llama4": "llama4_text", "gemma4": "gemma4_text"}
"""Model types with the config of a family in their `text_config`."""
LAYOUTS = ("per_expert", "fused")
ALWAYS_FUSED = ("llama4", "llama4_text", "gemma4", "gemma4_text", "gpt_oss")
CASES = [
    (family, layout)
    for family in (*FAMILIES, *WRAPPERS)
    for layout in LAYOUTS
    if layout == "fused" or family not in ALWAYS_FUSED
]
"""Families and the layouts that they have."""
_OF_ALL_PARTS = ("torch_dtype", "tie_word_embeddings")


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json. A change to None removes the key; one of `text_config` is made there."""
    text = CONFIGS[WRAPPERS.get(family, family)] | changes
    text = {k: v for k, v in text.items() if v is not None or k not in changes}
    if family not in WRAPPERS:
        return text
    shared = {name: text.pop(name) for name in _OF_ALL_PARTS if name in text}
    return {"model_type": family, "text_config": text, "vision_config": {}} | shared


def model_tensors(hf: dict[str, Any], dtype: np.dtype = BFLOAT16) -> dict[str, np.ndarray]:
    """Random tensors by the names of their targets."""
    shapes = targets.expected_tensors(families.model_config({"torch_dtype": "bfloat16"} | hf))
    rng = np.random.default_rng(0)
    return {
        target: rng.standard_normal(shape, np.float32).astype(dtype)
        for target, shape in shapes.items()
    }


def hf_tensors(
    model: dict[str, np.ndarray], family: str, *, layout: str = "per_expert"
) -> dict[str, np.ndarray]:
    """The same tensors as a Hugging Face checkpoint names them and lays them out."""
    return hf_names.hf_tensors(model, family, "fused" if family in ALWAYS_FUSED else layout)


def write(
    folder: Path,
    family: str = "mixtral",
    *,
    layout: str = "per_expert",
    dtype: np.dtype = BFLOAT16,
    shards: int = 1,
    generation: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Writes a folder; returns its tensors by target."""
    hf = config_of(family, **changes)
    model = model_tensors(hf, dtype)
    write_folder(folder, hf, hf_tensors(model, family, layout=layout), shards=shards)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return model


def write_folder(
    folder: Path, hf: dict[str, Any], tensors: dict[str, np.ndarray], *, shards: int = 1
) -> None:
    """Writes config.json and the tensors, with an index if there are several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    weight_map = {name: files[n % shards] for n, name in enumerate(names)}
    for file in files:
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def decoded(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a converted folder by target, in the dtype that they are stored in."""
    checkpoint = Checkpoint.open(folder)
    tensors = _dense_tensors(checkpoint)
    for layer, moe in checkpoint.config.moe_layers.items():
        tensors |= _expert_tensors(checkpoint, layer, moe)
    return tensors


def _dense_tensors(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    tensors = {}
    for name in checkpoint.dense_names():
        array = np.asarray(checkpoint.read_dense(name, checkpoint.dense_dtype(name)))
        if not name.startswith("segments."):
            tensors[name] = array
            continue
        _, segment, index, rest = name.split(".", 3)
        layers = _layers_at(checkpoint.config, int(segment), int(index))
        assert len(layers) == len(array)
        for layer, row in zip(layers, array, strict=True):
            tensors[f"layers.{layer}.{rest}"] = row
    return tensors


def _layers_at(config: ModelConfig, segment: int, index: int) -> list[int]:
    before = sum(part.num_layers for part in config.segments[:segment])
    part = config.segments[segment]
    return [before + repeat * len(part.period) + index for repeat in range(part.repeats)]


def _expert_tensors(checkpoint: Checkpoint, layer: int, moe: Moe) -> dict[str, np.ndarray]:
    hidden, width = checkpoint.config.hidden_size, moe.expert_width
    dtype = format.DTYPES[checkpoint.config.dtype]
    runs = checkpoint.expert_runs(layer)
    tensors = {}
    for e in range(moe.router.num_experts):
        checkpoint.verify_expert(layer, e)
        at = f"layers.{layer}.experts.{e}"
        rows = 2 * format.pad_to(width, 64)
        gate_up = format.decode_dense(np.asarray(runs["gate_up.dense"][e]), rows, hidden, dtype)
        tensors[f"{at}.gate"], tensors[f"{at}.up"] = format.split_halves(gate_up, width)
        tensors[f"{at}.down"] = format.decode_dense(
            np.asarray(runs["down.dense"][e]), hidden, width, dtype
        )
    return tensors


def assert_same(
    actual: dict[str, np.ndarray], wanted: dict[str, np.ndarray], *, dtype: Any = None
) -> None:
    """Same names, and the same bits (after a cast of the wanted values to `dtype`)."""
    assert sorted(actual) == sorted(wanted)
    for name, array in wanted.items():
        array = array if dtype is None else array.astype(dtype)
        assert actual[name].dtype == array.dtype, name
        assert actual[name].shape == array.shape, name
        assert actual[name].tobytes() == array.tobytes(), name
