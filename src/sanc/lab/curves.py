"""Boil runs down to what is drawn: mean curves, f*, shares of the branches and what they earned."""

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
"""How far f* lies below the best loss, as a share of how far the median of the final losses lies above it …"""

LEAST_MARGIN, MOST_MARGIN = 1e-5, 1e-2
"""… within these shares of the decrease from the start to the best loss."""


def best_loss(runs: Iterable[RunTrace]) -> float:
    """Return the least loss that was measured in any run; NaN where there is none."""
    losses = [loss[np.isfinite(loss)] for loss in (run.columns["loss"] for run in runs)]
    return min((float(loss.min()) for loss in losses if len(loss)), default=math.nan)


def f_star(runs: Sequence[RunTrace]) -> float:
    """Return what is taken from the loss on a logarithmic axis, for runs with the same objective.

    It lies a little below the best loss, so that the best run does not plunge to −∞ and the differences between the
    ends of the runs fill the axis: by `MARGIN` of the distance from the best to the median of the final losses, within
    `LEAST_MARGIN` and `MOST_MARGIN` of the decrease.
    """
    best = best_loss(runs)
    if math.isnan(best):
        return best
    fall = max(losses[0] for losses in (run.known("paper_calls")[1] for run in runs) if len(losses)) - best
    fall = fall if fall > 0 else max(abs(best), 1.0)
    above = float(np.nanmedian([run.final_loss for run in runs])) - best
    return best - min(max(MARGIN * above, LEAST_MARGIN * fall), MOST_MARGIN * fall)


def f_stars(runs: Iterable[RunTrace]) -> dict[tuple[str, ...], float]:
    """Return f* of every objective, found over all panels together."""
    return {objective: f_star(own) for objective, own in grouped(runs, lambda run: run.objective).items()}


