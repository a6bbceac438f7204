"""Gradients by differences of f, for functions without derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from sanc.core.saved import state_error
from sanc.core.space import Vector
from sanc.errors import ArgumentError, shown
from sanc.functions.oracle import CallableOracle, as_scalar

Scheme = Literal["2-point", "3-point", "cs"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
"""Schemes of differences, by SciPy's names."""

DIFFERENCE_POWERS = {"2-point": 1 / 2, "3-point": 1 / 3}
"""Powers p of the difference step h = eps^p.

h balances the truncation error, O(h) or O(h²), with the roundoff error eps/h of the values.
"""

ERROR_POWERS = {"2-point": 1 / 2, "3-point": 2 / 3, "cs": 1.0}
"""Powers of eps of the errors of differences with these steps."""

_ERROR_GROWTH = {"2-point": 2.0, "3-point": 4.0}
"""Factors by which the truncation error grows if the step is doubled; for roundoff it is ½."""
_GROWTH_MARGIN = 1.5
"""Factor by which the growth of a truncation error may differ from that."""

_LOWER_PRECISION = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Machine epsilon of types below float64, by their names in NumPy, torch and JAX."""

COMPLEX_STEP = 1e-20
"""Imaginary step relative to max(1, |x_k|).

Im f(x + ih)/h has no cancellation, so h may be far below √eps. Its truncation error, O(h²), is then below eps (Squire
and Trapp 1998).
"""


class DifferenceOracle(CallableOracle):
    """A function without derivatives: a gradient costs n evaluations of f besides f(x), or 2n with "3-point".

    "cs" computes Im f(x + ih)/h, which is exact to roundoff. It needs an analytic f that accepts complex numbers.
    Hessian products are differences of these gradients, with a step that balances the error of the gradients.

    Attributes
    ----------
    scheme : {"2-point", "3-point", "cs"}
        The scheme of differences.
    differenced_gradient : bool
        Whether gradients have a truncation error; those of "cs" have none.
    relative_gradient_error : float
        As in `CallableOracle`.
    value_error : float
        Relative error of f, which the steps of differences follow: the machine precision, or more after a stall.
    """

    has_user_gradient = False

    def __init__(self, fun: Callable[..., Any], x0: Any, *, scheme: Scheme, args: tuple[Any, ...] = ()) -> None:
        if scheme == "cs" and isinstance(x0, Tensor):
            raise ArgumentError(
                'jac = "cs" cannot be used with a torch tensor: leave jac out, and torch differentiates fun.'
            )
        super().__init__(fun, x0, jac=fun, args=args)
        self.scheme, self.differenced_gradient = scheme, scheme != "cs"
        self._set_value_error(self.space.eps)

    def _set_value_error(self, value_error: float) -> None:
        """Set the relative error of f, and with it the relative error of the gradients."""
        self.value_error = value_error
        self.relative_gradient_error = value_error ** ERROR_POWERS[self.scheme]

    def adapt_differences(self, value_error: float) -> bool:
        if not self.differenced_gradient:
            return False
        self._set_value_error(value_error)
        self._gradients.clear()
        return True

    def numbers(self) -> dict[str, Any]:
        return super().numbers() | {"value_error": self.value_error}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        super().restore(numbers)
        value_error = numbers["value_error"]
        if not isinstance(value_error, float) or not 0.0 < value_error < 1.0:
            raise state_error("resume['oracle']['value_error']", value_error, "a number between 0 and 1")
        self._set_value_error(value_error)

    def as_value(self, returned: Any) -> float:
        dtype = str(getattr(returned, "dtype", "")).removeprefix("torch.")
        if dtype in _LOWER_PRECISION and self.space.eps < _LOWER_PRECISION[dtype]:
            raise ArgumentError(
                f"fun returned {shown(returned)} in {dtype} for a point of higher precision, so that differences of "
                f"its values are roundoff: compute in the precision of x0, or pass x0 in {dtype}."
            )
        return as_scalar(returned)

    def evaluate_gradient(self, x: Vector) -> Vector:
        return self._differences(x, self.scheme)

    def _differences(self, x: Vector, scheme: Scheme) -> Vector:
        """Return the gradient by differences of this scheme."""
        self.meter.count_gradient(1)
        return self.as_vector([self._partial_derivative(x, k, scheme) for k in range(self.space.dim)], "fun")

    def _partial_derivative(self, x: Any, k: int, scheme: Scheme, factor: float = 1.0) -> float:
        """Return ∂f/∂x_k by a difference whose step is `factor` times the usual one."""
        size = max(1.0, abs(float(x[k])))
        if scheme == "cs":
            moved = x.astype(np.result_type(x.dtype, np.complex64))
            moved[k] += 1j * COMPLEX_STEP * size
            self.meter.count_value(1)
            returned = self.fun(moved.reshape(self.shape), *self.args)
            if not np.iscomplexobj(returned) or np.size(returned) != 1:
                raise ArgumentError(
                    f'fun returned {shown(returned)} at a complex point: with jac = "cs", return a complex number '
                    'for complex x. Pass jac = "3-point" if fun cannot.'
                )
            return float(np.imag(returned).reshape(())) / (COMPLEX_STEP * size)
        h = factor * self.value_error ** DIFFERENCE_POWERS[scheme] * size
        if self.box is not None and not (self.box.lower[k] <= x[k] - h and x[k] + h <= self.box.upper[k]):
            return self._one_sided_derivative(x, k, scheme, h)
        above = self._moved(x, k, h)
        if scheme == "2-point":
            return (self._evaluate(above) - self.value(x)) / float(above[k] - x[k])
        below = self._moved(x, k, -h)
        return (self._evaluate(above) - self._evaluate(below)) / float(above[k] - below[k])

    def _one_sided_derivative(self, x: Any, k: int, scheme: Scheme, h: float) -> float:
        """Return ∂f/∂x_k from evaluations on the side of x_k that has more room within the bounds; 0 if it is fixed."""
        below, above = float(x[k] - self.box.lower[k]), float(self.box.upper[k] - x[k])
        room = max(below, above)
        if room <= 0.0:
            return 0.0
        h = math.copysign(min(h, 0.5 * room), above - below or 1.0)
        once = self._moved(x, k, h)
        step = float(once[k] - x[k])
        if scheme == "2-point":
            return (self._evaluate(once) - self.value(x)) / step
        twice = self._moved(x, k, 2.0 * step)
        twice[k] = min(max(twice[k], self.box.lower[k]), self.box.upper[k])  # beyond them by roundoff
        return (4.0 * self._evaluate(once) - self._evaluate(twice) - 3.0 * self.value(x)) / (2.0 * step)

    def gradient_error(self, x: Any) -> float:
        if self.scheme == "cs":
            return 0.0
        step = self.value_error ** DIFFERENCE_POWERS[self.scheme]
        sizes = (max(1.0, abs(size)) for size in x.tolist())
        return (
            self.value_error * abs(self.value(x)) / float(step) * math.sqrt(sum(1.0 / (size * size) for size in sizes))
        )

    def truncation_error(self, x: Any) -> Any:
        """Return the change of each entry of the gradient if the step is doubled; 0 where that is no truncation error.

        The truncation error of step h is O(h) for "2-point", which is the change, and O(h²) for "3-point", a third of
        it. It grows if the step is doubled once more. A change by roundoff, noise or a kink of f does not.
        """
        if self.scheme == "cs":
            return None
        once, twice = (
            self.as_array([self._partial_derivative(x, k, self.scheme, factor) for k in range(self.space.dim)], "fun")
            for factor in (2.0, 4.0)
        )
        change = abs(once - self.gradient(x)[1])
        growth, expected = abs(twice - once), _ERROR_GROWTH[self.scheme] * change
        return change * ((growth > expected / _GROWTH_MARGIN) & (growth < expected * _GROWTH_MARGIN))

    @staticmethod
    def _moved(x: Any, k: int, h: float) -> Any:
        """Return a copy of x with h added to its k-th entry."""
        moved = x.clone() if isinstance(x, Tensor) else x.copy()
        moved[k] += h
        return moved
