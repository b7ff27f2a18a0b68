"""`moejax.json`: the file that makes a folder a checkpoint."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from moejax import config as model_config
from moejax.arena import format
from moejax.checkpoint import layout
from moejax.config import ModelConfig
from moejax.errors import CheckpointError, ConfigError

_KEYS = {"format_version", "config", "generation", "dense"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseTensor:
    """What a stacked dense tensor must be."""

    shape: tuple[int, ...]
    dtype: str
    """bfloat16 or float32."""
    crc32: int
    """Of its bytes, row by row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of `moejax.json`."""

    config: ModelConfig
    generation: dict[str, Any]
    """eos_token_ids, and what the source gave of: temperature, top_p, top_k, min_p, bos_token_id,
    pad_token_id."""
    dense: dict[str, DenseTensor]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `moejax.json`."""
    data = {
        "format_version": format.VERSION,
        "config": model_config.config_to_json(manifest.config),
        "generation": manifest.generation,
        "dense": {
            name: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "crc32": f"{tensor.crc32:08x}",
            }
            for name, tensor in sorted(manifest.dense.items())
        },
    }
    with layout.manifest_path(folder).open("x", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `moejax.json`. Raises CheckpointError, in one line."""
    path = layout.manifest_path(folder)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a moejax checkpoint: {path.name}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != format.VERSION:
        raise CheckpointError(
            f"{path}: format version {version}, this moejax reads {format.VERSION}: "
            "convert the model again"
        )
    if set(data) != _KEYS:
        raise CheckpointError(f"{path}: needs the keys {sorted(_KEYS)}, has {sorted(data)}")
    try:
        config = model_config.config_from_json(data["config"])
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    try:
        dense = {name: _dense_tensor(entry) for name, entry in data["dense"].items()}
        generation = dict(data["generation"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: broken entry ({error!r})") from error
    return Manifest(config=config, generation=generation, dense=dense)


def _dense_tensor(entry: dict[str, Any]) -> DenseTensor:
    if entry["dtype"] not in format.DTYPES:
        raise ValueError(f"dtype {entry['dtype']}")
    return DenseTensor(
        shape=tuple(int(n) for n in entry["shape"]),
        dtype=entry["dtype"],
        crc32=int(entry["crc32"], 16),
    )
