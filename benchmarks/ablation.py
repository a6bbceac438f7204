"""Switch off one component of the default preset at a time.

    python -m benchmarks.ablation --out ablation-output          # all parts, about half an hour on one core
    python -m benchmarks.ablation --parts logistic mlp --seeds 3
    python -m benchmarks.ablation --quick                        # data of scikit-learn and a few problems, seconds

There are three parts. *exact*: `sanc.minimize` on the problems of tests/zoo.py with n ≤ 100; a run solves a problem if
it ends at a listed minimum. *logistic*: regression with the paper's nonconvex penalty, batches of n/20 and 20 n
paper_calls; the table shows the calls to f ≤ 1.001 f* in units of n, and f − f* at the end. *mlp*: the paper's MLP with
batches of 128; the table shows the component evaluations to a target loss, and the loss at the end.

--out writes ablation.json and table.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import sanc
from benchmarks.common import Counted, median, zoo
from benchmarks.reporting import command, markdown_table, number, write_results
from sanc.lab import models
from sanc.lab.runs import load_data

EXACT: Mapping[str, dict[str, Any]] = {
    "default": {},
    "no second solve after a rejection": {"resolves": 0},
    "σ by the paper's rule": {"sigma_rule": "paper"},
    "no bound on the first step": {"first_radius": None},
    "no allowance for roundoff": {"rounding_guard": False},
    "Krylov dimension 5, the paper's stop": {"krylov_dim": 5, "krylov_stop": "paper"},
    "the paper's escape: fixed L1 = L2 = 10, random sign, unchecked": {"escape": sanc.PaperEscape()},
}  # fmt: skip
SAMPLED: Mapping[str, dict[str, Any]] = {
    "default": {},
    "no Hessian products": {"curvature": False},
    "diagonal metric": {"metric": "diagonal"},
    "Euclidean metric": {"metric": "none"},
    "no averaging": {"averaging": 0.0},
    "equal weights in the average": {"weighting": 0.0},
    "no growth with the distance": {"distance": 0.0},
    "no decrease of the scale": {"slow_down": 0},
    "no warm-up": {"warm_up": 0},
}


def exact(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the part with exact objectives."""
    problems = [p for p in zoo.PROBLEMS if p.n <= (4 if options.quick else 100)]
    for name, settings in EXACT.items():
        solved, values, products = 0, [], []
        for problem in problems[:12] if options.quick else problems:
            counted = Counted(problem)
            result = sanc.minimize(
                counted.fun,
                problem.x0,
                jac=counted.jac,
                hessp=counted.hessp,
                tol=problem.gtol,
                max_iter=1000,
                max_time=20.0,
                **settings,
            )
            good = problem.reached(float(result.fun)) is not None and bool(result.success)
            solved += good
            values.append(result.nfev if good else math.inf)
            products.append(result.nhev if good else math.inf)
        yield {"part": "exact", "name": name, "problems": len(values), "solved": solved, "values": median(values),
               "products": median(products)}  # fmt: skip


