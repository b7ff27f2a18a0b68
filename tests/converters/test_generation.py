"""Settings of generation and files of the tokenizer."""

import json
import os

import pytest

from converters import checkpoints
from moejax.errors import CheckpointError
from moejax_converters import generation
from moejax_converters.source import Source


def settings(folder, config, generation_config=None):
    checkpoints.write(folder, **config)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return generation.generation_settings(Source(folder), 96)


def test_stop_tokens_are_those_of_both_files(tmp_path):
    found = settings(tmp_path, {"eos_token_id": 5}, {"eos_token_id": [7, 5, 9]})
    assert found["eos_token_ids"] == [7, 5, 9]


def test_config_json_alone_is_enough(tmp_path):
    found = settings(tmp_path, {"eos_token_id": [5, 6], "pad_token_id": 0, "bos_token_id": None})
    assert found == {"eos_token_ids": [5, 6], "pad_token_id": 0}


def test_a_model_may_have_no_stop_token(tmp_path):
    assert settings(tmp_path, {"eos_token_id": None}, {})["eos_token_ids"] == []


def test_generation_config_wins_over_config(tmp_path):
    found = settings(tmp_path, {"pad_token_id": 0, "bos_token_id": 1}, {"pad_token_id": 3})
    assert (found["pad_token_id"], found["bos_token_id"]) == (3, 1)


def test_tokens_may_stand_in_the_text_part_of_the_config(tmp_path):
    hf = checkpoints.config_of("llama4", eos_token_id=[5, 6], bos_token_id=4)
    checkpoints.write_folder(tmp_path, hf | {"eos_token_id": 7}, {})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 6}')
    found = generation.generation_settings(Source(tmp_path), 96)
    assert found == {"eos_token_ids": [6, 7, 5], "bos_token_id": 4}


def test_refuses_tokens_of_the_wrong_type_in_the_text_part_of_the_config(tmp_path):
    checkpoints.write_folder(tmp_path, checkpoints.config_of("llama4", eos_token_id="</s>"), {})
    with pytest.raises(
        CheckpointError, match=r"config\.json: text_config\.eos_token_id is '</s>', needed a token"
    ):
        generation.generation_settings(Source(tmp_path), 96)


def test_sampling_settings_are_kept_where_they_are_given(tmp_path):
    given = {"temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": None, "do_sample": True}
    found = settings(tmp_path, {}, given)
    assert {name: found[name] for name in ("temperature", "top_p", "top_k")} == {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 40,
    }
    assert "min_p" not in found and "do_sample" not in found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eos_token_id": "</s>"}, r"generation_config\.json: eos_token_id is '</s>', needed a to"),
        ({"eos_token_id": True}, r"eos_token_id is True, needed a token id or a list of them"),
        ({"eos_token_id": -5}, r"generation_config\.json: eos_token_id is -5, needed ids of at le"),
        ({"temperature": "hot"}, r"generation_config\.json: temperature is 'hot'"),
        (
            {"temperature": -1},
            r"generation_config\.json: temperature is -1, needed a number from 0",
        ),
        ({"temperature": float("nan")}, r"generation_config\.json: temperature is nan, needed"),
        ({"temperature": 10**400}, r"generation_config\.json: temperature is 10+, needed"),
        ({"top_k": float("inf")}, r"top_k is inf, needed an integer from 0 to 2147483647"),
        ({"top_k": 1.9}, r"generation_config\.json: top_k is 1\.9, needed an integer"),
        ({"top_k": 9999999999999}, r"top_k is 9999999999999, needed an integer from 0 to 2147483"),
        ({"top_k": True}, r"generation_config\.json: top_k is True, needed an integer"),
        ({"top_p": 0}, r"generation_config\.json: top_p is 0, needed a number above 0 to 1"),
        ({"min_p": 2}, r"generation_config\.json: min_p is 2, needed a number from 0 to 1"),
        ({"do_sample": 0}, r"generation_config\.json: do_sample is 0, needed true or false"),
    ],
)
def test_refuses_settings_of_the_wrong_type(given, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        settings(tmp_path, {}, given)


@pytest.mark.parametrize("temperature", [{}, {"temperature": 0.6}])
def test_without_sampling_the_temperature_is_0(temperature, tmp_path):
    found = settings(tmp_path, {}, {"do_sample": False, "top_p": 0.9} | temperature)
    assert (found["temperature"], found["top_p"]) == (0.0, 0.9)


def test_tokens_beyond_the_vocabulary_are_left_out_and_that_is_said(tmp_path, caplog):
    found = settings(tmp_path, {"pad_token_id": -1}, {"eos_token_id": [96, 7]})
    assert found == {"eos_token_ids": [7, 2], "bos_token_id": 1}
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/generation_config.json: eos_token_id [96] is ignored: "
        "the vocabulary has 96 tokens",
        f"{tmp_path}/config.json: pad_token_id [-1] is ignored: the vocabulary has 96 tokens",
    ]


def test_what_is_not_supported_is_named_in_one_warning(tmp_path, caplog):
    given = {"repetition_penalty": 1.1, "num_beams": 4, "typical_p": 1.0, "min_length": 0}
    assert settings(tmp_path, {}, given) == {"eos_token_ids": [2], "bos_token_id": 1}
    (record,) = caplog.records
    assert record.message == (
        f"{tmp_path}/generation_config.json: not supported and ignored: "
        "num_beams 4, repetition_penalty 1.1"
    )


def test_a_dangling_generation_config_is_not_passed_over(tmp_path):
    checkpoints.write(tmp_path)
    (tmp_path / "generation_config.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: No such file"):
        generation.generation_settings(Source(tmp_path), 96)


def test_refuses_a_broken_generation_config(tmp_path):
    checkpoints.write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not JSON"):
        generation.generation_settings(Source(tmp_path), 96)


def test_tokenizer_files_are_copied_and_nothing_else(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    names = [
        "added_tokens.json",
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    ]
    for name in [*names, "README.md", "config.json", "model.safetensors"]:
        (source / name).write_text(name)
    generation.copy_tokenizer(source, target)
    copied = [str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()]
    assert sorted(copied) == names
    assert all((target / name).read_text() == name for name in names)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/tokenizer\.json: No such file"):
        generation.copy_tokenizer(tmp_path, target)


def test_a_folder_among_the_chat_templates_is_named(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "additional_chat_templates" / "old").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"additional_chat_templates/old: needed a file of"):
        generation.copy_tokenizer(tmp_path, target)


def test_a_file_that_two_patterns_match_is_copied(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "vocab.tiktoken").write_text("x")
    generation.copy_tokenizer(tmp_path, target)
    assert (target / "vocab.tiktoken").read_text() == "x"


def test_a_folder_without_a_tokenizer_is_fine(tmp_path):
    (tmp_path / "target").mkdir()
    generation.copy_tokenizer(tmp_path, tmp_path / "target")
    assert os.listdir(tmp_path / "target") == []
