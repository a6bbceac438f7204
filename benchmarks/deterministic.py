"""Compare `sanc.minimize` with SciPy's minimisers and GALAHAD's ARC on 119 test problems with 2 to 1000 variables.

    python -m benchmarks.deterministic --out deterministic-output     # all problems, tens of minutes
    python -m benchmarks.deterministic --problems GENROSE COSINE
    python -m benchmarks.deterministic --methods sanc trust-exact
    python -m benchmarks.deterministic --quick                        # a dozen small problems, seconds
    python -m benchmarks.deterministic --sets moved far scaled fits walks unseen   # other starts, units, problems
    python -m benchmarks.deterministic --from docs/results/deterministic.jsonl.xz  # tables of earlier runs
    python -m benchmarks.deterministic --own-time                     # time outside f, gradients and products

All methods get the same start and the same counted f, gradient and Hessian (products). They end at ‖∇f‖₂ ≤ 1e-8, or at
the `gtol` of the problem if roundoff prevents 1e-8. SciPy's methods are stopped as soon as they evaluate such a
gradient, so their stopping rules cost nothing. `sanc` has its default options. A run *solves* a problem if it ends at a
minimum that `tests/zoo.py` lists; a small gradient is not enough. Runs from saddle starts follow: *stuck* counts those
that end with a small gradient and negative curvature.

A dense Hessian counts as n products. Those of sanc include its certificate, which the other methods lack; each run has
their number.
GALAHAD's ARC runs if `galahad-optrove` is installed, with its direct solver of the subproblem.

The other sets contain:

* moved, far: the problems of up to 100 variables from other starts. In *moved*, each variable is shifted by a normal
  number of standard deviation 0.3·max(|x|, 0.3); in *far*, the start is ten times as far from the origin. A
  second-order point that is not listed counts as solved, too;
* scaled: the same problems in other units, c·f(x/k) with random c from 1e-24 to 1e24 and k from 1e-8 to 1e8;
* fits: the fits of `benchmarks.fits`;
* walks: problems with long paths to a minimum in 10, 100 and 1000 variables;
* unseen: the problems of `benchmarks.unseen`, which no rule was chosen with.

A set has its own limits and methods (`SETS`), unless --iterations, --seconds or --methods are given.

--own-time repeats runs of `sanc` and of SciPy's trust-ncg on the problems of up to 100 variables with the recorded
values of f, gradients and products. It reports the remaining time of a solve, with the certificate of `sanc`, and of an
iteration.

--out writes deterministic.jsonl.xz with one line for each run, table.md and the performance profiles deterministic.png,
and with --own-time own-time.json.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # before OpenMP starts; an import must not bind the process to one core
    os.environ.setdefault("OMP_CANCELLATION", "TRUE")  # GALAHAD's sparse solver requires both
    os.environ.setdefault("OMP_PROC_BIND", "TRUE")

import numpy as np
import scipy.optimize
import torch

import sanc
from benchmarks import fits, unseen
from benchmarks.common import Counted, Floats, StopRun, draw_profile, geometric_mean, median, zoo
from benchmarks.reporting import (
    command,
    machine,
    markdown_table,
    number,
    read_runs,
    table_of_failures,
    table_of_methods,
    write_results,
)

NEWTON = ("trust-krylov", "trust-ncg", "trust-exact", "Newton-CG", "galahad-arc")
FIRST_ORDER = ("L-BFGS-B", "BFGS")
METHODS = ("sanc", *NEWTON, *FIRST_ORDER)
QUICK = (
    "ROSENBROCK", "BEALE", "HELICAL-VALLEY", "BARD", "BOX-3D", "WOOD", "POWELL-SINGULAR", "CUBE", "DENSCHNE", "HAIRY",
    "HIMMELBG", "BROWN-DENNIS",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Methods, and limits of a run, of a set of problems."""

    methods: tuple[str, ...] = METHODS
    iterations: int = 1000
    seconds: float = 120.0


SETS = {
    "zoo": Limits(),
    "moved": Limits(iterations=300, seconds=60.0),
    "far": Limits(iterations=300, seconds=60.0),
    "scaled": Limits(("sanc",), seconds=60.0),
    "fits": Limits(("sanc", "trust-ncg", "trust-exact", "Newton-CG", "L-BFGS-B", "BFGS")),
    "walks": Limits(("sanc", "trust-ncg", "L-BFGS-B")),
    "unseen": Limits(seconds=60.0),
}
STARTS = "saddle starts"
"""Set of the runs from saddle starts, which belong to the table of the zoo."""
LARGEST = 100
"""Largest number of variables in the sets moved, far and scaled."""
STRICT = 1e-4
"""A stationary point with λ_min < −STRICT is a strict saddle."""

