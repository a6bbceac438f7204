"""How the settings of the paper's method change its results on the paper's logistic regression.

    python -m benchmarks.sensitivity --runs docs/results/sensitivity.jsonl.xz                  # runs that are missing
    python -m benchmarks.sensitivity --runs docs/results/sensitivity.jsonl.xz --figure docs/results/figures
    python -m benchmarks.sensitivity --quick                                                   # one set, seconds

One setting of SANC with preset "paper" is varied at a time, the others are those of the paper's figures 1 and 2a, whose
σ0 are 0.001 and 1. `sanc reproduce fig1 --data w1a --methods sanc --set eta1=0.1,0.2` makes runs with the same steps.
The tables have the median of the calls until f ≤ 1.05 f*, and the mean of the difference between the final loss and
that with the paper's value, in percent of f*, with its 95 % interval over pairs of equal seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import set_threads
from benchmarks.paper_runs import (
    LEVEL,
    MARGIN,
    Run,
    calls,
    chosen,
    constants_of,
    differences,
    least,
    make,
    minimum,
    percent,
    problem_of,
    read,
    run_sum,
)
from benchmarks.reporting import markdown_table
from sanc.lab.statistics import equivalent, holm

SETS = ("w1a", "breast_cancer")
SIGMAS = (1.0, 0.001)
SEEDS = 10
GRIDS: Mapping[str, tuple[float, ...]] = {
    "eta1": (0.01, 0.05, 0.1, 0.2, 0.4, 0.6),
    "eta2": (0.3, 0.5, 0.8, 0.9, 0.95),
    "sigma0": (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0),
    "krylov_dim": (1, 2, 3, 5, 10, 20),
    "batch": (100, 50, 20, 10, 5, 2),
    "L1": (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0),
    "L2": (0.1, 1.0, 10.0, 100.0, 1000.0),
}
"""Values of each setting; a batch of 20 is ⌈n/20⌉ rows."""
PAPER: Mapping[str, float] = {"eta1": 0.2, "eta2": 0.8, "krylov_dim": 5, "batch": 20, "L1": 10.0, "L2": 10.0}
"""The paper's values; that of sigma0 is the one of the figure."""
NAMES = {"eta1": "η1", "eta2": "η2", "sigma0": "σ0", "krylov_dim": "Krylov dimension", "batch": "batch"}


def jobs(sets: Sequence[str], seeds: int, data_dir: Path | None) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the description and the function of every run; the paper's value is run once for each σ0."""
    for data in sets:
        problem = partial(problem_of, data, data_dir)
        yield {"data": data, "setting": "minimum", "seed": 0}, lambda problem=problem: minimum(problem())
        for sigma0 in SIGMAS:
            cells = [("paper", 0.0)] + [
                (name, value)
                for name, grid in GRIDS.items()
                for value in grid
                if value != PAPER.get(name, sigma0) and (name != "sigma0" or sigma0 == SIGMAS[0])
            ]
            for name, value in cells:
                for seed in range(seeds):
                    about = {"data": data, "sigma0": sigma0, "setting": name, "value": value, "seed": seed}
                    yield about, partial(_run, problem, data, sigma0, name, value, seed)


