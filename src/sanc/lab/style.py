"""Names, colours and line styles of methods and branches, and the style of figures."""

from __future__ import annotations

from dataclasses import dataclass
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
    """Name of a method, its colours on a white and on a dark background, and its dashes in line widths."""

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


def style_of(method: str) -> MethodStyle:
    """Return the style of a method."""
    return METHOD_STYLES.get(method) or MethodStyle(method, "#5B4A9E", "#A99BF0", (3.0, 1.0, 1.0, 1.0))


def rank(method: str) -> tuple[int, str]:
    """Return the sort key of a method: the order of `METHOD_STYLES`, then the name."""
    return (list(METHOD_STYLES).index(method) if method in METHOD_STYLES else len(METHOD_STYLES), method)


def figure_name(name: str) -> str:
    """Return the name of a figure as in the paper: Figure 2a for ``fig2a``."""
    return name.replace("fig", "Figure ", 1) if name.startswith("fig") else name
