"""Ask what it costs to train the paper's networks to the loss that a tuned Adam has after 1500 steps.

    python -m benchmarks.networks --out networks-output              # three tasks, five seeds; minutes on a GPU
    python -m benchmarks.networks --tasks mnist --methods adam robust --seeds 2
    python -m benchmarks.networks --minutes 6                        # then skip what is left, and say what
    python -m benchmarks.networks --quick                            # scikit-learn's digits on the CPU, seconds
    python -m benchmarks.networks --plot networks-output/networks.json [MORE.json …]
    python -m benchmarks.networks --export DIR                       # the data as .npz, for a machine without the rest

The MLP (300 and 500 neurons, tanh) on segment and the CNN (tanh) on MNIST and CIFAR10, batches of 128, cross entropy
plus 0.005 ‖W‖² on the weights. The target of a task is the full training loss of Adam after 1500 steps with the best of
five learning rates, the median over the seeds (of an even number, the upper one). The cost is counted in component
evaluations (values, gradients and Hessian products; a gradient brings its value with it) and in seconds.

* adam: torch's, with the penalty through weight_decay, which adds it to the gradient;
* robust: `sanc.SANC(groups, seed=seed)`, no option set, two thirds of the steps;
* sgd: momentum 0.9, the best of five learning rates;
* muon: torch's, for the matrices of the linear layers, with adjust_lr_fn="match_rms_adamw"; it takes matrices only, so
  convolution kernels and biases go to Adam with the same learning rate, the best of five. Its own weight_decay is
  another one (decoupled), so the penalty is part of the loss;
* lbfgs: torch's on the same batches: up to 5 iterations with a strong Wolfe line search on each, a history of 10 that
  is kept from batch to batch, the penalty in the loss; until twice Adam's evaluations;
* paper: the paper's SANC with three samples and its tuned L1 and L2; one seed, until five times the evaluations that
  robust needed, or 1500 steps, or 25 seconds.

Learning rates are compared with seed 0, Adam's by the loss at the end and the others' by the evaluations to the target
and then by the loss at the end; the best one goes on with the other seeds (Adam: all; sgd, muon, lbfgs: two in all). A
seed gives every method the same initial weights and the same batches. Everything runs one after another in one process
with the data on the device. The full loss is evaluated every 25 steps (of sgd and muon every 50, of lbfgs and paper,
whose steps are long, every 8) outside the clock and the counts, and *reached* means: at one of these evaluations. Each
method makes a few steps on a model of its own first, so that nobody's clock pays for the loading of kernels.

Data: NAME.npz, or parts NAME-*.npz in the order of their names, in --data-dir (arrays x and y; uint8 pixels are divided
by 255, float32 is taken as it is), else what `sanc.lab` finds. --out gets networks.json (rewritten after each run, so
that nothing is lost), table.md and networks.png.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn

import sanc
from benchmarks.common import median, plain_table
from benchmarks.timing import machine, plain, synchronise
from sanc.lab import models
from sanc.lab.experiments import CONSTANTS
from sanc.lab.runs import image_shape, load_data

BATCH = 128
DECAY = 0.01
STEPS = 1500
TASKS = {"segment": "mlp", "mnist": "cnn", "cifar10": "cnn"}
EXTRA = {"digits": "mlp"}
METHODS = ("adam", "robust", "sgd", "muon", "lbfgs", "paper")
RATES: Mapping[str, tuple[float, ...]] = {
    "adam": (1e-3, 3e-4, 3e-3, 1e-4, 1e-2),
    "sgd": (1e-2, 3e-2, 3e-3, 1e-1, 1e-3),
    "muon": (3e-3, 1e-3, 1e-2, 3e-4, 3e-2),
}
"""Learning rates, the likely ones first, for the case that time runs out; the others have none."""
FEW = 2
"""Seeds of the peers that are not Adam."""
LBFGS_FACTOR, PAPER_FACTOR, PAPER_SECONDS = 2.0, 5.0, 25.0


@dataclass
class Task:
    """A network and its data, on the device."""

    name: str
    kind: str
    x: Tensor
    y: Tensor
    classes: int
    widths: tuple[int, int] = (300, 500)
    _draws: dict[int, Tensor] = field(default_factory=dict)

    def model(self, seed: int) -> nn.Module:
        """Return the network with the weights of a seed."""
        if self.kind == "mlp":
            model = models.mlp(self.x.shape[1], self.classes, widths=self.widths)
        else:
            model = models.cnn(self.x.shape[1], self.x.shape[2], self.classes)
        models.initialise(model, seed)
        return model.to(self.x.device)

    def draws(self, seed: int, steps: int) -> Tensor:
        """Return the rows of three independent samples for each step."""
        if seed in self._draws and len(self._draws[seed]) >= steps:
            return self._draws[seed][:steps]
        rng = np.random.default_rng((seed, 128))
        size = min(BATCH, len(self.x))
        rows = [rng.choice(len(self.x), size, replace=False) for _ in range(3 * steps)]
        self._draws[seed] = torch.from_numpy(np.array(rows)).view(steps, 3, size).to(self.x.device)
        return self._draws[seed]


def arrays(name: str, folder: Path | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read the rows and labels of a set: from .npz files, or by the laboratory's loader."""
    files = []
    if folder is not None:
        whole = folder / f"{name}.npz"
        files = [whole] if whole.exists() else sorted(folder.glob(f"{name}-*.npz"))
    if files:
        parts = [np.load(file) for file in files]
        x = np.concatenate([part["x"] for part in parts])
        y = np.concatenate([part["y"] for part in parts])
        x = np.divide(x, 255, dtype=np.float32) if x.dtype == np.uint8 else x.astype(np.float32)
    else:
        loaded = load_data(name, folder, "float32")
        x = loaded.X.toarray() if scipy.sparse.issparse(loaded.X) else np.array(loaded.X)
        y = np.array(loaded.y)
    return x.reshape(len(x), -1), y.astype(np.int64)


