"""Growth of the cost of a step with parameters, rows, Krylov dimension and batch, beside the bare oracle calls.

What a step asks for is done by hand as well, in torch or NumPy alone, in turns with it: one gradient, J products and
one value for preset "paper" (where the samples coincide, the value at x comes with the gradient); as many gradients,
products and values as the optimiser counted for a whole cycle of the default preset and for a run of `sanc.minimize`.

On a GPU the steps are captured, and so are the calls by hand, in one CUDA graph; both are launched many times before
they are waited for, as in a training loop. `sanc.minimize` and its calls are eager there too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sanc
from benchmarks.common import plain_table
from benchmarks.timing import captured, in_turns, machine, write_json

J, BATCH, WIDTH, FEATURES, CYCLE = 5, 64, 256, 50, 50
IN_A_ROW = 20
"""Captured steps between two waits."""

# ---------------------------------------------------------------------- a network


def network(width: int, batch: int, device: torch.device) -> tuple[nn.Module, sanc.Batch]:
    """Two hidden layers, as wide as the input, and the loss on a batch."""
    torch.manual_seed(0)
    sizes = (width, width, width, 10)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    model = nn.Sequential(*layers[:-1]).to(device)
    x, y = torch.randn(batch, width, device=device), torch.randint(0, 10, (batch,), device=device)
    return model, sanc.Batch(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)


def in_a_row(call: Callable[[], Any], count: int) -> Callable[[], None]:
    """Call a few times."""

    def row() -> None:
        for _ in range(count):
            call()

    return row


def by_hand(
    model: nn.Module, loss: Callable[[], Tensor], gradients: int, products: int, values: int
) -> Callable[[], None]:
    """Gradients, products with the Hessian at the last of them, and values: nothing else."""
    leaves = list(model.parameters())

    cuda = leaves[0].is_cuda

    def calls() -> list[Any]:
        for turn in range(gradients):
            grads = torch.autograd.grad(loss(), leaves, create_graph=products > 0 and turn == gradients - 1)
        v = [g.detach() for g in grads]
        made = [torch.autograd.grad(grads, leaves, v, retain_graph=True) for _ in range(products)][-1:]
        with torch.no_grad():
            for _ in range(values):
                made.append(loss() if cuda else float(loss()))
        return [*v, *made]

    return captured(calls, leaves[0].device) if cuda else calls  # type: ignore[return-value]


def paper_step(model: nn.Module, loss: sanc.Batch, dim: int) -> Callable[[], None]:
    """One step with exactly J Lanczos iterations, whatever they find."""
    cuda = next(model.parameters()).is_cuda
    options = {"preset": "paper", "krylov_dim": dim, "epsilon": 1e-30, "check": False, "seed": 0, "capture": cuda}
    optimizer = sanc.SANC(model.parameters(), **options)
    for _ in range(3):
        optimizer.step(loss)
    assert not cuda or not optimizer.capture_reason, optimizer.capture_reason

    def step() -> None:
        for _ in range(IN_A_ROW if cuda else 1):
            optimizer.step(loss)
        assert optimizer.record is not None
        assert optimizer.record.krylov_dim == dim

    return step


def network_row(width: int, batch: int, dim: int, device: torch.device, seconds: float) -> dict[str, Any]:
    """Time a step of preset "paper" beside what it asks for."""
    model, loss = network(width, batch, device)
    count = IN_A_ROW if device.type == "cuda" else 1
    calls = in_a_row(by_hand(model, loss, 1, dim, 1), count)
    times = in_turns({"step": paper_step(model, loss, dim), "by hand": calls}, device=device, seconds=seconds)
    sizes = {"d": sum(p.numel() for p in model.parameters()), "batch": batch, "J": dim}
    return sizes | {name: duration / count for name, duration in times.items()}


def robust_row(width: int, batch: int, device: torch.device, seconds: float, cycle: int) -> dict[str, Any]:
    """Time the default preset over `cycle` steps; a mean over them."""
    model, loss = network(width, batch, device)
    optimizer = sanc.SANC(model.parameters(), check=False, seed=0, capture=device.type == "cuda")
    for _ in range(2 * cycle):  # the first phase is over
        optimizer.step(loss)
    before = optimizer.record
    for _ in range(cycle):
        optimizer.step(loss)
    assert before is not None
    assert optimizer.record is not None
    counts = [getattr(optimizer.record.calls, k) - getattr(before.calls, k) for k in ("gradient", "product", "value")]
    asked = [count // batch for count in counts]

    def steps() -> None:
        for _ in range(cycle):
            optimizer.step(loss)

    times = in_turns(
        {"robust": steps, "robust by hand": by_hand(model, loss, *asked)},
        device=device,
        seconds=seconds,
        warm_up=1,
        least=2,
    )
    return {name: duration / cycle for name, duration in times.items()}


# ---------------------------------------------------------------------- a linear model


def minimize_row(rows: int, device: torch.device, seconds: float, iterations: int = 5) -> dict[str, Any]:
    """Time iterations of `sanc.minimize` on logistic regression beside what they ask for."""
    limits = {"max_iter": iterations, "tol": 1e-30, "certify": False, "preset": "paper", "epsilon": 1e-30}
    if device.type == "cpu":
        rng = np.random.default_rng(0)
        X = rng.standard_normal((rows, FEATURES))
        labels = (rng.random(rows) < 0.5).astype(np.float64)
        problem = sanc.problems.Logistic(X, labels, "nonconvex", 1e-3)
        run, calls = _numpy_calls(problem, limits)
    else:
        torch.manual_seed(0)
        features = torch.randn(rows, FEATURES, dtype=torch.float64, device=device)
        run, calls = _torch_calls(features, torch.randint(2, (rows,), device=device).double(), limits)
    times = in_turns({"step": run, "by hand": calls}, device=device, seconds=seconds, warm_up=1, least=3)
    return {"n": rows, **{name: duration / iterations for name, duration in times.items()}}


def _numpy_calls(problem: Any, limits: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
    w = np.zeros(FEATURES)

    def run() -> Any:
        return sanc.minimize(problem, w, **limits)

    answer = run()

    def calls() -> None:
        for _ in range(answer.njev):
            g = problem.value_and_gradient(w)[1]
        for _ in range(answer.nit):
            product = problem.hessian(w)
        for _ in range(answer.nhev):
            product(g)
        for _ in range(answer.nfev):
            problem.value(w)

    return run, calls


def _torch_calls(X: Tensor, y: Tensor, limits: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
    w = torch.zeros(FEATURES, dtype=X.dtype, device=X.device)

    def loss(w: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(X @ w, y) + 1e-3 * (w * w / (1 + w * w)).sum()

    def run() -> Any:
        return sanc.minimize(loss, w, **limits)

    answer = run()
    leaf = w.clone().requires_grad_()

    def calls() -> None:
        for _ in range(answer.njev):
            (g,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        for _ in range(answer.nhev):
            torch.autograd.grad(g, leaf, g.detach(), retain_graph=True)
        with torch.no_grad():
            for _ in range(answer.nfev):
                float(loss(leaf))

    return run, calls


# ---------------------------------------------------------------------- the page


def measure(device: torch.device, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Time everything; the panels by what grows in them."""
    gpu = device.type == "cuda"
    seconds = 0.05 if quick else 1.0 if gpu else 2.5
    cycle = 10 if quick else CYCLE
    widths = (16, 32) if quick else (64, 128, 256, 512, 1024, 2048, 4096) if gpu else (64, 128, 256, 512, 1024)
    counts = (100, 1000) if quick else (10**4, 10**5, 10**6, 10**7) if gpu else (10**3, 10**4, 10**5, 3 * 10**5)
    dims = (1, 2) if quick else (1, 2, 5, 10, 20)
    batches = (4, 8) if quick else (16, 64, 256, 1024, 4096) if gpu else (16, 64, 256, 1024)
    width = 16 if quick else WIDTH
    panels: dict[str, list[dict[str, Any]]] = {"d": [], "n": [], "J": [], "batch": []}
    for w in widths:
        panels["d"].append(network_row(w, BATCH, J, device, seconds) | robust_row(w, BATCH, device, 2 * seconds, cycle))
    panels["n"] = [minimize_row(n, device, seconds) for n in counts]
    panels["J"] = [network_row(width, BATCH, dim, device, seconds) for dim in dims]
    for rows in batches:
        panels["batch"].append(
            network_row(width, rows, J, device, seconds) | robust_row(width, rows, device, 2 * seconds, cycle)
        )
    return panels


