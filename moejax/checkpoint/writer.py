"""Writing a checkpoint folder, piece by piece."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped, UInt32

from moejax.arena import format, geometry
from moejax.checkpoint import dense, layout, sensitivity
from moejax.checkpoint import generation as generation_settings
from moejax.checkpoint.manifest import DenseTensor, Manifest, write_manifest
from moejax.checkpoint.reader import Checkpoint
from moejax.checkpoint.run_file import RunWriter
from moejax.checkpoint.sensitivity import Sensitivity
from moejax.config import ModelConfig, Quantization


class CheckpointWriter:
    """Writes a checkpoint into a folder, which is created. It is one once `finish` has returned."""

    def __init__(
        self, folder: Path, config: ModelConfig, quantization: Quantization | None = None
    ) -> None:
        self.folder = folder
        self._config = config
        self._quantization = quantization
        self._dense: dict[str, DenseTensor] = {}
        self._linears: dict[str, DenseTensor] = {}
        self._experts: dict[int, int] = {}
        for part in (
            "dense",
            "experts",
            *(["linears"] if quantization is not None and quantization.linears else []),
        ):
            (folder / part).mkdir(parents=True, exist_ok=True)

    def put_dense(self, name: str, array: Shaped[np.ndarray, "..."]) -> None:
        """Writes a dense tensor, bfloat16 or float32."""
        if array.dtype.name not in format.DTYPES:
            raise ValueError(f"dense tensors are {list(format.DTYPES)}, {name} is {array.dtype}")
        if name in self._dense:
            raise ValueError(f"dense tensor {name} is written twice")
        dense.save(layout.dense_path(self.folder, name), array)
        self._dense[name] = DenseTensor(
            shape=array.shape, dtype=array.dtype.name, crc32=dense.crc32(array)
        )

    def copy_dense(self, source: Checkpoint, name: str) -> None:
        """Takes over a dense tensor of another checkpoint. What an earlier try left is replaced."""
        target = layout.dense_path(self.folder, name)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(layout.dense_path(source.folder, name), target)
        self._dense[name] = source.dense_tensor(name)

    def expert_file(self, layer: int) -> "ExpertFile":
        """The file of a layer's experts; a context manager."""
        return ExpertFile(self, layer)

    def put_expert_crc32(self, layer: int, crc32: int) -> None:
        """Says that a layer's file is complete, and what its CRC-32 is."""
        self._experts[layer] = crc32

    def put_linear(
        self,
        name: str,
        shape: tuple[int, int, int],
        dtype: str,
        runs: Mapping[str, UInt32[np.ndarray, "repeats words"]],
    ) -> None:
        """Writes the runs of a stacked dense tensor `[repeats, rows, columns]` of some dtype."""
        if self._quantization is None:
            raise ValueError("only a quantised checkpoint has linears")
        linear = geometry.linear_shape(self._quantization, name, shape)
        with RunWriter(
            layout.linears_path(self.folder, name),
            owner=name,
            count=shape[0],
            words=layout.linear_words(linear, dtype, self._quantization),
        ) as file:
            for run, values in runs.items():
                for repeat, words in enumerate(values):
                    file.put(run, repeat, words)
        self._linears[name] = DenseTensor(shape=shape, dtype=dtype, crc32=file.crc32)

    def finish(
        self,
        generation: dict[str, Any],
        costs: Sensitivity | None = None,
    ) -> None:
        """Writes `moejax.json`, which makes the folder a checkpoint.

        Args:
            generation: what FORMAT.md section 5 says.
            costs: what each width costs; of a quantised checkpoint, where it is known.
        """
        config, quantization = self._config, self._quantization
        if set(self._experts) != set(config.moe_layers):
            raise ValueError(
                f"experts of the layers {sorted(self._experts)} were written, "
                f"the model has {sorted(config.moe_layers)}"
            )
        wanted = [] if quantization is None else [name for name, _ in quantization.linears]
        if sorted(self._linears) != wanted:
            raise ValueError(f"linears {sorted(self._linears)} were written, needed {wanted}")
        if costs is not None and quantization is None:
            raise ValueError("sensitivities belong to a quantised checkpoint")
        if fault := generation_settings.fault(generation, config.vocab_size):
            raise ValueError(f"generation: {fault}")
        write_manifest(
            self.folder,
            Manifest(
                config=config,
                generation=generation,
                quantization=quantization,
                dense=self._dense,
                linears=self._linears,
                experts=self._experts,
                sensitivity=None if costs is None else sensitivity.write(self.folder, costs),
            ),
        )

    @property
    def expert_words(self) -> dict[str, int]:
        """Words of the runs of an expert."""
        return layout.expert_words(self._config, self._quantization)

    @property
    def num_experts(self) -> int:
        return self._config.moe.router.num_experts

    def check_matrix(self, linear: str, matrix: Shaped[np.ndarray, "rows columns"]) -> None:
        """Raises ValueError unless this is a stored matrix of the linear."""
        shapes = geometry.linear_shapes(self._config)
        shape = shapes[layout.LINEARS.index(linear)]
        # Gate and up are padded; a matrix that stands alone is padded while it is encoded.
        rows = shape.stored_rows if shape.parts > 1 else shape.rows
        wanted = (rows, shape.columns)
        if matrix.shape != wanted or matrix.dtype.name != self._config.dtype:
            raise ValueError(
                f"{linear} is {self._config.dtype} {wanted}, got {matrix.dtype} {matrix.shape}"
            )


class ExpertFile:
    """Writes the experts of a layer, one run at a time, in any order."""

    def __init__(self, writer: CheckpointWriter, layer: int) -> None:
        self._checkpoint = writer
        self._layer = layer
        self._writer = RunWriter(
            layout.experts_path(writer.folder, layer),
            owner=str(layer),
            count=writer.num_experts,
            words=writer.expert_words,
        )

    def __enter__(self) -> "ExpertFile":
        self._writer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.__exit__(kind, error, trace)
        if kind is None:
            self._checkpoint.put_expert_crc32(self._layer, self._writer.crc32)

    @property
    def crc32(self) -> int:
        """CRC-32 of the CRCs of all runs, once they are written."""
        return self._writer.crc32

    def put(
        self,
        expert: int,
        linear: Literal["gate_up", "down"],
        matrix: Shaped[np.ndarray, "rows columns"],
    ) -> None:
        """Writes one matrix at width 16; that of gate_up is `format.stack_halves(gate, up)`."""
        self._checkpoint.check_matrix(linear, matrix)
        self._writer.put(f"{linear}.dense", expert, format.encode_dense(matrix))

    def put_runs(
        self,
        expert: int,
        linear: Literal["gate_up", "down"],
        runs: Mapping[str, UInt32[np.ndarray, " words"]],
    ) -> None:
        """Writes runs by name: planes and tables, or a dense run as it stands elsewhere."""
        for name, run in runs.items():
            self._writer.put(f"{linear}.{name}", expert, run)
