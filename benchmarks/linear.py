"""Time linear models in closed form: to a small gradient against SciPy and torch, per product, and per iteration.

    python -m benchmarks.linear --out linear-output      # a9a, covtype, 11,000,000 generated rows and w1a, minutes
    python -m benchmarks.linear --rows 1000000           # fewer generated rows
    python -m benchmarks.linear --quick                  # data that scikit-learn ships and small sums, seconds
    python -m benchmarks.linear --parts overhead         # one part alone, or two

All times are medians of runs made in turns in one process, and each table says what its ratios are ratios to.

Race: seconds until a method first evaluates a gradient with ‖g‖₂ ≤ 1e-8 on all rows, from w = (1, …, 1). `sanc` has its
default options. SciPy's methods get f, gradient and Hessian products from the very same object, which computes the
scores Xw once for all three at the same w. All are stopped the moment they have such a gradient, or after 30 seconds.
`sanc` makes the scores of a trial from those of its Hessian products where that is faster; the others do not combine
theirs. The row "sanc, uncertified" is `sanc.minimize(certify=False)` to its own end, with a short look for negative
curvature, and "sanc, certified" is `sanc.minimize` as a user calls it: the same run, then the certificate of λ_min,
which the others do not have. torch.optim.LBFGS with a strong Wolfe line search differentiates the same loss by
autograd, on a dense or a sparse tensor, whichever computes a gradient faster.

Bandwidth: bytes of X divided by seconds, as a share of what a bare ``X @ v`` of NumPy reaches in the same process. The
bytes are those that the plain algorithm reads: X once for a value, twice for a gradient or a product (X @ v, Xᵀ @ r).
Code that reads X from memory once for both may therefore have a share above 1. Every value and gradient is at a new w,
so that no scores are known. The rest of the work, such as the exponentials, is in the seconds but not in the bytes.

Overhead: seconds of an iteration of `sanc.minimize(preset="paper")` with three samples of ⌈n/20⌉ rows and J = 5 as a
ratio to its matrix-vector products done by hand: three draws ``X[rows]``, 2 products for the gradient, 2 for each of
the Hessian products that were made (fewer than J where the Krylov space is full), 1 for each value. By hand there is
no loss, no penalty, no Lanczos and no step. "In full" is the iteration written out as a plain script in NumPy, with
nothing around the arithmetic: no safeguard, no record, no choice of method.

--out gets linear.json and, with race and bandwidth, linear.png. Files are looked for where `sanc.lab` looks for them:
--data-dir, SANC_DATA or the user's cache; sets that are not there are named and left out.
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
import torch
from numpy.typing import NDArray
from scipy.linalg.lapack import dstev

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
GOAL = 0.6
"""Share of the bandwidth of X @ v that a gradient and a product are to have."""

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
        self.check(float(np.linalg.norm(g)))
        return value, g

    def check(self, norm: float) -> None:
        """Note the norm of a gradient, and end the run where it is small."""
        self.least = min(self.least, norm)
        if norm <= TOLERANCE or time.perf_counter() > self._end:
            raise Budget

    def gradient(self, w: Array) -> Array:
        """∇f(w)."""
        return self.value_and_gradient(w)[1]

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        product = self.problem.hessian(w)

        def counted(v: Array) -> Array:
            self.products += 1
            return product(v)

        counted.moved = getattr(product, "moved", None)  # type: ignore[attr-defined]
        return counted

    def hessp(self, w: Array, v: Array) -> Array:
        """∇²f(w) v."""
        return self.hessian(w)(v)


def run_scipy(watched: Watched, method: str, start: Array) -> None:
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


def torch_loss(problem: Logistic, sparse: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the same loss as a torch function of w."""
    y, kind, strength = torch.from_numpy(np.array(problem.y)), problem.penalty.kind, problem.penalty.strength
    if sparse:
        entries = problem.X.tocoo()
        places = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
        values = torch.from_numpy(np.array(entries.data))
        X = torch.sparse_coo_tensor(places, values, entries.shape, check_invariants=False).coalesce()
    else:
        X = torch.from_numpy(problem.X.toarray() if scipy.sparse.issparse(problem.X) else np.array(problem.X))

    def loss(w: torch.Tensor) -> torch.Tensor:
        z = torch.sparse.mm(X, w[:, None])[:, 0] if sparse else X @ w
        square = w * w
        penalty = (square / (1 + square)).sum() if kind == "nonconvex" else 0.5 * square.sum()
        return torch.nn.functional.binary_cross_entropy_with_logits(z, y) + strength * penalty

    return loss


