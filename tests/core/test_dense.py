"""The model of dense Hessians: Newton's line, the whole space, and the Krylov space where there is no matrix."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch

import sanc
from sanc.core.dense import DenseModel, EigenSpace, NewtonLine, eigenpairs
from sanc.core.iteration import Iteration
from sanc.core.meter import Meter
from sanc.core.oracle import Operator, Oracle
from sanc.core.space import NumpySpace
from sanc.core.spectrum.cubic import CubicStep
from sanc.core.spectrum.krylov import StepBasis
from sanc.leastsquares.matrices import JacobianMatrix
from sanc.presets import PRESETS

MODEL = DenseModel.of(PRESETS["robust"].model)


def logistic(rng, n=300, d=6, penalty="l2", sparse=False, scale=1.0):
    X = scale * rng.standard_normal((n, d))
    y = (X @ rng.standard_normal(d) + scale * rng.standard_normal(n) > 0).astype(int)
    return sanc.problems.Logistic(scipy.sparse.csr_matrix(X) if sparse else X, y, penalty=penalty, strength=0.01)


class Quartic(Oracle):
    """f = Σ a_i x_i² + x_i⁴/12 with the Hessian as a matrix, and a_i of both signs."""

    exact = True

    def __init__(self, a):
        self.a, self.space, self.meter = a, NumpySpace(len(a), np.dtype(float)), Meter()
        self.matrices = 0

    def value(self, x):
        return float((self.a * x**2 + x**4 / 12).sum())

    def gradient(self, x):
        return self.value(x), 2 * self.a * x + x**3 / 3

    def hessian(self, x):
        oracle = self

        class Matrix(Operator):
            def __call__(self, v):
                return (2 * oracle.a + x**2) * v

            def gradient(self):
                return oracle.gradient(x)[1]

            def matrix(self):
                oracle.matrices += 1
                return np.diag(2 * oracle.a + x**2)

        return Matrix()


@pytest.mark.parametrize("penalty", ["l2", "nonconvex"])
def test_the_minimiser_is_that_of_another_library(penalty, rng):
    problem = logistic(rng, penalty=penalty)
    found = sanc.minimize(problem, np.zeros(6), model=MODEL, tol=1e-10)
    theirs = scipy.optimize.minimize(problem.value_and_gradient, np.zeros(6), jac=True, options={"gtol": 1e-10})
    assert found.success and found.x == pytest.approx(theirs.x, abs=1e-7)
    assert found.certificate.second_order


def test_a_positive_definite_hessian_gives_newtons_step(rng):
    problem = logistic(rng)
    records = sanc.minimize(problem, np.full(6, 0.1), model=MODEL, sigma0=1e-12, max_iter=1).history
    w = np.full(6, 0.1)
    newton = np.linalg.solve(problem.hessian_matrix(w), -problem.value_and_gradient(w)[1])
    assert records[0].step_norm in (pytest.approx(np.linalg.norm(newton)), pytest.approx(2 * np.linalg.norm(newton)))
    assert records[0].krylov_dim == 6


def test_newtons_step_is_doubled_while_f_decreases_by_more_than_predicted(rng):
    problem = logistic(rng, scale=4.0)
    found = sanc.minimize(problem, np.zeros(6), model=MODEL)
    doubled = [record for record in found.history if record.trials > 1 and record.rho > 1.2]
    plain = sanc.minimize(problem, np.zeros(6), model=MODEL, max_resolves=0)  # no further trial points
    assert doubled and found.nit < plain.nit
    assert found.fun == pytest.approx(plain.fun, abs=1e-12)


def test_newtons_step_is_not_doubled_by_a_model_that_tries_no_longer_steps(rng):
    class OneStep(DenseModel):
        tries_longer_steps = False

    problem = logistic(rng, scale=4.0)
    doubled = sanc.minimize(problem, np.zeros(6), model=MODEL)
    found = sanc.minimize(problem, np.zeros(6), model=OneStep.of(MODEL))
    assert max(record.trials for record in doubled.history[1:]) > 1
    assert all(record.trials == 1 for record in found.history if record.rho > 1.0)
    assert found.fun == pytest.approx(doubled.fun, abs=1e-12)


def test_negative_curvature_is_followed_in_the_whole_space():
    oracle, x = Quartic(np.array([-1.0, 0.5, 2.0])), np.array([1e-3, 1.0, 1.0])
    iteration = Iteration(sanc.method_for(model=MODEL), 0)
    for _ in range(30):
        x, record = iteration.iterate(x, oracle)
    assert oracle.matrices > 0 and record.grad_norm < 1e-8
    assert np.abs(x) == pytest.approx([np.sqrt(6), 0, 0], abs=1e-7)  # 2a + x²/3 = 0


def test_a_step_that_sigma_limits_is_the_global_minimiser_of_the_model():
    a, x = np.array([0.5, 1.0, 3.0]), np.array([1.0, -1.0, 2.0])
    oracle, sigma = Quartic(a), 50.0
    record = Iteration(sanc.method_for(model=MODEL, sigma0=sigma, first_radius=None), 0).iterate(x, oracle)[1]
    g, B = oracle.gradient(x)[1], np.diag(2 * a + x**2)
    model = lambda s: g @ s + 0.5 * s @ B @ s + sigma / 3 * np.linalg.norm(s) ** 3
    best = scipy.optimize.minimize(model, -g / 100, tol=1e-12)
    assert record.sigma == sigma and record.model_decrease == pytest.approx(-best.fun, rel=1e-8)


def test_without_a_matrix_the_steps_are_those_of_the_krylov_space(rng):
    problem = logistic(rng, sparse=True)
    dense, krylov = (sanc.minimize(problem, np.zeros(6), **how) for how in ({"model": MODEL}, {}))
    assert np.array_equal(dense.x, krylov.x) and dense.nit == krylov.nit


def test_bounds_use_the_whole_space(rng):
    problem = logistic(rng)
    found = sanc.minimize(problem, np.full(6, 0.05), model=MODEL, bounds=[(0, 0.1)] * 6, tol=1e-9)
    theirs = scipy.optimize.minimize(
        problem.value_and_gradient, np.full(6, 0.05), jac=True, bounds=[(0, 0.1)] * 6, options={"ftol": 1e-15}
    )
    assert found.success and found.x == pytest.approx(theirs.x, abs=1e-5)


def test_the_hessian_norm_of_a_line_is_that_of_a_product():
    line = NewtonLine(MODEL, None, None, None, 1.0, None, hessian_norm=3.0)
    assert line.hessian_norm == 3.0 and line.longer_step(SimpleNamespace(rejected=None), 1.0, 1) is None


def test_longer_steps_on_a_line_are_twice_the_last_one_and_follow_no_rejected_step():
    step = CubicStep(np.array([2.0]), 2.0, 0.0, 1.0, hard_case=False)
    line = NewtonLine(replace(MODEL, max_resolves=3), None, None, None, 1.0, None, step=step)
    here = SimpleNamespace(rejected=None)
    assert [line.longer_step(here, 1.0, trials).norm for trials in (1, 2, 3)] == [4.0, 8.0, 16.0]
    assert line.longer_step(here, 1.0, 4) is None
    assert line.longer_step(SimpleNamespace(rejected=step), 1.0, 2) is None


def test_a_convex_sum_needs_no_probe_for_negative_curvature(rng):
    convex, other = logistic(rng), logistic(rng, penalty="nonconvex")
    assert convex.convex and not other.convex and not sanc.problems.NonconvexSVM(convex.X, 2 * convex.y - 1).convex
    found = sanc.minimize(convex, np.zeros(6), certify=False)
    assert found.success and found.certificate is None
    assert sanc.minimize(convex, np.zeros(6)).certificate is not None


def test_a_singular_hessian_makes_no_step_along_its_null_space(rng):
    X = rng.standard_normal((200, 4))
    X = np.column_stack([X, X[:, 0]])  # two equal columns, without a penalty
    problem = sanc.problems.Logistic(X, (X[:, 0] + rng.standard_normal(200) > 0).astype(int), penalty="none")
    found = sanc.minimize(problem, np.zeros(5), model=MODEL, tol=1e-9, certify=False)
    assert found.success and found.x[0] == pytest.approx(found.x[4], abs=1e-9)


def test_bases_of_eigenvectors_have_the_members_of_a_step_basis(rng):
    """`EigenSpace` and `GramSpace` against the matrix itself: QBQᵀ = T, Qᵀu, and no vector follows."""
    A = rng.standard_normal((7, 4))
    B, g = A.T @ A, rng.standard_normal(4)
    values, rows = eigenpairs(B)
    gram = JacobianMatrix(torch.from_numpy(A)).decompose(np.ones(4), None, None, 1.0)
    gram.projected_gradient = gram.coordinates(g)
    for space in (EigenSpace(values, rows, rows @ g), gram):
        assert {name for name in vars(StepBasis) if not name.startswith("_")} <= set(dir(space))
        diagonal, off_diagonal = space.tridiagonal()
        assert np.allclose(space.basis @ B @ space.basis.T, np.diag(diagonal)) and off_diagonal.tolist() == [0.0] * 3
        u = rng.standard_normal(4)
        assert np.allclose(space.combine(u)[0], u @ space.basis)
        assert np.allclose(space.combine(space.projected_gradient)[0], g)
        assert (space.products, space.last_beta, space.residual_of(u)) == (4, 0.0, 0.0)
        assert space.schur_complement == 0.0
        with pytest.raises(ValueError, match="invariant"):
            space.next_vector  # noqa: B018
