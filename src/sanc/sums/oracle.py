"""f, g and Hv of a finite sum on three independent samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sanc.core.caching import RecentCache
from sanc.core.meter import Meter
from sanc.core.oracle import Operator, Oracle
from sanc.core.saved import state_error
from sanc.core.space import Floats, NumpySpace
from sanc.errors import ArgumentTypeError, require, require_integer, shown
from sanc.sums.linear import FiniteSum
from sanc.theory import growing_sample_sizes

GRADIENT, HESSIAN, OBJECTIVE = range(3)
"""Roles of the three samples of an iteration."""

Rows = npt.NDArray[np.intp]


class Draws:
    """Draws the rows of each sample as a function of (seed, iteration, role).

    Every method therefore gets the same samples. The generator is Philox, which is counter-based: the seed is the key,
    and each (iteration, role) has separate counters.
    """

    def __init__(self, n: int, seed: int, sampling: Literal["uniform", "buffered"]) -> None:
        self._n, self._seed, self._sampling = n, seed, sampling
        self._bits = np.random.Philox(seed)
        self._generator, self._state = np.random.Generator(self._bits), self._bits.state
        self._orders: dict[int, tuple[tuple[int, int], Rows]] = {}

    def rows(self, iteration: int, role: int, size: int) -> Rows:
        """Return the rows of a sample."""
        if self._sampling == "buffered":
            return self._batch(iteration, role, size)
        self._state["state"]["counter"][2:] = iteration, role
        self._bits.state = self._state
        return self._generator.choice(self._n, size, replace=False, shuffle=False)

    def _batch(self, iteration: int, role: int, size: int) -> Rows:
        """Return the next rows of a shuffle buffer that holds one batch, as in the authors' program."""
        epoch, batch = divmod(iteration, self._n // size)  # an incomplete last batch is dropped
        stored = self._orders.get(role)
        if stored is None or stored[0] != (epoch, size):
            rng = np.random.default_rng((self._seed, epoch, role))
            self._orders[role] = stored = ((epoch, size), buffered_order(self._n, size, rng))
        return stored[1][batch * size : (batch + 1) * size]


def buffered_order(n: int, size: int, rng: np.random.Generator) -> Rows:
    """Return the order in which a shuffle buffer of `size` rows emits rows 0 … n−1.

    No row is emitted more than `size` − 1 positions early.
    """
    places = (rng.random(n) * np.minimum(size, np.arange(n, 0, -1))).astype(np.intp).tolist()
    buffer = list(range(min(size, n)))
    order = []
    for step, place in enumerate(places):
        order.append(buffer[place])
        if step + size < n:
            buffer[place] = step + size
        else:
            buffer[place] = buffer[-1]
            buffer.pop()
    return np.array(order, np.intp)


def require_sum(problem: FiniteSum) -> None:
    """Raise an `ArgumentError` if a subclass of `FiniteSum` does not set `n`, `dim` and `dtype`."""
    kind = type(problem).__name__
    for name in ("n", "dim"):
        require_integer(f"{kind}.{name}", getattr(problem, name, None), 1)
    dtype = getattr(problem, "dtype", None)
    fits = dtype is not None and dtype in (np.dtype("float32"), np.dtype("float64"))
    require(fits, f"{kind}.dtype", dtype, "set it to np.dtype of float32 or float64")


def _require_shape_of(v: Any, returned: Any, function: str) -> Any:
    """Return the result of a user's function, or raise an `ArgumentTypeError` if it is no array of v's shape."""
    if not isinstance(returned, np.ndarray) or returned.shape != v.shape:
        raise ArgumentTypeError(f"{function} returned {shown(returned)}: return an array of shape {v.shape}.")
    return returned


class SumOracle(Oracle):
    """Evaluates a finite sum on the samples of each iteration.

    `requested` are the sizes of the gradient, Hessian and objective samples; None is the whole sum. With `grow` the
    gradient and Hessian samples grow as the step norm falls, as in SCR.
    """

    def __init__(
        self,
        problem: FiniteSum,
        requested: tuple[int | None, int | None, int | None],
        seed: int,
        sampling: Literal["uniform", "buffered"] = "uniform",
        *,
        grow: bool = False,
    ) -> None:
        self.problem = problem
        self.convex = problem.convex
        self.space = NumpySpace(problem.dim, problem.dtype)
        self.meter = Meter()
        self.requested = list(requested)
        self._first_sizes = self.sizes[:2] if grow else None
        self._first_step_norm: float | None = None
        self._draws = Draws(problem.n, seed, sampling)
        self._iteration = -1
        self._samples: dict[int, FiniteSum] = {}
        self._values: RecentCache[float] = RecentCache()
        self._gradients: RecentCache[tuple[float, Any]] = RecentCache(1)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether all three samples are the whole sum."""
        return self.requested == [None, None, None]

    @property
    def sizes(self) -> tuple[int, int, int]:
        g, h, f = (self.problem.n if size is None else size for size in self.requested)
        return g, h, f

    def begin(self, iteration: int, *, products: bool = True) -> None:
        if iteration != self._iteration:
            self._iteration, self._samples = iteration, {}
            if self.requested[GRADIENT] is not None:
                self._gradients.clear()

    def end(self, step_norm: float) -> None:
        if self._first_sizes is not None and step_norm > 0.0:
            self._first_step_norm = self._first_step_norm or step_norm
            self.requested[:2] = growing_sample_sizes(
                step_norm, self._first_step_norm, self._first_sizes, self.problem.n
            )

    def numbers(self) -> dict[str, Any]:
        return {"sizes": list(self.sizes[:2]), "reference": self._first_step_norm}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        sizes, reference = numbers["sizes"], numbers["reference"]
        fits = isinstance(sizes, list) and all(type(size) is int and 1 <= size <= self.problem.n for size in sizes)
        if not fits or len(sizes) != 2:
            raise state_error("resume['oracle']['sizes']", sizes, f"two sizes from 1 to {self.problem.n}")
        if reference is not None and not (isinstance(reference, float) and reference > 0):
            raise state_error("resume['oracle']['reference']", reference, "None or a positive number")
        if self._first_sizes is not None:
            self.requested[:2], self._first_step_norm = sizes, reference

    def sample(self, role: int) -> FiniteSum:
        """Return the sample of this iteration for a role. Repeated calls return the same sample."""
        size = self.requested[role]
        if size is None:
            return self.problem
        if role not in self._samples:
            self._samples[role] = self.problem.subset(self._draws.rows(self._iteration, role, size))
        return self._samples[role]

    def value(self, x: Any) -> float:
        if self.requested[OBJECTIVE] is None:
            return self._values.get(x, lambda x: self._value(x, OBJECTIVE))
        return self._value(x, OBJECTIVE)  # not stored: each point is evaluated once per iteration and sample

    def gradient_sample_value(self, x: Any) -> float:
        return self._value(x, GRADIENT)

    def _value(self, x: Any, role: int) -> float:
        """Return f(x) on the sample of a role, and count it."""
        sample = self.sample(role)
        self.meter.count_value(sample.n)
        return sample.value(x)

    def gradient(self, x: Any) -> tuple[float, Any]:
        return self._gradients.get(x, self._gradient)

    def _gradient(self, x: Any) -> tuple[float, Any]:
        """Return f(x) and ∇f(x) on the gradient sample, and count them."""
        sample = self.sample(GRADIENT)
        value, g = sample.value_and_gradient(x)
        _require_shape_of(x, g, "value_and_gradient")
        self.meter.count_gradient(sample.n)
        if self.requested[GRADIENT] is None and self.requested[OBJECTIVE] is None:
            self._values.put(x, value)
        return value, g

    def is_cached(self, x: Any) -> tuple[bool, bool]:
        value = self.requested[OBJECTIVE] is None and x in self._values
        return value, self.requested[GRADIENT] is None and x in self._gradients

    def hessian(self, x: Any) -> Operator:
        return _SampleHessian(self, x)


class _SampleHessian(Operator):
    """The Hessian of a sample of the sum at x."""

    def __init__(self, oracle: SumOracle, x: Any) -> None:
        self._oracle, self._x = oracle, x
        self._sample = oracle.sample(HESSIAN)

    @cached_property
    def _product(self) -> Callable[[Any], Any]:
        """The function of v that the sample returned."""
        product = self._sample.hessian(self._x)
        if not callable(product):
            raise ArgumentTypeError(f"hessian returned {shown(product)}: return a function of v, v ↦ ∇²f(w) v.")
        return product

    def matrix(self) -> Floats | None:
        matrix = self._sample.hessian_matrix(self._x)
        if matrix is not None:
            self._oracle.meter.count_product(self._sample.n * self._sample.dim)
        return matrix

    def __call__(self, v: Any) -> Any:
        self._oracle.meter.count_product(self._sample.n)
        return _require_shape_of(v, self._product(v), "the function that hessian returned")

    def gradient(self) -> Any:
        self._oracle.meter.count_gradient(self._sample.n)
        return self._sample.value_and_gradient(self._x)[1]
