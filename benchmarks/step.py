"""Ask what a step costs above its own oracle calls.

    python -m benchmarks.step --out step-output                 # on the CPU, or on a GPU where there is one
    python -m benchmarks.step --device cpu --models mlp
    python -m benchmarks.step --quick                           # a small network, seconds

A step of the paper's method asks for one gradient, J = 5 Hessian products and function values; nothing can do it for
less. *bare* is just that, written by hand in torch: the gradient as one flat vector, products from a flat vector to a
flat vector, values without a graph; the faster of double backward and forward over reverse (`torch.func`), on a GPU
eager and captured in one CUDA graph. No Lanczos, no cubic model, no decision. Two kinds of steps:

* one sample: `opt.step(batch)`; f(x) comes with the gradient, the products share its graph, one value is new;
* three samples: a gradient, products on a second sample (their graph needs a gradient of its own), two values on a
  third.

Eager steps start at the same point, to which the parameters are put back off the clock; those of the MLP on a CPU
five in a row, as in a training loop. Graphs do the same work wherever they are: both kinds are launched fifty times in
a row and only then waited for. σ hardly moves (100 or more, gamma = 1.0001), epsilon_g is 1e-30 and the three samples
hold the same rows, so that every step builds the whole Krylov space and is taken. Everything is timed in turns, in an
order that is drawn, in one process; a ratio is the median over the turns of the ratio within one.

The steps of the default method (`robust`), which build a Krylov space once in fifty steps, are timed over whole cycles
and compared with the calls that they made, each at its bare price, and on a GPU with Adam's eager step.
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

J, BATCH, CYCLE, BLOCK, ROW = 5, 128, 50, 50, 5
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (lambda: models.mlp(19, 7), (19,), 7),
    "cnn-mnist": (lambda: models.cnn(1, 28, 10), (1, 28, 28), 10),
    "cnn-cifar": (lambda: models.cnn(3, 32, 10), (3, 32, 32), 10),
    "small": (lambda: models.mlp(10, 3, widths=(30, 50)), (10,), 3),
}


class Task:
    """A network and random batches of the right shape, on the device."""

    def __init__(self, name: str, device: torch.device, rows: int = BATCH) -> None:
        make, shape, classes = MODELS[name]
        generator = torch.Generator().manual_seed(0)
        self.name = name
        self.device = device
        self.model = make()
        models.initialise(self.model, 0)
        self.model.to(device)
        self.batches = [
            (
                torch.randn(rows, *shape, generator=generator).to(device),
                torch.randint(classes, (rows,), generator=generator).to(device),
            )
            for _ in range(8)
        ]
        self._samples = [[sanc.Batch(self.loss, *batch) for batch in self.batches] for _ in range(3)]
        self.start = [p.detach().clone() for p in self.model.parameters()]
        self.at = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), y)

    def batch(self, role: int = 0) -> sanc.Batch:
        """Return the current rows; for each role as an object of its own, so that the optimiser sees three samples."""
        return self._samples[role][self.at % len(self.batches)]

    def next(self) -> sanc.Batch:
        self.at += 1
        return self.batch()

    def reset(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.start)


class Bare:
    """The oracle calls of a step by hand, and nothing else."""

    def __init__(self, task: Task, mode: str) -> None:
        self.task, self.mode = task, mode
        self.names = [name for name, _ in task.model.named_parameters()]
        self.leaves = list(task.model.parameters())
        self.sizes = [p.numel() for p in self.leaves]
        self.v = torch.randn(sum(self.sizes), device=task.device)
        self.v /= self.v.norm()

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for t in tensors])

    def split(self, v: Tensor) -> list[Tensor]:
        return [piece.view_as(p) for piece, p in zip(v.split(self.sizes), self.leaves, strict=True)]

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return self.task.loss(x, y)

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        return self.flat(torch.autograd.grad(self.task.loss(x, y), self.leaves))

    def products(self, x: Tensor, y: Tensor, count: int = J) -> list[Tensor]:
        """Compute a gradient, flat, and `count` products on the same sample."""
        if self.mode == "double-backward":
            grads = torch.autograd.grad(self.task.loss(x, y), self.leaves, create_graph=True)
            results = [self.flat([g.detach() for g in grads])]
            for _ in range(count):
                product = torch.autograd.grad(grads, self.leaves, self.split(self.v), retain_graph=True)
                results.append(self.flat(product))
            return results

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(torch.func.functional_call(self.task.model, parameters, (x,)), y)

        values = {name: p.detach() for name, p in zip(self.names, self.leaves, strict=True)}
        tangents = dict(zip(self.names, self.split(self.v), strict=True))
        results = [self.gradient(x, y)]
        for _ in range(count):
            _, product = torch.func.jvp(torch.func.grad(loss), (values,), (tangents,))
            results.append(self.flat([product[name] for name in self.names]))
        return results

    def step(self, three: bool) -> list[Tensor]:
        """All calls of a step."""
        first, second, third = (self.task.batches[i] for i in range(3))
        if not three:
            return [*self.products(*first), self.value(*first)]
        return [self.gradient(*first), *self.products(*second), self.value(*third), self.value(*third)]


def captured(body: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """Record a function as one CUDA graph."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = body()
    return lambda kept=kept: graph.replay()  # type: ignore[misc]


