"""The numbers of an averaged step: those that it needs from the state, and the state that follows from its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.core.space import NEAR_INFINITY, NEAR_ZERO, Space
from sanc.errors import ArgumentError, is_number, shown
from sanc.minibatch import batch_losses, step_size
from sanc.minibatch.averaging import CHECKSUM_MODULUS, StepResults, StepScalars, on_device
from sanc.minibatch.metrics.base import Shapes
from sanc.minibatch.projection import Normals, find_normals, tangent_for
from sanc.minibatch.settings import Average, Minibatch
from sanc.minibatch.state import CallerChanges, DistanceBound, GradientNorms, MinibatchState
from sanc.minibatch.step_size import StepSize

_CLIPPING_FACTOR = 5.0
"""A gradient norm this many times the typical one is clipped to that, so that one bad batch changes little. The typical
norm is the root mean square. In the first steps it is the largest norm so far that two gradients in a row have reached,
because rare rows may have far larger gradients."""
_MAX_COUNTED_NORM_FACTOR = 100.0
"""A gradient norm this many times the typical one does not count in the mean square, unless it is the third in a row:
outliers leave it as it is, and a change of the objective is followed. Rare rows have smaller ratios: with the gradients
of one batch in n larger, the logistic regression of a bias has a ratio of n, and the mean square counts them."""
_FIRST_OUTLIERS, _REPEATED_FIRST_OUTLIERS = 100.0, 25.0
"""If the first gradient norms are all this many times the next ones, they were outliers, or the loss had another scale,
and averaging is restarted. One gradient has to be smaller by the first factor, two in a row by the second."""
_SINGLE_FIRST_STEPS = 2
"""Averaged steps within which one far smaller gradient shows that the first ones were outliers. Later it takes two in a
row, since a batch may have a small gradient by chance."""
_FULL_WEIGHT_NORM_RATIO = 0.05
"""Gradient norms below this many times the typical norm reduce the weight of their iterate, by a power of the ratio
(`_WEIGHT_POWER` in averaging.py). Otherwise x would approach a z that does not move, as after a change of the loss
scale."""
_DISTANCE_INTERVAL = 5
"""Steps between two updates of the distance bound, after the first steps."""


def updates_distance(state: MinibatchState) -> bool:
    """Return whether the next step updates the distance bound."""
    return state.steps < batch_losses.RELIABLE_MEAN_STEPS or state.steps % _DISTANCE_INTERVAL == 0


def step_scalars(
    state: MinibatchState, settings: Minibatch, rate: float, *, has_values: bool = False
) -> StepScalars[float]:
    """Return the scalars of the next step, with `rate` as a factor of η; `has_values`: whether losses are known."""
    is_warm = state.steps > batch_losses.RELIABLE_MEAN_STEPS
    typical_norm = math.sqrt(state.norms.grad_norm_mean_square) if is_warm else state.norms.largest_grad_norm
    outlier_norm = _CLIPPING_FACTOR * typical_norm * state.gradient_unit
    weight = _iterate_weight(state, settings.average)
    average_weight = max(weight / (state.weight_sum + weight), _min_average_weight(state, settings))
    return StepScalars(
        clip_norm=max(outlier_norm, NEAR_ZERO) if state.steps else NEAR_INFINITY,
        full_norm=max(_FULL_WEIGHT_NORM_RATIO * typical_norm * state.gradient_unit if is_warm else 0.0, NEAR_ZERO),
        gradient_factor=1.0 / state.gradient_unit,
        gradient_weight=max(1.0 - settings.metric.memory, 1.0 / (state.steps + 1)),
        eta=rate * _checked_size(settings.step_size, state),
        average_weight=average_weight if settings.average.averaging else 1.0,
        distance_weight=step_size.distance_weight(state.distance),
        lower_bound=_lower_bound(state, settings.step_size) if has_values else -math.inf,
        unsummed_checksum=state.caller.unsummed_checksum,
    )


def step_size_factors(
    state: MinibatchState, settings: StepSize, rates: Sequence[float], like: Tensor, oracle: Oracle
) -> tuple[float, Tensor | None]:
    """Return the common factor of η, and a vector of factors if entries have different ones; otherwise None.

    `rates` are the factors of the parameters; empty: all are 1.
    """
    largest_rate, factors = float(max(rates, default=1.0)), None
    factor = step_size.rate_factor(largest_rate, state.peak_lr)
    if state.joined_at is not None:
        factors = step_size.age_factors(settings, state, oracle.space.tensor(state.joined_at))
    if len(set(rates)) <= 1:
        return factor, factors
    pairs = zip(on_device(rates, like.dtype, like.device).unbind(), oracle.shapes, strict=True)
    expanded = torch.cat([rate.expand(math.prod(shape)) for rate, shape in pairs])
    return factor / (largest_rate or 1.0), expanded if factors is None else expanded * factors


def _checked_size(settings: StepSize, state: MinibatchState) -> float:
    """Return η; raise an error if a subclass of the caller returned no number ≥ 0."""
    size = settings.size(state)
    if not (is_number(size) and 0.0 <= size < math.inf):
        raise ArgumentError(
            f"step_size = {shown(settings)} cannot be used: size() returned {shown(size)}. Return a finite number ≥ 0."
        )
    return size


def _lower_bound(state: MinibatchState, settings: StepSize) -> float:
    """Return a lower bound of the loss, or −∞ if the losses so far show that there is none.

    Roundoff may put the loss at its bound. If the mean loss never exceeds the bound, it is not used, as with the loss
    f − f.detach().
    """
    losses = state.losses
    return -math.inf if losses.below_bound or losses.loss_mean <= settings.lower_bound else settings.lower_bound


def adapted_offset(
    state: MinibatchState, x: Tensor, space: Space, shapes: Shapes
) -> tuple[Tensor | None, Normals | None]:
    """Return z − x and, while the caller projects x, the normals of the bounds at which x is.

    A part of the offset along a normal would lead out of the set again, and grow from step to step: it is removed.
    Other parts are kept, also where a projection has scaled x.
    """
    offset, caller = None if state.offset is None else space.tensor(state.offset), state.caller
    if not caller.projection_countdown or caller.last_written_x is None or caller.last_x is None:
        return offset, None
    normals = find_normals(space.tensor(caller.last_x), space.tensor(caller.last_written_x), x, shapes)
    return None if offset is None else tangent_for(normals, offset, shapes)(offset), normals


def _min_average_weight(state: MinibatchState, settings: Minibatch) -> float:
    """Return a lower bound of c if the horizon is known: the average covers as many iterates as steps remain; else 0.

    η falls to zero, so that the last iterates have the least noise, and the average need not reach far back.
    """
    if not settings.step_size.horizon:
        return 0.0
    p, remaining = settings.average.weighting, max(settings.step_size.horizon - state.steps, 1)
    return (p + 1.0) / (remaining + p + 1.0)


def average_weights(state: MinibatchState, settings: Minibatch, average_weight: float, space: Space) -> Tensor | None:
    """Return c of each entry, if some have joined later than others; None if all have `average_weight`.

    The weight of the k-th iterate of an entry is (p + 1)/(k + p): for large k the same as k^p / Σ_i i^p.
    """
    average, min_weight = settings.average, _min_average_weight(state, settings)
    if state.joined_at is None or not average.averaging:
        return None
    p, joined_at = average.weighting, space.tensor(state.joined_at)
    weights = (p + 1.0) / (state.steps - joined_at + (p + 1.0))
    weights = weights if min_weight == 0.0 else weights.clamp(min=min_weight)
    return torch.where(joined_at > 0.0, weights, average_weight)


def began_with_outliers(state: MinibatchState, grad_norm: float) -> bool:
    """Return whether this gradient, or this one and the last, are so small that all gradients before were outliers."""
    norm, norms = grad_norm / state.gradient_unit, state.norms
    is_single = state.steps <= _SINGLE_FIRST_STEPS and _FIRST_OUTLIERS * norm < norms.smallest_grad_norm
    is_repeated = norms.far_smaller_gradients > 0 and _is_far_smaller(norms, norm)
    return 0 < state.steps <= batch_losses.RELIABLE_MEAN_STEPS and (is_single or is_repeated)


def _is_far_smaller(norms: GradientNorms, norm: float) -> bool:
    """Return whether a gradient norm, in units of the first, is far smaller than all before."""
    return _REPEATED_FIRST_OUTLIERS * norm < norms.smallest_grad_norm


def after_results(
    state: MinibatchState, settings: Minibatch, scalars: StepScalars[float], results: StepResults
) -> MinibatchState:
    """Return the state that follows from the results of a step."""
    caller = _after_checksums(state, results)
    losses, comparison, distance, eta_reduction = state.losses, state.comparison, state.distance, state.eta_reduction
    if caller.caller_changed or state.steps == 0:  # a return to an earlier point would undo the change
        losses = replace(losses, loss_mean=math.nan, safe_point=None)
    if comparison.first_point is not None and (
        caller.caller_changed or state.steps >= batch_losses.RELIABLE_MEAN_STEPS
    ):
        comparison = replace(comparison, first_point=None)
    if results.unit_step_norm1 is not None:
        distance = _updated_distance(state, scalars, results, results.unit_step_norm1)
        eta_reduction = step_size.regrown_eta_reduction(eta_reduction, distance)
    return replace(
        state,
        nonfinite_batches=0,
        steps=state.steps + 1,
        weight_sum=state.weight_sum + _iterate_weight(state, settings.average) * results.weight_factor,
        eta_reduction=eta_reduction,
        norms=_updated_norms(state, scalars, results.grad_norm),
        comparison=comparison,
        losses=losses,
        distance=distance,
        caller=caller,
    )


def _updated_norms(state: MinibatchState, scalars: StepScalars[float], grad_norm: float) -> GradientNorms:
    """Return the gradient norms with one more, ‖g‖ before clipping."""
    norms, norm = state.norms, min(grad_norm, scalars.clip_norm) / state.gradient_unit
    mean_square = norms.grad_norm_mean_square
    is_early = state.steps <= batch_losses.RELIABLE_MEAN_STEPS
    max_counted_norm = _MAX_COUNTED_NORM_FACTOR * math.sqrt(mean_square)
    is_far_larger = grad_norm / state.gradient_unit > max_counted_norm and not is_early
    counts = not is_far_larger or norms.far_larger_gradients >= 2
    updated = replace(
        norms,
        grad_norm_mean_square=mean_square + scalars.gradient_weight * (norm**2 - mean_square) * counts,
        last_grad_norm=norm,
        far_larger_gradients=norms.far_larger_gradients + 1 if is_far_larger else 0,
    )
    if not is_early:
        return updated
    largest = max(norms.largest_grad_norm, min(norm, norms.last_grad_norm))
    if _is_far_smaller(norms, norm):
        return replace(updated, largest_grad_norm=largest, far_smaller_gradients=norms.far_smaller_gradients + 1)
    smallest = min(norms.smallest_grad_norm, norm)
    return replace(updated, largest_grad_norm=largest, smallest_grad_norm=smallest, far_smaller_gradients=0)


def _iterate_weight(state: MinibatchState, average: Average) -> float:
    """Return the weight of the next iterate in the average, k^p."""
    weight: float = (state.steps + 1.0) ** average.weighting
    return weight


def _after_checksums(state: MinibatchState, results: StepResults) -> CallerChanges:
    """Return what the checksums show: whether the caller has changed the parameters since the last step."""
    caller = state.caller
    is_known = state.steps > 0 and not math.isnan(caller.checksum)
    return replace(
        caller,
        checksum=results.checksum % CHECKSUM_MODULUS,
        unsummed_checksum=0.0,
        caller_changed=is_known and results.checksum_before % CHECKSUM_MODULUS != caller.checksum,
        projection_countdown=max(0, caller.projection_countdown - 1),
    )


def _updated_distance(
    state: MinibatchState, scalars: StepScalars[float], results: StepResults, unit_step_norm1: float
) -> DistanceBound:
    """Return the distance bound after a step that updated it."""
    kept_factor = 1.0 - scalars.average_weight
    steps = 1 if state.steps < batch_losses.RELIABLE_MEAN_STEPS else _DISTANCE_INTERVAL
    new_norms = kept_factor * steps * scalars.eta * unit_step_norm1
    return step_size.updated_distance_bound(
        state.distance,
        state.parameter_unit,
        kept_factor**steps * state.distance.step_norm1_sum + new_norms,
        results.offset_norm1,
        results.inner_product,
        results.direction_sum_norm1,
    )
