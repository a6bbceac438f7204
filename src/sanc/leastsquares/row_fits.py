"""`curve_fit` for rows of data: a fit for each row, all of them at once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, OptimizeWarning
from torch import Tensor
from torch.func import vmap

from sanc.core.status import Status
from sanc.errors import ArgumentError, ArgumentTypeError, require, require_integer, shown
from sanc.leastsquares.rows import FitProblem
from sanc.many.algebra import eigenpairs, gram
from sanc.many.minimizing import TOLERANCES, StartingRows, build_result, checked_limits, project_start, row_bounds
from sanc.many.result import ManyResult
from sanc.many.running import RunLimits, run_rows

_DOUBTFUL = 3.0
"""A row is fitted again if its mean squared residual and unexplained variance exceed the medians by this factor."""
_CANDIDATES = 32
"""Parameters of other rows that are tried as starts of a doubtful row; the one with the lowest cost is used."""
_FIRST_ITERATIONS = 30
"""Iterations of a row before it is fitted from other parameters: five times those of a fit from a sensible start."""
_SAME_COST = 1e-6
"""Relative difference of costs below which two fits are the same: the square of √tol is far smaller."""
_ILL_CONDITIONED = 1e-10
"""Ratio of eigenvalues of JᵀJ below which the covariance is computed from singular values of J."""


@dataclass(frozen=True)
class RowData:
    """The data of all rows as tensors.

    Attributes
    ----------
    x : any
        First argument of the model.
    y, weights : Tensor
        Observations and inverse standard deviations, which are 0 where a value is missing.
    x_dim : int or None
        0 if `x` has an entry for each row.
    is_numpy : bool
        Whether the caller passed arrays.
    """

    x: Any
    y: Tensor
    weights: Tensor
    x_dim: int | None
    is_numpy: bool


def fit_rows(
    f: Callable[..., Any],
    xdata: Any,
    ydata: Any,
    p0: Any,
    sigma: Any,
    absolute_sigma: bool,
    check_finite: bool,
    bounds: Any,
    *,
    mask: Any,
    restarts: int,
    full_output: bool,
    start: Callable[[Any, Any], Any],
    tol: float | None = None,
    max_iter: int | None = 10_000,
    max_time: float | None = None,
    chunk_size: int | str = "auto",
    callback: Callable[..., Any] | None = None,
    progress: bool = False,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Fit every row, and return parameters and covariances; the arguments are those of `curve_fit`."""
    data = _checked_data(xdata, ydata, sigma, mask, check_finite)
    require_integer("restarts", restarts, 0, none=False)
    points = StartingRows(_starting_rows(p0, bounds, start, data))
    if len(points.flat) != len(data.y):
        raise ArgumentError(
            f"p0 has {len(points.flat)} rows for {len(data.y)} rows of ydata: pass one for each, or one for all."
        )
    lower, upper = row_bounds(_sides(bounds, points), points)
    p = project_start(points.flat, lower, upper)
    limits = checked_limits(
        p, data.y.shape[1] * (p.shape[1] + 1), max_iter, max_time, chunk_size, callback, progress, seed
    )
    tolerance = TOLERANCES[p.dtype] if tol is None else tol
    require(isinstance(tolerance, float) and 0.0 < tolerance < 1.0, "tol", tol, "pass a number between 0 and 1")
    eps = torch.finfo(p.dtype).eps
    if sigma is None and mask is None:
        problem = FitProblem(
            lambda q, x, y: f(x, *q) - y, (data.x, data.y), (data.x_dim, 0), p.shape[1], eps, tolerance
        )
    else:
        problem = FitProblem(
            lambda q, x, y, w: (f(x, *q) - y) * w,
            (data.x, data.y, data.weights),
            (data.x_dim, 0, 0),
            p.shape[1],
            eps,
            tolerance,
        )
    _check_model(f, problem, p, data)
    fits = _RowFits(problem, data, lower, upper, limits)
    fits.run(p, restarts)
    result = build_result(fits.outputs, fits.rounds, points, lower, upper)
    _warn_about_failures(result)
    covariance = _covariances(problem, fits.outputs["x"], data, absolute_sigma)
    pcov = points.build_numbers(covariance.to(p.dtype))
    return (result.x, pcov, result) if full_output else (result.x, pcov)


