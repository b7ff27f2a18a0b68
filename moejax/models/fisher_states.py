"""The hidden states of a calibration, in a folder: what a restart goes on from."""

import dataclasses
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from moejax.checkpoint import strict_json
from moejax.errors import CheckpointError

_FILE = "calibration.json"


@dataclasses.dataclass(slots=True, kw_only=True)
class _Done:
    """What is complete, with the CRC-32 of each file: all that `calibration.json` says."""

    key: str
    inputs: list[int]
    """Of the inputs of layer 0, 1, …; the last are those of the norm after all layers."""
    steps: int
    """Steps backward: the first is that through norm and head, then one for each layer."""
    cotangents: int
    """Of what the last step backward left."""


class States:
    """Files of all sequences' hidden states, and how far the calibration has come.

    Inputs of layers are kept until the end; the cotangents of a step stay until the next step is
    complete. A folder serves one process at a time. What ends with the process, or with the
    machine, is found out by the checksums, and then all starts anew.
    """

    def __init__(
        self, folder: Path, key: str, shape: tuple[int, int, int], dtype: np.dtype
    ) -> None:
        """`key`: stands for everything that the states depend on. `shape`: [n, length, hidden]."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shape, self._dtype = folder, shape, dtype
        found = _read(folder / _FILE)
        if found is None or found.key != key or not self._are_whole(found):
            found = _Done(key=key, inputs=[], steps=0, cotangents=0)
        self._done = found
        # Before a file is touched: an old state never stands beside new files.
        self._write_done()
        self._next = 0

    @property
    def num_inputs(self) -> int:
        """Layers whose inputs are complete; beyond the last layer: those of the norm."""
        return len(self._done.inputs)

    @property
    def num_steps(self) -> int:
        """Steps backward that are done."""
        return self._done.steps

    def inputs(self, layer: int) -> Shaped[np.ndarray, "n length hidden"]:
        """The inputs of a layer, mapped for reading."""
        return self._map(self._inputs_path(layer))

    def cotangents(self) -> Shaped[np.ndarray, "n length hidden"]:
        """What the last step backward left, mapped for reading."""
        return self._map(self._cotangents_path(self._done.steps))

    def put_inputs(self, rows: Iterable[Shaped[np.ndarray, "length hidden"]]) -> None:
        """Writes the inputs of the next layer, sequence by sequence."""
        crc32 = self._put(self._inputs_path(len(self._done.inputs)), rows)
        self._done.inputs.append(crc32)
        self._write_done()

    def put_cotangents(self, rows: Iterable[Shaped[np.ndarray, "length hidden"]]) -> None:
        """Writes what the next step leaves. The step is not done before `finish_step`."""
        self._next = self._put(self._cotangents_path(self._done.steps + 1), rows)

    def finish_step(self) -> None:
        """The step whose cotangents were put is done."""
        self._done.steps += 1
        self._done.cotangents = self._next
        self._write_done()

    def _put(self, path: Path, rows: Iterable[np.ndarray]) -> int:
        crc32 = 0
        with path.open("wb") as file:
            for row in rows:
                data = memoryview(np.ascontiguousarray(row).view(np.uint8)).cast("B")
                file.write(data)
                crc32 = zlib.crc32(data, crc32)
        return crc32

    def _map(self, path: Path) -> np.ndarray:
        return np.memmap(path, self._dtype, "r", shape=self._shape)

    def _are_whole(self, done: _Done) -> bool:
        """Whether the files are there that the steps ahead will read."""
        needed = done.inputs[: len(done.inputs) - done.steps]
        files = [(self._inputs_path(n), crc32) for n, crc32 in enumerate(needed)]
        if done.steps:
            files.append((self._cotangents_path(done.steps), done.cotangents))
        return all(self._is_whole(path, crc32) for path, crc32 in files)

    def _is_whole(self, path: Path, crc32: int) -> bool:
        try:
            rows, size = self._map(path), path.stat().st_size
        except (OSError, ValueError):  # ValueError: too short to be mapped
            return False
        found = 0
        for row in rows:
            found = zlib.crc32(memoryview(row.view(np.uint8)).cast("B"), found)
        return size == rows.nbytes and found == crc32

    def _inputs_path(self, layer: int) -> Path:
        return self._folder / f"inputs.{layer}"

    def _cotangents_path(self, step: int) -> Path:
        # Those of two steps: a step that is not completed can be repeated.
        return self._folder / f"cotangents.{step % 2}"

    def _write_done(self) -> None:
        partial = self._folder / f"{_FILE}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self._done), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._folder / _FILE)


def _read(path: Path) -> _Done | None:
    try:
        data: Any = strict_json.read(path)
    except CheckpointError:
        return None
    if not isinstance(data, dict) or set(data) != {f.name for f in dataclasses.fields(_Done)}:
        return None
    numbers = data["inputs"]
    are_numbers = isinstance(numbers, list) and all(
        type(n) is int for n in (*numbers, data["steps"], data["cotangents"])
    )
    if not are_numbers or not 0 <= data["steps"] <= len(numbers) or type(data["key"]) is not str:
        return None
    return _Done(**data)
