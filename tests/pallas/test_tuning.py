"""How products are cut into programs."""

import json

import pytest

from moejax.arena.geometry import LinearShape, Runs
from moejax.pallas import tuning
from moejax.pallas.product import Tiling
from moejax.pallas.tuning import (
    choose_tilings,
    default_tiling,
    tile_tokens,
    tuned_tilings,
    tuning_key,
)


def runs(parts: int, rows: int, columns: int) -> Runs:
    shape = LinearShape(parts=parts, rows=rows, columns=columns)
    return Runs(shape=shape, dtype="bfloat16", page_bytes=1 << 16, quantization=None)


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "size"),
    [
        (1, 4, 60, 8),
        (32, 4, 60, 8),
        (64, 8, 128, 8),
        (64, 4, 60, 8),
        (128, 4, 60, 16),
        (512, 4, 60, 32),
        (8, 2, 8, 8),
        (64, 2, 8, 32),
        (4096, 8, 128, 32),
    ],
)
def test_a_tile_holds_what_an_expert_has_on_average(
    tokens: int, k: int, experts: int, size: int
) -> None:
    assert tile_tokens(tokens, k, experts) == size


def test_few_programs_share_rows_among_warps() -> None:
    down = runs(1, 2048, 1408)
    assert default_tiling(1, down, 8, 60, 4) == Tiling(tokens=8, row_warps=4, k_warps=4)
    assert default_tiling(1, down, 8, 60, 60) == Tiling(tokens=8, row_warps=4, k_warps=1)


def test_a_measured_tiling_is_taken(monkeypatch, tmp_path) -> None:
    linears = runs(2, 1408, 2048), runs(1, 2048, 1408)
    key = tuning_key(1, linears[1], 8, 4)
    assert key == "down 2048x1408 tokens 8 experts 4"
    (tmp_path / "Some_GPU.json").write_text(json.dumps({key: [8, 2, 4]}))
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    tuned_tilings.cache_clear()
    found = choose_tilings(1, 4, 60, linears, "Some GPU")
    assert found[1] == Tiling(tokens=8, row_warps=2, k_warps=4)
    assert found[0] == default_tiling(0, linears[0], 8, 60, 4)
    assert choose_tilings(1, 4, 60, linears, "Other GPU")[1] != found[1]
    tuned_tilings.cache_clear()


def test_what_was_measured_is_well_formed() -> None:
    for path in tuning.TUNED.glob("*.json"):
        for key, tiling in tuned_tilings(path.stem.replace("_", " ")).items():
            assert f"tokens {tiling.tokens} " in key
            assert tiling.row_warps in (2, 4) and tiling.k_warps in (1, 2, 4)
