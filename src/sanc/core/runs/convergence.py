"""Tests whether a run on an exact objective has converged, stalled or diverged at its current point.

They return endings, and change nothing in the run.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile

import numpy as np

from sanc.core.record import Branch, Note
from sanc.core.runs import consistency
from sanc.core.runs.consistency import Defect
from sanc.core.runs.noise_estimates import estimate_gradient_rounding
from sanc.core.runs.run import Run
from sanc.core.runs.stall import STALL_LIMIT
from sanc.core.runs.status import CONTINUE, Ending, Status
from sanc.core.space import ROUNDING_ERRORS, Space, Vector
from sanc.core.spectrum.curvature import Certificate
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.core.units import Units, measure_units, unbounded_decrease

_REPORTED_DIFFERENCE_ERROR = 1e4
"""Errors of differenced gradients are reported as a cause only if they are of the order of this many tolerances."""

_LONG_RUN_ITERATIONS = 100
"""Iterations from which the eight gradients that a test of Hessian products needs are a small part of the run."""
_MIN_PROBE_PRODUCTS = 10
"""Smallest limit on the Hessian products of a probe for negative curvature if `certify` is False."""
_PROBE_DIVISOR = 10
"""After a long run such a probe may take a tenth of the products of the run."""


def point_ending(run: Run, value: float, grad_norm: float) -> Ending:
    """Return the ending at the current point: not finite, unbounded, or stationary; otherwise the run continues."""
    if not (math.isfinite(value) and math.isfinite(grad_norm)):
        return Ending(Status.NO_GRADIENT if run.iterations else Status.NOT_FINITE)
    # The units of a point beside an exact saddle are tiny, so that f also has to fall by a number of its own.
    unit, first_value = run.units.value + run.scale_of_f, run.findings.first_value
    if first_value - value > unbounded_decrease(first_value, unit, run.oracle.space.eps):
        return Ending(Status.UNBOUNDED)
    return stationary_ending(run) if grad_norm <= run.variables.tolerance(run) else CONTINUE


def stationary_ending(run: Run) -> Ending:
    """Return the ending at a stationary point, or a direction of negative curvature to leave it; with a certificate."""
    if _needs_no_curvature(run):
        return Ending(Status.SECOND_ORDER)
    max_products = run.limits.max_products
    counts_units_product = _is_uncapped_first_point(run)
    if counts_units_product and run.oracle.has_user_gradient:
        defect = consistency.find_wrong_small_gradient(run.oracle, run.x, run.findings.initial_units.length_scale)
        if defect is not None:
            return Ending(Status.INCONSISTENT, defect.sentence)
    if run.iterations and not run.limits.certify:
        affordable = max(_MIN_PROBE_PRODUCTS, run.oracle.meter.nhev // _PROBE_DIVISOR)
        max_products = affordable if max_products is None else min(max_products, affordable)
    cert, v = run.compute_certificate(run.oracle, max_products, run.seed + run.iterations)
    cert = replace(cert, products=cert.products + 1) if counts_units_product else cert
    if not cert.saddle:
        ending = _ending_without_saddle(run, cert)
    elif cert.inconsistent:
        ending = _asymmetry_ending(cert)
    else:
        ending = Ending(direction=v) if run.needs_products else Ending(Status.FIRST_ORDER)
    return replace(ending, certificate=cert)


def _needs_no_curvature(run: Run) -> bool:
    """Return whether a stationary point is a minimum without a certificate."""
    return run.oracle.convex and not run.limits.certify


def _is_uncapped_first_point(run: Run) -> bool:
    """Return whether no iteration was made, and a certificate has no limit on its products."""
    return not run.iterations and run.limits.max_products is None and run.oracle.space.dim > 0


def needs_first_units(run: Run, value: float, grad_norm: float) -> bool:
    """Return whether the run is at its first point and this is stationary, so that no iteration measures the units."""
    if not _is_uncapped_first_point(run) or _needs_no_curvature(run):
        return False
    return math.isfinite(value) and grad_norm <= run.variables.tolerance(run)


def measure_first_units(run: Run) -> Units:
    """Return the units, measured with one product before the first iteration."""
    oracle, space = run.oracle, run.oracle.space
    with oracle.uncounted():
        operator = oracle.hessian(run.x)
        v = space.normal(np.random.default_rng(run.seed))
        try:
            product_norm = space.norm(operator(v)) / space.norm(v)
        except NonFiniteProductError:
            product_norm = math.nan
        finally:
            operator.release()
    return measure_units(oracle.gradient(run.x)[0], 0.0, product_norm, space.norm(run.x))


def _ending_without_saddle(run: Run, cert: Certificate) -> Ending:
    """Return the ending at a stationary point at which no negative curvature was found."""
    if not cert.inconsistent:
        if defect := _missed_curvature_defect(run, cert):
            return Ending(Status.INCONSISTENT, defect.sentence)
        if defect := _difference_limit_defect(run, cert):
            return Ending(Status.STALLED, defect.sentence)
    if cert.second_order:
        return Ending(Status.SECOND_ORDER)
    if cert.inconsistent:
        return _asymmetry_ending(cert)
    if defect := _difference_error_defect(run):
        return Ending(Status.STALLED, defect.sentence)
    return Ending(Status.TIME_LIMIT if run.time_is_up() else Status.UNCERTIFIED)


def _asymmetry_ending(cert: Certificate) -> Ending:
    """Return the ending of a run whose Hessian products are asymmetric."""
    cause = f"The Hessian product is not symmetric, by {cert.asymmetry:.2g}: check hess or hessp."
    return Ending(Status.INCONSISTENT, cause)


def stall_ending(run: Run) -> Ending:
    """Return the ending of a stalled run, with its cause; without a status if the point is to be tested again."""
    stays = takewhile(lambda record: record.branch is Branch.STAYED, reversed(run.history))
    if any(record.note == Note.GRADIENT_NOT_FINITE for record in stays):
        return Ending(Status.NO_GRADIENT)
    defect = _difference_error_defect(run) or consistency.find_stall_cause(run.oracle, run.x, run.first_length_scale)
    if defect is None and run.needs_products:
        with run.oracle.uncounted():
            defect = consistency.find_different_scales(run.oracle, run.x)
    return _roundoff_ending(run) if defect is None else Ending(Status.STALLED, defect.sentence)


def limit_cause(run: Run) -> str:
    """Return a cause why a long run reached the limit of iterations: Hessian products that contradict the gradient."""
    if run.iterations < _LONG_RUN_ITERATIONS:
        return ""
    with run.oracle.uncounted():
        defect = consistency.find_wrong_product(run.oracle, run.x, run.first_length_scale)
    return "" if defect is None else defect.sentence


def _roundoff_ending(run: Run) -> Ending:
    """Return the ending of a stalled run whose gradient may be below its rounding error, or the error of differences.

    - If the gradient exceeds both errors, the run ends, and no cause is known.
    - If it does not, and the caller passed a tolerance, the run ends, and the cause names the error.
    - If it does not, and the tolerance is the default, the point is tested again with the error as the tolerance.

    The gradient counts as roundoff only if the models of the last iterations predict no decrease beyond the roundoff of
    f, or its change by rounding x: in an ill-conditioned valley the error across it may exceed the gradient along it.
    A differenced gradient is compared with its truncation error too, whatever the models predict. The ending then has a
    cause, with which the run ends unless `error_is_negligible`.
    """
    oracle, space = run.oracle, run.oracle.space
    g, relative_rounding = oracle.gradient(run.x)[1], ROUNDING_ERRORS * space.eps
    with oracle.uncounted():
        error, truncation = estimate_gradient_rounding(oracle, run.x, run.first_length_scale), None
        by_rounding_x = relative_rounding * space.norm(run.x) * error / run.scale_of_f
        predicts_none = all(
            record.model_decrease <= relative_rounding * abs(record.value) + by_rounding_x
            for record in run.history[-STALL_LIMIT:]
        )
        if not (predicts_none or oracle.differenced_gradient):
            return Ending(Status.STALLED)
        is_roundoff = predicts_none and space.norm(g) <= error
        if not is_roundoff:
            truncation = oracle.truncation_error(run.x)
    if not is_roundoff and (truncation is None or space.norm(_beyond_truncation(space, g, truncation)) > error):
        return Ending(Status.STALLED)
    error = error if truncation is None else max(error + space.norm(truncation), space.norm(g))
    if not run.limits.default_tol:
        source = "Roundoff" if truncation is None else "Differences"
        norm = max(error, run.variables.gradient_norm(run, g))  # not in the variables of `error` with a preconditioner
        cause = f"{source} alone may cause a gradient of {norm:.1g} here: pass a tol of at least that."
        return Ending(Status.STALLED, cause)
    cause = "" if truncation is None else consistency.truncation_defect(error).sentence
    return Ending(cause=cause, gradient_rounding=error)


def _beyond_truncation(space: Space, g: Vector, errors: Vector) -> Vector:
    """Return the part of g that exceeds the truncation errors b.

    A run stalls where −g is no direction of descent: ∇f·(∇f + b) ≤ 0. Then g = ∇f + b is in the ball with the diameter
    from 0 to b, so that |g_k| ≤ (‖b‖ + |b_k|)/2. An entry without truncation error remains as it is.
    """
    entries, errors = space.tensor(g), space.tensor(errors)
    bounds = 0.5 * (errors + errors.norm()) * (errors > 0.0)
    return space.vector(entries - entries.clamp(-bounds, bounds))


def error_is_negligible(run: Run) -> bool:
    """Return whether the error of the gradient can change f only by a small fraction of the decrease of the run.

    Newton's step of a gradient of this norm along the smallest eigenvalue has the largest decrease, ‖g‖²/(2λ).
    """
    certificate, error = run.findings.certificate, run.findings.gradient_rounding
    value, lowest = run.oracle.gradient(run.x)[0], certificate.lower_bound if certificate else 0.0
    negligible_decrease = math.sqrt(run.oracle.space.eps) * (run.findings.first_value - value)
    return lowest > 0.0 and 0.5 * error * (error / lowest) <= negligible_decrease


def _difference_error_defect(run: Run) -> Defect | None:
    """Return the defect if no gradient of this run exceeded the error of differences, where that error is reported."""
    norms = [record.grad_norm * run.scale_of_f for record in run.history]
    largest_norm = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    largest_norm = max(largest_norm, run.iteration.grad_norm, _REPORTED_DIFFERENCE_ERROR * run.limits.tol)
    return consistency.find_unreliable_gradients(run.oracle, run.x, largest_norm)


def _difference_limit_defect(run: Run, cert: Certificate) -> Defect | None:
    """Return the defect of differenced gradients whose error exceeds the tolerances of the certificate.

    If the caller passed the tolerance on the gradient norm, the error is compared with that. The default is raised to
    the error, so that the gradient norm shows little. Then, and if the error of products exceeds √ε, the curvature has
    to be certified, or at least positive beyond the error of one product.
    """
    error, tol = run.oracle.gradient_error(run.x), run.limits.tol
    defect = consistency.find_large_difference_error(run.oracle, run.x, run.variables.tolerance(run))
    product_error = cert.ritz_error / math.sqrt(max(cert.products, 1))  # `ritz_error` is a sum over all products
    is_positive = cert.second_order or cert.lambda_min > product_error
    largest_error = max(run.variables.curvature_tolerance(run), math.sqrt(tol) * math.sqrt(run.scale_of_f))
    is_inaccurate = error > tol or (run.oracle.differenced_gradient and cert.ritz_error > largest_error)
    if defect is None and is_inaccurate and not is_positive:
        return consistency.difference_defect(error, cert.ritz_error)
    return defect


def _missed_curvature_defect(run: Run, cert: Certificate) -> Defect | None:
    """Return the defect of products that are differences of the caller's gradient, if values contradict them."""
    oracle = run.oracle
    if not (oracle.has_user_gradient and oracle.differenced_products):
        return None
    with oracle.uncounted():
        return consistency.find_missed_curvature(oracle, run.x, run.units.length_scale, cert.curvature_tolerance)
