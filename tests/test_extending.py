"""The pieces of docs/extending.md, and pieces of other kinds, against independent computations."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess, rosen_hess_prod

import sanc
from driving import flat
from sanc.core import ratio
from sanc.core.bounded.box_model import BoxStep
from sanc.core.method import _REQUIRED
from sanc.core.pieces import Model, Subspace
from sanc.core.record import Note
from sanc.core.sigma import SigmaRule
from sanc.extend import BaseSubspace, Spectrum, solve_cubic
from sanc.minimisation.objective import build_oracle

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def pieces():
    """The classes of the page."""
    page = sys.modules["extending"] = ModuleType("extending")  # dataclasses look their module up
    for block in BLOCKS:
        exec(block, page.__dict__)
    return page


def test_there_are_eight_examples_of_at_most_forty_lines():
    assert len(BLOCKS) == 8
    for block in BLOCKS:
        classes = block[: re.search(r"\n\n\n(?!class |@dataclass)(?=\w+[ ,]|print)", block).start()]
        code = [line for line in classes.splitlines() if line.strip() and not line.startswith(("import", "from"))]
        assert len(code) <= 40, block
        assert "sanc.core" not in block  # public names only


# ---------------------------------------------------------------------- an acceptance rule


def test_an_acceptance_rule_that_looks_back_goes_uphill_and_arrives(pieces):
    f = lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    found = sanc.minimize(f, x0, acceptance=pieces.Nonmonotone())
    assert found.success and float((found.x - 1).norm()) < 1e-6
    values = [record.value for record in found.history]
    means, weight = [values[0]], 1.0
    for before, after in pairwise(values):
        if after != before:  # accepted: below the mean of the values so far
            assert after < max(means[-1], before)
            heavier = 0.85 * weight + 1.0
            means.append((0.85 * weight * means[-1] + after) / heavier)
            weight = heavier


def test_the_state_of_an_acceptance_rule_is_saved_and_restored(pieces):
    states = []
    keep = lambda intermediate_result: states.append(copy.deepcopy(intermediate_result.state))
    given = {"jac": rosen_der, "hessp": rosen_hess_prod, "acceptance": pieces.Nonmonotone(), "max_iter": 20}
    whole = sanc.minimize(rosen, [-1.2, 1.0, 0.7], callback=keep, **given)
    for state in states[:10]:
        assert "mean" in state["numbers"]["acceptance_state"] or state is states[0]
        assert np.array_equal(sanc.minimize(rosen, [-1.2, 1.0, 0.7], resume=state, **given).x, whole.x)


@dataclass(frozen=True)
class Remembers(sanc.RatioTest):
    """The ratio test, with one entry in its state."""

    entry: object = 0.0

    def __call__(self, here, subspace, step, trial, trials):
        assert all(type(entry) is float and entry == self.entry for entry in here.state.acceptance_state.values())
        return replace(super().__call__(here, subspace, step, trial, trials), acceptance_state={"entry": self.entry})


@pytest.mark.parametrize("entry", [3, True, np.float32(0.1), np.int64(2), Fraction(1, 2)], ids=repr)
@pytest.mark.parametrize("bounds", [None, [(-2.0, 0.5)] * 2])
def test_every_real_number_in_the_state_of_a_rule_is_saved_and_restored(entry, bounds):
    states = []
    keep = lambda intermediate_result: states.append(copy.deepcopy(intermediate_result.state))
    given = {"jac": rosen_der, "hessp": rosen_hess_prod, "bounds": bounds, "acceptance": Remembers(entry=entry)}
    whole = sanc.minimize(rosen, [-1.2, 0.4], callback=keep, max_iter=8, **given)
    resumed = sanc.minimize(rosen, [-1.2, 0.4], resume=states[2], max_iter=8, **given)
    assert json.loads(states[2]["numbers"]["acceptance_state"]) == {"entry": float(entry)}
    assert np.array_equal(resumed.x, whole.x)


@pytest.mark.parametrize("entry", ["text", [1.0, 2.0], np.array(1.0), np.zeros(3), None])
def test_a_state_that_cannot_be_saved_is_an_error(entry):
    with pytest.raises(
        sanc.ArgumentTypeError, match=r"acceptance_state\['entry'\] = .* of Remembers\(.*: pass a number, or a"
    ):
        sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, acceptance=Remembers(entry=entry))


def test_an_acceptance_rule_trains_and_resumes(pieces, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(60, 4, dtype=torch.float64)

    def build():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
        return model, sanc.SANC(model.parameters(), preset="paper", acceptance=pieces.Nonmonotone(), seed=0)

    def train(model, opt, steps):
        for _ in range(steps):
            opt.step(lambda: (model(x)[:, 0] - x.prod(1)).square().mean())
        return flat(model)

    model, opt = build()
    first = train(model, opt, 6)
    torch.save((model.state_dict(), opt.state_dict()), tmp_path / "state.pt")
    whole = train(model, opt, 6)
    again, resumed = build()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert not torch.equal(first, whole) and torch.equal(train(again, resumed, 6), whole)


# ---------------------------------------------------------------------- an escape rule, and a model


def test_an_escape_rule_moves_to_the_lower_side(pieces):
    """f = x² − y² + y⁴ + ay has its lower minimum at y < 0 if a > 0: there the first step along y leads."""
    for a in (0.5, -0.5):
        f = lambda x, a=a: x[0] ** 2 - x[1] ** 2 + x[1] ** 4 + a * x[1] ** 3
        found = sanc.minimize(f, torch.zeros(2, dtype=torch.float64), method="ncd", escape=pieces.BothSides())
        expected = scipy.optimize.minimize_scalar(lambda y, a=a: -(y**2) + y**4 + a * y**3, bracket=(0, -a, -4 * a))
        assert found.success and found.fun == pytest.approx(expected.fun, abs=1e-9)
        first = found.history[0]
        assert first.branch is sanc.Branch.CURVATURE and first.trials % 2 == 0 and first.curvature_share == 1.0


def test_an_escape_rule_follows_the_gradient_and_stays_at_a_minimum(pieces):
    f = lambda x: (x**2).sum()
    found = sanc.minimize(f, torch.ones(2, dtype=torch.float64), method="ncd", escape=pieces.BothSides(), max_iter=1)
    assert found.history[0].branch is sanc.Branch.GRADIENT and float(found.x.norm()) < 1e-15
    rough = lambda x: (x * x).sum() + (x != 1.0).any() * 10.0  # lower at the start than on either side
    stayed = sanc.minimize(
        rough, torch.ones(2, dtype=torch.float64), method="ncd", escape=pieces.BothSides(), max_iter=1
    )
    assert (stayed.history[0].note, stayed.history[0].trials) == ("f is lower on neither side", 40)


@dataclass(frozen=True)
class NewtonOrNothing:
    """Stays, and counts how often it was asked."""

    needs_products = False

    def __call__(self, here, subspace, sigma, *, model_proposes):
        return sanc.Decision(here.sigma_rule.after_failure(sigma), note="stayed on purpose", zero_step=True)


def test_an_escape_rule_decides_what_follows_a_rejection():
    """A step that is always rejected: the rule's σ and note are what the iteration reports."""
    reject = sanc.RatioTest(eta1=0.999999, eta2=0.9999999)
    found = sanc.minimize(
        rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, max_iter=4, certify=False,
        method=sanc.Method(name="own", acceptance=reject, escape=NewtonOrNothing()),
    )  # fmt: skip
    stayed = [record for record in found.history if record.note == "stayed on purpose"]
    assert stayed and all(record.branch is sanc.Branch.STAYED for record in stayed)
    followed = [(a, b) for a, b in pairwise(found.history) if a in stayed]
    assert followed and all(b.sigma == 4 * a.sigma for a, b in followed)  # γ by the ratio test, γ by the rule


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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"acceptance": sanc.CheckedEscape()},
            r"acceptance\(here, subspace, step, trial, trials\).*sanc.RatioTest\(\)",
        ),
        ({"acceptance": lambda here, step: None}, "too many positional arguments.*RatioTest"),
    ],
)
def test_a_rule_that_cannot_be_called_is_named_before_the_run(options, match):
    with pytest.raises(sanc.ArgumentTypeError, match=match):
        sanc.minimize(lambda x: x @ x, torch.ones(2), **options)