def logistic(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the logistic regression."""
    data = "breast_cancer" if options.quick else options.logistic
    loaded = load_data(data, options.data_dir, "float64")
    problem = sanc.problems.Logistic(loaded.X, loaded.y, penalty="nonconvex", strength=1.0)
    start = np.ones(problem.dim)
    lowest = float(sanc.minimize(problem, start).fun)
    for name, settings in SAMPLED.items():
        calls, gaps, sigmas = [], [], []
        for seed in range(options.seeds):
            trace: list[tuple[float, float, float]] = []

            def store(intermediate_result: Any) -> None:
                record = intermediate_result.record
                value = problem.value(intermediate_result.x)
                trace.append((record.calls.paper_calls / problem.n, value, record.sigma))  # noqa: B023 - used within this pass

            result = sanc.minimize(
                problem,
                start,
                batch_size=-(-problem.n // 20),
                seed=seed,
                max_calls=(4 if options.quick else 20) * problem.n,
                max_iter=10**9,
                certify=False,
                callback=store,
                **settings,
            )
            calls.append(next((at for at, value, _ in trace if value <= 1.001 * lowest), math.inf))
            gaps.append(result.fun - lowest)
            sigmas += [sigma for _, _, sigma in trace]
        yield {"part": f"logistic, {data}", "name": name, "calls": median(calls), "gap": float(np.mean(gaps)),
               "sigma": max(sigmas)}  # fmt: skip


def mlp(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the paper's MLP."""
    data = "digits" if options.quick else options.mlp
    loaded = load_data(data, options.data_dir, "float32")
    rows = loaded.X.toarray() if hasattr(loaded.X, "toarray") else loaded.X
    x = torch.from_numpy(np.array(rows, np.float32))
    y = torch.from_numpy(np.array(loaded.y, np.int64))
    budget = 2_000 if options.quick else options.budget
    for name, settings in SAMPLED.items():
        hits, finals = [], []
        for seed in range(options.seeds):
            model = models.mlp(x.shape[1], loaded.classes, widths=(50, 30) if options.quick else (300, 500))
            models.initialise(model, seed)

            def loss(a: torch.Tensor, b: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
                return nn.functional.cross_entropy(model(a), b)

            rng, spent, step, hit = np.random.default_rng(seed), 0, 0, math.inf
            optimiser = sanc.SANC(models.groups(model, 0.01), seed=seed, **settings)
            while spent < budget:
                g, h = (torch.from_numpy(rng.choice(len(x), 128, replace=False)) for _ in range(2))
                optimiser.step(sanc.Batch(loss, x[g], y[g]), hessian=sanc.Batch(loss, x[h], y[h]))
                spent, step = optimiser.record.calls.total, step + 1
                if step % 10 == 0 and hit == math.inf:
                    hit = spent if models.training_loss(model, x, y, 0.01) <= options.target else math.inf
            hits.append(hit)
            finals.append(models.training_loss(model, x, y, 0.01))
        yield {"part": f"mlp, {data}", "name": name, "evaluations": median(hits), "loss": median(finals),
               "worst": max(finals)}  # fmt: skip


PARTS = {"exact": exact, "logistic": logistic, "mlp": mlp}
HEADS = {
    "exact": ("solved", "problems", "values", "products"),
    "logistic": ("calls", "gap", "sigma"),
    "mlp": ("evaluations", "loss", "worst"),
}


def form(cell: Any) -> str:
    """Format a cell."""
    if isinstance(cell, str):
        return cell
    return number(cell, ",.0f" if float(cell).is_integer() and abs(cell) < 1e7 else ".4g")


def report(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> str:
    """Return the tables."""
    texts = []
    for part in dict.fromkeys(row["part"] for row in rows):
        head = HEADS[part.split(",", maxsplit=1)[0]]
        mine = [row for row in rows if row["part"] == part]
        texts.append(markdown_table((part, *head), [[row["name"], *(row[key] for key in head)] for row in mine], form))
    texts.append(
        "values, products: medians, with unsolved problems as infinite. calls: median paper_calls to f ≤ 1.001 f*, in "
        "units of n; gap: mean f − f* at the end; sigma: the largest. evaluations: median to a loss of "
        f"{options.target:g}, checked every 10 steps; loss, worst: median and largest at the end. "
        f"{options.seeds} seeds."
    )
    return "\n\n".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    quick = "data of scikit-learn and a few problems, seconds"
    parser = command(__doc__, quick=quick, out="ablation.json and table.md", data=True)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--logistic", default="a9a", help="data set of the logistic regression")
    parser.add_argument("--mlp", default="segment", help="data set of the MLP")
    parser.add_argument("--target", type=float, default=0.528, help="target loss of the MLP")
    parser.add_argument("--budget", type=int, default=100_000, help="component evaluations of the MLP")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds = 1
    torch.set_num_threads(1)
    clock = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        for row in PARTS[part](options):
            rows.append(row)
            numbers = ", ".join(f"{k} {form(v)}" for k, v in row.items() if k not in ("part", "name"))
            print(f"{time.perf_counter() - clock:6.0f} s  {row['part']:20s} {row['name']:40s} {numbers}", flush=True)
    text = report(rows, options)
    print(f"\n{text}")
    write_results(options.out, {"table.md": text, "ablation.json": {"rows": rows}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
