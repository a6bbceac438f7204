"""Ask whether the preset "robust", untuned, keeps up with the paper's tuned SANC where the paper's experiments are.

    python -m benchmarks.stochastic --out stochastic-output       # six sets, two σ0, ten seeds
    python -m benchmarks.stochastic --sets w1a a9a --runs 3 --workers 2
    python -m benchmarks.stochastic --quick                       # breast_cancer, two seeds, seconds
    python -m benchmarks.stochastic --plot stochastic-output/stochastic.json

Logistic regression with the paper's nonconvex penalty Σ w²/(1+w²), from w = (1, …, 1), with samples of ⌈n/20⌉ rows and
a budget of 20 n `paper_calls` (gradients and Hessian products of components; values are free). Three methods:

* robust: `sanc.minimize(…, preset="robust")` without any option but σ0;
* paper: `preset="paper"` with the L1 and L2 that the paper tuned for each set, and ρ measured on all rows;
* sgd: step size 0.01. It has no σ and is run once per seed.

f* is the value that `sanc.minimize` on all rows ends at, or the lowest value of any run where that is lower. f is
evaluated on all rows, outside the counts, after every iteration; on sets of more than 100,000 rows (covtype) only up to
4 n calls, and then once in n/2 calls. Files are looked for where `sanc.lab` looks for them: --data-dir, SANC_DATA or
the user's cache; sets that are not there are named and left out. HIGGS is a subset where only a subset is there.

--out gets stochastic.json (rewritten whenever a set and seed is finished), table.md and stochastic.png. With --check
the exit status is 1 where a column of the table says "fail".
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sanc
from benchmarks.common import plain_table
from sanc.lab.experiments import CONSTANTS
from sanc.lab.runs import load_data

SETS = ("w1a", "w8a", "a9a", "ijcnn1", "covtype", "higgs")
SIGMAS = (1.0, 0.001)
EPOCHS = 20.0
CLOSE = 1.001
"""A run has arrived where f ≤ 1.001 f*."""
LARGE = 100_000
"""Rows above which f is evaluated on a grid."""
DENSE, SPARSE = 4.0, 0.5
"""That grid, in multiples of n calls: every iteration up to the first, then once in the second."""
RESOLVED = 1e-6
"""Differences of f below this part of f* do not decide a comparison."""

BOUNDS = (1e-8, 1e8)
"""Floor and ceiling of σ in "robust" with samples; a σ that rests there no longer adapts."""

_PROBLEMS: dict[str, sanc.problems.Logistic] = {}

# ---------------------------------------------------------------------- one run


def problem_of(name: str, data_dir: Path | None) -> sanc.problems.Logistic:
    """Load a set, once in a process."""
    if name not in _PROBLEMS:
        _PROBLEMS.clear()  # covtype is large
        loaded = load_data(name, data_dir, "float64")
        _PROBLEMS[name] = sanc.problems.Logistic(loaded.X, loaded.y, penalty="nonconvex", strength=1.0)
    return _PROBLEMS[name]


def options_of(method: str, name: str, sigma0: float | None) -> dict[str, Any]:
    """Return what a method is called with, beside what all have in common."""
    if method == "sgd":
        return {"method": "sgd", "preset": "paper", "lr": 0.01}
    if method == "paper":
        first, second = CONSTANTS.get(name, (10.0, 10.0))
        return {"preset": "paper", "L1": first, "L2": second, "sigma0": sigma0}
    return {"preset": "robust", "sigma0": sigma0}


def run_one(
    problem: sanc.problems.Logistic, name: str, method: str, sigma0: float | None, seed: int, epochs: float
) -> dict[str, Any]:
    """Make one run and return its trace."""
    n = problem.n
    start = np.ones(problem.dim)
    trace: dict[str, list[Any]] = {"calls": [0], "total": [0], "loss": [problem.value(start)]}
    last = 0

    def watch(intermediate_result: Any) -> None:
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
        callback=watch,
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
    """Make all runs of a set and seed; without a seed, find f* on all rows."""
    problem = problem_of(name, data_dir)
    if seed is None:
        clock = time.perf_counter()
        result = sanc.minimize(problem, np.ones(problem.dim))
        ended = result.status.name.lower().replace("_", " ")
        return {
            "set": name,
            "reference": float(result.fun),
            "ended": ended,
            "seconds": time.perf_counter() - clock,
            "runs": [],
        }
    runs = [run_one(problem, name, m, sigma0, seed, epochs) for sigma0 in SIGMAS for m in ("robust", "paper")]
    runs.append(run_one(problem, name, "sgd", None, seed, epochs))
    return {"set": name, "seed": seed, "runs": runs}


def _prepare() -> None:
    torch.set_num_threads(1)


def jobs_done(todo: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the jobs as they are finished: in this process, or in several."""
    if workers <= 1:
        for task in todo:
            yield task, job(*task)
        return
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the workers read them when they start
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare) as pool:
        futures = {pool.submit(job, *task): task for task in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# ---------------------------------------------------------------------- what came out


def arrival(run: Mapping[str, Any], target: float, what: str = "calls") -> float:
    """Count the calls, in units of n, until f ≤ target, infinite where that was not reached."""
    for spent, loss in zip(run["trace"][what], run["trace"]["loss"], strict=True):
        if loss <= target:
            return float(spent) / run["n"]
    return math.inf


def lowest(document: Mapping[str, Any], name: str) -> float:
    """f* of a set."""
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
                times = [arrival(run, CLOSE * star) for run in runs]
                row |= {
                    f"calls_{method}": float(np.median(times)),
                    f"total_{method}": float(np.median([arrival(run, CLOSE * star, "total") for run in runs])),
                    f"arrived_{method}": sum(map(math.isfinite, times)),
                    f"gap_{method}": float(np.mean([run["final"] - star for run in runs])),
                }
                if method == "robust":
                    row |= {
                        "runs": len(runs),
                        "sigma_min": min(run["sigma_min"] for run in runs),
                        "sigma_max": max(run["sigma_max"] for run in runs),
                        "stayed": float(np.mean([run["stayed_late"] for run in runs])),
                    }
            row["gap_sgd"] = float(np.mean(sgd))
            noise = RESOLVED * abs(star)
            row |= {
                "arrives": row["arrived_robust"] == row["runs"],
                "sooner": math.isfinite(row["calls_robust"]) and row["calls_robust"] <= row["calls_paper"],
                "lower": row["gap_robust"] <= max(min(row["gap_paper"], row["gap_sgd"]), noise),
                "moves": row["stayed"] < 1 / 3,
                "bounded": BOUNDS[0] < row["sigma_min"] <= row["sigma_max"] < BOUNDS[1],
            }
            rows.append(row)
    return rows


CHECKS = ("arrives", "sooner", "lower", "moves", "bounded")
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
    "arrives": "arrives",
    "sooner": "sooner",
    "lower": "lower",
    "moves": "moves",
    "bounded": "bounded",
}
LEGEND = f"""calls: median of paper_calls, in units of n, until f ≤ {CLOSE} f*; all: the same with values counted.
f−f*: mean at the end of the budget. σ and "stayed", the share of the later half of the iterations that stayed, are of
robust. arrives: every run of robust got to {CLOSE} f*. sooner: robust needs no more calls than paper. lower: it ends no
higher than paper and sgd, differences below {RESOLVED:g} f* left aside. moves: it stayed in fewer than a third of these
iterations. bounded: σ of robust kept off its floor and its ceiling. ∞: the median run did not get there."""


