"""The decisions of `sanc.core`, for all rows at once: the ratio test, the rules for σ, the units and the endings.

Where a docstring names a function of the core, that function computes the same for one problem, from the same
constants, and tests/many compares both row by row. `RowRules` has the decisions that depend on settings of the method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sanc.core.acceptance import CANCELLATION_ERRORS, LONGER_STEP_RHO
from sanc.core.escape import FALLBACK_LIPSCHITZ
from sanc.core.method import Method
from sanc.core.runs.stall import GRADIENT_PROGRESS
from sanc.core.sigma import (
    MAX_GROWTH_FACTOR,
    MAX_SHRINK_FACTOR,
    MIN_SHRINK_FACTOR,
    MIN_SIGMA_FACTOR_EXACT,
    NEGLIGIBLE_CUBIC_TERM,
)
from sanc.core.space import ROUNDING_ERRORS
from sanc.core.units import FIRST_SIGMA, X_FRACTION
from sanc.many.cubic import CubicModels
from sanc.presets import PRESETS

UNSUCCESSFUL, SUCCESSFUL, VERY_SUCCESSFUL = 0, 1, 2
"""The classes of a step, as integers."""


def ratio(actual: Tensor, predicted: Tensor, value_rounding: Tensor) -> Tensor:
    """Return ρ of each step; NaN if it is not defined (`sanc.core.ratio`)."""
    valid = actual.isfinite() & predicted.isfinite() & (predicted + value_rounding > 0.0)
    return torch.where(valid, (actual + value_rounding) / (predicted + value_rounding), torch.nan)


def largest_term(value: Tensor, hessian_norm: Tensor, length_scale: Tensor, unit_value: Tensor) -> Tensor:
    """Return the size of the largest term of each f (`sanc.core.acceptance.largest_term`)."""
    return torch.maximum(value.abs(), torch.minimum(hessian_norm * length_scale * length_scale, unit_value))


def is_within_cancellation(actual: Tensor, predicted: Tensor, term_size: Tensor, eps: float) -> Tensor:
    """Return where the decrease of f is below the cancellation error (as `is_within_cancellation` of the core)."""
    return (actual.abs() <= CANCELLATION_ERRORS * eps * term_size) & (predicted <= math.sqrt(eps) * term_size)


@dataclass(frozen=True, slots=True)
class Rays:
    """The models along steps, as `sanc.core.sigma.Ray`.

    Attributes
    ----------
    sigma : Tensor
        σ.
    norm_cubed : Tensor
        ‖s‖³.
    derivative_ratio : Tensor
        −gᵀs/(σ‖s‖³).
    valid : Tensor
        Where σ‖s‖³ neither underflows nor overflows.
    """

    sigma: Tensor
    norm_cubed: Tensor
    derivative_ratio: Tensor
    valid: Tensor

    @classmethod
    def from_steps(cls, sigma: Tensor, predicted: Tensor, norm: Tensor) -> Rays:
        """Return the rays of steps."""
        norm_cubed = norm * norm * norm
        product = sigma * norm_cubed
        valid = (product > 0.0) & (product < torch.inf)
        return cls(sigma, norm_cubed, (2.0 * predicted / product - 1.0 / 3.0).clamp(min=0.0), valid)

    def sigma_for(self, t: float | Tensor) -> Tensor:
        """Return the σ with the minimiser t·s, or the smallest allowed σ."""
        factor = (t + (1.0 - t) * self.derivative_ratio) / (t * t)
        return self.sigma * factor.clamp(min=MIN_SIGMA_FACTOR_EXACT)

    @property
    def derivative(self) -> Tensor:
        """gᵀs, the directional derivative at the start of each step."""
        return -self.derivative_ratio * self.sigma * self.norm_cubed


def unbounded_decrease(value: Tensor, unit_value: Tensor, eps: float) -> Tensor:
    """Return the decreases of f that show that it is unbounded (`sanc.core.units.unbounded_decrease`).

    Rows are not scaled by a power of two, so that f has to fall by more than 1/eps² whatever its unit.
    """
    return (value.abs() + (unit_value + 1.0)) / eps**2


def measure_units(value: Tensor, grad_norm: Tensor, product_norm: Tensor, x_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the length scales and units of σ of the first points (`sanc.core.units.measure_units`)."""
    x_scale = X_FRACTION * x_norm
    has_gradient, has_product = grad_norm > 0.0, product_norm > 0.0
    cauchy = torch.where(has_product, grad_norm / product_norm, torch.inf)
    first = torch.minimum(cauchy, torch.maximum(x_scale, value.abs() / grad_norm))
    first = torch.where((first > 0.0) & (first < torch.inf), first, cauchy)
    stationary = torch.where(has_product, torch.maximum(x_scale, (value.abs() / product_norm).sqrt()), x_scale)
    length_scale = torch.where(has_gradient, first, stationary)
    length_scale = torch.where((length_scale > 0.0) & (length_scale < torch.inf), length_scale, 1.0)
    grad_norm_per_length = grad_norm / length_scale
    unit = torch.where(grad_norm_per_length > 0.0, grad_norm_per_length, product_norm) / length_scale
    return length_scale, torch.where((unit > 0.0) & (unit < torch.inf), unit, 1.0)


