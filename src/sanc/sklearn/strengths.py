"""The held-out loss of a penalised linear model as a function of the penalty's strengths, with its derivatives.

A fold fits w(t), the minimiser of L(w) + ½ Σ λ_g ‖w_g‖² over its rows, where the strength of group g is λ_g = e^(−t_g)
divided by the weight of the rows; t is the logarithm of C. V(w) is the loss of the rows that the fold leaves out. With
H the Hessian of the penalised loss and P_g the projection on group g,

    dw/dt_g = λ_g H⁻¹ P_g w,    dV/dt_g = λ_g (P_g v)ᵀw  with  H v = ∇V.

These are the derivatives of `sanc.argmin` in closed form, since the Hessian and the third derivatives of the losses are
known. One Cholesky decomposition serves all linear systems of a fit; without a matrix each has a Krylov space.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve

from sanc.core.space import Space
from sanc.implicit.linear_systems import RitzSpace, solve
from sanc.minimisation import minimize
from sanc.sums.checks import Array
from sanc.sums.linear import LinearSum

Build = Callable[[int, Array], tuple[LinearSum, LinearSum]]
"""Returns the penalised sum of a fold, given 1/C = e^(−t) of each feature, and the sum of the other rows."""

_MAX_CHOLESKY_DIM = 2000
"""Variables up to which the Hessian of a dense X is formed; its Cholesky decomposition then takes a second."""
_LOSS_ERROR_TOLERANCE, _MAX_LOSS_ERROR = 1e-4, 1e-2
"""Relative errors of the held-out loss because a fit is not exact: from the first one the fit continues with a smaller
`tol`, and from the second one it counts as failed if it cannot continue."""
_MAX_FITS, _MIN_TOL = 4, 1e-12
"""The most fits of one strength, and the smallest `tol` of one: about the roundoff of a gradient in float64."""
_MAX_TOL_RATIO, _NEEDED_TOL_FRACTION = 0.1, 0.5
"""Largest factor of `tol` from one fit to the next, and the `tol` of the next one relative to what its error needs."""
_MAX_LOG_CHANGE = 2.0
"""Largest change of log C along which the derivatives of w predict the start of a fit."""
_LINEAR_SYSTEM_TOLERANCE = 1e-6
"""Relative residual of a linear system in a Krylov space; the square root is the largest that counts as solved."""
_FIRST_POSITIONS = (0.125, 0.375, 0.625, 0.875)
"""Where the first values of t are in their range: C = 0.001, 0.1, 10 and 1000 in the default range."""
_SEARCH_GRADIENT_TOLERANCE = 1e-3
"""Gradient norm at which a search ends, relative to the held-out loss."""
_MAX_SEARCH_ITERATIONS = 30
"""The most iterations of a search."""
_MAX_BLOCK_ENTRIES = 1 << 22
"""Entries of margins that third derivatives use at a time."""


@dataclass(slots=True, eq=False)
class _System:
    """The linear systems of a fit.

    Attributes
    ----------
    problem, left_out : LinearSum
        The penalised sum of the fold, and the sum of the rows that it leaves out.
    solve : callable
        u ↦ H⁻¹u.
    adjoint : array
        The solution v of H v = ∇V.
    """

    problem: LinearSum
    left_out: LinearSum
    solve: Callable[[Array], Array]
    adjoint: Array


@dataclass(slots=True, eq=False)
class _Fit:
    """The fit of one fold.

    Attributes
    ----------
    w : array or None
        The coefficients; before the fit, those at which it starts; None: at zero.
    iterations : int
        Iterations so far.
    loss : float
        The held-out loss.
    converged : bool
        Whether the fit converged, and its linear systems were solved where that was tried.
    system : _System or None
        Its linear systems; None: they were not formed, or were dropped to save memory.
    changes : array or None
        dw/dt, a row for each group, once it was computed.
    """

    w: Array | None
    iterations: int = 0
    loss: float = math.inf
    converged: bool = False
    system: _System | None = None
    changes: Array | None = None


@dataclass(slots=True, eq=False)
class HeldOutEvaluation:
    """The fits of all folds for one vector t = log C.

    Attributes
    ----------
    t : array, shape (groups,)
        The logarithms of C.
    fits : list
        The fit of each fold.
    is_precise : bool
        Whether the fits have the precision that derivatives need.
    """

    t: Array
    fits: list[_Fit]
    is_precise: bool = False

    @property
    def losses(self) -> Array:
        """The held-out losses, one for each fold."""
        return np.array([fit.loss for fit in self.fits])

    @property
    def coefficients(self) -> Array:
        """The flat coefficients, one row for each fold."""
        return np.array([fit.w for fit in self.fits])

    @property
    def iterations(self) -> Array:
        """Iterations of each fold."""
        return np.array([fit.iterations for fit in self.fits], np.int32)

    @property
    def is_reliable(self) -> bool:
        """Whether all fits converged, and their linear systems were solved where that was tried."""
        return all(fit.converged for fit in self.fits)

    def initial_coefficients(self, fold: int, t: Array) -> Array | None:
        """Return where a fit at t starts: the coefficients here, moved along their derivatives if t is near."""
        fit, change = self.fits[fold], t - self.t
        if fit.w is None or fit.changes is None or np.abs(change).max() > _MAX_LOG_CHANGE:
            return fit.w
        moved: Array = fit.w + change @ fit.changes
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The best point of a search, and the result of the last minimisation; None if the start had no derivatives."""

    best: HeldOutEvaluation
    result: Any


