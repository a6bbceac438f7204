"""The judge: the ratio of actual to predicted decrease, the success classes, and σ.

It never divides before it compares, never lets anything that is not finite through, and is the only writer of σ in
every mode: exact, on samples, captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from sanc.core.settings import AUTHORS_FLOAT32_FLOOR, Settings

SHORTEST, SHORTER, LONGER = 0.1, 0.5, 3.0
"""How much shorter a step is tried after a rejection, at most and at least, and how much longer after a success."""

_FALL, _EXACT_FALL = 1e-3, 1e-6
"""How much σ falls at most in a step, where one sample shows that and where f itself does."""

_LEAST = 1e-16
"""σ‖s‖³ as a share of the decrease below which σ does nothing, so that it need not fall any further."""


class Verdict(Enum):
    """How well the model foretold the decrease."""

    VERY_SUCCESSFUL = "very successful"
    SUCCESSFUL = "successful"
    UNSUCCESSFUL = "unsuccessful"

    @property
    def accepted(self) -> bool:
        """Whether the step is taken."""
        return self is not Verdict.UNSUCCESSFUL


def classify(actual: float, predicted: float, eta1: float, eta2: float, noise: float = 0.0) -> Verdict:
    """Class of a step by actual ≥ η·predicted, with `noise` granted to both sides."""
    if not (math.isfinite(actual) and math.isfinite(predicted)) or predicted <= 0.0:
        return Verdict.UNSUCCESSFUL
    gained, promised = actual + noise, predicted + noise
    if gained > eta2 * promised:
        return Verdict.VERY_SUCCESSFUL
    if gained >= eta1 * promised:
        return Verdict.SUCCESSFUL
    return Verdict.UNSUCCESSFUL


def ratio(actual: float, predicted: float, noise: float = 0.0) -> float:
    """ρ for the record; NaN where it is not defined."""
    if not (math.isfinite(actual) and math.isfinite(predicted)) or predicted + noise <= 0.0:
        return math.nan
    return (actual + noise) / (predicted + noise)


@dataclass(frozen=True, slots=True)
class Ray:
    """The model along a step s that minimises it, and the σ whose minimum on this ray is elsewhere.

    The minimiser has −gᵀs = sᵀBs + σ‖s‖³ and the decrease −½gᵀs + (σ/6)‖s‖³; `pull` is −gᵀs in units of σ‖s‖³, and
    σ(t + (1−t)·pull)/t² is the σ whose model has its minimum along s at t·s.
    """

    sigma: float
    cube: float
    pull: float
    fall: float

    @classmethod
    def of(cls, sigma: float, predicted: float, norm: float, fall: float) -> Ray | None:
        """Return the ray; None where the step is too short to show anything, or too long to be told in numbers."""
        cube = norm * norm * norm
        if not 0.0 < sigma * cube < math.inf:
            return None
        return cls(sigma, cube, max(2.0 * predicted / (sigma * cube) - 1.0 / 3.0, 0.0), fall)

    def scaled(self, t: float) -> float:
        """Return the σ with the minimum at t·s, or the least that σ may fall to where no σ leads so far."""
        return self.sigma * max((t + (1.0 - t) * self.pull) / (t * t), self.fall)

    @property
    def slope(self) -> float:
        """gᵀs."""
        return -self.pull * self.sigma * self.cube


def interpolated(ray: Ray, verdict: Verdict, actual: float, predicted: float, noise: float) -> float:
    """Return the κ that f showed along the step, f(x+s) = q(s) + (κ/3)‖s‖³, as far as the next step's length allows."""
    sigma = ray.sigma
    if not math.isfinite(actual):
        return ray.scaled(SHORTEST)
    seen = sigma if predicted <= noise else sigma + 3.0 * (predicted - actual) / ray.cube
    if verdict is Verdict.UNSUCCESSFUL:
        return min(max(seen, ray.scaled(SHORTER)), ray.scaled(SHORTEST))
    if verdict is Verdict.VERY_SUCCESSFUL:
        return min(max(seen, ray.scaled(LONGER), _LEAST * predicted / ray.cube), sigma)
    return sigma


