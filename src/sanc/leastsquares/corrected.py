"""The cubic model of the residuals of a network, whose steps follow the curvature of the residuals.

Let s be the step with multiplier μ. To second order the residuals at x + s + a are r + Js + ½r''(s, s) + Ja, and
a = −½(B + μI)⁻¹Jᵀ r''(s, s) removes most of the third term ("geodesic acceleration", Transtrum and Sethna 2012). It
costs one evaluation of the residuals and no further factorisation. The predicted decrease remains that of s: ratio test
and σ are unchanged, and longer steps pass the test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core import cubic
from sanc.core.bounds import FaceOracle
from sanc.core.krylov import NonFiniteProductError
from sanc.core.model import CubicModel, KrylovSubspace, with_units
from sanc.core.point import Point
from sanc.core.scaled import ScaledOracle
from sanc.core.space import Floats, Vector
from sanc.leastsquares.matrices import GramSpace, JacobianMatrix
from sanc.leastsquares.model import JacobianModel
from sanc.leastsquares.oracle import Evaluation, ResidualOracle

_DIFFERENCE = 0.1
"""Length, relative to the step, of the difference that gives r''(s, s): that of Transtrum and Sethna (2012)."""
_MAX_CORRECTION = 0.75
"""Largest ‖a‖/‖s‖; beyond it the expansion is not reliable, and s is tried alone (Transtrum and Sethna 2012)."""


@dataclass(frozen=True, slots=True)
class CorrectedSubspace(KrylovSubspace):
    """The space of a dense Jacobian, with trial points x + s + a."""

    oracle: ResidualOracle | None = None
    found: Evaluation | None = None
    jacobian: JacobianMatrix | None = None
    factor: float = 1.0

    def trial_point(self, x: Vector, step: cubic.CubicStep) -> Vector:
        """Return x + s + a, or x + s if a is too long."""
        (s,) = self.krylov.combine(step.u)
        u = self._correction(x, s, step)
        return x + (s if u is None else s + self.krylov.combine(u)[0])

    def _correction(self, x: Any, s: Any, step: cubic.CubicStep) -> Floats | None:
        """Return a in the eigenbasis; None if there are bounds, or if it is too long."""
        oracle, found, space = self.oracle, self.found, self.krylov
        if oracle is None or found is None:
            return None
        assert isinstance(space, GramSpace)
        near = oracle.residuals(oracle.unscaled(x + _DIFFERENCE * s))
        linear = self.jacobian @ oracle.unscaled(s)
        second = (2.0 / _DIFFERENCE**2) * (near - found.r - _DIFFERENCE * linear)
        weights = found.model_weights()
        projections = space.project(second if weights is None else np.sqrt(weights) * second)
        u = -0.5 * self.factor**0.5 * projections / (space.values + step.multiplier)
        return u if np.linalg.norm(u) <= _MAX_CORRECTION * step.norm else None


@dataclass(frozen=True, kw_only=True)
class CorrectedModel(JacobianModel):
    """Minimises the model in the whole space, from the smaller Gram matrix of a stored Jacobian.

    The settings are those of `CubicModel`. If the Jacobian is not stored, or the model needs the whole Hessian, the
    model is that of the Krylov space.
    """

    def build(self, here: Point) -> KrylovSubspace:
        """Return the whole space, with the minimiser of the model in it."""
        oracle, z, places, factor = _residual_parts(here)
        found = oracle.with_jacobian(z)
        jacobian = found.jacobian
        if oracle.full or not isinstance(jacobian, JacobianMatrix):
            return CubicModel.build(self, here)
        weights = found.model_weights()
        krylov = jacobian.decompose(oracle.scale, places, weights, factor)
        krylov.set_gradient(*_gradient(here, found, krylov, weights, factor))
        values, projections = krylov.values, krylov.projected_gradient
        norm = float(np.linalg.norm(projections))
        product_norm = float(np.linalg.norm(values * projections)) / norm if norm > 0.0 else float(values[-1])
        spectrum = cubic.Spectrum(values, np.eye(len(values)))
        corrected: dict[str, Any] = {"oracle": oracle, "found": found, "jacobian": jacobian, "factor": factor}
        corrected = {} if isinstance(here.oracle, FaceOracle) else corrected
        subspace = CorrectedSubspace(
            self, krylov, here.oracle.hessian(here.x), spectrum, here.state.sigma, here.units, **corrected
        )
        return self.with_step(here, with_units(self, here, subspace, product_norm))


def _residual_parts(here: Point) -> tuple[ResidualOracle, Vector, Any, float]:
    """Return the oracle of the residuals, the point of all variables, the free ones, and the factor of f."""
    oracle: Any = here.oracle
    z, places, factor = here.x, None, 1.0
    if isinstance(oracle, FaceOracle):
        z, places, oracle = oracle.full(z), oracle.places, oracle.inner
    if isinstance(oracle, ScaledOracle):
        oracle, factor = oracle.inner, oracle.factor
    assert isinstance(oracle, ResidualOracle)
    return oracle, z, None if places is None else places.numpy(), factor


def _gradient(
    here: Point, found: Evaluation, krylov: GramSpace, weights: Floats | None, factor: float
) -> tuple[Floats, float, bool]:
    """Return the gradient in the eigenbasis, its norm, and whether it is the start of the space."""
    if weights is None:
        projections = factor**0.5 * krylov.project(found.r)
    else:  # rows of weight 0 have a gradient, too
        projections = krylov.coordinates(np.asarray(here.g))
    if not np.isfinite(projections).all():
        raise NonFiniteProductError("the gradient is not finite")
    return projections, here.grad_norm, here.start is None and here.grad_norm > 0.0
