"""Every tensor has one rule, every target one tensor; shapes and dtypes fit before all else."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters import checkpoints
from converters.checkpoints import CASES
from moejax.checkpoint.tensor_file import StoredTensor
from moejax.errors import CheckpointError
from moejax_converters import families, rules, targets
from moejax_converters.pieces import Piece
from moejax_converters.rules import Rule


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


def resolve(config, tensors, extra=(), hf=None):
    table = families.tensor_rules(config, hf or checkpoints.config_of(config.family))
    return rules.resolve(tensors, (*table, *extra), config)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_target_is_filled(family, layout):
    config, tensors = stored(family, layout)
    assert sorted(resolve(config, tensors)) == sorted(targets.expected_tensors(config))


@settings(max_examples=50)
@given(
    case=st.sampled_from(CASES),
    experts=st.integers(2, 5),
    width=st.integers(1, 70),
    layers=st.integers(1, 6),
    tied=st.booleans(),
    seed=st.randoms(use_true_random=False),
)
def test_a_shuffled_checkpoint_of_any_size_resolves(case, experts, width, layers, tied, seed):
    family, layout = case
    plain = checkpoints.config_of(family).get("text_config", checkpoints.config_of(family))
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    sizes = ("moe_intermediate_size", "intermediate_size")
    config, tensors = stored(
        family,
        layout,
        **{next(key for key in keys if key in plain): experts},
        **{next(size for size in sizes if size in plain): width},
        num_hidden_layers=layers,
        num_experts_per_tok=2 if family == "phimoe" else 1,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        interleave_moe_layer_step=1,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
        layer_types=None,
        lm_head_bias=False,
        tie_word_embeddings=tied,
    )
    names = list(tensors)
    seed.shuffle(names)
    pieces = resolve(config, {name: tensors[name] for name in names})
    shapes = targets.expected_tensors(config)
    assert sorted(pieces) == sorted(shapes)
    for target, piece in pieces.items():
        assert piece.shape == shapes[target]
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


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k2"])
def test_layers_that_predict_further_tokens_are_skipped(family):
    config, tensors = stored(family)
    hf = checkpoints.config_of(family)
    names = ("self_attn.o_proj.weight", "eh_proj.weight", "mlp.experts.7.up_proj.weight")
    extra = {f"model.layers.3.{name}": tensor(f"model.layers.3.{name}", (1,)) for name in names}
    pieces = resolve(config, tensors | extra)
    assert sorted(pieces) == sorted(targets.expected_tensors(config))
    assert rules.unserved(tensors | extra, families.tensor_rules(config, hf)) == [
        "prediction of further tokens (3 tensors)"
    ]
    # Only as many as config.json says.
    for more, changes in ((4, {}), (3, {"num_nextn_predict_layers": 0})):
        name = f"model.layers.{more}.input_layernorm.weight"
        with pytest.raises(
            CheckpointError, match=rf"is layers\.{more}\.attention_norm\.weight, wh"
        ):
            resolve(config, tensors | {name: tensor(name, (32,))}, hf=hf | changes)


@pytest.mark.parametrize(
    ("family", "names", "said"),
    [
        (
            "llama4",
            ["vision_model.class_embedding", "multi_modal_projector.linear_1.weight"],
            ["images (2 tensors)"],
        ),
        (
            "gemma4",
            [
                "model.vision_tower.patch_embedder.weight",
                "model.embed_vision.embedding_projection.weight",
                "model.audio_tower.layers.0.x",
                "model.embed_audio.embedding_projection.weight",
            ],
            ["images (2 tensors)", "sound (2 tensors)"],
        ),
    ],
)
def test_images_and_sound_are_skipped(family, names, said):
    config, tensors = stored(family, "fused")
    hf = checkpoints.config_of(family)
    extra = {name: tensor(name, (1,)) for name in names}
    assert resolve(config, tensors | extra, hf=hf) == resolve(config, tensors, hf=hf)
    table = families.tensor_rules(config, hf)
    assert rules.unserved(tensors | extra, table) == said
    assert rules.unserved(tensors, table) == []


def test_no_other_family_has_images():
    config, tensors = stored()
    name = "vision_model.class_embedding"
    with pytest.raises(CheckpointError, match=r"vision_model\.class_embedding' in .*: unknown"):
        resolve(config, tensors | {name: tensor(name, (1,))})


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("family", ["llama4_text", "gemma4_text"])
def test_a_decoder_has_one_of_three_names(family, prefix):
    config, tensors = stored(family, "fused")
    renamed = {name.replace("model.", prefix, 1): t for name, t in tensors.items()}
    if "lm_head.weight" in renamed and prefix == "language_model.model.":
        renamed["language_model.lm_head.weight"] = renamed.pop("lm_head.weight")
    plain = {target: piece.tensor.name for target, piece in resolve(config, tensors).items()}
    found = {target: piece.tensor.name for target, piece in resolve(config, renamed).items()}
    assert found == plain


def test_refuses_a_decoder_that_has_two_names():
    config, tensors = stored("llama4_text", "fused")
    name = "language_model.model.norm.weight"
    with pytest.raises(CheckpointError, match=r"is norm\.weight, as 'model\.norm\.weight' is"):
        resolve(config, tensors | {name: tensor(name, (32,))})


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


@pytest.mark.parametrize(
    ("family", "name", "shape", "needed"),
    [
        ("mixtral", "mlp.experts.gate_up_proj", (4, 32, 80), [4, 80, 32]),
        ("mixtral", "mlp.experts.down_proj", (4, 40, 32), [4, 32, 40]),
        ("gemma4_text", "experts.gate_up_proj", (4, 32, 48), [4, 48, 32]),
        ("llama4_text", "feed_forward.experts.gate_up_proj", (4, 48, 32), [4, 32, 48]),
        ("llama4_text", "feed_forward.experts.down_proj", (4, 32, 24), [4, 24, 32]),
        ("gpt_oss", "mlp.experts.gate_up_proj", (4, 48, 32), [4, 32, 48]),
        ("gpt_oss", "mlp.experts.down_proj", (4, 32, 24), [4, 24, 32]),
        ("gpt_oss", "mlp.experts.gate_up_proj_bias", (48, 4), [4, 48]),
        ("gpt_oss", "mlp.experts.down_proj_bias", (4, 48), [4, 32]),
        ("deepseek_v2", "self_attn.kv_b_proj.weight", (20, 88), [88, 20]),
    ],
)
def test_refuses_a_fused_tensor_of_wrong_shape(family, name, shape, needed):
    config, tensors = stored(family, "fused")
    name = f"model.layers.1.{name}"
    with pytest.raises(CheckpointError) as error:
        resolve(config, tensors | {name: tensor(name, shape)})
    message = f"tensor '{name}' in m.safetensors: shape {list(shape)}, needed {needed}"
    assert message in str(error.value).split("\n  ")


@pytest.mark.parametrize(
    ("family", "first"),
    [("mixtral", [0, 1, 2]), ("gpt_oss", [0, 2, 4]), ("llama4_text", [0, 1, 2])],
)
def test_the_layout_follows_the_family_where_a_shape_fits_several(family, first):
    # Experts as wide as the hidden size, and half as wide.
    for width in (32, 16):
        config, tensors = stored(family, "fused", intermediate_size=width)
        piece = resolve(config, tensors)["layers.1.experts.2.gate"]
        block = np.arange(2 * width * 32).reshape(piece.tensor.shape[1:])
        block = block if piece.rows is None else block[slice(*piece.rows)]
        gate = piece.view.of(block)
        row = gate[0] if family == "mixtral" else gate[:, 0]
        assert row[:3].tolist() == first


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
            r"no tensor for the router of layer 3: 3997 of 4000 layers with experts have no router",
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
