"""Functions without derivatives: the secant matrix, second differences, and the number of values of a run."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.optimize import rosen, rosen_hess

import sanc
from sanc.functions.secant import SecantOracle, updated
from zoo import PROBLEMS

TWENTY = (
    "ROSENBROCK", "BEALE", "JENNRICH-SAMPSON", "HELICAL-VALLEY", "BARD", "BOX-3D", "WOOD", "KOWALIK-OSBORNE",
    "BROWN-DENNIS", "POWELL-SINGULAR", "TRIGONOMETRIC", "CHEBYQUAD", "ENGVAL2", "FREUROTH", "DENSCHNE", "CUBE",
    "HIMMELBLAU", "STYBLINSKI-TANG", "SHEKEL-5", "HARTMAN-6",
)  # fmt: skip


def counted(problem):
    """Return a NumPy function, and the list that counts its calls."""
    calls = []

    def fun(x):
        calls.append(1)
        with torch.no_grad():
            return float(problem.fun(torch.from_numpy(np.asarray(x, float))))

    return fun, calls


@pytest.mark.parametrize("names", [TWENTY[1:4], pytest.param(TWENTY, marks=pytest.mark.slow)], ids=len)
def test_values_alone_take_at_most_one_and_a_half_times_those_of_bfgs(names):
    """In the mean over 20 problems of up to 10 variables, certificates included."""
    chosen = [problem for problem in PROBLEMS if problem.name in names and problem.n <= 10]
    assert len(chosen) == len(names)
    ratios = []
    for problem in chosen:
        (ours, our_calls), (theirs, their_calls) = counted(problem), counted(problem)
        found = scipy.optimize.minimize(ours, problem.x0, method=sanc.scipy_method)
        scipy.optimize.minimize(theirs, problem.x0, method="BFGS")
        assert found.success and problem.reached(found.fun) is not None, problem.name
        ratios.append(len(our_calls) / len(their_calls))
    assert np.mean(ratios) <= 1.5 and np.median(ratios) <= 1.5


def test_the_update_satisfies_the_secant_equation_and_keeps_symmetry(rng):
    matrix = np.diag(rng.uniform(1, 3, 4))
    s, y = rng.standard_normal(4), rng.standard_normal(4)
    new = updated(matrix, s, y)
    assert new @ s == pytest.approx(y) and np.array_equal(new, new.T)
    assert np.linalg.matrix_rank(new - matrix, tol=1e-10) == 1


def test_an_unstable_update_is_skipped(rng):
    matrix, s = np.eye(3), np.array([1.0, 0.0, 0.0])
    assert updated(matrix, s, s) is matrix  # B s = y already
    assert updated(matrix, s, np.array([1.0, 1.0, 0.0])) is matrix  # no curvature along s is missing
    assert updated(matrix, s, np.full(3, np.inf)) is matrix


def test_a_quadratic_is_learnt_in_as_many_steps_as_it_has_variables(rng):
    A = rng.standard_normal((5, 5))
    A, matrix = A @ A.T, np.eye(5)
    for s in rng.standard_normal((5, 5)):
        matrix = updated(matrix, s, A @ s)
    assert matrix == pytest.approx(A, abs=1e-8)


def test_second_differences_are_the_hessian(rng):
    x = rng.standard_normal(5)
    oracle = SecantOracle(rosen, x, scheme="3-point")
    operator = oracle.hessian(x)
    assert operator.matrix() == pytest.approx(rosen_hess(x), rel=1e-3, abs=0.5)
    assert oracle.meter.nfev == 1 + 2 * 5 + 10
    v = rng.standard_normal(5)
    product = operator(v)
    assert oracle.meter.nfev == 1 + 2 * 5 + 10  # stored
    assert np.linalg.norm(product - rosen_hess(x) @ v) <= 10 * operator.error(v, product)


@pytest.mark.parametrize("where", [0.0, 1e-6, 0.5, 1.0])
def test_second_differences_stay_within_bounds(where):
    seen = []

    def fun(x):
        seen.append(x)
        return rosen(x)

    res = sanc.minimize(fun, [where, 0.3], jac="3-point", bounds=[(0, 1), (0.3, 0.3)])
    theirs = scipy.optimize.minimize(rosen, [where, 0.3], bounds=[(0, 1), (0.3, 0.3)])
    assert res.success and res.fun == pytest.approx(theirs.fun, abs=1e-7)
    assert all(0 <= x[0] <= 1 and x[1] == 0.3 for x in seen)


def test_a_saddle_is_left_although_the_secant_matrix_does_not_show_it():
    res = sanc.minimize(lambda x: x[0] ** 2 + (x[1] ** 2 - 1) ** 2, [1.0, 0.0], jac="3-point")
    assert res.success and abs(res.x[1]) == pytest.approx(1.0, abs=1e-5)


def test_products_within_an_iteration_cost_no_value():
    res = sanc.minimize(rosen, [-1.2, 1.0], jac="2-point", max_iter=1, certify=False)
    assert res.nhev == 0 and res.nfev <= 12


def test_a_run_without_derivatives_resumes():
    states, points = [], []

    def keep(intermediate_result):
        states.append(intermediate_result.state)
        points.append(intermediate_result.x)

    whole = sanc.minimize(rosen, [-1.2, 1.0, 0.5], jac="3-point", callback=keep)
    assert len(states) > 12
    resumed = sanc.minimize(rosen, points[9], jac="3-point", resume=states[9])
    assert resumed.nit == whole.nit and np.array_equal(resumed.x, whole.x)
    state = dict(states[9], oracle=dict(states[9]["oracle"], matrix=[[1.0]]))
    with pytest.raises(sanc.ArgumentError, match=r"resume\['oracle'\]\['matrix'\]"):
        sanc.minimize(rosen, points[9], jac="3-point", resume=state)


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
@pytest.mark.parametrize(("factor", "constant"), [(0.01, 1e6), (0.001, 1e4), (0.1, 1e6)])
def test_differences_that_are_too_inaccurate_do_not_certify_a_saddle(scheme, factor, constant):
    """The saddle is at 0 with λ_min ≈ −4·factor, and the minima are near (±1, 0); roundoff in f is large."""
    f = lambda x: factor * (x[0] ** 2 - 1) ** 2 + x[1] ** 2 + 0.001 * x[0] * x[1] + constant
    res = sanc.minimize(f, np.array([1e-6, 0.5]), jac=scheme)
    assert not res.success or abs(abs(res.x[0]) - 1.0) < 0.05
    assert res.success or "pass its gradient as jac" in res.message


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_values_whose_squares_overflow_are_differenced(scheme):
    res = sanc.minimize(lambda x: 1e200 * float((x**2 - 1) @ (x**2 - 1)), np.full(5, 0.4), jac=scheme)
    assert np.abs(res.x - 1.0).max() < 1e-7
