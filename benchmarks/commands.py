"""Time the answers of the command line: `--version` and `--help`.

    python -m benchmarks.commands --out docs/results     # ten rounds, a minute

Each command runs in a new process; the table shows medians of interleaved rounds. The bare interpreter and the import
of torch, which the help does not need, are timed as references. The goal refers to CPU seconds, because other work on
the machine affects them least. --out writes commands.json and commands.md.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.reporting import COMMIT_NOTE, command, machine, markdown_table, verdict, write_results
from benchmarks.timing import interleaved, medians

GOAL = 0.5
"""Most CPU seconds of `--version` and `--help`."""
COMMANDS: Mapping[str, Sequence[str]] = {
    "python -c pass": ("-c", "pass"),
    "sanc --version": ("-m", "sanc", "--version"),
    "sanc --help": ("-m", "sanc", "--help"),
    "sanc run --help": ("-m", "sanc", "run", "--help"),
    "import sanc": ("-c", "import sanc"),
    "import torch": ("-c", "import torch"),
}


def run_command(words: Sequence[str], cpu_seconds: list[float]) -> None:
    """Run a command, and append the CPU seconds that it used to `cpu_seconds`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def table(seconds: Mapping[str, float], cpu: Mapping[str, float]) -> str:
    """Return the table of times; the commands of sanc have a goal."""
    cells = [
        (name, f"{seconds[name]:.3f}", f"{cpu[name]:.3f}", verdict(cpu[name], most=GOAL) if name[:4] == "sanc" else "")
        for name in seconds
    ]
    return markdown_table(("command", "seconds", "CPU seconds", "goal"), cells)


def page(seconds: Mapping[str, float], cpu: Mapping[str, float], rounds: int) -> str:
    """Return the results page."""
    largest = max((spent for name, spent in cpu.items() if name[:4] == "sanc"), default=0.0)
    parts = [
        "# Command line",
        f"`sanc --version`, `sanc --help` and `sanc run --help` use at most {largest:.2f} CPU seconds; the goal is "
        f"{GOAL}. `import sanc` takes {seconds.get('import sanc', 0.0):.3f} s: it imports torch on first use.",
        table(seconds, cpu),
        "## How it was measured",
        "Wall-clock and CPU seconds from the start of a command to the exit of its process: medians of "
        f"{rounds} interleaved rounds on {os.cpu_count()} cores, by `python -m benchmarks.commands --out "
        f"docs/results`. {COMMIT_NOTE}",
        "## Caveats",
        f"The load average was {os.getloadavg()[1]:.0f}, which increases wall-clock seconds; CPU seconds do not "
        "include waiting.",
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, out="commands.json and commands.md")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    used: dict[str, list[float]] = {name: [] for name in COMMANDS}
    calls = {name: partial(run_command, words, used[name]) for name, words in COMMANDS.items()}
    seconds = medians(interleaved(calls, seconds=0.0, warm_up=1, least=options.rounds, most=options.rounds))
    cpu = {name: statistics.median(times[1:]) for name, times in used.items()}  # without the warm-up
    print(table(seconds, cpu))
    document = {"machine": machine(), "rounds": options.rounds, "seconds": seconds, "cpu_seconds": cpu}
    write_results(options.out, {"commands.json": document, "commands.md": page(seconds, cpu, options.rounds)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
