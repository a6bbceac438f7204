"""Linear systems with the Hessian, in Krylov spaces and in spaces of known Ritz pairs, against dense solutions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sanc.core.spectrum.curvature import explore
from sanc.implicit.linear_systems import RitzSpace, ritz_space_of, solve, solve_least_squares
from sanc.minimisation.objective import build_oracle
from tensors import normal

D = torch.float64


NOTHING = RitzSpace(np.empty(0))


def oracle_of(matrix):
    oracle, x, _ = build_oracle(
        lambda x: 0.5 * x @ matrix @ x, torch.zeros(len(matrix), dtype=D), jac=None, hess=None, hessp=None, args=()
    )
    return oracle, x


@pytest.mark.parametrize("condition", [10.0, 1e4, 1e8])
@pytest.mark.parametrize("size", [30, 400])
def test_linear_systems(condition, size):
    Q = torch.linalg.qr(normal(size, size)).Q
    eigenvalues = torch.cat([torch.logspace(-math.log10(condition), 0, 8, dtype=D), torch.ones(size - 8, dtype=D)])
    H = Q * eigenvalues @ Q.T
    H = (H + H.T) / 2
    oracle, x = oracle_of(H)
    explored = explore(oracle, x, gradient_tolerance=1.0, curvature_tolerance=0.0, thorough=True, relative_error=0.5)
    u = normal(size, seed=4)
    for known in (ritz_space_of(explored, oracle.space), NOTHING):
        lower = explored.certificate.lower_bound
        found = solve(oracle.hessian(x), u, oracle.space, known, eigenvalue_lower_bound=lower, rtol=1e-10)
        truth = torch.linalg.solve(H, u)
        error = float((found.v - truth).norm() / truth.norm())
        assert error <= max(1e-9, 1e-14 * condition)
        assert float((u - H @ found.v).norm()) == pytest.approx(found.residual, rel=0.5, abs=1e-12)
        assert found.error == pytest.approx(found.residual / explored.certificate.lower_bound / float(found.v.norm()))


def test_all_ritz_pairs_of_a_small_space_solve_at_once():
    size = 60
    H = normal(size, size)
    H = H @ H.T + 1e-3 * torch.eye(size, dtype=D)
    oracle, x = oracle_of(H)
    explored = explore(oracle, x, gradient_tolerance=1.0, curvature_tolerance=0.0, thorough=True)
    found = solve(
        oracle.hessian(x), normal(size), oracle.space, ritz_space_of(explored, oracle.space),
        eigenvalue_lower_bound=explored.certificate.lower_bound, rtol=1e-8,
    )  # fmt: skip
    assert found.products <= 6 and found.error <= 1e-8


def graded(size=300, smallest=1e-2):
    """A matrix with a few small eigenvalues and the others from 1 to 2."""
    Q = torch.linalg.qr(normal(size, size)).Q
    H = Q * torch.cat([torch.logspace(math.log10(smallest), 0, 12, dtype=D), torch.linspace(1, 2, size - 12).to(D)])
    H = H @ Q.T
    return (H + H.T) / 2


def test_ritz_pairs_of_a_random_start_save_products_of_another_right_side():
    """Block elimination leaves the Schur complement, whose inverse is a block of H⁻¹."""
    H = graded()
    oracle, x = oracle_of(H)
    explored = explore(oracle, x, gradient_tolerance=1.0, curvature_tolerance=0.0, thorough=True, relative_error=0.5)
    known, u, lower = ritz_space_of(explored, oracle.space), normal(300, seed=6), explored.certificate.lower_bound
    assert 0 < known.dim < 100
    W = known.rows.T
    outside = torch.linalg.qr(torch.cat([W, normal(300, 300)], 1)).Q[:, known.dim : 300]
    q = known._next_vector
    columns = [known.schur_product(lambda v: H @ v, column, float(q @ column)) for column in outside.T]
    S = outside.T @ torch.stack(columns, 1)
    assert torch.allclose(torch.linalg.inv(S), outside.T @ torch.linalg.inv(H) @ outside, atol=1e-8)
    counts = []
    for pairs in (known, NOTHING):
        found = solve(oracle.hessian(x), u, oracle.space, pairs, eigenvalue_lower_bound=lower, rtol=1e-6)
        truth = torch.linalg.solve(H, u)
        assert float((found.v - truth).norm() / truth.norm()) <= found.error <= 1e-6
        counts.append(found.products)
    assert counts[0] < 0.7 * counts[1]


def test_ritz_pairs_of_another_matrix_are_left_out():
    """Pairs of a matrix that differs by half are no help, and those of one that differs by a thousandth are."""
    H, u = graded(60), normal(60)
    values, vectors = torch.linalg.eigh(H)
    known = RitzSpace(values.numpy(), vectors.T.contiguous())
    counts = []
    for change in (1e-3, 0.5):
        E = normal(60, 60, seed=3)
        E = E @ E.T
        other = H + change * 0.01 * E / torch.linalg.matrix_norm(E, 2)
        oracle, x = oracle_of(other)
        lower = float(torch.linalg.eigvalsh(other)[0])
        found = solve(oracle.hessian(x), u, oracle.space, known, eigenvalue_lower_bound=lower, rtol=1e-8, change=change)
        truth = torch.linalg.solve(other, u)
        assert float((found.v - truth).norm() / truth.norm()) <= found.error <= 1e-8
        counts.append(found.products)
    assert counts[0] <= 5 < counts[1]


def test_least_squares_is_the_pseudo_inverse():
    Q = torch.linalg.qr(normal(40, 40)).Q
    eigenvalues = torch.cat([torch.zeros(5, dtype=D), torch.linspace(1, 3, 35, dtype=D)])
    H = Q * eigenvalues @ Q.T
    oracle, x = oracle_of((H + H.T) / 2)
    u = normal(40, seed=5)
    found = solve_least_squares(oracle.hessian(x), u, oracle.space, rtol=1e-10)
    assert torch.allclose(found.v, torch.linalg.pinv(H, rtol=1e-8) @ u, atol=1e-9)


def test_a_zero_right_side():
    oracle, x = oracle_of(torch.eye(4, dtype=D))
    zero = torch.zeros(4, dtype=D)
    assert not solve(oracle.hessian(x), zero, oracle.space, NOTHING, eigenvalue_lower_bound=1.0, rtol=1e-8).v.any()
    assert not solve_least_squares(oracle.hessian(x), zero, oracle.space, rtol=1e-8).v.any()
