"""How pictures look: ink, type, and labels that do not cover each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INK, QUIET, HAIR = "#222222", "#6B6B6B", "#E4E4E1"

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": "#B4B4B0",
    "axes.labelcolor": QUIET,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#B4B4B0",
    "ytick.color": "#B4B4B0",
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "svg.hashsalt": "sanc",
}


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions apart until neighbours are at least `gap` from each other, and within [low, high] if they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[tuple[float, int]] = []  # (centre, members) of blocks of labels that touch
    for i in order:
        centre, size = wanted[i], 1
        while True:
            half = gap * (size - 1) / 2
            centre = max(low + half, min(centre, high - half))
            if not groups or groups[-1][0] + gap * (groups[-1][1] - 1) / 2 + gap <= centre - half + 1e-12:
                break
            other, members = groups.pop()
            centre, size = (other * members + centre * size) / (members + size), size + members
        groups.append((centre, size))
    places = [centre + gap * (k - (size - 1) / 2) for centre, size in groups for k in range(size)]
    result = [0.0] * len(wanted)
    for i, place in zip(order, places, strict=True):
        result[i] = place
    return result
