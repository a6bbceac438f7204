"""Runs of `minimize` that are saved and resumed."""

from __future__ import annotations

import pickle
from dataclasses import asdict

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
from preset_options import composed
from sanc.problems import Logistic
from zoo import rosen_torch

X0 = [-1.2, 1.0, 0.7, -0.3]


@pytest.mark.parametrize(
    ("method", "how"),
    [("scr", "grown")]
    + [
        (method, how)
        for method in ("sanc", "scr", "cr", "crm", "ncd", "sgd")
        for how in ("sampled", "exact", "torch", "callable")
    ],
)
def test_an_interrupted_run_resumes_bit_for_bit(problem, method, how):
    """Stop early or halfway, pickle the state, resume: the records are those of a run without a stop."""
    given = {
        "sampled": dict(fun=problem, x0=np.ones(6), batch_size=20),
        "grown": dict(fun=problem, x0=np.ones(6), batch_size=20, grow_samples=True),
        "exact": dict(fun=problem, x0=np.ones(6)),
        "torch": dict(fun=rosen_torch, x0=X0),
        "callable": dict(fun=rosen, x0=X0, jac=rosen_der, hessp=rosen_hess_prod),
    }[how] | dict(method=method, seed=3, certify=False, **composed(method, "paper", L1=1e3, L2=1e3))
    given |= {"lr": 1e-4} if method == "sgd" else {}
    saved = []

    def save(intermediate_result):
        saved.append(pickle.dumps(intermediate_result.state))

    whole = sanc.minimize(**given, max_iter=60, callback=save)
    for cut in {3, whole.nit // 2}:
        rest = sanc.minimize(**given, max_iter=60, resume=pickle.loads(saved[cut - 1]))
        assert whole.nit == rest.nit and len(rest.history) == whole.nit - cut
        for ours, theirs in zip(rest.history, whole.history[cut:], strict=True):
            a, b = asdict(ours) | {"seconds": 0}, asdict(theirs) | {"seconds": 0}
            assert repr(a) == repr(b)
        assert np.array_equal(np.asarray(rest.x), np.asarray(whole.x))


def test_a_state_of_another_run_is_an_error(problem):
    states = []

    def save(intermediate_result):
        states.append(intermediate_result.state)

    sanc.minimize(problem, np.ones(6), batch_size=20, max_iter=1, callback=save)
    with pytest.raises(sanc.ArgumentError, match="of method 'sanc', not 'scr'"):
        sanc.minimize(problem, np.ones(6), method="scr", resume=states[0])
    with pytest.raises(sanc.ArgumentError, match="6 variables, not 4"):
        sanc.minimize(rosen_torch, X0, resume=states[0])
    with pytest.raises(sanc.ArgumentError, match=r"resume lacks \['cached', "):
        sanc.minimize(rosen_torch, X0, resume={})
    with pytest.raises(sanc.ArgumentError, match="resume = 3"):
        sanc.minimize(rosen_torch, X0, resume=3)


@pytest.mark.parametrize(
    ("name", "entry", "match"),
    [
        ("stall_monitor", {"count": -1, "best_grad_norm": 1.0}, r"resume\['stall_monitor'\]\['count'\] = -1 "),
        ("stall_monitor", {"count": 1, "best_grad_norm": -1.0}, r"\['best_grad_norm'\] = -1.0 .* a finite number"),
        ("step_monitor", {"mismatches": 1}, r"resume\['step_monitor'\] lacks 'gradient_verified'"),
        ("step_monitor", [1, True, True], r"resume\['step_monitor'\] = .*: expected a mapping"),
    ],
)
def test_a_damaged_monitor_is_an_error(name, entry, match):
    states = []

    def save(intermediate_result):
        states.append(intermediate_result.state)

    sanc.minimize(rosen_torch, X0, max_iter=1, callback=save)
    with pytest.raises(sanc.ArgumentError, match=match):
        sanc.minimize(rosen_torch, X0, resume=states[0] | {name: entry})
    first = states[0] | {"stall_monitor": {"count": 0, "best_grad_norm": np.inf}}
    assert sanc.minimize(rosen_torch, X0, resume=first).success


def test_a_run_that_stayed_with_several_trials_resumes_bit_for_bit():
    """The margins at its point were updated from earlier ones, and those of the trial points are gone."""
    rng = np.random.default_rng(1)
    X = rng.standard_normal((400, 60))
    y = (X @ rng.standard_normal(60) + rng.standard_normal(400) > 0).astype(int)
    for _ in range(4):
        rng.standard_normal(60)
    x0 = 30 * rng.standard_normal(60)
    options = {"method": "arc", "max_iter": 25, "eta1": 0.95, "eta2": 0.975, "max_resolves": 2, "sigma0": 1e-6}
    states, stayed = [], []

    def keep(intermediate_result):
        states.append(pickle.loads(pickle.dumps(intermediate_result.state)))
        record = intermediate_result.record
        stayed.append(record.branch is sanc.Branch.STAYED and record.trials > 1)

    whole = sanc.minimize(Logistic(X, y, "nonconvex", 1e-2), x0, callback=keep, **options)
    assert any(stayed)
    for state in states[:-1]:
        again = sanc.minimize(Logistic(X, y, "nonconvex", 1e-2), x0, resume=state, **options)
        assert np.array_equal(again.x, whole.x) and again.fun == whole.fun


@pytest.mark.parametrize("sampled", [True, False])
def test_a_saved_state_is_a_copy(problem, sampled):
    def overwrite(intermediate_result):
        state = intermediate_result.state
        for vector in (state["x"], *state["vectors"].values()):
            vector.fill(7.0)

    given = {"batch_size": 20, "max_iter": 40} if sampled else {}
    ends = [sanc.minimize(problem, np.ones(6), callback=callback, **given) for callback in (None, overwrite)]
    assert np.array_equal(ends[0].x, ends[1].x)


def test_a_resumed_run_leaves_a_saddle_as_the_original_does():
    states = []

    def keep(intermediate_result):
        states.append(intermediate_result.state)

    x0, f = torch.full((101,), 1e-9, dtype=torch.float64), lambda x: torch.cos(x).sum()
    whole = sanc.minimize(f, x0, callback=keep)
    for state in states[9:13]:
        part = sanc.minimize(f, x0, resume=state)
        assert torch.equal(part.x, whole.x) and part.nit == whole.nit and part.nfev == whole.nfev