def test_an_escape_rule_without_its_keyword_is_named_before_the_run():
    class Early:
        needs_products = False

        def __call__(self, here, subspace, sigma):
            return sanc.Decision(sigma)

    with pytest.raises(sanc.ArgumentTypeError, match=r"model_proposes=….*'model_proposes'"):
        sanc.minimize(lambda x: x @ x, torch.ones(2), escape=Early())


@pytest.mark.parametrize("returned", [None, 1])
def test_a_metric_without_the_state_of_every_parameter_is_named_at_the_first_step(returned):
    class Sign(sanc.Preconditioner):
        def update(self, g, weight):
            return g.sign()

        def apply(self, g):
            return g.sign()

        if returned is not None:

            def state(self):
                return [{"v": torch.zeros(1)}] * returned

    @dataclass(frozen=True)
    class SignMetric:
        memory: float = 0.9
        refresh: int = 10

        def couples(self, shape):
            return False

        def create(self, shapes, like, reduce=None):
            return Sign()

    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    opt = sanc.SANC(weights, metric=SignMetric(), curvature=False)
    match = "Sign has no state" if returned is None else r"state of 1 parameter.*has 2"
    with pytest.raises(sanc.ArgumentTypeError, match=match):
        opt.step(lambda: sum(w.square().sum() for w in weights))
    assert all(bool((w == 1.0).all()) for w in weights)


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

    def paper_products(self, here, products):
        return 0


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
        def __call__(self, here, subspace, step, trial, trials):
            if isinstance(step, BoxStep) and step.truncated:
                actual = here.objective - here.evaluate(trial)
                assert here.oracle.box.contains(torch.as_tensor(trial)) and step.decrease > 0.0
                assert step.norm == pytest.approx(np.linalg.norm(trial - here.x))
                assert actual - step.decrease == pytest.approx(step.sigma / 3 * step.norm**3, rel=1e-6, abs=1e-12)
                seen.append(step)
            return super().__call__(here, subspace, step, trial, trials)

    method = sanc.Method(name="own", model=build(pieces), acceptance=Watched(), escape=sanc.CheckedEscape())
    bounds = scipy.optimize.Bounds([-1.0, -0.5, -0.1], [0.7, 1.0, 0.05])
    given = {"jac": lambda x: A @ x - b, "hess": lambda x: A, "bounds": bounds}
    res = sanc.minimize(lambda x: 0.5 * x @ A @ x - b @ x, np.zeros(3), method=method, **given)
    expected = scipy.optimize.minimize(
        lambda x: 0.5 * x @ A @ x - b @ x, np.zeros(3), jac=given["jac"], bounds=bounds, method="L-BFGS-B", tol=1e-14
    )
    assert seen and res.success and res.x == pytest.approx(expected.x, abs=1e-6)


