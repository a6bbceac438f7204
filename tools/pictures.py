"""Draw the pictures of the documentation: `python tools/pictures.py docs/pictures`.

saddle.png: the ways of gradient descent, Newton's method and `sanc.minimize` from a point beside a saddle.
cubic.png: along one direction, a function, its quadratic and its cubic models, and the steps they propose.
sigma.png: a run on Rosenbrock's function: the gradient, σ, and what became of each step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

import sanc

BLUE, ORANGE, GREY, INK = "#1f5fa8", "#d9731a", "#8b8b85", "#1f1f1d"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#b9b8b1"}
START = (0.02, 0.75)


def valley(x: torch.Tensor) -> torch.Tensor:
    """Two minima beside a saddle at the origin."""
    return (x[0] ** 2 - 1) ** 2 + 2 * x[1] ** 2 + 0.3 * x[0] ** 2 * x[1]


def way(step: str, steps: int) -> np.ndarray:
    """Return the points of gradient descent or of Newton's method."""
    x = torch.tensor(START, dtype=torch.float64)
    points = [x.numpy().copy()]
    for _ in range(steps):
        g = torch.autograd.functional.jacobian(valley, x)
        move = -0.05 * g
        if step == "newton":
            move = -torch.linalg.solve(torch.autograd.functional.hessian(valley, x), g)
        x = x + move
        points.append(x.numpy().copy())
    return np.array(points)


def sanc_way() -> np.ndarray:
    """Return the points of `sanc.minimize`."""
    points = [np.array(START)]
    sanc.minimize(valley, torch.tensor(START, dtype=torch.float64), callback=lambda x: points.append(x.numpy()))
    return np.array(points)


def saddle() -> Figure:
    """Draw three ways on one landscape."""
    figure = Figure(figsize=(6.4, 3.7), layout="constrained")
    axes = figure.add_subplot()
    x, y = np.meshgrid(np.linspace(-1.5, 1.5, 240), np.linspace(-0.75, 0.95, 160))
    z = (x**2 - 1) ** 2 + 2 * y**2 + 0.3 * x**2 * y
    axes.contour(x, y, z, levels=np.geomspace(0.01, 4, 16), colors="#cfcec8", linewidths=0.7)
    for points, colour, name, wide in (
        (way("gradient", 40), GREY, "gradient descent, 40 steps", 1.3),
        (way("newton", 8), ORANGE, "Newton's method: ends at the saddle", 1.3),
        (sanc_way(), BLUE, "sanc.minimize: ends at a minimum", 2.2),
    ):
        axes.plot(*points.T, "-o", color=colour, markersize=3.2, linewidth=wide, label=name)
    axes.plot(0, 0, "x", color=INK, markersize=8)
    axes.annotate("saddle", (0, 0), (0.06, -0.13), color=INK)
    for end in (-1, 1):
        axes.plot(end, -0.075, "*", color=INK, markersize=9)
    axes.annotate("minimum", (1, -0.075), (0.86, -0.27), color=INK)
    axes.set(xticks=[], yticks=[])
    axes.legend(loc="upper right", frameon=False)
    return figure


def cubic() -> Figure:
    """Draw the models along a line with negative curvature."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    t = np.linspace(-0.25, 2.2, 400)
    f = 0.25 * t**4 - 0.6 * t**2 - 0.25 * t
    quadratic = -0.25 * t - 0.6 * t**2
    axes.plot(t, f, color=INK, linewidth=2, label="f along the step")
    axes.plot(t, quadratic, color=ORANGE, linewidth=1.3, dashes=(4, 2), label="quadratic model: no minimum here")
    for sigma, colour in ((0.8, "#8fb4dd"), (2.0, BLUE)):
        model = quadratic + sigma / 3 * np.abs(t) ** 3
        best = t[np.argmin(model)]
        axes.plot(t, model, color=colour, linewidth=1.6, label=f"cubic model, σ = {sigma:g}")
        axes.plot(best, model.min(), "o", color=colour)
        axes.annotate(f"s, σ = {sigma:g}", (best, model.min()), (best - 0.1, model.min() + 0.1), color=colour)
    axes.axhline(0, color="#e5e4de", zorder=0)
    axes.set(ylim=(-1.9, 0.5), xlabel="length of the step", yticks=[])
    axes.legend(loc="lower left", frameon=False)
    return figure


def sigma() -> Figure:
    """Draw what a record contains of a run."""
    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    run = sanc.minimize(lambda x: 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2, start)
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    at = [record.iteration for record in run.history]
    axes.semilogy(at, [record.grad_norm for record in run.history], color=INK, label="‖g‖")
    axes.semilogy(at, [record.sigma for record in run.history], color=BLUE, label="σ")
    for branch, colour in (("very successful", BLUE), ("successful", "#8fb4dd"), ("stayed", ORANGE)):
        records = [record for record in run.history if record.branch == branch]
        if records:
            axes.plot([r.iteration for r in records], [r.grad_norm for r in records], "o", color=colour, label=branch)
    axes.set(xlabel="iteration")
    axes.legend(frameon=False, ncols=2)
    return figure


def main(folder: Path) -> None:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for draw in (saddle, cubic, sigma):
            draw().savefig(folder / f"{draw.__name__}.png", dpi=160)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
