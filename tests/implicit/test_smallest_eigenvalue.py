"""The Hessian of a minimum in blocks of columns, and what earlier products save in later linear systems."""

from __future__ import annotations

import math

import pytest
import torch

import sanc
from sanc.implicit import smallest_eigenvalue
from sanc.implicit.smallest_eigenvalue import curvature_of_matrix, forms_hessian, hessian_columns
from tensors import normal

D = torch.float64


def gradient_of(f):
    return lambda x: torch.autograd.grad(f(x), x, create_graph=True)[0]


A = normal(30, 12, seed=1)


class Cubed(torch.autograd.Function):
    """x³, whose derivatives cannot be computed in batches."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, u):
        (x,) = ctx.saved_tensors
        return Squared.apply(x) * 3 * u


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, u):
        (x,) = ctx.saved_tensors
        if float(u[0]) == 42.0:  # data-dependent, an error in batches
            raise ValueError
        return 2 * x * u


FUNCTIONS = {
    "matrix products": lambda x: torch.nn.functional.softplus(A @ x).sum() + (x**4).sum(),
    "not batched": lambda x: Cubed.apply(x).sum() + (A @ x).square().sum(),
    "linear": lambda x: (A[0] @ x).sum(),
}


@pytest.mark.parametrize("entries", [2**22, 200, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_columns_in_blocks_are_the_hessian(name, entries, monkeypatch):
    monkeypatch.setattr(smallest_eigenvalue, "_MAX_COLUMN_ENTRIES", entries)
    f, x = FUNCTIONS[name], normal(12)
    exact = torch.autograd.functional.hessian(f, x)
    assert torch.allclose(hessian_columns(gradient_of(f), x, None), exact, atol=1e-12)
    free = torch.tensor([1, 5, 11])
    assert torch.allclose(hessian_columns(gradient_of(f), x, free), exact[free][:, free], atol=1e-12)


def test_small_blocks_are_not_used_in_a_large_space(monkeypatch):
    B = normal(300, 120, seed=2)
    gradient = gradient_of(lambda x: torch.nn.functional.softplus(B @ x).sum())
    assert hessian_columns(gradient, normal(120), None).shape == (120, 120)
    monkeypatch.setattr(smallest_eigenvalue, "_MAX_COLUMN_ENTRIES", 1000)
    assert hessian_columns(gradient, normal(120), None) is None


def test_the_hessian_is_formed_if_that_replaces_more_products():
    assert forms_hessian(100, 0, None) and not forms_hessian(101, 25, None) and forms_hessian(101, 26, None)
    assert forms_hessian(1000, 250, None) and not forms_hessian(1001, 10_000, None)
    assert not forms_hessian(50, 0, 49)


def test_a_matrix_bounds_its_smallest_eigenvalue_up_to_roundoff():
    H = normal(20, 20)
    H = H @ H.T + 0.1 * torch.eye(20, dtype=D)
    known = curvature_of_matrix((H + H.T) / 2, 1e-3, 1e-2)
    smallest = float(torch.linalg.eigvalsh(H)[0])
    cert = known.certificate
    assert cert.lower_bound <= smallest <= cert.lambda_min + cert.ritz_error and cert.error_bound < 1e-12
    assert (cert.confidence, cert.products, cert.stationary) == (1.0, 20, True)
    W, values = known.ritz_space.rows, torch.from_numpy(known.ritz_space.values)
    assert torch.allclose(W.T * values @ W, H, atol=1e-10)


def test_an_asymmetric_or_infinite_matrix_bounds_nothing():
    H = torch.eye(3, dtype=D)
    H[0, 1] = 1e-3
    assert curvature_of_matrix(H, 0.0, 1.0).certificate.lower_bound == -math.inf
    H[0, 1] = math.inf
    assert math.isnan(curvature_of_matrix(H, 0.0, 1.0).certificate.lambda_min)


def ill_conditioned(size, decades):
    """Σ s_k x_k²/2 − t·x + Σ x_k⁴/100, with s_k over several decades."""
    scales = torch.logspace(-decades, 0, size, dtype=D)
    return lambda x, t: 0.5 * (scales * x**2).sum() - t @ x + 0.01 * (scales * x**4).sum()


def test_a_long_run_makes_later_systems_free():
    """The run needs more products than a quarter of the variables, so that the Hessian is formed."""
    t = normal(150, seed=3).requires_grad_()
    x, solution = sanc.argmin(ill_conditioned(150, 3), torch.zeros(150, dtype=D), t, details=True)
    (g,) = torch.autograd.grad(x.sum(), t)
    assert solution.result.nhev > 40 and solution.certificate.products == 150
    assert solution.certificate.confidence == 1.0 and solution.derivatives[-1].products <= 3
    H = torch.autograd.functional.hessian(lambda x: ill_conditioned(150, 3)(x, t.detach()), x.detach())
    assert torch.allclose(g, torch.linalg.solve(H, torch.ones(150, dtype=D)), rtol=1e-6)


def test_the_certificate_shortens_the_backward_pass():
    """A few small eigenvalues far from the others: the certificate has found them, and the backward pass is short."""
    size = 400
    scales = torch.cat([torch.logspace(-4, -1, 8, dtype=D), torch.linspace(1, 2, size - 8).to(D)])

    def fun(x, t):
        return 0.5 * (scales * x**2).sum() - t @ x

    t = normal(size, seed=5).requires_grad_()
    start = t.detach() / scales  # the run needs no product
    x, solution = sanc.argmin(fun, start, t, details=True)
    (g,) = torch.autograd.grad(x.sum(), t)
    assert solution.certificate.products < size
    # The conjugate gradient method alone needs twice as many.
    assert solution.derivatives[-1].products < 25 and torch.allclose(g, 1 / scales, rtol=1e-5)
