"""The engine's side of a request: its tokens, its blocks, how far it has come."""

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from moejax_serving.outputs import Logprob
from moejax_serving.pages import KvBlock
from moejax_serving.sampling_params import SamplingParams

if TYPE_CHECKING:
    from moejax_serving.stopping import RunningText


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Output tokens after which it ends: the request's, or what the context leaves."""
    seed: int
    forced_token_ids: SequenceOf[int] = ()
    """Taken instead of sampled tokens."""
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    row: int | None = None
    """Its row of the block tables while it runs."""
    blocks: list[KvBlock] = dataclasses.field(default_factory=list)
    num_cached: int = 0
    """Tokens whose KV is in the cache, from the start."""
    text: "RunningText | None" = None
    """Its running detokenisation, where there is a tokenizer."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Tokens that it can come to."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def in_prefill(self) -> bool:
        """Whether prompt tokens are yet to be processed."""
        return self.num_cached < len(self.prompt_token_ids)

    def token(self, position: int) -> int:
        """The token at a position, of prompt or output."""
        prompt = len(self.prompt_token_ids)
        if position < prompt:
            return self.prompt_token_ids[position]
        return self.output_token_ids[position - prompt]
