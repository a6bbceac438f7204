"""The cubic model of the residuals of a network, whose steps follow the curvature of the residuals.

`sanc.leastsquares.accelerated` describes the correction, which every step has here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core.dense import product_norm
from sanc.core.model import CubicModel, KrylovSubspace, step_control
from sanc.core.point import Point
from sanc.core.space import Floats, Vector
from sanc.core.spectrum import cubic
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.leastsquares.accelerated import MAX_CORRECTION, residual_point, second_derivative
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.jacobian_model import JacobianModel
from sanc.leastsquares.matrices import GramSpace, JacobianMatrix
from sanc.leastsquares.oracle import ResidualOracle, has_whole_hessian


@dataclass(frozen=True, slots=True)
class NetworkSubspace(KrylovSubspace):
    """The space of a dense Jacobian, with trial points x + s + a.

    Attributes
    ----------
    oracle : ResidualOracle or None
        The oracle of the residuals; None: steps are not corrected.
    evaluation : ResidualEvaluation or None
        The residuals at x.
    jacobian : JacobianMatrix or None
        Their Jacobian.
    scale_of_f : float
        The power of two by which f is multiplied.
    """

    oracle: ResidualOracle | None = None
    evaluation: ResidualEvaluation | None = None
    jacobian: JacobianMatrix | None = None
    scale_of_f: float = 1.0

    def trial_point(self, x: Vector, step: cubic.CubicStep) -> Vector:
        """Return x + s + a, or x + s if a is too long."""
        (s,) = self.krylov.combine(step.u)
        u = self._correction(x, s, step)
        return x + (s if u is None else s + self.krylov.combine(u)[0])

    def _correction(self, x: Any, s: Any, step: cubic.CubicStep) -> Floats | None:
        """Return a in the eigenbasis; None if there are bounds, or if it is too long."""
        oracle, evaluation, space = self.oracle, self.evaluation, self.krylov
        if oracle is None or evaluation is None:
            return None
        assert isinstance(space, GramSpace)
        second = second_derivative(oracle, evaluation, self.jacobian, x, s)
        weights = evaluation.model_weights()
        projections = space.project(second if weights is None else np.sqrt(weights) * second)
        u = -0.5 * self.scale_of_f**0.5 * projections / (space.values + step.multiplier)
        return u if np.linalg.norm(u) <= MAX_CORRECTION * step.norm else None


@dataclass(frozen=True, kw_only=True)
class NetworkModel(JacobianModel):
    """Minimises the model in the whole space, from the smaller Gram matrix of a stored Jacobian.

    It has the settings of `CubicModel`. If the Jacobian is not stored, or the model needs the whole Hessian, the
    step is made in the Krylov space.
    """

    def build(self, here: Point) -> KrylovSubspace:
        """Return the whole space, with the minimiser of the model in it."""
        oracle, z, free_indices, scale_of_f = residual_point(here)
        evaluation = oracle.with_jacobian(z)
        jacobian = evaluation.jacobian
        if has_whole_hessian(here.oracle) or not isinstance(jacobian, JacobianMatrix):
            return CubicModel.build(self, here)
        weights = evaluation.model_weights()
        krylov = jacobian.decompose(oracle.scale, free_indices, weights, scale_of_f)
        krylov.projected_gradient = _gradient(here, evaluation, krylov, weights, scale_of_f)
        values, projections = krylov.values, krylov.projected_gradient
        spectrum = cubic.Spectrum(values, np.eye(len(values)))
        corrected: dict[str, Any] = {
            "oracle": oracle,
            "evaluation": evaluation,
            "jacobian": jacobian,
            "scale_of_f": scale_of_f,
        }
        corrected = {} if here.oracle.box is not None else corrected
        has_gradient = bool(np.linalg.norm(projections) > 0.0)
        control = step_control(self, here, product_norm(values, projections, has_gradient))
        step, control = self.limited_step(here, krylov, spectrum, control)
        return NetworkSubspace(self, krylov, here.oracle.hessian(here.x), spectrum, *control, step, **corrected)


def _gradient(
    here: Point, evaluation: ResidualEvaluation, krylov: GramSpace, weights: Floats | None, scale_of_f: float
) -> Floats:
    """Return the gradient in the eigenbasis."""
    projections: Floats
    if weights is None:
        projections = scale_of_f**0.5 * krylov.project(evaluation.r)
    else:  # rows of weight 0 have a gradient, too
        projections = krylov.coordinates(np.asarray(here.g))
    if not np.isfinite(projections).all():
        raise NonFiniteProductError("the gradient is not finite")
    return projections
