"""Ratios with intervals over tasks, from the runs of `benchmarks.networks`.

    python -m benchmarks.intervals docs/results/networks/runs.jsonl.xz  # sanc and each tuned peer, p-values, a summary
    python -m benchmarks.intervals RUNS [RUNS …] --parts                # parts of the default, paired by seed

A ratio is a geometric mean over tasks. Its interval holds 95 % of the means of 10,000 bootstrap samples of the tasks.
An asterisk marks a ratio that differs from 1 by Wilcoxon's signed-rank test over tasks. ≈ marks one between 1/1.1 and
1.1, within 10 %, by two one-sided t-tests (TOST) over tasks. Both have the level 0.05 after Holm's correction over the
rows of a column.
--parts divides evaluations and final loss of a run with one part switched off by those of the default on the same task
and seed, so RUNS must have both; the committed ones are of several commits, which docs/results/networks.md lists. A run
that misses the target counts as twice the budget. Final losses are compared on tasks that are not fitted
(`suite_tables.FITTED`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import wilcoxon

from benchmarks.common import median
from benchmarks.reporting import markdown_table, number, read_runs
from benchmarks.suite import TASKS
from benchmarks.suite_search import Run, final, relative_cost
from benchmarks.suite_tables import UNSOLVED, fitted, summary, target_of
from sanc.lab.statistics import equivalent, holm

PARTS = ("no-averaging", "diagonal", "euclid", "fixed-scale", "no-slow-down", "even-weights", "no-bound",
         "no-curvature", "no-escape", "loop")  # fmt: skip
"""Variants of the default with one part switched off; "loop" has no closures."""

KEYS = {"ratio": "evaluations", "fewest": "evaluations, rate chosen by them", "final": "final loss",
        "held": "test loss", "held_final": "test loss at the end"}  # fmt: skip
"""Columns of `summary` that are compared, and their names."""

LEVEL = 0.05
"""Level of the tests, of all together."""
MARGIN = 1.1
"""Largest factor between equivalent methods."""


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


def p_value(logs: Sequence[float]) -> float:
    """Return the p-value of Wilcoxon's signed-rank test that the ratio is 1; 1 without a difference."""
    return float(wilcoxon(logs).pvalue) if any(logs) else 1.0


def marked(column: Sequence[Sequence[float]]) -> list[str]:
    """Return the cells of a column as text: ratios with intervals, and the marks of both tests.

    Parameters
    ----------
    column : sequence of sequence of float
        Log ratios of each row, one for each task; an empty row gives –.
    """
    rows = [logs for logs in column if logs]
    differs = iter(holm([p_value(logs) for logs in rows]))
    equals = iter(holm([equivalent(logs, math.log(MARGIN)) for logs in rows]))
    cells = []
    for logs in column:
        if not logs:
            cells.append("–")
            continue
        marks = ("*" if next(differs) < LEVEL else "") + ("≈" if next(equals) < LEVEL else "")
        cells.append(shown(logs) + marks)
    return cells


class Paired(NamedTuple):
    """Runs without a part and runs of the default, of the same tasks and seeds.

    Attributes
    ----------
    evaluations, finals : list of float
        Mean log ratio of each task; of the final losses without those of zero and without some tasks.
    equal, pairs : int
        Number of pairs with equal curves, and of all pairs.
    """

    evaluations: list[float]
    finals: list[float]
    equal: int
    pairs: int


def paired(runs: Sequence[Run], part: str, half: str | None = None, without: Sequence[str] = ()) -> Paired:
    """Compare the runs without a part with those of the default; final losses without the tasks `without`."""
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
        ratios = [math.log(ours / theirs) for ours, theirs in losses if 0 < ours * theirs < math.inf]
        if ratios and task not in without:
            finals.append(float(np.mean(ratios)))
        equal += sum(_digits(mine[seed]) == _digits(default[seed]) for seed in spent)
        pairs += len(spent)
    return Paired(logs, finals, equal, pairs)


def _digits(run: Run) -> list[str]:
    """Return the training losses of a run to the seven digits of single precision."""
    return [f"{loss:.7g}" for loss in run["curve"]["train"]]


def parts_table(runs: Sequence[Run]) -> str:
    """Return the table of parts that are switched off."""
    without = fitted(summary(runs))
    every, unseen = ({part: paired(runs, part, half, without) for part in PARTS} for half in (None, "unseen"))
    found = [part for part in PARTS if every[part].pairs]
    columns = [
        marked([getattr(some[part], kind) for part in found])
        for kind in ("evaluations", "finals")
        for some in (unseen, every)
    ]
    equal = [f"{every[part].equal} of {every[part].pairs}" for part in found]
    head = ("evaluations, unseen tasks", "all tasks", "final loss, unseen tasks", "all tasks", "equal curves")
    return markdown_table(("switched off", *head), list(zip(found, *columns, equal, strict=True)))


def fitted_table(runs: Sequence[Run]) -> str:
    """Return the table of the median final losses of the default and without its parts on the fitted tasks."""
    tasks = fitted(summary(runs))
    ends: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        ends.setdefault((run["method"], run["task"]), []).append(final(run))
    cells = [
        [part, *(number(median(ends.get((part, task), [])), ".3g") for task in tasks)] for part in ("sanc", *PARTS)
    ]
    return markdown_table(("median final loss", *tasks), cells)


