"""`least_squares` and `curve_fit` against SciPy, certified values of NIST, closed forms and dense matrices."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator, aslinearoperator

import sanc
from benchmarks.least_squares_problems import problems
from benchmarks.long_fits import ALL_FITS
from sanc.core.bounded.bounds import Box, FaceOracle
from sanc.core.dense import EigenSpace
from sanc.core.spectrum import cubic
from sanc.leastsquares import accelerated
from sanc.leastsquares.column_scales import ColumnScales
from sanc.leastsquares.losses import LOSSES, Loss
from sanc.leastsquares.oracle import ResidualOracle, WholeHessianOracle
from sanc.leastsquares.residuals import Residuals
from sanc.minimisation import Status

T = np.linspace(0.0, 2.0, 40)
TRUTH = np.array([2.0, 1.5, 0.3])
NOISE = 0.05 * np.random.default_rng(0).standard_normal(40)
START = np.array([1.0, 1.0, 0.0])


@functools.cache
def known_problems():
    """Return the problems of the benchmark by name; all their Jacobians are tested when the list is made."""
    return {problem.name: problem for problem in problems()}


def curve(t, a, b, c):
    exp = torch.exp if isinstance(b, torch.Tensor) else np.exp
    return a * exp(-b * (torch.from_numpy(t) if isinstance(b, torch.Tensor) else t)) + c


Y = curve(T, *TRUTH) + NOISE


def residuals(p):
    return curve(T, *p) - (torch.from_numpy(Y) if isinstance(p, torch.Tensor) else Y)


def jacobian(p):
    e = np.exp(-p[1] * T)
    return np.stack([e, -p[0] * T * e, np.ones_like(T)], axis=1)


REFERENCE = scipy.optimize.least_squares(residuals, START, jacobian, xtol=1e-15, ftol=1e-15, gtol=1e-15)


# ---------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    "jac",
    [
        jacobian, None, "2-point", "3-point", "cs", lambda p: scipy.sparse.csr_array(jacobian(p)),
        lambda p: aslinearoperator(jacobian(p)), lambda p: torch.from_numpy(jacobian(p)), "tensor",
    ],
)  # fmt: skip
def test_every_form_of_jacobian_finds_the_solution_of_scipy(jac):
    start, jac = (torch.tensor(START), None) if jac == "tensor" else (START, jac)
    res = sanc.least_squares(residuals, start, jac)
    assert res.success and res.status is Status.SECOND_ORDER
    assert np.allclose(np.asarray(res.x), REFERENCE.x, rtol=1e-6) and np.isclose(res.cost, REFERENCE.cost, rtol=1e-9)
    assert np.allclose(np.asarray(res.fun), REFERENCE.fun, atol=1e-6)
    assert np.allclose(np.asarray(res.jac), jacobian(np.asarray(res.x)), atol=1e-6)
    assert np.allclose(np.asarray(res.grad), np.asarray(res.jac).T @ np.asarray(res.fun), atol=1e-12)
    assert res.active_mask.tolist() == [0, 0, 0] and res.optimality == np.abs(np.asarray(res.grad)).max()
    assert isinstance(res.x, torch.Tensor) == isinstance(start, torch.Tensor)


def test_trees_shapes_arguments_and_float32():
    tree = {"a": torch.tensor([1.0], dtype=torch.float64), "b": torch.zeros(1, 1, dtype=torch.float64)}
    res = sanc.least_squares(
        lambda p, y: torch.stack([p["a"][0] - y, 10 * (p["b"][0, 0] - p["a"][0] ** 2)]), tree, args=(3.0,)
    )
    assert res.success and res.x["b"].shape == (1, 1) and np.isclose(float(res.x["b"]), 9.0)
    res = sanc.least_squares(lambda p, *, y: p - y, np.zeros((2, 2)), kwargs={"y": np.eye(2)})
    assert res.x.shape == (2, 2) and np.allclose(res.x, np.eye(2))
    res = sanc.least_squares(residuals, torch.tensor(START, dtype=torch.float32))
    assert res.x.dtype == torch.float32 and res.success and np.allclose(res.x.numpy(), REFERENCE.x, rtol=1e-3)


def test_large_problems_need_no_dense_jacobian():
    n = 400
    tensor = sanc.least_squares(lambda x: x + x**3 - 0.5 * torch.roll(x, -1) - 1, torch.zeros(n, dtype=torch.float64))
    assert tensor.success and isinstance(tensor.jac, LinearOperator) and float(tensor.fun.norm()) < 1e-7

    def banded(x):
        diagonals = [1.0 + 3.0 * x**2, np.full(n - 1, -0.5)]
        return scipy.sparse.diags_array(diagonals, offsets=[0, 1]).tocsr()

    fun = lambda x: x + x**3 - np.append(0.5 * x[1:], 0.0) - 1.0
    for jac in (banded, lambda x: aslinearoperator(banded(x))):
        res = sanc.least_squares(fun, np.zeros(n), jac)
        assert res.success and np.linalg.norm(res.fun) < 1e-7


# ---------------------------------------------------------------------- pieces against dense matrices


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_are_those_of_scipy(name):
    noisy = Y + np.where(np.arange(40) % 8 == 0, 3.0, 0.0)
    fun = lambda p: curve(T, *p) - noisy
    ours = sanc.least_squares(fun, REFERENCE.x, jacobian, loss=name, f_scale=0.1)
    theirs = scipy.optimize.least_squares(
        fun, REFERENCE.x, jacobian, loss=name, f_scale=0.1, xtol=1e-14, ftol=1e-14, gtol=1e-14
    )
    assert ours.success and np.isclose(ours.cost, theirs.cost, rtol=1e-7)
    assert np.allclose(ours.x, theirs.x, rtol=1e-3)


def test_a_loss_of_the_caller():
    cauchy = sanc.least_squares(residuals, START, jacobian, loss="cauchy", f_scale=0.1)
    log_loss = lambda z: np.stack([np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2])
    assert np.allclose(sanc.least_squares(residuals, START, jacobian, loss=log_loss, f_scale=0.1).x, cauchy.x)


@pytest.mark.parametrize("loss", ["linear", "cauchy"])
@pytest.mark.parametrize("is_torch", [True, False])
def test_products_with_the_whole_hessian(loss, is_torch):
    build = (lambda v: torch.from_numpy(v) if isinstance(v, np.ndarray) else v) if is_torch else np.array
    caller = Residuals(residuals, build, is_torch, None if is_torch else jacobian, ())
    x = np.array([1.3, 0.7, -0.2])
    oracle = ResidualOracle(caller, x, Loss(loss, 0.5), 1e-8)

    def cost(p):
        square = residuals(p).square()
        return 0.5 * (square if loss == "linear" else 0.25 * torch.log1p(square / 0.25)).sum()

    dense = torch.func.hessian(cost)(torch.from_numpy(x)).numpy()
    scales = ColumnScales(np.array([1.0, -2.0, 3.0]), x.dtype, is_uniform=False)
    oracle = oracle.in_variables(scales.variables())
    scale, z = oracle.scale, oracle.scaled(x)
    assert scale.tolist() == [0.5, 4.0, 0.125] and np.array_equal(oracle.unscaled(z), x)
    operator = WholeHessianOracle(oracle).hessian(z)
    products = np.stack([operator(column) for column in np.eye(3)])
    assert np.allclose(products, dense * np.outer(scale, scale), atol=1e-6 * np.abs(dense).max())
    model = np.stack([oracle.hessian(z)(column) for column in np.eye(3)])
    weights = np.ones(40) if loss == "linear" else np.maximum(Loss(loss, 0.5)(residuals(x)).weights, 0.0)
    scaled = jacobian(x) * scale
    assert np.allclose(model, scaled.T @ (weights[:, None] * scaled))


def test_the_second_order_term_is_used_where_residuals_are_large():
    problem = known_problems()["Brown-Dennis-1"]
    res = sanc.least_squares(problem.fun, problem.start, problem.jac)
    assert res.success and res.second_order and np.isclose(2 * res.cost, 85822.2016263563, rtol=1e-9)
    assert res.njev < 40  # SciPy's trf, without this term, takes 282 Jacobians from this start
    exact = known_problems()["Rosenbrock-1"]
    assert not sanc.least_squares(exact.fun, exact.start, exact.jac).second_order


def test_units_do_not_matter():
    problem, scale = known_problems()["Kowalik-Osborne-1"], np.exp2([20.0, -30.0, 5.0, 12.0])
    plain = sanc.least_squares(problem.fun, problem.start, problem.jac)
    scaled = sanc.least_squares(
        lambda x: 2.0**-40 * problem.fun(x / scale),
        problem.start * scale,
        lambda x: 2.0**-40 * problem.jac(x / scale) / scale,
    )
    assert plain.success and np.array_equal(scaled.x / scale, plain.x) and scaled.nfev == plain.nfev


def test_a_saddle_of_the_sum_of_squares_is_left():
    """J = 0 at the start, and the gradient with it; the second-order term has negative curvature there."""
    for start in (np.zeros(2), torch.zeros(2, dtype=torch.float64)):
        stack = torch.stack if isinstance(start, torch.Tensor) else np.stack
        jac = None if isinstance(start, torch.Tensor) else lambda x: np.diag([2 * x[0], 2 * x[1]])
        res = sanc.least_squares(lambda x: stack([x[0] ** 2 - 1, x[1] ** 2 + 1]), start, jac)
        assert res.success and np.isclose(abs(float(res.x[0])), 1.0) and np.isclose(res.cost, 0.5)


@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize("is_bounded", [True, False])
def test_the_certificate_has_the_eigenvalues_of_the_whole_hessian(n, is_bounded):
    """With up to ten variables it is that of the matrix; with more, that of a Krylov space."""
    weights = torch.linspace(0.5, 1.5, n, dtype=torch.float64)
    t = torch.linspace(-1.0, 1.0, 2 * n, dtype=torch.float64)[:, None]
    fun = lambda x: (torch.sin(weights * x * (1.0 + t)).sum(1) + t[:, 0] ** 2 - 0.7) / 3.0
    calls = []

    def jac(x):
        calls.append(x)
        return torch.func.jacrev(fun)(torch.from_numpy(x)).numpy()

    start = np.full(n, 0.1)
    bounds = (np.where(np.arange(n) == 1, 0.2, -5.0), np.full(n, 5.0)) if is_bounded else None
    res = sanc.least_squares(lambda x: fun(torch.from_numpy(x)).numpy(), np.maximum(start, 0.2), jac, bounds)
    hessian = torch.func.hessian(lambda x: 0.5 * fun(x).square().sum())(torch.from_numpy(res.x)).numpy()
    scale = np.exp2(-np.round(np.log2(np.linalg.norm(res.jac, axis=0))))
    free = np.ones(n, bool) if bounds is None else res.active_mask == 0
    smallest = np.linalg.eigvalsh((hessian * np.outer(scale, scale))[np.ix_(free, free)])[0]
    certificate = res.certificate
    assert res.success and abs(certificate.lambda_min - smallest) <= 1e-9 + certificate.error_bound
    if n == 3:
        assert certificate.confidence == 1.0 and certificate.error_bound < 1e-6
        assert len(calls) == res.njev + 2 * n + 2  # two Jacobians for each column, and for the error


def test_a_jacobian_that_is_not_one_is_named_at_the_solution():
    """The matrix is the Jacobian at the solution, but its derivative there is that of no function."""
    twisted = lambda p: jacobian(p) + np.outer(np.sin(T), (p - REFERENCE.x)[[1, 2, 0]] * [1.0, 0.0, 0.0])
    res = sanc.least_squares(residuals, REFERENCE.x, twisted)
    assert res.status is Status.INCONSISTENT and "symmetric" in res.message


# ---------------------------------------------------------------------- bounds


def test_bounds_hold_everywhere_and_agree_with_scipy():
    lower, upper = np.array([-np.inf, 0.0, 0.4]), np.array([1.7, 3.0, np.inf])

    def guarded(p):
        assert np.all((p.real >= lower) & (p.real <= upper))
        return residuals(p)

    theirs = scipy.optimize.least_squares(
        residuals, [1.0, 1.0, 0.5], jacobian, bounds=(lower, upper), xtol=1e-15, ftol=1e-15, gtol=1e-12
    )
    for jac in (jacobian, "2-point", "3-point"):
        for bounds in ((lower, upper), scipy.optimize.Bounds(lower, upper)):
            res = sanc.least_squares(guarded, [1.0, 1.0, 0.5], jac, bounds)
            assert res.success and np.isclose(res.cost, theirs.cost, rtol=1e-6)
            assert np.array_equal(res.active_mask, theirs.active_mask) and np.array_equal(res.active, res.active_mask)
            held = res.active_mask != 0
            assert np.allclose(res.multipliers, np.where(held, res.grad, 0.0)) and res.optimality < 1e-6
    with pytest.warns(scipy.optimize.OptimizeWarning, match="x0 is outside"):
        sanc.least_squares(residuals, START, jacobian, (lower, upper))
    assert sanc.least_squares(lambda x: x - 5.0, [1.0, 1.0], bounds=([0.0, 0.0], [2.0, 3.0])).x.tolist() == [2.0, 3.0]
    assert sanc.least_squares(lambda x: x - 5.0, torch.ones(2).double(), bounds=(None, 4.0)).x.tolist() == [4.0, 4.0]


# ---------------------------------------------------------------------- certified values


SLOWER = ["MGH09", "MGH10", "MGH17", "Thurber", "ENSO", "Nelson", "Lanczos1", "Lanczos3", "Misra1b", "Rat43"]
SLOWER += ["Chwirut1", "Gauss1", "Gauss2", "Gauss3", "Kirby2", "Hahn1", "Bennett5"]


@pytest.mark.parametrize(
    "fit", [pytest.param(fit, id=fit.name, marks=[pytest.mark.slow] * (fit.name in SLOWER)) for fit in ALL_FITS]
)
def test_fits_of_nist_from_the_near_start(fit):
    problem = known_problems()[f"{fit.name}-2"]
    res = sanc.least_squares(problem.fun, problem.start, problem.jac)
    assert res.success and np.isclose(2 * res.cost, fit.squares, rtol=1e-6, atol=1e-18)
    if fit.squares > 1e-20:
        assert np.allclose(res.x, fit.certified.numpy(), rtol={"Nelson": 2e-6, "Bennett5": 1e-3}.get(fit.name, 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("fit", ALL_FITS, ids=lambda fit: fit.name)
def test_fits_of_nist_from_the_far_start(fit):
    problem = known_problems()[f"{fit.name}-1"]
    res = sanc.least_squares(problem.fun, problem.start, problem.jac)
    assert res.success and np.isclose(2 * res.cost, fit.squares, rtol=1e-6, atol=1e-18)


def test_a_run_ends_where_the_residuals_are_orthogonal_to_the_range_of_the_jacobian():
    problem = known_problems()["DanWood-1"]
    res = sanc.least_squares(problem.fun, problem.start, problem.jac)
    explained = res.jac @ np.linalg.lstsq(res.jac, res.fun, rcond=None)[0]
    cosine = np.linalg.norm(explained) / np.linalg.norm(res.fun)
    norms = np.linalg.norm(res.jac, axis=0)
    assert 1e-8 < np.linalg.norm(res.grad / norms) / np.linalg.norm(res.fun) and cosine < 3e-7  # 30 tol
    assert res.success and res.certificate.stationary and res.nfev < 8
    exact = sanc.least_squares(problem.fun, problem.start, problem.jac, tol=1e-13)
    assert 0.0 <= res.cost / exact.cost - 1.0 < 1e-13 and exact.nfev > res.nfev


def valley(x):
    """Residuals with a curved narrow valley x₁ = x₀², along which the second one decreases slowly."""
    return np.array([1e3 * (x[1] - x[0] ** 2), x[0] - 5.0])


def valley_jacobian(x):
    return np.array([[-2e3 * x[0], 1e3], [1.0, 0.0]])


A_ROOT = np.random.default_rng(0).standard_normal((6, 6))
ROOTS = {  # residuals that vanish where variables are 0, and whether the root is a simple one
    "powers": (lambda x: x**2, np.ones(2), False),
    "high powers": (lambda x: x**4, np.ones(3), False),
    "odd powers": (lambda x: x**3, np.full(1, 0.5), False),
    "linear and powers": (lambda x: np.concatenate([A_ROOT @ x, x**2]), np.ones(6), True),
    "product": (lambda x: np.array([x[0] * x[1], x[0]]), np.ones(2), True),
    "another origin": (lambda x: (x - 1.0) ** 2, np.zeros(3), False),
}


@pytest.mark.parametrize("scale", [1e-60, 1e10])
@pytest.mark.parametrize("options", [{}, {"bounds": (-2.0, 2.0)}, {"precond": True}], ids=["free", "bounds", "precond"])
@pytest.mark.parametrize("name", ROOTS)
def test_a_run_ends_at_a_root_at_which_variables_are_zero(name, options, scale):
    """Whatever the units of the residuals. Roots of order k converge linearly, by a factor of 1 − 1/k a step."""
    fun, x0, is_simple = ROOTS[name]
    options = {"precond": np.eye(len(x0))} if "precond" in options else options
    res = sanc.least_squares(lambda x: fun(x) * scale, x0, **options)
    assert res.success, res.message
    assert np.linalg.norm(res.fun) <= 1e-15 * np.linalg.norm(fun(x0)) * scale and res.nit <= (25 if is_simple else 100)
    assert np.isfinite(res.certificate.gradient_tolerance) and res.optimality <= 1e-15 * scale**2


def saturated(seed):
    """Return saturated residuals of variables with scales from 1e-6 to 1e6, their Jacobian, and a start."""
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(1, 7)), int(rng.integers(1, 12))
    A, b = rng.normal(size=(m, n)), rng.normal(size=m)
    scales, x0 = 10.0 ** rng.integers(-6, 7, size=n), rng.normal(size=n) * (10.0 ** rng.integers(-2, 2))
    derivative = lambda x: 1.0 - np.tanh(A @ (x / scales)) ** 2
    return lambda x: np.tanh(A @ (x / scales)) - b, lambda x: derivative(x)[:, None] * A / scales, x0


@pytest.mark.parametrize("seed", [*range(12), 33, 40, 96, 122])
def test_a_right_jacobian_of_badly_scaled_variables_is_not_called_inconsistent(seed):
    """Along the gradient they change over a far shorter length than the variables that have no effect."""
    fun, jac, x0 = saturated(seed)
    res = sanc.least_squares(fun, x0, jac)
    assert res.success, res.message
    # At a root the residuals are rounding errors: they are differences of numbers of size 1.
    residual_norm = 1e-6 * np.linalg.norm(res.fun) + np.finfo(float).eps * np.sqrt(len(res.fun))
    assert np.linalg.norm(res.grad * res.x) <= residual_norm * np.linalg.norm(res.jac * res.x)


@pytest.mark.parametrize("seed", [74, 112])
def test_a_differenced_jacobian_is_not_called_inconsistent(seed):
    fun, jac, x0 = saturated(seed)
    differenced, exact = sanc.least_squares(fun, x0), sanc.least_squares(fun, x0, jac)
    assert differenced.status is not sanc.Status.INCONSISTENT and differenced.cost <= exact.cost * (1.0 + 1e-6)


def test_residuals_that_decrease_by_many_orders_from_a_far_start_are_not_taken_for_a_root():
    """The first residuals are e^40 times those of the solution. Steps first change the amplitude, by less and less."""
    x = np.linspace(0.0, 1.0, 20)
    y = np.exp(2.0 * x) + 1e-3 * np.cos(40.0 * x)
    near, far = (sanc.least_squares(lambda p: np.exp(p[0] * x) * p[1] - y, [start, 1.0]) for start in (1.0, 40.0))
    assert far.success and far.cost == pytest.approx(near.cost, rel=1e-9)
    np.testing.assert_allclose(far.x, near.x, rtol=1e-6)


def test_steps_in_a_long_curved_valley_are_corrected(monkeypatch):
    points = []
    start = np.array([-5.0, 25.0])
    res = sanc.least_squares(lambda x: points.append(x) or valley(x), start, valley_jacobian)
    monkeypatch.setattr(accelerated, "_MIN_CURVED_STEPS", np.inf)
    plain = sanc.least_squares(valley, start, valley_jacobian)
    assert res.success and plain.success and np.allclose(res.x, [5.0, 25.0])
    assert res.nfev == len(points) - 2  # without the values of the certificate
    assert res.njev < 0.8 * plain.njev


@pytest.mark.parametrize("upper", [np.inf, 3.0])
def test_steps_in_a_long_curved_valley_are_corrected_within_bounds(monkeypatch, upper):
    """On the face of a held variable, and up to a bound that ends the valley; no point is outside."""
    points = []

    def fun(x):
        points.append(x)
        return np.append(valley(x[:2]), x[2])

    def jac(x):
        return np.block([[valley_jacobian(x[:2]), np.zeros((2, 1))], [np.zeros((1, 2)), np.ones((1, 1))]])

    given = (np.array([-5.0, 25.0, 1.0]), jac, ([-np.inf, -np.inf, 1.0], [upper, np.inf, np.inf]))
    res = sanc.least_squares(fun, *given)
    monkeypatch.setattr(accelerated, "_MIN_CURVED_STEPS", np.inf)
    plain = sanc.least_squares(fun, *given)
    end = min(upper, 5.0)
    assert res.success and plain.success and np.allclose(res.x, [end, end**2, 1.0])
    assert res.njev < 0.8 * plain.njev
    assert all(x[0] <= upper and x[2] >= 1.0 for x in points)


def test_corrected_steps_between_wide_bounds_are_those_without_bounds():
    start, paths = np.array([-5.0, 25.0]), ([], [])
    for bounds, path in zip((None, (-1e3, 1e3)), paths, strict=True):
        sanc.least_squares(
            valley, start, valley_jacobian, bounds, callback=lambda x, path=path: path.append(x.tolist())
        )
    assert paths[0] == paths[1] and len(paths[0]) > accelerated._MIN_CURVED_STEPS


def test_the_correction_is_that_of_the_second_derivatives():
    """With the multiplier μ, a = −½(JᵀJ + μI)⁻¹Jᵀ r''(s, s); the residuals are quadratic, so that r'' is exact."""
    caller = Residuals(valley, np.array, False, valley_jacobian, ())
    oracle, x = ResidualOracle(caller, np.array([-5.0, 24.0]), Loss("linear", 1.0), 1e-8), np.array([-5.0, 24.0])
    found, basis = oracle.with_jacobian(x), oracle.eigenbasis(x)
    krylov = EigenSpace(basis.values, basis.rows, basis.projections)
    spectrum = cubic.Spectrum(basis.values, np.eye(2))
    step = cubic.solve(spectrum, basis.projections, 1e3)
    subspace = accelerated.AcceleratedSubspace(
        None,
        krylov,
        oracle.hessian(x),
        spectrum,
        1e3,
        None,
        curvature=accelerated.ResidualCurvature(oracle, found, oracle),
    )
    s, j = step.u @ basis.rows, valley_jacobian(x)
    a = np.linalg.solve(j.T @ j + step.multiplier * np.eye(2), -0.5 * j.T @ [-2e3 * s[0] ** 2, 0.0])
    assert np.allclose(subspace.trial_point(x, step), x + s + a, rtol=1e-9) and np.linalg.norm(a) > 0.005 * step.norm
    calls = caller.meter.nfev
    shorter = cubic.solve(spectrum, basis.projections, 1.1e3)
    subspace.trial_point(x, shorter)
    assert caller.meter.nfev == calls  # a step along the last one needs no evaluation
    sides = x + s - a, x + s + 0.5 * a  # the box ends between x + s and x + s + a
    box = Box(*(torch.from_numpy(pick(*sides)) for pick in (np.minimum, np.maximum)))
    face = FaceOracle(oracle, box, x, None)
    bounded = replace(subspace, curvature=accelerated.ResidualCurvature(oracle, found, face))
    assert np.array_equal(bounded.trial_point(x, step), s + x)


# ---------------------------------------------------------------------- curve_fit


@pytest.mark.parametrize("sigma", [None, 0.1 + 0.05 * T, np.diag(0.1 + 0.05 * T) + 0.001])
@pytest.mark.parametrize("absolute_sigma", [True, False])
def test_curve_fit_returns_the_covariance_of_scipy(sigma, absolute_sigma):
    given = {"sigma": sigma, "absolute_sigma": absolute_sigma}
    popt, pcov = sanc.curve_fit(curve, T, Y, **given)
    theirs, covariance = scipy.optimize.curve_fit(curve, T, Y, **given, ftol=1e-14, xtol=1e-14)
    assert np.allclose(popt, theirs, rtol=1e-5) and np.allclose(pcov, covariance, rtol=1e-4)
    tensor, tensor_cov = sanc.curve_fit(curve, T, torch.from_numpy(Y), **given)
    assert isinstance(tensor, torch.Tensor) and np.allclose(tensor.numpy(), theirs, rtol=1e-5)
    assert np.allclose(tensor_cov.numpy(), covariance, rtol=1e-4)


def test_curve_fit_accepts_lists_of_numbers():
    popt, _ = sanc.curve_fit(lambda x, a: a * x**2, [1, 2, 3], [2, 8, 18])
    assert popt == pytest.approx([2.0])


def test_curve_fit_with_jacobian_bounds_and_full_output():
    given = {"jac": lambda t, *p: jacobian(p), "bounds": ([0.0, 0.0, 0.4], [3.0, 3.0, 2.0])}
    popt, pcov, result, message, status = sanc.curve_fit(curve, T, Y, **given, full_output=True)
    theirs, covariance = scipy.optimize.curve_fit(curve, T, Y, **given)
    assert np.allclose(popt, theirs, rtol=1e-4) and np.allclose(pcov, covariance, rtol=1e-2)
    assert message == result.message and status == 0 and result.active_mask.tolist() == [0, 0, -1]


def test_curve_fit_warns_without_a_covariance_and_raises_without_a_fit():
    with pytest.warns(scipy.optimize.OptimizeWarning, match="covariance"):
        _, pcov = sanc.curve_fit(lambda x, a, b: a + b + 0 * x, T, np.ones(40))
    assert np.isinf(pcov).all()
    with pytest.raises(sanc.NotConvergedError, match="p0"):
        sanc.curve_fit(curve, T, Y, p0=START, max_iter=1)


# ---------------------------------------------------------------------- endings and mistakes


def test_endings_limits_and_callbacks():
    seen = []
    res = sanc.least_squares(residuals, START, jacobian, callback=lambda x: seen.append(x) or len(seen) == 2)
    assert res.status is Status.CALLBACK and len(seen) == 2 and np.array_equal(seen[-1], res.x)
    assert sanc.least_squares(residuals, START, jacobian, max_nfev=2).status is Status.CALL_LIMIT
    assert sanc.least_squares(residuals, START, jacobian, max_iter=1).status is Status.ITERATION_LIMIT
    res = sanc.least_squares(lambda x: x + np.nan, START)
    assert res.status is Status.NOT_FINITE and not res.success
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrong = sanc.least_squares(residuals, START, lambda p: -jacobian(p))
    assert wrong.status is Status.INCONSISTENT


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fun": 3}, "fun = 3"),
        ({"jac": "4-point"}, "jac = '4-point'.*3-point"),
        ({"jac": lambda p: np.ones((2, 2))}, r"jac returned shape \(2, 2\).*\(40, 3\)"),
        ({"jac": lambda p: "text"}, "jac returned 'text'"),
        ({"fun": lambda p: None}, "fun returned None"),
        ({"fun": lambda p: []}, "no residual"),
        ({"loss": "hubber"}, "loss = 'hubber'.*huber"),
        ({"loss": lambda z: z}, "loss returned shape"),
        ({"f_scale": 0.0}, "f_scale = 0.0"),
        ({"bounds": [(0, 1), (0, 1), (0, 1)]}, r"bounds = .*\(lower, upper\)"),
        ({"bounds": ([0.0, 0.0], 1.0)}, "bounds has 2 entries"),
        ({"bounds": (2.0, 1.0)}, r"bounds\[0\] = \(2, 1\)"),
        ({"x0": [np.nan, 1.0, 1.0]}, "x0 holds NaN"),
        ({"x0": torch.ones(3), "jac": "cs"}, 'jac = "cs"'),
        ({"x0": torch.ones(3), "fun": lambda p: np.exp(p.detach().numpy())}, "cannot be differentiated"),
        ({"tol": 2.0}, "tol = 2.0"),
        ({"certify": "yes"}, "certify = 'yes'"),
        ({"callback": 1}, "callback = 1"),
        ({"callback": lambda: 0}, r"callback = <function.*called as callback\(x\)"),
        ({"max_nfev": 0}, "max_nfev = 0"),
        ({"maxiter": 3}, "maxiter = 3 is not an argument of least_squares: pass max_iter"),
        ({"x_scale": "jac"}, "x_scale = 'jac' is not an argument of least_squares: leave it out"),
    ],
)
def test_mistakes_are_named(change, match):
    given = {"fun": residuals, "x0": START} | change
    with pytest.raises(sanc.SancError, match=match):
        sanc.least_squares(**given)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"f": 1}, "f = 1"),
        ({"ydata": Y * np.nan}, "ydata holds NaN"),
        ({"ydata": Y[1:]}, "f returned 40 values for 39 observations: pass xdata and ydata of the same length"),
        ({"ydata": torch.ones(3, dtype=torch.float64)}, "f returned 40 values for 3 observations"),
        ({"sigma": np.ones(3)}, "sigma has 3 numbers"),
        ({"sigma": -np.ones(40)}, "positive standard deviations"),
        ({"sigma": np.ones((40, 40)) - 2 * np.eye(40)}, "not positive definite"),
        ({"f": lambda x, *p: p[0] * x}, "p0 = None"),
        ({"chunk_size": 3}, "chunk_size = 3 is for rows of ydata: leave it out"),
        ({"restarts": -7.5}, "restarts = -7.5 is for rows of ydata: leave it out"),
        ({"p0": [1.0]}, r"p0 = \[1.0\] has 1 parameters, but f cannot be called with xdata and 1 more arguments \("),
        ({"maxfev": 100}, "maxfev = 100 is not an argument of curve_fit: pass max_nfev"),
        ({"args": (1,)}, r"args = \(1,\) is not an argument of curve_fit"),
        ({"los": "huber"}, "did you mean 'loss'"),
    ],
)
def test_mistakes_in_fits_are_named(change, match):
    with pytest.raises(sanc.SancError, match=match):
        sanc.curve_fit(**({"f": curve, "xdata": T, "ydata": Y} | change))
