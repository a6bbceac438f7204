"""Steps that follow the curvature of the residuals: "geodesic acceleration" (Transtrum and Sethna 2012).

Let s be the step with multiplier μ. To second order the residuals at x + s + a are r + Js + ½r''(s, s) + Ja, and
a = −½(B + μI)⁻¹Jᵀ r''(s, s) removes most of the third term. It costs one evaluation of the residuals and no further
factorisation. The predicted decrease remains that of s: ratio test and σ are unchanged, and longer steps pass the test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from sanc.core.acceptance import RatioTest
from sanc.core.model import KrylovSubspace
from sanc.core.oracle import Oracle
from sanc.core.pieces import Decision, Subspace
from sanc.core.point import Point
from sanc.core.space import Floats, Vector
from sanc.core.spectrum import cubic
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.oracle import ResidualOracle, has_whole_hessian, residual_oracle

DIFFERENCE_FRACTION = 0.1
"""Size, relative to the step, of the difference that gives r''(s, s), as in Transtrum and Sethna (2012)."""
MAX_CORRECTION = 0.75
"""Largest ‖a‖/‖s‖; beyond it the expansion is not reliable, and s is tried alone (Transtrum and Sethna 2012)."""
_STRAIGHT_RHO = 0.9
"""ρ below which the residuals are curved along a step, if no step was rejected before."""
_MIN_CURVED_STEPS = 6
"""Steps along which the residuals are curved before further ones are corrected: a short run needs no correction.

