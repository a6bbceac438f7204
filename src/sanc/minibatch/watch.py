"""What the losses of batches show: whether batches agree, whether the loss rises, and whether it stagnates."""

from __future__ import annotations

import math

from sanc.core.space import Vector
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


def batches_agree(state: State, x: Vector, value: float, noise: float, eps: float) -> bool:
    """Whether the second-order phase continues, given the loss of a new batch where the last step ended.

    It does if the batch confirms the loss that the last step reached, up to roundoff. If it differs by less than the
    decrease of the step, the phase continues while the loss is halved within some steps. It ends when batches differ by
    more twice in a row, or once by far more.
    """
    if math.isnan(state.last_loss):  # the first batch
        state.level = state.first_loss = value
        state.safe = x
        return True
    off = abs(value - state.last_loss) - 100.0 * eps * abs(value)
    state.disagreements = 0 if off <= noise * state.decrease else state.disagreements + 1
    state.slow_steps = 0 if value < _WORTHWHILE * state.level else state.slow_steps + 1
    state.level = value if state.slow_steps == 0 else state.level
    agrees = state.disagreements < _DISAGREEMENT_LIMIT and off <= _GROSS * noise * state.decrease
    return off <= 0.0 or (agrees and state.slow_steps < (2 * _SLOW_LIMIT if state.long_step else _SLOW_LIMIT))


def observe(state: State, x: Vector, value: float) -> None:
    """Update mean and variance of the loss, the best mean, and the point to return to."""
    if math.isnan(state.mean):
        state.mean = state.best = value
        state.observed, state.variance, state.safe = 0, 0.0, None
    state.observed += 1
    weight = max(1 - _LOSS_MEMORY, 1.0 / (state.observed + 1))
    off = value - state.mean
    state.mean += weight * off
    state.variance = min((1 - weight) * (state.variance + weight * off * off), 1e300)
    if state.mean <= state.best or state.safe is None:
        state.best, state.safe = state.mean, x


def rises(state: State) -> bool:
    """Whether the mean loss has risen far above the best."""
    return state.observed > WARM_STEPS and state.mean - state.best > _RISEN * math.sqrt(state.variance)


def stagnates(state: State) -> bool:
    """Whether the mean loss has not fallen since the last check."""
    before, state.probed_mean = state.probed_mean, state.mean
    return state.mean > before - _FALLEN * math.sqrt(state.variance)
