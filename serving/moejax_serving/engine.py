"""The engine: takes requests, runs steps, gives back results. One thread calls it."""

import dataclasses
import logging
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from moejax.errors import CapacityError, RequestError
from moejax.models.step import StepOutput
from moejax.sampling import Logprobs
from moejax_serving.batch import Buckets, make_control
from moejax_serving.config import EngineConfig
from moejax_serving.memory import MemoryPlan
from moejax_serving.outputs import CompletionOutput, Logprob, RequestOutput
from moejax_serving.pages import KvBlock, PagePool
from moejax_serving.runner import Runner
from moejax_serving.sampling_params import SamplingParams, read_token_ids, show
from moejax_serving.scheduler import RowPlan, Scheduler, StepPlan
from moejax_serving.sequence import Sequence
from moejax_serving.stopping import Finish, RunningText, find_finish
from moejax_serving.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the engine knows of the model beside its weights."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]
    """What a request leaves out, from the checkpoint's generation settings."""
    tokenizer: Tokenizer | None


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
    ) -> None:
        self.model = model
        self.memory = memory
        self._config = config
        self._pages = pages
        self._scheduler = scheduler
        self._buckets = buckets
        self._runner = runner
        self._sequences: dict[str, Sequence] = {}
        self._num_requests = 0

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

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Any,
        params: SamplingParams,
        prompt: str | None = None,
        *,
        forced_token_ids: Any = (),
    ) -> None:
        """Queues a request.

        Args:
            request_id: unique among the requests that have not finished.
            prompt_token_ids: 1 to max_model_len - 1 token ids.
            params: how to sample, and when to stop.
            prompt: the text, given back with the result.
            forced_token_ids: these tokens are taken instead of sampled ones, and their
                log-probabilities given back; the request ends with them.

        Raises:
            RequestError: the request is wrong.
            CapacityError: it could not run even alone.
        """
        ids = read_token_ids("prompt_token_ids", prompt_token_ids)
        forced = read_token_ids("forced_token_ids", forced_token_ids)
        self._check_request(request_id, ids, params, forced)
        room = self.max_model_len - len(ids)
        wanted = len(forced) or params.max_tokens
        self._num_requests += 1
        seed = params.seed
        sequence = Sequence(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=ids,
            params=params,
            max_tokens=min(wanted, room),
            seed=_mix(self._config.seed, self._num_requests) if seed is None else seed,
            forced_token_ids=tuple(forced),
        )
        if self.tokenizer is not None and params.detokenize:
            sequence.text = RunningText(self.tokenizer, params, ids)
        self._scheduler.add(sequence)
        self._sequences[request_id] = sequence

    def _check_request(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        forced: SequenceOf[int],
    ) -> None:
        if request_id in self._sequences:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        if not ids:
            raise RequestError("the prompt has no tokens", param="prompt")
        if len(ids) >= self.max_model_len:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens; with one token of output it must fit "
                f"into max_model_len = {self.max_model_len}"
            )
        if len(ids) + len(forced) > self.max_model_len:
            raise CapacityError(
                f"{len(ids)} prompt and {len(forced)} forced tokens do not fit into "
                f"max_model_len = {self.max_model_len}"
            )
        wrong = [i for i in [*ids, *forced] if not 0 <= i < self.model.vocab_size]
        if wrong:
            raise RequestError(
                f"token id {show(wrong[0])} is not in the vocabulary of {self.model.vocab_size}",
                param="prompt",
            )
        for token in params.stop_ids:
            if token >= self.model.vocab_size:
                raise RequestError(
                    f"stop_token_ids: {token} is not in the vocabulary of {self.model.vocab_size}",
                    param="stop_token_ids",
                )
        if params.stop_strings and (self.tokenizer is None or not params.detokenize):
            raise RequestError("stop strings need a tokenizer and detokenize=True", param="stop")

    def has_unfinished(self) -> bool:
        """Whether a call of `step` would do something."""
        return bool(self._sequences)

    def abort(self, request_id: str) -> None:
        """Drops a request, if it has not finished."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._release(sequence)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that it finished."""
        plan = self._scheduler.plan()
        if plan is None:
            return []
        output = self._runner.run(make_control(plan), self._buckets.choose(plan))
        finished = self._take(plan, output)
        if self._config.check:
            self.check()
        return finished

    def check(self) -> None:
        """Raises if pages or blocks do not add up."""
        self._scheduler.check()
        self._pages.check()

    def _take(self, plan: StepPlan, output: StepOutput) -> list[RequestOutput]:
        finished = []
        place = 0
        for i, row in enumerate(plan.rows):
            sequence = row.sequence
            if output.targets is not None and sequence.params.prompt_logprobs is not None:
                self._add_prompt_logprobs(row, place, output.targets)
            place += row.count
            sequence.num_cached = row.start + row.count
            if not row.sample:
                continue
            token = int(output.tokens[i])
            self._add_token(sequence, token, i, output.logprobs)
            finish = self._finish(sequence, token)
            if not output.finite[i]:
                logger.error("request %s: the logits are not finite", sequence.request_id)
                finish = Finish("error", None)
            if finish is not None:
                self._sequences.pop(sequence.request_id)
                self._release(sequence)
                finished.append(make_output(sequence, finish))
        return finished

    def _finish(self, sequence: Sequence, token: int) -> Finish | None:
        if sequence.forced_token_ids:
            done = len(sequence.output_token_ids) == sequence.max_tokens
            return Finish("length", None) if done else None
        return find_finish(sequence, token, self.model.eos_token_ids)

    def _release(self, sequence: Sequence) -> None:
        freed: list[KvBlock] = self._scheduler.finish(sequence)
        if self._config.check:
            self._runner.poison([page for block in freed for page in block.pages])

    def _add_prompt_logprobs(self, row: RowPlan, place: int, found: Logprobs) -> None:
        sequence = row.sequence
        entries = sequence.prompt_logprobs
        if not entries:
            entries.append(None)  # nothing comes before the first token
        for i in range(row.count):
            position = row.start + i + 1
            if position < len(sequence.prompt_token_ids):
                token = sequence.prompt_token_ids[position]
                wanted = sequence.params.prompt_logprobs or 0
                entries.append(self._logprobs(found, place + i, token, wanted))

    def _add_token(self, sequence: Sequence, token: int, row: int, found: Logprobs) -> None:
        sequence.output_token_ids.append(token)
        wanted = sequence.params.logprobs
        if wanted is None and not sequence.forced_token_ids:
            return
        entry = self._logprobs(found, row, token, wanted or 0)
        sequence.logprobs.append(entry)
        sequence.cumulative_logprob += entry[token].logprob

    def _logprobs(self, found: Logprobs, at: int, token: int, wanted: int) -> dict[int, Logprob]:
        """The token's entry first, then the likeliest ones."""
        entries = {token: self._logprob(found.logprob[at], found.rank[at], token)}
        for rank in range(min(wanted, found.top_ids.shape[1])):
            other = int(found.top_ids[at, rank])
            if other not in entries:
                entries[other] = self._logprob(found.top_logprobs[at, rank], rank + 1, other)
        return entries

    def _logprob(self, value: Any, rank: Any, token: int) -> Logprob:
        text = None if self.tokenizer is None else self.tokenizer.token_text(token)
        return Logprob(logprob=float(value), rank=int(rank), decoded_token=text)


def make_output(sequence: Sequence, finish: Finish) -> RequestOutput:
    """The result of a finished sequence."""
    params = sequence.params
    wanted = params.logprobs is not None or bool(sequence.forced_token_ids)
    completion = CompletionOutput(
        index=0,
        text=sequence.text.final() if sequence.text is not None else "",
        token_ids=list(sequence.output_token_ids),
        cumulative_logprob=sequence.cumulative_logprob if wanted else None,
        logprobs=list(sequence.logprobs) if wanted else None,
        finish_reason=finish.reason,
        stop_reason=finish.stop,
    )
    prompt_logprobs = list(sequence.prompt_logprobs) or [None]
    return RequestOutput(
        request_id=sequence.request_id,
        prompt=sequence.prompt,
        prompt_token_ids=list(sequence.prompt_token_ids),
        prompt_logprobs=None if params.prompt_logprobs is None else prompt_logprobs,
        outputs=[completion],
        finished=True,
        num_cached_tokens=None,
    )


def _mix(seed: int, number: int) -> int:
    """A seed for the n-th request: the same for the same order of requests."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
