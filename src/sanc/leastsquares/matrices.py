"""Dense Jacobians on the device of the parameters, and the eigenpairs of their smaller Gram matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from sanc.core.space import ROUNDING_ERRORS, Floats
from sanc.core.spectrum.krylov import DiagonalBasis, NonFiniteProductError

MAX_GRAM_SIDE = 6000
"""Largest smaller side of a Jacobian that is stored: the eigenpairs of its Gram matrix take a minute on one core."""
MAX_MATRIX_ENTRIES = 250_000_000
"""Largest number of entries of a Jacobian that is stored: 2 GB in float64."""


def fits_in_memory(m: int, n: int) -> bool:
    """Return whether a Jacobian of m rows and n columns is stored as a matrix."""
    return min(m, n) <= MAX_GRAM_SIDE and m * n <= MAX_MATRIX_ENTRIES


class JacobianMatrix(LinearOperator):  # type: ignore[misc]
    """A Jacobian as a tensor on its device, with products of NumPy vectors.

    Attributes
    ----------
    matrix : Tensor
        The Jacobian.
    """

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(np.dtype(str(matrix.dtype).removeprefix("torch.")), tuple(matrix.shape))
        self.matrix = matrix

    def vector(self, v: Any) -> Tensor:
        """Return a NumPy vector as a tensor like the Jacobian."""
        return torch.from_numpy(np.ascontiguousarray(v).reshape(-1)).to(self.matrix)

    def _matvec(self, v: Any) -> Floats:
        return _array(self.matrix @ self.vector(v))

    def _rmatvec(self, w: Any) -> Floats:
        return _array(self.matrix.T @ self.vector(w))

    def column_norms(self) -> Floats:
        """Return the column norms."""
        return _array(torch.linalg.vector_norm(self.matrix, dim=0, dtype=torch.float64))

    def decompose(
        self, scale: Floats, free_indices: Sequence[int] | None, weights: Floats | None, factor: float
    ) -> GramSpace:
        """Return the space of the eigenvectors of B = factor · D Jᵀ diag(h) J D, from the smaller Gram matrix.

        With fewer rows than columns it is that of the rows, K = factor · √h J D² Jᵀ √h. The eigenvectors of B are then
        combinations of the rows of J, and those of eigenvalues below roundoff are left out.
        """
        columns = self.matrix * self.vector(scale * factor**0.5)
        if free_indices is not None:
            columns = columns[:, torch.as_tensor(free_indices, device=columns.device)]
        if weights is not None:
            columns = columns * self.vector(np.sqrt(weights))[:, None]
        columns = columns.double()
        m, n = columns.shape
        is_wide = m < n
        gram = columns @ columns.T if is_wide else columns.T @ columns
        if not bool(torch.isfinite(gram).all()):
            raise NonFiniteProductError("the Jacobian is not finite")
        values, vectors = torch.linalg.eigh(gram)
        values = values.clamp(min=0.0)
        if is_wide:
            kept = values > ROUNDING_ERRORS * torch.finfo(values.dtype).eps * values[-1]
            kept[-1] = True
            values, vectors = values[kept], vectors[:, kept]
        return GramSpace(columns, values, vectors, is_wide)


class GramSpace(DiagonalBasis):
    """The space of the eigenvectors of B = AᵀA that have an effect on A s: T is diagonal, and the space invariant.

    Parameters
    ----------
    columns : Tensor
        A, the Jacobian in scaled variables.
    values, vectors : Tensor
        Eigenpairs of AAᵀ if `is_wide`, otherwise of AᵀA.
    """

    def __init__(self, columns: Tensor, values: Tensor, vectors: Tensor, is_wide: bool) -> None:
        super().__init__(_array(values), np.zeros(len(values)))
        self._columns, self._vectors, self._is_wide = columns, vectors, is_wide
        self._singular = values.sqrt().clamp(min=torch.finfo(values.dtype).tiny)

    @property
    def basis(self) -> Any:
        return _array(self._combinations(torch.eye(len(self.values), dtype=torch.float64, device=self._columns.device)))

    def project(self, q: Floats) -> Floats:
        """Return the vector Aᵀq in the eigenbasis."""
        given = torch.from_numpy(np.ascontiguousarray(q, np.float64)).to(self._columns)
        if self._is_wide:
            return _array(self._singular * (self._vectors.T @ given))
        return _array(self._vectors.T @ (self._columns.T @ given))

    def coordinates(self, v: Floats) -> Floats:
        """Return the projection of a vector on the space, in the eigenbasis."""
        given = torch.from_numpy(np.ascontiguousarray(v, np.float64)).to(self._columns)
        if self._is_wide:
            return _array((self._vectors.T @ (self._columns @ given)) / self._singular)
        return _array(self._vectors.T @ given)

    def combine(self, *coefficients: Floats) -> Any:
        given = torch.from_numpy(np.stack(coefficients)).to(self._columns)
        return list(_array(self._combinations(given)))

    def _combinations(self, coefficients: Tensor) -> Tensor:
        """Return combinations of the eigenvectors of B, as rows."""
        if self._is_wide:
            return (coefficients / self._singular) @ self._vectors.T @ self._columns
        return coefficients @ self._vectors.T


def _array(tensor: Tensor) -> Floats:
    """Return a tensor as an array on the host."""
    array: Floats = tensor.detach().cpu().numpy()
    return array
