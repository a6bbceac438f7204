"""Read what the laboratory wrote: runs, in the order of the paper, and what is missing among them."""

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
from sanc.lab.style import BRANCHES, look, rank

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)

REQUIRED = ("iteration", "loss", "paper_calls", "value", "gradient", "product", "seconds")
TEXT = ("branch", "note")

_PLACES = {panel.name: place for place, panel in enumerate(panel for panels in FIGURES.values() for panel in panels)}


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
    def objective(self) -> tuple[str, ...]:
        """What is minimised; runs with the same objective share their f*."""
        return tuple(str(self.config.get(key)) for key in ("problem", "data", "activation", "strength", "n"))

    @property
    def steps(self) -> int:
        """Number of records, the start not counted."""
        return int(np.count_nonzero(self.columns["iteration"] >= 0))

    def known(self, x: str) -> tuple[Floats, Floats]:
        """Return the losses that were measured and where; of several at one place, the last."""
        place, loss = self.columns[x], self.columns["loss"]
        keep = np.isfinite(place) & np.isfinite(loss)
        place, loss = place[keep], loss[keep]
        last = np.append(np.diff(place) > 0, True)[: len(place)]
        return place[last], loss[last]

    @property
    def final_loss(self) -> float:
        """The loss a finished run ended with, or the last that was measured; NaN where there is none."""
        if self.done and self.done.get("loss") is not None:
            return float(self.done["loss"])
        losses = self.known("paper_calls")[1]
        return float(losses[-1]) if len(losses) else math.nan


_NUMBERS = {"seed": int, "batch_size": int, "budget": int}
_WORDS = dict.fromkeys(("figure", "panel", "title", "subtitle", "problem", "data", "method", "preset"), str)
_CONFIG: dict[str, type] = _WORDS | _NUMBERS | {"options": dict}


