"""Sizes of memory, and widths, as people write them."""

import re
import reprlib

from moejax.errors import ConfigError

_MAX_DIGITS = 40

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_size(text: str) -> int:
    """Reads '10GB' (10^10 bytes), '10GiB' (10 * 2^30 bytes), '1.5 MB' or '4096' (bytes)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip(), re.ASCII)
    unit = _UNITS.get(match[2].lower() or "b") if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{reprlib.repr(text)} is not a size: write bytes, or a number with one of "
            "kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)"
        )
    if len(match[1]) > _MAX_DIGITS:
        raise ConfigError(f"{reprlib.repr(text)} has more than {_MAX_DIGITS} digits: no such size")
    number, _, decimals = match[1].partition(".")
    size: int = int(number + decimals) * unit // 10 ** len(decimals)
    if size <= 0:
        raise ConfigError(f"{text!r} must be at least one byte")
    return size


def parse_width(text: str) -> str | int:
    """A number is a width; anything else is given back: auto, or the name of a file."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}(\.[0-9]*)?", text, re.ASCII):
        return text
    if not text.isdigit():
        raise ConfigError(f"{text} is not a width: 2 to 8, or 16")
    return int(text)
