"""Settings of the engine, checked once."""

import dataclasses
from typing import Literal

from moejax.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine may use, and how much it takes on at once."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights, activations and KV cache; auto: that of the checkpoint."""
    memory_budget: int | None = None
    """Bytes of device memory for everything. None: 90 % of a GPU; on a CPU the model plus 1 GiB."""
    max_model_len: int | None = None
    """Most tokens of one sequence, prompt and output. None: the model's, if the memory holds them."""
    max_num_seqs: int = 16
    """Sequences that run at the same time; more wait."""
    max_num_batched_tokens: int = 512
    """Prompt tokens that one step may process; longer prompts take several steps."""
    seed: int = 0
    """Of requests that bring none of their own."""
    skip_tokenizer_init: bool = False
    """Serve token ids only; the checkpoint needs no tokenizer files."""
    check: bool = False
    """Check the invariants and poison unowned pages after every step. Slow: for tests."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "memory_budget"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
