"""Perplexity of a model on a text, through `LLM`, as the cards of our test models state it.

    python benchmarks/perplexity.py MODEL TEXT [--characters 200000] [--window 512]

The text's first characters are tokenised without special tokens and cut into consecutive windows;
the first token of a window predicts nothing. A last window that is not full is left out.
"""

import argparse
import math
import pathlib
import time

from stamp import record, run_script, stamp

from moejax_serving import LLM, SamplingParams


def windows(ids: list[int], size: int) -> list[list[int]]:
    """Full windows of `size` tokens, one after the other."""
    return [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]


def negative_logprobs(llm: LLM, parts: list[list[int]]) -> list[list[float]]:
    """For each window, -log p of each token after its first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in parts], params)
    found = []
    for output in outputs:
        entries = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        found.append([-entry[token].logprob for token, entry in entries if entry is not None])
    return found


def perplexity(losses: list[list[float]]) -> float:
    """exp of the mean over all predictions."""
    flat = [loss for window in losses for loss in window]
    return math.exp(sum(flat) / len(flat))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", type=pathlib.Path, help="a folder, as moejax-serve takes it")
    parser.add_argument("text", type=pathlib.Path, help="a file in UTF-8")
    parser.add_argument("--characters", type=int, default=200_000, help="of the text's beginning")
    parser.add_argument("--window", type=int, default=512, help="tokens, each scored by itself")
    parser.add_argument("--dtype", default="float32", help="of weights and activations")
    args = parser.parse_args()

    llm = LLM(args.model, dtype=args.dtype)
    text = args.text.read_text(encoding="utf-8")[: args.characters]
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    start = time.perf_counter()
    losses = negative_logprobs(llm, windows(ids, args.window))
    row = {
        **stamp(),
        "model": args.model.name,
        "dtype": args.dtype,
        "windows": len(losses),
        "perplexity": round(perplexity(losses), 4),
        "seconds": round(time.perf_counter() - start, 1),
    }
    record("perplexity", row)


if __name__ == "__main__":
    run_script(main)
