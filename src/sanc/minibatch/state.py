"""The state of the iteration on samples.

Vectors are never changed in place, and only the iteration writes its state: all functions of this package return the
next one. A number that is not known yet is NaN. `sanc.core.saved` describes the metadata of fields.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from sanc.core.space import Vector
from sanc.errors import missing_attribute
from sanc.minibatch.distance import DistanceBound
from sanc.minibatch.gradient_norms import GradientNorms


@dataclass(frozen=True, slots=True)
class BatchComparison:
    """The comparison of each batch with the one before, by which the second-order phase ends.

    Attributes
    ----------
    disagreements : int
        Consecutive batches that disagreed with the last step.
    steps_since_halving : int
        Steps since `reference_loss` was set.
    reference_loss : float
        The loss that the phase has to halve next.
    first_loss : float
        The loss at the first point.
    last_decrease : float
        Decrease of the loss by the last step, on its own batch.
    last_loss : float
        The loss that the last step reached, on its own batch.
    last_step_was_long : bool
        Whether the last step was longer than an averaged step.
    first_point : vector or None
        The first point of the run, until the first averaged steps were made.
    """

    disagreements: int = 0
    steps_since_halving: int = 0
    reference_loss: float = math.nan
    first_loss: float = math.nan
    last_decrease: float = math.nan
    last_loss: float = math.nan
    last_step_was_long: bool = False
    first_point: Vector | None = None


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """The running mean of the losses of the averaged phase.

    Attributes
    ----------
    loss_count : int
        Number of losses in the mean.
    loss_mean : float
        The mean.
    loss_variance : float
        The running variance.
    lowest_loss_mean : float
        The lowest mean so far.
    below_bound : bool
        Whether a loss was below the lower bound of the settings.
    stagnation_tests : int
        Tests for stagnation made.
    tested_loss_mean : float
        The mean at the last of these tests.
    safe_point : vector or None
        The point to which the run returns after a rise of the loss.
    """

    loss_count: int = 0
    loss_mean: float = math.nan
    loss_variance: float = 0.0
    lowest_loss_mean: float = math.nan
    below_bound: bool = False
    stagnation_tests: int = 0
    tested_loss_mean: float = math.nan
    safe_point: Vector | None = None


@dataclass(frozen=True, slots=True)
class CallerChanges:
    """Changes of x by the caller between averaged steps.

    Attributes
    ----------
    checksum : float
        Checksum of the parameters after the last step; if the parameters have another one later, the caller has changed
        them.
    caller_changed : bool
        Whether the last step found that the caller had changed x.
    projection_countdown : int
        Remaining steps in which the caller is assumed to project x after each step.
    last_x : vector or None
        x before the last step, while the caller is assumed to project it.
    last_written_x : vector or None
        x after the last step, while the caller is assumed to project it.
    unsummed_checksum : float
        What moves between the two points of the phase have added since then to the checksum of this rank's entries, if
        other ranks hold the rest. The next step sums it over the ranks.
    """

    checksum: float = math.nan
    caller_changed: bool = False
    projection_countdown: int = 0
    last_x: Vector | None = None
    last_written_x: Vector | None = None
    unsummed_checksum: float = field(default=0.0, metadata={"local": True})


@dataclass(frozen=True, slots=True)
class MinibatchState:
    """The state of the iteration without the preconditioner: numbers and vectors.

    Attributes
    ----------
    seed : int
        Seed of the random starts and signs.
    iteration : int
        Iterations made, in both phases.
    seconds : float
        Time spent in iterations.
    averaged : bool
        Whether the averaged phase has begun.
    nonfinite_batches : int
        Consecutive batches that were not finite.
    steps : int
        Averaged steps made.
    last_extension : int
        Averaged steps made when parameters last joined.
    weight_sum : float
        Sum of the weights in the average.
    gradient_unit : float
        Norm of the first gradient of the averaged phase.
    parameter_unit : float
        The size of a typical parameter at the first point, which is the unit of η; 0: not known yet.
    width : float
        The typical smaller side of a matrix; 0: there are no matrices, or not known yet.
    peak_lr : float
        The largest `lr` so far.
    eta_reduction : float
        Factor of η: below 1 after a rise of the loss or batches that are not finite.
    offset : vector or None
        z − x.
    joined_at : vector or None
        For each entry, the averaged steps made when it joined the average; None: all joined at 0.
    comparison : BatchComparison
        `disagreements`, `steps_since_halving`, `reference_loss`, `first_loss`, `last_decrease`, `last_loss`,
        `last_step_was_long` and `first_point`: how batches agree in the second-order phase.
    norms : GradientNorms
        `grad_norm_mean_square`, `largest_grad_norm`, `last_grad_norm`, `smallest_grad_norm`, `far_smaller_gradients`
        and `far_larger_gradients`, in units of `gradient_unit`.
    distance : DistanceBound
        `distance_bound`, a lower bound of the distance to a solution, with `step_norm1_sum`, `offset_norm1`,
        `distance_numerator`, `averaging_start` and `direction_sum`.
    losses : MeanLoss
        `loss_mean`, its `loss_count`, `loss_variance` and `lowest_loss_mean`, `below_bound`, `stagnation_tests`,
        `tested_loss_mean` and `safe_point`.
    caller : CallerChanges
        `checksum`, `caller_changed`, `projection_countdown`, `last_x`, `last_written_x` and `unsummed_checksum`: how
        the caller changes x.
    """

    seed: int
    iteration: int = 0
    seconds: float = 0.0
    averaged: bool = False
    nonfinite_batches: int = 0
    steps: int = 0
    last_extension: int = 0
    weight_sum: float = 0.0
    gradient_unit: float = field(default=1.0, metadata={"positive": True})
    parameter_unit: float = 0.0
    width: float = 0.0
    peak_lr: float = 0.0
    eta_reduction: float = 1.0
    offset: Vector | None = None
    joined_at: Vector | None = None
    comparison: BatchComparison = field(default_factory=BatchComparison)
    norms: GradientNorms = field(default_factory=GradientNorms)
    distance: DistanceBound = field(default_factory=DistanceBound)
    losses: MeanLoss = field(default_factory=MeanLoss)
    caller: CallerChanges = field(default_factory=CallerChanges)

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            grouped = ((group, item.name) for group, kind in STATE_GROUPS.items() for item in fields(kind))
            raise missing_attribute(self, name, {item: f"use {group}.{item}" for group, item in grouped})

    def without_checksum(self) -> MinibatchState:
        """Return the state for parameters that the iteration has changed itself, which is no change by the caller."""
        return replace(self, caller=replace(self.caller, checksum=math.nan))

    def restarted(self) -> MinibatchState:
        """Return the state in which averaging starts again."""
        return replace(
            self,
            nonfinite_batches=0,
            steps=0,
            last_extension=0,
            weight_sum=0.0,
            offset=None,
            joined_at=None,
            norms=GradientNorms(),
            distance=DistanceBound(),
            losses=replace(self.losses, loss_mean=math.nan),
            caller=replace(self.caller, checksum=math.nan),
        )


STATE_GROUPS: dict[str, Any] = {
    item.name: item.default_factory for item in fields(MinibatchState) if item.default_factory is not MISSING
}
"""The classes of the groups of fields of the state, by name."""
