"""Reading a Hugging Face folder, and every way in which one can be broken."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from converters import checkpoints
from moejax.errors import CheckpointError
from moejax_converters.source import Source


@pytest.fixture
def folder(tmp_path):
    """A folder with a config.json and no weights."""
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    return tmp_path


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_tensors_are_read_as_they_are(dtype, folder):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    save_file({"a": array, "b": array + array}, folder / "model.safetensors")
    source = Source(folder)
    assert source.tensors["a"].shape == (2, 3, 4)
    np.testing.assert_array_equal(source.read("a"), array)
    np.testing.assert_array_equal(source.read("b", index=1), (array + array)[1])
    np.testing.assert_array_equal(source.read("b", index=1, rows=(1, 3)), (array + array)[1, 1:3])
    np.testing.assert_array_equal(source.read("a", rows=(1, 2)), array[1:2])
    assert source.read("a").dtype == dtype


@pytest.mark.parametrize(
    "piece",
    [
        {"index": 2},
        {"index": -1},
        {"rows": (1, 3)},
        {"rows": (-1, 1)},
        {"rows": (2, 1)},
        {"index": 1, "rows": (2, 4)},
    ],
)
def test_what_lies_outside_of_a_tensor_is_not_read(piece, folder):
    array = np.zeros((2, 3), np.float32)
    save_file({"a": array, "b": array, "c": array}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"b \[2, 3\] has no piece index="):
        Source(folder).read("b", **piece)


def test_several_files_are_read_without_an_index(folder):
    save_file({"a": np.zeros(2, np.float32)}, folder / "part-a.safetensors")
    save_file({"b": np.ones(2, np.float32)}, folder / "part-b.safetensors")
    assert sorted(Source(folder).tensors) == ["a", "b"]


def test_the_index_decides_which_files_count(tmp_path):
    checkpoints.write(tmp_path, shards=2)
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "consolidated.safetensors")
    assert "x" not in Source(tmp_path).tensors


def test_refuses_a_path_that_is_not_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere: no such folder"):
        Source(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800"], ids=["long", "NUL", "surrogate"])
def test_refuses_what_cannot_be_the_name_of_a_folder(name, tmp_path):
    with pytest.raises(CheckpointError, match=": no such folder$"):
        Source(tmp_path / name)


def test_refuses_a_folder_without_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a Hugging Face folder: no config\.json"):
        Source(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", r"config\.json: not JSON"), ("[]", r"config\.json: not a JSON obj")]
)
def test_refuses_a_broken_config(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Source(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ('{"a":' * 100 + "0" + "}" * 100, "nested deeper than 64"),
        ('{"vocab_size": 1, "vocab_size": 2}', "key 'vocab_size' stands twice in an object"),
    ],
    ids=["list", "object", "100 levels", "twice"],
)
def test_json_that_could_mislead_or_break_a_reader_is_refused(text, message, folder):
    header = text.encode()
    for name, data in (
        ("model.safetensors", struct.pack("<Q", len(header)) + header),
        ("model.safetensors.index.json", header),
        ("config.json", header),
    ):
        (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{name}: .*not .*JSON.*{message}") as error:
            Source(folder)
        assert "\n" not in str(error.value)


def test_refuses_a_folder_without_weights(folder):
    with pytest.raises(CheckpointError, match=r"no weights: neither model\.safetensors\.index"):
        Source(folder)


def test_refuses_pickled_weights_by_name(folder):
    (folder / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(
        CheckpointError, match=r"pytorch_model-00001-of-00002\.bin: weights in pickle files"
    ):
        Source(folder)


def test_refuses_a_broken_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a"')
    with pytest.raises(CheckpointError, match=r"index\.json: not JSON"):
        Source(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match=r"index\.json: no weight_map"):
        Source(folder)


def test_refuses_an_index_that_leaves_the_folder(folder):
    index = {"weight_map": {"a": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'a' is in '\.\./model\.safetensors', not a file n"):
        Source(folder)


def test_refuses_a_missing_shard(tmp_path):
    checkpoints.write(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"tensor '.*' in .*model-00002-of-00003\.safetensors: no such file, but model\."
        r"safetensors\.index\.json lists it \(3 shards\)",
    ):
        Source(tmp_path)


def test_refuses_a_tensor_that_only_the_index_knows(tmp_path):
    checkpoints.write(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"tensor 'ghost' is not in .*model-00001-of-00002"):
        Source(tmp_path)


def test_refuses_a_tensor_that_the_index_does_not_list(tmp_path):
    checkpoints.write(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, shard = index["weight_map"].popitem()
    path.write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=rf"tensor '{name}' is in .*{shard}, but model\.saf.*not list it"
    ):
        Source(tmp_path)


def test_a_dangling_index_is_not_passed_over(tmp_path):
    checkpoints.write(tmp_path)
    (tmp_path / "model.safetensors.index.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: No such file"):
        Source(tmp_path)


def test_refuses_a_tensor_in_two_files(folder):
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"w": np.zeros(2, np.float32)}, folder / file)
    with pytest.raises(
        CheckpointError, match=r"tensor 'w' is both in .*/a\.saf.* and in .*/b\.saf"
    ):
        Source(folder)


@pytest.mark.shows("conversion", "shards; damaged files are refused, naming tensor and file")
def test_refuses_a_file_that_is_cut_short(tmp_path):
    checkpoints.write(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for size, message in (
        (len(data) - 1, r"tensor '.*' in .*model\.safetensors: ends at byte \d+ of a file of \d+"),
        (100, r"model\.safetensors: not a safetensors file, or cut short"),
        (4, r"model\.safetensors: not a safetensors file, or cut short"),
    ):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=message):
            Source(tmp_path)


def test_refuses_a_file_that_shrinks_while_it_is_read(tmp_path):
    checkpoints.write(tmp_path)
    source = Source(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    last = max(source.tensors.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(CheckpointError, match=f"tensor '{last.name}' in .*: the file is cut short"):
        source.read(last.name)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"tensor '{last.name}' in .*: No such file"):
        source.read(last.name)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2]}, "tensor 'w' in .*: broken header entry"),
        (
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
            r"F32 \[2\] needs 8 bytes, .*0 to",
        ),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}, r"F32 \[-2\] needs -8 bytes"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "dtype F4 is not supported"),
        (7, "tensor 'w' in .*: broken header entry 7"),
        ({"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}, "broken header entry"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "broken header entry"),
        ({"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}, "broken header entry"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8]}, "broken header entry"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [False, 8]}, "broken header entry"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}, "broken header entry"),
        ({"dtype": "F32", "shape": [10**4000], "data_offsets": [0, 8]}, "broken header entry"),
    ],
)
def test_refuses_a_broken_header(entry, message, folder):
    text = json.dumps({"w": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=message):
        Source(folder)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 8), (4, 12)], r"tensor 'b' in .*: starts at byte \d+, but 'a' ends .*: they overlap"),
        ([(0, 8), (0, 8)], r"tensor 'b' in .*: starts at byte \d+, but 'a' ends .*: they overlap"),
        (
            [(0, 4), (8, 12)],
            r"tensor 'b' in .*'a' ends at byte \d+: the bytes between belong to no",
        ),
        (
            [(4, 8), (8, 12)],
            r"tensor 'a' in .*the header ends .*: the bytes between belong to no t",
        ),
        ([(0, 4), (4, 8)], r"'b' ends at byte \d+ of a file of \d+ bytes: the bytes after it belo"),
        ([], r"the header ends at byte \d+ of a file of \d+ bytes: the bytes after it belong"),
    ],
)
def test_every_byte_belongs_to_one_tensor(spans, message, folder):
    entries = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for name, (start, end) in zip("ab", spans, strict=False)
    }
    text = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(CheckpointError, match=message):
        Source(folder)


def test_empty_tensors_are_no_holes(folder):
    empty = np.zeros((0, 3), np.float32)
    save_file({"a": empty, "b": np.ones(3, np.float32), "c": empty}, folder / "model.safetensors")
    assert sorted(Source(folder).tensors) == ["a", "b", "c"]


@pytest.mark.parametrize("metadata", [7, ["a"], {"a": 1}, {"a": None}])
def test_metadata_that_are_no_map_of_strings_are_refused(metadata, folder):
    text = json.dumps({"__metadata__": metadata}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="__metadata__ is not a map of strings"):
        Source(folder)


def test_names_a_pointer_of_git_lfs(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a pointer of Git LFS"):
        Source(folder)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xff", b'"x"'])
def test_refuses_a_header_that_is_no_json_object(text, folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="the header is not a JSON object"):
        Source(folder)


def test_refuses_to_read_integers(folder):
    save_file({"w": np.zeros(2, np.int64)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"tensor 'w' in .*: dtype I64 is not supported \(sup"
    ):
        Source(folder).read("w")
