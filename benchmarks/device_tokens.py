"""Greedy tokens of a model on this device against those that another device gave.

    python benchmarks/device_tokens.py MODEL --text TEXT --record tokens.json    # on a CPU
    python benchmarks/device_tokens.py MODEL --compare tokens.json               # on a GPU

Float32. Two devices agree if the tokens are the same or, where they part, both tokens are among
the two likeliest of either device and less than 1e-4 apart: sums are rounded in another order.
`--compare` appends a line to results/device_tokens.jsonl and fails if a sequence disagrees.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
from stamp import record, run_script, stamp

from moejax_serving import LLM, SamplingParams

GAP = 1e-4
NEW_TOKENS = 48


def prompts_of(llm: LLM, text: str) -> list[list[int]]:
    """Prompts of several lengths: shorter and longer than a block, a chunk, a bucket."""
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    lengths = [1, 7, 31, 32, 33, 64, 100, 200, 311, 400, 512, 600]
    if len(ids) < (needed := 1000 * (len(lengths) - 1) + lengths[-1]):
        raise SystemExit(f"the text has {len(ids)} tokens: {needed} are needed")
    return [ids[1000 * i : 1000 * i + length] for i, length in enumerate(lengths)]


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[dict[str, Any]]]:
    """For each prompt, per new token: its id and the two likeliest tokens with their logprobs."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    found = []
    for output in outputs:
        completion = output.outputs[0]
        steps = zip(completion.token_ids, completion.logprobs or [], strict=True)
        found.append(
            [
                {"token": token, "top": [[other, e.logprob] for other, e in entries.items()]}
                for token, entries in steps
            ]
        )
    return found


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[str, float]:
    """("equal" | "tie" | "different", largest difference of the logprobs up to there)."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        a, b = dict(map(tuple, mine["top"])), dict(map(tuple, other["top"]))
        worst = max([worst, *(abs(a[t] - b[t]) for t in a.keys() & b.keys())])
        if mine["token"] != other["token"]:
            both = {mine["token"], other["token"]}
            close = all(
                both <= top.keys() and max(top.values()) - min(top.values()) < GAP for top in (a, b)
            )
            return ("tie" if close else "different"), worst
    return "equal", worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path, help="file that prompts are taken from")
    parser.add_argument("--record", type=pathlib.Path, help="file that this device's tokens go to")
    parser.add_argument("--compare", type=pathlib.Path, help="file of another device's tokens")
    parser.add_argument("--memory-budget", default="3GiB", help="such as 3GiB (default)")
    parser.add_argument("--commit", help="default: that of the checkout")
    args = parser.parse_args()
    given = [args.text is not None, args.record is not None, args.compare is not None]
    if given not in ([True, True, False], [False, False, True]):
        parser.error("give either --text and --record, or --compare")

    text = "" if args.text is None else args.text.read_text(encoding="utf-8")
    recorded = {} if args.compare is None else json.loads(args.compare.read_text())
    if args.compare is not None and not {"prompts", "steps"} <= set(recorded):
        raise SystemExit(f"{args.compare} is not what --record writes")
    llm = LLM(args.model, dtype="float32", memory_budget=args.memory_budget, warm_up=False)
    if args.record:
        prompts = prompts_of(llm, text)
        recorded = {"prompts": prompts, "steps": generate(llm, prompts)}
        args.record.write_text(json.dumps(recorded))
        return 0
    found = generate(llm, recorded["prompts"])
    verdicts = [compare(a, b) for a, b in zip(found, recorded["steps"], strict=True)]
    names = [name for name, _ in verdicts]
    row = {
        **stamp(args.commit),
        "model": args.model.name,
        "sequences": len(names),
        "tokens": len(names) * NEW_TOKENS,
        "equal": names.count("equal"),
        "tie": names.count("tie"),
        "different": names.count("different"),
        "largest_logprob_difference": max(worst for _, worst in verdicts),
        "memory_budget": llm.engine.memory.budget,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    record("device_tokens", row)
    return 1 if row["different"] else 0


if __name__ == "__main__":
    run_script(main)
