"""A point of an iteration whose evaluations are given, for tests of one piece; its oracle records them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np

from sanc.core.point import Point, State
from sanc.core.sigma import SigmaRule
from sanc.core.space import NumpySpace
from sanc.core.spectrum.cubic import CubicStep
from sanc.core.units import Units


class GivenOracle:
    """An oracle of the functions f and g; `values` and `gradients` are the points where they were evaluated."""

    exact = True

    def __init__(self, dim, f, g):
        self.space = NumpySpace(dim, np.float64)
        self.f, self.g = f, g
        self.values, self.gradients = [], []

    def value(self, x):
        self.values.append(x)
        return self.f(x)

    gradient_sample_value = value

    def gradient(self, x):
        self.gradients.append(x)
        return self.f(x), self.g(x)

    def norm(self, v):
        return float(np.linalg.norm(v))

    def move(self, x, d):
        return x + d


def point_with(f, *, x=(0.0,), g=(1.0,), g_elsewhere=None, rule=None, state=None, **fields):
    """Return the point x with f and the gradient g there; elsewhere the gradient is a function, by default also g."""
    x, g = np.array(x), np.array(g)
    oracle = GivenOracle(len(x), f, g_elsewhere or (lambda x: g))
    here = Point(
        x=x,
        g=g,
        value=f(x),
        grad_norm=float(np.linalg.norm(g)),
        oracle=oracle,
        sigma_rule=rule or SigmaRule(),
        state=dataclasses.replace(State(seed=0), **(state or {})),
        units=Units(1.0, 1.0),
        one_sample=True,
    )
    return dataclasses.replace(here, **fields)


def step_of(norm, decrease, sigma=1.0):
    """Return a cubic step with this norm and predicted decrease."""
    return CubicStep(u=np.array([norm]), norm=norm, multiplier=sigma * norm, decrease=decrease, hard_case=False,
                     sigma=sigma)  # fmt: skip


def subspace_with(**members):
    """Return a subspace that allows no longer steps; `members` are its others."""
    return SimpleNamespace(**{"allows_longer_steps": False, "hessian_norm": 1.0, "release": lambda: None} | members)
