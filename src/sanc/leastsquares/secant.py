"""The second-order term S = Σ w_i ∇²r_i: its estimate from gradients, and the decision whether the model has it.

Along a step s the change of the Jacobian gives S s ≈ y# = (J₊ − J)ᵀw₊ without a further evaluation. Dennis, Gay and
Welsch (1981) update a symmetric S with it. The next step uses S if two measurements on the last one agree: the estimate
predicted S s, and the model with it predicted the decrease better than that of Gauss and Newton.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sanc.core.space import Floats

ESTIMATED_VARIABLES = 300
"""Largest number of variables for which S is estimated as a dense matrix."""
_WORTH = 0.1
"""Without an estimate, S is used if its curvature along the last step is at least this fraction of Gauss–Newton's.

Products with S then cost evaluations, and a smaller term changes the step by less than the ratio test can tell apart.
"""
_RELIABLE = 0.5
"""The estimate is reliable if it predicted the last S s to this relative error, before the update."""


class SecondOrderTerm:
    """An estimate of S, and whether the model has it.

    Attributes
    ----------
    is_enabled : bool
        Whether the model may have S. That of a network corrects its steps instead (`sanc.leastsquares.corrected`).
    is_estimated : bool
        Whether `matrix` is an estimate of S; otherwise products with S are computed.
    is_used : bool
        Whether the model has S.
    matrix : ndarray
        The estimate, in the caller's variables.
    """

    def __init__(self, dim: int, is_enabled: bool = True) -> None:
        self.is_enabled = is_enabled
        self.is_estimated = is_enabled and dim <= ESTIMATED_VARIABLES
        self.is_used = False
        self.matrix: Any = np.zeros((dim, dim)) if self.is_estimated else None

    def update(self, before: Any, after: Any, scale: Floats) -> None:
        """Measure the last step, update the estimate, and decide which model the next step uses."""
        if not self.is_enabled:
            return
        s = after.x - before.x
        change = after.gradient() - before.gradient()
        second = after.gradient() - before.transposed(after.terms.weighted)
        if not (np.isfinite(second).all() and np.isfinite(change).all()):
            return
        model = float(s @ before.curvature(s))
        if not self.is_estimated:
            self.is_used = abs(float(s @ second)) > _WORTH * model
            return
        linear, actual = float(before.gradient() @ s), after.terms.cost - before.terms.cost
        quadratic = float(s @ self.matrix @ s)
        plain_error = abs(actual - linear - 0.5 * model)
        augmented_error = abs(actual - linear - 0.5 * (model + quadratic))
        error = float(np.linalg.norm((self.matrix @ s - second) * scale))
        reliable = error <= _RELIABLE * float(np.linalg.norm(second * scale))
        self._update_estimate(s / scale, change * scale, second * scale, scale)
        self.is_used = reliable and augmented_error < plain_error

    def _update_estimate(self, s: Floats, y: Floats, target: Floats, scale: Floats) -> None:
        """Update S by the formula of Dennis, Gay and Welsch in scaled variables, so that S s = y#."""
        scaled = self.matrix * np.outer(scale, scale)
        curvature = float(s @ scaled @ s)
        size = min(1.0, abs(float(s @ target)) / abs(curvature)) if curvature != 0.0 else 1.0
        scaled *= size
        norm, v = float(s @ s), y
        if float(s @ y) <= 1e-8 * norm**0.5 * float(np.linalg.norm(y)):
            v = s  # no positive curvature along s: the update of Powell, symmetric Broyden
        product = float(v @ s)
        if not product > 0.0:
            return
        missing = target - scaled @ s
        scaled += (np.outer(missing, v) + np.outer(v, missing)) / product
        scaled -= np.outer(v, v) * (float(missing @ s) / product**2)
        if np.isfinite(scaled).all():
            self.matrix = scaled / np.outer(scale, scale)
