"""Stores the experts of a checkpoint as nested codes, layer by layer."""

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tqdm
from jaxtyping import Float, Int32

from moejax.arena.format import encode_dense
from moejax.arena.geometry import linear_shape, linear_shapes
from moejax.checkpoint import Checkpoint, CheckpointWriter, Sensitivity, layout
from moejax.config import DENSE_WIDTH, ModelConfig, Quantization
from moejax.errors import CheckpointError
from moejax.models.fisher import LayerFisher, layer_fishers, with_prior
from moejax.models.whole import read_linear
from moejax.quant.linear import QuantizedLinear, start_quantizing
from moejax_converters.generation import copy_tokenizer
from moejax_converters.quantize_job import Job

_log = logging.getLogger(__name__)


class Quantizer:
    """One run over the layers of a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        job: Job,
        quantization: Quantization,
        sequences: Int32[np.ndarray, "count length"] | None,
        progress: bool,
    ) -> None:
        self._checkpoint, self._job = checkpoint, job
        self._sequences, self._progress = sequences, progress
        self._config: ModelConfig = checkpoint.config
        self._quantization = quantization
        self._writer = CheckpointWriter(job.new, self._config, self._quantization)
        self._quantize = functools.partial(
            start_quantizing,
            seed_bits=quantization.seed_bits,
            parent_bits=quantization.parent_bits,
        )

    def run(self) -> None:
        """All layers that are not done, then all that is not a layer."""
        layers = [n for n in range(len(self._config.layers)) if self._wanted(n)]
        todo = [n for n in layers if self._job.kept(f"layer{n}") is None]
        experts = self._config.moe.router.num_experts
        of_moe = self._config.moe_layers
        with tqdm.tqdm(
            total=experts * len(of_moe),
            initial=experts * sum(n in of_moe and n not in todo for n in layers),
            desc="quantising",
            unit="expert",
            disable=None if self._progress else True,
        ) as bar:
            for fisher in self._fishers(todo):
                self._layer(fisher, bar)
        self._finish()

    def _wanted(self, layer: int) -> bool:
        return layer in self._config.moe_layers or bool(self._linears_of(layer))

    def _linears_of(self, layer: int) -> dict[str, tuple[str, int]]:
        """Name within the layer → the stacked tensor, and the layer's place in it."""
        place = self._config.places[layer]
        prefix = f"segments.{place.segment}.{place.index}."
        return {
            name.removeprefix(prefix): (name, place.repeat)
            for name, _ in self._quantization.linears
            if name.startswith(prefix)
        }

    def _fishers(self, todo: Sequence[int]) -> Iterator[LayerFisher]:
        """The importances of the layers that are not done, the last layer first."""
        if not todo:
            return
        if self._sequences is None:
            for layer in reversed(todo):
                yield self._ones(layer)
            return
        for fisher in layer_fishers(
            self._checkpoint,
            self._sequences,
            folder=self._job.calibration,
            linears=bool(self._quantization.linears),
            progress=self._progress,
        ):
            if fisher.layer in todo:
                filled, few = with_prior(fisher)
                if few:
                    _log.warning(
                        "layer %d: few tokens of the calibration chose the experts %s: the mean "
                        "of the layer stands in for what is missing",
                        fisher.layer,
                        ", ".join(map(str, few)),
                    )
                yield filled

    def _ones(self, layer: int) -> LayerFisher:
        config = self._config
        experts = config.moe.router.num_experts if layer in config.moe_layers else 0
        width, hidden = config.moe.expert_width, config.hidden_size
        return LayerFisher(
            layer=layer,
            gate_up=np.ones((experts, 2, width, hidden), np.float32),
            down=np.ones((experts, hidden, width), np.float32),
            tokens=np.zeros(experts, np.int64),
            linears={
                name: np.ones(self._checkpoint.dense_shape(tensor)[1:], np.float32)
                for name, (tensor, _) in self._linears_of(layer).items()
            },
        )

    def _layer(self, fisher: LayerFisher, bar: Any) -> None:
        layer, kept = fisher.layer, {"tokens": fisher.tokens}
        if layer in self._config.moe_layers:
            kept |= self._experts(fisher, bar)
        for name, (tensor, repeat) in self._linears_of(layer).items():
            shape = linear_shape(self._quantization, tensor, self._checkpoint.dense_shape(tensor))
            matrix = self._dense(tensor)[repeat]
            matrix = matrix.astype(np.float32)
            found = self._done(
                layer, name, self._quantize(matrix[None], fisher.linears[name][None], shape)
            )
            kept |= {f"{name}.{run}": words for run, words in found.runs().items()}
            kept |= {f"{name}.errors": _costs(found)}
        self._job.keep(f"layer{layer}", kept)

    def _experts(self, fisher: LayerFisher, bar: Any) -> dict[str, np.ndarray]:
        """Writes the file of a layer's experts; gives what is to be kept about it."""
        layer, quantization = fisher.layer, self._quantization
        experts = len(fisher.tokens)
        widths = quantization.parent_bits - quantization.seed_bits + 1
        costs = np.zeros((experts, 2, widths + 1))
        layout.experts_path(self._job.new, layer).unlink(missing_ok=True)
        shapes = linear_shapes(self._config, quantization)
        runs = self._checkpoint.expert_runs(layer)
        importances = (fisher.gate_up, fisher.down[:, None])
        with self._writer.expert_file(layer) as file:
            waiting = []
            for number in range(2 * experts + 1):
                # The device is at work on a linear while the one before is written.
                if number < 2 * experts:
                    expert, which = divmod(number, 2)
                    if which == 0:
                        self._checkpoint.verify_expert(layer, expert)
                    matrix = read_linear(
                        self._checkpoint, layer, expert, which, DENSE_WIDTH, "float32"
                    )
                    waiting.append(
                        self._quantize(matrix, importances[which][expert], shapes[which])
                    )
                if number == 0:
                    continue
                expert, which = divmod(number - 1, 2)
                linear = layout.LINEARS[which]
                found = self._done(layer, f"expert {expert} {linear}", waiting.pop(0))
                costs[expert, which] = _costs(found)
                file.put_runs(expert, linear, found.runs())
                if quantization.has_dense:
                    file.put_runs(expert, linear, {"dense": runs[f"{linear}.dense"][expert]})
                bar.update(which)
        return {"costs": costs, "crc32": np.array(file.crc32, np.int64)}

    @functools.lru_cache(maxsize=1)  # noqa: B019 - of one tensor, as long as the quantiser lives
    def _dense(self, tensor: str) -> Float[np.ndarray, "repeats rows columns"]:
        """A stacked dense tensor, in the dtype that it is stored in."""
        dtype = self._checkpoint.dense_dtype(tensor)
        return np.asarray(self._checkpoint.read_dense(tensor, dtype))

    def _done(self, layer: int, name: str, quantizing: Any) -> QuantizedLinear:
        try:
            found: QuantizedLinear = quantizing.wait()
        except ValueError as error:
            raise CheckpointError(
                f"{self._checkpoint.folder}: layer {layer}, {name}: {error}"
            ) from error
        return found

    def _finish(self) -> None:
        checkpoint, config, quantization = self._checkpoint, self._config, self._quantization
        kept = {n: self._job.kept(f"layer{n}") or {} for n in range(len(config.layers))}
        for layer in config.moe_layers:
            self._writer.put_expert_crc32(layer, int(kept[layer]["crc32"]))
        costs = np.stack([kept[layer]["costs"] for layer in config.moe_layers])
        linears: dict[str, np.ndarray] = {}
        for tensor, _ in quantization.linears:
            of_layers = [
                {
                    key.removeprefix(f"{name}."): value
                    for key, value in kept[n].items()
                    if key.startswith(f"{name}.")
                }
                for n in range(len(config.layers))
                for name, (owner, _) in self._linears_of(n).items()
                if owner == tensor
            ]
            linears[tensor] = np.stack([found.pop("errors") for found in of_layers])
            stacked = {run: np.stack([found[run] for found in of_layers]) for run in of_layers[0]}
            if quantization.has_dense:
                stacked |= {"dense": np.stack([encode_dense(m) for m in self._dense(tensor)])}
            repeats, rows, columns = checkpoint.dense_shape(tensor)
            dtype = checkpoint.dense_dtype(tensor)
            layout.linears_path(self._job.new, tensor).unlink(missing_ok=True)
            self._writer.put_linear(tensor, (repeats, rows, columns), dtype, stacked)
        for name in checkpoint.dense_names():
            if name not in linears:
                self._writer.copy_dense(checkpoint, name)
        copy_tokenizer(checkpoint.folder, self._job.new)
        layout.manifest_path(self._job.new).unlink(missing_ok=True)
        self._writer.finish(
            checkpoint.generation,
            Sensitivity(
                is_calibrated=self._sequences is not None,
                experts=costs[..., :-1],
                expert_norms=costs[..., -1],
                tokens=np.stack([kept[layer]["tokens"] for layer in config.moe_layers]),
                linears={name: values[:, :-1] for name, values in linears.items()},
                linear_norms={name: values[:, -1] for name, values in linears.items()},
            ),
        )


def _costs(found: QuantizedLinear) -> Float[np.ndarray, " sums"]:
    """The errors of all widths, then the norm."""
    return np.array([*found.errors.values(), found.norm])
