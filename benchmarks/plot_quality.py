"""The lines of `bench_quality.py` as a plot, and as the table of the README.

    python benchmarks/plot_quality.py        # writes results/quality.svg, prints the table

The plot needs matplotlib (`pip install ".[bench]"`).
"""

import json
from typing import Any

from stamp import RESULTS

NAMES = {
    "dense": "bf16",
    "uniform": "uniform",
    "static": "static planner",
    "mxmoe": "MxMoE's choice",
}
SEED_AND_PARENT = "3-6 bits"
"""Of the form that converters choose by default."""

Row = dict[str, Any]


def read() -> list[Row]:
    """The newest line of each model, scheme and size."""
    found: dict[tuple[str, str, str, int], Row] = {}
    for line in (RESULTS / "quality.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[row["model"], row["scheme"], row["form"], row["expert_bytes"]] = row
    return list(found.values())


def table(rows: list[Row]) -> list[str]:
    """Markdown: of each model, what the default form gives, and its rivals."""
    lines = [
        "| model | experts | bits per weight | experts, MB | perplexity | loss, more than bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["scheme"] == "uniform" and not _is_default(row):
            continue
        name = NAMES.get(row["scheme"], row["scheme"])
        if row["scheme"] == "uniform":
            name = f"uniform, {row['width']} bits"
        valid = row["valid"]
        more = "" if row["scheme"] == "dense" else f"{valid['more']:+.4f} ± {valid['interval']:.4f}"
        lines.append(
            f"| {row['model']} | {name} | {row['bits']:.2f} | {row['expert_bytes'] / 1e6:.1f} "
            f"| {valid['perplexity']:.3f} | {more} |"
        )
    return lines


def _is_default(row: Row) -> bool:
    """Whether neighbouring rows share tables as `--rows-per-table auto` makes them."""
    return row["form"].startswith(SEED_AND_PARENT) and "1/1 rows" not in row["form"]


def plot(rows: list[Row]) -> None:
    """One panel per model: loss above bf16 over bits per weight."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pyplot.subplots(1, len(models), figsize=(5.5 * len(models), 4.2))
    for panel, model in zip(panels, models, strict=True):
        curves: dict[str, list[Row]] = {}
        for row in rows:
            if row["model"] == model and row["scheme"] != "dense":
                name = NAMES.get(row["scheme"], row["scheme"])
                name += f" ({row['form']})" if row["scheme"] == "uniform" else ""
                curves.setdefault(name, []).append(row)
        for name, of in curves.items():
            of = sorted(of, key=lambda row: row["bits"])
            panel.errorbar(
                [row["bits"] for row in of],
                [max(row["valid"]["more"], 1e-5) for row in of],
                [row["valid"]["interval"] for row in of],
                label=name,
                marker="o",
                markersize=3,
                linewidth=1,
            )
        panel.set(title=model, xlabel="bits per weight, tables included", yscale="log")
        panel.set_ylim(1e-4, 0.5)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("nats per token more than bf16, with 95 % intervals")
    figure.tight_layout()
    figure.savefig(RESULTS / "quality.svg", metadata={"Date": None})


if __name__ == "__main__":
    found = read()
    print("\n".join(table(found)))
    plot(found)
