"""Compare preset "robust" without tuning with the paper's tuned SANC on the paper's logistic regressions.

    python -m benchmarks.stochastic --out stochastic-output       # six sets, two σ0, ten seeds
    python -m benchmarks.stochastic --sets w1a a9a --runs 3 --workers 2
    python -m benchmarks.stochastic --quick                       # breast_cancer, two seeds, seconds
    python -m benchmarks.stochastic --from docs/results/stochastic.json.xz    # table and figure of earlier runs

The problem is logistic regression with the paper's nonconvex penalty Σ w²/(1+w²), from w = (1, …, 1). Samples have
⌈n/20⌉ rows, and the budget is 20 n `paper_calls` (gradients and Hessian products of components; values do not count).
There are three methods:

* robust: `sanc.minimize(…, preset="robust")` with σ0 as its only option;
* paper: `preset="paper"` with the L1 and L2 that the paper tuned for each set, and ρ measured on all rows;
* sgd: step size 0.01. It has no σ and is run once per seed.

f* is the final value of `sanc.minimize` on all rows, or the lowest value of any run if that is lower. After every
iteration, f is evaluated on all rows, outside the counts. On sets of more than 100,000 rows (covtype) this happens only
up to 4 n calls, and then once in n/2 calls. A data set without files is reported and left out. HIGGS may be a subset.

--out writes stochastic.json.xz (again after each set and seed), table.md and stochastic.png.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import numpy as np

import sanc
from benchmarks.common import set_threads, worker_pool
from benchmarks.reporting import command, load_sets, markdown_table, number, read_text, write_results
from sanc.lab.experiments import CONSTANTS

SETS = ("w1a", "w8a", "a9a", "ijcnn1", "covtype", "higgs")
SIGMAS = (1.0, 0.001)
EPOCHS = 20.0
TARGET = 1.001
"""A run reaches the target if f ≤ 1.001 f*."""
LARGE = 100_000
"""Number of rows above which f is evaluated on a grid."""
DENSE, SPARSE = 4.0, 0.5
"""The grid, in multiples of n calls: every iteration up to the first number, then once in the second."""

_PROBLEMS: dict[str, sanc.problems.Logistic] = {}

# ---------------------------------------------------------------------- runs


def problem_of(name: str, data_dir: Path | None) -> sanc.problems.Logistic | None:
    """Return the problem of a data set, loaded once in a process; None without its files."""
    if name not in _PROBLEMS:
        _PROBLEMS.clear()  # covtype is large
        for _, loaded in load_sets([name], data_dir):
            _PROBLEMS[name] = sanc.problems.Logistic(loaded.X, loaded.y, penalty="nonconvex", strength=1.0)
    return _PROBLEMS.get(name)


def options_of(method: str, name: str, sigma0: float | None) -> dict[str, Any]:
    """Return the options of a method that differ between methods."""
    if method == "sgd":
        return {"method": "sgd", "preset": "paper", "lr": 0.01}
    if method == "paper":
        first, second = CONSTANTS.get(name, (10.0, 10.0))
        return {"preset": "paper", "L1": first, "L2": second, "sigma0": sigma0}
    return {"preset": "robust", "sigma0": sigma0}


def run_one(
    problem: sanc.problems.Logistic, name: str, method: str, sigma0: float | None, seed: int, epochs: float
) -> dict[str, Any]:
    """Make one run, and return its trace."""
    n = problem.n
    start = np.ones(problem.dim)
    trace: dict[str, list[Any]] = {"calls": [0], "total": [0], "loss": [problem.value(start)]}
    last = 0

    def evaluate(intermediate_result: Any) -> None:
        nonlocal last
        calls = intermediate_result.record.calls
        before, last = last, calls.paper_calls
        grid = SPARSE * n
        if n <= LARGE or last <= DENSE * n or math.floor(last / grid) > math.floor(before / grid):
            trace["calls"].append(last)
            trace["total"].append(calls.total)
            trace["loss"].append(problem.value(intermediate_result.x))

    clock = time.perf_counter()
    result = sanc.minimize(
        problem,
        start,
        batch_size=-(-n // 20),
        seed=seed,
        max_calls=epochs * n,
        max_iter=10**9,
        callback=evaluate,
        certify=False,
        **options_of(method, name, sigma0),
    )
    seconds = time.perf_counter() - clock
    if trace["calls"][-1] < result.calls.paper_calls:
        trace["calls"].append(result.calls.paper_calls)
        trace["total"].append(result.calls.total)
        trace["loss"].append(result.fun)
    late = result.history[len(result.history) // 2 :]
    sigmas = [record.sigma for record in result.history if not math.isnan(record.sigma)]
    return {
        "set": name,
        "n": n,
        "dim": problem.dim,
        "method": method,
        "sigma0": sigma0,
        "seed": seed,
        "ended": result.status.name.lower().replace("_", " "),
        "iterations": result.nit,
        "seconds": seconds,
        "final": float(result.fun),
        "sigma_min": min(sigmas, default=None),
        "sigma_max": max(sigmas, default=None),
        "stayed_late": sum(record.branch is sanc.Branch.STAYED for record in late) / max(len(late), 1),
        "trace": trace,
    }


def job(name: str, seed: int | None, epochs: float, data_dir: Path | None) -> dict[str, Any]:
    """Make all runs of a set and seed; without a seed, minimise on all rows to find f*."""
    problem = problem_of(name, data_dir)
    assert problem is not None
    if seed is None:
        clock = time.perf_counter()
        result = sanc.minimize(problem, np.ones(problem.dim))
        about = {"set": name, "reference": float(result.fun), "ended": result.status.name.lower().replace("_", " ")}
        return about | {"seconds": time.perf_counter() - clock, "runs": []}
    runs = [run_one(problem, name, m, sigma0, seed, epochs) for sigma0 in SIGMAS for m in ("robust", "paper")]
    runs.append(run_one(problem, name, "sgd", None, seed, epochs))
    return {"set": name, "seed": seed, "runs": runs}


def jobs_done(todo: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield finished jobs, run in this process or in several."""
    if workers <= 1:
        for task in todo:
            yield task, job(*task)
        return
    with worker_pool(workers) as pool:
        futures = {pool.submit(job, *task): task for task in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# ---------------------------------------------------------------------- table


def calls_to(run: Mapping[str, Any], target: float, kind: str = "calls") -> float:
    """Return the calls until f ≤ target in units of n, infinite if the run does not reach it."""
    for spent, loss in zip(run["trace"][kind], run["trace"]["loss"], strict=True):
        if loss <= target:
            return float(spent) / run["n"]
    return math.inf


def lowest(document: Mapping[str, Any], name: str) -> float:
    """Return f* of a set."""
    values = [job["reference"] for job in document["references"] if job["set"] == name]
    for run in document["runs"]:
        if run["set"] == name:
            values += [run["final"], *run["trace"]["loss"]]
    return min(value for value in values if math.isfinite(value))


def summary(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each set and σ0."""
    rows = []
    for name in dict.fromkeys(run["set"] for run in document["runs"]):
        star = lowest(document, name)
        mine = [run for run in document["runs"] if run["set"] == name]
        sgd = [run["final"] - star for run in mine if run["method"] == "sgd"]
        for sigma0 in dict.fromkeys(run["sigma0"] for run in mine if run["method"] != "sgd"):
            row: dict[str, Any] = {"set": name, "sigma0": sigma0, "star": star, "n": mine[0]["n"]}
            for method in ("robust", "paper"):
                runs = [run for run in mine if run["method"] == method and run["sigma0"] == sigma0]
                for kind in ("calls", "total"):
                    row[f"{kind}_{method}"] = float(np.median([calls_to(run, TARGET * star, kind) for run in runs]))
                row[f"gap_{method}"] = float(np.mean([run["final"] - star for run in runs]))
                if method == "robust":
                    row |= {
                        "sigma_min": min(run["sigma_min"] for run in runs),
                        "sigma_max": max(run["sigma_max"] for run in runs),
                        "stayed": float(np.mean([run["stayed_late"] for run in runs])),
                    }
            row["gap_sgd"] = float(np.mean(sgd))
            rows.append(row)
    return rows


HEAD = {
    "set": "set",
    "sigma0": "σ0",
    "calls_robust": "calls/n, robust",
    "calls_paper": "calls/n, paper",
    "total_robust": "all/n, robust",
    "total_paper": "all/n, paper",
    "gap_robust": "f−f*, robust",
    "gap_paper": "f−f*, paper",
    "gap_sgd": "f−f*, sgd",
    "sigma_min": "min σ",
    "sigma_max": "max σ",
    "stayed": "stayed",
}
LEGEND = f"""calls: median of paper_calls, in units of n, until f ≤ {TARGET} f*, ∞ if the median run does not reach it;
all: the same with values counted. f−f*: mean at the end of the budget. σ and stayed are those of robust; stayed is the
share of rejections among the later half of the iterations."""


def form(key: str, cell: Any) -> str:
    """Format a cell of the table."""
    if not isinstance(cell, float):
        return str(cell)
    if key.startswith(("calls", "total", "stayed")):
        return number(cell, ".2f")
    return number(cell, ".2g" if key.startswith("gap") or "_m" in key else "g")


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the rows."""
    return markdown_table(list(HEAD.values()), [[form(key, row[key]) for key in HEAD] for row in rows])


def in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how the calls and the final values of robust compare with those of the other methods."""
    shares = [100 * row["calls_robust"] / row["calls_paper"] for row in rows]
    lower = {method: sum(row["gap_robust"] < row[f"gap_{method}"] for row in rows) for method in ("paper", "sgd")}
    smallest = min(rows, key=lambda row: row["n"])["set"]
    on_smallest, others = (
        [f"{share:.0f}" for row, share in zip(rows, shares, strict=True) if (row["set"] == smallest) is kind]
        for kind in (True, False)
    )
    return (
        f"The default reaches the target in {min(shares):.0f} to {max(shares):.0f} % of the calls of the paper's SANC: "
        f"in {' and '.join(on_smallest)} % on {smallest}, the smallest set, and in at most {max(others, key=int)} % on "
        f"the others. It ends lower than the paper's SANC in {lower['paper']} of {len(rows)} rows, and lower than SGD "
        f"in {lower['sgd']}."
    )


# ---------------------------------------------------------------------- figure

STYLES: Mapping[tuple[str, float | None], dict[str, Any]] = {
    ("robust", 1.0): {"color": "black", "lw": 2.0, "zorder": 5, "label": "robust, σ0 = 1"},
    ("robust", 0.001): {"color": "black", "lw": 2.0, "ls": (0, (3, 1.5)), "zorder": 5, "label": "robust, σ0 = 0.001"},
    ("paper", 1.0): {"color": "C0", "lw": 1.4, "label": "paper, tuned, σ0 = 1"},
    ("paper", 0.001): {"color": "C0", "lw": 1.4, "ls": (0, (3, 1.5)), "label": "paper, tuned, σ0 = 0.001"},
    ("sgd", None): {"color": "C1", "lw": 1.4, "label": "SGD, 0.01"},
}


def draw(document: Mapping[str, Any]) -> Any:
    """Draw f − f* over calls, one panel for each set: median and range of the seeds."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(run["set"] for run in document["runs"]))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(4.2 * columns + 0.4, 3.3 * lines + 0.7))
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        star = lowest(document, name)
        floor = max(1e-9 * abs(star), 1e-12)
        for (method, sigma0), style in STYLES.items():
            runs = [
                run for run in document["runs"] if (run["set"], run["method"], run["sigma0"]) == (name, method, sigma0)
            ]
            if not runs:
                continue
            grid = np.linspace(0, max(run["trace"]["calls"][-1] for run in runs) / runs[0]["n"], 401)
            curves = []
            for run in runs:
                calls, losses = np.array(run["trace"]["calls"]) / run["n"], np.array(run["trace"]["loss"], float)
                curves.append(losses[np.searchsorted(calls, grid, side="right") - 1] - star)
            gaps = np.maximum(np.array(curves), floor)
            axis.plot(grid, np.median(gaps, axis=0), **style)
            axis.fill_between(grid, gaps.min(axis=0), gaps.max(axis=0), color=style["color"], alpha=0.12, lw=0)
        axis.axhline((TARGET - 1) * star, color="grey", lw=0.8, ls=":", zorder=1)
        axis.set_yscale("log")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("f − f*")
    for axis in list(axes.flat)[max(0, len(names) - columns) : len(names)]:
        axis.set_xlabel("paper_calls / n")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    figure.legend(handles, labels, loc="lower center", ncol=5 if columns > 1 else 2, fontsize=8, frameon=False)
    return figure


# ---------------------------------------------------------------------- command


def report(document: Mapping[str, Any], folder: Path | None) -> int:
    """Print the table; write the table and the figure."""
    rows = summary(document)
    text = f"{table_of(rows)}\n\n{LEGEND}\n\n{in_words(rows)}"
    print(f"\n{text}")
    write_results(folder, {"table.md": text, "stochastic.png": lambda: draw(document)})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    files = "stochastic.json.xz, table.md and stochastic.png"
    parser = command(__doc__, quick="breast_cancer, two seeds, 8 n calls, seconds", out=files, data=True)
    parser.add_argument("--sets", nargs="+", choices=[*SETS, "breast_cancer"], help="data sets; by default six")
    parser.add_argument("--runs", type=int, help="seeds; by default 10")
    parser.add_argument("--epochs", type=float, help="budget in paper_calls, in multiples of n; by default 20")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--from", dest="results", type=Path, metavar="FILE", help="table and figure of earlier runs")
    options = parser.parse_args(arguments)
    if options.results is not None:
        return report(json.loads(read_text(options.results)), options.out)
    names = options.sets or (["breast_cancer"] if options.quick else list(SETS))
    seeds = options.runs or (2 if options.quick else 10)
    epochs = options.epochs or (8.0 if options.quick else EPOCHS)
    if seeds < 1 or options.workers < 1 or epochs <= 0:
        parser.error("--runs, --workers and --epochs must be positive")
    set_threads(1)
    missing = [name for name in names if problem_of(name, options.data_dir) is None]
    names = [name for name in names if name not in missing]
    if options.workers > 1:
        _PROBLEMS.clear()  # the workers load their data
    if not names:
        print("no data set has files")
        return 1
    document: dict[str, Any] = {"sanc": sanc.__version__, "epochs": epochs, "seeds": seeds, "missing": missing}
    document |= {"references": [], "runs": []}
    place = {name: index for index, name in enumerate(names)}
    todo = [(name, seed, epochs, options.data_dir) for name in names for seed in (None, *range(seeds))]
    clock = time.perf_counter()
    for count, (task, done) in enumerate(jobs_done(todo, options.workers), 1):
        head = f"{count:4d}/{len(todo)}  {time.perf_counter() - clock:6.0f} s  {task[0]:13s}"
        if task[1] is None:
            document["references"].append({key: done[key] for key in ("set", "reference", "ended", "seconds")})
            print(f"{head} f* ≤ {done['reference']:.8g}, {done['ended']}, {done['seconds']:.1f} s", flush=True)
        else:
            document["runs"] += done["runs"]
            ends = ", ".join(
                f"{run['method']}{'' if run['sigma0'] is None else '/' + format(run['sigma0'], 'g')} {run['final']:.6g}"
                for run in done["runs"]
            )
            print(f"{head} seed {task[1]}: {ends}", flush=True)
        document["runs"].sort(key=lambda run: (place[run["set"]], run["seed"]))
        write_results(options.out, {"stochastic.json.xz": document})
    return report(document, options.out)


if __name__ == "__main__":
    sys.exit(main())
