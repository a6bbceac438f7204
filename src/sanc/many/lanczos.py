"""Krylov spaces of all rows, for problems whose Hessians are too large to be stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sanc.core.space import ROUNDING_ERRORS
from sanc.core.spectrum.cubic import Spectrum
from sanc.core.spectrum.eigenvalue_bounds import bound_missed_eigenvalues
from sanc.many.algebra import eigenpairs
from sanc.many.rows import Spectra

MAX_STEP_DIM = 100
"""Largest Krylov dimension of a step: the basis of a row takes as much memory as 100 rows."""
MAX_CERTIFICATE_DIM = 200
"""Largest Krylov dimension of a certificate; rows that it does not decide end without one."""
_FIRST_TEST_DIM = 4
"""Krylov dimension of the first test of accuracy."""
_STEP_TEST_DIVISOR, _CERTIFICATE_TEST_DIVISOR = 2, 4
"""The next test follows after half, or a quarter, more products: a step needs few tests, and a certificate more."""
_MIN_ENTRY_FRACTION = 0.5
"""An eigenvector of T is one of the complete Krylov space of a row if its largest squared entry there is at least this
fraction of the mean; otherwise it belongs to the zero vectors with which the row continued."""


class RowLanczos:
    """Lanczos processes with the Hessians of all rows, with full reorthogonalisation.

    A row whose Krylov space is complete continues with zero vectors. Their diagonal entries of T are ‖T‖, so that they
    have no effect on steps and on the smallest eigenvalue.

    Parameters
    ----------
    products : callable
        Maps a vector of each row to its product with the Hessian, in float64.
    start_vectors : Tensor
        The start vectors.
    eps : float
        Machine epsilon of the products.

    Attributes
    ----------
    start_norm : Tensor
        The norm of the start vector of each row.
    basis : Tensor
        q_1, q_2, … of each row, along its second dimension.
    alpha, beta : list of Tensor
        α_j and β_j of all rows, by iteration.
    """

    def __init__(self, products: Callable[[Tensor], Tensor], start_vectors: Tensor, eps: float) -> None:
        self._products, self._eps = products, eps
        norm = torch.linalg.vector_norm(start_vectors, dim=1)
        self.start_norm: Tensor = norm
        self.basis = _normalised(start_vectors, norm)[:, None, :]
        self.alpha: list[Tensor] = []
        self.beta: list[Tensor] = []
        self._size = torch.zeros_like(norm)

    @property
    def dim(self) -> int:
        """The number of products made."""
        return len(self.alpha)

    def extend(self) -> None:
        """Make one iteration."""
        q = self.basis[:, -1]
        w = self._products(q)
        projections = torch.zeros_like(self.basis[:, :, 0])
        for _ in range(2):
            part = (self.basis @ w[:, :, None])[:, :, 0]
            projections = projections + part
            w = w - (part[:, None, :] @ self.basis)[:, 0]
        beta: Tensor = torch.linalg.vector_norm(w, dim=1)
        self._size = torch.maximum(self._size, torch.maximum(projections[:, -1].abs(), beta))
        is_complete = ~(beta > ROUNDING_ERRORS * self._eps * self._size)
        beta = torch.where(is_complete, 0.0, beta)
        self.alpha.append(torch.where((q == 0.0).all(1), self._size, projections[:, -1]))
        self.beta.append(beta)
        self.basis = torch.cat([self.basis, _normalised(w, beta)[:, None, :]], 1)

    def eigenpairs(self) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors of T."""
        matrix = torch.diag_embed(torch.stack(self.alpha, 1))
        for k, beta in enumerate(self.beta[:-1]):
            matrix[:, k, k + 1] = matrix[:, k + 1, k] = beta
        return eigenpairs(matrix)

    def ritz_vectors(self, vectors: Tensor) -> Tensor:
        """Return the Ritz vectors, as columns, for eigenvectors of T."""
        return self.basis[:, : self.dim].mT @ vectors


def _normalised(vectors: Tensor, norms: Tensor) -> Tensor:
    """Return unit vectors, or zero vectors where the norm is 0."""
    return vectors * torch.where(norms > 0.0, 1.0 / norms, 0.0)[:, None]


