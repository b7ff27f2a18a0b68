"""Tokens per second of transformers on a GPU: what `decode_speed.py` is compared with.

    python benchmarks/transformers_speed.py --shape Qwen1.5-MoE-A2.7B --batch 1 8 32

The same published sizes with random weights in bfloat16, experts by `grouped_mm`, attention by
sdpa, a static cache. Needs torch and transformers, and nothing of moejax; appends to
results/transformers_speed.jsonl.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import time
from typing import Any

try:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
except ImportError as error:
    raise SystemExit(f"torch and transformers are needed: {error}") from None

FOLDER = pathlib.Path(__file__).parent


def make_model(shape: str, experts: str) -> Any:
    """A published size on the GPU, as transformers initialises it."""
    read = json.loads((FOLDER / "published" / f"{shape}.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**read),
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            experts_implementation=experts,
        ).eval()


def measure(model: Any, batch: int, prompt: int, output: int) -> list[float]:
    """Seconds of each step in which all sequences decode, greedily."""
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (batch, prompt), device="cuda")
    cache = StaticCache(config=model.config, max_cache_len=prompt + output)
    times = []
    with torch.no_grad():
        for n in range(output):
            torch.cuda.synchronize()
            start = time.perf_counter()
            first = 0 if n == 0 else prompt + n - 1
            place = torch.arange(first, first + ids.shape[1], device="cuda")
            found = model(ids, past_key_values=cache, cache_position=place, logits_to_keep=1)
            ids = found.logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="Qwen1.5-MoE-A2.7B")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--experts", default="grouped_mm", help="or batched_mm, eager")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU")
    if not (FOLDER / "published" / f"{args.shape}.json").is_file():
        raise SystemExit(f"'{args.shape}' is not one of the files in {FOLDER / 'published'}")
    model = make_model(args.shape, args.experts)
    for batch in args.batch:
        measure(model, batch, args.prompt, 8)
        steady = measure(model, batch, args.prompt, args.output)[2:]
        row = {
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "shape": args.shape,
            "experts": args.experts,
            "batch": batch,
            "prompt": args.prompt,
            "output": args.output,
            "step_ms": 1e3 * statistics.median(steady),
            "tokens_per_s": batch / statistics.median(steady),
        }
        print(json.dumps(row), flush=True)
        path = FOLDER / "results" / "transformers_speed.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
