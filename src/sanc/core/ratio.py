"""The ratio ρ of actual to predicted decrease, and the classes of success.

Decreases are compared without a division, and a step whose decrease is not finite is unsuccessful.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial step, from which a `SigmaRule` determines the next σ.

    Attributes
    ----------
    sigma : float
        The σ of the step.
    verdict : Verdict
        Its class.
    actual, predicted : float
        Its actual and predicted decrease; `actual` is not finite if f or its gradient is not finite at its end.
    step_norm : float
        Its norm.
    grad_norm : float
        ‖g‖ at its start.
    value_rounding : float
        The rounding error of f.
    """

    sigma: float
    verdict: Verdict
    actual: float
    predicted: float
    step_norm: float
    grad_norm: float
    value_rounding: float = 0.0


def classify(actual: float, predicted: float, eta1: float, eta2: float, value_rounding: float = 0.0) -> Verdict:
    """Return the class of a step: very successful if actual > η2·predicted, successful if actual ≥ η1·predicted.

    Parameters
    ----------
    actual, predicted : float
        The actual and the predicted decrease.
    eta1, eta2 : float
        The thresholds η1 and η2 on their ratio.
    value_rounding : float
        The rounding error of f, which is added to both decreases.
    """
    if not (math.isfinite(actual) and math.isfinite(predicted)) or predicted <= 0.0:
        return Verdict.UNSUCCESSFUL
    actual, predicted = actual + value_rounding, predicted + value_rounding
    if actual > eta2 * predicted:
        return Verdict.VERY_SUCCESSFUL
    if actual >= eta1 * predicted:
        return Verdict.SUCCESSFUL
    return Verdict.UNSUCCESSFUL


def ratio(actual: float, predicted: float, value_rounding: float = 0.0) -> float:
    """Return ρ, for the record and for tests other than acceptance; NaN if it is not defined.

    Parameters
    ----------
    actual, predicted, value_rounding : float
        The actual and the predicted decrease, and the rounding error of f, which is added to both.
    """
    if not (math.isfinite(actual) and math.isfinite(predicted)) or predicted + value_rounding <= 0.0:
        return math.nan
    return (actual + value_rounding) / (predicted + value_rounding)
