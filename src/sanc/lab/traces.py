"""Read what the laboratory wrote.

A laboratory's folder holds ``runs/<panel>/<method>/seed-<k>/`` with ``config.json``, ``environment.json``,
``trace.jsonl`` and, once the run has finished, ``done.json``. Nothing here runs an optimiser or draws a picture.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sanc import ArgumentError, SancError, errors
from sanc.lab.style import AXES, look, rank

Floats = NDArray[np.float64]

__all__ = ["Floats", "RunTrace", "TraceError", "by_figure", "by_method", "by_panel", "plan_gaps", "read", "skipped"]

REQUIRED = ("iteration", "loss", "paper_calls", "value", "gradient", "product", "seconds")
TEXT = ("branch", "note")


class TraceError(SancError, ValueError):
    """A file of a run cannot be read; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class RunTrace:
    """One run: where it stands, what the runner wrote before the first step and, where it has ended, at the end.

    `columns` is the trace by column: ``branch`` and ``note`` as text, all else as floats with NaN for what is not
    known, and ``calls``, the sum of ``value``, ``gradient`` and ``product``. The first entry is the start (iteration
    −1).
    """

    panel: str
    method: str
    seed: int
    config: dict[str, Any]
    environment: dict[str, Any]
    done: dict[str, Any] | None
    columns: dict[str, NDArray[Any]] = field(repr=False)

    @property
    def figure(self) -> str:
        """Name of the paper's figure that the panel belongs to."""
        return str(self.config.get("figure") or self.panel)

    @property
    def title(self) -> str:
        """Title of the panel."""
        return str(self.config.get("title") or self.panel)

    @property
    def subtitle(self) -> str:
        """Second line of the panel's title."""
        return str(self.config.get("subtitle") or "")

    @property
    def objective(self) -> tuple[str, ...]:
        """What is minimised; runs with the same objective share their f*."""
        return tuple(str(self.config.get(key)) for key in ("problem", "data", "activation", "strength", "n"))

    @property
    def steps(self) -> int:
        """Number of records, the start not counted."""
        return int(np.count_nonzero(self.columns["iteration"] >= 0))

    def known(self, x: str) -> tuple[Floats, Floats]:
        """Return the losses that were measured and where; of several at one place, the last."""
        if x not in self.columns or x in TEXT:
            raise ArgumentError(f"x: there is no column {x!r} to draw over; {errors.nearest(x, AXES)}")
        place, loss = self.columns[x], self.columns["loss"]
        keep = np.isfinite(place) & np.isfinite(loss)
        place, loss = place[keep], loss[keep]
        last = np.append(np.diff(place) > 0, True)[: len(place)]
        return place[last], loss[last]

    @property
    def final_loss(self) -> float:
        """The loss a finished run ended with, or the last that was measured; NaN where there is none."""
        ended = self.done.get("loss") if self.done else None
        if isinstance(ended, int | float):
            return float(ended)
        loss = self.columns["loss"]
        loss = loss[np.isfinite(loss)]
        return float(loss[-1]) if len(loss) else math.nan


