"""What the losses of batches say: whether noise took over, whether the run goes wrong, and whether it stands still."""

from __future__ import annotations

import math

from sanc.core.settings import MinibatchSettings
from sanc.core.space import Vector
from sanc.minibatch.state import State

_PAYS = 0.5
"""Share of the loss to which judged steps have to bring it to be worth their products …"""
_IDLE = 4
"""… within so many steps, or twice as many where a step leads farther than an averaged one."""
_PATIENCE = 2
"""Batches in a row that must disagree before noise has taken over …"""
_GROSS = 10.0
"""… or one, by so many times as much."""
_MEMORY = 0.95
_FORGET_BEST = 0.002
_RISEN = 2.0
"""Standard deviations of a batch by which the mean loss may lie above the best; chance alone does not lead there."""
_MOVED = 0.5
"""Standard deviations by which the mean loss falls where a run is not standing still."""
YOUNG = 20
"""Averaged steps after which means say something."""


def judged_on(state: State, x: Vector, value: float, own: MinibatchSettings, eps: float) -> bool:
    """Whether steps go on being judged, by what this batch tells of the last one, which led to x.

    They do where it tells what the step's own batch told, but for rounding. Where it differs by less than the step
    gained, they do as long as they halve the loss within some steps; where it differs by more for a second time in a
    row, or by far more, they do not.
    """
    if math.isnan(state.reached):  # the first
        state.level = state.entry = value
        state.safe = x
        return True
    off = abs(value - state.reached) - 100.0 * eps * abs(value)
    state.misses = 0 if off <= own.noise * state.gained else state.misses + 1
    state.idle = 0 if value < _PAYS * state.level else state.idle + 1
    state.level = value if state.idle == 0 else state.level
    agrees = state.misses < _PATIENCE and off <= _GROSS * own.noise * state.gained
    return off <= 0.0 or (agrees and state.idle < (2 * _IDLE if state.far else _IDLE))


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
