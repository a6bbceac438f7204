"""Methods and runs of `benchmarks.networks`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sanc
from benchmarks.suite import TASKS, Problem
from benchmarks.timing import synchronise

VARIANTS: dict[str, dict[str, Any]] = {
    "sanc": {},
    "no-averaging": {"averaging": 0.0},
    "diagonal": {"metric": "diagonal"},
    "euclid": {"metric": "none"},
    "fixed-scale": {"distance": 0.0},
    "no-slow-down": {"slow_down": 0},
    "even-weights": {"weighting": 0},
    "no-bound": {"lower_bound": -math.inf},
    "no-curvature": {"curvature": False},
    "diagonal-no-curvature": {"metric": "diagonal", "curvature": False},
    "no-escape": {},
    "loop": {},
    "decaying": {},
    "horizon": {},
    "robust02": {},
}
"""Options of `sanc.SANC` by method: the default, and the default without one of its components. "no-escape" is
`sanc.SCR`, which does not compute negative curvature. "loop" calls ``loss.backward()`` and then ``step()`` without a
closure. "decaying" lowers `lr` linearly to 0 in the last third of the budget, as many loops do. "horizon" passes the
number of steps of a first-order method as `horizon`. "robust02" is an earlier default; it requires the source of that
version first on the path."""


@dataclass(frozen=True)
class Peer:
    """Default rate, rates of the search, whether the search includes a cosine decay, and package of a method."""

    default: float | None = None
    rates: tuple[float, ...] = ()
    cosine: bool = False
    package: str = "torch"


_LOW = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
PEERS: dict[str, Peer] = {
    "adamw": Peer(1e-3, (*_LOW, 3e-2, 1e-1), True),
    "schedulefree": Peer(2.5e-3, (1e-3, 2.5e-3, 5e-3, 1e-2, 2e-2), package="schedulefree"),
    "prodigy": Peer(1.0, (1.0,), True, "prodigyopt"),
    "soap": Peer(3e-3, (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), True, "pytorch_optimizer"),
    "muon": Peer(1e-3, _LOW, True),
    "sgd": Peer(1e-3, (3e-3, 1e-2, 3e-2, 1e-1, 3e-1), True),
    "lbfgs": Peer(),
    "paper": Peer(),
}
METHODS = ("sanc", *PEERS)
"""Methods of a run without --methods, the most important first."""
Run = Mapping[str, Any]


@dataclass(frozen=True)
class Spec:
    """Specification of a run."""

    task: str
    method: str
    lr: float | None
    cosine: bool
    seed: int
    steps: int

    def __str__(self) -> str:
        rate = "" if self.lr is None else f"/{self.lr:g}{' cosine' if self.cosine else ''}"
        return f"{self.task}/{self.method}{rate}/seed {self.seed}"


def spec_of(run: Run) -> Spec:
    """Return the specification of a finished run."""
    return Spec(*(run[name] for name in Spec.__dataclass_fields__))


# ---------------------------------------------------------------------- methods


@dataclass
class Stepper:
    """A method on a model: `step` makes a step, `spent` returns the evaluations of all steps."""

    step: Callable[[], None]
    spent: Callable[[], float]
    optimizers: list[Any]


def units(calls: Any) -> float:
    """Return component evaluations in units of a gradient."""
    return float(calls.gradient + 0.5 * calls.value + 2.0 * calls.product)


def optimizers_of(method: str, model: nn.Module, lr: float | None) -> list[torch.optim.Optimizer]:
    """Return a peer's optimisers of a model; that of Muon is for the matrices of linear layers, beside AdamW."""
    weights = list(model.parameters())
    if method == "adamw":
        return [torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)]
    if method == "sgd":
        return [torch.optim.SGD(weights, lr=lr, momentum=0.9)]
    if method == "schedulefree":
        from schedulefree import AdamWScheduleFree

        return [AdamWScheduleFree(weights, lr=lr, weight_decay=0.0)]
    if method == "prodigy":
        from prodigyopt import Prodigy

        return [Prodigy(weights, lr=lr, weight_decay=0.0)]
    if method == "soap":
        from pytorch_optimizer import SOAP

        return [SOAP(weights, lr=lr, weight_decay=0.0)]
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    others = [p for p in weights if all(p is not matrix for matrix in matrices)]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=lr, weight_decay=0.0)]
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return made


def rate_at(share: float) -> float:
    """Return `lr` after this share of the budget: 1, and in the last third a straight line to 0."""
    return min(1.0, max(0.0, 3.0 * (1.0 - share)))


