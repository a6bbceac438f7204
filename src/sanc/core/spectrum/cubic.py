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
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dstev

from sanc.core.space import MIN_SAFE_SQUARE, Floats

SECULAR_TOLERANCE = 4e-16
"""Relative residual, or width of the bracket, at which the secular equation is solved: two roundings of float64."""
QUADRATIC_CONVERGENCE = 1e-10
"""Residual below which the next step of Newton's method is the last: its square is below double precision."""
BOUND_NEWTON_STEPS = 4
"""Newton steps for a bound of σ: each is a bound, and further ones improve it little."""
MAX_SECULAR_STEPS = 200
"""The most steps for the secular equation. Bisection on a logarithmic scale needs about 60; Newton about five."""
_EQUAL_ENTRIES_TOLERANCE = 1e-8
"""Relative difference of entries of an eigenvector that counts as roundoff: √eps of float64."""
_BRACKET_MARGIN = 1e-12
"""Relative margin of an upper bound of the root, far above its rounding errors of a few eps."""
_MIN_LINEAR_TERM = 1e-290
"""Magnitude of a dimensionless product below which it may have lost precision: numbers below 2e-308 are subnormal."""
_MAX_LAPACK_DIM = 24
"""Largest dimension for which LAPACK is called directly: up to it the checks of `eigh_tridiagonal` take longer."""


class Spectrum(NamedTuple):
    """All eigenpairs of a symmetric matrix, such as the tridiagonal T.

    Attributes
    ----------
    values : ndarray
        The eigenvalues, ascending.
    vectors : ndarray
        The unit eigenvectors: column i belongs to ``values[i]``.
    """

    values: Floats
    vectors: Floats

    @property
    def leftmost(self) -> float:
        """The smallest eigenvalue: the left-most Ritz value."""
        return float(self.values[0])

    @property
    def norm(self) -> float:
        """The largest absolute eigenvalue: the spectral norm."""
        return max(abs(float(self.values[0])), abs(float(self.values[-1])))

    @property
    def leftmost_vector(self) -> Floats:
        """The unit eigenvector of the smallest eigenvalue, with its largest entry positive."""
        vector: Floats = self.orientation * self.vectors[:, 0]
        return vector

    @property
    def orientation(self) -> float:
        """Sign of the largest entry of the first eigenvector; among entries that are equal up to roundoff, the first.

        LAPACK may return v or −v. A random sign is reproducible only relative to a fixed orientation.
        """
        largest = 0.0
        for entry in self.vectors[:, 0].tolist():
            if abs(entry) > (1.0 + _EQUAL_ENTRIES_TOLERANCE) * abs(largest):
                largest = entry
        return math.copysign(1.0, largest)


