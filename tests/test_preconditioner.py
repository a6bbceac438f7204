"""A preconditioner changes the norm of the steps, and neither the tolerances nor the certificate."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator

import sanc
from sanc.errors import ArgumentError, ArgumentTypeError

RNG = np.random.default_rng(0)
SCALES = np.array([1.0, 2.0, 4.0, 0.5])
ROOT = np.diag(SCALES) + 0.3 * np.tril(RNG.standard_normal((4, 4)), -1)
M = ROOT @ ROOT.T
START = np.array([-1.2, 1.0, 0.5, 2.0])


def rosenbrock(x):
    return (100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2).sum()


def jac(x):
    return scipy.optimize.rosen_der(x)


def hessp(x, v):
    return scipy.optimize.rosen_hess_prod(x, v)


FORMS = {
    "matrix": M,
    "tensor": torch.from_numpy(M),
    "sparse": scipy.sparse.csr_array(M),
    "operator": LinearOperator((4, 4), matvec=lambda v: M @ v, dtype=float),
    "function": lambda v: M @ v,
}


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_those_of_a_change_of_variables(form):
    options = {"max_iter": 6, "certify": False, "tol": 1e-14}
    res = sanc.minimize(rosenbrock, START, jac=jac, hessp=hessp, precond=FORMS[form], **options)
    changed = sanc.minimize(
        lambda y: rosenbrock(ROOT @ y),
        np.linalg.solve(ROOT, START),
        jac=lambda y: ROOT.T @ jac(ROOT @ y),
        hessp=lambda y, v: ROOT.T @ hessp(ROOT @ y, ROOT @ v),
        **options,
    )
    assert np.allclose(res.x, ROOT @ changed.x, rtol=1e-8, atol=0.0)
    for ours, theirs in zip(res.history, changed.history, strict=True):
        assert ours.branch == theirs.branch
        assert np.isclose(ours.value, theirs.value, rtol=1e-8) and np.isclose(ours.sigma, theirs.sigma, rtol=1e-5)
        assert np.isclose(ours.step_norm, theirs.step_norm, rtol=1e-6)
    plain = sanc.minimize(rosenbrock, START, jac=jac, hessp=hessp, **options)
    assert not np.allclose(plain.x, res.x, rtol=1e-3)


def test_tolerances_and_certificate_are_those_of_the_original_variables():
    scales = torch.tensor([1.0, 1e4, 1e-3], dtype=torch.float64)
    f = lambda x: (scales * x.square()).sum() + 0.1 * (x.sum() - 1.0) ** 4
    res = sanc.minimize(f, torch.ones(3).double(), precond=1.0 / scales, tol=1e-7)
    hessian = torch.autograd.functional.hessian(f, res.x)
    assert res.success and float(res.jac.norm()) <= 1e-7
    gradient = torch.autograd.functional.jacobian(f, res.x)
    assert torch.allclose(res.jac, gradient, rtol=1e-12, atol=1e-14)
    smallest = float(torch.linalg.eigvalsh(hessian)[0])
    assert res.certificate.lambda_min == pytest.approx(smallest, rel=1e-3, abs=1e-6)
    assert res.certificate.grad_norm == pytest.approx(float(res.jac.norm()))


def test_a_diagonal_saves_products_on_a_badly_scaled_quadratic():
    diagonal = np.logspace(0, 6, 60)
    coupling = np.ones(60)
    hess = np.diag(diagonal) + np.outer(coupling, coupling)
    run = lambda **options: sanc.minimize(
        lambda x: 0.5 * x @ hess @ x - x.sum(),
        np.ones(60),
        jac=lambda x: hess @ x - 1.0,
        hess=lambda x: hess,
        **options,
    )
    plain, res = run(), run(precond=1.0 / diagonal)
    assert res.success and np.allclose(res.x, np.linalg.solve(hess, np.ones(60)), atol=1e-8)
    assert res.nhev < 0.2 * plain.nhev


def test_a_saddle_is_left_in_the_norm_of_the_preconditioner():
    f = lambda x: (x[0] ** 2 - 1.0) ** 2 + x[1] ** 2
    res = sanc.minimize(f, torch.zeros(2).double(), precond=lambda v: v * torch.tensor([4.0, 0.25]).double())
    assert res.success and abs(float(res.x[0])) == pytest.approx(1.0) and res.certificate.second_order


def test_float32_shapes_and_trees():
    f = lambda p: ((p["a"] - 2.0) ** 2).sum() + 1e3 * ((p["b"] + 1.0) ** 2).sum()
    tree = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}
    res = sanc.minimize(f, tree, precond=np.array([1.0] * 4 + [1e-3] * 3))
    assert res.success and torch.allclose(res.x["a"], torch.full((2, 2), 2.0)) and res.x["b"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"precond": np.diag([1.0, -1.0, 1.0, 1.0])}, "precond is not positive definite, with an eigenvalue of -1"),
        ({"precond": np.array([1.0, 0.0, 1.0, 1.0])}, "precond is not positive definite"),
        ({"precond": M + np.triu(M, 1)}, "precond is not symmetric"),
        ({"precond": np.eye(3)}, r"precond has shape \(3, 3\) for 4 variables"),
        ({"precond": np.full(4, np.nan)}, "precond .* holds NaN"),
        ({"precond": lambda v: v[:2]}, "precond returned 2 numbers for 4 variables"),
        ({"precond": lambda v: "no"}, "precond returned 'no'"),
        ({"precond": "jacobi"}, "precond = 'jacobi' is no preconditioner"),
        ({"precond": np.ones(4), "bounds": [(-3, 3)] * 4}, "precond cannot be used with bounds"),
    ],
)
def test_mistakes_are_named(change, match):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=match):
        sanc.minimize(rosenbrock, START, jac=jac, hessp=hessp, **change)
