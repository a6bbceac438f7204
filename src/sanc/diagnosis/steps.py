"""Trial steps of `diagnose`: along negative curvature, along the gradient, and along both extreme eigenvectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core.space import Floats, Vector
from sanc.diagnosis.curvature import CurvatureMeasurement
from sanc.diagnosis.gradients import GradientMeasurement, NetworkLoss

_FIRST_STEP_FRACTION, _MAX_STEP_RATIO = 1e-3, 10.0
"""First and longest step along negative curvature, relative to ‖x‖ or to the step at which the quadratic model lowers
the loss to zero, whichever is shorter and longer. The step is doubled as long as the loss decreases."""
_MIN_VISIBLE_DECREASE = 10.0
"""Relative decrease of the loss by the quadratic model, in units of eps, below which a step cannot be rejected."""
_BFLOAT16_EPS = 2.0**-8
"""Machine precision of bfloat16, for losses under autocast or on a GPU."""
_PROFILE_POINTS = 11
"""Points of each loss profile."""


@dataclass(frozen=True)
class StepMeasurement:
    """What steps from the parameters do to the loss.

    Attributes
    ----------
    gradient_decrease, curvature_decrease : float
        The decrease of the loss by a gradient step, and by a step along negative curvature.
    curvature_step_norm : float
        The norm of the latter.
    profiles : dict
        The loss along lines through the parameters, by the name of the direction: positions, and losses there.
    """

    gradient_decrease: float
    curvature_decrease: float
    curvature_step_norm: float
    profiles: dict[str, tuple[Floats, Floats]]


def measure_steps(
    network: NetworkLoss, at_x: GradientMeasurement, curvature: CurvatureMeasurement, spectral_norm: float
) -> StepMeasurement:
    """Return the decrease of the held-out loss by both steps, and the profiles of the loss.

    The gradient step is the gradient divided by `spectral_norm`. It is left out without a positive, finite norm.
    """
    extremes, trials = curvature.extremes, TrialSteps(network, at_x)
    curvature_decrease = curvature_step_norm = math.nan
    if extremes.lambda_min + extremes.ritz_error < 0.0 and not network.time_is_up():
        step, curvature_step_norm = trials.best_along(curvature.leftmost, extremes.lambda_min)
        curvature_decrease = trials.held_out_decrease(step)
    gradient_decrease = math.nan
    if 0.0 < spectral_norm < math.inf and not network.time_is_up():
        gradient_decrease = trials.held_out_decrease(trials.gradient * (-1.0 / spectral_norm))
    return StepMeasurement(
        gradient_decrease=gradient_decrease,
        curvature_decrease=curvature_decrease,
        curvature_step_norm=curvature_step_norm,
        profiles={
            "lambda_min": trials.profile(curvature.leftmost, extremes.lambda_min),
            "lambda_max": trials.profile(curvature.rightmost, extremes.lambda_max),
        },
    )


@dataclass(frozen=True)
class TrialSteps:
    """Evaluates the losses at the ends of steps from the parameters."""

    network: NetworkLoss
    at_x: GradientMeasurement

    @property
    def gradient(self) -> Vector:
        """The gradient, on the device of the parameters."""
        return self.at_x.gradient.to(self.network.x.device)

    def held_out_decrease(self, step: Any) -> float:
        """Return the decrease of the held-out loss by a step; NaN without held-out batches."""
        if self.network.held_out is None:
            return math.nan
        return self.at_x.held_out_value - self.network.held_out_value(self.network.x + step)

    def best_along(self, eigenvector: Any, eigenvalue: float) -> tuple[Vector, float]:
        """Return the step along negative curvature with the least loss on the data, and its norm.

        The norm is doubled until the loss increases or the time is up. It is 0 if no step lowers the loss.
        """
        network, space = self.network, self.network.oracle.space
        ascends = space.dot(self.gradient, eigenvector) > 0.0
        direction = eigenvector * -1.0 if ascends else eigenvector
        natural = self._natural_norm(eigenvalue) or 1.0
        x_norm = space.norm(network.x) or natural
        visible = natural * math.sqrt(_MIN_VISIBLE_DECREASE * (_BFLOAT16_EPS if network.is_rough else space.eps))
        norm, best, best_norm = _FIRST_STEP_FRACTION * min(x_norm, natural), self.at_x.value, 0.0
        while norm <= _MAX_STEP_RATIO * max(x_norm, natural) and not network.time_is_up():
            value = network.value(network.x + direction * norm)
            if value < best:
                best, best_norm = value, norm
            elif norm >= visible:
                break
            norm *= 2.0
        return direction * best_norm, best_norm

    def profile(self, eigenvector: Any, eigenvalue: float) -> tuple[Floats, Floats]:
        """Return distances and losses along an eigenvector, as far as the quadratic model doubles the loss.

        Points for which there is no time are left out.
        """
        x = self.network.x
        x_norm = self.network.oracle.space.norm(x) or 1.0
        radius = x_norm if eigenvalue == 0.0 else min(x_norm, self._natural_norm(eigenvalue))
        distances, losses = np.linspace(-radius, radius, _PROFILE_POINTS), list[float]()
        for distance in distances:
            if self.network.time_is_up():
                break
            losses.append(self.network.value(x + eigenvector * float(distance)))
        return distances[: len(losses)], np.array(losses)

    def _natural_norm(self, eigenvalue: float) -> float:
        """Return the norm of the step at which the curvature of an eigenvector changes the loss by the loss itself."""
        return math.sqrt(2.0 * abs(self.at_x.value) / abs(eigenvalue))
