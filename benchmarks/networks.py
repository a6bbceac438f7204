"""Train the networks of `benchmarks.suite` with SANC and with tuned optimisers, and compare losses and evaluations.

    python -m benchmarks.networks --out networks-output --jobs 8     # all runs; a second call resumes
    python -m benchmarks.networks --half unseen --methods sanc adamw soap --seeds 3 --minutes 20 --out networks-output
    python -m benchmarks.networks --tasks vae rnn --steps-scale 0.5 --out short-output
    python -m benchmarks.networks --tasks mnist-cnn cifar-cnn --decay 0.01 --methods sanc diagonal --out decay-output
    python -m benchmarks.networks --long 4 --jobs 8 --out long-4     # four tasks with 4 times the steps; also 16
    python -m benchmarks.networks --timing --out networks-output     # seconds of an evaluation
    python -m benchmarks.networks --quick                            # three small tasks on the CPU, seconds
    python -m benchmarks.networks --plot networks-output [MORE …]    # tables and figures of earlier runs
    python -m benchmarks.networks --export DIR                       # the data as .npz, for --data-dir elsewhere

Every method has the same budget: steps × batch of the task, in units of one gradient of one example. A gradient with
its value counts 1, a value alone 0.5, a Hessian product 2. All methods start from the weights of a seed and see its
batches. The penalty of a task is part of the loss, so all methods minimise the same function without weight decay.

* sanc: `sanc.SANC(model.parameters(), seed=seed)` with default options; other entries of suite_methods.VARIANTS set
  options;
* adamw, sgd (momentum 0.9), muon (for linear layers and convolutions, AdamW for the rest), soap (the last two
  of pytorch_optimizer) and prodigy: the default rate, and the best rate with and without a cosine decay to 0. Further
  options of the first, of soap and of muon are in suite_methods.OPTIONS;
* kl-soap (KLSOAP of heavyball, not compiled): as soap, without options;
* schedulefree (AdamWScheduleFree), soap-schedulefree (the same average on SOAP without momentum) and splus, which also
  averages: the default rate, and the best constant rate;
* adamw-ema, soap-ema: exponential moving averages of the weights in runs with a constant rate;
* lbfgs: torch's with a strong Wolfe line search, 5 iterations a batch, a history of 10. paper: SANC as in the paper,
  three different batches a step.

--long runs the tasks of suite.LONG, on half of which the loss can fall by decades, with 4 or 16 times the steps. Peers
have the cosine decay over these steps, and the default rate without one. "decaying" is SANC with an `lr` that falls
linearly in the last third, "horizon" SANC that knows the number of steps. Use a separate --out for each factor.

Rates are chosen with seed 0 by the search of `benchmarks.suite_search`: one by the final training loss, one by the
evaluations to the target, and one by the validation loss; the other seeds use the chosen ones and the default. The
target of a task is the final training loss of the best AdamW, the upper median over the seeds. Losses are evaluated
about every 50 steps of a first-order method, outside the time and the counts, in evaluation mode: on 4096 training rows
with the penalty, and on validation and test rows without it. A test loss is that of the run whose rate was chosen by
the validation loss, at its lowest validation loss. A run fails if its final loss exceeds that of AdamW with its default
rate of 1e-3 and the same seed. TF32 is off.

--out writes runs.jsonl, one line for each run; runs in it, or in runs.jsonl.xz, are not repeated. table.md, profile.png
and curves.png show these runs. schedulefree, prodigyopt and pytorch_optimizer are part of the extra `peers`; heavyball
is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sanc
from benchmarks import suite_data
from benchmarks.common import set_threads, worker_pool
from benchmarks.reporting import command, json_ready, machine, number, read_runs, write_results
from benchmarks.suite import HALVES, LONG, TASKS, Problem
from benchmarks.suite_methods import (
    METHODS,
    PEERS,
    VARIANTS,
    Spec,
    optimizers_of,
    problem_of,
    spec_of,
    try_run,
    units,
)
from benchmarks.suite_search import Cell, Peer, Run, cell_of, chosen_cells, final, held_out, to_try
from benchmarks.suite_tables import report
from benchmarks.timing import captured, synchronise


def wanted(options: argparse.Namespace, runs: Sequence[Run]) -> Iterator[Spec]:
    """Yield the runs of this command; the other seeds of a method follow once its rates are chosen."""
    done: dict[tuple[str, str], dict[Spec, Run]] = {}
    for run in runs:
        spec = spec_of(run)
        done.setdefault((spec.task, spec.method), {})[spec] = run
    for method in options.methods:
        peer = PEERS.get(method, Peer())
        schedules = ((True,) if options.long else (False, True)) if peer.cosine else (False,)
        if options.quick:
            peer = replace(peer, rates=peer.rates[:1])
        for task in options.tasks:
            steps = max(4, round(TASKS[task].steps * options.steps_scale))
            mine = done.get((task, method), {})
            first = {cell_of(run): run for spec, run in mine.items() if spec.seed == 0}
            adamw = [run for spec, run in done.get((task, "adamw"), {}).items() if spec.seed == 0]
            target = min(map(final, adamw), default=math.nan)
            cells, ended = to_try(peer, first, target, schedules, grows=not (options.quick or options.long))
            yield from (spec_in(task, method, cell, 0, steps) for cell in cells)
            if ended:
                chosen = chosen_cells(peer, list(first.values()), target)
                for seed in range(1, options.seeds):
                    yield from (spec_in(task, method, cell, seed, steps) for cell in chosen)


def spec_in(task: str, method: str, cell: Cell, seed: int, steps: int) -> Spec:
    """Return the specification of a run in a cell."""
    return Spec(task, method, cell.lr, cell.cosine, seed, steps, cell.option)


def execute(options: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """Make the missing runs, in worker processes if --jobs is above 1."""
    clock = time.perf_counter()
    missing: set[str] = set()
    busy: dict[Future[dict[str, Any]], Spec] = {}

    def waiting() -> list[Spec]:
        taken = {spec_of(run) for run in runs} | set(busy.values())
        return [spec for spec in wanted(options, runs) if spec not in taken and spec.task not in missing]

    def store(run: dict[str, Any]) -> None:
        spec, passed = spec_of(run), time.perf_counter() - clock
        if "missing" in run:
            if spec.task not in missing:
                print(f"{passed:6.0f} s  {spec.task} is left out: {run['missing']}", flush=True)
            missing.add(spec.task)
            return
        runs.append(json_ready(run))
        if options.out is not None:
            with (options.out / "runs.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(runs[-1]) + "\n")
        summary = run.get("error") or (
            f"loss {number(final(run))}, held-out {number(held_out(run).loss)}, {run['made']} steps of "
            f"{1000 * run['pace']:.2f} ms{'' if run['ended'] == 'budget' else ', ' + run['ended']}"
        )
        print(f"{passed:6.0f} s  {len(waiting()):4d} to go  {spec!s:44s} {summary}", flush=True)

    def in_time() -> bool:
        return time.perf_counter() - clock < 60 * options.minutes

    data = options.data_dir, options.device, options.decay
    if options.jobs == 1:
        set_threads(options.threads)
        while in_time() and (left := waiting()):
            store(try_run(left[0], *data))
    else:
        with worker_pool(options.jobs, options.threads) as pool:
            while True:
                for spec in waiting()[: options.jobs - len(busy)] if in_time() else []:
                    busy[pool.submit(try_run, spec, *data)] = spec
                if not busy:
                    break
                for future in wait(busy, return_when=FIRST_COMPLETED).done:
                    del busy[future]
                    store(future.result())
    if left := waiting():
        groups = Counter(f"{spec.task}/{spec.method}" for spec in left)
        listed = ", ".join(f"{name} ({count})" for name, count in groups.items())
        print(f"The time limit is reached. {len(left)} runs are left: {listed}", flush=True)


TIMING_ROUNDS = 8
"""Rounds of `--timing`, in which every method makes some steps: the host of a lent machine may slow down meanwhile."""


def timing(options: argparse.Namespace) -> None:
    """Time an evaluation (of one batch) of SANC without and with closures, AdamW, SOAP and Muon, in rounds.

    SANC and AdamW are also captured; of SANC without closures that is the step alone. *eager* is without recordings.
    """
    set_threads(options.threads)
    device, rows = torch.device(options.device), {}
    cuda, count = device.type == "cuda", 20 if options.quick else 200
    for task in options.tasks:
        problem = problem_of(task, options.data_dir, options.device)
        batches = [batch for batch, _ in zip(problem.batches(0), range(50), strict=False)]
        row: dict[str, Any] = {}
        on_gpu = ("loop eager", "loop captured", "sanc eager", "adamw captured", "sanc captured") if cuda else ()
        steps: dict[str, Callable[..., float]] = {}
        for name in ("adamw", "soap", "muon", "loop", "sanc", *on_gpu):
            try:
                steps[name] = timed_step(name, problem, batches[0], cuda)
                for i in range(count // 2):
                    steps[name](batches[i % 50])
            except (RuntimeError, ImportError) as error:
                steps.pop(name, None)
                row[name] = str(error)[:200]
        rounds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(TIMING_ROUNDS):
            for name, step in steps.items():
                spent = step(batches[0])
                synchronise(device)
                clock = time.perf_counter()
                for i in range(count // TIMING_ROUNDS):
                    total = step(batches[i % 50])
                synchronise(device)
                rounds[name].append((time.perf_counter() - clock) * problem.size / (total - spent))
        row |= {name: statistics.median(seconds) for name, seconds in rounds.items()}
        rows[task] = row
        print(task, {k: v if isinstance(v, str) else f"{1000 * v:.3f} ms" for k, v in row.items()}, flush=True)
        write_results(options.out or Path(), {"timing.json": {"machine": machine(device), "seconds": rows}})


CAPTURE = {"eager": False, "captured": True}
"""The argument `capture` of the optimisers of `--timing`; the others have the default."""


def timed_step(name: str, problem: Problem, first: tuple[Tensor, ...], cuda: bool) -> Callable[..., float]:
    """Return a function that makes a step on a batch and returns the evaluations so far; raise if capture fails."""
    model = problem.model(0)
    loss = problem.loss(model)
    spent = 0
    if name.startswith("loop"):
        loop = sanc.SANC(model.parameters(), seed=0, capture=CAPTURE.get(name.partition(" ")[2]))

        def loop_step(tensors: Sequence[Tensor]) -> float:
            nonlocal spent
            loop.zero_grad()
            loss(*tensors).backward()
            loop.step()
            spent += problem.size
            return spent

        return loop_step
    if name.startswith("sanc"):
        opt = sanc.SANC(model.parameters(), seed=0, capture=CAPTURE.get(name.partition(" ")[2]))
        for _ in range(4 if name.endswith("captured") else 0):
            opt.step(sanc.Batch(loss, *first))
        if name.endswith("captured") and opt.capture_reason:
            raise RuntimeError(f"not captured: {opt.capture_reason}")

        def sanc_step(tensors: Sequence[Tensor]) -> float:
            opt.step(sanc.Batch(loss, *tensors))
            assert opt.record is not None
            return units(opt.record.calls)

        return sanc_step
    capture = name.endswith("captured")
    if name in ("soap", "muon"):
        optimizers = optimizers_of(name, model, PEERS[name].default)
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=cuda, capturable=capture)]
    held = [t.clone() for t in first]

    def body() -> None:
        model.zero_grad()
        loss(*held).backward()
        for optimizer in optimizers:
            optimizer.step()

    replay = captured(body, problem.device) if capture else body

    def step(tensors: Sequence[Tensor]) -> float:
        nonlocal spent
        for buffer, new in zip(held, tensors, strict=True):
            buffer.copy_(new)
        replay()
        spent += problem.size
        return spent

    return step


def read(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the runs in folders; of repeated runs, keep the first."""
    found: dict[Spec, dict[str, Any]] = {}
    for folder in folders:
        paths = [folder / "runs.jsonl", folder / "runs.jsonl.xz"] if folder.is_dir() else [folder]
        for run in (run for path in paths if path.exists() for run in read_runs(path)):
            found.setdefault(spec_of(run), run)
    return list(found.values())


