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
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sanc.core.oracle import Operator, Oracle
from sanc.core.space import ROUNDING_ERRORS, Floats, Space, Vector
from sanc.core.spectrum import cubic
from sanc.core.spectrum.krylov import Krylov, Lanczos
from sanc.core.spectrum.product_errors import ASYMMETRY_FACTOR, NONLINEARITY_FACTOR, measure_nonlinearity

_SHIFT_GRID = np.linspace(0.0, 1.0, 65)
"""Positions of trial shifts between two bounds. Two passes over 65 shifts determine the bound to one per cent."""

_MAX_UNSCALED_EXPONENT = 500
"""Products are scaled if the exponent of their largest entry reaches ±500; otherwise squares do not overflow."""
_MAX_SCALE_EXPONENT = 1000
"""Largest exponent of that scale: 2^1000 and its inverse are normal numbers, and raise any subnormal above 2^-80."""
_MIN_BOUND_DIM = 4
"""Products before the first bound: with fewer it rarely suffices, and asymmetry shows from the second product on."""
_PRECISION_PROBE_FACTOR = 1.0 / 3.0
"""Factor of the second product that measures precision: it is no power of two, so that it changes all roundoff."""
_MAX_BASIS_ENTRIES, _BASIS_DIM_RANGE = 50_000_000, (50, 1000)
"""Entries of a stored basis, 400 MB in float64, and the least and the largest number of its vectors."""
_MIN_SHIFT_RATIO = 1e-16
"""The first lower limit of trial shifts, relative to the upper one: the precision of float64."""
_NEGLIGIBLE_RESIDUAL_FRACTION = 0.01
"""Share of the residual in a bound below which roundoff alone limits it: the accuracy of the bound itself."""
_MAX_HOST_DRAW_DIM = 2**24
"""Largest dimension in which start vectors are drawn on the host, equal for all devices: a tenth of a second."""


