"""The memory plan: what is spent stays within the budget, or is refused with the numbers."""

import dataclasses
import re
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.arena.control import KvLayout, Layout
from moejax.arena.geometry import Geometry, make_geometry
from moejax.arena.widths import uniform
from moejax.config import (
    Attention,
    LayerKind,
    Mlp,
    ModelConfig,
    Moe,
    Rope,
    Router,
    Segment,
    SharedExpert,
)
from moejax.errors import CapacityError
from moejax.models.paged_attention import KEY_TILE
from moejax.models.step import Bucket
from moejax_serving.loader import empty_rows, empty_state
from moejax_serving.memory import (
    MemoryPlan,
    human,
    most_blocks,
    plan_memory,
    sampling_bytes,
    workspace_bytes,
)
from moejax_serving.sampling_params import MAX_LOGIT_BIAS

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

ATTENTION = Attention(
    num_heads=4, num_kv_heads=2, head_size=16, scale=0.25, rope=Rope(theta=10000.0)
)
ROUTER = Router(num_experts=4, experts_per_token=2, renormalize=True, float32_weights=True)
SHARED = SharedExpert(width=256, gated=True)
DENSE = LayerKind(attention=ATTENTION, feed_forward=Mlp(width=96))
MOE = LayerKind(
    attention=ATTENTION, feed_forward=Moe(router=ROUTER, expert_width=64, shared=SHARED)
)
CONFIG = ModelConfig(
    family="family",
    vocab_size=1000,
    hidden_size=64,
    max_position_embeddings=256,
    norm_epsilon=1e-6,
    tie_embeddings=False,
    dtype="float32",
    segments=(Segment(period=(DENSE,), repeats=1), Segment(period=(MOE,), repeats=2)),
)
# An expert: gate_up 128 x 64 words, two pages; down 64 x 64 words, one. 2 layers x 4 experts x 3.
GEOMETRY = make_geometry(CONFIG, "float32", 16 * KIB)
WEIGHT_PAGES = 24
EXPERTS = WEIGHT_PAGES * 16 * KIB
PAGE = 16 * KIB
ENTRY = 4  # of a page in the tables
BLOCK = 3 * (PAGE + ENTRY)  # a page in each layer
STAGING = 16 * MIB
LIBRARY = 128 * MIB + 1000 * 64 * 4  # the head is the largest matrix
# 2 rows of 4 blocks and a last token; 2 x 4 experts of 3 slots and 2 widths.
TABLES = 4 * (2 * (4 + 1) + 8 * (3 + 2))
# 2 rows of a mark for each of 1000 tokens, and of biases: a token and a value each.
TABLES += 2 * (4 * 1000 + 8 * MAX_LOGIT_BIAS)
POISON = PAGE + 3 * ENTRY  # a page, and a kv_block of it in each layer


def plan(**changes: Any) -> MemoryPlan:
    arguments = {"budget": None, "device_bytes": None, "dense": 5 * MIB, "workspace": 3 * MIB}
    arguments |= {"rows": 2, "max_model_len": 256, "max_query": 32, "weight_pages": WEIGHT_PAGES}
    return plan_memory(CONFIG, GEOMETRY, **(arguments | changes))


def test_the_geometry_is_the_one_of_the_examples() -> None:
    assert uniform(GEOMETRY, 16).pages(GEOMETRY) == WEIGHT_PAGES
    assert GEOMETRY.page_bytes == PAGE and GEOMETRY.block_pages == 3
    assert GEOMETRY.block_size == 64  # 16 KiB of 256 bytes


# Plans by hand.


@pytest.mark.parametrize(("pages", "blocks"), [(30, 10), (31, 10), (32, 10), (33, 11)])
def test_what_the_fixed_parts_leave_is_kv(pages: int, blocks: int) -> None:
    fixed = 5 * MIB + 3 * MIB + STAGING + TABLES
    room = pages * (PAGE + ENTRY) + 1  # and a byte that no page uses
    found = plan(budget=fixed + EXPERTS + POISON + room)
    assert found.tables == TABLES + 3 * ENTRY + pages * ENTRY
    assert (found.dense, found.workspace, found.staging) == (5 * MIB, 3 * MIB, STAGING)
    assert (found.experts, found.kv) == (EXPERTS, pages * PAGE)
    assert (found.kv_pages, found.block_pages, found.num_blocks) == (pages, 3, blocks)
    assert found.num_pages == 1 + 24 + pages
    assert found.block_size == 64
    assert found.kv_tokens == 64 * blocks


