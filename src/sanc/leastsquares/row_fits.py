"""`curve_fit` for rows of data: a fit for each row, all of them at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, OptimizeWarning
from torch import Tensor

from sanc.core.runs.status import Status
from sanc.core.space import NEAR_ZERO
from sanc.errors import (
    ArgumentError,
    ArgumentTypeError,
    first_line,
    require_fraction,
    require_integer,
    shown,
    warn,
)
from sanc.leastsquares.row_covariances import covariances
from sanc.leastsquares.row_data import RowData
from sanc.leastsquares.row_models import MappedModel, PointwiseModel, is_pointwise, same_numbers
from sanc.leastsquares.rows import FitProblem
from sanc.many.endings import is_success
from sanc.many.entry import TOLERANCES, RunOptions, StartingRows, build_result, project_start, row_bounds
from sanc.many.functions import ROW_PERTURBATION
from sanc.many.result import ManyResult
from sanc.many.rows import RUNNING, WAITING, Rows
from sanc.many.running import RowRun, RunLimits

_POOR_FIT_FACTOR = 3.0
"""A row is fitted again if its mean squared residual and unexplained variance exceed the medians by this factor."""
_MAX_REFITS = 2
"""How often rows that fit poorly are fitted from other parameters."""
_CANDIDATE_COUNTS = (32, 512)
"""Parameters of other rows among which a start of a poor fit is chosen, by the lowest cost: the least and the most. The
second time, when fewer rows are left, there are as many evaluations as the first time."""
_MAX_FIRST_TRIALS = 12
"""Trial points of a row before it is fitted from other parameters: twice what a fit from a sensible start needs."""
_TRIALS_PER_PARAMETER = 200
"""Trial points of a row, for each parameter and one more: the limit of MINPACK, which `curve_fit` of SciPy uses."""
_COMPARED_JACOBIANS = 64
"""Rows at whose solutions the Jacobians of a pointwise model are compared with those of a mapped one."""
_EQUAL_COST_TOLERANCE = 1e-6
"""Relative difference of costs below which two fits are the same: the square of √tol is far smaller."""


def fit_rows(
    f: Callable[..., Any],
    data: RowData,
    p0: Any,
    bounds: Any,
    options: RunOptions,
    *,
    initial_parameters: Callable[[Any, Any], Any],
    restarts: int,
    absolute_sigma: bool,
) -> tuple[Any, Any, ManyResult]:
    """Fit every row, and return parameters, covariances and the result.

    `initial_parameters` returns those for bounds and observations of a row; the other arguments are those of
    `curve_fit`.
    """
    require_integer("restarts", restarts, 0)
    points = StartingRows(_starting_rows(p0, bounds, initial_parameters, data))
    if len(points.flat) != len(data.y):
        raise ArgumentError(
            f"p0 has {len(points.flat)} rows for {len(data.y)} rows of ydata: pass one for each, or one for all."
        )
    lower, upper = row_bounds(_sides(bounds, points), points)
    p = project_start(points.flat, lower, upper)
    limits = options.limits(p, data.y.shape[1] * (p.shape[1] + 1))
    if options.max_iter is None:
        limits = replace(limits, max_trials=_TRIALS_PER_PARAMETER * (p.shape[1] + 1))
    tol = TOLERANCES[p.dtype] if options.tol is None else options.tol
    require_fraction("tol", tol, "pass a number between 0 and 1")
    tol = float(tol)
    eps = torch.finfo(p.dtype).eps
    mapped = MappedModel(f)
    fits = _RowFits(FitProblem(_chosen_model(mapped, p, data, lower, upper), data, eps, tol), lower, upper, limits)
    fits.run(p, restarts)
    if not fits.agree_with(mapped):  # the model is not pointwise everywhere
        fits = _RowFits(FitProblem(mapped, data, eps, tol), lower, upper, limits)
        fits.run(p, restarts)
    covariance = covariances(fits.problem, fits.outputs, absolute_sigma)
    result = build_result(fits.outputs, fits.rounds, points, lower, upper)
    _warn_about_failures(result)
    return result.x, points.build_numbers(covariance.to(p.dtype)), result


def _starting_rows(p0: Any, bounds: Any, initial_parameters: Callable[[Any, Any], Any], data: RowData) -> Any:
    """Return a row of initial parameters for each row of data."""
    if p0 is not None:
        first = p0
    elif isinstance(bounds, tuple | list) and any(np.ndim(side) > 1 for side in bounds):
        sides = np.broadcast_arrays(*(np.asarray(side) for side in bounds))
        first = torch.stack([initial_parameters(pair, data.y[0]) for pair in zip(*sides, strict=True)])
    else:
        first = initial_parameters(bounds, data.y[0])
    if isinstance(first, Tensor):
        rows = first.detach().to(data.y)
    else:
        rows = torch.as_tensor(np.asarray(first, np.float64)).to(data.y)
    if not bool(rows.isfinite().all()):
        raise ArgumentError("p0 holds NaN or infinity: pass finite numbers.")
    rows = rows.reshape(1, -1) if rows.ndim < 2 else rows
    rows = rows.expand(len(data.y), -1).clone() if len(rows) == 1 else rows
    return rows.cpu().numpy() if data.is_numpy else rows


def _sides(bounds: Any, points: StartingRows) -> Any:
    """Return bounds of one row as `Bounds`: a pair is (lower, upper) as in SciPy. Those of all rows are unchanged."""
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        return bounds
    sides = [
        side.detach().cpu().numpy() if isinstance(side, Tensor) else np.asarray(side, np.float64) for side in bounds
    ]
    if any(side.ndim > 1 for side in sides):
        return [np.array(np.broadcast_to(side, points.flat.shape)) for side in sides]
    return Bounds(*sides)


def _chosen_model(
    mapped: MappedModel, p: Tensor, data: RowData, lower: Tensor | None, upper: Tensor | None
) -> MappedModel | PointwiseModel:
    """Return a pointwise model if it agrees with the mapped one at the start of two rows, whose parameters differ.

    Raise an error unless the model can be mapped over rows and differentiated.
    """
    ids = torch.arange(min(2, len(p)), device=p.device)
    part = data.take(ids)
    p = p[ids] * (1.0 + ROW_PERTURBATION * ids[:, None]).to(p.dtype)
    p = p if lower is None or upper is None else p.clamp(lower[ids], upper[ids])
    try:
        curves = mapped.curves(p, part)
    except Exception as error:
        raise ArgumentError(
            f"f cannot be mapped over rows by torch.func.vmap ({first_line(error)}): write it with functions of "
            "torch, for one row of xdata and scalar parameters, and without branches on values; or call curve_fit for "
            "each row."
        ) from error
    if not isinstance(curves, Tensor) or curves.shape != part.y.shape:
        shape = tuple(curves.shape[1:]) if isinstance(curves, Tensor) else type(curves).__name__
        raise ArgumentError(f"f returned {shape} for a row of {data.y.shape[1]} observations: return one for each.")
    try:
        linearised = mapped.linearised(p, part)
    except Exception as error:
        raise ArgumentTypeError(
            f"f cannot be differentiated ({shown(error)}): use operators of torch with forward derivatives."
        ) from error
    return PointwiseModel(mapped.f) if is_pointwise(mapped.f, p, part, linearised) else mapped


class _RowFits:
    """The fits of all rows: their results so far, and further runs of some of them.

    Attributes
    ----------
    problem : FitProblem
        Evaluates the rows.
    lower, upper : Tensor or None
        Bounds of the parameters of each row.
    limits : RunLimits
        Limits of all runs together.
    outputs : dict of Tensor
        What the chosen fits of the rows ended with, with the evaluations of all of them.
    """

    def __init__(self, problem: FitProblem, lower: Tensor | None, upper: Tensor | None, limits: RunLimits) -> None:
        self.problem, self.lower, self.upper, self.limits = problem, lower, upper, limits
        self.outputs: dict[str, Tensor] = {}
        self._run = RowRun(problem, limits)
        self._chosen = problem.data_rows

    @property
    def rounds(self) -> int:
        """Rounds made."""
        return self._run.rounds

    def run(self, p: Tensor, restarts: int) -> None:
        """Fit all rows, fit those again that failed or fit poorly, from parameters of other rows, and keep the best.

        With restarts, the trial points of a row are limited at first, so that no row waits for one that needs
        many. Those that did not end go on beside the fits from other parameters, and at last alone.
        """
        first, later = (_MAX_FIRST_TRIALS, 2 * _MAX_FIRST_TRIALS) if restarts else (math.inf, math.inf)
        self._run.run(p, self.lower, self.upper, max_trials=first)
        self._collect()
        generator, evaluations = torch.Generator().manual_seed(self.limits.seed), 0
        for _ in range(_MAX_REFITS if restarts else 0):
            limit = _largest_good_cost(self.outputs, self.problem.data)
            poor = _poor_fits(self.outputs, limit)
            good = ~poor & is_success(self.outputs["status"])
            indices, others = (torch.nonzero(part).reshape(-1) for part in (poor, good))
            if len(indices) == 0 or len(others) == 0 or self._is_stopped():
                break
            evaluations = evaluations or _CANDIDATE_COUNTS[0] * len(indices)
            candidates = min(max(evaluations // len(indices), _CANDIDATE_COUNTS[0]), _CANDIDATE_COUNTS[1])
            drawn = torch.randint(len(others), (restarts, candidates), generator=generator).to(others.device)
            starts = self._best_parameters(indices, self.outputs["x"][others[drawn]])
            if not self._run_again(indices, starts, limit, later):
                break
        if self._run.has_unfinished and not self._is_stopped():
            self._run.run(p[:0], self.lower, self.upper, resumed=self._chosen)
            self._collect()

    def _collect(self) -> None:
        """Set the outputs of the chosen fits, with the evaluations of all fits of a row."""
        everything = self._run.outputs
        self.outputs = {name: numbers.index_select(0, self._chosen) for name, numbers in everything.items()}
        for name in ("nfev", "njev", "nit"):
            total = torch.zeros_like(self.outputs[name])
            self.outputs[name] = total.index_add(0, self.problem.data_rows, everything[name])

    def agree_with(self, mapped: MappedModel) -> bool:
        """Return whether residuals of all rows, and some Jacobians, are those of a mapped model at the solutions."""
        model, p, data = self.problem.model, self.outputs["x"], self.problem.data
        if model is mapped:
            return True

        def agree(p: Tensor, data: RowData) -> tuple[Tensor]:
            size = torch.linalg.vector_norm(data.weighted(data.y), dim=1, keepdim=True)
            return (same_numbers(model.residuals(p, data), mapped.residuals(p, data), size).all(1),)

        if not bool(self.problem.in_chunks(agree, p, torch.arange(len(p), device=p.device))[0].all()):
            return False
        p, data = p[:_COMPARED_JACOBIANS], data.take(torch.arange(min(len(p), _COMPARED_JACOBIANS), device=p.device))
        return len(p) == 1 or is_pointwise(mapped.f, p, data, mapped.linearised(p, data))

    def _is_stopped(self) -> bool:
        """Return whether the time limit or the callback ended a run."""
        status = self.outputs["status"]
        return bool(((status == Status.TIME_LIMIT) | (status == Status.CALLBACK)).any())

    def _best_parameters(self, indices: Tensor, candidates: Tensor) -> Tensor:
        """Return, for each set of candidates and each of some rows, the parameters with the lowest cost."""
        problem, count, p = self.problem.of_rows(indices), len(indices), candidates.flatten(0, 1)
        costs = []
        for part in torch.split(p, max(1, self.limits.chunk_size // count)):
            ids = torch.arange(count, device=indices.device).repeat(len(part))
            costs.append(problem.values(self._projected(part.repeat_interleave(count, 0), indices[ids]), ids))
        cost = torch.cat(costs).nan_to_num(nan=torch.inf).reshape(*candidates.shape[:2], count)
        best = torch.stack([part[choice] for part, choice in zip(candidates, cost.argmin(1), strict=True)])
        return self._projected(best.flatten(0, 1), indices.repeat(len(best))).reshape_as(best)

    def _projected(self, p: Tensor, indices: Tensor) -> Tensor:
        """Return parameters of some rows within their bounds."""
        return p if self.lower is None or self.upper is None else p.clamp(self.lower[indices], self.upper[indices])

    def _run_again(self, indices: Tensor, starts: Tensor, limit: Tensor, max_trials: float) -> bool:
        """Fit some rows from several starts each, which are along the first dimension, and choose the best fits.

        The other fits of a row end as soon as one of them is stationary with a cost up to `limit`. Return whether
        there are better fits.
        """
        repeated = indices.repeat(len(starts))
        fits = (len(self.problem.data_rows) + torch.arange(len(repeated), device=indices.device)).reshape(
            len(starts), -1
        )
        self.problem.repeat_rows(repeated)
        sides = [None if side is None else side[repeated] for side in (self.lower, self.upper)]
        superseded = _Superseded(self.problem, limit)
        self._run.run(starts.flatten(0, 1), *sides, max_trials=max_trials, resumed=self._chosen, superseded=superseded)
        value, status = self._run.outputs["value"], self._run.outputs["status"]
        succeeded = is_success(status)
        rank = torch.where(value.isfinite(), value, torch.inf)[fits]
        best = torch.where(succeeded[fits] | ~succeeded[fits].any(0), rank, torch.inf).argmin(0)
        new, old = fits[best, torch.arange(len(indices), device=indices.device)], self._chosen[indices]
        is_lower = (value[new] < (1.0 - _EQUAL_COST_TOLERANCE) * value[old]) | ~value[old].isfinite()
        same = value[new] <= (1.0 + _EQUAL_COST_TOLERANCE) * value[old]
        improved = (is_lower & (succeeded[new] | ~succeeded[old])) | (same & succeeded[new] & ~succeeded[old])
        self._chosen = self._chosen.index_put((indices,), torch.where(improved, new, old))
        self._collect()
        return bool(improved.any())


class _Superseded:
    """Fits that need not go on, since another fit of the same row is stationary with a low cost.

    Parameters
    ----------
    problem : FitProblem
        The fits, with their rows of data.
    limit : Tensor
        The largest low cost of each row.
    """

    def __init__(self, problem: FitProblem, limit: Tensor) -> None:
        self._data_rows, self._limit = problem.data_rows, limit
        self._fitted = torch.zeros_like(limit, dtype=torch.bool)

    def __call__(self, rows: Rows) -> Tensor:
        """Return which of the rows need not go on."""
        data_rows = self._data_rows[rows.ids]
        stationary = (rows.status == WAITING) | is_success(rows.status)
        fitted = stationary & (rows.point.value <= self._limit[data_rows])
        self._fitted[data_rows[fitted]] = True
        return self._fitted[data_rows] & (rows.status == RUNNING)


def _largest_good_cost(outputs: dict[str, Tensor], data: RowData) -> Tensor:
    """Return the largest cost with which each row fits well; infinity if no row has succeeded.

    A row fits well if its mean squared residual or its unexplained variance is not far above the median.
    """
    succeeded = is_success(outputs["status"])
    if not bool(succeeded.any()):
        return torch.full_like(outputs["value"], torch.inf)
    limits = [
        _POOR_FIT_FACTOR * (outputs["value"] / size)[succeeded].median() * size
        for size in (data.observations, data.variation.clamp(min=NEAR_ZERO))
    ]
    return torch.maximum(*limits)


def _poor_fits(outputs: dict[str, Tensor], limit: Tensor) -> Tensor:
    """Return the rows that failed, or whose cost is above a limit. A row that did not end has not failed."""
    status = outputs["status"]
    return ~(outputs["value"] <= limit) | ~(is_success(status) | (status == Status.ITERATION_LIMIT))


def _warn_about_failures(result: ManyResult) -> None:
    """Warn of rows that led to no fit."""
    failed = int((~torch.as_tensor(result.success)).sum())
    if failed:
        warn(
            f"{failed} of {len(result)} rows led to no fit: pass full_output=True and see the status of each row.",
            OptimizeWarning,
        )
