"""How long sequences may be, and what is refused before anything is loaded."""

import dataclasses

import jax
import pytest

from models.small_model import make_config
from moejax.arena.geometry import choose_geometry
from moejax.errors import CapacityError, ConfigError
from moejax_serving import load
from moejax_serving.batch import make_buckets
from moejax_serving.config import EngineConfig

LONG = dataclasses.replace(make_config("abcbc"), max_position_embeddings=1 << 20)
GEOMETRY = choose_geometry(LONG, "float32")


def plan(**settings):
    config = EngineConfig(max_num_batched_tokens=32, **settings)
    buckets = make_buckets(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=32,
        block_size=GEOMETRY.block_size,
        layers=GEOMETRY.num_layers,
    )
    length = load._max_model_len(LONG, config)
    return load._plan(LONG, GEOMETRY, config, buckets, length)


def test_a_context_that_does_not_fit_is_shortened_to_the_longest_that_does():
    memory, length = plan(memory_budget=200 << 20)
    assert length % GEOMETRY.block_size == 0
    assert GEOMETRY.block_size <= length < LONG.max_position_embeddings
    assert memory.kv_tokens >= length
    with pytest.raises(CapacityError, match=f"{length + GEOMETRY.block_size} "):
        plan(memory_budget=200 << 20, max_model_len=length + GEOMETRY.block_size)
    assert plan(memory_budget=200 << 20, max_model_len=length)[1] == length


def test_fewer_sequences_leave_room_for_longer_ones():
    lengths = [plan(memory_budget=200 << 20, max_num_seqs=n)[1] for n in (64, 16, 4, 1)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_a_budget_beyond_the_machine_is_refused():
    with pytest.raises(CapacityError, match="budget of 9094.95 TiB is more than there is"):
        plan(memory_budget=10**16)


def test_tables_for_a_billion_sequences_are_counted():
    with pytest.raises(CapacityError, match="is more than there is"):
        plan(max_num_seqs=10**9)
    with pytest.raises(CapacityError, match=r"1000000000 sequences \(max_num_seqs\)"):
        plan(max_num_seqs=10**9, memory_budget=1 << 30)


def test_an_accelerator_that_hides_its_memory_needs_a_budget(monkeypatch):
    class Device:
        platform = "gpu"
        device_kind = "Mystery"

        def memory_stats(self):
            return None

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(ConfigError, match="Mystery does not tell its memory: set memory_budget"):
        load.device_bytes()
