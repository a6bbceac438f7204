"""Curvature at a point from a random start: the certificate, both ends of the spectrum, and quadrature.

`sanc.core.spectrum.eigenvalue_bounds` has the bounds on eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core.oracle import Operator, Oracle
from sanc.core.space import Floats, Space, Vector
from sanc.core.spectrum import cubic
from sanc.core.spectrum.eigenvalue_bounds import (
    CurvatureBound,
    MonitoredLanczos,
    bound_curvature,
    is_below_roundoff,
    monitored_lanczos,
    start_vector,
)
from sanc.core.spectrum.krylov import Krylov, Lanczos, NonFiniteProductError

DEFAULT_CONFIDENCE = 0.99
"""Probability with which a certificate holds, if the caller chooses none."""
_DENSE_TEST_DIVISOR = 40
"""Both ends of a spectrum are bounded after each of the first 40 products, then at intervals of 2.5 %. A test costs
less than a product, and more than 40 products are needed in small dimensions only."""
_SPARSE_TEST_DIVISOR = 5
"""One end of a spectrum is bounded again after a fifth more products: a certificate that a few products do not decide
needs many."""
_RITZ_RESIDUAL_TOLERANCE = 0.1
"""Residual of a Ritz pair, relative to its value, below which it is an eigenvalue to a tenth."""
_THOROUGH_ERROR = 0.1
"""Relative error of λ_min up to which a thorough certificate continues by default."""
_MEASURED_ERRORS = 4
"""`find_extremes` measures the difference error of this many products, each for the cost of a product. Later ones use
the largest of these errors: all are products with unit vectors at one point, so that their errors hardly differ."""
_MAX_FULL_SPACE_DIM = 100
"""Largest dimension in which a thorough certificate uses the full space: 100 products are cheap there."""


@dataclass(frozen=True, slots=True)
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
    eps_gradient, eps_curvature : float
        The tolerances.
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
        return self.lambda_min + self.ritz_error < -self.eps_curvature

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
    eps_gradient: float,
    eps_curvature: float,
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
        eps_gradient=eps_gradient,
        eps_curvature=eps_curvature,
        confidence=confidence,
        max_products=max_products,
        seed=seed,
        thorough=thorough,
        time_is_up=time_is_up,
    )
    return explored.certificate, explored.leftmost_vector()


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
    eps_gradient: float,
    eps_curvature: float,
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
    if space.dim == 0:  # with bounds, if no variable is free
        return Exploration(Certificate(0.0, math.inf, 0.0, 0.0, 0.0, 0.0, 1.0, eps_gradient, eps_curvature, 0), x)
    common = {"grad_norm": _norm(space, g), "eps_gradient": eps_gradient, "eps_curvature": eps_curvature}
    needed = relative_error if thorough else None
    with monitored_lanczos(oracle, x, seed) as process:
        krylov = process.krylov
        try:
            bound = _extend_until_decided(process, confidence, eps_curvature, max_products, needed, time_is_up)
        except NonFiniteProductError:
            unknown = {"lambda_min": math.nan, "error_bound": math.inf, "ritz_error": math.inf, "residual": math.nan}
            cert = Certificate(**common, **unknown, asymmetry=0.0, confidence=confidence, products=krylov.dim + 1)
            return Exploration(cert, process.start)
    cert = Certificate(
        **common,
        lambda_min=process.unscaled(bound.ritz_value),
        error_bound=process.unscaled(bound.product_error if bound.is_full else bound.error),
        ritz_error=process.unscaled(bound.product_error),
        residual=process.unscaled(krylov.residual_of(bound.spectrum.vectors[:, 0])),
        asymmetry=process.unscaled(math.sqrt(process.asymmetry_squared)),
        confidence=1.0 if bound.is_full else confidence,
        products=krylov.dim,
    )
    return Exploration(cert, process.start, krylov, bound.spectrum, process.product_scale)


@dataclass(frozen=True, slots=True)
class Extremes:
    """Two-sided bounds on the extreme eigenvalues of a Hessian, and the Krylov space that they come from.

    Attributes
    ----------
    lambda_min, lambda_max : float
        Extreme Ritz values: λ_min is at most the first and λ_max at least the second, up to `ritz_error`.
    lower_bound, upper_bound : float
        λ_min ≥ `lower_bound` and λ_max ≤ `upper_bound`, both with probability `confidence` over the start vector.
    ritz_error : float
        Error of the Ritz values; infinite if the products are asymmetric beyond their errors.
    confidence : float
        The probability; 1 if the Krylov space is the whole space.
    products : int
        Hessian products.
    limited_by_roundoff : bool
        Whether roundoff keeps the bounds from the accuracy asked for. Then the Ritz values have small residuals.
    values, weights : array
        Ritz values and their weights in the quadrature of the spectrum: n Σ w_i h(θ_i) estimates Σ h(λ).
    krylov : Krylov
        The Krylov space.
    spectrum : Spectrum
        Eigenpairs of T.
    operator : Operator
        The Hessian, for products of a second pass.
    product_scale : float
        The power of two by which the products of `krylov` and `spectrum` were scaled.
    """

    lambda_min: float
    lambda_max: float
    lower_bound: float
    upper_bound: float
    ritz_error: float
    confidence: float
    products: int
    limited_by_roundoff: bool
    values: Floats
    weights: Floats
    krylov: Krylov
    spectrum: cubic.Spectrum
    operator: Operator
    product_scale: float

    @property
    def relative_residuals(self) -> Floats:
        """‖Hv − θv‖ / |θ| of each Ritz pair; infinite for a value of zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            residuals: Floats = self.krylov.last_beta * np.abs(self.spectrum.vectors[-1] / self.spectrum.values)
        return np.where(self.spectrum.values == 0.0, math.inf, residuals)

    def vectors(self, others: Sequence[int] = ()) -> list[Vector]:
        """Return the unit vectors of the left-most, the right-most and other Ritz pairs; `others` has the indices."""
        spectrum = self.spectrum
        chosen = [spectrum.leftmost_vector, spectrum.vectors[:, -1], *(spectrum.vectors[:, k] for k in others)]
        try:
            return self.krylov.combine(*chosen)
        finally:
            self.operator.release()


