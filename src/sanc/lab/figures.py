"""Draw the runs of the laboratory for print: a sheet for every panel, and the paper's figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sanc import ArgumentError
from sanc.lab import traces
from sanc.lab.curves import f_star, f_stars, mean_curve
from sanc.lab.style import AXES, HAIR, QUIET, STYLE, figure_name, look, spread
from sanc.lab.traces import Floats, RunTrace

__all__ = ["draw_figure", "draw_panel", "plot", "save", "save_all", "sheet"]

_STYLE: Any = STYLE | {"font.size": 8, "text.parse_math": False}

Curves = dict[str, tuple[Floats, Floats, Floats, Floats]]


def _bounds(curves: Curves, star: float, log: bool) -> tuple[float, float]:
    """Bounds of the y-axis; a method that rises far above the start may leave the picture at the top."""
    start = max(float(mean[0]) for _, mean, _, _ in curves.values())
    least, floor = (min(float(np.nanmin(curve[k])) for curve in curves.values()) for k in (2, 1))
    most = max(float(np.nanmax(high)) for _, _, _, high in curves.values())
    if log:  # a band may leave at the bottom
        bottom = max(least - star, (floor - star) / 2, 1e-12 * max(start - star, 1e-300))
        return bottom / 1.25, max(min(most - star, 3.0 * (start - star)), 2.0 * bottom) * 1.25
    span = max(start - least, 1e-9 * max(abs(start), 1.0))
    return least - 0.05 * span, min(most, start + 0.25 * span) + 0.05 * span


def plot(axes: Axes, runs: Sequence[RunTrace], x: str, star: float | None = None, gap: float | None = None) -> None:
    """Draw the mean losses with their bands, the first method on top; with `star`, f − f* on a logarithmic axis.

    With `gap`, a share of the height, names stand at the right edge, so far apart, each tied to the end of its line.
    """
    found = {method: mean_curve(own, x) for method, own in traces.by_method(runs).items()}
    curves: Curves = {method: curve for method, curve in found.items() if len(curve[0])}
    log, shift = star is not None, star or 0.0
    low, high = _bounds(curves, shift, log)
    end = max(float(curve[0][-1]) for curve in curves.values()) or 1.0
    axes.set(xlim=(0, end), yscale="log" if log else "linear", ylim=(low, high))
    steps = MaxNLocator(5, steps=(1, 2, 2.5, 5, 10))
    subs = (1.0, 2.0, 5.0) if high / max(low, 1e-300) < 1000 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9) if log else steps)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)))
    axes.xaxis.set_major_formatter(plain if x == "seconds" else EngFormatter(sep=""))
    axes.grid(axis="y", color=HAIR, linewidth=0.6)
    axes.set_axisbelow(True)
    for rank, (method, (at, mean, below, above)) in enumerate(curves.items()):
        style = look(method)
        if np.any(above > below):
            axes.fill_between(at, below - shift, above - shift, color=style.colour, alpha=0.14, linewidth=0, zorder=3)
        axes.plot(at, mean - shift, color=style.colour, linewidth=1.25 if rank else 2.0, zorder=20 - rank,
                  dashes=style.dashes or (None, None), solid_capstyle="round", dash_capstyle="butt")  # fmt: skip
    if gap is None:
        return
    lasts = [int(np.flatnonzero(np.isfinite(mean))[-1]) for _, mean, _, _ in curves.values()]
    ends = [(float(at[k]), min(max(float(mean[k]) - shift, low), high))
            for k, (at, mean, _, _) in zip(lasts, curves.values(), strict=True)]  # fmt: skip
    scale = math.log if log else float
    heights = [(scale(value) - scale(low)) / (scale(high) - scale(low)) for _, value in ends]
    write = partial(axes.annotate, xycoords="axes fraction", annotation_clip=False)
    for rank, (method, (last, value), height, place) in enumerate(
        zip(curves, ends, heights, spread(heights, gap, 0.0, 1.0), strict=True)
    ):
        style = look(method)
        if last < 0.97 * end:
            axes.plot([last, end], [value] * 2, color=style.colour, linewidth=0.6, alpha=0.5, dashes=(1, 2.5), zorder=2)
        axes.plot(last, value, "o", color=style.colour, markersize=3.0 if rank else 4.0, markeredgecolor="white",
                  markeredgewidth=0.6, clip_on=False, zorder=40 - rank)  # fmt: skip
        tie = {"arrowstyle": "-", "color": style.colour, "linewidth": 0.6, "alpha": 0.7, "shrinkA": 0, "shrinkB": 1}
        write("", (1.012, height), (1.06, place), textcoords="axes fraction", arrowprops=tie)
        weight = "normal" if rank else "bold"
        write(style.name, (1.075, place), color=style.colour, va="center", fontsize=7.5, fontweight=weight)


def _story(panels: Sequence[Sequence[RunTrace]]) -> str:
    """Say how many runs a picture shows."""
    counts = sorted({len(own) for runs in panels for own in traces.by_method(runs).values()})
    number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    story = "one run of each method" if counts == [1] else f"mean of {number} runs ± one standard deviation"
    begun, total = sum(run.done is None for runs in panels for run in runs), sum(map(len, panels))
    return story + (f"; {begun} of {total} runs not finished" if begun else "")


def sheet(figsize: tuple[float, float]) -> Figure:
    """Return an empty figure that needs no display."""
    figure = Figure(figsize=figsize, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _drawable(runs: Sequence[RunTrace]) -> bool:
    return any(len(run.known("paper_calls")[0]) for run in runs)


def draw_panel(runs: Sequence[RunTrace], star: float | None = None) -> Figure:
    """Return the sheet of one panel: the loss and f − f* over calls, evaluations and seconds.

    f* is found from these runs if `star` is not given.
    """
    if not _drawable(runs):
        raise ArgumentError(f"runs: none of the {len(runs)} runs of the panel has a loss to draw")
    shift = f_star(runs) if star is None else star
    with mpl.rc_context(_STYLE):
        figure = sheet((11.2, 6.5))
        grid = figure.add_gridspec(2, 3, left=0.062, right=0.935, top=0.83, bottom=0.08, wspace=0.42, hspace=0.17)
        figure.text(0.062, 0.953, runs[0].title, fontsize=15, fontweight="bold")
        story = " · ".join(filter(None, (runs[0].subtitle, _story([runs]))))
        figure.text(0.062, 0.918, story, color=QUIET, fontsize=9)
        for column, (x, name) in enumerate(AXES.items()):
            for row, given in enumerate((None, shift)):
                axes = figure.add_subplot(grid[row, column])
                plot(axes, runs, x, given, 0.068)
                axes.set_xlabel(name if row else "")
                axes.tick_params(labelbottom=bool(row))
                if column == 0:
                    words = f"f − f*,  f* = {shift:.5g}" if row else "training loss f"
                    axes.annotate(words, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points",
                                  fontweight="bold")  # fmt: skip
    return figure


def draw_figure(name: str, panels: Mapping[str, Sequence[RunTrace]], log: bool = False) -> Figure:
    """Return a figure as the paper shows it: its panels side by side, the loss over the calls the paper counts.

    With `log`, f − f* on a logarithmic axis; f* is found from the runs of each objective.
    """
    shown = [runs for runs in panels.values() if _drawable(runs)]
    if not shown:
        raise ArgumentError(f"panels: no run of {name} has a loss to draw")
    columns = min(len(shown), 3 if len(shown) != 4 else 2)
    rows = -(-len(shown) // columns)
    stars = f_stars(run for runs in shown for run in runs)
    looks = [look(method) for method in traces.by_method(run for runs in shown for run in runs)]
    with mpl.rc_context(_STYLE):
        width, height = max(0.84 + 3.35 * columns, 5.2), 1.35 + 2.95 * rows
        figure = sheet((width, height))
        left = 0.62 / width
        grid = figure.add_gridspec(rows, columns, left=left, right=1 - 0.22 / width, top=1 - 1.38 / height,
                                   bottom=0.5 / height, wspace=0.26, hspace=0.46)  # fmt: skip
        figure.text(left, 1 - 0.34 / height, figure_name(name), fontsize=13, fontweight="bold")
        story = f"{'f − f*' if log else 'training loss'} over {AXES['paper_calls']}\n{_story(shown)}"
        figure.text(left, 1 - 0.42 / height, story, color=QUIET, va="top", linespacing=1.4)
        lines = [
            Line2D([], [], color=style.colour, linewidth=1.8, dashes=style.dashes or (None, None)) for style in looks
        ]
        figure.legend(lines, [style.name for style in looks], ncols=len(looks), loc="center left", frameon=False,
                      bbox_to_anchor=(left, 1 - 0.86 / height), borderpad=0, borderaxespad=0, labelcolor="linecolor",
                      handlelength=2.4, columnspacing=1.2)  # fmt: skip
        for index, runs in enumerate(shown):
            axes = figure.add_subplot(grid[index // columns, index % columns])
            plot(axes, runs, "paper_calls", stars[runs[0].objective] if log else None)
            write = partial(axes.annotate, xycoords="axes fraction", textcoords="offset points")
            write(runs[0].title, (0, 1), (0, 15), fontsize=9.5, fontweight="bold")
            size = min(7.0, 7.0 * 62 / max(len(runs[0].subtitle), 1))  # a long one is written smaller, to fit its panel
            write(runs[0].subtitle, (0, 1), (0, 5), color=QUIET, fontsize=size)
    return figure


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG (300 dpi) and SVG, and return where."""
    paths = [folder / (re.sub(r"[^\w.-]+", "-", name) + suffix) for suffix in (".png", ".svg")]
    with mpl.rc_context(_STYLE):
        figure.savefig(paths[0], dpi=300)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def save_all(out: Path, order: Sequence[str] = ()) -> list[Path]:
    """Write every panel and every figure below ``OUT/figures``, and return where.

    A panel that is called as its figure gets ``-sheet`` after its name. Panels without a loss are left out. `order`
    says in which order the panels of a figure stand; without it they are sorted by name.
    """
    runs, folder = traces.read(out), Path(out) / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    stars = f_stars(runs)
    written: list[Path] = []
    for name, panels in traces.by_figure(runs, order).items():
        drawn = {panel: own for panel, own in panels.items() if _drawable(own)}
        for panel, own in drawn.items():
            sheets = draw_panel(own, stars[own[0].objective])
            written += save(sheets, folder, f"{panel}-sheet" if panel == name else panel)
        if drawn:
            written += save(draw_figure(name, drawn), folder, name)
    return written
