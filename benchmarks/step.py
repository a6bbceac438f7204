"""Ask what a step costs above its own oracle calls, and what CUDA graphs save.

    python -m benchmarks.step                                        # on a GPU where there is one
    python -m benchmarks.step --device cpu --models mlp cnn-mnist
    python -m benchmarks.step --robust                               # the default method, too
    python -m benchmarks.step --quick                                # a small network, seconds

A step of the paper's method asks for one gradient, J = 5 Hessian products and function values. *bare* is just that by
hand in torch: the gradient as one flat vector, products by double backward from a flat vector to a flat vector, values
without a graph. No Lanczos, no cubic model, no decision. Two kinds of steps:

* one sample: `opt.step(batch)`; f(x) comes with the gradient, the products share its graph, one value is new;
* three samples: a gradient, products on a second sample (their graph needs a gradient of its own), two values on a
  third.

The goals: on a CPU a step takes at most 1.3 times its bare calls; on a GPU a captured step (`capture=True`) of the MLP
is at least 6 times as fast as an eager one, and one of a CNN no slower.

All steps start at the same point, to which the parameters are put back off the clock; those of small networks are made
five in a row, as in a training loop. σ hardly moves (100 or more, gamma = 1.0001), epsilon_g is 1e-30 and the three
samples hold the same rows, so that every step builds the whole Krylov space and is taken. Everything is timed in turns,
in an order that is drawn, in one process; a ratio is the median over the turns of the ratio within one.

With --robust there is a second table, of the default method, which builds a Krylov space once in fifty steps: whole
cycles beside the calls that they made, each at its bare price, and beside Adam's step. --out gets step.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sanc
from benchmarks.common import plain_table
from benchmarks.timing import in_turns, machine, ratio, synchronise, turns, write_json
from sanc.lab import models

J, BATCH, CYCLE = 5, 128, 50
OVERHEAD, SPEEDUP = 1.3, 6.0
"""The goals: most of step ÷ bare on a CPU, and least of eager ÷ captured of the MLP on a GPU."""
STEADY: dict[str, Any] = {
    "preset": "paper", "sigma0": 100.0, "sigma_floor": 100.0, "gamma": 1.0001, "epsilon_g": 1e-30
}  # fmt: skip
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (lambda: models.mlp(19, 7), (19,), 7),
    "cnn-mnist": (lambda: models.cnn(1, 28, 10), (1, 28, 28), 10),
    "cnn-cifar": (lambda: models.cnn(3, 32, 10), (3, 32, 32), 10),
    "small": (lambda: models.mlp(10, 3, widths=(30, 50)), (10,), 3),
}


class Task:
    """A network and random rows of the right shape, on the device."""

    def __init__(self, name: str, device: torch.device, rows: int = BATCH) -> None:
        make, shape, classes = MODELS[name]
        generator = torch.Generator().manual_seed(0)
        self.name, self.device = name, device
        self.model = make()
        models.initialise(self.model, 0)
        self.model.to(device)
        self.leaves = list(self.model.parameters())
        self.x = torch.randn(rows, *shape, generator=generator).to(device)
        self.y = torch.randint(classes, (rows,), generator=generator).to(device)
        self.samples = [sanc.Batch(self.loss, self.x, self.y) for _ in range(3)]  # three, if of the same rows
        self._start = [p.detach().clone() for p in self.leaves]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), y)

    def reset(self) -> None:
        """Put the parameters back."""
        with torch.no_grad():
            for p, start in zip(self.leaves, self._start, strict=True):
                p.copy_(start)

    def optimiser(self, **options: Any) -> sanc.SANC:
        return sanc.SANC(self.leaves, seed=0, krylov_dim=J, check=False, **options)

    def take(self, opt: sanc.SANC, three: bool) -> None:
        """Make a step."""
        first, second, third = self.samples
        if three:
            opt.step(first, hessian=second, objective=third)
        else:
            opt.step(first)


class Bare:
    """The oracle calls of a step by hand, and nothing else."""

    def __init__(self, task: Task) -> None:
        self.task, self.leaves = task, task.leaves
        self.v = torch.randn(sum(p.numel() for p in self.leaves)).to(task.device)
        self.v /= self.v.norm()

    def value(self) -> float:
        with torch.no_grad():
            return float(self.task.loss(self.task.x, self.task.y))

    def gradient(self) -> Tensor:
        return _flat(torch.autograd.grad(self.task.loss(self.task.x, self.task.y), self.leaves))

    def products(self, count: int = J) -> list[Tensor]:
        """Compute a gradient and, on its graph, `count` products."""
        grads = torch.autograd.grad(self.task.loss(self.task.x, self.task.y), self.leaves, create_graph=True)
        results = [_flat([g.detach() for g in grads])]
        for _ in range(count):
            pieces = self.v.split([p.numel() for p in self.leaves])
            v = [piece.view_as(p) for piece, p in zip(pieces, self.leaves, strict=True)]
            results.append(_flat(torch.autograd.grad(grads, self.leaves, v, retain_graph=True)))
        return results

    def step(self, three: bool) -> list[Any]:
        """All calls of a step."""
        if three:
            return [self.gradient(), *self.products(), self.value(), self.value()]
        return [*self.products(), self.value()]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def paper_row(task: Task, three: bool, seconds: float) -> dict[str, Any]:
    """Time the paper's step beside its calls and, on a GPU, eager beside captured."""
    cuda, bare = task.device.type == "cuda", Bare(task)
    made = {"step": task.optimiser(**STEADY)}
    if cuda:
        made["captured"] = task.optimiser(**STEADY, capture=True)
    calls: dict[str, Callable[[], Any]] = {"bare": partial(bare.step, three)}
    for name, opt in made.items():
        for _ in range(4 if name == "captured" else 1):  # what is captured is recorded first
            task.reset()
            task.take(opt, three)
        if name == "captured" and opt.capture_reason:
            raise SystemExit(f"{task.name} is not captured: {opt.capture_reason}")
        calls[name] = partial(task.take, opt, three)
    many = {"in_a_row": 5, "least": 5} if len(bare.v) < 10**6 else {"in_a_row": 1, "least": 3}
    rounds = turns(calls, device=task.device, seconds=seconds, before=task.reset, warm_up=1, **many)
    for opt in made.values():
        record = opt.record
        assert record is not None
        if record.krylov_dim != J or record.trials != 1 or record.branch is sanc.Branch.STAYED:
            raise SystemExit(f"a step on {task.name} did not do all its work: {record}")
    row: dict[str, Any] = {"model": task.name, "samples": 3 if three else 1}
    row |= {name: statistics.median(times) for name, times in rounds.items()}
    row["ratio"] = ratio(rounds["step"], rounds["bare"])
    if cuda:
        row["speedup"] = ratio(rounds["step"], rounds["captured"])
    return row | {"goal": goal(row)}


