"""Quantized checkpoints that are broken, or that cannot be read, are refused by name."""

import re

import ml_dtypes
import numpy as np
import pytest

from converters import checkpoints
from converters.quantized_folders import BFLOAT16, FP8, fp8, open_folder, open_fp8, open_mxfp4
from moejax.errors import CheckpointError
from moejax_converters.source import Source


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"quant_method": "awq"}, r"of awq is not supported \(supported: fp8 in blocks, mxfp4\)"),
        ({"quant_method": "gptq"}, "of gptq is not supported"),
        ({"quant_method": "bitsandbytes"}, "of bitsandbytes is not supported"),
        ({"quant_method": "compressed-tensors"}, "of compressed-tensors is not supported"),
        ({}, "of None is not supported"),
        ("fp8", "'fp8' is not an object"),
        (False, "False is not an object"),
        ({"quant_method": "fp8"}, "of fp8 without weight_block_size is not supported"),
        (
            fp8(1, 1) | {"fmt": "e5m2"},
            r"of fp8 with fmt 'e5m2' is not supported \(supported: e4m3, float8_e4",
        ),
        (fp8(1, 1) | {"weight_block_size": 128}, "has weight_block_size 128, needed two integers"),
        (fp8(1, 1) | {"weight_block_size": [128]}, r"has weight_block_size \[128\], needed two"),
        (fp8(1, 2.5), r"has weight_block_size \[1, 2\.5\], needed two integers"),
        (fp8(1, True), r"has weight_block_size \[1, True\], needed two integers"),
        (fp8(0, 128), r"has weight_block_size \[0, 128\], needed 1 to 2147483647 twice"),
        (fp8(1, 2**31), r"has weight_block_size \[1, 2147483648\], needed 1 to 2147483647 twice"),
    ],
)
def test_refuses_other_quantizations(setting, message, tmp_path):
    with pytest.raises(
        CheckpointError, match=rf"config\.json: model type 'some': quantization_config {message}"
    ) as error:
        open_folder(tmp_path, {"a": np.zeros(1, np.float32)}, setting)
    assert "\n" not in str(error.value)


CODES, SCALES = np.zeros((3, 5), FP8), np.ones((2, 3), np.float32)
BLOCKS, POWERS = np.zeros((2, 3, 4, 16), np.uint8), np.zeros((2, 3, 4), np.uint8)
MXFP4 = {"quant_method": "mxfp4"}


@pytest.mark.parametrize(
    ("setting", "tensors", "message"),
    [
        (None, {"w": CODES}, "'w' in .*: F8_E4M3, but config.json has no quantization_config"),
        (MXFP4, {"w": CODES}, "'w' in .*: F8_E4M3, but config.json says mxfp4"),
        (None, {"w": CODES.view(ml_dtypes.float8_e5m2)}, "'w' in .*: F8_E5M2, but config.json has"),
        (fp8(2, 2), {"w": CODES}, "'w' in .*: F8_E4M3, but there is no 'w_scale_inv'"),
        (fp8(2, 2), {"w_scale_inv": SCALES}, "'w_scale_inv' in .*: there is no 'w' that it scales"),
        (
            fp8(2, 2),
            {"w": SCALES, "w_scale_inv": SCALES},
            "'w_scale_inv' in .*: scales 'w', F32, not F8_E4M3",
        ),
        (
            fp8(2, 2),
            {"w": CODES, "w_scale_inv": SCALES.T},
            r"'w_scale_inv' in .*: F32 \[3, 2\], needed F32 \[2, 3\] for \[3, 5\] in blocks \[2, 2",
        ),
        (
            fp8(2, 2),
            {"w": CODES, "w_scale_inv": SCALES.astype(BFLOAT16)},
            r"'w_scale_inv' in .*: BF16 \[2, 3\], needed F32 \[2, 3\] for",
        ),
        (
            fp8(2, 2),
            {"w": CODES, "w_scale_inv": SCALES[:1, :2]},  # blocks by floor
            r"'w_scale_inv' in .*: F32 \[1, 2\], needed F32 \[2, 3\]",
        ),
        (
            fp8(2, 2),
            {"w": CODES[None], "w_scale_inv": SCALES[None]},
            r"'w' in .*: F8_E4M3 \[1, 3, 5\], needed a matrix \[out, in\]",
        ),
        (MXFP4, {"p_blocks": BLOCKS}, "'p_blocks' in .*: there is no 'p_scales'"),
        (MXFP4, {"p_scales": POWERS}, "'p_scales' in .*: there is no 'p_blocks' that it scales"),
        (
            MXFP4,
            {"p_blocks": BLOCKS, "p_scales": POWERS, "p": SCALES},
            "'p_blocks' in .*: there is 'p' too, in .*model.safetensors",
        ),
        (
            MXFP4,
            {"p_blocks": BLOCKS, "p_scales": POWERS[:1]},
            r"'p_scales' in .*: U8 \[1, 3, 4\], needed U8 \[2, 3, 4\] for blocks \[2, 3, 4, 16\]",
        ),
        (
            MXFP4,
            {"p_blocks": BLOCKS, "p_scales": POWERS.astype(np.int8)},
            r"'p_scales' in .*: I8 \[2, 3, 4\], needed U8 \[2, 3, 4\]",
        ),
        (
            MXFP4,
            {"p_blocks": BLOCKS.astype(np.int8), "p_scales": POWERS},
            r"'p_blocks' in .*: I8 \[2, 3, 4, 16\], needed U8 \[E, out, in / 32, 16\]",
        ),
        (
            MXFP4,
            {"p_blocks": BLOCKS[..., :8], "p_scales": POWERS},
            r"'p_blocks' in .*: U8 \[2, 3, 4, 8\], needed U8 \[E, out, in / 32, 16\]",
        ),
        (
            MXFP4,
            {"p_blocks": BLOCKS[0], "p_scales": POWERS[0]},
            r"'p_blocks' in .*: U8 \[3, 4, 16\], needed U8 \[E, out, in / 32, 16\]",
        ),
    ],
)
def test_refuses_codes_and_scales_that_do_not_fit(setting, tensors, message, tmp_path):
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    with pytest.raises(CheckpointError, match=f"tensor {message}") as error:
        open_folder(tmp_path, tensors, setting)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_refused_where_they_are_read(code, tmp_path):
    codes = np.zeros((5, 3), np.uint8)
    codes[3, 2] = code
    source = open_fp8(tmp_path, codes, np.ones((3, 1)), (2, 4))
    for rows in (None, (3, 4), (2, 5)):
        with pytest.raises(
            CheckpointError, match=r"tensor 'a\.weight' in .*model.safetensors: NaN at \[3, 2\]$"
        ):
            source.read("a.weight", rows=rows)
    assert not source.read("a.weight", rows=(0, 3)).any()
    assert not source.read("a.weight", index=4).any()


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan, 1e36, -1e36])
@pytest.mark.parametrize(("dtype", "shown"), [("bfloat16", "BF16"), ("float32", "F32")])
def test_scales_that_give_no_numbers_are_refused_where_they_are_read(scale, dtype, shown, tmp_path):
    scales = np.full((3, 2), 7e35, np.float32)
    scales[1, 1] = scale
    source = open_fp8(tmp_path, np.full((5, 3), 0x7E), scales, (2, 2), dtype=dtype)
    message = (
        rf"tensor 'a\.weight_scale_inv' in .*: scale {re.escape(f'{scale:g}')} "
        rf"at \[1, 1\]: times 448, it is no finite number in {shown}$"
    )
    for rows in (None, (3, 4)):
        with pytest.raises(CheckpointError, match=message):
            source.read("a.weight", rows=rows)
    assert np.isfinite(source.read("a.weight", rows=(0, 2)).astype(np.float32)).all()
    assert np.isfinite(source.read("a.weight", rows=(4, 5)).astype(np.float32)).all()