def optimiser(task: Task, **options: Any) -> sanc.SANC:
    return sanc.SANC(task.model.parameters(), seed=0, krylov_dim=J, check=False, **options)


def blockwise(call: Callable[[], Any]) -> Callable[[], None]:
    """Call fifty times."""

    def block() -> None:
        for _ in range(BLOCK):
            call()

    return block


def take(opt: sanc.SANC, task: Task, three: bool) -> None:
    if three:
        opt.step(task.batch(), hessian=task.batch(1), objective=task.batch(2))
    else:
        opt.step(task.batch())


def prepare(opt: sanc.SANC, task: Task, three: bool) -> None:
    """Make the first steps, in which modes are measured and graphs recorded."""
    for _ in range(4):
        task.reset()
        take(opt, task, three)
    check(opt, task)


def check(opt: sanc.SANC, task: Task) -> None:
    """Make sure that a step does all its work."""
    if opt.record is None or opt.record.krylov_dim != J:
        raise SystemExit(f"a step on {task.name} made {opt.record and opt.record.krylov_dim} products, not {J}")


def fastest(calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, Callable[[], Any]]:
    """Keep the fastest only: it alone is compared, and nothing slow comes in between."""
    times = in_turns(calls, device=device, seconds=seconds / 8)
    best = min(calls, key=times.__getitem__)
    return {best: calls[best]}


