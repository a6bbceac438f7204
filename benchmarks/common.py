"""What the benchmarks share: the zoo of the tests, counted functions, performance profiles and tables."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the zoo belongs to the tests and is not installed

import zoo  # noqa: E402

Floats = NDArray[np.float64]
__all__ = ["ROOT", "Budget", "Counted", "geometric_mean", "median", "plain_table", "profile", "zoo"]


class Budget(Exception):  # noqa: N818 - it ends a run, which is no error
    """A run has used up its time or its evaluations, or has found what it was asked for."""


@dataclass
class Counted:
    """f, gradient, Hessian and Hessian product of a zoo problem, counted.

    Attributes
    ----------
    problem : ZooProblem or SaddleStart
        What is minimised.
    stop_at : float
        A run ends, by `Budget`, where it evaluates a gradient whose 2-norm is at most this.
    seconds, evaluations : float
        Limits on time and on calls of f or of the gradient.
    nfev, njev, nhev, nhess : int
        Calls of f and of the gradient, Hessian products, and whole Hessians.
    """

    problem: Any
    stop_at: float = -1.0
    seconds: float = math.inf
    evaluations: float = math.inf
    nfev: int = 0
    njev: int = 0
    nhev: int = 0
    nhess: int = 0
    end: Floats | None = None

    def __post_init__(self) -> None:
        self._f, self._jac, self._hess, self._hessp = zoo.numpy_functions(self.problem)
        self._clock = time.perf_counter()

    def _check(self) -> None:
        if time.perf_counter() - self._clock > self.seconds or max(self.nfev, self.njev) >= self.evaluations:
            raise Budget

    def fun(self, x: Floats) -> float:
        """f(x)."""
        self._check()
        self.nfev += 1
        return self._f(x)

    def jac(self, x: Floats) -> Floats:
        """∇f(x); ends the run where that is small."""
        self._check()
        self.njev += 1
        g = self._jac(x)
        if np.linalg.norm(g) <= self.stop_at:
            self.end = np.array(x)
            raise Budget
        return g

    def hess(self, x: Floats) -> Floats:
        """∇²f(x), dense."""
        self._check()
        self.nhess += 1
        return self._hess(x)

    def hessp(self, x: Floats, v: Floats) -> Floats:
        """∇²f(x) v."""
        self._check()
        self.nhev += 1
        return self._hessp(x, v)

    @property
    def products(self) -> int:
        """Hessian products, a whole Hessian counted as n of them."""
        return self.nhev + self.problem.n * self.nhess


def median(values: Sequence[float]) -> float:
    """Median, where a failure is infinite; NaN of nothing."""
    return float(np.median(values)) if len(values) else math.nan


def geometric_mean(ratios: Sequence[float]) -> float:
    """Geometric mean of positive numbers; NaN of nothing."""
    return float(np.exp(np.mean(np.log(ratios)))) if len(ratios) else math.nan


def profile(costs: Mapping[str, Sequence[float]]) -> dict[str, tuple[Floats, Floats]]:
    """Compute performance profiles (Dolan and Moré 2002).

    Parameters
    ----------
    costs : mapping
        For each method its cost on each problem, infinite where it failed; the problems in the same order.

    Returns
    -------
    dict
        For each method the steps (τ, share): the share of problems on which its cost is at most τ times the best.
    """
    table = np.array([np.maximum(np.asarray(row, np.float64), 1.0) for row in costs.values()])
    best = table.min(axis=0)
    curves = {}
    for name, row in zip(costs, table, strict=True):
        ratios = np.sort(row[np.isfinite(row)] / best[np.isfinite(row)])
        curves[name] = ratios, np.arange(1, len(ratios) + 1) / table.shape[1]
    return curves


def plain_table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], form: Callable[[Any], str] = str, left: int = 1
) -> str:
    """Write a Markdown table with aligned columns: the first `left` of them to the left, the others to the right."""
    cells = [list(head), *[[form(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(f"| {' | '.join(padded)} |")
    rule = "|" + "|".join("-" * (w + 2) if i < left else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
