"""Experts in pages by the product kernels, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from moejax.arena.experts import Paged
from moejax.config import ClampedSwiglu, Quantization
from moejax.pallas.dispatch import Kernels, run_linear
from moejax.pallas.product import Tiling, fragment_size, run_experts_paged, to_fragments
from pallas.paged_experts import BFLOAT16, Case, Experts, expected, make_experts, relative_error

# Of outputs: products of bfloat16, rounded three times on the way.
TOLERANCE = 6e-3
SMALL = Tiling(tokens=8, row_warps=4, k_warps=1)

CASES = {
    "all widths": Case(
        experts=6,
        tokens=16,
        bits=Quantization(seed_bits=2, parent_bits=8, has_dense=True),
        widths=((4, 3), (16, 8), (6, 16), (2, 5), (7, 4), (3, 6)),
    ),
    "mixed widths": Case(tokens=40),
    "one token": Case(tokens=1),
    "one expert per token": Case(tokens=3, experts=2, k=1),
    "odd sizes": Case(hidden=328, width=72),
    "narrow": Case(hidden=40, width=20),
    "pages on the host": Case(experts=6, tokens=9, host_share=3),
    "shared tables": Case(
        bits=Quantization(
            seed_bits=3,
            parent_bits=6,
            gate_up_rows_per_table=2,
            down_rows_per_table=16,
            has_dense=False,
        ),
        widths=((3, 6), (5, 4), (6, 3), (4, 5)),
    ),
    "width 16 alone": Case(bits=None),
    "all on one expert": Case(tokens=150, one_expert=True),
    "many experts, most of them empty": Case(experts=24, tokens=3),
    "gelu": Case(activation="gelu_tanh"),
    "clamped, with biases": Case(
        activation=ClampedSwiglu(alpha=1.702, limit=7.0), has_bias=True, hidden=192, width=96
    ),
    "weights on the inputs": Case(weights_input=True),
    "an uneven number of blocks": Case(hidden=64 * 3, width=64 * 5),
    "rows in two pages": Case(hidden=1408, width=384, page_bytes=16384, tokens=9),
    "rows in more pages": Case(hidden=1408, width=1152, page_bytes=8192, tokens=9),
    "a page smaller than a table": Case(hidden=2048, width=768, page_bytes=16384, tokens=9),
}
TILINGS = {
    "8": SMALL,
    "8, 2 x 4 warps": Tiling(tokens=8, row_warps=2, k_warps=4),
    "16": Tiling(tokens=16, row_warps=4, k_warps=1),
    "32, 2 x 2 warps": Tiling(tokens=32, row_warps=2, k_warps=2),
}


def run_on_gpu(experts: Experts, tiling: Tiling) -> np.ndarray:
    paged, case = experts.on_device(), experts.case

    @jax.jit
    def program(pages, host, gate_up_pages, down_pages, widths, x, ids, weights, valid, bias):
        return run_experts_paged(
            x,
            ids,
            weights,
            valid,
            type(paged)(pages, host, gate_up_pages, down_pages, widths, *experts.runs),
            tilings=(tiling, tiling),
            activation=case.activation,
            weights_input=case.weights_input,
            bias=bias,
        )

    found = program(
        paged.pages,
        paged.host,
        paged.gate_up_pages,
        paged.down_pages,
        paged.widths,
        *map(jnp.asarray, (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)),
        experts.bias,
    )
    return np.asarray(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "tiling"),
    [
        *((name, "8") for name in CASES),
        *((name, tiling) for name in ("mixed widths", "odd sizes") for tiling in TILINGS),
        ("all on one expert", "32, 2 x 2 warps"),
    ],
)
def test_experts_at_any_widths(name: str, tiling: str) -> None:
    experts = make_experts(CASES[name])
    found = run_on_gpu(experts, TILINGS[tiling])
    assert relative_error(found, expected(experts)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", ClampedSwiglu(alpha=1.702, limit=7.0)])
def test_a_width_that_is_not_stored_gives_nan_to_its_tokens_only(activation) -> None:
    experts = make_experts(Case(experts=6, tokens=16, activation=activation))
    wanted = expected(experts)
    experts.widths[1, 0] = 0
    found = run_on_gpu(experts, SMALL).astype(np.float64)
    lost = (experts.topk_ids == 1).any(1) & experts.valid
    assert 0 < lost.sum() < experts.valid.sum()
    assert np.isnan(found[lost]).all()
    assert relative_error(found[~lost], wanted[~lost]) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("products", ["gluon", "triton"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_other_linears_at_any_width(tokens: int, products: str) -> None:
    """Projections of attention and shared experts: one matrix for all tokens, with a bias."""
    experts = make_experts(Case(hidden=192, width=328))
    paged, rng = experts.on_device(), np.random.default_rng(1)
    x = rng.standard_normal((tokens, 328)).astype(BFLOAT16)
    bias = rng.standard_normal(192).astype(BFLOAT16)
    kernels = Kernels(products=products)

    @jax.jit
    def program(pages, tables, widths, row, x, bias):
        return run_linear(x, bias, pages, None, tables, widths, row, experts.runs[1], kernels)

    arrays = (paged.pages, paged.down_pages, paged.widths[:, 1])
    for e, (_, width) in enumerate(experts.widths.tolist()):
        found = program(*arrays, jnp.int32(e), jnp.asarray(x), jnp.asarray(bias))
        (weights,) = experts.coded[e][1].weights(width, "bfloat16").astype(np.float64)
        wanted = x.astype(np.float64) @ weights.T + bias.astype(np.float64)
        assert relative_error(np.asarray(found), wanted) < TOLERANCE


def test_fragments_hold_what_threads_multiply() -> None:
    """Word by word: thread 4 g + i has columns 32 i + 16 half + 4 e + q of token g."""
    tokens, columns = 16, 300
    x = np.arange(tokens * columns, dtype=np.float32).reshape(tokens, columns) + 1
    found = np.asarray(to_fragments(jnp.asarray(x)))
    assert found.shape == (tokens, fragment_size(columns)) == (tokens, 384)
    found = found.reshape(tokens, 3, 4, 4, 2, 4)
    for n, step, q, i, half, e in np.ndindex(found.shape):
        column = 128 * step + 32 * i + 16 * half + 4 * e + q
        wanted = x[n, column] if column < columns else 0
        assert found[n, step, q, i, half, e] == wanted


@pytest.mark.parametrize("name", ["mixed widths", "width 16 alone"])
def test_kernels_compile_for_an_h200(name: str) -> None:
    experts = make_experts(CASES[name])
    arrays = [
        jax.ShapeDtypeStruct(np.shape(a), a.dtype) if a is not None else None
        for a in (
            *(experts.paged[key] for key in ("pages", "gate_up_pages", "down_pages", "widths")),
            *(experts.x, experts.topk_ids, experts.topk_weights, experts.valid),
        )
    ]

    def program(pages, gate_up_pages, down_pages, widths, x, ids, weights, valid):
        paged = Paged(pages, None, gate_up_pages, down_pages, widths, *experts.runs)
        return run_experts_paged(x, ids, weights, valid, paged, tilings=(SMALL, SMALL))

    compiled = aot.compile_for(aot.h200_mesh(), program, *arrays)
    # Grouping, gate_up and down.
    assert compiled.as_text().count("triton_kernel_call_ffi") == 3
