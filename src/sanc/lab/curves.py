"""Compute what figures and tables show of the runs: mean curves, f*, and fractions and decreases of the branches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

from sanc import Branch
from sanc.lab.style import AXES, BRANCHES
from sanc.lab.traces import Floats, RunTrace, by_method, grouped

Curve: TypeAlias = tuple[Floats, Floats, Floats, Floats]

MARGIN = 0.05
"""Distance of f* below the best loss, as a fraction of the distance from the best to the median final loss. The median
then is 21 times as far above f* as the best, which is 1.3 decades of the axis."""

MIN_MARGIN, MAX_MARGIN = 1e-5, 1e-2
"""Bounds on that distance, as fractions of the decrease from the start to the best loss: at most five decades are
drawn, and f* is not visibly below the best loss."""

_LOG_AXIS_RATIO = 30
"""First over least mean loss from which the axis is logarithmic: one and a half decades."""

_SMOOTHING_WIDTH = 0.025
"""Standard deviation of the Gaussian that smooths the fractions of the branches, as a fraction of the range."""


def best_loss(runs: Iterable[RunTrace]) -> float:
    """Return the least measured loss of all runs; NaN if none was measured."""
    losses = [loss[np.isfinite(loss)] for loss in (run.columns["loss"] for run in runs)]
    return min((float(loss.min()) for loss in losses if len(loss)), default=math.nan)


def f_star(runs: Sequence[RunTrace]) -> float:
    """Return the f* that a logarithmic axis subtracts from the loss, for runs with the same objective.

    f* is slightly below the best loss, so that log(f − f*) is finite and the differences between final losses are
    visible. The distance is `MARGIN` times that from the best to the median final loss, and between `MIN_MARGIN` and
    `MAX_MARGIN` times the decrease.
    """
    best = best_loss(runs)
    if math.isnan(best):
        return best
    decrease = max(losses[0] for losses in (run.measured("paper_calls")[1] for run in runs) if len(losses)) - best
    decrease = decrease if decrease > 0 else max(abs(best), 1.0)
    distance = float(np.nanmedian([run.final_loss for run in runs])) - best
    return best - min(max(MARGIN * distance, MIN_MARGIN * decrease), MAX_MARGIN * decrease)


def f_stars(runs: Iterable[RunTrace]) -> dict[tuple[str, ...], float]:
    """Return f* of every objective, from the runs of all panels."""
    return {objective: f_star(group) for objective, group in grouped(runs, lambda run: run.objective).items()}


@dataclass(frozen=True)
class MethodResult:
    """The results of a method over its finished runs, or over all if none finished.

    Attributes
    ----------
    method : str
        The name of the method.
    runs, finished : int
        The numbers of all runs and of finished ones.
    start : float
        The loss at the start.
    mean, deviation : float
        Mean and standard deviation of the final loss.
    best : float
        The smallest loss of all runs.
    ends : dict of float
        The mean costs at the end, by axis.
    steps : float
        The mean number of steps.
    """

    method: str
    runs: int
    finished: int
    start: float
    mean: float
    deviation: float
    best: float
    ends: dict[str, float]
    steps: float

    @property
    def counted(self) -> str:
        """The number of runs, with the number of finished ones if that is smaller."""
        return str(self.runs) if self.finished == self.runs else f"{self.finished} of {self.runs}"

    @property
    def final(self) -> tuple[str, str]:
        """The mean final loss as text, and "± deviation" or an empty text, for page, summary and terminal."""
        return number(self.mean, 5), f"± {number(self.deviation, 2)}" if math.isfinite(self.deviation) else ""


def number(value: float, digits: int = 4) -> str:
    """Format a number: no digits after the point from 1000 on, and a dash if it is not finite."""
    if not math.isfinite(value):
        return "–"
    whole = abs(value) >= 1000 or (value == round(value) and abs(value) < 1000)
    return (f"{value:,.0f}" if whole else f"{value:.{digits}g}").replace("-", "−")


def results(runs: Sequence[RunTrace]) -> list[MethodResult]:
    """Return the result of each method, from runs that made a step."""
    method_results = []
    for method, group in by_method(run for run in runs if run.steps).items():
        done = [run for run in group if run.done is not None]
        finals = [run.final_loss for run in done or group]
        finals = [loss for loss in finals if math.isfinite(loss)] or [math.nan]
        deviation = float(np.std(finals, ddof=1)) if len(finals) > 1 else math.nan
        ends = {x: float(np.mean([run.columns[x][-1] for run in done or group])) for x in AXES}
        steps = float(np.mean([run.steps for run in done or group]))
        start, mean = float(group[0].columns["loss"][0]), float(np.mean(finals))
        losses = (start, mean, deviation, best_loss(group))
        method_results.append(MethodResult(method, len(group), len(done), *losses, ends, steps))
    return method_results


def run_counts(panels: Collection[Sequence[RunTrace]]) -> str:
    """Return a caption with the number of runs that a figure shows."""
    counts = sorted({len(group) for runs in panels for group in by_method(runs).values()})
    number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    caption = "one run of each method" if counts == [1] else f"mean of {number} runs ± one standard deviation"
    unfinished = sum(run.done is None for runs in panels for run in runs)
    return caption + (f"; {unfinished} of {sum(map(len, panels))} runs not finished" if unfinished else "")


def mean_curve(runs: Sequence[RunTrace], x: str = "paper_calls", grid: int = 200) -> Curve:
    """Return the mean loss of several runs of one method on a common grid, with a band: x, mean, low and high.

    Beyond its end a finished run has its last loss. An unfinished run, or one that ended without a finite loss, enters
    the mean up to its last step only. The band is the mean ± one sample standard deviation, clipped to the range of the
    runs. All four arrays are empty if no loss was measured.
    """
    curves = [(run, *run.measured(x)) for run in runs]
    curves = [curve for curve in curves if len(curve[1])]
    if not curves:
        return (np.empty(0),) * 4
    at = np.linspace(0.0, max(place[-1] for _, place, _ in curves), grid)
    rest = [float(loss[-1]) if run.done and run.done.get("loss") is not None else math.nan for run, _, loss in curves]
    rows = [np.interp(at, place, loss, math.nan, end) for (_, place, loss), end in zip(curves, rest, strict=True)]
    values = np.ma.masked_invalid(rows)
    mean = values.mean(axis=0)
    deviation = np.sqrt(((values - mean) ** 2).sum(axis=0) / np.maximum(values.count(axis=0) - 1, 1))
    low, high = np.maximum(mean - deviation, values.min(axis=0)), np.minimum(mean + deviation, values.max(axis=0))
    return at, *(np.ma.filled(part, math.nan) for part in (mean, low, high))  # type: ignore[return-value]


def _pooled(runs: Sequence[RunTrace], x: str, column: str) -> tuple[Floats, NDArray[Any]]:
    """Return the positions of the steps of all runs on an axis, and the values of a column."""
    places = [run.columns[x][1:] for run in runs]
    values = [run.columns[column][1:] if column in run.columns else np.full(run.steps, math.nan) for run in runs]
    return np.concatenate([np.empty(0), *places]), np.concatenate(values or [np.empty(0)])


def bounds(curves: Iterable[Curve], star: float, log: bool) -> tuple[float, float]:
    """Return the bounds of an axis of f − `star`. A curve that rises far above the start is clipped at the top."""
    drawn = [curve for curve in curves if len(curve[0])]
    start = max(float(mean[0]) for _, mean, _, _ in drawn) - star
    least, floor = (min(float(np.nanmin(curve[k])) for curve in drawn) - star for k in (2, 1))
    most = max(float(np.nanmax(high)) for _, _, _, high in drawn) - star
    if log:  # a band is clipped at half the least mean
        bottom = max(least, floor / 2, 1e-12 * max(start, 1e-300))
        return bottom / 1.25, max(min(most, 3.0 * start), 2.0 * bottom) * 1.25
    span = max(start - least, 1e-9 * max(abs(start), 1.0))
    return least - 0.05 * span, min(most, start + 0.25 * span) + 0.05 * span


def falls_over_decades(curves: Iterable[Curve]) -> bool:
    """Return whether a mean loss falls so far that a linear axis would show little but its first steps."""
    drawn = [mean[np.isfinite(mean)] for _, mean, _, _ in curves]
    return any(len(mean) > 0 and 0 < mean.min() <= mean[0] / _LOG_AXIS_RATIO for mean in drawn) and all(
        len(mean) == 0 or mean.min() > 0 for mean in drawn
    )


def mix(runs: Sequence[RunTrace], x: str = "paper_calls", points: int = 60) -> tuple[Floats, dict[str, Floats]]:
    """Return the smoothed fractions of the branches as functions of x, over the steps of all runs.

    Branches without a step are omitted; if no step has a branch, the dictionary is empty.
    """
    places, kinds = _pooled(runs, x, "branch")
    end = float(places.max()) if len(places) else 0.0
    at = np.linspace(0.0, end, points)
    present = [branch for branch in BRANCHES if np.any(kinds == branch)]
    if not present or not end > 0:
        return at, {}
    cell = np.rint(places / end * (points - 1)).astype(np.int64)
    counts = np.array([np.bincount(cell[kinds == branch], minlength=points) for branch in present], dtype=np.float64)
    smooth = gaussian_filter1d(counts, _SMOOTHING_WIDTH * points, mode="nearest", truncate=30.0) + 1e-300
    return at, dict(zip(present, smooth / smooth.sum(axis=0), strict=True))


def decrease_by_branch(runs: Sequence[RunTrace]) -> dict[str, tuple[int, float]]:
    """Return, by branch, the number of steps and the decrease of the loss in them, over all runs.

    A decrease between two measurements of the loss is divided evenly among the steps between them that moved.
    """
    steps: Counter[str] = Counter()
    decreases = dict.fromkeys(("", *BRANCHES), 0.0)
    for run in runs:
        kinds, loss = run.columns["branch"][1:].tolist(), run.columns["loss"]
        steps.update(kinds)
        for begin, end in pairwise(np.flatnonzero(np.isfinite(loss))):
            between = kinds[begin:end]
            moved = [kind for kind in between if kind != Branch.STAYED.value] or between
            for kind in moved:
                decreases[kind] += float(loss[begin] - loss[end]) / len(moved)
    return {branch: (steps[branch], decreases[branch]) for branch in BRANCHES if steps[branch]}


def quantiles(runs: Sequence[RunTrace], column: str, x: str = "paper_calls", cells: int = 50) -> Curve:
    """Return x, the median, and the 10 % and 90 % quantiles of a column in each cell of `x`, over all runs.

    Cells without a finite value are omitted. So are the norms of steps that did not move, which are zero.
    """
    places, values = _pooled(runs, x, column)
    keep = np.isfinite(places) & np.isfinite(values) & ((values > 0) | (column != "step_norm"))
    if not keep.any():
        return (np.empty(0),) * 4
    end = float(places[np.isfinite(places)].max()) or 1.0
    places, values = places[keep], values[keep]
    cell = np.minimum((places / end * cells).astype(np.int64), cells - 1)
    masks = [cell == k for k in np.unique(cell)]
    low, middle, high = np.array([np.quantile(values[mask], (0.1, 0.5, 0.9)) for mask in masks]).T
    return np.array([places[mask].mean() for mask in masks]), middle, low, high
