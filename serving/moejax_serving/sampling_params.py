"""How the tokens of one request are chosen: vLLM's names and defaults, checked when made."""

import dataclasses
import numbers
import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, no_type_check

from moejax.errors import RequestError

MAX_LOGPROBS = 20
"""The most alternatives per token that a request may ask for."""

MAX_STOPS = 16
"""The most stop strings of a request: each is looked for after every token."""

MAX_STOP_LEN = 1024
"""The most characters of a stop string."""

MAX_STOP_TOKEN_IDS = 1024
"""The most stop tokens of a request."""

MAX_LOGIT_BIAS = 1024
"""The most tokens whose logits a request may change."""

MAX_N = 128
"""The most answers to one prompt."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "bad_words": ([], ()),
    "allowed_token_ids": (),
}
"""What is not done yet, with the values besides None that ask for nothing; others are refused."""

_FLOATS = {
    "temperature": (0.0, 1e9),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.001, 1000.0),
}
_INTS = {
    "n": (1, MAX_N),
    "top_k": (-1, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_MAY_BE_NONE = ("seed", "logprobs", "prompt_logprobs")
_BOOLS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize")


@no_type_check  # The values come from callers: __post_init__ checks them, and says which is wrong.
@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. A wrong value is a `RequestError` that names it."""

    n: int = 1
    """Answers to the prompt; the seed of the i-th is `seed` + i."""
    temperature: float = 1.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """Choose among this many tokens; 0 and -1 (stored as 0): among all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one."""
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    """Stored as a tuple; `stop_strings` is that tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Stored as a tuple; `stop_ids` is that tuple."""
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    """Before these, neither a token that ends the sequence nor a stop string counts."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of this many of the likeliest ones."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    best_of: int | None = None
    use_beam_search: bool = False
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the output holds."""
    frequency_penalty: float = 0.0
    """Taken off as many times as the output holds the token."""
    repetition_penalty: float = 1.0
    """Divides the logits above 0, and multiplies those below, of tokens of prompt and output."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens. Stored as a tuple of pairs; `biases` is that tuple."""
    structured_outputs: Any = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in NEUTRAL:
            refuse_unless_neutral(name, getattr(self, name))
        checked: dict[str, Any] = {}
        for name, (low, high) in _FLOATS.items():
            checked[name] = _check_float(name, getattr(self, name), low, high)
        for name, (low, high) in _INTS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                checked[name] = _check_int(name, value, low, high)
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "true or false", getattr(self, name))
        checked["stop"] = _check_stop(self.stop)
        checked["stop_token_ids"] = _check_stop_token_ids(self.stop_token_ids)
        if checked["top_p"] == 0.0:
            raise _wrong("top_p", "more than 0", self.top_p)
        if checked["min_tokens"] > checked["max_tokens"]:
            raise _wrong("min_tokens", f"at most max_tokens = {self.max_tokens}", self.min_tokens)
        checked["logit_bias"] = _check_logit_bias(self.logit_bias)
        checked["top_k"] = max(checked["top_k"], 0)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the text."""
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end the sequence, besides the model's own."""
        return tuple(self.stop_token_ids or ())

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """(token id, what is added to its logit), in the order of the ids."""
        pairs: Any = self.logit_bias or ()
        return tuple(pairs)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, biases or a minimal length change logits before the choice."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or self.min_tokens > 0
            or bool(self.logit_bias)
        )


def refuse_unless_neutral(
    name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> None:
    """Raises a `RequestError` if `value` asks for something that is not done yet."""
    # An array compares element by element: it asks for something, whatever it holds.
    is_plain = isinstance(value, numbers.Number | str | Sequence | Mapping)
    if value is None or (is_plain and any(value == allowed for allowed in neutral[name])):
        return
    instead = f" or pass {neutral[name][0]!r}" if neutral[name] else ""
    raise RequestError(f"{name}={show(value)} is not supported: leave it out{instead}", param=name)


def read_token_ids(name: str, ids: Any) -> list[int]:
    """Token ids as a list; a list, a tuple or an array of integers is taken.

    Raises:
        RequestError: it is something else, or holds something else.
    """
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes | bytearray):
        raise _wrong(name, "a list of integers", ids)
    return [_read_token_id(name, index, token_id) for index, token_id in enumerate(listed)]


def show(value: Any) -> str:
    """A short form of any value, for a message."""
    try:
        return reprlib.repr(value)
    except Exception:  # an integer of more digits than Python prints, or a caller's own class
        return f"a value of type {type(value).__name__}"


def _read_token_id(name: str, index: int, token_id: Any) -> int:
    try:
        number = operator.index(token_id)
    except Exception as error:
        raise _wrong(f"{name}[{index}]", "an integer", token_id, param=name) from error
    if isinstance(token_id, bool):
        raise _wrong(f"{name}[{index}]", "an integer", token_id, param=name)
    return number


def _check_float(name: str, value: Any, low: float, high: float) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise _wrong(name, "a number", value)
    if not low <= value <= high:  # false for NaN too
        raise _wrong(name, f"between {low:g} and {high:g}", value)
    return float(value)


def _check_int(name: str, value: Any, low: int, high: int) -> int:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer:
        raise _wrong(name, "an integer", value)
    if not low <= value <= high:
        raise _wrong(name, f"between {low} and {high}", value)
    return int(value)


def _check_stop(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise _wrong("stop", "a string or a list of strings", stop)
    if len(strings) > MAX_STOPS:
        raise RequestError(
            f"stop must have at most {MAX_STOPS} strings, got {len(strings)}", param="stop"
        )
    if (longest := max(map(len, strings), default=0)) > MAX_STOP_LEN:
        raise RequestError(
            f"stop strings must have at most {MAX_STOP_LEN} characters, got {longest}", param="stop"
        )
    if not all(strings):
        raise _wrong("stop", "free of empty strings", stop)
    return tuple(strings)


def _check_stop_token_ids(ids: Any) -> tuple[int, ...]:
    ids = () if ids is None else ids
    read = read_token_ids("stop_token_ids", ids)
    if len(read) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} tokens, got {len(read)}",
            param="stop_token_ids",
        )
    return tuple(_check_int("stop_token_ids", token_id, 0, 2**31 - 1) for token_id in read)


def _check_logit_bias(given: Any) -> tuple[tuple[int, float], ...]:
    if given is None:
        return ()
    # A tuple of pairs: from another SamplingParams.
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise _wrong("logit_bias", "a mapping of token ids to numbers", given)
    if len(pairs) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias must have at most {MAX_LOGIT_BIAS} tokens, got {len(pairs)}",
            param="logit_bias",
        )
    found: dict[int, float] = {}
    for key, value in pairs:
        # Keys of JSON objects are strings.
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11
        token = int(key) if is_digits else key
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise _wrong("logit_bias", "a mapping of token ids to numbers", given)
        token = int(token)
        if not 0 <= token < 2**31:
            raise _wrong("logit_bias", "a mapping of token ids to numbers", given)
        try:
            found[token] = _check_float("logit_bias", value, -100.0, 100.0)
        except RequestError as error:
            raise RequestError(
                f"logit_bias of token {token}: {error}", param="logit_bias"
            ) from None
    return tuple(sorted(found.items()))


def _wrong(name: str, expected: str, value: Any, *, param: str | None = None) -> RequestError:
    return RequestError(f"{name} must be {expected}, got {show(value)}", param=param or name)