def paper_rows(task: Task, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Time the paper's step, with one sample and with three."""
    rows = []
    cuda = device.type == "cuda"
    for three in (False, True):
        by_hand: dict[str, Callable[[], Any]] = {}
        graphs: dict[str, Callable[[], Any]] = {}
        for mode in ("double-backward", "forward-over-reverse"):
            bare = Bare(task, mode)
            by_hand[f"bare {mode}"] = lambda bare=bare, three=three: bare.step(three)
            if cuda:
                graphs[f"bare graph {mode}"] = blockwise(captured(by_hand[f"bare {mode}"], device))
        kinds = [fastest(kind, device, seconds) for kind in (by_hand, graphs) if kind]
        candidates = {name: call for kind in kinds for name, call in kind.items()}
        steady = {"preset": "paper", "sigma0": 100.0, "sigma_floor": 100.0, "gamma": 1.0001, "epsilon_g": 1e-30}
        made = {"step": optimiser(task, **steady)}
        if cuda:
            made["step graph"] = optimiser(task, **steady, capture=True)
        for name, opt in made.items():
            prepare(opt, task, three)
            if name.endswith("graph") and opt.capture_reason:
                raise SystemExit(f"{task.name} is not captured: {opt.capture_reason}")
            call = partial(take, opt, task, three)
            candidates[name] = blockwise(call) if name.endswith("graph") else call
        task.at = 0
        in_a_row = 1 if cuda or task.name.startswith("cnn") else ROW  # a step of a second finds no warm caches anyway
        rounds = turns(candidates, device=device, seconds=seconds, before=task.reset, in_a_row=in_a_row)
        times = {name: statistics.median(seen) / (BLOCK if "graph" in name else 1) for name, seen in rounds.items()}
        for opt in made.values():
            check(opt, task)
        task.reset()
        take(made["step"], task, three)
        if made["step"].record.trials != 1:  # type: ignore[union-attr]
            raise SystemExit(f"a step on {task.name} was rejected: {made['step'].record}")
        row_hvp = {name: opt.hvp for name, opt in made.items()}
        row: dict[str, Any] = {"model": task.name, "samples": 3 if three else 1, "times": times, "hvp": row_hvp}
        for ours, (right,) in zip(("step", "step graph"), kinds, strict=False):
            row[ours.replace("step", "bare")], row[ours] = times[right], times[ours]
            row[ours.replace("step", "ratio")] = ratio(rounds[ours], rounds[right])
        if cuda:
            row["speedup"] = row["step"] / row["step graph"]
        rows.append(row)
    return rows


def robust_row(task: Task, device: torch.device, cycles: int) -> dict[str, Any]:
    """Time whole cycles of the default method, and the calls that they made."""
    cuda = device.type == "cuda"
    bare = Bare(task, "forward-over-reverse" if cuda and task.name != "mlp" else "double-backward")
    x, y = task.batches[0]
    calls: dict[str, Callable[[], Any]] = {
        "gradient": lambda: bare.gradient(x, y),
        "value": lambda: bare.value(x, y),
        "products": lambda: bare.products(x, y),
    }
    if cuda:
        calls = {name: captured(call, device) for name, call in calls.items()}
    row: dict[str, Any] = {"model": task.name}
    for name, options in (("robust", {}), ("robust graph", {"capture": True})):
        if options and not cuda:
            continue
        task.reset()
        opt = optimiser(task, **options)
        for _ in range(2 * CYCLE):
            opt.step(task.next())
        if options and opt.capture_reason:
            raise SystemExit(f"{task.name} is not captured: {opt.capture_reason}")
        counted = opt.record.calls  # type: ignore[union-attr]
        synchronise(device)
        clock = time.perf_counter()
        for _ in range(cycles * CYCLE):
            opt.step(task.next())
        synchronise(device)
        row[name] = (time.perf_counter() - clock) / (cycles * CYCLE)
        after = opt.record.calls  # type: ignore[union-attr]
        price = in_turns(calls, device=device, seconds=1.0)
        made = {
            kind: (getattr(after, kind) - getattr(counted, kind)) / BATCH for kind in ("value", "gradient", "product")
        }
        spaces = made["product"] / J
        bare_cost = (made["gradient"] * price["gradient"] + made["value"] * price["value"]
                     + spaces * price["products"])  # fmt: skip
        row[f"{name} bare"] = bare_cost / (cycles * CYCLE)
        row[f"{name} ratio"] = row[name] / row[f"{name} bare"]
    adam = torch.optim.Adam(task.model.parameters(), lr=1e-3)

    def adam_step() -> None:
        adam.zero_grad()
        task.loss(*task.batches[0]).backward()
        adam.step()

    task.reset()
    row["adam"] = in_turns({"adam": adam_step}, device=device, seconds=1.0)["adam"]
    return row


def milliseconds(value: Any) -> str:
    return f"{1e3 * value:.2f}" if isinstance(value, float) else str(value)


def tables(document: dict[str, Any]) -> str:
    cuda = "gpu" in document["machine"]
    head = ["model", "samples", "bare, ms", "step, ms", "step ÷ bare"]
    if cuda:
        head += ["bare graph, ms", "captured, ms", "captured ÷ bare graph", "eager ÷ captured"]
    rows = []
    for row in document["paper"]:
        cells = [row["model"], row["samples"], *(milliseconds(row[k]) for k in ("bare", "step")), f"{row['ratio']:.2f}"]
        if cuda:
            cells += [milliseconds(row[k]) for k in ("bare graph", "step graph")]
            cells += [f"{row['ratio graph']:.2f}", f"{row['speedup']:.1f}"]
        rows.append(cells)
    text = plain_table(head, rows, left=1)
    names = (
        ["robust", "robust bare", "robust ratio"] + (["robust graph", "robust graph ratio"] if cuda else []) + ["adam"]
    )
    labels = {"robust": "step, ms", "robust bare": "its calls, ms", "robust ratio": "÷", "robust graph": "captured, ms",
              "robust graph ratio": "÷ its calls, captured", "adam": "Adam, eager, ms"}  # fmt: skip
    rows = [
        [row["model"], *(f"{row[k]:.2f}" if k.endswith("ratio") else milliseconds(row[k]) for k in names)]
        for row in document["robust"]
    ]
    return f"{text}\n\n{plain_table(['robust', *(labels[k] for k in names)], rows)}"


def picture(document: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    cuda = "gpu" in document["machine"]
    names = ["bare", "step"] + (["bare graph", "step graph"] if cuda else [])
    colours = {"bare": "#999999", "step": "#1F77B4", "bare graph": "#CCCCCC", "step graph": "#2CA02C"}
    labels = {"bare": "oracle calls by hand", "step": "opt.step", "bare graph": "oracle calls, one graph",
              "step graph": "opt.step, captured"}  # fmt: skip
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    places = range(len(document["paper"]))
    for k, name in enumerate(names):
        at = [p + (k - (len(names) - 1) / 2) * 0.8 / len(names) for p in places]
        heights = [1e3 * row[name] for row in document["paper"]]
        axes.bar(at, heights, 0.76 / len(names), color=colours[name], label=labels[name])
    ticks = [f"{row['model']}\n{row['samples']} sample{'s' * (row['samples'] > 1)}" for row in document["paper"]]
    axes.set_xticks(list(places), ticks)
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds a step")
    axes.legend(frameon=False, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, help="by default the MLP and the CNNs")
    parser.add_argument("--device", help="by default cuda where there is one")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in products and convolutions of a GPU")
    parser.add_argument("--seconds", type=float, help="time for each comparison")
    parser.add_argument("--quick", action="store_true", help="a small network, for a second")
    parser.add_argument("--out", type=Path, help="folder for step.json and step.png")
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
            document["paper"] += paper_rows(task, device, seconds)
            document["robust"].append(robust_row(task, device, 1 if device.type == "cpu" else 4))
            print(f"{name} done", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
    print(f"{tables(document)}\n\n{document['machine']}")
    if options.out is not None:
        write_json(options.out / "step.json", document)
        picture(document, options.out / "step.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
