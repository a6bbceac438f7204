"""The ratio ρ of actual to predicted decrease, and the classes of success.

Decreases are compared without a division, and a step whose decrease is not finite is unsuccessful.
"""

from __future__ import annotations

import math
from enum import Enum


class Verdict(Enum):
    """The class of a step: how well the model predicted the decrease."""

    VERY_SUCCESSFUL = "very successful"
    SUCCESSFUL = "successful"
    UNSUCCESSFUL = "unsuccessful"

    @property
    def accepted(self) -> bool:
        """Whether the step is accepted."""
        return self is not Verdict.UNSUCCESSFUL


def classify(actual: float, predicted: float, eta1: float, eta2: float, rounding: float = 0.0) -> Verdict:
    """Return the class of a step: very successful if actual > η2·predicted, successful if actual ≥ η1·predicted.

    The rounding error of f, `rounding`, is added to both decreases.
    """
    if not (math.isfinite(actual) and math.isfinite(predicted)) or predicted <= 0.0:
        return Verdict.UNSUCCESSFUL
    actual, predicted = actual + rounding, predicted + rounding
    if actual > eta2 * predicted:
        return Verdict.VERY_SUCCESSFUL
    if actual >= eta1 * predicted:
        return Verdict.SUCCESSFUL
    return Verdict.UNSUCCESSFUL


def ratio(actual: float, predicted: float, rounding: float = 0.0) -> float:
    """Return ρ for the record; NaN if it is not defined."""
    if not (math.isfinite(actual) and math.isfinite(predicted)) or predicted + rounding <= 0.0:
        return math.nan
    return (actual + rounding) / (predicted + rounding)
