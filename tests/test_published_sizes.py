"""Published sizes: parameters, bytes, KV and pages, against figures from elsewhere.

Parameters are those of transformers' modules on the meta device; `shared/tiny_models/sizes.json`
has them too. Routed experts, the rest and KV are the figures of the sheet of model families.
"""

import functools
import json
import re
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from published import FOLDER, names, published_config, published_name
from published_sizes import Sizes, reach_name, size_row, sizes_of, step_bytes, waste_row
from random_model import STD, RandomCheckpoint, random_config, with_layers

from moejax.arena.geometry import choose_geometry, page_waste, waste_by_use
from moejax.config import ModelConfig
from moejax.errors import ConfigError
from moejax.models.decoder import abstract_params, flatten_params


class Published(NamedTuple):
    """What is known of a size from elsewhere."""

    params: int
    routed: int
    """Parameters of routed experts, biases included."""
    experts_gb: float
    rest_gb: float
    """bfloat16, 1e9 bytes, rounded to two places."""
    kv: dict[str, int]
    """Reach → bytes per token."""


PUBLISHED = {
    "DeepSeek-V2": Published(235741434880, 222717542400, 445.44, 26.05, {"all": 69120}),
    "DeepSeek-V2-Lite": Published(15706484224, 14394851328, 28.79, 2.62, {"all": 31104}),
    "DeepSeek-V3": Published(671026404352, 653908770816, 1307.82, 34.24, {"all": 70272}),
    "Gemma-4-26B-A4B": Published(
        25233141760, 22837985280, 45.68, 4.79, {"window 1024": 204800, "all": 20480}
    ),
    "Kimi-K2": Published(1026408209408, 1014686023680, 2029.37, 23.44, {"all": 70272}),
    "Llama-4-Maverick": Published(
        400711848960, 386547056640, 773.09, 28.33, {"chunk 8192": 147456, "all": 49152}
    ),
    "Llama-4-Scout": Published(
        107769861120, 96636764160, 193.27, 22.27, {"chunk 8192": 147456, "all": 49152}
    ),
    "Mixtral-8x22B": Published(140620634112, 135291469824, 270.58, 10.66, {"all": 229376}),
    "Mixtral-8x7B": Published(46702792704, 45097156608, 90.19, 3.21, {"all": 131072}),
    "OLMoE-1B-7B": Published(6919161856, 6442450944, 12.88, 0.95, {"all": 131072}),
    "Phi-3.5-MoE": Published(41873153344, 40265318400, 80.53, 3.22, {"all": 131072}),
    "Qwen1.5-MoE-A2.7B": Published(14315784192, 12457082880, 24.91, 3.72, {"all": 196608}),
    "Qwen2-57B-A14B": Published(57408658944, 49325015040, 98.65, 16.17, {"all": 57344}),
    "Qwen3-235B-A22B": Published(235093634560, 227096395776, 454.19, 15.99, {"all": 192512}),
    "Qwen3-30B-A3B": Published(30532122624, 28991029248, 57.98, 3.08, {"all": 98304}),
    "Qwen3-Coder-480B-A35B": Published(480154875392, 468084326400, 936.17, 24.14, {"all": 253952}),
    "gpt-oss-120b": Published(
        116829156672, 114701598720, 229.40, 4.26, {"window 128": 36864, "all": 36864}
    ),
    "gpt-oss-20b": Published(
        20914757184, 19116933120, 38.23, 3.60, {"window 128": 24576, "all": 24576}
    ),
}
PAGES = {
    "DeepSeek-V2": (64, [56]),
    "DeepSeek-V2-Lite": (64, [56]),
    "DeepSeek-V3": (64, [56]),
    "Gemma-4-26B-A4B": (32, [4, 8]),
    "Kimi-K2": (64, [56]),
    "Llama-4-Maverick": (64, [16, 16]),
    "Llama-4-Scout": (64, [16, 16]),
    "Mixtral-8x22B": (64, [16]),
    "Mixtral-8x7B": (64, [16]),
    "OLMoE-1B-7B": (64, [8]),
    "Phi-3.5-MoE": (32, [8]),
    "Qwen1.5-MoE-A2.7B": (32, [4]),
    "Qwen2-57B-A14B": (32, [16]),
    "Qwen3-235B-A22B": (64, [32]),
    "Qwen3-30B-A3B": (32, [16]),
    "Qwen3-Coder-480B-A35B": (64, [16]),
    "gpt-oss-120b": (16, [8, 8]),
    "gpt-oss-20b": (16, [8, 8]),
}
"""The page in KiB, and how many tokens of each kind of KV it holds."""
ONE_OF_EACH = (
    "DeepSeek-V2-Lite",
    "DeepSeek-V3",
    "Gemma-4-26B-A4B",
    "Llama-4-Scout",
    "OLMoE-1B-7B",
    "Phi-3.5-MoE",
    "Qwen1.5-MoE-A2.7B",
    "Qwen3-30B-A3B",
    "gpt-oss-20b",
)
# Dense tensors here that are buffers, not parameters, in transformers.
BUFFERS = (".router.choice_bias", ".output_scale")
# Dense tensors that are float32 in a model of bfloat16.
FLOAT32 = (".router.weight", ".router.choice_bias")


