"""Write the results of an output directory as Markdown: final losses, settings, claims and environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sanc.lab.claims import Claim
from sanc.lab.curves import number, results
from sanc.lab.directory import write_atomically
from sanc.lab.style import style_of
from sanc.lab.traces import RunTrace, by_panel, skipped

_ACTIVE = re.compile(r"[\\`*\[\]<>|~&$#]|(?<![^\W_])_|_(?![^\W_])|^[-+]")
"""Characters with a meaning in Markdown, in its tables and formulas; an underscore inside a word has none."""
_NUMBERED = re.compile(r"^(\d+)([.)])")
"""The beginning of a line that Markdown would number."""


def escaped(text: str) -> str:
    """Return a text of the user, such as the name of a file, as Markdown that shows it on one line."""
    return _NUMBERED.sub(r"\1\\\2", _ACTIVE.sub(r"\\\g<0>", " ".join(text.split())))


def write(out: Path, runs: Sequence[RunTrace], claims: Sequence[Claim]) -> Path:
    """Write ``OUT/summary.md`` and return its path."""
    lines = ["# Summary", ""]
    for name, group in by_panel(runs).items():
        lines += [*_panel(name, group), ""]
    if missing := skipped(out):
        reasons = (f"- {escaped(name)}: {escaped(reason)}" for name, reason in sorted(missing.items()))
        lines += ["## Missing", "", *reasons, ""]
    if claims:
        lines += ["## Claims", "", "| panel | statement | measured | spread | holds |", "|---|---|---|---|---|"]
        for claim in claims:
            verdict = {True: "yes", False: "**no**", None: "?"}[claim.holds]
            cells = map(escaped, (claim.panel, claim.statement, claim.measured, claim.spread))
            lines.append(f"| {' | '.join(cells)} | {verdict} |")
        lines.append("")
    keys = ("sanc", "python", "torch", "numpy", "device", "threads")
    machines = {", ".join(f"{key} {run.environment.get(key, '?')}" for key in keys) for run in runs}
    lines += ["## Environment", "", *(f"- {escaped(machine)}" for machine in sorted(machines)), ""]
    path = out / "summary.md"
    write_atomically(path, "\n".join(lines).encode())
    return path


def _panel(name: str, runs: Sequence[RunTrace]) -> Iterator[str]:
    """Yield the lines of Markdown of a panel: its title, and a table of its methods."""
    config = runs[0].config
    note = f"; {escaped(config['data_note'])}" if config.get("data_note") else ""
    yield f"## {escaped(name)}\n"
    yield (
        f"{escaped(config['title'])}: {escaped(config['subtitle'])}; batch {config['batch_size']:,}, "
        f"{config['budget']:,} calls, preset {escaped(config['preset'])}{note}.\n"
    )
    yield "| method | runs | start | final loss (mean ± std) | best | evaluations | seconds |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in results(runs):
        final = " ".join(part for part in row.final if part)
        yield (
            f"| {escaped(style_of(row.method).name)} | {row.counted} | {number(row.start, 5)} | {final} "
            f"| {number(row.best, 5)} | {row.ends['calls']:,.0f} | {row.ends['seconds']:.3g} |"
        )
