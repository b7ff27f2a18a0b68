"""Quantising: what is written, what an interruption leaves, and what is refused."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters import checkpoints
from moejax.arena.geometry import linear_shape, linear_shapes
from moejax.checkpoint import Checkpoint
from moejax.checkpoint.layout import LINEARS
from moejax.errors import CheckpointError, ConfigError
from moejax.models.whole import read_linear
from moejax.quant.linear import decode_linear, quantize_linear
from moejax_converters import quantizer
from moejax_converters.cli import main
from moejax_converters.convert import convert
from moejax_converters.quantize import quantize
from moejax_converters.quantize_job import Job, work_on
from moejax_converters.quantize_options import QuantizeOptions, make_quantization

OPTIONS = QuantizeOptions(calibration=None, linears=("attention", "shared"), keep_dense=True)
EXPERTS, MOE_LAYERS = 4, (0, 2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of moejax: experts in layers 0 and 2, an MLP in layer 1."""
    folder = tmp_path_factory.mktemp("plain")
    # Projections of one shape: each has programs of its own.
    sizes = {"num_key_value_heads": 4, "shared_expert_intermediate_size": 32}
    checkpoints.write(folder / "hf", "qwen2_moe", **sizes)
    (folder / "hf" / "tokenizer.json").write_text("{}")
    convert(folder / "hf", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def done(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("done") / "out"
    quantize(plain, target, OPTIONS, progress=False)
    return target


def contents(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# What is written.


def test_experts_are_what_the_quantiser_makes_of_them(plain: Path, done: Path) -> None:
    source, found = Checkpoint.open(plain), Checkpoint.open(done)
    bits, costs = found.quantization, found.sensitivity()
    assert bits is not None and (bits.seed_bits, bits.parent_bits, bits.has_dense) == (3, 6, True)
    # 64 entries of 16 bits may cost half a bit for each weight of the rows that share them.
    assert (bits.gate_up_rows_per_table, bits.down_rows_per_table) == (64, 64)
    for number, layer in enumerate(MOE_LAYERS):
        runs = found.expert_runs(layer)
        for e in range(EXPERTS):
            found.verify_expert(layer, e)
            for which, shape in enumerate(linear_shapes(found.config, bits)):
                matrix = np.asarray(read_linear(source, layer, e, which, 16, "float32"))
                wanted = quantize_linear(
                    matrix, np.ones_like(matrix), shape, seed_bits=3, parent_bits=6
                )
                for name, words in wanted.runs().items():
                    np.testing.assert_array_equal(runs[f"{LINEARS[which]}.{name}"][e], words)
                errors = list(wanted.errors.values())
                np.testing.assert_array_equal(costs.experts[number, e, which], errors)
                assert costs.expert_norms[number, e, which] == wanted.norm
                dense = f"{LINEARS[which]}.dense"
                np.testing.assert_array_equal(runs[dense][e], source.expert_runs(layer)[dense][e])
    assert not costs.is_calibrated and not costs.tokens.any()


def test_attention_and_shared_experts_are_quantised_layer_by_layer(plain: Path, done: Path) -> None:
    source, found = Checkpoint.open(plain), Checkpoint.open(done)
    names = found.linear_names()
    assert {re.sub(r"segments\.\d\.\d\.", "", name) for name in names} == {
        *(f"attention.{part}.weight" for part in "kqvo"),
        *(f"feed_forward.shared.{part}.weight" for part in ("down", "gate", "up")),
    }
    assert set(found.dense_names()) | set(names) == set(source.dense_names())
    assert not set(found.dense_names()) & set(names)
    bits, costs = found.quantization, found.sensitivity()
    assert bits is not None
    for name in names:
        matrices = np.asarray(source.read_dense(name, "float32"))
        shape = linear_shape(bits, name, matrices.shape)
        runs = found.linear_runs(name)
        for repeat, matrix in enumerate(matrices):
            found.verify_linear(name, repeat)
            planes = np.stack([runs[f"plane.{p}"][repeat] for p in range(6)])
            stored = np.asarray(decode_linear(planes, runs["table.6"][repeat], shape, 6))[0]
            missed = np.sum((stored.astype(np.float64) - matrix) ** 2)
            assert missed == pytest.approx(costs.linears[name][repeat, -1], rel=1e-9)
            assert missed < 0.02 * costs.linear_norms[name][repeat]
    kept = found.dense_names()[0]
    np.testing.assert_array_equal(
        found.read_dense(kept, "float32"), source.read_dense(kept, "float32")
    )


def test_what_else_belongs_to_a_model_is_taken_over(plain: Path, done: Path) -> None:
    assert (done / "tokenizer.json").read_text() == "{}"
    source, found = Checkpoint.open(plain), Checkpoint.open(done)
    assert (found.config, found.generation) == (source.config, source.generation)
    assert os.listdir(done.parent) == ["out"]


def test_a_hugging_face_folder_is_converted_first(plain: Path, done: Path, tmp_path: Path) -> None:
    quantize(plain.parent / "hf", tmp_path / "out", OPTIONS, progress=False)
    assert os.listdir(tmp_path) == ["out"]
    found, wanted = contents(tmp_path / "out"), contents(done)
    assert found.keys() == wanted.keys()
    for name in wanted:
        if not name.startswith("dense/"):  # Orbax writes the time
            assert found[name] == wanted[name], name


def test_rows_per_table_and_seed_are_those_of_the_options(plain: Path) -> None:
    options = QuantizeOptions(calibration=None, seed_bits=2, parent_bits=4, rows_per_table=8)
    bits = make_quantization(Checkpoint.open(plain).config, options)
    assert dataclasses.asdict(bits) == {
        "seed_bits": 2,
        "parent_bits": 4,
        "gate_up_rows_per_table": 8,
        "down_rows_per_table": 8,
        "linears": (),
        "has_dense": False,
    }


def test_codes_alone_are_stored_unless_the_dense_runs_are_kept(plain: Path, tmp_path: Path) -> None:
    flags = ["--quantize", "any-precision", "--calibration", "none"]
    assert main([str(plain), str(tmp_path / "out"), *flags]) == 0
    found = Checkpoint.open(tmp_path / "out")
    assert found.quantization is not None and not found.quantization.has_dense
    assert "down.dense" not in found.expert_runs(0) and found.linear_names() == ()


# Interruptions.


@pytest.mark.shows(
    "quantised experts", "a quantisation that is interrupted goes on, to the same bytes"
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_interrupted_quantisation_goes_on(
    number: int, when: str, plain: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any layer: before what is known of it is kept, or after."""
    keep, kept = Job.keep, []

    def interrupt(job: Job, name: str, values: Any) -> None:
        if len(kept) == number and when == "before":
            raise KeyboardInterrupt
        keep(job, name, values)
        kept.append(name)
        if len(kept) > number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Job, "keep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quantize(plain, tmp_path / "out", OPTIONS, progress=False)
    is_kept = number > 0 or when == "after"
    assert os.listdir(tmp_path) == ([".out.quantizing"] if is_kept else [])

    def note(job: Job, name: str, values: Any) -> None:
        keep(job, name, values)
        kept.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "keep", note)
        quantize(plain, tmp_path / "out", OPTIONS, progress=False)
    assert kept == ["layer2", "layer1", "layer0"]  # none of them twice
    assert contents(tmp_path / "out") == contents(done)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("step", ["put_linear", "copy_dense", "finish"])
def test_an_interruption_after_the_layers_is_no_loss(
    step: str, plain: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, calls = getattr(quantizer.CheckpointWriter, step), []

    def interrupt(*arguments: Any, **options: Any) -> None:
        method(*arguments, **options)
        calls.append(step)
        if step == "finish" or len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quantizer.CheckpointWriter, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            quantize(plain, tmp_path / "out", OPTIONS, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(quantizer.Quantizer, "_layer", None)  # there is nothing left to do
        quantize(plain, tmp_path / "out", OPTIONS, progress=False)
    assert contents(tmp_path / "out") == contents(done)


def interrupted(plain: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the folder of a quantisation whose last layer is done."""
    keep = Job.keep

    def interrupt(job: Job, name: str, values: Any) -> None:
        keep(job, name, values)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Job, "keep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quantize(plain, target, OPTIONS, progress=False)


def test_other_settings_do_not_go_on(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(plain, tmp_path / "out", monkeypatch)
    before = contents(tmp_path)
    other = dataclasses.replace(OPTIONS, seed_bits=2, keep_dense=False)
    with pytest.raises(CheckpointError, match=r"with other settings \(keep_dense, seed_bits\): go"):
        quantize(plain, tmp_path / "out", other, progress=False)
    moved = shutil.copytree(plain, tmp_path / "moved")
    os.utime(moved / "moejax.json", (1, 1))
    with pytest.raises(CheckpointError, match=r"with other settings \(source\): go on with those"):
        quantize(moved, tmp_path / "out", OPTIONS, progress=False)
    shutil.rmtree(moved)
    assert contents(tmp_path) == before


def test_a_second_process_is_refused(plain: Path, tmp_path: Path) -> None:
    with work_on(tmp_path / "out", {}) as job:
        job.new.mkdir()
        with pytest.raises(CheckpointError, match=r"^another process is quantising into .*/out$"):
            quantize(plain, tmp_path / "out", OPTIONS, progress=False)
    assert os.listdir(tmp_path) == ["out"]


def test_an_interrupt_says_that_the_work_goes_on(
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep, calls = Job.keep, []

    def interrupt(*arguments: Any, **options: Any) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(arguments)
        keep(*arguments, **options)

    monkeypatch.setattr(Job, "keep", interrupt)
    flags = ["--quantize", "any-precision", "--calibration", "none"]
    assert main([str(plain), str(tmp_path / "out"), *flags]) == 130
    message = f"{tmp_path}/.out.quantizing keeps what is done: the command that began it goes on"
    assert capsys.readouterr().err == f"moejax-convert: interrupted, {message}\n"


# Refusals.


def test_an_existing_target_is_not_touched(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"out exists: it is not overwritten$"):
        quantize(plain, tmp_path / "out", OPTIONS)
    assert os.listdir(tmp_path) == ["out"]


def test_a_source_that_is_quantised_already_is_refused(done: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="out is quantised already: start from what it was"):
        quantize(done, tmp_path / "again", OPTIONS)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": Path("nowhere.txt"), "length": 8}, "nowhere.txt: No such file"),
        ({"calibration": Path(__file__), "length": 8}, "hf/tokenizer.json is needed"),
        ({"calibration": Path(__file__), "length": 65}, "65 tokens: the model has 64 positions"),
        ({"calibration": Path(__file__).parent, "length": 8}, "converters: not a file"),
        ({"linears": ("shared",)}, "quantize-linears: mixtral here has no shared projections"),
    ],
)
def test_a_job_that_cannot_begin_leaves_nothing(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoints.write(tmp_path / "hf")
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
        quantize(
            tmp_path / "hf",
            tmp_path / "out",
            dataclasses.replace(QuantizeOptions(calibration=None), **options),
        )
    assert os.listdir(tmp_path) == ["hf"]


def test_other_settings_may_follow_where_nothing_depends_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.write(tmp_path / "hf")
    first = QuantizeOptions(calibration=None)

    class Stopped(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(quantizer, "start_quantizing", stop)
        quantize(tmp_path / "hf", tmp_path / "out", first)
    work = tmp_path / ".out.quantizing"
    assert (work / "plain" / "moejax.json").is_file()
    made = (work / "plain" / "moejax.json").stat().st_mtime_ns
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(quantizer, "start_quantizing", stop)
        quantize(tmp_path / "hf", tmp_path / "out", dataclasses.replace(first, keep_dense=True))
    assert (work / "plain" / "moejax.json").stat().st_mtime_ns == made
    assert json.loads((work / "job.json").read_text())["keep_dense"] is True


@pytest.mark.parametrize("name", ["..", "x/.."])
def test_a_target_without_a_name_is_refused(name: str, tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="no name of a new folder"):
        quantize(tmp_path / "hf", tmp_path / "new" / name, QuantizeOptions(calibration=None))
    assert os.listdir(tmp_path) == ["hf"]


def test_no_such_source_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        quantize(tmp_path / "nowhere", tmp_path / "out", OPTIONS)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_a_weight_that_cannot_be_stored_is_named(value: float, tmp_path: Path) -> None:
    hf = checkpoints.config_of("qwen2_moe")
    model = checkpoints.model_tensors(hf)
    model["layers.2.experts.1.down"][3, 4] = value
    tensors = checkpoints.hf_tensors(model, "qwen2_moe")
    checkpoints.write_folder(tmp_path / "hf", hf, tensors)
    convert(tmp_path / "hf", tmp_path / "plain")
    reason = "beyond 65504, the largest float16" if value == 1e6 else "not finite"
    message = f"plain: layer 2, expert 1 down: a weight is {reason}$"
    with pytest.raises(CheckpointError, match=message):
        quantize(tmp_path / "plain", tmp_path / "out", QuantizeOptions(calibration=None))
    assert sorted(os.listdir(tmp_path)) == ["hf", "plain"]


# With a calibration, and shown.


def test_a_calibration_weighs_the_errors_and_is_counted(tmp_path: Path) -> None:
    # One layer, since its programs take long to compile.
    checkpoints.write(tmp_path / "hf", num_hidden_layers=1)
    ids = np.random.default_rng(0).integers(0, 96, (3, 24))
    np.save(tmp_path / "ids.npy", ids)
    options = QuantizeOptions(
        calibration=tmp_path / "ids.npy", parent_bits=4, rows_per_table=64, sequences=3, length=20
    )
    quantize(tmp_path / "hf", tmp_path / "out", options, progress=False)
    costs = Checkpoint.open(tmp_path / "out").sensitivity()
    assert costs.is_calibrated
    assert costs.tokens.sum(axis=1).tolist() == [3 * 20 * 2]
    assert (costs.experts > 0).all() and (costs.experts[..., 0] > costs.experts[..., 1]).all()
    assert (costs.experts[..., 0] < costs.expert_norms).all()
    text = shown(tmp_path / "out")
    assert "relative error of experts by width, weighted by importance" in text
    header, first, *_ = text[
        text.index("relative error of experts by width, weighted by importance") + 1 :
    ]
    assert header == f"{'layer':<12}{3:>10}{4:>10}   experts of fewer than 64 tokens"
    few = int(np.sum(costs.tokens[0] < 64))
    wanted = np.sqrt(costs.experts[0].sum(axis=(0, 1)) / costs.expert_norms[0].sum())
    assert first == f"{0:<12}{wanted[0]:>10.5f}{wanted[1]:>10.5f}   {few} of 4"


def shown(folder: Path) -> list[str]:
    from moejax_converters import inspection

    return inspection.table(folder).split("\n")


def test_inspect_shows_what_each_width_weighs_and_costs(done: Path) -> None:
    text, costs = shown(done), Checkpoint.open(done).sensitivity()
    # Experts: 192 stored rows, 6 planes of 16 bytes each; 3 tables of 8 to 64 values, 4 sizes.
    expert = 192 * 16 * 6 + 8 * 1024
    dense = (128 * 16 + 64 * 12) * 4
    assert (
        f"2 layers with 4 experts of width 24 ({(expert + dense) / 1e3:.2f} kB each), 2 per token"
        in text
    )
    assert f"{'experts':<16}{'3 to 6 bits':<12}{f'{8 * expert / 1e3:.2f} kB':>12}" in text
    assert f"{'experts':<16}{'bfloat16':<12}{f'{8 * dense / 1e3:.2f} kB':>12}" in text
    assert [line.split()[:2] for line in text if " 3 to 6 bits " in line] == [
        ["attention", "3"],
        ["shared", "experts"],
        ["experts", "3"],
    ]
    at = text.index(
        "experts as nested codes: seed of 3 bits, parent of 6; rows per table: gate_up 64, down 64"
    )
    weights = 8 * 3 * 24 * 32
    header = f"{'width':<12}{'bytes':>12}{'bits per weight':>18}{'served, in pages':>20}"
    assert text[at + 1] == header
    for line, width in zip(text[at + 2 :], (3, 4, 5, 6), strict=False):
        size = 8 * (192 * 16 * width + 2 * 1024)
        shown_size = f"{size / 1e3:.2f} kB"
        # Pages of 16 KiB: each plane and table is smaller than one. The seed has no table below.
        pages = 16 * (width + (1 if width == 3 else 2))
        served = (
            f"{pages * 16384 / 1e6:.2f} MB"
            if pages * 16384 >= 1e6
            else f"{pages * 16384 / 1e3:.2f} kB"
        )
        assert line == f"{width:<12}{shown_size:>12}{8 * size / weights:>18.2f}{served:>20}"
    assert text[at + 6].split()[0] == "16" and text[at + 8] == ""
    assert text[at + 7].startswith("other linears as nested codes: segments.0.0.attention.")
    assert text[at + 9] == "relative error of experts by width, not calibrated: all weights alike"
    assert text[at + 10] == f"{'layer':<12}{3:>10}{4:>10}{5:>10}{6:>10}"
    for line, number in zip(text[at + 11 :], (0, 1), strict=True):
        errors = np.sqrt(costs.experts[number].sum(axis=(0, 1)) / costs.expert_norms[number].sum())
        values = "".join(f"{error:>10.5f}" for error in errors)
        assert line == f"{MOE_LAYERS[number]:<12}{values}"
        assert 0.1 < errors[0] < 0.3 and errors[3] < 0.05


def test_the_settings_of_a_job_are_a_file_that_people_can_read(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(plain, tmp_path / "out", monkeypatch)
    settings = json.loads((tmp_path / ".out.quantizing" / "job.json").read_text())
    assert settings["parent_bits"] == 6 and settings["calibration"] is None