def goal(row: dict[str, Any]) -> str:
    """Say what a row is to reach, and whether it does."""
    if row["model"] == "small":
        return "none"
    if "speedup" in row:
        least = SPEEDUP if row["model"] == "mlp" else 1.0
        return f"≥ {least:g} {'met' if row['speedup'] >= least else 'MISSED'}"
    return f"≤ {OVERHEAD:g} {'met' if row['ratio'] <= OVERHEAD else 'MISSED'}"


def robust_row(task: Task, cycles: int, seconds: float) -> dict[str, Any]:
    """Time whole cycles of the default method beside the calls that they made at their bare prices, and Adam."""
    bare, cuda = Bare(task), task.device.type == "cuda"
    adam = torch.optim.Adam(task.leaves, lr=1e-3)

    def adam_step() -> None:
        adam.zero_grad()
        task.loss(task.x, task.y).backward()
        adam.step()

    calls = {"gradient": bare.gradient, "value": bare.value, "products": bare.products, "adam": adam_step}
    price = in_turns(calls, device=task.device, seconds=seconds)
    adam.zero_grad()
    row: dict[str, Any] = {"model": task.name, "adam": price["adam"]}
    for name in ("step", "captured") if cuda else ("step",):
        task.reset()
        opt = task.optimiser(capture=name == "captured")
        for _ in range(CYCLE):  # the first phase is over
            opt.step(task.samples[0])
        before, clock = opt.record, _clock(task.device)
        for _ in range(cycles * CYCLE):
            opt.step(task.samples[0])
        row[name] = (_clock(task.device) - clock) / (cycles * CYCLE)
        if name == "step":
            row["bare"] = worth(before, opt.record, price) / (cycles * CYCLE)
    return row | {"ratio": row["step"] / row["bare"]}


def worth(before: Any, after: Any, price: dict[str, float]) -> float:
    """Add up what the calls between two records cost by hand; the products' price has their gradient in it."""
    kinds = ("value", "gradient", "product")
    value, gradient, product = ((getattr(after.calls, k) - getattr(before.calls, k)) / BATCH for k in kinds)
    spaces = product / J
    return value * price["value"] + (gradient - spaces) * price["gradient"] + spaces * price["products"]


def _clock(device: torch.device) -> float:
    synchronise(device)
    return time.perf_counter()


def tables(document: dict[str, Any]) -> str:
    cuda = "gpu" in document["machine"]

    def cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
        return [f"{row[k]:.2f}" if k in ("ratio", "speedup") else f"{1e3 * row[k]:.2f}" for k in names]

    head = ["model", "samples", "bare, ms", "step, ms", "step ÷ bare"]
    names = ["bare", "step", "ratio"]
    if cuda:
        head += ["captured, ms", "eager ÷ captured"]
        names += ["captured", "speedup"]
    rows = [[r["model"], r["samples"], *cells(r, names), r["goal"]] for r in document["paper"]]
    text = plain_table([*head, "goal"], rows)
    if not document["robust"]:
        return text
    head = ["robust", "its calls, ms", "step, ms", "÷", *(["captured, ms"] if cuda else []), "Adam, ms"]
    names = ["bare", "step", "ratio", *(["captured"] if cuda else []), "adam"]
    return f"{text}\n\n{plain_table(head, [[r['model'], *cells(r, names)] for r in document['robust']])}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, help="by default the MLP and the CNNs")
    parser.add_argument("--device", help="by default cuda where there is one")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in products and convolutions of a GPU")
    parser.add_argument("--seconds", type=float, help="time for each row of the first table; by default 8")
    parser.add_argument("--robust", action="store_true", help="also time cycles of the default method")
    parser.add_argument("--quick", action="store_true", help="a small network, for a second")
    parser.add_argument("--out", type=Path, help="folder for step.json")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() and not options.quick else "cpu"))
    names = options.models or (["small"] if options.quick else ["mlp", "cnn-mnist", "cnn-cifar"])
    seconds = options.seconds or (0.5 if options.quick else 8.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    document: dict[str, Any] = {"machine": machine(device), "J": J, "batch": BATCH, "paper": [], "robust": []}
    try:
        for name in names:
            task = Task(name, device)
            document["paper"] += [paper_row(task, three, seconds) for three in (False, True)]
            if options.robust or options.quick:
                document["robust"].append(robust_row(task, 1 if device.type == "cpu" else 4, seconds / 8))
            print(f"{name} done", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
    print(f"{tables(document)}\n\n{document['machine']}")
    if options.out is not None:
        write_json(options.out / "step.json", document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
