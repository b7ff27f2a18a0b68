"""Compiled kernels on disk, beside the programs that jax keeps: the next start finds them.

Triton's passes take seconds for each kernel, and a server has dozens. A file holds what came of one
module; its name is a digest of all that decides about it.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax

FOLDER = "kernels"
"""In the folder of jax's compilation cache; without one nothing is kept."""
# Of the options: a path on this machine, of files that come with Triton.
_NOT_DECISIVE = ("extern_libs",)

logger = logging.getLogger(__name__)


def keep_compiled(
    compile_module: Callable[..., Any], result_type: type[Any]
) -> Callable[[Any, Any, Any, Any], Any]:
    """A compiler of modules (module, backend, options, target) that looks on disk first.

    `result_type`: the dataclass of its results, whose fields are JSON values. A file that cannot be
    read or written costs the time to compile, and a line in the log.
    """

    def compile_or_read(module: Any, backend: Any, options: Any, target: Any) -> Any:
        root = jax.config.jax_compilation_cache_dir
        if root is None:
            return compile_module(module, backend, options, target)
        name = digest(str(module), options, target)
        path = pathlib.Path(root) / FOLDER / f"{name}.json"
        try:
            return result_type(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is not read, and made anew: %s", path, error)
        found = compile_module(module, backend, options, target)
        try:
            _write(path, json.dumps(dataclasses.asdict(found)))
        except (OSError, TypeError) as error:
            logger.warning("%s is not written: %s", path, error)
        return found

    return compile_or_read


def digest(module: str, options: Any, target: Any) -> str:
    """What a kernel is kept under: its module, how and for what it is compiled, by which Triton."""
    decisive = {k: v for k, v in sorted(vars(options).items()) if k not in _NOT_DECISIVE}
    versions = [importlib.metadata.version(name) for name in ("triton", "jax-triton")]
    parts = [module, repr(decisive), repr(target), *versions]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _write(path: pathlib.Path, text: str) -> None:
    """At once: another process may read or write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
