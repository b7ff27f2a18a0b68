"""Quantised checkpoints: what is written is read, and every damage is refused in one line."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors import safe_open

from arena.coded import Coded, random_coded
from models.small_configs import make_config
from moejax.arena.geometry import LinearShape, linear_shapes
from moejax.checkpoint import Checkpoint, CheckpointWriter, Sensitivity
from moejax.checkpoint.run_file import RunWriter
from moejax.config import Quantization
from moejax.errors import CheckpointError
from moejax.models.whole import read_stacked

CONFIG = make_config("bb")
LAYERS, EXPERTS = 2, 5
LINEAR = "segments.0.0.attention.q.weight"
LINEAR_SHAPE = (2, 24, 24)
BITS = Quantization(
    seed_bits=3,
    parent_bits=5,
    gate_up_rows_per_table=4,
    down_rows_per_table=64,
    linears=((LINEAR, 2),),
    has_dense=True,
)
WIDTHS = 3


def expert(layer: int, e: int, which: int, bits: Quantization) -> Coded:
    shape = linear_shapes(CONFIG, bits)[which]
    return random_coded(shape, bits, 100 * layer + 10 * e + which)


def linear(repeat: int, bits: Quantization) -> Coded:
    shape = LinearShape(parts=1, rows=24, columns=24, rows_per_table=2)
    return random_coded(shape, bits, 500 + repeat)


def make_costs() -> Sensitivity:
    rng = np.random.default_rng(0)
    return Sensitivity(
        is_calibrated=True,
        experts=rng.random((LAYERS, EXPERTS, 2, WIDTHS)),
        expert_norms=rng.random((LAYERS, EXPERTS, 2)),
        tokens=rng.integers(0, 2**40, (LAYERS, EXPERTS)),
        linears={LINEAR: rng.random((2, WIDTHS))},
        linear_norms={LINEAR: rng.random(2)},
    )


def write_linear(writer: CheckpointWriter, bits: Quantization) -> None:
    runs = [linear(repeat, bits).runs("float32") for repeat in (0, 1)]
    stacked = {name: np.stack([of[name] for of in runs]) for name in runs[0]}
    writer.put_linear(LINEAR, LINEAR_SHAPE, "float32", stacked)


def write(folder: pathlib.Path, bits: Quantization) -> pathlib.Path:
    writer = CheckpointWriter(folder, CONFIG, bits)
    writer.put_dense("norm.weight", np.ones(24, np.float32))
    for layer in range(LAYERS):
        with writer.expert_file(layer) as file:
            for e in range(EXPERTS):
                for which, name in enumerate(("gate_up", "down")):
                    file.put_runs(e, name, expert(layer, e, which, bits).runs("float32"))
    write_linear(writer, bits)
    writer.finish({"eos_token_ids": []}, make_costs())
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write(tmp_path_factory.mktemp("template") / "model", BITS)


@pytest.fixture
def folder(template: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(template, tmp_path / "model")


# Round trips.


@pytest.mark.parametrize("has_dense", [True, False], ids=["dense too", "codes only"])
def test_runs_are_read_back(has_dense: bool, tmp_path: pathlib.Path) -> None:
    bits = dataclasses.replace(BITS, has_dense=has_dense)
    checkpoint = Checkpoint.open(write(tmp_path / "model", bits))
    assert checkpoint.quantization == bits
    for layer in range(LAYERS):
        runs = checkpoint.expert_runs(layer)
        for e in range(EXPERTS):
            checkpoint.verify_expert(layer, e)
            for which, name in enumerate(("gate_up", "down")):
                wanted = expert(layer, e, which, bits).runs("float32")
                assert ("dense" in wanted) == has_dense
                for run, words in wanted.items():
                    np.testing.assert_array_equal(runs[f"{name}.{run}"][e], words)
        assert len(runs) == 2 * (5 + WIDTHS + has_dense)
    assert checkpoint.linear_names() == (LINEAR,)
    assert checkpoint.linear_shape(LINEAR) == LINEAR_SHAPE
    assert checkpoint.linear_dtype(LINEAR) == "float32"
    assert checkpoint.dense_names() == ("norm.weight",)
    for repeat in (0, 1):
        checkpoint.verify_linear(LINEAR, repeat)
        found = checkpoint.linear_runs(LINEAR)
        wanted = linear(repeat, bits).runs("float32")
        assert set(found) == set(wanted)
        for run, words in wanted.items():
            np.testing.assert_array_equal(found[run][repeat], words)


def test_sensitivities_are_read_back(template: pathlib.Path) -> None:
    found, wanted = Checkpoint.open(template).sensitivity(), make_costs()
    assert found.is_calibrated
    for name in ("experts", "expert_norms", "tokens"):
        assert getattr(found, name).dtype == getattr(wanted, name).dtype
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    np.testing.assert_array_equal(found.linears[LINEAR], wanted.linears[LINEAR])
    np.testing.assert_array_equal(found.linear_norms[LINEAR], wanted.linear_norms[LINEAR])
    with safe_open(template / "sensitivity.safetensors", "numpy") as file:
        assert file.metadata() == {"is_calibrated": "true"}
        np.testing.assert_array_equal(file.get_tensor("experts"), wanted.experts)


def test_files_of_runs_are_safetensors_files(template: pathlib.Path) -> None:
    with safe_open(template / "linears" / f"{LINEAR}.safetensors", "numpy") as file:
        assert file.metadata()["owner"] == LINEAR
        assert len(file.metadata()["plane.0.crc32"].split()) == 2
        runs = Checkpoint.open(template).linear_runs(LINEAR)
        assert set(file.keys()) == set(runs)
        np.testing.assert_array_equal(file.get_tensor("table.4"), runs["table.4"])
    with safe_open(template / "experts" / "1.safetensors", "numpy") as file:
        assert file.metadata()["owner"] == "1"
        assert file.get_tensor("down.plane.4").shape[0] == EXPERTS


def test_experts_are_decoded_at_the_widths_that_are_asked_for(template: pathlib.Path) -> None:
    widths = np.random.default_rng(1).choice([3, 4, 5, 16], (LAYERS, EXPERTS, 2))
    stacked = read_stacked(Checkpoint.open(template), "float32", widths)
    for layer, e in np.ndindex(LAYERS, EXPERTS):
        gate_up, down = (
            expert(layer, e, which, BITS).weights(int(widths[layer, e, which])) for which in (0, 1)
        )
        np.testing.assert_array_equal(stacked[layer].gate_up[e], gate_up)
        np.testing.assert_array_equal(stacked[layer].down[e], down[0])


def test_a_plain_checkpoint_has_no_sensitivities(tmp_path: pathlib.Path) -> None:
    writer = CheckpointWriter(tmp_path / "model", CONFIG)
    for layer in range(LAYERS):
        with writer.expert_file(layer) as file:
            for e in range(EXPERTS):
                for which, name in enumerate(("gate_up", "down")):
                    runs = expert(layer, e, which, BITS).runs("float32")
                    file.put_runs(e, name, {"dense": runs["dense"]})
    with pytest.raises(ValueError, match="only a quantised checkpoint has linears"):
        write_linear(writer, BITS)
    with pytest.raises(ValueError, match="sensitivities belong to a quantised checkpoint"):
        writer.finish({"eos_token_ids": []}, make_costs())
    writer.finish({"eos_token_ids": []})
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert checkpoint.quantization is None and checkpoint.linear_names() == ()
    with pytest.raises(CheckpointError, match=r"model is not quantised: it has no sensitivities$"):
        checkpoint.sensitivity()


def test_what_a_writer_was_not_given_is_named(tmp_path: pathlib.Path) -> None:
    writer = CheckpointWriter(tmp_path / "model", CONFIG, BITS)
    for layer in range(LAYERS):
        writer.put_expert_crc32(layer, 0)
    with pytest.raises(ValueError, match=rf"linears \[\] were written, needed \['{LINEAR}'\]"):
        writer.finish({"eos_token_ids": []}, make_costs())
    write_linear(writer, BITS)
    writer.finish({"eos_token_ids": []})  # codes without the weights that they stand for
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert not checkpoint.has_sensitivity
    with pytest.raises(CheckpointError, match=r"was imported as codes.*it has no sensitivities$"):
        checkpoint.sensitivity()


# Damage.


def refused(folder: pathlib.Path) -> str:
    """The one line in which a checkpoint is refused, whatever of it is read."""
    with pytest.raises(CheckpointError) as error:
        checkpoint = Checkpoint.open(folder)
        checkpoint.sensitivity()
        for layer in range(LAYERS):
            for e in range(EXPERTS):
                checkpoint.verify_expert(layer, e)
        for repeat in (0, 1):
            checkpoint.verify_linear(LINEAR, repeat)
    assert "\n" not in str(error.value)
    return str(error.value)


FILES = {
    "experts": "experts/1.safetensors",
    "linears": f"linears/{LINEAR}.safetensors",
    "sensitivity": "sensitivity.safetensors",
}


def offset_of(path: pathlib.Path, name: str, index: int) -> int:
    """Where a run of a file begins."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])[name]
    start, end = entry["data_offsets"]
    return 8 + size + start + index * (end - start) // entry["shape"][0]


