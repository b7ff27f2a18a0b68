"""Which kernels are chosen, and what comes out of them on both sides of thresholds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from moejax.arena.experts import Paged
from moejax.config import Quantization
from moejax.errors import ConfigError
from moejax.layers.experts import run_experts as run_by_reference
from moejax.pallas.bridge import find_obstacle
from moejax.pallas.dispatch import (
    CHOICES,
    MANY_TOKENS,
    MANY_TOKENS_OF_LINEAR,
    REFERENCE,
    Kernels,
    choose_kernels,
    run_experts,
    run_linear,
)
from moejax_serving.config import KERNELS, EngineConfig
from pallas.paged_experts import BFLOAT16, Case, Experts, expected, make_experts, relative_error
from pallas.paged_kv import gqa, mla

H200 = {"platform": "gpu", "device_kind": "NVIDIA H200", "capability": 90}
CPU = {"platform": "cpu", "device_kind": "cpu", "capability": 0}
AUTO = Kernels(products="gluon", many="mosaic", attention="triton", device_kind="NVIDIA H200")
FORCED = Kernels(products="mosaic", attention="triton", device_kind="NVIDIA H200")
GLUON = Kernels(products="gluon", attention="triton", device_kind="NVIDIA H200")
TRITON = Kernels(products="triton", attention="triton", device_kind="NVIDIA H200")
# Of outputs: products of bfloat16, rounded three times on the way.
TOLERANCE = 6e-3
FOUR_BITS = Quantization(seed_bits=4, parent_bits=4, has_dense=False)
LAYER = Case(hidden=192, width=96, bits=FOUR_BITS, widths=((4, 4),))
# Of this layer's experts, of which each token has 2 of 4.
MANY = MANY_TOKENS * 2


@pytest.fixture
def needs_kernels() -> None:
    if (reason := find_obstacle()) is not None:
        pytest.skip(reason)


def test_the_server_takes_what_there_is() -> None:
    assert KERNELS == CHOICES
    with pytest.raises(ConfigError, match="kernel must be one of auto, .*, got 'cuda'"):
        EngineConfig(kernel="cuda")


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(
    ("capability", "dtype", "wanted", "products", "many"),
    [
        (90, "bfloat16", "auto", "gluon", "mosaic"),
        (90, "float32", "auto", "triton", None),
        (80, "bfloat16", "auto", "gluon", None),
        (89, "bfloat16", "auto", "gluon", None),
        (100, "bfloat16", "auto", "gluon", None),
        (90, "bfloat16", "triton", "triton", None),
        (90, "float32", "triton", "triton", None),
        (90, "bfloat16", "gluon", "gluon", None),
        (100, "bfloat16", "gluon", "gluon", None),
        (90, "bfloat16", "mosaic", "mosaic", None),
        (90, "bfloat16", "reference", "reference", None),
    ],
)
def test_a_gpu_computes_by_kernels_for_its_dtype(
    capability: int, dtype: str, wanted: str, products: str, many: str | None
) -> None:
    found = choose_kernels(**H200 | {"capability": capability}, dtype=dtype, wanted=wanted)
    assert (found.products, found.many) == (products, many)
    assert found.attention == ("reference" if wanted == "reference" else "triton")
    assert found.device_kind == "NVIDIA H200"


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(("capability", "size"), [(80, 166912), (89, 101376), (90, 232448)])
def test_shared_memory_is_that_of_the_device(capability: int, size: int) -> None:
    found = choose_kernels(**H200 | {"capability": capability}, dtype="float32")
    assert found.shared_bytes == size


@pytest.mark.parametrize("device", [CPU, H200 | {"capability": 75}])
def test_other_devices_run_the_reference(device: dict) -> None:
    found = choose_kernels(**device, dtype="bfloat16")
    assert (found.products, found.many, found.attention) == ("reference", None, "reference")


@pytest.mark.parametrize(
    ("kernels", "line"),
    [
        (REFERENCE, "kernels: products reference, attention reference"),
        (AUTO, "kernels: products gluon (mosaic with many tokens), attention triton"),
        (FORCED, "kernels: products mosaic, attention triton"),
    ],
)
def test_a_line_says_what_was_chosen(kernels: Kernels, line: str) -> None:
    assert kernels.line() == line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            CPU | {"wanted": "gluon"},
            "kernel 'gluon' cannot be used: it needs an NVIDIA GPU, .* cpu",
        ),
        (CPU | {"wanted": "triton"}, "kernel 'triton' cannot be used: it needs an NVIDIA GPU"),
        (CPU | {"wanted": "mosaic"}, "kernel 'mosaic' cannot be used: it needs an NVIDIA GPU"),
        (H200 | {"capability": 75, "wanted": "triton"}, "needs compute capability 8.0, .* has 7.5"),
        (H200 | {"capability": 89, "wanted": "mosaic"}, "capability 9.0 exactly, .* has 8.9"),
        (H200 | {"capability": 100, "wanted": "mosaic"}, "capability 9.0 exactly, .* has 10.0"),
        (
            H200 | {"wanted": "cuda"},
            "kernel 'cuda' is not known: auto, reference, triton, gluon, mosaic",
        ),
    ],
)
def test_what_is_named_and_does_not_work_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_kernels(**options, dtype="bfloat16")


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("part", [mla(16), gqa(4, 1, 512)])
def test_keys_that_shared_memory_cannot_hold_are_left_to_the_reference(part) -> None:
    device = H200 | {"capability": 120}
    found = choose_kernels(**device, dtype="float32", attentions={part})
    assert (found.products, found.attention) == ("triton", "reference")
    with pytest.raises(ConfigError, match="kernel 'triton' cannot be used: attention: keys of 5"):
        choose_kernels(**device, dtype="float32", wanted="triton", attentions={part})
    assert choose_kernels(**device, dtype="bfloat16", attentions={part}).attention == "triton"


@pytest.mark.usefixtures("needs_kernels")
def test_other_dtypes_are_refused() -> None:
    assert choose_kernels(**H200, dtype="float16").products == "reference"
    with pytest.raises(ConfigError, match="bfloat16 and float32, and the engine in float16"):
        choose_kernels(**H200, dtype="float16", wanted="triton")


@pytest.mark.parametrize("kernels", [AUTO, FORCED, Kernels(products="triton")])
def test_no_tokens_give_nothing(kernels: Kernels) -> None:
    experts = make_experts(LAYER)
    arrays = arrays_of(experts)
    none = [jax.ShapeDtypeStruct((0, *a.shape[1:]), a.dtype) for a in arrays[-5:-1]]
    assert len(none[0].shape) == 2
    program = experts_program(experts, kernels)
    found = jax.eval_shape(program, *structs_of(arrays[:-5]), *none, arrays[-1])
    assert found.shape == none[0].shape
    arrays = linear_arrays(experts, 1, 0)
    x = jax.ShapeDtypeStruct((0, arrays[-2].shape[1]), arrays[-2].dtype)
    program = linear_program(experts, kernels)
    rest = structs_of(arrays)
    assert jax.eval_shape(program, *rest[:-2], x, rest[-1]).shape[0] == 0


@pytest.mark.parametrize("wanted", ["gluon", "mosaic"])
def test_kernels_of_bfloat16_refuse_float32(wanted: str) -> None:
    message = f"kernel '{wanted}' cannot be used: it computes in bfloat16, and the engine in float"
    with pytest.raises(ConfigError, match=message):
        choose_kernels(**H200, dtype="float32", wanted=wanted)


def test_many_tokens_go_to_the_kernel_for_many() -> None:
    assert AUTO.of(63.9, 64, None) == "gluon"
    assert AUTO.of(64.0, 64, None) == "mosaic"
    assert AUTO.of(64.0, 64, "it cannot") == "gluon"
    assert FORCED.of(0.1, 64, None) == "mosaic"
    # Whoever asks for it hears why it cannot.
    assert FORCED.of(64.0, 64, "it cannot") == "mosaic"
    assert Kernels(products="gluon").of(1e6, 64, None) == "gluon"


def test_the_reference_is_no_kernel() -> None:
    experts = make_experts(LAYER)
    with pytest.raises(ValueError, match="the reference is not a kernel"):
        jax.eval_shape(experts_program(experts, REFERENCE), *arrays_of(experts))


def arrays_of(experts: Experts) -> list[Any]:
    """What `experts_program` takes: tables of three layers, of which these are the second."""
    tables = []
    for name in ("gate_up_pages", "down_pages", "widths"):
        table = experts.paged[name]
        # The others are of pages that nobody owns, at width 4.
        other = np.full_like(table, 4 if name == "widths" else 0)
        tables.append(np.concatenate([other, table, other]))
    tokens = (experts.x, experts.topk_ids, experts.topk_weights, experts.valid)
    layer = np.array(1, np.int32)
    return [experts.paged["pages"], experts.paged["host"], *tables, layer, *tokens, experts.bias]


def experts_program(
    experts: Experts, kernels: Kernels, run: Any = run_experts
) -> Callable[..., jax.Array]:
    case = experts.case

    def program(pages, host, gate_up_pages, down_pages, widths, layer, *rest):
        *tokens, bias = rest
        tables = (gate_up_pages, down_pages, widths)
        paged = Paged(pages, host, *tables, *experts.runs, layer=layer, count=case.experts)
        return run(*tokens, paged, kernels, activation=case.activation, bias=bias)

    return program


def test_the_reference_finds_experts_among_those_of_other_layers() -> None:
    """What the kernels compute below; poison in the pages of the other layers would be seen."""
    experts = make_experts(Case(hidden=64, width=32, tokens=9, has_bias=True))

    def run(x, ids, weights, valid, paged, kernels, **options):
        return run_by_reference(x, ids, weights, valid, paged, **options)

    arrays = jax.tree.map(jnp.asarray, arrays_of(experts))
    found = jax.jit(experts_program(experts, REFERENCE, run))(*arrays)
    assert relative_error(np.asarray(found), expected(experts)) < TOLERANCE
    arrays[5] = jnp.zeros((), jnp.int32)
    found = jax.jit(experts_program(experts, REFERENCE, run))(*arrays)
    assert np.isnan(np.asarray(found, np.float32)[experts.valid]).all()


def structs_of(arrays: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)


def linear_program(experts: Experts, kernels: Kernels) -> Callable[..., jax.Array]:
    def program(pages, tables, widths, row, x, bias):
        return run_linear(x, bias, pages, None, tables, widths, row, experts.runs[1], kernels)

    return program


def linear_arrays(experts: Experts, tokens: int, row: int) -> list[np.ndarray]:
    rng, shape = np.random.default_rng(1), experts.runs[1].shape
    x = rng.standard_normal((tokens, shape.columns)).astype(BFLOAT16)
    bias = rng.standard_normal(shape.rows).astype(BFLOAT16)
    tables = (experts.paged["down_pages"], experts.widths[:, 1], np.array(row, np.int32))
    return [experts.paged["pages"], *tables, x, bias]


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(
    ("tokens", "host_share", "kernels", "mosaic"),
    [
        (MANY - 1, 0, AUTO, False),
        (MANY, 0, AUTO, True),
        (MANY, 3, AUTO, False),
        (MANY, 0, Kernels(products="gluon"), False),
        (1, 0, FORCED, True),
    ],
)
def test_products_are_traced_by_the_kernels_that_were_chosen(
    tokens: int, host_share: int, kernels: Kernels, mosaic: bool
) -> None:
    experts = make_experts(LAYER._replace(tokens=tokens, host_share=host_share, has_bias=True))
    arrays = structs_of(arrays_of(experts))
    traced = str(jax.make_jaxpr(experts_program(experts, kernels))(*arrays))
    assert ("inline_mgpu" in traced) == mosaic
    # One is the grouping.
    assert traced.count("triton_kernel_call[") == (1 if mosaic else 3)


@pytest.mark.usefixtures("needs_kernels")
def test_mosaic_alone_refuses_pages_on_the_host() -> None:
    experts = make_experts(LAYER._replace(host_share=3))
    arrays = structs_of(arrays_of(experts))
    with pytest.raises(NotImplementedError, match="does not read pages on the host"):
        jax.eval_shape(experts_program(experts, FORCED), *arrays)


def count_calls(compiled: Any) -> tuple[int, int]:
    """Launches of kernels by Triton and of those by Mosaic."""
    text = compiled.as_text()
    names = ("triton_kernel_call_ffi", "mosaic_gpu")
    triton, mosaic = (text.count(f'custom_call_target="{name}') for name in names)
    return triton, mosaic


@pytest.mark.parametrize(("tokens", "calls"), [(MANY - 1, (3, 0)), (MANY, (1, 2))])
def test_experts_compile_for_an_h200(tokens: int, calls: tuple[int, int]) -> None:
    experts = make_experts(LAYER._replace(tokens=tokens))
    program = experts_program(experts, AUTO)
    compiled = aot.compile_for(aot.h200_mesh(), program, *structs_of(arrays_of(experts)))
    assert count_calls(compiled) == calls


@pytest.mark.parametrize(
    ("tokens", "calls"), [(MANY_TOKENS_OF_LINEAR - 1, (1, 0)), (MANY_TOKENS_OF_LINEAR, (0, 1))]
)
def test_linears_compile_for_an_h200(tokens: int, calls: tuple[int, int]) -> None:
    experts = make_experts(LAYER)
    arrays = structs_of(linear_arrays(experts, tokens, 0))
    program = linear_program(experts, AUTO)
    assert count_calls(aot.compile_for(aot.h200_mesh(), program, *arrays)) == calls


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [
        *((1, AUTO), (MANY - 1, AUTO), (MANY, AUTO), (4 * MANY, AUTO), (4096, AUTO)),
        *((1, FORCED), (6, FORCED), (4096, FORCED)),
        *((1, GLUON), (4096, GLUON), (1, TRITON), (4096, TRITON)),
    ],
)
def test_experts_on_both_sides_of_the_threshold(tokens: int, kernels: Kernels) -> None:
    """In tables of several layers, with biases, at every kind of width."""
    experts = make_experts(Case(hidden=192, width=96, tokens=tokens, has_bias=True))
    arrays = jax.tree.map(jnp.asarray, arrays_of(experts))
    found = np.asarray(jax.jit(experts_program(experts, kernels))(*arrays))
    assert relative_error(found, expected(experts)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [
        (MANY_TOKENS_OF_LINEAR - 1, AUTO),
        (MANY_TOKENS_OF_LINEAR, AUTO),
        (MANY_TOKENS_OF_LINEAR + 13, AUTO),
        (5, FORCED),
    ],
)
def test_linears_on_both_sides_of_the_threshold(tokens: int, kernels: Kernels) -> None:
    experts = make_experts(Case(hidden=192, width=328))
    program = jax.jit(linear_program(experts, kernels))
    for row, (_, width) in enumerate(experts.widths.tolist()):
        arrays = linear_arrays(experts, tokens, row)
        *_, x, bias = arrays
        found = np.asarray(program(*map(jnp.asarray, arrays)))
        (weights,) = experts.coded[row][1].weights(width, "bfloat16").astype(np.float64)
        wanted = x.astype(np.float64) @ weights.T + bias.astype(np.float64)
        assert relative_error(found, wanted) < TOLERANCE
