"""f, g and Hv of NumPy or torch functions whose derivatives the caller passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.core.caching import RecentCache
from sanc.core.meter import Meter
from sanc.core.oracle import Operator, Oracle
from sanc.core.saved import state_error
from sanc.core.space import NumpySpace, Space, Vector, difference_step
from sanc.errors import ArgumentError, ArgumentTypeError, shown

_MIN_SCALE_RATIO = 1e-3
"""Smallest scale of x for difference steps, relative to the largest one of the run; chosen by hand."""


class CallableOracle(Oracle):
    """A function with its gradient and, optionally, its Hessian, as callables on arrays or tensors.

    ``fun(x, *args)`` returns f, or (f, g) if `jac` is True. ``hess(x, *args)`` returns a matrix, a sparse matrix or a
    linear operator, and ``hessp(x, v, *args)`` a product. Without either, products are central differences of
    gradients. The points have the shape, type and device of `x0`.

    Attributes
    ----------
    space, meter
        As in `Oracle`.
    fun, jac, hess, hessp, args
        The functions and their further arguments.
    shape : tuple of int
        The shape of the points that the functions receive.
    relative_gradient_error : float or None
        Relative error of the gradients; None: the machine precision.
    """

    exact = has_user_gradient = True

    def __init__(
        self,
        fun: Callable[..., Any],
        x0: Any,
        *,
        jac: Callable[..., Any] | bool,
        hess: Callable[..., Any] | None = None,
        hessp: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        meter: Meter | None = None,
    ) -> None:
        self.fun, self.jac, self.hess, self.hessp, self.args = fun, jac, hess, hessp, args
        self.shape = x0.shape
        self._is_flat = len(self.shape) == 1
        self.meter = Meter() if meter is None else meter
        self.relative_gradient_error: float | None = None
        self.space: Space
        if isinstance(x0, Tensor):
            self.space = Space(x0.numel(), x0.dtype, x0.device)
        else:
            self.space = NumpySpace(x0.size, x0.dtype)
        self._values: RecentCache[float] = RecentCache()
        self._gradients: RecentCache[tuple[float, Vector]] = RecentCache(1)
        self._scale = 0.0  # largest root mean square of x at the points of products by differences

    @property
    def differenced_products(self) -> bool:
        return self.hess is None and self.hessp is None

    def as_vector(self, returned: Any, name: str) -> Vector:
        """Copy the value that the callable `name` returned into a new flat vector."""
        array = self.as_array(returned, name)
        flat: Vector = array.reshape(-1).clone() if isinstance(array, Tensor) else array.flatten()
        if len(flat) != self.space.dim:
            raise ArgumentError(
                f"{name} returned {len(flat)} numbers: return one for each of the {self.space.dim} variables."
            )
        return flat

    def as_array(self, returned: Any, name: str) -> Any:
        """Convert the value that the callable `name` returned into an array or tensor of the points' type."""
        if type(returned) is np.ndarray and returned.dtype == self.space.dtype:
            return returned
        try:
            _reject_complex(returned)
            if not isinstance(self.space, NumpySpace):
                return torch.as_tensor(returned, dtype=self.space.dtype, device=self.space.device).detach()
            return np.asarray(returned.detach().cpu() if isinstance(returned, Tensor) else returned, self.space.dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ArgumentTypeError(f"{name} returned {shown(returned)}: return an array of real numbers.") from None

    def as_argument(self, x: Any) -> Any:
        """Return a copy of a vector in the shape of x0. A callable that changes it in place does not affect the run."""
        copy = x.clone() if isinstance(x, Tensor) else x.copy()
        return copy if self._is_flat else copy.reshape(self.shape)

    def value(self, x: Vector) -> float:
        return self._values.get(x, self._evaluate)

    def _evaluate(self, x: Vector) -> float:
        """Call `fun` and return f(x); if it returns the gradient too, cache that."""
        returned = self.fun(self.as_argument(x), *self.args)
        if self.jac is not True:
            self.meter.count_value(1)
            return self.as_value(returned)
        returned, g = pair(returned)
        g = self.as_vector(g, "fun")
        self.meter.count_gradient(1)
        self.meter.count_value(1)
        return self._gradients.put(x, (self.as_value(returned), g))[0]

    def as_value(self, returned: Any) -> float:
        """Convert the value that `fun` returned into a float."""
        return as_scalar(returned)

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        return self._gradients.get(x, self._evaluate_both)

    def _evaluate_both(self, x: Vector) -> tuple[float, Vector]:
        """Return f(x), which may be cached, and ∇f(x)."""
        value = self.value(x)
        if self.jac is not True:
            return value, self.evaluate_gradient(x)
        if x not in self._gradients:  # the cache holds the value and no longer the gradient
            self._values.clear()
            self.value(x)
        return self.gradient(x)

    def is_cached(self, x: Vector) -> tuple[bool, bool]:
        has_gradient = x in self._gradients
        # With jac = True a value alone is of no use: `gradient` evaluates both again.
        return x in self._values and (has_gradient or self.jac is not True), has_gradient

    def evaluate_gradient(self, x: Vector) -> Vector:
        """Call the callable, count the call and return ∇f(x)."""
        self.meter.count_gradient(1)
        if self.jac is True:
            return self.as_vector(self.fun(self.as_argument(x), *self.args)[1], "fun")
        assert callable(self.jac)
        return self.as_vector(self.jac(self.as_argument(x), *self.args), "jac")

    def hessian(self, x: Vector) -> Operator:
        return CallableOperator(self, x)

    def smallest_scale(self, x: Vector) -> float:
        """Record the scale of x. Return the smallest one that difference steps follow; 1 if x was zero at all points.

        The steps follow the root mean square of x, but not below `_MIN_SCALE_RATIO` times its largest value of the run.
        An x that tends to zero would otherwise have steps below the scale on which f changes.
        """
        self._scale = max(self._scale, self.space.norm(x) / self.space.dim**0.5)
        return _MIN_SCALE_RATIO * self._scale or 1.0

    def numbers(self) -> dict[str, Any]:
        return {"size": self._scale}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        size = numbers["size"]
        if not isinstance(size, float) or not 0.0 <= size < math.inf:
            raise state_error("resume['oracle']['size']", size, "a finite number ≥ 0")
        self._scale = size


class CallableOperator(Operator):
    """The Hessian at x: a matrix or product of the caller, or central differences of gradients."""

    def __init__(self, oracle: CallableOracle, x: Vector) -> None:
        self.oracle, self.x = oracle, x

    def __call__(self, v: Vector) -> Vector:
        self.oracle.meter.count_product(1)
        return self.uncounted_product(v)

    def uncounted_product(self, v: Vector) -> Vector:
        """Return the product with `v` without counting it."""
        o = self.oracle
        if o.hessp is not None:
            return o.as_vector(o.hessp(o.as_argument(self.x), o.as_argument(v), *o.args), "hessp")
        if o.hess is not None:
            return o.as_vector(self._multiply(v), "hess")
        return self.difference(v, 1.0)

    @cached_property
    def _multiply(self) -> Callable[[Any], Any]:
        """The product with the matrix or operator that `hess` returned."""
        o, dim = self.oracle, self.oracle.space.dim
        assert o.hess is not None
        matrix = o.hess(o.as_argument(self.x), *o.args)
        is_operator = hasattr(matrix, "__matmul__") and not hasattr(matrix, "__array__")  # as in SciPy
        matrix = matrix if is_operator else o.as_array(matrix, "hess")
        shape = tuple(matrix.shape)
        if math.prod(shape) != dim * dim:
            raise ArgumentError(f"hess returned a matrix of shape {shape}: return one of shape ({dim}, {dim}).")
        matrix = matrix if shape == (dim, dim) else matrix.reshape(dim, dim)
        if is_operator and not isinstance(o.space, NumpySpace):
            return lambda v: matrix @ v.cpu().numpy()
        return lambda v: matrix @ v

    def difference(self, v: Vector, factor: float) -> Vector:
        """Return the central difference of gradients along `v`, with `factor` times the usual step."""
        o = self.oracle
        norm = o.space.norm(v)
        if norm == 0.0:
            return o.space.zeros()
        h = factor * self.step() / norm
        if o.box is not None:
            return self._difference_in_box(v, h)
        return (o.evaluate_gradient(self.x + h * v) - o.evaluate_gradient(self.x - h * v)) * (0.5 / h)

    def _difference_in_box(self, v: Vector, h: float) -> Vector:
        """Return the difference of gradients at points within the bounds."""
        o, total = self.oracle, self.oracle.space.zeros()
        x = o.space.tensor(self.x)
        for weight, point in o.box.difference_points(x, o.space.tensor(h * v)):
            g = o.gradient(self.x)[1] if point is x else o.evaluate_gradient(o.space.vector(point))
            total = total + g * (weight / h)
        return total

    def step(self) -> float:
        """Return the step of differences."""
        oracle = self.oracle
        return difference_step(oracle.space, self.x, oracle.smallest_scale(self.x), oracle.relative_gradient_error)

    def error(self, v: Vector, product: Vector) -> float:
        if not self.oracle.differenced_products:
            return 0.0
        return self.estimated_error(v, self.difference(v, 2.0), product)

    def estimated_error(self, v: Vector, doubled: Vector, product: Vector) -> float:
        """Estimate the error of a product from that with twice the step."""
        # The truncation error is O(h²), so the differences of h and 2h differ by three times the error of h.
        # Differences below working precision compare as equal, so their roundoff error is added.
        roundoff = self.oracle.gradient_error(self.x) * self.oracle.space.norm(v) / self.step()
        return self.oracle.space.norm(doubled - product) + roundoff

    def gradient(self) -> Vector:
        return self.oracle.gradient(self.x)[1] * 1.0


def pair(returned: Any) -> Any:
    """Return the pair (f, g) of a function with `jac` = True; raise if it is not a pair."""
    if not isinstance(returned, Sequence) or len(returned) != 2:
        raise ArgumentTypeError(f"fun returned {shown(returned)}: with jac = True return the pair (f, g).")
    return returned


def _reject_complex(returned: Any) -> None:
    """Raise for None, for which NumPy would return NaN, and for complex numbers."""
    if returned is None or (returned.is_complex() if isinstance(returned, Tensor) else np.iscomplexobj(returned)):
        raise TypeError("not real numbers")


def as_scalar(returned: Any) -> float:
    """Convert the value that `fun` returned into a float."""
    if isinstance(returned, float):
        return float(returned)
    if isinstance(returned, tuple | list) and len(returned) == 2:
        raise ArgumentTypeError(
            f"fun returned {shown(returned)}, of type {type(returned).__name__}: return the value alone; jac=True "
            "means that fun returns the pair of value and gradient."
        )
    try:
        _reject_complex(returned)
        array = returned.detach() if isinstance(returned, Tensor) else np.asarray(returned)
        if math.prod(array.shape) == 1:
            return float(array.reshape(()))
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(f"fun returned {shown(returned)}: return a real number.") from None
    raise ArgumentError(f"fun returned {math.prod(array.shape)} numbers: return one, the value of the objective.")
