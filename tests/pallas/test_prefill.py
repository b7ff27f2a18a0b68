"""Experts in pages by the kernels for many tokens, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from moejax.arena.experts import ExpertBias, Paged
from moejax.arena.format import ATOM_WORDS, dense_words, plane_words
from moejax.config import ClampedSwiglu, Quantization
from moejax.pallas.prefill import find_refusal, permuted_columns, run_experts_prefill
from moejax.pallas.prefill_product import codes_of
from moejax.pallas.prefill_spec import DENSE, MAX_WEIGHT_STAGES, WEIGHT_ATOMS, Spec
from pallas.paged_experts import Case, Experts, expected, make_experts, relative_error

# Of outputs: products of bfloat16, rounded three times on the way.
TOLERANCE = 6e-3
# Dynamic shared memory of a program on an H200.
SHARED_MEMORY = 227 << 10
EVERY_WIDTH = Quantization(seed_bits=2, parent_bits=8, has_dense=True)

CASES = {
    "all widths": (
        Case(
            experts=6,
            tokens=80,
            bits=EVERY_WIDTH,
            widths=((4, 3), (16, 8), (6, 16), (2, 5), (7, 4), (3, 6)),
        ),
        64,
    ),
    "all widths, the other way round": (
        Case(
            experts=6,
            tokens=300,
            bits=EVERY_WIDTH,
            widths=((3, 4), (8, 16), (16, 6), (5, 2), (4, 7), (6, 3)),
        ),
        256,
    ),
    "mixed widths": (Case(tokens=200), 128),
    "one token": (Case(tokens=1), 64),
    "one expert per token": (Case(tokens=3, experts=2, k=1), 64),
    "odd sizes": (Case(hidden=328, width=72, tokens=70), 64),
    "narrow": (Case(hidden=40, width=20, tokens=70), 64),
    "starts at any place": (Case(experts=16, tokens=333, k=3), 64),
    "shared tables": (
        Case(
            tokens=130,
            bits=Quantization(
                seed_bits=3,
                parent_bits=6,
                gate_up_rows_per_table=2,
                down_rows_per_table=16,
                has_dense=False,
            ),
            widths=((3, 6), (5, 4), (6, 3), (4, 5)),
        ),
        128,
    ),
    "width 16 alone": (Case(bits=None, tokens=70), 64),
    "all on one expert": (Case(tokens=600, one_expert=True), 256),
    "many experts, most of them empty": (Case(experts=24, tokens=3), 64),
    "gelu": (Case(activation="gelu_tanh", tokens=70), 64),
    "clamped, with biases": (
        Case(
            activation=ClampedSwiglu(alpha=1.702, limit=7.0),
            has_bias=True,
            hidden=192,
            width=96,
            tokens=300,
        ),
        128,
    ),
    "weights on the inputs": (Case(weights_input=True, tokens=70), 64),
    "an uneven number of blocks": (Case(hidden=64 * 3, width=64 * 5, tokens=70), 64),
    "more steps than stages": (Case(hidden=2048, width=768, tokens=300), 256),
}


def run_on_gpu(experts: Experts, tile_tokens: int) -> np.ndarray:
    paged, case = experts.on_device(), experts.case

    @jax.jit
    def program(pages, gate_up_pages, down_pages, widths, x, ids, weights, valid, bias):
        return run_experts_prefill(
            x,
            ids,
            weights,
            valid,
            Paged(pages, None, gate_up_pages, down_pages, widths, *experts.runs),
            tile_tokens=tile_tokens,
            activation=case.activation,
            weights_input=case.weights_input,
            bias=bias,
        )

    found = program(
        paged.pages,
        paged.gate_up_pages,
        paged.down_pages,
        paged.widths,
        *map(jnp.asarray, (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)),
        experts.bias,
    )
    return np.asarray(found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_experts_at_any_widths(name: str) -> None:
    case, tile_tokens = CASES[name]
    experts = make_experts(case)
    found = run_on_gpu(experts, tile_tokens)
    assert relative_error(found, expected(experts)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("width", [3, 5, 16])
def test_results_do_not_change_from_run_to_run(width: int) -> None:
    """Registers of a factor were given to the next weights while wgmma might still read them."""
    experts = make_experts(Case(hidden=2048, width=768, tokens=400, widths=((width, width),)))
    runs = [run_on_gpu(experts, 256) for _ in range(20)]
    assert relative_error(runs[0], expected(experts)) < TOLERANCE
    for found in runs[1:]:
        np.testing.assert_array_equal(found.view(np.uint16), runs[0].view(np.uint16))


@pytest.mark.gpu
def test_invalid_tokens_alone_give_zeros() -> None:
    experts = make_experts(Case(tokens=70))
    experts.valid[:] = False
    assert not run_on_gpu(experts, 64).any()


@pytest.mark.gpu
def test_a_width_that_is_not_stored_gives_nan_to_its_tokens_only() -> None:
    experts = make_experts(Case(experts=6, tokens=80))
    wanted = expected(experts)
    experts.widths[1, 0] = 0
    found = run_on_gpu(experts, 64).astype(np.float64)
    lost = (experts.topk_ids == 1).any(1) & experts.valid
    assert 0 < lost.sum() < experts.valid.sum()
    assert np.isnan(found[lost]).all()
    assert relative_error(found[~lost], wanted[~lost]) < TOLERANCE


def test_columns_lie_where_threads_multiply_them() -> None:
    """Of 16 places thread i multiplies 2 i, 2 i + 1 and 8 further: columns 32 i + 8 e + s."""
    rows, columns = 3, 300
    x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns) + 1
    found = np.asarray(permuted_columns(jnp.asarray(x)))
    assert found.shape == (rows, 384)
    seen = []
    for step, s, i, e in np.ndindex(3, 8, 4, 4):
        column = 128 * step + 32 * i + 8 * e + s
        place = 128 * step + 16 * s + (2 * i + e if e < 2 else 8 + 2 * i + e - 2)
        wanted = x[:, column] if column < columns else np.zeros(rows)
        np.testing.assert_array_equal(found[:, place], wanted)
        seen.append(place)
    assert sorted(seen) == list(range(384))


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_from_words_of_planes(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (40, 32))
    planes = [
        jnp.asarray(
            np.sum(((codes >> (bits - 1 - p)) & 1) << np.arange(32), axis=1).astype(np.uint32)
        )
        for p in range(bits)
    ]
    found = [np.asarray(word) for word in codes_of(planes)]
    for s, e in np.ndindex(8, 4):
        np.testing.assert_array_equal((found[s] >> np.uint32(8 * e)) & 255, codes[:, 8 * e + s])


def make_spec(tokens: int = 256, rows: int = 1408, columns: int = 2048) -> Spec:
    return Spec(
        which=0,
        rows=rows,
        columns=columns,
        tokens=tokens,
        plane_pages=6,
        page_words=16384,
        widths=EVERY_WIDTH.widths,
        table_slots=tuple(range(7)),
        rows_per_table=1,
        has_bias=False,
        activation="silu",
        alpha=0.0,
        limit=0.0,
    )


@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_stages_fit_into_shared_memory(tokens: int) -> None:
    spec = make_spec(tokens)
    assert spec.token_stages >= 4
    staged = spec.token_stages * tokens * 128
    # What is left is for barriers.
    assert staged + WEIGHT_ATOMS * 1024 + 2048 <= SHARED_MEMORY
    for width in spec.widths:
        stages = spec.weight_stages(width)
        assert 2 <= stages <= MAX_WEIGHT_STAGES
        assert spec.table_atoms(width) + stages * spec.copies(width) <= WEIGHT_ATOMS
        if width != DENSE:
            # One table of 2^width words for each of 8 pairs of rows at least, of 8 warps.
            assert spec.table_atoms(width) * 1024 >= 8 * 8 * 4 << width
            # Its entry size is one byte of a dot product.
            assert spec.table_line(width) in (32, 64, 128)


@pytest.mark.parametrize(("rows", "programs"), [(64, 2), (72, 2), (1408, 22), (1344, 22)])
def test_programs_cover_what_down_reads(rows: int, programs: int) -> None:
    spec = make_spec(rows=rows)
    assert spec.programs == programs
    assert spec.out_columns == 64 * programs >= rows


@pytest.mark.parametrize("columns", [20, 40, 128, 328, 2048])
def test_rows_have_the_atoms_of_the_format(columns: int) -> None:
    spec = make_spec(columns=columns)
    assert spec.row_atoms(DENSE) * ATOM_WORDS == dense_words(columns, 2)
    assert spec.row_atoms(5) * ATOM_WORDS == plane_words(columns)


@pytest.mark.parametrize(
    ("case", "tile_tokens", "dtype", "reason"),
    [
        (Case(), 32, jnp.bfloat16, "tiles of 32 tokens"),
        (Case(), 64, jnp.float32, "computes in bfloat16"),
        (Case(host_share=3), 64, jnp.bfloat16, "pages on the host"),
        (Case(has_bias=True), 64, jnp.bfloat16, "biases of bfloat16, not float32"),
    ],
)
def test_what_it_cannot_do_is_refused(
    case: Case, tile_tokens: int, dtype: type, reason: str
) -> None:
    experts = make_experts(case)
    bias = experts.bias
    if bias is not None:
        bias = ExpertBias(*(b.astype(jnp.float32) for b in bias))
    paged = Paged(
        **{k: None if v is None else jnp.asarray(v) for k, v in experts.paged.items()},
        gate_up=experts.runs[0],
        down=experts.runs[1],
    )
    arrays = map(jnp.asarray, (experts.topk_ids, experts.topk_weights, experts.valid))
    with pytest.raises(NotImplementedError, match=reason):
        run_experts_prefill(
            jnp.asarray(experts.x, dtype), *arrays, paged, tile_tokens=tile_tokens, bias=bias
        )


def test_what_it_can_do_is_not_refused() -> None:
    bfloat16 = jnp.dtype(jnp.bfloat16)
    assert find_refusal(bfloat16, False, None) is None
    assert find_refusal(bfloat16, False, bfloat16) is None


def test_kernels_compile_for_an_h200() -> None:
    bits = Quantization(seed_bits=4, parent_bits=4, has_dense=True)
    experts = make_experts(Case(tokens=200, bits=bits, widths=((4, 16), (16, 4))))
    arrays = [
        jax.ShapeDtypeStruct(np.shape(a), a.dtype)
        for a in (
            *(experts.paged[key] for key in ("pages", "gate_up_pages", "down_pages", "widths")),
            *(experts.x, experts.topk_ids, experts.topk_weights, experts.valid),
        )
    ]

    def program(pages, gate_up_pages, down_pages, widths, x, ids, weights, valid):
        paged = Paged(pages, None, gate_up_pages, down_pages, widths, *experts.runs)
        return run_experts_prefill(x, ids, weights, valid, paged, tile_tokens=128)

    compiled = aot.compile_for(aot.h200_mesh(), program, *arrays)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 2
