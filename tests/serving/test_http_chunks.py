"""Any chunks of an answer, joined, are the whole answer."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax_serving.async_engine import AsyncEngine
from moejax_serving.outputs import CompletionOutput, Logprob, RequestOutput
from moejax_serving.service import Service
from moejax_serving.tokenizer import Tokenizer
from serving.http_calls import (
    CHAT,
    COMPLETIONS,
    NAMES,
    ScriptedEngine,
    body_of,
    call,
    join_chunks,
    read_events,
)

OPTIONS = [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]


@dataclasses.dataclass
class Choice:
    """An answer, and the pieces that it comes in: each has any share of its text and tokens."""

    text: str
    token_ids: list[int]
    finish_reason: Any
    stop_reason: Any
    places: list[tuple[int, int]]
    """Where each piece ends in the text and in the tokens; the last one ends both."""


@dataclasses.dataclass
class Answer:
    """The choices for one prompt, and which of them have a piece in each step."""

    prompt: list[int]
    choices: list[Choice]
    steps: list[set[int]]


@st.composite
def make_choice(draw: st.DrawFn) -> Choice:
    text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
    token_ids = draw(st.lists(st.integers(0, 255), min_size=1, max_size=6))
    ends = [("stop", None), ("stop", "x"), ("stop", 7), ("length", None)]
    cuts = st.tuples(st.integers(0, len(text)), st.integers(0, len(token_ids)))
    drawn = draw(st.lists(cuts, max_size=4))
    columns = [sorted(column) for column in zip(*drawn, strict=True)] or [[], []]
    places = [*zip(*columns, strict=True), (len(text), len(token_ids))]
    return Choice(text, token_ids, *draw(st.sampled_from(ends)), places)


@st.composite
def make_answer(draw: st.DrawFn, n: int) -> Answer:
    return Answer(
        draw(st.lists(st.integers(0, 255), min_size=1, max_size=4)),
        [draw(make_choice()) for _ in range(n)],
        draw(st.lists(st.sets(st.integers(0, n - 1), min_size=1), max_size=8)),
    )


def logprobs_of(token_ids: Sequence[int]) -> list[dict[int, Logprob]]:
    """Some tokens have the same name."""
    return [
        {
            token_id: Logprob(-0.1 * token_id, 2, f"t{token_id % 7}"),
            token_id + 1: Logprob(-0.05, 1, f"t{token_id % 5}"),
        }
        for token_id in token_ids
    ]


def cut(choice: Choice, index: int, places: Sequence[tuple[int, int]]) -> list[CompletionOutput]:
    pieces = []
    for first, last in zip([(0, 0), *places], places, strict=False):
        is_last = last is places[-1]
        token_ids = choice.token_ids[first[1] : last[1]]
        piece = CompletionOutput(
            index,
            choice.text[first[0] : last[0]],
            token_ids,
            logprobs=logprobs_of(token_ids),
            finish_reason=choice.finish_reason if is_last else None,
            stop_reason=choice.stop_reason if is_last else None,
        )
        pieces.append(piece)
    return pieces


def output_of(answer: Answer, choices: list[CompletionOutput], *, first: bool, last: bool) -> Any:
    known = [None, *logprobs_of(answer.prompt[1:])] if first else None
    return RequestOutput("", None, answer.prompt, known, choices, last, num_cached_tokens=1)


def whole(answer: Answer) -> RequestOutput:
    choices = [
        cut(choice, index, choice.places[-1:])[0] for index, choice in enumerate(answer.choices)
    ]
    return output_of(answer, choices, first=True, last=True)


def steps(answer: Answer) -> list[RequestOutput]:
    left = [cut(choice, index, choice.places) for index, choice in enumerate(answer.choices)]
    found: list[list[CompletionOutput]] = []
    for taken in answer.steps:
        found.append([left[index].pop(0) for index in sorted(taken) if left[index]])
    while any(left):
        found.append([pieces.pop(0) for pieces in left if pieces])
    found = [step for step in found if step]
    return [
        output_of(answer, step, first=place == 0, last=place == len(found) - 1)
        for place, step in enumerate(found)
    ]


def simplify(path: str, answer: Any) -> list[dict[str, Any]]:
    """The choices of a whole answer, in the form of those that `join_chunks` makes."""
    return [
        {
            "text": choice["text"] if path == COMPLETIONS else choice["message"]["content"],
            "lists": choice["logprobs"] or {},
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in answer["choices"]
    ]


def draw_body(data: st.DataObject, path: str, answers: Sequence[Answer]) -> dict[str, Any]:
    fields: dict[str, st.SearchStrategy[Any]] = {"return_tokens_as_token_ids": st.booleans()}
    if path == COMPLETIONS:
        fields |= {"echo": st.booleans(), "logprobs": st.sampled_from([None, 0, 1])}
    else:
        fields |= {"logprobs": st.booleans()}
    body = {"n": len(answers[0].choices)} | data.draw(st.fixed_dictionaries(fields), "body")
    if path == COMPLETIONS:
        body["prompt"] = [answer.prompt for answer in answers]
        body["max_tokens"] = data.draw(st.sampled_from([0, 9])) if body["echo"] else 9
    elif body["logprobs"]:
        body["top_logprobs"] = data.draw(st.integers(0, 2))
    return body_of(path) | body


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_any_chunks_joined_are_the_whole_answer(byte_tokenizer: Tokenizer, path: str) -> None:
    core = ScriptedEngine(byte_tokenizer)
    engine = AsyncEngine(core)
    service = Service.of(engine, NAMES)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        n = data.draw(st.integers(1, 3), "n")
        num_prompts = data.draw(st.integers(1, 3), "prompts") if path == COMPLETIONS else 1
        answers = [data.draw(make_answer(n), "answer") for _ in range(num_prompts)]
        core.whole = [whole(answer) for answer in answers]
        core.pieces = [steps(answer) for answer in answers]
        body = draw_body(data, path, answers)
        options = data.draw(st.sampled_from(OPTIONS), "options")

        async def scenario(client: httpx.AsyncClient) -> None:
            answer = (await client.post(path, json=body)).json()
            response = await client.post(
                path, json={**body, "stream": True, "stream_options": options}
            )
            *chunks, last = read_events(response.content)
            joined = json.dumps(join_chunks(path, chunks))
            assert joined == json.dumps(simplify(path, answer))
            found, expected = last["usage"], answer["usage"]
            assert found["completion_tokens"] == expected["completion_tokens"]
            assert path == CHAT or found == expected  # the script knows no template

        call(service, scenario)

    try:
        check()
    finally:
        engine.shutdown()