@pytest.mark.parametrize(
    ("kind", "run", "number"),
    [
        ("experts", "gate_up.plane.2", 3),
        ("experts", "down.table.5", 4),
        ("experts", "down.dense", 0),
        ("linears", "plane.0", 1),
        ("linears", "table.3", 0),
    ],
)
def test_a_flipped_bit_is_found_in_its_run(
    kind: str, run: str, number: int, folder: pathlib.Path
) -> None:
    path = folder / FILES[kind]
    data = bytearray(path.read_bytes())
    data[offset_of(path, run, number) + 5] ^= 4
    path.write_bytes(data)
    wanted = f"tensor '{run}' in {path}: number {number} is damaged (CRC-32"
    assert refused(folder).startswith(wanted)
    # Who reads other runs is not stopped.
    checkpoint = Checkpoint.open(folder)
    if kind == "experts":
        checkpoint.verify_expert(1, number, ["gate_up.plane.0", "down.table.3"])
    else:
        checkpoint.verify_linear(LINEAR, number, ["plane.1"])


@pytest.mark.parametrize("at", [-1, 300])
def test_a_flipped_bit_of_the_sensitivities_is_found(at: int, folder: pathlib.Path) -> None:
    path = folder / FILES["sensitivity"]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert str(path) in refused(folder)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("size", [-1, 200, 0])
