"""The first-order peers of the laboratory: their steps against torch, and their budgets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sanc
from sanc.lab.peers import first_order


@pytest.fixture
def problem(rng):
    X = rng.standard_normal((60, 4))
    return sanc.problems.Logistic(X, (X @ np.ones(4) + rng.standard_normal(60) > 0).astype(int), strength=0.1)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize(("method", "optimiser"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_steps_are_those_of_torch(problem, method, optimiser, schedule):
    more = {"weight_decay": 0.0} if method == "adamw" else {}
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    theirs, draws, points = optimiser([w], lr=0.3, **more), np.random.default_rng(5), []
    for step in range(10):
        rows = problem.subset(draws.choice(60, 6, replace=False))
        theirs.param_groups[0]["lr"] = 0.3 * (1 - step / 10 if schedule == "linear" else 1)
        w.grad = torch.from_numpy(rows.value_and_gradient(w.detach().numpy())[1])
        theirs.step()
        points.append(w.detach().numpy().copy())
    found = []
    end, spent = first_order(
        method, problem, 0.3, budget=60, batch=6, seed=5, schedule=schedule, watch=lambda _, w: found.append(w)
    )
    np.testing.assert_allclose(found, points, rtol=1e-10)
    assert spent == 60 and np.array_equal(end, found[-1])


def test_svrg_corrects_the_gradient_of_a_batch_and_counts_all_of_its_gradients(problem):
    """Its first step is along the gradient on all rows. With constant steps it ends at the minimum; SGD does not."""
    start, calls, points = np.ones(4), [], []
    first_order(
        "svrg", problem, 0.5, budget=200, batch=20, watch=lambda spent, w: (calls.append(spent), points.append(w))
    )
    assert calls == [60 + 40, 60 + 80, 60 + 120, 120 + 160]  # a new anchor after three batches
    np.testing.assert_allclose(points[0], start - 0.5 * problem.value_and_gradient(start)[1], rtol=1e-12)
    rows = [problem.subset(part) for part in _batches(60, 20, 2)]
    gradients = [rows[1].value_and_gradient(w)[1] for w in (points[0], start)]
    expected = points[0] - 0.5 * (gradients[0] - gradients[1] + problem.value_and_gradient(start)[1])
    np.testing.assert_allclose(points[1], expected, rtol=1e-12)
    best = sanc.minimize(problem, start).fun
    gaps = {
        method: problem.value(first_order(method, problem, 0.5, budget=10_000, batch=6)[0]) - best
        for method in ("svrg", "sgd")
    }
    assert gaps["svrg"] < 1e-12 < 1e-6 < gaps["sgd"]


def _batches(n, batch, count):
    rng = np.random.default_rng(0)
    return [rng.choice(n, batch, replace=False) for _ in range(count)]


def test_other_names_are_errors(problem):
    with pytest.raises(sanc.ArgumentError, match="method = 'adam' is not known"):
        first_order("adam", problem, 0.1, budget=10, batch=5)
    with pytest.raises(sanc.ArgumentError, match="schedule = 'cosine' is not known"):
        first_order("sgd", problem, 0.1, budget=10, batch=5, schedule="cosine")