class MonitoredLanczos:
    """A Lanczos process that measures the errors of its products.

    Attributes
    ----------
    start : vector or None
        The start vector, if the basis is stored.
    difference_error_squared : float
        Sum of the squared errors of differences of gradients.
    asymmetry_squared : float
        Sum of the squares of projections that are zero for a symmetric matrix: those on all but the last two vectors
        that reorthogonalisation removed, and the excess over β on the last but one.
    neglected_beta : float
        The last β, if it was treated as roundoff.
    product_scale : float
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
        first = start()
        self.start: Any = first if store else None
        redraw = None if store else start
        options: dict[str, Any] = {"store": store, "reorthogonalise": store, "project": True}
        self.lanczos = Lanczos(self._product, first, space, **options, redraw=redraw)
        self.krylov = Krylov(self.lanczos)
        self.difference_error_squared = self.asymmetry_squared = self.neglected_beta = 0.0
        self.product_scale = 1.0
        self._nonlinearity: float | None = None  # of products with unit vectors, if it was measured

    def _product(self, q: Vector) -> Vector:
        """Return the scaled product with q, and add its error; the first product determines the scale."""
        product = self.operator(q)
        if self._is_rough and not self.lanczos.columns:
            again = self.operator(q * _PRECISION_PROBE_FACTOR)
            self._product_error = self.space.norm(again / _PRECISION_PROBE_FACTOR - product)
        if self._measured_errors is None or len(self.lanczos.columns) < self._measured_errors:
            error = self.operator.error(q, product)
            self._largest_error = max(self._largest_error, error)
        else:
            error = self._largest_error
        error += self._product_error
        if not self.lanczos.columns:
            self.product_scale = _power_of_two(self.space.largest_entry(product))  # the norm may overflow
        self.difference_error_squared += (error * self.product_scale) * (error * self.product_scale)
        return product if self.product_scale == 1.0 else product * self.product_scale

    def unscaled(self, number: float) -> float:
        """Return a number of the Krylov space in the units of the Hessian; a finite number remains finite."""
        unscaled = number / self.product_scale
        if math.isinf(unscaled) and not math.isinf(number):
            return math.copysign(sys.float_info.max, unscaled)
        return unscaled

    def extend(self) -> None:
        """Make one Lanczos iteration and update the asymmetry."""
        previous_beta = self.krylov.last_beta
        self.krylov.extend()
        if self.krylov.is_invariant:
            self.neglected_beta = float(self.lanczos.columns[-1][1])
        *deviations, _ = self.space.read(self.lanczos.projections)  # without the last one, α
        if deviations:
            deviations[-1] -= previous_beta
        self.asymmetry_squared += sum(deviation * deviation for deviation in deviations)

    def extend_between_tests(
        self,
        max_products: int | None,
        test_divisor: int,
        time_is_up: Callable[[], bool],
        report: Callable[[int], None] = lambda products: None,
    ) -> Iterator[bool]:
        """Extend the Krylov space, and yield where its bounds are tested: whether no further product may follow.

        The first test is made after `_MIN_BOUND_DIM` products, and the next one after 1 + dim // `test_divisor` more.
        Without `max_products`, the limit is `affordable_dim`. `report` is called with the number of products.
        """
        krylov, dim = self.krylov, self.space.dim
        max_dim, next_test_dim = min(dim, max_products or affordable_dim(dim)), _MIN_BOUND_DIM
        must_stop = False
        while not must_stop:
            self.extend()
            report(krylov.dim)
            must_stop = krylov.dim >= max_dim or krylov.is_invariant or time_is_up()
            if must_stop or krylov.dim >= next_test_dim:
                yield must_stop
                next_test_dim = krylov.dim + 1 + krylov.dim // test_divisor

    def error(self, hessian_norm: float) -> float:
        """Return ‖F‖; infinite if the Hessian is asymmetric beyond the errors of products.

        Products of low precision, or differences that the caller computes, are asymmetric and also nonlinear. A wrong
        Hessian is linear. So if the asymmetry exceeds roundoff, the nonlinearity is measured and counts as an error.
        """
        dim, eps = self.krylov.dim, self.space.eps
        allowed = dim * eps * hessian_norm * hessian_norm + ASYMMETRY_FACTOR * self.difference_error_squared
        nonlinear_error_squared = 0.0
        if self.asymmetry_squared > allowed:
            if self._nonlinearity is None:
                self._nonlinearity = measure_nonlinearity(self.operator, self.space) * self.product_scale
            nonlinear_error_squared = dim * (NONLINEARITY_FACTOR * self._nonlinearity) ** 2
            if not self.asymmetry_squared <= allowed + nonlinear_error_squared:
                return math.inf
        rounding = math.hypot(math.sqrt(dim) * (ROUNDING_ERRORS * eps * hessian_norm), self.neglected_beta)
        return math.sqrt(
            rounding * rounding + self.difference_error_squared + self.asymmetry_squared + nonlinear_error_squared
        )


@contextmanager
def monitored_lanczos(oracle: Oracle, x: Vector, seed: int, **options: Any) -> Iterator[MonitoredLanczos]:
    """Provide a Lanczos process on the Hessian at x from a random start; its products are not counted."""
    with oracle.uncounted():
        process = MonitoredLanczos(oracle.hessian(x), start_vector(oracle.space, seed), oracle.space, **options)
        try:
            yield process
        finally:
            process.operator.release()


def start_vector(space: Space, seed: int) -> Callable[[], Vector]:
    """Return a function that draws the random start vector of a seed."""
    if space.dim > _MAX_HOST_DRAW_DIM:
        return lambda: space.normal_on_device(seed)
    return lambda: space.normal(np.random.default_rng((seed, space.dim)))


def _power_of_two(magnitude: float) -> float:
    """Return the factor that moves `magnitude` near 1 if its square would overflow or underflow, otherwise 1."""
    exponent = math.frexp(magnitude)[1] if 0.0 < magnitude < math.inf else 0
    if abs(exponent) < _MAX_UNSCALED_EXPONENT:
        return 1.0
    return math.ldexp(1.0, -max(-_MAX_SCALE_EXPONENT, min(exponent, _MAX_SCALE_EXPONENT)))


def affordable_dim(dim: int) -> int:
    """Return how many basis vectors fit into `_MAX_BASIS_ENTRIES`, within the limits of `_BASIS_DIM_RANGE`."""
    least, most = _BASIS_DIM_RANGE
    return min(most, max(least, _MAX_BASIS_ENTRIES // dim))


@dataclass(frozen=True, slots=True)
class CurvatureBound:
    """Bounds on λ_min from a Krylov space, in the units of its products.

    Attributes
    ----------
    spectrum : Spectrum
        Eigenpairs of T.
    product_error : float
        ‖F‖, the error of the products.
    lower : float
        A lower bound of λ_min, the largest of this space and of smaller ones.
    is_full : bool
        Whether the Krylov space is the whole space, so that no eigenvalue can be missed.
    cannot_improve : bool
        Whether further products would not improve the bound.
    """

    spectrum: cubic.Spectrum
    product_error: float
    lower: float
    is_full: bool
    cannot_improve: bool

    @property
    def ritz_value(self) -> float:
        """The left-most Ritz value, θ_1."""
        return self.spectrum.leftmost

    @property
    def error(self) -> float:
        """θ_1 minus the lower bound."""
        return self.spectrum.leftmost - self.lower


def bound_curvature(
    process: MonitoredLanczos, confidence: float, lower: float, *, negated: bool = False, sharp: bool = False
) -> CurvatureBound:
    """Return the bounds from the current Krylov space, given the lower bound from smaller ones.

    If `negated`, they are bounds of −B. If `sharp`, they use that the Lanczos vectors are orthonormal.
    """
    krylov, dim = process.krylov, process.space.dim
    spectrum = cubic.compute_spectrum(*krylov.tridiagonal())
    if negated:
        spectrum = cubic.Spectrum(-spectrum.values[::-1], spectrum.vectors[:, ::-1])
    product_error = process.error(spectrum.norm)
    is_full = krylov.dim == dim
    if is_full:
        error, cannot_improve = product_error, True
    else:
        error, cannot_improve = bound_missed_eigenvalues(spectrum, krylov, dim, product_error, confidence, sharp)
    if spectrum.leftmost - product_error < lower:
        lower = -math.inf  # the new Ritz value contradicts the earlier bound
    # All bounds hold on one event: the component of the start along v is at least t √(π/2n). So the largest of them
    # holds too.
    lower = max(lower, spectrum.leftmost - error)
    return CurvatureBound(spectrum, product_error, lower, is_full, cannot_improve)


def is_below_roundoff(process: MonitoredLanczos, bound: CurvatureBound, confidence: float, error: float) -> bool:
    """Whether roundoff alone prevents bounds on λ_min of this accuracy, so that more products cannot help."""
    if bound.is_full or not error > 0.0:
        return False
    gaps = bound.spectrum.values - bound.spectrum.leftmost
    error_term = bound.product_error * float(np.linalg.norm(bound.spectrum.vectors[0] / (gaps + error)))
    return not error_term < _start_component(process.space.dim, confidence)


def _start_component(dim: int, confidence: float) -> float:
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
    spectrum: cubic.Spectrum, krylov: OffDiagonal, dim: int, product_error: float, confidence: float, sharp: bool
) -> tuple[float, bool]:
    """Return the bound on θ_1 − λ_min of this module's docstring, and whether roundoff alone limits it."""
    if product_error == math.inf:
        return math.inf, True
    start_component = _start_component(dim, confidence)
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
