"""Measure `sanc.argmin`: errors and times of derivatives, and a search for penalties by gradients.

    python -m benchmarks.implicit --out implicit-output      # 22 problems and the search, ten minutes on one core
    python -m benchmarks.implicit --quick                    # two problems and a short search, seconds

The first table has, for every problem of `benchmarks.implicit_problems`, the relative error of the gradient against a
closed form or dense linear algebra, the estimate of `argmin`, and the time of the backward pass over that of the
forward pass. "dense" is the time of the dense Hessian with its linear system over that of the backward pass, for at
most 200 variables. If TorchOpt is installed, its implicit derivative at the same minimum is timed too, with the
conjugate gradient method to the same tolerance. All functions of a row are timed alternately; ratios are medians.

The second table has minima without a derivative: what `argmin` and TorchOpt, with its default solver, return there.

The third table is the search for twelve penalties of a logistic regression, one per group of features, by the loss of
rows that were held out. `sanc.minimize` minimises it over the penalties through `argmin`. Random search with
scikit-learn's fastest solver gets ten times as long.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import sanc
from benchmarks.implicit_problems import D, Problem, Theta, difference, large_logistic, problems, reference
from benchmarks.reporting import command, machine, markdown_table, number, write_results
from benchmarks.timing import interleaved, median_ratio, medians

try:
    import torchopt
except ImportError:
    torchopt = None

DENSE_LIMIT = 200
GROUPS, FEATURES, ROWS = 12, 5, 400
FACTOR = 10
"""Time of random search over that of the search by gradients."""


def peer_gradient(problem: Problem, x: Tensor, theta: Theta, *, default: bool = False) -> Callable[[], Theta]:
    """Return a function that computes the gradient of ⟨w, x(θ)⟩ by TorchOpt at the minimum x."""
    names = list(theta)

    def optimality(x: Tensor, *values: Tensor) -> Any:
        return torch.func.grad(problem.fun)(x, dict(zip(names, values, strict=True)))

    solver = torchopt.linear_solve.solve_cg(maxiter=1000, atol=0.0, rtol=1e-8)
    if default:
        solver = torchopt.linear_solve.solve_normal_cg()
    places = tuple(range(1, len(names) + 1))

    @torchopt.diff.implicit.custom_root(optimality, argnums=places, solve=solver)  # type: ignore[untyped-decorator]
    def solution(start: Tensor, *values: Tensor) -> Tensor:
        return x

    def call() -> Theta:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            loss = (solution(problem.x0, *theta.values()) * problem.weights()).sum()
            return dict(zip(names, torch.autograd.grad(loss, list(theta.values())), strict=True))

    return call


def dense_system(problem: Problem, x: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes the dense Hessian and solves its linear system."""
    flat, w = x.reshape(-1), problem.weights().reshape(-1)

    def call() -> Tensor:
        hessian = torch.func.hessian(lambda x: problem.fun(x.reshape(problem.x0.shape), problem.theta))(flat)
        return torch.linalg.solve(hessian, w)

    return call


def measure(problem: Problem, seconds: float) -> dict[str, Any]:
    """Return errors and times of one problem."""
    theta, w = problem.parameters(), problem.weights()
    x, solution = sanc.argmin(problem.fun, problem.x0, theta, details=True)

    def backward() -> Theta:
        grads = torch.autograd.grad((x * w).sum(), list(theta.values()), retain_graph=True)
        return dict(zip(theta, grads, strict=True))

    known = problem.closed is not None or x.numel() <= DENSE_LIMIT
    truth = reference(problem, x) if known else None
    found = backward()
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: sanc.argmin(problem.fun, problem.x0, theta),
        "backward": backward,
    }
    if x.numel() <= DENSE_LIMIT:
        calls["dense"] = dense_system(problem, x.detach())
    row: dict[str, Any] = {
        "problem": problem.name,
        "variables": x.numel(),
        "parameters": sum(tensor.numel() for tensor in theta.values()),
        "error": math.nan if truth is None else difference(found, truth),
        "estimate": solution.error,
        "iterations": solution.result.nit,
        "products": [solution.result.nhev, solution.certificate.products, solution.derivatives[-1].products],
    }
    if torchopt is not None:
        calls["torchopt"] = peer_gradient(problem, x.detach(), theta)
        row["torchopt error"] = math.nan if truth is None else difference(calls["torchopt"](), truth)
    rounds = interleaved(calls, seconds=seconds, warm_up=1, least=3)
    row["milliseconds"] = {name: 1e3 * spent for name, spent in medians(rounds).items()}
    row["ratio"] = median_ratio(rounds["backward"], rounds["forward"])
    for name in ("dense", "torchopt"):
        if name in rounds:
            row[f"{name} ratio"] = median_ratio(rounds[name], rounds["backward"])
    return row


SINGULAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "valley, (x₁ + x₂ − θ)²": lambda x, t: (x[0] + x[1] - t) ** 2,
    "degenerate, (x − θ)⁴": lambda x, t: ((x - t) ** 4).sum(),
    "unused variable": lambda x, t: (x[0] - t) ** 2,
    "not converged": lambda x, t: 100 * (x[1] - x[0] ** 2) ** 2 + (t - x[0]) ** 2,
}
"""Functions of two variables whose minimum has no derivative, or that two iterations do not minimise."""


def singular(name: str) -> dict[str, Any]:
    """Return what `argmin` reports for a function without a derivative, and what TorchOpt returns at the same point."""
    fun, t = SINGULAR[name], torch.tensor(1.0, dtype=D, requires_grad=True)
    start, options = torch.tensor([-1.2, 1.0], dtype=D), {"max_iter": 2} if name == "not converged" else {}
    try:
        x = sanc.argmin(fun, start, t, **options)
        reported = str(torch.autograd.grad(x.sum(), t)[0].item())
    except sanc.SingularMinimumError:
        reported = "raises"
    row = {"function": name, "argmin": reported}
    if torchopt is not None:
        at = sanc.minimize(lambda x: fun(x, t.detach()), start, **options).x
        problem = Problem(name, lambda x, theta: fun(x, theta["t"]), start, {"t": t.detach()})
        try:
            row["torchopt"] = number(float(peer_gradient(problem, at, {"t": t}, default=True)()["t"]))
        except (RuntimeError, ArithmeticError) as error:
            row["torchopt"] = type(error).__name__
    return row


# ---------------------------------------------------------------------- search for penalties


