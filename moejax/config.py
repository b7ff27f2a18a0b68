"""What a model is made of: parts, and the order of its layers.

A `ModelConfig` is neutral: it knows no checkpoint's spelling. The converters read a Hugging Face
`config.json` into it, `moejax.json` stores it, and the decoder is built from it. Layers that have
the same parts have the same `LayerKind`; a `Segment` is a period of kinds that repeats, and is
what the decoder scans over.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic

from moejax.errors import ConfigError

MAX_INTEGER = 2**31 - 1
"""Sizes, counts and windows are int32 on a device."""
MAX_FLOAT = 1e38
"""Numbers are float32 on a device."""
MAX_LAYERS = 4096
"""More than a decoder is scanned over; a configuration that says so is damaged."""

Positive = Annotated[int, pydantic.Field(gt=0, le=MAX_INTEGER)]
PositiveFloat = Annotated[float, pydantic.Field(gt=0, le=MAX_FLOAT, allow_inf_nan=False)]
Dtype = Literal["bfloat16", "float32"]
Activation = Literal["silu"]

# moejax.json is written by us: a key that we do not know means a newer or a damaged file.
_STRICT: Any = {"extra": "forbid"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions over the whole head: dimension i turns with dimension i + head_size / 2."""

    __pydantic_config__ = _STRICT
    theta: PositiveFloat


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention. One layer caches `2 * num_kv_heads * head_size` values per token."""

    __pydantic_config__ = _STRICT
    num_heads: Positive
    num_kv_heads: Positive
    head_size: Positive
    scale: PositiveFloat
    """Factor on the scores before the softmax."""
    rope: Rope
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMS norm of q and k before the rotation: per head, or over the whole projection."""
    qkv_clip: PositiveFloat | None = None
    """q, k and v are clamped to [-qkv_clip, qkv_clip] after the norm."""
    window: Positive | None = None
    """A token sees this many tokens, itself included; None: all before it."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads"
            )
        if self.head_size % 2:
            raise ConfigError(f"head size {self.head_size} is odd: rotary positions need pairs")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A gated MLP: down(activation(gate x) * up x)."""

    __pydantic_config__ = _STRICT
    kind: Literal["mlp"] = "mlp"
    width: Positive
    activation: Activation = "silu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Softmax over all experts in float32, then the `experts_per_token` largest."""

    __pydantic_config__ = _STRICT
    num_experts: Positive
    experts_per_token: Positive
    renormalize: bool
    """Divide the chosen weights by their sum."""
    float32_weights: bool
    """Keep the weights in float32 for the combination, rather than in the model's dtype."""

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{self.experts_per_token} experts per token of {self.num_experts} experts"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An MLP that every token passes; `gated`: times sigmoid of a learned projection."""

    __pydantic_config__ = _STRICT
    width: Positive
    gated: bool
    activation: Activation = "silu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts of `expert_width`, each a gated MLP, and perhaps a shared expert."""

    __pydantic_config__ = _STRICT
    kind: Literal["moe"] = "moe"
    router: Router
    expert_width: Positive
    activation: Activation = "silu"
    shared: SharedExpert | None = None


FeedForward = Annotated[Mlp | Moe, pydantic.Field(discriminator="kind")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """The parts of one layer: x += attention(norm(x)), then x += feed_forward(norm(x))."""

    __pydantic_config__ = _STRICT
    attention: Attention
    feed_forward: FeedForward


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`period` repeated: layer `repeat * len(period) + i` of the segment is `period[i]`."""

    __pydantic_config__ = _STRICT
    period: tuple[LayerKind, ...]
    repeats: Positive

    def __post_init__(self) -> None:
        if not self.period:
            raise ConfigError("a segment needs at least one kind of layer")

    @property
    def num_layers(self) -> int:
        return len(self.period) * self.repeats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """Where a layer stands: `segments[segment].period[index]`, in round `repeat`."""

    segment: int
    index: int
    repeat: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only Mixture-of-Experts model."""

    __pydantic_config__ = _STRICT
    family: str
    """The `model_type` of the checkpoint that it was converted from."""
    vocab_size: Positive
    hidden_size: Positive
    max_position_embeddings: Positive
    norm_epsilon: PositiveFloat
    tie_embeddings: bool
    dtype: Dtype
    """Of the checkpoint; an engine may compute in another."""
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        # Before anything lists the layers.
        num_layers = sum(segment.num_layers for segment in self.segments)
        if num_layers > MAX_LAYERS:
            raise ConfigError(f"{self.family}: {num_layers} layers, at most {MAX_LAYERS} are read")
        if not self.moe_layers:
            raise ConfigError(f"{self.family}: no layer has routed experts")
        shapes = {(kind.router.num_experts, kind.expert_width) for kind in self.moe_layers.values()}
        if len(shapes) > 1:
            raise ConfigError(f"{self.family}: layers with different experts, {sorted(shapes)}")

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        return tuple(kind for segment in self.segments for kind in segment.period * segment.repeats)

    @property
    def moe_layers(self) -> dict[int, Moe]:
        """Layer number → its routed experts, for the layers that have them."""
        return {
            n: kind.feed_forward
            for n, kind in enumerate(self.layers)
            if isinstance(kind.feed_forward, Moe)
        }

    @property
    def moe(self) -> Moe:
        """The routed experts, which have the same shapes in all layers."""
        return next(iter(self.moe_layers.values()))

    @property
    def places(self) -> tuple[LayerPlace, ...]:
        """The place of every layer, in order."""
        return tuple(
            LayerPlace(segment=s, index=i, repeat=repeat)
            for s, segment in enumerate(self.segments)
            for repeat in range(segment.repeats)
            for i in range(len(segment.period))
        )


def segments_of(layers: Sequence[LayerKind]) -> tuple[Segment, ...]:
    """Cuts a list of layers into few segments: the longest repetition first, from the left.

    >>> dense dense moe moe moe → (dense) x 2, (moe) x 3;  a b a b → (a b) x 2
    """
    segments = []
    at = 0
    while at < len(layers):
        best = Segment(period=(layers[at],), repeats=1)
        for size in range(1, (len(layers) - at) // 2 + 1):
            period = tuple(layers[at : at + size])
            repeats = 1
            while tuple(layers[at + repeats * size : at + (repeats + 1) * size]) == period:
                repeats += 1
            if repeats > 1 and size * repeats > best.num_layers:
                best = Segment(period=period, repeats=repeats)
        segments.append(best)
        at += best.num_layers
    return tuple(segments)


_MODEL_CONFIG = pydantic.TypeAdapter(ModelConfig)


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """A ModelConfig as plain JSON values."""
    data: dict[str, Any] = _MODEL_CONFIG.dump_python(config, mode="json")
    return data


def config_from_json(data: Any) -> ModelConfig:
    """The ModelConfig of `config_to_json`. Raises ConfigError, naming the field at fault."""
    try:
        return _MODEL_CONFIG.validate_json(json.dumps(data), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"model configuration: {where}: {first['msg']}") from error
