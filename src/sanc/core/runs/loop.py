"""The loop of a minimisation: test the point, test the limits, make an iteration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sanc.core.record import Record
from sanc.core.runs.convergence import (
    error_is_negligible,
    limit_cause,
    measure_first_units,
    needs_first_units,
    point_ending,
    stall_ending,
    stationary_ending,
)
from sanc.core.runs.faces import current_face, face_without_weak_bounds
from sanc.core.runs.noise import tolerable_noise
from sanc.core.runs.run import Run
from sanc.core.runs.saddle import leave_saddle, probe_saddle
from sanc.core.runs.scaled_objective import objective_exponent
from sanc.core.runs.scaled_variables import continue_in_scaled_variables
from sanc.core.runs.status import CONTINUE, Ending, Status
from sanc.core.runs.step_checks import MadeStep
from sanc.core.space import Vector
from sanc.errors import NonFiniteStartError


def run_to_end(run: Run, report: Callable[[Run], bool], clock: Callable[[], float] = time.perf_counter) -> Status:
    """Iterate until the run ends. Return its status.

    `report` is called after each iteration, and may ask to stop.
    """
    run.start_clock(clock)
    if run.oracle.exact and not run.iterations and run.iteration.method.initial_sigma_rule.measures_sigma0:
        run.scale_objective(objective_exponent(run.oracle, run.x))
    while True:
        if run.step_monitor.noise_found:  # the run resumes after a stall
            _continue_stalled(run)
        elif run.variables.scaling_is_due(run.iterations):
            continue_in_scaled_variables(run)
        ending = _iterate_exact(run, report) if run.oracle.exact else _iterate_sampled(run, report)
        if ending.status is None or (ending.status is Status.STALLED and _continue_stalled(run)):
            continue
        run.note(cause=ending.cause)
        run.enter_face(current_face(run))
        return ending.status


def _continue_stalled(run: Run) -> bool:
    """Continue a stalled run in scaled variables, or with tolerated noise; return False if it ends."""
    if continue_in_scaled_variables(run):
        return True
    noise = tolerable_noise(run)
    if noise:
        run.continue_with_noise(noise)
    return bool(noise)


def _iterate_exact(run: Run, report: Callable[[Run], bool]) -> Ending:
    """Make one iteration of an exact objective, unless the run ends before it; return the ending, if it is reached."""
    run.variables.prepare(run)
    run.enter_face(current_face(run))
    value, g = run.oracle.gradient(run.x)
    ending = _test_current_point(run, value, run.variables.gradient_norm(run, g))
    if (ending.status is not None or run.stall_monitor.has_stalled) and run.leave_ripples():
        return CONTINUE
    if ending.status is not None:
        return CONTINUE if ending.status.success and _leave_weak_bounds(run) else ending
    if run.stall_monitor.has_stalled:
        return CONTINUE if leave_saddle(run) else _stalled_ending(run, ending)
    before = run.x
    outcome = _iterate_once(run, ending.direction)
    if isinstance(outcome, Status):
        return Ending(outcome, limit_cause(run) if outcome is Status.ITERATION_LIMIT else "")
    step = MadeStep(before, run.x, g, outcome)
    ending = run.check_step(step)
    if ending.status is None:
        run.follow_ripples(step)
    return Ending(Status.CALLBACK) if report(run) else ending


def _test_current_point(run: Run, value: float, grad_norm: float) -> Ending:
    """Test the current point. Return the ending of the run, if it ends there; the run keeps what the test measures."""
    if math.isnan(run.findings.first_value):
        run.note(first_value=value)
    if needs_first_units(run, value, grad_norm):
        run.note(initial_units=measure_first_units(run))
    ending = point_ending(run, value, grad_norm)
    if ending.certificate is not None:
        run.note(certificate=ending.certificate)
    return ending


def _stalled_ending(run: Run, ending: Ending) -> Ending:
    """Return the ending of a stalled run that found no lower point along negative curvature."""
    if ending.direction is not None:
        return Ending(Status.FIRST_ORDER)
    stalled = stall_ending(run)
    if not stalled.gradient_rounding:
        return stalled
    run.note(gradient_rounding=stalled.gradient_rounding)
    ending = stationary_ending(run)
    if ending.certificate is not None:
        run.note(certificate=ending.certificate)
    if stalled.cause and not error_is_negligible(run):
        return Ending(Status.STALLED, stalled.cause)
    return Ending(Status.FIRST_ORDER) if ending.direction is not None else ending


def _leave_weak_bounds(run: Run) -> bool:
    """Move from a second-order point of a face into the box, along negative curvature; return whether that lowers f.

    Only variables with a zero multiplier can be released at a stationary point. Whether f is lower in some combination
    of them cannot be decided with few products, so that only the direction of the left-most Ritz value is tried.
    """
    face = face_without_weak_bounds(run) if run.needs_products else None
    if face is None:
        return False
    run.enter_face(face)
    if not run.units.length_scale:  # the first point had no free variable
        run.note(initial_units=measure_first_units(run))
    _, lower_point = probe_saddle(run)
    if lower_point is None:
        run.enter_face(current_face(run))
        return False
    run.restart_at(lower_point)
    return True


def _iterate_sampled(run: Run, report: Callable[[Run], bool]) -> Ending:
    """Make one iteration on samples, unless the run ends before it; return the ending, if it is reached."""
    outcome = _iterate_once(run)
    if isinstance(outcome, Status) or report(run):
        return Ending(outcome if isinstance(outcome, Status) else Status.CALLBACK)
    return Ending(Status.STAGNATED) if run.iteration.stopping_test_holds else CONTINUE


def _iterate_once(run: Run, direction: Vector | None = None) -> Record | Status:
    """Make an iteration and return its record, in the units of the run; or return the status if the run ends."""
    limit = _reached_limit(run)
    if limit is not None:
        return limit
    try:
        return run.make_iteration(direction)
    except NonFiniteStartError:
        return Status.NOT_FINITE


def _reached_limit(run: Run) -> Status | None:
    """Return the status of a limit that the run has reached."""
    if run.iterations >= run.limits.max_iter:
        return Status.ITERATION_LIMIT
    meter = run.oracle.meter
    if meter.paper_calls >= run.limits.max_calls or meter.nfev >= run.limits.max_nfev:
        return Status.CALL_LIMIT
    return Status.TIME_LIMIT if run.time_is_up() else None