@functools.cache
def config_of(name: str) -> ModelConfig:
    return published_config(name)


@functools.cache
def sizes(name: str) -> Sizes:
    return sizes_of(config_of(name))


def gigabytes(values: int) -> float:
    return round(2 * values / 1e9, 2)


def test_every_size_is_checked():
    assert set(names()) == set(PUBLISHED)


def test_names_are_found_in_any_case():
    assert published_name("qwen1.5-moe-a2.7b") == "Qwen1.5-MoE-A2.7B"
    assert published_name("GPT-OSS-20B") == "gpt-oss-20b"
    with pytest.raises(ConfigError, match=r"^'qwen9' is not a published size .* OLMoE-1B-7B"):
        published_config("qwen9")


def test_the_figures_are_those_of_the_sheet(shared_dir):
    rows = json.loads((shared_dir / "tiny_models" / "sizes.json").read_text())
    known = {row[0].removesuffix(" (text)"): row for row in rows}
    for name, published in PUBLISHED.items():
        _, _, _, _, _, _, params, routed, _, _, _, kv, _ = known[name]
        found = (published.params, published.routed, sum(published.kv.values()))
        assert found == (params, routed, kv), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_transformers(name):
    found, published = sizes(name), PUBLISHED[name]
    expert_biases = found.params_of(*(f".expert_bias.{m}" for m in ("gate", "up", "down")))
    assert found.expert_params + expert_biases == published.routed
    params = found.expert_params + sum(found.dense_params.values())
    assert params - found.params_of(*BUFFERS) == published.params


