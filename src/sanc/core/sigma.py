"""The rules by which the cubic coefficient σ changes.

`SigmaUpdate` has the settings, and `SigmaRule` the formulas. Neither holds the current σ: the formulas take it, or the
outcome of a trial with it, and return the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, TypeVar

from sanc.core.ratio import TrialOutcome, Verdict
from sanc.core.settings import ABOVE_ONE, NOT_NEGATIVE, POSITIVE, Piece, setting
from sanc.core.units import FIRST_SIGMA, Units
from sanc.errors import require

MIN_SHRINK_FACTOR, MAX_SHRINK_FACTOR, MAX_GROWTH_FACTOR = 0.1, 0.5, 3.0
"""Bounds on the ratio of the next step norm to this one: the lower and the upper bound after a rejection, and the upper
bound after a success."""

MIN_SIGMA_FACTOR_SAMPLED, MIN_SIGMA_FACTOR_EXACT = 1e-3, 1e-6
"""The smallest factor on σ after one step, with samples and with an exact objective."""

NEGLIGIBLE_CUBIC_TERM = 1e-16
"""Ratio of σ‖s‖³ to the predicted decrease below which σ has no effect, so that it is not lowered further."""


class Ray(NamedTuple):
    """The model along a step s that minimises it, and the σ whose minimiser on this ray is t·s.

    The minimiser satisfies −gᵀs = sᵀBs + σ‖s‖³, and the decrease is −½gᵀs + (σ/6)‖s‖³. With p = −gᵀs/(σ‖s‖³) the model
    of σ(t + (1−t)p)/t² has its minimum along s at t·s.

    A step truncated by bounds does not minimise the model along its own direction. Then p is an estimate from the step
    norm and the predicted decrease, and the resulting σ only bounds the change of the next σ.

    Attributes
    ----------
    sigma : float
        The σ of the step s.
    norm_cubed : float
        ‖s‖³.
    derivative_ratio : float
        p, the derivative −gᵀs relative to σ‖s‖³.
    min_factor : float
        The smallest factor on σ.
    """

    sigma: float
    norm_cubed: float
    derivative_ratio: float
    min_factor: float

    @classmethod
    def from_step(cls, sigma: float, predicted: float, norm: float, min_factor: float) -> Ray | None:
        """Return the ray; None if σ‖s‖³ underflows or overflows."""
        norm_cubed = norm * norm * norm
        if not 0.0 < sigma * norm_cubed < math.inf:
            return None
        derivative_ratio = max(2.0 * predicted / (sigma * norm_cubed) - 1.0 / 3.0, 0.0)
        return cls(sigma, norm_cubed, derivative_ratio, min_factor)

    def sigma_for(self, t: float) -> float:
        """Return the σ with the minimiser t·s, or the smallest allowed σ if no σ has a minimiser that far from x."""
        return self.sigma * max((t + (1.0 - t) * self.derivative_ratio) / (t * t), self.min_factor)

    @property
    def derivative(self) -> float:
        """gᵀs, the directional derivative at the start of the step."""
        return -self.derivative_ratio * self.sigma * self.norm_cubed


def interpolated_sigma(ray: Ray, outcome: TrialOutcome) -> float:
    """Return the next σ: κ of f(x+s) = q(s) + (κ/3)‖s‖³, clipped so that the next step norm is within its bounds.

    After a step that was successful, but not very successful, σ is unchanged.
    """
    sigma, verdict, predicted, actual = ray.sigma, outcome.verdict, outcome.predicted, outcome.actual
    if not math.isfinite(actual):
        return ray.sigma_for(MIN_SHRINK_FACTOR)
    is_roundoff = predicted <= outcome.value_rounding
    kappa = sigma if is_roundoff else sigma + 3.0 * (predicted - actual) / ray.norm_cubed
    if verdict is Verdict.UNSUCCESSFUL:
        return min(max(kappa, ray.sigma_for(MAX_SHRINK_FACTOR)), ray.sigma_for(MIN_SHRINK_FACTOR))
    if verdict is Verdict.VERY_SUCCESSFUL:
        return min(
            max(kappa, ray.sigma_for(MAX_GROWTH_FACTOR), NEGLIGIBLE_CUBIC_TERM * predicted / ray.norm_cubed), sigma
        )
    return sigma


class _HasNorm(Protocol):
    """A step with a norm."""

    @property
    def norm(self) -> float: ...


AnyStep = TypeVar("AnyStep", bound=_HasNorm)


@dataclass(frozen=True, slots=True)
class SigmaRule:
    """The rule by which σ changes. Its methods return the next σ; only `limit_step` returns a step.

    Attributes
    ----------
    sigma0 : float
        The initial σ, before f is evaluated; the fixed σ of methods without a ratio test.
    floor, ceiling : float
        Bounds of σ.
    gamma : float
        Factor of σ after a rejection.
    interpolates : bool
        Whether σ follows the cubic coefficient of f along the step, instead of the paper's rule.
    measures_sigma0 : bool
        Whether the first gradient and Hessian product determine the initial σ, which replaces `sigma0`.
    exact : bool
        Whether f is the objective itself and not a sample of it.
    """

    sigma0: float = 1.0
    floor: float = 0.0
    ceiling: float = math.inf
    gamma: float = 2.0
    interpolates: bool = False
    measures_sigma0: bool = False
    exact: bool = False

    @property
    def min_factor(self) -> float:
        """The smallest factor on σ after one step."""
        return MIN_SIGMA_FACTOR_EXACT if self.exact else MIN_SIGMA_FACTOR_SAMPLED

    def bounded(self, sigma: float) -> float:
        """Return σ within its bounds."""
        return max(self.floor, min(sigma, self.ceiling))

    def first_sigma(self, sigma: float, units: Units, factor: float = FIRST_SIGMA) -> float:
        """Return the initial σ: `factor` in its unit if it is measured, otherwise the `sigma` of the state."""
        return self.bounded(factor * units.cubic) if self.measures_sigma0 else sigma

    def after_trial(self, outcome: TrialOutcome) -> float:
        """Return σ after a trial step (2.6)."""
        sigma, verdict = outcome.sigma, outcome.verdict
        if self.interpolates:
            ray = Ray.from_step(sigma, outcome.predicted, outcome.step_norm, self.min_factor)
            if ray is not None:
                return self.bounded(interpolated_sigma(ray, outcome))
            return sigma if verdict.accepted else self.after_failure(sigma)
        if verdict is Verdict.VERY_SUCCESSFUL:
            return max(min(sigma, outcome.grad_norm), self.floor)
        return self.after_failure(sigma) if verdict is Verdict.UNSUCCESSFUL else sigma

    def after_derivative(
        self, sigma: float, tried_sigma: float, predicted: float, step_norm: float, end_derivative: float
    ) -> float:
        """Return σ given the directional derivative of f at the end of a step that was made with `tried_sigma`.

        A negative derivative shows that the step was too short. The next step may reach the zero of the derivative,
        extrapolated from both ends.
        """
        ray = Ray.from_step(tried_sigma, predicted, step_norm, self.min_factor)
        if ray is None or not end_derivative < 0.0:
            return sigma
        start_derivative = ray.derivative
        increases = end_derivative > start_derivative
        t_zero = start_derivative / (start_derivative - end_derivative) if increases else math.inf
        return self.bounded(min(sigma, ray.sigma_for(min(t_zero, MAX_GROWTH_FACTOR))))

    def after_failure(self, sigma: float) -> float:
        """Return γσ, at most the upper bound.

        It is the next σ after a rejection by the paper's rule, a rejected escape step, or a value, gradient or product
        that is not finite.
        """
        return min(sigma * self.gamma, max(self.ceiling, self.sigma0))

    def after_negligible_step(self, sigma: float, norm_ratio: float) -> float:
        """Return σ after a step below the working precision of x, at which f is not evaluated.

        `norm_ratio` is the step norm over the smallest norm at which the change of f is reliable. If σ limits the step
        norm, this grows as 1/√σ.
        """
        return self.bounded(sigma * min(norm_ratio * norm_ratio, self.gamma**-2))

    def after_acceptance(self, sigma: float) -> float:
        """Return the σ of a fixed model after an accepted step: σ/γ, but no less than its fixed value."""
        return max(self.sigma0, sigma / self.gamma)

    def limit_step(
        self, step: AnyStep, sigma: float, solve: Callable[[float], AnyStep], max_norm: float, sigma_lower_bound: float
    ) -> AnyStep:
        """Return the step of the smallest 2ᵏσ whose norm is at most `max_norm`, or the step of the largest σ allowed.

        No σ below `sigma_lower_bound` has such a step. The step of cσ has at least 1/c times the norm, so several
        doublings may be made at once.
        """
        doubled = self._doubled(sigma, sigma_lower_bound / sigma)
        step = step if doubled == sigma else solve(doubled)
        sigma = doubled
        while step.norm > max_norm and sigma < self.ceiling:
            factor = step.norm / max_norm
            sigma = self._doubled(sigma, max(factor, 2.0) if math.isfinite(factor) else 2.0)
            step = solve(sigma)
        return step

    def _doubled(self, sigma: float, max_factor: float) -> float:
        """Return σ times the largest power of two up to `max_factor`; σ itself if that is at most 1 or infinite."""
        if not 1.0 < max_factor < math.inf:
            return sigma
        return self.bounded(2.0 ** math.floor(math.log2(max_factor)) * sigma)


@dataclass(frozen=True, kw_only=True)
class SigmaUpdate(Piece):
    """The initial σ, and the rule by which it changes; a subclass may have another class of rules as `rule_class`.

    Attributes
    ----------
    sigma0 : float or None
        The cubic coefficient σ at the start; for `CR` and `CRM` its fixed value. 1 is the paper's. None: 1e-4 ‖g‖
        over the square of the length scale at the first point (`sanc.core.units`), which has the units of σ.
    sigma_floor : float or None
        Lower bound of σ. None: the machine precision of the parameters' type, as in the paper.
    sigma_ceiling : float
        Upper bound of σ, which only prevents overflow.
    gamma : float
        Factor by which σ grows after a rejected step; 2 is the paper's.
    sigma_rule : {"paper", "interpolate"}
        "paper": σ ← max(min(σ, ‖g‖), floor) after a very successful step, γσ after a rejected one. "interpolate":
        σ follows the cubic coefficient κ of f along the last step, f(x+s) = q(s) + (κ/3)‖s‖³. The next step along the
        same direction has 0.1 to 0.5 times the norm after a rejection, and at most 3 times after a very successful
        step. If an exact f still decreases at the end of a successful step, σ is lowered.
    """

    sigma0: float | None = setting(1.0, POSITIVE)
    sigma_floor: float | None = setting(None, NOT_NEGATIVE)
    sigma_ceiling: float = setting(1e100, POSITIVE)
    gamma: float = setting(2.0, ABOVE_ONE)
    sigma_rule: Literal["paper", "interpolate"] = "paper"

    rule_class = SigmaRule

    def __post_init__(self) -> None:
        super().__post_init__()
        floor = self.sigma_floor or 0.0
        require(self.sigma_ceiling > floor, "sigma_ceiling", self.sigma_ceiling, f"pass a number above {floor}")

    def rule(self, eps: float, *, exact: bool = False) -> SigmaRule:
        """Return the rule for vectors of precision `eps`."""
        rule = self._rules.get((eps, exact))
        if rule is None:
            rule = self._rules[eps, exact] = self.rule_class(
                sigma0=1.0 if self.sigma0 is None else self.sigma0,
                floor=eps if self.sigma_floor is None else self.sigma_floor,
                ceiling=self.sigma_ceiling,
                gamma=self.gamma,
                interpolates=self.sigma_rule == "interpolate",
                measures_sigma0=self.sigma0 is None,
                exact=exact,
            )
        return rule

    @cached_property
    def _rules(self) -> dict[tuple[float, bool], SigmaRule]:
        """The rules so far: every iteration asks for one, and building it takes microseconds."""
        return {}