# ---------------------------------------------------------------------- a rule for σ, and incomplete pieces


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model", {"build", "propose", "paper_products", "proposes", "needs_products", "max_resolves"}),
        ("escape", {"needs_products"}),
        ("sigma", {"rule"}),
        ("minibatch", {item.name for item in fields(sanc.Minibatch)}),
    ],
)
def test_every_member_of_a_piece_is_required(name, expected):
    required, _ = _REQUIRED[name]
    assert set(required) - {"__call__"} == expected


@pytest.mark.parametrize("name", ["model", "acceptance", "escape", "sigma", "minibatch"])
def test_a_piece_without_one_of_its_members_is_rejected(name):
    required, _ = _REQUIRED[name]
    for lacking in required:
        given = {member: lambda *_: None for member in required if member != lacking}
        with pytest.raises(sanc.SancError, match=f"{name} = .* cannot be used, since it has no {lacking}: pass"):
            sanc.Method(**{name: type("Incomplete", (), given)()})
    with pytest.raises(sanc.SancError, match=f"{name} = .* cannot be used, since it is a class: pass"):
        sanc.Method(**{name: type("Complete", (), dict.fromkeys(required, lambda *_: None))})


# ---------------------------------------------------------------------- a metric


SIZES = [(3, 2), (4,), (1,)]


def learnt(pieces, shapes, gs):
    """The metric after these gradients, and its last direction."""
    metric = pieces.LowRank(rank=2).create(shapes, torch.zeros(1, dtype=torch.float64))
    for k, g in enumerate(gs):
        direction = metric.update(torch.from_numpy(g), max(0.05, 1 / (k + 1)))
        if k % 5 == 0:
            metric.refresh()
    return metric, direction.numpy()


@pytest.fixture(scope="module")
def gradients():
    rng = np.random.default_rng(0)
    return rng.standard_normal((30, 11)) + np.outer(rng.standard_normal(30), np.arange(11.0))


def test_each_block_of_the_metric_is_a_diagonal_plus_a_matrix_of_low_rank(pieces, gradients):
    """M = D^½ (I + Q(√(I + C) − I)Qᵀ) D^½ as a dense matrix, with the diagonal D that is defined by running means."""
    metric, direction = learnt(pieces, SIZES, gradients)
    square = np.zeros(11)
    for k, g in enumerate(gradients):
        square += max(0.05, 1 / (k + 1)) * (g**2 - square)
    for rows, (_, basis, image) in zip((slice(0, 6), slice(6, 10), slice(10, 11)), metric.blocks, strict=True):
        Q, rank = basis.numpy(), basis.shape[1]
        C = np.diag((basis * image).sum(0).clamp(min=0).numpy())
        half = np.sqrt(np.sqrt(square[rows]) + 1e-6 * np.sqrt(square[rows].max()))
        assert Q.T @ Q == pytest.approx(np.eye(rank), abs=1e-6)
        M = half[:, None] * (np.eye(len(half)) + Q @ (np.sqrt(np.eye(rank) + C) - np.eye(rank)) @ Q.T) * half
        assert M @ direction[rows] == pytest.approx(gradients[-1][rows], rel=1e-6, abs=1e-6)
        assert np.linalg.eigvalsh(M).min() > 0 and C[0, 0] > len(half) / 3  # the gradients are almost parallel


