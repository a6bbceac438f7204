"""The second-order term S = Σ w_i ∇²r_i: its estimate from gradients, and the decision whether the model has it.

Along a step s the change of the Jacobian gives S s ≈ y# = (J₊ − J)ᵀw₊ without a further evaluation. Dennis, Gay and
Welsch (1981) update a symmetric S with it. The next step uses S if two measurements on the last one agree: the estimate
predicted S s, and the model with it predicted the decrease better than that of Gauss and Newton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sanc.core.space import Floats
from sanc.leastsquares.evaluation import ResidualEvaluation
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


@dataclass(frozen=True, eq=False)
class SecondOrderTerm:
    """An estimate of S, and whether the model has it.

    Attributes
    ----------
    is_enabled : bool
        Whether the model may have S. That of a network corrects its steps instead (`sanc.leastsquares.network_model`).
    is_used : bool
        Whether the model has S.
    matrix : ndarray or None
        The estimate, in the variables of the run; None: products with S are computed.
    """

    is_enabled: bool
    is_used: bool
    matrix: Any

    @classmethod
    def unknown(cls, dim: int, is_enabled: bool = True) -> SecondOrderTerm:
        """Return the term before the first step, which the model does not have."""
        is_estimated = is_enabled and dim <= MAX_ESTIMATED_VARIABLES
        return cls(is_enabled, False, np.zeros((dim, dim)) if is_estimated else None)

    @property
    def is_estimated(self) -> bool:
        """Whether there is an estimate of S; otherwise products with S are computed."""
        return self.matrix is not None

    def in_variables(self, old: Variables, new: Variables) -> SecondOrderTerm:
        """Return the term in other variables; the estimate starts again unless both are scaled by a diagonal."""
        if not self.is_estimated:
            return self
        if not (old.is_diagonal and new.is_diagonal):
            return SecondOrderTerm.unknown(len(self.matrix), self.is_enabled)
        ratio = new.matrix / old.matrix
        return replace(self, matrix=self.matrix * np.outer(ratio, ratio))

    def updated(self, before: ResidualEvaluation, after: ResidualEvaluation, variables: Variables) -> SecondOrderTerm:
        """Measure the last step, update the estimate, and decide which model the next step uses.

        Return the term of the next step.
        """
        if not self.is_enabled:
            return self
        step, g = after.x - before.x, after.gradient()
        s, first, last = variables.from_original(step), variables.gradient(before.gradient()), variables.gradient(g)
        second = variables.gradient(g - before.transposed(after.terms.weighted))
        change = last - first
        square = float(second @ second)
        if not (math.isfinite(square) and math.isfinite(float(change @ change))):
            return self
        model = before.gauss_newton_form(step)
        if not self.is_estimated:
            return replace(self, is_used=abs(float(s @ second)) > _SECOND_ORDER_FRACTION * model)
        product = self.matrix @ s
        quadratic, missing = float(s @ product), second - product
        error = after.terms.cost - before.terms.cost - float(first @ s) - 0.5 * model
        is_reliable = float(missing @ missing) <= _MAX_RELIABLE_ERROR**2 * square
        matrix = self._updated_matrix(s, change, second, product, quadratic)
        return replace(self, is_used=is_reliable and abs(error - 0.5 * quadratic) < abs(error), matrix=matrix)

    def _updated_matrix(self, s: Floats, y: Floats, target: Floats, product: Floats, quadratic: float) -> Floats:
        """Return S updated by the formula of Dennis, Gay and Welsch, so that S s = y#.

        `target` is y#, `product` is S s, and `quadratic` is sᵀS s.
        """
        matrix: Floats = self.matrix
        size = min(1.0, abs(float(s @ target)) / abs(quadratic)) if quadratic != 0.0 else 1.0
        along, v = float(s @ y), y
        if along <= _MIN_COSINE * math.sqrt(float(s @ s)) * math.sqrt(float(y @ y)):
            along, v = float(s @ s), s  # no positive curvature along s: the update of Powell, symmetric Broyden
        if not along > 0.0:
            return matrix
        missing = target - size * product
        half = (missing - (0.5 * float(missing @ s) / along) * v) / along
        if math.isfinite(float(half @ half) * float(v @ v)):
            rank_one = v[:, None] * half
            matrix = size * matrix + rank_one + rank_one.T
        return matrix
