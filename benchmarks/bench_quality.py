"""Quality over bytes: what each width and each way to choose widths costs a model.

    python benchmarks/bench_quality.py PLAIN QUANTISED [QUANTISED ...] --data DATA

PLAIN is a checkpoint of moejax-convert at width 16; every QUANTISED one was made of it. DATA holds
`valid.txt`, `wikitext2.test.txt`, `calibration.txt` and `evals/*.jsonl`. Planners work on the first
QUANTISED; `--schemes affine` needs none. Every scheme is a whole forward pass in float32 with
decoded weights, which is what a server gives at these widths (`tests/serving/test_widths.py`).
"""

import argparse
import dataclasses
import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import tokenizers
from quality_model import Experts, Scorer, Stored, read_stored
from quality_rivals import Importance, affine_schemes, mxmoe_widths
from quality_tasks import (
    LONGEST,
    MULTIPLE_CHOICE,
    Task,
    accuracy,
    choices,
    divergences,
    interval,
    last_words,
    losses,
    windows,
)
from stamp import record, run_script, stamp

from moejax.checkpoint import Checkpoint
from moejax.config import DENSE_WIDTH
from moejax.models.decoder import abstract_params, params_bytes
from moejax.models.fisher import layer_fishers, with_prior
from moejax.paging.allocation import allocate, expert_choices
from moejax_converters.calibration_text import calibration_sequences

# MxMoE's losses need the inputs of all layers in memory.
MXMOE_SEQUENCES = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to store the experts."""

    name: str
    """dense, uniform, static, mxmoe, affine …"""
    stored: str
    """In which form: of a quantised checkpoint, its widths and rows per table."""
    width: int | None = None
    """Of a uniform scheme."""
    fits: int | None = None
    """Of a planner: the largest uniform width within its budget."""
    num_bytes: int
    """Of the experts: planes with their tables, or codes with their scales."""
    experts: Experts


@dataclasses.dataclass(frozen=True, slots=True)
class Models:
    """What schemes are made of."""

    plain: Stored
    quantised: list[Stored]
    calibration: np.ndarray
    """[sequences, tokens]"""


def tasks(data: pathlib.Path, folder: pathlib.Path, limit: int, characters: int) -> list[Task]:
    """What is scored, in the model's own tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    longest = min(LONGEST, Checkpoint.open(folder).config.max_position_embeddings)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    found = [
        windows(
            name,
            (data / file).read_text(encoding="utf-8"),
            encode,
            characters=characters,
            size=512,
        )
        for name, file in (("valid", "valid.txt"), ("wikitext2", "wikitext2.test.txt"))
    ]
    lambada = data / "evals" / "lambada_openai.jsonl"
    found.append(last_words(lambada, encode, limit=limit, longest=longest))
    for name in MULTIPLE_CHOICE:
        path = data / "evals" / f"{name}.jsonl"
        found.append(choices(path, encode, limit=limit, longest=longest))
    return found


def form(stored: Stored) -> str:
    """The widths and rows per table of a quantised checkpoint."""
    of = stored.checkpoint.quantization
    if of is None:
        return "bf16"
    rows = f"{of.gate_up_rows_per_table}/{of.down_rows_per_table}"
    return f"{of.seed_bits}-{of.parent_bits} bits, {rows} rows per table"


def dense(models: Models) -> Iterator[Scheme]:
    """As the checkpoint is."""
    widths = models.plain.uniform(DENSE_WIDTH)
    yield scheme("dense", models.plain, widths, width=DENSE_WIDTH)


def uniform(models: Models) -> Iterator[Scheme]:
    """The same width for all, of every quantised checkpoint."""
    for stored in models.quantised:
        for width in stored.widths:
            yield scheme("uniform", stored, stored.uniform(width), width=width)


def static(models: Models) -> Iterator[Scheme]:
    """Widths of least total sensitivity."""
    stored = models.quantised[0]
    errors = stored.checkpoint.sensitivity().experts
    offered = expert_choices(errors, stored.sizes().astype(np.int64))
    for budget in budgets(stored):
        picks = allocate(offered, budget)
        widths = np.array(stored.widths)[picks].reshape(errors.shape[:-1])
        yield scheme("static", stored, widths, fits=fitting(stored, budget))


def mxmoe(models: Models) -> Iterator[Scheme]:
    """Widths as MxMoE chooses them."""
    stored, sequences = models.quantised[0], models.calibration[:MXMOE_SEQUENCES]
    offered = budgets(stored)
    chosen = mxmoe_widths(models.plain, stored, sequences, offered)
    for budget, widths in zip(offered, chosen, strict=True):
        yield scheme("mxmoe", stored, widths, fits=fitting(stored, budget))


def affine(models: Models) -> Iterator[Scheme]:
    """Rounding to the nearest, per row and per group."""
    importance = importances(models.plain, models.calibration)
    for name, bits, num_bytes, experts in affine_schemes(models.plain, importance):
        yield Scheme(name=name, stored=name, width=bits, num_bytes=num_bytes, experts=experts)


