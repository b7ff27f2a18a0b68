"""Tensors that a checkpoint stores as codes and scales, as the values that these stand for.

FP8 in blocks (DeepSeek-V3): `X` in E4M3 [out, in] and `X_scale_inv` in float32
[ceil(out / m), ceil(in / n)]. A value is its code times the scale of its block of m x n, in
float32; the last blocks may be partial.

MXFP4 (gpt-oss): `X_blocks` in bytes [E, out, in / 32, 16] and `X_scales` in bytes
[E, out, in / 32]. A byte holds two codes in E2M1, the low half first; a value is its code times
2 ** (scale - 127). `X` is shown as [E, in, out], the layout of a checkpoint that is not quantized.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from moejax.checkpoint.tensor_file import StoredTensor
from moejax.config import MAX_INTEGER
from moejax.errors import CheckpointError

Dtype = Literal["BF16", "F32"]
ReadEntries = Callable[[StoredTensor, np.dtype, int, int], Shaped[np.ndarray, "..."]]
"""Reads entries [start, stop) of the first axis of a stored tensor, as this dtype."""

_NUMPY: dict[Dtype, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}
_BYTE = np.dtype(np.uint8)
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E4M3_MAX = np.float32(448)
_E4M3_FORMATS = ("e4m3", "float8_e4m3fn")
_E2M1 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)
_E8M0_NAN = 255
# 6 * 2 ** 125 is a bfloat16 and a float32; 6 * 2 ** 126 is too large for both.
_E8M0_MAX = 252
_GROUP = 32
# NumPy looks up with indices of eight bytes: those of so many codes fit into a cache.
_CODES_AT_ONCE = 1 << 17


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a checkpoint is quantized."""

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] | None
    """Rows and columns of a block of FP8."""
    dtype: Dtype
    """What values are rounded to."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Tensor:
    """A matrix [out, in] in FP8 with a scale per block."""

    codes: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    dtype: Dtype

    @property
    def shown(self) -> StoredTensor:
        """The tensor of values, at the place of its codes."""
        return _shown(self.codes, self.codes.name, self.codes.shape, self.dtype)

    def read(
        self, read_entries: ReadEntries, index: int | None, rows: tuple[int, int] | None
    ) -> Shaped[np.ndarray, "..."]:
        """As `Source.read`. Refuses codes and scales that are no finite numbers."""
        if index is None:
            return self._rows(read_entries, *rows or (0, self.codes.shape[0]))
        row: np.ndarray = self._rows(read_entries, index, index + 1)[0]
        return row if rows is None else row[slice(*rows)]

    def _rows(
        self, read_entries: ReadEntries, start: int, stop: int
    ) -> Shaped[np.ndarray, "rows columns"]:
        height = self.block[0]
        first = start // height
        codes = read_entries(self.codes, _BYTE, start, stop)
        scales = read_entries(self.scales, _NUMPY["F32"], first, -(-stop // height))
        # NaN is 0x7F and 0xFF: the largest signed and the largest unsigned byte.
        if codes.size and (codes.view(np.int8).max() == 0x7F or codes.max() == 0xFF):
            row, column = np.argwhere(codes & 0x7F == 0x7F)[0].tolist()
            raise _error(self.codes, f"NaN at {[start + row, column]}")
        with np.errstate(over="ignore", invalid="ignore"):
            fits = np.isfinite((scales * _E4M3_MAX).astype(_NUMPY[self.dtype]))
        if not fits.all():
            row, column = np.argwhere(~fits)[0].tolist()
            raise _error(
                self.scales,
                f"scale {scales[row, column]:g} at {[first + row, column]}: "
                f"times {_E4M3_MAX:.0f}, it is no finite number in {self.dtype}",
            )
        return decode_fp8(codes, scales, self.block, start % height, _NUMPY[self.dtype])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Tensor:
    """The matrices of all experts in MXFP4, shown as [E, in, out]."""

    name: str
    codes: StoredTensor
    scales: StoredTensor
    dtype: Dtype

    @property
    def shown(self) -> StoredTensor:
        """The tensor of values, at the place of its codes."""
        experts, out, groups, _ = self.codes.shape
        return _shown(self.codes, self.name, (experts, groups * _GROUP, out), self.dtype)

    def read(
        self, read_entries: ReadEntries, index: int | None, rows: tuple[int, int] | None
    ) -> Shaped[np.ndarray, "..."]:
        """As `Source.read`, but a transposed view. Refuses scales that are no finite numbers."""
        experts, size, _ = self.shown.shape
        if index is None:
            start, stop = rows or (0, experts)
            return self._experts(read_entries, start, stop, (0, size // _GROUP)).swapaxes(1, 2)
        start, stop = rows or (0, size)
        first = start // _GROUP
        groups = (first, -(-stop // _GROUP))
        values: np.ndarray = self._experts(read_entries, index, index + 1, groups)[0].T
        return values[start - first * _GROUP : stop - first * _GROUP]

    def _experts(
        self, read_entries: ReadEntries, start: int, stop: int, groups: tuple[int, int]
    ) -> Shaped[np.ndarray, "experts out some_in"]:
        codes = read_entries(self.codes, _BYTE, start, stop)[:, :, slice(*groups)]
        scales = read_entries(self.scales, _BYTE, start, stop)[:, :, slice(*groups)]
        if scales.size and scales.max() > _E8M0_MAX:
            expert, row, group = np.argwhere(scales > _E8M0_MAX)[0].tolist()
            scale = int(scales[expert, row, group])
            problem = (
                "is NaN"
                if scale == _E8M0_NAN
                else f"means 2 ** {scale - 127}: 6 times that is no finite number in {self.dtype}"
            )
            place = [start + expert, row, groups[0] + group]
            raise _error(self.scales, f"scale {scale} at {place} {problem}")
        return decode_mxfp4(codes, scales, _NUMPY[self.dtype])


Quantized = Fp8Tensor | Mxfp4Tensor


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    """What a config.json says of quantization. Raises CheckpointError for what cannot be read.

    Which tensors are quantized is seen by those that are there, and activations are not quantized
    here: what else the setting says of them does not matter.
    """
    text = config.get("text_config")
    parts = (text, config) if isinstance(text, dict) else (config,)
    settings = [part.get("quantization_config") for part in parts]
    setting = next((setting for setting in settings if setting is not None), None)
    if setting is None:
        return None
    if settings[-1] not in (None, setting):
        raise _refused(config, "differs from that of text_config")
    if not isinstance(setting, dict):
        raise _refused(config, f"{setting!r} is not an object")
    method = setting.get("quant_method")
    if method == "mxfp4":
        return Scheme(method=method, block=None, dtype=_value_dtype(parts))
    if method == "fp8":
        return Scheme(method=method, block=_fp8_block(config, setting), dtype=_value_dtype(parts))
    raise _refused(config, f"of {method} is not supported (supported: fp8 in blocks, mxfp4)")


def _fp8_block(config: Mapping[str, Any], setting: Mapping[str, Any]) -> tuple[int, int]:
    if setting.get("fmt") not in (None, *_E4M3_FORMATS):
        formats = ", ".join(_E4M3_FORMATS)
        raise _refused(
            config, f"of fp8 with fmt {setting['fmt']!r} is not supported (supported: {formats})"
        )
    block = setting.get("weight_block_size")
    if block is None:
        raise _refused(config, "of fp8 without weight_block_size is not supported")
    if not isinstance(block, list) or [type(size) for size in block] != [int, int]:
        raise _refused(config, f"has weight_block_size {block!r}, needed two integers")
    rows, columns = block
    if not 0 < min(block) <= max(block) <= MAX_INTEGER:
        raise _refused(config, f"has weight_block_size {block}, needed 1 to {MAX_INTEGER} twice")
    return rows, columns


def _refused(config: Mapping[str, Any], problem: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: model type '{config.get('model_type')}': quantization_config {problem}"
    )


def _value_dtype(parts: Sequence[Mapping[str, Any]]) -> Dtype:
    """bfloat16 where the checkpoint is of that or does not say, else float32."""
    names = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    name = next((str(name) for name in names if name is not None), "bfloat16")
    return "BF16" if name.removeprefix("torch.") == "bfloat16" else "F32"


def find(stored: Mapping[str, StoredTensor], scheme: Scheme | None) -> dict[str, Quantized]:
    """Name → quantized tensor. Raises CheckpointError for codes and scales that do not fit."""
    if scheme is not None and scheme.block is not None:
        return dict(_find_fp8(stored, scheme.block, scheme.dtype))
    for tensor in stored.values():
        if tensor.dtype.startswith("F8_"):
            says = "has no quantization_config" if scheme is None else f"says {scheme.method}"
            raise _error(tensor, f"{tensor.dtype}, but config.json {says}")
    return {} if scheme is None else dict(_find_mxfp4(stored, scheme.dtype))


def _find_fp8(
    stored: Mapping[str, StoredTensor], block: tuple[int, int], dtype: Dtype
) -> Iterator[tuple[str, Fp8Tensor]]:
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            scaled = name.removesuffix("_scale_inv")
            if scaled not in stored:
                raise _error(tensor, f"there is no '{scaled}' that it scales")
            if stored[scaled].dtype != "F8_E4M3":
                raise _error(tensor, f"scales '{scaled}', {stored[scaled].dtype}, not F8_E4M3")
        elif tensor.dtype == "F8_E4M3":
            if len(tensor.shape) != 2:
                raise _error(tensor, f"F8_E4M3 {list(tensor.shape)}, needed a matrix [out, in]")
            scales = stored.get(f"{name}_scale_inv")
            if scales is None:
                raise _error(tensor, f"F8_E4M3, but there is no '{name}_scale_inv'")
            rows, columns = (
                -(-size // step) for size, step in zip(tensor.shape, block, strict=True)
            )
            _check(scales, "F32", (rows, columns), f"{list(tensor.shape)} in blocks {list(block)}")
            yield name, Fp8Tensor(codes=tensor, scales=scales, block=block, dtype=dtype)


def _find_mxfp4(
    stored: Mapping[str, StoredTensor], dtype: Dtype
) -> Iterator[tuple[str, Mxfp4Tensor]]:
    for name, tensor in stored.items():
        if name.endswith("_scales"):
            blocks = name.removesuffix("_scales") + "_blocks"
            if blocks not in stored:
                raise _error(tensor, f"there is no '{blocks}' that it scales")
        elif name.endswith("_blocks"):
            shown = name.removesuffix("_blocks")
            if tensor.dtype != "U8" or len(tensor.shape) != 4 or tensor.shape[3] != _GROUP // 2:
                raise _error(
                    tensor,
                    f"{tensor.dtype} {list(tensor.shape)}, needed U8 [E, out, in / 32, 16]",
                )
            if shown in stored:
                raise _error(tensor, f"there is '{shown}' too, in {stored[shown].path}")
            scales = stored.get(f"{shown}_scales")
            if scales is None:
                raise _error(tensor, f"there is no '{shown}_scales'")
            _check(scales, "U8", tensor.shape[:3], f"blocks {list(tensor.shape)}")
            yield shown, Mxfp4Tensor(name=shown, codes=tensor, scales=scales, dtype=dtype)


def _check(scales: StoredTensor, dtype: str, shape: tuple[int, ...], what: str) -> None:
    if (scales.dtype, scales.shape) != (dtype, shape):
        raise _error(
            scales,
            f"{scales.dtype} {list(scales.shape)}, needed {dtype} {list(shape)} for {what}",
        )


def _shown(codes: StoredTensor, name: str, shape: tuple[int, ...], dtype: Dtype) -> StoredTensor:
    size = math.prod(shape) * _NUMPY[dtype].itemsize
    return dataclasses.replace(codes, name=name, shape=shape, dtype=dtype, num_bytes=size)


def _error(tensor: StoredTensor, problem: str) -> CheckpointError:
    return CheckpointError(f"tensor '{tensor.name}' in {tensor.path}: {problem}")


def decode_fp8(
    codes: UInt8[np.ndarray, "rows columns"],
    scales: Float32[np.ndarray, "row_blocks column_blocks"],
    block: tuple[int, int],
    skipped: int,
    dtype: np.dtype,
) -> Shaped[np.ndarray, "rows columns"]:
    """The values of rows of FP8, of which the first is row `skipped` of its block.

    Each block has a table of the values of all codes, so the arithmetic is done once per block.
    """
    height, width = block
    values = np.empty(codes.shape, dtype)
    rows, columns = codes.shape
    first_codes = np.arange(columns) // width * _E4M3.size
    step = max(1, _CODES_AT_ONCE // max(1, columns))
    for n, row_scales in enumerate(scales):
        tables = (_E4M3 * row_scales[:, None]).astype(dtype).reshape(-1)
        stop = min((n + 1) * height - skipped, rows)
        for start in range(max(0, n * height - skipped), stop, step):
            part = slice(start, min(start + step, stop))
            np.take(tables, first_codes + codes[part], out=values[part], mode="clip")
    return values


def decode_mxfp4(
    codes: UInt8[np.ndarray, "*axes groups 16"],
    scales: UInt8[np.ndarray, "*axes groups"],
    dtype: np.dtype,
) -> Shaped[np.ndarray, "*axes columns"]:
    """The values of MXFP4, where columns = 32 * groups. No scale may be above 252."""
    table = _mxfp4_table(dtype)
    codes, pages = codes.reshape(-1, 16), scales.reshape(-1, 1).astype(np.uint16) << 8
    pairs = np.empty(codes.shape, table.dtype)
    step = _CODES_AT_ONCE // 16
    for start in range(0, len(codes), step):
        part = slice(start, start + step)
        np.take(table, (pages[part] | codes[part]).astype(np.intp), out=pairs[part], mode="clip")
    return pairs.view(dtype).reshape(*scales.shape[:-1], scales.shape[-1] * _GROUP)


@functools.cache
def _mxfp4_table(dtype: np.dtype) -> Shaped[np.ndarray, " pairs"]:
    """Item 256 * scale + byte is the two values of the byte, as one unsigned integer."""
    byte = np.arange(256)
    codes = _E2M1[np.stack([byte & 15, byte >> 4], axis=-1)]
    factors = np.ldexp(np.float32(1), np.arange(_E8M0_MAX + 1) - 127)
    values = (factors[:, None, None] * codes).astype(dtype)
    return values.view(f"u{2 * dtype.itemsize}").reshape(-1)
