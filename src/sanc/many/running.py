"""The run of all rows: a batch that rows enter, and leave as they end."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.runs.callbacks import asks_to_stop
from sanc.core.runs.status import Status
from sanc.many.iteration import ManyIteration
from sanc.many.rows import RUNNING, WAITING, RowProblem, Rows

_MAX_CPU_ROWS = 16384
"""Rows in the batch on a CPU: with more, the tensors of a round leave its caches."""
_MAX_CPU_NUMBERS = 2**24
"""Entries of Hessians and residuals in a batch on a CPU: 128 MB in float64, many times what its caches hold."""
_MIN_BATCH_ROWS = 256
"""Rows in a batch whatever their size: with fewer, calls of functions take longer than their arithmetic."""
_MEMORY_FRACTION = 0.25
"""Fraction of the free memory of a GPU for the batch."""
_NUMBERS_PER_ENTRY = 40
"""Numbers that a round holds for each entry of a Hessian and each residual, such as copies and tangents."""
_WAITING_PER_ACTIVE = 32
"""The whole Hessians of waiting rows are computed when as many of them wait for each active row."""
_REPORT_SECONDS = 0.2
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Progress:
    """What a callback receives after a round.

    Attributes
    ----------
    round : int
        Rounds made.
    active, pending, ended : int
        Rows in the batch, rows that have not begun, and rows that have ended.
    seconds : float
        Time since the start.
    """

    round: int
    active: int
    pending: int
    ended: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """Limits of a run, and what it reports.

    Attributes
    ----------
    max_iter : float
        Iterations of a row.
    max_time : float
        Seconds.
    chunk_size : int
        Rows in the batch at a time.
    callback : callable or None
        Receives a `Progress` after each round; True ends the run.
    progress : bool
        Print a line of progress.
    seed : int
        Seed of random signs.
    max_trials : float
        Trial points of a row.
    """

    max_iter: float
    max_time: float
    chunk_size: int
    callback: Callable[[Progress], object] | None
    progress: bool
    seed: int
    max_trials: float = math.inf


@dataclass
class _NewRows:
    """The rows of a call of `RowRun.run`, which begin in chunks.

    Attributes
    ----------
    first : int
        The number of the first row.
    x0, lower, upper : Tensor or None
        Starting points and bounds.
    begun : int
        How many of them have begun.
    """

    first: int
    x0: Tensor
    lower: Tensor | None
    upper: Tensor | None
    begun: int = 0

    @property
    def left(self) -> int:
        """How many rows have not begun."""
        return len(self.x0) - self.begun

    def begin(self, iteration: ManyIteration, count: int) -> Rows:
        """Return the next rows, `count` or as many as there are, evaluated at their starting points."""
        part = slice(self.begun, min(len(self.x0), self.begun + count))
        self.begun = part.stop
        ids = self.first + torch.arange(part.start, part.stop, device=self.x0.device)
        sides = [None if side is None else side[part] for side in (self.lower, self.upper)]
        return iteration.start(ids, self.x0[part], *sides)


_OUTPUTS = ("status", "nit", "nfev", "njev", "grad_norm", "tol", "curvature_tol")


class RowRun:
    """The run of all rows. Further rows may join later, and rows that reached a limit can go on.

    Parameters
    ----------
    problem : RowProblem
        Evaluates the rows.
    limits : RunLimits
        Limits on all calls of `run` together.

    Attributes
    ----------
    outputs : dict of Tensor
        What the rows ended with.
    rounds : int
        Rounds made.
    """

    def __init__(self, problem: RowProblem, limits: RunLimits) -> None:
        self.problem, self.limits = problem, limits
        self.outputs: dict[str, Tensor] = {}
        self.rounds = self._count = 0
        self._unfinished: list[Rows] = []
        self._clock = time.perf_counter()

    @property
    def has_unfinished(self) -> bool:
        """Whether rows can go on with a higher limit of trial points."""
        return len(self._unfinished) > 0

    def run(
        self,
        x0: Tensor,
        lower: Tensor | None,
        upper: Tensor | None,
        *,
        max_trials: float = math.inf,
        resumed: Tensor | None = None,
        superseded: Callable[[Rows], Tensor] | None = None,
    ) -> None:
        """Minimise further rows, which have the next numbers, until they end or have tried `max_trials` points.

        Rows with the numbers `resumed` that reached a lower limit before go on, and all others are dropped. Rows end
        if `superseded` returns True for them after a round.
        """
        limits, new = self.limits, _NewRows(self._count, x0, lower, upper)
        self._count += len(x0)
        max_trials = min(max_trials, limits.max_trials)
        iteration = ManyIteration(self.problem, limits.max_iter, max_trials, limits.seed)
        rows, waiting = self._resume(resumed, max_trials), list[Rows]()
        is_reported = limits.progress and new.first == 0
        last_report = -math.inf
        while new.left or _length(rows, *waiting):
            if new.left and _length(rows) <= limits.chunk_size // 2:
                rows = _joined([rows, new.begin(iteration, limits.chunk_size - _length(rows))])
            report = self._report(new, _length(rows, *waiting))
            status = self._reached_limit(report)
            if status is not None:
                self._stop([rows, *waiting], new, status)
                break
            assert rows is not None
            rows, waiting = self._advance(iteration, rows, waiting)
            if superseded is not None and len(rows):
                rows.status = torch.where(superseded(rows), int(Status.ITERATION_LIMIT), rows.status)
            if is_reported and report.seconds - last_report > _REPORT_SECONDS:
                last_report = report.seconds
                _print_progress(report)
        if is_reported:
            _print_progress(Progress(self.rounds, 0, 0, self._count, time.perf_counter() - self._clock))
            print(file=sys.stderr)

    def _report(self, new: _NewRows, active: int) -> Progress:
        """Return the progress with so many active rows."""
        seconds = time.perf_counter() - self._clock
        return Progress(self.rounds, active, new.left, new.first + new.begun - active, seconds)

    def _reached_limit(self, report: Progress) -> Status | None:
        """Return the status of rows that the callback or the limit on time ends; None: they go on."""
        callback = self.limits.callback
        if callback is not None and self.rounds > 0 and asks_to_stop(callback, report):
            return Status.CALLBACK
        return Status.TIME_LIMIT if report.seconds >= self.limits.max_time else None

    def _stop(self, parts: list[Rows | None], new: _NewRows, status: Status) -> None:
        """Write the results of all rows, with the status where they have not ended."""
        stopped = _joined(parts)
        stopped.status = torch.where(stopped.status < 0, int(status), stopped.status)
        self._without_ended(stopped)
        ids = torch.arange(new.first + new.begun, self._count, device=new.x0.device)
        self._write_pending(ids, new.x0[new.begun :], status)

    def _advance(self, iteration: ManyIteration, rows: Rows, waiting: list[Rows]) -> tuple[Rows, list[Rows]]:
        """Make a round, or certify the waiting rows if they are many; return the running and the waiting rows."""
        rows, newly_waiting = self._without_ended(rows)
        waiting = waiting + newly_waiting
        if waiting and _length(*waiting) >= min(_WAITING_PER_ACTIVE * len(rows), self.limits.chunk_size):
            certified = _joined(waiting)
            iteration.certify(certified)
            return _joined([rows, certified]), []
        if len(rows):
            iteration.make_round(rows)
            self.rounds += 1
        return rows, waiting

    def _resume(self, ids: Tensor | None, max_trials: float) -> Rows | None:
        """Return the unfinished rows `ids` with at most `max_trials` trial points, and keep the others of them."""
        unfinished, self._unfinished = self._unfinished, []
        if ids is None or not unfinished:
            return None
        rows = _joined(unfinished)
        named, goes_on = torch.isin(rows.ids, ids), rows.nfev <= max_trials
        indices, others = (torch.nonzero(named & part).reshape(-1) for part in (goes_on, ~goes_on))
        if len(others):
            self._unfinished = [rows.take(others)]
        rows = rows.take(indices)
        rows.status = torch.full_like(rows.status, RUNNING)
        return rows

    def _without_ended(self, rows: Rows) -> tuple[Rows, list[Rows]]:
        """Write the results of rows that have ended; return the running ones, and the waiting ones."""
        running = rows.status == RUNNING
        if bool(running.all()):
            return rows, []
        ended, waiting = (torch.nonzero(part).reshape(-1) for part in (rows.status >= 0, rows.status == WAITING))
        if len(ended):
            results = {name: getattr(rows, name)[ended] for name in _OUTPUTS}
            results |= {name: getattr(rows.point, name)[ended] for name in ("x", "value", "g")}
            results |= {name: getattr(rows.point.extras, name)[ended] for name in self.problem.outputs}
            spectra = rows.spectra
            results |= {"lambda_min": spectra.ritz_value[ended], "lambda_error": spectra.lambda_error[ended]}
            self._write(rows.ids[ended], results)
            self._keep_unfinished(rows)
        stationary = [rows.take(waiting)] if len(waiting) else []
        return rows.take(torch.nonzero(running).reshape(-1)), stationary

    def _keep_unfinished(self, rows: Rows) -> None:
        """Keep the rows that may go on with a higher limit of trial points."""
        may_go_on = (rows.nit < self.limits.max_iter) & (rows.nfev <= self.limits.max_trials)
        indices = torch.nonzero((rows.status == Status.ITERATION_LIMIT) & may_go_on).reshape(-1)
        if len(indices):
            self._unfinished.append(rows.take(indices))

    def _write(self, ids: Tensor, results: dict[str, Tensor]) -> None:
        """Write the results of some rows."""
        for name, result in results.items():
            output = self.outputs.get(name, result[:0])
            if len(output) < self._count:
                output = torch.cat([output, result.new_zeros((self._count - len(output), *result.shape[1:]))])
                self.outputs[name] = output
            output[ids] = result

    def _write_pending(self, ids: Tensor, x0: Tensor, status: Status) -> None:
        """Write the results of rows that never began."""
        if len(ids) == 0:
            return
        for name, result in self.outputs.items():
            if name == "x":
                result[ids] = x0
            elif name == "status":
                result[ids] = int(status)
            elif result.is_floating_point():
                result[ids] = torch.nan
        self.outputs["value"][ids] = self.problem.values(x0, ids)


def _print_progress(report: Progress) -> None:
    count = report.ended + report.active + report.pending
    line = f"\r{report.ended} of {count} rows ended, {report.active} active, {report.seconds:.1f} s"
    print(line, end="", file=sys.stderr)


def _length(*parts: Rows | None) -> int:
    return sum(len(part) for part in parts if part is not None)


def _joined(parts: Sequence[Rows | None]) -> Rows:
    """Return the rows of all parts, some of which may be None or empty."""
    filled = [part for part in parts if part is not None and len(part)]
    return filled[0].join(*filled[1:]) if len(filled) > 1 else filled[0]


def rows_in_memory(x0: Tensor, entries: int) -> int:
    """Return the number of rows for a batch, given the numbers that one row holds at a time."""
    if x0.device.type != "cuda":
        return max(_MIN_BATCH_ROWS, min(_MAX_CPU_ROWS, _MAX_CPU_NUMBERS // max(entries, 1)))
    free, _ = torch.cuda.mem_get_info(x0.device)
    numbers = free // torch.float64.itemsize
    return max(_MIN_BATCH_ROWS, int(_MEMORY_FRACTION * numbers / (_NUMBERS_PER_ENTRY * max(entries, 1))))
