"""A folder that appears whole or not at all."""

import contextlib
import fcntl
import glob
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from moejax.errors import CheckpointError

# A folder is locked right after it was made; until then nobody must take it for abandoned.
_GRACE_SECONDS = 60
# File systems allow 255; the folder is made under a longer name first.
_MAX_NAME_BYTES = 255 - len("..partial-") - 32


def work_folder(target: Path) -> Path:
    """Where a quantisation is at work, and where an earlier try left what it had done."""
    return target.parent / f".{target.name}.quantizing"


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Gives a new folder beside `target`, and renames it to that if the body succeeds.

    It is removed if the body fails. What a killed process left is removed by the next one.
    """
    check_name(target)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists: it is not overwritten")
    folder = target.parent / f"{_prefix(target)}{uuid.uuid4().hex}"
    lock = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
        if target.exists():
            raise CheckpointError(f"{target} exists: another process made it meanwhile")
        folder.rename(target)
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(f"cannot write {target}: {error.strerror}{name}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def check_name(target: Path) -> None:
    """Refuses what cannot be the name of a folder, before anything is made beside it."""
    if target.name in ("", ".."):
        raise CheckpointError(f"cannot write {str(target)!r}: it is no name of a new folder")
    try:
        size = len(target.name.encode())
        str(target).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"cannot write {str(target)!r}: the name is not UTF-8") from error
    if "\0" in str(target):
        raise CheckpointError(f"cannot write {str(target)!r}: the name holds a NUL")
    if size > _MAX_NAME_BYTES:
        raise CheckpointError(
            f"cannot write {target}: the name has {size} bytes, at most {_MAX_NAME_BYTES}"
        )


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _remove_abandoned(target: Path) -> None:
    for folder in target.parent.glob(f"{glob.escape(_prefix(target))}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < _GRACE_SECONDS:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
