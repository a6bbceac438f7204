"""Bounds of missed eigenvalues against dense inverses of T − λ, and against eigenvalues of dense matrices."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special

from sanc.core.spectrum.cubic import compute_spectrum
from sanc.core.spectrum.eigenvalue_bounds import bound_missed_eigenvalues, least_start_component

DIM, CONFIDENCE = 40, 0.9


def random_process(rng, k):
    """Return α and β of a Lanczos process of k products; the last β belongs to no entry of T."""
    return rng.uniform(-1.0, 3.0, k), rng.uniform(0.1, 1.0, k)


def dense(alpha, beta):
    """Return T as a matrix."""
    return np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1)


def bounded(alpha, beta, product_error, *, sharp=False, dim=DIM, confidence=CONFIDENCE):
    """Return θ_1, the bound on θ_1 − λ_min, and whether roundoff alone limits it."""
    process = SimpleNamespace(beta=list(beta), last_beta=float(beta[-1]))
    spectrum = compute_spectrum(alpha, beta[:-1])
    found = bound_missed_eigenvalues(spectrum, process, dim, product_error, confidence, sharp)
    return spectrum.leftmost, *found


def terms(alpha, beta, shift_from, product_error, *, sharp):
    """Return both terms of the bound of |vᵀq_1| at λ from linear systems with T − λ."""
    shifted = dense(alpha, beta) - shift_from * np.eye(len(alpha))
    first, last = (np.linalg.solve(shifted, np.eye(len(alpha))[:, j]) for j in (0, -1))
    residual = beta[-1] * abs(last[0])
    if sharp:
        gap = np.linalg.eigvalsh(shifted)[0]
        residual *= min(1.0, (1.0 + product_error / gap) / math.sqrt(1.0 + beta[-1] ** 2 * (last @ last)))
    return residual, product_error * np.linalg.norm(first)


@pytest.mark.parametrize("dim", [2, 3, 10, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_a_random_start_has_this_component_with_at_least_the_probability(dim, confidence):
    """The square of an entry of a random unit vector has a beta distribution."""
    missed = scipy.special.betainc(0.5, 0.5 * (dim - 1), least_start_component(dim, confidence) ** 2)
    assert 0.5 * (1.0 - confidence) < missed <= 1.0 - confidence


@pytest.mark.parametrize("sharp", [False, True])
@pytest.mark.parametrize("product_error", [0.0, 1e-10, 1e-4])
def test_the_bound_is_where_the_dense_inverse_reaches_the_component(rng, product_error, sharp):
    """It is so to two per cent: above it no eigenvalue is possible, and slightly below it one is."""
    component = least_start_component(DIM, CONFIDENCE)
    for k in (1, 2, 5, 12):
        alpha, beta = random_process(rng, k)
        leftmost, bound, _ = bounded(alpha, beta, product_error, sharp=sharp)
        at = [
            sum(terms(alpha, beta, leftmost - factor * bound, product_error, sharp=sharp)) for factor in (1.0001, 0.98)
        ]
        assert at[0] < component <= at[1]


def test_a_sharp_bound_is_smaller(rng):
    alpha, beta = random_process(rng, 6)
    plain, sharp = (bounded(alpha, beta, 1e-8, sharp=sharp)[1] for sharp in (False, True))
    assert sharp < 0.9 * plain


@pytest.mark.parametrize("sharp", [False, True])
@pytest.mark.parametrize("error", [0.0, 1e-4])
def test_the_bound_holds_for_every_start_with_the_component(rng, error, sharp):
    """One eigenvalue is far to the left. Products have an error of norm `error`, which is a symmetric matrix."""
    held, missed = [], []
    values = np.concatenate([[-3.0], rng.uniform(0.0, 1.0, DIM - 1)])
    component = least_start_component(DIM, CONFIDENCE)
    for along, k in ((1e-6, 5), (0.03 * component, 2), (1.01 * component, 2), (1.01 * component, 3), (0.2, 3)) * 8:
        rotation = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0]
        noise = rng.standard_normal((DIM, DIM))
        noise = noise + noise.T
        matrix = rotation * values @ rotation.T
        products = matrix + error * noise / np.linalg.norm(noise, 2)
        q = rotation[:, 1:] @ rng.standard_normal(DIM - 1)
        q = math.sqrt(1.0 - along**2) * q / np.linalg.norm(q) + along * rotation[:, 0]
        basis, alpha, beta = [q], [], []
        for _ in range(k):
            w = products @ basis[-1]
            alpha.append(float(w @ basis[-1]))
            for _ in range(2):
                w = w - np.array(basis).T @ (np.array(basis) @ w)
            beta.append(float(np.linalg.norm(w)))
            basis.append(w / beta[-1])
        leftmost, bound, _ = bounded(np.array(alpha), np.array(beta), error, sharp=sharp)
        (held if along >= component else missed).append(leftmost - bound <= values[0])
    assert all(held)
    assert not any(missed[::2])  # the bound is not trivial: it is wrong for starts that hardly have the component


@pytest.mark.parametrize("sharp", [False, True])
def test_without_a_residual_only_the_product_error_counts(rng, sharp):
    alpha, beta = random_process(rng, 6)
    alpha[0], beta[-1] = -2.0, 0.0
    leftmost, bound, is_roundoff = bounded(alpha, beta, 1e-3, sharp=sharp)
    component = least_start_component(DIM, CONFIDENCE)
    at = [terms(alpha, beta, leftmost - factor * bound, 1e-3, sharp=sharp) for factor in (1.0001, 0.98)]
    assert at[0][0] == at[1][0] == 0.0 and at[0][1] < component <= at[1][1] and is_roundoff
    assert bounded(alpha, beta, 0.0, sharp=sharp)[1:] == (0.0, True)


def test_an_infinite_error_bounds_nothing(rng):
    assert bounded(*random_process(rng, 4), math.inf)[1:] == (math.inf, True)


def test_roundoff_limits_the_bound_if_the_residual_contributes_less_than_a_hundredth(rng):
    """A small last β makes the residual negligible beside an error of 1e-3."""
    component, seen = least_start_component(DIM, CONFIDENCE), set()
    alpha, beta = random_process(rng, 6)
    for last in 10.0 ** np.arange(-8.0, 1.0):
        beta[-1] = last
        leftmost, bound, is_roundoff = bounded(alpha, beta, 1e-3)
        residual, _ = terms(alpha, beta, leftmost - bound, 1e-3, sharp=False)
        assert is_roundoff == (residual < 0.01 * component)
        seen.add(is_roundoff)
    assert seen == {True, False}
