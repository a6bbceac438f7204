"""Losses φ of squared residuals, by SciPy's definitions.

The cost is ½ C² Σ φ(z_i) with z_i = (r_i/C)², where C is `f_scale`. Its gradient is Jᵀw with
w_i = φ'(z_i) r_i, and its Hessian Jᵀ diag(h) J + Σ w_i ∇²r_i, h_i = φ'(z_i) + 2 z_i φ''(z_i).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core.space import Floats
from sanc.errors import ArgumentError, ArgumentTypeError, is_number, one_of, require, shown

LossFunction = Callable[[Floats], Any]
"""Returns φ, φ' and φ'' of an array of z, as three rows."""


def _soft_l1(z: Floats) -> tuple[Floats, Floats, Floats]:
    """Return 2(√(1 + z) − 1) and its first two derivatives."""
    t = 1.0 + z
    root = np.sqrt(t)
    return 2.0 * (z / (root + 1.0)), 1.0 / root, -0.5 / (t * root)


def _huber(z: Floats) -> tuple[Floats, Floats, Floats]:
    """Return z up to 1 and 2√z − 1 beyond, and its first two derivatives."""
    inside, root = z <= 1.0, np.sqrt(np.maximum(z, 1.0))
    return np.where(inside, z, 2.0 * root - 1.0), 1.0 / root, np.where(inside, 0.0, -0.5 / root**3)


def _cauchy(z: Floats) -> tuple[Floats, Floats, Floats]:
    """Return log(1 + z) and its first two derivatives."""
    t = 1.0 + z
    return np.log1p(z), 1.0 / t, -1.0 / (t * t)


def _arctan(z: Floats) -> tuple[Floats, Floats, Floats]:
    """Return arctan z and its first two derivatives."""
    t = 1.0 + z * z
    return np.arctan(z), 1.0 / t, -2.0 * z / (t * t)


LOSSES: dict[str, LossFunction | None] = {
    "linear": None,
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
}
"""Losses by name: SciPy's. None is φ(z) = z, the sum of squares."""


@dataclass(frozen=True)
class LossTerms:
    """The cost of a residual vector, and the derivatives of the loss.

    Attributes
    ----------
    cost : float
        The cost.
    weighted : ndarray
        The weighted residuals w.
    weights : ndarray or None
        The weights h of the Gauss–Newton matrix; None for the sum of squares, whose weights are 1.
    """

    cost: float
    weighted: Floats
    weights: Floats | None


class Loss:
    """A loss with its scale."""

    def __init__(self, loss: Any, f_scale: Any) -> None:
        if callable(loss):
            self._phi: LossFunction | None = loss
        else:
            self._phi = LOSSES[one_of("loss", loss, LOSSES)]
        fits = is_number(f_scale) and 0.0 < f_scale < math.inf
        require(
            fits, "f_scale", f_scale, "pass a positive number, the residual from which an observation is an outlier"
        )
        self._scale = float(f_scale)

    def __call__(self, r: Floats) -> LossTerms:
        """Return the cost and its terms at a residual vector."""
        if self._phi is None:
            return LossTerms(0.5 * float(r @ r), r, None)
        z = np.square(r / self._scale)
        value, first, second = self._rows(z)
        cost = 0.5 * self._scale**2 * float(np.sum(value))
        return LossTerms(cost, first * r, first + 2.0 * z * second)

    def _rows(self, z: Floats) -> tuple[Floats, Floats, Floats]:
        """Return φ, φ' and φ''; raise an error if a function of the caller returned something else."""
        assert self._phi is not None
        returned = self._phi(z)
        try:
            rows = np.asarray(returned, np.float64)
        except (TypeError, ValueError):
            raise ArgumentTypeError(f"loss returned {shown(returned)}: return φ, φ' and φ'' as three rows.") from None
        if rows.shape != (3, len(z)):
            raise ArgumentError(f"loss returned shape {rows.shape}: return φ, φ' and φ'' in shape (3, {len(z)}).")
        return rows[0], rows[1], rows[2]