def ratios(rows: Sequence[Run], peer: str, key: str, name: str = "sanc") -> list[float]:
    """Return the log ratios of a method to a peer in one number of a summary, on the tasks where both have one."""
    table = {(row["task"], row["method"]): row for row in rows}
    limit = UNSOLVED if key in ("ratio", "fewest") else math.inf
    without = fitted(rows) if key == "final" else []
    tasks = [task for task, method in table if method == peer and (task, name) in table and task not in without]
    both = [(min(table[task, name][key], limit), min(table[task, peer][key], limit)) for task in tasks]
    return [math.log(a / b) for a, b in both if 0 < a < math.inf and 0 < b < math.inf]


def tuned(rows: Sequence[Run]) -> list[str]:
    """Return the tuned peers of a summary."""
    return sorted({row["method"] for row in rows if row["method"].endswith(" tuned")})


def peers_table(runs: Sequence[Run], half: str = "unseen") -> str:
    """Return the table of the ratios of sanc to each tuned peer on the tasks of a half."""
    rows = [row for row in summary(runs) if row["half"] == half]
    columns = [marked([ratios(rows, peer, key) for peer in tuned(rows)]) for key in KEYS]
    return markdown_table(("sanc ÷", *KEYS.values()), list(zip(tuned(rows), *columns, strict=True)))


def p_table(runs: Sequence[Run], half: str = "unseen") -> str:
    """Return the table of the p-values of `peers_table` before the correction."""
    rows = [row for row in summary(runs) if row["half"] == half]
    cells = [
        [peer, *(f"{p_value(logs):.3f}" if (logs := ratios(rows, peer, key)) else "–" for key in KEYS)]
        for peer in tuned(rows)
    ]
    return markdown_table(("p, uncorrected", *KEYS.values()), cells)


def in_words(runs: Sequence[Run]) -> str:
    """Return the tasks that sanc solves, and its ratios to AdamW, Muon and SOAP."""
    rows = summary(runs)
    ours = [row for row in rows if row["method"] == "sanc"]
    unseen, other = ([row for row in rows if (row["half"] == "unseen") is kind] for kind in (True, False))
    tasks = [sum(row["method"] == "sanc" for row in some) for some in (unseen, other)]
    adamw, soap = (
        [shown(ratios(some, peer, "ratio")) for some in (unseen, other)] for peer in ("adamw tuned", "soap tuned")
    )
    p = [f"{p_value(ratios(unseen, 'soap tuned', key)):.3f}" for key in ("ratio", "held")]
    without = f"Without *{'*, *'.join(tasks_left_out)}*, the" if (tasks_left_out := fitted(unseen)) else "The"
    ends = [shown(ratios(unseen, peer, "final")) for peer in ("adamw tuned", "muon tuned", "soap tuned")]
    return (
        "With no option set, `sanc.SANC` reaches the final training loss of tuned AdamW on "
        f"{sum(math.isfinite(row['ratio']) for row in ours)} of {len(ours)} tasks. It takes {adamw[0]} times AdamW's "
        f"evaluations on the {tasks[0]} unseen tasks and {adamw[1]} times on the other {tasks[1]}, and {soap[0]} and "
        f"{soap[1]} times those of tuned SOAP, the nearest peer. On the unseen tasks its test loss is "
        f"{shown(ratios(unseen, 'soap tuned', 'held'))} times SOAP's. Wilcoxon's test over these tasks gives "
        f"p = {p[0]} for the evaluations and p = {p[1]} for the test loss, relative to SOAP and before any correction. "
        f"{without} final loss is {ends[0]} times AdamW's, {ends[1]} times Muon's "
        f"and {ends[2]} times SOAP's."
    )


def relatives_in_words(runs: Sequence[Run]) -> list[str]:
    """Return the ratios of SOAP with an average of its weights, and of KL-SOAP, to tuned SOAP on the unseen tasks."""
    rows = [row for row in summary(runs) if row["half"] == "unseen"]
    names = {"soap-ema tuned": "A moving average of SOAP's weights at a constant rate", "kl-soap tuned": "KL-SOAP"}
    sentences = []
    for method, name in names.items():
        evaluations, end, held = (shown(ratios(rows, "soap tuned", key, method)) for key in ("ratio", "final", "held"))
        sentences.append(
            f"{name} takes {evaluations} times the evaluations of tuned SOAP, and has {end} times its final loss and "
            f"{held} times its test loss."
        )
    return sentences


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="runs.jsonl or runs.jsonl.xz of benchmarks.networks")
    parser.add_argument("--parts", action="store_true", help="compare variants of the default, paired by seed")
    options = parser.parse_args(arguments)
    runs = [run for path in options.runs for run in read_runs(path)]
    if options.parts:
        texts = [parts_table(runs), fitted_table(runs)]
    else:
        texts = [peers_table(runs), p_table(runs), in_words(runs), *relatives_in_words(runs)]
    print("\n\n".join(texts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
