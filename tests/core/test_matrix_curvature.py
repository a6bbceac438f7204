"""The certificate of a Hessian that is a matrix, compared with eigenvalues that are known by construction."""

from __future__ import annotations

import numpy as np
import pytest

from sanc.core.matrix_curvature import measure_matrix_curvature

EPS = float(np.finfo(float).eps)


def known_matrix(rng, n=12):
    """Return eigenvalues from −2 to 1e4 in ascending order, and a symmetric matrix with them."""
    values = np.concatenate([[-2.0], np.geomspace(1e-3, 1e4, n - 1)])
    vectors = np.linalg.qr(rng.normal(size=(n, n)))[0]
    matrix = (vectors * values) @ vectors.T
    return values, 0.5 * (matrix + matrix.T)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("column_error", [0.0, 1e-6, 1e-2])
def test_the_error_bounds_that_of_the_eigenvalues(seed, column_error):
    rng = np.random.default_rng(seed)
    values, matrix = known_matrix(rng)
    errors = rng.normal(size=matrix.shape)
    columns = matrix + column_error * errors / np.linalg.norm(errors, axis=0)
    measured = measure_matrix_curvature(columns, EPS, column_error)
    certificate = measured.certificate(grad_norm=0.5, gradient_tolerance=1.0, curvature_tolerance=0.1)
    assert np.abs(measured.values - values).max() <= measured.error <= 1e-10 + 10 * column_error
    assert measured.is_symmetric and certificate.saddle and certificate.confidence == 1.0
    assert abs(certificate.lambda_min + 2.0) <= certificate.error_bound and certificate.products == len(values)
    assert measured.norm == pytest.approx(1e4)


def test_asymmetry_beyond_the_error_of_the_columns_is_reported():
    _, matrix = known_matrix(np.random.default_rng(0))
    skew = np.zeros_like(matrix)
    skew[0, 1], skew[1, 0] = 1.0, -1.0
    measured = measure_matrix_curvature(matrix + skew, EPS)
    assert not measured.is_symmetric and measured.error >= measured.asymmetry
    assert measured.asymmetry == pytest.approx(np.linalg.norm(skew), rel=1e-6)
    assert measure_matrix_curvature(matrix + skew, EPS, column_error=1.0).is_symmetric
