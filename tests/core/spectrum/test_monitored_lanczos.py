"""The monitored Lanczos process against dense matrices of any size, with and without a skew-symmetric part."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sanc.core.oracle import Operator
from sanc.core.space import NumpySpace
from sanc.core.spectrum.monitored_lanczos import MonitoredLanczos, affordable_dim, bound_curvature

DIM = 12


class Dense(Operator):
    """A matrix, whose products have an error norm that is given."""

    def __init__(self, matrix, product_error=0.0):
        self.dense, self.product_error = matrix, product_error

    def __call__(self, v):
        return self.dense @ v

    def gradient(self):
        return np.zeros(len(self.dense))

    def error(self, v, product):
        return self.product_error


def process_of(matrix, products=8, **options):
    """Return the process on a dense matrix after some products from a fixed start."""
    start = np.random.default_rng(7).standard_normal(len(matrix))
    operator = Dense(matrix, options.pop("product_error", 0.0))
    process = MonitoredLanczos(operator, start.copy, NumpySpace(len(matrix), np.float64), **options)
    for _ in range(products):
        process.extend()
    return process


def bounds_of(process):
    """Return Ritz value, lower bound and the error of products in the units of the Hessian."""
    bound = bound_curvature(process, 0.99, -math.inf)
    return [process.unscaled(number) for number in (bound.ritz_value, bound.lower_bound, bound.product_error)]


@pytest.fixture
def matrix(rng):
    a = rng.standard_normal((DIM, DIM))
    return a + a.T


@pytest.mark.parametrize("exponent", [-1000, -495, -450, -350, 350, 450, 1000])
def test_bounds_of_matrices_of_any_size_are_scaled_by_powers_of_two(matrix, exponent):
    """Squares of entries, or of their rounding errors, overflow or underflow; a power of two changes no digit."""
    plain, scaled = process_of(matrix), process_of(np.ldexp(matrix, exponent))
    assert (scaled.product_scale == 1.0) == (abs(exponent) < 400) and plain.product_scale == 1.0
    expected = [math.ldexp(number, exponent) for number in bounds_of(plain)]
    assert bounds_of(scaled) == pytest.approx(expected, rel=1e-12)
    smallest = np.linalg.eigvalsh(matrix)[0]
    assert bounds_of(plain)[1] <= smallest <= bounds_of(plain)[0]
    full = process_of(np.ldexp(matrix, exponent), DIM)
    assert bounds_of(full)[1] == pytest.approx(math.ldexp(smallest, exponent), rel=1e-12)


@pytest.mark.parametrize("exponent", [-700, 0, 700])
def test_asymmetry_is_that_of_the_projected_matrix(matrix, rng, exponent):
    """With orthonormal q_i, entries of QᵀBQ above T are those of the skew-symmetric part, which Lanczos removes."""
    skew = rng.standard_normal((DIM, DIM))
    asymmetric = matrix + 1e-3 * (skew - skew.T)
    process = process_of(np.ldexp(asymmetric, exponent), 6)
    q = np.stack([process.krylov.combine(row)[0] for row in np.eye(6)])
    projected = q @ asymmetric @ q.T
    deviations = [*projected[np.triu_indices(6, 2)], *(np.diag(projected, 1) - np.diag(projected, -1))]
    factor = math.ldexp(process.product_scale, exponent)  # of the units of the process
    assert math.sqrt(process.asymmetry_squared) / factor == pytest.approx(np.linalg.norm(deviations), rel=1e-8)
    assert process.error(np.linalg.norm(matrix, 2) * factor) == math.inf  # the products are linear


def test_asymmetry_within_the_errors_of_products_is_a_part_of_the_error(matrix, rng):
    skew = rng.standard_normal((DIM, DIM))
    asymmetric = matrix + 1e-5 * (skew - skew.T)
    process = process_of(asymmetric, 5, product_error=1e-3)
    assert process.difference_error_squared == pytest.approx(5e-6)
    norm = np.linalg.norm(matrix, 2)
    assert process.asymmetry_squared > 5 * 2.0**-52 * norm**2  # beyond roundoff
    expected = math.sqrt(process.difference_error_squared + process.asymmetry_squared)
    assert process.error(norm) == pytest.approx(expected, rel=1e-6)


def test_errors_of_later_products_are_the_largest_measured_one(matrix):
    process = process_of(matrix, 6, product_error=1e-3, measured_errors=2)
    process.operator.product_error = 1.0  # is not measured
    process.extend()
    assert process.difference_error_squared == pytest.approx(7e-6)


def test_a_rough_first_product_is_computed_twice():
    """Products with rounded entries differ by up to half of the last digit, and that is their error."""

    class Rounded(Dense):
        def __call__(self, v):
            return np.round(self.dense @ v, 3)

    matrix = np.diag(np.arange(1.0, DIM + 1.0))
    start = np.random.default_rng(7).standard_normal(DIM)
    q = start / np.linalg.norm(start)
    process = MonitoredLanczos(Rounded(matrix), start.copy, NumpySpace(DIM, np.float64), rough=True)
    process.extend()
    expected = np.linalg.norm(3.0 * np.round(matrix @ q / 3.0, 3) - np.round(matrix @ q, 3))
    assert math.sqrt(process.difference_error_squared) == pytest.approx(expected, rel=1e-9) and expected > 1e-4


def test_a_basis_of_few_variables_has_a_thousand_vectors_and_one_of_many_fifty():
    assert [affordable_dim(dim) for dim in (10, 50_000, 100_000, 10**7)] == [1000, 1000, 500, 50]
