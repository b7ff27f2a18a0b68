"""A Hugging Face folder is converted once, into a cache, and found there the next time."""

import fcntl
import hashlib
import os
import re
from pathlib import Path

from moejax.arena import format
from moejax.checkpoint import layout, manifest
from moejax.errors import CheckpointError
from moejax_converters.convert import convert


def converted(source: Path | str, *, progress: bool = True) -> Path:
    """The checkpoint of a folder: itself if it is one, else its conversion in the cache.

    The cache is `$MOEJAX_CACHE`, else `$XDG_CACHE_HOME/moejax`, else `~/.cache/moejax`. Processes
    that want the same conversion wait for the first one. In a program of several JAX processes,
    call this before `jax.distributed.initialize`.
    """
    source = Path(source)
    if os.path.isfile(layout.manifest_path(source)):
        return source
    if not os.path.isdir(source):
        raise CheckpointError(
            f"{source}: no such folder; a model is a folder, from moejax-convert or Hugging Face"
        )
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"{source} is not a model: neither {layout.manifest_path(source).name} of moejax "
            "nor config.json of Hugging Face is in it"
        )
    root = cache_folder()
    # Short and plain, whatever the folder is called: the key tells two of them apart.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", source.resolve().name)[:64] + f"-{_key(source)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"the cache {root} cannot be written ({error.strerror}): "
            "set MOEJAX_CACHE to a folder that can"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not layout.manifest_path(root / name).is_file():
            convert(source, root / name, progress=progress)
    finally:
        os.close(lock)
    return root / name


def cache_folder() -> Path:
    """Where conversions are kept."""
    if folder := os.environ.get("MOEJAX_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "moejax"
    return Path.home() / ".cache" / "moejax"


def _key(source: Path) -> str:
    """Changes when the folder, a file in it or our format changes."""
    lines = [str(source.resolve()), str(format.VERSION), *manifest.KEYS]
    for path in sorted(source.iterdir()):
        if path.is_file():
            stat = path.stat()
            lines.append(f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:16]
