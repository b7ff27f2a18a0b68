"""Every tensor has one rule, every target one tensor; shapes and dtypes fit before all else."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters import checkpoints
from converters.checkpoints import FAMILIES, LAYOUTS
from moejax.checkpoint.tensor_file import StoredTensor
from moejax.errors import CheckpointError
from moejax_converters import families, rules, targets
from moejax_converters.rules import Piece, Rule


def stored(family="mixtral", layout="per_expert", **changes):
    """The config and the headers of a folder that was never written."""
    hf = checkpoints.config_of(family, **changes)
    arrays = checkpoints.hf_tensors(checkpoints.model_tensors(hf), family, layout=layout)
    tensors = {name: tensor(name, array.shape) for name, array in arrays.items()}
    return families.model_config(hf), tensors


def tensor(name, shape, dtype="BF16"):
    return StoredTensor(
        name=name, dtype=dtype, shape=shape, path=Path("m.safetensors"), offset=0, num_bytes=0
    )


def resolve(config, tensors, extra=()):
    return rules.resolve(tensors, (*families.tensor_rules(config), *extra), config)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_target_is_filled(family, layout):
    config, tensors = stored(family, layout)
    assert sorted(resolve(config, tensors)) == sorted(targets.expected_tensors(config))


@settings(max_examples=50)
@given(
    family=st.sampled_from(FAMILIES),
    layout=st.sampled_from(LAYOUTS),
    experts=st.integers(1, 5),
    width=st.integers(1, 70),
    layers=st.integers(1, 6),
    tied=st.booleans(),
    seed=st.randoms(use_true_random=False),
)
def test_a_shuffled_checkpoint_of_any_size_resolves(
    family, layout, experts, width, layers, tied, seed
):
    key = "num_local_experts" if family == "mixtral" else "num_experts"
    size = "intermediate_size" if family in ("mixtral", "olmoe") else "moe_intermediate_size"
    config, tensors = stored(
        family,
        layout,
        **{key: experts, size: width},
        num_hidden_layers=layers,
        num_experts_per_tok=1,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=tied,
    )
    names = list(tensors)
    seed.shuffle(names)
    pieces = resolve(config, {name: tensors[name] for name in names})
    shapes = targets.expected_tensors(config)
    assert sorted(pieces) == sorted(shapes)
    for target, piece in pieces.items():
        shape = piece.tensor.shape if piece.index is None else piece.tensor.shape[1:]
        if piece.rows is not None:
            shape = (piece.rows[1] - piece.rows[0], *shape[1:])
        assert shape == shapes[target]
    del tensors[names[0]]
    with pytest.raises(CheckpointError, match="no tensor for"):
        resolve(config, tensors)


def test_an_expert_is_a_tensor_of_its_own_or_a_part_of_a_fused_one():
    config, tensors = stored()
    w3 = tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    assert resolve(config, tensors)["layers.1.experts.2.up"] == Piece(tensor=w3)
    config, tensors = stored(layout="fused")
    gate_up = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    down = tensors["model.layers.1.mlp.experts.down_proj"]
    pieces = resolve(config, tensors)
    assert pieces["layers.1.experts.2.gate"] == Piece(tensor=gate_up, index=2, rows=(0, 40))
    assert pieces["layers.1.experts.2.up"] == Piece(tensor=gate_up, index=2, rows=(40, 80))
    assert pieces["layers.1.experts.2.down"] == Piece(tensor=down, index=2)


def test_rotary_frequencies_of_old_checkpoints_are_skipped():
    config, tensors = stored()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert resolve(config, tensors | {name: tensor(name, (8,), "F32")})


def test_refuses_an_unknown_tensor():
    config, tensors = stored()
    name = "model.layers.0.self_attn.sinks"
    with pytest.raises(CheckpointError, match=r"1 tensor does .*\n.*sinks' in m\.saf.*: unknown"):
        resolve(config, tensors | {name: tensor(name, (4,))})


def test_refuses_a_tensor_that_this_model_does_not_have():
    config, tensors = stored(tie_word_embeddings=False)
    name = "model.layers.7.input_layernorm.weight"
    bias = "model.layers.0.self_attn.q_proj.bias"
    extra = {name: tensor(name, (32,)), bias: tensor(bias, (64,))}
    with pytest.raises(CheckpointError) as error:
        resolve(config, tensors | extra)
    assert str(error.value).split("\n") == [
        "2 tensors do not fit the model of config.json:",
        f"  tensor '{name}' in m.safetensors: is layers.7.attention_norm.weight, "
        "which this mixtral model does not have",
        f"  tensor '{bias}' in m.safetensors: is layers.0.attention.q.bias, "
        "which this mixtral model does not have",
    ]


def test_refuses_a_missing_tensor():
    config, tensors = stored()
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor for layers\.1\.experts\.2\.up"):
        resolve(config, tensors)


def test_refuses_two_tensors_for_one_target():
    config, tensors = stored()
    _, fused = stored(layout="fused")
    name = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(
        CheckpointError,
        match=rf"'{name}' in .*: is layers\.1\.experts\.0\.down, "
        r"as 'model\.layers\.1\.block_sparse_moe\.experts\.0\.w2\.weight' is",
    ):
        resolve(config, tensors | {name: fused[name]})


def test_refuses_a_tensor_that_two_rules_match():
    config, tensors = stored()
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' in .*: 2 rules match"):
        resolve(config, tensors, [Rule(r"model\.norm\..*", "norm.weight")])


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight", (32, 40), [40, 32]),
        ("model.embed_tokens.weight", (97, 32), [96, 32]),
        ("model.norm.weight", (32, 1), [32]),
    ],
)
def test_refuses_a_wrong_shape(name, shape, needed):
    config, tensors = stored()
    with pytest.raises(CheckpointError) as error:
        resolve(config, tensors | {name: tensor(name, shape)})
    assert f"tensor '{name}' in m.safetensors: shape {list(shape)}, needed {needed}" in str(
        error.value
    )


def test_refuses_a_fused_tensor_of_wrong_shape():
    config, tensors = stored(layout="fused")
    name = "model.layers.2.mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError, match=r"shape \[4, 32, 80\], needed \[4, 80, 32\]"):
        resolve(config, tensors | {name: tensor(name, (4, 32, 80))})


def test_refuses_integers():
    config, tensors = stored()
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' in .*: dtype F8_E4M3 is not supp"):
        resolve(config, tensors | {name: tensor(name, tensors[name].shape, "F8_E4M3")})


def test_refuses_experts_that_would_be_rounded():
    config, tensors = stored()
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    with pytest.raises(CheckpointError, match=r"dtype F32 does not fit into this model"):
        resolve(config, tensors | {name: tensor(name, (40, 32), "F32")})


def test_a_long_list_of_errors_is_cut_and_counted():
    config, tensors = stored()
    few = {name: t for name, t in tensors.items() if "experts" not in name}
    with pytest.raises(CheckpointError) as error:
        resolve(config, few)
    lines = str(error.value).split("\n")
    assert lines[0] == "36 tensors do not fit the model of config.json:"
    assert lines[1] == "  no tensor for layers.0.experts.0.gate"
    assert lines[6:] == ["  and 31 more"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_local_experts": 1_000_000},
            r"gate\.weight' in .*: shape \[4, 32\], but config\.json says that there are 1000000 e",
        ),
        (
            {"num_hidden_layers": 4000, "num_local_experts": 4},
            r"no tensor for layers\.3\.feed_forward\.router\.weight: 3997 of 4000 layers",
        ),
    ],
)
def test_counts_that_are_wrong_are_found_before_the_targets_are_listed(
    changes, message, monkeypatch
):
    _, tensors = stored()
    config = families.model_config(checkpoints.config_of("mixtral", **changes))
    monkeypatch.setattr(targets, "expected_tensors", None)
    with pytest.raises(CheckpointError, match=message):
        resolve(config, tensors)
