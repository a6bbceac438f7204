"""Count the traffic of a step, time it on 1, 2 and 4 processes, and estimate its cost on many ranks.

    python -m benchmarks.ranks --out docs/results     # minutes on two cores
    python -m benchmarks.ranks --quick                # seconds
    python -m benchmarks.ranks --digests              # the cost of comparing the ranks in every step, minutes

The network has three layers in float32; the ranks share one global batch and communicate by gloo on this machine.
DistributedDataParallel with AdamW and three kinds of SANC are timed alternately: driven by gradients (averaged in DDP's
backward pass), driven by closures (averaged steps), and with preset "paper" (each step with its Krylov space). A
collective is counted when it is called; its bytes are those of the tensors that one rank passes in. --out writes
ranks.json and ranks.md. --digests times steps with and without the digests that all ranks compare, alternately in one
run on 2 ranks, and prints the ratios for a network of 10⁶ parameters.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import sanc
from benchmarks.common import zoo  # noqa: F401 - puts tests/ on the path, for the next import
from benchmarks.reporting import COMMIT_NOTE, command, machine, markdown_table, write_results
from benchmarks.timing import interleaved, median_ratio, medians
from rank_processes import run_on_ranks, without_errors

ADAMW = "DDP + AdamW"
CANDIDATES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "SANC, gradients": ("gradients", {"compare_every": 0}),
    "SANC, closures": ("loss", {"compare_every": 0, "curvature": False}),
    "SANC, paper": ("loss", {"compare_every": 0, "preset": "paper"}),
}


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(784, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
    return nn.Sequential(*layers)


class Candidate:
    """A model and an optimiser on this rank; a call makes a step.

    Attributes
    ----------
    collectives, bytes : int
        Traffic of DistributedDataParallel, counted by its communication hook.
    """

    def __init__(self, name: str, width: int, rows: int, **options: Any) -> None:
        self.collectives = self.bytes = 0
        size, model = dist.get_world_size(), network(width)
        self.style, settings = CANDIDATES.get(name, ("gradients", {}))
        self.model: nn.Module = model
        self.opt: Any = torch.optim.AdamW(model.parameters())
        if name != ADAMW:
            self.opt = sanc.SANC(model.parameters(), seed=0, **settings | options)
        if size > 1 and self.style == "gradients":
            self.model = DistributedDataParallel(model)
            self.model.register_comm_hook(None, self._hook)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(rows, 784, generator=generator), torch.randint(10, (rows,), generator=generator)
        self.x, self.y = (part.tensor_split(size)[dist.get_rank()] for part in (x, y))

    def _hook(self, group, bucket):  # type: ignore[no-untyped-def]  # torch inspects annotations
        """Count a bucket, and average it."""
        self.collectives += 1
        self.bytes += bucket.buffer().numel() * bucket.buffer().element_size()
        return allreduce_hook(group, bucket)

    def __call__(self) -> None:
        if self.style == "gradients":
            self.opt.zero_grad()
            cross_entropy(self.model(self.x), self.y).backward()
            self.opt.step()
        else:
            self.opt.step(lambda: cross_entropy(self.model(self.x), self.y))

    def counts(self) -> tuple[int, int, int]:
        """Return collectives, bytes and Hessian products so far."""
        driver = getattr(self.opt, "_driver", None)
        ranks = getattr(getattr(driver, "mode", None), "ranks", None)
        mine = (0, 0) if ranks is None else (ranks.collectives, ranks.bytes)
        return self.collectives + mine[0], self.bytes + mine[1], 0 if driver is None else driver.meter.nhev


def measure(width: int, rows: int, steps: int) -> dict[str, dict[str, float]]:
    """Time and count the steps of every candidate on this rank."""
    candidates = {name: Candidate(name, width, rows) for name in (ADAMW, *CANDIDATES)}
    found: dict[str, dict[str, float]] = {}
    for name, step in candidates.items():
        for _ in range(5):  # the first steps set up the metric and check the closure
            step()
        before, count = step.counts(), 10
        for _ in range(count):
            step()
        collectives, size, products = ((b - a) / count for a, b in zip(before, step.counts(), strict=True))
        found[name] = {"collectives": collectives, "megabytes": size / 1e6, "products": products}
    for name, seconds in medians(interleaved(candidates, seconds=0.0, least=steps, most=steps)).items():
        found[name]["milliseconds"] = 1e3 * seconds
    return found


def measure_digests(width: int, rows: int, steps: int) -> dict[str, tuple[float, float, float]]:
    """Return by candidate the ratio of step times with and without digests, its quartile distance, and milliseconds.

    With `compare_every` = 0 a step sends the digest of which parameters take part alone.
    """
    found = {}
    for name in CANDIDATES:
        every = {"with": 100, "without": 0}
        pair = {key: Candidate(name, width, rows, compare_every=value) for key, value in every.items()}
        times = interleaved(pair, seconds=0.0, warm_up=5, least=steps, most=steps)
        ratios = sorted(a / b for a, b in zip(times["with"], times["without"], strict=True))
        spread = ratios[3 * steps // 4] - ratios[steps // 4]
        found[name] = median_ratio(times["with"], times["without"]), spread, 1e3 * medians(times)["without"]
    return found


def print_digests(width: int, rows: int, steps: int) -> None:
    """Measure the cost of the digests on 2 ranks, and print it as a table."""
    found = without_errors(run_on_ranks(2, measure_digests, width, rows, steps, timeout=120, limit=900))[0]
    parameters = sum(p.numel() for p in network(width).parameters())
    print(f"2 ranks, gloo, {parameters:,} parameters, {rows} rows, {steps} interleaved steps")
    entries = [
        (name, f"{ratio:.3f}", f"{spread:.3f}", f"{milliseconds:.1f}")
        for name, (ratio, spread, milliseconds) in found.items()
    ]
    print(markdown_table(("step", "with ÷ without digests", "quartile distance", "ms without"), entries))


# ---------------------------------------------------------------------- estimate for many ranks

PARAMETERS, SIDE, TOKENS = 1e9, 2048, 16_384
BANDWIDTH, LATENCY, SPEED, METRIC_SPEED = 50e9, 10e-6, 400e12, 30e12


def estimate(ranks: int) -> dict[str, float]:
    """Seconds of a step at 10⁹ parameters under `ASSUMPTIONS`."""
    hop, n = LATENCY * math.log2(ranks), PARAMETERS
    reduce = 2 * (ranks - 1) / ranks * 4 * n / BANDWIDTH + 2 * hop
    forward, backward = 2 * n * TOKENS / SPEED, 4 * n * TOKENS / SPEED
    matrices = n / SIDE**2
    rotations = 4 * 2 * SIDE * n / METRIC_SPEED  # into the eigenbases and back, two sides
    factors = 2 * 2 * SIDE * n / METRIC_SPEED / 5  # GGᵀ and GᵀG, every fifth step
    refresh = 2 * (2 + 4 / 3) * SIDE**3 / METRIC_SPEED / 10  # a product and a QR on each side, every 10 steps
    metric = rotations + factors + matrices * refresh
    adamw = forward + max(backward, reduce)
    gather = (ranks - 1) / ranks * 4 * n / BANDWIDTH + hop
    sharded = 3 * gather + forward + backward - min(2 * gather, forward + backward)
    exchange = 2 * ((ranks - 1) / ranks * 4 * n / ranks / BANDWIDTH + hop)
    share = math.ceil(matrices / ranks) / matrices
    return {
        "DDP + AdamW": adamw,
        "SANC, gradients": adamw + 2 * hop + metric,
        "SANC, paper (J = 5)": forward + backward + reduce + 5 * (4 * (forward + backward) / 3 + reduce) + 2 * forward,
        "FSDP2 + AdamW": sharded,
        "FSDP2 + SANC, gradients": sharded + exchange + 5 * hop + share * metric,
        "distributed metric alone": exchange + share * metric,
    }


ASSUMPTIONS = f"""Assumptions:

