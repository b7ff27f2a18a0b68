"""The engine with the built-in model: requests that come, end and go away in any order."""

import json
import pathlib

import numpy as np
import pytest

from moejax.errors import CapacityError, RequestError
from moejax_serving import EngineConfig, SamplingParams
from moejax_serving.load import load_engine

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "data" / "demo.json").read_text())


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Three rows, and blocks for fewer than three of the longest sequences."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MOEJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
    config = EngineConfig(
        dtype="float32",
        memory_budget=60 << 20,
        max_model_len=160,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        warm_up=False,
        check=True,
    )
    yield load_engine(None, config, progress=False)
    patch.undo()


def run(engine, until=None) -> dict:
    outputs = {}
    while engine.has_unfinished() and len(outputs) != until:
        for output in engine.step():
            outputs[output.request_id] = output
    return outputs


def greedy(max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def add_references(engine, copies: int) -> list[tuple[str, list[int]]]:
    added = []
    for i in range(copies):
        for n, row in enumerate(REFERENCE):
            engine.add_request(f"{i}.{n}", row["prompt_token_ids"], greedy())
            added.append((f"{i}.{n}", row["token_ids"]))
    return added


def test_more_requests_than_rows_all_get_the_tokens_of_one_alone(engine):
    added = add_references(engine, copies=4)
    outputs = run(engine)
    for request_id, tokens in added:
        assert outputs[request_id].outputs[0].token_ids == tokens


def test_aborted_requests_change_nothing_for_the_others(engine):
    """Aborts while waiting, in a prompt that takes several steps, and while decoding."""
    rng = np.random.default_rng(0)
    for i in range(6):
        engine.add_request(f"gone {i}", rng.integers(5, 8000, 70).tolist(), greedy(80))
    added = add_references(engine, copies=2)
    engine.step()
    engine.abort("gone 0")  # in prefill
    engine.abort("gone 5")  # waiting
    for _ in range(12):
        engine.step()
    for i in range(1, 5):
        engine.abort(f"gone {i}")
    engine.abort("gone 1")  # twice is once
    outputs = run(engine)
    assert set(outputs) == {request_id for request_id, _ in added}
    for request_id, tokens in added:
        assert outputs[request_id].outputs[0].token_ids == tokens
    engine.check()


def test_freed_pages_are_poison_and_are_never_read(engine):
    """With check=True a freed page is NaN: a stale read would show as NaN in a log-probability."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, prompt_logprobs=0)
    for round_ in range(3):
        for i in range(5):
            prompt = [(7 * i + j) % 8000 + 5 for j in range(20 * i + 1)]
            engine.add_request(f"{round_}.{i}", prompt, params)
        for output in run(engine).values():
            entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            assert all(np.isfinite(e.logprob) for entry in entries for e in entry.values())


def test_one_token_of_output_needs_no_decode_step(engine):
    engine.add_request("a", REFERENCE[0]["prompt_token_ids"], greedy(1))
    assert engine.step() == []  # the device has it
    (output,) = engine.step()
    assert output.outputs[0].token_ids == REFERENCE[0]["token_ids"][:1]
    assert not engine.has_unfinished()
    assert engine.step() == []


def test_the_longest_sequence_fills_the_context_exactly(engine):
    prompt = (REFERENCE[0]["prompt_token_ids"] * 20)[:159]
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert len(run(engine)["a"].outputs[0].token_ids) == 1
    with pytest.raises(CapacityError, match="160 tokens; .* max_model_len = 160"):
        engine.add_request("b", prompt + [5], greedy())


def test_a_request_id_in_use_is_refused(engine):
    engine.add_request("a", [5], greedy(1))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", [5], greedy(1))
    assert set(run(engine)) == {"a"}


def test_after_a_step_that_failed_the_books_are_in_order(engine, monkeypatch):
    """The runner's failure leaves the books in order: nothing is lost but the step."""
    engine.add_request("a", REFERENCE[0]["prompt_token_ids"], greedy(4))

    def fail(*_, **__):
        raise RuntimeError("no device")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "start", fail)
        with pytest.raises(RuntimeError, match="no device"):
            engine.step()
    engine.check()
    engine.add_request("b", REFERENCE[1]["prompt_token_ids"], greedy(4))
    outputs = run(engine)
    assert outputs["a"].outputs[0].token_ids == REFERENCE[0]["token_ids"][:4]
    assert outputs["b"].outputs[0].token_ids == REFERENCE[1]["token_ids"][:4]


def test_logits_that_are_not_finite_end_a_request_with_an_error(engine, monkeypatch):
    params = engine._runner._params
    broken = {**params, "norm": {"weight": params["norm"]["weight"] * np.float32(np.nan)}}
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_params", broken)
        engine.add_request("a", REFERENCE[0]["prompt_token_ids"], greedy(4))
        assert run(engine)["a"].outputs[0].finish_reason == "error"
    engine.add_request("b", REFERENCE[0]["prompt_token_ids"], greedy(4))
    assert run(engine)["b"].outputs[0].token_ids == REFERENCE[0]["token_ids"][:4]


def test_a_chunk_of_one_prompt_token_has_a_log_probability_too(engine):
    """31 tokens of the budget of 32 go to the first prompt."""
    prompt = REFERENCE[1]["prompt_token_ids"]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    engine.add_request("a", (REFERENCE[0]["prompt_token_ids"] * 5)[:31], greedy(2))
    engine.add_request("b", prompt, params)
    entries = run(engine)["b"].prompt_logprobs
    found = [entry[token].logprob for entry, token in zip(entries[1:], prompt[1:], strict=True)]
    assert found == pytest.approx(REFERENCE[1]["logprobs"][: len(prompt) - 1], abs=1e-4)
