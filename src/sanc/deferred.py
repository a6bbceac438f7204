"""The paper's iteration where the device decides: the host waits once a step, and hears the verdict with the next.

The host works out the cubic step from the Krylov space and, beforehand, what would be done if it failed; the device
evaluates the objective, takes the one or the other, and goes on. What became of a step is known when the next one is
made, or as soon as somebody asks.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum

import numpy as np

from sanc import cubic, escape
from sanc.engine import Draft, Engine
from sanc.judge import Judge, Verdict, ratio
from sanc.krylov import NonFiniteProductError
from sanc.lanczos import Recorded
from sanc.oracles.base import Meter, Operator, Oracle
from sanc.oracles.captured import StepPrograms
from sanc.record import Branch, Record
from sanc.settings import Method, Settings
from sanc.vectors import Floats, Vector

_FAR = 1e30
"""Points nearer than this to 0 are finite in float32."""


def unsupported(method: Method, settings: Settings) -> str:
    """Say why an iteration of these settings cannot leave its decisions to the device; empty where it can."""
    s = settings
    if method.model != "adaptive" or method.acceptance != "ratio" or method.exact:
        return f"{method.name} decides by rules that only SANC and SCR have recorded"
    for name, value, wanted in (
        ("resolves", s.resolves, 0),
        ("rounding_guard", s.rounding_guard, False),
        ("estimate_constants", s.estimate_constants, False),
        ("escape_check", s.escape_check, "finite"),
        ("fallback_sample", s.fallback_sample, "gradient"),
        ("first_radius", s.first_radius, None),
        ("lanczos", s.lanczos, "store"),
    ):
        if value != wanted:
            return f"{name} = {value!r} asks the host within a step; {name} = {wanted!r} does not"
    return ""


class Tally(Oracle):
    """Knows the sizes of the samples and counts; it answers nothing."""

    def __init__(self, programs: StepPrograms, meter: Meter) -> None:
        self.space = programs.space
        self.meter = meter
        self._sizes = programs.inner.sizes

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self._sizes

    def value(self, x: Vector) -> float:
        raise NotImplementedError

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        raise NotImplementedError

    def hessian(self, x: Vector) -> Operator:
        raise NotImplementedError


class Outcome(Enum):
    """What became of an iteration on the host's side."""

    MOVED = "the device has its orders"
    REFUSED = "something was not finite; the gradient pass does not count as training"
    ASK_AGAIN = "the gradient vanishes, which is for the host to deal with"


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step whose verdict the device holds."""

    draft: Draft
    step: cubic.CubicStep | None  # None where no cubic step was tried
    plan: escape.Escape | None
    seconds: float
    programs: StepPrograms
    oracle: Oracle


class Deferred:
    """Drives an `Engine` over recordings.

    Parameters
    ----------
    engine : Engine
        Its state, judge and rules are used; it is up to date after `settle`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._pending: _Pending | None = None
        self._record: Record | None = None

    def settle(self) -> Record | None:
        """Wait for the verdict on the last step, if it is still out; return its record unless that was asked before."""
        if self._pending is not None:
            self._conclude(*self._pending.programs.verdict.tolist())
        record, self._record = self._record, None
        return record

    def iterate(self, programs: StepPrograms, oracle: Oracle) -> Outcome:
        """Make one iteration; `oracle` is asked for the sizes of the samples and counts."""
        clock = time.perf_counter()
        engine, space = self.engine, programs.space
        programs.model.replay()
        programs.numbers.sent()
        numbers = programs.numbers.read()  # the host waits here, and nowhere else
        if self._pending is not None:
            self._conclude(*numbers[-2:])
        value, x_norm, before, *coefficients = numbers[:-2]
        draft = Draft(sigma=engine.state.sigma, value=value, grad_norm=coefficients[0])
        if draft.grad_norm == 0.0:
            return Outcome.ASK_AGAIN
        engine.judge = Judge(engine.settings, space.eps, engine.state.sigma)
        oracle.meter.count_gradient(oracle.sizes[0])
        if not (math.isfinite(value) and math.isfinite(draft.grad_norm)):
            what = "gradient" if math.isfinite(value) else "loss"
            return self._refuse(draft, oracle, clock, f"the {what} of the gradient sample is not finite")
        krylov = Recorded(coefficients, programs.rows, space)
        eigen: cubic.Spectrum | None = None
        step: cubic.CubicStep | None = None
        try:
            eigen, step = engine.grow(krylov, space, draft)
            step = step or cubic.minimise(eigen, krylov.linear, draft.sigma)
            if step.hard:
                step = cubic.minimise(eigen, krylov.linear, draft.sigma, engine.hard_sign(krylov, eigen))
        except NonFiniteProductError as problem:
            engine.judge.reject()
            draft.note = str(problem)
        for _ in range(draft.krylov_dim):
            oracle.meter.count_product(oracle.sizes[1])
        if step is not None:
            draft.model_decrease, draft.cubic_norm = step.decrease, step.norm
            draft.curvature_share = step.curvature_share
            if step.norm <= space.eps * x_norm:
                draft.note = "the cubic step vanishes in the rounding of x"
                engine.judge.forget()
                step = None
            elif not x_norm + step.norm < _FAR:
                draft.note = "the trial value is not finite"
                engine.judge.reject()
                step = None
        if step is not None:
            draft.value = before
            if not programs.shares_values:
                oracle.meter.count_value(oracle.sizes[2])
            if not math.isfinite(before):
                return self._refuse(draft, oracle, clock, "the loss of the objective sample is not finite")
        plan = self._launch(programs, draft, krylov, eigen, step)
        self._pending = _Pending(draft, step, plan, time.perf_counter() - clock, programs, oracle)
        return Outcome.MOVED

    def _refuse(self, draft: Draft, oracle: Oracle, clock: float, note: str) -> Outcome:
        """Stay, because something is not finite."""
        self.engine.judge.reject()
        draft.note = note
        self._record = self.engine.finish(oracle, draft, time.perf_counter() - clock)
        return Outcome.REFUSED

    def _launch(
        self,
        programs: StepPrograms,
        draft: Draft,
        krylov: Recorded,
        eigen: cubic.Spectrum | None,
        step: cubic.CubicStep | None,
    ) -> escape.Escape | None:
        """Tell the device what to try, and what to do if it fails."""
        s, n = self.engine.settings, programs.limit
        orders = np.zeros(2 * n + 2)
        orders[-1] = math.inf
        if step is not None:
            orders[: len(step.u)] = step.u
            orders[-1] = s.eta1 * step.decrease
        plan = None
        if programs.escapes:
            plan = escape.choose(draft.ritz_value, draft.grad_norm, s.L1, s.L2, s)
            if plan.branch is Branch.CURVATURE and eigen is not None:
                v = eigen.leftmost_vector
                orders[n : n + len(v)] = (plan.length * self._sign(krylov.linear, v)) * v
            elif plan.branch is Branch.GRADIENT:
                orders[2 * n] = -plan.length
        programs.orders.write(orders)
        programs.step.replay()
        return plan

    def _sign(self, linear: Floats, v: Floats) -> float:
        slope = float(linear @ v)
        if self.engine.settings.sign == "descent" and slope != 0.0:
            return -math.copysign(1.0, slope)
        return self.engine.curvature_coin()

    def _conclude(self, reached: float, there: float) -> None:
        """Take down what the device decided, from the values it found at the cubic step and at the other one."""
        pending, self._pending = self._pending, None
        assert pending is not None
        engine, draft, step, plan = self.engine, pending.draft, pending.step, pending.plan
        taken = False
        oracle, rows = pending.oracle, pending.oracle.sizes[2]
        if step is not None:
            draft.trials = 1
            draft.trial_value = reached
            oracle.meter.count_value(rows)
            actual = draft.value - draft.trial_value
            draft.rho = ratio(actual, step.decrease)
            verdict = engine.judge.try_step(actual, step.decrease, step.norm, draft.grad_norm, 0.0)
            taken = verdict.accepted
            if not math.isfinite(draft.trial_value):
                draft.note = "the trial value is not finite"
            if taken:
                very = verdict is Verdict.VERY_SUCCESSFUL
                draft.branch = Branch.VERY_SUCCESSFUL if very else Branch.SUCCESSFUL
                draft.step_norm = step.norm
        if not taken and plan is not None and plan.branch is not Branch.STAYED:
            draft.trials += 1
            oracle.meter.count_value(rows)
            if math.isfinite(draft.value + there):
                along_gradient = plan.branch is Branch.GRADIENT
                draft.branch, draft.trial_value = plan.branch, there
                draft.step_norm = plan.length * (draft.grad_norm if along_gradient else 1.0)
                draft.curvature_share = 0.0 if along_gradient else 1.0
            else:
                draft.note = f"the {plan.branch} step is not finite"
        self._record = engine.finish(oracle, draft, pending.seconds)
