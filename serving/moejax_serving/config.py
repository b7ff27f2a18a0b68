"""Settings of the engine, checked once."""

import dataclasses
from typing import no_type_check

from moejax.errors import ConfigError

PLANNERS = ("off", "static", "dynamic")
KERNELS = ("auto", "reference", "triton", "gluon", "mosaic")


@no_type_check  # The values come from callers: __post_init__ checks them, and says which is wrong.
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine may use, and how much it takes on at once."""

    dtype: str = "auto"
    """float32 or bfloat16, of weights, activations and KV cache; auto: that of the checkpoint."""
    memory_budget: int | None = None
    """Bytes on the device, for everything. None: 90 % of a GPU; on a CPU the model plus 1 GiB."""
    max_model_len: int | None = None
    """Most tokens of a sequence, prompt and output. None: the model's, if they fit."""
    max_num_seqs: int = 64
    """Sequences that run at the same time; more wait."""
    max_num_batched_tokens: int = 512
    """Prompt tokens that one step may process; longer prompts take several steps."""
    expert_bits: str | int = "auto"
    """The width of all experts; the path of a file of widths; or auto: the widest that fits."""
    linear_bits: str | int = "auto"
    """The width of other linears that are stored as codes; auto: the widest that is stored."""
    planner: str = "off"
    """static: widths of experts by what they cost in accuracy, within `expert_memory`; dynamic:
    the same within all memory, changed while requests run, down to `expert_bits`; off."""
    expert_memory: int | None = None
    """Bytes that planner static may spend on experts: pages of planes and tables."""
    kernel: str = "auto"
    """What multiplies with weights in pages and attends: auto, or one that is taken or refused."""
    seed: int = 0
    """Of requests that bring none of their own."""
    skip_tokenizer_init: bool = False
    """Serve token ids only; the checkpoint needs no tokenizer files."""
    enable_prefix_caching: bool = True
    """Keep the KV of prompts for later ones that begin the same."""
    warm_up: bool = True
    """Compile all programs at the start; otherwise each at its first use."""
    check: bool = False
    """Check the invariants and poison unowned pages after every step. Slow: for tests."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _check_int(name, getattr(self, name), 1)
        for name in ("max_model_len", "memory_budget"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        _check_int("seed", self.seed, 0)
        self._check_widths()
        for name in ("skip_tokenizer_init", "enable_prefix_caching", "warm_up", "check"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")

    def _check_widths(self) -> None:
        for name in ("expert_bits", "linear_bits"):
            value = getattr(self, name)
            if value == "" or isinstance(value, bool) or not isinstance(value, str | int):
                what = ", a width or a file of widths" if name == "expert_bits" else " or a width"
                raise ConfigError(f"{name} must be auto{what}, got {value!r}")
            if isinstance(value, int) and not (2 <= value <= 8 or value == 16):
                raise ConfigError(f"{name} must be a width from 2 to 8, or 16, got {_show(value)}")
        if isinstance(self.linear_bits, str) and self.linear_bits != "auto":
            raise ConfigError(f"linear_bits must be auto or a width, got {self.linear_bits!r}")
        if self.kernel not in KERNELS:
            raise ConfigError(f"kernel must be one of {', '.join(KERNELS)}, got {self.kernel!r}")
        if self.planner not in PLANNERS:
            raise ConfigError(f"planner must be {', '.join(PLANNERS)}, got {self.planner!r}")
        if self.expert_memory is not None:
            _check_int("expert_memory", self.expert_memory, 1)
        if self.planner == "static" and self.expert_memory is None:
            raise ConfigError("planner static needs expert_memory: the bytes that experts may take")
        if self.planner != "static" and self.expert_memory is not None:
            raise ConfigError("expert_memory is for planner static, which is not set")
        if self.planner == "static" and self.expert_bits != "auto":
            raise ConfigError("planner static chooses the widths: leave expert_bits at auto")
        if (
            self.planner == "dynamic"
            and isinstance(self.expert_bits, str)
            and (self.expert_bits != "auto")
        ):
            raise ConfigError("planner dynamic takes expert_bits as the least width, not a file")


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {_show(value)}")


def _show(value: object) -> str:
    # Python refuses to print integers of thousands of digits.
    return "a huge number" if isinstance(value, int) and abs(value) >= 2**63 else repr(value)
