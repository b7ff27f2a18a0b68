"""When a sequence ends, and the text that it has made so far."""

import dataclasses
from typing import Literal

from moejax_serving.sampling_params import SamplingParams
from moejax_serving.sequence import Sequence
from moejax_serving.tokenizer import Detokenizer, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended; `stop` is the stop string or the stop token of the request."""

    reason: Literal["stop", "length"]
    stop: int | str | None


class RunningText:
    """The text of a growing output; finds stop strings that reach over token borders."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stream: Detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self._ids: list[int] = []
        self._text = ""
        self._end: int | None = None

    def push(self, token: int) -> str | None:
        """Adds a token; returns the stop string that the text now holds, if it does."""
        self._ids.append(token)
        longest = max(map(len, self._params.stop_strings), default=0)
        start = max(0, len(self._text) - longest + 1)
        self._text += self._stream.push(token)
        found = [
            (at, stop)
            for stop in self._params.stop_strings
            if (at := self._text.find(stop, start)) >= 0
        ]
        if not found:
            return None
        at, stop = min(found)
        self._end = at + len(stop) * self._params.include_stop_str_in_output
        return stop

    def final(self, finish: Finish) -> str:
        """The whole text: without the stop token, cut at the stop string."""
        if self._end is not None:
            return self._text[: self._end]
        ids = self._ids
        by_token = finish.reason == "stop"
        if by_token and not self._params.include_stop_str_in_output:
            ids = ids[:-1]
        return self._tokenizer.decode(ids, self._params.skip_special_tokens)


def find_finish(sequence: Sequence, token: int, eos_token_ids: tuple[int, ...]) -> Finish | None:
    """Whether a sequence ends with this token, its newest."""
    params = sequence.params
    stop = sequence.text.push(token) if sequence.text is not None else None
    if not params.ignore_eos and token in eos_token_ids:
        return Finish("stop", None)
    if token in params.stop_ids:
        return Finish("stop", token)
    if stop is not None:
        return Finish("stop", stop)
    if len(sequence.output_token_ids) >= sequence.max_tokens:
        return Finish("length", None)
    return None
