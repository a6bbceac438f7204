"""Time Hessian products: five of them at one point by every mode, beside a gradient and beside what "auto" takes.

    python -m benchmarks.hvp --out hvp-output           # four models, batches of 128, minutes on one core
    python -m benchmarks.hvp --device cuda              # batches of 128 and 1024
    python -m benchmarks.hvp --quick                    # small models, seconds

Synthetic rows of the shapes of the paper's data: logistic regression (123 features, 2 classes), the MLP (19 features, 7
classes) and the CNNs for MNIST and CIFAR10, all float32. The clock starts before the operator is built, so the graph
that double backward keeps and the recording of the linearised mode count, as one part of five products. "auto" is what
`sanc.SANC` with its defaults has chosen after its first step, on the same batch given as `hessian`; all modes are timed
in turns, and a ratio, the median of those within a turn, is to the fastest fixed exact mode. "first step" is the
seconds of that step with the measurement.

--out gets hvp.json and hvp.png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sanc
from benchmarks.common import plain_table
from benchmarks.timing import machine, ratio, synchronise, turns, write_json
from sanc.lab import models
from sanc.oracles.autograd import HVP_MODES, AutogradOracle, HvpMode
from sanc.oracles.base import Meter
from sanc.oracles.layout import Layout, Sample

PRODUCTS = 5
FIXED: tuple[HvpMode, ...] = tuple(mode for mode in HVP_MODES if mode != "auto")
EXACT = tuple(mode for mode in FIXED if mode != "finite-difference")
COLOURS = {"double-backward": "#0B63A5", "forward-over-reverse": "#4FB0E3", "linearised": "#0A9272"} | {
    "finite-difference": "#B4B4B0",
    "auto": "#C8401B",
}

MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "logistic": (lambda: nn.Linear(123, 2), (123,), 2),
    "mlp": (lambda: models.mlp(19, 7), (19,), 7),
    "cnn, MNIST": (lambda: models.cnn(1, 28, 10), (1, 28, 28), 10),
    "cnn, CIFAR10": (lambda: models.cnn(3, 32, 10), (3, 32, 32), 10),
}
QUICK: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "logistic": (lambda: nn.Linear(8, 2), (8,), 2),
    "mlp": (lambda: models.mlp(8, 3, widths=(10, 10)), (8,), 3),
}


def measure(
    build: Callable[[], nn.Module], shape: Sequence[int], classes: int, batch: int, device: str, seconds: float
) -> dict[str, Any]:
    """Time one model at one batch size."""
    torch.manual_seed(0)
    model = build()
    models.initialise(model, 0)
    model.to(device)
    x, y = torch.randn(batch, *shape).to(device), torch.randint(0, classes, (batch,)).to(device)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(a), b)

    chosen, first = choice(model, loss, x, y, device)
    rows = sanc.Batch(loss, x, y)
    leaves = list(model.parameters())
    calls = {mode: products(leaves, rows, mode) for mode in FIXED}
    usable = {mode: call for mode, call in calls.items() if works(call)}
    timed = {"gradient": lambda: torch.autograd.grad(rows(), leaves), **usable, "auto": products(leaves, rows, chosen)}
    rounds = turns(timed, device=device, seconds=seconds, warm_up=1)
    times = {name: statistics.median(seen) for name, seen in rounds.items()}
    best = rounds[min((mode for mode in EXACT if mode in times), key=times.__getitem__)]
    return {
        "batch": batch,
        "parameters": sum(p.numel() for p in leaves),
        "chosen": chosen,
        "first_step": first,
        "milliseconds": {name: 1e3 * value for name, value in times.items()},
        "ratios": {name: ratio(seen, best) for name, seen in rounds.items() if name != "gradient"},
    }


def choice(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor, device: str) -> tuple[HvpMode, float]:
    """Return what a user's optimiser has chosen after its first step, and the seconds of that step."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimiser = sanc.SANC(model.parameters(), seed=0)
    synchronise(device)
    clock = time.perf_counter()
    optimiser.step(sanc.Batch(loss, x, y), hessian=sanc.Batch(loss, x, y))
    synchronise(device)
    model.load_state_dict(before)
    chosen = next(mode for mode in FIXED if mode == optimiser.hvp)
    return chosen, time.perf_counter() - clock


def products(leaves: Sequence[Tensor], rows: sanc.Batch, mode: HvpMode) -> Callable[[], None]:
    """Return a function that builds the operator and makes five products."""
    sample = Sample("closure", [(1.0, rows)], len(rows), 0)
    layout = Layout(leaves, [0.0] * len(leaves))
    oracle = AutogradOracle(layout, sample, sample, sample, hvp=mode, meter=Meter())
    v = torch.randn(layout.dim).to(leaves[0].device)

    def call() -> None:
        x = oracle.start()
        operator = oracle.hessian(x)
        for _ in range(PRODUCTS):
            operator(v)
        operator.release()

    return call


def works(call: Callable[[], None]) -> bool:
    """Whether a mode can make these products."""
    try:
        call()
    except (sanc.SecondDerivativeError, RuntimeError):
        return False
    return True


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the table: milliseconds and, in brackets, the ratio to the fastest exact mode."""
    head = ["model", "batch", "gradient, ms", *FIXED, "auto", "chosen", "first step, s"]
    lines = []
    for row in rows:
        times, ratios = row["milliseconds"], row["ratios"]
        cells = [f"{times[m]:.1f} ({ratios[m]:.2f})" if m in times else "–" for m in (*FIXED, "auto")]
        gradient, first = f"{times['gradient']:.2f}", f"{row['first_step']:.2f}"
        lines.append([row["model"], row["batch"], gradient, *cells, row["chosen"], first])
    return plain_table(head, lines)


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the ratios as bars."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from sanc.lab.style import STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(1.2 + 1.7 * len(rows), 3.2), layout="constrained")
        axes = figure.add_subplot()
        modes = (*FIXED, "auto")
        for place, mode in enumerate(modes):
            known = [(i, row["ratios"][mode]) for i, row in enumerate(rows) if mode in row["ratios"]]
            where = [i + 0.16 * (place - (len(modes) - 1) / 2) for i, _ in known]
            axes.bar(where, [height for _, height in known], 0.15, color=COLOURS[mode], label=mode)
        axes.axhline(1.0, color="#222222", linewidth=0.6)
        axes.set_xticks(range(len(rows)), [f"{row['model']}, {row['batch']} rows" for row in rows])
        axes.set_ylabel(f"time of {PRODUCTS} products / fastest exact mode")
        axes.legend(frameon=False, fontsize=7)
        figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=40.0, help="clock time of one row")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    batches = (16,) if options.quick else (128, 1024) if options.device == "cuda" else (128,)
    rows = []
    for name, (build, shape, classes) in (QUICK if options.quick else MODELS).items():
        for batch in batches:
            seconds = 0.2 if options.quick else options.seconds
            rows.append({"model": name} | measure(build, shape, classes, batch, options.device, seconds))
            print(f"{name}, {batch} rows: {rows[-1]['chosen']}", flush=True)
    print(f"\n{report(rows)}")
    if options.out is not None:
        write_json(options.out / "hvp.json", {"machine": machine(options.device), "rows": rows})
        picture(rows, options.out / "hvp.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
