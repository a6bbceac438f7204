"""The box, its faces, differences within it, and the minimiser of the cubic model in it."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import scipy.optimize
import torch

from sanc.core.bounded.bounds import Box, FaceOracle
from sanc.core.bounded.box_model import REPEATED_STEP_RATIO, BoundedModel, _BoxModel, _Quadratic
from sanc.core.point import Point, State
from sanc.core.runs.scaled_objective import ScaledObjectiveOracle
from sanc.functions.oracle import CallableOracle
from sanc.presets import PRESETS


def box_of(lower, upper):
    return Box(torch.tensor(lower, dtype=torch.float64), torch.tensor(upper, dtype=torch.float64))


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


BOX = box_of([0.0, -1.0, -math.inf, 2.0], [1.0, math.inf, 3.0, 2.0])


def test_a_point_in_the_box_is_not_copied():
    x = tensor(0.5, 7.0, -9.0, 2.0)
    assert BOX.contains(x) and BOX.project(x) is x
    assert BOX.project(tensor(-1.0, -2.0, 5.0, 0.0)).tolist() == [0.0, -1.0, 3.0, 2.0]
    assert not BOX.contains(tensor(0.5, math.nan, 0.0, 2.0))


def test_variables_are_held_where_the_negative_gradient_points_out_of_the_box():
    x = tensor(0.0, -1.0, 3.0, 2.0)
    assert BOX.free(x, tensor(1.0, -1.0, 1.0, 5.0)).tolist() == [False, True, True, False]
    assert BOX.between(x).tolist() == [False] * 4
    assert BOX.free(x, tensor(math.nan, 0.0, -1.0, 5.0)).tolist() == [True, False, False, False]
    assert BOX.active(x, tensor(1.0, -1.0, -1.0, -5.0)).tolist() == [-1, -1, 1, 1]


@pytest.mark.parametrize(
    "x", [[0.5, 0.0, 0.0, 2.0], [0.0, -1.0, 3.0, 2.0], [1.0, 0.0, 3.0, 2.0], [1e-9, -1.0, 3.0, 2.0]]
)
def test_differences_stay_in_the_box_and_are_of_second_order(x, rng):
    a = torch.tensor(rng.standard_normal((4, 4)))
    points, x = [], torch.tensor(x, dtype=torch.float64)

    def gradient(p):
        assert BOX.contains(p)
        points.append(p)
        return a @ torch.sin(p) + p**2

    d = 1e-4 * tensor(1.0, -2.0, 0.7, 0.0)
    total = sum(weight * gradient(p) for weight, p in BOX.difference_points(x, d))
    exact = a @ (torch.cos(x) * d) + 2.0 * x * d
    assert torch.allclose(total, exact, rtol=1e-6, atol=1e-10)
    assert len(points) >= 2


def quadratic_oracle(hessian, shift):
    def fun(x):
        return 0.5 * (x - shift) @ hessian @ (x - shift)

    return CallableOracle(fun, shift, jac=lambda x: hessian @ (x - shift), hessp=lambda x, v: hessian @ v)


def test_a_face_has_the_rows_and_columns_of_its_free_variables(rng):
    a = rng.standard_normal((5, 5))
    hessian, shift, point = a + a.T, rng.standard_normal(5), np.zeros(5)
    box = box_of([-1.0] * 5, [1.0] * 5)
    places = torch.tensor([0, 2, 3])
    face = FaceOracle(quadratic_oracle(hessian, shift), box, point, places)
    x, v = np.array([0.1, 0.2, 0.3]), rng.standard_normal(3)
    value, g = face.gradient(x)
    full = np.array([0.1, 0.0, 0.2, 0.3, 0.0])
    assert face.space.dim == 3 and value == pytest.approx(0.5 * (full - shift) @ hessian @ (full - shift))
    assert np.allclose(g, (hessian @ (full - shift))[[0, 2, 3]])
    assert np.allclose(face.hessian(x)(v), hessian[np.ix_([0, 2, 3], [0, 2, 3])] @ v)
    assert face.full_point(x) is face.full_point(x) and face.full_point(x).tolist() == full.tolist()
    assert face.full_vector(v).tolist() == [v[0], 0.0, v[1], v[2], 0.0] and face.full_oracle is face.inner
    plain, scaled = face.inner, ScaledObjectiveOracle(face.inner, -3)
    assert scaled.unscaled_oracle is plain and scaled.full_oracle is scaled and scaled.exponent == -3
    assert plain.unscaled_oracle is plain.full_oracle is plain and plain.exponent == 0 and plain.free_indices is None
    assert plain.full_point(full) is full and plain.full_vector(full) is full
    assert face.move(x, np.array([5.0, 0.0, -5.0])).tolist() == [1.0, 0.2, -1.0]


def test_f_is_not_called_outside_the_box():
    def fun(x):
        raise AssertionError("called outside")

    oracle = CallableOracle(fun, np.zeros(2), jac=fun)
    face = FaceOracle(oracle, box_of([0.0, 0.0], [1.0, 1.0]), np.zeros(2), None)
    outside = np.array([0.5, 1.5])
    value, g = face.gradient(outside)
    assert math.isnan(face.value(outside)) and math.isnan(value) and np.isnan(g).all()
    assert oracle.meter.nfev == oracle.meter.njev == 0


@pytest.mark.parametrize("kind", ["convex", "indefinite"])
@pytest.mark.parametrize("sigma", [1e-8, 1.0])
def test_the_model_in_the_box_is_minimised_as_scipy_does(kind, sigma, rng):
    """In few dimensions the best of many starts of L-BFGS-B is the global minimum; ours is a stationary point at most
    as low as the Cauchy point, and the global one if the model is convex."""
    for _ in range(5):
        n = 6
        a = rng.standard_normal((n, n))
        b = a @ a.T if kind == "convex" else a + a.T
        q, g = np.linalg.qr(rng.standard_normal((n, n)))[0], rng.standard_normal(n) * 3.0
        lower, upper = -rng.random(n), rng.random(n)
        lower[0], upper[1] = 0.0, 0.0
        model = _BoxModel(_Quadratic(g, q, q @ b @ q.T, 0.0), sigma, lower, upper)
        s, decrease = model.minimise(np.zeros(n))

        def m(s, b=b, g=g):
            norm = np.linalg.norm(s)
            return g @ s + 0.5 * s @ b @ s + sigma / 3 * norm**3, g + b @ s + sigma * norm * s

        assert np.all((s >= lower) & (s <= upper)) and decrease == pytest.approx(-m(s)[0]) and decrease > 0.0
        gradient = m(s)[1]
        assert np.linalg.norm(np.clip(s - gradient, lower, upper) - s) <= 1e-2 * np.linalg.norm(g)
        if kind == "convex":
            known = scipy.optimize.minimize(m, np.zeros(n), jac=True, bounds=list(zip(lower, upper, strict=True)))
            assert -decrease == pytest.approx(known.fun, rel=1e-4)


def test_a_step_in_the_box_depends_on_its_arguments_alone(rng):
    """The same σ gives the same step whatever was proposed before; after a rejection σ grows until it is shorter."""
    hessian, shift = np.diag([1.0, 2.0, 3.0]), np.array([4.0, -5.0, 0.1])
    face = FaceOracle(quadratic_oracle(hessian, shift), box_of([-1.0] * 3, [1.0] * 3), np.zeros(3), None)
    x, method = np.zeros(3), PRESETS["robust"]
    (value, g), rule = face.gradient(x), method.sigma.rule(face.space.eps, exact=True)
    here = Point(
        x=x, g=g, value=value, grad_norm=face.norm(g), oracle=face, sigma_rule=rule, state=State(seed=0),
        units=State(seed=0).units,
    )  # fmt: skip
    model = BoundedModel(inner=method.model)
    subspace = model.build(here)
    first, larger = (model.propose(here, subspace, sigma) for sigma in (1e-3, 2e-3))
    assert first.truncated and larger.norm == pytest.approx(first.norm, rel=1e-4)  # the bounds limit both
    assert np.array_equal(model.propose(here, subspace, 1e-3).trial_point, first.trial_point)
    shorter = model.propose(replace(here, rejected=first), subspace, 2e-3)
    assert shorter.norm <= REPEATED_STEP_RATIO * first.norm and shorter.sigma > 2e-3
    inside = model.propose(here, subspace, 1e3)
    assert not inside.truncated and np.array_equal(subspace.trial_point(x, inside), inside.trial_point)
    assert inside.norm == pytest.approx(np.linalg.norm(inside.trial_point)) and first.trial_point[:2].tolist() == [
        1.0,
        -1.0,
    ]
    with pytest.raises(FrozenInstanceError):
        subspace.inner = None
