"""Runs whose steps ripples of f keep short: when they are detected, and products by long differences."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
from sanc.core.meter import Meter
from sanc.core.record import Branch, Note, Record
from sanc.core.runs.ripples import FALLING_ITERATIONS, LongDifferenceOracle, RippleMonitor, falls_ahead
from sanc.core.runs.variables import PlainVariables
from sanc.functions.oracle import CallableOracle
from sanc.minimisation.result import Result

X0 = np.array([0.1, 0.1])
TILT = np.array([1.0, -0.6])


def tilted(x):
    """A wide bowl with its smooth minimum at ±5e6, and ripples whose derivative is half of the tilt at most."""
    value = 1e-7 * x @ x - TILT @ x + 0.5 * np.cos(TILT * x).sum()
    return value, 2e-7 * x - TILT - 0.5 * TILT * np.sin(TILT * x)


def tilted_hessp(x, v):
    return (2e-7 - 0.5 * TILT**2 * np.cos(TILT * x)) * v


GIVEN = {"fun": tilted, "x0": X0, "jac": True, "hessp": tilted_hessp}


def minimised(**options) -> Result:
    return sanc.minimize(**GIVEN | {"max_iter": 300} | options)


def long_differences(result):
    return [record for record in result.history if record.note == Note.LONG_DIFFERENCES]


def test_a_long_way_over_ripples_needs_few_iterations():
    found = minimised()
    assert found.success and found.nit < 100 and found.nfev + found.njev + found.nhev < 600
    assert long_differences(found) and found.history[-1].note != Note.LONG_DIFFERENCES
    x, (value, g) = found.x, tilted(found.x)
    assert value == found.fun and np.abs(g).max() < 1e-8
    assert (2e-7 - 0.5 * TILT**2 * np.cos(TILT * x) > 0.0).all()  # a minimum
    smooth = -np.sum(TILT**2) / 4e-7  # the minimum without ripples
    assert found.fun < 0.75 * smooth  # beyond it ripples may end every way
    values = [record.value for record in found.history]
    assert all(later < earlier for earlier, later in pairwise(values))


@pytest.mark.parametrize(
    "options",
    [{"bounds": [(-1e9, 1e9)] * 2}, {"sigma0": 1.0}, {"preset": "paper"}],
    ids=["bounds", "given sigma0", "paper"],
)
def test_other_runs_keep_their_products(options):
    assert not long_differences(minimised(max_iter=60, **options))


def test_a_run_over_ripples_resumes_bit_for_bit():
    states = []
    whole = minimised(callback=lambda intermediate_result: states.append(intermediate_result.state))
    first, last = (long_differences(whole)[i].iteration for i in (0, -1))
    for cut in (first - 1, first, first + 1, (first + last) // 2, last + 1, last + 2):
        rest = minimised(resume=states[cut - 1])
        assert rest.nit == whole.nit and np.array_equal(rest.x, whole.x)
        for ours, theirs in zip(rest.history, whole.history[cut:], strict=True):
            assert repr(asdict(ours) | {"seconds": 0}) == repr(asdict(theirs) | {"seconds": 0})


def test_limits_end_a_run_over_ripples():
    first = long_differences(minimised())[0].iteration
    found = minimised(max_iter=first + 3)
    assert found.status is sanc.Status.ITERATION_LIMIT and found.nit == first + 3
    assert minimised(max_nfev=first + 20).status is sanc.Status.CALL_LIMIT


def test_products_are_differences_of_gradients_over_the_length():
    oracle = CallableOracle(tilted, X0, jac=True)
    oracle.meter = Meter()
    x, v = X0 * 1.0, np.array([3.0, 4.0])
    operator = LongDifferenceOracle(oracle, 100.0).hessian(x)
    expected = (tilted(x + 20.0 * v)[1] - tilted(x)[1]) / 20.0
    assert operator(v) == pytest.approx(expected, rel=1e-12)
    assert np.array_equal(operator(0.0 * v), [0.0, 0.0]) and np.array_equal(operator.gradient(), tilted(x)[1])
    assert oracle.meter.njev == 2


def record(norm=1.0, decrease=0.8, grad_norm=1.0, branch=Branch.SUCCESSFUL):
    return Record(0, branch=branch, step_norm=norm, grad_norm=grad_norm, value=1.0, trial_value=1.0 - decrease)


def after(records):
    monitor = RippleMonitor()
    for made in records:
        monitor = monitor.after(made)
        if monitor.is_complete:
            break
    return monitor


def test_steps_along_which_f_falls_like_a_linear_function_are_detected():
    norms = [1.0, 3.0, 0.5, 2.0] * 5
    rates = [0.6, 0.9, 0.7, 1.4] * 5
    monitor = after([record(norm, rate * norm) for norm, rate in zip(norms, rates, strict=True)])
    begun = monitor.with_differences()
    assert begun == RippleMonitor(length=sum(norms), min_length=sum(norms) / FALLING_ITERATIONS)
    assert not begun.is_complete


@pytest.mark.parametrize(
    "records",
    [
        [record(1.0, 0.49)] * 60,  # Newton's steps of a quadratic decrease it by 0.5
        [record(1.15**k, 0.8 * 1.15**k) for k in range(60)],  # growing steps
        [record(1.0, 0.63 * math.exp(-k), math.exp(-k)) for k in range(60)],  # Newton's steps for exp(−x)
        [record(1.0, 0.7 * 0.95**k, 0.95**k) for k in range(60)],  # f bends
        [record(0.5**k, 0.8 * 0.5**k) if k % 19 else record(branch=Branch.STAYED) for k in range(60)],
        [record(math.nan, math.nan)] * 60,
        [record(math.inf, 1.0)] * 60,
        [record(branch=branch) for branch in (Branch.CURVATURE, Branch.GRADIENT) * 30],
    ],
    ids=["quadratic", "growing", "exponential", "bent", "rejected", "NaN", "infinite", "escape"],
)
def test_other_sequences_are_not(records):
    assert not after(records).is_complete


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (lambda t: -t, True),
        (lambda t: (t - 11.0) ** 2 - 121.0, True),  # the minimum is more than half as far ahead
        (lambda t: (t - 9.0) ** 2 - 81.0, False),
        (lambda t: -math.inf, False),
        (lambda t: math.nan, False),
    ],
)
def test_f_has_to_fall_straight_ahead(ahead, expected):
    oracle = CallableOracle(lambda x: (ahead(x[0]) if x[0] > 0.0 else 0.0, x), np.zeros(2), jac=True)
    assert falls_ahead(oracle, np.array([-0.5, 0.0]), np.zeros(2), 20.0) is expected


def test_a_chain_of_bent_valleys_has_no_ripples():
    """f falls by as much in each step, but along another variable."""
    x0 = np.tile([-1.2, 1.0], 25)
    found = sanc.minimize(rosen, x0, jac=rosen_der, hessp=rosen_hess_prod, max_iter=80)
    assert not long_differences(found)
    assert after(found.history).is_complete


def test_the_length_follows_the_steps_until_one_is_short_or_rejected():
    monitor = RippleMonitor(length=20.0, min_length=1.0)
    assert monitor.after(record(7.0)) == RippleMonitor(length=7.0, min_length=1.0)
    for last in (record(0.9), record(7.0, branch=Branch.STAYED), record(7.0, branch=Branch.CURVATURE)):
        assert monitor.after(last) == RippleMonitor()


def fletcbv3(n, p=1e-8, kappa=1.0):
    """CUTEst's FLETCBV3: f, ∇f and the diagonals of the Hessian, and the start."""
    h = 1.0 / (n + 1)

    def fun(x):
        ends = np.concatenate([[0.0], x, [0.0]])
        value = 0.5 * np.square(np.diff(ends)).sum() - ((h**2 + 2) * x + kappa * np.cos(x)).sum() / h**2
        g = 2 * x - ends[:-2] - ends[2:] - (h**2 + 2 - kappa * np.sin(x)) / h**2
        return p * value, p * g

    def hess(x):
        return p * (np.diag(2.0 + kappa * np.cos(x) / h**2) - np.eye(n, k=1) - np.eye(n, k=-1))

    return fun, hess, h * np.arange(1.0, n + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "best", "evaluations"),
    [
        (30, -46.4, 500),
        (100, -178_592.07, 700),  # L-BFGS-B: -178592.06 after 591 iterations and 969 evaluations of f and ∇f
        (300, -3.7341e8, 1500),
    ],
)
def test_fletcbv3(n, best, evaluations):
    fun, hess, x0 = fletcbv3(n)
    found = sanc.minimize(fun, x0, jac=True, hessp=lambda x, v: hess(x) @ v, max_iter=300)
    assert found.success and found.njev + found.nhev < evaluations
    assert np.linalg.norm(fun(found.x)[1]) < 1e-8 and np.linalg.eigvalsh(hess(found.x)).min() > 0.0
    assert found.fun < 0.985 * best