def test_the_metric_depends_neither_on_units_nor_on_who_holds_the_other_parameters(pieces, gradients):
    _, direction = learnt(pieces, SIZES, gradients)
    for shapes, rows in (([SIZES[0]], slice(0, 6)), (SIZES[1:], slice(6, 11))):
        assert np.array_equal(learnt(pieces, shapes, gradients[:, rows])[1], direction[rows])
    assert np.array_equal(learnt(pieces, SIZES, 2.0**-60 * gradients)[1], direction)
    assert np.array_equal(learnt(pieces, SIZES, 0.0 * gradients)[1], np.zeros(11))


@pytest.mark.parametrize("style", ["loss", "gradients"])
def test_a_metric_trains_and_resumes_bit_for_bit(pieces, style, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(400, 10)
    y = x[:, :3].argmax(1)

    def build():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        return model, sanc.SANC(model.parameters(), metric=pieces.LowRank(rank=3), seed=0)

    def train(model, opt, first, last):
        for k in range(first, last):
            loss = lambda k=k: torch.nn.functional.cross_entropy(
                model(x[40 * (k % 10) :][:40]), y[40 * (k % 10) :][:40]
            )
            if style == "loss":
                value = opt.step(loss)
            else:
                opt.zero_grad()
                value = loss()
                value.backward()
                opt.step()
        return float(value.detach()), flat(model)

    model, opt = build()
    start, _ = train(model, opt, 0, 1)
    train(model, opt, 1, 60)
    torch.save((model.state_dict(), opt.state_dict()), tmp_path / "state.pt")
    last, whole = train(model, opt, 60, 120)
    again, resumed = build()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert torch.equal(train(again, resumed, 60, 120)[1], whole)
    assert last < 0.9 * start and math.isfinite(last)


def test_a_state_of_another_metric_is_rejected(pieces):
    torch.manual_seed(0)
    states = {}
    for name, metric in (("ours", sanc.Diagonal()), ("theirs", pieces.LowRank())):
        p = torch.nn.Parameter(torch.ones(3, 2))
        opt = sanc.SANC([p], metric=metric, seed=0)
        for _ in range(3):
            p.grad = torch.randn(3, 2)
            opt.step()
        states[name] = opt.state_dict()
    with pytest.raises(sanc.ArgumentError, match=r"metric of parameter 0 has the tensors .* another metric. Construct"):
        opt.load_state_dict(states["ours"])


@pytest.mark.parametrize(
    ("method", "returned", "match"),
    [
        ("create", None, r"create\(\) returned None. Return an object of a subclass of sanc.Preconditioner"),
        ("update", torch.zeros(3), r"update\(\) of its preconditioner returned \(3,\) for a gradient of shape \(6,\)"),
        ("update", 1.0, r"returned 1.0 for a gradient of shape \(6,\). Return M⁻¹g"),
    ],
)
@pytest.mark.parametrize("style", ["gradients", "closures"])
def test_what_a_metric_may_not_return_is_named_and_changes_nothing(monkeypatch, method, returned, match, style):
    owner = sanc.Diagonal if method == "create" else type(sanc.Diagonal().create([(2, 3)], torch.zeros(6)))
    monkeypatch.setattr(owner, method, lambda *arguments: returned)
    weights = torch.nn.Parameter(torch.ones(2, 3))
    opt = sanc.SANC([weights], metric=sanc.Diagonal(), curvature=False)
    closures = [lambda: weights.square().sum()] if style == "closures" else []
    if not closures:
        weights.square().sum().backward()
    with pytest.raises(sanc.ArgumentTypeError, match=match):
        opt.step(*closures)
    assert torch.equal(weights, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sigma": math.nan}, "returned sigma = nan: return a finite number"),
        ({"sigma": -1.0}, "returned sigma = -1.0"),
        ({"sigma": math.inf}, "returned sigma = inf"),
        (
            {"point": np.zeros(3)},
            r"returned point = array\(.*: return a vector like x, which is ndarray of shape \(2,",
        ),
        ({"point": torch.zeros(2)}, r"returned point = tensor\(.*: return a vector like x"),
    ],
)
def test_what_a_rule_may_not_return_is_named(change, match):
    def rule(here, subspace, step, trial, trials):
        return sanc.Decision(**({"sigma": 1.0, "point": trial} | change))

    with pytest.raises(sanc.SancError, match=match):
        sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, acceptance=rule)


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


@pytest.mark.parametrize("name", ["losses", "derivatives", "second_derivatives"])
def test_the_shape_of_a_loss_of_the_margins_is_checked(monkeypatch, name):
    problem = sanc.problems.Logistic(np.eye(3), np.array([1, 0, 1]))
    monkeypatch.setattr(type(problem), name, lambda self, z: np.float64(1.0))
    with pytest.raises(sanc.ArgumentError, match=rf"Logistic.{name} returned an array of shape \(\): .* \(3,\)"):
        sanc.minimize(problem, np.zeros(3))