def tries_longer_step(rho: Tensor, next_sigma: Tensor, sigma: Tensor) -> Tensor:
    """Return where f decreased by more than predicted, so that a longer step is tried (as `RatioTest` of the core)."""
    return (rho > LONGER_STEP_RHO) & (next_sigma < sigma)


def choose_branch(ritz_value: Tensor, hessian_norm: Tensor, grad_norm: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return where an escape step follows negative curvature, and its step size: the factor of ±v or of −g.

    L1 is the largest absolute eigenvalue, and L2 = 2σ, as in `CheckedEscape`.
    """
    L1 = torch.where(hessian_norm > 0.0, hessian_norm, FALLBACK_LIPSCHITZ)
    L2 = 2.0 * sigma
    quotient = ritz_value / L2
    curvature_decrease = quotient * quotient * (-2.0 * ritz_value / 3.0)
    along_curvature = (ritz_value < 0.0) & (curvature_decrease > grad_norm * grad_norm / 4.0 / L1)
    return along_curvature, torch.where(along_curvature, -2.0 * ritz_value / L2, 1.0 / L1)


def value_decreases(value: Tensor, new_value: Tensor, predicted: Tensor, eps: float) -> Tensor:
    """Return whether f decreased beyond the roundoff that applies to a predicted decrease (`StallMonitor.after`)."""
    roundoff = eps * value.abs()
    return value - new_value > torch.where(predicted <= roundoff, ROUNDING_ERRORS * roundoff, roundoff)


def update_stall(
    iterations: Tensor, best: Tensor, grad_norm: Tensor, moved: Tensor, value_decreased: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the iterations without progress, and the smallest gradient norm so far (`StallMonitor.after`)."""
    progress = (grad_norm < GRADIENT_PROGRESS * best) | (moved & value_decreased)
    return torch.where(progress, 0, iterations + 1), torch.minimum(best, grad_norm)


@dataclass(frozen=True)
class RowRules:
    """The rules with settings, which are those of the pieces of a method by the same names.

    Attributes
    ----------
    eta1, eta2 : float
        Settings of the ratio test.
    first_radius, max_resolves : float, int
        Settings of the cubic model; a `first_radius` of None is infinite here.
    sigma_floor, sigma_ceiling, gamma : float
        Settings of the update of σ.
    """

    eta1: float
    eta2: float
    first_radius: float
    max_resolves: int
    sigma_floor: float
    sigma_ceiling: float
    gamma: float

    @classmethod
    def of(cls, method: Method) -> RowRules:
        """Return the rules with the settings of the default method, or of one with the same pieces."""
        model: Any = method.model
        acceptance: Any = method.acceptance
        sigma: Any = method.sigma
        return cls(
            float(acceptance.eta1),
            float(acceptance.eta2),
            float(model.first_radius or math.inf),
            model.max_resolves,
            float(sigma.sigma_floor),
            float(sigma.sigma_ceiling),
            float(sigma.gamma),
        )

    def bounded(self, sigma: Tensor) -> Tensor:
        """Return σ within its bounds (`SigmaRule.bounded`)."""
        return sigma.clamp(self.sigma_floor, self.sigma_ceiling)

    def classify(self, actual: Tensor, predicted: Tensor, value_rounding: Tensor) -> Tensor:
        """Return the class of each step (`sanc.core.ratio.classify`)."""
        valid = (actual < torch.inf) & (predicted > 0.0)  # no finite decrease is a fraction of an infinite one
        actual, predicted = actual + value_rounding, predicted + value_rounding
        successful = valid & (actual >= self.eta1 * predicted)
        return successful.long() + (successful & (actual > self.eta2 * predicted))

    def after_trial(
        self, sigma: Tensor, verdict: Tensor, actual: Tensor, predicted: Tensor, norm: Tensor, value_rounding: Tensor
    ) -> Tensor:
        """Return σ after a trial step of the class `verdict` (`SigmaRule.after_trial`)."""
        finite = actual.abs() < torch.inf
        if bool((finite & (verdict == SUCCESSFUL)).all()):
            return sigma
        unsuccessful = verdict == UNSUCCESSFUL
        lowers, raises = finite & (verdict == VERY_SUCCESSFUL), unsuccessful | ~finite
        ray = Rays.from_steps(sigma, predicted, norm)
        kappa = sigma + 3.0 * (predicted - actual) / ray.norm_cubed
        kappa = torch.where(predicted <= value_rounding, sigma, kappa)
        interpolated, without_ray = sigma, sigma
        if bool(lowers.any()):
            smallest = NEGLIGIBLE_CUBIC_TERM * predicted / ray.norm_cubed
            smallest = torch.maximum(ray.sigma_for(MAX_GROWTH_FACTOR), smallest)
            lowered = torch.minimum(torch.maximum(kappa, smallest), sigma)
            interpolated = torch.where(lowers, lowered, sigma)
        if bool(raises.any()):
            largest = ray.sigma_for(MIN_SHRINK_FACTOR)
            raised = torch.minimum(torch.maximum(kappa, ray.sigma_for(MAX_SHRINK_FACTOR)), largest)
            interpolated = torch.where(raises, torch.where(finite, raised, largest), interpolated)
            without_ray = torch.where(unsuccessful, self.after_failure(sigma), sigma)
        return torch.where(ray.valid, self.bounded(interpolated), without_ray)

    def after_failure(self, sigma: Tensor) -> Tensor:
        """Return γσ (`SigmaRule.after_failure`)."""
        return (sigma * self.gamma).clamp(max=self.sigma_ceiling)

    def after_negligible_step(self, sigma: Tensor, norm_ratio: Tensor) -> Tensor:
        """Return σ after a step below the working precision of x (`SigmaRule.after_negligible_step`)."""
        return self.bounded(sigma * (norm_ratio * norm_ratio).clamp(max=self.gamma**-2))

    def after_derivative(
        self, sigma: Tensor, tried_sigma: Tensor, predicted: Tensor, norm: Tensor, end_derivative: Tensor
    ) -> Tensor:
        """Return σ given the directional derivative of f at the end of a step (`SigmaRule.after_derivative`).

        The step was made with `tried_sigma`.
        """
        ray = Rays.from_steps(tried_sigma, predicted, norm)
        start_derivative = ray.derivative
        t_zero = torch.where(
            end_derivative > start_derivative, start_derivative / (start_derivative - end_derivative), torch.inf
        )
        lowered = self.bounded(torch.minimum(sigma, ray.sigma_for(t_zero.clamp(max=MAX_GROWTH_FACTOR))))
        return torch.where(ray.valid & (end_derivative < 0.0), lowered, sigma)

    def first_sigma(self, unit_cubic: Tensor) -> Tensor:
        """Return the initial σ (`SigmaRule.first_sigma`)."""
        return self.bounded(FIRST_SIGMA * unit_cubic)

    def max_step_norm(self, first_length_scale: Tensor, x_norm: Tensor, last_step_norm: Tensor) -> Tensor:
        """Return the limit on the step norm that `first_radius` describes (`CubicModel`)."""
        length_scale = torch.maximum(first_length_scale, X_FRACTION * x_norm)
        return torch.maximum(self.first_radius * length_scale, MAX_GROWTH_FACTOR * last_step_norm)

    def limited_sigma(self, models: CubicModels, sigma: Tensor, max_norm: Tensor, always: Tensor | None) -> Tensor:
        """Return the smallest 2ᵏσ whose steps have norms up to `max_norm` (`SigmaRule.limit_step`).

        Where the limit does not hold `always`, it holds only for steps with μ above the smallest eigenvalue. It holds
        everywhere if `always` is None.
        """
        limit = max_norm
        if always is not None:
            limit = torch.where(always, max_norm, torch.maximum(max_norm, models.values[0] / sigma))
        too_long = models.exceed(sigma, limit)
        if not bool(too_long.any()):
            return sigma
        # With σ up to the lower bound the step is too long, so the first σ to try is the next one.
        limited = self._first_doubling(sigma, models.sigma_lower_bound(max_norm) / sigma)
        while True:
            again = too_long & (limited < self.sigma_ceiling) & models.exceed(limited, max_norm)
            if not bool(again.any()):
                return torch.where(too_long, limited, sigma)
            limited = torch.where(again, self.bounded(2.0 * limited), limited)

    def _first_doubling(self, sigma: Tensor, min_factor: Tensor) -> Tensor:
        """Return σ times the smallest power of two above `min_factor`, and at least 2σ."""
        factor = torch.where(min_factor < torch.inf, min_factor, 1.0).clamp(min=1.0)
        return self.bounded(torch.exp2(factor.log2().floor() + 1.0) * sigma)


ROBUST_RULES = RowRules.of(PRESETS["robust"])
"""The rules with the settings of the default."""
