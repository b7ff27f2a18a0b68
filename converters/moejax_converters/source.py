"""A Hugging Face folder: its configuration, and its tensors one at a time.

Headers of all shards are read at once, data only when asked for. This is the only module that
knows the layout of such a folder.
"""

import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from moejax.checkpoint import strict_json, tensor_file
from moejax.checkpoint.tensor_file import StoredTensor
from moejax.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""The dtypes of tensors that can be read, as safetensors spells them."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Source:
    """An open folder. Raises CheckpointError if it is not complete."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        # Those of os say no to a name that no file can have; those of Path raise.
        if not os.path.isdir(self.folder):
            raise CheckpointError(f"{self.folder}: no such folder")
        if not (self.folder / "config.json").is_file():
            raise CheckpointError(f"{self.folder} is not a Hugging Face folder: no config.json")
        self.config: dict[str, Any] = read_json(self.folder / "config.json")
        _refuse_quantized(self.config)
        self.tensors: dict[str, StoredTensor] = _read_headers(self.folder)

    def read(
        self, name: str, *, index: int | None = None, rows: tuple[int, int] | None = None
    ) -> Shaped[np.ndarray, "..."]:
        """A tensor, or entry `index` of its first axis; of that, perhaps only `rows` [start, end).

        Only what is returned is read.
        """
        tensor = self.tensors[name]
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise CheckpointError(
                f"tensor '{name}' in {tensor.path}: dtype {tensor.dtype} is not supported "
                f"(supported: {', '.join(DTYPES)})"
            )
        shape, offset = tensor.shape, tensor.offset
        if index is not None:
            shape = shape[1:]
            offset += index * math.prod(shape) * dtype.itemsize
        if rows is not None:
            offset += rows[0] * math.prod(shape[1:]) * dtype.itemsize
            shape = (rows[1] - rows[0], *shape[1:])
        count = math.prod(shape)
        try:
            data = np.fromfile(tensor.path, dtype, count, offset=offset)
        except OSError as error:
            raise CheckpointError(f"tensor '{name}' in {tensor.path}: {error.strerror}") from error
        if data.size != count:
            raise CheckpointError(f"tensor '{name}' in {tensor.path}: the file is cut short")
        return data.reshape(shape)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    data = strict_json.read(path)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return data


def _refuse_quantized(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            f"model type '{config.get('model_type')}': quantized checkpoints are not supported yet "
            f"(quantization_config: {method})"
        )


def _read_headers(folder: Path) -> dict[str, StoredTensor]:
    index = _read_index(folder)
    if index:
        shards = sorted(set(index.values()))
        for shard in shards:
            if not (folder / shard).is_file():
                name = next(name for name, file in index.items() if file == shard)
                raise CheckpointError(
                    f"tensor '{name}' in {folder / shard}: no such file, "
                    f"but {_INDEX} lists it ({len(shards)} shards)"
                )
    elif (folder / _SINGLE).is_file():
        shards = [_SINGLE]
    else:
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        _refuse_without_safetensors(folder)
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in tensor_file.read_header(folder / shard).tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor '{name}' is both in {tensors[name].path} and in {tensor.path}"
                )
            if index and name not in index:
                raise CheckpointError(
                    f"tensor '{name}' is in {tensor.path}, but {_INDEX} does not list it"
                )
            tensors[name] = tensor
    for name, shard in index.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError(f"tensor '{name}' is not in {folder / shard}, as {_INDEX} says")
    return tensors


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name → file name; empty where there is no index."""
    path = folder / _INDEX
    if not os.path.lexists(path):
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: tensor '{name}' is in {shard!r}, not a file name")
    return weight_map


def _refuse_without_safetensors(folder: Path) -> None:
    for pattern in _PICKLES:
        for path in sorted(folder.glob(pattern)):
            raise CheckpointError(
                f"{path}: weights in pickle files are not read, since opening one can run code; "
                "save the model as safetensors"
            )
    raise CheckpointError(
        f"{folder}: no weights: neither {_INDEX} nor {_SINGLE} nor any other *.safetensors"
    )
