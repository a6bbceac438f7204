"""Test problems with counted evaluations, statistics of runs, and worker processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # tests/zoo.py is not installed

import zoo

__all__ = [
    "Counted", "Floats", "StopRun", "draw_profile", "geometric_mean", "median", "profile", "set_threads",
    "worker_pool", "zoo",
]  # fmt: skip
Floats = NDArray[np.float64]

# ---------------------------------------------------------------------- evaluations


class StopRun(Exception):  # noqa: N818 - the end of a run is not an error
    """The run reached its target or its limit of time or evaluations."""


@dataclass
class Counted:
    """f, gradient, Hessian and Hessian product of a test problem, with counters.

    Attributes
    ----------
    problem : ZooProblem or SaddleStart
        Problem to minimise.
    stop_at : float
        Gradient norm at which `jac` ends the run by raising `StopRun`.
    seconds, evaluations : float
        Limits on time and on calls of f or of the gradient.
    nfev, njev, nhev, nhess : int
        Calls of f, gradients, Hessian products and dense Hessians.
    end : array or None
        Point at which the gradient norm reached `stop_at`.
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
        self._start = time.perf_counter()

    def _check(self) -> None:
        if time.perf_counter() - self._start > self.seconds or max(self.nfev, self.njev) >= self.evaluations:
            raise StopRun

    def fun(self, x: Floats) -> float:
        """f(x)."""
        self._check()
        self.nfev += 1
        return self._f(x)

    def jac(self, x: Floats) -> Floats:
        """∇f(x); ends the run if ‖∇f(x)‖₂ ≤ `stop_at`."""
        self._check()
        self.njev += 1
        g = self._jac(x)
        if np.linalg.norm(g) <= self.stop_at:
            self.end = np.array(x)
            raise StopRun
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
        """Hessian products; a dense Hessian counts as n of them."""
        return self.nhev + self.problem.n * self.nhess


# ---------------------------------------------------------------------- statistics


def median(values: Sequence[float]) -> float:
    """Median, with failures as infinite values; NaN of an empty sequence."""
    return float(np.median(values)) if len(values) else math.nan


def geometric_mean(ratios: Sequence[float]) -> float:
    """Geometric mean of positive numbers; NaN of an empty sequence."""
    return float(np.exp(np.mean(np.log(ratios)))) if len(ratios) else math.nan


def profile(costs: Mapping[str, Sequence[float]]) -> dict[str, tuple[Floats, Floats]]:
    """Compute performance profiles (Dolan and Moré 2002).

    Parameters
    ----------
    costs : mapping
        Costs of each method on the same sequence of problems, infinite for a failure.

    Returns
    -------
    dict
        (τ, share) of each method: the share of problems on which its cost is at most τ times the lowest cost.
    """
    table = np.array([np.maximum(np.asarray(row, np.float64), 1.0) for row in costs.values()])
    lowest = table.min(axis=0)
    curves = {}
    for name, row in zip(costs, table, strict=True):
        solved = np.isfinite(row)
        ratios = np.sort(row[solved] / lowest[solved])
        curves[name] = ratios, np.arange(1, len(ratios) + 1) / table.shape[1]
    return curves


def draw_profile(axes: Any, costs: Mapping[str, Sequence[float]], most: float, style: Callable[[str], Any]) -> None:
    """Draw performance profiles for 1 ≤ τ ≤ `most`; `style` returns the line options of a method."""
    for name, (tau, share) in profile(costs).items():
        end = share[-1] if len(share) else 0.0
        axes.step([1.0, *tau, most], [0.0, *share, end], where="post", **style(name))
    axes.set(xscale="log", xlim=(1.0, most), ylim=(0.0, 1.02))


# ---------------------------------------------------------------------- processes


def set_threads(threads: int) -> None:
    """Use `threads` threads in torch and full float32 precision (no TF32) on a GPU."""
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def worker_pool(workers: int, threads: int = 1) -> ProcessPoolExecutor:
    """Return a pool of spawned processes, each with `threads` threads in torch and in BLAS."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))  # a worker reads them when it starts
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=set_threads, initargs=(threads,))
