"""README.md says what the tests and the results show."""

import json
import pathlib

import plot_quality
import speed_tables

import table

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def newest(name: str) -> dict[str, dict]:
    """Model → its last line in a file of results."""
    lines = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()
    return {row["model"]: row for row in map(json.loads, lines)}


def test_the_table_of_what_works_is_that_of_the_tests():
    assert table.in_readme() == table.expected(), "run: make table"


def test_the_quoted_perplexities_stand_in_the_results():
    rows = newest("perplexity")
    quoted = ", ".join(f"{rows[model]['perplexity']:.4f}" for model in ("demo", "ref", "wide"))
    assert f"| {quoted} |" in TEXT


def test_the_quoted_tokens_of_devices_stand_in_the_results():
    rows = newest("device_tokens").values()
    tokens = sum(row["tokens"] for row in rows)
    assert f"{tokens:,} of {tokens:,} equal" in TEXT
    assert all(row["equal"] == row["sequences"] for row in rows)


def test_the_quoted_answers_stand_in_the_results():
    row = newest("compare_chat")["smollm2"]
    assert f"{row['equal']} of {row['answers']} equal" in TEXT


def test_the_quoted_speeds_stand_in_the_results():
    assert speed_tables.replaced(TEXT) == TEXT, "run: python benchmarks/speed_tables.py"


def test_the_quoted_load_stands_in_the_results():
    lines = (ROOT / "benchmarks" / "results" / "soak.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    assert (row["streams"], row["minutes"], row["errors"], row["held_at_the_end"]) == (
        *(100, 10.0, 0),
        [0.0, 0.0, 0.0],
    )
    assert f"{row['finished']:,} answers, {row['left_by_clients']} more" in TEXT
    assert f"from {row['rss_mib_early']:,.0f} to {row['rss_mib_late']:,.0f} MiB" in TEXT


def test_the_quoted_qualities_stand_in_the_results():
    rows = plot_quality.read()
    for name, wanted in plot_quality.short_tables(rows).items():
        inside = TEXT.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0]
        assert inside.splitlines() == wanted
    whole = (ROOT / "benchmarks" / "results" / "quality.md").read_text(encoding="utf-8")
    assert whole.splitlines() == plot_quality.long_table(rows)


def test_the_quoted_time_of_a_quantisation_stands_in_the_results():
    lines = (ROOT / "benchmarks" / "results" / "quantize_speed.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    quoted = f"{row['seconds']:.0f} s, at most {row['peak_device_gigabytes']} GB of device"
    assert quoted in TEXT and f"writing {row['gigabytes']:.1f} GB included" in TEXT
