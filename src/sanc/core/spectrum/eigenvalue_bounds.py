"""Bounds on the extreme eigenvalues of a Hessian from Lanczos with a random start, with a stated probability.

Lanczos with products that have the error F gives B Q = Q T + β q_{k+1} e_kᵀ + F. Let (λ, v) be an eigenpair of B with
λ < θ_1, the left-most Ritz value. Then w = Qᵀv solves (T − λ) w = −β (vᵀq_{k+1}) e_k − Fᵀv. Its first entry vᵀq_1 is
the component of the start along v:

    |vᵀq_1| ≤ β |e_1ᵀ(T − λ)⁻¹e_k| + ‖F‖ ‖(T − λ)⁻¹e_1‖,   β |e_1ᵀ(T − λ)⁻¹e_k| = β_1 ⋯ β_k / Π(θ_i − λ).

The right side decreases as λ does. A random start has a component of at least t √(π/2n) along any fixed v, with
probability 1 − t. With that probability no λ for which the right side is smaller is an eigenvalue. Roundoff counts too:
if Lanczos breaks down early, a missed eigenvalue may be far below θ_1 − β.

The factor |vᵀq_{k+1}| ≤ 1 was dropped from the first term. If Q and q_{k+1} are orthonormal, ‖w‖² + (vᵀq_{k+1})² ≤ 1
bounds it by (1 + ‖F‖/(θ_1 − λ)) / √(1 + β² ‖(T − λ)⁻¹e_k‖²). Without F this is the Christoffel function at λ, the
largest weight that any measure with the same T and β may have there, so no better bound exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from sanc.core.space import Floats
from sanc.core.spectrum.cubic import Spectrum

_SHIFT_GRID = np.linspace(0.0, 1.0, 65)
"""Positions of trial shifts between two bounds. Two passes over 65 shifts determine the bound to one per cent."""

_MIN_SHIFT_RATIO = 1e-16
"""The first lower limit of trial shifts, relative to the upper one: the precision of float64."""
_NEGLIGIBLE_RESIDUAL_FRACTION = 0.01
"""Fraction of a bound that the residual contributes, below which roundoff alone limits it: the accuracy of bounds."""


def least_start_component(dim: int, confidence: float) -> float:
    """Return t √(π/2n): a random start has a larger component along a fixed vector with probability `confidence`."""
    return (1.0 - confidence) * math.sqrt(math.pi / (2 * dim))


class OffDiagonal(Protocol):
    """The β of a Lanczos process."""

    @property
    def beta(self) -> Sequence[float]:
        """All β."""
        ...

    @property
    def last_beta(self) -> float:
        """The last one."""
        ...


def bound_missed_eigenvalues(
    spectrum: Spectrum, krylov: OffDiagonal, dim: int, product_error: float, confidence: float, sharp: bool
) -> tuple[float, bool]:
    """Return the bound on θ_1 − λ_min of this module's docstring, and whether roundoff alone limits it."""
    if product_error == math.inf:
        return math.inf, True
    start_component = least_start_component(dim, confidence)
    log_beta_product = sum(map(math.log, krylov.beta)) if krylov.last_beta > 0.0 else -math.inf
    gaps, first_entries, last_entries = spectrum.values - spectrum.leftmost, spectrum.vectors[0], spectrum.vectors[-1]

    def residual_term(shifts: Any, shifted: Any) -> Any:
        """Return β |e_1ᵀ(T − λ)⁻¹e_k| for λ = θ_1 − shift, times the bound of |vᵀq_{k+1}| if it is sharp.

        `shifted` is T − λ in its eigenbasis.
        """
        logarithm = log_beta_product - np.log(shifted).sum(-1)
        if sharp:
            tail = krylov.last_beta * _row_norms(last_entries / shifted)
            logarithm = logarithm + np.minimum(np.log1p(product_error / shifts) - np.log(np.hypot(1.0, tail)), 0.0)
        return np.exp(np.minimum(logarithm, 0.0))

    high = (krylov.last_beta + product_error) / start_component  # eigenvalues below θ_1 − high are excluded
    low = max(product_error, _MIN_SHIFT_RATIO * high)
    for _ in range(2 if high > 0.0 else 0):  # to one per cent, rounded to the safe side
        shifts = low * (high / low) ** _SHIFT_GRID
        shifted = gaps + shifts[:, None]
        error_term = product_error * _row_norms(first_entries / shifted)
        component_bound = residual_term(shifts, shifted) + error_term  # it decreases as the shift grows
        possible_count = len(shifts) - int(np.count_nonzero(component_bound < start_component))
        low = float(shifts[max(possible_count - 1, 0)])
        high = float(shifts[min(possible_count, len(shifts) - 1)])
    bound = max(low, high)
    negligible = _NEGLIGIBLE_RESIDUAL_FRACTION * start_component
    return bound, krylov.last_beta == 0.0 or float(residual_term(bound, gaps + bound)) < negligible


def _row_norms(rows: Floats) -> Floats:
    """Return the Euclidean norms of the rows of a matrix."""
    norms: Floats = np.sqrt((rows * rows).sum(-1))
    return norms
