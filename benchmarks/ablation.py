"""Switch off one component of the default preset at a time.

    python -m benchmarks.ablation --out ablation-output          # all parts, about half an hour on one core
    python -m benchmarks.ablation --parts logistic mlp --seeds 3
    python -m benchmarks.ablation --from docs/results/ablation.jsonl.xz    # tables of earlier runs
    python -m benchmarks.ablation --quick                        # data of scikit-learn and a few problems, seconds

There are three parts. *exact*: `sanc.minimize` on the problems of tests/zoo.py with n ≤ 100; a run solves a problem if
it ends at a listed minimum. *logistic*: regression with the paper's nonconvex penalty, batches of n/20 and 20 n
paper_calls; the table shows the calls to f ≤ 1.001 f* in units of n, and f − f* at the end. *mlp*: the paper's MLP with
batches of 128; the table shows the component evaluations to a target loss, and the loss at the end.

--out writes ablation.jsonl.xz with one line for each run, and table.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

import sanc
from benchmarks.common import Counted, median, zoo
from benchmarks.reporting import command, markdown_table, number, read_runs, write_results
from sanc.lab import models
from sanc.lab.runs import load_data

Run: TypeAlias = dict[str, Any]
TARGET = 0.528
"""Target loss of the MLP."""
EXACT: Mapping[str, dict[str, Any]] = {
    "default": {},
    "no second solve after a rejection": {"max_resolves": 0},
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


def exact(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of the part with exact objectives."""
    problems = [p for p in zoo.PROBLEMS if p.n <= (4 if options.quick else 100)]
    for name, settings in EXACT.items():
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
            solved = problem.reached(float(result.fun)) is not None and bool(result.success)
            yield {"part": "exact", "name": name, "problem": problem.name, "solved": solved, "values": result.nfev,
                   "products": result.nhev, "final": float(result.fun)}  # fmt: skip


def logistic(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of the logistic regression."""
    data = "breast_cancer" if options.quick else options.logistic
    loaded = load_data(data, options.data_dir, "float64")
    problem = sanc.problems.Logistic(loaded.X, loaded.y, penalty="nonconvex", strength=1.0)
    start = np.ones(problem.dim)
    lowest = float(sanc.minimize(problem, start).fun)
    for name, settings in SAMPLED.items():
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
            calls = next((at for at, value, _ in trace if value <= 1.001 * lowest), None)
            yield {"part": f"logistic, {data}", "name": name, "seed": seed, "calls": calls,
                   "gap": float(result.fun - lowest), "sigma": max(sigma for _, _, sigma in trace)}  # fmt: skip


def mlp(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of the paper's MLP."""
    data = "digits" if options.quick else options.mlp
    loaded = load_data(data, options.data_dir, "float32")
    rows = loaded.X.toarray() if hasattr(loaded.X, "toarray") else loaded.X
    x = torch.from_numpy(np.array(rows, np.float32))
    y = torch.from_numpy(np.array(loaded.y, np.int64))
    budget = 2_000 if options.quick else options.budget
    for name, settings in SAMPLED.items():
        for seed in range(options.seeds):
            model = models.mlp(x.shape[1], loaded.classes, widths=(50, 30) if options.quick else (300, 500))
            models.initialise(model, seed)

            def loss(a: torch.Tensor, b: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
                return nn.functional.cross_entropy(model(a), b)

            rng, spent, step, hit = np.random.default_rng(seed), 0, 0, None
            optimiser = sanc.SANC(models.groups(model, 0.01), seed=seed, **settings)
            while spent < budget:
                g, h = (torch.from_numpy(rng.choice(len(x), 128, replace=False)) for _ in range(2))
                optimiser.step(sanc.Batch(loss, x[g], y[g]), hessian=sanc.Batch(loss, x[h], y[h]))
                spent, step = optimiser.record.calls.total, step + 1
                if step % 10 == 0 and hit is None and models.training_loss(model, x, y, 0.01) <= options.target:
                    hit = spent
            yield {"part": f"mlp, {data}", "name": name, "seed": seed, "evaluations": hit,
                   "loss": models.training_loss(model, x, y, 0.01)}  # fmt: skip


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


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each part and component; a run that does not reach its target counts as infinite."""

    def reached(some: Sequence[Run], key: str) -> float:
        return median([math.inf if run[key] is None or not run.get("solved", True) else run[key] for run in some])

    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["part"], run["name"]), []).append(run)
    rows = []
    for (part, name), some in groups.items():
        row: dict[str, Any] = {"part": part, "name": name}
        if part == "exact":
            row |= {"solved": sum(run["solved"] for run in some), "problems": len(some)}
            row |= {key: reached(some, key) for key in ("values", "products")}
        elif part.startswith("logistic"):
            row |= {"calls": reached(some, "calls"), "gap": float(np.mean([run["gap"] for run in some]))}
            row["sigma"] = max(run["sigma"] for run in some)
        else:
            finals = [run["loss"] for run in some]
            row |= {"evaluations": reached(some, "evaluations"), "loss": median(finals), "worst": max(finals)}
        rows.append(row)
    return rows


def report(runs: Sequence[Run], target: float = TARGET) -> str:
    """Return the tables."""
    texts, rows = [], summary(runs)
    for part in dict.fromkeys(row["part"] for row in rows):
        head = HEADS[part.split(",", maxsplit=1)[0]]
        mine = [row for row in rows if row["part"] == part]
        texts.append(markdown_table((part, *head), [[row["name"], *(row[key] for key in head)] for row in mine], form))
    texts.append(
        "values, products: medians, with unsolved problems as infinite. calls: median paper_calls to f ≤ 1.001 f*, in "
        "units of n; gap: mean f − f* at the end; sigma: the largest. evaluations: median to a loss of "
        f"{target:g}, checked every 10 steps; loss, worst: median and largest at the end."
    )
    return "\n\n".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    quick = "data of scikit-learn and a few problems, seconds"
    parser = command(__doc__, quick=quick, out="ablation.jsonl.xz and table.md", data=True)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--logistic", default="a9a", help="data set of the logistic regression")
    parser.add_argument("--mlp", default="segment", help="data set of the MLP")
    parser.add_argument("--target", type=float, default=TARGET, help="target loss of the MLP")
    parser.add_argument("--budget", type=int, default=100_000, help="component evaluations of the MLP")
    parser.add_argument("--from", dest="results", type=Path, metavar="FILE", help="tables of earlier runs; no runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds = 1
    torch.set_num_threads(1)
    runs = [] if options.results is None else read_runs(options.results)
    clock = time.perf_counter()
    for part in options.parts if options.results is None else ():
        for run in PARTS[part](options):
            runs.append(run)
            if part != "exact" or len(runs) % 20 == 0:
                print(f"{time.perf_counter() - clock:6.0f} s  {' '.join(map(str, run.values()))}", flush=True)
    text = report(runs, options.target)
    print(f"\n{text}")
    write_results(options.out, {"table.md": text, "ablation.jsonl.xz": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
