"""The second choice of a method: which trial points are accepted (2.5, 2.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sanc.core.cubic import CubicStep
from sanc.core.judge import Verdict, classify, ratio
from sanc.core.model import KrylovSubspace
from sanc.core.pieces import Decision
from sanc.core.point import Point
from sanc.core.record import Branch, Note
from sanc.core.settings import BELOW_ONE, FRACTION, Piece, setting
from sanc.core.space import Vector
from sanc.errors import require

_UNDERESTIMATED = 1.2
"""ρ above which the model underestimates the decrease, so that a longer step is tried."""
_HIDDEN = 1e3
"""Rounding errors of f within which its change may be cancellation alone."""


@dataclass(frozen=True, kw_only=True)
class RatioTest(Piece):
    """Accepts a step if f decreases by at least η1 times the predicted decrease; updates σ (2.5, 2.6).

    Attributes
    ----------
    eta1, eta2 : float
        A step with ρ ≥ η1 is accepted; with ρ > η2 it also lowers σ.
    rounding_guard : bool
        Add the rounding error of f to both sides of the ratio, so that ρ tends to 1 when f barely changes. And where
        an exact f changes by less than cancellation may hide, accept a rejected step if it halves the gradient norm.
    """

    eta1: float = setting(0.2, FRACTION)
    eta2: float = 0.8
    rounding_guard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = isinstance(self.eta2, int | float) and self.eta1 < self.eta2 < 1
        require(fits, "eta2", self.eta2, f"pass a number above eta1 = {self.eta1} and below 1")

    def __call__(self, here: Point, subspace: KrylovSubspace, step: CubicStep, trial: Vector, trials: int) -> Decision:
        """Form ρ and decide."""
        before = here.objective
        value = here.evaluate(trial)
        actual, noise, note = before - value, 0.0, ""
        if self.rounding_guard:
            actual, noise, note = self._without_cancellation(here, subspace, actual, step, trial, first=trials == 0)
        verdict = classify(actual, step.decrease, self.eta1, self.eta2, noise)
        sigma = here.judge.after_trial(step.sigma, verdict, actual, step.decrease, step.norm, here.grad_norm, noise)
        decision = Decision(sigma, rho=ratio(actual, step.decrease, noise), trial_value=value, trials=1, step=step)
        if not verdict.accepted:
            return decision if math.isfinite(value) else replace(decision, note=Note.TRIAL_NOT_FINITE)
        decision = replace(decision, point=trial, branch=_branch(verdict), step_norm=step.norm, note=note)
        if subspace.sigma_is_guess:
            decision = self._with_longer_steps(here, subspace, decision, trials)
        return _with_gradient_ahead(here, decision, verdict) if here.judge.interpolates and here.ahead else decision

    def _without_cancellation(
        self, here: Point, subspace: KrylovSubspace, actual: float, step: CubicStep, trial: Vector, *, first: bool
    ) -> tuple[float, float, str]:
        """Return the decrease to use, the rounding error of f, and a note.

        Added to both sides of the ratio, the error lets ρ tend to 1 where f barely changes. But f may be the sum of
        terms far larger than itself. Where cancellation between such terms could hide the decrease, a step that halves
        an exact gradient norm counts as predicted. Badly scaled variables exaggerate the terms ‖B‖·length², so these
        are bounded by the unit of f at the first point.
        """
        eps, value, note = here.space.eps, here.known_value, ""
        length = max(here.units.length, here.norm)
        terms = subspace.curvature * length * length
        size = max(abs(value), min(terms, here.units.value))
        hidden = abs(actual) <= _HIDDEN * eps * size and step.decrease <= math.sqrt(eps) * size
        if hidden and actual < self.eta1 * step.decrease and first and here.oracle.exact:
            _, g = here.oracle.gradient(trial)
            if here.space.norm(g) <= 0.5 * here.grad_norm:
                note, actual = Note.GRADIENT_DECIDED, step.decrease
        return actual, 10.0 * eps * abs(value), note

    def _with_longer_steps(self, here: Point, subspace: KrylovSubspace, decision: Decision, trials: int) -> Decision:
        """Try steps of smaller σ in the same space while f decreases by more than the model predicts.

        This applies where σ does not follow from values of f: it is the first one, or was raised to limit a step.
        """
        most_trials = 1 + subspace.model.resolves
        while decision.step is not None and decision.rho > _UNDERESTIMATED and decision.sigma < decision.step.sigma:
            longer = (
                subspace.model.propose(here, subspace, decision.sigma)
                if trials + decision.trials < most_trials
                else None
            )
            if longer is None or longer.norm < 2.0 * decision.step_norm:
                break
            trial = subspace.trial_point(here.x, longer)
            value = here.evaluate(trial)
            decision = replace(decision, trials=decision.trials + 1)
            if not -math.inf < value < decision.trial_value:
                break
            actual = here.known_value - value
            verdict = classify(actual, longer.decrease, self.eta1, self.eta2)
            decision = replace(
                decision,
                sigma=here.judge.after_trial(
                    longer.sigma, verdict, actual, longer.decrease, longer.norm, here.grad_norm
                ),
                point=trial,
                branch=_branch(verdict),
                rho=ratio(actual, longer.decrease),
                step_norm=longer.norm,
                trial_value=value,
                step=longer,
            )
        return decision


def _with_gradient_ahead(here: Point, decision: Decision, verdict: Verdict) -> Decision:
    """Evaluate the gradient at the new point, with which the next iteration starts, and update σ.

    If the gradient is not finite the step is rejected. If f still decreases at the end of a successful step, the step
    was too short.
    """
    step, judge = decision.step, here.judge
    assert step is not None
    assert decision.point is not None
    _, g = here.oracle.gradient(decision.point)
    if not math.isfinite(here.oracle.norm(g)):
        sigma = judge.after_trial(step.sigma, Verdict.UNSUCCESSFUL, math.nan, step.decrease, step.norm, math.nan)
        return replace(decision, sigma=sigma, point=None, branch=Branch.STAYED, step_norm=0.0, note=Note.NO_GRADIENT)
    if verdict is not Verdict.SUCCESSFUL:
        return decision
    end = here.space.dot(g, decision.point - here.x)
    sigma = judge.after_derivative(decision.sigma, step.sigma, step.decrease, decision.step_norm, end)
    return replace(decision, sigma=sigma)


def _branch(verdict: Verdict) -> Branch:
    return Branch.VERY_SUCCESSFUL if verdict is Verdict.VERY_SUCCESSFUL else Branch.SUCCESSFUL


@dataclass(frozen=True, kw_only=True)
class AcceptAll(Piece):
    """Accepts every step at whose end f is finite; ρ is recorded only (2.5).

    σ is fixed, except that it grows while f is not finite and then returns to its value.
    """

    def __call__(self, here: Point, subspace: KrylovSubspace, step: CubicStep, trial: Vector, trials: int) -> Decision:
        """Accept the trial point unless f is not finite there."""
        before = here.objective
        value = here.evaluate(trial)
        decision = Decision(here.judge.after_failure(step.sigma), trial_value=value, trials=1, step=step)
        if not math.isfinite(value):
            return replace(decision, note=Note.TRIAL_NOT_FINITE)
        return replace(
            decision,
            sigma=here.judge.after_acceptance(step.sigma),
            point=trial,
            branch=Branch.UNCONDITIONAL,
            rho=ratio(before - value, step.decrease),
            step_norm=step.norm,
        )


@dataclass(frozen=True, kw_only=True)
class Momentum(AcceptAll):
    """CRM (Wang, Zhou, Liang and Lan 2018): extrapolates beyond the cubic point and keeps the better of the two.

    Attributes
    ----------
    momentum : float
        Largest momentum coefficient.
    """

    momentum: float = setting(0.9, BELOW_ONE)

    def __call__(self, here: Point, subspace: KrylovSubspace, step: CubicStep, trial: Vector, trials: int) -> Decision:
        """Accept the cubic point or the extrapolated one."""
        decision = super().__call__(here, subspace, step, trial, trials)
        if decision.point is None:
            return decision
        previous = here.state.memory.get("previous", here.x)
        decision = replace(decision, memory={"previous": trial})
        _, g = here.oracle.gradient(trial)
        here.oracle.meter.paper_calls += here.oracle.sizes[0]  # a second gradient is a second |S_g|
        beta = min(self.momentum, here.space.norm(g), step.norm)
        if not (math.isfinite(beta) and beta > 0.0):
            return decision
        ahead = trial + (trial - previous) * beta
        value = here.evaluate(ahead)
        decision = replace(decision, trials=2)
        if not -math.inf < value < decision.trial_value:
            return decision
        norm = here.space.norm(ahead - here.x)
        return replace(decision, point=ahead, trial_value=value, step_norm=norm, note=Note.MOMENTUM)
