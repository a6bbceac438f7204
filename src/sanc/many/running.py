"""The run of all rows: a batch that rows enter, and leave as they end."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.status import Status, asks_to_stop
from sanc.many.iteration import ManyIteration
from sanc.many.rows import RUNNING, WAITING, Problem, Rows

_ROWS_ON_CPU = 8192
"""Rows in the batch on a CPU: with more, the tensors of a round leave its caches."""
_MEMORY_SHARE = 0.25
"""Share of the free memory of a GPU for the batch."""
_COPIES = 40
"""Numbers that a round holds for each entry of a Hessian and each residual, such as copies and tangents."""
_WAITING_SHARE = 8
"""Rows that wait for their whole Hessian, for each row in the batch, before they are tested: a few times in a run."""
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


@dataclass(frozen=True)
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


_OUTPUTS = ("status", "nit", "nfev", "njev", "grad_norm", "tol", "curvature_tol")


def run_rows(
    problem: Problem, x0: Tensor, lower: Tensor | None, upper: Tensor | None, limits: RunLimits
) -> tuple[dict[str, Tensor], int]:
    """Minimise all rows; return what they ended with, and the number of rounds."""
    count, clock = len(x0), time.perf_counter()
    iteration = ManyIteration(problem, limits.max_iter, limits.max_trials, limits.seed)
    outputs: dict[str, Tensor] = {}
    rows: Rows | None = None
    waiting: list[Rows] = []
    begun = ended = rounds = 0
    last_report = -math.inf
    while ended < count:
        if begun < count and _length(rows) <= limits.chunk_size // 2:
            ids = torch.arange(begun, min(count, begun + limits.chunk_size - _length(rows)), device=x0.device)
            begun += len(ids)
            sides = [None if side is None else side[ids] for side in (lower, upper)]
            rows = _joined([rows, iteration.start(ids, x0[ids], *sides)])
        seconds = time.perf_counter() - clock
        report = Progress(rounds, _length(rows, *waiting), count - begun, ended, seconds)
        asked = limits.callback is not None and rounds > 0 and asks_to_stop(limits.callback, report)
        if asked or seconds >= limits.max_time:
            status = Status.CALLBACK if asked else Status.TIME_LIMIT
            ended += _stop(_joined([rows, *waiting]), outputs, count, status)
            _write_pending(outputs, torch.arange(begun, count, device=x0.device), x0, problem, status)
            break
        assert rows is not None
        rows, left, newly_waiting = _without_ended(rows, outputs, count)
        waiting += newly_waiting
        ended += left
        if waiting and _length(*waiting) >= min(_WAITING_SHARE * len(rows), limits.chunk_size):
            tested = _joined(waiting)
            iteration.certify(tested)
            rows, waiting = _joined([rows, tested]), []
        elif len(rows):
            iteration.make_round(rows)
            rounds += 1
        if limits.progress and (seconds - last_report > _REPORT_SECONDS or ended == count):
            last_report = seconds
            print(f"\r{ended} of {count} rows ended, {len(rows)} active, {seconds:.1f} s", end="", file=sys.stderr)
    if limits.progress:
        print(file=sys.stderr)
    return outputs, rounds


def _length(*parts: Rows | None) -> int:
    return sum(len(part) for part in parts if part is not None)


def _joined(parts: Sequence[Rows | None]) -> Rows:
    """Return the rows of all parts, some of which may be None or empty."""
    filled = [part for part in parts if part is not None and len(part)]
    return filled[0].join(*filled[1:]) if len(filled) > 1 else filled[0]


def _stop(rows: Rows, outputs: dict[str, Tensor], count: int, status: Status) -> int:
    """End all rows with a status, unless they have ended, and write their results; return their number."""
    rows.status = torch.where(rows.status < 0, int(status), rows.status)
    return _without_ended(rows, outputs, count)[1]


def _without_ended(rows: Rows, outputs: dict[str, Tensor], count: int) -> tuple[Rows, int, list[Rows]]:
    """Write the results of rows that have ended; return the running ones, the number of the former, and the waiting."""
    running = rows.status == RUNNING
    if bool(running.all()):
        return rows, 0, []
    ended, waiting = (torch.nonzero(part).reshape(-1) for part in (rows.status >= 0, rows.status == WAITING))
    if len(ended):
        results = {name: getattr(rows, name)[ended] for name in _OUTPUTS}
        results |= {name: getattr(rows.point, name)[ended] for name in ("x", "value", "g")}
        spectra = rows.spectra
        results |= {"lambda_min": spectra.ritz_value[ended], "lambda_error": spectra.lambda_error[ended]}
        ids = rows.ids[ended]
        for name, result in results.items():
            if name not in outputs:
                outputs[name] = result.new_zeros((count, *result.shape[1:]))
            outputs[name][ids] = result
    stationary = [rows.take(waiting)] if len(waiting) else []
    return rows.take(torch.nonzero(running).reshape(-1)), len(ended), stationary


def _write_pending(outputs: dict[str, Tensor], ids: Tensor, x0: Tensor, problem: Problem, status: Status) -> None:
    """Write the results of rows that never began."""
    if len(ids) == 0:
        return
    for name, result in outputs.items():
        if name == "x":
            result[ids] = x0[ids]
        elif name == "status":
            result[ids] = int(status)
        elif result.is_floating_point():
            result[ids] = torch.nan
    outputs["value"][ids] = problem.values(x0[ids], ids)


def rows_in_memory(x0: Tensor, entries: int) -> int:
    """Return the number of rows for a batch, given the numbers that one row holds at a time."""
    if x0.device.type != "cuda":
        return max(256, min(_ROWS_ON_CPU, 2**24 // max(entries, 1)))
    free, _ = torch.cuda.mem_get_info(x0.device)
    return max(256, int(_MEMORY_SHARE * free / (8.0 * _COPIES * max(entries, 1))))