def compute_spectrum(diagonal: Floats, off_diagonal: Floats) -> Spectrum:
    """Return the eigenpairs of the symmetric tridiagonal matrix with this diagonal and this off-diagonal."""
    if len(diagonal) == 1:
        return Spectrum(np.array([diagonal[0]], np.float64), np.ones((1, 1)))
    if len(diagonal) <= _MAX_LAPACK_DIM:
        values, vectors, info = dstev(diagonal, off_diagonal)
        if info == 0:  # dstev converged
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
    hard_case : bool
        Whether this is the hard case: a multiple of the left-most eigenvector, of either sign, is added to u.
    curvature_share : float
        Fraction of the decrease −cᵀu − ½uᵀTu along negative eigenvalues of T; NaN if there is no decrease.
    sigma : float
        The cubic coefficient of the model.
    """

    u: Floats
    norm: float
    multiplier: float
    decrease: float
    hard_case: bool
    curvature_share: float = math.nan
    sigma: float = math.nan


def solve(spectrum: Spectrum, linear: Floats, sigma: float, sign: float = 1.0) -> CubicStep:
    """Minimise the cubic model globally.

    Parameters
    ----------
    spectrum : Spectrum
        Eigenpairs of T.
    linear : ndarray
        The linear term c; for a Krylov space started at the gradient, ‖g‖ e₁.
    sigma : float
        The cubic coefficient, positive.
    sign : float
        In the hard case both signs of `leftmost_vector` give minimisers; this one is used.

    Returns
    -------
    CubicStep
    """
    gradient: list[float] = linear.dot(spectrum.vectors).tolist()
    values: list[float] = spectrum.values.tolist()
    # Made dimensionless by u = (a/σ) y: the model is then a³/σ² (ĉᵀy + ½ yᵀΛ̂y + ⅓‖y‖³) with |Λ̂| < 2 and ‖ĉ‖ < 4,
    # so no σ, however large or small, overflows or cancels. The factor a is a power of two, so that scaling is exact.
    largest = max(-values[0], values[-1], math.sqrt(sigma) * math.sqrt(math.hypot(*gradient)))
    if largest == 0.0:
        return CubicStep(np.zeros_like(linear), 0.0, 0.0, 0.0, hard_case=False, sigma=sigma)
    magnitude = math.ldexp(1.0, math.frexp(largest)[1] - 1)
    scale, inverse_scale = magnitude / sigma, sigma / magnitude
    c = [(entry / magnitude) * inverse_scale for entry in gradient]
    values = [entry / magnitude for entry in values]
    mu_min = max(0.0, -values[0])  # μ̂ = mu_min + t with t ≥ 0
    gaps = [max(entry + mu_min, 0.0) for entry in values] if mu_min > 0.0 else values
    t, y, hard_case = _solve_secular(c, gaps, mu_min, sign)
    if hard_case:
        y[0] *= spectrum.orientation
    mu = mu_min + t
    u = spectrum.vectors.dot([scale * entry for entry in y])
    norm, multiplier = scale * mu, magnitude * mu
    linear_term, curvature_share = _decrease_terms(c, y, values)
    # With cᵀu + uᵀTu + σ‖u‖³ = 0 the decrease is −½cᵀu + (μ/6)‖u‖²: two terms, neither negative.
    decrease = (0.5 * magnitude * abs(linear_term) * scale + multiplier * norm * mu / 6.0) * scale
    if abs(linear_term) < _MIN_LINEAR_TERM and any(gradient):  # σ is so small that ĉᵀy underflows
        linear_term_of_u = sum(entry * (scale * yi) for entry, yi in zip(gradient, y, strict=True))
        decrease = 0.5 * abs(linear_term_of_u) + multiplier * norm * norm / 6.0
    return CubicStep(u, norm, multiplier, decrease, hard_case, curvature_share, sigma)


def _decrease_terms(c: list[float], y: list[float], values: list[float]) -> tuple[float, float]:
    """Return cᵀy, and the fraction of the decrease −cᵀy − ½yᵀΛy along negative eigenvalues; NaN without a decrease."""
    linear_term = quadratic_term = negative_part = 0.0
    for ci, yi, value in zip(c, y, values, strict=True):
        linear, quadratic = ci * yi, value * yi * yi
        linear_term += linear
        quadratic_term += quadratic
        if value < 0.0:
            negative_part -= linear + 0.5 * quadratic
    total = -linear_term - 0.5 * quadratic_term
    return linear_term, negative_part / total if total > 0.0 else math.nan


def sigma_lower_bound(spectrum: Spectrum, linear: Floats, step: CubicStep, max_norm: float) -> float:
    """Return a lower bound of the σ whose step norm is `max_norm`, given a longer step; 0 in the hard case.

    1/‖u‖ is concave as a function of μ, so that Newton's method for ‖u‖ = `max_norm` never overshoots.
    """
    if step.hard_case:
        return 0.0
    mu: Any = np.float64(step.multiplier)
    c = linear.dot(spectrum.vectors)
    with np.errstate(all="ignore"):  # an overflow results in NaN, which is no bound
        for _ in range(BOUND_NEWTON_STEPS):
            shifted = spectrum.values + mu
            u = c / shifted
            square = u.dot(u)
            mu += (np.sqrt(square) / max_norm - 1.0) * square / u.dot(u / shifted)
        return float(mu / max_norm)


def _solve_secular(c: list[float], gaps: list[float], mu_min: float, sign: float) -> tuple[float, list[float], bool]:
    """Solve ‖y(t)‖ = mu_min + t for t ≥ 0 with y(t) = −c/(gaps + t); return t, y and whether it is the hard case."""
    pairs = list(zip(c, gaps, strict=True))
    # |c_i| ≤ (mu_min + t)(gap_i + t) at the solution, which bounds t from below for each i. An upper bound follows from
    # ‖c‖ ≥ (mu_min + t)(gap + t) with the smallest gap, which is the first.
    lower = largest = 0.0
    for ci, gap in pairs:
        if abs(ci) > largest:  # the gaps increase, so that a smaller |c_i| cannot raise the bound
            largest = abs(ci)
            lower = max(lower, _quadratic_root(largest, gap, mu_min))
    if lower == 0.0:
        if mu_min == 0.0 and not any(c):
            return 0.0, [0.0] * len(c), False
        hard_case_y = _solve_hard_case(pairs, mu_min, sign)
        if hard_case_y is not None:
            return 0.0, hard_case_y, True
    upper = _quadratic_root(math.hypot(*c), gaps[0], mu_min) * (1.0 + _BRACKET_MARGIN)
    t = _find_secular_root(pairs, mu_min, lower, max(upper, lower, math.ulp(0.0)))
    y = [-ci / (gap + t) for ci, gap in pairs]
    mu = mu_min + t
    if mu_min > 0.0 and abs(y[0]) > 0.5 * mu:
        # Nearly hard: t is a small difference, but ‖y‖, and with it |y_1|, is known to full precision.
        other_norm = math.hypot(*y[1:])
        if other_norm < mu:
            y[0] = math.copysign(math.sqrt((mu - other_norm) * (mu + other_norm)), y[0])
    return t, y, False


def _solve_hard_case(pairs: list[tuple[float, float]], mu_min: float, sign: float) -> list[float] | None:
    """Return the y of the hard case, t = 0; None if ‖y(0)‖ > mu_min, so that t > 0."""
    y = [-ci / gap if ci and gap else 0.0 for ci, gap in pairs]  # if the gap is 0, c is 0 up to underflow
    other_norm = math.hypot(*y)
    if not other_norm <= mu_min:
        return None
    y[0] = sign * math.sqrt((mu_min - other_norm) * (mu_min + other_norm))
    return y


def _find_secular_root(pairs: list[tuple[float, float]], mu_min: float, lower: float, upper: float) -> float:
    """Return the t between two bounds at which ‖y(t)‖ = mu_min + t, by Newton's method with bisection."""
    initial_upper = upper
    t = lower if lower > 0.0 else 0.5 * upper
    for _ in range(MAX_SECULAR_STEPS):
        residual, t_next = _newton_step(pairs, mu_min, t)
        if residual > 0.0:
            upper = t
        else:
            lower = t
        if abs(residual) <= SECULAR_TOLERANCE or upper - lower <= SECULAR_TOLERANCE * upper:
            break
        is_last = abs(residual) <= QUADRATIC_CONVERGENCE
        if not lower < t_next < upper:
            is_last = False
            if t_next >= upper == initial_upper:  # from the right of the root, convexity makes Newton decrease to it
                t_next = upper
            else:  # bisect on a logarithmic scale
                t_next = math.sqrt(lower) * math.sqrt(upper) if lower > 0.0 else 0.5 * upper
        is_last = is_last or t_next == t
        t = t_next
        if is_last:
            break
    return t


def _newton_step(pairs: list[tuple[float, float]], mu_min: float, t: float) -> tuple[float, float]:
    """Return the residual μ/‖y‖ − 1 of the secular equation at t, and the next t of Newton's method."""
    mu = mu_min + t
    square = derivative = 0.0  # ‖y/μ‖², which is 1 at the solution, and its derivative by t up to a factor
    for ci, gap in pairs:
        shifted = gap + t
        term = ci / shifted / mu
        term *= term
        square += term
        derivative += term / shifted
    if not square > MIN_SAFE_SQUARE:  # t is far too large
        return math.inf, 0.0
    ratio = math.sqrt(square)
    return 1.0 / ratio - 1.0, t - (1.0 - ratio) * mu / (1.0 + mu * (derivative / square))


def _quadratic_root(product: float, gap: float, mu_min: float) -> float:
    """Return the non-negative root of (mu_min + t)(gap + t) = product, or 0 if there is none."""
    excess = product - mu_min * gap
    if excess <= 0.0:
        return 0.0
    total = mu_min + gap
    return 2.0 * excess / (total + math.sqrt(total * total + 4.0 * excess))
