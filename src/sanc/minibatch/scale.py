"""The scale η of a step on samples: s = −η M⁻¹g, or σ = 1/(η‖s‖_M).

M measures a gradient by its own size, so one number is a natural length of a step in every network: `scale`. Where the
way is longer than that number can tell, a lower bound of the distance to a solution says so (Mishchenko and Defazio
2023, Prodigy): for the directions p_i = M⁻¹g_i and any weights λ_i,

    d = Σ λ_i ⟨p_i, x_0 − z_i⟩ / ‖Σ λ_i p_i‖_1.

It is an estimate, not a proof, with p in place of g; so it may stretch the scale, but only by `FARTHEST`, unless the
last steps led the same way: where z has come nearly as far from x as its steps are long together, there is little
noise to be afraid of.
"""

from __future__ import annotations

import math

from sanc.core.settings import MinibatchSettings
from sanc.minibatch.state import State

FARTHEST = 3.0
"""The most by which a long way stretches the scale, where the last steps differ."""
STRAIGHT = 0.7
"""‖z − x‖_1 over the length of the steps that led there, above which they led the same way."""
ARRIVED = 0.01
"""Share of the loss, and length of the last judged step in units of an averaged one, below which it had arrived."""
GROWTH = 1.1
"""By which a scale that was made smaller grows back in a step, where the last steps led the same way."""
MEMORY = 0.998
"""Of the sums that the bound is made of."""


def scale(state: State, own: MinibatchSettings) -> float:
    """η of the next step: grows over `warm_up` steps, then falls as 1/√(1 + steps/`slow_down`)."""
    farthest = math.inf if state.steps > 2 * own.warm_up and straight(state) else FARTHEST * own.scale
    base = min(max(own.scale, own.distance * state.distance), farthest)
    ramp = min(1.0, (state.steps + 1) / own.warm_up) if own.warm_up else 1.0
    slower = math.sqrt(1.0 + state.steps / own.slow_down) if own.slow_down else 1.0
    return base * ramp / slower * state.shrink


def natural_length(own: MinibatchSettings, dim: int) -> float:
    """‖s‖ of an averaged step, in which every coordinate moves by about the scale."""
    return own.scale * math.sqrt(dim)


def straight(state: State) -> bool:
    """Whether the last steps led the same way."""
    return state.beyond > STRAIGHT * state.path


def shrink(state: State, own: MinibatchSettings, value: float, reach: float, dim: int) -> None:
    """Begin where judged steps ended: where they took nearly all of the loss and were very short, they had arrived."""
    length = reach / natural_length(own, dim)
    if value < ARRIVED * state.entry and length < ARRIVED:
        state.shrink = length


def learn_distance(state: State, along: float, drift_norm: float) -> None:
    """Raise the bound, given ⟨p, x_0 − z⟩ and ‖Σ λ_i p_i‖_1; let a small scale grow."""
    if straight(state):
        state.shrink = min(1.0, GROWTH * state.shrink)
    state.along = MEMORY * state.along + weight(state) * along
    if drift_norm > 0.0 and math.isfinite(state.along / drift_norm):
        state.distance = max(state.distance, state.along / drift_norm)


def weight(state: State) -> float:
    """λ of the next direction."""
    return (1.0 - MEMORY) * state.distance * state.distance