# ---------------------------------------------------------------------- problems


def scaled(problem: zoo.ZooProblem, c: float, k: float) -> zoo.ZooProblem:
    """Return c·f(x/k) from k·x0, with tolerances in the same units."""
    fun, minima = problem.fun, tuple(c * value for value in problem.minima)
    limits = {"rtol": problem.rtol, "atol": c * problem.atol, "gtol": problem.gtol * c / k}
    return zoo.ZooProblem(problem.name, lambda x: c * fun(x / k), k * problem.x0, minima, problem.source, **limits)


def variants(which: str, names: Sequence[str]) -> list[zoo.ZooProblem]:
    """Return the problems of a set; `names` selects those of tests/zoo.py."""
    if which in ("fits", "unseen"):
        return fits.problems() if which == "fits" else unseen.problems()
    if which == "zoo":
        return [zoo.BY_NAME[name] for name in names]
    if which == "walks":
        return [problem for n in (10, 100, 1000) for problem in zoo.walks(n)]
    found = []
    for index, problem in enumerate(zoo.PROBLEMS):
        if problem.n > LARGEST or problem.name not in names:
            continue
        rng = np.random.default_rng(index)
        if which == "moved":
            shift = 0.3 * np.maximum(np.abs(problem.x0), 0.3) * rng.standard_normal(problem.n)
            found.append(replace(problem, x0=problem.x0 + shift))
        elif which == "far":
            found.append(replace(problem, x0=10.0 * problem.x0))
        else:
            found.append(scaled(problem, 10.0 ** rng.uniform(-24, 24), 10.0 ** rng.uniform(-8, 8)))
    return found


# ---------------------------------------------------------------------- runs


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
    """Run a method of SciPy without its stopping rules; `Counted` ends the run at ‖∇f‖ ≤ gtol."""
    options: dict[str, Any] = {"maxiter": iterations}
    derivatives: dict[str, Any] = {"jac": counted.jac}
    if method == "trust-exact":
        derivatives["hess"] = counted.hess
    elif method in ("trust-krylov", "trust-ncg", "Newton-CG"):
        derivatives["hessp"] = counted.hessp
    options["xtol" if method == "Newton-CG" else "gtol"] = 0.0
    if method == "L-BFGS-B":
        options |= {"ftol": 0.0, "maxfun": 10**9}
    last = np.array(counted.problem.x0)

    def store(xk: Floats) -> None:
        last[:] = xk

    counted.stop_at = gtol
    try:
        result = scipy.optimize.minimize(
            counted.fun, counted.problem.x0, method=method, callback=store, options=options, **derivatives
        )
    except StopRun:
        return (last, {"ended": "limit"}) if counted.end is None else (counted.end, {"ended": "gradient"})
    return result.x, {"ended": str(result.message)}


def run_galahad(counted: Counted, gtol: float, iterations: int) -> tuple[Floats, dict[str, Any]]:
    """Run GALAHAD's ARC with dense Hessians and otherwise default options.

    The direct solver of the subproblem is used: Lanczos of the iterative solver (version 5.5.3) may produce values that
    are not finite close to the solution.
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
    """Run a method on a problem or from a saddle start, and return its counts and its end point's properties.

    With `anywhere`, and on problems without listed minima, any second-order point counts as solved.
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
    except (StopRun, ArithmeticError, ValueError, np.linalg.LinAlgError) as error:
        x, extra = np.asarray(problem.x0), {"ended": f"{type(error).__name__}: {error}"[:100]}
    spent = time.perf_counter() - clock
    value, g = zoo.value_and_gradient(problem.fun, x)
    norm = float(np.linalg.norm(g))
    lambda_min = None
    if norm <= max(1e-6, gtol):
        lambda_min = float(np.linalg.eigvalsh(zoo.dense_hessian(problem, x))[0])
    saddle = lambda_min is not None and lambda_min < -STRICT
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
        "lambda_min": lambda_min,
        "small_gradient": norm <= gtol,
        "nfev": counted.nfev,
        "njev": counted.njev,
        "products": counted.products,
        "hessians": counted.nhess,
        "certificate": 0,
        "seconds": round(spent, 3),
        **extra,
    }


# ---------------------------------------------------------------------- summary


def costs(runs: Sequence[dict[str, Any]], method: str, names: Sequence[str], kind: str) -> list[float]:
    """Return the cost of a method on each problem, infinite for unsolved ones; products include the certificate's."""
    found = {run["problem"]: run for run in runs if run["method"] == method}
    kinds = (kind, "certificate") if kind == "products" else (kind,)
    return [float(sum(found[name][k] for k in kinds)) if found[name]["solved"] else math.inf for name in names]


