"""Functions that are not what they should be: no hang, no wrong success, and a message that names the cause."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
from sanc import Status
from sanc.core.runs import consistency
from sanc.core.runs.consistency import DefectKind
from sanc.core.runs.noise_estimates import estimate_gradient_rounding
from sanc.core.spectrum.product_errors import measure_nonlinearity
from sanc.functions.oracle import CallableOracle

X0 = np.array([-1.2, 1.0, 0.5, 2.0])


@pytest.mark.parametrize("hessp", [None, rosen_hess_prod])
@pytest.mark.parametrize("factor", [-1.0, 2.0, 0.5, 10.0, 0.1])
def test_a_wrong_gradient_is_said_in_the_first_iterations(factor, hessp):
    result = sanc.minimize(rosen, X0, jac=lambda x: factor * rosen_der(x), hessp=hessp)
    assert result.status is Status.INCONSISTENT and not result.success and result.nit <= 5
    said = "sign of the gradient is wrong" if factor < 0 else f"{1 / factor:.3g} times as fast"
    assert said in result.message


def test_a_right_gradient_is_consistent():
    """Steps of these first iterations do not have the predicted decrease."""
    steep = sanc.minimize(lambda x: torch.exp(x.square().sum()), torch.full((3,), 2.0, dtype=torch.float64))
    assert steep.success
    rough = sanc.minimize(lambda x: (torch.sin(5 * x) + 0.1 * x * x).sum(), torch.full((2,), 9.0, dtype=torch.float64))
    assert rough.success


def test_derivative_ratio_against_the_closed_form():
    for factor in (1.0, 3.0, -0.25):
        oracle = CallableOracle(rosen, X0, jac=lambda x, factor=factor: factor * rosen_der(x))
        ratio, error = consistency.differenced_derivative_ratio(oracle, X0, 1.0)
        assert ratio == pytest.approx(1.0 / factor, rel=1e-3) and error < 0.02 / abs(factor)


@pytest.mark.parametrize("size", [1e-6, 1e-3])
def test_noise_ends_the_run_and_is_named(size):
    rng = np.random.default_rng(0)
    result = sanc.minimize(lambda x: rosen(x) + size * rng.standard_normal(), X0, jac=rosen_der, hessp=rosen_hess_prod)
    assert result.nfev < 2000
    if not result.success:
        assert "noisy" in result.message
    else:
        assert np.linalg.norm(rosen_der(result.x)) <= 1e-8


def test_noise_is_measured():
    rng = np.random.default_rng(1)
    noisy = CallableOracle(lambda x: rosen(x) + 1e-6 * rng.standard_normal(), X0, jac=rosen_der)
    defect = consistency.find_noise(noisy, X0, 1.0)
    assert defect.kind is DefectKind.NOISE
    assert 2e-7 < float(defect.sentence.split("±")[1].split()[0]) < 5e-6
    assert consistency.find_noise(CallableOracle(rosen, X0, jac=rosen_der), X0, 1.0) is None


@pytest.mark.parametrize("skew", [np.triu(np.full((4, 4), 1e3), 1), 300 * np.random.default_rng(1).normal(size=(4, 4))])
def test_an_asymmetric_product_is_named(skew):
    result = sanc.minimize(rosen, X0, jac=rosen_der, hessp=lambda x, v: rosen_hess_prod(x, v) + skew @ v)
    assert result.status is Status.INCONSISTENT and "not symmetric" in result.message and result.nit <= 51
    exact = CallableOracle(rosen, X0, jac=rosen_der, hessp=rosen_hess_prod)
    differenced = CallableOracle(rosen, X0, jac=rosen_der)
    assert consistency.find_asymmetry(exact, X0) is consistency.find_asymmetry(differenced, X0) is None


def test_a_jump_is_no_hang():
    result = sanc.minimize(lambda x: rosen(x) + 10.0 * (x[0] > 0.3), X0, jac=rosen_der, hessp=rosen_hess_prod)
    assert result.nfev < 1000
    assert not result.success or np.linalg.norm(rosen_der(result.x)) <= 1e-8


@pytest.mark.parametrize("method", ["sanc", "arc"])
@pytest.mark.parametrize(
    "fun",
    [lambda x: (x**3).sum(), lambda x: -(x**2).sum(), lambda x: -torch.exp(-x).sum(), lambda x: (2 * x).sum()],
    ids=["cubic", "concave", "exponential", "linear"],
)
def test_unbounded_below_is_an_ending_of_its_own(fun, method):
    result = sanc.minimize(fun, np.array([-1.0]), method=method)
    assert result.status is Status.UNBOUNDED and not result.success and "unbounded below" in result.message
    assert np.isfinite(result.x).all() and math.isfinite(result.fun) and result.fun < -1e20


def test_a_low_minimum_is_not_called_unbounded():
    result = sanc.minimize(lambda x: 1e12 * ((x - 1e3) ** 2).sum() - 1e30, torch.zeros(2, dtype=torch.float64), tol=1.0)
    assert result.success


def test_a_step_to_where_the_gradient_is_not_finite_is_taken_back():
    """f is finite on x ≤ 1, its gradient only below: the minimum at 0.5 is found all the same."""

    def jac(x):
        return 2 * (x - 0.5) if (x < 1).all() else np.full_like(x, np.nan)

    x0 = np.array([-4.0, -3.0])
    result = sanc.minimize(lambda x: float(((x - 0.5) ** 2).sum()), x0, jac=jac, hessp=lambda x, v: 0.4 * v)
    assert result.success and result.x == pytest.approx([0.5, 0.5])


def test_where_no_gradient_is_left_the_status_says_so():
    def fun(x):
        return float(np.sqrt(max(x[0] - 1.0, 0.0)) + (x[0] - 1.0) ** 2)

    def jac(x):
        with np.errstate(all="ignore"):
            return 0.5 / np.sqrt(x - 1.0) + 2.0 * (x - 1.0)

    def hessp(x, v):
        return (2.0 - 0.25 * (x - 1.0) ** -1.5) * v

    result = sanc.minimize(fun, np.array([4.0]), jac=jac, hessp=hessp)
    assert result.status is Status.NO_GRADIENT and not result.success
    assert np.isfinite(result.jac).all() and result.x[0] > 1.0


@pytest.mark.parametrize("call", range(1, 12))
def test_one_absurd_value_does_not_harm_the_run(call):
    calls = 0

    def fun(x):
        nonlocal calls
        calls += 1
        return -1e308 if calls == call else rosen(x)

    result = sanc.minimize(fun, X0, jac=rosen_der, hessp=rosen_hess_prod)
    assert result.success and result.nit < 60 and np.linalg.norm(rosen_der(result.x)) <= 1e-8


def test_a_minimum_that_asymmetric_products_lead_to_is_none_that_is_certified():
    """The steps arrive, since ∇f is right; the certificate sees that the products are not those of a Hessian."""
    H = np.eye(6) + 0.3 * np.triu(np.ones((6, 6)), 1)
    result = sanc.minimize(
        lambda x: 0.5 * x @ H @ x, np.ones(6), jac=lambda x: 0.5 * (H + H.T) @ x, hessp=lambda x, v: H @ v
    )
    assert result.status is Status.INCONSISTENT and not result.success
    assert "not symmetric" in result.message and "hessp" in result.message


def quartic(seed):
    """Return f, ∇f and H of a strictly convex quartic with a random symmetric part."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([3, 10, 50]))
    B, b = rng.standard_normal((n, n)), rng.standard_normal(n)
    H = B @ B.T / n + 0.1 * np.eye(n)
    return n, H, lambda x: 0.5 * x @ H @ x - b @ x + 0.25 * (x**4).sum(), lambda x: H @ x - b + x**3


