"""Where saddle points are the problem: time and evaluations to a fixed loss, beside Adam, L-BFGS and Gauss–Newton.

    python -m benchmarks.saddles                                   # linear, factor and poisson: minutes on a CPU
    python -m benchmarks.saddles --problems autoencoder --data-dir DIR --device cuda --minutes 1.5
    python -m benchmarks.saddles --quick                           # tiny sizes, seconds
    python -m benchmarks.saddles --plot saddles.json               # table and picture again, without a run

The problems:

linear       a deep linear network, 5 layers of 20 × 20 on whitened data, from near zero, where the gradient, the
             Hessian and two derivatives more vanish; every singular value of the map is one more saddle to leave
factor       ‖M − UUᵀ‖² with U of 100 × 5 from near zero, a strict saddle
autoencoder  784-1000-500-250-30 and back with tanh on 10,000 images of MNIST, float32, mini-batches of 512
poisson      a physics-informed network, tanh 1-32-32-1 in float64, for u'' = h on [−1, 1], all points in every step

Every method sees the same function of one flat vector and the same start. An evaluation is a value, a gradient (with
its value) or a Hessian or Gauss–Newton product of the whole objective; one of a mini-batch counts as its share of the
rows. Adam runs with each of five learning rates on the first seed and with the best one on the others, Gauss–Newton
likewise with two accuracies of its linear solves; L-BFGS minimises a multiple of the loss.
Seconds are processor time on one thread of a CPU, so that other work on the machine does not count, and wall time
elsewhere. Measuring the loss of the whole set beside mini-batches is on nobody's clock. On the exact objectives sanc is
`sanc.minimize` with all its defaults but `tol`, which ends a run and does not steer it: a start that is flat enough
counts as a stationary point with good curvature. On mini-batches sanc is `sanc.SANC` with its defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sanc
from sanc import Record

RATES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)
ACCURACIES = (0.3, 1e-4)
"""What Adam and Gauss–Newton are tried with on the first seed: learning rates, and accuracies of linear solves."""

SYMBOLS = {"adam": "lr", "gn": "CG to"}
LABELS = {
    "adam": "Adam",
    "lbfgs": "L-BFGS",
    "gn": "Gauss–Newton",
    "minimize": "sanc.minimize",
    "arc": "sanc.ARC",
    "sanc": "sanc.SANC",
}
COLOURS = {
    "adam": "#B07D2B",
    "lbfgs": "#4C8C6B",
    "gn": "#7A68A6",
    "minimize": "#C0392B",
    "arc": "#E08A7D",
    "sanc": "#C0392B",
}
OURS = ("minimize", "arc", "sanc")


# ------------------------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    """A sum of squares ½‖r(x)‖² of a flat vector, and how it is run.

    Attributes
    ----------
    name, title : str
        What it is called in options and in tables.
    x0 : Tensor
        The start.
    residuals : callable
        ``residuals(x)`` or, with rows, ``residuals(x, rows)``.
    target : float
        The loss to reach.
    limit : float
        Seconds that a run may take.
    methods : tuple of str
        What is compared unless --methods says otherwise.
    rows : Tensor, optional
        Data of which mini-batches are taken; the loss is then the mean over rows.
    batch : int
        Rows of a mini-batch.
    rates : tuple of float
        Learning rates of Adam.
    """

    name: str
    title: str
    x0: Tensor
    residuals: Callable[..., Tensor]
    target: float
    limit: float
    methods: tuple[str, ...] = ("adam", "lbfgs", "gn", "minimize")
    rows: Tensor | None = None
    batch: int = 0
    rates: tuple[float, ...] = RATES

    def residual(self, x: Tensor) -> Tensor:
        """Return all residuals, scaled such that the loss is half their squared length."""
        if self.rows is None:
            return self.residuals(x)
        return self.residuals(x, self.rows) / math.sqrt(len(self.rows))

    def loss(self, x: Tensor) -> Tensor:
        """Return the whole objective."""
        return 0.5 * self.residual(x).square().sum()

    def batch_loss(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the mean loss over some rows."""
        return 0.5 * self.residuals(x, rows).square().sum() / len(rows)

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Cut the rows into mini-batches, shuffled anew in each epoch; the last, smaller one is left out."""
        assert self.rows is not None
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.rows), generator=generator).to(self.rows.device)
            for picked in order.split(self.batch)[: len(order) // self.batch]:
                yield self.rows[picked]


def linear(options: argparse.Namespace, seed: int) -> Problem:
    layers, width = (3, 5) if options.quick else (5, 20)
    scale = 1e-1 if options.quick else 1e-2
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(_normal(generator, width, width))[0] for _ in range(2))
    wanted = left @ torch.diag(torch.linspace(1, 5, width, dtype=torch.float64)) @ right
    wanted = wanted.to(options.device)
    x0 = (scale * _normal(generator, layers * width * width)).to(options.device)

    def residuals(x: Tensor) -> Tensor:
        first, *others = x.view(layers, width, width)
        product = first
        for weight in others:
            product = weight @ product
        return (product - wanted) / math.sqrt(width)  # whitened inputs: the mean over the data is this norm

    title = f"deep linear network, {layers} layers of {width} × {width}, start of size {scale:g}"
    return Problem("linear", title, x0, residuals, 1e-4 if options.quick else 1e-6, 25.0)


def factor(options: argparse.Namespace, seed: int) -> Problem:
    n, rank, scale = (15, 2, 1e-3) if options.quick else (100, 5, 1e-6)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(_normal(generator, n, rank))[0]
    planted = basis * torch.linspace(1, 3, rank, dtype=torch.float64).sqrt()
    matrix = (planted @ planted.T).to(options.device)
    x0 = (scale * _normal(generator, n * rank)).to(options.device)

    def residuals(x: Tensor) -> Tensor:
        u = x.view(n, rank)
        return math.sqrt(2) * (u @ u.T - matrix)

    title = f"matrix factorisation, {n} × {n} of rank {rank}, start of size {scale:g}"
    return Problem("factor", title, x0, residuals, 1e-8, 20.0)


def autoencoder(options: argparse.Namespace, seed: int) -> Problem:
    images, sizes = _images(options)
    images = images.to(options.device)
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape for i, o in pairwise(sizes) for shape in ((o, i), (o,))]
    x0 = torch.cat(
        [
            torch.randn(shape, generator=generator).flatten() / math.sqrt(shape[1])
            if len(shape) == 2
            else torch.zeros(shape)
            for shape in shapes
        ]
    ).to(options.device)
    lengths = [math.prod(shape) for shape in shapes]
    code = min(range(len(sizes)), key=sizes.__getitem__)

    def residuals(x: Tensor, rows: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(x.split(lengths), shapes, strict=True)]
        a = rows
        for layer, (weight, bias) in enumerate(zip(parts[::2], parts[1::2], strict=True), start=1):
            a = torch.nn.functional.linear(a, weight, bias)
            if layer == len(sizes) - 1:
                a = torch.sigmoid(a)
            elif layer != code:  # the code itself is linear
                a = torch.tanh(a)
        return a - rows

    target, limit, batch = (2.5, 2.0, 100) if options.quick else (3.0, 20.0, 512)
    title = f"{'-'.join(map(str, sizes[: code + 1]))} and back, tanh, {len(images):,} images, batches of {batch}"
    methods = ("adam", "lbfgs", "sanc")
    return Problem(
        "autoencoder", title, x0, residuals, target, limit, methods, images, batch, tuple(rate / 10 for rate in RATES)
    )


def poisson(options: argparse.Namespace, seed: int) -> Problem:
    width, points, waves = (8, 30, 1) if options.quick else (32, 128, 2)
    sizes = (1, width, width, 1)
    generator = torch.Generator().manual_seed(seed)
    start = []
    for i, o in pairwise(sizes):
        start += [_normal(generator, o * i) * math.sqrt(2 / (i + o)), torch.zeros(o, dtype=torch.float64)]
    x0 = torch.cat(start).to(options.device)
    t = torch.linspace(-1, 1, points, dtype=torch.float64, device=options.device)[:, None]
    height = (waves * math.pi) ** 2  # of u'' for u = sin(waves π t)
    source = torch.sin(waves * math.pi * t)
    lengths = [length for i, o in pairwise(sizes) for length in (i * o, o)]

    def residuals(x: Tensor) -> Tensor:
        parts = x.split(lengths)
        value, slope, bend = t, torch.ones_like(t), torch.zeros_like(t)  # u, u' and u'', pushed through the layers
        for layer, (weight, bias) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            weight = weight.view(sizes[layer + 1], sizes[layer])
            value, slope, bend = value @ weight.T + bias, slope @ weight.T, bend @ weight.T
            if layer < len(sizes) - 2:
                value = torch.tanh(value)
                first = 1 - value * value
                slope, bend = first * slope, first * bend - 2 * value * first * slope * slope
        inside = (bend / height + source) * math.sqrt(2 / points)
        return torch.cat([inside[:, 0], value[0], value[-1]])

    title = f"physics-informed network 1-{width}-{width}-1, u'' = h, u = sin({waves}πt), {points} points"
    return Problem("poisson", title, x0, residuals, 1e-2 if options.quick else 1e-6, 30.0)


PROBLEMS: dict[str, Callable[[argparse.Namespace, int], Problem]] = {
    "linear": linear,
    "factor": factor,
    "autoencoder": autoencoder,
    "poisson": poisson,
}


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _images(options: argparse.Namespace) -> tuple[Tensor, tuple[int, ...]]:
    """Return images in [0, 1] as rows, and the widths of the layers."""
    from sanc.lab.runs import load_data

    if options.quick:
        return torch.from_numpy(load_data("digits", None, "float32").X[:500].copy()), (64, 24, 6, 24, 64)
    path = None if options.data_dir is None else options.data_dir / "mnist.npz"
    if path is not None and path.exists():
        with np.load(path) as archive:
            pixels = archive["x"] if "x" in archive else archive["x_train"]
        pixels = np.asarray(pixels[: options.rows]).reshape(-1, 784).astype(np.float32) / 255
    else:
        pixels = np.array(load_data("mnist", options.data_dir, "float32").X[: options.rows], np.float32)
    return torch.from_numpy(pixels), (784, 1000, 500, 250, 30, 250, 500, 1000, 784)


# ------------------------------------------------------------------------------------------------------- the trace


def clock(cuda: bool) -> Callable[[], float]:
    """Processor time where one thread does all the work, so that a busy machine does not count; else wall time."""
    return time.perf_counter if cuda or torch.get_num_threads() > 1 else time.process_time


class _OverError(Exception):
    """The run has reached its target or its limit."""


@dataclass
class Trace:
    """What a run did over time; its clock can be held.

    Attributes
    ----------
    points : list
        (seconds, evaluations, loss) at the best point so far, or at the current one beside mini-batches.
    steps : dict
        How many steps of each branch sanc made.
    earned : dict
        Decrease of the loss by branch; "λ < 0" is what other steps earned along negative curvature, by the model.
    marks : list
        (seconds, evaluations, loss, kind) of steps along negative curvature: kind "curvature" or "λ < 0".
    """

    problem: Problem
    limit: float
    points: list[tuple[float, float, float]] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    earned: dict[str, float] = field(default_factory=dict)
    marks: list[tuple[float, float, float, str]] = field(default_factory=list)
    ending: str = ""
    _since: float = 0.0
    _spent: float = 0.0

    def start(self) -> None:
        self._wait()
        self._since = self._now()

    def hold(self) -> None:
        self._wait()
        self._spent += self._now() - self._since

    @property
    def seconds(self) -> float:
        return self._spent + self._now() - self._since

    def _now(self) -> float:
        return clock(self.problem.x0.is_cuda)()

    def _wait(self) -> None:
        if self.problem.x0.is_cuda:
            torch.cuda.synchronize()

    def add(self, evaluations: float, loss: float, *, ends: bool = True) -> None:
        """Note a loss; ends the run at the target (where `ends` says so) and at the limit."""
        self.points.append((self.seconds, evaluations, loss))
        if ends and loss <= self.problem.target:
            self.ending = "target"
            raise _OverError
        self.check()

    def check(self) -> None:
        """End the run at its limit."""
        if self.seconds >= self.limit:
            self.ending = "limit"
            raise _OverError

    def note(self, record: Record, before: float, after: float, evaluations: float) -> None:
        """Count a step of sanc and credit its branch with the decrease."""
        branch = record.branch.value
        self.steps[branch] = self.steps.get(branch, 0) + 1
        self.earned[branch] = self.earned.get(branch, 0.0) + before - after
        along = branch == "curvature"
        if not along and record.curvature_share > 0.0:
            along = record.curvature_share > 0.5
            self.steps["λ < 0"] = self.steps.get("λ < 0", 0) + along
            self.earned["λ < 0"] = self.earned.get("λ < 0", 0.0) + record.curvature_share * (before - after)
        if along and after < before:
            self.marks.append((self.seconds, evaluations, after, "curvature" if branch == "curvature" else "λ < 0"))


# -------------------------------------------------------------------------------------------------------- methods


def run_adam(problem: Problem, trace: Trace, seed: int, variant: float) -> None:
    x = torch.nn.Parameter(problem.x0.clone())
    adam = torch.optim.Adam([x], lr=variant)
    if problem.rows is not None:
        for rows in problem.batches(seed):
            adam.zero_grad()
            problem.batch_loss(x, rows).backward()
            adam.step()
            _measure(problem, trace, x, len(rows))
    evaluations = 0
    while True:
        adam.zero_grad()
        loss = problem.loss(x)
        loss.backward()
        evaluations += 1
        trace.add(evaluations, loss.item())
        if not math.isfinite(trace.points[-1][2]):
            trace.ending = "not finite"
            raise _OverError
        adam.step()


def run_lbfgs(problem: Problem, trace: Trace, seed: int, variant: float) -> None:
    x = torch.nn.Parameter(problem.x0.clone())
    lbfgs = torch.optim.LBFGS([x], line_search_fn="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0)
    evaluations, ends, best = 1, problem.rows is None, math.inf
    problem.loss(x).backward()
    assert x.grad is not None
    scale = 1e8 / float(x.grad.norm())  # torch learns no curvature where yᵀs ≤ 1e-10, so the loss is scaled up

    def closure() -> Tensor:
        nonlocal evaluations, best
        lbfgs.zero_grad()
        loss = problem.loss(x)
        (scale * loss).backward()
        evaluations, best = evaluations + 1, min(best, loss.item())
        trace.add(evaluations, loss.item(), ends=ends)
        return scale * loss.detach()

    stalls = 0
    while stalls < 3:
        before = best
        lbfgs.step(closure)
        stalls = 0 if best < before else stalls + 1
        if stalls:
            lbfgs.state.clear()  # its line search is stuck: once more from steepest descent
    trace.ending = "stalled"
    raise _OverError


def run_gn(problem: Problem, trace: Trace, seed: int, variant: float) -> None:
    """Levenberg–Marquardt, its steps by conjugate gradients with products (JᵀJ + λ)v, λ by the ratio of decreases."""
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
            p, used, promised = _conjugate_gradients(r, x, dual, linear_in_dual, g, damping, variant)
            evaluations += used
            with torch.no_grad():
                trial = x + p
                value = float(problem.loss(trial))
            evaluations += 1
            trace.check()
            rho = (loss - value) / promised if promised > 0 else -1.0
            if rho > 0.75:
                damping = max(damping / 5, 1e-15)
            elif not rho > 0.25:
                damping *= 3
            if rho > 1e-4:
                break
            if damping > 1e12:
                trace.ending = "stalled"
                raise _OverError
        x = trial


def _conjugate_gradients(
    r: Tensor, x: Tensor, dual: Tensor, linear_in_dual: Tensor, g: Tensor, damping: float, accuracy: float
) -> tuple[Tensor, int, float]:
    """Solve (JᵀJ + λ)p = −g to `accuracy`·‖g‖; return p, the products used and the decrease of ½‖r + Jp‖²."""
    p, residue = torch.zeros_like(g), -g
    direction, square = residue.clone(), float(g @ g)
    goal, used = accuracy * accuracy * square, 0
    while used < 500 and square > goal:
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
    ends = problem.rows is None
    last = float(problem.loss(problem.x0))

    def callback(intermediate_result: Any) -> None:
        nonlocal last
        record, loss = intermediate_result.record, float(intermediate_result.fun)
        trace.note(record, last, loss, record.calls.total)
        last = loss
        trace.add(record.calls.total, loss, ends=ends)

    answer = sanc.minimize(problem.loss, problem.x0, tol=1e-30, callback=callback, seed=seed, certify=False)
    trace.ending = answer.status.name.lower().replace("_", " ")
    raise _OverError


def run_arc(problem: Problem, trace: Trace, seed: int, variant: float) -> None:
    x = torch.nn.Parameter(problem.x0.clone())
    arc = sanc.ARC([x], seed=seed)
    while True:
        arc.step(lambda: problem.loss(x))
        record = arc.record
        assert record is not None
        after = record.value if record.branch.value == "stayed" else record.trial_value
        trace.note(record, record.value, after, record.calls.total)
        trace.add(record.calls.total, after, ends=problem.rows is None)


def run_sanc(problem: Problem, trace: Trace, seed: int, variant: float) -> None:
    """`sanc.SANC` with its defaults: on mini-batches, or with the whole objective as the closure."""
    x = torch.nn.Parameter(problem.x0.clone())
    optimiser = sanc.SANC([x], seed=seed)
    if problem.rows is None:
        while True:
            optimiser.step(lambda: problem.loss(x))
            record = optimiser.record
            assert record is not None
            after = record.trial_value if math.isfinite(record.trial_value) else record.value
            trace.note(record, record.value, after, record.calls.total)
            trace.add(record.calls.total, after)
    for rows in problem.batches(seed):
        before = x.detach().clone()
        optimiser.step(sanc.Batch(lambda some: problem.batch_loss(x, some), rows))
        record = optimiser.record
        assert record is not None
        evaluations = record.calls.total / len(problem.rows)
        if record.branch.value == "curvature" or record.curvature_share > 0:  # what it earned on the whole set
            trace.hold()
            with torch.no_grad():
                pair = float(problem.loss(before)), float(problem.loss(x))
            trace.start()
            trace.note(record, *pair, evaluations)
        else:
            trace.steps[record.branch.value] = trace.steps.get(record.branch.value, 0) + 1
        _measure(problem, trace, x, None, evaluations)


METHODS: dict[str, Callable[[Problem, Trace, int, float], None]] = {
    "adam": run_adam,
    "lbfgs": run_lbfgs,
    "gn": run_gn,
    "minimize": run_minimize,
    "arc": run_arc,
    "sanc": run_sanc,
}


def _measure(problem: Problem, trace: Trace, x: Tensor, rows: int | None, evaluations: float = 0.0) -> None:
    """Measure the loss of the whole set a few times a second, off the clock; `rows` are those of one gradient."""
    assert problem.rows is not None
    if rows is not None:
        trace.steps["gradient"] = trace.steps.get("gradient", 0) + 1
        evaluations = trace.steps["gradient"] * rows / len(problem.rows)
    last = trace.points[-1][0] if trace.points else 0.0
    if trace.seconds < min(last * 1.02 + 0.02, trace.limit):
        return
    trace.hold()
    with torch.no_grad():
        loss = float(problem.loss(x))
    trace.start()
    if not math.isfinite(loss):
        trace.ending = "not finite"
        raise _OverError
    trace.add(evaluations, loss, ends=False)  # a noisy run goes on to its limit: the final loss says more there


# ----------------------------------------------------------------------------------------------------------- runs


def run(problem: Problem, method: str, seed: int, limit: float, variant: float = 0.0) -> dict[str, Any]:
    """Make one run and return it as plain numbers."""
    trace = Trace(problem, limit)
    start = float(problem.loss(problem.x0))
    _warm_up(problem)
    trace.start()
    trace.points.append((0.0, 0.0, start))
    with contextlib.suppress(_OverError):
        METHODS[method](problem, trace, seed, variant)
    finite = [loss for _, _, loss in trace.points if math.isfinite(loss)]
    return {
        "method": method,
        "seed": seed,
        "variant": variant or None,
        "ending": trace.ending,
        "start": start,
        "final": finite[-1] if problem.rows is not None else min(finite),
        "seconds": trace.points[-1][0],
        "evaluations": trace.points[-1][1],
        "steps": trace.steps if method in OURS else {},
        "earned": trace.earned,
        "points": _thin(trace.points, problem.rows is None),
        "marks": trace.marks[:: 1 + len(trace.marks) // 1000],
    } | dict(zip(("seconds_to", "evaluations_to"), reached(trace.points, problem.target), strict=True))


def _warm_up(problem: Problem) -> None:
    """Let libraries load and kernels be chosen before anybody's clock runs."""
    x = torch.nn.Parameter(problem.x0.clone())
    part = problem.loss if problem.rows is None else lambda x: problem.batch_loss(x, problem.rows[: problem.batch])
    part(x).backward()
    for optimiser in (torch.optim.Adam([x], lr=1e-9), sanc.ARC([x], krylov_dim=1)):
        optimiser.step(lambda: part(x))


