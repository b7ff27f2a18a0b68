"""One dense tensor as an Orbax checkpoint of its own, so that a reader holds one at a time."""

import contextlib
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Shaped

from moejax.errors import CheckpointError

_KEY = "array"
# Chunks are read in parallel, and bound what Orbax holds beside the tensor itself.
_CHUNK_BYTES = 32 << 20


def save(path: Path, array: Shaped[np.ndarray, "..."]) -> None:
    """Writes one array as plain chunks of Zarr: bfloat16 hardly compresses."""
    options = {_KEY: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)}
    with _orbax(path) as checkpointer:
        checkpointer.save(path.absolute(), {_KEY: array}, save_args=options)


def restore(path: Path) -> Shaped[np.ndarray, "..."]:
    """The array that `save` wrote. A missing chunk reads as zeros: check the CRC-32."""
    if not path.is_dir():
        raise CheckpointError(f"tensor '{path.name}' in {path}: no such folder")
    with _orbax(path) as checkpointer:
        return np.asarray(checkpointer.restore(path.absolute())[_KEY])


def crc32(array: Shaped[np.ndarray, "..."]) -> int:
    """CRC-32 of the bytes of an array, row by row."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


@contextlib.contextmanager
def _orbax(path: Path) -> Iterator[ocp.Checkpointer]:
    # Orbax reports every step of every save through absl's logger.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False))
    except Exception as error:  # Orbax and TensorStore raise whatever the layer below raised.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"tensor '{path.name}' in {path}: {reason}") from error
    finally:
        logger.setLevel(level)
