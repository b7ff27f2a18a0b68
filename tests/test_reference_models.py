"""Every supported family, in every layout, against Hugging Face's own numbers (float32, CPU)."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import references
from moejax.arena.geometry import choose_geometry
from moejax.checkpoint import Checkpoint
from moejax_converters.convert import convert
from moejax_serving import EngineConfig, RequestOutput, SamplingParams
from moejax_serving.engine import Engine
from moejax_serving.load import load_engine
from references import TOLERANCE

LAYOUTS = [name for names in references.FAMILIES.values() for name in names]
# One of each kind of attention, cache and router; `make test-all` generates with the others too.
QUICK = ["mixtral_swa", "qwen2_moe", "phimoe_long", "llama4_text", "deepseek_v2", "deepseek_v3"]
QUICK += ["gemma4_text", "gpt_oss"]
FUSED = [name for name in LAYOUTS if name.endswith("-fused")]
# On a GPU the scratch memory of its libraries counts too.
BUDGET = 64 << 20 if jax.default_backend() == "cpu" else 1 << 30


def convert_tiny(shared_dir: pathlib.Path, root: pathlib.Path, name: str) -> pathlib.Path:
    convert(references.tiny_model(shared_dir, name), root / name, progress=False)
    return root / name


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in LAYOUTS
        if name not in FUSED
    ],
)
def model(request, shared_dir, tmp_path_factory):
    """(converted folder, Hugging Face's reference numbers)"""
    folder = convert_tiny(shared_dir, tmp_path_factory.mktemp("converted"), request.param)
    return folder, references.read_reference(shared_dir, request.param)


@pytest.fixture(scope="module")
def crowded(model):
    return make_crowded(model[0])


def make_crowded(folder: pathlib.Path) -> Engine:
    """An engine with four rows, and pages for five blocks: two sequences that fill theirs."""
    geometry = choose_geometry(Checkpoint.open(folder).config, "float32")
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 2 * geometry.block_size + 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "skip_tokenizer_init": True,
        "warm_up": False,
    }
    config = EngineConfig(memory_budget=BUDGET, **settings)
    memory = load_engine(folder, config, progress=False).memory
    pages = memory.block_pages * 5
    # A page, and an entry that may point to it for each kind.
    cost = geometry.page_bytes + 4 * len(geometry.kinds)
    budget = memory.budget - (memory.kv_pages - pages) * cost
    config = EngineConfig(memory_budget=budget, check=True, **settings)
    engine = load_engine(folder, config, progress=False)
    assert engine.memory.kv_pages == pages
    return engine


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_checkpoint_is_converted_to_the_same_bytes(name, shared_dir, tmp_path):
    plain, fused = (
        convert_tiny(shared_dir, tmp_path, layout) for layout in (name.removesuffix("-fused"), name)
    )
    assert Checkpoint.open(plain).fingerprint == Checkpoint.open(fused).fingerprint
    files = [sorted(path for path in folder.rglob("*.safetensors")) for folder in (plain, fused)]
    assert len(files[0]) > 0
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.shows(
    "models", "ten families (see converters/README.md), every layout, FP8 and MXFP4: the logits"
)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in FUSED])
def test_logits_of_whole_sequences_equal_the_reference(name, shared_dir, tmp_path):
    folder = convert_tiny(shared_dir, tmp_path, name)
    reference = references.read_reference(shared_dir, name)
    found = references.whole_logits(folder, reference["input_ids"])
    references.assert_logits_equal(found, reference["logits"])


