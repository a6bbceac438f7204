"""Models and rules for σ of the caller: those of the page, and models with the members of the protocol only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess, rosen_hess_prod

import sanc
from sanc.core.bounded.box_model import BoxStep
from sanc.core.pieces import Subspace
from sanc.core.record import Note
from sanc.extend import BaseSubspace, Spectrum, solve_cubic


@pytest.mark.parametrize("n", [2, 5])
def test_a_model_that_uses_the_dense_hessian_takes_the_steps_of_a_full_krylov_space(pieces, n):
    x0 = np.linspace(-1.2, 1.3, n)
    given = {"jac": rosen_der, "hess": rosen_hess, "certify": False, "max_iter": 12}
    dense = sanc.Method(name="dense", model=pieces.FullHessianModel(), escape=sanc.CheckedEscape())
    krylov = sanc.Method(name="full", model=sanc.CubicModel(krylov_dim=n, epsilon=1e-14, max_resolves=5),
                         escape=sanc.CheckedEscape())  # fmt: skip
    found, expected = (sanc.minimize(rosen, x0, method=method, **given) for method in (dense, krylov))
    assert found.x == pytest.approx(expected.x, abs=1e-6)
    assert [r.branch for r in found.history] == [r.branch for r in expected.history]
    assert found.nhev == n * found.nit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_the_page_makes_the_same_steps_with_tensors(pieces, dtype):
    f = lambda x: 0.25 * (x @ x) ** 2 - 0.5 * x[0] ** 2
    gradient = lambda x: (x @ x) * x - np.array([x[0], 0.0])
    tensors = sanc.minimize(f, torch.tensor([0.3, 0.4], dtype=dtype), model=pieces.FullHessianModel())
    arrays = sanc.minimize(f, np.array([0.3, 0.4]), jac=gradient, model=pieces.FullHessianModel())
    assert tensors.success and tensors.x.numpy() == pytest.approx(
        arrays.x, abs=1e-4 if dtype == torch.float32 else 1e-7
    )
    weights = torch.nn.Parameter(torch.tensor([0.3, 0.4], dtype=dtype))
    opt = sanc.SANC([weights], model=pieces.FullHessianModel(), minibatch=None)
    for _ in range(20):
        opt.step(lambda: f(weights))
    assert weights.detach().abs().numpy() == pytest.approx(np.abs(arrays.x), abs=1e-3)


def test_a_base_class_has_the_members_that_most_subspaces_need_not_have(pieces):
    @dataclass(frozen=True)
    class Line(BaseSubspace):
        sigma: float

    line = Line(2.0)
    assert (line.failure, line.allows_longer_steps, line.basis, line.longer_step(None, 1.0, 1)) == (
        "",
        False,
        None,
        None,
    )
    assert line.failed("a product is not finite") == Line(2.0, failure="a product is not finite")


def test_sigma_of_a_model_starts_in_the_units_of_f(pieces):
    """The iterates for f and 2^40 f are the same bit for bit, and the first σ is 1e-4 ‖g‖/ℓ²."""
    x0, f = np.array([-1.2, 1.0, 0.3]), 2.0**40
    given = {"model": pieces.FullHessianModel(), "max_iter": 15, "certify": False}
    plain = sanc.minimize(rosen, x0, jac=rosen_der, hess=rosen_hess, **given)
    scaled = sanc.minimize(
        lambda x: f * rosen(x), x0, jac=lambda x: f * rosen_der(x), hess=lambda x: f * rosen_hess(x), **given
    )
    assert np.array_equal(scaled.x, plain.x)
    assert [record.sigma for record in scaled.history] == [f * record.sigma for record in plain.history]
    g, norm = np.linalg.norm(rosen_der(x0)), np.linalg.norm(rosen_hess(x0), 2)
    length = min(g / norm, max(0.1 * np.linalg.norm(x0), rosen(x0) / g))
    assert plain.history[0].sigma == pytest.approx(1e-4 * g / length**2)
    given["sigma0"] = 3.0
    assert sanc.minimize(rosen, x0, jac=rosen_der, hess=rosen_hess, **given).history[0].sigma == 3.0


def test_a_model_reports_a_hessian_that_is_not_finite(pieces):
    hess = lambda x: rosen_hess(x) if x[0] < -0.8 else np.full((2, 2), np.nan)
    found = sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, hess=hess, model=pieces.FullHessianModel(), max_iter=8)
    assert [record.note for record in found.history[-3:]] == ["the Hessian is not finite"] * 3


def members(protocol):
    """The public members that a protocol declares."""
    return {name for name in vars(protocol) if not name.startswith("_")}


class BareSubspace:
    """A subspace with the members of the protocol and no others; `used` collects their names."""

    def __init__(self, inner, used):
        self._inner, self._used = inner, used

    def __getattr__(self, name):
        if name not in members(Subspace):
            raise AttributeError(f"{name} is not a member of the protocol Subspace")
        self._used.add(name)
        return getattr(self._inner, name)

    def __dir__(self):
        return members(Subspace)

    def failed(self, failure):
        return BareSubspace(self._inner.failed(failure), self._used)


@dataclass(frozen=True)
class BareModel:
    """A model of ours, whose subspaces have the members of the protocol alone."""

    inner: object
    used: set

    proposes = property(lambda self: self.inner.proposes)
    needs_products = property(lambda self: self.inner.needs_products)
    max_resolves = property(lambda self: self.inner.max_resolves)

    def build(self, here):
        return BareSubspace(self.inner.build(here), self.used)

    def propose(self, here, subspace, sigma):
        return self.inner.propose(here, subspace._inner, sigma)

    def paper_products(self, here, products):
        return self.inner.paper_products(here, products)


def rosen_product(x, v):
    """Products that are not finite in half of the plane, which the run enters after some iterations."""
    return rosen_hess_prod(x, v) if x[0] < -0.7 else np.full_like(v, np.nan)


def log_barrier(x):
    """Minimum inside the domain x > 0, which long steps leave."""
    return (x - 3.0 * x.log()).sum() + (x[0] * x[1] - 4.0) ** 2


START = torch.tensor([0.01, 9.0, 40.0], dtype=torch.float64)


BARE_RUNS = {
    "exact": {"fun": rosen, "x0": [-1.2, 1.0, 0.4], "jac": rosen_der, "hessp": rosen_hess_prod},
    "product not finite": {"fun": rosen, "x0": [-1.2, 1.0], "jac": rosen_der, "hessp": rosen_product},
    "value not finite": {"fun": log_barrier, "x0": START},
    "far minima": {"fun": lambda x: 1e-4 * (x**4).sum() - (x**2).sum() + 0.1 * x[0], "x0": 1e-4 * START},
    "saddle": {"fun": lambda x: (x[0] ** 2 - 1) ** 2 + x[1] ** 2 * (1 + x[0]), "x0": START * 0.0},
}


def comparable(res):
    """All records without their times, as a text in which NaN equals NaN."""
    return repr([replace(record, seconds=0.0) for record in res.history])


@pytest.mark.parametrize(
    "name", ["sanc", "ncd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scr", "arc", "cr", "crm"))]
)
@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_acceptance_and_escape_rules_use_members_of_the_protocol_only(name, preset):
    """A method takes the same steps with a subspace that has exactly the members of the protocol."""
    method, used, notes = sanc.method_for(name, preset), set(), set()
    bare = replace(method, model=BareModel(method.model, used))
    for given in BARE_RUNS.values():
        expected, found = (sanc.minimize(method=m, max_iter=20, certify=False, **given) for m in (method, bare))
        assert comparable(found) == comparable(expected) and found.status is expected.status
        notes |= {record.note for record in found.history}
    assert used <= members(Subspace)
    if (name, preset) == ("sanc", "robust"):
        assert used == members(Subspace) - {
            "ritz_vector",
            "failed",
            "basis",
        }  # `failed` is its own, `basis` is for bounds
        assert any("product" in note for note in notes) and Note.TRIAL_NOT_FINITE in notes
    if (name, preset) == ("ncd", "robust"):
        assert "ritz_vector" in used


@dataclass(frozen=True)
class SecantModel:
    """Minimises the cubic model along −g with B = c·I: steps without Hessian products."""

    page: ModuleType
    curvature: float = 10.0

    proposes, needs_products, max_resolves = True, False, 10

    def build(self, here):
        spectrum, basis = Spectrum(np.array([self.curvature]), np.eye(1)), here.space.tensor(here.g)[:, None]
        gradient = np.array([here.grad_norm])
        space, basis = here.space, basis / here.grad_norm
        return self.page.AllDirections(here.state.sigma, here.units, space, basis, spectrum, gradient)

    def propose(self, here, subspace, sigma):
        return solve_cubic(subspace.spectrum, subspace.gradient, sigma)


def test_a_model_may_propose_steps_without_hessian_products(pieces):
    A = np.diag([1.0, 3.0, 8.0])
    method = sanc.Method(name="secant", model=SecantModel(pieces), escape=sanc.Stay())
    x0 = np.array([3.0, -2.0, 1.0])
    res = sanc.minimize(lambda x: 0.5 * x @ A @ x, x0, jac=lambda x: A @ x, method=method, certify=False, tol=1e-6)
    assert res.nhev == 0 and np.linalg.norm(A @ res.x) <= 1e-6
    first = res.history[0]
    c, sigma, norm = 10.0, first.sigma, np.linalg.norm(A @ x0)
    assert first.step_norm == pytest.approx((math.sqrt(c * c + 4 * sigma * norm) - c) / (2 * sigma))  # c t + σ t² = ‖g‖


@pytest.mark.parametrize("build", [lambda page: page.FullHessianModel(), SecantModel], ids=["dense", "secant"])
def test_truncated_steps_of_any_model_have_the_predicted_decrease_of_a_quadratic(pieces, build):
    """f is quadratic, so that f(x) − f(x + s) − predicted decrease is (σ/3)‖s‖³ for every step that bounds truncate."""
    A, b = np.array([[4.0, 1.5, 0.0], [1.5, 3.0, -1.0], [0.0, -1.0, 5.0]]), np.array([6.0, -9.0, 1.0])
    seen = []

    class Watched(sanc.RatioTest):
        def __call__(self, here, subspace, step, trial, trial_count):
            if isinstance(step, BoxStep) and step.truncated:
                actual = here.objective - here.evaluate(trial)
                assert here.oracle.box.contains(torch.as_tensor(trial)) and step.decrease > 0.0
                assert step.norm == pytest.approx(np.linalg.norm(trial - here.x))
                assert actual - step.decrease == pytest.approx(step.sigma / 3 * step.norm**3, rel=1e-6, abs=1e-12)
                seen.append(step)
            return super().__call__(here, subspace, step, trial, trial_count)

    method = sanc.Method(name="own", model=build(pieces), acceptance=Watched(), escape=sanc.CheckedEscape())
    bounds = scipy.optimize.Bounds([-1.0, -0.5, -0.1], [0.7, 1.0, 0.05])
    given = {"jac": lambda x: A @ x - b, "hess": lambda x: A, "bounds": bounds}
    res = sanc.minimize(lambda x: 0.5 * x @ A @ x - b @ x, np.zeros(3), method=method, **given)
    expected = scipy.optimize.minimize(
        lambda x: 0.5 * x @ A @ x - b @ x, np.zeros(3), jac=given["jac"], bounds=bounds, method="L-BFGS-B", tol=1e-14
    )
    assert seen and res.success and res.x == pytest.approx(expected.x, abs=1e-6)


class BareSigma:
    """A rule for σ with the one member that a method requires."""

    def __init__(self, **settings):
        self._inner = sanc.SigmaUpdate(**settings)

    def rule(self, eps, *, exact=False):
        return self._inner.rule(eps, exact=exact)


@pytest.mark.parametrize("rule", ["paper", "interpolate"])
@pytest.mark.parametrize("sigma0", [None, 1.0])
def test_a_rule_for_sigma_needs_no_more_than_its_method(rule, sigma0):
    """Also where a run stalls, since f is noisy, and where f is scaled, since its derivatives would underflow."""
    noisy = lambda x: rosen(x) + 1e-3 * math.sin(1e8 * x[0])
    tiny = lambda x: 1e-300 * rosen(x)
    for fun, jac in ((rosen, rosen_der), (noisy, rosen_der), (tiny, lambda x: 1e-300 * rosen_der(x))):
        results = []
        for sigma in (sanc.SigmaUpdate, BareSigma):
            method = replace(sanc.method_for("sanc"), sigma=sigma(sigma0=sigma0, sigma_rule=rule))
            results.append(sanc.minimize(fun, [-1.2, 1.0], jac=jac, method=method, max_iter=60))
        expected, found = results
        assert np.array_equal(found.x, expected.x) and found.status is expected.status and found.nfev == expected.nfev


def test_a_class_of_rules_for_sigma_replaces_ours(pieces):
    """σ is half the last one after an accepted step, and twice it after each rejected trial."""
    given = {"jac": rosen_der, "preset": "paper", "max_iter": 12, "escape": sanc.Stay()}
    found = sanc.minimize(rosen, [-1.2, 1.0], sigma=pieces.DoublingSigma(), **given)
    ratios = [b.sigma / a.sigma for a, b in pairwise(found.history)]
    assert ratios == [2.0 if a.branch is sanc.Branch.STAYED else 0.5 for a, _ in pairwise(found.history)]
    assert found.history[0].sigma == 1.0 and {0.5, 2.0} == set(ratios)


def test_the_initial_rule_for_sigma_has_the_settings_of_the_method():
    for method in (sanc.Method(), sanc.method_for()):
        assert method.initial_sigma_rule == method.sigma.rule(0.0)
    assert sanc.method_for().initial_sigma_rule.measures_sigma0 and sanc.method_for("cr").initial_sigma_rule.sigma0 == 5


def test_what_is_no_subspace_is_named(monkeypatch):
    monkeypatch.setattr(sanc.CubicModel, "build", lambda self, here: object())
    with pytest.raises(
        sanc.ArgumentTypeError,
        match=r"build\(\) returned <object .*: return an object with the members",
    ):
        sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod)


def test_what_a_subspace_lacks_is_named(pieces):
    class Incomplete:
        sigma, products, problem, release = 1.0, 2, "", None

    class Model(pieces.FullHessianModel):
        def build(self, here):
            return Incomplete()

    with pytest.raises(sanc.ArgumentTypeError, match=r"which has no allows_longer_steps, units, .*: return an object"):
        sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, model=Model())


@pytest.mark.parametrize("bounds", [None, [(-2.0, 2.0)] * 2])
def test_a_model_may_count_its_products_as_the_paper_does(pieces, bounds):
    """By default all count: per step one gradient and n products. The method of the page's model is optional."""

    class Counted(pieces.FullHessianModel):
        def paper_products(self, here, products):
            return 10 * products

    records = []
    for model in (pieces.FullHessianModel(), Counted()):
        sanc.minimize(
            lambda x: 0.25 * (x @ x) ** 2 - 0.5 * x[0] ** 2,
            np.array([0.3, 0.4]),
            jac=lambda x: (x @ x) * x - np.array([x[0], 0.0]),
            model=model,
            bounds=bounds,
            max_iter=1,
            callback=lambda intermediate_result: records.append(intermediate_result.record),
        )
    assert [record.calls.paper_calls for record in records] == [1 + 2, 1 + 10 * 2]
