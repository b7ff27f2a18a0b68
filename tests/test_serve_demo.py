"""`moejax-serve` as a user starts it, with the built-in model, asked by the openai client."""

import asyncio
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.request

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

REFERENCE = json.loads((pathlib.Path(__file__).parent / "data" / "demo.json").read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory, demo_cache):
    """(URL, the process); the process must end cleanly."""
    environment = {**os.environ, "MOEJAX_CACHE": str(demo_cache)}
    command = [sys.executable, "-m", "moejax_serving.cli", "--port", "0", "--dtype", "float32"]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--memory-budget", "200MB"]
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


@pytest.mark.shows("server", "the `openai` client: sync, async and streaming")
def test_the_async_client_streams_many_answers_at_once(server):
    """Chat and completions, with usage, joined to what comes without streaming."""

    async def stream_chat(client, seed):
        messages = [{"role": "user", "content": f"Tell me of {seed} ships."}]
        options = {"model": "demo", "messages": messages, "max_tokens": 16, "seed": seed}
        whole = await client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
        chunks = await client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        text, tokens, usage, reasons = "", [], [], []
        async for chunk in chunks:
            if chunk.usage is not None:
                usage.append(chunk.usage)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                tokens += [] if choice.logprobs is None else choice.logprobs.content
                reasons += [choice.finish_reason] if choice.finish_reason else []
        choice = whole.choices[0]
        assert text == choice.message.content
        assert [t.token for t in tokens] == [t.token for t in choice.logprobs.content]
        assert reasons == [choice.finish_reason]
        assert [u.completion_tokens for u in usage] == [whole.usage.completion_tokens]

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
            await asyncio.gather(*(stream_chat(client, seed) for seed in range(12)))

    asyncio.run(run())


def test_the_client_streams_several_answers_to_several_prompts(client):
    options = {"model": "demo", "prompt": ["The sea", "A ship"], "n": 2, "max_tokens": 12}
    options |= {"seed": 3, "temperature": 1.0, "presence_penalty": 0.5, "logit_bias": {"300": -5}}
    whole = client.completions.create(**options)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert len(set(texts.values())) == 4


@pytest.mark.shows("server", "lm-eval's contract: echo with log-probabilities of token-id prompts")
def test_the_contract_of_lm_eval(client, server):
    """What lm_eval/models/openai_completions.py sends, and what it does with the answer."""
    rows = REFERENCE[::-1]
    contexts = [row["prompt_token_ids"] for row in rows]
    answer = client.completions.create(
        model="demo",
        prompt=[row["prompt_token_ids"] + row["token_ids"] for row in rows],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    for choice, row, context in zip(
        sorted(answer.choices, key=lambda choice: choice.index), rows, contexts, strict=True
    ):
        found = choice.logprobs
        length = len(context) + len(row["token_ids"])
        assert len(found.token_logprobs) == len(found.top_logprobs) == length + 1
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        # The reference's entry i is of token i + 1.
        assert found.token_logprobs[1:-1] == pytest.approx(row["logprobs"], abs=1e-4)
        scores = found.token_logprobs[len(context) : -1]
        tops = found.top_logprobs[len(context) : -1]
        # The reference completions are greedy: float-equal to the likeliest, every one.
        assert [score == max(top.values()) for score, top in zip(scores, tops, strict=True)] == [
            True
        ] * len(row["token_ids"])
        assert any(
            score != max(top.values())
            for score, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)
        )
    info = get(server, "/tokenizer_info")
    ids = post(server, "/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})
    assert len(ids["tokens"]) == 1
    text = post(server, "/detokenize", {"tokens": contexts[0]})["prompt"]
    assert post(server, "/tokenize", {"prompt": text})["tokens"] == contexts[0]
    generated = client.completions.create(
        model="demo", prompt=rows[0]["text"], max_tokens=24, temperature=0, stop=["zzz", "\n\n"]
    )
    assert generated.choices[0].text == rows[0]["completion"].partition("\n\n")[0]


def get(server, path):
    with urllib.request.urlopen(server + path) as answer:
        return json.loads(answer.read())


def post(server, path, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def test_the_prefix_cache_is_used_and_counted(client):
    prompt = list(range(300, 500))
    for cached in (0, 192):  # blocks of 64 tokens; the last token is always computed
        answer = client.completions.create(model="demo", prompt=prompt, max_tokens=2)
        assert answer.usage.prompt_tokens_details.cached_tokens == cached


@pytest.mark.shows("server", "`/metrics` under vLLM's names, with the memory plan")
def test_metrics_are_those_of_real_requests(client, server):
    def metrics():
        with urllib.request.urlopen(f"{server}/metrics") as answer:
            text = answer.read().decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                kind = sample.labels.get("kind") or sample.labels.get("phase") or ""
                key = f"{sample.name} {kind}".strip()
                found[key] = found.get(key, 0) + sample.value
        return found

    before = metrics()
    answer = client.completions.create(
        model="demo", prompt=[7] * 9, max_tokens=5, n=2, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 10
    after = metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == 9
    assert grown["vllm:generation_tokens_total"] == 10
    assert grown["vllm:request_success_total"] == 1
    for name in (
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
    ):
        assert grown[name] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == 8
    assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0
    kinds = ("dense", "experts", "kv", "workspace", "tables", "staging")
    budget = sum(after[f"moejax:memory_bytes {kind}"] for kind in kinds)
    assert 0.95 * 200e6 < budget <= 200e6
    assert after["moejax:jit_compiles_total warmup"] > 0
    assert after.get("moejax:jit_compiles_total serving", 0) == 0


def test_a_wrong_request_leaves_the_server_working(client):
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model="demo", prompt=[5] * 2000, max_tokens=4)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="demo", prompt="x", suffix="y")
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model="demo", prompt="x", logit_bias={"9000": 1})
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="demo", prompt=[9000], max_tokens=4)
    assert client.completions.create(model="demo", prompt="x", max_tokens=2).choices