def load(name: str, folder: Path | None, device: torch.device) -> Task:
    """Make a task."""
    rows, labels = arrays(name, folder)
    kind = (TASKS | EXTRA)[name]
    x, y = torch.from_numpy(rows).to(device), torch.from_numpy(labels).to(device)
    if kind == "cnn":
        channels, side = image_shape(x.shape[1])
        x = x.view(len(x), channels, side, side)
    return Task(name, kind, x, y, int(labels.max()) + 1, (300, 500) if name in TASKS else (50, 30))


def export(names: Sequence[str], source: Path | None, folder: Path, rows: int = 10_000) -> None:
    """Write the sets as .npz in parts of at most so many rows, pixels as bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        x, y = arrays(name, source)
        if TASKS[name] == "cnn":
            x = np.rint(x * 255).astype(np.uint8)
        for number, start in enumerate(range(0, len(x), rows)):
            end = f"-{number:02d}" if len(x) > rows else ""
            path = folder / f"{name}{end}.npz"
            np.savez_compressed(path, x=x[start : start + rows], y=y[start : start + rows])
            print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB", flush=True)


# ---------------------------------------------------------------------- the methods


@dataclass
class Stepper:
    """A method under way: `step` makes one step on the rows of (gradient, Hessian, objective)."""

    step: Callable[[Tensor], None]
    evaluations: Callable[[], int]
    notes: dict[str, Any] = field(default_factory=dict)


def stepper(method: str, task: Task, model: nn.Module, lr: float | None, seed: int) -> Stepper:
    """Build a method for a model."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    if method in ("robust", "paper"):
        return _sanc(method, task, model, loss, seed)
    calls = 0
    optimizers: list[torch.optim.Optimizer] = []
    penalised = [p for p in model.parameters() if p.ndim > 1] if method in ("muon", "lbfgs") else []
    if method == "adam":
        optimizers.append(torch.optim.Adam(models.groups(model, DECAY), lr=lr))
    elif method == "sgd":
        optimizers.append(torch.optim.SGD(models.groups(model, DECAY), lr=lr, momentum=0.9))
    elif method == "muon":
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        optimizers.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        optimizers.append(torch.optim.Adam(others, lr=lr))
    else:
        optimizers.append(
            torch.optim.LBFGS(
                model.parameters(), max_iter=5, history_size=10, tolerance_grad=0.0, tolerance_change=0.0,
                line_search_fn="strong_wolfe",
            )
        )  # fmt: skip

    def step(rows: Tensor) -> None:
        x, y = task.x[rows[0]], task.y[rows[0]]

        def closure() -> Tensor:
            nonlocal calls
            calls += len(x)
            for optimizer in optimizers:
                optimizer.zero_grad()
            value = loss(x, y)
            for p in penalised:
                value = value + 0.5 * DECAY * p.square().sum()
            value.backward()
            return value

        if method == "lbfgs":
            optimizers[0].step(closure)
            return
        closure()
        for optimizer in optimizers:
            optimizer.step()

    return Stepper(step, lambda: calls)


