"""The settings of generation that `moejax.json` holds, and what each of them may be."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A number of one type, between two values."""

    kind: type[int] | type[float]
    low: int | float
    high: int | float
    above_low: bool = False
    """`low` itself is not allowed."""

    def __str__(self) -> str:
        what = "an integer" if self.kind is int else "a number"
        low = f"above {self.low:g}" if self.above_low else f"from {self.low:g}"
        return f"{what} {low} to {self.high:.10g}"

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, if anything is. An integer is a number too."""
        kinds = (int,) if self.kind is int else (int, float)
        if (
            type(value) in kinds
            and self.low <= value <= self.high
            and not (self.above_low and value == self.low)
        ):
            return None
        return f"is {value!r}, needed {self}"


SAMPLING = {
    "temperature": Range(kind=float, low=0, high=1e9),
    "top_p": Range(kind=float, low=0, high=1, above_low=True),
    "top_k": Range(kind=int, low=0, high=2**31 - 1),
    "min_p": Range(kind=float, low=0, high=1),
}
TOKENS = ("bos_token_id", "pad_token_id")


def fault(settings: Any, vocab_size: int) -> str | None:
    """What is wrong with the settings of `moejax.json`, if anything is: field, value, need."""
    if not isinstance(settings, dict):
        return f"is {settings!r}, needed an object"
    token = Range(kind=int, low=0, high=vocab_size - 1)
    ids = settings.get("eos_token_ids")
    if not isinstance(ids, list):
        return f"eos_token_ids is {ids!r}, needed a list of token ids"
    for value in ids:
        if found := token.fault(value):
            return f"eos_token_ids: one {found}"
    ranges = SAMPLING | dict.fromkeys(TOKENS, token)
    for name, value in settings.items():
        if name == "eos_token_ids":
            continue
        if name not in ranges:
            return f"{name} is not a setting that this moejax knows"
        if found := ranges[name].fault(value):
            return f"{name} {found}"
    return None
