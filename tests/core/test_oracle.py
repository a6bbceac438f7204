"""The counters of an oracle, and the cache of recent evaluations."""

import gc

import numpy as np
import pytest
import torch

import sanc
from sanc.core.caching import RecentCache
from sanc.functions.oracle import CallableOracle


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


def test_evaluations_in_an_uncounted_block_are_not_counted():
    oracle = CallableOracle(lambda x: x @ x, np.ones(3), jac=lambda x: 2 * x)
    oracle.value(np.ones(3))

    def fail():
        with oracle.uncounted():
            oracle.gradient(np.zeros(3))
            oracle.hessian(np.zeros(3))(np.ones(3))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (oracle.meter.nfev, oracle.meter.njev, oracle.meter.nhev) == (1, 0, 0)


@pytest.mark.parametrize(("method", "gradients"), [("cr", 1), ("crm", 2)])
def test_the_momentum_counts_its_second_gradient_as_the_paper_does(method, gradients):
    """One iteration counts |S_g| for every gradient and |S_B| for each of J = 2 products."""
    rng = np.random.default_rng(0)
    problem = sanc.problems.Logistic(rng.standard_normal((40, 6)), (rng.random(40) < 0.5).astype(float))
    sizes = {"batch_size": 10, "hessian_batch_size": 5}
    res = sanc.minimize(
        problem, np.ones(6), method=method, preset="paper", krylov_dim=2, max_iter=1, certify=False, **sizes
    )
    assert res.history[0].branch == "unconditional" and res.calls.paper_calls == gradients * 10 + 2 * 5
