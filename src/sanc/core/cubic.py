r"""The cubic model in the Krylov space, minimised globally: float64, on the host.

For the eigenvalues :math:`\lambda_1 \le \dots \le \lambda_j` of the tridiagonal :math:`T` the problem

.. math:: \min_u\; m(u) = c^T u + \tfrac12 u^T T u + \tfrac{\sigma}{3}\|u\|^3

has a global minimiser that is characterised by :math:`(T + \mu I) u = -c`, :math:`\mu = \sigma\|u\|` and
:math:`\mu \ge \max(0, -\lambda_1)` (Cartis, Gould and Toint 2011, theorem 3.1). This module finds :math:`\mu` from the
scalar secular equation and treats the hard case, in which :math:`c` is orthogonal to the left-most eigenspace. It uses
plain floats: for the few dimensions of a Krylov space an array operation costs more than its arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dstev

from sanc.core.space import Floats


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
    def size(self) -> float:
        """The largest absolute eigenvalue."""
        return max(abs(float(self.values[0])), abs(float(self.values[-1])))

    @property
    def leftmost_vector(self) -> Floats:
        """The eigenvector of the smallest eigenvalue, of length 1, with its largest entry positive."""
        vector: Floats = self.orientation * self.vectors[:, 0]
        return vector

    @property
    def orientation(self) -> float:
        """Sign of the largest entry of the first eigenvector, the first of those that are equal but for rounding.

        LAPACK may return v or −v. A random sign is reproducible only relative to a fixed orientation.
        """
        largest = 0.0
        for entry in self.vectors[:, 0].tolist():
            if abs(entry) > (1.0 + 1e-8) * abs(largest):
                largest = entry
        return math.copysign(1.0, largest)


def spectrum(diagonal: Floats, off_diagonal: Floats) -> Spectrum:
    """Eigenpairs of the symmetric tridiagonal matrix with this diagonal and this off-diagonal."""
    if len(diagonal) == 1:
        return Spectrum(np.array([diagonal[0]], np.float64), np.ones((1, 1)))
    if len(diagonal) <= 24:  # up to this size the checks of eigh_tridiagonal take longer than LAPACK itself
        values, vectors, trouble = dstev(diagonal, off_diagonal)
        if not trouble:
            return Spectrum(values, vectors)
    return Spectrum(*eigh_tridiagonal(diagonal, off_diagonal, check_finite=False))


@dataclass(frozen=True, slots=True)
class CubicStep:
    """The global minimiser of the cubic model.

    Attributes
    ----------
    u : ndarray
        The minimiser in the basis of the Krylov space.
    norm : float
        Its norm ‖u‖.
    multiplier : float
        μ = σ‖u‖, so that (T + μI)u = −c with T + μI positive semidefinite.
    decrease : float
        −m(u) ≥ (σ/6)‖u‖³, computed without cancellation.
    hard : bool
        Whether this is the hard case: u contains a multiple of the left-most eigenvector of either sign.
    curvature_share : float
        Share of the decrease −cᵀu − ½uᵀTu along negative eigenvalues of T; NaN if there is no decrease.
    sigma : float
        The cubic coefficient of the model.
    """

    u: Floats
    norm: float
    multiplier: float
    decrease: float
    hard: bool
    curvature_share: float = math.nan
    sigma: float = math.nan


def solve(eigen: Spectrum, linear: Floats, sigma: float, sign: float = 1.0) -> CubicStep:
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
        In the hard case both signs of `leftmost_vector` are minimisers; this one is taken.

    Returns
    -------
    CubicStep
    """
    c: list[float] = (linear @ eigen.vectors).tolist()
    values: list[float] = eigen.values.tolist()
    # Made dimensionless by u = (a/σ) y: the model is then a³/σ² (ĉᵀy + ½ yᵀΛ̂y + ⅓‖y‖³) with |Λ̂| < 2 and ‖ĉ‖ < 4,
    # so no σ, however large or small, overflows or cancels; a is a power of two, so that scaling is exact.
    a = max(-values[0], values[-1], math.sqrt(sigma) * math.sqrt(math.hypot(*c)))
    if a == 0.0:
        return CubicStep(np.zeros_like(linear), 0.0, 0.0, 0.0, hard=False, sigma=sigma)
    a = math.ldexp(1.0, math.frexp(a)[1] - 1)
    scale, per = a / sigma, sigma / a
    c = [(entry / a) * per for entry in c]
    values = [entry / a for entry in values]
    base = max(0.0, -values[0])  # μ̂ = base + t with t ≥ 0
    t, y, hard = _secular(c, [max(entry + base, 0.0) for entry in values], base, sign)
    if hard:
        y[0] *= eigen.orientation
    mu = base + t
    u = eigen.vectors @ np.array([scale * entry for entry in y])
    linear_term = quadratic = negative = 0.0  # cᵀy, yᵀΛ̂y, and the part of −cᵀy − ½yᵀΛ̂y along negative eigenvalues
    for ci, yi, value in zip(c, y, values, strict=True):
        first, second = ci * yi, value * yi * yi
        linear_term += first
        quadratic += second
        if value < 0.0:
            negative -= first + 0.5 * second
    norm, multiplier = scale * mu, a * mu
    # With cᵀu + uᵀTu + σ‖u‖³ = 0 the decrease is −½cᵀu + (μ/6)‖u‖²: two terms, neither negative.
    decrease = (0.5 * a * abs(linear_term) * scale + multiplier * norm * mu / 6.0) * scale
    total = -linear_term - 0.5 * quadratic
    share = negative / total if total > 0.0 else math.nan
    return CubicStep(u, norm, multiplier, decrease, hard, share, sigma)


