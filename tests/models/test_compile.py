"""The step's programs as compiled: the arena stays in place, temporaries in bounds."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from published import published_config
from random_model import with_layers

import aot
from moejax.adjust import row_parts, start_row
from moejax.arena.geometry import choose_geometry
from moejax.config import (
    Attention,
    LayerKind,
    Mlp,
    ModelConfig,
    Moe,
    Quantization,
    Rope,
    Router,
    segments_of,
)
from moejax.models.decoder import abstract_params, flatten_params, nest_params
from moejax.models.step import compiler_options, step
from moejax.pallas.dispatch import REFERENCE, Kernels
from moejax_serving.batch import make_buckets
from moejax_serving.loader import empty_state
from moejax_serving.memory import most_blocks, workspace_bytes
from moejax_serving.sampling_params import MAX_LOGIT_BIAS

MIB = 1 << 20
CUBLAS_WORKSPACE = 32 * MIB
DEVICE_BYTES = {"cpu": 24 << 30, "h200": 150_754_820_096}
ROWS = 16
MAX_MODEL_LEN = 2048


def attention(heads: int, kv_heads: int, **options) -> Attention:
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=128,
        scale=128**-0.5,
        rope=Rope(theta=1e6),
        **options,
    )


def with_dense_layers() -> ModelConfig:
    """Two segments, a period of two kinds, a window, norms of q and k, tied embeddings."""
    router = Router(num_experts=16, experts_per_token=2, renormalize=True, float32_weights=True)
    moe = Moe(router=router, expert_width=1024)
    dense = LayerKind(attention=attention(8, 4), feed_forward=Mlp(width=4096))
    full = LayerKind(attention=attention(8, 4, qk_norm="head"), feed_forward=moe)
    window = LayerKind(attention=attention(8, 4, window=512), feed_forward=moe)
    return ModelConfig(
        family="mixed",
        vocab_size=32000,
        hidden_size=1024,
        max_position_embeddings=8192,
        norm_epsilon=1e-6,
        tie_embeddings=True,
        dtype="bfloat16",
        segments=segments_of([dense] + [window, full] * 4),
    )


MODELS = {"qwen1.5-moe": published_config("Qwen1.5-MoE-A2.7B"), "mixed": with_dense_layers()}
# All parts of these families, at their published widths, with a few of their layers.
FAMILIES = {
    "deepseek-v2-lite": with_layers(published_config("DeepSeek-V2-Lite"), 3),
    "gemma-4": with_layers(published_config("Gemma-4-26B-A4B"), 12),
    "gpt-oss": with_layers(published_config("gpt-oss-20b"), 4),
    "llama-4": with_layers(published_config("Llama-4-Scout"), 8),
}
# Experts, attention and shared experts as codes.
QUANTIZED = "qwen1.5-moe 6 bits"
KERNELS = Kernels(products="gluon", many="mosaic", attention="triton", device_kind="NVIDIA H200")
BUCKETS = {
    "decode 1": lambda buckets: buckets.decode(1),
    "decode 16": lambda buckets: buckets.decode(ROWS),
    "prefill 32": lambda buckets: buckets.prefill(32),
    "prefill 512": lambda buckets: buckets.prefill(512),
}


def compile_for(device: str, program, arguments, **options):
    if device == "h200":
        return aot.compile_for(aot.h200_mesh(), program, *arguments, **options)
    compiler_options = options.pop("compiler_options", None)
    lowered = jax.jit(program, **options).lower(*arguments)
    return lowered.compile(compiler_options=compiler_options)


def quantized(config: ModelConfig, named: dict[str, Any]) -> tuple[Quantization, dict[str, Any]]:
    """3 to 6 bits and width 16; and the weights that are codes."""
    pattern = r".*\.(attention\.\w+|shared\.(gate|up|down))\.weight"
    coded = {n: w for n, w in named.items() if re.fullmatch(pattern, n)}
    assert len(coded) == 4 + 3
    bits = Quantization(
        seed_bits=3,
        parent_bits=6,
        down_rows_per_table=2,
        linears=tuple((n, 1) for n in sorted(coded)),
        has_dense=True,
    )
    return bits, coded


@functools.cache
def compile_step(model: str, bucket_name: str, device: str, kernels: Kernels = REFERENCE):
    """(compiled program, bytes of the state, bound on its temporaries)"""
    config = (MODELS | FAMILIES)[model.removesuffix(" 6 bits")]
    dtype = "float32" if device == "cpu" else "bfloat16"
    params = flatten_params(abstract_params(config, dtype))
    bits, coded = quantized(config, params) if model == QUANTIZED else (None, {})
    geometry = choose_geometry(config, dtype, bits, {n: w.shape for n, w in coded.items()})
    buckets = make_buckets(
        max_num_seqs=ROWS,
        max_num_batched_tokens=512,
        kinds=geometry.kinds,
        max_model_len=MAX_MODEL_LEN,
    )
    bucket = BUCKETS[bucket_name](buckets)
    pages = DEVICE_BYTES[device] * 8 // 10 // geometry.page_bytes
    state = jax.eval_shape(
        functools.partial(
            empty_state,
            geometry,
            num_pages=pages,
            rows=ROWS,
            max_model_len=MAX_MODEL_LEN,
            max_blocks=most_blocks(geometry, pages),
        )
    )
    arguments = (
        nest_params({n: w for n, w in params.items() if n not in coded}),
        state,
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
        jax.ShapeDtypeStruct((bucket.layout.size,), jnp.int32),
    )
    program = functools.partial(
        step, config=config, geometry=geometry, bucket=bucket, kernels=kernels
    )
    options = compiler_options(bucket, kernels)
    compiled = compile_for(device, program, arguments, donate_argnums=1, compiler_options=options)
    bound = workspace_bytes(config, geometry, bucket, MAX_MODEL_LEN)
    return compiled, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)), bound


@pytest.mark.shows("memory", "the arena is updated in place, on a CPU and compiled for an H200")
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("model", MODELS)
def test_on_an_h200_the_arena_stays_in_place(model, bucket, kernels=REFERENCE):
    compiled, state_bytes, bound = compile_step(model, bucket, "h200", kernels)
    memory = compiled.memory_analysis()
    assert not aot.has_remat(compiled)
    assert aot.copies(compiled, MIB) == []
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.temp_size_in_bytes <= bound + CUBLAS_WORKSPACE


@pytest.mark.parametrize("bucket", ["decode 1", "prefill 512"])  # the least and the most
@pytest.mark.parametrize(
    "model",
    [
        *("deepseek-v2-lite", "gemma-4"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss", "llama-4")),
    ],
)
def test_on_an_h200_the_arena_stays_in_place_for_every_kind_of_layer(model, bucket):
    test_on_an_h200_the_arena_stays_in_place(model, bucket)


def test_on_an_h200_the_arena_stays_in_place_for_codes():
    test_on_an_h200_the_arena_stays_in_place(QUANTIZED, "decode 16")


@pytest.mark.parametrize(
    ("model", "bucket"),
    [
        *((QUANTIZED, "decode 1"), ("mixed", "prefill 512"), ("gpt-oss", "decode 1")),
        *(("mixed", "decode 16"), ("qwen1.5-moe", "decode 16")),
    ],
)
def test_on_an_h200_the_arena_stays_in_place_with_kernels(model, bucket):
    test_on_an_h200_the_arena_stays_in_place(model, bucket, KERNELS)


@pytest.mark.parametrize(
    ("model", "bucket"),
    [("qwen1.5-moe", "decode 16"), ("mixed", "decode 16"), ("gpt-oss", "decode 1")],
)
def test_on_an_h200_nothing_of_a_layer_is_copied_in_a_decode_step(model, bucket):
    compiled, _, _ = compile_step(model, bucket, "h200", KERNELS)
    assert aot.large_matrices(compiled) == []
    assert aot.slices_in_loops(compiled) == []


def test_on_an_h200_a_layer_of_a_decode_step_has_few_launches():
    """Of kernels: norm, product, rotations (2), KV, attention, product, norm, router, routing,
    grouping, tokens, experts (2), shared expert (3), sum, and the counter of layers."""
    compiled, _, _ = compile_step("qwen1.5-moe", "decode 16", "h200", KERNELS)
    assert max(aot.launches_in_loops(compiled)) <= 19


def test_on_a_cpu_the_arena_stays_in_place_for_codes():
    test_on_a_cpu_the_arena_stays_in_place(QUANTIZED, "decode 16")


@pytest.mark.parametrize("bucket", ["decode 1", "prefill 512"])
@pytest.mark.parametrize("model", MODELS)
def test_on_a_cpu_the_arena_stays_in_place(model, bucket):
    compiled, state_bytes, bound = compile_step(model, bucket, "cpu")
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.temp_size_in_bytes <= bound


@pytest.mark.parametrize("device", DEVICE_BYTES)
def test_a_row_is_marked_in_place(device):
    config = MODELS["qwen1.5-moe"]
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    tables = (
        ints((ROWS, config.vocab_size)),
        ints((ROWS, MAX_LOGIT_BIAS)),
        floats((ROWS, MAX_LOGIT_BIAS)),
    )
    (part,) = row_parts(
        0,
        vocab=config.vocab_size,
        num_biases=MAX_LOGIT_BIAS,
        prompt=(),
        output=(),
        stops=(),
        biases=(),
    )
    arguments = (*tables, jax.tree.map(jax.typeof, part))
    compiled = compile_for(device, start_row, arguments, donate_argnums=(0, 1, 2))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in tables)
    assert aot.copies(compiled, MIB) == []
    assert memory.temp_size_in_bytes <= 6 * 4 * config.vocab_size  # some rows of marks
