"""Records transformers' greedy answers, for compare_chat.py. Needs torch and transformers.

python benchmarks/record_chat.py MODEL answers.json
"""

import argparse
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "Write one sentence about the sea.",
]
NEW_TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("answers", type=pathlib.Path)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rows = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        answer = made[0, ids.shape[1] :].tolist()
        rows.append(
            {
                "question": question,
                "prompt": text,
                "token_ids": answer,
                "text": tokenizer.decode(answer, skip_special_tokens=True),
            }
        )
    args.answers.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
