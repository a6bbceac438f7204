"""Race `sanc.sklearn.LogisticRegression` against scikit-learn's own solvers, at equal optimality and in one run.

    python -m benchmarks.estimators --out docs/results     # a9a, covtype and digits, minutes
    python -m benchmarks.estimators --quick                # data that scikit-learn ships, seconds

All minimise the very same objective, the mean logistic loss plus ‖w‖²/(2 C n) with a free intercept, from zero. The
gradient of that objective at the coefficients that a fit returned is computed apart from all of them, in float64.
Equal optimality means that its largest entry is at most the goal. The rules by which estimators stop differ, so each
is given the largest of the tolerances goal × 10, 3, 1, 0.3, 0.1 … whose fit reaches the goal: nobody works longer than
the goal needs, and nobody is counted who did not reach it. The fits with those tolerances are then timed in turns;
the ratio is the median over the rounds of the time of scikit-learn's solver ÷ ours, above 1 where ours is faster.

--out gets estimators.json and estimators.md. Files are looked for where `sanc.lab` looks for them: --data-dir,
SANC_DATA or the user's cache; sets that are not there are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import sklearn
import sklearn.linear_model
from scipy.special import expit, softmax

import sanc
import sanc.sklearn
from benchmarks.common import plain_table
from benchmarks.timing import machine, ratio, turns, write_json
from sanc.lab.datasets import DataError
from sanc.lab.runs import load_data

SOLVERS = ("lbfgs", "newton-cg")
GOALS = (1e-4, 1e-6)
STRENGTHS = (1.0,)
"""The values of C: the default."""
BUNDLED = ("breast_cancer", "digits")
STEPS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)


def largest_gradient(X: Any, y: Any, fitted: Any) -> float:
    """Return the largest entry of the gradient of the objective, by a formula of its own."""
    n, W, b = len(y), fitted.coef_.astype(np.float64), fitted.intercept_
    z = np.asarray(X @ W.T) + b
    if len(W) == 1:
        r = expit(z) - (y == fitted.classes_[1])[:, None]
    else:
        r = softmax(z, axis=1) - (y[:, None] == fitted.classes_)
    g = np.asarray((X.T @ r).T) / n + W / (fitted.C * n)
    return float(max(np.abs(g).max(), np.abs(r.mean(axis=0)).max()))


def estimator(name: str, C: float, tol: float) -> Any:
    """Make an estimator with a limit on iterations that it does not reach."""
    if name == "sanc":
        return sanc.sklearn.LogisticRegression(C, tol=tol, max_iter=10_000)
    return sklearn.linear_model.LogisticRegression(C=C, solver=name, tol=tol, max_iter=100_000)


def tolerance(name: str, X: Any, y: Any, C: float, goal: float) -> tuple[float | None, float, int]:
    """Return the largest tolerance whose fit reaches the goal, what it reached, and its iterations."""
    least, rounds = np.inf, 0
    for step in STEPS:
        fitted = estimator(name, C, step * goal).fit(X, y)
        least, rounds = largest_gradient(X, y, fitted), int(np.max(fitted.n_iter_))
        if least <= goal:
            return step * goal, least, rounds
    return None, least, rounds


def race(name: str, X: Any, y: Any, goals: Sequence[float], seconds: float) -> list[dict[str, Any]]:
    """Time all estimators on one data set."""
    rows = []
    for C in STRENGTHS:
        for goal in goals:
            found = {who: tolerance(who, X, y, C, goal) for who in ("sanc", *SOLVERS)}
            calls = {
                who: partial(lambda made: made.fit(X, y), estimator(who, C, tol))
                for who, (tol, _, _) in found.items()
                if tol is not None
            }
            times = turns(calls, seconds=seconds, warm_up=0, least=3)
            for who, (tol, least, iterations) in found.items():
                row = {"set": name, "n": X.shape[0], "d": X.shape[1], "C": C, "goal": goal, "estimator": who}
                row |= {"tol": tol, "largest": least, "iterations": iterations, "rounds": len(times.get(who, ()))}
                if who in times and "sanc" in times:
                    row |= {"seconds": statistics.median(times[who]), "ratio": ratio(times[who], times["sanc"])}
                rows.append(row)
                print(row, flush=True)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay the race out."""
    head = ("set", "C", "goal", "estimator", "iterations", "seconds", "ratio to sanc", "largest entry of g")
    cells = [
        (f"{row['set']} ({row['n']:,} × {row['d']})", f"{row['C']:g}", f"{row['goal']:g}", row["estimator"],
         row["iterations"], f"{row['seconds']:.3g}" if "seconds" in row else "not reached",
         f"{row['ratio']:.2f}" if "ratio" in row else "–", f"{row['largest']:.1e}")
        for row in rows
    ]  # fmt: skip
    return plain_table(head, cells, left=1)


def page(document: Mapping[str, Any]) -> str:
    """Write the results page."""
    used = document["machine"]
    ratios = [row["ratio"] for row in document["race"] if row["estimator"] != "sanc" and "ratio" in row]
    said = f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}" if ratios else "none"
    return (
        "# Estimators\n\n"
        "`sanc.sklearn.LogisticRegression` and scikit-learn's own `lbfgs` and `newton-cg` on the same objective, with "
        "intercept, from zero to the same optimality: the largest entry of the gradient of the mean loss, computed "
        "apart from all of them, is at most the goal. The ratio is their time ÷ ours, above 1 where ours is faster: "
        f"{said}.\n\n{table(document['race'])}\n\n"
        f"{used['cores']} cores, threads: {used['threads']}; Python {used['python']}, scikit-learn "
        f"{document['scikit-learn']}, sanc {document['sanc']}. Made by `python -m benchmarks.estimators --out "
        "docs/results`, whose help says how the tolerances are chosen.\n"
    )


def show(document: Mapping[str, Any], out: Path | None) -> int:
    """Print the table, and write the page."""
    print(table(document["race"]))
    if out is not None:
        (out / "estimators.md").write_text(page(document), encoding="utf-8")
    return 0 if document["race"] else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="data that scikit-learn ships, seconds")
    parser.add_argument("--sets", nargs="+", default=("a9a", "covtype", "digits"), help="data sets")
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long the rounds of one row may take")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--from", dest="measured", type=Path, help="lay out an estimators.json again, measuring nothing"
    )
    chosen = parser.parse_args(arguments)
    if chosen.measured is not None:
        return show(json.loads(chosen.measured.read_text(encoding="utf-8")), chosen.out)
    names = BUNDLED if chosen.quick else chosen.sets
    warnings.simplefilter("ignore", FutureWarning)
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            loaded = load_data(name, chosen.data_dir)
        except DataError as problem:
            print(f"{name} is left out: {problem}", file=sys.stderr)
            continue
        X = loaded.X if scipy.sparse.issparse(loaded.X) else np.array(loaded.X)
        goals, seconds = (GOALS[:1], 0.2) if chosen.quick else (GOALS, chosen.seconds)
        rows += race(name, X, np.asarray(loaded.y), goals, seconds)
    threads = os.environ.get("OMP_NUM_THREADS")
    about = machine() | ({"threads": int(threads)} if threads else {})
    document = {"machine": about, "scikit-learn": sklearn.__version__, "sanc": sanc.__version__, "race": rows}
    if chosen.out is not None:
        write_json(chosen.out / "estimators.json", document)
    return show(document, chosen.out)


if __name__ == "__main__":
    sys.exit(main())
