"""Folders of Any-Precision LLM as sources of a conversion: their codes are taken as they are."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from moejax.arena import format
from moejax.checkpoint import ExpertFile
from moejax.checkpoint.tensor_file import StoredTensor
from moejax.config import Quantization
from moejax_converters import any_precision
from moejax_converters.any_precision import PackedLinear
from moejax_converters.source import Source


class PackedSource:
    """A packed folder that looks like one of weights: a packed linear gives those of its codes."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._prefix = ""
        self._values: Shaped[np.ndarray, "rows columns"] | None = None
        self.tensors: dict[str, StoredTensor] = any_precision.shown(source)

    @property
    def folder(self) -> Path:
        return self._source.folder

    @property
    def config(self) -> dict[str, Any]:
        return self._source.config

    def read(
        self, name: str, *, index: int | None = None, rows: tuple[int, int] | None = None
    ) -> Shaped[np.ndarray, "..."]:
        """As `Source.read`; of a packed linear, the weights of its largest width."""
        prefix = name.removesuffix(".weight")
        if name in self._source.tensors:
            return self._source.read(name, index=index, rows=rows)
        if self._values is None or prefix != self._prefix:
            linear = any_precision.read_linear(self._source, prefix)
            self._prefix = prefix
            self._values = any_precision.values(linear, linear.parent_bits)
        found = self._values if index is None else self._values[index]
        return found if rows is None else found[rows[0] : rows[1]]


def quantization(source: Source) -> Quantization:
    """How the experts of a packed folder are stored: each row has its own tables."""
    scheme = any_precision.scheme(source.config)
    return Quantization(seed_bits=scheme.seed_bits, parent_bits=scheme.parent_bits)


def put_expert(
    source: Source, names: dict[str, str], file: ExpertFile, layer: int, expert: int
) -> None:
    """Writes the planes and tables of an expert. `names`: `any_precision.packed_names`."""
    linears = any_precision.expert_linears(source, names, layer, expert)
    gate, up, down = (linears[part] for part in any_precision.EXPERT_PARTS)
    file.put_runs(
        expert,
        "gate_up",
        _runs(
            format.stack_halves(gate.codes, up.codes),
            {bits: format.stack_halves(gate.tables[bits], up.tables[bits]) for bits in gate.tables},
            gate,
        ),
    )
    pad = [(0, -len(down.codes) % format.ATOM_ROWS), (0, 0)]
    tables = {bits: np.pad(table, pad) for bits, table in down.tables.items()}
    file.put_runs(expert, "down", _runs(np.pad(down.codes, pad), tables, down))


def _runs(
    codes: np.ndarray, tables: dict[int, np.ndarray], linear: PackedLinear
) -> dict[str, np.ndarray]:
    planes = format.encode_planes(codes, linear.parent_bits)
    found = {f"plane.{number}": run for number, run in enumerate(planes)}
    return found | {f"table.{bits}": format.encode_table(t) for bits, t in tables.items()}
