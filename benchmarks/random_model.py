"""Models of published sizes with random weights: as fast as the real ones, without their files."""

import dataclasses
import functools
import hashlib
import math
import zlib
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from published import published_config

from moejax.checkpoint import layout
from moejax.config import ModelConfig, Quantization, segments_of
from moejax.errors import ConfigError
from moejax.models.decoder import abstract_params, flatten_params

MAX_POSITIONS = 8192
STD = 0.02
"""Of every weight and bias. Each layer reads what a norm has brought to unit size and adds values
of the order of one, so that sums over the layers stay small."""
MOST_DRAWN = 4194301
"""Larger tensors repeat their numbers after so many: a prime, so that rows differ."""
_ONES = ("norm.weight", "output_scale", "router.input_scale", "router.expert_scale")


def random_config(name: str, max_positions: int = MAX_POSITIONS) -> ModelConfig:
    """A published size with sequences of at most `max_positions`."""
    config = published_config(name)
    most = min(max_positions, config.max_position_embeddings)
    return dataclasses.replace(config, max_position_embeddings=most)


def with_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The same with the first layers only, for a machine that does not hold all of it.

    Raises ConfigError if it does not have as many.
    """
    if not 1 <= count <= len(config.layers):
        raise ConfigError(f"layers: 1 to {len(config.layers)}, got {count}")
    return dataclasses.replace(config, segments=segments_of(config.layers[:count]))


class RandomCheckpoint:
    """What `build_engine` needs of a checkpoint. All experts have the same numbers."""

    folder = "random weights"
    generation: dict[str, Any] = {"eos_token_ids": []}

    def __init__(self, config: ModelConfig, quantization: Quantization | None = None) -> None:
        self.config = config
        self.quantization = quantization
        self.fingerprint = hashlib.sha256(repr((config, quantization)).encode()).hexdigest()
        self._shapes = flatten_params(abstract_params(config, config.dtype))

    @functools.cached_property
    def _runs(self) -> dict[str, np.ndarray]:
        config, found = self.config, {}
        rng = np.random.default_rng(0)
        itemsize = jnp.dtype(config.dtype).itemsize
        for name, words in layout.expert_words(config, self.quantization).items():
            kind = name.split(".")[1]
            if kind == "plane":
                run = rng.integers(0, 1 << 32, words, np.uint32)
            else:
                dtype = np.float16 if kind == "table" else jnp.dtype(config.dtype)
                size = 2 if kind == "table" else itemsize
                values = rng.standard_normal(words * 4 // size, np.float32)
                run = (values * STD).astype(dtype).view(np.uint32)
            found[name] = np.broadcast_to(run, (config.moe.router.num_experts, words))
        return found

    def dense_names(self) -> tuple[str, ...]:
        return tuple(sorted(self._shapes))

    def read_dense(self, name: str, dtype: str) -> jax.Array:
        shape = self._shapes[name].shape
        if name.endswith(_ONES):
            return jnp.ones(shape, dtype)
        key = jax.random.key(zlib.crc32(name.encode()))
        drawn = jax.random.normal(key, (min(math.prod(shape), MOST_DRAWN),), dtype)
        return jnp.resize(drawn * jnp.asarray(STD, dtype), shape)

    def expert_runs(self, layer: int) -> dict[str, np.ndarray]:
        return self._runs

    def verify_expert(self, layer: int, expert: int, names: Collection[str] | None = None) -> None:
        """There is nothing to be damaged."""

    def linear_names(self) -> tuple[str, ...]:
        """No dense tensor is stored as codes."""
        return ()
