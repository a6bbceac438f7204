"""The current point, as the pieces of a method receive it, and the state of the iteration between two steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from sanc.core.oracle import Oracle
from sanc.core.sigma import SigmaRule
from sanc.core.space import Space, Vector
from sanc.core.spectrum.cubic import CubicStep
from sanc.core.units import Units, measure_units, unbounded_decrease

ESCAPE_SIGN, LANCZOS_START, HARD_CASE_SIGN = 1, 2, 3
"""Purposes of random numbers: the sign of an escape step, the start of Lanczos if g = 0, the sign in the hard case."""


class NonFiniteValueError(ArithmeticError):
    """f is not finite at the current point on the objective sample."""

    def __init__(self, value: float) -> None:
        super().__init__("the loss of the objective sample is not finite")
        self.value = value


@dataclass(frozen=True, slots=True)
class State:
    """The state of the iteration between two steps.

    Attributes
    ----------
    seed : int
        Seed of the random draws.
    iteration : int
        Iterations made.
    sigma : float
        σ for the next iteration.
    seconds : float
        Time spent in iterations.
    last_step_norm : float
        Norm of the last step that moved x; 0 before the first.
    last_grad_norm : float
        ‖g‖ in the last iteration; 0 before the first.
    first_length_scale, unit_cubic : float
        Length scale and unit of σ of the first point (`sanc.core.units`); 0 until they are measured.
    value_noise : float
        Noise of an exact f beyond roundoff, which the ratio test tolerates; 0 unless it has stalled the run.
    acceptance_state : mapping
        State of the acceptance rule: floats, and vectors of the dimension of x.
    """

    seed: int
    iteration: int = 0
    sigma: float = field(default=1.0, metadata={"positive": True})
    seconds: float = 0.0
    last_step_norm: float = 0.0
    last_grad_norm: float = 0.0
    first_length_scale: float = 0.0
    unit_cubic: float = 0.0
    value_noise: float = 0.0
    acceptance_state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def units(self) -> Units:
        """The units of the first point; zero until they are measured."""
        return Units(self.first_length_scale, self.unit_cubic)


def random_generator(seed: int, iteration: int, purpose: int) -> np.random.Generator:
    """Return a generator that depends on nothing but these three, so that a resumed run repeats its draws."""
    return np.random.default_rng((seed, iteration, purpose))


@dataclass(frozen=True, kw_only=True)
class Point:
    """The current point x with the evaluations made there. The pieces of a method read it and change nothing.

    Attributes
    ----------
    x, g : vector
        The point, and the gradient on S_g.
    value, grad_norm : float
        f(x) and ‖g‖ on S_g.
    oracle : Oracle
        Evaluates f, g and Hv.
    sigma_rule : SigmaRule
        The rule by which σ changes.
    state : State
        The state after the previous iteration.
    units : Units
        Length scale and unit of σ of the first point.
    tol : float
        The caller's tolerance on ‖g‖.
    one_sample : bool
        Whether ρ is formed on S_g.
    evaluates_next_gradient : bool
        Whether the gradient at the next point may be evaluated now, since the next iteration starts with it.
    lanczos_start : vector or None
        Start vector of Lanczos; None: the gradient.
    rejected : CubicStep or None
        The step of this iteration that was rejected last, if the model is asked for another one.
    """

    x: Vector
    g: Vector
    value: float
    grad_norm: float
    oracle: Oracle
    sigma_rule: SigmaRule
    state: State
    units: Units
    tol: float = 0.0
    one_sample: bool = False
    evaluates_next_gradient: bool = False
    lanczos_start: Vector | None = None
    rejected: CubicStep | None = None

    @property
    def space(self) -> Space:
        """The vector space of x."""
        return self.oracle.space

    @property
    def start(self) -> Vector | None:
        """The former name of `lanczos_start`."""
        return self.lanczos_start

    @cached_property
    def x_norm(self) -> float:
        """‖x‖, the norm of the current point."""
        return self.oracle.norm(self.x)

    @cached_property
    def objective(self) -> float:
        """f(x) on S_f, evaluated at the first access; an error is raised if it is not finite."""
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
        """Return f at a trial point, on the sample of ρ.

        NaN if the point is not finite; −∞ if the value shows that f is unbounded (`unbounded_decrease`): a single such
        value is not trusted.
        """
        value = self.oracle.gradient_sample_value(trial) if self.one_sample else self.oracle.value(trial)
        if not math.isfinite(self.oracle.norm(trial)):
            return math.nan
        unit = self.units.value
        is_implausibly_low = unit > 0.0 and self.value - value > unbounded_decrease(self.value, unit, self.space.eps)
        return -math.inf if is_implausibly_low else value

    def measure_units(self, product_norm: float) -> Units:
        """Return the units of this point if it is the first one.

        `product_norm` is ‖Bq‖ with the unit vector q of the start of Lanczos, or an estimate of ‖B‖.
        """
        is_stationary = self.grad_norm <= self.space.eps * product_norm * self.x_norm
        # At a stationary point, and if Lanczos does not start at the gradient, that gives no length scale.
        grad_norm = 0.0 if self.lanczos_start is not None or is_stationary else self.grad_norm
        return measure_units(self.value, grad_norm, product_norm, self.x_norm)

    def below_precision(self, step_norm: float) -> bool:
        """Return whether x + s equals x in working precision, given ‖s‖."""
        return step_norm <= self.space.eps * self.x_norm < math.inf

    def random_bit(self, purpose: int) -> bool:
        """Return a random bit, a function of seed, iteration and purpose."""
        return bool(random_generator(self.state.seed, self.state.iteration, purpose).integers(2))

    def random_lanczos_start(self) -> Vector:
        """Return a random start vector of Lanczos."""
        return self.space.normal(random_generator(self.state.seed, self.state.iteration, LANCZOS_START))
