"""The size η of an averaged step: s = −η M⁻¹g, or σ = 1/(η‖s‖_M).

M⁻¹g has entries of order 1, so the same relative step size suits every network: `scale` times the parameter unit, the
size of a typical parameter at the first point. Parameters are smaller in wide layers, and the unit follows their units.

The first gradients of an m × n matrix are coherent, that is, of low rank. A matrix of low rank with entries ±1 has a
spectral norm near √(mn); random initial entries of size w have one near w(√m + √n). So the first steps have to be
smaller by the square root of the smaller side to change the matrix by `scale`, relatively. Later gradients are mostly
noise, and they have the spectral norm of random matrices. Therefore η grows at most as √(k/n) over the first n steps,
where n is a typical smaller side. For the same reason μP scales Adam's rate as 1/n (Yang et al. 2022). This is a
heuristic; docs/results/networks.md compares ramps.

A lower bound of the distance to a solution shows whether larger steps are needed (Mishchenko and Defazio 2023,
Prodigy): for the directions p_i = M⁻¹g_i and any λ_i > 0,

    d = Σ λ_i ⟨p_i, x_0 − z_i⟩ / ‖Σ λ_i p_i‖_1.

With p in place of g this is an estimate, not a bound that is proved. So it may raise η by at most
`_MAX_DISTANCE_FACTOR`, unless the last steps were aligned: if ‖z − x‖ is nearly the sum of the step norms, there is
little noise. Without losses the limit holds always, because a rise of the loss would not be noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.core.settings import BELOW_INFINITY, COUNT, NOT_NEGATIVE, POSITIVE, Piece, setting
from sanc.core.space import Vector
from sanc.minibatch.metrics.base import matrix_sides
from sanc.minibatch.state import DistanceBound, MinibatchState

_FALLBACK_UNIT = 1.0 / 15.0
"""The parameter unit if all matrices are zero: 1/√(3·75), the deviation of a uniform initialisation with 75 inputs."""
_TINY_PARAMETERS_CHANGE = 0.1
"""Parameters are tiny if a change by their own size changes the loss by less than this fraction, to first order."""
_MAX_RMS_OVER_MEDIAN = 1.5
"""The largest typical root mean square of the entries of a matrix, in units of the median over matrices."""
_MAX_DISTANCE_FACTOR = 2.0
"""The largest factor by which the distance bound raises η, unless the last steps are aligned."""
_ALIGNED_FRACTION = 0.7
"""The last steps are aligned if ‖z − x‖_1 exceeds this fraction of the sum of their 1-norms."""
_WARM_UP_PERIODS = 2
"""Steps are tested for alignment after this many periods of `warm_up`. Before that, the sums contain the shorter steps
of the warm-up."""
_CONVERGED_FRACTION = 0.01
"""The second-order phase has converged if both are below this fraction: the loss relative to the first loss, and the
norm of the last step relative to that of an averaged step."""
_REGROWTH_FACTOR = 1.5
"""Factor by which a reduced η grows back in one step of five, if the last steps are aligned."""
_DECAY_THRESHOLD = 0.003
"""A decay of `lr` reduces η only below this fraction of its peak. The average already removes noise, so that a decay
only loses steps; docs/constants.md has larger thresholds. A cosine decay to zero reaches it in the last 4 % of a run.
"""
DISTANCE_DECAY = 0.998
"""Decay of the sums in the distance bound: a mean over about 500 steps, many times `warm_up`."""


@dataclass(frozen=True, kw_only=True)
class StepSize(Piece):
    """The size η of an averaged step s = −η M⁻¹g. A subclass may have another method `size`.

    Attributes
    ----------
    scale : float
        η, about the change of each coordinate, in units of a typical parameter: the root mean square of a matrix's
        entries at the first point, or 1/15 if they are zero.
    distance : float
        η = max(scale, distance·d), at most 2·scale unless the last steps are aligned, with d a lower bound of the
        distance to a solution. 0: the bound is not used, and a reduced η does not grow back.
    warm_up : int
        Number of steps over which η grows to its value. Over the first n steps η grows at most as √(steps/n), with n
        the typical smaller side of a matrix of parameters; 0: it does not grow.
    slow_down : int
        η falls as 1/√(1 + steps/slow_down); 0: it does not fall.
    horizon : int
        Number of averaged steps of the run, if it is known: η falls linearly to zero over them, in place of
        `slow_down`, and the average covers fewer and fewer of the last iterates. 0: the number is not known.
    lower_bound : float
        A lower bound of the loss. A step is shortened if to first order it would reduce the loss of its batch below
        that. After a lower loss the bound is not used; −inf: there is none.
    """

    # docs/results/networks.md has the tasks on which these numbers were chosen, and an ablation.
    scale: float = setting(0.15, POSITIVE)  # chosen on the development half; docs/constants.md has 0.05 and 0.4
    distance: float = setting(2.0, NOT_NEGATIVE)  # row "fixed-scale" of the ablation has 0
    warm_up: int = setting(20, COUNT)  # the means of the metric are over 1/(1 − 0.95) = 20 gradients
    slow_down: int = setting(300, COUNT)  # chosen with `weighting` among five pairs; row "no-slow-down" has 0
    horizon: int = setting(0, COUNT)
    lower_bound: float = setting(0.0, BELOW_INFINITY)

    def size(self, state: MinibatchState) -> float:
        """Return η of the next step: it grows over `warm_up` steps, then falls as 1/√(1 + steps/`slow_down`).

        In wide networks it grows more slowly, as √(steps/width). For parameters that join later the iteration lets this
        start again (`age_factors`). With a `horizon` η falls linearly over all steps, to 1/`horizon` of its value in
        the last one and beyond.
        """
        base, ramp, decay = self._base(state), self._ramp(state), self._decay(state)
        return state.parameter_unit * base * ramp / decay * state.eta_reduction

    def _base(self, state: MinibatchState) -> float:
        """Return η in parameter units, after the warm-up and before the decay."""
        steps = state.steps - state.last_extension
        is_warm = steps > _WARM_UP_PERIODS * self.warm_up
        aligned = is_warm and _is_aligned(state.distance)
        limit = math.inf if aligned and state.losses.loss_count else _MAX_DISTANCE_FACTOR * self.scale
        return min(max(self.scale, self.distance * state.distance.distance_bound), limit)

    def _ramp(self, state: MinibatchState) -> float:
        """Return the factor of η in the first steps, at most 1."""
        if not self.warm_up:
            return 1.0
        ramp = min(1.0, (state.steps + 1) / self.warm_up)
        return min(ramp, math.sqrt((state.steps + 1) / state.width)) if state.width else ramp

    def _decay(self, state: MinibatchState) -> float:
        """Return the divisor of η in later steps, at least 1."""
        if self.horizon:
            return self.horizon / max(self.horizon - state.steps, 1)
        return math.sqrt(1.0 + state.steps / self.slow_down) if self.slow_down else 1.0


def age_factors(settings: StepSize, state: MinibatchState, joined_at: Tensor) -> Tensor:
    """Return factors of η with which entries that joined after the first step have the step size of their own age.

    One gradient is a poor estimate of their second moments, so that their steps are small at first, as in a new run.
    """
    ages, steps = state.steps - joined_at, torch.full_like(joined_at, state.steps)
    factors = torch.ones_like(ages)
    if settings.warm_up:
        width = max(state.width, 1.0)
        new, old = (
            torch.minimum((k + 1.0) / settings.warm_up, ((k + 1.0) / width).sqrt()).clamp(max=1.0)
            for k in (ages, steps)
        )
        factors = new / old
    if settings.slow_down and not settings.horizon:
        factors = factors * ((settings.slow_down + steps) / (settings.slow_down + ages)).sqrt()
    return factors


def rate_factor(rate: float, peak: float) -> float:
    """Return the factor of η for the present `lr`, given its largest value so far.

    A rate that increases is used as it is, one that decays only below `_DECAY_THRESHOLD` times its peak.
    """
    return min(peak, rate / _DECAY_THRESHOLD)


def typical_step_norm(state: MinibatchState, settings: StepSize, dim: int) -> float:
    """Return ‖s‖ of an averaged step, in which every coordinate changes by about η."""
    return state.parameter_unit * settings.scale * math.sqrt(dim)


def first_reduction(state: MinibatchState, settings: StepSize, value: float, step_norm: float, dim: int) -> float:
    """Return the factor of η at the start of averaging.

    If the second-order phase has converged (`_CONVERGED_FRACTION`), averaging starts with steps of the norm of its last
    step, `step_norm`. Otherwise the factor is `state.eta_reduction`.
    """
    step_ratio = step_norm / typical_step_norm(state, settings, dim)
    converged = abs(value) < _CONVERGED_FRACTION * abs(state.comparison.first_loss) and step_ratio < _CONVERGED_FRACTION
    return step_ratio if converged else state.eta_reduction


def updated_distance_bound(
    before: DistanceBound,
    parameter_unit: float,
    step_norm1_sum: float,
    offset_norm1: float,
    inner_product: float,
    direction_sum_norm1: float,
) -> DistanceBound:
    """Return the bound after a step.

    `inner_product` is ⟨p, x_0 − z⟩, and `direction_sum_norm1` is ‖Σ λ_i p_i‖_1.
    """
    numerator = DISTANCE_DECAY * before.distance_numerator + distance_weight(before) * inner_product
    bound = before.distance_bound
    if direction_sum_norm1 > 0.0 and math.isfinite(numerator / direction_sum_norm1):
        bound = max(bound, numerator / direction_sum_norm1 / parameter_unit)
    return replace(
        before,
        distance_bound=bound,
        step_norm1_sum=step_norm1_sum,
        offset_norm1=offset_norm1,
        distance_numerator=numerator,
    )


def regrown_eta_reduction(eta_reduction: float, distance: DistanceBound) -> float:
    """Return the factor of η, increased up to 1 if the last steps are aligned."""
    return min(1.0, _REGROWTH_FACTOR * eta_reduction) if _is_aligned(distance) else eta_reduction


def _is_aligned(distance: DistanceBound) -> bool:
    """Return whether the last steps are aligned."""
    return distance.offset_norm1 > _ALIGNED_FRACTION * distance.step_norm1_sum


def distance_weight(distance: DistanceBound) -> float:
    """Return λ of the next direction."""
    return (1.0 - DISTANCE_DECAY) * distance.distance_bound * distance.distance_bound


class TypicalMatrix(NamedTuple):
    """Geometric means over the matrices of the parameters, weighted by their numbers of entries; 0 without matrices.

    Attributes
    ----------
    entry_rms : float
        Of the root mean squares of the entries, without matrices of zeros.
    width : float
        Of the smaller sides.
    """

    entry_rms: float
    width: float


def typical_matrix(
    x: Tensor, shapes: Sequence[tuple[int, ...]], sum_over_ranks: Callable[[Tensor], Tensor] | None
) -> TypicalMatrix:
    """Return the typical size of the entries and the typical width of the matrices in x; vectors are left out.

    `entry_rms` is at most `_MAX_RMS_OVER_MEDIAN` times the median over matrices, because one large matrix, often an
    embedding, may have far larger entries than the others. `sum_over_ranks` sums over ranks that hold the other
    entries, by rows.
    """
    parts = torch.split_with_sizes(x, [math.prod(shape) for shape in shapes])
    sizes = [float(len(part)) if len(shape) > 1 else 0.0 for part, shape in zip(parts, shapes, strict=True)]
    squares = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts])
    rows = [float(sum(shape[:1])) for shape in shapes]
    sums = torch.stack([squares, squares.new_tensor(sizes), squares.new_tensor(rows)])
    sums = sums if sum_over_ranks is None else sum_over_ranks(sums)
    matrices = [
        (square, count, matrix_sides((int(height), *shape[1:])))
        for square, count, height, shape in zip(*sums.tolist(), shapes, strict=True)
        if count
    ]
    width = _geometric_mean([(min(sides or (1, 1)), count) for _, count, sides in matrices])
    roots = [(math.sqrt(square / count), count) for square, count, _ in matrices if square]
    if not roots:
        return TypicalMatrix(0.0, width)
    limit = _MAX_RMS_OVER_MEDIAN * median_low(root for root, _ in roots)
    return TypicalMatrix(min(_geometric_mean(roots), limit), width)


def _geometric_mean(numbers: Sequence[tuple[float, float]]) -> float:
    """Return the geometric mean of positive numbers with weights; 0 without numbers."""
    total = sum(weight for _, weight in numbers)
    return math.exp(sum(weight * math.log(number) for number, weight in numbers) / total) if total else 0.0


def parameter_unit(entry_rms: float, value: float, grad_norm1: float) -> float:
    """Return the unit of η: the typical root mean square of the entries of a matrix, or more if that is tiny.

    To first order, a change of all coordinates by `entry_rms` changes the loss by at most `entry_rms`·‖g‖_1. If that is
    less than `_TINY_PARAMETERS_CHANGE` of the loss, the parameters are near a saddle at zero, as after a tiny
    initialisation. The unit is then larger.
    """
    if entry_rms == 0.0:
        return _FALLBACK_UNIT
    required_change = math.inf if grad_norm1 == 0.0 else _TINY_PARAMETERS_CHANGE * abs(value) / grad_norm1
    return entry_rms if math.isnan(required_change) else max(entry_rms, min(required_change, _FALLBACK_UNIT))


def measure_parameter_unit(state: MinibatchState, x: Vector, oracle: Oracle) -> MinibatchState:
    """Return the state with the parameter unit and the width, measured at the first point x.

    The unit follows from the parameters and, if they are known, the loss and its gradient.
    """
    space, value, grad_norm1 = oracle.space, math.nan, math.nan
    if oracle.has_values:
        value, g = oracle.gradient(x)
        local_sum = space.tensor(g).abs().sum(dtype=torch.float64)
        grad_norm1 = float(local_sum if space.sum_over_ranks is None else space.sum_over_ranks(local_sum))
    typical = typical_matrix(space.tensor(x), oracle.shapes, space.sum_over_ranks)
    unit = parameter_unit(typical.entry_rms, value, grad_norm1)
    return replace(state, parameter_unit=unit, width=typical.width)
