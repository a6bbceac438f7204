"""A Lanczos process with a random start that measures the errors of its products, and bounds of λ_min from it.

`sanc.core.spectrum.eigenvalue_bounds` has the derivation of the bounds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sanc.core.oracle import Operator, Oracle
from sanc.core.space import ROUNDING_ERRORS, Space, Vector
from sanc.core.spectrum import cubic
from sanc.core.spectrum.eigenvalue_bounds import bound_missed_eigenvalues, least_start_component
from sanc.core.spectrum.krylov import Krylov, Lanczos
from sanc.core.spectrum.product_errors import ASYMMETRY_FACTOR, NONLINEARITY_FACTOR, measure_nonlinearity

_MAX_UNSCALED_EXPONENT = 400
"""Products are scaled if the exponent of their largest entry reaches ±400. Otherwise their squares do not overflow, and
those of their rounding errors do not underflow."""
_MAX_SCALE_EXPONENT = 1000
"""Largest exponent of that scale: 2^1000 and its inverse are normal numbers, and raise any subnormal above 2^-80."""
_MIN_BOUND_DIM = 4
"""Products before the first bound: with fewer it rarely suffices, and asymmetry shows from the second product on."""
_PRECISION_TEST_FACTOR = 1.0 / 3.0
"""Factor of the second product that measures precision: it is no power of two, so that it changes all roundoff."""
_MAX_BASIS_ENTRIES, _BASIS_DIM_RANGE = 50_000_000, (50, 1000)
"""Entries of a stored basis, 400 MB in float64, and the least and the largest number of its vectors."""
_MAX_HOST_DRAW_DIM = 2**24
"""Largest dimension in which start vectors are drawn on the host, equal for all devices: a tenth of a second."""


class MonitoredLanczos:
    """A Lanczos process that measures the errors of its products.

    Parameters
    ----------
    operator : Operator
        The Hessian.
    draw_start : callable
        Returns the start vector, the same at each call.
    space : Space
        The space of its vectors.
    store : bool
        Keep the basis, and reorthogonalise.
    rough : bool
        Whether products may have a lower precision than their type. The first one is then computed twice.
    measured_errors : int, optional
        Products whose difference error is measured; later ones use the largest of these. By default all.

    Attributes
    ----------
    operator : Operator
        The Hessian.
    space : Space
        The space of its vectors.
    lanczos : Lanczos
        The process, with scaled products.
    krylov : Krylov
        Its Krylov space.
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
        self,
        operator: Operator,
        draw_start: Callable[[], Vector],
        space: Space,
        *,
        store: bool = True,
        rough: bool = False,
        measured_errors: int | None = None,
    ) -> None:
        self.operator, self.space, self._is_rough = operator, space, rough
        self._product_error = 0.0  # of products with a lower precision than their type
        self._measured_errors, self._largest_error = measured_errors, 0.0  # of differences of gradients
        start = draw_start()
        self.start: Any = start if store else None
        redraw = None if store else draw_start
        options: dict[str, Any] = {"store": store, "reorthogonalise": store, "project": True}
        self.lanczos = Lanczos(self._product, start, space, **options, redraw=redraw)
        self.krylov = Krylov(self.lanczos)
        self.difference_error_squared = self.asymmetry_squared = self.neglected_beta = 0.0
        self.product_scale = 1.0
        self._nonlinearity: float | None = None  # of products with unit vectors, if it was measured

    def _product(self, q: Vector) -> Vector:
        """Return the scaled product with q, and add its error; the first product determines the scale."""
        product = self.operator(q)
        if self._is_rough and not self.lanczos.columns:
            again = self.operator(q * _PRECISION_TEST_FACTOR)
            self._product_error = self.space.norm(again / _PRECISION_TEST_FACTOR - product)
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


class CurvatureBound(NamedTuple):
    """Bounds on λ_min from a Krylov space, in the units of its products.

    Attributes
    ----------
    spectrum : Spectrum
        Eigenpairs of T.
    product_error : float
        ‖F‖, the error of the products.
    lower_bound : float
        A lower bound of λ_min, the largest of this space and of smaller ones.
    is_full : bool
        Whether the Krylov space is the whole space, so that no eigenvalue can be missed.
    cannot_improve : bool
        Whether further products would not improve the bound.
    """

    spectrum: cubic.Spectrum
    product_error: float
    lower_bound: float
    is_full: bool
    cannot_improve: bool

    @property
    def ritz_value(self) -> float:
        """The left-most Ritz value, θ_1."""
        return self.spectrum.leftmost

    @property
    def error(self) -> float:
        """θ_1 minus the lower bound."""
        return self.spectrum.leftmost - self.lower_bound


def bound_curvature(
    process: MonitoredLanczos,
    confidence: float,
    eigenvalue_lower_bound: float,
    *,
    negated: bool = False,
    sharp: bool = False,
) -> CurvatureBound:
    """Return the bounds from the current Krylov space, given the lower bound of λ_min from smaller ones.

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
    if spectrum.leftmost - product_error < eigenvalue_lower_bound:
        eigenvalue_lower_bound = -math.inf  # the new Ritz value contradicts the earlier bound
    # All bounds hold on one event: the component of the start along v is at least t √(π/2n). So the largest of them
    # holds too.
    eigenvalue_lower_bound = max(eigenvalue_lower_bound, spectrum.leftmost - error)
    return CurvatureBound(spectrum, product_error, eigenvalue_lower_bound, is_full, cannot_improve)


def is_below_roundoff(process: MonitoredLanczos, bound: CurvatureBound, confidence: float, error: float) -> bool:
    """Return whether roundoff alone prevents bounds on λ_min of this accuracy, so that more products cannot help."""
    if bound.is_full or not error > 0.0:
        return False
    gaps = bound.spectrum.values - bound.spectrum.leftmost
    error_term = bound.product_error * float(np.linalg.norm(bound.spectrum.vectors[0] / (gaps + error)))
    return not error_term < least_start_component(process.space.dim, confidence)
