"""Stores the experts of a checkpoint as nested codes, layer by layer.

An interrupted quantisation goes on where it stopped: see `quantize_job`.
"""

import dataclasses
import functools
import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tqdm
from jaxtyping import Float, Int32

from moejax.arena.format import encode_dense
from moejax.arena.geometry import choose_geometry, linear_shape, linear_shapes
from moejax.checkpoint import Checkpoint, CheckpointWriter, Sensitivity, layout
from moejax.config import DENSE_WIDTH, MAX_ROWS_PER_TABLE, ModelConfig, Quantization, rows_per_table
from moejax.errors import CheckpointError, ConfigError
from moejax.models.decoder import abstract_params, flatten_params
from moejax.models.fisher import LayerFisher, layer_fishers, with_prior
from moejax.models.whole import read_linear
from moejax.quant.linear import QuantizedLinear, start_quantizing
from moejax_converters import any_precision, families
from moejax_converters.calibration_text import calibration_sequences
from moejax_converters.convert import convert
from moejax_converters.generation import copy_tokenizer
from moejax_converters.quantize_job import Job, work_on
from moejax_converters.source import Source

_log = logging.getLogger(__name__)

LINEAR_GROUPS = {
    "attention": r"segments\.\d+\.\d+\.attention\..*weight",
    "shared": r"segments\.\d+\.\d+\.feed_forward\.(moe\.)?shared\.(gate|up|down)\.weight",
}
"""Dense tensors that can be stored as codes too."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """What to store."""

    calibration: Path | None
    """A text, or token ids; None: every weight counts the same."""
    seed_bits: int = 3
    parent_bits: int = 6
    rows_per_table: int | None = None
    """Rows that share their tables; None: more than one where rows are short."""
    linears: tuple[str, ...] = ()
    """Of LINEAR_GROUPS."""
    keep_dense: bool = False
    """Store width 16 as well."""
    sequences: int = 128
    length: int = 512
    """Of the calibration, in tokens."""

    def __post_init__(self) -> None:
        if self.seed_bits not in (2, 3):
            raise ConfigError(f"seed_bits must be 2 or 3, got {self.seed_bits}")
        if not self.seed_bits <= self.parent_bits <= 8:
            raise ConfigError(
                f"parent_bits must be from seed_bits ({self.seed_bits}) to 8, "
                f"got {self.parent_bits}"
            )
        if self.sequences < 1 or self.length < 2:
            raise ConfigError(
                "a calibration needs 1 sequence of 2 tokens at least, "
                f"got {self.sequences} of {self.length}"
            )
        if self.rows_per_table not in (None, 1, 2, 4, 8, 16, 32, MAX_ROWS_PER_TABLE):
            raise ConfigError(
                f"rows_per_table must be a power of two up to {MAX_ROWS_PER_TABLE}, "
                f"got {self.rows_per_table}"
            )
        for group in self.linears:
            if group not in LINEAR_GROUPS:
                raise ConfigError(f"linears: {group!r} is none of {', '.join(LINEAR_GROUPS)}")


def quantize(
    source: Path | str, target: Path | str, options: QuantizeOptions, *, progress: bool = True
) -> None:
    """Quantises a Hugging Face folder, or one of moejax at width 16, into the new folder `target`.

    After an interruption, the same call goes on where it stopped.

    Raises:
        CheckpointError, ConfigError: in one line.
    """
    source, target = Path(source), Path(target)
    # What cannot be done is refused here, before a conversion that may take hours.
    config = _source_config(source)
    quantization = make_quantization(config, options)
    shapes = _dense_shapes(config)
    coded = {name: shapes[name] for name, _ in quantization.linears}
    choose_geometry(config, config.dtype, quantization, coded)
    sequences = _sequences(source, config, options)
    with work_on(target, _settings(source, options)) as job:
        checkpoint = _plain(source, job, progress)
        _Quantizer(checkpoint, job, quantization, sequences, progress).run()


def make_quantization(config: ModelConfig, options: QuantizeOptions) -> Quantization:
    """What the options mean for a model. Raises ConfigError."""
    shapes = _dense_shapes(config)

    def rows(columns: int) -> int:
        return options.rows_per_table or rows_per_table(columns, options.parent_bits)

    names = []
    for group in options.linears:
        found = [
            name
            for name, shape in shapes.items()
            if re.fullmatch(LINEAR_GROUPS[group], name) and len(shape) == 3
        ]
        if not found:
            raise ConfigError(f"quantize-linears: {config.family} here has no {group} projections")
        names += found
    gate_up, down = linear_shapes(config)
    return Quantization(
        seed_bits=options.seed_bits,
        parent_bits=options.parent_bits,
        gate_up_rows_per_table=rows(gate_up.columns),
        down_rows_per_table=rows(down.columns),
        linears=tuple((name, rows(shapes[name][2])) for name in sorted(names)),
        has_dense=options.keep_dense,
    )


def _dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The stacked dense tensors of a model, by name."""
    params = flatten_params(abstract_params(config, config.dtype))
    return {name: tuple(leaf.shape) for name, leaf in params.items()}


def _source_config(source: Path) -> ModelConfig:
    """The model in a folder that can be quantised."""
    if layout.manifest_path(source).is_file():
        checkpoint = Checkpoint.open(source)
        is_quantized, config = checkpoint.quantization is not None, checkpoint.config
    else:
        folder = Source(source)
        is_quantized = any_precision.is_any_precision(folder.config)
        config = families.source_config(folder)
    if is_quantized:
        raise CheckpointError(f"{source} is quantised already: start from what it was made of")
    return config


def _sequences(
    source: Path, config: ModelConfig, options: QuantizeOptions
) -> Int32[np.ndarray, "count length"] | None:
    """The token sequences of the calibration, if there is one."""
    if options.calibration is None:
        return None
    most = config.max_position_embeddings
    if options.length > most:
        raise ConfigError(
            f"a calibration with sequences of {options.length} tokens: "
            f"the model has {most} positions"
        )
    return calibration_sequences(
        options.calibration,
        source,
        count=options.sequences,
        length=options.length,
        vocab_size=config.vocab_size,
    )


def _settings(source: Path, options: QuantizeOptions) -> dict[str, Any]:
    """What an earlier try must have been given, for this one to go on with it."""
    files = sorted(path for path in source.iterdir() if path.is_file()) if source.is_dir() else []
    stats = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    found = dataclasses.asdict(options) | {"linears": list(options.linears)}
    text = options.calibration
    if text is not None:
        try:
            found["calibration"] = hashlib.sha256(text.read_bytes()).hexdigest()
        except OSError as error:
            raise CheckpointError(f"{text}: {error.strerror}") from error
    return found | {"source": hashlib.sha256("\n".join(stats).encode()).hexdigest()}


def _plain(source: Path, job: Job, progress: bool) -> Checkpoint:
    if layout.manifest_path(source).is_file():
        return Checkpoint.open(source)
    if not layout.manifest_path(job.plain).is_file():
        convert(source, job.plain, progress=progress)
    return Checkpoint.open(job.plain)


class _Quantizer:
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
        layers = range(len(self._config.layers))
        todo = [n for n in layers if self._wanted(n) and self._job.kept(f"layer{n}") is None]
        count = len(todo) * self._config.moe.router.num_experts
        with tqdm.tqdm(
            total=count, desc="quantising", unit="expert", disable=None if self._progress else True
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
