"""Memory plans of models with latent attention and with several kinds of KV."""

import dataclasses
import re
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.arena.control import KvLayout, Layout
from moejax.arena.geometry import Geometry, make_geometry
from moejax.arena.widths import uniform
from moejax.config import (
    AnyAttention,
    Attention,
    LayerKind,
    Mla,
    Mlp,
    MlpAndMoe,
    ModelConfig,
    Moe,
    Rope,
    Router,
    SharedExpert,
    segments_of,
)
from moejax.errors import CapacityError
from moejax.models.step import Bucket
from moejax_serving.loader import empty_rows, empty_state
from moejax_serving.memory import (
    MemoryPlan,
    largest_matrix_bytes,
    most_blocks,
    plan_memory,
    workspace_bytes,
)

KIB, MIB = 1 << 10, 1 << 20
PAGE = 16 * KIB
MOE = Moe(
    router=Router(num_experts=4, experts_per_token=2, renormalize=True, float32_weights=True),
    expert_width=64,
)


def gqa(**options: Any) -> Attention:
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "scale": 0.25}
    return Attention(**shape | {"rope": Rope(theta=1e4)} | options)


def mla(**options: Any) -> Mla:
    sizes = {"latent_size": 48, "nope_size": 16, "rope_size": 16, "value_size": 16}
    shape: dict[str, Any] = {"num_heads": 4, "q_latent_size": 32, "scale": 0.2}
    shape |= {"rope": Rope(theta=1e4), "latent_norm_epsilon": 1e-6}
    return Mla(**shape | sizes | options)


def make_config(*attentions: AnyAttention, feed_forward: Any = MOE) -> ModelConfig:
    layers = [LayerKind(attention=part, feed_forward=feed_forward) for part in attentions]
    return ModelConfig(
        family="family",
        vocab_size=1000,
        hidden_size=64,
        max_position_embeddings=4096,
        norm_epsilon=1e-6,
        tie_embeddings=False,
        dtype="float32",
        segments=segments_of(layers),
    )


def geometry_of(config: ModelConfig) -> Geometry:
    return make_geometry(config, "float32", PAGE)


# Four layers of 256 bytes per token that see 48 tokens; two of 384 that see all.
SLIDING, FULL = gqa(window=48), gqa(num_kv_heads=1, head_size=48)
MIXED = make_config(SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL)
LATENT = make_config(*[mla()] * 3)


def plan(config: ModelConfig, **changes: Any) -> MemoryPlan:
    arguments: dict[str, Any] = {"budget": 64 * MIB, "device_bytes": None, "dense": 5 * MIB}
    arguments |= {"workspace": 3 * MIB, "rows": 2, "max_model_len": 640, "max_query": 32}
    geometry = geometry_of(config)
    arguments["weight_pages"] = uniform(geometry, 16).pages(geometry)
    return plan_memory(config, geometry, **arguments | changes)


def least_budget(config: ModelConfig, **changes: Any) -> int:
    """The budget that a refusal names."""
    with pytest.raises(CapacityError) as refused:
        plan(config, budget=1, **changes)
    (named,) = re.findall(r"\((\d+) bytes\)", str(refused.value))
    return int(named)


def test_the_kinds_are_those_of_the_examples() -> None:
    sliding, full = geometry_of(MIXED).kinds
    assert (sliding.pages_per_block, sliding.block_size) == (4, 64)
    assert (full.pages_per_block, full.block_size) == (2, 40)  # 42 of 384 bytes would fit
    (latent,) = geometry_of(LATENT).kinds
    assert (latent.token_bytes, latent.block_size) == (64 * 4, 64)


# Tokens and pages.


def test_tokens_are_counted_in_blocks_that_are_full_together() -> None:
    found = plan(MIXED)
    # 320 tokens are five blocks of four pages, and eight of two.
    assert (found.block_size, found.block_pages) == (320, 36)
    assert found.num_blocks == found.kv_pages // 36 > 10
    # Long sequences take less: 640 tokens are 44 pages, since four layers keep a window alone.
    assert found.kv_tokens == found.kv_pages // 44 * 640 > 320 * found.num_blocks


def test_tokens_of_latent_attention() -> None:
    found = plan(LATENT)
    assert (found.block_size, found.block_pages) == (64, 3)
    assert found.kv_tokens == found.kv_pages // 3 * 64
    # Keys and values of all heads would take 2.5 times as many bytes.
    expanded = plan(make_config(*[gqa(num_kv_heads=4, head_size=20)] * 3))
    assert found.kv_tokens > 2 * expanded.kv_tokens


@pytest.mark.parametrize(
    ("length", "max_query", "pages"),
    [
        # 640 tokens: sixteen blocks of two pages; of the window 48 + 31 tokens in three blocks.
        (640, 32, 16 * 2 + 3 * 4),
        (640, 1, 16 * 2 + 2 * 4),
        # A chunk of 512 and the 47 before it.
        (640, 512, 16 * 2 + 10 * 4),
        (64, 32, 2 * 2 + 1 * 4),
        (4000, 32, 100 * 2 + 3 * 4),
    ],
)
def test_one_sequence_of_the_longest_is_what_must_fit(
    length: int, max_query: int, pages: int
) -> None:
    options = {"max_model_len": length, "max_query": max_query}
    budget = least_budget(MIXED, **options)
    assert plan(MIXED, budget=budget, **options).kv_pages == pages
    with pytest.raises(CapacityError):
        plan(MIXED, budget=budget - 1, **options)


