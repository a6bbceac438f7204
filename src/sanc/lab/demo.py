"""Train a network on scikit-learn's digits with the family, SGD and Adam, and plot the results.

The demonstration is a panel of the laboratory. Every method has the same initial weights, the same gradient samples and
the same budget of component evaluations (values, gradients and Hessian products of single images). The seconds include
sampling and steps, but not measuring the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sanc import Branch
from sanc.lab import cluster, curves, figures, runs, traces
from sanc.lab.directory import finished
from sanc.lab.experiments import USER_FIGURE, Panel, RunSpec, Variant
from sanc.lab.style import AXES, BRANCHES, style_of
from sanc.lab.traces import RunTrace

BUDGET, BATCH = 300_000, 128
"""Evaluations per method, about 200 passes over the 1,438 training images, and the paper's batch size for networks."""

_PAPER_ETA = {"eta1": 0.1, "eta2": 0.3}
"""η1 and η2 that the paper uses for networks."""

# SANC has no options, SCR the paper's η. The other numbers are the best of small grids at the default seed and budget:
# L1 = L2 of 1, 3, 10, 100; CR's σ of 1, 2, 5, 10, 20; SGD's step of 0.1, 0.3, 1, 3; Adam's of 0.001, 0.003, 0.01, 0.03.
SETTINGS: dict[str, tuple[str, Variant]] = {
    "sanc": ("nothing to tune", Variant("sanc")),
    "sanc-paper": ("η 0.1, 0.3; L1 = L2 = 3", Variant("sanc", "paper", _PAPER_ETA | {"L1": 3.0, "L2": 3.0})),
    "scr": ("η 0.1, 0.3", Variant("scr", "paper", _PAPER_ETA)),
    "cr": ("σ = 2", Variant("cr", "paper", {"sigma0": 2.0})),
    "ncd": ("L1 = L2 = 3", Variant("ncd", "paper", {"L1": 3.0, "L2": 3.0})),
    "sgd": ("step 1", Variant("sgd", options={"lr": 1.0})),
    "adam": ("step 0.003", Variant("adam", options={"lr": 0.003})),
}
"""The methods, with a description of their settings."""

_SHORT_BRANCH_NAMES = dict(
    zip(BRANCHES, ("very", "succ.", "uncond.", "averaged", "curv.", "grad.", "stayed"), strict=True)
)
"""Short names of the branches, for the columns of the table."""


def panel(budget: int = BUDGET, batch: int = BATCH) -> Panel:
    """Return the panel: a tanh network trained on four fifths of the digits."""
    name = "demo" if (budget, batch) == (BUDGET, BATCH) else f"demo-{budget}-{batch}"
    variants = {key: variant for key, (_, variant) in SETTINGS.items()}
    options: Any = {
        "batch": batch,
        "calls": budget,
        "unit": "calls",
        "strength": 1e-4,
        "widths": (48, 32),
        "held_out": 0.2,
    }
    return Panel(name, USER_FIGURE, "mlp", "digits", tuple(SETTINGS), variants=variants, **options)


def seconds_to(run: RunTrace, loss: float) -> float:
    """Return the seconds after which a run first had at most this loss; NaN if it never did."""
    seconds, losses = run.measured("seconds")
    reached = np.flatnonzero(losses <= loss)
    return float(seconds[reached[0]]) if len(reached) else math.nan


def in_words(runs: Sequence[RunTrace]) -> str:
    """Return what the default did, compared with Adam, as sentences."""
    by_method = {run.method: run for run in runs}
    sanc, adam = by_method["sanc"], by_method["adam"]
    counts = Counter(sanc.columns["branch"][1:])
    averaged, steps = counts[str(Branch.AVERAGED)], sanc.steps
    with_curvature = f"{steps - averaged:,} step{'' if steps - averaged == 1 else 's'}"
    phases = f"SANC made {with_curvature} with curvature and {averaged:,} averaged steps."
    at = seconds_to(sanc, adam.final_loss)
    adam_time = f"after {seconds_to(adam, adam.final_loss):.1f} s"
    reached = "did not reach it" if math.isnan(at) else f"reached it after {at:.1f} s"
    ratio = sanc.final_loss / adam.final_loss
    return (
        f"{phases} Adam, whose step was tuned, had its final loss of {adam.final_loss:.4f} {adam_time}; SANC, with "
        f"nothing tuned, {reached} and ended at {sanc.final_loss:.4f}, {ratio:.2g} times Adam's loss."
    )


def _empty_table() -> Table:
    """Return a table with a column for the methods, as narrow as a terminal of 80 columns."""
    result = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    result.add_column("method", no_wrap=True)
    return result


def table(runs: Sequence[RunTrace]) -> Table:
    """Return the results as a table."""
    result = _empty_table()
    for name in ("loss", "test", "evaluations", "seconds", "to Adam"):
        result.add_column(name, justify="right", no_wrap=True)
    best = min(run.final_loss for run in runs)
    target = next(run.final_loss for run in runs if run.method == "adam")
    for run in runs:
        style, done = style_of(run.method), run.done or {}
        result.add_row(
            Text.assemble((style.name, style.colour), "\n", (SETTINGS[run.method][0], "dim")),
            Text(f"{run.final_loss:.4f}", style="bold" if run.final_loss == best else ""),
            f"{100 * done['accuracy']:.1f} %",
            f"{run.columns['calls'][-1]:,.0f}",
            f"{run.columns['seconds'][-1]:.1f}",
            "–" if math.isnan(at := seconds_to(run, target)) else f"{at:.1f}",
        )
    return result


