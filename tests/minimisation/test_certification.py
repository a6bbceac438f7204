"""Certificates against dense eigenvalues, over many random starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sanc
from sanc.problems import Logistic


def quadratic(values, rng):
    Q, _ = np.linalg.qr(rng.standard_normal((len(values), len(values))))
    A = torch.from_numpy(Q @ np.diag(values) @ Q.T)
    return lambda x: 0.5 * x @ ((A + A.T) / 2) @ x


def test_small_problems_are_exact(rng):
    values = np.array([-0.3, 0.0, 1.0, 5.0, 5.0])
    cert = sanc.certificate(quadratic(values, rng), np.zeros(5))
    assert cert.lambda_min == pytest.approx(-0.3, abs=1e-12)
    assert cert.error_bound < 1e-12 and cert.confidence == 1.0
    assert cert.stationary and cert.saddle and not cert.second_order
    assert "negative curvature was found" in str(cert)


def test_a_minimum_is_certified(rng):
    cert = sanc.certificate(quadratic(np.linspace(0.1, 3, 40), rng), np.zeros(40))
    assert cert.second_order and not cert.saddle
    assert cert.lower_bound <= 0.1 + 1e-12 <= cert.lambda_min + 1e-11
    assert "a second-order point" in str(cert)


def test_a_point_with_a_gradient_is_not_stationary(rng):
    cert = sanc.certificate(quadratic(np.linspace(0.1, 3, 10), rng), np.ones(10))
    assert not cert.stationary and not cert.second_order and "not a stationary point" in str(cert)
    assert cert.grad_norm > 0.1


def test_the_bound_holds_with_the_stated_probability():
    """Spectra with a hidden small negative eigenvalue, few products, many random starts."""
    values = np.concatenate([[-0.05], np.linspace(0.5, 1.5, 399)])
    A = torch.from_numpy(np.diag(values))
    held = 0
    starts = 150
    for seed in range(starts):
        cert = sanc.certificate(
            lambda x: 0.5 * (torch.diag(A) * x * x).sum(), np.zeros(400), max_products=18, confidence=0.9, seed=seed,
            tol=1e-9,
        )  # fmt: skip
        assert cert.lambda_min >= -0.05 - 1e-10  # a Ritz value is never below the spectrum
        held += cert.lower_bound <= -0.05 + 1e-10
    assert held >= 0.9 * starts
    assert cert.products <= 18 and np.isfinite(cert.error_bound)


def hidden(n, outlying, bulk, lowest, dtype):
    """½ Σ d x² of a few clusters, one of which is a single negative eigenvalue."""
    d = torch.full((n,), bulk, dtype=dtype)
    d[: len(outlying)] = torch.tensor(outlying, dtype=dtype)
    d[-1] = lowest
    return lambda x: 0.5 * (d * x * x).sum()


@pytest.mark.parametrize(
    ("n", "outlying", "bulk", "lowest", "dtype"),
    [
        (2000, [1000.0] * 3, 0.0, -0.02, torch.float64),
        (2000, [1000.0] * 3, 1.0, -0.02, torch.float32),
        (1000, [3e4], 0.0, -0.05, torch.float32),
        (500, [1e5, 1e3, 10.0], 0.1, -0.015, torch.float64),
        (300, [], 1.0, -0.02, torch.float32),
        (300, [], 1.0, -0.02, torch.float64),
    ],
)
def test_early_breakdown_certifies_no_saddle(n, outlying, bulk, lowest, dtype):
    """Early breakdown hides the component along λ_min, amplified by 1/overlap; the confidence holds nevertheless."""
    f, x = hidden(n, outlying, bulk, lowest, dtype), torch.zeros(n, dtype=dtype)
    certs = [sanc.certificate(f, x, tol=1e-2, confidence=0.95, seed=seed) for seed in range(100)]
    assert sum(cert.second_order for cert in certs) <= 5
    assert sum(cert.lower_bound > lowest for cert in certs) <= 11  # three standard deviations
    assert all(cert.confidence == 0.95 for cert in certs)
    if dtype == torch.float64:
        assert sum(cert.saddle for cert in certs) >= 95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_minimum_of_few_clusters_is_certified(dtype):
    cert = sanc.certificate(hidden(2000, [10.0] * 3, 1.0, 0.5, dtype), torch.zeros(2000, dtype=dtype), tol=1e-2)
    assert cert.second_order and cert.lower_bound <= 0.5 and cert.products < 20


def test_the_error_of_differences_is_estimated_along_every_vector():
    """A quartic term hides negative curvature from a difference along its axis, but not along other vectors."""
    false = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        n, q = int(rng.integers(2, 40)), 10.0 ** rng.uniform(10, 13)
        values = np.append(rng.uniform(0.5, 2.0, n - 1), -0.05)
        cert = sanc.certificate(
            lambda x, q=q, d=values: 0.5 * d @ x**2 + q / 4 * x[-1] ** 4,
            np.zeros(n),
            jac=lambda x, q=q, d=values: d * x + q * np.append(np.zeros(len(x) - 1), x[-1] ** 3),
            tol=1e-2,
            seed=seed,
        )
        false += cert.second_order
    assert false == 0


def test_products_that_are_not_symmetric_certify_nothing():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 30))
        A = rng.standard_normal((n, n)) + 8 * np.eye(n)  # its symmetric part is positive definite
        given = {"jac": lambda x, A=A: A @ x, "hessp": lambda x, v, A=A: A @ v}
        cert = sanc.certificate(lambda x, A=A: 0.5 * x @ A @ x, np.zeros(n), seed=seed, **given)
        assert not cert.second_order and not cert.saddle and "not symmetric" in str(cert)
        S = A + A.T
        given = {"jac": lambda x, S=S: S @ x, "hessp": lambda x, v, S=S: S @ v}
        cert = sanc.certificate(lambda x, S=S: 0.5 * x @ S @ x, np.zeros(n), seed=seed, **given)
        assert cert.second_order == (np.linalg.eigvalsh(S)[0] > 0)
        assert cert.asymmetry < 1e-10


def test_more_products_tighten_the_bound(rng):
    f = quadratic(np.linspace(1, 10, 200), rng)
    bounds = [sanc.certificate(f, np.zeros(200), max_products=k, tol=1e-12).error_bound for k in (20, 30, 200)]
    assert bounds[0] > bounds[1] > bounds[2]


def test_too_few_products_are_undecided():
    weights = torch.linspace(0.0, 100.0, 500, dtype=torch.float64)
    cert = sanc.certificate(lambda x: (weights * x**2).sum(), np.zeros(500), max_products=2)
    assert not cert.second_order and not cert.saddle and cert.error_bound > 200.0  # wider than the spectrum
    assert "undecided: allow more Hessian products" in str(cert)


def test_residual_bounds_the_distance_to_an_eigenvalue(rng):
    values = np.sort(rng.standard_normal(80))
    cert = sanc.certificate(quadratic(values, rng), np.zeros(80), max_products=12, tol=1e3)
    assert np.min(np.abs(values - cert.lambda_min)) <= cert.residual + 1e-12


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_roundoff_is_not_negative_curvature(scale):
    """A convex quadratic with a null space, in float32: λ_min is 0, and negative computed values are roundoff."""
    torch.manual_seed(0)
    A = torch.randn(40, 60) * scale
    f = lambda x: 0.5 * (A @ x).square().sum()
    cert = sanc.certificate(f, torch.zeros(60))
    assert not cert.saddle and cert.ritz_error > 0
    res = sanc.minimize(f, torch.zeros(60))
    assert res.success
    if scale == 1e4:
        assert "roundoff exceeds the tolerance" in str(cert)


def test_products_by_differences_widen_the_bound():
    def jac(x):
        return -300 * np.sin(300 * x)

    exact = -(300.0**2)
    cert = sanc.certificate(lambda x: float(np.cos(300 * x).sum()), np.zeros(2), jac=jac)
    assert abs(cert.lambda_min - exact) > 1e-3  # the difference has a large error …
    assert cert.lower_bound <= exact <= cert.lambda_min + cert.ritz_error  # … and the bound includes it
    torch_cert = sanc.certificate(lambda x: torch.cos(300 * x).sum(), np.zeros(2), hvp="finite-difference")
    assert torch_cert.lower_bound <= exact <= torch_cert.lambda_min + torch_cert.ritz_error


def test_every_kind_of_objective(rng):
    X = rng.standard_normal((60, 5))
    problem = Logistic(X, rng.integers(0, 2, 60), penalty="nonconvex", strength=0.5)
    w = rng.standard_normal(5)
    XT, yT = torch.from_numpy(X), torch.from_numpy(problem.y)

    def loss(w):
        penalty = 0.5 * (w**2 / (1 + w**2)).sum()
        return torch.nn.functional.binary_cross_entropy_with_logits(XT @ w, yT) + penalty

    H = torch.autograd.functional.hessian(loss, torch.from_numpy(w)).numpy()
    reference = np.linalg.eigvalsh(H)[0]

    def jac(v):
        return problem.value_and_gradient(v)[1]

    for cert in (
        sanc.certificate(problem, w),
        sanc.certificate(loss, w),
        sanc.certificate(loss, torch.from_numpy(w)),
        sanc.certificate(problem.value, w, jac=jac, hessp=lambda x, v: problem.hessian(x)(v)),
        sanc.certificate(problem.value, w, jac=jac, hess=lambda x: H),
    ):
        assert cert.lambda_min == pytest.approx(reference, abs=1e-10)
        assert cert.grad_norm == pytest.approx(np.linalg.norm(jac(w)), rel=1e-9)
    differenced = sanc.certificate(problem.value, w, jac=jac)
    assert differenced.lambda_min == pytest.approx(reference, abs=1e-5)


def test_curvature_that_is_not_finite_certifies_nothing():
    cert = sanc.certificate(lambda x: (x**2).sum(), np.ones(3), jac=lambda x: 2 * x, hessp=lambda x, v: v * np.nan)
    assert not cert.second_order and not cert.saddle and np.isnan(cert.lambda_min)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"tol": 0.0}, "tol = 0.0"),
        ({"tol": None}, "tol = None"),
        ({"confidence": 1.0}, r"confidence = 1\.0"),
        ({"max_products": 0}, "max_products = 0"),
        ({"max_products": "a"}, "max_products = 'a'"),
        ({"curvature_tol": -1.0}, "curvature_tol = -1"),
        ({"eps": 1e-3}, "eps = 0.001 is not an argument of certificate: pass tol"),
        ({"eps_curvature": 1e-3}, "eps_curvature = 0.001 is not an argument of certificate: pass curvature_tol"),
        ({"seed": -1}, "seed = -1"),
        ({"x": [np.nan]}, "x holds NaN"),
    ],
)
def test_errors_name_the_argument_and_its_value(given, word):
    with pytest.raises(sanc.ArgumentError, match=word):
        sanc.certificate(**({"fun": lambda x: (x**2).sum(), "x": np.ones(2)} | given))


@pytest.mark.parametrize(
    ("former", "name"),
    [
        ("eps_gradient", "gradient_tolerance"),
        ("eps_curvature", "curvature_tolerance"),
        ("rounding", "ritz_error"),
    ],
)
def test_the_error_for_a_former_attribute_has_its_name(former, name):
    cert = sanc.certificate(lambda x: (x**2).sum(), np.ones(2), jac=lambda x: 2 * x)
    assert getattr(cert, name) > 0.0
    with pytest.raises(AttributeError, match=f"use {name}"):
        getattr(cert, former)


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_differences_below_working_precision_certify_nothing(scheme):
    """Both differences at a saddle with f = 1e9 are exactly 0, by rounding; λ_min is −2."""
    cert = sanc.certificate(lambda x: 1e9 + x[0] ** 2 - x[1] ** 2, np.zeros(2), jac=scheme)
    assert not cert.second_order and cert.lower_bound <= -2.0
    near = sanc.certificate(lambda x: 1.0 + x[0] ** 2 - x[1] ** 2, np.zeros(2), jac=scheme, tol=1e-3)
    assert near.saddle and near.lambda_min == pytest.approx(-2.0, abs=1e-2)


@pytest.mark.parametrize("offset", [1e5, 1e6, 1e7])
def test_bounds_of_differences_hold_beside_a_large_constant(offset, rng):
    for _ in range(40):
        matrix = rng.standard_normal((3, 3))
        matrix = matrix + matrix.T
        cert = sanc.certificate(lambda x, matrix=matrix: offset + 0.5 * x @ matrix @ x, np.zeros(3), jac="2-point")
        assert cert.lower_bound <= np.linalg.eigvalsh(matrix)[0] + 1e-12


def test_a_product_that_is_not_finite_is_reported():
    assert "not finite" in str(sanc.certificate(lambda x: (x.abs() ** 1.5).sum(), torch.zeros(2).double()))
