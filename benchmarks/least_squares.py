"""Compare `sanc.least_squares` with SciPy's solvers and lmfit on fits of NIST and of Moré, Garbow and Hillstrom.

    python -m benchmarks.least_squares --out least-squares-output    # all problems, minutes
    python -m benchmarks.least_squares --problems Misra1a-1 Wood-10
    python -m benchmarks.least_squares --quick                       # a few problems, seconds
    python -m benchmarks.least_squares --overhead                    # own time per iteration at n = 5, m = 100

All methods get the same residuals and exact Jacobians, and their default tolerances. Every problem is run from its
starts without bounds, and from the same starts with bounds that cut off its solution. The *best* value of a problem is
the lowest that any method reached from any of its starts. A run *solves* a problem if its cost exceeds the best one by
at most 1e-6, relatively, or by 1e-10 (1e-18 for NIST). A flag is *wrong* if the method reports success at a point that
is no second-order point: the projected gradient exceeds 1e-3 ‖r‖ in variables in which the columns of the Jacobian have
norm 1, and so a cosine, or the Hessian of the free variables has λ_min < −1e-4 there. Evaluations of the certificate of
`sanc`, which the others lack, do not count.

--out writes least_squares.json, least_squares.csv and table.md.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import torch

import sanc
from benchmarks.common import Floats, median
from benchmarks.least_squares_problems import LeastSquaresProblem, problems
from benchmarks.reporting import command, markdown_table, number, write_results

METHODS = ("sanc", "trf-jac", "trf", "dogbox", "lm", "curve_fit", "lmfit")
UNBOUNDED = ("lm",)
"""Methods without bounds."""
QUICK = ("Misra1a-1", "Lanczos3-2", "Rat43-1", "Rosenbrock-1", "Wood-10", "Brown-Dennis-1")
RELATIVE = 1e-6
"""Relative excess over the best cost up to which a problem is solved."""
COSINE = 1e-3
"""Projected gradient over ‖r‖, in scaled variables, from which a point is not stationary."""
CURVATURE = 1e-4
"""Negative curvature in scaled variables from which a point is a saddle."""
LIMIT = 1000
"""Largest number of evaluations of the residuals."""


class Counted:
    """Residuals and Jacobian of a problem, with counts of calls and of points outside the bounds."""

    def __init__(self, problem: LeastSquaresProblem) -> None:
        self.problem, self.nfev, self.njev, self.outside = problem, 0, 0, 0

    def _note(self, x: Floats) -> None:
        self.outside += not bool(np.all((x >= self.problem.lower) & (x <= self.problem.upper)))

    def fun(self, x: Floats) -> Floats:
        """Residuals."""
        self._note(x)
        self.nfev += 1
        return self.problem.fun(x)

    def jac(self, x: Floats) -> Floats:
        """Jacobian."""
        self._note(x)
        self.njev += 1
        return self.problem.jac(x)


def run_method(method: str, counted: Counted) -> tuple[Floats, bool, str]:
    """Return the end point, whether the method reports success, and its message."""
    problem = counted.problem
    bounds = (problem.lower, problem.upper)
    if method == "sanc":
        res = sanc.least_squares(counted.fun, problem.start, counted.jac, bounds, max_nfev=LIMIT)
        counted.nfev, counted.njev = res.nfev, res.njev
        return res.x, bool(res.success), res.status.name.lower()
    if method == "curve_fit":
        limits = {"maxfev": LIMIT} if not problem.is_bounded else {"max_nfev": LIMIT}
        zeros = np.zeros(len(problem.fun(problem.start)))
        given: dict[str, Any] = {"p0": problem.start, "bounds": bounds, "check_finite": False, **limits}
        x, _ = scipy.optimize.curve_fit(
            lambda _, *p: counted.fun(np.array(p)), zeros, zeros, jac=lambda _, *p: counted.jac(np.array(p)), **given
        )
        return x, True, "returned"
    if method == "lmfit":
        return run_lmfit(counted)
    name, _, scale = method.partition("-")
    options: dict[str, Any] = {"method": name, "x_scale": scale or 1.0, "max_nfev": LIMIT}
    if name != "lm":
        options["bounds"] = bounds
    res = scipy.optimize.least_squares(counted.fun, problem.start, counted.jac, **options)
    return res.x, bool(res.success), res.message


def run_lmfit(counted: Counted) -> tuple[Floats, bool, str]:
    """Run the `leastsq` of lmfit, which transforms variables with bounds."""
    import lmfit

    problem, parameters = counted.problem, lmfit.Parameters()
    for k, (start, lower, upper) in enumerate(zip(problem.start, problem.lower, problem.upper, strict=True)):
        parameters.add(f"p{k}", value=float(start), min=float(lower), max=float(upper))

    def point(given: Any) -> Floats:
        return np.array([parameter.value for parameter in given.values()])

    fit = lmfit.Minimizer(lambda p: counted.fun(point(p)), parameters, nan_policy="propagate", max_nfev=LIMIT)
    res = fit.leastsq(Dfun=lambda p: counted.jac(point(p)))
    return point(res.params), bool(res.success), str(res.message)


def is_second_order(problem: LeastSquaresProblem, x: Floats) -> bool:
    """Whether projected gradient and curvature at a point satisfy the conditions, by dense float64 matrices."""
    x = np.clip(x, problem.lower, problem.upper)
    r, jacobian = problem.fun(x), problem.jac(x)
    norms = np.linalg.norm(jacobian, axis=0)
    # A variable has no effect if a change by its own size changes the residuals by less than roundoff.
    used = norms * np.abs(x) > 1e-14 * np.linalg.norm(r)
    scale = np.where(used, 1.0 / np.where(used, norms, 1.0), 0.0)
    g = scale * (jacobian.T @ r)
    with np.errstate(invalid="ignore"):
        at_lower = x <= problem.lower + 1e-8 * (1e-8 + np.abs(problem.lower))
        at_upper = x >= problem.upper - 1e-8 * (1e-8 + np.abs(problem.upper))
    held = (at_lower & (g >= 0.0)) | (at_upper & (g <= 0.0))
    size = float(np.linalg.norm(r))
    rounding = 1e-14 * float(np.linalg.norm(x * norms))
    if size <= math.sqrt(problem.floor):
        return True
    if not np.linalg.norm(g[~held]) <= max(COSINE * size, rounding):
        return False
    point = torch.from_numpy(np.array(x))
    hessian = torch.func.hessian(lambda p: 0.5 * problem.residuals(p).square().sum())(point).numpy()
    free = ~(at_lower | at_upper)
    scaled = (hessian * np.outer(scale, scale))[np.ix_(free, free)]
    return not free.any() or bool(np.linalg.eigvalsh(0.5 * (scaled + scaled.T))[0] >= -CURVATURE)


def run_one(method: str, problem: LeastSquaresProblem) -> dict[str, Any]:
    """Run a method on a problem, and return its counts and the check of its end point."""
    counted, clock = Counted(problem), time.perf_counter()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            x, success, ended = run_method(method, counted)
    except (ArithmeticError, ValueError, RuntimeError, np.linalg.LinAlgError) as error:
        x, success, ended = problem.start, False, f"{type(error).__name__}: {error}"[:80]
    spent = time.perf_counter() - clock
    x = np.clip(np.asarray(x), problem.lower, problem.upper)
    r = problem.fun(x)
    cost = 0.5 * float(r @ r)
    return {
        "problem": problem.name,
        "family": problem.family,
        "group": problem.group,
        "n": len(problem.start),
        "method": method,
        "cost": cost if math.isfinite(cost) else math.inf,
        "success": success,
        "wrong": success and not is_second_order(problem, x),
        "outside": counted.outside,
        "nfev": counted.nfev,
        "njev": counted.njev,
        "seconds": round(spent, 4),
        "ended": ended,
        "x": x.tolist(),
        "floor": problem.floor,
    }


def run_all(chosen: Sequence[LeastSquaresProblem], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Run the methods on problems without bounds, then on those with bounds that cut off the best solutions."""
    runs: list[dict[str, Any]] = []

    def run_problem(problem: LeastSquaresProblem) -> None:
        line = f"{problem.name:32s}"
        for method in methods:
            if problem.is_bounded and method in UNBOUNDED:
                continue
            runs.append(run := run_one(method, problem))
            line += f" {run['nfev']:5d} {run['cost']:.3e}"
        print(line, flush=True)

    for problem in chosen:
        run_problem(problem)
    solutions = {name: min((run for run in runs if run["family"] == name), key=lambda run: run["cost"])["x"]
                 for name in dict.fromkeys(problem.family for problem in chosen)}  # fmt: skip
    for problem in chosen:
        run_problem(problem.with_cut(np.array(solutions[problem.family])))
    for run in runs:
        same = [other["cost"] for other in runs if key(other) == key(run)]
        best = min(same)
        run["solved"] = run["cost"] <= best * (1.0 + RELATIVE) + run["floor"]
    return runs


