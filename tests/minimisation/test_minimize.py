"""`minimize`: ways to pass a function, SciPy's custom method, Krylov choices, cost and bad input."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import MutableMapping
from itertools import groupby, pairwise

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess, rosen_hess_prod

import sanc
from sanc import Branch, Status
from zoo import rosen_torch

X0 = [-1.2, 1.0, 0.7, -0.3]


WAYS = {
    "torch": lambda: dict(fun=rosen_torch, x0=torch.tensor(X0, dtype=torch.float64)),
    "torch function, array start": lambda: dict(fun=rosen_torch, x0=X0),
    "hessp": lambda: dict(fun=rosen, x0=X0, jac=rosen_der, hessp=rosen_hess_prod),
    "hess": lambda: dict(fun=rosen, x0=X0, jac=rosen_der, hess=rosen_hess),
    "sparse hess": lambda: dict(fun=rosen, x0=X0, jac=rosen_der, hess=lambda x: scipy.sparse.csr_matrix(rosen_hess(x))),
    "differences": lambda: dict(fun=rosen, x0=X0, jac=rosen_der),
    "both at once": lambda: dict(fun=lambda x: (rosen(x), rosen_der(x)), x0=X0, jac=True, hessp=rosen_hess_prod),
    "torch, forward": lambda: dict(fun=rosen_torch, x0=X0, hvp="forward-over-reverse"),
    "torch, differences": lambda: dict(fun=rosen_torch, x0=X0, hvp="finite-difference"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_pass_a_function(way):
    given = WAYS[way]()
    res = sanc.minimize(**given)
    assert isinstance(res, scipy.optimize.OptimizeResult)
    assert res.success and res.status is Status.SECOND_ORDER and res.message == Status.SECOND_ORDER.sentence
    assert isinstance(res.x, type(given["x0"]) if isinstance(given["x0"], torch.Tensor) else np.ndarray)
    x = np.asarray(res.x)
    assert np.linalg.norm(rosen_der(x)) <= 1e-7
    assert res.fun == pytest.approx(rosen(x), abs=1e-14)
    assert np.asarray(res.jac) == pytest.approx(rosen_der(x), abs=1e-7)
    assert np.linalg.eigvalsh(rosen_hess(x))[0] > 0
    assert res.nit == len(res.history) > 3
    assert res.nfev > 0 and res.njev > 0 and res.nhev > 0
    assert res.certificate.second_order
    assert all(isinstance(record, sanc.Record) for record in res.history)


def test_counts_are_the_numbers_of_calls():
    counts = {"f": 0, "g": 0, "h": 0}

    def f(x):
        counts["f"] += 1
        return rosen(x)

    def g(x):
        counts["g"] += 1
        return rosen_der(x)

    def h(x, v):
        counts["h"] += 1
        return rosen_hess_prod(x, v)

    res = sanc.minimize(f, X0, jac=g, hessp=h)
    assert res.nfev == counts["f"] and res.njev == counts["g"]
    assert res.nhev == counts["h"] - res.certificate.products
    calls = res.calls
    assert (calls.value, calls.gradient, calls.product) == (res.nfev, res.njev, res.nhev)
    # one value and one gradient at each point
    assert res.njev == 1 + sum(r.branch is not Branch.STAYED for r in res.history)
    assert res.nfev == 1 + sum(r.trials for r in res.history)


def test_the_value_at_a_point_is_never_computed_twice(problem):
    """Even if SCR rejects many steps, f(x) is computed on all rows once for each x."""
    res = sanc.minimize(
        problem, np.ones(6), method="scr", preset="paper", batch_size=20, max_iter=120, certify=False, seed=1
    )
    assert max(len(list(group)) for key, group in groupby(r.branch is Branch.STAYED for r in res.history) if key) > 3
    assert res.nfev == 1 + sum(r.trials for r in res.history)


def test_a_rejected_step_is_solved_again_without_a_product():
    res = sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, sigma0=1e-6)
    resolved = [r for r in res.history if r.trials > 1]
    assert resolved
    assert res.nhev == sum(r.krylov_dim for r in res.history)  # trial steps need no products


def test_paper_preset_evaluates_each_rejection_once():
    res = sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, method="arc", preset="paper",
                        max_iter=300)  # fmt: skip
    assert {r.trials for r in res.history} == {1}
    rejected = [i for i, r in enumerate(res.history[:-1]) if r.branch is Branch.STAYED]
    assert rejected
    for i in rejected:
        assert res.history[i + 1].sigma == 2 * res.history[i].sigma
        assert res.history[i + 1].grad_norm == res.history[i].grad_norm


@pytest.mark.parametrize("method", ["sanc", "scr", "arc", "crm", "cr"])
def test_every_member_finds_the_minimum(method):
    res = sanc.minimize(lambda x: ((x**2 - 1) ** 2).sum() + 0.1 * x.sum(), torch.tensor([0.3, -0.2, 2.0]).double(),
                        method=method, sigma0=5.0)  # fmt: skip
    assert res.success
    roots = np.roots([4.0, 0.0, -4.0, 0.1]).real
    for coordinate in np.asarray(res.x):
        assert np.min(np.abs(roots - coordinate)) < 1e-7


def test_ncd_and_sgd_find_the_minimum_too():
    def f(x):
        return ((x**2 - 1) ** 2).sum()

    for method, options in (("ncd", {"L1": 20.0, "L2": 50.0}), ("sgd", {"lr": 0.02})):
        res = sanc.minimize(f, torch.tensor([0.3, -0.2]).double(), method=method, preset="paper", **options)
        assert res.success, method
        assert np.abs(np.asarray(res.x)) == pytest.approx([1.0, 1.0])


def test_shapes_and_arguments_are_kept():
    target = torch.arange(6.0, dtype=torch.float64).view(2, 3)

    def f(x, scale, shift):
        assert x.shape == (2, 3)
        return scale * ((x - target - shift) ** 2).sum()

    res = sanc.minimize(f, torch.zeros(2, 3, dtype=torch.float64), args=(2.0, 1.0))
    assert res.x.shape == (2, 3) and res.jac.shape == (2, 3)
    assert torch.allclose(res.x, target + 1)
    assert sanc.minimize(lambda x: (x**2).sum(), 3.0).x.shape == ()


def test_float32():
    res = sanc.minimize(rosen_torch, torch.tensor(X0))
    assert res.x.dtype == torch.float32 and res.success
    assert float(res.fun) == pytest.approx(0.0, abs=1e-6) or float(res.fun) == pytest.approx(3.7014, abs=1e-3)


# ---------------------------------------------------------------------------------------------- SciPy's custom method


def test_as_a_method_of_scipy():
    seen = []
    res = scipy.optimize.minimize(
        rosen, X0, jac=rosen_der, hessp=rosen_hess_prod, method=sanc.scipy_method, tol=1e-6, callback=seen.append,
        options={"preset": "paper", "method": "arc", "krylov_dim": 4, "maxiter": 2000},
    )  # fmt: skip
    assert res.success and np.linalg.norm(res.jac) <= 1e-6
    assert len(seen) == res.nit and seen[-1] == pytest.approx(res.x)
    same = scipy.optimize.minimize(
        lambda x: (rosen(x), rosen_der(x)), X0, jac=True, hess=rosen_hess, method=sanc.scipy_method
    )
    assert same.success
    limited = scipy.optimize.minimize(
        rosen, X0, jac=rosen_der, hessp=rosen_hess_prod, method=sanc.scipy_method, options={"maxiter": 2}
    )
    assert limited.nit == 2 and limited.status is Status.ITERATION_LIMIT and not limited.success


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"bounds": [(1, 0)] * 4, "jac": rosen_der}, "bounds"),
        ({"constraints": {"type": "eq", "fun": rosen}, "jac": rosen_der}, "constraints"),
        ({"jac": rosen_der, "options": {"sigma": 1.0}}, "sigma0"),
    ],
)
def test_scipy_misuse(given, word):
    with pytest.raises(sanc.SancError, match=word):
        scipy.optimize.minimize(rosen, X0, method=sanc.scipy_method, **given)


# ---------------------------------------------------------------------------------------------- functions and callbacks


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"jac": lambda x: 2 * x + 1j}, "jac returned"),
        ({"jac": lambda x: ["a", "b"]}, "jac returned"),
        ({"jac": lambda x: 2 * x, "hessp": lambda x, v: 2 * v + 1j}, "hessp returned"),
        ({"jac": lambda x: 2 * x, "hess": lambda x: np.eye(2) * (1 + 1j)}, "hess returned|cannot be"),
    ],
)
def test_errors_name_functions_that_return_no_real_numbers(kind, given, word):
    with pytest.raises(sanc.SancError, match=word):
        sanc.minimize(lambda x: float((x**2).sum()), kind([1.0, 2.0]), **given)
    with pytest.raises(sanc.ArgumentTypeError, match="fun returned"):
        sanc.minimize(lambda x: (x**2).sum() + 1j, kind([1.0, 2.0]), jac=lambda x: 2 * x)


def test_callbacks(problem):
    def raises(x):
        raise StopIteration

    for stop in (lambda x: True, raises):
        res = sanc.minimize(problem, np.ones(6), callback=stop)
        assert res.status is Status.CALLBACK and res.nit == 1
    seen = []

    def watch(intermediate_result):
        seen.append(intermediate_result)

    res = sanc.minimize(problem, np.ones(6), callback=watch)
    assert len(seen) == res.nit
    assert seen[-1].record is res.history[-1] and seen[-1].fun == pytest.approx(problem.value(seen[-1].x))


# ---------------------------------------------------------------------------------------------- Krylov choices


def test_a_regenerated_basis_makes_the_same_steps(problem):
    options = {"preset": "paper", "batch_size": 40, "max_iter": 10, "certify": False}
    plain = sanc.minimize(problem, np.ones(6), **options)
    other = sanc.minimize(problem, np.ones(6), lanczos="regenerate", **options)
    assert plain.x == pytest.approx(other.x, abs=1e-8)
    assert plain.calls.paper_calls == other.calls.paper_calls  # the paper does not count the second pass
    assert other.calls.product > plain.calls.product  # the total does


def test_early_stop_needs_both_tests():
    """Lanczos continues while either the model gradient or the Ritz residual is above its tolerance."""
    weights = np.linspace(1.0, 50.0, 30)

    def run(eps, eps_g):
        res = sanc.minimize(
            lambda x: 0.5 * float(x @ (weights * x)), np.ones(30), jac=lambda x: weights * x,
            hessp=lambda x, v: weights * v, preset="paper", krylov_dim=30, epsilon=eps, epsilon_g=eps_g, max_iter=1,
            certify=False, max_products=1,
        )  # fmt: skip
        return res.history[0].krylov_dim

    loose, by_model, by_ritz = run(1e6, 1e6), run(1e6, 1e-3), run(1e-12, 1e6)
    assert loose == 1 and loose < by_model < 30
    assert by_ritz >= 1
    g = np.linalg.norm(weights)
    # the Ritz test at j: β_j|v_j| ≤ max(ε, ‖g‖)/2, checked densely
    Q, _ = np.linalg.qr(np.stack([weights ** (k + 1) for k in range(by_ritz)], axis=1))
    T = Q.T @ (weights[:, None] * Q)
    lam, V = np.linalg.eigh(T)
    ritz = Q @ V[:, 0]
    assert np.linalg.norm(weights * ritz - lam[0] * ritz) <= g / 2 * (1 + 1e-6)


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(x0=[np.nan, 1.0]), ["x0 holds NaN"]),
        (dict(x0=[]), ["x0 is empty"]),
        (dict(x0="abc"), ["x0", "real numbers"]),
        (dict(x0=torch.ones(2).half()), ["x0", "float16"]),
        (dict(fun=3), ["fun = 3", "function"]),
        (dict(method="sancc"), ["method = 'sancc'", "did you mean 'sanc'"]),
        (dict(method=3), ["method = 3"]),
        (dict(preset="robst"), ["did you mean 'robust'"]),
        (dict(sigm0=1.0), ["'sigm0'", "did you mean 'sigma0'"]),
        (dict(maxiters=3), ["'maxiters'", "did you mean"]),
        (dict(maxiter=3, max_iter=4), ["'maxiter' is given together with 'max_iter'"]),
        (dict(options={"gtol": 1e-6}, tol=1e-5), ["'gtol' is given in options"]),
        (dict(options={"maxfev": 5}, maxfun=6), ["'maxfev' is given in options"]),
        (dict(maxfev=0), ["max_nfev = 0"]),
        (dict(bounds=[1, 2]), ["bounds", "pairs"]),
        (dict(constraints={"type": "eq", "fun": rosen}), ["constraints"]),
        (dict(jac="4-point"), ["jac = '4-point'", "3-point"]),
        (dict(jac="3-point", hessp=rosen_hess_prod), ["jac = '3-point'", "hessp"]),
        (dict(jac=rosen_der, hess="BFGS"), ["hess = 'BFGS'"]),
        (dict(jac="cs", x0=torch.ones(2)), ["cs", "leave jac out"]),
        (dict(x0={}), ["x0 is empty"]),
        (dict(x0={"a": torch.ones(2), "b": np.ones(2)}), ["x0['b']", "tensors only"]),
        (dict(x0={"a": torch.ones(2), "b": [torch.ones(2).double()]}), ["x0['b'][0]", "one type"]),
        (dict(x0={"a": "text"}), ["x0['a']", "real numbers"]),
        (dict(x0={"a": torch.tensor([math.nan])}), ["x0 holds NaN"]),
        (dict(fun=lambda p: 1.0, jac=lambda p: {"b": 1.0}, x0={"a": 1.0}), ["jac returned a tree", "x0['a']"]),
        (dict(fun=lambda p: 1.0, jac=lambda p: {"a": [1.0]}, x0={"a": 1.0}), ["jac returned a tree"]),
        (dict(fun=lambda p: 1.0, jac=lambda p: {"a": np.ones(2)}, x0={"a": np.ones(3)}), ["shape (2,) for x0['a']"]),
        (dict(options={"sigm0": 1.0}), ["did you mean 'sigma0'"]),
        (dict(options={"sigma0": 1.0}, sigma0=2.0), ["'sigma0' is given in options"]),
        (dict(options={"max_iter": 1}, max_iter=2), ["'max_iter' is given in options"]),
        (dict(eta1=0.5, eta2=0.4), ["eta2 = 0.4"]),
        (dict(krylov_dim=True), ["krylov_dim = True", "an integer"]),
        (dict(krylov_dim=2.5), ["krylov_dim = 2.5", "an integer"]),
        (dict(sigma0=math.nan), ["sigma0 = nan", "a number"]),
        (dict(sigma0=True), ["sigma0 = True", "a number"]),
        (dict(sigma0="1"), ["sigma0 = '1'", "a number"]),
        (dict(sigma0=-1.0), ["sigma0 = -1.0", "positive"]),
        (dict(rounding_guard=1), ["rounding_guard = 1", "True or False"]),
        (dict(sigma_rule="papier"), ["sigma_rule = 'papier'", "paper"]),
        (dict(tol=0.0), ["tol = 0.0"]),
        (dict(tol="x"), ["tol = 'x'"]),
        (dict(max_calls="5"), ["max_calls = '5'"]),
        (dict(options=5), ["options = 5", "mapping"]),
        (dict(options={"tol": 1e-6}, tol=1e-5), ["'tol' is given in options"]),
        (dict(jac=rosen_der, fun=rosen, hess=lambda x: np.ones((3, 3))), ["hess returned", "(3, 3)", "(4, 4)"]),
        (dict(max_iter=-1), ["max_iter = -1"]),
        (dict(max_calls=0), ["max_calls = 0"]),
        (dict(max_products=0), ["max_products = 0"]),
        (dict(seed=1.5), ["seed = 1.5"]),
        (dict(hvp="fast"), ["hvp = 'fast'"]),
        (dict(batch_size=3), ["batch_size = 3", "finite sum"]),
        (dict(hessp=rosen_hess_prod), ["jac is missing"]),
        (dict(jac=3), ["jac = 3"]),
        (dict(jac=rosen_der, hessp=3), ["hessp = 3"]),
        (dict(fun=rosen), ["fun", "write it with torch operations, or pass its gradient as jac"]),
        (dict(fun=lambda x: np.sin(x.numpy()).sum()), ["no torch function", "jac"]),
        (dict(fun=lambda x: x), ["shape (4,)", "mean()"]),
        (dict(fun=lambda x: x, jac=rosen_der), ["fun returned 4 numbers"]),
        (dict(fun=rosen, jac=lambda x: np.ones(3)), ["jac returned 3 numbers", "4 variables"]),
        (dict(fun=rosen, jac=rosen_der, hessp=lambda x, v: 1.0), ["hessp returned 1 numbers"]),
        (dict(grow_samples=True), ["grow_samples = True", "scr"]),
    ],
)
def test_errors_name_the_argument_and_its_value(given, words):
    arguments = {"fun": rosen_torch, "x0": X0} | given
    with pytest.raises(sanc.SancError) as caught:
        sanc.minimize(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_progress_lines(capsys, problem):
    sanc.minimize(problem, np.ones(6), disp=True)
    out = capsys.readouterr().out.splitlines()
    assert "successful" in out[0] and "‖g‖" in out[0] and out[-1].startswith(Status.SECOND_ORDER.sentence)


def test_a_callback_cannot_change_the_run(problem):
    def overwrite(x):
        x[:] = 100.0
        return x  # only True ends the run

    res = sanc.minimize(problem, np.ones(6), callback=overwrite)
    assert res.success and np.abs(res.x).max() < 50


def test_options_in_a_mapping_as_in_scipy():
    arc = sanc.minimize(rosen_torch, X0, options={"method": "arc", "tol": 1e-3})
    assert arc.success and not any(r.branch is Branch.GRADIENT for r in arc.history)
    res = sanc.minimize(rosen_torch, X0, options={"max_iter": 3, "sigma0": 7.0})
    assert res.nit == 3 and res.history[0].sigma == 7.0


def test_the_start_is_never_changed():
    x0 = np.array(X0)
    sanc.minimize(rosen, x0, jac=rosen_der, hessp=rosen_hess_prod)
    assert np.array_equal(x0, X0)
    t0 = torch.tensor(X0)
    sanc.minimize(rosen_torch, t0)
    assert torch.equal(t0, torch.tensor(X0))


def test_a_torch_function_draws_nothing_from_the_global_generator():
    state = torch.get_rng_state()
    sanc.minimize(rosen_torch, X0)
    sanc.certificate(rosen_torch, X0)
    assert torch.equal(state, torch.get_rng_state())


# ---------------------------------------------------------------------------------------------- cost of a run


def test_each_evaluation_multiplies_by_the_data_once(rng, wide_problem, readings):
    """Value, gradient and Hessian at one point share its margins."""
    problem = wide_problem(rng, 1.0)
    readings.clear()
    res = sanc.minimize(problem, np.ones(60), certify=False)
    products = res.nhev + res.certificate.products
    assert res.success
    again = sum(record.trials > 1 for record in res.history)  # the margins at x are computed again
    assert 0 <= readings["_times"] - (products + res.nfev + 1) <= again  # the first value comes with the gradient
    assert readings["_transposed_times"] == products + res.njev
    plain = scipy.optimize.minimize(
        problem.value, res.x + 1e-3, jac=lambda w: problem.value_and_gradient(w)[1], method="BFGS", tol=1e-9
    )
    assert res.x == pytest.approx(plain.x, abs=1e-6) and res.fun <= plain.fun + 1e-13


def cauchy(fun, x0):
    """Return the norm ‖g‖²/‖Hg‖ of the Cauchy step at the start, the unit of length."""
    g = torch.autograd.functional.jacobian(fun, x0)
    return float(g.norm() ** 2 / (torch.autograd.functional.hessian(fun, x0) @ g).norm())


def test_no_step_is_much_longer_than_the_last(rng):
    """Steps of positive curvature lower σ; along other curvature the last step norm bounds the next one."""

    def fun(x):
        return (0.5 * x[0] ** 2 + torch.cos(x[1:] * 0.3).sum() * 10 + 1e-3 * (x**4).sum()) / 10

    seen = 0
    for seed in range(20):
        x0 = 5 * torch.from_numpy(np.random.default_rng(seed).standard_normal(8))
        points = [x0.clone()]
        unit = cauchy(fun, x0)
        res = sanc.minimize(fun, x0, callback=lambda x, points=points: points.append(x))
        assert res.success
        last = 0.0
        for record, before, after in zip(res.history, points[:-1], points[1:], strict=True):
            step_norm = float(torch.linalg.norm(after - before))
            longest = max(unit, 0.1 * float(torch.linalg.norm(before)), 3 * last)
            if (last > 0 or record.ritz_value < 0) and step_norm > 1.001 * longest:
                assert record.trials > 1 and record.trial_value < record.value  # shorter steps were tried first
            seen += record.ritz_value < 0
            last = step_norm or last
    assert seen > 20


def test_a_limited_step_is_lengthened_if_f_falls_by_more_than_predicted():
    """Along negative curvature one gradient leads far: each trial step is up to three times as long as the last."""
    calls = []

    def fun(x):
        calls.append(x.detach().clone())
        return (x * x / (1 + x * x)).sum()

    x0 = torch.full((100,), 1.5, dtype=torch.float64)
    res = sanc.minimize(fun, x0, max_iter=1, hvp="double-backward", certify=False, first_radius=0.1)
    (record,) = res.history
    assert record.trials >= 3 and record.krylov_dim == 1 and record.ritz_value < 0
    assert record.step_norm == pytest.approx(float(torch.linalg.norm(res.x - x0)))
    assert record.step_norm > 3 * 0.1 * max(cauchy(fun, x0), 0.1 * float(torch.linalg.norm(x0)))
    exact = float((res.x**2 / (1 + res.x**2)).sum())
    assert record.trial_value == pytest.approx(exact) and exact < record.value
    norms = sorted({round(float(torch.linalg.norm(x - x0)), 6) for x in calls} - {0.0})
    assert all(b / a <= 3.001 for a, b in pairwise(norms))
    assert sanc.minimize(fun, x0, max_iter=1, certify=False, first_radius=None, sigma0=1.0).history[0].trials == 1
    assert sanc.minimize(fun, x0, max_iter=1, certify=False, preset="paper").history[0].trials == 1


@pytest.mark.parametrize("tol", [1e-10, 1e-6, 1e-3])
def test_the_model_is_minimised_as_far_as_the_tolerance_needs(rng, tol):
    """Lanczos ends at the first space that satisfies the stopping rule, by dense linear algebra."""
    d = 40
    Q = np.linalg.qr(rng.standard_normal((d, d)))[0]
    A = Q @ np.diag(np.geomspace(0.05, 1.0, d)) @ Q.T
    x = 1e-3 * rng.standard_normal(d)
    sigma = 0.5
    res = sanc.minimize(
        lambda w: 0.5 * w @ A @ w, x, jac=lambda w: A @ w, hess=lambda w: A, tol=tol, sigma0=sigma, max_iter=1
    )
    if not res.history:
        assert np.linalg.norm(A @ x) <= tol
        return
    g = A @ x
    size = np.linalg.norm(g)
    length_scale = max(size**2 / np.linalg.norm(A @ g), 0.1 * np.linalg.norm(x))
    satisfied = []
    for j in range(1, res.history[0].krylov_dim + 1):
        K = np.linalg.qr(np.column_stack([np.linalg.matrix_power(A, k) @ g for k in range(j)]))[0]

        def model(u, K=K):
            s = K @ u
            return g @ s + 0.5 * s @ A @ s + sigma / 3 * np.linalg.norm(s) ** 3

        def model_gradient(u, K=K):
            s = K @ u
            return K.T @ (g + A @ s + sigma * np.linalg.norm(s) * s)

        scale = 1e6  # SciPy needs numbers near 1
        best = scipy.optimize.minimize(
            lambda u, model=model: model(u / 1e3) * scale,
            np.zeros(j),
            jac=lambda u, gradient=model_gradient: gradient(u / 1e3) * scale / 1e3,
            tol=1e-14,
        )
        s = K @ best.x / 1e3
        residual = np.linalg.norm(g + A @ s + sigma * np.linalg.norm(s) * s)
        allowed = max(min(0.2, np.linalg.norm(s) / length_scale) * size, 0.5 * tol)
        satisfied.append(residual <= allowed * (1 + 1e-3))
    if res.history[0].krylov_dim <= 10:
        assert satisfied == [False] * (len(satisfied) - 1) + [True]
    else:
        assert satisfied[-1]


@pytest.mark.parametrize("lanczos", ["store", "regenerate"])
def test_several_longer_steps_from_one_space(lanczos):
    """The first σ is far too large. If the basis is not stored, each trial step needs a second pass at x."""
    A = torch.linspace(0.05, 50, 20, dtype=torch.float64)

    def f(x):
        return 0.5 * (A * x * x).sum() + 0.01 * (x**4).sum() + 1e-3 * x.sum()

    x0 = torch.full((20,), 1e-3, dtype=torch.float64)
    res = sanc.minimize(f, x0, method="arc", lanczos=lanczos, hvp="double-backward", sigma0=1e6, krylov_stop="paper")
    assert res.success and res.history[0].trials >= 3 and res.history[0].krylov_dim >= 2


@pytest.mark.parametrize("broken", range(1, 14))
def test_a_product_that_is_not_finite_in_a_second_pass_costs_one_step(broken):
    """The fourth iteration makes five products, repeats four for the cubic step and four for the escape step."""
    A = np.diag([3.0, -2.0, 1.0, -0.5, 4.0])
    made = []  # products of each iteration

    def hessp(x, v):
        made[-1] += 1
        bad = len(made) == 4 and made[-1] == broken
        return (A @ v + 3 * x**2 * v) * (math.nan if bad else 1.0)

    made.append(0)
    res = sanc.minimize(
        lambda x: 0.5 * x @ A @ x + 0.25 * (x**4).sum(), [1.0, 0.1, 0.5, 0.2, 0.7], jac=lambda x: A @ x + x**3,
        hessp=hessp, preset="paper", lanczos="regenerate", sigma0=1e-3, max_iter=12, certify=False,
        callback=lambda x: made.append(0),
    )  # fmt: skip
    record = res.history[3]
    assert made[3] >= broken and "Hessian product" in record.note and res.nit == 12
    assert record.branch is (sanc.Branch.GRADIENT if broken < 10 else sanc.Branch.STAYED)
    assert np.isfinite(res.x).all() and res.fun < res.history[0].value


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_callables_that_change_their_argument_do_not_change_the_run(library):
    def overwrite(x, returned):
        x[...] = 1e3
        return returned

    x0 = np.array(X0) if library == "numpy" else torch.tensor(X0, dtype=torch.float64)
    as_array = np.asarray
    plain = dict(
        fun=lambda x: rosen(as_array(x)),
        jac=lambda x: rosen_der(as_array(x)),
        hessp=lambda x, v: rosen_hess_prod(as_array(x), as_array(v)),
    )
    overwriting = dict(
        fun=lambda x: overwrite(x, rosen(as_array(x).copy())),
        jac=lambda x: overwrite(x, rosen_der(as_array(x).copy())),
        hessp=lambda x, v: overwrite(v, overwrite(x, rosen_hess_prod(as_array(x).copy(), as_array(v).copy()))),
    )
    ours, theirs = sanc.minimize(x0=x0, **overwriting), sanc.minimize(x0=x0, **plain)
    assert ours.success and np.array_equal(np.asarray(ours.x), np.asarray(theirs.x))


def test_autocast_around_a_call_holds_in_the_function_alone():
    """The iteration computes in the type of x; autocast holds in the function and in the callback."""
    matrix = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    matrix = matrix @ matrix.T / 30 + torch.eye(30)
    seen = []

    def fun(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return ((x * matrix).sum(1) ** 2).sum() + (x**4).sum() - x.sum()  # autocast changes none of these

    at = torch.ones(30)
    plain, bound = sanc.minimize(fun, at), sanc.certificate(fun, at)
    assert not any(seen)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        cast = sanc.minimize(fun, at, callback=lambda x: seen.append(torch.is_autocast_enabled("cpu")))
        again = sanc.certificate(fun, at)
    assert all(seen) and torch.equal(plain.x, cast.x) and plain.nit == cast.nit
    assert again.lambda_min == bound.lambda_min and again.error_bound == bound.error_bound


@pytest.mark.parametrize("fun", [lambda x: np.sum(np.abs(x - 1) ** 2), lambda x: float(np.sum(np.real(x - 1) ** 2))])
def test_the_complex_step_needs_a_function_of_complex_numbers(fun):
    with pytest.raises(sanc.ArgumentError, match=r'at a complex point.*Pass jac = "3-point"'):
        sanc.minimize(fun, [3.0, 2.0], jac="cs")
    assert sanc.minimize(lambda x: (x - 1) ** 2, [3.0], jac="cs").x == pytest.approx([1.0])


@pytest.mark.parametrize("true", [np.True_, np.array(True), torch.tensor(True)])
def test_true_of_numpy_or_torch_from_a_callback_ends_the_run(true):
    res = sanc.minimize(rosen, X0, jac=rosen_der, callback=lambda x: true)
    assert res.status is Status.CALLBACK and res.nit == 1
    for other in (np.False_, torch.tensor(False), 1.0, np.ones(2), "yes"):
        assert sanc.minimize(rosen, X0, jac=rosen_der, callback=lambda x, other=other: other).success


@pytest.mark.parametrize("answer", [True, np.True_, torch.tensor(True), StopIteration])
def test_the_callbacks_of_all_minimisers_ask_to_stop_alike(answer):
    def callback(report):
        if answer is StopIteration:
            raise StopIteration
        return answer

    fit = sanc.least_squares(lambda x: np.array([x[1] - x[0] ** 2, 1.0 - x[0]]), [-1.2, 1.0], callback=callback)
    assert fit.status is Status.CALLBACK and fit.nit == 1
    start = torch.full((2, 3), 2.0, dtype=torch.float64)
    rows = sanc.minimize_many(lambda x: (x**4).sum(), start, callback=callback)
    assert rows.status.tolist() == [Status.CALLBACK] * 2 and rows.rounds == 1
    rows = sanc.minimize_many(lambda x: (x**4).sum(), start, callback=lambda report: 1)  # 1 is not True
    assert rows.success.all()


def test_a_function_may_minimise_another():
    def outer(x):
        inner = sanc.minimize(lambda y: ((y - 1) ** 2).sum(), torch.zeros(2, dtype=torch.float64))
        return ((x - inner.x) ** 2).sum()

    assert torch.allclose(sanc.minimize(outer, torch.full((2,), 3.0).double()).x, torch.ones(2).double())
    with torch.no_grad():
        assert sanc.minimize(rosen_torch, torch.tensor(X0, dtype=torch.float64)).success


HESSIANS = {
    "sparse": lambda x: scipy.sparse.csr_array(rosen_hess(x)),
    "operator": lambda x: scipy.sparse.linalg.aslinearoperator(rosen_hess(x)),
    "list": lambda x: rosen_hess(x).tolist(),
    "tensor": lambda x: torch.from_numpy(rosen_hess(x)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", HESSIANS)
@pytest.mark.parametrize("make", [np.array, lambda x: torch.tensor(x, dtype=torch.float64)])
def test_a_hessian_comes_in_many_forms(kind, make):
    def given(function):
        return lambda x: function(np.asarray(x))

    plain = sanc.minimize(rosen, X0, jac=rosen_der, hess=rosen_hess)
    res = sanc.minimize(given(rosen), make(X0), jac=given(rosen_der), hess=given(HESSIANS[kind]))
    assert res.success and res.nit == plain.nit and np.allclose(np.asarray(res.x), plain.x)


def test_the_hessian_of_one_variable_may_be_a_number():
    res = sanc.minimize(lambda x: float(x[0] ** 2), [3.0], jac=lambda x: 2 * x, hess=lambda x: 2.0)
    assert res.success and res.x == pytest.approx([0.0], abs=1e-8)


def test_points_are_returned_in_the_form_of_the_start(problem):
    Pair = namedtuple("Pair", "a b")
    found = sanc.minimize(lambda p: float((p.a**2).sum() + (p.b - 1) ** 2), Pair(np.ones(2), 3.0), jac="3-point").x
    assert type(found) is Pair and np.allclose(found.a, 0, atol=1e-5) and found.b == pytest.approx(1, abs=1e-5)
    tree = OrderedDict(a=torch.ones(2), b=torch.tensor(3.0))
    found = sanc.minimize(lambda p: (p["a"] ** 2).sum() + (p["b"] - 1) ** 2, tree).x
    assert type(found) is OrderedDict and torch.equal(tree["a"], torch.ones(2))
    assert isinstance(sanc.minimize(problem, torch.ones(6)).x, torch.Tensor)


def test_arguments_of_scipy_are_passed_on():
    given = {"fun": rosen, "x0": X0, "method": sanc.scipy_method}
    with pytest.raises(sanc.ArgumentError, match="jac is missing although hess"):
        scipy.optimize.minimize(**given, hess=rosen_hess)
    with pytest.raises(sanc.ArgumentTypeError, match="hess = 3"):
        scipy.optimize.minimize(**given, jac=rosen_der, hess=3)
    assert scipy.optimize.minimize(**given, jac=rosen_der, hess=scipy.optimize.BFGS()).success


def test_errors_of_second_derivatives_can_be_pickled():
    error = pickle.loads(pickle.dumps(sanc.SecondDerivativeError("no second derivative", "flash")))
    assert (str(error), error.operator) == ("no second derivative", "flash")


def test_a_user_defined_mapping_does_not_change():
    class Named(MutableMapping):
        def __init__(self, **entries):
            self.entries = entries

        def __getitem__(self, key):
            return self.entries[key]

        def __setitem__(self, key, value):
            self.entries[key] = value

        def __delitem__(self, key):
            del self.entries[key]

        def __iter__(self):
            return iter(self.entries)

        def __len__(self):
            return len(self.entries)

    given = Named(a=torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert torch.allclose(sanc.minimize(lambda q: (q["a"] ** 2).sum(), given).x["a"], torch.zeros(2).double())
    assert given["a"].tolist() == [3.0, 4.0]


def test_options_that_scipy_accepts_are_accepted(capsys):
    for hess in (scipy.optimize.BFGS(), "2-point"):
        assert scipy.optimize.minimize(rosen, X0, method=sanc.scipy_method, hess=hess).success
    assert sanc.minimize(rosen, X0, jac=rosen_der, options={"disp": 0}).success
    assert capsys.readouterr().out == ""
    assert sanc.minimize(rosen, X0, jac=rosen_der, callback=lambda x: x > 0).success  # an array of four is no True


def test_a_hessian_may_be_anything_with_a_product():
    class Times:
        def __init__(self, matrix):
            self.matrix, self.shape = matrix, matrix.shape

        def __matmul__(self, v):
            return self.matrix @ v

    assert sanc.minimize(rosen, X0, jac=rosen_der, hess=lambda x: Times(rosen_hess(x))).success
