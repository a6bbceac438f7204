"""Negative curvature at a point: looked for with a random start, and a bound on what may have been missed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from sanc.core import cubic
from sanc.core.krylov import Krylov, Lanczos, NonFiniteProductError
from sanc.core.oracle import Oracle
from sanc.core.space import Vector


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known of the curvature at a point.

    Attributes
    ----------
    grad_norm : float
        ‖∇f(x)‖.
    lambda_min : float
        Left-most Ritz value: λ_min(∇²f(x)) is not above it, but for `rounding`.
    error_bound : float
        λ_min(∇²f(x)) ≥ lambda_min − error_bound, with probability `confidence` over the random start vector.
    rounding : float
        How far the Ritz value itself may be off: rounding, and the error of products by differences.
    residual : float
        ‖Hv − λv‖ of the Ritz pair: some eigenvalue lies that close to `lambda_min`.
    confidence : float
        The probability; 1 where the Krylov space is the whole space.
    eps_gradient, eps_curvature : float
        The tolerances of the verdict.
    products : int
        Hessian products spent.
    """

    grad_norm: float
    lambda_min: float
    error_bound: float
    rounding: float
    residual: float
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
        """A number λ_min is not below, with probability `confidence`."""
        return self.lambda_min - self.error_bound

    @property
    def saddle(self) -> bool:
        """Whether negative curvature was found beyond the tolerance and the rounding; certain, not probable."""
        return self.lambda_min + self.rounding < -self.eps_curvature

    @property
    def second_order(self) -> bool:
        """Whether x is certified as an ε-second-order point."""
        return self.stationary and self.lower_bound >= -self.eps_curvature

    def __str__(self) -> str:
        if self.second_order:
            verdict = "a second-order point"
        elif self.saddle:
            verdict = "not a second-order point: negative curvature was found"
        elif not self.stationary:
            verdict = "not a stationary point"
        elif self.confidence == 1.0:
            verdict = "undecided: the rounding exceeds the tolerance"
        else:
            verdict = "undecided: allow more Hessian products"
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
) -> tuple[Certificate, Vector]:
    """Certificate at x, and the unit vector of the left-most Ritz pair.

    It stops as soon as the verdict is sure; where `thorough`, not before λ_min is known to a tenth, or, in up to 100
    dimensions, exactly. The products are the certificate's own and do not count with the oracle.
    """
    space = oracle.space
    _, g = oracle.gradient(x)
    known = {"grad_norm": space.norm(g), "eps_gradient": eps, "eps_curvature": eps_curvature}
    before = replace(oracle.meter)
    start = space.normal(np.random.default_rng((seed, space.dim)))
    operator = oracle.hessian(x)
    krylov = Krylov(Lanczos(operator, start, space, reorthogonalise=True))
    limit = min(space.dim, max_products or _affordable(space.dim))
    test_at = 1
    try:
        while True:
            krylov.extend()
            k = krylov.dim
            done = k >= limit or krylov.invariant
            if done or k >= test_at:
                eigen = cubic.spectrum(*krylov.tridiagonal())
                error, rounding, sure = _error(eigen, krylov, space.dim, space.eps, confidence)
                if done:
                    break
                if thorough:
                    sharp = space.dim > 100 and error <= max(eps_curvature, 0.1 * abs(eigen.leftmost))
                    decided = sharp and not -eps_curvature <= eigen.leftmost < error - eps_curvature
                else:
                    near = krylov.left_by(eigen.leftmost_vector) <= 0.1 * abs(eigen.leftmost)
                    found = near and eigen.leftmost + rounding < -eps_curvature
                    decided = found or eigen.leftmost - error >= -eps_curvature
                if decided:
                    break
                test_at = k + 1 + k // 5
        (v,) = krylov.combine(eigen.leftmost_vector)
        differenced = operator.error(v)
    except NonFiniteProductError:
        nothing = {"lambda_min": math.nan, "error_bound": math.inf, "rounding": math.inf, "residual": math.nan}
        return Certificate(**known, **nothing, confidence=confidence, products=krylov.dim + 1), start
    finally:
        operator.release()
        oracle.meter = before
    result = Certificate(
        **known,
        lambda_min=eigen.leftmost,
        error_bound=error + differenced,
        rounding=rounding + differenced,
        residual=krylov.left_by(eigen.leftmost_vector),
        confidence=sure,
        products=krylov.dim,
    )
    return result, v


def _affordable(dim: int) -> int:
    """As many basis vectors as fit a few hundred megabytes, at least 50 and at most 1000."""
    return min(1000, max(50, 50_000_000 // dim))


def _error(
    eigen: cubic.Spectrum, krylov: Krylov, dim: int, machine: float, confidence: float
) -> tuple[float, float, float]:
    """Bound on λ_1 − λ_min, the part of it that is rounding, and the probability with which it holds."""
    width = float(eigen.values[-1] - eigen.values[0])
    rounding = 10.0 * machine * krylov.dim * float(np.max(np.abs(eigen.values)))
    if krylov.invariant:  # a random start has a part in every eigenspace, so none was missed
        return rounding, rounding, 1.0
    failure = (1.0 - confidence) / 2  # one half for each end of the spectrum
    root = math.log(1.648 * math.sqrt(dim) / failure) / (2 * krylov.dim - 1)
    relative = root * root
    if relative >= 0.5:
        return math.inf, rounding, confidence
    return relative * width / (1.0 - 2.0 * relative) + rounding, rounding, confidence
