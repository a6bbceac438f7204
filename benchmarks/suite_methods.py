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
from benchmarks.suite import TASKS, Evaluation, Problem
from benchmarks.suite_search import Cell, Peer, Run
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
}
"""Options of `sanc.SANC` by method: the default, and the default without one of its components. "no-escape" is
`sanc.SCR`, which does not compute negative curvature. "loop" calls ``loss.backward()`` and then ``step()`` without a
closure. "decaying" lowers `lr` linearly to 0 in the last third of the budget, as many loops do. "horizon" passes the
number of steps of a first-order method as `horizon`."""


OPTIONS: dict[str, dict[str, Any]] = {
    "beta2=0.95": {"betas": (0.9, 0.95)},
    "decay=0.1": {"weight_decay": 0.1},
    "warm-up": {},
    "horizon=0.5": {},
    "horizon=0.3": {},
}
"""Options of peers by name. "warm-up" increases the rate over the first tenth of the steps. "horizon" is the share of
the budget over which the rate decays, and after which the run ends."""
HORIZONS = {"horizon=0.5": 0.5, "horizon=0.3": 0.3}
"""Share of the budget of a run with an option."""
_SHORT = ("decay=0.1", *HORIZONS)
PEERS: dict[str, Peer] = {
    "adamw": Peer(1e-3, (1e-3, 3e-3, 1e-2), True, options=("beta2=0.95", "warm-up", *_SHORT), averages=True),
    "soap": Peer(3e-3, (3e-3, 1e-2), True, "pytorch_optimizer", ("warm-up", *_SHORT), averages=True),
    "kl-soap": Peer(3e-3, (3e-3, 1e-2), True, "heavyball"),
    "soap-schedulefree": Peer(3e-3, (3e-3, 1e-2), package="pytorch_optimizer"),
    "muon": Peer(1e-3, (3e-3, 1e-2), True, "pytorch_optimizer", _SHORT),
    "schedulefree": Peer(2.5e-3, (3e-3, 1e-2), package="schedulefree"),
    "splus": Peer(1e-1, (3e-2, 1e-1), package="pytorch_optimizer"),
    "prodigy": Peer(1.0, (1.0,), True, "prodigyopt"),
    "sgd": Peer(1e-3, (1e-2, 3e-2, 1e-1), True),
    "lbfgs": Peer(),
    "paper": Peer(),
}
METHODS = ("sanc", *PEERS)
"""Methods of a run without --methods, the most important first."""


@dataclass(frozen=True)
class Spec:
    """Specification of a run."""

    task: str
    method: str
    lr: float | None
    cosine: bool
    seed: int
    steps: int
    option: str = ""

    def __str__(self) -> str:
        rate = "" if self.lr is None else f"/{Cell(self.lr, self.cosine, self.option)}"
        return f"{self.task}/{self.method}{rate}/seed {self.seed}"

    @property
    def horizon(self) -> int:
        """Steps after which a run of a first-order method ends."""
        return max(1, round(self.steps * HORIZONS.get(self.option, 1.0)))


def spec_of(run: Run) -> Spec:
    """Return the specification of a finished run."""
    return Spec(**{name: run[name] for name in Spec.__dataclass_fields__ if name in run})


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


def optimizers_of(method: str, model: nn.Module, lr: float | None, option: str = "") -> list[torch.optim.Optimizer]:
    """Return a peer's optimisers of a model."""
    weights, more = list(model.parameters()), {"weight_decay": 0.0} | OPTIONS.get(option, {})
    if method == "adamw":
        return [torch.optim.AdamW(weights, lr=lr, **more)]
    if method == "sgd":
        return [torch.optim.SGD(weights, lr=lr, momentum=0.9)]
    if method == "schedulefree":
        from schedulefree import AdamWScheduleFree

        return [AdamWScheduleFree(weights, lr=lr, **more)]
    if method == "prodigy":
        from prodigyopt import Prodigy

        return [Prodigy(weights, lr=lr, **more)]
    if method == "kl-soap":
        import heavyball

        heavyball.utils.compile_mode = None  # compiling takes longer than a run
        torch.backends.opt_einsum.enabled = False  # so does the search for the order of a product of small matrices
        return [heavyball.KLSOAP(weights, lr=lr, precondition_frequency=10, **more)]  # 10 as in SOAP
    import pytorch_optimizer

    if method == "soap":
        return [pytorch_optimizer.SOAP(weights, lr=lr, **more)]
    if method == "soap-schedulefree":  # its average replaces SOAP's momentum
        soap = pytorch_optimizer.SOAP(weights, lr=lr, betas=(0.0, 0.95), **more)
        return [pytorch_optimizer.ScheduleFreeWrapper(soap, momentum=0.9)]
    if method == "splus":
        return [pytorch_optimizer.SPlus(weights, lr=lr, **more)]
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d)
    matrices = [module.weight for module in model.modules() if isinstance(module, layers)]
    others = [p for p in weights if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices, "use_muon": True, "lr": lr, **more}] if matrices else []
    groups += [{"params": others, "use_muon": False, "lr": lr, "betas": (0.9, 0.999), **more}] if others else []
    return [pytorch_optimizer.Muon(groups, use_adjusted_lr=True)]


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
    optimizers = optimizers_of(spec.method, model, spec.lr, spec.option)
    warm_up = spec.steps // 10 if spec.option == "warm-up" else problem.task.warm_up if spec.cosine else 0

    def factor(step: int) -> float:
        ramp = min(1.0, (step + 1) / warm_up) if warm_up else 1.0
        return ramp * (0.5 * (1.0 + math.cos(math.pi * min(1.0, step / spec.horizon))) if spec.cosine else 1.0)

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


