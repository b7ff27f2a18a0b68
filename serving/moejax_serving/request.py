"""A request inside the engine: its sequences, its times, and what is given back of it."""

import dataclasses

from moejax_serving.metrics import FinishedRequest
from moejax_serving.outputs import CompletionOutput, FinishReason, RequestOutput
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.sequence import Sequence
from moejax_serving.stopping import Finish


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One request; `params.n` sequences answer it. Times are of one clock, in seconds."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    arrival: float
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    finishes: dict[int, Finish] = dataclasses.field(default_factory=dict)
    """By index of the sequence."""
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_sent: list[int] = dataclasses.field(default_factory=list)
    """Of a stream: tokens of each sequence that were given out."""
    has_sent_prompt: bool = False

    @property
    def is_finished(self) -> bool:
        return len(self.finishes) == len(self.sequences)

    def output(self) -> RequestOutput:
        """The whole of a finished request."""
        choices = [self._choice(i, start=0) for i in range(len(self.sequences))]
        return self._output(choices, with_prompt=True)

    def delta(self, indices: list[int]) -> RequestOutput:
        """What is new of some sequences of a stream."""
        choices = []
        for i in indices:
            choices.append(self._choice(i, start=self.num_sent[i]))
            self.num_sent[i] += len(choices[-1].token_ids)
        output = self._output(choices, with_prompt=not self.has_sent_prompt)
        self.has_sent_prompt = True
        return output

    def _choice(self, index: int, start: int) -> CompletionOutput:
        sequence, finish = self.sequences[index], self.finishes.get(index)
        wanted = self.params.logprobs is not None or bool(sequence.forced_token_ids)
        text = ""
        if sequence.text is not None:
            text = sequence.text.take(is_final=finish is not None)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=sequence.output_token_ids[start:],
            cumulative_logprob=sequence.cumulative_logprob if wanted else None,
            logprobs=sequence.logprobs[start:] if wanted else None,
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop,
        )

    def _output(self, choices: list[CompletionOutput], *, with_prompt: bool) -> RequestOutput:
        wanted = with_prompt and self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=list(self.sequences[0].prompt_logprobs) if wanted else None,
            outputs=choices,
            finished=self.is_finished,
            num_cached_tokens=self.num_cached_tokens,
        )

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self.sequences[0].num_hits or 0

    def summary(self, reason: FinishReason, now: float) -> FinishedRequest:
        """What is counted of a request that has ended."""
        scheduled = now if self.scheduled is None else self.scheduled
        first = now if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        lengths = [len(sequence.output_token_ids) for sequence in self.sequences]
        return FinishedRequest(
            finish_reason=reason,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_generation_tokens=sum(lengths),
            num_cached_tokens=self.num_cached_tokens,
            n=len(self.sequences),
            max_tokens=self.params.max_tokens,
            e2e_seconds=now - self.arrival,
            queue_seconds=scheduled - self.arrival,
            prefill_seconds=first - scheduled,
            decode_seconds=last - first,
            inference_seconds=last - scheduled,
            seconds_per_token=(last - first) / (max(lengths) - 1) if max(lengths) > 1 else None,
            num_longest_tokens=max(lengths),
        )
