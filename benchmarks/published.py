"""Published sizes: `published/NAME.json` has what decides shapes and computation in the config.json
on the Hugging Face hub, in its spelling.

Left out is what concerns training, special tokens and how the hub stores weights (FP8, MXFP4), and
what parts for images or sound would need. Where the hub leaves out a key that matters, the default
of the class in transformers stands (`torch_dtype` and `swiglu_alpha` of gpt-oss, temperature and
NoPE layers of Llama 4, `qkv_bias` of Qwen2-MoE).

Not confirmed from the hub: the mscale of DeepSeek-V2, for which copies have 0.707 and 1.0, the most
positions of Qwen2-57B-A14B and of DeepSeek-V2, and that the head of Phi-3.5-MoE has a bias, which
alone of these counts as parameters. The factors of Phi-3.5-MoE's longrope are placeholders of the
right number: 1 for short sequences, 32 for long ones.
"""

import json
import pathlib

from moejax.config import ModelConfig
from moejax.errors import ConfigError
from moejax_converters.families import model_config

FOLDER = pathlib.Path(__file__).parent / "published"


def names() -> tuple[str, ...]:
    """The names of all sizes, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def published_name(name: str) -> str:
    """The name as it is spelled here; upper and lower case do not count. Raises ConfigError."""
    for known in names():
        if known.lower() == name.lower():
            return known
    raise ConfigError(f"'{name}' is not a published size that is known: {', '.join(names())}")


def published_config(name: str) -> ModelConfig:
    """The configuration of a published size. Raises ConfigError for an unknown name."""
    path = FOLDER / f"{published_name(name)}.json"
    return model_config(json.loads(path.read_text(encoding="utf-8")))
