"""The third choice of a method: what to do when the cubic step fails (2.6).

Follow negative curvature, or the gradient, or stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from sanc.core import robust
from sanc.core.iterate import Iterate
from sanc.core.record import Branch
from sanc.core.settings import Settings
from sanc.core.space import Vector


@dataclass(frozen=True, slots=True)
class Direction:
    """The branch to take and the length of its step along the unit vector v, or the factor of −g."""

    branch: Branch
    length: float = 0.0


def choose(
    ritz_value: float, grad_norm: float, L1: float, L2: float, settings: Settings, *, may_stay: bool = True
) -> Direction:
    """Compare the decrease that curvature promises with that of the gradient (equation 9 of the paper).

    The curvature step d = ±(2|λ1|/L2) v promises 2(−λ1)³/(3 L2²) − ε λ1²/(6 L2²), the gradient step d = −g/L1
    promises ‖g‖²/(4 L1) − ε_g²/L1. Curvature is never followed where λ1 ≥ 0 (D2): the paper's rule, without that guard,
    would take a random uphill step as soon as ‖g‖ < 2 ε_g. λ1, `ritz_value`, is NaN where no Krylov space was built.
    Where a method has no model and so nothing but this step, it may not stay.
    """
    epsilon = 0.0 if settings.estimate_constants else settings.epsilon
    guard = -settings.epsilon if settings.curvature_guard == "epsilon" else 0.0
    if ritz_value < guard:
        ratio = ritz_value / L2  # products, not powers: where they overflow they are infinite instead of an error
        curvature = ratio * ratio * (-2 * ritz_value / 3 - epsilon / 6)
        slack = settings.gradient_tolerance**settings.gradient_tolerance_power if epsilon else 0.0
        if curvature > (grad_norm * grad_norm / 4 - slack) / L1:
            return Direction(Branch.CURVATURE, 2 * -ritz_value / L2)
    elif may_stay and settings.otherwise == "stay" and not math.isnan(ritz_value):
        return Direction(Branch.STAYED)
    return Direction(Branch.GRADIENT, 1.0 / L1)


class OnRejection(Protocol):
    """Ends an iteration whose cubic step failed, or that had none."""

    def point(self, at: Iterate, *, only: bool) -> Vector: ...


class Stay:
    """Keep x; σ has grown."""

    def __init__(self, settings: Settings) -> None:
        pass

    def point(self, at: Iterate, *, only: bool) -> Vector:
        """Return x."""
        return at.stay()


class Escape:
    """Step along negative curvature, or along the gradient, whichever promises more.

    `only` says in its methods that the method has no model, so that this is its step, not its way out: it may not stay,
    and σ measures nothing but how often a step was not finite.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._falls = settings.escape_check == "decrease"

    def point(self, at: Iterate, *, only: bool) -> Vector:
        """Return x + d."""
        s, record = self._settings, at.record
        direction = choose(record.ritz_value, record.grad_norm, *self._constants(at), s, may_stay=not only)
        if direction.branch is Branch.CURVATURE:
            assert at.krylov is not None
            assert at.spectrum is not None
            (v,) = at.krylov.combine(at.spectrum.leftmost_vector)
            d = v * (direction.length * at.sign(lambda: at.space.dot(at.g, v), at.draws.escape_sign))
        elif direction.branch is Branch.GRADIENT:
            use_hessian_sample = s.fallback_sample == "hessian" and at.operator is not None
            d = (at.operator.gradient() if use_hessian_sample else at.g) * -direction.length  # type: ignore[union-attr]
        else:
            return at.stay()
        at.release()
        return self._checked(at, d, direction.branch, only)

    def _constants(self, at: Iterate) -> tuple[float, float]:
        """Return L1 and L2, as given or as the Krylov space and the last trial show them."""
        s = self._settings
        if not s.estimate_constants or at.spectrum is None:
            return s.L1, s.L2
        return at.spectrum.size or s.L1, 2.0 * at.judge.sigma

    def _checked(self, at: Iterate, d: Vector, branch: Branch, only: bool) -> Vector:
        """Take the step d if f is finite there, or lower where the settings ask for that."""
        if only:
            d = d * (self._settings.first_sigma / at.judge.sigma)
        norm = at.space.norm(d)
        if norm == 0.0:
            return at.stay()
        found = robust.halved_until_lower(at, d, norm) if self._falls else _finite(at, d, norm)
        if only:
            at.judge.reject() if found is None else at.judge.relax()
        if found is None:
            if at.record.note != robust.NO_GRADIENT:
                at.record.note = f"the {branch} step " + ("does not lower the loss" if self._falls else "is not finite")
            return at.x
        point, at.record.trial_value, at.record.step_norm = found
        at.record.branch, at.record.curvature_share = branch, float(branch is Branch.CURVATURE)
        return point


class GradientStep(Escape):
    """Step along the gradient with a fixed step size: SGD."""

    def point(self, at: Iterate, *, only: bool) -> Vector:
        """Return x − lr·g."""
        return self._checked(at, at.g * -self._settings.lr, Branch.GRADIENT, only)


def _finite(at: Iterate, d: Vector, norm: float) -> tuple[Vector, float, float] | None:
    """Return x + d, f there and the length of the step where f is finite."""
    trial = at.x + d
    value = at.try_value(trial)
    return (trial, value, norm) if math.isfinite(value) else None
