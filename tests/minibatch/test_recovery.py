"""Returning to an earlier point: after a rise of the loss, batches that are not finite, and outliers."""

from __future__ import annotations

import math
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from oracles import iteration_on
from sanc import Branch
from sanc.minibatch import recovery
from sanc.minibatch.averaging import CHECKSUM_MODULUS, checksum
from sanc.minibatch.state import BatchComparison, CallerChanges, MeanLoss, MinibatchState


def settled_run(problem, steps=60, **options):
    iteration, oracle = iteration_on(problem, **options)
    x = np.ones(problem.dim)
    for _ in range(steps):
        x, _ = iteration.iterate(x, oracle)
    assert iteration.state.averaged
    return iteration, oracle, x


def test_a_loss_that_rises_for_long_returns_to_a_safe_point(problem):
    """As if the steps themselves had caused it: the averaged point moves away a little in every iteration."""
    iteration, oracle, x = settled_run(problem)
    good, k = problem.value(x), 0
    while not iteration.has_returned:
        k += 1
        assert k < 100
        x = x + 0.1
        known = replace(iteration.state.caller, checksum=float(checksum(torch.from_numpy(x))) % CHECKSUM_MODULUS)
        iteration.state = replace(iteration.state, caller=known)  # as the iteration does
        before = oracle.meter.paper_calls
        x, record = iteration.iterate(x, oracle)
        assert record.calls.paper_calls - before == oracle.sizes[0]  # a return takes a gradient, too
    assert "rose" in record.note and record.branch is Branch.STAYED and k > 5
    assert problem.value(x) < 1.1 * good and iteration.state.eta_reduction == 0.5
    safe_point = iteration.state.losses.safe_point
    iteration.iterate(x, oracle)
    assert not iteration.has_returned
    # The return is not taken for a change by the caller: averaging goes on, and the point is not dropped.
    assert (
        iteration.state.caller.projection_countdown == 0
        and iteration.state.losses.safe_point is not None
        and safe_point is x
    )


def test_a_change_of_the_parameters_by_the_caller_is_not_undone(problem):
    iteration, oracle, x = settled_run(problem)
    point, _ = iteration.iterate(x + 3.0, oracle)
    assert np.linalg.norm(point - x - 3.0) < 0.1
    for _ in range(60):
        point, record = iteration.iterate(point, oracle)
        assert "back" not in record.note


def test_second_order_steps_that_fitted_the_wrong_batches_are_undone():
    """Ten batches without a positive row drive the bias to −∞; the first with one is better off where that began."""
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = sanc.SANC([w], seed=0)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    X = torch.tensor([[1.0, 0.3], [1.0, -0.2], [1.0, 0.1], [1.0, 0.4]], dtype=torch.float64)
    negative, mixed = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    for _ in range(10):
        opt.step(lambda: loss(X @ w, negative))
    assert float(w[0].detach()) < -5.0 and opt.record.branch != "averaged"
    opt.step(lambda: loss(X @ w, mixed))
    assert opt.record.branch == "averaged" and float(w.detach().abs().max()) < 0.1
    assert opt.record.value == pytest.approx(math.log(2.0)) and "returned to the initial point" in opt.record.note


@pytest.mark.parametrize(
    ("value", "first_loss", "loss_there", "returns"),
    [(0.5, 1.0, 0.1, False), (2.0, 1.0, 3.0, False), (2.0, 1.0, 1.5, True), (math.nan, 1.0, 1.5, True),
     (math.nan, 1.0, math.nan, False)],
)  # fmt: skip
def test_averaging_starts_at_the_first_point_only_if_its_loss_is_lower(value, first_loss, loss_there, returns):
    x, first_point = np.ones(2), np.zeros(2)
    comparison = BatchComparison(first_point=first_point, first_loss=first_loss)
    oracle = types.SimpleNamespace(gradient_sample_value=lambda point: loss_there if point is first_point else None)
    assert recovery.first_averaged_point(comparison, x, value, oracle) is (first_point if returns else x)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_rare_rows_are_learnt_from(seed):
    """One row in fifty is positive and the batches have four: a high loss is the batch's, not the step's."""
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.standard_normal((2000, 5)))
    y = torch.from_numpy((rng.random(2000) < 0.02).astype(float))
    w = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    opt, jumps = sanc.SANC([w], seed=0), 0
    for _ in range(800):
        rows = torch.from_numpy(rng.choice(2000, 4, replace=False))
        opt.step(lambda rows=rows: loss(X[rows] @ w[:5] + w[5], y[rows]))
        jumps += "safe point" in opt.record.note
    assert jumps == 0
    assert float(loss(X @ w[:5] + w[5], y).detach()) < 0.14  # the entropy of the labels is 0.098, a bias of 0 has 0.69


def test_a_loss_that_is_not_finite_twice_returns_to_a_safe_point(problem):
    iteration, oracle, x = settled_run(problem)
    bad = x * np.nan
    point, record = iteration.iterate(bad, oracle)
    assert (
        point is bad and "finite" in record.note and iteration.state.eta_reduction == 1.0
    )  # the batch may be to blame
    point, record = iteration.iterate(bad, oracle)
    assert np.isfinite(point).all() and "back to the last safe point" in record.note
    assert iteration.state.eta_reduction == 0.5


