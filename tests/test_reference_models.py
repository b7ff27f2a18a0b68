"""Every supported family, in every layout, against Hugging Face's own numbers (float32, CPU)."""

import pathlib
from typing import Any

import numpy as np
import pytest

import references
from moejax.arena.geometry import Geometry, choose_geometry
from moejax.checkpoint import Checkpoint
from moejax_converters.convert import convert
from moejax_serving import LLM, EngineConfig, RequestOutput, SamplingParams
from moejax_serving.engine import Engine
from moejax_serving.load import load_engine
from references import TOLERANCE

LAYOUTS = [name for names in references.FAMILIES.values() for name in names]
FUSED = [name for name in LAYOUTS if name.endswith("-fused")]
# One of each kind of attention, KV and router.
CROWDED = [
    "mixtral_swa",
    "qwen2_moe",
    "phimoe",
    "phimoe_long",
    "llama4_text",
    "llama4_interleaved",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gemma4_text",
    "gpt_oss",
]
LENGTH = 144


def convert_tiny(shared_dir: pathlib.Path, root: pathlib.Path, name: str) -> pathlib.Path:
    convert(references.tiny_model(shared_dir, name), root / name, progress=False)
    return root / name


@pytest.fixture(scope="module", params=[name for name in LAYOUTS if name not in FUSED])
def model(request, shared_dir, tmp_path_factory):
    """(converted folder, Hugging Face's reference numbers)"""
    folder = convert_tiny(shared_dir, tmp_path_factory.mktemp("converted"), request.param)
    return folder, references.read_reference(shared_dir, request.param)


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


def test_logits_of_whole_sequences_equal_the_reference(model):
    folder, reference = model
    found = references.whole_logits(folder, reference["input_ids"])
    references.assert_logits_equal(found, reference["logits"])


@pytest.mark.shows(
    "models",
    "`mixtral`, `qwen2_moe`, `qwen3_moe`, `olmoe`, `phimoe` (longrope), `llama4`, `deepseek_v2`, "
    "`deepseek_v3` (FP8 too), `gemma4`, `gpt_oss` (MXFP4 too)",
)
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
        dtype="float32",
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


# In a crowd: chunks, prefix hits, preemption, blocks that left their window.


@pytest.mark.parametrize("name", CROWDED)
def test_tokens_of_a_crowd_equal_the_whole_sequence_forward(name, shared_dir, tmp_path):
    folder = convert_tiny(shared_dir, tmp_path, name)
    engine = crowded_engine(folder)
    prompts = make_prompts()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0, max_tokens=LENGTH - len(prompt), ignore_eos=True, logprobs=2
        )
        engine.add_request(str(i), prompt, params)
    outputs = run(engine)
    if name != "mixtral_swa":  # whose sequences stop growing once they fill their window
        assert value_of(engine, "vllm:num_preemptions_total") >= 1
    assert value_of(engine, "vllm:prefix_cache_hits_total") >= 64
    made = [outputs[str(i)].outputs[0] for i in range(len(prompts))]
    tokens = np.array([[*p, *m.token_ids] for p, m in zip(prompts, made, strict=True)], np.int32)
    wanted = log_softmax(references.whole_logits(folder, tokens))
    for row, (prompt, output) in enumerate(zip(prompts, made, strict=True)):
        for at, token in enumerate(output.token_ids):
            expected = wanted[row, len(prompt) - 1 + at]
            assert output.logprobs[at][token].logprob == pytest.approx(
                expected[token], abs=TOLERANCE
            )
            # The best one, or as good as that (design rule of equality across batches).
            assert expected[token] >= expected.max() - TOLERANCE


def crowded_engine(folder: pathlib.Path) -> Engine:
    """Six rows, and pages for two and a half of the longest sequences."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": LENGTH,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "skip_tokenizer_init": True,
        "warm_up": False,
    }
    config = EngineConfig(memory_budget=64 << 20, **settings)
    memory = load_engine(folder, config, progress=False).memory
    geometry = choose_geometry(Checkpoint.open(folder).config, "float32")
    pages = geometry.most_pages(LENGTH, 48) * 5 // 2
    budget = memory.budget - (memory.kv_pages - pages) * page_cost(geometry)
    engine = load_engine(
        folder, EngineConfig(memory_budget=budget, check=True, **settings), progress=False
    )
    assert engine.memory.kv_pages == pages
    return engine


def page_cost(geometry: Geometry) -> int:
    """Bytes of a page, and of what points to it."""
    return geometry.page_bytes + 4 * len(geometry.kinds)


def make_prompts() -> list[list[int]]:
    """Six, of which two begin as the first one does."""
    rng = np.random.default_rng(0)
    stem = rng.integers(3, 128, 130).tolist()
    prompts = [rng.integers(3, 128, n).tolist() for n in (70, 100, 30)]
    return [stem, *prompts, [*stem[:128], 5, 6], [*stem[:70], 7]]


def run(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
    return outputs


def value_of(engine: Engine, name: str) -> float:
    lines = engine.metrics.render()[0].decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))
