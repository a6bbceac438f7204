"""The third choice of a method: what to do when the cubic step is rejected (2.6).

Follow negative curvature, or the gradient, or stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sanc.core.model import KrylovSubspace, resolved_epsilon_g
from sanc.core.pieces import Decision
from sanc.core.point import ESCAPE_SIGN, Point
from sanc.core.record import Branch, Note
from sanc.core.settings import NOT_NEGATIVE, POSITIVE, Piece, setting
from sanc.core.space import Vector

_HALVINGS = 40
"""Largest number of halvings of an escape step."""
_FALLBACK_L1 = 10.0
"""L1 where no Krylov space shows it, as the paper sets it for w1a; the step is halved until f decreases."""


def stay(sigma: float) -> Decision:
    """Return the decision to stay at x."""
    return Decision(sigma, at_rest=True)


def compare(
    ritz_value: float, grad_norm: float, L1: float, L2: float, epsilon: float = 0.0, gradient_slack: float = 0.0
) -> tuple[Branch, float]:
    """Compare the predicted decrease along curvature with that along the gradient (equation 9 of the paper).

    The curvature step d = ±(2|λ1|/L2) v predicts 2(−λ1)³/(3 L2²) − ε λ1²/(6 L2²), the gradient step d = −g/L1
    predicts ‖g‖²/(4 L1) − ε_g²/L1, with ε_g² = `gradient_slack`. Curvature is never followed where λ1 ≥ 0 (D2): the
    paper's rule would take a random uphill step as soon as ‖g‖ < 2 ε_g. Without a Krylov space λ1 is NaN. Returned are
    the branch, and the step norm along v or the factor of −g.
    """
    if ritz_value < 0.0:
        quotient = ritz_value / L2  # products, not powers: where they overflow they are infinite instead of an error
        curvature = quotient * quotient * (-2 * ritz_value / 3 - epsilon / 6)
        if curvature > (grad_norm * grad_norm / 4 - gradient_slack) / L1:
            return Branch.CURVATURE, 2 * -ritz_value / L2
    return Branch.GRADIENT, 1.0 / L1


@dataclass(frozen=True, kw_only=True)
class Stay(Piece):
    """Keeps x; σ has grown."""

    needs_products = False

    def __call__(self, here: Point, subspace: KrylovSubspace | None, sigma: float, *, without_model: bool) -> Decision:
        """Stay."""
        return stay(sigma)


@dataclass(frozen=True, kw_only=True)
class GradientStep(Piece):
    """Steps along the gradient with a fixed step size: SGD.

    Attributes
    ----------
    lr : float
        The step size.
    checked : bool
        Halve the step until f decreases, instead of accepting it wherever f is finite.
    """

    lr: float = setting(0.01, POSITIVE)
    checked: bool = False

    needs_products = False

    def __call__(self, here: Point, subspace: KrylovSubspace | None, sigma: float, *, without_model: bool) -> Decision:
        """Step along −g."""
        take = take_if_lower if self.checked else take_if_finite
        return take(here, here.g * -self.lr, Branch.GRADIENT, sigma, without_model=without_model)


@dataclass(frozen=True, kw_only=True)
class PaperEscape(Piece):
    """Steps along negative curvature or the gradient, whichever predicts the larger decrease (2.6).

    A coin decides on the sign of the curvature direction, and the step is accepted wherever f is finite.

    Attributes
    ----------
    L1, L2 : float
        Lipschitz constants of the gradient and the Hessian.
    epsilon, epsilon_g : float
        ε and ε_g of the paper; an ε_g of None is ε/4.
    """

    L1: float = setting(10.0, POSITIVE)
    L2: float = setting(10.0, POSITIVE)
    epsilon: float = setting(1e-4, POSITIVE)
    epsilon_g: float | None = setting(None, NOT_NEGATIVE)

    needs_products = True

    def choose(self, ritz_value: float, grad_norm: float, *, without_model: bool) -> tuple[Branch, float]:
        """Return the branch, and the step norm along v or the factor of −g."""
        return self.compare(ritz_value, grad_norm, resolved_epsilon_g(self.epsilon, self.epsilon_g) ** 2)

    def compare(self, ritz_value: float, grad_norm: float, gradient_slack: float) -> tuple[Branch, float]:
        """Compare the predicted decreases with the constants of this rule; `gradient_slack` is ε_g² in the paper."""
        return compare(ritz_value, grad_norm, self.L1, self.L2, self.epsilon, gradient_slack)

    def gradient(self, here: Point, subspace: KrylovSubspace | None) -> Vector:
        """Return the gradient of the step −g/L1."""
        return here.g

    def __call__(self, here: Point, subspace: KrylovSubspace | None, sigma: float, *, without_model: bool) -> Decision:
        """Choose and step."""
        ritz_value = math.nan if subspace is None else subspace.ritz_value
        branch, length = self.choose(ritz_value, here.grad_norm, without_model=without_model)
        if branch is Branch.STAYED:
            return stay(sigma)
        if branch is Branch.CURVATURE:
            assert subspace is not None
            d = subspace.ritz_vector() * (-length if here.coin(ESCAPE_SIGN) else length)
        else:
            d = self.gradient(here, subspace) * -length
        if subspace is not None:
            subspace.release()
        return take_if_finite(here, d, branch, sigma, without_model=without_model)


@dataclass(frozen=True, kw_only=True)
class CheckedEscape(Piece):
    """Steps along negative curvature or the gradient, downhill, and halves the step until f decreases.

    There is nothing to set: L1 is the largest absolute Ritz value, and L2 = 2σ.
    """

    needs_products = True

    def __call__(self, here: Point, subspace: KrylovSubspace | None, sigma: float, *, without_model: bool) -> Decision:
        """Choose and step."""
        L1, L2, ritz_value = _FALLBACK_L1, _FALLBACK_L1, math.nan
        if subspace is not None and subspace.spectrum is not None:
            L1, L2, ritz_value = subspace.curvature or L1, 2.0 * sigma, subspace.ritz_value
        branch, length = compare(ritz_value, here.grad_norm, L1, L2)
        if branch is Branch.CURVATURE:
            assert subspace is not None
            v = subspace.ritz_vector()
            derivative = here.space.dot(here.g, v)
            downhill = -math.copysign(1.0, derivative) if derivative else -1.0 if here.coin(ESCAPE_SIGN) else 1.0
            d = v * (length * downhill)
        else:
            d = here.g * -length
        if subspace is not None:
            subspace.release()
        return take_if_lower(here, d, branch, sigma, without_model=without_model)


def take_if_finite(here: Point, d: Vector, branch: Branch, sigma: float, *, without_model: bool) -> Decision:
    """Return the decision for x + d, accepted if f is finite there."""
    d = _scaled(here, d, sigma, without_model)
    norm = here.space.norm(d)
    if norm == 0.0:
        return stay(sigma)
    trial = here.x + d
    value = here.evaluate(trial)
    if not math.isfinite(value):
        return Decision(
            _next_sigma(here, sigma, without_model, accepted=False), trials=1, note=f"the {branch} step is not finite"
        )
    return Decision(_next_sigma(here, sigma, without_model, accepted=True), trial, branch, math.nan, norm, value, 1)


def take_if_lower(here: Point, d: Vector, branch: Branch, sigma: float, *, without_model: bool) -> Decision:
    """Return the decision for the first of x + d, x + d/2, … at which f is lower than at x."""
    d = _scaled(here, d, sigma, without_model)
    norm = here.space.norm(d)
    if norm == 0.0:
        return stay(sigma)
    before, note = here.objective, f"the {branch} step does not lower the loss"
    trials = 0
    for _ in range(_HALVINGS):
        trial = here.x + d
        value = here.evaluate(trial)
        trials += 1
        if -math.inf < value < before:
            if not here.ahead or math.isfinite(here.oracle.norm(here.oracle.gradient(trial)[1])):
                next_sigma = _next_sigma(here, sigma, without_model, accepted=True)
                return Decision(next_sigma, trial, branch, math.nan, norm, value, trials)
            note = Note.NO_GRADIENT
        d, norm = d * 0.5, norm * 0.5
        if norm <= here.space.eps * max(here.norm, 1e-300):
            break
    return Decision(_next_sigma(here, sigma, without_model, accepted=False), trials=trials, note=note)


def _scaled(here: Point, d: Vector, sigma: float, without_model: bool) -> Vector:
    """Scale the step of a method without a model by σ0/σ: σ grows with every step at which f is not finite."""
    return d * (here.judge.first / sigma) if without_model else d


def _next_sigma(here: Point, sigma: float, without_model: bool, *, accepted: bool) -> float:
    if not without_model:
        return sigma
    return here.judge.after_acceptance(sigma) if accepted else here.judge.after_failure(sigma)
