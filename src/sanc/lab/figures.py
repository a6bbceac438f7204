"""Draw the runs of the laboratory for print: a sheet for every panel, and the paper's figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sanc import ArgumentError
from sanc.lab import traces
from sanc.lab.style import HAIR, QUIET, STYLE, figure_name, spread
from sanc.lab.traces import AXES, Floats, RunTrace

__all__ = ["draw_figure", "draw_panel", "figure_name", "save_all"]

_STYLE: Any = STYLE | {"font.size": 8, "text.parse_math": False}

_STEPS = (1, 2, 2.5, 5, 10)

Curves = dict[str, tuple[Floats, Floats, Floats, Floats]]


def curves_of(runs: Sequence[RunTrace], x: str) -> Curves:
    curves = {method: traces.mean_curve(own, x) for method, own in traces.by_method(runs).items()}
    return {method: curve for method, curve in curves.items() if len(curve[0])}


def bounds_of(curves: Curves, star: float, log: bool) -> tuple[float, float]:
    """Bounds of the y-axis; a method that rises far above the start may leave the picture at the top."""
    start = max(float(mean[0]) for _, mean, _, _ in curves.values())
    least = min(float(np.nanmin(low)) for _, _, low, _ in curves.values())
    most = max(float(np.nanmax(high)) for _, _, _, high in curves.values())
    if log:
        floor = min(float(np.nanmin(mean)) for _, mean, _, _ in curves.values()) - star
        bottom = max(least - star, floor / 2, 1e-12 * max(start - star, 1e-300))  # a band may leave at the bottom
        top = max(min(most - star, 3.0 * (start - star)), 2.0 * bottom)
        return bottom / 1.25, top * 1.25
    span = max(start - least, 1e-9 * max(abs(start), 1.0))
    return least - 0.05 * span, min(most, start + 0.25 * span) + 0.05 * span


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def tick_text(value: float, _: object = None) -> str:
    """Write a tick: plain numbers near 1, k and M for large ones, powers of ten for the rest."""
    size = abs(value)
    if 1e6 <= size < 1e10:
        return f"{value / 1e6:g}M"
    if 1e3 <= size < 1e6:
        return f"{value / 1e3:g}k"
    if size == 0 or 1e-3 <= size < 1e3:
        return f"{value:.6g}"
    power = math.floor(math.log10(size) + 1e-9)
    front = value / 10.0**power
    return ("" if abs(front - 1) < 1e-9 else f"{front:.3g}·") + "10" + str(power).translate(_SUPERSCRIPTS)


def frame(axes: Axes, x_end: float, bounds: tuple[float, float], log: bool) -> None:
    axes.set(xlim=(0, x_end or 1.0), ylim=bounds)
    if log:
        axes.set_yscale("log")
        few = bounds[1] / bounds[0] < 1000
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=9))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
        axes.set_ylim(bounds)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_text))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(tick_text))
    axes.grid(axis="y", color=HAIR, linewidth=0.6)
    axes.set_axisbelow(True)


def draw_lines(axes: Axes, curves: Curves, shift: float) -> None:
    """Draw means and bands; the first method lies on top."""
    for rank, (method, (x, mean, low, high)) in enumerate(curves.items()):
        style, lead = traces.look(method), rank == 0
        if np.any(high > low):
            axes.fill_between(x, low - shift, high - shift, color=style.colour, alpha=0.14, linewidth=0, zorder=3)
        axes.plot(x, mean - shift, color=style.colour, linewidth=2.0 if lead else 1.25, zorder=20 - rank,
                  dashes=style.dashes or (None, None), solid_capstyle="round", dash_capstyle="butt")  # fmt: skip


def draw_labels(axes: Axes, curves: Curves, shift: float, bounds: tuple[float, float], log: bool, gap: float) -> None:
    """Write the names at the right edge, moved apart, each tied to the end of its line."""
    low, high = bounds
    end = axes.get_xlim()[1]
    ends: list[tuple[str, float, float, float]] = []
    for method, (x, mean, _, _) in curves.items():
        last = int(np.flatnonzero(np.isfinite(mean))[-1])
        value = min(max(float(mean[last]) - shift, low), high)
        height = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        ends.append((method, float(x[last]), value, height))
    places = spread([height for *_, height in ends], gap, 0.0, 1.0)
    for rank, ((method, x_last, value, height), place) in enumerate(zip(ends, places, strict=True)):
        style, lead = traces.look(method), rank == 0
        if x_last < 0.97 * end:
            axes.plot([x_last, end], [value] * 2, color=style.colour, linewidth=0.6, alpha=0.5, dashes=(1, 2.5),
                      zorder=2)  # fmt: skip
        axes.plot(x_last, value, "o", color=style.colour, markersize=4.0 if lead else 3.0, markeredgecolor="white",
                  markeredgewidth=0.6, clip_on=False, zorder=40 - rank)  # fmt: skip
        axes.annotate("", (1.012, height), (1.06, place), xycoords="axes fraction", textcoords="axes fraction",
                      arrowprops={"arrowstyle": "-", "color": style.colour, "linewidth": 0.6, "alpha": 0.7,
                                  "shrinkA": 0, "shrinkB": 1})  # fmt: skip
        axes.annotate(style.name, (1.075, place), xycoords="axes fraction", color=style.colour, va="center",
                      fontsize=7.5, fontweight="bold" if lead else "normal", annotation_clip=False)  # fmt: skip


def _seeds(*panels: Sequence[RunTrace]) -> str:
    counts = {len(own) for runs in panels for own in traces.by_method(runs).values()}
    if counts == {1}:
        return "one run of each method"
    most, least = max(counts), min(counts)
    number = f"{most}" if most == least else f"{least} to {most}"
    return f"mean of {number} runs ± one standard deviation"


def _under_way(runs: Sequence[RunTrace]) -> str:
    count = sum(run.done is None for run in runs)
    return f"; {count} of {len(runs)} runs not finished" if count else ""


def sheet(figsize: tuple[float, float]) -> Figure:
    figure = Figure(figsize=figsize, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def draw_panel(runs: Sequence[RunTrace], star: float | None = None) -> Figure:
    """Return the sheet of one panel: the loss and f − f* over calls, evaluations and seconds.

    f* is found from these runs if `star` is not given.
    """
    if not any(len(run.known("paper_calls")[0]) for run in runs):
        raise ArgumentError(f"runs: none of the {len(runs)} runs of the panel has a loss to draw")
    shift = traces.f_star(runs) if star is None else star
    with mpl.rc_context(_STYLE):
        figure = sheet((11.2, 6.5))
        grid = figure.add_gridspec(2, 3, left=0.062, right=0.935, top=0.83, bottom=0.08, wspace=0.42, hspace=0.17)
        first = runs[0]
        figure.text(0.062, 0.953, first.title, fontsize=15, fontweight="bold")
        story = " · ".join(part for part in (first.subtitle, _seeds(runs) + _under_way(runs)) if part)
        figure.text(0.062, 0.918, story, color=QUIET, fontsize=9)
        for column, (x, name) in enumerate(AXES.items()):
            curves = curves_of(runs, x)
            end = max(float(curve[0][-1]) for curve in curves.values())
            for row, log in enumerate((False, True)):
                axes = figure.add_subplot(grid[row, column])
                bounds = bounds_of(curves, shift, log)
                frame(axes, end, bounds, log)
                draw_lines(axes, curves, shift if log else 0.0)
                draw_labels(axes, curves, shift if log else 0.0, bounds, log, 0.068)
                if log:
                    axes.set_xlabel(name)
                else:
                    axes.tick_params(labelbottom=False)
                if column == 0:
                    axes.annotate(f"f − f*,  f* = {shift:.5g}" if log else "training loss f", (0, 1), (0, 6),
                                  xycoords="axes fraction", textcoords="offset points", fontweight="bold")  # fmt: skip
    return figure


def _key(figure: Figure, methods: Sequence[str], x: float, y: float) -> None:
    """Write the key of a figure in one line, from (x, y) in inches."""
    width, height = figure.get_size_inches()
    for rank, method in enumerate(methods):
        style = traces.look(method)
        figure.add_artist(Line2D([x / width, (x + 0.28) / width], [y / height] * 2, color=style.colour,
                                 linewidth=2.0 if rank == 0 else 1.4, dashes=style.dashes or (None, None)))  # fmt: skip
        figure.text((x + 0.34) / width, y / height, style.name, color=style.colour, va="center_baseline",
                    fontweight="bold" if rank == 0 else "normal")  # fmt: skip
        x += 0.34 + 0.085 * len(style.name) + 0.2


def draw_figure(name: str, panels: Mapping[str, Sequence[RunTrace]], log: bool = False) -> Figure:
    """Return a figure as the paper shows it: its panels side by side, the loss over the calls the paper counts.

    With `log`, f − f* on a logarithmic axis; f* is found from the runs of each objective.
    """
    shown = {panel: runs for panel, runs in panels.items() if any(len(run.known("paper_calls")[0]) for run in runs)}
    if not shown:
        raise ArgumentError(f"panels: no run of {name} has a loss to draw")
    columns = min(len(shown), 3 if len(shown) != 4 else 2)
    rows = -(-len(shown) // columns)
    stars = traces.f_stars(run for runs in shown.values() for run in runs)
    methods = traces.by_method(run for runs in shown.values() for run in runs)
    with mpl.rc_context(_STYLE):
        width, height = max(0.84 + 3.35 * columns, 5.2), 1.35 + 2.95 * rows
        figure = sheet((width, height))
        grid = figure.add_gridspec(rows, columns, left=0.62 / width, right=1 - 0.22 / width, top=1 - 1.38 / height,
                                   bottom=0.5 / height, wspace=0.26, hspace=0.46)  # fmt: skip
        left = 0.62 / width
        figure.text(left, 1 - 0.34 / height, figure_name(name), fontsize=13, fontweight="bold")
        story = f"{'f − f*' if log else 'training loss'} over {AXES['paper_calls']}\n{_seeds(*shown.values())}"
        story += _under_way([run for runs in shown.values() for run in runs])
        figure.text(left, 1 - 0.42 / height, story, color=QUIET, va="top", linespacing=1.4)
        _key(figure, list(methods), 0.62, height - 0.86)
        for index, (panel, runs) in enumerate(shown.items()):
            axes = figure.add_subplot(grid[index // columns, index % columns])
            curves = curves_of(runs, "paper_calls")
            shift = stars[runs[0].objective] if log else 0.0
            bounds = bounds_of(curves, shift, log)
            frame(axes, max(float(curve[0][-1]) for curve in curves.values()), bounds, log)
            draw_lines(axes, curves, shift)
            title = runs[0].title or panel
            axes.annotate(title, (0, 1), (0, 15), xycoords="axes fraction", textcoords="offset points", fontsize=9.5,
                          fontweight="bold")  # fmt: skip
            size = min(7.0, 7.0 * 62 / max(len(runs[0].subtitle), 1))  # a long one is written smaller, to fit its panel
            axes.annotate(runs[0].subtitle, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points",
                          color=QUIET, fontsize=size)  # fmt: skip
    return figure


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    stem = re.sub(r"[^\w.-]+", "-", name)
    paths = [folder / f"{stem}.png", folder / f"{stem}.svg"]
    with mpl.rc_context(_STYLE):
        figure.savefig(paths[0], dpi=300)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def save_all(out: Path, order: Sequence[str] = ()) -> list[Path]:
    """Write every panel and every figure below ``OUT/figures`` as PNG (300 dpi) and SVG, and return where.

    A panel that is called as its figure gets ``-sheet`` after its name. Panels without a loss are left out. `order`
    says in which order the panels of a figure stand; without it they are sorted by name.
    """
    runs = traces.read(out)
    folder = Path(out) / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    stars = traces.f_stars(runs)
    written: list[Path] = []
    for name, panels in traces.by_figure(runs, order).items():
        drawn = {panel: own for panel, own in panels.items() if any(len(run.known("paper_calls")[0]) for run in own)}
        for panel, own in drawn.items():
            stem = f"{panel}-sheet" if panel == name else panel
            written += save(draw_panel(own, stars[own[0].objective]), folder, stem)
        if drawn:
            written += save(draw_figure(name, drawn), folder, name)
    return written