def test_a_cpu_gets_the_model_and_1_gib() -> None:
    found = plan()
    assert found.budget == 5 * MIB + 3 * MIB + STAGING + TABLES + EXPERTS + GIB
    assert found.kv_pages == (GIB - POISON) // (PAGE + ENTRY)


def test_a_gpu_gives_90_percent_and_keeps_scratch_memory_for_its_libraries() -> None:
    found = plan(device_bytes=10 * GIB)
    assert found.budget == 9 * GIB
    assert found.workspace == 3 * MIB + LIBRARY
    fixed = found.dense + found.workspace + found.staging + found.experts + TABLES
    assert found.kv_pages == (9 * GIB - fixed - POISON) // (PAGE + ENTRY)


def test_a_budget_that_is_set_is_kept_on_a_gpu() -> None:
    assert plan(device_bytes=10 * GIB, budget=2 * GIB).budget == 2 * GIB


def test_the_tables_that_are_counted_are_those_that_are_made() -> None:
    found = plan(budget=64 * MIB)
    made = jax.eval_shape(
        lambda: (
            empty_state(
                GEOMETRY,
                num_pages=found.num_pages,
                rows=2,
                max_model_len=256,
                max_blocks=most_blocks(GEOMETRY, found.kv_pages),
            ),
            empty_rows(2, CONFIG.vocab_size),
        )
    )
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
    counted = found.tables + found.num_pages * GEOMETRY.page_bytes
    # Two pages may be too few for a block.
    assert counted - 2 * ENTRY <= size <= counted


def test_marks_and_biases_are_counted_for_each_row() -> None:
    assert sampling_bytes(CONFIG, 1) == 4 * 1000 + 8 * 1024
    assert sampling_bytes(CONFIG, 5) == 5 * sampling_bytes(CONFIG, 1)
    more = plan(rows=3, budget=64 * MIB).tables - plan(budget=64 * MIB).tables
    rows = 4 * (4 + 1) + sampling_bytes(CONFIG, 1)
    assert more - rows in (0, -ENTRY)  # a page less may fit


# Refusals.

LEAST = 4 * BLOCK  # of one sequence of 256 tokens
SMALLEST = 5 * MIB + 3 * MIB + STAGING + TABLES + EXPERTS + POISON + LEAST


def test_one_sequence_of_the_longest_is_enough() -> None:
    found = plan(budget=SMALLEST)
    assert found.num_blocks == 4
    assert found.kv_tokens == 256


@pytest.mark.parametrize(
    ("budget", "text"), [(SMALLEST - 1, "24.60 MiB"), (1, "1 B"), (20 * MIB, "20.00 MiB")]
)
def test_a_model_that_does_not_fit_is_refused_with_the_numbers(budget: int, text: str) -> None:
    message = (
        "family in float32 needs at least 24.60 MiB (25796676 bytes) for 2 sequences "
        "(max_num_seqs) of 256 tokens (max_model_len): experts 384.00 KiB, dense weights 5.00 MiB, "
        "workspace 3.00 MiB, tables 24.01 KiB, staging 16.00 MiB, KV of 256 tokens 192.05 KiB; "
        f"the memory budget is {text}"
    )
    with pytest.raises(CapacityError, match=f"^{re.escape(message)}$"):
        plan(budget=budget)


@pytest.mark.parametrize(("length", "pages"), [(64, 3), (65, 6), (256, 12)])
def test_the_number_that_a_refusal_names_is_enough(length: int, pages: int) -> None:
    with pytest.raises(CapacityError) as refused:
        plan(budget=MIB, max_model_len=length)
    (named,) = re.findall(r"\((\d+) bytes\)", str(refused.value))
    assert plan(budget=int(named), max_model_len=length).kv_pages == pages
    with pytest.raises(CapacityError, match=f"{named} bytes"):
        plan(budget=int(named) - 1, max_model_len=length)


# Any budget.


@given(
    budget=st.integers(1, 4 * GIB),
    dense=st.integers(0, GIB),
    workspace=st.integers(0, GIB),
    on_gpu=st.booleans(),
)
def test_a_plan_stays_within_its_budget_and_wastes_less_than_a_page(
    budget: int, dense: int, workspace: int, on_gpu: bool
) -> None:
    arguments = {"dense": dense, "workspace": workspace, "device_bytes": GIB if on_gpu else None}
    library = LIBRARY if on_gpu else 0
    needed = dense + workspace + library + STAGING + TABLES + EXPERTS + POISON + LEAST
    if budget < needed:
        with pytest.raises(CapacityError, match=f"needs at least {re.escape(human(needed))}"):
            plan(budget=budget, **arguments)
        return
    found = plan(budget=budget, **arguments)
    spent = sum(found.kinds.values()) + PAGE  # of poison
    assert budget - PAGE - ENTRY < spent <= budget
    assert found.num_pages * PAGE == found.experts + found.kv + PAGE
    assert found.kv == found.kv_pages * PAGE
    assert found.kv_tokens == found.kv_pages // 3 * 64


