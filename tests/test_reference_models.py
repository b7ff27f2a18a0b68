"""Every supported family, in both layouts, against Hugging Face's own numbers (float32, CPU)."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.checkpoint import Checkpoint
from moejax.models.decoder import abstract_params, flatten_params, unflatten_params
from moejax.models.whole import forward, read_stacked
from moejax_converters.convert import convert
from moejax_serving import LLM, SamplingParams

FAMILIES = ["mixtral", "mixtral_swa", "qwen2_moe", "qwen3_moe", "olmoe", "olmoe_clip"]
LAYOUTS = [family + suffix for family in FAMILIES for suffix in ("", "-fused")]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request, shared_dir, tmp_path_factory):
    """(converted folder, Hugging Face's reference numbers)"""
    source = shared_dir / "tiny_models" / "out" / request.param
    folder = tmp_path_factory.mktemp("converted") / request.param
    convert(source, folder, progress=False)
    reference = source.parent / request.param.removesuffix("-fused") / "reference.npz"
    return folder, np.load(reference)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def read_params(checkpoint: Checkpoint):
    like = abstract_params(checkpoint.config, "float32")
    names = flatten_params(like)
    return unflatten_params({n: checkpoint.read_dense(n, "float32") for n in names}, like)


def test_logits_of_whole_sequences_equal_the_reference(model):
    folder, reference = model
    checkpoint = Checkpoint.open(folder)
    logits = forward(
        read_params(checkpoint),
        read_stacked(checkpoint, "float32"),
        jnp.asarray(reference["input_ids"], jnp.int32),
        config=checkpoint.config,
        dtype="float32",
    )
    np.testing.assert_allclose(np.asarray(logits), reference["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.shows("models", "`mixtral` (with sliding window), `qwen2_moe`, `qwen3_moe`, `olmoe`")
def test_generated_tokens_and_their_logprobs_equal_the_reference(model):
    folder, reference = model
    llm = open_llm(folder)
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=20, prompt_logprobs=20
    )
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in reference["input_ids"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == reference["greedy"].tolist()
    prompt_logprobs = log_softmax(reference["logits"])
    step_logprobs = log_softmax(reference["step_logits"])
    for row, output in enumerate(outputs):
        assert output.prompt_logprobs[0] is None
        for at, entries in enumerate(output.prompt_logprobs[1:]):
            assert_entries(entries, prompt_logprobs[row, at])
        for at, entries in enumerate(output.outputs[0].logprobs):
            assert_entries(entries, step_logprobs[row, at])


def open_llm(folder: pathlib.Path) -> LLM:
    return LLM(
        folder,
        memory_budget="64MiB",
        skip_tokenizer_init=True,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        warm_up=False,
        check=True,
    )


def assert_entries(entries: dict, expected: np.ndarray) -> None:
    assert len(entries) >= 20
    for token, entry in entries.items():
        assert entry.logprob == pytest.approx(expected[token], abs=TOLERANCE)
        if entry.rank == 1:
            assert entry.logprob >= expected.max() - TOLERANCE