def in_single_precision(H, g):
    single = np.float32
    return lambda x, v: H.astype(single) @ v.astype(single) + single(3) * x.astype(single) ** 2 * v.astype(single)


def by_forward_differences(H, g):
    return lambda x, v: (g(x + 1e-6 * v) - g(x)) / 1e-6


@pytest.mark.parametrize("products", [in_single_precision, by_forward_differences])
@pytest.mark.parametrize("seed", range(4))
def test_inaccurate_products_widen_the_bound_and_contradict_nothing(products, seed):
    n, H, f, g = quartic(seed)
    result = sanc.minimize(f, np.zeros(n), jac=g, hessp=products(H, g))
    lowest = np.linalg.eigvalsh(H + np.diag(3 * result.x**2))[0]
    assert result.status is Status.SECOND_ORDER and np.linalg.norm(g(result.x)) <= 1e-8
    assert result.certificate.lower_bound <= lowest <= result.certificate.lambda_min + result.certificate.ritz_error


def test_inaccurate_products_of_a_wrong_hessian_are_detected():
    n, H, f, g = quartic(1)
    skew = 1e-3 * np.triu(np.ones((n, n)), 1)
    result = sanc.minimize(f, np.zeros(n), jac=g, hessp=in_single_precision(H + skew, g))
    assert result.status is Status.INCONSISTENT and "not symmetric" in result.message


def test_nonlinearity_against_the_closed_form():
    """Products with a matrix are linear to roundoff; a constant vector that is added is not."""
    oracle = CallableOracle(rosen, X0, jac=rosen_der, hessp=rosen_hess_prod)
    A = np.random.default_rng(0).standard_normal((4, 4))
    assert measure_nonlinearity(lambda v: A @ v, oracle.space) < 1e-14
    shift = np.array([3.0, 0.0, 4.0, 0.0])
    largest = measure_nonlinearity(lambda v: A @ v + shift, oracle.space)  # ‖shift‖ |1 − 2/‖u + v‖|
    drawn = [[np.random.default_rng((0, k, j)).standard_normal(4) for j in range(2)] for k in range(3)]
    sums = [np.linalg.norm(u / np.linalg.norm(u) + v / np.linalg.norm(v)) for u, v in drawn]
    assert largest == pytest.approx(max(5.0 * abs(1 - 2 / s) for s in sums))


