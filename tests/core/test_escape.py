"""The escape step, as docs/method.md states it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sanc.core.escape import PaperEscape
from sanc.core.record import Branch
from sanc.lab.authors import AuthorsEscape


def predicted_decreases(lam, g, L1, L2, eps, eps_g, power=2):
    return 2 * (-lam) ** 3 / (3 * L2**2) - eps * lam**2 / (6 * L2**2), g**2 / (4 * L1) - eps_g**power / L1


@pytest.mark.parametrize("seed", range(60))
def test_the_paper_makes_the_step_of_the_larger_predicted_decrease(seed):
    """The norm of the gradient is within ten per cent of the one for which both decreases are equal."""
    rng = np.random.default_rng(seed)
    L1, L2, eps = 10 ** rng.uniform(-1, 2), 10 ** rng.uniform(-1, 2), 10 ** rng.uniform(-5, -1)
    lam = eps * rng.uniform(-1, 0.2) * 10 ** rng.uniform(0, 3)
    decrease = max(predicted_decreases(lam, 0.0, L1, L2, eps, eps / 4)[0], 0.0)
    g = math.sqrt(4 * L1 * decrease + (eps / 2) ** 2) * rng.uniform(0.9, 1.1)
    branch, length = PaperEscape(L1=L1, L2=L2, epsilon=eps).choose(lam, g, model_proposes=True)
    curvature, gradient = predicted_decreases(lam, g, L1, L2, eps, eps / 4)
    if lam < 0 and curvature > gradient:
        assert branch is Branch.CURVATURE and length == pytest.approx(2 * abs(lam) / L2)
    else:
        assert branch is Branch.GRADIENT and length == 1 / L1


def test_curvature_is_never_followed_uphill():
    """Without the guard, ‖g‖ < 2ε_g makes the gradient's prediction negative and an uphill curvature step would win."""
    rule = PaperEscape(epsilon=1e-2, epsilon_g=1.0)
    assert rule.choose(+0.5, 1e-3, model_proposes=True)[0] is Branch.GRADIENT
    assert rule.choose(0.0, 1e-3, model_proposes=True)[0] is Branch.GRADIENT


def test_the_authors_stay_above_minus_epsilon():
    rule = AuthorsEscape()
    assert rule.choose(-0.5e-4, 1.0, model_proposes=True)[0] is Branch.STAYED
    assert rule.choose(+1.0, 1.0, model_proposes=True)[0] is Branch.STAYED
    assert rule.choose(-1.0, 10.0, model_proposes=True)[0] is Branch.GRADIENT
    assert rule.choose(-1.0, 1e-3, model_proposes=True)[0] is Branch.CURVATURE
    assert rule.choose(+1.0, 1.0, model_proposes=False)[0] is Branch.GRADIENT


def test_the_authors_do_not_square_epsilon_g():
    """Between the two forms of the rule there are cases that they decide differently."""
    eps = 0.4
    lam, L1, L2 = -0.5, 1.0, 1.0
    curvature, squared = predicted_decreases(lam, 0.8, L1, L2, eps, eps / 4)
    _, plain = predicted_decreases(lam, 0.8, L1, L2, eps, eps / 4, power=1)
    assert plain < curvature < squared
    settings = {"L1": L1, "L2": L2, "epsilon": eps}
    assert PaperEscape(**settings).choose(lam, 0.8, model_proposes=True)[0] is Branch.GRADIENT
    assert AuthorsEscape(**settings).choose(lam, 0.8, model_proposes=True)[0] is Branch.CURVATURE
