"""Limits of runs: None is no limit, and scaling f scales the tolerances."""

from __future__ import annotations

import math

import pytest

from sanc.core.runs.limits import Limits
from sanc.errors import ArgumentError

NONE = dict.fromkeys(("max_iter", "max_nfev", "max_calls", "max_time", "max_products", "curvature_tol"))


def limits_of(**changes):
    return Limits.of_arguments(**{"tol": 1e-6, "certify": True, **NONE, **changes})


def test_none_is_no_limit():
    limits = limits_of()
    assert (limits.max_iter, limits.max_nfev, limits.max_calls, limits.max_time) == (math.inf,) * 4
    assert limits.max_products is None and limits.curvature_tol is None
    limits = limits_of(max_iter=0, max_nfev=3, max_calls=0.5, max_time=2.0, max_products=1, curvature_tol=0.1)
    numbers = (limits.max_iter, limits.max_nfev, limits.max_calls, limits.max_time, limits.max_products)
    assert numbers == (0, 3, 0.5, 2.0, 1) and limits.curvature_tol == 0.1


@pytest.mark.parametrize(("name", "value"), [("max_iter", -1), ("max_nfev", 0), ("max_calls", 0.0), ("max_time", -1.0),
    ("max_products", 0), ("curvature_tol", 0.0), ("certify", 1.5)])  # fmt: skip
def test_a_value_out_of_range_is_an_error_that_names_it(name, value):
    with pytest.raises(ArgumentError, match=f"{name} = {value}"):
        limits_of(**{name: value})


def test_tolerances_follow_a_factor_of_f():
    scaled = limits_of(curvature_tol=0.5, max_iter=7).with_scaled_objective(4.0)
    assert (scaled.tol, scaled.curvature_tol, scaled.max_iter) == (4e-6, 2.0, 7)
    assert limits_of().with_scaled_objective(4.0).curvature_tol is None
