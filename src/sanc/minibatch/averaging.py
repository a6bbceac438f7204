"""The vector work of an averaged step: a step in the metric, and the running average of the iterates.

Steps are made on z, the gradient is taken at y between z and the average x, and the parameters hold x (schedule-free
learning, Defazio et al. 2024). So noise averages out, although the step size does not fall to zero.

    y = x + (1 − β)(z − x),   z ← z − η M⁻¹∇f(y),   x ← x + c (z − x),   c = k^p / Σ_i i^p

If f is known to be bounded below by b, steps are limited. A step of z moves y by 1 − β of it, and must not reduce f(y)
below b to first order:

    (1 − β) η ∇f(y)ᵀM⁻¹∇f(y) ≤ f(y) − b.

This is Polyak's step as an upper limit (Polyak 1969; Loizou et al. 2021). It acts where all batches can be fitted: the
loss then falls by decades, and a size that decreases slowly would keep it from falling.

Only x and the offset z − x are stored, so a caller who changes the parameters moves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.core.space import NEAR_ZERO
from sanc.minibatch.metrics.base import Preconditioner, Shapes
from sanc.minibatch.projection import Normals, tangent_for
from sanc.minibatch.step_size import DISTANCE_DECAY

_WEIGHT_POWER = 4
"""Power of the ratio of gradient norms by which the weight of an iterate with a small gradient is reduced."""
_MIN_WEIGHT_FACTOR = 1e-30
"""The smallest factor of a weight in the average, above 0 so that quotients are defined."""
CHECKSUM_MODULUS = 2**32
"""Checksums are equal modulo this, by which sums in int32 overflow."""

Number = TypeVar("Number")


class StepInputs(NamedTuple):
    """The tensors that an averaged step reads; a tensor of None is ignored.

    Attributes
    ----------
    x : Tensor
        The average x.
    offset : Tensor or None
        z − x; None: zero.
    scalars : Tensor
        `StepScalars` in float64.
    rates : Tensor or None
        Factors of η, if parameters have different ones.
    averaging_start : Tensor or None
        x_0 of the distance bound.
    direction_sum : Tensor or None
        Σ λ_i p_i of the distance bound.
    entry_normals : Tensor or None
        `Normals.entries` of a set onto which the caller projects x.
    slice_normals : Tensor or None
        `Normals.slices` of that set.
    average_weights : Tensor or None
        c of each entry, if entries have different ones.
    parameters : Tensor or None
        The parameters, if the caller has them at y; None: they are at x.
    """

    x: Tensor
    offset: Tensor | None
    scalars: Tensor
    rates: Tensor | None = None
    averaging_start: Tensor | None = None
    direction_sum: Tensor | None = None
    entry_normals: Tensor | None = None
    slice_normals: Tensor | None = None
    average_weights: Tensor | None = None
    parameters: Tensor | None = None


class StepScalars(NamedTuple, Generic[Number]):
    """The numbers that the host chooses before the gradient is known: floats there, and tensors on the device.

    Attributes
    ----------
    clip_norm : float or Tensor
        The largest ‖g‖ that is not clipped.
    full_norm : float or Tensor
        The smallest ‖g‖ whose iterate has its full weight in the average.
    gradient_factor : float or Tensor
        Factor of g: 1 over its unit.
    gradient_weight : float or Tensor
        Weight of the gradient in the running means of the metric.
    eta : float or Tensor
        η.
    average_weight : float or Tensor
        c where the iterate has its full weight.
    distance_weight : float or Tensor
        λ of the distance bound.
    lower_bound : float or Tensor
        b, a lower bound of f; −∞ if none is known, as without losses.
    unsummed_checksum : float or Tensor
        What is subtracted from the checksum of the parameters before the step.
    """

    clip_norm: Number
    full_norm: Number
    gradient_factor: Number
    gradient_weight: Number
    eta: Number
    average_weight: Number
    distance_weight: Number
    lower_bound: Number
    unsummed_checksum: Number


class StepResults(NamedTuple):
    """The numbers that the host reads after the step, in the order of `StepOutputs.results`.

    Those for the distance bound are there only if the step updated it.

    Attributes
    ----------
    value : float
        f at the point of the gradient.
    grad_norm : float
        ‖g‖ before clipping.
    weight_factor : float
        Factor of the iterate's weight k^p in the average.
    average_weight : float
        c with that factor of the weight.
    step_factor : float
        Factor of η by the lower bound of f.
    dual_norm_square : float
        gᵀM⁻¹g with the clipped g, in its unit.
    z_offset_norm_square : float
        ‖z − x‖² with the new z and the old x. The norm of the step of x is c‖z − x‖. If entries have different weights
        c_i, this is ‖(c_i/c)(z − x)‖².
    checksum_before : float
        Checksum of the parameters before the step, without what moves have added since the last step.
    checksum : float
        Checksum of the parameters that the step returns.
    unit_step_norm1 : float or None
        The 1-norm of s/η, for the distance bound.
    offset_norm1 : float
        ‖z − x‖_1, for the distance bound.
    inner_product : float
        ⟨p, x_0 − z⟩, for the distance bound.
    direction_sum_norm1 : float
        ‖Σ λ_i p_i‖_1, for the distance bound.
    """

    value: float
    grad_norm: float
    weight_factor: float
    average_weight: float
    step_factor: float
    dual_norm_square: float
    z_offset_norm_square: float
    checksum_before: float
    checksum: float
    unit_step_norm1: float | None = None
    offset_norm1: float = 0.0
    inner_product: float = 0.0
    direction_sum_norm1: float = 0.0


class StepOutputs(NamedTuple):
    """The tensors that `AveragedStep` computes; None: the inputs do not require it.

    A recording has them as a list, without those that are None.

    Attributes
    ----------
    results : Tensor
        `StepResults` in float64.
    x : Tensor
        The new x.
    offset : Tensor
        z − x.
    direction_sum : Tensor or None
        Σ λ_i p_i of the distance bound.
    gradient_point : Tensor or None
        y for the new x, if the caller has the parameters there.
    """

    results: Tensor
    x: Tensor
    offset: Tensor
    direction_sum: Tensor | None = None
    gradient_point: Tensor | None = None

    def flatten(self) -> list[Tensor]:
        """Return the tensors that are not None, in their order."""
        return [tensor for tensor in self if tensor is not None]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], inputs: StepInputs) -> StepOutputs:
        """Return the outputs for these inputs from the list that `flatten` returned."""
        results, x, offset, *optional = tensors
        gradient_point = None if inputs.parameters is None else optional.pop()
        return cls(results, x, offset, optional[0] if optional else None, gradient_point)


class HostCopy:
    """A copy of a tensor for the host, which does not wait for the device until the copy is read."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._event = tensor, None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> list[float]:
        """Return the numbers; wait until the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        return list(self._copy.tolist())


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor on the device, without waiting for the device."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def checksum(v: Tensor) -> Tensor:
    """Return a sum over the bits of a vector: another one, in all likelihood, shows that an entry has changed."""
    return v.view(torch.int32).sum(dtype=torch.int32).double()


class AveragedStep:
    """The vector work of one step. It makes no transfer to the host, so that a CUDA graph can record it.

    Parameters
    ----------
    preconditioner : Preconditioner
        M, which every gradient updates.
    averaging : float
        β.
    sum_over_ranks : callable, optional
        Sums over ranks that hold the other entries.
    has_values : bool
        Whether f is known, so that a step can be limited by its lower bound.
    shapes : sequence of tuple of int
        Shapes of the parameters; needed only for inputs with normals.
    """

    def __init__(
        self,
        preconditioner: Preconditioner,
        averaging: float,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
        *,
        has_values: bool = True,
        shapes: Shapes = (),
    ) -> None:
        self.preconditioner, self.averaging, self.has_values = preconditioner, averaging, has_values
        self._shapes = shapes
        self._sum_over_ranks = sum_over_ranks

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a step changes in place."""
        return self.preconditioner.tensors()

    def gradient_point(self, inputs: StepInputs) -> Tensor:
        """Return y, the point at which the gradient is taken; x itself without an offset."""
        return inputs.x if inputs.offset is None else self._gradient_point(inputs.x, inputs.offset)

    def _gradient_point(self, x: Tensor, offset: Tensor) -> Tensor:
        return torch.add(x, offset, alpha=1.0 - self.averaging)

    def __call__(self, value: Tensor, g: Tensor, inputs: StepInputs) -> list[Tensor]:
        """Return `StepOutputs` as a list, given f and ∇f at the gradient point.

        If f or ∇f is not finite, the metric is not updated, and the iteration stays at x.
        """
        scalars: StepScalars[Tensor] = StepScalars(*inputs.scalars.unbind())
        norm = self._norm(g)
        is_finite = torch.isfinite(value + norm)
        weight_factor = (norm / scalars.full_norm).clamp(max=1.0).pow(_WEIGHT_POWER).clamp(min=_MIN_WEIGHT_FACTOR)
        weight_factor = torch.where(is_finite, weight_factor, 1.0)
        average_weight, offset_weight = self._weights(scalars.average_weight, weight_factor)
        clipping = scalars.gradient_factor * (scalars.clip_norm / torch.maximum(norm, scalars.clip_norm))
        g = torch.where(is_finite, g * clipping, 0.0)
        weights = scalars.gradient_weight, scalars.eta, average_weight, offset_weight, scalars.distance_weight
        gradient_weight, eta, average_weight_cast, offset_weight, distance_weight = (
            (torch.stack(weights) * is_finite).to(g.dtype).unbind()
        )
        g, direction = self._direction(g, gradient_weight, inputs)
        dual_norm_square = torch.dot(g, direction)
        step = direction if inputs.rates is None else direction * inputs.rates
        step_factor = torch.ones_like(norm)
        if self.has_values:
            derivative = (dual_norm_square if inputs.rates is None else torch.dot(g, step)).double()
            derivative = derivative if self._sum_over_ranks is None else self._sum_over_ranks(derivative.clone())
            limited = self._limited(value.double() - scalars.lower_bound, eta.double() * derivative / clipping)
            step_factor = torch.where(is_finite, limited, 1.0)
        factor = step_factor.to(g.dtype)
        new_x, new_offset, z_offset_norm_square = self._move(
            inputs, step, eta * factor, average_weight_cast, offset_weight, weight_factor.to(g.dtype), is_finite
        )
        before, after, new_y = inputs.x, new_x, None
        if inputs.parameters is not None:
            before = inputs.parameters
            after = new_y = torch.where(is_finite, self._gradient_point(new_x, new_offset), before)
        sums = [dual_norm_square, z_offset_norm_square, checksum(before) - scalars.unsummed_checksum]
        sums.append(checksum(after))
        new_sum, distance_sums = self._update_distance(inputs, direction, step, new_offset, factor, distance_weight)
        totals = torch.stack([part.double() for part in sums + distance_sums])
        totals = totals if self._sum_over_ranks is None else self._sum_over_ranks(totals)
        results = torch.cat([torch.stack([value, norm, weight_factor, average_weight, step_factor]), totals])
        return StepOutputs(results, new_x, new_offset, new_sum, new_y).flatten()

    def _norm(self, g: Tensor) -> Tensor:
        """Return ‖g‖ in float64."""
        norm = torch.linalg.vector_norm(g, dtype=torch.float64)
        return norm if self._sum_over_ranks is None else self._sum_over_ranks(norm.square()).sqrt()

    def _direction(self, g: Tensor, weight: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return Pg and P M⁻¹P g, after an update of M with Pg; P is the identity unless the caller projects x."""
        if inputs.entry_normals is None or inputs.slice_normals is None:
            return g, self.preconditioner.update(g, weight)
        tangent = tangent_for(Normals(inputs.entry_normals, inputs.slice_normals), -g, self._shapes)
        g = tangent(g)
        return g, tangent(self.preconditioner.update(g, weight))

    def _move(
        self,
        inputs: StepInputs,
        step: Tensor,
        eta: Tensor,
        average_weight: Tensor,
        offset_weight: Tensor,
        weight_factor: Tensor,
        is_finite: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new x and z − x, and the squared norm of the step on x, over c."""
        x, offset = inputs.x, torch.zeros_like(inputs.x) if inputs.offset is None else inputs.offset
        z_offset = torch.addcmul(offset, step, eta, value=-1.0)  # z − x, with the new z and the old x
        weighted_offset = z_offset
        if inputs.average_weights is not None:
            average_weights, offset_weights = self._weights(inputs.average_weights, weight_factor)
            weighted_offset = z_offset * (average_weights / average_weight)
            average_weight, offset_weight = average_weights * is_finite, offset_weights * is_finite
        new_x = torch.addcmul(x, z_offset, average_weight)
        new_offset = torch.addcmul(z_offset, z_offset, offset_weight, value=-1.0)
        return new_x, new_offset, torch.dot(weighted_offset, weighted_offset)

    def _update_distance(
        self,
        inputs: StepInputs,
        direction: Tensor,
        step: Tensor,
        new_offset: Tensor,
        factor: Tensor,
        distance_weight: Tensor,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the new Σ λ_i p_i and the last four numbers of `StepResults`; none if the inputs have no such sum."""
        if inputs.averaging_start is None or inputs.direction_sum is None:
            return None, []
        offset = torch.zeros_like(inputs.x) if inputs.offset is None else inputs.offset
        new_sum = torch.addcmul(DISTANCE_DECAY * inputs.direction_sum, direction, distance_weight * factor)
        inner_product = torch.dot(direction, inputs.averaging_start - inputs.x - offset)
        norms = factor * step.abs().sum(), new_offset.abs().sum()
        return new_sum, [*norms, factor * inner_product, new_sum.abs().sum()]

    def _weights(self, weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights a and b in x ← x + a (z − x) and z − x ← (1 − b)(z − x), for c and a factor of its weight.

        Both are c if the factor is 1. Otherwise the rest of c moves x and z towards y, where the gradient is small.
        """
        reduced = reduced_weight(weight, factor)
        rest = weight - reduced
        return reduced + (1.0 - self.averaging) * rest * (1.0 - reduced), reduced + rest * (1.0 - reduced)

    def _limited(self, excess: Tensor, decrease: Tensor) -> Tensor:
        """Return the factor of a step that to first order reduces f by `decrease` at z, and by 1 − β of that at y.

        `excess` is f − b. It is negative if b is no lower bound; then the step is not shortened.
        """
        limit = excess / ((1.0 - self.averaging) * decrease).clamp(min=NEAR_ZERO)
        return torch.where(excess < 0.0, 1.0, limit.clamp(max=1.0))


def reduced_weight(weight: Tensor, factor: Tensor) -> Tensor:
    """Return f·w/(W + f·w) for c = w/(W + w) and a factor f of the weight w."""
    reduced = weight * factor
    # 1 − c + f·c may round to zero if c = 1, and is at least f·c.
    return reduced / torch.maximum(1.0 - weight * (1.0 - factor), reduced)


@runtime_checkable
class VectorWorkOracle(Protocol):
    """An oracle that combines a gradient with vector work, without a transfer of the loss to the host in between.

    It may replay both from a CUDA graph.

    Attributes
    ----------
    vector_work : object
        Has a method `refresh`, which refreshes parts of a preconditioner, and may replay that too.
    """

    vector_work: Any

    def work_at_gradient(self, work: AveragedStep, inputs: StepInputs) -> list[Tensor]:
        """Return ``work(f, ∇f, inputs)`` with the gradient at ``work.gradient_point(inputs)``."""
        ...


def work_at_gradient(oracle: Oracle, work: AveragedStep, inputs: StepInputs) -> StepOutputs:
    """Evaluate the gradient at the point that `work` requires, and do the work."""
    if isinstance(oracle, VectorWorkOracle) and inputs.offset is not None:
        return StepOutputs.from_tensors(oracle.work_at_gradient(work, inputs), inputs)
    value, g = oracle.gradient(oracle.space.vector(work.gradient_point(inputs)))
    value_tensor = on_device([value if oracle.has_values else 0.0], torch.float64, inputs.x.device)[0]
    return StepOutputs.from_tensors(work(value_tensor, oracle.space.tensor(g), inputs), inputs)
