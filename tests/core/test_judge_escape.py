"""The rules of acceptance, of σ, and of the escape step, as the specification states them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sanc.core import escape
from sanc.core.family import PRESETS
from sanc.core.judge import Judge, Verdict, classify, ratio
from sanc.core.record import Branch
from sanc.core.settings import Settings


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (0.81, Verdict.VERY_SUCCESSFUL),
        (0.8, Verdict.SUCCESSFUL),
        (0.2, Verdict.SUCCESSFUL),
        (0.19, Verdict.UNSUCCESSFUL),
        (-1.0, Verdict.UNSUCCESSFUL),
        (math.nan, Verdict.UNSUCCESSFUL),
        (math.inf, Verdict.UNSUCCESSFUL),
        (-math.inf, Verdict.UNSUCCESSFUL),
    ],
)
def test_classes(actual, expected):
    assert classify(actual, 1.0, 0.2, 0.8) is expected


def test_a_zero_prediction_never_divides():
    assert classify(1.0, 0.0, 0.2, 0.8) is Verdict.UNSUCCESSFUL
    assert math.isnan(ratio(1.0, 0.0))
    assert math.isnan(ratio(math.nan, 1.0))
    assert ratio(0.5, 1.0) == 0.5


def test_sigma_of_the_paper():
    judge = Judge(Settings(sigma0=1.0), eps=2.0**-52)
    judge.try_step(0.9, 1.0, 1.0, grad_norm=0.3, noise=0.0)
    assert judge.sigma == 0.3  # min(σ, ‖g‖)
    judge.try_step(0.5, 1.0, 1.0, grad_norm=0.1, noise=0.0)
    assert judge.sigma == 0.3
    judge.try_step(0.1, 1.0, 1.0, grad_norm=0.1, noise=0.0)
    assert judge.sigma == 0.6
    judge.try_step(math.nan, 1.0, 1.0, grad_norm=0.1, noise=0.0)
    assert judge.sigma == 1.2
    judge.try_step(0.9, 1.0, 1.0, grad_norm=1e-30, noise=0.0)
    assert judge.sigma == 2.0**-52  # the machine precision is the floor


@pytest.mark.parametrize(("eps", "floor"), [(float(np.finfo(np.float32).eps), 1e-20), (2.0**-52, 1e-80)])
def test_sigma_floor_of_the_authors(eps, floor):
    judge = Judge(PRESETS["authors"], eps)
    judge.try_step(0.9, 1.0, 1.0, grad_norm=1e-200, noise=0.0)
    assert judge.sigma == floor


def test_interpolated_sigma_finds_the_coefficient_that_f_showed():
    """f(x+s) = q(s) + (κ/3)‖s‖³ exactly: after a rejection σ is κ."""
    kappa, sigma, norm = 37.0, 1.0, 2.0
    judge = Judge(PRESETS["robust"], eps=2.0**-52)
    predicted = 5.0
    actual = predicted - (kappa - sigma) / 3 * norm**3
    assert judge.try_step(actual, predicted, norm, 1.0, 0.0) is Verdict.UNSUCCESSFUL
    assert judge.sigma == pytest.approx(kappa)


def test_interpolated_sigma_stays_within_its_bounds():
    judge = Judge(Settings(sigma_rule="interpolate", sigma_floor=1e-3, sigma_ceiling=1e3), eps=2.0**-52)
    for _ in range(50):
        judge.try_step(-1e9, 1.0, 1.0, 1.0, 0.0)
    assert judge.sigma == 1e3
    for _ in range(50):
        judge.try_step(1e9, 1.0, 1.0, 1.0, 0.0)
    assert judge.sigma == 1e-3


def along(b, a, sigma):
    """Length of the minimiser of −a t + b t²/2 + (σ/3) t³: the model on a ray, and its decrease."""
    root = math.sqrt(b * b + 4 * sigma * a)
    t = 2 * a / (root + b) if b > 0 else (root - b) / (2 * sigma)
    return t, 0.5 * a * t + sigma * t**3 / 6


@pytest.mark.parametrize("seed", range(200))
def test_the_step_of_the_new_sigma_is_neither_too_long_nor_too_short(seed):
    """On a ray: 0.1 to 0.5 times as long after a rejection, 1 to 3 times after a success, whatever f showed."""
    rng = np.random.default_rng(seed)
    b, a, sigma = rng.standard_normal() * 10 ** rng.uniform(-3, 3), 10 ** rng.uniform(-3, 3), 10 ** rng.uniform(-3, 3)
    norm, predicted = along(b, a, sigma)
    settings = Settings(sigma_rule="interpolate", sigma_floor=0.0, sigma_ceiling=1e300)
    for rho in (-1e12, -10.0, -0.1, 0.1, math.nan, 0.5, 0.9, 1.0, 1.2, 1e3):
        judge = Judge(settings, 2.0**-52, sigma)
        verdict = judge.try_step(rho * predicted, predicted, norm, 1.0, 0.0)
        factor = along(b, a, judge.sigma)[0] / norm
        if verdict is Verdict.UNSUCCESSFUL:
            assert 0.1 - 1e-9 <= factor <= 0.5 + 1e-9
        elif verdict is Verdict.VERY_SUCCESSFUL:
            assert 1.0 - 1e-9 <= factor <= 3.0 + 1e-9
        else:
            assert judge.sigma == sigma


@pytest.mark.parametrize(("kappa", "expected"), [(0.6, 0.6), (1.0, 1.0), (2.0, 1.0), (-5.0, 1 / 9)])
def test_a_success_lowers_sigma_to_what_f_showed_and_never_raises_it(kappa, expected):
    norm, predicted = along(0.0, 1.0, 1.0)  # no curvature: −gᵀs = σ‖s‖³, and the step trebles with σ/9
    judge = Judge(Settings(sigma_rule="interpolate", eta2=0.4), 2.0**-52, 1.0)
    actual = predicted - (kappa - 1.0) / 3 * norm**3
    assert judge.try_step(actual, predicted, norm, 1.0, 0.0) is Verdict.VERY_SUCCESSFUL
    assert judge.sigma == pytest.approx(expected)


@pytest.mark.parametrize(("exact", "fall"), [(False, 1e-3), (True, 1e-6)])
def test_a_quadratic_makes_sigma_fall_far(exact, fall):
    """Where the Newton step is less than three times as long, σ no longer matters for the length."""
    norm, predicted = along(10.0, 1.0, 1.0)
    judge = Judge(PRESETS["robust"], 2.0**-52, 1.0, exact=exact)
    judge.try_step(predicted + norm**3 / 3, predicted, norm, 1.0, 0.0)
    assert judge.sigma == pytest.approx(fall)


def test_a_step_too_short_to_show_anything_only_grows_sigma_when_rejected():
    judge = Judge(PRESETS["robust"], 2.0**-52, 1.0)
    judge.try_step(1.0, 1.0, 1e-120, 1.0, 0.0)
    assert judge.sigma == 1.0
    judge.try_step(-1.0, 1.0, 1e-120, 1.0, 0.0)
    assert judge.sigma == PRESETS["robust"].gamma


@pytest.mark.parametrize(("end", "factor"), [(-0.5, 2.0), (-0.9, 3.0), (-1.5, 3.0), (0.0, 1.0), (0.3, 1.0)])
def test_a_slope_that_still_falls_makes_the_next_step_longer(end, factor):
    """Slopes are in units of the first: from −1 to −0.5 in one step, the line meets zero at two."""
    norm, predicted = along(0.0, 1.0, 1.0)
    judge = Judge(PRESETS["robust"], 2.0**-52, 1.0)
    judge.look_back(1.0, predicted, norm, end * norm)  # gᵀs = −norm where g = 1
    assert along(0.0, 1.0, judge.sigma)[0] / norm == pytest.approx(factor)


def test_a_step_taken_back_is_a_tenth_as_long():
    norm, predicted = along(0.5, 1.0, 1.0)
    judge = Judge(PRESETS["robust"], 2.0**-52, 1e-5)
    judge.retreat(1.0, predicted, norm)
    assert along(0.5, 1.0, judge.sigma)[0] / norm == pytest.approx(0.1)


def test_shorten_raises_sigma_until_the_step_fits():
    judge = Judge(PRESETS["robust"], 2.0**-52, 1.0)
    judge.shorten(lambda sigma: 100.0 / sigma, 3.0)
    assert 100.0 / 3.0 <= judge.sigma <= 200.0 / 3.0
    at = judge.sigma
    judge.shorten(lambda sigma: 100.0 / sigma, 50.0)
    assert judge.sigma == at
    judge.sigma = 1e-290
    judge.shorten(lambda sigma: 1.0, 3.0, least=1e30)  # whose ratio to σ is not finite
    assert judge.sigma == 1e-290
    judge.sigma = 8.0
    judge.shorten(lambda sigma: 100.0 / sigma, 3.0, least=30.0)
    assert judge.sigma == 64.0
    judge.shorten(lambda sigma: math.inf, 1.0)
    assert judge.sigma == PRESETS["robust"].sigma_ceiling


def test_noise_makes_the_ratio_of_two_roundings_one():
    assert classify(-1e-17, 1e-18, 0.1, 0.75, noise=1e-14) is Verdict.VERY_SUCCESSFUL
    assert classify(-1e-17, 1e-18, 0.1, 0.75, noise=0.0) is Verdict.UNSUCCESSFUL


def promise(lam, g, L1, L2, eps, eps_g, power=2):
    return 2 * (-lam) ** 3 / (3 * L2**2) - eps * lam**2 / (6 * L2**2), g**2 / (4 * L1) - eps_g**power / L1


@pytest.mark.parametrize("seed", range(200))
def test_the_paper_takes_the_step_that_promises_more(seed):
    rng = np.random.default_rng(seed)
    lam, g = rng.standard_normal() * 10 ** rng.uniform(-3, 1), 10 ** rng.uniform(-4, 1)
    L1, L2, eps = 10 ** rng.uniform(-1, 2), 10 ** rng.uniform(-1, 2), 10 ** rng.uniform(-5, -1)
    settings = Settings(L1=L1, L2=L2, epsilon=eps)
    branch, length = escape.choose(lam, g, L1, L2, settings)
    curvature, gradient = promise(lam, g, L1, L2, eps, eps / 4)
    if lam < 0 and curvature > gradient:
        assert branch is Branch.CURVATURE and length == pytest.approx(2 * abs(lam) / L2)
    else:
        assert branch is Branch.GRADIENT and length == 1 / L1


def test_curvature_is_never_followed_uphill():
    """Without the guard, ‖g‖ < 2ε_g makes the gradient's promise negative and an uphill curvature step would win."""
    settings = Settings(epsilon=1e-2, epsilon_g=1.0)
    assert escape.choose(+0.5, 1e-3, 10.0, 10.0, settings)[0] is Branch.GRADIENT
    assert escape.choose(0.0, 1e-3, 10.0, 10.0, settings)[0] is Branch.GRADIENT


