"""What the losses of batches say: whether noise took over, whether the run goes wrong, and whether it stands still."""

from __future__ import annotations

import math

from sanc.core.settings import MinibatchSettings
from sanc.core.space import Vector
from sanc.minibatch.state import State

PATIENCE = 2
"""Batches in a row that must disagree before noise has taken over."""
_GROSS = 10.0
_MEMORY = 0.95
_FORGET_BEST = 0.002
_RISEN = 2.0
"""Standard deviations of a batch by which the mean loss may lie above the best; chance alone does not lead there."""
_MOVED = 0.5
"""Standard deviations by which the mean loss falls where a run is not standing still."""
YOUNG = 20
"""Averaged steps after which means say something."""


def misses(state: State, value: float, own: MinibatchSettings, eps: float) -> int:
    """How often batches in a row told otherwise of the last judged step than its own batch, by more than rounding.

    One that tells of something else altogether counts for all that are needed.
    """
    off = abs(value - state.reached) - 100.0 * eps * abs(value)
    if off <= own.noise * state.gained:
        return 0
    return state.misses + 1 if off <= _GROSS * own.noise * state.gained else PATIENCE


def watch_loss(state: State, x: Vector, value: float) -> None:
    """Keep mean and spread of the loss, the best mean, and a point to go back to."""
    if math.isnan(state.mean):
        state.mean = state.best = value
        state.watched, state.variance, state.safe = 0, 0.0, None
    state.watched += 1
    weight = max(1 - _MEMORY, 1.0 / (state.watched + 1))
    off = value - state.mean
    state.mean += weight * off
    state.variance = min((1 - weight) * (state.variance + weight * off * off), 1e300)
    state.best += _FORGET_BEST * (state.mean - state.best)
    if state.mean <= state.best or state.safe is None:
        state.best, state.safe = state.mean, x


def goes_wrong(state: State) -> bool:
    """Whether the mean loss has risen far above the best."""
    return state.watched > YOUNG and state.mean - state.best > _RISEN * math.sqrt(state.variance)


def stands_still(state: State) -> bool:
    """Whether the mean loss has not fallen since the last look."""
    before, state.looked = state.looked, state.mean
    return state.mean > before - _MOVED * math.sqrt(state.variance)