def test_an_oracle_without_space_or_counters_is_named(pieces):
    class Bare(pieces.Quartic):
        def __init__(self):
            pass

    with pytest.raises(sanc.ArgumentTypeError, match=r"has no space and no meter: set self\.space = sanc\.extend\."):
        sanc.minimize(Bare(), np.ones(3))


def test_an_oracle_that_returns_no_operator_is_named(pieces, monkeypatch):
    monkeypatch.setattr(pieces.Quartic, "hessian", lambda self, x: None)
    with pytest.raises(sanc.ArgumentTypeError, match=r"hessian\(\) of .* returned None: return a sanc.extend.Operator"):
        sanc.minimize(pieces.Quartic(np.ones(3)), np.full(3, 2.0))


@dataclass(frozen=True, kw_only=True)
class ConstantSize(sanc.StepSize):
    """Steps of one size, in units of a typical weight."""

    def size(self, state):
        return state.parameter_unit * self.scale


def test_a_step_size_of_the_caller_replaces_ours():
    """It is that of settings without growth, decay and distance bound."""
    runs = []
    for step in (ConstantSize(scale=0.02), sanc.StepSize(scale=0.02, warm_up=0, slow_down=0, distance=0.0)):
        torch.manual_seed(0)
        weights, opt_batches = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(30, 8, 4)
        opt = sanc.SANC([weights], step_size=step, curvature=False, seed=0)
        for batch in opt_batches:
            opt.step(lambda batch=batch: (batch @ weights).square().mean())
        runs.append(weights.detach().clone())
    assert torch.equal(*runs)


def test_a_step_size_of_the_page_follows_its_closed_form(pieces):
    """From one restart to the next η falls from its largest value to nearly zero."""
    scale = pieces.Cosine(scale=0.1, period=8)
    state = sanc.extend.MinibatchState(0, parameter_unit=2.0, eta_reduction=0.5)
    found = [scale.size(replace(state, steps=k)) for k in range(17)]
    assert found == pytest.approx([0.1 * math.cos(math.pi * (k % 8) / 16) ** 2 for k in range(17)], rel=1e-12)
    assert sanc.SANC([torch.nn.Parameter(torch.ones(2))], step_size=scale, period=4).param_groups


@dataclass(frozen=True)
class Lenient:
    """A rule with a setting that σ has, too, and one that only it has."""

    gamma: float = 3.0
    window: int = 5

    def __call__(self, here, subspace, step, trial, trials):
        return sanc.Decision(here.sigma_rule.after_failure(step.sigma))


def test_an_option_that_two_pieces_have_is_rejected_if_one_is_of_the_caller():
    for options, match in (
        (
            {"gamma": 2.5},
            r"gamma = 2.5 is a setting of Lenient and SigmaUpdate: set it .* acceptance=Lenient\(gamma=2.5\)",
        ),
        ({"windw": 3}, r"option 'windw' .* did you mean 'window'"),
    ):
        with pytest.raises(sanc.ArgumentError, match=match):
            sanc.method_for(acceptance=Lenient(), **options)
    method = sanc.method_for(acceptance=Lenient(gamma=4.0), window=7)
    assert (method.acceptance.gamma, method.acceptance.window, method.sigma.gamma) == (4.0, 7, 2.0)


def test_a_class_in_place_of_a_piece_is_named_with_its_own_remedy():
    with pytest.raises(sanc.ArgumentTypeError, match=r"since it is a class: pass an object of it, such as Lenient\(\)"):
        sanc.method_for(acceptance=Lenient)


class PlainMetric:
    """A metric that is no dataclass, so that its `repr` contains its address."""

    memory, refresh = 0.9, 10

    def couples(self, shape):
        return False

    def create(self, shapes, like, reduce=None):
        return sanc.Diagonal().create(shapes, like, reduce)


def test_a_metric_without_repr_resumes_without_a_warning(recwarn):
    def build():
        weights = torch.nn.Parameter(torch.ones(3))
        return sanc.SANC([weights], metric=PlainMetric(), curvature=False, seed=0), weights

    (opt, weights), (resumed, _) = build(), build()
    opt.step(lambda: weights.square().sum())
    recwarn.clear()
    resumed.load_state_dict(opt.state_dict())
    assert not recwarn.list


def test_a_setting_of_our_metric_beside_one_of_the_caller_names_the_metric():
    with pytest.raises(
        sanc.ArgumentError, match=r"memory = 0.9 is a setting of Kronecker, and sanc has PlainMetric as"
    ):
        sanc.method_for(metric=PlainMetric(), memory=0.9)


@dataclass(frozen=True, kw_only=True)
class RemembersPoint(sanc.RatioTest):
    """Saves the last trial point and a count."""

    def __call__(self, here, subspace, step, trial, trials):
        decision = super().__call__(here, subspace, step, trial, trials)
        count = here.state.acceptance_state.get("count", 0.0)
        return replace(decision, acceptance_state={"last": trial, "count": count + 1.0})


