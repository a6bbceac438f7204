"""Whether a minimum can be differentiated: its curvature, a last Newton step, and second differences of f."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sanc.core.oracle import Operator, Oracle
from sanc.core.space import Vector
from sanc.core.spectrum.curvature import Certificate, explore
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.implicit.free import has_weak_bounds
from sanc.implicit.linear import LinearSolution, SpectralScaling, solve, spectral_scaling

_LOWER_BOUND_ERROR = 0.5
"""Relative error of the lower bound of λ_min. The bound only scales the error estimate, so a factor of two suffices."""
_NEWTON_TOL = 1e-2
"""Relative error of the last Newton step, which thus divides the gradient norm by about a hundred."""
_DEGENERATE_CHANGE = 0.1
"""Relative change of the Hessian along the last Newton step from which the minimum counts as degenerate.

At a regular minimum it is of the order of the step. At the minimum of x⁴ it is 5/9 at any distance.
"""
_DIFFERENCE_STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
"""Steps of second differences, relative to ‖x‖: around eps^(1/4), and shorter ones for narrow minima."""
_SAME_CURVATURE, _LARGEST_ROUNDING = 0.1, 0.01
"""Relative difference of curvatures that count as equal, and roundoff up to which a second difference is used."""
_DIRECTION_SEED = 13
"""Seed of the direction of second differences, beside that of the caller."""
ONE_SIDED = "a variable is at a bound with a multiplier of zero up to tol, so that the derivative is one-sided"
"""Why a minimum with weakly active bounds cannot be differentiated."""


@dataclass(frozen=True)
class SolveOptions:
    """Options of `argmin` for derivatives; its docstring describes them."""

    on_singular: str
    rtol: float | None
    confidence: float
    max_products: int | None
    seed: int


@dataclass(frozen=True)
class Examination:
    """What is known about a minimum.

    Attributes
    ----------
    x : vector
        The free variables, after a last Newton step.
    certificate : Certificate
        Bounds on λ_min of their Hessian.
    scaling : SpectralScaling
        Ritz pairs that scale linear systems.
    grad_norm : float
        ‖∇f‖ at x.
    problem : str
        Why the minimum cannot be differentiated; empty if it can.
    hessian_change : float
        Relative change of the Hessian along the Newton step.
    x_error : float
        Relative error of a derivative because ∇f is not exactly zero.
    """

    x: Any
    certificate: Certificate
    scaling: SpectralScaling
    grad_norm: float
    problem: str = ""
    hessian_change: float = 0.0
    x_error: float = 0.0


def examine(oracle: Oracle, x: Vector, result: Any, options: SolveOptions) -> Examination:
    """Examine the minimum x of an oracle, which has the free variables alone; `result` is that of `minimize`."""
    examined = _explored(oracle, x, result, options)
    if examined.problem or options.on_singular == "pinv":
        return examined
    examined = _after_newton_step(oracle, examined, options)
    return replace(examined, problem=_kink(oracle, examined.x, options.seed) or examined.problem)


def _explored(oracle: Oracle, x: Vector, result: Any, options: SolveOptions) -> Examination:
    """Bound λ_min, and keep the Ritz pairs that were found as a scaling of later linear systems."""
    known: Certificate | None = result.certificate
    explored = explore(
        oracle,
        x,
        eps_gradient=math.inf if known is None else known.eps_gradient,
        eps_curvature=0.0,
        confidence=options.confidence,
        max_products=options.max_products,
        seed=options.seed,
        thorough=True,
        relative_error=_LOWER_BOUND_ERROR,
    )
    certificate = explored.certificate
    problem = "" if certificate.lower_bound > 0.0 else "λ_min of its Hessian is not bounded away from zero"
    # A variable whose distance from a bound is δ has a multiplier of at most ‖H‖δ there.
    norm = 0.0 if explored.spectrum is None else explored.spectrum.norm / explored.product_scale
    margin = known.eps_gradient / norm if known is not None and norm > 0.0 else 0.0
    if has_weak_bounds(result) or _reaches_bound(oracle, x, margin):
        problem = ONE_SIDED
    scaling = spectral_scaling(explored, oracle.space.dim)
    return Examination(x, certificate, scaling, certificate.grad_norm, problem)


def _after_newton_step(oracle: Oracle, examined: Examination, options: SolveOptions) -> Examination:
    """Make a Newton step to lower ‖∇f‖ further, and measure how the Hessian changes along it.

    At a regular minimum the step is short, and the Hessian hardly changes. Otherwise the Hessian at this point is no
    approximation of that at the minimum. Nothing is evaluated outside the bounds: if the step reaches one, the variable
    has a multiplier of zero there.
    """
    space, x = oracle.space, examined.x
    _, g = oracle.gradient(x)
    if space.norm(g) == 0.0:
        return examined
    before = oracle.hessian(x)
    try:
        step: Any = solve_with(oracle, before, g, examined, _NEWTON_TOL, options.max_products).v
        image = before(step)
        before.release()
        new_x = x - step
        if _reaches_bound(oracle, new_x):
            return replace(examined, problem=ONE_SIDED)
        after = oracle.hessian(new_x)
        change, size = space.norm(after(step) - image), space.norm(image)
        after.release()
    except NonFiniteProductError:
        return replace(examined, problem="a Hessian product near it is not finite")
    hessian_change, problem = change / size if size > 0.0 else 0.0, ""
    _, new_g = oracle.gradient(new_x)
    ratio = space.norm(new_g) / space.norm(g)
    if hessian_change > _DEGENERATE_CHANGE or not math.isfinite(ratio):
        problem = (
            f"its Hessian changes by {100 * hessian_change:.0f} % along the last Newton step, so that the minimum is "
            "degenerate or tol is too large"
        )
    examined = replace(examined, problem=problem, hessian_change=hessian_change)
    if ratio < 1.0:
        examined = replace(examined, x=new_x, grad_norm=examined.grad_norm * ratio)
    else:
        ratio = 1.0
    return replace(examined, x_error=2.0 * hessian_change * ratio)  # of H and of ∂²f/∂x∂θ


def _kink(oracle: Oracle, x: Vector, seed: int) -> str:
    """Describe a kink near x, by second differences of f along a random direction; empty if there is none.

    At a kink of f or of its gradient torch returns the derivatives of one side, which do not determine the derivative
    of the minimum. Points at which f is not defined, or beyond bounds, are not compared.
    """
    space = oracle.space
    d: Any = space.normal(np.random.default_rng((seed, _DIRECTION_SEED)))
    d = d / space.norm(d)
    operator = oracle.hessian(x)
    expected = space.dot(d, operator(d))
    operator.release()
    value, reliable = oracle.value(x), []
    for step in ((space.norm(x) or 1.0) * fraction for fraction in _DIFFERENCE_STEPS):
        ahead, behind = oracle.value(x + d * step), oracle.value(x - d * step)
        curvature = ((ahead - value) + (behind - value)) / step**2
        if _is_same(curvature, expected):
            return ""
        if 4.0 * space.eps * max(map(abs, (value, ahead, behind))) <= _LARGEST_ROUNDING * abs(curvature) * step**2:
            reliable.append((step, curvature))
    if len(reliable) < 2:
        return ""
    (longer, first), (shorter, last) = reliable[-2:]
    if not (_is_same(first, last) or _is_same(longer * first, shorter * last)):  # neither of ∇f, nor of f
        return ""
    return (
        f"along a random direction its Hessian has a curvature of {expected:.3g}, and differences of f have one of "
        f"{last:.3g}, so that f has a kink there or its second derivatives are wrong"
    )


def _is_same(curvature: float, other: float) -> bool:
    """Whether two curvatures are equal up to the error of differences."""
    return abs(curvature - other) <= _SAME_CURVATURE * abs(other)


def _reaches_bound(oracle: Oracle, x: Any, margin: float = 0.0) -> bool:
    """Whether a free variable of x is at a bound, beyond it, or within `margin` of it."""
    box = oracle.box
    return box is not None and bool(((x - box.lower <= margin) | (box.upper - x <= margin)).any())


def solve_with(
    oracle: Oracle, operator: Operator, u: Any, examined: Examination, rtol: float, max_products: int | None
) -> LinearSolution:
    """Solve a linear system with the Hessian; its error includes the error of differenced products."""
    lower, space = examined.certificate.lower_bound, oracle.space
    solution = solve(operator, u, space, examined.scaling, lower=lower, rtol=rtol, max_products=max_products)
    norm_v = space.norm(solution.v)
    if oracle.full_oracle.hvp != "finite-difference" or not (norm_v > 0.0 and lower > 0.0):
        return solution
    difference_error = operator.error(solution.v, operator(solution.v))
    return replace(solution, error=solution.error + difference_error / (lower * norm_v))
