"""Acceptance and escape rules of the caller: those of the page, their states, and what they may not return."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
from tensors import flat


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

    def __call__(self, here, subspace, step, trial, trial_count):
        assert all(type(entry) is float and entry == self.entry for entry in here.state.acceptance_state.values())
        return replace(
            super().__call__(here, subspace, step, trial, trial_count), acceptance_state={"entry": self.entry}
        )


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
class AlwaysStays:
    """Stays, and raises σ by γ."""

    needs_products = False

    def __call__(self, here, subspace, sigma, *, model_proposes):
        return sanc.Decision(here.sigma_rule.after_failure(sigma), note="stayed on purpose", zero_step=True)


def test_an_escape_rule_decides_what_follows_a_rejection():
    """A step that is always rejected: the rule's σ and note are what the iteration reports."""
    reject = sanc.RatioTest(eta1=0.999999, eta2=0.9999999)
    found = sanc.minimize(
        rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, max_iter=4, certify=False,
        method=sanc.Method(name="own", acceptance=reject, escape=AlwaysStays()),
    )  # fmt: skip
    stayed = [record for record in found.history if record.note == "stayed on purpose"]
    assert stayed and all(record.branch is sanc.Branch.STAYED for record in stayed)
    followed = [(a, b) for a, b in pairwise(found.history) if a in stayed]
    assert followed and all(b.sigma == 4 * a.sigma for a, b in followed)  # γ by the ratio test, γ by the rule


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"acceptance": sanc.CheckedEscape()},
            r"acceptance\(here, subspace, step, trial, trial_count\).*sanc.RatioTest\(\)",
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
        ({"point": np.array([math.nan, 1.0])}, "returned a point that is not finite"),
    ],
)
def test_what_a_rule_may_not_return_is_named(change, match):
    def rule(here, subspace, step, trial, trial_count):
        return sanc.Decision(**({"sigma": 1.0, "point": trial} | change))

    with pytest.raises(sanc.SancError, match=match):
        sanc.minimize(rosen, [-1.2, 1.0], jac=rosen_der, hessp=rosen_hess_prod, acceptance=rule)


@dataclass(frozen=True, kw_only=True)
class RemembersPoint(sanc.RatioTest):
    """Saves the last trial point and a count."""

    def __call__(self, here, subspace, step, trial, trial_count):
        decision = super().__call__(here, subspace, step, trial, trial_count)
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


@dataclass(frozen=True, kw_only=True)
class Jumps(sanc.RatioTest):
    def __call__(self, here, subspace, step, trial, trial_count):
        decision = super().__call__(here, subspace, step, trial, trial_count)
        return decision if decision.point is None else replace(decision, point=trial + 10.0)


def test_a_rule_that_leaves_the_bounds_is_named():
    f = lambda x: ((x - 0.5) ** 4).sum()
    with pytest.raises(sanc.ArgumentError, match=r"acceptance = Jumps.* a point outside the bounds"):
        sanc.minimize(f, torch.zeros(2, dtype=torch.float64), bounds=[(-1, 1)] * 2, acceptance=Jumps())


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
