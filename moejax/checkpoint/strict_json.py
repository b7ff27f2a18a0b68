"""JSON of files that others wrote: no key twice, and no nesting that could break a reader."""

import collections
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moejax.errors import CheckpointError

# Configurations have a handful of levels; Python's own limit is reached at thousands.
_MAX_DEPTH = 64
# The index of the largest checkpoints has a few tens of megabytes.
_MAX_BYTES = 1 << 29


def read(path: Path) -> Any:
    """The JSON value in a file. Raises CheckpointError, in one line."""
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise CheckpointError(f"{path}: {size} bytes are too many for a file of JSON")
        # Devices have no size, and no end.
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise CheckpointError(f"{path}: too long for a file of JSON")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name, or a name that is not UTF-8
        raise CheckpointError(f"{str(path)!r}: not the name of a file ({error})") from error
    try:
        return parse(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error


def parse(text: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises ValueError, in one line, with what is wrong."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise ValueError(f"nested deeper than {_MAX_DEPTH}")


def parse_crc32(value: Any) -> int:
    """The number that eight hexadecimal digits stand for. Raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{8}", value):
        raise ValueError(f"{value!r} is not the CRC-32 of anything: eight hexadecimal digits")
    return int(value, 16)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"key {twice!r} stands twice in an object")
    return found
