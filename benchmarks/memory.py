"""Measure the peak memory of a step in vectors of the parameters' length, beyond the parameters themselves.

    python -m benchmarks.memory                          # on a CPU
    python -m benchmarks.memory --device cuda
    python -m benchmarks.memory --device cuda --billion  # two steps on a network of a billion parameters
    python -m benchmarks.memory --quick                  # small networks, seconds

The promise: a step of preset "paper" with a stored basis holds at most J + 8 vectors at a time, for ordinary models and
exact products. Without a basis (lanczos="regenerate") the number of vectors does not grow with J; the table says what
it is. A step is measured where it is accepted, and where it is rejected and one along negative curvature follows; the
larger of the two is shown. The default preset ("robust") keeps its means and its Krylov space between steps; beside
them a step of it is measured over a whole run.

A host is asked by torch's profiler, which sees every allocation; a GPU by the statistics of its allocator. The batches
are tiny, so that activations vanish beside the parameters. --out gets memory.json.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import sanc
from benchmarks.common import plain_table
from benchmarks.timing import machine, synchronise, write_json
from sanc.lab.models import cnn
from sanc.minibatch.iteration import KRYLOV_DIM

BEYOND, SLACK = 8, 0.1
"""The promise: most vectors of a step beside the J of its basis, and what is granted for activations."""
MODES = ("double-backward", "forward-over-reverse")
ACCEPTED: dict[str, Any] = {"sigma0": 1e4, "L1": 1e9}
REJECTED: dict[str, Any] = {"sigma0": 1e-3, "eta1": 0.9999, "eta2": 0.99999, "L1": 1e9}

# ---------------------------------------------------------------------- what is measured


def peak_and_rest(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Return the bytes that a call held at most, and those that its result still holds, beyond what was there before.

    Parameters
    ----------
    call : callable
        What to run; what it returns is kept until the count is done.
    device : torch.device
        Whose memory is meant.
    """
    if device.type == "cuda":
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with _uncollected():
            kept = call()
        synchronise(device)
        answer = torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
        del kept
        return answer
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, _uncollected():
        kept = call()
    del kept
    results = seen.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    live = highest = 0
    for _, size in changes:
        live += size
        highest = max(highest, live)
    return highest, live


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let nothing be freed that was there before, nor hide what only a collection of cycles would free."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what the profiler's library says of its start and stop off the screen."""
    sys.stderr.flush()
    screen, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)
        os.close(nothing)


