"""Products with ∂²f/∂x∂θ against a known matrix, and parameters that f reads without their graph."""

from __future__ import annotations

import math

import pytest
import torch

from sanc.implicit.mixed import MixedProducts, Norms, examine_mixed
from tensors import normal

A, B = normal(4, 3), normal(4, 2, seed=1)
X, THETA = normal(4, seed=2), [normal(3, seed=3), normal(2, seed=4)]


def products_of(value, chosen=(0, 1)):
    return MixedProducts(value, X, THETA, chosen)


def bilinear(x, u, v):
    """Return f with M = (A, cos(v)-scaled B)."""
    return x @ A @ u + x @ B @ v.sin() + (x**4).sum()


def matrix():
    """Return the parts of M."""
    return A, B * THETA[1].cos()


def test_products_are_those_of_the_matrix():
    w = normal(4, seed=5)
    found = products_of(bilinear).transposed(w)
    for part, expected in zip(found.values(), matrix(), strict=True):
        torch.testing.assert_close(part, expected.T @ w)
    d = {1: normal(2, seed=6)}
    torch.testing.assert_close(products_of(bilinear).difference(d, 1e-5), matrix()[1] @ d[1], rtol=1e-7, atol=1e-9)
    assert list(products_of(bilinear, (1,)).transposed(w)) == [1]


def test_norms_are_estimated_from_below():
    """After a step of the power method they are close to the largest singular values."""
    inverse = torch.diag(torch.tensor([2.0, 1.0, 0.5, 0.25], dtype=torch.float64))
    mixed = examine_mixed(products_of(bilinear), ("u", "v"), lambda v: inverse @ v)
    assert mixed.reason == ""
    for index, part in enumerate(matrix()):
        exact = [float(torch.linalg.matrix_norm(m, 2)) for m in (part, inverse @ part)]
        assert 0.5 * exact[0] < mixed.norms.largest[index] <= exact[0] * (1.0 + 1e-12)
        assert 0.2 * exact[1] < mixed.inverse_norms.largest[index] <= exact[1] * (1.0 + 1e-12)


@pytest.mark.parametrize("name", ["u", "v"])
def test_a_parameter_that_is_read_without_its_graph_is_named(name):
    def value(x, u, v):
        return bilinear(x, u.detach(), v) if name == "u" else bilinear(x, u, v.detach())

    reason = examine_mixed(products_of(value), ("u", "v"), None).reason
    assert f"a random change of {name} differences" in reason and "returns 0:" in reason


def test_a_function_that_raises_near_the_parameters_shows_nothing():
    def value(x, u, v):
        if not torch.equal(u.detach(), THETA[0]):
            raise ValueError("outside of the domain")
        return bilinear(x, u.detach(), v)

    mixed = examine_mixed(products_of(value), ("u", "v"), None)
    assert mixed.reason == "" and 1 in mixed.norms.largest


def test_norms_keep_the_largest_ratio_and_add_up_as_squares():
    norms = Norms().including({0: 6.0, 1: 8.0}, 2.0).including({0: 2.0, 1: math.nan}, 1.0)
    assert norms.largest == {0: 3.0, 1: 4.0}
    assert norms.combined([0, 1]) == 5.0 and norms.combined([0, 2]) == math.inf
    assert norms.including({0: 1.0}, 0.0).largest == norms.largest
