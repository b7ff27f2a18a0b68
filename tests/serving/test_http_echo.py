"""The prompt in the answer: echo, its log-probabilities, and what lm-eval makes of them."""

from typing import Any

import pytest

from moejax_serving.outputs import Logprob
from serving.http_calls import CHAT, COMPLETIONS, USER, post


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("Say", "SayHe"), ([50, 50], None), ([256, 50], None)],
    ids=["text", "ids", "special"],
)
def test_the_prompt_stands_before_the_answer(fake_engine: Any, prompt: Any, text: Any) -> None:
    expected = text or fake_engine.tokenizer.decode(prompt, skip_special_tokens=False) + "He"
    body = {"prompt": prompt, "echo": True, "max_tokens": 2}
    (choice,) = post(fake_engine, COMPLETIONS, body)[1]["choices"]
    assert choice["text"] == expected
    assert choice["logprobs"] is None
    assert fake_engine.added[0][1].prompt_logprobs is None


def test_log_probabilities_reach_over_prompt_and_answer(fake_engine: Any) -> None:
    body = {"prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 2}
    (choice,) = post(fake_engine, COMPLETIONS, body)[1]["choices"]
    likeliest = fake_engine.tokenizer.token_text(70)
    assert choice["text"] == "HiHe"
    assert choice["logprobs"] == {
        "tokens": ["H", "i", "H", "e"],
        "token_logprobs": [None, -2.0, -2.0, -2.0],
        "top_logprobs": [
            None,
            {"i": -2.0, likeliest: -0.5},
            {"H": -2.0, likeliest: -0.5},
            {"e": -2.0, likeliest: -0.5},
        ],
        "text_offset": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_without_tokens_to_generate_the_prompt_is_all(fake_engine: Any, logprobs: Any) -> None:
    body = {"prompt": ["Hi", "You"], "echo": True, "max_tokens": 0, "n": 2, "logprobs": logprobs}
    answer = post(fake_engine, COMPLETIONS, body)[1]
    assert [choice["text"] for choice in answer["choices"]] == ["Hi", "Hi", "You", "You"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    for choice in answer["choices"]:
        shape = choice["logprobs"]
        assert (shape is None) == (logprobs is None)
        assert shape is None or "".join(shape["tokens"]) == choice["text"]


def test_the_prompt_may_fill_all_but_one_token_of_the_context(fake_engine: Any) -> None:
    body = {"prompt": [50] * 63, "echo": True, "max_tokens": 0, "logprobs": 1}
    status, answer = post(fake_engine, COMPLETIONS, body)
    assert status == 200
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 63


@pytest.mark.shows("server", "`echo` with log-probabilities, in the form that lm-eval reads")
@pytest.mark.parametrize("is_greedy", [False, True])
def test_lm_eval_finds_the_log_probabilities_of_a_continuation(
    fake_engine: Any, is_greedy: bool
) -> None:
    third = 0.1 + 0.2  # no short decimal: it must come back as the same float

    def logprobs(token_id: int, count: int) -> dict[int, Logprob]:
        best = {token_id: Logprob(-third, 1, "a")}
        return best if is_greedy else {token_id: Logprob(-9.5, 2, "b"), 7: Logprob(-third, 1, "a")}

    fake_engine._logprobs = logprobs
    context, continuation = [256, 10, 11], [12, 13]
    body = {
        "model": "m",
        "prompt": [[*context, *continuation], [*context, 14]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = post(fake_engine, COMPLETIONS, body)[1]["choices"]
    assert [ids for ids, _, _ in fake_engine.added] == body["prompt"]  # nothing was put before
    for choice, length in zip(sorted(choices, key=lambda c: c["index"]), (5, 4), strict=True):
        shape = choice["logprobs"]
        assert len(shape["token_logprobs"]) == length + 1  # the generated token is the last
        assert shape["token_logprobs"][0] is None and shape["top_logprobs"][0] is None
        found = shape["token_logprobs"][len(context) : -1]
        tops = shape["top_logprobs"][len(context) : -1]
        assert found == [-third if is_greedy else -9.5] * (length - len(context))
        pairs = zip(found, tops, strict=True)
        assert all((mine == max(top.values())) == is_greedy for mine, top in pairs)


def test_the_generated_token_is_there_even_if_it_ends_the_sequence(fake_engine: Any) -> None:
    fake_engine.reply = [256]
    body = {"prompt": [50, 51], "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = post(fake_engine, COMPLETIONS, body)[1]["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == "<|end|>"


def test_tokens_can_be_named_by_their_ids(fake_engine: Any) -> None:
    body = {"prompt": [50, 51], "echo": True, "logprobs": 1, "max_tokens": 1}
    body["return_tokens_as_token_ids"] = True
    shape = post(fake_engine, COMPLETIONS, body)[1]["choices"][0]["logprobs"]
    assert shape["tokens"] == ["token_id:50", "token_id:51", f"token_id:{fake_engine.reply[0]}"]
    assert shape["top_logprobs"][1] == {"token_id:51": -2.0, "token_id:70": -0.5}
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    body["return_tokens_as_token_ids"] = True
    (entry,) = post(fake_engine, CHAT, body)[1]["choices"][0]["logprobs"]["content"]
    assert entry["token"] == f"token_id:{fake_engine.reply[0]}"
    assert entry["top_logprobs"][0]["token"] == "token_id:70"


def test_a_server_without_tokenizer_echoes_log_probabilities(fake_engine: Any) -> None:
    fake_engine.tokenizer = None
    body = {"prompt": [50, 51], "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = post(fake_engine, COMPLETIONS, body)[1]["choices"]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == ["token_id:50", "token_id:51"]


def test_prompt_logprobs_are_by_token_id(fake_engine: Any) -> None:
    expected = [
        None,
        {
            "51": {
                "logprob": -2.0,
                "rank": 3,
                "decoded_token": fake_engine.tokenizer.token_text(51),
            },
            "70": {
                "logprob": -0.5,
                "rank": 1,
                "decoded_token": fake_engine.tokenizer.token_text(70),
            },
        },
    ]
    body = {"prompt": [50, 51], "prompt_logprobs": 1, "n": 2}
    answer = post(fake_engine, COMPLETIONS, body)[1]
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected, expected]
    assert answer["choices"][0]["logprobs"] is None and answer["choices"][0]["text"] == "Hello"


def test_a_chat_has_its_prompt_logprobs_beside_its_choices(fake_engine: Any) -> None:
    answer = post(fake_engine, CHAT, {"messages": USER, "prompt_logprobs": 0})[1]
    found = answer["prompt_logprobs"]
    assert len(found) == answer["usage"]["prompt_tokens"]
    assert found[0] is None
    assert all(len(entries) == 1 for entries in found[1:])


def test_echo_and_prompt_logprobs_show_as_many_tokens_as_each_asks_for(fake_engine: Any) -> None:
    body = {"prompt": [50, 51], "prompt_logprobs": 2, "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = post(fake_engine, COMPLETIONS, body)[1]["choices"]
    assert fake_engine.added[0][1].prompt_logprobs == 2
    assert choice["prompt_logprobs"][1].keys() == {"51", "70", "71"}
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
