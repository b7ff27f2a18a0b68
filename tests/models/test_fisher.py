"""F of every layer against gradients of the whole model, restarts, refusals, and memory."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from models.small_configs import VOCAB, make_config
from moejax.arena import format
from moejax.checkpoint import Checkpoint, CheckpointWriter
from moejax.config import ModelConfig, Quantization, segments_of
from moejax.errors import CheckpointError, ConfigError
from moejax.layers import moe
from moejax.layers.experts import Stacked
from moejax.models import fisher_steps, fisher_weights, whole
from moejax.models.decoder import Params, abstract_params, bind, flatten_params
from moejax.models.fisher import LayerFisher, layer_fishers, with_prior

ROWS, LENGTH = 3, 40
# These programs are small and run a few times: compiling takes longer than running them.
QUICK = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module", autouse=True)
def quick_programs() -> Iterator[None]:
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


def loss(stacked: dict[int, Stacked], params: Params, tokens: jax.Array, config: Any) -> jax.Array:
    """The sum of -log p over the predictions of one sequence."""
    logits = whole.forward(params, stacked, tokens[None], config=config, dtype="float32")[0]
    logprobs = jax.nn.log_softmax(logits[:-1])
    return -jnp.sum(jnp.take_along_axis(logprobs, tokens[1:, None], axis=1))


jit_loss = jax.jit(loss, static_argnames="config", compiler_options=QUICK)
jit_gradients = jax.jit(
    jax.grad(loss, argnums=(0, 1)), static_argnames="config", compiler_options=QUICK
)


def by_gradients(model: Model, sequences: np.ndarray) -> tuple[dict[int, Stacked], dict[str, Any]]:
    """F of the experts of each layer, and of the dense weights by name, stacked as they are."""
    total: Any = None
    for row in sequences:
        found = jit_gradients(model.stacked, model.params, jnp.asarray(row), config=model.config)
        squares = jax.tree.map(lambda g: np.asarray(g, np.float64) ** 2, found)
        total = squares if total is None else jax.tree.map(np.add, total, squares)
    count = len(sequences) * (sequences.shape[1] - 1)
    experts, params = jax.tree.map(lambda s: s / count, total)
    return experts, flatten_params(params)


def assert_near(found: Any, wanted: np.ndarray) -> None:
    found = np.asarray(found)
    assert found.dtype == np.float32 and found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6 * wanted.max())


# What F is.

FAMILIES = {
    # Latent attention, groups of experts, and first a layer without experts.
    "deepseek": ("deepseek", 0, 1),
    # An MLP beside experts; the router reads the residual.
    "gemma": ("gemma", 5),
    "gpt-oss": ("gpt-oss", 0),
    "llama4": ("llama4", 0),
    "phi": ("phi", 0),
    "one with a gated shared expert": ("b",),
}


QUICK_FAMILIES = ("deepseek", "gemma")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK_FAMILIES else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_fisher_is_the_mean_of_squared_gradients(name: str, tmp_path: pathlib.Path) -> None:
    model = make_model(*FAMILIES[name])
    sequences = random_sequences()
    found = list(
        layer_fishers(
            write(model, tmp_path / "model"), sequences, folder=tmp_path / "states", linears=True
        )
    )
    assert [fisher.layer for fisher in found] == list(range(len(model.config.layers)))[::-1]
    experts, dense = by_gradients(model, sequences)
    for fisher in found:
        if fisher.layer in experts:
            assert_near(fisher.gate_up, experts[fisher.layer].gate_up)
            assert_near(fisher.down, experts[fisher.layer].down)
        else:
            assert len(fisher.gate_up) == len(fisher.down) == len(fisher.tokens) == 0
        place = model.config.places[fisher.layer]
        for linear, values in fisher.linears.items():
            stacked = dense[f"segments.{place.segment}.{place.index}.{linear}"]
            assert_near(values, stacked[place.repeat])


def test_linears_are_the_matrices_of_attention_and_shared_experts(tmp_path: pathlib.Path) -> None:
    given = write(make_model(*FAMILIES["deepseek"]), tmp_path / "model"), random_sequences(rows=1)
    found = list(layer_fishers(*given, folder=tmp_path / "all", linears=True))
    attention = {f"attention.{name}.weight" for name in ("q_down", "q_up", "kv_down", "o")}
    shared = {f"feed_forward.shared.{name}.weight" for name in ("gate", "up", "down")}
    assert [set(fisher.linears) for fisher in found] == [attention | shared, attention]


def test_layers_without_experts_are_passed_through(calls: "Calls", tmp_path: pathlib.Path) -> None:
    given = write(make_model("abcbc", 0, 1, 0, 1), tmp_path / "model"), random_sequences(rows=1)
    found = list(layer_fishers(*given, folder=tmp_path / "states"))
    assert [(fisher.layer, fisher.linears) for fisher in found] == [(3, {}), (1, {})]
    assert all(np.asarray(fisher.gate_up).any() for fisher in found)
    # Forward through four layers, back through three.
    assert calls.count == 1 + 4 + 1 + 3


def test_fisher_is_made_of_finite_differences(
    checkpoint: Checkpoint, tmp_path: pathlib.Path
) -> None:
    model, sequences = make_model("bb"), random_sequences()
    (_, fisher) = layer_fishers(checkpoint, sequences, folder=tmp_path)
    weights = np.asarray(model.stacked[0].down)
    # Of the weight that matters most: a small slope would be lost in rounding.
    at = np.unravel_index(np.argmax(fisher.down), weights.shape)
    losses = []
    for shift in (1e-2, -1e-2):
        moved = weights.copy()
        moved[at] += shift
        stacked = model.stacked | {0: Stacked(model.stacked[0].gate_up, jnp.asarray(moved))}
        losses.append(
            [
                float(jit_loss(stacked, model.params, jnp.asarray(row), config=model.config))
                for row in sequences
            ]
        )
    slopes = (np.array(losses[0]) - losses[1]) / 2e-2
    assert np.asarray(fisher.down)[at] == pytest.approx(
        (slopes**2).sum() / (ROWS * (LENGTH - 1)), rel=0.03
    )


@pytest.mark.parametrize(("name", "layers"), [("bb", ()), ("gemma", (5,))])
def test_tokens_are_those_that_the_router_sends(
    name: str, layers: tuple[int, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sequences = make_model(name, *layers), random_sequences()
    found = layer_fishers(write(model, tmp_path / "model"), sequences, folder=tmp_path / "states")
    counted = {fisher.layer: fisher.tokens.tolist() for fisher in found}
    chosen: list[np.ndarray] = []
    run = moe.run_experts

    def watched(x: Any, topk_ids: jax.Array, *rest: Any, **options: Any) -> jax.Array:
        jax.debug.callback(lambda ids: chosen.append(np.asarray(ids)), topk_ids, ordered=True)
        return run(x, topk_ids, *rest, **options)

    monkeypatch.setattr(moe, "run_experts", watched)
    whole.forward(
        model.params, model.stacked, jnp.asarray(sequences), config=model.config, dtype="float32"
    )
    jax.effects_barrier()
    experts = model.config.moe.router.num_experts
    assert counted == {
        layer: np.bincount(ids.reshape(-1), minlength=experts).tolist()
        for layer, ids in zip(model.config.moe_layers, chosen, strict=True)
    }


def test_the_loss_of_several_tiles_of_places() -> None:
    model = make_model("phi", 0)
    config, length = model.config, 300
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((length, config.hidden_size), np.float32))
    tokens = jnp.asarray(rng.integers(0, VOCAB, length), jnp.int32)
    ends = {name: part for name, part in model.params.items() if name != "segments"}

    def at_once(x: jax.Array) -> jax.Array:
        decoder = bind(config, "float32", model.params)
        logprobs = jax.nn.log_softmax(decoder.logits(decoder.norm(x))[:-1])
        return -jnp.sum(jnp.take_along_axis(logprobs, tokens[1:, None], axis=1))

    wanted, slope = jax.value_and_grad(at_once)(x)
    found, total = fisher_steps.start_backward(ends, x, tokens, config=config, dtype="float32")
    np.testing.assert_allclose(total, wanted, rtol=1e-6)
    np.testing.assert_allclose(found, slope, atol=1e-6)
    assert (np.asarray(found[-1]) == 0).all() and (np.asarray(found[:-1]) != 0).any(axis=1).all()


def test_bfloat16_is_close_to_float32(checkpoint: Checkpoint, tmp_path: pathlib.Path) -> None:
    sequences = random_sequences()
    wide = list(layer_fishers(checkpoint, sequences, folder=tmp_path / "wide"))
    narrow = list(
        layer_fishers(checkpoint, sequences, folder=tmp_path / "narrow", dtype="bfloat16")
    )
    sizes = [(tmp_path / n / "inputs.1").stat().st_size for n in ("wide", "narrow")]
    assert sizes[0] == 2 * sizes[1]
    for found, wanted in zip(narrow, wide, strict=True):
        for a, b in ((found.gate_up, wanted.gate_up), (found.down, wanted.down)):
            a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
            assert a @ b > 0.99 * np.sqrt((a @ a) * (b @ b))
            assert a.sum() == pytest.approx(b.sum(), rel=0.1)


# Restarts.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two layers of one kind."""
    return write(make_model("bb"), tmp_path_factory.mktemp("fisher") / "model")


