"""From a folder to a running engine."""

import bisect
import logging
import os
import pathlib
import time
from importlib import resources
from typing import Any

import jax
import numpy as np

from moejax.arena.format import ceil_div
from moejax.arena.geometry import Geometry, choose_geometry
from moejax.checkpoint import Checkpoint
from moejax.config import ModelConfig
from moejax.errors import CapacityError, ConfigError
from moejax.models.decoder import abstract_params, flatten_params, params_bytes
from moejax.pallas.dispatch import find_kernels
from moejax_serving.admission import ServedModel
from moejax_serving.batch import Buckets, make_buckets
from moejax_serving.compiles import keep_programs
from moejax_serving.config import EngineConfig
from moejax_serving.dynamic import make_trader, most_edits, offered_widths, start_widths
from moejax_serving.engine import Engine
from moejax_serving.kv_blocks import BlockPool, root_key
from moejax_serving.loader import empty_rows, empty_state, load_linears, load_params
from moejax_serving.memory import MemoryPlan, human, most_blocks, plan_memory, workspace_bytes
from moejax_serving.metrics import Metrics
from moejax_serving.pages import PagePool
from moejax_serving.runner import Runner
from moejax_serving.scheduler import Scheduler
from moejax_serving.tokenizer import Tokenizer, require_tokenizer
from moejax_serving.widths import choose_widths, linear_width

logger = logging.getLogger(__name__)

BUILT_IN_MODEL = "demo"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def load_engine(
    model: str | pathlib.Path | None,
    config: EngineConfig,
    *,
    metrics: Metrics | None = None,
    progress: bool = True,
) -> Engine:
    """Makes an engine.

    Args:
        model: a moejax folder, or a Hugging Face folder, which is converted into a cache first.
            None: the small trained model that comes with the package.
        config: what it may use.
        metrics: where the engine counts what it does; None: in some of its own.
        progress: show progress bars, on a terminal.

    Raises:
        CheckpointError, ConfigError, CapacityError: in one line, with the names and numbers.
    """
    # A converted folder is served without the converters.
    from moejax_converters.cache import cache_folder, converted

    keep_programs(cache_folder() / "programs")
    if model is None:
        source = pathlib.Path(str(resources.files("moejax_serving") / BUILT_IN_MODEL))
        name = BUILT_IN_MODEL
    else:
        source, name = pathlib.Path(model), str(model)
    logger.info("loading %s", source)
    if not config.skip_tokenizer_init:
        require_tokenizer(source)  # before a conversion that may take hours
    checkpoint = Checkpoint.open(converted(source))
    tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_folder(checkpoint.folder)
    return build_engine(
        checkpoint,
        config,
        name=name,
        tokenizer=tokenizer,
        metrics=Metrics(name) if metrics is None else metrics,
        progress=progress,
    )


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    name: str,
    tokenizer: Tokenizer | None,
    metrics: Metrics,
    progress: bool = False,
) -> Engine:
    """Plans the memory of a checkpoint's engine, then loads it and compiles its programs."""
    started = time.monotonic()
    parts = checkpoint.config
    geometry = choose_geometry(
        parts,
        parts.dtype if config.dtype == "auto" else config.dtype,
        checkpoint.quantization,
        {name: checkpoint.linear_shape(name) for name in checkpoint.linear_names()},
    )
    longest = _max_model_len(parts, config)
    kernels = find_kernels(
        geometry.dtype, config.kernel, {layer.attention for layer in parts.layers}
    )
    logger.info(kernels.line())
    widths, (plan, max_model_len) = choose_widths(
        checkpoint,
        geometry,
        config,
        lambda widths: _plan(parts, geometry, config, longest, widths.pages(geometry)),
    )
    if max_model_len < longest:
        logger.info("max_model_len is %d of the model's %d: what fits", max_model_len, longest)
    if config.planner == "dynamic":
        widths = start_widths(
            checkpoint.sensitivity(),
            geometry,
            offered_widths(geometry, config),
            plan,
            linear_width(geometry, config),
        )
    if checkpoint.quantization is not None:
        logger.info("widths, and how many linears have them: %s", widths.summary())
    for line in plan.lines():
        logger.info(line)
    metrics.set_memory(plan.kinds)
    metrics.set_kv_blocks_capacity(plan.num_blocks)
    metrics.set_cache_config(
        {
            "block_size": plan.block_size,
            "num_gpu_blocks": plan.num_blocks,  # vLLM's name, whatever the device
            "cache_dtype": geometry.dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
        }
    )
    buckets = _buckets(geometry, config, max_model_len)
    pages = PagePool(plan.num_pages)
    max_blocks = most_blocks(geometry, plan.kv_pages)
    blocks = BlockPool(pages, geometry.kinds, max_blocks)
    state = empty_state(
        geometry,
        num_pages=plan.num_pages,
        rows=config.max_num_seqs,
        max_model_len=max_model_len,
        max_blocks=max_blocks,
    )
    params = load_params(checkpoint, geometry.dtype, progress=progress)
    state = load_linears(checkpoint, geometry, widths, state, pages, progress=progress)
    runner = Runner(
        parts,
        geometry,
        params,
        state,
        empty_rows(config.max_num_seqs, parts.vocab_size),
        workspace=plan.workspace,
        kernels=kernels,
    )
    trader = None
    if config.planner == "dynamic":
        slots = [np.asarray(table[0]) for table in (state.gate_up_pages, state.down_pages)]
        trader = make_trader(
            checkpoint, geometry, config, plan, widths, slots, pages, blocks, runner
        )
    scheduler = Scheduler(
        blocks,
        kinds=geometry.kinds,
        num_pages=plan.kv_pages,
        max_num_seqs=config.max_num_seqs,
        max_prefill_seqs=buckets.prefill_rows,
        max_num_batched_tokens=buckets.prefill_tokens[-1],
        max_row_edits=buckets.max_row_edits,
        cache_root=_cache_root(checkpoint, geometry) if config.enable_prefix_caching else None,
        make_room=None if trader is None else trader.make_room,
    )
    served = ServedModel(
        name=name,
        vocab_size=parts.vocab_size,
        max_model_len=max_model_len,
        long_rope_after=parts.long_rope_after,
        eos_token_ids=_eos_token_ids(checkpoint, tokenizer),
        default_sampling={
            k: checkpoint.generation[k]
            for k in _SAMPLING
            if checkpoint.generation.get(k) is not None
        },
        tokenizer=tokenizer,
    )
    engine = Engine(
        served,
        config,
        memory=plan,
        pages=pages,
        scheduler=scheduler,
        buckets=buckets,
        runner=runner,
        metrics=metrics,
        trader=trader,
    )
    loaded = time.monotonic()
    metrics.set_startup_phase("load", loaded - started)
    if config.warm_up:
        folder = jax.config.jax_compilation_cache_dir
        kept = f"; they are kept in {folder}" if folder else ""
        count = len(buckets.all())
        logger.info("compiling %d programs: a minute or more at the first start%s", count, kept)
        engine.warm_up(progress=progress)
        seconds = time.monotonic() - loaded
        metrics.set_startup_phase("compile", seconds)
        logger.info("compiled %d programs in %.1f s", count, seconds)
    return engine


