"""Eigenpairs of the curvature of all rows, restricted to free variables."""

from __future__ import annotations

import torch
from torch import Tensor

from sanc.core.space import ROUNDING_ERRORS
from sanc.many.algebra import eigenpairs, multiply_transposed
from sanc.many.rows import Rows, Spectra


def decompose(matrix: Tensor, rows: Rows, eps: float) -> Spectra:
    """Return the eigenpairs of the matrices of all rows, in scaled variables, restricted to the free ones."""
    g = rows.point.g * rows.scale
    if rows.free is not None:
        g = g * rows.free
        if not bool(rows.free.all()):
            matrix = _restricted(matrix, rows.free)
    values, vectors = eigenpairs(matrix)
    error = ROUNDING_ERRORS * eps * torch.maximum(-values[:, 0], values[:, -1])
    return Spectra(values, vectors, multiply_transposed(vectors, g), error)


def _restricted(matrix: Tensor, free: Tensor) -> Tensor:
    """Return the matrices of the free variables; the others have the norm of that as eigenvalues, and no effect."""
    both = free[:, :, None] & free[:, None, :]
    matrix = torch.where(both, matrix, 0.0)
    norm = torch.linalg.matrix_norm(matrix)
    return matrix + torch.diag_embed(torch.where(free, 0.0, norm[:, None]))
