"""The estimate of the second-order term against residuals whose second derivatives are known matrices."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest

from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.losses import Loss
from sanc.leastsquares.second_order_term import SecondOrderTerm
from sanc.leastsquares.variables import Variables

N, M = 5, 8


class Quadratics:
    """Residuals c + Ax + ½ xᵀH_i x with known matrices H_i."""

    def __init__(self, rng, size=1.0):
        self.c, self.a = rng.standard_normal(M), rng.standard_normal((M, N))
        self.h = size * rng.standard_normal((M, N, N))
        self.h = self.h + self.h.transpose(0, 2, 1)

    def at(self, x):
        """Return the evaluation at x, with the Jacobian."""
        r = self.c + self.a @ x + 0.5 * np.einsum("ijk,j,k", self.h, x, x)
        return ResidualEvaluation(x, r, Loss("linear", 1.0)(r), jacobian=self.a + self.h @ x)

    def second_order_matrix(self, x):
        """Return S = Σ r_i H_i."""
        return np.einsum("i,ijk", self.at(x).r, self.h)


def update(matrix, s, y, target):
    """Return the updated matrix."""
    product = matrix @ s
    term = SecondOrderTerm(is_enabled=True, is_used=False, matrix=matrix)
    return term._updated_matrix(s, y, target, product, float(s @ product))


def vectors(rng, along):
    """Return a symmetric matrix, s, y with sᵀy = `along`, and a target with sᵀ(target) above sᵀSs, so not sized."""
    matrix = rng.standard_normal((N, N))
    matrix, s = matrix + matrix.T, rng.standard_normal(N)
    y, target = rng.standard_normal(N), rng.standard_normal(N)
    target += (3.0 * abs(s @ matrix @ s) - s @ target) / (s @ s) * s
    return matrix, s, y + (along - s @ y) / (s @ s) * s, target


@pytest.mark.parametrize("along", [2.0, 0.0, -1.0])
def test_the_update_is_symmetric_and_satisfies_the_secant_equation(rng, along):
    matrix, s, y, target = vectors(rng, along)
    updated = update(matrix, s, y, target)
    assert updated == pytest.approx(updated.T)
    assert updated @ s == pytest.approx(target)


def least_change(matrix, s, target, weight):
    """Return the symmetric S with S s = target whose change W Δ W has the least Frobenius norm, by least squares."""
    n, rows, root = len(s), [], np.linalg.inv(weight)
    pairs = list(combinations_with_replacement(range(n), 2))
    for i, j in pairs:  # unknowns are the entries of the symmetric matrix W Δ W
        unit = np.zeros((n, n))
        unit[i, j] = unit[j, i] = 1.0 if i == j else 0.5**0.5
        rows.append(unit)
    equations = np.stack([root @ unit @ root @ s for unit in rows], axis=1)
    z = np.linalg.lstsq(equations, target - matrix @ s, rcond=None)[0]
    return matrix + root @ sum(number * unit for number, unit in zip(z, rows, strict=True)) @ root


def test_without_positive_curvature_the_change_is_the_least_one(rng):
    matrix, s, y, target = vectors(rng, -1.0)
    expected = least_change(matrix, s, target, np.eye(N))
    assert update(matrix, s, y, target) == pytest.approx(expected)


def test_with_positive_curvature_the_change_is_the_least_one_in_a_weighted_norm(rng):
    """The norm is that of W Δ W with W² y = s."""
    matrix, s, y, target = vectors(rng, 2.0)
    square = np.eye(N) - np.outer(y, y) / (y @ y) + np.outer(s, s) / (s @ y)  # positive definite, and maps y to s
    values, rotation = np.linalg.eigh(square)
    assert values[0] > 0.0 and square @ y == pytest.approx(s)
    expected = least_change(matrix, s, target, rotation * np.sqrt(values) @ rotation.T)
    assert update(matrix, s, y, target) == pytest.approx(expected, rel=1e-6)


def test_an_estimate_that_is_too_large_is_sized_down(rng):
    """Along a direction that the update does not see it has the size |sᵀy#| / |sᵀSs|."""
    s = np.eye(N)[0]
    sized = update(np.diag([8.0, 4.0, 4.0, 4.0, 4.0]), s, s, 2.0 * s)
    assert sized == pytest.approx(np.diag([2.0, 1.0, 1.0, 1.0, 1.0]))


@pytest.mark.parametrize("scales", [np.ones(N), np.geomspace(0.01, 100.0, N)])
def test_the_update_is_that_of_the_new_residuals(rng, scales):
    """(J₊ − J)ᵀ r₊ is S s at the new point, since second derivatives are constant."""
    problem, variables = Quadratics(rng), Variables(scales)
    x = rng.standard_normal(N)
    s = 0.1 * rng.standard_normal(N)
    term = SecondOrderTerm.unknown(N).updated(problem.at(x), problem.at(x + s), variables)
    expected = scales * (problem.second_order_matrix(x + s) @ s)
    assert term.matrix @ (s / scales) == pytest.approx(expected, rel=1e-8)
    assert not term.is_used  # zero, the first estimate, predicted nothing


def test_an_estimate_is_used_if_it_predicts_both_the_product_and_the_decrease(rng):
    problem, variables = Quadratics(rng), Variables(np.ones(N))
    x = rng.standard_normal(N)
    s = 1e-3 * rng.standard_normal(N)
    before, after = problem.at(x), problem.at(x + s)
    exact = problem.second_order_matrix(x)
    used = {}
    for factor in (-1.0, 0.4, 0.7, 1.0, 1.4, 1.6):
        term = SecondOrderTerm(is_enabled=True, is_used=False, matrix=factor * exact)
        used[factor] = term.updated(before, after, variables).is_used
    assert used == {-1.0: False, 0.4: False, 0.7: True, 1.0: True, 1.4: True, 1.6: False}


@pytest.mark.parametrize(("size", "is_used"), [(1e-3, False), (3.0, True)])
def test_without_an_estimate_a_tenth_of_the_curvature_decides(rng, size, is_used):
    problem, x, s = Quadratics(rng, size), rng.standard_normal(N), 1e-3 * rng.standard_normal(N)
    before, after = problem.at(x), problem.at(x + s)
    share = abs(s @ problem.second_order_matrix(x + s) @ s) / np.linalg.norm(before.jacobian @ s) ** 2
    assert (share > 0.1) == is_used
    term = SecondOrderTerm(is_enabled=True, is_used=False, matrix=None)
    assert term.updated(before, after, Variables(np.ones(N))).is_used is is_used


def test_the_estimate_follows_a_change_of_scales(rng):
    matrix = rng.standard_normal((N, N))
    term = SecondOrderTerm(is_enabled=True, is_used=True, matrix=matrix + matrix.T)
    old, new = Variables(np.geomspace(1.0, 16.0, N)), Variables(np.geomspace(8.0, 0.5, N))
    z = rng.standard_normal(N)  # a step in the new variables
    changed = term.in_variables(old, new)
    s = old.from_original(new.original(z))
    assert z @ changed.matrix @ z == pytest.approx(s @ term.matrix @ s)
    factor = Variables(np.tril(rng.standard_normal((N, N))))
    assert not term.in_variables(old, factor).matrix.any()
