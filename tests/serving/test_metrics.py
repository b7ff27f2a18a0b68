"""Metrics: names that dashboards know, and values after what happened."""

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moejax_serving.metrics import FinishedRequest, Metrics

# A name that changes breaks the dashboards, routers and autoscalers that read it.
COUNTERS = {
    "http_requests",
    "moejax:jit_compiles",
    "vllm:corrupted_requests",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:prefix_cache_queries",
    "vllm:prompt_tokens",
    "vllm:request_success",
}
GAUGES = {
    "moejax:kv_blocks_capacity",
    "moejax:memory_bytes",
    "moejax:startup_phase_seconds",
    "vllm:cache_config_info",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
}
HISTOGRAMS = {
    "http_request_duration_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:iteration_tokens_total",
    "vllm:request_decode_time_seconds",
    "vllm:request_generation_tokens",
    "vllm:request_inference_time_seconds",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_prefill_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_queue_time_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds",
}
OWN = {"model_name": "m", "engine": "0"}
REQUEST = FinishedRequest(
    finish_reason="stop",
    num_prompt_tokens=30,
    num_generation_tokens=12,
    num_cached_tokens=16,
    n=2,
    max_tokens=8,
    e2e_seconds=4.0,
    queue_seconds=0.25,
    prefill_seconds=0.5,
    decode_seconds=3.0,
    inference_seconds=3.5,
    seconds_per_token=0.5,
    num_longest_tokens=7,
)


def read(metrics: Metrics) -> dict[str, Any]:
    """Families by name, without the time at which each was made."""
    families = text_string_to_metric_families(metrics.render()[0].decode())
    return {f.name: f for f in families if not f.name.endswith("_created")}


def value(metrics: Metrics, sample: str, **labels: str) -> float | None:
    """The value of one sample; None if there is no such sample."""
    found = [
        s.value
        for family in read(metrics).values()
        for s in family.samples
        if s.name == sample and s.labels == OWN | labels
    ]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


def test_the_names_are_these_and_all_have_help_and_type(metrics: Metrics) -> None:
    families = read(metrics)
    found: dict[str, set[str]] = {}
    for name, family in families.items():
        found.setdefault(family.type, set()).add(name)
        assert family.documentation.endswith(".")
    assert found == {"counter": COUNTERS, "gauge": GAUGES, "histogram": HISTOGRAMS}


def test_it_is_prometheus_text(metrics: Metrics) -> None:
    text, content_type = metrics.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    lines = text.decode().splitlines()
    assert "# TYPE vllm:prompt_tokens_total counter" in lines
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 0.0' in lines


def test_every_series_has_the_models_name_and_the_engine() -> None:
    metrics = Metrics('a "model"')
    metrics.set_memory({"dense": 1})
    metrics.set_startup_phase("load", 1.0)
    metrics.set_cache_config({"block_size": 16})
    metrics.observe_http("/health", "GET", 200, 0.1)
    for family in read(metrics).values():
        assert family.samples, family.name
        for sample in family.samples:
            assert sample.labels["model_name"] == 'a "model"' and sample.labels["engine"] == "0"


def test_two_servers_count_apart(metrics: Metrics) -> None:
    other = Metrics("m")
    other.count_step(3, 4)
    assert value(metrics, "vllm:prompt_tokens_total") == 0
    assert value(other, "vllm:prompt_tokens_total") == 3


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda m: m.set_queue(3, 2, 0.25),
            {
                "vllm:num_requests_running": 3,
                "vllm:num_requests_waiting": 2,
                "vllm:kv_cache_usage_perc": 0.25,
            },
        ),
        (
            lambda m: m.count_prefix_cache(100, 48),
            {"vllm:prefix_cache_queries_total": 100, "vllm:prefix_cache_hits_total": 48},
        ),
        (lambda m: m.count_preemptions(), {"vllm:num_preemptions_total": 1}),
        (lambda m: m.count_preemptions(3), {"vllm:num_preemptions_total": 3}),
        (lambda m: m.count_corrupted(), {"vllm:corrupted_requests_total": 1}),
        (
            lambda m: m.count_step(40, 2),
            {
                "vllm:prompt_tokens_total": 40,
                "vllm:generation_tokens_total": 2,
                "vllm:iteration_tokens_total_count": 1,
                "vllm:iteration_tokens_total_sum": 42,
            },
        ),
        (
            lambda m: m.observe_first_token(0.03),
            {
                "vllm:time_to_first_token_seconds_count": 1,
                "vllm:time_to_first_token_seconds_sum": 0.03,
            },
        ),
        (
            lambda m: m.observe_inter_token(0.02),
            {
                "vllm:inter_token_latency_seconds_count": 1,
                "vllm:inter_token_latency_seconds_sum": 0.02,
            },
        ),
        (lambda m: m.set_kv_blocks_capacity(77), {"moejax:kv_blocks_capacity": 77}),
    ],
)
def test_what_happened_is_counted(
    metrics: Metrics, call: Callable[[Metrics], None], expected: dict[str, float]
) -> None:
    call(metrics)
    assert {name: value(metrics, name) for name in expected} == expected


