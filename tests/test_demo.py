"""The built-in model through `LLM`: what Hugging Face computes, and what users rely on."""

import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import signal

import numpy as np
import pytest

from moejax.errors import CapacityError, CheckpointError, ConfigError, RequestError
from moejax_serving import LLM, SamplingParams

REFERENCE = json.loads((pathlib.Path(__file__).parent / "data" / "demo.json").read_text())
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("MOEJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield LLM(
        dtype="float32",
        memory_budget="256MiB",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=256,
        warm_up=False,
        check=True,
    )
    patch.undo()


@pytest.mark.shows("Python", "`LLM.generate`: texts, batches, greedy tokens equal to transformers")
def test_texts_and_tokens_equal_hugging_face(llm):
    outputs = llm.generate([row["text"] for row in REFERENCE], GREEDY)
    for output, row in zip(outputs, REFERENCE, strict=True):
        assert output.prompt == row["text"]
        assert output.prompt_token_ids == row["prompt_token_ids"]
        assert output.outputs[0].token_ids == row["token_ids"]
        assert output.outputs[0].text == row["completion"]
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.shows("Python", "log-probabilities of prompt and output")
def test_logprobs_of_prompt_and_output_equal_hugging_face(llm):
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=0)
    outputs = llm.generate([row["text"] for row in REFERENCE], params)
    for output, row in zip(outputs, REFERENCE, strict=True):
        completion = output.outputs[0]
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        found = [entry[token].logprob for token, entry in zip(tokens[1:], entries, strict=True)]
        assert found == pytest.approx(row["logprobs"], abs=1e-4)
        assert completion.cumulative_logprob == pytest.approx(sum(found[-24:]))
        assert [len(entry) for entry in completion.logprobs] == [2] * 24
        assert all(entry[t].rank == 1 for t, entry in zip(tokens[-24:], entries[-24:], strict=True))


@pytest.mark.shows("memory", "prompts longer than a step, in chunks")
def test_a_prompt_in_chunks_gives_the_tokens_of_a_prompt_in_one_piece(llm):
    """40 tokens take two steps of at most 32."""
    row = REFERENCE[0]
    tokens = row["prompt_token_ids"] + row["token_ids"]
    prompt = (tokens * 3)[:40]
    alone = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0]
    crowd = [{"prompt_token_ids": (tokens * 3)[:n]} for n in (7, 40, 1, 33, 64, 39)]
    outputs = llm.generate(crowd, GREEDY)
    assert outputs[1].outputs[0].token_ids == alone.outputs[0].token_ids
    whole = llm.generate(
        {"prompt_token_ids": prompt + list(alone.outputs[0].token_ids)[:-1]},
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
    )[0]
    ranks = [
        entry[token].rank
        for token, entry in zip(
            whole.prompt_token_ids[40:], whole.prompt_logprobs[40:], strict=True
        )
    ]
    assert ranks == [1] * 23
    assert whole.outputs[0].token_ids[0] == alone.outputs[0].token_ids[-1]


@pytest.mark.shows("Python", "temperature, top-p, seeds; in float32 independent of the batch")
def test_a_seed_gives_the_same_text_alone_and_in_company(llm):
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12)
    others = SamplingParams(temperature=1.0, max_tokens=12)
    text = REFERENCE[1]["text"]
    alone = llm.generate(text, params)[0].outputs[0].token_ids
    crowd = llm.generate([text, text, "Once", text], [others, params, others, params])
    assert crowd[1].outputs[0].token_ids == alone
    assert crowd[3].outputs[0].token_ids == alone
    assert crowd[0].outputs[0].token_ids != alone


def test_forced_tokens_are_taken_and_scored(llm):
    row = REFERENCE[0]
    forced = [row["token_ids"][0], 17, 99]
    output = llm.generate(
        {"prompt_token_ids": row["prompt_token_ids"], "forced_token_ids": forced},
        SamplingParams(temperature=0, max_tokens=1),
    )[0]
    completion = output.outputs[0]
    assert completion.token_ids == forced
    assert completion.finish_reason == "length"
    at = len(row["prompt_token_ids"]) - 1
    assert completion.logprobs[0][forced[0]].logprob == pytest.approx(row["logprobs"][at], abs=1e-4)
    whole = llm.generate(
        {"prompt_token_ids": row["prompt_token_ids"] + forced},
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
    )[0]
    for token, made, seen in zip(
        forced, completion.logprobs, whole.prompt_logprobs[at + 1 :], strict=True
    ):
        assert made[token].logprob == pytest.approx(seen[token].logprob, abs=1e-4)


