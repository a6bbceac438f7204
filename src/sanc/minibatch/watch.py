"""What the losses of batches say: whether noise took over, whether the run goes wrong, and whether it stands still."""

from __future__ import annotations

import math

from sanc.core.settings import MinibatchSettings
from sanc.core.space import Vector
from sanc.minibatch.state import State

_MEMORY = 0.95
_FORGET_BEST = 0.002
_RISEN = 2.0
"""Standard deviations of a batch by which the mean loss may lie above the best; chance alone does not lead there."""
_MOVED = 0.1
"""Standard deviations by which the mean loss falls where a run is not standing still."""
YOUNG = 20
"""Averaged steps after which means say something."""


def disagrees(state: State, value: float, own: MinibatchSettings, eps: float) -> bool:
    """Whether this batch tells the last judged step otherwise than its own batch did, by more than rounding."""
    if math.isnan(state.reached):
        return False
    return abs(value - state.reached) > own.noise * state.gained + 100.0 * eps * abs(value)


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
    """Whether the mean loss has not fallen since the last look; each look is twice as late as the one before."""
    if state.steps < state.look_at:
        return False
    before, state.looked = state.looked, state.mean
    state.look_at *= 2
    return state.mean > before - _MOVED * math.sqrt(state.variance)
