"""Eigenpairs of the model of a least-squares problem, from its Jacobian, and of its whole Hessian."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg.lapack import dgeqrf, dgesdd

from sanc.core.dense import eigenpairs
from sanc.core.oracle import Eigenbasis, Operator
from sanc.core.space import Floats
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.second_order_term import SecondOrderTerm
from sanc.leastsquares.variables import Variables

_EPS = float(np.finfo(np.float64).eps)
"""Precision of the decompositions."""


class WholeHessian(NamedTuple):
    """The whole Hessian as a matrix.

    Attributes
    ----------
    matrix : ndarray
        The Hessian, in the variables of the run.
    error : float
        Norm of the error of its product with a unit vector, beyond roundoff.
    """

    matrix: Floats
    error: float


def decompose(
    evaluation: ResidualEvaluation, variables: Variables, term: SecondOrderTerm, free_indices: Any
) -> tuple[Eigenbasis, float]:
    """Return the eigenbasis of the model in these variables, and √(2 · decrease) of the decrease that it predicts.

    A QR decomposition of the Jacobian and the residuals, and the singular values of R, give eigenvalues and gradient of
    the Gauss–Newton matrix to a relative precision that JᵀJ itself does not have.
    """
    m, n = evaluation.jacobian.shape
    n = n if free_indices is None else len(free_indices)
    weights = evaluation.model_weights()
    extended = np.empty((m, n + (weights is None)), order="F")
    columns = variables.columns(evaluation.jacobian, free_indices, extended[:, :n])
    if weights is None:
        extended[:, n] = evaluation.r
    else:
        gradient = columns.T @ evaluation.terms.weighted
        columns *= np.sqrt(weights)[:, None]
    factored, _, _, info = dgeqrf(extended, overwrite_a=True)
    size = min(m, n)
    triangle = factored[:size, :n] * _upper(size, n)
    entries = triangle.ravel(order="K")
    if not math.isfinite(entries @ entries):  # an entry, or its square, is not finite
        raise NonFiniteProductError("the Jacobian is not finite")
    left, singular, rows, failed = dgesdd(triangle)
    if info != 0 or failed != 0:
        raise NonFiniteProductError("the singular values of the Jacobian did not converge")
    values, projections = np.zeros(n), np.zeros(n)
    values[n - size :] = (singular * singular)[::-1]
    rows = rows[::-1]
    if weights is None:
        projections[n - size :] = (singular * (left.T @ factored[:size, n]))[::-1]
    else:
        projections = rows @ gradient
    rounding = max(m, n) * _EPS
    offset = _offset(values, projections, rounding * rounding)
    if term.is_used and term.is_estimated:
        second = term.matrix if free_indices is None else term.matrix[np.ix_(free_indices, free_indices)]
        values, vectors = np.linalg.eigh(np.diag(values) + rows @ second @ rows.T)
        rows, projections = vectors.T @ rows, vectors.T @ projections
        offset = max(offset, _offset(values, projections, rounding))
    return Eigenbasis(values, rows, projections), offset


def _offset(values: Floats, projections: Floats, rounding: float) -> float:
    """Return √(gᵀB⁻¹g) without eigenvalues that are roundoff; infinite if there is negative curvature."""
    numbers: list[float] = values.tolist()
    limit = rounding * numbers[-1]
    if numbers[0] < -limit:
        return math.inf
    # Plain floats: for a few variables an array operation costs more than its arithmetic.
    pairs = zip(numbers, projections.tolist(), strict=True)
    return math.hypot(*(projection / math.sqrt(value) for value, projection in pairs if value > limit))


@cache
def _upper(rows: int, columns: int) -> Floats:
    """Return the matrix with ones on and above the diagonal, which is not to be changed."""
    mask = np.triu(np.ones((rows, columns)))
    mask.setflags(write=False)
    return mask


def whole_eigenbasis(operator: Operator, whole: WholeHessian | None, g: Any, free_indices: Any) -> Eigenbasis:
    """Return the eigenbasis of the whole Hessian, from its matrix if there is one, or from products with `operator`."""
    rows: Any = slice(None) if free_indices is None else free_indices
    if whole is None:
        columns = np.eye(len(g), dtype=g.dtype)[rows]
        matrix = np.stack([np.asarray(operator(column), np.float64) for column in columns])[:, rows]
    else:
        matrix = whole.matrix[rows][:, rows]
    g = g[rows]
    values, eigenvector_rows = eigenpairs(matrix)
    return Eigenbasis(values, eigenvector_rows, eigenvector_rows @ g)
