"""Residuals and Jacobians are evaluated once at each of the last few points."""

from __future__ import annotations

import numpy as np
import pytest

from sanc.core.caching import MAX_CACHED_POINTS
from sanc.leastsquares.evaluation_cache import EvaluationCache, LastResult
from sanc.leastsquares.losses import Loss
from sanc.leastsquares.variables import Variables


class CountedResiduals:
    """r(x) = x², with the points of all calls."""

    def __init__(self):
        self.points, self.jacobian_points = [], []

    def __call__(self, x):
        self.points.append(tuple(x))
        return x * x

    def jacobian(self, x, r):
        self.jacobian_points.append(tuple(x))
        return np.diag(2.0 * x)


@pytest.fixture
def cache():
    return EvaluationCache(CountedResiduals(), Loss("linear", 1.0), Variables(np.array([1.0, 4.0])))


def test_equal_points_are_evaluated_once(cache):
    z = np.array([3.0, 0.5])
    first = cache.with_jacobian(z)
    assert first.x.tolist() == [3.0, 2.0] and first.r.tolist() == [9.0, 4.0]
    assert first.jacobian.tolist() == [[6.0, 0.0], [0.0, 4.0]]
    assert cache.with_jacobian(z.copy()) is cache.evaluation(z) is first
    assert cache.residuals.points == cache.residuals.jacobian_points == [(3.0, 2.0)]
    assert z in cache and np.array([9.0, 9.0]) not in cache


def test_other_variables_share_the_evaluations(cache):
    first = cache.evaluation(np.array([3.0, 0.5]))
    other = cache.in_variables(Variables(np.array([0.5, 2.0])))
    assert other.evaluation(np.array([6.0, 1.0])) is first
    assert len(cache.residuals.points) == 1


def test_only_the_last_points_are_kept(cache):
    points = [np.array([float(k), 1.0]) for k in range(MAX_CACHED_POINTS + 1)]
    for z in points:
        cache.evaluation(z)
    cache.evaluation(points[-1].copy())
    cache.evaluation(points[1].copy())
    assert len(cache.residuals.points) == len(points)
    cache.evaluation(points[0].copy())
    assert cache.residuals.points[len(points) :] == [(0.0, 4.0)]


def test_the_last_result_is_computed_again_for_other_arguments():
    last, calls = LastResult(), []
    compute = lambda: calls.append(None) or len(calls)
    assert [last.get(arguments, compute) for arguments in ((1, "a"), (1, "a"), (2, "a"), (1, "a"))] == [1, 1, 2, 3]
