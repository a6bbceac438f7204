"""Compare `sanc.minimize` with SciPy's minimisers and GALAHAD's ARC on the zoo: 119 problems, n = 2 to 1000.

    python -m benchmarks.deterministic --out deterministic-output     # everything, tens of minutes
    python -m benchmarks.deterministic --problems GENROSE COSINE      # these only
    python -m benchmarks.deterministic --methods sanc trust-exact
    python -m benchmarks.deterministic --quick                        # a dozen small problems, seconds
    python -m benchmarks.deterministic --sets moved far scaled fits walks unseen   # other starts, units, problems
    python -m benchmarks.deterministic --own-time                     # what the minimiser itself takes

Every method gets the same start and the same counted f, gradient and Hessian (products), and ends where ‖∇f‖₂ ≤ 1e-8,
or the `gtol` of the problem where rounding allows no more. SciPy's methods are stopped the moment they evaluate such a
gradient, so that no ending of theirs costs them anything. `sanc` has its default options. *Solved* means that the run
ended at a minimum that the zoo lists; a small gradient is not enough. The saddle starts of the zoo are run too: *stuck*
counts the runs from there that ended with a small gradient and negative curvature.

A whole Hessian counts as n products. The certificate with which `sanc` ends, which the others do not have, is counted
on its own. GALAHAD's ARC takes part where `galahad-optrove` is installed, with its direct solver of the subproblem.

The other sets have the problems of up to 100 variables, from starts that are moved at random (each variable by a normal
number of standard deviation 0.3·max(|x|, 0.3)) or ten times as far from the origin, where a second-order point that the
zoo does not list counts as solved too; from the standard starts in other units, c·f(x/k) with c from 1e-24 to 1e24
and k from 1e-8 to 1e8 at random; the fits of `benchmarks.fits`; long walks in 10, 100 and 1000 variables; and those of
`benchmarks.unseen`, which no choice was made with.

--own-time runs `sanc` and SciPy's trust-ncg in turns on the problems of up to 100 variables, and tells the time that
each spends outside f, gradient and products: of a solve, the certificate of `sanc` included, and of an iteration.

--out gets deterministic.json, table.md and the performance profiles deterministic.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before OpenMP starts; whoever only imports this is not bound to one core
    os.environ.setdefault("OMP_CANCELLATION", "TRUE")  # GALAHAD's sparse solver wants both
    os.environ.setdefault("OMP_PROC_BIND", "TRUE")

import numpy as np
import scipy.optimize
import torch

import sanc
from benchmarks import fits, unseen
from benchmarks.common import Budget, Counted, Floats, geometric_mean, median, plain_table, profile, zoo

NEWTON = ("trust-krylov", "trust-ncg", "trust-exact", "Newton-CG", "galahad-arc")
FIRST_ORDER = ("L-BFGS-B", "BFGS")
METHODS = ("sanc", *NEWTON, *FIRST_ORDER)
QUICK = (
    "ROSENBROCK", "BEALE", "HELICAL-VALLEY", "BARD", "BOX-3D", "WOOD", "POWELL-SINGULAR", "CUBE", "DENSCHNE", "HAIRY",
    "HIMMELBG", "BROWN-DENNIS",
)  # fmt: skip
SETS = ("zoo", "moved", "far", "scaled", "fits", "walks", "unseen")
LARGEST = 100
"""Most variables of the problems in the sets other than the zoo."""
STRICT = 1e-4
"""A stationary point whose λ_min is below minus this is a strict saddle."""

# ---------------------------------------------------------------------- the problems


def scaled(problem: zoo.ZooProblem, c: float, k: float) -> zoo.ZooProblem:
    """Return c·f(x/k) from k·x0, with tolerances in the same units."""
    fun, least = problem.fun, tuple(c * value for value in problem.minima)
    limits = {"rtol": problem.rtol, "atol": c * problem.atol, "gtol": problem.gtol * c / k}
    return zoo.ZooProblem(problem.name, lambda x: c * fun(x / k), k * problem.x0, least, problem.source, **limits)


def variants(which: str, names: Sequence[str]) -> list[zoo.ZooProblem]:
    """Return the problems of a set: those of the zoo by name, from other starts or in other units, or others."""
    if which in ("fits", "unseen"):
        return fits.problems() if which == "fits" else unseen.problems()
    if which == "zoo":
        return [zoo.BY_NAME[name] for name in names]
    if which == "walks":
        return [problem for n in (10, 100, 1000) for problem in zoo.walks(n)]
    found = []
    for number, problem in enumerate(zoo.PROBLEMS):
        if problem.n > LARGEST or problem.name not in names:
            continue
        rng = np.random.default_rng(number)
        if which == "moved":
            away = 0.3 * np.maximum(np.abs(problem.x0), 0.3) * rng.standard_normal(problem.n)
            found.append(replace(problem, x0=problem.x0 + away))
        elif which == "far":
            found.append(replace(problem, x0=10.0 * problem.x0))
        else:
            found.append(scaled(problem, 10.0 ** rng.uniform(-24, 24), 10.0 ** rng.uniform(-8, 8)))
    return found


# ---------------------------------------------------------------------- one run


def run_sanc(counted: Counted, gtol: float, iterations: int) -> tuple[Floats, dict[str, Any]]:
    """Run `sanc.minimize` with its defaults."""
    limit, counted.seconds = counted.seconds, math.inf
    result = sanc.minimize(
        counted.fun,
        counted.problem.x0,
        jac=counted.jac,
        hessp=counted.hessp,
        tol=gtol,
        max_iter=iterations,
        max_time=limit,
    )
    extra = {"certificate": counted.nhev - result.nhev, "iterations": result.nit, "ended": result.status.name.lower()}
    counted.nfev, counted.njev, counted.nhev = result.nfev, result.njev, result.nhev
    return np.asarray(result.x), extra


def run_scipy(method: str, counted: Counted, gtol: float, iterations: int) -> tuple[Floats, dict[str, Any]]:
    """Run a method of SciPy with its other endings switched off; that at ‖∇f‖ ≤ gtol is the counter's."""
    options: dict[str, Any] = {"maxiter": iterations}
    derivatives: dict[str, Any] = {"jac": counted.jac}
    if method == "trust-exact":
        derivatives["hess"] = counted.hess
    elif method in ("trust-krylov", "trust-ncg", "Newton-CG"):
        derivatives["hessp"] = counted.hessp
    if method.startswith("trust"):
        options["gtol"] = 0.0
    elif method == "Newton-CG":
        options["xtol"] = 0.0
    elif method == "L-BFGS-B":
        options |= {"ftol": 0.0, "gtol": 0.0, "maxfun": 10**9}
    else:
        options["gtol"] = 0.0
    last = np.array(counted.problem.x0)

    def remember(xk: Floats) -> None:
        last[:] = xk

    counted.stop_at = gtol
    try:
        result = scipy.optimize.minimize(
            counted.fun, counted.problem.x0, method=method, callback=remember, options=options, **derivatives
        )
    except Budget:
        met = counted.end is not None
        return (counted.end if counted.end is not None else last), {"ended": "gradient" if met else "limit"}
    return result.x, {"ended": str(result.message)}