def table_of_data(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, labels ±1, and the group of each feature; the groups matter to very different degrees."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(GROUPS * FEATURES) // FEATURES
    scales = torch.logspace(1, -2, GROUPS, dtype=D)[torch.randperm(GROUPS, generator=generator)]
    weights = torch.randn(len(groups), generator=generator, dtype=D) * scales[groups]
    X = torch.randn(3 * ROWS, len(groups), generator=generator, dtype=D)
    probabilities = torch.sigmoid(3 * X @ weights / weights.norm())
    y = 2 * (torch.rand(3 * ROWS, generator=generator, dtype=D) < probabilities).to(D) - 1
    return X, y, groups


def search_by_gradients(X: Tensor, y: Tensor, groups: Tensor) -> dict[str, Any]:
    """Minimise the loss of the held-out rows over t, where the penalties are log(1 + exp(t))."""
    begin = time.process_time()
    last, fits = torch.zeros(X.shape[1], dtype=D), 0

    def train(w: Tensor, t: Tensor) -> Tensor:
        return (
            functional.softplus(-y[:ROWS] * (X[:ROWS] @ w)).mean() + 0.5 * (functional.softplus(t)[groups] * w**2).sum()
        )

    def held_out(t: Tensor) -> Tensor:
        nonlocal last, fits
        w = sanc.argmin(train, last, t)
        last, fits = w.detach(), fits + 1
        return functional.softplus(-y[ROWS:] * (X[ROWS:] @ w)).mean()

    start = torch.full((GROUPS,), -4.0, dtype=D)
    found = sanc.minimize(
        lambda t: held_out(t) + 1e-4 * ((t - start) ** 2).mean(), start, tol=1e-4, certify=False, max_iter=30
    )
    spent = time.process_time() - begin
    return {"loss": float(held_out(found.x)), "fits": fits, "seconds": spent, "first": float(held_out(start))}


def search_at_random(X: Tensor, y: Tensor, groups: Tensor, seconds: float, goal: float, seed: int) -> dict[str, Any]:
    """Draw penalties at random until the goal or the limit on CPU seconds is reached."""
    from sklearn.linear_model import LogisticRegression

    data, labels, places = X.numpy(), y.numpy(), groups.numpy()
    rng, best, fits, begin = np.random.default_rng(seed), math.inf, 0, time.process_time()
    while best > goal and time.process_time() - begin < seconds:
        # one penalty for scaled features is one penalty per group for the features
        scaled = data * np.exp(-rng.uniform(-12, 3, GROUPS) / 2)[places]
        model = LogisticRegression(C=1 / ROWS, fit_intercept=False, tol=1e-6, solver="newton-cholesky")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(scaled[:ROWS], labels[:ROWS])
        scores = scaled[ROWS:] @ model.coef_[0]
        best, fits = min(best, float(np.logaddexp(0, -labels[ROWS:] * scores).mean())), fits + 1
    return {"loss": best, "fits": fits, "seconds": time.process_time() - begin}


def search(seed: int, factor: float) -> dict[str, Any]:
    """Run both searches on one table."""
    X, y, groups = table_of_data(seed)
    ours = search_by_gradients(X, y, groups)
    theirs = search_at_random(X, y, groups, factor * ours["seconds"], ours["loss"] + 1e-3, seed)
    return {"seed": seed, "gradients": ours, "random": theirs}


def report(rows: Sequence[Any], without: Sequence[Any], searches: Sequence[Any]) -> str:
    """Return the three tables."""
    head = ["problem", "variables", "error", "estimate", "forward, ms", "backward / forward", "dense / backward"]
    if torchopt is not None:
        head += ["TorchOpt's error", "TorchOpt / backward"]
    cells = []
    for row in rows:
        cell = [row["problem"], row["variables"], number(row["error"], ".0e"), number(row["estimate"], ".0e")]
        cell += [
            f"{row['milliseconds']['forward']:.0f}",
            f"{row['ratio']:.2f}",
            number(row.get("dense ratio", math.nan), ".1f"),
        ]
        if torchopt is not None:
            cell += [number(row["torchopt error"], ".0e"), number(row["torchopt ratio"], ".1f")]
        cells.append(cell)
    tables = [markdown_table(head, cells)]
    peers = ["torchopt"] if torchopt is not None else []
    tables.append(
        markdown_table(
            ["function", "argmin", *(["TorchOpt"] if peers else [])],
            [[row["function"], row["argmin"], *(row[peer] for peer in peers)] for row in without],
        )
    )
    head = ["table", "equal penalties", "by gradients", "fits", "CPU s", "random search", "fits", "CPU s"]
    lines = []
    for row in searches:
        ours, theirs = row["gradients"], row["random"]
        line = [row["seed"], f"{ours['first']:.4f}", f"{ours['loss']:.4f}", ours["fits"], f"{ours['seconds']:.1f}"]
        lines.append([*line, f"{theirs['loss']:.4f}", theirs["fits"], f"{theirs['seconds']:.1f}"])
    tables.append(markdown_table(head, lines))
    return "\n\n".join(tables)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="two problems and a short search", out="implicit.json")
    parser.add_argument("--seconds", type=float, default=5.0, help="approximate time of each row")
    options = parser.parse_args(arguments)
    chosen = problems(1000) if options.quick else [*problems(), large_logistic()]
    if options.quick:
        chosen = [chosen[0], chosen[-1]]
    rows = []
    for problem in chosen:
        rows.append(measure(problem, 0.1 if options.quick else options.seconds))
        print(f"{problem.name}: done", file=sys.stderr, flush=True)
    without = [singular(name) for name in SINGULAR]
    searches = [search(seed, 0.1 if options.quick else FACTOR) for seed in range(1 if options.quick else 5)]
    print(report(rows, without, searches))
    results = {"machine": machine(), "rows": rows, "singular": without, "searches": searches}
    write_results(options.out, {"implicit.json": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