def test_what_is_counted_beside_the_parameters():
    counted = {name: sizes(name).params_of(*BUFFERS) for name in PUBLISHED}
    assert {name: n for name, n in counted.items() if n} == {
        "DeepSeek-V3": 58 * 256,
        "Kimi-K2": 60 * 384,
        "Gemma-4-26B-A4B": 30,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_are_the_published_ones(name):
    found, published = sizes(name), PUBLISHED[name]
    biases = published.routed - found.expert_params
    rest = sum(found.dense_params.values()) - biases - found.params_of(*BUFFERS)
    assert found.expert_bytes == 2 * found.expert_params
    assert gigabytes(found.expert_params + biases) == published.experts_gb
    assert gigabytes(rest) == published.rest_gb
    # To the byte: two per value, and two more where the router is in float32.
    wide = found.params_of(*FLOAT32) if name.startswith(("DeepSeek", "Kimi")) else 0
    assert sum(found.dense_bytes.values()) == 2 * (sum(found.dense_params.values()) + wide)


@pytest.mark.parametrize("name", PUBLISHED)
def test_kv_is_the_published_one(name):
    assert sizes(name).kv_bytes == PUBLISHED[name].kv


@pytest.mark.parametrize("name", PUBLISHED)
def test_pages_fit(name):
    geometry = choose_geometry(config_of(name), "bfloat16")
    gemma = name.startswith("Gemma")
    assert page_waste(geometry) <= (0.07 if gemma else 0.04)
    waste = waste_by_use(geometry)
    assert max(waste[f"width {bits}"] for bits in (3, 4, 5)) <= (0.08 if gemma else 0.05)
    tokens = [kind.block_size for kind in geometry.kinds]
    assert (geometry.page_bytes >> 10, tokens) == PAGES[name]


def test_the_tables_name_every_size():
    for name in PUBLISHED:
        geometry = choose_geometry(config_of(name), "bfloat16")
        row, waste = size_row(name, sizes(name)), waste_row(name, geometry)
        assert row.count("|") == 6 and waste.count("|") == 9
        assert all(reach_name(kind) in row and reach_name(kind) in waste for kind in geometry.kinds)


def test_files_have_the_hubs_spelling():
    # Sorted keys, and the class that transformers would load.
    for name in names():
        text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
        hf = json.loads(text)
        assert list(hf) == sorted(hf), name
        assert hf["architectures"] and hf["model_type"], name


def test_a_step_reads_the_experts_of_its_batch_and_what_its_layers_see():
    one, dense = 3 * 4096 * 14336 * 2, sum(sizes("Mixtral-8x7B").dense_bytes.values())
    embed = 32000 * 4096 * 2
    assert step_bytes(config_of("Mixtral-8x7B"), 1, 100) == {
        "dense": dense - embed,
        "experts": pytest.approx(32 * 2 * one),
        "kv all": 131072 * 100,
    }
    # Of two tokens, the second finds a quarter of its experts among those of the first.
    found = step_bytes(config_of("Mixtral-8x7B"), 2, 100)
    assert found["experts"] == pytest.approx(32 * (2 + 1.5) * one)
    assert found["kv all"] == 2 * 131072 * 100


@pytest.mark.parametrize(
    "name, length, seen",
    [
        ("Gemma-4-26B-A4B", 1024, {"window 1024": 1024, "all": 1024}),
        ("Gemma-4-26B-A4B", 1025, {"window 1024": 1024, "all": 1025}),
        ("Llama-4-Scout", 8192, {"chunk 8192": 8192, "all": 8192}),
        ("Llama-4-Scout", 8193, {"chunk 8192": 1, "all": 8193}),
        ("gpt-oss-20b", 200, {"window 128": 128, "all": 200}),
    ],
)
def test_layers_that_see_less_read_less(name, length, seen):
    found = step_bytes(config_of(name), 3, length)
    kv = PUBLISHED[name].kv
    assert {f"kv {reach}": 3 * kv[reach] * n for reach, n in seen.items()} == {
        use: size for use, size in found.items() if use.startswith("kv")
    }


def test_a_step_reads_tied_embeddings_and_biases_of_its_experts_only():
    gemma, tied = sizes("Gemma-4-26B-A4B"), step_bytes(config_of("Gemma-4-26B-A4B"), 1, 1)
    assert tied["dense"] == sum(gemma.dense_bytes.values())
    experts = step_bytes(config_of("gpt-oss-20b"), 1, 1)["experts"]
    assert experts == pytest.approx(24 * 4 * 2 * (3 * 2880 * 2880 + 3 * 2880))


def test_all_random_experts_have_the_same_numbers():
    config = random_config("OLMoE-1B-7B")
    runs = RandomCheckpoint(config).expert_runs(3)
    geometry = choose_geometry(config, "bfloat16")
    words = [shape.dense_bytes("bfloat16") // 4 for shape in (geometry.gate_up, geometry.down)]
    assert {linear: run.shape for linear, run in runs.items()} == {
        "gate_up.dense": (64, words[0]),
        "down.dense": (64, words[1]),
    }
    for run in runs.values():
        assert not run.strides[0]  # one expert in memory, not 64
        values = run[0].view(jnp.bfloat16).astype(np.float32)
        assert np.isclose(values.std(), STD, rtol=0.01) and np.abs(values).max() < 0.2


def test_random_weights_are_those_of_the_decoder():
    seen = set()
    for name in ONE_OF_EACH:
        checkpoint = RandomCheckpoint(with_layers(random_config(name), 4))
        wanted = flatten_params(abstract_params(checkpoint.config, "bfloat16"))
        assert set(checkpoint.dense_names()) == set(wanted)
        for tensor, leaf in wanted.items():
            kind = re.sub(r"segments\.\d+\.\d+\.", "", tensor)
            if kind in seen or leaf.size > 1 << 16:
                continue
            seen.add(kind)
            values = checkpoint.read_dense(tensor, leaf.dtype.name)
            assert (values.shape, values.dtype) == (leaf.shape, leaf.dtype)
            if kind.endswith(("norm.weight", "output_scale", "input_scale", "expert_scale")):
                assert (values == 1).all(), tensor
            else:
                assert 0 < jnp.abs(values.astype(jnp.float32)).max() < 0.2, tensor
    assert {"attention.sinks", "output_scale", "feed_forward.router.choice_bias"} < seen


def test_random_sequences_may_be_longer_if_asked():
    assert random_config("Mixtral-8x7B", 20000).max_position_embeddings == 20000
    assert random_config("Mixtral-8x7B", 10**6).max_position_embeddings == 32768