LONG_METHODS = ("sanc", "loop", "decaying", "horizon", "soap", "adamw")
"""Methods of --long."""
QUICK = ("small-batch", "deep-linear", "factorisation"), ("sanc", "adamw", "schedulefree", "prodigy", "sgd")
"""Tasks and methods of --quick."""


def main(arguments: Sequence[str] | None = None) -> int:
    quick, files = "three small tasks on the CPU, few steps and rates, seconds", "the runs, the table and the figures"
    parser = command(__doc__, quick=quick, out=files, data=True)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="by default the tasks of --half")
    parser.add_argument("--half", choices=(*HALVES, "both"), default="both", help="both: the small tasks")
    parser.add_argument("--methods", nargs="+", choices=[*PEERS, *VARIANTS], help=f"by default {' '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, help="by default 3")
    parser.add_argument("--steps-scale", type=float, help="factor on the steps of every task; by default 1")
    parser.add_argument("--long", type=int, choices=(4, 16), help="factor on the steps of four tasks")
    parser.add_argument("--decay", type=float, help="penalty that replaces those of the tasks; use a separate --out")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time after which no run starts")
    parser.add_argument("--device", help="by default cuda if there is one")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each process")
    parser.add_argument("--timing", action="store_true", help="time evaluations; --out writes timing.json")
    parser.add_argument("--plot", type=Path, nargs="+", metavar="OUT", help="tables and figures of earlier runs")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the data as .npz; no runs")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        print(report(read(options.plot), options.out or options.plot[0]))
        return 0
    if options.export is not None:
        suite_data.export(options.export, options.data_dir)
        return 0
    halves = ("unseen", "chosen") if options.half == "both" else (options.half,)
    tasks = QUICK[0] if options.quick else [name for half in halves for name in TASKS if TASKS[name].half == half]
    if options.long and not options.quick:
        tasks = LONG
    options.tasks = options.tasks or list(tasks)
    options.methods = list(
        options.methods or (QUICK[1] if options.quick else LONG_METHODS if options.long else METHODS)
    )
    options.seeds = options.seeds or (2 if options.quick else 3)
    options.steps_scale = (options.steps_scale or (0.02 if options.quick else 1.0)) * (options.long or 1)
    options.device = options.device or ("cuda" if torch.cuda.is_available() and not options.quick else "cpu")
    if min(options.seeds, options.jobs, options.threads) < 1 or options.steps_scale <= 0:
        parser.error("--seeds, --jobs, --threads and --steps-scale must be positive")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.timing:
        timing(options)
        return 0
    for method in list(options.methods):
        package = PEERS.get(method, Peer()).package
        if importlib.util.find_spec(package) is None:
            print(f"{method} is left out: it requires {package}", flush=True)
            options.methods.remove(method)
    runs = read([options.out]) if options.out is not None else []
    execute(options, runs)
    print(f"\n{report(runs, options.out)}")
    return int(not runs)


if __name__ == "__main__":
    sys.exit(main())
