"""Sizes as people write them."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moejax.errors import ConfigError
from moejax_serving.sizes import parse_size, parse_width


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GB", 10**10),
        ("10GiB", 10 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5 GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("4096", 4096),
        ("7B", 7),
        (" 2tb ", 2 * 10**12),
        ("1TiB", 2**40),
        ("1kb", 1000),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "10G", "-1GB", "1e9", "1,5GB", "1.GB", "10 GB x", "٣GB"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size: write bytes, or a number with one of"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 5000, "0." + "1" * 5000 + "GB"])
def test_a_number_of_too_many_digits_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has more than 40 digits"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0.0GB", "0.1B"])
def test_nothing_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="must be at least one byte"):
        parse_size(text)


@given(st.integers(1, 10**6), st.integers(0, 999))
def test_decimals_are_exact(whole: int, thousandths: int) -> None:
    assert parse_size(f"{whole}.{thousandths:03}GB") == whole * 10**9 + thousandths * 10**6


@pytest.mark.parametrize(
    ("text", "width"), [("4", 4), ("16", 16), ("auto", "auto"), ("4 bits.json", "4 bits.json")]
)
def test_a_number_is_a_width(text: str, width: int | str) -> None:
    assert parse_width(text) == width


@pytest.mark.parametrize("text", ["-3", "4.5", "+4", "4."])
def test_a_number_that_is_no_width_is_no_file_either(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a width: 2 to 8, or 16$"):
        parse_width(text)
