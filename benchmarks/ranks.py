"""Count what a step sends over the ranks, time it on 1, 2 and 4 processes, and work out what it costs on many.

    python -m benchmarks.ranks --out docs/results     # minutes on two cores
    python -m benchmarks.ranks --quick                # seconds

A network of three layers, float32, and one global batch that the ranks share, by gloo on this machine. Beside each
other, in turns: DistributedDataParallel with AdamW, and SANC driven by gradients (averaged in DDP's backward pass), by
closures (averaged steps) and with preset "paper" (judged steps, each with its Krylov space). Collectives are counted
where they are called; bytes are those of the tensors that go in on one rank. --out gets ranks.json and ranks.md.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import sanc
from benchmarks.common import plain_table
from benchmarks.timing import in_turns, machine, write_json
from together import all_well, together  # of the tests, which benchmarks.common has put on the path

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


class Bill:
    """Collectives and bytes of DistributedDataParallel, told by its hook, and of an optimiser."""

    def __init__(self) -> None:
        self.collectives = self.bytes = 0

    def hook(self, group, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
        """Count a bucket, and average it as usual."""
        self.collectives += 1
        self.bytes += bucket.buffer().numel() * bucket.buffer().element_size()
        return allreduce_hook(group, bucket)

    def read(self, opt: Any) -> tuple[int, int]:
        """Return the sums so far."""
        ranks = getattr(getattr(getattr(opt, "_driver", None), "mode", None), "ranks", None)
        mine = (0, 0) if ranks is None else (ranks.collectives, ranks.bytes)
        return self.collectives + mine[0], self.bytes + mine[1]


def stepper(name: str, width: int, rows: int) -> tuple[Callable[[], Any], Callable[[], tuple[int, int]], Any]:
    """Return a function that makes a step, one that reads the bill, and the optimiser."""
    size = dist.get_world_size()
    model, bill = network(width), Bill()
    style, settings = CANDIDATES.get(name, ("gradients", {}))
    opt: Any = (
        torch.optim.AdamW(model.parameters()) if name == ADAMW else sanc.SANC(model.parameters(), seed=0, **settings)
    )
    wrapped: nn.Module = model
    if size > 1 and style == "gradients":
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, bill.hook)
    shared = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, 784, generator=shared), torch.randint(10, (rows,), generator=shared)
    x, y = (part.tensor_split(size)[dist.get_rank()] for part in (x, y))

    def by_gradients() -> None:
        opt.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        opt.step()

    def by_closure() -> None:
        opt.step(lambda: cross_entropy(wrapped(x), y))

    return by_gradients if style == "gradients" else by_closure, lambda: bill.read(opt), opt


def measure(width: int, rows: int, steps: int) -> dict[str, dict[str, float]]:
    """Time and count the steps of every candidate on this rank."""
    made = {name: stepper(name, width, rows) for name in (ADAMW, *CANDIDATES)}
    for step, _, _ in made.values():
        for _ in range(5):  # the first ones set up the metric and probe the closure
            step()
    found: dict[str, dict[str, float]] = {}
    for name, (step, bill, opt) in made.items():
        before, count = bill(), 10
        products = opt._driver.meter.nhev if name != ADAMW else 0
        for _ in range(count):
            step()
        after = bill()
        spent = (opt._driver.meter.nhev if name != ADAMW else 0) - products
        found[name] = {
            "collectives": (after[0] - before[0]) / count,
            "megabytes": (after[1] - before[1]) / count / 1e6,
            "products": spent / count,
        }
    times = in_turns({name: step for name, (step, _, _) in made.items()}, seconds=0.0, least=steps, most=steps)
    for name, seconds in times.items():
        found[name]["milliseconds"] = 1e3 * seconds
    return found


# ---------------------------------------------------------------------------------------------- on paper

PARAMETERS, SIDE, TOKENS = 1e9, 2048, 16_384
BANDWIDTH, LATENCY, SPEED, SLOW_SPEED = 50e9, 10e-6, 400e12, 30e12


def on_paper(ranks: int) -> dict[str, float]:
    """Seconds of a step at 10⁹ parameters, by the model that `ASSUMPTIONS` tells."""
    hop, n = LATENCY * math.log2(ranks), PARAMETERS
    reduce = 2 * (ranks - 1) / ranks * 4 * n / BANDWIDTH + 2 * hop
    forward, backward = 2 * n * TOKENS / SPEED, 4 * n * TOKENS / SPEED
    matrices = n / SIDE**2
    turns = 4 * 2 * SIDE * n / SLOW_SPEED  # into the bases and back, two sides
    factors = 2 * 2 * SIDE * n / SLOW_SPEED / 5  # GGᵀ and GᵀG, every fifth step
    renewal = 2 * (2 + 4 / 3) * SIDE**3 / SLOW_SPEED / 50  # a product and a QR a side, of one matrix, every 50 steps
    adamw = forward + max(backward, reduce)
    gather = (ranks - 1) / ranks * 4 * n / BANDWIDTH + hop
    sharded = 3 * gather + forward + backward - min(2 * gather, forward + backward)
    exchange = 2 * ((ranks - 1) / ranks * 4 * n / ranks / BANDWIDTH + hop)
    share = math.ceil(matrices / ranks) / matrices
    return {
        "DDP + AdamW": adamw,
        "SANC, gradients": adamw + 2 * hop + turns + factors + matrices * renewal,
        "SANC, paper (J = 5)": forward + backward + reduce + 5 * (4 * (forward + backward) / 3 + reduce) + 2 * forward,
        "FSDP2 + AdamW": sharded,
        "FSDP2 + SANC, gradients": sharded + exchange + 5 * hop + share * (turns + factors + matrices * renewal),
        "dealt metric alone": exchange + share * (turns + factors + matrices * renewal),
    }


ASSUMPTIONS = f"""Assumptions: {PARAMETERS:.0e} parameters in matrices of {SIDE} × {SIDE} (`largest_side` = {SIDE}),
float32 for what is sent and for the metric; {TOKENS:,} tokens a rank; {SPEED / 1e12:.0f} TFLOP/s in forward and
backward passes, {SLOW_SPEED / 1e12:.0f} in all products of the metric; {BANDWIDTH / 1e9:.0f} GB/s and
{1e6 * LATENCY:.0f} µs · log₂(ranks) for a collective; rings. DDP overlaps its sum with the backward pass; FSDP2 gathers
twice and scatters once, and hides two of the three behind the passes where these are long enough; sums of the optimiser
are not hidden. A Hessian product costs 4/3 of a gradient, and two values a forward pass each. Nobody waits for
stragglers. This is a model on paper: nothing of it was measured."""


def report(document: Mapping[str, Any]) -> str:
    """Lay out what was counted and timed, and the model."""
    rows = []
    for size, found in document["measured"].items():
        base = found[ADAMW]["milliseconds"]
        for name, entry in found.items():
            sent = (f"{entry['collectives']:.1f}", f"{entry['megabytes']:.2f}")
            time = (f"{entry['milliseconds']:.1f}", f"{entry['milliseconds'] / base:.2f}")
            rows.append((size, name, *sent, f"{entry['products']:.1f}", *time))
    heads = ("ranks", "step", "collectives", "MB in", "products", "ms", "÷ AdamW")
    sizes = list(document["model"])
    names = list(next(iter(document["model"].values())))
    paper = [(name, *(f"{document['model'][size][name]:.3f}" for size in sizes)) for name in names]
    machine, parameters = document["machine"], document["parameters"]
    about = (
        f"Written by `python -m benchmarks.ranks`. {parameters:,} parameters in float32 ({4e-6 * parameters:.2f} MB), "
        f"{document['rows']} rows shared by the ranks, gloo, {machine['cores']} cores, torch {machine['torch']}; "
        f"medians of {document['steps']} steps in turns. More ranks than cores share them, so times say what the "
        f"bookkeeping costs, not how it scales; other work (a load of {machine['load']:.1f}) ran beside it. "
        "Bytes are those of the tensors that go into collectives on one rank."
    )
    told = (
        "Driven by gradients SANC sends what DDP sends, and a collective of a few numbers in which the ranks see that "
        "DDP has averaged already. Driven by closures it sends one vector for each gradient and each product; values "
        "ride along with a gradient, and cost a collective of a few numbers at trial points. Sharded parameters add "
        "two exchanges of the gradient's shards to what FSDP2 sends, and the sums of inner products."
    )
    many = plain_table(("step", *(f"{size} ranks" for size in sizes)), paper)
    parts = ("# Ranks: what a step sends, and how long it takes", about, plain_table(heads, rows), told)
    return "\n\n".join([*parts, "## Many ranks, on paper", "Seconds of a step.", many, ASSUMPTIONS]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args(arguments)
    width, rows, steps = (16, 16, 2) if chosen.quick else (256, 512, chosen.steps)
    measured, load = {}, os.getloadavg()[0]
    for size in (1, 2) if chosen.quick else (1, 2, 4):
        measured[str(size)] = all_well(together(size, measure, width, rows, steps, timeout=120, patience=900))[0]
        print(f"{size} ranks: done", file=sys.stderr, flush=True)
    document = {
        "machine": machine() | {"load": load},
        "parameters": sum(p.numel() for p in network(width).parameters()),
        "rows": rows,
        "steps": steps,
        "measured": measured,
        "model": {str(size): on_paper(size) for size in (8, 64, 512, 1024)},
    }
    text = report(document)
    print(text)
    if chosen.out is not None:
        write_json(chosen.out / "ranks.json", document)
        (chosen.out / "ranks.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