def test_rounding_of_a_gradient_against_exact_arithmetic():
    """A constant in f does not raise it, and for sums of squares it bounds the error that longdouble shows."""
    rng = np.random.default_rng(0)
    for size in (1.0, 1e6, 1e10):
        A, y, x = rng.standard_normal((50, 5)), size * rng.standard_normal(50), size * rng.standard_normal(5)
        given = {"jac": lambda x, A=A, y=y: 2 * A.T @ (A @ x - y), "hessp": lambda x, v, A=A: 2 * A.T @ (A @ v)}
        wide = A.astype(np.longdouble)
        error = np.linalg.norm((given["jac"](x) - 2 * wide.T @ (wide @ x - y)).astype(float))
        for constant in (0.0, 1e40):
            oracle = CallableOracle(lambda x, A=A, y=y, c=constant: float(((A @ x - y) ** 2).sum()) + c, x, **given)
            assert error < estimate_gradient_rounding(oracle, x, 1.0) < 1e3 * error


@pytest.mark.parametrize("n", [4, 30])
@pytest.mark.parametrize("factor", [1.0, -1.0, 0.2, 30.0])
def test_a_wrong_product_is_found_by_differences_of_the_gradient(factor, n):
    x = np.linspace(-1.2, 1.0, n)
    oracle = CallableOracle(rosen, x, jac=rosen_der, hessp=lambda x, v: factor * rosen_hess_prod(x, v))
    defect = consistency.find_wrong_product(oracle, x, 1.0)
    assert (defect is None) == (factor == 1.0)
    if factor != 1.0:
        assert defect.kind is DefectKind.PRODUCT and "inconsistent with the gradient" in defect.sentence
    if factor > 1.0:
        ours, differences = (
            float(defect.sentence.split(words)[1].split()[0].strip(",:")) for words in ("norm is", "jac have")
        )
        assert ours / differences == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_differences_suit_variables_of_different_magnitudes(factor):
    """A step of 1e-6 of the larger variable is a hundred times the smaller one."""
    x, t = np.array([1e3, 1e-5]), np.linspace(1.0, 1e6, 20)

    def residuals(x):
        return x[0] * x[1] * t / (1.0 + x[1] * t) - 900.0

    def jacobian(x):
        return np.stack([x[1] * t / (1.0 + x[1] * t), x[0] * t / (1.0 + x[1] * t) ** 2], 1)

    def hessp(x, v):
        J, r, d = jacobian(x), residuals(x), 1.0 + x[1] * t
        mixed, second = r @ (t / d**2), r @ (-2.0 * x[0] * t**2 / d**3)
        return factor * (J.T @ (J @ v) + np.array([mixed * v[1], mixed * v[0] + second * v[1]]))

    oracle = CallableOracle(
        lambda x: 0.5 * residuals(x) @ residuals(x), x, jac=lambda x: jacobian(x).T @ residuals(x), hessp=hessp
    )
    assert (consistency.find_wrong_product(oracle, x, 1.0) is None) == (factor == 1.0)


def test_a_product_within_roundoff_or_of_a_rough_gradient_is_no_contradiction():
    rng = np.random.default_rng(3)
    rough = CallableOracle(rosen, X0, jac=lambda x: rosen_der(x) + rng.standard_normal(4), hessp=rosen_hess_prod)
    assert consistency.find_wrong_product(rough, X0, 1.0) is None
    single = CallableOracle(rosen, X0, jac=rosen_der, hessp=lambda x, v: rosen_hess_prod(x, v.astype(np.float32)))
    assert consistency.find_wrong_product(single, X0, 1.0) is None


@pytest.mark.parametrize("max_iter", [120, 99])
def test_a_long_run_with_a_wrong_hessian_names_it(max_iter):
    """A Hessian 1000 times too large makes steps of a descent method."""
    x = np.array([-1.2, 1.0, 0.5])
    made = sanc.minimize(
        rosen, x, jac=rosen_der, hessp=lambda x, v: 1e3 * rosen_hess_prod(x, v) + 1e6 * v, max_iter=max_iter
    )
    assert made.status is Status.ITERATION_LIMIT and made.nit == max_iter
    assert ("check hess or hessp" in made.message) == (max_iter >= 100)
    right = sanc.minimize(rosen, x, jac=rosen_der, hessp=rosen_hess_prod)
    assert right.success and right.njev <= right.nfev
