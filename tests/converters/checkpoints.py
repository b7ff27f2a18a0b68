"""Small Hugging Face folders of the four families, and the way back from a converted one.

Names of tensors are spelled here a second time, in the other direction than in the rules.
"""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

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
}
FAMILIES = tuple(CONFIGS)
LAYOUTS = ("per_expert", "fused")


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json; a change to None removes the key."""
    return {k: v for k, v in (CONFIGS[family] | changes).items() if v is not None}


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
    """The same tensors as a Hugging Face checkpoint names them."""
    if layout == "per_expert":
        return {hf_name(target, family): array for target, array in model.items()}
    tensors = {}
    experts: dict[tuple[str, str], list[np.ndarray]] = {}
    for target, array in model.items():
        match = re.fullmatch(r"layers\.(\d+)\.experts\.\d+\.(gate|up|down)", target)
        if match:
            experts.setdefault((match[1], match[2]), []).append(array)
        else:
            tensors[hf_name(target, family).replace("block_sparse_moe", "mlp")] = array
    for layer in sorted({layer for layer, _ in experts}):
        gate, up, down = (np.stack(experts[layer, part]) for part in ("gate", "up", "down"))
        at = f"model.layers.{layer}.mlp.experts"
        tensors[f"{at}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{at}.down_proj"] = down
    return tensors


def hf_name(target: str, family: str) -> str:
    """The name of a target in a checkpoint of one tensor per expert."""
    top = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if target in top:
        return top[target]
    _, layer, rest = target.split(".", 2)
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    parts = rest.split(".")
    if rest == "attention_norm.weight":
        name = "input_layernorm.weight"
    elif rest == "feed_forward_norm.weight":
        name = "post_attention_layernorm.weight"
    elif parts[0] == "attention":
        name = f"self_attn.{parts[1]}{'' if 'norm' in parts[1] else '_proj'}.{parts[2]}"
    elif parts[0] == "experts":
        mixtral = {"gate": "w1", "up": "w3", "down": "w2"}
        part = mixtral[parts[2]] if family == "mixtral" else f"{parts[2]}_proj"
        name = f"{block}.experts.{parts[1]}.{part}.weight"
    elif rest == "feed_forward.router.weight":
        name = f"{block}.gate.weight"
    elif rest == "feed_forward.shared.router.weight":
        name = "mlp.shared_expert_gate.weight"
    elif parts[1] == "shared":
        name = f"mlp.shared_expert.{parts[2]}_proj.weight"
    else:
        name = f"mlp.{parts[1]}_proj.weight"
    return f"model.layers.{layer}.{name}"


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
        gate_up = format.decode_dense(np.asarray(runs["gate_up"][e]), rows, hidden, dtype)
        tensors[f"{at}.gate"], tensors[f"{at}.up"] = format.split_halves(gate_up, width)
        tensors[f"{at}.down"] = format.decode_dense(
            np.asarray(runs["down"][e]), hidden, width, dtype
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
