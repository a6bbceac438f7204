"""A probe for negative curvature at a point from a random start, and a bound on eigenvalues that it may have missed.

Lanczos with products that have the error F gives B Q = Q T + β q_{k+1} e_kᵀ + F. For an eigenpair (λ, v) of B with
λ < θ_1, the left-most Ritz value, w = Qᵀv therefore solves (T − λ) w = −β (vᵀq_{k+1}) e_k − Fᵀv, and w_1 = vᵀq_1 is the
component of the start along v:

    |vᵀq_1| ≤ β |e_1ᵀ(T − λ)⁻¹e_k| + ‖F‖ ‖(T − λ)⁻¹e_1‖,   β |e_1ᵀ(T − λ)⁻¹e_k| = β_1 ⋯ β_k / Π(θ_i − λ).

The right side decreases as λ does, and a random start has a component of at least t √(π/2n) along any fixed v with
probability 1 − t: with that probability no λ for which the right side is smaller is an eigenvalue. Roundoff counts too:
if Lanczos breaks down early, a missed eigenvalue may be far below θ_1 − β.

The factor |vᵀq_{k+1}| ≤ 1 was dropped from the first term. If Q and q_{k+1} are orthonormal, ‖w‖² + (vᵀq_{k+1})² ≤ 1
bounds it by (1 + ‖F‖/(θ_1 − λ)) / √(1 + β² ‖(T − λ)⁻¹e_k‖²). Without F this is the Christoffel function at λ, the
largest weight that any measure with the same T and β may have there, so no better bound exists.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core import cubic
from sanc.core.consistency import NONLINEARITY_FACTOR, measure_nonlinearity
from sanc.core.krylov import Krylov, Lanczos, NonFiniteProductError
from sanc.core.oracle import Operator, Oracle
from sanc.core.space import ROUNDING_ERRORS, Floats, Space, Vector

_GRID = np.linspace(0.0, 1.0, 65)[:, None]
"""Positions of trial shifts between two bounds. Two passes over 65 shifts determine the bound to one per cent."""

_SAFE_EXPONENT = 500
"""Products are scaled if the exponent of their norm reaches ±500; otherwise squares are in the range of float64."""
_FIRST_TEST_DIM = 4
"""Products before the first bound: with fewer it rarely suffices, and asymmetry shows from the second product on."""
_DENSE_TESTS = 40
"""Both ends of a spectrum are bounded after each of the first 40 products, then at intervals of 2.5 %. A test costs
less than a product, and more than 40 products are needed in small dimensions only."""
_MEASURED_ERRORS = 4
"""Products of `find_extremes` whose difference error is measured, which costs as much as a product. The others count
with the largest of these errors: all have unit vectors at one point, so that their errors hardly differ."""
_ROUGH_FACTOR = 1.0 / 3.0
"""Factor of the second product that measures precision: it is no power of two, so that it changes all roundoff."""
_HOST_DRAWS = 2**24
"""Largest dimension in which start vectors are drawn on the host, equal for all devices: a tenth of a second."""
_SMALL_DIM = 100
"""Largest dimension in which a thorough certificate uses the full space: 100 products are cheap there."""
_LARGEST_EXPONENT = 1000
"""Largest exponent of that scale: 2^1000 and its inverse are normal numbers, and raise any subnormal above 2^-80."""


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
    time_is_up: Callable[[], bool] = lambda: False,
) -> tuple[Certificate, Vector]:
    """Return the certificate at x, and the unit vector of the left-most Ritz pair; see `explore`."""
    explored = explore(
        oracle,
        x,
        eps=eps,
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
    factor : float
        The power of two by which the products were scaled.
    """

    certificate: Certificate
    start: Vector
    krylov: Krylov | None = None
    spectrum: cubic.Spectrum | None = None
    factor: float = 1.0

    def leftmost_vector(self) -> Vector:
        """Return the unit vector of the left-most Ritz pair; the start vector if a product was not finite."""
        if self.krylov is None or self.spectrum is None:
            return self.start
        (v,) = self.krylov.combine(self.spectrum.leftmost_vector)
        return v

    def ritz_pairs(self, choose: Callable[[Floats, Floats], Sequence[int]]) -> tuple[Floats, list[Vector]]:
        """Return Ritz values and vectors; `choose` selects them by the ascending values and their residual norms."""
        if self.krylov is None or self.spectrum is None:
            return np.empty(0), []
        values = self.spectrum.values / self.factor
        residuals = self.krylov.last_beta / self.factor * np.abs(self.spectrum.vectors[-1])
        chosen = list(choose(values, residuals))
        return values[chosen], self.krylov.combine(*self.spectrum.vectors[:, chosen].T) if chosen else []


