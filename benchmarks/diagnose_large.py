"""Measure memory, seconds and products of `sanc.diagnose` on a transformer of a billion parameters.

    python -m benchmarks.diagnose_large --device cuda                 # one GPU with 80 GB or more, minutes
    python -m benchmarks.diagnose_large --size small                  # a million parameters, a minute on a CPU
    python -m benchmarks.diagnose_large --quick                       # seconds

The goals are 60 s, and a peak of 3 times the memory of the parameters and of the activations of one batch. The
baseline is what a forward pass leaves in memory: the parameters, and what autograd saves for the backward pass. The
Lanczos vectors are not kept (lanczos="regenerate"), so that products are computed twice.

Each way to compute Hessian products (--hvp) is measured with each precision of float32 matrix products (--precision;
"high" is TF32 on a GPU). A run out of memory is reported, and the next one follows. On a CPU, torch's profiler reports
every allocation; on a GPU, the statistics of the allocator do. --out writes diagnose_large.json.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import sanc
from benchmarks.memory import peak_and_rest
from benchmarks.reporting import command, machine, markdown_table, write_results
from benchmarks.timing import synchronise

SECONDS, MEMORY = 60.0, 3.0
"""The goals: seconds, and the peak relative to parameters and activations."""
HVP = ("finite-difference", "double-backward", "forward-over-reverse")


@dataclass(frozen=True)
class Size:
    """Sizes of a transformer, and the number of tokens of a row."""

    width: int
    layers: int
    heads: int
    words: int
    tokens: int


SIZES = {
    "billion": Size(width=2048, layers=18, heads=32, words=32768, tokens=2048),
    "small": Size(width=128, layers=4, heads=8, words=512, tokens=192),
    "tiny": Size(width=32, layers=2, heads=4, words=64, tokens=32),
}
"""The first has 1.04 billion parameters. Its activations at one row are about five times as large."""


class Block(nn.Module):
    """A transformer block whose attention has second and forward-mode derivatives."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.into(self.first(x)).chunk(3, -1)
        )
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2) + mask
        x = x + self.out((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(-2))
        mixed: Tensor = x + self.down(gelu(self.up(self.second(x))))
        return mixed


class Transformer(nn.Module):
    """A language model that predicts the next word."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(size.words, size.width), nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.words, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        mask = torch.full((length, length), -math.inf, device=tokens.device).triu(1)
        x = self.words(tokens) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of the next words."""
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def text(size: Size, rows: int, seed: int, device: torch.device) -> Tensor:
    """Return rows of words of which each is near the last one, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 9, (rows, size.tokens), generator=generator)
    return (steps.cumsum(1) % size.words).to(device)


def measure(
    model: nn.Module, batches: Sequence[Tensor], held_out: Tensor, baseline: int, **options: Any
) -> dict[str, Any]:
    """Diagnose the model; return seconds, products and memory."""
    device = held_out.device
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    reports: list[sanc.Report] = []

    def call() -> None:
        reports.append(sanc.diagnose(model, loss, batches, held_out=[held_out], lanczos="regenerate", **options))

    synchronise(device)
    begin = time.perf_counter()
    peak, _ = peak_and_rest(call, device)
    synchronise(device)
    seconds, report = time.perf_counter() - begin, reports[0]
    print(report, flush=True)
    return {
        "seconds": seconds,
        "peak": parameter_bytes + peak,
        "ratio": (parameter_bytes + peak) / baseline,
        "numbers": report.as_dict(),
        "limit": report.limit,
        "hvp used": report.hvp,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of all runs."""
    head = ["products", "precision", "seconds", "number", "s/product", "peak, GB", "ratio", "λ_min", "λ_max", "goals"]
    cells = []
    for row in rows:
        if "error" in row:
            cells.append([row["hvp"], row["precision"], *["–"] * 7, row["error"]])
            continue
        numbers = row["numbers"]
        met = [row["seconds"] <= SECONDS, row["ratio"] <= MEMORY]
        cells.append(
            [row["hvp"], row["precision"], f"{row['seconds']:.1f}", f"{numbers['products']:.0f}",
             f"{row['seconds'] / numbers['products']:.2f}", f"{row['peak'] / 1e9:.3f}", f"{row['ratio']:.2f}",
             f"{numbers['lambda_min']:.4g}", f"{numbers['lambda_max']:.4g}",
             ", ".join("met" if goal else "MISSED" for goal in met)]
        )  # fmt: skip
    return markdown_table(head, cells, left=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="the tiny network, one way and one precision", out="diagnose_large.json")
    parser.add_argument("--size", choices=list(SIZES), default="billion")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=1, help="rows of a batch")
    parser.add_argument("--batches", type=int, default=1, help="batches that define the loss")
    parser.add_argument("--starts", type=int, default=2, help="start vectors of the effective dimension")
    parser.add_argument("--max-time", type=float, default=90.0, help="limit on the seconds of a run")
    parser.add_argument("--hvp", nargs="+", choices=HVP, default=list(HVP))
    parser.add_argument("--precision", nargs="+", choices=["highest", "high"], default=["highest", "high"])
    options = parser.parse_args(arguments)
    if options.quick:
        options.size, options.hvp, options.precision = "tiny", options.hvp[:1], options.precision[:1]
    size, device = SIZES[options.size], torch.device(options.device)
    torch.manual_seed(0)
    with device:
        model = Transformer(size)
    count = sum(p.numel() for p in model.parameters())
    batches = [text(size, options.rows, seed, device) for seed in range(options.batches)]
    held_out = text(size, options.rows, options.batches, device)
    _, activations = peak_and_rest(lambda: loss(model, batches[0]), device)
    baseline = sum(p.numel() * p.element_size() for p in model.parameters()) + activations
    print(f"{machine(device)}\n{size}, {options.rows} rows in each of {options.batches} batches")
    print(f"{count:,} parameters; with activations {baseline / 1e9:.3f} GB, these alone {activations / 1e9:.3f} GB")
    rows: list[dict[str, Any]] = []
    for precision in options.precision:
        torch.set_float32_matmul_precision(precision)
        for hvp in options.hvp:
            print(f"\n{hvp}, {precision}:", flush=True)
            row: dict[str, Any] = {"hvp": hvp, "precision": precision}
            settings = {"hvp": hvp, "starts": options.starts, "max_time": options.max_time}
            try:
                row |= measure(model, batches, held_out, baseline, **settings)
            except (torch.OutOfMemoryError, sanc.SancError) as error:
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
                print(row["error"], flush=True)
            rows.append(row)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"\n{table(rows)}", flush=True)
    torch.set_float32_matmul_precision("highest")
    content = {"machine": machine(device), "parameters": count, "activations": activations, "baseline": baseline}
    write_results(options.out, {"diagnose_large.json": content | {"runs": rows}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
