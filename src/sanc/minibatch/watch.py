"""What the losses of batches show: whether batches agree, whether the loss rises, and whether it stagnates."""

from __future__ import annotations

import math
from typing import NamedTuple

from sanc.minibatch.state import State

_WORTHWHILE = 0.5
"""Factor by which second-order steps have to reduce the loss to be worth their products …"""
_SLOW_LIMIT = 4
"""… within so many steps, or twice as many where a step is longer than an averaged one."""
_DISAGREEMENT_LIMIT = 2
"""Consecutive batches that must disagree to end the second-order phase …"""
_GROSS = 10.0
"""… or one that disagrees by so many times as much."""
_LOSS_MEMORY = 0.95
"""Decay of the running mean of the loss."""
_RISEN = 2.0
"""Standard deviations of a batch by which the mean loss exceeds the best when it has risen."""
_FALLEN = 0.5
"""Standard deviations by which the mean loss falls unless it stagnates."""
WARM_STEPS = 20
"""Averaged steps after which running means are reliable."""


class Agreement(NamedTuple):
    """What a new batch shows about the last second-order step."""

    continues: bool  # whether the second-order phase continues
    disagreements: int  # these and the next two: as in `State`
    slow_steps: int
    level: float


def agreement(state: State, value: float, noise: float, eps: float) -> Agreement:
    """Compare the loss of a new batch where the last step ended with the loss that the step reached on its own batch.

    The phase continues if they are equal up to roundoff. If they differ by less than the decrease of the step, it
    continues while the loss is halved within some steps. It ends when batches differ by more twice in a row, or once by
    far more.
    """
    difference = abs(value - state.last_loss) - 100.0 * eps * abs(value)
    disagreements = 0 if difference <= noise * state.decrease else state.disagreements + 1
    halved = value < _WORTHWHILE * state.level
    slow_steps, level = (0, value) if halved else (state.slow_steps + 1, state.level)
    agrees = disagreements < _DISAGREEMENT_LIMIT and difference <= _GROSS * noise * state.decrease
    worthwhile = slow_steps < (2 * _SLOW_LIMIT if state.long_step else _SLOW_LIMIT)
    return Agreement(difference <= 0.0 or (agrees and worthwhile), disagreements, slow_steps, level)


class LossMean(NamedTuple):
    """The running mean of the loss; the fields are those of `State`."""

    observed: int
    mean: float
    variance: float
    best: float


def mean_with(state: State, value: float) -> LossMean:
    """Return mean and variance with one more loss, and the lowest mean."""
    starts = math.isnan(state.mean)
    observed, mean, variance, best = (
        (0, value, 0.0, value) if starts else (state.observed, state.mean, state.variance, state.best)
    )
    observed += 1
    weight = max(1 - _LOSS_MEMORY, 1.0 / (observed + 1))
    deviation = value - mean
    mean += weight * deviation
    variance = min((1 - weight) * (variance + weight * deviation * deviation), 1e300)
    return LossMean(observed, mean, variance, min(mean, best))


def rises(state: State) -> bool:
    """Whether the mean loss has risen far above the best."""
    return state.observed > WARM_STEPS and state.mean - state.best > _RISEN * math.sqrt(state.variance)


def stagnates(state: State) -> bool:
    """Whether the mean loss has not fallen since the last check."""
    return state.mean > state.probed_mean - _FALLEN * math.sqrt(state.variance)
