"""Products of many small matrices and vectors.

On a CPU without MKL, whose products of many small matrices are fast, element-wise products and sums replace `torch.bmm`
for few long rows, such as transposed Jacobians.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

_CUDA_BATCH = 2**15
"""Matrices in one call of cuSOLVER, which fails above 65,535."""
_ELEMENTWISE_ROWS = 12
"""Rows of a matrix up to which its products are element-wise on a CPU without MKL, if its rows are longer."""
_MIN_JACOBI_ROWS = {2: 256, 3: 1024, 4: 4096}
"""Numbers of matrices of 2 to 4 rows from which on Jacobi's method replaces LAPACK on a CPU."""
_MAX_SWEEPS = 20
"""The most sweeps of Jacobi's method, which needs about five."""
_HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def multiply(matrix: Tensor, v: Tensor) -> Tensor:
    """Return Mv of each row."""
    return (matrix * v.unsqueeze(1)).sum(2) if _has_long_rows(matrix) else (matrix @ v.unsqueeze(2)).squeeze(2)


def multiply_transposed(matrix: Tensor, v: Tensor) -> Tensor:
    """Return Mᵀv of each row."""
    return (matrix * v.unsqueeze(2)).sum(1) if _has_long_rows(matrix) else (v.unsqueeze(1) @ matrix).squeeze(1)


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
    n = matrices.shape[1]
    if n == 2 if matrices.device.type == "cuda" else len(matrices) >= _MIN_JACOBI_ROWS.get(n, math.inf):
        return _eigenpairs_by_rotations(matrices)
    limit = _largest_batch(matrices)
    if len(matrices) <= limit:
        values, vectors = torch.linalg.eigh(matrices)
        return values, vectors
    parts = [torch.linalg.eigh(part) for part in torch.split(matrices, limit)]
    return torch.cat([values for values, _ in parts]), torch.cat([vectors for _, vectors in parts])


def _eigenpairs_by_rotations(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenpairs of small matrices by Jacobi's method: all matrices are rotated in the same planes in turn.

    For 2×2 matrices one rotation is enough. A NaN in one matrix does not affect the others.
    """
    n, pairs = matrices.shape[1], list(itertools.combinations(range(matrices.shape[1]), 2))
    a = [list(row.unbind(1)) for row in matrices.unbind(1)]
    identity = torch.eye(n, dtype=matrices.dtype, device=matrices.device)
    columns = [column.unsqueeze(1).expand(n, len(matrices)) for column in identity]
    for _ in range(_MAX_SWEEPS):
        for p, q in pairs:
            difference, twice = a[q][q] - a[p][p], 2.0 * a[q][p]
            denominator = difference + torch.copysign(torch.hypot(difference, twice), difference)
            tangent = (twice / denominator).nan_to_num(nan=0.0)  # 0/0: no rotation
            change, cosine = tangent * a[q][p], (tangent * tangent + 1.0).rsqrt()
            sine = tangent * cosine
            a[p][p], a[q][q], a[q][p] = a[p][p] - change, a[q][q] + change, torch.zeros_like(change)
            columns[p], columns[q] = _rotated(columns[p], columns[q], cosine, sine)
            for k in set(range(n)) - {p, q}:
                (i, j), (r, s) = sorted((k, p), reverse=True), sorted((k, q), reverse=True)
                a[i][j], a[r][s] = _rotated(a[i][j], a[r][s], cosine, sine)
        if n == 2:
            break
        off, diagonal = (torch.stack(part).abs().amax(0) for part in ([a[q][p] for p, q in pairs],
                                                                      [a[k][k] for k in range(n)]))  # fmt: skip
        if not bool((off > torch.finfo(off.dtype).eps * diagonal).any()):
            break
    values, order = torch.stack([a[k][k] for k in range(n)], 1).sort(1)
    vectors = torch.stack(columns).permute(2, 1, 0)
    return values, vectors.gather(2, order.unsqueeze(1).expand(-1, n, -1))


def _rotated(first: Tensor, second: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Return two vectors, or their entries, after a rotation in their plane."""
    return torch.addcmul(cosine * first, sine, second, value=-1.0), torch.addcmul(cosine * second, sine, first)


def _largest_batch(matrices: Tensor) -> int:
    """Return the number of matrices that one call of `eigh` takes on their device."""
    return _CUDA_BATCH if matrices.device.type == "cuda" else len(matrices)


def _has_long_rows(matrix: Tensor) -> bool:
    """Return whether products with a matrix are element-wise."""
    return not _HAS_MKL and matrix.device.type == "cpu" and matrix.shape[1] <= _ELEMENTWISE_ROWS < matrix.shape[2]
