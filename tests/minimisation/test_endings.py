"""How runs of `minimize` end: limits, convergence, roundoff, saddles, and functions that are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
from sanc import Branch, Status
from sanc.core.record import Note
from sanc.problems import Logistic


def test_limits(problem):
    w0 = np.ones(6)
    by_iterations = sanc.minimize(problem, w0, batch_size=20, max_iter=7)
    assert by_iterations.status is Status.ITERATION_LIMIT and by_iterations.nit == 7
    by_calls = sanc.minimize(problem, w0, batch_size=20, preset="paper", max_calls=1000)
    assert by_calls.status is Status.CALL_LIMIT
    assert by_calls.history[-2].calls.paper_calls < 1000 <= by_calls.calls.paper_calls
    by_time = sanc.minimize(problem, w0, batch_size=20, max_time=0.05, max_iter=10**9)
    assert by_time.status is Status.TIME_LIMIT
    for res in (by_iterations, by_calls, by_time):
        assert not res.success and res.message.endswith(".") and len(res.message.split()) > 5
        assert res.fun == pytest.approx(problem.value(res.x))  # on all rows, whatever the samples were
    assert sanc.minimize(problem, w0, max_iter=0).nit == 0


def test_no_limit_on_iterations():
    res = sanc.minimize(lambda x: (x**2).sum(), np.ones(2), max_iter=None)
    assert res.success


def test_certificates_use_the_remaining_time(monkeypatch):
    """Every product takes one second of a simulated clock."""
    seconds = 0.0

    def hessp(x, v):
        nonlocal seconds
        seconds += 1.0
        return weights * v

    monkeypatch.setattr("time.perf_counter", lambda: seconds)
    weights = np.linspace(0.0, 100.0, 500)
    given = {"jac": lambda x: weights * x, "hessp": hessp, "tol": 1e-6}
    res = sanc.minimize(lambda x: 0.5 * weights @ x**2, np.zeros(500), max_time=5.5, **given)
    assert res.certificate.products == 6 and res.status is sanc.Status.TIME_LIMIT and not res.success
    seconds = 0.0
    res = sanc.minimize(lambda x: 0.5 * weights @ x**2, np.ones(500), max_time=0.5, **given)
    assert res.certificate.products == 1 and res.status is sanc.Status.TIME_LIMIT
    seconds = 0.0
    res = sanc.minimize(lambda x: 0.5 * weights @ x**2, np.zeros(500), **given)
    assert res.success and res.certificate.products > 6


def test_not_finite_at_the_start_is_an_ending():
    for f in (lambda x: torch.log(x).sum(), lambda x: (x * float("nan")).sum()):
        res = sanc.minimize(f, torch.tensor([-1.0, 1.0]))
        assert res.status is Status.NOT_FINITE and not res.success and res.nit == 0
        assert torch.equal(res.x, torch.tensor([-1.0, 1.0]))


def test_a_function_is_minimised_inside_its_domain():
    """A log barrier: f is NaN at trial points outside the domain, which must be rejected."""

    def f(x):
        return x.sum() - torch.log(x).sum() + torch.log(2 - x[0]) * -0.1

    res = sanc.minimize(f, torch.tensor([1.9, 1e-3], dtype=torch.float64), sigma0=1e-6)
    assert res.success and float(res.x[1]) == pytest.approx(1.0, abs=1e-6)


def test_sgd_reports_that_it_stopped_at_a_saddle():
    res = sanc.minimize(lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4, torch.zeros(2).double(), method="sgd")
    assert res.status is Status.FIRST_ORDER and not res.success
    assert res.certificate.saddle and not res.certificate.second_order


def test_the_paper_ends_if_the_step_is_zero(problem):
    """With samples: g = 0 and s = 0 exactly."""

    class Flat(Logistic):
        def value_and_gradient(self, w):
            return self.value(w), np.zeros(6)

        def hessian(self, w):
            return lambda v: v * 1.0

    flat = Flat(problem.X, problem.y, strength=0.05)
    res = sanc.minimize(flat, np.ones(6), batch_size=10, preset="paper", certify=False)
    assert res.status is Status.STAGNATED is Status.AT_REST and res.nit == 1  # the name in 0.1


def test_a_run_ends_if_roundoff_prevents_the_tolerance():
    """The message explains that the gradient cannot reach the tolerance in this precision."""
    A, b = torch.randn(9, 3), 1e4 * torch.randn(9)
    res = sanc.minimize(lambda x: ((A @ x - b) ** 2).sum(), torch.zeros(3), tol=1e-9)
    assert res.status is Status.STALLED and not res.success and res.nit < 200
    assert torch.allclose(res.x, torch.linalg.lstsq(A, b).solution, rtol=1e-3)


@pytest.mark.parametrize("level", [1.0, 0.0])  # near f = 0 decreases stay above roundoff
@pytest.mark.parametrize(("tol", "ending"), [(0.021, Status.UNCERTIFIED), (1e-3, Status.STALLED)])
def test_a_step_along_a_valley_is_made_if_one_across_it_vanishes_in_roundoff(tol, ending, level):
    """One rounding error of x changes the gradient by 0.06: 0.0205 cannot be lowered, the other component can."""
    least, H = np.array([1 / 3, 0.0]), np.diag([1e15, 1.0])
    linear = np.array([0.0205, 0.0])

    def fun(x):
        d = x - least
        return level + 0.5 * d @ (H @ d) + linear @ d

    res = sanc.minimize(
        fun, np.array([1 / 3, 0.005]), jac=lambda x: H @ (x - least) + linear, hessp=lambda x, v: H @ v, tol=tol
    )
    assert res.status is ending and res.nit < 20 and abs(res.x[1]) < 1e-3
    assert sum(record.branch is Branch.STAYED for record in res.history) <= 10  # a stall is ten of them


@pytest.mark.parametrize("method", ["sanc", "arc"])
@pytest.mark.parametrize("sigma0", [1e-60, 1e20, 1e40, 1e200])
def test_an_extreme_first_sigma_costs_a_few_iterations(method, sigma0):
    """A step below the working precision of x, from a large σ, does not end the run as stalled."""
    given = {"jac": rosen_der, "hessp": rosen_hess_prod, "method": method}
    res = sanc.minimize(rosen, np.array([-1.2, 1.0]), sigma0=sigma0, **given)
    assert res.status is Status.SECOND_ORDER and res.nit < 60
    np.testing.assert_allclose(res.x, 1.0, atol=1e-6)


def test_a_gradient_of_nan_on_the_way_is_not_the_cause_of_the_ending():
    """The step to it is undone and the next one differs; the run ends because of roundoff."""
    least, gap, ys = 1 / 3, [], []

    def fun(x):
        d = x[0] - least
        return 1.0 + 0.5e15 * d * d + 0.0205 * d + np.logaddexp(x[1], -x[1])

    def jac(x):
        missing = any(abs(x[1] - y) < 1e-3 * abs(y) for y in gap)
        return np.full(2, np.nan) if missing else np.array([1e15 * (x[0] - least) + 0.0205, np.tanh(x[1])])

    def run():
        return sanc.minimize(
            fun, np.array([least, 0.9]), jac=jac, hessp=lambda x, v: np.array([1e15 * v[0], v[1] / np.cosh(x[1]) ** 2]),
            tol=1e-3, callback=lambda x: ys.append(x[1]),
        )  # fmt: skip

    run()
    gap.append(next(y for y in ys if 0 < abs(y) < 0.5))
    res = run()
    assert any(record.note == Note.GRADIENT_NOT_FINITE for record in res.history)
    assert res.status is Status.STALLED and abs(res.x[1]) < 1e-3


def test_sigma_falls_further_with_an_exact_objective_than_with_samples():
    """On a quartic, whose curvature decreases, σ falls by its largest factor."""
    weights = torch.linspace(1.0, 9.0, 5, dtype=torch.float64)
    x = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    exact = sanc.minimize(lambda x: weights @ x**4, x.detach(), sigma0=1e-3, max_iter=2).history
    opt, samples = sanc.SANC([x], sigma0=1e-3, minibatch=None), []
    for _ in range(2):
        opt.step(lambda: weights @ x**4)
        samples.append(opt.record)
    falls = [after.sigma / before.sigma for before, after in (exact, samples)]
    assert falls == pytest.approx([1e-6, 1e-3])


def test_too_few_products_leave_a_point_uncertified():
    n = 300
    weights = torch.logspace(-3, 3, n, dtype=torch.float64)
    res = sanc.minimize(lambda x: (weights * x**2).sum(), torch.ones(n).double(), max_products=3)
    assert res.status is Status.UNCERTIFIED and res.success
    assert not res.certificate.second_order and not res.certificate.saddle and "undecided" in str(res.certificate)


def test_without_certificate_few_products_test_for_negative_curvature(rng, wide_problem):
    problem = wide_problem(rng, 1e-3)
    whole, short = (sanc.minimize(problem, np.ones(60), certify=certify) for certify in (True, False))
    assert whole.status is Status.SECOND_ORDER and whole.certificate.products > 30
    assert short.status is Status.UNCERTIFIED and short.success and not short.certificate.second_order
    assert short.certificate.products == max(10, short.nhev // 10) < whole.certificate.products
    assert np.array_equal(whole.x, short.x) and whole.nhev == short.nhev
    fewer = sanc.minimize(problem, np.ones(60), certify=False, max_products=4)
    assert fewer.certificate.products == 4


@pytest.mark.parametrize("d", [3, 50, 400])
def test_without_certificate_saddles_are_escaped(d):
    """On the stable manifold of a saddle no gradient has a component along its negative curvature."""
    scale = torch.linspace(0.5, 2.0, d, dtype=torch.float64)

    def fun(x):
        return 0.5 * (scale[1:] * x[1:] ** 2).sum() - 0.5 * x[0] ** 2 + 0.25 * x[0] ** 4

    for start in (0.0, 1.0):
        x0 = torch.full((d,), start, dtype=torch.float64)
        x0[0] = 0.0
        res = sanc.minimize(fun, x0, certify=False)
        assert res.success and float(res.fun) == pytest.approx(-0.25) and abs(float(res.x[0])) == pytest.approx(1.0)


@pytest.mark.parametrize(("scheme", "offset"), [("2-point", 1e10), ("2-point", 1e8), ("3-point", 1e11)])
def test_a_differenced_gradient_below_the_roundoff_of_values_is_no_success(scheme, offset):
    res = sanc.minimize(lambda x: offset + (x[0] ** 2 - 1) ** 2 + x[1] ** 2, [0.3, 0.4], jac=scheme)
    assert (
        res.status is Status.STALLED
        and "the error of f alone causes" in res.message
        and "subtract a constant" in res.message
    )


@pytest.mark.parametrize("at", [[3.0, 2.0], [1e3, -4.0]])
def test_a_gradient_of_zeros_that_is_inconsistent_with_f_is_no_minimum(at):
    res = sanc.minimize(rosen, at, jac=np.zeros_like)
    assert res.status is Status.INCONSISTENT and res.nit == 0 and "inconsistent with f" in res.message
    for fun in (lambda x: float(np.sum(x**3)), lambda x: float(np.sum(x**4)) + 1e6, lambda x: 7.0):
        assert sanc.minimize(fun, np.zeros(2), jac=np.zeros_like).status is not Status.INCONSISTENT


@pytest.mark.parametrize("start", [[0.0, 0.0], [1e-10, 0.0]])
def test_a_start_at_the_saddle_of_a_small_function_is_escaped(start):
    """λ_min is −4e-20, and the tolerance on the curvature is relative to the size of f."""

    def fun(x):
        return 1e-20 * ((x[0] ** 2 - 1) ** 2 + x[0] * x[1] + x[1] ** 2)

    res = sanc.minimize(fun, torch.tensor(start, dtype=torch.float64), tol=1e-28)
    assert res.success and res.fun == pytest.approx(-2.656e-21, rel=1e-3, abs=0)


def brown_and_dennis(x):
    t = np.arange(1, 21) / 5
    return float(np.sum(((x[0] + t * x[1] - np.exp(t)) ** 2 + (x[2] + x[3] * np.sin(t) - np.cos(t)) ** 2) ** 2))


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
@pytest.mark.parametrize(("fun", "x0", "value"), [
    (brown_and_dennis, [25.0, 5, -5, -1], 85822.2016),
    (lambda x: 1e5 + float(np.sum((x - np.arange(4)) ** 2)), np.zeros(4), 1e5),
])  # fmt: skip
def test_differences_of_large_values_reach_the_tolerance_of_roundoff(fun, x0, value, scheme):
    res = sanc.minimize(fun, x0, jac=scheme)
    assert res.success and res.fun == pytest.approx(value, rel=1e-8)
    again = sanc.minimize(fun, res.x, jac=scheme)  # here the gradient is roundoff, but the curvature is not
    assert again.success and again.fun == pytest.approx(value, rel=1e-8)


@pytest.mark.parametrize("scheme", ["2-point", "3-point", "cs"])
@pytest.mark.parametrize("fun", [lambda x: 1 + (x**2).sum(), lambda x: 1 + (x**4).sum(), lambda x: 1e5 + (x**2).sum()])
def test_a_start_at_a_minimum_is_a_success_with_differences(fun, scheme):
    res = sanc.minimize(fun, np.zeros(3), jac=scheme)
    assert res.success and res.nit <= 1


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_differences_escape_a_saddle_of_large_values(scheme):
    """uuᵀ is fitted to a matrix from u = 0, where f = 2e7 and its gradient is 0."""
    matrix = np.outer(np.arange(1, 31), np.arange(1, 31)) * 1.0
    res = sanc.minimize(lambda u: 0.25 * float(np.sum((np.outer(u, u) - matrix) ** 2)), np.zeros(30), jac=scheme)
    assert res.success and res.fun < 1e-3


@pytest.mark.parametrize("tol", [None, 1e-2, 1e-5])
@pytest.mark.parametrize("offset", [1e6, 1e8, 1e10])
def test_a_saddle_below_the_error_of_differences_is_no_success(offset, tol):
    """λ_min is −4. A generous tolerance on the gradient is no reason to believe curvature that is roundoff."""
    fun = lambda x: (x[0] ** 2 - 1) ** 2 + x[1] ** 2 + 0.1 * x[0] * x[1] + offset
    res = sanc.minimize(fun, np.zeros(2), jac="3-point", tol=tol)
    if res.success:  # the saddle was left
        assert abs(res.x[0]) == pytest.approx(1.0, abs=0.1)
    else:
        assert "subtract a constant" in res.message


@pytest.mark.parametrize(("scale", "sizes"), [(1e6, (2, 9)), (1e20, (5, 12)), (1e100, (2, 6))])
def test_a_minimum_to_the_last_bits_of_x_is_a_success(scale, sizes):
    """f is tiny beside the change of f by one rounding error of x, which is no noise."""
    for n in sizes:
        fun = lambda x: scale * (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
        result = sanc.minimize(fun, torch.zeros(n, dtype=torch.float64))
        assert result.success and float((result.x - 1.0).abs().max()) < 1e-14


@pytest.mark.parametrize("width", [1.0, 1e-3, 1e-6])
def test_a_start_at_a_sharp_minimum_is_not_inconsistent(width):
    def fun(x):
        return float(width * np.sum(3 * np.logaddexp(0, x / width) + np.logaddexp(0, -x / width)))

    def jac(x):
        return 3 / (1 + np.exp(-x / width)) - 1 / (1 + np.exp(x / width))

    at = np.full(3, -width * math.log(3))
    assert sanc.minimize(fun, at, jac=jac).status is Status.SECOND_ORDER
    positive = {"fun": lambda x: float(x[0] - width * math.log(x[0])), "jac": lambda x: 1 - width / x}
    assert sanc.minimize(x0=[width], **positive).status is Status.SECOND_ORDER  # f is not evaluated outside its domain


@pytest.mark.parametrize("n", [101, 1000])
def test_beside_a_maximum_whose_curvature_is_below_the_roundoff_of_f(n):
    """The first steps change Σ cos x by less than its roundoff; a longer one along the curvature does not."""
    result = sanc.minimize(lambda x: torch.cos(x).sum(), torch.full((n,), 1e-9, dtype=torch.float64))
    assert result.status is Status.SECOND_ORDER and float(result.fun) == pytest.approx(-n)


@pytest.mark.parametrize(
    ("dtype", "starts"),
    [(torch.float64, (1e-12, 1e-20, 1e-30)), (torch.float32, (1e-9, 1e-12, 1e-20, 1e-30))],
)
@pytest.mark.parametrize(
    ("fun", "value"),
    [
        (lambda x: (x**4 / 4 - x**2 / 2).sum(), -0.25 * 3),
        (lambda x: torch.cos(x).sum(), -3.0),
        (lambda x: (x[1:] ** 2).sum() - x[0] ** 2 / 2 + x[0] ** 4 / 4, -0.25),
    ],
)
def test_a_start_very_close_to_a_saddle_is_left(fun, value, dtype, starts):
    """There f, its gradient and the length of x are tiny, and the Hessian is not."""
    for start in starts:
        x0 = torch.tensor([1.0, -0.5, 0.7], dtype=dtype) * start
        result = sanc.minimize(fun, x0)
        assert result.status is Status.SECOND_ORDER and float(result.fun) == pytest.approx(value, rel=1e-4)
    if dtype is torch.float64:
        many = sanc.minimize_many(fun, torch.stack([x0, 1e6 * x0]))
        assert many.success.all() and many.fun.tolist() == pytest.approx([value] * 2, rel=1e-4)


@pytest.mark.parametrize(
    ("dtype", "start", "constant"),
    [(torch.float64, 1e-8, 1e2), (torch.float32, 1e-4, 1e2), (torch.float32, 1e-3, 1e4), (torch.float32, 1e-2, 1e6)],
)
def test_a_constant_does_not_hide_a_saddle(dtype, start, constant):
    def f(x):
        return x[0] ** 2 - x[1] ** 2 + 0.25 * x[1] ** 4 + constant

    result = sanc.minimize(f, torch.full((2,), start, dtype=dtype))
    assert result.success and abs(float(result.x[1])) == pytest.approx(math.sqrt(2.0), rel=1e-3)


def saddle_with(constant):
    """A saddle at 0 with λ_min = −4; the minima are at about (±1, ∓0.05)."""
    return lambda x: (x[0] ** 2 - 1) ** 2 + x[1] ** 2 + 0.1 * x[0] * x[1] + constant


def forward_differences(f, h=1.5e-8):
    return lambda x: np.array([(f(x + h * e) - f(x)) / h for e in np.eye(len(x))])


@pytest.mark.parametrize("constant", [0.0, 1e2, 1e4, 1e6, 1e8, 1e10])
@pytest.mark.parametrize("start", [(0.0, 0.0), (1e-3, 0.0)])
@pytest.mark.parametrize("scheme", ["2-point", "3-point", "own"])
@pytest.mark.parametrize("tol", [None, 1e-3])
def test_no_success_on_a_saddle_that_roundoff_hides_from_differences(scheme, tol, start, constant):
    f = saddle_with(constant)
    jac = forward_differences(f) if scheme == "own" else scheme
    result = sanc.minimize(f, np.array(start), jac=jac, tol=tol)
    if result.success:
        assert abs(result.x[0]) == pytest.approx(1.0, abs=0.1)
    else:
        assert "error of" in result.message and "subtract a constant from f" in result.message
    assert result.success or constant >= 1e4


@pytest.mark.parametrize(("constant", "step"), [(1e8, 1e-5), (1e8, 1e-6), (1e10, 1e-4), (1e10, 1e-3)])
def test_no_success_where_all_differences_of_a_gradient_are_zero(constant, step):
    """The steps of products are below those of the caller's differences. A length from f / ‖∇f‖ would be 5e7 here."""
    f = lambda x: constant + x[0] ** 2 - x[1] ** 2 + 0.01 * x[1] ** 4
    result = sanc.minimize(f, np.array([1.0, 0.0]), jac=forward_differences(f, step))
    on_saddle = abs(result.x[1]) < 1.0
    assert not (on_saddle and result.success)
    assert not on_saddle or "subtract a constant from f" in result.message


