"""What preset "robust" adds to the paper's iteration, piece by piece; acceptance and escape take them, the loop none.

Interpolated σ is `sanc.core.judge.interpolated`; the first radius, the rule that ends a Krylov space, and further tries
of a rejected step in the same space are in `sanc.core.model`. Here are: values that are lost in rounding, longer steps
where σ was a guess, what the gradient at the end of a step says of it, and an escape that is checked.
"""

from __future__ import annotations

import math

from sanc.core.iterate import Iterate
from sanc.core.judge import Verdict, ratio
from sanc.core.record import Branch
from sanc.core.space import Vector

NO_GRADIENT = "the gradient is not finite where f is lower"
_BETTER = 1.2
"""ρ above which the model is not trusted to have made a step long enough."""
_HALVINGS = 40
"""Most halvings of an escape step before it is given up."""


def allow_rounding(at: Iterate, actual: float, predicted: float, trial: Vector) -> tuple[float, float]:
    """Return the decrease that is believed, and the noise: the rounding error of f.

    Granted on both sides of the ratio, it lets ρ tend to 1 where f barely moves. A value may carry the rounding error
    of terms far larger than itself, so that its own size says too little: where values could be lost in that, a step
    that halves an exact gradient is as good as promised. Of badly scaled variables the curvature tells of terms that
    are nowhere, so they are no larger than what the first point says of values.
    """
    eps, value = at.space.eps, at.record.value
    size = max(abs(value), min(_terms(at), at.units.value))
    hidden = abs(actual) <= 1e3 * eps * size and predicted <= math.sqrt(eps) * size
    if hidden and actual < at.judge.settings.eta1 * predicted and at.record.trials == 1 and at.oracle.exact:
        _, g = at.oracle.gradient(trial)
        if at.space.norm(g) <= 0.5 * at.record.grad_norm:
            at.record.note = "the values are lost in rounding and the gradient decided"
            actual = predicted
    return actual, 10.0 * eps * abs(value)


def _terms(at: Iterate) -> float:
    """Guess how large the terms are of which f is the sum: what the curvature makes of lengths as those of x."""
    length = max(at.units.length, at.size)
    return 0.0 if at.spectrum is None else at.spectrum.size * length * length


def farther(at: Iterate, point: Vector, tries: int) -> Vector:
    """Go on to steps of smaller σ in the same space while f falls by more than the model says.

    It is asked where σ was a guess: the first of all, or raised to keep a step short.
    """
    record, judge = at.record, at.judge
    while record.rho > _BETTER and judge.sigma < record.sigma and record.trials < tries:
        sigma = judge.sigma
        step = at.solve(sigma)
        if step.norm < 2.0 * record.step_norm:
            break
        trial = at.trial_point(step)
        value = at.try_value(trial)
        if not -math.inf < value < record.trial_value:
            break
        actual = record.value - value
        verdict = judge.try_step(actual, step.decrease, step.norm, record.grad_norm)
        record.branch = Branch.VERY_SUCCESSFUL if verdict is Verdict.VERY_SUCCESSFUL else Branch.SUCCESSFUL
        record.sigma, record.rho = sigma, ratio(actual, step.decrease)
        record.model_decrease, record.step_norm, at.cubic_norm = step.decrease, step.norm, step.norm
        record.curvature_share, record.trial_value = step.curvature_share, value
        point = trial
    return point


def look_back(at: Iterate, point: Vector, verdict: Verdict) -> Vector | None:
    """Ask for the gradient at the new point, with which the next iteration begins, and learn from it.

    Where it is not finite, the step is taken back.
    """
    record, judge = at.record, at.judge
    _, g = at.oracle.gradient(point)
    if not math.isfinite(at.oracle.norm(g)):
        record.branch, record.step_norm, record.note = Branch.STAYED, 0.0, NO_GRADIENT
        judge.retreat(record.sigma, record.model_decrease, at.cubic_norm)
        return None
    if verdict is Verdict.SUCCESSFUL:
        judge.look_back(record.sigma, record.model_decrease, record.step_norm, at.space.dot(g, point - at.x))
    return point


def halved_until_lower(at: Iterate, d: Vector, norm: float) -> tuple[Vector, float, float] | None:
    """Return the first of x + d, x + d/2, … at which f is lower than at x, with f there and the length of the step."""
    before = at.value()
    for _ in range(_HALVINGS):
        trial = at.x + d
        value = at.try_value(trial)
        if -math.inf < value < before:
            if not at.ahead or math.isfinite(at.oracle.norm(at.oracle.gradient(trial)[1])):
                return trial, value, norm
            at.record.note = NO_GRADIENT
        d, norm = d * 0.5, norm * 0.5
        if norm <= at.space.eps * max(at.size, 1e-300):
            return None
    return None