@pytest.mark.shows("Python", "stop strings over token borders, stop tokens")
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_token_borders_ends_the_text(llm, include):
    row = REFERENCE[0]
    whole = row["completion"]
    at = len(whole) // 2
    stop = whole[at : at + 5]
    end = whole.index(stop)
    params = SamplingParams(
        temperature=0, max_tokens=24, stop=["@@", stop], include_stop_str_in_output=include
    )
    completion = llm.generate(row["text"], params)[0].outputs[0]
    assert completion.text == whole[: end + (5 if include else 0)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stop_token_ends_the_sequence_and_is_not_in_the_text(llm):
    row = REFERENCE[0]
    stop = row["token_ids"][4]
    first = row["token_ids"].index(stop)
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop])
    completion = llm.generate(row["text"], params)[0].outputs[0]
    assert completion.token_ids == row["token_ids"][: first + 1]
    assert completion.text == llm.get_tokenizer().decode(row["token_ids"][:first])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_output_ends_where_the_context_does(llm):
    prompt = list(itertools.islice(itertools.cycle(REFERENCE[0]["token_ids"]), 250))
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    completion = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0]
    assert len(completion.token_ids) == 6
    assert completion.finish_reason == "length"


def test_nothing_is_held_after_requests_have_ended_or_failed(llm):
    before = llm.engine.memory
    with pytest.raises(CapacityError, match=r"300 tokens; .* max_model_len = 256"):
        llm.generate([REFERENCE[0]["text"], {"prompt_token_ids": [1] * 300}], GREEDY)
    assert not llm.engine.has_unfinished()
    assert llm.generate("The", SamplingParams(temperature=0, max_tokens=2))[0].finished
    llm.engine.check()
    assert llm.engine.memory == before


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"prompt_token_ids": []}, "no tokens"),
        ({"prompt_token_ids": [8192]}, "8192 is not in the vocabulary of 8192"),
        ({"prompt_token_ids": [-1]}, "-1 is not in the vocabulary"),
        ({"text": "x"}, "prompt_token_ids"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a list of integers, got 'ab'"),
        ({"prompt_token_ids": None}, "prompt_token_ids must be a list of integers, got None"),
        ({"prompt_token_ids": [1.9]}, r"prompt_token_ids\[0\] must be an integer, got 1.9"),
        ({"prompt_token_ids": [10**5000]}, "a value of type int is not in the vocabulary"),
        (
            {"prompt_token_ids": [1], "forced_token_ids": ["5"]},
            r"forced_token_ids\[0\] must be an integer, got '5'",
        ),
        (
            {"prompt_token_ids": [1], "forced_token_ids": None},
            "forced_token_ids must be a list of integers, got None",
        ),
        ({"prompt": "x", "multi_modal_data": {}}, r"prompts\[0\] has 'multi_modal_data', which"),
        ({"prompt": 5}, r"prompts\[0\]: prompt must be a text, got 5"),
        (5, r"prompts\[0\] must be a text or .*, got 5"),
    ],
)
def test_wrong_prompts_are_refused(llm, prompt, text):
    with pytest.raises(RequestError, match=text):
        llm.generate([prompt], GREEDY)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("prompts", [None, 5, b"x", iter(["x"])])
def test_what_is_no_list_of_prompts_is_refused(llm, prompts):
    with pytest.raises(RequestError, match="prompts must be a text, .* or a list of it, got"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_tokens": 1}, "sampling_params must be SamplingParams .*, got {'max_tokens': 1}"),
        (5, "sampling_params must be SamplingParams .*, got 5"),
        ([None], r"sampling_params\[0\] must be SamplingParams, got None"),
        ([GREEDY, GREEDY], "1 prompts, but 2 sampling parameters"),
        (SamplingParams(stop_token_ids=[5, 8192]), "stop_token_ids: 8192 is not in the vocabulary"),
    ],
)
def test_wrong_sampling_parameters_are_refused(llm, params, text):
    with pytest.raises(RequestError, match=text):
        llm.generate("x", params)
    assert not llm.engine.has_unfinished()


def test_prompts_come_as_texts_and_arrays(llm):
    ids = llm.get_tokenizer().encode("Once upon")
    prompts = ["Once upon", {"prompt": "Once upon"}, {"prompt_token_ids": np.array(ids)}]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 3


def test_a_text_that_cannot_fit_is_refused_before_it_is_read_whole(llm):
    with pytest.raises(CapacityError, match="its first .* tokens already; max_model_len = 256"):
        llm.generate("no " * 5_000_000, GREEDY)


def test_threads_may_call_at_the_same_time(llm):
    def complete(row):
        return llm.generate(row["text"], GREEDY)[0].outputs[0].token_ids

    rows = REFERENCE * 3
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(complete, rows)) == [row["token_ids"] for row in rows]


