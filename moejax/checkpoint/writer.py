"""Writing a checkpoint folder, piece by piece."""

from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

from moejax.arena import format
from moejax.checkpoint import dense, layout
from moejax.checkpoint import generation as generation_settings
from moejax.checkpoint.manifest import DenseTensor, Manifest, write_manifest
from moejax.checkpoint.run_file import RunWriter
from moejax.config import ModelConfig


class CheckpointWriter:
    """Writes a checkpoint into a folder, which is created. It is one once `finish` has returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._dense: dict[str, DenseTensor] = {}
        self._experts: dict[int, ExpertFile] = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "dense").mkdir()
        (folder / "experts").mkdir()

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

    def expert_file(
        self,
        layer: int,
        *,
        num_experts: int,
        gate_up_shape: tuple[int, int],
        down_shape: tuple[int, int],
        dtype: str,
    ) -> "ExpertFile":
        """The file of a layer's experts; a context manager. Shapes are stored rows × columns."""
        self._experts[layer] = ExpertFile(
            layout.experts_path(self.folder, layer),
            layer=layer,
            num_experts=num_experts,
            shapes={"gate_up": gate_up_shape, "down": down_shape},
            dtype=dtype,
        )
        return self._experts[layer]

    def finish(self, config: ModelConfig, generation: dict[str, Any]) -> None:
        """Writes `moejax.json`, which makes the folder a checkpoint."""
        if set(self._experts) != set(config.moe_layers):
            raise ValueError(
                f"experts of the layers {sorted(self._experts)} were written, "
                f"the model has {sorted(config.moe_layers)}"
            )
        if fault := generation_settings.fault(generation, config.vocab_size):
            raise ValueError(f"generation: {fault}")
        experts = {layer: file.crc32 for layer, file in self._experts.items()}
        write_manifest(
            self.folder,
            Manifest(config=config, generation=generation, dense=self._dense, experts=experts),
        )


class ExpertFile:
    """Writes the matrices of a layer's experts, one at a time, in any order."""

    def __init__(
        self,
        path: Path,
        *,
        layer: int,
        num_experts: int,
        shapes: dict[str, tuple[int, int]],
        dtype: str,
    ) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._writer = RunWriter(
            path,
            layer=layer,
            num_experts=num_experts,
            words={
                f"{linear}.dense": layout.run_words(shape, dtype)
                for linear, shape in shapes.items()
            },
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
        """Writes one matrix; that of gate_up is `format.stack_halves(gate, up)`."""
        if matrix.shape != self._shapes[linear] or matrix.dtype.name != self._dtype:
            raise ValueError(
                f"{linear} is {self._dtype} {self._shapes[linear]}, "
                f"got {matrix.dtype} {matrix.shape}"
            )
        self._writer.put(f"{linear}.dense", expert, format.encode_dense(matrix))