def form(key: str, cell: Any) -> str:
    """Write a cell of the table."""
    if isinstance(cell, bool):
        return "pass" if cell else "fail"
    if not isinstance(cell, float):
        return str(cell)
    if math.isinf(cell) or math.isnan(cell):
        return "∞" if math.isinf(cell) else "–"
    if key.startswith(("calls", "total", "stayed")):
        return f"{cell:.2f}"
    return f"{cell:.2g}" if key.startswith("gap") or "_m" in key else f"{cell:g}"


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay the rows out as a Markdown table."""
    return plain_table(list(HEAD.values()), [[form(key, row[key]) for key in HEAD] for row in rows])


# ---------------------------------------------------------------------- picture

LOOKS: Mapping[tuple[str, float | None], dict[str, Any]] = {
    ("robust", 1.0): {"color": "black", "lw": 2.0, "zorder": 5, "label": "robust, σ0 = 1"},
    ("robust", 0.001): {"color": "black", "lw": 2.0, "ls": (0, (3, 1.5)), "zorder": 5, "label": "robust, σ0 = 0.001"},
    ("paper", 1.0): {"color": "C0", "lw": 1.4, "label": "paper, tuned, σ0 = 1"},
    ("paper", 0.001): {"color": "C0", "lw": 1.4, "ls": (0, (3, 1.5)), "label": "paper, tuned, σ0 = 0.001"},
    ("sgd", None): {"color": "C1", "lw": 1.4, "label": "SGD, 0.01"},
}


def picture(document: Mapping[str, Any], path: Path) -> None:
    """Draw loss − f* over calls, one panel for each set: median and range of the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(run["set"] for run in document["runs"]))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(4.2 * columns + 0.4, 3.3 * lines + 0.7))
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        star = lowest(document, name)
        floor = max(1e-9 * abs(star), 1e-12)
        for (method, sigma0), look in LOOKS.items():
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
            axis.plot(grid, np.median(gaps, axis=0), **look)
            axis.fill_between(grid, gaps.min(axis=0), gaps.max(axis=0), color=look["color"], alpha=0.12, lw=0)
        axis.axhline((CLOSE - 1) * star, color="grey", lw=0.8, ls=":", zorder=1)
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
    figure.savefig(path, dpi=110)


