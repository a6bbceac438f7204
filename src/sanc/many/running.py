"""The run of all rows: a batch that rows enter, and leave as they end."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sanc.core.status import Status
from sanc.many.iteration import ManyIteration
from sanc.many.rows import RUNNING, Problem, Rows

_ROWS_ON_CPU = 8192
"""Rows in the batch on a CPU: with more, the tensors of a round leave its caches."""
_MEMORY_SHARE = 0.25
"""Share of the free memory of a GPU for the batch."""
_COPIES = 40
"""Numbers that a round holds for each entry of a Hessian and each residual, such as copies and tangents."""
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
    """

    max_iter: float
    max_time: float
    chunk_size: int
    callback: Callable[[Progress], object] | None
    progress: bool
    seed: int


_OUTPUTS = ("value", "status", "nit", "nfev", "njev", "grad_norm", "lambda_error", "tol", "curvature_tol")


def run_rows(
    problem: Problem, x0: Tensor, lower: Tensor | None, upper: Tensor | None, limits: RunLimits
) -> tuple[dict[str, Tensor], int]:
    """Minimise all rows; return what they ended with, and the number of rounds."""
    count, clock = len(x0), time.perf_counter()
    iteration = ManyIteration(problem, limits.max_iter, limits.seed)
    outputs: dict[str, Tensor] = {}
    rows: Rows | None = None
    begun = ended = rounds = 0
    last_report = -math.inf
    while True:
        active = 0 if rows is None else len(rows)
        if begun < count and active <= limits.chunk_size // 2:
            ids = torch.arange(begun, min(count, begun + limits.chunk_size - active), device=x0.device)
            begun += len(ids)
            sides = [None if side is None else side[ids] for side in (lower, upper)]
            fresh = iteration.start(Rows.start(ids, x0[ids].clone(), *sides))
            rows = fresh if rows is None or active == 0 else rows.join(fresh)
        assert rows is not None
        seconds = time.perf_counter() - clock
        stops = seconds >= limits.max_time
        report = Progress(rounds, len(rows), count - begun, ended, seconds)
        asked = limits.callback is not None and rounds > 0 and limits.callback(report) is True
        if stops or asked:
            status = Status.CALLBACK if asked else Status.TIME_LIMIT
            rows.status = torch.where(rows.status == RUNNING, int(status), rows.status)
        rows, left = _without_ended(rows, outputs, count)
        ended += left
        if limits.progress and (seconds - last_report > _REPORT_SECONDS or ended == count):
            last_report = seconds
            print(f"\r{ended} of {count} rows ended, {len(rows)} active, {seconds:.1f} s", end="", file=sys.stderr)
        if (stops or asked) and begun < count:
            _write_pending(outputs, torch.arange(begun, count, device=x0.device), x0, problem, status)
            begun = count
        if len(rows) == 0:
            if begun == count:
                break
            continue
        iteration.make_round(rows)
        rounds += 1
    if limits.progress:
        print(file=sys.stderr)
    return outputs, rounds


def _without_ended(rows: Rows, outputs: dict[str, Tensor], count: int) -> tuple[Rows, int]:
    """Write the results of rows that have ended, and return the others with the number of the former."""
    running = rows.status == RUNNING
    places = torch.nonzero(~running).reshape(-1)
    if len(places) == 0:
        return rows, 0
    results = {name: getattr(rows, name)[places] for name in _OUTPUTS}
    results |= {"x": rows.x[places], "g": rows.g[places], "lambda_min": rows.ritz_value[places]}
    results |= {name: part[places] for name, part in rows.more.items() if name in ("residuals", "jacobian")}
    ids = rows.ids[places]
    for name, result in results.items():
        if name not in outputs:
            outputs[name] = result.new_zeros((count, *result.shape[1:]))
        outputs[name][ids] = result
    return rows.take(torch.nonzero(running).reshape(-1)), len(places)


def _write_pending(outputs: dict[str, Tensor], ids: Tensor, x0: Tensor, problem: Problem, status: Status) -> None:
    """Write the results of rows that never began."""
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
