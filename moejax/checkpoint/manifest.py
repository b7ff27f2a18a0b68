"""`moejax.json`: the file that makes a folder a checkpoint."""

import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

from moejax import config as model_config
from moejax.arena import format
from moejax.checkpoint import generation as generation_settings
from moejax.checkpoint import layout, strict_json
from moejax.config import ModelConfig, Quantization
from moejax.errors import CheckpointError, ConfigError

KEYS = (
    "config",
    "crc32",
    "dense",
    "experts",
    "format_version",
    "generation",
    "linears",
    "quantization",
    "sensitivity",
)
"""What `moejax.json` holds."""


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
    quantization: Quantization | None
    dense: dict[str, DenseTensor]
    linears: dict[str, DenseTensor]
    """Dense tensors that are stored as codes; `crc32` is of the CRCs of their runs."""
    experts: dict[int, int]
    """Layer → the CRC-32 of the CRCs of its runs."""
    sensitivity: int | None
    """CRC-32 of the file of sensitivities."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `moejax.json`."""
    settings = {
        "config": model_config.config_to_json(manifest.config),
        "generation": manifest.generation,
        "quantization": model_config.quantization_to_json(manifest.quantization),
    }
    costs = manifest.sensitivity
    data = {
        "format_version": format.VERSION,
        "crc32": f"{_crc32(settings):08x}",
        **settings,
        "dense": _tensors_to_json(manifest.dense),
        "linears": _tensors_to_json(manifest.linears),
        "sensitivity": None if costs is None else f"{costs:08x}",
        "experts": {str(layer): f"{crc:08x}" for layer, crc in sorted(manifest.experts.items())},
    }
    with layout.manifest_path(folder).open("x", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _tensors_to_json(tensors: dict[str, DenseTensor]) -> dict[str, Any]:
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "crc32": f"{tensor.crc32:08x}",
        }
        for name, tensor in sorted(tensors.items())
    }


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `moejax.json`. Raises CheckpointError, in one line."""
    path = layout.manifest_path(folder)
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: no name of a file, with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{folder} is not a moejax checkpoint: {path.name}: {reason}"
        ) from error
    data = strict_json.read(path)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    version = data.get("format_version")
    if type(version) is not int or version != format.VERSION:
        raise CheckpointError(
            f"{path}: format version {version!r}, this moejax reads {format.VERSION}: "
            "convert the model again"
        )
    if sorted(data) != sorted(KEYS):
        raise CheckpointError(
            f"{path}: needs the keys {sorted(KEYS)}, has {sorted(data)}: convert the model again"
        )
    try:
        config = model_config.config_from_json(data["config"])
        quantization = model_config.quantization_from_json(data["quantization"])
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if fault := generation_settings.fault(data["generation"], config.vocab_size):
        raise CheckpointError(f"{path}: generation: {fault}")
    try:
        dense = {name: _dense_tensor(entry) for name, entry in data["dense"].items()}
        linears = {name: _dense_tensor(entry) for name, entry in data["linears"].items()}
        costs = data["sensitivity"]
        sensitivity = None if costs is None else strict_json.parse_crc32(costs)
        experts = {n: strict_json.parse_crc32(crc) for n, crc in data["experts"].items()}
        needed = strict_json.parse_crc32(data["crc32"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: broken entry ({error!r})") from error
    if (crc := _crc32({key: data[key] for key in _SETTINGS})) != needed:
        raise CheckpointError(
            f"{path}: config, generation or quantization is not as it was written "
            f"(CRC-32 {crc:08x}, needed {needed:08x}): convert the model again"
        )
    layers = {str(layer): layer for layer in config.moe_layers}
    if set(experts) != set(layers):
        raise CheckpointError(
            f"{path}: experts of the layers {list(experts)}, needed {list(layers)}"
        )
    coded = () if quantization is None else tuple(name for name, _ in quantization.linears)
    if tuple(sorted(linears)) != coded or set(linears) & set(dense):
        raise CheckpointError(
            f"{path}: linears {sorted(linears)}, needed {list(coded)}, and none of them in dense"
        )
    if sensitivity is not None and quantization is None:
        raise CheckpointError(f"{path}: a sensitivity, but no quantization")
    return Manifest(
        config=config,
        generation=data["generation"],
        quantization=quantization,
        dense=dense,
        linears=linears,
        experts={layers[name]: crc for name, crc in experts.items()},
        sensitivity=sensitivity,
    )


_SETTINGS = ("config", "generation", "quantization")


def _crc32(settings: dict[str, Any]) -> int:
    """Of all as one JSON text: sorted keys, no blanks, ASCII."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode("ascii"))


def _dense_tensor(entry: dict[str, Any]) -> DenseTensor:
    if entry["dtype"] not in format.DTYPES:
        raise ValueError(f"dtype {entry['dtype']}")
    if not all(type(n) is int and n > 0 for n in entry["shape"]):
        raise ValueError(f"shape {entry['shape']}")
    return DenseTensor(
        shape=tuple(entry["shape"]),
        dtype=entry["dtype"],
        crc32=strict_json.parse_crc32(entry["crc32"]),
    )