def _checked_data(xdata: Any, ydata: Any, sigma: Any, mask: Any, check_finite: bool) -> RowData:
    """Return the data as tensors, after checks."""
    is_numpy = not isinstance(ydata, Tensor)
    y = torch.as_tensor(np.asarray(ydata, np.float64) if is_numpy else ydata).detach()
    y = y if y.dtype in TOLERANCES else y.double()
    if y.numel() == 0:
        raise ArgumentError("ydata is empty: pass at least one row with one observation.")
    used = torch.ones(y.shape, dtype=torch.bool, device=y.device)
    if mask is not None:
        used = torch.as_tensor(np.asarray(mask) if not isinstance(mask, Tensor) else mask, device=y.device)
        if used.dtype != torch.bool or used.shape not in (y.shape, y.shape[1:]):
            raise ArgumentError(
                f"mask has shape {tuple(used.shape)} and {used.dtype} for ydata of {tuple(y.shape)}: pass booleans of "
                "the same shape, True for the observations to use."
            )
        used = used.expand(y.shape)
    bad = used & ~y.isfinite()
    if check_finite and bool(bad.any()):
        row = int(torch.nonzero(bad)[0, 0])
        raise ArgumentError(f"ydata holds NaN or infinity, first in row {row}: pass mask=np.isfinite(ydata).")
    weights = used.to(y.dtype)
    if sigma is not None:
        deviations = torch.as_tensor(np.asarray(sigma) if not isinstance(sigma, Tensor) else sigma).to(y)
        if deviations.shape not in ((), y.shape, y.shape[1:]):
            raise ArgumentError(
                f"sigma has shape {tuple(deviations.shape)} for ydata of {tuple(y.shape)}: pass standard deviations "
                "for one row or for all. Covariance matrices are for one fit."
            )
        valid = (deviations > 0.0) & deviations.isfinite()
        require(bool((valid.expand(y.shape) | ~used).all()), "sigma", sigma, "pass positive standard deviations")
        weights = torch.where(used, 1.0 / deviations, 0.0).to(y.dtype)
    x, x_dim = xdata, None
    if isinstance(xdata, np.ndarray | list | tuple):
        array = np.asarray(xdata)
        x = torch.from_numpy(array.astype(np.float64) if array.dtype.kind in "iub" else array).to(y)
    if isinstance(x, Tensor):
        x_dim = 0 if x.shape == y.shape else None
        if (
            check_finite
            and x.is_floating_point()
            and not bool((x.isfinite() | ~used if x_dim == 0 else x.isfinite()).all())
        ):
            raise ArgumentError("xdata holds NaN or infinity: leave such observations out, or pass a mask.")
        if x_dim == 0:
            x = torch.where(used, x, 1.0)
    return RowData(x, torch.where(used, y, 0.0), weights, x_dim, is_numpy)


def _starting_rows(p0: Any, bounds: Any, start: Callable[[Any, Any], Any], data: RowData) -> Any:
    """Return a row of initial parameters for each row of data."""
    if p0 is not None:
        first = p0
    elif isinstance(bounds, tuple | list) and any(np.ndim(side) > 1 for side in bounds):
        sides = np.broadcast_arrays(*(np.asarray(side) for side in bounds))
        first = torch.stack([start(pair, data.y[0]) for pair in zip(*sides, strict=True)])
    else:
        first = start(bounds, data.y[0])
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