SCHEMES = {"uniform": uniform, "static": static, "mxmoe": mxmoe, "affine": affine}


def scheme(
    name: str,
    stored: Stored,
    widths: np.ndarray,
    *,
    width: int | None = None,
    fits: int | None = None,
) -> Scheme:
    """What a checkpoint is at widths [layers, experts, 2]."""
    return Scheme(
        name=name,
        stored=form(stored),
        width=width,
        fits=fits,
        num_bytes=stored.num_bytes(widths),
        experts=stored.at(widths),
    )


def importances(plain: Stored, calibration: np.ndarray) -> dict[int, Importance]:
    """Of all weights, by the calibration that the quantiser runs."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for fisher in layer_fishers(
            plain.checkpoint, calibration, folder=pathlib.Path(folder), progress=True
        ):
            filled, _ = with_prior(fisher)
            found[fisher.layer] = Importance(np.asarray(filled.gate_up), np.asarray(filled.down))
    return found


def budgets(stored: Stored) -> list[int]:
    """Six: the bytes of uniform widths, and what lies half way between the smaller ones."""
    sizes = [stored.num_bytes(stored.uniform(width)) for width in stored.widths]
    halves = [(a + b) // 2 for a, b in zip(sizes[:2], sizes[1:3], strict=True)]
    return sorted(sizes[:4] + halves)


def fitting(stored: Stored, budget: int) -> int:
    """The largest uniform width that takes no more than a budget."""
    return max(w for w in stored.widths if stored.num_bytes(stored.uniform(w)) <= budget)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    names = ("valid", "wikitext2", "lambada_openai", *MULTIPLE_CHOICE)
    parser.add_argument("plain", type=pathlib.Path, help="folder of moejax-convert, width 16")
    parser.add_argument("quantised", type=pathlib.Path, nargs="*", help="folders made of it")
    parser.add_argument("--data", type=pathlib.Path, required=True, help="texts, and evals/*.jsonl")
    parser.add_argument("--name", help="of the model in the results, else that of PLAIN")
    parser.add_argument("--limit", type=int, default=100, help="items of each task")
    parser.add_argument("--characters", type=int, default=200_000, help="of each text")
    parser.add_argument("--sequences", type=int, default=128, help="of the rivals' calibration")
    parser.add_argument("--tasks", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument(
        "--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="only these"
    )
    parser.add_argument("--commit", help="in the results, else that of this checkout")
    args = parser.parse_args()

    scored = [
        task
        for task in tasks(args.data, args.plain, args.limit, args.characters)
        if task.name in args.tasks
    ]
    calibration = calibration_sequences(
        args.data / "calibration.txt", args.plain, count=args.sequences, length=512
    )
    models = Models(
        read_stored(args.plain), [read_stored(path) for path in args.quantised], calibration
    )
    plain = models.plain
    config = plain.checkpoint.config
    scorer = Scorer(plain.checkpoint, plain.at(plain.uniform(DENSE_WIDTH)))
    dense_bytes = params_bytes(abstract_params(config, config.dtype))
    weights = sum(s.parts * s.rows * s.columns for s in plain.shapes)
    weights *= len(config.moe_layers) * config.moe.router.num_experts
    base: dict[str, np.ndarray] = {}
    uniforms: dict[tuple[str, int | None, str], np.ndarray] = {}
    for found in itertools.chain(dense(models), *(SCHEMES[name](models) for name in args.schemes)):
        start = time.perf_counter()
        row = {
            **stamp(args.commit),
            "model": args.name or args.plain.name,
            "scheme": found.name,
            "form": found.stored,
            "width": found.width,
            "fits": found.fits,
            "bits": round(8 * found.num_bytes / weights, 4),
            "expert_bytes": found.num_bytes,
            "total_bytes": found.num_bytes + dense_bytes,
        }
        for task in scored:
            scores = scorer.score(found.experts, task.items)
            of_task = losses(task, scores)
            base.setdefault(task.name, of_task)
            mean, half = interval(of_task - base[task.name])
            entry = {"loss": of_task.mean(), "more": mean, "interval": half}
            if found.name == "uniform":
                uniforms[found.stored, found.width, task.name] = of_task
            rival = uniforms.get((found.stored, found.fits, task.name))
            if rival is not None:
                than, half = interval(of_task - rival)
                entry |= {"than_uniform": than, "than_uniform_interval": half}
            if (right := accuracy(task, scores)) is not None:
                entry["accuracy"] = right
            if task.kind == "windows":
                entry["perplexity"] = float(np.exp(of_task.mean()))
                entry["divergence"], entry["divergence_interval"] = interval(
                    divergences(task, scores)
                )
            row[task.name] = {name: round(float(value), 5) for name, value in entry.items()}
        row["seconds"] = round(time.perf_counter() - start, 1)
        record("quality", row)


if __name__ == "__main__":
    run_script(main)
