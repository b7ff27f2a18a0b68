"""moejax-serve: flags, one line for each error, a clean end."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import moejax
from moejax.errors import CheckpointError
from moejax_serving import cli, load
from moejax_serving.config import EngineConfig

# Serves an engine that refuses every request, in place of a model.
SERVER = textwrap.dedent("""
    import sys, types
    from moejax.errors import RequestError
    from moejax_serving import cli

    class Engine:
        tokenizer = None
        max_model_len = 64
        model_name = "stub"
        default_sampling = {}
        def add_request(self, request_id, prompt_token_ids, params, prompt=None, *, stream=False):
            raise RequestError("no")
        def abort(self, request_id):
            pass
        def close(self):
            pass
        def has_unfinished(self):
            return False
        def step(self):
            return []

    def load_engine(model, config, *, metrics):
        return Engine()

    load = types.ModuleType("moejax_serving.load")
    load.load_engine = load_engine
    sys.modules["moejax_serving.load"] = load
    sys.exit(cli.main(sys.argv[1:]))
""")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `main` up to the start of the server; returns what that was given."""
    monkeypatch.setattr(cli, "prepare_environment", lambda environ: None)

    def call(*argv: str) -> Any:
        seen: list[Any] = []
        monkeypatch.setattr(cli, "_serve", lambda *given: seen.append(given) or 0)
        assert cli.main(argv) == 0
        return seen[0]

    return call


def test_the_defaults_are_those_of_the_configuration(called: Any) -> None:
    args, config = called()
    assert config == EngineConfig()
    assert args.model is None and args.served_model_name is None
    assert (args.host, args.max_queued_requests, args.log_level) == ("127.0.0.1", 512, "info")
    assert (args.step_timeout, args.shutdown_timeout) == (300.0, None)


def test_every_flag_arrives(called: Any) -> None:
    args, config = called(
        "folder",
        *("--served-model-name", "a", "b", "--dtype", "float32", "--memory-budget", "10GB"),
        *("--max-model-len", "100", "--max-num-seqs", "3", "--max-num-batched-tokens", "64"),
        *("--seed", "5", "--max-queued-requests", "7", "--log-level", "debug"),
        *("--step-timeout", "0", "--shutdown-timeout", "2.5"),
        *("--no-enable-prefix-caching", "--no-warm-up", "--skip-tokenizer-init"),
        *("--planner", "static", "--expert-memory", "3GB", "--linear-bits", "5"),
    )
    assert args.model == "folder" and args.served_model_name == ["a", "b"]
    assert args.max_queued_requests == 7
    assert (args.step_timeout, args.shutdown_timeout) == (0.0, 2.5)
    assert config == EngineConfig(
        dtype="float32",
        memory_budget=10**10,
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        seed=5,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        warm_up=False,
        planner="static",
        expert_memory=3 * 10**9,
        linear_bits=5,
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("auto", "auto"), ("4", 4), ("16", 16), ("w.json", "w.json"), ("999.json", "999.json")],
)
def test_the_width_of_experts_is_a_number_or_a_file(called: Any, text: str, value: Any) -> None:
    _, config = called("folder", "--expert-bits", text)
    assert config.expert_bits == value and config.linear_bits == "auto"


