"""The loop of a minimisation: test the point, test the limits, make an iteration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sanc.core.acceptance import NOISE_DEVIATIONS
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
from sanc.core.runs.faces import enter_face, release_weak_bounds
from sanc.core.runs.noise import tolerable_noise
from sanc.core.runs.run import Run
from sanc.core.runs.saddle import leave_saddle, probe_saddle
from sanc.core.runs.scaled_objective import objective_exponent
from sanc.core.runs.scaled_variables import in_scaled_variables
from sanc.core.runs.status import CONTINUE, Ending, Status
from sanc.core.runs.step_checks import MadeStep
from sanc.core.space import ROUNDING_ERRORS, Vector
from sanc.errors import NonFiniteStartError


def run_to_end(
    run: Run, report: Callable[[Run], bool], clock: Callable[[], float] = time.perf_counter
) -> tuple[Run, Status]:
    """Iterate until the run ends, and return how, and the run: another one if it continued in scaled variables.

    `report` is called after each iteration, and may ask to stop.
    """
    if run.limits.max_time < math.inf:
        deadline = clock() + run.limits.max_time
        run.time_is_up = lambda: clock() >= deadline
    if run.oracle.exact and not run.iterations and run.iteration.method.initial_sigma_rule.measures_sigma0:
        run.scale_objective(objective_exponent(run.oracle, run.x))
    while True:
        if run.step_monitor.noise_found:  # the run resumes after a stall
            run = _continuation(run) or run
        elif run.variable_scaling_is_due:
            run = in_scaled_variables(run)
        ending = _iterate_exact(run, report) if run.oracle.exact else _iterate_sampled(run, report)
        if ending.status is None:
            continue
        continued = _continuation(run) if ending.status is Status.STALLED else None
        if continued is None:
            run.cause = ending.cause
            enter_face(run)
            return run, ending.status
        run = continued


def _continuation(run: Run) -> Run | None:
    """Return the run that continues after a stall: in scaled variables, or with tolerated noise; None if it ends."""
    continued = in_scaled_variables(run)
    if continued is not run:
        return continued
    noise = tolerable_noise(run)
    if not noise:
        return None
    run.continue_with_noise(noise)
    return run


def _iterate_exact(run: Run, report: Callable[[Run], bool]) -> Ending:
    """Make one iteration of an exact objective, unless the run ends before it; return the ending, if it is reached."""
    run.before_iteration()
    enter_face(run)
    value, g = run.oracle.gradient(run.x)
    ending = _test_current_point(run, value, run.gradient_norm(g))
    if ending.status is not None:
        return CONTINUE if ending.status.success and _leave_weak_bounds(run) else ending
    if run.stall_monitor.has_stalled:
        return CONTINUE if leave_saddle(run) else _stalled_ending(run, ending)
    before = run.x
    outcome = _iterate_once(run, ending.direction)
    if isinstance(outcome, Status):
        return Ending(outcome, limit_cause(run) if outcome is Status.ITERATION_LIMIT else "")
    ending = run.step_monitor.ending_after(
        run.oracle, MadeStep(before, run.x, g, outcome), run.first_length_scale, run.needs_products
    )
    return Ending(Status.CALLBACK) if report(run) else ending


def _test_current_point(run: Run, value: float, grad_norm: float) -> Ending:
    """Return the ending of the run at its point, if it ends there; the run keeps what the test measures."""
    run.first_value = value if math.isnan(run.first_value) else run.first_value
    if needs_first_units(run, value, grad_norm):
        run.initial_units = measure_first_units(run)
    ending = point_ending(run, value, grad_norm)
    _keep_certificate(run, ending)
    return ending


def _keep_certificate(run: Run, ending: Ending) -> None:
    """Set the certificate of the run to that of an ending, if it has one."""
    run.certificate = run.certificate if ending.certificate is None else ending.certificate


def _stalled_ending(run: Run, ending: Ending) -> Ending:
    """Return the ending of a stalled run that found no lower point along negative curvature."""
    if ending.direction is not None:
        return Ending(Status.FIRST_ORDER)
    stalled = stall_ending(run)
    if not stalled.gradient_rounding:
        return stalled
    run.gradient_rounding = stalled.gradient_rounding
    ending = stationary_ending(run)
    _keep_certificate(run, ending)
    if stalled.cause and not error_is_negligible(run):
        return Ending(Status.STALLED, stalled.cause)
    return Ending(Status.FIRST_ORDER) if ending.direction is not None else ending


def _leave_weak_bounds(run: Run) -> bool:
    """Return whether x moved from a second-order point of its face into the box, along negative curvature.

    Only variables with a zero multiplier can be released at a stationary point. Whether f is lower in some combination
    of them cannot be decided with few products, so that only the direction of the left-most Ritz value is tried.
    """
    if not (run.needs_products and release_weak_bounds(run)):
        return False
    if not run.units.length_scale:  # the start had no free variable
        run.initial_units = measure_first_units(run)
    _, lower_point = probe_saddle(run)
    if lower_point is None:
        enter_face(run)
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
    run.certificate = None
    try:
        run.x, record = run.iteration.iterate(run.x, run.oracle, direction)
    except NonFiniteStartError:
        return Status.NOT_FINITE
    run.history.append(run.unscaled_record(record))
    if run.oracle.exact:
        _count_progress(run, record)
    run.oracle.end(record.step_norm)
    return record


def _count_progress(run: Run, record: Record) -> None:
    """Count an iteration of an exact objective that makes no progress.

    Where −g is no direction of descent because of the error of a differenced gradient g, steps of a few rounding errors
    of x may decrease f for ever.
    """
    iteration, space = run.iteration, run.oracle.space
    run.stall_monitor.update(
        record,
        space.eps,
        rejection_counts=iteration.stopping_test_holds or iteration.method.initial_sigma_rule.interpolates,
        min_step_norm=ROUNDING_ERRORS * space.eps * space.norm(run.x) if run.oracle.differenced_gradient else 0.0,
        min_decrease=NOISE_DEVIATIONS * iteration.state.value_noise,
    )


def _reached_limit(run: Run) -> Status | None:
    """Return the status of a limit that the run has reached."""
    if run.iterations >= run.limits.max_iter:
        return Status.ITERATION_LIMIT
    meter = run.oracle.meter
    if meter.paper_calls >= run.limits.max_calls or meter.nfev >= run.limits.max_nfev:
        return Status.CALL_LIMIT
    return Status.TIME_LIMIT if run.time_is_up() else None
