"""Names of files in a checkpoint folder, and the sizes of the runs of its experts."""

from pathlib import Path

from moejax.arena import format
from moejax.config import ModelConfig

LINEARS = ("gate_up", "down")


def manifest_path(folder: Path) -> Path:
    """The file that makes a folder a checkpoint."""
    return folder / "moejax.json"


def dense_path(folder: Path, name: str) -> Path:
    """The Orbax checkpoint of a dense tensor."""
    return folder / "dense" / name


def experts_path(folder: Path, layer: int) -> Path:
    """The file of a layer's experts."""
    return folder / "experts" / f"{layer}.safetensors"


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Stored rows and columns of an expert's two linears; gate over up, each padded to 64 rows."""
    width, hidden = config.moe.expert_width, config.hidden_size
    return {
        "gate_up": (2 * format.pad_to(width, format.ATOM_ROWS), hidden),
        "down": (hidden, width),
    }


def run_words(shape: tuple[int, int], dtype: str) -> int:
    """Words of the dense run of a matrix."""
    rows, columns = shape
    padded_rows = format.pad_to(rows, format.ATOM_ROWS)
    return padded_rows * format.dense_words(columns, format.DTYPES[dtype].itemsize)