# The workspace.


def make_bucket(tokens: int, rows: int, *, prefill_rows: int = 0) -> Bucket:
    """`tokens` of prompts, if it has rows for these, besides one of every other row."""
    tokens = tokens + rows - prefill_rows if prefill_rows else tokens
    max_query = tokens - (rows - prefill_rows) if prefill_rows else 1
    kind = KvLayout(layers=3, blocks=rows, row_edits=rows)
    layout = Layout(tokens=tokens, rows=rows, expert_edits=0, kinds=(kind,))
    return Bucket(layout=layout, prefill_rows=prefill_rows, max_query=max_query)


def workspace(bucket: Bucket, max_model_len: int = 256, geometry: Geometry = GEOMETRY) -> int:
    return workspace_bytes(CONFIG, geometry, bucket, max_model_len)


EXPERT = 3 * 16 * KIB
ROW_CACHE = 4 * 16 * KIB


def test_a_workspace_holds_an_expert_the_cache_of_its_rows_and_logits() -> None:
    decode = make_bucket(16, 16)
    assert workspace(decode) >= EXPERT + 16 * ROW_CACHE + 16 * 1000 * 4
    prefill = make_bucket(512, 8, prefill_rows=8)
    assert workspace(prefill) >= EXPERT + ROW_CACHE + (8 + 64) * 1000 * 4


def test_a_workspace_of_prompts_and_single_tokens_holds_what_both_need() -> None:
    mixed = make_bucket(128, 24, prefill_rows=8)
    decode, prefill = make_bucket(16, 16), make_bucket(128, 8, prefill_rows=8)
    assert mixed.layout.tokens == 144 and mixed.max_query == 128
    assert workspace(mixed) > max(workspace(decode), workspace(prefill))
    assert workspace(mixed) - workspace(prefill) >= 15 * ROW_CACHE + 16 * 1000 * 4


@pytest.mark.parametrize(
    ("bucket", "places"),
    [
        (make_bucket(16, 16), 16),
        (make_bucket(512, 8, prefill_rows=8), 8 + 64),  # whatever the number of tokens
        (make_bucket(128, 24, prefill_rows=8), 24 + 64),
        (make_bucket(4, 2, prefill_rows=1), 2 + 5),
    ],
    ids=["single tokens", "prompts", "both", "few"],
)
def test_a_workspace_has_logits_of_each_row_and_of_64_places_of_prompts(
    bucket: Bucket, places: int
) -> None:
    twice = dataclasses.replace(CONFIG, vocab_size=2000)
    more = workspace_bytes(twice, GEOMETRY, bucket, 256) - workspace(bucket)
    assert more == 6 * places * 1000 * 4


def test_a_workspace_grows_with_what_the_step_holds() -> None:
    assert workspace(make_bucket(1, 1)) < workspace(make_bucket(16, 16))
    few, many = make_bucket(32, 8, prefill_rows=8), make_bucket(512, 8, prefill_rows=8)
    assert workspace(few) < workspace(many)


@pytest.mark.parametrize(
    "bucket", [make_bucket(16, 16), make_bucket(512, 8, prefill_rows=8)], ids=["decode", "prompts"]
)
def test_a_workspace_holds_a_tile_of_keys_however_long_the_sequences(bucket: Bucket) -> None:
    assert GEOMETRY.block_size * 4 == KEY_TILE
    assert workspace(bucket, KEY_TILE - 64) < workspace(bucket, KEY_TILE)
    assert workspace(bucket, KEY_TILE) == workspace(bucket, 100 * KEY_TILE)


def test_prompts_need_the_cache_of_one_row_at_a_time() -> None:
    one, eight = make_bucket(64, 1, prefill_rows=1), make_bucket(64, 8, prefill_rows=8)
    assert workspace(eight) - workspace(one) == 6 * 7 * 1000 * 4


# Words.


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (MIB, "1.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (5 << 40, "5.00 TiB"),
        (5000 << 40, "5000.00 TiB"),
    ],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert human(size) == text


def test_a_plan_says_what_it_spends() -> None:
    found = plan(budget=SMALLEST)
    assert found.lines() == [
        "memory budget 24.60 MiB: dense 5.00 MiB, experts 384.00 KiB, kv 192.00 KiB, "
        "workspace 3.00 MiB, tables 24.07 KiB, staging 16.00 MiB",
        "KV cache: at least 256 tokens, in 12 pages; max_model_len 256",
    ]