@pytest.mark.slow
def test_genhumps():
    """CUTEst's GENHUMPS with n = 100 and ζ = 20 from its start."""
    zeta = 20.0

    def fun(x):
        s, d = np.sin(zeta * x) ** 2, zeta * np.sin(2 * zeta * x)
        g = 0.1 * (np.append(x[:-1], 0.0) + np.append(0.0, x[1:]))
        g += np.append(d[:-1] * s[1:], 0.0) + np.append(0.0, d[1:] * s[:-1])
        return (s[:-1] * s[1:]).sum() + 0.05 * (x[:-1] ** 2 + x[1:] ** 2).sum(), g

    found = sanc.minimize(fun, np.append(-506.0, np.full(99, 506.2)), jac=True, max_iter=5000)
    assert found.success and found.fun < 1e-9 and np.linalg.norm(fun(found.x)[1]) < 1e-7


def bowl(n, curvature):
    """A bowl with ripples of several lengths, from a start at which it is far steeper than they are."""
    draw = np.random.default_rng(n)
    basis, _ = np.linalg.qr(draw.standard_normal((n, n)))
    matrix = curvature * (basis * np.logspace(0, -2, n)) @ basis.T
    rates = draw.uniform(0.5, 1.5, n)

    def fun(x):
        return 0.5 * x @ matrix @ x + np.cos(rates * x).sum(), matrix @ x - rates * np.sin(rates * x)

    def hessp(x, v):
        return matrix @ v - rates**2 * np.cos(rates * x) * v

    return fun, hessp, 100.0 / curvature * draw.standard_normal(n)


