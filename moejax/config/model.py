"""What a model is made of: parts, and the order of its layers.

A `ModelConfig` is neutral: it knows no checkpoint's spelling. The converters read a Hugging Face
`config.json` into it, `moejax.json` stores it, and the decoder is built from it. Layers that have
the same parts have the same `LayerKind`; a `Segment` is a period of kinds that repeats, and is
what the decoder scans over.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

import pydantic

from moejax.config.attention import AnyAttention
from moejax.config.feed_forward import FeedForward, MlpAndMoe, Moe
from moejax.config.rope import LongRopeScaling
from moejax.config.values import MAX_LAYERS, STRICT, Dtype, Positive, PositiveFloat
from moejax.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """The parts of one layer: x += attention(norm(x)), then x += feed_forward(norm(x))."""

    __pydantic_config__ = STRICT
    attention: AnyAttention
    feed_forward: FeedForward
    post_norms: bool = False
    """What attention and feed-forward add is normed too."""
    output_scale: bool = False
    """The layer's result is multiplied by a learned number."""

    @property
    def moe(self) -> Moe | None:
        """The routed experts, if there are any."""
        part = self.feed_forward
        if isinstance(part, MlpAndMoe):
            return part.moe
        return part if isinstance(part, Moe) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`period` repeated: layer `repeat * len(period) + i` of the segment is `period[i]`."""

    __pydantic_config__ = STRICT
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

    __pydantic_config__ = STRICT
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
    norm: Literal["rms", "rms_float32", "layer"] = "rms"
    """Of layers and at the end: RMS norm, rounded before or after the weight multiplies it, or
    layer norm with a bias."""
    embedding_scale: PositiveFloat | None = None
    """Factor on the embeddings, rounded to the dtype of the weights."""
    head_bias: bool = False
    logit_softcap: PositiveFloat | None = None
    """c: logits are c * tanh(logits / c)."""

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
        if len(self._original_lengths()) > 1:
            raise ConfigError(f"{self.family}: longrope with several original lengths")
        if self.head_bias and self.tie_embeddings:
            raise ConfigError(
                f"{self.family}: tied embeddings have no head of their own, and so no bias"
            )

    def _original_lengths(self) -> set[int]:
        scalings = [kind.attention.rope and kind.attention.rope.scaling for kind in self.layers]
        return {s.original_length for s in scalings if isinstance(s, LongRopeScaling)}

    @property
    def long_rope_after(self) -> int | None:
        """A sequence that may come to more tokens takes the long factors of longrope; None: none
        does."""
        return next(iter(self._original_lengths()), None)

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        return tuple(kind for segment in self.segments for kind in segment.period * segment.repeats)

    @property
    def moe_layers(self) -> dict[int, Moe]:
        """Layer number → its routed experts, for the layers that have them."""
        return {n: kind.moe for n, kind in enumerate(self.layers) if kind.moe is not None}

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
