"""How long it takes to quantise a published shape: calibration, clustering, and writing the files.

    python benchmarks/quantize_speed.py FOLDER [--shape Qwen1.5-MoE-A2.7B] [--layers N]

A checkpoint with random weights is written to FOLDER first, unless it is there; its time does not
count. Calibration is
on random tokens: the time does not depend on which.
"""

import argparse
import pathlib
import shutil
import time
import zlib

import jax
import numpy as np
from random_model import STD, random_config, with_layers
from stamp import record, run_script, stamp
from tqdm import tqdm

from moejax.arena import format
from moejax.arena.geometry import linear_shapes
from moejax.checkpoint import Checkpoint, CheckpointWriter, layout
from moejax.config import ModelConfig
from moejax.models.decoder import abstract_params, flatten_params
from moejax_converters.quantize import quantize
from moejax_converters.quantize_options import QuantizeOptions


def write_random(folder: pathlib.Path, config: ModelConfig) -> None:
    """A checkpoint of normal weights; every expert has its own, cut from one long row."""
    writer = CheckpointWriter(folder, config)
    dtype = format.DTYPES[config.dtype]
    for name, leaf in flatten_params(abstract_params(config, config.dtype)).items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        values = rng.standard_normal(leaf.shape, np.float32) * STD
        if "norm" in name and name.endswith("weight"):
            values = np.ones(leaf.shape, np.float32)
        writer.put_dense(name, values.astype(leaf.dtype))
    gate_up, down = linear_shapes(config)
    rng = np.random.default_rng(0)
    most = max(s.stored_rows * s.columns for s in (gate_up, down))
    drawn = (rng.standard_normal(2 * most, np.float32) * STD).astype(dtype)
    for layer in tqdm(config.moe_layers, "writing random weights"):
        with writer.expert_file(layer) as file:
            for expert in range(config.moe.router.num_experts):
                first = int(rng.integers(most))
                rows = gate_up.stored_rows
                values = drawn[first : first + rows * gate_up.columns]
                file.put(expert, "gate_up", values.reshape(rows, gate_up.columns))
                values = drawn[first : first + down.rows * down.columns]
                file.put(expert, "down", values.reshape(down.rows, down.columns))
    writer.finish({"eos_token_ids": []})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path, help="for the checkpoints; made if need be")
    parser.add_argument("--shape", default="Qwen1.5-MoE-A2.7B", help="of benchmarks/published")
    parser.add_argument("--layers", type=int, help="only so many")
    parser.add_argument("--sequences", type=int, default=128, help="of the calibration")
    parser.add_argument("--length", type=int, default=512, help="of each, in tokens")
    parser.add_argument("--write-only", action="store_true", help="write the checkpoint, no more")
    parser.add_argument("--commit", help="in the results, else that of this checkout")
    args = parser.parse_args()

    config = random_config(args.shape)
    if args.layers:
        config = with_layers(config, args.layers)
    plain, target = args.folder / "plain", args.folder / "quantised"
    shutil.rmtree(target, ignore_errors=True)
    if not layout.manifest_path(plain).is_file():
        shutil.rmtree(plain, ignore_errors=True)
        write_random(plain, config)
    if args.write_only:
        return
    tokens = args.folder / "tokens.npy"
    shape = (args.sequences, args.length)
    np.save(tokens, np.random.default_rng(0).integers(config.vocab_size, size=shape))
    start = time.perf_counter()
    options = QuantizeOptions(calibration=tokens, sequences=args.sequences, length=args.length)
    quantize(plain, target, options)
    seconds = time.perf_counter() - start
    weights = sum(s.parts * s.rows * s.columns for s in linear_shapes(config))
    weights *= len(config.moe_layers) * config.moe.router.num_experts
    sensitivity = Checkpoint.open(target).sensitivity()
    files = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    row = {
        **stamp(args.commit),
        "shape": args.shape,
        "layers": len(config.layers),
        "expert_weights": weights,
        "calibration": list(shape),
        "seconds": round(seconds, 1),
        "gigabytes": round(files / 1e9, 2),
        "relative_error": [
            round(float(e), 5)
            for e in np.sqrt(sensitivity.experts.sum((0, 1, 2)) / sensitivity.expert_norms.sum())
        ],
        "peak_device_gigabytes": round(_peak() / 1e9, 2),
    }
    record("quantize_speed", row)


def _peak() -> int:
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", 0))


if __name__ == "__main__":
    run_script(main)
