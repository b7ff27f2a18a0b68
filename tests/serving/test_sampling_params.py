"""SamplingParams: vLLM's defaults, every wrong value refused by name."""

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from moejax.errors import RequestError
from moejax_serving.sampling_params import NEUTRAL, SamplingParams, read_token_ids


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1.0,
        1.0,
        0,
        0.0,
    )
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (16, 0, False)
    assert params.seed is None and params.logprobs is None and params.prompt_logprobs is None
    assert params.skip_special_tokens and params.detokenize
    assert not params.include_stop_str_in_output


def test_values_are_stored_in_one_form() -> None:
    params = SamplingParams(temperature=0, top_k=-1, stop="\n", stop_token_ids=[3, 4])
    assert isinstance(params.temperature, float)
    assert params.top_k == 0
    assert params.stop == params.stop_strings == ("\n",)
    assert params.stop_token_ids == params.stop_ids == (3, 4)
    assert SamplingParams().stop_strings == SamplingParams().stop_ids == ()
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_equal_params_are_equal_and_can_be_keys() -> None:
    a, b = SamplingParams(stop=["x"]), SamplingParams(stop="x")
    assert a == b and len({a, b}) == 1
    assert dataclasses.replace(a, temperature=0.5).stop_strings == ("x",)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3))
    assert type(params.temperature) is float and type(params.max_tokens) is int


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("temperature", -0.1, "between 0 and 1e+09, got -0.1"),
        ("temperature", math.nan, "got nan"),
        ("temperature", math.inf, "got inf"),
        ("temperature", True, "a number, got True"),
        ("temperature", "1", "a number, got '1'"),
        ("temperature", None, "a number, got None"),
        ("temperature", 10**400, "between 0 and"),
        ("top_p", 0, "more than 0, got 0"),
        ("top_p", 1.1, "between 0 and 1, got 1.1"),
        ("min_p", -1, "between 0 and 1"),
        ("top_k", -2, "between -1 and"),
        ("top_k", 1.5, "an integer, got 1.5"),
        ("top_k", True, "an integer, got True"),
        ("seed", 2**63, "between -9223372036854775808 and 9223372036854775807"),
        ("seed", 1.0, "an integer, got 1.0"),
        ("max_tokens", 0, "between 1 and"),
        ("max_tokens", None, "an integer, got None"),
        ("min_tokens", 17, "at most max_tokens = 16, got 17"),
        ("min_tokens", -1, "between 0 and"),
        ("n", 0, "between 1 and 128, got 0"),
        ("n", 129, "between 1 and 128, got 129"),
        ("presence_penalty", 2.1, "between -2 and 2, got 2.1"),
        ("frequency_penalty", math.nan, "got nan"),
        ("repetition_penalty", 0, "between 0.001 and 1000, got 0"),
        ("repetition_penalty", 1e-38, "between 0.001 and 1000, got 1e-38"),
        ("logit_bias", [1], "a mapping of token ids to numbers"),
        ("logit_bias", {"x": 1}, "a mapping of token ids to numbers"),
        ("logit_bias", {-1: 1}, "a mapping of token ids to numbers"),
        ("logit_bias", {True: 1}, "a mapping of token ids to numbers"),
        ("logit_bias", (1, 2), "a mapping of token ids to numbers"),
        ("logit_bias", {7: 101}, "of token 7: logit_bias must be between -100 and 100, got 101"),
        ("logit_bias", {7: None}, "of token 7: logit_bias must be a number"),
        ("logit_bias", {i: 1 for i in range(1025)}, "at most 1024 tokens, got 1025"),
        ("logprobs", 21, "between 0 and 20, got 21"),
        ("logprobs", True, "an integer, got True"),
        ("prompt_logprobs", -1, "between 0 and 20, got -1"),
        ("ignore_eos", 1, "true or false, got 1"),
        ("detokenize", None, "true or false, got None"),
        ("stop", "", "free of empty strings"),
        ("stop", ["a", ""], "free of empty strings"),
        ("stop", ["a", 1], "a string or a list of strings"),
        ("stop", 3, "a string or a list of strings"),
        ("stop", ["a"] * 17, "at most 16 strings, got 17"),
        ("stop", ["a", "b" * 1025], "at most 1024 characters, got 1025"),
        ("stop_token_ids", [1] * 1025, "at most 1024 tokens, got 1025"),
        ("stop_token_ids", b"12", "a list of integers"),
        ("stop_token_ids", [1.5], "stop_token_ids[0] must be an integer, got 1.5"),
        pytest.param("max_tokens", 10**5000, "got a value of type int", id="long"),
        ("n", np.array([1, 1]), "an integer"),
        ("logit_bias", np.array([1.0, 2.0]), "a mapping of token ids to numbers"),
        ("bad_words", np.array([]), "is not supported"),
        ("stop_token_ids", "12", "a list of integers"),
        ("stop_token_ids", [-1], "between 0 and"),
        ("stop_token_ids", [True], "an integer, got True"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value) and text in str(caught.value)


