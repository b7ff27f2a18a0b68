"""What comes back for a request, in the shapes of vLLM's classes of the same names."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token that was chosen, or might have been, at one position."""

    logprob: float
    rank: int | None = None
    """1 for the likeliest token of the position."""
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    """Sum over `token_ids`; None unless log-probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`: by token id, the chosen token and the likeliest ones."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the sequence; None if the model's own end did."""

    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of a request: its prompt and what was generated so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """For each prompt token; None for the first one, which nothing predicts."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    """Prompt tokens whose keys and values were found in the prefix cache."""
