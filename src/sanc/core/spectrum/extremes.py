"""Both ends of the spectrum of a Hessian, and quadrature of what lies between them, from random starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.core.oracle import Operator, Oracle
from sanc.core.space import Floats, Vector
from sanc.core.spectrum import cubic
from sanc.core.spectrum.curvature import DEFAULT_CONFIDENCE
from sanc.core.spectrum.krylov import Krylov, Lanczos
from sanc.core.spectrum.monitored_lanczos import bound_curvature, is_below_roundoff, monitored_lanczos, start_vector

_DENSE_TEST_DIVISOR = 40
"""Both ends of a spectrum are bounded after each of the first 40 products, then at intervals of 2.5 %. A test costs
less than a product, and more than 40 products are needed in small dimensions only."""
_MEASURED_ERRORS = 4
"""`find_extremes` measures the difference error of this many products, each for the cost of a product. Later ones use
the largest of these errors: all are products with unit vectors at one point, so that their errors hardly differ."""


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
    lower_bound, upper_bound, one_sided = -math.inf, math.inf, 0.5 * (1.0 + confidence)
    measured = _MEASURED_ERRORS if oracle.differenced_products else 0
    with monitored_lanczos(oracle, x, seed, store=store, rough=rough, measured_errors=_MEASURED_ERRORS) as process:
        krylov = process.krylov
        for must_stop in process.extend_between_tests(max_products, _DENSE_TEST_DIVISOR, time_is_up, report):
            bound = bound_curvature(process, one_sided, lower_bound, sharp=store)
            mirrored = bound_curvature(process, one_sided, -upper_bound, negated=True, sharp=store)
            lower_bound, upper_bound, norm = bound.lower_bound, -mirrored.lower_bound, bound.spectrum.norm
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
        lower_bound=process.unscaled(lower_bound),
        upper_bound=process.unscaled(upper_bound),
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