def reached(points: Sequence[Sequence[float]], target: float) -> tuple[float | None, float | None]:
    """Seconds and evaluations at the first point at or below the target; None where there is none."""
    return next(((seconds, evals) for seconds, evals, loss in points if loss <= target), (None, None))


def _thin(points: list[tuple[float, float, float]], monotone: bool, most: int = 1500) -> list[tuple[float, ...]]:
    """Keep a trace small: of an exact objective the best so far, and only points some way from the last one kept."""
    kept: list[tuple[float, ...]] = []
    best = math.inf
    for rank, (seconds, evaluations, loss) in enumerate(points):
        if not math.isfinite(loss):
            continue
        best = min(best, loss) if monotone else loss
        far = not kept or seconds > 1.005 * kept[-1][0] or len(points) <= most or rank == len(points) - 1
        if far or best < 0.9 * kept[-1][2]:
            kept.append((seconds, evaluations, best))
    return kept


def rank(result: dict[str, Any]) -> tuple[bool, float]:
    """Order runs: those that reach the target by time, then the others by their loss."""
    at = result["seconds_to"]
    return at is None, result["final"] if at is None else at


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything that was asked for."""
    plans = []
    for name in options.problems:
        problem = PROBLEMS[name](options, 0)
        variants: dict[str, tuple[float, ...]] = dict.fromkeys(options.methods or problem.methods, (0.0,))
        for method, tried in (("adam", problem.rates), ("gn", ACCURACIES)):
            if method in variants:
                variants[method] = tried[1:3] if options.quick else tried
        plans.append((name, variants))
    count = sum(sum(map(len, variants.values())) + (options.seeds - 1) * len(variants) for _, variants in plans)
    share = math.inf if options.minutes is None else 60 * options.minutes / count
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "sanc": sanc.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "threads": torch.get_num_threads(),
        "clock": clock(options.device == "cuda").__name__,
        "problems": {},
    }
    for name, variants in plans:
        entry: dict[str, Any] = {"runs": []}
        report["problems"][name] = entry
        best: dict[str, float] = {}
        for seed in range(options.seeds):
            problem = PROBLEMS[name](options, seed)
            problem = replace(problem, target=options.targets.get(name, problem.target))
            limit = min(problem.limit, share, 0.1 if options.quick else math.inf)
            if seed == 0:
                entry |= {"title": problem.title, "target": problem.target, "dim": problem.x0.numel(), "limit": limit}
                words = f"{entry['dim']:,} variables, to a loss of {problem.target:g}, {limit:.0f} s a run"
                print(f"\n{name}: {problem.title}; {words}", flush=True)
            for method, tried in variants.items():
                own: list[dict[str, Any]] = []
                for variant in tried if seed == 0 else (best[method],):
                    allowed = limit
                    if problem.rows is None:  # one that is slower than another variant need not end
                        allowed = min([limit, *(done["seconds_to"] or limit for done in own)])
                    own.append(run(problem, method, seed, allowed, variant))
                    say(own[-1])
                entry["runs"] += own
                if seed == 0:
                    best[method] = min(own, key=rank)["variant"] or 0.0
    return report


def say(result: dict[str, Any]) -> None:
    """Print a line about a run that has ended."""
    name = label(result)
    at = result["seconds_to"]
    words = (
        f"to the target in {at:.2f} s, {result['evaluations_to']:,.0f} evaluations" if at is not None else "not there"
    )
    print(
        f"  seed {result['seed']}  {name:<22} {words}; loss {result['final']:.3g} after {result['seconds']:.1f} s and "
        f"{result['evaluations']:,.0f} evaluations ({result['ending']})",
        flush=True,
    )


# --------------------------------------------------------------------------------------------- tables and pictures


def chosen(entry: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Group runs by method, of each those with the variant that was best on the first seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in entry["runs"]:
        groups.setdefault(result["method"], []).append(result)
    for method, runs in groups.items():
        best = min((result for result in runs if result["seed"] == 0), key=rank)["variant"]
        groups[method] = [result for result in runs if result["variant"] == best]
    return groups


def label(result: dict[str, Any]) -> str:
    """Name the method of a run, with the variant where it has some."""
    method, variant = result["method"], result["variant"]
    return LABELS[method] + (f", {SYMBOLS[method]} {variant:g}" if variant else "")


def table(name: str, entry: dict[str, Any]) -> str:
    """Write a Markdown table, medians over seeds, and what the steps of sanc were."""
    lines = [
        f"**{name}**: {entry['title']}; {entry['dim']:,} variables, to a loss of {entry['target']:g}",
        "",
        "| method | seconds to target | evaluations to target | final loss | ended by |",
        "|---|---:|---:|---:|---|",
    ]
    mixes = []
    for method, runs in chosen(entry).items():
        there = [result for result in runs if result["seconds_to"] is not None]
        cells = ["—", "—"]
        if there:
            cells = [
                f"{statistics.median(result['seconds_to'] for result in there):.2f}",
                f"{statistics.median(result['evaluations_to'] for result in there):,.0f}",
            ]
            if len(there) < len(runs):
                cells[0] += f" ({len(there)} of {len(runs)} runs)"
        final = statistics.median(result["final"] for result in runs)
        endings = ", ".join(sorted({result["ending"] for result in runs}))
        lines.append(f"| {label(runs[0])} | {' | '.join(cells)} | {final:.2g} | {endings} |")
        if method in OURS:
            mixes.append(f"{LABELS[method]}: {mix(runs)}")
    return "\n".join([*lines, "", *mixes])


def mix(runs: list[dict[str, Any]]) -> str:
    """Say which steps were taken, and what negative curvature earned."""
    total: dict[str, int] = {}
    earned = {"curvature": 0.0, "λ < 0": 0.0}
    fall = 0.0
    for result in runs:
        fall += result["start"] - result["final"]
        for branch, number in result["steps"].items():
            total[branch] = total.get(branch, 0) + number
        for kind in earned:
            earned[kind] += result["earned"].get(kind, 0.0)
    steps = sum(number for branch, number in total.items() if branch != "λ < 0")
    listed = ", ".join(f"{number} {branch}" for branch, number in sorted(total.items()) if branch != "λ < 0")
    fall = fall or 1.0
    return (
        f"{steps} steps ({listed}). Branch curvature earned {earned['curvature'] / fall:.1%} of the decrease; negative "
        f"curvature in cubic steps another {earned['λ < 0'] / fall:.1%}, and {total.get('λ < 0', 0)} of them owe it "
        "most of what the model promised."
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw loss over seconds and over evaluations, first seed, the steps along negative curvature marked."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from sanc.lab.style import HAIR, INK, QUIET, STYLE

    problems = report["problems"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 0.5 + 2.9 * len(problems)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(problems), 2, squeeze=False)
        for row, (name, entry) in zip(grid, problems.items(), strict=True):
            handles = {}
            for axes, column, unit in zip(row, (0, 1), ("seconds", "evaluations"), strict=True):
                axes.set(xscale="log", yscale="log", xlabel=unit, ylabel="loss")
                axes.grid(axis="y", color=HAIR, linewidth=0.6)
                axes.axhline(entry["target"], color=QUIET, linewidth=0.8, dashes=(2, 2))
                for method, runs in chosen(entry).items():
                    result = next(result for result in runs if result["seed"] == 0)
                    points = np.array([point for point in result["points"] if point[column] > 0])
                    if not len(points):
                        continue
                    colour = COLOURS[method]
                    (handles[method],) = axes.plot(
                        points[:, column], points[:, 2], color=colour, label=label(result),
                        linewidth=1.8 if method in OURS else 1.2, zorder=5 if method in OURS else 3,
                    )  # fmt: skip
                    for kind, marker, size in (("λ < 0", ".", 5.0), ("curvature", "v", 6.5)):
                        marks = np.array([mark[:3] for mark in result["marks"] if mark[3] == kind])
                        if len(marks):
                            axes.plot(
                                marks[:, column], marks[:, 2], marker, color=INK, markersize=size,
                                markeredgecolor="white", markeredgewidth=0.5 if marker == "v" else 0.0, zorder=7,
                            )  # fmt: skip
                            handles[kind] = Line2D(
                                [], [], linestyle="", marker=marker, color=INK, markersize=size,
                                label="curvature step" if kind == "curvature" else "cubic step, most of it along λ < 0",
                            )  # fmt: skip
            row[0].set_title(f"{name}: {entry['title']}", loc="left", fontsize=8.5)
            row[1].legend(handles=list(handles.values()), frameon=False, fontsize=7.5)
        figure.savefig(path, dpi=150)


# --------------------------------------------------------------------------------------------------------- command


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", default="", help=f"names, with commas between: {', '.join(PROBLEMS)}")
    parser.add_argument("--methods", default="", help=f"instead of each problem's own: {', '.join(METHODS)}")
    parser.add_argument("--out", type=Path, default=Path("saddles.json"), help="JSON; the picture lies beside it")
    parser.add_argument("--seeds", type=int, default=1, help="how many starts")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default the GPU for the autoencoder only")
    parser.add_argument("--minutes", type=float, help="about how long all runs together may take")
    parser.add_argument("--target", action="append", default=[], metavar="NAME=LOSS", help="another loss to reach")
    parser.add_argument("--data-dir", type=Path, help="folder with mnist.npz, or with the files of MNIST")
    parser.add_argument("--rows", type=int, default=10_000, help="images of the autoencoder")
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="no runs: table and picture of a report")
    options = parser.parse_args(argv)
    names = [name for name in options.problems.split(",") if name]
    if not names:
        names = [name for name in PROBLEMS if options.quick or name != "autoencoder" or options.data_dir is not None]
    options.problems = names
    options.methods = tuple(name for name in options.methods.split(",") if name)
    for given, known, what in ((names, PROBLEMS, "--problems"), (options.methods, METHODS, "--methods")):
        for name in given:
            if name not in known:
                parser.error(f"{what} {name} is not known: choose from {', '.join(known)}")
    options.targets = {}
    for given in options.target:
        name, _, value = given.partition("=")
        try:
            options.targets[name] = float(value)
        except ValueError:
            parser.error(f"--target {given} cannot be used: pass NAME=LOSS")
        if name not in PROBLEMS:
            parser.error(f"--target {given} cannot be used: choose from {', '.join(PROBLEMS)}")
    if options.seeds < 1 or options.rows < 512:
        parser.error("--seeds must be at least 1 and --rows at least 512")
    if options.device is None:
        options.device = "cuda" if names == ["autoencoder"] and torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is none")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.plot is not None:
        report = json.loads(options.plot.read_text())
        for name, target in options.targets.items():  # traces are kept, so another target needs no other run
            if name in report["problems"]:
                entry = report["problems"][name]
                entry["target"] = target
                for result in entry["runs"]:
                    result["seconds_to"], result["evaluations_to"] = reached(result["points"], target)
        picture = options.plot.with_suffix(".png")
    else:
        torch.set_num_threads(options.threads)
        report = work(options)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, ensure_ascii=False) + "\n")
        picture = options.out.with_suffix(".png")
    print(f"\ntorch {report['torch']}, {report['device']}, {report['threads']} threads, seconds of {report['clock']}")
    for name, entry in report["problems"].items():
        print("\n" + table(name, entry))
    draw(report, picture)
    print(f"\n{picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
