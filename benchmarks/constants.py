"""Vary one named constant of the default at a time, and show what it earns.

    python -m benchmarks.constants --out constants-output                 # all parts, about two hours on one core
    python -m benchmarks.constants --parts samples --only OUTLIER
    python -m benchmarks.constants --quick                                # a few problems and constants, seconds

There are six parts. *exact*: `sanc.minimize` on the problems of tests/zoo.py with n ≤ 100, its saddle starts, its long
walks and NIST's fits; the table shows the problems solved and the geometric means of values and products relative to
the default, over problems that both solve. *bounds*: the same for the development half of benchmarks.bounded with n ≤
400. *fits*: the same for `sanc.least_squares`, with Jacobians, on the fits of NIST and of Moré, Garbow and Hillstrom,
four of the latter also with 200 and 400 variables, and two networks. *rows*: `sanc.curve_fit` on 1,000 rows of three
families of benchmarks.many, and `sanc.minimize_many` on rows of 600 variables; the table shows the fits that end above
and below the cost of the default, evaluations and seconds of the processor relative to the default, and the largest
relative difference between a covariance and its value from singular values. *diagnosis*: small problems of the zoo with
consistent and inconsistent derivatives; the table shows the correct endings. *samples*: small networks and regressions
on batches, among them data with outliers, offsets and drift, tiny weights, an embedding, a large learning rate and a
saddle; the table shows the geometric mean of the final training loss relative to the default over tasks and seeds, the
largest such ratio, and the runs that fail.

--out writes constants.json and table.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import nn

import sanc
from benchmarks.bounded import run_one
from benchmarks.bounded_problems import problems as bounded_problems
from benchmarks.common import Counted, worker_pool, zoo
from benchmarks.fits import problems as fits
from benchmarks.least_squares_problems import large_problems
from benchmarks.least_squares_problems import problems as least_squares_problems
from benchmarks.many import Family, family
from benchmarks.reporting import command, markdown_table, number, write_results

INF = math.inf

EXACT: Mapping[str, Sequence[float]] = {
    "core.sigma.MIN_SHRINK_FACTOR": (0.025, 0.4),
    "core.sigma.MAX_SHRINK_FACTOR": (0.2, 0.9),
    "core.sigma.MAX_GROWTH_FACTOR, core.model.MAX_GROWTH_FACTOR": (1.5, 10.0),
    "core.sigma.MIN_SIGMA_FACTOR_EXACT": (1e-2, 1e-12),
    "core.sigma.NEGLIGIBLE_CUBIC_TERM": (0.0, 1e-6),
    "core.model.MAX_FORCING_TERM": (0.02, 0.8),
    "core.model._MAX_NEGLIGIBLE_STEP_DIM": (1, 100),
    "core.model._TEST_DIVISOR": (2, 20),
    "core.model._MIN_TEST_INTERVAL": (2, 32),
    "core.model._PREDICTION_FACTOR": (1.0, 8.0),
    "core.model.TOLERANCE_FRACTION": (0.0, 1.0),
    "core.acceptance.LONGER_STEP_RHO": (INF, 1.02),
    "core.acceptance.DECIDING_REDUCTION": (0.1, 0.9),
    "core.acceptance.WORTHWHILE_GROWTH": (1.2, 8.0),
    "core.acceptance.CANCELLATION_ERRORS": (0.0, 1e5),
    "core.escape.MAX_ESCAPE_HALVINGS": (4, 400),
    "core.escape.FALLBACK_LIPSCHITZ": (0.1, 1e3),
    "core.units.X_FRACTION": (0.01, 1.0),
    "core.units.FIRST_SIGMA": (1e-6, 1e-2),
    "core.runs.stall.STALL_LIMIT, core.runs.convergence.STALL_LIMIT": (3, 40),
    "core.dense._SINGULAR_EIGENVALUE_RATIO": (1e-15, 1e-9),
    "core.spectrum.curvature._SPARSE_TEST_DIVISOR": (2, 20),
    "core.spectrum.curvature._RITZ_RESIDUAL_TOLERANCE": (0.02, 0.5),
}
"""Constants of runs on an exact objective, and two other values of each."""

BOUNDS: Mapping[str, Sequence[float]] = {
    "core.bounded.box_model._MAX_MODEL_NEWTON_STEPS": (5, 200),
    "core.bounded.box_model._MODEL_GRADIENT_TOLERANCE": (0.1, 1e-6),
    "core.bounded.box_model.ARMIJO_FRACTION": (1e-6, 0.1),
    "core.bounded.box_model.MAX_MODEL_HALVINGS": (10, 100),
    "core.bounded.box_model.REPEATED_STEP_RATIO": (0.4, 0.95),
    "core.bounded.box_model.SIGMA_INCREASE_FACTOR": (2.0, 16.0),
    "core.bounded.box_model._CG_TOLERANCE": (0.1, 1e-4),
}
"""Constants of runs with bounds."""

FITS: Mapping[str, Sequence[float]] = {
    "leastsquares.jacobian_model.MAX_STEP_GROWTH": (1.5, 3.0),
    "leastsquares.jacobian_model.JacobianModel.first_sigma_in_units": (1e-4, 1e-24),
    "leastsquares.second_order_term.MAX_ESTIMATED_VARIABLES": (0, 1000),
    "leastsquares.second_order_term._SECOND_ORDER_FRACTION": (0.01, 1.0),
    "leastsquares.second_order_term._MAX_RELIABLE_ERROR": (0.1, 1e30),
    "leastsquares.second_order_term._MIN_COSINE": (0.0, 1e-3),
    "leastsquares.accelerated.DIFFERENCE_FRACTION": (0.01, 0.5),
    "leastsquares.accelerated.MAX_CORRECTION, leastsquares.network_model.MAX_CORRECTION": (0.0, 2.0),
    "leastsquares.accelerated._STRAIGHT_RHO": (0.5, 0.99),
    "leastsquares.accelerated._MIN_CURVED_STEPS": (0, 1e30),
    "leastsquares.accelerated._NEGLIGIBLE_MULTIPLIER": (0.0, 0.1),
    "leastsquares.accelerated._SAME_DIRECTION_TOLERANCE": (0.0, 0.9),
    "leastsquares.oracle._OFFSET_FACTOR": (3.0, 300.0),
    "leastsquares.oracle._MAX_OFFSET": (0.0, 1e-4),
    "leastsquares.residual_variables._MIN_COST_RATIO": (1e-12, 0.1),
    "leastsquares.residuals.MAX_DENSE_VARIABLES": (100, 1000),
    "leastsquares.matrices.MAX_GRAM_SIDE": (10, 100_000),
    "leastsquares.whole_hessian._MAX_MATRIX_VARIABLES": (0, 100),
    "leastsquares.evaluation._RANDOM_SIGNS": (2, 32),
}
"""Constants of `least_squares`."""

ROWS: Mapping[str, Sequence[float]] = {
    "leastsquares.curve_fitting._DEFAULT_RESTARTS": (1, 8),
    "leastsquares.row_fits._POOR_FIT_FACTOR": (1.5, 10.0),
    "leastsquares.row_fits._MAX_REFITS": (1, 4),
    "leastsquares.row_fits._MAX_FIRST_TRIALS": (6, 24),
    "leastsquares.rows._MIN_HESSIAN_FRACTION": (0.1, 1e30),
    "leastsquares.rows._GAUSS_NEWTON_ITERATIONS": (0, 20),
    "leastsquares.rows.MAX_STEP_GROWTH": (1.5, 3.0),
    "leastsquares.rows.GAUSS_NEWTON_SIGMA_RATIO": (1.0, 1e-20),
    "leastsquares.row_covariances._MIN_EIGENVALUE_RATIO": (0.0, 1.0),
    "many.lanczos._FIRST_TEST_DIM": (2, 16),
    "many.lanczos._STEP_TEST_DIVISOR": (1, 8),
    "many.lanczos._CERTIFICATE_TEST_DIVISOR": (1, 16),
}
"""Constants of `curve_fit` for rows of data and of `minimize_many`."""

DIAGNOSIS: Mapping[str, Sequence[float]] = {
    "core.runs.step_checks._COMPARED_ITERATIONS": (1, 20),
    "core.runs.step_checks._MAX_MISMATCHES": (0, 5),
    "core.runs.step_checks._MISMATCH_TOLERANCE": (0.03, 0.6),
    "core.runs.step_checks._MIN_MISMATCH_ERRORS": (10.0, 1e5),
    "core.runs.step_checks._MISMATCH_RHO": (0.1, 0.9),
    "core.runs.step_checks._SYMMETRY_ITERATION": (5, 10**6),
    "core.runs.convergence._REPORTED_DIFFERENCE_ERROR": (1.0, 1e8),
    "core.runs.convergence._MIN_PROBE_PRODUCTS": (2, 100),
    "core.runs.consistency._DERIVATIVE_TOLERANCE": (0.02, 0.5),
    "core.runs.consistency._ASYMMETRY_TOLERANCE": (1e-6, 1e-2),
    "core.runs.consistency._MIN_DERIVATIVE_RATIO": (2.0, 100.0),
    "core.runs.consistency._ROUNDOFF_MARGIN": (10.0, 1e4),
    "core.spectrum.product_errors.ASYMMETRY_FACTOR, core.spectrum.monitored_lanczos.ASYMMETRY_FACTOR": (2.0, 100.0),
    "core.runs.noise_estimates.NOISE_SPACING": (100.0, 1e4),
    "core.runs.noise_estimates.MIN_SCALE_FRACTION": (1e-3, 0.1),
    "core.runs.noise_estimates._POINT_ROUNDING_FRACTION": (0.01, 0.4),
    "functions.differences._GROWTH_MARGIN": (1.1, 4.0),
    "core.runs.consistency._MIN_RELIABLE_ERRORS": (1.0, 20.0),
    "core.runs.noise_estimates.MIN_REPORTED_NOISE": (3.0, 1e4),
    "core.runs.consistency.MAX_NOISE": (1e3, 1e9),
}
"""Constants that decide whether f, its gradient and its Hessian products are consistent."""

SAMPLES: Mapping[str, Sequence[float]] = {
    "core.sigma.MIN_SIGMA_FACTOR_SAMPLED": (1e-1, 1e-6),
    "core.model.SAMPLED_KRYLOV_DIM": (2, 10),
    "minibatch.iteration._FIRST_PROBE_STEP": (25, 10**6),
    "minibatch.iteration._MIN_ESCAPE_FRACTION": (0.1, 0.9),
    "minibatch.recovery._CONFIRMED_RISE_FRACTION": (0.1, 0.9),
    "minibatch.gradient_norms._CLIPPING_FACTOR": (2.0, 1e30),
    "minibatch.gradient_norms._MAX_COUNTED_NORM_FACTOR": (10.0, 1e30),
    "minibatch.gradient_norms._REPEATED_FIRST_OUTLIERS": (5.0, 100.0),
    "minibatch.recovery._OUTLIER_LOSS_FRACTION": (0.5, 1e30),
    "minibatch.gradient_norms._FULL_WEIGHT_NORM_RATIO": (0.02, 0.1),
    "minibatch.averaging._WEIGHT_POWER": (2, 8),
    "minibatch.recovery._ETA_REDUCTION_FACTOR": (0.25, 0.8),
    "minibatch.batch_losses._REQUIRED_REDUCTION": (0.2, 0.9),
    "minibatch.batch_losses._SHORT_STEP_LIMIT": (2, 4),
    "minibatch.batch_losses._LONG_STEP_LIMIT": (2, 16),
    "minibatch.batch_losses._DISAGREEMENT_LIMIT": (1, 4),
    "minibatch.batch_losses._LARGE_DISAGREEMENT_FACTOR": (2.0, 1e30),
    "minibatch.batch_losses._LOSS_ROUNDING_ERRORS": (0.0, 1e4),
    "minibatch.batch_losses._LOSS_DECAY": (0.8, 0.99),
    "minibatch.batch_losses._RISE_DEVIATIONS": (1.0, 1e30),
    "minibatch.batch_losses._FALL_DEVIATIONS": (0.1, 2.0),
    "minibatch.gradient_norms.RELIABLE_MEAN_STEPS": (5, 80),
    "minibatch.step_size._FALLBACK_UNIT": (1 / 60, 4 / 15),
    "minibatch.step_size._TINY_PARAMETERS_CHANGE": (0.01, 1.0),
    "minibatch.step_size._MAX_RMS_OVER_MEDIAN": (1.0, 1e30),
    "minibatch.step_size._MAX_DISTANCE_FACTOR": (1.0, 8.0),
    "minibatch.distance._ALIGNED_FRACTION": (0.3, 1e30),
    "minibatch.step_size._WARM_UP_PERIODS": (1, 5),
    "minibatch.step_size._CONVERGED_FRACTION": (0.0, 0.1),
    "minibatch.step_size._REGROWTH_FACTOR": (1.0, 2.0),
    "minibatch.distance.DISTANCE_DECAY, minibatch.averaging.DISTANCE_DECAY": (0.98, 0.9998),
    "minibatch.metrics.base._RELATIVE_EPSILON": (1e-9, 1e-3),
    "minibatch.metrics.kronecker._RELATIVE_RIDGE": (1e-5, 1e-1),
}
"""Constants of runs on samples."""

EXACT_SETTINGS: Mapping[str, Sequence[Any]] = {
    "first_radius": (0.1, 10.0),
    "max_resolves": (3, 40),
    "krylov_dim": (5, 20),
    "krylov_stop": ("paper",),
    "lanczos": ("regenerate",),
    "eta1": (0.01, 0.25),
    "eta2": (0.5, 0.9),
    "rounding_guard": (False,),
    "sigma0": (1e-2, 1.0),
    "gamma": (1.5, 8.0),
    "sigma_rule": ("paper",),
}
"""Settings of runs on an exact objective."""

SETTINGS: Mapping[str, Sequence[Any]] = {
    "memory": (0.8, 0.99),
    "refresh": (200,),
    "largest_side": (8, 16),
    "scale": (0.05, 0.4),
    "distance": (0.0, 4.0),
    "warm_up": (0, 80),
    "slow_down": (0, 40),
    "averaging": (0.0, 0.95),
    "weighting": (0.0, 4.0),
    "curvature": (False,),
    "noise": (0.1, 10.0),
    "metric": ("diagonal", "none"),
}
"""Settings of runs on samples, for comparison."""


def patched(names: str, value: float) -> ExitStack:
    """Return a context in which a constant, in each module or class that holds it, has another value."""
    stack = ExitStack()
    for name in names.split(", "):
        holder, _, attribute = name.rpartition(".")
        stack.enter_context(patch.object(resolve_name(f"sanc.{holder}"), attribute, value))
    return stack


def value_of(names: str) -> float:
    """Return the value of a constant."""
    holder, _, attribute = names.split(", ")[0].rpartition(".")
    return float(getattr(resolve_name(f"sanc.{holder}"), attribute))


def geometric_mean(ratios: Sequence[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


# ---------------------------------------------------------------------- exact objectives


def exact_runs(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, tuple[bool, int, int]]:
    """Whether each problem is solved, and its values and products."""
    found, quick = {}, options.quick
    walks = [problem for n in (10, 100) for problem in zoo.walks(n)]
    problems = [problem for problem in (*zoo.PROBLEMS, *fits(), *walks) if problem.n <= (3 if quick else 100)]
    for problem in problems[:8] if quick else problems:
        counted = Counted(problem)
        given = {"jac": counted.jac, "hessp": counted.hessp, "tol": problem.gtol, **settings}
        result = sanc.minimize(counted.fun, problem.x0, max_iter=500, max_time=10.0, certify=False, **given)
        found[problem.name] = (problem.reached(float(result.fun)) is not None, result.nfev, result.nhev)
    for start in () if quick else (*zoo.SADDLES, *zoo.HIDDEN):
        result = sanc.minimize(start.fun, torch.from_numpy(start.x0), max_iter=200, max_time=10.0, **settings)
        found[start.name] = (bool(result.success), result.nfev, result.nhev)
    return found


def exact_row(found: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Compare two sets of runs."""
    both = [key for key, run in found.items() if run[0] and default[key][0]]
    ratios = [[(found[key][kind] + 1) / (default[key][kind] + 1) for key in both] for kind in (1, 2)]
    solved = sum(run[0] for run in found.values())
    return {"solved": solved, "values": geometric_mean(ratios[0]), "products": geometric_mean(ratios[1])}