def _load(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as problem:
        at = f"{path}, line {problem.lineno}, column {problem.colno}"
        raise TraceError(f"{at}: not JSON ({problem.msg})") from problem
    except UnicodeDecodeError as problem:
        raise TraceError(f"{path}: not UTF-8 ({problem.reason} at byte {problem.start})") from problem
    if not isinstance(value, dict):
        raise TraceError(f"{path}: an object {{…}} is expected, not {type(value).__name__}")
    return value


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a trace; one without an end of line that cannot be read was cut, and is left out."""
    lines = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode("utf-8"))
        except ValueError as problem:
            if number == len(lines):
                break
            what = "UTF-8" if isinstance(problem, UnicodeDecodeError) else "JSON"
            raise TraceError(f"{path}, line {number}: not {what} ({problem})") from problem
        fault = _fault(row)
        if fault:
            raise TraceError(f"{path}, line {number}: {fault}")
        rows.append(row)
    return rows


def _fault(row: Any) -> str:
    """Say what is wrong with a line, if anything."""
    if not isinstance(row, dict):
        return f"an object {{…}} is expected, not {type(row).__name__}"
    for key in REQUIRED:
        if key not in row:
            return f"the key {key!r} is missing"
    for key, value in row.items():
        if value is not None and not isinstance(value, str if key in TEXT else int | float):
            return f"{key!r} is {value!r}, where {'text' if key in TEXT else 'a number or null'} is expected"
    return ""


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    names = dict.fromkeys((*REQUIRED, *TEXT, *(key for row in rows for key in row)))
    columns: dict[str, NDArray[Any]] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name in TEXT:
            columns[name] = np.array([value or "" for value in values], dtype=np.str_)
        else:
            columns[name] = np.array(values, dtype=np.float64)  # None becomes NaN
    columns["calls"] = columns["value"] + columns["gradient"] + columns["product"]
    return columns


def _read_run(folder: Path) -> RunTrace | None:
    config, trace = folder / "config.json", folder / "trace.jsonl"
    done, environment = folder / "done.json", folder / "environment.json"
    begun = trace.exists()  # asked first: a run that begins meanwhile writes its configuration before its trace
    if not config.exists():
        if begun:
            raise TraceError(f"{config}: the file is missing, though there is a trace next to it")
        return None
    return RunTrace(
        panel=folder.parent.parent.name,
        method=folder.parent.name,
        seed=int(folder.name[5:]),
        config=_load(config),
        environment=_load(environment) if environment.exists() else {},
        done=_load(done) if done.exists() else None,
        columns=_columns(_rows(trace) if trace.exists() else []),
    )


def read(out: Path) -> list[RunTrace]:
    """Return all runs below a laboratory's folder, by panel, method (in the order of `METHODS`) and seed.

    A last line that was cut is ignored, and so is a folder in which nothing was written yet. Anything else that
    cannot be read raises `TraceError` with the file and the line.
    """
    folders = [path for path in Path(out).glob("runs/*/*/seed-*") if path.name[5:].isdecimal() and path.is_dir()]
    runs = [run for run in map(_read_run, folders) if run is not None]
    return sorted(runs, key=lambda run: (_natural(run.panel), rank(run.method), run.seed))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort ``fig10`` after ``fig2``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def skipped(out: Path) -> dict[str, str]:
    """Return the panels that the runner left out, with its reasons."""
    path = Path(out) / "skipped.json"
    return {str(panel): str(reason) for panel, reason in _load(path).items()} if path.exists() else {}


def by_panel(runs: Iterable[RunTrace]) -> dict[str, list[RunTrace]]:
    """Group runs by panel."""
    return _grouped(runs, lambda run: run.panel)


def _grouped(runs: Iterable[RunTrace], key: Callable[[RunTrace], str]) -> dict[str, list[RunTrace]]:
    groups: dict[str, list[RunTrace]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def by_method(runs: Iterable[RunTrace]) -> dict[str, list[RunTrace]]:
    """Group runs by method, in the order of `METHODS`."""
    return _grouped(sorted(runs, key=lambda run: rank(run.method)), lambda run: run.method)


def by_figure(runs: Iterable[RunTrace], order: Sequence[str] = ()) -> dict[str, dict[str, list[RunTrace]]]:
    """Group runs by figure, and within it by panel: those that `order` names first, as it has them."""
    groups: dict[str, dict[str, list[RunTrace]]] = {}
    places = {panel: place for place, panel in enumerate(order)}
    for panel, members in sorted(by_panel(runs).items(), key=lambda item: places.get(item[0], len(places))):
        groups.setdefault(members[0].figure, {})[panel] = members
    return dict(sorted(groups.items(), key=lambda item: _natural(item[0])))


def plan_gaps(runs: Sequence[RunTrace], plan: Mapping[str, Mapping[str, int]] | None = None) -> dict[str, list[str]]:
    """Say what is missing, in sentences by panel.

    `plan` says for each panel how many runs each method should have. Without it, a panel is expected to have the
    methods of the other panels of its figure, and each method the seeds that any method of the panel has.
    """
    panels = by_panel(runs)
    gaps: dict[str, list[str]] = {}
    for panel in dict.fromkeys((*panels, *(plan or ()))):
        members = panels.get(panel, [])
        if not members:
            gaps[panel] = ["no run has begun"]
            continue
        present = by_method(members)
        if plan is None:
            seeds = len({run.seed for run in members})
            wanted = {run.method: seeds for run in runs if run.figure == members[0].figure}
        else:
            wanted = dict(plan.get(panel, {}))
        absent = sorted(wanted.keys() - present.keys(), key=rank)
        said = ["no run of " + ", ".join(look(method).name for method in absent)] if absent else []
        for method, own in present.items():
            name, begun = look(method).name, [str(run.seed) for run in own if run.done is None]
            if len(own) < wanted.get(method, 0):
                said.append(f"{name} has {len(own)} of {wanted[method]} runs")
            if begun:
                said.append(f"{name} is not finished for seed{'s' * (len(begun) > 1)} {', '.join(begun)}")
        if said:
            gaps[panel] = said
    return gaps
