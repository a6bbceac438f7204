r"""The cubic model in the Krylov space, minimised globally: float64, on the host.

For the eigenvalues :math:`\lambda_1 \le \dots \le \lambda_j` of the tridiagonal :math:`T` the problem

.. math:: \min_u\; m(u) = c^T u + \tfrac12 u^T T u + \tfrac{\sigma}{3}\|u\|^3

has a global minimiser that is characterised by :math:`(T + \mu I) u = -c`, :math:`\mu = \sigma\|u\|` and
:math:`\mu \ge \max(0, -\lambda_1)` (Cartis, Gould and Toint 2011, theorem 3.1). This module finds :math:`\mu` from the
scalar secular equation and treats the hard case, in which :math:`c` has no part in the left-most eigenspace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh_tridiagonal

from sanc.vectors import Floats


@dataclass(frozen=True, slots=True)
class Spectrum:
    """All eigenpairs of a small symmetric tridiagonal matrix, ascending; column ``i`` belongs to ``values[i]``."""

    values: Floats
    vectors: Floats

    @property
    def leftmost(self) -> float:
        """The smallest eigenvalue: the left-most Ritz value."""
        return float(self.values[0])

    @property
    def leftmost_vector(self) -> Floats:
        """The eigenvector of the smallest eigenvalue, of length 1."""
        vector: Floats = self.vectors[:, 0]
        return vector


def spectrum(diagonal: Floats, off_diagonal: Floats) -> Spectrum:
    """Eigenpairs of the symmetric tridiagonal matrix with this diagonal and this off-diagonal."""
    if len(diagonal) == 1:
        return Spectrum(np.array([diagonal[0]], np.float64), np.ones((1, 1)))
    if len(diagonal) <= 12:  # below this size the dense routine has less overhead than the tridiagonal driver
        values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off_diagonal, -1))
    else:
        values, vectors = eigh_tridiagonal(diagonal, off_diagonal, check_finite=False)
    return Spectrum(values, vectors)


@dataclass(frozen=True, slots=True)
class CubicStep:
    """The global minimiser of the cubic model.

    Attributes
    ----------
    u : ndarray
        The minimiser in the basis of the Krylov space.
    norm : float
        Its length ‖u‖.
    multiplier : float
        μ = σ‖u‖, so that (T + μI)u = −c with T + μI positive semidefinite.
    decrease : float
        −m(u) ≥ (σ/6)‖u‖³, computed without cancellation.
    hard : bool
        Whether the hard case was met: part of u is a free multiple of the left-most eigenvector.
    """

    u: Floats
    norm: float
    multiplier: float
    decrease: float
    hard: bool


def minimise(eigen: Spectrum, linear: Floats, sigma: float, sign: float = 1.0) -> CubicStep:
    """Minimise the cubic model globally.

    Parameters
    ----------
    eigen : Spectrum
        Eigenpairs of T.
    linear : ndarray
        The linear term c; for a Krylov space started at the gradient, ‖g‖ e₁.
    sigma : float
        The cubic coefficient, positive.
    sign : float
        In the hard case both signs of the left-most eigenvector are minimisers; this one is taken.

    Returns
    -------
    CubicStep
    """
    c = eigen.vectors.T @ linear
    c_norm = _length(c)[0]
    # Made dimensionless by u = (a/σ) y: the model is then a³/σ² (ĉᵀy + ½ yᵀΛ̂y + ⅓‖y‖³) with |Λ̂| ≤ 1 and ‖ĉ‖ ≤ 1,
    # so no σ, however large or small, overflows or loses digits.
    a = max(float(np.max(np.abs(eigen.values))), math.sqrt(sigma) * math.sqrt(c_norm))
    if a == 0.0:
        return CubicStep(np.zeros_like(linear), 0.0, 0.0, 0.0, hard=False)
    c_hat = (c / a) * (sigma / a)
    values = eigen.values / a
    base = max(0.0, -float(values[0]))  # μ̂ = base + t with t ≥ 0
    gaps = np.maximum(values + base, 0.0)
    t, y, hard = _secular(c_hat, gaps, base, sign)
    scale = a / sigma
    u = eigen.vectors @ (scale * y)
    norm = scale * (base + t)
    # With cᵀu + uᵀTu + σ‖u‖³ = 0 the decrease is −½cᵀu + (σ/6)‖u‖³: two terms, neither negative.
    decrease = scale * scale * a * (0.5 * abs(float(c_hat @ y)) + (base + t) ** 3 / 6.0)
    return CubicStep(u, norm, a * (base + t), decrease, hard)


def curvature_share(eigen: Spectrum, linear: Floats, u: Floats) -> float:
    """Share of the decrease −cᵀu − ½uᵀTu that u earns along negative eigenvalues of T; NaN where there is none."""
    c, y = eigen.vectors.T @ linear, eigen.vectors.T @ u
    with np.errstate(over="ignore", invalid="ignore"):
        gains = -y * (c + 0.5 * eigen.values * y)
        total = float(gains.sum())
    return float(gains[eigen.values < 0.0].sum()) / total if total > 0.0 else math.nan


def _secular(c: Floats, gaps: Floats, base: float, sign: float) -> tuple[float, Floats, bool]:
    """Solve ‖y(t)‖ = base + t for t ≥ 0 with y(t) = −c/(gaps + t), the hard case included."""
    size = np.abs(c)
    live = size > 0.0
    # |c_i| = (base + t)(gap_i + t) gives a lower bound on t for each i, and with ‖c‖ and the smallest gap an upper one.
    lower = float(np.max(_quadratic_root(size, gaps, base)))
    if lower == 0.0:
        if not live.any() and base == 0.0:
            return 0.0, np.zeros_like(c), False
        y = np.zeros_like(c)
        with np.errstate(divide="ignore", over="ignore"):
            y[live] = -c[live] / gaps[live]
        rest = _length(y)[0]
        if rest <= base:
            y[0] = sign * math.sqrt((base - rest) * (base + rest))
            return 0.0, y, True
    upper = float(_quadratic_root(np.float64(_length(c)[0]), np.min(gaps), base)) * (1.0 + 1e-12)
    upper = max(upper, lower, 5e-324)
    t = lower if lower > 0.0 else 0.5 * upper
    for _ in range(200):
        shifted = gaps + t
        y = -c / shifted
        norm, unit = _length(y)
        excess = (base + t) / norm - 1.0
        if excess > 0.0:
            upper = t
        else:
            lower = t
        if abs(excess) <= 4e-16 or upper - lower <= 4e-16 * upper:
            break
        slope = (1.0 + (base + t) * float(unit @ (unit / shifted))) / norm
        newton = t - excess / slope
        if not lower < newton < upper:  # bisect on the scale on which t lives
            newton = math.sqrt(lower * upper) if lower > 0.0 else 0.5 * upper
        if newton == t:
            break
        t = newton
    y = -c / (gaps + t)
    others = _length(y[1:])[0]
    mu = base + t
    if base > 0.0 and abs(y[0]) > 0.5 * mu and others < mu:
        # Nearly hard: t is a small difference, but the length of y, and with it |y_1|, is known to full precision.
        y[0] = math.copysign(math.sqrt((mu - others) * (mu + others)), y[0])
    return t, y, False


def _length(y: Floats) -> tuple[float, Floats]:
    """Norm and direction, safe where the squares would underflow or overflow."""
    largest = float(np.max(np.abs(y), initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return largest, y
    scaled = y / largest
    norm = math.sqrt(float(scaled @ scaled))
    return largest * norm, scaled / norm


def _quadratic_root(size: Floats | np.floating, gap: Floats | np.floating, base: float) -> Floats:
    """Non-negative root of (base + t)(gap + t) = size, or 0 where there is none."""
    excess = np.maximum(size - base * gap, 0.0)
    total = base + gap
    denominator = total + np.sqrt(total * total + 4.0 * excess)
    return np.where(denominator > 0.0, 2.0 * excess / np.where(denominator > 0.0, denominator, 1.0), 0.0)
