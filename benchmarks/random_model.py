"""Models of published shapes with random weights: as fast as the real ones, without their files."""

import dataclasses
import hashlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoint import layout
from moejax.config import (
    Attention,
    LayerKind,
    ModelConfig,
    Moe,
    Rope,
    Router,
    SharedExpert,
    segments_of,
)
from moejax.models.decoder import abstract_params, flatten_params


def qwen1_5_moe_a2_7b() -> ModelConfig:
    """Qwen1.5-MoE-A2.7B: 24 layers of 60 experts, 4 per token, and a shared one."""
    router = Router(num_experts=60, experts_per_token=4, renormalize=False, float32_weights=False)
    attention = Attention(
        num_heads=16,
        num_kv_heads=16,
        head_size=128,
        scale=128**-0.5,
        rope=Rope(theta=1e6),
        qkv_bias=True,
    )
    shared = SharedExpert(width=5632, gated=True)
    kind = LayerKind(
        attention=attention, feed_forward=Moe(router=router, expert_width=1408, shared=shared)
    )
    return ModelConfig(
        family="qwen2_moe",
        vocab_size=151936,
        hidden_size=2048,
        max_position_embeddings=8192,
        norm_epsilon=1e-6,
        tie_embeddings=False,
        dtype="bfloat16",
        segments=segments_of([kind] * 24),
    )


SHAPES = {"qwen1.5-moe-a2.7b": qwen1_5_moe_a2_7b}


def with_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The same with the first layers only, for a machine that does not hold all of it."""
    return dataclasses.replace(config, segments=segments_of(config.layers[:count]))


class RandomCheckpoint:
    """What `build_engine` needs of a checkpoint. All experts have the same numbers."""

    folder = "random weights"
    generation: dict[str, Any] = {"eos_token_ids": []}

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.fingerprint = hashlib.sha256(repr(config).encode()).hexdigest()
        self._shapes = flatten_params(abstract_params(config, config.dtype))
        rng = np.random.default_rng(0)
        itemsize = jnp.dtype(config.dtype).itemsize
        self._runs = {}
        for linear, shape in layout.linear_shapes(config).items():
            words = layout.run_words(shape, config.dtype)
            values = rng.standard_normal(words * 4 // itemsize, np.float32)
            run = (values * 0.02).astype(jnp.dtype(config.dtype)).view(np.uint32)
            self._runs[linear] = np.broadcast_to(run, (config.moe.router.num_experts, words))

    def dense_names(self) -> tuple[str, ...]:
        return tuple(sorted(self._shapes))

    def read_dense(self, name: str, dtype: str) -> jax.Array:
        shape = self._shapes[name].shape
        if name.endswith("norm.weight"):
            return jnp.ones(shape, dtype)
        values = jax.random.normal(jax.random.key(zlib.crc32(name.encode())), shape, dtype)
        return values * jnp.asarray(0.02, dtype)

    def expert_runs(self, layer: int) -> dict[str, np.ndarray]:
        return self._runs

    def verify_expert(self, layer: int, expert: int) -> None:
        """There is nothing to be damaged."""