class Judge:
    """Holds σ, which is at its start where none is given, and the rule by which it moves.

    `eps` is the machine precision of the parameters' type, `exact` says whether it judges f itself or samples of it.
    """

    def __init__(self, settings: Settings, eps: float, sigma: float | None = None, *, exact: bool = False) -> None:
        self.settings = settings
        floor = eps if settings.sigma_floor is None else settings.sigma_floor
        if floor < 1e-45 and eps > 1e-10 and settings.sigma_rule == "paper":  # would be zero in float32
            floor = max(floor, AUTHORS_FLOAT32_FLOOR)
        self.floor, self.ceiling = floor, settings.sigma_ceiling
        self._fall = _EXACT_FALL if exact else _FALL
        self.sigma = settings.first_sigma if sigma is None else sigma

    def try_step(self, actual: float, predicted: float, norm: float, grad_norm: float, noise: float = 0.0) -> Verdict:
        """Judge a step of length `norm` and move σ accordingly (2.6)."""
        s = self.settings
        verdict = classify(actual, predicted, s.eta1, s.eta2, noise)
        if s.sigma_rule == "interpolate":
            ray = Ray.of(self.sigma, predicted, norm, self._fall)
            if ray is not None:
                self.move(interpolated(ray, verdict, actual, predicted, noise))
            elif not verdict.accepted:
                self.reject()
        elif verdict is Verdict.VERY_SUCCESSFUL:
            self.sigma = max(min(self.sigma, grad_norm), self.floor)
        elif verdict is Verdict.UNSUCCESSFUL:
            self.reject()
        return verdict

    def look_back(self, sigma: float, predicted: float, norm: float, slope: float) -> None:
        """Learn from the slope of f at the end of a step that was taken with `sigma`, along the step.

        Where f still falls there, the step was too short, whatever share of the promise it kept: the next one may go as
        far as the slope, drawn on from both ends, is negative.
        """
        ray = Ray.of(sigma, predicted, norm, self._fall)
        if ray is not None and slope < 0.0:
            turn = ray.slope / (ray.slope - slope) if slope > ray.slope else math.inf
            self.move(min(self.sigma, ray.scaled(min(turn, LONGER))))

    def retreat(self, sigma: float, predicted: float, norm: float) -> None:
        """Take back a step that was made with `sigma`: the next one is a tenth as long."""
        self.sigma = sigma
        self.try_step(math.nan, predicted, norm, math.nan)

    def reject(self) -> None:
        """Grow σ by γ after anything that is not finite, or a rejection that taught nothing else."""
        self.sigma = min(self.sigma * self.settings.gamma, max(self.ceiling, self.settings.first_sigma))

    def forget(self, share: float) -> None:
        """Let a σ fall whose step vanishes in the rounding of x, since nothing was learnt from that.

        The step is this share of one that shows something, and as the root of σ, where that decides how long it is.
        """
        self.move(self.sigma * min(share * share, self.settings.gamma**-2))

    def relax(self) -> None:
        """Let the σ of a fixed model fall back to its fixed value after a step that went well."""
        self.sigma = max(self.settings.first_sigma, self.sigma / self.settings.gamma)

    def move(self, sigma: float) -> None:
        """Set σ, within its bounds."""
        self.sigma = max(self.floor, min(sigma, self.ceiling))

    def shorten(self, length: Callable[[float], float], longest: float, least: float = 0.0) -> None:
        """Double σ until the step it leads to, of length ``length(σ)``, is no longer than `longest`.

        No σ below `least` leads to such a step, and a step of kσ is at least a k-th as long as that of σ, so that not
        every doubling needs a look.
        """
        self._double(least / self.sigma)
        while (norm := length(self.sigma)) > longest and self.sigma < self.ceiling:
            times = norm / longest
            self._double(max(times, 2.0) if math.isfinite(times) else 2.0)

    def _double(self, times: float) -> None:
        """Raise σ by the power of two below `times`, if that is above 1 and known."""
        if 1.0 < times < math.inf:
            self.move(2.0 ** math.floor(math.log2(times)) * self.sigma)