def explore(
    oracle: Oracle,
    x: Vector,
    *,
    eps: float,
    eps_curvature: float,
    confidence: float = 0.99,
    max_products: int | None = None,
    seed: int = 0,
    thorough: bool = False,
    relative_error: float = 0.1,
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
        return Exploration(Certificate(0.0, math.inf, 0.0, 0.0, 0.0, 0.0, 1.0, eps, eps_curvature, 0), x)
    common = {"grad_norm": space.norm(g), "eps_gradient": eps, "eps_curvature": eps_curvature}
    start = space.normal(np.random.default_rng((seed, space.dim)))
    needed = relative_error if thorough else None
    with oracle.uncounted():
        process = _MonitoredLanczos(oracle.hessian(x), lambda: start, space)
        krylov, max_dim = process.krylov, min(space.dim, max_products or affordable_dim(space.dim))
        try:
            bound = _extend_until_decided(process, confidence, eps_curvature, max_dim, needed, time_is_up)
        except NonFiniteProductError:
            unknown = {"lambda_min": math.nan, "error_bound": math.inf, "rounding": math.inf, "residual": math.nan}
            cert = Certificate(**common, **unknown, asymmetry=0.0, confidence=confidence, products=krylov.dim + 1)
            return Exploration(cert, start)
        finally:
            process.operator.release()
    cert = Certificate(
        **common,
        lambda_min=process.unscaled(bound.ritz_value),
        error_bound=process.unscaled(bound.rounding if bound.is_full else bound.error),
        rounding=process.unscaled(bound.rounding),
        residual=process.unscaled(krylov.residual_of(bound.spectrum.leftmost_vector)),
        asymmetry=process.unscaled(math.sqrt(process.asymmetry_squared)),
        confidence=1.0 if bound.is_full else confidence,
        products=krylov.dim,
    )
    return Exploration(cert, start, krylov, bound.spectrum, process.factor)


@dataclass(frozen=True, slots=True)
class Extremes:
    """Two-sided bounds on the extreme eigenvalues of a Hessian, and the Krylov space that they come from.

    Attributes
    ----------
    lambda_min, lambda_max : float
        Extreme Ritz values: λ_min is at most the first and λ_max at least the second, up to `rounding`.
    lower_bound, upper_bound : float
        λ_min ≥ `lower_bound` and λ_max ≤ `upper_bound`, both with probability `confidence` over the start vector.
    rounding : float
        Error of the Ritz values.
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
    """

    lambda_min: float
    lambda_max: float
    lower_bound: float
    upper_bound: float
    rounding: float
    confidence: float
    products: int
    limited_by_roundoff: bool
    values: Floats
    weights: Floats
    krylov: Krylov
    spectrum: cubic.Spectrum
    operator: Operator

    def vectors(self) -> list[Vector]:
        """Return the unit vectors of the left-most and the right-most Ritz pair."""
        try:
            return self.krylov.combine(self.spectrum.leftmost_vector, self.spectrum.vectors[:, -1])
        finally:
            self.operator.release()


def find_extremes(
    oracle: Oracle,
    x: Vector,
    *,
    relative_error: float,
    confidence: float = 0.99,
    max_products: int | None = None,
    seed: int = 0,
    store: bool = True,
    rough: bool = False,
    time_is_up: Callable[[], bool] = lambda: False,
    report: Callable[[int], None] = lambda products: None,
) -> Extremes:
    """Bound λ_min and λ_max at x, each to `relative_error` times the spectral norm.

    The bound of λ_max is that of λ_min for −B, which has the same Krylov space. Each of them may fail with half of the
    probability. If roundoff limits the bounds, Lanczos continues until the residuals of both Ritz pairs are as small.
    It also stops at the limit on products, and after the product at which `time_is_up` becomes true. A product that is
    not finite raises `NonFiniteProductError`.

    Unless `store`, Lanczos keeps three vectors, and `Extremes.vectors` computes all but one of the products again. Its
    vectors then lose orthogonality after the first Ritz value has converged. The bounds hold nevertheless: their
    derivation uses the recurrence alone. Ritz values may have copies (Paige 1980), whose weights share that of one.

    If `rough`, products may have a lower precision than their type, as under autocast. One more product measures it.
    """
    space = oracle.space
    with oracle.uncounted():
        process = _MonitoredLanczos(
            oracle.hessian(x),
            _start_vector(space, seed),
            space,
            store=store,
            rough=rough,
            measured_errors=_MEASURED_ERRORS,
        )
        krylov, one_sided = process.krylov, 0.5 * (1.0 + confidence)
        max_dim = min(space.dim, max_products or affordable_dim(space.dim))
        next_test_dim, lower, upper = _FIRST_TEST_DIM, -math.inf, math.inf
        try:
            while True:
                process.extend()
                report(krylov.dim)
                must_stop = krylov.dim >= max_dim or krylov.is_invariant or time_is_up()
                if must_stop or krylov.dim >= next_test_dim:
                    bound = _bound_curvature(process, one_sided, lower, sharp=store)
                    mirrored = _bound_curvature(process, one_sided, -upper, negated=True, sharp=store)
                    lower, upper, norm = bound.lower, -mirrored.lower, bound.spectrum.norm
                    loose = [end for end in (bound, mirrored) if not end.error <= relative_error * norm]
                    is_tight = not loose
                    at_roundoff = all(
                        end.limited_by_roundoff or _is_below_roundoff(process, end, one_sided, relative_error * norm)
                        for end in loose
                    )
                    residuals = [krylov.residual_of(bound.spectrum.vectors[:, end]) for end in (0, -1)]
                    if must_stop or is_tight or (at_roundoff and max(residuals) <= relative_error * norm):
                        break
                    next_test_dim = krylov.dim + 1 + krylov.dim // _DENSE_TESTS
        finally:
            process.operator.release()
    values = bound.spectrum.values
    return Extremes(
        lambda_min=process.unscaled(float(values[0])),
        lambda_max=process.unscaled(float(values[-1])),
        lower_bound=process.unscaled(lower),
        upper_bound=process.unscaled(upper),
        rounding=process.unscaled(bound.rounding),
        confidence=1.0 if bound.is_full else confidence,
        products=krylov.dim + rough,
        limited_by_roundoff=at_roundoff and not is_tight,
        values=values / process.factor,
        weights=bound.spectrum.vectors[0] ** 2,
        krylov=krylov,
        spectrum=bound.spectrum,
        operator=process.operator,
    )


def quadrature(oracle: Oracle, x: Vector, steps: int, seed: int, *, store: bool = True) -> tuple[Floats, Floats]:
    """Return nodes and weights of the spectrum at x, from `steps` Lanczos iterations at a random start.

    n Σ w_i h(θ_i) estimates Σ h(λ) (stochastic Lanczos quadrature: Ubaru, Chen and Saad 2017). Unless `store`, Lanczos
    keeps three vectors and does not reorthogonalise.
    """
    space = oracle.space
    with oracle.uncounted():
        operator = oracle.hessian(x)
        draw = _start_vector(space, seed)
        options: dict[str, Any] = {"max_dim": steps, "store": store, "reorthogonalise": store, "redraw": draw}
        krylov = Krylov(Lanczos(operator, draw(), space, **options))
        try:
            while not krylov.is_complete:
                krylov.extend()
        finally:
            operator.release()
    spectrum = cubic.compute_spectrum(*krylov.tridiagonal())
    return spectrum.values, spectrum.vectors[0] ** 2


def _start_vector(space: Space, seed: int) -> Callable[[], Vector]:
    """Return a function that draws the random start vector of a seed."""
    if space.dim > _HOST_DRAWS:
        return lambda: space.normal_on_device(seed)
    return lambda: space.normal(np.random.default_rng((seed, space.dim)))


def _extend_until_decided(
    process: _MonitoredLanczos,
    confidence: float,
    eps_curvature: float,
    max_dim: int,
    relative_error: float | None,
    time_is_up: Callable[[], bool],
) -> _CurvatureBound:
    """Extend the Krylov space until its bound on λ_min is decided or cannot be improved, and return that bound."""
    krylov, dim = process.krylov, process.space.dim
    next_test_dim = _FIRST_TEST_DIM
    lower = -math.inf
    while True:
        process.extend()
        must_stop = krylov.dim >= max_dim or krylov.is_invariant or time_is_up()
        if not must_stop and krylov.dim < next_test_dim:
            continue
        bound = _bound_curvature(process, confidence, lower)
        lower = bound.lower
        is_decided = _is_decided(bound, process, eps_curvature * process.factor, relative_error)
        if must_stop or is_decided or (bound.limited_by_roundoff and dim > _SMALL_DIM):
            return bound
        next_test_dim = krylov.dim + 1 + krylov.dim // 5


@dataclass(frozen=True, slots=True)
class _CurvatureBound:
    """Bounds on λ_min from a Krylov space, in the units of its products.

    Attributes
    ----------
    spectrum : Spectrum
        Eigenpairs of T.
    rounding : float
        ‖F‖, the error of the products.
    lower : float
        A lower bound of λ_min, the largest of this space and of smaller ones.
    is_full : bool
        Whether the Krylov space is the whole space, so that no eigenvalue can be missed.
    limited_by_roundoff : bool
        Whether further products would not improve the bound.
    """

    spectrum: cubic.Spectrum
    rounding: float
    lower: float
    is_full: bool
    limited_by_roundoff: bool

    @property
    def ritz_value(self) -> float:
        """The left-most Ritz value, θ_1."""
        return self.spectrum.leftmost

    @property
    def error(self) -> float:
        """θ_1 minus the lower bound."""
        return self.spectrum.leftmost - self.lower


def _bound_curvature(
    process: _MonitoredLanczos, confidence: float, lower: float, *, negated: bool = False, sharp: bool = False
) -> _CurvatureBound:
    """Return the bounds from the current Krylov space, given the lower bound from smaller ones.

    If `negated`, they are those of −B. If `sharp`, they use that the Lanczos vectors are orthonormal.
    """
    krylov, dim = process.krylov, process.space.dim
    spectrum = cubic.compute_spectrum(*krylov.tridiagonal())
    if negated:
        spectrum = cubic.Spectrum(-spectrum.values[::-1], spectrum.vectors[:, ::-1])
    rounding = process.error(float(np.max(np.abs(spectrum.values))))
    is_full = krylov.dim == dim
    if is_full:
        error, limited_by_roundoff = rounding, True
    else:
        error, limited_by_roundoff = _bound_missed_eigenvalues(spectrum, krylov, dim, rounding, confidence, sharp)
    if spectrum.leftmost - rounding < lower:
        lower = -math.inf  # the new Ritz value contradicts the earlier bound
    # All bounds hold on one event: the component of the start along v is at least t √(π/2n). So the largest of them
    # holds too.
    lower = max(lower, spectrum.leftmost - error)
    return _CurvatureBound(spectrum, rounding, lower, is_full, limited_by_roundoff)


def _is_decided(
    bound: _CurvatureBound, process: _MonitoredLanczos, tolerance: float, relative_error: float | None
) -> bool:
    """Whether further products would not change the outcome or, with `relative_error`, λ_min beyond this error."""
    theta = bound.ritz_value
    if relative_error is not None:
        is_tight = process.space.dim > _SMALL_DIM and bound.error <= max(tolerance, relative_error * abs(theta))
        return is_tight and not -tolerance <= theta < bound.error - tolerance
    has_converged = process.krylov.residual_of(bound.spectrum.leftmost_vector) <= 0.1 * abs(theta)
    is_saddle = has_converged and theta + bound.rounding < -tolerance
    return is_saddle or bound.lower >= -tolerance


class _MonitoredLanczos:
    """A Lanczos process that measures the errors of its products.

    Attributes
    ----------
    difference_error_squared : float
        Sum of the squared errors of differences of gradients.
    asymmetry_squared : float
        Sum of the squared projections that reorthogonalisation removed and that are zero for a symmetric matrix: those
        on all but the last two vectors, and the excess over β on the last but one.
    neglected_beta : float
        The last β, if it was treated as roundoff.
    factor : float
        A power of two by which the products are scaled if their squares would overflow or underflow; otherwise 1. All
        numbers of the Krylov space and the attributes above are in these units.
    """

    def __init__(
        self, operator: Operator, start: Callable[[], Vector], space: Space, *, store: bool = True, rough: bool = False,
        measured_errors: int | None = None,
    ) -> None:  # fmt: skip
        self.operator, self.space, self._is_rough = operator, space, rough
        self._product_error = 0.0  # of products with a lower precision than their type
        self._measured_errors, self._largest_error = measured_errors, 0.0  # of differences of gradients
        redraw = None if store else start
        self.lanczos = Lanczos(self._product, start(), space, store=store, reorthogonalise=store, redraw=redraw)
        self.krylov = Krylov(self.lanczos)
        self.difference_error_squared = self.asymmetry_squared = self.neglected_beta = 0.0
        self.factor = 1.0
        self._nonlinearity: float | None = None  # of products with unit vectors, if it was measured

    def _product(self, q: Vector) -> Vector:
        """Return the scaled product with q, and add its error; the first product determines the scale."""
        product = self.operator(q)
        if self._is_rough and not self.lanczos.columns:
            again = self.operator(q * _ROUGH_FACTOR)
            self._product_error = self.space.norm(again / _ROUGH_FACTOR - product)
        if self._measured_errors is None or len(self.lanczos.columns) < self._measured_errors:
            error = self.operator.error(q, product)
            self._largest_error = max(self._largest_error, error)
        else:
            error = self._largest_error
        error += self._product_error
        if not self.lanczos.columns:
            self.factor = _power_of_two(self.space.norm(product))
        self.difference_error_squared += (error * self.factor) * (error * self.factor)
        return product if self.factor == 1.0 else product * self.factor

    def unscaled(self, number: float) -> float:
        """Return a number of the Krylov space in the units of the Hessian; a finite number remains finite."""
        unscaled = number / self.factor
        if math.isinf(unscaled) and not math.isinf(number):
            return math.copysign(sys.float_info.max, unscaled)
        return unscaled

    def extend(self) -> None:
        """Make one Lanczos iteration and update the asymmetry."""
        previous_beta = self.krylov.last_beta
        self.krylov.extend()
        if self.krylov.is_invariant:
            self.neglected_beta = float(self.lanczos.columns[-1][1])
        if self.lanczos.projections is None:  # vectors that are not kept cannot show asymmetry
            return
        *deviations, _ = self.space.read([self.lanczos.projections])  # without the last one, α
        if deviations:
            deviations[-1] -= previous_beta
        self.asymmetry_squared += sum(deviation * deviation for deviation in deviations)

    def error(self, hessian_norm: float) -> float:
        """Return ‖F‖; infinite if the Hessian is asymmetric beyond the errors of products.

        Products of low precision, or differences that the caller computes, are asymmetric and also nonlinear. A wrong
        Hessian is linear. So if the asymmetry exceeds roundoff, the nonlinearity is measured and counts as an error.
        """
        dim, eps = self.krylov.dim, self.space.eps
        allowed = dim * eps * hessian_norm * hessian_norm + 10.0 * self.difference_error_squared
        nonlinear_error_squared = 0.0
        if self.asymmetry_squared > allowed:
            if self._nonlinearity is None:
                self._nonlinearity = measure_nonlinearity(self.operator, self.space) * self.factor
            nonlinear_error_squared = dim * (NONLINEARITY_FACTOR * self._nonlinearity) ** 2
            if not self.asymmetry_squared <= allowed + nonlinear_error_squared:
                return math.inf
        rounding = math.hypot(math.sqrt(dim) * (ROUNDING_ERRORS * eps * hessian_norm), self.neglected_beta)
        return math.sqrt(
            rounding * rounding + self.difference_error_squared + self.asymmetry_squared + nonlinear_error_squared
        )


def _power_of_two(norm: float) -> float:
    """Return the factor that moves `norm` near 1 if its square would overflow or underflow, otherwise 1."""
    exponent = math.frexp(norm)[1] if 0.0 < norm < math.inf else 0
    if abs(exponent) < _SAFE_EXPONENT:
        return 1.0
    return math.ldexp(1.0, -max(-_LARGEST_EXPONENT, min(exponent, _LARGEST_EXPONENT)))


def affordable_dim(dim: int) -> int:
    """Return the number of basis vectors that fit 400 MB in float64, at least 50 and at most 1000."""
    return min(1000, max(50, 50_000_000 // dim))


def _is_below_roundoff(process: _MonitoredLanczos, bound: _CurvatureBound, confidence: float, error: float) -> bool:
    """Whether roundoff alone keeps every bound on λ_min from this error, however many products follow."""
    if bound.is_full or not error > 0.0:
        return False
    gaps = bound.spectrum.values - bound.spectrum.leftmost
    rounding_term = bound.rounding * float(np.linalg.norm(bound.spectrum.vectors[0] / (gaps + error)))
    return not rounding_term < _start_component(process.space.dim, confidence)


def _start_component(dim: int, confidence: float) -> float:
    """Return t √(π/2n): a random start has a larger component along a fixed vector with probability `confidence`."""
    return (1.0 - confidence) * math.sqrt(math.pi / (2 * dim))


def _bound_missed_eigenvalues(
    spectrum: cubic.Spectrum, krylov: Krylov, dim: int, rounding: float, confidence: float, sharp: bool
) -> tuple[float, bool]:
    """Return the bound on θ_1 − λ_min of this module's docstring, and whether roundoff alone limits it."""
    if rounding == math.inf:
        return math.inf, True
    start_component = _start_component(dim, confidence)
    log_beta_product = sum(map(math.log, krylov.beta)) if krylov.last_beta > 0.0 else -math.inf
    gaps, first_entries, last_entries = spectrum.values - spectrum.leftmost, spectrum.vectors[0], spectrum.vectors[-1]

    def residual_term(shifts: Any) -> Any:
        """Return β |e_1ᵀ(T − λ)⁻¹e_k| for λ = θ_1 − shift, times the bound of |vᵀq_{k+1}| if it is sharp."""
        logarithm = log_beta_product - np.log(gaps + shifts).sum(-1, keepdims=True)
        if sharp:
            tail = krylov.last_beta * np.linalg.norm(last_entries / (gaps + shifts), axis=-1, keepdims=True)
            logarithm = logarithm + np.minimum(np.log1p(rounding / shifts) - np.log(np.hypot(1.0, tail)), 0.0)
        return np.exp(np.minimum(logarithm, 0.0))

    high = (krylov.last_beta + rounding) / start_component  # eigenvalues below θ_1 − high are excluded
    low = max(rounding, 1e-16 * high)
    for _ in range(2 if high > 0.0 else 0):  # to one per cent, rounded to the safe side
        shifts = low * (high / low) ** _GRID
        rounding_term = rounding * np.linalg.norm(first_entries / (gaps + shifts), axis=-1, keepdims=True)
        component_bound = residual_term(shifts) + rounding_term  # it decreases as the shift grows
        possible_count = int(np.sum(~(component_bound < start_component)))
        low = float(shifts[max(possible_count - 1, 0), 0])
        high = float(shifts[min(possible_count, len(shifts) - 1), 0])
    bound = max(low, high)
    return bound, krylov.last_beta == 0.0 or float(residual_term(bound)[0]) < 0.01 * start_component
