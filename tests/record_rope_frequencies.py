"""Records the rotary frequencies that transformers computes, as tests/data/rope_frequencies.json.

    pip install torch transformers        # in an environment of its own
    python tests/record_rope_frequencies.py

Settings are those of published models; the factors of longrope are made up. Written with
transformers 5.24. Run again only when a case is added.
"""

import json
import pathlib
import types
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

DATA = pathlib.Path(__file__).parent / "data" / "rope_frequencies.json"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 32 for i in range(48)],
    "long_factor": [1 + i * i / 32 for i in range(48)],
    "original_max_position_embeddings": 4096,
    "factor": 32.0,
}
# Name → (rope_parameters, size of a head, longest sequence).
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "gpt-oss": (
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        64,
        131072,
    ),
    "DeepSeek-V3": (
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        64,
        163840,
    ),
    "Qwen3 stretched four times": (
        {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
        128,
        131072,
    ),
    "Llama-4-Scout": (
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        128,
        10485760,
    ),
    "Llama-3.1": (
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        128,
        131072,
    ),
    "longrope, short": (LONGROPE, 96, 4096),
    "longrope, long": (LONGROPE, 96, 4097),
    "Gemma-4, full attention": (
        {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        512,
        262144,
    ),
}


def compute(parameters: dict[str, Any], head_dim: int, length: int) -> dict[str, Any]:
    config = types.SimpleNamespace(
        rope_parameters=parameters,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=length,
        standardize_rope_params=lambda: None,
    )
    function = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    inv_freq, factor = function(config, "cpu", seq_len=length)
    return {
        # Float32 has nine digits at most.
        "inv_freq": [float(f"{value:.9g}") for value in inv_freq.tolist()],
        "attention_factor": factor,
    }


def main() -> None:
    found = {name: compute(*case) for name, case in CASES.items()}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
