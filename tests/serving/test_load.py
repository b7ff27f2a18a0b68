"""How long sequences may be, what is refused before anything is loaded, and what is shown after."""

import dataclasses

import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families

from models.small_model import make_config
from moejax.arena.geometry import choose_geometry
from moejax.arena.widths import uniform
from moejax.checkpoint import Checkpoint
from moejax.errors import CapacityError, ConfigError
from moejax_serving import load
from moejax_serving.config import EngineConfig
from moejax_serving.engine import Engine
from moejax_serving.metrics import Metrics

LONG = dataclasses.replace(make_config("b" * 8), max_position_embeddings=1 << 20)
GEOMETRY = choose_geometry(LONG, "float32")


def plan(**settings):
    config = EngineConfig(max_num_batched_tokens=32, **settings)
    length = load._max_model_len(LONG, config)
    return load._plan(LONG, GEOMETRY, config, length, uniform(GEOMETRY, 16).pages(GEOMETRY))


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


# The built-in model.

SMALL = EngineConfig(
    memory_budget=60 << 20,
    max_model_len=64,
    max_num_seqs=1,
    max_num_batched_tokens=32,
    warm_up=False,
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """An engine, and what its metrics show."""
    metrics = Metrics("m")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        engine = load.load_engine(None, SMALL, metrics=metrics, progress=False)
    return engine, samples(metrics)


def samples(metrics: Metrics) -> dict:
    """(name, labels beside those of all, in the order of their names) → value"""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            names = sorted(set(sample.labels) - {"model_name", "engine"})
            found[sample.name, *(sample.labels[name] for name in names)] = sample.value
    return found


def test_an_engine_shows_its_memory_plan(loaded):
    engine, shown = loaded
    found = {name[1]: value for name, value in shown.items() if name[0] == "moejax:memory_bytes"}
    assert found == engine.memory.kinds
    assert set(found) == {"dense", "experts", "kv", "workspace", "tables", "staging"}
    assert shown["moejax:kv_blocks_capacity",] == engine.memory.num_blocks > 0


def test_an_engine_shows_the_settings_of_its_cache(loaded):
    engine, shown = loaded
    memory = engine.memory
    # block_size, cache_dtype, enable_prefix_caching, num_gpu_blocks
    labels = (str(memory.block_size), "bfloat16", "True", str(memory.num_blocks))
    assert ("vllm:cache_config_info", *labels) in shown


def test_a_loaded_engine_has_nothing_to_do_and_its_books_are_in_order(loaded):
    engine, _ = loaded
    engine.check()
    assert not engine.has_unfinished()
    assert engine.step() == []


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEJAX_CACHE", str(tmp_path))


@pytest.mark.parametrize("warm_up", [False, True])
def test_programs_are_compiled_at_the_start_where_that_is_wanted(warm_up, monkeypatch):
    calls = []
    monkeypatch.setattr(Engine, "warm_up", lambda engine, **_: calls.append(engine))
    metrics = Metrics("m")
    config = dataclasses.replace(SMALL, warm_up=warm_up)
    engine = load.load_engine(None, config, metrics=metrics, progress=False)
    assert calls == ([engine] if warm_up else [])
    phases = {name[1] for name in samples(metrics) if name[0] == "moejax:startup_phase_seconds"}
    assert phases == ({"load", "compile"} if warm_up else {"load"})


def test_an_engine_has_metrics_of_its_own_where_none_are_given(loaded, monkeypatch):
    engine, _ = loaded
    given = []

    def build(*_, metrics, **__):
        given.append(metrics)
        return engine

    monkeypatch.setattr(load, "build_engine", build)
    load.load_engine(None, SMALL, metrics=engine.metrics, progress=False)
    load.load_engine(None, SMALL, progress=False)
    assert given[0] is engine.metrics
    assert given[1] is not engine.metrics


def test_keys_of_blocks_stand_for_the_model_and_its_dtype(monkeypatch):
    def root(fingerprint: str, dtype: str) -> bytes:
        monkeypatch.setattr(Checkpoint, "fingerprint", fingerprint)
        return load._cache_root(Checkpoint.__new__(Checkpoint), choose_geometry(LONG, dtype))

    roots = {root(model, dtype) for model in "ab" for dtype in ("float32", "bfloat16")}
    assert len(roots) == 4
    assert root("a", "float32") == root("a", "float32")


def test_a_prefix_cache_is_there_unless_it_is_refused(monkeypatch):
    roots = []

    def make(*_, cache_root, **__):
        roots.append(cache_root)
        raise ConfigError("seen")

    monkeypatch.setattr(load, "Scheduler", make)
    for enabled in (True, False):
        config = dataclasses.replace(SMALL, enable_prefix_caching=enabled)
        with pytest.raises(ConfigError, match="seen"):
            load.load_engine(None, config, progress=False)
    assert isinstance(roots[0], bytes)
    assert roots[1] is None
