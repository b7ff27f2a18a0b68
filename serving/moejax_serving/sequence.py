"""The engine's side of one answer to a request: its tokens, its blocks, how far it has come."""

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from moejax_serving.kv_blocks import KvBlock
from moejax_serving.outputs import Logprob
from moejax_serving.sampling_params import SamplingParams

if TYPE_CHECKING:
    from moejax_serving.stopping import RunningText


@dataclasses.dataclass(slots=True, eq=False)
class SequenceKv:
    """What a sequence holds of one kind of KV."""

    first: int = 0
    """Index of the first block that it still holds: those before have left the window."""
    blocks: list[KvBlock] = dataclasses.field(default_factory=list)
    num_registered: int = 0
    """Blocks, from the start of the sequence, that have been offered to the prefix cache."""
    keys: list[bytes] = dataclasses.field(default_factory=list)
    """Of its blocks that are full of known tokens, as far as they are needed."""

    @property
    def end(self) -> int:
        """Index after that of the last block."""
        return self.first + len(self.blocks)


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of tokens that grows."""

    number: int
    """Of its arrival: what came first goes first."""
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    max_tokens: int
    """Output tokens after which it ends: the request's, or what the context leaves."""
    seed: int
    wants_prompt_logprobs: bool = False
    forced_token_ids: SequenceOf[int] = ()
    """Taken instead of sampled tokens."""
    uses_long_rope: bool = False
    """Which factors turn its tokens: it shares blocks with sequences of the same ones alone."""
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    is_finished: bool = False

    row: int | None = None
    """Its row of the block tables while it runs."""
    kv: tuple[SequenceKv, ...] = ()
    """Per kind, from when it is queued."""
    num_cached: int = 0
    """Tokens, from the start, whose KV is in the cache once the steps in flight have run."""
    num_pending: int = 0
    """Output tokens of steps in flight."""
    num_hits: int | None = None
    """Prompt tokens that were in the prefix cache when it was first admitted."""
    text: "RunningText | None" = None
    """Its running detokenisation, where there is a tokenizer."""

    @property
    def num_known(self) -> int:
        """Tokens whose ids are here."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that there are, those in flight included."""
        return self.num_known + self.num_pending

    @property
    def max_num_tokens(self) -> int:
        """Tokens that it can come to."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def num_made(self) -> int:
        """Output tokens, those in flight included."""
        return len(self.output_token_ids) + self.num_pending

    @property
    def num_left(self) -> int:
        """Tokens that a step could process now: none once the last one is on its way."""
        return 0 if self.num_made >= self.max_tokens else self.num_tokens - self.num_cached

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens of prompt and output from position start to end."""
        prompt = len(self.prompt_token_ids)
        return [
            *self.prompt_token_ids[start:end],
            *self.output_token_ids[max(start - prompt, 0) : max(end - prompt, 0)],
        ]