@pytest.mark.parametrize("scale", [1e-308, 1e-300, 1e-280, 1e100, 1e155, 1e200, 1e290])
@pytest.mark.parametrize("n", [3, 10, 200])
def test_the_certificate_of_a_function_whose_squares_leave_the_range(n, scale):
    """The eigenvalues of scale·diag(1 … 2) are known; relative to them the bounds are those of scale = 1."""
    d = np.linspace(1.0, 2.0, n)
    result = sanc.certificate(
        lambda x: 0.5 * float((scale * d * x) @ x), np.zeros(n), jac=lambda x: scale * d * x,
        hessp=lambda x, v: scale * d * v, tol=1e-3 * scale,
    )  # fmt: skip
    assert result.second_order and not result.saddle
    assert result.lower_bound <= scale <= (result.lambda_min + result.ritz_error) * (1 + 1e-3)


@pytest.mark.parametrize("size", [1e8, 1e10, 1e12])
def test_a_minimum_exact_to_roundoff_is_a_success(size):
    """The gradient of a large sum of squares stays above the default tolerance; a tolerance of the caller holds."""
    rng = np.random.default_rng(1)
    A, y = rng.standard_normal((50, 5)), size * rng.standard_normal(50)
    expected = np.linalg.lstsq(A, y)[0]
    A, y = torch.from_numpy(A), torch.from_numpy(y)

    def f(x):
        return (A @ x - y).square().sum()

    found = sanc.minimize(f, np.zeros(5))
    assert found.status is Status.SECOND_ORDER and found.certificate.second_order
    assert np.linalg.norm(found.x - expected) <= 1e-13 * np.linalg.norm(expected)
    strict = sanc.minimize(f, np.zeros(5), tol=1e-9)
    assert strict.status is Status.STALLED and "Roundoff alone may cause a gradient" in strict.message


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
@pytest.mark.parametrize(("f", "x0"), [(rosen, [-1.2, 1.0]), (lambda x: [1.0, 30.0, 1e3] @ (x - 1) ** 2, [0.0] * 3)])
def test_a_minimum_exact_to_the_error_of_differences_is_a_success(scheme, f, x0):
    """The differenced gradient of 1e10·f stays above the default tolerance; a tolerance of the caller holds."""
    found = sanc.minimize(lambda x: 1e10 * f(x), x0, jac=scheme)
    assert found.status is Status.SECOND_ORDER and np.allclose(found.x, 1.0, rtol=0, atol=1e-5)
    assert found.certificate.grad_norm <= found.certificate.gradient_tolerance
    strict = sanc.minimize(lambda x: 1e10 * f(x), x0, jac=scheme, tol=1e-9)
    assert strict.success or "alone may cause a gradient" in strict.message


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
@pytest.mark.parametrize("exponent", [90, 100])
def test_squares_of_hessian_products_do_not_overflow(scheme, exponent):
    """‖Hg‖² is a fourth power of the size of f; NumPy's warning of an overflow fails the test."""
    size = 10.0**exponent
    with np.errstate(over="raise"):
        res = sanc.minimize(lambda x: size * rosen(x), [-1.2, 1.0], jac=scheme)
    assert res.success and np.allclose(res.x, 1.0, rtol=0, atol=1e-5)


def test_tiny_steps_along_an_inaccurate_gradient_end():
    """Each step of ten rounding errors of x lowers f by 1e-11 of its value, and 10,000 of them change nothing."""
    valley = lambda x: 1657.5316252742834 * rosen(x)
    res = sanc.minimize(valley, np.zeros(4), jac="2-point", seed=17)
    assert res.success and res.nit < 300 and np.allclose(res.x, 1.0, rtol=0, atol=1e-4)


def test_no_success_where_differences_hide_a_decrease():
    """High frequencies, and a valley in which the truncation error across it exceeds the gradient along it."""
    noisy = lambda x: (x - 1) @ (x - 1) + 1e-4 * np.sin(1e9 * x).sum()
    assert not sanc.minimize(noisy, np.zeros(3), jac="3-point").success
    Q = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    valley = lambda x: (x - 1) @ (Q * np.geomspace(1.0, 1e10, 4)) @ Q.T @ (x - 1)
    res = sanc.minimize(valley, np.zeros(4), jac="2-point")
    assert not res.success and "Differences cause an error of" in res.message and valley(res.x) > 0.1
