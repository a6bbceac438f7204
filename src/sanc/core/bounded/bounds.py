"""Bounds on the variables: the box, its faces, and the objective on a face.

A run with bounds minimises on one face of the box in each iteration. Variables at a bound are held there if the
negative gradient points out of the box. The others are free, and all those that were held with the wrong sign are
released together. A `FaceOracle` evaluates f as a function of the free variables only, so that the iteration, the
certificate and all tests of a run are those without bounds, in fewer dimensions. If every variable is free, the vectors
are the same objects, and the steps are those without bounds bit for bit.

`sanc.core.runs.faces` has the face of a point, and `sanc.core.bounded.box_model` the step: a minimiser of the cubic
model in the box. No evaluation leaves the box: `move` projects, and outside values are NaN without a call of f.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.core.caching import MAX_CACHED_POINTS, RecentCache
from sanc.core.oracle import Eigenbasis, Operator, Oracle, WrappedOracle
from sanc.core.space import Floats, NumpySpace, Space, Vector


@dataclass(frozen=True, eq=False)
class Box:
    """The set lower ≤ x ≤ upper.

    Attributes
    ----------
    lower, upper : Tensor
        The bounds, of the type and on the device of x; infinite where there is none.
    """

    lower: Tensor
    upper: Tensor

    def contains(self, x: Tensor) -> bool:
        """Return whether x is in the box; a point that is not finite is not."""
        return bool(((x >= self.lower) & (x <= self.upper)).all())

    def as_lists(self) -> tuple[list[float], list[float]]:
        """Return lower and upper bounds as lists."""
        return self.lower.tolist(), self.upper.tolist()

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point of the box; x itself if that is in the box."""
        return x if self.contains(x) else x.clamp(self.lower, self.upper)

    def is_interior(self, x: Tensor) -> bool:
        """Return whether every variable of x lies between its bounds."""
        return bool(self.between(x).all())

    def difference_points(self, x: Tensor, d: Tensor) -> list[tuple[float, Tensor]]:
        """Return weights w and points p in the box with Σ w·g(p) ≈ g′(x) d, of second order in d.

        The points are x ± d if both are in the box. Otherwise the entries of d are divided between x + d and x − d by
        the side on which they have more room. Each part is a one-sided difference of second order,
        −1.5 g(x) + 2 g(x + d) − 0.5 g(x + 2d). d is shortened if there is too little room, and entries of fixed
        variables are left out.
        """
        ahead, behind = x + d, x - d
        if self.contains(ahead) and self.contains(behind):
            return [(0.5, ahead), (-0.5, behind)]
        room_ahead = torch.where(d > 0.0, self.upper - x, x - self.lower)
        room_behind = torch.where(d > 0.0, x - self.lower, self.upper - x)
        room = torch.maximum(room_ahead, room_behind)
        movable = (d != 0.0) & (room > 0.0)
        fractions = torch.where(movable, room / (2.0 * d.abs()).clamp(min=torch.finfo(d.dtype).tiny), math.inf)
        shrink = min(1.0, float(fractions.min()))
        points: list[tuple[float, Tensor]] = []
        for sign, side in ((1.0, room_ahead >= room_behind), (-1.0, room_ahead < room_behind)):
            part = torch.where(side & movable, d * (sign * shrink), 0.0)
            if bool((part != 0.0).any()):
                weight = sign / shrink
                once, twice = self.project(x + part), self.project(x + 2.0 * part)
                points += [(-1.5 * weight, x), (2.0 * weight, once), (-0.5 * weight, twice)]
        return points

    def restricted(self, free_indices: Tensor | None) -> Box:
        """Return the box of some of the variables; None: all."""
        return self if free_indices is None else Box(self.lower[free_indices], self.upper[free_indices])

    def active(self, x: Tensor, g: Tensor) -> Tensor:
        """Return −1 for variables at their lower bound, 1 at the upper one, and 0 between them.

        A fixed variable is at the bound out of which the negative gradient points.
        """
        at_lower, at_upper = x <= self.lower, x >= self.upper
        at_lower = at_lower & ~(at_upper & (g < 0.0))
        return (at_upper & ~at_lower).to(torch.int8) - at_lower.to(torch.int8)

    def between(self, x: Tensor) -> Tensor:
        """Return the mask of the variables that lie strictly between their bounds."""
        return (x > self.lower) & (x < self.upper)

    def free(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the mask of the variables between their bounds, and at a bound from which f decreases into the box."""
        can_fall, can_rise = x > self.lower, x < self.upper
        # Comparisons with NaN are false: a variable whose derivative is NaN is free, so that the run detects it.
        return (can_fall | can_rise) & (can_fall | ~(g >= 0.0)) & (can_rise | ~(g <= 0.0))


class FaceOracle(WrappedOracle):
    """Evaluates f as a function of the free variables; the others keep their values.

    Parameters
    ----------
    inner : Oracle
        The oracle of f, which counts the evaluations.
    box : Box
        The bounds of all variables.
    base_point : vector
        All variables, of which the face holds those that are not free.
    free_indices : Tensor or None
        Indices of the free variables; None: all are free, and `inner` has the same vectors.

    Attributes
    ----------
    box : Box
        The bounds of the free variables.
    """

    def __init__(self, inner: Oracle, box: Box, base_point: Vector, free_indices: Tensor | None) -> None:
        super().__init__(inner, inner.space if free_indices is None else _smaller_space(inner.space, len(free_indices)))
        self.base_point, self.free_indices = base_point, free_indices
        self.box = box.restricted(free_indices)
        self._full_points: RecentCache[Vector] = RecentCache(MAX_CACHED_POINTS)
        self._current: tuple[Vector, Vector] | None = None  # x of the run, here and in the whole space
        self._gradients: RecentCache[Vector] = RecentCache(2)
        self._last_inside: Vector | None = None

    # Vectors of the face and of the whole space.

    def compress(self, full: Vector) -> Vector:
        if self.free_indices is None:
            return full
        return self.space.vector(self.inner.space.tensor(full)[self.free_indices])

    @property
    def full_oracle(self) -> Oracle:
        return self.inner

    def full_vector(self, v: Vector) -> Vector:
        return v if self.free_indices is None else self.embed(v, self.base_point)

    def full_point(self, x: Vector) -> Vector:
        if self.free_indices is None:
            return x
        if self._current is not None and self._current[0] is x:
            return self._current[1]
        return self._full_points.get(x, self._embed)

    def _embed(self, x: Vector) -> Vector:
        return self.embed(x, self.base_point)

    def embed(self, v: Vector, base: Vector) -> Vector:
        """Return a new vector with the entries of v, and the entries of `base` where variables are held."""
        tensor = self.inner.space.tensor(base).clone()
        tensor[self.free_indices] = self.space.tensor(v)
        return self.inner.space.vector(tensor)

    def full_step(self, s: Vector) -> Vector:
        return s if self.free_indices is None else self.embed(s, self.inner.space.zeros())

    def keep(self, x: Vector, full: Vector) -> None:
        """Keep the full vector of x, the current point of the run, which the cache might drop."""
        self._current = x, full

    # Evaluations.

    def move(self, x: Vector, d: Vector) -> Vector:
        """Return the projection of x + d on the box."""
        return self.space.vector(self.box.project(self.space.tensor(x + d)))

    def is_inside(self, x: Vector) -> bool:
        """Return whether x is in the box; the last such point is remembered."""
        if x is self._last_inside:
            return True
        is_inside: bool = self.box.contains(self.space.tensor(x))
        if is_inside:
            self._last_inside = x
        return is_inside

    def value(self, x: Vector) -> float:
        return self.inner.value(self.full_point(x)) if self.is_inside(x) else math.nan

    def gradient_sample_value(self, x: Vector) -> float:
        return self.inner.gradient_sample_value(self.full_point(x)) if self.is_inside(x) else math.nan

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        if not self.is_inside(x):
            return math.nan, x * math.nan
        value, g = self.inner.gradient(self.full_point(x))
        return value, g if self.free_indices is None else self._gradients.get(x, lambda _: self.compress(g))

    def gradient_error(self, x: Vector) -> float:
        return self.inner.gradient_error(self.full_point(x))

    def truncation_error(self, x: Vector) -> Vector | None:
        error = self.inner.truncation_error(self.full_point(x))
        return error if error is None or self.free_indices is None else self.compress(error)

    def norm(self, v: Vector) -> float:
        return self.inner.norm(v) if self.free_indices is None else self.space.norm(v)

    def is_cached(self, x: Vector) -> tuple[bool, bool]:
        return self.inner.is_cached(self.full_point(x))

    def hessian(self, x: Vector) -> Operator:
        operator = self.inner.hessian(self.full_point(x))
        return operator if self.free_indices is None else _FaceOperator(self, operator)

    def eigenbasis(self, x: Vector, free_indices: Any = None) -> Eigenbasis | None:
        assert free_indices is None, "a face of a face"
        return self.inner.eigenbasis(
            self.full_point(x), None if self.free_indices is None else self.free_indices.cpu().numpy()
        )


class _FaceOperator(Operator):
    """The rows and columns of the Hessian `inner` that belong to free variables."""

    def __init__(self, face: FaceOracle, inner: Operator) -> None:
        self.face, self.inner = face, inner
        self._zeros = face.inner.space.zeros()
        self._full_products: RecentCache[Vector] = RecentCache(2)

    def __call__(self, v: Vector) -> Vector:
        return self.face.compress(self._full_products.put(v, self._multiply(v)))

    def _multiply(self, v: Vector) -> Vector:
        """Return the product in the whole space."""
        return self.inner(self.face.embed(v, self._zeros))

    def gradient(self) -> Vector:
        return self.face.compress(self.inner.gradient())

    def matrix(self) -> Floats | None:
        matrix, free_indices = self.inner.matrix(), self.face.free_indices
        if matrix is None or free_indices is None:
            return matrix
        indices = free_indices.cpu().numpy()
        free: Floats = matrix[np.ix_(indices, indices)]
        return free

    def error(self, v: Vector, product: Vector) -> float:
        """Estimate the error of the product, by the error in the whole space."""
        full = self._full_products.get(v, self._multiply)
        return self.inner.error(self.face.embed(v, self._zeros), full)

    def release(self) -> None:
        self.inner.release()


class _ZeroDimensionalSpace(NumpySpace):
    """The space of a face without free variables, whose vectors BLAS rejects."""

    def unread_norm(self, v: Any) -> float:
        return 0.0


def _smaller_space(space: Space, dim: int) -> Space:
    """Return the space of fewer variables."""
    if isinstance(space, NumpySpace):
        return NumpySpace(dim, space.dtype) if dim else _ZeroDimensionalSpace(dim, space.dtype)
    return Space(dim, space.dtype, space.device)
