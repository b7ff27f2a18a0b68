"""The portable kernel against float64 and `run_experts`: interpreted on a CPU, and on a GPU.

Run as a program, with TRITON_INTERPRET=1, it interprets all cases and prints their errors as JSON.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from arena.coded import Placed, Pool, pages_of, place, random_coded
from layers.filled import activated
from moejax.arena import format
from moejax.arena.experts import ExpertBias, Paged
from moejax.arena.geometry import LinearShape, Runs
from moejax.config import ClampedSwiglu, Quantization
from moejax.layers.experts import run_experts
from moejax.pallas import portable
from moejax.pallas.bridge import find_obstacle
from moejax.pallas.tiles import make_tiles
from np_tensor import interpret
from pallas.paged_experts import Case, Experts, expected, make_experts, relative_error

# Of outputs: in bfloat16 they are rounded three times on the way.
TOLERANCES = {"float32": 2e-6, "bfloat16": 6e-3}
CLAMPED = ClampedSwiglu(alpha=1.702, limit=7.0)
ALL_BITS = Quantization(seed_bits=2, parent_bits=8, has_dense=True)
SHARED_TABLES = Quantization(
    seed_bits=3,
    parent_bits=6,
    gate_up_rows_per_table=2,
    down_rows_per_table=16,
    has_dense=False,
)

SMALL = Case(hidden=40, width=24)
CASES = {
    "all widths": SMALL._replace(
        hidden=72,
        width=40,
        experts=8,
        tokens=20,
        bits=ALL_BITS,
        widths=((4, 3), (16, 8), (6, 16), (2, 5), (7, 4), (3, 6), (8, 2), (5, 7)),
    ),
    "planes of several pages": SMALL._replace(hidden=640, experts=2, k=1),
    "pages on the host": SMALL._replace(host_share=3),
    "shared tables": SMALL._replace(bits=SHARED_TABLES, widths=((3, 6), (5, 4), (6, 3), (4, 5))),
    "width 16 alone": SMALL._replace(bits=None),
    "odd sizes": SMALL._replace(hidden=139, width=67, experts=2, k=1),
    "one token": SMALL._replace(tokens=1),
    "all on one expert": SMALL._replace(experts=8, tokens=40, k=1, one_expert=True),
    "a large tile": SMALL._replace(experts=2, tokens=50, one_expert=True),
    "gelu": SMALL._replace(activation="gelu_tanh"),
    "clamped, with biases": SMALL._replace(activation=CLAMPED, has_bias=True),
    "weights on the inputs": SMALL._replace(weights_input=True),
}
AGAINST_REFERENCE = ("all widths", "clamped, with biases")
AT_DEFAULTS = ("odd sizes", "a large tile")
BLOCK_ROWS, STEP_COLUMNS = portable.BLOCK_ROWS, portable.STEP_COLUMNS["float32"]
LOST = SMALL._replace(tokens=9, activation=CLAMPED)
LINEAR = LinearShape(parts=1, rows=72, columns=136, rows_per_table=2)
LINEAR_CASES = [(3, 5), (8, 70), (16, 1)]
"""Widths and numbers of tokens."""


def make(case: Case, dtype: str) -> Experts:
    """The experts of `make_experts`, in pages of a float32 arena where that is the dtype."""
    made = make_experts(case)
    if dtype == "bfloat16":
        return made
    runs = tuple(dataclasses.replace(one, dtype=dtype) for one in made.runs)
    count = 1 + case.experts * sum(map(pages_of, runs)) * (2 if case.host_share else 1)
    pool = Pool(count, case.page_bytes // 4, host_share=case.host_share)
    slots: list[list[np.ndarray]] = [[], []]
    for e, pair in enumerate(made.coded):
        for n, (one, of) in enumerate(zip(pair, runs, strict=True)):
            if case.bits is None:
                placed = Placed(of, {"dense": pool.put(one.runs(dtype)["dense"])})
            else:
                placed = place(one, of, pool)
            slots[n].append(placed.slots(int(made.widths[e, n])))
    paged = made.paged | {
        "pages": pool.arena,
        "host": pool.host if case.host_share else None,
        "gate_up_pages": np.stack(slots[0]),
        "down_pages": np.stack(slots[1]),
    }
    bias = made.bias
    if bias is not None:
        bias = ExpertBias(*(part.astype(dtype) for part in bias))
    return made._replace(paged=paged, runs=runs, bias=bias, x=made.x.astype(dtype))


def expected_float32(experts: Experts) -> np.ndarray:
    """The outputs in float64, for an arena of float32: nothing is rounded."""
    case, total = experts.case, np.zeros(experts.x.shape)
    bias = None if experts.bias is None else [np.asarray(b, np.float64) for b in experts.bias]
    for e, pair in enumerate(experts.coded):
        weight = np.where(experts.topk_ids == e, experts.topk_weights, 0).sum(1).astype(np.float64)
        chosen = (experts.topk_ids == e).any(1) & experts.valid
        x, weight = experts.x[chosen].astype(np.float64), weight[chosen][:, None]
        gate_up, down = (
            pair[n].weights(int(experts.widths[e, n])).astype(np.float64) for n in (0, 1)
        )
        x = x * weight if case.weights_input else x
        gate, up = x @ gate_up[0].T, x @ gate_up[1].T
        if bias is not None:
            gate, up = gate + bias[0][e], up + bias[1][e]
        y = activated(gate, up, case.activation) @ down[0].T
        if bias is not None:
            y = y + bias[2][e]
        total[chosen] += y if case.weights_input else y * weight
    return total


def wanted(experts: Experts) -> np.ndarray:
    return expected(experts) if experts.x.dtype != np.float32 else expected_float32(experts)


def run(experts: Experts, call: Any = portable.run_experts_portable, *, jits: bool) -> np.ndarray:
    paged, case = experts.on_device(), experts.case

    def program(pages, host, gate_up_pages, down_pages, widths, x, ids, weights, valid, bias):
        return call(
            x,
            ids,
            weights,
            valid,
            Paged(pages, host, gate_up_pages, down_pages, widths, *experts.runs),
            activation=case.activation,
            weights_input=case.weights_input,
            bias=bias,
        )

    found = (jax.jit(program) if jits else program)(
        paged.pages,
        paged.host,
        paged.gate_up_pages,
        paged.down_pages,
        paged.widths,
        *map(jnp.asarray, (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)),
        experts.bias,
    )
    return np.asarray(found)


def lost_outputs(dtype: str, *, jits: bool) -> tuple[bool, float]:
    """Of an expert of which no instance is there: whether all of its tokens are NaN (and it has
    some, and others too), and the error of the others."""
    experts = make(LOST, dtype)
    right = wanted(experts)
    experts.widths[1, 0] = 0
    found = run(experts, jits=jits).astype(np.float64)
    lost = (experts.topk_ids == 1).any(1) & experts.valid
    are_nan = 0 < lost.sum() < experts.valid.sum() and bool(np.isnan(found[lost]).all())
    return are_nan, relative_error(found[~lost], right[~lost])


def linear_error(width: int, tokens: int, dtype: str) -> float:
    coded = random_coded(LINEAR, ALL_BITS, 0)
    runs = Runs(shape=LINEAR, dtype=dtype, page_bytes=16384, quantization=ALL_BITS)
    pool = Pool(2 + pages_of(runs), 4096, host_share=0)
    slots = place(coded, runs, pool).slots(width)
    x = np.random.default_rng(1).standard_normal((tokens, LINEAR.columns))
    x = x.astype(format.DTYPES[dtype])
    found = portable.linear_portable(
        jnp.asarray(x), jnp.asarray(pool.arena), None, jnp.asarray(slots), jnp.int32(width), runs
    )
    weights = coded.weights(width, dtype)[0]
    return relative_error(found, x.astype(np.float64) @ weights.astype(np.float64).T)


# What the program interprets.


def far_pages_error() -> float:
    """Pages beyond 2^31 words, of an arena that takes no memory where nothing is written."""
    coded = random_coded(LINEAR, ALL_BITS, 0)
    runs = Runs(shape=LINEAR, dtype="float32", page_bytes=65536, quantization=ALL_BITS)
    pool = Pool(2 + pages_of(runs), 16384, host_share=0)
    placed = place(coded, runs, pool)
    first = (1 << 31) // 16384
    errors = []
    with tempfile.TemporaryFile() as file:
        shape = (first + len(pool.arena), 16384)
        arena = np.memmap(file, np.uint32, "w+", shape=shape)
        arena[first:] = pool.arena
        for width in (5, 16):
            slots = placed.slots(width)
            x = np.random.default_rng(1).standard_normal((3, LINEAR.columns), np.float32)
            # NumPy's array, of which jax would make a copy.
            found = portable.linear_portable(
                jnp.asarray(x),
                arena,
                None,
                jnp.asarray(np.where(slots > 0, slots + first, 0)),
                jnp.int32(width),
                runs,
            )
            errors.append(relative_error(found, x @ coded.weights(width)[0].T.astype(np.float64)))
    return max(errors)


def negative_id_is_poison() -> bool:
    """Where there is no host pool: what lies before the arena, here zeros, is not read."""
    runs = Runs(shape=LINEAR, dtype="float32", page_bytes=16384, quantization=ALL_BITS)
    memory = np.zeros((9, 4096), np.uint32)
    memory[8] = format.POISON_WORD
    x = jnp.ones((2, LINEAR.columns), jnp.float32)
    slots = jnp.full(runs.num_slots, -5, jnp.int32)
    found = portable.linear_portable(x, memory[8:], None, slots, jnp.int32(5), runs)
    return bool(jnp.isnan(found).all())


def no_valid_token_is_zero() -> bool:
    experts = make(SMALL, "float32")
    experts.valid[...] = False
    return not run(experts, jits=False).any()


def interpret_all() -> dict[str, Any]:
    without_triton = "triton" not in sys.modules
    portable.triton_call = interpret
    # What is around the kernels is compiled for longer than it runs.
    jax.config.update("jax_disable_most_optimizations", True)
    portable.make_tiles = jax.jit(make_tiles, static_argnums=(2, 3))
    found: dict[str, Any] = {"imported without triton": without_triton, "errors": {}}
    errors = found["errors"]
    for name, case in CASES.items():
        # The interpreter's time is that of programs and steps, not of what they hold.
        coarse = name not in AT_DEFAULTS
        portable.BLOCK_ROWS = 64 if coarse else BLOCK_ROWS
        portable.STEP_COLUMNS["float32"] = 128 if coarse else STEP_COLUMNS
        experts = make(case, "float32")
        outputs = run(experts, jits=False)
        errors[name] = relative_error(outputs, wanted(experts))
        if name in AGAINST_REFERENCE:
            reference = run(experts, run_experts, jits=True)
            errors[f"{name}, reference"] = relative_error(outputs, reference.astype(np.float64))
    for width, tokens in LINEAR_CASES:
        errors[f"linear, {width} bits, {tokens} tokens"] = linear_error(width, tokens, "float32")
    errors["far pages"] = far_pages_error()
    found["lost"] = lost_outputs("float32", jits=False)
    found["negative id is poison"] = negative_id_is_poison()
    found["no valid token is zero"] = no_valid_token_is_zero()
    return found


def test_interpreted_in_float32() -> None:
    if (reason := find_obstacle()) is not None:
        pytest.skip(reason)
    tests = pathlib.Path(__file__).resolve().parents[1]
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    ended = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["imported without triton"]
    assert len(found["errors"]) == len(CASES) + len(AGAINST_REFERENCE) + len(LINEAR_CASES) + 1
    # Not `>=`, which is false for NaN.
    wrong = {k: e for k, e in found["errors"].items() if not e < TOLERANCES["float32"]}
    assert wrong == {}
    are_nan, others = found["lost"]
    assert are_nan
    assert others < TOLERANCES["float32"]
    assert found["negative id is poison"]
    assert found["no valid token is zero"]


def test_interpreting_needs_the_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = jax.ShapeDtypeStruct((1,), jnp.float32)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 must be set before"):
        interpret(kernel=None, out_type=out, grid=(1,))


@pytest.mark.parametrize(
    ("slots", "experts", "size"),
    [(1, 60, 16), (960, 60, 16), (961, 60, 32), (2048, 60, 64), (10**6, 60, 64), (17, 1, 32)],
)
def test_tiles_hold_what_experts_have_on_average(slots: int, experts: int, size: int) -> None:
    assert portable.tile_size(slots, experts) == size


def test_no_tokens_need_no_kernel() -> None:
    experts = make(CASES["one token"], "float32")
    empty = [a[:0] for a in (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)]
    found = portable.run_experts_portable(*map(jnp.asarray, empty), experts.on_device())
    assert found.shape == (0, 40)


def test_what_the_kernel_cannot_do_is_refused() -> None:
    experts = make(CASES["one token"], "float32")
    tokens = map(jnp.asarray, (experts.topk_ids, experts.topk_weights, experts.valid))
    x, paged = jnp.asarray(experts.x), experts.on_device()
    with pytest.raises(NotImplementedError, match="tokens of bfloat16 cannot meet weights of fl"):
        portable.run_experts_portable(x.astype(jnp.bfloat16), *tokens, paged)
    with pytest.raises(NotImplementedError, match="multiplies with one matrix"):
        portable.linear_portable(
            x, paged.pages, None, paged.gate_up_pages[0], paged.widths[0, 0], paged.gate_up
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_compiles_for_an_h200(dtype: str) -> None:
    experts = make(CASES["pages on the host"], dtype)
    names = ("pages", "host", "gate_up_pages", "down_pages", "widths")
    arrays = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in map(experts.paged.get, names)]
    tokens = (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)
    arrays += [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in tokens]

    def program(pages, host, gate_up_pages, down_pages, widths, *tokens):
        paged = Paged(pages, host, gate_up_pages, down_pages, widths, *experts.runs)
        return portable.run_experts_portable(*tokens, paged)

    compiled = aot.compile_for(aot.h200_mesh(), program, *arrays)
    assert compiled.as_text().count("triton_kernel_call_ffi") == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in CASES if name != "gelu"),
        ("all widths", "bfloat16"),
        ("pages on the host", "bfloat16"),
        ("clamped, with biases", "bfloat16"),
        ("a large tile", "bfloat16"),
    ],
)
def test_experts_on_a_gpu(name: str, dtype: str) -> None:
    experts = make(CASES[name], dtype)
    assert relative_error(run(experts, jits=True), wanted(experts)) < TOLERANCES[dtype]


@pytest.mark.gpu
def test_a_width_that_is_not_stored_on_a_gpu() -> None:
    are_nan, others = lost_outputs("float32", jits=True)
    assert are_nan
    assert others < TOLERANCES["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linears_on_a_gpu(dtype: str) -> None:
    errors = [linear_error(width, tokens, dtype) for width, tokens in LINEAR_CASES]
    assert all(e < TOLERANCES[dtype] for e in errors), errors


if __name__ == "__main__":
    print(json.dumps(interpret_all()))