def test_a_scale_may_fit_into_float32_only(tmp_path):
    scale = np.float32(7.59e35)
    source = open_fp8(tmp_path, [[0x7E]], [[scale]], (1, 1), dtype="float32")
    assert source.read("a.weight")[0, 0] == 448 * scale < np.inf
    source = open_fp8(tmp_path, [[0x7E]], [[scale]], (1, 1), dtype="bfloat16")
    with pytest.raises(CheckpointError, match="scale 7.59e.35 at .*no finite number in BF16"):
        source.read("a.weight")


@pytest.mark.parametrize(
    ("scale", "problem"), [(255, "is NaN"), (254, r"means 2 \*\* 127: 6"), (253, r"means 2 \*\* 1")]
)
def test_scales_of_mxfp4_that_give_no_numbers_are_refused(scale, problem, tmp_path):
    scales = np.full((3, 2, 4), 252, np.uint8)
    scales[1, 1, 2] = scale
    source = open_mxfp4(tmp_path, np.full((3, 2, 4, 16), 0x77), scales)
    message = rf"tensor 'p_scales' in .*: scale {scale} at \[1, 1, 2\] {problem}"
    for piece in ({}, {"index": 1}, {"rows": (1, 2)}, {"index": 1, "rows": (65, 66)}):
        with pytest.raises(CheckpointError, match=message):
            source.read("p", **piece)
    for piece in ({"index": 0}, {"rows": (2, 3)}, {"index": 1, "rows": (0, 64)}):
        assert (source.read("p", **piece).astype(np.float64) == 6 * 2.0**125).all()


def test_files_that_shrink_while_they_are_read_are_named(tmp_path):
    tensors = {"a.weight": np.zeros((4, 64), FP8), "a.weight_scale_inv": np.ones((4, 64), "f4")}
    config = {"model_type": "some", "quantization_config": fp8(1, 1)}
    checkpoints.write_folder(tmp_path, config, tensors, shards=2)
    source = Source(tmp_path)
    for name, file in [("a.weight", "model-00001"), ("a.weight_scale_inv", "model-00002")]:
        path = tmp_path / f"{file}-of-00002.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        assert not source.read("a.weight", rows=(0, 3)).any()
        with pytest.raises(CheckpointError, match=rf"tensor '{name}' in .*{file}.*is cut short"):
            source.read("a.weight", rows=(0, 4))
        path.unlink()
        with pytest.raises(CheckpointError, match=rf"tensor '{name}' in .*{file}.*: No such file"):
            source.read("a.weight", rows=(0, 3))
        path.write_bytes(data)
