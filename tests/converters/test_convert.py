"""The whole conversion: what comes out is what went in, or nothing comes out."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from converters import checkpoints
from converters.checkpoints import ALWAYS_FUSED, CASES, FAMILIES, LAYOUTS
from moejax.checkpoint import Checkpoint
from moejax.errors import CheckpointError, ConfigError
from moejax_converters import convert as convert_module
from moejax_converters.convert import convert
from moejax_converters.source import Source


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_value_survives(family, layout, tmp_path):
    model = checkpoints.write(tmp_path / "hf", family, layout=layout)
    convert(tmp_path / "hf", tmp_path / "out")
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model)


@pytest.mark.shows("conversion", "one tensor per expert or fused, the same checkpoint")
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(ALWAYS_FUSED)))
def test_both_layouts_give_the_same_bytes(family, tmp_path):
    for layout in LAYOUTS:
        checkpoints.write(tmp_path / f"hf-{layout}", family, layout=layout)
        convert(tmp_path / f"hf-{layout}", tmp_path / layout)
    # Orbax writes the time into these two.
    times = {"_CHECKPOINT_METADATA", "commit_success.txt"}
    files = [
        {
            path.relative_to(tmp_path / layout): path.read_bytes()
            for path in (tmp_path / layout).rglob("*")
            if path.is_file() and path.name not in times
        }
        for layout in LAYOUTS
    ]
    assert files[0] == files[1]


def test_shards_are_read_through_the_index(tmp_path):
    model = checkpoints.write(tmp_path / "hf", "qwen2_moe", shards=3)
    convert(tmp_path / "hf", tmp_path / "out")
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model)


@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "gpt_oss", "gemma4_text"])
def test_what_several_targets_lie_in_is_read_once(family, tmp_path, monkeypatch):
    checkpoints.write(tmp_path / "hf", family, layout="fused")
    read = []

    def spy(self, name, *, index=None, rows=None):
        read.append((name, index, rows))
        return original(self, name, index=index, rows=rows)

    original = Source.read
    monkeypatch.setattr(Source, "read", spy)
    convert(tmp_path / "hf", tmp_path / "out")
    experts = [block for block in read if block[1] is not None]
    tensors = {name for name in Source(tmp_path / "hf").tensors if name.endswith("gate_up_proj")}
    assert {name for name, _, _ in experts if "gate_up" in name} == tensors
    assert len(experts) == len(set(experts))
    # gate and up are rows that follow each other, or columns, which no file has in one place.
    rows = [(0, 40), (40, 80)] if family == "mixtral" else [(0, 24), (24, 48)]
    rows = rows if family in ("mixtral", "gemma4_text") else [None]
    for name in tensors:
        assert [block[1:] for block in read if block[0] == name] == [
            (expert, part) for expert in range(4) for part in rows
        ]


def test_what_is_not_served_is_said_in_one_line(tmp_path, caplog):
    hf = checkpoints.config_of("llama4")
    model = checkpoints.model_tensors(hf)
    tensors = checkpoints.hf_tensors(model, "llama4")
    for name in ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight"):
        tensors[name] = np.zeros(2, np.float32)
    checkpoints.write_folder(tmp_path / "hf", hf, tensors)
    convert(tmp_path / "hf", tmp_path / "out")
    assert [record.message for record in caplog.records] == [
        f"images (2 tensors) is not served: left out of {tmp_path}/hf"
    ]
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model)


def test_layers_that_predict_further_tokens_are_left_out_and_that_is_said(tmp_path, caplog):
    hf = checkpoints.config_of("deepseek_v3")
    model = checkpoints.model_tensors(hf)
    tensors = checkpoints.hf_tensors(model, "deepseek_v3")
    tensors |= {
        name.replace("layers.2.", "layers.3."): array
        for name, array in tensors.items()
        if "layers.2." in name
    }
    checkpoints.write_folder(tmp_path / "hf", hf, tensors)
    convert(tmp_path / "hf", tmp_path / "out")
    assert "prediction of further tokens (" in caplog.text
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model)


def test_float32_stays_float32(tmp_path):
    model = checkpoints.write(
        tmp_path / "hf", "olmoe", dtype=np.dtype(np.float32), torch_dtype="float32"
    )
    convert(tmp_path / "hf", tmp_path / "out")
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model)


@pytest.mark.parametrize("torch_dtype", ["float16", None])
def test_float16_becomes_float32_and_that_is_said(torch_dtype, tmp_path, caplog):
    model = checkpoints.write(tmp_path / "hf", dtype=np.dtype(np.float16), torch_dtype=torch_dtype)
    with caplog.at_level(logging.WARNING, "moejax_converters"):
        convert(tmp_path / "hf", tmp_path / "out")
    assert "float16 weights are stored as float32, which holds them exactly" in caplog.text
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model, dtype=np.float32)


def test_bfloat16_becomes_float32_if_the_config_says_so(tmp_path, caplog):
    model = checkpoints.write(tmp_path / "hf", torch_dtype="float32")
    convert(tmp_path / "hf", tmp_path / "out")
    assert "bfloat16 weights are stored as float32, which holds them exactly" in caplog.text
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model, dtype=np.float32)


def test_without_a_dtype_the_tensors_say_it(tmp_path):
    checkpoints.write(tmp_path / "hf", torch_dtype=None)
    convert(tmp_path / "hf", tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "feed_forward.router.weight"),
        ("deepseek_v3", "feed_forward.router.weight"),
        ("deepseek_v3", "feed_forward.router.choice_bias"),
    ],
)
def test_a_float32_router_in_a_bfloat16_model_stays_float32(family, name, tmp_path):
    hf = checkpoints.config_of(family)
    model = checkpoints.model_tensors(hf)
    del hf["torch_dtype"]
    router = f"layers.1.{name}"
    model[router] = np.full(model[router].shape, 1 / 3, np.float32)
    checkpoints.write_folder(tmp_path / "hf", hf, checkpoints.hf_tensors(model, family))
    convert(tmp_path / "hf", tmp_path / "out")
    for target in model:  # they are stacked
        if target.endswith(name):
            model[target] = model[target].astype(np.float32)
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model)


def test_the_config_and_the_settings_of_generation_are_kept(tmp_path):
    checkpoints.write(tmp_path / "hf", generation={"eos_token_id": [7, 2], "temperature": 0.7})
    convert(tmp_path / "hf", tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.config.family == "mixtral"
    assert checkpoint.config.moe.expert_width == 40
    assert checkpoint.generation == {
        "eos_token_ids": [7, 2],
        "bos_token_id": 1,
        "temperature": 0.7,
    }


def test_a_redundant_tied_head_is_accepted(tmp_path):
    hf = checkpoints.config_of("mixtral", tie_word_embeddings=True)
    model = checkpoints.model_tensors(hf)
    tensors = checkpoints.hf_tensors(model, "mixtral")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    checkpoints.write_folder(tmp_path / "hf", hf, tensors)
    convert(tmp_path / "hf", tmp_path / "out")
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    hf = checkpoints.config_of("mixtral", tie_word_embeddings=True)
    tensors = checkpoints.hf_tensors(checkpoints.model_tensors(hf), "mixtral")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    checkpoints.write_folder(tmp_path / "hf", hf, tensors)
    with pytest.raises(
        CheckpointError,
        match=r"'lm_head\.weight' in .*: differs from 'model\.embed_tokens\.weight', but "
        r"config\.json says that it is tied to the embeddings",
    ):
        convert(tmp_path / "hf", tmp_path / "out")


def test_an_existing_target_is_not_touched(tmp_path):
    checkpoints.write(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"out exists: it is not overwritten"):
        convert(tmp_path / "hf", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.shows("conversion", "all or nothing, nothing overwritten")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError(28, "No space left")])
def test_a_conversion_that_fails_leaves_nothing(error, tmp_path, monkeypatch):
    checkpoints.write(tmp_path / "hf")

    def fail(*args: object) -> None:
        assert len(os.listdir(tmp_path)) == 2, "the temporary folder is beside the target"
        raise error

    monkeypatch.setattr(convert_module, "_put_expert", fail)
    with pytest.raises((KeyboardInterrupt, RuntimeError, CheckpointError)):
        convert(tmp_path / "hf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["hf"]


def test_a_bad_source_leaves_nothing(tmp_path):
    checkpoints.write(tmp_path / "hf", num_local_experts=5)
    path = tmp_path / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short|ends at byte"):
        convert(tmp_path / "hf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["hf"]


def test_read_only_source_files_do_not_make_a_read_only_checkpoint(tmp_path):
    checkpoints.write(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    for path in (tmp_path / "hf").iterdir():
        path.chmod(0o444)
    convert(tmp_path / "hf", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").stat().st_mode & 0o200


def test_a_token_that_no_page_holds_is_refused_before_anything_is_written(tmp_path):
    sizes = {"head_dim": 8192, "num_key_value_heads": 4, "hidden_size": 4, "num_hidden_layers": 1}
    checkpoints.write(tmp_path / "hf", **sizes)
    with pytest.raises(ConfigError, match="a token needs 131072 bytes of KV in each layer, a page"):
        convert(tmp_path / "hf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["hf"]


def test_a_fault_of_the_tokenizer_names_its_file_and_leaves_nothing(tmp_path):
    checkpoints.write(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/hf/tokenizer\.json: No such file"):
        convert(tmp_path / "hf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["hf"]


def test_progress_is_shown_on_a_terminal_only(tmp_path, capsys):
    checkpoints.write(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", progress=True)
    assert capsys.readouterr() == ("", "")


def test_relative_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints.write(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    convert("hf", "out")
    assert Checkpoint.open("out").dense_names()
