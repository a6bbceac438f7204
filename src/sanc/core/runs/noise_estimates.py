"""Estimates of the noise of f near a point, and of the rounding error of its gradient."""

from __future__ import annotations

import itertools
import math

import numpy as np

from sanc.core.oracle import Oracle
from sanc.core.space import ROUNDING_ERRORS, Space, Vector
from sanc.core.spectrum.krylov import NonFiniteProductError

ROUNDING_SEED, NOISE_SEED = 11, 7
"""Seeds of the random directions of estimates; those of `consistency.py` are others."""
ROUNDING_SAMPLES = 3
"""Random vectors of which the largest product estimates the rounding error of a gradient."""
MIN_REPORTED_NOISE = 1e2
"""Noise of f, in units of its rounding error, that is reported after a stall."""
NOISE_SPACING, MIN_SCALE_FRACTION = 1e3, 1e-2
"""Spacing of the points at which noise is measured, in rounding errors of x: far enough apart to differ, and so near
that f is almost a polynomial (Moré and Wild 2011). ‖x‖ counts as at least this fraction of the length scale."""
NOISE_DIFFERENCE_ORDER = 3
"""Differences from which the noise of gradients is estimated are of this order."""
DIFFERENCE_VARIANCE = math.comb(2 * NOISE_DIFFERENCE_ORDER, NOISE_DIFFERENCE_ORDER)
"""Variance of such a difference of independent errors of variance 1: the sum of the squared binomial coefficients."""
_POINT_ROUNDING_FRACTION = 0.1
"""Noise up to this fraction of the differences between neighbouring points may come from rounding the points. Along the
line that is 1e-3 of them, by `NOISE_SPACING`, and more across it if f changes faster there. Near a zero of f it exceeds
the roundoff of f."""


def estimate_gradient_rounding(oracle: Oracle, x: Vector, first_length_scale: float) -> float:
    """Return an estimate of the norm of the rounding error of an exact gradient; 0 if a product is not finite.

    Rounding x changes the gradient by about eps·‖B(x∘ξ)‖, with a standard normal ξ. The sum of its terms adds at most
    about eps·√(2‖B‖|f|). For f = ‖r‖² with r = Ax − y this is 2 eps·‖A‖‖r‖, a bound on the error of the inner products
    in 2Aᵀr. ‖B‖ is the Frobenius norm, which is the root mean square of ‖Bξ‖. A constant in f raises this bound and not
    the error. So the second term is at most the noise of gradients near x.
    """
    space, operator, value = oracle.space, oracle.hessian(x), oracle.gradient(x)[0]
    change = hessian_norm = 0.0
    try:
        for k in range(ROUNDING_SAMPLES):
            v = space.normal(np.random.default_rng((k, ROUNDING_SEED)))
            change = max(change, space.norm(operator(x * v)))
            hessian_norm = max(hessian_norm, space.norm(operator(v)))
    except NonFiniteProductError:
        return 0.0
    finally:
        operator.release()
    sum_error = space.eps * math.sqrt(2.0 * hessian_norm) * math.sqrt(abs(value))
    return ROUNDING_ERRORS * (
        space.eps * change + min(sum_error, estimate_gradient_noise(oracle, x, first_length_scale))
    )


def estimate_gradient_noise(oracle: Oracle, x: Vector, first_length_scale: float, seed: int = 0) -> float:
    """Return the noise of the gradient near x from third differences on a line, as `measure_noise` does for f."""
    differences = [oracle.gradient(point)[1] for point in _points_on_line(oracle.space, x, first_length_scale, seed)]
    for _ in range(NOISE_DIFFERENCE_ORDER):
        differences = [after - before for before, after in itertools.pairwise(differences)]
    return math.hypot(*map(oracle.space.norm, differences)) / math.sqrt(DIFFERENCE_VARIANCE * len(differences))


def measure_noise(
    oracle: Oracle, x: Vector, first_length_scale: float, limit: float = MIN_REPORTED_NOISE, seed: int = 0
) -> float:
    """Return the standard deviation of the noise in f near x; 0 if it is at most `limit` times its rounding error.

    The noise is estimated from third differences of seven values on a line (Hamming; Moré and Wild 2011). Changes of f
    due to rounding the points do not count as noise: with differenced gradients, and where the gradient is roundoff.
    """
    space = oracle.space
    values = np.array([oracle.value(point) for point in _points_on_line(space, x, first_length_scale, seed)])
    with np.errstate(over="ignore", invalid="ignore"):
        noise = float(np.sqrt(np.mean(np.diff(values, NOISE_DIFFERENCE_ORDER) ** 2) / DIFFERENCE_VARIANCE))
        largest_change = float(np.max(np.abs(np.diff(values))))
        by_points = _POINT_ROUNDING_FRACTION * largest_change if oracle.differenced_gradient else 0.0
    if not noise > limit * space.eps * float(np.max(np.abs(values))) + by_points:
        return 0.0
    if space.norm(oracle.gradient(x)[1]) <= estimate_gradient_rounding(oracle, x, first_length_scale):
        return 0.0
    return noise


def _points_on_line(space: Space, x: Vector, first_length_scale: float, seed: int) -> list[Vector]:
    """Return seven points around x on a random line, `NOISE_SPACING` rounding errors of x apart."""
    d = space.normal(np.random.default_rng((seed, NOISE_SEED)))
    step = NOISE_SPACING * space.eps * max(space.norm(x), MIN_SCALE_FRACTION * first_length_scale) / space.norm(d)
    return [x + d * (step * k) for k in range(-3, 4)]
