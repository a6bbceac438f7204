"""Compare `sanc.minimize` with SciPy's minimisers on 90 problems with bounds, of 2 to 1,000 variables.

    python -m benchmarks.bounded --out bounded-output                 # all problems, tens of minutes
    python -m benchmarks.bounded --half development                   # those with which rules were chosen
    python -m benchmarks.bounded --problems HS1 TORSION-14-10
    python -m benchmarks.bounded --methods sanc L-BFGS-B
    python -m benchmarks.bounded --quick                              # ten small problems, seconds

All methods get the same start, projected on the bounds, and the same counted f, gradient and Hessian products. They end
at ‖P(x − ∇f) − x‖₂ ≤ gtol, where P projects on the bounds. SciPy's methods are stopped as soon as they evaluate such a
gradient, so their stopping rules cost nothing. `sanc` has its default options.

A run *solves* a problem if an independent check of its end point holds: x is within the bounds, ‖P(x − ∇f) − x‖₂ is at
most 100 gtol, and the dense Hessian of the variables between their bounds has λ_min ≥ −1e-4. A variable within
1e-6 of a bound, relatively, is at that bound. *Saddle* counts end points with a small projected gradient that fail the
last test, *wrong* the runs that report success at a point that is not a solution, and *outside* the runs that evaluated
f outside the bounds. Work is f + 2g + 4Hv. The products of `sanc` include its certificate, which the
others lack.

--out writes bounded.json, bounded.csv, table.md and the performance profiles bounded.png.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import torch

import sanc
from benchmarks.bounded_problems import BoundedProblem, problems
from benchmarks.common import Counted, Floats, StopRun, draw_profile, geometric_mean, median, zoo
from benchmarks.reporting import command, table_of_failures, table_of_methods, write_results

METHODS = ("sanc", "L-BFGS-B", "TNC", "trust-constr", "SLSQP")
FIRST_ORDER = ("L-BFGS-B", "SLSQP")
"""Peers that use gradients alone; TNC differences them for its products."""
QUICK = ("HS1", "HS2", "HS4", "HS5", "HS45", "HS110", "HATFLDB", "SADDLE-FACE", "TORSION-10-5", "SPAR-20")
STRICT = 1e-4
"""A stationary point whose free variables have λ_min < −STRICT is a saddle."""
AT_BOUND = 1e-6
"""Distance from a bound, relative to max(1, |bound|), at which a variable is at that bound."""
LOOSE = 100.0
"""Projected gradient, in units of gtol, up to which an end point counts: some methods end by their own rules."""
SUMS = {
    "fg": {"nfev": 1, "njev": 1},
    "products": {"products": 1, "certificate": 1},
    "work": {"nfev": 1, "njev": 2, "products": 4, "certificate": 4},
}
"""Weights of counts in the evaluations of f and gradients, in the products and in the work of a run."""


@dataclass
class CountedInBox(Counted):
    """Counted evaluations that stop at a small projected gradient, and that note points outside the bounds."""

    outside: int = 0

    def fun(self, x: Floats) -> float:
        """f(x)."""
        self.outside += not is_feasible(self.problem, x)
        return super().fun(x)

    def jac(self, x: Floats) -> Floats:
        """∇f(x); ends the run at a small projected gradient."""
        self._check()
        self.njev += 1
        self.outside += not is_feasible(self.problem, x)
        g = self._jac(x)
        if projected_gradient(self.problem, x, g) <= self.stop_at:
            self.end = np.array(x)
            raise StopRun
        return g


# ---------------------------------------------------------------------- the check of an end point


def is_feasible(problem: BoundedProblem, x: Floats) -> bool:
    """Whether x is within the bounds."""
    return bool(np.all((x >= problem.lower) & (x <= problem.upper)))


def projected_gradient(problem: BoundedProblem, x: Floats, g: Floats) -> float:
    """Return ‖P(x − g) − x‖₂."""
    return float(np.linalg.norm(np.clip(x - g, problem.lower, problem.upper) - x))


def free_variables(problem: BoundedProblem, x: Floats) -> Any:
    """Return the mask of the variables between their bounds."""

    def distance(bound: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            return np.where(np.isinf(bound), math.inf, np.abs(x - bound) / np.maximum(1.0, np.abs(bound)))

    return (distance(problem.lower) > AT_BOUND) & (distance(problem.upper) > AT_BOUND)


def lambda_min(problem: BoundedProblem, x: Floats) -> float:
    """Return the smallest eigenvalue of the dense Hessian of the free variables; infinite if there are none."""
    free = free_variables(problem, x)
    if not free.any():
        return math.inf
    return float(np.linalg.eigvalsh(zoo.hessian_of(problem.fun, x)[np.ix_(free, free)])[0])


# ---------------------------------------------------------------------- runs


def run_sanc(counted: CountedInBox, iterations: int) -> tuple[Floats, dict[str, Any]]:
    """Run `sanc.minimize` with its defaults."""
    problem, (limit, counted.seconds) = counted.problem, (counted.seconds, math.inf)
    result = sanc.minimize(
        counted.fun,
        problem.start,
        jac=counted.jac,
        hessp=counted.hessp,
        bounds=problem.bounds,
        tol=problem.gtol,
        max_iter=iterations,
        max_time=limit,
    )
    extra = {"certificate": counted.nhev - result.nhev, "iterations": result.nit, "ended": result.status.name.lower()}
    counted.nfev, counted.njev, counted.nhev = result.nfev, result.njev, result.nhev
    return np.asarray(result.x), extra | {"success": bool(result.success)}


def run_scipy(method: str, counted: CountedInBox, iterations: int) -> tuple[Floats, dict[str, Any]]:
    """Run a method of SciPy; `CountedInBox` ends the run at a small projected gradient."""
    problem = counted.problem
    # With keep_feasible trust-constr rejects starts at a bound.
    bounds = scipy.optimize.Bounds(problem.lower, problem.upper, keep_feasible=method != "trust-constr")
    derivatives: dict[str, Any] = {"jac": counted.jac}
    options: dict[str, Any] = {"maxiter": iterations}
    if method == "L-BFGS-B":
        options |= {"ftol": 0.0, "gtol": 0.0, "maxfun": 10**9}
    elif method == "TNC":
        options = {"ftol": 0.0, "gtol": 0.0, "xtol": 0.0, "maxfun": 10**6}
    elif method == "trust-constr":
        derivatives["hessp"] = counted.hessp
        options |= {"gtol": 1e-10, "xtol": 1e-12, "barrier_tol": 1e-10}
    else:
        options |= {"ftol": 1e-16}
    counted.stop_at = problem.gtol
    try:
        found = scipy.optimize.minimize(
            counted.fun, problem.start, method=method, bounds=bounds, options=options, **derivatives
        )
    except StopRun:
        success = counted.end is not None
        return counted.end if counted.end is not None else problem.start, {"ended": "gradient", "success": success}
    return np.clip(found.x, problem.lower, problem.upper), {"ended": str(found.message), "success": bool(found.success)}


def run_one(method: str, problem: BoundedProblem, iterations: int, seconds: float) -> dict[str, Any]:
    """Run a method on a problem, and return its counts and the checks of its end point."""
    counted, clock = CountedInBox(problem, seconds=seconds), time.perf_counter()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            if method == "sanc":
                x, extra = run_sanc(counted, iterations)
            else:
                x, extra = run_scipy(method, counted, iterations)
    except (StopRun, ArithmeticError, ValueError, np.linalg.LinAlgError) as error:
        x, extra = problem.start, {"ended": f"{type(error).__name__}: {error}"[:100], "success": False}
    spent = time.perf_counter() - clock
    value, g = zoo.value_and_gradient(problem.fun, x)
    norm = projected_gradient(problem, x, g)
    stationary = is_feasible(problem, x) and norm <= LOOSE * problem.gtol
    curvature = lambda_min(problem, x) if stationary else math.nan
    solved = stationary and curvature >= -STRICT
    counts = {"nfev": counted.nfev, "njev": counted.njev, "products": counted.products}
    return {
        "problem": problem.name,
        "n": problem.n,
        "half": "unseen" if problem.unseen else "development",
        "method": method,
        "solved": solved,
        "saddle": stationary and not solved,
        "wrong": extra["success"] and not solved,
        "outside": counted.outside,
        "value": value,
        "projected_gradient": norm,
        "lambda_min": curvature,
        **counts,
        "certificate": 0,
        "seconds": round(spent, 3),
        **extra,
    }


# ---------------------------------------------------------------------- summary


def costs(runs: Sequence[dict[str, Any]], method: str, kind: str) -> Floats:
    """Return the costs of a method, infinite for unsolved problems; `SUMS` has the kinds that are sums of counts."""
    weights = SUMS.get(kind, {kind: 1})
    found = [run for run in runs if run["method"] == method]
    spent = [
        sum(weight * run[name] for name, weight in weights.items()) if run["solved"] else math.inf for run in found
    ]
    return np.array(spent, np.float64)


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each method."""
    methods = list(dict.fromkeys(run["method"] for run in runs))
    rows = []
    for method in methods:
        mine = [run for run in runs if run["method"] == method]
        row: dict[str, Any] = {"method": method} | {
            name: sum(bool(run[name]) for run in mine) for name in ("solved", "saddle", "wrong", "outside")
        }
        for kind in ("nfev", "njev", "products", "work"):
            row[kind] = math.nan if kind == "products" and method in FIRST_ORDER else median(costs(runs, method, kind))
        if "sanc" in methods:
            for kind in ("fg", "work"):
                theirs, ours = costs(runs, method, kind), costs(runs, "sanc", kind)
                both = np.isfinite(theirs) & np.isfinite(ours)
                row[f"{kind}_ratio"] = geometric_mean(np.maximum(theirs[both], 1.0) / np.maximum(ours[both], 1.0))
                row[f"{kind}_median_ratio"] = median(np.maximum(ours[both], 1.0) / np.maximum(theirs[both], 1.0))
        row["seconds"] = float(np.round(sum(run.get("seconds", math.nan) for run in mine)))
        rows.append(row)
    return rows


