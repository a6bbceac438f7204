"""The cubic model of a least-squares problem with a dense Jacobian, in the whole space of its free variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from sanc.core import cubic
from sanc.core.bounds import FaceOracle
from sanc.core.judge import Judge, SigmaUpdate, Verdict
from sanc.core.krylov import Krylov, NonFiniteProductError
from sanc.core.model import CubicModel, KrylovSubspace, with_units
from sanc.core.oracle import Operator
from sanc.core.point import Point
from sanc.core.scaled import ScaledOracle
from sanc.core.space import Floats, Vector
from sanc.core.units import Units
from sanc.leastsquares.oracle import Evaluation, ResidualOracle


class EigenSpace(Krylov):
    """The whole space in the eigenbasis of B: T is diagonal, and the space invariant."""

    def __init__(self, values: Floats, rows: Floats, projections: Floats, start_norm: float, at_gradient: bool) -> None:
        self.start_norm = start_norm
        self.alpha = values.tolist()
        self.beta = [0.0] * len(values)
        self._rows, self._projections, self._at_gradient = rows, projections, at_gradient
        self._pivot = float(values[0])

    @property
    def starts_at_gradient(self) -> bool:
        return self._at_gradient

    @property
    def projected_gradient(self) -> Floats:
        return self._projections

    @property
    def basis(self) -> Any:
        return self._rows

    @property
    def is_complete(self) -> bool:
        return True

    def combine(self, *coefficients: Floats) -> Any:
        return [(c @ self._rows).astype(self._rows.dtype, copy=False) for c in coefficients]


_MAX_GROWTH = 2.0
"""Largest growth of the step norm, as in trust-region methods; with 3, the fits of NIST take twice the evaluations."""
_FIRST_SIGMA = 1e-12
"""The initial σ relative to that of `minimize`, with which the first step is that of Gauss and Newton."""


@dataclass(frozen=True, slots=True)
class GaussNewtonJudge(Judge):
    """Rules for σ with which steps are those of Gauss and Newton as long as they succeed.

    In ill-conditioned fits a step has components along strong and weak singular vectors. The model error of the strong
    ones determines the cubic coefficient κ along the step, and with that σ the weak ones would hardly move. So after a
    very successful step σ does not limit the next one, as in trust-region methods, and only the norm of the last step
    does.
    """

    def after_trial(
        self,
        sigma: float,
        verdict: Verdict,
        actual: float,
        predicted: float,
        step_norm: float,
        grad_norm: float,
        rounding: float = 0.0,
    ) -> float:
        """Return σ after a trial step: after a very successful one, the smallest that one step allows."""
        if verdict is Verdict.VERY_SUCCESSFUL:
            return self.bounded(self._min_factor * sigma)
        return Judge.after_trial(self, sigma, verdict, actual, predicted, step_norm, grad_norm, rounding)


@dataclass(frozen=True, kw_only=True)
class GaussNewtonSigma(SigmaUpdate):
    """The rule for σ of least squares; settings are those of `SigmaUpdate`."""

    def judge(self, eps: float, *, exact: bool = False) -> GaussNewtonJudge:
        """Return the rules for numbers of precision `eps`."""
        rules = super().judge(eps, exact=exact)
        return GaussNewtonJudge(**{item.name: getattr(rules, item.name) for item in fields(rules)})


@dataclass(frozen=True, kw_only=True)
class DenseModel(CubicModel):
    """Minimises the cubic model in the whole space, from the singular values of the Jacobian.

    A QR decomposition of the Jacobian and the residuals, and the singular values of R, give eigenvalues and gradient of
    the Gauss–Newton matrix to a relative precision that JᵀJ itself does not have. If the Jacobian is no matrix, the
    model is that of the Krylov space.
    """

    def max_step_norm(self, here: Point, first_units: Units) -> float:
        """Return the limit on the step norm: ‖z‖ at the first point, then twice the last step."""
        if here.state.last_step_norm == 0.0:
            return here.norm or first_units.length
        return _MAX_GROWTH * here.state.last_step_norm

    def with_step(self, here: Point, subspace: KrylovSubspace) -> KrylovSubspace:
        """Return the subspace with the minimiser of the model; σ is raised if the step exceeds `max_step_norm`."""
        spectrum, krylov, max_norm = subspace.spectrum, subspace.krylov, subspace.max_step_norm
        assert spectrum is not None
        sigma = subspace.sigma * (_FIRST_SIGMA if here.state.iteration == 0 else 1.0)
        solve = partial(self._solve, here, krylov, spectrum)
        step = solve(sigma)
        if step.norm > max_norm:
            lower_bound = cubic.sigma_lower_bound(spectrum, krylov.projected_gradient, step, max_norm)
            step = here.judge.limit_step(step, sigma, solve, max_norm, lower_bound)
        return replace(subspace, sigma=step.sigma, sigma_untested=False, step=step)

    def build(self, here: Point) -> KrylovSubspace:
        """Return the whole space, with the minimiser of the model in it."""
        oracle, z, places, factor = residual_parts(here)
        found = oracle.with_jacobian(z)
        if not found.is_dense:
            return super().build(here)
        operator = here.oracle.hessian(here.x)
        subspace = KrylovSubspace(self, None, operator, None, here.state.sigma, here.units)  # type: ignore[arg-type]
        try:
            if oracle.full:
                values, rows = _eigenpairs_of(operator, here.space.dim)
                projections = rows @ np.asarray(here.g)
            else:
                values, rows, projections = _decompose(oracle, found, places, factor)
        except (NonFiniteProductError, np.linalg.LinAlgError) as error:
            raise NonFiniteProductError(str(error)) from error
        at_gradient = here.start is None and here.grad_norm > 0.0
        krylov = EigenSpace(values, rows.astype(here.space.dtype, copy=False), projections, here.grad_norm, at_gradient)
        norm = float(np.linalg.norm(projections))
        product_norm = (
            float(np.linalg.norm(values * projections)) / norm if at_gradient else float(np.abs(values).max())
        )
        spectrum = cubic.Spectrum(values, np.eye(len(values)))
        subspace = KrylovSubspace(self, krylov, operator, spectrum, here.state.sigma, here.units)
        return self.with_step(here, with_units(self, here, subspace, product_norm))


def residual_parts(here: Point) -> tuple[ResidualOracle, Vector, Any, float]:
    """Return the oracle of the residuals, the point of all variables, the free ones, and the factor of f."""
    oracle: Any = here.oracle
    z, places, factor = here.x, None, 1.0
    if isinstance(oracle, FaceOracle):
        z, places, oracle = oracle.full(z), oracle.places, oracle.inner
    if isinstance(oracle, ScaledOracle):
        oracle, factor = oracle.inner, oracle.factor
    assert isinstance(oracle, ResidualOracle)
    return oracle, z, None if places is None else places.numpy(), factor


def _decompose(
    oracle: ResidualOracle, found: Evaluation, places: Sequence[int] | None, factor: float
) -> tuple[Floats, Floats, Floats]:
    """Return eigenvalues, eigenvectors as rows, and the gradient in their basis."""
    columns = found.jacobian * oracle.scale
    columns = np.asarray(columns if places is None else columns[:, places], np.float64)
    weights = found.model_weights()
    if weights is not None:
        gradient = columns.T @ found.terms.weighted
        columns = np.sqrt(weights)[:, None] * columns
    n = columns.shape[1]
    extended = np.column_stack([columns, found.r]) if weights is None else columns
    if not np.isfinite(extended).all():
        raise NonFiniteProductError("the Jacobian is not finite")
    triangle: Any = np.linalg.qr(extended, mode="r")
    left, singular, rows = np.linalg.svd(triangle[:n, :n])
    values = np.zeros(n)
    values[: len(singular)] = singular * singular
    if weights is None:
        projections = np.zeros(n)
        projections[: len(singular)] = singular * (left.T @ triangle[:n, n])[: len(singular)]
    else:
        projections = rows @ gradient
    if oracle.term.is_used and oracle.term.is_estimated:
        second = oracle.term.matrix * np.outer(oracle.scale, oracle.scale)
        second = second if places is None else second[np.ix_(places, places)]
        values, vectors = np.linalg.eigh(np.diag(values) + rows @ second @ rows.T)
        rows, projections = vectors.T @ rows, vectors.T @ projections
    else:
        values, rows, projections = values[::-1].copy(), rows[::-1].copy(), projections[::-1].copy()
    return values * factor, rows, projections * factor


def _eigenpairs_of(operator: Operator, dim: int) -> tuple[Floats, Floats]:
    """Return the eigenvalues and eigenvectors, as rows, of an operator."""
    matrix = np.stack([np.asarray(operator(column), np.float64) for column in np.eye(dim)])
    if not np.isfinite(matrix).all():
        raise NonFiniteProductError("the Hessian is not finite")
    values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
    return values, np.ascontiguousarray(vectors.T)
