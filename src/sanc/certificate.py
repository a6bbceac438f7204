"""Is this point a second-order point? ‖g‖, λ_min, and a bound on its error that holds with a stated probability."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from sanc import cubic
from sanc.errors import ArgumentError, require_integer, require_number
from sanc.krylov import Krylov, NonFiniteProductError
from sanc.oracles.base import Oracle
from sanc.oracles.build import build_oracle
from sanc.oracles.products import HvpMode, require_mode
from sanc.vectors import Vector


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


def certificate(
    fun: Any,
    x: Any,
    *,
    jac: Callable[..., Any] | bool | None = None,
    hess: Callable[..., Any] | None = None,
    hessp: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
    eps: float = 1e-5,
    eps_curvature: float | None = None,
    confidence: float = 0.99,
    max_products: int | None = None,
    seed: int = 0,
    hvp: HvpMode = "auto",
) -> Certificate:
    """Say whether x is an ε-second-order point: ‖∇f(x)‖ ≤ ε and λ_min(∇²f(x)) ≥ −ε.

    Parameters
    ----------
    fun, jac, hess, hessp, args
        The objective, as `minimize` takes it: a torch function, NumPy callables, or a `FiniteSum`.
    x : array or Tensor
        The point.
    eps : float
        Tolerance on the gradient.
    eps_curvature : float, optional
        Tolerance on the curvature; by default `eps`.
    confidence : float
        Probability with which the error bound is to hold.
    max_products : int, optional
        Most Hessian products to spend. By default the dimension, and fewer where that many vectors are too large.
    seed : int
        Seed of the random start vector.
    hvp : {"auto", "double-backward", "forward-over-reverse", "linearised", "finite-difference"}
        How a torch function gets its Hessian products, as in `minimize`.

    Notes
    -----
    Lanczos with full reorthogonalisation is started at a random vector. After k products the left-most Ritz value θ
    satisfies θ − λ_min ≤ r (λ_max − λ_min) with probability at least 1 − 1.648 √d exp(−√r (2k − 1)) (Kuczyński and
    Woźniakowski 1992, theorem 4.2). The width λ_max − λ_min is bounded by the same theorem from the Ritz values
    themselves. A Krylov space that fills R^d, or that turns out invariant, leaves rounding only.

    Examples
    --------
    >>> import torch, sanc
    >>> print(sanc.certificate(lambda x: x[0] ** 2 - x[1] ** 2, torch.zeros(2)).saddle)
    True
    """
    _check(eps, eps_curvature, confidence, max_products, seed)
    require_mode(hvp)
    oracle, point, _ = build_oracle(fun, x, jac=jac, hess=hess, hessp=hessp, args=args, hvp=hvp, name="x")
    return probe(
        oracle,
        point,
        eps=eps,
        eps_curvature=eps if eps_curvature is None else eps_curvature,
        confidence=confidence,
        max_products=max_products,
        seed=seed,
        thorough=True,
    )[0]


def _check(eps: Any, eps_curvature: Any, confidence: Any, max_products: Any, seed: Any) -> None:
    require_number("eps", eps)
    require_number("eps_curvature", eps_curvature)
    if not isinstance(confidence, Real) or not 0 < float(confidence) < 1:
        raise ArgumentError(f"confidence = {confidence!r} cannot be used: pass a probability between 0 and 1.")
    require_integer("max_products", max_products, 1)
    require_integer("seed", seed, 0)


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
    before = replace(oracle.meter)
    start = space.normal(np.random.default_rng((seed, space.dim)))
    operator = oracle.hessian(x)
    krylov = Krylov(operator, start, space, reorthogonalise=True)
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
                    known = space.dim > 100 and error <= max(eps_curvature, 0.1 * abs(eigen.leftmost))
                    decided = known and not -eps_curvature <= eigen.leftmost < error - eps_curvature
                else:
                    residual = krylov.residual * abs(float(eigen.leftmost_vector[-1]))
                    found = eigen.leftmost + rounding < -eps_curvature and residual <= 0.1 * abs(eigen.leftmost)
                    decided = found or eigen.leftmost - error >= -eps_curvature
                if decided:
                    break
                test_at = k + 1 + k // 5
        (v,) = krylov.combine(eigen.leftmost_vector)
        differenced = operator.error(v)
    except NonFiniteProductError:
        nothing = {"lambda_min": math.nan, "error_bound": math.inf, "rounding": math.inf, "residual": math.nan}
        tolerances = {"eps_gradient": eps, "eps_curvature": eps_curvature}
        spent = krylov.dim + 1
        return Certificate(space.norm(g), **nothing, confidence=confidence, **tolerances, products=spent), start
    finally:
        operator.release()
        oracle.meter = before
    result = Certificate(
        grad_norm=space.norm(g),
        lambda_min=eigen.leftmost,
        error_bound=error + differenced,
        rounding=rounding + differenced,
        residual=krylov.residual * abs(float(eigen.leftmost_vector[-1])),
        confidence=sure,
        eps_gradient=eps,
        eps_curvature=eps_curvature,
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
