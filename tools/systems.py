"""Print on which systems the tests were run, as a table for the README: `python tools/systems.py`.

A run notes itself with `make test TESTS="tests --record-system docs/results/systems.json"`, and likewise
`make test-oldest`; `python tools/systems.py --write` then writes the table again between its two marks in README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs" / "results" / "systems.json"
BEGIN, END = "<!-- systems -->\n", "<!-- end of systems -->"


def table() -> str:
    """Return the table, a row for each system, its newest run."""
    lines = ["| system | device | Python | torch | NumPy | SciPy | tests |", "|---|---|---|---|---|---|---|"]
    for run in json.loads(RUNS.read_text(encoding="utf-8")):
        outcome = f"{run['passed']} passed, {run['skipped']} skipped"
        if run["failed"] or run["error"]:
            outcome += f", **{run['failed'] + run['error']} failed**"
        where = f"{run['system']}, {run['machine']}"
        versions = [run[name] for name in ("python", "torch", "numpy", "scipy")]
        lines.append("| " + " | ".join([where, run["device"], *versions, outcome]) + " |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return a page with the table between the marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        readme = ROOT / "README.md"
        readme.write_text(written(readme.read_text(encoding="utf-8")), encoding="utf-8")
    print(table(), end="")