def least_sigma(eigen: Spectrum, linear: Floats, step: CubicStep, longest: float) -> float:
    """Return a lower bound of the σ whose step norm is `longest`, given a longer step; 0 in the hard case.

    1/‖u‖ is concave as a function of μ, so that Newton's method for ‖u‖ = `longest` never overshoots.
    """
    if step.hard:
        return 0.0
    mu: Any = np.float64(step.multiplier)
    c = linear @ eigen.vectors
    with np.errstate(all="ignore"):  # an overflow gives NaN, which bounds nothing
        for _ in range(4):
            u = c / (eigen.values + mu)
            square = u @ u
            mu += (np.sqrt(square) / longest - 1.0) * square / (u @ (u / (eigen.values + mu)))
        return float(mu / longest)


def _secular(c: list[float], gaps: list[float], base: float, sign: float) -> tuple[float, list[float], bool]:
    """Solve ‖y(t)‖ = base + t for t ≥ 0 with y(t) = −c/(gaps + t), the hard case included."""
    # |c_i| = (base + t)(gap_i + t) gives a lower bound on t for each i, and with ‖c‖ and the smallest gap an upper one.
    pairs = list(zip(c, gaps, strict=True))
    lower = largest = 0.0
    for ci, gap in pairs:
        if abs(ci) > largest:  # the gaps increase, so that a smaller |c_i| cannot raise the bound
            largest = abs(ci)
            lower = max(lower, _quadratic_root(largest, gap, base))
    if lower == 0.0:
        if base == 0.0 and not any(c):
            return 0.0, [0.0] * len(c), False
        y = [-ci / gap if ci and gap else 0.0 for ci, gap in pairs]  # where the gap is 0, c is 0 up to underflow
        rest = math.hypot(*y)
        if rest <= base:
            y[0] = sign * math.sqrt((base - rest) * (base + rest))
            return 0.0, y, True
    upper = _quadratic_root(math.hypot(*c), min(gaps), base) * (1.0 + 1e-12)
    upper = highest = max(upper, lower, 5e-324)
    t = lower if lower > 0.0 else 0.5 * upper
    for _ in range(200):
        mu = base + t
        square = pull = 0.0  # ‖y/μ‖², which is 1 at the solution, and its derivative by t up to a factor
        for ci, gap in pairs:
            shifted = gap + t
            share = ci / shifted / mu
            share *= share
            square += share
            pull += share / shifted
        excess, newton = math.inf, 0.0
        if square > 1e-280:  # below that underflow is possible, and t is far too large
            ratio = math.sqrt(square)
            excess = 1.0 / ratio - 1.0
            newton = t - (1.0 - ratio) * mu / (1.0 + mu * (pull / square))
        if excess > 0.0:
            upper = t
        else:
            lower = t
        if abs(excess) <= 4e-16 or upper - lower <= 4e-16 * upper:
            break
        near = abs(excess) <= 1e-10  # Newton's method converges quadratically: the next step is the last
        if not lower < newton < upper:
            near = False
            if newton >= upper == highest:  # from the right of the root, convexity makes Newton decrease to it
                newton = upper
            else:  # bisect on a logarithmic scale
                newton = math.sqrt(lower) * math.sqrt(upper) if lower > 0.0 else 0.5 * upper
        near = near or newton == t
        t = newton
        if near:
            break
    y = [-ci / (gap + t) for ci, gap in pairs]
    others = math.hypot(*y[1:])
    mu = base + t
    if base > 0.0 and abs(y[0]) > 0.5 * mu and others < mu:
        # Nearly hard: t is a small difference, but ‖y‖, and with it |y_1|, is known to full precision.
        y[0] = math.copysign(math.sqrt((mu - others) * (mu + others)), y[0])
    return t, y, False


def _quadratic_root(size: float, gap: float, base: float) -> float:
    """Non-negative root of (base + t)(gap + t) = size, or 0 where there is none."""
    excess = size - base * gap
    if excess <= 0.0:
        return 0.0
    total = base + gap
    return 2.0 * excess / (total + math.sqrt(total * total + 4.0 * excess))
