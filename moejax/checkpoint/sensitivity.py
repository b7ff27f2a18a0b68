"""What each width costs in accuracy: one small file of a quantised checkpoint."""

import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64

from moejax.checkpoint import layout, tensor_file
from moejax.errors import CheckpointError

_DTYPES = {"F64": np.dtype("<f8"), "I64": np.dtype("<i8")}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Errors by linear and width, weighted with the importance of each weight.

    With the Fisher information per token as importance, half an error estimates by how much the
    loss rises, in nats per token. Without calibration every importance is 1.
    """

    is_calibrated: bool
    experts: Float64[np.ndarray, "layers experts 2 widths"]
    """Of gate_up and down, at the widths from the seed to the parent."""
    expert_norms: Float64[np.ndarray, "layers experts 2"]
    """The same sums with 0 in place of the stored weights."""
    tokens: Int64[np.ndarray, "layers experts"]
    """Tokens of the calibration text that chose the expert."""
    linears: dict[str, Float64[np.ndarray, "repeats widths"]] = dataclasses.field(
        default_factory=dict
    )
    """Of dense tensors that are stored as codes."""
    linear_norms: dict[str, Float64[np.ndarray, " repeats"]] = dataclasses.field(
        default_factory=dict
    )


def write(folder: Path, costs: Sensitivity) -> int:
    """Writes the file; returns its CRC-32."""
    tensors: dict[str, np.ndarray] = {
        "experts": costs.experts,
        "expert_norms": costs.expert_norms,
        "tokens": costs.tokens,
    }
    tensors |= {f"linears.{name}": values for name, values in costs.linears.items()}
    tensors |= {f"linear_norms.{name}": values for name, values in costs.linear_norms.items()}
    at, entries, data = 0, {}, []
    for name, array in tensors.items():
        code, dtype = next(item for item in _DTYPES.items() if item[1].kind == array.dtype.kind)
        values = np.ascontiguousarray(array, dtype).tobytes()
        entries[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [at, at + len(values)],
        }
        at += len(values)
        data.append(values)
    calibrated = json.dumps(costs.is_calibrated)
    text = json.dumps({"__metadata__": {"is_calibrated": calibrated}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    whole = b"".join([len(text).to_bytes(8, "little"), text, *data])
    layout.sensitivity_path(folder).write_bytes(whole)
    return zlib.crc32(whole)


def read(folder: Path, crc32: int) -> Sensitivity:
    """Reads the file. Raises CheckpointError if it is not the one with this CRC-32."""
    path = layout.sensitivity_path(folder)
    header = tensor_file.read_header(path)
    whole = path.read_bytes()
    if (found := zlib.crc32(whole)) != crc32:
        raise CheckpointError(f"{path} is damaged (CRC-32 {found:08x}, needed {crc32:08x})")
    arrays = {
        name: np.frombuffer(
            whole[tensor.offset : tensor.offset + tensor.num_bytes], _DTYPES[tensor.dtype]
        ).reshape(tensor.shape)
        for name, tensor in header.tensors.items()
    }

    def starting(prefix: str) -> dict[str, np.ndarray]:
        return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}

    return Sensitivity(
        is_calibrated=header.metadata["is_calibrated"] == "true",
        experts=arrays["experts"],
        expert_norms=arrays["expert_norms"],
        tokens=arrays["tokens"],
        linears=starting("linears."),
        linear_norms=starting("linear_norms."),
    )
