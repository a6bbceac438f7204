"""Krylov models against dense matrices: when Lanczos stops, and the limit on the step norm."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.optimize

from sanc.core.model import CubicModel, KrylovModel, _AccuracyTestSchedule, forcing_tolerance, step_control
from sanc.core.point import Point, State
from sanc.core.sigma import SigmaRule
from sanc.core.units import FIRST_SIGMA, Units
from sanc.minimisation.objective import build_oracle

DIM = 30
FORCING = CubicModel(krylov_dim=None, krylov_stop="forcing", first_radius=1.0)


def quadratic(values, rng, g_norm=1.0):
    """Return a rotated diagonal matrix, and a gradient with components along all eigenvectors."""
    rotation = np.linalg.qr(rng.standard_normal((len(values), len(values))))[0]
    matrix = rotation * values @ rotation.T
    g = rng.standard_normal(len(values))
    return 0.5 * (matrix + matrix.T), g_norm * g / np.linalg.norm(g)


def point_of(matrix, g, *, x_norm=1.0, units=None, tol=0.0, **state):
    """Return the point at which the quadratic has the gradient g; `state` are numbers of its state."""
    x = np.full(len(g), x_norm / math.sqrt(len(g)))
    b = g - matrix @ x
    oracle, start, _ = build_oracle(
        lambda y: float(b @ y + 0.5 * y @ matrix @ y),
        x,
        jac=lambda y: b + matrix @ y,
        hess=None,
        hessp=lambda y, v: matrix @ v,
        args=(),
    )
    value, gradient = oracle.gradient(start)
    rule = SigmaRule(interpolates=True, measures_sigma0=True, exact=True, floor=1e-290, ceiling=1e290)
    return Point(
        x=start,
        g=gradient,
        value=value,
        grad_norm=oracle.norm(gradient),
        oracle=oracle,
        sigma_rule=rule,
        state=State(seed=0, **state),
        units=units or Units(),
        tol=tol,
    )


def step_in(here, subspace):
    """Return the step of the first σ as a vector."""
    return np.asarray(subspace.trial_point(here.x, subspace.step)) - np.asarray(here.x)


def model_gradient(matrix, g, s, sigma):
    """Return ∇m(s)."""
    return g + matrix @ s + sigma * np.linalg.norm(s) * s


@pytest.mark.parametrize(
    ("norm", "last_norm", "tol", "expected"),
    [(2.0, 0.0, 0.0, 0.4), (2.0, 4.0, 0.0, 0.4), (2.0, 20.0, 0.0, 0.2), (2.0, 20.0, 3.0, 1.5), (0.5, 0.1, 0.0, 0.1)],
)
def test_the_forcing_term_is_a_fifth_or_the_reduction_of_the_gradient_norm(norm, last_norm, tol, expected):
    here = point_of(np.eye(2), np.array([norm, 0.0]), last_grad_norm=last_norm, tol=tol)
    assert forcing_tolerance(here) == pytest.approx(expected)


@pytest.mark.parametrize("last_norm", [0.0, 50.0, 1e4])
def test_lanczos_stops_where_the_model_gradient_is_below_the_forcing_term(rng, last_norm):
    """‖∇m(s)‖ ≤ min(0.2, r, ‖s‖/ℓ)·‖g‖ with dense matrices, and it does not hold three iterations before."""
    matrix, g = quadratic(np.geomspace(0.05, 50.0, DIM), rng)
    here = point_of(matrix, g, last_grad_norm=last_norm, last_step_norm=10.0, units=Units(2.0, 1.0), sigma=0.01)
    subspace = FORCING.build(here)
    s = step_in(here, subspace)
    reduction = 1.0 / last_norm if last_norm else 1.0
    tolerance = min(0.2, reduction, np.linalg.norm(s) / 2.0)
    assert subspace.sigma == 0.01 and subspace.products < DIM
    assert np.linalg.norm(model_gradient(matrix, g, s, 0.01)) <= tolerance
    earlier = dataclasses.replace(FORCING, krylov_dim=subspace.products - 3)
    s = step_in(here, earlier.build(here))
    assert np.linalg.norm(model_gradient(matrix, g, s, 0.01)) > min(tolerance, np.linalg.norm(s) / 2.0)


def test_the_tolerance_of_the_caller_ends_lanczos_earlier(rng):
    matrix, g = quadratic(np.geomspace(0.05, 50.0, DIM), rng)
    given = {"last_grad_norm": 1e4, "last_step_norm": 10.0, "units": Units(2.0, 1.0), "sigma": 0.01}
    exact, rough = (FORCING.build(point_of(matrix, g, tol=tol, **given)) for tol in (0.0, 0.1))
    here = point_of(matrix, g, tol=0.1, **given)
    assert rough.products < exact.products
    assert np.linalg.norm(model_gradient(matrix, g, step_in(here, rough), 0.01)) <= 0.05


def test_the_paper_stops_at_epsilon_g(rng):
    matrix, g = quadratic(np.geomspace(0.05, 50.0, DIM), rng)
    here = point_of(matrix, g, sigma=0.5, units=Units(1.0, 1.0))
    dims = []
    for epsilon_g in (0.3, 1e-3):
        model = CubicModel(krylov_dim=None, epsilon_g=epsilon_g, epsilon=1.0)
        subspace = model.build(here)
        assert np.linalg.norm(model_gradient(matrix, g, step_in(here, subspace), 0.5)) <= epsilon_g
        dims.append(subspace.products)
    assert dims[0] < dims[1] < DIM


def test_lanczos_stops_at_the_first_negative_curvature(rng):
    """The leading blocks of the projection on the Krylov vectors are positive definite before the last one."""
    matrix, g = quadratic(np.append(-0.3, np.linspace(1.0, 4.0, DIM - 1)), rng)
    here = point_of(matrix, g, last_grad_norm=1e9, last_step_norm=1.0, units=Units(1.0, 1.0), sigma=1e-6)
    subspace = FORCING.build(here)
    q = np.stack([subspace.krylov.combine(row)[0] for row in np.eye(subspace.products)])
    projected = q @ matrix @ q.T
    smallest = [np.linalg.eigvalsh(projected[:j, :j])[0] for j in range(1, len(q) + 1)]
    assert smallest[-1] <= 0.0 < smallest[-2] and subspace.ritz_value == pytest.approx(smallest[-1])


@pytest.mark.parametrize(("length_scale", "x_norm", "last", "limit"), [(2.0, 1.0, 0.01, 2.0), (2.0, 50.0, 0.01, 5.0),
    (2.0, 1.0, 4.0, 12.0)])  # fmt: skip
def test_the_limit_is_a_length_scale_or_three_times_the_last_step(length_scale, x_norm, last, limit):
    here = point_of(np.eye(2), np.ones(2), x_norm=x_norm, last_step_norm=last)
    assert FORCING.max_step_norm(here, Units(length_scale, 1.0)) == pytest.approx(limit)
    assert CubicModel(first_radius=None).max_step_norm(here, Units(length_scale, 1.0)) == math.inf


def smallest_norm(matrix, g, sigma):
    """Return ‖s‖ of the minimiser with positive definite B + σ‖s‖, by bisection on the norm."""
    values, vectors = np.linalg.eigh(matrix)
    c = vectors.T @ g
    excess = lambda r: np.linalg.norm(c / (values + sigma * r)) - r
    least = max(-values[0] / sigma, 0.0) + 1e-12
    return scipy.optimize.brentq(excess, least, 1e9)


def test_sigma_is_doubled_until_the_step_is_within_the_limit(rng):
    """The result is the smallest 2ᵏσ with this property: the norms follow from the dense secular equation."""
    matrix, g = quadratic(np.full(6, 1e-3) * np.arange(1.0, 7.0), rng)
    for first in np.geomspace(1e-6, 1e-5, 7):
        here = point_of(matrix, g, last_step_norm=0.1, units=Units(0.2, 1.0), sigma=first, last_grad_norm=1e9)
        subspace = FORCING.build(here)
        doublings = math.log2(subspace.sigma / first)
        assert doublings == round(doublings) > 3 and subspace.allows_longer_steps
        norms = [smallest_norm(matrix, g, sigma) for sigma in (subspace.sigma, subspace.sigma / 2.0)]
        assert norms[0] <= 0.3 < norms[1]
        assert np.linalg.norm(step_in(here, subspace)) == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize(("smallest", "is_limited"), [(0.01, False), (-1.0, True)])
def test_the_first_step_is_limited_only_if_sigma_determines_its_norm(rng, smallest, is_limited):
    values = np.append(smallest, np.linspace(0.02, 1.0, 5))
    matrix, g = quadratic(values, rng)
    here = point_of(matrix, g, units=Units(0.1, 1.0), sigma=1e-9)
    subspace = FORCING.build(here)
    norm = np.linalg.norm(step_in(here, subspace))
    assert (norm <= 0.1) == is_limited and (subspace.sigma > 1e-9) is is_limited


def test_the_first_product_measures_units_and_the_initial_sigma(rng):
    """ℓ₀ = min(‖g‖/‖Bq‖, max(‖x₀‖/10, |f|/‖g‖)), and σ is 1e-4 ‖g‖/ℓ₀²; later points keep both."""
    matrix, g = quadratic(np.linspace(1.0, 9.0, DIM), rng, g_norm=3.0)
    here = point_of(matrix, g, x_norm=40.0)
    product = np.linalg.norm(matrix @ g) / 3.0
    length_scale = min(3.0 / product, max(4.0, abs(here.value) / 3.0))
    control = step_control(FORCING, here, product)
    assert control.units.length_scale == pytest.approx(length_scale)
    assert control.sigma == pytest.approx(FIRST_SIGMA * 3.0 / length_scale**2)
    assert control.max_step_norm == pytest.approx(4.0) and control.allows_longer_steps
    later = step_control(FORCING, dataclasses.replace(here, units=Units(2.0, 1.0)), product)
    assert later == (here.state.sigma, Units(2.0, 1.0), pytest.approx(4.0), False)
    assert not step_control(KrylovModel(), here, product).allows_longer_steps  # its step norm has no limit


@pytest.mark.parametrize(("dim", "multiplier", "following"), [(1, None, (2, 0)), (20, None, (24, 0)),
    (1, 0.5, (2, 9)), (100, 0.5, (101, 120))])  # fmt: skip
def test_the_next_test_follows_after_a_fifth_more_products(dim, multiplier, following):
    """If μ predicts ‖∇m‖, each dimension may be tested, and one after eight or a fifth more products is."""
    schedule = _AccuracyTestSchedule.after(dim, multiplier)
    assert (schedule.next_dim, schedule.forced_dim) == following
