"""README.md says what the tests show."""

import json
import pathlib

import table

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_the_table_of_what_works_is_that_of_the_tests():
    assert table.in_readme() == table.expected(), "run: make table"


def test_quoted_figures_stand_in_the_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    def results(name: str) -> list[dict]:
        lines = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    for row in results("perplexity"):
        assert f"{row['perplexity']:.4f}" in text, row
    tokens = results("device_tokens")
    assert (
        f"{sum(r['tokens'] for r in tokens):,} of {sum(r['tokens'] for r in tokens):,} equal"
        in text
    )
    assert all(row["equal"] == row["sequences"] for row in tokens)
    chat = results("compare_chat")[-1]
    assert f"{chat['equal']} of {chat['answers']} equal" in text
