"""Small models as checkpoints to calibrate, and their programs, counted."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.small_configs import VOCAB, make_config
from moejax.arena import format
from moejax.checkpoint import Checkpoint, CheckpointWriter
from moejax.config import ModelConfig, segments_of
from moejax.layers.experts import Stacked
from moejax.models import fisher_steps
from moejax.models.decoder import Params, abstract_params, flatten_params

ROWS, LENGTH = 3, 40


def quick_programs() -> Iterator[None]:
    """A fixture: these programs are small, and compiling takes longer than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class Model(NamedTuple):
    config: ModelConfig
    params: Params
    stacked: dict[int, Stacked]


@functools.cache
def make_model(name: str, *layers: int) -> Model:
    """Some layers of a small model, of random weights that keep the size of what passes."""
    config = make_config(name)
    if layers:
        kinds = [config.layers[layer] for layer in layers]
        config = dataclasses.replace(config, segments=segments_of(kinds))
    rng = np.random.default_rng(0)

    def normal(shape: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)

    params = jax.tree.map(lambda a: normal(a.shape, a.dtype), abstract_params(config, "float32"))
    experts, width = config.moe.router.num_experts, config.moe.expert_width
    stacked = {
        layer: Stacked(
            normal((experts, 2, width, config.hidden_size)),
            normal((experts, config.hidden_size, width)),
        )
        for layer in config.moe_layers
    }
    return Model(config, params, stacked)


def write(model: Model, folder: pathlib.Path) -> Checkpoint:
    writer = CheckpointWriter(folder, model.config)
    for name, leaf in flatten_params(model.params).items():
        writer.put_dense(name, np.asarray(leaf))
    for layer, experts in model.stacked.items():
        with writer.expert_file(layer) as file:
            for e in range(experts.num_experts):
                gate, up = np.asarray(experts.gate_up[e])
                file.put(e, "gate_up", format.stack_halves(gate, up))
                file.put(e, "down", np.asarray(experts.down[e]))
    writer.finish({"eos_token_ids": []})
    return Checkpoint.open(folder)


def random_sequences(rows: int = ROWS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, LENGTH)).astype(np.int32)


def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A fixture: two layers of one kind."""
    return write(make_model("bb"), tmp_path_factory.mktemp("fisher") / "model")


PROGRAMS = ("embed", "forward", "start_backward", "backward")


class Interrupted(Exception):
    pass


class Calls:
    """Counts the runs of programs, and fails at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fails_at = 0, -1
        for name in PROGRAMS:
            monkeypatch.setattr(fisher_steps, name, self._counted(getattr(fisher_steps, name)))

    def _counted(self, program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if self.count == self.fails_at:
                raise Interrupted
            self.count += 1
            return program(*arguments, **options)

        return run

    def start(self, fails_at: int = -1) -> None:
        self.count, self.fails_at = 0, fails_at
