"""The families that can be converted, by the `model_type` of their `config.json`."""

from types import ModuleType
from typing import Any

from moejax import config
from moejax.config import ModelConfig
from moejax.errors import ConfigError
from moejax_converters import mixtral, olmoe, qwen2_moe, qwen3_moe
from moejax_converters.rules import Rule, Skip
from moejax_converters.source import Source

FAMILIES: dict[str, ModuleType] = {
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
}


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`. Raises ConfigError for what is not supported."""
    model_type = str(hf.get("model_type"))
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model type '{model_type}' is not supported (supported: {', '.join(sorted(FAMILIES))})"
        )
    read: ModelConfig = FAMILIES[model_type].model_config(hf)
    # What is written must be readable: this checks the values that no family looks at.
    return config.config_from_json(config.config_to_json(read))


def source_config(source: Source) -> ModelConfig:
    """The ModelConfig of a folder; where its config.json has no dtype, most tensors say it."""
    hf = source.config
    if hf.get("dtype") is None and hf.get("torch_dtype") is None:
        sizes = {"BF16": 0, "F32": 0}
        for tensor in source.tensors.values():
            sizes["BF16" if tensor.dtype == "BF16" else "F32"] += tensor.num_bytes
        hf = hf | {"dtype": "bfloat16" if sizes["BF16"] > sizes["F32"] else "float32"}
    return model_config(hf)


def tensor_rules(model: ModelConfig) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint of this model are."""
    rules: tuple[Rule | Skip, ...] = FAMILIES[model.family].tensor_rules(model)
    return rules
