"""Packed checkpoints of Any-Precision LLM: the order of their bits, and their names."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters import apl_packing, checkpoints, hf_names
from converters.apl_packing import names_of, resolve
from moejax.errors import ConfigError
from moejax_converters import any_precision, families, rules, targets
from moejax_converters.any_precision import PackedLinear
from moejax_converters.source import Source

COLUMNS = (352, 704, 1056, 1408, 14336)
"""Of real experts: less than a chunk, chunks with a rest, whole chunks."""
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
X = "model.layers.0.block_sparse_moe.experts.2.w3"


def random_words(rng, planes, rows, columns):
    return rng.integers(-(1 << 31), 1 << 31, (planes, rows, columns // 32)).astype(np.int32)


def assert_equal(actual, wanted):
    assert (actual.seed_bits, actual.parent_bits) == (wanted.seed_bits, wanted.parent_bits)
    np.testing.assert_array_equal(actual.codes, wanted.codes)
    assert sorted(actual.tables) == sorted(wanted.tables)
    for bits, table in wanted.tables.items():
        assert actual.tables[bits].tobytes() == table.tobytes()


# The order of bits


def test_one_word_of_each_plane():
    words = np.array([0xC0000001, 0x80000100, 0x00018000], np.uint32).view(np.int32)
    codes = any_precision.unpack_codes(words.reshape(3, 1, 1))
    wanted = np.zeros(32, np.uint8)
    # In a row of one word, column n is bit 31 - n: here 31, 30, 16, 15, 8 and 0.
    wanted[0], wanted[1], wanted[15], wanted[16], wanted[23], wanted[31] = 6, 4, 1, 1, 2, 4
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes, wanted[None])


@pytest.mark.parametrize(
    ("columns", "word", "bit", "column"),
    [
        (64, 0, 31, 0),  # a word starts with eight columns, then the other word has its eight
        (64, 0, 24, 7),
        (64, 1, 31, 8),
        (64, 0, 23, 16),
        (64, 1, 0, 63),
        (1024, 1, 31, 8),
        (1024, 0, 23, 256),
        (1024, 31, 0, 1023),
        (1056, 0, 23, 256),  # the first chunk does not see that a rest of one word follows
        (1056, 32, 31, 1024),
        (1056, 32, 23, 1032),
        (2112, 64, 23, 2064),  # and here of two
        (2112, 65, 31, 2056),
    ],
)
def test_a_bit_is_a_column(columns, word, bit, column):
    words = np.zeros((1, 2, columns // 32), np.uint32)
    words[0, 1, word] = 1 << bit
    codes = any_precision.unpack_codes(words.view(np.int32))
    assert np.argwhere(codes).tolist() == [[1, column]]


@pytest.mark.parametrize("bits", range(3, 9))
@pytest.mark.parametrize("columns", COLUMNS)
def test_what_was_packed_is_unpacked(columns, bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (2, columns), np.uint8)
    unpacked = any_precision.unpack_codes(apl_packing.pack(codes, bits))
    np.testing.assert_array_equal(unpacked, codes)


@settings(max_examples=50)
@given(
    words=st.integers(1, 70),
    rows=st.integers(1, 3),
    bits=st.integers(1, 8),
    seed=st.integers(0, 1 << 32),
)
def test_unpacking_loses_nothing(words, rows, bits, seed):
    qweight = random_words(np.random.default_rng(seed), bits, rows, 32 * words)
    packed = apl_packing.pack(any_precision.unpack_codes(qweight), bits)
    np.testing.assert_array_equal(packed, qweight)


@pytest.mark.parametrize("bits", range(3, 9))
@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_meet_the_activations_that_they_meet_in_the_kernel(columns, bits):
    """Sums of integers are exact in float64: a column in a wrong place changes them."""
    rng = np.random.default_rng(columns + bits)
    qweight = random_words(rng, 8, 2, columns)
    table = np.stack([rng.permutation(1 << bits), rng.permutation(1 << bits)])
    activations = rng.integers(-(1 << 20), 1 << 20, columns)
    linear = PackedLinear(
        codes=any_precision.unpack_codes(qweight),
        tables={bits: table.astype(np.float16)},
        seed_bits=bits,
        parent_bits=8,
    )
    found = any_precision.values(linear, bits).astype(np.int64) @ activations
    wanted = apl_packing.kernel_product(qweight[:bits], table, activations.astype(np.float64))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("planes", [0, 9])
def test_codes_are_bytes(planes):
    with pytest.raises(ValueError, match=f"{planes} planes, needed 1 to 8"):
        any_precision.unpack_codes(np.zeros((planes, 1, 1), np.int32))


# Widths


def test_a_width_is_the_top_bits_and_a_table_of_its_own():
    linear = PackedLinear(
        codes=np.array([[0, 5, 7], [2, 3, 4]], np.uint8),
        tables={
            2: np.array([[-2, -1, 1, 2], [0, 10, 20, 30]], np.float16),
            3: np.array([range(8), range(100, 108)], np.float16),
        },
        seed_bits=2,
        parent_bits=3,
    )
    assert any_precision.values(linear, 3).tolist() == [[0, 5, 7], [102, 103, 104]]
    assert any_precision.values(linear, 2).tolist() == [[-2, 1, 2], [10, 10, 20]]
    assert any_precision.values(linear, 2).dtype == np.float16


@settings(max_examples=50)
@given(data=st.data(), seed_bits=st.integers(2, 8), rows=st.integers(1, 4))
def test_a_cut_linear_has_the_same_weights(data, seed_bits, rows):
    parent_bits = data.draw(st.integers(seed_bits, 8))
    bits = data.draw(st.integers(seed_bits, parent_bits))
    rng = np.random.default_rng(parent_bits)
    linear = apl_packing.random_linear(rng, rows, 64, seed_bits=seed_bits, parent_bits=parent_bits)
    short = any_precision.cut(linear, bits)
    assert (short.seed_bits, short.parent_bits) == (seed_bits, bits)
    assert sorted(short.tables) == list(range(seed_bits, bits + 1))
    for width in short.tables:
        assert (
            any_precision.values(short, width).tobytes()
            == any_precision.values(linear, width).tobytes()
        )
    # The codes are what the first planes hold.
    planes = apl_packing.pack(linear.codes, parent_bits)[:bits]
    np.testing.assert_array_equal(short.codes, any_precision.unpack_codes(planes))


@pytest.mark.parametrize("bits", [2, 7])
@pytest.mark.parametrize("function", [any_precision.cut, any_precision.values])
def test_refuses_a_width_that_is_not_there(function, bits):
    linear = apl_packing.random_linear(np.random.default_rng(0), 1, 32, parent_bits=6)
    with pytest.raises(ConfigError, match=f"^{bits} bits: the packed weights have 3 to 6$"):
        function(linear, bits)


# Folders


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize(("seed_bits", "parent_bits"), [(3, 8), (3, 6), (2, 2)])
def test_a_linear_is_read_as_it_was_written(seed_bits, parent_bits, shards, tmp_path):
    linears = apl_packing.write(
        tmp_path,
        "mixtral",
        packed=rf"{re.escape(X)}\.weight",
        seed_bits=seed_bits,
        parent_bits=parent_bits,
        shards=shards,
    )
    assert list(linears) == [X]
    linear = any_precision.read_linear(Source(tmp_path), X)
    assert_equal(linear, linears[X])
    assert linear.codes.dtype == np.uint8 and linear.codes.shape == (64, 32)


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_have_the_names_of_their_family(family, tmp_path):
    linears = apl_packing.write(tmp_path, family)
    source = Source(tmp_path)
    config, names = families.source_config(source), names_of(source)
    experts = [target for target in targets.expected_tensors(config) if ".experts." in target]
    assert names == {
        target: hf_names.hf_name(target, family, "per_expert").removesuffix(".weight")
        for target in experts
    }
    for layer in config.moe_layers:
        found = any_precision.expert_linears(source, names, layer, 3)
        assert tuple(found) == any_precision.EXPERT_PARTS
        for part, linear in found.items():
            assert_equal(linear, linears[names[f"layers.{layer}.experts.3.{part}"]])


@pytest.mark.parametrize("packed", [apl_packing.EXPERTS, apl_packing.ALL_LINEARS])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_rest_of_a_folder_resolves_as_any_other(family, packed, tmp_path):
    linears = apl_packing.write(tmp_path, family, packed=packed)
    source = Source(tmp_path)
    pieces, names = resolve(source), names_of(source)
    assert sorted(pieces) == sorted(targets.expected_tensors(families.source_config(source)))
    assert sorted(names.values()) == sorted(linears)
    for target, piece in pieces.items():
        name = piece.tensor.name
        if target in names:
            assert name == f"{names[target]}.weight" and piece.tensor.dtype == "F16"
            assert piece.shape == any_precision.read_linear(source, names[target]).codes.shape
        else:
            assert source.read(name).shape == piece.shape
    has_router = any(target.endswith("feed_forward.router.weight") for target in names)
    assert has_router == (packed == apl_packing.ALL_LINEARS)


def test_a_packed_tensor_of_several_targets_is_parts_of_its_values(tmp_path):
    linears = apl_packing.write(tmp_path, "deepseek_v2", packed=apl_packing.ALL_LINEARS)
    prefix = "model.layers.1.self_attn.kv_b_proj"
    source = Source(tmp_path)
    assert prefix in linears and prefix not in names_of(source).values()
    piece = resolve(source)["layers.1.attention.v_up"]
    assert piece.tensor.name == f"{prefix}.weight"
    weights = any_precision.values(any_precision.read_linear(source, prefix), 4)
    heads = weights.reshape(4, 12 + 8, 32)
    np.testing.assert_array_equal(piece.view.of(weights), heads[:, 12:])


def test_what_rules_skip_has_no_target(tmp_path):
    extra = apl_packing.random_linear(np.random.default_rng(0), 4, 32, parent_bits=4)
    prefix = "model.layers.3.self_attn.q_proj"
    apl_packing.write(tmp_path, "mixtral", changed=apl_packing.tensors_of(prefix, extra))
    table = (rules.Skip(rules.LAYER + r"self_attn\.q_proj\.weight", "of no use"),)
    source = Source(tmp_path)
    packed = {f"{prefix}.qweight": source.tensors[f"{prefix}.qweight"]}
    assert any_precision.packed_names(table, packed) == {}


def test_a_config_says_that_a_folder_is_packed():
    assert any_precision.is_any_precision({"anyprec": apl_packing.setting()})
    assert not any_precision.is_any_precision(checkpoints.config_of("mixtral"))
    assert not any_precision.is_any_precision({"anyprec": None})


def test_settings_of_other_versions_are_read():
    """The first ones knew no groups; a variant names its sparse outliers, here none."""
    first = {"seed_precision": 3, "parent_precision": 8}
    assert any_precision.scheme({"anyprec": first}).widths == range(3, 9)
    variant = apl_packing.setting(2, 2, sparse_numvals={})
    assert any_precision.scheme({"anyprec": variant}).widths == range(2, 3)
