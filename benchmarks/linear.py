"""Time linear models in closed form: to a small gradient beside SciPy, per product, and per iteration.

    python -m benchmarks.linear --out linear-output      # a9a, covtype, 11,000,000 generated rows and w1a, minutes
    python -m benchmarks.linear --rows 1000000           # fewer generated rows
    python -m benchmarks.linear --parts overhead         # one part alone, or two
    python -m benchmarks.linear --quick                  # data that scikit-learn ships and small sums, seconds

All times are medians of runs made in turns in one process, and each table says what its ratios are ratios to.

Race: seconds until a method first evaluates a gradient with ‖g‖₂ ≤ 1e-8 on all rows, from w = (1, …, 1). `sanc` has its
default options. SciPy's methods get f, gradient and Hessian products from the very same object, which computes the
margins Xw once for all three at the same w. All are stopped the moment they have such a gradient, or after 30 seconds.
"sanc, certified" is `sanc.minimize` as a user calls it: the same run, then the certificate of λ_min, which the others
do not have.

Bandwidth: bytes of X divided by seconds, as a share of what a bare ``X @ v`` of NumPy reaches in the same process. The
bytes are those that the plain algorithm reads: X once for a value, twice for a gradient or a product (X @ v, Xᵀ @ r).
Code that reads X from memory once for both may therefore have a share above 1. Every value and gradient is at a new w,
so that no margins are known. The rest of the work, such as the exponentials, is in the seconds but not in the bytes.

Overhead: seconds of an iteration of `sanc.minimize(preset="paper")` with three samples of ⌈n/20⌉ rows and J = 5 as a
ratio to its matrix-vector products by hand: rows drawn and taken (``X[rows]``) for three samples, 2 products for the
gradient, 2 for each Hessian product that was made (fewer than J where the Krylov space is full), 1 for each value. By
hand there is no loss, no penalty, no Lanczos and no step. The goal is a ratio of at most 3, dense and CSR.

--out gets linear.json. Files are looked for where `sanc.lab` looks for them: --data-dir, SANC_DATA or the user's cache;
sets that are not there are named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse
from numpy.typing import NDArray

import sanc
from benchmarks.common import Budget, plain_table
from benchmarks.timing import in_turns, machine, ratio, turns, write_json
from sanc.lab.runs import load_data
from sanc.problems import FiniteSum, Logistic

Array = NDArray[Any]
TOLERANCE = 1e-8
PEERS = ("trust-krylov", "trust-ncg", "Newton-CG", "L-BFGS-B")
CASES = (("nonconvex", 1.0), ("nonconvex", 1e-3), ("l2", 1e-3), ("l2", None))
"""Penalties of the race and their strengths; None is 1/n. The paper's is the first."""
PARTS = ("race", "bandwidth", "overhead")
FEATURES = 28
"""Features of the generated set, as HIGGS has."""
OVERHEAD = 3.0
"""The goal: most of an iteration ÷ its products by hand."""

# ---------------------------------------------------------------------- the race


class Watched(FiniteSum):
    """A finite sum that counts, and that ends a run where its gradient is small or the time is up."""

    def __init__(self, problem: FiniteSum, seconds: float) -> None:
        self.problem, self.n, self.dim, self.dtype = problem, problem.n, problem.dim, problem.dtype
        self.values = self.gradients = self.products = 0
        self.least = math.inf
        self._end = time.perf_counter() + seconds

    def subset(self, rows: Array) -> FiniteSum:
        return self.problem.subset(rows)

    def value(self, w: Array) -> float:
        self.values += 1
        return self.problem.value(w)

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        self.gradients += 1
        value, g = self.problem.value_and_gradient(w)
        norm = float(np.linalg.norm(g))
        self.least = min(self.least, norm)
        if norm <= TOLERANCE or time.perf_counter() > self._end:
            raise Budget
        return value, g

    def gradient(self, w: Array) -> Array:
        """∇f(w)."""
        return self.value_and_gradient(w)[1]

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        product = self.problem.hessian(w)

        def counted(v: Array) -> Array:
            self.products += 1
            return product(v)

        return counted

    def hessp(self, w: Array, v: Array) -> Array:
        """∇²f(w) v."""
        return self.hessian(w)(v)


