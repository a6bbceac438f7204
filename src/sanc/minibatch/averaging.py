"""The vector work of an averaged step: a step in the metric, and the running average of the iterates.

Steps are made on z, the gradient is taken at y between z and the average x, and the parameters hold x (schedule-free
learning, Defazio et al. 2024): noise averages out although the step size does not fall to zero.

    y = x + (1 − β)(z − x),   z ← z − η M⁻¹∇f(y),   x ← x + c (z − x),   c = k^p / Σ_i i^p

Only x and the offset z − x are stored, so a caller who changes the parameters moves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.minibatch.metrics.base import Preconditioner
from sanc.minibatch.scale import DISTANCE_MEMORY


class StepNumbers(NamedTuple):
    """What the host decides before the gradient is known, in the order in which `AveragedStep` reads it."""

    clip_norm: float  # the largest ‖g‖ that is not clipped
    gradient_factor: float  # 1 over the unit of g
    moment_weight: float  # of the gradient in the second moments …
    factor_weight: float  # … and in the factors of the metric
    eta: float  # η
    average_weight: float  # c
    distance_weight: float  # λ


class StepResults(NamedTuple):
    """What the host reads after the step, in the order in which `AveragedStep` returns it."""

    value: float  # f …
    grad_norm: float  # … and ‖g‖, before clipping
    dual: float  # gᵀM⁻¹g in units of the factor of g
    offset_square: float  # ‖z − x‖² after the step on z, before that on x, which is c times as long
    square_norm_before: float  # ‖x‖² …
    square_norm: float  # … and after the step
    direction_norm: float | None = None  # for the distance bound: the 1-norms of s/η …
    offset_norm: float = 0.0  # … and of z − x,
    along: float = 0.0  # ⟨p, x_0 − z⟩
    drift_norm: float = 0.0  # and the 1-norm of the drift


class AveragedStep:
    """The vector work of one step. The host reads its numbers at the end, so that it can be recorded.

    Parameters
    ----------
    metric : Preconditioner
        M, which every gradient updates.
    averaging : float
        β.
    updates_factors : bool
        Whether the factors of the metric and the distance bound are updated too.
    total : callable, optional
        Sums over ranks that hold the other entries.
    """

    def __init__(
        self,
        metric: Preconditioner,
        averaging: float,
        updates_factors: bool,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.metric, self.averaging, self.updates_factors, self._total = metric, averaging, updates_factors, total

    def tensors(self) -> list[Tensor]:
        """Return what it changes in place."""
        return self.metric.tensors()

    def point(self, x: Tensor, offset: Tensor) -> Tensor:
        """Return y, where the gradient is taken."""
        return torch.add(x, offset, alpha=1.0 - self.averaging)

    def __call__(
        self,
        value: Tensor,
        g: Tensor,
        x: Tensor,
        offset: Tensor | None,
        numbers: Tensor,
        rates: Tensor | None = None,
        start: Tensor | None = None,
        drift: Tensor | None = None,
        change: Tensor | None = None,
        average_weights: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the numbers for the host, the new x, the new offset, and the new drift where there was one.

        `numbers` are `StepNumbers` in float64, and the numbers for the host are `StepResults`. Where f or g is not
        finite the metric is not updated, and the iteration stays at x.

        `average_weights` replaces c where entries have different ones.

        `change` is what the caller, by a projection, did to x after the last step. Entries whose step would undo it are
        at a bound and stay there: the step is −η P M⁻¹P g with P the projection on the other entries (two-metric
        projection, Bertsekas 1982). With M⁻¹g itself the projected step need not be one of descent.
        """
        norm = torch.linalg.vector_norm(g, dtype=torch.float64)
        if self._total is not None:
            norm = self._total(norm.square()).sqrt()
        usable = torch.isfinite(value + norm)
        clip_norm, factor, *more = numbers.unbind()
        g = torch.where(usable, g * (factor * (clip_norm / torch.maximum(norm, clip_norm))), 0.0)
        offset = torch.zeros_like(x) if offset is None else offset
        moment_weight, factor_weight, eta, average_weight, distance_weight = (
            (torch.stack(more) * usable).to(g.dtype).unbind()
        )
        at_bound = None if change is None else change * g > 0.0
        g = g if at_bound is None else torch.where(at_bound, 0.0, g)
        direction = self.metric.update(g, moment_weight, factor_weight if self.updates_factors else None)
        direction = direction if at_bound is None else torch.where(at_bound, 0.0, direction)
        step = direction if rates is None else direction * rates
        moved = torch.addcmul(offset, step, eta, value=-1.0)
        averaged = moved
        if average_weights is not None:
            averaged = moved * (average_weights / average_weight)
            average_weight = average_weights * usable
        new = [torch.addcmul(x, moved, average_weight), torch.addcmul(moved, moved, average_weight, value=-1.0)]
        read = [torch.dot(u, v) for u, v in ((g, direction), (averaged, averaged), (x, x), (new[0], new[0]))]
        if start is not None and drift is not None:
            new.append(torch.addcmul(DISTANCE_MEMORY * drift, direction, distance_weight))
            read += [step.abs().sum(), new[1].abs().sum(), torch.dot(direction, start - x - offset)]
            read.append(new[2].abs().sum())
        sums = torch.stack(read).double()
        return [torch.cat([torch.stack([value, norm]), sums if self._total is None else self._total(sums)]), *new]


@runtime_checkable
class Advances(Protocol):
    """An oracle that combines a gradient with vector work: it leaves the loss unread, or replays a recording."""

    def advance(self, work: AveragedStep, x: Tensor, offset: Tensor | None, *tensors: Any) -> list[Tensor]:
        """Return ``work(f, ∇f, x, offset, *tensors)`` with the gradient at ``work.point(x, offset)``."""
        ...


def advance(oracle: Oracle, work: AveragedStep, x: Tensor, offset: Tensor | None, *tensors: Any) -> list[Tensor]:
    """Evaluate the gradient where `work` needs it, and do the work; without an offset the gradient is that at x."""
    if isinstance(oracle, Advances) and offset is not None:
        return oracle.advance(work, x, offset, *tensors)
    value, g = oracle.gradient(oracle.space.vector(x if offset is None else work.point(x, offset)))
    value_tensor = x.new_tensor(value if oracle.has_values else 0.0, dtype=torch.float64)
    return list(work(value_tensor, oracle.space.tensor(g), x, offset, *tensors))
