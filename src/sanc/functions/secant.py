"""Functions without derivatives: gradients by differences of f, and a Hessian from changes of the gradient.

A Hessian product by differences of gradients costs 2n evaluations of f or more. Within an iteration the Hessian is
therefore a secant matrix B, which the change of the gradient along each step updates (symmetric rank one). The
certificate needs the Hessian itself: second differences of f give all of it at once, and B becomes that matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sanc.core.oracle import Operator
from sanc.core.saved import state_error
from sanc.core.space import Floats, Vector, host_array
from sanc.functions.differences import DifferenceOracle, Scheme

MAX_SECANT_VARIABLES = 100
"""Largest number of variables with a secant matrix: second differences cost n²/2 evaluations of f."""

_MIN_UPDATE_DENOMINATOR = 1e-8
"""An update is skipped if its denominator is below this fraction of the norms: the usual safeguard (Conn, Gould and
Toint 1991)."""

_MIN_FORWARD_ERRORS = 100.0
"""Forward differences are used while the gradient norm exceeds this many times their error. Its error of 1 % then
changes a step by no more than a secant matrix does."""

_MAX_UPDATES = 30
"""Updates after which second differences replace the matrix. With 100 some runs of the zoo take more evaluations, and
with fewer than 30 the second differences cost more than they save."""

_SECOND_POWER = 1 / 4
"""Power p of the step h = eps^p of second differences, which balances the errors O(h²) and eps/h²."""


class SecantOracle(DifferenceOracle):
    """A function without derivatives, whose Hessian in an iteration is a secant matrix.

    With "3-point" gradients are forward differences as long as their error is negligible, then central ones. After an
    iteration without a step, and after `_MAX_UPDATES` updates, second differences of f replace the matrix.
    """

    has_matrix = True

    def __init__(self, fun: Callable[..., Any], x0: Any, *, scheme: Scheme, args: tuple[Any, ...] = ()) -> None:
        super().__init__(fun, x0, scheme=scheme, args=args)
        self._iterates = False
        self._stayed = False  # whether the last iteration made no step
        self._central = False  # whether forward differences are no longer accurate enough
        self._updates = 0  # since the matrix was the Hessian at a point
        self._matrix: Floats | None = None
        self._last: tuple[Floats, Floats] | None = None  # the point and the gradient of the last update
        self._exact_at: Any = None  # the point whose Hessian `_matrix` is

    # Gradients.

    def evaluate_gradient(self, x: Vector) -> Vector:
        if self.scheme == "2-point" or self._central or self._matrix is None:
            return self._differences(x, self.scheme)
        g = self._differences(x, "2-point")
        if self._is_accurate(x, g):
            return g
        self._central = True
        return self._differences(x, self.scheme)

    def _is_accurate(self, x: Vector, g: Vector) -> bool:
        """Return whether the error of a forward difference is negligible beside the gradient norm."""
        assert self._matrix is not None
        sizes = np.maximum(1.0, np.abs(host_array(x)))
        step = math.sqrt(self.value_error) * sizes
        error = 0.5 * step * np.abs(np.diag(self._matrix)) + 2.0 * self.value_error * abs(self.value(x)) / step
        return _MIN_FORWARD_ERRORS * float(np.linalg.norm(error)) < self.space.norm(g)

    def adapt_differences(self, value_error: float) -> bool:
        self._matrix, self._last, self._exact_at = None, None, None
        self._central = self.scheme != "2-point"
        return super().adapt_differences(value_error)

    # The Hessian.

    def begin(self, iteration: int, *, products: bool = True) -> None:
        self._iterates = True

    def end(self, step_norm: float) -> None:
        self._iterates = False
        self._stayed = step_norm == 0.0

    def hessian(self, x: Vector) -> Operator:
        if not self._iterates:
            return _DifferencedHessian(self, x)
        point, g = host_array(x), host_array(self.gradient(x)[1])
        if self._matrix is None:
            self._matrix = self._first_matrix(x, g)
        elif self._stayed or self._updates >= _MAX_UPDATES:
            self._updates, self._stayed = 0, False
            self.adopt_hessian(self.difference_matrix(x), x)
        elif self._last is not None and self._exact_at is not x:
            self._updates += 1
            self._matrix = updated(self._matrix, point - self._last[0], g - self._last[1])
        self._last = point, g
        return _SecantHessian(self, x, self._matrix)

    def _first_matrix(self, x: Vector, g: Floats) -> Floats:
        """Return the curvature of f along the gradient, from one value, times the identity."""
        norm = self.space.norm(self.gradient(x)[1])  # without overflow
        if norm == 0.0:
            return np.eye(len(g))
        h = self.value_error**_SECOND_POWER * max(1.0, self.space.norm(x) / self.space.dim**0.5)
        moved = x - (h / norm) * self.gradient(x)[1]
        if self.box is not None and not self.box.contains(self.space.tensor(moved)):
            return norm * np.eye(len(g))
        curvature = abs(2.0 * (self._evaluate(moved) - self.value(x) + h * norm) / (h * h))
        return (curvature if 0.0 < curvature < math.inf else norm) * np.eye(len(g))

    def difference_matrix(self, x: Vector) -> Floats:
        """Return the Hessian at x by second differences of f, without evaluations if it is the secant matrix."""
        if self._exact_at is x and self._matrix is not None:
            return self._matrix
        return _second_differences(self, x)

    def adopt_hessian(self, matrix: Floats, x: Vector) -> None:
        """Make the Hessian at x the secant matrix, unless an entry is not finite."""
        if np.isfinite(matrix).all():
            self._matrix, self._exact_at = matrix, x

    # Saving.

    def numbers(self) -> dict[str, Any]:
        matrix = None if self._matrix is None else self._matrix.tolist()
        last = None if self._last is None else [part.tolist() for part in self._last]
        flags = {"central": self._central, "stayed": self._stayed, "updates": self._updates}
        return super().numbers() | flags | {"matrix": matrix, "last": last}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        super().restore(numbers)
        n = self.space.dim
        parts = {"matrix": (n, n), "last": (2, n)}
        arrays = {name: _saved_array(name, numbers[name], shape) for name, shape in parts.items()}
        self._central, self._stayed = bool(numbers["central"]), bool(numbers["stayed"])
        self._updates, self._matrix = int(numbers["updates"]), arrays["matrix"]
        self._last = None if arrays["last"] is None else (arrays["last"][0], arrays["last"][1])


def _saved_array(name: str, saved: Any, shape: tuple[int, int]) -> Any:
    """Return a saved array after checks; None if there was none."""
    if saved is None:
        return None
    try:
        array = np.array(saved, np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.shape != shape or not np.isfinite(array).all():
        raise state_error(f"resume['oracle']['{name}']", saved, f"finite numbers of shape {shape}, or None,")
    return array


class _SecantHessian(Operator):
    """The secant matrix, whose products cost no value."""

    def __init__(self, oracle: SecantOracle, x: Vector, matrix: Floats) -> None:
        self._oracle, self._x, self._matrix = oracle, x, matrix

    def __call__(self, v: Vector) -> Vector:
        return _vector(self._oracle, self._matrix @ host_array(v))

    def gradient(self) -> Vector:
        return self._oracle.gradient(self._x)[1] * 1.0

    def matrix(self) -> Floats:
        return self._matrix


class _DifferencedHessian(Operator):
    """The Hessian by second differences of f, all of it at the first product. It becomes the secant matrix."""

    def __init__(self, oracle: SecantOracle, x: Vector) -> None:
        self._oracle, self._x = oracle, x

    def __call__(self, v: Vector) -> Vector:
        o = self._oracle
        o.meter.count_product(1)
        return _vector(o, self.matrix() @ host_array(v))

    def gradient(self) -> Vector:
        return self._oracle.gradient(self._x)[1] * 1.0

    def matrix(self) -> Floats:
        matrix = self._oracle.difference_matrix(self._x)
        self._oracle.adopt_hessian(matrix, self._x)
        return matrix

    def error(self, v: Vector, product: Vector) -> float:
        """Estimate the error from the second difference of f along v with twice the step, and from roundoff.

        That shows one component of the error. Its norm is √n times as large if all components are alike.
        """
        o, norm = self._oracle, self._oracle.space.norm(v)
        step = o.value_error**_SECOND_POWER * max(1.0, o.space.norm(self._x) / o.space.dim**0.5)
        value, h = o.value(self._x), 2.0 * step
        roundoff = float(4.0 * o.value_error * abs(value) / (step * step) * norm)  # of two values and twice the third
        d = v * (h / norm)
        ends = [self._x + d, self._x - d]
        if norm == 0.0 or (o.box is not None and not all(o.box.contains(o.space.tensor(end)) for end in ends)):
            return roundoff
        second = sum(o._evaluate(end) - value for end in ends) / (h * h)
        along = abs(second * norm - o.space.dot(v, product) / norm)
        return float(along * o.space.dim**0.5) + roundoff


def updated(matrix: Floats, s: Floats, y: Floats) -> Floats:
    """Return the matrix after a symmetric update of rank one, with which B s = y; unchanged where that is unstable."""
    if not np.isfinite(y).all():
        return matrix
    missing = y - matrix @ s
    denominator = float(missing @ s)
    if not abs(denominator) > _MIN_UPDATE_DENOMINATOR * float(np.linalg.norm(missing) * np.linalg.norm(s)):
        return matrix
    new = matrix + np.outer(missing, missing) / denominator
    return new if np.isfinite(new).all() else matrix


def _second_differences(oracle: SecantOracle, x: Vector) -> Floats:
    """Return the Hessian: central second differences on the diagonal, and mixed ones from one more value each.

    f(x + d_i + d_j) − f(x + d_i) − f(x + d_j) + f(x) is h_i h_j H_ij up to terms of third order. Its mean with that of
    −d_i and −d_j has none, but costs twice as many evaluations.
    """
    n, point, value = oracle.space.dim, host_array(x), oracle.value(x)
    steps = oracle.value_error**_SECOND_POWER * np.maximum(1.0, np.abs(point))
    if oracle.box is not None:
        lower, upper = (host_array(side) for side in (oracle.box.lower, oracle.box.upper))
    else:
        lower, upper = np.full(n, -math.inf), np.full(n, math.inf)
    room_above, room_below = upper - point, point - lower
    ahead, matrix = np.zeros(n), np.zeros((n, n))

    def at(*moves: tuple[int, float]) -> float:
        moved = point.copy()
        for k, step in moves:
            moved[k] += step
        return oracle._evaluate(_vector(oracle, np.clip(moved, lower, upper)))

    for k in range(n):
        if room_above[k] < steps[k]:
            steps[k] *= -1.0  # the side with more room
            if room_below[k] < -steps[k]:
                steps[k] = room_above[k] if room_above[k] >= room_below[k] else -room_below[k]
        if steps[k] == 0.0:
            continue
        ahead[k] = at((k, steps[k]))
        behind = -steps[k]
        if (behind > 0 and room_above[k] < behind) or (behind < 0 and room_below[k] < -behind):
            half = at((k, 0.5 * steps[k]))
            matrix[k, k] = 4.0 * (ahead[k] - 2.0 * half + value) / steps[k] ** 2
        else:
            matrix[k, k] = (ahead[k] - 2.0 * value + at((k, behind))) / steps[k] ** 2
        for j in range(k):
            if steps[j] != 0.0:
                mixed = at((k, steps[k]), (j, steps[j])) - ahead[k] - ahead[j] + value
                matrix[j, k] = matrix[k, j] = mixed / (steps[k] * steps[j])
    return matrix


def _vector(oracle: SecantOracle, array: Floats) -> Vector:
    """Return an array as a vector of the oracle."""
    return oracle.as_vector(array, "fun")
