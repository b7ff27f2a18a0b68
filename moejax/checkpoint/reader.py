"""Reading a checkpoint folder: dense tensors one by one, experts as memory maps."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import UInt32

from moejax.checkpoint import dense, layout
from moejax.checkpoint.manifest import Manifest, read_manifest
from moejax.checkpoint.run_file import RunFile, open_run_file
from moejax.config import ModelConfig
from moejax.errors import CheckpointError


class Checkpoint:
    """An open checkpoint. Files of experts are mapped when they are first asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._expert_files: dict[int, RunFile] = {}

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

    def expert_runs(self, layer: int) -> dict[str, UInt32[np.ndarray, "experts words"]]:
        """The dense runs of a layer's experts, `gate_up` and `down`, as read-only memory maps."""
        runs = self._expert_file(layer).runs
        return {linear: runs[f"{linear}.dense"] for linear in layout.LINEARS}

    def verify_expert(self, layer: int, expert: int) -> None:
        """Raises CheckpointError if the CRC-32 of a run of the expert is wrong."""
        self._expert_file(layer).verify(expert)

    def _expert_file(self, layer: int) -> RunFile:
        if layer not in self._expert_files:
            if layer not in self.config.moe_layers:
                raise ValueError(f"layer {layer} has no experts")
            words = {
                f"{linear}.dense": layout.run_words(shape, self.config.dtype)
                for linear, shape in layout.linear_shapes(self.config).items()
            }
            self._expert_files[layer] = open_run_file(
                layout.experts_path(self.folder, layer),
                layer=layer,
                num_experts=self.config.moe.router.num_experts,
                words=words,
                crc32=self._manifest.experts[layer],
            )
        return self._expert_files[layer]
