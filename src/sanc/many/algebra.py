"""Products of many small matrices and vectors.

On a CPU without MKL, whose products of many small matrices are fast, element-wise products and sums replace `torch.bmm`
for few long rows, such as transposed Jacobians.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CUDA_BATCH = 2**15
"""Matrices in one call of cuSOLVER, which fails above 65,535."""
_ELEMENTWISE_ROWS = 12
"""Rows of a matrix up to which its products are element-wise on a CPU without MKL, if its rows are longer."""
_HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def multiply(matrix: Tensor, v: Tensor) -> Tensor:
    """Return Mv of each row."""
    return (matrix * v[:, None, :]).sum(2) if _has_long_rows(matrix) else (matrix @ v[:, :, None])[:, :, 0]


def multiply_transposed(matrix: Tensor, v: Tensor) -> Tensor:
    """Return Mᵀv of each row."""
    return (matrix * v[:, :, None]).sum(1) if _has_long_rows(matrix) else (v[:, None, :] @ matrix)[:, 0, :]


def multiply_decomposed(values: Tensor, vectors: Tensor, v: Tensor) -> Tensor:
    """Return Bv of each row, from the eigenvalues and eigenvectors of B."""
    return multiply(vectors, multiply_transposed(vectors, v) * values)


def norms_of(vectors: Tensor) -> Tensor:
    """Return the Euclidean norms of many vectors, also of those whose squares underflow or overflow."""
    _, exponents = torch.frexp(vectors.abs().amax(1))
    return torch.ldexp(torch.linalg.vector_norm(torch.ldexp(vectors, -exponents[:, None]), dim=1), exponents)


def gram(rows: Tensor) -> Tensor:
    """Return MMᵀ of each row."""
    if not _has_long_rows(rows):
        return rows @ rows.mT
    n = rows.shape[1]
    product = rows.new_empty(len(rows), n, n)
    for k in range(n):
        column = (rows[:, k:] * rows[:, k : k + 1]).sum(2)
        product[:, k:, k] = column
        product[:, k, k:] = column
    return product


def eigenpairs(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of many symmetric matrices."""
    if matrices.shape[1] == 2:
        return _eigenpairs_of_two(matrices)
    limit = _largest_batch(matrices)
    if len(matrices) <= limit:
        values, vectors = torch.linalg.eigh(matrices)
        return values, vectors
    parts = [torch.linalg.eigh(part) for part in torch.split(matrices, limit)]
    return torch.cat([values for values, _ in parts]), torch.cat([vectors for _, vectors in parts])


def _eigenpairs_of_two(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenpairs of 2×2 matrices by one Jacobi rotation, which is several times as fast as LAPACK."""
    first, off, last = matrices[:, 0, 0], matrices[:, 1, 0], matrices[:, 1, 1]
    difference, twice = last - first, 2.0 * off
    denominator = difference.abs() + torch.hypot(difference, twice)
    tangent = torch.where(denominator > 0.0, twice / denominator, 0.0)
    tangent = torch.where(difference < 0.0, -tangent, tangent)
    change, cosine = tangent * off, 1.0 / torch.hypot(tangent, torch.ones_like(tangent))
    values = torch.stack([first - change, last + change], 1)
    sine = tangent * cosine
    vectors = torch.stack([cosine, sine, -sine, cosine], 1).reshape(matrices.shape)
    ascends = (values[:, 0] <= values[:, 1])[:, None]
    values = torch.where(ascends, values, values.flip(1))
    return values, torch.where(ascends[:, :, None], vectors, vectors.flip(2))


def _largest_batch(matrices: Tensor) -> int:
    """Return the number of matrices that one call of `eigh` takes on their device."""
    return _CUDA_BATCH if matrices.device.type == "cuda" else len(matrices)


def _has_long_rows(matrix: Tensor) -> bool:
    """Return whether products with a matrix are element-wise."""
    return not _HAS_MKL and matrix.device.type == "cpu" and matrix.shape[1] <= _ELEMENTWISE_ROWS < matrix.shape[2]