1, 3 and 6 have nearly the same evaluations on the development half; see docs/results/least-squares.md.
"""
_NEGLIGIBLE_MULTIPLIER = 1e-3
"""Ratio of the multiplier to the smallest eigenvalue below which σ does not limit the step, and none is corrected."""
_SAME_DIRECTION_TOLERANCE = 0.3
"""Largest part of a shorter step, relative to it, across a rejected one whose r''(s, s) is used again."""


class ResidualPoint(NamedTuple):
    """A point of an iteration as a point of the residuals.

    Attributes
    ----------
    oracle : ResidualOracle
        The oracle of the residuals.
    z : vector
        The point, with all variables.
    free_indices : ndarray or None
        The indices of the free variables; None: all.
    scale_of_f : float
        The power of two by which f is multiplied.
    """

    oracle: ResidualOracle
    z: Vector
    free_indices: Any
    scale_of_f: float


def residual_point(here: Point) -> ResidualPoint:
    """Return the point of an iteration as a point of the residuals."""
    oracle, free_indices = here.oracle, here.oracle.free_indices
    return ResidualPoint(
        residual_oracle(oracle),
        oracle.full_point(here.x),
        None if free_indices is None else free_indices.numpy(),
        math.ldexp(1.0, oracle.full_oracle.exponent),
    )


def second_derivative(oracle: ResidualOracle, evaluation: ResidualEvaluation, jacobian: Any, x: Any, s: Any) -> Floats:
    """Return r''(s, s) at x from one evaluation of the residuals."""
    near = oracle.residuals(oracle.unscaled(x + DIFFERENCE_FRACTION * s))
    linear = jacobian @ oracle.unscaled(s)
    second: Floats = (2.0 / DIFFERENCE_FRACTION**2) * (near - evaluation.r - DIFFERENCE_FRACTION * linear)
    return second


class ResidualCurvature:
    """Evaluates r''(s, s) at one point; once for a step and shorter ones along nearly the same direction.

    Parameters
    ----------
    oracle, evaluation
        The oracle of the residuals, and their evaluation at the point.
    face : Oracle
        That of the free variables.
    """

    def __init__(self, oracle: ResidualOracle, evaluation: ResidualEvaluation, face: Oracle) -> None:
        self.oracle, self.evaluation, self.face = oracle, evaluation, face
        self._last: tuple[Any, Floats] | None = None  # the last step that was evaluated, and its r''(s, s)

    def __call__(self, x: Any, s: Any) -> Floats:
        """Return r''(s, s)."""
        if self._last is not None:
            last_step, last_second = self._last
            ratio = float(s @ last_step) / float(last_step @ last_step)
            if np.linalg.norm(s - ratio * last_step) <= _SAME_DIRECTION_TOLERANCE * np.linalg.norm(s):
                return ratio * ratio * last_second
        z, change = self.face.full_point(x), self.face.full_step(s)
        second = second_derivative(self.oracle, self.evaluation, self.evaluation.jacobian, z, change)
        self._last = s, second
        return second


@dataclass(frozen=True, slots=True)
class AcceleratedSubspace(KrylovSubspace):
    """The whole space of a dense Jacobian, with trial points x + s + a.

    Attributes
    ----------
    curvature : ResidualCurvature
        Evaluates r''(s, s) at x.
    scale_of_f : float
        The power of two by which f is multiplied.
    """

    curvature: Any = None
    scale_of_f: float = 1.0

    def trial_point(self, x: Vector, step: cubic.CubicStep) -> Vector:
        """Return x + s + a, or x + s if σ does not limit the step, or if a is too long or leads out of the box."""
        (s,) = self.krylov.combine(step.u)
        trial = s + x
        face = self.curvature.face
        a = self._correction(x, s, step) if face.is_inside(trial) else None
        if a is None:
            return trial
        corrected = x + (s + a)
        return corrected if face.is_inside(corrected) else trial

    def _correction(self, x: Any, s: Any, step: cubic.CubicStep) -> Any:
        """Return a for a step s; None if σ does not limit the step, or if a is too long."""
        spectrum, curvature = self.spectrum, self.curvature
        if spectrum is None or not step.multiplier > _NEGLIGIBLE_MULTIPLIER * max(spectrum.leftmost, 0.0):
            return None
        second, weights = curvature(x, s), curvature.evaluation.model_weights()
        columns = curvature.evaluation.transposed(second if weights is None else weights * second)
        g = curvature.face.compress(curvature.oracle.variables.gradient(columns) * self.scale_of_f)
        u = -0.5 * (self.krylov.basis @ g) / (spectrum.values + step.multiplier)
        if not np.linalg.norm(u) <= MAX_CORRECTION * step.norm:
            return None
        return self.krylov.combine(u)[0]


def accelerated(here: Point, subspace: KrylovSubspace) -> KrylovSubspace:
    """Return a subspace with corrected steps where the residuals were curved along the last steps.

    At a stationary point and without a step it is the same subspace.
    """
    is_curved = here.state.acceptance_state.get(CountingRatioTest.CURVED, 0.0) >= _MIN_CURVED_STEPS
    if not is_curved or subspace.step is None or here.lanczos_start is not None:
        return subspace
    if has_whole_hessian(here.oracle):
        return subspace
    oracle, z, _, scale_of_f = residual_point(here)
    shared = {item.name: getattr(subspace, item.name) for item in fields(KrylovSubspace)}
    curvature = ResidualCurvature(oracle, oracle.with_jacobian(z), here.oracle)
    return AcceleratedSubspace(**shared, curvature=curvature, scale_of_f=scale_of_f)


@dataclass(frozen=True, kw_only=True)
class CountingRatioTest(RatioTest):
    """The ratio test, which also counts the steps along which the residuals are curved.

    They are if a step was rejected, or ρ shows that the model overestimated the decrease. The count starts again after
    a step that σ does not limit.
    """

    CURVED = "curved"

    def __call__(
        self, here: Point, subspace: Subspace, step: cubic.CubicStep, trial: Vector, trial_count: int
    ) -> Decision:
        """Form ρ, accept or reject the step, and count it if the residuals are curved along it."""
        decision = super().__call__(here, subspace, step, trial, trial_count)
        if decision.point is None:
            return decision
        is_limited = step.multiplier > _NEGLIGIBLE_MULTIPLIER * max(subspace.ritz_value, 0.0)
        is_curved = trial_count > 0 or decision.rho < _STRAIGHT_RHO
        before = here.state.acceptance_state.get(self.CURVED, 0.0)
        count = before + is_curved if is_limited else 0.0
        return decision if count == before else replace(decision, acceptance_state={self.CURVED: count})