def kinked(n):
    """Smoothed absolute values with short ripples: the derivatives of the ripples are at most 0.8 of those."""
    scales = np.random.default_rng(n).uniform(0.5, 1.5, n)

    def fun(x):
        value = np.logaddexp(scales * x, -scales * x).sum() + 0.4 / 30 * np.sin(30 * x).sum()
        return value, scales * np.tanh(scales * x) + 0.4 * np.cos(30 * x)

    def hessp(x, v):
        return (scales**2 * (1.0 - np.tanh(scales * x) ** 2) - 12.0 * np.sin(30 * x)) * v

    return fun, hessp, np.full(n, 1e4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [lambda n=n, c=c: bowl(n, c) for n in (2, 10, 50) for c in (1e-4, 1e-6)] + [lambda n=n: kinked(n) for n in (1, 2)],
)
def test_rippled_functions_need_a_fraction_of_the_iterations(problem, monkeypatch):
    fun, hessp, x0 = problem()
    found = sanc.minimize(fun, x0, jac=True, hessp=hessp, max_iter=500)
    assert found.success and found.nit < 250 and np.abs(fun(found.x)[1]).max() < 1e-8
    monkeypatch.setattr(PlainVariables, "allows_long_differences", False)
    other = sanc.minimize(fun, x0, jac=True, hessp=hessp, max_iter=500)
    assert other.nit == 500 and not other.success and other.fun > found.fun
