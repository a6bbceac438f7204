"""Read what the laboratory wrote, and boil it down to curves and shares.

A laboratory's folder holds ``runs/<panel>/<method>/seed-<k>/`` with ``config.json``, ``environment.json``,
``trace.jsonl`` and, once the run has finished, ``done.json``. Nothing here runs an optimiser or draws a picture.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sanc.errors import ArgumentError, SancError, nearest
from sanc.record import Branch

__all__ = ["AXES", "BRANCHES", "METHODS", "RunTrace", "TraceError", "best_loss", "by_figure", "by_method", "by_panel",
           "earnings", "f_star", "f_stars", "look", "mean_curve", "mix", "plan_gaps", "quantiles",
           "read", "skipped"]  # fmt: skip

Floats = NDArray[np.float64]

AXES: dict[str, str] = {
    "paper_calls": "calls, as the paper counts them",
    "calls": "evaluations of values, gradients and products",
    "seconds": "seconds",
}
"""What a loss is drawn over: the column and its name in words."""

BRANCHES: dict[str, str] = {
    Branch.VERY_SUCCESSFUL.value: "#1B4F8A",
    Branch.SUCCESSFUL.value: "#7FB2DD",
    Branch.UNTESTED.value: "#B9A7CF",
    Branch.CURVATURE.value: "#C8401B",
    Branch.GRADIENT.value: "#F2B84B",
    Branch.STAYED.value: "#D3D3D0",
}
"""Branches in the order of every table and picture, with their colours."""

REQUIRED = ("iteration", "loss", "paper_calls", "value", "gradient", "product", "seconds")
TEXT = ("branch", "note")
MARGIN = 0.05
"""How far f* lies below the best loss, as a share of how far the median of the final losses lies above it …"""

LEAST_MARGIN, MOST_MARGIN = 1e-5, 1e-2
"""… within these shares of the decrease from the start to the best loss."""


class TraceError(SancError, ValueError):
    """A file of a run cannot be read; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Look:
    """How a method appears in every picture.

    Attributes
    ----------
    name : str
        What it is called.
    colour, dark : str
        Colour of its line on white and on a dark ground; told apart by the colour-blind.
    dashes : tuple of float
        Pattern of its line, in line widths; empty for a line without gaps.
    """

    name: str
    colour: str
    dark: str
    dashes: tuple[float, ...] = ()


METHODS: dict[str, Look] = {
    "sanc": Look("SANC", "#C8401B", "#FF7A50"),
    "scr": Look("SCR", "#0B63A5", "#5AA9F0"),
    "cr": Look("CR", "#4FB0E3", "#A5DCFA"),
    "crm": Look("CRM", "#C28A00", "#F0C04A", (4.0, 1.4)),
    "ncd": Look("NCD", "#0A9272", "#1FB890", (6.0, 1.4, 1.4, 1.4)),
    "sgd": Look("SGD", "#8A8A86", "#C2C2BC", (1.2, 1.4)),
    "adam": Look("Adam", "#B5679A", "#E39AC9", (2.5, 1.2)),
}
"""The methods in the order of every table and picture."""

_OTHERS = (("#5B4A9E", "#A99BF0"), ("#7A5C3A", "#C9A67C"), ("#4D7A1E", "#9CCB62"), ("#444444", "#DDDDDD"))


def look(method: str) -> Look:
    """Return how a method appears; one that is not of the paper gets a colour that depends on its name alone."""
    if method in METHODS:
        return METHODS[method]
    colour, dark = _OTHERS[sum(method.encode()) % len(_OTHERS)]
    return Look(method, colour, dark, (3.0, 1.0, 1.0, 1.0, 1.0, 1.0))


def _rank(method: str) -> tuple[int, str]:
    return (list(METHODS).index(method) if method in METHODS else len(METHODS), method)


