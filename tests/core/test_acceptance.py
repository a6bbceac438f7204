"""The ratio test against a dense float64 computation of both decreases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.optimize import rosen, rosen_der, rosen_hess

import sanc
from points import point_with, step_of, subspace_with
from sanc.core.acceptance import AcceptAll, Momentum
from sanc.core.record import Note

START = np.array([-1.2, 1.0, -0.7, 2.0])


@dataclass(frozen=True, kw_only=True)
class Recorded(sanc.RatioTest):
    """A ratio test that keeps what it was given and what it returned."""

    calls: list  # of (point, step, trial point, decision)

    def __call__(self, here, subspace, step, trial, trial_count):
        decision = super().__call__(here, subspace, step, trial, trial_count)
        self.calls.append((here, step, trial, decision))
        return decision


def decisions(**settings):
    """Return x, s, σ and the decision of each trial of a run on Rosenbrock's function."""
    rule = Recorded(calls=[], **settings)
    derivatives = {"jac": rosen_der, "hess": rosen_hess}
    found = sanc.minimize(rosen, START, method="scr", preset="paper", acceptance=rule, sigma0=1e-3, **derivatives)
    assert found.success and len(rule.calls) > 10
    for here, step, trial, decision in rule.calls:
        x = np.asarray(here.x)
        yield x, np.asarray(trial) - x, step.sigma, decision


@pytest.mark.parametrize(("eta1", "eta2"), [(0.2, 0.8), (0.05, 0.6), (0.5, 0.9)])
def test_rho_and_the_branch_follow_from_both_decreases(eta1, eta2):
    branches = set()
    for x, s, sigma, decision in decisions(eta1=eta1, eta2=eta2):
        model = rosen_der(x) @ s + 0.5 * s @ rosen_hess(x) @ s + sigma / 3.0 * np.linalg.norm(s) ** 3
        rho = (rosen(x) - rosen(x + s)) / -model
        if not abs(model) > 1e-8 * rosen(x):
            continue  # roundoff
        assert decision.rho == pytest.approx(rho, rel=1e-5)
        assert decision.trial_value == pytest.approx(rosen(x + s), rel=1e-12)
        accepted, very = decision.point is not None, decision.branch is sanc.Branch.VERY_SUCCESSFUL
        assert (accepted, very) == (rho >= eta1, rho > eta2)
        branches.add((accepted, very))
    assert branches >= {(False, False), (True, True)}  # both occur, so that both comparisons can fail


def test_the_paper_doubles_sigma_after_a_rejection_and_lowers_it_only_after_a_very_successful_step():
    for x, _, sigma, decision in decisions(eta1=0.2, eta2=0.8):
        if decision.point is None:
            assert decision.sigma == 2.0 * sigma
        elif decision.branch is sanc.Branch.SUCCESSFUL:
            assert decision.sigma == sigma
        else:
            assert decision.sigma == pytest.approx(min(sigma, np.linalg.norm(rosen_der(x))))


def test_settings_may_be_numbers_of_numpy():
    assert sanc.RatioTest(eta1=np.float32(0.125), eta2=np.float32(0.75)).eta2 == 0.75


@pytest.mark.parametrize("rule", [AcceptAll(), Momentum(momentum=0.0)])
@pytest.mark.parametrize(
    ("value", "accepted", "rho", "sigma"),
    [(0.5, True, 2.0, 2.0), (3.0, True, -8.0, 2.0), (math.inf, False, math.nan, 8.0), (math.nan, False, math.nan, 8.0),
     (-math.inf, False, math.nan, 8.0)],
)  # fmt: skip
def test_accept_all_rejects_only_values_that_are_not_finite(rule, value, accepted, rho, sigma):
    """σ = 4 is halved after an acceptance and doubled after a rejection."""
    here = point_with(lambda x: value if np.any(x) else 1.0)
    decision = rule(here, None, step_of(1.5, 0.25, sigma=4.0), np.array([1.5]), 0)
    assert (decision.point is not None) is accepted and decision.sigma == sigma
    assert decision.rho == pytest.approx(rho, nan_ok=True)
    assert decision.branch is (sanc.Branch.UNCONDITIONAL if accepted else sanc.Branch.STAYED)
    assert decision.step_norm == (1.5 if accepted else 0.0)
    assert decision.note == ("" if accepted else Note.TRIAL_NOT_FINITE) and decision.trials == 1


