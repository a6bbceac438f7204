"""`minimize` with bounds: forms, feasibility, faces, certificates, units, endings and mistakes."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.optimize import Bounds, rosen, rosen_der, rosen_hess_prod

import sanc
import zoo
from benchmarks.bounded import lambda_min, projected_gradient
from benchmarks.bounded_problems import problems
from sanc.extend import KrylovSubspace
from sanc.minimisation import Status
from zoo import rosen_torch

LOWER, UPPER = np.array([-2.0, -1.5, 1.2]), np.array([0.5, 3.0, 2.0])
SOLUTION = np.array([0.5, 0.9149252, 1.2])  # by L-BFGS-B to 1e-10
X0 = np.array([0.0, 0.0, 1.5])
QUICK = [
    p for p in problems() if p.n <= 30 and p.name not in ("SINEALI-20", "LOGROS", "MDHOLE", "HS38", "HS1", "CUT-WOOD")
]


def guarded(function, lower=LOWER, upper=UPPER):
    """Raise an error at points outside the bounds, as functions with logarithms may."""

    def wrapped(x, *rest):
        array = x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        if not np.all((array.real >= lower) & (array.real <= upper)):
            raise ValueError(f"outside: {array}")
        return function(x, *rest)

    return wrapped


# ---------------------------------------------------------------------- forms of bounds and of functions


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(LOWER, UPPER),
        list(zip(LOWER, UPPER, strict=True)),
        np.stack([LOWER, UPPER], axis=1),
        (LOWER, UPPER),
        (torch.tensor(LOWER), torch.tensor(UPPER)),
        [(None, 0.5), (-math.inf, math.inf), (1.2, None)],
        Bounds([-np.inf, -np.inf, 1.2], [0.5, np.inf, np.inf]),
    ],
)
def test_forms_of_bounds(bounds):
    res = sanc.minimize(rosen, X0, jac=rosen_der, hessp=rosen_hess_prod, bounds=bounds)
    assert res.success and np.allclose(res.x, SOLUTION, atol=1e-6)
    assert res.active.tolist() == [1, 0, -1]
    g = rosen_der(res.x)
    assert np.allclose(res.jac, g) and np.allclose(res.multipliers, [g[0], 0.0, g[2]])


@pytest.mark.parametrize("jac", ["2-point", "3-point", "cs", "exact", "differenced products"])
def test_no_evaluation_of_numpy_functions_leaves_the_bounds(jac):
    fun = guarded(lambda x: (100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2).sum())
    given = {"jac": jac}
    if jac in ("exact", "differenced products"):
        given = {"jac": guarded(rosen_der)} | ({"hessp": guarded(rosen_hess_prod)} if jac == "exact" else {})
    res = sanc.minimize(fun, X0, bounds=Bounds(LOWER, UPPER), **given)
    assert res.success and np.allclose(res.x, SOLUTION, atol=1e-5)


@pytest.mark.parametrize("hvp", ["auto", "finite-difference"])
def test_no_evaluation_of_torch_functions_leaves_the_bounds(hvp):
    res = sanc.minimize(guarded(rosen_torch), torch.tensor(X0), bounds=Bounds(LOWER, UPPER), hvp=hvp)
    assert res.success and np.allclose(res.x.numpy(), SOLUTION, atol=1e-6)
    assert res.active.dtype == torch.int64 and res.multipliers.dtype == torch.float64


def test_scipy_calls_with_bounds():
    res = scipy.optimize.minimize(
        rosen, X0, jac=rosen_der, bounds=Bounds(LOWER, UPPER), method=sanc.scipy_method, options={"gtol": 1e-9}
    )
    assert res.success and np.allclose(res.x, SOLUTION, atol=1e-6) and "bound-constrained" in res.message


def test_trees_have_bounds_of_their_structure():
    x0 = {"a": torch.zeros(3, dtype=torch.float64), "b": [torch.ones(2, 2, dtype=torch.float64)]}
    bounds = ({"a": None, "b": [torch.tensor([[0.0, -9.0], [-9.0, -9.0]])]}, {"a": 1.0, "b": [None]})
    res = sanc.minimize(lambda t: (t["a"] - 2).square().sum() + (t["b"][0] + 1).square().sum(), x0, bounds=bounds)
    assert res.success and res.x["a"].tolist() == [1.0] * 3
    assert torch.allclose(res.x["b"][0], torch.tensor([[0.0, -1.0], [-1.0, -1.0]], dtype=torch.float64))
    assert res.active["a"].tolist() == [1, 1, 1] and res.active["b"][0].tolist() == [[-1, 0], [0, 0]]


def test_finite_sums_have_bounds(rng):
    x, y = rng.standard_normal((60, 4)), (rng.random(60) < 0.5).astype(float)
    problem = sanc.problems.Logistic(x, y)
    res = sanc.minimize(problem, np.zeros(4), bounds=[(0.0, 0.05)] * 4)
    free = sanc.minimize(problem, np.zeros(4))
    assert res.success and np.any(res.active != 0) and not np.allclose(res.x, free.x)
    g = res.jac
    assert np.linalg.norm(np.clip(res.x - g, 0.0, 0.05) - res.x) <= 1e-8
    with pytest.raises(sanc.SancError, match="batch_size"):
        sanc.minimize(problem, np.zeros(4), bounds=[(0.0, 0.05)] * 4, batch_size=10)


@pytest.mark.parametrize("method", ["sanc", "arc", "scr", "cr", "crm", "ncd", "sgd"])
def test_every_method_stays_within_the_bounds(method):
    fun = guarded(rosen_torch)
    res = sanc.minimize(fun, torch.tensor(X0), bounds=Bounds(LOWER, UPPER), method=method, max_iter=15, certify=False)
    assert np.all((res.x.numpy() >= LOWER) & (res.x.numpy() <= UPPER)) and res.fun <= rosen(X0)


def test_two_arrays_for_two_variables_are_ambiguous():
    """Sides give the minimiser (2, 3), pairs (1, 3): arrays and tensors raise an error, and tuples are pairs."""
    fun, first, second = (lambda x: ((x - 9.0) ** 2).sum()), np.array([0.0, 1.0]), np.array([2.0, 3.0])
    x0 = torch.zeros(2, dtype=torch.float64) + 2.5
    calls = []
    for bounds in [(first, second), [first, second], (torch.tensor(first), torch.tensor(second)), (first, [2.0, 3.0])]:
        with pytest.raises(sanc.ArgumentError, match=r"sides or pairs.*scipy.optimize.Bounds\(lower, upper\)"):
            sanc.minimize(lambda x: calls.append(1), x0, bounds=bounds)
    assert not calls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.optimize.OptimizeWarning)
        for pairs in [np.stack([first, second]), [(0.0, 1.0), (2.0, 3.0)], [[0.0, 1.0], [2.0, 3.0]]]:
            assert sanc.minimize(fun, x0, bounds=pairs).x.tolist() == [1.0, 3.0]
        for sides in [Bounds(first, second), (None, second)]:
            assert sanc.minimize(fun, x0, bounds=sides).x.tolist() == [2.0, 3.0]


# ---------------------------------------------------------------------- steps


@pytest.mark.parametrize("name", ["BEALE", "HELICAL-VALLEY", "COSINE"])
def test_bounds_that_are_never_active_change_no_step(name):
    problem = zoo.BY_NAME[name]
    f, jac, _, hessp = zoo.numpy_functions(problem)
    given = dict(jac=jac, hessp=hessp, tol=problem.gtol)
    free = sanc.minimize(f, problem.x0, **given)
    res = sanc.minimize(f, problem.x0, bounds=[(-1e6, 1e6)] * problem.n, **given)
    assert np.array_equal(res.x, free.x) and res.nit == free.nit and res.nfev == free.nfev and res.nhev == free.nhev
    assert [r.sigma for r in res.history] == [r.sigma for r in free.history]


@pytest.mark.parametrize("problem", QUICK, ids=lambda problem: problem.name)
def test_small_problems_end_at_second_order_points(problem):
    """The check is independent: projected gradient, and λ_min of the dense Hessian of the free variables."""
    check(problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem", [p for p in problems() if p not in QUICK and p.name != "SINEALI-20"], ids=lambda problem: problem.name
)
def test_large_problems_end_at_second_order_points(problem):
    check(problem)


def check(problem):
    f, jac, _, hessp = zoo.numpy_functions(problem)
    fun, gradient = (guarded(call, problem.lower, problem.upper) for call in (f, jac))
    res = sanc.minimize(fun, problem.start, jac=gradient, hessp=hessp, bounds=problem.bounds, tol=problem.gtol)
    assert res.success, f"{res.status.name}: f = {res.fun}, {res.nit} iterations"
    assert projected_gradient(problem, res.x, jac(res.x)) <= problem.gtol
    assert lambda_min(problem, res.x) >= -1e-4
    lower, upper = res.x <= problem.lower, res.x >= problem.upper
    fixed = problem.lower == problem.upper
    assert np.array_equal(res.active != 0, lower | upper)
    assert np.all(res.multipliers[lower & ~fixed] >= -problem.gtol)
    assert np.all(res.multipliers[upper & ~fixed] <= problem.gtol)
    if problem.minimum is not None:
        assert res.fun == pytest.approx(problem.minimum, rel=1e-5, abs=1e-6)


def test_many_bounds_are_added_and_released_at_once():
    """A separable quadratic with 200 active bounds of 400, from a start at which the others are active."""
    n = 400
    target = np.where(np.arange(n) % 2 == 0, 2.0, -2.0)
    target[::4] = 0.5
    start = np.ones(n)
    res = sanc.minimize(
        lambda x: ((x - target) ** 2).sum(), start, jac=lambda x: 2 * (x - target), bounds=[(-1, 1)] * n
    )
    assert res.success and res.nit <= 3 and np.allclose(res.x, np.clip(target, -1.0, 1.0))


def test_a_rejected_truncated_step_costs_values_only():
    """cos over a narrow box: steps are truncated and rejected, and no product is made in between."""
    seen = []

    def fun(x):
        seen.append("f")
        return float(np.cos(40.0 * x).sum() + 20.0 * (x**2).sum())

    def hessp(x, v):
        seen.append("Hv")
        return -1600.0 * np.cos(40.0 * x) * v + 40.0 * v

    res = sanc.minimize(
        fun, [0.02, 0.03], jac=lambda x: -40.0 * np.sin(40.0 * x) + 40.0 * x, hessp=hessp, bounds=[(0, 0.35)] * 2
    )
    assert res.success
    for record in res.history:
        assert record.krylov_dim <= 2
    assert sum(record.krylov_dim for record in res.history) == res.nhev


# ---------------------------------------------------------------------- certificates


def test_the_certificate_is_that_of_the_free_variables(rng):
    a = rng.standard_normal((6, 6))
    hessian = a + a.T
    c = 5.0 * rng.standard_normal(6)
    res = sanc.minimize(
        lambda x: 0.5 * x @ hessian @ x + c @ x,
        np.zeros(6),
        jac=lambda x: hessian @ x + c,
        hessp=lambda x, v: hessian @ v,
        bounds=[(-1.0, 1.0)] * 6,
    )
    free = res.active == 0
    assert res.status is Status.SECOND_ORDER and np.any(~free)
    known = np.linalg.eigvalsh(hessian[np.ix_(free, free)])[0] if free.any() else math.inf
    assert res.certificate.lambda_min == pytest.approx(known) and known >= 0.0
    assert res.certificate.second_order and "bound-constrained" in res.message


def test_a_saddle_of_a_face_is_left_within_the_box():
    res = sanc.minimize(lambda x: 0.25 * (x[0] ** 2 - 1) ** 2 + x[1] * (1 + x[0] ** 2), torch.zeros(2).double(),
                        bounds=[(-0.5, 0.7), (0, None)])  # fmt: skip
    assert res.success and abs(float(res.x[0])) in (0.5, 0.7) and float(res.x[1]) == 0.0


def test_negative_curvature_into_the_box_is_followed_from_a_zero_multiplier():
    res = sanc.minimize(lambda x: (-(x**2) + x**4).sum(), torch.zeros(2).double(), bounds=[(0, None)] * 2)
    assert res.success and np.allclose(res.x.numpy(), math.sqrt(0.5), atol=1e-6)


def test_weakly_active_variables_are_named():
    res = sanc.minimize(lambda x: (x[0] - 1.0) ** 2 + (x[1] + 1.0) ** 2, torch.tensor([3.0, 3.0]).double(),
                        bounds=[(1.0, None), (0.0, None)])  # fmt: skip
    assert res.success and res.weakly_active.tolist() == [True, False]
    assert res.active.tolist() == [-1, -1] and "Weakly active" in res.message and "variable 0" in res.message


def test_a_corner_and_fixed_variables_need_no_products():
    res = sanc.minimize(lambda x: x.sum(), torch.tensor([0.0, 2.0, 0.0]).double(), bounds=[(0, 1), (2, 2), (0, 5)])
    assert res.success and res.nit == 0 and res.certificate.products == 0 and res.certificate.confidence == 1.0
    assert res.active.tolist() == [-1, -1, -1] and res.multipliers.tolist() == [1.0, 1.0, 1.0]


# ---------------------------------------------------------------------- units, resuming


@pytest.mark.parametrize(("c", "k"), [(1e20, 1.0), (1e-20, 1e5), (1.0, 1e-6), (2.0**40, 2.0**-30)])
def test_units_change_nothing(c, k):
    """c·f(x/k) with bounds k·l and k·u takes the same steps, times k."""

    def solve(c, k):
        return sanc.minimize(
            lambda x: c * rosen(x / k),
            k * X0,
            jac=lambda x: c / k * rosen_der(x / k),
            hessp=lambda x, v: c / k**2 * rosen_hess_prod(x / k, v),
            bounds=list(zip(k * LOWER, k * UPPER, strict=True)),
            tol=1e-8 * c / k,
        )

    base, other = solve(1.0, 1.0), solve(c, k)
    assert other.success and other.nit == base.nit and other.nhev == base.nhev
    assert np.allclose(other.x / k, base.x, atol=1e-9) and np.array_equal(other.active, base.active)
    assert np.allclose(other.multipliers * k / c, base.multipliers, atol=1e-5)


def test_scaling_of_tiny_and_huge_functions():
    res = sanc.minimize(
        lambda x: 1e200 * rosen(x), X0, jac=lambda x: 1e200 * rosen_der(x), bounds=Bounds(LOWER, UPPER), tol=1e192
    )
    assert res.success and np.allclose(res.x, SOLUTION, atol=1e-6)


@pytest.mark.parametrize("method", ["sanc", "crm"])
def test_a_run_with_bounds_resumes_bit_for_bit(method):
    states, points = [], []

    def keep(*, intermediate_result):
        states.append(intermediate_result.state)
        points.append(intermediate_result.x)

    given = dict(jac=rosen_der, hessp=rosen_hess_prod, bounds=Bounds(LOWER, UPPER), method=method, max_iter=12)
    whole = sanc.minimize(rosen, X0, callback=keep, **given)
    for k in (0, 2, 4):
        again = sanc.minimize(rosen, X0, resume=states[k], **given)
        assert np.array_equal(again.x, whole.x) and again.nit == whole.nit and again.nfev == whole.nfev


# ---------------------------------------------------------------------- starts and mistakes


def test_a_start_outside_is_projected_with_a_warning():
    with pytest.warns(scipy.optimize.OptimizeWarning, match="variables 0, 2"):
        res = sanc.minimize(guarded(rosen_torch), torch.tensor([5.0, 0.0, 9.0]).double(), bounds=Bounds(LOWER, UPPER))
    assert res.success and np.allclose(res.x.numpy(), SOLUTION, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sanc.minimize(rosen, LOWER, jac=rosen_der, bounds=Bounds(LOWER, UPPER))


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([(0, 1), (2, 1), (0, 1)], ["bounds[1] = (2, 1)", "lower ≤ upper"]),
        ([(0, 1), (math.nan, 1), (0, 1)], ["bounds[1] = (nan, 1)"]),
        ([(0, 1), (math.inf, None), (0, 1)], ["bounds[1] = (inf, inf)"]),
        ([(0, 1)] * 2, ["2 pairs for 3 variables"]),
        ([(0, 1, 2)] * 3, ["not pairs"]),
        ("abc", ["not pairs"]),
        ([("a", 1)] * 3, ["not pairs"]),
        (Bounds([0.0] * 2, [1.0] * 2), ["2 numbers on one side for 3 variables"]),
        ([(None, None), (7.0, 7.0), (None, None)], ["x0[1] = 0 differs from 7", "fix it"]),
    ],
)
def test_errors_name_the_bound_and_the_remedy(bounds, words):
    calls = []
    with pytest.raises(sanc.SancError) as caught:
        sanc.minimize(lambda x: calls.append(1), X0, jac=rosen_der, bounds=bounds)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not calls


@dataclass(frozen=True)
class Wrapped:
    """A model of the caller that builds what another one builds."""

    inner: object

    proposes = property(lambda self: self.inner.proposes)
    needs_products = property(lambda self: self.inner.needs_products)
    max_resolves = property(lambda self: self.inner.max_resolves)

    def build(self, here):
        return self.inner.build(here)

    def propose(self, here, subspace, sigma):
        return self.inner.propose(here, subspace, sigma)

    def paper_products(self, here, products):
        return self.inner.paper_products(here, products)


@pytest.mark.parametrize("wrap", [False, True])
def test_truncated_steps_without_a_stored_basis(wrap):
    """A basis that is not stored cannot give the model in the box; a product does."""
    model = sanc.CubicModel(krylov_dim=None, krylov_stop="forcing", first_radius=1.0, max_resolves=12)
    model = replace(model, lanczos="regenerate")
    given = {"model": Wrapped(model)} if wrap else {"lanczos": "regenerate"}
    bounds = Bounds(LOWER, UPPER)
    stored = sanc.minimize(rosen, X0, jac=rosen_der, bounds=bounds)
    found = sanc.minimize(rosen, X0, jac=rosen_der, bounds=bounds, **given)
    assert stored.success and found.success and np.array_equal(found.active, stored.active) and stored.active.any()
    np.testing.assert_allclose(found.x, stored.x, atol=1e-7)


LONGER_STEPS = []


class CountsLongerSteps(KrylovSubspace):
    def longer_step(self, here, sigma, trial_count):
        LONGER_STEPS.append(sigma)
        return super().longer_step(here, sigma, trial_count)


@dataclass(frozen=True)
class LongerSteps(Wrapped):
    def build(self, here):
        subspace = self.inner.build(here)
        return CountsLongerSteps(**{item.name: getattr(subspace, item.name) for item in fields(subspace)})


def test_longer_steps_of_a_subspace_are_tried_within_bounds():
    model = sanc.method_for().model
    LONGER_STEPS.clear()
    f, bounds = (lambda x: -1e3 * float(x.sum())), Bounds([-np.inf] * 2, [50.0] * 2)
    found = sanc.minimize(
        f, np.array([1.0, 2.0]), jac=lambda x: np.full(2, -1e3), bounds=bounds, model=LongerSteps(model)
    )
    assert LONGER_STEPS and np.array_equal(found.x, [50.0, 50.0])


def test_functions_that_are_not_finite_at_a_bound_are_named():
    res = sanc.minimize(lambda x: (x - torch.log(x)).sum(), torch.zeros(2).double(), bounds=[(0, 9)] * 2)
    assert res.status is Status.NOT_FINITE and "not finite at a bound" in res.message and "1e-8" in res.message
    inner = sanc.minimize(lambda x: (x - torch.log(x)).sum() + 10 * x[0], torch.full((2,), 5.0).double(),
                          bounds=[(0, 9)] * 2)  # fmt: skip
    assert inner.success and np.allclose(inner.x.numpy(), [1 / 11, 1.0], atol=1e-7)
