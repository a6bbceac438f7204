"""The tests that end a run: stalls, steps that contradict the derivatives, and the current point."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import rosen, rosen_der, rosen_hess

from sanc.core.record import Branch, Note, Record
from sanc.core.runs.convergence import point_ending
from sanc.core.runs.stall import STALL_LIMIT, StallMonitor
from sanc.core.runs.status import CONTINUE, Findings, Status
from sanc.core.runs.step_checks import MadeStep, StepMonitor
from sanc.functions.oracle import CallableOracle

EPS = float(np.finfo(float).eps)


def record(branch=Branch.SUCCESSFUL, grad_norm=1.0, decrease=0.0, note="", predicted=1.0):
    numbers = {"value": 1.0, "trial_value": 1.0 - decrease, "model_decrease": predicted}
    return Record(0, branch=branch, grad_norm=grad_norm, note=note, **numbers)


@pytest.mark.parametrize(
    ("last", "rejection_counts", "expected"),
    [
        (record(), False, 4),  # f did not change
        (record(decrease=0.9 * EPS), False, 4),  # nor beyond roundoff
        (record(decrease=2 * EPS), False, 0),
        (record(decrease=3 * EPS, predicted=2 * EPS), False, 0),
        (record(decrease=3 * EPS, predicted=0.0), False, 4),  # steps at a minimum change f by a few rounding errors
        (record(decrease=11 * EPS, predicted=0.0), False, 0),
        (record(decrease=2 * EPS, note=Note.BELOW_PRECISION), False, 4),
        (record(grad_norm=0.98), False, 0),  # of the smallest norm so far, 1
        (record(grad_norm=0.995), False, 4),
        (record(Branch.STAYED, decrease=1.0), False, 3),  # a rejection is not counted, and no progress
        (record(Branch.STAYED, decrease=1.0), True, 4),
        (record(Branch.STAYED, grad_norm=0.5), True, 0),  # the gradient of another sample
    ],
)
def test_progress_exceeds_roundoff(last, rejection_counts, expected):
    monitor = StallMonitor(count=3, best_grad_norm=1.0).after(last, EPS, rejection_counts=rejection_counts)
    assert monitor.count == expected and monitor.best_grad_norm == min(1.0, last.grad_norm)


def test_a_step_below_the_least_norm_is_no_progress():
    monitor = StallMonitor(count=3, best_grad_norm=1.0)
    for step_norm, expected in ((1e-15, 4), (3e-15, 0)):
        made = replace(record(decrease=0.1), step_norm=step_norm)
        assert monitor.after(made, EPS, rejection_counts=True, min_step_norm=2e-15).count == expected
    assert monitor.count == 3  # it is a value


def test_a_run_has_stalled_after_ten_iterations_without_progress():
    monitor = StallMonitor()
    for k in range(STALL_LIMIT + 1):
        assert monitor.has_stalled == (k > STALL_LIMIT)  # the first iteration lowers the gradient norm from infinity
        monitor = monitor.after(record(), EPS, rejection_counts=False)
    assert monitor.has_stalled


def step(oracle, x, s, iteration=0, rho=1.0):
    """Return a step along s with the values and gradients of an oracle."""
    value, g = oracle.gradient(x)
    point = x + s
    made = Record(iteration, value=value, trial_value=oracle.value(point), rho=rho, trials=1)
    return MadeStep(x, point, g, made)


def after(monitor, oracle, *args, **kwargs):
    """Return the monitor after a step, and the ending."""
    return monitor.after(oracle, step(oracle, *args, **kwargs), first_length_scale=1.0, needs_products=False)


X, S = np.array([-1.2, 1.0]), np.array([1e-3, 2e-3])


@pytest.mark.parametrize(("factor", "status"), [(1.0, None), (3.0, Status.INCONSISTENT)])
def test_three_of_the_first_steps_must_contradict_the_gradient(factor, status):
    oracle = CallableOracle(rosen, X, jac=lambda x: factor * rosen_der(x), hess=rosen_hess)
    monitor = StepMonitor()
    for k in range(2):
        monitor, ending = after(monitor, oracle, X, S, k)
        assert ending.status is None
    monitor, third = after(monitor, oracle, X, S, 2)
    assert third.status is status and ("0.333 times as fast" in third.cause) == (status is not None)
    assert monitor.mismatches == (0 if status is None else 3)
    later, ending = after(StepMonitor(mismatches=2), oracle, X, S, 5)
    assert ending.status is None and later.mismatches == 2  # after the first five iterations


def test_steps_with_less_than_half_of_the_predicted_decrease_are_mismatches():
    oracle, monitor = CallableOracle(rosen, X, jac=rosen_der, hess=rosen_hess), StepMonitor()
    for k, rho in enumerate((0.51, 0.49)):
        monitor, ending = after(monitor, oracle, X, S, k, rho)
        assert ending.status is None
    assert monitor.mismatches == 1 and not monitor.gradient_verified
    stays = MadeStep(X, X, oracle.gradient(X)[1], Record(2, value=rosen(X), trials=3))
    monitor, ending = monitor.after(oracle, stays, 1.0, needs_products=False)
    assert ending is CONTINUE
    assert monitor.gradient_verified and monitor.noise_checked  # a rejected iteration: differences were computed


@pytest.mark.parametrize(
    ("value", "grad_norm", "iterations", "status"),
    [
        (1.0, 1.0, 3, None),
        (math.nan, 1.0, 0, Status.NOT_FINITE),
        (1.0, math.inf, 0, Status.NOT_FINITE),
        (1.0, math.inf, 3, Status.NO_GRADIENT),
        (-3.5 / EPS**2, 1.0, 3, Status.UNBOUNDED),
        (-2.5 / EPS**2, 1.0, 3, None),
    ],
)
def test_the_ending_at_a_point_follows_from_value_and_gradient(value, grad_norm, iterations, status):
    space = SimpleNamespace(eps=EPS)
    run = SimpleNamespace(
        iterations=iterations,
        scale_of_f=1.0,
        findings=Findings(first_value=1.0),
        units=SimpleNamespace(value=1.0),
        oracle=SimpleNamespace(space=space),
        variables=SimpleNamespace(tolerance=lambda run: 1e-8),
    )
    assert point_ending(run, value, grad_norm).status is status
