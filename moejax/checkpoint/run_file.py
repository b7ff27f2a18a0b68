"""A file of runs: a safetensors file with one `uint32[experts, words]` tensor per kind of run.

The number of the layer and the CRC-32 of every run stand in the header, which is written last: its
size is known before, since each CRC takes eight hexadecimal digits. Data start at a multiple of
4096 bytes. `crc32` is the one number that binds a file to its checkpoint.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import UInt32

from moejax.checkpoint import strict_json, tensor_file
from moejax.errors import CheckpointError

_ALIGNMENT = 4096


class RunWriter:
    """Writes the runs of the experts of one layer, in any order, one in memory at a time."""

    def __init__(
        self, path: Path, *, layer: int, num_experts: int, words: Mapping[str, int]
    ) -> None:
        self.path = path
        self._layer = layer
        self._num_experts = num_experts
        self._words = dict(words)
        self._crcs: dict[str, list[int | None]] = {name: [None] * num_experts for name in words}
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

    def put(self, name: str, expert: int, run: UInt32[np.ndarray, " words"]) -> None:
        """Writes the run `name` of one expert."""
        if run.size != self._words[name]:
            raise ValueError(f"run {name} has {self._words[name]} words, got {run.size}")
        if not 0 <= expert < self._num_experts:
            raise ValueError(f"expert {expert} of {self._num_experts}")
        if self._crcs[name][expert] is not None:
            raise ValueError(f"run {name} of expert {expert} is written twice")
        data = memoryview(np.ascontiguousarray(run, "<u4")).cast("B")
        self._file.seek(self._data_start + self._offsets()[name][0] + expert * run.size * 4)
        self._file.write(data)
        self._crcs[name][expert] = zlib.crc32(data)

    @property
    def crc32(self) -> int:
        """CRC-32 of the CRCs of all runs, once they are written."""
        return _crc_of_crcs({n: [crc or 0 for crc in crcs] for n, crcs in self._crcs.items()})

    def _finish(self) -> None:
        for name, crcs in self._crcs.items():
            if None in crcs:
                raise ValueError(f"{self.path}: run {name} of expert {crcs.index(None)} is missing")
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _offsets(self) -> dict[str, tuple[int, int]]:
        offsets = {}
        at = 0
        for name, words in self._words.items():
            offsets[name] = (at, at + self._num_experts * words * 4)
            at = offsets[name][1]
        return offsets

    def _header(self) -> bytes:
        entries: dict[str, object] = {
            "__metadata__": {"layer": str(self._layer)}
            | {
                f"{name}.crc32": " ".join(f"{crc or 0:08x}" for crc in crcs)
                for name, crcs in self._crcs.items()
            }
        }
        for name, (start, end) in self._offsets().items():
            entries[name] = {
                "dtype": "U32",
                "shape": [self._num_experts, self._words[name]],
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
    runs: dict[str, UInt32[np.ndarray, "experts words"]]
    """Read-only memory maps."""
    crcs: dict[str, tuple[int, ...]]

    def verify(self, expert: int) -> None:
        """Raises CheckpointError unless all runs of the expert have the CRC-32 of the header."""
        for name, runs in self.runs.items():
            crc = zlib.crc32(memoryview(runs[expert]).cast("B"))
            if crc != self.crcs[name][expert]:
                raise CheckpointError(
                    f"tensor '{name}' in {self.path}: expert {expert} is damaged "
                    f"(CRC-32 {crc:08x}, needed {self.crcs[name][expert]:08x})"
                )


def open_run_file(
    path: Path, *, layer: int, num_experts: int, words: Mapping[str, int], crc32: int
) -> RunFile:
    """Maps the runs of a file, after checking that it holds these, in full.

    `crc32` is that of the writer.
    """
    header = tensor_file.read_header(path)
    if (found := header.metadata.get("layer")) != str(layer):
        raise CheckpointError(f"{path}: holds the experts of layer {found}, needed layer {layer}")
    runs: dict[str, np.ndarray] = {}
    crcs: dict[str, tuple[int, ...]] = {}
    for name, run_words in words.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor '{name}' in {path}: missing")
        shape = (num_experts, run_words)
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
        if len(crcs[name]) != num_experts:
            raise CheckpointError(
                f"tensor '{name}' in {path}: {len(crcs[name])} CRC-32 for {num_experts} experts"
            )
        runs[name] = np.memmap(path, "<u4", mode="r", offset=tensor.offset, shape=shape)
    if (crc := _crc_of_crcs(crcs)) != crc32:
        raise CheckpointError(
            f"{path}: not the file that belongs to this checkpoint "
            f"(CRC-32 of its runs {crc:08x}, needed {crc32:08x})"
        )
    return RunFile(path, runs, crcs)


def _crc_of_crcs(crcs: Mapping[str, Sequence[int]]) -> int:
    """Kinds of runs by name; of each, the experts in order, as `uint32`, little endian."""
    return zlib.crc32(b"".join(np.asarray(crcs[name], "<u4").tobytes() for name in sorted(crcs)))
