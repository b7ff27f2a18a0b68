"""What tokens attend to, and how."""

import dataclasses
from typing import Annotated, Any, Literal

import pydantic

from moejax.config.rope import Rope, check_rope
from moejax.config.values import STRICT, Positive, PositiveFloat
from moejax.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far back a token sees."""

    window: int | None = None
    """This many tokens, itself included."""
    chunk: int | None = None
    """The tokens of its own chunk of this many positions."""

    def oldest(self, position: Any) -> Any:
        """The first position that a token at `position` (a number or an array) sees.

        It may be negative: before the first token of a sequence.
        """
        if self.window is not None:
            return position - (self.window - 1)
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return position * 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTemperature:
    """Queries are multiplied by 1 + scale * ln(1 + floor((position + 1) / floor)) (Llama 4)."""

    __pydantic_config__ = STRICT
    scale: PositiveFloat
    floor: PositiveFloat


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention. One layer caches `2 * num_kv_heads * head_size` values per token."""

    __pydantic_config__ = STRICT
    kind: Literal["gqa"] = "gqa"
    num_heads: Positive
    num_kv_heads: Positive
    head_size: Positive
    scale: PositiveFloat
    """Factor on the scores before the softmax."""
    rope: Rope | None
    """None: tokens do not know their positions in this layer (NoPE)."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "projection", "rotated"] = "none"
    """RMS norm of q and k: per head or over the whole projection, both with weights and before the
    rotation; `rotated`: per head, without weights and after it."""
    v_norm: bool = False
    """RMS norm of v per head, without weights."""
    keys_are_values: bool = False
    """v is the projection of k, before that is normed and rotated."""
    qkv_clip: PositiveFloat | None = None
    """q, k and v are clamped to [-qkv_clip, qkv_clip] after the norm."""
    window: Positive | None = None
    """A token sees this many tokens, itself included; None: all before it."""
    chunk: Positive | None = None
    """A token sees those of its own chunk of so many positions; None: no chunks."""
    temperature: AttentionTemperature | None = None
    sinks: bool = False
    """A learned score per head joins the softmax, and its share is lost."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads"
            )
        if self.window is not None and self.chunk is not None:
            raise ConfigError("attention has a window or chunks, not both")
        check_rope(self.rope, self.head_size)

    @property
    def reach(self) -> Reach:
        return Reach(window=self.window, chunk=self.chunk)

    @property
    def cached_values(self) -> int:
        """Values that one token of one layer keeps: its keys, then its values."""
        return 2 * self.num_kv_heads * self.head_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    One layer caches `latent_size + rope_size` values per token, whatever the number of heads: the
    latent, from which keys and values of all heads come, and one rotated key that they share.
    """

    __pydantic_config__ = STRICT
    kind: Literal["mla"] = "mla"
    num_heads: Positive
    q_latent_size: Positive | None
    """Queries come through a latent of their own; None: straight from the hidden state."""
    latent_size: Positive
    nope_size: Positive
    """Dimensions of a head's query and key without positions."""
    rope_size: Positive
    value_size: Positive
    scale: PositiveFloat
    """Factor on the scores before the softmax."""
    rope: Rope
    latent_norm_epsilon: PositiveFloat
    bias: bool = False
    """On the projections to the latents and on that of the output."""

    def __post_init__(self) -> None:
        check_rope(self.rope, self.rope_size)
        if self.cached_values % 2:
            raise ConfigError(f"a latent of {self.latent_size} values is odd")

    @property
    def reach(self) -> Reach:
        return Reach()

    @property
    def cached_values(self) -> int:
        """Values that one token of one layer keeps."""
        return self.latent_size + self.rope_size


def _attention_kind(value: Any) -> str:
    """Which kind of attention a value is. Configurations from before there were two do not say."""
    kind = value.get("kind", "gqa") if isinstance(value, dict) else getattr(value, "kind", "gqa")
    return str(kind)


AnyAttention = Annotated[
    Annotated[Attention, pydantic.Tag("gqa")] | Annotated[Mla, pydantic.Tag("mla")],
    pydantic.Discriminator(_attention_kind),
]
