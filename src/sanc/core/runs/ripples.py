"""Runs on an f with ripples that are far shorter than the way to a minimum.

Second derivatives show the ripples alone. Their steps stay as short as the ripples, although f falls along all of them.
Such a run continues with the curvature between points as far apart as its steps: products are differences of gradients
over the length of the last step, to which ripples add little. Steps then grow to the length on which f bends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sanc.core.oracle import Eigenbasis, Operator, Oracle, WrappedOracle
from sanc.core.record import Branch, Record
from sanc.core.space import Vector

FALLING_ITERATIONS = 20
"""Iterations over which f has to fall like a linear function, in steps that do not grow (docs/constants.md)."""
_MIN_SLOPE_RATIO = 0.7
"""Smallest ratio of the slopes, decrease over length, of the second half of these iterations and of the first. It is
0.8 or more on functions with ripples, and below 0.42 in the zoo (docs/constants.md)."""
_QUADRATIC_DECREASE = 0.5
"""Largest decrease of a convex quadratic by a step to its minimum along that step, over ‖g‖‖s‖."""
_MAX_PATH_RATIO = 3.0
"""Largest ratio of the lengths of the two halves, in which steps of nearly constant norm have a ratio of 1."""


@dataclass(frozen=True)
class RippleMonitor:
    """Detects that f falls like a linear function along steps that do not grow, and follows the steps afterwards.

    A step to the minimum of a convex quadratic along it decreases f by ½‖g‖‖s‖ at most. If steps decrease f by more,
    and their slope remains, the minimum is further away, and the steps of a model that knew it would grow. Only second
    derivatives that f does not have on that length keep them short.

    Attributes
    ----------
    count : int
        Consecutive iterations so far.
    path, linear_decrease, decrease : float
        The sums of ‖s‖, of ‖g‖‖s‖ and of the decreases of f over these iterations.
    half_path, half_decrease : float
        The sums of ‖s‖ and of the decreases over the first half of them.
    length : float
        The length of differences in the next iteration: that of the last step, or first of all these steps; 0: products
        are those of the oracle.
    min_length : float
        A shorter step ends the differences: the mean norm of the steps before.
    """

    count: int = 0
    path: float = 0.0
    linear_decrease: float = 0.0
    decrease: float = 0.0
    half_path: float = 0.0
    half_decrease: float = 0.0
    length: float = 0.0
    min_length: float = 0.0

    def after(self, record: Record) -> RippleMonitor:
        """Return the monitor after an iteration."""
        moved = record.branch in (Branch.VERY_SUCCESSFUL, Branch.SUCCESSFUL)
        if self.length:
            return replace(self, length=record.step_norm) if moved and record.step_norm >= self.min_length else _NONE
        if not moved:
            return _NONE
        monitor = self._with(record)
        if monitor.decrease < _QUADRATIC_DECREASE * monitor.linear_decrease:
            return _NONE
        if monitor.count == FALLING_ITERATIONS // 2:
            return replace(monitor, half_path=monitor.path, half_decrease=monitor.decrease)
        if monitor.count < FALLING_ITERATIONS:
            return monitor
        later_path, later_decrease = monitor.path - monitor.half_path, monitor.decrease - monitor.half_decrease
        keeps_slope = later_decrease * monitor.half_path > _MIN_SLOPE_RATIO * monitor.half_decrease * later_path
        return monitor if keeps_slope and later_path < _MAX_PATH_RATIO * monitor.half_path else _NONE

    @property
    def is_complete(self) -> bool:
        """Whether f has fallen like a linear function over all iterations."""
        return self.count == FALLING_ITERATIONS

    def with_differences(self) -> RippleMonitor:
        """Return the monitor that begins with differences over the length of all steps."""
        return RippleMonitor(length=self.path, min_length=self.path / self.count)

    def _with(self, record: Record) -> RippleMonitor:
        """Return the monitor with one more iteration."""
        return replace(
            self,
            count=self.count + 1,
            path=self.path + record.step_norm,
            linear_decrease=self.linear_decrease + record.grad_norm * record.step_norm,
            decrease=self.decrease + record.value - record.trial_value,
        )


_NONE = RippleMonitor()


def falls_ahead(oracle: Oracle, before: Vector, x: Vector, path: float) -> bool:
    """Return whether f is lower straight ahead of the last step, from `before` to x, at this distance; costs a value.

    Along a bent valley f falls like a linear function, too, but not straight ahead.
    """
    step = x - before
    ahead = oracle.value(oracle.move(x, step * (path / oracle.space.norm(step))))
    return -math.inf < ahead < oracle.value(x)


class LongDifferenceOracle(WrappedOracle):
    """The objective of `inner` with products that are differences of its gradients over a length."""

    def __init__(self, inner: Oracle, length: float) -> None:
        super().__init__(inner, inner.space)
        self.length = length

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        return self.inner.shapes

    @property
    def differenced_products(self) -> bool:
        return True

    def is_cached(self, x: Vector) -> tuple[bool, bool]:
        return self.inner.is_cached(x)

    def value(self, x: Vector) -> float:
        return self.inner.value(x)

    def gradient_sample_value(self, x: Vector) -> float:
        return self.inner.gradient_sample_value(x)

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        return self.inner.gradient(x)

    def norm(self, v: Vector) -> float:
        return self.inner.norm(v)

    def gradient_error(self, x: Vector) -> float:
        return self.inner.gradient_error(x)

    def truncation_error(self, x: Vector) -> Vector | None:
        return self.inner.truncation_error(x)

    def hessian(self, x: Vector) -> Operator:
        return _LongDifferences(self.inner, x, self.length)

    def eigenbasis(self, x: Vector, free_indices: Any = None) -> Eigenbasis | None:
        return None


class _LongDifferences(Operator):
    """The differences (∇f(x + ℓv/‖v‖) − ∇f(x)) ‖v‖/ℓ."""

    def __init__(self, oracle: Oracle, x: Vector, length: float) -> None:
        self._oracle, self._x, self._length = oracle, x, length
        self._g = oracle.gradient(x)[1]

    def __call__(self, v: Vector) -> Vector:
        oracle = self._oracle
        norm = oracle.space.norm(v)
        if norm == 0.0:
            return oracle.space.zeros()
        factor = self._length / norm
        return (oracle.gradient(self._x + v * factor)[1] - self._g) * (1.0 / factor)

    def gradient(self) -> Vector:
        return self._g * 1.0