@pytest.mark.parametrize(
    ("momentum", "grad_norm", "beta"),
    [(0.5, 9.0, 0.5), (0.9, 0.25, 0.25), (0.99, 9.0, 0.75)],  # the smallest of momentum, ‖g‖ and ‖s‖ = 0.75
)
@pytest.mark.parametrize(("previous", "difference"), [(None, 0.75), (-1.25, 2.0)])
@pytest.mark.parametrize(("value", "is_lower"), [(0.2, True), (0.5, False), (math.nan, False), (-math.inf, False)])
def test_momentum_extrapolates_from_the_previous_cubic_point(
    momentum, grad_norm, beta, previous, difference, value, is_lower
):
    """f is 0.5 at the cubic point 0.75, and `value` beyond it."""
    here = point_with(
        lambda x: 1.0 if x[0] == 0.0 else 0.5 if x[0] == 0.75 else value,
        g_elsewhere=lambda x: np.array([grad_norm]),
        state={"acceptance_state": {} if previous is None else {"previous": np.array([previous])}},
    )
    trial = np.array([0.75])
    decision = Momentum(momentum=momentum)(here, None, step_of(0.75, 0.25), trial, 0)
    assert decision.acceptance_state["previous"] is trial
    assert decision.trials == 2 and decision.extra_gradients == 1 and here.oracle.gradients == [trial]
    end = 0.75 + beta * difference
    assert here.oracle.values[1].tolist() == [end]
    assert decision.point.tolist() == [end if is_lower else 0.75]
    assert decision.step_norm == (end if is_lower else 0.75)
    assert decision.trial_value == (value if is_lower else 0.5)
    assert decision.note == (Note.MOMENTUM if is_lower else "")


@pytest.mark.parametrize("entry", [0.0, math.nan, math.inf])
def test_momentum_makes_the_cubic_step_alone_where_the_gradient_is_zero_or_not_finite(entry):
    here = point_with(lambda x: 1.0 - x[0], g_elsewhere=lambda x: np.full_like(x, entry))
    decision = Momentum()(here, None, step_of(0.75, 0.25), np.array([0.75]), 0)
    assert decision.point.tolist() == [0.75] and decision.trials == 1 and decision.extra_gradients == 1


@pytest.mark.parametrize(
    ("change", "grad_norm", "exact", "trials", "guard", "accepted"),
    [
        (1e-13, 0.5, True, 0, True, True),  # below 1000 eps = 2.2e-13, and the gradient norm is halved
        (1e-13, 0.51, True, 0, True, False),
        (1e-13, 0.5, False, 0, True, False),  # on samples, gradients differ in noise too
        (1e-13, 0.5, True, 1, True, False),  # a later trial
        (1e-13, 0.5, True, 0, False, False),
        (3e-13, 0.5, True, 0, True, False),  # more than cancellation
        (1e-15, 2.0, True, 0, True, True),  # below 10 eps = 2.2e-15
        (1e-15, 2.0, False, 1, True, True),
        (1e-15, 2.0, True, 0, False, False),
    ],
)
def test_the_rounding_guard_accepts_rises_of_f_that_roundoff_explains(
    change, grad_norm, exact, trials, guard, accepted
):
    """f = 1 at x and 1 + change at the trial point; the model predicts a decrease of 1e-15."""
    here = point_with(lambda x: 1.0 + change * bool(x[0]), g_elsewhere=lambda x: np.array([grad_norm]))
    here.oracle.exact = exact
    rule = sanc.RatioTest(eta1=0.1, eta2=0.75, rounding_guard=guard)
    decision = rule(here, subspace_with(), step_of(1.0, 1e-15), np.array([1.0]), trials)
    assert (decision.point is not None) is accepted
    by_gradient = accepted and change > 1e-14
    assert decision.note == (Note.GRADIENT_DECIDED if by_gradient else "")
    if accepted:
        rounding = 10.0 * 2.0**-52
        actual = 1e-15 if by_gradient else -round(change * 2.0**52) * 2.0**-52
        assert decision.rho == pytest.approx((actual + rounding) / (1e-15 + rounding), rel=1e-12)


@pytest.mark.parametrize(("noise", "rho"), [(0.0, -10.0), (1e-3, 4e-3 / 5.1e-3)])
def test_noise_that_stalled_the_run_counts_as_rounding_error(noise, rho):
    """Five deviations of it: f rises by 1e-3, and the model predicts a decrease of 1e-4."""
    here = point_with(lambda x: 1.0 + 1e-3 * bool(x[0]), state={"value_noise": noise})
    rule = sanc.RatioTest(eta1=0.1, eta2=0.75, rounding_guard=True)
    decision = rule(here, subspace_with(), step_of(1.0, 1e-4), np.array([1.0]), 0)
    assert decision.rho == pytest.approx(rho, rel=1e-9) and (decision.point is not None) is (rho > 0.1)


