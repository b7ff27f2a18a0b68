"""moejax-convert as a user meets it."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

import moejax
from converters import checkpoints
from moejax_converters import cli
from moejax_converters import convert as convert_module
from moejax_converters.cli import main


def test_converts(tmp_path, capsys):
    model = checkpoints.write(tmp_path / "hf")
    assert main([str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr() == ("", "")
    checkpoints.assert_same(checkpoints.decoded(tmp_path / "out"), model)


def test_an_error_is_one_line_and_no_traceback(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"moejax-convert: {tmp_path}/nowhere: no such folder\n"


def test_an_interrupt_says_that_nothing_was_written(tmp_path, capsys, monkeypatch):
    checkpoints.write(tmp_path / "hf")

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "_put_expert", interrupt)
    assert main([str(tmp_path / "hf"), str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "moejax-convert: interrupted, nothing was written\n"
    assert os.listdir(tmp_path) == ["hf"]


def test_an_interrupt_that_python_cannot_raise_comes_again(tmp_path, capsys, monkeypatch):
    checkpoints.write(tmp_path / "hf")

    class Collected:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def work(*args: object) -> None:
        Collected()
        for _ in range(1000):
            time.sleep(0.01)

    monkeypatch.setattr(convert_module, "_put_expert", work)
    assert main([str(tmp_path / "hf"), str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "moejax-convert: interrupted, nothing was written\n"


def test_an_interrupt_before_there_is_anything_to_go_on_with_says_so(tmp_path, capsys, monkeypatch):
    checkpoints.write(tmp_path / "hf")

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "_put_expert", interrupt)
    flags = ["--quantize", "any-precision", "--calibration", "none"]
    assert main([str(tmp_path / "hf"), str(tmp_path / "out"), *flags]) == 130
    assert capsys.readouterr().err == "moejax-convert: interrupted, nothing was written\n"
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("flags", [[], ["--quantize", "any-precision", "--calibration", "none"]])
def test_where_there_is_no_gpu_jax_is_told_to_look_for_none(flags, tmp_path, monkeypatch):
    seen: list[object] = []
    monkeypatch.setattr(cli, "prepare_environment", seen.append)
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "out"), *flags]) == 1
    assert seen == [os.environ]


def test_inspect_shows_kinds_and_layers(tmp_path, capsys):
    checkpoints.write(tmp_path / "hf", "qwen2_moe")
    main([str(tmp_path / "hf"), str(tmp_path / "out")])
    assert main(["--inspect", str(tmp_path / "out")]) == 0
    assert (
        capsys.readouterr().out
        == """\
qwen2_moe: 3 layers, hidden size 32, vocabulary 96, bfloat16
2 layers with 4 experts of width 24 (11.26 kB each), 2 per token

kind            dtype              bytes
embeddings      bfloat16        12.29 kB
norms           bfloat16           448 B
attention       bfloat16        18.82 kB
routers         bfloat16           512 B
shared experts  bfloat16        21.63 kB
dense MLPs      bfloat16        13.82 kB
experts         bfloat16        90.11 kB
all                            157.63 kB

layers      attention                 feed-forward                bytes each
0           all tokens                4 experts, shared 56          62.53 kB
1           all tokens                MLP of 72                     20.22 kB
2           all tokens                4 experts, shared 56          62.53 kB
"""
    )


@pytest.mark.parametrize(
    ("family", "lines"),
    [
        (
            "gpt_oss",
            # Of each layer: 2 x 24 + 32 values for each of 4 experts; 4 x 33 of the router.
            [
                "expert biases   bfloat16         1.92 kB",
                "routers         bfloat16           792 B",
                "0           window of 8               4 experts                     52.43 kB",
                "1           all tokens                4 experts                     52.43 kB",
            ],
        ),
        (
            "gemma4_text",
            # Seven norms of 32 values and one more; 4 x 32 + 32 + 4 of the router.
            [
                "norms           bfloat16         1.41 kB",
                "routers         bfloat16           984 B",
                "layer scales    bfloat16             6 B",
                "dense MLPs      bfloat16        41.47 kB",
                "0 to 1      window of 8               4 experts, MLP of 72          65.83 kB",
            ],
        ),
        (
            "deepseek_v3",
            # 16 x 33 + 64 x 16 + 24 x 33 + 4 x 22 x 20 + 32 x 41 + 16 + 20 values of each layer.
            [
                "attention       bfloat16        32.71 kB",
                "shared experts  bfloat16         9.22 kB",
                "1 to 2      latent of 20 + 4          4 experts, shared 24          60.96 kB",
            ],
        ),
        (
            "phimoe",
            # Weights and biases of norms, and a bias of the head.
            [
                "embeddings      bfloat16        12.48 kB",
                "norms           bfloat16           896 B",
            ],
        ),
        (
            "llama4_text",
            ["3           all tokens, no positions  4 experts, shared 24          56.19 kB"],
        ),
    ],
)
def test_inspect_shows_what_only_some_families_have(family, lines, tmp_path, capsys):
    checkpoints.write(tmp_path / "hf", family)
    main([str(tmp_path / "hf"), str(tmp_path / "out")])
    assert main(["--inspect", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out.split("\n")
    assert [line for line in lines if line not in table] == []


def test_inspect_refuses_what_is_not_converted(tmp_path, capsys):
    assert main(["--inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"moejax-convert: {tmp_path} is not a moejax checkpoint: "
        "moejax.json: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SOURCE and TARGET are needed, or --inspect FOLDER"),
        (["a"], "SOURCE and TARGET are needed, or --inspect FOLDER"),
        (["--inspect", "a", "b"], "--inspect takes no SOURCE and TARGET"),
    ],
)
def test_refuses_arguments_that_do_not_go_together(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_says_its_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"moejax-convert {moejax.__version__}\n"


def test_the_module_is_a_command_too():
    result = subprocess.run(
        [sys.executable, "-m", "moejax_converters.cli", "--version"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.stdout == f"moejax-convert {moejax.__version__}\n", result.stderr


def test_help_needs_no_jax():
    code = (
        "import sys\n"
        "from moejax_converters.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    assert not {'jax', 'numpy', 'orbax'} & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "SOURCE" in result.stdout


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15])
def test_an_interrupt_at_any_time_leaves_all_or_nothing(delay, tmp_path):
    checkpoints.write(tmp_path / "hf", num_hidden_layers=12, num_local_experts=12)
    code = "import sys; from moejax_converters.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "hf"), str(tmp_path / "out")],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(os.listdir(tmp_path)) == 1 and process.poll() is None:
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    if process.returncode == 0:  # the conversion was faster
        assert sorted(os.listdir(tmp_path)) == ["hf", "out"]
        return
    assert errors == "moejax-convert: interrupted, nothing was written\n"
    assert process.returncode == 130
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        # Files of experts pass 64 KiB, dense tensors pass 8 KiB.
        (65536, r"cannot write .*/out: File too large"),
        (8192, r"tensor 'segments\.0\.0\.attention\.o\.weight' in .*File too large.*"),
    ],
)
def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(limit, message, tmp_path):
    checkpoints.write(tmp_path / "hf", intermediate_size=160)
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "from moejax_converters.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-B", "-c", code, str(tmp_path / "hf"), str(tmp_path / "out")],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert re.fullmatch(f"moejax-convert: {message}\n", result.stderr), result.stderr
    assert os.listdir(tmp_path) == ["hf"]