def _check_model(model: Callable[..., Any], problem: FitProblem, p: Tensor, data: RowData) -> None:
    """Raise an error unless the model can be mapped over rows and differentiated."""
    ids = torch.arange(min(2, len(p)), device=p.device)
    x = data.x if data.x_dim is None else data.x[ids]
    try:
        r = vmap(lambda q, row: model(row, *q), in_dims=(0, data.x_dim))(p[ids], x)
    except Exception as error:
        first = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ArgumentError(
            f"f cannot be mapped over rows by torch.func.vmap ({first}): write it with functions of torch, for one row "
            "of xdata and scalar parameters, and without branches on values; or call curve_fit for each row."
        ) from error
    if not isinstance(r, Tensor) or r.shape != (len(ids), data.y.shape[1]):
        shape = tuple(r.shape[1:]) if isinstance(r, Tensor) else type(r).__name__
        raise ArgumentError(f"f returned {shape} for a row of {data.y.shape[1]} observations: return one for each.")
    try:
        problem.evaluate(p[ids], ids)
    except Exception as error:
        raise ArgumentTypeError(
            f"f cannot be differentiated ({shown(error)}): use operators of torch with forward derivatives."
        ) from error


class _RowFits:
    """The fits of all rows: their results so far, and further runs of some of them.

    Attributes
    ----------
    outputs : dict of Tensor
        What the rows ended with.
    rounds : int
        Rounds made.
    """

    def __init__(
        self, problem: FitProblem, data: RowData, lower: Tensor | None, upper: Tensor | None, limits: RunLimits
    ) -> None:
        self.problem, self.data, self.lower, self.upper, self.limits = problem, data, lower, upper, limits
        self.outputs: dict[str, Tensor] = {}
        self.rounds = 0
        self._end = time.perf_counter() + limits.max_time

    def run(self, start: Tensor, restarts: int) -> None:
        """Fit all rows; those that fail or explain little again, from parameters of others; and keep the better fits.

        With restarts, rows are first given a few iterations only, so that none waits for one on a long detour. Those
        that did not end continue afterwards.
        """
        first = replace(self.limits, max_iter=min(self.limits.max_iter, _FIRST_ITERATIONS)) if restarts else self.limits
        self.outputs, self.rounds = run_rows(self.problem, start, self.lower, self.upper, first)
        generator = torch.Generator().manual_seed(self.limits.seed)
        for _ in range(restarts):
            doubtful = _doubtful_rows(self.outputs, self.data)
            places, good = (torch.nonzero(part).reshape(-1) for part in (doubtful, ~doubtful))
            if len(places) == 0 or len(good) == 0 or self._is_stopped():
                break
            chosen = good[torch.randint(len(good), (_CANDIDATES,), generator=generator).to(good.device)]
            if not self._run_again(places, self._best_candidates(places, chosen), first):
                break
        places = torch.nonzero(self.outputs["status"] == Status.ITERATION_LIMIT).reshape(-1)
        if restarts and len(places) and self.limits.max_iter > first.max_iter and not self._is_stopped():
            self._run_again(places, self.outputs["x"][places], self.limits)

    def _is_stopped(self) -> bool:
        """Whether the time limit or the callback ended a run."""
        status = self.outputs["status"]
        return bool(((status == Status.TIME_LIMIT) | (status == Status.CALLBACK)).any())

    def _best_candidates(self, places: Tensor, rows: Tensor) -> Tensor:
        """Return, for each of the rows `places`, the parameters of other rows that fit its data best."""
        start = self.outputs["x"][places]
        best = torch.full_like(self.outputs["value"][places], torch.inf)
        for candidate in self.outputs["x"][rows]:
            p = candidate.expand_as(start)
            p = p if self.lower is None or self.upper is None else p.clamp(self.lower[places], self.upper[places])
            value = self.problem.values(p, places)
            better = value < best
            best, start = torch.where(better, value, best), torch.where(better[:, None], p, start)
        return start

    def _run_again(self, places: Tensor, start: Tensor, limits: RunLimits) -> bool:
        """Fit some rows from other parameters, and keep the better fits; return whether there are any."""
        low, high = (None if side is None else side[places] for side in (self.lower, self.upper))
        left = max(self._end - time.perf_counter(), 1e-9)
        limits = replace(limits, progress=False, max_time=left)
        again, rounds = run_rows(_Selected(self.problem, places), start, low, high, limits)
        self.rounds += rounds
        old, failed, succeeded = self.outputs["value"][places], self.outputs["status"][places] > 1, again["status"] <= 1
        lower = (again["value"] < (1.0 - _SAME_COST) * old) | ~old.isfinite()
        same = again["value"] <= (1.0 + _SAME_COST) * old
        improved = (lower & (succeeded | failed)) | (same & succeeded & failed)
        for name, numbers in again.items():
            if name in ("nfev", "njev", "nit"):
                self.outputs[name][places] += numbers
            else:
                self.outputs[name][places[improved]] = numbers[improved]
        return bool(improved.any())