def test_a_file_that_is_cut_short_is_refused(kind: str, size: int, folder: pathlib.Path) -> None:
    path = folder / FILES[kind]
    path.write_bytes(path.read_bytes()[:size])
    assert str(path) in refused(folder)


@pytest.mark.parametrize("kind", FILES)
def test_a_missing_file_is_named(kind: str, folder: pathlib.Path) -> None:
    (folder / FILES[kind]).unlink()
    assert refused(folder) == f"{folder / FILES[kind]}: No such file or directory"


def test_the_runs_of_another_owner_are_refused(folder: pathlib.Path) -> None:
    path = folder / FILES["linears"]
    path.unlink()
    runs = [linear(repeat, BITS).runs("float32") for repeat in (0, 1)]
    words = {name: run.size for name, run in runs[0].items()}
    with RunWriter(path, owner="segments.0.0.attention.k.weight", count=2, words=words) as file:
        for repeat, of in enumerate(runs):
            for name, run in of.items():
                file.put(name, repeat, run)
    assert refused(folder) == (
        f"{path}: holds the runs of segments.0.0.attention.k.weight, needed those of {LINEAR}"
    )


def test_the_runs_of_another_checkpoint_are_refused(folder: pathlib.Path) -> None:
    path = folder / FILES["linears"]
    path.unlink()
    writer = CheckpointWriter(folder, CONFIG, BITS)
    runs = linear(7, BITS).runs("float32")
    stacked = {name: np.stack([run, run]) for name, run in runs.items()}
    writer.put_linear(LINEAR, LINEAR_SHAPE, "float32", stacked)
    assert refused(folder).startswith(f"{path}: not the file that belongs to this checkpoint (CRC")


def change(folder: pathlib.Path, **changes: object) -> None:
    path = folder / "moejax.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def stored(folder: pathlib.Path) -> dict:
    return json.loads((folder / "moejax.json").read_text())["quantization"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("parent_bits", 4), ("gate_up_rows_per_table", 1), ("has_dense", False), ("seed_bits", 2)],
)
def test_a_quantization_that_was_edited_is_refused(
    field: str, value: object, folder: pathlib.Path
) -> None:
    change(folder, quantization=stored(folder) | {field: value})
    assert "config, generation or quantization is not as it was written" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent_bits": 9}, "widths from 3 to 9 bits: needs 2 <= seed_bits <= parent_bits <= 8"),
        ({"parent_bits": 2}, "widths from 3 to 2 bits: needs 2 <= seed_bits <= parent_bits <= 8"),
        ({"parent_bits": 5.0}, "quantization: parent_bits is 5.0, needs a whole number"),
        ({"seed_bits": True}, "quantization: seed_bits is True, needs a whole number"),
        ({"has_dense": 1}, "quantization: linears is a map, has_dense true or false"),
        ({"linears": []}, "quantization: linears is a map, has_dense true or false"),
        ({"linears": {LINEAR: "2"}}, f"quantization: {LINEAR} is '2', needs a whole number"),
        ({"down_rows_per_table": 3}, "down: 3 rows per table, needs a power of two up to 64"),
        (
            {"linears": {LINEAR: 128}},
            f"{LINEAR}: 128 rows per table, needs a power of two up to 64",
        ),
        ({"groups": 1}, "quantization: needs the keys ['down_rows_per_table', 'gate_up_rows_per_"),
    ],
)
def test_a_quantization_that_is_none_is_refused_by_its_field(
    changes: dict, message: str, folder: pathlib.Path
) -> None:
    change(folder, quantization=stored(folder) | changes)
    assert refused(folder).startswith(f"{folder / 'moejax.json'}: {message}")


def test_keys_that_do_not_go_together_are_refused(folder: pathlib.Path) -> None:
    change(folder, sensitivity="zz")
    assert "broken entry" in refused(folder)
    change(folder, sensitivity="00000000")
    assert refused(folder).startswith(f"{folder / 'sensitivity.safetensors'} is damaged (CRC-32")
    change(folder, linears={})
    assert f"linears [], needed ['{LINEAR}']" in refused(folder)
    change(folder, widths=[3])
    assert "needs the keys" in refused(folder)
