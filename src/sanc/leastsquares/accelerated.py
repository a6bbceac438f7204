"""Steps that follow the curvature of the residuals: "geodesic acceleration" (Transtrum and Sethna 2012).

Let s be the step with multiplier μ. To second order the residuals at x + s + a are r + Js + ½r''(s, s) + Ja, and
a = −½(B + μI)⁻¹Jᵀ r''(s, s) removes most of the third term. It costs one evaluation of the residuals and no further
factorisation. The predicted decrease remains that of s: ratio test and σ are unchanged, and longer steps pass the test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from sanc.core import cubic
from sanc.core.acceptance import RatioTest
from sanc.core.model import KrylovSubspace
from sanc.core.pieces import Decision, Subspace
from sanc.core.point import Point
from sanc.core.space import Floats, Vector
from sanc.leastsquares.oracle import Evaluation, ResidualOracle

DIFFERENCE_FRACTION = 0.1
"""Length, relative to the step, of the difference that gives r''(s, s): that of Transtrum and Sethna (2012)."""
MAX_CORRECTION = 0.75
"""Largest ‖a‖/‖s‖; beyond it the expansion is not reliable, and s is tried alone (Transtrum and Sethna 2012)."""
_STRAIGHT_RHO = 0.9
"""ρ below which the residuals are curved along a step, if no step was rejected before."""
_CURVED_STEPS = 6
"""Steps along which the residuals are curved before further ones are corrected: a short run needs no correction.

1, 3 and 6 have nearly the same evaluations on the development half; see docs/results/least-squares.md.
"""
_NEGLIGIBLE_MULTIPLIER = 1e-3
"""Ratio of the multiplier to the smallest eigenvalue below which σ does not limit the step, and none is corrected."""
_SAME_DIRECTION = 0.3
"""Largest part of a shorter step, relative to it, across a rejected one whose r''(s, s) is used again."""


def residual_parts(here: Point) -> tuple[ResidualOracle, Vector, Any, float]:
    """Return the oracle of the residuals, the point of all variables, the free ones, and the factor of f."""
    scaled, places = here.oracle.full_oracle, here.oracle.places
    oracle = scaled.unscaled_oracle
    assert isinstance(oracle, ResidualOracle)
    z, factor = here.oracle.full_point(here.x), math.ldexp(1.0, scaled.exponent)
    return oracle, z, None if places is None else places.numpy(), factor


def second_derivative(oracle: ResidualOracle, found: Evaluation, jacobian: Any, x: Any, s: Any) -> Floats:
    """Return r''(s, s) at x from one evaluation of the residuals."""
    near = oracle.residuals(oracle.unscaled(x + DIFFERENCE_FRACTION * s))
    linear = jacobian @ oracle.unscaled(s)
    second: Floats = (2.0 / DIFFERENCE_FRACTION**2) * (near - found.r - DIFFERENCE_FRACTION * linear)
    return second


@dataclass(frozen=True, slots=True)
class AcceleratedSubspace(KrylovSubspace):
    """The whole space of a dense Jacobian, with trial points x + s + a.

    Attributes
    ----------
    oracle, found, factor
        The oracle of the residuals, their evaluation at x, and the factor of f.
    face : Oracle
        That of the free variables.
    """

    oracle: Any = None
    found: Any = None
    factor: float = 1.0
    face: Any = None
    cached_second: list[tuple[Any, Floats]] = field(default_factory=list)  # a cache: the last step, and its r''(s, s)

    def trial_point(self, x: Vector, step: cubic.CubicStep) -> Vector:
        """Return x + s + a, or x + s if σ does not limit the step, or if a is too long or leads out of the box."""
        (s,) = self.krylov.combine(step.u)
        self.release()
        trial = s + x
        a = self._correction(x, s, step) if self.face.is_inside(trial) else None
        if a is None:
            return trial
        corrected = x + (s + a)
        return corrected if self.face.is_inside(corrected) else trial

    def _correction(self, x: Any, s: Any, step: cubic.CubicStep) -> Any:
        spectrum, found = self.spectrum, self.found
        if spectrum is None or not step.multiplier > _NEGLIGIBLE_MULTIPLIER * max(spectrum.leftmost, 0.0):
            return None
        second, weights = self._second_derivative(x, s), found.model_weights()
        columns = found.transposed(second if weights is None else weights * second)
        g = self.face.compress(self.oracle.variables.gradient(columns) * self.factor)
        u = -0.5 * (self.krylov.basis @ g) / (spectrum.values + step.multiplier)
        if not np.linalg.norm(u) <= MAX_CORRECTION * step.norm:
            return None
        return self.krylov.combine(u)[0]

    def _second_derivative(self, x: Any, s: Any) -> Floats:
        """Return r''(s, s), of a step along a rejected one without an evaluation."""
        for before, second in self.cached_second:
            ratio = float(s @ before) / float(before @ before)
            if np.linalg.norm(s - ratio * before) <= _SAME_DIRECTION * np.linalg.norm(s):
                return ratio * ratio * second
        z, change = self.face.full_point(x), self.face.full_step(s)
        second = second_derivative(self.oracle, self.found, self.found.jacobian, z, change)
        self.cached_second[:] = [(s, second)]
        return second


def accelerated(here: Point, subspace: KrylovSubspace) -> KrylovSubspace:
    """Return a subspace with corrected steps where the residuals were curved along the last steps.

    At a stationary point and without a step it is the same subspace.
    """
    is_curved = here.state.rule_state.get(CurvatureTest.CURVED, 0.0) >= _CURVED_STEPS
    if not is_curved or subspace.step is None or here.start is not None:
        return subspace
    oracle, z, _, factor = residual_parts(here)
    if oracle.full:
        return subspace
    shared = {item.name: getattr(subspace, item.name) for item in fields(KrylovSubspace)}
    found = oracle.with_jacobian(z)
    return AcceleratedSubspace(**shared, oracle=oracle, found=found, factor=factor, face=here.oracle)


@dataclass(frozen=True, kw_only=True)
class CurvatureTest(RatioTest):
    """The ratio test, which also counts the steps along which the residuals are curved.

    They are if a step was rejected, or ρ shows that the model overestimated the decrease. The count starts again after
    a step that σ does not limit.
    """

    CURVED = "curved"

    def __call__(self, here: Point, subspace: Subspace, step: cubic.CubicStep, trial: Vector, trials: int) -> Decision:
        """Form ρ, accept or reject the step, and count it if the residuals are curved along it."""
        decision = super().__call__(here, subspace, step, trial, trials)
        if decision.point is None:
            return decision
        is_limited = step.multiplier > _NEGLIGIBLE_MULTIPLIER * max(subspace.ritz_value, 0.0)
        is_curved = trials > 0 or decision.rho < _STRAIGHT_RHO
        before = here.state.rule_state.get(self.CURVED, 0.0)
        count = before + is_curved if is_limited else 0.0
        return decision if count == before else replace(decision, rule_state={self.CURVED: count})
