"""Make many runs on the workers of a cluster that share an output directory, and show their progress.

`distributed` starts the workers, assigns runs to them, repeats a run whose worker died, and sends their messages. The
directory of a run (`sanc.lab.directory`) provides resuming and the lock against other processes.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from uuid import uuid4

import dask
from distributed import Client, LocalCluster, as_completed, get_worker
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from sanc import ArgumentError
from sanc.lab import runs
from sanc.lab.directory import BusyError, finished
from sanc.lab.experiments import RunSpec
from sanc.lab.style import BRANCHES

PAUSE = 0.3
"""Seconds between two progress messages of a run: about three updates a second, which a reader can follow."""

TIMEOUT = 10
"""Seconds to wait for the connection to a scheduler, so that a wrong address is reported soon."""

_WIDTH = 24
"""Characters of the bar of branches; narrow enough to stand beside the other columns of a terminal."""


@dataclass
class Outcome:
    """What became of the runs of a command.

    Attributes
    ----------
    finished, finished_before, elsewhere : int
        The numbers of runs that finished now, that had finished before, and that other processes hold.
    failed : dict of str
        The errors of failed runs, by their paths.
    """

    finished: int = 0
    finished_before: int = 0
    elsewhere: int = 0
    failed: dict[str, str] = field(default_factory=dict)


class _StoppedError(Exception):
    """The command that submitted this run has exited or was interrupted."""


def run_all(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    data_dir: Path | None,
    workers: int,
    console: Console,
    checkpoint_every: float = 5.0,
    scheduler: str | None = None,
) -> Outcome:
    """Make all runs that are not finished, and show their progress.

    The runs use `workers` processes on this machine, or the cluster with the address `scheduler`. The workers of a
    cluster must see the output directory and the data under the same paths. An interrupt keeps the checkpoints.
    """
    out, data_dir = out.resolve(), data_dir.resolve() if data_dir else None
    unfinished = [spec for spec in specs if not finished(out / "runs" / spec.path)]
    outcome = Outcome(finished_before=len(specs) - len(unfinished))
    if unfinished:
        with _client(min(workers, len(unfinished)), scheduler, console) as client:
            _submit(client, unfinished, (out, data_dir, checkpoint_every), outcome, console)
    return outcome


def threads(workers: int) -> dict[str, str]:
    """Return environment variables for the threads of each process: the user's values, or its share of the cores."""
    default = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // workers))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: os.environ.get(name) or default for name in names}


@contextmanager
def _client(workers: int, scheduler: str | None, console: Console) -> Iterator[Client]:
    """Connect to a scheduler, or start a cluster on this machine that ends with the block."""
    if scheduler is not None:
        hint = "pass the address that `dask scheduler` prints, such as tcp://10.0.0.1:8786"
        if not re.fullmatch(r".+://.+|[^/]+:\d+", scheduler):
            raise ArgumentError(f"--scheduler {scheduler!r} is not an address: {hint}.")
        try:
            client = Client(scheduler, timeout=TIMEOUT, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"--scheduler {scheduler!r} cannot be reached ({error}): {hint}.") from None
        with client:
            if not client.nthreads():
                message = f"{scheduler} has no worker yet: start some with `dask worker {scheduler}`."
                console.print(message, markup=False, soft_wrap=True)
            yield client
        return
    settings = {"distributed.comm.timeouts.connect": "60s", "distributed.scheduler.worker-ttl": None,
                "distributed.nanny.pre-spawn-environ": threads(workers)}  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(settings))
        # Processes and threads that start while SIGINT is blocked never receive it: the workers and their monitor.
        resource_tracker.ensure_running()  # starting it later would unblock SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            local = LocalCluster(n_workers=workers, threads_per_worker=1, memory_limit=None, dashboard_address=":0",
                                 silence_logs=logging.CRITICAL)  # fmt: skip
            cluster = stack.enter_context(local)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield stack.enter_context(Client(cluster, set_as_default=False))


def _run(spec: RunSpec, topic: str, out: Path, data_dir: Path | None, every: float) -> str:
    """Make one run on a worker, and send its progress."""
    worker = get_worker()
    key, tasks = worker.get_current_task(), worker.state.tasks
    mix: Counter[str] = Counter()
    last = 0.0

    def tick(fraction: float, loss: float, branch: str, sigma: float) -> None:
        nonlocal last
        mix[branch] += 1
        if time.monotonic() - last > PAUSE:
            last = time.monotonic()
            if key not in tasks or tasks[key].state == "cancelled":
                raise _StoppedError
            worker.log_event(
                topic, {"run": spec.path, "fraction": fraction, "loss": loss, "sigma": sigma, "mix": dict(mix)}
            )

    try:
        runs.execute(spec, out, data_dir, tick, every)
    except BusyError:
        return "busy"
    return "done"


def _submit(
    client: Client, unfinished: Sequence[RunSpec], rest: tuple[Any, ...], outcome: Outcome, console: Console
) -> None:
    """Submit the runs, and show their progress until the last one ends."""
    topic = f"sanc-{uuid4().hex}"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20, complete_style="grey62", finished_style="grey62"),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[info]}"),
        _MixColumn(""),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        overall = progress.add_task(f"all {len(unfinished)} runs", total=len(unfinished), info="", mix={})
        bars = {
            spec.path: progress.add_task(spec.path, total=1.0, info="", mix={}, visible=False) for spec in unfinished
        }

        def update(event: tuple[float, dict[str, Any]]) -> None:
            _, message = event
            sigma = "" if math.isnan(message["sigma"]) else f"  σ {message['sigma']:.0e}"
            fields = {"info": f"loss {message['loss']:.4g}{sigma}", "mix": message["mix"]}
            if (bar := bars.get(message["run"])) is not None:  # the run may have ended
                progress.update(bar, completed=message["fraction"], visible=True, **fields)

        client.subscribe_topic(topic, update)
        futures = {client.submit(_run, spec, topic, *rest, key=f"{topic}-{spec.path}"): spec for spec in unfinished}
        for future in as_completed(futures, loop=client.loop):
            name, kind = futures[future].path, future.result() if future.status == "finished" else "failed"
            outcome.finished += kind == "done"
            outcome.elsewhere += kind == "busy"
            if kind == "failed":
                error = future.exception() if future.status == "error" else "cancelled"
                outcome.failed[name] = f"{type(error).__name__}: {error}"
            progress.update(bars.pop(name), visible=False)
            progress.advance(overall)
            if not console.is_terminal or kind == "failed":
                line = f"{kind:>6}  {name} {outcome.failed.get(name, '')}".rstrip()
                console.print(line, highlight=False, markup=False, soft_wrap=True)


class _MixColumn(TextColumn):
    """Draws the fractions of the branches as a bar with one colour per branch."""

    def render(self, task: Any) -> Text:
        mix, bar, passed, drawn = task.fields["mix"], Text(), 0, 0
        total = sum(mix.values())
        for branch, colour in BRANCHES.items() if total else ():
            passed += mix.get(branch, 0)
            bar.append("━" * (round(_WIDTH * passed / total) - drawn), style=colour)
            drawn = round(_WIDTH * passed / total)
        return bar