def step_spectra(
    process: RowLanczos, relative_residuals: Callable[[Tensor, Tensor, Tensor], Tensor], dim: int
) -> Spectra:
    """Return the eigenpairs of Krylov spaces that contain accurate steps.

    Parameters
    ----------
    process : RowLanczos
        Starts at the gradients.
    relative_residuals : callable
        Maps eigenvalues, the gradients in their basis and the last entries of the eigenvectors times β to the quotients
        of the residuals of the steps and their tolerances.
    dim : int
        Variables of a row.
    """
    for is_last in _tests(process, min(dim, MAX_STEP_DIM), _STEP_TEST_DIVISOR):
        values, vectors = process.eigenpairs()
        c = process.start_norm[:, None] * vectors[:, 0]
        if is_last or bool((relative_residuals(values, c, process.beta[-1][:, None] * vectors[:, -1]) <= 1.0).all()):
            break
    error = torch.full_like(process.start_norm, torch.inf)  # a bound needs a random start
    return _of_one_size(Spectra(values, process.ritz_vectors(vectors), c, error))


def _tests(process: RowLanczos, max_dim: int, divisor: int) -> Iterator[bool]:
    """Extend the Krylov spaces, and yield where they are tested: whether they have their largest dimension.

    The next test is after 1 + dim // `divisor` more products.
    """
    next_test = _FIRST_TEST_DIM
    while process.dim < max_dim:
        process.extend()
        if process.dim in (next_test, max_dim):
            next_test = process.dim + 1 + process.dim // divisor
            yield process.dim == max_dim


def _of_one_size(spectra: Spectra) -> Spectra:
    """Return as many eigenpairs for all dimensions of the space, so that rows can be joined.

    The number of pairs is `MAX_STEP_DIM`, or that of the variables if it is smaller. Missing ones have zero vectors,
    and the norm of the curvature as eigenvalue. Of more, the inner ones are left out.
    """
    values, vectors, c = spectra.values, spectra.vectors, spectra.c
    size = min(MAX_STEP_DIM, vectors.shape[1])
    missing = size - values.shape[1]
    if missing > 0:
        norm = values.abs().amax(1, keepdim=True)
        values = torch.cat([values, norm.expand(-1, missing)], 1)
        vectors, c = (torch.nn.functional.pad(part, (0, missing)) for part in (vectors, c))
    elif missing < 0:
        kept = torch.tensor([*range(size - 1), values.shape[1] - 1], device=values.device)
        values, vectors, c = values[:, kept], vectors[:, :, kept], c[:, kept]
    return Spectra(values, vectors, c, spectra.lambda_error)


@dataclass(frozen=True, slots=True)
class _OffDiagonal:
    """β of one row, as `bound_missed_eigenvalues` expects them."""

    beta: list[float]
    last_beta: float


def certified_spectra(process: RowLanczos, g: Tensor, tol: Tensor, confidence: float, eps: float) -> Spectra:
    """Return eigenpairs with bounds on λ_min, from Krylov spaces with random starts.

    The spaces are extended until each row has negative curvature beyond `tol` or a bound above −`tol`.
    """
    dim = g.shape[1]
    for is_last in _tests(process, min(dim, MAX_CERTIFICATE_DIM), _CERTIFICATE_TEST_DIVISOR):
        values, vectors = process.eigenpairs()
        rounding = ROUNDING_ERRORS * eps * process.dim**0.5 * values.abs().amax(1)
        negative = values[:, 0] + rounding < -tol
        error = torch.where(negative, rounding, _missed(process, values, vectors, rounding, dim, confidence))
        if is_last or bool((negative | (values[:, 0] - error >= -tol)).all()):
            break
    ritz_vectors = process.ritz_vectors(vectors)
    return _of_one_size(Spectra(values, ritz_vectors, (ritz_vectors.mT @ g[:, :, None])[:, :, 0], error))


def _missed(
    process: RowLanczos, values: Tensor, vectors: Tensor, rounding: Tensor, dim: int, confidence: float
) -> Tensor:
    """Return by how much the smallest eigenvalue of each row may be below the Ritz value."""
    if process.dim == dim:
        return rounding
    betas = torch.stack(process.beta, 1).cpu().numpy()
    rows = zip(values.cpu().numpy(), vectors.cpu().numpy(), betas, rounding.tolist(), strict=True)
    errors = []
    for row_values, row_vectors, beta, row_rounding in rows:
        ended = np.flatnonzero(beta == 0.0)
        used = int(ended[0]) + 1 if len(ended) else len(beta)
        if used < len(beta):  # the Krylov space of this row is complete
            kept = np.abs(row_vectors[:used]).max(0) > _MIN_ENTRY_FRACTION / len(beta)
            row_values, row_vectors = row_values[kept], row_vectors[:used][:, kept]
        off_diagonal = _OffDiagonal(beta[:used].tolist(), float(beta[used - 1]))
        spectrum = Spectrum(row_values, row_vectors)
        errors.append(bound_missed_eigenvalues(spectrum, off_diagonal, dim, row_rounding, confidence, False)[0])
    return torch.tensor(errors, dtype=values.dtype, device=values.device)
