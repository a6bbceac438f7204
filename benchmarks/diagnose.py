"""Measure `sanc.diagnose`: its eigenvalues and products on networks, and a table of trained networks.

    python -m benchmarks.diagnose --out diagnose-output      # ten networks and five states, tens of minutes on one core
    python -m benchmarks.diagnose --quick                    # two networks and two states, seconds

The first table compares both ends of the spectrum with a Lanczos run of twice the products (or all eigenvalues, for
less than a thousand parameters). Errors are relative to the spectral norm; the goal is 2 %. Beside it is a bare bound:
the number of products after which plain Lanczos, which knows no bound of its error, has both ends within 2 %.

Two other packages compute eigenvalues of the same Hessians, if they are installed. `fast_lanczos` of curvlinops makes
a given number of Lanczos iterations, and has no error bound. Its column has the fewest with which the errors of both
ends against the reference are at most those of `diagnose`: products at equal accuracy. All these numbers are medians of
STARTS starts; the column of errors has the largest.
`approximate_boundaries` of curvlinops finds both ends by Lanczos with restarts (ARPACK). `eigenvalues` of PyHessian
finds the one of largest magnitude by power iterations. These two run with their defaults, and stop at MOST_PRODUCTS.

The second table has two networks for the digits of scikit-learn in several states of training.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigvalsh_tridiagonal
from torch import Tensor, nn

import sanc
from benchmarks.reporting import command, machine, markdown_table, number, write_results
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.core.spectrum.extremes import Extremes, find_extremes

TOLERANCE, CONFIDENCE = 0.02, 0.95
LEAST_ERROR = 1e-5
"""Smallest error of a comparison at equal accuracy: the roundoff of products in float32."""
MOST_PRODUCTS = 300
"""Products after which a run of another package is stopped."""
STARTS, FIRST_ITERATIONS = 15, 32
"""Random starts of a comparison at equal accuracy, and the iterations of the first run, which are doubled."""
Batches = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """One transformer block on the eight rows of a digit."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.query = nn.Linear(8, width), nn.Linear(width, 3 * width)
        self.norm, self.mix = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.reshape(-1, 8, 8))
        q, k, v = self.query(self.norm(h)).chunk(3, -1)
        h = h + torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        head: Tensor = self.head((h + self.mix(self.norm(h))).mean(1))
        return head


def image(*layers: nn.Module) -> nn.Sequential:
    """Return layers that take digits as images."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 10),
    "MLP, tanh": lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)),
    "MLP, ReLU": lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    "deep MLP": lambda: nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    ),
    "CNN": lambda: image(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    ),
    "CNN, BatchNorm": lambda: image(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 10)),
    "attention": lambda: Attention(),
    "wide MLP": lambda: nn.Sequential(
        nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10)
    ),
    "very wide MLP": lambda: nn.Sequential(
        nn.Linear(64, 3200), nn.ReLU(), nn.Linear(3200, 3200), nn.ReLU(), nn.Linear(3200, 10)
    ),
}  # fmt: skip
"""Networks for digits by name; the last one has 10.5 million parameters."""


def digits(rows: int, size: int) -> Batches:
    """Return batches of the digits of scikit-learn."""
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))[:rows]
    inputs = torch.as_tensor(X[order] / 16, dtype=torch.float32)
    return list(zip(inputs.split(size), torch.as_tensor(y[order]).split(size), strict=True))


def bind(model: nn.Module, data: Batches) -> tuple[AutogradOracle, Tensor]:
    """Return the oracle of the mean loss on the batches, and the point."""
    parameters: list[Tensor] = list(model.parameters())
    oracle = AutogradOracle(Leaves(parameters, [0.0] * len(parameters)), exact=True)
    rows = sum(len(y) for _, y in data)
    loss = nn.CrossEntropyLoss()

    def closure(x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        return lambda: loss(model(x), y)

    sample = Sample("loss", [(len(y) / rows, closure(x, y)) for x, y in data], rows, 0)
    oracle.bind(sample, sample, sample)
    return oracle, oracle.read_point()


def bare_products(truth: Extremes) -> int:
    """Return the number of Lanczos iterations after which both ends are within the tolerance of the last ones."""
    diagonal, off_diagonal = truth.krylov.tridiagonal()
    ends = eigvalsh_tridiagonal(diagonal, off_diagonal)[[0, -1]]
    for dim in range(1, len(diagonal) + 1):
        values = eigvalsh_tridiagonal(diagonal[:dim], off_diagonal[: dim - 1])[[0, -1]]
        if np.abs(values - ends).max() <= TOLERANCE * np.abs(ends).max():
            return dim
    return len(diagonal)


class TooManyError(Exception):
    """A run of another package needs more products than `MOST_PRODUCTS`."""


class Counter:
    """Counts the calls of a function, and raises `TooManyError` after `MOST_PRODUCTS` of them."""

    def __init__(self) -> None:
        self.calls = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with its calls counted."""

        def counted(*arguments: Any) -> Any:
            if self.calls == MOST_PRODUCTS:
                raise TooManyError
            self.calls += 1
            return function(*arguments)

        return counted


