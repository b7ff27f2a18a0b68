"""Codes and scales are read as the values that they stand for."""

import importlib.util
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from converters import checkpoints
from converters.quantized_folders import (
    BFLOAT16,
    FP8,
    NUMBERS,
    fp8,
    open_folder,
    open_fp8,
    open_mxfp4,
)
from moejax.errors import CheckpointError
from moejax_converters.convert import convert
from moejax_converters.source import Source

DTYPES = {"BF16": BFLOAT16, "F32": np.dtype(np.float32)}


def e4m3_value(code):
    """By the definition of the format: sign, four bits of exponent, three of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = 2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return -size if code & 0x80 else size


def e2m1_value(code):
    """By the definition of the format: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if code & 8 else size


def fp8_values(codes, scales, block, dtype):
    """One value after the other, as products in double precision, which are exact."""
    values = np.empty(codes.shape, np.float32)
    for (row, column), code in np.ndenumerate(codes):
        scale = scales[row // block[0], column // block[1]]
        values[row, column] = e4m3_value(int(code)) * float(scale)
    return values.astype(dtype)


def mxfp4_values(codes, scales, dtype):
    """One byte after the other; the result is [E, in, out]."""
    experts, out, groups, _ = codes.shape
    values = np.empty((experts, groups * 32, out), np.float64)
    for (expert, row, group, byte), code in np.ndenumerate(codes):
        factor = 2.0 ** (int(scales[expert, row, group]) - 127)
        at = group * 32 + byte * 2
        values[expert, at, row] = e2m1_value(code & 15) * factor
        values[expert, at + 1, row] = e2m1_value(code >> 4) * factor
    return values.astype(np.float32).astype(dtype)


def assert_same(actual, wanted):
    """The same bits: zeros have signs."""
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
    assert actual.tobytes() == wanted.tobytes()


# FP8


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_code_of_fp8_has_its_value(dtype, tmp_path):
    source = open_fp8(tmp_path, NUMBERS.reshape(2, 127), [[1.0], [0.5]], (1, 127), dtype=dtype)
    values = source.read("a.weight")
    wanted = NUMBERS.view(FP8).astype(np.float32).reshape(2, 127) * np.float32([[1], [0.5]])
    assert_same(values, wanted.astype(dtype if dtype == "float32" else BFLOAT16))
    assert values[0, 0x38] == 1 and values[0, 0x7E] == 448 and values[0, 1] == 2.0**-9


def test_partial_blocks_in_both_directions(tmp_path):
    # 1, 2, 3 and -1 in E4M3; blocks of 2 x 3 over 3 x 5.
    codes = [
        [0x38, 0x40, 0x44, 0x38, 0xB8],
        [0x38, 0x38, 0x38, 0x40, 0x40],
        [0x44, 0x44, 0xB8, 0x38, 0x38],
    ]
    source = open_fp8(tmp_path, codes, [[1, 10], [100, 1000]], (2, 3), dtype="float32")
    assert source.read("a.weight").tolist() == [
        [1, 2, 3, 10, -10],
        [1, 1, 1, 20, 20],
        [300, 300, -100, 1000, 1000],
    ]


def test_values_are_rounded_once_after_the_product_in_float32(tmp_path):
    # 1.125 * (1 + 2 ** -8) lies between two bfloat16s; 1 + 2 ** -8 is a tie, which goes to even.
    scale = np.float32(1 + 2**-8)
    source = open_fp8(tmp_path, [[0x38, 0x39]], [[scale]], (1, 2))
    assert source.read("a.weight").astype(np.float32).tolist() == [[1.0, 1.1328125]]


@pytest.mark.parametrize("height", [1, 2, 3, 7, 100])
def test_any_rows_of_fp8_are_those_of_the_whole(height, tmp_path):
    rng = np.random.default_rng(height)
    codes = rng.choice(NUMBERS, (7, 5))
    scales = rng.random((-(-7 // height), 3), np.float32)
    source = open_fp8(tmp_path, codes, scales, (height, 2))
    whole = fp8_values(codes, scales, (height, 2), BFLOAT16)
    assert_same(source.read("a.weight"), whole)
    for start in range(8):
        for stop in range(start, 8):
            assert_same(source.read("a.weight", rows=(start, stop)), whole[start:stop])
    for index in range(7):
        assert_same(source.read("a.weight", index=index), whole[index])
        assert_same(source.read("a.weight", index=index, rows=(1, 4)), whole[index, 1:4])


@st.composite
def fp8_cases(draw):
    shape = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    block = draw(st.tuples(st.integers(1, 11), st.integers(1, 11)))
    codes = draw(arrays.arrays(np.uint8, shape, elements=st.sampled_from(NUMBERS.tolist())))
    blocks = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    elements = st.floats(-(2.0**100), 2.0**100, width=32)
    scales = draw(arrays.arrays(np.float32, blocks, elements=elements))
    start = draw(st.integers(0, shape[0]))
    return codes, scales, block, (start, draw(st.integers(start, shape[0])))


@given(case=fp8_cases(), dtype=st.sampled_from(sorted(DTYPES)))
def test_fp8_is_the_product_of_codes_and_scales(case, dtype, tmp_path_factory):
    codes, scales, block, rows = case
    folder = tmp_path_factory.mktemp("fp8")
    source = open_fp8(
        folder, codes, scales, block, dtype="bfloat16" if dtype == "BF16" else "float16"
    )
    wanted = fp8_values(codes, scales, block, DTYPES[dtype])
    assert_same(source.read("a.weight"), wanted)
    assert_same(source.read("a.weight", rows=rows), wanted[slice(*rows)])


def test_a_matrix_of_more_codes_than_are_looked_up_at_once(tmp_path):
    rng = np.random.default_rng(0)
    for shape in [(3, 150_000), (300, 1000)]:
        codes = rng.choice(NUMBERS, shape)
        scales = rng.random((-(-shape[0] // 256), -(-shape[1] // 1000)), np.float32)
        source = open_fp8(tmp_path, codes, scales, (256, 1000), dtype="float32")
        spread = np.repeat(np.repeat(scales, 256, 0), 1000, 1)[: shape[0], : shape[1]]
        assert_same(source.read("a.weight"), codes.view(FP8).astype(np.float32) * spread)


# MXFP4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_code_of_mxfp4_has_its_value_and_the_low_half_is_the_first(dtype, tmp_path):
    codes = np.zeros((1, 2, 1, 16), np.uint8)
    codes[0, 0, 0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    codes[0, 1, 0, 0] = 0x72
    source = open_mxfp4(tmp_path, codes, [[[127], [128]]], dtype=dtype)
    values = source.read("p")
    assert values.shape == (1, 32, 2)
    row = values[0, :, 0].astype(np.float64)
    assert row[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert row[8:16].tolist() == [0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert np.signbit(row[8]) and not np.signbit(row[0])
    assert not row[16:].any()
    assert values[0, :3, 1].tolist() == [2, 12, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_scale_of_mxfp4_is_exact(dtype, tmp_path):
    scales = np.arange(253, dtype=np.uint8).reshape(1, 11, 23)
    codes = np.zeros((1, 11, 23, 16), np.uint8)
    codes[..., 0] = 0x71  # 0.5 and 6
    values = open_mxfp4(tmp_path, codes, scales, dtype=dtype).read("p")[0].astype(np.float64)
    wanted = 2.0 ** (np.arange(253).reshape(11, 23).T - 127)
    assert (values[0::32] == 0.5 * wanted).all() and (values[1::32] == 6 * wanted).all()


@st.composite
def mxfp4_cases(draw):
    shape = draw(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)))
    codes = draw(arrays.arrays(np.uint8, (*shape, 16)))
    scales = draw(arrays.arrays(np.uint8, shape, elements=st.integers(0, 252)))
    return codes, scales


@given(case=mxfp4_cases(), dtype=st.sampled_from(sorted(DTYPES)), data=st.data())
def test_mxfp4_is_the_product_of_codes_and_powers_of_two(case, dtype, data, tmp_path_factory):
    codes, scales = case
    folder = tmp_path_factory.mktemp("mxfp4")
    source = open_mxfp4(folder, codes, scales, dtype="bfloat16" if dtype == "BF16" else "float32")
    wanted = mxfp4_values(codes, scales, DTYPES[dtype])
    assert_same(source.read("p"), wanted)
    first = data.draw(st.integers(0, len(codes)))
    stop = data.draw(st.integers(first, len(codes)))
    assert_same(source.read("p", rows=(first, stop)), wanted[first:stop])
    for index in range(len(codes)):
        start = data.draw(st.integers(0, wanted.shape[1]))
        rows = (start, data.draw(st.integers(start, wanted.shape[1])))
        assert_same(source.read("p", index=index), wanted[index])
        assert_same(source.read("p", index=index, rows=rows), wanted[index, slice(*rows)])


def test_experts_of_more_codes_than_are_looked_up_at_once(tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, 70, 129, 16), np.uint8)
    scales = rng.integers(100, 150, (2, 70, 129), np.uint8)
    values = open_mxfp4(tmp_path, codes, scales, dtype="float32").read("p")
    codes_of = np.array([e2m1_value(code) for code in range(16)], np.float32)
    pairs = codes_of[np.stack([codes & 15, codes >> 4], -1)].reshape(2, 70, 129, 32)
    wanted = np.ldexp(pairs, scales[..., None].astype(np.int32) - 127)
    assert_same(values, wanted.reshape(2, 70, 129 * 32).swapaxes(1, 2))


# What is shown


def test_codes_and_scales_are_shown_as_one_tensor_of_values(tmp_path):
    scales = np.ones((2, 1), np.float32)
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {"a.weight": np.zeros((3, 5), FP8), "a.weight_scale_inv": scales, "b.weight": plain}
    source = open_folder(tmp_path, tensors, fp8(2, 8) | {"modules_to_not_convert": ["b"]})
    assert sorted(source.tensors) == ["a.weight", "b.weight"]
    shown = source.tensors["a.weight"]
    assert (shown.name, shown.dtype, shown.shape) == ("a.weight", "BF16", (3, 5))
    assert (shown.num_bytes, shown.path) == (2 * 15, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(source.read("b.weight"), plain)

    codes = np.zeros((2, 5, 3, 16), np.uint8)
    source = open_mxfp4(tmp_path, codes, codes[..., 0], torch_dtype="float32")
    assert sorted(source.tensors) == ["p"]
    shown = source.tensors["p"]
    assert (shown.name, shown.dtype, shown.shape) == ("p", "F32", (2, 96, 5))
    assert shown.num_bytes == 4 * 2 * 96 * 5


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "BF16"),
        ({"dtype": None, "torch_dtype": None, "text_config": None}, "BF16"),
        ({"dtype": "bfloat16"}, "BF16"),
        ({"torch_dtype": "torch.bfloat16"}, "BF16"),
        ({"text_config": {"dtype": "bfloat16"}}, "BF16"),
        ({"dtype": "float32"}, "F32"),
        ({"torch_dtype": "float16"}, "F32"),
        ({"text_config": {"torch_dtype": "float32"}}, "F32"),
        ({"text_config": {"dtype": "float32"}, "dtype": "bfloat16"}, "F32"),
    ],
)
def test_values_have_the_dtype_of_the_checkpoint(config, dtype, tmp_path):
    source = open_fp8(tmp_path, [[0]], [[1]], (128, 128), **config)
    assert source.tensors["a.weight"].dtype == dtype
    assert source.read("a.weight").dtype == DTYPES[dtype]
    source = open_mxfp4(tmp_path, np.zeros((1, 1, 1, 16)), [[[0]]], **config)
    assert source.tensors["p"].dtype == dtype
    assert source.read("p").dtype == DTYPES[dtype]


def test_codes_and_scales_may_lie_in_different_files(tmp_path):
    tensors = {
        "a.weight": np.array([[0x38]], np.uint8).view(FP8),
        "a.weight_scale_inv": np.array([[7]], np.float32),
    }
    config = {"model_type": "some", "quantization_config": fp8(1, 1)}
    checkpoints.write_folder(tmp_path, config, tensors, shards=2)
    assert Source(tmp_path).read("a.weight").tolist() == [[7]]


def test_a_setting_of_the_text_model_counts(tmp_path):
    tensors = {
        "a.weight": np.array([[0x38]], np.uint8).view(FP8),
        "a.weight_scale_inv": np.array([[7]], np.float32),
    }
    text = {"text_config": {"quantization_config": fp8(1, 1)}}
    assert open_folder(tmp_path, tensors, None, **text).read("a.weight").tolist() == [[7]]
    assert open_folder(tmp_path, tensors, fp8(1, 1), **text).read("a.weight").tolist() == [[7]]
    with pytest.raises(CheckpointError, match="quantization_config differs from that of text_con"):
        open_folder(tmp_path, tensors, fp8(1, 2), **text)


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn", None])
def test_the_spellings_of_e4m3(fmt, tmp_path):
    tensors = {
        "a.weight": np.array([[0x38]], np.uint8).view(FP8),
        "a.weight_scale_inv": np.array([[7]], np.float32),
    }
    settings = fp8(128, 128) | {"fmt": fmt, "activation_scheme": "dynamic"}
    assert open_folder(tmp_path, tensors, settings).read("a.weight").tolist() == [[7]]


def test_reading_holds_little_more_than_what_is_returned(tmp_path):
    rng = np.random.default_rng(0)
    rows = 1024
    matrix = rng.choice(NUMBERS, (2 * rows, 4096))
    of_fp8 = open_fp8(tmp_path, matrix, np.ones((1, 32)), (4096, 128))
    peak, piece = peak_bytes(lambda: of_fp8.read("a.weight", rows=(1, rows + 1)))
    assert piece == 2 * rows * 4096
    assert peak < 2 * piece + (4 << 20)
    codes = rng.integers(0, 256, (4, rows, 128, 16), np.uint8)
    of_mxfp4 = open_mxfp4(tmp_path, codes, np.ones((4, rows, 128)))
    peak, piece = peak_bytes(lambda: of_mxfp4.read("p", index=2))
    assert piece == 2 * rows * 4096
    assert peak < 2 * piece + (4 << 20)


def peak_bytes(read):
    """The most bytes that arrays took meanwhile, and those of the result."""
    tracemalloc.start()
    try:
        result = read()
        return tracemalloc.get_traced_memory()[1], result.nbytes
    finally:
        tracemalloc.stop()


# Checkpoints


@pytest.mark.parametrize("name", ["deepseek_v3-fp8", "gpt_oss-mxfp4"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the other reader
def test_a_tiny_model_reads_as_another_reader_does(name, shared_dir):
    folder = shared_dir / "tiny_models" / "out" / name
    spec = importlib.util.spec_from_file_location(
        "numpy_ref", shared_dir / "tiny_models" / "numpy_ref.py"
    )
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    wanted = other.read(folder / "model.safetensors")
    stored = len(wanted)
    other.dequantise(
        wanted, json.loads((folder / "config.json").read_text())["quantization_config"]
    )
    source = Source(folder)
    assert len(wanted) < stored
    assert sorted(source.tensors) == sorted(wanted)
    for tensor, value in wanted.items():
        # In double precision both kinds of product are exact; those of MXFP4 are bfloat16s.
        actual = source.read(tensor)
        assert actual.shape == source.tensors[tensor].shape == value.shape, tensor
        assert (actual.astype(np.float32) == value.astype(np.float32)).all(), tensor


def test_a_quantized_model_converts_as_its_values_do(tmp_path):
    checkpoints.write(tmp_path / "plain", "qwen3_moe")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    plain = Source(tmp_path / "plain")
    tensors, values = {}, {}
    rng = np.random.default_rng(0)
    for name in plain.tensors:
        values[name] = tensors[name] = plain.read(name)
        if name.endswith("_proj.weight"):
            codes = rng.choice(NUMBERS, values[name].shape)
            blocks = tuple(-(-size // 16) for size in codes.shape)
            tensors[name] = codes.view(FP8)
            tensors[f"{name}_scale_inv"] = rng.random(blocks, np.float32)
            values[name] = fp8_values(codes, tensors[f"{name}_scale_inv"], (16, 16), BFLOAT16)
    checkpoints.write_folder(tmp_path / "values", config, values)
    checkpoints.write_folder(
        tmp_path / "fp8", config | {"quantization_config": fp8(16, 16)}, tensors, shards=2
    )
    for name in ("values", "fp8"):
        convert(tmp_path / name, tmp_path / f"{name}-out", progress=False)
    checkpoints.assert_same(
        checkpoints.decoded(tmp_path / "fp8-out"), checkpoints.decoded(tmp_path / "values-out")
    )
