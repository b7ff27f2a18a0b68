"""F of every layer against gradients of the whole model, and the tokens of its experts."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import calibrated
from models.calibrated import LENGTH, ROWS, Calls, Model, make_model, random_sequences, write
from models.small_configs import VOCAB
from moejax.checkpoint import Checkpoint
from moejax.layers import moe
from moejax.layers.experts import Stacked
from moejax.models import fisher_steps, whole
from moejax.models.decoder import Params, bind, flatten_params
from moejax.models.fisher import layer_fishers
from moejax_converters.calibration_text import calibration_sequences
from moejax_converters.convert import convert
from references import read_params

quick_programs = pytest.fixture(scope="module", autouse=True)(calibrated.quick_programs)
checkpoint = pytest.fixture(scope="module")(calibrated.two_layers)
# These programs are small and run a few times: compiling takes longer than running them.
QUICK = {"xla_backend_optimization_level": 0}


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


QUICK_FAMILIES = ("deepseek",)


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


def test_layers_without_experts_are_passed_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    calls = Calls(monkeypatch)
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


@pytest.mark.slow
def test_half_of_fisher_times_squared_changes_is_what_the_loss_rises_by(
    shared_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    convert(shared_dir / "models" / "demo", tmp_path / "demo", progress=False)
    trained = Checkpoint.open(tmp_path / "demo")
    text = shared_dir / "data" / "calibration.txt"
    sequences = calibration_sequences(text, trained.folder, count=32, length=128)
    fishers = {f.layer: f for f in layer_fishers(trained, sequences, folder=tmp_path / "states")}
    model = Model(trained.config, read_params(trained), whole.read_stacked(trained, "float32"))
    step = 0.1  # of the deviation of all weights of a layer

    def moved(sign: int) -> tuple[dict[int, Stacked], float]:
        """The experts with noise, and what F makes of it."""
        rng, found, estimate = np.random.default_rng(0), {}, 0.0
        for layer, experts in model.stacked.items():
            parts = []
            for name in ("gate_up", "down"):
                weights = np.asarray(getattr(experts, name))
                noise = step * weights.std() * rng.standard_normal(weights.shape, np.float32)
                parts.append(jnp.asarray(weights + sign * noise))
                estimate += float(np.sum(np.asarray(getattr(fishers[layer], name)) * noise**2)) / 2
            found[layer] = Stacked(*parts)
        return found, estimate

    def mean_loss(stacked: dict[int, Stacked]) -> float:
        losses = [
            float(jit_loss(stacked, model.params, jnp.asarray(row), config=model.config))
            for row in sequences
        ]
        return sum(losses) / (sequences.size - len(sequences))

    (above, estimate), (below, _) = moved(1), moved(-1)
    # The slope cancels; the text is that of the training, so the second order is F.
    rise = (mean_loss(above) + mean_loss(below)) / 2 - mean_loss(model.stacked)
    assert rise > 0.01 and rise == pytest.approx(estimate, rel=0.15)
