"""Derivatives of the problems of `benchmarks.unseen`, and the minimiser on them."""

from __future__ import annotations

import numpy as np
import pytest

import sanc
from benchmarks import unseen
from benchmarks.common import zoo

PROBLEMS = unseen.problems()
LONG = (
    "HUMPS", "LOG-HAIRY", "LOG-HAIRY-CHAIN-10", "DIPOLES-6", "DIPOLES-8", "PENALTY-EXP-10", "STEEP-ROSENBROCK-10",
    "FLAT-VALLEY", "CHAINED-WOOD-10", "GROWTH", "SNAIL",
)  # fmt: skip


def test_names_are_unique():
    assert len({problem.name for problem in PROBLEMS}) == len(PROBLEMS) >= 80


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_products_agree_with_differences_of_values(problem):
    """Near the start: a few problems have discontinuous third derivatives there."""
    rng = np.random.default_rng(0)
    x = problem.x0 + 0.1 * rng.standard_normal(problem.n) * np.clip(np.abs(problem.x0), 1e-3, 1.0)
    v = rng.standard_normal(problem.n) * np.clip(np.abs(x), 1e-3, 1.0)
    f, jac, _, hessp = zoo.numpy_functions(problem)
    t = 1e-4
    ahead, here, back = (f(x + s * v) for s in (t, 0.0, -t))
    roundoff = 1e-13 * max(abs(ahead), abs(here), abs(back))
    assert jac(x) @ v == pytest.approx((ahead - back) / (2 * t), rel=1e-3, abs=roundoff / t + 1e-9)
    assert v @ hessp(x, v) == pytest.approx((ahead - 2 * here + back) / t**2, rel=1e-2, abs=roundoff / t**2 + 1e-9)


def solve(problem):
    f, jac, _, hessp = zoo.numpy_functions(problem)
    result = sanc.minimize(f, problem.x0, jac=jac, hessp=hessp, tol=problem.gtol)
    assert result.success, f"{result.status.name}: f = {result.fun}, {result.nit} iterations"
    assert np.linalg.norm(jac(result.x)) <= problem.gtol
    assert np.linalg.eigvalsh(zoo.dense_hessian(problem, result.x))[0] >= -1e-3


@pytest.mark.parametrize(
    "problem", [p for p in PROBLEMS if p.n <= 20 and p.name not in LONG], ids=lambda problem: problem.name
)
def test_small_problems_are_solved(problem):
    solve(problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem", [p for p in PROBLEMS if p.n > 20 or p.name in LONG], ids=lambda problem: problem.name
)
def test_large_problems_are_solved(problem):
    solve(problem)
