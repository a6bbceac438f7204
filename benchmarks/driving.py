"""Train networks on the digits of scikit-learn in the three ways to drive a step, and with schedules of `lr`.

    python -m benchmarks.driving --out docs/results     # both tables, minutes on one core
    python -m benchmarks.driving --quick                # one seed and one pass, seconds

The first table has one hidden layer of 64 units, the second one two. Losses are those of all rows at the end, and
seconds those of the processor; both are medians over the seeds. --out writes driving.json, from which
`benchmarks.check` makes the tables of docs/integrations.md again.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, OneCycleLR, StepLR

import sanc
from benchmarks.common import median, set_threads
from benchmarks.reporting import command, machine, markdown_table, write_results

STYLES = {"loss": "returns the loss", "backward": "calls `backward()`", "gradients": "no closure"}
"""The ways to drive a step, and the headings of their columns."""
LENGTHS = ((64, 10), (600, 40), (1797, 60))
"""Rows of a batch, and passes over the data."""
SEEDS = (0, 1, 2)
SCHEDULES: Mapping[str, Callable[[Optimizer, int], Any]] = {
    "none, or a constant one": lambda opt, steps: None,
    "`ExponentialLR` to a tenth": lambda opt, steps: ExponentialLR(opt, 0.1 ** (1 / steps)),
    "`LinearLR` to 0, the default of transformers": lambda opt, steps: LinearLR(opt, 1.0, 0.0, steps),
    "`CosineAnnealingLR(opt, steps)`": lambda opt, steps: CosineAnnealingLR(opt, steps),
    "`StepLR`, a tenth after each third": lambda opt, steps: StepLR(opt, steps // 3),
    "`OneCycleLR(opt, max_lr=1.0, cycle_momentum=False)`": lambda opt, steps: one_cycle(opt, 1.0, steps),
    "`OneCycleLR` with `max_lr=0.01`": lambda opt, steps: one_cycle(opt, 0.01, steps),
    "`lr = 0.01` in all steps": lambda opt, steps: LambdaLR(opt, lambda step: 0.01),
    "`lr = 0.001` in all steps": lambda opt, steps: LambdaLR(opt, lambda step: 0.001),
}
"""Schedules for a number of steps, by their names in the table."""


@cache
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels from 0 to 1, and labels."""
    digits = load_digits()
    return torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)


def one_cycle(opt: Optimizer, peak: float, steps: int) -> OneCycleLR:
    """Return a cycle of the rate with this peak."""
    return OneCycleLR(opt, peak, total_steps=steps + 1, cycle_momentum=False)


def train(style: str, hidden: Sequence[int], batch: int, passes: int, seed: int, schedule: Any) -> dict[str, float]:
    """Train a network in one of the styles; return its loss on all rows and the processor seconds."""
    x, y = data()
    torch.manual_seed(seed)
    widths = (64, *hidden, 10)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    opt = sanc.SANC(model.parameters(), seed=seed)
    scheduler = schedule(opt, passes * -(-len(y) // batch))
    begin = time.process_time()
    for rows in (rows for _ in range(passes) for rows in torch.randperm(len(y)).split(batch)):

        def loss(rows: torch.Tensor = rows) -> torch.Tensor:
            return nn.functional.cross_entropy(model(x[rows]), y[rows])

        def with_backward(loss: Callable[[], torch.Tensor] = loss) -> torch.Tensor:
            opt.zero_grad()
            value = loss()
            value.backward()
            return value

        if style == "gradients":
            with_backward()
        opt.step(None if style == "gradients" else loss if style == "loss" else with_backward)
        if scheduler is not None:
            scheduler.step()
    seconds = time.process_time() - begin
    opt.eval()
    with torch.no_grad():
        return {"loss": float(nn.functional.cross_entropy(model(x), y)), "seconds": seconds}


def number(value: float) -> str:
    """Return a loss with two digits, without the zero in its exponent."""
    return f"{value:.1e}".replace("e-0", "e-") if value < 0.1 else f"{value:.2g}"


def tables(document: Mapping[str, Any]) -> list[str]:
    """Return the table of the ways to drive a step, and that of schedules."""

    def cell(runs: Sequence[Mapping[str, float]], *, seconds: bool) -> str:
        taken = f", {median([run['seconds'] for run in runs]):.1f} s" if seconds else ""
        return number(median([run["loss"] for run in runs])) + taken

    ways = [
        (length["batch"], length["passes"], *(cell(length[style], seconds=True) for style in STYLES))
        for length in document["ways"]
    ]
    schedules = [(name, cell(runs, seconds=False)) for name, runs in document["schedules"].items()]
    return [
        markdown_table(("rows of a batch", "passes", *STYLES.values()), ways),
        markdown_table(("schedule", "final loss"), schedules),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = command(__doc__, quick="one seed and one pass", out="driving.json").parse_args(arguments)
    warnings.filterwarnings("ignore", message="lr was at most")  # of the small peaks that are measured
    set_threads(1)
    seeds = SEEDS[:1] if options.quick else SEEDS
    ways, schedules = [], {}
    for batch, passes in LENGTHS:
        length = {"batch": batch, "passes": 1 if options.quick else passes}
        made = {s: [train(s, (64,), **length, seed=seed, schedule=lambda *_: None) for seed in seeds] for s in STYLES}
        ways.append({**length, **made})
    for name, schedule in SCHEDULES.items():
        passes = 1 if options.quick else 10
        schedules[name] = [train("gradients", (64, 64), 64, passes, seed, schedule) for seed in seeds]
    document = {"machine": machine(), "ways": ways, "schedules": schedules}
    print(*tables(document), sep="\n\n")
    write_results(options.out, {"driving.json": document})
    return 0


if __name__ == "__main__":
    sys.exit(main())
