"""The ratio test against a dense float64 computation of both decreases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy.optimize import rosen, rosen_der, rosen_hess

import sanc

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
