"""Products by Gluon kernels as an emulator computes them, against float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import gluon_emulator
from moejax.config import ClampedSwiglu, Quantization
from moejax.pallas import stacked
from moejax.pallas.product import Tiling, run_experts_paged
from pallas.paged_experts import Case, expected, make_experts, relative_error

TOLERANCE = 6e-3


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    gluon_emulator.install(monkeypatch)


ALL = Quantization(seed_bits=2, parent_bits=8, has_dense=True)
CASES = {
    "all widths": Case(
        hidden=192,
        width=72,
        experts=8,
        tokens=8,
        bits=ALL,
        widths=((4, 3), (16, 8), (6, 16), (2, 5), (7, 4), (3, 6), (5, 2), (8, 7)),
    ),
    "odd sizes": Case(hidden=328, width=72, tokens=3),
    "one token": Case(tokens=1, hidden=64, width=64, experts=4, k=3),
    "one token, weights on the inputs": Case(
        tokens=1, hidden=64, width=64, experts=4, weights_input=True
    ),
    "pages on the host": Case(hidden=64, width=64, experts=4, tokens=4, host_share=3),
    # Of four atoms: what 64 rows have of a plane is 3 of them, or 5.
    "rows in two pages": Case(hidden=384, width=64, tokens=3, page_bytes=4096),
    "rows in more pages": Case(hidden=640, width=64, tokens=3, page_bytes=4096),
    "clamped, with biases": Case(
        activation=ClampedSwiglu(alpha=1.702, limit=7.0),
        has_bias=True,
        hidden=64,
        width=96,
        tokens=5,
    ),
    "shared tables": Case(
        hidden=128,
        width=64,
        tokens=4,
        bits=Quantization(
            seed_bits=3,
            parent_bits=6,
            gate_up_rows_per_table=2,
            down_rows_per_table=16,
            has_dense=False,
        ),
        widths=((3, 6), (5, 4), (6, 3), (4, 5)),
    ),
}
TILINGS = {
    "8": Tiling(tokens=8, row_warps=2, k_warps=1),
    "16, 2 x 2 warps": Tiling(tokens=16, row_warps=2, k_warps=2),
}


@pytest.mark.parametrize(
    ("name", "tiling"), [*((name, "8") for name in CASES), ("odd sizes", "16, 2 x 2 warps")]
)
def test_experts_at_any_widths(name: str, tiling: str, emulated: None) -> None:
    experts = make_experts(CASES[name])
    paged = experts.on_device()
    found = run_experts_paged(
        *map(jnp.asarray, (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)),
        paged,
        tilings=(TILINGS[tiling], TILINGS[tiling]),
        activation=experts.case.activation,
        weights_input=experts.case.weights_input,
        bias=experts.bias,
    )
    assert relative_error(np.asarray(found), expected(experts)) < TOLERANCE


def test_nothing_comes_of_a_token_that_is_not_valid(emulated: None) -> None:
    experts = make_experts(CASES["one token"])
    found = run_experts_paged(
        *map(jnp.asarray, (experts.x, experts.topk_ids, experts.topk_weights, ~experts.valid)),
        experts.on_device(),
        tilings=(TILINGS["8"], TILINGS["8"]),
    )
    np.testing.assert_array_equal(np.asarray(found, np.float32), 0)


@pytest.mark.parametrize("tokens", [1, 2])
def test_slots_of_no_expert_add_nothing(tokens: int, emulated: None) -> None:
    experts = make_experts(Case(tokens=tokens, hidden=64, width=64, experts=4, k=2))
    experts.topk_ids[:, 1] = (-1, 4)[:tokens]
    experts.valid[:] = True
    found = run_experts_paged(
        *map(jnp.asarray, (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)),
        experts.on_device(),
        tilings=(TILINGS["8"], TILINGS["8"]),
    )
    experts.topk_weights[:, 1] = 0
    experts.topk_ids[:, 1] = 0
    assert relative_error(np.asarray(found), expected(experts)) < TOLERANCE


def test_a_layer_among_others(emulated: None) -> None:
    """Of one token and of several; the rows of other layers name pages that do not exist."""
    for tokens in (1, 3):
        experts = make_experts(Case(tokens=tokens, hidden=64, width=64, experts=4))
        paged = experts.on_device()
        tables = {}
        for name in ("gate_up_pages", "down_pages", "widths"):
            table = np.full((3, *experts.paged[name].shape), 2**30, np.int32)
            table[1] = experts.paged[name]
            tables[name] = jnp.asarray(table.reshape(-1, table.shape[-1]))
        found = run_experts_paged(
            *map(jnp.asarray, (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)),
            dataclasses.replace(paged, **tables, layer=jnp.int32(1), count=4),
            tilings=(TILINGS["8"], TILINGS["8"]),
        )
        assert relative_error(np.asarray(found), expected(experts)) < TOLERANCE


def test_a_width_that_is_not_stored_gives_nan_to_its_tokens_only(emulated: None) -> None:
    experts = make_experts(Case(hidden=64, width=64, experts=4, tokens=6))
    wanted = expected(experts)
    experts.widths[1, 0] = 0
    tiling = TILINGS["8"]
    found = run_experts_paged(
        *map(jnp.asarray, (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)),
        experts.on_device(),
        tilings=(tiling, tiling),
    )
    lost = (experts.topk_ids == 1).any(1) & experts.valid
    assert 0 < lost.sum() < experts.valid.sum()
    found = np.asarray(found, np.float64)
    assert np.isnan(found[lost]).all()
    assert relative_error(found[~lost], wanted[~lost]) < TOLERANCE


@pytest.mark.parametrize(
    ("tokens", "columns", "rows", "tiling"),
    [
        (1, 136, (33, 1, 16), stacked.Tiling(row_warps=1, k_warps=4)),
        (9, 520, (60,), stacked.Tiling(row_warps=2, k_warps=2)),
        (17, 64, (16, 40), stacked.Tiling(row_warps=1, k_warps=1)),
    ],
)
def test_matrices_of_a_layer(
    tokens: int,
    columns: int,
    rows: tuple[int, ...],
    tiling: stacked.Tiling,
    emulated: None,
) -> None:
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, columns)), jnp.bfloat16)
    matrices = [jnp.asarray(rng.standard_normal((3, m, columns)), jnp.bfloat16) for m in rows]
    biases = [None if n == 1 else w[:, :, 0] * 16 for n, w in enumerate(matrices)]
    dtype = jnp.dtype("float32")
    found = stacked._multiply(x, matrices, biases, jnp.int32(1), dtype=dtype, tiling=tiling)
    assert len(found) == len(rows)
    for y, w, bias in zip(found, matrices, biases, strict=True):
        wanted = np.asarray(x, np.float64) @ np.asarray(w[1], np.float64).T
        if bias is not None:
            wanted = wanted + np.asarray(bias[1], np.float64)
        np.testing.assert_allclose(y, wanted, rtol=0, atol=2.0**-20 * columns)