def _load(path: Path, kinds: Mapping[str, type] | None = None, remedy: str | None = None) -> dict[str, Any]:
    """Read a JSON object, the entries of which are of the kinds that are named; else say what to do."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{type(content).__name__} instead of an object")
        for name, kind in (kinds or {}).items():
            if not isinstance(content.get(name), kind):
                raise ValueError(f"{name} = {content.get(name)!r:.60} instead of {kind.__name__}")
        return content
    except (OSError, ValueError, RecursionError) as problem:
        remedy = remedy or f"Remove {path.parent} to make its run again."
        raise TraceError(f"{path}: {problem}. {remedy}") from problem


def _row(raw: bytes) -> dict[str, Any]:
    """Read a line of a trace; an empty one is none."""
    row = json.loads(raw or b"{}")
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} instead of an object")
    if raw and (missing := set(REQUIRED).difference(row)):
        raise ValueError(f"without {', '.join(sorted(missing))}")
    for name, value in row.items():
        kinds = (str,) if name in TEXT else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise ValueError(f"{name} = {value!r:.60} cannot be read")
        if isinstance(value, int):
            float(value)  # or it is too large
    if row.get("branch") == "untested":  # of version 0.2.0
        row["branch"] = Branch.AVERAGED.value
    if row.get("branch") not in (None, "", *BRANCHES):
        raise ValueError(f"branch = {row['branch']!r:.60} is not known")
    return row


def _columns(path: Path, digest: str | None = None) -> dict[str, NDArray[Any]]:
    """Return a trace by column; a last line without its end that cannot be read was cut, and is left out."""
    content = path.read_bytes() if path.exists() else b""
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise TraceError(f"{path}: it has changed since its run ended. Remove {path.parent} to make the run again.")
    lines = content.split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, raw in enumerate(lines, start=1):
        try:
            row = _row(raw)
        except (ValueError, OverflowError, RecursionError) as problem:
            if number == len(lines):
                break
            raise TraceError(
                f"{path}, line {number}: {problem}. Remove {path.parent} to make its run again."
            ) from problem
        rows += [row] if row else []
    names = dict.fromkeys((*REQUIRED, *TEXT, *(key for row in rows for key in row)))
    columns = {name: np.array([row.get(name) for row in rows], object) for name in names}
    for name, values in columns.items():  # null is NaN, or no text
        columns[name] = np.where(values, values, "").astype(np.str_) if name in TEXT else values.astype(np.float64)
    columns["calls"] = columns["value"] + columns["gradient"] + columns["product"]
    return columns


def _read_run(folder: Path) -> RunTrace | None:
    begun = (folder / "trace.jsonl").exists()  # asked first: the configuration is written before the trace
    if not begun and not (folder / "config.json").exists():
        return None
    seed = folder.name.removeprefix("seed-")
    if not seed.isdecimal():
        raise TraceError(f"{folder}: {seed!r} is not the number of a seed. Remove or rename that folder.")
    config = _load(folder / "config.json", _CONFIG)
    environment, done = (
        _load(folder / f"{name}.json") if (folder / f"{name}.json").exists() else {} for name in ("environment", "done")
    )
    if done and not isinstance(done.get("loss"), int | float | None):
        raise TraceError(f"{folder / 'done.json'}: loss = {done['loss']!r:.60}. Remove {folder} to make its run again.")
    columns = _columns(folder / "trace.jsonl", done.get("trace"))
    return RunTrace(
        folder.parent.parent.name, folder.parent.name, int(seed), config, environment, done or None, columns
    )


def read(out: Path) -> list[RunTrace]:
    """Return all runs below a laboratory's folder: panels in the paper's order, methods in that of `METHODS`, seeds.

    A last line that was cut is ignored, and so is a folder in which nothing was written yet. Anything else that
    cannot be read raises `TraceError` with the file and the line.
    """
    runs = [run for folder in Path(out).glob("runs/*/*/seed-*") if (run := _read_run(folder)) is not None]
    return sorted(runs, key=lambda run: (_PLACES.get(run.panel, 99), run.panel, rank(run.method), run.seed))


def skipped(out: Path) -> dict[str, str]:
    """Return the panels that the runner left out, with its reasons."""
    path = Path(out) / "skipped.json"
    return _load(path, remedy="Remove that file; a run writes it again.") if path.exists() else {}


def grouped(runs: Iterable[RunTrace], key: Callable[[RunTrace], Key]) -> dict[Key, list[RunTrace]]:
    """Group runs, in the order in which they come."""
    groups: dict[Key, list[RunTrace]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def by_panel(runs: Iterable[RunTrace]) -> dict[str, list[RunTrace]]:
    """Group runs by panel."""
    return grouped(runs, lambda run: run.panel)


def by_method(runs: Iterable[RunTrace]) -> dict[str, list[RunTrace]]:
    """Group runs by method, in the order of `METHODS`."""
    return grouped(sorted(runs, key=lambda run: rank(run.method)), lambda run: run.method)


def by_figure(runs: Iterable[RunTrace]) -> dict[str, dict[str, list[RunTrace]]]:
    """Group runs by figure, and within it by panel."""
    return {figure: by_panel(own) for figure, own in grouped(runs, lambda run: str(run.config["figure"])).items()}


def gaps(runs: Iterable[RunTrace], plan: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Say of every panel which methods have finished fewer runs than have begun, or than `plan` wants of them."""
    panels, said = by_panel(runs), {}
    for panel in dict.fromkeys((*panels, *plan)):
        methods, wanted = by_method(panels.get(panel, ())), plan.get(panel, {})
        sentences = []
        for method in sorted({*methods, *wanted}, key=rank):
            own = methods.get(method, [])
            expected = max([wanted.get(method, 0), *(run.seed + 1 for run in own)])
            finished = sum(run.done is not None for run in own)
            if finished < expected:
                sentences.append(f"{look(method).name} has finished {finished} of {expected} runs")
        if sentences:
            said[panel] = "; ".join(sentences)
    return said