def run_galahad(counted: Counted, gtol: float, iterations: int) -> tuple[Floats, dict[str, Any]]:
    """Run GALAHAD's ARC with whole Hessians and its default options otherwise.

    The subproblem is solved directly: with the iterative solver of the interface we tried (5.5.3) Lanczos may end in
    numbers that are not finite close to the solution.
    """
    from galahad import arc

    n = counted.problem.n
    rows, columns = np.tril_indices(n)
    options = arc.initialize()
    options |= {
        "stop_g_absolute": gtol,
        "stop_g_relative": 0.0,
        "maxit": iterations,
        "subproblem_direct": True,
        "print_level": -1,
        "error": -1,
        "clock_time_limit": float(counted.seconds),
    }
    counted.seconds = math.inf
    pointers = np.arange(n + 1) * (np.arange(n + 1) + 1) // 2
    arc.load(n, "coordinate", len(rows), rows.astype(np.int64), columns.astype(np.int64), pointers, options)
    x, _ = arc.solve(
        n, len(rows), counted.problem.x0.copy(), counted.fun, counted.jac, lambda x: counted.hess(x)[rows, columns]
    )
    status = int(arc.information()["status"])
    arc.terminate()
    return np.array(x), {"ended": f"status {status}"}


def run_one(method: str, problem: Any, iterations: int, seconds: float, *, anywhere: bool = False) -> dict[str, Any]:
    """Run a method on a problem or from a saddle start, and say what came out.

    Where it may end `anywhere`, or the problem lists none, a minimum need not be listed.
    """
    gtol = getattr(problem, "gtol", 1e-8)
    counted = Counted(problem, seconds=seconds)
    clock = time.perf_counter()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            if method == "sanc":
                x, extra = run_sanc(counted, gtol, iterations)
            elif method == "galahad-arc":
                x, extra = run_galahad(counted, gtol, iterations)
            else:
                x, extra = run_scipy(method, counted, gtol, iterations)
    except (Budget, ArithmeticError, ValueError, np.linalg.LinAlgError) as problem_met:
        x, extra = np.asarray(problem.x0), {"ended": f"{type(problem_met).__name__}: {problem_met}"[:100]}
    spent = time.perf_counter() - clock
    value, g = zoo.value_and_gradient(problem.fun, x)
    norm = float(np.linalg.norm(g))
    saddle = False
    if norm <= max(1e-6, gtol):
        saddle = bool(np.linalg.eigvalsh(zoo.dense_hessian(problem, x))[0] < -STRICT)
    minima = problem.minima if isinstance(problem, zoo.ZooProblem) else None
    reached = None if minima is None else problem.reached(value)
    if (anywhere or minima == ()) and reached is None and norm <= max(1e-6, gtol) and not saddle:
        reached = value
    return {
        "problem": problem.name,
        "n": problem.n,
        "method": method,
        "solved": reached is not None and math.isfinite(value),
        "global": reached is not None and minima is not None and minima[:1] == (reached,),
        "saddle": saddle,
        "value": value,
        "gradient": norm,
        "small_gradient": norm <= gtol,
        "nfev": counted.nfev,
        "njev": counted.njev,
        "products": counted.products,
        "hessians": counted.nhess,
        "certificate": 0,
        "seconds": round(spent, 3),
        **extra,
    }


