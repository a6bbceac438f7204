"""The paper's methods beside tuned SGD, AdamW and SVRG on the paper's logistic regressions.

    python -m benchmarks.first_order --runs docs/results/first-order.jsonl.xz            # runs that are missing, tables
    python -m benchmarks.first_order --runs docs/results/first-order.jsonl.xz --tables   # tables alone
    python -m benchmarks.first_order --quick                                             # one set, two seeds

All methods start at w = (1, …, 1) with batches of ⌈n/20⌉ rows and a budget of 20 n gradients and Hessian products of
rows. The paper's methods have its settings (σ0 = 1, and its L1 and L2 for each set; SGD has the step size 0.01). Each
peer runs with the rates of `RATES`, constant and falling linearly to zero, with half the seeds. The rate and schedule
of the least mean final loss are then run with all seeds. The values of f on all rows that the ratio tests of SANC and
SCR need are not in the budget; the column of evaluations has them.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import set_threads
from benchmarks.paper_runs import (
    EPOCHS,
    LEVEL,
    MARGIN,
    Run,
    calls,
    chosen,
    constants_of,
    differences,
    digits,
    least,
    make,
    minimum,
    percent,
    problem_of,
    read,
    run_sum,
)
from benchmarks.reporting import markdown_table, number
from sanc.lab.peers import FIRST_ORDER, first_order
from sanc.lab.statistics import below, equivalent, holm

SETS = ("w1a", "w8a", "a9a", "ijcnn1", "higgs", "breast_cancer")
SEEDS = 10
PAPER = ("sanc", "scr", "cr", "crm", "ncd", "sgd")
RATES = {
    "sgd": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "adamw": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "svrg": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
}
"""Step sizes of the peers."""
SCHEDULES = ("constant", "linear")
MEASUREMENTS = 100
"""Points of the budget at which f of a peer is evaluated on all rows."""


def run_peer(data: str, data_dir: Path | None, method: str, rate: float, schedule: Any, seed: int) -> Run:
    """Make one run of a peer."""
    problem = problem_of(data, data_dir)
    budget, clock = EPOCHS * problem.n, time.perf_counter()
    trace: dict[str, list[float]] = {"calls": [0], "loss": [digits(problem.value(np.ones(problem.dim)))]}

    def watch(spent: int, w: Any) -> None:
        if spent * MEASUREMENTS // budget > trace["calls"][-1] * MEASUREMENTS // budget:
            trace["calls"].append(spent)
            trace["loss"].append(loss(w))

    def loss(w: Any) -> float:
        value = float(problem.value(w)) if np.isfinite(w).all() else math.inf
        return digits(value) if math.isfinite(value) else 1e300  # JSON has no infinity

    with np.errstate(over="ignore", invalid="ignore"):
        w, spent = first_order(
            method, problem, rate, budget=budget, batch=-(-problem.n // 20), seed=seed, schedule=schedule, watch=watch
        )
        more = {"final": loss(w), "evaluations": spent, "seconds": round(time.perf_counter() - clock, 3)}
    return {"n": problem.n, **trace, **more}


def run_family(data: str, data_dir: Path | None, method: str, seed: int) -> Run:
    """Make one run of a method of the paper, or of the package's default."""
    problem, batch = problem_of(data, data_dir), {}
    if method == "robust":
        return run_sum(problem, seed)
    options: dict[str, Any] = {"sigma0": 1.0} if method in ("sanc", "scr") else {}
    options |= constants_of(data) if method in ("sanc", "ncd") else {}
    if method not in ("sanc", "scr"):
        batch = {"objective_batch_size": -(-problem.n // 20)}  # no ratio test: f on all rows is not needed
    return run_sum(problem, seed, method=method, preset="paper", **options, **batch)


def jobs(sets: Sequence[str], seeds: int, data_dir: Path | None) -> Iterator[tuple[dict[str, Any], Callable[[], Run]]]:
    """Yield the runs of the paper's methods, and those of the peers' grids with half the seeds, each as a function."""
    for data in sets:
        yield {"data": data, "method": "minimum", "seed": 0}, lambda data=data: minimum(problem_of(data, data_dir))
        for seed in range(seeds):
            for method in (*PAPER, "robust"):
                yield {"data": data, "method": method, "seed": seed}, partial(run_family, data, data_dir, method, seed)
        for method in FIRST_ORDER:
            for rate in RATES[method]:
                for schedule in SCHEDULES:
                    yield from peer_jobs(data, method, rate, schedule, range(-(-seeds // 2)), data_dir)


def peer_jobs(
    data: str, method: str, rate: float, schedule: str, seeds: Sequence[int], data_dir: Path | None
) -> Iterator[tuple[dict[str, Any], Callable[[], Run]]]:
    """Yield the runs of one rate and schedule of a peer."""
    for seed in seeds:
        about = {"data": data, "peer": method, "rate": rate, "schedule": schedule, "seed": seed}
        yield about, partial(run_peer, data, data_dir, method, rate, schedule, seed)


def best_of(runs: Sequence[Run], data: str, method: str, seeds: int) -> tuple[float, str]:
    """Return the rate and the schedule of a peer with the least mean final loss over the first half of the seeds."""

    def mean(cell: tuple[float, str]) -> float:
        found = chosen(runs, data=data, peer=method, rate=cell[0], schedule=cell[1])
        return float(np.mean([found[seed]["final"] for seed in range(-(-seeds // 2))]))

    return min([(rate, schedule) for rate in RATES[method] for schedule in SCHEDULES], key=mean)


def table(runs: Sequence[Run], seeds: int) -> str:
    """Return the table: calls, final losses relative to f*, and their difference to SANC's with its interval."""
    lines, tests = [], []
    for data in [data for data in SETS if chosen(runs, data=data, method="sanc")]:
        star, ours = least(runs, data), chosen(runs, data=data, method="sanc")
        rows = {style: chosen(runs, data=data, method=style) for style in (*PAPER, "robust")}
        for method in FIRST_ORDER:
            rate, schedule = best_of(runs, data, method, seeds)
            inside = "" if RATES[method][0] < rate < RATES[method][-1] else ", at the end of its grid"
            name = f"{method} tuned: {rate:g} {schedule}{inside}"
            rows[name] = chosen(runs, data=data, peer=method, rate=rate, schedule=schedule)
        for name, found in rows.items():
            gaps = differences(found, ours, star)
            mean = float(np.mean([run["final"] / star - 1 for run in found.values()]))
            spent = float(np.mean([run["evaluations"] / run["n"] for run in found.values()]))
            line = [data, name, calls(found.values(), LEVEL * star), f"{100 * mean:.3f}", number(spent, ".0f")]
            lines.append([*line, "" if name == "sanc" else percent(gaps)])
            if name != "sanc":
                tests += [equivalent(gaps, MARGIN), below(gaps, 0.0), below([-gap for gap in gaps], 0.0)]
    adjusted = iter(holm(tests))
    for line in lines:
        words = ["equivalent", "lower", "higher"] if line[1] != "sanc" else []
        line.append(", ".join(word for word in words if next(adjusted) < 0.05) or ("" if not words else "undecided"))
    head = ["set", "method", "calls/n", "final, % above f*", "evaluations/n", "difference to SANC, %", "verdict"]
    return markdown_table(head, lines, left=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="file of the runs; those that it has are not repeated")
    parser.add_argument("--quick", action="store_true", help="breast_cancer, two seeds")
    parser.add_argument("--tables", action="store_true", help="make no runs")
    parser.add_argument("--data-dir", type=Path, help="folder of the data files; by default SANC_DATA")
    options = parser.parse_args(arguments)
    set_threads(1)
    sets, seeds = (SETS[-1:], 2) if options.quick else (SETS, SEEDS)
    with tempfile.TemporaryDirectory() as folder:
        path = options.runs or Path(folder) / "runs.jsonl.xz"
        runs = read(path)
        if not options.tables:
            runs = make(path, jobs(sets, seeds, options.data_dir))
            for data in sets:
                for method in FIRST_ORDER:
                    cell = best_of(runs, data, method, seeds)
                    runs = make(path, peer_jobs(data, method, *cell, range(seeds), options.data_dir))
    print(table(runs, seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
