"""What is refused before a model is converted or loaded."""

import dataclasses
import json
import pathlib

import pytest

from models.small_model import make_config
from moejax.errors import CheckpointError, ConfigError
from moejax_serving import load
from moejax_serving.admission import ServedModel
from moejax_serving.config import EngineConfig


def test_a_model_without_a_tokenizer_is_refused_before_its_conversion(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEJAX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(CheckpointError, match=r"hf has no tokenizer_config\.json: .*--skip-token"):
        load.load_engine(tmp_path / "hf", EngineConfig())
    assert not list((tmp_path / "cache").glob("hf-*"))


def test_a_model_of_one_position_is_refused() -> None:
    config = dataclasses.replace(make_config("b"), max_position_embeddings=1)
    with pytest.raises(ConfigError, match="the model has 1 positions: one prompt token"):
        load._max_model_len(config, EngineConfig())


@pytest.mark.parametrize(("processed", "uses_long"), [(15, False), (16, False), (17, True)])
def test_tokens_that_are_processed_decide_about_longrope(processed: int, uses_long: bool) -> None:
    """An echoed prompt of the original length, with one token that is only given out."""
    model = ServedModel(
        name="m",
        vocab_size=8,
        max_model_len=64,
        eos_token_ids=(),
        default_sampling={},
        tokenizer=None,
        long_rope_after=16,
    )
    assert model.uses_long_rope(processed) is uses_long
