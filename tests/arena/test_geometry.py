"""Sizes of published shapes, and the page size that wastes least."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.arena import format
from moejax.arena.geometry import (
    PAGE_SIZES,
    LinearShape,
    Runs,
    choose_geometry,
    kv_kinds,
    linear_shapes,
    make_geometry,
    page_waste,
    waste_by_use,
)
from moejax.arena.widths import uniform
from moejax.config import (
    Attention,
    LayerKind,
    Mlp,
    ModelConfig,
    Moe,
    Quantization,
    Rope,
    Router,
    Segment,
)
from moejax.errors import ConfigError


def make_kind(*, kv_heads: int, experts: int | None, width: int, head_size: int = 128) -> LayerKind:
    """A layer; without experts, `width` is that of a dense MLP."""
    attention = Attention(
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        scale=1.0,
        rope=Rope(theta=1e6),
    )
    if experts is None:
        return LayerKind(attention=attention, feed_forward=Mlp(width=width))
    router = Router(
        num_experts=experts, experts_per_token=1, renormalize=True, float32_weights=True
    )
    return LayerKind(attention=attention, feed_forward=Moe(router=router, expert_width=width))


def make_config(*segments: Segment, hidden: int) -> ModelConfig:
    return ModelConfig(
        family="shape",
        vocab_size=1000,
        hidden_size=hidden,
        max_position_embeddings=4096,
        norm_epsilon=1e-6,
        tie_embeddings=False,
        dtype="bfloat16",
        segments=segments,
    )


def published(
    layers: int, hidden: int, width: int, experts: int, kv_heads: int, head_size: int = 128
) -> ModelConfig:
    kind = make_kind(kv_heads=kv_heads, experts=experts, width=width, head_size=head_size)
    return make_config(Segment(period=(kind,), repeats=layers), hidden=hidden)


# Layers, hidden size, expert width, experts, KV heads.
PUBLISHED = {
    "Mixtral-8x7B": published(32, 4096, 14336, 8, 8),
    "Mixtral-8x22B": published(56, 6144, 16384, 8, 8),
    "Qwen1.5-MoE-A2.7B": published(24, 2048, 1408, 60, 16),
    "Qwen2-57B-A14B": published(28, 3584, 2560, 64, 4),
    "Qwen3-30B-A3B": published(48, 2048, 768, 128, 4),
    "Qwen3-235B-A22B": published(94, 4096, 1536, 128, 4),
    "OLMoE-1B-7B": published(16, 2048, 1024, 64, 16),
}


@pytest.mark.parametrize(
    ("name", "gate_up", "down"),
    [
        ("Qwen1.5-MoE-A2.7B", 720_896, 360_448),
        ("Mixtral-8x7B", 14_680_064, 7_340_032),
        ("Qwen3-30B-A3B", 393_216, 196_608),
    ],
)
def test_bytes_of_a_plane(name: str, gate_up: int, down: int) -> None:
    shapes = linear_shapes(PUBLISHED[name])
    assert tuple(shape.plane_bytes() for shape in shapes) == (gate_up, down)


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [("Mixtral-8x7B", 352.3), ("Qwen1.5-MoE-A2.7B", 17.3), ("Qwen3-30B-A3B", 9.4)],
)
def test_bytes_of_a_dense_expert_are_those_of_its_parameters(name: str, megabytes: float) -> None:
    total = sum(shape.dense_bytes("bfloat16") for shape in linear_shapes(PUBLISHED[name]))
    assert total / 1e6 == pytest.approx(megabytes, abs=0.05)


@pytest.mark.parametrize(
    ("name", "bfloat16", "block_size"),
    [
        ("Qwen1.5-MoE-A2.7B", 8192, 4),
        ("Mixtral-8x7B", 4096, 16),
        ("Qwen3-30B-A3B", 2048, 16),
    ],
)
def test_bytes_of_a_token_in_one_layer(name: str, bfloat16: int, block_size: int) -> None:
    config = PUBLISHED[name]
    (kind,) = kv_kinds(config, "bfloat16", 65536)
    (wide,) = kv_kinds(config, "float32", 65536)
    assert (kind.token_bytes, wide.token_bytes) == (bfloat16, 2 * bfloat16)
    assert choose_geometry(config, "bfloat16").block_size == block_size


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_waste_at_most_4_percent(name: str) -> None:
    geometry = choose_geometry(PUBLISHED[name], "bfloat16")
    used = geometry.gate_up.dense_bytes("bfloat16") + geometry.down.dense_bytes("bfloat16")
    taken = sum(runs.pages("dense") for runs in geometry.expert_runs) * geometry.page_bytes
    (kind,) = geometry.kinds
    cache = kind.block_size * kind.token_bytes
    assert 0.96 * taken <= used <= taken
    assert 0.96 * geometry.page_bytes <= cache <= geometry.page_bytes
    assert geometry.block_size >= 4


# Rows and columns are padded to atoms, and to nothing more.


def test_an_odd_shape_by_hand() -> None:
    gate_up = LinearShape(parts=2, rows=65, columns=129)
    assert gate_up.stored_rows == 256
    assert gate_up.dense_bytes("bfloat16") == 256 * 68 * 4  # 65 words, padded to 68
    assert gate_up.dense_bytes("float32") == 256 * 132 * 4
    assert gate_up.plane_bytes() == 256 * 8 * 4  # 5 words, padded to 8
    assert gate_up.table_bytes(3) == 256 * 8 * 2
    assert LinearShape(parts=1, rows=65, columns=129).table_bytes(2) == 1024


def test_gate_up_and_down_are_each_others_transposes() -> None:
    gate_up, down = linear_shapes(PUBLISHED["Mixtral-8x7B"])
    assert gate_up == LinearShape(parts=2, rows=14336, columns=4096)
    assert down == LinearShape(parts=1, rows=4096, columns=14336)


@given(parts=st.integers(1, 2), rows=st.integers(1, 300), columns=st.integers(1, 300))
def test_sizes_are_whole_atoms_and_hold_the_values(parts: int, rows: int, columns: int) -> None:
    shape = LinearShape(parts=parts, rows=rows, columns=columns)
    sizes = [shape.dense_bytes("bfloat16"), shape.dense_bytes("float32"), shape.plane_bytes()]
    sizes += [shape.table_bytes(bits) for bits in range(2, 9)]
    assert all(size % format.ATOM_BYTES == 0 for size in sizes)
    assert parts * rows * columns * 4 <= shape.dense_bytes("float32")
    assert parts * rows * columns <= 8 * shape.plane_bytes()


# Pages.


def test_a_geometry_by_hand() -> None:
    kind = make_kind(kv_heads=3, experts=5, width=40, head_size=16)
    dense = make_kind(kv_heads=2, experts=None, width=100, head_size=16)
    config = make_config(
        Segment(period=(dense,), repeats=1), Segment(period=(kind,), repeats=2), hidden=96
    )
    geometry = make_geometry(config, "float32", 16384)
    assert (geometry.num_layers, geometry.num_moe_layers, geometry.num_experts) == (3, 2, 5)
    assert geometry.page_words == 4096
    few, many = geometry.kinds
    assert (few.layers, many.layers) == ((0,), (1, 2))
    assert (few.token_bytes, many.token_bytes) == (2 * 2 * 16 * 4, 2 * 3 * 16 * 4)
    assert (few.token_words, many.token_words) == (64, 96)
    assert (few.block_size, many.block_size) == (64, 40)  # 42 of 384 bytes would fit
    # 128 x 96 words are 3 pages; 128 x 40 are 1.25.
    assert [runs.pages_at(16) for runs in geometry.expert_runs] == [3, 2]
    assert [runs.num_slots for runs in geometry.expert_runs] == [3, 2]
    assert uniform(geometry, 16).pages(geometry) == 2 * 5 * 5
    assert geometry.block_size == 320  # five blocks of 64, eight of 40
    assert geometry.block_pages == 1 * 5 + 2 * 8


@given(
    hidden=st.integers(1, 320),
    width=st.integers(1, 600),
    kv_heads=st.integers(1, 8),
    head_size=st.sampled_from([16, 64, 80, 128]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
@settings(max_examples=40)
def test_the_page_size_wastes_least_and_a_block_is_full_or_in_eights(
    hidden: int, width: int, kv_heads: int, head_size: int, dtype: str
) -> None:
    config = published(2, hidden, width, 4, kv_heads, head_size)
    of_size = {size: make_geometry(config, dtype, size) for size in PAGE_SIZES}
    geometry = choose_geometry(config, dtype)
    assert geometry == of_size[geometry.page_bytes]
    (kind,) = geometry.kinds
    waste = {size: page_waste(g) for size, g in of_size.items() if g.block_size >= 4}
    assert waste[geometry.page_bytes] <= min(waste.values()) + 0.001
    left = geometry.page_bytes - kind.block_size * kind.token_bytes
    if kind.block_size >= 8:
        assert kind.block_size % 8 == 0
        assert 0 <= left < 8 * kind.token_bytes
    else:
        assert kind.block_size >= 4  # 16 KiB hold two of the largest tokens, 64 KiB eight
        assert 0 <= left < kind.token_bytes
    for runs in geometry.expert_runs:
        pages = runs.pages("dense")
        assert (pages - 1) * geometry.page_bytes < runs.shape.dense_bytes(dtype)
        assert runs.shape.dense_bytes(dtype) <= pages * geometry.page_bytes


def resident_kib(shape: LinearShape, width: int) -> list[int]:
    """KiB of the runs that are on a device, of a linear with widths from 3 to 6."""
    bits = Quantization(seed_bits=3, parent_bits=6)
    runs = Runs(shape=shape, dtype="bfloat16", page_bytes=16384, quantization=bits)
    return [runs.sizes[name] >> 10 for name in runs.resident(width)]


def waste_of_sizes(config: ModelConfig) -> list[float]:
    """What pages of 16, 32 and 64 KiB waste in bfloat16."""
    return [page_waste(make_geometry(config, "bfloat16", size)) for size in PAGE_SIZES]


def test_the_larger_page_is_taken_where_two_waste_the_same() -> None:
    config = PUBLISHED["Mixtral-8x7B"]
    assert waste_of_sizes(config) == [0.0] * 3
    assert choose_geometry(config, "bfloat16").page_bytes == 65536


def test_a_smaller_page_is_taken_where_it_wastes_less() -> None:
    config = published(layers=1, hidden=64, width=192, experts=4, kv_heads=1)
    gate_up, down = linear_shapes(config)
    # 48 and 24 KiB are 3 and 2 pages of 16 KiB, 2 and 1 of 32 KiB, one each of 64 KiB.
    dense = [shape.dense_bytes("bfloat16") >> 10 for shape in (gate_up, down)]
    assert dense == [48, 24]
    # Six planes, and tables of 6 and 5 bits, are 19 pages of 16 KiB, 17 of 32 and 16 of 64.
    assert resident_kib(gate_up, 6) == [6] * 6 + [24, 48]
    assert resident_kib(down, 6) == [2] * 6 + [4, 8]
    runs = 6 * 6 + 48 + 24 + 6 * 2 + 8 + 4
    geometry = choose_geometry(config, "bfloat16")
    waste = waste_by_use(geometry)
    assert geometry.page_bytes == 16384
    assert waste["width 16"] == pytest.approx(1 - 72 / (5 * 16))
    assert waste["width 6"] == pytest.approx(1 - runs / (19 * 16))
    assert waste["KV of 512 bytes"] == 0
    found = [1 - runs / (19 * 16), 1 - runs / (17 * 32), 1 - runs / (16 * 64)]
    assert waste_of_sizes(config) == pytest.approx(found)


def test_the_smallest_width_has_one_table() -> None:
    gate_up, _ = linear_shapes(published(layers=1, hidden=64, width=192, experts=4, kv_heads=1))
    assert resident_kib(gate_up, 3) == [6] * 3 + [6]
    assert resident_kib(gate_up, 4) == [6] * 4 + [6, 12]


def test_the_waste_of_the_cache_is_not_hidden_by_that_of_the_experts() -> None:
    # 5 KV heads of 128 in bfloat16 are 2560 bytes: 8 tokens leave a third of 32 KiB unused.
    config = published(layers=1, hidden=2048, width=1024, experts=4, kv_heads=5)
    used = [6 * 2560 / 16384, 8 * 2560 / 32768, 24 * 2560 / 65536]
    assert waste_of_sizes(config) == pytest.approx([1 - share for share in used])
    assert choose_geometry(config, "bfloat16").page_bytes == 65536


@pytest.mark.parametrize(
    ("kv_heads", "tokens"), [(1, 128), (3, 40), (16, 8), (17, 7), (32, 4), (128, 1)]
)
def test_a_block_is_in_eights_if_eight_tokens_fit(kv_heads: int, tokens: int) -> None:
    config = published(1, 2048, 1024, 64, kv_heads)
    (kind,) = make_geometry(config, "bfloat16", 65536).kinds
    assert kind.block_size == tokens


def test_a_page_that_holds_no_token_wastes_everything() -> None:
    config = published(1, 2048, 1024, 64, kv_heads=128)  # 64 KiB per token
    assert waste_of_sizes(config) == [1.0, 1.0, 0.0]
    assert choose_geometry(config, "bfloat16").page_bytes == 65536


@pytest.mark.parametrize(
    ("kv_heads", "tokens"),
    [
        (4, [8, 16, 32]),  # the smallest page has enough
        (8, [4, 8, 16]),
        (9, [3, 7, 8]),  # 32 KiB have
        (32, [1, 2, 4]),  # 64 KiB have
        (40, [0, 1, 3]),  # none has: the most there is
    ],
)
def test_a_page_holds_at_least_four_tokens_where_one_does(kv_heads: int, tokens: list[int]) -> None:
    # The experts alone would fit 16 KiB best, by far.
    config = published(1, hidden=64, width=192, experts=4, kv_heads=kv_heads)
    found = [make_geometry(config, "bfloat16", size).kinds[0].block_size for size in PAGE_SIZES]
    assert found == tokens
    enough = [size for size, n in zip(PAGE_SIZES, tokens, strict=True) if n >= min(4, max(tokens))]
    assert choose_geometry(config, "bfloat16").page_bytes == enough[0]


def test_a_token_too_large_for_any_page_is_refused_with_the_numbers() -> None:
    message = "a token needs 65792 bytes of KV in each layer, a page has 65536"
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose_geometry(published(1, 2048, 1024, 64, kv_heads=257, head_size=64), "bfloat16")
