"""Configurations of small models: of layers of three kinds, and one like each family."""

from typing import Any

from moejax.config import (
    Attention,
    AttentionTemperature,
    ClampedSwiglu,
    ExpertGroups,
    LayerKind,
    Llama3Scaling,
    LongRopeScaling,
    Mla,
    Mlp,
    MlpAndMoe,
    ModelConfig,
    Moe,
    Rope,
    Router,
    SharedExpert,
    YarnScaling,
    segments_of,
)

# As many as a list of log-probabilities holds: a step's output shows the whole distribution.
VOCAB = 20
HIDDEN, WIDTH = 24, 9
LENGTH = 80
# A dense segment, then one of period two.
ALL_LAYERS = "abcbc"


def make_config(name: str) -> ModelConfig:
    """A family by its name, or layers by their letters."""
    if name in FAMILIES:
        return FAMILIES[name]()
    letters = {"a": _a, "b": _b, "c": _c}
    return _model([letters[letter]() for letter in name])


def _model(layers: list[LayerKind], **options: Any) -> ModelConfig:
    shape: dict[str, Any] = {"family": "small", "norm_epsilon": 1e-6, "dtype": "float32"}
    shape |= {"vocab_size": VOCAB, "hidden_size": HIDDEN, "max_position_embeddings": LENGTH}
    return ModelConfig(
        **shape | {"tie_embeddings": False, "segments": segments_of(layers)} | options
    )


def _attention(**options: Any) -> Attention:
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 6, "scale": 0.4}
    return Attention(**shape | {"rope": Rope(theta=100.0)} | options)


def _router(**options: Any) -> Router:
    shape: dict[str, Any] = {"num_experts": 5, "experts_per_token": 2, "renormalize": True}
    return Router(**shape | {"float32_weights": True} | options)


def _moe(router: Router, **options: Any) -> Moe:
    return Moe(router=router, expert_width=WIDTH, **options)


# Layers by letters: a is dense, b and c have experts; all attend in other ways.


def _a() -> LayerKind:
    return LayerKind(
        attention=_attention(qkv_bias=True, output_bias=True, window=5), feed_forward=Mlp(width=14)
    )


def _b() -> LayerKind:
    return LayerKind(
        attention=_attention(num_kv_heads=1, qk_norm="head"),
        feed_forward=_moe(_router(), shared=SharedExpert(width=10, gated=True)),
    )


def _c() -> LayerKind:
    router = _router(experts_per_token=3, renormalize=False, float32_weights=False)
    return LayerKind(
        attention=_attention(qk_norm="projection", qkv_clip=2.0, window=11),
        feed_forward=_moe(router),
    )


# Families.


def _deepseek() -> ModelConfig:
    """Latent attention, a dense first layer, groups of experts and a bias that chooses."""
    scaling = YarnScaling(
        factor=4.0,
        original_length=20,
        beta_fast=4.0,
        beta_slow=1.0,
        truncate=True,
        magnitude=1.1,
    )
    attention = Mla(
        num_heads=4,
        q_latent_size=12,
        latent_size=10,
        nope_size=6,
        rope_size=4,
        value_size=5,
        scale=0.4,
        rope=Rope(theta=100.0, pairing="neighbors", scaling=scaling),
        latent_norm_epsilon=1e-6,
    )
    router = _router(
        num_experts=8,
        experts_per_token=3,
        score="sigmoid",
        choice_bias=True,
        groups=ExpertGroups(count=4, kept=2, best=2),
        scale=2.5,
        float32_logits=True,
    )
    dense = LayerKind(attention=attention, feed_forward=Mlp(width=14))
    moe = _moe(router, shared=SharedExpert(width=10, gated=False))
    return _model([dense] + [LayerKind(attention=attention, feed_forward=moe)] * 2)


def _gemma() -> ModelConfig:
    """Five sliding layers, then a full one of other heads; an MLP beside the experts."""
    norms: dict[str, Any] = {"qk_norm": "head", "v_norm": True, "scale": 1.0}
    sliding = _attention(**norms, window=11)
    full = _attention(
        **norms,
        num_kv_heads=1,
        head_size=8,
        keys_are_values=True,
        rope=Rope(theta=1000.0, active_pairs=1),
    )
    feed_forward = MlpAndMoe(
        mlp=Mlp(width=14, activation="gelu_tanh"),
        moe=_moe(_router(input_norm=True, expert_scale=True), activation="gelu_tanh"),
    )
    layers = [
        LayerKind(attention=part, feed_forward=feed_forward, post_norms=True, output_scale=True)
        for part in [sliding] * 5 + [full]
    ]
    return _model(
        layers,
        norm="rms_float32",
        embedding_scale=HIDDEN**0.5,
        logit_softcap=3.0,
        tie_embeddings=True,
    )


def _gpt_oss() -> ModelConfig:
    """Sinks, biases everywhere, every other layer with a window."""
    scaling = YarnScaling(
        factor=4.0,
        original_length=20,
        beta_fast=4.0,
        beta_slow=1.0,
        truncate=False,
        magnitude=1.14,
    )
    options: dict[str, Any] = {"sinks": True, "qkv_bias": True, "output_bias": True}
    options |= {"rope": Rope(theta=100.0, scaling=scaling)}
    feed_forward = _moe(
        _router(bias=True), activation=ClampedSwiglu(limit=1.0, alpha=1.702), expert_bias=True
    )
    layers = [
        LayerKind(attention=_attention(**options, window=window), feed_forward=feed_forward)
        for window in (7, None)
    ]
    return _model(layers * 2, norm="rms_float32")


def _llama4() -> ModelConfig:
    """Chunks that begin within blocks; layers without positions, sharper further back."""
    scaling = Llama3Scaling(
        factor=4.0, low_frequency_factor=1.0, high_frequency_factor=1.0, original_length=20
    )
    chunked = _attention(
        chunk=12,
        qk_norm="rotated",
        rope=Rope(theta=100.0, pairing="neighbors", scaling=scaling),
    )
    full = _attention(rope=None, temperature=AttentionTemperature(scale=0.5, floor=8.0))
    feed_forward = _moe(
        _router(experts_per_token=1, score="sigmoid", renormalize=False),
        weights_input=True,
        shared=SharedExpert(width=10, gated=False),
    )
    layers = [LayerKind(attention=part, feed_forward=feed_forward) for part in (chunked, full)]
    return _model(layers * 2)


def _phi() -> ModelConfig:
    """Longrope, layer norms, SparseMixer, a bias on the head."""
    scaling = LongRopeScaling(
        short_factors=(1.0, 1.2, 1.5),
        long_factors=(2.0, 4.0, 8.0),
        short_magnitude=1.1,
        long_magnitude=1.3,
        original_length=32,
    )
    attention = _attention(rope=Rope(theta=100.0, scaling=scaling), qkv_bias=True, output_bias=True)
    router = _router(score="sparsemixer", renormalize=False, jitter=0.1)
    layer = LayerKind(attention=attention, feed_forward=_moe(router))
    return _model([layer] * 2, norm="layer", head_bias=True)


FAMILIES = {
    "deepseek": _deepseek,
    "gemma": _gemma,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "phi": _phi,
}
