"""Which widths an engine takes, and that it then gives what weights of these widths give."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import references
from arena.coded import widths_to_json
from moejax.arena.geometry import Geometry, LinearShape, choose_geometry
from moejax.arena.widths import Widths, uniform
from moejax.checkpoint import Checkpoint
from moejax.errors import CapacityError, ConfigError
from moejax.models.whole import forward, read_stacked
from moejax_converters.convert import convert
from moejax_converters.quantize import quantize
from moejax_converters.quantize_options import QuantizeOptions
from moejax_serving import LLM, SamplingParams
from moejax_serving.config import EngineConfig
from moejax_serving.load import _max_model_len, _plan
from moejax_serving.static_plan import choices, static_widths
from moejax_serving.widths import choose_widths

MIB = 1 << 20


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("plain") / "demo"
    convert(pathlib.Path(str(resources.files("moejax_serving") / "demo")), folder)
    return folder


@pytest.fixture(scope="session")
def folder(plain: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The demo with 3 to 6 bits, attention too, and width 16."""
    folder = tmp_path_factory.mktemp("quantized") / "demo"
    options = QuantizeOptions(calibration=None, linears=("attention",), keep_dense=True)
    quantize(plain, folder, options, progress=False)
    return folder


@pytest.fixture(scope="session")
def checkpoint(folder: pathlib.Path) -> Checkpoint:
    return Checkpoint.open(folder)


def geometry_of(checkpoint: Checkpoint) -> Geometry:
    shapes = {name: checkpoint.linear_shape(name) for name in checkpoint.linear_names()}
    return choose_geometry(checkpoint.config, "float32", checkpoint.quantization, shapes)


def fits(
    geometry: Geometry, pages: int, tokens_per_page: int = 1 << 20
) -> Callable[[Widths], tuple[int, int]]:
    """A plan of so many pages, which gives those of weights, and the tokens that the rest holds."""

    def plan(widths: Widths) -> tuple[int, int]:
        if (found := widths.pages(geometry)) > pages:
            raise CapacityError(f"{found} pages, there are {pages}")
        return found, (pages - found + 1) * tokens_per_page

    return plan


def chosen(checkpoint: Checkpoint, pages: int = 10**9, **settings: Any) -> Widths:
    geometry = geometry_of(checkpoint)
    widths, (found, _) = choose_widths(
        checkpoint, geometry, EngineConfig(**settings), fits(geometry, pages)
    )
    assert found == widths.pages(geometry)
    return widths


def all_of(widths: Widths) -> tuple[set[int], set[int]]:
    return set(widths.experts.reshape(-1).tolist()), set(widths.linears.tolist())


# The choice.


def test_auto_takes_the_widest_that_fits(checkpoint: Checkpoint) -> None:
    geometry = geometry_of(checkpoint)
    assert geometry.widths == (3, 4, 5, 6, 16)
    assert all_of(chosen(checkpoint)) == ({16}, {16})
    for width in geometry.widths:
        pages = uniform(geometry, width, 16).pages(geometry)
        assert all_of(chosen(checkpoint, pages)) == ({width}, {16})
        if width > 3:
            assert all_of(chosen(checkpoint, pages - 1)) != ({width}, {16})
    least = uniform(geometry, 3, 16).pages(geometry)
    shown = uniform(geometry, 3, 16).summary()
    with pytest.raises(
        CapacityError, match=f"^{least} pages, there are {least - 1} \\(widths: {shown}\\)$"
    ):
        chosen(checkpoint, least - 1)


