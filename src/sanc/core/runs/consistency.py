"""Consistency of f, its gradient and its Hessian products as a caller supplies them, and noise in f.

A stalled run does not reveal its cause. A few more evaluations show whether the gradient belongs to another function,
the Hessian product is asymmetric, or the values are noisy. Each `find_…` returns a `Defect`, or None if there is none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from sanc.core.oracle import Oracle
from sanc.core.runs.noise_estimates import MIN_REPORTED_NOISE, estimate_gradient_rounding, measure_noise
from sanc.core.space import Vector
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.core.spectrum.product_errors import NONLINEARITY_FACTOR, measure_nonlinearity
from sanc.core.units import length_scale_at

_CURVATURE_SEED, _PRODUCT_SEED = 5, 13
"""Seeds of the random directions of tests; those of `noise_estimates.py` are others."""
_SECOND_DIFFERENCE_ERRORS = 4.0
"""Rounding errors of f in a second difference: one for each of two values, and two for twice the third."""
_DERIVATIVE_TOLERANCE = 0.1
"""Relative error of a directional derivative above which it is inconsistent."""
_ASYMMETRY_TOLERANCE = 1e-4
"""Relative size of vᵀHu − uᵀHv above which products are inconsistent. It is smaller than `_DERIVATIVE_TOLERANCE`, since
products have no truncation error."""
_FIRST_DIFFERENCE_STEPS = (1e-4, 1e-2, 1e-3, 1e-6)
"""Steps of central differences, relative to the length scale: around eps^(1/3), where truncation and roundoff balance,
which is 6e-6 in float64 and 5e-3 in float32. Functions with large third derivatives or noise need others."""
_SHORT_DIFFERENCE_STEPS = tuple(10.0**-k for k in range(8, 300, 2))
"""Further steps, of which only those are used at which f changes by more than its rounding error."""
_SECOND_DIFFERENCE_STEPS = (1e-3, 1e-2, 1e-1, *(10.0**-k for k in range(4, 13)))
"""Steps of second differences, relative to the length scale: around eps^(1/4), 1e-4 in float64 and 2e-2 in float32. The
length scale is far too large if a constant in f is, hence the shortest ones."""
_SMALL_GRADIENT_STEPS = (1e-4, 1e-6)
"""Steps of the two central differences that have to agree before a small gradient is called inconsistent."""
_MIN_DERIVATIVE_RATIO, _ROUNDOFF_MARGIN = 10.0, 100.0
"""f has a far larger derivative than the gradient shows if a difference quotient differs from the gradient by more than
ten times the gradient plus a hundred rounding errors."""
_MIN_RELIABLE_ERRORS = 4.0
"""Differenced gradients are reliable if their norm exceeds this many errors."""
_SIGNIFICANT_ERRORS = 10.0
"""Errors of a difference quotient beyond which a discrepancy is significant: its error is estimated from two values
only, and may be ten times too small."""
MAX_SCALED_VARIABLES = 100
"""Variables up to which a stalled run compares the diagonal entries of the Hessian, with a product for each."""
MAX_NOISE = 1e6
"""Noise of f, in units of its rounding error, that ends a run."""


class DefectKind(Enum):
    """What is inconsistent, noisy or inaccurate."""

    GRADIENT = "the gradient contradicts f"
    DIFFERENCED_GRADIENT = "the error of a differenced gradient is too large"
    PRODUCT = "a Hessian product contradicts f or its gradient"
    ASYMMETRY = "a Hessian product is not symmetric"
    NOISE = "f is noisy"
    SCALES = "the variables have too different scales"


@dataclass(frozen=True)
class Defect:
    """A defect of f, its gradient or its Hessian products.

    Attributes
    ----------
    kind : DefectKind
        What is defective.
    sentence : str
        A sentence about it, with the remedy, for the message of the result.
    """

    kind: DefectKind
    sentence: str


def differenced_derivative_ratio(oracle: Oracle, x: Vector, first_length_scale: float) -> tuple[float, float]:
    """Return the differenced directional derivative of f along its gradient over ‖g‖, and the error of this ratio.

    Central differences with four steps, relative to the length scale at x, are computed, and if none of them agrees
    with the gradient, with shorter steps as long as roundoff permits: f may change over a far shorter length. If one of
    them agrees with the gradient, it is returned. Otherwise the two of the four that agree best are used.
    """
    space = oracle.space
    _, g = oracle.gradient(x)
    norm = space.norm(g)
    if not norm > 0.0:
        return 1.0, 0.0
    direction, quotients = g / norm, []
    length_scale = length_scale_at(first_length_scale, space.norm(x))
    for fraction in (*_FIRST_DIFFERENCE_STEPS, *_SHORT_DIFFERENCE_STEPS):
        step = length_scale * fraction
        ahead, behind = oracle.value(x + direction * step), oracle.value(x - direction * step)
        ratio = (0.5 * ahead - 0.5 * behind) / step / norm
        rounding = max(space.eps * max(abs(ahead), abs(behind)), 1.0 / space.max) / step / norm  # values may underflow
        if fraction in _SHORT_DIFFERENCE_STEPS and rounding > _DERIVATIVE_TOLERANCE:
            break
        if abs(ratio - 1.0) <= _DERIVATIVE_TOLERANCE:
            return ratio, 0.0
        quotients.append((ratio, rounding))
    pairs = itertools.combinations(quotients[: len(_FIRST_DIFFERENCE_STEPS)], 2)
    candidates = (
        (abs(ratio - other) + rounding + other_rounding, ratio)
        for (ratio, rounding), (other, other_rounding) in pairs
        if math.isfinite(ratio - other)
    )
    error, ratio = min(candidates, default=(math.inf, math.nan))
    return ratio, error


def find_wrong_gradient(oracle: Oracle, x: Vector, first_length_scale: float) -> Defect | None:
    """Return the defect of a gradient that the values near x contradict."""
    error, truncation = oracle.gradient_error(x), oracle.truncation_error(x)
    if truncation is not None:
        error += oracle.space.norm(truncation) + estimate_gradient_rounding(oracle, x, first_length_scale)
    if error > _DERIVATIVE_TOLERANCE * oracle.space.norm(oracle.gradient(x)[1]):
        return None  # the gradient is differenced, and too inaccurate for a comparison
    ratio, error = differenced_derivative_ratio(oracle, x, first_length_scale)
    if not abs(ratio - 1.0) > _DERIVATIVE_TOLERANCE + _SIGNIFICANT_ERRORS * error:
        return None
    if abs(ratio + 1.0) <= _DERIVATIVE_TOLERANCE + _SIGNIFICANT_ERRORS * error:
        return Defect(DefectKind.GRADIENT, "The sign of the gradient is wrong: f decreases along it.")
    return Defect(
        DefectKind.GRADIENT,
        f"The gradient is inconsistent with f: along the gradient f changes {ratio:.3g} times as fast as the gradient "
        "predicts.",
    )


def find_wrong_small_gradient(oracle: Oracle, x: Vector, first_length_scale: float) -> Defect | None:
    """Return the defect of a small gradient at x that is far below a directional derivative of f there.

    Central differences along a random direction with two steps, far below `first_length_scale`, have to agree.
    """
    space, (_, g) = oracle.space, oracle.gradient(x)
    d = space.normal(np.random.default_rng(0))
    expected, derivatives = space.dot(g, d), []
    for step in (first_length_scale * fraction / space.norm(d) for fraction in _SMALL_GRADIENT_STEPS):
        ahead, behind = oracle.value(x + d * step), oracle.value(x - d * step)
        derivatives.append((0.5 * ahead - 0.5 * behind) / step)
        rounding = space.eps * max(abs(ahead), abs(behind)) / step
        if not abs(derivatives[-1] - expected) > _MIN_DERIVATIVE_RATIO * abs(expected) + _ROUNDOFF_MARGIN * rounding:
            return None
    if not abs(derivatives[0] - derivatives[1]) <= _DERIVATIVE_TOLERANCE * abs(derivatives[0] - expected):
        return None
    derivative = derivatives[0] / space.norm(d)
    return Defect(
        DefectKind.GRADIENT,
        f"The gradient is inconsistent with f: its norm is {space.norm(g):.1g}, and f has a derivative of "
        f"{derivative:.3g}.",
    )


def find_unreliable_gradients(oracle: Oracle, x: Vector, largest_norm: float) -> Defect | None:
    """Return the defect of differenced gradients whose largest norm is below the error that roundoff in f causes."""
    error = oracle.gradient_error(x)
    if error == 0.0 or largest_norm > _MIN_RELIABLE_ERRORS * error:
        return None
    return difference_defect(error)


def find_large_difference_error(oracle: Oracle, x: Vector, tolerance: float) -> Defect | None:
    """Return the defect of a differenced gradient whose error far exceeds the tolerance on its norm."""
    error = oracle.gradient_error(x)
    return difference_defect(error) if error > _MIN_RELIABLE_ERRORS * tolerance else None


def difference_defect(gradient_error: float, curvature_error: float = 0.0) -> Defect:
    """Return the defect of a differenced gradient with this error and, if it is not 0, this error of the curvature."""
    addition = f", and of {curvature_error:.1g} in its curvature" if curvature_error else ""
    return Defect(
        DefectKind.DIFFERENCED_GRADIENT,
        f"The gradient is differenced, and the error of f alone causes one of {gradient_error:.1g}{addition}: subtract "
        "a constant from f, compute f more accurately, or pass its gradient as jac.",
    )


def truncation_defect(gradient_error: float) -> Defect:
    """Return the defect of a differenced gradient whose error may exceed a decrease of f."""
    sentence = f"Differences cause an error of {gradient_error:.1g} in the gradient here: pass its gradient as jac."
    return Defect(DefectKind.DIFFERENCED_GRADIENT, sentence)


def find_missed_curvature(oracle: Oracle, x: Vector, first_length_scale: float, tolerance: float) -> Defect | None:
    """Return the defect of products that miss a curvature of f at x, as differences of the caller's gradient.

    Roundoff in a gradient may exceed its differences, and then these miss all curvature. Second differences of values,
    with far longer steps, detect it. They are computed along a random direction, with steps relative to the length
    scale at x; `first_length_scale` is 0 if it is not known. If one of them agrees with the product up to `tolerance`,
    the product is consistent. Otherwise the one with the smallest error is used. The product is inconsistent if it
    misses the whole curvature of f, or has a larger error than that.
    """
    space, operator = oracle.space, oracle.hessian(x)
    d = space.normal(np.random.default_rng((0, _CURVATURE_SEED)))
    d = d / space.norm(d)
    value = oracle.value(x)
    try:
        product = operator(d)
        expected, product_error = space.dot(d, product), operator.error(d, product)
    except NonFiniteProductError:
        return None
    finally:
        operator.release()

    def second_difference(step: float) -> tuple[float, float]:
        """Return the second difference of f, and its roundoff."""
        ahead, behind = oracle.value(x + d * step), oracle.value(x - d * step)
        rounding = _SECOND_DIFFERENCE_ERRORS * space.eps * max(abs(ahead), abs(behind), abs(value))
        return ((ahead - value) + (behind - value)) / step / step, rounding / step / step

    def agrees(curvature: float, rounding: float) -> bool:
        difference = abs(curvature - expected) + rounding + product_error
        return difference <= max(_DERIVATIVE_TOLERANCE * abs(curvature), tolerance)

    balanced = math.sqrt(
        _SECOND_DIFFERENCE_ERRORS * space.eps * abs(value) / tolerance
    )  # with this step the roundoff is the tolerance
    length_scale = length_scale_at(first_length_scale, space.norm(x)) or 1.0
    steps = (*(length_scale * fraction for fraction in _SECOND_DIFFERENCE_STEPS), balanced or length_scale)
    best = _best_second_difference(second_difference, agrees, steps)
    if best is None:
        return None
    error, curvature = best
    discrepancy = max(abs(curvature - expected), product_error)
    is_significant = discrepancy > _DERIVATIVE_TOLERANCE * abs(expected) + _SIGNIFICANT_ERRORS * error
    if not is_significant or not discrepancy > abs(curvature) / (1.0 + _DERIVATIVE_TOLERANCE):
        return None
    return Defect(
        DefectKind.PRODUCT,
        f"Along a direction in which f has a curvature of {curvature:.2g}, differences of jac show {expected:.2g}, "
        f"with an error of {discrepancy:.1g}: subtract a constant from f if jac differences it, or pass an exact jac, "
        "or hessp.",
    )


def _best_second_difference(
    second_difference: Callable[[float], tuple[float, float]],
    agrees: Callable[[float, float], bool],
    steps: tuple[float, ...],
) -> tuple[float, float] | None:
    """Return error and value of the most accurate second difference; None as soon as one agrees with the product.

    The error is the roundoff plus the change when the step is halved.
    """
    candidates = []
    for step in steps:
        full, full_rounding = second_difference(step)
        if agrees(full, full_rounding):
            return None
        half, half_rounding = second_difference(0.5 * step)
        if math.isfinite(full - half):
            candidates.append((abs(full - half) + full_rounding + half_rounding, half))
    return min(candidates, default=(math.inf, math.nan))


def find_asymmetry(oracle: Oracle, x: Vector, seed: int = 0) -> Defect | None:
    """Return the defect of an asymmetric Hessian product at x."""
    space, operator = oracle.space, oracle.hessian(x)
    u, v = (space.normal(np.random.default_rng((seed, k))) for k in range(2))
    try:
        hu, hv = operator(u), operator(v)
        left, right = space.dot(v, hu), space.dot(u, hv)
        scale = math.sqrt(space.norm(hu) * space.norm(v) * space.norm(hv) * space.norm(u))
        difference_error = operator.error(u, hu) * space.norm(v) + operator.error(v, hv) * space.norm(u)
        allowed = _ASYMMETRY_TOLERANCE * scale + _SIGNIFICANT_ERRORS * difference_error
        if abs(left - right) > allowed:
            allowed += NONLINEARITY_FACTOR * measure_nonlinearity(operator, space) * 2.0 * space.norm(u) * space.norm(v)
    except NonFiniteProductError:
        return None
    finally:
        operator.release()
    if not abs(left - right) > allowed:
        return None
    sentence = f"The Hessian product is not symmetric: vᵀHu = {left:.4g} and uᵀHv = {right:.4g}."
    return Defect(DefectKind.ASYMMETRY, sentence)


def find_different_scales(oracle: Oracle, x: Vector) -> Defect | None:
    """Return the defect of variables whose second derivatives are below the roundoff of the largest one.

    Only a function of few variables is tested, since the diagonal takes a product for each.
    """
    if oracle.space.dim > MAX_SCALED_VARIABLES:
        return None
    try:
        smallest, largest = extreme_entries(hessian_diagonal(oracle, x))
    except NonFiniteProductError:
        return None
    if not have_different_scales(smallest, largest, oracle.space.eps):
        return None
    return Defect(
        DefectKind.SCALES,
        f"The second derivatives by single variables are between {smallest:.1g} and {largest:.1g}, so that steps in "
        "one variable are below the roundoff of others: scale the variables, or pass precond, such as one over the "
        "absolute values of the Hessian's diagonal.",
    )


def have_different_scales(smallest: float, largest: float, eps: float) -> bool:
    """Return whether steps in one variable are below the roundoff of others, by the second derivatives of both."""
    return smallest < eps * largest < math.inf


def extreme_entries(diagonal: Sequence[float]) -> tuple[float, float]:
    """Return the smallest entry above 0 and the largest entry; 0 if there is none."""
    return min((entry for entry in diagonal if entry > 0.0), default=0.0), max(diagonal, default=0.0)


def hessian_diagonal(oracle: Oracle, x: Vector) -> list[float]:
    """Return the absolute values of the diagonal entries of the Hessian at x, with a product for each."""
    space, operator = oracle.space, oracle.hessian(x)
    entries = []
    try:
        for k in range(space.dim):
            basis_vector = space.zeros()
            space.tensor(basis_vector)[k] = 1.0
            entries.append(abs(space.dot(basis_vector, operator(basis_vector))))
    finally:
        operator.release()
    return entries


def find_wrong_product(oracle: Oracle, x: Vector, first_length_scale: float) -> Defect | None:
    """Return the defect of a Hessian product of the caller that differences of the caller's gradient contradict."""
    return find_wrong_product_at(oracle, x, length_scale_at(first_length_scale, oracle.space.norm(x)))


