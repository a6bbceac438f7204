"""Time Hessian products: five of them at one point by every mode, beside a gradient.

    python -m benchmarks.hvp --out hvp-output           # four models, batches of 128, minutes on one core
    python -m benchmarks.hvp --device cuda              # batches of 128 and 1024
    python -m benchmarks.hvp --quick                    # small models, seconds

Synthetic rows of the shapes of the paper's data: logistic regression (123 features, 2 classes), the MLP (19 features, 7
classes) and the CNNs for MNIST and CIFAR10, all float32. The clock starts before the operator is built, so the graph
that double backward keeps counts, as one part of five products. All modes are timed in turns, and a ratio, the median
of those within a turn, is to double backward, which hvp="auto" uses. --out gets hvp.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sanc
from benchmarks.common import plain_table
from benchmarks.timing import machine, ratio, turns, write_json
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.products import HVP_MODES, HvpMode
from sanc.lab import models

PRODUCTS = 5
MODES: tuple[HvpMode, ...] = tuple(mode for mode in HVP_MODES if mode != "auto")
Build = tuple[Callable[[], nn.Module], tuple[int, ...], int]
MODELS: Mapping[str, Build] = {
    "logistic": (lambda: nn.Linear(123, 2), (123,), 2),
    "mlp": (lambda: models.mlp(19, 7), (19,), 7),
    "cnn, MNIST": (lambda: models.cnn(1, 28, 10), (1, 28, 28), 10),
    "cnn, CIFAR10": (lambda: models.cnn(3, 32, 10), (3, 32, 32), 10),
}
QUICK: Mapping[str, Build] = {
    "logistic": (lambda: nn.Linear(8, 2), (8,), 2),
    "mlp": (lambda: models.mlp(8, 3, widths=(10, 10)), (8,), 3),
}


def rows_of(build: Build, batch: int, device: str) -> tuple[list[nn.Parameter], sanc.Batch]:
    """Return the leaves of a model and its loss on random rows."""
    make, shape, classes = build
    torch.manual_seed(0)
    model = make()
    models.initialise(model, 0)
    model.to(device)
    x, y = torch.randn(batch, *shape).to(device), torch.randint(0, classes, (batch,)).to(device)
    return list(model.parameters()), sanc.Batch(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)


def products(leaves: Sequence[Tensor], rows: sanc.Batch, mode: HvpMode, v: Tensor) -> Callable[[], list[Any]]:
    """Return a function that builds the operator and makes five products with `v`."""
    sample = Sample("closure", [(1.0, rows)], len(rows), 0)
    oracle = AutogradOracle(Leaves(leaves, [0.0] * len(leaves)), hvp=mode)

    def call() -> list[Any]:
        oracle.bind(sample, sample, sample)
        operator = oracle.hessian(oracle.start())
        return [operator(v) for _ in range(PRODUCTS)]

    return call


def measure(build: Build, batch: int, device: str, seconds: float) -> dict[str, Any]:
    """Time one model at one batch size."""
    leaves, rows = rows_of(build, batch, device)
    v = torch.randn(sum(p.numel() for p in leaves)).to(device)
    calls: dict[str, Callable[[], Any]] = {"gradient": lambda: torch.autograd.grad(rows(), leaves)}
    calls |= {mode: products(leaves, rows, mode, v) for mode in MODES}
    rounds = turns(calls, device=device, seconds=seconds, warm_up=1)
    return {
        "batch": batch,
        "parameters": len(v),
        "milliseconds": {name: 1e3 * statistics.median(seen) for name, seen in rounds.items()},
        "ratios": {mode: ratio(rounds[mode], rounds["double-backward"]) for mode in MODES},
    }


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the table: milliseconds and, in brackets, the ratio to double backward."""
    cells = [
        [row["model"], row["batch"], f"{row['milliseconds']['gradient']:.2f}"]
        + [f"{row['milliseconds'][mode]:.1f} ({row['ratios'][mode]:.2f})" for mode in MODES]
        for row in rows
    ]
    return plain_table(["model", "batch", "gradient, ms", *(f"{mode}, ms" for mode in MODES)], cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=40.0, help="clock time of one row")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    batches = (16,) if options.quick else (128, 1024) if options.device == "cuda" else (128,)
    seconds = 0.1 if options.quick else options.seconds
    rows = []
    for name, build in (QUICK if options.quick else MODELS).items():
        for batch in batches:
            rows.append({"model": name} | measure(build, batch, options.device, seconds))
            print(f"{name}, {batch} rows: done", file=sys.stderr, flush=True)
    print(report(rows))
    if options.out is not None:
        write_json(options.out / "hvp.json", {"machine": machine(options.device), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
