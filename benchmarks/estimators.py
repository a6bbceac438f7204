"""Compare `sanc.sklearn.LogisticRegression` with scikit-learn's solvers at equal optimality.

    python -m benchmarks.estimators --out docs/results     # breast_cancer, digits, a9a and covtype, minutes
    python -m benchmarks.estimators --quick                # data of scikit-learn, seconds

All estimators minimise the same objective, the mean logistic loss plus ‖w‖²/(2 C n) with a free intercept, from zero.
An independent formula computes the gradient of that objective at the fitted coefficients in float64. A fit reaches the
goal if the largest entry of this gradient is at most the goal. The stopping rules of the estimators differ. Each one
therefore gets the largest of the tolerances goal × 10, 3, 1, 0.3, 0.1, … whose fit reaches the goal. The fits with
these tolerances are timed alternately. The ratio is the time of scikit-learn's solver over ours, the median over the
rounds; it exceeds 1 if ours is faster. A second table has fits with the defaults of all estimators, with a limit of 100
iterations in scikit-learn.

--out writes estimators.json and estimators.md. A data set without files is reported and left out.
"""

from __future__ import annotations

import json
import math
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
from benchmarks.reporting import COMMIT_NOTE, command, load_sets, machine, markdown_table, write_results
from benchmarks.timing import interleaved, median_ratio

try:
    import glum
except ImportError:
    glum = None

SOLVERS = ("lbfgs", "newton-cg", "newton-cholesky")
GOALS = (1e-4, 1e-6)
C = 1.0
"""Inverse strength of the penalty: the default of scikit-learn."""
BUNDLED = ("breast_cancer", "digits")
FACTORS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)


def largest_gradient(X: Any, y: Any, fitted: Any) -> float:
    """Return the largest entry of the gradient of the objective at the fitted coefficients."""
    n, W, b = len(y), fitted.coef_.astype(np.float64), fitted.intercept_
    z = np.asarray(X @ W.T) + b
    if len(W) == 1:
        r = expit(z) - (y == fitted.classes_[1])[:, None]
    else:
        r = softmax(z, axis=1) - (y[:, None] == fitted.classes_)
    g = np.asarray((X.T @ r).T) / n + W / (fitted.C * n)
    return float(max(np.abs(g).max(), np.abs(r.mean(axis=0)).max()))


class Glum:
    """The estimator of glum with the interface of scikit-learn, for two classes. Its alpha is 1/(C n)."""

    C = C

    def __init__(self, tol: float | None = None) -> None:
        self.options = {} if tol is None else {"gradient_tol": tol, "max_iter": 10_000}

    def fit(self, X: Any, y: Any) -> Glum:
        """Fit the coefficients to labels 0 and 1."""
        fitted = glum.GeneralizedLinearRegressor(
            family="binomial", l1_ratio=0, alpha=1.0 / (C * len(y)), **self.options
        ).fit(X, y)
        self.classes_, self.n_iter_ = np.unique(y), [fitted.n_iter_]
        self.coef_, self.intercept_ = fitted.coef_[None, :], np.array([fitted.intercept_])
        return self


def names(classes: int) -> tuple[str, ...]:
    """Return the names of the estimators for this number of classes; glum has two, and may not be installed."""
    return ("sanc", *SOLVERS, *(("glum",) if glum is not None and classes == 2 else ()))


def estimator(name: str, tol: float) -> Any:
    """Return an estimator with an iteration limit that it does not reach."""
    if name == "sanc":
        return sanc.sklearn.LogisticRegression(C, tol=tol, max_iter=10_000)
    if name == "glum":
        return Glum(tol)
    return sklearn.linear_model.LogisticRegression(C=C, solver=name, tol=tol, max_iter=100_000)


def default_estimator(name: str) -> Any:
    """Return an estimator with its default settings."""
    if name == "glum":
        return Glum()
    return sanc.sklearn.LogisticRegression() if name == "sanc" else sklearn.linear_model.LogisticRegression(solver=name)


