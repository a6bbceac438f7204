"""A preconditioner changes the norm of the steps, and neither the tolerances nor the certificate."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator

import sanc
from sanc.core.runs.preconditioned import Factor, PreconditionedOracle
from sanc.errors import ArgumentError, ArgumentTypeError
from sanc.leastsquares.networks import NetworkResiduals
from sanc.minimisation.objective import build_oracle
from zoo import rosen_torch

RNG = np.random.default_rng(0)
SCALES = np.array([1.0, 2.0, 4.0, 0.5])
ROOT = np.diag(SCALES) + 0.3 * np.tril(RNG.standard_normal((4, 4)), -1)
M = ROOT @ ROOT.T
START = np.array([-1.2, 1.0, 0.5, 2.0])


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
    res = sanc.minimize(rosen_torch, START, jac=jac, hessp=hessp, precond=FORMS[form], **options)
    changed = sanc.minimize(
        lambda y: rosen_torch(ROOT @ y),
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
    plain = sanc.minimize(rosen_torch, START, jac=jac, hessp=hessp, **options)
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


@pytest.mark.parametrize("form", ["diagonal", "matrix"])
def test_truncation_errors_of_differences_are_those_of_the_new_variables(form):
    """Each entry bounds the error of Lᵀ∇f, and with the identity the run is that without a preconditioner."""
    rng = np.random.default_rng(3)
    matrix = np.diag(rng.uniform(0.5, 2.0, 4)) if form == "diagonal" else rng.standard_normal((4, 4))
    matrix = matrix @ matrix.T + np.eye(4) * (form == "matrix")
    weights = 10.0 ** np.arange(4)
    f = lambda x: float(np.exp(x @ (weights * x) * 1e-3) + x.sum())
    oracle, *_ = build_oracle(f, np.ones(4), jac="2-point", hess=None, hessp=None, args=())
    lower = np.linalg.cholesky(matrix)
    singular = np.linalg.svd(lower, compute_uv=False)
    factor = Factor(torch.from_numpy(np.diag(lower) if form == "diagonal" else lower), singular[-1], singular[0])
    wrapped = PreconditionedOracle(oracle, factor)
    y = np.linalg.solve(lower, np.full(4, 0.3))
    x = lower @ y
    wrapped.gradient(y), oracle.gradient(x)
    exact = 2e-3 * np.exp(x @ (weights * x) * 1e-3) * weights * x + 1.0
    bounds = np.asarray(wrapped.truncation_error(y))
    assert np.all(np.abs(lower.T @ exact - np.asarray(wrapped.gradient(y)[1])) <= 3 * bounds + 1e-6)
    assert np.allclose(bounds, np.abs(lower).T @ np.asarray(oracle.truncation_error(wrapped.original(y))))


def test_a_saddle_is_left_in_the_norm_of_the_preconditioner():
    f = lambda x: (x[0] ** 2 - 1.0) ** 2 + x[1] ** 2
    res = sanc.minimize(f, torch.zeros(2).double(), precond=lambda v: v * torch.tensor([4.0, 0.25]).double())
    assert res.success and abs(float(res.x[0])) == pytest.approx(1.0) and res.certificate.second_order


def test_a_diagonal_of_any_range_is_accepted():
    scales = np.array([1.0, 1e-12, 1e-24, 1e-36])
    res = sanc.minimize(lambda x: 0.5 * float(((x / scales - 1.0) ** 2).sum()), np.zeros(4), precond=scales**2,
                        jac=lambda x: (x / scales - 1.0) / scales, hessp=lambda x, v: v / scales**2)  # fmt: skip
    np.testing.assert_allclose(res.x, scales, rtol=1e-12)


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
        sanc.minimize(rosen_torch, START, jac=jac, hessp=hessp, **change)


# ---------------------------------------------------------------------- least squares

T = np.linspace(0.0, 3.0, 30)
DATA = 2.0 * np.exp(-1.3 * T) + np.sin(0.7 * T) + 0.1 * np.cos(9.0 * T)


def residuals(x):
    library = torch if isinstance(x, torch.Tensor) else np
    t, data = (torch.from_numpy(T), torch.from_numpy(DATA)) if library is torch else (T, DATA)
    return x[0] * library.exp(-x[1] * t) + x[2] * library.sin(x[3] * t) - data


def jacobian(x):
    e, s = np.exp(-x[1] * T), np.sin(x[3] * T)
    return np.stack([e, -x[0] * T * e, s, x[2] * T * np.cos(x[3] * T)], axis=1)


FIT_START = np.array([0.3, 0.2, 0.5, 1.0])


@pytest.mark.parametrize("form", FORMS)
def test_fits_make_the_steps_of_a_change_of_variables(form):
    res = sanc.least_squares(residuals, FIT_START, jacobian, precond=FORMS[form])
    changed = sanc.least_squares(
        lambda y: residuals(ROOT @ y),
        np.linalg.solve(ROOT, FIT_START),
        lambda y: jacobian(ROOT @ y) @ ROOT,
        precond=np.ones(4),
    )
    assert res.success and np.allclose(res.x, ROOT @ changed.x, rtol=1e-7)
    for ours, theirs in zip(res.history[:6], changed.history[:6], strict=True):
        assert ours.branch == theirs.branch and np.isclose(ours.value, theirs.value, rtol=1e-8)
        assert np.isclose(ours.step_norm, theirs.step_norm, rtol=1e-6)
        assert np.isclose(ours.sigma, theirs.sigma, rtol=1e-5)
    theirs = scipy.optimize.least_squares(residuals, FIT_START, jacobian, x_scale="jac", xtol=1e-14, ftol=1e-14)
    assert np.isclose(res.cost, theirs.cost, rtol=1e-10)
    assert np.allclose(res.grad, res.jac.T @ res.fun) and np.allclose(res.jac, jacobian(res.x))


@pytest.mark.parametrize("precond", [M, SCALES**2], ids=["matrix", "diagonal"])
def test_the_first_step_of_a_fit_minimises_the_model_in_the_norm_of_the_preconditioner(precond):
    start = np.array([0.3, -1.0, 0.05, 3.0])
    res = sanc.least_squares(residuals, start, jacobian, precond=precond, max_iter=1)
    inverse = np.linalg.inv(precond if precond.ndim == 2 else np.diag(precond))
    s, j = res.x - start, jacobian(start)
    norm = np.sqrt(s @ inverse @ s)
    assert res.nit == 1 and np.isclose(res.history[0].step_norm, norm, rtol=1e-8)
    missing = -(j.T @ residuals(start) + j.T @ (j @ s))  # = μ M⁻¹s with μ = σ‖s‖
    expected = res.history[0].sigma * norm * inverse @ s
    assert np.linalg.norm(expected) > 1e-4 * np.linalg.norm(j.T @ residuals(start))
    assert np.allclose(missing, expected, rtol=1e-6, atol=1e-9 * np.linalg.norm(j.T @ residuals(start)))


@pytest.mark.parametrize("is_torch", [True, False])
def test_tolerance_and_certificate_of_a_fit_are_those_without_a_preconditioner(is_torch):
    start, jac = (torch.from_numpy(FIT_START), None) if is_torch else (FIT_START, jacobian)
    plain = sanc.least_squares(residuals, start, jac)
    product = (lambda v: torch.from_numpy(M) @ v) if is_torch else (lambda v: M @ v)
    res = sanc.least_squares(residuals, start, jac, precond=product)
    hessian = torch.func.hessian(lambda x: 0.5 * residuals(x).square().sum())(torch.as_tensor(res.x)).numpy()
    norms = np.linalg.norm(jacobian(np.asarray(res.x)), axis=0)
    scale = np.exp2(-np.round(np.log2(norms)))
    smallest = np.linalg.eigvalsh(hessian * np.outer(scale, scale))[0]
    assert res.success and res.certificate.second_order
    assert res.certificate.lambda_min == pytest.approx(smallest, abs=1e-9 + res.certificate.error_bound)
    assert res.certificate.lambda_min == pytest.approx(plain.certificate.lambda_min, rel=1e-5)
    assert res.certificate.grad_norm == pytest.approx(float(np.linalg.norm(scale * np.asarray(res.grad))), rel=1e-9)
    assert res.certificate.curvature_tolerance == pytest.approx(plain.certificate.curvature_tolerance, rel=1e-5)


def test_fits_leave_saddles_in_the_norm_of_the_preconditioner():
    fun = lambda x: torch.stack([x[0] ** 2 - 1.0, x[1] ** 2 + 1.0])
    res = sanc.least_squares(fun, torch.zeros(2).double(), precond=np.array([[4.0, 1.0], [1.0, 2.0]]))
    assert res.success and abs(float(res.x[0])) == pytest.approx(1.0, rel=1e-6)


def test_a_preconditioner_saves_products_of_a_matrix_free_fit():
    """The columns have equal norms, so that scaled variables do not help."""
    n = 320  # more than a dense model has
    differences = scipy.sparse.diags([np.ones(n), -np.ones(n - 1)], [0, -1], format="csr")
    fun = lambda x: differences @ x + 1e-4 * x**2 - 0.05
    jac = lambda x: differences + scipy.sparse.diags(2e-4 * x)
    inverse = np.linalg.inv((differences.T @ differences).toarray())
    plain = sanc.least_squares(fun, np.zeros(n), jac, certify=False, max_iter=8)
    res = sanc.least_squares(fun, np.zeros(n), jac, certify=False, precond=inverse)
    assert res.success and res.cost < 1e-20 and 5 * res.nhev < plain.nhev


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"precond": np.diag([1.0, -1.0, 1.0, 1.0])}, "precond is not positive definite, with an eigenvalue of -1"),
        ({"precond": np.eye(3)}, r"precond has shape \(3, 3\) for 4 variables"),
        ({"precond": np.ones(4), "bounds": (-9.0, 9.0)}, "precond cannot be used with bounds"),
    ],
)
def test_mistakes_in_preconditioners_of_fits_are_named(change, match):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=match):
        sanc.least_squares(residuals, FIT_START, jacobian, **change)


def test_parameters_of_a_network_have_a_diagonal():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).double()
    inputs, targets = torch.randn(20, 2).double(), torch.randn(20, 1).double()
    fun = NetworkResiduals(model, [(lambda u, x, y: u(x) - y[0], (inputs, targets), 20.0)])
    res = sanc.least_squares(fun, fun.start, precond=np.array([1.0, 2.0, 0.5]))
    matrix = torch.cat([inputs, torch.ones(20, 1).double()], 1)
    exact = torch.linalg.lstsq(matrix, targets).solution
    assert res.success and torch.allclose(torch.cat([res.x["weight"][0], res.x["bias"]]), exact[:, 0])
    with pytest.raises(ArgumentError, match="pass the diagonal"):
        sanc.least_squares(fun, fun.start, precond=np.eye(3))
