"""Quantises a checkpoint: what must hold before, and the job that an interruption leaves behind."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from moejax.arena.geometry import choose_geometry
from moejax.checkpoint import Checkpoint, layout
from moejax.config import ModelConfig
from moejax.errors import CheckpointError, ConfigError
from moejax_converters import any_precision, families
from moejax_converters.calibration_text import calibration_sequences
from moejax_converters.convert import convert
from moejax_converters.quantize_job import Job, work_on
from moejax_converters.quantize_options import QuantizeOptions, dense_shapes, make_quantization
from moejax_converters.quantizer import Quantizer
from moejax_converters.source import Source


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
    shapes = dense_shapes(config)
    coded = {name: shapes[name] for name, _ in quantization.linears}
    choose_geometry(config, config.dtype, quantization, coded)
    sequences = _sequences(source, config, options)
    with work_on(target, _settings(source, options)) as job:
        checkpoint = _plain(source, job, progress)
        Quantizer(checkpoint, job, quantization, sequences, progress).run()


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
