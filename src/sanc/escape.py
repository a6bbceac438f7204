"""What to do when the cubic step fails: follow negative curvature, or the gradient, or stay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sanc.record import Branch
from sanc.settings import Settings


@dataclass(frozen=True, slots=True)
class Escape:
    """The branch to take and the length of its step along the unit vector v, or the factor of −g."""

    branch: Branch
    length: float = 0.0


def choose(
    ritz_value: float, grad_norm: float, L1: float, L2: float, settings: Settings, *, may_stay: bool = True
) -> Escape:
    """Compare the decrease that curvature promises with that of the gradient (equation 9 of the paper).

    The curvature step d = ±(2|λ1|/L2) v promises 2(−λ1)³/(3 L2²) − ε λ1²/(6 L2²), the gradient step d = −g/L1
    promises ‖g‖²/(4 L1) − ε_g²/L1. Curvature is never followed where λ1 ≥ 0: the paper's rule, without that guard,
    would take a random uphill step as soon as ‖g‖ < 2 ε_g.

    Parameters
    ----------
    ritz_value : float
        Left-most Ritz value λ1; NaN where no Krylov space was built.
    grad_norm : float
        ‖g‖.
    L1, L2 : float
        Lipschitz constants of gradient and Hessian.
    settings : Settings
        ε, ε_g and the variants of the rule.
    may_stay : bool
        Whether staying is allowed at all; a method without a model has nothing but this step.
    """
    guard = -settings.epsilon if settings.curvature_guard == "epsilon" else 0.0
    if ritz_value < guard:
        ratio = ritz_value / L2  # products, not powers: where they overflow they are infinite instead of an error
        curvature = ratio * ratio * (-2 * ritz_value / 3 - settings.epsilon / 6)
        slack = settings.gradient_tolerance**settings.gradient_tolerance_power
        if curvature > (grad_norm * grad_norm / 4 - slack) / L1:
            return Escape(Branch.CURVATURE, 2 * -ritz_value / L2)
    elif may_stay and settings.otherwise == "stay" and not math.isnan(ritz_value):
        return Escape(Branch.STAYED)
    return Escape(Branch.GRADIENT, 1.0 / L1)
