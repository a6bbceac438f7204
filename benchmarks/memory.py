"""Measure the peak memory of a step, in vectors of the size of the parameters and in addition to them.

    python -m benchmarks.memory                          # on a CPU
    python -m benchmarks.memory --device cuda
    python -m benchmarks.memory --device cuda --billion  # two steps on a network of a billion parameters
    python -m benchmarks.memory --quick                  # small networks, seconds

The bound: a step of preset "paper" with a stored basis holds at most J + 8 vectors at a time, for ordinary models and
exact products. Without a basis (lanczos="regenerate"), the number of vectors does not grow with J. Two steps are
measured: an accepted one, and a rejected one that is followed by a step along negative curvature. The table shows the
larger peak. The default preset ("robust") keeps its averages and its Krylov space between steps, so a whole run of it
is measured.

On a CPU, torch's profiler reports every allocation; on a GPU, the statistics of the allocator do. The batches are so
small that activations are negligible beside the parameters. --out writes memory.json.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import sanc
from benchmarks.reporting import command, machine, markdown_table, write_results
from benchmarks.timing import synchronise
from sanc.core.model import SAMPLED_KRYLOV_DIM
from sanc.lab.models import cnn

EXTRA, SLACK = 8, 0.1
"""Bound on the vectors of a step in addition to the J of its basis, and the tolerance for activations."""
MODES = ("double-backward", "forward-over-reverse")
ACCEPTED: dict[str, Any] = {"sigma0": 1e4, "L1": 1e9}
REJECTED: dict[str, Any] = {"sigma0": 1e-3, "eta1": 0.9999, "eta2": 0.99999, "L1": 1e9}

# ---------------------------------------------------------------------- measurements


def peak_and_rest(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Return the peak of the bytes that a call allocates, and the bytes that its result still holds.

    Parameters
    ----------
    call : callable
        Function to run; its result is kept until the count is done.
    device : torch.device
        Device whose memory is counted.
    """
    if device.type == "cuda":
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with _no_collection():
            kept = call()
        synchronise(device)
        answer = torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
        del kept
        return answer
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace, _no_collection():
        kept = call()
    del kept
    results = trace.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    live = highest = 0
    for _, size in changes:
        live += size
        highest = max(highest, live)
    return highest, live


@contextmanager
def _no_collection() -> Iterator[None]:
    """Suspend garbage collection, which could free earlier objects or hide reference cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Discard the messages that the profiler's library writes to stderr."""
    sys.stderr.flush()
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def mlp(layers: int, width: int, device: torch.device) -> nn.Sequential:
    """Square layers with tanh between them, created on the device."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, device=device), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def networks(width: int, side: int, device: torch.device) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return ordinary models with two rows of data each."""
    torch.manual_seed(0)
    made: dict[str, tuple[nn.Module, Tensor]] = {
        f"MLP, {layers} layers": (mlp(layers, width, device), torch.randn(2, width, device=device)) for layers in (2, 4)
    }
    made["CNN"] = cnn(1, side, 10).to(device), torch.randn(2, 1, side, side, device=device)
    return made


def run_memory(model: nn.Module, x: Tensor, steps: int = 1, **options: Any) -> dict[str, Any]:
    """Measure a run with the construction of the optimiser, on a loss with curvature of both signs.

    Returns
    -------
    dict
        Peak, memory kept between steps (both in vectors), and the branches of the steps.
    """
    leaves = list(model.parameters())
    start = [p.detach().clone() for p in leaves]

    def loss() -> Tensor:
        return 10.0 * torch.cos(2.0 * model(x)).square().mean()

    torch.autograd.grad(loss(), leaves)  # allocate workspaces of the libraries before the count
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
    """Measure steps of preset "paper", with and without a stored basis."""
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
    """Measure runs of the default preset, which uses a Krylov space in many steps."""
    return [
        {"model": name, "products": hvp} | run_memory(model, x, steps, hvp=hvp)
        for name, (model, x) in models.items()
        for hvp in MODES
    ]


# ---------------------------------------------------------------------- a network of a billion parameters


def large(width: int, layers: int, device: torch.device, hvp: str, steps: int = 2, rows: int = 8) -> dict[str, Any]:
    """Run steps without a stored basis on a large network."""
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


# ---------------------------------------------------------------------- command


def step_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of vectors and whether they meet the bound."""
    dims = [int(key.removeprefix("store ")) for key in rows[0] if key.startswith("store ")]
    heads = {f"{lanczos} {dim}": f"{lanczos}, J = {dim}" for lanczos in ("store", "regenerate") for dim in dims}
    cells = []
    for row in rows:
        met = all(row[f"store {dim}"] <= dim + EXTRA + SLACK for dim in dims)
        numbers = [f"{row[key]:.2f}" for key in heads]
        cells.append([row["model"], row["products"], *numbers, f"J + {EXTRA} {'met' if met else 'MISSED'}"])
    return markdown_table(["model", "products", *heads.values(), "goal"], cells, left=2)


def robust_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the default preset."""
    cells = [[row["model"], row["products"], f"{row['peak']:.2f}", f"{row['rest']:.2f}"] for row in rows]
    return markdown_table(["model", "products", "peak", "between steps"], cells, left=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="small networks, seconds", out="memory.json")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--billion", action="store_true", help="only two steps on a network of a billion parameters")
    parser.add_argument("--width", type=int, default=16384, help="width of the four layers of --billion")
    parser.add_argument("--hvp", default=MODES[0], choices=MODES, help="mode of the Hessian products of --billion")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    document: dict[str, Any] = {"machine": machine(device)}
    if options.billion:
        document["large"] = answer = large(options.width, 4, device, options.hvp)
        seconds = ", ".join(f"{entry:.2f}" for entry in answer["seconds"])
        losses = ", ".join(f"{entry:.4f}" for entry in answer["losses"])
        cells = [f"{answer['parameters']:,}", answer["products"], f"{answer['vectors']:.2f}", f"{answer['GiB']:.1f}"]
        print(markdown_table(["parameters", "products", "vectors", "GiB in all", "seconds of a step", "loss"],
                          [[*cells, seconds, losses]]))  # fmt: skip
    else:
        width, side = (100, 8) if options.quick else (4096, 28) if device.type == "cuda" else (600, 28)
        dims, steps = ((2,), 3) if options.quick else ((5, 10), 25)
        models = networks(width, side, device)
        if options.quick:
            del models["MLP, 4 layers"]
        print(f"Vectors in addition to the parameters in a step of preset paper; layers of {width}×{width}, 2 rows.\n")
        document["steps"] = step_rows(models, dims)
        print(step_table(document["steps"]))
        print(
            f"\n{steps} steps of the default preset, J = {SAMPLED_KRYLOV_DIM}: peak, and vectors kept between steps.\n"
        )
        document["robust"] = robust_rows(models, steps)
        print(robust_table(document["robust"]))
    write_results(options.out, {"memory.json": document})
    return 0


if __name__ == "__main__":
    sys.exit(main())