def stepper(spec: Spec, problem: Problem, model: nn.Module) -> Stepper:
    """Return a method on a model."""
    loss, batches, size = problem.loss(model), problem.batches(spec.seed), problem.size
    if spec.method in VARIANTS or spec.method == "paper":
        options = VARIANTS.get(spec.method, {"preset": "paper"})
        options = {"horizon": spec.steps} if spec.method == "horizon" else options
        kind = sanc.SCR if spec.method == "no-escape" else sanc.SANC
        opt = kind(model.parameters(), seed=spec.seed, **options)
        if spec.method == "loop":
            made = 0

            def loop_step() -> None:
                nonlocal made
                made += 1
                opt.zero_grad()
                loss(*next(batches)).backward()
                opt.step()

            return Stepper(loop_step, lambda: made * size, [opt])

        def sanc_step() -> None:
            if spec.method == "decaying" and opt.record is not None:
                opt.param_groups[0]["lr"] = rate_at(units(opt.record.calls) / (spec.steps * size))
            first, *more = (sanc.Batch(loss, *next(batches)) for _ in range(3 if spec.method == "paper" else 1))
            opt.step(first, **dict(zip(("hessian", "objective"), more, strict=False)))

        return Stepper(sanc_step, lambda: 0.0 if opt.record is None else units(opt.record.calls), [opt])
    spent = 0
    if spec.method == "lbfgs":
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=5, history_size=10, line_search_fn="strong_wolfe")

        def lbfgs_step() -> None:
            tensors = next(batches)

            def closure() -> Tensor:
                nonlocal spent
                spent += size
                lbfgs.zero_grad()
                value = loss(*tensors)
                value.backward()
                return value

            lbfgs.step(closure)

        return Stepper(lbfgs_step, lambda: spent, [lbfgs])
    optimizers = optimizers_of(spec.method, model, spec.lr)

    def factor(step: int) -> float:
        if not spec.cosine:
            return 1.0
        ramp = min(1.0, (step + 1) / problem.task.warm_up) if problem.task.warm_up else 1.0
        return ramp * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / spec.steps)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]

    def step() -> None:
        nonlocal spent
        spent += size
        model.zero_grad()
        loss(*next(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()

    return Stepper(step, lambda: spent, optimizers)


def averaged(optimizer: Any, problem: Problem, model: nn.Module) -> None:
    """Switch to the averaged weights, and compute the running statistics of BatchNorm there on 20 batches."""
    optimizer.eval()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms:
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean
        with torch.no_grad():
            for tensors, _ in zip(problem.batches(0), range(20), strict=False):
                model(tensors[0])
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


# ---------------------------------------------------------------------- runs


def train(spec: Spec, problem: Problem) -> dict[str, Any]:
    """Make a run, and return its specification, curve and times."""
    torch.manual_seed(spec.seed)
    model = problem.model(spec.seed)
    method = stepper(spec, problem, model)
    budget = spec.steps * problem.size
    every = max(1, min(50, spec.steps // 8)) * problem.size
    curve: dict[str, list[Any]] = {"evaluations": [], "train": [], "held": [], "accuracy": []}
    steps, paces, ended = 0, [], "budget"

    def evaluate() -> None:
        moves = spec.method == "schedulefree" or (spec.method == "loop" and curve["evaluations"])
        if moves:
            averaged(method.optimizers[0], problem, model)
        values = (method.spent(), *problem.evaluate(model))
        if moves:
            method.optimizers[0].train()
        for name, value in zip(curve, values, strict=True):
            curve[name].append(value)

    evaluate()
    while method.spent() < budget:
        mark, before = min(budget, curve["evaluations"][-1] + every), steps
        synchronise(problem.device)
        clock = time.perf_counter()
        while method.spent() < mark:
            method.step()
            steps += 1
        synchronise(problem.device)
        paces.append((time.perf_counter() - clock) / (steps - before))
        evaluate()
        if not math.isfinite(curve["train"][-1]):
            ended = "diverged"
            break
    run = asdict(spec) | {"batch": problem.size, "ended": ended, "made": steps, "curve": curve, "note": problem.note}
    run["pace"] = statistics.median(paces)
    if isinstance(method.optimizers[0], sanc.SANC | sanc.SCR):
        record = method.optimizers[0].record
        assert record is not None
        run["calls"] = {kind: getattr(record.calls, kind) for kind in ("value", "gradient", "product")}
    return run


@cache
def problem_of(task: str, folder: Path | None, device: str, decay: float | None = None) -> Problem:
    """Return a task with its data, loaded once in a process; `decay` replaces its penalty."""
    chosen = TASKS[task] if decay is None else replace(TASKS[task], decay=decay)
    return Problem(chosen, folder, device)


def try_run(spec: Spec, folder: Path | None, device: str, decay: float | None = None) -> dict[str, Any]:
    """Make a run; return missing data and errors instead of raising."""
    try:
        problem = problem_of(spec.task, folder, device, decay)
    except (sanc.SancError, OSError, ImportError) as error:
        return asdict(spec) | {"missing": f"{error}"}
    try:
        return train(spec, problem)
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        return asdict(spec) | {"ended": "error", "error": f"{type(error).__name__}: {error}"[:300]}
