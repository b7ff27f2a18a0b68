"""Kinds of KV: which layers belong together, which blocks a sequence holds, pages of all kinds."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.arena.geometry import (
    Geometry,
    choose_geometry,
    kv_kinds,
    make_geometry,
    page_waste,
    waste_by_use,
)
from moejax.arena.kinds import KvKind
from moejax.config import (
    AnyAttention,
    Attention,
    LayerKind,
    Mla,
    Mlp,
    ModelConfig,
    Moe,
    Reach,
    Rope,
    Router,
    segments_of,
)
from moejax.errors import ConfigError


def make_kind(
    *, block_size: int = 8, layers: int = 2, window: int | None = None, chunk: int | None = None
) -> KvKind:
    return KvKind(
        layers=tuple(range(layers)),
        token_bytes=64,
        reach=Reach(window=window, chunk=chunk),
        block_size=block_size,
    )


# Blocks of a sequence.


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (64, 8)])
def test_tokens_begin_blocks(tokens: int, blocks: int) -> None:
    assert make_kind().blocks_for(tokens) == blocks


@pytest.mark.parametrize(
    ("reach", "first"),
    [
        ({}, {0: 0, 7: 0, 8: 0, 100: 0}),
        ({"window": 1}, {0: 0, 7: 0, 8: 1, 100: 12}),
        # Token 8 sees 1, token 14 sees 7, token 15 sees 8.
        ({"window": 8}, {0: 0, 8: 0, 14: 0, 15: 1, 22: 1, 23: 2}),
        ({"window": 12}, {11: 0, 18: 0, 19: 1, 26: 1, 27: 2}),
        ({"chunk": 8}, {7: 0, 8: 1, 15: 1, 16: 2}),
        # A chunk of 12 begins in the middle of a block: 12 in block 1, 36 in block 4.
        ({"chunk": 12}, {11: 0, 12: 1, 23: 1, 24: 3, 36: 4}),
    ],
    ids=str,
)
def test_the_first_block_that_is_still_seen(reach: dict[str, int], first: dict[int, int]) -> None:
    kind = make_kind(**reach)
    assert {position: kind.first_block(position) for position in first} == first


@given(
    block_size=st.integers(1, 12),
    reach=st.one_of(
        st.just({}),
        st.builds(lambda n: {"window": n}, st.integers(1, 30)),
        st.builds(lambda n: {"chunk": n}, st.integers(1, 30)),
    ),
    position=st.integers(0, 80),
)
def test_blocks_before_the_first_one_are_seen_by_no_later_token(
    block_size: int, reach: dict[str, int], position: int
) -> None:
    kind = make_kind(block_size=block_size, **reach)
    first = kind.first_block(position)
    seen_later = [
        key
        for later in range(position, position + 70)
        for key in range(later + 1)
        if key > later - reach.get("window", 1000)
        and (key // reach["chunk"] == later // reach["chunk"] if "chunk" in reach else True)
    ]
    assert min(seen_later) // block_size == first


@pytest.mark.parametrize(
    ("reach", "tokens", "max_query", "most"),
    [
        ({}, 100, 1, 13),
        ({}, 100, 64, 13),
        # One token at a time sees 8: in two blocks at most, unless a block starts with it.
        ({"window": 8}, 100, 1, 2),
        ({"window": 9}, 100, 1, 2),
        ({"window": 10}, 100, 1, 3),
        ({"window": 1}, 100, 1, 1),
        ({"window": 1}, 100, 9, 2),
        # 9 tokens and the 7 before the first of them.
        ({"window": 8}, 100, 9, 3),
        ({"window": 8}, 16, 9, 2),  # no more than there are tokens for
        ({"window": 1000}, 100, 1, 13),
        ({"chunk": 12}, 100, 1, 3),
        ({"chunk": 8}, 4, 1, 1),
    ],
    ids=str,
)
def test_most_blocks_by_hand(reach: dict[str, int], tokens: int, max_query: int, most: int) -> None:
    assert make_kind(**reach).most_blocks(tokens, max_query) == most


def most_by_trying(kind: KvKind, num_tokens: int, max_query: int) -> int:
    """Of all steps that a sequence may make: blocks from the first seen to the last written."""
    return max(
        end // kind.block_size - kind.first_block(start) + 1
        for start in range(num_tokens)
        for end in range(start, min(start + max_query, num_tokens))
    )


small = st.integers(1, 24)


@given(block_size=st.integers(1, 9), window=small, num_tokens=st.integers(1, 90), max_query=small)
def test_no_way_to_step_through_a_window_holds_more_blocks(
    block_size: int, window: int, num_tokens: int, max_query: int
) -> None:
    kind = make_kind(block_size=block_size, window=window)
    found, bound = (
        most_by_trying(kind, num_tokens, max_query),
        kind.most_blocks(num_tokens, max_query),
    )
    assert found <= bound
    # A long sequence comes to every place of a block: the bound is reached.
    if num_tokens >= window + max_query + block_size:
        assert found == bound


@given(block_size=st.integers(1, 9), chunk=small, num_tokens=st.integers(1, 90), max_query=small)
def test_no_way_to_step_through_chunks_holds_more_blocks(
    block_size: int, chunk: int, num_tokens: int, max_query: int
) -> None:
    kind = make_kind(block_size=block_size, chunk=chunk)
    found, bound = (
        most_by_trying(kind, num_tokens, max_query),
        kind.most_blocks(num_tokens, max_query),
    )
    assert found <= bound
    # Chunks begin at few places of a block: at most one block is counted for nothing.
    if num_tokens >= 2 * chunk + max_query + block_size:
        assert found >= bound - 1


@given(num_tokens=st.integers(1, 90), max_query=small)
def test_without_a_window_all_blocks_are_held(num_tokens: int, max_query: int) -> None:
    kind = make_kind()
    assert kind.most_blocks(num_tokens, max_query) == most_by_trying(kind, num_tokens, max_query)


# Kinds of a model.


def gqa(*, kv_heads: int = 2, head_size: int = 8, **options: Any) -> Attention:
    shape: dict[str, Any] = {"num_kv_heads": kv_heads, "head_size": head_size, "scale": 1.0}
    return Attention(num_heads=2 * kv_heads, rope=Rope(theta=1e4), **shape | options)


def mla(*, latent: int = 24, rope: int = 8) -> Mla:
    return Mla(
        num_heads=4,
        q_latent_size=None,
        latent_size=latent,
        nope_size=8,
        rope_size=rope,
        value_size=8,
        scale=1.0,
        rope=Rope(theta=1e4),
        latent_norm_epsilon=1e-6,
    )


def make_config(*attentions: AnyAttention, hidden: int = 64, width: int = 64) -> ModelConfig:
    router = Router(num_experts=4, experts_per_token=1, renormalize=True, float32_weights=True)
    moe = Moe(router=router, expert_width=width)
    layers = [LayerKind(attention=part, feed_forward=moe) for part in attentions]
    return ModelConfig(
        family="kinds",
        vocab_size=100,
        hidden_size=hidden,
        max_position_embeddings=4096,
        norm_epsilon=1e-6,
        tie_embeddings=False,
        dtype="bfloat16",
        segments=segments_of(
            [LayerKind(attention=attentions[0], feed_forward=Mlp(width=9)), *layers]
        ),
    )


SLIDING, FULL = gqa(kv_heads=3, window=16), gqa(head_size=40)
MIXED = make_config(SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL)


def mixed_geometry() -> Geometry:
    return make_geometry(MIXED, "bfloat16", 16384)


def test_layers_of_the_same_bytes_and_reach_are_one_kind() -> None:
    sliding, full = mixed_geometry().kinds
    assert sliding.layers == (0, 1, 2, 4, 5)  # the dense layer attends as the second does
    assert full.layers == (3, 6)
    assert (sliding.reach, full.reach) == (Reach(window=16), Reach())
    assert (sliding.token_bytes, full.token_bytes) == (2 * 3 * 8 * 2, 2 * 2 * 40 * 2)
    assert (sliding.pages_per_block, full.pages_per_block) == (5, 2)


@pytest.mark.parametrize(
    ("parts", "kinds"),
    [
        ([gqa(), gqa(qk_norm="head")], 1),  # other parts of attention do not count
        ([gqa(kv_heads=4, head_size=8), gqa(kv_heads=2, head_size=16)], 1),  # nor do shapes
        ([gqa(kv_heads=1, head_size=8), mla(latent=12, rope=4)], 1),
        ([gqa(), gqa(head_size=16)], 2),
        ([gqa(), gqa(window=8)], 2),
        ([gqa(window=8), gqa(chunk=8)], 2),
        ([gqa(window=8), gqa(window=9), gqa()], 3),
    ],
)
def test_what_makes_another_kind(parts: list[AnyAttention], kinds: int) -> None:
    assert len(kv_kinds(make_config(*parts), "bfloat16", 16384)) == kinds


def test_a_layer_is_found_by_its_number_and_a_kind_by_its_attention() -> None:
    geometry = mixed_geometry()
    places = [geometry.place_of(layer) for layer in range(geometry.num_layers)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (0, 4), (1, 1)]
    with pytest.raises(ValueError, match="there is no layer 7"):
        geometry.place_of(7)
    assert [geometry.kind_of(kind.attention) for kind in MIXED.layers] == [0, 0, 0, 1, 0, 0, 1]
    with pytest.raises(ValueError, match="not in list"):
        geometry.kind_of(gqa(window=17))


def test_blocks_of_kinds_are_full_together_after_their_least_common_multiple() -> None:
    geometry = mixed_geometry()
    # 16384 / 96 and / 320 bytes, in eights.
    assert [kind.block_size for kind in geometry.kinds] == [168, 48]
    assert geometry.block_size == 336
    assert geometry.block_pages == 2 * 5 + 7 * 2


@pytest.mark.parametrize(
    ("tokens", "max_query", "pages"),
    [
        (1, 1, 5 + 2),
        (336, 1, 2 * 5 + 7 * 2),
        (3360, 1, 2 * 5 + 70 * 2),  # 16 tokens of the window in two blocks
        (3360, 512, 5 * 5 + 70 * 2),  # 512 and 15 in five
    ],
)
def test_most_pages_are_those_of_all_kinds(tokens: int, max_query: int, pages: int) -> None:
    assert mixed_geometry().most_pages(tokens, max_query) == pages


@given(layers=st.lists(st.sampled_from([SLIDING, FULL, gqa(), mla()]), min_size=1, max_size=7))
def test_every_layer_has_one_page_in_a_block_of_its_kind(layers: list[AnyAttention]) -> None:
    config = make_config(*layers)
    geometry = make_geometry(config, "float32", 32768)
    found = [geometry.place_of(layer) for layer in range(len(config.layers))]
    assert sorted(found) == [
        (number, place)
        for number, kind in enumerate(geometry.kinds)
        for place in range(kind.pages_per_block)
    ]
    first_layers = [kind.layers[0] for kind in geometry.kinds]
    assert first_layers == sorted(first_layers)
    for layer, (number, _) in enumerate(found):
        part = config.layers[layer].attention
        assert geometry.kind_of(part) == number
        assert geometry.kinds[number].token_bytes == part.cached_values * 4
        assert geometry.kinds[number].reach == part.reach
    assert geometry.block_size == math.lcm(*(kind.block_size for kind in geometry.kinds))


# Pages.


def test_the_latent_of_deepseek_by_hand() -> None:
    geometry = make_geometry(make_config(mla(latent=512, rope=64)), "bfloat16", 65536)
    (kind,) = geometry.kinds
    assert (kind.token_bytes, kind.token_words) == (1152, 288)
    assert kind.block_size == 56  # of 1152 bytes 56.9 fit
    assert waste_by_use(geometry)["KV of 1152 bytes"] == pytest.approx(1 - 56 * 1152 / 65536)


def test_the_kind_that_wastes_most_is_what_a_page_is_judged_by() -> None:
    # Planes and dense runs of 4 MiB fill any page; 2560 bytes of KV fill 16 and 64 KiB best.
    shape = {"hidden": 2048, "width": 1024}
    good, bad = gqa(kv_heads=4, head_size=128), gqa(kv_heads=5, head_size=128)
    for parts, wasted in (((good,), 0.0), ((bad,), 0.375), ((good, bad), 0.375)):
        geometry = make_geometry(make_config(*parts, **shape), "bfloat16", 32768)
        assert page_waste(geometry) == pytest.approx(wasted)
    assert choose_geometry(make_config(good, bad, **shape), "bfloat16").page_bytes == 65536


def test_a_page_is_large_enough_for_the_kind_of_the_largest_tokens() -> None:
    large = gqa(kv_heads=32, head_size=128)  # 16 KiB per token
    config = make_config(gqa(), large, hidden=64, width=192)
    geometry = choose_geometry(config, "bfloat16")
    assert geometry.page_bytes == 65536
    assert [kind.block_size for kind in geometry.kinds] == [65536 // 64, 4]
    small = choose_geometry(make_config(gqa(), hidden=64, width=192), "bfloat16")
    assert small.page_bytes == 16384


def test_a_kind_that_fits_no_page_is_refused_with_its_bytes() -> None:
    config = make_config(gqa(), gqa(kv_heads=129, head_size=128))
    message = "a token needs 66048 bytes of KV in each layer, a page has 65536"
    with pytest.raises(ConfigError, match=message):
        choose_geometry(config, "bfloat16")
    assert [kind.block_size for kind in kv_kinds(config, "bfloat16", 65536)] == [1024, 0]
