"""The certificate: a bound of λ_min of the Hessian at a point, from a random start."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sanc.core.oracle import Oracle
from sanc.core.space import Space, Vector
from sanc.core.spectrum import cubic
from sanc.core.spectrum.krylov import Krylov, NonFiniteProductError
from sanc.core.spectrum.monitored_lanczos import CurvatureBound, MonitoredLanczos, bound_curvature, monitored_lanczos
from sanc.errors import missing_attribute

DEFAULT_CONFIDENCE = 0.99
"""Probability with which a certificate holds, if the caller chooses none."""
_SPARSE_TEST_DIVISOR = 5
"""One end of a spectrum is bounded again after a fifth more products: a certificate that a few products do not decide
needs many."""
_RITZ_RESIDUAL_TOLERANCE = 0.1
"""Residual of a Ritz pair, relative to its value, below which it is an eigenvalue to a tenth."""
_THOROUGH_ERROR = 0.1
"""Relative error of λ_min up to which a thorough certificate continues by default."""
_MAX_FULL_SPACE_DIM = 100
"""Largest dimension in which a thorough certificate uses the full space: 100 products are cheap there."""


_FORMER_NAMES = {
    "eps_gradient": "use gradient_tolerance",
    "eps_curvature": "use curvature_tolerance",
    "rounding": "use ritz_error",
}
"""Attributes of certificates of earlier versions, and what to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Bounds on the curvature at a point.

    Attributes
    ----------
    grad_norm : float
        ‖∇f(x)‖.
    lambda_min : float
        Left-most Ritz value: λ_min(∇²f(x)) is at most this plus `ritz_error`.
    error_bound : float
        λ_min(∇²f(x)) ≥ lambda_min − error_bound, with probability `confidence` over the random start vector.
    ritz_error : float
        Error of the Ritz value: roundoff, the error of differenced or nonlinear products, and asymmetry.
    residual : float
        ‖Hv − λv‖ of the Ritz pair: some eigenvalue lies that close to `lambda_min`. 0 if the Krylov space is invariant.
    asymmetry : float
        Observed distance of the products from products with a symmetric matrix.
    confidence : float
        The probability, of this certificate alone; 1 if the Krylov space is the whole space. At least one of m
        certificates fails with probability at most m (1 − confidence).
    gradient_tolerance, curvature_tolerance : float
        The tolerances on ‖g‖ and on −λ_min.
    products : int
        Hessian products spent.
    """

    grad_norm: float
    lambda_min: float
    error_bound: float
    ritz_error: float
    residual: float
    asymmetry: float
    confidence: float
    gradient_tolerance: float
    curvature_tolerance: float
    products: int

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name, _FORMER_NAMES)

    @property
    def stationary(self) -> bool:
        """Whether ‖g‖ ≤ gradient_tolerance."""
        return self.grad_norm <= self.gradient_tolerance

    @property
    def lower_bound(self) -> float:
        """A lower bound of λ_min that holds with probability `confidence`."""
        return self.lambda_min - self.error_bound

    @property
    def saddle(self) -> bool:
        """Whether negative curvature beyond tolerance and roundoff was found; this is certain, not probable."""
        return self.lambda_min + self.ritz_error < -self.curvature_tolerance

    @property
    def second_order(self) -> bool:
        """Whether x is certified as an ε-second-order point."""
        return self.stationary and self.lower_bound >= -self.curvature_tolerance

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
    gradient_tolerance: float,
    curvature_tolerance: float,
    confidence: float = DEFAULT_CONFIDENCE,
    max_products: int | None = None,
    seed: int = 0,
    thorough: bool = False,
    time_is_up: Callable[[], bool] = lambda: False,
) -> tuple[Certificate, Vector]:
    """Return the certificate at x, and the unit vector of the left-most Ritz pair; see `explore`."""
    explored = explore(
        oracle,
        x,
        gradient_tolerance=gradient_tolerance,
        curvature_tolerance=curvature_tolerance,
        confidence=confidence,
        max_products=max_products,
        seed=seed,
        thorough=thorough,
        time_is_up=time_is_up,
    )
    return explored.certificate, explored.leftmost_vector()


def without_curvature(
    *, grad_norm: float, gradient_tolerance: float, curvature_tolerance: float, confidence: float, products: int
) -> Certificate:
    """Return the certificate of a point at which a product is not finite: no curvature is known there."""
    return Certificate(
        grad_norm=grad_norm,
        lambda_min=math.nan,
        error_bound=math.inf,
        ritz_error=math.inf,
        residual=math.nan,
        asymmetry=0.0,
        confidence=confidence,
        gradient_tolerance=gradient_tolerance,
        curvature_tolerance=curvature_tolerance,
        products=products,
    )


@dataclass(frozen=True, slots=True)
class Exploration:
    """A certificate, and the Krylov space from a random start that it was computed in.

    Attributes
    ----------
    certificate : Certificate
        The bounds on the curvature.
    start : vector
        The random start vector.
    krylov : Krylov or None
        The Krylov space; None if a product was not finite.
    spectrum : Spectrum or None
        Eigenpairs of T, in the units of the scaled products.
    product_scale : float
        The power of two by which the products were scaled.
    """

    certificate: Certificate
    start: Vector
    krylov: Krylov | None = None
    spectrum: cubic.Spectrum | None = None
    product_scale: float = 1.0

    def leftmost_vector(self) -> Vector:
        """Return the unit vector of the left-most Ritz pair; the start vector if a product was not finite."""
        if self.krylov is None or self.spectrum is None:
            return self.start
        (v,) = self.krylov.combine(self.spectrum.leftmost_vector)
        return v


def _norm(space: Space, g: Vector) -> float:
    """Return ‖g‖, also if the squares of its entries overflow or underflow."""
    norm = space.norm(g)
    if 0.0 < norm < math.inf:
        return norm
    largest = space.largest_entry(g)
    return largest * space.norm(g / largest) if 0.0 < largest < math.inf else norm


def explore(
    oracle: Oracle,
    x: Vector,
    *,
    gradient_tolerance: float,
    curvature_tolerance: float,
    confidence: float = DEFAULT_CONFIDENCE,
    max_products: int | None = None,
    seed: int = 0,
    thorough: bool = False,
    relative_error: float = _THOROUGH_ERROR,
    time_is_up: Callable[[], bool] = lambda: False,
) -> Exploration:
    """Return the certificate at x with its Krylov space.

    Lanczos stops as soon as the outcome is decided. If `thorough`, it continues until the error of λ_min is at most
    `relative_error`, or, in at most 100 dimensions, until the space is full. It also stops after the product at which
    `time_is_up` becomes true. The counters of the oracle do not include its products.
    """
    space = oracle.space
    _, g = oracle.gradient(x)
    tolerances = {"gradient_tolerance": gradient_tolerance, "curvature_tolerance": curvature_tolerance}
    if space.dim == 0:  # with bounds, if no variable is free
        exact = dict.fromkeys(("grad_norm", "error_bound", "ritz_error", "residual", "asymmetry"), 0.0)
        return Exploration(Certificate(**tolerances, **exact, lambda_min=math.inf, confidence=1.0, products=0), x)
    grad_norm = _norm(space, g)
    needed = relative_error if thorough else None
    with monitored_lanczos(oracle, x, seed) as process:
        krylov = process.krylov
        try:
            bound = _extend_until_decided(process, confidence, curvature_tolerance, max_products, needed, time_is_up)
        except NonFiniteProductError:
            cert = without_curvature(**tolerances, grad_norm=grad_norm, confidence=confidence, products=krylov.dim + 1)
            return Exploration(cert, process.start)
    cert = Certificate(
        **tolerances,
        grad_norm=grad_norm,
        lambda_min=process.unscaled(bound.ritz_value),
        error_bound=process.unscaled(bound.product_error if bound.is_full else bound.error),
        ritz_error=process.unscaled(bound.product_error),
        residual=process.unscaled(krylov.residual_of(bound.spectrum.vectors[:, 0])),
        asymmetry=process.unscaled(math.sqrt(process.asymmetry_squared)),
        confidence=1.0 if bound.is_full else confidence,
        products=krylov.dim,
    )
    return Exploration(cert, process.start, krylov, bound.spectrum, process.product_scale)


def _extend_until_decided(
    process: MonitoredLanczos,
    confidence: float,
    curvature_tolerance: float,
    max_products: int | None,
    relative_error: float | None,
    time_is_up: Callable[[], bool],
) -> CurvatureBound:
    """Extend the Krylov space until its bound on λ_min is decided or cannot be improved, and return that bound."""
    eigenvalue_lower_bound, is_large = -math.inf, process.space.dim > _MAX_FULL_SPACE_DIM
    for must_stop in process.extend_between_tests(max_products, _SPARSE_TEST_DIVISOR, time_is_up):
        bound = bound_curvature(process, confidence, eigenvalue_lower_bound)
        eigenvalue_lower_bound = bound.lower_bound
        is_decided = _is_decided(bound, process, curvature_tolerance * process.product_scale, relative_error)
        if must_stop or is_decided or (bound.cannot_improve and is_large):
            break
    return bound


def _is_decided(
    bound: CurvatureBound, process: MonitoredLanczos, tolerance: float, relative_error: float | None
) -> bool:
    """Return whether more products would not change the outcome or, with `relative_error`, λ_min beyond this error."""
    theta = bound.ritz_value
    if relative_error is not None:
        if process.space.dim <= _MAX_FULL_SPACE_DIM:
            return False
        is_tight = bound.error <= max(tolerance, relative_error * abs(theta))
        return is_tight and not -tolerance <= theta < bound.error - tolerance
    if bound.lower_bound >= -tolerance:
        return True
    has_converged = process.krylov.residual_of(bound.spectrum.vectors[:, 0]) <= _RITZ_RESIDUAL_TOLERANCE * abs(theta)
    return has_converged and theta + bound.product_error < -tolerance