def bounded_runs(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, tuple[bool, int, int]]:
    """Whether each problem with bounds is solved, and its values and products."""
    largest = 5 if options.quick else 400
    chosen = [problem for problem in bounded_problems() if not problem.unseen and problem.n <= largest]
    found = {problem.name: run_one("sanc", problem, 500, 10.0) for problem in (chosen[:4] if options.quick else chosen)}
    return {name: (run["solved"], run["nfev"], run["products"]) for name, run in found.items()}


# ---------------------------------------------------------------------- least squares


def fit_problems(quick: bool) -> Iterator[tuple[str, str, float, Any, Any, Any]]:
    """Yield name, family, smallest cost that counts, residuals, start and Jacobian of fits."""
    chosen = [problem for problem in least_squares_problems() if problem.group == "NIST" or problem.name.endswith("-1")]
    for problem in chosen[:6] if quick else chosen:
        yield problem.name, problem.family, problem.floor, problem.fun, problem.start, problem.jac
    for n in () if quick else (200, 400):
        for problem in large_problems(n):
            start = torch.from_numpy(problem.start)
            yield problem.name, problem.name, problem.floor, problem.residuals, start, None
    x = torch.linspace(0.0, 2.0, 30, dtype=torch.float64)[:, None]
    observed = torch.sin(4.0 * x[:, 0]) + 0.1 * torch.cos(50.0 * x[:, 0])
    decay = [(lambda u, z: torch.func.grad(u)(z)[0] + 2.0 * u(z), x), (lambda u, z: u(z) - 1.0, x[:1], 9.0)]
    for name, terms in (("decay", decay), ("wave", [(lambda u, z, y: u(z) - y, (x, observed))])):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        fun = sanc.NetworkResiduals(net, terms)
        yield f"network, {name}", f"network, {name}", 1e-10, fun, fun.start, None


