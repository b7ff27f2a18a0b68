"""Models whose experts are what a scheme makes of them, scored by whole forward passes."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from quality_tasks import Item, Score
from tqdm import tqdm

from moejax.arena.format import pad_to
from moejax.arena.geometry import LinearShape, linear_shapes, width_bytes
from moejax.checkpoint import Checkpoint
from moejax.config import DENSE_WIDTH, ModelConfig
from moejax.layers.every_token import EveryToken
from moejax.models.whole import forward, read_linear
from moejax_serving.loader import load_params

Experts = Mapping[int, tuple[jax.Array, jax.Array]]
"""Layer → gate_up [experts, 2, width, hidden] and down [experts, hidden, width]."""
LENGTHS = (64, 128, 256, 512, 1024)
TOKENS = 16384
ROWS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Stored:
    """The experts of a checkpoint at all of its widths, on the device."""

    checkpoint: Checkpoint
    widths: tuple[int, ...]
    layers: Mapping[int, tuple[jax.Array, jax.Array]]
    """Layer → float[widths, experts, …] of gate_up and down."""

    def at(self, widths: np.ndarray) -> Experts:
        """The experts at widths [layers, experts, 2]."""
        found = {}
        for number, (layer, (gate_up, down)) in enumerate(self.layers.items()):
            at = np.searchsorted(self.widths, widths[number])
            expert = np.arange(len(at))
            found[layer] = (
                gate_up[at[:, 0], expert].astype(jnp.float32),
                down[at[:, 1], expert].astype(jnp.float32),
            )
        return found

    def uniform(self, width: int) -> np.ndarray:
        """The same width for all: [layers, experts, 2]."""
        experts = self.checkpoint.config.moe.router.num_experts
        return np.full((len(self.layers), experts, 2), width)

    @property
    def shapes(self) -> tuple[LinearShape, LinearShape]:
        """Of gate_up and down."""
        return linear_shapes(self.checkpoint.config, self.checkpoint.quantization)

    def sizes(self) -> np.ndarray:
        """Bytes of planes and the table of each width: [2, widths]."""
        dtype, quantization = self.checkpoint.config.dtype, self.checkpoint.quantization
        return np.array(
            [
                [width_bytes(shape, dtype, quantization, width) for width in self.widths]
                for shape in self.shapes
            ]
        )

    def num_bytes(self, widths: np.ndarray) -> int:
        """Bytes of the experts at widths [layers, experts, 2]."""
        at = np.searchsorted(self.widths, widths)
        sizes = self.sizes()
        return int(sum(sizes[which][at[..., which]].sum() for which in (0, 1)))


def read_stored(folder: pathlib.Path) -> Stored:
    """All widths of a checkpoint; of one that is not quantised, 16."""
    checkpoint = Checkpoint.open(folder)
    quantization = checkpoint.quantization
    widths = (DENSE_WIDTH,) if quantization is None else quantization.widths
    # Tables are float16: what is looked up in them is stored without loss.
    dtype = "float32" if quantization is None else "float16"
    config = checkpoint.config
    layers = {}
    for layer in tqdm(config.moe_layers, f"reading {folder.name}"):
        both = []
        for which in (0, 1):
            of_width = [
                jnp.stack(
                    [
                        read_linear(checkpoint, layer, expert, which, width, "float32")
                        for expert in range(config.moe.router.num_experts)
                    ]
                ).astype(dtype)
                for width in widths
            ]
            both.append(jnp.stack(of_width))
        layers[layer] = (both[0], both[1][:, :, 0])
    return Stored(checkpoint, widths, layers)


class Scorer:
    """The dense part of a model, and programs that score items."""

    def __init__(self, checkpoint: Checkpoint, plain: Experts) -> None:
        self._config = checkpoint.config
        self._params = load_params(checkpoint, "float32", progress=True)
        self._plain = _stacked(plain)

    def score(self, experts: Experts, items: Sequence[Item]) -> list[Score]:
        """Of each item, in float32; divergences are from the plain experts."""
        stacked = _stacked(experts)
        found: dict[int, Score] = {}
        for length, numbers in _by_length(items):
            rows = min(max(1, TOKENS // length), pad_to(len(numbers), ROWS_AT_ONCE))
            for at in range(0, len(numbers), rows):
                batch = numbers[at : at + rows]
                tokens = np.zeros((rows, length), np.int32)
                for row, number in enumerate(batch):
                    tokens[row, : len(items[number].tokens)] = items[number].tokens
                logprobs, greedy, divergence = jax.device_get(
                    _score(self._params, stacked, self._plain, tokens, self._config)
                )
                for row, number in enumerate(batch):
                    item = items[number]
                    scored = slice(item.start - 1, len(item.tokens) - 1)
                    found[number] = Score(
                        float(logprobs[row, scored].astype(np.float64).sum()),
                        bool(greedy[row, scored].all()),
                        float(divergence[row, scored].astype(np.float64).sum()),
                    )
        return [found[number] for number in range(len(items))]


def _stacked(experts: Experts) -> dict[int, EveryToken]:
    return {layer: EveryToken(*parts) for layer, parts in experts.items()}


def _by_length(items: Sequence[Item]) -> Iterable[tuple[int, list[int]]]:
    """Items by the padded length that holds them."""
    groups: dict[int, list[int]] = {}
    for number, item in enumerate(items):
        length = next(length for length in LENGTHS if len(item.tokens) <= length)
        groups.setdefault(length, []).append(number)
    return sorted(groups.items())


@partial(jax.jit, static_argnames="config")
def _score(
    params: dict,
    stacked: dict[int, EveryToken],
    plain: dict[int, EveryToken],
    tokens: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, ...]:
    """[rows, length - 1] of the next token: its log-probability, whether it is the likeliest, and
    how far its distribution is from the plain model's.
    """

    def logprobs(experts: dict[int, EveryToken], tokens: jax.Array) -> jax.Array:
        logits = forward(params, experts, tokens, config=config, dtype="float32")[:, :-1]
        return jax.nn.log_softmax(logits, axis=-1)

    def some(tokens: jax.Array) -> tuple[jax.Array, ...]:
        target = tokens[:, 1:]
        found, wanted = logprobs(stacked, tokens), logprobs(plain, tokens)
        picked = jnp.take_along_axis(found, target[..., None], axis=-1)[..., 0]
        divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
        return picked, jnp.argmax(found, axis=-1) == target, divergence

    # A few rows at a time: logits are large.
    parts = tokens.reshape(-1, min(ROWS_AT_ONCE, len(tokens)), tokens.shape[1])
    return tuple(part.reshape(len(tokens), -1) for part in jax.lax.map(some, parts))
