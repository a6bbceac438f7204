"""A probe for negative curvature at a point from a random start, and a bound on eigenvalues that it may have missed.

Lanczos with products that have the error F gives B Q = Q T + β q_{k+1} e_kᵀ + F. For an eigenpair (λ, v) of B with
λ < θ_1, the left-most Ritz value, w = Qᵀv therefore solves (T − λ) w = −β (vᵀq_{k+1}) e_k − Fᵀv, and w_1 = vᵀq_1 is the
component of the start along v:

    |vᵀq_1| ≤ β |e_1ᵀ(T − λ)⁻¹e_k| + ‖F‖ ‖(T − λ)⁻¹e_1‖,   β |e_1ᵀ(T − λ)⁻¹e_k| = β_1 ⋯ β_k / Π(θ_i − λ).

The right side decreases as λ does, and a random start has a component of at least t √(π/2n) along any fixed v with
probability 1 − t: with that probability no λ for which the right side is smaller is an eigenvalue. Roundoff counts too:
if Lanczos breaks down early, a missed eigenvalue may be far below θ_1 − β.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sanc.core import cubic
from sanc.core.consistency import INACCURATE, nonlinearity
from sanc.core.krylov import Krylov, Lanczos, NonFiniteProductError
from sanc.core.oracle import Operator, Oracle
from sanc.core.space import Space, Vector

_GRID = np.linspace(0.0, 1.0, 65)[:, None]
"""Positions of trial shifts between two bounds; two passes over 65 of them find the shift to one per cent."""

_SAFE_EXPONENT = 500
"""Products whose norm is 2^±500 or beyond are scaled: squares of smaller ones are within the range of float64."""
_LARGEST_EXPONENT = 1000
"""Largest exponent of that scale: 2^1000 and its inverse are normal numbers, and lift any subnormal above 2^-80."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Bounds on the curvature at a point.

    Attributes
    ----------
    grad_norm : float
        ‖∇f(x)‖.
    lambda_min : float
        Left-most Ritz value: λ_min(∇²f(x)) is at most this plus `rounding`.
    error_bound : float
        λ_min(∇²f(x)) ≥ lambda_min − error_bound, with probability `confidence` over the random start vector.
    rounding : float
        Error of the Ritz value: roundoff, the error of differenced or nonlinear products, and asymmetry.
    residual : float
        ‖Hv − λv‖ of the Ritz pair: some eigenvalue lies that close to `lambda_min`. 0 if the Krylov space is invariant.
    asymmetry : float
        Observed distance of the products from those of a symmetric matrix.
    confidence : float
        The probability; 1 if the Krylov space is the whole space.
    eps_gradient, eps_curvature : float
        The tolerances.
    products : int
        Hessian products spent.
    """

    grad_norm: float
    lambda_min: float
    error_bound: float
    rounding: float
    residual: float
    asymmetry: float
    confidence: float
    eps_gradient: float
    eps_curvature: float
    products: int

    @property
    def stationary(self) -> bool:
        """Whether ‖g‖ ≤ eps_gradient."""
        return self.grad_norm <= self.eps_gradient

    @property
    def lower_bound(self) -> float:
        """A lower bound of λ_min that holds with probability `confidence`."""
        return self.lambda_min - self.error_bound

    @property
    def saddle(self) -> bool:
        """Whether negative curvature beyond tolerance and roundoff was found; this is certain, not probable."""
        return self.lambda_min + self.rounding < -self.eps_curvature

    @property
    def second_order(self) -> bool:
        """Whether x is certified as an ε-second-order point."""
        return self.stationary and self.lower_bound >= -self.eps_curvature

    @property
    def inconsistent(self) -> bool:
        """Whether the products are asymmetric beyond their errors."""
        return self.error_bound == math.inf and self.asymmetry > 0.0

    def __str__(self) -> str:
        if self.second_order:
            verdict = "a second-order point"
        elif self.saddle:
            verdict = "not a second-order point: negative curvature was found"
        elif not self.stationary:
            verdict = "not a stationary point"
        elif math.isnan(self.lambda_min):
            verdict = "undecided: a Hessian product is not finite"
        elif self.inconsistent:
            verdict = f"undecided: the Hessian is not symmetric, by {self.asymmetry:.1e}; check hess or hessp"
        elif self.residual == 0.0:
            verdict = "undecided: roundoff exceeds the tolerance"
        else:
            verdict = "undecided: allow more Hessian products, or compute in float64"
        return (
            f"{verdict} (‖g‖ = {self.grad_norm:.2e}, λ_min in [{self.lower_bound:.3e}, {self.lambda_min:.3e}] with "
            f"probability {self.confidence:g}, {self.products} products)"
        )


def probe(
    oracle: Oracle,
    x: Vector,
    *,
    eps: float,
    eps_curvature: float,
    confidence: float = 0.99,
    max_products: int | None = None,
    seed: int = 0,
    thorough: bool = False,
    late: Callable[[], bool] = lambda: False,
) -> tuple[Certificate, Vector]:
    """Certificate at x, and the unit vector of the left-most Ritz pair.

    It stops as soon as the outcome is certain; if `thorough`, not before λ_min is known to a tenth, or, in up to 100
    dimensions, exactly. It also stops after the product at which `late` becomes true. The counters of the oracle do not
    include its products.
    """
    space = oracle.space
    _, g = oracle.gradient(x)
    known = {"grad_norm": space.norm(g), "eps_gradient": eps, "eps_curvature": eps_curvature}
    before = replace(oracle.meter)
    start = space.normal(np.random.default_rng((seed, space.dim)))
    products = _Products(oracle.hessian(x), start, space)
    krylov = products.krylov
    limit = min(space.dim, max_products or _affordable(space.dim))
    test_at = 4  # fewer rarely decide, and one product does not show asymmetry
    lower = -math.inf
    try:
        while True:
            products.extend()
            k, curvature = krylov.dim, eps_curvature * products.factor
            done = k >= limit or krylov.invariant or late()
            if done or k >= test_at:
                eigen = cubic.spectrum(*krylov.tridiagonal())
                rounding = products.error(float(np.max(np.abs(eigen.values))))
                full = k == space.dim  # no eigenvalue can be missed
                error, useless = (rounding, True) if full else _missed(eigen, krylov, space.dim, rounding, confidence)
                if eigen.leftmost - rounding < lower:
                    lower = -math.inf  # contradicted by a new Ritz value
                lower = max(lower, eigen.leftmost - error)  # all bounds hold if the start has its component along v
                error = eigen.leftmost - lower
                if thorough:
                    sharp = space.dim > 100 and error <= max(curvature, 0.1 * abs(eigen.leftmost))
                    decided = sharp and not -curvature <= eigen.leftmost < error - curvature
                else:
                    near = krylov.residual_of(eigen.leftmost_vector) <= 0.1 * abs(eigen.leftmost)
                    found = near and eigen.leftmost + rounding < -curvature
                    decided = found or lower >= -curvature
                if done or decided or (useless and space.dim > 100):
                    break
                test_at = k + 1 + k // 5
        (v,) = krylov.combine(eigen.leftmost_vector)
    except NonFiniteProductError:
        nothing = {"lambda_min": math.nan, "error_bound": math.inf, "rounding": math.inf, "residual": math.nan}
        cert = Certificate(**known, **nothing, asymmetry=0.0, confidence=confidence, products=krylov.dim + 1)
        return cert, start
    finally:
        products.operator.release()
        oracle.meter = before
    result = Certificate(
        **known,
        lambda_min=products.unscaled(eigen.leftmost),
        error_bound=products.unscaled(rounding if full else error),
        rounding=products.unscaled(rounding),
        residual=products.unscaled(krylov.residual_of(eigen.leftmost_vector)),
        asymmetry=products.unscaled(math.sqrt(products.asymmetry)),
        confidence=1.0 if full else confidence,
        products=krylov.dim,
    )
    return result, v


class _Products:
    """A Krylov space, and the errors of its products.

    Attributes
    ----------
    differences : float
        Sum of the squared errors of differences of gradients.
    asymmetry : float
        Sum of the squared projections that reorthogonalisation removed and that are zero for a symmetric matrix: those
        on all but the last two vectors, and the excess over β on the last but one.
    dropped : float
        The last β, if it was treated as roundoff.
    factor : float
        A power of two by which the products are scaled if their squares would overflow or underflow; otherwise 1. All
        numbers of the Krylov space and the attributes above are in these units.
    """

    def __init__(self, operator: Operator, start: Vector, space: Space) -> None:
        self.operator, self.space = operator, space
        self.lanczos = Lanczos(self._product, start, space, reorthogonalise=True)
        self.krylov = Krylov(self.lanczos)
        self.differences = self.asymmetry = self.dropped = 0.0
        self.factor = 1.0
        self._nonlinearity: float | None = None  # of a product with a unit vector, once it was measured

    def _product(self, q: Vector) -> Vector:
        answer = self.operator(q)
        error = self.operator.error(q, answer)
        if not self.lanczos.columns:
            self.factor = _power_of_two(self.space.norm(answer))
        self.differences += (error * self.factor) * (error * self.factor)
        return answer if self.factor == 1.0 else answer * self.factor

    def unscaled(self, number: float) -> float:
        """Return a number of the Krylov space in the units of the Hessian; a finite one does not become infinite."""
        result = number / self.factor
        return result if math.isinf(number) or not math.isinf(result) else math.copysign(sys.float_info.max, result)

    def extend(self) -> None:
        """Make one iteration and update the asymmetry."""
        before = self.krylov.residual
        self.krylov.extend()
        if self.krylov.invariant:
            self.dropped = float(self.lanczos.columns[-1][1])
        *parts, _ = self.space.read([self.lanczos.parts])
        if parts:
            parts[-1] -= before
        self.asymmetry += sum(part * part for part in parts)

    def error(self, size: float) -> float:
        """Return ‖F‖ for a Hessian of norm `size`; infinite if it is asymmetric beyond the errors of products.

        Products of low precision, or differences that the caller computes, are asymmetric and also nonlinear. A wrong
        Hessian is linear. So the nonlinearity is measured where the asymmetry exceeds roundoff, and counts as an error.
        """
        rounding = 10.0 * self.space.eps * size
        allowed, inaccurate = self.krylov.dim * self.space.eps * size * size + 10.0 * self.differences, 0.0
        if self.asymmetry > allowed:
            if self._nonlinearity is None:
                self._nonlinearity = nonlinearity(self.operator, self.space) * self.factor
            inaccurate = self.krylov.dim * (INACCURATE * self._nonlinearity) ** 2
            if not self.asymmetry <= allowed + inaccurate:
                return math.inf
        rounding = math.hypot(math.sqrt(self.krylov.dim) * rounding, self.dropped)
        return math.sqrt(rounding * rounding + self.differences + self.asymmetry + inaccurate)


def _power_of_two(norm: float) -> float:
    """Return the factor that moves `norm` near 1 if its square would overflow or underflow, otherwise 1."""
    exponent = math.frexp(norm)[1] if 0.0 < norm < math.inf else 0
    if abs(exponent) < _SAFE_EXPONENT:
        return 1.0
    return math.ldexp(1.0, -max(-_LARGEST_EXPONENT, min(exponent, _LARGEST_EXPONENT)))


def _affordable(dim: int) -> int:
    """Return the number of basis vectors that fit 400 MB in float64, at least 50 and at most 1000."""
    return min(1000, max(50, 50_000_000 // dim))


def _missed(eigen: cubic.Spectrum, krylov: Krylov, dim: int, rounding: float, confidence: float) -> tuple[float, bool]:
    """Return the bound on θ_1 − λ_min of this module's docstring, and whether roundoff alone limits it."""
    if rounding == math.inf:
        return math.inf, True
    part = (1.0 - confidence) * math.sqrt(math.pi / (2 * dim))
    betas = sum(map(math.log, krylov.beta)) if krylov.residual > 0.0 else -math.inf
    gaps, first = eigen.values - eigen.leftmost, eigen.vectors[0]

    def beyond(shifts: Any) -> Any:
        return np.exp(np.minimum(betas - np.log(gaps + shifts).sum(-1, keepdims=True), 0.0))

    high = (krylov.residual + rounding) / part  # no eigenvalue farther left is possible
    low = max(rounding, 1e-16 * high)
    for _ in range(2 if high > 0.0 else 0):  # to one per cent, rounded to the safe side
        shifts = low * (high / low) ** _GRID
        hidden = beyond(shifts) + rounding * np.linalg.norm(first / (gaps + shifts), axis=-1, keepdims=True)
        possible = int(np.sum(~(hidden < part)))  # decreases as the shift grows
        low, high = float(shifts[max(possible - 1, 0), 0]), float(shifts[min(possible, len(shifts) - 1), 0])
    low = max(low, high)
    return low, krylov.residual == 0.0 or float(beyond(low)[0]) < 0.01 * part
