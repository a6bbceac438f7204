"""Values with noise beyond roundoff, and gradients without it, as after a quadrature with a tolerance."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

import sanc
from sanc.core.runs import loop


def noise_at(x, kind=0):
    """Return a number between −1 and 1 that every bit of x changes."""
    return np.random.default_rng((zlib.crc32(np.ascontiguousarray(x).tobytes()), kind)).uniform(-1.0, 1.0)


def regression(level, gradient_level=0.0, seed=0):
    """Return a penalised logistic regression whose values have noise of this relative size, and its exact gradient."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(60, 6))
    y = np.sign(X @ rng.normal(size=6) + rng.normal(size=60))

    def fun(w):
        return (np.logaddexp(0.0, -y * (X @ w)).sum() + 0.5 * w @ w) * (1.0 + level * noise_at(w))

    def exact(w):
        return w - X.T @ (y / (1.0 + np.exp(y * (X @ w))))

    def jac(w):
        return exact(w) + gradient_level * np.array([noise_at(w, k) for k in range(1, 7)])

    def hessp(w, v):
        p = 1.0 / (1.0 + np.exp(y * (X @ w)))
        return X.T @ (p * (1.0 - p) * (X @ v)) + v

    return {"fun": fun, "x0": 0.2 + np.abs(rng.normal(size=6)), "jac": jac, "hessp": hessp}, exact


@pytest.mark.parametrize("bounds", [None, [(0.1, None)] * 6], ids=["free", "bounds"])
def test_a_run_reaches_the_minimum_in_spite_of_noise(monkeypatch, bounds):
    """The noise depends on every bit of x, so that other processors draw another one: counts have to allow for that."""
    iterations = stalled = 0
    for level, needed in ((1e-8, 4), (1e-6, 4), (1e-4, 3)):
        solved = 0
        for seed in range(4):
            given, exact = regression(level, seed=seed)
            res = sanc.minimize(**given, bounds=bounds)
            clean = sanc.minimize(**regression(0.0, seed=seed)[0], bounds=bounds)
            assert clean.success
            if res.success:
                solved += 1
                np.testing.assert_allclose(res.x, clean.x, atol=1e-7)
                free = np.ones(6, bool) if bounds is None else res.x > 0.1
                assert np.linalg.norm(exact(res.x)[free]) <= 1e-7
            iterations += res.nit
            with monkeypatch.context() as patch:
                patch.setattr(loop, "tolerable_noise", lambda run: 0.0)
                stalled += not sanc.minimize(**given, bounds=bounds).success
        assert solved >= needed
    assert stalled >= 1 and iterations <= 12 * 60


@pytest.mark.parametrize(("level", "scheme"), [(1e-10, "2-point"), (1e-8, "2-point"), (1e-8, "3-point")])
def test_steps_of_differences_are_adapted_to_noise(monkeypatch, level, scheme):
    """Differences with the steps for roundoff are useless then: the error of a forward difference is √(f''·noise)."""
    solved = stalled = 0
    for seed in range(3):
        given, exact = regression(level, seed=seed)
        clean = sanc.minimize(**regression(0.0, seed=seed)[0])
        given = {"fun": given["fun"], "x0": given["x0"], "jac": scheme}
        res = sanc.minimize(**given)
        assert res.status is not sanc.Status.INCONSISTENT
        if res.success:
            solved += "tolerated noise" in res.message
            assert np.linalg.norm(exact(res.x)) <= 5.0 * res.certificate.gradient_tolerance <= 0.2
            np.testing.assert_allclose(res.x, clean.x, atol=0.02)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "tolerable_noise", lambda run: 0.0)
            stalled += not sanc.minimize(**given).success
    assert solved >= 2 and stalled == 3


def test_noise_of_the_gradient_is_not_tolerated():
    """The gradient does not decrease below its noise, so that no run claims a solution there, or continues for long."""
    for seed in range(2):
        given, _ = regression(1e-8, 1e-6, seed)
        res = sanc.minimize(**given)
        assert res.status is sanc.Status.STALLED and "noisy" in res.message and res.nfev < 1000


def test_large_noise_is_not_tolerated():
    given, _ = regression(0.3)
    assert sanc.minimize(**given).status is sanc.Status.STALLED


def run_with_states(given):
    """Return the result of a run, and its state after every iteration."""
    states = []
    return sanc.minimize(**given, callback=lambda intermediate_result: states.append(intermediate_result.state)), states


def run_that_tolerates_noise():
    """Return the arguments, the result and the states of the first run that noise stalls, and where that is."""
    for seed in range(12):
        given, _ = regression(1e-6, seed=seed)
        whole, states = run_with_states(given)
        tolerated = [k for k, state in enumerate(states) if state["numbers"]["value_noise"] > 0.0]
        if tolerated and tolerated[0]:
            return given, whole, states, tolerated[0]
    raise AssertionError("no run tolerates noise")


def test_a_run_with_noise_resumes_bit_for_bit():
    given, whole, states, first = run_that_tolerates_noise()
    for k in (first - 1, first):
        rest = sanc.minimize(**given, resume=states[k])
        assert np.array_equal(rest.x, whole.x) and rest.nfev == whole.nfev and rest.nit == whole.nit


def test_a_fit_with_cancellation_in_its_residuals_converges():
    """The trigonometric residuals of Moré, Garbow and Hillstrom lose two digits; from ten times the standard start."""
    n = 10

    def residuals(x):
        return n - np.cos(x).sum() + np.arange(1, n + 1) * (1.0 - np.cos(x)) - np.sin(x)

    def jac(x):
        return np.sin(x)[None, :] + np.diag(np.arange(1, n + 1) * np.sin(x) - np.cos(x))

    res = sanc.least_squares(residuals, np.ones(n), jac)
    assert res.success and res.cost == pytest.approx(0.5 * 2.79506e-5, rel=1e-5)
