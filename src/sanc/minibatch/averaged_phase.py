"""The averaged phase of the iteration on samples: its steps, and the two points between which they are made.

* The step minimises gᵀs + (σ/3)‖s‖³_M in a metric M that is learnt from gradients (`sanc.minibatch.metrics`).
* σ is such that the step has the size η of `sanc.minibatch.step_size`.
* The parameters hold a running average of the iterates (`sanc.minibatch.averaging`).
* The run returns to an earlier point, with a smaller step size, if the loss has risen far (`sanc.minibatch.recovery`).

The phase holds the metric and what the host has not read yet. It receives the state, and returns the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.record import Branch, Record
from sanc.core.space import Space, Vector
from sanc.minibatch import batch_losses, joining, recovery, updates
from sanc.minibatch.averaging import (
    CHECKSUM_MODULUS,
    HostCopy,
    StepInputs,
    StepOutputs,
    StepResults,
    StepScalars,
    checksum,
    on_device,
    work_at_gradient,
)
from sanc.minibatch.metrics.base import check_direction, refresh_parts, require_finite_direction
from sanc.minibatch.recovery import IterationOutcome
from sanc.minibatch.running_metric import CreatePreconditioner, RunningMetric
from sanc.minibatch.settings import Minibatch
from sanc.minibatch.state import DistanceBound, MinibatchState

_PROJECTION_STEPS = 20
"""Steps after a change of x by the caller in which it is assumed to project x after each step."""


class _UnreadStep(NamedTuple):
    """A step whose results the host reads at the beginning of the next one, so that it need not wait for the device.

    Attributes
    ----------
    scalars : StepScalars
        The numbers that the host has chosen before the step.
    results : HostCopy
        The results, on their way to the host.
    record : Record
        The record with the fields that do not depend on the results.
    eps : float
        Machine epsilon of the vectors.
    """

    scalars: StepScalars[float]
    results: HostCopy
    record: Record
    eps: float


class _ReadStep(NamedTuple):
    """A step whose results the host has read.

    Attributes
    ----------
    scalars : StepScalars
        The numbers that the host has chosen before the step.
    results : StepResults
        The results.
    eps : float
        Machine epsilon of the vectors.
    """

    scalars: StepScalars[float]
    results: StepResults
    eps: float


class FinishedStep(NamedTuple):
    """A step whose results the host has read late.

    Attributes
    ----------
    state : MinibatchState
        The state with these results.
    record : Record
        The complete record.
    is_finite : bool
        Whether the results are finite. If not, the step has changed nothing.
    """

    state: MinibatchState
    record: Record
    is_finite: bool


class _Move(NamedTuple):
    """`StepOutputs` as vectors of the space.

    Attributes
    ----------
    results : Tensor
        `StepResults`, which the host has not read.
    point : vector
        The new x.
    offset : vector
        z − x.
    direction_sum : vector or None
        That of the distance bound, if the step updates it.
    gradient_point : vector or None
        y for the new x, if the parameters are there.
    """

    results: Tensor
    point: Vector
    offset: Vector
    direction_sum: Vector | None
    gradient_point: Vector | None

    @classmethod
    def from_outputs(cls, outputs: StepOutputs, space: Space) -> _Move:
        """Return the outputs of a step as vectors of the space."""
        direction_sum = None if outputs.direction_sum is None else space.vector(outputs.direction_sum)
        gradient_point = None if outputs.gradient_point is None else space.vector(outputs.gradient_point)
        x, offset = space.vector(outputs.x), space.vector(outputs.offset)
        return cls(outputs.results, x, offset, direction_sum, gradient_point)

    def with_direction_sum(self, distance: DistanceBound) -> DistanceBound:
        """Return the distance bound with the new Σ λ_i p_i, if there is one."""
        return distance if self.direction_sum is None else replace(distance, direction_sum=self.direction_sum)


class AveragedPhase:
    """Makes averaged steps.

    Parameters
    ----------
    method : Method
        Its `minibatch` is not None.
    create_preconditioner : callable
        Creates the preconditioner.

    Attributes
    ----------
    metric : RunningMetric
        The preconditioner that all gradients update.
    """

    def __init__(self, method: Method, create_preconditioner: CreatePreconditioner) -> None:
        self._settings, self._sigma_settings = cast("Minibatch", method.minibatch), method.sigma
        self.metric = RunningMetric(self._settings.metric, create_preconditioner)
        self._unread: _UnreadStep | None = None
        # The last point and the y that the step has computed for it; see `pop_gradient_point`.
        self._next_gradient_point: tuple[Vector, Vector] | None = None

    def iterate(
        self, state: MinibatchState, x: Vector, oracle: Oracle, rates: Sequence[float], second_order_sigma: float
    ) -> IterationOutcome:
        """Make an averaged step from x, or return to an earlier point if the loss has risen.

        `rates` are the factors of the step size. σ of the second-order phase does not change; it is recorded if the
        step has none.
        """
        outcome, state = None, _expecting_projections(state)
        if oracle.has_values and batch_losses.has_risen(state.losses):
            steps_raised_loss = recovery.steps_raised_loss(state.losses, x, oracle)
            # The running mean starts again in either case.
            state = replace(state, losses=replace(state.losses, loss_mean=math.nan))
            if steps_raised_loss:
                outcome = recovery.return_after_rise(state, x, oracle, self.gradient_point(state, x))
        if outcome is None and self.metric.preconditioner is None:
            state, outcome = self._set_up_preconditioner(state, x, oracle)
        if outcome is None:
            outcome = self._step(state, x, oracle, rates, second_order_sigma)
        oracle.count_paper_calls(1, 0)
        return outcome

    def _set_up_preconditioner(
        self, state: MinibatchState, x: Vector, oracle: Oracle
    ) -> tuple[MinibatchState, IterationOutcome | None]:
        """Create the preconditioner, restored from a saved state or initialised by a first gradient.

        In a resumed run a first gradient initialises the parts of parameters that have joined. Return the next state,
        and the outcome of the iteration if a gradient is not finite.
        """
        metric, space = self.metric, oracle.space
        preconditioner = metric.create(oracle.shapes, space.tensor(x))
        new = joining.new_parameters(state, oracle.shapes, space)
        if metric.saved and not any(new):
            preconditioner.restore(metric.saved)
        else:
            value, g = oracle.gradient(self.gradient_point(state, x))
            norm = oracle.norm(g)
            if not math.isfinite(norm + (value if oracle.has_values else 0.0)):
                return state, recovery.handle_nonfinite(state, x, oracle, value, norm)
            gradient_unit = state.gradient_unit if metric.saved else norm or 1.0
            direction = preconditioner.update(space.tensor(g) / gradient_unit, 1.0)
            check_direction(self._settings.metric, direction, space.tensor(g))
            refresh_parts(preconditioner, range(preconditioner.parts))
            if metric.saved:
                metric.restore_earlier(preconditioner, new)
                growth = joining.gradient_growth(state, g, norm, oracle)
                mean_square = state.norms.grad_norm_mean_square * growth
                state = replace(state, norms=replace(state.norms, grad_norm_mean_square=mean_square))
            else:
                state = self._at_first_gradient(state, x, gradient_unit, space)
        metric.begin(preconditioner)
        return state, None

    def _at_first_gradient(
        self, state: MinibatchState, x: Vector, gradient_unit: float, space: Space
    ) -> MinibatchState:
        """Return the state with the unit of gradients and, if the distance bound is used, its initial vectors."""
        distance = state.distance
        if self._settings.step_size.distance > 0.0:
            distance = replace(distance, averaging_start=x, direction_sum=space.zeros())
        return replace(state, gradient_unit=gradient_unit, distance=distance)

    # The step.

    def _step(
        self, state: MinibatchState, x: Vector, oracle: Oracle, rates: Sequence[float], second_order_sigma: float
    ) -> IterationOutcome:
        """Make the step; read its results now, or in the next iteration if the next point does not depend on them."""
        # An exception while this loss is evaluated leaves the metric as it is, which the gradient updates below.
        loss_at_first_point = recovery.due_loss_at_first_point(state, oracle)
        largest_rate = float(max(rates, default=1.0))
        if largest_rate > state.peak_lr:
            state = replace(state, peak_lr=largest_rate)
        scalars, inputs = self._prepare(state, x, oracle, rates)
        # While the caller projects x, gradients are taken at x itself.
        work = self.metric.step(oracle, self._averaging(state), is_projected=state.caller.projection_countdown > 0)
        move = _Move.from_outputs(work_at_gradient(oracle, work, inputs), oracle.space)
        if move.gradient_point is not None:
            self._next_gradient_point = move.point, move.gradient_point
        if self._can_read_later(state, oracle):
            return self._postpone_results(state, move, scalars, oracle)
        step = _ReadStep(scalars, StepResults(*move.results.tolist()), oracle.space.eps)
        state, outcome = self._outcome_if_rejected(state, x, oracle, step.results, loss_at_first_point)
        return self._accepted_outcome(state, x, oracle, move, step, second_order_sigma) if outcome is None else outcome

    def _prepare(
        self, state: MinibatchState, x: Vector, oracle: Oracle, rates: Sequence[float]
    ) -> tuple[StepScalars[float], StepInputs]:
        """Return the numbers of the next step, and the tensors that it reads."""
        space, x_tensor = oracle.space, oracle.space.tensor(x)
        rate, rate_factors = updates.step_size_factors(state, self._settings.step_size, rates, x_tensor, oracle)
        scalars = updates.step_scalars(state, self._settings, rate, has_values=oracle.has_values)
        offset, normals = updates.adapted_offset(state, x_tensor, space, oracle.shapes)
        with_distance = updates.updates_distance(state)
        averaging_start = state.distance.averaging_start if with_distance else None
        direction_sum = state.distance.direction_sum if with_distance else None
        inputs = StepInputs(
            x_tensor,
            offset,
            on_device(scalars, torch.float64, x_tensor.device),
            rates=rate_factors,
            averaging_start=None if averaging_start is None else space.tensor(averaging_start),
            direction_sum=None if direction_sum is None else space.tensor(direction_sum),
            entry_normals=None if normals is None else normals.entries,
            slice_normals=None if normals is None else normals.slices,
            average_weights=updates.average_weights(state, self._settings, scalars.average_weight, space),
            parameters=None if _are_at_average(state, oracle) else space.tensor(oracle.parameters),
        )
        return scalars, inputs

    def _can_read_later(self, state: MinibatchState, oracle: Oracle) -> bool:
        """Return whether the next point does not depend on the results of the step.

        It depends on them with losses, which may return the iteration to an earlier point, and in the first steps. It
        also does while the caller projects x, and with a metric whose directions may not be finite.
        """
        assert self.metric.preconditioner is not None
        is_projected = state.caller.projection_countdown > 0 or state.caller.last_written_x is not None
        is_early = state.steps <= batch_losses.RELIABLE_MEAN_STEPS
        needs_results = oracle.has_values or is_early or is_projected
        return self.metric.preconditioner.always_finite and not needs_results

    def _postpone_results(
        self, state: MinibatchState, move: _Move, scalars: StepScalars[float], oracle: Oracle
    ) -> IterationOutcome:
        """Update metric and vectors, and leave the results on the device until `finish_step`."""
        self.metric.refresh(state.steps + 1 - state.last_extension, oracle)
        record = Record(state.iteration, branch=Branch.AVERAGED)
        self._unread = _UnreadStep(scalars, HostCopy(move.results), record, oracle.space.eps)
        state = replace(state, offset=move.offset, distance=move.with_direction_sum(state.distance))
        return IterationOutcome(state, move.point, record)

    def _outcome_if_rejected(
        self, state: MinibatchState, x: Vector, oracle: Oracle, results: StepResults, loss_at_first_point: float | None
    ) -> tuple[MinibatchState, IterationOutcome | None]:
        """Reject the step if its gradient is not finite, or shows that the first ones were outliers.

        Return the next state, and the outcome of a rejected step; None: it is accepted.
        """
        if not math.isfinite(results.value + results.grad_norm):
            if self._next_gradient_point is not None:
                self._next_gradient_point = x, self._next_gradient_point[1]
            return state, recovery.handle_nonfinite(state, x, oracle, results.value, results.grad_norm)
        require_finite_direction(self._settings.metric, results.dual_norm_square)
        state, outcome = recovery.correct_first_steps(state, x, oracle, results, loss_at_first_point)
        if outcome is not None:
            self.metric.restore()  # the next gradient initialises it
        return state, outcome

    def _accepted_outcome(
        self, state: MinibatchState, x: Vector, oracle: Oracle, move: _Move, step: _ReadStep, second_order_sigma: float
    ) -> IterationOutcome:
        """Update the metric; return the new point, the next state and the record."""
        value = step.results.value if oracle.has_values else math.nan
        self.metric.refresh(state.steps + 1 - state.last_extension, oracle)
        were_at_average = _are_at_average(state, oracle)
        losses, distance = state.losses, move.with_direction_sum(state.distance)
        if oracle.has_values:
            losses = batch_losses.updated_losses(losses, x, value, self._settings.step_size.lower_bound)
        state = replace(state, offset=move.offset, losses=losses, distance=distance)
        state = _expecting_projections(updates.after_results(state, self._settings, step.scalars, step.results))
        if _are_at_average(state, oracle) is not were_at_average:  # the checksum belongs to another point
            state = state.without_checksum()
        if state.caller.projection_countdown:
            state = replace(state, caller=replace(state.caller, last_x=x, last_written_x=move.point))
        elif state.caller.last_written_x is not None:
            state = replace(state, caller=replace(state.caller, last_x=None, last_written_x=None))
        record = self._completed(Record(state.iteration, value=value), state, step, second_order_sigma)
        return IterationOutcome(state, move.point, record)

    def _completed(self, record: Record, state: MinibatchState, step: _ReadStep, second_order_sigma: float) -> Record:
        """Return the record with the results of a step, and with σ = 1/(η‖s‖_M), where ‖s‖_M = η√(gᵀM⁻¹g)."""
        scalars, results, eps = step
        eta = scalars.eta * results.step_factor
        dual_norm_square = max(results.dual_norm_square, 0.0) * state.gradient_unit  # gᵀM⁻¹g
        sigma = second_order_sigma
        if eta > 0.0 and dual_norm_square > 0.0:
            sigma = self._sigma_settings.rule(eps).bounded(1.0 / (eta * eta * math.sqrt(dual_norm_square)))
        return replace(
            record,
            branch=Branch.AVERAGED,
            sigma=sigma,
            grad_norm=results.grad_norm,
            step_norm=results.average_weight * math.sqrt(max(results.z_offset_norm_square, 0.0)),
            model_decrease=2.0 / 3.0 * eta * dual_norm_square,
            note="the gradient is an outlier and was clipped" if results.grad_norm > scalars.clip_norm else "",
        )

    # Results that are read later.

    def complete_unread_record(self, record: Record) -> None:
        """Set the record of a step whose results were not read, with the fields that the iteration adds."""
        if self._unread is not None:
            self._unread = self._unread._replace(record=record)

    def finish_step(self, state: MinibatchState, second_order_sigma: float) -> FinishedStep | None:
        """Read the results of the last step, if they were not read yet, and return the step; waits for the device.

        If they are not finite, the step has changed nothing, and the parameters stay where gradients are taken.
        """
        if self._unread is None:
            return None
        (scalars, copy, record, eps), self._unread = self._unread, None
        results = StepResults(*copy.read())
        if math.isfinite(results.grad_norm):
            record = self._completed(record, state, _ReadStep(scalars, results, eps), second_order_sigma)
            state = updates.after_results(state, self._settings, scalars, results)
            return FinishedStep(state, record, is_finite=True)
        caller = replace(state.caller, checksum=results.checksum % CHECKSUM_MODULUS, unsummed_checksum=0.0)
        state = replace(state, nonfinite_batches=state.nonfinite_batches + 1, caller=caller)
        note = "the gradient of the gradient sample is not finite"
        record = replace(record, branch=Branch.STAYED, grad_norm=results.grad_norm, note=note)
        return FinishedStep(state, record, is_finite=False)

    # Where gradients are taken.

    def gradient_point(self, state: MinibatchState, x: Vector) -> Vector:
        """Return y, the point at which gradients are taken, for an average x."""
        difference = self._gradient_offset(state)
        return x if difference is None else x + difference

    def pop_gradient_point(self, state: MinibatchState, x: Vector) -> Vector:
        """Return y for the point x after an iteration, and delete the y that its step has computed, if it has."""
        computed, self._next_gradient_point = self._next_gradient_point, None
        if computed is None or computed[0] is not x or not _points_differ(state):
            return self.gradient_point(state, x)
        return computed[1]

    def average(self, state: MinibatchState, y: Vector) -> Vector:
        """Return the average x for a point y at which gradients are taken."""
        difference = self._gradient_offset(state)
        return y if difference is None else y - difference

    def _gradient_offset(self, state: MinibatchState) -> Vector | None:
        """Return y − x; None if both are the same point."""
        if state.offset is None or not _points_differ(state):
            return None
        return state.offset * (1.0 - self._settings.average.averaging)

    def _averaging(self, state: MinibatchState) -> float:
        """Return β: 1 while the caller projects x, because other points than x may be infeasible."""
        return 1.0 if state.caller.projection_countdown else self._settings.average.averaging

    def discard_unread(self) -> None:
        """Discard the results of the last step, because another state is restored."""
        self._unread = None

    def discard_step(self) -> None:
        """Delete what a step has left that raised an exception."""
        self._unread = self._next_gradient_point = None


def after_move(state: MinibatchState, current: Tensor, target: Tensor, space: Space) -> MinibatchState:
    """Return the state after the parameters are moved to the other point of the phase.

    One rank alone may move its entries, so that nothing is exchanged.
    """
    change = float(checksum(target) - checksum(current))
    unsummed = (state.caller.unsummed_checksum + change) % CHECKSUM_MODULUS
    state = replace(state, caller=replace(state.caller, unsummed_checksum=unsummed))
    return state if space.sum_over_ranks is not None else with_total_checksum(state, space)


def with_total_checksum(state: MinibatchState, space: Space) -> MinibatchState:
    """Return the state with a checksum that has what moves have added on all ranks, which call this together."""
    caller, total = state.caller, state.caller.unsummed_checksum
    if space.sum_over_ranks is not None:
        total = float(space.sum_over_ranks(torch.tensor(total, dtype=torch.float64, device=space.device)))
    expected = (caller.checksum + total) % CHECKSUM_MODULUS
    return replace(state, caller=replace(caller, checksum=expected, unsummed_checksum=0.0))


def _expecting_projections(state: MinibatchState) -> MinibatchState:
    """Return the state; if the last step found a change of x by the caller, it expects more of them."""
    if not state.caller.caller_changed:
        return state
    return replace(state, caller=replace(state.caller, caller_changed=False, projection_countdown=_PROJECTION_STEPS))


def _points_differ(state: MinibatchState) -> bool:
    """Return whether gradients are taken at another point than the average."""
    return state.offset is not None and not state.caller.projection_countdown


def _are_at_average(state: MinibatchState, oracle: Oracle) -> bool:
    """Return whether the parameters are at the average: with closures, and while the caller projects them."""
    return oracle.parameters is None or state.caller.projection_countdown > 0
