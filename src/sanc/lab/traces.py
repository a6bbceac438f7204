"""Read the runs of an output directory, in the order of the paper, and list the missing ones."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sanc import Branch, SancError
from sanc.lab.experiments import FIGURES
from sanc.lab.style import BRANCHES, rank, style_of

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)

_TRACE_COLUMNS = ("iteration", "loss", "paper_calls", "value", "gradient", "product", "seconds")
"""Columns that every line of a trace has."""

_TEXT_COLUMNS = ("branch", "note")
"""Columns with text; all others are numbers."""

_PANEL_ORDER = {
    panel.name: place for place, panel in enumerate(panel for panels in FIGURES.values() for panel in panels)
}
"""Place of each panel in the paper."""


class TraceError(SancError, ValueError):
    """A file of a run cannot be read; the message names the file, the line, the fault and the remedy."""


@dataclass(frozen=True)
class RunTrace:
    """One run, as it was read from its folder.

    Attributes
    ----------
    panel, method : str
        The names of its panel and method.
    seed : int
        Its seed.
    config, environment : dict
        The contents of ``config.json`` and ``environment.json``.
    done : dict or None
        The content of ``done.json``, if the run has ended.
    columns : dict of ndarray
        The trace by column. ``branch`` and ``note`` are text; all other columns are floats, with NaN for missing
        values. ``calls`` is the sum of ``value``, ``gradient`` and ``product``. The first entry is the start, with
        iteration −1.
    """

    panel: str
    method: str
    seed: int
    config: dict[str, Any]
    environment: dict[str, Any]
    done: dict[str, Any] | None
    columns: dict[str, NDArray[Any]] = field(repr=False)

    @property
    def objective(self) -> tuple[str, ...]:
        """The key of the objective; runs with the same key have the same f*."""
        return tuple(
            str(self.config.get(key))
            for key in ("problem", "data", "activation", "strength", "n", "penalty", "standardise", "label")
        )

    @property
    def steps(self) -> int:
        """The number of steps, without the start."""
        return int(np.count_nonzero(self.columns["iteration"] >= 0))

    def measured(self, x: str) -> tuple[Floats, Floats]:
        """Return the measured losses with their positions on an axis; at equal positions, the last loss."""
        position, loss = self.columns[x], self.columns["loss"]
        keep = np.isfinite(position) & np.isfinite(loss)
        position, loss = position[keep], loss[keep]
        last = np.append(np.diff(position) > 0, True)[: len(position)]
        return position[last], loss[last]

    @property
    def final_loss(self) -> float:
        """The final loss of a finished run, or else the last measured loss; NaN if there is none."""
        if self.done and self.done.get("loss") is not None:
            return float(self.done["loss"])
        losses = self.measured("paper_calls")[1]
        return float(losses[-1]) if len(losses) else math.nan


_INTEGER_KEYS = {"seed": int, "batch_size": int, "budget": int}
_TEXT_KEYS = dict.fromkeys(("figure", "panel", "title", "subtitle", "problem", "data", "method", "preset"), str)
_CONFIG_TYPES: dict[str, type] = _TEXT_KEYS | _INTEGER_KEYS | {"options": dict}
"""Types of the entries of a configuration that are read here."""


def _load(path: Path, kinds: Mapping[str, type] | None = None, remedy: str | None = None) -> dict[str, Any]:
    """Return a JSON object whose entries have the types `kinds`, or raise a `TraceError` with the remedy."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{type(content).__name__} instead of an object")
        for name, kind in (kinds or {}).items():
            if not isinstance(content.get(name), kind):
                raise ValueError(f"{name} = {content.get(name)!r:.60} instead of {kind.__name__}")
        return content
    except (OSError, ValueError, RecursionError) as error:
        remedy = remedy or f"Remove {path.parent} to repeat its run."
        raise TraceError(f"{path}: {error}. {remedy}") from error


def _row(raw: bytes) -> dict[str, Any]:
    """Parse a line of a trace; an empty line gives an empty dictionary."""
    row = json.loads(raw or b"{}")
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} instead of an object")
    if raw and (missing := set(_TRACE_COLUMNS).difference(row)):
        raise ValueError(f"without {', '.join(sorted(missing))}")
    for name, value in row.items():
        kinds = (str,) if name in _TEXT_COLUMNS else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise ValueError(f"{name} = {value!r:.60} cannot be read")
        if isinstance(value, int):
            float(value)  # raises OverflowError if it is too large
    if row.get("branch") == "untested":  # the name in version 0.1
        row["branch"] = Branch.AVERAGED.value
    if row.get("branch") not in (None, "", *BRANCHES):
        raise ValueError(f"branch = {row['branch']!r:.60} is unknown")
    return row


