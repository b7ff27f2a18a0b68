"""How much weights matter to the loss of a text: the diagonal of the empirical Fisher information.

With loss_s the sum of -log p(next token) over the length - 1 predictions of sequence s, and g_s its
gradient with respect to a weight,

    F = sum over s of g_s^2 / (n (length - 1)),

the information per predicted token if tokens are independent. 1/2 sum F dw^2 then estimates by how
much the loss rises, in nats per token, where weights change by dw. SqueezeLLM (Kim et al. 2024,
section 4.1) and Any-Precision LLM (Park et al. 2024, section 4.2) weigh their clusters by the same
up to a factor: the sum of the squared gradients of the mean loss.

The gradients come layer by layer. All sequences go through one layer before the next one is read,
and the input of every layer is kept in a file; then they go back, from the last layer to the first.
So memory holds the experts of one layer, their gradients of one sequence, and the sums; besides
them the dense weights.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jaxtyping import Array, Float32, Int32, Int64

from moejax.arena.format import DTYPES
from moejax.checkpoint import Checkpoint
from moejax.config import LayerKind, ModelConfig
from moejax.errors import CheckpointError, ConfigError
from moejax.layers.every_token import EveryToken
from moejax.models import fisher_steps as steps
from moejax.models.fisher_states import States
from moejax.models.fisher_weights import Weights, is_linear

_log = logging.getLogger(__name__)


LEAST_TOKENS = 64
"""Where fewer tokens chose an expert, the mean of its layer stands in for what is missing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerFisher:
    """F of the weights of a layer. A layer without routed experts has 0 experts."""

    layer: int
    gate_up: Float32[np.ndarray | Array, "experts 2 width hidden"]
    down: Float32[np.ndarray | Array, "experts hidden width"]
    tokens: Int64[np.ndarray, " experts"]
    """Tokens of the text that chose the expert."""
    linears: dict[str, Float32[np.ndarray | Array, "rows columns"]]
    """Of projections by their names in the layer, such as `attention.q.weight`."""


def layer_fishers(
    checkpoint: Checkpoint,
    sequences: Int32[np.ndarray, "n length"],
    *,
    folder: Path,
    linears: bool = False,
    dtype: str | None = None,
    progress: bool = False,
) -> Iterator[LayerFisher]:
    """F of every layer with routed experts, from the last one to the first. Its arrays lie on the
    device.

    A call with the same arguments goes on where another one stopped: a layer is done once the one
    after it was asked for, and is not given again. The same inputs give the same bytes, as far as
    XLA chooses the same kernels.

    Args:
        checkpoint: of weights at width 16.
        sequences: token ids of the text.
        folder: for the hidden states: of each layer, n * length * hidden numbers. For one process
            at a time; what another calibration left there is overwritten.
        linears: also the matrices of attention and of shared experts, of all layers.
        dtype: that the model computes in; None: float32 on a CPU, else the checkpoint's.
        progress: show a bar where standard error is a terminal.

    Raises:
        ConfigError: sequences that are too short, or not of this model.
        CheckpointError: weights that are missing or damaged, or that give no finite loss.
    """
    config = checkpoint.config
    _check(sequences, config)
    if checkpoint.quantization is not None:
        raise CheckpointError(f"{checkpoint.folder} is quantised: a calibration needs width 16")
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else config.dtype
    return _run(checkpoint, sequences, folder, linears, dtype, progress)


def _run(
    checkpoint: Checkpoint,
    sequences: Int32[np.ndarray, "n length"],
    folder: Path,
    linears: bool,
    dtype: str,
    progress: bool,
) -> Iterator[LayerFisher]:
    """`layer_fishers`, from the first layer that is asked for on."""
    calibration = _Calibration(checkpoint, sequences, folder, linears, dtype, progress)
    states, last = calibration.states, len(checkpoint.config.layers)
    with calibration.bar:
        while states.num_inputs <= last:
            calibration.forward(states.num_inputs)
        if states.num_steps == 0:
            calibration.start_backward()
        while (layer := last - states.num_steps) >= calibration.first:
            found = calibration.backward(layer)
            if calibration.is_wanted(layer):
                yield found
            # Otherwise this would hold two layers.
            del found
            states.finish_step()