# ---------------------------------------------------------------------- the summary


def costs(runs: Sequence[dict[str, Any]], method: str, names: Sequence[str], what: str) -> list[float]:
    """List what a method spent on each problem, infinite where it did not solve it."""
    found = {run["problem"]: run for run in runs if run["method"] == method}
    return [float(found[name][what]) if found[name]["solved"] else math.inf for name in names]


def summary(runs: Sequence[dict[str, Any]], stuck: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method."""
    methods = list(dict.fromkeys(run["method"] for run in runs))
    names = list(dict.fromkeys(run["problem"] for run in runs))
    table = {
        (method, what): np.array(costs(runs, method, names, what))
        for method in methods
        for what in ("nfev", "njev", "products")
    }
    newton = [method for method in methods if method not in FIRST_ORDER]
    common = np.all([np.isfinite(table[method, "nfev"]) for method in newton], axis=0)
    rows = []
    for method in methods:
        mine = [run for run in runs if run["method"] == method]
        first = method in FIRST_ORDER
        row: dict[str, Any] = {
            "method": method,
            "solved": sum(run["solved"] for run in mine),
            "global": sum(run["global"] for run in mine),
            "small_gradient": sum(run["solved"] and run["small_gradient"] for run in mine),
            "saddles": sum(run["saddle"] for run in mine),
            "stuck": sum(run["saddle"] for run in stuck if run["method"] == method),
            "certificate": median([run["certificate"] for run in mine]),
            "seconds": float(round(sum(run["seconds"] for run in mine))),
        }
        for what in ("nfev", "njev", "products"):
            spent = table[method, what]
            row[what + "_all"] = math.nan if first and what == "products" else median(spent)
            row[what + "_common"] = math.nan if first else median(spent[common])
            both = np.isfinite(spent)
            if "sanc" in methods:
                both &= np.isfinite(table["sanc", what])
                ratios = np.maximum(spent[both], 1.0) / np.maximum(table["sanc", what][both], 1.0)
                row[what + "_ratio"] = math.nan if first and what == "products" else geometric_mean(ratios)
        rows.append(row)
    for row in rows:
        row["common"] = int(common.sum())
    return rows


HEAD = {
    "method": "method",
    "solved": "solved",
    "small_gradient": "and ‖∇f‖ ≤ tol",
    "global": "global",
    "saddles": "saddles",
    "stuck": "stuck",
    "nfev_all": "f, all",
    "nfev_common": "f, common",
    "nfev_ratio": "f ratio",
    "products_all": "Hv, all",
    "products_common": "Hv, common",
    "products_ratio": "Hv ratio",
    "njev_all": "g, all",
    "seconds": "seconds",
}


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out the table that is printed."""

    def form(cell: Any) -> str:
        if isinstance(cell, float):
            if math.isnan(cell):
                return "–"
            if math.isinf(cell):
                return "∞"
            return f"{cell:.0f}" if cell == int(cell) else f"{cell:.2f}" if cell < 10 else f"{cell:.1f}"
        return str(cell)

    return plain_table(list(HEAD.values()), [[row.get(key, math.nan) for key in HEAD] for row in rows], form)


def legend(rows: Sequence[dict[str, Any]], problems: int, saddles: int) -> str:
    """Say what the columns mean."""
    certificate = next((row["certificate"] for row in rows if row["method"] == "sanc"), math.nan)
    return (
        f"{problems} problems and {saddles} saddle starts. f, Hv, g: median of evaluations, Hessian products and "
        f"gradients.\nall: over all problems, a failure infinite; common: over the {rows[0]['common']} that every "
        "Newton-type method solved.\nratio: geometric mean of the method's count over that of sanc where both solved.\n"
        f"A whole Hessian is n products. The certificate of sanc takes a median of {certificate:.0f} products more."
    )


def picture(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the performance profiles of evaluations and products."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(run["method"] for run in runs))
    names = list(dict.fromkeys(run["problem"] for run in runs))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for axis, what, title in zip(axes, ("nfev", "products"), ("evaluations of f", "Hessian products"), strict=True):
        shown = [m for m in methods if what == "nfev" or m not in FIRST_ORDER]
        for method, (tau, share) in profile({m: costs(runs, m, names, what) for m in shown}).items():
            style = {"lw": 2.6, "color": "black", "zorder": 5} if method == "sanc" else {"lw": 1.3}
            colour = {} if method == "sanc" else {"color": f"C{METHODS.index(method)}"}
            end = share[-1] if len(share) else 0.0
            axis.step(np.r_[1.0, tau, 32.0], np.r_[0.0, share, end], where="post", label=method, **style, **colour)
        axis.set_xscale("log", base=2)
        axis.set_xlim(1, 32)
        axis.set_ylim(0, 1)
        axis.set_xlabel("τ: cost at most τ times the best")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"share of the {len(names)} problems")
    axes[0].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


# ---------------------------------------------------------------------- own time


def own_seconds(method: str, problem: zoo.ZooProblem, iterations: int, repeats: int) -> tuple[float, int, bool]:
    """Return the seconds that a run takes by itself, its iterations, and whether it solved the problem.

    The run is repeated with the answers of the first, which then cost nothing; the least of the times is returned.
    """
    answers: list[Any] = []

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Floats) -> Any:
            answers.append(call(*arguments))
            return answers[-1]

        return wrapped

    minimise = sanc.minimize if method == "sanc" else partial(scipy.optimize.minimize, method=method)
    limits = {"tol": problem.gtol, "options": {"maxiter": iterations}}
    f, jac, _, hessp = (recorded(call) for call in zoo.numpy_functions(problem))
    result: Any = minimise(f, problem.x0, jac=jac, hessp=hessp, **limits)
    times = []
    for _ in range(repeats):
        again = iter(answers)
        clock = time.thread_time()
        minimise(
            lambda x: next(again),  # noqa: B023 - it is used up within this turn
            problem.x0,
            jac=lambda x: next(again),  # noqa: B023
            hessp=lambda x, v: next(again),  # noqa: B023
            **limits,
        )
        times.append(time.thread_time() - clock)
    return min(times), max(result.nit, 1), problem.reached(float(result.fun)) is not None


