"""The lower bound of the distance to a solution, which shows whether larger steps are needed.

It is that of Mishchenko and Defazio (2023, Prodigy): for the directions p_i = M⁻¹g_i and any λ_i > 0,

    d = Σ λ_i ⟨p_i, x_0 − z_i⟩ / ‖Σ λ_i p_i‖_1.

With p in place of g this is an estimate, not a bound that is proved. `AveragedStep` computes the sums on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sanc.core.space import Vector
from sanc.minibatch import gradient_norms

INITIAL_DISTANCE = 1e-6
"""The lower bound of the distance to a solution, in parameter units, before it is estimated (Prodigy's)."""
DISTANCE_DECAY = 0.998
"""Decay of the sums in the distance bound: a mean over about 500 steps, many times `warm_up`."""
_DISTANCE_INTERVAL = 5
"""Steps between two updates of the distance bound, after the first steps."""
_ALIGNED_FRACTION = 0.7
"""The last steps are aligned if ‖z − x‖_1 exceeds this fraction of the sum of their 1-norms."""


class DistanceSums(NamedTuple):
    """What a step has measured for the bound.

    Attributes
    ----------
    unit_step_norm1 : float
        The 1-norm of s/η.
    offset_norm1 : float
        ‖z − x‖_1 after the step.
    inner_product : float
        ⟨p, x_0 − z⟩.
    direction_sum_norm1 : float
        ‖Σ λ_i p_i‖_1 after the step.
    """

    unit_step_norm1: float
    offset_norm1: float
    inner_product: float
    direction_sum_norm1: float


@dataclass(frozen=True, slots=True)
class DistanceBound:
    """The lower bound of the distance to a solution, with the sums of which it is a quotient.

    Attributes
    ----------
    distance_bound : float
        d, in units of `parameter_unit`.
    step_norm1_sum : float
        Sum of ‖step‖_1, weighted as in z − x.
    offset_norm1 : float
        ‖z − x‖_1.
    distance_numerator : float
        Σ λ_i ⟨p_i, x_0 − z_i⟩.
    averaging_start : vector or None
        x_0, the point at which averaging began.
    direction_sum : vector or None
        Σ λ_i p_i; its 1-norm is the denominator.
    """

    distance_bound: float = field(default=INITIAL_DISTANCE, metadata={"positive": True})
    step_norm1_sum: float = 0.0
    offset_norm1: float = 0.0
    distance_numerator: float = field(default=0.0, metadata={"signed": True})
    averaging_start: Vector | None = None
    direction_sum: Vector | None = None

    @property
    def weight(self) -> float:
        """The weight λ of the next direction."""
        return (1.0 - DISTANCE_DECAY) * self.distance_bound * self.distance_bound

    @property
    def is_aligned(self) -> bool:
        """Whether the last steps are aligned: there is little noise if ‖z − x‖ is nearly the sum of the step norms."""
        return self.offset_norm1 > _ALIGNED_FRACTION * self.step_norm1_sum

    def after(
        self, steps: int, sums: DistanceSums, *, eta: float, average_weight: float, parameter_unit: float
    ) -> DistanceBound:
        """Return the bound after a step of size `eta` that has updated it, with `steps` averaged steps before it.

        The weights of the step norms decay by 1 − c with c = `average_weight`, as z − x does.
        """
        numerator = DISTANCE_DECAY * self.distance_numerator + self.weight * sums.inner_product
        bound, denominator = self.distance_bound, sums.direction_sum_norm1
        if denominator > 0.0 and math.isfinite(numerator / denominator):
            bound = max(bound, numerator / denominator / parameter_unit)
        kept_factor, interval = 1.0 - average_weight, _interval(steps)
        new_norms = kept_factor * interval * eta * sums.unit_step_norm1
        return replace(
            self,
            distance_bound=bound,
            step_norm1_sum=kept_factor**interval * self.step_norm1_sum + new_norms,
            offset_norm1=sums.offset_norm1,
            distance_numerator=numerator,
        )


def is_due(steps: int) -> bool:
    """Return whether the step after so many averaged steps updates the bound."""
    return steps % _interval(steps) == 0


def _interval(steps: int) -> int:
    """Return the number of steps between two updates: each of the first steps makes one."""
    return 1 if steps < gradient_norms.RELIABLE_MEAN_STEPS else _DISTANCE_INTERVAL