def branch_table(runs: Sequence[RunTrace]) -> Table:
    """Return the steps of each method by branch as a table."""
    result = _empty_table()
    counts = {run.method: Counter(run.columns["branch"][1:]) for run in runs}
    used = [branch for branch in BRANCHES if any(count[branch] for count in counts.values())]
    for branch in used:
        result.add_column(_SHORT_BRANCH_NAMES[branch], justify="right", no_wrap=True)
    for run in runs:
        style = style_of(run.method)
        cells = (str(counts[run.method][branch] or "·") for branch in used)
        result.add_row(Text(style.name, style=style.colour), *cells)
    return result


def legend(runs: Sequence[RunTrace]) -> str:
    """Return what the columns mean, as sentences."""
    config = runs[0].config
    return (
        f"Loss: cross entropy + {config['strength']:g}/2·‖W‖² on all training images. Test: accuracy on the held-out "
        f"fifth. Evaluations: values, gradients and products of single images; batch {config['batch_size']}, seed "
        f"{config['seed']}. SANC has the default settings, SCR those of the paper; the settings of the others are "
        "the best of four or five values at seed 0. To Adam: seconds to Adam's final loss. Below: steps by branch."
    )


def _stack(axes: Axes, run: RunTrace) -> None:
    """Draw the fractions of the branches over a run, with the names and total fractions of the branches."""
    at, fractions = curves.mix([run], "calls", 240)
    present = list(reversed(fractions))
    totals = {branch: 100 * count / run.steps for branch, count in Counter(run.columns["branch"]).items()}
    axes.stackplot(at, *(fractions[branch] for branch in present), colors=[BRANCHES[branch] for branch in present],
                   labels=[f"{branch}, {totals[branch]:.0f} %" for branch in present], edgecolor="white",
                   linewidth=0.5)  # fmt: skip
    axes.set(xlim=(0, at[-1]), ylim=(0, 1), xlabel="evaluations")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True, handlelength=0.7)
    figures.write_title(
        axes, f"Steps of {style_of(run.method).name}", "fraction of steps by branch, smoothed; totals at the right"
    )


@mpl.rc_context(figures.PRINT)
def draw(runs: Sequence[RunTrace]) -> Figure:
    """Return the figure: the losses over evaluations and seconds, and the branches of SANC and SCR."""
    config = runs[0].config
    description = (
        f"A tanh network of {config['dim']:,} weights on {config['n']:,} images of 8×8 pixels. All methods have the "
        f"same initial weights, {config['budget']:,} evaluations and batches of {config['batch_size']}."
    )
    figure = figures.sheet(
        10.8, 7.6, "Classifying digits with a fixed number of evaluations", description, [run.method for run in runs]
    )
    grid = figure.add_gridspec(2, 2, height_ratios=(1.8, 1), left=0.065, right=0.85, top=0.8, bottom=0.07,
                               wspace=0.58, hspace=0.5)  # fmt: skip
    titles = {"calls": ("Training loss over evaluations", "whole training set, logarithmic"),
              "seconds": ("Training loss over time", "the same runs, wall-clock seconds")}  # fmt: skip
    for column, (x, title) in enumerate(titles.items()):
        axes = figure.add_subplot(grid[0, column])
        figures.plot(axes, runs, x, 0.0)
        axes.set_xlabel(AXES[x])
        figures.write_title(axes, *title)
    for column, run in enumerate(run for run in runs if run.method in ("sanc", "scr")):
        _stack(figure.add_subplot(grid[1, column]), run)
    return figure


def run(
    out: Path, console: Console, *, seed: int = 0, budget: int = BUDGET, batch: int = BATCH, workers: int = 2,
    scheduler: str | None = None,
) -> int:  # fmt: skip
    """Make the runs, print the table and write the figure; return the exit code.

    An interrupted demonstration is resumed. If the runs are finished, only the table and the figure are made.
    """
    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is an error before any run
    shown = panel(budget, batch)
    runs.check_panel(shown, runs.load_data("digits", None, "float32"), "robust")
    specs = [RunSpec(shown, method, seed, "robust") for method in shown.methods]
    if all(finished(out / "runs" / spec.path) for spec in specs):
        console.print(f"These runs were finished before; remove {out} to repeat them.", markup=False)
    cluster.run_all(specs, out, data_dir=None, workers=workers, console=console, scheduler=scheduler)
    finished_runs = [
        trace for trace in traces.read(out) if trace.panel == shown.name and trace.seed == seed and trace.done
    ]
    if len(finished_runs) < len(specs):
        console.print(f"{len(specs) - len(finished_runs)} runs are not finished: the same command resumes them.")
        return 1
    console.print(table(finished_runs))
    console.print(legend(finished_runs), markup=False)
    console.print(branch_table(finished_runs))
    console.print(in_words(finished_runs), markup=False)
    for path in figures.save(draw(finished_runs), out, "demo"):
        console.print(f"Figure: {path}", soft_wrap=True, markup=False)
    return 0
