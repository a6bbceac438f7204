"""The samples of an iteration: the rows drawn are a function of seed and iteration, the same for every method."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

import sanc
from sanc.problems import Logistic, NonconvexSVM, Softmax
from sanc.sums.oracle import GRADIENT, HESSIAN, OBJECTIVE, Draws, SumOracle, buffered_order

N, D = 60, 9
FORMS = ["dense", "csr_matrix", "csr_array"]


def matrix(rng, form, dtype=np.float64):
    """Return a matrix in one of three forms, and the same matrix as a dense array."""
    X = rng.standard_normal((N, D)).astype(dtype)
    if form != "dense":
        X[rng.random((N, D)) < 0.6] = 0.0
        X[[0, 7, N - 1]] = 0.0
    return (getattr(scipy.sparse, form)(X) if form.startswith("csr") else X), X


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sampling", ["uniform", "buffered"])
def test_values_and_derivatives_are_those_of_the_rows_drawn(form, sampling, rng):
    X, plain = matrix(rng, form)
    y, sizes = rng.integers(0, 2, N), [12, 12, 8]
    for make in (
        lambda X: Logistic(X, y, "nonconvex", 0.2),
        lambda X: NonconvexSVM(X, 2 * y - 1),
        lambda X: Softmax(X, y, strength=0.2),
    ):
        oracle, reference = SumOracle(make(X), tuple(sizes), 5, sampling), make(plain)
        key = np.random.Philox(5).state["state"]["key"]
        for k in range(8):
            oracle.begin(k)
            x, v = rng.standard_normal(reference.dim), rng.standard_normal(reference.dim)
            subsets = []
            for role in range(3):
                if sampling == "uniform":
                    bits = np.random.Philox(key=key, counter=[0, 0, k, role])
                    rows = np.random.Generator(bits).choice(N, sizes[role], replace=False, shuffle=False)
                else:
                    epoch, batch = divmod(k, N // sizes[role])
                    order = buffered_order(N, sizes[role], np.random.default_rng((5, epoch, role)))
                    rows = order[batch * sizes[role] :][: sizes[role]]
                subsets.append(reference.subset(rows))
            value, g = oracle.gradient(x)
            expected, expected_g = subsets[GRADIENT].value_and_gradient(x)
            assert value == pytest.approx(expected, rel=1e-12) and g == pytest.approx(expected_g, abs=1e-12)
            assert oracle.gradient_sample_value(x) == value
            assert oracle.value(x) == pytest.approx(subsets[OBJECTIVE].value(x), rel=1e-12)
            operator = oracle.hessian(x)
            assert operator(v) == pytest.approx(subsets[HESSIAN].hessian(x)(v), abs=1e-12)
            assert operator.gradient() == pytest.approx(subsets[HESSIAN].value_and_gradient(x)[1], abs=1e-12)
        meter = oracle.meter
        assert (meter.value, meter.gradient, meter.product) == (8 * (12 + 8), 8 * (12 + 12), 8 * 12)


def test_a_sample_is_drawn_at_most_once_per_iteration_and_only_when_used(rng, monkeypatch):
    drawn = []
    rows = Draws.rows
    monkeypatch.setattr(Draws, "rows", lambda self, *given: drawn.append(given[:2]) or rows(self, *given))
    problem = Logistic(rng.standard_normal((N, D)), rng.integers(0, 2, N))
    oracle = SumOracle(problem, (12, 12, None), 0)
    for k in (0, 0, 1):
        oracle.begin(k)
        oracle.gradient(np.ones(D)), oracle.value(np.ones(D)), oracle.gradient_sample_value(np.zeros(D))
    assert drawn == [(0, GRADIENT), (1, GRADIENT)]
    oracle.hessian(np.ones(D))
    assert drawn[2:] == [(1, HESSIAN)] and oracle.sample(OBJECTIVE) is problem


def test_the_whole_sum_is_evaluated_once_per_point(rng):
    problem = Logistic(rng.standard_normal((N, D)), rng.integers(0, 2, N))
    oracle, x = SumOracle(problem, (None, None, None), 0), np.ones(D)
    for k in range(3):
        oracle.begin(k)
        oracle.gradient(x), oracle.value(x)
    assert oracle.exact and (oracle.meter.njev, oracle.meter.nfev) == (1, 0)
    assert oracle.is_cached(x) == (True, True) and oracle.is_cached(x.copy()) == (False, False)


def test_a_matrix_may_be_changed_between_runs(rng):
    X, y = rng.standard_normal((N, D)), rng.integers(0, 2, N)
    problem = Logistic(X, y)
    first = sanc.minimize(problem, np.ones(D), batch_size=12, max_iter=5, certify=False)
    X *= 2.0
    second = sanc.minimize(problem, np.ones(D), batch_size=12, max_iter=5, certify=False)
    expected = sanc.minimize(Logistic(X, y), np.ones(D), batch_size=12, max_iter=5, certify=False)
    assert np.array_equal(second.x, expected.x) and not np.array_equal(first.x, second.x)


def test_buffered_draws_cover_every_row_once_per_epoch():
    draws = Draws(N, 3, "buffered")
    for epoch in range(2):
        rows = np.concatenate([draws.rows(5 * epoch + k, GRADIENT, 12) for k in range(5)])
        assert sorted(rows.tolist()) == list(range(N))
