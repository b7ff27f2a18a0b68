"""The header of a safetensors file: where each tensor lies, without reading any data.

Eight bytes hold the length of a JSON object, little endian; the object maps names to dtype, shape
and the bytes `[start, end)` that count from the end of the header.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from moejax.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
ITEM_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file. `dtype` is spelled as the file does; `offset` counts from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What a file holds."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The header of a safetensors file. Raises CheckpointError if it, or the file, is damaged."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start == b"version ":
                raise CheckpointError(f"{path}: a pointer of Git LFS, not the file: git lfs pull")
            size = int.from_bytes(start, "little")
            if file_bytes < 8 or size > min(file_bytes - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or cut short "
                    f"({file_bytes} bytes, a header of {size})"
                )
            text = file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", {})
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: the header is not a JSON object ({error})") from error
    tensors = {
        name: _stored_tensor(name, entry, path, 8 + size, file_bytes)
        for name, entry in entries.items()
    }
    return Header(tensors, metadata)


def _stored_tensor(name: str, entry: Any, path: Path, base: int, file_bytes: int) -> StoredTensor:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(int(n) for n in entry["shape"])
        start, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"tensor '{name}' in {path}: broken header entry {entry}") from error
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"tensor '{name}' in {path}: dtype {dtype} is not supported")
    needed = math.prod(shape) * ITEM_SIZES[dtype]
    if min(shape, default=1) < 0 or start < 0 or end - start != needed:
        raise CheckpointError(
            f"tensor '{name}' in {path}: {dtype} {list(shape)} needs {needed} bytes, "
            f"the header gives it {start} to {end}"
        )
    if base + end > file_bytes:
        raise CheckpointError(
            f"tensor '{name}' in {path}: ends at byte {base + end} of a file of {file_bytes} bytes"
        )
    return StoredTensor(
        name=name,
        dtype=dtype,
        shape=shape,
        path=path,
        offset=base + start,
        num_bytes=end - start,
    )
