"""The checkpoint folder: what is written is read, and damage is found."""

import json
import logging
import os
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open

from moejax.arena import format
from moejax.checkpoint import Checkpoint, CheckpointWriter
from moejax.checkpoint.run_file import RunWriter, open_run_file
from moejax.config import Attention, LayerKind, ModelConfig, Moe, Rope, Router, segments_of
from moejax.errors import CheckpointError

EXPERTS, WIDTH, HIDDEN = 3, 24, 32
CONFIG = ModelConfig(
    family="mixtral",
    vocab_size=96,
    hidden_size=HIDDEN,
    max_position_embeddings=64,
    norm_epsilon=1e-5,
    tie_embeddings=True,
    dtype="bfloat16",
    segments=segments_of(
        [
            LayerKind(
                attention=Attention(
                    num_heads=2, num_kv_heads=1, head_size=16, scale=0.25, rope=Rope(theta=1e4)
                ),
                feed_forward=Moe(
                    router=Router(
                        num_experts=EXPERTS,
                        experts_per_token=2,
                        renormalize=True,
                        float32_weights=True,
                    ),
                    expert_width=WIDTH,
                ),
            )
        ]
        * 2
    ),
)
GATE_UP, DOWN = (128, HIDDEN), (HIDDEN, WIDTH)


