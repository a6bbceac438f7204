"""The numbers of an averaged step: those that it needs from the state, and the state that follows from its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.core.space import NEAR_INFINITY, NEAR_ZERO, Space
from sanc.errors import is_number
from sanc.minibatch import gradient_norms, step_size
from sanc.minibatch.averaging import CHECKSUM_MODULUS, StepResults, StepScalars, on_device
from sanc.minibatch.distance import DistanceSums
from sanc.minibatch.gradient_norms import GradientNorms
from sanc.minibatch.metrics.base import Shapes
from sanc.minibatch.projection import Normals, find_normals, tangent_for
from sanc.minibatch.settings import Average, Minibatch
from sanc.minibatch.state import CallerChanges, MinibatchState
from sanc.minibatch.step_size import StepSize, unusable_piece


def step_scalars(
    state: MinibatchState, settings: Minibatch, rate: float, *, has_values: bool = False
) -> StepScalars[float]:
    """Return the scalars of the next step, with `rate` as a factor of η; `has_values`: whether losses are known."""
    steps, norms, unit = state.steps, state.norms, state.gradient_unit
    weight = _iterate_weight(state, settings.average)
    average_weight = max(weight / (state.weight_sum + weight), _min_average_weight(state, settings))
    return StepScalars(
        clip_norm=max(norms.clip_norm(steps) * unit, NEAR_ZERO) if steps else NEAR_INFINITY,
        full_norm=max(norms.full_weight_norm(steps) * unit, NEAR_ZERO),
        gradient_factor=1.0 / unit,
        gradient_weight=max(1.0 - settings.metric.memory, 1.0 / (steps + 1)),
        eta=rate * (step_size.checked_size(settings.step_size, state) * state.eta_reduction),
        average_weight=average_weight if settings.average.averaging else 1.0,
        distance_weight=state.distance.weight,
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
        factors = settings.age_factors(state, oracle.space.tensor(state.joined_at))
    if len(set(rates)) <= 1:
        return factor, factors
    pairs = zip(on_device(rates, like.dtype, like.device).unbind(), oracle.shapes, strict=True)
    expanded = torch.cat([rate.expand(math.prod(shape)) for rate, shape in pairs])
    return factor / (largest_rate or 1.0), expanded if factors is None else expanded * factors


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
    """Return a lower bound of c; raise an error if a subclass of the caller returned no number in [0, 1]."""
    horizon, average = settings.step_size.horizon, settings.average
    weight = average.min_weight(max(horizon - state.steps, 1) if horizon else math.inf)
    if not (is_number(weight) and 0.0 <= weight <= 1.0):
        raise unusable_piece("average", average, "min_weight", weight, "a number in [0, 1]")
    return weight


def average_weights(state: MinibatchState, settings: Minibatch, average_weight: float, space: Space) -> Tensor | None:
    """Return c of each entry, if some have joined later than others; None if all have `average_weight`."""
    average, min_weight = settings.average, _min_average_weight(state, settings)
    if state.joined_at is None or not average.averaging:
        return None
    joined_at = space.tensor(state.joined_at)
    weights = average.late_weights(state.steps - joined_at)
    weights = weights if min_weight == 0.0 else weights.clamp(min=min_weight)
    return torch.where(joined_at > 0.0, weights, average_weight)


def after_results(
    state: MinibatchState, settings: Minibatch, scalars: StepScalars[float], results: StepResults
) -> MinibatchState:
    """Return the state that follows from the results of a step."""
    caller = _after_checksums(state, results)
    losses, comparison, distance, eta_reduction = state.losses, state.comparison, state.distance, state.eta_reduction
    if caller.caller_changed or state.steps == 0:  # a return to an earlier point would undo the change
        losses = replace(losses, loss_mean=math.nan, safe_point=None)
    if comparison.first_point is not None and (
        caller.caller_changed or state.steps >= gradient_norms.RELIABLE_MEAN_STEPS
    ):
        comparison = replace(comparison, first_point=None)
    if results.unit_step_norm1 is not None:
        sums = DistanceSums(
            results.unit_step_norm1, results.offset_norm1, results.inner_product, results.direction_sum_norm1
        )
        weight, unit = scalars.average_weight, state.parameter_unit
        distance = distance.after(state.steps, sums, eta=scalars.eta, average_weight=weight, parameter_unit=unit)
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
    norm, clipped_norm = (value / state.gradient_unit for value in (grad_norm, min(grad_norm, scalars.clip_norm)))
    return state.norms.after(state.steps, norm, clipped_norm, scalars.gradient_weight)


def _iterate_weight(state: MinibatchState, average: Average) -> float:
    """Return the weight of the next iterate; raise an error if a subclass of the caller returned no positive number."""
    weight = average.weight(state.steps + 1)
    if not (is_number(weight) and 0.0 < weight < math.inf):
        raise unusable_piece("average", average, "weight", weight, "a positive finite number")
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