class _Calibration:
    """One run over a text: its states, and the weights that are not experts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        sequences: Int32[np.ndarray, "n length"],
        folder: Path,
        linears: bool,
        dtype: str,
        progress: bool,
    ) -> None:
        self._checkpoint, self._sequences, self._dtype = checkpoint, sequences, dtype
        self._config, self._linears = checkpoint.config, linears
        self._weights = Weights(checkpoint, dtype)
        self.first = 0 if linears else min(self._config.moe_layers)
        """The lowest layer whose gradients are wanted."""
        shape = (*sequences.shape, self._config.hidden_size)
        self.states = States(folder, self._key(), shape, DTYPES[dtype])
        layers = len(self._config.layers)
        done = max(0, self.states.num_inputs - 1) + max(0, self.states.num_steps - 1)
        self.bar = tqdm.tqdm(
            desc="calibrating",
            total=(2 * layers - self.first) * len(sequences),
            initial=done * len(sequences),
            unit="sequence",
            disable=None if progress else True,
        )

    def _key(self) -> str:
        """Stands for all that the hidden states, and the layers that are done, depend on."""
        parts = {
            "checkpoint": self._checkpoint.fingerprint,
            "sequences": hashlib.sha256(np.ascontiguousarray(self._sequences)).hexdigest(),
            "shape": self._sequences.shape,
            "dtype": self._dtype,
            "linears": self._linears,
            "backend": jax.default_backend(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def is_wanted(self, layer: int) -> bool:
        """Whether the layer has weights whose gradients are asked for."""
        return self._linears or layer in self._config.moe_layers

    def forward(self, number: int) -> None:
        """Makes the inputs of layer `number`."""
        if number == 0:
            options: Any = {"config": self._config, "dtype": self._dtype}
            embedded = (steps.embed(self._weights.ends, row, **options) for row in self._sequences)
            self.states.put_inputs(np.asarray(x) for x in _late(embedded))
            return
        layer = number - 1
        weights, experts = self._weights.dense(layer), self._weights.experts(layer, verify=True)
        inputs, kind = self.states.inputs(layer), self._kind(layer)

        def run() -> Iterator[tuple[Array, Array]]:
            for x in inputs:
                yield steps.forward(weights, experts, x, **kind)

        def rows() -> Iterator[np.ndarray]:
            for row, (y, is_finite) in enumerate(_late(run())):
                if not is_finite:
                    raise self._error(layer, f"what it gives for sequence {row} is not finite")
                yield np.asarray(y)
                self.bar.update()

        self.states.put_inputs(rows())

    def start_backward(self) -> None:
        """From the last hidden states to the loss, and back."""
        options: Any = {"config": self._config, "dtype": self._dtype}
        hidden, losses = self.states.inputs(len(self._config.layers)), []

        def rows() -> Iterator[np.ndarray]:
            for row, (slopes, loss) in enumerate(
                _late(
                    steps.start_backward(self._weights.ends, x, tokens, **options)
                    for x, tokens in zip(hidden, self._sequences, strict=True)
                )
            ):
                found = np.asarray(slopes)
                losses.append(float(loss))
                if not (np.isfinite(losses[-1]) and np.isfinite(found).all()):
                    raise CheckpointError(
                        f"{self._checkpoint.folder}: norm and head: the loss of sequence {row} "
                        f"({losses[-1]}) or its gradient is not finite"
                    )
                yield found

        self.states.put_cotangents(rows())
        self.states.finish_step()
        _log.info("loss of the calibration: %.4f nats per token", sum(losses) / self._predictions)

    def backward(self, layer: int) -> LayerFisher:
        """F of a layer, and the cotangents of its input, which are put into the states."""
        config, moe = self._config, self._config.moe
        weights, experts = self._weights.dense(layer), self._weights.experts(layer)
        kind, inputs, above = self._kind(layer), self.states.inputs(layer), self.states.cotangents()
        names = [n for n, w in weights.items() if is_linear(n, w)] if self._linears else []
        sums = jax.tree.map(
            lambda w: jnp.zeros(w.shape, jnp.float32),
            steps.Sums(experts, {name: weights[name] for name in names}),
        )
        tokens = np.zeros(0 if experts is None else experts.num_experts, np.int64)

        def run() -> Iterator[steps.Backward]:
            nonlocal sums
            for x, slopes in zip(inputs, above, strict=True):
                sums, found = steps.backward(sums, weights, experts, x, slopes, **kind)
                yield found

        def rows() -> Iterator[np.ndarray]:
            for row, found in enumerate(_late(run())):
                if not found.is_finite:
                    raise self._error(layer, f"the gradient of sequence {row} is not finite")
                if found.tokens is not None:
                    tokens[:] += np.asarray(found.tokens)
                yield np.asarray(found.slopes)
                self.bar.update()

        self.states.put_cotangents(rows())
        means, are_finite = steps.finish(sums, np.float32(self._predictions))
        if not all(jax.tree.leaves(are_finite)):
            raise self._error(layer, "a sum of squared gradients is not finite")
        found = means.experts
        if found is None:
            found = EveryToken(
                np.zeros((0, 2, moe.expert_width, config.hidden_size), np.float32),
                np.zeros((0, config.hidden_size, moe.expert_width), np.float32),
            )
        return LayerFisher(
            layer=layer,
            gate_up=found.gate_up,
            down=found.down,
            tokens=tokens,
            linears=means.linears,
        )

    @property
    def _predictions(self) -> int:
        rows, length = self._sequences.shape
        count: int = rows * (length - 1)
        return count

    def _kind(self, layer: int) -> dict[str, Any]:
        kind: LayerKind = self._config.layers[layer]
        return {"kind": kind, "config": self._config, "dtype": self._dtype}

    def _error(self, layer: int, what: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint.folder}: layer {layer}: {what}")


def with_prior(
    fisher: LayerFisher, least_tokens: int = LEAST_TOKENS
) -> tuple[LayerFisher, list[int]]:
    """F, with the mean of the layer where few tokens chose an expert; and which experts these are.

    An expert that n < `least_tokens` tokens chose gets, on top of its own F, `least_tokens` - n
    times the layer's mean F per token and weight: the sum of F over all experts of gate_up, or of
    down, divided by the tokens of all experts and the weights of one. So no importance of such an
    expert is 0, unless the whole layer's are. If no token chose any expert, all F are 1 and all
    experts are named. `linears` stay as they are.
    """
    tokens = fisher.tokens
    few = np.flatnonzero(tokens < least_tokens)
    if len(few) == 0:
        return fisher, []
    total = int(tokens.sum())
    missing = np.maximum(least_tokens - tokens, 0).astype(np.float32)

    def filled(values: Float32[np.ndarray | Array, "experts ..."]) -> Array:
        if total == 0:
            return jnp.ones(values.shape, jnp.float32)
        means = jnp.mean(values, axis=tuple(range(1, values.ndim)))
        added = jnp.sum(means) / np.float32(total) * missing
        more: Array = jnp.asarray(values) + added.reshape(-1, *(1,) * (values.ndim - 1))
        return more

    found = dataclasses.replace(fisher, gate_up=filled(fisher.gate_up), down=filled(fisher.down))
    return found, few.tolist()


def _check(sequences: Int32[np.ndarray, "n length"], config: ModelConfig) -> None:
    rows, length = sequences.shape
    if rows < 1 or length < 2:
        raise ConfigError(
            f"a calibration needs a sequence of 2 tokens or more, got {rows} of {length}"
        )
    outside = sequences[(sequences < 0) | (sequences >= config.vocab_size)]
    if outside.size:
        raise ConfigError(
            f"the calibration has the token id {outside[0]}, the model has {config.vocab_size}"
        )


def _late[T](items: Iterable[T]) -> Iterator[T]:
    """Each item when the next one is there: the device is at work while the host takes one."""
    waiting: list[T] = []
    for item in items:
        if waiting:
            yield waiting.pop()
        waiting.append(item)
    yield from waiting
