"""Tokens per second of decoding, and how much of a step its bytes account for.

    python benchmarks/decode_speed.py --shape Qwen1.5-MoE-A2.7B --batch 1 8 32

The engine of a published size with random weights, prompts of random tokens. The bound of a step
is the bytes that it must read once, over the bandwidth that a copy reaches on this device: dense
weights, in each layer the experts that a batch of independent tokens is expected to touch, and the
KV that each layer sees of a sequence. Appends a line per batch size to results/decode_speed.jsonl.
"""

import argparse
import resource
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from published import names, published_name
from published_sizes import step_bytes
from random_model import MAX_POSITIONS, RandomCheckpoint, random_config, with_layers
from stamp import record, run_script, stamp

from moejax.config import DENSE_WIDTH, ModelConfig, Quantization
from moejax.errors import ConfigError
from moejax_serving import EngineConfig, SamplingParams
from moejax_serving.compiles import num_compiles
from moejax_serving.engine import Engine
from moejax_serving.load import build_engine
from moejax_serving.metrics import Metrics
from moejax_serving.sizes import parse_size

LEAST_OUTPUT = 8


def copy_bandwidth(size: int, copies: int = 20) -> float:
    """Bytes per second, read and written, of copies of an array of this size; the best of some."""

    def run(array: jax.Array) -> jax.Array:
        found: jax.Array = lax.fori_loop(0, copies, lambda i, x: x + jnp.float32(1), array)
        return found

    program = jax.jit(run, donate_argnums=0)
    array = jax.block_until_ready(program(jnp.zeros(size // 4, jnp.float32)))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        array = jax.block_until_ready(program(array))
        times.append(time.perf_counter() - start)
    return 2 * size * copies / min(times)


def peak_bytes() -> int:
    """Most memory that was in use so far: of the device, or of this process on a CPU."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stats: dict[str, Any] = device.memory_stats() or {}
    return int(stats["peak_bytes_in_use"])


def measure(engine: Engine, batch: int, prompt: int, output: int) -> dict[str, Any]:
    """Times of steps in which all of a batch decode."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for i in range(batch):
        ids = rng.integers(0, engine.model.vocab_size, prompt).tolist()
        engine.add_request(f"{batch}.{i}", ids, params, stream=True)
    start = time.perf_counter()
    times: list[float] = []
    lengths: dict[str, int] = {}
    first = 0.0
    while engine.has_unfinished():
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        for found in outputs:
            new = len(found.outputs[0].token_ids)
            lengths[found.request_id] = lengths.get(found.request_id, 0) + new
        if not first and len(lengths) == batch:
            first = now
        if len(outputs) == batch:
            times.append(now - before)
    if list(lengths.values()) != [output] * batch:
        raise SystemExit(f"the answers have {sorted(lengths.values())} tokens, not {output} each")
    steady = times[2:-2]
    if len(steady) < 2:
        raise SystemExit(f"all {batch} decode in {len(times)} steps only: --output is too small")
    return {
        "step_ms": 1e3 * statistics.median(steady),
        "step_ms_p90": 1e3 * statistics.quantiles(steady, n=10)[-1],
        "tokens_per_s": batch / statistics.median(steady),
        "first_tokens_s": first - start,
        "steps": len(steady),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which engine is measured, and with which sequences."""
    parser.add_argument(
        "--shape",
        default="Qwen1.5-MoE-A2.7B",
        help=f"one of {', '.join(names())} (default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, help="only as many of the model's layers")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 32], help="sequences (default: 1 8 32)"
    )
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each (default: 256)")
    parser.add_argument("--output", type=int, default=64, help="new tokens of each (default: 64)")
    parser.add_argument(
        "--bits",
        type=int,
        default=DENSE_WIDTH,
        choices=(3, 4, 5, 6, 7, 8, DENSE_WIDTH),
        help="width of the experts: 16, or 3 to 8, stored with tables for each row (default: 16)",
    )
    parser.add_argument("--kernel", default="auto", help="as of moejax-serve (default: auto)")
    parser.add_argument(
        "--memory-budget", type=parse_size, help="such as 60GB; default: the server's"
    )
    parser.add_argument(
        "--lazy", action="store_true", help="compile only the programs that are measured"
    )
    parser.add_argument("--commit", help="of the code, where git cannot tell")


def make_config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> ModelConfig:
    """The published size that the arguments name."""
    if min(*args.batch, args.prompt) < 1:
        parser.error("--batch and --prompt must be at least 1")
    if args.output < LEAST_OUTPUT:
        parser.error(
            f"--output must be at least {LEAST_OUTPUT}: the first and last steps do not count"
        )
    try:
        config = random_config(
            published_name(args.shape), max(MAX_POSITIONS, args.prompt + args.output)
        )
        return config if args.layers is None else with_layers(config, args.layers)
    except ConfigError as error:
        parser.error(str(error))


def make_engine(config: ModelConfig, args: argparse.Namespace) -> Engine:
    """An engine of a published size with random weights."""
    quantization = None
    if args.bits != DENSE_WIDTH:
        quantization = Quantization(seed_bits=3, parent_bits=max(6, args.bits))
    checkpoint: Any = RandomCheckpoint(config, quantization)
    shape = published_name(args.shape)
    engine = build_engine(
        checkpoint,
        EngineConfig(
            max_num_seqs=max(args.batch),
            max_model_len=args.prompt + args.output,
            memory_budget=args.memory_budget,
            expert_bits=args.bits,
            kernel=args.kernel,
            warm_up=not args.lazy,
            enable_prefix_caching=False,
        ),
        name=shape,
        tokenizer=None,
        metrics=Metrics(shape),
        progress=True,
    )
    for line in engine.memory.lines():
        print(line)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    args = parser.parse_args()

    config = make_config(parser, args)
    start, compiles = time.perf_counter(), num_compiles()
    engine = make_engine(config, args)
    startup = time.perf_counter() - start
    programs = num_compiles() - compiles
    bandwidth = copy_bandwidth(1 << 31 if jax.default_backend() == "gpu" else 1 << 28)
    for batch in args.batch:
        measure(engine, batch, args.prompt, args.output)  # the first run is slower
        compiles = num_compiles()
        found = measure(engine, batch, args.prompt, args.output)
        sizes = step_bytes(config, batch, args.prompt + args.output // 2, args.bits)
        bound = sum(sizes.values()) / bandwidth
        record(
            "decode_speed",
            {
                **stamp(args.commit),
                "shape": published_name(args.shape),
                "layers": len(config.layers),
                "dtype": config.dtype,
                "bits": args.bits,
                "kernel": args.kernel,
                "batch": batch,
                "prompt": args.prompt,
                "output": args.output,
                **found,
                "bound_ms": 1e3 * bound,
                "share_of_bound": 1e3 * bound / found["step_ms"],
                "bytes": sizes,
                "copy_bandwidth": bandwidth,
                "peak_bytes": peak_bytes(),
                "startup_s": startup,
                "programs": programs,
                "compiles_while_serving": num_compiles() - compiles,
            },
        )


if __name__ == "__main__":
    run_script(main)
