"""Units of the first point: a length and a cubic coefficient, relative to which the default compares.

f and x may be given in any units, so no rule of the default compares with an absolute number. The first gradient g and
the first Hessian product B q, with q = g/‖g‖, have the units f/x and f/x²: the Cauchy step ‖g‖/‖Bq‖ is a length, as are
‖x‖ and |f|/‖g‖, and ‖g‖ over the square of a length has the unit of σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_PART = 0.1
"""Share of ‖x‖ that serves as a length: a tenth, so that steps change the leading digit of x at most."""
FIRST_SIGMA = 1e-4
"""The first σ, in its unit: with 1e-4 the first step is Newton's unless that exceeds about 100 Cauchy steps."""


@dataclass(frozen=True, slots=True)
class Units:
    """A unit of length, and one of σ, that is f/x³; 0 before they are known."""

    length: float = 0.0
    cubic: float = 0.0

    @property
    def value(self) -> float:
        """The unit of f: the change of f over a unit of length."""
        return self.cubic * self.length * self.length * self.length


def measure_units(value: float, grad_norm: float, curvature: float, size: float) -> Units:
    """Return the units that follow from f, ‖g‖, ‖Bq‖ and ‖x‖ at the first point.

    `grad_norm` is 0 if the gradient is roundoff, or so small that the run begins with a probe for negative curvature.
    """
    if grad_norm > 0.0:  # the Cauchy step is too long where f is nearly flat: x and f bound it
        cauchy = grad_norm / curvature if curvature > 0.0 else math.inf
        guesses = [min(cauchy, max(_PART * size, abs(value) / grad_norm)), cauchy]
    else:
        guesses = [max(_PART * size, math.sqrt(abs(value) / curvature)) if curvature > 0.0 else _PART * size]
    length = next((guess for guess in guesses if 0.0 < guess < math.inf), 1.0)
    cubic = (grad_norm / length or curvature) / length
    return Units(length, cubic if 0.0 < cubic < math.inf else 1.0)