@dataclass(frozen=True)
class Result:
    """What the runs of a method came to: the mean final loss of those that finished, if any did, and its deviation.

    `ends` are the means of what they spent, by axis.
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
        """How many runs there are, and how many of them the final loss is the mean of."""
        return str(self.runs) if self.finished == self.runs else f"{self.finished} of {self.runs}"

    @property
    def final(self) -> tuple[str, str]:
        """The mean final loss in words, and "± deviation" or nothing: the same on the page and in the summary."""
        return number(self.mean, 5), f"± {number(self.deviation, 2)}" if math.isfinite(self.deviation) else ""


def number(value: float, digits: int = 4) -> str:
    """Write a number as a person would: no digits after the point from 1000 on, and a dash for what is not finite."""
    if not math.isfinite(value):
        return "–"
    whole = abs(value) >= 1000 or (value == round(value) and abs(value) < 1000)
    return (f"{value:,.0f}" if whole else f"{value:.{digits}g}").replace("-", "−")


def results(runs: Sequence[RunTrace]) -> list[Result]:
    """Return what each method came to, for runs that have made a step."""
    found = []
    for method, own in by_method(run for run in runs if run.steps).items():
        done = [run for run in own if run.done is not None]
        finals = [run.final_loss for run in done or own]
        finals = [loss for loss in finals if math.isfinite(loss)] or [math.nan]
        deviation = float(np.std(finals, ddof=1)) if len(finals) > 1 else math.nan
        ends = {x: float(np.mean([run.columns[x][-1] for run in done or own])) for x in AXES}
        steps = float(np.mean([run.steps for run in done or own]))
        start, mean = float(own[0].columns["loss"][0]), float(np.mean(finals))
        found.append(Result(method, len(own), len(done), start, mean, deviation, best_loss(own), ends, steps))
    return found


def told(panels: Collection[Sequence[RunTrace]]) -> str:
    """Say how many runs a picture shows."""
    counts = sorted({len(own) for runs in panels for own in by_method(runs).values()})
    number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    story = "one run of each method" if counts == [1] else f"mean of {number} runs ± one standard deviation"
    begun = sum(run.done is None for runs in panels for run in runs)
    return story + (f"; {begun} of {sum(map(len, panels))} runs not finished" if begun else "")


def mean_curve(runs: Sequence[RunTrace], x: str = "paper_calls", grid: int = 200) -> Curve:
    """Return the mean loss of several runs of one method on a common grid, with a band: x, mean, low and high.

    A run that finished before the end of the grid keeps its last loss; one that is under way or broke off without a
    finite loss counts as far as it went. The band is the mean ± one standard deviation (of a sample), cut to the range
    of the runs. All four are empty if no loss is known.
    """
    curves = [(run, *run.known(x)) for run in runs]
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
    """Return the steps of all runs together: where they were made, and a column."""
    places = [run.columns[x][1:] for run in runs]
    values = [run.columns[column][1:] if column in run.columns else np.full(run.steps, math.nan) for run in runs]
    return np.concatenate([np.empty(0), *places]), np.concatenate(values or [np.empty(0)])


def bounds(curves: Iterable[Curve], star: float, log: bool) -> tuple[float, float]:
    """Return bounds of the axis of losses less `star`; a method that rises far above the start may leave at the top."""
    drawn = [curve for curve in curves if len(curve[0])]
    start = max(float(mean[0]) for _, mean, _, _ in drawn) - star
    least, floor = (min(float(np.nanmin(curve[k])) for curve in drawn) - star for k in (2, 1))
    most = max(float(np.nanmax(high)) for _, _, _, high in drawn) - star
    if log:  # a band may leave at the bottom
        bottom = max(least, floor / 2, 1e-12 * max(start, 1e-300))
        return bottom / 1.25, max(min(most, 3.0 * start), 2.0 * bottom) * 1.25
    span = max(start - least, 1e-9 * max(abs(start), 1.0))
    return least - 0.05 * span, min(most, start + 0.25 * span) + 0.05 * span


def falls_over_decades(curves: Iterable[Curve]) -> bool:
    """Whether a mean loss falls by a factor of thirty or more, so that a linear axis would show its first steps."""
    drawn = [mean[np.isfinite(mean)] for _, mean, _, _ in curves]
    return any(len(mean) > 0 and 0 < mean.min() <= mean[0] / 30 for mean in drawn) and all(
        len(mean) == 0 or mean.min() > 0 for mean in drawn
    )


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
    smooth = gaussian_filter1d(counts, 0.025 * points, mode="nearest", truncate=30.0) + 1e-300
    return at, dict(zip(present, smooth / smooth.sum(axis=0), strict=True))


def earnings(runs: Sequence[RunTrace]) -> dict[str, tuple[int, float]]:
    """Return, by branch, the number of steps and the decrease of the loss that they earned, over all runs.

    Where the loss was not measured at every step, a decrease is split evenly over the steps since the last
    measurement that moved.
    """
    steps: Counter[str] = Counter()
    earned = dict.fromkeys(("", *BRANCHES), 0.0)
    for run in runs:
        kinds, loss = run.columns["branch"][1:].tolist(), run.columns["loss"]
        steps.update(kinds)
        for begin, end in pairwise(np.flatnonzero(np.isfinite(loss))):
            taken = kinds[begin:end]
            movers = [kind for kind in taken if kind != Branch.STAYED.value] or taken
            for kind in movers:
                earned[kind] += float(loss[begin] - loss[end]) / len(movers)
    return {branch: (steps[branch], earned[branch]) for branch in BRANCHES if steps[branch]}


def quantiles(runs: Sequence[RunTrace], column: str, x: str = "paper_calls", cells: int = 50) -> Curve:
    """Return x, the median, the 10 % and the 90 % quantile of a column over cells of `x`, all runs pooled.

    Cells without a finite value are left out.
    """
    places, values = _pooled(runs, x, column)
    keep = np.isfinite(places) & np.isfinite(values)
    if not keep.any():
        return (np.empty(0),) * 4
    end = float(places[np.isfinite(places)].max()) or 1.0
    places, values = places[keep], values[keep]
    cell = np.minimum((places / end * cells).astype(np.int64), cells - 1)
    own = [cell == k for k in np.unique(cell)]
    low, middle, high = np.array([np.quantile(values[mine], (0.1, 0.5, 0.9)) for mine in own]).T
    return np.array([places[mine].mean() for mine in own]), middle, low, high
