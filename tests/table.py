"""The table in README.md of what works, written from the tests that show it.

A test says what it shows with `@pytest.mark.shows("area", "what works")`. `make table` runs these
tests and writes the table if they all pass; a test fails if the table is out of date.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
AREAS = ("models", "conversion", "quantised experts", "memory", "engine", "Python", "server")
_MARK = re.compile(r'pytest\.mark\.shows\(\s*"([^"]+)",\s*"([^"]+)",?\s*\)')
_TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- /table -->)", re.DOTALL)


def rows() -> list[tuple[str, str, str]]:
    """(area, what works, test file) of every mark, areas in their order."""
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for area, what in _MARK.findall(file.read_text(encoding="utf-8")):
            found.append((area, what, file.relative_to(ROOT).as_posix()))
    return sorted(set(found), key=lambda row: (AREAS.index(row[0]), row[1]))


def table() -> str:
    """The table in Markdown."""
    lines = ["| | works | shown by |", "|---|---|---|"]
    last = None
    for area, what, file in rows():
        lines.append(f"| {'' if area == last else area} | {what} | [{file}]({file}) |")
        last = area
    return "\n".join(lines) + "\n"


def in_readme() -> str:
    """The table as README.md has it."""
    found = _TABLE.search(README.read_text(encoding="utf-8"))
    return "" if found is None else found[0]


def expected() -> str:
    """The table as README.md should have it."""
    return f"<!-- table -->\n{table()}<!-- /table -->"


def main() -> int:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--shows-only"], check=False)
    if done.returncode != 0:
        print("README.md is left as it is: these tests must pass first", file=sys.stderr)
        return done.returncode
    text = README.read_text(encoding="utf-8")
    README.write_text(_TABLE.sub(lambda _: expected(), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
