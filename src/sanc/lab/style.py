"""Names, colours and line styles of methods and branches, and the style of figures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sanc import Branch

INK, QUIET, HAIR = "#222222", "#6B6B6B", "#E4E4E1"
"""Colours of text, secondary text and grid lines."""

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": "#B4B4B0",
    "axes.labelcolor": QUIET,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "sanc",
}
for _ticks in ("xtick", "ytick"):
    STYLE |= {f"{_ticks}.color": "#B4B4B0", f"{_ticks}.labelcolor": QUIET, f"{_ticks}.major.size": 3}
    STYLE[f"{_ticks}.major.width"] = 0.7

AXES: dict[str, str] = {
    "paper_calls": "calls, as the paper counts them",
    "calls": "evaluations of values, gradients and products",
    "seconds": "seconds",
}
"""Horizontal axes: the column of the trace and its label."""

RECORDS: dict[str, str] = {
    "sigma": "σ",
    "rho": "ρ, actual over predicted decrease",
    "grad_norm": "gradient norm ‖g‖",
    "ritz_value": "left-most Ritz value λ1",
    "step_norm": "step norm of the steps that moved",
}
"""Columns of a record that are drawn over a run, with their titles."""

LOGARITHMIC = ("sigma", "grad_norm", "step_norm")
"""Columns of a record that are positive and drawn on a logarithmic axis."""

BRANCHES: dict[str, str] = {
    Branch.VERY_SUCCESSFUL.value: "#1B4F8A",
    Branch.SUCCESSFUL.value: "#7FB2DD",
    Branch.UNCONDITIONAL.value: "#8E6FB5",
    Branch.AVERAGED.value: "#B9A7CF",
    Branch.CURVATURE.value: "#C8401B",
    Branch.GRADIENT.value: "#F2B84B",
    Branch.STAYED.value: "#D3D3D0",
}
"""Branches in the order of all tables and figures, with their colours."""

DARK_BRANCHES = dict(
    zip(BRANCHES, ("#4E8FD9", "#A9CFF2", "#C9A3F0", "#A78FC9", "#F0663C", "#F2B84B", "#5A5D63"), strict=True)
)
"""Colours of the branches on a dark background."""


@dataclass(frozen=True)
class MethodStyle:
    """How a method is drawn.

    Attributes
    ----------
    name : str
        Its name in figures.
    colour, dark : str
        Its colours on a white and on a dark background.
    dashes : tuple of float
        Its dashes, in line widths; empty for a solid line.
    """

    name: str
    colour: str
    dark: str
    dashes: tuple[float, ...] = ()


METHOD_STYLES: dict[str, MethodStyle] = {
    "sanc": MethodStyle("SANC", "#C8401B", "#FF7A50"),
    "sanc-paper": MethodStyle("SANC, paper", "#E39A3B", "#F5BC6B"),
    "scr": MethodStyle("SCR", "#0B63A5", "#5AA9F0"),
    "cr": MethodStyle("CR", "#4FB0E3", "#A5DCFA"),
    "crm": MethodStyle("CRM", "#C28A00", "#F0C04A", (4.0, 1.4)),
    "ncd": MethodStyle("NCD", "#0A9272", "#1FB890", (6.0, 1.4, 1.4, 1.4)),
    "sgd": MethodStyle("SGD", "#8A8A86", "#C2C2BC", (1.2, 1.4)),
    "adam": MethodStyle("Adam", "#B5679A", "#E39AC9", (2.5, 1.2)),
}
"""Styles of the methods, in the order of all tables and figures."""


_SETTING = re.compile(r"-(?=[A-Za-z_]\w*=)")
"""The place before a setting in the name of a method, such as ``sanc-eta1=0.2-sigma0=1e-05``."""

_SEQUENCE = (
    ("#FDB863", "#FDCB8C"), ("#E8743B", "#F59A6B"), ("#C0396B", "#E5739B"), ("#7B3294", "#B07CC6"),
    ("#2C5AA0", "#6F9BDB"), ("#1A8A8A", "#5CC4C4"), ("#4D7C2B", "#8DBB6A"), ("#333333", "#C9C9C9"),
)  # fmt: skip
"""Colours of the values of a setting in their order, on a white and on a dark background."""


def style_of(method: str) -> MethodStyle:
    """Return the style of a method. That of a method with settings has the colour of the method; see `styles_of`."""
    base, *settings = _SETTING.split(method)
    if settings and base in METHOD_STYLES:
        shown = ", ".join(setting.replace("=", " = ", 1) for setting in settings)
        return replace(METHOD_STYLES[base], name=f"{METHOD_STYLES[base].name}, {shown}")
    return METHOD_STYLES.get(method) or MethodStyle(method, "#5B4A9E", "#A99BF0", (3.0, 1.0, 1.0, 1.0))


def styles_of(methods: Iterable[str]) -> dict[str, MethodStyle]:
    """Return the styles of the methods of a plot. Those with settings get colours of a sequence, and then dashes."""
    styles = {method: style_of(method) for method in methods}
    varied = sorted((method for method in styles if "=" in method), key=rank)
    for place, method in enumerate(varied):
        cycle, index = divmod(place, len(_SEQUENCE))
        colour, dark = _SEQUENCE[index]
        styles[method] = replace(styles[method], colour=colour, dark=dark, dashes=(2.0 + cycle, 1.2) if cycle else ())
    return styles


def rank(method: str) -> tuple[int, list[tuple[str, float, str]], str]:
    """Return the sort key of a method: the order of `METHOD_STYLES`, the values of its settings, then the name."""
    base, *settings = _SETTING.split(method)
    place = list(METHOD_STYLES).index(base) if base in METHOD_STYLES else len(METHOD_STYLES)
    return place, [_setting_rank(*setting.partition("=")) for setting in settings], method


def _setting_rank(name: str, _: str, value: str) -> tuple[str, float, str]:
    """Return the sort key of a setting: numbers in their order, before other values."""
    try:
        return name, float(value), value
    except ValueError:
        return name, float("inf"), value


def figure_name(name: str) -> str:
    """Return the name of a figure as in the paper: Figure 2a for ``fig2a``, Figure 2a by eta1 for ``fig2a-by-eta1``."""
    figure, by, settings = name.partition("-by-")
    figure = figure.replace("fig", "Figure ", 1) if figure.startswith("fig") else figure
    return f"{figure} by {settings.replace('-', ' and ')}" if by else figure