def table_of(panels: dict[str, list[dict[str, Any]]]) -> str:
    """Lay out times and ratios."""
    cells = []
    for what, rows in panels.items():
        for row in rows:
            cell = [what, f"{row[what]:,}", _ms(row["step"]), _ms(row["by hand"]), _ratio(row, "step", "by hand")]
            both = [_ms(row.get("robust")), _ratio(row, "robust", "robust by hand")]
            cells.append(cell + both)
    head = ("grows", "to", "step, ms", "by hand, ms", "ratio", "robust, ms", "robust ratio")
    return plain_table(head, cells)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def _ratio(row: dict[str, Any], a: str, b: str) -> str:
    return f"{row[a] / row[b]:.2f}" if a in row else ""


TITLES = {
    "d": f"parameters d (MLP, batch {BATCH}, J = {J})",
    "n": f"rows n (logistic regression, {FEATURES} features, one iteration of minimize)",
    "J": f"Lanczos iterations J (MLP of width {WIDTH}, batch {BATCH})",
    "batch": f"batch size (MLP of width {WIDTH}, J = {J})",
}


def picture(panels: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the four panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 8))
    for axis, (what, rows) in zip(axes.flat, panels.items(), strict=True):
        sizes = np.array([row[what] for row in rows], np.float64)
        axis.plot(sizes, _column(rows, "step"), "o-", color="black", lw=2, label='step, preset "paper"')
        axis.plot(sizes, _column(rows, "by hand"), "s-", color="C0", label="its oracle calls by hand")
        if "robust" in rows[0]:
            axis.plot(sizes, _column(rows, "robust"), "o-", color="C3", label="default preset, mean of a cycle")
            axis.plot(sizes, _column(rows, "robust by hand"), "s-", color="C1", label="its oracle calls by hand")
        last = _column(rows, "by hand")[-1]
        axis.plot(sizes, last * sizes / sizes[-1], "--", color="grey", lw=1, label="proportional")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(TITLES[what], fontsize=8)
        axis.set_ylabel("milliseconds")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _column(rows: Sequence[dict[str, Any]], name: str) -> Any:
    return 1e3 * np.array([row[name] for row in rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="two tiny sizes of each")
    parser.add_argument("--out", type=Path, help="folder for scaling.json and scaling.png")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    panels = measure(device, options.quick)
    print(table_of(panels))
    if options.out is not None:
        write_json(options.out / "scaling.json", {"machine": machine(device), "panels": panels})
        picture(panels, options.out / "scaling.png")
        print(f"\nwritten: {options.out}/scaling.json and scaling.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
