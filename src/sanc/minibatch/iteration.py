"""The iteration for mini-batches.

With samples, a Krylov space in every step costs more than it earns, a step that is confined to it throws most of the
gradient away, and the ratio of two noisy numbers says little. This iteration keeps the idea, a cubic model in a Krylov
space that is judged and whose negative curvature is not wasted, and changes what noise asks for:

* the space is built once in `refresh` steps; outside of it the model has no curvature, so the step is not confined;
* the gradient is a moving average, and the norm that of a diagonal metric, a power of the gradient's mean square;
* σ follows the slope that the *next* batch, which knows nothing of them, sees along the last steps;
* now and then a step is judged on its own batch, with that batch's own gradient on both sides of the ratio;
* where the loss jumps the run goes back to the last safe point.

A run begins with a few steps that need none of this: as long as a step gains more than two batches differ, it is judged
on its batch alone, σ is interpolated, and a Krylov space is built wherever it earns its products.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sanc.core.cubic import Spectrum
from sanc.core.family import Method
from sanc.core.iterate import Draws
from sanc.core.judge import Judge, ratio, shown
from sanc.core.krylov import NonFiniteProductError
from sanc.core.oracle import Oracle
from sanc.core.record import Branch, Record
from sanc.core.settings import Settings
from sanc.core.space import Vector
from sanc.errors import NonFiniteStartError
from sanc.minibatch import watch
from sanc.minibatch.model import Model, Step, learn_gradient, learn_metric
from sanc.minibatch.state import State

_CURVATURE_MEMORY = 0.8
_BOOST = 1.5
_CEILING = 1e8  # of σ: what lies above is noise
_RETRIES = 2  # of a judged step after the first phase
_HALVINGS = 10


class MinibatchIteration:
    """The iteration of an adaptive method on samples.

    Parameters
    ----------
    method : Method
        SANC; or SCR, which stays where its cubic step was rejected.
    settings : Settings
        Numbers and rules; `minibatch` is not None.
    seed : int
        Seed of the random starts and signs.

    Attributes
    ----------
    at_rest : bool
        Always false: with samples nothing ends a run but its limits.
    went_back : bool
        Whether the last iteration returned to an earlier point.
    """

    at_rest = False

    def __init__(self, method: Method, settings: Settings, seed: int) -> None:
        assert settings.minibatch is not None
        self.method = method
        self.settings = settings
        self.own = settings.minibatch
        self.state = State(seed=seed, sigma=settings.sigma0)
        self.went_back = False
        self._last: Vector | None = None  # where the last iteration ended

    def iterate(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]:
        """Make one iteration from `x`: the next point, which is `x` itself where it stayed, and the record."""
        clock, before = time.perf_counter(), self.state
        self.state = replace(before)  # whoever holds the one before can go back to it
        self.went_back = False
        record = Record(before.iteration, sigma=before.sigma)
        judge = Judge(self.settings, oracle.space.eps, before.sigma, _CEILING)
        try:
            point = self._advance(x, oracle, judge, record)
        except BaseException:
            self.state = before
            raise
        self.state.sigma = judge.sigma
        self.state.iteration += 1
        self.state.seconds += time.perf_counter() - clock
        self._last = point
        record.calls, record.seconds, record.hvp = oracle.meter.snapshot(), self.state.seconds, oracle.hvp
        return point, record

    def _advance(self, x: Vector, oracle: Oracle, judge: Judge, record: Record) -> Vector:
        state, own, space = self.state, self.own, oracle.space
        refresh = self._due()
        oracle.begin(state.iteration, products=refresh)
        record.value, g = oracle.gradient(x)
        record.grad_norm = oracle.norm(g)
        oracle.meter.paper_calls += oracle.sizes[0]
        if not (math.isfinite(record.value) and math.isfinite(record.grad_norm)):
            what = "gradient" if math.isfinite(record.value) else "loss"
            record.note = f"the {what} of the gradient sample is not finite"
            if state.iteration == 0:
                raise NonFiniteStartError(
                    f"{record.note} at the starting point (loss {record.value!r}, gradient norm {record.grad_norm!r})."
                    " Start where the loss is finite, and check the data and the initial weights."
                )
            return self._go_back(x, oracle, judge, record)
        if watch.jumped(state, record.value) and self._worse_than_before(x, oracle, record):
            record.note = "the loss jumped"
            return self._go_back(x, oracle, judge, record)
        ready = not state.first_phase and (state.scale is not None or not own.metric)
        watch.settle(state, record.value, own)
        watch.follow_slopes(state, g, own, space, judge)
        watch.watch_loss(state, x, record.value)
        learn_gradient(state, g, own)
        if refresh or not ready:
            learn_metric(state, own, space)
        state.sigma = judge.sigma
        model = Model(state, g, own, space)
        draws = Draws(state.seed, state.iteration)
        if refresh or record.grad_norm == 0.0:
            try:
                model.build(x, oracle, self.settings, draws, record)
            except NonFiniteProductError as problem:
                record.note = str(problem)
        return self._move(x, g, oracle, judge, model, draws, record)

    def _due(self) -> bool:
        """Whether a new Krylov space is due."""
        state, refresh = self.state, self.own.refresh
        k, last = state.iteration, state.refreshed
        if state.first_phase:
            return k >= 1 and (last < 0 or state.worth or k - last >= refresh)
        return last <= state.settled or k - last >= refresh

    # ------------------------------------------------------------------ going back

    def _worse_than_before(self, x: Vector, oracle: Oracle, record: Record) -> bool:
        """Whether it is the last steps that made the loss of this batch high, and not the batch.

        The same batch tells, at the last safe point. Where somebody else moved the parameters there is none any more.
        """
        state = self.state
        if self._last is not None and oracle.space.norm(self._last - x) > 0.0:
            state.safe = x
            return False
        if state.safe is None or state.safe is x:
            return False
        record.trials += 1
        return record.value - oracle.trial(state.safe) > 0.5 * (record.value - state.best)

    def _go_back(self, x: Vector, oracle: Oracle, judge: Judge, record: Record) -> Vector:
        """Return to the last safe point with a larger σ; what the batch said of the bad point is not learnt."""
        state = self.state
        if state.safe is None or oracle.space.norm(state.safe - x) == 0.0:  # it was no step of ours
            return x
        judge.reject(times=2)
        state.path, state.reached = None, math.nan
        record.step_norm = oracle.space.norm(state.safe - x)
        record.note += ": back to the last safe point"
        self.went_back = True
        return state.safe

    # ------------------------------------------------------------------ the step

    def _move(
        self, x: Vector, g: Vector, oracle: Oracle, judge: Judge, model: Model, draws: Draws, record: Record
    ) -> Vector:
        """Take the step of the model, judged where a judgement is due."""
        state, s, space = self.state, self.settings, oracle.space
        eigen = model.spectrum()
        negative = model.fresh and eigen.leftmost < 0.0
        often = self.own.check_every
        judged = state.first_phase or negative or self._young() or (often > 0 and state.iteration % often == 0)
        for attempt in range(1 + (0 if not judged else s.resolves if state.first_phase else _RETRIES)):
            state.sigma = record.sigma = judge.sigma
            step = model.solve(eigen, draws)
            if step is None:
                record.note = "the model has its minimum here"
                break
            record.model_decrease, record.curvature_share = step.decrease, step.curvature_share
            point = x + step.vector
            record.branch = Branch.UNTESTED
            if judged and not self._judge(step, point, g, oracle, judge, record, first=attempt == 0):
                record.branch = Branch.STAYED
                continue
            length = space.norm(step.vector)
            if not math.isfinite(length):
                record.branch, record.note = Branch.STAYED, "the step is not finite"
                judge.reject(times=2)
                break
            record.step_norm = length
            if not state.first_phase:
                state.path = step.vector if state.path is None else state.path * self.own.averaging + step.vector
            return point
        state.path, state.reached = None, math.nan
        if negative and self.method.escapes:
            return self._escape(x, g, oracle, judge.sigma, eigen, record)
        return x

    def _young(self) -> bool:
        """Whether noise took over only a few steps ago, so that σ may still be far from where it belongs."""
        state = self.state
        return not state.first_phase and state.iteration < state.settled + self.own.warm_up

    def _judge(
        self, step: Step, point: Vector, g: Vector, oracle: Oracle, judge: Judge, record: Record, *, first: bool
    ) -> bool:
        """Compare what the batch gained with what its own gradient and the curvature of the model promise."""
        s, space, state = self.settings, oracle.space, self.state
        value = oracle.trial(point)
        slope, length = space.read([space.inner(g, step.vector), space.inner(step.vector, step.vector)])
        promised, actual = -slope - 0.5 * step.bend, record.value - value
        record.trials += 1
        record.trial_value, record.model_decrease, record.rho = value, promised, ratio(actual, promised)
        finite = math.isfinite(value) and space.finite(point)
        cube = step.norm * step.norm * step.norm
        kappa = math.inf if not finite else judge.sigma if cube == 0.0 else shown(0.0, actual, promised, cube)
        rejected = not finite or (actual < 0.0 and (slope < 0.0 or step.curvature_share > 0.5))
        rejected = rejected or (state.first_phase and promised > 0.0 and actual < s.eta1 * promised)
        if rejected:
            grown = s.gamma * judge.sigma
            judge.move(min(max(kappa, grown), 100.0 * judge.sigma) if state.first_phase else grown)
            if not finite:
                record.note = "the trial value is not finite"
            return False
        record.branch = Branch.VERY_SUCCESSFUL if record.rho > s.eta2 else Branch.SUCCESSFUL
        if step.curvature_share > 0.5:
            record.branch = Branch.CURVATURE
        seen = -2.0 * (actual + slope) / length if length > 0.0 else math.nan
        if not state.first_phase and not math.isnan(state.curvature):
            seen = _CURVATURE_MEMORY * state.curvature + (1 - _CURVATURE_MEMORY) * seen
        if state.first_phase:
            judge.move(min(max(kappa, 0.1 * judge.sigma), 10.0 * judge.sigma))
        elif self._young() and first and actual > s.eta2 * promised > 0.0 and state.lean < -0.5:
            judge.move(judge.sigma / _BOOST)
        state.curvature, state.gained = seen, actual
        state.reached = value if state.first_phase else math.nan
        return True

    def _escape(self, x: Vector, g: Vector, oracle: Oracle, sigma: float, eigen: Spectrum, record: Record) -> Vector:
        """Step along the left-most Ritz vector, downhill, half as far until the batch's loss falls."""
        state, space = self.state, oracle.space
        v = space.combine(state.basis, eigen.leftmost_vector[:-1])
        if state.scale is not None:
            v = v * state.scale
        d = v * (math.copysign(1.0, -space.dot(g, v)) * -eigen.leftmost / sigma)
        for _ in range(_HALVINGS):
            point = x + d
            value = oracle.trial(point)
            record.trials += 1
            if -math.inf < value < record.value and space.finite(point):
                record.branch, record.step_norm, record.trial_value = Branch.CURVATURE, space.norm(d), value
                record.curvature_share, record.note = 1.0, ""
                return point
            d = d * 0.5
        record.note = "the curvature step does not lower the loss"
        return x

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        return self.state.numbers()

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state, and the basis as a block of rows."""
        return self.state.vectors()

    def restore(self, numbers: Mapping[str, Any], vectors: Mapping[str, Any]) -> None:
        """Go on from what `numbers` and `vectors` returned."""
        self.state, self._last = State.of(numbers, vectors), None

    def forget(self) -> None:
        """Begin anew with vectors of another length; σ and the counts stay."""
        state = self.state
        self.state, self._last = State(state.seed, state.iteration, state.sigma, state.seconds), None