class LongerSteps:
    """A subspace whose next steps have these norms, predicted decreases and σ; it records the σ that it receives."""

    allows_longer_steps, hessian_norm = True, 1.0

    def __init__(self, steps):
        self.steps, self.calls = list(steps), []

    def longer_step(self, here, sigma, trial_count):
        self.calls.append((sigma, trial_count))
        return self.steps.pop(0) if self.steps else None

    def trial_point(self, x, step):
        return x + step.norm

    def release(self):
        pass


@pytest.mark.parametrize(
    ("values", "steps", "end", "trials", "rho"),
    [
        ({1: -2.0, 2: -5.0, 4: -4.0}, [(2.0, 1.5), (4.0, 2.0)], 2.0, 3, 5 / 1.5),  # f rises at the last
        ({1: -2.0, 2: -5.0}, [(2.0, 1.5)], 2.0, 2, 5 / 1.5),  # no other step
        ({1: -2.0, 2: -1.0}, [(2.0, 1.5)], 1.0, 2, 2.0),
        ({1: -2.0, 2: -math.inf}, [(2.0, 1.5)], 1.0, 2, 2.0),
        ({1: -2.0, 2: math.nan}, [(2.0, 1.5)], 1.0, 2, 2.0),
        ({1: -2.0}, [(1.99, 1.5)], 1.0, 1, 2.0),  # less than twice as long
        ({1: -2.0, 2: -2.5, 4: -9.0}, [(2.0, 100.0), (4.0, 1.0)], 2.0, 2, 0.025),  # lower, though ρ < η1
        ({1: -1.2, 2: -9.0}, [(2.0, 1.5)], 1.0, 1, 1.2),  # ρ has to exceed 1.2
    ],
)
def test_longer_steps_are_tried_while_f_decreases_by_more_than_predicted(values, steps, end, trials, rho):
    """f = 0 at x; the first step has norm 1 and predicts a decrease of 1. ‖g‖ = 0.01 is the next σ in the paper."""
    here = point_with(lambda x: values.get(x[0], 0.0), g=(0.01,))
    subspace = LongerSteps(step_of(norm, decrease, 0.5**k) for k, (norm, decrease) in enumerate(steps, 1))
    decision = sanc.RatioTest()(here, subspace, step_of(1.0, 1.0), np.array([1.0]), 3)
    assert decision.point.tolist() == [end] and decision.step_norm == end == decision.step.norm
    assert decision.trials == trials == len(here.oracle.values) and decision.rho == pytest.approx(rho)
    assert decision.trial_value == values[end]
    assert subspace.calls == [(0.01, 3 + k) for k in range(1, len(subspace.calls) + 1)]
    very = sanc.Branch.VERY_SUCCESSFUL if rho > 0.8 else sanc.Branch.SUCCESSFUL
    assert decision.branch is very and decision.sigma == (0.01 if rho > 0.8 else 1.0)


@pytest.mark.parametrize(("allows", "noise"), [(False, 0.0), (True, 1e-3)])
def test_no_longer_step_is_tried_if_the_subspace_or_noise_forbids_it(allows, noise):
    here = point_with(lambda x: -9.0 * x[0], g=(0.01,), state={"value_noise": noise})
    subspace = LongerSteps([step_of(2.0, 1.0, 0.5)])
    subspace.allows_longer_steps = allows
    decision = sanc.RatioTest()(here, subspace, step_of(1.0, 1.0), np.array([1.0]), 0)
    assert decision.point.tolist() == [1.0] and subspace.calls == []


@pytest.mark.parametrize("value", [math.nan, 1.0, 0.0])
def test_a_step_to_a_gradient_that_is_not_finite_is_rejected(value):
    """The next norm is a tenth of this one; without a quadratic part, the σ of t times a step is σ/t²."""
    here = point_with(
        lambda x: 0.5 if x[0] else 1.0,
        g_elsewhere=lambda x: np.array([value]),
        rule=sanc.SigmaUpdate(sigma_rule="interpolate").rule(2.0**-52, exact=True),
        evaluates_next_gradient=True,
    )
    decision = sanc.RatioTest()(here, subspace_with(), step_of(1.0, 2.0 / 3.0), np.array([1.0]), 0)
    if math.isnan(value):
        assert decision.point is None and decision.note == Note.GRADIENT_NOT_FINITE
        assert decision.branch is sanc.Branch.STAYED and decision.step_norm == 0.0
        assert decision.sigma == pytest.approx(100.0)
    else:
        assert decision.point.tolist() == [1.0] and decision.sigma == 1.0


def test_a_point_has_the_former_name_of_its_lanczos_start():
    start = np.array([1.0])
    assert point_with(lambda x: 1.0).start is None
    assert point_with(lambda x: 1.0, lanczos_start=start).start is start
