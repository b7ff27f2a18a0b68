"""Names of files in a checkpoint folder, and the sizes of the runs in them."""

from pathlib import Path
from typing import Literal

from moejax.arena import geometry
from moejax.config import ModelConfig, Quantization

LINEARS: tuple[Literal["gate_up"], Literal["down"]] = ("gate_up", "down")


def manifest_path(folder: Path) -> Path:
    """The file that makes a folder a checkpoint."""
    return folder / "moejax.json"


def dense_path(folder: Path, name: str) -> Path:
    """The Orbax checkpoint of a dense tensor."""
    return folder / "dense" / name


def experts_path(folder: Path, layer: int) -> Path:
    """The file of a layer's experts."""
    return folder / "experts" / f"{layer}.safetensors"


def linears_path(folder: Path, name: str) -> Path:
    """The file of the planes and tables of a stacked dense tensor."""
    return folder / "linears" / f"{name}.safetensors"


def sensitivity_path(folder: Path) -> Path:
    """The file that says what each width costs in accuracy."""
    return folder / "sensitivity.safetensors"


def expert_words(config: ModelConfig, quantization: Quantization | None) -> dict[str, int]:
    """Words of the runs of an expert, by name: `gate_up.dense`, `down.plane.0`, ….

    Dense runs are in the dtype of the checkpoint.
    """
    shapes = geometry.linear_shapes(config, quantization)
    return {
        f"{linear}.{name}": size // 4
        for linear, shape in zip(LINEARS, shapes, strict=True)
        for name, size in geometry.run_sizes(shape, config.dtype, quantization).items()
    }


def linear_words(
    shape: geometry.LinearShape, dtype: str, quantization: Quantization
) -> dict[str, int]:
    """Words of the runs of a dense tensor that is stored as codes: `plane.0`, …."""
    sizes = geometry.run_sizes(shape, dtype, quantization)
    return {name: size // 4 for name, size in sizes.items()}