def test_a_bias_has_one_form_whatever_its_keys() -> None:
    params = SamplingParams(logit_bias={"7": 1, 3: np.float32(-2)})
    assert params.biases == ((3, -2.0), (7, 1.0))
    assert dataclasses.replace(params, n=2).biases == params.biases
    assert SamplingParams().biases == ()


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_p": 0.5, "logit_bias": {}}, False),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"repetition_penalty": 1.5}, True),
        ({"min_tokens": 1}, True),
        ({"logit_bias": {1: 0}}, True),
    ],
)
def test_it_says_whether_logits_change(options: dict[str, Any], changes: bool) -> None:
    assert SamplingParams(**options).changes_logits is changes


def test_a_request_may_have_many_stops_up_to_a_limit() -> None:
    params = SamplingParams(stop=["a" * 1024] * 16, stop_token_ids=np.arange(1024))
    assert len(params.stop_strings) == 16 and params.stop_ids == tuple(range(1024))


@pytest.mark.parametrize(
    "ids", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), [np.int32(1), np.uint8(2)]]
)
def test_token_ids_come_in_lists_and_arrays(ids: Any) -> None:
    assert read_token_ids("x", ids) == [1, 2]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ("12", "x must be a list of integers, got '12'"),
        (b"12", "x must be a list of integers, got b'12'"),
        (None, "x must be a list of integers, got None"),
        (5, "x must be a list of integers, got 5"),
        ({1: 2}, "x must be a list of integers, got {1: 2}"),
        (np.array(5), r"x must be a list of integers, got array\(5\)"),
        ([None], r"x\[0\] must be an integer, got None"),
        ([1, [1]], r"x\[1\] must be an integer, got \[1\]"),
        ([1.9], r"x\[0\] must be an integer, got 1.9"),
        ([math.nan], r"x\[0\] must be an integer, got nan"),
        (["5"], r"x\[0\] must be an integer, got '5'"),
        ([True], r"x\[0\] must be an integer, got True"),
        (np.array([1.0]), r"x\[0\] must be an integer, got 1.0"),
        (np.array([True]), r"x\[0\] must be an integer, got True"),
        (np.array([[1]]), r"x\[0\] must be an integer, got \[1\]"),
    ],
)
def test_what_is_no_list_of_token_ids_is_refused(ids: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        read_token_ids("x", ids)
    assert caught.value.param == "x"


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="stop strings need detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("use_beam_search", True),
        ("structured_outputs", {"json": {}}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
    ],
)
def test_what_is_not_done_yet_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name}=.* is not supported") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_is_not_done_yet_may_ask_for_nothing(name: str) -> None:
    for value in (None, *NEUTRAL[name]):
        SamplingParams(**{name: value})


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=[1] * 100_000)  # type: ignore[list-item]
    assert len(str(caught.value)) < 200


def test_neither_parameters_nor_outputs_need_an_array_library() -> None:
    code = (
        "import sys, moejax_serving.sampling_params, moejax_serving.outputs;"
        "sys.exit(bool({'jax', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
