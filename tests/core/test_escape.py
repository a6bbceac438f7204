"""The escape step, as docs/method.md states it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from points import point_with, subspace_with
from sanc.core.escape import CheckedEscape, GradientStep, PaperEscape, Stay, backtrack
from sanc.core.pieces import Decision
from sanc.core.record import Branch, Note
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
    branch, step_size = PaperEscape(L1=L1, L2=L2, epsilon=eps).choose(lam, g, model_proposes=True)
    curvature, gradient = predicted_decreases(lam, g, L1, L2, eps, eps / 4)
    if lam < 0 and curvature > gradient:
        assert branch is Branch.CURVATURE and step_size == pytest.approx(2 * abs(lam) / L2)
    else:
        assert branch is Branch.GRADIENT and step_size == 1 / L1


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


def lower_elsewhere(x):
    """Return 1 at the point zero, and 0 at all others."""
    return 0.0 if np.any(x) else 1.0


def scripted(values):
    """Return a function with these values in the order of its calls; the last one repeats."""
    rest = list(values)
    return lambda x: rest.pop(0) if len(rest) > 1 else rest[0]


NOT_LOWER, NOT_FINITE = "the gradient step does not lower the loss", "the gradient step is not finite"


@pytest.mark.parametrize(
    ("values", "trials", "factor", "note"),
    [
        ([0.5], 1, 1.0, ""),
        ([2.0, 1.0, 0.9], 3, 0.25, ""),  # an equal value is not lower
        ([math.nan, math.inf, 0.5], 3, 0.25, ""),
        ([-math.inf, 0.5], 2, 0.5, ""),  # a value of −∞ is not trusted
        ([2.0], 40, None, NOT_LOWER),
        ([math.nan], 40, None, NOT_LOWER),
    ],
)
def test_backtracking_halves_the_step_until_f_is_lower(values, trials, factor, note):
    here = point_with(scripted([1.0, *values]), x=(0.0, 0.0), g=(3.0, 4.0))
    decision = backtrack(here, np.array([-3.0, 4.0]), Branch.GRADIENT, 8.0, model_proposes=True)
    assert decision.trials == trials == len(here.oracle.values) and decision.note == note and decision.sigma == 8.0
    if factor is None:
        assert decision.point is None and decision.branch is Branch.STAYED and not decision.zero_step
    else:
        assert decision.point.tolist() == [-3.0 * factor, 4.0 * factor] and decision.step_norm == 5.0 * factor
        assert decision.branch is Branch.GRADIENT and decision.trial_value == values[-1]


def test_backtracking_ends_below_the_working_precision_of_x():
    """1e-15 and two halves of it exceed the precision of 1, 2.2e-16; the next half does not."""
    here = point_with(scripted([1.0, 2.0]), x=(1.0,))
    decision = backtrack(here, np.array([1e-15]), Branch.GRADIENT, 1.0, model_proposes=True)
    assert decision.point is None and decision.trials == 3


@pytest.mark.parametrize(("finite_within", "trials"), [(0.6, 2), (0.0, 40)])
def test_backtracking_continues_where_the_gradient_is_not_finite(finite_within, trials):
    here = point_with(
        lower_elsewhere,
        g_elsewhere=lambda x: np.array([1.0 if abs(x[0]) <= finite_within else math.nan]),
        evaluates_next_gradient=True,
    )
    decision = backtrack(here, np.array([-1.0]), Branch.GRADIENT, 1.0, model_proposes=True)
    assert decision.trials == trials == len(here.oracle.gradients)
    if finite_within:
        assert decision.point.tolist() == [-0.5] and decision.note == ""
    else:
        assert decision.point is None and decision.note == Note.GRADIENT_NOT_FINITE


@pytest.mark.parametrize(
    ("checked", "value", "end", "sigma", "note"),
    [
        (False, 7.0, [-0.75, 1.0], 2.0, ""),  # also where f is higher
        (False, math.inf, None, 8.0, NOT_FINITE),
        (False, -math.inf, None, 8.0, NOT_FINITE),
        (True, 0.5, [-0.75, 1.0], 2.0, ""),
        (True, 7.0, None, 8.0, NOT_LOWER),
    ],
)
def test_a_gradient_step_has_the_step_size_lr_over_sigma(checked, value, end, sigma, note):
    """−lr·g = (−3, 4) is divided by σ = 4. σ is then halved, or doubled if there is no step."""
    here = point_with(scripted([1.0, value]), x=(0.0, 0.0), g=(6.0, -8.0))
    decision = GradientStep(lr=0.5, checked=checked)(here, None, 4.0, model_proposes=False)
    assert (None if decision.point is None else decision.point.tolist()) == end
    assert decision.sigma == sigma and decision.note == note
    assert decision.step_norm == (0.0 if end is None else 1.25)


@pytest.mark.parametrize("rule", [GradientStep(), GradientStep(checked=True), CheckedEscape(), PaperEscape()])
def test_a_gradient_of_zero_is_a_step_of_zero(rule):
    here = point_with(lower_elsewhere, g=(0.0,))
    decision = rule(here, None, 3.0, model_proposes=True)
    assert decision == Decision(3.0, zero_step=True) and here.oracle.values == []


def test_stay_evaluates_nothing():
    here = point_with(lower_elsewhere)
    decision = Stay()(here, subspace_with(), 6.0, model_proposes=True)
    assert decision == Decision(6.0, zero_step=True) and here.oracle.values == []


@pytest.mark.parametrize(
    ("ritz_value", "hessian_norm", "sigma", "v", "d"),
    [
        (-3.0, 5.0, 0.5, (1.0, 0.0), (-6.0, 0.0)),  # 2·3³/(3·1²) = 18 > 1/(4·5); 2·3/1 = 6, against gᵀv = 0.6
        (-3.0, 5.0, 0.5, (0.0, 1.0), (0.0, 6.0)),  # gᵀv = −0.8
        (-3.0, 5.0, 9.0, (1.0, 0.0), (-1 / 3, 0.0)),  # 54/(3·18²) = 0.0556 > 0.05; 6/18
        (-3.0, 5.0, 10.0, (1.0, 0.0), (-0.12, 0.16)),  # 54/(3·20²) = 0.045 < 0.05; −g/5
        (3.0, 5.0, 0.5, (1.0, 0.0), (-0.12, 0.16)),
        (0.0, 0.0, 0.5, (1.0, 0.0), (-0.06, 0.08)),  # the norm is not known: −g/10
        (math.nan, 5.0, 0.5, None, (-0.06, 0.08)),  # no Ritz pair
    ],
)
def test_the_checked_escape_has_lipschitz_constants_of_the_krylov_space(ritz_value, hessian_norm, sigma, v, d):
    """L1 is the norm of the Hessian and L2 = 2σ."""
    events = []
    here = point_with(lambda x: events.append("f") or lower_elsewhere(x), x=(0.0, 0.0), g=(0.6, -0.8))
    subspace = subspace_with(
        ritz_value=ritz_value,
        hessian_norm=hessian_norm,
        ritz_vector=lambda: np.array(v),
        release=lambda: events.append("release"),
    )
    events.clear()
    decision = CheckedEscape()(here, subspace, sigma, model_proposes=True)
    assert decision.point.tolist() == pytest.approx(list(d)) and decision.sigma == sigma
    assert decision.branch is (Branch.CURVATURE if d[0] * d[1] == 0.0 else Branch.GRADIENT)
    assert events == ["release", "f"]  # the memory of products is free before f is evaluated


def test_the_checked_escape_without_a_subspace_follows_the_gradient():
    here = point_with(lower_elsewhere, x=(0.0, 0.0), g=(0.6, -0.8))
    decision = CheckedEscape()(here, None, 1.0, model_proposes=True)
    assert decision.branch is Branch.GRADIENT and decision.point.tolist() == pytest.approx([-0.06, 0.08])


def test_across_a_symmetric_saddle_the_sign_is_random_and_repeatable():
    subspace = subspace_with(ritz_value=-1.0, hessian_norm=1.0, ritz_vector=lambda: np.array([1.0]))
    ends = []
    for iteration in [*range(20), *range(20)]:
        here = point_with(lower_elsewhere, g=(0.0,), state={"iteration": iteration})
        ends.append(float(CheckedEscape()(here, subspace, 1.0, model_proposes=True).point[0]))
    assert ends[:20] == ends[20:] and set(ends) == {-1.0, 1.0}
