"""Where the time of a decode step goes, kernel by kernel, against the bound of its bytes.

    python benchmarks/bench_step.py --shape Qwen1.5-MoE-A2.7B --bits 4 --batch 1 8 32

The engine of `decode_speed.py`: how long a step takes, and then, under jax's profiler, which
kernels ran in it. Kernels run side by side, so their sum is more than the time in which any runs
(`busy_ms`); what is left of a step is gaps and the host. Appends a line per batch size to
results/step.jsonl and prints a table.
"""

import argparse
import re
import tempfile
from typing import Any

import jax
import numpy as np
from decode_speed import add_arguments, copy_bandwidth, make_config, make_engine, measure
from device_times import busy_microseconds, read_events
from published import published_name
from published_sizes import step_bytes
from stamp import record, run_script, stamp

from moejax_serving import SamplingParams
from moejax_serving.engine import Engine

PARTS = {
    "experts": r"product_kernel|portable_kernel|prefill",
    "routing": r"route_kernel|group_\w*kernel",
    "norms": r"rms_norm_kernel",
    "attention": r"attend_kernel|combine_kernel",
    "KV write": r"write_kv_kernel",
    "dense products": r"stacked_kernel|gemm|cublas|cutlass|nvjet|wgmma|dot|splitK|gemv",
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
    """Milliseconds of kernels in a step in which all of a batch decode: by part and kernel."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for i in range(batch):
        ids = rng.integers(0, engine.model.vocab_size, prompt).tolist()
        engine.add_request(f"{batch}.{i}", ids, params, stream=True)
    seen = 0
    while seen < 3:  # all decode, and the first such steps are over
        seen = seen + 1 if len(engine.step()) == batch else 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                if len(engine.step()) != batch:
                    raise SystemExit("--output is too small: a sequence ended while it was timed")
        events = read_events(folder)
    while engine.has_unfinished():
        engine.step()
    by_kernel: dict[str, float] = {}
    by_part: dict[str, float] = {}
    for event in events:
        for found, key in ((by_kernel, event.name), (by_part, part_of(event.name))):
            found[key] = found.get(key, 0.0) + event.microseconds / STEPS / 1e3
    return {
        "launches": len(events) / STEPS,
        "busy_ms": busy_microseconds(events) / STEPS / 1e3,
        "parts_ms": by_part,
        "kernels_ms": by_kernel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("bench_step.py needs a GPU, whose kernels it times")
    config = make_config(parser, args)
    engine = make_engine(config, args)
    bandwidth = copy_bandwidth(1 << 31)
    for batch in args.batch:
        measure(engine, batch, args.prompt, args.output)  # compiles
        step = measure(engine, batch, args.prompt, args.output)["step_ms"]
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
                "x_bound": round(step / bound, 2),
                "step_ms": round(step, 3),
                "busy_ms": round(found["busy_ms"], 3),
                "launches": round(found["launches"]),
                "parts_ms": {part: round(t, 3) for part, t in found["parts_ms"].items()},
            },
        )


if __name__ == "__main__":
    run_script(main)
