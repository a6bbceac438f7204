"""Fit a data file of the user with L-BFGS and Adam, for comparison with the family."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.optimize

import sanc

STEP_SIZES = (1e-3, 1e-2, 1e-1)
"""Step sizes of Adam, of which the best is shown: its default, 10 and 100 times that."""

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
"""The constants of Adam by Kingma and Ba (2015)."""


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
    found = scipy.optimize.minimize(problem.value_and_gradient, start, jac=True, method="L-BFGS-B", options=limit)
    return found.x.astype(problem.dtype), int(found.nfev) * problem.n


def _adam(problem: sanc.problems.FiniteSum, budget: int, batch: int, step: float) -> tuple[Any, int]:
    """Return the point of Adam on random batches, and the gradients of rows that it took."""
    rng, w = np.random.default_rng(0), np.ones(problem.dim, problem.dtype)
    mean, square = np.zeros_like(w), np.zeros_like(w)
    steps = max(1, budget // batch)
    for k in range(1, steps + 1):
        g = problem.subset(rng.choice(problem.n, batch, replace=False)).value_and_gradient(w)[1]
        mean += (1 - _BETA1) * (g - mean)
        square += (1 - _BETA2) * (g * g - square)
        root = np.sqrt(square / (1 - _BETA2**k)) + _EPSILON
        w = w - step * (mean / (1 - _BETA1**k)) / root
    return w, steps * batch
