"""Units of the first point: a length scale and a cubic coefficient, to which the rules of the default are relative.

f and x may be given in any units, so no rule of the default compares with an absolute number. The first gradient g and
the first Hessian product Bq, with q = g/‖g‖, have the units f/x and f/x². So ‖g‖/‖Bq‖, the norm of the Cauchy step, has
the unit of x, as have ‖x‖ and |f|/‖g‖, and ‖g‖ over the square of a length scale has the unit of σ.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

X_FRACTION = 0.1
"""Fraction of ‖x‖ that serves as a length scale: with a tenth, a step of that norm changes about the leading digit."""
FIRST_SIGMA = 1e-4
"""The initial σ, in its unit: with 1e-4 the first step is Newton's unless that exceeds about 100 Cauchy steps."""
DOUBLE_PRECISION_TOL, SINGLE_PRECISION_TOL = 1e-8, 1e-4
"""Default tolerances: about the square root of the machine precision, 1.5e-8 in float64 and 3.5e-4 in float32."""


def default_tolerance(eps: float) -> float:
    """Return the default tolerance of minimisers, given the machine precision of x."""
    return DOUBLE_PRECISION_TOL if eps <= sys.float_info.epsilon else SINGLE_PRECISION_TOL


class Units(NamedTuple):
    """The units of the first point; 0 until they are measured.

    Attributes
    ----------
    length_scale : float
        The length scale ℓ₀ of the first point.
    cubic : float
        The unit of σ, which is f/x³.
    """

    length_scale: float = 0.0
    cubic: float = 0.0

    @property
    def value(self) -> float:
        """The unit of f: the change of f over the length scale."""
        return self.cubic * self.length_scale * self.length_scale * self.length_scale


def length_scale_at(first_length_scale: float, x_norm: float) -> float:
    """Return the size of the region around x in which f is compared with its derivatives: max(ℓ₀, ‖x‖)."""
    return max(first_length_scale, x_norm)


def step_scale_at(first_length_scale: float, x_norm: float) -> float:
    """Return the length scale ℓ of steps at x: max(ℓ₀, ‖x‖/10), with the length scale ℓ₀ of the first point."""
    return max(first_length_scale, X_FRACTION * x_norm)


def unbounded_decrease(value: float, unit_value: float, eps: float) -> float:
    """Return the decrease from a value of f that shows that f is unbounded below: (|f| + unit of f)/eps²."""
    return (abs(value) + unit_value) / eps**2


def measure_units(value: float, grad_norm: float, product_norm: float, x_norm: float) -> Units:
    """Return the units that follow from f, ‖g‖, ‖Bq‖ and ‖x‖ at the first point.

    `grad_norm` is 0 if the gradient is roundoff, or so small that the run begins with a probe for negative curvature.
    """
    x_scale = X_FRACTION * x_norm
    if grad_norm > 0.0:
        cauchy = grad_norm / product_norm if product_norm > 0.0 else math.inf
        # The Cauchy step is too long if the curvature is nearly zero: x and f bound it.
        candidates = [min(cauchy, max(x_scale, abs(value) / grad_norm)), cauchy]
    else:
        candidates = [max(x_scale, math.sqrt(abs(value) / product_norm)) if product_norm > 0.0 else x_scale]
    length_scale = next((candidate for candidate in candidates if 0.0 < candidate < math.inf), 1.0)
    cubic = (grad_norm / length_scale or product_norm) / length_scale
    return Units(length_scale, cubic if 0.0 < cubic < math.inf else 1.0)
