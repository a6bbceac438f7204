"""Covariances from JᵀJ against singular values, up to the ratio of eigenvalues below which they are not used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sanc.leastsquares.row_covariances import _inverses, _inverses_by_singular_values


def columns_with(rng, ratio, count=30, n=3, points=20):
    """Return Jacobians whose JᵀJ has a ratio of eigenvalues of about `ratio`, once its columns have norm 1."""
    jacobians = []
    for _ in range(count):
        u = np.linalg.qr(rng.standard_normal((points, n)))[0]
        v = np.linalg.qr(rng.standard_normal((n, n)))[0]
        jacobian = u * np.append(np.ones(n - 1), ratio**0.5) @ v
        jacobians.append(jacobian * 10.0 ** rng.uniform(-3, 3, n))
    return torch.tensor(np.stack(jacobians))


@pytest.mark.parametrize(("ratio", "is_determined"), [(1e-3, True), (3e-9, True), (1e-13, False), (0.0, False)])
def test_inverses_are_accurate_where_they_are_called_determined(rng, ratio, is_determined):
    """The relative error is about eps over the ratio: 2e-6 at 1e-10, where singular values take over."""
    jacobians = columns_with(rng, ratio)
    inverse, determined = _inverses(jacobians.mT @ jacobians)
    assert bool((determined == is_determined).all())
    expected = torch.linalg.pinv(jacobians / jacobians.norm(dim=1, keepdim=True))
    expected = expected @ expected.mT
    norms = jacobians.norm(dim=1)
    if is_determined:
        scaled = inverse * norms[:, :, None] * norms[:, None, :]
        error = torch.linalg.matrix_norm(scaled - expected) / torch.linalg.matrix_norm(expected)
        assert float(error.max()) < 20 * 2.0**-52 / ratio
    by_values = _inverses_by_singular_values(jacobians.mT)
    if ratio == 0.0:
        assert bool(by_values[:, 0, 0].isinf().any())
    else:
        scaled = by_values * norms[:, :, None] * norms[:, None, :]
        error = torch.linalg.matrix_norm(scaled - expected) / torch.linalg.matrix_norm(expected)
        assert float(error.max()) < 20 * 2.0**-52 / ratio**0.5


def test_without_full_rank_the_covariance_is_infinite():
    jacobian = torch.ones(1, 2, 5, dtype=torch.float64)
    assert bool(_inverses_by_singular_values(jacobian).isinf().all())
    assert bool(_inverses_by_singular_values(torch.eye(3, dtype=torch.float64)[None, :, :2]).isinf().all())
