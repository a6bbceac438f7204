"""Compare methods on problems with many saddle points: time and evaluations to a fixed loss.

    python -m benchmarks.saddles                               # minutes on a CPU
    python -m benchmarks.saddles --problems factor --quick     # small sizes, seconds
    python -m benchmarks.saddles --from docs/results/saddles.json.xz    # table and figure of earlier runs

The problems:

linear       a deep linear network, 5 layers of 20 × 20 on whitened data, from near zero, where the gradient, the
             Hessian and two further derivatives vanish; every singular value of the map adds a saddle point
factor       ‖M − UUᵀ‖² with U of 100 × 5 from near zero, a strict saddle
poisson      a physics-informed network, tanh 1-32-32-1 in float64, for u'' = h on [−1, 1], all points in every step

All methods minimise the same function of one flat vector from the same start. An evaluation is a value, a gradient
(with its value), a Hessian product or a Gauss–Newton product. Adam runs with five learning rates on the first seed and
with the best one on the others; Gauss–Newton runs likewise with two accuracies of its linear solves. L-BFGS minimises
a multiple of the loss. Seconds are processor time on one thread. `sanc.minimize` has its default options except `tol`,
because a flat start would count as a stationary point with nonnegative curvature. --out writes saddles.json.xz and
saddles.png.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sanc
from benchmarks.common import StopRun, median, set_threads
from benchmarks.reporting import command, markdown_table, read_text, write_results

VARIANTS: dict[str, tuple[float, ...]] = {"adam": (1e-1, 3e-2, 1e-2, 3e-3, 1e-3), "gn": (0.3, 1e-4)}
"""Learning rates of Adam and accuracies of the linear solves of Gauss–Newton, compared on the first seed."""
LABELS = {"adam": "Adam", "lbfgs": "L-BFGS", "gn": "Gauss–Newton", "minimize": "sanc.minimize"}
SYMBOLS = {"adam": "lr", "gn": "CG to"}
COLOURS = {"adam": "#B07D2B", "lbfgs": "#4C8C6B", "gn": "#7A68A6", "minimize": "#C0392B"}
NEGATIVE = "λ < 0"
"""Component of a cubic step along directions of negative curvature."""

# ---------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    """A sum of squares ½‖r(x)‖² of a flat vector, its start, its target loss and the time limit of a run."""

    title: str
    x0: Tensor
    residual: Callable[[Tensor], Tensor]
    target: float
    limit: float

    def loss(self, x: Tensor) -> Tensor:
        """½‖r(x)‖²."""
        return 0.5 * self.residual(x).square().sum()


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def linear(quick: bool, seed: int) -> Problem:
    layers, width = (3, 5) if quick else (5, 20)
    scale = 1e-1 if quick else 1e-2
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(_normal(generator, width, width))[0] for _ in range(2))
    wanted = left @ torch.diag(torch.linspace(1, 5, width, dtype=torch.float64)) @ right
    x0 = scale * _normal(generator, layers * width * width)

    def residuals(x: Tensor) -> Tensor:
        first, *others = x.view(layers, width, width)
        product = first
        for weight in others:
            product = weight @ product
        return (product - wanted) / math.sqrt(width)  # whitened inputs: the mean over the data is this norm

    title = f"deep linear network, {layers} layers of {width} × {width}, start of size {scale:g}"
    return Problem(title, x0, residuals, 1e-4 if quick else 1e-6, 25.0)


def factor(quick: bool, seed: int) -> Problem:
    n, rank, scale = (15, 2, 1e-3) if quick else (100, 5, 1e-6)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(_normal(generator, n, rank))[0]
    planted = basis * torch.linspace(1, 3, rank, dtype=torch.float64).sqrt()
    matrix = planted @ planted.T
    x0 = scale * _normal(generator, n * rank)

    def residuals(x: Tensor) -> Tensor:
        u = x.view(n, rank)
        return math.sqrt(2) * (u @ u.T - matrix)

    title = f"matrix factorisation, {n} × {n} of rank {rank}, start of size {scale:g}"
    return Problem(title, x0, residuals, 1e-8, 20.0)


def poisson(quick: bool, seed: int) -> Problem:
    width, points, waves = (8, 30, 1) if quick else (32, 128, 2)
    sizes = (1, width, width, 1)
    generator = torch.Generator().manual_seed(seed)
    start = []
    for i, o in pairwise(sizes):
        start += [_normal(generator, o * i) * math.sqrt(2 / (i + o)), torch.zeros(o, dtype=torch.float64)]
    x0 = torch.cat(start)
    t = torch.linspace(-1, 1, points, dtype=torch.float64)[:, None]
    height = (waves * math.pi) ** 2  # amplitude of u'' for u = sin(waves π t)
    source = torch.sin(waves * math.pi * t)
    counts = [count for i, o in pairwise(sizes) for count in (i * o, o)]

    def residuals(x: Tensor) -> Tensor:
        parts = x.split(counts)
        value, first, second = t, torch.ones_like(t), torch.zeros_like(t)  # u, u' and u'' of the layers so far
        for layer, (weight, bias) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            weight = weight.view(sizes[layer + 1], sizes[layer])
            value, first, second = value @ weight.T + bias, first @ weight.T, second @ weight.T
            if layer < len(sizes) - 2:
                value = torch.tanh(value)
                factor = 1 - value * value
                first, second = factor * first, factor * second - 2 * value * factor * first * first
        inside = (second / height + source) * math.sqrt(2 / points)
        return torch.cat([inside[:, 0], value[0], value[-1]])

    title = f"physics-informed network 1-{width}-{width}-1, u'' = h, u = sin({waves}πt), {points} points"
    return Problem(title, x0, residuals, 1e-2 if quick else 1e-6, 30.0)


PROBLEMS: dict[str, Callable[[bool, int], Problem]] = {"linear": linear, "factor": factor, "poisson": poisson}

# ---------------------------------------------------------------------- methods


@dataclass
class Trace:
    """Losses and steps of a run over processor time.

    Attributes
    ----------
    points : list
        (seconds, evaluations, loss) of each evaluation or iteration.
    steps : Counter
        Steps of `sanc.minimize` by branch; `NEGATIVE` counts the cubic steps whose predicted decrease is mostly along
        negative curvature.
    decrease : Counter
        Decrease of the loss by branch; `NEGATIVE` is the part of cubic steps along negative curvature.
    marks : list
        (seconds, evaluations, loss, kind) of steps along negative curvature, of kind "curvature" or `NEGATIVE`.
    """

    problem: Problem
    limit: float
    points: list[tuple[float, float, float]] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    decrease: Counter[str] = field(default_factory=Counter)
    marks: list[tuple[float, float, float, str]] = field(default_factory=list)
    ending: str = ""
    _start: float = field(default_factory=time.process_time)

    @property
    def seconds(self) -> float:
        return time.process_time() - self._start

    def add(self, evaluations: float, loss: float) -> None:
        """Append a loss; end the run at the target, at the limit or if the loss is not finite."""
        self.points.append((self.seconds, evaluations, loss))
        if loss <= self.problem.target:
            self.stop("target")
        if not math.isfinite(loss):
            self.stop("not finite")
        self.check()

    def check(self) -> None:
        """End the run at its limit."""
        if self.seconds >= self.limit:
            self.stop("limit")

    def stop(self, ending: str) -> None:
        """End the run."""
        self.ending = ending
        raise StopRun

    def count(self, record: sanc.Record, before: float, after: float) -> None:
        """Attribute the decrease of a step of `sanc.minimize` to its branch."""
        branch, share = record.branch.value, record.curvature_share
        self.steps[branch] += 1
        self.decrease[branch] += before - after  # type: ignore[assignment]
        kind = branch if branch == "curvature" else NEGATIVE if share > 0.5 else ""
        if branch != "curvature" and share > 0.0:
            self.steps[NEGATIVE] += share > 0.5
            self.decrease[NEGATIVE] += share * (before - after)  # type: ignore[assignment]
        if kind and after < before:
            self.marks.append((self.seconds, record.calls.total, after, kind))


def run_adam(problem: Problem, trace: Trace, seed: int, variant: float) -> None:
    x = torch.nn.Parameter(problem.x0.clone())
    adam = torch.optim.Adam([x], lr=variant)
    evaluations = 0
    while True:
        adam.zero_grad()
        loss = problem.loss(x)
        loss.backward()
        evaluations += 1
        trace.add(evaluations, loss.item())
        adam.step()


def run_lbfgs(problem: Problem, trace: Trace, seed: int, variant: float) -> None:
    x = torch.nn.Parameter(problem.x0.clone())
    lbfgs = torch.optim.LBFGS([x], line_search_fn="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0)
    evaluations, lowest = 1, math.inf
    problem.loss(x).backward()
    assert x.grad is not None
    scale = 1e8 / float(x.grad.norm())  # torch skips the update of the memory if yᵀs ≤ 1e-10

    def closure() -> Tensor:
        nonlocal evaluations, lowest
        lbfgs.zero_grad()
        loss = problem.loss(x)
        (scale * loss).backward()
        evaluations, lowest = evaluations + 1, min(lowest, loss.item())
        trace.add(evaluations, loss.item())
        return scale * loss.detach()

    failures = 0
    while failures < 3:
        before = lowest
        lbfgs.step(closure)
        failures = 0 if lowest < before else failures + 1
        if failures:
            lbfgs.state.clear()  # the line search failed: restart from steepest descent
    trace.stop("stagnated")


def run_gn(problem: Problem, trace: Trace, seed: int, variant: float) -> None:
    """Run Levenberg–Marquardt: steps by conjugate gradients on JᵀJ + λ, λ from the ratio of decreases."""
    x, damping, evaluations = problem.x0.clone(), 1.0, 0
    while True:
        x.requires_grad_()
        r = problem.residual(x)
        dual = torch.zeros_like(r, requires_grad=True)
        (linear_in_dual,) = torch.autograd.grad(r, x, dual, create_graph=True)  # Jᵀ·dual, whose derivative is J
        (g,) = torch.autograd.grad(r, x, r.detach(), retain_graph=True)
        loss = 0.5 * float(r.detach().square().sum())
        evaluations += 1
        trace.add(evaluations, loss)
        while True:
            p, used, predicted = _conjugate_gradients(r, x, dual, linear_in_dual, g, damping, variant)
            evaluations += used
            with torch.no_grad():
                trial = x + p
                value = float(problem.loss(trial))
            evaluations += 1
            trace.check()
            rho = (loss - value) / predicted if predicted > 0 else -1.0
            if rho > 0.75:
                damping = max(damping / 5, 1e-15)
            elif not rho > 0.25:
                damping *= 3
            if rho > 1e-4:
                break
            if damping > 1e12:
                trace.stop("stagnated")
        x = trial


def _conjugate_gradients(
    r: Tensor, x: Tensor, dual: Tensor, linear_in_dual: Tensor, g: Tensor, damping: float, accuracy: float
) -> tuple[Tensor, int, float]:
    """Solve (JᵀJ + λ)p = −g to `accuracy`·‖g‖; return p, the number of products and the decrease of ½‖r + Jp‖²."""
    p, residue = torch.zeros_like(g), -g
    direction, square = residue.clone(), float(g @ g)
    target, used = accuracy * accuracy * square, 0
    while used < 500 and square > target:
        (along,) = torch.autograd.grad(linear_in_dual, dual, direction, retain_graph=True)
        (product,) = torch.autograd.grad(r, x, along, retain_graph=True)
        product += damping * direction
        used += 1
        alpha = square / float(direction @ product)
        p = p + alpha * direction
        residue = residue - alpha * product
        square, old = float(residue @ residue), square
        direction = residue + (square / old) * direction
    # gᵀp + ½pᵀ(JᵀJ)p = ½(gᵀp − residueᵀp) − ½λ‖p‖²
    return p, used, -0.5 * float((g - residue) @ p) + 0.5 * damping * float(p @ p)


def run_minimize(problem: Problem, trace: Trace, seed: int, variant: float) -> None:
    last = float(problem.loss(problem.x0))

    def callback(intermediate_result: Any) -> None:
        nonlocal last
        record, loss = intermediate_result.record, float(intermediate_result.fun)
        trace.count(record, last, loss)
        last = loss
        trace.add(record.calls.total, loss)

    answer = sanc.minimize(problem.loss, problem.x0, tol=1e-30, callback=callback, seed=seed, certify=False)
    trace.stop(answer.status.name.lower().replace("_", " "))


METHODS = {"adam": run_adam, "lbfgs": run_lbfgs, "gn": run_gn, "minimize": run_minimize}

# ---------------------------------------------------------------------- runs


def run(problem: Problem, method: str, seed: int, limit: float, variant: float = 0.0) -> dict[str, Any]:
    """Make one run, and return it as plain numbers."""
    start = float(problem.loss(problem.x0))
    _warm_up(problem)
    trace = Trace(problem, limit)
    trace.points.append((0.0, 0.0, start))
    with contextlib.suppress(StopRun):
        METHODS[method](problem, trace, seed, variant)
    finite = [loss for _, _, loss in trace.points if math.isfinite(loss)]
    reached = next((point for point in trace.points if point[2] <= problem.target), None)
    return {
        "method": method,
        "seed": seed,
        "variant": variant or None,
        "ending": trace.ending,
        "start": start,
        "final": min(finite),
        "seconds": trace.points[-1][0],
        "evaluations": trace.points[-1][1],
        "seconds_to": reached and reached[0],
        "evaluations_to": reached and reached[1],
        "steps": dict(trace.steps),
        "decrease": dict(trace.decrease),
        "points": _thin(trace.points),
        "marks": trace.marks[:: 1 + len(trace.marks) // 1000],
    }


def _warm_up(problem: Problem) -> None:
    """Evaluate once with each library, so that no run pays for loading."""
    x = torch.nn.Parameter(problem.x0.clone())
    problem.loss(x).backward()
    torch.optim.Adam([x], lr=1e-9).step()
    sanc.minimize(problem.loss, problem.x0, max_iter=1, certify=False)


def _thin(points: list[tuple[float, float, float]], most: int = 1500) -> list[tuple[float, ...]]:
    """Return the lowest loss so far at points that differ enough from the previous one."""
    kept: list[tuple[float, ...]] = []
    lowest = math.inf
    for index, (seconds, evaluations, loss) in enumerate(points):
        if not math.isfinite(loss):
            continue
        lowest = min(lowest, loss)
        far = not kept or seconds > 1.005 * kept[-1][0] or len(points) <= most or index == len(points) - 1
        if far or lowest < 0.9 * kept[-1][2]:
            kept.append((seconds, evaluations, lowest))
    return kept


def order(result: dict[str, Any]) -> tuple[bool, float]:
    """Sort runs: those that reach the target by time, then the others by their loss."""
    seconds = result["seconds_to"]
    return seconds is None, result["final"] if seconds is None else seconds


def run_all(names: Sequence[str], seeds: int, quick: bool) -> dict[str, Any]:
    """Make all runs of the problems."""
    document: dict[str, Any] = {"torch": torch.__version__, "sanc": sanc.__version__, "problems": {}}
    for name in names:
        entry: dict[str, Any] = {"runs": []}
        document["problems"][name] = entry
        best: dict[str, float] = {}
        for seed in range(seeds):
            problem = PROBLEMS[name](quick, seed)
            limit = min(problem.limit, 0.1 if quick else math.inf)
            if seed == 0:
                entry |= {"title": problem.title, "target": problem.target, "dim": problem.x0.numel(), "limit": limit}
                print(f"\n{heading(name, entry)}, {limit:g} s a run", flush=True)
            for method in METHODS:
                variants = VARIANTS.get(method, (0.0,))
                if quick and method in VARIANTS:
                    variants = variants[1:3]
                made: list[dict[str, Any]] = []
                for variant in variants if seed == 0 else (best[method],):
                    faster = [done["seconds_to"] or limit for done in made]  # a slower variant need not finish
                    made.append(run(problem, method, seed, min([limit, *faster]), variant))
                    print_run(made[-1])
                entry["runs"] += made
                if seed == 0:
                    best[method] = min(made, key=order)["variant"] or 0.0
    return document


def print_run(result: dict[str, Any]) -> None:
    """Print a line about a run."""
    words = "target not reached"
    if result["seconds_to"] is not None:
        words = f"target in {result['seconds_to']:.2f} s and {result['evaluations_to']:,.0f} evaluations"
    print(
        f"  seed {result['seed']}  {label(result):<22} {words}; loss {result['final']:.3g} after "
        f"{result['seconds']:.1f} s and {result['evaluations']:,.0f} evaluations ({result['ending']})",
        flush=True,
    )


# ---------------------------------------------------------------------- tables and figure


def heading(name: str, entry: dict[str, Any]) -> str:
    """Return the name of a problem, its number of variables and its target."""
    return f"**{name}**: {entry['title']}; {entry['dim']:,} variables, to a loss of {entry['target']:g}"


def label(result: dict[str, Any]) -> str:
    """Return the name of a method with its variant."""
    method, variant = result["method"], result["variant"]
    return LABELS[method] + (f", {SYMBOLS[method]} {variant:g}" if variant else "")


def chosen(entry: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Group the runs by method, each with the variant that was best on the first seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in entry["runs"]:
        groups.setdefault(result["method"], []).append(result)
    for method, runs in groups.items():
        best = min((result for result in runs if result["seed"] == 0), key=order)["variant"]
        groups[method] = [result for result in runs if result["variant"] == best]
    return groups


def table(name: str, entry: dict[str, Any]) -> str:
    """Return a table of medians over the seeds, and a summary of the steps of `sanc.minimize`."""
    cells = []
    for runs in chosen(entry).values():
        reached = [result for result in runs if result["seconds_to"] is not None]
        to_target = ["—", "—"]
        if reached:
            seconds, evaluations = (
                median([result[key] for result in reached]) for key in ("seconds_to", "evaluations_to")
            )
            share = f" ({len(reached)} of {len(runs)} runs)" if len(reached) < len(runs) else ""
            to_target = [f"{seconds:.2f}{share}", f"{evaluations:,.0f}"]
        endings = ", ".join(sorted({result["ending"] for result in runs}))
        cells.append([label(runs[0]), *to_target, f"{median([result['final'] for result in runs]):.2g}", endings])
    head = ("method", "seconds to target", "evaluations to target", "final loss", "ended by")
    return f"{heading(name, entry)}\n\n{markdown_table(head, cells)}\n\n{step_summary(entry)}"


def step_summary(entry: dict[str, Any]) -> str:
    """Return the branches of `sanc.minimize` and the decrease along negative curvature."""
    runs = chosen(entry)["minimize"]
    steps, decrease = Counter[str](), Counter[str]()
    for result in runs:
        steps.update(result["steps"])
        decrease.update(result["decrease"])
    total = sum(result["start"] - result["final"] for result in runs) or 1.0
    mostly = steps.pop(NEGATIVE, 0)
    branches = ", ".join(f"{number} {branch}" for branch, number in sorted(steps.items()))
    return (
        f"`sanc.minimize` takes {steps.total()} steps ({branches}). The curvature branch contributes "
        f"{decrease['curvature'] / total:.1%} of the decrease and negative curvature in cubic steps "
        f"{decrease[NEGATIVE] / total:.1%}; in {mostly} of them it accounts for most of the predicted decrease."
    )


def figure(document: dict[str, Any]) -> Any:
    """Draw the loss over seconds and over evaluations, first seed, with steps along negative curvature marked."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    problems = document["problems"]
    drawing = Figure(figsize=(9.2, 0.5 + 2.9 * len(problems)), layout="constrained")
    grid = drawing.subplots(len(problems), 2, squeeze=False)
    kinds = {NEGATIVE: (".", "cubic step, mostly along λ < 0"), "curvature": ("v", "curvature step")}
    for row, (name, entry) in zip(grid, problems.items(), strict=True):
        handles = {}
        for column, (axes, unit) in enumerate(zip(row, ("seconds", "evaluations"), strict=True)):
            axes.set(xscale="log", yscale="log", xlabel=unit, ylabel="loss")
            axes.axhline(entry["target"], color="grey", linewidth=0.8, linestyle=":")
            for method, runs in chosen(entry).items():
                result = next(result for result in runs if result["seed"] == 0)
                points = np.array([point for point in result["points"] if point[column] > 0])
                if not len(points):
                    continue
                (handles[method],) = axes.plot(
                    points[:, column], points[:, 2], color=COLOURS[method], label=label(result),
                    linewidth=1.8 if method == "minimize" else 1.2,
                )  # fmt: skip
                for kind, (marker, text) in kinds.items():
                    marks = np.array([mark[:3] for mark in result["marks"] if mark[3] == kind])
                    if len(marks):
                        axes.plot(marks[:, column], marks[:, 2], marker, color="black", markersize=5, zorder=7)
                        marks_style = {"linestyle": "", "marker": marker, "color": "black", "label": text}
                        handles[kind] = Line2D([], [], **marks_style)
        row[0].set_title(f"{name}: {entry['title']}", loc="left", fontsize=8.5)
        row[1].legend(handles=list(handles.values()), frameon=False, fontsize=7.5)
    return drawing


# ---------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="small sizes, seconds", out="saddles.json.xz and saddles.png")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="by default all")
    parser.add_argument("--seeds", type=int, default=1, help="number of starts")
    parser.add_argument("--from", dest="results", type=Path, metavar="FILE", help="table and figure of earlier runs")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    if options.results is not None:
        document = json.loads(read_text(options.results))
    else:
        set_threads(1)
        document = run_all(options.problems, options.seeds, options.quick)
        write_results(options.out, {"saddles.json.xz": document})
    for name, entry in document["problems"].items():
        print(f"\n{table(name, entry)}")
    write_results(options.out, {"saddles.png": lambda: figure(document)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