def compare_defaults(name: str, X: Any, y: Any, seconds: float) -> list[dict[str, Any]]:
    """Time all estimators with their defaults on one data set."""
    made = {solver: default_estimator(solver) for solver in names(len(np.unique(y)))}
    calls = {solver: partial(lambda fit: fit.fit(X, y), fit) for solver, fit in made.items()}
    times, rows = interleaved(calls, seconds=seconds, warm_up=1, least=3), []
    for solver, fitted in made.items():
        row = {"set": name, "n": X.shape[0], "d": X.shape[1], "estimator": solver, "rounds": len(times[solver])}
        row |= {"largest": largest_gradient(X, y, fitted), "iterations": int(np.max(fitted.n_iter_))}
        row |= {"seconds": statistics.median(times[solver]), "ratio": median_ratio(times[solver], times["sanc"])}
        rows.append(row)
        print(row, flush=True)
    return rows


def tolerance(name: str, X: Any, y: Any, goal: float) -> tuple[float | None, float, int]:
    """Return the largest tolerance whose fit reaches the goal, its largest gradient entry, and its iterations."""
    largest, iterations = np.inf, 0
    for factor in FACTORS:
        fitted = estimator(name, factor * goal).fit(X, y)
        largest, iterations = largest_gradient(X, y, fitted), int(np.max(fitted.n_iter_))
        if largest <= goal:
            return factor * goal, largest, iterations
    return None, largest, iterations


def compare(name: str, X: Any, y: Any, goals: Sequence[float], seconds: float) -> list[dict[str, Any]]:
    """Time all estimators on one data set."""
    rows = []
    for goal in goals:
        found = {solver: tolerance(solver, X, y, goal) for solver in names(len(np.unique(y)))}
        calls = {
            solver: partial(lambda fit: fit.fit(X, y), estimator(solver, tol))
            for solver, (tol, _, _) in found.items()
            if tol is not None
        }
        times = interleaved(calls, seconds=seconds, warm_up=0, least=3)
        for solver, (tol, largest, iterations) in found.items():
            row = {"set": name, "n": X.shape[0], "d": X.shape[1], "C": C, "goal": goal, "estimator": solver}
            row |= {"tol": tol, "largest": largest, "iterations": iterations, "rounds": len(times.get(solver, ()))}
            if solver in times and "sanc" in times:
                seconds_to_goal = statistics.median(times[solver])
                row |= {"seconds": seconds_to_goal, "ratio": median_ratio(times[solver], times["sanc"])}
            rows.append(row)
            print(row, flush=True)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of fits."""
    head = ("set", "C", "goal", "estimator", "iterations", "seconds", "ratio to sanc", "largest entry of g")
    cells = [
        (f"{row['set']} ({row['n']:,} × {row['d']})", f"{row['C']:g}", f"{row['goal']:g}", row["estimator"],
         row["iterations"], f"{row['seconds']:.3g}" if "seconds" in row else "not reached",
         f"{row['ratio']:.2f}" if "ratio" in row else "–", f"{row['largest']:.1e}")
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells)


def default_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of fits with defaults."""
    head = ("set", "estimator", "iterations", "seconds", "ratio to sanc", "largest entry of g")
    cells = [
        (f"{row['set']} ({row['n']:,} × {row['d']})", row["estimator"], row["iterations"], f"{row['seconds']:.3g}",
         f"{row['ratio']:.2f}", f"{row['largest']:.1e}")
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells)


def span(rows: Sequence[Mapping[str, Any]], solver: str) -> str:
    """Return the smallest and the largest ratio of a solver."""
    ratios = [row["ratio"] for row in rows if row["estimator"] == solver and "ratio" in row]
    return f"{min(ratios, default=math.nan):.2f} to {max(ratios, default=math.nan):.2f}"


