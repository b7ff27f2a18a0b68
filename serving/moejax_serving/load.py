"""From a folder to a running engine."""

import bisect
import logging
import os
import pathlib
from importlib import resources
from typing import Any

import jax

from moejax.arena.geometry import Geometry, choose_geometry
from moejax.checkpoint import Checkpoint
from moejax.config import ModelConfig
from moejax.errors import CapacityError, ConfigError
from moejax.models.decoder import abstract_params, params_bytes
from moejax_serving.batch import Buckets, make_buckets
from moejax_serving.config import EngineConfig
from moejax_serving.engine import Engine, ServedModel
from moejax_serving.loader import empty_state, load_experts, load_params
from moejax_serving.memory import MemoryPlan, human, plan_memory, workspace_bytes
from moejax_serving.pages import BlockPool, PagePool
from moejax_serving.runner import Runner
from moejax_serving.scheduler import Scheduler
from moejax_serving.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BUILT_IN_MODEL = "demo"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def load_engine(
    model: str | pathlib.Path | None, config: EngineConfig, *, progress: bool = True
) -> Engine:
    """Makes an engine.

    Args:
        model: a moejax folder, or a Hugging Face folder, which is converted into a cache first.
            None: the small trained model that comes with the package.
        config: what it may use.
        progress: show progress bars, on a terminal.

    Raises:
        CheckpointError, ConfigError, CapacityError: in one line, with the names and numbers.
    """
    # A converted folder is served without the converters.
    from moejax_converters.cache import converted

    if model is None:
        source = pathlib.Path(str(resources.files("moejax_serving") / BUILT_IN_MODEL))
        name = BUILT_IN_MODEL
    else:
        source, name = pathlib.Path(model), str(model)
    checkpoint = Checkpoint.open(converted(source))
    tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_folder(checkpoint.folder)
    return build_engine(checkpoint, config, name=name, tokenizer=tokenizer, progress=progress)


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    name: str,
    tokenizer: Tokenizer | None,
    progress: bool = False,
) -> Engine:
    """Plans the memory of a checkpoint's engine, then loads it."""
    parts = checkpoint.config
    geometry = choose_geometry(parts, parts.dtype if config.dtype == "auto" else config.dtype)
    max_model_len = _max_model_len(parts, config)
    buckets = make_buckets(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=min(config.max_num_batched_tokens, max_model_len),
        block_size=geometry.block_size,
        layers=geometry.num_layers,
    )
    plan, max_model_len = _plan(parts, geometry, config, buckets, max_model_len)
    for line in plan.lines():
        logger.info(line)

    pages = PagePool(plan.num_pages)
    blocks = BlockPool(pages, geometry.block_pages, plan.num_blocks + 1)
    state = empty_state(
        geometry,
        num_pages=plan.num_pages,
        rows=config.max_num_seqs,
        blocks_per_row=_blocks_per_row(geometry, max_model_len),
        max_blocks=blocks.max_blocks,
    )
    params = load_params(checkpoint, geometry.dtype, progress=progress)
    state = load_experts(checkpoint, geometry, state, pages, progress=progress)
    runner = Runner(parts, geometry, params, state, workspace=plan.workspace)
    scheduler = Scheduler(
        blocks,
        block_size=geometry.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_prefill_seqs=buckets.prefill_rows,
        max_num_batched_tokens=buckets.prefill_tokens[-1],
    )
    served = ServedModel(
        name=name,
        vocab_size=parts.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(checkpoint, tokenizer),
        default_sampling={
            k: checkpoint.generation[k]
            for k in _SAMPLING
            if checkpoint.generation.get(k) is not None
        },
        tokenizer=tokenizer,
    )
    return Engine(
        served,
        config,
        memory=plan,
        pages=pages,
        scheduler=scheduler,
        buckets=buckets,
        runner=runner,
    )


def _max_model_len(parts: ModelConfig, config: EngineConfig) -> int:
    most = parts.max_position_embeddings
    if config.max_model_len is None:
        return most
    if config.max_model_len > most:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's {most} positions"
        )
    if config.max_model_len < 2:
        raise ConfigError("max_model_len must be at least 2: one prompt token and one of output")
    return config.max_model_len


def _blocks_per_row(geometry: Geometry, max_model_len: int) -> int:
    return -(-max_model_len // geometry.block_size)


def _plan(
    parts: ModelConfig,
    geometry: Geometry,
    config: EngineConfig,
    buckets: Buckets,
    max_model_len: int,
) -> tuple[MemoryPlan, int]:
    """The memory plan, and the longest sequence: shortened to what fits unless it was asked for."""
    device = device_bytes()
    most = host_bytes() if device is None else device

    def plan(blocks_per_row: int) -> MemoryPlan:
        found = plan_memory(
            parts,
            geometry,
            budget=config.memory_budget,
            device_bytes=device,
            dense=params_bytes(abstract_params(parts, geometry.dtype)),
            workspace=max(
                workspace_bytes(parts, geometry, bucket, blocks_per_row)
                for bucket in buckets.largest()
            ),
            rows=config.max_num_seqs,
            blocks_per_row=blocks_per_row,
        )
        if found.budget > most:
            raise CapacityError(
                f"a memory budget of {human(found.budget)} is more than there is: {human(most)}"
            )
        return found

    def fits(blocks_per_row: int) -> bool:
        try:
            return plan(blocks_per_row).num_blocks >= blocks_per_row
        except CapacityError:
            return False

    wanted = _blocks_per_row(geometry, max_model_len)
    plan(1)
    if fits(wanted):
        return plan(wanted), max_model_len
    if config.max_model_len is not None:
        found = plan(wanted)
        raise CapacityError(
            f"max_model_len {max_model_len} does not fit: the KV cache holds {found.kv_tokens} "
            f"tokens within the memory budget of {human(found.budget)}"
        )
    # A longer sequence needs more workspace and leaves less for the cache: the largest that fits.
    blocks = bisect.bisect_left(range(1, wanted + 1), True, key=lambda n: not fits(n))
    longest = blocks * geometry.block_size
    logger.info("max_model_len is %d of the model's %d: what fits", longest, max_model_len)
    return plan(blocks), longest


def host_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_bytes() -> int | None:
    """Memory of the first device, None where the device is a CPU."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    stats: dict[str, Any] = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        raise ConfigError(f"{device.device_kind} does not tell its memory: set memory_budget")
    return int(limit)


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    found = list(checkpoint.generation.get("eos_token_ids") or ())
    if not found and tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(found)
