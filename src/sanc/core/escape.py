"""The third choice of a method: what to do when the cubic step fails (2.6).

Follow negative curvature, or the gradient, or stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from sanc.core import robust
from sanc.core.iterate import ESCAPE_SIGN, Iterate
from sanc.core.record import Branch
from sanc.core.settings import Settings
from sanc.core.space import Vector

OnRejection: TypeAlias = Callable[[Iterate, bool], Vector]
"""Ends an iteration whose cubic step failed, or that had none. Its second argument, `only`, says that the method has no
model, so that this is its step, not its way out: it may not stay, and σ tells only how often a step was not finite."""


def choose(
    ritz_value: float, grad_norm: float, L1: float, L2: float, settings: Settings, *, may_stay: bool = True
) -> tuple[Branch, float]:
    """Compare the decrease that curvature promises with that of the gradient (equation 9 of the paper).

    The curvature step d = ±(2|λ1|/L2) v promises 2(−λ1)³/(3 L2²) − ε λ1²/(6 L2²), the gradient step d = −g/L1
    promises ‖g‖²/(4 L1) − ε_g²/L1. Curvature is never followed where λ1 ≥ 0 (D2): the paper's rule, without that guard,
    would take a random uphill step as soon as ‖g‖ < 2 ε_g. λ1, `ritz_value`, is NaN where no Krylov space was built.
    Returned are the branch to take and the length of its step along the unit vector v, or the factor of −g.
    """
    epsilon = 0.0 if settings.estimate_constants else settings.epsilon
    guard = -settings.epsilon if settings.curvature_guard == "epsilon" else 0.0
    if ritz_value < guard:
        ratio = ritz_value / L2  # products, not powers: where they overflow they are infinite instead of an error
        curvature = ratio * ratio * (-2 * ritz_value / 3 - epsilon / 6)
        slack = settings.gradient_tolerance**settings.gradient_tolerance_power if epsilon else 0.0
        if curvature > (grad_norm * grad_norm / 4 - slack) / L1:
            return Branch.CURVATURE, 2 * -ritz_value / L2
    elif may_stay and settings.otherwise == "stay" and not math.isnan(ritz_value):
        return Branch.STAYED, 0.0
    return Branch.GRADIENT, 1.0 / L1


def stay(at: Iterate, only: bool) -> Vector:
    """Keep x; σ has grown."""
    return at.stay()


def escape(at: Iterate, only: bool) -> Vector:
    """Step along negative curvature, or along the gradient, whichever promises more."""
    s, record = at.settings, at.record
    L1, L2 = s.L1, s.L2
    if s.estimate_constants and at.spectrum is not None:  # as the Krylov space and the last trial show them
        L1, L2 = at.spectrum.size or L1, 2.0 * at.judge.sigma
    ritz_value = math.nan if at.spectrum is None else record.ritz_value  # without the space it belongs to, of no use
    branch, length = choose(ritz_value, record.grad_norm, L1, L2, s, may_stay=not only)
    if branch is Branch.CURVATURE:
        assert at.krylov is not None
        assert at.spectrum is not None
        (v,) = at.krylov.combine(at.spectrum.leftmost_vector)
        d = v * (length * at.sign(at.space.dot(at.g, v), ESCAPE_SIGN, -1.0))
    elif branch is Branch.GRADIENT:
        use_hessian_sample = s.fallback_sample == "hessian" and at.operator is not None
        d = (at.operator.gradient() if use_hessian_sample else at.g) * -length  # type: ignore[union-attr]
    else:
        return at.stay()
    at.release()
    return _checked(at, d, branch, only)


def gradient_step(at: Iterate, only: bool) -> Vector:
    """Step along the gradient with a fixed step size: SGD."""
    return _checked(at, at.g * -at.settings.lr, Branch.GRADIENT, only)


def _checked(at: Iterate, d: Vector, branch: Branch, only: bool) -> Vector:
    """Take the step d if f is finite there, or lower where the settings ask for that."""
    s, record = at.settings, at.record
    falls = s.escape_check == "decrease"
    if only:
        d = d * (s.first_sigma / at.judge.sigma)
    norm = at.space.norm(d)
    if norm == 0.0:
        return at.stay()
    found = robust.halved_until_lower(at, d, norm) if falls else _finite(at, d, norm)
    if only:
        at.judge.reject() if found is None else at.judge.relax()
    if found is None:
        if record.note != robust.NO_GRADIENT:
            record.note = f"the {branch} step " + ("does not lower the loss" if falls else "is not finite")
        return at.x
    point, record.trial_value, record.step_norm = found
    record.branch, record.curvature_share = branch, float(branch is Branch.CURVATURE)
    return point


def _finite(at: Iterate, d: Vector, norm: float) -> tuple[Vector, float, float] | None:
    """Return x + d, f there and the length of the step where f is finite."""
    trial = at.x + d
    value = at.try_value(trial)
    return (trial, value, norm) if math.isfinite(value) else None