def summary(runs: Sequence[dict[str, Any]], stuck: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each method."""
    methods = list(dict.fromkeys(run["method"] for run in runs))
    names = list(dict.fromkeys(run["problem"] for run in runs))
    kinds = ("nfev", "njev", "products")
    table = {(method, kind): np.array(costs(runs, method, names, kind)) for method in methods for kind in kinds}
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
        for kind in kinds:
            spent = table[method, kind]
            row[f"{kind}_all"] = math.nan if first and kind == "products" else median(spent)
            row[f"{kind}_common"] = math.nan if first else median(spent[common])
            if "sanc" in methods:
                both = np.isfinite(spent) & np.isfinite(table["sanc", kind])
                ratios = np.maximum(spent[both], 1.0) / np.maximum(table["sanc", kind][both], 1.0)
                row[f"{kind}_ratio"] = math.nan if first and kind == "products" else geometric_mean(ratios)
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
    """Return the table of methods."""
    return table_of_methods(HEAD, rows)


def legend(rows: Sequence[dict[str, Any]], problems: int, saddles: int) -> str:
    """Return the meaning of the columns."""
    certificate = next((row["certificate"] for row in rows if row["method"] == "sanc"), math.nan)
    return (
        f"{problems} problems and {saddles} saddle starts. f, Hv, g: median of evaluations, Hessian products and "
        f"gradients.\nall: over all problems, unsolved ones infinite; common: over the {rows[0]['common']} that every "
        "Newton-type method solved.\nratio: geometric mean of the method's count over that of sanc on problems that "
        "both solve.\nA dense Hessian counts as n products. The certificate of sanc takes a median of "
        f"{certificate:.0f} more products."
    )


WORK_LIMITS = (300, 1000, 2000)
"""Limits on values, gradients and products together: the last is what 1000 iterations take at least."""


def report(runs: Sequence[dict[str, Any]]) -> str:
    """Return the tables of all sets of problems."""
    texts = []
    for name in [name for name in SETS if any(run["set"] == name for run in runs)]:
        mine = [run for run in runs if run["set"] == name]
        stuck = [run for run in runs if run["set"] == STARTS and name == "zoo"]
        rows = summary(mine, stuck)
        problems, starts = (len({run["problem"] for run in some}) for some in (mine, stuck))
        texts += [name, table_of(rows), legend(rows, problems, starts), table_of_failures(mine)]
    return "\n\n".join([*texts, "The same limit of evaluations", table_within_limits(runs)])


def evaluations(run: dict[str, Any]) -> int:
    """Return the values, gradients and products of a run, with those of its certificate."""
    return int(sum(run[kind] for kind in ("nfev", "njev", "products", "certificate")))


def table_within_limits(runs: Sequence[dict[str, Any]]) -> str:
    """Return how many problems each method solves within the same evaluations.

    The limit of 1000 iterations stopped no run earlier, since an iteration takes at least one value and one gradient.
    """
    sets = [name for name in SETS if any(run["set"] == name for run in runs) and name != "scaled"]
    methods = list(dict.fromkeys(run["method"] for run in runs if run["set"] == "zoo"))
    lines = []
    for name in sets:
        for limit in WORK_LIMITS:
            found = [run for run in runs if run["set"] == name]
            solved = Counter(run["method"] for run in found if run["solved"] and evaluations(run) <= limit)
            made = {run["method"] for run in found}
            lines.append([name, number(limit, ".0f"), *(str(solved[m]) if m in made else "–" for m in methods)])
    return markdown_table(["set", "evaluations", *methods], lines, left=1)


class Stuck(NamedTuple):
    """Exact saddles, starts that lead to one, and the numbers at which sanc and each peer are stuck."""

    exact: int
    hidden: int
    ours: int
    peers: list[int]


def stuck(runs: Sequence[dict[str, Any]]) -> Stuck:
    """Return the starts at which the methods are stuck."""
    starts = [run for run in runs if run["set"] == STARTS]
    names, hidden = {run["problem"] for run in starts}, {start.name for start in zoo.HIDDEN}
    counts = Counter({run["method"]: 0 for run in starts})
    counts.update(run["method"] for run in starts if run["saddle"])
    return Stuck(len(names - hidden), len(names & hidden), counts.pop("sanc"), list(counts.values()))


def stuck_in_words(runs: Sequence[dict[str, Any]]) -> str:
    """Return at how many of the saddle starts sanc and SciPy's methods are stuck."""
    exact, hidden, ours, peers = stuck(runs)
    return (
        f"`sanc.minimize` is stuck at {ours} of {exact + hidden} starts ({exact} exact saddles, {hidden} that lead to "
        f"one), and SciPy's methods at {min(peers)} to {max(peers)}"
    )


def solved(runs: Sequence[dict[str, Any]], which: str) -> tuple[int, int, int]:
    """Return the problems of a set, and how many of them sanc and the best peer solve."""
    mine = [run for run in runs if run["set"] == which]
    counts = Counter(run["method"] for run in mine if run["solved"])
    return len({run["problem"] for run in mine}), counts.pop("sanc"), max(counts.values())


def in_words(runs: Sequence[dict[str, Any]]) -> str:
    """Return how many problems sanc and the best peer solve, and the medians of sanc and the lowest of the peers."""
    (zoo_size, ours, best), (size, further, best_further) = (solved(runs, which) for which in ("zoo", "unseen"))
    medians = []
    for which in ("zoo", "unseen"):
        rows = summary([run for run in runs if run["set"] == which], [])
        newton = [row for row in rows if row["method"] in NEWTON]
        (sanc_row,) = (row for row in rows if row["method"] == "sanc")
        for kind in ("nfev_common", "products_common"):
            medians += [f"{sanc_row[kind]:g}", f"{min(row[kind] for row in newton):g}"]
    f, f_peer, products, products_peer, *others = medians
    return (
        f"`sanc.minimize` with default options solves {ours} of {zoo_size} test functions and {further} of {size} "
        "problems that were written after every choice had been made; the best of six SciPy methods solve "
        f"{best} and {best_further}. On the functions that all Newton-type methods solve, it takes a median of {f} "
        f"evaluations and {products} Hessian products, its certificate included; the lowest medians of the peers are "
        f"{f_peer} and {products_peer}. On the further problems it takes {others[0]} and {others[2]}; the lowest "
        f"medians of the peers are {others[1]} and {others[3]}."
    )


def draw(runs: Sequence[dict[str, Any]]) -> Any:
    """Draw the performance profiles of evaluations and products."""
    from matplotlib.figure import Figure

    def style(method: str) -> dict[str, Any]:
        line = {"lw": 2.6, "color": "black", "zorder": 5} if method == "sanc" else {"lw": 1.3}
        return {"color": f"C{METHODS.index(method)}", "label": method} | line

    methods = list(dict.fromkeys(run["method"] for run in runs))
    names = list(dict.fromkeys(run["problem"] for run in runs))
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = {"nfev": "evaluations of f", "products": "Hessian products"}
    for axes, (kind, title) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        shown = [method for method in methods if kind == "nfev" or method not in FIRST_ORDER]
        draw_profile(axes, {method: costs(runs, method, names, kind) for method in shown}, 32.0, style)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="τ: cost at most τ times the lowest", title=title)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel(f"share of the {len(names)} problems")
    figure.axes[0].legend(loc="lower right", fontsize=8)
    return figure


