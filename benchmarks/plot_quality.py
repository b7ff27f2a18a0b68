"""The lines of `bench_quality.py` as a plot, a table of all, and the tables of the README.

    python benchmarks/plot_quality.py    # writes results/quality.{svg,md}, prints those tables

The plot needs matplotlib (`pip install ".[bench]"`).
"""

import argparse
import json
from collections.abc import Iterable
from typing import Any

from stamp import RESULTS

NAMES = {
    "uniform": "uniform",
    "static": "static planner",
    "mxmoe": "MxMoE's choice",
}
SEED_AND_PARENT = "3-6 bits"
"""Of the form that converters choose by default."""
COLUMNS = ("3", "3½", "4", "4½", "5", "6")

Row = dict[str, Any]


def read() -> list[Row]:
    """The newest line of each model, scheme and size."""
    found: dict[tuple[str, str, str, int], Row] = {}
    for line in (RESULTS / "quality.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[row["model"], row["scheme"], row["form"], row["expert_bytes"]] = row
    return list(found.values())


def metric(row: Row) -> tuple[float, float]:
    """What a row is judged by, with its interval: the divergence where it was measured."""
    valid = row["valid"]
    if "divergence" in valid:
        return valid["divergence"], valid["divergence_interval"]
    return valid["more"], valid["interval"]


def short_tables(rows: list[Row]) -> dict[str, list[str]]:
    """Markdown of `loss` and of `divergence`: of each model the default form, and its rivals."""
    chosen = [row for row in rows if row["scheme"] != "dense" and _is_default(row)]
    return {
        "loss": _short(row for row in chosen if "divergence" not in row["valid"]),
        "divergence": _short(row for row in chosen if "divergence" in row["valid"]),
    }


def _short(rows: Iterable[Row]) -> list[str]:
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: row["expert_bytes"]):
        line = lines.setdefault((row["model"], row["scheme"]), {})
        at = str(row["width"] or row["fits"])
        more, half = metric(row)
        cell = f"{more:+.4f} ± {half:.4f} ({row['bits']:.2f})"
        line[at if at not in line else f"{at}½"] = cell
    order = list(dict.fromkeys(model for model, _ in lines))
    return [
        f"| model | experts | {' | '.join(COLUMNS)} |",
        "|---" * (2 + len(COLUMNS)) + "|",
        *(
            f"| {model} | {NAMES.get(scheme, scheme)} "
            f"| {' | '.join(cells.get(column, '') for column in COLUMNS)} |"
            for (model, scheme), cells in sorted(lines.items(), key=lambda x: order.index(x[0][0]))
        ),
    ]


def long_table(rows: list[Row]) -> list[str]:
    """Markdown of all rows."""
    lines = [
        "# Quality over bytes",
        "",
        "Every line of [quality.jsonl](quality.jsonl), held-out text. Loss and divergence in",
        "nats per token with 95 % intervals of paired windows; *than uniform* is the loss more",
        "than that of the largest uniform width within the same budget.",
        "",
        "| model | experts | form | bits per weight | experts, MB | total, MB | perplexity "
        "| loss, more than bf16 | than uniform | divergence |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        valid = row["valid"]
        is_dense = row["scheme"] == "dense"
        cells = [
            row["model"],
            "bf16" if is_dense else NAMES.get(row["scheme"], row["scheme"]),
            f"{row['width']} bits" if "affine" in row["form"] else row["form"],
            f"{row['bits']:.2f}",
            f"{row['expert_bytes'] / 1e6:.1f}",
            f"{row['total_bytes'] / 1e6:.1f}",
            f"{valid['perplexity']:.3f}",
            "" if is_dense else f"{valid['more']:+.4f} ± {valid['interval']:.4f}",
            _cell(valid, "than_uniform"),
            "" if is_dense else _cell(valid, "divergence"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(valid: Row, name: str) -> str:
    if name not in valid:
        return ""
    return f"{valid[name]:+.4f} ± {valid[f'{name}_interval']:.4f}"


def _is_default(row: Row) -> bool:
    """Whether it is affine, or of the form that converters choose by default."""
    if "affine" in row["form"]:
        return True
    return row["form"].startswith(SEED_AND_PARENT) and "1/1 rows" not in row["form"]


def plot(rows: list[Row]) -> None:
    """One panel per model: loss above bf16, or divergence from it, over bits per weight."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('plot_quality needs matplotlib: pip install ".[bench]"') from error

    matplotlib.use("svg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = pyplot.subplots(-(-len(models) // 3), 3, figsize=(16.5, 8.4), squeeze=False)
    for panel in grid.flat[len(models) :]:
        panel.set_axis_off()
    for panel, model in zip(grid.flat, models, strict=False):
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
                [max(metric(row)[0], 1e-5) for row in of],
                [metric(row)[1] for row in of],
                label=name,
                marker="o",
                markersize=3,
                linewidth=1,
            )
        first = next(row for row in rows if row["model"] == model)
        is_divergence = "divergence" in first["valid"]
        panel.set(title=model, xlabel="bits per weight, tables included", yscale="log")
        panel.set_ylabel(
            "divergence from bf16, nats per token"
            if is_divergence
            else "nats per token more than bf16"
        )
        panel.set_ylim(1e-4, 1.0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.suptitle("with 95 % intervals", fontsize=9)
    figure.tight_layout()
    figure.savefig(RESULTS / "quality.svg", metadata={"Date": None})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    found = read()
    for of_metric in short_tables(found).values():
        print("\n".join(of_metric), end="\n\n")
    (RESULTS / "quality.md").write_text("\n".join(long_table(found)) + "\n", encoding="utf-8")
    plot(found)
