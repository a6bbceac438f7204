"""Recovery of a run that stalled at a saddle or maximum."""

from __future__ import annotations

import math

from sanc.core.runs.run import Run
from sanc.core.space import Vector
from sanc.core.spectrum.curvature import Certificate
from sanc.core.units import length_scale_at


def leave_saddle(run: Run) -> bool:
    """Move the run to a lower point along negative curvature, and return whether there is one.

    If there is none, the run keeps the certificate of its point.
    """
    certificate, lower_point = probe_saddle(run)
    if lower_point is None:
        if certificate is not None:
            run.note(certificate=certificate)
        return False
    run.restart_at(lower_point)
    return True


def probe_saddle(run: Run) -> tuple[Certificate | None, Vector | None]:
    """Return the certificate of the current point, and a point along negative curvature with a lower f.

    There is no certificate without products or if no iteration is left, and often no such point.
    """
    if not run.needs_products or run.limits.max_iter <= run.iterations:
        return None, None
    certificate, v = run.compute_certificate(run.oracle, run.limits.max_products, run.seed + run.iterations)
    return certificate, _lower_point(run, certificate, v) if certificate.saddle else None


def _lower_point(run: Run, cert: Certificate, v: Vector) -> Vector | None:
    """Return a point along ±v, the direction of negative curvature, at which f is lower by more than its roundoff.

    Near a strong saddle or maximum the steps of the model may change f by less than its roundoff, so that the ratio
    test cannot detect that they are too short. Along v with vᵀHv = λ < 0 the predicted decrease ½|λ|t² exceeds the
    roundoff of f from t = √(2 eps|f|/|λ|) on. Longer steps are tried from there, each twice the last, up to √(|f|/|λ|),
    ‖x‖ or the length scale.
    """
    space, (value, g) = run.oracle.space, run.oracle.gradient(run.x)
    decrease_length = math.sqrt(max(abs(value), 1.0 / space.max) / -cert.lambda_min)  # f may have underflowed to 0
    max_step = max(decrease_length, length_scale_at(run.units.length_scale, space.norm(run.x)))
    first_step = max(math.sqrt(2.0 * space.eps) * decrease_length, math.sqrt(space.eps) * max_step)
    sign = -math.copysign(1.0, space.dot(g, v))
    for direction in (v * sign, v * -sign):
        lower_point = _search_along(run, direction, first_step, max_step, value - space.eps * abs(value))
        if lower_point is not None:
            return lower_point
    return None


def _search_along(run: Run, direction: Vector, step: float, max_step: float, below: float) -> Vector | None:
    """Return the first minimum of f over x + t·direction, t = step, 2·step, … ≤ `max_step`, with f < `below`.

    Points with a gradient that is not finite are skipped. None if there is no such minimum.
    """
    oracle, lowest = run.oracle, None
    while step <= max_step:
        trial = oracle.move(run.x, direction * step)
        value = oracle.value(trial)
        if -math.inf < value < below and math.isfinite(oracle.space.norm(oracle.gradient(trial)[1])):
            lowest, below = trial, value
        elif lowest is not None:
            break
        step *= 2.0
    return lowest
