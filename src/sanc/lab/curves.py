"""Boil runs down to what is drawn: mean curves, f*, shares of the branches and what they earned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sanc import Branch
from sanc.lab.style import BRANCHES
from sanc.lab.traces import Floats, RunTrace

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
    loss = math.nan if run.done is None else run.done.get("loss", 0.0)
    return isinstance(loss, int | float) and math.isfinite(loss)


def mean_curve(
    runs: Sequence[RunTrace], x: str = "paper_calls", grid: int = 200
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the mean loss of several runs of one method on a common grid, with a band: x, mean, low and high.

    Losses are interpolated linearly between the places where they were measured. A run that finished before the end of
    the grid keeps its last loss; one that is under way, was interrupted or broke off without a finite loss counts as
    far as it went. The band is the mean ± one standard deviation (of a sample), cut to the range of the runs, so that
    on a logarithmic axis it never falls below a loss that was seen. All four are empty if no loss is known.
    """
    curves = [(run, *run.known(x)) for run in runs]
    curves = [curve for curve in curves if len(curve[1])]
    if not curves:
        return (np.empty(0),) * 4
    at = np.linspace(0.0, max(place[-1] for _, place, _ in curves), grid)
    rest = [float(loss[-1]) if _ends_well(run) else math.nan for run, _, loss in curves]
    rows = [np.interp(at, place, loss, math.nan, end) for (_, place, loss), end in zip(curves, rest, strict=True)]
    values = np.ma.masked_invalid(rows)
    mean = values.mean(axis=0)
    deviation = np.sqrt(((values - mean) ** 2).sum(axis=0) / np.maximum(values.count(axis=0) - 1, 1))
    low, high = np.maximum(mean - deviation, values.min(axis=0)), np.minimum(mean + deviation, values.max(axis=0))
    return at, *(np.ma.filled(part, math.nan) for part in (mean, low, high))  # type: ignore[return-value]


def _pooled(runs: Sequence[RunTrace], x: str, column: str) -> tuple[Floats, NDArray[Any]]:
    """Return the steps of all runs together: where they were made, and a column."""
    steps = [run.columns["iteration"] >= 0 for run in runs]
    columns = [run.columns.get(column, np.full(len(keep), math.nan)) for run, keep in zip(runs, steps, strict=True)]
    places = [run.columns[x][keep] for run, keep in zip(runs, steps, strict=True)]
    values = [values[keep] for values, keep in zip(columns, steps, strict=True)]
    return np.concatenate([np.empty(0), *places]), np.concatenate(values or [np.empty(0)])


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
        anybody = movers[segment] > 0
        gain = drops[segment] * np.where(anybody, moved / np.maximum(movers[segment], 1), 1 / everyone[segment])
        for branch in BRANCHES:
            earned[branch] += float(gain[own == branch].sum())
    return {branch: (steps[branch], earned[branch]) for branch in BRANCHES if steps[branch]}


def quantiles(
    runs: Sequence[RunTrace], column: str, x: str = "paper_calls", cells: int = 50
) -> tuple[Floats, Floats, Floats, Floats]:
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
