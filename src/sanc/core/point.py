"""The current point, as the pieces of a method see it, and the state that an iteration hands to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from sanc.core.judge import Judge
from sanc.core.oracle import Oracle
from sanc.core.space import Space, Vector
from sanc.core.units import Units

ESCAPE_SIGN, LANCZOS_START, HARD_CASE_SIGN = 1, 2, 3
"""Purposes of random numbers: the sign in 2.6, the start of Lanczos where g = 0, the sign in the hard case."""


class NonFiniteValueError(ArithmeticError):
    """f is not finite at the current point on the objective sample."""

    def __init__(self, value: float) -> None:
        super().__init__("the loss of the objective sample is not finite")
        self.value = value


@dataclass(frozen=True, slots=True)
class State:
    """Everything that one iteration hands to the next."""

    seed: int
    iteration: int = 0
    sigma: float = field(default=1.0, metadata={"positive": True})
    seconds: float = 0.0
    step_norm: float = 0.0  # of the last step that moved x
    grad_norm: float = 0.0  # ‖g‖ one iteration ago; 0: none
    unit_length: float = 0.0  # the units of the first point, see `sanc.core.units`
    unit_cubic: float = 0.0
    memory: Mapping[str, Any] = field(default_factory=dict)  # of the acceptance rule

    @property
    def units(self) -> Units:
        """The units of the first point; zero where they are not known yet."""
        return Units(self.unit_length, self.unit_cubic)


def generator(seed: int, iteration: int, purpose: int) -> np.random.Generator:
    """Return a generator that depends on these three alone, so that a resumed run repeats its draws."""
    return np.random.default_rng((seed, iteration, purpose))


@dataclass(frozen=True)
class Point:
    """The current point x, and what the iteration knows there. The pieces of a method read it and change nothing.

    Attributes
    ----------
    x, g : vector
        The point, and the gradient on S_g.
    value, grad_norm : float
        f(x) and ‖g‖ on S_g.
    oracle : Oracle
        Evaluates f, g and Hv.
    judge : Judge
        Rules for σ.
    state : State
        What the iteration before handed over.
    units : Units
        Length and cubic coefficient of the first point.
    tol : float
        ‖g‖ that the caller asks for.
    one_sample : bool
        Whether ρ is formed on S_g.
    ahead : bool
        Whether the gradient at the next point may be evaluated now, since the next iteration starts with it.
    start : vector or None
        Where to start Lanczos instead of at the gradient.
    """

    x: Vector
    g: Vector
    value: float
    grad_norm: float
    oracle: Oracle
    judge: Judge
    state: State
    units: Units
    tol: float = 0.0
    one_sample: bool = False
    ahead: bool = False
    start: Vector | None = None

    @property
    def space(self) -> Space:
        """The vector space of x."""
        return self.oracle.space

    @cached_property
    def norm(self) -> float:
        """‖x‖."""
        return self.oracle.norm(self.x)

    @cached_property
    def objective(self) -> float:
        """f(x) on S_f, evaluated when it is first asked for."""
        if self.one_sample:
            return self.value
        value = self.oracle.value(self.x)
        if not math.isfinite(value):
            raise NonFiniteValueError(value)
        return value

    @property
    def known_value(self) -> float:
        """f(x) on S_f if it was evaluated, otherwise on S_g."""
        return float(self.__dict__.get("objective", self.value))

    def evaluate(self, trial: Vector) -> float:
        """Return f at a trial point on S_f.

        It is NaN where the point is not finite, and −∞ where f is lower than a bounded function could be.
        """
        value = self.oracle.gradient_sample_value(trial) if self.one_sample else self.oracle.value(trial)
        if not math.isfinite(self.oracle.norm(trial)):
            return math.nan
        before, unit = self.known_value, self.units.value
        absurd = unit > 0.0 and before - value > (abs(before) + unit) / self.space.eps**2
        return -math.inf if absurd else value

    def vanishes(self, step_norm: float) -> bool:
        """Whether x + s equals x in working precision."""
        return step_norm <= self.space.eps * self.norm < math.inf

    def coin(self, purpose: int) -> bool:
        """Toss a coin that depends on seed, iteration and purpose alone."""
        return bool(generator(self.state.seed, self.state.iteration, purpose).integers(2))

    def random_start(self) -> Vector:
        """Return a random vector from which to start Lanczos."""
        return self.space.normal(generator(self.state.seed, self.state.iteration, LANCZOS_START))
