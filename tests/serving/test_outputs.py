"""The classes of results."""

import dataclasses

import pytest

from moejax_serving.outputs import CompletionOutput, Logprob, RequestOutput


def test_a_result_holds_what_vllm_gives() -> None:
    logprobs = [{7: Logprob(-0.5, rank=1, decoded_token=" a")}]
    choice = CompletionOutput(0, " a", (7,), -0.5, logprobs, "stop", "\n")
    output = RequestOutput("id", "once", [1, 2], [None, {2: Logprob(-1.0)}], [choice], True, 0)
    assert output.outputs[0].token_ids == (7,)
    assert output.outputs[0].is_finished()
    assert output.prompt_logprobs is not None and output.prompt_logprobs[1] == {2: Logprob(-1.0)}


def test_an_unfinished_sequence_says_so() -> None:
    assert not CompletionOutput(0, "", []).is_finished()


def test_results_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Logprob(-1.0).logprob = 0.0  # type: ignore[misc]
