"""Runs on the paper's problems for `benchmarks.sensitivity`, `benchmarks.rejections` and `benchmarks.first_order`.

A finite sum is logistic regression with the paper's nonconvex penalty from w = (1, …, 1), with samples of ⌈n/20⌉ rows,
a budget of 20 n `paper_calls` and ρ on all rows. A run is a line of a JSON file that is compressed with xz.
"""

from __future__ import annotations

import json
import lzma
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import sanc
from benchmarks.reporting import number, read_runs
from sanc.lab.experiments import CONSTANTS
from sanc.lab.runs import load_data
from sanc.lab.statistics import mean_interval

Run: TypeAlias = dict[str, Any]
EPOCHS = 20
"""Budget in units of n, as in the paper."""
LEVEL = 1.05
"""A run reaches the target if f ≤ 1.05 f*, as in the claims of the laboratory."""
MARGIN = 0.01
"""Two methods count as equivalent if their final f differ by less than 1 % of f*; chosen before the runs."""


@cache
def problem_of(data: str, data_dir: Path | None = None) -> sanc.problems.Logistic:
    """Return the problem of a data set, loaded once in a process."""
    loaded = load_data(data, data_dir)
    return sanc.problems.Logistic(loaded.X, loaded.y, penalty="nonconvex", strength=1.0)


def constants_of(data: str) -> dict[str, float]:
    """Return the L1 and L2 that the paper tuned for a data set; 10 and 10 for sets that it does not have."""
    return dict(zip(("L1", "L2"), CONSTANTS.get(data, (10.0, 10.0)), strict=True))


def digits(value: float) -> float:
    """Return a number with nine digits, so that a file of runs is small."""
    return float(f"{value:.9g}")


def run_sum(problem: sanc.problems.Logistic, seed: int, *, batch: int | None = None, **arguments: Any) -> Run:
    """Make one run with `sanc.minimize`, and return calls and losses after every iteration, and its branches."""
    trace: dict[str, list[float]] = {"calls": [0], "loss": [digits(problem.value(np.ones(problem.dim)))]}
    branches: Counter[str] = Counter()

    def watch(intermediate_result: Any) -> None:
        record = intermediate_result.record
        branches[str(record.branch)] += 1
        trace["calls"].append(record.calls.paper_calls)
        trace["loss"].append(digits(problem.value(intermediate_result.x)))

    clock = time.perf_counter()
    result = sanc.minimize(
        problem,
        np.ones(problem.dim),
        seed=seed,
        batch_size=batch or -(-problem.n // 20),
        max_calls=EPOCHS * problem.n,
        max_iter=10**9,
        callback=watch,
        certify=False,
        **arguments,
    )
    seconds = round(time.perf_counter() - clock, 3)
    more = {"evaluations": result.calls.total, "branches": dict(branches), "seconds": seconds}
    return {"n": problem.n, **trace, "final": digits(result.fun), **more}


def minimum(problem: sanc.problems.Logistic) -> Run:
    """Return the value that `sanc.minimize` finds on all rows as a run, from which `least` takes f*."""
    value = float(sanc.minimize(problem, np.ones(problem.dim)).fun)
    return {"n": problem.n, "calls": [0], "loss": [value], "final": value}


# ---------------------------------------------------------------------- files


def read(path: Path) -> list[Run]:
    """Return the runs of a file; none if it does not exist."""
    return read_runs(path) if path.exists() else []


def make(path: Path, jobs: Iterable[tuple[Mapping[str, Any], Callable[[], Run]]]) -> list[Run]:
    """Make the runs that a file does not have, each after its description, and return all runs.

    An interrupted command is resumed by the same command. At the end the file is sorted and compressed as a whole.
    """
    runs = read(path)
    keys = {key_of(run) for run in runs}
    for about, run in jobs:
        key = json.dumps(about, sort_keys=True)
        if key in keys:
            continue
        runs.append({"key": dict(about), **run()})
        with lzma.open(path, "at", encoding="utf-8") as file:
            file.write(json.dumps(runs[-1]) + "\n")
        print(f"{key}: {runs[-1]['final']:.6g}", flush=True)
    runs.sort(key=key_of)
    text = "".join(json.dumps(run) + "\n" for run in runs)
    path.write_bytes(lzma.compress(text.encode(), preset=9))
    return runs


def key_of(run: Run) -> str:
    """Return the description of a run as text."""
    return json.dumps(run["key"], sort_keys=True)


# ---------------------------------------------------------------------- numbers


def chosen(runs: Iterable[Run], **wanted: Any) -> dict[int, Run]:
    """Return the runs with these entries in their descriptions, by seed."""
    return {run["key"]["seed"]: run for run in runs if wanted.items() <= run["key"].items()}


def least(runs: Iterable[Run], data: str) -> float:
    """Return f* of a data set: the least loss of any of its runs."""
    return min(min(run["loss"]) for run in runs if run["key"]["data"] == data)


def calls_to(run: Run, level: float) -> float:
    """Return the calls until f ≤ level in units of n; infinite if the run does not reach it."""
    reached = [calls for calls, loss in zip(run["calls"], run["loss"], strict=True) if loss <= level]
    return reached[0] / run["n"] if reached else math.inf


def differences(ours: Mapping[int, Run], theirs: Mapping[int, Run], star: float) -> list[float]:
    """Return the differences of the final losses of equal seeds, divided by f*."""
    return [(ours[seed]["final"] - theirs[seed]["final"]) / star for seed in sorted(ours.keys() & theirs.keys())]


def percent(values: Sequence[float]) -> str:
    """Return the mean of shares with its 95 % interval, in percent."""
    mean, low, high = (100 * value for value in mean_interval(values))
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]".replace("-", "−")


def calls(runs: Iterable[Run], level: float) -> str:
    """Return the median of the calls to a level, in units of n."""
    return number(float(np.median([calls_to(run, level) for run in runs])), ".2f")
