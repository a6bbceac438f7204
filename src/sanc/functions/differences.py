"""Gradients by differences of values, for functions that come without any derivative."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from torch import Tensor

from sanc.core.space import Vector
from sanc.errors import ArgumentError, shown
from sanc.functions.oracle import CallableOracle

Scheme = Literal["2-point", "3-point", "cs"]

_POWERS = {"2-point": 1 / 2, "3-point": 1 / 3}
"""The step of a difference is the precision to this power, which balances its own error and that of f."""
_COMPLEX_STEP = 1e-20
"""Of the complex step, which subtracts nothing, so that it may be as small as one likes."""


class DifferenceOracle(CallableOracle):
    """A function of which only values are known: n of them make a gradient, or 2n with "3-point".

    "cs" takes Im f(x + ih)/h, exact to rounding, where f is analytic and computes with complex numbers. Hessian
    products are differences of such gradients, with steps as long as their error asks for.
    """

    written = False

    def __init__(self, fun: Callable[..., Any], x0: Any, *, scheme: Scheme, args: tuple[Any, ...] = ()) -> None:
        if scheme == "cs" and isinstance(x0, Tensor):
            raise ArgumentError(
                'jac = "cs" cannot go with a torch tensor: leave jac out, and torch differentiates fun.'
            )
        super().__init__(fun, x0, jac=fun, args=args)
        self.scheme = scheme
        eps = self.space.eps
        self.noise = {"2-point": eps ** (1 / 2), "3-point": eps ** (2 / 3), "cs": eps}[scheme]

    def slope(self, x: Vector) -> Vector:
        self.meter.count_gradient(1)
        return self.vector([self._along(x, k) for k in range(self.space.dim)], "fun")

    def _along(self, x: Any, k: int) -> float:
        """∂f/∂x_k."""
        size = max(1.0, abs(float(x[k])))
        if self.scheme == "cs":
            moved = x.astype(np.result_type(x.dtype, np.complex64))
            moved[k] += 1j * _COMPLEX_STEP * size
            self.meter.count_value(1)
            answer = self.fun(moved.reshape(self.shape), *self.args)
            if not np.iscomplexobj(answer) or np.size(answer) != 1:
                raise ArgumentError(
                    f'fun returned {shown(answer)} at a complex point: with jac = "cs" it has to compute with complex '
                    'numbers, and return one. Pass jac = "3-point" where it cannot.'
                )
            return float(np.imag(answer).reshape(())) / (_COMPLEX_STEP * size)
        h = self.space.eps ** _POWERS[self.scheme] * size
        above = self._moved(x, k, h)
        if self.scheme == "2-point":
            return (self._evaluate(above) - self.value(x)) / float(above[k] - x[k])
        below = self._moved(x, k, -h)
        return (self._evaluate(above) - self._evaluate(below)) / float(above[k] - below[k])

    def gradient_error(self, x: Any) -> float:
        if self.scheme == "cs":
            return 0.0
        step = self.space.eps ** _POWERS[self.scheme]
        sizes = (max(1.0, abs(size)) for size in x.tolist())
        return self.space.eps * abs(self.value(x)) / float(step) * math.sqrt(sum(1.0 / (size * size) for size in sizes))

    @staticmethod
    def _moved(x: Any, k: int, h: float) -> Any:
        moved = x.clone() if isinstance(x, Tensor) else x.copy()
        moved[k] += h
        return moved
