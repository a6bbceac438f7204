"""Many runs on the workers of a cluster, which share an output directory, and what a person sees of them meanwhile.

`distributed` starts the workers, hands runs to them, tries a run again whose worker died, and carries what they say;
that a run goes on where it stopped, and is nobody else's, is the business of its directory.
"""

from __future__ import annotations

import logging
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
"""Seconds between two messages of a run."""

TIMEOUT = 10
"""Seconds that a scheduler may take to answer."""


@dataclass
class Outcome:
    """How many runs were finished now, before, and are with others, and what failed."""

    finished: int = 0
    known: int = 0
    elsewhere: int = 0
    failed: dict[str, str] = field(default_factory=dict)


class _StoppedError(Exception):
    """Nobody waits for this run any more: the command that asked for it is gone, or was interrupted."""


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

    They go to so many processes on this machine, or to the cluster whose scheduler has the address given; its workers
    must see the output directory and the data under the same paths. An interrupt leaves checkpoints behind.
    """
    out, data_dir = out.resolve(), data_dir.resolve() if data_dir else None
    waiting = [spec for spec in specs if not finished(out / "runs" / spec.path)]
    outcome = Outcome(known=len(specs) - len(waiting))
    if waiting:
        with _client(min(workers, len(waiting)), scheduler, console) as client:
            _follow(client, waiting, (out, data_dir, checkpoint_every), outcome, console)
    return outcome


def threads(workers: int) -> dict[str, str]:
    """Return the threads of each process, as environment variables: what the user has set, else its share of cores."""
    usual = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // workers))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: os.environ.get(name) or usual for name in names}


@contextmanager
def _client(workers: int, scheduler: str | None, console: Console) -> Iterator[Client]:
    """Connect to a scheduler, or start a cluster on this machine for the time of the block."""
    if scheduler is not None:
        hint = "pass the address that `dask scheduler` prints, such as tcp://10.0.0.1:8786"
        if not re.fullmatch(r".+://.+|[^/]+:\d+", scheduler):
            raise ArgumentError(f"--scheduler {scheduler!r} is no address: {hint}.")
        try:
            client = Client(scheduler, timeout=TIMEOUT, set_as_default=False)
        except (OSError, ValueError) as problem:
            raise ArgumentError(f"--scheduler {scheduler!r} does not answer ({problem}): {hint}.") from None
        with client:
            if not client.nthreads():
                words = f"No worker is with {scheduler} yet: start some by `dask worker {scheduler}`."
                console.print(words, markup=False, soft_wrap=True)
            yield client
        return
    settings = {"distributed.comm.timeouts.connect": "60s", "distributed.scheduler.worker-ttl": None,
                "distributed.nanny.pre-spawn-environ": threads(workers)}  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(settings))
        # What is started while Ctrl-C is blocked, workers and the thread that restarts them, never sees one.
        resource_tracker.ensure_running()  # its start would lift the block
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            local = LocalCluster(n_workers=workers, threads_per_worker=1, memory_limit=None, dashboard_address=":0",
                                 silence_logs=logging.CRITICAL)  # fmt: skip
            cluster = stack.enter_context(local)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield stack.enter_context(Client(cluster, set_as_default=False))


def _run(spec: RunSpec, topic: str, out: Path, data_dir: Path | None, every: float) -> str:
    """Make one run on a worker, and say how it goes."""
    worker = get_worker()
    key, tasks = worker.get_current_task(), worker.state.tasks
    mix: Counter[str] = Counter()
    last = 0.0

    def tick(share: float, loss: float, branch: str, sigma: float) -> None:
        nonlocal last
        mix[branch] += 1
        if time.monotonic() - last > PAUSE:
            last = time.monotonic()
            if key not in tasks or tasks[key].state == "cancelled":
                raise _StoppedError
            worker.log_event(topic, {"run": spec.path, "share": share, "loss": loss, "sigma": sigma, "mix": dict(mix)})

    try:
        runs.execute(spec, out, data_dir, tick, every)
    except BusyError:
        return "busy"
    return "done"


def _follow(
    client: Client, waiting: Sequence[RunSpec], rest: tuple[Any, ...], outcome: Outcome, console: Console
) -> None:
    """Hand out the runs, and show what is heard of them until the last has ended."""
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
        overall = progress.add_task(f"all {len(waiting)} runs", total=len(waiting), info="", mix={})
        bars = {spec.path: progress.add_task(spec.path, total=1.0, info="", mix={}, visible=False) for spec in waiting}

        def hear(event: tuple[float, dict[str, Any]]) -> None:
            _, news = event
            sigma = f"  σ {news['sigma']:.0e}" if news["sigma"] == news["sigma"] else ""
            told = {"info": f"loss {news['loss']:.4g}{sigma}", "mix": news["mix"]}
            if (bar := bars.get(news["run"])) is not None:  # it may have ended meanwhile
                progress.update(bar, completed=news["share"], visible=True, **told)

        client.subscribe_topic(topic, hear)
        futures = {client.submit(_run, spec, topic, *rest, key=f"{topic}-{spec.path}"): spec for spec in waiting}
        for future in as_completed(futures, loop=client.loop):
            name, kind = futures[future].path, future.result() if future.status == "finished" else "failed"
            outcome.finished += kind == "done"
            outcome.elsewhere += kind == "busy"
            if kind == "failed":
                problem = future.exception() if future.status == "error" else "cancelled"
                outcome.failed[name] = f"{type(problem).__name__}: {problem}"
            progress.update(bars.pop(name), visible=False)
            progress.advance(overall)
            if not console.is_terminal or kind == "failed":
                words = f"{kind:>6}  {name} {outcome.failed.get(name, '')}".rstrip()
                console.print(words, highlight=False, markup=False, soft_wrap=True)


class _MixColumn(TextColumn):
    """The shares of the branches as a bar of coloured pieces."""

    def render(self, task: Any) -> Text:
        mix, bar, passed, drawn = task.fields["mix"], Text(), 0, 0
        total = sum(mix.values())
        for branch, colour in BRANCHES.items() if total else ():
            passed += mix.get(branch, 0)
            bar.append("━" * (round(24 * passed / total) - drawn), style=colour)
            drawn = round(24 * passed / total)
        return bar
