"""Ratios with intervals over tasks, from the runs of `benchmarks.networks`.

    python -m benchmarks.intervals docs/results/networks/runs.jsonl.gz  # sanc and each tuned peer
    python -m benchmarks.intervals RUNS [RUNS …] --parts                # parts of the default, paired by seed

A ratio is a geometric mean over tasks. Its interval holds 95 % of the means of 10,000 bootstrap samples of the tasks.
An asterisk marks a ratio to a peer that differs from 1 by Wilcoxon's signed-rank test over tasks at the level 0.05,
after Holm's correction over the peers of its column.
--parts divides evaluations and final loss of a run with one part switched off by those of the default on the same task
and seed, so RUNS must have both from the same version of the code. A run that misses the target counts as twice the
budget. Losses of zero have no ratio and are left out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import wilcoxon

from benchmarks.reporting import markdown_table, number, read_runs
from benchmarks.suite import TASKS
from benchmarks.suite_search import Run, relative_cost
from benchmarks.suite_tables import UNSOLVED, summary, target_of
from sanc.lab.statistics import holm

PARTS = ("no-averaging", "diagonal", "euclid", "fixed-scale", "no-slow-down", "even-weights", "no-bound",
         "no-curvature", "no-escape", "loop")  # fmt: skip
"""Variants of the default with one part switched off; "loop" has no closures."""

KEYS = {"ratio": "evaluations", "fewest": "evaluations, rate chosen by them", "final": "final loss",
        "held": "test loss", "held_final": "test loss at the end"}  # fmt: skip
"""Columns of `summary` that are compared, and their names."""

LEVEL = 0.05
"""Level of the tests, of all together."""


def interval(logs: Sequence[float], draws: int = 10_000, seed: int = 0) -> tuple[float, float, float]:
    """Return exp of the mean, and the 2.5 % and 97.5 % quantiles of exp of the means of bootstrap samples."""
    values = np.asarray(logs, dtype=np.float64)
    if not values.size:
        return math.nan, math.nan, math.nan
    means = np.random.default_rng(seed).choice(values, (draws, values.size)).mean(axis=1)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    return float(np.exp(values.mean())), float(low), float(high)


def shown(logs: Sequence[float]) -> str:
    """Return the ratio with its interval as text."""
    mean, low, high = interval(logs)
    return f"{number(mean, '.2f')} [{number(low, '.2f')}, {number(high, '.2f')}]"


class Paired(NamedTuple):
    """Runs without a part and runs of the default, of the same tasks and seeds.

    Attributes
    ----------
    evaluations, finals : list of float
        Mean log ratio of each task; of the final losses without those of zero.
    equal, pairs : int
        Number of pairs with equal curves, and of all pairs.
    """

    evaluations: list[float]
    finals: list[float]
    equal: int
    pairs: int


def paired(runs: Sequence[Run], part: str, half: str | None = None) -> Paired:
    """Compare the runs without a part with those of the default."""
    logs, finals, equal, pairs = [], [], 0, 0
    for task in [name for name in TASKS if half in (None, TASKS[name].half)]:
        target = target_of(runs, task)
        mine, default = ({run["seed"]: run for run in runs if (run["task"], run["method"]) == (task, name)}
                         for name in (part, "sanc"))  # fmt: skip
        spent = {
            seed: [min(relative_cost(run, target), UNSOLVED) for run in (mine[seed], default[seed])]
            for seed in sorted(mine.keys() & default.keys())
        }
        if spent:
            logs.append(float(np.mean([math.log(ours / theirs) for ours, theirs in spent.values()])))
        losses = [[run["curve"]["train"][-1] for run in (mine[seed], default[seed])] for seed in spent]
        if ratios := [math.log(ours / theirs) for ours, theirs in losses if 0 < ours * theirs < math.inf]:
            finals.append(float(np.mean(ratios)))
        equal += sum(_digits(mine[seed]) == _digits(default[seed]) for seed in spent)
        pairs += len(spent)
    return Paired(logs, finals, equal, pairs)


def _digits(run: Run) -> list[str]:
    """Return the training losses of a run to the seven digits of single precision."""
    return [f"{loss:.7g}" for loss in run["curve"]["train"]]


def parts_table(runs: Sequence[Run]) -> str:
    """Return the table of parts that are switched off."""
    cells = []
    for part in PARTS:
        every, unseen = paired(runs, part), paired(runs, part, "unseen")
        if every.pairs:
            ratios = (unseen.evaluations, every.evaluations, unseen.finals, every.finals)
            cells.append([part, *map(shown, ratios), f"{every.equal} of {every.pairs}"])
    columns = ("evaluations, unseen tasks", "all tasks", "final loss, unseen tasks", "all tasks", "equal curves")
    return markdown_table(("switched off", *columns), cells)


def peers_table(runs: Sequence[Run], half: str = "unseen") -> str:
    """Return the table of the ratios of sanc to each tuned peer on the tasks of a half."""
    rows = [row for row in summary(runs) if row["half"] == half]
    table = {(row["task"], row["method"]): row for row in rows}
    ratios: dict[tuple[str, str], list[float]] = {}
    peers = sorted({row["method"] for row in rows if row["method"].endswith(" tuned")})
    for peer in peers:
        tasks = [task for task, method in table if method == peer and (task, "sanc") in table]
        for key in KEYS:
            limit = UNSOLVED if key in ("ratio", "fewest") else math.inf
            both = [(min(table[task, "sanc"][key], limit), min(table[task, peer][key], limit)) for task in tasks]
            ratios[peer, key] = [math.log(a / b) for a, b in both if 0 < a < math.inf and 0 < b < math.inf]
    adjusted: dict[tuple[str, str], float] = {}
    for key in KEYS:
        tested = {(peer, key): float(wilcoxon(ratios[peer, key]).pvalue) for peer in peers if any(ratios[peer, key])}
        adjusted |= dict(zip(tested, holm(list(tested.values())), strict=True))
    cells = []
    for peer in peers:
        marks = ("*" if adjusted.get((peer, key), 1.0) < LEVEL else "" for key in KEYS)
        shown_ratios = (shown(ratios[peer, key]) if ratios[peer, key] else "–" for key in KEYS)
        cells.append([peer, *(text + mark for text, mark in zip(shown_ratios, marks, strict=True))])
    return markdown_table(("sanc ÷", *KEYS.values()), cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="runs.jsonl or runs.jsonl.gz of benchmarks.networks")
    parser.add_argument("--parts", action="store_true", help="compare variants of the default, paired by seed")
    options = parser.parse_args(arguments)
    runs = [run for path in options.runs for run in read_runs(path)]
    print(parts_table(runs) if options.parts else peers_table(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