def key(run: dict[str, Any]) -> tuple[Any, ...]:
    """Return what runs with the same best value share: bounds depend on the side of the start."""
    return (run["family"],) if "bounds" not in run["group"] else (run["problem"],)


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each method."""
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        mine = [run for run in runs if run["method"] == method]
        row: dict[str, Any] = {"method": method}
        for group in ("NIST", "MGH", "NIST, bounds", "MGH, bounds"):
            part = [run for run in mine if run["group"] == group]
            row[group] = f"{sum(run['solved'] for run in part)}/{len(part)}" if part else "–"
        solved = [run for run in mine if run["solved"]]
        row["solved"] = f"{len(solved)}/{len(mine)}"
        row["wrong"] = sum(run["wrong"] for run in mine)
        row["outside"] = sum(bool(run["outside"]) for run in mine)
        row["nfev"], row["njev"] = (median(np.array([float(run[k]) for run in solved])) for k in ("nfev", "njev"))
        row["seconds"] = float(round(sum(run["seconds"] for run in mine), 1))
        rows.append(row)
    return rows


HEAD = ("method", "solved", "NIST", "MGH", "NIST, bounds", "MGH, bounds", "wrong", "outside", "nfev", "njev", "seconds")
COLUMNS = ("problem", "group", "n", "method", "solved", "wrong", "outside", "nfev", "njev", "cost", "ended")


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of methods."""

    def form(cell: Any) -> str:
        return number(cell, ".0f" if cell.is_integer() else ".1f") if isinstance(cell, float) else str(cell)

    return markdown_table(list(HEAD), [[row[name] for name in HEAD] for row in rows], form)


