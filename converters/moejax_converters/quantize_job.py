"""The folder in which a quantisation is at work, and what it knows after an interruption."""

import contextlib
import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moejax.checkpoint import strict_json
from moejax.errors import CheckpointError
from moejax_converters import staging

_FILE = "job.json"
# What took time. A folder with none of these is removed when a job fails.
_WORTH_KEEPING = ("plain/moejax.json", "calibration", "*.npz")
# What other settings would have made otherwise.
_OF_SETTINGS = ("calibration", "*.npz")


class Job:
    """A work folder beside the target. What `done` names survives an interruption."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def new(self) -> Path:
        """What becomes the target."""
        return self.folder / "new"

    @property
    def plain(self) -> Path:
        """The checkpoint that the source is converted into first."""
        return self.folder / "plain"

    @property
    def calibration(self) -> Path:
        """What the calibration keeps."""
        return self.folder / "calibration"

    def keep(self, name: str, values: Mapping[str, np.ndarray]) -> None:
        """Keeps arrays under a name: all of them, or none if the process ends before."""
        path = self.folder / f"{name}.npz"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **dict(values))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)

    def kept(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays of a name, or None."""
        path = self.folder / f"{name}.npz"
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                return dict(file)
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return None  # damaged: what it says is found out again


@contextlib.contextmanager
def work_on(target: Path, settings: dict[str, Any]) -> Iterator[Job]:
    """Gives the work folder of a target: a new one, or that of an earlier try with these settings.

    If the body succeeds, `new` becomes the target and the rest is removed; else all of it stays,
    if it took time to make.

    Raises:
        CheckpointError: the target exists, another process is at it, or what lies there was begun
            with other settings.
    """
    staging.check_name(target)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists: it is not overwritten")
    folder = staging.work_folder(target)
    lock, is_ours = None, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"another process is quantising into {target}") from error
        is_ours = True
        _check_settings(folder, settings)
        yield Job(folder)
        if target.exists():
            raise CheckpointError(f"{target} exists: another process made it meanwhile")
        (folder / "new").rename(target)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(f"cannot write {target}: {error.strerror}{name}") from error
    finally:
        if lock is not None:
            if is_ours and not any(any(folder.glob(pattern)) for pattern in _WORTH_KEEPING):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / _FILE
    if path.exists():
        found = strict_json.read(path)
        if found == settings:
            return
        before = found if isinstance(found, dict) else {}
        names = sorted(name for name in settings if before.get(name) != settings[name])
        if any(any(folder.glob(pattern)) for pattern in _OF_SETTINGS):
            raise CheckpointError(
                f"{folder} holds a quantisation that was begun with other settings "
                f"({', '.join(names)}): go on with those, or remove the folder"
            )
        # Nothing of it depends on them, but for the plain checkpoint of another source.
        for part in ("new", *(["plain"] if "source" in names else [])):
            shutil.rmtree(folder / part, ignore_errors=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(settings, indent=1))
    partial.rename(path)
