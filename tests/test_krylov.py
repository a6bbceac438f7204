"""Lanczos against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sanc.krylov import Krylov, NonFiniteProductError
from sanc.lanczos import Recorded, lanczos
from sanc.vectors import NumpySpace, TorchSpace


def symmetric(rng, n):
    A = rng.standard_normal((n, n))
    return (A + A.T) / 2


def spaces(n):
    return {
        "numpy64": (NumpySpace(n, np.float64), lambda a: np.array(a)),
        "numpy32": (NumpySpace(n, np.float32), lambda a: np.array(a, np.float32)),
        "torch64": (TorchSpace(n, torch.float64, torch.device("cpu")), lambda a: torch.tensor(a)),
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
    krylov = Krylov(lambda v: B @ v, make(g), space, store=store)
    for _ in range(j):
        assert krylov.extend()
    Q = basis(krylov, n)
    tolerance = 1e-4 if kind == "numpy32" else 1e-10
    diagonal, off = krylov.tridiagonal()
    T = np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1)
    assert Q.T @ Q == pytest.approx(np.eye(j), abs=tolerance)
    assert Q.T @ A @ Q == pytest.approx(T, abs=tolerance)
    assert Q[:, 0] == pytest.approx(g / np.linalg.norm(g), abs=tolerance)
    assert krylov.linear == pytest.approx(Q.T @ g, abs=tolerance)
    # AQ − QT = β_j q_{j+1} e_jᵀ
    residual = A @ Q - Q @ T
    assert np.linalg.norm(residual[:, :-1]) <= 10 * tolerance
    assert np.linalg.norm(residual[:, -1]) == pytest.approx(krylov.residual, rel=10 * tolerance)


def test_model_gradient_is_the_residual_times_the_last_entry(rng):
    """‖∇m(s)‖ = β_j |u_j| is what the early stop relies on."""
    from sanc import cubic

    n = 25
    A, g = symmetric(rng, n), rng.standard_normal(n)
    krylov = Krylov(lambda v: A @ v, g, NumpySpace(n, np.float64))
    for _ in range(5):
        krylov.extend()
    step = cubic.minimise(cubic.spectrum(*krylov.tridiagonal()), krylov.linear, 0.3)
    (s,) = krylov.combine(step.u)
    gradient = g + A @ s + 0.3 * np.linalg.norm(s) * s
    assert np.linalg.norm(gradient) == pytest.approx(krylov.residual * abs(step.u[-1]), rel=1e-8)


def test_breakdown_is_an_invariant_subspace(rng):
    n = 12
    A = np.diag([-1.0] * 4 + [2.0] * 4 + [5.0] * 4)
    krylov = Krylov(lambda v: A @ v, rng.standard_normal(n), NumpySpace(n, np.float64))
    while krylov.extend():
        pass
    assert krylov.dim == 3 and krylov.invariant and krylov.residual == 0.0
    diagonal, off = krylov.tridiagonal()
    assert np.linalg.eigvalsh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1)) == pytest.approx([-1, 2, 5])


def test_the_whole_space_is_invariant(rng):
    n = 5
    A = symmetric(rng, n)
    krylov = Krylov(lambda v: A @ v, rng.standard_normal(n), NumpySpace(n, np.float64), reorthogonalise=True)
    while krylov.extend():
        pass
    assert krylov.dim == n and krylov.invariant


def test_regenerating_holds_no_basis_and_costs_its_products_again(rng):
    n, j = 40, 7
    A, g = symmetric(rng, n), rng.standard_normal(n)
    calls = []

    def product(v):
        calls.append(1)
        return A @ v

    stored = Krylov(product, g, NumpySpace(n, np.float64))
    again = Krylov(product, g, NumpySpace(n, np.float64), store=False)
    for _ in range(j):
        stored.extend()
        again.extend()
    assert not again._blocks
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
        krylov = Krylov(lambda v: A @ v, g, NumpySpace(n, np.float64), reorthogonalise=full)
        for _ in range(80):
            krylov.extend()
        Q = basis(krylov, n)
        errors.append(np.abs(Q.T @ Q - np.eye(krylov.dim)).max())
    assert errors[1] < 1e-13 < 1e-2 < errors[0]


def test_a_start_other_than_the_gradient_projects_it(rng):
    n = 20
    A, g, start = symmetric(rng, n), rng.standard_normal(n), rng.standard_normal(n)
    krylov = Krylov(lambda v: A @ v, start, NumpySpace(n, np.float64), linear=g)
    for _ in range(4):
        krylov.extend()
    assert krylov.linear == pytest.approx(basis(krylov, n).T @ g)


def test_a_product_that_is_not_finite_is_reported():
    krylov = Krylov(lambda v: v * np.nan, np.ones(3), NumpySpace(3, np.float64))
    with pytest.raises(NonFiniteProductError, match="Lanczos iteration 1"):
        krylov.extend()


def test_a_zero_start_is_refused():
    with pytest.raises(ValueError, match="positive finite length"):
        Krylov(lambda v: v, np.zeros(3), NumpySpace(3, np.float64))


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1.0, 1e200])
def test_norm_neither_overflows_nor_underflows(scale):
    assert NumpySpace(3, np.float64).norm(np.array([3.0, 4.0, 0.0]) * scale) == pytest.approx(5 * scale)


def test_norm_of_what_is_not_finite_is_not_finite():
    space = NumpySpace(2, np.float64)
    assert not space.finite(np.array([1.0, np.nan]))
    assert not space.finite(np.array([1.0, np.inf]))
    assert space.norm(np.zeros(2)) == 0.0


@pytest.mark.parametrize("limit", [None, 10, 100])
@pytest.mark.parametrize("kind", ["numpy64", "torch64"])
def test_a_basis_of_several_blocks_is_one_basis(rng, kind, limit):
    n, j = 150, 100
    A = symmetric(rng, n)
    space, make = spaces(n)[kind]
    B = make(A)
    krylov = Krylov(lambda v: B @ v, make(rng.standard_normal(n)), space, reorthogonalise=True, limit=limit)
    while krylov.dim < j and krylov.extend():
        pass
    assert krylov.dim == (limit or j)
    Q = np.asarray(krylov.basis())
    u = rng.standard_normal(krylov.dim)
    assert Q @ Q.T == pytest.approx(np.eye(krylov.dim), abs=1e-12)
    assert np.asarray(krylov.combine(u)[0]) == pytest.approx(u @ Q, abs=1e-12)
    diagonal, off = krylov.tridiagonal()
    assert Q @ A @ Q.T == pytest.approx(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1), abs=1e-10)


def test_a_limit_is_allocated_to_measure_and_handed_over(rng):
    A = symmetric(rng, 20)
    krylov = Krylov(lambda v: A @ v, rng.standard_normal(20), NumpySpace(20, np.float64), limit=7)
    while krylov.extend():
        pass
    (block,) = krylov._blocks
    assert block.shape == (7, 20)
    assert krylov.basis() is block


def test_without_a_basis_products_are_added_where_that_is_offered(rng):
    n, j = 30, 6
    A, g, u = symmetric(rng, n), rng.standard_normal(n), rng.standard_normal(6)
    added = []

    def add(v, into):
        added.append(1)
        into += A @ v

    space = NumpySpace(n, np.float64)
    stored = Krylov(lambda v: A @ v, g, space)
    again = Krylov(lambda v: pytest.fail("not asked"), g, space, store=False, add=add)
    for _ in range(j):
        assert stored.extend() and again.extend()
    np.testing.assert_allclose(again.tridiagonal()[0], stored.tridiagonal()[0], atol=1e-12)
    np.testing.assert_allclose(again.combine(u)[0], stored.combine(u)[0], atol=1e-11)
    assert len(added) == j + j - 1
    assert not again.extend()  # what would be needed for it is gone


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_torch_norms_neither_overflow_nor_underflow(kind):
    dtype = getattr(torch, kind)
    space = TorchSpace(3, dtype, torch.device("cpu"))
    for scale in (0.0, 1e-30, 1e-18, 1.0, 1e18):
        assert space.norm(torch.tensor([3.0, 4.0, 0.0], dtype=dtype) * scale) == pytest.approx(5 * scale, rel=1e-6)
    assert not space.finite(torch.tensor([1.0, float("nan"), 0.0], dtype=dtype))
    assert not space.finite(torch.tensor([1.0, float("inf"), 0.0], dtype=dtype))


@pytest.mark.parametrize("reorthogonalise", [False, True])
@pytest.mark.parametrize("dim", [3, 5, 9])
def test_lanczos_at_once_is_lanczos_step_by_step(rng, reorthogonalise, dim):
    """Also where the space is full before all iterations are made: three eigenvalues, nine dimensions asked for."""
    n = 12
    values = np.array([-1.0, 2.0, 3.5])[np.arange(n) % 3] if dim == 9 else rng.standard_normal(n)
    Q, _ = np.linalg.qr(rng.standard_normal((n, n)))
    B = torch.from_numpy(Q @ np.diag(values) @ Q.T)
    start = torch.from_numpy(rng.standard_normal(n))
    space = TorchSpace(n, torch.float64, torch.device("cpu"))
    rows = torch.empty((dim, n), dtype=torch.float64)
    numbers = lanczos(lambda v: B @ v, start, rows, reorthogonalise=reorthogonalise).tolist()
    at_once = Recorded(numbers, rows, space)
    one_by_one = Krylov(lambda v: B @ v, start, space, reorthogonalise=reorthogonalise, limit=dim)
    while one_by_one.extend():
        assert at_once.extend()
        for mine, theirs in zip(at_once.tridiagonal(), one_by_one.tridiagonal(), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-8, abs=1e-10)
    assert not at_once.extend()
    assert at_once.dim == one_by_one.dim == (3 if dim == 9 else dim)
    assert at_once.invariant == one_by_one.invariant
    assert at_once.linear == pytest.approx(one_by_one.linear)
    assert torch.allclose(at_once.basis(), one_by_one.basis(), atol=1e-8)


@pytest.mark.parametrize("asked", [True, False])
def test_the_last_residual_waits_until_it_is_asked_for(rng, asked):
    n, J = 30, 6
    A = rng.standard_normal((n, n))
    A = A + A.T
    g = rng.standard_normal(n)
    whole = Krylov(lambda v: A @ v, g, NumpySpace(n, np.float64))
    full = Krylov(lambda v: A @ v, g, NumpySpace(n, np.float64), limit=J)
    for _ in range(J):
        assert whole.extend() and full.extend()
        if asked:
            assert full.residual == whole.residual and not full.invariant
    assert not full.extend()
    for mine, right in zip(full.tridiagonal(), whole.tridiagonal(), strict=True):
        assert np.array_equal(mine, right)
    assert full.residual == whole.residual and full.dim == J
    x, u = rng.standard_normal(n), rng.standard_normal(J)
    assert full.added(x, u) == pytest.approx(x + full.basis().T @ u, abs=1e-13)


def test_rows_that_products_are_written_into(rng):
    n, J = 37, 5
    A = torch.from_numpy(rng.standard_normal((n, n)))
    A = A + A.T
    g, space, given = torch.from_numpy(rng.standard_normal(n)), TorchSpace(n, torch.float64, torch.device("cpu")), []

    def write(v, out):
        given.append(out)
        return torch.mv(A, v, out=out)

    plain = Krylov(lambda v: A @ v, g, space, limit=J)
    written = Krylov(lambda v: A @ v, g, space, limit=J, write=write, start_norm=space.norm(g))
    while plain.extend():
        assert written.extend()
    assert len(given) == J - 1 and torch.allclose(written.basis(), plain.basis(), atol=1e-12)
    assert written.basis().data_ptr() % 8 == 0 and written.basis().stride(0) % 16 == 0
    assert np.allclose(written.tridiagonal()[0], plain.tridiagonal()[0], atol=1e-12)
    assert written.residual == pytest.approx(plain.residual, rel=1e-12)
    x, u = torch.from_numpy(rng.standard_normal(n)), rng.standard_normal(J)
    expected = x + written.basis().T @ torch.from_numpy(u)
    assert torch.allclose(written.added(x, u), expected, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 0.05, 0.2, 1.0, 1e6])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_rows_that_are_not_too_long_or_short_are_left_as_they_come(rng, library, scale):
    """What is computed of them does not depend on it: T, its residual, projections, combinations and the basis."""
    n, J = 37, 6
    A = rng.standard_normal((n, n))
    A, g, other = scale * (A + A.T), rng.standard_normal(n), rng.standard_normal(n)
    lengths = []
    if library == "torch":
        space, one = TorchSpace(n, torch.float64, torch.device("cpu")), torch.from_numpy
    else:
        space, one = NumpySpace(n, np.float64), np.array
    B = one(A)

    def write(v, out):
        lengths.append(float(np.linalg.norm(np.asarray(v))))
        out[:] = B @ v
        return out

    def product(v):
        lengths.append(float(np.linalg.norm(np.asarray(v))))
        return B @ v

    krylov = Krylov(product, one(g), space, limit=J, write=write, linear=one(other))
    while krylov.extend():
        pass
    plain = Krylov(lambda v: B @ v, one(g), space, limit=J, linear=one(other))
    while plain.extend():
        pass
    assert lengths[0] == pytest.approx(1.0) and all(0.12 < length < 1.0 + 1e-12 for length in lengths)
    assert any(length != pytest.approx(1.0) for length in lengths) == (1e-3 < scale < 0.1)
    Q, u = np.asarray(plain.basis()), rng.standard_normal(J)
    T = Q @ A @ Q.T
    assert np.allclose(krylov.tridiagonal()[0], np.diag(T), rtol=1e-9, atol=1e-10 * scale)
    assert np.allclose(krylov.tridiagonal()[1], np.diag(T, 1), rtol=1e-9, atol=1e-10 * scale)
    assert np.allclose(krylov.linear, Q @ other, atol=1e-10)
    assert np.allclose(np.asarray(krylov.combine(u)[0]), u @ Q, atol=1e-10)
    out_of_it = np.linalg.norm(A @ Q[-1] - Q.T @ (Q @ (A @ Q[-1])))
    assert krylov.residual == pytest.approx(out_of_it, rel=1e-9)
    assert np.allclose(np.asarray(krylov.basis()), Q, atol=1e-10)
    assert np.allclose(np.asarray(krylov.added(one(other), u)), other + u @ Q, atol=1e-10)


@pytest.mark.parametrize("asked_at", [1, 2, 3, 4, 5])
def test_a_space_may_grow_after_its_basis_was_asked_for(rng, asked_at):
    n, J = 20, 5
    A = rng.standard_normal((n, n))
    A, g, space = 0.05 * (A + A.T), rng.standard_normal(n), NumpySpace(n, np.float64)

    def write(v, out):
        out[:] = A @ v
        return out

    krylov, plain = (Krylov(lambda v: A @ v, g, space, limit=J, write=how) for how in (write, None))
    for j in range(1, J + 1):
        assert krylov.extend() and plain.extend()
        if j == asked_at:
            assert np.allclose(krylov.basis(), plain.basis(), atol=1e-12)
    assert np.allclose(krylov.basis(), plain.basis(), atol=1e-10)
    assert np.allclose(krylov.tridiagonal()[0], plain.tridiagonal()[0], atol=1e-12)
    assert np.allclose(krylov.tridiagonal()[1], plain.tridiagonal()[1], atol=1e-12)
    assert krylov.residual == pytest.approx(plain.residual, rel=1e-10)


def test_a_product_that_fails_leaves_the_space_as_it_was(rng):
    n = 12
    A, fail = np.diag(np.linspace(0.1, 0.6, n)), []

    def write(v, out):
        if fail:
            raise KeyError(fail.pop())
        out[:] = A @ v
        return out

    g = rng.standard_normal(n)
    krylov = Krylov(lambda v: A @ v, g, NumpySpace(n, np.float64), limit=6, write=write)
    krylov.extend()
    krylov.extend()
    expected = krylov.combine(np.array([1.0, 2.0]))[0]
    fail.append("now")
    with pytest.raises(KeyError):
        krylov.extend()
    assert np.allclose(krylov.combine(np.array([1.0, 2.0]))[0], expected, atol=1e-14)


@pytest.mark.parametrize("shift", [0.0, 0.3, 10.0])
def test_the_slope_of_a_shifted_model_needs_no_eigenpairs(rng, shift):
    """β_j |u_j| is the residual of (B + shift·I) s = −g in the whole space, s its solution in the Krylov space."""
    Q = np.linalg.qr(rng.standard_normal((12, 12)))[0]
    B = Q @ np.diag(np.linspace(0.1, 3.0, 12)) @ Q.T
    g = rng.standard_normal(12)
    krylov = Krylov(lambda v: B @ v, g, NumpySpace(12, np.float64), reorthogonalise=True)
    for j in range(1, 12):
        krylov.extend()
        K = np.linalg.qr(np.column_stack([np.linalg.matrix_power(B, k) @ g for k in range(j)]))[0]
        s = -K @ np.linalg.solve(K.T @ (B + shift * np.eye(12)) @ K, K.T @ g)
        left = np.linalg.norm(B @ s + shift * s + g)
        assert krylov.slope(shift) == pytest.approx(left, rel=1e-6, abs=1e-9)
    assert np.isnan(krylov.slope(-1.0))  # T − I is not positive definite


def test_what_products_share_is_prepared_before_a_second_pass_takes_memory(rng):
    a = rng.standard_normal((6, 6))
    a, order = a + a.T, []
    space = NumpySpace(6, np.float64)
    for dim in (1, 3):
        krylov = Krylov(
            lambda v: order.append("product") or a @ v,
            np.ones(6),
            space,
            store=False,
            limit=dim,
            prepare=lambda: order.append("prepared"),
        )
        while krylov.extend():
            pass
        order.clear()
        krylov.combine(np.ones(dim))
        assert order == (["prepared", "product", "product"] if dim > 1 else [])  # where there is nothing to multiply


@pytest.mark.parametrize("kind", ["numpy64", "numpy32", "torch64"])
@pytest.mark.parametrize("limit", [None, 20])
@pytest.mark.parametrize("written", [False, True])
def test_both_vectors_are_taken_out_in_one_pass(rng, kind, limit, written):
    """As where vectors are long; over several blocks of rows, and rows that are left as they come."""
    n, j = 40, 15
    A, g = symmetric(rng, n) / 40, rng.standard_normal(n)  # so short that rows are left
    space, make = spaces(n)[kind]
    B = make(A)

    def write(v, out):
        out[:] = B @ v
        return out

    calls = []
    subtract = space.subtract_both
    space.subtract_both = lambda *given: calls.append(given) or subtract(*given)
    made = []
    for space.long in (False, True):
        calls.clear()
        krylov = Krylov(lambda v: B @ v, make(g), space, limit=limit, write=write if written else None)
        for _ in range(j):
            assert krylov.extend()
        made.append([*krylov.tridiagonal(), krylov.residual, basis(krylov, n)])
        firsts = 1 if limit else 3  # of a block of rows, which begins apart from the row before: 6, 6 and 12 of them
        assert len(calls) == (j - firsts if space.long else 0)
    tolerance = 2e-4 if kind == "numpy32" else 1e-11
    for plain, fused in zip(*made, strict=True):
        assert fused == pytest.approx(plain, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("kind", ["numpy64", "numpy32", "torch64"])
def test_long_vectors_are_the_ones_it_is_done_for(rng, kind):
    for n, long in ((2**16 - 1, False), (2**16, True)):
        space, make = spaces(n)[kind]
        assert space.long is long
        scales = make(np.linspace(-1.0, 3.0, n))
        g = rng.standard_normal(n)
        krylov = Krylov(lambda v: scales * v, make(g), space, limit=6)
        while krylov.extend():
            pass
        Q, T = (
            basis(krylov, n),
            np.diag(krylov.tridiagonal()[0]) + sum(np.diag(krylov.tridiagonal()[1], k) for k in (1, -1)),
        )
        assert Q.T @ (np.asarray(scales)[:, None] * Q) == pytest.approx(T, abs=1e-5 if kind == "numpy32" else 1e-12)
        assert krylov.residual == pytest.approx(
            np.linalg.norm((np.asarray(scales)[:, None] * Q - Q @ T)[:, -1]), rel=1e-4
        )


@pytest.mark.parametrize("kind", ["numpy64", "numpy32"])
def test_a_product_of_another_type_or_stride_is_changed_in_place_all_the_same(rng, kind):
    n = 40
    A, g = symmetric(rng, n), rng.standard_normal(n)
    space, make = spaces(n)[kind]
    space.long = True
    for product in (lambda v: A @ v, lambda v: np.stack([A @ v, A @ v], axis=1)[:, 0]):
        krylov = Krylov(product, make(g), space, limit=8)
        while krylov.extend():
            pass
        Q = basis(krylov, n)
        tolerance = 1e-4 if kind == "numpy32" else 1e-10
        T = np.diag(krylov.tridiagonal()[0]) + sum(np.diag(krylov.tridiagonal()[1], k) for k in (1, -1))
        assert Q.T @ Q == pytest.approx(np.eye(8), abs=tolerance) and Q.T @ A @ Q == pytest.approx(T, abs=tolerance)
