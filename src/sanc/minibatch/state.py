"""The state of the iteration on samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sanc.core.space import Vector

INITIAL_DISTANCE = 1e-6
"""The lower bound of the distance to a solution, in units of a typical weight, before it is estimated (Prodigy's)."""
_RESET_ON_RESTART = {"reset_on_restart": True}
"""Metadata of fields of the average: they have their defaults again when averaging is restarted."""


@dataclass(frozen=True, slots=True)
class MinibatchState:
    """The state of the iteration without the preconditioner: numbers and vectors.

    Each field has its meaning as a comment behind it or above it. Vectors are never changed in place, and only the
    iteration writes a state. A number that is not known yet is NaN. `sanc.core.saved` describes the other metadata of
    fields.
    """

    # Both phases.
    seed: int  # seed of the random starts and signs
    iteration: int = 0  # iterations made, in both phases
    seconds: float = 0.0  # time spent in iterations
    averaged: bool = False  # whether the averaged phase has begun
    # The second-order phase.
    disagreements: int = 0  # consecutive batches that disagreed with the last step
    steps_since_halving: int = 0  # steps since `reference_loss` was set
    reference_loss: float = math.nan  # the loss that the phase has to halve next
    first_loss: float = math.nan  # the loss at the first point
    last_decrease: float = math.nan  # decrease of the loss by the last step, on its own batch
    last_loss: float = math.nan  # loss that the last step reached, on its own batch
    last_step_was_long: bool = False  # whether the last step was longer than an averaged step
    # The averaged phase: counts.
    steps: int = field(default=0, metadata=_RESET_ON_RESTART)  # averaged steps made
    last_extension: int = field(default=0, metadata=_RESET_ON_RESTART)  # steps made when parameters last joined
    nonfinite_batches: int = field(default=0, metadata=_RESET_ON_RESTART)  # consecutive batches that were not finite
    # The averaged phase: units and gradient norms.
    weight_sum: float = field(default=0.0, metadata=_RESET_ON_RESTART)  # sum of the weights in the average
    gradient_unit: float = field(default=1.0, metadata={"positive": True})  # norm of the first gradient
    parameter_unit: float = 0.0  # a typical weight at the first point, the unit of η; 0: not known yet
    width: float = 0.0  # the typical smaller side of a matrix; 0: there are no matrices, or not known yet
    # Gradient norms in units of `gradient_unit`.
    grad_norm_mean_square: float = field(default=1.0, metadata=_RESET_ON_RESTART)
    largest_grad_norm: float = field(default=1.0, metadata=_RESET_ON_RESTART)
    last_grad_norm: float = field(default=1.0, metadata=_RESET_ON_RESTART)
    # Without those far smaller than all before.
    smallest_grad_norm: float = field(default=1.0, metadata=_RESET_ON_RESTART)
    # Consecutive gradients far smaller than all before, and far larger than the typical one.
    far_smaller_gradients: int = field(default=0, metadata=_RESET_ON_RESTART)
    far_larger_gradients: int = field(default=0, metadata=_RESET_ON_RESTART)
    # The averaged phase: the step size and the distance bound.
    peak_lr: float = 0.0  # the largest `lr` so far
    eta_reduction: float = 1.0  # factor of η: lower after a rise of the loss or non-finite batches; see `scale`
    # A lower bound of the distance to a solution.
    distance_bound: float = field(default=INITIAL_DISTANCE, metadata={"positive": True} | _RESET_ON_RESTART)
    step_norm1_sum: float = field(default=0.0, metadata=_RESET_ON_RESTART)  # sum of ‖step‖_1, weighted as in z − x
    offset_norm1: float = field(default=0.0, metadata=_RESET_ON_RESTART)  # ‖z − x‖_1
    # The numerator of the distance bound.
    distance_numerator: float = field(default=0.0, metadata={"signed": True} | _RESET_ON_RESTART)
    # The averaged phase: the loss.
    loss_count: int = 0  # number of losses in the running mean
    loss_mean: float = field(default=math.nan, metadata=_RESET_ON_RESTART)  # running mean of the loss
    loss_variance: float = 0.0  # running variance of the loss
    lowest_loss_mean: float = math.nan  # the lowest running mean so far
    below_bound: bool = False  # whether a loss was below the lower bound of the settings
    stagnation_tests: int = 0  # tests for stagnation made
    tested_loss_mean: float = math.nan  # running mean of the loss at the last test for stagnation
    # The averaged phase: changes of x by the caller.
    # That of the parameters after the last step; if theirs differs later, the caller has changed them.
    checksum: float = field(default=math.nan, metadata=_RESET_ON_RESTART)
    caller_changed: bool = False  # whether the last step found that the caller had changed x
    projection_countdown: int = 0  # remaining steps in which the caller is assumed to project x after each step
    # Vectors.
    offset: Vector | None = field(default=None, metadata=_RESET_ON_RESTART)  # z − x
    last_x: Vector | None = None  # x before the last step, while the caller is assumed to project it
    last_written_x: Vector | None = None  # x after the last step, while the caller is assumed to project it
    first_point: Vector | None = None  # the first point of the run, until the first averaged steps were made
    safe_point: Vector | None = None  # the point to which the run returns after a rise of the loss
    averaging_start: Vector | None = None  # x_0, the point at which averaging began
    direction_sum: Vector | None = None  # Σ λ_i p_i; its 1-norm is the denominator of the distance bound
    # For each entry, the steps made when it joined the average; None: all joined at 0.
    joined_at: Vector | None = field(default=None, metadata=_RESET_ON_RESTART)
