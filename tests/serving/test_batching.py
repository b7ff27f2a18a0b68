"""Many requests at once, on the built-in model: each gets what it gets alone."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moejax_serving import EngineConfig, RequestOutput, SamplingParams
from moejax_serving.compiles import num_compiles
from moejax_serving.engine import Engine
from moejax_serving.load import load_engine

EOS = 0
VOCAB = 8192


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("MOEJAX_CACHE", str(folder))
    yield folder
    patch.undo()


def make_engine(tokens: int, **options: Any) -> Engine:
    """An engine in float32 with KV cache for as many tokens."""
    settings = {"dtype": "float32", "max_model_len": 320, "max_num_batched_tokens": 48, **options}
    found = load_engine(
        None,
        EngineConfig(**{"memory_budget": 80 << 20, **settings, "warm_up": False}),
        progress=False,
    )
    memory = found.memory
    pages = memory.block_pages * tokens // memory.block_size
    # A page, and the entry that points to it.
    budget = memory.budget - (memory.kv_pages - pages) * (memory.kv // memory.kv_pages + 4)
    return load_engine(None, EngineConfig(memory_budget=budget, **settings), progress=False)


@pytest.fixture(scope="module")
def crowded(cache: pathlib.Path) -> Engine:
    """Sixteen rows, and room for five or so of the sequences below."""
    return make_engine(1024, max_num_seqs=16, check=True, warm_up=False)


@pytest.fixture(scope="module")
def lonely(cache: pathlib.Path) -> Engine:
    """For one request at a time, with nothing kept between them."""
    return make_engine(2560, max_num_seqs=1, enable_prefix_caching=False, warm_up=False)


def run(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
    return outputs


def run_alone(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    engine.add_request("alone", prompt, params)
    return run(engine)["alone"]


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of four families, which begin the same for 70 to 130 tokens."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(300, VOCAB, n).tolist() for n in (70, 96, 130, 64)]
    return [stems[i % 4] + rng.integers(300, VOCAB, 1 + 3 * i % 60).tolist() for i in range(count)]


def assert_same_choices(found: RequestOutput, wanted: RequestOutput) -> None:
    """The same tokens, or at the first other one a tie: each in the other's top two, within 1e-4.

    XLA's products differ in the last bits between shapes of batches.
    """
    a, b = found.outputs[0], wanted.outputs[0]
    assert a.logprobs is not None and b.logprobs is not None
    for mine, others, my_entry, other_entry in zip(
        a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True
    ):
        if mine != others:
            assert mine in other_entry and others in my_entry
            for entry in (my_entry, other_entry):
                assert abs(entry[mine].logprob - entry[others].logprob) < 1e-4
            return
        assert my_entry[mine].logprob == pytest.approx(other_entry[mine].logprob, abs=1e-4)


def preemptions(engine: Engine) -> float:
    return value_of(engine, "vllm:num_preemptions_total")


def value_of(engine: Engine, name: str) -> float:
    lines = engine.metrics.render()[0].decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


@pytest.mark.shows(
    "engine", "64 requests at once, with shared prefixes, chunks and preemption: the same tokens"
)
def test_64_requests_at_once_get_the_tokens_of_each_one_alone(
    crowded: Engine, lonely: Engine
) -> None:
    before, hits = preemptions(crowded), value_of(crowded, "vllm:prefix_cache_hits_total")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    prompts = make_prompts(64)
    for i, prompt in enumerate(prompts):
        crowded.add_request(str(i), prompt, params)
    outputs = run(crowded)
    assert preemptions(crowded) - before >= 5
    assert value_of(crowded, "vllm:prefix_cache_hits_total") - hits >= 1000
    assert max(output.num_cached_tokens for output in outputs.values()) >= 64
    for i, prompt in enumerate(prompts):
        assert_same_choices(outputs[str(i)], run_alone(lonely, prompt, params))


def test_random_and_penalised_choices_are_the_same_in_a_crowd(
    crowded: Engine, lonely: Engine
) -> None:
    """A penalty that was counted wrong after a preemption would show."""
    before = preemptions(crowded)
    prompts = make_prompts(24, seed=1)
    variants = [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.0, "frequency_penalty": 2.0},
        {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 0.9, "seed": 3, "logit_bias": {i: 5.0 for i in range(400, 420)}},
        {"temperature": 0.7, "seed": 8, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    ]
    all_params = [
        SamplingParams(max_tokens=40, ignore_eos=True, **variants[i % 5]) for i in range(24)
    ]
    for i, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
        crowded.add_request(str(i), prompt, params)
    outputs = run(crowded)
    assert preemptions(crowded) > before
    for i, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
        alone = run_alone(lonely, prompt, params)
        assert outputs[str(i)].outputs[0].token_ids == alone.outputs[0].token_ids


def test_what_a_stream_gives_joins_to_the_whole(crowded: Engine) -> None:
    """Under preemption too; with log-probabilities of prompt and output, and three answers."""
    params = SamplingParams(
        temperature=1.0, seed=3, n=3, max_tokens=30, logprobs=1, prompt_logprobs=0, stop=["zq"]
    )
    prompts = make_prompts(8, seed=2)
    for i, prompt in enumerate(prompts):
        crowded.add_request(f"whole {i}", prompt, params)
    wholes = run(crowded)
    for i, prompt in enumerate(prompts):
        crowded.add_request(f"stream {i}", prompt, params, stream=True)
    joined: dict[str, list[RequestOutput]] = {}
    while crowded.has_unfinished():
        for output in crowded.step():
            joined.setdefault(output.request_id, []).append(output)
    for i in range(len(prompts)):
        parts, whole = joined[f"stream {i}"], wholes[f"whole {i}"]
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[0].prompt_logprobs is not None
        assert len(parts[0].prompt_logprobs) == len(prompts[i])
        assert all(part.prompt_logprobs is None for part in parts[1:])
        for wanted in whole.outputs:
            mine = [c for part in parts for c in part.outputs if c.index == wanted.index]
            assert sum((list(c.token_ids) for c in mine), []) == wanted.token_ids
            assert "".join(c.text for c in mine) == wanted.text
            assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [
                wanted.finish_reason
            ]
            entries = [entry for c in mine for entry in c.logprobs or []]
            assert [list(entry) for entry in entries] == [
                list(entry) for entry in wanted.logprobs or []
            ]
    texts = [choice.text for choice in wholes["whole 0"].outputs]
    assert len(set(texts)) == 3  # each with a seed of its own


def test_n_answers_are_those_of_seeds_that_follow(crowded: Engine, lonely: Engine) -> None:
    (prompt,) = make_prompts(1, seed=3)
    params = SamplingParams(temperature=1.0, seed=2**63 - 2, n=3, max_tokens=12, ignore_eos=True)
    crowded.add_request("n", prompt, params)
    output = run(crowded)["n"]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    for choice, seed in zip(output.outputs, (2**63 - 2, 2**63 - 1, -(2**63)), strict=True):
        one = SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True)
        assert run_alone(lonely, prompt, one).outputs[0].token_ids == choice.token_ids


def test_min_tokens_bans_every_end(lonely: Engine) -> None:
    prompt = make_prompts(1)[0]
    first = run_alone(lonely, prompt, SamplingParams(temperature=0, max_tokens=1))
    stop = first.outputs[0].token_ids[0]
    options = {"temperature": 0, "stop_token_ids": [stop], "max_tokens": 20}
    assert len(run_alone(lonely, prompt, SamplingParams(**options)).outputs[0].token_ids) == 1
    later = run_alone(lonely, prompt, SamplingParams(**options, min_tokens=5)).outputs[0]
    assert stop not in later.token_ids[:5]
    biased = SamplingParams(**options, min_tokens=5, logit_bias={stop: 100})
    found = run_alone(lonely, prompt, biased).outputs[0]
    assert found.token_ids[5:] == [stop] and stop not in found.token_ids[:5]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)


@pytest.mark.shows("engine", "no program is compiled after the start, whatever is asked for")
def test_a_random_workload_compiles_nothing(cache: pathlib.Path) -> None:
    engine = make_engine(384, max_num_seqs=6, max_num_batched_tokens=40, check=True)
    assert value_of(engine, "moejax:jit_compiles_total") > 0
    before, shown = num_compiles(), value_of(engine, "moejax:jit_compiles_total")
    rng = np.random.default_rng(0)
    prompts = make_prompts(60, seed=4)
    added = 0
    while added < len(prompts) or engine.has_unfinished():
        for _ in range(rng.integers(0, 4)):
            if added < len(prompts):
                engine.add_request(
                    str(added),
                    prompts[added][rng.integers(0, 60) :],
                    random_params(rng),
                    stream=bool(rng.integers(2)),
                )
                added += 1
        if rng.random() < 0.1:
            engine.abort(str(rng.integers(added + 1)))
        engine.step()
    assert num_compiles() == before
    assert value_of(engine, "moejax:jit_compiles_total") == shown
    assert value_of(engine, "vllm:num_preemptions_total") > 0


def random_params(rng: np.random.Generator) -> SamplingParams:
    def maybe(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.3 else neutral

    return SamplingParams(
        n=maybe(2, 1),
        temperature=maybe(0.0, 0.9),
        top_p=maybe(0.9, 1.0),
        top_k=maybe(40, 0),
        min_p=maybe(0.05, 0.0),
        presence_penalty=maybe(1.0, 0.0),
        frequency_penalty=maybe(1.0, 0.0),
        repetition_penalty=maybe(1.2, 1.0),
        logit_bias=maybe({500: 2.0, 7: -100.0}, None),
        min_tokens=maybe(3, 0),
        max_tokens=int(rng.integers(3, 90)),
        seed=maybe(11, None),
        stop=maybe(["the"], None),
        logprobs=maybe(int(rng.integers(0, 21)), None),
        prompt_logprobs=maybe(int(rng.integers(0, 21)), None),
    )


def test_closing_drops_everything_and_leaves_the_engine_ready(crowded: Engine) -> None:
    for i, prompt in enumerate(make_prompts(20, seed=5)):
        crowded.add_request(str(i), prompt, SamplingParams(max_tokens=20))
    for _ in range(5):
        crowded.step()
    crowded.close()
    assert not crowded.has_unfinished()
    crowded.check()
    assert value_of(crowded, "vllm:kv_cache_usage_perc") == 0
    crowded.add_request("a", [500, 600], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(run(crowded)["a"].outputs[0].token_ids) == 2
