"""Compare `sanc.sklearn.LogisticRegression` with scikit-learn's solvers at equal optimality.

    python -m benchmarks.estimators --out docs/results     # all sets and tables, an hour on a shared core
    python -m benchmarks.estimators --quick                # data of scikit-learn, seconds

All estimators minimise the same objective, the mean logistic loss plus ‖w‖²/(2 C n) with a free intercept, from zero.
An independent formula computes the gradient of that objective at the fitted coefficients in float64. A fit reaches the
goal if the largest entry of this gradient is at most the goal. The stopping rules of the estimators differ. Each one
therefore gets the largest of the tolerances goal × 10, 3, 1, 0.3, 0.1, … whose fit reaches the goal. The fits with
these tolerances are timed alternately. The ratio is the time of scikit-learn's solver over ours, the median over the
rounds; it exceeds 1 if ours is faster. Ratios of wall-clock and of processor time are reported: other work on the
machine disturbs the latter less. Another table has fits with the defaults of all estimators, with a limit of 100
iterations in scikit-learn.

The last table compares the two searches of `sanc.sklearn.LogisticRegressionCV` for C, both by the log loss of five
folds: the grid of ten values, and gradients. A made set has twelve groups of features that matter to different degrees;
there gradients also choose one C for each group.

--out writes estimators.json and estimators.md. A data set without files is reported and left out.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import sklearn
import sklearn.exceptions
import sklearn.linear_model
from scipy.special import expit, softmax
from sklearn.datasets import load_wine, make_classification
from sklearn.preprocessing import scale

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
SMALL = ("wine", "made, 2 classes", "made, 5 classes")
"""Sets of scikit-learn where a fit takes milliseconds; they are in the table of defaults."""
SEARCHED = ("breast_cancer", "digits", "wine", "made, 12 groups")
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


def sets(chosen: Sequence[str], data_dir: Path | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, features and labels of each set."""
    for name in chosen:
        if name == "wine":
            X, y = load_wine(return_X_y=True)
            yield name, scale(X), y
        elif name == "made, 2 classes":
            yield name, *make_classification(2000, 20, random_state=0)
        elif name == "made, 5 classes":
            yield name, *make_classification(5000, 40, n_informative=10, n_classes=5, random_state=0)
        elif name == "made, 12 groups":
            rng = np.random.default_rng(0)
            X = rng.standard_normal((1200, 60))
            w = rng.standard_normal(60) * rng.permutation(np.logspace(1, -2, 12))[np.arange(60) // 5]
            yield name, X, (rng.random(1200) < expit(3 * X @ w / np.linalg.norm(w))).astype(int)
        else:
            for _, loaded in load_sets([name], data_dir):
                yield name, loaded.X if scipy.sparse.issparse(loaded.X) else np.array(loaded.X), np.asarray(loaded.y)


Times = dict[str, list[float]]


def clocks(calls: Mapping[str, Callable[[], Any]], seconds: float, warm_up: int) -> tuple[Times, Times]:
    """Time functions alternately; return wall-clock and processor seconds of every round."""
    spent: Times = {name: [] for name in calls}

    def timed(name: str) -> None:
        begin = time.process_time()
        calls[name]()
        spent[name].append(time.process_time() - begin)

    wall = interleaved({name: partial(timed, name) for name in calls}, seconds=seconds, warm_up=warm_up, least=3)
    return wall, {name: taken[warm_up:] for name, taken in spent.items()}


def summary(name: str, times: tuple[Times, Times], base: str = "sanc") -> dict[str, Any]:
    """Return median seconds and ratios to `base` on both clocks."""
    wall, cpu = times
    row: dict[str, Any] = {"rounds": len(wall[name]), "seconds": statistics.median(wall[name])}
    row |= {"ratio": median_ratio(wall[name], wall[base]), "cpu seconds": statistics.median(cpu[name])}
    return row | {"cpu ratio": median_ratio(cpu[name], cpu[base])}


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
    times, rows = clocks(calls, seconds, 1), []
    for solver, fitted in made.items():
        row = {"set": name, "n": X.shape[0], "d": X.shape[1], "estimator": solver}
        row |= {"largest": largest_gradient(X, y, fitted), "iterations": int(np.max(fitted.n_iter_))}
        row |= summary(solver, times)
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
        times = clocks(calls, seconds, 0)
        for solver, (tol, largest, iterations) in found.items():
            row = {"set": name, "n": X.shape[0], "d": X.shape[1], "C": C, "goal": goal, "estimator": solver}
            row |= {"tol": tol, "largest": largest, "iterations": iterations, "rounds": 0}
            if solver in calls and "sanc" in calls:
                row |= summary(solver, times)
            rows.append(row)
            print(row, flush=True)
    return rows


def compare_searches(name: str, X: Any, y: Any, seconds: float) -> list[dict[str, Any]]:
    """Compare the searches for C on one data set."""
    made = {
        "grid": sanc.sklearn.LogisticRegressionCV(scoring="neg_log_loss"),
        "gradient": sanc.sklearn.LogisticRegressionCV(search="gradient"),
    }
    if name.endswith("groups"):
        made["gradient, groups"] = sanc.sklearn.LogisticRegressionCV(search="gradient", groups=np.arange(60) // 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)  # groups of noise reach the limit
        times, rows = clocks({kind: partial(fit.fit, X, y) for kind, fit in made.items()}, seconds, 1), []
    for kind, fitted in made.items():
        row = {"set": name, "n": X.shape[0], "d": X.shape[1], "search": kind, "values": fitted.scores_.shape[1]}
        row |= {"loss": float(-fitted.scores_.mean(axis=0).max()), "C": np.atleast_1d(fitted.C_).tolist()}
        rows.append(row | summary(kind, times, "grid"))
        print(rows[-1], flush=True)
    return rows


def search_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of searches for C."""
    head = ("set", "search", "values of C", "held-out loss", "C", "seconds", "ratio to grid", "CPU ratio")
    cells = [
        (f"{row['set']} ({row['n']:,} × {row['d']})", row["search"], row["values"], f"{row['loss']:.5f}",
         f"{row['C'][0]:.3g}" if len(row["C"]) == 1 else f"{len(row['C'])} values", f"{row['seconds']:.3g}",
         f"{row['ratio']:.2f}", f"{row['cpu ratio']:.2f}")
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of fits."""
    head = (
        "set",
        "C",
        "goal",
        "estimator",
        "iterations",
        "seconds",
        "ratio to sanc",
        "CPU ratio",
        "largest entry of g",
    )
    cells = [
        (f"{row['set']} ({row['n']:,} × {row['d']})", f"{row['C']:g}", f"{row['goal']:g}", row["estimator"],
         row["iterations"], f"{row['seconds']:.3g}" if "seconds" in row else "not reached",
         f"{row['ratio']:.2f}" if "ratio" in row else "–", f"{row['cpu ratio']:.2f}" if "ratio" in row else "–",
         f"{row['largest']:.1e}")
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells)


def default_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of fits with defaults."""
    head = ("set", "estimator", "iterations", "seconds", "ratio to sanc", "CPU ratio", "largest entry of g")
    cells = [
        (f"{row['set']} ({row['n']:,} × {row['d']})", row["estimator"], row["iterations"], f"{row['seconds']:.3g}",
         f"{row['ratio']:.2f}", f"{row['cpu ratio']:.2f}", f"{row['largest']:.1e}")
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells)


def span(rows: Sequence[Mapping[str, Any]], solver: str) -> str:
    """Return the smallest and the largest ratio of a solver, in processor time."""
    ratios = [row["cpu ratio"] for row in rows if row["estimator"] == solver and "ratio" in row]
    return f"{min(ratios, default=math.nan):.2f} to {max(ratios, default=math.nan):.2f}"


def searches_in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how the searches by gradients for one C compare with the grids."""
    grids = {row["set"]: row for row in rows if row["search"] == "grid"}
    ours = [row for row in rows if row["search"] == "gradient"]
    lower = sum(row["loss"] <= grids[row["set"]]["loss"] for row in ours)
    ratios = [row["cpu ratio"] for row in ours]
    return (
        f"The search by gradients ends with a held-out loss that is not above the best of the grid on {lower} of "
        f"{len(ours)} sets, in {min(ratios, default=math.nan):.2f} to {max(ratios, default=math.nan):.2f} of its time."
    )


def page(document: Mapping[str, Any]) -> str:
    """Return the results page."""
    used, defaults, race = document["machine"], document["defaults"], document["race"]
    ratios = [row["cpu ratio"] for row in race if row["estimator"] != "sanc" and "ratio" in row]
    peers = [solver for solver in (*SOLVERS, "glum") if any(row["estimator"] == solver for row in race)]
    spans = ", ".join(f"{span(race, solver)} times that of `{solver}`" for solver in peers)
    raced = {row["set"] for row in race}
    missing = [name for name in dict.fromkeys(row["set"] for row in defaults) if name not in raced]
    small = [row for row in defaults if row["set"] in SMALL]
    large = [row for row in defaults if row["set"] not in SMALL]
    parts = [
        "# Estimators",
        f"With defaults, `sanc.sklearn.LogisticRegression` has {span(large, 'lbfgs')} times the speed of "
        f"scikit-learn's default `lbfgs` on {', '.join(dict.fromkeys(row['set'] for row in large))}, and "
        f"{span(small, 'lbfgs')} times on three small sets. At equal optimality its speed is "
        f"{spans}; the median of all ratios is {statistics.median(ratios or [math.nan]):.2f}. "
        f"{searches_in_words(document['searches'])}",
        "## With defaults",
        default_table(defaults),
        "## At equal optimality",
        table(race),
        "*ratio to sanc*: the solver's time over that of sanc; above 1 if sanc is faster. *CPU ratio*: the same of "
        "processor time, which other work on the machine disturbs less; the sentences above use it.",
        "## Choosing C",
        search_table(document["searches"]),
        "*values of C*: how many were tried in each of the five folds. *held-out loss*: the mean log loss of the rows "
        "that a fold leaves out, for the best of them. *ratio to grid*: the time of the search over that of the grid; "
        "below 1 if the search is faster.",
        "## How it was measured",
        "All solvers minimise the same objective, with intercept, from zero to the same optimality: the largest entry "
        "of the gradient of the mean loss, computed separately, is at most the goal. All fits of a table's set are "
        "timed alternately in one process; times and ratios are medians of at least three rounds. "
        f"{used['cores']} cores, threads: {used['threads']}; Python {used['python']}, scikit-learn "
        f"{document['scikit-learn']}, glum {document['glum'] or 'not installed'}, sanc {document['sanc']}. "
        "`python -m benchmarks.estimators --out docs/results` "
        "writes this page, and the runs name the options that were used; its help describes how the tolerances are "
        f"chosen. {COMMIT_NOTE}",
        "## Caveats",
        "The features of breast_cancer and wine are standardised, and those of digits are scaled to [0, 1]. With "
        "defaults, scikit-learn's solvers stop after 100 iterations, whatever the gradient. glum is compared for two "
        "classes. Its tolerance is on the largest entry of the gradient, with weights that add up to 1. Other work ran "
        "on the machine, so that seconds are upper bounds. Where a fit takes milliseconds, most of our time is the "
        "fixed cost of about a millisecond per iteration. "
        + (f"Only with defaults: {'; '.join(missing)}." if missing else ""),
    ]
    return "\n\n".join(parts)


def report(document: Mapping[str, Any], out: Path | None) -> int:
    """Print the tables, and write the page."""
    searches = search_table(document["searches"])
    print(default_table(document["defaults"]), table(document["race"]), searches, sep="\n\n")
    write_results(out, {"estimators.md": page(document)})
    return int(not document["race"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="data of scikit-learn, seconds", out="estimators.json and estimators.md", data=True)
    parser.add_argument("--sets", nargs="+", default=(*BUNDLED, "a9a", "covtype"), help="data sets")
    parser.add_argument("--race", nargs="*", help="those of them that are compared at equal optimality; by default all")
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
    chosen = BUNDLED if options.quick else options.sets
    for name, X, y in sets(chosen, options.data_dir):
        defaults += compare_defaults(name, X, y, seconds)
        if options.race is None or name in options.race:
            rows += compare(name, X, y, goals, seconds)
    searches: list[dict[str, Any]] = []
    if rows:
        for name, X, y in sets(SMALL[:1] if options.quick else SMALL, options.data_dir):
            defaults += compare_defaults(name, X, y, seconds)
        for name, X, y in sets(SEARCHED[:1] if options.quick else SEARCHED, options.data_dir):
            searches += compare_searches(name, X, y, seconds)
    threads = os.environ.get("OMP_NUM_THREADS")
    about = machine() | ({"threads": int(threads)} if threads else {})
    document = {"machine": about, "scikit-learn": sklearn.__version__, "sanc": sanc.__version__}
    document |= {"glum": None if glum is None else glum.__version__, "defaults": defaults, "race": rows}
    document |= {"searches": searches}
    write_results(options.out, {"estimators.json": document})
    return report(document, options.out)


if __name__ == "__main__":
    sys.exit(main())