@pytest.mark.shows("models", "of each, generated tokens and their log-probabilities")
def test_generated_tokens_and_their_logprobs_equal_the_reference(model, crowded):
    _, reference = model
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=20, prompt_logprobs=20
    )
    for i, ids in enumerate(reference["input_ids"]):
        crowded.add_request(str(i), ids.tolist(), params)
    outputs = [output for _, output in sorted(run(crowded).items())]
    assert [output.outputs[0].token_ids for output in outputs] == reference["greedy"].tolist()
    prompt_logprobs = log_softmax(reference["logits"])
    step_logprobs = log_softmax(reference["step_logits"])
    for row, output in enumerate(outputs):
        assert output.prompt_logprobs[0] is None
        for at, entries in enumerate(output.prompt_logprobs[1:]):
            assert_entries(entries, prompt_logprobs[row, at])
        for at, entries in enumerate(output.outputs[0].logprobs):
            assert_entries(entries, step_logprobs[row, at])


def assert_entries(entries: dict, expected: np.ndarray) -> None:
    assert len(entries) >= 20
    for token, entry in entries.items():
        assert entry.logprob == pytest.approx(expected[token], abs=TOLERANCE)
        if entry.rank == 1:
            assert entry.logprob >= expected.max() - TOLERANCE


# In a crowd: chunks, prefix hits, preemption, blocks that left their window.


@pytest.mark.shows(
    "models", "of each, tokens in a crowd: chunks, shared prefixes, preemption, given-back windows"
)
def test_tokens_of_a_crowd_equal_the_whole_sequence_forward(model, crowded):
    folder, _ = model
    block = crowded.memory.block_size
    length, prompts = crowded.max_model_len, make_prompts(block)
    preempted = value_of(crowded, "vllm:num_preemptions_total")
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0, max_tokens=length - len(prompt), ignore_eos=True, logprobs=2
        )
        crowded.add_request(str(i), prompt, params)
    outputs = run(crowded)
    assert value_of(crowded, "vllm:num_preemptions_total") > preempted
    assert outputs["5"].num_cached_tokens == block
    made = [outputs[str(i)].outputs[0] for i in range(len(prompts))]
    tokens = np.array([[*p, *m.token_ids] for p, m in zip(prompts, made, strict=True)], np.int32)
    wanted = log_softmax(references.whole_logits(folder, tokens))
    for row, (prompt, output) in enumerate(zip(prompts, made, strict=True)):
        for at, token in enumerate(output.token_ids):
            expected = wanted[row, len(prompt) - 1 + at]
            assert output.logprobs[at][token].logprob == pytest.approx(
                expected[token], abs=TOLERANCE
            )
            # The best one, or as good as that: sums differ in the last bits between batches.
            assert expected[token] >= expected.max() - TOLERANCE


def make_prompts(block: int) -> list[list[int]]:
    """Four that soon need a second block, then a third; two that share their first one."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 128, block - n).tolist() for n in (6, 8, 10, 12)]
    stem = rng.integers(3, 128, block).tolist()
    return [*prompts, [*stem, 5, 6, 7], [*stem, 8, 9]]


def run(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
    return outputs


def value_of(engine: Engine, name: str) -> float:
    lines = engine.metrics.render()[0].decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


# longrope: the tokens that may be processed decide, and the last one never is.


@pytest.mark.parametrize(("max_tokens", "processed"), [(1, 16), (2, 17)])
def test_a_prompt_of_the_original_length(max_tokens, processed, shared_dir, tmp_path):
    folder = convert_tiny(shared_dir, tmp_path, "phimoe_long")
    assert Checkpoint.open(folder).config.long_rope_after == 16
    engine = make_crowded(folder)
    tokens = np.random.default_rng(2).integers(3, 128, (1, 16))
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1, ignore_eos=True)
    engine.add_request("0", tokens[0].tolist(), params)
    entries = run(engine)["0"].prompt_logprobs[1:]
    found = [entry[token].logprob for entry, token in zip(entries, tokens[0, 1:], strict=True)]
    wanted = log_softmax(references.whole_logits(folder, tokens, max_length=processed))[0]
    np.testing.assert_allclose(
        found, [wanted[i, token] for i, token in enumerate(tokens[0, 1:])], atol=TOLERANCE
    )
