"""The size η of an averaged step: s = −η M⁻¹g, or σ = 1/(η‖s‖_M).

M measures a gradient by its own size, so one number is a natural step size in every network: `scale` times a typical
weight at the first point, which is smaller in wide layers and follows the units of the weights. If the solution is
farther away, a lower bound of the distance shows it (Mishchenko and Defazio 2023, Prodigy): for the directions
p_i = M⁻¹g_i and any weights λ_i,

    d = Σ λ_i ⟨p_i, x_0 − z_i⟩ / ‖Σ λ_i p_i‖_1.

With p in place of g this is an estimate, not a proof. So it may raise η by at most `LARGEST_STRETCH`, unless the last
steps were aligned: where ‖z − x‖ is nearly the sum of the step norms there is little noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from sanc.minibatch.settings import StepScale
from sanc.minibatch.state import State

UNKNOWN_WEIGHT = 1.0 / 15.0
"""A typical weight where all are zero: 1/√(3·75), the deviation of a uniform initialisation with 75 inputs."""
_ABOVE_MEDIAN = 1.5
"""The largest typical weight, in units of the median over matrices."""
LARGEST_STRETCH = 2.0
"""The largest factor by which the distance bound raises η, where the last steps disagree."""
ALIGNED = 0.7
"""‖z − x‖_1 over the 1-norm of the steps that led there, above which these are aligned."""
CONVERGED = 0.01
"""Share of the loss, and of an averaged step norm, below which the second-order phase had converged."""
REGROWTH = 1.5
"""Factor by which a reduced η grows back in one step of five, where the last steps are aligned."""
DISTANCE_MEMORY = 0.998
"""Decay of the sums in the distance bound: 500 steps, long beside `warm_up`."""


def step_size(state: State, step: StepScale) -> float:
    """η of the next step: it grows over `warm_up` steps, then falls as 1/√(1 + steps/`slow_down`).

    Both start again when parameters join, since one gradient of theirs says little about their second moments.
    """
    steps = state.steps - state.extended
    aligned = steps > 2 * step.warm_up and state.offset_norm > ALIGNED * state.path
    largest = math.inf if aligned else LARGEST_STRETCH * step.scale
    base = min(max(step.scale, step.distance * state.distance), largest)
    ramp = min(1.0, (steps + 1) / step.warm_up) if step.warm_up else 1.0
    slower = math.sqrt(1.0 + steps / step.slow_down) if step.slow_down else 1.0
    return state.weight_unit * base * ramp / slower * state.reduction


def typical_step_norm(state: State, step: StepScale, dim: int) -> float:
    """‖s‖ of an averaged step, in which every coordinate changes by about η."""
    return state.weight_unit * step.scale * math.sqrt(dim)


def first_reduction(state: State, step: StepScale, value: float, step_norm: float, dim: int) -> float:
    """Return the factor of η at the start of averaging.

    It leads to the norm of the last second-order step if that phase removed nearly all of the loss with tiny steps.
    """
    share = step_norm / typical_step_norm(state, step, dim)
    return share if value < CONVERGED * state.first_loss and share < CONVERGED else state.reduction


class DistanceBound(NamedTuple):
    """The numbers of `State` that an update of the distance bound changes."""

    path: float
    offset_norm: float
    reduction: float
    alignment: float
    distance: float


def distance_bound(state: State, path: float, offset_norm: float, along: float, drift_norm: float) -> DistanceBound:
    """Raise the bound, given ⟨p, x_0 − z⟩ and ‖Σ λ_i p_i‖_1, and let a reduced η grow where the steps are aligned."""
    aligned = offset_norm > ALIGNED * path
    reduction = min(1.0, REGROWTH * state.reduction) if aligned else state.reduction
    alignment = DISTANCE_MEMORY * state.alignment + distance_weight(state) * along
    distance = state.distance
    if drift_norm > 0.0 and math.isfinite(alignment / drift_norm):
        distance = max(distance, alignment / drift_norm / state.weight_unit)
    return DistanceBound(path, offset_norm, reduction, alignment, distance)


def distance_weight(state: State) -> float:
    """λ of the next direction."""
    return (1.0 - DISTANCE_MEMORY) * state.distance * state.distance


def typical_weight(x: Tensor, shapes: Sequence[tuple[int, ...]], total: Callable[[Tensor], Tensor] | None) -> float:
    """Return a typical root mean square of a matrix's entries in x; 0 where there is none.

    Those of the matrices are averaged geometrically, weighted by their sizes; vectors and zero matrices are left out.
    The result is bounded by the median over matrices, because one large matrix, often an embedding, may have far larger
    entries than the others. `total` sums over ranks that hold the other entries.
    """
    pieces = torch.split_with_sizes(x, [math.prod(shape) for shape in shapes])
    sizes = [float(len(piece)) if len(shape) > 1 else 0.0 for piece, shape in zip(pieces, shapes, strict=True)]
    sums = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64).square() for piece in pieces])
    sums = torch.stack([sums, sums.new_tensor(sizes)])
    squares, counts = (sums if total is None else total(sums)).tolist()
    matrices = [
        (math.sqrt(square / count), count) for square, count in zip(squares, counts, strict=True) if square * count
    ]
    if not matrices:
        return 0.0
    entries = sum(count for _, count in matrices)
    mean = math.exp(sum(count * math.log(root) for root, count in matrices) / entries)
    return min(mean, _ABOVE_MEDIAN * median_low(root for root, _ in matrices))


def weight_unit(weight: float, value: float, gradient_sum: float) -> float:
    """Return the unit of η: a typical weight at the first point.

    If a change of all coordinates by that could not change the loss by a tenth, with ‖g‖_1 = `gradient_sum`, the
    weights are near a saddle at zero, as after a tiny initialisation, and the unit is larger.
    """
    if weight == 0.0:
        return UNKNOWN_WEIGHT
    needed = math.inf if gradient_sum == 0.0 else 0.1 * abs(value) / gradient_sum
    return weight if math.isnan(needed) else max(weight, min(needed, UNKNOWN_WEIGHT))