def find_extremes(
    oracle: Oracle,
    x: Vector,
    *,
    relative_error: float,
    confidence: float = DEFAULT_CONFIDENCE,
    max_products: int | None = None,
    seed: int = 0,
    store: bool = True,
    rough: bool = False,
    time_is_up: Callable[[], bool] = lambda: False,
    report: Callable[[int], None] = lambda products: None,
) -> Extremes:
    """Bound λ_min and λ_max at x, each to `relative_error` times the spectral norm.

    The bound of λ_max is the bound of λ_min for −B, which has the same Krylov space. Each of them may fail with half of
    the probability. If roundoff limits the bounds, Lanczos continues until the residuals of both Ritz pairs are as
    small. It also stops at the limit on products, and after the product at which `time_is_up` becomes true. A product
    that is not finite raises `NonFiniteProductError`.

    Unless `store`, Lanczos keeps three vectors, and `Extremes.vectors` computes all but one of the products again. Its
    vectors then lose orthogonality after the first Ritz value has converged. The bounds hold nevertheless: their
    derivation uses only the recurrence. Ritz values may have copies (Paige 1980), which share the weight of one.

    If `rough`, products may have a lower precision than their type, as under autocast. One more product measures it.
    """
    lower, upper, one_sided = -math.inf, math.inf, 0.5 * (1.0 + confidence)
    measured = _MEASURED_ERRORS if oracle.differenced_products else 0
    with monitored_lanczos(oracle, x, seed, store=store, rough=rough, measured_errors=_MEASURED_ERRORS) as process:
        krylov = process.krylov
        for must_stop in process.extend_between_tests(max_products, _DENSE_TEST_DIVISOR, time_is_up, report):
            bound = bound_curvature(process, one_sided, lower, sharp=store)
            mirrored = bound_curvature(process, one_sided, -upper, negated=True, sharp=store)
            lower, upper, norm = bound.lower, -mirrored.lower, bound.spectrum.norm
            loose = [end for end in (bound, mirrored) if not end.error <= relative_error * norm]
            is_tight = not loose
            at_roundoff = all(
                end.cannot_improve or is_below_roundoff(process, end, one_sided, relative_error * norm) for end in loose
            )
            residuals = [krylov.residual_of(bound.spectrum.vectors[:, end]) for end in (0, -1)]
            is_limited = at_roundoff and not is_tight and max(residuals) <= relative_error * norm
            if must_stop or is_tight or is_limited:
                break
    values = bound.spectrum.values
    return Extremes(
        lambda_min=process.unscaled(float(values[0])),
        lambda_max=process.unscaled(float(values[-1])),
        lower_bound=process.unscaled(lower),
        upper_bound=process.unscaled(upper),
        ritz_error=process.unscaled(bound.product_error),
        confidence=1.0 if bound.is_full else confidence,
        products=krylov.dim + rough + min(measured, krylov.dim),
        limited_by_roundoff=is_limited,
        values=values / process.product_scale,
        weights=bound.spectrum.vectors[0] ** 2,
        krylov=krylov,
        spectrum=bound.spectrum,
        operator=process.operator,
        product_scale=process.product_scale,
    )


