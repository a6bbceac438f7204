"""Returning to an earlier point: after batches that are not finite, after a rise of the loss, and after outliers.

The functions receive the state and return an `IterationOutcome` with the next one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sanc.core.oracle import Oracle
from sanc.core.record import Record
from sanc.core.space import Vector
from sanc.minibatch import batch_losses
from sanc.minibatch.averaging import StepResults
from sanc.minibatch.outcome import IterationOutcome
from sanc.minibatch.state import BatchComparison, MeanLoss, MinibatchState

_FIRST_LOSS_OUTLIER_FACTOR = 100.0
"""The first batches may have been outliers if the first loss is this many times a later one: that at the end of the
second-order phase, or of one of the first averaged steps. The losses at both points are then compared on one batch."""
_OUTLIER_LOSS_FRACTION = 0.9
"""The first batches were outliers if the loss at the first point is lower than the present one by this fraction."""
_CONFIRMED_RISE_FRACTION = 0.5
"""Steps caused a rise of the loss if one batch shows this fraction of it."""
_ETA_REDUCTION_FACTOR = 0.5
"""Factor of η after a rise of the loss, or after batches that are not finite."""


def handle_nonfinite(
    state: MinibatchState, x: Vector, oracle: Oracle, value: float, grad_norm: float, quantity: str = ""
) -> IterationOutcome:
    """Stay at x if only this batch is not finite; return to an earlier point if the last one was not finite either.

    `quantity` is what is not finite; by default it follows from the value.
    """
    value = value if oracle.has_values else math.nan
    is_gradient = math.isfinite(value) or not oracle.has_values
    quantity = quantity or f"the {'gradient' if is_gradient else 'loss'} of the gradient sample"
    note = f"{quantity} is not finite"
    state = replace(state.without_checksum(), nonfinite_batches=state.nonfinite_batches + 1)
    batch_losses.report_nonfinite(state, note, value, grad_norm)
    record = Record(state.iteration, value=value, grad_norm=grad_norm, note=note)
    if state.nonfinite_batches == 1 or state.nonfinite_batches > state.iteration:  # in the latter case no step was made
        return IterationOutcome(state, x, record)
    if state.losses.safe_point is not None and oracle.has_values:
        record = replace(record, trials=1)
        if not math.isfinite(oracle.gradient_sample_value(state.losses.safe_point)):  # the batch is the cause
            return IterationOutcome(state, x, record)
    return _return_to_safe_point(with_reduced_eta(state), x, oracle, record)


def with_reduced_eta(state: MinibatchState) -> MinibatchState:
    """Return the state with half of η; it grows back when the last steps are aligned."""
    return replace(state, eta_reduction=_ETA_REDUCTION_FACTOR * state.eta_reduction)


def _return_to_safe_point(state: MinibatchState, x: Vector, oracle: Oracle, record: Record) -> IterationOutcome:
    """Return to the last safe point, without an update of the metric; stay at x if there is none."""
    state, safe_point = replace(state.without_checksum(), offset=None), state.losses.safe_point
    if safe_point is None or safe_point is x:
        return IterationOutcome(state, x, record)
    note = f"{record.note}: back to the last safe point"
    record = replace(record, step_norm=oracle.space.norm(safe_point - x), note=note)
    return IterationOutcome(state, safe_point, record, has_returned=True)


def steps_raised_loss(losses: MeanLoss, x: Vector, oracle: Oracle) -> bool:
    """Return whether one batch confirms that the steps since the last safe point caused the rise of the mean loss."""
    safe_point = losses.safe_point
    if safe_point is None or safe_point is x:
        return False
    rise = oracle.gradient_sample_value(x) - oracle.gradient_sample_value(safe_point)
    return not rise < _CONFIRMED_RISE_FRACTION * (losses.loss_mean - losses.lowest_loss_mean)


def return_after_rise(state: MinibatchState, x: Vector, oracle: Oracle, gradient_point: Vector) -> IterationOutcome:
    """Return to the last safe point with half of η, because steps have raised the loss."""
    value, g = oracle.gradient(gradient_point)
    record = Record(state.iteration, value=value, grad_norm=oracle.norm(g), trials=2, note="the loss rose")
    return _return_to_safe_point(with_reduced_eta(state), x, oracle, record)


def first_averaged_point(comparison: BatchComparison, x: Vector, value: float, oracle: Oracle) -> Vector:
    """Return where averaging starts: at x, or at the first point of the run if this batch has a lower loss there.

    The loss has to be far lower if the losses of the second-order phase show no outliers.
    """
    first_point = comparison.first_point
    if first_point is None:
        return x
    # The first loss is normal if it is above the present one, but not as far as the loss of an outlier.
    is_normal = value <= comparison.first_loss < _FIRST_LOSS_OUTLIER_FACTOR * value
    loss_at_first_point = oracle.gradient_sample_value(first_point)
    is_lower = _is_lower_at_first_point(loss_at_first_point, value, is_normal=is_normal)
    is_only_finite_there = math.isfinite(loss_at_first_point) and not math.isfinite(value)
    return first_point if is_lower or is_only_finite_there else x


def _is_lower_at_first_point(loss_at_first_point: float, value: float, *, is_normal: bool) -> bool:
    """Return whether the loss at the first point is below the present one, by far if the first loss was normal."""
    return loss_at_first_point < value - (_OUTLIER_LOSS_FRACTION * abs(value) if is_normal else 0.0)


def due_loss_at_first_point(state: MinibatchState, oracle: Oracle) -> float | None:
    """Return the loss at the first point on this batch at averaged steps 0, 1, 2, 4, 8 and 16; otherwise None."""
    is_due = oracle.has_values and state.steps & (state.steps - 1) == 0
    first_point = state.comparison.first_point
    return oracle.gradient_sample_value(first_point) if is_due and first_point is not None else None


def correct_first_steps(
    state: MinibatchState, x: Vector, oracle: Oracle, results: StepResults, loss_at_first_point: float | None
) -> tuple[MinibatchState, IterationOutcome | None]:
    """Return the next state, and an outcome if the first batches or gradients were outliers; averaging then restarts.

    The second-order phase has fitted outliers if this batch has a lower loss at the first point of the run, to which
    the run then returns. There are two cases:

    * The first loss was normal. The losses are compared in the steps in which `loss_at_first_point` is not None, and
      the one at the first point has to be far lower.
    * The first loss was an outlier. The losses are compared once, in this step, and the one at the first point has to
      be lower. It is evaluated if it is None.
    """
    value, first_point = results.value if oracle.has_values else math.nan, state.comparison.first_point
    is_normal = state.comparison.first_loss < _FIRST_LOSS_OUTLIER_FACTOR * results.value
    if first_point is not None and oracle.has_values and not (is_normal and loss_at_first_point is None):
        if not is_normal:
            state = _without_first_point(state)
        if loss_at_first_point is None:
            loss_at_first_point = oracle.gradient_sample_value(first_point)
        if _is_lower_at_first_point(loss_at_first_point, value, is_normal=is_normal):
            note = "the first batches were outliers: returned to the initial point"
            record = Record(state.iteration, value=value, grad_norm=results.grad_norm, trials=1, note=note,
                            step_norm=oracle.space.norm(first_point - x))  # fmt: skip
            restarted = _without_first_point(state).restarted()
            return state, IterationOutcome(restarted, first_point, record, has_returned=True)
    if state.norms.began_with_outliers(state.steps, results.grad_norm / state.gradient_unit):
        note = "the first gradients were outliers: averaging starts again"
        record = Record(state.iteration, value=value, grad_norm=results.grad_norm, note=note)
        return state, IterationOutcome(state.restarted(), x, record)
    return state, None


def _without_first_point(state: MinibatchState) -> MinibatchState:
    """Return the state without the first point, to which the run does not return any more."""
    return replace(state, comparison=replace(state.comparison, first_point=None))