def test_auto_gives_up_bits_before_the_length_of_sequences(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    geometry = geometry_of(checkpoint)
    pages = {width: uniform(geometry, width, 16).pages(geometry) for width in geometry.widths}

    def choose(room: int, **settings: Any) -> set[int]:
        """With 8 tokens per page; the model has 1024 positions."""
        caplog.clear()
        plan = fits(geometry, room, 8)
        with caplog.at_level("INFO"):
            widths, _ = choose_widths(checkpoint, geometry, EngineConfig(**settings), plan)
        return all_of(widths)[0]

    for width, needed in pages.items():
        assert choose(needed + 127) == {width}
        why = "since the wider ones leave no room for a sequence of 1024 tokens"
        assert caplog.messages == ([f"expert_bits auto: {width} bits, {why}"] * (width != 16))
    # Where no width leaves room for all of them, that which leaves most is taken.
    assert choose(pages[3] + 5) == {3}
    why = "since no width leaves room for a sequence of 1024 tokens, and this leaves most"
    assert caplog.messages == [f"expert_bits auto: 3 bits, {why}"]
    # Who says how long sequences are gets the widest with which these fit.
    assert choose(pages[5] + 5, max_model_len=8) == {5}


def test_of_small_experts_width_16_may_take_the_fewest_pages(checkpoint: Checkpoint) -> None:
    small = LinearShape(parts=1, rows=64, columns=64)
    geometry = dataclasses.replace(
        geometry_of(checkpoint), gate_up=dataclasses.replace(small, parts=2), down=small
    )
    pages = {width: uniform(geometry, width, 16).pages(geometry) for width in geometry.widths}
    assert min(pages, key=pages.__getitem__) == 16

    def choose(room: int) -> Widths:
        plan = fits(geometry, room, 8)
        return choose_widths(checkpoint, geometry, EngineConfig(), plan)[0]

    assert all_of(choose(pages[3])) == all_of(choose(pages[16])) == ({16}, {16})
    with pytest.raises(CapacityError, match=f"^{pages[16]} pages, .* \\(widths: 16 bits: "):
        choose(pages[16] - 1)


def test_auto_falls_to_narrower_experts_where_the_budget_is_small(checkpoint: Checkpoint) -> None:
    geometry = geometry_of(checkpoint)

    def choose(budget: int, **settings: Any) -> tuple[int, Any]:
        config = EngineConfig(
            memory_budget=budget,
            max_model_len=64,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            **settings,
        )
        longest = _max_model_len(checkpoint.config, config)
        widths, (memory, _) = choose_widths(
            checkpoint,
            geometry,
            config,
            lambda widths: _plan(
                checkpoint.config, geometry, config, longest, widths.pages(geometry)
            ),
        )
        (width,) = set(widths.experts.reshape(-1).tolist())
        assert memory.experts == widths.pages(geometry) * geometry.page_bytes
        assert sum(memory.kinds.values()) <= budget
        return width, memory

    needed = {}
    for width in geometry.widths:
        with pytest.raises(CapacityError) as error:
            choose(MIB, expert_bits=width)
        needed[width] = int(re.findall(r"\((\d+) bytes\)", str(error.value))[0])
    assert list(needed.values()) == sorted(needed.values())
    for width, budget in needed.items():
        assert choose(budget)[0] == width
    with pytest.raises(CapacityError, match=f"needs at least .* \\({needed[3]} bytes\\)"):
        choose(needed[3] - 1)


def test_widths_that_are_asked_for_are_taken(checkpoint: Checkpoint) -> None:
    assert all_of(chosen(checkpoint, expert_bits=4)) == ({4}, {16})
    assert all_of(chosen(checkpoint, expert_bits=3, linear_bits=5)) == ({3}, {5})
    assert all_of(chosen(checkpoint, linear_bits=3)) == ({16}, {3})
    with pytest.raises(CapacityError):
        chosen(checkpoint, pages=1, expert_bits=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_bits": 7}, "expert_bits 7: the model is stored with 6 bits at most, and 16"),
        ({"expert_bits": 2}, "expert_bits 2: the model is stored with 3 bits at least"),
        ({"linear_bits": 8}, "linear_bits 8: the model is stored with 6 bits at most, and 16"),
    ],
)
def test_widths_that_are_not_stored_are_refused(
    settings: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        chosen(checkpoint, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_bits": 4}, "expert_bits 4: the model is not quantised and has width 16 only"),
        ({"expert_bits": "w.json"}, "expert_bits w.json: the model is not quantised and has width"),
        ({"linear_bits": 4}, "linear_bits 4: only the experts of this model are quantised"),
        (
            {"planner": "static", "expert_memory": 10**9},
            "planner static needs a quantised model: moejax-convert --quantize any-precision",
        ),
    ],
)
def test_a_model_that_is_not_quantised_has_one_width(
    settings: dict[str, Any], message: str, plain: pathlib.Path
) -> None:
    checkpoint = Checkpoint.open(plain)
    assert all_of(chosen(checkpoint)) == all_of(chosen(checkpoint, expert_bits=16)) == ({16}, set())
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        chosen(checkpoint, **settings)


