"""Oracles and losses of the caller: those of the page against ours, and what they may not return."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sanc
from sanc.minimisation.objective import build_oracle


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
