"""The flags and options of a quantisation: what arrives, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from moejax.errors import ConfigError
from moejax_converters import quantize as module
from moejax_converters.cli import main
from moejax_converters.quantize_options import QuantizeOptions


def test_every_flag_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(module, "quantize", lambda *given: seen.append(given))
    flags = ["--quantize", "any-precision", "--calibration"]
    assert main(["a", "b", *flags, "none"]) == 0
    assert main(["a", "b", *flags, "none", "--rows-per-table", "auto"]) == 0
    more = ["--seed-bits", "2", "--parent-bits", "8", "--rows-per-table", "16", "--keep-dense"]
    more += ["--calibration-sequences", "3", "--calibration-length", "4"]
    more += ["--quantize-linears", "shared,attention,shared"]
    assert main(["a", "b", *flags, "text.txt", *more]) == 0
    assert seen[0] == seen[1] == ("a", "b", QuantizeOptions(calibration=None))
    assert seen[2] == (
        "a",
        "b",
        QuantizeOptions(
            calibration=Path("text.txt"),
            seed_bits=2,
            parent_bits=8,
            rows_per_table=16,
            linears=("shared", "attention"),
            keep_dense=True,
            sequences=3,
            length=4,
        ),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed_bits": 4}, "seed_bits must be 2 or 3, got 4"),
        ({"parent_bits": 2}, "parent_bits must be from seed_bits (3) to 8, got 2"),
        ({"parent_bits": 9}, "parent_bits must be from seed_bits (3) to 8, got 9"),
        (
            {"sequences": 0},
            "a calibration needs 1 sequence of 2 tokens at least, got 0 of 512",
        ),
        ({"length": 1}, "a calibration needs 1 sequence of 2 tokens at least, got 128 of 1"),
        ({"rows_per_table": 3}, "rows_per_table must be a power of two up to 64, got 3"),
        ({"linears": ("experts",)}, "linears: 'experts' is none of attention, shared"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        QuantizeOptions(calibration=None, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibration", "none"], "--calibration needs --quantize any-precision"),
        (["--parent-bits", "4"], "--parent-bits needs --quantize any-precision"),
        (["--keep-dense"], "--keep-dense needs --quantize any-precision"),
        (["--quantize-linears", "shared"], "--quantize-linears needs --quantize any-precision"),
        (["--calibration-length", "4"], "--calibration-length needs --quantize any-precision"),
        (["--quantize", "any-precision"], "--quantize needs --calibration FILE"),
        (["--quantize", "gptq"], "invalid choice: 'gptq'"),
        (["--quantize-linears", "embeddings"], "'embeddings' is neither attention, shared"),
        (["--rows-per-table", "3"], "'3' is neither auto nor a power of two up to 64"),
        (["--rows-per-table", "01"], "'01' is neither auto nor a power of two up to 64"),
        (
            ["--quantize", "any-precision", "--calibration", "none", "--calibration-length", "4"],
            "--calibration none takes no --calibration-length",
        ),
        (["--quantize", "any-precision", "--calibration", ""], "needs the name of a file"),
        (["--rows-per-table", "many"], "'many' is neither auto nor a power of two up to 64"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["a", "b", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_inspect_takes_no_flags_of_quantisation(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--quantize", "any-precision", "--calibration", "none"], ["--keep-dense"]):
        with pytest.raises(SystemExit):
            main(["--inspect", "a", *flags])
    assert "--inspect takes no --quantize" in capsys.readouterr().err
