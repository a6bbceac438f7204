"""The scale η of a step on samples: s = −η M⁻¹g, or σ = 1/(η‖s‖_M).

M measures a gradient by its own size, so one number is a natural length of a step in every network: `scale`. Where the
way is longer than that number can tell, a lower bound of the distance to a solution says so (Mishchenko and Defazio
2023, Prodigy): for the directions p_i = M⁻¹g_i and any weights λ_i,

    d = Σ λ_i ⟨p_i, x_0 − z_i⟩ / ‖Σ λ_i p_i‖_1.

It is an estimate, not a proof, with p in place of g; so it may stretch the scale, but only by `FARTHEST`.
"""

from __future__ import annotations

import math

from sanc.core.settings import MinibatchSettings
from sanc.minibatch.state import State

FARTHEST = 3.0
"""The most by which a long way stretches the scale."""
MEMORY = math.sqrt(0.999)
"""Of the sums that the bound is made of."""


def scale(state: State, own: MinibatchSettings) -> float:
    """η of the next step: grows over `warm_up` steps, then falls as 1/√(1 + steps/`slow_down`)."""
    base = min(max(own.scale, own.distance * state.distance), FARTHEST * own.scale)
    ramp = min(1.0, (state.steps + 1) / own.warm_up) if own.warm_up else 1.0
    slower = math.sqrt(1.0 + state.steps / own.slow_down) if own.slow_down else 1.0
    return base * ramp / slower * state.shrink


def learn_distance(state: State, along: float, drift_norm: float) -> None:
    """Raise the bound, given ⟨p, x_0 − z⟩ of the last step and ‖Σ λ_i p_i‖_1."""
    state.along = MEMORY * state.along + weight(state) * along
    if drift_norm > 0.0 and math.isfinite(state.along / drift_norm):
        state.distance = max(state.distance, state.along / drift_norm)


def weight(state: State) -> float:
    """λ of the next direction."""
    return (1.0 - MEMORY) * state.distance * state.distance