# ---------------------------------------------------------------------- time of the minimiser itself


def own_seconds(method: str, problem: zoo.ZooProblem, iterations: int, repeats: int) -> tuple[float, int, bool]:
    """Return the seconds of a run without evaluations, its iterations, and whether it solved the problem.

    The run is repeated with the recorded evaluations of the first; the shortest time is returned.
    """
    evaluations: list[Any] = []

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Floats) -> Any:
            evaluations.append(call(*arguments))
            return evaluations[-1]

        return wrapped

    minimise = sanc.minimize if method == "sanc" else partial(scipy.optimize.minimize, method=method)
    limits = {"tol": problem.gtol, "options": {"maxiter": iterations}}
    f, jac, _, hessp = (recorded(call) for call in zoo.numpy_functions(problem))
    result: Any = minimise(f, problem.x0, jac=jac, hessp=hessp, **limits)
    times = []
    for _ in range(repeats):
        recording = iter(evaluations)
        clock = time.thread_time()
        minimise(
            lambda x: next(recording),  # noqa: B023 - used within this pass of the loop
            problem.x0,
            jac=lambda x: next(recording),  # noqa: B023
            hessp=lambda x, v: next(recording),  # noqa: B023
            **limits,
        )
        times.append(time.thread_time() - clock)
    return min(times), max(result.nit, 1), problem.reached(float(result.fun)) is not None