def _sanc(method: str, task: Task, model: nn.Module, loss: Callable[..., Tensor], seed: int) -> Stepper:
    if method == "robust":
        optimizer = sanc.SANC(models.groups(model, DECAY), seed=seed)
    else:
        first, second = CONSTANTS.get(task.name, (100.0, 100.0))
        optimizer = sanc.SANC(
            models.groups(model, DECAY), preset="paper", eta1=0.1, eta2=0.3, L1=first, L2=second, seed=seed
        )
    notes: dict[str, Any] = {"branches": {}, "sigma": [], "products": 0, "values": 0}

    def step(rows: Tensor) -> None:
        samples = [sanc.Batch(loss, task.x[r], task.y[r]) for r in (rows if method == "paper" else rows[:2])]
        optimizer.step(samples[0], hessian=samples[1], **({"objective": samples[2]} if method == "paper" else {}))
        record = optimizer.record
        assert record is not None
        name = str(record.branch)
        notes["branches"][name] = notes["branches"].get(name, 0) + 1
        notes["sigma"].append(record.sigma)
        notes["products"], notes["values"] = record.calls.product, record.calls.value

    return Stepper(step, lambda: 0 if optimizer.record is None else optimizer.record.calls.total, notes)


# ---------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Limits:
    """Where a run ends."""

    steps: int
    every: int
    evaluations: float = math.inf
    seconds: float = math.inf


def train(method: str, task: Task, lr: float | None, seed: int, limits: Limits) -> dict[str, Any]:
    """Make a run and return its trace."""
    model = task.model(seed)
    draws = task.draws(seed, limits.steps)
    mover = stepper(method, task, model, lr, seed)
    device = task.x.device
    trace: dict[str, list[Any]] = {"step": [], "evaluations": [], "seconds": [], "loss": []}
    seconds, done, ended = 0.0, 0, "steps"

    def look() -> float:
        loss = models.training_loss(model, task.x, task.y, DECAY)
        for name, value in zip(trace, (done, mover.evaluations(), seconds, loss), strict=True):
            trace[name].append(value)
        return loss

    start = look()
    while done < limits.steps:
        block = min(limits.every, limits.steps - done)
        synchronise(device)
        clock = time.perf_counter()
        for rows in draws[done : done + block]:
            mover.step(rows)
        synchronise(device)
        seconds += time.perf_counter() - clock
        done += block
        loss = look()
        if not loss < 100.0 * (start + 1.0):  # not finite, or far away
            ended = "diverged"
            break
        if mover.evaluations() >= limits.evaluations or seconds >= limits.seconds:
            ended = "evaluations" if mover.evaluations() >= limits.evaluations else "seconds"
            break
    notes = dict(mover.notes)
    sigmas = notes.pop("sigma", [])
    if sigmas:
        notes |= {"sigma_min": min(sigmas), "sigma_max": max(sigmas), "sigma_last": sigmas[-1]}
    return {"task": task.name, "method": method, "lr": lr, "seed": seed, "ended": ended, "trace": trace} | notes


