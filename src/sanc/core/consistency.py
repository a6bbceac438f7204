"""Whether what a caller wrote fits together: gradient and values, the two sides of the Hessian, and noise in f.

A minimiser that finds no step is told little by that. A few more evaluations tell whether the gradient is another
function's, the product is not symmetric, or the values are noisy, and the run says so.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from sanc.core.krylov import NonFiniteProductError
from sanc.core.oracle import Oracle
from sanc.core.space import Vector

_MISFIT = 0.1
"""Relative error of a slope, or of the symmetry of a product, that is no rounding."""
_COARSE = 4.0
"""Gradients that are no longer than so many times their error say nothing."""
_NOISY, GROSS = 1e2, 1e6
"""Noise of f in units of its rounding error from which it is called that, and from which nothing else need be tried."""


def derivative_ratio(oracle: Oracle, x: Vector, length: float) -> tuple[float, float]:
    """Return the slope of f along its gradient, as differences of values show it, over ‖g‖, and the error of that.

    Central differences with four steps, relative to `length`, are tried, and the two that agree best are believed; but
    one that agrees with the gradient is enough.
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
        if abs(ratios[-1] - 1.0) <= _MISFIT:
            return ratios[-1], 0.0
    pairs = itertools.combinations(zip(ratios, rounding, strict=True), 2)
    found = ((abs(a - b) + c + d, a) for (a, c), (b, d) in pairs if math.isfinite(a - b))
    error, ratio = min(found, default=(math.inf, math.nan))
    return ratio, error


def gradient(oracle: Oracle, x: Vector, length: float) -> str:
    """Say what is wrong with the gradient at x where values contradict it."""
    if oracle.gradient_error(x) > _MISFIT * oracle.space.norm(oracle.gradient(x)[1]):
        return ""  # its differences say no more than the values
    ratio, error = derivative_ratio(oracle, x, length)
    if not abs(ratio - 1.0) > _MISFIT + 10.0 * error:
        return ""
    if abs(ratio + 1.0) <= _MISFIT + 10.0 * error:
        return "The sign of the gradient is wrong: along it the values fall."
    return f"The gradient does not fit the values: along it they change {ratio:.3g} times as fast as it says."


def missing_derivative(oracle: Oracle, x: Vector, length: float) -> str:
    """Say whether the values have a slope at x, where the gradient is small.

    It shows along a random direction by two steps, far shorter than `length`, in which f would hardly bend.
    """
    space, (_, g) = oracle.space, oracle.gradient(x)
    d = space.normal(np.random.default_rng(0))
    says, slopes = space.dot(g, d), []
    for step in (length * part / space.norm(d) for part in (1e-4, 1e-6)):
        ahead, behind = oracle.value(x + d * step), oracle.value(x - d * step)
        slopes.append((0.5 * ahead - 0.5 * behind) / step)
        rounding = space.eps * max(abs(ahead), abs(behind)) / step
        if not abs(slopes[-1] - says) > 10.0 * abs(says) + 100.0 * rounding:
            return ""
    if not abs(slopes[0] - slopes[1]) <= _MISFIT * abs(slopes[0] - says):
        return ""
    slope = slopes[0] / space.norm(d)
    return f"The gradient does not fit the values: it is {space.norm(g):.1g} where they change by {slope:.3g} a unit."


def coarse(oracle: Oracle, x: Vector, longest: float) -> str:
    """Say whether gradients that are made of differences, the longest of this length, are lost in the rounding of f."""
    error = oracle.gradient_error(x)
    if error == 0.0 or longest > _COARSE * error:
        return ""
    return (
        f"The gradient is made of differences of values, and their rounding alone makes ±{error:.1g} of it: subtract a "
        "constant from f, or pass its gradient as jac."
    )


def asymmetry(oracle: Oracle, x: Vector, seed: int = 0) -> str:
    """Say whether the Hessian product at x is not symmetric."""
    space, operator = oracle.space, oracle.hessian(x)
    u, v = (space.normal(np.random.default_rng((seed, k))) for k in range(2))
    try:
        hu, hv = operator(u), operator(v)
        left, right = space.dot(v, hu), space.dot(u, hv)
        size = math.sqrt(space.norm(hu) * space.norm(v) * space.norm(hv) * space.norm(u))
        differenced = operator.error(u, hu) * space.norm(v) + operator.error(v, hv) * space.norm(u)
    except NonFiniteProductError:
        return ""
    finally:
        operator.release()
    if not abs(left - right) > 1e-3 * _MISFIT * size + 10.0 * differenced:
        return ""
    return f"The Hessian product is not symmetric: vᵀHu = {left:.4g} and uᵀHv = {right:.4g}."


def noise(oracle: Oracle, x: Vector, length: float, least: float = _NOISY, seed: int = 0) -> str:
    """Say whether f is noisy near x, by `least` times its rounding error.

    Seven values in a row tell, by their third differences (Hamming; Moré and Wild 2011).
    """
    space = oracle.space
    d = space.normal(np.random.default_rng((seed, 7)))
    step = 1e3 * space.eps * max(space.norm(x), 1e-2 * length) / space.norm(d)
    values = np.array([oracle.value(x + d * (step * k)) for k in range(-3, 4)])
    with np.errstate(over="ignore", invalid="ignore"):
        size = float(np.sqrt(np.mean(np.diff(values, 3) ** 2) / 20.0))  # (3!)²/6! = 1/20
    if not size > least * space.eps * float(np.max(np.abs(values))):
        return ""
    return f"The values are noisy: about ±{size:.1g} where they should be smooth."


def cause(oracle: Oracle, x: Vector, length: float) -> str:
    """Name what may keep a run from going on, or nothing."""
    return asymmetry(oracle, x) or noise(oracle, x, length) or gradient(oracle, x, length)
