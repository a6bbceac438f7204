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

INITIAL_DISTANCE = 1e-6
"""The lower bound of the distance to a solution, in parameter units, before it is estimated (Prodigy's)."""


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
class GradientNorms:
    """Norms of the gradients of the averaged phase, in units of the norm of the first one.

    Attributes
    ----------
    grad_norm_mean_square : float
        Running mean of the squares, without outliers.
    largest_grad_norm : float
        The largest norm so far that two gradients in a row have reached, in the first steps.
    last_grad_norm : float
        The norm of the last gradient.
    smallest_grad_norm : float
        The smallest norm in the first steps, without those far smaller than all before.
    far_smaller_gradients : int
        Consecutive gradients far smaller than all before.
    far_larger_gradients : int
        Consecutive gradients far larger than the typical one.
    """

    grad_norm_mean_square: float = 1.0
    largest_grad_norm: float = 1.0
    last_grad_norm: float = 1.0
    smallest_grad_norm: float = 1.0
    far_smaller_gradients: int = 0
    far_larger_gradients: int = 0


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
            parts = ((part, item.name) for part, kind in PARTS.items() for item in fields(kind))
            raise missing_attribute(self, name, {item: f"use {part}.{item}" for part, item in parts})

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


PARTS: dict[str, Any] = {
    item.name: item.default_factory for item in fields(MinibatchState) if item.default_factory is not MISSING
}
"""The classes of the parts of the state."""