def test_a_refusal_names_the_kv_of_the_longest_sequence() -> None:
    # 44 pages, and two entries of tables for each.
    assert 44 * (PAGE + 8) == 720_896 + 352
    with pytest.raises(CapacityError, match=r"KV of 640 tokens 704\.34 KiB; the memory budget is"):
        plan(MIXED, budget=MIB)
    # 30 pages of ten blocks, and an entry for each.
    with pytest.raises(CapacityError, match=r"KV of 640 tokens 480\.12 KiB; the memory budget is"):
        plan(LATENT, budget=MIB)


# Tables.


@settings(max_examples=20)
@given(extra=st.integers(0, 4 * MIB), rows=st.integers(1, 5))
def test_the_tables_that_are_counted_are_at_least_those_that_are_made(
    extra: int, rows: int
) -> None:
    budget = least_budget(MIXED, rows=rows) + extra
    found, geometry = plan(MIXED, budget=budget, rows=rows), geometry_of(MIXED)
    blocks = most_blocks(geometry, found.kv_pages)
    made = jax.eval_shape(
        lambda: (
            empty_state(
                geometry,
                num_pages=found.num_pages,
                rows=rows,
                max_model_len=640,
                max_blocks=blocks,
            ),
            empty_rows(rows, MIXED.vocab_size),
        )
    )
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
    counted = found.tables + found.num_pages * PAGE
    # Pages that are too few for a block of a kind: three, and one.
    assert counted - 4 * (3 + 1) <= size <= counted
    spent = sum(found.kinds.values()) + PAGE
    assert budget - PAGE - 8 < spent <= budget


def test_any_kind_may_take_all_pages() -> None:
    # And its block 0, which is poison.
    assert most_blocks(geometry_of(MIXED), 100) == [1 + 25, 1 + 50]
    assert most_blocks(geometry_of(MIXED), 3) == [1, 1 + 1]
    assert most_blocks(geometry_of(LATENT), 100) == [1 + 33]


# The workspace.


def bucket_of(geometry: Geometry, *, tokens: int, rows: int, prefill_rows: int) -> Bucket:
    kinds = tuple(
        KvLayout(layers=kind.pages_per_block, blocks=rows, row_edits=rows)
        for kind in geometry.kinds
    )
    layout = Layout(tokens=tokens, rows=rows, expert_edits=0, kinds=kinds)
    return Bucket(layout=layout, prefill_rows=prefill_rows, max_query=tokens if prefill_rows else 1)


def workspace(config: ModelConfig, *, tokens: int = 8, rows: int = 8, prefill_rows: int = 0) -> int:
    geometry = geometry_of(config)
    bucket = bucket_of(geometry, tokens=tokens, rows=rows, prefill_rows=prefill_rows)
    return workspace_bytes(config, geometry, bucket, 640)


PREFILL = {"tokens": 256, "rows": 8, "prefill_rows": 8}


@pytest.mark.parametrize("options", [{}, PREFILL], ids=["decode", "prompts"])
def test_the_largest_kind_decides_about_the_workspace(options: dict[str, int]) -> None:
    # A tile of keys: four blocks of 64 tokens, or six of 40.
    sliding, full = make_config(*[SLIDING] * 6), make_config(*[FULL] * 6)
    found = workspace(MIXED, **options)
    assert found == max(workspace(sliding, **options), workspace(full, **options))
    rows = 1 if options else 8
    assert found > 1 * MIB + rows * 6 * PAGE


@pytest.mark.parametrize("options", [{}, PREFILL], ids=["decode", "prompts"])
@pytest.mark.parametrize(
    "changes",
    [{"latent_size": 96}, {"num_heads": 8}, {"q_latent_size": 320}, {"value_size": 256}],
    ids=str,
)
def test_a_workspace_of_latent_attention_grows_with_its_sizes(
    changes: dict[str, int], options: dict[str, int]
) -> None:
    larger = make_config(*[mla(**changes)] * 3)
    assert 0 < workspace(LATENT, **options) < workspace(larger, **options)


def test_a_workspace_holds_the_queries_and_results_of_all_heads_over_latents() -> None:
    # Heads of 32 values of their own, but of 64 where they attend.
    many = make_config(*[mla(num_heads=64)] * 3)
    assert workspace(many, **PREFILL) > 12 * 256 * 64 * (48 + 16) * 4


def test_a_workspace_holds_the_wider_of_what_stands_beside_the_experts() -> None:
    widths = []
    for width in (16, 512):
        for feed_forward in (
            MlpAndMoe(mlp=Mlp(width=width), moe=MOE),
            dataclasses.replace(MOE, shared=SharedExpert(width=width, gated=False)),
        ):
            config = make_config(gqa(), feed_forward=feed_forward)
            widths.append(workspace(config, **PREFILL))
    assert widths[0] == widths[1] < widths[2] == widths[3]


def test_the_matrices_of_latent_attention_count_among_the_largest() -> None:
    assert largest_matrix_bytes(LATENT, "float32") == 1000 * 64 * 4  # the head
    many = make_config(*[mla(num_heads=64)] * 3)  # queries of 64 heads of 32 values
    assert largest_matrix_bytes(many, "float32") >= 64 * 32 * 64 * 4
