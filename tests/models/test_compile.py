"""The step's programs as compiled: the arena stays in place, temporaries in bounds."""

import functools

import jax
import jax.numpy as jnp
import pytest
from random_model import qwen1_5_moe_a2_7b

import aot
from moejax.adjust import row_parts, start_row
from moejax.arena.geometry import choose_geometry
from moejax.arena.state import ArenaState
from moejax.config import (
    Attention,
    LayerKind,
    Mlp,
    ModelConfig,
    Moe,
    Rope,
    Router,
    segments_of,
)
from moejax.models.decoder import abstract_params
from moejax.models.step import COMPILER_OPTIONS, step
from moejax_serving.batch import make_buckets
from moejax_serving.memory import workspace_bytes
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


MODELS = {"qwen1.5-moe": qwen1_5_moe_a2_7b(), "mixed": with_dense_layers()}
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


@functools.cache
def compile_step(model: str, bucket_name: str, device: str):
    """(compiled program, bytes of the state, bound on its temporaries)"""
    config = MODELS[model]
    dtype = "float32" if device == "cpu" else "bfloat16"
    geometry = choose_geometry(config, dtype)
    blocks_per_row = MAX_MODEL_LEN // geometry.block_size
    buckets = make_buckets(
        max_num_seqs=ROWS,
        max_num_batched_tokens=512,
        block_size=geometry.block_size,
        blocks_per_row=blocks_per_row,
        layers=geometry.num_layers,
    )
    bucket = BUCKETS[bucket_name](buckets)
    pages = DEVICE_BYTES[device] * 8 // 10 // geometry.page_bytes
    layers, experts = geometry.num_moe_layers, geometry.num_experts
    gate_up, down = geometry.dense_pages

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    state = ArenaState(
        pages=jax.ShapeDtypeStruct((1, pages, geometry.page_words), jnp.uint32),
        gate_up_pages=ints(1, layers, experts, gate_up),
        down_pages=ints(1, layers, experts, down),
        widths=ints(1, layers, experts, 2),
        block_pages=ints(1, geometry.num_layers, pages // geometry.num_layers),
        block_tables=ints(1, ROWS, blocks_per_row),
        last_tokens=ints(ROWS),
        marks=ints(ROWS, config.vocab_size),
        bias_tokens=ints(ROWS, MAX_LOGIT_BIAS),
        bias_values=jax.ShapeDtypeStruct((ROWS, MAX_LOGIT_BIAS), jnp.float32),
    )
    arguments = (abstract_params(config, dtype), state, ints(bucket.layout.size))
    program = functools.partial(step, config=config, geometry=geometry, bucket=bucket)
    compiled = compile_for(
        device, program, arguments, donate_argnums=1, compiler_options=COMPILER_OPTIONS
    )
    bound = workspace_bytes(config, geometry, bucket, blocks_per_row)
    return compiled, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)), bound


@pytest.mark.shows("memory", "the arena is updated in place, on a CPU and compiled for an H200")
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("model", MODELS)
def test_on_an_h200_the_arena_stays_in_place(model, bucket):
    compiled, state_bytes, bound = compile_step(model, bucket, "h200")
    memory = compiled.memory_analysis()
    assert not aot.has_remat(compiled)
    assert aot.copies(compiled, MIB) == []
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.temp_size_in_bytes <= bound + CUBLAS_WORKSPACE


@pytest.mark.parametrize("bucket", ["decode 1", "prefill 512"])  # the least and the most
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
