"""Time an iteration of `sanc.minimize` on samples of a logistic regression beside its matrix-vector products.

    python -m benchmarks.linear --seconds 8      # w1a
    python -m benchmarks.linear --quick          # data of scikit-learn, seconds

An iteration of preset "paper" uses three samples of ⌈n/20⌉ rows and J = 5. *By hand* are its matrix-vector products in
NumPy: the rows of three samples are drawn and copied (``X[rows]``); the gradient takes 2 products, each Hessian product
2 (fewer than J of them if the Krylov space is exhausted), each value 1. By hand there is no loss, no penalty, no
Lanczos process and no step. Both are timed alternately on one thread, in processor time. The goal is a ratio of at most
3 for dense and for sparse (CSR) rows. --out writes linear.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse
from threadpoolctl import threadpool_limits

import sanc
from benchmarks.reporting import command, load_sets, machine, markdown_table, verdict, write_results
from benchmarks.timing import interleaved, median_ratio, medians
from sanc.problems import Logistic

GOAL = 3.0
"""Largest ratio of an iteration to its products by hand."""


def on_samples(problem: Logistic, iterations: int) -> Any:
    """Run iterations on three samples; Lanczos runs all five iterations unless the Krylov space is exhausted."""
    size = -(-problem.n // 20)
    options: dict[str, Any] = {"batch_size": size, "objective_batch_size": size, "epsilon_g": 1e-12, "certify": False}
    return sanc.minimize(problem, np.ones(problem.dim), preset="paper", max_iter=iterations, **options)


def by_hand(X: Any, size: int, counts: Sequence[tuple[int, int]]) -> int:
    """Compute the products of iterations with given numbers of Hessian products and values; return their count."""
    rng, w, made = np.random.default_rng(0), np.ones(X.shape[1]), 0
    for products, values in counts:
        a, b, c = (X[rng.choice(X.shape[0], size, replace=False, shuffle=False)] for _ in range(3))
        a.T @ (a @ w)
        transposed = b.T
        for _ in range(products):
            transposed @ (b @ w)
        for _ in range(values):
            c @ w
        made += 2 + 2 * products + values
    return made


def measure(X: Any, y: Any, strength: float, iterations: int, seconds: float) -> dict[str, Any]:
    """Time iterations of one problem and the same products by hand."""
    problem = Logistic(X, y, "nonconvex", strength)
    size = -(-problem.n // 20)
    counts = [(record.krylov_dim, record.trials + 1) for record in on_samples(problem, iterations).history]
    calls = {"sanc": partial(on_samples, problem, iterations), "by hand": partial(by_hand, problem.X, size, counts)}
    rounds = interleaved(calls, seconds=seconds, clock=time.process_time)
    times = {name: spent / len(counts) for name, spent in medians(rounds).items()}
    products = by_hand(problem.X, size, counts) / len(counts)
    ratio = median_ratio(rounds["sanc"], rounds["by hand"])
    return {"batch": size, "products": products, "sanc": times["sanc"], "by_hand": times["by hand"], "ratio": ratio}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of iterations."""
    head = ("set", "X", "penalty", "batch", "products", "µs, sanc", "µs, by hand", "ratio", "goal")
    cells = [
        (row["set"], row["form"], f"{row['strength']:g}", row["batch"], f"{row['products']:.1f}",
         f"{1e6 * row['sanc']:.0f}", f"{1e6 * row['by_hand']:.0f}", f"{row['ratio']:.2f}",
         verdict(row["ratio"], most=GOAL))
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells, left=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="data of scikit-learn, seconds", out="linear.json", data=True)
    parser.add_argument("--seconds", type=float, help="approximate time of each row; by default 15")
    options = parser.parse_args(arguments)
    seconds = options.seconds or (0.2 if options.quick else 15.0)
    if seconds <= 0:
        parser.error("--seconds must be positive")
    name, iterations = ("breast_cancer", 20) if options.quick else ("w1a", 300)
    rows = []
    with threadpool_limits(1):
        for _, loaded in load_sets([name], options.data_dir):
            dense = loaded.X.toarray() if scipy.sparse.issparse(loaded.X) else np.array(loaded.X)
            for strength in (1.0, 1e-3):
                for form, X in (("dense", dense), ("CSR", scipy.sparse.csr_matrix(loaded.X))):
                    about = {"set": name, "form": form, "strength": strength}
                    rows.append(about | measure(X, loaded.y, strength, iterations, seconds))
    print(table(rows))
    write_results(options.out, {"linear.json": {"sanc": sanc.__version__, "machine": machine(), "rows": rows}})
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
