"""The covariances of the parameters of many rows, as SciPy defines them for one fit."""

from __future__ import annotations

import torch
from torch import Tensor

from sanc.leastsquares.rows import FitProblem

_MIN_EIGENVALUE_RATIO = 1e-10
"""Ratio of eigenvalues of JᵀJ below which the covariance is computed from singular values of J."""


def covariances(problem: FitProblem, outputs: dict[str, Tensor], absolute_sigma: bool) -> Tensor:
    """Return the covariance of the parameters of each row as SciPy defines it; infinite where it is not determined."""
    p, matrix = outputs["x"], outputs["gauss_newton"]
    unknown = torch.nonzero(~matrix.isfinite().flatten(1).all(1)).reshape(-1)
    if len(unknown):  # such as rows that never began
        matrix[unknown] = problem.evaluate(p[unknown], unknown).extras.gauss_newton
    inverse, determined = _inverses(matrix)
    ill = torch.nonzero(~determined).reshape(-1)
    if len(ill):
        (inverse[ill],) = problem.in_chunks(
            lambda p, data: (_inverses_by_singular_values(problem.model.linearised(p, data).double()[:, :-1]),),
            p[ill],
            ill,
        )
    if absolute_sigma:
        return inverse
    freedom = (problem.data.observations - p.shape[1]).double()
    scale = torch.where(freedom > 0, 2.0 * outputs["value"] / freedom, torch.inf)
    return torch.where(scale.isfinite()[:, None, None], inverse * scale[:, None, None], torch.inf)


def _inverses(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses of JᵀJ, and where they are determined by it."""
    norms = matrix.diagonal(dim1=1, dim2=2).sqrt()
    scale = torch.where((norms > 0.0) & norms.isfinite(), 1.0 / norms, 1.0)
    scale = scale[:, :, None] * scale[:, None, :]
    scaled = matrix * scale  # with ones on its diagonal
    finite = scaled.isfinite().flatten(1).all(1)
    factor, failed = torch.linalg.cholesky_ex(torch.where(finite[:, None, None], scaled, 0.0))
    inverse = torch.cholesky_inverse(torch.where((failed == 0)[:, None, None], factor, 1.0))
    largest = torch.linalg.matrix_norm(inverse)  # at least 1/λ, where λ is the smallest eigenvalue of the matrix
    determined = finite & (failed == 0) & (largest * _MIN_EIGENVALUE_RATIO < 1.0 / matrix.shape[1])
    return inverse * scale, determined


def _inverses_by_singular_values(columns: Tensor) -> Tensor:
    """Return (JᵀJ)⁻¹ of each row from the columns of J; infinite if J has no full rank."""
    norms = torch.linalg.vector_norm(columns, dim=2)
    scale = torch.where((norms > 0.0) & norms.isfinite(), 1.0 / norms, 1.0)
    finite = columns.isfinite().flatten(1).all(1)[:, None, None]
    scaled = torch.where(finite, columns * scale[:, :, None], 0.0)
    n, points = columns.shape[1:]
    if points < n:
        return torch.full_like(columns[:, :, :1].expand(-1, n, n), torch.inf)
    singular, rows = torch.linalg.svd(scaled.mT, full_matrices=False)[1:]
    is_full = singular[:, -1] > torch.finfo(singular.dtype).eps * max(n, points) * singular[:, 0]
    factor = rows / singular[:, :, None] * scale[:, None, :]
    return torch.where(is_full[:, None, None], factor.mT @ factor, torch.inf)