# ---------------------------------------------------------------------- the command


def save(document: Mapping[str, Any], folder: Path) -> None:
    """Replace the JSON as a whole."""
    path = folder / "stochastic.json"
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(document) + "\n", encoding="utf-8")
    scratch.replace(path)


def report(document: Mapping[str, Any], folder: Path | None) -> bool:
    """Print and write the table and the picture; true where nothing failed."""
    rows = summary(document)
    text = f"{table_of(rows)}\n\n{LEGEND}"
    print(f"\n{text}")
    if folder is not None:
        (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        picture(document, folder / "stochastic.png")
        print(f"written to {folder}: table.md, stochastic.png")
    return all(row[check] for row in rows for check in CHECKS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sets", nargs="+", choices=[*SETS, "breast_cancer"], help="data sets; by default the six")
    parser.add_argument("--runs", type=int, help="seeds; by default 10")
    parser.add_argument("--epochs", type=float, help="budget in paper_calls, in multiples of n; by default 20")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--data-dir", type=Path, help="folder of the data files")
    parser.add_argument("--out", type=Path, help="folder for the JSON, the table and the picture")
    parser.add_argument("--quick", action="store_true", help="breast_cancer, two seeds, 8 n calls")
    parser.add_argument("--check", action="store_true", help="exit status 1 where a column says fail")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="table and picture of an earlier JSON; no runs")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        document = json.loads(options.plot.read_text(encoding="utf-8"))
        return int(not report(document, options.out or options.plot.parent) and options.check)
    names = options.sets or (["breast_cancer"] if options.quick else list(SETS))
    seeds = options.runs or (2 if options.quick else 10)
    epochs = options.epochs or (8.0 if options.quick else EPOCHS)
    if seeds < 1 or options.workers < 1 or epochs <= 0:
        parser.error("--runs, --workers and --epochs must be positive")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    _prepare()

    document: dict[str, Any] = {
        "sanc": sanc.__version__,
        "epochs": epochs,
        "seeds": seeds,
        "references": [],
        "runs": [],
        "missing": [],
    }
    for name in list(names):
        try:
            problem_of(name, options.data_dir)
        except (sanc.SancError, OSError) as trouble:
            print(f"{name} is left out: {trouble}", flush=True)
            document["missing"].append(name)
            names.remove(name)
    if options.workers > 1:
        _PROBLEMS.clear()  # the workers have their own
    if not names:
        print("none of the data sets is there")
        return 1
    todo = [(name, seed, epochs, options.data_dir) for name in names for seed in (None, *range(seeds))]
    clock = time.perf_counter()
    for number, (task, done) in enumerate(jobs_done(todo, options.workers), 1):
        head = f"{number:4d}/{len(todo)}  {time.perf_counter() - clock:6.0f} s  {task[0]:13s}"
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
        if options.out is not None:
            save(document, options.out)
    order = {name: place for place, name in enumerate(names)}
    document["runs"].sort(key=lambda run: (order[run["set"]], run["seed"]))
    if options.out is not None:
        save(document, options.out)
    return int(not report(document, options.out) and options.check)


if __name__ == "__main__":
    sys.exit(main())
