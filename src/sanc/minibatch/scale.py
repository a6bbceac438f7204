"""The size η of an averaged step: s = −η M⁻¹g, or σ = 1/(η‖s‖_M).

M⁻¹g has entries of order 1, so the same relative step size suits every network: `scale` times a typical weight at the
first point. Such a weight is smaller in wide layers, and follows the units of the weights. A lower bound of the
distance to a solution shows whether larger steps are needed (Mishchenko and Defazio 2023, Prodigy): for the directions
p_i = M⁻¹g_i and any weights λ_i,

    d = Σ λ_i ⟨p_i, x_0 − z_i⟩ / ‖Σ λ_i p_i‖_1.

With p in place of g this is an estimate, not a bound that is proved. So it may raise η by at most `_MAX_STRETCH`,
unless the last steps were aligned: if ‖z − x‖ is nearly the sum of the step norms, there is little noise. Without
losses the limit holds always, because a rise of the loss would not be noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.core.space import Vector
from sanc.minibatch.settings import StepScale
from sanc.minibatch.state import State

_FALLBACK_WEIGHT = 1.0 / 15.0
"""A typical weight if all weights are zero: 1/√(3·75), the deviation of a uniform initialisation with 75 inputs."""
_MAX_OVER_MEDIAN = 1.5
"""The largest typical weight, in units of the median over matrices."""
_MAX_STRETCH = 2.0
"""The largest factor by which the distance bound raises η, unless the last steps are aligned."""
_ALIGNED_SHARE = 0.7
"""The last steps are aligned if ‖z − x‖_1 exceeds this share of the sum of their 1-norms."""
_CONVERGED_SHARE = 0.01
"""The second-order phase has converged if the loss is below this share of the first loss, and the norm of its last step
below this share of that of an averaged step."""
_REGROWTH_FACTOR = 1.5
"""Factor by which a reduced η grows back in one step of five, if the last steps are aligned."""
_DECAY_THRESHOLD = 0.1
"""A decay of `lr` reduces η only below this share of its peak. The average already removes noise, so that smaller steps
pay only near the end of a run, as in schedules with a constant rate and a short decay."""
DISTANCE_MEMORY = 0.998
"""Decay of the sums in the distance bound: a mean over about 500 steps, many times `warm_up`."""


def step_size(state: State, step: StepScale) -> float:
    """Return η of the next step: it grows over `warm_up` steps, then falls as 1/√(1 + steps/`slow_down`).

    Both start again when parameters join, because one gradient is a poor estimate of their second moments. With a
    `horizon` η falls linearly over all steps, to 1/`horizon` of its value in the last one and beyond.
    """
    steps = state.steps - state.last_extension
    aligned = steps > 2 * step.warm_up and state.offset_norm > _ALIGNED_SHARE * state.step_norm_sum
    limit = math.inf if aligned and state.loss_count else _MAX_STRETCH * step.scale
    base = min(max(step.scale, step.distance * state.distance), limit)
    ramp = min(1.0, (steps + 1) / step.warm_up) if step.warm_up else 1.0
    decay = math.sqrt(1.0 + steps / step.slow_down) if step.slow_down and not step.horizon else 1.0
    decay = step.horizon / max(step.horizon - state.steps, 1) if step.horizon else decay
    return state.weight_unit * base * ramp / decay * state.eta_reduction


def rate_factor(rate: float, peak: float) -> float:
    """Return the factor of η for the present `lr`, given its largest value so far.

    A rate that increases is used as it is, one that decays only below `_DECAY_THRESHOLD` times its peak.
    """
    return min(peak, rate / _DECAY_THRESHOLD)


def typical_step_norm(state: State, step: StepScale, dim: int) -> float:
    """Return ‖s‖ of an averaged step, in which every coordinate changes by about η."""
    return state.weight_unit * step.scale * math.sqrt(dim)


def first_reduction(state: State, step: StepScale, value: float, step_norm: float, dim: int) -> float:
    """Return the factor of η at the start of averaging.

    The second-order phase has converged if it reduced the loss below 1 %, and the norm of its last step, `step_norm`,
    is below 1 % of that of an averaged step. Averaging then starts with steps of that norm.
    """
    share = step_norm / typical_step_norm(state, step, dim)
    converged = abs(value) < _CONVERGED_SHARE * abs(state.first_loss) and share < _CONVERGED_SHARE
    return share if converged else state.eta_reduction


class DistanceBound(NamedTuple):
    """The numbers of `State` that an update of the distance bound changes."""

    step_norm_sum: float
    offset_norm: float
    eta_reduction: float
    distance_numerator: float
    distance: float


def updated_distance_bound(
    state: State, step_norm_sum: float, offset_norm: float, inner_product: float, direction_sum_norm: float
) -> DistanceBound:
    """Return the bound after a step, and a larger η if it was reduced and the last steps are aligned.

    `inner_product` is ⟨p, x_0 − z⟩ and `direction_sum_norm` is ‖Σ λ_i p_i‖_1.
    """
    aligned = offset_norm > _ALIGNED_SHARE * step_norm_sum
    eta_reduction = min(1.0, _REGROWTH_FACTOR * state.eta_reduction) if aligned else state.eta_reduction
    numerator = DISTANCE_MEMORY * state.distance_numerator + distance_weight(state) * inner_product
    distance = state.distance
    if direction_sum_norm > 0.0 and math.isfinite(numerator / direction_sum_norm):
        distance = max(distance, numerator / direction_sum_norm / state.weight_unit)
    return DistanceBound(step_norm_sum, offset_norm, eta_reduction, numerator, distance)


def distance_weight(state: State) -> float:
    """Return λ of the next direction."""
    return (1.0 - DISTANCE_MEMORY) * state.distance * state.distance


def typical_weight(
    x: Tensor, shapes: Sequence[tuple[int, ...]], sum_over_ranks: Callable[[Tensor], Tensor] | None
) -> float:
    """Return the geometric mean, over the matrices in x, of the root mean square of their entries; 0 without matrices.

    The matrices are weighted by their sizes; vectors and zero matrices are left out. The result is at most 1.5 times
    the median over matrices, because one large matrix, often an embedding, may have far larger entries than the others.
    `sum_over_ranks` sums over ranks that hold the other entries.
    """
    parts = torch.split_with_sizes(x, [math.prod(shape) for shape in shapes])
    sizes = [float(len(part)) if len(shape) > 1 else 0.0 for part, shape in zip(parts, shapes, strict=True)]
    squares = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts])
    sums = torch.stack([squares, squares.new_tensor(sizes)])
    norm_squares, counts = (sums if sum_over_ranks is None else sum_over_ranks(sums)).tolist()
    matrices = [
        (math.sqrt(square / count), count) for square, count in zip(norm_squares, counts, strict=True) if square * count
    ]
    if not matrices:
        return 0.0
    entries = sum(count for _, count in matrices)
    mean = math.exp(sum(count * math.log(root) for root, count in matrices) / entries)
    return min(mean, _MAX_OVER_MEDIAN * median_low(root for root, _ in matrices))


def weight_unit(weight: float, value: float, gradient_sum: float) -> float:
    """Return the unit of η: a typical weight at the first point.

    To first order, a change of all coordinates by `weight` changes the loss by at most `weight` times `gradient_sum`,
    which is ‖g‖_1. If that is less than a tenth of the loss, the weights are near a saddle at zero, as after a tiny
    initialisation. The unit is then larger.
    """
    if weight == 0.0:
        return _FALLBACK_WEIGHT
    required_change = math.inf if gradient_sum == 0.0 else 0.1 * abs(value) / gradient_sum
    return weight if math.isnan(required_change) else max(weight, min(required_change, _FALLBACK_WEIGHT))


def measure_weight_unit(x: Vector, oracle: Oracle) -> float:
    """Return the unit of η at the first point x, from its weights and, if there are values, its loss and gradient."""
    space, value, gradient_sum = oracle.space, math.nan, math.nan
    if oracle.has_values:
        value, g = oracle.gradient(x)
        local_sum = space.tensor(g).abs().sum(dtype=torch.float64)
        gradient_sum = float(local_sum if space.sum_over_ranks is None else space.sum_over_ranks(local_sum))
    typical = typical_weight(space.tensor(x), oracle.shapes, space.sum_over_ranks)
    return weight_unit(typical, value, gradient_sum)