def find_wrong_product_at(oracle: Oracle, x: Vector, length: float) -> Defect | None:
    """Return the defect of a Hessian product that differences over fractions of a length contradict.

    They contradict it along a random direction, and along the same one with the magnitudes of the variables: a step
    that suits the largest variables may leave the range in which the gradient is linear in a small one.
    """
    if not oracle.has_user_gradient or oracle.differenced_products:
        return None
    space = oracle.space
    d = space.normal(np.random.default_rng((0, _PRODUCT_SEED)))
    relative = space.vector(space.tensor(d) * space.tensor(x).abs())
    defect = _contradiction_along(oracle, x, d, length)
    if defect is None or not space.norm(relative) > 0.0:
        return defect
    return defect if _contradiction_along(oracle, x, relative, length) else None


def _contradiction_along(oracle: Oracle, x: Vector, d: Vector, length: float) -> Defect | None:
    """Return the defect of the Hessian product along d if differences of the gradient contradict it.

    The differences have the steps of `differenced_derivative_ratio`. They contradict the product if none of them agrees
    with it, and two of them agree with each other.
    """
    space, operator = oracle.space, oracle.hessian(x)
    d = d / space.norm(d)
    try:
        product = operator(d)
    except NonFiniteProductError:
        return None
    finally:
        operator.release()
    quotients = []
    for step in (length * fraction for fraction in _FIRST_DIFFERENCE_STEPS):
        ends = [x + d * step, x - d * step]
        if not all(map(oracle.is_inside, ends)):
            return None
        ahead, behind = (oracle.gradient(end)[1] for end in ends)
        quotient = (ahead - behind) * (0.5 / step)
        rounding = space.eps * max(space.norm(ahead), space.norm(behind)) / step
        allowed = _DERIVATIVE_TOLERANCE * space.norm(product) + _SIGNIFICANT_ERRORS * rounding
        if not space.norm(quotient - product) > allowed:
            return None
        quotients.append((quotient, rounding))
    pairs = itertools.combinations(quotients, 2)
    error, quotient = min(
        (
            (space.norm(one - other) + rounding + other_rounding, one)
            for (one, rounding), (other, other_rounding) in pairs
        ),
        key=lambda pair: pair[0],
    )
    largest = max(space.norm(quotient), space.norm(product))
    if not space.norm(quotient - product) > _DERIVATIVE_TOLERANCE * largest + _SIGNIFICANT_ERRORS * error:
        return None
    return Defect(
        DefectKind.PRODUCT,
        "The Hessian product is inconsistent with the gradient: along a random direction its norm is "
        f"{space.norm(product):.3g}, and differences of jac have {space.norm(quotient):.3g}: check hess or hessp.",
    )


def find_noise(
    oracle: Oracle, x: Vector, first_length_scale: float, limit: float = MIN_REPORTED_NOISE, seed: int = 0
) -> Defect | None:
    """Return the defect of values near x whose noise exceeds `limit` times their rounding error."""
    noise = measure_noise(oracle, x, first_length_scale, limit, seed)
    if not noise > 0.0:
        return None
    return Defect(DefectKind.NOISE, f"The values are noisy: about ±{noise:.1g} between neighbouring points.")


def find_stall_cause(oracle: Oracle, x: Vector, first_length_scale: float) -> Defect | None:
    """Return the first defect that may have stalled a run."""
    return (
        find_asymmetry(oracle, x)
        or find_noise(oracle, x, first_length_scale)
        or find_wrong_gradient(oracle, x, first_length_scale)
        or find_wrong_product(oracle, x, first_length_scale)
    )
