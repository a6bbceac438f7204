"""The second choice of a method: which trial points are taken (2.5, 2.6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from sanc.core import robust
from sanc.core.cubic import CubicStep
from sanc.core.iterate import Iterate
from sanc.core.judge import Verdict, ratio
from sanc.core.record import Branch
from sanc.core.space import Vector

Acceptance: TypeAlias = Callable[[Iterate, CubicStep, Vector], Vector | None]
"""Judges a trial point, moves σ, and returns the next point, or None where the step is rejected."""


def by_ratio(at: Iterate, step: CubicStep, trial: Vector) -> Vector | None:
    """Take a step where f falls by at least η1 of what the model promised; 2.5 and 2.6: ρ, the verdict and σ."""
    s, record, before = at.settings, at.record, at.value()
    record.trial_value = at.try_value(trial)
    actual, noise = before - record.trial_value, 0.0
    if s.rounding_guard:
        actual, noise = robust.allow_rounding(at, actual, step.decrease, trial)
    record.rho = ratio(actual, step.decrease, noise)
    verdict = at.judge.try_step(actual, step.decrease, step.norm, record.grad_norm, noise)
    if not verdict.accepted:
        if not math.isfinite(record.trial_value):
            record.note = "the trial value is not finite"
        return None
    record.branch = Branch.VERY_SUCCESSFUL if verdict is Verdict.VERY_SUCCESSFUL else Branch.SUCCESSFUL
    record.step_norm = step.norm
    point = robust.farther(at, trial, 1 + s.resolves) if at.guessed else trial
    return robust.look_back(at, point, verdict) if s.sigma_rule == "interpolate" and at.ahead else point


def always(at: Iterate, step: CubicStep, trial: Vector) -> Vector | None:
    """Take every step at whose end f is finite; σ keeps its fixed value, and the ratio is told alone (2.5)."""
    record, before = at.record, at.value()
    record.trial_value = at.try_value(trial)
    if not math.isfinite(record.trial_value):
        at.judge.reject()
        record.note = "the trial value is not finite"
        return None
    at.judge.relax()
    record.rho = ratio(before - record.trial_value, step.decrease)
    record.branch, record.step_norm = Branch.UNTESTED, step.norm
    return trial


def with_momentum(at: Iterate, step: CubicStep, trial: Vector) -> Vector | None:
    """CRM (Wang, Zhou, Liang and Lan 2018): extrapolate beyond the cubic point, keep the better of the two."""
    if always(at, step, trial) is None:
        return None
    previous, at.previous = at.x if at.previous is None else at.previous, trial
    _, g = at.oracle.gradient(trial)
    at.oracle.meter.paper_calls += at.oracle.sizes[0]  # a second gradient is a second |S_g|
    beta = min(at.settings.momentum, at.space.norm(g), step.norm)
    if not (math.isfinite(beta) and beta > 0.0):
        return trial
    ahead = trial + (trial - previous) * beta
    value = at.try_value(ahead)
    if not -math.inf < value < at.record.trial_value:
        return trial
    at.record.trial_value, at.record.note = value, "momentum"
    at.record.step_norm = at.space.norm(ahead - at.x)
    return ahead
