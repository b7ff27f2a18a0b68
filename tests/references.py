"""What our numbers are compared with: tiny models and Hugging Face's results for them.

The models lie beside the checkout, in shared/tiny_models/out: hub layout, `-fused` where the fused
one differs, and two quantised ones.
"""

import importlib.util
import pathlib
import re
from collections.abc import Mapping, Sequence
from types import ModuleType

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from moejax.arena import format
from moejax.arena.geometry import LinearShape, linear_shape
from moejax.checkpoint import Checkpoint
from moejax.config import DENSE_WIDTH
from moejax.models.decoder import Params, abstract_params, flatten_params, nest_params
from moejax.models.whole import forward, read_stacked

FAMILIES = {
    "mixtral": ("mixtral", "mixtral-fused", "mixtral_swa", "mixtral_swa-fused"),
    "qwen2_moe": ("qwen2_moe", "qwen2_moe-fused"),
    "qwen3_moe": ("qwen3_moe", "qwen3_moe-fused", "qwen3_moe_mixed", "qwen3_moe_mixed-fused"),
    "olmoe": ("olmoe", "olmoe-fused", "olmoe_clip", "olmoe_clip-fused"),
    "phimoe": ("phimoe", "phimoe-fused", "phimoe_long", "phimoe_long-fused"),
    "llama4": ("llama4", "llama4_text", "llama4_interleaved"),
    "deepseek_v2": (
        "deepseek_v2",
        "deepseek_v2-fused",
        "deepseek_v2_lite",
        "deepseek_v2_lite-fused",
    ),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3-fused", "deepseek_v3-fp8"),
    "gemma4": ("gemma4", "gemma4_text"),
    "gpt_oss": ("gpt_oss", "gpt_oss-mxfp4"),
}
"""Family → its tiny models, in every layout."""

TOLERANCE = 1e-4


def tiny_model(shared: pathlib.Path, name: str) -> pathlib.Path:
    """The folder of a tiny model."""
    return shared / "tiny_models" / "out" / name


def read_reference(shared: pathlib.Path, name: str) -> dict[str, np.ndarray]:
    """Hugging Face's numbers: those of the model itself, or of the one that it is fused from."""
    for candidate in (name, re.sub("-fused$", "", name)):
        path = tiny_model(shared, candidate) / "reference.npz"
        if path.is_file():
            with np.load(path) as data:
                return dict(data)
    raise FileNotFoundError(f"no reference for {name}")


def numpy_forward(shared: pathlib.Path) -> ModuleType:
    """The independent forward pass in NumPy: `Model(folder)(tokens)` gives logits in float64."""
    path = shared / "tiny_models" / "numpy_ref.py"
    spec = importlib.util.spec_from_file_location("numpy_ref", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_logits_equal(
    found: Float[np.ndarray, "rows length vocab"], wanted: Float[np.ndarray, "rows length vocab"]
) -> None:
    """What our logits of a whole sequence must be."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def read_params(
    checkpoint: Checkpoint, widths: Mapping[str, Sequence[int]] | None = None
) -> Params:
    """The dense weights of a checkpoint, in float32.

    `widths`: of each layer of the tensors that are stored as codes.
    """
    like = abstract_params(checkpoint.config, "float32")
    named = {
        name: checkpoint.read_dense(name, shape.dtype.name)
        for name, shape in flatten_params(like).items()
        if name not in checkpoint.linear_names()
    }
    for name in checkpoint.linear_names():
        if widths is None or checkpoint.quantization is None:
            raise ValueError(f"{name} is stored as codes: at which widths?")
        shape = linear_shape(checkpoint.quantization, name, checkpoint.linear_shape(name))
        runs, dtype = checkpoint.linear_runs(name), checkpoint.linear_dtype(name)
        matrices = [
            _matrix({run: words[n] for run, words in runs.items()}, shape, int(width), dtype)
            for n, width in enumerate(widths[name])
        ]
        named[name] = jnp.asarray(np.stack(matrices))
    return nest_params(named)


def _matrix(
    runs: Mapping[str, np.ndarray], shape: LinearShape, width: int, dtype: str
) -> Float[np.ndarray, "rows columns"]:
    """A linear at a width in float32, by the codec of FORMAT.md."""
    rows, columns = shape.stored_rows, shape.columns
    if width == DENSE_WIDTH:
        found = format.decode_dense(runs["dense"], rows, columns, format.DTYPES[dtype])
        return found[: shape.rows].astype(np.float32)
    planes = np.stack([runs[f"plane.{p}"] for p in range(width)])
    codes = format.decode_planes(planes, rows, columns)
    groups = np.arange(rows) // shape.rows_per_table
    count = rows // shape.rows_per_table
    table = format.decode_table(runs[f"table.{width}"], count, width)
    weights: np.ndarray = table[groups[:, None], codes]
    return weights[: shape.rows].astype(np.float32)


def whole_logits(
    folder: pathlib.Path, tokens: np.ndarray, max_length: int | None = None
) -> Float[np.ndarray, "rows length vocab"]:
    """Our logits of whole sequences [rows, length], without an engine."""
    checkpoint = Checkpoint.open(folder)
    logits = forward(
        read_params(checkpoint),
        read_stacked(checkpoint, "float32"),
        jnp.asarray(tokens, jnp.int32),
        config=checkpoint.config,
        dtype="float32",
        max_length=max_length,
    )
    return np.asarray(logits)
