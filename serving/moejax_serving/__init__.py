"""Serving of Mixture-of-Experts models: `from moejax_serving import LLM, SamplingParams`."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from moejax.environment import prepare_environment

if TYPE_CHECKING:
    from moejax_serving.config import EngineConfig as EngineConfig
    from moejax_serving.llm import LLM as LLM
    from moejax_serving.outputs import CompletionOutput as CompletionOutput
    from moejax_serving.outputs import Logprob as Logprob
    from moejax_serving.outputs import RequestOutput as RequestOutput
    from moejax_serving.sampling_params import SamplingParams as SamplingParams

_HOME = {
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "LLM": "llm",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Imports public names when they are used: the command line must not wait for jax."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LLM" and "jax" not in sys.modules:
        # On a machine without a GPU, jax would report what its CUDA wheels miss.
        prepare_environment(os.environ)
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
