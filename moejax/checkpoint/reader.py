"""Reading a checkpoint folder: dense tensors one by one, experts as memory maps."""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import UInt32

from moejax.arena import geometry
from moejax.checkpoint import dense, layout, sensitivity
from moejax.checkpoint.manifest import DenseTensor, Manifest, read_manifest
from moejax.checkpoint.run_file import RunFile, open_run_file
from moejax.checkpoint.sensitivity import Sensitivity
from moejax.config import ModelConfig, Quantization
from moejax.errors import CheckpointError


class Checkpoint:
    """An open checkpoint. Files of experts are mapped when they are first asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._expert_files: dict[int, RunFile] = {}
        self._linear_files: dict[str, RunFile] = {}

    @classmethod
    def open(cls, folder: Path | str) -> "Checkpoint":
        """Opens a folder. Raises CheckpointError unless its `moejax.json` is one that we know."""
        folder = Path(folder)
        return cls(folder, read_manifest(folder))

    @property
    def config(self) -> ModelConfig:
        """What the model is made of."""
        return self._manifest.config

    @property
    def generation(self) -> dict[str, Any]:
        """`eos_token_ids`, a list, and what the source gave of temperature, top_p, top_k, min_p,
        bos_token_id and pad_token_id."""
        return dict(self._manifest.generation)

    @property
    def fingerprint(self) -> str:
        """Stands for this model: its manifest holds a checksum of every tensor."""
        return hashlib.sha256(layout.manifest_path(self.folder).read_bytes()).hexdigest()

    def dense_names(self) -> tuple[str, ...]:
        """The names of the dense tensors, sorted."""
        return tuple(sorted(self._manifest.dense))

    def dense_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a dense tensor; of tensors of layers, the first axis is the repeats."""
        return self._manifest.dense[name].shape

    def dense_dtype(self, name: str) -> str:
        """The dtype that a dense tensor is stored in."""
        return self._manifest.dense[name].dtype

    def dense_tensor(self, name: str) -> DenseTensor:
        """What a dense tensor must be."""
        return self._manifest.dense[name]

    def read_dense(
        self, name: str, dtype: DTypeLike, sharding: jax.sharding.Sharding | None = None
    ) -> jax.Array:
        """Reads a dense tensor, checks it, and places it as `dtype`.

        Host memory peaks at about three times its size; none is left afterwards.
        """
        wanted = self._manifest.dense.get(name)
        if wanted is None:
            raise CheckpointError(f"tensor '{name}' is not in {self.folder}")
        path = layout.dense_path(self.folder, name)
        array = dense.restore(path)
        if array.shape != wanted.shape or array.dtype.name != wanted.dtype:
            raise CheckpointError(
                f"tensor '{name}' in {path}: {array.dtype} {list(array.shape)}, "
                f"needed {wanted.dtype} {list(wanted.shape)}"
            )
        if (crc := dense.crc32(array)) != wanted.crc32:
            raise CheckpointError(
                f"tensor '{name}' in {path} is damaged "
                f"(CRC-32 {crc:08x}, needed {wanted.crc32:08x})"
            )
        array = array.astype(dtype, copy=False)
        if sharding is None:
            return jnp.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    @property
    def has_sensitivity(self) -> bool:
        """Whether it says what each width costs."""
        return self._manifest.sensitivity is not None

    @property
    def quantization(self) -> Quantization | None:
        """How the experts are stored; None: at width 16 only."""
        return self._manifest.quantization

    def sensitivity(self) -> Sensitivity:
        """What each width costs. Raises CheckpointError where nobody knows."""
        crc32 = self._manifest.sensitivity
        if crc32 is None:
            reason = (
                "is not quantised"
                if self.quantization is None
                else "was imported as codes, without the weights that they stand for"
            )
            raise CheckpointError(f"{self.folder} {reason}: it has no sensitivities")
        return sensitivity.read(self.folder, crc32)

    def expert_runs(self, layer: int) -> dict[str, UInt32[np.ndarray, "experts words"]]:
        """The runs of a layer's experts, `gate_up.dense` …, as read-only memory maps."""
        return self._expert_file(layer).runs

    def verify_expert(self, layer: int, expert: int, names: Collection[str] | None = None) -> None:
        """Raises CheckpointError if the CRC-32 of a run of the expert is wrong.

        `names`: which runs; None: all.
        """
        self._expert_file(layer).verify(expert, names)

    def linear_names(self) -> tuple[str, ...]:
        """The names of the stacked dense tensors that are stored as codes, sorted."""
        return tuple(sorted(self._manifest.linears))

    def linear_dtype(self, name: str) -> str:
        """The dtype of the dense run of such a tensor, or of what it was made from."""
        return self._manifest.linears[name].dtype

    def linear_shape(self, name: str) -> tuple[int, ...]:
        """[repeats, rows, columns] of such a tensor."""
        return self._manifest.linears[name].shape

    def linear_runs(self, name: str) -> dict[str, UInt32[np.ndarray, "repeats words"]]:
        """Its runs, `plane.0` …, as read-only memory maps."""
        return self._linear_file(name).runs

    def verify_linear(self, name: str, repeat: int, names: Collection[str] | None = None) -> None:
        """Raises CheckpointError if the CRC-32 of one of its runs is wrong."""
        self._linear_file(name).verify(repeat, names)

    def _linear_file(self, name: str) -> RunFile:
        if name not in self._linear_files:
            quantization, tensor = self.quantization, self._manifest.linears[name]
            if quantization is None:
                raise AssertionError("linears without a quantization")
            shape = geometry.linear_shape(quantization, name, tensor.shape)
            self._linear_files[name] = open_run_file(
                layout.linears_path(self.folder, name),
                owner=name,
                count=tensor.shape[0],
                words=layout.linear_words(shape, tensor.dtype, quantization),
                crc32=tensor.crc32,
            )
        return self._linear_files[name]

    def _expert_file(self, layer: int) -> RunFile:
        if layer not in self._expert_files:
            if layer not in self.config.moe_layers:
                raise ValueError(f"layer {layer} has no experts")
            self._expert_files[layer] = open_run_file(
                layout.experts_path(self.folder, layer),
                owner=str(layer),
                count=self.config.moe.router.num_experts,
                words=layout.expert_words(self.config, self.quantization),
                crc32=self._manifest.experts[layer],
            )
        return self._expert_files[layer]
