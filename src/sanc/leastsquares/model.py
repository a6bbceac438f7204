"""The cubic model of a least-squares problem with a dense Jacobian, in the whole space of its free variables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from sanc.core import cubic
from sanc.core.krylov import Krylov
from sanc.core.model import CubicModel, KrylovSubspace, with_units
from sanc.core.oracle import Eigenbasis
from sanc.core.point import Point
from sanc.core.ratio import Verdict
from sanc.core.sigma import SigmaRule, SigmaUpdate
from sanc.core.space import Floats
from sanc.core.units import FIRST_SIGMA, Units


class EigenSpace(Krylov):
    """The whole space in the eigenbasis of B: T is diagonal, and the space invariant."""

    def __init__(self, basis: Eigenbasis, rows: Any, start_norm: float, at_gradient: bool) -> None:
        self.start_norm = start_norm
        self.alpha = basis.values.tolist()
        self.beta = [0.0] * len(self.alpha)
        self._rows, self._projections, self._at_gradient = rows, basis.projections, at_gradient
        self._pivot = self.alpha[0]

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


MAX_GROWTH = 2.0
"""Largest growth of the step norm, as in trust-region methods; with 3, the fits of NIST take twice the evaluations."""
FIRST_SIGMA_FACTOR = 1e-12
"""The initial σ relative to that of `minimize`, with which the first step is that of Gauss and Newton."""


@dataclass(frozen=True, slots=True)
class GaussNewtonRule(SigmaRule):
    """The rule for σ with which steps are those of Gauss and Newton as long as they succeed.

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
        return SigmaRule.after_trial(self, sigma, verdict, actual, predicted, step_norm, grad_norm, rounding)


@dataclass(frozen=True, kw_only=True)
class GaussNewtonSigma(SigmaUpdate):
    """The rule for σ of least squares; settings are those of `SigmaUpdate`."""

    rules = GaussNewtonRule


@dataclass(frozen=True, kw_only=True)
class DenseModel(CubicModel):
    """Minimises the cubic model in the whole space if the oracle knows its eigenbasis; otherwise in a Krylov space."""

    first_sigma = FIRST_SIGMA_FACTOR * FIRST_SIGMA
    tries_longer_steps = False
    limits_newton_steps = True

    def max_step_norm(self, here: Point, first_units: Units) -> float:
        """Return the limit on the step norm: ‖z‖ at the first point, then twice the last step."""
        if here.state.last_step_norm == 0.0:
            return here.norm or first_units.length
        return MAX_GROWTH * here.state.last_step_norm

    def build(self, here: Point) -> KrylovSubspace:
        """Return the whole space, with the minimiser of the model in it."""
        basis = here.oracle.eigenbasis(here.x)
        if basis is None:
            return super().build(here)
        at_gradient = here.start is None and here.grad_norm > 0.0
        rows = basis.rows.astype(here.space.dtype, copy=False)
        krylov = EigenSpace(basis, rows, here.grad_norm, at_gradient)
        spectrum = cubic.Spectrum(basis.values, _identity(len(basis.values)))
        operator = here.oracle.hessian(here.x)
        subspace = KrylovSubspace(self, krylov, operator, spectrum, here.state.sigma, here.units)
        product_norm = 0.0 if here.units.length else _product_norm(basis, at_gradient)
        return self.with_step(here, with_units(self, here, subspace, product_norm))


@cache
def _identity(dim: int) -> Floats:
    """Return the identity matrix, which is not to be changed."""
    matrix = np.eye(dim)
    matrix.setflags(write=False)
    return matrix


def _product_norm(basis: Eigenbasis, at_gradient: bool) -> float:
    """Return ‖Bq‖ along the gradient, or the norm of B."""
    if at_gradient:
        return float(np.linalg.norm(basis.values * basis.projections) / np.linalg.norm(basis.projections))
    return float(np.abs(basis.values).max())
