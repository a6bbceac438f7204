"""The paper's iteration where the device decides: the host launches a step and hears of the one before.

What became of a step is in the report that the device sends before the next one. The host reads that when it has
launched the next step, or as soon as somebody asks, and keeps its books from it; so the device never waits for the
host.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from sanc.decisions import NOTES, PLANS, VERDICTS, Note, Orders, Outcome, Report
from sanc.engine import Draft, Engine
from sanc.judge import Verdict, ratio
from sanc.oracles.base import Tally
from sanc.oracles.captured import StepPrograms
from sanc.record import Branch, Record
from sanc.settings import Method, Settings


def unsupported(method: Method, settings: Settings) -> str:
    """Say why an iteration of these settings cannot leave its decisions to the device; empty where it can."""
    s = settings
    if method.model != "adaptive" or method.acceptance != "ratio" or method.exact:
        return f"steps of {method.name} are not recorded, only those of SANC and SCR"
    for name, value, wanted in (
        ("resolves", s.resolves, 0),
        ("rounding_guard", s.rounding_guard, False),
        ("estimate_constants", s.estimate_constants, False),
        ("escape_check", s.escape_check, "finite"),
        ("fallback_sample", s.fallback_sample, "gradient"),
        ("first_radius", s.first_radius, None),
        ("lanczos", s.lanczos, "store"),
        ("krylov_stop", s.krylov_stop, "paper"),
    ):
        if value != wanted:
            return f"{name} = {value!r} is not decided on the device; {name} = {wanted!r} is"
    return ""


@dataclass(slots=True)
class _Step:
    """A step that was launched and is not booked yet."""

    programs: StepPrograms
    tally: Tally
    seconds: float = 0.0


class Deferred:
    """Drives an `Engine` over recordings.

    Parameters
    ----------
    engine : Engine
        Its state and rules are used; it is up to date after `settle`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._pending: _Step | None = None  # launched last
        self._mailed: _Step | None = None  # the one before, whose report was sent and not read yet
        self._record: Record | None = None
        self._vanished = -1  # the iteration after one whose gradient vanished

    @property
    def vanished(self) -> bool:
        """Whether the gradient vanished in the last iteration, and the next one is the host's."""
        return self._vanished == self.engine.state.iteration

    @vanished.setter
    def vanished(self, value: bool) -> None:
        self._vanished = self.engine.state.iteration if value else -1

    def settle(self) -> Record | None:
        """Bring the books up to date; return the record of the last step unless that was asked before."""
        self.catch_up()
        record, self._record = self._record, None
        return record

    def catch_up(self) -> None:
        """Wait for the report on the last step, if it is still out, and book it."""
        self._read_mail()
        if self._pending is not None:
            self._pending.programs.desk.exchange(None)
            self._mailed, self._pending = self._pending, None
            self._read_mail()

    def iterate(self, programs: StepPrograms, tally: Tally) -> bool:
        """Launch one iteration; False where it is to be made eagerly. `tally` knows the sizes and counts."""
        clock = time.perf_counter()
        self._read_mail()  # of a step that was interrupted
        if self._pending is not None and self._pending.programs is not programs:
            self.catch_up()  # σ lies with other recordings
        last, engine = self._pending, self.engine
        if last is None and self.vanished:
            return False
        coin, hard = engine.coins(ahead=int(last is not None))
        programs.launch(Orders(coin, hard, math.nan if last is not None else engine.state.sigma))
        self._mailed, self._pending = last, _Step(programs, tally)
        self._read_mail()
        if last is not None and self.vanished:
            self._pending = None  # the device has not gone on, either
            return False
        self._pending.seconds = time.perf_counter() - clock
        return True

    def _read_mail(self) -> None:
        """Book the step whose report was sent; the host may wait here, and nowhere else."""
        if self._mailed is not None:
            self._book(self._mailed)
            self._mailed = None

    def _book(self, step: _Step) -> None:
        """Read the report on a step, count its calls and make its record."""
        report = step.programs.desk.read()
        outcome, tally = Outcome(int(report.outcome)), step.tally
        size_g, size_b, size_f = tally.sizes
        draft = _draft_of(report, outcome)
        tally.meter.count_gradient(size_g)
        for _ in range(draft.krylov_dim + (report.note == Note.PRODUCT)):
            tally.meter.count_product(size_b)
        looked = outcome is not Outcome.VANISHED and report.tried and not step.programs.shares_values
        for _ in range(draft.trials + bool(looked)):
            tally.meter.count_value(size_f)
        self._record = self.engine.finish(tally, draft, step.seconds, report.next_sigma)
        if outcome is Outcome.VANISHED:
            self.vanished = True


def _draft_of(report: Report, outcome: Outcome) -> Draft:
    """Put a report into words."""
    draft = Draft(sigma=report.sigma, value=report.value, grad_norm=report.grad_norm)
    if outcome is Outcome.VANISHED:
        draft.note = "the gradient vanishes; the next step looks for negative curvature"
        return draft
    draft.krylov_dim = int(report.dim)
    draft.note = NOTES[Note(int(report.note))].format(dim=draft.krylov_dim + 1)
    draft.ritz_value, draft.model_decrease = report.ritz_value, report.decrease
    draft.cubic_norm, draft.curvature_share = report.norm, report.share
    if report.tried:
        draft.value = report.before
    if outcome is Outcome.REFUSED:
        return draft
    taken = False
    if report.tried:
        verdict = VERDICTS[int(report.verdict)]
        taken = verdict.accepted
        draft.trials, draft.trial_value = 1, report.reached
        draft.rho = ratio(draft.value - report.reached, report.decrease)
        if taken:
            draft.branch = Branch.VERY_SUCCESSFUL if verdict is Verdict.VERY_SUCCESSFUL else Branch.SUCCESSFUL
            draft.step_norm = report.norm
        elif not math.isfinite(report.reached):
            draft.note = NOTES[Note.TRIAL]
    plan = PLANS[int(report.plan)]
    if taken or plan is Branch.STAYED:
        return draft
    draft.trials += 1
    if report.escaped:
        along_gradient = plan is Branch.GRADIENT
        draft.branch, draft.trial_value = plan, report.there
        draft.step_norm = report.length * (draft.grad_norm if along_gradient else 1.0)
        draft.curvature_share = 0.0 if along_gradient else 1.0
    else:
        draft.note = f"the {plan} step is not finite"
    return draft
