"""The variables z of a least-squares run, with x = Az."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular

from sanc.core.space import Floats


@dataclass(frozen=True, eq=False)
class Variables:
    """The matrix A of x = Az.

    Attributes
    ----------
    matrix : ndarray
        The diagonal of A; or A itself, the lower triangular factor of a preconditioner.
    is_preconditioned : bool
        Whether A is fixed by a preconditioner of the caller.
    """

    matrix: Any
    is_preconditioned: bool = False

    @property
    def is_diagonal(self) -> bool:
        """Whether A is diagonal."""
        return bool(self.matrix.ndim == 1)

    def original(self, z: Any) -> Any:
        """Return x = Az, also of a step."""
        return z * self.matrix if self.matrix.ndim == 1 else self.matrix @ z

    def from_original(self, x: Any) -> Any:
        """Return z = A⁻¹x, also of a step."""
        if self.matrix.ndim == 1:
            return x / self.matrix
        return solve_triangular(self.matrix, x, lower=True, check_finite=False)

    def gradient(self, g: Any) -> Any:
        """Return Aᵀg, the gradient with respect to z."""
        return g * self.matrix if self.matrix.ndim == 1 else g @ self.matrix

    def columns(self, jacobian: Floats, free_indices: Any = None, out: Any = None) -> Floats:
        """Return JA; if A is diagonal, only its columns of some variables."""
        if self.matrix.ndim == 1:
            matrix = self.matrix if free_indices is None else self.matrix[free_indices]
            product: Floats = np.multiply(
                jacobian if free_indices is None else jacobian[:, free_indices], matrix, out=out
            )
        else:
            product = np.matmul(jacobian, self.matrix, out=out)
        return product