def some_widths(geometry: Geometry) -> Widths:
    rng = np.random.default_rng(0)
    widths = uniform(geometry, 3, 5)
    widths.experts[...] = rng.choice(np.array([3, 4, 5, 6, 16], np.int32), widths.experts.shape)
    widths.linears[::2], widths.linears[1] = 4, 16
    return widths


@pytest.fixture(scope="session")
def file(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    geometry = geometry_of(checkpoint)
    path = tmp_path_factory.mktemp("widths") / "widths.json"
    path.write_text(json.dumps(widths_to_json(some_widths(geometry), geometry)))
    return path


def test_a_file_says_the_width_of_every_linear(checkpoint: Checkpoint, file: pathlib.Path) -> None:
    found, wanted = chosen(checkpoint, expert_bits=str(file)), some_widths(geometry_of(checkpoint))
    np.testing.assert_array_equal(found.experts, wanted.experts)
    np.testing.assert_array_equal(found.linears, wanted.linears)
    message = rf"^linear_bits 4 and {file} say different things: leave it out$"
    with pytest.raises(ConfigError, match=message):
        chosen(checkpoint, expert_bits=str(file), linear_bits=4)


@pytest.mark.parametrize("text", ["{", "[3]", '{"experts": 3}', '{"experts": [], "linears": {}}'])
def test_a_file_that_holds_no_widths_is_one_line(
    text: str, checkpoint: Checkpoint, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))) as error:
        chosen(checkpoint, expert_bits=str(path))
    assert "\n" not in str(error.value)
    with pytest.raises(
        ConfigError, match=r"^expert_bits is neither auto.*nowhere\.json: No such file"
    ):
        chosen(checkpoint, expert_bits=str(tmp_path / "nowhere.json"))


# Planner static.


@pytest.mark.shows(
    "quantised experts", "a static planner gives each expert a width, within a number of bytes"
)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, 1.0])
def test_the_static_planner_stays_within_its_bytes(share: float, checkpoint: Checkpoint) -> None:
    geometry = geometry_of(checkpoint)
    costs = checkpoint.sensitivity()
    table = choices(costs, geometry)
    least, most = int(table.sizes.min(axis=1).sum()), int(table.sizes.max(axis=1).sum())
    budget = int(least + share * (most - least))
    widths = chosen(checkpoint, planner="static", expert_memory=budget)
    without = dataclasses.replace(geometry, linears=())
    spent = widths.pages(without) * geometry.page_bytes
    assert least <= spent <= budget
    assert set(widths.linears.tolist()) == {16}
    # No uniform width that fits does less damage.
    columns = {width: column for column, width in enumerate(geometry.widths)}
    flat = widths.experts.reshape(-1)
    damage = sum(table.damage[i, columns[int(width)]] for i, width in enumerate(flat))
    for width, column in columns.items():
        if int(table.sizes[:, column].sum()) <= budget:
            assert damage <= table.damage[:, column].sum() * (1 + 1e-9), width
    if share == 1:
        assert set(flat.tolist()) == {16}


def test_too_few_bytes_for_the_static_planner_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(
        CapacityError, match=r"linears of experts take at least .* \(\d+ bytes\); expert_memory"
    ):
        static_widths(checkpoint.sensitivity(), geometry_of(checkpoint), 1000, 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_bits": ""}, "expert_bits must be auto, a width or a file of widths, got ''"),
        ({"expert_bits": True}, "expert_bits must be auto, a width or a file of widths, got True"),
        ({"expert_bits": 9}, "expert_bits must be a width from 2 to 8, or 16, got 9"),
        ({"expert_bits": 10**5000}, "expert_bits must be a width from 2 to 8, or 16, got a huge"),
        ({"linear_bits": 1}, "linear_bits must be a width from 2 to 8, or 16, got 1"),
        ({"linear_bits": "w.json"}, "linear_bits must be auto or a width, got 'w.json'"),
        ({"planner": "none"}, "planner must be off, static, dynamic, got 'none'"),
        ({"planner": "static"}, "planner static needs expert_memory"),
        ({"expert_memory": 10**9}, "expert_memory is for planner static"),
        ({"planner": "static", "expert_memory": 0}, "expert_memory must be a whole number of at"),
        (
            {"planner": "static", "expert_memory": 10**9, "expert_bits": 4},
            "planner static chooses the widths: leave expert_bits at auto",
        ),
    ],
)
def test_settings_that_clash_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        EngineConfig(**settings)


