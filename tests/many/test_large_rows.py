"""Rows with too many variables for dense Hessians are minimised in Krylov spaces, as `minimize` does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sanc
from sanc.many import entry
from sanc.many.lanczos import RowLanczos, certified_spectra


def chain(x):
    return (100.0 * (x[1:] - x[:-1] ** 2) ** 2 / len(x) + (1.0 - x[:-1]) ** 2 / len(x)).sum()


def double_wells(x, weights):
    return (weights * (x**2 - 1.0) ** 2).sum() + 0.1 * (x[1:] - x[:-1]).square().sum()


def all_double_wells(x, weights):
    return (weights * (x**2 - 1.0) ** 2).sum(1) + 0.1 * (x[:, 1:] - x[:, :-1]).square().sum(1)


def matrices(rows, dim, seed=0):
    """Return symmetric matrices, with their eigenvalues."""
    rng = np.random.default_rng(seed)
    values = np.sort(rng.uniform(-1.0, 10.0, (rows, dim)))
    bases = np.linalg.qr(rng.standard_normal((rows, dim, dim)))[0]
    return torch.tensor(bases * values[:, None, :] @ bases.transpose(0, 2, 1)), torch.tensor(values)


def test_lanczos_has_the_eigenvalues_of_the_matrix():
    matrix, values = matrices(3, 12)
    process = RowLanczos(lambda v: (matrix @ v[:, :, None])[:, :, 0], torch.ones(3, 12, dtype=torch.float64), 2.0**-52)
    for _ in range(12):
        process.extend()
    found, vectors = process.eigenpairs()
    torch.testing.assert_close(found, values, rtol=1e-10, atol=1e-10)
    ritz = process.ritz_vectors(vectors)
    torch.testing.assert_close(matrix @ ritz, ritz * found[:, None, :], rtol=1e-8, atol=1e-8)


def test_a_complete_krylov_space_adds_no_eigenvalue():
    matrix, _ = matrices(2, 10)
    matrix[0] = torch.diag(torch.tensor([3.0, 3.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]))
    process = RowLanczos(lambda v: (matrix @ v[:, :, None])[:, :, 0], torch.ones(2, 10, dtype=torch.float64), 2.0**-52)
    for _ in range(6):
        process.extend()
    found = process.eigenpairs()[0]
    assert float(found[0].min()) == pytest.approx(3.0)
    assert torch.allclose(found[0, 1:], torch.tensor(5.0, dtype=torch.float64), rtol=0.1)


def test_bounds_of_the_smallest_eigenvalue_hold():
    matrix, values = matrices(40, 60, seed=3)
    start = torch.randn(40, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    process = RowLanczos(lambda v: (matrix @ v[:, :, None])[:, :, 0], start, 2.0**-52)
    tol = torch.full((40,), 2.0, dtype=torch.float64)  # all matrices have λ_min > −2
    found = certified_spectra(process, start, tol, 0.99, 2.0**-52)
    assert process.dim < 60
    assert (found.values[:, 0] >= values[:, 0] - 1e-9).all()
    assert (found.values[:, 0] - found.lambda_error >= -tol).all()
    assert (values[:, 0] >= found.values[:, 0] - found.lambda_error).all()


@pytest.fixture
def no_dense_hessians(monkeypatch):
    monkeypatch.setattr(entry, "LARGEST_DIM", 20)


def test_large_rows_end_at_certified_minima(no_dense_hessians):
    generator = torch.Generator().manual_seed(0)
    weights = 0.5 + torch.rand(4, 50, generator=generator, dtype=torch.float64)
    x0 = 0.3 * torch.randn(4, 50, generator=generator, dtype=torch.float64)
    x0[3] = 0.0  # a stationary point with negative curvature
    res = sanc.minimize_many(double_wells, x0, (weights,), in_dims=0)
    assert res.success.all()
    assert (res.status == 0).all()
    assert res.confidence == 0.99
    for row in range(4):
        hessian = torch.func.hessian(double_wells)(res.x[row], weights[row])
        smallest = float(torch.linalg.eigvalsh(hessian)[0])
        assert float(res.lambda_min[row] - res.lambda_error[row]) <= smallest <= float(res.lambda_min[row]) + 1e-9
        assert float(torch.func.grad(double_wells)(res.x[row], weights[row]).norm()) <= float(res.tol[row])
        assert res[row].certificate.second_order
        assert res[row].certificate.confidence == 0.99
    alone = sanc.minimize_many(double_wells, x0[2:3], (weights[2:3],), in_dims=0)
    torch.testing.assert_close(alone.lambda_error, res.lambda_error[2:3], rtol=1e-3, atol=0.0)
    vectorized = sanc.minimize_many(all_double_wells, x0[2:], (weights[2:],), in_dims=0, vectorized=True)
    torch.testing.assert_close(vectorized.fun, res.fun[2:], rtol=1e-9, atol=1e-9)


def test_large_rows_reach_the_minimum_of_minimize(no_dense_hessians):
    x0 = torch.full((2, 80), 0.9, dtype=torch.float64)
    x0[1, ::2] = 1.1
    res = sanc.minimize_many(chain, x0)
    for row in range(2):
        one = sanc.minimize(chain, x0[row])
        assert bool(res.success[row])
        assert one.success
        torch.testing.assert_close(res.x[row], one.x, rtol=1e-4, atol=1e-4)
        assert int(res.nit[row]) <= 2 * one.nit + 5


def test_large_rows_have_no_bounds():
    with pytest.raises(sanc.ArgumentError, match="bounds cannot be used with 600 variables in a row"):
        sanc.minimize_many(chain, torch.ones(2, 600), bounds=[(-1, 1)] * 600)
