"""Memory of a step in vectors of the length of the parameters, and of a batch that is cut into micro-batches.

A host is asked by torch's profiler, which sees every allocation; a GPU by the statistics of its allocator. The models
of the first tables are wide and their batches tiny, so that activations vanish beside the parameters.
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
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import sanc
from benchmarks.common import plain_table
from benchmarks.timing import machine, synchronise, write_json
from sanc.amortised import KRYLOV_DIM
from sanc.lab.models import cnn
from sanc.oracles import choice
from sanc.oracles.autograd import AutogradOracle
from sanc.oracles.base import Meter
from sanc.oracles.layout import Layout, Sample

MODES = ("double-backward", "forward-over-reverse")
EXACT = (*MODES, "linearised")
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
    gc.collect()
    if device.type == "cuda":
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kept = call()
        synchronise(device)
        answer = torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
        del kept
        return answer
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = call()
    del kept
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    live = highest = 0
    for _, size in changes:
        live += size
        highest = max(highest, live)
    return highest, live


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


def network(layers: int, width: int, device: torch.device) -> nn.Sequential:
    """Square layers without biases, and tanh between them; made where they shall be."""
    parts: list[nn.Module] = []
    for layer in range(layers):
        parts += [nn.Tanh()] if layer else []
        parts.append(nn.Linear(width, width, bias=False, device=device))
    return nn.Sequential(*parts)


def wavy_loss(model: nn.Module, width: int, rows: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a loss with curvature of both signs on a few random rows."""
    x, y = torch.randn(rows, width, device=device), torch.randn(rows, width, device=device)
    return lambda: 10.0 * (torch.cos(2.0 * model(x)) - y).square().mean()


def length(model: nn.Module) -> int:
    """Count the parameters."""
    return sum(p.numel() for p in model.parameters())


def step_memory(
    layers: int, width: int, device: torch.device, *, steps: int = 1, rows: int = 2, **options: Any
) -> dict[str, Any]:
    """Measure a run of a few steps from the construction of the optimiser on.

    Returns
    -------
    dict
        Peak and what stays between steps, in vectors, and the branches taken.
    """
    torch.manual_seed(0)
    model = network(layers, width, device)
    return run_memory(list(model.parameters()), wavy_loss(model, width, rows, device), device, steps, **options)


def run_memory(
    leaves: Sequence[nn.Parameter], loss: Callable[[], Tensor], device: torch.device, steps: int = 1, **options: Any
) -> dict[str, Any]:
    """Measure a run of a few steps on any loss; see `step_memory`."""
    loss().backward()  # workspaces of the libraries are there before the count begins
    for leaf in leaves:
        leaf.grad = None
    branches: list[str] = []

    def run() -> sanc.SANC:
        optimizer = sanc.SANC(leaves, seed=0, check=False, **options)
        for _ in range(steps):
            optimizer.step(loss)
            assert optimizer.record is not None
            branches.append(str(optimizer.record.branch))
        return optimizer

    highest, rest = peak_and_rest(run, device)
    unit = sum(leaf.nbytes for leaf in leaves)
    return {"peak": highest / unit, "rest": rest / unit, "branches": branches}


def step_rows(width: int, device: torch.device, dims: Sequence[int], layers: Sequence[int]) -> list[dict[str, Any]]:
    """Measure steps of preset "paper": accepted, and rejected with a step along negative curvature after it."""
    rows = []
    for count in layers:
        for hvp in EXACT:
            for lanczos in ("store", "regenerate"):
                for dim in dims:
                    row: dict[str, Any] = {"layers": count, "hvp": hvp, "lanczos": lanczos, "J": dim}
                    row["claim"] = dim + 6 if lanczos == "store" else 6
                    row["slack"] = slack(width)
                    for name, more in (("accepted", ACCEPTED), ("rejected", REJECTED)):
                        options = {"preset": "paper", "hvp": hvp, "lanczos": lanczos, "krylov_dim": dim, **more}
                        measured = step_memory(count, width, device, epsilon=1e-12, **options)
                        row[name], row[name + "_branch"] = measured["peak"], measured["branches"][-1]
                    rows.append(row)
    return rows


