"""Draw the runs of the laboratory for print: one page per panel, and the paper's figures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sanc.lab import traces
from sanc.lab.curves import bounds, f_stars, falls_over_decades, mean_curve, quantiles, run_counts
from sanc.lab.style import AXES, HAIR, LOGARITHMIC, QUIET, RECORDS, STYLE, figure_name, styles_of
from sanc.lab.traces import RunTrace

PRINT: Any = STYLE | {"font.size": 8, "text.parse_math": False}
"""The matplotlib style of these figures."""

_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
"""Formats the numbers of an axis without powers of ten above them."""


def plot(axes: Axes, runs: Sequence[RunTrace], x: str, star: float | None = None) -> None:
    """Draw the mean losses with their bands, the first method on top. With `star`, draw f − f*.

    The axis is logarithmic for f − f*, and for a loss that falls over decades.
    """
    all_curves = {method: mean_curve(group, x) for method, group in traces.by_method(runs).items()}
    curves = {method: curve for method, curve in all_curves.items() if len(curve[0])}
    log, shift = star is not None or falls_over_decades(curves.values()), star or 0.0
    low, high = bounds(curves.values(), shift, log)
    end = max(float(curve[0][-1]) for curve in curves.values()) or 1.0
    axes.set(xlim=(0, end), yscale="log" if log else "linear", ylim=(low, high))
    subs = (1.0, 2.0, 5.0) if high / max(low, 1e-300) < 1000 else (1.0,)
    steps = partial(MaxNLocator, 5, steps=(1, 2, 2.5, 5, 10))
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9) if log else steps())
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
    axes.xaxis.set_major_locator(steps())
    axes.xaxis.set_major_formatter(_PLAIN if x == "seconds" else EngFormatter(sep=""))
    axes.grid(axis="y", color=HAIR, linewidth=0.6)
    axes.set_axisbelow(True)
    styles = styles_of(curves)
    for rank, (method, (at, mean, below, above)) in enumerate(curves.items()):
        style = styles[method]
        if np.any(above > below):
            axes.fill_between(at, below - shift, above - shift, color=style.colour, alpha=0.14, linewidth=0, zorder=3)
        axes.plot(at, mean - shift, color=style.colour, linewidth=1.25 if rank else 2.0, zorder=20 - rank,
                  dashes=style.dashes or (None, None), solid_capstyle="round", dash_capstyle="butt")  # fmt: skip
        last = np.flatnonzero(np.isfinite(mean))[-1]
        axes.plot(at[last], mean[last] - shift, "o", color=style.colour, markersize=3.0 if rank else 4.0,
                  markeredgecolor="white", markeredgewidth=0.6, clip_on=False, zorder=40 - rank)  # fmt: skip


def write_title(axes: Axes, title: str, subtitle: str) -> None:
    """Write a title and a subtitle above a plot."""
    write = partial(axes.annotate, xycoords="axes fraction", textcoords="offset points", parse_math=False)
    write(title, (0, 1), (0, 17), fontsize=9.5, fontweight="bold")
    size = min(7.5, 7.5 * 60 / max(len(subtitle), 1))  # a longer one is scaled to the width of its panel
    write(subtitle, (0, 1), (0, 6), color=QUIET, fontsize=size)


def sheet(width: float, height: float, title: str, description: str, methods: Iterable[str]) -> Figure:
    """Return an empty page with a title, a description and a legend of the methods; sizes are in inches."""
    figure = Figure(figsize=(width, height), facecolor="white")
    left = 0.7 / width
    figure.text(left, 1 - 0.36 / height, title, fontsize=14, fontweight="bold", parse_math=False)
    figure.text(left, 1 - 0.58 / height, description, color=QUIET, fontsize=8.5)
    styles = list(styles_of(methods).values())
    lines = [Line2D([], [], color=each.colour, linewidth=1.8, dashes=each.dashes or (None, None)) for each in styles]
    inches = sum(0.45 + 0.075 * len(each.name) for each in styles)
    columns = len(styles) if inches < width - 1 else -(-len(styles) // 2)  # two lines, if one is too long
    figure.legend(lines, [each.name for each in styles], ncols=columns, loc="center left", frameon=False,
                  bbox_to_anchor=(left, 1 - 0.8 / height), borderpad=0, borderaxespad=0, labelcolor="linecolor",
                  handlelength=2.4, columnspacing=1.2)  # fmt: skip
    return figure


@mpl.rc_context(PRINT)
def draw_panel(runs: Sequence[RunTrace], star: float) -> Figure:
    """Return the page of one panel: the loss and f − f* over calls, evaluations and seconds."""
    config = runs[0].config
    figure = sheet(11.2, 6.8, config["title"], f"{config['subtitle']} · {run_counts([runs])}", traces.by_method(runs))
    grid = figure.add_gridspec(2, 3, left=0.062, right=0.98, top=0.82, bottom=0.08, wspace=0.2, hspace=0.17)
    for column, (x, name) in enumerate(AXES.items()):
        for row, given in enumerate((None, star)):
            axes = figure.add_subplot(grid[row, column])
            plot(axes, runs, x, given)
            axes.set_xlabel(name if row else "")
            axes.tick_params(labelbottom=bool(row))
            if column == 0:
                axes.set_title(f"f − f*,  f* = {star:.5g}" if row else "training loss f", loc="left", weight="bold")
    return figure


@mpl.rc_context(PRINT)
def draw_records(runs: Sequence[RunTrace]) -> Figure | None:
    """Return the page of a panel's records: ‖g‖, λ1 and step norms over calls, evaluations and seconds.

    A line is the median of the steps of all runs in each fiftieth of the range, and its band has the middle 80 %. None
    if no run has recorded any of them.
    """
    methods = traces.by_method(runs)
    styles, config = styles_of(methods), runs[0].config
    bands = {
        (column, x): {
            method: curve for method, group in methods.items() if len((curve := quantiles(group, column, x))[0])
        }
        for column in ("grad_norm", "ritz_value", "step_norm")
        for x in AXES
    }
    rows = [column for column in RECORDS if bands.get((column, "paper_calls"))]
    if not rows:
        return None
    height = 1.4 + 2.5 * len(rows)
    caption = f"{config['subtitle']} · median and middle 80 % of the steps"
    figure = sheet(11.2, height, config["title"], caption, methods)
    grid = figure.add_gridspec(len(rows), len(AXES), left=0.062, right=0.98, top=1 - 1.2 / height,
                               bottom=0.5 / height, wspace=0.2, hspace=0.25)  # fmt: skip
    for (row, column), (place, (x, name)) in itertools.product(enumerate(rows), enumerate(AXES.items())):
        axes = figure.add_subplot(grid[row, place])
        for method, (at, middle, low, high) in bands[column, x].items():
            style = styles[method]
            axes.fill_between(at, low, high, color=style.colour, alpha=0.14, linewidth=0)
            axes.plot(at, middle, color=style.colour, linewidth=1.25, dashes=style.dashes or (None, None))
        axes.set_yscale("log" if column in LOGARITHMIC else "linear")
        axes.set_xlim(left=0)
        axes.set_xlabel(name if column == rows[-1] else "")
        axes.xaxis.set_major_formatter(_PLAIN if x == "seconds" else EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)))
        axes.yaxis.set_major_formatter(_PLAIN)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y", color=HAIR, linewidth=0.6)
        if place == 0:
            axes.set_title(RECORDS[column], loc="left", weight="bold")
    return figure


@mpl.rc_context(PRINT)
def draw_figure(name: str, panels: Mapping[str, Sequence[RunTrace]]) -> Figure:
    """Return a figure as in the paper: its panels side by side, with the loss over paper_calls."""
    columns = min(len(panels), 3 if len(panels) != 4 else 2)
    rows = -(-len(panels) // columns)
    width, height = max(0.84 + 3.35 * columns, 5.2), 1.35 + 2.95 * rows
    methods = traces.by_method(run for runs in panels.values() for run in runs)
    figure = sheet(width, height, figure_name(name), f"training loss, {run_counts(panels.values())}", methods)
    grid = figure.add_gridspec(rows, columns, left=0.7 / width, right=1 - 0.22 / width, top=1 - 1.38 / height,
                               bottom=0.55 / height, wspace=0.26, hspace=0.55)  # fmt: skip
    for index, runs in enumerate(panels.values()):
        axes = figure.add_subplot(grid[index // columns, index % columns])
        plot(axes, runs, "paper_calls")
        axes.set_xlabel(AXES["paper_calls"])
        write_title(axes, runs[0].config["title"], runs[0].config["subtitle"])
    return figure


@mpl.rc_context(PRINT)
def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG (300 dpi) and SVG, and return the paths."""
    paths = [folder / (re.sub(r"[^\w.-]+", "-", name) + suffix) for suffix in (".png", ".svg")]
    figure.savefig(paths[0], dpi=300)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def save_all(out: Path, runs: Sequence[RunTrace]) -> list[Path]:
    """Write every panel and every figure below ``OUT/figures``, and return the paths.

    A panel with the name of its figure is written as ``NAME-sheet``, its records as ``NAME-records``. Panels without a
    loss are omitted.
    """
    folder, stars = Path(out) / "figures", f_stars(runs)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, panels in traces.by_figure(runs).items():
        drawn = {
            panel: group for panel, group in panels.items() if any(len(run.measured("paper_calls")[0]) for run in group)
        }
        for panel, group in drawn.items():
            drawing = draw_panel(group, stars[group[0].objective])
            written += save(drawing, folder, f"{panel}-sheet" if panel == name else panel)
            if (records := draw_records(group)) is not None:
                written += save(records, folder, f"{panel}-records")
        if drawn:
            written += save(draw_figure(name, drawn), folder, name)
    return written