def torch_gradient(loss: Callable[[torch.Tensor], torch.Tensor], w: torch.Tensor) -> torch.Tensor:
    """Differentiate by autograd; the value is returned and the gradient left in w.grad."""
    w.grad = None
    value = loss(w)
    value.backward()  # type: ignore[no-untyped-call]
    return value


def run_torch(watched: Watched, loss: Callable[[torch.Tensor], torch.Tensor], start: Array) -> None:
    """Run torch.optim.LBFGS with a strong Wolfe line search and its own endings switched off."""
    w = torch.from_numpy(start.copy()).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [w], max_iter=10**6, max_eval=10**7, tolerance_grad=0.0, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        watched.gradients += 1
        value = torch_gradient(loss, w)
        watched.check(float(torch.linalg.vector_norm(w.grad)))  # type: ignore[arg-type]
        return value

    optimiser.step(closure)  # type: ignore[arg-type]


def faster_tensor(problem: Logistic) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the torch loss, dense or sparse, whose gradient takes less time."""
    losses = {"dense": torch_loss(problem, sparse=False)}
    if scipy.sparse.issparse(problem.X):
        losses["sparse"] = torch_loss(problem, sparse=True)
    w = torch.ones(problem.dim, dtype=torch.float64, requires_grad=True)
    times = in_turns({form: partial(torch_gradient, loss, w) for form, loss in losses.items()}, seconds=0.3, least=3)
    form = min(times, key=lambda name: times[name])
    return form, losses[form]


def race_one(problem: Logistic, seconds: float, limit: float) -> list[dict[str, Any]]:
    """Time every method on one sum."""
    start = np.ones(problem.dim)
    form, loss = faster_tensor(problem)
    runs: dict[str, Callable[[Watched], Any]] = {
        "sanc": lambda watched: sanc.minimize(watched, start, tol=TOLERANCE),
        **{method: partial(run_scipy, method=method, start=start) for method in PEERS},
        f"torch L-BFGS, {form}": lambda watched: run_torch(watched, loss, start),
    }
    last: dict[str, Watched] = {}
    whole: dict[str, Any] = {}

    def once(method: str) -> None:
        last[method] = Watched(problem, limit)
        with contextlib.suppress(Budget):
            runs[method](last[method])

    def to_the_end(method: str, certify: bool) -> None:
        whole[method] = sanc.minimize(problem, start, tol=TOLERANCE, certify=certify)

    calls: dict[str, Callable[[], None]] = {"sanc": partial(once, "sanc")}
    for method, certify in (("sanc, uncertified", False), ("sanc, certified", True)):
        calls[method] = partial(to_the_end, method, certify)
    calls |= {method: partial(once, method) for method in runs}
    times = in_turns(calls, seconds=seconds, warm_up=1, least=3)
    rows = []
    for method, spent in times.items():
        row = {"method": method, "seconds": spent, "ratio": spent / times["sanc"]}
        if method in last:
            seen = last[method]
            row |= {"values": seen.values, "gradients": seen.gradients, "products": seen.products, "least": seen.least}
        else:
            result = whole[method]
            row |= {"values": result.nfev, "gradients": result.njev, "least": float(np.linalg.norm(result.jac))}
            row["products"] = result.nhev + result.certificate.products
        rows.append(row | {"reached": row["least"] <= TOLERANCE})
    return rows


def race(name: str, data_dir: Path | None, cases: Sequence[Any], seconds: float, limit: float) -> list[dict[str, Any]]:
    """Time every method on every penalty."""
    torch.set_num_threads(1)
    loaded = load_data(name, data_dir, "float64")
    rows = []
    for kind, strength in cases:
        strength = strength or 1 / len(loaded.y)
        what = {"set": name, "n": len(loaded.y), "penalty": kind, "strength": strength}
        problem = Logistic(loaded.X, loaded.y, penalty=kind, strength=strength)
        rows += [what | row for row in race_one(problem, seconds, limit)]
    return rows


# ---------------------------------------------------------------------- the bandwidth


def generated(rows: int, seed: int = 0) -> tuple[Array, Array]:
    """Make features like those of HIGGS in number and type, and labels, in blocks."""
    rng = np.random.default_rng(seed)
    X = np.empty((rows, FEATURES), np.float32)
    y = np.empty(rows, np.int8)
    for k in range(0, rows, 1 << 17):
        block = X[k : k + (1 << 17)]
        rng.standard_normal(dtype=np.float32, out=block)
        y[k : k + len(block)] = block[:, 0] + rng.standard_normal(len(block), np.float32) > 0
    return X, y


def bandwidth(
    name: str, dtype: str, data_dir: Path | None, rows: int, threads: int, seconds: float
) -> list[dict[str, Any]]:
    """Time value, gradient and product of a large dense set beside X @ v."""
    torch.set_num_threads(threads)
    if name == "generated":
        X, y = generated(rows)
    else:
        loaded = load_data(name, data_dir, dtype)
        X, y = np.array(loaded.X), np.asarray(loaded.y)  # in memory, as the generated set is
    problem = Logistic(X, y, strength=1e-3)
    rng = np.random.default_rng(1)
    points = itertools.cycle([0.1 * rng.standard_normal(problem.dim).astype(X.dtype) for _ in range(7)])
    v = rng.standard_normal(problem.dim).astype(X.dtype)
    product = problem.hessian(next(points))
    times = in_turns(
        {
            "X @ v": lambda: X @ v,
            "value": lambda: problem.value(next(points)),
            "gradient": lambda: problem.value_and_gradient(next(points)),
            "product": lambda: product(v),
        },
        seconds=seconds,
        warm_up=1,
    )
    rate = {what: X.nbytes * (2 if what in ("gradient", "product") else 1) / spent for what, spent in times.items()}
    return [
        {
            "set": name,
            "n": problem.n,
            "features": problem.features,
            "dtype": str(X.dtype),
            "threads": threads,
            "what": what,
            "seconds": times[what],
            "bytes_per_second": rate[what],
            "share": rate[what] / rate["X @ v"],
        }
        for what in times
    ]


# ---------------------------------------------------------------------- the overhead


def overhead(name: str, data_dir: Path | None, iterations: int, seconds: float) -> list[dict[str, Any]]:
    """Time iterations on samples beside their matrix-vector products done by hand, sparse and dense."""
    loaded = load_data(name, data_dir, "float64")
    sparse = scipy.sparse.issparse(loaded.X)
    forms = {"CSR": loaded.X, "dense": loaded.X.toarray()} if sparse else {"dense": np.array(loaded.X)}
    return [
        {"set": name, "form": form, "strength": strength} | overhead_one(X, loaded.y, strength, iterations, seconds)
        for strength in (1.0, 1e-3)
        for form, X in forms.items()
    ]


def written_out(
    X: Any, signs: Array, rows: Sequence[Array], x: Array, sigma: float, strength: float, products: int, trials: int = 1
) -> tuple[Array, list[float]]:
    """Make an iteration with the nonconvex penalty: the cubic step's point, and f there and before it.

    Parameters
    ----------
    X : array or sparse matrix
        Features of all rows.
    signs : array
        1 where the label is 0, and −1 where it is 1.
    rows : three arrays
        The samples.
    x : array
        Where it begins.
    sigma, strength : float
        Of the cubic term and of the penalty.
    products, trials : int
        Lanczos iterations, and how often the value after the step is computed.
    """
    mine, size = rows[0], len(rows[0])
    A, s = X[mine], signs[mine]
    e = np.exp(s * (A @ x))
    square = x * x
    total = 1 + square
    g = A.T @ (s * (e / (1 + e))) / size + 2 * strength * (x / (total * total))
    norm = math.sqrt(g.dot(g))
    B = X[rows[1]]
    e = np.exp(-np.abs(B @ x))
    bend = e / (1 + e) ** 2 / size
    diagonal = 2 * strength * ((1 - 3 * square) / total**3)
    turned, basis, alpha, beta = B.T, [g / norm], [], []
    for j in range(products):
        q = basis[j]
        r = turned @ (bend * (B @ q)) + diagonal * q
        if j:
            r -= beta[-1] * basis[j - 1]
        alpha.append(float(q.dot(r)))
        if j + 1 < products:
            r -= alpha[-1] * q
            beta.append(math.sqrt(r.dot(r)))
            basis.append(r / beta[-1])
    values, vectors = np.array(alpha), np.ones((1, 1))
    if products > 1:
        values, vectors, _ = dstev(values, np.array(beta))
    c, poles = (norm * vectors[0]).tolist(), values.tolist()
    mu = 2 * sigma * norm / (poles[-1] + math.sqrt(poles[-1] ** 2 + 4 * sigma * norm))
    for _ in range(50):  # Newton's method from the left
        u = [entry / (pole + mu) for entry, pole in zip(c, poles, strict=True)]
        length = math.sqrt(sum([entry * entry for entry in u]))
        slope = sum([entry * entry / (pole + mu) for entry, pole in zip(u, poles, strict=True)]) / length
        change = (sigma * length - mu) / (sigma * slope + 1)
        mu += change
        if change <= 1e-14 * mu:
            break
    step = vectors @ np.array([-entry / (pole + mu) for entry, pole in zip(c, poles, strict=True)])
    trial = x.copy()
    for factor, q in zip(step.tolist(), basis, strict=True):
        trial += factor * q
    mine = rows[2]
    C, s = X[mine], signs[mine]
    points = [x, *[trial] * trials]
    return trial, [
        float(np.log1p(np.exp(s * (C @ w))).sum()) / size + strength * float(w.dot(w / (1 + w * w))) for w in points
    ]


def overhead_one(X: Any, y: Array, strength: float, iterations: int, seconds: float) -> dict[str, Any]:
    """Time iterations on samples of one sum, and the same products by hand."""
    problem = Logistic(X, y, strength=strength)
    n, size = problem.n, -(-problem.n // 20)
    w = np.ones(problem.dim)

    def run() -> Any:
        return sanc.minimize(
            problem,
            w,
            preset="paper",
            batch_size=size,
            objective_batch_size=size,
            epsilon_g=1e-12,  # so that Lanczos makes all of its five iterations, where the space has so many
            max_iter=iterations,
            certify=False,
        )

    done = [(record.krylov_dim, record.trials + 1) for record in run().history]

    def by_hand() -> None:
        rng = np.random.default_rng(0)
        for products, values in done:
            a, b, c = (X[rng.choice(n, size, replace=False, shuffle=False)] for _ in range(3))
            a.T @ (a @ w)
            turned = b.T
            for _ in range(products):
                turned @ (b @ w)
            for _ in range(values):
                c @ w

    def in_full() -> None:
        rng, x, signs = np.random.default_rng(0), w, 1.0 - 2.0 * problem.y
        for products, values in done:
            rows = [rng.choice(n, size, replace=False, shuffle=False) for _ in range(3)]
            trial, (before, after, *_) = written_out(X, signs, rows, x, 1.0, strength, products, values - 1)
            x = trial if after < before else x

    rounds = turns({"sanc": run, "by hand": by_hand, "in full": in_full}, seconds=seconds)
    times = {name: statistics.median(mine) for name, mine in rounds.items()}
    return {
        "batch": size,
        "products": float(np.mean([products for products, _ in done])),
        "values": float(np.mean([values for _, values in done])),
        "sanc": times["sanc"] / len(done),
        "by_hand": times["by hand"] / len(done),
        "ratio": ratio(rounds["sanc"], rounds["by hand"]),
        "in_full": ratio(rounds["in full"], rounds["by hand"]),
    }


# ---------------------------------------------------------------------- what came out


def tables(document: Mapping[str, Any]) -> str:
    """Lay out the three tables."""
    parts = []
    if document["race"]:
        head = ("set", "penalty", "method", "seconds", "ratio to sanc", "f", "g", "Hv", "least ‖g‖")
        cells = [
            (
                row["set"],
                f"{row['penalty']}, {row['strength']:.2g}",
                row["method"],
                f"{row['seconds']:.3f}",
                f"{row['ratio']:.2f}" if row["reached"] else "not reached",
                row["values"],
                row["gradients"],
                row["products"],
                f"{row['least']:.1e}",
            )
            for row in document["race"]
        ]
        parts.append(f"Time to ‖g‖ ≤ {TOLERANCE:g}\n\n{plain_table(head, cells, left=3)}")
    if document["bandwidth"]:
        head = ("set", "rows", "type", "threads", "what", "ms", "GB/s", "share of X @ v")
        cells = [
            (
                row["set"],
                row["n"],
                row["dtype"],
                row["threads"],
                row["what"],
                f"{1e3 * row['seconds']:.1f}",
                f"{row['bytes_per_second'] / 1e9:.1f}",
                f"{row['share']:.2f}",
            )
            for row in document["bandwidth"]
        ]
        parts.append(f"Bandwidth\n\n{plain_table(head, cells)}")
    if document["overhead"]:
        head = ("set", "X", "penalty", "batch", "Hv", "f", "µs, sanc", "µs, by hand", "ratio", "in full")
        cells = [
            (
                row["set"],
                row["form"],
                f"{row['strength']:g}",
                row["batch"],
                f"{row['products']:.1f}",
                f"{row['values']:.1f}",
                f"{1e6 * row['sanc']:.0f}",
                f"{1e6 * row['by_hand']:.0f}",
                f"{row['ratio']:.2f}",
                f"{row['in_full']:.2f}",
            )
            for row in document["overhead"]
        ]
        parts.append(f"An iteration on samples\n\n{plain_table(head, cells, left=2)}")
    return "\n\n".join(parts)


def picture(document: Mapping[str, Any], path: Path) -> None:
    """Draw times as ratios to sanc, and shares of the bandwidth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    race_rows = document["race"]
    methods = list(dict.fromkeys(row["method"] for row in race_rows))
    cases = list(dict.fromkeys((row["set"], row["penalty"], row["strength"]) for row in race_rows))
    for number, case in enumerate(cases):
        mine = [row for row in race_rows if (row["set"], row["penalty"], row["strength"]) == case and row["reached"]]
        places = [methods.index(row["method"]) + 0.8 * (number + 0.5) / len(cases) - 0.4 for row in mine]
        label = f"{case[0]}, {case[1]}, {case[2]:.2g}"
        left.barh(places, [row["ratio"] for row in mine], 0.7 / len(cases), color=f"C{number}", label=label)
    left.axvline(1.0, color="black", lw=0.8)
    left.set_yticks(range(len(methods)), methods)
    left.invert_yaxis()
    left.set_xscale("log")
    left.set_xlabel(f"time to ‖g‖ ≤ {TOLERANCE:g} / time of sanc")
    left.legend(fontsize=7)
    shares = [row for row in document["bandwidth"] if row["what"] != "X @ v"]
    groups = list(dict.fromkeys((row["set"], row["dtype"], row["threads"]) for row in shares))
    for number, what in enumerate(("value", "gradient", "product")):
        heights = [row["share"] for row in shares if row["what"] == what]
        right.bar(np.arange(len(heights)) + 0.25 * (number - 1), heights, 0.23, label=what)
    right.axhline(GOAL, color="grey", lw=0.8, ls=":")
    right.set_xticks(
        range(len(groups)), [f"{name}\n{kind}\n{k} thread{'s' * (k > 1)}" for name, kind, k in groups], fontsize=7
    )
    right.set_ylabel("share of the bandwidth of X @ v")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


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
    parser.add_argument("--out", type=Path, help="folder for the JSON and the picture")
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
        tasks.append(("overhead", 1, overhead, "w1a", folder, 1000, seconds))
    tasks += [("bandwidth", k, bandwidth, *one, folder, rows, k, seconds) for one in large for k in threads]

    document: dict[str, Any] = {"sanc": sanc.__version__, "machine": machine(), "missing": []}
    document |= {part: [] for part in PARTS}
    for part, count, work, name, *rest in tasks:
        if part not in options.parts:
            continue
        clock = time.perf_counter()
        try:
            document[part] += in_process(count, work, name, *rest)
        except (sanc.SancError, OSError) as trouble:
            print(f"{name} is left out: {trouble}", flush=True)
            document["missing"].append(name)
            continue
        print(f"{part} of {name}, {count} thread(s): {time.perf_counter() - clock:.0f} s", flush=True)
    print(f"\n{tables(document)}")
    if options.out is not None:
        write_json(options.out / "linear.json", document)
        written = "linear.json"
        if document["race"] and document["bandwidth"]:
            picture(document, options.out / "linear.png")
            written += ", linear.png"
        print(f"\nwritten to {options.out}: {written}")
    return int(not all(document[part] for part in options.parts))


if __name__ == "__main__":
    sys.exit(main())
