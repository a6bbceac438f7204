"""The rules of σ, as docs/method.md states them."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, dataclass, fields

import numpy as np
import pytest

from sanc.core.ratio import TrialOutcome, Verdict, classify
from sanc.core.sigma import SigmaRule, SigmaUpdate
from sanc.lab.authors import AUTHORS
from sanc.presets import PRESETS

EPS = 2.0**-52
ROBUST = PRESETS["robust"].sigma.rule(EPS)


def after(rule, sigma, actual, predicted, norm, grad_norm=1.0, rounding=0.0, eta1=0.1, eta2=0.75):
    """Class of a step, and σ after it."""
    verdict = classify(actual, predicted, eta1, eta2, rounding)
    return verdict, rule.after_trial(TrialOutcome(sigma, verdict, actual, predicted, norm, grad_norm, rounding))


def test_sigma_of_the_paper():
    rule = SigmaUpdate(sigma0=1.0).rule(EPS)
    paper = {"eta1": 0.2, "eta2": 0.8}
    assert after(rule, 1.0, 0.9, 1.0, 1.0, 0.3, **paper)[1] == 0.3  # min(σ, ‖g‖)
    assert after(rule, 0.3, 0.5, 1.0, 1.0, 0.1, **paper)[1] == 0.3
    assert after(rule, 0.3, 0.1, 1.0, 1.0, 0.1, **paper)[1] == 0.6
    assert after(rule, 0.6, math.nan, 1.0, 1.0, 0.1, **paper)[1] == 1.2
    assert after(rule, 1.2, 0.9, 1.0, 1.0, 1e-30, **paper)[1] == EPS  # the machine precision is the floor


def test_the_rule_holds_no_sigma_and_cannot_be_changed():
    """σ is a value that is passed in and returned; nothing can be written into the rule."""
    rule = SigmaUpdate().rule(EPS)
    assert not hasattr(rule, "sigma")
    for item in fields(SigmaRule):
        with pytest.raises(FrozenInstanceError):
            setattr(rule, item.name, 1.0)
    assert [after(rule, 2.0, 0.0, 1.0, 1.0)[1] for _ in range(3)] == [4.0] * 3  # nothing is remembered


@pytest.mark.parametrize(("eps", "floor"), [(float(np.finfo(np.float32).eps), 1e-20), (EPS, 1e-80)])
def test_sigma_floor_of_the_authors(eps, floor):
    assert after(AUTHORS.sigma.rule(eps), 1.0, 0.9, 1.0, 1.0, 1e-200)[1] == floor


def test_interpolated_sigma_finds_the_coefficient_that_f_showed():
    """f(x+s) = q(s) + (κ/3)‖s‖³ exactly: after a rejection σ is κ."""
    kappa, sigma, norm, predicted = 37.0, 1.0, 2.0, 5.0
    actual = predicted - (kappa - sigma) / 3 * norm**3
    verdict, found = after(ROBUST, sigma, actual, predicted, norm)
    assert verdict is Verdict.UNSUCCESSFUL and found == pytest.approx(kappa)


def test_interpolated_sigma_stays_within_its_bounds():
    rule = SigmaUpdate(sigma_rule="interpolate", sigma_floor=1e-3, sigma_ceiling=1e3).rule(EPS)
    sigma = 1.0
    for _ in range(50):
        _, sigma = after(rule, sigma, -1e9, 1.0, 1.0)
    assert sigma == 1e3
    for _ in range(50):
        _, sigma = after(rule, sigma, 1e9, 1.0, 1.0)
    assert sigma == 1e-3


def along(b, a, sigma):
    """Length of the minimiser of −a t + b t²/2 + (σ/3) t³: the model on a ray, and its decrease."""
    root = math.sqrt(b * b + 4 * sigma * a)
    t = 2 * a / (root + b) if b > 0 else (root - b) / (2 * sigma)
    return t, 0.5 * a * t + sigma * t**3 / 6


@pytest.mark.parametrize("seed", range(100))
def test_the_step_of_the_new_sigma_is_neither_too_long_nor_too_short(seed):
    """On a ray: 0.1 to 0.5 times as long after a rejection, 1 to 3 times after a success, whatever f showed."""
    rng = np.random.default_rng(seed)
    b, a, sigma = rng.standard_normal() * 10 ** rng.uniform(-3, 3), 10 ** rng.uniform(-3, 3), 10 ** rng.uniform(-3, 3)
    norm, predicted = along(b, a, sigma)
    rule = SigmaUpdate(sigma_rule="interpolate", sigma_floor=0.0, sigma_ceiling=1e300).rule(EPS)
    for rho in (-1e12, -10.0, -0.1, 0.1, math.nan, 0.5, 0.9, 1.0, 1.2, 1e3):
        verdict, found = after(rule, sigma, rho * predicted, predicted, norm, eta1=0.2, eta2=0.8)
        factor = along(b, a, found)[0] / norm
        if verdict is Verdict.UNSUCCESSFUL:
            assert 0.1 - 1e-9 <= factor <= 0.5 + 1e-9
        elif verdict is Verdict.VERY_SUCCESSFUL:
            assert 1.0 - 1e-9 <= factor <= 3.0 + 1e-9
        else:
            assert found == sigma


@pytest.mark.parametrize(("kappa", "expected"), [(0.6, 0.6), (1.0, 1.0), (2.0, 1.0), (-5.0, 1 / 9)])
def test_a_success_lowers_sigma_to_what_f_showed_and_never_raises_it(kappa, expected):
    norm, predicted = along(0.0, 1.0, 1.0)  # no curvature: −gᵀs = σ‖s‖³, and the step trebles with σ/9
    actual = predicted - (kappa - 1.0) / 3 * norm**3
    verdict, found = after(ROBUST, 1.0, actual, predicted, norm, eta2=0.4)
    assert verdict is Verdict.VERY_SUCCESSFUL and found == pytest.approx(expected)


@pytest.mark.parametrize(("exact", "fall"), [(False, 1e-3), (True, 1e-6)])
def test_a_quadratic_makes_sigma_fall_far(exact, fall):
    """Where the Newton step is less than three times as long, σ no longer matters for the length."""
    norm, predicted = along(10.0, 1.0, 1.0)
    rule = PRESETS["robust"].sigma.rule(EPS, exact=exact)
    assert after(rule, 1.0, predicted + norm**3 / 3, predicted, norm)[1] == pytest.approx(fall)


def test_a_step_too_short_to_show_anything_only_grows_sigma_when_rejected():
    assert after(ROBUST, 1.0, 1.0, 1.0, 1e-120)[1] == 1.0
    assert after(ROBUST, 1.0, -1.0, 1.0, 1e-120)[1] == PRESETS["robust"].sigma.gamma


@pytest.mark.parametrize(("end", "factor"), [(-0.5, 2.0), (-0.9, 3.0), (-1.5, 3.0), (0.0, 1.0), (0.3, 1.0)])
def test_a_negative_derivative_at_the_end_makes_the_next_step_longer(end, factor):
    """Derivatives are in units of the first: from −1 to −0.5 in one step, the line meets zero at two."""
    norm, predicted = along(0.0, 1.0, 1.0)
    sigma = ROBUST.after_derivative(1.0, 1.0, predicted, norm, end * norm)  # gᵀs = −norm where g = 1
    assert along(0.0, 1.0, sigma)[0] / norm == pytest.approx(factor)


def test_a_step_to_a_value_that_is_not_finite_is_followed_by_a_tenth_of_it():
    norm, predicted = along(0.5, 1.0, 1.0)
    _, sigma = after(ROBUST, 1.0, math.nan, predicted, norm)
    assert along(0.5, 1.0, sigma)[0] / norm == pytest.approx(0.1)


@dataclass(frozen=True)
class Step:
    sigma: float
    norm: float


def test_limit_step_raises_sigma_until_the_step_fits():
    def step(sigma):
        return Step(sigma, 100.0 / sigma)

    short = ROBUST.limit_step(step(1.0), 1.0, step, 3.0, 0.0)
    assert 100.0 / 3.0 <= short.sigma <= 200.0 / 3.0
    assert ROBUST.limit_step(short, short.sigma, step, 50.0, 0.0) is short
    tiny = Step(1e-290, 1.0)
    assert ROBUST.limit_step(tiny, 1e-290, step, 3.0, 1e30) is tiny  # the ratio of the bound to σ is not finite
    assert ROBUST.limit_step(step(8.0), 8.0, step, 3.0, 30.0).sigma == 64.0
    endless = ROBUST.limit_step(Step(1.0, math.inf), 1.0, lambda sigma: Step(sigma, math.inf), 1.0, 0.0)
    assert endless.sigma == ROBUST.ceiling