def _recurrence(w: Sequence[Tensor], x: Tensor) -> Tensor:
    h = x
    for _ in range(12):
        h = torch.tanh(h @ w[0] + x)
    return h


def _block(w: Sequence[Tensor], x: Tensor) -> Tensor:
    h = x
    for _ in range(6):
        h = h + torch.tanh(h @ w[0]) @ w[1]
    return h


Shapes = Callable[[int], list[tuple[int, ...]]]
USES: dict[str, tuple[Shapes, Callable[[Sequence[Tensor], Tensor], Tensor]]] = {
    "convolution": (lambda n: [(n, n, 1)], lambda w, x: nn.functional.conv1d(x[:, :, None], w[0])),
    "batch of matrices": (lambda n: [(3, n, n)], lambda w, x: torch.bmm(x.expand(3, *x.shape), w[0])),
    "einsum": (lambda n: [(n, 10, n // 10)], lambda w, x: torch.einsum("bi,ijk->bjk", x, w[0])),
    "two layers": (lambda n: [(n, n)], lambda w, x: torch.tanh(x @ w[0]) @ w[0]),
    "embedding and output": (
        lambda n: [(3 * n, n // 3)],
        lambda w, x: torch.tanh(nn.functional.embedding(x[:, 0].abs().long(), w[0])) @ w[0].t(),
    ),
    "recurrence, 12 steps": (lambda n: [(n, n)], _recurrence),
    "block of two, 6 times": (lambda n: [(n, n), (n, n)], _block),
}
"""Networks whose one weight, or two, is more than a plain layer: shapes for a width, and what is done with them."""


def use_memory(name: str, width: int, device: torch.device, **options: Any) -> dict[str, Any]:
    """Measure a step on one of those networks, as `step_memory` does."""
    torch.manual_seed(0)
    shapes, form = USES[name]
    x = torch.randn(2, width, device=device)
    leaves = [nn.Parameter(torch.randn(shape, device=device) / width**0.5) for shape in shapes(width)]
    return run_memory(leaves, lambda: 10.0 * torch.cos(2.0 * form(leaves, x)).square().mean(), device, **options)


def use_rows(width: int, device: torch.device, dim: int, names: Sequence[str] = tuple(USES)) -> list[dict[str, Any]]:
    """Measure steps of preset "paper" on those networks; the worse of accepted and rejected."""
    rows = []
    for name in names:
        for hvp in (*EXACT, "finite-difference"):
            row: dict[str, Any] = {"weight": name, "products": hvp, "J": dim}
            for lanczos in ("store", "regenerate"):
                options = {"preset": "paper", "hvp": hvp, "lanczos": lanczos, "krylov_dim": dim, "epsilon": 1e-12}
                runs = [use_memory(name, width, device, **options, **more) for more in (ACCEPTED, REJECTED)]
                row[lanczos] = max(measured["peak"] for measured in runs)
            row["beyond"] = max(row["store"] - dim, row["regenerate"])
            rows.append(row | {"claim": 6, "slack": slack(width)})
    return rows


def slack(width: int) -> float:
    """Return what is no vector beside layers of this width: the activations of two rows that a recording holds."""
    return max(0.1, 45 * 2 / width)


def robust_rows(width: int, device: torch.device, steps: int, layers: Sequence[int]) -> list[dict[str, Any]]:
    """Measure a run of the default preset, in which a Krylov space serves many steps."""
    rows = []
    for count in layers:
        for hvp in EXACT:
            measured = step_memory(count, width, device, steps=steps, hvp=hvp)
            row = {"layers": count, "products": hvp, "steps": steps, "between steps": measured["rest"]}
            row |= {"peak": measured["peak"], "beyond": measured["peak"] - measured["rest"]}
            rows.append(row | {"claim": KRYLOV_DIM + 6, "slack": slack(width)})
    return rows


def auto_rows(width: int, device: torch.device, dim: int, layers: Sequence[int]) -> list[dict[str, Any]]:
    """Measure a first step in which the products are timed, however small the model is."""
    rows = []
    for count in layers:
        with mock.patch.multiple(choice, SMALL=0, _chosen={}):
            measured = step_memory(count, width, device, preset="paper", krylov_dim=dim, epsilon=1e-12, **ACCEPTED)
        row = {"layers": count, "J": dim, "peak": measured["peak"], "claim": dim + 6, "slack": slack(width)}
        rows.append(row)
    return rows


# ---------------------------------------------------------------------- rows of a batch


def batch_calls(model: nn.Module, batch: sanc.Batch, microbatch: int | None) -> dict[str, Callable[[], Any]]:
    """Return what an oracle and a step do with a batch that is cut into micro-batches."""
    leaves = list(model.parameters())
    layout = Layout(leaves, [0.0] * len(leaves))

    def oracle(hvp: Any) -> AutogradOracle:
        sample = Sample("closure", batch.parts(microbatch), len(batch), 1)
        return AutogradOracle(layout, sample, sample, sample, hvp=hvp, meter=Meter())

    def product(hvp: str) -> Any:
        answers = oracle(hvp)
        x = answers.start()
        return answers.hessian(x)(torch.ones_like(x))

    def gradient() -> Any:
        answers = oracle("double-backward")
        answers.begin(0, products=False)
        return answers.gradient(answers.start())

    def value() -> float:
        answers = oracle("double-backward")
        return answers.value(answers.start())

    def step() -> Any:
        options = {"preset": "paper", "krylov_dim": 2, "check": False, "seed": 0}
        return sanc.SANC(leaves, microbatch=microbatch, hvp="double-backward", **options).step(batch)

    calls: dict[str, Callable[[], Any]] = {"value": value, "gradient": gradient}
    calls |= {f"product, {hvp}": (lambda hvp=hvp: product(hvp)) for hvp in MODES}
    return calls | {"step": step}


def batch_rows(
    model: nn.Module, rows: int, cuts: Sequence[int | None], side: int, device: torch.device
) -> list[dict[str, Any]]:
    """Measure the activations of calls on a classifier of images: what a batch needs beyond what one row does."""
    torch.manual_seed(0)
    x, y = torch.randn(rows, 1, side, side, device=device), torch.randint(0, 10, (rows,), device=device)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    table = []
    one = batch_calls(model, sanc.Batch(loss, x[:1], y[:1]), None)
    for name, call in one.items():
        call()  # workspaces
        least = peak_and_rest(call, device)[0]
        whole = None
        for cut in cuts:
            again = batch_calls(model, sanc.Batch(loss, x, y), cut)[name]
            needed = peak_and_rest(again, device)[0] - least
            whole = needed if whole is None else whole
            share = 1.0 if cut is None else cut / rows
            table.append({"call": name, "rows": cut or rows, "share": share, "bytes": needed, "ratio": needed / whole})
    return table


# ---------------------------------------------------------------------- a network of a billion parameters


def large(width: int, layers: int, rows: int, device: torch.device, hvp: str, steps: int = 2) -> dict[str, Any]:
    """Make steps without a stored basis on a network that is as large as asked."""
    torch.manual_seed(0)
    model = network(layers, width, device)
    d = length(model)
    x, y = torch.randn(rows, width, device=device), torch.randn(rows, width, device=device)

    def loss() -> Tensor:
        return (model(x) - y).square().mean()

    with torch.no_grad():
        before = float(loss())
    clocks: list[float] = []
    branches: list[str] = []

    def run() -> sanc.SANC:
        options = {"preset": "paper", "lanczos": "regenerate", "seed": 0, "check": False}
        optimizer = sanc.SANC(model.parameters(), hvp=hvp, **options)  # type: ignore[arg-type]
        for _ in range(steps):
            begin = time.perf_counter()
            optimizer.step(loss)
            synchronise(device)
            clocks.append(time.perf_counter() - begin)
            assert optimizer.record is not None
            branches.append(str(optimizer.record.branch))
        return optimizer

    highest, _ = peak_and_rest(run, device)
    with torch.no_grad():
        after = float(loss())
    unit = d * next(model.parameters()).element_size()
    return {
        "parameters": d, "layers": layers, "width": width, "batch": rows, "hvp": hvp, "peak": highest / unit,
        "GiB beyond the parameters": highest / 2**30, "GiB in all": (highest + unit) / 2**30, "seconds": clocks,
        "branches": branches, "loss before": before, "loss after": after, **rounding(d, device),
    }  # fmt: skip


def rounding(d: int, device: torch.device) -> dict[str, float]:
    """Relative errors of norms and inner products of float32 vectors of this length, against float64 in pieces."""
    u = torch.rand(d, device=device)
    v = torch.rand(d, device=device)
    pieces = list(zip(u.split(2**24), v.split(2**24), strict=True))  # type: ignore[no-untyped-call]
    square = sum(float(a.double().square().sum()) for a, _ in pieces)
    inner = sum(float(torch.dot(a.double(), b.double())) for a, b in pieces)
    space = sanc.vectors.TorchSpace(d, torch.float32, device)
    return {"norm error": abs(space.norm(u) / square**0.5 - 1.0), "dot error": abs(space.dot(u, v) / inner - 1.0)}


# ---------------------------------------------------------------------- the command


def step_table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out the vectors of a step beside the claim."""
    head = ("layers", "products", "lanczos", "J", "accepted", "rejected", "claim", "")
    cells = []
    for row in rows:
        met = _met(max(row["accepted"], row["rejected"]), row)
        numbers = [f"{row[key]:.2f}" for key in ("accepted", "rejected")]
        cells.append([row["layers"], row["hvp"], row["lanczos"], row["J"], *numbers, f"≤ {row['claim']}", met])
    return plain_table(head, cells, left=3)


def other_table(rows: Sequence[dict[str, Any]], judged: str) -> str:
    """Lay out rows as they are, with the claim on one of their columns."""
    head = [key for key in rows[0] if key != "slack"]
    cells = []
    for row in rows:
        shown = [f"≤ {row[key]}" if key == "claim" else _short(row[key]) for key in head]
        cells.append([*shown, _met(row[judged], row)])
    return plain_table([*head, ""], cells)


def _met(measured: float, row: dict[str, Any]) -> str:
    return "" if measured <= row["claim"] + row["slack"] else "more than claimed"


def batch_table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out the activations of micro-batches relative to those of the whole batch."""
    cuts = list(dict.fromkeys(row["rows"] for row in rows))
    cells = []
    for name in dict.fromkeys(row["call"] for row in rows):
        mine = {row["rows"]: row for row in rows if row["call"] == name}
        cells.append([name, f"{mine[cuts[0]]['bytes'] / 2**20:.1f}", *[f"{mine[cut]['ratio']:.3f}" for cut in cuts]])
    cells.append(["proportional", "", *[f"{cut / cuts[0]:.3f}" for cut in cuts]])
    return plain_table(["call", "MiB, all rows", *[f"{cut} rows" for cut in cuts]], cells)


def picture(steps: Sequence[dict[str, Any]], batches: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the vectors of a step against J, and activations against the rows in memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    dims = sorted({row["J"] for row in steps})
    for colour, lanczos in enumerate(("store", "regenerate")):
        left.plot(dims, [j + 6 if lanczos == "store" else 6 for j in dims], "--", color=f"C{colour}", lw=1)
        for hvp, marker in zip(EXACT, "os^", strict=True):
            mine = [row for row in steps if row["lanczos"] == lanczos and row["hvp"] == hvp]
            highest = [max(max(r["accepted"], r["rejected"]) for r in mine if r["J"] == j) for j in dims]
            left.plot(dims, highest, marker=marker, color=f"C{colour}", label=f"{lanczos}, {hvp}")
    left.set_xlabel("J")
    left.set_ylabel("vectors beyond the parameters (dashed: claim)")
    left.set_ylim(bottom=0)
    left.set_title("a step, the worst of all networks", fontsize=9)
    names = list(dict.fromkeys(row["call"] for row in batches))
    for name in names:
        mine = [row for row in batches if row["call"] == name]
        right.plot([row["rows"] for row in mine], [row["ratio"] for row in mine], marker="o", ms=4, label=name)
    cuts = sorted({row["rows"] for row in batches})
    right.plot(cuts, [cut / cuts[-1] for cut in cuts], "--", color="black", lw=1, label="proportional")
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    right.set_xlabel("rows in memory at a time")
    right.set_ylabel(f"activations, of those of {cuts[-1]} rows")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def say_large(answer: dict[str, Any]) -> None:
    """Print what the large network needed."""
    for name, content in answer.items():
        shown = f"{content:,}" if isinstance(content, int) else content
        if isinstance(content, float):
            shown = f"{content:.3g}"
        elif isinstance(content, list) and content and isinstance(content[0], float):
            shown = ", ".join(f"{entry:.2f}" for entry in content)
        print(f"{name:26s} {shown}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="small networks and few rows")
    parser.add_argument("--billion", action="store_true", help="only two steps on a network of a billion parameters")
    parser.add_argument("--width", type=int, default=16384, help="width of the four layers of --billion")
    parser.add_argument("--hvp", default=MODES[0], choices=MODES, help="products of --billion")
    parser.add_argument("--no-cudnn", action="store_true", help="convolutions without cuDNN and its workspaces")
    parser.add_argument("--out", type=Path, help="folder for memory.json and memory.png")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.backends.cudnn.enabled = not options.no_cudnn
    document: dict[str, Any] = {"machine": machine(device)}
    if options.billion:
        document["large"] = large(options.width, 4, 8, device, options.hvp)
        say_large(document["large"])
        if options.out is not None:
            write_json(options.out / "memory-billion.json", document)
        return 0

    gpu = device.type == "cuda"
    width = 150 if options.quick else 4096 if gpu else 600
    dims = (2, 4) if options.quick else (5, 10)
    rows, side = (128, 8) if options.quick else (512, 28)
    cuts = [None, *[rows // cut for cut in (2, 4, 8, 16)]]
    for hvp in MODES if gpu else ():  # the libraries' workspaces are no vectors
        step_memory(2, 64, device, preset="paper", hvp=hvp)
    print(f"Vectors beyond the parameters in a step of preset paper; layers of {width}×{width}, 2 rows.\n")
    document["steps"] = step_rows(width, device, dims, (1, 4))
    print(step_table(document["steps"]))
    print(f"\nThe default preset from its construction on, J = {KRYLOV_DIM}; beyond: what it does not keep.\n")
    document["robust"] = robust_rows(width, device, 20 if options.quick else 70, (1, 4))
    print(other_table(document["robust"], "beyond"))
    print("\nOne weight, or two, in other uses: a basis that is stored, and one that is not; beyond: without J.\n")
    document["uses"] = use_rows(width, device, dims[0], list(USES)[:: 3 if options.quick else 1])
    print(other_table(document["uses"], "beyond"))
    print('\nA first step of preset paper with hvp="auto", in which the products are timed.\n')
    document["auto"] = auto_rows(width, device, 5, (1, 4))
    print(other_table(document["auto"], "peak"))
    print(f"\nActivations of a CNN on {rows} rows of {side}×{side}, of those of all rows at once.\n")
    document["batches"] = batch_rows(cnn(1, side, 10).to(device), rows, cuts, side, device)
    print(batch_table(document["batches"]))
    if options.out is not None:
        write_json(options.out / "memory.json", document)
        picture(document["steps"], document["batches"], options.out / "memory.png")
        print(f"\nwritten: {options.out}/memory.json and memory.png")
    return 0


def _short(cell: Any) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


if __name__ == "__main__":
    sys.exit(main())