def _cache_root(checkpoint: Checkpoint, geometry: Geometry) -> bytes:
    """Keys of kv_blocks stand for tokens of this model, in this dtype, routed exactly."""
    return root_key(checkpoint.fingerprint, geometry.dtype, "exact")


def _buckets(geometry: Geometry, config: EngineConfig, max_model_len: int) -> Buckets:
    return make_buckets(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_max_query(config, max_model_len),
        kinds=geometry.kinds,
        max_model_len=max_model_len,
        expert_edits=most_edits(geometry) if config.planner == "dynamic" else 0,
    )


def _max_query(config: EngineConfig, max_model_len: int) -> int:
    """Most tokens of one sequence in a step."""
    return min(config.max_num_batched_tokens, max_model_len)


def _max_model_len(parts: ModelConfig, config: EngineConfig) -> int:
    most = parts.max_position_embeddings
    if most < 2:
        raise ConfigError(
            f"the model has {most} positions: one prompt token and one of output need 2"
        )
    if config.max_model_len is None:
        return most
    if config.max_model_len > most:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's {most} positions"
        )
    if config.max_model_len < 2:
        raise ConfigError("max_model_len must be at least 2: one prompt token and one of output")
    return config.max_model_len


def _plan(
    parts: ModelConfig,
    geometry: Geometry,
    config: EngineConfig,
    max_model_len: int,
    weight_pages: int,
) -> tuple[MemoryPlan, int]:
    """The memory plan, and the longest sequence: shortened to what fits unless it was asked for."""
    device = device_bytes()
    most = host_bytes() if device is None else device
    buckets = _buckets(geometry, config, max_model_len)
    coded = {linear.name for linear in geometry.linears}
    named = flatten_params(abstract_params(parts, geometry.dtype))
    dense = {name: leaf for name, leaf in named.items() if name not in coded}

    def plan(length: int) -> MemoryPlan:
        found = plan_memory(
            parts,
            geometry,
            budget=config.memory_budget,
            device_bytes=device,
            dense=params_bytes(dense),
            workspace=max(
                workspace_bytes(parts, geometry, bucket, length) for bucket in buckets.largest()
            ),
            rows=config.max_num_seqs,
            max_model_len=length,
            max_query=_max_query(config, max_model_len),
            weight_pages=weight_pages,
        )
        if found.budget > most:
            raise CapacityError(
                f"a memory budget of {human(found.budget)} is more than there is: {human(most)}"
                + ("" if config.memory_budget else f" (max_num_seqs {config.max_num_seqs})")
            )
        return found

    def fits(length: int) -> bool:
        try:
            plan(length)
        except CapacityError:
            return False
        return True

    if config.max_model_len is not None or fits(max_model_len):
        return plan(max_model_len), max_model_len
    # Blocks of this many tokens: a longer sequence needs more workspace and more cache.
    step = geometry.block_size
    plan(step)
    blocks = bisect.bisect_left(
        range(1, ceil_div(max_model_len, step) + 1), True, key=lambda n: not fits(n * step)
    )
    longest = blocks * step
    return plan(longest), longest


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
