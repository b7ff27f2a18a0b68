"""Tensors that hold several targets: where each lies, by worked examples."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters import checkpoints
from moejax.checkpoint.tensor_file import StoredTensor
from moejax_converters import families, fused, targets
from moejax_converters.pieces import Piece, View


def stored(shape):
    return StoredTensor(
        name="x", dtype="F32", shape=shape, path=Path("m.safetensors"), offset=0, num_bytes=0
    )


def numbers(shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def config_of(family, **changes):
    return families.model_config(checkpoints.config_of(family, **changes))


def read(layout, at, config):
    """The targets of a tensor of this layout, whose values are 0, 1, 2 …; and the tensor."""
    shape = layout(at, stored(()), config).shape
    array = numbers(shape)
    found = {}
    for target, piece in layout(at, stored(shape), config).pieces.items():
        block = array if piece.index is None else array[piece.index]
        block = block if piece.rows is None else block[slice(*piece.rows)]
        found[target] = piece.view.of(block)
        assert found[target].shape == piece.shape
    return found, array


def test_rows_of_gate_then_of_up():
    config = config_of("mixtral", num_local_experts=2, intermediate_size=3, hidden_size=2)
    found, _ = read(fused.gate_up_rows, "layers.0.experts", config)
    assert found["layers.0.experts.1.gate"].tolist() == [[12, 13], [14, 15], [16, 17]]
    assert found["layers.0.experts.1.up"].tolist() == [[18, 19], [20, 21], [22, 23]]
    found, _ = read(fused.down_rows, "layers.0.experts", config)
    assert found["layers.0.experts.1.down"].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_columns_of_gate_then_of_up():
    config = config_of("llama4_text", num_local_experts=2, intermediate_size=3, hidden_size=2)
    found, _ = read(fused.gate_up_columns, "layers.1.experts", config)
    # Expert 1 is [[12 13 14 15 16 17], [18 19 20 21 22 23]].
    assert found["layers.1.experts.1.gate"].tolist() == [[12, 18], [13, 19], [14, 20]]
    assert found["layers.1.experts.1.up"].tolist() == [[15, 21], [16, 22], [17, 23]]
    found, _ = read(fused.down_columns, "layers.1.experts", config)
    # Expert 1 is [[6 7], [8 9], [10 11]].
    assert found["layers.1.experts.1.down"].tolist() == [[6, 8, 10], [7, 9, 11]]


def test_columns_of_gate_and_up_in_turn():
    config = config_of("gpt_oss", num_local_experts=2, intermediate_size=3, hidden_size=2)
    found, _ = read(fused.gate_up_alternating, "layers.1.experts", config)
    assert found["layers.1.experts.1.gate"].tolist() == [[12, 18], [14, 20], [16, 22]]
    assert found["layers.1.experts.1.up"].tolist() == [[13, 19], [15, 21], [17, 23]]


def test_biases_of_gate_and_up_in_turn():
    config = config_of("gpt_oss", num_local_experts=2, intermediate_size=3)
    found, _ = read(fused.alternating_bias, "layers.1.feed_forward.expert_bias", config)
    assert {name.rpartition(".")[2]: array.tolist() for name, array in found.items()} == {
        "gate": [[0, 2, 4], [6, 8, 10]],
        "up": [[1, 3, 5], [7, 9, 11]],
    }


def test_keys_and_values_of_each_head():
    sizes = {"qk_nope_head_dim": 2, "v_head_dim": 1, "kv_lora_rank": 2, "num_attention_heads": 2}
    config = config_of("deepseek_v2", **sizes, num_key_value_heads=2)
    found, array = read(fused.keys_and_values, "layers.0.attention", config)
    assert array.shape == (6, 2)
    assert found["layers.0.attention.k_up"].tolist() == [[[0, 1], [2, 3]], [[6, 7], [8, 9]]]
    assert found["layers.0.attention.v_up"].tolist() == [[[4, 5]], [[10, 11]]]


@pytest.mark.parametrize(
    ("family", "layout", "at"),
    [
        ("mixtral", fused.gate_up_rows, "layers.0.experts"),
        ("gemma4_text", fused.down_rows, "layers.0.experts"),
        ("llama4_text", fused.gate_up_columns, "layers.1.experts"),
        ("llama4_text", fused.down_columns, "layers.1.experts"),
        ("gpt_oss", fused.gate_up_alternating, "layers.0.experts"),
        ("gpt_oss", fused.alternating_bias, "layers.0.feed_forward.expert_bias"),
        ("deepseek_v3", fused.keys_and_values, "layers.0.attention"),
    ],
)
def test_every_value_is_in_one_target_of_the_shape_that_the_model_has(family, layout, at):
    config = config_of(family)
    found, array = read(layout, at, config)
    expected = targets.expected_tensors(config)
    assert {target: part.shape for target, part in found.items()} == {
        target: expected[target] for target in found
    }
    values = np.concatenate([part.reshape(-1) for part in found.values()])
    assert np.array_equal(np.sort(values), array.reshape(-1))


SLICES = st.builds(slice, st.none() | st.integers(0, 3), st.none() | st.integers(0, 6)) | st.builds(
    slice, st.integers(0, 1), st.none(), st.just(2)
)


@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
    cut=st.lists(SLICES, max_size=2).map(tuple),
    flat=st.booleans(),
    swapped=st.booleans(),
)
def test_a_view_has_the_shape_that_it_says(shape, cut, flat, swapped):
    view = View(shape=(shape[0], math.prod(shape[1:])) if flat else None, cut=cut, swapped=swapped)
    assert view.shape_of(shape) == view.of(numbers(shape)).shape


def test_a_view_copies_nothing():
    array = numbers((4, 6))
    view = View(shape=(2, 2, 6), cut=(slice(None), slice(1)), swapped=True)
    assert np.shares_memory(view.of(array), array)


@pytest.mark.parametrize(
    ("piece", "shape"),
    [
        (Piece(tensor=stored((4, 6, 8))), (4, 6, 8)),
        (Piece(tensor=stored((4, 6, 8)), index=1), (6, 8)),
        (Piece(tensor=stored((4, 6, 8)), index=1, rows=(2, 5)), (3, 8)),
        (Piece(tensor=stored((4, 6, 8)), index=1, rows=(2, 5), view=View(swapped=True)), (8, 3)),
        (Piece(tensor=stored((4, 6)), view=View(cut=(slice(None), slice(1, None, 2)))), (4, 3)),
    ],
)
def test_a_piece_has_the_shape_of_its_view_of_what_is_read(piece, shape):
    assert piece.shape == shape
