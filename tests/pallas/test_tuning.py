"""How products are cut into programs."""

import json

import pytest

from moejax.arena.geometry import LinearShape, Runs
from moejax.errors import ConfigError
from moejax.pallas import tuning
from moejax.pallas.prefill import TILE_TOKENS
from moejax.pallas.product import Tiling
from moejax.pallas.tuning import (
    choose_prefill_tile,
    choose_tilings,
    default_tiling,
    prefill_cost,
    prefill_key,
    tile_tokens,
    tuned_prefill_tiles,
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
    assert default_tiling(1, down, 8, 60, 4) == Tiling(tokens=8, row_warps=2, k_warps=4)
    assert default_tiling(1, down, 8, 60, 60) == Tiling(tokens=8, row_warps=2, k_warps=2)
    assert default_tiling(1, down, 16, 60, 60) == Tiling(tokens=16, row_warps=4, k_warps=1)


def test_a_measured_tiling_is_taken(monkeypatch, tmp_path) -> None:
    linears = runs(2, 1408, 2048), runs(1, 2048, 1408)
    key = tuning_key(1, linears[1], 8, 4)
    assert key == "down 2048x1408 tokens 8 experts 4"
    (tmp_path / "Some_GPU.json").write_text(json.dumps({key: [8, 1, 8]}))
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    tuned_tilings.cache_clear()
    found = choose_tilings(1, 4, 60, linears, "Some GPU")
    assert found[1] == Tiling(tokens=8, row_warps=1, k_warps=8)
    assert found[0] == default_tiling(0, linears[0], 8, 60, 4)
    assert choose_tilings(1, 4, 60, linears, "Other GPU")[1] != found[1]
    tuned_tilings.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "size"),
    [
        # 4 tokens of an expert, 34, 68, 136, 273 and 546.
        (64, 4, 60, 64),
        (512, 4, 60, 64),
        (1024, 4, 60, 128),
        (2048, 4, 60, 128),
        (4096, 4, 60, 256),
        (8192, 4, 60, 256),
        # So few experts are not enough for two waves of programs.
        (512, 2, 8, 256),
        (4096, 8, 128, 256),
        (1 << 20, 2, 8, 256),
    ],
)
def test_large_groups_have_large_tiles(tokens: int, k: int, experts: int, size: int) -> None:
    assert choose_prefill_tile(tokens, k, experts, runs(1, 2048, 1408), "Some GPU") == size


@pytest.mark.parametrize(
    ("tokens", "size"), [(5, 64), (256, 64), (512, 64), (1024, 128), (2048, 256), (8192, 256)]
)
def test_tiles_of_one_matrix_leave_no_multiprocessor_idle(tokens: int, size: int) -> None:
    assert choose_prefill_tile(tokens, 1, 1, runs(1, 2048, 2048), "Some GPU") == size


def test_a_wave_of_programs_takes_as_long_as_one() -> None:
    # Of 16 blocks each; 8 tiles are 128 programs, 9 are more than there are multiprocessors.
    one, two = (prefill_cost(tokens, 1, 1, 16, 64) for tokens in (512, 513))
    assert two == 2 * one == 2 * prefill_cost(1, 1, 1, 16, 64)


def test_a_measured_tile_is_taken(monkeypatch, tmp_path) -> None:
    down = runs(1, 2048, 1408)
    key = prefill_key(2048, 4, 60, down)
    assert key == "prefill 2048x1408 mean 256 experts 64"
    tiling = tuning_key(1, down, 8, 4)
    (tmp_path / "Some_GPU.json").write_text(json.dumps({key: [64], tiling: [8, 2, 4]}))
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    caches = (tuned_tilings, tuned_prefill_tiles)
    for cache in caches:
        cache.cache_clear()
    assert choose_prefill_tile(2048, 4, 60, down, "Some GPU") == 64
    assert choose_prefill_tile(4096, 4, 60, down, "Some GPU") == 256
    assert choose_prefill_tile(2048, 4, 60, down, "Other GPU") == 128
    assert list(tuned_tilings("Some GPU")) == [tiling]
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "null", "\xff", '{"KEY": 8}', '{"KEY": [8, 2]}', '{"KEY": []}'),
        *('{"KEY": [16, 2, 2]}', '{"KEY": [8, 3, 2]}', '{"KEY": ["8", "2", "2"]}'),
        *('{"KEY": [8, 0, 0]}', '{"prefill x": [13]}', '{"prefill x": [64, 64]}'),
    ],
)
def test_a_damaged_file_is_refused(text: str, monkeypatch, tmp_path) -> None:
    key = tuning_key(0, runs(2, 1408, 2048), 8, 4)
    (tmp_path / "Some_GPU.json").write_text(text.replace("KEY", key), encoding="latin-1")
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    caches = (tuned_tilings, tuned_prefill_tiles)
    for cache in caches:
        cache.cache_clear()
    with pytest.raises(ConfigError, match="Some_GPU.json: "):
        for cache in caches:
            cache("Some GPU")
    for cache in caches:
        cache.cache_clear()


def test_what_was_measured_is_well_formed() -> None:
    for path in tuning.TUNED.glob("*.json"):
        for key, tiling in tuned_tilings(path.stem.replace("_", " ")).items():
            assert f"tokens {tiling.tokens} " in key
            assert tiling.row_warps in (2, 4) and tiling.k_warps in (1, 2, 4)
        assert set(tuned_prefill_tiles(path.stem.replace("_", " ")).values()) <= set(TILE_TOKENS)
