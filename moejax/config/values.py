"""The kinds of values that a configuration has, and their limits."""

from typing import Annotated, Any, Literal

import pydantic

MAX_INTEGER = 2**31 - 1
"""Sizes, counts and windows are int32 on a device."""
MAX_FLOAT = 1e38
"""Numbers are float32 on a device."""
MAX_LAYERS = 4096
"""More than a decoder is scanned over; a configuration that says so is damaged."""

Positive = Annotated[int, pydantic.Field(gt=0, le=MAX_INTEGER)]
PositiveFloat = Annotated[float, pydantic.Field(gt=0, le=MAX_FLOAT, allow_inf_nan=False)]
Dtype = Literal["bfloat16", "float32"]

# moejax.json is written by us: a key that we do not know means a newer or a damaged file.
STRICT: Any = {"extra": "forbid"}
