"""What a model is made of, and the values that its configuration may have."""

from moejax.config.attention import (
    AnyAttention,
    Attention,
    AttentionTemperature,
    Mla,
    Reach,
)
from moejax.config.feed_forward import (
    Activation,
    ClampedSwiglu,
    ExpertGroups,
    FeedForward,
    Mlp,
    MlpAndMoe,
    Moe,
    Router,
    SharedExpert,
)
from moejax.config.model import (
    LayerKind,
    LayerPlace,
    ModelConfig,
    Segment,
    config_from_json,
    config_to_json,
    segments_of,
)
from moejax.config.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from moejax.config.values import MAX_FLOAT, MAX_INTEGER, MAX_LAYERS, Dtype

__all__ = [
    "MAX_FLOAT",
    "MAX_INTEGER",
    "MAX_LAYERS",
    "Activation",
    "AnyAttention",
    "Attention",
    "AttentionTemperature",
    "ClampedSwiglu",
    "Dtype",
    "ExpertGroups",
    "FeedForward",
    "LayerKind",
    "LayerPlace",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mla",
    "Mlp",
    "MlpAndMoe",
    "ModelConfig",
    "Moe",
    "Reach",
    "Rope",
    "RopeScaling",
    "Router",
    "Segment",
    "SharedExpert",
    "YarnScaling",
    "config_from_json",
    "config_to_json",
    "segments_of",
]