def _doubtful_rows(outputs: dict[str, Tensor], data: RowData) -> Tensor:
    """Return the rows that failed, or whose mean squared residual and unexplained variance are far above the median."""
    weights = data.weights.double().square()
    y = data.y.double()
    mean = (weights * y).sum(1) / weights.sum(1).clamp(min=1e-300)
    variance = (weights * (y - mean[:, None]).square()).sum(1)
    failed = (outputs["status"] > 1) | ~outputs["value"].isfinite()
    if bool(failed.all()):
        return failed
    poor = torch.ones_like(failed)
    for measure in (outputs["value"] / (weights > 0.0).sum(1), outputs["value"] / variance.clamp(min=1e-300)):
        poor &= measure > _DOUBTFUL * measure[~failed].median()
    return failed | poor


class _Selected(FitProblem):
    """The problem of some of the rows, which are numbered from 0."""

    def __init__(self, problem: FitProblem, places: Tensor) -> None:
        super().__init__(problem.residuals, problem.data, problem.dims, problem.dim, problem.eps, problem.tol)
        self._places = places

    def mapped(self, function: Callable[..., Any], x: Tensor, ids: Tensor) -> Any:
        return super().mapped(function, x, self._places[ids])


def _warn_about_failures(result: ManyResult) -> None:
    failed = int((~torch.as_tensor(result.success)).sum())
    if failed:
        warnings.warn(
            f"{failed} of {len(result)} rows led to no fit: pass full_output=True and see the status of each row.",
            OptimizeWarning,
            stacklevel=4,
        )


def _covariances(problem: FitProblem, p: Tensor, data: RowData, absolute_sigma: bool) -> Tensor:
    """Return the covariance of the parameters of each row as SciPy defines it; infinite where it is not determined."""
    observations = (data.weights > 0.0).sum(1)
    parts = []
    chunk = max(1, 2**22 // (data.y.shape[1] * (p.shape[1] + 1)))
    for ids in torch.split(torch.arange(len(p), device=p.device), chunk):
        r, columns = (part.double() for part in problem.mapped(problem.linearised, p[ids], ids))
        inverse = _inverses(columns)
        if not absolute_sigma:
            freedom = (observations[ids] - p.shape[1]).double()
            scale = torch.where(freedom > 0, r.square().sum(1) / freedom, torch.inf)
            inverse = torch.where(scale.isfinite()[:, None, None], inverse * scale[:, None, None], torch.inf)
        parts.append(inverse)
    return torch.cat(parts)


def _inverses(columns: Tensor) -> Tensor:
    """Return (JᵀJ)⁻¹ of each row; infinite if J has no full rank."""
    norms = torch.linalg.vector_norm(columns, dim=2)
    scale = torch.where((norms > 0.0) & norms.isfinite(), 1.0 / norms, 1.0)
    scaled = columns * scale[:, :, None]
    finite = scaled.isfinite().flatten(1).all(1)
    values, vectors = eigenpairs(gram(torch.where(finite[:, None, None], scaled, 0.0)))
    inverse = gram(vectors / values.clamp(min=1e-300).sqrt()[:, None, :]) * scale[:, :, None] * scale[:, None, :]
    determined = finite & (values[:, 0] > _ILL_CONDITIONED * values[:, -1])
    for row in torch.nonzero(finite & ~determined).reshape(-1).tolist():
        singular, rows = torch.linalg.svd(scaled[row].mT, full_matrices=False)[1:]
        is_full = bool(singular[-1] > torch.finfo(singular.dtype).eps * max(columns.shape[1:]) * singular[0])
        if is_full and len(singular) == columns.shape[1]:
            factor = rows / singular[:, None] * scale[row]
            inverse[row], determined[row] = factor.mT @ factor, True
    return torch.where(determined[:, None, None], inverse, torch.inf)
