"""The families that can be converted, by the `model_type` of their `config.json`."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from moejax import config
from moejax.config import Mla, ModelConfig
from moejax.errors import ConfigError
from moejax.layers.rope import frequencies
from moejax_converters import (
    deepseek_v2,
    deepseek_v3,
    gemma4,
    gpt_oss,
    hf_config,
    llama4,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from moejax_converters.rules import Rule, Skip
from moejax_converters.source import Source

FAMILIES: dict[str, ModuleType] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "gpt_oss": gpt_oss,
    "kimi_k2": deepseek_v3,
    "llama4": llama4,
    "llama4_text": llama4,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "phimoe": phimoe,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`. Raises ConfigError for what is not supported."""
    model_type = str(hf.get("model_type"))
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model type '{model_type}' is not supported (supported: {', '.join(sorted(FAMILIES))})"
        )
    try:
        read: ModelConfig = FAMILIES[model_type].model_config(hf)
        # What is written must be readable: this checks the values that no family looks at.
        read = config.config_from_json(config.config_to_json(read))
        _check_rope(read)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(
            text if text.startswith("config.json") else f"config.json: {text}"
        ) from error
    return read


def _check_rope(read: ModelConfig) -> None:
    """Refuses rotary positions whose frequencies are no numbers."""
    for part in {kind.attention for kind in read.layers}:
        if part.rope is None:
            continue
        size = part.rope_size if isinstance(part, Mla) else part.head_size
        for uses_long in (False, True):
            try:
                with np.errstate(all="ignore"):
                    found, _ = frequencies(part.rope, size, uses_long=uses_long)
            except ArithmeticError:
                found = np.array([np.nan])
            if not np.isfinite(found).all():
                raise ConfigError(
                    "config.json: rope_theta and rope_parameters (rope_scaling) give frequencies "
                    f"that are no numbers: {part.rope}"
                )


def source_config(source: Source) -> ModelConfig:
    """The ModelConfig of a folder; where its config.json has no dtype, most tensors say it."""
    hf = source.config
    if not hf_config.has_dtype(hf):
        sizes = {"BF16": 0, "F32": 0}
        for tensor in source.tensors.values():
            sizes["BF16" if tensor.dtype == "BF16" else "F32"] += tensor.num_bytes
        hf = hf | {"dtype": "bfloat16" if sizes["BF16"] > sizes["F32"] else "float32"}
    return model_config(hf)


def tensor_rules(model: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint of this model, with this `config.json`, are."""
    rules: tuple[Rule | Skip, ...] = FAMILIES[model.family].tensor_rules(model, hf)
    return rules
