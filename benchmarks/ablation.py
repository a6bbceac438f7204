"""Switch the ingredients of the default preset off, one at a time.

    python -m benchmarks.ablation --out ablation-output          # everything, about half an hour on one core
    python -m benchmarks.ablation --parts logistic mlp --seeds 3
    python -m benchmarks.ablation --quick                        # scikit-learn's data and a few problems, seconds

Three parts. *exact*: `sanc.minimize` with its defaults over the problems of the zoo with n ≤ 100; solved means that the
run ended at a minimum that the zoo lists. *logistic*: regression with the paper's nonconvex penalty, batches of n/20,
20 n paper_calls; the calls to f ≤ 1.001 f* in units of n, and f − f* at the end. *mlp*: the paper's MLP with batches of
128; the component evaluations to a loss, and the loss at the end.

--out gets ablation.json, table.md and ablation.png.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import sanc
from benchmarks.common import Counted, median, plain_table, zoo
from sanc.lab import models
from sanc.lab.runs import load_data

EXACT: Mapping[str, dict[str, Any]] = {
    "everything on": {},
    "a rejected step is not solved again": {"resolves": 0},
    "σ by the paper's rule": {"sigma_rule": "paper"},
    "no bound on the first step": {"first_radius": None},
    "rounding is not granted": {"rounding_guard": False},
    "Krylov space of 5, the paper's stop": {"krylov_dim": 5, "krylov_stop": "paper"},
    "no reorthogonalisation": {"reorthogonalise": False},
    "escape unchecked, constants 10, coin": {
        "escape_check": "finite",
        "estimate_constants": False,
        "sign": "random",
    },
}


SAMPLED: Mapping[str, dict[str, Any]] = {
    "everything on": {},
    "no Hessian products": {"curvature": False},
    "diagonal metric": {"metric": "diagonal"},
    "Euclid's metric": {"metric": "none"},
    "no averaging": {"averaging": 0.0},
    "equal weights in the average": {"weighting": 0.0},
    "no stretch by the distance": {"distance": 0.0},
    "the scale does not fall": {"slow_down": 0},
    "no warm-up": {"warm_up": 0},
}


def exact(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the deterministic part."""
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
    """Run the logistic regression."""
    data = "breast_cancer" if options.quick else options.logistic
    loaded = load_data(data, options.data_dir, "float64")
    problem = sanc.problems.Logistic(loaded.X, loaded.y, penalty="nonconvex", strength=1.0)
    start = np.ones(problem.dim)
    lowest = float(sanc.minimize(problem, start).fun)
    for name, settings in SAMPLED.items():
        calls, gaps, sigmas = [], [], []
        for seed in range(options.seeds):
            seen: list[tuple[float, float, float]] = []

            def see(intermediate_result: Any) -> None:
                record = intermediate_result.record
                value = problem.value(intermediate_result.x)
                seen.append((record.calls.paper_calls / problem.n, value, record.sigma))  # noqa: B023 - used at once

            result = sanc.minimize(
                problem,
                start,
                batch_size=-(-problem.n // 20),
                seed=seed,
                max_calls=(4 if options.quick else 20) * problem.n,
                max_iter=10**9,
                certify=False,
                callback=see,
                **settings,
            )
            calls.append(next((at for at, value, _ in seen if value <= 1.001 * lowest), math.inf))
            gaps.append(result.fun - lowest)
            sigmas += [sigma for _, _, sigma in seen]
        yield {"part": f"logistic, {data}", "name": name, "calls": median(calls), "gap": float(np.mean(gaps)),
               "sigma": max(sigmas)}  # fmt: skip


def mlp(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the paper's MLP."""
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


def shown(cell: Any) -> str:
    """Write a cell."""
    if isinstance(cell, str):
        return cell
    if cell == math.inf:
        return "∞"
    return f"{cell:,.0f}" if cell == int(cell) and abs(cell) < 1e7 else f"{cell:.4g}"


def report(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> str:
    """Return the tables."""
    texts = []
    for part in dict.fromkeys(row["part"] for row in rows):
        head = HEADS[part.split(",", maxsplit=1)[0]]
        mine = [row for row in rows if row["part"] == part]
        texts.append(plain_table((part, *head), [[row["name"], *(row[key] for key in head)] for row in mine], shown))
    texts.append(
        "values, products: medians, a failure counts as infinite. calls: median paper_calls to f ≤ 1.001 f*, in units "
        "of n; gap: mean f − f* at the end; sigma: the largest. evaluations: median to a loss of "
        f"{options.target:g}, seen every 10 steps; loss, worst: median and largest at the end. {options.seeds} seeds."
    )
    return "\n\n".join(texts)


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw one bar for each row: what the part is mostly about, the first row marked."""
    from matplotlib.figure import Figure

    shows = {"exact": "products", "logistic": "gap", "mlp": "evaluations"}
    parts = list(dict.fromkeys(row["part"] for row in rows))
    figure = Figure(figsize=(4.6 * len(parts), 3.6), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        key = shows[part.split(",", maxsplit=1)[0]]
        mine = [row for row in rows if row["part"] == part]
        for place, row in enumerate(mine):
            missing = not math.isfinite(row[key])
            axes.barh(place, 0.0 if missing else row[key], color="#C8401B" if place == 0 else "#8A8A86")
            if missing:
                axes.annotate("∞", (0.0, place), va="center")
        axes.set_yticks(range(len(mine)), [row["name"] for row in mine], fontsize=7)
        axes.invert_yaxis()
        axes.set_title(f"{part}: {key}", fontsize=9)
        if key == "gap" and all(row[key] > 0.0 for row in mine):
            axes.set_xscale("log")
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--logistic", default="a9a", help="data set of the logistic regression")
    parser.add_argument("--mlp", default="segment", help="data set of the MLP")
    parser.add_argument("--target", type=float, default=0.528, help="loss to which the MLP's evaluations are counted")
    parser.add_argument("--budget", type=int, default=100_000, help="component evaluations of the MLP")
    parser.add_argument("--data-dir", type=Path, help="folder of the data files; otherwise $SANC_DATA")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds = 1
    torch.set_num_threads(1)
    clock = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        for row in PARTS[part](options):
            rows.append(row)
            numbers = ", ".join(f"{k} {shown(v)}" for k, v in row.items() if k not in ("part", "name"))
            print(f"{time.perf_counter() - clock:6.0f} s  {row['part']:20s} {row['name']:40s} {numbers}", flush=True)
    text = report(rows, options)
    print(f"\n{text}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
        finite = [{k: None if v == math.inf else v for k, v in row.items()} for row in rows]
        (options.out / "ablation.json").write_text(json.dumps(finite, indent=1) + "\n", encoding="utf-8")
        picture(rows, options.out / "ablation.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
