"""`moejax-serve` as a user starts it, with the built-in model, asked by the openai client."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import openai
import pytest

REFERENCE = json.loads((pathlib.Path(__file__).parent / "data" / "demo.json").read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(URL, the process); the process must end cleanly."""
    environment = {**os.environ, "MOEJAX_CACHE": str(tmp_path_factory.mktemp("cache"))}
    command = [sys.executable, "-m", "moejax_serving.cli", "--port", "0", "--dtype", "float32"]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--memory-budget", "200MB"]
    log = tmp_path_factory.mktemp("log") / "stderr"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert found is not None, log.read_text()
        yield found[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert "Traceback" not in log.read_text()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.shows("server", "`moejax-serve` without arguments: the built-in model")
def test_texts_of_several_prompts_are_those_of_hugging_face(client):
    answer = client.completions.create(
        model="demo", prompt=[row["text"] for row in REFERENCE], max_tokens=24, temperature=0
    )
    assert [choice.text for choice in answer.choices] == [row["completion"] for row in REFERENCE]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert answer.usage.completion_tokens == 72


def test_token_ids_and_logprobs_are_those_of_hugging_face(client):
    row = REFERENCE[0]
    answer = client.completions.create(
        model="demo", prompt=row["prompt_token_ids"], max_tokens=24, temperature=0, logprobs=1
    )
    made = row["logprobs"][len(row["prompt_token_ids"]) - 1 :]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(made, abs=1e-4)


def test_a_chat_is_answered_with_the_cards_sampling_and_a_seed(client):
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    answers = [
        client.chat.completions.create(model="demo", messages=messages, max_tokens=16, seed=seed)
        for seed in (1, 1, 2)
    ]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] == texts[1] != texts[2]


def test_a_wrong_request_leaves_the_server_working(client):
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model="demo", prompt=[5] * 2000, max_tokens=4)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.completions.create(model="demo", prompt="x", stream=True)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="demo", prompt=[9000], max_tokens=4)
    assert client.completions.create(model="demo", prompt="x", max_tokens=2).choices