def test_underscores_are_dashes(called: Any) -> None:
    args, config = called("my_model", "--max_num_seqs=3", "--served_model_name", "a_b")
    assert (config.max_num_seqs, args.model, args.served_model_name) == (3, "my_model", ["a_b"])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--port", "65536"], "'65536' is not a port: 0 to 65535"),
        (["--port", "http"], "'http' is not a port"),
        (["--max-num-seqs", "9" * 5000], f"'{'9' * 40}' is not a whole number above 0"),
        (["--port", "9" * 5000], f"'{'9' * 40}' is not a port"),
        (["--max-num-seqs", "0"], "'0' is not a whole number above 0"),
        (["--memory-budget", "10G"], "'10G' is not a size: write bytes, or a number with one of"),
        (["--step-timeout", "-1"], "'-1' is not a number of seconds: 0 or more"),
        (["--shutdown-timeout", "nan"], "'nan' is not a number of seconds"),
        (["--shutdown-timeout", "inf"], "'inf' is not a number of seconds"),
        (["--shutdown-timeout", "soon"], "'soon' is not a number of seconds"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
        (["--planner", "none"], "invalid choice: 'none'"),
        (["--expert-bits", "4.5"], "4.5 is not a width: 2 to 8, or 16"),
        (["--expert-bits", "-3"], "-3 is not a width: 2 to 8, or 16"),
        (["--linear-bits", "w.json"], "'w.json' is not a width: auto, 2 to 8, or 16"),
        (["--expert-memory", "3G"], "'3G' is not a size"),
        (["--max-num", "3"], "unrecognized arguments: --max-num"),
        (["a", "b"], "unrecognized arguments: b"),
    ],
)
def test_a_wrong_flag_ends_with_a_usage_message(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_an_error_of_ours_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise CheckpointError("no_such has no config.json")

    monkeypatch.setattr(cli, "prepare_environment", lambda environ: None)
    monkeypatch.setattr(cli, "_serve", fail)
    assert cli.main(["no_such"]) == 1
    assert capsys.readouterr().err == "moejax-serve: no_such has no config.json\n"


def test_a_setting_that_cannot_be_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "prepare_environment", lambda environ: None)
    assert cli.main(["--seed=-1"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("moejax-serve: seed ") and captured.err.count("\n") == 1


def test_a_port_in_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "prepare_environment", lambda environ: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--port", str(port)]) == 1
    expected = f"moejax-serve: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    assert capsys.readouterr().err == expected


def test_a_host_that_is_not_ours_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "prepare_environment", lambda environ: None)
    assert cli.main(["--host", "192.0.2.1"]) == 1
    assert "moejax-serve: cannot listen on 192.0.2.1 port 8000" in capsys.readouterr().err


def test_help_and_version_need_no_jax() -> None:
    code = (
        "import sys\n"
        "from moejax_serving.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'jax', 'numpy', 'fastapi', 'pydantic'} & sys.modules.keys()\n"
    )
    for flag, text in (("--help", "--memory-budget SIZE"), ("--version", moejax.__version__)):
        command = [sys.executable, "-c", code, flag]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    hidden = {"check"}  # for tests
    for field in dataclasses.fields(EngineConfig):
        assert ("--" + field.name.replace("_", "-") in shown) != (field.name in hidden)


@contextlib.contextmanager
def server(
    tmp_path: pathlib.Path, *argv: str, source: str = SERVER
) -> Iterator[tuple[Any, str, str]]:
    """A server process with a stub engine, its URL and what it printed at the start."""
    script = tmp_path / "server.py"
    script.write_text(source)
    command = [sys.executable, str(script), "--port", "0", *argv]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            first = process.stdout.readline()
            assert " is served at " in first, process.stderr.read()
            greeting = first + "".join(process.stdout.readline() for _ in range(3))
            yield process, first.split()[-1], greeting
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_cleanly(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    with server(tmp_path) as (process, url, greeting):
        assert greeting.startswith("moejax-serve: demo is served at http://127.0.0.1:")
        assert f"curl {url}/v1/completions" in greeting
        with urllib.request.urlopen(f"{url}/health", timeout=20) as response:
            assert response.status == 200
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "Traceback" not in errors


def test_the_name_of_the_model_without_arguments_is_that_of_the_loader() -> None:
    assert cli.BUILT_IN_MODEL == load.BUILT_IN_MODEL


def test_the_model_is_served_under_its_path(tmp_path: pathlib.Path) -> None:
    with server(tmp_path, "some/folder") as (_, url, greeting):
        assert greeting.startswith("moejax-serve: some/folder is served at ")
        with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as response:
            assert json.load(response)["data"][0]["id"] == "some/folder"


def test_a_model_that_cannot_be_loaded_is_one_line_and_status_1(tmp_path: pathlib.Path) -> None:
    source = SERVER.replace("return Engine()", 'raise RequestError("no config.json")')
    done = run_to_its_end(tmp_path, source, "--log-level", "error")
    assert done.returncode == 1
    assert done.stdout == "" and done.stderr == "moejax-serve: no config.json\n"


def test_a_bug_in_loading_is_a_traceback_and_status_1(tmp_path: pathlib.Path) -> None:
    done = run_to_its_end(tmp_path, SERVER.replace("return Engine()", "return 1 / 0"))
    assert done.returncode == 1 and done.stdout == ""
    assert "in load_engine" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def run_to_its_end(
    tmp_path: pathlib.Path, source: str, *argv: str
) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "server.py"
    script.write_text(source)
    command = [sys.executable, str(script), "--port", "0", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_printed_request_is_answered(tmp_path: pathlib.Path) -> None:
    with server(tmp_path, "--served-model-name", "it's") as (_, url, greeting):
        (line,) = [line for line in greeting.splitlines() if "curl" in line]
        done = subprocess.run(
            ["sh", "-c", line.replace("curl", "printf '%s\\n'", 1)],
            capture_output=True,
            text=True,
            check=True,
        )
        target, _, header, _, body = done.stdout.splitlines()
        request = urllib.request.Request(target, body.encode(), dict([header.split(": ")]))
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=20)
        assert caught.value.code == 400  # the stub refuses, and has understood
        assert b'"no"' in caught.value.read()
        caught.value.close()


def test_a_folder_among_the_served_names_is_no_name(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--served-model-name NAME MODEL` would serve the built-in model under the name of another."""
    monkeypatch.setattr(cli, "prepare_environment", lambda environ: None)
    assert cli.main(["--served-model-name", "name", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"took {str(tmp_path)!r}, which is a folder: put MODEL before the flags" in error