- {PARAMETERS:.0e} parameters in matrices of {SIDE} × {SIDE} (`largest_side` = {SIDE}), float32 for communication and \
for the metric; {TOKENS:,} tokens per rank.
- {SPEED / 1e12:.0f} TFLOP/s in forward and backward passes, {METRIC_SPEED / 1e12:.0f} in all products of the metric; \
{BANDWIDTH / 1e9:.0f} GB/s and {1e6 * LATENCY:.0f} µs · log₂(ranks) for a collective; ring algorithms.
- DDP overlaps its sum with the backward pass. FSDP2 gathers twice and scatters once, and overlaps two of the three \
with the passes if these take long enough. Sums of the optimiser are not overlapped.
- A Hessian product costs 4/3 of a gradient, and a value a forward pass. No rank waits for a slower one."""


# ---------------------------------------------------------------------- command


def page(document: Mapping[str, Any]) -> str:
    """Return the results page: counts, times and the estimate."""
    rows = []
    for size, found in document["measured"].items():
        base = found[ADAMW]["milliseconds"]
        for name, entry in found.items():
            traffic = (f"{entry['collectives']:.1f}", f"{entry['megabytes']:.2f}")
            times = (f"{entry['milliseconds']:.1f}", f"{entry['milliseconds'] / base:.2f}")
            rows.append((size, name, *traffic, f"{entry['products']:.1f}", *times))
    heads = ("ranks", "step", "collectives", "MB in", "products", "ms", "÷ AdamW")
    sizes = list(document["model"])
    names = list(next(iter(document["model"].values())))
    estimates = [(name, *(f"{document['model'][size][name]:.3f}" for size in sizes)) for name in names]
    machine, parameters = document["machine"], document["parameters"]
    slower = [
        entry["milliseconds"] / found[ADAMW]["milliseconds"]
        for size, found in document["measured"].items()
        for name, entry in found.items()
        if size != "1" and name != ADAMW
    ]
    parts = [
        "# Ranks: traffic and time of a step",
        "Driven by gradients, a step of SANC sends what DDP sends and one small collective more; driven by closures, "
        "it sends one vector for each gradient and each product. On 2 and 4 ranks a step takes "
        f"{min(slower):.2f} to {max(slower):.2f} times as long as one of DDP with AdamW.",
        markdown_table(heads, rows),
        "Driven by gradients, the additional collective of a few numbers detects that DDP has already averaged. Driven "
        "by closures, function values are sent with a gradient; at trial points they cost a collective of a few "
        "numbers. Sharded parameters add two exchanges of the gradient's shards to what FSDP2 sends, and the sums of "
        "inner products.",
        "## How it was measured",
        f"`python -m benchmarks.ranks` writes this page. {parameters:,} parameters in float32 "
        f"({4e-6 * parameters:.2f} MB), {document['rows']} rows shared by the ranks, gloo, {machine['cores']} cores, "
        f"torch {machine['torch']}; medians of {document['steps']} interleaved steps. Bytes are those of the tensors "
        f"that one rank passes to collectives. {COMMIT_NOTE}",
        "## Caveats",
        "Ranks beyond the number of cores share them, so the times show the overhead of a step, not how it scales. The "
        f"load average before the run was {machine['load']:.1f}.",
        "## A model of many ranks",
        "Seconds of a step, by a model; none of these numbers was measured.",
        markdown_table(("step", *(f"{size} ranks" for size in sizes)), estimates),
        ASSUMPTIONS,
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="a small network on 1 and 2 processes, seconds", out="ranks.json and ranks.md")
    parser.add_argument("--steps", type=int, default=30, help="timed steps; by default 30")
    parser.add_argument("--digests", action="store_true", help="the cost of comparing the ranks in every step alone")
    options = parser.parse_args(arguments)
    if options.digests:
        print_digests(*(16, 16, 4) if options.quick else (680, 512, options.steps))
        return 0
    width, rows, steps = (16, 16, 2) if options.quick else (256, 512, options.steps)
    measured, load = {}, os.getloadavg()[0]
    for size in (1, 2) if options.quick else (1, 2, 4):
        measured[str(size)] = without_errors(run_on_ranks(size, measure, width, rows, steps, timeout=120, limit=900))[0]
        print(f"{size} ranks: done", file=sys.stderr, flush=True)
    document = {
        "machine": machine() | {"load": load},
        "parameters": sum(p.numel() for p in network(width).parameters()),
        "rows": rows,
        "steps": steps,
        "measured": measured,
        "model": {str(size): estimate(size) for size in (8, 64, 512, 1024)},
    }
    print(page(document))
    write_results(options.out, {"ranks.json": document, "ranks.md": page(document)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
