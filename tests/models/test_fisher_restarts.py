"""Calibrations that are interrupted, and those that are refused."""

import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from models import calibrated
from models.calibrated import Calls, Interrupted, Model, make_model, random_sequences, write
from models.small_configs import VOCAB
from moejax.checkpoint import Checkpoint
from moejax.config import Quantization
from moejax.errors import CheckpointError, ConfigError
from moejax.layers.experts import Stacked
from moejax.models import fisher_weights
from moejax.models.fisher import LayerFisher, layer_fishers

quick_programs = pytest.fixture(scope="module", autouse=True)(calibrated.quick_programs)
checkpoint = pytest.fixture(scope="module")(calibrated.two_layers)


@pytest.fixture
def cached_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights are read once: each of many runs would read them."""
    monkeypatch.setattr(fisher_weights, "_read_dense", functools.cache(fisher_weights._read_dense))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, cached_weights: None) -> Calls:
    return Calls(monkeypatch)


def as_bytes(fisher: LayerFisher) -> tuple[Any, ...]:
    parts = (fisher.gate_up, fisher.down, fisher.tokens, *fisher.linears.values())
    return fisher.layer, *(np.asarray(part).tobytes() for part in parts)


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