# Engines.

PROMPT = [17, 301, 4000, 25, 9, 880, 2, 77, 1203, 640]
NEW = 8


def generated(folder: pathlib.Path, **options: Any) -> tuple[list[int], Any]:
    llm = LLM(
        folder,
        dtype="float32",
        memory_budget="256MiB",
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        warm_up=False,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), llm.engine


def assert_greedy(checkpoint: Checkpoint, widths: Widths, tokens: list[int]) -> None:
    """Each token is the likeliest of the decoded weights, or as good as that."""
    geometry = geometry_of(checkpoint)
    of = {
        tensor.name: widths.linears[tensor.first : tensor.first + tensor.repeats]
        for tensor in geometry.linears
    }
    found = jax.jit(forward, static_argnames=("config", "dtype"))(
        references.read_params(checkpoint, of),
        read_stacked(checkpoint, "float32", widths.experts),
        jnp.asarray([[*PROMPT, *tokens]], jnp.int32),
        config=checkpoint.config,
        dtype="float32",
    )
    logits = np.asarray(found[0, len(PROMPT) - 1 : -1])
    assert len(tokens) == NEW
    best = logits.max(axis=1)
    assert (best - logits[np.arange(NEW), tokens] < 1e-4).all()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.shows(
    "quantised experts", "served tokens are those of a forward pass with the decoded weights"
)
def test_an_engine_generates_what_weights_of_its_width_give(
    checkpoint: Checkpoint, folder: pathlib.Path
) -> None:
    tokens, engine = generated(folder, expert_bits=3, linear_bits=6)
    widths = uniform(geometry_of(checkpoint), 3, 6)
    assert_greedy(checkpoint, widths, tokens)
    assert engine.memory.experts == widths.pages(geometry_of(checkpoint)) * (
        geometry_of(checkpoint).page_bytes
    )


def test_an_engine_takes_a_file_of_widths(
    checkpoint: Checkpoint, folder: pathlib.Path, file: pathlib.Path
) -> None:
    tokens, _ = generated(folder, expert_bits=str(file))
    assert_greedy(checkpoint, some_widths(geometry_of(checkpoint)), tokens)


def test_the_command_line_refuses_a_width_in_one_line(folder: pathlib.Path) -> None:
    code = "import sys; from moejax_serving.cli import main; sys.exit(main())"
    result = subprocess.run(
        [
            *(sys.executable, "-c", code, str(folder), "--expert-bits", "7"),
            *("--port", "0", "--log-level", "error"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    wanted = "moejax-serve: expert_bits 7: the model is stored with 6 bits at most, and 16\n"
    assert result.stderr == wanted


def test_python_takes_paths_and_sizes_as_the_command_line_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[EngineConfig] = []
    monkeypatch.setattr("moejax_serving.llm.load_engine", lambda _, config: seen.append(config))
    LLM(expert_bits=pathlib.Path("widths.json"), memory_budget="1MB")
    LLM(planner="static", expert_memory="3MB")
    assert (seen[0].expert_bits, seen[0].memory_budget) == ("widths.json", 1_000_000)
    assert seen[1].expert_memory == 3_000_000


def test_a_huge_file_is_refused_unread(checkpoint: Checkpoint, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "widths.json"
    with path.open("wb") as file:
        file.truncate(20 << 30)  # it takes no room
    with pytest.raises(ConfigError, match=r"widths\.json: 21474836480 bytes are too many"):
        chosen(checkpoint, expert_bits=str(path))
