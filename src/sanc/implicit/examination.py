"""Whether a minimum can be differentiated: its curvature, a last Newton step, and differences of ∇f."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from sanc.core.oracle import Operator, Oracle
from sanc.core.space import Vector
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.implicit.free import has_weak_bounds
from sanc.implicit.kinks import find_kink
from sanc.implicit.linear_systems import CUTOFF_EXPONENT, LinearSolution, solve, solve_least_squares
from sanc.implicit.smallest_eigenvalue import (
    Curvature,
    GradientOf,
    curvature_by_products,
    curvature_of_matrix,
    forms_hessian,
    hessian_columns,
)

_NEWTON_STEP_TOLERANCE = 1e-2
"""Relative error of the last Newton step, so that it divides ‖∇f‖ by about 100."""
_DEGENERATE_CHANGE = 0.1
"""Relative change of the Hessian along the last Newton step from which the minimum counts as degenerate.

At a regular minimum it is of the order of the step. At the minimum of x⁴ it is 5/9 at any distance.
"""
ONE_SIDED_REASON = "a variable is at a bound with a multiplier of zero up to tol, so that the derivative is one-sided"
"""Why a minimum with weakly active bounds cannot be differentiated."""
NOT_FINITE_REASON = "a Hessian product at it is not finite"
"""Why a minimum without a finite Hessian cannot be differentiated."""


@dataclass(frozen=True)
class SolveOptions:
    """Options of `argmin` for derivatives.

    Attributes
    ----------
    on_singular : str
        What to do without a reliable derivative: "raise", "warn" or "pinv".
    rtol : float or None
        Relative tolerance of derivatives; None: the default for the precision.
    confidence : float
        Probability with which the lower bound of the eigenvalues holds.
    max_products : int or None
        The most Hessian products at a minimum.
    seed : int
        Seed of random vectors.
    """

    on_singular: str
    rtol: float | None
    confidence: float
    max_products: int | None
    seed: int

    @property
    def pinv(self) -> bool:
        """Whether linear systems are solved by the pseudo-inverse."""
        return self.on_singular == "pinv"


@dataclass(frozen=True)
class Examination:
    """What is known about a minimum.

    Attributes
    ----------
    x : vector
        The free variables, after a last Newton step.
    curvature : Curvature
        Bounds on λ_min of their Hessian, and Ritz pairs for linear systems.
    grad_norm : float
        ‖∇f‖ at x.
    reason : str
        Why the minimum cannot be differentiated; empty if it can.
    hessian_change : float
        Relative change of the Hessian along the Newton step.
    x_error : float
        Relative error of a derivative because ∇f is not exactly zero.
    """

    x: Any
    curvature: Curvature
    grad_norm: float
    reason: str = ""
    hessian_change: float = 0.0
    x_error: float = 0.0


def examine(
    oracle: Oracle, x: Vector, gradient: GradientOf, result: Any, gradient_tolerance: float, options: SolveOptions
) -> Examination:
    """Examine the minimum x of an oracle of the free variables.

    Parameters
    ----------
    oracle, x : Oracle, vector
        Evaluates f as a function of the free variables, and its minimum as the run found it.
    gradient : callable
        ∇f as a function of all variables that torch differentiates.
    result : Result
        The result of the run.
    gradient_tolerance : float
        Tolerance of the run on ‖∇f‖; infinite if it had another one.
    options : SolveOptions
        Options of `argmin` for derivatives.
    """
    examined = _curvature(oracle, x, gradient, result, gradient_tolerance, options)
    if examined.reason:
        return examined
    examined = _after_newton_step(oracle, examined, options)
    if examined.reason in (ONE_SIDED_REASON, NOT_FINITE_REASON):
        return examined
    kink = find_kink(oracle, examined.x, examined.curvature.norm, options.seed)
    return replace(examined, reason=kink or examined.reason)


def _curvature(
    oracle: Oracle, x: Any, gradient: GradientOf, result: Any, gradient_tolerance: float, options: SolveOptions
) -> Examination:
    """Bound λ_min, and describe why linear systems have no solution or variables are at bounds."""
    curvature = _formed(oracle, x, gradient, result.nhev, gradient_tolerance, options) or curvature_by_products(
        oracle,
        x,
        gradient_tolerance=gradient_tolerance,
        confidence=options.confidence,
        max_products=options.max_products,
        seed=options.seed,
    )
    certificate, reason = curvature.certificate, ""
    if math.isnan(certificate.lambda_min):
        reason = NOT_FINITE_REASON
    elif options.pinv:
        # Along directions that count as zero the run leaves curvature of either sign.
        cutoff = oracle.space.eps**CUTOFF_EXPONENT * curvature.norm
        if certificate.lambda_min + certificate.ritz_error < -cutoff:
            reason = "it has negative curvature"
    elif not certificate.lower_bound > 0.0:
        reason = "λ_min of its Hessian is not bounded away from zero"
    # A variable whose distance from a bound is δ has a multiplier of at most ‖H‖δ there.
    tolerance = gradient_tolerance if math.isfinite(gradient_tolerance) else certificate.grad_norm
    margin = tolerance / curvature.norm if curvature.norm > 0.0 else 0.0
    if has_weak_bounds(result) or _reaches_bound(oracle, x, margin):
        reason = ONE_SIDED_REASON
    return Examination(x, curvature, certificate.grad_norm, reason)


def _formed(
    oracle: Oracle, x: Any, gradient: GradientOf, run_products: int, gradient_tolerance: float, options: SolveOptions
) -> Curvature | None:
    """Return the eigenpairs of the whole Hessian if products are exact and forming it costs less; else None."""
    dim = oracle.space.dim
    is_exact = oracle.full_oracle.hvp in ("auto", "double-backward")
    if not (is_exact and dim and forms_hessian(dim, run_products, options.max_products)):
        return None
    columns = hessian_columns(gradient, oracle.full_point(x), oracle.free_indices)  # type: ignore[arg-type]
    grad_norm = oracle.norm(oracle.gradient(x)[1])
    return None if columns is None else curvature_of_matrix(columns, grad_norm, gradient_tolerance)


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
        step: Any = solve_with(oracle, before, g, examined.curvature, _NEWTON_STEP_TOLERANCE, options).v
        image = before(step)
        before.release()
        new_x = x - step
        if _reaches_bound(oracle, new_x):
            return replace(examined, reason=ONE_SIDED_REASON)
        after = oracle.hessian(new_x)
        change_norm, image_norm = space.norm(after(step) - image), space.norm(image)
        after.release()
    except NonFiniteProductError:
        return replace(examined, reason=NOT_FINITE_REASON)
    hessian_change, reason = change_norm / image_norm if image_norm > 0.0 else 0.0, ""
    _, new_g = oracle.gradient(new_x)
    ratio = space.norm(new_g) / space.norm(g)
    if hessian_change > _DEGENERATE_CHANGE or not math.isfinite(ratio):
        reason = (
            f"its Hessian changes by {100 * hessian_change:.0f} % along the last Newton step, so that the minimum is "
            "degenerate or tol is too large"
        )
    examined = replace(examined, reason=reason, hessian_change=hessian_change)
    if ratio < 1.0:
        examined = replace(examined, x=new_x, grad_norm=examined.grad_norm * ratio)
    else:
        ratio = 1.0
    return replace(examined, x_error=2.0 * hessian_change * ratio)  # of H and of ∂²f/∂x∂θ


def _reaches_bound(oracle: Oracle, x: Any, margin: float = 0.0) -> bool:
    """Return whether a free variable of x is at a bound, beyond it, or within `margin` of it."""
    box = oracle.box
    return box is not None and bool(((x - box.lower <= margin) | (box.upper - x <= margin)).any())


def solve_with(
    oracle: Oracle,
    operator: Operator,
    u: Any,
    curvature: Curvature,
    rtol: float,
    options: SolveOptions,
    change: float = 0.0,
) -> LinearSolution:
    """Solve a linear system with the Hessian; its error includes the error of differenced products.

    `change` is the relative difference of the Hessian from that of `curvature`.
    """
    lower_bound, space, max_products = curvature.certificate.lower_bound, oracle.space, options.max_products
    if options.pinv:
        return solve_least_squares(operator, u, space, curvature.eigenpairs, rtol=rtol, max_products=max_products)
    solution = solve(
        operator, u, space, curvature.ritz_space, eigenvalue_lower_bound=lower_bound, rtol=rtol,
        max_products=max_products, change=change,
    )  # fmt: skip
    norm_v = space.norm(solution.v)
    if not oracle.differenced_products or not (norm_v > 0.0 and lower_bound > 0.0):
        return solution
    difference_error = operator.error(solution.v, operator(solution.v))
    return replace(solution, error=solution.error + difference_error / (lower_bound * norm_v))
