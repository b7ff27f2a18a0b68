"""What is served straight, what is converted first, and where it is kept."""

import os
import subprocess
import sys

import pytest

from converters import checkpoints
from moejax.checkpoint import Checkpoint, manifest
from moejax.errors import CheckpointError
from moejax_converters.cache import cache_folder, converted


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("MOEJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_converted_once(tmp_path, cache):
    model = checkpoints.write(tmp_path / "hf")
    folder = converted(tmp_path / "hf")
    assert folder.parent == cache
    assert folder.name.startswith("hf-")
    checkpoints.assert_same(checkpoints.decoded(folder), model)
    before = (folder / "moejax.json").stat()
    assert converted(str(tmp_path / "hf")) == folder
    assert (folder / "moejax.json").stat() == before


def test_a_converted_folder_is_used_as_it_is(tmp_path):
    checkpoints.write(tmp_path / "hf")
    folder = converted(tmp_path / "hf")
    assert converted(folder) == folder


def test_a_folder_that_changed_is_converted_again(tmp_path):
    checkpoints.write(tmp_path / "hf")
    first = converted(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    second = converted(tmp_path / "hf")
    assert second != first
    assert (second / "tokenizer.json").exists()


def test_folders_of_the_same_name_do_not_meet(tmp_path):
    for parent in ("a", "b"):
        checkpoints.write(tmp_path / parent / "hf")
    assert converted(tmp_path / "a" / "hf") != converted(tmp_path / "b" / "hf")


@pytest.mark.parametrize("name", ["a" * 255, "a b é [1]", b"\xff".decode(errors="surrogateescape")])
def test_a_source_may_have_any_name(name, tmp_path):
    checkpoints.write(tmp_path / name)
    assert converted(tmp_path / name).name.isascii()


def test_a_conversion_in_another_format_is_not_taken(tmp_path, monkeypatch):
    checkpoints.write(tmp_path / "hf")
    first = converted(tmp_path / "hf")
    monkeypatch.setattr(manifest, "KEYS", (*manifest.KEYS, "more"))
    with pytest.raises(CheckpointError, match=r"needs the keys"):
        Checkpoint.open(first)
    assert converted(tmp_path / "hf") != first


def test_the_cache_lies_where_the_environment_says(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("MOEJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(cache_folder()) == "/somewhere/moejax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert str(cache_folder()) == "/home/user/.cache/moejax"


def test_two_processes_at_once_get_the_same_valid_folder(tmp_path):
    model = checkpoints.write(tmp_path / "hf", "olmoe")
    code = "import sys; from moejax_converters import cache; print(cache.converted(sys.argv[1]))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "hf")],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0] == results[1]
    assert results[0][1] == "", "nothing is said where there is no terminal"
    checkpoints.assert_same(checkpoints.decoded(tmp_path / results[0][0].strip()), model)


def test_refuses_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"Mixtral-8x7B: no such folder; a model is a folder, from moejax-convert or Hugging",
    ):
        converted(tmp_path / "Mixtral-8x7B")


def test_refuses_a_folder_that_is_not_a_model(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"is not a model: neither moejax\.json of moejax nor config\.json of Hugging Face",
    ):
        converted(tmp_path)


def test_refuses_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    checkpoints.write(tmp_path / "hf")
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        CheckpointError, match=r"the cache .*file/cache cannot be written \(.*\): set MOEJAX_CACHE"
    ):
        converted(tmp_path / "hf")


def test_a_model_that_is_refused_leaves_no_folder_in_the_cache(tmp_path, cache):
    checkpoints.write(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        converted(tmp_path / "hf")
    assert [path for path in cache.iterdir() if path.is_dir()] == []
