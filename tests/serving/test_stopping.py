"""Stop strings in a text that grows token by token."""

import time

import hypothesis.strategies as st
from hypothesis import given

from moejax_serving.sampling_params import SamplingParams
from moejax_serving.sequence import Sequence
from moejax_serving.stopping import Finish, RunningText, StopMatcher, find_finish
from moejax_serving.tokenizer import Tokenizer

letters = st.text("ab", max_size=30)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(letters, st.text("ab", min_size=1, max_size=6), st.integers(1, 7))
def test_a_string_is_found_where_it_first_ends(whole: str, stop: str, step: int) -> None:
    matcher = StopMatcher(stop)
    for at in range(0, len(whole), step):
        count = matcher.push(whole[at : at + step])
        found = whole[: at + step].find(stop)
        if found >= 0:
            assert count == found + len(stop) - at
            return
        assert count is None
        begun = [n for n in range(len(stop)) if whole[: at + step].endswith(stop[:n])]
        assert matcher.num_matched == max(begun)


def test_a_character_costs_the_same_whatever_the_length_of_text_and_stops() -> None:
    stops = ["a" * 1023 + letter for letter in "bcdefghijklmnopq"]
    matchers = [StopMatcher(stop) for stop in stops]
    start = time.perf_counter()
    for matcher in matchers:
        assert matcher.push("a" * 20_000) is None
    # 320,000 characters: half a second or so, where looking back 1023 each time takes minutes.
    assert time.perf_counter() - start < 30


@given(letters, stop_strings)
def test_the_first_stop_string_of_the_text_ends_it(
    byte_tokenizer: Tokenizer, whole: str, stops: list[str]
) -> None:
    text = RunningText(byte_tokenizer, SamplingParams(stop=stops), [])
    for end, token in enumerate(byte_tokenizer.encode(whole), 1):
        stop = text.push(token)
        found = [(whole[:end].find(s), s) for s in stops if s in whole[:end]]
        assert stop == (min(found)[1] if found else None)
        if found:
            assert text.take(is_final=True) == whole[: min(found)[0]]
            return
    assert text.take(is_final=True) == whole


@given(letters, stop_strings, st.booleans(), st.sets(st.integers(0, 29)))
def test_text_that_was_given_out_is_never_taken_back(
    byte_tokenizer: Tokenizer, whole: str, stops: list[str], keep: bool, takes: set[int]
) -> None:
    """Taken at any times, the parts join to the text that is taken at the end alone."""
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep)
    parts, alone = RunningText(byte_tokenizer, params, []), RunningText(byte_tokenizer, params, [])
    given_out = ""
    for at, token in enumerate(byte_tokenizer.encode(whole)):
        stop = alone.push(token)
        assert parts.push(token) == stop
        if stop is not None:
            break
        if at in takes:
            given_out += parts.take()
            held = len(whole[: at + 1]) - len(given_out)
            assert held <= max(map(len, stops), default=1) - 1
    given_out += parts.take(is_final=True)
    assert given_out == alone.take(is_final=True)


def test_no_part_of_a_character_is_given_out(byte_tokenizer: Tokenizer) -> None:
    text = RunningText(byte_tokenizer, SamplingParams(stop="é!"), [])
    taken = []
    for token in byte_tokenizer.encode("aé€é?"):
        text.push(token)
        taken.append(text.take())
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in taken)
    assert "".join(taken) + text.take(is_final=True) == "aé€é?"


def test_before_min_tokens_nothing_ends_a_sequence(byte_tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop="ab", stop_token_ids=[7], min_tokens=4, max_tokens=9)
    sequence = Sequence(number=0, prompt_token_ids=[1], params=params, max_tokens=9, seed=0)
    sequence.text = RunningText(byte_tokenizer, params, [])
    a, b = byte_tokenizer.encode("ab")
    finishes = []
    for token in (a, b, 256, 7, a, b):
        sequence.output_token_ids.append(token)
        finishes.append(find_finish(sequence, token, (256,)))
    assert finishes == [None] * 5 + [Finish("stop", "ab")]