def test_a_finished_request_is_counted_by_its_reason(metrics: Metrics) -> None:
    for reason, times in (("stop", 1), ("length", 2), ("abort", 3), ("error", 4)):
        for _ in range(times):
            metrics.observe_request(dataclasses.replace(REQUEST, finish_reason=reason))
        assert value(metrics, "vllm:request_success_total", finished_reason=reason) == times


def test_a_finished_request_is_in_every_histogram_of_requests(metrics: Metrics) -> None:
    metrics.observe_request(REQUEST)
    expected = {
        "vllm:request_prompt_tokens": 30,
        "vllm:request_prefill_kv_computed_tokens": 14,
        "vllm:request_generation_tokens": 12,
        "vllm:request_max_num_generation_tokens": 7,
        "vllm:request_params_n": 2,
        "vllm:request_params_max_tokens": 8,
        "vllm:e2e_request_latency_seconds": 4.0,
        "vllm:request_queue_time_seconds": 0.25,
        "vllm:request_prefill_time_seconds": 0.5,
        "vllm:request_decode_time_seconds": 3.0,
        "vllm:request_inference_time_seconds": 3.5,
        "vllm:request_time_per_output_token_seconds": 0.5,
    }
    assert {name: value(metrics, f"{name}_sum") for name in expected} == expected
    assert {value(metrics, f"{name}_count") for name in expected} == {1}


def test_one_token_has_no_time_per_token_and_one_choice_is_the_longest(metrics: Metrics) -> None:
    metrics.observe_request(
        dataclasses.replace(REQUEST, n=1, seconds_per_token=None, num_longest_tokens=None)
    )
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 12


def test_memory_is_by_kind_and_the_start_by_phase(metrics: Metrics) -> None:
    metrics.set_memory({"dense": 100, "kv": 50})
    metrics.set_memory({"kv": 70})
    metrics.set_startup_phase("load", 1.5)
    assert value(metrics, "moejax:memory_bytes", kind="dense") == 100
    assert value(metrics, "moejax:memory_bytes", kind="kv") == 70
    assert value(metrics, "moejax:startup_phase_seconds", phase="load") == 1.5


def test_compiles_are_shown_before_there_are_any(metrics: Metrics) -> None:
    metrics.count_compiles("warmup", 9)
    assert value(metrics, "moejax:jit_compiles_total", phase="warmup") == 9
    assert value(metrics, "moejax:jit_compiles_total", phase="serving") == 0
    metrics.count_compiles("serving")
    assert value(metrics, "moejax:jit_compiles_total", phase="serving") == 1


def test_the_cache_settings_are_labels_and_the_last_ones_count(metrics: Metrics) -> None:
    assert read(metrics)["vllm:cache_config_info"].samples == []
    metrics.set_cache_config({"block_size": 16, "num_gpu_blocks": 5})
    metrics.set_cache_config({"block_size": 32, "enable_prefix_caching": True})
    (sample,) = read(metrics)["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels == OWN | {"block_size": "32", "enable_prefix_caching": "True"}


def test_http_is_by_handler_method_and_class_of_status(metrics: Metrics) -> None:
    for status in (200, 204, 404, 503):
        metrics.observe_http("/v1/models", "GET", status, 0.3)
    labels = {"handler": "/v1/models", "method": "GET"}
    counts = {
        kind: value(metrics, "http_requests_total", status=kind, **labels)
        for kind in ("2xx", "4xx", "5xx")
    }
    assert counts == {"2xx": 2, "4xx": 1, "5xx": 1}
    assert value(metrics, "http_request_duration_seconds_count", **labels) == 4


@pytest.mark.parametrize(
    ("name", "edges"),
    [
        ("vllm:iteration_tokens_total", [1, 8, *(2**e for e in range(4, 15))]),
        ("vllm:request_params_n", [1, 2, 5, 10, 20]),
        ("vllm:request_prompt_tokens", [m * 10**e for e in range(6) for m in (1, 2, 5)] + [10**6]),
        ("http_request_duration_seconds", [0.1, 0.5, 1.0]),
    ],
)
def test_the_edges_are_those_of_vllm(metrics: Metrics, name: str, edges: list[float]) -> None:
    metrics.observe_http("/health", "GET", 200, 0.1)
    samples = read(metrics)[name].samples
    found = [float(s.labels["le"]) for s in samples if s.name.endswith("_bucket")]
    assert found == [*edges, float("inf")]


def test_times_lie_between_these_edges(metrics: Metrics) -> None:
    edges = {}
    for name, family in read(metrics).items():
        buckets = [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")]
        if name.startswith("vllm:") and re.search(r"seconds$", name):
            edges[name] = (buckets[0], buckets[-2], len(buckets))
    assert edges.pop("vllm:time_to_first_token_seconds") == ("0.001", "2560.0", 23)
    assert edges.pop("vllm:inter_token_latency_seconds") == ("0.01", "80.0", 20)
    assert edges.pop("vllm:request_time_per_output_token_seconds") == ("0.01", "80.0", 20)
    assert set(edges.values()) == {("0.3", "7680.0", 22)} and len(edges) == 5


def test_threads_lose_no_counts(metrics: Metrics) -> None:
    def work() -> None:
        for _ in range(500):
            metrics.count_step(1, 1)
            metrics.observe_inter_token(0.01)
            metrics.observe_http("/health", "GET", 200, 0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        read(metrics)
    assert value(metrics, "vllm:generation_tokens_total") == 2000
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2000
