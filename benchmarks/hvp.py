"""Time five Hessian products at one point in every mode, beside a gradient.

    python -m benchmarks.hvp --out hvp-output           # four models, batches of 128, minutes on one core
    python -m benchmarks.hvp --device cuda              # batches of 128 and 1024
    python -m benchmarks.hvp --quick                    # small models, seconds

The models are logistic regression (123 features, 2 classes) and the paper's networks, in float32, on random rows of the
shape of the paper's data. The measured time includes the construction of the operator, and with it the graph that
double backward keeps. All modes are timed alternately. Ratios are to double backward, the mode of hvp="auto", and are
medians over the rounds. --out writes hvp.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper_networks import Network
from benchmarks.reporting import command, machine, markdown_table, write_results
from benchmarks.timing import interleaved, median_ratio, medians
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.products import HVP_MODES, HvpMode

PRODUCTS = 5
MODES: tuple[HvpMode, ...] = tuple(mode for mode in HVP_MODES if mode != "auto")
MODELS = {"logistic": "logistic", "mlp": "mlp", "cnn, MNIST": "cnn-mnist", "cnn, CIFAR10": "cnn-cifar"}
QUICK = {"logistic": "small-logistic", "mlp": "small"}
"""Networks of `benchmarks.paper_networks` by their names in the table."""


def products(network: Network, mode: HvpMode, v: Tensor) -> Callable[[], list[Any]]:
    """Return a function that builds the Hessian operator and computes five products with `v`."""
    batch = network.batch()
    sample = Sample("closure", [(1.0, batch)], len(batch), 0)
    oracle = AutogradOracle(Leaves(network.leaves, [0.0] * len(network.leaves)), hvp=mode)

    def call() -> list[Any]:
        oracle.bind(sample, sample, sample)
        operator = oracle.hessian(oracle.read_point())
        return [operator(v) for _ in range(PRODUCTS)]

    return call


def measure(network: Network, seconds: float) -> dict[str, Any]:
    """Time one network at one batch size."""
    v, batch = torch.randn(network.size).to(network.device), network.batch()
    calls: dict[str, Callable[[], Any]] = {"gradient": lambda: torch.autograd.grad(batch(), network.leaves)}
    calls |= {mode: products(network, mode, v) for mode in MODES}
    rounds = interleaved(calls, device=network.device, seconds=seconds, warm_up=1)
    return {
        "batch": len(batch),
        "parameters": network.size,
        "milliseconds": {name: 1e3 * spent for name, spent in medians(rounds).items()},
        "ratios": {mode: median_ratio(rounds[mode], rounds["double-backward"]) for mode in MODES},
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: milliseconds and, in brackets, the ratio to double backward."""
    cells = [
        [row["model"], row["batch"], f"{row['milliseconds']['gradient']:.2f}"]
        + [f"{row['milliseconds'][mode]:.1f} ({row['ratios'][mode]:.2f})" for mode in MODES]
        for row in rows
    ]
    return markdown_table(["model", "batch", "gradient, ms", *(f"{mode}, ms" for mode in MODES)], cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="small models, seconds", out="hvp.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=40.0, help="approximate time of each row")
    options = parser.parse_args(arguments)
    batches = (16,) if options.quick else (128, 1024) if options.device == "cuda" else (128,)
    seconds = 0.1 if options.quick else options.seconds
    rows = []
    for label, name in (QUICK if options.quick else MODELS).items():
        for batch in batches:
            rows.append({"model": label} | measure(Network(name, batch, options.device), seconds))
            print(f"{label}, {batch} rows: done", file=sys.stderr, flush=True)
    print(table(rows))
    write_results(options.out, {"hvp.json": {"machine": machine(options.device), "rows": rows}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
