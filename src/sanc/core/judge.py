"""The ratio of actual to predicted decrease, the classes of success, and the rules for σ.

`Judge` holds no σ: its methods take a σ and return the next one. They never divide before they compare, and a number
that is not finite counts as a rejection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, TypeVar

from sanc.core.settings import ABOVE_ONE, NOT_NEGATIVE, POSITIVE, Piece, setting
from sanc.errors import require

SHORTEST, SHORTER, LONGER = 0.1, 0.5, 3.0
"""Bounds on the ratio of the next step norm to this one: at least and at most after a rejection, at most after a
success."""

_LARGEST_DROP, _LARGEST_EXACT_DROP = 1e-3, 1e-6
"""The smallest factor on σ after one step, with samples and with an exact objective."""

_NEGLIGIBLE = 1e-16
"""σ‖s‖³ over the predicted decrease below which σ has no effect, so that it is not lowered further."""


class Verdict(Enum):
    """How well the model predicted the decrease."""

    VERY_SUCCESSFUL = "very successful"
    SUCCESSFUL = "successful"
    UNSUCCESSFUL = "unsuccessful"

    @property
    def accepted(self) -> bool:
        """Whether the step is accepted."""
        return self is not Verdict.UNSUCCESSFUL


def classify(actual: float, predicted: float, eta1: float, eta2: float, noise: float = 0.0) -> Verdict:
    """Class of a step: very successful if actual > η2·predicted, successful if actual ≥ η1·predicted.

    `noise` is added to both sides.
    """
    if not (math.isfinite(actual) and math.isfinite(predicted)) or predicted <= 0.0:
        return Verdict.UNSUCCESSFUL
    actual, predicted = actual + noise, predicted + noise
    if actual > eta2 * predicted:
        return Verdict.VERY_SUCCESSFUL
    if actual >= eta1 * predicted:
        return Verdict.SUCCESSFUL
    return Verdict.UNSUCCESSFUL


def ratio(actual: float, predicted: float, noise: float = 0.0) -> float:
    """ρ for the record; NaN where it is not defined."""
    if not (math.isfinite(actual) and math.isfinite(predicted)) or predicted + noise <= 0.0:
        return math.nan
    return (actual + noise) / (predicted + noise)


@dataclass(frozen=True, slots=True)
class Ray:
    """The model along a step s that minimises it, and the σ whose minimiser on this ray is t·s.

    The minimiser satisfies −gᵀs = sᵀBs + σ‖s‖³, and the decrease is −½gᵀs + (σ/6)‖s‖³. With `pull` = −gᵀs/(σ‖s‖³) the
    model of σ(t + (1−t)·pull)/t² has its minimum along s at t·s.
    """

    sigma: float
    cube: float
    pull: float
    largest_drop: float

    @classmethod
    def of(cls, sigma: float, predicted: float, norm: float, largest_drop: float) -> Ray | None:
        """Return the ray; None where σ‖s‖³ underflows or overflows."""
        cube = norm * norm * norm
        if not 0.0 < sigma * cube < math.inf:
            return None
        return cls(sigma, cube, max(2.0 * predicted / (sigma * cube) - 1.0 / 3.0, 0.0), largest_drop)

    def scaled(self, t: float) -> float:
        """Return the σ with the minimiser t·s, or the smallest σ allowed where no σ leads so far."""
        return self.sigma * max((t + (1.0 - t) * self.pull) / (t * t), self.largest_drop)

    @property
    def derivative(self) -> float:
        """gᵀs, the directional derivative at the start of the step."""
        return -self.pull * self.sigma * self.cube


def interpolated(ray: Ray, verdict: Verdict, actual: float, predicted: float, noise: float) -> float:
    """Return κ of f(x+s) = q(s) + (κ/3)‖s‖³, within the bounds on the next step norm; σ after a successful step."""
    sigma = ray.sigma
    if not math.isfinite(actual):
        return ray.scaled(SHORTEST)
    observed = sigma if predicted <= noise else sigma + 3.0 * (predicted - actual) / ray.cube
    if verdict is Verdict.UNSUCCESSFUL:
        return min(max(observed, ray.scaled(SHORTER)), ray.scaled(SHORTEST))
    if verdict is Verdict.VERY_SUCCESSFUL:
        return min(max(observed, ray.scaled(LONGER), _NEGLIGIBLE * predicted / ray.cube), sigma)
    return sigma


class _HasNorm(Protocol):
    @property
    def norm(self) -> float: ...


Step = TypeVar("Step", bound=_HasNorm)


@dataclass(frozen=True, slots=True)
class Judge:
    """Rules that take a σ and return the next one.

    Attributes
    ----------
    first : float
        σ before anything is known of f; the fixed σ of methods without a ratio test.
    floor, ceiling : float
        Bounds of σ.
    gamma : float
        Factor of σ after a rejection.
    interpolates : bool
        Whether σ follows the cubic coefficient that f showed along the step, instead of the paper's rule.
    measures : bool
        Whether the first σ follows from the first gradient and Hessian product.
    exact : bool
        Whether f is the objective itself and not a sample of it.
    """

    first: float = 1.0
    floor: float = 0.0
    ceiling: float = math.inf
    gamma: float = 2.0
    interpolates: bool = False
    measures: bool = False
    exact: bool = False

    @property
    def _largest_drop(self) -> float:
        return _LARGEST_EXACT_DROP if self.exact else _LARGEST_DROP

    def bounded(self, sigma: float) -> float:
        """Return σ within its bounds."""
        return max(self.floor, min(sigma, self.ceiling))

    def after_trial(
        self,
        sigma: float,
        verdict: Verdict,
        actual: float,
        predicted: float,
        step_norm: float,
        grad_norm: float,
        noise: float = 0.0,
    ) -> float:
        """Return σ after a trial step (2.6)."""
        if self.interpolates:
            ray = Ray.of(sigma, predicted, step_norm, self._largest_drop)
            if ray is not None:
                return self.bounded(interpolated(ray, verdict, actual, predicted, noise))
            return sigma if verdict.accepted else self.after_failure(sigma)
        if verdict is Verdict.VERY_SUCCESSFUL:
            return max(min(sigma, grad_norm), self.floor)
        return self.after_failure(sigma) if verdict is Verdict.UNSUCCESSFUL else sigma

    def after_derivative(self, sigma: float, tried: float, predicted: float, step_norm: float, end: float) -> float:
        """Return σ given the directional derivative `end` of f at the end of a step, which was made with σ = `tried`.

        A negative derivative shows that the step was too short. The next step may reach the zero of the derivative,
        extrapolated from both ends.
        """
        ray = Ray.of(tried, predicted, step_norm, self._largest_drop)
        if ray is None or not end < 0.0:
            return sigma
        zero = ray.derivative / (ray.derivative - end) if end > ray.derivative else math.inf
        return self.bounded(min(sigma, ray.scaled(min(zero, LONGER))))

    def after_failure(self, sigma: float) -> float:
        """Return γσ, after a rejection that shows nothing else about f, or a number that is not finite."""
        return min(sigma * self.gamma, max(self.ceiling, self.first))

    def after_vanishing(self, sigma: float, share: float) -> float:
        """Return σ after a step below the working precision of x, which shows nothing about f.

        `share` is the step norm over the norm of a step that shows something. The step norm grows as 1/√σ where σ
        limits it.
        """
        return self.bounded(sigma * min(share * share, self.gamma**-2))

    def after_acceptance(self, sigma: float) -> float:
        """Return the σ of a fixed model after an accepted step: back towards its fixed value."""
        return max(self.first, sigma / self.gamma)

    def shorten(self, step: Step, sigma: float, solve: Callable[[float], Step], longest: float, least: float) -> Step:
        """Return the step of the first σ, doubled as often as needed, whose norm is at most `longest`.

        No σ below `least` leads to such a step. The step of kσ has at least a k-th of the norm, so several doublings
        may be made at once.
        """
        doubled = self._doubled(sigma, least / sigma)
        step = step if doubled == sigma else solve(doubled)
        sigma = doubled
        while step.norm > longest and sigma < self.ceiling:
            times = step.norm / longest
            sigma = self._doubled(sigma, max(times, 2.0) if math.isfinite(times) else 2.0)
            step = solve(sigma)
        return step

    def _doubled(self, sigma: float, times: float) -> float:
        """Raise σ by the largest power of two up to `times`, if that is above 1 and finite."""
        return self.bounded(2.0 ** math.floor(math.log2(times)) * sigma) if 1.0 < times < math.inf else sigma


@dataclass(frozen=True, kw_only=True)
class SigmaUpdate(Piece):
    """How σ starts and how it changes.

    Attributes
    ----------
    sigma0 : float or None
        The cubic coefficient σ at the start; for `CR` and `CRM` its fixed value. None: 1e-4 ‖g‖ over the square of
        the unit of length at the first point (`sanc.core.units`), which has the units of σ.
    sigma_floor, sigma_ceiling : float or None
        Bounds of σ. A floor of None is the machine precision of the parameters' type.
    gamma : float
        Factor by which σ grows after a rejected step.
    sigma_rule : {"paper", "interpolate"}
        "paper": σ ← max(min(σ, ‖g‖), floor) after a very successful step, γσ after a rejected one. "interpolate":
        σ follows the cubic coefficient κ that f showed along the last step, f(x+s) = q(s) + (κ/3)‖s‖³. The next step
        along the same direction has 0.1 to 0.5 times the norm after a rejection, and at most 3 times after a very
        successful step. If an exact f still falls at the end of a successful step, σ falls too.
    """

    sigma0: float | None = setting(1.0, POSITIVE)
    sigma_floor: float | None = setting(None, NOT_NEGATIVE)
    sigma_ceiling: float = setting(1e100, POSITIVE)
    gamma: float = setting(2.0, ABOVE_ONE)
    sigma_rule: Literal["paper", "interpolate"] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        floor = self.sigma_floor or 0.0
        require(self.sigma_ceiling > floor, "sigma_ceiling", self.sigma_ceiling, f"pass a number above {floor}")

    def judge(self, eps: float, *, exact: bool = False) -> Judge:
        """Return the rules for numbers of precision `eps`."""
        return Judge(
            first=1.0 if self.sigma0 is None else self.sigma0,
            floor=eps if self.sigma_floor is None else self.sigma_floor,
            ceiling=self.sigma_ceiling,
            gamma=self.gamma,
            interpolates=self.sigma_rule == "interpolate",
            measures=self.sigma0 is None,
            exact=exact,
        )