def page(document: Mapping[str, Any]) -> str:
    """Return the results page."""
    used, defaults, race = document["machine"], document["defaults"], document["race"]
    ratios = [row["ratio"] for row in race if row["estimator"] != "sanc" and "ratio" in row]
    peers = [solver for solver in (*SOLVERS, "glum") if any(row["estimator"] == solver for row in race)]
    spans = ", ".join(f"{span(race, solver)} times that of `{solver}`" for solver in peers)
    parts = [
        "# Estimators",
        f"With defaults, `sanc.sklearn.LogisticRegression` has {span(defaults, 'lbfgs')} times the speed of "
        f"scikit-learn's default `lbfgs`. At equal optimality its speed is {spans}; the median of all ratios is "
        f"{statistics.median(ratios or [math.nan]):.2f}.",
        "## With defaults",
        default_table(defaults),
        "## At equal optimality",
        table(race),
        "*ratio to sanc*: the solver's time over that of sanc; above 1 if sanc is faster.",
        "## How it was measured",
        "All solvers minimise the same objective, with intercept, from zero to the same optimality: the largest entry "
        "of the gradient of the mean loss, computed separately, is at most the goal. "
        f"{used['cores']} cores, threads: {used['threads']}; Python {used['python']}, scikit-learn "
        f"{document['scikit-learn']}, glum {document['glum'] or 'not installed'}, sanc {document['sanc']}. "
        "`python -m benchmarks.estimators --out docs/results` "
        f"writes this page; its help describes how the tolerances are chosen. {COMMIT_NOTE}",
        "## Caveats",
        "The features of breast_cancer are standardised, and those of digits are scaled to [0, 1]. With defaults, "
        "scikit-learn's solvers stop after 100 iterations, whatever the gradient. glum is compared for two classes. "
        "Its tolerance is on the largest entry of the gradient, with weights that add up to 1.",
    ]
    return "\n\n".join(parts)


def report(document: Mapping[str, Any], out: Path | None) -> int:
    """Print the tables, and write the page."""
    print(default_table(document["defaults"]), table(document["race"]), sep="\n\n")
    write_results(out, {"estimators.md": page(document)})
    return int(not document["race"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="data of scikit-learn, seconds", out="estimators.json and estimators.md", data=True)
    parser.add_argument("--sets", nargs="+", default=(*BUNDLED, "a9a", "covtype"), help="data sets")
    parser.add_argument("--goals", nargs="+", type=float, default=GOALS, help="largest entries of the gradient")
    parser.add_argument("--seconds", type=float, default=20.0, help="approximate time for each goal on each data set")
    parser.add_argument("--from", dest="results", type=Path, metavar="JSON", help="page of results; no measurement")
    options = parser.parse_args(arguments)
    if options.results is not None:
        return report(json.loads(options.results.read_text(encoding="utf-8")), options.out)
    warnings.simplefilter("ignore", FutureWarning)
    goals, seconds = (GOALS[:1], 0.2) if options.quick else (options.goals, options.seconds)
    rows: list[dict[str, Any]] = []
    defaults: list[dict[str, Any]] = []
    for name, loaded in load_sets(BUNDLED if options.quick else options.sets, options.data_dir):
        X = loaded.X if scipy.sparse.issparse(loaded.X) else np.array(loaded.X)
        defaults += compare_defaults(name, X, np.asarray(loaded.y), seconds)
        rows += compare(name, X, np.asarray(loaded.y), goals, seconds)
    threads = os.environ.get("OMP_NUM_THREADS")
    about = machine() | ({"threads": int(threads)} if threads else {})
    document = {"machine": about, "scikit-learn": sklearn.__version__, "sanc": sanc.__version__}
    document |= {"glum": None if glum is None else glum.__version__, "defaults": defaults, "race": rows}
    write_results(options.out, {"estimators.json": document})
    return report(document, options.out)


if __name__ == "__main__":
    sys.exit(main())
