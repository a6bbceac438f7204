"""The cache of recent evaluations."""

import gc

import numpy as np
import pytest
import torch

import sanc
from sanc.core.oracle import RecentCache


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_cache_keeps_the_last_evaluations_alone(size):
    cache, points = RecentCache(size), [np.zeros(2) for _ in range(6)]
    for k, x in enumerate(points):
        cache.put(x, k)
        assert [point in cache for point in points[: k + 1]] == [k - j < size for j in range(k + 1)]
    assert cache.get(points[-1], lambda x: -1) == 5 and cache.get(points[0], lambda x: -1) == -1


def test_a_run_keeps_no_gradients_of_earlier_points():
    def f(x):
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    sizes, iterations = [], []

    def count(intermediate_result):
        iterations.append(intermediate_result)
        if len(iterations) in (10, 60):
            sizes.append(sum(type(held) is torch.Tensor and held.shape == (57,) for held in gc.get_objects()))

    sanc.minimize(f, torch.zeros(57, dtype=torch.float64), callback=lambda x: count(float(x[0])))
    assert len(sizes) == 2 and sizes[1] <= sizes[0] + 5
