"""POST /v1/chat/completions: messages, the template, log-probabilities."""

from typing import Any

import pytest

from serving.http_calls import CHAT, USER, assert_is_error, post


@pytest.mark.shows("server", "`/v1/chat/completions`")
def test_a_conversation_is_continued(fake_engine: Any) -> None:
    status, body = post(fake_engine, CHAT, {"model": "m", "messages": USER})
    assert status == 200
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    ((ids, params, text),) = fake_engine.added
    assert text == "<|user|>Hi<|end|><|assistant|>"
    assert params.max_tokens == 64 - len(ids)
    assert body["usage"]["prompt_tokens"] == len(ids)


def test_the_prompt_for_an_answer_can_be_left_out(fake_engine: Any) -> None:
    post(fake_engine, CHAT, {"messages": USER, "add_generation_prompt": False})
    assert fake_engine.added[0][2] == "<|user|>Hi<|end|>"


def test_text_parts_become_one_text(fake_engine: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    post(fake_engine, CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert fake_engine.added[0][2] == "<|user|>a\nb<|end|><|assistant|>"


def test_other_parts_are_refused_by_name(fake_engine: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    answer = post(fake_engine, CHAT, {"messages": [{"role": "user", "content": parts}]})
    place = "messages[0].content[1]"
    assert_is_error(answer, 400, f"{place} is of type 'image_url'", place)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_are_taken(fake_engine: Any, name: str) -> None:
    status, body = post(fake_engine, CHAT, {"messages": USER, name: 2})
    assert status == 200 and body["choices"][0]["message"]["content"] == "He"
    answer = post(fake_engine, CHAT, {"messages": USER, name: 64})
    assert_is_error(answer, 400, f"{name} is 64, but", name)
    answer = post(fake_engine, CHAT, {"messages": USER, name: 0})
    assert_is_error(answer, 400, f"{name} must be at least 1, got 0", name)


def test_logprobs_have_the_shape_of_chat(fake_engine: Any) -> None:
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    logprobs = post(fake_engine, CHAT, body)[1]["choices"][0]["logprobs"]
    text = fake_engine.tokenizer.token_text
    assert logprobs == {
        "content": [
            {
                "token": "H",
                "logprob": -2.0,
                "bytes": [72],
                "top_logprobs": [
                    {"token": text(70), "logprob": -0.5, "bytes": list(text(70).encode())},
                    {"token": text(71), "logprob": -1.0, "bytes": list(text(71).encode())},
                ],
            }
        ]
    }


def test_logprobs_alone_have_no_alternatives(fake_engine: Any) -> None:
    body = {"messages": USER, "logprobs": True, "max_tokens": 1}
    (entry,) = post(fake_engine, CHAT, body)[1]["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []


def test_arguments_reach_the_template(fake_engine: Any) -> None:
    seen = []
    render = fake_engine.tokenizer.chat_template.render

    class Noting:
        def render(self, messages: Any, variables: Any, **options: Any) -> Any:
            seen.append((messages, variables))
            return render(messages, variables, **options)

    fake_engine.tokenizer.chat_template, kept = Noting(), fake_engine.tokenizer.chat_template
    try:
        message = {"role": "user", "content": "x", "name": "Ann", "refusal": None}
        body = {"messages": [message], "chat_template_kwargs": {"thinking": False}}
        assert post(fake_engine, CHAT, body)[0] == 200
    finally:
        fake_engine.tokenizer.chat_template = kept
    ((messages, variables),) = seen
    assert messages == [{"role": "user", "content": "x", "name": "Ann"}]
    assert variables == {"thinking": False}


@pytest.mark.parametrize("name", ["messages", "tokenize", "add_generation_prompt", "self"])
def test_arguments_may_not_replace_the_conversation(fake_engine: Any, name: str) -> None:
    body = {"messages": USER, "chat_template_kwargs": {name: True}}
    answer = post(fake_engine, CHAT, body)
    assert_is_error(answer, 400, f"may not set {name}", "chat_template_kwargs")


def test_further_keys_of_a_message_may_be_nested_deep(fake_engine: Any) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    body = {"messages": [{"role": "user", "content": "Hi", "name": deep}]}
    assert post(fake_engine, CHAT, body)[0] == 200


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}])
def test_a_message_without_content_is_named_by_its_place(fake_engine: Any, message: Any) -> None:
    answer = post(fake_engine, CHAT, {"messages": [*USER, message]})
    assert_is_error(answer, 400, "messages[1] has no content: a text or", "messages[1].content")


def test_a_model_without_template_says_so(fake_engine: Any) -> None:
    template, fake_engine.tokenizer.chat_template = fake_engine.tokenizer.chat_template, None
    try:
        answer = post(fake_engine, CHAT, {"messages": USER})
    finally:
        fake_engine.tokenizer.chat_template = template
    assert_is_error(answer, 400, "the model has no chat template", "messages")
