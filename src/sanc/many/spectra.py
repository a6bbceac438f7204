"""Eigenvalues of the curvature of all rows: of dense matrices, or of the Krylov spaces of larger problems."""

from __future__ import annotations

import torch
from torch import Tensor

from sanc.core.space import ROUNDING_ERRORS
from sanc.many.algebra import eigenpairs, multiply_transposed
from sanc.many.rows import Problem, Rows


def decompose(problem: Problem, rows: Rows) -> None:
    """Set the eigenvalues of the curvature of the free variables, the eigenvectors, and the gradient in their basis."""
    assert rows.matrix is not None
    matrix = rows.matrix if not problem.scales else rows.matrix * rows.scale[:, :, None] * rows.scale[:, None, :]
    g = rows.g * rows.scale
    if rows.free is not None:
        matrix, g = _restricted(matrix, rows.free), g * rows.free
    rows.values, rows.vectors = eigenpairs(matrix)
    rows.c = multiply_transposed(rows.vectors, g)
    rows.lambda_error = ROUNDING_ERRORS * problem.eps * rows.curvature


def _restricted(matrix: Tensor, free: Tensor) -> Tensor:
    """Return the matrices of the free variables; the others have the norm of that as eigenvalues, and no effect."""
    both = free[:, :, None] & free[:, None, :]
    matrix = torch.where(both, matrix, 0.0)
    norm = torch.linalg.matrix_norm(matrix)
    return matrix + torch.diag_embed(torch.where(free, 0.0, norm[:, None]))
