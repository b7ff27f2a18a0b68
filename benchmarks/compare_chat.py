"""Greedy chat answers against those that transformers gave (record_chat.py).

python benchmarks/compare_chat.py MODEL answers.json
"""

import argparse
import json
import pathlib
import sys
import time

from stamp import record, run_script, stamp

from moejax_serving import LLM, SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("answers", type=pathlib.Path)
    args = parser.parse_args()

    expected = json.loads(args.answers.read_text())
    llm = LLM(args.model, dtype="float32", max_model_len=512, max_num_seqs=4)
    start = time.perf_counter()
    outputs = llm.chat(
        [[{"role": "user", "content": row["question"]}] for row in expected],
        SamplingParams(temperature=0, max_tokens=48),
    )
    equal = 0
    for output, row in zip(outputs, expected, strict=True):
        completion = output.outputs[0]
        same = (output.prompt, completion.token_ids) == (row["prompt"], row["token_ids"])
        equal += same
        print(f"{row['question']} -> {completion.text}", file=sys.stderr)
    row = {
        **stamp(),
        "model": args.model.name,
        "dtype": "float32",
        "answers": len(expected),
        "equal": equal,
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "seconds": round(time.perf_counter() - start, 1),
    }
    record("compare_chat", row)
    return 0 if equal == len(expected) else 1


if __name__ == "__main__":
    run_script(main)
