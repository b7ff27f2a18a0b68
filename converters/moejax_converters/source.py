"""A Hugging Face folder: its configuration, and its tensors one at a time.

Headers of all shards are read at once, data only when asked for. This is the only module that
knows the layout of such a folder. Quantized tensors look like others: codes and scales are one
tensor of the values that they stand for.
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
from moejax_converters import quantized

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""The dtypes of weights, as safetensors spells them."""
CODES: dict[str, np.dtype] = {"I32": np.dtype(np.int32)}
"""Those of packed codes, which can be read but are no weights."""

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
        scheme = quantized.scheme(self.config)
        stored = _read_headers(self.folder)
        self._quantized = quantized.find(stored, scheme)
        parts = {part.name for q in self._quantized.values() for part in (q.codes, q.scales)}
        self.tensors: dict[str, StoredTensor] = {
            name: tensor for name, tensor in stored.items() if name not in parts
        } | {name: tensor.shown for name, tensor in self._quantized.items()}
        """Name → tensor. Of a quantized one `dtype`, `shape` and `num_bytes` are those of its
        values, as `read` gives them, and `path` and `offset` say where its codes are."""

    def read(
        self, name: str, *, index: int | None = None, rows: tuple[int, int] | None = None
    ) -> Shaped[np.ndarray, "..."]:
        """A tensor, or entry `index` of its first axis; of that, perhaps only `rows` [start, end).

        Only what is returned is read: of quantized tensors, the codes and scales of these rows, or
        of whole experts. The array may be a view with its axes swapped.
        """
        tensor = self.tensors[name]
        _check_piece(tensor, index, rows)
        if name in self._quantized:
            return self._quantized[name].read(_read_entries, index, rows)
        dtype = DTYPES.get(tensor.dtype, CODES.get(tensor.dtype))
        if dtype is None:
            raise CheckpointError(
                f"tensor '{name}' in {tensor.path}: dtype {tensor.dtype} is not supported "
                f"(supported: {', '.join(DTYPES)})"
            )
        shape, first = tensor.shape, 0
        if index is not None:
            shape = shape[1:]
            first = index * math.prod(shape)
        if rows is not None:
            first += rows[0] * math.prod(shape[1:])
            shape = (rows[1] - rows[0], *shape[1:])
        return _read_items(tensor, dtype, first, shape)


def _check_piece(tensor: StoredTensor, index: int | None, rows: tuple[int, int] | None) -> None:
    """Refuses a piece outside of the tensor: there are the bytes of another."""
    shape = tensor.shape if index is None else tensor.shape[1:]
    if (index is not None and not 0 <= index < tensor.shape[0]) or (
        rows is not None and not 0 <= rows[0] <= rows[1] <= shape[0]
    ):
        raise ValueError(f"{tensor.name} {list(tensor.shape)} has no piece {index=}, {rows=}")


def _read_entries(
    tensor: StoredTensor, dtype: np.dtype, start: int, stop: int
) -> Shaped[np.ndarray, "..."]:
    """Entries [start, stop) of the first axis, as a dtype of the size that they are stored in."""
    shape = tensor.shape[1:]
    return _read_items(tensor, dtype, start * math.prod(shape), (stop - start, *shape))


def _read_items(
    tensor: StoredTensor, dtype: np.dtype, first: int, shape: tuple[int, ...]
) -> Shaped[np.ndarray, "..."]:
    count = math.prod(shape)
    try:
        # A text, since numpy loses an interruption that comes while it asks a Path for its text.
        data = np.fromfile(
            str(tensor.path), dtype, count, offset=tensor.offset + first * dtype.itemsize
        )
    except OSError as error:
        raise CheckpointError(
            f"tensor '{tensor.name}' in {tensor.path}: {error.strerror}"
        ) from error
    if data.size != count:
        raise CheckpointError(f"tensor '{tensor.name}' in {tensor.path}: the file is cut short")
    return data.reshape(shape)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    data = strict_json.read(path)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return data


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
