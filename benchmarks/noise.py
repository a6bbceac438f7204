"""Minimise functions whose values have noise, with exact gradients and with differences of the noisy values.

    python -m benchmarks.noise --out docs/results     # 30 problems of three kinds, a few minutes
    python -m benchmarks.noise --quick                # one problem, seconds

The noise is a uniform factor from 1 − level to 1 + level on each value, which every bit of x changes but which is the
same at the same x, as after a quadrature or an inner iteration with a tolerance. Problems: penalised logistic and
quartic regressions with 2 to 11 variables on 60 rows, and Rosenbrock's function with a quadratic term. All methods have
their default tolerances; with differences `sanc` has "3-point", and SciPy's have their own forward differences.

*solved* with exact gradients: the gradient norm is at most 1e-6 times that at the start. With differences: f without
noise is above its minimum by at most the noise, or by 1e-8 if that is more, relative to 1 + |f|. *claims*: `success`.
--out writes noise.json.xz.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import scipy.optimize

import sanc
from benchmarks.reporting import command, machine, markdown_table, write_results
from sanc.core.space import Floats

LEVELS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
"""Sizes of the noise relative to f."""
METHODS: Mapping[bool, Sequence[str]] = {
    True: ("sanc", "trust-ncg", "BFGS", "L-BFGS-B"),
    False: ("sanc", "BFGS", "L-BFGS-B", "Nelder-Mead"),
}
"""Methods with exact gradients, and with differences or values alone."""


@dataclass(frozen=True, eq=False)
class NoisyProblem:
    """A function without noise with its derivatives, and a start."""

    fun: Callable[[Floats], float]
    jac: Callable[[Floats], Floats]
    hessp: Callable[[Floats, Floats], Floats]
    start: Floats

    def with_noise(self, level: float) -> Callable[[Floats], float]:
        """Return the function with noise."""

        def noisy(x: Floats) -> float:
            draw = np.random.default_rng(zlib.crc32(np.ascontiguousarray(x).tobytes())).uniform(-1.0, 1.0)
            return float(self.fun(x) * (1.0 + level * draw))

        return noisy


def problem(seed: int) -> NoisyProblem:
    """Return a problem; its kind follows from the seed modulo 3."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 12))
    X = rng.normal(size=(60, n))
    y = np.sign(X @ rng.normal(size=n) + rng.normal(size=60))
    start = rng.normal(size=n)
    if seed % 3 == 0:

        def fractions(w: Floats) -> Floats:
            return 1.0 / (1.0 + np.exp(y * (X @ w)))

        return NoisyProblem(
            lambda w: np.logaddexp(0.0, -y * (X @ w)).sum() + 0.5 * w @ w,
            lambda w: w - X.T @ (fractions(w) * y),
            lambda w, v: X.T @ (fractions(w) * (1.0 - fractions(w)) * (X @ v)) + v,
            start,
        )
    if seed % 3 == 1:
        return NoisyProblem(
            lambda w: 5.0 + ((X @ w - y) ** 2).sum() + 0.1 * (w**4).sum(),
            lambda w: 2.0 * X.T @ (X @ w - y) + 0.4 * w**3,
            lambda w, v: 2.0 * X.T @ (X @ v) + 1.2 * w * w * v,
            start,
        )
    return NoisyProblem(
        lambda w: 1.0 + scipy.optimize.rosen(w) + 0.1 * ((w - 2.0) ** 2).sum(),
        lambda w: scipy.optimize.rosen_der(w) + 0.2 * (w - 2.0),
        lambda w, v: scipy.optimize.rosen_hess_prod(w, v) + 0.2 * v,
        start,
    )


def run_one(method: str, given: NoisyProblem, level: float, *, exact: bool, minimum: float) -> dict[str, Any]:
    """Run a method, and return whether it solved the problem and says so, and its evaluations of f."""
    fun, derivatives = given.with_noise(level), {}
    if exact:
        derivatives = {"jac": given.jac} | ({"hessp": given.hessp} if method in ("sanc", "trust-ncg") else {})
    elif method == "sanc":
        derivatives = {"jac": "3-point"}
    minimise: Any = sanc.minimize if method == "sanc" else scipy.optimize.minimize
    others = {} if method == "sanc" else {"method": method}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        result = minimise(fun, given.start, **derivatives, **others)
    x = np.asarray(result.x)
    if exact:
        solved = np.linalg.norm(given.jac(x)) <= 1e-6 * np.linalg.norm(given.jac(given.start))
    else:
        solved = given.fun(x) - minimum <= max(level, 1e-8) * (1.0 + abs(minimum))
    return {"solved": bool(solved), "claims": bool(result.success), "nfev": int(result.nfev)}


def run_all(seeds: Sequence[int], levels: Sequence[float]) -> list[dict[str, Any]]:
    """Run every method on every problem with every noise."""
    rows = []
    for seed in seeds:
        given = problem(seed)
        minimum = float(sanc.minimize(given.fun, given.start, jac=given.jac, hessp=given.hessp, tol=1e-10).fun)
        for exact, methods in METHODS.items():
            for level in levels:
                for method in methods:
                    run = run_one(method, given, level, exact=exact, minimum=minimum)
                    rows.append({"seed": seed, "exact": exact, "level": level, "method": method} | run)
    return rows


def table(rows: Sequence[Mapping[str, Any]], *, exact: bool) -> str:
    """Return the table of the runs with exact gradients, or of those without."""
    chosen = [row for row in rows if row["exact"] is exact]
    methods, levels = METHODS[exact], sorted({row["level"] for row in chosen})
    cells = []
    for level in levels:
        line = [f"{level:g}"]
        for method in methods:
            runs = [row for row in chosen if row["level"] == level and row["method"] == method]
            solved, claims = (sum(run[name] for run in runs) for name in ("solved", "claims"))
            line.append(f"{solved} ({claims}), {median(run['nfev'] for run in runs):.0f}")
        cells.append(line)
    return markdown_table(("noise", *methods), cells, left=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="one problem, seconds", out="noise.json.xz")
    options = parser.parse_args(arguments)
    rows = run_all(range(1) if options.quick else range(100, 130), (0.0, 1e-8) if options.quick else LEVELS)
    for exact, title in ((True, "Exact gradients"), (False, "Differences")):
        print(f"{title}: solved (claims), median of evaluations\n\n{table(rows, exact=exact)}\n")
    write_results(options.out, {"noise.json.xz": {"sanc": sanc.__version__, "machine": machine(), "rows": rows}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
