"""A file of runs: a safetensors file with one `uint32[count, words]` tensor per kind of run.

`count` is that of the experts of a layer, or of the layers that a stacked tensor holds. Whose runs
they are (the number of the layer, or the tensor's name) and the CRC-32 of every run stand in the
header, which is written last: its size is known before, since each CRC takes eight hexadecimal
digits. Data start at a multiple of 4096 bytes. `crc32` is the one number that binds a file to its
checkpoint.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import UInt32

from moejax.checkpoint import strict_json, tensor_file
from moejax.errors import CheckpointError

_ALIGNMENT = 4096


class RunWriter:
    """Writes the runs of some linears alike, in any order, one in memory at a time."""

    def __init__(self, path: Path, *, owner: str, count: int, words: Mapping[str, int]) -> None:
        self.path = path
        self._owner = owner
        self._count = count
        self._words = dict(words)
        self._crcs: dict[str, list[int | None]] = {name: [None] * count for name in words}
        self._data_start = len(self._header())
        self._file = path.open("xb")

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()

    def put(self, name: str, number: int, run: UInt32[np.ndarray, " words"]) -> None:
        """Writes the run `name` of one linear."""
        if name not in self._words:
            raise ValueError(f"run {name}: the file holds {list(self._words)}")
        if run.size != self._words[name]:
            raise ValueError(f"run {name} has {self._words[name]} words, got {run.size}")
        if not 0 <= number < self._count:
            raise ValueError(f"number {number} of {self._count}")
        if self._crcs[name][number] is not None:
            raise ValueError(f"run {name} of number {number} is written twice")
        data = memoryview(np.ascontiguousarray(run, "<u4")).cast("B")
        self._file.seek(self._data_start + self._offsets()[name][0] + number * run.size * 4)
        self._file.write(data)
        self._crcs[name][number] = zlib.crc32(data)

    @property
    def crc32(self) -> int:
        """CRC-32 of the CRCs of all runs, once they are written."""
        return _crc_of_crcs({n: [crc or 0 for crc in crcs] for n, crcs in self._crcs.items()})

    def _finish(self) -> None:
        for name, crcs in self._crcs.items():
            if None in crcs:
                raise ValueError(f"{self.path}: run {name} of number {crcs.index(None)} is missing")
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _offsets(self) -> dict[str, tuple[int, int]]:
        offsets = {}
        at = 0
        for name, words in self._words.items():
            offsets[name] = (at, at + self._count * words * 4)
            at = offsets[name][1]
        return offsets

    def _header(self) -> bytes:
        entries: dict[str, object] = {
            "__metadata__": {"owner": self._owner}
            | {
                f"{name}.crc32": " ".join(f"{crc or 0:08x}" for crc in crcs)
                for name, crcs in self._crcs.items()
            }
        }
        for name, (start, end) in self._offsets().items():
            entries[name] = {
                "dtype": "U32",
                "shape": [self._count, self._words[name]],
                "data_offsets": [start, end],
            }
        text = json.dumps(entries).encode()
        # The format allows blanks after the JSON.
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


@dataclasses.dataclass(frozen=True, slots=True)
class RunFile:
    """An open file of runs."""

    path: Path
    runs: dict[str, UInt32[np.ndarray, "count words"]]
    """Read-only memory maps."""
    crcs: dict[str, tuple[int, ...]]

    def verify(self, number: int, names: Collection[str] | None = None) -> None:
        """Raises CheckpointError unless runs of a linear have the CRC-32 of the header.

        `names`: which; None: all.
        """
        for name, runs in self.runs.items():
            if names is not None and name not in names:
                continue
            crc = zlib.crc32(memoryview(runs[number]).cast("B"))
            if crc != self.crcs[name][number]:
                raise CheckpointError(
                    f"tensor '{name}' in {self.path}: number {number} is damaged "
                    f"(CRC-32 {crc:08x}, needed {self.crcs[name][number]:08x})"
                )


def open_run_file(
    path: Path, *, owner: str, count: int, words: Mapping[str, int], crc32: int
) -> RunFile:
    """Maps the runs of a file, after checking that it holds these, in full.

    `crc32` is that of the writer.
    """
    header = tensor_file.read_header(path)
    if (found := header.metadata.get("owner")) != owner:
        raise CheckpointError(f"{path}: holds the runs of {found}, needed those of {owner}")
    runs: dict[str, np.ndarray] = {}
    crcs: dict[str, tuple[int, ...]] = {}
    for name, run_words in words.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor '{name}' in {path}: missing")
        shape = (count, run_words)
        if tensor.dtype != "U32" or tensor.shape != shape:
            raise CheckpointError(
                f"tensor '{name}' in {path}: {tensor.dtype} {list(tensor.shape)}, "
                f"needed U32 {list(shape)}"
            )
        try:
            listed = header.metadata[f"{name}.crc32"].split()
            crcs[name] = tuple(strict_json.parse_crc32(crc) for crc in listed)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"tensor '{name}' in {path}: no CRC-32 in the header") from error
        if len(crcs[name]) != count:
            raise CheckpointError(
                f"tensor '{name}' in {path}: {len(crcs[name])} CRC-32 for {count} runs"
            )
        runs[name] = np.memmap(path, "<u4", mode="r", offset=tensor.offset, shape=shape)
    if (crc := _crc_of_crcs(crcs)) != crc32:
        raise CheckpointError(
            f"{path}: not the file that belongs to this checkpoint "
            f"(CRC-32 of its runs {crc:08x}, needed {crc32:08x})"
        )
    return RunFile(path, runs, crcs)


def _crc_of_crcs(crcs: Mapping[str, Sequence[int]]) -> int:
    """Kinds of runs by name; of each, all in order, as `uint32`, little endian."""
    return zlib.crc32(b"".join(np.asarray(crcs[name], "<u4").tobytes() for name in sorted(crcs)))