# ---------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class RunTrace:
    """One run.

    Attributes
    ----------
    panel, method, seed
        Where the run stands, as its folders say.
    config, environment : dict
        What the runner wrote before the first step.
    done : dict or None
        What the runner wrote at the end; None for a run that is under way or was interrupted.
    columns : dict of arrays
        The trace by column: ``branch`` and ``note`` as text, all else as floats with NaN for what is not known, and
        ``calls``, the sum of ``value``, ``gradient`` and ``product``. The first entry is the start (iteration −1).
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
            raise ArgumentError(f"x: there is no column {x!r} to draw over; {nearest(x, AXES)}")
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


def _object(path: Path, text: str, line: int | None = None) -> dict[str, Any]:
    where = f"{path}" if line is None else f"{path}, line {line}"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        at = f"{path}, line {problem.lineno if line is None else line}, column {problem.colno}"
        raise TraceError(f"{at}: not JSON ({problem.msg})") from problem
    if not isinstance(value, dict):
        raise TraceError(f"{where}: an object {{…}} is expected, not {type(value).__name__}")
    return value


def _load(path: Path) -> dict[str, Any]:
    try:
        return _object(path, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as problem:
        raise TraceError(f"{path}: not UTF-8 ({problem.reason} at byte {problem.start})") from problem


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a trace; one without an end of line that cannot be read was cut, and is left out."""
    lines = path.read_bytes().split(b"\n")
    written = [line for line in lines if line.strip()]
    try:  # all at once, which is several times faster than line by line
        rows = json.loads(b"[" + b",".join(written) + b"]")
    except ValueError:
        return _rows_one_by_one(path, lines)
    if len(rows) != len(written) or not _plain(rows):
        return _rows_one_by_one(path, lines)
    return rows  # type: ignore[no-any-return]


def _plain(rows: list[Any]) -> bool:
    """Whether every row is an object with the keys and types of a trace."""
    if not set(map(type, rows)) <= {dict}:
        return False
    keys = set().union(*rows) if rows else set()
    number, text = {int, float, bool, type(None)}, {str, type(None)}
    return all(key in row for row in rows for key in REQUIRED) and all(
        {type(row.get(key)) for row in rows} <= (text if key in TEXT else number) for key in keys
    )