@pytest.fixture
def cached_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights are read once: each of many runs would read them."""
    monkeypatch.setattr(fisher_weights, "_read_dense", functools.cache(fisher_weights._read_dense))


def as_bytes(fisher: LayerFisher) -> tuple[Any, ...]:
    parts = (fisher.gate_up, fisher.down, fisher.tokens, *fisher.linears.values())
    return fisher.layer, *(np.asarray(part).tobytes() for part in parts)


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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, cached_weights: None) -> Calls:
    return Calls(monkeypatch)


def test_a_restart_goes_on_after_any_program(
    checkpoint: Checkpoint, calls: Calls, tmp_path: pathlib.Path
) -> None:
    sequences = random_sequences(rows=2)

    def run(folder: str) -> Iterator[tuple[Any, ...]]:
        return map(
            as_bytes, layer_fishers(checkpoint, sequences, folder=tmp_path / folder, linears=True)
        )

    wanted = list(run("whole"))
    # Embedding, two layers, the head, two layers back, each for two sequences.
    assert calls.count == 12 and [part[0] for part in wanted] == [1, 0]
    for number in range(12):
        found = []
        calls.start(fails_at=number)
        with pytest.raises(Interrupted):
            for part in run(str(number)):
                found.append(part)
        calls.start()
        found += run(str(number))
        assert found == wanted
        # Of what was complete, nothing is repeated.
        assert calls.count == 12 - number // 2 * 2
        calls.start()
        assert list(run(str(number))) == [] and calls.count == 0


def test_a_layer_is_given_again_unless_the_next_was_asked_for(
    checkpoint: Checkpoint, calls: Calls, tmp_path: pathlib.Path
) -> None:
    given = checkpoint, random_sequences(rows=2)
    first = [as_bytes(next(layer_fishers(*given, folder=tmp_path))) for _ in range(3)]
    assert first[0] == first[1] == first[2] and first[0][0] == 1
    both = layer_fishers(*given, folder=tmp_path)
    assert [as_bytes(next(both))[0] for _ in range(2)] == [1, 0]
    both.close()
    calls.start()
    assert [fisher.layer for fisher in layer_fishers(*given, folder=tmp_path)] == [0]
    assert calls.count == 2


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _lengthen(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(4))


def _change(**fields: Any) -> Callable[[pathlib.Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | fields)) and None


STATE = "calibration.json"
DAMAGES: dict[str, tuple[str, Callable[[pathlib.Path], None]]] = {
    "a flipped bit of an input": ("inputs.0", _flip),
    "a flipped bit of the cotangents": ("cotangents.0", _flip),
    "a short file": ("inputs.0", _truncate),
    "a long file": ("inputs.0", _lengthen),
    "an empty file": ("inputs.0", lambda path: path.write_bytes(b"") and None),
    "no file": ("cotangents.0", lambda path: path.unlink()),
    "no state": (STATE, lambda path: path.unlink()),
    "no JSON": (STATE, _truncate),
    "another key": (STATE, _change(key="")),
    "another field": (STATE, _change(more=1)),
    "steps that are no number": (STATE, _change(steps="1")),
    "more steps than there are": (STATE, _change(steps=9)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_not_gone_on_with(
    damage: str, checkpoint: Checkpoint, calls: Calls, tmp_path: pathlib.Path
) -> None:
    given = checkpoint, random_sequences(rows=2)
    wanted = [as_bytes(fisher) for fisher in layer_fishers(*given, folder=tmp_path / "whole")]
    started = layer_fishers(*given, folder=tmp_path / "states")
    assert [next(started).layer for _ in range(2)] == [1, 0]
    started.close()
    name, change = DAMAGES[damage]
    change(tmp_path / "states" / name)
    calls.start()
    found = [as_bytes(fisher) for fisher in layer_fishers(*given, folder=tmp_path / "states")]
    assert found == wanted and calls.count == 12


@pytest.mark.parametrize("what", ["sequences", "linears", "dtype", "checkpoint"])
def test_the_state_of_another_calibration_is_not_gone_on_with(
    what: str, checkpoint: Checkpoint, cached_weights: None, tmp_path: pathlib.Path
) -> None:
    options: dict[str, Any] = {"sequences": random_sequences(rows=2)}
    other = dict(options)
    if what == "sequences":
        other["sequences"] = random_sequences(rows=2, seed=1)
    elif what == "linears":
        other["linears"] = True
    elif what == "dtype":
        other["dtype"] = "bfloat16"
    else:
        model = make_model("bb")
        changed = model.stacked | {1: jax.tree.map(lambda w: w * 2, model.stacked[1])}
        other["checkpoint"] = write(model._replace(stacked=changed), tmp_path / "other")

    def run(folder: str, options: dict[str, Any]) -> Iterator[LayerFisher]:
        return layer_fishers(**{"checkpoint": checkpoint} | options, folder=tmp_path / folder)

    next(run("states", other))
    found = [as_bytes(fisher) for fisher in run("states", options)]
    assert found == [as_bytes(fisher) for fisher in run("whole", options)]


# Refusals.


@pytest.mark.parametrize(
    ("sequences", "reason"),
    [
        (np.zeros((2, 1), np.int32), "needs a sequence of 2 tokens or more, got 2 of 1"),
        (np.zeros((0, 9), np.int32), "needs a sequence of 2 tokens or more, got 0 of 9"),
        (np.array([[0, VOCAB]], np.int32), f"has the token id {VOCAB}, the model has {VOCAB}"),
        (np.array([[-1, 0]], np.int32), f"has the token id -1, the model has {VOCAB}"),
    ],
)
def test_sequences_that_are_no_calibration_are_refused(
    sequences: np.ndarray, reason: str, checkpoint: Checkpoint, tmp_path: pathlib.Path
) -> None:
    # At once, not when the first layer is asked for.
    with pytest.raises(ConfigError, match=reason):
        layer_fishers(checkpoint, sequences, folder=tmp_path)


def test_a_quantised_checkpoint_is_refused(
    checkpoint: Checkpoint, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization = Quantization(seed_bits=3, parent_bits=6, has_dense=True)
    monkeypatch.setattr(Checkpoint, "quantization", quantization)
    with pytest.raises(CheckpointError, match="is quantised: a calibration needs width 16"):
        layer_fishers(checkpoint, random_sequences(), folder=tmp_path)


def _scaled(model: Model, name: str, factor: float) -> Model:
    """With a dense weight multiplied, or the `down` of a layer by its number."""
    if name.isdigit():
        layer = int(name)
        down = model.stacked[layer].down * factor
        changed = Stacked(model.stacked[layer].gate_up, down)
        return model._replace(stacked=model.stacked | {layer: changed})
    params = dict(model.params)
    params[name] = {"weight": model.params[name]["weight"] * factor}
    return model._replace(params=params)


@pytest.mark.parametrize(
    ("name", "factor", "reason"),
    [
        ("1", np.nan, "layer 1: what it gives for sequence 0 is not finite"),
        ("head", np.nan, r"norm and head: the loss of sequence 0 \(nan\) or its gradient"),
        # Slopes are finite, their squares are not.
        ("head", 1e25, "layer 1: a sum of squared gradients is not finite"),
    ],
)
def test_what_is_not_finite_is_named(
    name: str, factor: float, reason: str, tmp_path: pathlib.Path
) -> None:
    bad = write(_scaled(make_model("bb"), name, factor), tmp_path / "model")
    with pytest.raises(CheckpointError, match=reason):
        list(layer_fishers(bad, random_sequences(), folder=tmp_path / "states"))


def test_a_gradient_that_is_not_finite_is_named(tmp_path: pathlib.Path) -> None:
    # The slopes of a norm are as much larger as what it is given is smaller.
    model = _scaled(_scaled(make_model("b"), "embed", 1e-8), "head", 1e35)
    with pytest.raises(CheckpointError, match="layer 0: the gradient of sequence 0 is not finite"):
        list(
            layer_fishers(
                write(model, tmp_path / "model"), random_sequences(), folder=tmp_path / "states"
            )
        )


def test_damaged_experts_are_refused(tmp_path: pathlib.Path) -> None:
    damaged = write(make_model("bb"), tmp_path / "model")
    path = tmp_path / "model" / "experts" / "1.safetensors"
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        list(layer_fishers(damaged, random_sequences(), folder=tmp_path / "states"))


# Experts that few tokens chose.


def fisher_of(gate_up: np.ndarray, down: np.ndarray, tokens: list[int]) -> LayerFisher:
    return LayerFisher(
        layer=3,
        gate_up=gate_up,
        down=down,
        tokens=np.array(tokens, np.int64),
        linears={"attention.q.weight": np.ones((2, 2), np.float32)},
    )


def test_a_prior_by_hand() -> None:
    # Per token and weight: 6 * 12 / (18 * 12) in gate_up, 3 * 6 / (18 * 6) in down.
    gate_up = np.stack([np.full((2, 2, 3), f, np.float32) for f in (4, 2, 0)])
    down = np.stack([np.full((3, 2), f, np.float32) for f in (1, 2, 0)])
    found, few = with_prior(fisher_of(gate_up, down, [10, 8, 0]), least_tokens=10)
    assert few == [1, 2]
    for values, wanted in (
        (found.gate_up, [4, 2 + 2 / 3, 10 / 3]),
        (found.down, [1, 2 + 2 / 6, 10 / 6]),
    ):
        for expert, value in zip(np.asarray(values), wanted, strict=True):
            np.testing.assert_allclose(expert, value, rtol=1e-6)


# Squares that a float32 holds, and that it still holds divided by the tokens.
squares = st.just(0.0) | st.floats(2.0**-60, 2.0**10, width=32)
small_fishers = st.sampled_from([1, 3]).flatmap(
    lambda experts: st.builds(
        fisher_of,
        *(
            arrays.arrays(np.float32, (experts, *shape), elements=squares)
            for shape in ((2, 2, 3), (3, 2))
        ),
        tokens=st.lists(
            st.sampled_from([0, 0, 1, 63, 64, 500]), min_size=experts, max_size=experts
        ),
    )
)


@given(fisher=small_fishers)
def test_a_prior_makes_up_for_missing_tokens_only(fisher: LayerFisher) -> None:
    found, few = with_prior(fisher)
    assert few == [e for e, n in enumerate(fisher.tokens) if n < 64]
    assert found.layer == fisher.layer and found.linears is fisher.linears
    assert found.tokens.tolist() == fisher.tokens.tolist()
    for values, before in ((found.gate_up, fisher.gate_up), (found.down, fisher.down)):
        after, before = np.asarray(values), np.asarray(before)
        assert after.dtype == np.float32
        if not fisher.tokens.any():
            assert (after == 1).all()
            continue
        enough = fisher.tokens >= 64
        np.testing.assert_array_equal(after[enough], before[enough])
        mean = before.astype(np.float64).sum() / (fisher.tokens.sum() * before[0].size)
        for e in few:
            added = mean * (64 - fisher.tokens[e])
            np.testing.assert_allclose(after[e], before[e] + added, rtol=1e-5)
        if mean > 0:
            assert (after[few] > 0).all()


def test_a_prior_leaves_a_layer_without_experts_alone() -> None:
    shapes = (0, 2, 2, 3), (0, 3, 2)
    fisher = fisher_of(*(np.zeros(shape, np.float32) for shape in shapes), tokens=[])
    assert with_prior(fisher) == (fisher, [])


# Memory.

# Of a layer with 16 experts.
WIDE = 256
LAYER_BYTES = 16 * 3 * WIDE * WIDE * 4
LARGE_LAYERS = 8

CALIBRATE = """
import pathlib, sys
import numpy as np
import jax
from moejax.checkpoint import Checkpoint
from moejax.models.fisher import layer_fishers