def mlp(layers: int, width: int, device: torch.device) -> nn.Sequential:
    """Square layers with tanh between them; made where they shall be."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, device=device), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def networks(width: int, side: int, device: torch.device) -> dict[str, tuple[nn.Module, Tensor]]:
    """Ordinary models, and two rows for each."""
    torch.manual_seed(0)
    made: dict[str, tuple[nn.Module, Tensor]] = {
        f"MLP, {layers} layers": (mlp(layers, width, device), torch.randn(2, width, device=device)) for layers in (2, 4)
    }
    made["CNN"] = cnn(1, side, 10).to(device), torch.randn(2, 1, side, side, device=device)
    return made


def run_memory(model: nn.Module, x: Tensor, steps: int = 1, **options: Any) -> dict[str, Any]:
    """Measure a run of a few steps from the construction of the optimiser on, on a loss with curvature of both signs.

    Returns
    -------
    dict
        Peak and what stays between steps, in vectors, and the branches taken.
    """
    leaves = list(model.parameters())
    start = [p.detach().clone() for p in leaves]

    def loss() -> Tensor:
        return 10.0 * torch.cos(2.0 * model(x)).square().mean()

    torch.autograd.grad(loss(), leaves)  # workspaces of the libraries are there before the count begins
    branches: list[str] = []

    def run() -> sanc.SANC:
        optimizer = sanc.SANC(leaves, seed=0, check=False, **options)
        for _ in range(steps):
            optimizer.step(loss)
            assert optimizer.record is not None
            branches.append(str(optimizer.record.branch))
        return optimizer

    highest, rest = peak_and_rest(run, x.device)
    with torch.no_grad():
        for p, content in zip(leaves, start, strict=True):
            p.copy_(content)
    unit = sum(p.nbytes for p in leaves)
    return {"peak": highest / unit, "rest": rest / unit, "branches": branches}


def step_rows(models: dict[str, tuple[nn.Module, Tensor]], dims: Sequence[int]) -> list[dict[str, Any]]:
    """Measure steps of preset "paper", with and without a basis."""
    rows = []
    for name, (model, x) in models.items():
        for hvp in MODES:
            row: dict[str, Any] = {"model": name, "products": hvp}
            for lanczos in ("store", "regenerate"):
                for dim in dims:
                    options = {"preset": "paper", "hvp": hvp, "lanczos": lanczos, "krylov_dim": dim, "epsilon": 1e-12}
                    runs = [run_memory(model, x, **options, **more) for more in (ACCEPTED, REJECTED)]
                    row[f"{lanczos} {dim}"] = max(measured["peak"] for measured in runs)
            rows.append(row)
    return rows


def robust_rows(models: dict[str, tuple[nn.Module, Tensor]], steps: int) -> list[dict[str, Any]]:
    """Measure runs of the default preset, in which a Krylov space serves many steps."""
    return [
        {"model": name, "products": hvp} | run_memory(model, x, steps, hvp=hvp)
        for name, (model, x) in models.items()
        for hvp in MODES
    ]


# ---------------------------------------------------------------------- a network of a billion parameters


def large(width: int, layers: int, device: torch.device, hvp: str, steps: int = 2, rows: int = 8) -> dict[str, Any]:
    """Make steps without a stored basis on a network that is as large as asked."""
    torch.manual_seed(0)
    model = mlp(layers, width, device)
    d = sum(p.numel() for p in model.parameters())
    x, y = torch.randn(rows, width, device=device), torch.randn(rows, width, device=device)
    losses: list[float] = []
    clocks: list[float] = []

    def loss() -> Tensor:
        return (model(x) - y).square().mean()

    def run() -> sanc.SANC:
        options = {"preset": "paper", "lanczos": "regenerate", "seed": 0, "check": False}
        optimizer = sanc.SANC(model.parameters(), hvp=hvp, **options)
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(float(optimizer.step(loss).detach()))
            synchronise(device)
            clocks.append(time.perf_counter() - begin)
        return optimizer

    highest, _ = peak_and_rest(run, device)
    with torch.no_grad():
        losses.append(float(loss()))
    return {
        "parameters": d, "products": hvp, "vectors": highest / (4 * d), "GiB": (highest + 4 * d) / 2**30,
        "seconds": clocks, "losses": losses,
    }  # fmt: skip


# ---------------------------------------------------------------------- the command


def step_table(rows: Sequence[dict[str, Any]], dims: Sequence[int]) -> str:
    """Lay out the vectors of a step beside the promise."""
    heads = {f"{lanczos} {dim}": f"{lanczos}, J = {dim}" for lanczos in ("store", "regenerate") for dim in dims}
    cells = []
    for row in rows:
        met = all(row[f"store {dim}"] <= dim + BEYOND + SLACK for dim in dims)
        numbers = [f"{row[key]:.2f}" for key in heads]
        cells.append([row["model"], row["products"], *numbers, f"J + {BEYOND} {'met' if met else 'MISSED'}"])
    return plain_table(["model", "products", *heads.values(), "goal"], cells, left=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="small networks")
    parser.add_argument("--billion", action="store_true", help="only two steps on a network of a billion parameters")
    parser.add_argument("--width", type=int, default=16384, help="width of the four layers of --billion")
    parser.add_argument("--hvp", default=MODES[0], choices=MODES, help="products of --billion")
    parser.add_argument("--out", type=Path, help="folder for memory.json")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    document: dict[str, Any] = {"machine": machine(device)}
    if options.billion:
        document["large"] = answer = large(options.width, 4, device, options.hvp)
        seconds = ", ".join(f"{entry:.2f}" for entry in answer["seconds"])
        losses = ", ".join(f"{entry:.4f}" for entry in answer["losses"])
        cells = [f"{answer['parameters']:,}", answer["products"], f"{answer['vectors']:.2f}", f"{answer['GiB']:.1f}"]
        print(plain_table(["parameters", "products", "vectors", "GiB in all", "seconds of a step", "loss"],
                          [[*cells, seconds, losses]]))  # fmt: skip
    else:
        width, side = (100, 8) if options.quick else (4096, 28) if device.type == "cuda" else (600, 28)
        dims, steps = ((2,), 3) if options.quick else ((5, 10), 25)
        models = networks(width, side, device)
        if options.quick:
            del models["MLP, 4 layers"]
        print(f"Vectors beyond the parameters in a step of preset paper; layers of {width}×{width}, 2 rows.\n")
        document["steps"] = step_rows(models, dims)
        print(step_table(document["steps"], dims))
        print(f"\n{steps} steps of the default preset, J = {KRYLOV_DIM}: at most, and what it keeps between steps.\n")
        document["robust"] = robust_rows(models, steps)
        cells = [[r["model"], r["products"], f"{r['peak']:.2f}", f"{r['rest']:.2f}"] for r in document["robust"]]
        print(plain_table(["model", "products", "peak", "between steps"], cells, left=2))
    if options.out is not None:
        write_json(options.out / "memory.json", document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
