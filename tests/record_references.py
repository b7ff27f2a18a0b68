"""Records what Hugging Face's own code computes for the built-in model, as tests/data/demo.json.

    pip install torch transformers        # in an environment of its own
    python tests/record_references.py

Float32 on a CPU. Run again only when the built-in model changes.
"""

import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = ROOT / "serving" / "moejax_serving" / "demo"
PROMPTS = [
    "The captain looked at the sea and said",
    "In the spring of that year the farmers",
    "A cell is the smallest unit of",
]
NEW_TOKENS = 24


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    rows = []
    for text in PROMPTS:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
            logprobs = torch.log_softmax(model(made).logits[0], dim=-1)
        tokens = made[0].tolist()
        chosen = [logprobs[i, token].item() for i, token in enumerate(tokens[1:])]
        rows.append(
            {
                "text": text,
                "prompt_token_ids": ids[0].tolist(),
                "token_ids": tokens[ids.shape[1] :],
                "completion": tokenizer.decode(tokens[ids.shape[1] :], skip_special_tokens=True),
                "logprobs": [round(value, 6) for value in chosen],
            }
        )
    (ROOT / "tests" / "data" / "demo.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