def warm_up(method: str, task: Task) -> None:
    """Load the kernels that a method needs."""
    mover = stepper(method, task, task.model(0), RATES.get(method, (None,))[0], 0)
    for rows in task.draws(0, 4):
        mover.step(rows)
    synchronise(task.x.device)


# ---------------------------------------------------------------------- what came out


def final(run: Mapping[str, Any]) -> float:
    """Return the last full loss, infinite where the run diverged."""
    loss = run["trace"]["loss"][-1]
    return math.inf if run["ended"] == "diverged" or loss is None or not math.isfinite(loss) else float(loss)


def cost(run: Mapping[str, Any], target: float, what: str = "evaluations") -> float:
    """Return what was spent until the full loss was at most the target, infinite where it never was."""
    for spent, loss in zip(run["trace"][what], run["trace"]["loss"], strict=True):
        if loss is not None and loss <= target:
            return float(spent)
    return math.inf


def chosen(runs: Sequence[Mapping[str, Any]], task: str, method: str) -> list[Mapping[str, Any]]:
    """Return the runs of a method with its best learning rate."""
    mine = [run for run in runs if run["task"] == task and run["method"] == method]
    first = [run for run in mine if run["seed"] == 0]
    if not first:
        return mine
    target = math.nan if method == "adam" else target_of(runs, task)
    best = min(first, key=lambda run: (cost(run, target), final(run)))
    return [run for run in mine if run["lr"] == best["lr"]]


