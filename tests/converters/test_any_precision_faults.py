"""Packed checkpoints of Any-Precision LLM that are refused, each in one line."""

import json
import re

import numpy as np
import pytest

from converters import apl_packing, checkpoints
from converters.apl_packing import names_of, resolve
from moejax.errors import CheckpointError
from moejax_converters import any_precision
from moejax_converters.rules import Rule
from moejax_converters.source import Source

X = "model.layers.0.block_sparse_moe.experts.2.w3"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ([3, 8], "anyprec is [3, 8], needed an object"),
        ({}, "anyprec: seed_precision None and parent_precision None, needed two integers"),
        (
            apl_packing.setting(3, True),
            "anyprec: seed_precision 3 and parent_precision True, needed two integers",
        ),
        (
            apl_packing.setting(1, 8),
            "anyprec: seed_precision 1 and parent_precision 8, "
            "needed 2 <= seed_precision <= parent_precision <= 8",
        ),
        (
            apl_packing.setting(5, 4),
            "anyprec: seed_precision 5 and parent_precision 4, "
            "needed 2 <= seed_precision <= parent_precision <= 8",
        ),
        (
            apl_packing.setting(3, 9),
            "anyprec: seed_precision 3 and parent_precision 9, "
            "needed 2 <= seed_precision <= parent_precision <= 8",
        ),
        (
            apl_packing.setting(group_count=4),
            "anyprec: group_count 4 is not supported (supported: 1)",
        ),
        (
            apl_packing.setting(sparse_numvals={"model.layers.0": 7}),
            "anyprec: sparse_numvals is not supported",
        ),
    ],
)
def test_refuses_a_setting(setting, message):
    with pytest.raises(CheckpointError, match=f"^config.json: {re.escape(message)}$"):
        any_precision.scheme({"anyprec": setting})


def table_with(row, code, value):
    table = np.tile(np.arange(8, dtype=np.float16), (64, 1))
    table[row, code] = value
    return table


HEADERS = [
    ("qweight", None, None),
    ("lut4", None, None),
    ("qweight", np.zeros((5, 64, 1), np.int32), "I32 [5, 64, 1], needed I32 [4, rows, col"),
    ("qweight", np.zeros((4, 64, 1), np.float32), "F32 [4, 64, 1], needed I32 [4, rows, col"),
    ("qweight", np.zeros((4, 64), np.int32), "I32 [4, 64], needed I32 [4, rows, col"),
    ("qweight", np.zeros((4, 64, 0), np.int32), "I32 [4, 64, 0], needed I32 [4, rows, col"),
    ("lut3", np.zeros((64, 16), np.float16), "F16 [64, 16], needed F16 [64, 8]"),
    ("lut4", np.zeros((64, 8), np.float16), "F16 [64, 8], needed F16 [64, 16]"),
    ("lut4", np.zeros((63, 16), np.float16), "F16 [63, 16], needed F16 [64, 16]"),
    ("lut3", np.zeros((64, 8), np.float32), "F32 [64, 8], needed F16 [64, 8]"),
]
TABLES = [
    ("lut3", table_with(5, 2, np.nan), "nan at [5, 2]"),
    ("lut3", table_with(63, 7, np.inf), "inf at [63, 7]"),
    ("lut3", table_with(slice(None), slice(None, None, 2), 9), "57% of its steps fall: no tab"),
]


@pytest.mark.parametrize(("part", "array", "problem"), HEADERS + TABLES)
def test_refuses_parts_that_do_not_fit(part, array, problem, tmp_path):
    name = f"{X}.{part}"
    apl_packing.write(tmp_path, "mixtral", changed={name: array})
    source = Source(tmp_path)
    if problem is None:
        message = f"{tmp_path}: no tensor '{name}'"
    else:
        message = f"tensor '{name}' in {tmp_path / 'model.safetensors'}: {problem}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}") as error:
        any_precision.read_linear(source, X)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("part", "array", "problem"), HEADERS)
def test_headers_are_checked_before_anything_is_read(part, array, problem, tmp_path):
    apl_packing.write(tmp_path, "mixtral", changed={f"{X}.{part}": array})
    if (part, problem) == ("qweight", None):
        message = f"tensor '{X}.lut3' in {tmp_path / 'model.safetensors'}: unknown"
    else:
        message = f"'{X}.{part}'"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        resolve(Source(tmp_path))


def test_refuses_weights_beside_codes(tmp_path):
    weights = np.zeros((64, 32), np.float16)
    apl_packing.write(tmp_path, "mixtral", changed={f"{X}.weight": weights})
    with pytest.raises(CheckpointError, match=rf"'{X}.qweight' in .*: there is '{X}.weight' too"):
        any_precision.shown(Source(tmp_path))


@pytest.mark.parametrize("part", ["lut2", "lut5", "rows", "vals"])
def test_nothing_that_belongs_to_a_packed_linear_is_passed_over(part, tmp_path):
    extra = np.zeros((64, 4), np.float16)
    apl_packing.write(tmp_path, "mixtral", changed={f"{X}.{part}": extra})
    with pytest.raises(CheckpointError, match=rf"tensor '{X}.{part}' in .*: unknown"):
        resolve(Source(tmp_path))


def test_packed_sizes_are_those_of_the_config(tmp_path):
    wide = apl_packing.random_linear(np.random.default_rng(0), 64, 64, parent_bits=4)
    apl_packing.write(tmp_path, "mixtral", changed=apl_packing.tensors_of(X, wide))
    with pytest.raises(CheckpointError, match=r"shape \[64, 64\], needed \[64, 32\]"):
        resolve(Source(tmp_path))


def test_refuses_a_packed_linear_that_no_rule_knows(tmp_path):
    extra = apl_packing.random_linear(np.random.default_rng(0), 4, 32, parent_bits=4)
    apl_packing.write(tmp_path, "mixtral", changed=apl_packing.tensors_of("model.extra", extra))
    source = Source(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"'model.extra.qweight' in .*: 0 rules match 'model.extra.weight'"
    ):
        names_of(source)
    with pytest.raises(CheckpointError, match=r"tensor 'model.extra.weight' in .*: unknown"):
        resolve(source)


def test_refuses_a_target_that_is_packed_twice(tmp_path):
    apl_packing.write(tmp_path, "mixtral")
    table = [Rule(r".*\.experts\.(\d+)\.w\d\.weight", r"layers.0.experts.\1.gate")]
    with pytest.raises(
        CheckpointError, match=r"is layers.0.experts.0.gate, as 'model.*qweight' is"
    ):
        any_precision.packed_names(table, Source(tmp_path).tensors)


def test_refuses_an_expert_that_is_not_packed(tmp_path):
    apl_packing.write(tmp_path, "mixtral", packed=r".*\.w[12]\.weight")
    source = Source(tmp_path)
    message = f"^{re.escape(str(tmp_path))}: no tensor \\*.qweight is layers.1.experts.2.up$"
    with pytest.raises(CheckpointError, match=message):
        any_precision.expert_linears(source, names_of(source), 1, 2)


def test_refuses_the_file_that_the_project_writes(tmp_path):
    hf = checkpoints.config_of("mixtral", anyprec=apl_packing.setting())
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .*save the model as safetens"):
        Source(tmp_path)


def test_a_table_may_fall_here_and_there(tmp_path):
    table = table_with(9, 3, 1.5)
    apl_packing.write(tmp_path, "mixtral", changed={f"{X}.lut3": table})
    found = any_precision.read_linear(Source(tmp_path), X)
    np.testing.assert_array_equal(found.tables[3], table)
