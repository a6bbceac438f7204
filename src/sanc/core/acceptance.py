"""Acceptance rules (2.5, 2.6): which trial points are accepted, and the σ that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from sanc.core.pieces import Decision, Subspace
from sanc.core.point import Point
from sanc.core.ratio import TrialOutcome, Verdict, classify, ratio
from sanc.core.record import Branch, Note
from sanc.core.settings import BELOW_ONE, FRACTION, Piece, setting
from sanc.core.space import ROUNDING_ERRORS, Vector
from sanc.core.spectrum.cubic import CubicStep
from sanc.core.units import length_scale_at
from sanc.errors import is_number, require

LONGER_STEP_RHO = 1.2
"""ρ above which the model underestimates the decrease, so that a longer step is tried."""
DECIDING_REDUCTION = 0.5
"""If the change of f is below roundoff, a step that reduces the gradient norm by this factor is accepted."""
WORTHWHILE_GROWTH = 2.0
"""A longer step is evaluated only if its norm is at least this many times the norm of the last step."""
NOISE_DEVIATIONS = 5.0
"""A change of f below this many standard deviations of its noise may be noise alone: the difference of two values has
√2 of them, and the value at x may be the lowest of many."""
CANCELLATION_ERRORS = 1e3
"""A change of f below this many rounding errors may be due to cancellation alone."""


class _RatioTestResult(NamedTuple):
    """The result of the ratio test.

    Attributes
    ----------
    verdict : Verdict
        The class of the step.
    sigma : float
        The next σ.
    rho : float
        ρ, the actual over the predicted decrease.
    """

    verdict: Verdict
    sigma: float
    rho: float


class _GuardedDecrease(NamedTuple):
    """The decrease of f, guarded against rounding errors.

    Attributes
    ----------
    actual : float
        The actual decrease to compare with the predicted one.
    value_rounding : float
        The rounding error of f, to be added to both decreases.
    note : str
        Why it is not f(x) − f(x + s); empty otherwise.
    """

    actual: float
    value_rounding: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RatioTest(Piece):
    """Accepts a step if f decreases by at least η1 times the predicted decrease; updates σ (2.5, 2.6).

    If the subspace allows it and ρ > 1.2, longer steps in the same subspace are tried. They are accepted if f is lower
    than at the step before, whatever their ρ.

    Attributes
    ----------
    eta1, eta2 : float
        A step with ρ ≥ η1 is accepted; with ρ > η2 it also lowers σ. 0.2 and 0.8 are the paper's.
    rounding_guard : bool
        Add the rounding error of f to both decreases, so that ρ tends to 1 as the change of f tends to roundoff. If the
        change of an exact f is below its cancellation error, also accept a rejected step that halves the gradient norm.
        Noise of f that has stalled a run counts as rounding error.
    """

    eta1: float = setting(0.2, FRACTION)
    eta2: float = 0.8
    rounding_guard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_allowed = is_number(self.eta2) and self.eta1 < self.eta2 < 1
        require(is_allowed, "eta2", self.eta2, f"pass a number above eta1 = {self.eta1} and below 1")

    def __call__(self, here: Point, subspace: Subspace, step: CubicStep, trial: Vector, trial_count: int) -> Decision:
        """Form ρ, and return the decision to accept or reject the step."""
        value_at_x = here.objective
        trial_value = here.evaluate(trial)
        actual = value_at_x - trial_value
        if self.rounding_guard:
            decrease = self._guarded_decrease(here, subspace, actual, step, trial, first=trial_count == 0)
        else:
            decrease = _GuardedDecrease(actual)
        result = self._test(here, step, decrease.actual, decrease.value_rounding)
        if not result.verdict.accepted:
            note = "" if math.isfinite(trial_value) else Note.TRIAL_NOT_FINITE
            return Decision(result.sigma, rho=result.rho, trial_value=trial_value, trials=1, step=step, note=note)
        decision = _accepted(result, step, trial, trial_value, note=decrease.note)
        if subspace.allows_longer_steps and not here.state.value_noise:
            decision = self._with_longer_steps(here, subspace, decision, trial_count)
        if here.sigma_rule.interpolates and here.evaluates_next_gradient:
            decision = _with_next_gradient(here, decision, result.verdict)
        return decision

    def _test(self, here: Point, step: CubicStep, actual: float, value_rounding: float = 0.0) -> _RatioTestResult:
        """Return the result of the ratio test for an actual decrease."""
        verdict = classify(actual, step.decrease, self.eta1, self.eta2, value_rounding)
        outcome = TrialOutcome(step.sigma, verdict, actual, step.decrease, step.norm, here.grad_norm, value_rounding)
        rho = ratio(actual, step.decrease, value_rounding)
        return _RatioTestResult(verdict, here.sigma_rule.after_trial(outcome), rho)

    def _guarded_decrease(
        self, here: Point, subspace: Subspace, actual: float, step: CubicStep, trial: Vector, *, first: bool
    ) -> _GuardedDecrease:
        """Return the decrease to use with the rounding error of f.

        Added to both decreases, the rounding error makes ρ tend to 1 as the change of f tends to roundoff. But f may be
        a sum of terms far larger than itself, and cancellation between these may exceed the decrease. A step that
        halves the gradient norm of an exact objective then counts as if f had decreased by the predicted amount.
        """
        eps, value_at_x, note = here.space.eps, here.objective, ""
        if actual < self.eta1 * step.decrease and first and here.oracle.exact:
            length_scale = length_scale_at(here.units.length_scale, here.x_norm)
            term_size = largest_term(value_at_x, subspace.hessian_norm, length_scale, here.units.value)
            if is_within_cancellation(actual, step.decrease, term_size, eps):
                _, g = here.oracle.gradient(trial)
                if here.space.norm(g) <= DECIDING_REDUCTION * here.grad_norm:
                    note, actual = Note.GRADIENT_DECIDED, step.decrease
        rounding = max(ROUNDING_ERRORS * eps * abs(value_at_x), NOISE_DEVIATIONS * here.state.value_noise)
        return _GuardedDecrease(actual, rounding, note)

    def _with_longer_steps(self, here: Point, subspace: Subspace, decision: Decision, trial_count: int) -> Decision:
        """Return the decision after longer steps in the same subspace, while f decreases by more than predicted.

        Longer steps have a smaller σ. A longer step is accepted if it lowers f further, even if ρ < η1. Its ρ sets only
        the branch and the next σ.
        """
        while decision.step is not None and decision.rho > LONGER_STEP_RHO and decision.sigma < decision.step.sigma:
            longer = subspace.longer_step(here, decision.sigma, trial_count + decision.trials)
            if longer is None or longer.norm < WORTHWHILE_GROWTH * decision.step_norm:
                break
            trial = subspace.trial_point(here.x, longer)
            subspace.release()
            trial_value = here.evaluate(trial)
            count = decision.trials + 1
            if not -math.inf < trial_value < decision.trial_value:
                return replace(decision, trials=count)
            result = self._test(here, longer, here.objective - trial_value)
            decision = _accepted(result, longer, trial, trial_value, note=decision.note, trial_count=count)
        return decision


def largest_term(value: float, hessian_norm: float, length_scale: float, unit_value: float) -> float:
    """Return an estimate of the largest term that f is a sum of.

    With badly scaled variables ‖B‖ℓ² with the length scale ℓ overestimates it, so it is bounded by the unit of f at the
    first point.
    """
    return max(abs(value), min(hessian_norm * length_scale * length_scale, unit_value))


def is_within_cancellation(actual: float, predicted: float, term_size: float, eps: float) -> bool:
    """Return whether the decrease of f is below the cancellation error of terms of this size."""
    return abs(actual) <= CANCELLATION_ERRORS * eps * term_size and predicted <= math.sqrt(eps) * term_size


def _accepted(
    result: _RatioTestResult, step: CubicStep, trial: Vector, trial_value: float, *, note: str, trial_count: int = 1
) -> Decision:
    """Return the decision with the trial point as the next point."""
    branch = Branch.VERY_SUCCESSFUL if result.verdict is Verdict.VERY_SUCCESSFUL else Branch.SUCCESSFUL
    return Decision(
        result.sigma,
        trial,
        branch=branch,
        rho=result.rho,
        step_norm=step.norm,
        trial_value=trial_value,
        trials=trial_count,
        step=step,
        note=note,
    )


def _with_next_gradient(here: Point, decision: Decision, first_verdict: Verdict) -> Decision:
    """Return the decision after an evaluation of the gradient at the new point, with which the next iteration starts.

    If that gradient is not finite, the step is rejected. `first_verdict` is the class of the first trial. σ is lowered
    if that trial was successful, not very successful, and f still decreases at its end: the step was too short. Longer
    steps follow very successful first trials only, so that σ is not lowered after them.
    """
    step, rule = decision.step, here.sigma_rule
    assert step is not None
    assert decision.point is not None
    _, g = here.oracle.gradient(decision.point)
    if not math.isfinite(here.oracle.norm(g)):
        outcome = TrialOutcome(step.sigma, Verdict.UNSUCCESSFUL, math.nan, step.decrease, step.norm, math.nan)
        sigma = rule.after_trial(outcome)
        return replace(
            decision, sigma=sigma, point=None, branch=Branch.STAYED, step_norm=0.0, note=Note.GRADIENT_NOT_FINITE
        )
    if first_verdict is not Verdict.SUCCESSFUL:
        return decision
    end_derivative = here.space.dot(g, decision.point - here.x)
    sigma = rule.after_derivative(decision.sigma, step.sigma, step.decrease, decision.step_norm, end_derivative)
    return decision if sigma == decision.sigma else replace(decision, sigma=sigma)


@dataclass(frozen=True, kw_only=True)
class AcceptAll(Piece):
    """Accepts every step at whose end f is finite; ρ is for the record (2.5).

    σ is fixed, except that it grows while f is not finite and then returns to its value.
    """

    def __call__(self, here: Point, subspace: Subspace, step: CubicStep, trial: Vector, trial_count: int) -> Decision:
        """Return the decision to accept the trial point, unless f is not finite there."""
        value_at_x = here.objective
        trial_value = here.evaluate(trial)
        decision = Decision(here.sigma_rule.after_failure(step.sigma), trial_value=trial_value, trials=1, step=step)
        if not math.isfinite(trial_value):
            return replace(decision, note=Note.TRIAL_NOT_FINITE)
        return replace(
            decision,
            sigma=here.sigma_rule.after_acceptance(step.sigma),
            point=trial,
            branch=Branch.UNCONDITIONAL,
            rho=ratio(value_at_x - trial_value, step.decrease),
            step_norm=step.norm,
        )


@dataclass(frozen=True, kw_only=True)
class Momentum(AcceptAll):
    """CRM (Wang, Zhou, Liang and Lan 2018): extrapolates beyond the cubic point and accepts the one with the lower f.

    Attributes
    ----------
    momentum : float
        Largest momentum coefficient. 0.9 is the usual coefficient of heavy-ball methods.
    """

    momentum: float = setting(0.9, BELOW_ONE)

    def __call__(self, here: Point, subspace: Subspace, step: CubicStep, trial: Vector, trial_count: int) -> Decision:
        """Return the decision to accept the cubic point or the extrapolated one."""
        decision = super().__call__(here, subspace, step, trial, trial_count)
        if decision.point is None:
            return decision
        previous_cubic_point = here.state.acceptance_state.get("previous", here.x)
        _, g = here.oracle.gradient(trial)
        decision = replace(decision, acceptance_state={"previous": trial}, extra_gradients=1)
        grad_norm = here.space.norm(g)
        beta = min(self.momentum, grad_norm, step.norm)
        if not (math.isfinite(grad_norm) and beta > 0.0):
            return decision
        extrapolated = here.oracle.move(trial, (trial - previous_cubic_point) * beta)
        value = here.evaluate(extrapolated)
        decision = replace(decision, trials=2)
        if not -math.inf < value < decision.trial_value:
            return decision
        norm = here.space.norm(extrapolated - here.x)
        return replace(decision, point=extrapolated, trial_value=value, step_norm=norm, note=Note.MOMENTUM)
