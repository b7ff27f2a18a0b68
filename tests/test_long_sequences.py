"""Sequences far beyond the prompts of the references, against an independent forward pass.

They pass the original lengths of yarn, llama3 and longrope (16 to 64 here) and many windows.
"""

import pathlib
from types import ModuleType

import numpy as np
import pytest

import references
from moejax_converters.convert import convert

# The forward pass over there leaves files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODELS = ["deepseek_v2", "deepseek_v3", "gemma4_text", "gpt_oss", "llama4_text", "phimoe_long"]
MODELS += ["mixtral_swa", "qwen3_moe_mixed"]


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_180_tokens(
    shared_dir: pathlib.Path, numpy_forward: ModuleType, tmp_path: pathlib.Path, name: str
) -> None:
    source = references.tiny_model(shared_dir, name)
    tokens = np.random.default_rng(1).integers(3, 128, (1, 180))
    wanted = numpy_forward.Model(str(source))(tokens)
    convert(source, tmp_path / name, progress=False)
    references.assert_logits_equal(references.whole_logits(tmp_path / name, tokens), wanted)
