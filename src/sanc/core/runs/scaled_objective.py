"""An oracle of f times a power of two, for functions whose derivatives are near the limits of their number type.

Rules of the iteration form squares of norms, and products of f, σ and cubes of norms, which overflow or underflow long
before f itself does. A power of two changes no digit of f, g and Hv, so the steps are the steps for f.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sanc.core.oracle import Eigenbasis, Operator, Oracle, WrappedOracle
from sanc.core.saved import state_error
from sanc.core.space import Floats, Vector
from sanc.core.spectrum.krylov import NonFiniteProductError

_MAX_DERIVATIVE_POWER = 4
"""The highest power of derivatives in the rules of the iteration, in the squared norm of Hg. f is not scaled if this
power is within range."""
_EXPONENT_MARGIN = 8
"""Exponents between the largest factor and the limit of the type, so that factor and inverse are normal numbers."""


class ScaledObjectiveOracle(WrappedOracle):
    """Evaluates 2^exponent · f, where `inner` is the oracle of f and counts the evaluations.

    Attributes
    ----------
    exponent : int
        The exponent of the factor.
    factor : float
        2^exponent.
    """

    def __init__(self, inner: Oracle, exponent: int) -> None:
        super().__init__(inner, inner.space)
        self.exponent, self.factor = exponent, math.ldexp(1.0, exponent)

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        return self.inner.shapes

    @property
    def unscaled_oracle(self) -> Oracle:
        return self.inner

    def numbers(self) -> dict[str, Any]:
        return self.inner.numbers() | {"exponent": self.exponent}

    def is_cached(self, x: Vector) -> tuple[bool, bool]:
        return self.inner.is_cached(x)

    def value(self, x: Vector) -> float:
        return self.inner.value(x) * self.factor

    def gradient_sample_value(self, x: Vector) -> float:
        return self.inner.gradient_sample_value(x) * self.factor

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        value, g = self.inner.gradient(x)
        return value * self.factor, g * self.factor

    def gradient_error(self, x: Vector) -> float:
        return self.inner.gradient_error(x) * self.factor

    def truncation_error(self, x: Vector) -> Vector | None:
        error = self.inner.truncation_error(x)
        return None if error is None else error * self.factor

    def hessian(self, x: Vector) -> Operator:
        return _ScaledOperator(self.inner.hessian(x), self.factor)

    def eigenbasis(self, x: Vector, free_indices: Any = None) -> Eigenbasis | None:
        basis = self.inner.eigenbasis(x, free_indices)
        return basis and Eigenbasis(basis.values * self.factor, basis.rows, basis.projections * self.factor)


def scaled_oracle(oracle: Oracle, exponent: int) -> Oracle:
    """Return the oracle of 2^exponent · f: that of f itself if the exponent is 0."""
    return ScaledObjectiveOracle(oracle, exponent) if exponent else oracle


class _ScaledOperator(Operator):
    """The Hessian `inner` times a power of two."""

    def __init__(self, inner: Operator, factor: float) -> None:
        self.inner, self.factor = inner, factor

    def __call__(self, v: Vector) -> Vector:
        return self.inner(v) * self.factor

    def gradient(self) -> Vector:
        return self.inner.gradient() * self.factor

    def matrix(self) -> Floats | None:
        matrix = self.inner.matrix()
        return None if matrix is None else matrix * self.factor

    def error(self, v: Vector, product: Vector) -> float:
        return self.inner.error(v, product * (1.0 / self.factor)) * self.factor

    def release(self) -> None:
        self.inner.release()


def objective_exponent(oracle: Oracle, x: Vector) -> int:
    """Return the exponent by which to scale f, from the first gradient or, if that is zero, the first value.

    The exponent is 0 as long as cubes of the derivatives are within the range of their type. Otherwise derivatives are
    moved to the middle between 1 and that bound, since gradients decrease during a run. Beside a saddle the gradient
    alone may be tiny: a Hessian product then shows the size of f.
    """
    max_exponent = _max_exponent(oracle)
    bound = max_exponent // _MAX_DERIVATIVE_POWER
    value, g = oracle.gradient(x)
    exponent = _exponent(oracle.space.largest_entry(g) or abs(value))
    if exponent < -bound:
        exponent = max(exponent, _exponent(_largest_product_entry(oracle, x)))
    if abs(exponent) <= bound:
        return 0
    return max(_EXPONENT_MARGIN - max_exponent, min(bound // 2 - exponent, max_exponent - _EXPONENT_MARGIN))


def _exponent(magnitude: float) -> int:
    """Return the exponent of a positive number; 0 for others."""
    return math.frexp(magnitude)[1] if 0.0 < magnitude < math.inf else 0


def _largest_product_entry(oracle: Oracle, x: Vector) -> float:
    """Return the largest entry of the Hessian times a random vector; 0 if it cannot be computed."""
    operator = oracle.hessian(x)
    try:
        return oracle.space.largest_entry(operator(oracle.space.normal(np.random.default_rng(0))))
    except NonFiniteProductError:
        return 0.0
    finally:
        operator.release()


def require_objective_exponent(oracle: Oracle, numbers: Mapping[str, Any]) -> int:
    """Return the exponent in the saved numbers of an oracle, 0 if f was not scaled; raise an error if it is invalid."""
    exponent, bound = numbers.get("exponent", 0), _max_exponent(oracle) - _EXPONENT_MARGIN
    if type(exponent) is not int or abs(exponent) > bound:
        raise state_error("resume['oracle']['exponent']", exponent, f"an integer from {-bound} to {bound}")
    return exponent


def _max_exponent(oracle: Oracle) -> int:
    """Return the largest exponent of the number type of x."""
    return math.frexp(oracle.space.max)[1]
