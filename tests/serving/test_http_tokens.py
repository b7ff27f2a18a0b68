"""/tokenize, /detokenize and /tokenizer_info."""

from typing import Any

import httpx
import pytest

from moejax_serving import tokenization
from moejax_serving.async_engine import AsyncEngine
from serving.http_calls import USER, assert_is_error, get, post, run


def test_a_text_becomes_tokens_and_text_again(fake_engine: Any) -> None:
    ids = fake_engine.tokenizer.encode("Grüß<|end|>")

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        body = {"model": "org/alias", "prompt": "Grüß<|end|>", "add_special_tokens": False}
        found = (await client.post("/tokenize", json=body)).json()
        assert found == {
            "count": len(ids),
            "max_model_len": 64,
            "tokens": ids,
            "token_strs": None,
        }
        body = {"model": "m", "tokens": found["tokens"]}
        assert (await client.post("/detokenize", json=body)).json() == {"prompt": "Grüß<|end|>"}

    run(fake_engine, scenario)


def test_the_text_of_the_end_is_its_token(fake_engine: Any) -> None:
    body = {"prompt": "<|end|>", "add_special_tokens": False}
    assert post(fake_engine, "/tokenize", body)[1]["tokens"] == [256]


def test_a_conversation_becomes_tokens(fake_engine: Any) -> None:
    for flag, text in (
        (None, "<|user|>Hi<|end|><|assistant|>"),
        (False, "<|user|>Hi<|end|>"),
    ):
        body = {"messages": USER, "add_generation_prompt": flag}
        answer = post(fake_engine, "/tokenize", body)[1]
        assert answer["tokens"] == fake_engine.tokenizer.encode(text)


def test_the_text_of_each_token_can_be_had(fake_engine: Any) -> None:
    body = {"prompt": "ab<|end|>", "return_token_strs": True}
    answer = post(fake_engine, "/tokenize", body)[1]
    assert answer["token_strs"] == ["a", "b", "<|end|>"]


def test_an_empty_text_has_no_tokens(fake_engine: Any) -> None:
    answer = post(fake_engine, "/tokenize", {"prompt": ""})
    assert answer[0] == 200 and answer[1]["count"] == 0
    assert post(fake_engine, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})


def test_a_text_may_be_longer_than_the_context(fake_engine: Any) -> None:
    assert post(fake_engine, "/tokenize", {"prompt": "x" * 5000})[1]["count"] == 5000


@pytest.mark.parametrize(
    ("path", "body", "status", "text", "param"),
    [
        ("/tokenize", {}, 400, "either prompt or messages is needed", "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, 400, "and not both", "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt: Input should be a valid string", "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages is empty", "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "is not served here", "model"),
        ("/tokenize", {"messages": USER, "tools": [{}]}, 400, "tools=", "tools"),
        (
            "/tokenize",
            {"messages": USER, "continue_final_message": True},
            400,
            "continue_final_message=True is not supported",
            "continue_final_message",
        ),
        ("/detokenize", {}, 400, "tokens: Field required", "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "valid list", "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "greater than or equal to 0", "tokens"),
        ("/detokenize", {"tokens": [2**40]}, 400, "less than or equal to", "tokens"),
        ("/detokenize", {"tokens": [5, 257]}, 400, "token id 257 is not in the", "tokens"),
        ("/detokenize", {"tokens": [], "model": "other"}, 404, "is not served here", "model"),
    ],
)
def test_a_wrong_body_is_refused_by_field(
    fake_engine: Any, path: str, body: dict[str, Any], status: int, text: str, param: str
) -> None:
    assert_is_error(post(fake_engine, path, body), status, text, param)


def test_half_a_surrogate_pair_is_named_by_its_field(fake_engine: Any) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        headers = {"Content-Type": "application/json"}
        content = b'{"prompt": "\\ud800"}'
        response = await client.post("/tokenize", content=content, headers=headers)
        answer = (response.status_code, response.json())
        assert_is_error(answer, 400, "half a surrogate pair", "prompt")

    run(fake_engine, scenario)


def test_the_tokenizer_is_described_as_lm_eval_reads_it(fake_engine: Any) -> None:
    status, info = get(fake_engine, "/tokenizer_info")
    assert status == 200
    assert info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 64,
        "bos_token": None,
        "eos_token": "<|end|>",
        "pad_token": None,
        "unk_token": None,
        "chat_template": info["chat_template"],
    }
    assert "<|assistant|>" in info["chat_template"]


def test_a_model_without_template_shows_none(fake_engine: Any) -> None:
    template, fake_engine.tokenizer.chat_template = fake_engine.tokenizer.chat_template, None
    try:
        info = get(fake_engine, "/tokenizer_info")[1]
    finally:
        fake_engine.tokenizer.chat_template = template
    assert "chat_template" not in info


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x"}, "prompt"),
        ("/tokenize", {"messages": USER}, "messages"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
    ],
)
def test_a_server_without_tokenizer_says_so(
    fake_engine: Any, path: str, body: dict[str, Any], param: str
) -> None:
    fake_engine.tokenizer = None
    assert_is_error(post(fake_engine, path, body), 400, "the server has no tokenizer", param)
    assert_is_error(get(fake_engine, "/tokenizer_info"), 400, "has no tokenizer", "model")


def test_a_text_that_would_take_seconds_is_refused(
    fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "MAX_CHARACTERS", 10)
    assert post(fake_engine, "/tokenize", {"prompt": "x" * 10})[0] == 200
    answer = post(fake_engine, "/tokenize", {"prompt": "x" * 11})
    assert_is_error(answer, 400, "has 11 characters, and may have 10", "prompt")