def curvlinops_hessian(model: nn.Module, data: Batches) -> Any:
    """Return the Hessian as an operator of curvlinops."""
    from curvlinops import HessianLinearOperator

    parameters = list(model.parameters())
    return HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, data, check_deterministic=False)


def products_at_equal_accuracy(model: nn.Module, data: Batches, ends: Sequence[float], error: float) -> float:
    """Return the fewest iterations with which Lanczos of curvlinops has both ends to an error, the median of starts.

    A run of k iterations has the leading k rows and columns of the tridiagonal matrix of a longer run.
    """
    from curvlinops.papyan2020traces.spectrum import fast_lanczos

    hessian, needed = curvlinops_hessian(model, data), []
    for seed in range(STARTS):
        longest, fewest = FIRST_ITERATIONS, math.inf
        while math.isinf(fewest) and longest <= MOST_PRODUCTS:
            torch.manual_seed(seed)
            values, vectors = (part.double().numpy() for part in fast_lanczos(hessian, longest))
            fewest = first_within(vectors * values @ vectors.T, ends, error)
            longest *= 2
        needed.append(fewest)
    return float(np.median(needed))


def first_within(matrix: Any, ends: Sequence[float], error: float) -> float:
    """Return the size of the smallest leading block whose extreme eigenvalues are the given ones up to an error."""
    for size in range(1, len(matrix) + 1):
        values = np.linalg.eigvalsh(matrix[:size, :size])[[0, -1]]
        if np.abs(values - ends).max() <= error:
            return size
    return math.inf


def curvlinops_ends(model: nn.Module, data: Batches, counter: Counter) -> list[float]:
    """Return both ends of the spectrum by curvlinops."""
    from curvlinops.papyan2020traces.spectrum import approximate_boundaries
    from scipy.sparse.linalg import LinearOperator

    inner = curvlinops_hessian(model, data).to_scipy()

    class Counted:
        def to_scipy(self) -> Any:
            return LinearOperator(inner.shape, matvec=counter.wrap(inner.matvec), dtype=inner.dtype)

    return sorted(map(float, approximate_boundaries(Counted())))


def pyhessian_ends(model: nn.Module, data: Batches, counter: Counter) -> list[float]:
    """Return the eigenvalue of largest magnitude by PyHessian."""
    from pyhessian import hessian

    found: Any = hessian(model, nn.CrossEntropyLoss(), dataloader=data, cuda=False)
    found.dataloader_hv_product = counter.wrap(found.dataloader_hv_product)
    values, _ = found.eigenvalues()
    return [float(values[0])]


PEERS: dict[str, tuple[Callable[[nn.Module, Batches, Counter], list[float]], set[str]]] = {
    "curvlinops": (curvlinops_ends, {"dropout", "CNN, BatchNorm"}),
    "pyhessian": (pyhessian_ends, {"dropout", "CNN, BatchNorm"}),
}
"""Other packages, and the networks that they cannot measure: curvlinops needs a loss without random numbers and
buffers, and PyHessian sets networks to evaluation mode."""


def compare(name: str, data: Batches, truth: Extremes, error: float) -> dict[str, Any]:
    """Return products and largest error of the other packages that are installed.

    `error` is the median over starts of that of `diagnose`, for the comparison at equal accuracy.
    """
    rows: dict[str, Any] = {}
    norm = max(abs(truth.lambda_min), abs(truth.lambda_max))
    if importlib.util.find_spec("curvlinops") is not None and name not in PEERS["curvlinops"][1]:
        torch.manual_seed(0)
        ends = [truth.lambda_min, truth.lambda_max]
        rows["Lanczos of curvlinops"] = {
            "products": products_at_equal_accuracy(NETWORKS[name](), data, ends, max(error, LEAST_ERROR) * norm),
            "error": math.nan,
        }
    for package, (find, unsuitable) in PEERS.items():
        if importlib.util.find_spec(package) is None or name in unsuitable:
            continue
        torch.manual_seed(0)
        model, counter = NETWORKS[name](), Counter()
        ends = [truth.lambda_min, truth.lambda_max]
        try:
            found = find(model, data, counter)
        except TooManyError:
            rows[package] = {"products": math.inf, "error": math.nan}
            continue
        if len(found) == 1:  # the end of largest magnitude
            ends = [max(ends, key=abs)]
        error = max(abs(value - end) for value, end in zip(found, ends, strict=True)) / norm
        rows[package] = {"products": counter.calls, "error": error}
    return rows


