"""Nothing in the default depends on the units of f and of x."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
import zoo
from sanc.core.point import Point, State
from sanc.core.sigma import SigmaRule
from sanc.core.space import NumpySpace
from sanc.core.units import Units, default_tolerance, measure_units
from sanc.many.entry import TOLERANCES

SCALES = [(2.0**-100, 1.0), (2.0**100, 1.0), (1.0, 2.0**-27), (1.0, 2.0**27), (2.0**-99, 2.0**26), (2.0**99, 2.0**-26)]


def path(functions, x0, c, k, **options):
    """Run on c·f(x/k) from k·x0, and return the points in the units of c = k = 1."""
    f, jac, hessp = functions
    points = []
    products = {} if hessp is None else {"hessp": lambda x, v: c / k / k * hessp(x / k, v)}
    result = sanc.minimize(
        lambda x: c * f(x / k),
        k * np.asarray(x0),
        jac=lambda x: c / k * jac(x / k),
        tol=1e-8 * c / k,
        curvature_tol=1e-4 * c / k / k,
        callback=lambda x: points.append(x / k),
        **products,
        **options,
    )
    return result, np.array(points)


@pytest.mark.parametrize("method", ["sanc", "arc"])
@pytest.mark.parametrize("differenced", [False, True])
def test_powers_of_two_change_no_bit(method, differenced):
    x0 = np.tile([-1.2, 1.0], 5)
    functions = (rosen, rosen_der, None if differenced else rosen_hess_prod)
    plain, points = path(functions, x0, 1.0, 1.0, method=method)
    assert plain.success and plain.nit < 60
    for c, k in SCALES:
        scaled, same = path(functions, x0, c, k, method=method)
        assert scaled.status is plain.status and (scaled.nfev, scaled.nhev) == (plain.nfev, plain.nhev)
        assert np.array_equal(same, points)


@pytest.mark.parametrize("name", ["COSINE", "HELICAL-VALLEY", "BEALE", "HIMMELBLAU", "BROWN-DENNIS"])
def test_the_same_with_negative_curvature_and_from_zero(name):
    problem = zoo.BY_NAME[name]
    f, jac, _, hessp = zoo.numpy_functions(problem)
    _, points = path((f, jac, hessp), problem.x0, 1.0, 1.0, max_iter=20, certify=False)
    for c, k in SCALES[4:]:
        _, same = path((f, jac, hessp), problem.x0, c, k, max_iter=20, certify=False)
        assert np.array_equal(same, points)


@pytest.mark.parametrize(("c", "k"), [(1e-30, 1e-8), (1e30, 1e8), (1e-12, 1e6), (1e12, 1e-6)])
def test_other_factors_change_rounding_only(c, k):
    x0 = np.tile([-1.2, 1.0], 5)
    functions = (rosen, rosen_der, rosen_hess_prod)
    plain, points = path(functions, x0, 1.0, 1.0)
    scaled, same = path(functions, x0, c, k)
    assert scaled.success and scaled.nit == plain.nit
    np.testing.assert_allclose(same, points, atol=1e-9)


def test_large_values_are_walked_down_as_any_other():
    """f is 1e19 and more at the start, its minimum 0."""

    def fun(x):
        return (x**4).sum() + ((x[1:] - x[:-1]) ** 2).sum()

    x0 = torch.linspace(1e4, 6e4, 10, dtype=torch.float64)
    assert float(fun(x0)) > 1e19
    result = sanc.minimize(fun, x0)
    assert result.success and result.nit < 60 and float(result.fun) < 1e-9


def test_the_curvature_asked_for_follows_a_small_f():
    """A saddle of c·f is left although its curvature is below √tol."""
    c = 1e-12

    def fun(x):
        return c * (0.25 * x[0] ** 4 - 0.5 * x[0] ** 2 + 0.5 * x[1] ** 2)

    x0 = torch.tensor([0.0, 1.0], dtype=torch.float64)
    result = sanc.minimize(fun, x0, tol=1e-8 * c)
    assert result.success and float(result.fun) == pytest.approx(-0.25 * c)
    assert result.certificate.curvature_tolerance < c


def test_units_of_a_first_point():
    assert measure_units(5.0, 6.0, 3.0, 100.0) == Units(2.0, 1.5)
    assert Units(2.0, 1.5).value == 12.0
    assert measure_units(0.0, 0.0, 4.0, 10.0) == Units(1.0, 4.0)  # no gradient: a tenth of ‖x‖
    assert measure_units(16.0, 0.0, 4.0, 0.0) == Units(2.0, 2.0)  # nor x: what the value and the curvature make
    assert measure_units(0.0, 3.0, 0.0, 10.0) == Units(1.0, 3.0)  # no curvature
    assert measure_units(6.0, 3.0, 0.0, 0.0) == Units(2.0, 0.75)
    assert measure_units(0.0, 0.0, 0.0, 0.0).length_scale == 1.0
    assert math.isfinite(measure_units(1e300, 1e-300, 1e-300, 0.0).length_scale)


def test_whether_a_trial_value_is_trusted_does_not_depend_on_what_was_read_before():
    """The gradient sample has f = 1 at x, the objective sample −1e40: a trial value of −1e41 is not trusted."""

    class Samples(SimpleNamespace):
        space = NumpySpace(1, np.float64)
        value = staticmethod(lambda x: -1e40 if x[0] == 0.0 else -1e41)
        norm = staticmethod(np.linalg.norm)

    def point():
        return Point(
            x=np.zeros(1), g=np.ones(1), value=1.0, grad_norm=1.0, oracle=Samples(), sigma_rule=SigmaRule(),
            state=State(0), units=Units(1.0, 1.0),
        )  # fmt: skip

    fresh, read = point(), point()
    assert read.objective == -1e40
    assert fresh.evaluate(np.ones(1)) == read.evaluate(np.ones(1)) == -math.inf


def test_all_minimisers_have_the_same_default_tolerance():
    """About the square root of the machine precision, in either type; SciPy's least_squares has gtol = 1e-8."""
    for dtype, tol in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        assert default_tolerance(torch.finfo(dtype).eps) == tol == TOLERANCES[dtype]
        x0 = torch.tensor([-1.2, 1.0], dtype=dtype)
        found = sanc.minimize(lambda x: (x**2).sum(), x0)
        assert found.certificate.gradient_tolerance == pytest.approx(tol)
