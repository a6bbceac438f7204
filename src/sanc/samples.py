"""The samples of one iteration of a linear model, gathered at once and measured at once.

The rows of a small sample are multiplied in a few microseconds, in which Python does little else. So the rows of all
samples of an iteration are brought together by one call, and the loss is measured at the current point for all of
them by another; what belongs to one sample is a part of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sanc.problems import Array, Logistic, NonconvexSVM, Pool, _Linear
from sanc.rows import Rows

_TOGETHER = 1 << 17
"""Entries of X in all samples of an iteration up to which they are gathered together: they fit the cache of a core."""


class Gathered:
    """Rows of several samples, one sample after another."""

    __slots__ = ("X", "_inverse", "labels", "losses", "problem", "state", "w")

    def __init__(self, problem: _Linear, pool: Pool, rows: Array) -> None:
        self.problem = problem
        self.X, self.labels = pool.rows(rows), pool.labels[rows]
        self.w: Array | None = None

    def measure(self, w: Array) -> None:
        """Measure the losses of all rows at w, to which the samples come back by asking with the same object."""
        self.losses, self.state = self.problem._losses(self.X @ w, self.labels)
        self._inverse = self.problem.penalty.inverse(w)
        self.w = w

    def inverse(self, w: Array) -> Array | None:
        """Return what the penalty knows at w."""
        return self._inverse if w is self.w else None


class Sample:
    """The mean over one of the samples, with the penalty.

    Attributes
    ----------
    n : int
        Rows.
    """

    __slots__ = ("X", "_all", "_labels", "_part", "_problem", "n")

    def __init__(self, gathered: Gathered, part: slice) -> None:
        self._all, self._part, self._problem = gathered, part, gathered.problem
        self.n = part.stop - part.start
        self.X, self._labels = gathered.X[part], gathered.labels[part]

    def _measured(self, w: Array) -> tuple[Array, tuple[Array, ...]]:
        """Return the losses and what their derivatives are made from."""
        known, part = self._all, self._part
        if known.w is None:
            known.measure(w)
        if known.w is w:
            return known.losses[part], tuple([entry[part] for entry in known.state])
        return self._problem._losses(self.X @ w, self._labels)

    def value(self, w: Array) -> float:
        """f(w)."""
        losses, _ = self._measured(w)
        return float(np.add.reduce(losses)) / self.n + self._problem.penalty.value(w, self._all.inverse(w))

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        """f(w) and ∇f(w)."""
        losses, state = self._measured(w)
        penalty, g = self._problem.penalty.value_and_gradient(w, self._all.inverse(w))
        slope = self._problem._slope(state, self._labels)
        slope /= self.n
        return float(np.add.reduce(losses)) / self.n + penalty, _pull(self.X, slope, g)

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        """Return v ↦ ∇²f(w) v."""
        _, state = self._measured(w)
        bend = self._problem._bend(state)
        bend /= self.n
        curvature = self._problem.penalty.curvature(w, self._all.inverse(w))
        X = self.X

        def product(v: Array) -> Array:
            z = X @ v
            z *= bend
            return _pull(X, z, curvature * v)

        return product


def _pull(X: Any, z: Array, onto: Any) -> Array:
    """Return Xᵀz + onto, in the memory of `onto` where that is a vector of the same type."""
    if isinstance(X, Rows):
        return X.pull(z, onto)
    result: Array = X.T @ z
    result += onto
    return result


class Gatherer:
    """Makes samples of a problem.

    Parameters
    ----------
    problem : _Linear
        The whole sum.
    """

    def __init__(self, problem: _Linear) -> None:
        self._problem = problem
        self._pool = problem._drawn_from()
        self._most = _TOGETHER * problem.n // max(1, self._pool.entries)

    def small(self, rows: int) -> bool:
        """Whether samples of so many rows together are better gathered at once."""
        return rows <= self._most

    def __call__(self, rows: Sequence[Array]) -> list[Sample]:
        """Gather the rows of several samples at once."""
        gathered = Gathered(self._problem, self._pool, np.concatenate(rows) if len(rows) > 1 else rows[0])
        samples, begin = [], 0
        for mine in rows:
            end = begin + len(mine)
            samples.append(Sample(gathered, slice(begin, end)))
            begin = end
        return samples


def gatherer(problem: Any) -> Gatherer | None:
    """Return what makes samples, where it is known how the problem measures its rows."""
    return Gatherer(problem) if type(problem) in (Logistic, NonconvexSVM) else None
