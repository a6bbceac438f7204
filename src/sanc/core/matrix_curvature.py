"""The eigenpairs of a Hessian that is known as a matrix, and the certificate that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sanc.core.space import ROUNDING_ERRORS, Floats
from sanc.core.spectrum.curvature import Certificate
from sanc.core.spectrum.product_errors import ASYMMETRY_FACTOR


@dataclass(frozen=True)
class MatrixCurvature:
    """The eigenpairs of the symmetric part of a Hessian, and their error.

    Attributes
    ----------
    values, vectors : ndarray
        All eigenvalues in ascending order, and the eigenvectors as columns.
    norm : float
        ‖H‖.
    error : float
        Bound on the error of the eigenvalues by roundoff, by the error of the columns and by the asymmetry.
    asymmetry : float
        Half the norm of H − Hᵀ.
    is_symmetric : bool
        Whether the asymmetry is no larger than errors of the columns explain.
    """

    values: Floats
    vectors: Floats
    norm: float
    error: float
    asymmetry: float
    is_symmetric: bool

    def certificate(self, *, grad_norm: float, gradient_tolerance: float, curvature_tolerance: float) -> Certificate:
        """Return the certificate at a point with this gradient norm, for these tolerances.

        λ_min is certain up to the error, and a matrix counts as one product for each column.
        """
        return Certificate(
            grad_norm=grad_norm,
            gradient_tolerance=gradient_tolerance,
            curvature_tolerance=curvature_tolerance,
            lambda_min=float(self.values[0]),
            error_bound=self.error,
            ritz_error=self.error,
            residual=0.0,
            asymmetry=self.asymmetry,
            confidence=1.0,
            products=len(self.values),
        )


def measure_matrix_curvature(matrix: Floats, eps: float, column_error: float = 0.0) -> MatrixCurvature:
    """Return the eigenpairs of a finite matrix whose columns are products with a Hessian.

    `eps` is the machine precision of the products, and `column_error` the norm of their error beyond roundoff. As for a
    Krylov space of all dimensions, the errors of the columns are independent.
    """
    dim = len(matrix)
    values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
    norm, errors = max(-float(values[0]), float(values[-1])), math.sqrt(dim) * column_error
    asymmetry = 0.5 * float(np.linalg.norm(matrix - matrix.T))
    explained = math.hypot(math.sqrt(dim * eps) * norm, math.sqrt(ASYMMETRY_FACTOR) * errors)
    error = math.hypot(math.sqrt(dim) * ROUNDING_ERRORS * eps * norm, errors, asymmetry)
    return MatrixCurvature(values, vectors, norm, error, asymmetry, is_symmetric=asymmetry <= explained)
