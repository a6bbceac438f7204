"""Escape rules (2.6): the step after all cubic steps were rejected.

Each rule steps along negative curvature, along the gradient, or stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sanc.core.pieces import Decision, Subspace
from sanc.core.point import ESCAPE_SIGN, Point
from sanc.core.record import Branch, Note
from sanc.core.settings import NOT_NEGATIVE, POSITIVE, Piece, resolved_epsilon_g, setting
from sanc.core.space import NEAR_ZERO, Vector

MAX_ESCAPE_HALVINGS = 40
"""Largest number of trial points of an escape step, each half as far from x as the last."""
FALLBACK_LIPSCHITZ = 10.0
"""L1 without Ritz values, as in the paper for w1a; the step is halved until f decreases."""


def stay(sigma: float) -> Decision:
    """Return the decision not to move."""
    return Decision(sigma, zero_step=True)


def choose_branch(
    ritz_value: float, grad_norm: float, L1: float, L2: float, epsilon: float = 0.0, gradient_slack: float = 0.0
) -> tuple[Branch, float]:
    """Return the branch of the larger predicted decrease, and its step size (equation 9 of the paper).

    The curvature step d = ±(2|λ1|/L2) v predicts 2(−λ1)³/(3 L2²) − ε λ1²/(6 L2²), the gradient step d = −g/L1
    predicts ‖g‖²/(4 L1) − ε_g²/L1, with ε_g² = `gradient_slack`. The step size is the factor of ±v or of −g. The
    curvature step requires λ1 < 0 (D2): without this condition the paper's rule makes a step of random sign along
    positive curvature if ‖g‖ < 2ε_g. A λ1 of NaN, without a Krylov space, leads to the gradient step.
    """
    if ritz_value < 0.0:
        quotient = ritz_value / L2  # products instead of powers: an overflow is infinite and raises no error
        curvature_decrease = quotient * quotient * (-2 * ritz_value / 3 - epsilon / 6)
        if curvature_decrease > (grad_norm * grad_norm / 4 - gradient_slack) / L1:
            return Branch.CURVATURE, 2 * -ritz_value / L2
    return Branch.GRADIENT, 1.0 / L1


@dataclass(frozen=True, kw_only=True)
class Stay(Piece):
    """Stays at x, with the σ that the rejection has raised."""

    needs_products = False

    def __call__(self, here: Point, subspace: Subspace | None, sigma: float, *, model_proposes: bool) -> Decision:
        """Return the decision not to move."""
        return stay(sigma)


@dataclass(frozen=True, kw_only=True)
class GradientStep(Piece):
    """Steps along the gradient with a fixed step size: SGD.

    Attributes
    ----------
    lr : float
        The step size. The paper's SGD has 0.01 on logistic regression.
    checked : bool
        Halve the step until f decreases, instead of accepting it wherever f is finite.
    """

    lr: float = setting(0.01, POSITIVE)
    checked: bool = False

    needs_products = False

    def __call__(self, here: Point, subspace: Subspace | None, sigma: float, *, model_proposes: bool) -> Decision:
        """Return the decision for a step along −g."""
        accept = backtrack if self.checked else accept_if_finite
        return accept(here, here.g * -self.lr, Branch.GRADIENT, sigma, model_proposes=model_proposes)


@dataclass(frozen=True, kw_only=True)
class PaperEscape(Piece):
    """Steps along negative curvature or the gradient, whichever predicts the larger decrease (2.6).

    The sign of the curvature step is random, and the step is accepted if f is finite at its end.

    Attributes
    ----------
    L1, L2 : float
        Lipschitz constants of the gradient and the Hessian. 10 is the paper's for its logistic regressions.
    epsilon, epsilon_g : float
        ε and ε_g of the paper. The authors' program has ε = 1e-4, and ε_g = ε/4, which None means.
    """

    L1: float = setting(10.0, POSITIVE)
    L2: float = setting(10.0, POSITIVE)
    epsilon: float = setting(1e-4, POSITIVE)
    epsilon_g: float | None = setting(None, NOT_NEGATIVE)

    needs_products = True

    def choose(self, ritz_value: float, grad_norm: float, *, model_proposes: bool) -> tuple[Branch, float]:
        """Return the branch and its step size, the factor of ±v or of −g.

        A subclass may replace it: it may use `model_proposes`, and return the branch STAYED.
        """
        return self.choose_with_slack(ritz_value, grad_norm, resolved_epsilon_g(self.epsilon, self.epsilon_g) ** 2)

    def choose_with_slack(self, ritz_value: float, grad_norm: float, gradient_slack: float) -> tuple[Branch, float]:
        """Return the branch and its step size for a `gradient_slack`, which is ε_g² in the paper. Subclasses use it."""
        return choose_branch(ritz_value, grad_norm, self.L1, self.L2, self.epsilon, gradient_slack)

    def gradient(self, here: Point, subspace: Subspace | None) -> Vector:
        """Return the gradient of the step −g/L1. A subclass may replace it."""
        return here.g

    def __call__(self, here: Point, subspace: Subspace | None, sigma: float, *, model_proposes: bool) -> Decision:
        """Return the decision for a step along ±v or −g; to stay if `choose` of a subclass returns that branch."""
        ritz_value = math.nan if subspace is None else subspace.ritz_value
        branch, step_size = self.choose(ritz_value, here.grad_norm, model_proposes=model_proposes)
        if branch is Branch.STAYED:
            return stay(sigma)
        if branch is Branch.CURVATURE:
            assert subspace is not None
            d = subspace.ritz_vector() * (-step_size if here.random_bit(ESCAPE_SIGN) else step_size)
        else:
            d = self.gradient(here, subspace) * -step_size
        if subspace is not None:
            subspace.release()
        return accept_if_finite(here, d, branch, sigma, model_proposes=model_proposes)


@dataclass(frozen=True, kw_only=True)
class CheckedEscape(Piece):
    """Steps along negative curvature or the gradient, downhill, and halves the step until f decreases.

    The rule has no settings: L1 is the largest absolute Ritz value, and L2 = 2σ.
    """

    needs_products = True

    def __call__(self, here: Point, subspace: Subspace | None, sigma: float, *, model_proposes: bool) -> Decision:
        """Return the decision for a step downhill along ±v or −g; to stay if f does not decrease."""
        L1, L2, ritz_value = FALLBACK_LIPSCHITZ, FALLBACK_LIPSCHITZ, math.nan
        if subspace is not None and not math.isnan(subspace.ritz_value):
            L1, L2, ritz_value = subspace.hessian_norm or L1, 2.0 * sigma, subspace.ritz_value
        branch, step_size = choose_branch(ritz_value, here.grad_norm, L1, L2)
        if branch is Branch.CURVATURE:
            assert subspace is not None
            v = subspace.ritz_vector()
            d = v * (step_size * _downhill_sign(here, v))
        else:
            d = here.g * -step_size
        if subspace is not None:
            subspace.release()
        return backtrack(here, d, branch, sigma, model_proposes=model_proposes)


def _downhill_sign(here: Point, v: Vector) -> float:
    """Return the sign for which ±v is a descent direction; a random sign if gᵀv = 0."""
    derivative = here.space.dot(here.g, v)
    if derivative:
        return -math.copysign(1.0, derivative)
    return -1.0 if here.random_bit(ESCAPE_SIGN) else 1.0


def accept_if_finite(here: Point, d: Vector, branch: Branch, sigma: float, *, model_proposes: bool) -> Decision:
    """Return the decision for x + d, accepted if f is finite there."""
    d = _scaled(here, d, sigma, model_proposes)
    norm = here.space.norm(d)
    if norm == 0.0:
        return stay(sigma)
    trial = here.oracle.move(here.x, d)
    value = here.evaluate(trial)
    if not math.isfinite(value):
        return Decision(
            _next_sigma(here, sigma, model_proposes, accepted=False), trials=1, note=f"the {branch} step is not finite"
        )
    next_sigma = _next_sigma(here, sigma, model_proposes, accepted=True)
    return Decision(next_sigma, trial, branch=branch, step_norm=norm, trial_value=value, trials=1)


def backtrack(here: Point, d: Vector, branch: Branch, sigma: float, *, model_proposes: bool) -> Decision:
    """Return the decision for the first of x + d, x + d/2, … at which f is lower than at x."""
    d = _scaled(here, d, sigma, model_proposes)
    norm = here.space.norm(d)
    if norm == 0.0:
        return stay(sigma)
    value_at_x, note = here.objective, f"the {branch} step does not lower the loss"
    trial_count = 0
    for _ in range(MAX_ESCAPE_HALVINGS):
        trial = here.oracle.move(here.x, d)
        value = here.evaluate(trial)
        trial_count += 1
        if -math.inf < value < value_at_x:
            if not here.evaluates_next_gradient or math.isfinite(here.oracle.norm(here.oracle.gradient(trial)[1])):
                next_sigma = _next_sigma(here, sigma, model_proposes, accepted=True)
                return Decision(next_sigma, trial, branch=branch, step_norm=norm, trial_value=value, trials=trial_count)
            note = Note.GRADIENT_NOT_FINITE
        d, norm = d * 0.5, norm * 0.5
        if norm <= here.space.eps * max(here.x_norm, NEAR_ZERO):  # also if x is zero
            break
    return Decision(_next_sigma(here, sigma, model_proposes, accepted=False), trials=trial_count, note=note)


def _scaled(here: Point, d: Vector, sigma: float, model_proposes: bool) -> Vector:
    """Return the step. A method without a model scales it by σ0/σ: its σ grows when a value of f is not finite."""
    return d * (here.sigma_rule.sigma0 / sigma) if not model_proposes else d


def _next_sigma(here: Point, sigma: float, model_proposes: bool, *, accepted: bool) -> float:
    """Return the next σ. A step away from rejected cubic steps keeps it; a method without a model adapts it."""
    if model_proposes:
        return sigma
    return here.sigma_rule.after_acceptance(sigma) if accepted else here.sigma_rule.after_failure(sigma)
