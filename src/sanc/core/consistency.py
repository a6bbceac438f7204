"""Consistency of f, its gradient and its Hessian products as a caller supplies them, and noise in f.

A run that finds no step does not show the cause. A few more evaluations show whether the gradient belongs to another
function, the Hessian product is asymmetric, or the values are noisy. Each check returns a sentence, or an empty string.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from sanc.core.krylov import NonFiniteProductError
from sanc.core.oracle import Oracle
from sanc.core.space import Space, Vector

_RELATIVE_ERROR = 0.1
"""Relative error of a directional derivative that roundoff cannot explain; a thousandth of it for asymmetry."""
_COARSE = 4.0
"""Differenced gradients with a norm of at most this many errors are unreliable."""
_ROUNDINGS = 10.0
"""Rounding errors of a single operation that a gradient may have: ten, as for values and Ritz values."""
INACCURATE = 10.0
"""Asymmetry of products, in units of their nonlinearity, that inaccuracy explains: ten errors, as for differences."""
_NOISY, GROSS = 1e2, 1e6
"""Noise of f, in units of its rounding error, that is reported after a stall, and that ends a run by itself."""


def derivative_ratio(oracle: Oracle, x: Vector, length: float) -> tuple[float, float]:
    """Return the differenced directional derivative of f along its gradient over ‖g‖, and the error of this ratio.

    Central differences with four step lengths, relative to `length`, are computed, and the two that agree best are
    used. One that agrees with the gradient suffices.
    """
    space = oracle.space
    _, g = oracle.gradient(x)
    norm = space.norm(g)
    if not norm > 0.0:
        return 1.0, 0.0
    d, ratios, rounding = g / norm, [], []
    for step in (max(length, space.norm(x)) * part for part in (1e-4, 1e-2, 1e-3, 1e-6)):
        ahead, behind = oracle.value(x + d * step), oracle.value(x - d * step)
        ratios.append((0.5 * ahead - 0.5 * behind) / step / norm)
        rounding.append(space.eps * max(abs(ahead), abs(behind)) / step / norm)
        if abs(ratios[-1] - 1.0) <= _RELATIVE_ERROR:
            return ratios[-1], 0.0
    pairs = itertools.combinations(zip(ratios, rounding, strict=True), 2)
    found = ((abs(a - b) + c + d, a) for (a, c), (b, d) in pairs if math.isfinite(a - b))
    error, ratio = min(found, default=(math.inf, math.nan))
    return ratio, error


def gradient(oracle: Oracle, x: Vector, length: float) -> str:
    """Describe how the values near x contradict the gradient."""
    if oracle.gradient_error(x) > _RELATIVE_ERROR * oracle.space.norm(oracle.gradient(x)[1]):
        return ""  # differences of values cannot contradict themselves
    ratio, error = derivative_ratio(oracle, x, length)
    if not abs(ratio - 1.0) > _RELATIVE_ERROR + 10.0 * error:
        return ""
    if abs(ratio + 1.0) <= _RELATIVE_ERROR + 10.0 * error:
        return "The sign of the gradient is wrong: f decreases along it."
    return f"The gradient is inconsistent with f: along it f changes {ratio:.3g} times as fast as it predicts."


def gradient_rounding(oracle: Oracle, x: Vector, length: float) -> float:
    """Estimate the norm of the rounding error of an exact gradient at x; 0 where a product is not finite.

    Rounding x changes the gradient by about eps·‖B(x∘ξ)‖, with a standard normal ξ. The sum of its terms adds at most
    about eps·√(2‖B‖|f|). For f = ‖r‖² with r = Ax − y this is 2 eps·‖A‖‖r‖, a bound on the error of the inner products
    in 2Aᵀr. ‖B‖ is the Frobenius norm, which is the root mean square of ‖Bξ‖. A constant in f raises this bound and not
    the error. So the second term is at most the noise that gradients near x show.
    """
    space, operator, value = oracle.space, oracle.hessian(x), oracle.gradient(x)[0]
    moved = size = 0.0
    try:
        for k in range(3):
            v = space.normal(np.random.default_rng((k, 11)))
            moved, size = max(moved, space.norm(operator(x * v))), max(size, space.norm(operator(v)))
    except NonFiniteProductError:
        return 0.0
    finally:
        operator.release()
    sums = space.eps * math.sqrt(2.0 * size) * math.sqrt(abs(value))
    return _ROUNDINGS * (space.eps * moved + min(sums, gradient_noise(oracle, x, length)))


def gradient_noise(oracle: Oracle, x: Vector, length: float, seed: int = 0) -> float:
    """Estimate the noise of the gradient near x from third differences on a line, as `noise` does for f."""
    differences = [oracle.gradient(point)[1] for point in _line(oracle.space, x, length, seed)]
    for _ in range(3):
        differences = [after - before for before, after in itertools.pairwise(differences)]
    return math.hypot(*map(oracle.space.norm, differences)) / math.sqrt(20.0 * len(differences))  # (3!)²/6! = 1/20


def missing_derivative(oracle: Oracle, x: Vector, length: float) -> str:
    """Describe a directional derivative of f at x that the small gradient there does not show.

    Central differences along a random direction with two step lengths, far below `length`, have to agree.
    """
    space, (_, g) = oracle.space, oracle.gradient(x)
    d = space.normal(np.random.default_rng(0))
    expected, derivatives = space.dot(g, d), []
    for step in (length * part / space.norm(d) for part in (1e-4, 1e-6)):
        ahead, behind = oracle.value(x + d * step), oracle.value(x - d * step)
        derivatives.append((0.5 * ahead - 0.5 * behind) / step)
        rounding = space.eps * max(abs(ahead), abs(behind)) / step
        if not abs(derivatives[-1] - expected) > 10.0 * abs(expected) + 100.0 * rounding:
            return ""
    if not abs(derivatives[0] - derivatives[1]) <= _RELATIVE_ERROR * abs(derivatives[0] - expected):
        return ""
    found = derivatives[0] / space.norm(d)
    return (
        f"The gradient is inconsistent with f: its norm is {space.norm(g):.1g}, and f has a derivative of {found:.3g}."
    )


def coarse(oracle: Oracle, x: Vector, longest: float) -> str:
    """Describe differenced gradients whose largest norm, `longest`, is below the error that roundoff in f causes."""
    error = oracle.gradient_error(x)
    if error == 0.0 or longest > _COARSE * error:
        return ""
    return differenced(error)


def too_coarse(oracle: Oracle, x: Vector, tolerance: float) -> str:
    """Describe a differenced gradient whose error exceeds the tolerance on its norm by far."""
    error = oracle.gradient_error(x)
    return differenced(error) if error > _COARSE * tolerance else ""


def differenced(error: float, curvature: float = 0.0) -> str:
    """Describe the error that roundoff in f causes in a differenced gradient and, if it is not 0, in the curvature."""
    more = f", and of {curvature:.1g} in its curvature" if curvature else ""
    return (
        f"The gradient is differenced, and roundoff in f alone causes an error of {error:.1g}{more}: subtract a "
        "constant from f, or pass its gradient as jac."
    )


def curvature(oracle: Oracle, x: Vector, length: float, tolerance: float) -> str:
    """Describe a curvature of f at x that products from differences of the caller's gradient do not show.

    Roundoff in a gradient may hide all curvature from its differences. Second differences of values, with steps that
    are longer by far, show it. They are computed along a random direction with steps relative to `length`. One that
    agrees with the product, or that differs by at most `tolerance`, suffices. Otherwise the one with the smallest error
    decides: its roundoff, and the change if the step is halved. The products show nothing if they miss the whole
    curvature of f, or have a larger error.
    """
    space, operator = oracle.space, oracle.hessian(x)
    d = space.normal(np.random.default_rng((0, 5)))
    d = d / space.norm(d)
    value, found = oracle.value(x), []
    try:
        product = operator(d)
        expected, inaccuracy = space.dot(d, product), operator.error(d, product)
    except NonFiniteProductError:
        return ""
    finally:
        operator.release()

    def second(step: float) -> tuple[float, float]:
        ahead, behind = oracle.value(x + d * step), oracle.value(x - d * step)
        rounding = 4.0 * space.eps * max(abs(ahead), abs(behind), abs(value))
        return ((ahead - value) + (behind - value)) / step / step, rounding / step / step

    visible = math.sqrt(4.0 * space.eps * abs(value) / tolerance)  # there the roundoff is the tolerance
    for step in (*(length * part for part in (1e-3, 1e-2, 1e-1, 1e-4, 1e-5)), visible or length):
        (seen, rounding), (halved, more) = second(step), second(0.5 * step)
        if abs(seen - expected) + rounding + inaccuracy <= max(_RELATIVE_ERROR * abs(seen), tolerance):
            return ""
        if math.isfinite(seen - halved):
            found.append((abs(seen - halved) + rounding + more, halved))
    error, seen = min(found, default=(math.inf, math.nan))
    missed = max(abs(seen - expected), inaccuracy)
    if not missed > _RELATIVE_ERROR * abs(expected) + 10.0 * error or not missed > abs(seen) / (1.0 + _RELATIVE_ERROR):
        return ""
    return (
        f"Along a direction in which f has a curvature of {seen:.2g}, differences of jac show {expected:.2g}, with an "
        f"error of {missed:.1g}: subtract a constant from f if jac differences it, or pass an exact jac, or hessp."
    )


def asymmetry(oracle: Oracle, x: Vector, seed: int = 0) -> str:
    """Describe an asymmetric Hessian product at x."""
    space, operator = oracle.space, oracle.hessian(x)
    u, v = (space.normal(np.random.default_rng((seed, k))) for k in range(2))
    try:
        hu, hv = operator(u), operator(v)
        left, right = space.dot(v, hu), space.dot(u, hv)
        size = math.sqrt(space.norm(hu) * space.norm(v) * space.norm(hv) * space.norm(u))
        differenced = operator.error(u, hu) * space.norm(v) + operator.error(v, hv) * space.norm(u)
        allowed = 1e-3 * _RELATIVE_ERROR * size + 10.0 * differenced
        if abs(left - right) > allowed:
            allowed += INACCURATE * nonlinearity(operator, space) * 2.0 * space.norm(u) * space.norm(v)
    except NonFiniteProductError:
        return ""
    finally:
        operator.release()
    if not abs(left - right) > allowed:
        return ""
    return f"The Hessian product is not symmetric: vᵀHu = {left:.4g} and uᵀHv = {right:.4g}."


def nonlinearity(product: Callable[[Vector], Vector], space: Space, seed: int = 0) -> float:
    """Return the largest of three ‖H(au + bv) − aHu − bHv‖ with random unit vectors u, v and au + bv.

    Products that are exact to roundoff are linear to roundoff, also those of a wrong or asymmetric Hessian.
    """
    largest = 0.0
    for k in range(3):
        u, v = (space.normal(np.random.default_rng((seed, k, j))) for j in range(2))
        u, v = u / space.norm(u), v / space.norm(v)
        norm = space.norm(u + v)
        if norm > 0.0:
            together, apart = product((u + v) / norm), product(u) / norm + product(v) / norm
            largest = max(largest, space.norm(together - apart))
    return largest


def noise(oracle: Oracle, x: Vector, length: float, least: float = _NOISY, seed: int = 0) -> str:
    """Describe noise in f near x that exceeds `least` times its rounding error.

    It is estimated from third differences of seven values on a line (Hamming; Moré and Wild 2011).
    """
    space = oracle.space
    values = np.array([oracle.value(point) for point in _line(space, x, length, seed)])
    with np.errstate(over="ignore", invalid="ignore"):
        size = float(np.sqrt(np.mean(np.diff(values, 3) ** 2) / 20.0))  # (3!)²/6! = 1/20
    if not size > least * space.eps * float(np.max(np.abs(values))):
        return ""
    return f"The values are noisy: about ±{size:.1g} between neighbouring points."


def _line(space: Space, x: Vector, length: float, seed: int) -> list[Vector]:
    """Return seven points around x on a random line, about a thousand rounding errors of x apart."""
    d = space.normal(np.random.default_rng((seed, 7)))
    step = 1e3 * space.eps * max(space.norm(x), 1e-2 * length) / space.norm(d)
    return [x + d * (step * k) for k in range(-3, 4)]


def cause(oracle: Oracle, x: Vector, length: float) -> str:
    """Describe what may have stalled a run."""
    return asymmetry(oracle, x) or noise(oracle, x, length) or gradient(oracle, x, length)
