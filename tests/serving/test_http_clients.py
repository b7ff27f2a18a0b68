"""OpenAI's own client, as its users call it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import httpx2
import openai
import pytest

from moejax_serving.async_engine import AsyncEngine
from moejax_serving.http import create_app
from moejax_serving.service import Service
from serving.http_calls import NAMES, run

MODEL = "org/alias"


def run_openai(
    core: Any, scenario: Callable[[openai.AsyncOpenAI], Awaitable[None]], **options: Any
) -> None:
    """Runs the scenario on a client of an application."""

    async def with_client(_: httpx.AsyncClient, engine: AsyncEngine) -> None:
        transport = httpx2.ASGITransport(create_app(Service.of(engine, NAMES)))
        async with (
            httpx2.AsyncClient(transport=transport) as http_client,
            openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=http_client, max_retries=0
            ) as client,
        ):
            await scenario(client)

    run(core, with_client, **options)


def test_the_openai_client_understands_everything(fake_engine: Any) -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == list(NAMES)
        assert (await client.models.retrieve(MODEL)).owned_by == "moejax"
        completion = await client.completions.create(
            model=MODEL, prompt=["x", "y"], logprobs=1, extra_body={"min_p": 0.1}
        )
        assert [choice.text for choice in completion.choices] == ["Hello", "Hello"]
        assert completion.choices[0].logprobs is not None
        chat = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            logprobs=True,
            top_logprobs=1,
            max_completion_tokens=5,
        )
        assert chat.choices[0].message.content == "Hello"
        assert chat.choices[0].finish_reason == "length"
        assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
        assert chat.usage is not None and chat.usage.completion_tokens == 5
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="x")
        assert missing.value.code == "model_not_found" and missing.value.param == "model"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.completions.create(model=MODEL, prompt="x" * 64)
        assert wrong.value.code == "context_length_exceeded"

    run_openai(fake_engine, scenario)


def test_the_openai_client_reads_streams(fake_engine: Any) -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        texts = ["", ""]
        completion = await client.completions.create(
            model=MODEL, prompt="x", n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in completion]
        for chunk in chunks[:-1]:
            (choice,) = chunk.choices
            assert chunk.usage is None
            texts[choice.index] += choice.text
        assert texts == ["Hello", "Hello"]
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12

    run_openai(fake_engine, scenario)


def test_the_openai_client_puts_a_streamed_chat_together(fake_engine: Any) -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        async with client.chat.completions.stream(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            logprobs=True,
            stream_options={"include_usage": True},
        ) as stream:
            async for _ in stream:
                pass
            chat = await stream.get_final_completion()
        (choice,) = chat.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello")
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(entry.token for entry in choice.logprobs.content) == "Hello<|end|>"
        assert chat.usage is not None and chat.usage.completion_tokens == 6

    run_openai(fake_engine, scenario)


def test_the_openai_client_raises_the_error_of_a_stream(fake_engine: Any) -> None:
    fake_engine.finish_reason = "error"

    async def scenario(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="finish reason error"):
            async for _ in stream:
                pass

    run_openai(fake_engine, scenario)


def test_the_blocking_client_reads_streams_too(fake_engine: Any) -> None:
    engine = AsyncEngine(fake_engine)
    app = create_app(Service.of(engine, NAMES))

    def answer(request: httpx2.Request) -> httpx2.Response:
        async def forward() -> httpx2.Response:
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport) as client:
                return await client.post(str(request.url), json=json.loads(request.content))

        response = asyncio.run(forward())
        return httpx2.Response(
            response.status_code, headers=response.headers, content=response.content
        )

    try:
        with (
            httpx2.Client(transport=httpx2.MockTransport(answer)) as http_client,
            openai.OpenAI(
                base_url="http://test/v1", api_key="none", http_client=http_client, max_retries=0
            ) as client,
        ):
            stream = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            texts = [chunk.choices[0].delta.content or "" for chunk in stream]
    finally:
        engine.shutdown()
    assert "".join(texts) == "Hello"