def target_of(runs: Sequence[Mapping[str, Any]], task: str) -> float:
    """Return Adam's loss at the end, the upper median over its seeds; NaN without Adam."""
    ends = sorted(final(run) for run in chosen(runs, task, "adam"))
    return ends[len(ends) // 2] if ends else math.nan


def summary(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each task and method."""
    rows = []
    for task in dict.fromkeys(run["task"] for run in runs):
        target = target_of(runs, task)
        adam = chosen(runs, task, "adam")
        whole = {what: median([run["trace"][what][-1] for run in adam]) for what in ("evaluations", "seconds")}
        for method in [m for m in METHODS if any(run["task"] == task and run["method"] == m for run in runs)]:
            mine = chosen(runs, task, method)
            row: dict[str, Any] = {"task": task, "method": method, "lr": mine[0]["lr"], "target": target}
            for what in ("evaluations", "seconds"):
                row[what] = median([cost(run, target, what) for run in mine])
                row[what + "_ratio"] = row[what] / whole[what]
            row["final"] = median([final(run) for run in mine])
            row["steps"] = int(median([run["trace"]["step"][-1] for run in mine]))
            per_step = [run["trace"]["seconds"][-1] / run["trace"]["step"][-1] for run in mine]
            row["milliseconds"] = 1000 * median(per_step)
            row["reached"] = sum(math.isfinite(cost(run, target)) for run in mine)
            row["seeds"] = len(mine)
            rows.append(row)
    return rows


HEAD = (
    "task", "method", "lr", "evaluations", "÷ Adam's", "seconds", "÷ Adam's", "final loss", "steps", "ms/step",
    "reached",
)  # fmt: skip


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay the rows out as a Markdown table."""

    def number(value: float, form: str) -> str:
        return "–" if math.isnan(value) else "∞" if math.isinf(value) else format(value, form)

    cells = []
    for row in rows:
        lr = "–" if row["lr"] is None else f"{row['lr']:g}"
        cells.append(
            [
                row["task"], row["method"], lr, number(row["evaluations"], ",.0f"),
                number(row["evaluations_ratio"], ".2f"), number(row["seconds"], ".2f"),
                number(row["seconds_ratio"], ".2f"), number(row["final"], ".4f"), str(row["steps"]),
                number(row["milliseconds"], ".2f"), f"{row['reached']} of {row['seeds']}",
            ]
        )  # fmt: skip
    return plain_table(HEAD, cells, left=2)


def legend(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Say what the columns mean, and what was left out."""
    targets = {row["task"]: row["target"] for row in rows}
    steps, batch, every = (document["options"][name] for name in ("steps", "batch", "every"))
    words = [
        f"Target: the median full loss of Adam after {steps} steps ({steps * batch:,} evaluations): "
        + ", ".join(f"{name} {value:.4f}" for name, value in targets.items())
        + ".",
        "evaluations, seconds: median over the seeds until the target was reached, ∞ where most seeds did not reach "
        f"it;\n÷ Adam's: over what all {steps} steps of Adam took. The full loss is seen every "
        f"{every} steps,\nof sgd and muon every {2 * every}, of lbfgs and paper every {max(1, every // 3)}. "
        f"Device: {document['environment']['device']}, torch {document['environment']['torch']}.",
    ]
    ends = [
        f"{row['task']}/{row['method']}"
        for row in rows
        if row["method"] in RATES and row["lr"] in (min(RATES[row["method"]]), max(RATES[row["method"]]))
    ]
    if ends:
        words.append("The best learning rate was the smallest or the largest tried: " + ", ".join(ends) + ".")
    if document["skipped"]:
        words.append("Skipped, since the time was up: " + ", ".join(document["skipped"]) + ".")
    if document["missing"]:
        words.append("Left out: " + "; ".join(document["missing"]) + ".")
    return "\n".join(words)


# ---------------------------------------------------------------------- picture

LOOKS: Mapping[str, dict[str, Any]] = {
    "adam": {"color": "C0", "label": "Adam, tuned"},
    "robust": {"color": "black", "lw": 2.2, "zorder": 5, "label": "SANC, robust, untuned"},
    "sgd": {"color": "C1", "label": "SGD with momentum, tuned"},
    "muon": {"color": "C2", "label": "Muon, tuned"},
    "lbfgs": {"color": "C4", "label": "L-BFGS"},
    "paper": {"color": "C3", "label": "SANC, paper"},
}


def picture(document: Mapping[str, Any], path: Path) -> None:
    """Draw the full loss over evaluations and over seconds: median and range of the seeds, best learning rates."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    runs = document["runs"]
    names = list(dict.fromkeys(run["task"] for run in runs))
    figure = Figure(figsize=(10, 3.3 * len(names) + 0.7))
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(names), 2, squeeze=False, sharey="row")
    seen: dict[str, Any] = {}
    for pair, name in zip(axes, names, strict=True):
        target = target_of(runs, name)
        ends, starts = [], []
        for method, look in LOOKS.items():
            mine = [run for run in chosen(runs, name, method) if math.isfinite(final(run))]
            if not mine:
                continue
            length = min(len(run["trace"]["loss"]) for run in mine)
            loss = np.array([run["trace"]["loss"][:length] for run in mine], np.float64)
            ends.append(float(loss.min()))
            starts.append(float(loss[:, min(1, length - 1)].max()))
            for axis, what in zip(pair, ("evaluations", "seconds"), strict=True):
                spent = np.median([run["trace"][what][:length] for run in mine], axis=0)
                (seen[look["label"]],) = axis.plot(spent[1:], np.median(loss, axis=0)[1:], **{"lw": 1.4, **look})
                axis.fill_between(
                    spent[1:], loss.min(axis=0)[1:], loss.max(axis=0)[1:], color=look["color"], alpha=0.12, lw=0
                )
        for axis, what in zip(pair, ("evaluations", "seconds"), strict=True):
            if math.isfinite(target):
                axis.axhline(target, color="grey", lw=0.8, ls=":", zorder=1)
            axis.set_xscale("log")
            axis.set_yscale("log")
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
                scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
                scale.set_minor_formatter(NullFormatter())
            if ends:
                axis.set_ylim(0.93 * min(ends), 1.1 * max(starts))
            axis.set_title(f"{name}: full training loss", fontsize=10)
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=8)
            axis.set_xlabel("component evaluations" if what == "evaluations" else "seconds")
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    figure.legend(list(seen.values()), list(seen), loc="lower center", ncol=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


# ---------------------------------------------------------------------- the command


class Session:
    """The runs made so far, what is left out, and the clock."""

    def __init__(self, options: argparse.Namespace, document: dict[str, Any]) -> None:
        self.options = options
        self.document = document
        self.runs: list[dict[str, Any]] = document["runs"]
        self.clock = time.perf_counter()
        self.warm: set[tuple[str, str]] = set()

    def run(self, task: Task, method: str, lr: float | None, seed: int) -> None:
        """Make a run if there is time, and save it."""
        name = f"{task.name}/{method}" + ("" if lr is None else f"/{lr:g}") + f"/seed {seed}"
        spent = time.perf_counter() - self.clock
        if spent > 60 * self.options.minutes:
            self.document["skipped"].append(name)
            print(f"{spent:6.0f} s  {name:32s} skipped: the time is up", flush=True)
            self.save()
            return
        try:
            if (task.name, method) not in self.warm:
                warm_up(method, task)
                self.warm.add((task.name, method))
            run = train(method, task, lr, seed, self.limits(task, method))
        except torch.OutOfMemoryError as trouble:
            self.document["missing"].append(f"{name}: {str(trouble).splitlines()[0]}")
            return
        self.runs.append(run)
        self.save()
        target = math.nan if method == "adam" else target_of(self.runs, task.name)
        at, trace = cost(run, target), run["trace"]
        print(
            f"{time.perf_counter() - self.clock:6.0f} s  {name:32s} loss {final(run):.4f} after {trace['step'][-1]} "
            f"steps, {trace['evaluations'][-1]:,} evaluations, {trace['seconds'][-1]:.1f} s"
            + (f"; target after {at:,.0f}, {cost(run, target, 'seconds'):.1f} s" if math.isfinite(at) else "")
            + ("" if run["ended"] == "steps" else f"; ended: {run['ended']}"),
            flush=True,
        )

    def limits(self, task: Task, method: str) -> Limits:
        """Return where a run of this method ends."""
        steps, every = self.options.steps, self.options.every
        adam = steps * min(BATCH, len(task.x))
        if method == "robust":
            return Limits(max(1, 2 * steps // 3), every)
        if method == "lbfgs":
            return Limits(steps, max(1, every // 3), evaluations=LBFGS_FACTOR * adam)
        if method == "paper":
            robust = chosen(self.runs, task.name, "robust")
            needed = median([cost(run, target_of(self.runs, task.name)) for run in robust])
            if not math.isfinite(needed):
                needed = median([run["trace"]["evaluations"][-1] for run in robust])
            needed = adam if math.isnan(needed) else needed
            often = max(1, every // 3)  # its steps are long
            return Limits(steps, often, evaluations=PAPER_FACTOR * needed, seconds=PAPER_SECONDS)
        return Limits(steps, every if method == "adam" else 2 * every)

    def method(self, task: Task, method: str) -> None:
        """Compare the learning rates with seed 0, and go on with the best one."""
        seeds = self.options.seeds
        for lr in RATES.get(method, (None,))[: 2 if self.options.quick else None]:
            self.run(task, method, lr, 0)
        known = chosen(self.runs, task.name, method)
        if not known:
            return
        last = seeds if method in ("adam", "robust") else 1 if method == "paper" else min(FEW, seeds)
        for seed in range(1, last):
            self.run(task, method, known[0]["lr"], seed)

    def save(self) -> None:
        """Replace the JSON as a whole."""
        if self.options.out is None:
            return
        path = self.options.out / "networks.json"
        scratch = path.with_name(path.name + ".tmp")
        scratch.write_text(json.dumps(plain(self.document)) + "\n", encoding="utf-8")
        scratch.replace(path)


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Read JSON files of tasks or methods that were run separately."""
    document: dict[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))
    for file in files[1:]:
        other = json.loads(file.read_text(encoding="utf-8"))
        if other["options"] | {"seeds": 0} != document["options"] | {"seeds": 0}:
            raise SystemExit(f"{file} was made with other options than {files[0]}: draw it on its own.")
        for key in ("runs", "skipped", "missing"):
            document[key] += other[key]
    done = ["/".join(str(run[k]) for k in ("task", "method", "lr") if run[k] is not None) + f"/seed {run['seed']}"
            for run in document["runs"]]  # fmt: skip
    document["skipped"] = [name for name in document["skipped"] if name not in done]
    return document


def report(document: Mapping[str, Any], folder: Path | None) -> None:
    """Print and write the table and the picture."""
    rows = summary(document["runs"])
    text = f"{table_of(rows)}\n\n{legend(document, rows)}"
    print(f"\n{text}")
    if folder is not None and rows:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        picture(document, folder / "networks.png")
        print(f"written to {folder}: table.md, networks.png")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, *EXTRA], help="by default segment, mnist and cifar10")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="by default all there are")
    parser.add_argument("--seeds", type=int, help="seeds of Adam and of robust; by default 5")
    parser.add_argument("--steps", type=int, help=f"steps of Adam; by default {STEPS}")
    parser.add_argument("--every", type=int, help="steps between evaluations of the full loss; by default 25")
    parser.add_argument("--minutes", type=float, default=math.inf, help="skip what has not begun by then")
    parser.add_argument("--device", help="by default cuda where there is one")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--data-dir", type=Path, help="folder of NAME.npz, or of the laboratory's files")
    parser.add_argument("--out", type=Path, help="folder for the JSON, the table and the picture")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny configuration on the CPU, without Muon, whose bfloat16 many a CPU emulates",
    )
    parser.add_argument(
        "--plot", type=Path, nargs="+", metavar="FILE", help="table and picture of earlier JSON files; no runs"
    )
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the tasks' data as .npz; no runs")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        report(merged(options.plot), options.out or options.plot[0].parent)
        return 0
    names = options.tasks or (list(EXTRA) if options.quick else list(TASKS))
    if options.export is not None:
        export([name for name in names if name in TASKS], options.data_dir, options.export)
        return 0
    options.steps = options.steps or (60 if options.quick else STEPS)
    options.seeds = options.seeds or (2 if options.quick else 5)
    options.every = options.every or (10 if options.quick else 25)
    if min(options.steps, options.seeds, options.every, options.threads) < 1:
        parser.error("--steps, --seeds, --every and --threads must be positive")
    wanted = options.methods or [method for method in METHODS if not (options.quick and method == "muon")]
    methods = [method for method in METHODS if method in wanted]
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() and not options.quick else "cpu"))
    torch.set_num_threads(options.threads)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)

    document: dict[str, Any] = {
        "environment": machine(device) | {"tf32_convolutions": torch.backends.cudnn.allow_tf32},
        "options": {"steps": options.steps, "seeds": options.seeds, "every": options.every, "batch": BATCH},
        "runs": [],
        "skipped": [],
        "missing": [],
    }
    if "muon" in methods and not hasattr(torch.optim, "Muon"):
        document["missing"].append(f"muon, which torch {torch.__version__} does not have")
        methods.remove("muon")
    tasks = []
    for name in names:
        try:
            tasks.append(load(name, options.data_dir, device))
        except (sanc.SancError, OSError, ImportError) as trouble:
            document["missing"].append(f"{name}: {trouble}")
    for what in document["missing"]:
        print(f"left out: {what}", flush=True)
    session = Session(options, document)
    for method in methods:  # the most important first, on every task
        for task in tasks:
            session.method(task, method)
    session.save()
    report(document, options.out)
    return int(not document["runs"])


if __name__ == "__main__":
    sys.exit(main())
