"""Lanczos against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sanc
from sanc.core.space import NumpySpace, Space
from sanc.core.spectrum import cubic
from sanc.core.spectrum.krylov import Krylov, Lanczos, NonFiniteProductError


def krylov_space(product, start, space, **how):
    return Krylov(Lanczos(product, start, space, **how))


def symmetric(rng, n):
    A = rng.standard_normal((n, n))
    return (A + A.T) / 2


def spaces(n):
    return {
        "numpy64": (NumpySpace(n, np.float64), lambda a: np.array(a)),
        "numpy32": (NumpySpace(n, np.float32), lambda a: np.array(a, np.float32)),
        "torch64": (Space(n, torch.float64, torch.device("cpu")), lambda a: torch.tensor(a)),
    }


def basis(krylov, n):
    return np.stack([np.asarray(krylov.combine(row)[0]) for row in np.eye(krylov.dim)], axis=1)


@pytest.mark.parametrize("kind", ["numpy64", "numpy32", "torch64"])
@pytest.mark.parametrize("store", [True, False])
def test_t_is_the_projection_of_the_matrix(rng, kind, store):
    n, j = 30, 6
    A, g = symmetric(rng, n), rng.standard_normal(n)
    space, make = spaces(n)[kind]
    B = make(A)
    krylov = krylov_space(lambda v: B @ v, make(g), space, store=store)
    for _ in range(j):
        assert not krylov.is_complete
        krylov.extend()
    Q = basis(krylov, n)
    tolerance = 1e-4 if kind == "numpy32" else 1e-10
    diagonal, off = krylov.tridiagonal()
    T = np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1)
    assert Q.T @ Q == pytest.approx(np.eye(j), abs=tolerance)
    assert Q.T @ A @ Q == pytest.approx(T, abs=tolerance)
    assert Q[:, 0] == pytest.approx(g / np.linalg.norm(g), abs=tolerance)
    assert krylov.projected_gradient == pytest.approx(Q.T @ g, abs=tolerance)
    # AQ − QT = β_j q_{j+1} e_jᵀ
    residual = A @ Q - Q @ T
    assert np.linalg.norm(residual[:, :-1]) <= 10 * tolerance
    assert np.linalg.norm(residual[:, -1]) == pytest.approx(krylov.last_beta, rel=10 * tolerance)


@pytest.mark.parametrize("shift", [-1.0, 2.0, 8.0, 20.0])
def test_it_knows_whether_t_is_positive_definite(rng, shift):
    n = 30
    A = symmetric(rng, n) + shift * np.eye(n)
    krylov = krylov_space(lambda v: A @ v, rng.standard_normal(n), NumpySpace(n, np.float64))
    for _ in range(n):
        krylov.extend()
        assert krylov.is_definite is bool(cubic.compute_spectrum(*krylov.tridiagonal()).leftmost > 0.0)
    flat = krylov_space(lambda v: 0.0 * v, np.ones(n), NumpySpace(n, np.float64))
    flat.extend()
    assert not flat.is_definite


def test_model_gradient_is_the_residual_times_the_last_entry(rng):
    """‖∇m(s)‖ = β_j |u_j| is what the early stop relies on."""
    n = 25
    A, g = symmetric(rng, n), rng.standard_normal(n)
    krylov = krylov_space(lambda v: A @ v, g, NumpySpace(n, np.float64))
    for _ in range(5):
        krylov.extend()
    step = cubic.solve(cubic.compute_spectrum(*krylov.tridiagonal()), krylov.projected_gradient, 0.3)
    (s,) = krylov.combine(step.u)
    gradient = g + A @ s + 0.3 * np.linalg.norm(s) * s
    assert np.linalg.norm(gradient) == pytest.approx(krylov.last_beta * abs(step.u[-1]), rel=1e-8)


def test_breakdown_is_an_invariant_subspace(rng):
    n = 12
    A = np.diag([-1.0] * 4 + [2.0] * 4 + [5.0] * 4)
    krylov = krylov_space(lambda v: A @ v, rng.standard_normal(n), NumpySpace(n, np.float64))
    while not krylov.is_complete:
        krylov.extend()
    assert krylov.dim == 3 and krylov.is_invariant and krylov.last_beta == 0.0
    diagonal, off = krylov.tridiagonal()
    assert np.linalg.eigvalsh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1)) == pytest.approx([-1, 2, 5])


def test_the_whole_space_is_invariant(rng):
    n = 5
    A = symmetric(rng, n)
    krylov = krylov_space(lambda v: A @ v, rng.standard_normal(n), NumpySpace(n, np.float64), reorthogonalise=True)
    while not krylov.is_complete:
        krylov.extend()
    assert krylov.dim == n and krylov.is_invariant


def test_regenerating_holds_no_basis_and_costs_its_products_again(rng):
    n, j = 40, 7
    A, g = symmetric(rng, n), rng.standard_normal(n)
    calls = []

    def product(v):
        calls.append(1)
        return A @ v

    stored = krylov_space(product, g, NumpySpace(n, np.float64))
    again = krylov_space(product, g, NumpySpace(n, np.float64), store=False)
    for _ in range(j):
        stored.extend()
        again.extend()
    with pytest.raises(TypeError):
        again._source.basis(j)  # there is none
    before = len(calls)
    u, v = rng.standard_normal(j), rng.standard_normal(j)
    combined = again.combine(u, v)
    assert len(calls) - before == j - 1  # one pass for both vectors
    for ours, reference in zip(combined, stored.combine(u, v), strict=True):
        assert ours == pytest.approx(reference, abs=1e-10)


def test_reorthogonalisation_keeps_a_long_basis_orthonormal(rng):
    n = 200
    A = np.diag(np.logspace(-6, 3, n))
    g = rng.standard_normal(n)
    errors = []
    for full in (False, True):
        krylov = krylov_space(lambda v: A @ v, g, NumpySpace(n, np.float64), reorthogonalise=full)
        for _ in range(80):
            krylov.extend()
        Q = basis(krylov, n)
        errors.append(np.abs(Q.T @ Q - np.eye(krylov.dim)).max())
    assert errors[1] < 1e-13 < 1e-2 < errors[0]


def test_a_start_other_than_the_gradient_projects_it(rng):
    n = 20
    A, g, start = symmetric(rng, n), rng.standard_normal(n), rng.standard_normal(n)
    krylov = krylov_space(lambda v: A @ v, start, NumpySpace(n, np.float64), gradient=g)
    for _ in range(4):
        krylov.extend()
    assert krylov.projected_gradient == pytest.approx(basis(krylov, n).T @ g)


def test_a_product_that_is_not_finite_is_reported():
    krylov = krylov_space(lambda v: v * np.nan, np.ones(3), NumpySpace(3, np.float64))
    with pytest.raises(NonFiniteProductError, match="Lanczos iteration 1"):
        krylov.extend()


def test_a_zero_start_is_rejected():
    with pytest.raises(ValueError, match="positive finite norm"):
        krylov_space(lambda v: v, np.zeros(3), NumpySpace(3, np.float64))


@pytest.mark.parametrize("limit", [None, 10, 100])
@pytest.mark.parametrize("kind", ["numpy64", "torch64"])
def test_a_basis_of_several_blocks_is_one_basis(rng, kind, limit):
    n, j = 150, 100
    A = symmetric(rng, n)
    space, make = spaces(n)[kind]
    B = make(A)
    krylov = krylov_space(lambda v: B @ v, make(rng.standard_normal(n)), space, reorthogonalise=True, max_dim=limit)
    while krylov.dim < j and not krylov.is_complete:
        krylov.extend()
    assert krylov.dim == (limit or j)
    Q = np.asarray(krylov._source.basis(krylov.dim))
    u = rng.standard_normal(krylov.dim)
    assert Q @ Q.T == pytest.approx(np.eye(krylov.dim), abs=1e-12)
    assert np.asarray(krylov.combine(u)[0]) == pytest.approx(u @ Q, abs=1e-12)
    diagonal, off = krylov.tridiagonal()
    assert Q @ A @ Q.T == pytest.approx(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1), abs=1e-10)


@pytest.mark.parametrize("shift", [0.0, 0.3, 10.0])
def test_the_norms_of_a_shifted_model_need_no_eigenpairs(rng, shift):
    """β_j |u_j| is the residual of (B + shift·I) s = −g in the whole space, s its solution in the Krylov space."""
    Q = np.linalg.qr(rng.standard_normal((12, 12)))[0]
    B = Q @ np.diag(np.linspace(0.1, 3.0, 12)) @ Q.T
    g = rng.standard_normal(12)
    krylov = krylov_space(lambda v: B @ v, g, NumpySpace(12, np.float64), reorthogonalise=True)
    for j in range(1, 12):
        krylov.extend()
        K = np.linalg.qr(np.column_stack([np.linalg.matrix_power(B, k) @ g for k in range(j)]))[0]
        s = -K @ np.linalg.solve(K.T @ (B + shift * np.eye(12)) @ K, K.T @ g)
        left = np.linalg.norm(B @ s + shift * s + g)
        norms = [np.linalg.norm(s), left]
        assert list(krylov.shifted_norms(shift)) == pytest.approx(norms, rel=1e-6, abs=1e-9)
    assert np.isnan(krylov.shifted_norms(-1.0)).all()  # T − I is not positive definite


@pytest.mark.parametrize("reorthogonalise", [False, True])
def test_the_recurrence_reads_nothing_so_that_a_recording_can_hold_it(rng, reorthogonalise):
    """All iterations first, all numbers afterwards: what a captured step does, also beyond an invariant space."""
    n, dim = 12, 9
    values = np.array([-1.0, 2.0, 3.5])[np.arange(n) % 3]  # three eigenvalues: the fourth residual is rounding
    Q, _ = np.linalg.qr(rng.standard_normal((n, n)))
    B = torch.from_numpy(Q @ np.diag(values) @ Q.T)
    start = torch.from_numpy(rng.standard_normal(n))
    space = Space(n, torch.float64, torch.device("cpu"))
    space.read = None  # a read raises an error
    lanczos = Lanczos(lambda v: B @ v, start, space, max_dim=dim, reorthogonalise=reorthogonalise)
    for _ in range(dim):
        lanczos.extend()
    del space.read
    at_once = Krylov(lanczos)
    one_by_one = krylov_space(lambda v: B @ v, start, space, max_dim=dim, reorthogonalise=reorthogonalise)
    while not one_by_one.is_complete:
        one_by_one.extend()
        at_once.extend()
        assert (at_once.alpha, at_once.beta) == (one_by_one.alpha, one_by_one.beta)
    assert at_once.is_complete
    assert at_once.dim == 3 and at_once.is_invariant
    assert torch.equal(at_once._source.basis(3), one_by_one._source.basis(3))


def test_a_product_that_fails_leaves_the_space_as_it_was(rng):
    n = 12
    A, fail = np.diag(np.linspace(0.1, 0.6, n)), []

    def product(v):
        if fail:
            raise KeyError(fail.pop())
        return A @ v

    krylov = krylov_space(product, rng.standard_normal(n), NumpySpace(n, np.float64), max_dim=6)
    krylov.extend()
    krylov.extend()
    expected = krylov.combine(np.array([1.0, 2.0]))[0]
    fail.append("now")
    with pytest.raises(KeyError):
        krylov.extend()
    assert krylov.dim == 2 and np.array_equal(krylov.combine(np.array([1.0, 2.0]))[0], expected)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_on_the_gradient_norm_is_below_that_of_the_minimiser(seed):
    rng = np.random.default_rng(seed)
    n, sigma = 30, 10.0 ** rng.uniform(-4, 4)
    A, g = symmetric(rng, n) * 10.0 ** rng.uniform(-2, 2), rng.standard_normal(n) * 10.0 ** rng.uniform(-3, 3)
    krylov = krylov_space(lambda v: A @ v, g, NumpySpace(n, np.float64), reorthogonalise=True)
    for _ in range(5):
        krylov.extend()
        step = cubic.solve(cubic.compute_spectrum(*krylov.tridiagonal()), krylov.projected_gradient, sigma)
        rounded = 1e-13 * step.norm * krylov.last_beta  # what the eigenvectors round away
        assert (
            0.0
            < krylov.model_gradient_lower_bound(sigma)
            <= krylov.last_beta * abs(float(step.u[-1])) * (1 + 1e-9) + rounded
        )


def test_the_bound_on_the_gradient_norm_is_near_enough_to_be_of_use():
    """T = 2 and a residual of 0.1, small σ: u = 3/2, and the bound finds nearly half of ‖∇m‖ = 0.15."""
    A = np.array([[2.0, 0.1], [0.1, 2.0]])
    krylov = krylov_space(lambda v: A @ v, np.array([3.0, 0.0]), NumpySpace(2, np.float64), max_dim=1)
    krylov.extend()
    assert krylov.last_beta == pytest.approx(0.1)
    assert 0.4 * 0.15 < krylov.model_gradient_lower_bound(1e-12) < 0.15


@pytest.mark.parametrize("sigma0", [1e-9, 1.0])
def test_eigenpairs_are_computed_only_where_the_step_may_be_accurate(monkeypatch, sigma0):
    dims, B = [], np.diag(np.logspace(0.0, 2.0, 10))
    compute = cubic.compute_spectrum
    monkeypatch.setattr(cubic, "compute_spectrum", lambda a, b: dims.append(len(a)) or compute(a, b))
    calls = {"jac": lambda x: B @ x, "hessp": lambda x, v: B @ v}
    res = sanc.minimize(lambda x: 0.5 * x @ B @ x, np.ones(10), **calls, sigma0=sigma0, max_iter=4, certify=False)
    first, *others = [record.krylov_dim for record in res.history]
    assert dims[-3:] == others and min(others) > 5
    assert len(dims) <= 3 + first  # the limit on the first step norm may raise σ, so that every dimension is tested


def test_there_is_no_bound_where_the_space_was_started_elsewhere(rng):
    A = symmetric(rng, 6)
    g, start = rng.standard_normal(6), rng.standard_normal(6)
    krylov = krylov_space(lambda v: A @ v, start, NumpySpace(6, np.float64), gradient=g)
    krylov.extend()
    assert krylov.model_gradient_lower_bound(1.0) == 0.0
