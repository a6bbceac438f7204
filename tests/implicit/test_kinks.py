"""Kinks are found where closed forms have them, and nowhere else."""

from __future__ import annotations

import re

import numpy as np
import pytest

from sanc.implicit.kinks import find_kink
from sanc.minimisation.objective import build_oracle

POINT = np.array([1.0, 2.0, -3.0])


def description(gradient, hessian_product, x=POINT, norm=10.0):
    """Return what is found at a point with these derivatives."""
    value = lambda x: 0.0  # is not read
    derivatives = {"jac": gradient, "hess": None, "hessp": hessian_product}
    oracle, flat, _ = build_oracle(value, np.array(x), args=(), **derivatives)
    return find_kink(oracle, flat, norm, seed=0)


@pytest.mark.parametrize("rate", [1.0, 100.0, 1e5])
def test_a_smooth_function_has_none(rate):
    """f = exp(rate·(x − 1))/rate²; with the largest rate differences are far from the Hessian with all steps."""
    found = description(
        lambda x: np.exp(rate * (x - 1.0)) / rate, lambda x, v: np.exp(rate * (x - 1.0)) * v, np.ones(2)
    )
    assert found == ""


@pytest.mark.parametrize(
    ("gradient", "curvature"),
    [
        (lambda t: np.sign(t), lambda t: 0.0),  # of |t|, a sign function
        (lambda t: 2.0 * abs(t), lambda t: 2.0 * np.sign(t)),  # of t|t|
        (lambda t: 0.4 * max(t, 0.0), lambda t: 0.4 * (t > 0.0)),  # of 0.2 max(t, 0)²
    ],
)
def test_a_kink_in_one_of_the_variables_is_found_and_named(gradient, curvature):
    """f = ‖x‖² and a kink of the second variable, at t = x₁ − 2."""
    unit = np.eye(3)[1]
    jac = lambda x: 2.0 * x + gradient(x[1] - 2.0) * unit
    hessp = lambda x, v: 2.0 * v + curvature(x[1] - 2.0) * v[1] * unit
    assert description(jac, hessp, [1.0, 1.5, -3.0]) == ""  # elsewhere
    found = description(jac, hessp)
    assert "entry 1 of ∇f" in found and "kink" in found


def test_both_rates_are_those_of_the_closed_form():
    """g = x + 4 max(x − 1, 0), with the Hessian of the left side. A change of all variables moves x by ±1."""
    found = description(lambda x: x + 4.0 * np.maximum(x - 1.0, 0.0), lambda x, v: v, [1.0])
    index, *rates = map(int, re.findall(r"-?\d+", found))
    assert index == 0 and sorted(map(abs, rates)) == [1, 1, 5]


def test_a_wrong_hessian_is_found():
    assert description(lambda x: 2.0 * x, lambda x, v: 2.0 * v) == ""
    assert "second derivatives are wrong" in description(lambda x: 2.0 * x, lambda x, v: 2.2 * v)


@pytest.mark.parametrize(("radius", "is_found"), [(1.0, True), (5e-5, True), (0.0, False)])
def test_points_where_f_is_not_defined_are_not_compared(radius, is_found):
    """The Hessian is wrong, which shorter steps show; without any point at which f is defined nothing does."""
    gradient = lambda x: np.where(abs(x - 1.0) <= radius, 3.0 * x, np.nan)
    assert bool(description(gradient, lambda x, v: v, [1.0])) is is_found