def _columns(path: Path, digest: str | None = None) -> dict[str, NDArray[Any]]:
    """Return a trace by column. A last line without a line end that cannot be parsed was truncated, and is ignored."""
    content = path.read_bytes() if path.exists() else b""
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise TraceError(f"{path}: it has changed since its run ended. Remove {path.parent} to repeat the run.")
    lines = content.split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, raw in enumerate(lines, start=1):
        try:
            row = _row(raw)
        except (ValueError, OverflowError, RecursionError) as error:
            if number == len(lines):
                break
            raise TraceError(f"{path}, line {number}: {error}. Remove {path.parent} to repeat its run.") from error
        rows += [row] if row else []
    names = dict.fromkeys((*_TRACE_COLUMNS, *_TEXT_COLUMNS, *(key for row in rows for key in row)))
    columns = {name: np.array([row.get(name) for row in rows], object) for name in names}
    for name, values in columns.items():  # null becomes NaN or an empty text
        columns[name] = (
            np.where(values, values, "").astype(np.str_) if name in _TEXT_COLUMNS else values.astype(np.float64)
        )
    columns["calls"] = columns["value"] + columns["gradient"] + columns["product"]
    return columns


def _read_run(folder: Path) -> RunTrace | None:
    """Return the run in a folder; None if none has begun there."""
    started = (folder / "trace.jsonl").exists()  # checked first: a run writes its configuration before its trace
    if not started and not (folder / "config.json").exists():
        return None
    seed = folder.name.removeprefix("seed-")
    if not seed.isdecimal():
        raise TraceError(f"{folder}: {seed!r} is not the number of a seed. Remove or rename that folder.")
    config = _load(folder / "config.json", _CONFIG_TYPES)
    environment, done = (
        _load(folder / f"{name}.json") if (folder / f"{name}.json").exists() else {} for name in ("environment", "done")
    )
    if done and not isinstance(done.get("loss"), int | float | None):
        raise TraceError(f"{folder / 'done.json'}: loss = {done['loss']!r:.60}. Remove {folder} to repeat its run.")
    columns = _columns(folder / "trace.jsonl", done.get("trace"))
    return RunTrace(
        folder.parent.parent.name, folder.parent.name, int(seed), config, environment, done or None, columns
    )


def read(out: Path) -> list[RunTrace]:
    """Return all runs of an output directory, sorted by panel in the paper's order, by method and by seed.

    A truncated last line of a trace is ignored, and so is an empty folder. Any other file that cannot be read raises a
    `TraceError` with the file and the line.
    """
    runs = [run for folder in Path(out).glob("runs/*/*/seed-*") if (run := _read_run(folder)) is not None]
    return sorted(runs, key=lambda run: (_PANEL_ORDER.get(run.panel, 99), run.panel, rank(run.method), run.seed))


def skipped(out: Path) -> dict[str, str]:
    """Return the panels that were skipped, with the reasons."""
    path = Path(out) / "skipped.json"
    return _load(path, remedy="Remove that file; the next command writes it again.") if path.exists() else {}


def grouped(runs: Iterable[RunTrace], key: Callable[[RunTrace], Key]) -> dict[Key, list[RunTrace]]:
    """Group runs by a key, in the order of their first run."""
    groups: dict[Key, list[RunTrace]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def by_panel(runs: Iterable[RunTrace]) -> dict[str, list[RunTrace]]:
    """Group runs by panel."""
    return grouped(runs, lambda run: run.panel)


def by_method(runs: Iterable[RunTrace]) -> dict[str, list[RunTrace]]:
    """Group runs by method, in the order of `METHOD_STYLES`."""
    return grouped(sorted(runs, key=lambda run: rank(run.method)), lambda run: run.method)


def by_figure(runs: Iterable[RunTrace]) -> dict[str, dict[str, list[RunTrace]]]:
    """Group runs by figure, and within a figure by panel."""
    return {figure: by_panel(group) for figure, group in grouped(runs, lambda run: str(run.config["figure"])).items()}


def gaps(runs: Iterable[RunTrace], plan: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Return, by panel, a sentence on methods with fewer finished runs than were started or planned."""
    panels, unfinished = by_panel(runs), {}
    for panel in dict.fromkeys((*panels, *plan)):
        methods, planned = by_method(panels.get(panel, ())), plan.get(panel, {})
        sentences = []
        for method in sorted({*methods, *planned}, key=rank):
            group = methods.get(method, [])
            expected = max([planned.get(method, 0), *(run.seed + 1 for run in group)])
            finished = sum(run.done is not None for run in group)
            if finished < expected:
                sentences.append(f"{style_of(method).name} has finished {finished} of {expected} runs")
        if sentences:
            unfinished[panel] = "; ".join(sentences)
    return unfinished
