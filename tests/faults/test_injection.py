"""Values that are not finite, and exceptions, at every call of the objective: for every method, preset and style.

Parameters stay finite, and only errors of the package or the injected ones are raised. After an exception, the repeated
run equals one without it.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from tensors import flat

pytestmark = pytest.mark.slow

KINDS = (sanc.SANC, sanc.SCR, sanc.ARC, sanc.CR, sanc.CRM, sanc.NCD)
STEPS = 4
FAULTS = ("nan", "inf", "gradient", "-inf", "huge", "low")


class InjectedError(Exception):
    pass


class Run:
    """A small training run with a fault at one call of its loss."""

    def __init__(self, kind, preset, style, fault="", at=-1, exact=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.opt = kind(self.model.parameters(), preset=preset, seed=1, check=False)
        batches = [(torch.randn(8, 3).double(), torch.randn(8, 1).double()) for _ in range(STEPS)]
        self.batches = batches[:1] * STEPS if exact else batches
        self.style, self.fault, self.at, self.calls = style, fault, at, 0

    def loss(self, k):
        a, b = self.batches[k]
        value, call = (self.model(a) - b).square().mean(), self.calls
        self.calls += 1
        if call != self.at:
            return value
        if self.fault == "raise":
            raise InjectedError
        if self.fault == "gradient":  # the value is finite and its derivative is not
            return value + sum(torch.sqrt((p - p.detach()).abs()).sum() for p in self.model.parameters())
        return value * {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 1e308, "low": -1e300}[self.fault]

    def backward(self, k):
        self.opt.zero_grad()
        value = self.loss(k)
        value.backward()
        return value

    def step(self, k):
        if self.style == "gradients":
            self.opt.train()
            self.backward(k)
            self.opt.step()
        else:
            self.opt.step(lambda: self.loss(k) if self.style == "loss" else self.backward(k))

    def go(self):
        """Make all steps and return a description of the first failure.

        A step that raised the injected error is checked for side effects and repeated.
        """
        for k in range(STEPS):
            before = [tensor.clone() for tensor in (*self.model.state_dict().values(), torch.get_rng_state())]
            try:
                self.step(k)
            except InjectedError:
                after = (*self.model.state_dict().values(), torch.get_rng_state())
                by_caller = self.style == "gradients"  # the forward pass is outside the step
                if not by_caller and not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
                    return "an exception had side effects"
                self.step(k)
            except sanc.NonFiniteStartError:
                if k > 0:
                    return "NonFiniteStartError after the first step"
                return "" if torch.isfinite(flat(self.model)).all() else "parameters are not finite"
            if not torch.isfinite(flat(self.model)).all():
                return f"parameters are not finite after step {k}"
        return ""


def combinations():
    for kind, preset, style in itertools.product(KINDS, sanc.PRESETS, ("loss", "backward", "gradients")):
        if style != "gradients" or (preset == "robust" and kind in (sanc.SANC, sanc.SCR)):
            yield kind, preset, style


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "preset", "style"), list(combinations()))
def test_a_fault_at_every_call_of_a_loss(kind, preset, style, tally):
    cases, failures = 0, []
    for exact in (False, True):
        whole = Run(kind, preset, style, exact=exact)
        assert whole.go() == ""
        for at in range(0, whole.calls, max(1, whole.calls // 6)):
            for fault in ("raise", *FAULTS[at % 2 :: 2]):
                run = Run(kind, preset, style, fault, at, exact)
                try:
                    failure = run.go()
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"
                # Without closures the caller's forward pass updates BatchNorm's buffers, which the step cannot undo.
                if not failure and fault == "raise" and style != "gradients":
                    failure = (
                        "" if torch.equal(flat(run.model), flat(whole.model)) else "not the same after an exception"
                    )
                cases += 1
                failures += [(exact, at, fault, failure)] if failure else []
    tally(f"injection in closures, {style}", cases, failures)


def rosenbrock(x):
    with np.errstate(over="ignore"):
        return float(100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2)


def gradient(x):
    return np.array([-400 * x[0] * (x[1] - x[0] ** 2) - 2 * (1 - x[0]), 200 * (x[1] - x[0] ** 2)])


def product(x, v):
    a = 1200 * x[0] ** 2 - 400 * x[1] + 2
    return np.array([a * v[0] - 400 * x[0] * v[1], -400 * x[0] * v[0] + 200 * v[1]])


@pytest.mark.parametrize("method", ["sanc", "scr", "arc", "cr", "crm", "ncd"])
@pytest.mark.parametrize("preset", sanc.PRESETS)
def test_a_fault_at_every_call_of_a_callable(method, preset, tally):
    cases, failures = 0, []

    def go(name, at, fault):
        count = 0

        def wrapped(role, function):
            def call(*given):
                nonlocal count
                returned = function(*given)
                if role != name:
                    return returned
                count += 1
                if count - 1 != at:
                    return returned
                if fault is None:
                    raise InjectedError
                return returned * fault

            return call

        given = {"jac": wrapped("jac", gradient), "hessp": wrapped("hessp", product), "max_iter": 25}
        res = sanc.minimize(wrapped("fun", rosenbrock), np.array([-1.2, 1.0]), method=method, preset=preset, **given)
        return count, res

    for name in ("fun", "jac", "hessp"):
        total, _ = go(name, -1, 1.0)
        for at in range(0, total, max(1, total // 8)):
            for fault in (np.nan, np.inf, -1e300, None):
                failure = ""
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    try:
                        _, res = go(name, at, fault)
                        if not np.isfinite(res.x).all():
                            failure = "x is not finite"
                        if res.success and not np.linalg.norm(gradient(res.x)) <= 1e-7:
                            failure = "success away from a stationary point"
                    except InjectedError:
                        failure = "" if fault is None else "raised an error that was not injected"
                    except Exception as error:
                        failure = f"{type(error).__name__}: {error}"
                cases += 1
                failures += [(name, at, fault, failure)] if failure else []
    tally("injection in callables", cases, failures)
