"""How long sequences may be where some layers have windows."""

import dataclasses

import pytest

from models.small_configs import make_config
from moejax.arena.geometry import choose_geometry
from moejax.arena.widths import uniform
from moejax.errors import CapacityError
from moejax_serving import load
from moejax_serving.config import EngineConfig
from moejax_serving.memory import MemoryPlan

# Eight layers that see everything, and as many with a window.
LONG = dataclasses.replace(make_config("bc" * 8), max_position_embeddings=1 << 20)
GEOMETRY = choose_geometry(LONG, "float32")
BUDGET = 200 << 20


def plan(**settings: int) -> tuple[MemoryPlan, int]:
    config = EngineConfig(max_num_batched_tokens=32, memory_budget=BUDGET, **settings)
    pages = uniform(GEOMETRY, 16).pages(GEOMETRY)
    return load._plan(LONG, GEOMETRY, config, load._max_model_len(LONG, config), pages)


def test_a_context_is_shortened_to_what_the_layers_without_a_window_hold() -> None:
    memory, length = plan()
    assert [kind.reach.window for kind in GEOMETRY.kinds] == [None, 11]
    assert length % GEOMETRY.block_size == 0
    assert GEOMETRY.block_size <= length < LONG.max_position_embeddings
    # Had the others no window, the cache would hold a third of that.
    assert memory.num_blocks * memory.block_size < length / 2
    assert memory.kv_tokens >= length
    assert GEOMETRY.most_pages(length, 32) <= memory.kv_pages
    more = length + GEOMETRY.block_size
    with pytest.raises(CapacityError, match=rf"of {more} tokens \(max_model_len\)"):
        plan(max_model_len=more)
    assert plan(max_model_len=length)[1] == length
