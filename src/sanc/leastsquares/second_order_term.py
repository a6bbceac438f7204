"""The second-order term S = Σ w_i ∇²r_i: its estimate from gradients, and the decision whether the model has it.

Along a step s the change of the Jacobian gives S s ≈ y# = (J₊ − J)ᵀw₊ without a further evaluation. Dennis, Gay and
Welsch (1981) update a symmetric S with it. The next step uses S if two measurements on the last one agree: the estimate
predicted S s, and the model with it predicted the decrease better than that of Gauss and Newton.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sanc.core.space import Floats
from sanc.leastsquares.variables import Variables

MAX_ESTIMATED_VARIABLES = 300
"""Largest number of variables for which S is estimated as a dense matrix."""
_SECOND_ORDER_FRACTION = 0.1
"""Without an estimate, S is used if its curvature along the last step is at least this fraction of Gauss–Newton's.

Products with S then cost evaluations, and a smaller term changes the step by less than the ratio test can detect.
"""
_MIN_COSINE = 1e-8
"""Cosine between s and y below which s has no positive curvature beyond roundoff; √eps of float64."""
_MAX_RELIABLE_ERROR = 0.5
"""The estimate is reliable if it predicted the last S s to this relative error, before the update."""


class SecondOrderTerm:
    """An estimate of S, and whether the model has it.

    Attributes
    ----------
    is_enabled : bool
        Whether the model may have S. That of a network corrects its steps instead (`sanc.leastsquares.network_model`).
    is_estimated : bool
        Whether `matrix` is an estimate of S; otherwise products with S are computed.
    is_used : bool
        Whether the model has S.
    matrix : ndarray
        The estimate, in scaled variables.
    """

    def __init__(self, dim: int, is_enabled: bool = True) -> None:
        self.is_enabled = is_enabled
        self.is_estimated = is_enabled and dim <= MAX_ESTIMATED_VARIABLES
        self.is_used = False
        self.matrix: Any = np.zeros((dim, dim)) if self.is_estimated else None

    def rescale(self, ratio: Floats) -> None:
        """Continue in other variables, whose scales are the former ones times `ratio`."""
        if self.is_estimated:
            self.matrix = self.matrix * np.outer(ratio, ratio)

    def update(self, before: Any, after: Any, variables: Variables) -> None:
        """Measure the last step, update the estimate, and decide which model the next step uses."""
        if not self.is_enabled:
            return
        step, g = after.x - before.x, after.gradient()
        s, first, last = variables.from_original(step), variables.gradient(before.gradient()), variables.gradient(g)
        second = variables.gradient(g - before.transposed(after.terms.weighted))
        change = last - first
        square = float(second @ second)
        if not (math.isfinite(square) and math.isfinite(float(change @ change))):
            return
        model = before.gauss_newton_form(step)
        if not self.is_estimated:
            self.is_used = abs(float(s @ second)) > _SECOND_ORDER_FRACTION * model
            return
        product = self.matrix @ s
        quadratic, missing = float(s @ product), second - product
        error = after.terms.cost - before.terms.cost - float(first @ s) - 0.5 * model
        is_reliable = float(missing @ missing) <= _MAX_RELIABLE_ERROR**2 * square
        self._update_estimate(s, change, second, product, quadratic)
        self.is_used = is_reliable and abs(error - 0.5 * quadratic) < abs(error)

    def _update_estimate(self, s: Floats, y: Floats, target: Floats, product: Floats, quadratic: float) -> None:
        """Update S by the formula of Dennis, Gay and Welsch, so that S s = y#; `product` is S s, `quadratic` sᵀS s."""
        size = min(1.0, abs(float(s @ target)) / abs(quadratic)) if quadratic != 0.0 else 1.0
        along, v = float(s @ y), y
        if along <= _MIN_COSINE * math.sqrt(float(s @ s)) * math.sqrt(float(y @ y)):
            along, v = float(s @ s), s  # no positive curvature along s: the update of Powell, symmetric Broyden
        if not along > 0.0:
            return
        missing = target - size * product
        half = (missing - (0.5 * float(missing @ s) / along) * v) / along
        if math.isfinite(float(half @ half) * float(v @ v)):
            rank_one = v[:, None] * half
            self.matrix = size * self.matrix + rank_one + rank_one.T
