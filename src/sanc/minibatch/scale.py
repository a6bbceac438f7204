"""The scale η of a step on samples: s = −η M⁻¹g, or σ = 1/(η‖s‖_M).

M measures a gradient by its own size, so one number is a natural length of a step in every network: `scale` times the
size of a typical weight at the first point, which is smaller in wide layers and follows the units of the weights. Where
the way is longer than that can tell, a lower bound of the distance to a solution says so (Mishchenko and Defazio 2023,
Prodigy): for the directions p_i = M⁻¹g_i and any weights λ_i,

    d = Σ λ_i ⟨p_i, x_0 − z_i⟩ / ‖Σ λ_i p_i‖_1.

It is an estimate, not a proof, with p in place of g; so it may stretch the scale, but only by `FARTHEST`, unless the
last steps led the same way: where z has come nearly as far from x as its steps are long together, there is little
noise to be afraid of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median_low

import torch
from torch import Tensor

from sanc.core.settings import MinibatchSettings
from sanc.minibatch.state import State

UNKNOWN = 1.0 / 15.0
"""The size of a typical weight where all are zero: as in a layer of 75 inputs. It has no units."""
_ABOVE_MEDIAN = 1.5
"""The largest typical weight, in units of the median over matrices."""
FARTHEST = 2.0
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
    return state.length * base * ramp / slower * state.shrink


def natural_length(state: State, own: MinibatchSettings, dim: int) -> float:
    """‖s‖ of an averaged step, in which every coordinate moves by about the scale."""
    return state.length * own.scale * math.sqrt(dim)


def straight(state: State) -> bool:
    """Whether the last steps led the same way."""
    return state.beyond > STRAIGHT * state.path


def shrink(state: State, own: MinibatchSettings, value: float, reach: float, dim: int) -> None:
    """Begin where judged steps ended: where they took nearly all of the loss and were very short, they had arrived."""
    length = reach / natural_length(state, own, dim)
    if value < ARRIVED * state.entry and length < ARRIVED:
        state.shrink = length


def learn_distance(state: State, along: float, drift_norm: float) -> None:
    """Raise the bound, given ⟨p, x_0 − z⟩ and ‖Σ λ_i p_i‖_1; let a small scale grow."""
    if straight(state):
        state.shrink = min(1.0, GROWTH * state.shrink)
    state.along = MEMORY * state.along + weight(state) * along
    if drift_norm > 0.0 and math.isfinite(state.along / drift_norm):
        state.distance = max(state.distance, state.along / drift_norm / state.length)


def weight(state: State) -> float:
    """λ of the next direction."""
    return (1.0 - MEMORY) * state.distance * state.distance


def typical_weight(x: Tensor, shapes: Sequence[tuple[int, ...]], total: Callable[[Tensor], Tensor] | None) -> float:
    """Return the root mean square of a matrix's entries that is typical of x; 0 where there is none.

    Those of the matrices are averaged geometrically, each with the weight of its size; vectors and matrices that are
    zero say nothing. It is bounded by the median over matrices, for one large matrix may have far larger entries than
    the others: embeddings often do. `total` adds up sums over entries, where others hold the rest of them.
    """
    pieces = torch.split_with_sizes(x, [math.prod(shape) for shape in shapes])
    many = [float(len(piece)) if len(shape) > 1 else 0.0 for piece, shape in zip(pieces, shapes, strict=True)]
    sums = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64).square() for piece in pieces])
    sums = torch.stack([sums, sums.new_tensor(many)])
    squares, counts = (sums if total is None else total(sums)).tolist()
    known = [
        (math.sqrt(square / count), count) for square, count in zip(squares, counts, strict=True) if square * count
    ]
    if not known:
        return 0.0
    entries = sum(count for _, count in known)
    mean = math.exp(sum(count * math.log(root) for root, count in known) / entries)
    return min(mean, _ABOVE_MEDIAN * median_low(root for root, _ in known))


def unit_of_length(weight: float, value: float, slope: float) -> float:
    """Return the length in which steps are measured: a typical weight at the first point.

    Where moving all coordinates by that could not change the loss by a tenth, with ‖g‖_1 = `slope`, the weights are
    near a saddle at zero, as after a tiny initialisation, and the unit is larger.
    """
    if weight == 0.0:
        return UNKNOWN
    needed = math.inf if slope == 0.0 else 0.1 * abs(value) / slope
    return weight if math.isnan(needed) else max(weight, min(needed, UNKNOWN))
