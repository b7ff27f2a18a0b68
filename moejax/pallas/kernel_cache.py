"""Compiled kernels on disk, beside the programs that jax keeps: the next start finds them.

To turn a kernel's source into machine code takes seconds, and a server has dozens. A file holds
what came of one; its name is a digest of all that decides about it.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import secrets
from collections.abc import Callable
from typing import Any

import jax

FOLDER = "kernels"
"""In the folder of jax's compilation cache; without one nothing is kept."""

logger = logging.getLogger(__name__)


def read_or_make[T](parts: list[str], make: Callable[[], T], result_type: type[T]) -> T:
    """What is kept under these parts, or what `make` gives, which is kept then.

    A file that cannot be read or written costs the time to compile, and a line in the log.

    Args:
        parts: what decides about a kernel, but for the versions of its compilers.
        make: compiles it.
        result_type: a dataclass whose fields are JSON values.
    """
    root = jax.config.jax_compilation_cache_dir
    if root is None:
        return make()
    path = pathlib.Path(root) / FOLDER / f"{digest(parts)}.json"
    try:
        return result_type(**_checked(json.loads(path.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, RecursionError) as error:
        logger.warning("%s is not read, and made anew: %s", path, error)
    found: Any = make()
    try:
        kept = dataclasses.asdict(found)
        _write(path, json.dumps({"sha256": _sum_of(kept), "kernel": kept}))
    except (OSError, TypeError) as error:
        logger.warning("%s is not written: %s", path, error)
    made: T = found
    return made


def digest(parts: list[str]) -> str:
    """What a kernel is kept under."""
    versions = [importlib.metadata.version(name) for name in ("triton", "jax-triton")]
    return hashlib.sha256("\0".join([*parts, *versions]).encode()).hexdigest()


def _sum_of(kept: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _checked(read: Any) -> dict[str, Any]:
    """What a file holds of a kernel: a changed one would run as something else, or not at all."""
    kept: Any = read.get("kernel") if isinstance(read, dict) else None
    if not isinstance(kept, dict) or read.get("sha256") != _sum_of(kept):
        raise ValueError("it is damaged")
    return kept


def _write(path: pathlib.Path, text: str) -> None:
    """At once: another process may read or write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unlike those of tempfile, it may be read by whoever may read what jax keeps beside it.
    part = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
