"""Penalties on the coefficients of a linear sum."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from sanc.errors import one_of, require_not_negative
from sanc.sums.checks import Array, checked_strengths

PenaltyKind = Literal["nonconvex", "l2", "none"]


class Penalty:
    """The penalty λ Σ w²/(1+w²) or (λ/2)‖w‖², with its gradient and the diagonal of its Hessian.

    Parameters
    ----------
    kind : str
        "nonconvex" or "l2"; "none": the penalty is 0.
    strength : float or array, shape (features,)
        λ, or one λ for each feature.
    features : int
        Number of features.

    Attributes
    ----------
    varies : bool
        Whether each feature has a λ of its own.
    """

    def __init__(self, kind: PenaltyKind, strength: float | Array, features: int) -> None:
        one_of("penalty", kind, ("nonconvex", "l2", "none"))
        self.varies = np.ndim(strength) > 0
        if not self.varies:
            require_not_negative("strength", strength)
        self.strength: Any = checked_strengths(strength, features) if self.varies else float(strength)
        self.kind = kind if np.any(self.strength > 0) else "none"

    def value(self, w: Array) -> float:
        """Return the penalty at w."""
        if self.kind == "nonconvex":
            square = w * w
            if self.varies:
                return float((self.strength * (square / (1 + square))).sum())
            return self.strength * float((square / (1 + square)).sum())  # type: ignore[no-any-return]
        if self.kind == "l2" and self.varies:
            return 0.5 * float(np.vdot(w, self.strength * w))
        return 0.5 * self.strength * float(np.vdot(w, w)) if self.kind == "l2" else 0.0

    def gradient(self, w: Array) -> Any:
        """Return its gradient at w, or 0."""
        if self.kind == "nonconvex":
            return (2 * self.strength) * w / (1 + w * w) ** 2
        return self.strength * w if self.kind == "l2" else 0.0

    def second_derivatives(self, w: Array) -> Any:
        """Return the diagonal of its Hessian at w, or what broadcasts to it."""
        if self.kind == "nonconvex":
            square = w * w
            return (2 * self.strength) * (1 - 3 * square) / (1 + square) ** 3
        return self.strength if self.kind == "l2" else 0.0