def test_the_authors_stay_above_minus_epsilon():
    authors = PRESETS["authors"]
    assert escape.choose(-0.5e-4, 1.0, 10.0, 10.0, authors)[0] is Branch.STAYED
    assert escape.choose(+1.0, 1.0, 10.0, 10.0, authors)[0] is Branch.STAYED
    assert escape.choose(-1.0, 10.0, 10.0, 10.0, authors)[0] is Branch.GRADIENT
    assert escape.choose(-1.0, 1e-3, 10.0, 10.0, authors)[0] is Branch.CURVATURE
    assert escape.choose(+1.0, 1.0, 10.0, 10.0, authors, may_stay=False)[0] is Branch.GRADIENT


def test_the_authors_do_not_square_epsilon_g():
    """Between the two forms of the rule there are cases that they decide differently."""
    eps = 0.4
    lam, L1, L2 = -0.5, 1.0, 1.0
    curvature, squared = promise(lam, 0.8, L1, L2, eps, eps / 4)
    _, plain = promise(lam, 0.8, L1, L2, eps, eps / 4, power=1)
    assert plain < curvature < squared
    paper, authors = Settings(epsilon=eps), Settings(epsilon=eps, gradient_tolerance_power=1)
    assert escape.choose(lam, 0.8, L1, L2, paper)[0] is Branch.GRADIENT
    assert escape.choose(lam, 0.8, L1, L2, authors)[0] is Branch.CURVATURE
