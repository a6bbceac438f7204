"""What a batch says of the steps before it: whether noise took over, whether the loss jumped, and where σ should go."""

from __future__ import annotations

import math

from sanc.core.judge import Judge
from sanc.core.settings import MinibatchSettings
from sanc.core.space import Space, Vector
from sanc.minibatch.state import State

_SLOPE_MEMORY = 0.9  # of the mean of the slopes that judge the steps …
_SCALE_MEMORY = 0.99  # … and of their mean square
_LOSS_MEMORY = 0.95
_MISSED_MEMORY = 0.7
_FORGET_BEST = 0.01
_SAFE_EVERY = 5
_GROWTH = 0.3  # steps grow this much slower than they shrink: the moving average answers late
_JUMP = 5.0
"""A batch whose loss lies this many standard deviations (and a fiftieth) above the best mean is a jump."""


def settle(state: State, value: float, settings: MinibatchSettings) -> None:
    """End the first phase where two batches differ by more than a step gains, or after `warm_up` steps."""
    if not state.first_phase:
        return
    if not math.isnan(state.reached):
        said_otherwise = abs(value - state.reached) > state.gained
        state.missed = _MISSED_MEMORY * state.missed + (1 - _MISSED_MEMORY) * said_otherwise
    if state.missed > 0.6 or state.iteration >= settings.warm_up:
        state.settled = state.iteration


def follow_slopes(state: State, g: Vector, settings: MinibatchSettings, space: Space, judge: Judge) -> None:
    """Move σ by the slope that this batch, which knows nothing of them, sees at the end of the last steps.

    On a quadratic that slope is 0 where the steps were the best for the value now, and half their curvature where
    nothing is gained any more. `margin` says where between the two σ rests.
    """
    if state.path is None:
        return
    end, path_square = space.read([space.inner(g, state.path), space.inner(state.path, state.path)])
    if not math.isnan(state.curvature):
        end -= 0.5 * settings.margin * state.curvature * path_square
    count = state.slopes + 1
    slope = _SLOPE_MEMORY * state.slope + (1 - _SLOPE_MEMORY) * end
    square = _SCALE_MEMORY * state.slope_square + (1 - _SCALE_MEMORY) * end * end
    size = math.sqrt(square / (1 - _SCALE_MEMORY**count))
    if not (size > 0.0 and math.isfinite(size)):
        return
    lean = max(-1.0, min(1.0, slope / (1 - _SLOPE_MEMORY**count) / size))
    rate = settings.sigma_rate if lean > 0.0 else _GROWTH * settings.sigma_rate
    state.slope, state.slope_square, state.slopes, state.lean = slope, square, count, lean
    judge.move(judge.sigma * math.exp(2.0 * rate * lean))


def watch_loss(state: State, x: Vector, value: float) -> None:
    """Keep mean and spread of the loss, the best mean, and a point to go back to."""
    if math.isnan(state.loss):
        state.loss, state.loss_variance = value, 0.0
    else:
        weight = 0.5 if state.first_phase else max(1 - _LOSS_MEMORY, 1.0 / (state.averaged + 2))
        off = value - state.loss
        state.loss += weight * off
        state.loss_variance = min((1 - weight) * (state.loss_variance + weight * off * off), 1e300)
    best = state.loss if math.isnan(state.best) or state.settled == state.iteration else state.best
    state.best = min(state.loss, best + _FORGET_BEST * (state.loss - best))
    rising = state.loss - state.best > math.sqrt(state.loss_variance) + 0.01 * abs(state.best)
    if state.safe is None or (state.iteration % _SAFE_EVERY == 0 and not rising):
        state.safe = x


def jumped(state: State, value: float) -> bool:
    """Whether the loss of a batch is so high that the last steps may be to blame."""
    if state.first_phase:
        return False
    return value > state.best + _JUMP * math.sqrt(state.loss_variance) + 0.02 * abs(state.best)
