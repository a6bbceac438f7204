"""The iteration on samples: a second-order phase, then an averaged phase.

While the next batch confirms the decrease of a step on its own batch, a batch represents the objective. Steps are then
those of `sanc.core.iteration`: cubic, with a ratio test and escapes along negative curvature. When batches disagree, ρ
is dominated by batch noise, and Hessian products are not worth their cost. In the averaged phase that follows

* the step minimises gᵀs + (σ/3)‖s‖³_M in a metric M that is learnt from gradients (`sanc.minibatch.metrics`);
* σ is such that the step has the size η of `sanc.minibatch.step_size`;
* the parameters hold a running average of the iterates (`sanc.minibatch.averaging`).

If the loss stagnates, a Krylov space is built. If it has negative curvature, one step along that is made, with a ratio
test. If the loss has risen far, the run returns to an earlier point with a smaller step size (`sanc.minibatch.watch`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sanc.core.iteration import Iteration
from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.point import LANCZOS_START, random_generator
from sanc.core.record import Branch, Record
from sanc.core.saved import numbers_of, vectors_of
from sanc.core.space import Space, Vector
from sanc.core.units import Units
from sanc.errors import NonFiniteStartError
from sanc.minibatch import joining, saving, step_size, updates, watch
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
from sanc.minibatch.metrics.base import (
    check_direction,
    check_saved,
    refresh_parts,
    require_finite_direction,
)
from sanc.minibatch.running_metric import CreatePreconditioner, RunningMetric, create_on_one_process
from sanc.minibatch.settings import Minibatch
from sanc.minibatch.state import MinibatchState

_FIRST_PROBE_STEP = 100
"""The averaged step whose mean loss is the first to compare with. Probes for negative curvature follow at steps 200,
400, 800, …"""
_FIRST_LOSS_OUTLIER_FACTOR = 100.0
"""The first batches may have been outliers if the first loss is this many times a later one: that at the end of the
second-order phase, or of one of the first averaged steps. The losses at both points are then compared on one batch."""
_OUTLIER_LOSS_FRACTION = 0.9
"""The first batches were outliers if the loss at the first point is lower than the present one by this share of it."""
_MIN_ESCAPE_FRACTION = 0.5
"""A step after stagnation is kept if this share of its predicted decrease is along negative curvature."""
_CONFIRMED_RISE_FRACTION = 0.5
"""Steps caused a rise of the loss if one batch shows this share of it."""
_ETA_REDUCTION_FACTOR = 0.5
"""Factor of η after a rise of the loss, or after batches that are not finite."""
_NO_PROJECTION = {"last_x": None, "last_written_x": None}
"""The vectors of a caller that does not project x."""
_PROJECTION_STEPS = 20
"""Steps after a change of x by the caller in which it is assumed to project x after each step."""


class _UnreadStep(NamedTuple):
    """A step whose results the host reads at the beginning of the next one, so that it need not wait for the device."""

    scalars: StepScalars[float]
    results: HostCopy
    record: Record  # with the fields that do not depend on the results
    eps: float  # unit roundoff of the vectors


class _Move(NamedTuple):
    """The vectors of a step, and the numbers that the host has not read."""

    numbers: Tensor  # `StepResults`
    point: Vector  # the new x
    vectors: dict[str, Vector]  # fields of the state
    gradient_point: Vector | None  # y for the new x, if the parameters are there

    @classmethod
    def from_outputs(cls, outputs: StepOutputs, space: Space) -> _Move:
        """Return the outputs of a step as vectors of the space."""
        vectors = {"offset": space.vector(outputs.offset)}
        if outputs.direction_sum is not None:
            vectors["direction_sum"] = space.vector(outputs.direction_sum)
        gradient_point = None if outputs.gradient_point is None else space.vector(outputs.gradient_point)
        return cls(outputs.numbers, space.vector(outputs.x), vectors, gradient_point)


def _is_lower_at_first_point(first_loss: float, value: float, *, is_normal: bool) -> bool:
    """Whether the loss at the first point is below the present one; far below it if the first loss was normal."""
    return first_loss < value - (_OUTLIER_LOSS_FRACTION * abs(value) if is_normal else 0.0)


class MinibatchIteration:
    """The iteration of an adaptive method on samples.

    Parameters
    ----------
    method : Method
        Its `minibatch` is not None.
    seed : int
        Seed of the random starts and signs.
    create_preconditioner : callable
        Creates the preconditioner of the averaged phase; by default for one process.

    Attributes
    ----------
    state : MinibatchState
        That of the last iteration. Results of an averaged step that the host has not read are missing until
        `finish_step`.
    has_returned : bool
        Whether the last iteration returned to an earlier point.
    rates : sequence of float
        Factors of the step size, one for each parameter; empty: all are 1.
    """

    stopping_test_holds = False  # with samples only limits end a run
    averages = True

    def __init__(
        self, method: Method, seed: int, create_preconditioner: CreatePreconditioner = create_on_one_process
    ) -> None:
        assert method.minibatch is not None
        self.method, self.settings = method, cast("Minibatch", method.minibatch)
        self.second_order = Iteration(method, seed, one_sample=True)
        self.state = MinibatchState(seed, averaged=not self.settings.curvature)
        self._unread: _UnreadStep | None = None
        self._late_record: Record | None = None  # see `read_record`
        self.has_returned = False
        self.rates: Sequence[float] = ()
        self._metric = RunningMetric(self.settings.metric, create_preconditioner)
        # The last point and the y that the step has computed for it, until the driver has written y.
        self._next_gradient_point: tuple[Vector, Vector] | None = None

    def __getstate__(self) -> dict[str, Any]:
        self.finish_step()
        return self.__dict__

    @property
    def units(self) -> Units:
        """No units: they belong to an exact objective."""
        return Units()

    @property
    def grad_norm(self) -> float:
        """‖g‖ in the last second-order step; 0 before the first."""
        return self.second_order.grad_norm

    def iterate(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]:
        """Make one iteration from `x`: return the next point, which is `x` itself if it stayed, and the record.

        `start` is not used: the iteration on samples chooses the start of Lanczos itself.
        """
        clock = time.perf_counter()
        self.finish_step()
        saved_state, saved_second_order = self.state, self.second_order.snapshot()
        saved_metric = self._metric.snapshot()
        self.has_returned, self._late_record = False, None
        try:
            point, record = self._step_of_phase(x, oracle)
        except BaseException:
            self.state, self._unread, self._next_gradient_point = saved_state, None, None
            self.second_order.roll_back(saved_second_order)
            self._metric.roll_back(saved_metric)
            raise
        seconds = saved_state.seconds + time.perf_counter() - clock
        self._update_state(iteration=saved_state.iteration + 1, seconds=seconds)
        record = replace(record, calls=oracle.meter.snapshot(), seconds=seconds, hvp=oracle.hvp)
        if self._unread is not None:
            self._unread = self._unread._replace(record=record)
        return point, record

    def read_record(self) -> Record | None:
        """Return the record of the last iteration if it was not complete when the iteration returned; else None."""
        self.finish_step()
        return self._late_record

    def _update_state(self, **changes: Any) -> MinibatchState:
        """Replace fields of the state; return the new state."""
        self.state = replace(self.state, **changes)
        return self.state

    def _step_of_phase(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record]:
        """Choose the phase from the losses of batches, make one step of it, and return its outcome."""
        state = self._update_state(averaged=True) if not oracle.has_values and not self.state.averaged else self.state
        oracle.begin(state.iteration, products=not state.averaged)
        if state.parameter_unit == 0.0:
            if oracle.has_values:
                value, g = oracle.gradient(x)
                if not math.isfinite(value + oracle.norm(g)):
                    return self._handle_nonfinite(x, oracle, value, oracle.norm(g))
            state = self._update_state(nonfinite_batches=0, **step_size.measure_weights(x, oracle))
        if not state.averaged:
            value, _ = oracle.gradient(x)
            continues, changes = watch.compare_batches(state, x, value, self.settings.noise, oracle.space.eps)
            self._update_state(**changes)
            return self._second_order_step(x, oracle) if continues else self._first_averaged_step(x, value, oracle)
        outcome = self._step_after_stagnation(x, oracle)
        return self._averaged_iteration(x, oracle) if outcome is None else outcome

    # ------------------------------------------------------------------ the second-order phase

    def _second_order_step(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]:
        """Make an iteration of the core with the batch as the objective, and return its point and record.

        Its decrease is saved in the state, for the comparison with the next batch.
        """
        state, second_order = self.state, self.second_order
        second_order.replace_numbers(iteration=state.iteration)
        try:
            point, record = second_order.iterate(x, oracle, start)
        except NonFiniteStartError:  # in the first iteration; the gradient is finite
            value, g = oracle.gradient(x)
            return self._handle_nonfinite(x, oracle, value, oracle.norm(g), "a Hessian product or a value")
        moved = point is not x
        self._update_state(
            last_loss=record.trial_value if moved else record.value,
            last_decrease=record.value - record.trial_value if moved else 0.0,
            last_step_was_long=record.step_norm
            > step_size.typical_step_norm(state, self.settings.step_size, oracle.space.dim),
        )
        return point, record

    def _first_averaged_step(self, x: Vector, value: float, oracle: Oracle) -> tuple[Vector, Record]:
        """End the second-order phase, and return the outcome of the first averaged iteration.

        It starts at x, or at the first point of the run if the second-order phase fitted other batches.
        """
        last_step_norm, dim = self.second_order.state.last_step_norm, oracle.space.dim
        reduction = step_size.first_reduction(self.state, self.settings.step_size, value, last_step_norm, dim)
        self._update_state(averaged=True, eta_reduction=reduction)
        start = self._start_of_averaging(x, value, oracle)
        point, record = self._averaged_iteration(start, oracle)
        if start is not x:
            note = "the second-order steps overfitted earlier batches: returned to the initial point"
            record = replace(record, note=record.note or note)
        return point, record

    def _start_of_averaging(self, x: Vector, value: float, oracle: Oracle) -> Vector:
        """Return the first point of the second-order phase, if this batch has a lower loss there; otherwise x.

        The loss has to be far lower if the phase had no outliers that show in its losses.
        """
        state = self.state
        if state.first_point is None:
            return x
        first_loss, is_normal = oracle.gradient_sample_value(state.first_point), self._has_normal_first_loss(value)
        is_lower = _is_lower_at_first_point(first_loss, value, is_normal=is_normal)
        return state.first_point if is_lower or (math.isfinite(first_loss) and not math.isfinite(value)) else x

    def _has_normal_first_loss(self, value: float) -> bool:
        """Whether the first loss is above the present one, but not as far as the loss of an outlier."""
        return value <= self.state.first_loss < _FIRST_LOSS_OUTLIER_FACTOR * value

    def _step_after_stagnation(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record] | None:
        """Return the outcome of a step along negative curvature if the loss stagnates; None: no step was made.

        The loss is tested at averaged steps 200, 400, 800, …; the first mean loss to compare with is taken at step 100.
        Lanczos starts at a random vector. The step has to pass the ratio test, and is accepted if more than half of its
        predicted decrease is along negative curvature.
        """
        state, saved_second_order = self.state, self.second_order.snapshot()
        can_probe = oracle.has_values and self.settings.curvature and self.method.escape.needs_products
        if not can_probe or state.steps < _FIRST_PROBE_STEP << state.stagnation_tests:
            return None
        stagnated = watch.has_stagnated(state)
        self._update_state(stagnation_tests=state.stagnation_tests + 1, tested_loss_mean=state.loss_mean)
        if not stagnated:
            return None
        start = oracle.space.normal(random_generator(state.seed, state.iteration, LANCZOS_START))
        point, record = self._second_order_step(x, oracle, start)
        if point is not x and record.curvature_share > _MIN_ESCAPE_FRACTION:
            self._update_state(offset=None, checksum=math.nan)
            return point, replace(record, note="the loss stagnated: a step along negative curvature")
        self.second_order.roll_back(saved_second_order)
        return None

    # ------------------------------------------------------------------ the averaged phase

    def _averaged_iteration(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record]:
        """Return the outcome of an averaged step, or an earlier point if the loss has risen."""
        self._expect_projections()
        outcome = self._return_if_risen(x, oracle)
        if outcome is None and self._metric.preconditioner is None:
            outcome = self._set_up_preconditioner(x, oracle)
        if outcome is None:
            outcome = self._averaged_step(x, oracle)
        oracle.count_paper_calls(1, 0)
        return outcome

    def _return_if_risen(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record] | None:
        """Return an earlier point if the loss has risen and one batch shows that the steps caused it; else None."""
        state = self.state
        if not oracle.has_values or not watch.has_risen(state):
            return None
        rise, safe_point = state.loss_mean - state.lowest_loss_mean, state.safe_point
        self._update_state(loss_mean=math.nan)  # restart the running mean in either case
        if safe_point is None or safe_point is x:
            return None
        rise_on_batch = oracle.gradient_sample_value(x) - oracle.gradient_sample_value(safe_point)
        if rise_on_batch < _CONFIRMED_RISE_FRACTION * rise:
            return None
        value, g = oracle.gradient(self.gradient_point(x))
        self._reduce_eta()
        record = Record(state.iteration, value=value, grad_norm=oracle.norm(g), trials=2, note="the loss rose")
        return self._return_to_safe_point(x, oracle, record)

    def _set_up_preconditioner(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record] | None:
        """Create the preconditioner, restored from a saved state or initialised by a first gradient.

        In a resumed run a first gradient initialises the parts of parameters that have joined. If a gradient is not
        finite, return the point and the record of this iteration; otherwise None.
        """
        metric, space = self._metric, oracle.space
        preconditioner = metric.create(oracle.shapes, space.tensor(x))
        new = joining.new_parameters(self.state, oracle.shapes, space)
        if metric.saved and not any(new):
            preconditioner.restore(metric.saved)
        else:
            value, g = oracle.gradient(self.gradient_point(x))
            norm = oracle.norm(g)
            if not math.isfinite(norm + (value if oracle.has_values else 0.0)):
                return self._handle_nonfinite(x, oracle, value, norm)
            unit = self.state.gradient_unit if metric.saved else norm or 1.0
            check_direction(self.settings.metric, preconditioner.update(space.tensor(g) / unit, 1.0), space.tensor(g))
            refresh_parts(preconditioner, range(preconditioner.parts))
            if metric.saved:
                metric.restore_earlier(preconditioner, new)
                growth = joining.gradient_growth(self.state, g, norm, oracle)
                self._update_state(grad_norm_mean_square=self.state.grad_norm_mean_square * growth)
            else:
                self._begin_average(x, unit, space)
        metric.begin(preconditioner)
        return None

    def _begin_average(self, x: Vector, gradient_unit: float, space: Space) -> None:
        """Set the unit of gradients and, if the distance bound is used, its vectors."""
        uses_distance = self.settings.step_size.distance > 0.0
        vectors = {"averaging_start": x, "direction_sum": space.zeros()} if uses_distance else {}
        self._update_state(gradient_unit=gradient_unit, **vectors)

    def _averaged_step(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record]:
        """Make the step; read its results now, or in the next iteration if the next point does not depend on them."""
        # An exception while this loss is evaluated leaves the metric as it is, which the gradient updates below.
        first_loss = self._due_loss_at_first_point(oracle)
        scalars, inputs = self._prepare_step(x, oracle)
        # While the caller projects x, gradients are taken at x itself.
        work = self._metric.step(oracle, self._averaging, is_projected=self.state.projection_countdown > 0)
        moved = _Move.from_outputs(work_at_gradient(oracle, work, inputs), oracle.space)
        if moved.gradient_point is not None:
            self._next_gradient_point = moved.point, moved.gradient_point
        if self._can_read_later(oracle):
            return self._postpone_results(moved, scalars, oracle.space.eps)
        results = StepResults(*moved.numbers.tolist())
        outcome = self._discard_step(x, oracle, results, first_loss)
        return self._keep_step(x, oracle, moved, scalars, results) if outcome is None else outcome

    def _prepare_step(self, x: Vector, oracle: Oracle) -> tuple[StepScalars[float], StepInputs]:
        """Return the numbers of the next step, and the tensors that it reads."""
        space, x_tensor = oracle.space, oracle.space.tensor(x)
        largest_rate = float(max(self.rates, default=1.0))
        state = self._update_state(peak_lr=largest_rate) if largest_rate > self.state.peak_lr else self.state
        rate, rates = updates.step_size_factors(state, self.settings.step_size, self.rates, x_tensor, oracle)
        scalars = updates.step_scalars(state, self.settings, rate, has_values=oracle.has_values)
        offset, normals = updates.adapted_offset(state, x_tensor, space, oracle.shapes)
        with_distance = updates.updates_distance(state)
        averaging_start = state.averaging_start if with_distance else None
        direction_sum = state.direction_sum if with_distance else None
        inputs = StepInputs(
            x_tensor,
            offset,
            on_device(scalars, torch.float64, x_tensor.device),
            rates=rates,
            averaging_start=None if averaging_start is None else space.tensor(averaging_start),
            direction_sum=None if direction_sum is None else space.tensor(direction_sum),
            entry_normals=None if normals is None else normals.entries,
            slice_normals=None if normals is None else normals.slices,
            average_weights=updates.average_weights(state, self.settings, scalars.average_weight, space),
            parameters=None if self._are_at_x(oracle) else space.tensor(oracle.parameters),
        )
        return scalars, inputs

    def _postpone_results(self, moved: _Move, scalars: StepScalars[float], eps: float) -> tuple[Vector, Record]:
        """Update metric and vectors, and leave the results on the device until `finish_step`."""
        self._metric.refresh(self.state.steps + 1 - self.state.last_extension)
        self._update_state(**moved.vectors)
        record = Record(self.state.iteration, branch=Branch.AVERAGED)
        self._unread = _UnreadStep(scalars, HostCopy(moved.numbers), record, eps)
        return moved.point, record

    def _discard_step(
        self, x: Vector, oracle: Oracle, results: StepResults, first_loss: float | None
    ) -> tuple[Vector, Record] | None:
        """Stay or return to an earlier point if the gradient is not finite or shows that the first ones were outliers.

        None: the step is kept.
        """
        if not math.isfinite(results.value + results.grad_norm):
            if self._next_gradient_point is not None:
                self._next_gradient_point = x, self._next_gradient_point[1]
            return self._handle_nonfinite(x, oracle, results.value, results.grad_norm)
        require_finite_direction(self.settings.metric, results.dual_norm_square)
        outcome = self._return_if_first_batches_were_outliers(x, oracle, results, first_loss)
        if outcome is None and updates.began_with_outliers(self.state, results.grad_norm):
            value = results.value if oracle.has_values else math.nan
            return self._restart_averaging(x, value, results.grad_norm)
        return outcome

    def _keep_step(
        self, x: Vector, oracle: Oracle, moved: _Move, scalars: StepScalars[float], results: StepResults
    ) -> tuple[Vector, Record]:
        """Update metric and state; return the new point and the record."""
        state, has_values = self.state, oracle.has_values
        self._metric.refresh(state.steps + 1 - state.last_extension)
        bound = self.settings.step_size.lower_bound
        losses = updates.changes_by_loss(state, x, results.value, bound) if has_values else {}
        were_at_x = self._are_at_x(oracle)
        by_results = updates.changes_by_results(state, self.settings, scalars, results)
        self._update_state(**(losses | moved.vectors | by_results))
        self._expect_projections()
        if self._are_at_x(oracle) is not were_at_x:  # the checksum belongs to another point
            self._update_state(checksum=math.nan)
        if self.state.projection_countdown or self.state.last_written_x is not None:
            last = {"last_x": x, "last_written_x": moved.point} if self.state.projection_countdown else _NO_PROJECTION
            self._update_state(**last)
        record = Record(state.iteration, value=results.value if has_values else math.nan)
        return moved.point, self._averaged_record(record, scalars, results, oracle.space.eps)

    def _are_at_x(self, oracle: Oracle) -> bool:
        """Whether the parameters are at the average: with closures, and while the caller projects them."""
        return oracle.parameters is None or self.state.projection_countdown > 0

    def _can_read_later(self, oracle: Oracle) -> bool:
        """Whether the next point does not depend on the results of the step.

        It depends on them with losses, which may return the iteration to an earlier point, and in the first steps. It
        also does while the caller projects x, and with a metric whose directions may not be finite.
        """
        assert self._metric.preconditioner is not None
        is_projected = self.state.projection_countdown > 0 or self.state.last_written_x is not None
        is_early = self.state.steps <= watch.RELIABLE_MEAN_STEPS
        needs_results = oracle.has_values or is_early or is_projected
        return self._metric.preconditioner.always_finite and not needs_results

    def finish_step(self) -> None:
        """Update the state by the results of the last step, if they were not read yet; waits for the device.

        If they are not finite, the step has changed nothing, and the parameters stay where gradients are taken.
        """
        if self._unread is None:
            return
        (scalars, copy, record, eps), self._unread = self._unread, None
        results = StepResults(*copy.read())
        if math.isfinite(results.grad_norm):
            self._late_record = self._averaged_record(record, scalars, results, eps)
            self._update_state(**updates.changes_by_results(self.state, self.settings, scalars, results))
            return
        self._update_state(checksum=results.checksum % CHECKSUM_MODULUS)
        note = "the gradient of the gradient sample is not finite"
        self._late_record = replace(record, branch=Branch.STAYED, grad_norm=results.grad_norm, note=note)
        if self._count_nonfinite(note, math.nan, results.grad_norm):
            self._reduce_eta()

    def _expect_projections(self) -> None:
        """If the last step found a change of x by the caller, expect more of them in the next steps."""
        if self.state.caller_changed:
            self._update_state(caller_changed=False, projection_countdown=_PROJECTION_STEPS)

    def _averaged_record(self, record: Record, scalars: StepScalars[float], results: StepResults, eps: float) -> Record:
        """Return the record with the results of an averaged step."""
        eta = scalars.eta * results.step_factor
        dual_norm_square = max(results.dual_norm_square, 0.0) * self.state.gradient_unit
        return replace(
            record,
            branch=Branch.AVERAGED,
            sigma=self._sigma(eta, dual_norm_square, eps),
            grad_norm=results.grad_norm,
            step_norm=results.average_weight * math.sqrt(max(results.z_offset_norm_square, 0.0)),
            model_decrease=2.0 / 3.0 * eta * dual_norm_square,
            note="the gradient is an outlier and was clipped" if results.grad_norm > scalars.clip_norm else "",
        )

    def _due_loss_at_first_point(self, oracle: Oracle) -> float | None:
        """Return the loss at the first point on this batch at averaged steps 0, 1, 2, 4, 8 and 16; otherwise None."""
        state = self.state
        is_due = oracle.has_values and state.steps & (state.steps - 1) == 0
        return oracle.gradient_sample_value(state.first_point) if is_due and state.first_point is not None else None

    def _return_if_first_batches_were_outliers(
        self, x: Vector, oracle: Oracle, results: StepResults, first_loss: float | None
    ) -> tuple[Vector, Record] | None:
        """Return the first point of the run if its loss on this batch is far lower; otherwise None.

        Such a loss shows that the second-order phase fitted outliers. The losses are compared where the one at the
        first point is due (`first_loss`). If the first loss was an outlier, they are compared once, at any step, and
        the loss at the first point need only be lower.
        """
        state, value, first_point = self.state, results.value, self.state.first_point
        is_normal = state.first_loss < _FIRST_LOSS_OUTLIER_FACTOR * value
        if first_point is None or not oracle.has_values or (is_normal and first_loss is None):
            return None
        if not is_normal:
            self._update_state(first_point=None)
        if first_loss is None:
            first_loss = oracle.gradient_sample_value(first_point)
        if not _is_lower_at_first_point(first_loss, value, is_normal=is_normal):
            return None
        self._update_state(first_point=None)
        _, record = self._restart_averaging(x, value, results.grad_norm)
        self.has_returned = True
        note = "the first batches were outliers: returned to the initial point"
        return first_point, replace(record, step_norm=oracle.space.norm(first_point - x), trials=1, note=note)

    def _restart_averaging(self, x: Vector, value: float, grad_norm: float) -> tuple[Vector, Record]:
        """Reset metric and average after an outlier, and return x; the next gradient initialises them."""
        self._update_state(**updates.changes_by_restart())
        self._metric.restore()
        note = "the first gradients were outliers: averaging starts again"
        return x, Record(self.state.iteration, value=value, grad_norm=grad_norm, note=note)

    @property
    def _averaging(self) -> float:
        """β: 1 while the caller projects x, because other points than x may be infeasible."""
        return 1.0 if self.state.projection_countdown else self.settings.average.averaging

    def _sigma(self, eta: float, dual_norm_square: float, eps: float) -> float:
        """Return σ = 1/(η‖s‖_M) for the record, where ‖s‖_M = η√(gᵀM⁻¹g) and gᵀM⁻¹g is the square of the dual norm.

        The σ of second-order steps does not change.
        """
        if eta > 0.0 and dual_norm_square > 0.0:
            return self.method.sigma.rule(eps).bounded(1.0 / (eta * eta * math.sqrt(dual_norm_square)))
        return self.second_order.state.sigma

    # ------------------------------------------------------------------ returning to an earlier point

    def _handle_nonfinite(
        self, x: Vector, oracle: Oracle, value: float, grad_norm: float, quantity: str = ""
    ) -> tuple[Vector, Record]:
        """Return x if only this batch is not finite; an earlier point if the last one was not finite either.

        `quantity` is what is not finite; by default it follows from the value.
        """
        value = value if oracle.has_values else math.nan
        is_gradient = math.isfinite(value) or not oracle.has_values
        quantity = quantity or f"the {'gradient' if is_gradient else 'loss'} of the gradient sample"
        note = f"{quantity} is not finite"
        is_repeated, state = self._count_nonfinite(note, value, grad_norm), self._update_state(checksum=math.nan)
        record = Record(state.iteration, value=value, grad_norm=grad_norm, note=note)
        if not is_repeated or state.nonfinite_batches > state.iteration:  # in the latter case no step was made
            return x, record
        if state.safe_point is not None and oracle.has_values:
            record = replace(record, trials=1)
            if not math.isfinite(oracle.gradient_sample_value(state.safe_point)):  # the batch is the cause
                return x, record
        self._reduce_eta()
        return self._return_to_safe_point(x, oracle, record)

    def _count_nonfinite(self, note: str, value: float, grad_norm: float) -> bool:
        """Count a batch that is not finite, and return whether the one before was not finite either."""
        state = self._update_state(nonfinite_batches=self.state.nonfinite_batches + 1)
        watch.report_nonfinite(state, note, value, grad_norm)
        return state.nonfinite_batches > 1

    def _reduce_eta(self) -> None:
        """Halve η; it grows back when the last steps are aligned."""
        self._update_state(eta_reduction=_ETA_REDUCTION_FACTOR * self.state.eta_reduction)

    def _return_to_safe_point(self, x: Vector, oracle: Oracle, record: Record) -> tuple[Vector, Record]:
        """Return the last safe point, without an update of the metric; x if there is none."""
        state = self._update_state(offset=None, checksum=math.nan)
        if state.safe_point is None or state.safe_point is x:
            return x, record
        self.has_returned = True
        note = f"{record.note}: back to the last safe point"
        return state.safe_point, replace(record, step_norm=oracle.space.norm(state.safe_point - x), note=note)

    # ------------------------------------------------------------------ where gradients are taken

    def gradient_point(self, x: Vector) -> Vector:
        """Return y, the point at which gradients are taken, for an average x."""
        known, self._next_gradient_point = self._next_gradient_point, None
        difference = self._gradient_offset
        if difference is None:
            return x
        return known[1] if known is not None and known[0] is x else x + difference

    def on_move(self, current: Tensor, target: Tensor, space: Space) -> None:
        """Compare the parameters with those of the last step, and expect other values from now on."""
        self.finish_step()
        before, after = (float(self._checksum(v, space)) % CHECKSUM_MODULUS for v in (current, target))
        has_changed = not math.isnan(self.state.checksum) and before != self.state.checksum
        self._update_state(checksum=after, caller_changed=self.state.caller_changed or has_changed)

    def _checksum(self, v: Tensor, space: Space) -> Tensor:
        return checksum(v) if space.sum_over_ranks is None else space.sum_over_ranks(checksum(v))

    def average(self, y: Vector) -> Vector:
        """Return the average x for a point y at which gradients are taken."""
        difference = self._gradient_offset
        return y if difference is None else y - difference

    @property
    def _gradient_offset(self) -> Vector | None:
        """Return y − x; None if both are the same point."""
        if self.state.offset is None or self.state.projection_countdown:
            return None
        return self.state.offset * (1.0 - self.settings.average.averaging)

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        self.finish_step()
        return numbers_of(self.state) | {"second_order": self.second_order.numbers()}

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state, and of the state of second-order steps."""
        self.finish_step()
        return vectors_of(self.state) | saving.prefixed(self.second_order.vectors())

    def tensors(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the tensors of the preconditioner, by parameter; none before the first averaged step."""
        return self._metric.tensors()

    def check(
        self,
        where: str,
        numbers: Any,
        vectors: Collection[str],
        shapes: Sequence[tuple[int, ...]] | None = None,
        tensors: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        """Raise an error unless the arguments are what `numbers()`, `vectors()` (their names) and `tensors()` return.

        `shapes` are the shapes of the parameters; without them the metric is not checked.
        """
        second_order, others = saving.split(dict.fromkeys(vectors))
        saving.check_state(where, numbers, others, has_metric=any(tensors))
        self.second_order.check(f"{where}['second_order']", numbers["second_order"], second_order)
        if shapes is not None:
            check_saved(f"{where}, the metric", self.settings.metric, shapes, tensors if any(tensors) else ())

    def restore(
        self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], tensors: Sequence[Mapping[str, Tensor]] = ()
    ) -> None:
        """Continue from what `numbers`, `vectors` and `tensors` returned."""
        state_numbers = {name: number for name, number in numbers.items() if name != "second_order"}
        second_order, others = saving.split(vectors)
        self.state, self._unread, self._late_record = MinibatchState(**state_numbers, **others), None, None
        self.second_order.restore(numbers["second_order"], second_order)
        self._metric.restore(tensors)

    def set_tolerance(self, tol: float) -> None:
        """Set the tolerance on ‖g‖ of second-order steps."""
        self.second_order.set_tolerance(tol)

    def replace_numbers(self, **changes: Any) -> None:
        """Replace numbers of the state of second-order steps."""
        self.second_order.replace_numbers(**changes)

    def snapshot(self) -> Any:
        """Return everything that an iteration changes and the next one does not set again.

        The values in the tensors of the preconditioner are not part of it.
        """
        self.finish_step()
        return self.state, self.second_order.snapshot(), self._metric.snapshot()

    def roll_back(self, snapshot: Any) -> None:
        """Restore a snapshot."""
        self._unread = None
        self.state, second_order, metric = snapshot
        self.second_order.roll_back(second_order)
        self._metric.roll_back(metric)

    def rearrange(
        self,
        earlier_indices: Sequence[int | None],
        vector_map: joining.VectorMap,
        x: Tensor,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        """Continue with other parameters, of these shapes and with the values x.

        `earlier_indices` has for each of them its index among the earlier parameters, or None if it was not one of
        them.
        """
        self.finish_step()
        saved = list(self._metric.tensors()) if self.state.steps else []
        joins = bool(saved) and None in earlier_indices
        self._update_state(**joining.rearranged_vectors(self.state, vector_map, x, joins=joins), checksum=math.nan)
        self._metric.rearrange(saved, earlier_indices, shapes, x)
        self.second_order.reset()

    def reset(self) -> None:
        """Reset everything but the counts, for vectors of another dimension."""
        self.finish_step()
        state = self.state
        self.state = MinibatchState(state.seed, state.iteration, state.seconds, state.averaged)
        self.second_order.reset()
        self._metric.restore()
