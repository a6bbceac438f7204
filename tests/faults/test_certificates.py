"""Rate of false certificates over families of spectra, compared with the stated confidence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import sanc

pytestmark = pytest.mark.slow

CONFIDENCE, STARTS = 0.9, 50


def clustered(rng, n):
    centres = 10.0 ** rng.uniform(-3, 4, rng.integers(1, 5))
    values = rng.choice(centres, n)
    values[-1] = -(10.0 ** rng.uniform(-3, 0))
    return values


def spread(rng, n):
    return np.append(np.geomspace(1e-3, 10.0 ** rng.uniform(0, 3), n - 1), -(10.0 ** rng.uniform(-3, 0)))


def gapless(rng, n):
    return np.linspace(-(10.0 ** rng.uniform(-3, -1)), 1.0, n)


def semicircle(rng, n):
    return np.sort(np.sqrt(rng.beta(1.5, 1.5, n))) - 10.0 ** rng.uniform(-2, 0)


FAMILIES = {"clustered": clustered, "spread": spread, "gapless": gapless, "semicircle": semicircle}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_rate_of_false_certificates(family, dtype, tally):
    """A spectrum fails if its rate exceeds 1 − confidence by more than three standard deviations."""
    spectra, failures = 8, []
    allowed = STARTS * (1 - CONFIDENCE) + 3 * math.sqrt(STARTS * CONFIDENCE * (1 - CONFIDENCE))
    for number in range(spectra):
        rng = np.random.default_rng((number, list(FAMILIES).index(family)))
        n = int(rng.integers(120, 500))
        values = FAMILIES[family](rng, n)
        d, lowest = torch.tensor(values, dtype=dtype), float(values.min())
        false = outside = 0
        for seed in range(STARTS):
            most = int(rng.integers(3, 60))
            cert = sanc.certificate(
                lambda x, d=d: 0.5 * (d * x * x).sum(), torch.zeros(n, dtype=dtype), tol=0.5 * abs(lowest),
                confidence=CONFIDENCE, max_products=most, seed=seed,
            )  # fmt: skip
            false += cert.second_order and lowest < 0
            outside += cert.lower_bound > lowest
            if cert.lambda_min + cert.ritz_error < lowest * (1 + 1e-5) or (cert.saddle and lowest >= 0):
                failures.append((number, seed, "a Ritz value below the spectrum"))
        if false > allowed or outside > allowed:
            failures.append((number, false, outside))
    tally(f"certificates, {family} spectra", spectra * STARTS, failures)


def test_dense_hessians_with_a_full_krylov_space(tally):
    """Up to a hundred dimensions the certificate is exact."""
    cases, failures = 400, []
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 30))
        A = rng.standard_normal((n, n)) * 10.0 ** rng.uniform(-3, 3)
        A = A + A.T + rng.uniform(0, 4) * np.eye(n) * np.abs(A).max()
        lowest = float(np.linalg.eigvalsh(A)[0])
        eps = 10.0 ** rng.uniform(-6, 0)
        given = {"jac": lambda x, A=A: A @ x, "hessp": lambda x, v, A=A: A @ v}
        cert = sanc.certificate(lambda x, A=A: 0.5 * x @ A @ x, np.zeros(n), tol=eps, seed=seed, **given)
        near = abs(lowest + eps) < 1e-10 * np.abs(A).max()
        if not near and (cert.second_order != (lowest >= -eps) or cert.saddle != (lowest < -eps)):
            failures.append((seed, lowest, eps, str(cert)))
    tally("certificates, dense", cases, failures)


def test_products_by_differences(tally):
    """A quartic term of any size along the negative direction, or along all axes."""
    cases, failures = 0, []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        n, q = int(rng.integers(2, 40)), 10.0 ** rng.uniform(0, 16)
        d = np.append(rng.uniform(0.1, 2.0, n - 1), -(10.0 ** rng.uniform(-2, 0)))
        w = np.ones(n) if seed % 2 else np.append(np.zeros(n - 1), 1.0)
        cert = sanc.certificate(
            lambda x, d=d, q=q, w=w: 0.5 * d @ x**2 + q / 4 * w @ x**4, np.zeros(n),
            jac=lambda x, d=d, q=q, w=w: d * x + q * w * x**3, tol=0.5 * abs(d[-1]), seed=seed,
        )  # fmt: skip
        cases += 1
        if cert.second_order or cert.lower_bound > d[-1]:
            failures.append((seed, q, str(cert)))
    tally("certificates, differences", cases, failures)


def test_operators_that_are_not_symmetric(tally):
    cases, failures = 300, []
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 60))
        A = rng.standard_normal((n, n))
        A = A + A.T + 10.0 ** rng.uniform(-5, 0) * rng.standard_normal((n, n)) + 20 * np.eye(n)
        given = {"jac": lambda x, A=A: A @ x, "hessp": lambda x, v, A=A: A @ v}
        cert = sanc.certificate(lambda x, A=A: 0.5 * x @ A @ x, np.zeros(n), seed=seed, **given)
        if cert.second_order or "not symmetric" not in str(cert):
            failures.append((seed, n, str(cert)))
    tally("certificates, not symmetric", cases, failures)


def random_function(rng):
    """Draw a smooth function that is bounded below, with many saddles: ridges, waves and a quartic bowl."""
    n = int(rng.integers(2, 9))
    A = torch.from_numpy(rng.standard_normal((int(rng.integers(1, 6)), n)))
    B, c = torch.from_numpy(rng.standard_normal((4, n))), torch.from_numpy(rng.standard_normal(4))
    bowl, wave = 10.0 ** rng.uniform(-3, 0), 10.0 ** rng.uniform(-1, 1)
    S = torch.from_numpy(rng.standard_normal((n, n)))
    S = S + S.T

    def f(x):
        ridges = (torch.tanh(A @ x) ** 2).sum() + wave * torch.cos(B @ x + c).sum()
        return ridges + 0.5 * x @ (S @ x) * 0.3 + bowl * (x**4).sum()

    return f, rng.standard_normal(n) * 10.0 ** rng.uniform(-2, 0.5)


@pytest.mark.parametrize("method", ["sanc", "scr", "arc", "cr", "crm", "ncd"])
@pytest.mark.parametrize("preset", sanc.PRESETS)
def test_claims_of_success_on_random_functions(method, preset, tally):
    """Check every claim with a dense Hessian in float64, and that methods with a ratio test did not increase f."""
    cases, failures = 0, []
    for seed in range(15):
        f, x0 = random_function(np.random.default_rng(seed))
        res = sanc.minimize(f, x0, method=method, preset=preset, max_iter=100, tol=1e-6, seed=seed)
        cases += 1
        x = torch.from_numpy(np.asarray(res.x))
        if not torch.isfinite(x).all():
            failures.append((seed, "not finite"))
            continue
        g = torch.autograd.functional.jacobian(f, x)
        lowest = float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(f, x))[0])
        if res.success and float(g.norm()) > 1.01e-6:
            failures.append((seed, "not stationary", float(g.norm())))
        if res.status is sanc.Status.SECOND_ORDER and lowest < -1.01e-3:
            failures.append((seed, "not of second order", lowest))
        tested = preset == "robust" and method in ("sanc", "scr", "arc")
        if tested and float(f(x)) > float(f(torch.from_numpy(x0))) + 1e-9:
            failures.append((seed, "f above its value at the start"))
    tally("claims of success", cases, failures)


def test_products_of_low_precision(tally):
    """Rounded to fewer digits, or by forward differences with any step h, at the minimum of a convex quartic.

    An error of the products that shows neither asymmetry nor nonlinearity cannot be seen: 10 h is allowed.
    """
    cases, failures = 0, []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 150))
        B, b = rng.standard_normal((n, n)), rng.standard_normal(n)
        H, h = B @ B.T / n + 0.1 * np.eye(n), 10.0 ** rng.uniform(-8, -5)

        def gradient(x, H=H, b=b):
            return H @ x - b + x**3

        def single(x, v, H=H):
            return (H.astype(np.float32) @ v.astype(np.float32)).astype(float) + 3 * x**2 * v

        def forward(x, v, gradient=gradient, h=h):
            return (gradient(x + h * v) - gradient(x)) / h

        result = sanc.minimize(
            lambda x, H=H, b=b: 0.5 * x @ H @ x - b @ x + 0.25 * (x**4).sum(), np.zeros(n), jac=gradient,
            hessp=forward if seed % 2 else single, seed=seed,
        )  # fmt: skip
        cases += 1
        lowest = np.linalg.eigvalsh(H + np.diag(3 * result.x**2))[0]
        if result.status is not sanc.Status.SECOND_ORDER or result.certificate.lower_bound > lowest + 10 * h:
            failures.append((seed, n, h, result.message, str(result.certificate)))
    tally("certificates, low precision", cases, failures)


def test_saddles_below_the_roundoff_of_f(tally):
    """Starts so close to a saddle or maximum that the first steps change f + c by less than its roundoff."""
    cases, failures = 0, []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        dtype = torch.float32 if seed % 2 else torch.float64
        n, eps = int(rng.integers(2, 300)), torch.finfo(dtype).eps
        d = torch.tensor(np.append(rng.uniform(0.1, 2.0, n - 1), -(10.0 ** rng.uniform(-1, 1))), dtype=dtype)
        constant = 10.0 ** rng.uniform(0, 4)
        distance = 0.1 * math.sqrt(eps * constant) * 10.0 ** rng.uniform(-3, 0)
        x0 = torch.tensor(distance * rng.standard_normal(n), dtype=dtype)
        result = sanc.minimize(lambda x, d=d, c=constant: 0.5 * (d * x**2).sum() + 0.25 * x[-1] ** 4 + c, x0, seed=seed)
        cases += 1
        if not abs(float(result.x[-1])) > 0.9 * math.sqrt(-float(d[-1])):
            failures.append((seed, n, dtype, constant, result.message))
    tally("saddles below roundoff", cases, failures)


def test_stalls_at_the_roundoff_of_the_gradient(tally):
    """Sums of squares of any size and type succeed; large constants cause no false success."""
    cases, failures = 0, []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        dtype = torch.float32 if seed % 2 else torch.float64
        m, n = int(10.0 ** rng.uniform(1, 4)), int(rng.integers(1, 9))
        A = rng.standard_normal((m, n))
        y = 10.0 ** rng.uniform(0, 4 if seed % 2 else 12) * rng.standard_normal(m)
        typed, target = torch.tensor(A, dtype=dtype), torch.tensor(y, dtype=dtype)
        result = sanc.minimize(lambda x, A=typed, y=target: (A @ x - y).square().sum(), torch.zeros(n, dtype=dtype))
        expected = np.linalg.lstsq(A, y)[0]
        cases += 1
        close = np.linalg.norm(result.x.double().numpy() - expected) <= 1e3 * torch.finfo(dtype).eps * np.linalg.norm(y)
        if not (result.success and close):
            failures.append((seed, m, n, dtype, result.message))
        constant, x0 = 10.0 ** rng.uniform(0, 30), torch.tensor(1.5 * rng.standard_normal(n + 1), dtype=dtype)

        def valley(x, c=constant):
            return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum() + c

        result = sanc.minimize(valley, x0, max_iter=200)
        cases += 1
        norm = float(torch.autograd.functional.jacobian(valley, result.x.double()).norm())
        if result.success and norm > max(1.01e-8, 1e5 * torch.finfo(dtype).eps):
            failures.append((seed, constant, dtype, "false success", norm, result.certificate.gradient_tolerance))
    tally("stalls at the roundoff of the gradient", cases, failures)


def test_f_of_any_size(tally):
    """Random functions times powers of ten up to the limits of the type, with a tolerance in proportion."""
    cases, failures = 0, []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        f, x0 = random_function(rng)
        s = 10.0 ** rng.uniform(-290, 290)
        result = sanc.minimize(lambda x, f=f, s=s: s * f(x), x0, tol=1e-6 * s, curvature_tol=1e-3 * s, seed=seed)
        cases += 1
        x = torch.from_numpy(np.asarray(result.x))
        norm = float(torch.autograd.functional.jacobian(f, x).norm())
        lowest = float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(f, x))[0])
        if not result.success or norm > 1.01e-6 or lowest < -1.01e-3:
            failures.append((seed, s, result.message, norm, lowest))
    tally("f of any size", cases, failures)


def test_f_of_any_size_with_differences(tally):
    """Random quadratic forms and Rosenbrock functions times powers of ten, whose minimum is 0 at ones."""
    cases, failures = 0, []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n, s = int(rng.integers(2, 5)), 10.0 ** rng.uniform(0, 20)
        A, kappa = np.linalg.qr(rng.standard_normal((n, n)))[0], 10.0 ** rng.uniform(0, 3)
        B = A * np.geomspace(1.0, kappa, n) @ A.T

        def quadratic(x, B=B, s=s):
            return s * ((x - 1) @ B @ (x - 1))

        def valley(x, s=s):
            return s * (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

        for f in (quadratic, valley):
            for scheme, distance in (("2-point", 1e-4), ("3-point", 1e-5)):
                result = sanc.minimize(f, np.zeros(n), jac=scheme, seed=seed)
                cases += 1
                if not result.success or np.abs(result.x - 1).max() > distance:
                    failures.append((seed, f.__name__, n, s, scheme, result.message, result.x))
    tally("f of any size, differences", cases, failures)