def quadrature(
    oracle: Oracle,
    x: Vector,
    seed: int,
    *,
    max_dim: int,
    suffices: Callable[[Floats, Floats], bool],
    store: bool = True,
    without: Sequence[Vector] = (),
) -> tuple[Floats, Floats]:
    """Return α and β of Lanczos iterations with the Hessian at x from a random start, as long as they do not suffice.

    With the eigenpairs (θ, u) of the tridiagonal matrix, n Σ u_1² h(θ) estimates Σ h(λ) (stochastic Lanczos quadrature:
    Ubaru, Chen and Saad 2017). The last β belongs to no entry of the matrix; it is 0 if the Krylov space is invariant.
    `without` are orthonormal vectors to whose complement the Hessian is restricted. Unless `store`, Lanczos keeps three
    vectors and does not reorthogonalise.
    """
    space = oracle.space

    def projected(v: Any) -> Any:
        for w in without:
            space.subtract(v, space.inner(w, v), w)
        return v

    with oracle.uncounted():
        operator = oracle.hessian(x)
        draw = start_vector(space, seed)
        options: dict[str, Any] = {"max_dim": min(max_dim, space.dim - len(without)), "store": store}
        options |= {"reorthogonalise": store, "redraw": lambda: projected(draw())}
        krylov = Krylov(Lanczos(lambda v: projected(operator(v)), projected(draw()), space, **options))
        try:
            while not krylov.is_complete:
                krylov.extend()
                if suffices(np.array(krylov.alpha), np.array(krylov.beta)):
                    break
        finally:
            operator.release()
    return np.array(krylov.alpha), np.array(krylov.beta)


def _extend_until_decided(
    process: MonitoredLanczos,
    confidence: float,
    eps_curvature: float,
    max_products: int | None,
    relative_error: float | None,
    time_is_up: Callable[[], bool],
) -> CurvatureBound:
    """Extend the Krylov space until its bound on λ_min is decided or cannot be improved, and return that bound."""
    lower, is_large = -math.inf, process.space.dim > _MAX_FULL_SPACE_DIM
    for must_stop in process.extend_between_tests(max_products, _SPARSE_TEST_DIVISOR, time_is_up):
        bound = bound_curvature(process, confidence, lower)
        lower = bound.lower
        is_decided = _is_decided(bound, process, eps_curvature * process.product_scale, relative_error)
        if must_stop or is_decided or (bound.cannot_improve and is_large):
            break
    return bound


def _is_decided(
    bound: CurvatureBound, process: MonitoredLanczos, tolerance: float, relative_error: float | None
) -> bool:
    """Whether further products would not change the outcome or, with `relative_error`, λ_min beyond this error."""
    theta = bound.ritz_value
    if relative_error is not None:
        if process.space.dim <= _MAX_FULL_SPACE_DIM:
            return False
        is_tight = bound.error <= max(tolerance, relative_error * abs(theta))
        return is_tight and not -tolerance <= theta < bound.error - tolerance
    if bound.lower >= -tolerance:
        return True
    has_converged = process.krylov.residual_of(bound.spectrum.vectors[:, 0]) <= _RITZ_RESIDUAL_TOLERANCE * abs(theta)
    return has_converged and theta + bound.product_error < -tolerance
