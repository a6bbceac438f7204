"""Runs that continue in scaled variables, because their variables have different scales."""

from __future__ import annotations

import pickle
from dataclasses import asdict

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
from sanc.core.iteration import Iteration
from sanc.core.runs.limits import Limits
from sanc.core.runs.noise import tolerable_noise
from sanc.core.runs.run import Run
from sanc.core.runs.scaled_variables import ScaledVariables, continue_in_scaled_variables
from sanc.core.runs.step_checks import StepMonitor
from sanc.core.runs.variables import PlainVariables
from sanc.functions.oracle import CallableOracle
from sanc.minimisation.reporting import ending_message
from sanc.presets import PRESETS
from zoo import rosen_torch

REMARK = "continued in variables scaled"


def scaled_rosen(n, decades):
    """Return Rosenbrock's function of variables with scales from 10^-decades to 10^decades, and its minimum."""
    scales = 10.0 ** np.linspace(-decades, decades, n)
    return {
        "fun": np.errstate(over="ignore")(lambda x: rosen(x / scales)),
        "jac": lambda x: rosen_der(x / scales) / scales,
        "hessp": lambda x, v: rosen_hess_prod(x / scales, v / scales) / scales,
        "x0": scales * np.where(np.arange(n) % 2 == 0, -1.2, 1.0),
    }, scales


@pytest.mark.parametrize("decades", [9, 20, 40])
@pytest.mark.parametrize("n", [2, 3])
def test_a_stalled_run_continues_in_scaled_variables(n, decades):
    given, minimum = scaled_rosen(n, decades)
    res = sanc.minimize(**given)
    assert res.success and REMARK in res.message and res.nit < 80
    np.testing.assert_allclose(res.x, minimum, rtol=1e-8)
    np.testing.assert_allclose(res.jac * minimum, 0.0, atol=1e-6)  # in the variables of the caller
    assert [record.iteration for record in res.history] == list(range(res.nit))


def test_a_function_of_tensors_is_scaled_too():
    scales = torch.logspace(-12, 12, 3, dtype=torch.float64)
    res = sanc.minimize(lambda x: rosen_torch(x / scales), scales * torch.tensor([-1.2, 1.0, -1.2]).double())
    assert res.success and REMARK in res.message
    torch.testing.assert_close(res.x / scales, torch.ones(3).double(), rtol=1e-8, atol=0.0)


def test_a_long_run_measures_the_scales_before_it_stalls():
    """Without scales this run takes more than 10,000 iterations."""
    given, minimum = scaled_rosen(4, 6)
    res = sanc.minimize(**given, max_iter=400)
    assert res.success and REMARK in res.message and res.nit > 256
    np.testing.assert_allclose(res.x, minimum, rtol=1e-8)


def test_variables_of_similar_scales_are_not_scaled():
    given, _ = scaled_rosen(2, 3)
    assert REMARK not in sanc.minimize(**given).message
    A, b = torch.randn(9, 3), 1e4 * torch.randn(9)
    stalled = sanc.minimize(lambda x: ((A @ x - b) ** 2).sum(), torch.zeros(3), tol=1e-9)
    assert stalled.status is sanc.Status.STALLED and REMARK not in stalled.message


def test_a_method_with_a_given_sigma_is_not_scaled():
    given, _ = scaled_rosen(2, 9)
    assert REMARK not in sanc.minimize(**given, preset="paper", max_iter=300).message


def run_with_states(given):
    """Return the result of a run, and its state after every iteration as it is read from a file."""
    saved = []

    def save(intermediate_result):
        saved.append(pickle.dumps(intermediate_result.state))

    return sanc.minimize(**given, callback=save), [pickle.loads(state) for state in saved]


@pytest.mark.parametrize("exponent", [0, 400])
def test_a_run_in_scaled_variables_resumes_bit_for_bit(exponent):
    """With and without a factor of f that is near the limits of its type."""
    given, _ = scaled_rosen(3, 9)
    fun, jac, hessp, factor = given["fun"], given["jac"], given["hessp"], 2.0**exponent
    given |= {"fun": lambda x: fun(x) * factor, "jac": lambda x: jac(x) * factor}
    given |= {"hessp": lambda x, v: hessp(x, v) * factor}
    whole, states = run_with_states(given)
    scaled = [k for k, state in enumerate(states, 1) if "scales" in state["oracle"]]
    assert whole.success and REMARK in whole.message and len(scaled) > 10
    for cut in (3, scaled[0] - 1, scaled[0], scaled[5]):
        rest = sanc.minimize(**given, resume=states[cut - 1])
        assert np.array_equal(rest.x, whole.x) and rest.message == whole.message and rest.nhev == whole.nhev
        for ours, theirs in zip(rest.history, whole.history[cut:], strict=True):
            assert repr(asdict(ours) | {"seconds": 0}) == repr(asdict(theirs) | {"seconds": 0})


@pytest.mark.parametrize("scales", [[1, 2], [1, 2, 3.5], [0, 0, 10**6], "none"])
def test_damaged_scales_are_an_error(scales):
    given, _ = scaled_rosen(3, 9)
    _, states = run_with_states(given)
    damaged = states[-1] | {"oracle": states[-1]["oracle"] | {"scales": scales}}
    with pytest.raises(sanc.ArgumentError, match=r"resume\['oracle'\]\['scales'\] = .*: expected 3 integers"):
        sanc.minimize(**given, resume=damaged)


@pytest.mark.parametrize("options", [{"bounds": [(None, 5e8)] * 3}, {"sigma0": 1.0}], ids=["bounds", "sigma0"])
def test_a_state_in_scaled_variables_is_not_resumed_with_other_variables(options):
    given, _ = scaled_rosen(3, 9)
    _, states = run_with_states(given)
    with pytest.raises(sanc.ArgumentError, match="resume is of a run that continued in scaled variables"):
        sanc.minimize(**given, resume=states[-1], **options)


def test_a_run_that_tolerates_noise_still_does_in_scaled_variables():
    """The ratio test keeps the noise, so that the run may not measure it a second time, and reports it."""
    given, _ = scaled_rosen(3, 9)
    oracle = CallableOracle(given["fun"], given["x0"], jac=given["jac"], hessp=given["hessp"])
    limits = Limits.of_arguments(tol=1e-8, max_iter=9, max_nfev=None, max_time=None, certify=True)
    run = Run(oracle, Iteration(PRESETS["robust"], 0, 1e-8), limits, given["x0"], 0, PlainVariables())
    run.continue_with_noise(1e-6)
    assert continue_in_scaled_variables(run) and isinstance(run.variables, ScaledVariables)
    assert run.iteration.state.value_noise == 1e-6
    assert run.step_monitor.noise_tolerated and tolerable_noise(run) == 0.0
    message = ending_message(run, sanc.Status.STALLED, "")
    assert REMARK in message and "The run tolerated noise in f of about ±1e-06." in message


def test_steps_are_tested_anew_in_scaled_variables():
    seen = StepMonitor(mismatches=2, gradient_verified=True, noise_checked=True, noise_found=True)
    assert seen.in_scaled_variables() == StepMonitor()
