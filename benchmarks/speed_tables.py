"""The speed tables of the README, from what the benchmarks left in results/.

    python benchmarks/speed_tables.py    # writes them between their markers

Of lines of the same case the last counts.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
README = pathlib.Path(__file__).parents[1] / "README.md"
DEVICE = "NVIDIA H200"
STEP = {"shape": "Qwen1.5-MoE-A2.7B", "layers": 24, "prompt": 256}
"""Of which whole steps are shown."""
TOKENS = {1: "gluon", 8: "gluon", 16: "gluon", 32: "mosaic", 64: "mosaic", 256: "mosaic"}
"""Of each expert, and what the server multiplies as many with."""
PARTS = ("experts", "dense products", "attention", "routing")

Row = dict[str, Any]


def read(name: str, **wanted: Any) -> list[Row]:
    """Lines of the device, that have these values where they have the keys."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    wanted = {"device": DEVICE} | wanted
    return [row for row in rows if all(row.get(k, v) == v for k, v in wanted.items())]


def newest(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], Row]:
    """By the values of these keys, the last line."""
    return {tuple(row[key] for key in keys): row for row in rows}


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines]


def decoding() -> list[str]:
    """Tokens per second of whole steps, beside what a user would run otherwise."""
    ours = newest(read("decode_speed", **STEP), "bits", "kernel", "batch")
    theirs = newest(read("transformers_speed", **STEP), "experts", "batch")

    def speed(row: Row | None) -> str:
        return "" if row is None else f"{row['tokens_per_s']:,.0f}"

    def rows() -> Iterator[list[str]]:
        for batch in sorted(key[2] for key in ours if key[:2] == (4, "auto")):
            at_4 = ours[4, "auto", batch]
            yield [
                str(batch),
                speed(at_4),
                f"{at_4['step_ms']:.2f} ms",
                speed(ours.get((16, "auto", batch))),
                speed(ours.get((4, "reference", batch))),
                speed(theirs.get(("grouped_mm", batch))),
            ]

    head = ["batch", "4 bits", "a step of these", "16 bits", "4 bits, plain XLA", "transformers"]
    return table(head, rows())


def steps() -> list[str]:
    """Where the milliseconds of a decode step go."""
    rows = newest(read("step", bits=4, kernel="auto", **STEP), "bits", "batch")

    def lines() -> Iterator[list[str]]:
        for (_, batch), row in sorted(rows.items()):
            parts = row["parts_ms"]
            rest = sum(parts.values()) - sum(parts[part] for part in PARTS)
            times = [*(parts[part] for part in PARTS), rest]
            yield [
                str(batch),
                f"{row['step_ms']:.2f}",
                f"{row['bound_ms']:.2f}",
                f"{row['x_bound']:.2f}",
                *(f"{time:.2f}" for time in times),
            ]

    head = ["batch", "step", "bound", "step / bound", "experts", "other products", *PARTS[2:]]
    return table([*head, "norms, KV, copies, rest"], lines())


def products() -> list[str]:
    """How many times as fast as in bfloat16 experts are at each width."""
    rows = newest(read("kernels"), "shape", "bits", "tokens_per_expert", "kernel")

    def cell(shape: str, which: str, bits: int) -> str:
        found = [rows.get((f"{shape} {which}", bits, n, kernel)) for n, kernel in TOKENS.items()]
        return " / ".join("–" if row is None else f"{row['x_bf16']:.2f}" for row in found)

    def lines() -> Iterator[list[str]]:
        last = ""
        for shape, bits in dict.fromkeys((key[0].split()[0], key[1]) for key in sorted(rows)):
            name = "" if shape == last else shape
            yield [name, str(bits), cell(shape, "gate_up", bits), cell(shape, "down", bits)]
            last = shape

    names = " / ".join(str(n) for n in TOKENS)
    return table(["shape", "bits", f"gate and up, {names} tokens", "down"], lines())


TABLES = {"decoding": decoding, "steps": steps, "products": products}


def replaced(text: str) -> str:
    """The text with all tables between their markers."""
    for name, make in TABLES.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- /{name} -->")
        inside = "\n".join(make())
        text = f"{before}<!-- {name} -->\n{inside}\n<!-- /{name} -->{after}"
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