def own_time(names: Sequence[str], iterations: int, repeats: int = 5) -> list[dict[str, Any]]:
    """Compare the times of `sanc` and trust-ncg without evaluations, on problems that both solve."""
    rows = []
    for problem in (zoo.BY_NAME[name] for name in names):
        if problem.n > LARGEST:
            continue
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            (ours, our_steps, our_end), (theirs, their_steps, their_end) = (
                own_seconds(method, problem, iterations, repeats) for method in ("sanc", "trust-ncg")
            )
        if our_end and their_end:
            per_step = (ours / our_steps) / (theirs / their_steps)
            row = {"problem": problem.name, "n": problem.n, "sanc": ours, "trust-ncg": theirs}
            rows.append(row | {"per_solve": ours / theirs, "per_iteration": per_step})
            print(f"{problem.name:28s} n = {problem.n:3d}  {1e3 * ours:8.2f} ms  {1e3 * theirs:8.2f} ms", flush=True)
    return rows


def own_time_summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the median ratios."""
    solve, step = (median([row[kind] for row in rows]) for kind in ("per_solve", "per_iteration"))
    return (
        f"In the median of the {len(rows)} problems that both solve, sanc takes {solve:.2f} times as long as trust-ncg "
        f"for a solve, its certificate included, and {step:.2f} times for an iteration."
    )


# ---------------------------------------------------------------------- command


def run_all(which: str, problems: Sequence[Any], limits: Limits) -> list[dict[str, Any]]:
    """Run every method on every problem of a set, and print a line for each problem."""
    runs: list[dict[str, Any]] = []
    for count, problem in enumerate(problems, 1):
        print(f"{count:4d}/{len(problems)}  {problem.name:28s}", end="", flush=True)
        for method in limits.methods:
            run = run_one(method, problem, limits.iterations, limits.seconds, anywhere=which in ("moved", "far"))
            runs.append({"set": which, **run})
            mark = " " if run["solved"] else "!" if run["saddle"] else "-"
            print(f" {run['nfev']:5d}{mark}", end="", flush=True)
        print()
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    files = "deterministic.jsonl.xz, table.md and deterministic.png"
    parser = command(__doc__, quick="a dozen small problems and a few saddle starts, seconds", out=files)
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="problems of tests/zoo.py; by default all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="by default those of each set, if installed")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["zoo"], help="sets of problems; by default zoo")
    parser.add_argument("--own-time", action="store_true", help="measure the time outside f, gradients and products")
    parser.add_argument("--iterations", type=int, help="iteration limit of a run; by default that of each set")
    parser.add_argument("--seconds", type=float, help="time limit of a run; by default that of each set")
    parser.add_argument("--from", dest="results", type=Path, metavar="FILE", help="tables of earlier runs; no runs")
    options = parser.parse_args(arguments)
    names = options.problems or (QUICK if options.quick else [problem.name for problem in zoo.PROBLEMS])
    unknown = [name for name in names if name not in zoo.BY_NAME]
    if unknown:
        parser.error(f"--problems {' '.join(unknown)}: not in tests/zoo.py")
    torch.set_num_threads(1)
    if options.own_time:
        rows = own_time(names, options.iterations or SETS["zoo"].iterations)
        print(f"\n{own_time_summary(rows)}")
        write_results(options.out, {"own-time.json": {"machine": machine(), "rows": rows}})
        return 0
    if options.results is not None:
        runs = read_runs(options.results)
    else:
        runs = run_sets(options, names)
        write_results(options.out, {"deterministic.jsonl.xz": runs})
    text = report(runs)
    print(f"\n{text}\n", flush=True)
    first = [run for run in runs if run["set"] == runs[0]["set"]]
    write_results(options.out, {"table.md": text, "deterministic.png": lambda: draw(first)})
    return 0


def run_sets(options: argparse.Namespace, names: Sequence[str]) -> list[dict[str, Any]]:
    """Run the sets that the options name, and the saddle starts with the whole zoo."""
    given = {name: getattr(options, name) for name in ("methods", "iterations", "seconds")}
    given = {name: value for name, value in given.items() if value is not None}
    runs: list[dict[str, Any]] = []
    for which in options.sets:
        limits = replace(SETS[which], **given)
        if "galahad-arc" in limits.methods and find_spec("galahad") is None:
            print("galahad-arc is left out: galahad-optrove is not installed")
            limits = replace(limits, methods=tuple(name for name in limits.methods if name != "galahad-arc"))
        runs += run_all(which, variants(which, names), limits)
        if which == "zoo" and not options.problems:
            starts = [*zoo.SADDLES, *zoo.HIDDEN][:: 10 if options.quick else 1]
            runs += run_all(STARTS, starts, limits)
    return runs


if __name__ == "__main__":
    sys.exit(main())
