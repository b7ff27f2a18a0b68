"""Where the time of a decode step goes, kernel by kernel, against the bound of its bytes.

    python benchmarks/bench_step.py --shape Qwen1.5-MoE-A2.7B --bits 4 --batch 1 8 32

The engine of `decode_speed.py`, under jax's profiler while all sequences decode. Times are of
kernels on the device; what is left of a step is gaps between them and the host. Appends a line per
batch size to results/step.jsonl and prints a table.
"""

import argparse
import re
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
from decode_speed import add_arguments, copy_bandwidth, make_config, make_engine
from device_times import read_times
from published import published_name
from published_sizes import step_bytes
from stamp import record, stamp

from moejax_serving import SamplingParams
from moejax_serving.engine import Engine

PARTS = {
    "experts": r"product_kernel|portable_kernel|prefill",
    "grouping": r"group_\w*kernel",
    "attention": r"attend_kernel|combine_kernel",
    "KV write": r"write_kv_kernel",
    "dense products": r"gemm|cublas|cutlass|nvjet|wgmma|dot|splitK|gemv",
    "copies": r"^Mem(cpy|set)",
}
STEPS = 10


def part_of(kernel: str) -> str:
    """What a kernel does, by its name; the fusions of XLA are `other`."""
    for part, pattern in PARTS.items():
        if re.search(pattern, kernel):
            return part
    return "other"


def profile(engine: Engine, batch: int, prompt: int, output: int) -> dict[str, Any]:
    """Milliseconds of a step in which all of a batch decode: in all, and by part and kernel."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for i in range(batch):
        ids = rng.integers(0, engine.model.vocab_size, prompt).tolist()
        engine.add_request(f"{batch}.{i}", ids, params, stream=True)
    seen = 0
    while seen < 3:  # all decode, and the first such steps are over
        seen = seen + 1 if len(engine.step()) == batch else 0
    times = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                start = time.perf_counter()
                outputs = engine.step()
                times.append(time.perf_counter() - start)
                if len(outputs) != batch:
                    raise SystemExit("--output is too small: a sequence ended while it was timed")
        kernels = read_times(folder)
    while engine.has_unfinished():
        engine.step()
    by_kernel = {name: sum(found) / STEPS / 1e3 for name, found in kernels.items()}
    by_part: dict[str, float] = {}
    for name, milliseconds in by_kernel.items():
        by_part[part_of(name)] = by_part.get(part_of(name), 0.0) + milliseconds
    return {
        "step_ms": 1e3 * statistics.median(times),
        "launches": sum(map(len, kernels.values())) / STEPS,
        "device_ms": sum(by_kernel.values()),
        "parts_ms": by_part,
        "kernels_ms": by_kernel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    args = parser.parse_args()
    config = make_config(parser, args)
    engine = make_engine(config, args)
    bandwidth = copy_bandwidth(1 << 31)
    for batch in args.batch:
        profile(engine, batch, args.prompt, args.output)  # compiles
        found = profile(engine, batch, args.prompt, args.output)
        sizes = step_bytes(config, batch, args.prompt + args.output // 2, args.bits)
        bound = 1e3 * sum(sizes.values()) / bandwidth
        kernels = found.pop("kernels_ms")
        largest = sorted(kernels, key=kernels.__getitem__, reverse=True)[:12]
        for name in largest:
            print(f"  {kernels[name]:8.3f} ms  {part_of(name):14}  {name[:80]}")
        record(
            "step",
            {
                **stamp(args.commit),
                "shape": published_name(args.shape),
                "layers": len(config.layers),
                "bits": args.bits,
                "kernel": args.kernel,
                "batch": batch,
                "prompt": args.prompt,
                "bound_ms": round(bound, 3),
                "x_bound": round(found["step_ms"] / bound, 2),
                "step_ms": round(found["step_ms"], 3),
                "device_ms": round(found["device_ms"], 3),
                "launches": round(found["launches"]),
                "parts_ms": {part: round(t, 3) for part, t in found["parts_ms"].items()},
            },
        )


if __name__ == "__main__":
    main()