def random(shape, dtype=ml_dtypes.bfloat16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


DENSE = {
    "embed.weight": random((96, HIDDEN)),
    "segments.0.0.feed_forward.router.weight": random((2, EXPERTS, HIDDEN), np.float32),
}


def write_experts(writer, layer, seed=0):
    with writer.expert_file(layer) as file:
        for e in reversed(range(EXPERTS)):  # any order
            file.put(e, "down", random(DOWN, seed=seed + 10 * layer + e))
            file.put(e, "gate_up", random(GATE_UP, seed=seed + 100 + 10 * layer + e))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A small checkpoint that no test changes."""
    writer = CheckpointWriter(tmp_path_factory.mktemp("template") / "model", CONFIG)
    for name, array in DENSE.items():
        writer.put_dense(name, array)
    for layer in (0, 1):
        write_experts(writer, layer)
    writer.finish({"eos_token_ids": [2], "temperature": 0.5})
    return writer.folder


@pytest.fixture
def folder(template, tmp_path):
    """A copy of it."""
    return shutil.copytree(template, tmp_path / "model")


def test_config_and_settings_are_read_back(template):
    checkpoint = Checkpoint.open(template)
    assert checkpoint.config == CONFIG
    assert checkpoint.generation == {"eos_token_ids": [2], "temperature": 0.5}


def test_dense_tensors_are_read_back(template):
    checkpoint = Checkpoint.open(str(template))
    assert checkpoint.dense_names() == tuple(DENSE)
    for name, array in DENSE.items():
        assert checkpoint.dense_shape(name) == array.shape
        assert checkpoint.dense_dtype(name) == array.dtype.name
        read = checkpoint.read_dense(name, array.dtype)
        assert isinstance(read, jax.Array)
        assert np.asarray(read).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dense_tensors_are_cast_to_what_is_asked_for(dtype, template):
    for name, array in DENSE.items():
        read = Checkpoint.open(template).read_dense(name, dtype)
        assert read.dtype == dtype
        np.testing.assert_array_equal(np.asarray(read), array.astype(format.DTYPES[dtype]))


def test_dense_tensors_are_placed_as_they_are_asked_for(template):
    sharding = NamedSharding(
        Mesh(np.array(jax.devices()), ("tensor",)), PartitionSpec("tensor", None)
    )
    read = Checkpoint.open(template).read_dense("embed.weight", "float32", sharding)
    assert read.sharding == sharding
    assert read.addressable_shards[0].data.shape == (96 // len(jax.devices()), HIDDEN)
    np.testing.assert_array_equal(np.asarray(read), DENSE["embed.weight"].astype(np.float32))


def test_expert_runs_are_those_of_the_format(template):
    checkpoint = Checkpoint.open(template)
    for layer in (0, 1):
        runs = checkpoint.expert_runs(layer)
        assert sorted(runs) == ["down.dense", "gate_up.dense"]
        for e in range(EXPERTS):
            checkpoint.verify_expert(layer, e)
            np.testing.assert_array_equal(
                runs["down.dense"][e], format.encode_dense(random(DOWN, seed=10 * layer + e))
            )
            np.testing.assert_array_equal(
                runs["gate_up.dense"][e],
                format.encode_dense(random(GATE_UP, seed=100 + 10 * layer + e)),
            )


def test_expert_runs_cannot_be_written(template):
    runs = Checkpoint.open(template).expert_runs(0)
    with pytest.raises(ValueError, match="read-only"):
        runs["down.dense"][0, 0] = 1


def test_expert_files_are_safetensors_files(template):
    with safe_open(template / "experts" / "1.safetensors", "numpy") as file:
        assert sorted(file.keys()) == ["down.dense", "gate_up.dense"]
        down = file.get_tensor("down.dense")
        crcs = file.metadata()["down.dense.crc32"].split()
    np.testing.assert_array_equal(down, Checkpoint.open(template).expert_runs(1)["down.dense"])
    assert len(crcs) == EXPERTS


def test_data_of_expert_files_start_at_a_page_of_memory(template):
    data = (template / "experts" / "0.safetensors").read_bytes()
    assert (8 + int.from_bytes(data[:8], "little")) % 4096 == 0


@settings(max_examples=25)
@given(
    words=st.dictionaries(
        st.sampled_from(["gate_up.dense", "down.dense", "gate_up.plane.0", "table.3"]),
        st.integers(1, 40),
        min_size=1,
    ),
    count=st.integers(1, 5),
    owner=st.sampled_from(["0", "17", "segments.0.0.attention.q.weight"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_runs_in_any_order_are_read_back(tmp_path_factory, words, count, owner, seed):
    path = tmp_path_factory.mktemp("runs") / "0.safetensors"
    rng = np.random.default_rng(seed)
    runs = {
        (name, e): rng.integers(0, 2**32, n, np.uint32)
        for name, n in words.items()
        for e in range(count)
    }
    with RunWriter(path, owner=owner, count=count, words=words) as writer:
        for name, e in rng.permutation(list(runs)).tolist():
            writer.put(name, int(e), runs[name, int(e)])
    file = open_run_file(path, owner=owner, count=count, words=words, crc32=writer.crc32)
    for (name, e), run in runs.items():
        np.testing.assert_array_equal(file.runs[name][e], run)
        file.verify(e)
        file.verify(e, [name])


def test_nothing_is_logged_or_printed(folder, capfd, caplog):
    with caplog.at_level(logging.DEBUG):
        Checkpoint.open(folder).read_dense("embed.weight", "float32")
    assert [record for record in caplog.records if record.name == "absl"] == []
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("absl").level != logging.CRITICAL + 1, "the level is put back"


# What a caller may do wrong.


def test_refuses_a_dense_tensor_of_another_dtype(tmp_path):
    writer = CheckpointWriter(tmp_path / "model", CONFIG)
    with pytest.raises(ValueError, match=r"bfloat16', 'float32'\], norm\.weight is float16"):
        writer.put_dense("norm.weight", random(4, np.float16))


def test_refuses_a_dense_tensor_written_twice(tmp_path):
    writer = CheckpointWriter(tmp_path / "model", CONFIG)
    writer.put_dense("norm.weight", random(4))
    with pytest.raises(ValueError, match=r"norm\.weight is written twice"):
        writer.put_dense("norm.weight", random(4))


def test_refuses_expert_matrices_that_do_not_fit(tmp_path):
    writer = CheckpointWriter(tmp_path / "model", CONFIG)
    with pytest.raises(ValueError, match=r"0\.safetensors: run down.dense of number 0 is missing"):
        with writer.expert_file(0) as file:
            with pytest.raises(ValueError, match=r"gate_up is bfloat16 \(128, 32\), got float32"):
                file.put(0, "gate_up", random(GATE_UP, np.float32))
            with pytest.raises(ValueError, match=r"got bfloat16 \(32, 24\)"):
                file.put(0, "gate_up", random(DOWN))
            with pytest.raises(ValueError, match="number 3 of 3"):
                file.put(3, "gate_up", random(GATE_UP))
            for e in range(EXPERTS):
                file.put(e, "gate_up", random(GATE_UP))
            with pytest.raises(ValueError, match="gate_up.dense of number 0 is written twice"):
                file.put(0, "gate_up", random(GATE_UP))
            with pytest.raises(ValueError, match=r"run down\.plane\.0: the file holds \['gate_up"):
                file.put_runs(0, "down", {"plane.0": np.zeros(4, np.uint32)})
            with pytest.raises(ValueError, match=r"run down\.dense has 768 words, got 4"):
                file.put_runs(0, "down", {"dense": np.zeros(4, np.uint32)})


def test_refuses_to_finish_without_the_experts_of_a_layer(tmp_path):
    writer = CheckpointWriter(tmp_path / "model", CONFIG)
    write_experts(writer, 1)
    with pytest.raises(ValueError, match=r"layers \[1\] were written, the model has \[0, 1\]"):
        writer.finish({"eos_token_ids": []})


def test_refuses_experts_of_a_layer_that_has_none(template):
    with pytest.raises(ValueError, match="layer 2 has no experts"):
        Checkpoint.open(template).expert_runs(2)


# What can be wrong with a folder.


def test_a_folder_without_manifest_is_not_a_checkpoint(folder):
    (folder / "moejax.json").unlink()
    with pytest.raises(CheckpointError, match=r"not a moejax checkpoint: moejax\.json: No such fi"):
        Checkpoint.open(folder)


def change_manifest(folder, **changes):
    path = folder / "moejax.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, r"format version 2, this moejax reads 1: convert the model again"),
        ({"extra": 1}, r"needs the keys \['config', .*\], has \[.*'extra'.*\]"),
        ({"config": {"family": "x"}}, r"moejax\.json: model configuration: vocab_size: Field requ"),
        ({"dense": {"a": {"shape": [1]}}}, r"moejax\.json: broken entry \(KeyError\('dtype'\)\)"),
        ({"dense": {"a": {"shape": [1], "dtype": "int8", "crc32": "0"}}}, r"broken .*dtype int8"),
        ({"dense": []}, r"moejax\.json: broken entry"),
        ({"generation": 7}, r"moejax\.json: generation: is 7, needed an object"),
        ({"format_version": True}, "format version True, this moejax reads 1: convert the model a"),
        ({"format_version": "1"}, "format version '1', this moejax reads 1: convert the model aga"),
        ({"crc32": "0"}, "broken entry .*'0' is not the CRC-32 of anything"),
        ({"experts": {"0": "fffffffff"}}, "broken entry .*'fffffffff' is not the CRC-32"),
        ({"experts": {"0": "00000000"}}, r"experts of the layers \['0'\], needed \['0', '1'\]"),
        ({"dense": {"a": {"shape": [True], "dtype": "float32", "crc32": "0"}}}, r"shape \[True\]"),
    ],
)
def test_a_broken_manifest_is_refused(changes, message, folder):
    change_manifest(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", r"moejax\.json: not JSON"), ("[]", r"moejax\.json: not a JSON object")],
)
def test_a_manifest_that_is_no_json_object_is_refused(text, message, folder):
    (folder / "moejax.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"config":' * 200_000, "[" * 100 + "]" * 100], ids=["[", "{", "100"]
)
def test_a_deeply_nested_manifest_is_one_line(text, folder):
    (folder / "moejax.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    assert "moejax.json: not JSON (nested" in one_line(error)


def test_a_key_that_stands_twice_in_the_manifest_is_refused(folder):
    path = folder / "moejax.json"
    path.write_text(path.read_text().replace('"family"', '"vocab_size": 96, "family"'))
    with pytest.raises(CheckpointError, match="key 'vocab_size' stands twice"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm_epsilon", 0.5), ("max_position_embeddings", 65), ("tie_embeddings", False)],
)
def test_a_config_that_was_edited_is_refused(field, value, folder):
    config = json.loads((folder / "moejax.json").read_text())["config"]
    change_manifest(folder, config=config | {field: value})
    with pytest.raises(
        CheckpointError,
        match=r"config, generation or quantization is not as it was written \(CRC-32 .{8}, needed",
    ):
        Checkpoint.open(folder)


def test_settings_of_generation_that_were_edited_are_refused(folder):
    change_manifest(folder, generation={"eos_token_ids": [3], "temperature": 0.5})
    with pytest.raises(
        CheckpointError, match="config, generation or quantization is not as it was written"
    ):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": 1}, "eos_token_ids is None, needed a list of token ids"),
        ({"eos_token_ids": 2}, "eos_token_ids is 2, needed a list of token ids"),
        ({"eos_token_ids": [96]}, "eos_token_ids: one is 96, needed an integer from 0 to 95"),
        ({"eos_token_ids": [True]}, "eos_token_ids: one is True, needed an integer from 0 to 95"),
        ({"eos_token_ids": [], "pad_token_id": -1}, "pad_token_id is -1, needed an integer from"),
        ({"eos_token_ids": [], "temperature": -1}, "temperature is -1, needed a number from 0 to"),
        ({"eos_token_ids": [], "temperature": float("nan")}, "temperature is nan, needed a number"),
        ({"eos_token_ids": [], "temperature": "1"}, "temperature is '1', needed a number from 0"),
        ({"eos_token_ids": [], "top_p": 0}, "top_p is 0, needed a number above 0 to 1"),
        ({"eos_token_ids": [], "min_p": 1.5}, "min_p is 1.5, needed a number from 0 to 1"),
        ({"eos_token_ids": [], "top_k": 2**31}, "top_k is 2147483648, needed an integer from 0 "),
        ({"eos_token_ids": [], "top_k": 1.9}, "top_k is 1.9, needed an integer from 0 to 214748"),
        ({"eos_token_ids": [], "speed": 1}, "speed is not a setting that this moejax knows"),
    ],
)
def test_a_wrong_setting_of_generation_is_refused_by_its_name(generation, message, folder):
    change_manifest(folder, generation=generation)
    with pytest.raises(CheckpointError, match=rf"moejax\.json: generation: {message}"):
        Checkpoint.open(folder)


def test_a_folder_that_no_file_can_be_named_is_one_line(tmp_path):
    for name in ("a" * 300, "a\0b", "\ud800"):
        with pytest.raises(CheckpointError, match="not a moejax checkpoint") as error:
            Checkpoint.open(tmp_path / name)
        one_line(error)


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def dense_chunk(folder):
    (path,) = (folder / "dense" / "embed.weight").rglob("0.0")
    return path


def test_a_missing_dense_tensor_is_named(folder):
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=r"tensor 'norm\.weight' is not in .*model"):
        checkpoint.read_dense("norm.weight", "float32")
    os.rename(folder / "dense" / "embed.weight", folder / "elsewhere")
    with pytest.raises(CheckpointError, match=r"'embed\.weight' in .*embed\.weight: no such fold"):
        checkpoint.read_dense("embed.weight", "float32")


def test_a_dense_tensor_of_another_shape_is_refused(folder):
    manifest = json.loads((folder / "moejax.json").read_text())
    manifest["dense"]["embed.weight"]["shape"] = [97, HIDDEN]
    (folder / "moejax.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"bfloat16 \[96, 32\], needed bfloat16 \[97, 32\]"):
        Checkpoint.open(folder).read_dense("embed.weight", "float32")


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "no metadata"])
def test_a_damaged_dense_tensor_is_found(damage, folder):
    path = dense_chunk(folder)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[1000] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "delete":
        path.unlink()
    else:
        (path.parent / ".zarray").unlink()
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder).read_dense("embed.weight", "float32")
    assert "tensor 'embed.weight' in" in one_line(error)


def test_a_damaged_expert_is_found_and_the_others_are_not_blamed(folder):
    path = folder / "experts" / "1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last run: down of the last expert
    path.write_bytes(data)
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify_expert(1, 0)
    with pytest.raises(CheckpointError) as error:
        checkpoint.verify_expert(1, EXPERTS - 1)
    assert f"tensor 'down.dense' in {path}: number 2 is damaged (CRC-32" in one_line(error)


def test_a_missing_expert_file_is_named(folder):
    (folder / "experts" / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"experts/1\.safetensors: No such file"):
        Checkpoint.open(folder).expert_runs(1)


def test_an_expert_file_of_another_layer_is_refused(folder):
    shutil.copy(folder / "experts" / "0.safetensors", folder / "experts" / "1.safetensors")
    with pytest.raises(
        CheckpointError, match=r"1\.safetensors: holds the runs of 0, needed those of 1"
    ):
        Checkpoint.open(folder).expert_runs(1)


def test_an_expert_file_of_another_checkpoint_is_refused(folder, tmp_path):
    writer = CheckpointWriter(tmp_path / "other", CONFIG)
    write_experts(writer, 0, seed=7)
    shutil.copy(writer.folder / "experts" / "0.safetensors", folder / "experts" / "0.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"0\.safetensors: not the file that belongs to this checkpoint \(CRC-32 of its runs",
    ):
        Checkpoint.open(folder).expert_runs(0)


@pytest.mark.parametrize("size", [-1, 5000, 100, 3, 0])
def test_an_expert_file_that_is_cut_short_is_refused(size, folder):
    path = folder / "experts" / "0.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder).expert_runs(0)
    assert str(path) in one_line(error)


@settings(max_examples=60)
@given(at=st.integers(0, 500), value=st.integers(0, 255))
def test_any_damaged_header_is_refused_or_harmless(template, tmp_path_factory, at, value):
    path = tmp_path_factory.mktemp("runs") / "0.safetensors"
    data = bytearray((template / "experts" / "0.safetensors").read_bytes())
    data[at] = value
    path.write_bytes(data)
    words = {"gate_up.dense": 2048, "down.dense": 768}
    crc32 = int(json.loads((template / "moejax.json").read_text())["experts"]["0"], 16)
    try:
        file = open_run_file(path, owner="0", count=EXPERTS, words=words, crc32=crc32)
        for e in range(EXPERTS):
            file.verify(e)
    except CheckpointError as error:
        assert "\n" not in str(error)


def test_an_expert_file_of_another_shape_is_refused(folder):
    path = folder / "experts" / "0.safetensors"
    path.unlink()
    words = {"gate_up.dense": 4, "down.dense": 4}
    with RunWriter(path, owner="0", count=1, words=words) as writer:
        writer.put("gate_up.dense", 0, np.zeros(4, np.uint32))
        writer.put("down.dense", 0, np.zeros(4, np.uint32))
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'gate_up\.dense' in .*: U32 \[1, 4\], needed U32 \[3, 2048\]",
    ):
        Checkpoint.open(folder).expert_runs(0)


def test_an_expert_file_without_a_run_is_refused(folder):
    path = folder / "experts" / "0.safetensors"
    path.unlink()
    with RunWriter(path, owner="0", count=1, words={"down.dense": 4}) as writer:
        writer.put("down.dense", 0, np.zeros(4, np.uint32))
    with pytest.raises(CheckpointError, match=r"tensor 'gate_up\.dense' in .*: missing"):
        Checkpoint.open(folder).expert_runs(0)
