"""f, g and Hv of functions that a caller wrote, with their derivatives: NumPy or torch callables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sanc.core.oracle import Meter, Operator, Oracle, Recent, difference_step
from sanc.core.saved import refuse
from sanc.core.space import NumpySpace, Space, Vector
from sanc.errors import ArgumentError, ArgumentTypeError, shown


class CallableOracle(Oracle):
    """A function with its gradient and, optionally, its Hessian, as callables on arrays or tensors.

    ``fun(x, *args)`` returns f, or (f, g) where `jac` is True; ``hess(x, *args)`` a matrix, sparse matrix or linear
    operator; ``hessp(x, v, *args)`` a product. Without either, products are central differences of gradients. `x0`
    gives shape, type and device of the points.
    """

    exact = written = True

    def __init__(
        self,
        fun: Callable[..., Any],
        x0: Any,
        *,
        jac: Callable[..., Any] | bool,
        hess: Callable[..., Any] | None = None,
        hessp: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
    ) -> None:
        self.fun, self.jac, self.hess, self.hessp, self.args = fun, jac, hess, hessp, args
        self.shape = x0.shape
        self.meter = Meter()
        self.noise: float | None = None  # relative error of gradients, where it is above the precision
        self.space: Space
        if isinstance(x0, Tensor):
            self.space = Space(x0.numel(), x0.dtype, x0.device)
        else:
            self.space = NumpySpace(x0.size, x0.dtype)
        self._values: Recent[float] = Recent()
        self._gradients: Recent[Vector] = Recent(1)
        self._size = 0.0  # of a variable, at the points at which products were asked for

    def vector(self, answer: Any, name: str) -> Vector:
        """Turn what a callable returned into a fresh flat vector."""
        flat = self.array(answer, name).reshape(-1)
        flat = flat.clone() if isinstance(flat, Tensor) else flat.copy()
        if len(flat) != self.space.dim:
            raise ArgumentError(
                f"{name} returned {len(flat)} numbers: return one for each of the {self.space.dim} variables."
            )
        return flat

    def array(self, answer: Any, name: str) -> Any:
        """Turn what a callable returned into an array or a tensor, as the points are."""
        try:
            _refuse_complex(answer)
            if not isinstance(self.space, NumpySpace):
                return torch.as_tensor(answer, dtype=self.space.dtype, device=self.space.device).detach()
            return np.asarray(answer.detach().cpu() if isinstance(answer, Tensor) else answer, self.space.dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ArgumentTypeError(f"{name} returned {shown(answer)}: return an array of real numbers.") from None

    def given(self, x: Any) -> Any:
        """Return a copy of a point in the caller's shape: whatever a callable does to it, the run does not notice."""
        copy = x.clone() if isinstance(x, Tensor) else x.copy()
        return copy.reshape(self.shape)

    def value(self, x: Vector) -> float:
        return self._values.answer(x, self._evaluate)

    def _evaluate(self, x: Vector) -> float:
        answer = self.fun(self.given(x), *self.args)
        if self.jac is True:
            answer, g = pair(answer)
            self._gradients.put(x, self.vector(g, "fun"))
            self.meter.count_gradient(1)
        self.meter.count_value(1)
        return _scalar(answer)

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        value = self.value(x)
        if self.jac is True and x not in self._gradients:  # the value is known from before, its gradient no longer
            self._values.clear()
            value = self.value(x)
        return value, self._gradients.answer(x, self.slope)

    def knows(self, x: Vector) -> tuple[bool, bool]:
        return x in self._values, x in self._gradients

    def slope(self, x: Vector) -> Vector:
        """∇f(x) by the callable, counted."""
        self.meter.count_gradient(1)
        if self.jac is True:
            return self.vector(self.fun(self.given(x), *self.args)[1], "fun")
        assert callable(self.jac)
        return self.vector(self.jac(self.given(x), *self.args), "jac")

    def hessian(self, x: Vector) -> Operator:
        return _CallableOperator(self, x)

    def least_size(self, x: Vector) -> float:
        """Return the size of a variable below which the steps of differences do not follow it; 1 where all are 0.

        A variable that tends to zero does so on the scale of those before it.
        """
        self._size = max(self._size, self.space.norm(x) / self.space.dim**0.5)
        return 1e-3 * self._size or 1.0

    def numbers(self) -> dict[str, Any]:
        return {"size": self._size}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        size = numbers["size"]
        if not isinstance(size, float) or not 0.0 <= size < math.inf:
            raise refuse("resume['oracle']['size']", size, "a finite number ≥ 0")
        self._size = size