def _run(problem: Any, data: str, sigma0: float, name: str, value: float, seed: int) -> Run:
    given = problem()
    options: dict[str, Any] = {"sigma0": sigma0, **constants_of(data)}
    if name == "batch":
        options["batch"] = -(-given.n // int(value))
    elif name != "paper":
        options[name] = value
    return run_sum(given, seed, preset="paper", **options)


def row_of(runs: Sequence[Run], data: str, sigma0: float, name: str, value: float) -> dict[int, Run]:
    """Return the runs of a value of a setting, by seed."""
    if value == PAPER.get(name, sigma0):
        return chosen(runs, data=data, sigma0=sigma0, setting="paper")
    return chosen(runs, data=data, sigma0=sigma0, setting=name, value=value)


def label(name: str, value: float) -> str:
    """Return a value as text: a batch as a share of n."""
    return f"n/{value:g}" if name == "batch" else f"{value:g}"


def table(runs: Sequence[Run], sigma0: float) -> str:
    """Return the table of one σ0. Its verdicts are tests of equivalence, with Holm's correction over the table."""
    sets = [data for data in SETS if any(run["key"]["data"] == data for run in runs)]
    lines: list[tuple[str, str, list[str], list[float] | None]] = []
    for name, grid in GRIDS.items():
        for value in grid:
            if name == "sigma0" and sigma0 != SIGMAS[0]:
                continue
            is_paper, cells, tests = value == PAPER.get(name, sigma0), [], []
            for data in sets:
                star, found = least(runs, data), row_of(runs, data, sigma0, name, value)
                paper = row_of(runs, data, sigma0, "paper", PAPER.get("paper", sigma0))
                gaps = differences(found, paper, star)
                cells += [calls(found.values(), LEVEL * star), "" if is_paper else percent(gaps)]
                tests.append(equivalent(gaps, MARGIN))
            lines.append((NAMES.get(name, name), label(name, value), cells, None if is_paper else tests))
    adjusted = iter(holm([p for *_, tests in lines for p in tests or ()]))
    rows = []
    for name, value, cells, tests in lines:
        passed = [next(adjusted) < 0.05 for _ in tests or ()]
        verdict = "paper" if tests is None else "yes" if all(passed) else "no"
        rows.append([name, value, *cells, verdict])
    head = ["setting", "value", *(word for data in sets for word in (f"{data}: calls/n", "final, %")), "equivalent"]
    return markdown_table(head, rows, left=2)


def draw(runs: Sequence[Run]) -> Any:
    """Draw the final (f − f*)/f* and the calls to 1.05 f* over the values of every setting."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    from sanc.lab.figures import PRINT
    from sanc.lab.style import HAIR, INK, METHOD_STYLES, QUIET

    sets = [data for data in SETS if any(run["key"]["data"] == data for run in runs)]
    colours = [METHOD_STYLES[name].colour for name in ("sanc", "scr")]
    with mpl.rc_context(PRINT):
        figure = Figure(figsize=(12.4, 4.9), facecolor="white")
        axes = figure.subplots(2, len(GRIDS), sharey="row", squeeze=False)
        for column, (name, grid) in enumerate(GRIDS.items()):
            places = np.arange(len(grid))
            for data, colour in zip(sets, colours, strict=False):
                star = least(runs, data)
                for sigma0, dashes in zip(SIGMAS, ((None, None), (3.0, 1.5)), strict=True):
                    cells = [row_of(runs, data, SIGMAS[0] if name == "sigma0" else sigma0, name, v) for v in grid]
                    if name == "sigma0" and sigma0 != SIGMAS[0]:
                        continue
                    gaps = np.array([[100 * (run["final"] / star - 1) for run in cell.values()] for cell in cells])
                    spent = [float(calls(cell.values(), LEVEL * star).replace("∞", "inf")) for cell in cells]
                    line = {"color": colour, "linewidth": 1.4, "dashes": dashes, "marker": "o", "markersize": 3}
                    axes[0, column].plot(places, gaps.mean(axis=1), **line)
                    low, high = gaps.min(axis=1), gaps.max(axis=1)
                    axes[0, column].fill_between(places, low, high, color=colour, alpha=0.1, linewidth=0)
                    shown = [place if math.isfinite(place) else math.nan for place in spent]
                    axes[1, column].plot(places, shown, **line)
            for axis in axes[:, column]:
                paper = [grid.index(PAPER[name])] if name in PAPER else [grid.index(sigma) for sigma in SIGMAS]
                for place in paper:
                    axis.axvline(place, color=QUIET, linewidth=0.7, dashes=(1, 2), zorder=1)
                axis.set_xticks(places, [label(name, value) for value in grid], rotation=60)
                axis.grid(axis="y", color=HAIR, linewidth=0.6)
            axes[0, column].set_title(NAMES.get(name, name), loc="left", weight="bold", color=INK)
            axes[0, column].tick_params(labelbottom=False)
            axes[0, column].set_yscale("log")
            axes[1, column].set_yscale("log")
            for axis in axes[:, column]:
                axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.yaxis.set_minor_formatter(NullFormatter())
        axes[0, 0].set_ylabel("final (f − f*)/f*, %")
        axes[1, 0].set_ylabel("calls/n to 1.05 f*")
        names = [f"{data}, σ0 = {sigma:g}" for data in sets for sigma in SIGMAS]
        figure.legend([line for line in axes[0, 0].get_lines() if len(line.get_xdata()) > 2], names,
                      ncols=len(names), loc="upper left", frameon=False, bbox_to_anchor=(0.05, 1.0))  # fmt: skip
        figure.tight_layout(rect=(0, 0, 1, 0.95))
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="file of the runs; those that it has are not repeated")
    parser.add_argument("--figure", type=Path, help="folder for sensitivity.png")
    parser.add_argument("--quick", action="store_true", help="breast_cancer, two seeds")
    parser.add_argument("--tables", action="store_true", help="make no runs")
    parser.add_argument("--data-dir", type=Path, help="folder of the data files; by default SANC_DATA")
    options = parser.parse_args(arguments)
    set_threads(1)
    sets, seeds = (SETS[1:], 2) if options.quick else (SETS, SEEDS)
    with tempfile.TemporaryDirectory() as folder:
        path = options.runs or Path(folder) / "runs.jsonl.xz"
        runs = read(path) if options.tables else make(path, jobs(sets, seeds, options.data_dir))
    for sigma0 in SIGMAS:
        print(f"\nσ0 = {sigma0:g}\n\n{table(runs, sigma0)}")
    if options.figure is not None:
        options.figure.mkdir(parents=True, exist_ok=True)
        draw(runs).savefig(options.figure / "sensitivity.png", dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
