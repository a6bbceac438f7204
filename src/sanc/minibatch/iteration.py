"""The iteration on samples: a second-order phase, then an averaged phase.

While the next batch confirms the decrease of a step on its own batch, a batch represents the objective. Steps are then
those of `sanc.core.iteration`: cubic, with a ratio test and escapes along negative curvature. When batches disagree, ρ
is dominated by batch noise, and Hessian products are not worth their cost. Then the averaged phase begins
(`sanc.minibatch.averaged_phase`).

If the loss stagnates, a Krylov space is built. If it has negative curvature, one step along that is made, with a ratio
test.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from sanc.core.iteration import Iteration
from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.point import LANCZOS_START, random_generator
from sanc.core.record import Record
from sanc.core.space import Space, Vector
from sanc.core.units import Units
from sanc.errors import NonFiniteStartError
from sanc.minibatch import batch_losses, joining, recovery, saved_states, step_size
from sanc.minibatch.averaged_phase import AveragedPhase, after_move, with_total_checksum
from sanc.minibatch.metrics.base import check_saved
from sanc.minibatch.recovery import IterationOutcome
from sanc.minibatch.running_metric import CreatePreconditioner, create_on_one_process
from sanc.minibatch.settings import Minibatch
from sanc.minibatch.state import MinibatchState

_FIRST_PROBE_STEP = 100
"""The averaged step at which the mean loss is first saved. Tests for stagnation compare with it at steps 200, 400, 800,
…; a probe for negative curvature follows if the loss has stagnated."""
_MIN_ESCAPE_FRACTION = 0.5
"""A step after stagnation is kept if more than this fraction of its predicted decrease is along negative curvature."""


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
    settings : Minibatch
        The `minibatch` of the method.
    second_order : Iteration
        Makes the second-order steps.
    state : MinibatchState
        The state after the last iteration. Results of an averaged step that the host has not read are missing until
        `finish_step`.
    has_returned : bool
        Whether the last iteration returned to an earlier point.
    averaged_phase : AveragedPhase
        Makes the averaged steps, and holds their metric.
    """

    stopping_test_holds = False  # with samples only limits end a run
    averages = True

    def __init__(
        self, method: Method, seed: int, create_preconditioner: CreatePreconditioner = create_on_one_process
    ) -> None:
        assert method.minibatch is not None
        self.method, self.settings = method, cast("Minibatch", method.minibatch)
        self.second_order = Iteration(method, seed, one_sample=True)
        self.averaged_phase = AveragedPhase(method, create_preconditioner)
        self.state = MinibatchState(seed, averaged=not self.settings.curvature)
        self._late_record: Record | None = None  # see `read_record`
        self.has_returned = False

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

    def iterate(
        self, x: Vector, oracle: Oracle, lanczos_start: Vector | None = None, rates: Sequence[float] = ()
    ) -> tuple[Vector, Record]:
        """Make one iteration from `x`: return the next point, which is `x` itself if it stayed, and the record.

        `rates` are the factors of the step size, one for each parameter; empty: all are 1. `lanczos_start` is not used:
        the iteration on samples chooses the start vector of Lanczos itself.
        """
        clock = time.perf_counter()
        self.finish_step()
        saved_state, saved_second_order = self.state, self.second_order.snapshot()
        saved_metric = self.averaged_phase.metric.snapshot()
        self.has_returned, self._late_record = False, None
        try:
            point, record = self._step_of_phase(x, oracle, rates)
        except BaseException:
            self.state = saved_state
            self.second_order.roll_back(saved_second_order)
            self.averaged_phase.discard_step()
            self.averaged_phase.metric.roll_back(saved_metric)
            raise
        seconds = saved_state.seconds + time.perf_counter() - clock
        self.state = replace(self.state, iteration=saved_state.iteration + 1, seconds=seconds)
        record = replace(record, calls=oracle.meter.snapshot(), seconds=seconds, hvp=oracle.hvp)
        self.averaged_phase.complete_unread_record(record)
        return point, record

    def read_record(self) -> Record | None:
        """Return the record of the last iteration if it was not complete when the iteration returned; else None."""
        self.finish_step()
        return self._late_record

    def _adopt(self, outcome: IterationOutcome) -> tuple[Vector, Record]:
        """Set the state of an outcome; return its point and record."""
        self.state, self.has_returned = outcome.state, outcome.has_returned
        return outcome.point, outcome.record

    def _step_of_phase(self, x: Vector, oracle: Oracle, rates: Sequence[float]) -> tuple[Vector, Record]:
        """Choose the phase from the losses of batches, make one step of it, and return its point and record."""
        state = self.state
        if not oracle.has_values and not state.averaged:
            state = self.state = replace(state, averaged=True)
        oracle.begin(state.iteration, products=not state.averaged)
        if state.parameter_unit == 0.0:
            if oracle.has_values:
                value, g = oracle.gradient(x)
                if not math.isfinite(value + oracle.norm(g)):
                    return self._adopt(recovery.handle_nonfinite(state, x, oracle, value, oracle.norm(g)))
            state = self.state = replace(step_size.measure_parameter_unit(state, x, oracle), nonfinite_batches=0)
        if not state.averaged:
            value, _ = oracle.gradient(x)
            noise, eps = self.settings.noise, oracle.space.eps
            continues, comparison = batch_losses.compare_batches(state.comparison, x, value, noise, eps)
            self.state = replace(state, comparison=comparison)
            if continues:
                return self._second_order_step(x, oracle)
            return self._first_averaged_step(x, value, oracle, rates)
        after_stagnation = self._step_after_stagnation(x, oracle)
        return self._averaged_iteration(x, oracle, rates) if after_stagnation is None else after_stagnation

    def _averaged_iteration(self, x: Vector, oracle: Oracle, rates: Sequence[float]) -> tuple[Vector, Record]:
        """Make an iteration of the averaged phase, and return its point and record."""
        sigma = self.second_order.state.sigma
        return self._adopt(self.averaged_phase.iterate(self.state, x, oracle, rates, sigma))

    # ------------------------------------------------------------------ the second-order phase

    def _second_order_step(
        self, x: Vector, oracle: Oracle, lanczos_start: Vector | None = None
    ) -> tuple[Vector, Record]:
        """Make an iteration of the core with the batch as the objective, and return its point and record.

        Its decrease is saved in the state, for the comparison with the next batch.
        """
        state, second_order = self.state, self.second_order
        second_order.replace_numbers(iteration=state.iteration)
        try:
            point, record = second_order.iterate(x, oracle, lanczos_start)
        except NonFiniteStartError:  # in the first iteration; the gradient is finite
            value, g = oracle.gradient(x)
            quantity = "a Hessian product or a value"
            return self._adopt(recovery.handle_nonfinite(state, x, oracle, value, oracle.norm(g), quantity))
        moved = point is not x
        long_step_norm = step_size.typical_step_norm(state, self.settings.step_size, oracle.space.dim)
        comparison = replace(
            state.comparison,
            last_loss=record.trial_value if moved else record.value,
            last_decrease=record.value - record.trial_value if moved else 0.0,
            last_step_was_long=record.step_norm > long_step_norm,
        )
        self.state = replace(state, comparison=comparison)
        return point, record

    def _first_averaged_step(
        self, x: Vector, value: float, oracle: Oracle, rates: Sequence[float]
    ) -> tuple[Vector, Record]:
        """End the second-order phase, make the first averaged iteration, and return its point and record.

        It starts at x, or at the first point of the run if the second-order phase fitted other batches.
        """
        last_step_norm, dim = self.second_order.state.last_step_norm, oracle.space.dim
        reduction = step_size.first_reduction(self.state, self.settings.step_size, value, last_step_norm, dim)
        self.state = replace(self.state, averaged=True, eta_reduction=reduction)
        first_averaged_point = recovery.first_averaged_point(self.state.comparison, x, value, oracle)
        point, record = self._averaged_iteration(first_averaged_point, oracle, rates)
        if first_averaged_point is not x:
            note = "the second-order steps overfitted earlier batches: returned to the initial point"
            record = replace(record, note=record.note or note)
        return point, record

    def _step_after_stagnation(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record] | None:
        """Make a step along negative curvature if the loss stagnates, and return its point and record.

        Return None if no step was made. `_FIRST_PROBE_STEP` has the steps at which stagnation is tested. Lanczos starts
        at a random vector. The step has to pass the ratio test, and more than `_MIN_ESCAPE_FRACTION` of its predicted
        decrease has to be along negative curvature; otherwise the state before it is restored.
        """
        state, saved_second_order = self.state, self.second_order.snapshot()
        can_probe = oracle.has_values and self.settings.curvature and self.method.escape.needs_products
        if not can_probe or state.steps < _FIRST_PROBE_STEP << state.losses.stagnation_tests:
            return None
        self.state = replace(state, losses=batch_losses.after_stagnation_test(state.losses))
        if not batch_losses.has_stagnated(state.losses):
            return None
        lanczos_start = oracle.space.normal(random_generator(state.seed, state.iteration, LANCZOS_START))
        point, record = self._second_order_step(x, oracle, lanczos_start)
        if point is not x and record.curvature_share > _MIN_ESCAPE_FRACTION:
            self.state = replace(self.state.without_checksum(), offset=None)
            return point, replace(record, note="the loss stagnated: a step along negative curvature")
        self.second_order.roll_back(saved_second_order)
        return None

    # ------------------------------------------------------------------ between iterations

    def finish_step(self) -> None:
        """Update the state by the results of the last step, if they were not read yet; waits for the device."""
        finished = self.averaged_phase.finish_step(self.state, self.second_order.state.sigma)
        if finished is None:
            return
        self.state, self._late_record = finished.state, finished.record
        if not finished.is_finite:
            batch_losses.report_nonfinite(self.state, finished.record.note, math.nan, finished.record.grad_norm)
            if self.state.nonfinite_batches > 1:
                self.state = recovery.with_reduced_eta(self.state)

    def gradient_point(self, x: Vector) -> Vector:
        """Return y, the point at which gradients are taken, for an average x."""
        return self.averaged_phase.gradient_point(self.state, x)

    def pop_gradient_point(self, x: Vector) -> Vector:
        """Return `gradient_point(x)` for the point x of the last iteration, and delete the one that its step saved."""
        return self.averaged_phase.pop_gradient_point(self.state, x)

    def average(self, y: Vector) -> Vector:
        """Return the average x for a point y at which gradients are taken."""
        return self.averaged_phase.average(self.state, y)

    def on_move(self, current: Tensor, target: Tensor, space: Space) -> None:
        """Expect other values of the parameters than those of the last step from now on."""
        self.finish_step()
        self.state = after_move(self.state, current, target, space)

    def before_saving(self, space: Space) -> None:
        """Sum over the ranks what only this one knows; the space is that of the parameters."""
        self.finish_step()
        self.state = with_total_checksum(self.state, space)

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        self.finish_step()
        return saved_states.saved_numbers(self.state) | {"second_order": self.second_order.numbers()}

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state, and of the state of second-order steps."""
        self.finish_step()
        return saved_states.saved_vectors(self.state) | saved_states.prefixed(self.second_order.vectors())

    def tensors(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the tensors of the preconditioner, by parameter; none before the first averaged step."""
        return self.averaged_phase.metric.tensors()

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
        second_order, others = saved_states.split(dict.fromkeys(vectors))
        saved_states.check_state(where, numbers, others, has_metric=any(tensors))
        self.second_order.check(f"{where}['second_order']", numbers["second_order"], second_order)
        if shapes is not None:
            check_saved(f"{where}, the metric", self.settings.metric, shapes, tensors if any(tensors) else ())

    def restore(
        self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], tensors: Sequence[Mapping[str, Tensor]] = ()
    ) -> None:
        """Continue from what `numbers`, `vectors` and `tensors` returned."""
        state_numbers = {name: number for name, number in numbers.items() if name != "second_order"}
        second_order, others = saved_states.split(vectors)
        self.averaged_phase.discard_unread()
        self.state, self._late_record = MinibatchState(**saved_states.fields_from(state_numbers | others)), None
        self.second_order.restore(numbers["second_order"], second_order)
        self.averaged_phase.metric.restore(tensors)

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
        return self.state, self.second_order.snapshot(), self.averaged_phase.metric.snapshot()

    def roll_back(self, snapshot: Any) -> None:
        """Restore a snapshot."""
        self.averaged_phase.discard_unread()
        self.state, second_order, metric = snapshot
        self.second_order.roll_back(second_order)
        self.averaged_phase.metric.roll_back(metric)

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
        saved = list(self.averaged_phase.metric.tensors()) if self.state.steps else []
        joins = bool(saved) and None in earlier_indices
        self.state = joining.rearranged(self.state, vector_map, x, joins=joins)
        self.averaged_phase.metric.rearrange(saved, earlier_indices, shapes, x)
        self.second_order.reset()

    def reset(self) -> None:
        """Reset everything but the counts, for vectors of another dimension."""
        self.finish_step()
        state = self.state
        self.state = MinibatchState(state.seed, state.iteration, state.seconds, state.averaged)
        self.second_order.reset()
        self.averaged_phase.metric.restore()
