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
from sanc.oracles.base import Tally
from sanc.oracles.captured import StepPrograms
from sanc.record import Branch, Record
from sanc.settings import Method, Settings

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


class Outcome(Enum):
    """What became of an iteration on the host's side."""

    MOVED = "the device has its orders"
    REFUSED = "something was not finite; the gradient pass does not count as training"
    ASK_AGAIN = "the gradient vanishes, which is for the host to deal with"


@dataclass(slots=True)
class _Step:
    """A step and what is known of it; the verdict is the device's until it is read."""

    draft: Draft
    judge: Judge
    programs: StepPrograms
    tally: Tally
    cubic: cubic.CubicStep | None = None  # None where no cubic step was tried
    plan: escape.Escape | None = None
    seconds: float = 0.0
    tried: bool = False  # whether f was evaluated at x
    failed: int = 0  # products that were not finite
    ahead: int = 0  # steps before it that are not booked yet


class Deferred:
    """Drives an `Engine` over recordings.

    Parameters
    ----------
    engine : Engine
        Its state and rules are used; it is up to date after `settle`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._pending: _Step | None = None
        self._record: Record | None = None

    def settle(self) -> Record | None:
        """Wait for the verdict on the last step, if it is still out; return its record unless that was asked before."""
        self._read_verdict()
        record, self._record = self._record, None
        return record

    def _read_verdict(self) -> None:
        step, self._pending = self._pending, None
        if step is not None:
            _conclude(step, *step.programs.verdict.tolist())
            self._book(step)

    def iterate(self, programs: StepPrograms, tally: Tally) -> Outcome:
        """Make one iteration; `tally` knows the sizes of the samples and counts.

        While the device waits for its orders the host does only what they need; the books are kept afterwards.
        """
        clock = time.perf_counter()
        if self._pending is not None and self._pending.programs is not programs:
            self._read_verdict()  # it lies with other recordings
        engine, last = self.engine, self._pending
        programs.model.replay()
        programs.numbers.sent()
        coin = engine.curvature_coin(ahead=int(last is not None))
        numbers = programs.numbers.read()  # the host waits here, and nowhere else
        self._pending = None
        sigma = engine.state.sigma
        if last is not None:
            _conclude(last, *numbers[-2:])
            sigma = last.judge.sigma
        draft = Draft(sigma=sigma, value=numbers[0], grad_norm=numbers[3])
        step = _Step(draft, Judge(engine.settings, programs.space.eps, sigma), programs, tally)
        step.ahead = int(last is not None)
        engine.judge = step.judge
        try:
            outcome = self._decide(step, numbers, coin)
        finally:
            if last is not None:
                self._book(last)
        step.seconds = time.perf_counter() - clock
        if outcome is Outcome.REFUSED:
            self._book(step)
        return outcome

    def _decide(self, step: _Step, numbers: list[float], coin: float) -> Outcome:
        """Work out the orders and launch them."""
        engine, draft, space = self.engine, step.draft, step.programs.space
        value, x_norm, before, *coefficients = numbers[:-2]
        if draft.grad_norm == 0.0:
            return Outcome.ASK_AGAIN
        if not (math.isfinite(value) and math.isfinite(draft.grad_norm)):
            what = "gradient" if math.isfinite(value) else "loss"
            return _refuse(step, f"the {what} of the gradient sample is not finite")
        krylov = Recorded(coefficients, step.programs.rows, space)
        eigen: cubic.Spectrum | None = None
        try:
            eigen, found = engine.grow(krylov, space, draft)
            found = found or cubic.minimise(eigen, krylov.linear, draft.sigma)
            if found.hard:
                found = cubic.minimise(eigen, krylov.linear, draft.sigma, engine.hard_sign(krylov, eigen, step.ahead))
            step.cubic = self._sound(step, found, x_norm)
        except NonFiniteProductError as problem:
            step.judge.reject()
            draft.note, step.failed = str(problem), 1
        if step.cubic is not None:
            draft.value, step.tried = before, not step.programs.shares_values
            if not math.isfinite(before):
                return _refuse(step, "the loss of the objective sample is not finite")
        self._launch(step, krylov, eigen, coin)
        return Outcome.MOVED

    def _sound(self, step: _Step, found: cubic.CubicStep, x_norm: float) -> cubic.CubicStep | None:
        """Return the cubic step if it leads somewhere else, and not out of what numbers can hold."""
        draft = step.draft
        draft.model_decrease, draft.cubic_norm = found.decrease, found.norm
        draft.curvature_share = found.curvature_share
        if found.norm <= step.programs.space.eps * x_norm:
            draft.note = "the cubic step vanishes in the rounding of x"
            step.judge.forget()
            return None
        if not x_norm + found.norm < _FAR:
            draft.note = "the trial value is not finite"
            step.judge.reject()
            return None
        return found

    def _launch(self, step: _Step, krylov: Recorded, eigen: cubic.Spectrum | None, coin: float) -> None:
        """Tell the device what to try, and what to do if it fails."""
        s, programs, draft = self.engine.settings, step.programs, step.draft
        n = programs.limit
        orders = np.zeros(2 * n + 2)
        orders[-1] = math.inf
        if step.cubic is not None:
            orders[: len(step.cubic.u)] = step.cubic.u
            orders[-1] = s.eta1 * step.cubic.decrease
        if programs.escapes:
            step.plan = escape.choose(draft.ritz_value, draft.grad_norm, s.L1, s.L2, s)
            if step.plan.branch is Branch.CURVATURE and eigen is not None:
                v = eigen.leftmost_vector
                slope = float(krylov.linear @ v) if s.sign == "descent" else 0.0
                sign = -math.copysign(1.0, slope) if slope else coin
                orders[n : n + len(v)] = (step.plan.length * sign) * v
            elif step.plan.branch is Branch.GRADIENT:
                orders[2 * n] = -step.plan.length
        programs.orders.write(orders)
        self._pending = step
        programs.step.replay()

    def _book(self, step: _Step) -> None:
        """Count the calls of a step and make its record."""
        tally, draft = step.tally, step.draft
        size_g, size_b, size_f = tally.sizes
        tally.meter.count_gradient(size_g)
        for _ in range(draft.krylov_dim + step.failed):
            tally.meter.count_product(size_b)
        for _ in range(draft.trials + step.tried):
            tally.meter.count_value(size_f)
        self._record = self.engine.finish(tally, draft, step.seconds, step.judge.sigma)


def _refuse(step: _Step, note: str) -> Outcome:
    """Stay, because something is not finite."""
    step.judge.reject()
    step.draft.note = note
    return Outcome.REFUSED


def _conclude(step: _Step, reached: float, there: float) -> None:
    """Take down what the device decided, from the values it found at the cubic step and at the other one."""
    draft, plan, taken = step.draft, step.plan, False
    if step.cubic is not None:
        draft.trials, draft.trial_value = 1, reached
        actual, promised = draft.value - reached, step.cubic.decrease
        draft.rho = ratio(actual, promised)
        verdict = step.judge.try_step(actual, promised, step.cubic.norm, draft.grad_norm, 0.0)
        taken = verdict.accepted
        if taken:
            very = verdict is Verdict.VERY_SUCCESSFUL
            draft.branch = Branch.VERY_SUCCESSFUL if very else Branch.SUCCESSFUL
            draft.step_norm = step.cubic.norm
        elif not math.isfinite(reached):
            draft.note = "the trial value is not finite"
    if taken or plan is None or plan.branch is Branch.STAYED:
        return
    draft.trials += 1
    if math.isfinite(draft.value + there):
        along_gradient = plan.branch is Branch.GRADIENT
        draft.branch, draft.trial_value = plan.branch, there
        draft.step_norm = plan.length * (draft.grad_norm if along_gradient else 1.0)
        draft.curvature_share = 0.0 if along_gradient else 1.0
    else:
        draft.note = f"the {plan.branch} step is not finite"