def run_scipy(watched: Any, method: str, start: Array) -> None:
    """Run a method of SciPy with its own endings switched off."""
    options: dict[str, Any] = {"maxiter": 100_000}
    if method.startswith("trust"):
        options["gtol"] = 0.0
    elif method == "Newton-CG":
        options["xtol"] = 0.0
    else:
        options |= {"ftol": 0.0, "gtol": 0.0, "maxfun": 10**9}
    second = {} if method == "L-BFGS-B" else {"hessp": watched.hessp}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scipy.optimize.minimize(watched.value, start, method=method, jac=watched.gradient, options=options, **second)


def race_one(problem: Logistic, seconds: float, limit: float) -> list[dict[str, Any]]:
    """Time every method on one sum."""
    start = np.ones(problem.dim)
    seen: dict[str, dict[str, Any]] = {}

    def stopped(name: str, run: Callable[[Watched], Any]) -> None:
        watched = Watched(problem, limit)
        with contextlib.suppress(Budget):
            run(watched)
        counts = {"values": watched.values, "gradients": watched.gradients, "products": watched.products}
        seen[name] = counts | {"least": watched.least}

    def certified() -> None:
        result = sanc.minimize(problem, start, tol=TOLERANCE)
        products = result.nhev + result.certificate.products
        counts = {"values": result.nfev, "gradients": result.njev, "products": products}
        seen["sanc, certified"] = counts | {"least": float(np.linalg.norm(result.jac))}

    plain = partial(sanc.minimize, x0=start, tol=TOLERANCE)
    calls: dict[str, Callable[[], None]] = {"sanc": partial(stopped, "sanc", plain), "sanc, certified": certified}
    calls |= {m: partial(stopped, m, partial(run_scipy, method=m, start=start)) for m in PEERS}
    times = in_turns(calls, seconds=seconds, warm_up=1, least=3)
    return [
        {"method": name, "seconds": spent, "ratio": spent / times["sanc"], **seen[name]}
        | {"reached": seen[name]["least"] <= TOLERANCE}
        for name, spent in times.items()
    ]


def race(name: str, data_dir: Path | None, cases: Sequence[Any], seconds: float, limit: float) -> list[dict[str, Any]]:
    """Time every method on every penalty."""
    loaded = load_data(name, data_dir, "float64")
    rows = []
    for kind, strength in cases:
        strength = strength or 1 / len(loaded.y)
        problem = Logistic(loaded.X, loaded.y, penalty=kind, strength=strength)
        what = {"set": name, "penalty": kind, "strength": strength}
        rows += [what | row for row in race_one(problem, seconds, limit)]
    return rows


# ---------------------------------------------------------------------- the bandwidth


