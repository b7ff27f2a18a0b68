"""One dense tensor as an Orbax checkpoint of its own, so that a reader holds one at a time."""

import concurrent.futures
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Shaped

from moejax.errors import CheckpointError

_KEY = "array"
# Chunks are read in parallel, and bound what Orbax holds beside the tensor itself.
_CHUNK_BYTES = 32 << 20


def save(path: Path, array: Shaped[np.ndarray, "..."]) -> None:
    """Writes one array as uncompressed chunks of Zarr."""
    options = {_KEY: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)}
    _with_orbax(path, lambda orbax: orbax.save(path.absolute(), {_KEY: array}, save_args=options))


def restore(path: Path) -> Shaped[np.ndarray, "..."]:
    """The array that `save` wrote. A missing chunk reads as zeros: check the CRC-32."""
    if not path.is_dir():
        raise CheckpointError(f"tensor '{path.name}' in {path}: no such folder")
    return np.asarray(_with_orbax(path, lambda orbax: orbax.restore(path.absolute())[_KEY]))


def crc32(array: Shaped[np.ndarray, "..."]) -> int:
    """CRC-32 of the bytes of an array, row by row."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _with_orbax(path: Path, call: Callable[[ocp.Checkpointer], Any]) -> Any:
    # Orbax reports every step through absl's logger, and every failure both there and by raising.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        # An interrupt reaches the main thread. That waits here until the other has ended, so that
        # no thread of Orbax goes on writing; and there is no event loop in Orbax's way.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(call, ocp.Checkpointer(handler)).result()
    except Exception as error:  # Orbax and TensorStore raise whatever the layer below raised.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"tensor '{path.name}' in {path}: {reason}") from error
    finally:
        logger.setLevel(level)
