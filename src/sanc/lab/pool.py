"""Many runs: worker processes that share an output directory, and what a person sees of them meanwhile."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sanc import Branch, Record
from sanc.lab import runs
from sanc.lab.experiments import RunSpec

_SHORT = {
    Branch.VERY_SUCCESSFUL: "very",
    Branch.SUCCESSFUL: "succ",
    Branch.UNTESTED: "taken",
    Branch.CURVATURE: "curv",
    Branch.GRADIENT: "grad",
    Branch.STAYED: "stay",
}


@dataclass
class Outcome:
    """How a batch of runs went.

    Attributes
    ----------
    finished : int
        Runs finished now.
    known : int
        Runs that were finished before.
    elsewhere : int
        Runs that another process has.
    failed : dict
        Message by run.
    interrupted : bool
        Whether a person stopped it.
    """

    finished: int = 0
    known: int = 0
    elsewhere: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


def run_all(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    data_dir: Path | None,
    workers: int,
    console: Console,
    checkpoint_every: float = 5.0,
) -> Outcome:
    """Make all runs that are not finished, with so many processes, and show their progress.

    An interrupt leaves checkpoints behind; the same call goes on from there.
    """
    outcome = Outcome()
    waiting = []
    for spec in specs:
        if runs.finished(out / "runs" / spec.path):
            outcome.known += 1
        else:
            waiting.append(spec)
    if not waiting:
        return outcome
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    tasks: Any = context.Queue()
    tasks.cancel_join_thread()  # once the workers are gone nobody empties it, and leaving must not wait for that
    for task in [*waiting, *[None] * workers]:  # each run goes to one worker; None sends a worker home
        tasks.put(task)
    processes = [
        context.Process(target=_work, args=(tasks, out, data_dir, checkpoint_every, messages), daemon=True)
        for _ in range(min(workers, len(waiting)))
    ]
    try:
        with _threads(max(1, (os.cpu_count() or 1) // workers)), _interrupts_wait():
            for process in processes:
                process.start()
        _follow(processes, messages, len(waiting), outcome, console)
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join(10)
    return outcome


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Give the processes started meanwhile so many threads: NumPy and torch read it when they are imported."""
    saved = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ.update(dict.fromkeys(saved, str(count)))
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Put off Ctrl-C to the end of the block; the processes started in it never see one.

    What this thread blocks is blocked in the processes it starts, from their first moment on. Where another thread
    takes the signal, or it is pending at the end, the handler notes it, and it is raised again for whom it was meant.
    """
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
        if noted:
            signal.raise_signal(signal.SIGINT)


def _work(tasks: Any, out: Path, data_dir: Path | None, checkpoint_every: float, messages: Any) -> None:
    """Take one run after the other until there are no more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent.sentinel,), daemon=True).start()
    while (spec := tasks.get()) is not None:
        name = spec.path
        mix: Counter[str] = Counter()
        last = 0.0

        def tick(share: float, loss: float, record: Record | None, name: str = name, mix: Counter[str] = mix) -> None:
            nonlocal last
            if record is not None:
                mix[_SHORT[record.branch]] += 1
            now = time.monotonic()
            if now - last > 0.3:
                last = now
                sigma = record.sigma if record is not None else float("nan")
                messages.put(("tick", name, share, loss, sigma, dict(mix)))

        try:
            messages.put(("start", name))
            runs.execute(spec, out, data_dir, tick, checkpoint_every)
            messages.put(("done", name))
        except runs.BusyError:
            messages.put(("busy", name))
        except Exception as problem:
            messages.put(("failed", name, f"{type(problem).__name__}: {problem}"))
    messages.put(("end",))


def _leave_after(sentinel: int) -> None:
    """Wait until the process that started this one is gone, then let go of the run, which can be resumed."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _follow(processes: Sequence[Any], messages: Any, total: int, outcome: Outcome, console: Console) -> None:
    """Show progress until every worker is through."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[info]}"),
        TimeRemainingColumn(),
    )
    plain = not console.is_terminal
    ended = 0
    with Progress(*columns, console=console, transient=True, disable=plain) as progress:
        overall = progress.add_task(f"all {total} runs", total=total, info="")
        active: dict[str, TaskID] = {}
        alive = True
        while ended < len(processes):
            try:
                kind, *rest = messages.get(timeout=0.5 if alive else 0.0)
            except queue.Empty:
                if not alive:
                    break  # killed from outside: what they left is resumable
                # The dead may have said something since the queue was found empty: it is looked into once more.
                alive = any(process.is_alive() for process in processes)
                continue
            if kind == "end":
                ended += 1
                continue
            name = rest[0]
            if kind == "start":
                active[name] = progress.add_task(name, total=1.0, info="")
            elif kind == "tick":
                _, share, loss, sigma, mix = rest
                shown = " ".join(f"{key} {count}" for key, count in mix.items())
                info = f"loss {loss:.4g}  σ {sigma:.1e}  {shown}"
                progress.update(active[name], completed=share, info=info)
            else:
                progress.remove_task(active.pop(name))
                if kind == "done":
                    outcome.finished += 1
                elif kind == "busy":
                    outcome.elsewhere += 1
                else:
                    outcome.failed[name] = rest[1]
                progress.advance(overall)
                if plain or kind == "failed":
                    extra = f": {rest[1]}" if kind == "failed" else ""
                    console.print(f"{kind:>6}  {name}{extra}", highlight=False)
