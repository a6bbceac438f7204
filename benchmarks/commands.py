"""Time how long a person waits for the command line to answer.

    python -m benchmarks.commands --out docs/results     # ten rounds, a minute

Each command is a fresh process; medians of rounds in turns. The bare interpreter and the import of torch, which help
does without, are timed beside them. --out gets commands.json and commands.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import plain_table
from benchmarks.timing import machine, turns, write_json

GOAL = 0.5
"""Seconds that help may take."""
COMMANDS: Mapping[str, Sequence[str]] = {
    "python -c pass": ("-c", "pass"),
    "sanc --version": ("-m", "sanc", "--version"),
    "sanc --help": ("-m", "sanc", "--help"),
    "sanc run --help": ("-m", "sanc", "run", "--help"),
    "import sanc": ("-c", "import sanc"),
    "import torch": ("-c", "import torch"),
}


def table(seconds: Mapping[str, float]) -> str:
    """Lay out the times; help and version have a goal."""
    cells = [
        (name, f"{spent:.3f}", (f"≤ {GOAL} {'met' if spent <= GOAL else 'MISSED'}" if name.startswith("sanc") else ""))
        for name, spent in seconds.items()
    ]
    return plain_table(("command", "seconds", "goal"), cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    calls = {
        name: partial(subprocess.run, [sys.executable, *words], check=True, capture_output=True)
        for name, words in COMMANDS.items()
    }
    rounds = turns(calls, seconds=0.0, warm_up=1, least=chosen.rounds, most=chosen.rounds)
    seconds = {name: statistics.median(times) for name, times in rounds.items()}
    print(table(seconds))
    if chosen.out is not None:
        document: dict[str, Any] = {"machine": machine(), "rounds": chosen.rounds, "seconds": seconds}
        write_json(chosen.out / "commands.json", document)
        words = f"{chosen.rounds} rounds in turns, {document['machine']['cores']} cores"
        text = (
            "# Command line\n\nSeconds until a command has answered and its process has ended, medians of "
            f"{words}, by `python -m benchmarks.commands --out docs/results`.\n\n{table(seconds)}\n"
        )
        (chosen.out / "commands.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
