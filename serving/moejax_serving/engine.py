"""The engine: takes requests, runs steps, gives back results. One thread calls it.

The device is one step ahead: while it runs a step, the host plans the next one and hands it over,
then takes the results of the first. A sequence that ended in it has a place in the next step for
nothing; whatever that place yields is dropped.
"""

import dataclasses
import logging
import time
from typing import Any

import numpy as np

from moejax.errors import CapacityError, RequestError
from moejax.models.choice import StepOutput
from moejax.models.step import Bucket
from moejax.sampling import Logprobs
from moejax_serving.admission import ServedModel, check_request
from moejax_serving.batch import Buckets, make_control, places, wants_targets
from moejax_serving.compiles import num_compiles
from moejax_serving.config import EngineConfig
from moejax_serving.logprob_entries import make_entry
from moejax_serving.memory import MemoryPlan
from moejax_serving.metrics import Metrics
from moejax_serving.outputs import FinishReason, RequestOutput
from moejax_serving.pages import PagePool
from moejax_serving.request import Request
from moejax_serving.runner import Flight, Runner
from moejax_serving.sampling_params import SamplingParams, read_token_ids
from moejax_serving.scheduler import Counts, RowPlan, Scheduler, StepPlan
from moejax_serving.sequence import Sequence
from moejax_serving.stopping import Finish, RunningText, find_finish
from moejax_serving.throughput import Throughput
from moejax_serving.tokenizer import Tokenizer
from moejax_serving.trader import Trader

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that the device has, and what it is of."""

    plan: StepPlan
    bucket: Bucket
    flight: Flight


class Engine:
    """Runs requests together. `load_engine` makes one."""

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig,
        *,
        memory: MemoryPlan,
        pages: PagePool,
        scheduler: Scheduler,
        buckets: Buckets,
        runner: Runner,
        metrics: Metrics,
        trader: Trader | None = None,
    ) -> None:
        """`trader`: what changes the widths of experts while requests run, if anything does."""
        self.model = model
        self.memory = memory
        self.metrics = metrics
        self._config = config
        self._pages = pages
        self._scheduler = scheduler
        self._buckets = buckets
        self._runner = runner
        self._trader = trader
        self._requests: dict[str, Request] = {}
        self._owners: dict[Sequence, tuple[Request, int]] = {}
        self._in_flight: _InFlight | None = None
        self._num_requests = 0
        self._num_sequences = 0
        self._num_compiles = num_compiles()
        self._throughput = Throughput(since=time.monotonic())
        self._poisoned: set[int] = set()
        # Of the step whose results are being taken.
        self._prompt_tokens = self._generation_tokens = 0

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def default_sampling(self) -> dict[str, Any]:
        return self.model.default_sampling

    def warm_up(self, *, progress: bool) -> None:
        """Compiles all programs, so that no request waits for one."""
        self._runner.warm_up(
            self._buckets.all(),
            shipment_pages=0 if self._trader is None else self._trader.shipment_pages,
            with_poison=self._config.check,
            progress=progress,
        )
        self.metrics.count_compiles("warmup", num_compiles() - self._num_compiles)
        self._num_compiles = num_compiles()

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Any,
        params: SamplingParams,
        prompt: str | None = None,
        *,
        stream: bool = False,
        forced_token_ids: Any = (),
    ) -> None:
        """Queues a request.

        Args:
            request_id: unique among the requests that have not finished.
            prompt_token_ids: 1 to max_model_len - 1 token ids.
            params: how to sample, and when to stop.
            prompt: the text, given back with the result.
            stream: `step` gives back what is new after every step; otherwise all at the end.
            forced_token_ids: these tokens are taken instead of sampled ones, and their
                log-probabilities given back; the request ends with them.

        Raises:
            RequestError: the request is wrong.
            CapacityError: it could not run even alone.
        """
        ids = read_token_ids("prompt_token_ids", prompt_token_ids)
        forced = read_token_ids("forced_token_ids", forced_token_ids)
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        check_request(self.model, ids, params, forced)
        request = Request(request_id, prompt, ids, params, stream, time.monotonic())
        self._num_requests += 1
        seed = params.seed
        if seed is None:
            seed = _mix(self._config.seed, self._num_requests)
        try:
            for index in range(params.n):
                sequence = self._make_sequence(request, forced, seed, index)
                self._scheduler.add(sequence)
                request.sequences.append(sequence)
                request.num_sent.append(0)
                self._owners[sequence] = request, index
        except CapacityError:
            self._drop(request)
            raise
        self._requests[request_id] = request

    def _make_sequence(
        self, request: Request, forced: list[int], seed: int, index: int
    ) -> Sequence:
        params, ids = request.params, request.prompt_token_ids
        room = self.max_model_len - len(ids)
        max_tokens = len(forced) or min(params.max_tokens, room)
        wants_prompt = params.prompt_logprobs is not None and index == 0
        sequence = Sequence(
            number=self._num_sequences,
            prompt_token_ids=ids,
            params=params,
            max_tokens=max_tokens,
            # The last token is only given out: no step processes it.
            uses_long_rope=self.model.uses_long_rope(len(ids) + max_tokens - 1),
            seed=(seed + index + 2**63) % 2**64 - 2**63,
            wants_prompt_logprobs=wants_prompt,
            forced_token_ids=forced,
            prompt_logprobs=[None] if wants_prompt else [],  # nothing comes before the first token
        )
        self._num_sequences += 1
        if self.tokenizer is not None and params.detokenize:
            sequence.text = RunningText(self.tokenizer, params, ids)
        return sequence

    def has_unfinished(self) -> bool:
        """Whether a call of `step` would do something."""
        return bool(self._requests) or self._in_flight is not None

    def abort(self, request_id: str) -> None:
        """Drops a request, if it has not finished."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._drop(request)
            self.metrics.observe_request(request.summary("abort", time.monotonic()))
            self._show_queue()

    def _drop(self, request: Request) -> None:
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._scheduler.finish(sequence)
                del self._owners[sequence]

    def step(self) -> list[RequestOutput]:
        """Plans a step and hands it to the device; then takes the results of the step before.

        Returns:
            Requests that finished, and what is new of streams.
        """
        before = self._in_flight
        try:
            self._in_flight = self._start()
            if before is None and self._in_flight is None and self._requests:
                raise AssertionError("requests wait, and nothing can run")
            output = None if before is None else before.flight.wait()
        except BaseException:
            # Nothing is lost but the step: all that ran is computed again, if the arena is there.
            self._in_flight = None
            self._scheduler.restart()
            raise
        outputs = [] if before is None or output is None else self._take(before, output)
        self._count()
        if self._config.check:
            self.check()
            self._poison(self._pages.unowned() - self._poisoned)
        return outputs

    def close(self) -> None:
        """Drops all requests and waits for the device: a step must not outlive the process."""
        for request_id in list(self._requests):
            self.abort(request_id)
        while self.has_unfinished():
            self.step()

    def check(self) -> None:
        """Raises if pages or blocks do not add up."""
        self._scheduler.check()
        self._pages.check()
        if self._trader is not None:
            self._trader.check()

    def _start(self) -> _InFlight | None:
        if self._trader is not None:
            self._trader.before_step(self._scheduler.num_available_pages)
        plan = self._scheduler.plan()
        if plan is None:
            return None
        if self._config.check:
            self._poison({page for block in plan.new_blocks for page in block.pages})
            self._poisoned &= self._pages.unowned()
        now = time.monotonic()
        for row in plan.rows:
            if row.starts_row:
                self._start_row(row.sequence, now)
        bucket = self._buckets.choose(plan)
        edits = () if self._trader is None else self._trader.take_edits()
        try:
            flight = self._runner.start(
                make_control(plan, bucket, edits), bucket, with_targets=wants_targets(plan)
            )
        except BaseException:
            if self._trader is not None:
                self._trader.give_back_edits(edits)
            raise
        return _InFlight(plan, bucket, flight)

    def _start_row(self, sequence: Sequence, now: float) -> None:
        request, _ = self._owners[sequence]
        request.scheduled = request.scheduled or now
        params = sequence.params
        if params.changes_logits:
            if sequence.row is None:
                raise AssertionError("a sequence without a row is in a step")
            eos = () if params.ignore_eos else self.model.eos_token_ids
            self._runner.mark_row(
                sequence.row,
                prompt=sequence.prompt_token_ids,
                output=sequence.output_token_ids,
                stops=(*eos, *params.stop_ids),
                biases=params.biases,
            )

    def _poison(self, pages: set[int]) -> None:
        self._poisoned |= pages
        self._runner.poison(sorted(pages))

    def _take(self, done: _InFlight, output: StepOutput) -> list[RequestOutput]:
        """Gives a step's results to the sequences that are still there."""
        now = time.monotonic()
        news: dict[Request, list[int]] = {}
        first_places = np.cumsum([0, *(row.count for row in done.plan.prefill)])
        for i, row in places(done.plan, done.bucket):
            sequence = row.sequence
            sequence.num_pending -= row.sample
            if sequence.is_finished:
                continue
            is_prefill = i < len(done.plan.prefill)
            if output.targets is not None and sequence.wants_prompt_logprobs and is_prefill:
                self._add_prompt_logprobs(row, int(first_places[i]), output.targets)
            if row.sample:
                request, index = self._owners[sequence]
                self._add_token(request, index, i, output, now)
                news.setdefault(request, []).append(index)
        return [
            found
            for request, indices in news.items()
            if (found := self._output(request, indices, now)) is not None
        ]

    def _add_token(
        self, request: Request, index: int, row: int, output: StepOutput, now: float
    ) -> None:
        sequence = request.sequences[index]
        token = int(output.tokens[row])
        sequence.output_token_ids.append(token)
        if output.logprobs is not None:
            self._add_logprobs(sequence, token, row, output.logprobs)
        finish = self._finish(sequence, token)
        is_broken = not output.finite[row]
        if is_broken:
            logger.error("request %s: the logits are not finite", request.request_id)
            self.metrics.count_corrupted()
            finish = Finish("error", None)
        self._scheduler.offer(sequence)
        if finish is not None:
            self._scheduler.finish(sequence, is_broken=is_broken)
            request.finishes[index] = finish
            del self._owners[sequence]
        if request.first_token is None:
            request.first_token = now
            self.metrics.observe_first_token(now - request.arrival)
            self._prompt_tokens += len(request.prompt_token_ids)
        elif len(sequence.output_token_ids) > 1 and request.last_token is not None:
            self.metrics.observe_inter_token(now - request.last_token)
        self._generation_tokens += 1

    def _output(self, request: Request, indices: list[int], now: float) -> RequestOutput | None:
        """What is to be given back after a step with tokens of these sequences."""
        request.last_token = now
        if request.is_finished:
            del self._requests[request.request_id]
            self.metrics.observe_request(request.summary(_reason(request), now))
        if request.stream:
            return request.delta(indices)
        return request.output() if request.is_finished else None

    def _count(self) -> None:
        """Brings the metrics up to date."""
        counts, self._scheduler.counts = self._scheduler.counts, Counts()
        if counts.preemptions:
            self.metrics.count_preemptions(counts.preemptions)
        if counts.prefix_queries:
            self.metrics.count_prefix_cache(counts.prefix_queries, counts.prefix_hits)
        if self._prompt_tokens or self._generation_tokens:
            self.metrics.count_step(self._prompt_tokens, self._generation_tokens)
            self._throughput.count(self._prompt_tokens, self._generation_tokens)
            self._prompt_tokens = self._generation_tokens = 0
        if (compiles := num_compiles()) != self._num_compiles:
            self.metrics.count_compiles("serving", compiles - self._num_compiles)
            self._num_compiles = compiles
        running, waiting, kv_usage = self._show_queue()
        self._throughput.report(
            time.monotonic(), running=running, waiting=waiting, kv_usage=kv_usage
        )

    def _show_queue(self) -> tuple[int, int, float]:
        scheduler = self._scheduler
        queue = len(scheduler.running), len(scheduler.waiting), scheduler.kv_usage
        self.metrics.set_queue(*queue)
        return queue

    def _finish(self, sequence: Sequence, token: int) -> Finish | None:
        if sequence.forced_token_ids:
            done = len(sequence.output_token_ids) == sequence.max_tokens
            return Finish("length", None) if done else None
        return find_finish(sequence, token, self.model.eos_token_ids)

    def _add_prompt_logprobs(self, row: RowPlan, place: int, found: Logprobs) -> None:
        sequence = row.sequence
        entries = sequence.prompt_logprobs
        wanted = sequence.params.prompt_logprobs or 0
        for i in range(row.count):
            position = row.start + i + 1
            # A sequence that was preempted comes by its first positions once more.
            if position == len(entries) and position < len(sequence.prompt_token_ids):
                token = sequence.prompt_token_ids[position]
                entries.append(make_entry(found, place + i, token, wanted, self.tokenizer))

    def _add_logprobs(self, sequence: Sequence, token: int, row: int, found: Logprobs) -> None:
        wanted = sequence.params.logprobs
        if wanted is None and not sequence.forced_token_ids:
            return
        entry = make_entry(found, row, token, wanted or 0, self.tokenizer)
        sequence.logprobs.append(entry)
        sequence.cumulative_logprob += entry[token].logprob


def _reason(request: Request) -> FinishReason:
    """Of all sequences of a finished request: what went wrong, if anything did."""
    reasons = [finish.reason for finish in request.finishes.values()]
    return next((reason for reason in ("error", "length") if reason in reasons), "stop")


def _mix(seed: int, number: int) -> int:
    """A seed for the n-th request: the same for the same order of requests."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