@pytest.mark.parametrize("options", [{}, {"minibatch": None}, {"preset": "paper"}], ids=repr)
def test_vectors_of_a_rule_are_saved_by_optimisers(options, tmp_path):
    def build():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
        opt = sanc.SANC(model.parameters(), acceptance=RemembersPoint(), seed=0, **options)
        return model, opt, lambda: (model(x)[:, 0] - x.prod(1)).square().mean()

    x = torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, opt, loss = build()
    for _ in range(4):
        opt.step(loss)
    saved = opt._driver.iteration.vectors()
    torch.save((model.state_dict(), opt.state_dict()), tmp_path / "state.pt")
    again, resumed, _ = build()
    for part, state in zip((again, resumed), torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    restored = resumed._driver.iteration.vectors()
    assert saved.keys() == restored.keys() and any(name.endswith("last") for name in saved)
    assert all(torch.equal(saved[name], restored[name]) for name in saved)


def test_vectors_of_a_rule_are_saved_by_runs_on_samples(pieces):
    X = np.random.default_rng(0).standard_normal((80, 3))
    problem, states, seen = pieces.Cauchy(X, X @ np.ones(3)), [], []
    given = {"acceptance": RemembersPoint(), "batch_size": 80, "seed": 0, "max_iter": 6}

    def keep(intermediate_result):
        states.append(intermediate_result.state)
        seen.append(intermediate_result.x)

    whole = sanc.minimize(problem, np.zeros(3), callback=keep, **given)
    assert any(name.endswith("last") for name in states[2]["vectors"])
    assert np.array_equal(sanc.minimize(problem, np.zeros(3), resume=states[2], **given).x, whole.x)


class BadDirection(sanc.Diagonal):
    """A metric whose direction becomes `value` after some steps."""

    def create(self, shapes, like, reduce=None):
        inner = super().create(shapes, like, reduce)
        plain, calls = inner.update, []
        inner.update = lambda g, weight: calls.append(0) or plain(g, weight) * (math.nan if len(calls) > 30 else 1.0)
        inner.always_finite = False
        return inner


@dataclass(frozen=True, kw_only=True)
class BadSize(sanc.StepSize):
    text: str = "nan"

    def size(self, state):
        return 0.01 if state.steps < 30 else float(self.text)


BadDirection.__module__ = "elsewhere"


@pytest.mark.parametrize("style", ["closures", "gradients"])
@pytest.mark.parametrize(
    ("options", "match"),
    [({"metric": BadDirection()}, "direction that is not finite"),
     *(({"step_size": BadSize(text=text)}, r"size\(\) returned") for text in ("nan", "inf", "-1"))],
)  # fmt: skip
def test_pieces_of_averaged_steps_that_return_no_usable_number_leave_the_parameters(options, match, style):
    weights = torch.nn.Parameter(torch.ones(3, 2))
    opt = sanc.SANC([weights], curvature=False, seed=0, **options)
    seen = []

    def train():
        for batch in torch.randn(60, 4, 3, generator=torch.Generator().manual_seed(0)):
            opt._driver.iteration.finish_step()
            seen[:] = weights.detach().clone(), opt._driver.iteration.state.steps
            opt.zero_grad()
            loss = (batch @ weights).square().mean()
            if style == "gradients":
                loss.backward()
            opt.step(*([] if style == "gradients" else [lambda batch=batch: (batch @ weights).square().mean()]))

    with pytest.raises(sanc.ArgumentError, match=match):
        train()
    before, state = seen
    assert torch.equal(weights, before) and state >= 29 and opt._driver.iteration.state.steps == state


@dataclass(frozen=True, kw_only=True)
class Jumps(sanc.RatioTest):
    def __call__(self, here, subspace, step, trial, trials):
        decision = super().__call__(here, subspace, step, trial, trials)
        return decision if decision.point is None else replace(decision, point=trial + 10.0)


def test_a_rule_that_leaves_the_bounds_is_named():
    f = lambda x: ((x - 0.5) ** 4).sum()
    with pytest.raises(sanc.ArgumentError, match=r"acceptance = Jumps.* a point outside the bounds"):
        sanc.minimize(f, torch.zeros(2, dtype=torch.float64), bounds=[(-1, 1)] * 2, acceptance=Jumps())


@dataclass(frozen=True)
class ReadsValues:
    """A metric that reads a number from the device in `create`."""

    memory: float = 0.9
    refresh: int = 10

    def couples(self, shape):
        return False

    def create(self, shapes, like, reduce=None):
        like.new_ones(1).item()
        return sanc.Diagonal().create(shapes, like, reduce)


def test_a_metric_that_reads_values_when_it_is_created_is_named():
    weights = torch.nn.Parameter(torch.ones(3))
    opt = sanc.SANC([weights], metric=ReadsValues(), curvature=False)
    opt.step(lambda: weights.square().sum())
    with pytest.raises(sanc.ArgumentError, match=r'metric = ReadsValues.* its create\(\) failed on the device "meta"'):
        opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize(("numbers", "match"), [({"refresh": 0}, "refresh = 0"), ({"memory": 2.0}, "memory = 2.0")])
def test_numbers_of_a_metric_are_checked(numbers, match):
    with pytest.raises(sanc.ArgumentError, match=f"{match} cannot be used: give the metric"):
        sanc.method_for(metric=ReadsValues(**numbers))


@pytest.mark.parametrize(("method", "proposes"), [("ncd", False), ("sgd", False), ("sanc", True)])
def test_escape_rules_receive_whether_the_model_proposes_steps(method, proposes):
    seen = []

    class Watches(sanc.GradientStep):
        def __call__(self, here, subspace, sigma, *, model_proposes):
            seen.append(model_proposes)
            return super().__call__(here, subspace, sigma, model_proposes=model_proposes)

    reject = {"acceptance": lambda here, *_: sanc.Decision(here.state.sigma)} if proposes else {}
    x0 = torch.ones(2, dtype=torch.float64)
    sanc.minimize(lambda x: x.square().sum(), x0, method=method, escape=Watches(), max_iter=3, **reject)
    assert seen and set(seen) == {proposes}


@pytest.mark.parametrize("metric", [sanc.Kronecker, object(), 3, "shampoo"])
def test_what_is_no_metric_is_rejected(metric):
    with pytest.raises(sanc.SancError, match="metric = "):
        sanc.SANC([torch.zeros(2, requires_grad=True)], metric=metric)


@pytest.mark.parametrize("name", ["step_size", "average"])
@pytest.mark.parametrize("value", [0.1, "big", None, sanc.StepSize, sanc.Momentum()], ids=repr)
def test_an_object_of_another_type_in_place_of_settings_is_rejected(name, value):
    remedy = {
        "step_size": r"pass sanc\.StepSize\(…\), whose settings are scale,",
        "average": r"pass sanc\.Average\(…\)",
    }[name]
    for build in (sanc.method_for, sanc.Minibatch, lambda **options: sanc.SANC([torch.ones(2)], **options)):
        with pytest.raises(sanc.ArgumentTypeError, match=f"{name} = .* cannot be used: {remedy}"):
            build(**{name: value})


# ---------------------------------------------------------------------- a loss of a margin


def test_a_loss_of_a_margin_has_the_derivatives_of_autograd(pieces):
    rng = np.random.default_rng(1)
    X, y, w, v = rng.standard_normal((40, 3)), rng.standard_normal(40), rng.standard_normal(3), rng.standard_normal(3)
    problem = pieces.Cauchy(X, y, penalty="nonconvex", strength=0.1)
    A, b = torch.from_numpy(X), torch.from_numpy(y)

    def f(w):
        return torch.log1p((A @ w - b) ** 2).mean() + 0.1 * (w**2 / (1 + w**2)).sum()

    point = torch.from_numpy(w)
    value, g = problem.value_and_gradient(w)
    assert value == pytest.approx(float(f(point)))
    assert g == pytest.approx(torch.func.grad(f)(point).numpy())
    assert problem.hessian(w)(v) == pytest.approx((torch.func.hessian(f)(point) @ torch.from_numpy(v)).numpy())


def test_a_loss_of_a_margin_is_minimised_and_sampled(pieces):
    rng = np.random.default_rng(0)
    X, w = rng.standard_normal((300, 4)), np.array([1.0, -2.0, 0.5, 3.0])
    y = X @ w + 0.1 * rng.standard_normal(300)
    y[:30] += 50.0
    problem = pieces.Cauchy(X, y, penalty="none")
    found = sanc.minimize(problem, np.zeros(4))
    assert found.success and found.x == pytest.approx(w, abs=0.1)
    sampled = sanc.minimize(problem, np.zeros(4), batch_size=30, max_iter=400, certify=False)
    assert sampled.x == pytest.approx(w, abs=0.2)


@dataclass(frozen=True)
class Brief:
    """A rule whose decisions have σ and the point alone."""

    rule: object
    needs_products = True

    def __call__(self, *args, **options):
        decision = self.rule(*args, **options)
        return sanc.Decision(decision.sigma, decision.point)


@pytest.mark.parametrize(
    ("method", "name", "rule", "branch"),
    [
        ("scr", "acceptance", sanc.RatioTest(), sanc.Branch.SUCCESSFUL),
        ("ncd", "escape", sanc.CheckedEscape(), sanc.Branch.GRADIENT),
    ],
)
def test_a_decision_of_sigma_and_point_is_recorded_as_a_step(method, name, rule, branch):
    start, given = np.array([-1.2, 1.0]), {"jac": rosen_der, "preset": "paper", "max_iter": 12, "method": method}
    brief, plain = (sanc.minimize(rosen, start, **given, **{name: piece}) for piece in (Brief(rule), rule))
    assert np.array_equal(brief.x, plain.x) and any(record.step_norm for record in plain.history)
    for ours, expected in zip(brief.history, plain.history, strict=True):
        assert (ours.value, ours.grad_norm) == (expected.value, expected.grad_norm)
        assert ours.branch is (branch if expected.step_norm else sanc.Branch.STAYED)
        assert ours.step_norm == pytest.approx(expected.step_norm, rel=1e-9)
        assert ours.model_decrease == pytest.approx(expected.model_decrease, nan_ok=True)


@pytest.mark.parametrize("returned", [None, True, (1.0, None)])
@pytest.mark.parametrize("name", ["acceptance", "escape"])
def test_a_rule_that_returns_no_decision_is_named(name, returned):
    rule = type("Wrong", (), {"needs_products": False, "__call__": lambda self, *args, **options: returned})()
    with pytest.raises(sanc.ArgumentTypeError, match=rf"{name} = .*Wrong.* returned .*: return a sanc\.Decision"):
        sanc.minimize(
            rosen, [-1.2, 1.0], jac=rosen_der, method="sanc" if name == "acceptance" else "sgd", **{name: rule}
        )


def test_the_fields_of_a_decision_after_the_point_have_names():
    with pytest.raises(TypeError, match="positional"):
        sanc.Decision(1.0, None, sanc.Branch.STAYED)


# ---------------------------------------------------------------------- an objective


def test_an_objective_of_the_caller_is_minimised_and_certified(pieces):
    """The minimum of r⁴/4 − dr²/2 along the axis of the largest d is −d²/4, and the Hessian there has λ_min = 2."""
    diagonal = np.array([1.0, 2.0, 4.0])
    found = sanc.minimize(pieces.Quartic(diagonal), np.zeros(3))
    assert found.success and found.fun == pytest.approx(-4.0, abs=1e-12)
    assert np.abs(found.x) == pytest.approx([0.0, 0.0, 2.0], abs=1e-7) and found.nhev > 0
    cert = sanc.certificate(pieces.Quartic(diagonal), found.x)
    assert cert.second_order and cert.lambda_min == pytest.approx(2.0, abs=1e-6)
    bounded = sanc.minimize(pieces.Quartic(diagonal), np.full((3, 1), 0.5), bounds=[(0, 1)] * 3)
    assert bounded.x.shape == (3, 1) and bounded.success and (bounded.x >= 0).all() and (bounded.x <= 1).all()


def test_an_objective_of_the_caller_is_evaluated_as_often_as_functions(pieces):
    diagonal, x0 = np.array([1.0, 2.0, 4.0]), np.array([0.3, 0.2, 0.1])
    points = []

    class Counted(pieces.Quartic):
        def gradient(self, x):
            points.append(tuple(x))
            return super().gradient(x)

    oracle = pieces.Quartic(diagonal)
    found = sanc.minimize(Counted(diagonal), x0)
    expected = sanc.minimize(
        oracle.value,
        x0,
        jac=lambda x: oracle.gradient(x)[1],
        hessp=lambda x, v: oracle.hessian(x)(v),
    )
    assert np.array_equal(found.x, expected.x)
    assert (found.njev, found.nhev) == (expected.njev, expected.nhev) and found.nfev <= expected.nfev
    assert len(points) == len(set(points))


def test_an_oracle_of_torch_makes_the_steps_of_its_function():
    f, x0 = lambda x: (x**4 - x**2 + 0.1 * x).sum(), torch.linspace(-1, 1, 5, dtype=torch.float64)
    oracle, _, _ = build_oracle(f, x0, jac=None, hess=None, hessp=None, args=())
    expected, found = sanc.minimize(f, x0), sanc.minimize(oracle, x0.numpy())
    assert np.array_equal(found.x, expected.x.numpy()) and found.nfev == expected.nfev


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x0": np.zeros(2)}, "x0 has 2 entries and the problem 3 variables"),
        ({"jac": np.zeros_like}, "jac is given although Quartic computes it: leave it out"),
        ({"args": (1,)}, r"args = \(1,\) cannot be used with Quartic"),
        ({"exact": False}, "draws samples: set exact = True"),
    ],
)
def test_mistakes_beside_an_oracle_are_named(pieces, change, match):
    oracle = pieces.Quartic(np.ones(3))
    oracle.exact = change.pop("exact", True)
    with pytest.raises(sanc.ArgumentError, match=match):
        sanc.minimize(oracle, **({"x0": np.zeros(3)} | change))


def test_the_names_for_extensions_are_those_of_the_core():
    assert (
        sanc.extend.Model is Model
        and sanc.extend.TrialOutcome is ratio.TrialOutcome
        and sanc.extend.SigmaRule is SigmaRule
    )
    assert all(getattr(sanc.extend, name).__doc__ for name in sanc.extend.__all__)
