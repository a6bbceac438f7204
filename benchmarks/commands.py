"""Time how long a person waits for the command line to answer.

    python -m benchmarks.commands --out docs/results     # ten rounds, a minute

Each command is a fresh process; medians of rounds in turns. The bare interpreter and the import of torch, which help
does without, are timed beside them. The goal is one of CPU seconds, which other work on the machine disturbs least: a
command that waits for nothing takes as long by the clock where the machine has a free core. --out gets commands.json
and commands.md.
"""

from __future__ import annotations

import argparse
import os
import resource
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


def cpu_seconds(words: Sequence[str], into: list[float]) -> None:
    """Run a command, and note what it used of the CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    into.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def table(seconds: Mapping[str, float], used: Mapping[str, float]) -> str:
    """Lay out the times; help and version have a goal."""
    cells = [
        (name, f"{seconds[name]:.3f}", f"{used[name]:.3f}", _verdict(used[name]) if name.startswith("sanc") else "")
        for name in seconds
    ]
    return plain_table(("command", "seconds", "CPU seconds", "goal"), cells)


def _verdict(spent: float) -> str:
    return f"≤ {GOAL} {'met' if spent <= GOAL else 'MISSED'}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    noted: dict[str, list[float]] = {name: [] for name in COMMANDS}
    calls = {name: partial(cpu_seconds, words, noted[name]) for name, words in COMMANDS.items()}
    rounds = turns(calls, seconds=0.0, warm_up=1, least=chosen.rounds, most=chosen.rounds)
    seconds = {name: statistics.median(times) for name, times in rounds.items()}
    used = {name: statistics.median(times[1:]) for name, times in noted.items()}  # without the warm-up
    print(table(seconds, used))
    if chosen.out is not None:
        document: dict[str, Any] = {"machine": machine(), "rounds": chosen.rounds, "seconds": seconds}
        document["cpu_seconds"] = used
        write_json(chosen.out / "commands.json", document)
        words = f"{chosen.rounds} rounds in turns, {document['machine']['cores']} cores"
        text = (
            "# Command line\n\nSeconds until a command has answered and its process has ended, and CPU seconds that it "
            f"used, medians of {words}, by `python -m benchmarks.commands --out docs/results`. The clock ran with "
            f"a load of {os.getloadavg()[1]:.0f}; CPU seconds are those of a free one.\n\n{table(seconds, used)}\n"
        )
        (chosen.out / "commands.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
