"""lm-eval against a running server, and the same items by whole forward passes in this process.

    moejax-serve QUANTISED --expert-bits 4 --dtype float32 --port 8000 &
    python benchmarks/compare_lm_eval.py PLAIN QUANTISED --width 4 --data DATA \
        --url http://127.0.0.1:8000 --lm-eval VENV/bin/lm_eval

PLAIN is what QUANTISED was made of. lm-eval comes from an environment of its own
(`pip install "lm_eval[api]" torch transformers`). Both tokenise and sum by the rules of lm-eval, so
every log-probability must agree, not only the accuracies.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import urllib.request
from typing import Any

import numpy as np
from bench_quality import tasks
from quality_model import Scorer, read_stored
from quality_tasks import LONGEST, accuracy
from stamp import record, run_script, stamp

from moejax.checkpoint import Checkpoint

TASKS = ("arc_easy", "copa", "openbook_qa", "lambada_openai")
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{query}}",
    "target_delimiter": " ",
    "metric_list": [{"metric": "acc"}],
    "metadata": {"version": 1},
}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
}
# The delimiter is for choices alone.
LAST_WORD = {"output_type": "loglikelihood", "doc_to_target": "{{' ' + continuation}}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plain", type=pathlib.Path)
    parser.add_argument("quantised", type=pathlib.Path)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--lm-eval", default="lm_eval", help="the command")
    parser.add_argument("--limit", type=int, default=100, help="items of each task")
    parser.add_argument("--commit")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        theirs = run_lm_eval(args, pathlib.Path(name))
    ours = score(args)
    for task, of_task in ours.items():
        apart = np.abs(of_task["logprobs"] - theirs[task]["logprobs"])
        row = {
            **stamp(args.commit),
            "model": args.quantised.name,
            "width": args.width,
            "task": task,
            "log_probabilities": len(apart),
            "largest_difference": round(float(apart.max()), 6),
            "accuracy": round(of_task["accuracy"], 4),
            "accuracy_by_lm_eval": round(theirs[task]["accuracy"], 4),
        }
        record("lm_eval", row)


def run_lm_eval(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Task → its accuracy, and the log-probability of every continuation in order."""
    for task in TASKS:
        write_task(args.data / "evals" / f"{task}.jsonl", folder, args.limit)
    with urllib.request.urlopen(f"{args.url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    settings = {
        "model": model,
        "base_url": f"{args.url}/v1/completions",
        "tokenizer": args.plain.resolve(),
        "tokenized_requests": True,
        "num_concurrent": 8,
        "max_length": LONGEST,
    }
    names = ",".join(f"moejax_{task}" for task in TASKS)
    command = [args.lm_eval, "--model", "local-completions", "--include_path", str(folder)]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in settings.items())]
    command += ["--tasks", names, "--output_path", str(folder / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    caches = {"HF_HOME": str(folder / "hf")}
    subprocess.run(command, check=True, env={**os.environ, **offline, **caches})
    return {task: read_samples(folder / "out", task) for task in TASKS}


def write_task(source: pathlib.Path, folder: pathlib.Path, limit: int) -> None:
    """The first items of a task, and the file that tells lm-eval about them."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[:limit]]
    for row in rows:
        row["query"] = row.pop("context", row.get("query")).rstrip()
        if "choices" in row:
            row["choices"] = [choice.strip() for choice in row["choices"]]
        else:
            row["continuation"] = row["continuation"].strip()
    path = folder / source.name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kind = CHOICE if "choices" in rows[0] else LAST_WORD
    config = {
        "task": f"moejax_{source.stem}",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        **COMMON,
        **kind,
    }
    # JSON is YAML.
    (folder / f"{source.stem}.yaml").write_text(json.dumps(config), encoding="utf-8")


def read_samples(folder: pathlib.Path, task: str) -> dict[str, Any]:
    """What lm-eval wrote about a task."""
    (path,) = folder.rglob(f"samples_moejax_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row["doc_id"])
    logprobs = [float(answer[0][0]) for row in rows for answer in row["resps"]]
    return {
        "logprobs": np.array(logprobs),
        "accuracy": float(np.mean([row["acc"] for row in rows])),
    }


def score(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The same of the items as this process scores them."""
    stored = read_stored(args.quantised)
    experts = stored.at(stored.uniform(args.width))
    scorer = Scorer(Checkpoint.open(args.plain), experts)
    found = {}
    for task in tasks(args.data, args.plain, args.limit, characters=0):
        if task.name in TASKS:
            scores = scorer.score(experts, task.items)
            logprobs = np.array([score.logprob for score in scores])
            found[task.name] = {"logprobs": logprobs, "accuracy": accuracy(task, scores)}
    return found


if __name__ == "__main__":
    run_script(main)
