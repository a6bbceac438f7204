"""Caches of evaluations at the last few points."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from sanc.core.oracle import Eigenbasis, Operator, Oracle, WrappedOracle
from sanc.core.space import Vector
from sanc.core.spectrum.krylov import ColumnSource
from sanc.errors import ArgumentTypeError, shown

T = TypeVar("T")

MAX_CACHED_POINTS = 4
"""Points whose residuals are kept, or whose full vectors on a face or in other variables: x, a trial point, an escape
point, and one more."""


class RecentCache(Generic[T]):
    """A cache of the last few evaluations, by the identity of the vector; the least recently used one is dropped.

    By default three entries hold f at x, at a trial point and at an escape point. After three more points the value at
    x is dropped, and an iteration that needs it evaluates it again. The cache has weak references to the vectors, and
    the entries of deleted vectors count too.
    """

    def __init__(self, size: int = 3) -> None:
        self._size = size
        self._entries: list[tuple[Callable[[], Any], T]] = []  # the last one first

    def __contains__(self, x: Any) -> bool:
        return any(cached() is x for cached, _ in self._entries)

    def get(self, x: Any, evaluate: Callable[[Any], T]) -> T:
        """Return the cached evaluation at `x`; evaluate and cache it if there is none."""
        for index, (cached, evaluation) in enumerate(self._entries):
            if cached() is x:
                if index:
                    self._entries.insert(0, self._entries.pop(index))
                return evaluation
        return self.put(x, evaluate(x))

    def put(self, x: Any, evaluation: T) -> T:
        """Cache an evaluation and return it."""
        self._entries.insert(0, (weakref.ref(x), evaluation))
        del self._entries[self._size :]
        return evaluation

    def clear(self) -> None:
        """Empty the cache."""
        self._entries.clear()


class CachedOracle(WrappedOracle):
    """The oracle of an exact objective, which is evaluated once at each of the last few points."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner, inner.space)
        self.has_matrix = inner.has_matrix
        self._values: RecentCache[float] = RecentCache()
        self._gradients: RecentCache[tuple[float, Vector]] = RecentCache()

    @property
    def box(self) -> Any:
        """The bounds of `inner`."""
        return self.inner.box

    @box.setter
    def box(self, box: Any) -> None:
        self.inner.box = box

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        return self.inner.shapes

    def is_cached(self, x: Vector) -> tuple[bool, bool]:
        return x in self._values or x in self._gradients, x in self._gradients

    def value(self, x: Vector) -> float:
        return self.gradient(x)[0] if x in self._gradients else self._values.get(x, self.inner.value)

    def gradient_sample_value(self, x: Vector) -> float:
        return self.value(x)  # f is exact: it has one sample

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        return self._gradients.get(x, self.inner.gradient)

    def gradient_error(self, x: Vector) -> float:
        return self.inner.gradient_error(x)

    def truncation_error(self, x: Vector) -> Vector | None:
        return self.inner.truncation_error(x)

    def norm(self, v: Vector) -> float:
        return self.inner.norm(v)

    def hessian(self, x: Vector) -> Operator:
        operator = self.inner.hessian(x)
        if not isinstance(operator, Operator):
            raise ArgumentTypeError(
                f"hessian() of {shown(self.inner)} returned {shown(operator)}: return a sanc.extend.Operator."
            )
        return operator

    def eigenbasis(self, x: Vector, free_indices: Any = None) -> Eigenbasis | None:
        return self.inner.eigenbasis(x, free_indices)

    def lanczos(self, operator: Operator, start: Vector, **options: Any) -> ColumnSource:
        return self.inner.lanczos(operator, start, **options)
