"""The chunks of a streamed answer, written as events with as little work as possible."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from moejax_serving.job import Job, usage
from moejax_serving.outputs import CompletionOutput, RequestOutput
from moejax_serving.protocol import StreamOptions
from moejax_serving.sse import write_event

# All but ASCII is escaped: some clients take U+2028 or U+0085 in an event for the end of a line.
_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class ChunkWriter:
    """Writes the chunks of one answer, and counts its tokens."""

    def __init__(self, head: Mapping[str, Any], job: Job, options: StreamOptions | None) -> None:
        """`head` is what all chunks begin with."""
        self._has_usage = options is not None and options.include_usage is not False
        self._is_continuous = options is not None and options.continuous_usage_stats is True
        self._start = _dumps(head)[:-1] + ',"choices":['
        self._end = '],"usage":null}' if self._has_usage else "]}"
        self._prompt_lens = [len(prompt.token_ids) for prompt in job.prompts]
        self._num_generated: Counter[tuple[int, int]] = Counter()
        self._num_cached: dict[int, int] = {}

    def count(self, at: int, output: RequestOutput) -> None:
        """Counts what is new for prompt `at`."""
        for choice in output.outputs:
            self._num_generated[at, choice.index] += len(choice.token_ids)
        if output.num_cached_tokens is not None:
            self._num_cached[at] = output.num_cached_tokens

    def is_needed(self, choice: CompletionOutput) -> bool:
        """Whether a chunk for it would tell anything: a token may add no text yet."""
        if choice.text or choice.finish_reason is not None:
            return True
        return bool(choice.token_ids) and (self._is_continuous or choice.logprobs is not None)

    def write(self, at: int, choice: CompletionOutput, content: Mapping[str, Any]) -> str:
        """The event of a chunk with one choice; `content` is what the chunk says of it."""
        end = self._end
        if self._is_continuous:
            counts = usage(self._prompt_lens[at], self._num_generated[at, choice.index])
            end = f'],"usage":{_dumps(counts)}}}'
        return write_event(f"{self._start}{_dumps(content)}{end}")

    def write_last(self) -> str:
        """The event that ends the answer: the usage of all choices if it was asked for, else ""."""
        if not self._has_usage:
            return ""
        counts = usage(
            sum(self._prompt_lens),
            self._num_generated.total(),
            sum(self._num_cached.values()) if self._num_cached else None,
        )
        return write_event(f'{self._start}],"usage":{_dumps(counts)}}}')