HEAD = {
    "method": "method",
    "solved": "solved",
    "saddle": "saddle",
    "wrong": "wrong",
    "outside": "outside",
    "nfev": "f",
    "njev": "g",
    "products": "Hv",
    "work": "work",
    "fg_ratio": "f + g ratio",
    "fg_median_ratio": "median of ours/theirs",
    "work_ratio": "work ratio",
    "seconds": "seconds",
}


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of methods."""
    return table_of_methods(HEAD, rows)


COLUMNS = (
    "problem", "n", "half", "method", "solved", "saddle", "wrong", "outside", "nfev", "njev", "products", "certificate",
    "value", "projected_gradient", "lambda_min", "seconds",
)  # fmt: skip


def rows_of(runs: Sequence[dict[str, Any]]) -> str:
    """Return one line of comma-separated values for each run."""

    def form(cell: Any) -> str:
        return format(cell, ".9g") if isinstance(cell, float) else str(cell)

    lines = [",".join(COLUMNS), *(",".join(form(run[name]) for name in COLUMNS) for run in runs)]
    return "\n".join(lines)


def report(runs: Sequence[dict[str, Any]]) -> str:
    """Return the tables of all problems and of both halves, and the problems that each method does not solve."""
    texts = []
    for half in ("all", "development", "unseen"):
        part = [run for run in runs if half in ("all", run["half"])]
        if part:
            texts.append(f"{half}: {len({run['problem'] for run in part})} problems\n\n{table_of(summary(part))}")
    return "\n\n".join([*texts, table_of_failures(runs)])


def in_words(runs: Sequence[dict[str, Any]]) -> str:
    """Return how sanc compares with L-BFGS-B."""
    rows = {row["method"]: row for row in summary(runs)}
    ours, peer = rows["sanc"], rows["L-BFGS-B"]
    return (
        f"`sanc.minimize` with default options solves {ours['solved']} of {len({run['problem'] for run in runs})} "
        f"problems with bounds, and {ours['wrong']} of its successes are wrong; L-BFGS-B solves {peer['solved']}, and "
        f"{peer['wrong']} of its successes are. In the median it needs "
        f"{peer['fg_median_ratio']:.2f} times the evaluations of f and gradients of L-BFGS-B. It also needs Hessian "
        "products: if one costs as much as two gradients, L-BFGS-B does "
        f"{peer['work_ratio']:.2f} times the work of `sanc.minimize`, whose certificate is included."
    )


def draw(runs: Sequence[dict[str, Any]]) -> Any:
    """Draw the performance profiles of evaluations and work."""
    from matplotlib.figure import Figure

    def style(method: str) -> dict[str, Any]:
        line = {"lw": 2.6, "color": "black", "zorder": 5} if method == "sanc" else {"lw": 1.3}
        return {"color": f"C{METHODS.index(method)}", "label": method} | line

    methods = list(dict.fromkeys(run["method"] for run in runs))
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = {"fg": "evaluations of f and gradients", "work": "work f + 2g + 4Hv"}
    for axes, (kind, title) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        draw_profile(axes, {method: costs(runs, method, kind).tolist() for method in methods}, 32.0, style)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="τ: cost at most τ times the lowest", title=title)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel(f"share of the {len(runs) // len(methods)} problems")
    figure.axes[0].legend(loc="lower right", fontsize=8)
    return figure


# ---------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(
        __doc__, quick="ten small problems, seconds", out="bounded.json, bounded.csv, table.md and bounded.png"
    )
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="by default all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="by default all")
    parser.add_argument("--half", choices=("development", "unseen"), help="by default both")
    parser.add_argument("--iterations", type=int, default=1000, help="iteration limit of a run")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of a run")
    options = parser.parse_args(arguments)
    known = {problem.name: problem for problem in problems()}
    names = options.problems or (QUICK if options.quick else list(known))
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--problems {' '.join(unknown)}: not in benchmarks/bounded_problems.py")
    halves = {"development": False, "unseen": True}
    chosen = [known[name] for name in names if known[name].unseen is halves.get(options.half, known[name].unseen)]
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for count, problem in enumerate(chosen, 1):
        print(f"{count:3d}/{len(chosen)}  {problem.name:24s}", end="", flush=True)
        for method in options.methods:
            runs.append(run := run_one(method, problem, options.iterations, options.seconds))
            mark = " " if run["solved"] else "!" if run["saddle"] else "-"
            print(f" {run['nfev']:5d}{mark}", end="", flush=True)
        print()
    text = report(runs)
    print(f"\n{text}\n", flush=True)
    files = {
        "table.md": text,
        "bounded.csv": rows_of(runs),
        "bounded.json": {"runs": runs},
        "bounded.png": lambda: draw(runs),
    }
    write_results(options.out, files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
