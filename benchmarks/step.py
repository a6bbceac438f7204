"""Measure the time of a step of the paper's method beside its oracle calls, and the speed-up of CUDA graphs.

    python -m benchmarks.step                                        # on a GPU if there is one
    python -m benchmarks.step --device cpu --models mlp cnn-mnist
    python -m benchmarks.step --quick                                # a small network, seconds

A step evaluates one gradient, J = 5 Hessian products and function values. *bare* are these calls in plain torch: the
gradient as one flat vector, products by double backward between flat vectors, and values without a graph. *bare* has
no Lanczos process, no cubic model and no decision. There are two kinds of steps:

* one sample: `opt.step(batch)`; f(x) comes with the gradient, the products share its graph, one value is new;
* three samples: a gradient, products on a second sample, which needs a second gradient graph, two values on a third.

The goals: on a CPU, a step takes at most 1.3 times its bare calls; on a GPU, a captured step (`capture=True`) of the
MLP is at least 6 times as fast as an eager one, and a captured step of a CNN is not slower.

All steps start at the same point; parameters are restored outside the measured time. Steps of small networks are
repeated five times, as in a training loop. σ is at least 100 with gamma = 1.0001, epsilon_g is 1e-30, and the three
samples hold the same rows. Every step therefore builds the whole Krylov space and is accepted. All calls are timed
alternately in random order in one process, on a CPU in processor time, and ratios are medians over the rounds. --out
writes step.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sanc
from benchmarks.paper_networks import NETWORKS, Network
from benchmarks.reporting import command, machine, markdown_table, verdict, write_results
from benchmarks.timing import interleaved, median_ratio, medians

J, BATCH = 5, 128
OVERHEAD, SPEEDUP = 1.3, 6.0
"""Goals: largest step ÷ bare on a CPU, and smallest eager ÷ captured of the MLP on a GPU."""
STEADY: dict[str, Any] = {
    "preset": "paper", "sigma0": 100.0, "sigma_floor": 100.0, "gamma": 1.0001, "epsilon_g": 1e-30
}  # fmt: skip


class Steps:
    """Steps of `sanc.SANC` on a network, with one sample or with three."""

    def __init__(self, network: Network, three: bool, **options: Any) -> None:
        self.batches = [network.batch() for _ in range(3 if three else 1)]
        self.opt = sanc.SANC(network.leaves, seed=0, krylov_dim=J, check=False, **STEADY, **options)

    def __call__(self) -> None:
        first, *others = self.batches
        self.opt.step(first, **dict(zip(("hessian", "objective"), others, strict=False)))


class Bare:
    """The oracle calls of a step in plain torch."""

    def __init__(self, network: Network) -> None:
        self.network, self.leaves = network, network.leaves
        self.v = torch.randn(network.size).to(network.device)
        self.v /= self.v.norm()

    def _loss(self) -> Tensor:
        return self.network.loss(self.network.x, self.network.y)

    def value(self) -> float:
        """f(x)."""
        with torch.no_grad():
            return float(self._loss())

    def gradient(self) -> Tensor:
        """∇f(x)."""
        return _flat(torch.autograd.grad(self._loss(), self.leaves))

    def products(self) -> list[Tensor]:
        """Compute a gradient and, on its graph, J products."""
        grads = torch.autograd.grad(self._loss(), self.leaves, create_graph=True)
        results = [_flat([g.detach() for g in grads])]
        for _ in range(J):
            pieces = self.v.split([p.numel() for p in self.leaves])
            v = [piece.view_as(p) for piece, p in zip(pieces, self.leaves, strict=True)]
            results.append(_flat(torch.autograd.grad(grads, self.leaves, v, retain_graph=True)))
        return results

    def step(self, three: bool) -> list[Any]:
        """Make all calls of a step."""
        if three:
            return [self.gradient(), *self.products(), self.value(), self.value()]
        return [*self.products(), self.value()]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def measure(network: Network, three: bool, seconds: float) -> dict[str, Any]:
    """Time a step beside its bare calls and, on a GPU, eager beside captured."""
    cuda = network.device.type == "cuda"
    steps = {"step": Steps(network, three)} | ({"captured": Steps(network, three, capture=True)} if cuda else {})
    for name, step in steps.items():
        for _ in range(4 if name == "captured" else 1):  # the first calls record the CUDA graphs
            network.reset()
            step()
        if name == "captured" and step.opt.capture_reason:
            raise SystemExit(f"{network.name} is not captured: {step.opt.capture_reason}")
    calls: dict[str, Callable[[], Any]] = {"bare": partial(Bare(network).step, three), **steps}
    limits: dict[str, Any] = {"repeats": 5, "least": 5} if network.size < 10**6 else {"repeats": 1, "least": 3}
    limits["clock"] = time.perf_counter if cuda else time.process_time
    rounds = interleaved(calls, device=network.device, seconds=seconds, setup=network.reset, warm_up=1, **limits)
    for step in steps.values():
        record = step.opt.record
        assert record is not None
        if record.krylov_dim != J or record.trials != 1 or record.branch is sanc.Branch.STAYED:
            raise SystemExit(f"a step on {network.name} was rejected or built a smaller Krylov space: {record}")
    row: dict[str, Any] = {"model": network.name, "samples": 3 if three else 1, **medians(rounds)}
    row["ratio"] = median_ratio(rounds["step"], rounds["bare"])
    if cuda:
        row["speedup"] = median_ratio(rounds["step"], rounds["captured"])
    return row | {"goal": goal(row)}


def goal(row: dict[str, Any]) -> str:
    """Return the goal of a row, and whether the row meets it."""
    if row["model"] == "small":
        return "none"
    if "speedup" in row:
        return verdict(row["speedup"], least=SPEEDUP if row["model"] == "mlp" else 1.0)
    return verdict(row["ratio"], most=OVERHEAD)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of steps."""
    head = {"bare": "bare, ms", "step": "step, ms", "ratio": "step ÷ bare"}
    if any("captured" in row for row in rows):
        head |= {"captured": "captured, ms", "speedup": "eager ÷ captured"}
    cells = [
        [row["model"], row["samples"]]
        + [f"{row[key]:.2f}" if key in ("ratio", "speedup") else f"{1e3 * row[key]:.2f}" for key in head]
        + [row["goal"]]
        for row in rows
    ]
    return markdown_table(["model", "samples", *head.values(), "goal"], cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="a small network, seconds", out="step.json")
    parser.add_argument("--models", nargs="+", choices=NETWORKS, help="by default the MLP and the CNNs")
    parser.add_argument("--device", help="by default cuda if there is one")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in products and convolutions on a GPU")
    parser.add_argument("--seconds", type=float, help="approximate time of each row; by default 8")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() and not options.quick else "cpu"))
    names = options.models or (["small"] if options.quick else ["mlp", "cnn-mnist", "cnn-cifar"])
    seconds = options.seconds or (0.5 if options.quick else 8.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    document: dict[str, Any] = {"machine": machine(device), "J": J, "batch": BATCH, "paper": []}
    try:
        for name in names:
            network = Network(name, BATCH, device)
            document["paper"] += [measure(network, three, seconds) for three in (False, True)]
            print(f"{name} done", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
    print(f"{table(document['paper'])}\n\n{document['machine']}")
    write_results(options.out, {"step.json": document})
    return 0


if __name__ == "__main__":
    sys.exit(main())
