"""The forward pass over whole sequences: rows apart, nothing from the future, and gradients."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.small_configs import VOCAB, make_config
from models.small_model import QUICK, Model, make_model
from moejax.config import ModelConfig
from moejax.layers.experts import Stacked
from moejax.models import whole
from moejax.models.decoder import Params
from moejax.models.whole import forward

LAYERS, ROWS, LENGTH = "bc", 2, 14


def random_tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(LAYERS)


@partial(jax.jit, static_argnames=("config", "dtype"), compiler_options=QUICK)
def run(
    stacked: dict[int, Stacked], params: Params, tokens: jax.Array, config: ModelConfig, dtype: str
) -> tuple[tuple[jax.Array, jax.Array], dict[int, Stacked]]:
    """A smooth loss of all logits, the logits, and the gradient of the loss."""

    def loss(stacked: dict[int, Stacked]) -> tuple[jax.Array, jax.Array]:
        logits = forward(params, stacked, tokens, config=config, dtype=dtype)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 3]), logits

    return jax.value_and_grad(loss, has_aux=True)(stacked)


def logits_of(model: Model, tokens: np.ndarray) -> np.ndarray:
    (_, logits), _ = run(
        model.stacked, model.params, jnp.asarray(tokens), model.config, model.dtype
    )
    return np.asarray(logits)


def loss_and_gradient(
    model: Model, stacked: dict[int, Stacked], tokens: np.ndarray
) -> tuple[float, dict[int, Stacked]]:
    (loss, _), gradient = run(stacked, model.params, jnp.asarray(tokens), model.config, model.dtype)
    return float(loss), gradient


def test_every_place_has_logits(model: Model) -> None:
    logits = logits_of(model, random_tokens())
    assert logits.shape == (ROWS, LENGTH, VOCAB)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()


def test_rows_do_not_see_each_other(model: Model) -> None:
    tokens = random_tokens()
    other = tokens.copy()
    other[1] = random_tokens(seed=1)[1]
    first, second = logits_of(model, tokens), logits_of(model, other)
    # The experts' tiles hold tokens of both rows: not the same bits, then.
    np.testing.assert_allclose(second[0], first[0], atol=1e-5)
    assert np.abs(second[1] - first[1]).max() > 0.1


@pytest.mark.parametrize("place", [0, 5, 13])
def test_a_token_changes_nothing_before_it(model: Model, place: int) -> None:
    tokens = random_tokens()
    other = tokens.copy()
    other[0, place] = (tokens[0, place] + 1) % VOCAB
    first, second = logits_of(model, tokens), logits_of(model, other)
    np.testing.assert_allclose(second[0, :place], first[0, :place], atol=1e-5)
    assert np.abs(second[0, place] - first[0, place]).max() > 0.1


class Watched:
    """A decoder that tells which factors of longrope its tokens take."""

    def __init__(self) -> None:
        self.long: list[bool] = []

    def __call__(self, tokens: jax.Array, memory: whole.WholeMemory) -> tuple[jax.Array, None]:
        self.long = memory.uses_long_rope.tolist()
        return jnp.zeros((len(tokens), 1)), None

    def logits(self, hidden: jax.Array) -> jax.Array:
        return jnp.zeros((len(hidden), VOCAB))


@pytest.mark.parametrize(
    ("name", "length", "max_length", "long"),
    [
        ("phi", 32, None, False),
        ("phi", 33, None, True),
        ("phi", 9, 32, False),
        ("phi", 9, 33, True),
        ("b", 33, 1000, False),
    ],
)
def test_a_sequence_that_may_become_long_takes_the_long_factors_from_its_start(
    monkeypatch: pytest.MonkeyPatch, name: str, length: int, max_length: int | None, long: bool
) -> None:
    decoder = Watched()
    monkeypatch.setattr(whole, "bind", lambda *arguments: decoder)
    tokens = jnp.zeros((ROWS, length), jnp.int32)
    config = make_config(name)
    forward({}, {}, tokens, config=config, dtype="float32", max_length=max_length)
    assert decoder.long == [long] * ROWS * length


# Gradients.


def with_entry(
    stacked: dict[int, Stacked], layer: int, name: str, at: tuple[int, ...], value: float
) -> dict[int, Stacked]:
    """The experts with one weight set."""
    weights = np.array(getattr(stacked[layer], name))
    weights[at] = value
    changed = dataclasses.replace(stacked[layer], **{name: jnp.asarray(weights)})
    return stacked | {layer: changed}


@pytest.mark.parametrize("name", ["gate_up", "down"])
@pytest.mark.parametrize("layer", [0, 1])
def test_gradients_of_experts_are_finite_differences(model: Model, layer: int, name: str) -> None:
    tokens = random_tokens()
    _, gradient = loss_and_gradient(model, model.stacked, tokens)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    slopes = np.array(getattr(gradient[layer], name))
    weights = np.array(getattr(model.stacked[layer], name))
    step = 1e-2
    for expert in range(3):
        # The entry of the expert that matters most: a small one would be lost in rounding.
        place = np.abs(slopes[expert]).argmax()
        at = (expert, *map(int, np.unravel_index(place, slopes.shape[1:])))
        above, below = (
            loss_and_gradient(
                model, with_entry(model.stacked, layer, name, at, weights[at] + shift), tokens
            )[0]
            for shift in (step, -step)
        )
        assert slopes[at] == pytest.approx((above - below) / (2 * step), rel=0.03)


def test_an_expert_without_tokens_has_no_gradient(model: Model) -> None:
    # Tokens that are all the same choose the same experts in the first layer.
    tokens = np.full((ROWS, LENGTH), 7, np.int32)
    _, gradient = loss_and_gradient(model, model.stacked, tokens)
    touched = np.asarray(gradient[0].down).any(axis=(1, 2))
    assert touched.sum() == 2  # experts per token
    assert (np.asarray(gradient[0].gate_up)[~touched] == 0).all()
