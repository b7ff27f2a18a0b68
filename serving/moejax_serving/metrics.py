"""What /metrics shows: vLLM's series under vLLM's names, which dashboards know, and our own.

The names are an interface: a series is not renamed. All methods may be called from any thread; what
runs once for each token or step resolves no labels.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from moejax_serving.outputs import FinishReason

_LABELS = ("model_name", "engine")
_ENGINE = "0"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5)) + (10**6,)
_CHOICES = (1, 2, 5, 10, 20)
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_HTTP_SECONDS = (0.1, 0.5, 1.0)  # those of prometheus-fastapi-instrumentator, as in vLLM


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What is counted once for a request, when it has ended."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    """Of all choices."""
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    n: int
    max_tokens: int
    e2e_seconds: float
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    inference_seconds: float
    seconds_per_token: float | None
    """After the first token; None if there were fewer than two."""
    num_longest_tokens: int | None = None
    """Generated tokens of the longest choice; None: there is one choice."""


class Metrics:
    """The counters, gauges and histograms of one server."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._own = (model_name, _ENGINE)
        self._cache_config = _CacheConfig(self._own)
        self._registry.register(self._cache_config)
        self._make_engine_series()
        self._make_request_series()
        self._make_own_series()
        labels = (*_LABELS, "handler", "method")
        self._http_requests = Counter(
            "http_requests_total",
            "HTTP requests by handler, method and class of status.",
            (*labels, "status"),
            registry=self._registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time from an HTTP request to the end of its response.",
            labels,
            buckets=_HTTP_SECONDS,
            registry=self._registry,
        )

    def set_memory(self, kinds: Mapping[str, int]) -> None:
        """How many bytes of device memory each kind of use holds."""
        for kind, size in kinds.items():
            self._memory.labels(*self._own, kind).set(size)

    def set_cache_config(self, settings: Mapping[str, object]) -> None:
        """The settings of the KV cache; a later call replaces them."""
        self._cache_config.settings = {name: str(value) for name, value in settings.items()}

    def set_kv_blocks_capacity(self, n: int) -> None:
        """How many kv_blocks there may be at present."""
        self._kv_blocks_capacity.set(n)

    def set_queue(self, running: int, waiting: int, kv_usage: float) -> None:
        """Requests by state, and the share of the present KV cache that is in use: 0 to 1."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._kv_usage.set(kv_usage)

    def count_prefix_cache(self, queries: int, hits: int) -> None:
        """Tokens that were looked for in the prefix cache, and those found."""
        self._prefix_queries.inc(queries)
        self._prefix_hits.inc(hits)

    def count_preemptions(self, n: int = 1) -> None:
        """Requests that had to give their kv_blocks back."""
        self._preemptions.inc(n)

    def count_step(self, prompt_tokens: int, generation_tokens: int) -> None:
        """The tokens of one step."""
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(generation_tokens)
        self._step_tokens.observe(prompt_tokens + generation_tokens)

    def observe_first_token(self, seconds: float) -> None:
        """Time from a request's arrival to its first token."""
        self._first_token.observe(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        """Time between two tokens of a sequence."""
        self._inter_token.observe(seconds)

    def observe_request(self, request: FinishedRequest) -> None:
        """A request that has ended."""
        longest = request.num_longest_tokens
        self._finished[request.finish_reason].inc()
        self._request_prompt.observe(request.num_prompt_tokens)
        self._request_computed.observe(request.num_prompt_tokens - request.num_cached_tokens)
        self._request_generation.observe(request.num_generation_tokens)
        self._request_longest.observe(request.num_generation_tokens if longest is None else longest)
        self._request_n.observe(request.n)
        self._request_max_tokens.observe(request.max_tokens)
        self._e2e_seconds.observe(request.e2e_seconds)
        self._queue_seconds.observe(request.queue_seconds)
        self._prefill_seconds.observe(request.prefill_seconds)
        self._decode_seconds.observe(request.decode_seconds)
        self._inference_seconds.observe(request.inference_seconds)
        if request.seconds_per_token is not None:
            self._seconds_per_token.observe(request.seconds_per_token)

    def count_compiles(self, phase: Literal["warmup", "serving"], n: int = 1) -> None:
        """Programs that were compiled."""
        self._compiles[phase].inc(n)

    def count_corrupted(self, n: int = 1) -> None:
        """Requests whose logits were no numbers."""
        self._corrupted.inc(n)

    def set_startup_phase(self, phase: str, seconds: float) -> None:
        """How long a part of the start took."""
        self._startup.labels(*self._own, phase).set(seconds)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An HTTP response. `handler` is the route's template, or "none": labels must be few."""
        status_class = f"{status // 100}xx"
        self._http_requests.labels(*self._own, handler, method, status_class).inc()
        self._http_seconds.labels(*self._own, handler, method).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """All series in Prometheus' text format, and its content type."""
        return generate_latest(self._registry), _CONTENT_TYPE

    def _make_engine_series(self) -> None:
        self._running = self._gauge(
            "vllm:num_requests_running", "Requests that are being computed."
        )
        self._waiting = self._gauge(
            "vllm:num_requests_waiting", "Requests that wait to be computed."
        )
        self._kv_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the present KV cache that is in use: 0 to 1."
        )
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Tokens that were looked for in the prefix cache."
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Tokens that were found in the prefix cache."
        )
        self._preemptions = self._counter(
            "vllm:num_preemptions", "Requests that had to give their KV cache back."
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._corrupted = self._counter(
            "vllm:corrupted_requests", "Requests whose logits were no numbers."
        )
        self._step_tokens = self._histogram(
            "vllm:iteration_tokens_total",
            "New tokens of a step, and the prompts that it ended.",
            _STEP_TOKENS,
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _FIRST_TOKEN_SECONDS,
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two tokens of a sequence.",
            _TOKEN_SECONDS,
        )

    def _make_request_series(self) -> None:
        finished = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(*self._own, reason) for reason in _FINISH_REASONS}

        def of_request(name: str, text: str, edges: Iterable[int | float]) -> Histogram:
            return self._histogram(f"vllm:{name}", f"{text}, by request.", edges)

        self._request_prompt = of_request("request_prompt_tokens", "Prompt tokens", _LENGTHS)
        self._request_computed = of_request(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached", _LENGTHS
        )
        self._request_generation = of_request(
            "request_generation_tokens", "Generated tokens", _LENGTHS
        )
        self._request_longest = of_request(
            "request_max_num_generation_tokens", "Generated tokens of the longest choice", _LENGTHS
        )
        self._request_n = of_request("request_params_n", "The parameter n", _CHOICES)
        self._request_max_tokens = of_request(
            "request_params_max_tokens", "The parameter max_tokens", _LENGTHS
        )
        self._e2e_seconds = of_request(
            "e2e_request_latency_seconds", "Time from arrival to end", _REQUEST_SECONDS
        )
        self._queue_seconds = of_request(
            "request_queue_time_seconds", "Time waiting", _REQUEST_SECONDS
        )
        self._prefill_seconds = of_request(
            "request_prefill_time_seconds", "Time in prefill", _REQUEST_SECONDS
        )
        self._decode_seconds = of_request(
            "request_decode_time_seconds", "Time in decode", _REQUEST_SECONDS
        )
        self._inference_seconds = of_request(
            "request_inference_time_seconds", "Time in prefill and decode", _REQUEST_SECONDS
        )
        self._seconds_per_token = of_request(
            "request_time_per_output_token_seconds",
            "Mean time for each token after the first",
            _TOKEN_SECONDS,
        )

    def _make_own_series(self) -> None:
        self._memory = Gauge(
            "moejax:memory_bytes",
            "Device memory by kind of use.",
            (*_LABELS, "kind"),
            registry=self._registry,
        )
        compiles = Counter(
            "moejax:jit_compiles",
            "Programs compiled; in the phase serving, a request waited for it.",
            (*_LABELS, "phase"),
            registry=self._registry,
        )
        self._compiles = {
            phase: compiles.labels(*self._own, phase) for phase in ("warmup", "serving")
        }
        self._kv_blocks_capacity = self._gauge(
            "moejax:kv_blocks_capacity", "Blocks of the KV cache that there may be at present."
        )
        self._startup = Gauge(
            "moejax:startup_phase_seconds",
            "Time that each part of the start took.",
            (*_LABELS, "phase"),
            registry=self._registry,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self._registry).labels(*self._own)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self._registry).labels(*self._own)

    def _histogram(self, name: str, text: str, edges: Iterable[int | float]) -> Histogram:
        series = Histogram(name, text, _LABELS, buckets=tuple(edges), registry=self._registry)
        return series.labels(*self._own)


class _CacheConfig:
    """A series whose value is always 1: its labels are what it tells."""

    def __init__(self, own: tuple[str, str]) -> None:
        self.settings: Mapping[str, str] | None = None
        self._own = own

    def describe(self) -> list[Any]:
        return [self._family({})]

    def collect(self) -> list[Any]:
        settings = self.settings
        family = self._family(settings or {})
        if settings is not None:
            family.add_metric([*self._own, *settings.values()], 1.0)
        return [family]

    def _family(self, settings: Mapping[str, str]) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "vllm:cache_config_info", "Settings of the KV cache.", labels=[*_LABELS, *settings]
        )
