"""Planner dynamic: precision and KV cache trade pages while requests run."""

import pathlib
from importlib import resources
from typing import Any

import numpy as np
import pytest

from moejax.checkpoint import Checkpoint
from moejax.errors import CheckpointError, ConfigError
from moejax_converters.convert import convert
from moejax_converters.quantize import quantize
from moejax_converters.quantize_options import QuantizeOptions
from moejax_serving import LLM, SamplingParams
from moejax_serving.config import EngineConfig
from moejax_serving.engine import Engine
from moejax_serving.outputs import RequestOutput
from moejax_serving.scheduler import Scheduler

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "warm_up": False,
}
SMALL = "61MiB"
"""With which the cache has room for all sequences only if the experts give bits away."""
AMPLE = "200MiB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    plain = tmp_path_factory.mktemp("plain") / "demo"
    convert(pathlib.Path(str(resources.files("moejax_serving") / "demo")), plain)
    folder = tmp_path_factory.mktemp("quantized") / "demo"
    quantize(plain, folder, QuantizeOptions(calibration=None), progress=False)
    return folder


def engine_of(folder: pathlib.Path, budget: str, **options: Any) -> Engine:
    options = OPTIONS | {"planner": "dynamic", "memory_budget": budget} | options
    return LLM(folder, **options).engine


def add(engine: Engine, count: int, *, prompt: int = 150, output: int = 8, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for i in range(count):
        ids = rng.integers(5, 1000, prompt).tolist()
        engine.add_request(f"{seed}.{i}", ids, params)


def run(engine: Engine, steps: int = 10_000) -> list[RequestOutput]:
    found: list[RequestOutput] = []
    for _ in range(steps):
        if not engine.has_unfinished():
            break
        found += engine.step()
    return found


def widths_of(engine: Engine) -> np.ndarray:
    assert engine._trader is not None
    return engine._trader.widths


def tokens_of(outputs: list[RequestOutput]) -> dict[str, list[int]]:
    return {output.request_id: list(output.outputs[0].token_ids) for output in outputs}


@pytest.fixture
def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each preemption: by the pages that weights could still have given then."""
    found: list[int] = []
    preempt = Scheduler._preempt

    def counted(self: Scheduler, sequence: Any) -> None:
        found.append(self._make_room.__self__.spare_pages)  # type: ignore[attr-defined]
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", counted)
    return found


@pytest.mark.shows(
    "memory", "experts give bits to the KV cache while requests run, and get them back"
)
def test_experts_sink_under_load_and_rise_after_it(
    folder: pathlib.Path, preemptions: list[int]
) -> None:
    engine = engine_of(folder, SMALL, check=True)
    trader = engine._trader
    assert trader is not None
    start = widths_of(engine)
    assert start.max() == 6
    add(engine, 5)
    lowest = start.mean()
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        lowest = min(lowest, widths_of(engine).mean())
    assert len(outputs) == 5
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert lowest < start.mean() - 0.5
    assert trader.counts.sunk > 0
    assert all(spare == 0 for spare in preemptions), "it was preempted before the floors"
    # A single sequence leaves room for bits.
    before = widths_of(engine).mean()
    add(engine, 1, prompt=20, output=110, seed=1)
    assert len(run(engine)) == 1
    assert widths_of(engine).mean() > before + 0.3
    assert trader.counts.risen > 0


def test_with_room_for_all_nothing_moves(folder: pathlib.Path) -> None:
    engine = engine_of(folder, AMPLE)
    add(engine, 2)
    ours = tokens_of(run(engine))
    assert set(widths_of(engine).tolist()) == {6}
    other = engine_of(folder, AMPLE, planner="off", expert_bits=6)
    add(other, 2)
    assert tokens_of(run(other)) == ours


def test_what_has_risen_computes_as_before(folder: pathlib.Path) -> None:
    """After sinking and rising the weights are the same to the bit."""
    engine = engine_of(folder, SMALL)
    add(engine, 1, prompt=60, output=8, seed=5)
    first = tokens_of(run(engine))
    start = widths_of(engine)
    add(engine, 5)
    run(engine)
    assert widths_of(engine).mean() < start.mean()
    for seed in range(10, 16):  # short ones, that leave room
        add(engine, 1, prompt=4, output=34, seed=seed)
        run(engine)
    np.testing.assert_array_equal(widths_of(engine), start)
    engine._scheduler._blocks.forget_all()  # its KV was computed before
    add(engine, 1, prompt=60, output=8, seed=5)
    assert tokens_of(run(engine)) == first


def test_a_floor_is_kept(folder: pathlib.Path, preemptions: list[int]) -> None:
    engine = engine_of(folder, "61MiB", expert_bits=5)
    add(engine, 5)
    lowest = 6
    while engine.has_unfinished():
        engine.step()
        lowest = min(lowest, int(widths_of(engine).min()))
    assert lowest == 5
    assert all(spare == 0 for spare in preemptions)


def test_a_run_that_cannot_be_read_stops_nothing(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(folder, SMALL, check=True)
    verify = Checkpoint.verify_expert
    count = 0

    def verify_some(self: Checkpoint, *args: Any) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise CheckpointError("plane.4 is damaged")
        verify(self, *args)

    monkeypatch.setattr(Checkpoint, "verify_expert", verify_some)
    add(engine, 5)
    assert len(run(engine)) == 5
    assert "stays at its width: plane.4 is damaged" in caplog.text


def test_a_step_that_fails_loses_no_change_of_widths(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder, SMALL, check=True)
    start = engine._runner.start
    faults = iter([False] * 6 + [True, False] * 3)

    def fail_sometimes(*args: Any, **options: Any) -> Any:
        if next(faults, False):
            raise RuntimeError("the device is busy")
        return start(*args, **options)

    monkeypatch.setattr(engine._runner, "start", fail_sometimes)
    add(engine, 5)
    outputs, failures = [], 0
    while engine.has_unfinished():
        try:
            outputs += engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 3 and len(outputs) == 5
    np.testing.assert_array_equal(
        np.asarray(engine._runner._state.widths).reshape(-1), widths_of(engine)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expert_bits": 2},
            r"expert_bits 2 is the least width, and must be one of \[3, 4, 5, 6\]",
        ),
        ({"expert_bits": 16}, "expert_bits 16 is the least width"),
        ({"expert_memory": 10**6}, "expert_memory is for planner static"),
    ],
)
def test_what_cannot_be_is_refused(
    folder: pathlib.Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(folder, AMPLE, **options)


def test_a_model_of_one_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="planner dynamic needs a quantised model"):
        LLM(planner="dynamic", **OPTIONS)


def test_a_file_of_widths_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes expert_bits as the least width, not a file"):
        EngineConfig(planner="dynamic", expert_bits="widths.json")