def generated(rows: int, seed: int = 0) -> tuple[Array, Array]:
    """Make features like those of HIGGS in number and type, and labels."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows, FEATURES), np.float32)
    return X, (X[:, 0] + rng.standard_normal(rows, np.float32) > 0).astype(np.int8)


def bandwidth(
    name: str, dtype: str, data_dir: Path | None, rows: int, threads: int, seconds: float
) -> list[dict[str, Any]]:
    """Time value, gradient and product of a large dense set beside X @ v."""
    if name == "generated":
        X, y = generated(rows)
    else:
        loaded = load_data(name, data_dir, dtype)
        X, y = np.array(loaded.X), np.asarray(loaded.y)  # in memory, as the generated set is
    problem = Logistic(X, y, "nonconvex", 1e-3)
    rng = np.random.default_rng(1)
    points = itertools.cycle([0.1 * rng.standard_normal(problem.dim).astype(X.dtype) for _ in range(7)])
    v = rng.standard_normal(problem.dim).astype(X.dtype)
    product = problem.hessian(next(points))
    calls: dict[str, Callable[[], Any]] = {
        "X @ v": lambda: X @ v,
        "value": lambda: problem.value(next(points)),
        "gradient": lambda: problem.value_and_gradient(next(points)),
        "product": lambda: product(v),
    }
    times = in_turns(calls, seconds=seconds, warm_up=1)
    rate = {what: X.nbytes * (2 if what in ("gradient", "product") else 1) / spent for what, spent in times.items()}
    about = {"set": name, "n": problem.n, "dtype": str(X.dtype), "threads": threads}
    return [
        about | {"what": w, "seconds": times[w], "bytes_per_second": rate[w], "share": rate[w] / rate["X @ v"]}
        for w in times
    ]


# ---------------------------------------------------------------------- the overhead


def overhead(name: str, data_dir: Path | None, iterations: int, seconds: float) -> list[dict[str, Any]]:
    """Time iterations on samples beside their matrix-vector products by hand, sparse and dense."""
    loaded = load_data(name, data_dir, "float64")
    forms = {"dense": loaded.X.toarray() if scipy.sparse.issparse(loaded.X) else np.array(loaded.X)}
    forms["CSR"] = scipy.sparse.csr_matrix(loaded.X)
    return [
        {"set": name, "form": form, "strength": strength} | overhead_one(X, loaded.y, strength, iterations, seconds)
        for strength in (1.0, 1e-3)
        for form, X in forms.items()
    ]


def on_samples(problem: Logistic, iterations: int) -> Any:
    """Make iterations on three samples, in which Lanczos makes all of its five iterations where the space has them."""
    size = -(-problem.n // 20)
    options: dict[str, Any] = {"batch_size": size, "objective_batch_size": size, "epsilon_g": 1e-12, "certify": False}
    return sanc.minimize(problem, np.ones(problem.dim), preset="paper", max_iter=iterations, **options)


def by_hand(X: Any, size: int, done: Sequence[tuple[int, int]]) -> int:
    """Draw and take the rows and make the products of iterations with so many Hessian products and values; count."""
    rng, w, made = np.random.default_rng(0), np.ones(X.shape[1]), 0
    for products, values in done:
        a, b, c = (X[rng.choice(X.shape[0], size, replace=False, shuffle=False)] for _ in range(3))
        a.T @ (a @ w)
        turned = b.T
        for _ in range(products):
            turned @ (b @ w)
        for _ in range(values):
            c @ w
        made += 2 + 2 * products + values
    return made


def overhead_one(X: Any, y: Array, strength: float, iterations: int, seconds: float) -> dict[str, Any]:
    """Time iterations on samples of one sum, and the same products by hand."""
    problem = Logistic(X, y, "nonconvex", strength)
    size = -(-problem.n // 20)
    done = [(record.krylov_dim, record.trials + 1) for record in on_samples(problem, iterations).history]
    calls = {"sanc": partial(on_samples, problem, iterations), "by hand": partial(by_hand, problem.X, size, done)}
    rounds = turns(calls, seconds=seconds)
    made = by_hand(problem.X, size, done)
    return {
        "batch": size,
        "products": made / len(done),
        "sanc": statistics.median(rounds["sanc"]) / len(done),
        "by_hand": statistics.median(rounds["by hand"]) / len(done),
        "ratio": ratio(rounds["sanc"], rounds["by hand"]),
    }


# ---------------------------------------------------------------------- what came out


def tables(document: Mapping[str, Any]) -> str:
    """Lay out the three tables."""
    parts = []
    if document["race"]:
        head = ("set", "penalty", "method", "seconds", "ratio to sanc", "f", "g", "Hv", "least ‖g‖")
        cells: list[Sequence[Any]] = [
            (row["set"], f"{row['penalty']}, {row['strength']:.2g}", row["method"], f"{row['seconds']:.3f}",
             f"{row['ratio']:.2f}" if row["reached"] else "not reached", row["values"], row["gradients"],
             row["products"], f"{row['least']:.1e}")
            for row in document["race"]
        ]  # fmt: skip
        parts.append(f"Time to ‖g‖ ≤ {TOLERANCE:g}\n\n{plain_table(head, cells, left=3)}")
    if document["bandwidth"]:
        head = ("set", "rows", "type", "threads", "what", "ms", "GB/s", "share of X @ v")
        cells = [
            (row["set"], row["n"], row["dtype"], row["threads"], row["what"], f"{1e3 * row['seconds']:.1f}",
             f"{row['bytes_per_second'] / 1e9:.1f}", f"{row['share']:.2f}")
            for row in document["bandwidth"]
        ]  # fmt: skip
        parts.append(f"Bandwidth\n\n{plain_table(head, cells)}")
    if document["overhead"]:
        head = ("set", "X", "penalty", "batch", "products", "µs, sanc", "µs, by hand", "ratio", "goal")
        cells = [
            (row["set"], row["form"], f"{row['strength']:g}", row["batch"], f"{row['products']:.1f}",
             f"{1e6 * row['sanc']:.0f}", f"{1e6 * row['by_hand']:.0f}", f"{row['ratio']:.2f}",
             f"≤ {OVERHEAD:g} {'met' if row['ratio'] <= OVERHEAD else 'MISSED'}")
            for row in document["overhead"]
        ]  # fmt: skip
        parts.append(f"An iteration on samples\n\n{plain_table(head, cells, left=2)}")
    return "\n\n".join(parts)


# ---------------------------------------------------------------------- the command


def in_process(threads: int, work: Callable[..., list[dict[str, Any]]], *arguments: Any) -> list[dict[str, Any]]:
    """Call a function in a process of its own, whose BLAS has so many threads."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(threads)))
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(work, *arguments).result()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="data that scikit-learn ships, seconds")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to time; by default all")
    parser.add_argument("--rows", type=int, help="rows of the generated set; by default 11,000,000")
    parser.add_argument("--threads", type=int, nargs="+", help="threads of the bandwidth; by default 1 and all cores")
    parser.add_argument("--seconds", type=float, help="about how long each comparison may take; by default 15")
    parser.add_argument("--data-dir", type=Path, help="folder of the data files")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args(arguments)
    quick, folder = options.quick, options.data_dir
    seconds = options.seconds or (0.2 if quick else 15.0)
    rows = options.rows or (50_000 if quick else 11_000_000)
    threads = options.threads or ([1] if quick else sorted({1, os.cpu_count() or 1}))
    if rows < 1 or seconds <= 0 or min(threads) < 1:
        parser.error("--rows, --seconds and --threads must be positive")
    if quick:
        tasks = [("race", 1, race, "breast_cancer", folder, CASES[::3], seconds, 5.0)]
        large = [("generated", "float32")]
        tasks.append(("overhead", 1, overhead, "breast_cancer", folder, 20, seconds))
    else:
        tasks = [("race", 1, race, "a9a", folder, CASES, seconds, 30.0)]
        large = [("covtype", "float32"), ("covtype", "float64"), ("generated", "float32")]
        tasks.append(("overhead", 1, overhead, "w1a", folder, 300, seconds))
    tasks += [("bandwidth", k, bandwidth, *one, folder, rows, k, seconds) for one in large for k in threads]

    document: dict[str, Any] = {"sanc": sanc.__version__, "machine": machine(), "missing": []}
    document |= {part: [] for part in PARTS}
    for part, count, work, name, *rest in tasks:
        if part not in options.parts:
            continue
        clock = time.perf_counter()
        try:
            document[part] += work(name, *rest) if quick else in_process(count, work, name, *rest)
        except (sanc.SancError, OSError) as trouble:
            print(f"{name} is left out: {trouble}", flush=True)
            document["missing"].append(name)
            continue
        print(f"{part} of {name}, {count} thread(s): {time.perf_counter() - clock:.0f} s", flush=True)
    print(f"\n{tables(document)}")
    if options.out is not None:
        write_json(options.out / "linear.json", document)
    return int(not all(document[part] for part in options.parts))


if __name__ == "__main__":
    sys.exit(main())
