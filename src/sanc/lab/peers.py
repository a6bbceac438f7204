"""Minimise finite sums with L-BFGS, SGD, AdamW and SVRG, for comparison with the family."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import scipy.optimize

import sanc
from sanc.errors import one_of

FIRST_ORDER = ("sgd", "adamw", "svrg")
"""The methods of `first_order`."""

STEP_SIZES = (1e-3, 1e-2, 1e-1)
"""Step sizes of Adam, of which the best is shown: its default, 10 and 100 times that."""

_BETA1, _BETA2, _ADAM_EPSILON = 0.9, 0.999, 1e-8
"""The constants of Adam by Kingma and Ba (2014)."""


@dataclass(frozen=True)
class Fit:
    """The result of a peer.

    Attributes
    ----------
    name : str
        The method, with its step size.
    w : ndarray
        The final point.
    loss : float
        The objective on all rows.
    evaluations : int
        Gradients of rows.
    seconds : float
        Time of this run.
    """

    name: str
    w: Any
    loss: float
    evaluations: int
    seconds: float


def fit_peers(problem: sanc.problems.FiniteSum, budget: int, batch: int) -> list[Fit]:
    """Return the fits of L-BFGS on all rows, and of Adam on batches with its best step size, from the same start.

    Parameters
    ----------
    problem : FiniteSum
        The objective.
    budget : int
        Gradients of rows that a run may evaluate; L-BFGS makes one pass over all rows at least.
    batch : int
        Rows of a batch of Adam.
    """
    adams = [
        _timed(f"Adam, step {step:g}", problem, partial(_adam, problem, budget, batch, step)) for step in STEP_SIZES
    ]
    finite = [fit for fit in adams if np.isfinite(fit.loss)]
    best = sorted(finite, key=lambda fit: fit.loss)[:1]
    return [_timed("L-BFGS", problem, partial(_lbfgs, problem, budget)), *best]


def _timed(name: str, problem: sanc.problems.FiniteSum, fit: Callable[[], tuple[Any, int]]) -> Fit:
    """Return the result of a fit with its time."""
    clock = time.perf_counter()
    w, evaluations = fit()
    return Fit(name, w, problem.value(w), evaluations, time.perf_counter() - clock)


def _lbfgs(problem: sanc.problems.FiniteSum, budget: int) -> tuple[Any, int]:
    """Return the point of SciPy's L-BFGS, and the gradients of rows that it took."""
    limit = {"maxfun": max(1, budget // problem.n), "maxiter": 10**6}
    start = np.ones(problem.dim, problem.dtype)
    result = scipy.optimize.minimize(problem.value_and_gradient, start, jac=True, method="L-BFGS-B", options=limit)
    return result.x.astype(problem.dtype), int(result.nfev) * problem.n


def _adam(problem: sanc.problems.FiniteSum, budget: int, batch: int, step: float) -> tuple[Any, int]:
    """Return the point of Adam on random batches, and the gradients of rows that it took."""
    return first_order("adamw", problem, step, budget=budget, batch=batch)


def first_order(
    method: str,
    problem: sanc.problems.FiniteSum,
    rate: float,
    *,
    budget: int,
    batch: int,
    seed: int = 0,
    schedule: Literal["constant", "linear"] = "constant",
    watch: Callable[[int, Any], None] | None = None,
) -> tuple[Any, int]:
    """Return the point of a first-order method on random batches from w = (1, …, 1), and the gradients of rows it took.

    Parameters
    ----------
    method : {"sgd", "adamw", "svrg"}
        "adamw" has no decoupled decay, since the penalty is part of f, and so is Adam. "svrg" evaluates the gradient on
        all rows after every n/`batch` steps, each of which has two gradients of a batch (Johnson and Zhang 2013).
    problem : FiniteSum
        The objective.
    rate : float
        The step size; with the schedule "linear" it falls to zero over the budget.
    budget : int
        Gradients of rows to evaluate; at least one step is made.
    batch : int
        Rows of a batch.
    seed : int
        Seed of the batches.
    schedule : {"constant", "linear"}
        The step size over the budget.
    watch : callable, optional
        Called after every step with the gradients of rows so far, and the point.
    """
    one_of("method", method, FIRST_ORDER)
    one_of("schedule", schedule, ("constant", "linear"))
    rng, w = np.random.default_rng(seed), np.ones(problem.dim, problem.dtype)
    mean, square, anchor, full = np.zeros_like(w), np.zeros_like(w), w, np.zeros_like(w)
    spent, k, epoch = 0, 0, max(1, problem.n // batch)
    while not k or spent + batch <= budget:
        left = 1.0 - spent / budget if schedule == "linear" else 1.0
        if method == "svrg" and k % epoch == 0:
            anchor, full = w, problem.value_and_gradient(w)[1]
            spent += problem.n
        k += 1
        sample = problem.subset(rng.choice(problem.n, batch, replace=False))
        g = sample.value_and_gradient(w)[1]
        spent += batch
        if method == "adamw":
            mean += (1 - _BETA1) * (g - mean)
            square += (1 - _BETA2) * (g * g - square)
            g = (mean / (1 - _BETA1**k)) / (np.sqrt(square / (1 - _BETA2**k)) + _ADAM_EPSILON)
        elif method == "svrg":
            g = g - sample.value_and_gradient(anchor)[1] + full
            spent += batch
        w = w - rate * left * g
        if watch is not None:
            watch(spent, w)
    return w, spent
