"""POST /v1/completions: texts, token ids, log-probabilities, the echoed prompt."""

from typing import Any

import pytest

from moejax_serving.outputs import Logprob
from serving.http_calls import CHAT, COMPLETIONS, USER, assert_is_error, post


def test_a_text_is_completed(fake_engine: Any) -> None:
    status, body = post(fake_engine, COMPLETIONS, {"model": "org/alias", "prompt": "Say"})
    assert status == 200
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["model"] == "org/alias"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


def test_max_tokens_is_16_unless_given(fake_engine: Any) -> None:
    post(fake_engine, COMPLETIONS, {"prompt": "Say"})
    _, body = post(fake_engine, COMPLETIONS, {"prompt": "Say", "max_tokens": 2})
    assert [params.max_tokens for _, params, _ in fake_engine.added] == [16, 2]
    assert body["choices"][0]["text"] == "He"
    assert body["choices"][0]["finish_reason"] == "length"


def test_the_default_of_max_tokens_shrinks_to_what_is_left(fake_engine: Any) -> None:
    post(fake_engine, COMPLETIONS, {"prompt": [1] * 60})
    assert fake_engine.added[0][1].max_tokens == 4


@pytest.mark.shows("server", "`/v1/completions`: texts and token ids, alone and in lists")
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [("ab", 2)]),
        (["a", "bcd"], [("a", 1), ("bcd", 3)]),
        ([5, 6, 7], [(None, 3)]),
        ([[5], [6, 7]], [(None, 1), (None, 2)]),
    ],
)
def test_prompts_come_in_four_forms(
    fake_engine: Any, prompt: Any, expected: list[tuple[str | None, int]]
) -> None:
    status, body = post(fake_engine, COMPLETIONS, {"prompt": prompt})
    assert status == 200
    assert [(text, len(ids)) for ids, _, text in fake_engine.added] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(count for _, count in expected)


def test_sampling_parameters_reach_the_engine(fake_engine: Any) -> None:
    body = {
        "prompt": "x",
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "seed": -7,
        "stop": "end",
        "stop_token_ids": [9],
        "ignore_eos": True,
        "max_tokens": 5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "n": 2,
        "min_tokens": 3,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": 1.5, "0": -100},
        "prompt_logprobs": 4,
    }
    assert post(fake_engine, COMPLETIONS, body)[0] == 200
    params = fake_engine.added[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 0, 0.1)
    assert (params.seed, params.stop_strings, params.stop_ids) == (-7, ("end",), (9,))
    assert (params.ignore_eos, params.max_tokens) == (True, 5)
    assert not params.skip_special_tokens and params.include_stop_str_in_output
    assert (params.n, params.min_tokens, params.prompt_logprobs) == (2, 3, 4)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (1.0, -0.5, 1.2)
    assert params.biases == ((0, -100.0), (7, 1.5))


def test_the_checkpoints_sampling_fills_what_a_request_leaves_out(fake_engine: Any) -> None:
    fake_engine.default_sampling = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        body = {**prompt, "temperature": 0, "top_k": None}
        assert post(fake_engine, path, body)[0] == 200
        params = fake_engine.added[-1][1]
        assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.95, 40)


def test_logprobs_have_the_legacy_shape(fake_engine: Any) -> None:
    body = {"prompt": "x", "logprobs": 2, "max_tokens": 2}
    logprobs = post(fake_engine, COMPLETIONS, body)[1]["choices"][0]["logprobs"]
    text = fake_engine.tokenizer.token_text
    assert logprobs == {
        "tokens": ["H", "e"],
        "token_logprobs": [-2.0, -2.0],
        "top_logprobs": [
            {"H": -2.0, text(70): -0.5, text(71): -1.0},
            {"e": -2.0, text(70): -0.5, text(71): -1.0},
        ],
        "text_offset": [0, 1],
    }


def test_an_infinite_logprob_becomes_a_number(fake_engine: Any) -> None:
    body = {"prompt": "x", "logprobs": 4, "max_tokens": 1}
    (top,) = post(fake_engine, COMPLETIONS, body)[1]["choices"][0]["logprobs"]["top_logprobs"]
    assert top[fake_engine.tokenizer.token_text(73)] == -9999.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logprob_that_json_cannot_hold_is_the_lowest(fake_engine: Any, value: float) -> None:
    fake_engine._logprobs = lambda token_id, count: {token_id: Logprob(value, 1, "x")}
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 1}
    logprobs = post(fake_engine, COMPLETIONS, body)[1]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0] and logprobs["top_logprobs"] == [{"x": -9999.0}]
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    (entry,) = post(fake_engine, CHAT, body)[1]["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_tokens_of_one_name_keep_the_larger_logprob(fake_engine: Any) -> None:
    fake_engine._text = lambda token_id: "same"
    body = {"prompt": "x", "logprobs": 3, "max_tokens": 1}
    logprobs = post(fake_engine, COMPLETIONS, body)[1]["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"same": -0.5}]
    assert logprobs["token_logprobs"] == [-2.0]


def test_a_server_without_tokenizer_takes_token_ids(fake_engine: Any) -> None:
    fake_engine.tokenizer = None
    answer = post(fake_engine, COMPLETIONS, {"prompt": "x"})
    assert_is_error(answer, 400, "the server has no tokenizer", "prompt")
    assert_is_error(post(fake_engine, CHAT, {"messages": USER}), 400, "tokenizer", "messages")
    body = {"prompt": [1, 2], "logprobs": 1}
    status, answered = post(fake_engine, COMPLETIONS, body)
    assert status == 200
    assert answered["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{fake_engine.reply[0]}"


def test_each_prompt_has_n_choices_and_counts_once(fake_engine: Any) -> None:
    fake_engine.num_cached_tokens = 2
    body = {"prompt": ["abc", "de"], "n": 3, "max_tokens": 2}
    answer = post(fake_engine, COMPLETIONS, body)[1]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_logits_that_are_no_numbers_are_an_error_of_the_server(fake_engine: Any) -> None:
    fake_engine.finish_reason = "error"
    answer = post(fake_engine, COMPLETIONS, {"prompt": "x"})
    assert_is_error(answer, 500, "finish reason error")