@pytest.mark.shows("Python", "Ctrl-C in the middle leaves the model ready")
def test_an_interrupted_call_leaves_the_model_ready(llm):
    row = REFERENCE[0]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for round_ in range(6):
            signal.setitimer(signal.ITIMER_REAL, 0.005 + 0.02 * round_)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    llm.generate([row["text"]] * 6, GREEDY)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert not llm.engine.has_unfinished()
            llm.engine.check()
        found = llm.generate(row["text"], GREEDY)[0].outputs[0].token_ids
        assert found == row["token_ids"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.shows("Python", "`LLM.chat` through the model's chat template")
def test_chat_answers_through_the_template(llm):
    output = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)[0]
    assert output.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat(
        [[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Bye"}]], GREEDY
    )
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(both) == 2


def test_chat_takes_text_parts_as_the_server_does(llm):
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    output = llm.chat([{"role": "user", "content": content}], GREEDY)[0]
    assert "user\na\nb<|im_end|>" in output.prompt


HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (None, "messages must be a list of messages .*, got None"),
        (HELLO, "messages must be a list of messages .*, got {'"),
        (iter([HELLO]), "messages must be a list of messages .*, got <"),
        ([HELLO, {"role": "user"}], r"messages\[1\] has no content"),
        ([[HELLO], [{"role": "user"}]], r"messages\[1\]\[0\] has no content"),
        ([None], r"messages\[0\] must be a list of messages, got None"),
        ([[]], "messages is empty"),
    ],
)
def test_wrong_messages_are_refused(llm, messages, text):
    with pytest.raises(RequestError, match=text):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tokenize", True, "tokenize=True is not supported"),
        ("self", 1, "self=1 is not supported"),
        ("continue_final_message", True, "continue_final_message=True is not supported"),
        ("tools", [{}], r"tools=\[{}\] is not supported"),
        ("lora_request", 1, "lora_request=1 is not supported"),
        ("max_tokens", 5, "max_tokens is set in SamplingParams"),
        ("chat_template_kwargs", {"self": 1}, "may not set self"),
        ("chat_template_kwargs", 5, "chat_template_kwargs must be a mapping"),
    ],
)
def test_what_no_template_would_see_is_refused_by_name(llm, name, value, text):
    with pytest.raises(RequestError, match=text):
        llm.chat([HELLO], GREEDY, **{name: value})


def test_chat_takes_what_asks_for_nothing(llm):
    options = {"tools": None, "continue_final_message": False, "chat_template_kwargs": {"x": 1}}
    assert llm.chat([HELLO], GREEDY, **options)[0].finished


def test_default_sampling_is_that_of_the_card(llm):
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p) == (0.8, 0.95)


@pytest.mark.shows("memory", "a budget for everything; the plan adds up to it")
def test_the_plan_adds_up_to_the_budget(llm):
    memory = llm.engine.memory
    kinds = memory.dense + memory.experts + memory.kv + memory.workspace + memory.staging
    kinds += memory.tables
    assert kinds <= memory.budget == 256 << 20
    assert memory.kv_tokens >= 256


@pytest.mark.shows("memory", "a model that does not fit is refused with the numbers")
def test_a_model_that_does_not_fit_is_refused_with_the_numbers(llm):
    with pytest.raises(
        CapacityError,
        match=r"needs at least .*: experts .*, KV of 32 tokens .* budget is 10.00 MiB",
    ):
        LLM(memory_budget=10 << 20)


def test_a_context_that_does_not_fit_is_refused_only_if_it_was_asked_for():
    small = {"memory_budget": "53MiB", "max_num_seqs": 1, "max_num_batched_tokens": 32}
    with pytest.raises(
        CapacityError, match=r"needs at least .* of 1024 tokens \(max_model_len\): .* KV of 1024"
    ):
        LLM(dtype="float32", max_model_len=1024, **small)
    llm = LLM(dtype="float32", warm_up=False, **small)
    assert 32 <= llm.engine.max_model_len <= llm.engine.memory.kv_tokens < 1024


def test_wrong_settings_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="dtype must be"):
        LLM(dtype="float16")
    with pytest.raises(
        ConfigError, match="max_num_seqs must be a whole number of at least 1, got 0"
    ):
        LLM(max_num_seqs=0)
    with pytest.raises(ConfigError, match="more than the model's 1024 positions"):
        LLM(max_model_len=4096)
    with pytest.raises(ConfigError, match="gpu_memory_utilization is no setting; these are: dtype"):
        LLM(gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="model must be the path of a folder, got 5"):
        LLM(5)
    with pytest.raises(ConfigError, match="has more than 40 digits"):
        LLM(memory_budget="9" * 5000)
    with pytest.raises(CheckpointError, match="nothing"):
        LLM(tmp_path / "nothing")


def test_perplexity_is_finite_on_nonsense(llm):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    output = llm.generate({"prompt_token_ids": list(range(5, 95))}, params)[0]
    values = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    assert len(values) == 89
    assert all(math.isfinite(value) and value <= 0 for value in values)


def test_ctrl_c_while_requests_are_added_leaves_the_model_ready(llm, monkeypatch, request):
    """Between the queue and the list of requests an interrupt would leave orphans behind."""
    add, count = llm.engine.add_request, 0

    def adding(*args, **kwargs):
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        add(*args, **kwargs)

    monkeypatch.setattr(llm.engine, "add_request", adding)
    # A process that was started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The sea"] * 5, SamplingParams(n=3, max_tokens=4), use_tqdm=False)
    assert not llm.engine.has_unfinished()
    llm.engine.check()
    (output,) = llm.generate("The sea", SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    assert [len(choice.token_ids) for choice in output.outputs] == [3, 3]
