"""What is large and what is small: a length and a cubic coefficient of the first point, in which the rest is measured.

f may be given in any unit and x in any other, so nothing that the default compares has one. The first gradient g and
the first Hessian product B q, with q = g/‖g‖, have the units f/x and f/x²: the Cauchy step ‖g‖/‖Bq‖ is a length, as are
‖x‖ and |f|/‖g‖, and ‖g‖ over the square of a length has the unit of σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_PART = 0.1
"""Share of ‖x‖ that is a length where the gradient is zero."""
FIRST = 1e-4
"""The first σ, in its unit: the first step is Newton's unless that is some hundred times longer than Cauchy's."""


@dataclass(frozen=True, slots=True)
class Units:
    """A length in x, and f/x³; 0 where they are not known yet."""

    length: float = 0.0
    cubic: float = 0.0

    @property
    def value(self) -> float:
        """A change of f that is neither large nor small."""
        return self.cubic * self.length * self.length * self.length


def measured(value: float, grad_norm: float, curvature: float, size: float) -> Units:
    """Return the units that f, ‖g‖, ‖Bq‖ and ‖x‖ of the first point show, as far as they are there.

    Where the gradient is no more than rounding, or so small that the run begins with a look for negative curvature,
    `grad_norm` is 0.
    """
    if grad_norm > 0.0:  # Cauchy's step is too long where f is nearly flat: no longer than x or f can tell, then
        cauchy = grad_norm / curvature if curvature > 0.0 else math.inf
        guesses = [min(cauchy, max(_PART * size, abs(value) / grad_norm)), cauchy]
    else:
        guesses = [max(_PART * size, math.sqrt(abs(value) / curvature)) if curvature > 0.0 else _PART * size]
    length = next((guess for guess in guesses if 0.0 < guess < math.inf), 1.0)
    cubic = (grad_norm / length or curvature) / length
    return Units(length, cubic if 0.0 < cubic < math.inf else 1.0)