def _rows_one_by_one(path: Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the rows of a trace with a fault in it, or say where the fault is."""
    rows: list[dict[str, Any]] = []
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            row = _object(path, raw.decode("utf-8"), number)
        except (TraceError, UnicodeDecodeError) as problem:
            if number == len(lines):
                break
            if isinstance(problem, UnicodeDecodeError):
                raise TraceError(f"{path}, line {number}: not UTF-8 ({problem.reason})") from problem
            raise
        for key in REQUIRED:
            if key not in row:
                raise TraceError(f"{path}, line {number}: the key {key!r} is missing")
        for key, value in row.items():
            wanted = str if key in TEXT else (int, float)
            if value is not None and not isinstance(value, wanted):
                kind = "text" if key in TEXT else "a number or null"
                raise TraceError(f"{path}, line {number}: {key!r} is {value!r}, where {kind} is expected")
        rows.append(row)
    return rows


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


def _read_run(folder: Path, seed: int) -> RunTrace | None:
    config, trace, done, environment = (
        folder / name for name in ("config.json", "trace.jsonl", "done.json", "environment.json")
    )
    begun = trace.exists()  # asked first: a run that begins meanwhile writes its configuration before its trace
    if not config.exists():
        if begun:
            raise TraceError(f"{config}: the file is missing, though there is a trace next to it")
        return None
    return RunTrace(
        panel=folder.parent.parent.name,
        method=folder.parent.name,
        seed=seed,
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
    runs: list[RunTrace] = []
    for folder in Path(out).glob("runs/*/*/seed-*"):
        match = re.fullmatch(r"seed-(\d+)", folder.name)
        if match and folder.is_dir():
            run = _read_run(folder, int(match[1]))
            if run is not None:
                runs.append(run)
    return sorted(runs, key=lambda run: (_natural(run.panel), _rank(run.method), run.seed))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort ``fig10`` after ``fig2``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def skipped(out: Path) -> dict[str, str]:
    """Return the panels that the runner left out, with its reasons."""
    path = Path(out) / "skipped.json"
    return {str(panel): str(reason) for panel, reason in _load(path).items()} if path.exists() else {}


def by_panel(runs: Iterable[RunTrace]) -> dict[str, list[RunTrace]]:
    """Group runs by panel."""
    groups: dict[str, list[RunTrace]] = {}
    for run in runs:
        groups.setdefault(run.panel, []).append(run)
    return groups


def by_method(runs: Iterable[RunTrace]) -> dict[str, list[RunTrace]]:
    """Group runs by method, in the order of `METHODS`."""
    groups: dict[str, list[RunTrace]] = {}
    for run in sorted(runs, key=lambda run: _rank(run.method)):
        groups.setdefault(run.method, []).append(run)
    return groups


def by_figure(runs: Iterable[RunTrace], order: Sequence[str] = ()) -> dict[str, dict[str, list[RunTrace]]]:
    """Group runs by figure, and within it by panel: those that `order` names first, as it has them."""
    groups: dict[str, dict[str, list[RunTrace]]] = {}
    ranks = {panel: rank for rank, panel in enumerate(order)}
    for panel, members in sorted(by_panel(runs).items(), key=lambda item: ranks.get(item[0], len(ranks))):
        groups.setdefault(members[0].figure, {})[panel] = members
    return dict(sorted(groups.items(), key=lambda item: _natural(item[0])))


def plan_gaps(runs: Sequence[RunTrace], plan: Mapping[str, Mapping[str, int]] | None = None) -> dict[str, list[str]]:
    """Say what is missing, by panel.

    Parameters
    ----------
    runs : sequence of RunTrace
        All runs.
    plan : mapping, optional
        For each panel, how many runs each method should have. Without it, a panel is expected to have the methods of
        the other panels of its figure, and each method the seeds that any method of the panel has.

    Returns
    -------
    dict
        For each panel with a gap, sentences that say which.
    """
    panels = by_panel(runs)
    gaps: dict[str, list[str]] = {}
    for panel in dict.fromkeys((*panels, *(plan or ()))):
        members = panels.get(panel, [])
        said: list[str] = []
        if not members:
            said.append("no run has begun")
        else:
            present = by_method(members)
            if plan is None:
                figure = members[0].figure
                wanted = {run.method: 0 for run in runs if run.figure == figure}
            else:
                wanted = dict(plan.get(panel, {}))
            absent = sorted(wanted.keys() - present.keys(), key=_rank)
            if absent:
                said.append("no run of " + ", ".join(look(method).name for method in absent))
            seeds = {run.seed for run in members}
            for method, own in present.items():
                count = wanted.get(method, 0) if plan is not None else len(seeds)
                if len(own) < count:
                    said.append(f"{look(method).name} has {len(own)} of {count} runs")
                open_ = [str(run.seed) for run in own if run.done is None]
                if open_:
                    word = "seed" if len(open_) == 1 else "seeds"
                    said.append(f"{look(method).name} is not finished for {word} {', '.join(open_)}")
        if said:
            gaps[panel] = said
    return gaps


# ---------------------------------------------------------------------------------------------- losses


def best_loss(runs: Iterable[RunTrace]) -> float:
    """Return the least loss that was measured in any run; NaN where there is none."""
    losses = [loss[np.isfinite(loss)] for loss in (run.columns["loss"] for run in runs)]
    return min((float(loss.min()) for loss in losses if len(loss)), default=math.nan)


def f_star(runs: Sequence[RunTrace]) -> float:
    """Return what is taken from the loss on a logarithmic axis, for runs with the same objective.

    It is ``config["f_star"]`` where a run gives it and no loss fell below. Otherwise it lies a little below the best
    loss, so that the best run does not plunge to −∞ and the differences between the ends of the runs fill the axis:
    by `MARGIN` of the distance from the best to the median of the final losses, within `LEAST_MARGIN` and
    `MOST_MARGIN` of the decrease.
    """
    best = best_loss(runs)
    given = [float(run.config["f_star"]) for run in runs if run.config.get("f_star") is not None]
    if given and not min(given) >= best:
        return min(given)
    starts = [losses[0] for losses in (run.known("paper_calls")[1] for run in runs) if len(losses)]
    fall = max(starts, default=math.nan) - best
    if not fall > 0:
        fall = max(abs(best), 1.0)
    ends = [loss for loss in (run.final_loss for run in runs) if math.isfinite(loss)]
    above = float(np.median(ends)) - best if ends else 0.0
    return best - min(max(MARGIN * above, LEAST_MARGIN * fall), MOST_MARGIN * fall)


def f_stars(runs: Iterable[RunTrace]) -> dict[tuple[str, ...], float]:
    """Return f* of every objective, found over all panels together."""
    groups: dict[tuple[str, ...], list[RunTrace]] = {}
    for run in runs:
        groups.setdefault(run.objective, []).append(run)
    return {objective: f_star(members) for objective, members in groups.items()}


def _ends_well(run: RunTrace) -> bool:
    """Whether the last loss is what the run handed back, and may stand for what came after its end."""
    if run.done is None:
        return False
    loss = run.done.get("loss", 0.0)
    return isinstance(loss, (int, float)) and math.isfinite(loss)


def mean_curve(
    runs: Sequence[RunTrace], x: str = "paper_calls", grid: int = 200
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the mean loss of several runs on a common grid, with a band.

    Parameters
    ----------
    runs : sequence of RunTrace
        Runs of one method in one panel.
    x : str
        Column to draw over: ``paper_calls``, ``calls`` or ``seconds``.
    grid : int
        Number of points, from 0 to the place of the last loss of any run.

    Returns
    -------
    x, mean, low, high : arrays
        Losses are interpolated linearly between the places where they were measured. A run that finished before the
        end of the grid keeps its last loss; one that is under way, was interrupted or broke off without a finite
        loss counts as far as it went. The band is the mean ± one standard deviation (of a sample), cut to the range
        of the runs, so that on a logarithmic axis it never falls below a loss that was seen. All four are empty if
        no loss is known.
    """
    curves = [(run, *run.known(x)) for run in runs]
    curves = [curve for curve in curves if len(curve[1])]
    if not curves:
        empty = np.empty(0)
        return empty, empty, empty, empty
    at = np.linspace(0.0, max(place[-1] for _, place, _ in curves), grid)
    values = np.array(
        [
            np.interp(at, place, loss, left=math.nan, right=float(loss[-1]) if _ends_well(run) else math.nan)
            for run, place, loss in curves
        ]
    )
    count = np.isfinite(values).sum(axis=0)
    filled = np.where(np.isfinite(values), values, 0.0)
    mean = np.where(count > 0, filled.sum(axis=0) / np.maximum(count, 1), math.nan)
    square = np.where(np.isfinite(values), (values - mean) ** 2, 0.0).sum(axis=0)
    deviation = np.sqrt(square / np.maximum(count - 1, 1))
    known = np.isfinite(values)
    least = np.where(known, values, math.inf).min(axis=0)
    most = np.where(known, values, -math.inf).max(axis=0)
    low = np.where(count > 0, np.maximum(mean - deviation, least), math.nan)
    high = np.where(count > 0, np.minimum(mean + deviation, most), math.nan)
    return at, mean, low, high


# ---------------------------------------------------------------------------------------------- steps


def _pooled(runs: Sequence[RunTrace], x: str, column: str) -> tuple[Floats, NDArray[Any]]:
    steps = [run.columns["iteration"] >= 0 for run in runs]
    if not runs:
        return np.empty(0), np.empty(0)
    places = np.concatenate([run.columns[x][keep] for run, keep in zip(runs, steps, strict=True)])
    missing = np.array([math.nan])
    values = np.concatenate(
        [
            run.columns[column][keep] if column in run.columns else np.repeat(missing, keep.sum())
            for run, keep in zip(runs, steps, strict=True)
        ]
    )
    return places, values


def mix(runs: Sequence[RunTrace], x: str = "paper_calls", points: int = 60) -> tuple[Floats, dict[str, Floats]]:
    """Return the shares of the branches over a run, smoothed by a Gaussian of 2.5 % of the range, all runs pooled.

    Branches that no run took are left out; without any branch the dictionary is empty.
    """
    places, kinds = _pooled(runs, x, "branch")
    end = float(places.max()) if len(places) else 0.0
    at = np.linspace(0.0, end, points)
    present = [branch for branch in BRANCHES if np.any(kinds == branch)]
    if not present or not end > 0:
        return at, {}
    cell = np.rint(places / end * (points - 1)).astype(np.int64)
    counts = np.array([np.bincount(cell[kinds == branch], minlength=points) for branch in present], dtype=np.float64)
    used = counts.sum(axis=0) > 0
    logs = -0.5 * ((at[:, None] - at[None, used]) / (0.025 * end)) ** 2
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    smooth = counts[:, used] @ weights.T
    smooth /= smooth.sum(axis=0)
    return at, dict(zip(present, smooth, strict=True))


def earnings(runs: Sequence[RunTrace]) -> dict[str, tuple[int, float]]:
    """Return, by branch, the number of steps and the decrease of the loss that they earned, over all runs.

    Where the loss was not measured at every step, a decrease is split evenly over the steps since the last
    measurement that moved.
    """
    steps = dict.fromkeys(BRANCHES, 0)
    earned = dict.fromkeys(BRANCHES, 0.0)
    for run in runs:
        kinds, loss = run.columns["branch"], run.columns["loss"]
        known = np.flatnonzero(np.isfinite(loss))
        for branch in BRANCHES:
            steps[branch] += int(np.count_nonzero(kinds == branch))
        if len(known) < 2:
            continue
        index = np.arange(known[0] + 1, known[-1] + 1)
        segment = np.searchsorted(known, index) - 1  # the step at known[k] + 1 … known[k + 1] belongs to segment k
        drops = -np.diff(loss[known])
        own = kinds[index]
        moved = (own != Branch.STAYED.value) & (own != "")
        movers = np.bincount(segment[moved], minlength=len(drops))
        everyone = np.bincount(segment, minlength=len(drops))
        share = np.where(
            movers[segment] > 0, moved / np.maximum(movers[segment], 1), 1.0 / np.maximum(everyone[segment], 1)
        )
        gain = share * drops[segment]
        for branch in BRANCHES:
            earned[branch] += float(gain[own == branch].sum())
    return {branch: (steps[branch], earned[branch]) for branch in BRANCHES if steps[branch]}


def quantiles(
    runs: Sequence[RunTrace], column: str, x: str = "paper_calls", cells: int = 50
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the median, the 10 % and the 90 % quantile of a column over cells of `x`, all runs pooled.

    Returns
    -------
    x, median, low, high : arrays
        Cells without a finite value are left out.
    """
    places, values = _pooled(runs, x, column)
    keep = np.isfinite(places) & np.isfinite(values) if len(places) else np.zeros(0, dtype=bool)
    if not keep.any():
        empty = np.empty(0)
        return empty, empty, empty, empty
    end = float(places[np.isfinite(places)].max()) or 1.0
    places, values = places[keep], values[keep]
    cell = np.minimum((places / end * cells).astype(np.int64), cells - 1)
    rows = []
    for k in np.unique(cell):
        own = cell == k
        low, middle, high = np.quantile(values[own], (0.1, 0.5, 0.9))
        rows.append((float(places[own].mean()), middle, low, high))
    table = np.array(rows, dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]