class _CallableOperator(Operator):
    def __init__(self, oracle: CallableOracle, x: Vector) -> None:
        self.oracle, self.x = oracle, x

    def __call__(self, v: Vector) -> Vector:
        o = self.oracle
        o.meter.count_product(1)
        if o.hessp is not None:
            return o.vector(o.hessp(o.given(self.x), o.given(v), *o.args), "hessp")
        if o.hess is not None:
            return o.vector(self._times(v), "hess")
        return self._difference(v, 1.0)

    @cached_property
    def _times(self) -> Callable[[Any], Any]:
        """The product with what `hess` returned."""
        o, dim = self.oracle, self.oracle.space.dim
        assert o.hess is not None
        matrix = o.hess(o.given(self.x), *o.args)
        foreign = hasattr(matrix, "__matmul__") and not hasattr(matrix, "__array__")  # as SciPy's operators
        matrix = matrix if foreign else o.array(matrix, "hess")
        shape = tuple(matrix.shape)
        if math.prod(shape) != dim * dim:
            raise ArgumentError(f"hess returned a matrix of shape {shape}: return one of shape ({dim}, {dim}).")
        matrix = matrix if shape == (dim, dim) else matrix.reshape(dim, dim)
        if foreign and not isinstance(o.space, NumpySpace):
            return lambda v: matrix @ v.cpu().numpy()
        return lambda v: matrix @ v

    def _difference(self, v: Vector, stretch: float) -> Vector:
        o = self.oracle
        norm = o.space.norm(v)
        if norm == 0.0:
            return o.space.zeros()
        h = stretch * self._step() / norm
        return (o.slope(self.x + h * v) - o.slope(self.x - h * v)) * (0.5 / h)

    def _step(self) -> float:
        return difference_step(self.oracle.space, self.x, self.oracle.least_size(self.x), self.oracle.noise)

    def error(self, v: Vector, product: Vector) -> float:
        if self.oracle.hessp is not None or self.oracle.hess is not None:
            return 0.0
        # The error of a central difference grows with h²: twice the step shows three times what one step hides. What
        # rounding leaves nothing of differs by nothing, so that its error is added.
        rounding = self.oracle.gradient_error(self.x) * self.oracle.space.norm(v) / self._step()
        return self.oracle.space.norm(self._difference(v, 2.0) - product) + rounding

    def gradient(self) -> Vector:
        return self.oracle.gradient(self.x)[1] * 1.0


def pair(answer: Any) -> Any:
    """Return the pair (f, g) that a function returns with `jac` = True."""
    if not isinstance(answer, Sequence) or len(answer) != 2:
        raise ArgumentTypeError(f"fun returned {shown(answer)}: with jac = True return the pair (f, g).")
    return answer


def _refuse_complex(answer: Any) -> None:
    if answer is None or (answer.is_complex() if isinstance(answer, Tensor) else np.iscomplexobj(answer)):
        raise TypeError("no real numbers")


def _scalar(answer: Any) -> float:
    if isinstance(answer, float):
        return float(answer)
    size = answer.numel() if isinstance(answer, Tensor) else np.size(answer)
    if size != 1:
        raise ArgumentError(f"fun returned {size} numbers: return one, the value of the objective.")
    try:
        _refuse_complex(answer)
        return float(answer.detach() if isinstance(answer, Tensor) else np.asarray(answer).reshape(()))
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(f"fun returned {shown(answer)}: return a real number.") from None
