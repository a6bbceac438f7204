"""Eigenpairs of the model from the Jacobian against those of dense matrices."""

from __future__ import annotations

import numpy as np
import pytest

from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.leastsquares.decompositions import decompose
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.losses import Loss
from sanc.leastsquares.second_order_term import SecondOrderTerm
from sanc.leastsquares.variables import Variables

N = 5


def evaluation_of(rng, m, loss="linear"):
    r = 2.0 * rng.standard_normal(m)
    return ResidualEvaluation(np.zeros(N), r, Loss(loss, 1.0)(r), jacobian=rng.standard_normal((m, N)))


@pytest.mark.parametrize("m", [3, 5, 9])  # fewer, as many and more residuals than variables
@pytest.mark.parametrize("loss", ["linear", "cauchy"])
@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("free", [None, [0, 2, 3]])
def test_eigenpairs_are_those_of_the_dense_model(rng, m, loss, second_order, free):
    evaluation, scales = evaluation_of(rng, m, loss), np.geomspace(0.1, 10.0, N)
    second = rng.standard_normal((N, N))
    second = second + second.T
    term = SecondOrderTerm(is_enabled=True, is_used=second_order, matrix=second)
    indices = None if free is None else np.array(free)
    basis, offset = decompose(evaluation, Variables(scales), term, indices)
    columns, weights = evaluation.jacobian * scales, evaluation.terms.weights
    weights = np.ones(m) if weights is None else np.maximum(weights, 0.0)
    gauss_newton, g = columns.T * weights @ columns, columns.T @ evaluation.terms.weighted
    matrix = gauss_newton + second_order * second
    if free is not None:
        matrix, gauss_newton, g = matrix[np.ix_(free, free)], gauss_newton[np.ix_(free, free)], g[free]
    expected = np.linalg.eigvalsh(matrix)
    assert basis.values == pytest.approx(expected, abs=1e-11 * abs(expected).max())
    assert basis.rows @ basis.rows.T == pytest.approx(np.eye(len(g)), abs=1e-12)
    assert basis.rows.T * basis.values @ basis.rows == pytest.approx(matrix, abs=1e-11 * abs(expected).max())
    assert basis.projections == pytest.approx(basis.rows @ g, abs=1e-10 * np.linalg.norm(g))
    if expected[0] < -1e-8:
        assert offset == np.inf
    else:  # the larger one of both models
        inverses = [np.linalg.pinv(part, rcond=1e-10, hermitian=True) for part in (matrix, gauss_newton)]
        assert offset == pytest.approx(max(np.sqrt(g @ inverse @ g) for inverse in inverses), rel=1e-7)


def test_small_eigenvalues_have_relative_precision(rng):
    """Columns of a triangular Jacobian nearly coincide: JᵀJ in float64 has no digit of its smallest eigenvalue."""
    jacobian = np.triu(np.ones((4, 4)))
    jacobian[3, 3] = 1e-9
    r = np.ones(4)
    evaluation = ResidualEvaluation(np.zeros(4), r, Loss("linear", 1.0)(r), jacobian=jacobian)
    basis, _ = decompose(evaluation, Variables(np.ones(4)), SecondOrderTerm.unknown(4), None)
    product = np.prod(basis.values[1:]) * basis.values[0]
    assert product == pytest.approx(1e-18, rel=1e-6)  # the determinant of JᵀJ


def test_a_jacobian_that_is_not_finite_is_an_error(rng):
    evaluation = evaluation_of(rng, 6)
    evaluation.jacobian[2, 3] = np.nan
    with pytest.raises(NonFiniteProductError, match="not finite"):
        decompose(evaluation, Variables(np.ones(N)), SecondOrderTerm.unknown(N), None)