def own_time(names: Sequence[str], iterations: int, repeats: int = 5) -> list[dict[str, Any]]:
    """Compare what two minimisers take for themselves where both solve a problem."""
    rows = []
    for problem in (zoo.BY_NAME[name] for name in names):
        if problem.n > LARGEST:
            continue
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            (ours, our_steps, solved), (theirs, their_steps, too) = (
                own_seconds(method, problem, iterations, repeats) for method in ("sanc", "trust-ncg")
            )
        if solved and too:
            per_step = (ours / our_steps) / (theirs / their_steps)
            row = {"problem": problem.name, "n": problem.n, "sanc": ours, "trust-ncg": theirs}
            rows.append(row | {"per_solve": ours / theirs, "per_iteration": per_step})
            print(f"{problem.name:28s} n = {problem.n:3d}  {1e3 * ours:8.2f} ms  {1e3 * theirs:8.2f} ms", flush=True)
    return rows


def own_time_told(rows: Sequence[dict[str, Any]]) -> str:
    """Say the medians."""
    solve, step = (median([row[what] for row in rows]) for what in ("per_solve", "per_iteration"))
    return (
        f"own time of sanc over that of trust-ncg, median of the {len(rows)} problems that both solve: "
        f"{solve:.2f} per solve, {step:.2f} per iteration"
    )


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the JSON, the table and the picture")
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="problems of the zoo; by default all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="methods; by default all there are")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["zoo"], help="problems; by default the zoo")
    parser.add_argument("--quick", action="store_true", help="a dozen small problems and a few saddle starts")
    parser.add_argument("--own-time", action="store_true", help="time outside f, gradient and products, no more")
    parser.add_argument("--iterations", type=int, default=1000, help="most iterations of a run")
    parser.add_argument("--seconds", type=float, default=120.0, help="most seconds of a run")
    options = parser.parse_args(arguments)
    methods = list(options.methods or METHODS)
    if "galahad-arc" in methods and find_spec("galahad") is None:
        print("galahad-optrove is not installed: GALAHAD's ARC is left out")
        methods.remove("galahad-arc")
    names = options.problems or (QUICK if options.quick else [problem.name for problem in zoo.PROBLEMS])
    unknown = [name for name in names if name not in zoo.BY_NAME]
    if unknown:
        parser.error(f"--problems {' '.join(unknown)}: not in the zoo")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if options.own_time:
        taken = own_time(names, options.iterations)
        print(f"\n{own_time_told(taken)}")
        if options.out is not None:
            (options.out / "own-time.json").write_text(json.dumps(taken, indent=1) + "\n", encoding="utf-8")
        return 0

    document: dict[str, Any] = {}
    tables = []
    for which in options.sets:
        starts = (
            [] if options.problems or which != "zoo" else [*zoo.SADDLES, *zoo.HIDDEN][:: 10 if options.quick else 1]
        )
        problems = variants(which, names)
        runs = race(problems, methods, options, anywhere=which in ("moved", "far"))
        stuck: list[dict[str, Any]] = []
        for number, start in enumerate(starts, 1):
            stuck += [run_one(method, start, options.iterations, options.seconds) for method in methods]
            held = [run["method"] for run in stuck[-len(methods) :] if run["saddle"]]
            print(f"{number:4d}/{len(starts)}  from {start.name}: {len(held)} of {len(methods)} stuck", flush=True)
        rows = summary(runs, stuck)
        missed = "\n".join(
            f"not solved by {method}: "
            + (", ".join(run["problem"] for run in runs if run["method"] == method and not run["solved"]) or "–")
            for method in methods
        )
        tables.append(f"{which}\n\n{table_of(rows)}\n\n{legend(rows, len(problems), len(starts))}\n\n{missed}")
        print(f"\n{tables[-1]}\n", flush=True)
        document[which] = {"summary": rows, "runs": runs, "saddles": stuck}
    if options.out is not None:
        (options.out / "table.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
        (options.out / "deterministic.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        picture(document[options.sets[0]]["runs"], options.out / "deterministic.png")
        print(f"written: {options.out}/table.md, deterministic.json and deterministic.png")
    return 0


def race(
    problems: Sequence[Any], methods: Sequence[str], options: argparse.Namespace, *, anywhere: bool
) -> list[dict[str, Any]]:
    """Run every method on every problem, with a line for each."""
    runs: list[dict[str, Any]] = []
    for number, problem in enumerate(problems, 1):
        line = f"{number:4d}/{len(problems)}  {problem.name:28s}"
        for method in methods:
            if sys.stdout.isatty():
                print(f"\r{line} … {method:14s}", end="", flush=True)
            run = run_one(method, problem, options.iterations, options.seconds, anywhere=anywhere)
            runs.append(run)
            line += f" {run['nfev']:5d}{' ' if run['solved'] else '!' if run['saddle'] else '-'}"
        print(("\r" if sys.stdout.isatty() else "") + line, flush=True)
    return runs


if __name__ == "__main__":
    sys.exit(main())