def fit_runs(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the cost and the counts of each fit."""
    found = {}
    for name, group, floor, fun, start, jac in fit_problems(options.quick):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            result = sanc.least_squares(fun, start, jac, max_nfev=200, certify=False)
        counts = {"values": result.nfev, "Jacobians": result.njev, "products": result.nhev}
        cost = result.cost if math.isfinite(result.cost) else math.inf
        found[name] = {"family": group, "floor": floor, "cost": cost, **counts}
    return found


def fits_row(found: dict[str, dict[str, Any]], default: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare two sets of fits; one is solved whose cost is the lowest that the default finds for its family."""
    best: dict[str, float] = {}
    for run in default.values():
        best[run["family"]] = min(run["cost"], best.get(run["family"], math.inf))

    def solved(runs: dict[str, dict[str, Any]]) -> set[str]:
        return {name for name, run in runs.items() if run["cost"] <= best[run["family"]] * (1.0 + 1e-6) + run["floor"]}

    both = solved(found) & solved(default)
    ratios = {kind: geometric_mean([(found[name][kind] + 1) / (default[name][kind] + 1) for name in both])
              for kind in ("values", "Jacobians", "products")}  # fmt: skip
    return {"solved": len(solved(found)), **ratios}


# ---------------------------------------------------------------------- rows


def chain(x: torch.Tensor) -> torch.Tensor:
    """Rosenbrock's function of neighbouring variables."""
    return (4.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2).sum()


def row_runs(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the costs of the rows of each family, the counts, the processor time and errors of covariances."""
    found = {}
    fits_of_family = 50 if options.quick else 1000
    sanc.minimize_many(chain, torch.ones(2, 3))  # the first call takes longer
    for name in ("peak", "rough", "two decays"):
        data = family("peak" if name == "rough" else name, fits_of_family, "cpu", rough=name == "rough")
        clock = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            p, covariance, result = sanc.curve_fit(data.model, data.x, data.y, data.start, full_output=True)
        seconds = time.process_time() - clock
        found[name] = run_of_rows(result, seconds) | {"covariance": covariance_error(data, p, covariance)}
    starts = torch.linspace(0.5, 0.9, 1 if options.quick else 4, dtype=torch.float64)
    clock = time.process_time()
    result = sanc.minimize_many(chain, starts[:, None] * torch.ones(600, dtype=torch.float64))
    found["chain"] = run_of_rows(result, time.process_time() - clock)
    return found


def run_of_rows(result: Any, seconds: float) -> dict[str, Any]:
    """Return costs, counts and processor time of many rows; the cost of a row without success is infinite."""
    cost = torch.where(result.success, result.fun, torch.inf)
    counts = {name: int(getattr(result, name).sum()) for name in ("nfev", "njev")}
    return {"cost": cost.tolist(), **counts, "seconds": seconds}


def covariance_error(data: Family, p: torch.Tensor, covariance: torch.Tensor) -> float:
    """Return the largest relative difference between a finite covariance and its value from singular values."""
    columns = torch.func.vmap(torch.func.jacfwd(lambda q: data.model(data.x, *q)))(p)
    norms = torch.linalg.vector_norm(columns, dim=1)
    inverse = torch.linalg.pinv(columns / norms[:, None, :]) / norms[:, :, None]
    freedom = len(data.x) - p.shape[1]
    expected = inverse @ inverse.mT * (2.0 * data.cost(p) / freedom)[:, None, None]
    finite = covariance.isfinite().flatten(1).all(1)
    error = torch.linalg.matrix_norm(covariance - expected) / torch.linalg.matrix_norm(expected)
    return float(error[finite].max())


def rows_row(found: dict[str, dict[str, Any]], default: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare two sets of rows: their costs one by one, and the sums of what they need."""
    pairs = [
        (cost, other) for name in found for cost, other in zip(found[name]["cost"], default[name]["cost"], strict=True)
    ]
    margin = 1.0 + 1e-6
    row: dict[str, Any] = {
        "above": sum(cost > other * margin + 1e-12 for cost, other in pairs),
        "below": sum(other > cost * margin + 1e-12 for cost, other in pairs),
    }
    fitted = [name for name in found if name != "chain"]
    for kind, count in (("values", "nfev"), ("derivatives", "njev"), ("seconds", "seconds")):
        totals = [sum(runs[name][count] for name in fitted) for runs in (found, default)]
        row[kind] = totals[0] / totals[1]
    row["covariance"] = max(found[name]["covariance"] for name in fitted)
    for kind, count in (("values, n = 600", "nfev"), ("seconds, n = 600", "seconds")):
        row[kind] = found["chain"][count] / default["chain"][count]
    return row


# ---------------------------------------------------------------------- diagnosis


def cases(quick: bool) -> Iterator[tuple[str, Any, dict[str, Any], Callable[[Any], bool]]]:
    """Yield problems with their derivatives, a change of these, and whether a result is right."""
    ends = sanc.Status

    def consistent(result: Any) -> bool:
        return result.status not in (ends.INCONSISTENT, ends.STALLED)

    def contradicted(result: Any) -> bool:
        return result.status is ends.INCONSISTENT or not result.success

    problems = [problem for problem in zoo.PROBLEMS if problem.n <= 10]
    for problem in problems[:: 12 if quick else 2]:
        f, jac, _, hessp = zoo.numpy_functions(problem)
        rng = np.random.default_rng(len(problem.name))
        skew = rng.standard_normal((problem.n, problem.n))
        skew = skew - skew.T
        plain = {"jac": jac, "hessp": hessp, "tol": problem.gtol}
        yield "consistent", (f, problem), plain, consistent
        yield "2-point", (f, problem), {"jac": "2-point"}, consistent
        yield "gradient × 1.5", (f, problem), plain | {"jac": lambda x, jac=jac: 1.5 * jac(x)}, contradicted
        yield "gradient × −1", (f, problem), plain | {"jac": lambda x, jac=jac: -jac(x)}, contradicted
        scale = float(np.linalg.norm(hessp(problem.x0, np.ones(problem.n)))) or 1.0
        skewed = {"hessp": lambda x, v, hessp=hessp, A=scale * skew: hessp(x, v) + A @ v}
        yield "asymmetric products", (f, problem), plain | skewed, contradicted


def diagnoses(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Correct endings and cases of each kind."""
    found: dict[str, tuple[int, int]] = {}
    for kind, (f, problem), given, right in cases(options.quick):
        result = sanc.minimize(f, problem.x0, max_iter=200, max_time=5.0, certify=False, **given)
        good, many = found.get(kind, (0, 0))
        found[kind] = (good + right(result), many + 1)
    return found


def diagnosis_row(found: dict[str, tuple[int, int]], default: Any) -> dict[str, Any]:
    """Write down the correct endings."""
    return {kind: f"{good} of {many}" for kind, (good, many) in found.items()}


# ---------------------------------------------------------------------- samples


Task = Callable[[int, Mapping[str, Any]], float]


def trained(
    model: nn.Module, loss: Callable[[int], torch.Tensor], steps: int, full: Callable[[], torch.Tensor], **options: Any
) -> float:
    """Train with closures and return the loss on all data."""
    opt = sanc.SANC(model.parameters(), check=False, **options)
    for k in range(steps):
        opt.step(lambda k=k: loss(k))
    with torch.no_grad():
        return float(full())


def _squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - target).square().mean()


def _classifier(seed: int, widths: Sequence[int], X: Any, y: Any, *, batch: int, spoil: Any = None) -> Task:
    def run(steps: int, options: Mapping[str, Any]) -> float:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.Tanh()]
        model = nn.Sequential(*layers[:-1])
        x, t = torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(y)
        order = np.random.default_rng(seed).integers(len(x), size=(steps, batch))
        measure = (
            nn.functional.cross_entropy if t.dtype == torch.int64 else lambda out, t: (out[:, 0] - t).square().mean()
        )

        def loss(k: int) -> torch.Tensor:
            rows = torch.from_numpy(order[k])
            inputs, targets = (x[rows], t[rows]) if spoil is None else spoil(k, x[rows], t[rows])
            return measure(model(inputs), targets)

        return trained(model, loss, steps, lambda: measure(model(x), t), seed=seed, **options)

    return run


def tasks(seed: int) -> dict[str, Task]:
    """Return the tasks on samples."""
    digits, disease, diabetes = load_digits(), load_breast_cancer(), load_diabetes()
    X = digits.data / 16.0
    Z = (disease.data - disease.data.mean(0)) / disease.data.std(0)
    D = (diabetes.data - diabetes.data.mean(0)) / diabetes.data.std(0)
    rng = np.random.default_rng(seed)
    flipped = np.where(rng.random(len(X)) < 0.2, rng.integers(10, size=len(X)), digits.target)

    def outliers(k: int, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 1e3, t) if k % 40 == 30 else (x, t)

    def saddle(steps: int, options: Mapping[str, Any]) -> float:
        p = nn.Parameter(torch.tensor([1.0, 0.0], dtype=torch.float64))
        noise = torch.randn(steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        def f(k: int | None = None) -> torch.Tensor:
            return p[0] ** 2 - p[1] ** 2 + p[1] ** 4 + (0.0 if k is None else 0.3 * noise[k]) * p[0] + 0.25

        holder = nn.Module()
        holder.p = p
        return trained(holder, f, steps, f, seed=seed, **options)

    def tiny(steps: int, options: Mapping[str, Any]) -> float:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1e-3)
        x, t = torch.as_tensor(Z, dtype=torch.float32), torch.as_tensor(disease.target)
        order = np.random.default_rng(seed).integers(len(x), size=(steps, 32))

        def loss(k: int | None = None) -> torch.Tensor:
            rows = slice(None) if k is None else torch.from_numpy(order[k])
            return nn.functional.cross_entropy(model(x[rows]), t[rows])

        return trained(model, loss, steps, loss, seed=seed, **options)

    def embedding(steps: int, options: Mapping[str, Any]) -> float:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.EmbeddingBag(2000, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        tokens = torch.randint(2000, (3000, 12))
        target = (tokens % 4).float().mean(1).mul(2).long().clamp(0, 3)
        order = np.random.default_rng(seed).integers(len(tokens), size=(steps, 64))

        def loss(k: int | None = None) -> torch.Tensor:
            rows = slice(None) if k is None else torch.from_numpy(order[k])
            return nn.functional.cross_entropy(model(tokens[rows]), target[rows])

        return trained(model, loss, steps, loss, seed=seed, **options)

    def large_rate(steps: int, options: Mapping[str, Any]) -> float:
        return _classifier(seed, (64, 24, 24, 24, 10), X, digits.target, batch=32)(steps, {"lr": 1000.0, **options})

    def shifted(k: int, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, t * (1.0 + 0.01 * k)  # targets that grow, so that the loss does

    values = diabetes.target.astype(np.float32)
    return {
        "digits": _classifier(seed, (64, 32, 10), X, digits.target, batch=32),
        "digits, 20 % wrong labels": _classifier(seed, (64, 32, 10), X, flipped, batch=32),
        "digits, outliers": _classifier(seed, (64, 32, 10), X, digits.target, batch=32, spoil=outliers),
        "deep": _classifier(seed, (64, 24, 24, 24, 10), X, digits.target, batch=32),
        "breast cancer": _classifier(seed, (30, 16, 2), Z, disease.target, batch=32),
        "tiny weights": tiny,
        "regression": _classifier(seed, (10, 16, 1), D, (values - values.mean()) / values.std(), batch=32),
        "regression with an offset": _classifier(seed, (10, 16, 1), D, values * 10 + 5000, batch=32),
        "targets that grow": _classifier(seed, (10, 16, 1), D, (values - values.mean()) / 77, batch=32, spoil=shifted),
        "lr = 1000": large_rate,
        "embedding": embedding,
        "saddle": saddle,
    }


def sample_runs(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """Return the final losses by task and seed."""
    found = {}
    for seed in range(1 if options.quick else options.seeds):
        for name, run in tasks(seed).items():
            try:
                found[name, seed] = run(40 if options.quick else 400, settings)
            except sanc.SancError:
                found[name, seed] = math.nan
    return found


def samples_row(found: dict[tuple[str, int], float], default: dict[tuple[str, int], float]) -> dict[str, Any]:
    """Compare the final losses."""
    ratios = {key: (loss + 1e-3) / (default[key] + 1e-3) for key, loss in found.items() if math.isfinite(loss)}
    worst = max(ratios, key=ratios.__getitem__)
    return {"loss": geometric_mean(list(ratios.values())), "largest": ratios[worst], "on": worst[0],
            "failures": len(found) - len(ratios)}  # fmt: skip


def chosen(constants: Mapping[str, Sequence[Any]], options: argparse.Namespace) -> list[tuple[str, Any]]:
    """Return the constants and values to try."""
    named = [name for name in constants if any(part in name for part in options.only)]
    pairs = [(name, value) for name in named for value in constants[name]]
    return pairs[:: max(1, len(pairs) // 2)] if options.quick else pairs


PARTS: Mapping[str, tuple[Any, Any, Mapping[str, Sequence[float]], Mapping[str, Sequence[Any]]]] = {
    "exact": (exact_runs, exact_row, EXACT, EXACT_SETTINGS),
    "bounds": (bounded_runs, exact_row, BOUNDS, {}),
    "fits": (fit_runs, fits_row, FITS, {}),
    "rows": (row_runs, rows_row, ROWS, {}),
    "diagnosis": (diagnoses, diagnosis_row, DIAGNOSIS, {}),
    "samples": (sample_runs, samples_row, SAMPLES, SETTINGS),
}
"""For each part its runs, the comparison with those of the default, its constants and its settings."""


def job(part: str, name: str, value: Any, options: argparse.Namespace) -> Any:
    """Make the runs of one value of a constant or setting."""
    torch.set_num_threads(1)
    runs, _, constants, _ = PARTS[part]
    if name in constants:
        with patched(name, value):
            return runs(options, {})
    return runs(options, {} if name == "default" else {name: value})


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables."""
    texts = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        head = [key for key in mine[0] if key not in ("part", "name", "value")]
        cells = []
        for row in mine:
            is_constant = row["name"] in PARTS[part][2]
            known = f" (default {value_of(row['name']):g})" if is_constant else ""
            shown = f"{row['value']:g}" if isinstance(row["value"], int | float) else str(row["value"])
            cells.append([f"{row['name'].split(', ')[0]}{known}", shown, *(row[key] for key in head)])
        texts.append(markdown_table((part, "value", *head), cells, form, left=2))
    return "\n\n".join(texts)


def form(cell: Any) -> str:
    """Format a cell."""
    return cell if isinstance(cell, str) else number(cell, ",.0f" if isinstance(cell, int) else ".3g")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, quick="a few problems and constants, seconds", out="constants.json and table.md")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--only", nargs="+", default=[""], help="constants and settings whose name contains one of these"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)
    clock, rows = time.perf_counter(), []
    with worker_pool(options.workers) as pool:
        for part in options.parts:
            _, row_of, *groups = PARTS[part]
            jobs = [("default", ""), *(pair for group in groups for pair in chosen(group, options))]
            waiting = [pool.submit(job, part, name, value, options) for name, value in jobs]
            default = waiting[0].result()
            for (name, value), future in zip(jobs, waiting, strict=True):
                row = {"part": part, "name": name, "value": value, **row_of(future.result(), default)}
                rows.append(row)
                cells = ", ".join(f"{key} {form(cell)}" for key, cell in list(row.items())[3:])
                print(f"{time.perf_counter() - clock:6.0f} s  {part:10s} {name} = {value}: {cells}", flush=True)
    text = report(rows)
    print(f"\n{text}")
    write_results(options.out, {"table.md": text, "constants.json": {"rows": rows}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