def recompute_statistics(problem: Problem, model: nn.Module) -> None:
    """Compute the running statistics of BatchNorm at the present weights, on 20 batches."""
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


class MovingAverage:
    """Exponential moving average of the weights of a model; its decay increases to the given one in the first steps."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.steps = model, decay, 0
        self.weights = list(model.parameters())
        self.means = [p.detach().clone() for p in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.means, self.weights, 1.0 - decay)

    @torch.no_grad()
    def evaluate(self, problem: Problem) -> Evaluation:
        """Return the losses at the averaged weights; weights and buffers of the model stay the same."""
        weights = [p.clone() for p in self.weights]
        buffers = [b.clone() for b in self.model.buffers()]
        torch._foreach_copy_(self.weights, self.means)
        recompute_statistics(problem, self.model)
        values = problem.evaluate(self.model)
        torch._foreach_copy_(self.weights, weights)
        for buffer, old in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(old)
        return values


# ---------------------------------------------------------------------- runs

DECAYS = (0.99, 0.997)
"""Decays of moving averages."""
SWITCHED = ("schedulefree", "soap-schedulefree", "splus", "loop")
"""Methods that evaluate other weights than they train."""


def train(spec: Spec, problem: Problem) -> dict[str, Any]:
    """Make a run, and return its specification, curves and times."""
    torch.manual_seed(spec.seed)
    model = problem.model(spec.seed)
    method = stepper(spec, problem, model)
    budget = spec.horizon * problem.size
    every = max(1, min(50, spec.steps // 8)) * problem.size
    curve: dict[str, list[Any]] = {"evaluations": []} | {name: [] for name in Evaluation._fields}
    averaged = PEERS.get(spec.method, Peer()).averages and not spec.cosine and not spec.option
    averages = {f"{decay:g}": MovingAverage(model, decay) for decay in (DECAYS if averaged else ())}
    curves: dict[str, dict[str, list[Any]]] = {name: {key: [] for key in Evaluation._fields} for name in averages}
    steps, paces, ended = 0, [], "budget"

    def evaluate() -> None:
        switched = spec.method in SWITCHED and steps > 0
        if switched:
            method.optimizers[0].eval()
            recompute_statistics(problem, model)
        _append(curve, problem.evaluate(model))
        if switched:
            method.optimizers[0].train()
        curve["evaluations"].append(method.spent())
        for name, average in averages.items():
            _append(curves[name], average.evaluate(problem))

    if spec.method.endswith("schedulefree"):
        method.optimizers[0].train()
    evaluate()
    while method.spent() < budget:
        mark, before = min(budget, curve["evaluations"][-1] + every), steps
        synchronise(problem.device)
        clock = time.perf_counter()
        while method.spent() < mark:
            method.step()
            for average in averages.values():
                average.update()
            steps += 1
        synchronise(problem.device)
        paces.append((time.perf_counter() - clock) / (steps - before))
        evaluate()
        if not math.isfinite(curve["train"][-1]):
            ended = "diverged"
            break
    run = asdict(spec) | {"batch": problem.size, "ended": ended, "made": steps, "curve": curve, "note": problem.note}
    run["pace"] = statistics.median(paces)
    if averages:
        run["averages"] = curves
    if isinstance(method.optimizers[0], sanc.SANC | sanc.SCR):
        record = method.optimizers[0].record
        assert record is not None
        run["calls"] = {kind: getattr(record.calls, kind) for kind in ("value", "gradient", "product")}
    return run


def _append(curve: Mapping[str, list[Any]], values: Evaluation) -> None:
    """Append an evaluation to a curve, to the seven digits of single precision."""
    for name, value in values._asdict().items():
        curve[name].append(None if value is None else float(f"{value:.7g}"))


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