def measure(name: str, rows: int, size: int) -> dict[str, Any]:
    """Compare the ends of the spectrum of one network, at its initial parameters, with a reference."""
    torch.manual_seed(0)
    model, data = NETWORKS[name](), digits(rows, size)
    oracle, x = bind(model, data)
    with torch.enable_grad():
        runs = [
            find_extremes(oracle, x, relative_error=TOLERANCE, confidence=CONFIDENCE, seed=seed)
            for seed in range(STARTS)
        ]
        longer = min(len(x), 1000 if len(x) <= 1000 else 2 * max(found.products for found in runs))
        truth = find_extremes(oracle, x, relative_error=1e-6, max_products=longer, seed=STARTS)
    oracle.undo_training()
    ends = [truth.lambda_min, truth.lambda_max]
    norm = max(map(abs, ends))
    errors = np.array([[found.lambda_min, found.lambda_max] for found in runs]) - ends
    errors = np.abs(errors) / norm
    return {
        "network": name,
        "parameters": len(x),
        "lambda_min": truth.lambda_min,
        "lambda_max": truth.lambda_max,
        "errors": errors.max(axis=0).tolist(),
        "bounds hold": all(
            found.lower_bound <= truth.lambda_min + found.ritz_error
            and found.upper_bound >= truth.lambda_max - found.ritz_error
            for found in runs
        ),
        "products": float(np.median([found.products for found in runs])),
        "bare products": bare_products(truth),
        "peers": compare(name, data, truth, float(np.median(errors.max(axis=1)))),
    }


STATES = ("random", "half trained", "AdamW", "SGD", "sanc")
TRAINED = ("deep MLP", "CNN")
"""Networks of the second table."""


def trained(network: str, state: str, data: Batches, epochs: int) -> nn.Module:
    """Return a network in a state of training."""
    torch.manual_seed(0)
    model, loss = NETWORKS[network](), nn.CrossEntropyLoss()
    if state == "random":
        return model
    if state == "sanc":
        opt: Any = sanc.SANC(model.parameters(), seed=0)
    elif state == "SGD":
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(max(1, epochs // 10) if state == "half trained" else epochs):
        for x, y in data:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                return loss(model(x), y)

            if state == "sanc":
                opt.step(closure)
            else:
                opt.zero_grad()
                closure().backward()
                opt.step()
    return model


def table(rows: Sequence[Any], states: Sequence[Any]) -> str:
    """Return both tables."""
    others = ["Lanczos of curvlinops", *PEERS]
    head = ["network", "parameters", "λ_min", "λ_max", "errors, %", "products", "bare bound", "ratio", *others]
    cells = []
    for row in rows:
        cell = [row["network"], row["parameters"], f"{row['lambda_min']:.3g}", f"{row['lambda_max']:.3g}"]
        cell += [", ".join(f"{100 * error:.2g}" for error in row["errors"]), number(row["products"])]
        cell += [row["bare products"], f"{row['products'] / row['bare products']:.1f}"]
        for package in others:
            peer = row["peers"].get(package, {"products": math.nan, "error": math.nan})
            error = "" if math.isnan(peer["error"]) else f" ({100 * peer['error']:.2g} %)"
            cell.append(f"> {MOST_PRODUCTS}" if math.isinf(peer["products"]) else f"{number(peer['products'])}{error}")
        cells.append(cell)
    first = markdown_table(head, cells)
    names = ["value", "held_out_value", "grad_norm", "noise_share", "lambda_min", "lambda_max", "effective_dimension"]
    names += ["gradient_decrease", "curvature_decrease"]
    head = [
        "network",
        "state",
        "loss",
        "held out",
        "‖g‖",
        "noise share",
        "λ_min",
        "λ_max",
        "dimension",
        "gradient step",
        "escape step",
    ]
    lines = [[row["network"], row["state"], *(f"{row[name]:.3g}" for name in names)] for row in states]
    return f"{first}\n\n{markdown_table(head, lines, left=2)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="two networks and two states", out="diagnose.json")
    options = parser.parse_args(arguments)
    names, rows = list(NETWORKS), 256
    if options.quick:
        names, rows = names[:2], 64
    measured = []
    for name in names:
        measured.append(measure(name, 32 if "wide" in name else rows, 32))
        print(f"{name}: done", file=sys.stderr, flush=True)
    data, states = digits(400 if options.quick else 1600, 32), []
    used, held_out = data[: len(data) * 3 // 4], data[len(data) * 3 // 4 :]
    chosen = [(network, state) for network in TRAINED for state in STATES]
    for network, state in chosen[:2] if options.quick else chosen:
        model = trained(network, state, used, 2 if options.quick else 20)
        report = sanc.diagnose(model, nn.CrossEntropyLoss(), used, held_out=held_out)
        about = {"network": network, "state": state, "interpretation": report.interpretation}
        states.append(about | report.as_dict())
        print(f"{network}, {state}: {report.interpretation}", file=sys.stderr, flush=True)
    print(table(measured, states))
    write_results(options.out, {"diagnose.json": {"machine": machine(), "networks": measured, "states": states}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
