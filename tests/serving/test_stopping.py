"""Stop strings in a text that grows token by token."""

import hypothesis.strategies as st
from hypothesis import given

from moejax_serving.sampling_params import SamplingParams
from moejax_serving.stopping import RunningText
from moejax_serving.tokenizer import Tokenizer


def test_each_stop_string_is_looked_for_only_as_far_back_as_it_reaches(
    byte_tokenizer: Tokenizer,
) -> None:
    """A short one costs the same whatever the length of the others."""
    text = RunningText(byte_tokenizer, SamplingParams(stop=["ab", "z" * 1024]), [])
    starts = []

    class Noting(str):
        def find(self, stop: str, start: int) -> int:  # type: ignore[override]
            starts.append((len(stop), start))
            return super().find(stop, start)

        def __add__(self, other: str) -> "Noting":
            return Noting(super().__add__(other))

    text._text = Noting("x" * 5000)
    assert text._add("y") is None
    assert starts == [(2, 4999), (1024, 3977)]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_the_first_stop_string_of_the_text_ends_it(
    byte_tokenizer: Tokenizer, whole: str, stops: list[str]
) -> None:
    text = RunningText(byte_tokenizer, SamplingParams(stop=stops), [])
    for end, token in enumerate(byte_tokenizer.encode(whole), 1):
        stop = text.push(token)
        found = [(whole[:end].find(s), s) for s in stops if s in whole[:end]]
        assert stop == (min(found)[1] if found else None)
        if found:
            assert text.final() == whole[: min(found)[0]]
            return
    assert text.final() == whole