def rows_of(runs: Sequence[dict[str, Any]]) -> str:
    """Return one line of comma-separated values for each run."""

    def form(cell: Any) -> str:
        return format(cell, ".9g") if isinstance(cell, float) else str(cell).replace(",", ";")

    return "\n".join([",".join(COLUMNS), *(",".join(form(run[name]) for name in COLUMNS) for run in runs)])


def overhead() -> str:
    """Return own milliseconds of processor time, per iteration and run, of both solvers on an exponential fit."""
    t = np.linspace(0.0, 4.0, 100)
    truth, start = np.array([1.0, 0.5, 2.0, 1.5, 0.3]), np.array([0.5, 0.2, 1.0, 3.0, 0.0])

    def fun(p: Floats) -> Floats:
        return p[0] * np.exp(-p[1] * t) + p[2] * np.exp(-p[3] * t) + p[4] - data

    def jac(p: Floats) -> Floats:
        first, second = np.exp(-p[1] * t), np.exp(-p[3] * t)
        return np.stack([first, -p[0] * t * first, second, -p[2] * t * second, np.ones_like(t)], axis=1)

    data = np.zeros_like(t)
    data = fun(truth) + 0.05 * np.random.default_rng(0).standard_normal(100)

    calls: list[Any] = []

    def counted(function: Any) -> Any:
        return lambda p: (calls.append(function), function(p))[1]

    def seconds(function: Callable[[], Any], repeats: int) -> float:
        clock = time.thread_time()
        for _ in range(repeats):
            function()
        return (time.thread_time() - clock) / repeats

    def own_seconds(solve: Callable[[], Any]) -> float:
        calls.clear()
        spent = seconds(solve, 1)
        return spent - sum(costs[function] for function in calls)

    def ours(max_iter: int) -> Any:
        return sanc.least_squares(counted(fun), start, counted(jac), certify=False, max_iter=max_iter)

    def theirs() -> Any:
        return scipy.optimize.least_squares(counted(fun), start, counted(jac), x_scale="jac")

    costs: dict[Any, float] = {function: seconds(lambda f=function: f(start), 500) for function in (fun, jac)}  # type: ignore[misc]
    iterations, peers = int(ours(LIMIT).nit), int(theirs().njev)
    solvers: dict[str, Callable[[], Any]] = {
        "first": lambda: ours(1),
        "before the end": lambda: ours(iterations - 1),
        "sanc": lambda: ours(LIMIT),
        "trf": theirs,
    }
    times: dict[str, list[float]] = {name: [] for name in solvers}
    for _ in range(50):  # in turns, so that other work on the machine affects all of them
        for name, solve in solvers.items():
            times[name].append(1e3 * own_seconds(solve))
    spent = {name: float(np.median(entries)) for name, entries in times.items()}
    peer = spent["trf"] / peers
    whole = spent["sanc"] / iterations
    between = (spent["before the end"] - spent["first"]) / (iterations - 2)
    return (
        f"own milliseconds per iteration, n = 5, m = 100: trf {peer:.3f}; sanc {whole:.3f} ({whole / peer:.1f} times) "
        f"with start and ending, {between:.3f} ({between / peer:.1f} times) without them; "
        f"a run: trf {spent['trf']:.2f}, sanc {spent['sanc']:.2f} ({spent['sanc'] / spent['trf']:.1f} times)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="a few problems, seconds", out="least_squares.json, least_squares.csv and table.md")
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="by default all")
    defaults = [method for method in METHODS if method != "lmfit" or importlib.util.find_spec("lmfit")]
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=defaults, help="by default all installed")
    parser.add_argument("--overhead", action="store_true", help="measure own time per iteration only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.overhead:
        print(overhead())
        return 0
    known = {problem.name: problem for problem in problems()}
    names = options.problems or (QUICK if options.quick else list(known))
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--problems {' '.join(unknown)}: not in benchmarks/least_squares_problems.py")
    runs = run_all([known[name] for name in names], options.methods)
    rows = summary(runs)
    unsolved = [f"not solved by {m}: " + ", ".join(r["problem"] for r in runs if r["method"] == m and not r["solved"])
                for m in options.methods]  # fmt: skip
    text = "\n\n".join([table_of(rows), *unsolved])
    print(f"\n{text}\n", flush=True)
    document = {"summary": rows, "runs": runs}
    write_results(options.out, {"table.md": text, "least_squares.csv": rows_of(runs), "least_squares.json": document})
    return 0


if __name__ == "__main__":
    sys.exit(main())
