"""When a sequence ends, and the text that it has made so far."""

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import Literal

from moejax_serving.sampling_params import SamplingParams
from moejax_serving.sequence import Sequence
from moejax_serving.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended; `stop` is the stop string or the stop token of the request."""

    reason: Literal["stop", "length", "error"]
    stop: int | str | None


class RunningText:
    """The text of a growing output; finds stop strings that reach over token borders."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: SequenceOf[int]
    ) -> None:
        self._stream = tokenizer.detokenizer(params.skip_special_tokens, prompt_token_ids)
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._text = ""
        self._end: int | None = None

    def push(self, token: int) -> str | None:
        """Adds a token; returns the stop string that the text now holds, if it does."""
        return self._add(self._stream.push(token))

    def _add(self, text: str) -> str | None:
        # A stop string that is new ends in the new text: each is looked for as far back as it
        # reaches, whatever the others need.
        before = len(self._text)
        self._text += text
        found = [
            (self._text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops
        ]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            return None
        at, stop = min(found)
        self._end = at + len(stop) * self._keep_stop
        return stop

    def final(self) -> str:
        """The whole text, cut at the stop string if there is one."""
        if self._end is None:
            self._text += self._stream.finish()
        return self._text[: self._end]


def find_finish(sequence: Sequence, token: int, eos_token_ids: tuple[int, ...]) -> Finish | None:
    """Whether a sequence ends with this token, its newest. Its text does not hold a stop token."""
    params, text = sequence.params, sequence.text
    is_eos = not params.ignore_eos and token in eos_token_ids
    is_stop = is_eos or token in params.stop_ids
    stop = None
    if text is not None and (not is_stop or params.include_stop_str_in_output):
        stop = text.push(token)
    if is_stop:
        return Finish("stop", None if is_eos else token)
    if stop is not None:
        return Finish("stop", stop)
    if len(sequence.output_token_ids) >= sequence.max_tokens:
        return Finish("length", None)
    return None
