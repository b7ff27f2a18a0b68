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
    return generation.generation_settings(Source(folder))


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
        ({"temperature": "hot"}, r"generation_config\.json: temperature is 'hot'"),
    ],
)
def test_refuses_settings_of_the_wrong_type(given, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        settings(tmp_path, {}, given)


def test_refuses_a_broken_generation_config(tmp_path):
    checkpoints.write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not JSON"):
        generation.generation_settings(Source(tmp_path))


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


def test_a_folder_without_a_tokenizer_is_fine(tmp_path):
    (tmp_path / "target").mkdir()
    generation.copy_tokenizer(tmp_path, tmp_path / "target")
    assert os.listdir(tmp_path / "target") == []
