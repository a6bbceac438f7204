"""The results of an output directory as Markdown: final losses, settings, claims, and what they ran on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sanc.lab.claims import Claim
from sanc.lab.curves import best_loss
from sanc.lab.directory import write_atomically
from sanc.lab.traces import RunTrace, by_method, by_panel, skipped


def write(out: Path, traces: Sequence[RunTrace], claims: Sequence[Claim], order: Sequence[str] = ()) -> Path:
    """Write ``OUT/summary.md`` and return where it is."""
    panels = by_panel(trace for trace in traces if trace.done is not None and trace.steps > 0)
    places = {name: place for place, name in enumerate(order)}
    names = sorted(panels, key=lambda name: (places.get(name, len(places)), name))
    lines = ["# Summary", ""]
    for name in names:
        lines += _panel(name, by_method(panels[name]))
    missing = skipped(out)
    if missing:
        lines += ["## Missing", ""] + [f"- {name}: {reason}" for name, reason in sorted(missing.items())] + [""]
    lines += _claims([claim for name in names for claim in claims if claim.panel == name])
    lines += _environment(traces)
    path = Path(out) / "summary.md"
    write_atomically(path, "\n".join(lines).encode())
    return path


def _panel(name: str, methods: dict[str, list[RunTrace]]) -> list[str]:
    first = next(iter(methods.values()))[0].config
    note = f"; {first['data_note']}" if first.get("data_note") else ""
    lines = [
        f"## {name}",
        "",
        f"{first['title']}: {first['subtitle']}; batch {first['batch_size']:,}, {first['budget']:,} calls, preset "
        f"{first['preset']}{note}.",
        "",
        "| method | runs | start | final loss (mean ± std) | best | evaluations | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for method, runs in methods.items():
        finals = [run.final_loss for run in runs]
        best = best_loss(runs)
        start = float(runs[0].columns["loss"][0])
        evaluations = np.mean([run.columns["calls"][-1] for run in runs])
        seconds = np.mean([run.columns["seconds"][-1] for run in runs])
        lines.append(
            f"| {method.upper()} | {len(runs)} | {start:.5g} | {np.mean(finals):.5g} ± {np.std(finals):.2g} "
            f"| {best:.5g} | {evaluations:,.0f} | {seconds:.3g} |"
        )
    return [*lines, ""]


def _claims(claims: Sequence[Claim]) -> list[str]:
    if not claims:
        return []
    lines = ["## Claims", "", "| panel | statement | measured | spread | holds |", "|---|---|---|---|---|"]
    for claim in claims:
        verdict = {True: "yes", False: "**no**", None: "?"}[claim.holds]
        lines.append(f"| {claim.panel} | {claim.statement} | {claim.measured} | {claim.spread} | {verdict} |")
    return [*lines, ""]


def _environment(traces: Sequence[RunTrace]) -> list[str]:
    seen = sorted({_machine(trace.environment) for trace in traces})
    return ["## Environment", ""] + [f"- {line}" for line in seen] + [""]


def _machine(environment: dict[str, object]) -> str:
    parts = (f"{key} {environment.get(key, '?')}" for key in ("sanc", "python", "torch", "numpy", "device", "threads"))
    return ", ".join(parts)
