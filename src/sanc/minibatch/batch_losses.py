"""Decisions from the losses of batches: whether batches agree, and whether the mean loss has risen or stagnated."""

from __future__ import annotations

import math
from dataclasses import replace

from sanc.core.space import NEAR_INFINITY, Vector
from sanc.errors import NonFiniteError, NonFiniteStartError, warn
from sanc.minibatch import gradient_norms
from sanc.minibatch.state import BatchComparison, MeanLoss, MinibatchState

_REQUIRED_REDUCTION = 0.5
"""The second-order phase continues only if the loss falls by this factor within the limits below."""
_SHORT_STEP_LIMIT, _LONG_STEP_LIMIT = 1, 8
"""Second-order steps in which the loss has to be halved: one after a step shorter than an averaged one, eight after a
longer one. A short step moves the parameters less than one averaged step, and costs as much as twelve of them."""
_DISAGREEMENT_LIMIT = 2
"""Consecutive batches that disagree with the last step and thereby end the second-order phase."""
_LARGE_DISAGREEMENT_FACTOR = 10.0
"""A single batch ends the second-order phase if its loss differs by more than this times the allowed difference."""
_LOSS_DECAY = 0.95
"""Decay of the running mean of the loss."""
_RISE_DEVIATIONS = 2.0
"""The mean loss has risen if it exceeds its lowest value by this many standard deviations of a batch."""
_FALL_DEVIATIONS = 0.5
"""The mean loss has stagnated unless it has fallen by this many standard deviations since the last test."""
_NONFINITE_START_LIMIT = 10
"""Number of first batches of which at least one must be finite. At a finite point, so many bad batches in a row are
unlikely."""
NONFINITE_WARNING, NONFINITE_LIMIT = 5, 100
"""Consecutive batches without a finite loss and gradient after which a warning is given, and an error is raised. Five
exceed what an occasional bad batch or a decreasing loss scale explains. After a hundred the run has diverged."""
_LOSS_ROUNDING_ERRORS = 100.0
"""Rounding errors by which equal losses of two batches may differ: a sum over the rows in another order."""


def compare_batches(
    before: BatchComparison, x: Vector, value: float, noise: float, eps: float
) -> tuple[bool, BatchComparison]:
    """Compare the loss of a new batch at x with the loss that the last step reached there on its own batch.

    Return whether the second-order phase continues, and the next comparison. The phase continues if the losses are
    equal up to roundoff. If they differ by at most `noise` times the decrease of the step, it continues while the loss
    is halved by a short step or by a few long ones. It ends after two consecutive batches that differ by more than
    that, or after one that differs by ten times as much.
    """
    if math.isnan(before.last_loss):  # the first batch
        return True, replace(before, reference_loss=value, first_loss=value, first_point=x)
    difference = abs(value - before.last_loss) - _LOSS_ROUNDING_ERRORS * eps * abs(value)
    disagreements = 0 if difference <= noise * before.last_decrease else before.disagreements + 1
    steps_since_halving, reference_loss = before.steps_since_halving + 1, before.reference_loss
    if value < reference_loss - (1.0 - _REQUIRED_REDUCTION) * abs(reference_loss):  # also if it is negative
        steps_since_halving, reference_loss = 0, value
    is_large = not difference <= _LARGE_DISAGREEMENT_FACTOR * noise * before.last_decrease
    agrees = disagreements < _DISAGREEMENT_LIMIT and not is_large
    is_fast = steps_since_halving < (_LONG_STEP_LIMIT if before.last_step_was_long else _SHORT_STEP_LIMIT)
    comparison = replace(
        before, disagreements=disagreements, steps_since_halving=steps_since_halving, reference_loss=reference_loss
    )
    return difference <= 0.0 or (agrees and is_fast), comparison


def updated_losses(losses: MeanLoss, x: Vector, value: float, lower_bound: float) -> MeanLoss:
    """Return the running mean and variance with the loss at x, and x as the safe point if the mean is the lowest.

    `lower_bound` is that of the settings.

    Until the weight 1/(k + 1) of the k-th loss is below the weight of the decay, the mean is taken over all losses, of
    which the first counts twice.
    """
    begins = math.isnan(losses.loss_mean)
    if begins:
        count, mean, variance, lowest = 0, value, 0.0, value
    else:
        count, mean = losses.loss_count, losses.loss_mean
        variance, lowest = losses.loss_variance, losses.lowest_loss_mean
    count += 1
    weight = max(1 - _LOSS_DECAY, 1.0 / (count + 1))
    deviation = value - mean
    mean += weight * deviation
    variance = min((1 - weight) * (variance + weight * deviation * deviation), NEAR_INFINITY)
    is_lowest = begins or mean <= losses.lowest_loss_mean
    return replace(
        losses,
        loss_count=count,
        loss_mean=mean,
        loss_variance=variance,
        lowest_loss_mean=min(mean, lowest),
        below_bound=losses.below_bound or value < lower_bound,
        safe_point=x if is_lowest or losses.safe_point is None else losses.safe_point,
    )


def has_risen(losses: MeanLoss) -> bool:
    """Return whether the mean loss is far above its lowest value."""
    rise = losses.loss_mean - losses.lowest_loss_mean
    is_reliable = losses.loss_count > gradient_norms.RELIABLE_MEAN_STEPS
    return is_reliable and rise > _RISE_DEVIATIONS * math.sqrt(losses.loss_variance)


def has_stagnated(losses: MeanLoss) -> bool:
    """Return whether the mean loss has not fallen since the last test."""
    return losses.loss_mean > losses.tested_loss_mean - _FALL_DEVIATIONS * math.sqrt(losses.loss_variance)


def after_stagnation_test(losses: MeanLoss) -> MeanLoss:
    """Return the mean loss with one more test for stagnation."""
    return replace(losses, stagnation_tests=losses.stagnation_tests + 1, tested_loss_mean=losses.loss_mean)


def report_nonfinite(state: MinibatchState, note: str, value: float, grad_norm: float) -> None:
    """Warn after a few consecutive batches that were skipped, and raise after many."""
    count = state.nonfinite_batches
    if count == state.iteration + 1 == _NONFINITE_START_LIMIT:  # no batch was finite so far
        raise NonFiniteStartError(
            f"{note} at the starting point, on each of {count} batches (loss {value!r}, gradient norm "
            f"{grad_norm!r}). Start where the loss is finite, and check the data and the initial weights."
        )
    if count < NONFINITE_WARNING:
        return
    text = (
        f"{note} for {count} consecutive batches, and no step was made on them (loss {value!r}, gradient "
        f"norm {grad_norm!r}): check the data and the model, or lower lr or the loss scale"
    )
    if count >= NONFINITE_LIMIT:
        raise NonFiniteError(f"{text}. Restore a checkpoint from before these batches.")
    if count == NONFINITE_WARNING:
        limit = _NONFINITE_START_LIMIT if count == state.iteration + 1 else NONFINITE_LIMIT
        warn(f"{text}. After {limit} of them this is an error.", RuntimeWarning)
