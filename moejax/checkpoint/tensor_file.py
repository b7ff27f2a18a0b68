"""The header of a safetensors file: where each tensor lies, without reading any data.

Eight bytes hold the length of a JSON object, little endian; the object maps names to dtype, shape
and the bytes `[start, end)` that count from the end of the header. The tensors cover every byte
after it exactly once.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, TypeGuard

from moejax.checkpoint import strict_json
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
        entries = strict_json.parse(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not a JSON object ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a map of strings")
    tensors = {
        name: _stored_tensor(name, entry, path, 8 + size, file_bytes)
        for name, entry in entries.items()
    }
    _check_cover(path, tensors, 8 + size, file_bytes)
    return Header(tensors, metadata)


def _check_cover(path: Path, tensors: dict[str, StoredTensor], base: int, file_bytes: int) -> None:
    at, before = base, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset < at:
            raise CheckpointError(
                f"tensor '{tensor.name}' in {path}: starts at byte {tensor.offset}, "
                f"but {before} ends at byte {at}: they overlap"
            )
        if tensor.offset > at:
            raise CheckpointError(
                f"tensor '{tensor.name}' in {path}: starts at byte {tensor.offset}, "
                f"but {before} ends at byte {at}: the bytes between belong to no tensor"
            )
        at, before = tensor.offset + tensor.num_bytes, f"'{tensor.name}'"
    if at != file_bytes:
        raise CheckpointError(
            f"{path}: {before} ends at byte {at} of a file of {file_bytes} bytes: "
            "the bytes after it belong to no tensor"
        )


def _stored_tensor(name: str, entry: Any, path: Path, base: int, file_bytes: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or not _are_integers(shape)
        or not _are_integers(offsets)
        or len(offsets) != 2
    ):
        raise CheckpointError(f"tensor '{name}' in {path}: broken header entry {entry}")
    start, end = offsets
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"tensor '{name}' in {path}: dtype {dtype} is not supported")
    needed = math.prod(shape) * ITEM_SIZES[dtype]
    if min(shape, default=1) < 0 or start < 0 or end - start != needed:
        raise CheckpointError(
            f"tensor '{name}' in {path}: {dtype} {shape} needs {needed} bytes, "
            f"the header gives it {start} to {end}"
        )
    if base + end > file_bytes:
        raise CheckpointError(
            f"tensor '{name}' in {path}: ends at byte {base + end} of a file of {file_bytes} bytes"
        )
    return StoredTensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        path=path,
        offset=base + start,
        num_bytes=end - start,
    )


def _are_integers(value: Any) -> TypeGuard[list[int]]:
    # In Python, true is an int too.
    return isinstance(value, list) and all(
        type(item) is int and abs(item) < 1 << 63 for item in value
    )