def test_a_loss_that_changes_for_good_returns_nowhere(problem):
    """Where the data change, the safe point is no better, and the run goes on."""
    iteration, oracle, x = settled_run(problem)
    gradient, trial = oracle.gradient, oracle.gradient_sample_value

    def higher(x):
        value, g = gradient(x)
        return value + 50.0, g

    oracle.gradient, oracle.gradient_sample_value = higher, lambda x: trial(x) + 50.0
    for _ in range(150):
        x, record = iteration.iterate(x, oracle)
        assert "back" not in record.note
    assert iteration.state.eta_reduction == 1.0


def test_one_outlier_batch_does_not_ruin_a_run():
    """Targets of one batch a thousand times too large; undisturbed and disturbed end alike."""
    ends = []
    for factor in (1.0, 1000.0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        x = torch.randn(1000, 8)
        y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(1000, 1)
        opt = sanc.SANC(net.parameters(), seed=0)
        for k in range(170):
            rows = torch.randint(1000, (32,))
            target = y[rows] * (factor if k == 85 else 1.0)
            opt.step(lambda rows=rows, target=target: (net(x[rows]) - target).square().mean())
            assert k != 85 or factor == 1.0 or "outlier" in opt.record.note
        with torch.no_grad():
            ends.append(float((net(x) - y).square().mean()))
    assert ends[0] < 0.15 and ends[1] < 1.2 * ends[0]


# The functions themselves: they return the next state, and change nothing.

X, SAFE, FIRST = np.full(2, 3.0), np.array([0.0, 3.0]), np.full(2, 3.5)


def oracle_of(values, has_values=True):
    """An oracle that knows the loss at the three points, by their names."""
    points = {id(X): "x", id(SAFE): "safe", id(FIRST): "first"}
    return types.SimpleNamespace(
        has_values=has_values,
        gradient_sample_value=lambda point: values[points[id(point)]],
        gradient=lambda point: (values["x"], np.ones(2)),
        norm=np.linalg.norm,
        space=types.SimpleNamespace(norm=lambda v: float(np.linalg.norm(v))),
    )


def state_of(**changes):
    return MinibatchState(0, iteration=50, steps=30, averaged=True, **{"losses": MeanLoss(safe_point=SAFE)} | changes)


@pytest.mark.parametrize(
    ("earlier", "at_safe_point", "point", "eta"),
    [(0, 1.0, X, 1.0), (1, 1.0, SAFE, 0.5), (1, math.nan, X, 1.0), (2, 1.0, SAFE, 0.5)],
)
def test_the_second_batch_that_is_not_finite_returns_unless_it_is_not_finite_there_either(
    earlier, at_safe_point, point, eta
):
    state = state_of(nonfinite_batches=earlier, caller=CallerChanges(checksum=7.0))
    outcome = recovery.handle_nonfinite(state, X, oracle_of({"safe": at_safe_point}), math.inf, 1.0)
    assert outcome.point is point and outcome.has_returned is (point is SAFE)
    assert outcome.state.nonfinite_batches == earlier + 1 and math.isnan(outcome.state.caller.checksum)
    assert outcome.state.eta_reduction == eta and state.eta_reduction == 1.0
    assert outcome.record.iteration == 50 and "the loss of the gradient sample is not finite" in outcome.record.note
    assert outcome.record.step_norm == (3.0 if point is SAFE else 0.0)


@pytest.mark.parametrize(("at_x", "raised"), [(1.9, False), (2.1, True), (math.nan, True)])
def test_steps_raised_the_loss_if_one_batch_confirms_half_of_the_rise(at_x, raised):
    state = state_of(losses=MeanLoss(loss_mean=3.0, lowest_loss_mean=1.0, safe_point=SAFE))
    oracle = oracle_of({"x": at_x, "safe": 1.0})
    assert recovery.steps_raised_loss(state.losses, X, oracle) is raised
    assert not recovery.steps_raised_loss(replace(state.losses, safe_point=X), X, oracle)
    outcome = recovery.return_after_rise(state, X, oracle, X)
    assert outcome.point is SAFE and outcome.has_returned and outcome.state.eta_reduction == 0.5
    assert outcome.record.trials == 2 and outcome.record.note == "the loss rose: back to the last safe point"


@pytest.mark.parametrize(
    ("first_loss", "due", "at_first", "returns", "kept"),
    [(1.5, None, 0.01, False, True), (1.5, 0.01, 0.01, True, False), (1.5, 0.2, 0.2, False, True),
     (200.0, None, 0.9, True, False), (200.0, None, 1.1, False, False)],
)  # fmt: skip
def test_first_batches_were_outliers_if_the_loss_at_the_first_point_is_lower(first_loss, due, at_first, returns, kept):
    """Far lower, where it is due, if the first loss was normal; lower, at any step, if it was an outlier."""
    state = state_of(comparison=BatchComparison(first_point=FIRST, first_loss=first_loss), weight_sum=5.0)
    results = types.SimpleNamespace(value=1.0, grad_norm=1.0)
    after, outcome = recovery.correct_first_steps(state, X, oracle_of({"first": at_first}), results, due)
    assert (outcome is not None) is returns
    if outcome is not None:
        assert outcome.point is FIRST and outcome.has_returned and outcome.state.comparison.first_point is None
        assert outcome.state.steps == 0 and outcome.state.weight_sum == 0.0  # averaging starts again
    else:
        assert (after.comparison.first_point is FIRST) is kept
    assert state.comparison.first_point is FIRST and state.steps == 30
