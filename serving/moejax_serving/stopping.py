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


class StopMatcher:
    """Looks for one string in a text that grows, a character at a time.

    The algorithm of Knuth, Morris and Pratt (1977): the work for a character does not grow with the
    text, nor with the string.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Characters at the end of the text with which the string begins."""
        self._fallback = [0] * (len(stop) + 1)
        for end in range(1, len(stop)):
            self._fallback[end + 1] = self._next(self._fallback[end], stop[end])

    def _next(self, matched: int, character: str) -> int:
        while matched and (matched == len(self.stop) or self.stop[matched] != character):
            matched = self._fallback[matched]
        return matched + (self.stop[matched] == character)

    def push(self, text: str) -> int | None:
        """Adds text; how many of its characters end the first occurrence, None if there is none."""
        for count, character in enumerate(text, 1):
            self.num_matched = self._next(self.num_matched, character)
            if self.num_matched == len(self.stop):
                return count
        return None


class RunningText:
    """The text of a growing output; finds stop strings that reach over token borders."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: SequenceOf[int]
    ) -> None:
        self._stream = tokenizer.detokenizer(params.skip_special_tokens, prompt_token_ids)
        self._matchers = [StopMatcher(stop) for stop in params.stop_strings]
        self._keep_stop = params.include_stop_str_in_output
        self._parts: list[str] = []
        self._length = 0
        self._num_taken = 0
        self._end: int | None = None

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Adds a token; returns the stop string that the text now holds, if it does.

        A stop string that begins in text that may not stop does not count.
        """
        return self._add(self._stream.push(token), may_stop)

    def _add(self, text: str, may_stop: bool) -> str | None:
        before = self._length
        self._parts.append(text)
        self._length += len(text)
        if not may_stop:
            return None
        found = []
        for matcher in self._matchers:
            count = matcher.push(text)
            if count is not None:
                found.append((before + count - len(matcher.stop), matcher.stop))
        if not found:
            return None
        at, stop = min(found)
        self._end = at + len(stop) * self._keep_stop
        return stop

    def take(self, *, is_final: bool = False) -> str:
        """The text since the last call; but for the final one, without what may begin a stop."""
        if is_final:
            self._finish()
        held = 0 if is_final else max((m.num_matched for m in self._matchers), default=0)
        end = self._length - held if self._end is None else self._end
        text = "".join(self._parts)
        start = self._length - len(text)
        # What was taken is dropped: a long text is not gone through again for each token.
        taken = text[self._num_taken - start : max(end - start, 0)]
        self._num_taken += len(taken)
        self._parts = [text[self._num_taken - start :]]
        return taken

    def _finish(self) -> None:
        if self._end is None:
            rest = self._stream.finish()
            self._parts.append(rest)
            self._length += len(rest)


def find_finish(sequence: Sequence, token: int, eos_token_ids: tuple[int, ...]) -> Finish | None:
    """Whether a sequence ends with this token, its newest. Its text does not hold a stop token."""
    params, text = sequence.params, sequence.text
    may_stop = len(sequence.output_token_ids) > params.min_tokens
    is_eos = may_stop and not params.ignore_eos and token in eos_token_ids
    is_stop = is_eos or (may_stop and token in params.stop_ids)
    stop = None
    if text is not None and (not is_stop or params.include_stop_str_in_output):
        stop = text.push(token, may_stop=may_stop)
    if is_stop:
        return Finish("stop", None if is_eos else token)
    if stop is not None:
        return Finish("stop", stop)
    if len(sequence.output_token_ids) >= sequence.max_tokens:
        return Finish("length", None)
    return None