jax.config.update("jax_disable_most_optimizations", True)

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def calibrate(name):
    checkpoint = Checkpoint.open(pathlib.Path(sys.argv[1]) / name)
    sequences = np.zeros((2, 16), np.int32)
    for fisher in layer_fishers(checkpoint, sequences, folder=pathlib.Path(sys.argv[1]) / "states"):
        del fisher

calibrate("small")
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
calibrate("large")
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_memory_is_bounded_by_one_layer(tmp_path: pathlib.Path) -> None:
    config = make_config("phi")
    (kind, _) = config.layers
    router = dataclasses.replace(kind.feed_forward.router, num_experts=16)
    part = dataclasses.replace(kind.feed_forward, router=router, expert_width=WIDE)
    kind = dataclasses.replace(kind, feed_forward=part)
    for name, count in (("small", 2), ("large", LARGE_LAYERS)):
        large = dataclasses.replace(config, hidden_size=WIDE, segments=segments_of([kind] * count))
        params = jax.tree.map(
            lambda a: jnp.full(a.shape, 0.01, a.dtype), abstract_params(large, "float32")
        )
        of_layer = Stacked(
            np.full((16, 2, WIDE, WIDE), 0.01, np.float32),
            np.full((16, WIDE, WIDE), 0.01, np.float32),
        )
        write(Model(large, params, dict.fromkeys(range(count), of_layer)), tmp_path / name)
    result = subprocess.run(
        [sys.executable, "-c", CALIBRATE, tmp_path],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(sys.path),
            # Otherwise glibc keeps freed memory, for each thread and between what is in use.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "131072",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    # Seen: 5.2 times that. A layer's experts as they lie in the file, and in float32; their
    # gradients, and the sums.
    assert int(result.stdout) < 6.5 * LAYER_BYTES