class HeldOutLoss:
    """The mean held-out loss of the folds as a function of t, with gradient and Hessian.

    Parameters
    ----------
    build : callable
        ``build(fold, inverse_C)`` returns the sums of a fold, in float64.
    folds : int
        Number of folds.
    groups : array of int, shape (d,)
        The group of each feature, 0, 1, …
    tol, max_iter, method
        Of the fits, as in `sanc.minimize`. A fit whose held-out loss is not precise continues with a smaller `tol`.

    Attributes
    ----------
    evaluations : list of HeldOutEvaluation
        All points so far.
    """

    def __init__(self, build: Build, folds: int, groups: Array, *, tol: float, max_iter: int, method: Any) -> None:
        self._build, self._folds, self._groups = build, folds, groups
        self._tol, self._max_iter, self._method = tol, max_iter, method
        self._needed_tol = np.full(folds, tol)  # of the last fit of each fold
        self.evaluations: list[HeldOutEvaluation] = []

    def evaluate(self, t: Array, *, survey: bool = False) -> HeldOutEvaluation:
        """Return the fits for t, made or stored; with `survey`, fits without derivatives suffice."""
        t = np.array(t, np.float64)
        evaluation = next((stored for stored in reversed(self.evaluations) if np.array_equal(stored.t, t)), None)
        if evaluation is None:
            nearest = min(self.evaluations, key=lambda stored: float(np.abs(stored.t - t).max()), default=None)
            starts = [None if nearest is None else nearest.initial_coefficients(fold, t) for fold in range(self._folds)]
            evaluation = HeldOutEvaluation(t, [_Fit(start) for start in starts])
            self.evaluations.append(evaluation)
            for old in self.evaluations[:-2]:  # coefficients of all points are kept, but matrices of two
                for fit in old.fits:
                    fit.system = None
        elif survey or evaluation.is_precise:
            return evaluation
        for fold, fit in enumerate(evaluation.fits):
            self._improve(fold, t, fit, survey)
        evaluation.is_precise = not survey
        return evaluation

    def split(self, groups: Array) -> None:
        """Use other groups from here on, which are parts of those so far; stored points get a t for each."""
        places = [int(self._groups[np.flatnonzero(groups == group)[0]]) for group in range(int(groups.max()) + 1)]
        self._groups = groups
        for evaluation in self.evaluations:
            evaluation.t = evaluation.t[places]
            for fit in evaluation.fits:
                fit.changes = None

    def value(self, t: Array) -> float:
        """Return the mean held-out loss; infinity if a fit has no derivatives."""
        evaluation = self.evaluate(t)
        return float(evaluation.losses.mean()) if evaluation.is_reliable else math.inf

    def gradient(self, t: Array) -> Array:
        """Return dV/dt, the mean over the folds."""
        evaluation = self.evaluate(t)
        return np.mean([self._fold_gradient(fold, evaluation) for fold in range(self._folds)], axis=0)  # type: ignore[no-any-return]

    def hessian(self, t: Array) -> Array:
        """Return d²V/dt², the mean over the folds."""
        evaluation = self.evaluate(t)
        return np.mean([self._fold_hessian(fold, evaluation) for fold in range(self._folds)], axis=0)  # type: ignore[no-any-return]

    def _improve(self, fold: int, t: Array, fit: _Fit, survey: bool) -> None:
        """Fit one fold, to the precision that its held-out loss needs unless this is a survey.

        With the gradient g that a fit leaves, the error of V is gᵀH⁻¹∇V = gᵀv to first order.
        """
        problem, left_out = self._build(fold, np.exp(-t)[self._groups])
        tol = min(self._tol, self._needed_tol[fold])
        for _ in range(1 if survey else _MAX_FITS):
            start = np.zeros(problem.dim) if fit.w is None else fit.w
            result = minimize(problem, start, tol=tol, max_iter=self._max_iter, certify=False, method=self._method)
            fit.w, fit.iterations = result.x, fit.iterations + max(result.nit, 1)
            fit.loss, fit.converged = left_out.value(result.x), result.success
            if survey or not fit.converged:
                return
            fit.system = _system(problem, left_out, result.x)
            if fit.system is None:
                fit.converged = False
                return
            norm = max(float(np.linalg.norm(fit.system.adjoint)), np.finfo(np.float64).tiny)
            error = norm * float(np.linalg.norm(result.jac))
            self._needed_tol[fold] = _NEEDED_TOL_FRACTION * _LOSS_ERROR_TOLERANCE * fit.loss / norm
            fit.converged = error <= _MAX_LOSS_ERROR * fit.loss
            if error <= _LOSS_ERROR_TOLERANCE * fit.loss or tol <= _MIN_TOL:
                return
            tol = max(_MIN_TOL, min(_MAX_TOL_RATIO * tol, self._needed_tol[fold]))

    def _system(self, fold: int, evaluation: HeldOutEvaluation) -> tuple[Array, _System]:
        """Return the coefficients of a fit and its linear systems, which are formed again if they were dropped."""
        fit = evaluation.fits[fold]
        assert fit.w is not None
        if fit.system is None:
            fit.system = _system(*self._build(fold, np.exp(-evaluation.t)[self._groups]), fit.w)
        assert fit.system is not None
        return fit.w, fit.system

    def _strengths(self, problem: LinearSum) -> Array:
        """Return λ_g for the coefficients of group g in row g, and zero elsewhere."""
        rows = np.zeros((int(self._groups.max()) + 1, problem.columns, problem.dim // problem.columns))
        rows[self._groups, :, np.arange(problem.features)] = problem.penalty.strength[:, None]
        return rows.reshape(len(rows), -1)

    def _fold_gradient(self, fold: int, evaluation: HeldOutEvaluation) -> Array:
        """Return the gradient dV/dt of the held-out loss of one fold."""
        w, system = self._system(fold, evaluation)
        gradient: Array = self._strengths(system.problem) @ (w * system.adjoint)
        return gradient

    def _fold_hessian(self, fold: int, evaluation: HeldOutEvaluation) -> Array:
        """Return d²V/dt² of a fold, from H d²w = λ_g P_g dw_h + λ_h P_h dw_g − [g = h] λ_g P_g w − D³L[dw_g, dw_h]."""
        w, system = self._system(fold, evaluation)
        v, strengths = system.adjoint, self._strengths(system.problem)
        changes = evaluation.fits[fold].changes = np.array([system.solve(row * w) for row in strengths])
        product = system.left_out.hessian(w)
        curvature = np.array([changes @ product(change) for change in changes])
        mixed = (strengths * v) @ changes.T
        third = third_derivatives(system.problem, w, v, changes)
        hessian: Array = curvature + mixed + mixed.T - np.diag(strengths @ (w * v)) - third
        return hessian


def third_derivatives(problem: LinearSum, w: Array, v: Array, changes: Array) -> Array:
    """Return D³L[v, d_g, d_h] at w for all pairs of rows of `changes`, for the logistic or the softmax loss.

    The third derivative of log Σ e^z is the third central moment of the changes of z under softmax(z).
    """
    total = np.zeros((len(changes), len(changes)))
    size = max(1, _MAX_BLOCK_ENTRIES // (len(changes) * problem.columns))
    for begin in range(0, problem.n, size):
        part = problem.subset(np.arange(begin, min(begin + size, problem.n)))
        z, along = part.margins(w), part.margins(v)
        across = np.stack([part.margins(change) for change in changes])  # groups, rows, and classes if there are many
        moments = part.second_derivatives(z)
        if part.columns == 1:
            moments = -np.tanh(0.5 * z) * moments * along
        else:
            across = across - (moments * across).sum(axis=2, keepdims=True)
            moments = moments * (along - (moments * along).sum(axis=1, keepdims=True))
        if part.weights is not None:
            moments = (moments.T * part.weights).T
        across = across.reshape(len(changes), -1)
        total += (across * moments.reshape(-1)) @ across.T
    return total / problem.n


def _system(problem: LinearSum, left_out: LinearSum, w: Array) -> _System | None:
    """Return the linear systems of a fit; None if they cannot be solved."""
    solver = _solver(problem, w)
    if solver is None:
        return None
    adjoint = solver(left_out.value_and_gradient(w)[1])
    return _System(problem, left_out, solver, adjoint) if np.isfinite(adjoint).all() else None


def _solver(problem: LinearSum, w: Array) -> Callable[[Array], Array] | None:
    """Return u ↦ H⁻¹u at w; None if the Hessian is not positive definite up to roundoff."""
    if isinstance(problem.X, np.ndarray) and problem.dim <= _MAX_CHOLESKY_DIM:
        try:
            factor = cho_factor(problem.regular_hessian(w), lower=True)
        except (np.linalg.LinAlgError, ValueError):
            return None
        pivots = np.diagonal(factor[0]) ** 2
        if not pivots.min() > np.finfo(np.float64).eps * problem.dim * pivots.max():
            return None
        return lambda u: np.asarray(cho_solve(factor, u))
    product, space = problem.hessian(w), Space(problem.dim, torch.float64, torch.device("cpu"))
    no_pairs = RitzSpace(np.zeros(0))

    def solution(u: Array) -> Array:
        linear_solution = solve(
            lambda q: torch.from_numpy(product(q.numpy())), torch.from_numpy(u), space, no_pairs,
            eigenvalue_lower_bound=0.0, rtol=_LINEAR_SYSTEM_TOLERANCE,
        )  # fmt: skip
        is_solved = linear_solution.residual <= math.sqrt(_LINEAR_SYSTEM_TOLERANCE) * float(np.linalg.norm(u))
        return linear_solution.v.numpy() if is_solved else np.full(len(u), math.nan)

    return solution


def choose_strengths(loss: HeldOutLoss, groups: Array, lower: float, upper: float, *, verbose: bool) -> Choice:
    """Minimise the held-out loss over t in [lower, upper]: first one t for all features, then one for each group.

    Far from its minimum the loss is flat, so that a few values of one t give the start.
    """
    for fraction in _FIRST_POSITIONS:
        loss.evaluate(np.array([lower + fraction * (upper - lower)]), survey=True)
    result = _descend(loss, lower, upper, verbose)
    if groups.max() > 0:
        loss.split(groups)
        result = _descend(loss, lower, upper, verbose)
    return Choice(_best(loss), result)


def _best(loss: HeldOutLoss) -> HeldOutEvaluation:
    """Return the point of the smallest loss, of the reliable ones if there are any; of equal ones, the smallest C."""
    reliable = [evaluation for evaluation in loss.evaluations if evaluation.is_reliable]
    return min(reliable or loss.evaluations, key=lambda point: (float(point.losses.mean()), float(point.t.sum())))


def _descend(loss: HeldOutLoss, lower: float, upper: float, verbose: bool) -> Any:
    """Minimise from the best point so far; None if it has no derivatives."""
    start = loss.evaluate(_best(loss).t)
    if not start.is_reliable:
        return None
    return minimize(
        loss.value, start.t, jac=loss.gradient, hess=loss.hessian, bounds=[(lower, upper)] * len(start.t),
        tol=_SEARCH_GRADIENT_TOLERANCE * float(start.losses.mean()), max_iter=_MAX_SEARCH_ITERATIONS, certify=False,
        disp=verbose,
    )  # fmt: skip
