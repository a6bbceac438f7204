"""A point of the run, and what an iteration knows there: what its pieces share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sanc.core import cubic
from sanc.core.judge import Judge
from sanc.core.krylov import Krylov
from sanc.core.oracle import Operator, Oracle
from sanc.core.record import Branch, Record
from sanc.core.settings import Settings
from sanc.core.space import Space, Vector
from sanc.core.units import Units

LOST = "the cubic step vanishes in the rounding of x"


class NonFiniteValueError(ArithmeticError):
    """f is not finite at the current point."""


@dataclass(frozen=True, slots=True)
class State:
    """All that is carried from one iteration to the next."""

    seed: int
    iteration: int = 0
    sigma: float = 1.0
    seconds: float = 0.0
    reach: float = 0.0  # length of the last step that led anywhere
    slope: float = 0.0  # ‖g‖ one iteration ago; 0: none
    length: float = 0.0  # the units of the first point, see `sanc.core.units`
    cubic: float = 0.0
    previous: Vector | None = None  # the last cubic point, where momentum needs it


ESCAPE_SIGN, LANCZOS_START, HARD_CASE_SIGN = 1, 2, 3
"""What random numbers are drawn for: the coin of 2.6, a start where the gradient vanishes, the hard case's coin."""


def generator(state: Any, purpose: int) -> np.random.Generator:
    """Return a generator for a purpose, a function of (seed, iteration), so that a resumed run repeats its draws."""
    return np.random.default_rng((state.seed, state.iteration, purpose))


@dataclass(slots=True)
class Iterate:
    """The current point x and everything that this iteration has found out there."""

    x: Vector  # never changed
    oracle: Oracle
    judge: Judge  # holds σ
    record: Record
    state: State  # before this iteration
    start: Vector | None = None  # where to start Lanczos instead of at the gradient
    goal: float = 0.0  # ‖g‖ that the caller is content with
    one_sample: bool = False  # whether S_f is S_g
    ahead: bool = False  # whether the gradient at the next point may be asked for already
    space: Space = field(init=False)
    settings: Settings = field(init=False)
    g: Vector = field(init=False)  # on S_g
    operator: Operator | None = None  # B on S_B
    krylov: Krylov | None = None
    spectrum: cubic.Spectrum | None = None  # of the T of that Krylov space
    units: Units = field(init=False)  # of the first point
    previous: Vector | None = field(init=False)  # the last cubic point, where momentum needs it
    longest: float = math.inf  # of the steps that may be tried without a value on the way
    guessed: bool = False  # whether σ says nothing about f yet: it is the first, or that of `longest`
    cubic_norm: float = 0.0  # length of the last cubic step that was tried
    at_rest: bool = False  # whether it stays with d = 0 and ‖s‖ ≤ ε_s: the paper's ending (2.7)
    _size: float | None = None
    _solved: tuple[cubic.Spectrum, float, cubic.CubicStep] | None = None  # the last step, which is asked for twice

    def __post_init__(self) -> None:
        self.space, self.settings = self.oracle.space, self.judge.settings
        self.units, self.previous = Units(self.state.length, self.state.cubic), self.state.previous

    @property
    def size(self) -> float:
        """‖x‖, which is asked for often."""
        if self._size is None:
            self._size = self.oracle.norm(self.x)
        return self._size

    def measure(self) -> None:
        """2.1: g = ∇f on S_g at x, and γ0 = ‖g‖."""
        self.record.value, self.g = self.oracle.gradient(self.x)
        self.record.grad_norm = self.oracle.norm(self.g)

    def solve(self, sigma: float) -> cubic.CubicStep:
        """2.3: minimise the model in the Krylov space, globally; in the hard case the settings choose the sign."""
        assert self.krylov is not None
        assert self.spectrum is not None
        known = self._solved
        if known is not None and known[0] is self.spectrum and known[1] == sigma:
            return known[2]
        eigen, linear = self.spectrum, self.krylov.linear
        step = cubic.solve(eigen, linear, sigma)
        if step.hard:
            slope = float(eigen.leftmost_vector @ linear)
            step = cubic.solve(eigen, linear, sigma, self.sign(slope, HARD_CASE_SIGN, 1.0))
        self._solved = (eigen, sigma, step)
        return step

    def sign(self, slope: float, purpose: int, heads: float) -> float:
        """Choose between v and −v: downhill where the settings ask for that and v has a slope, else by a coin."""
        if self.settings.sign == "descent" and slope != 0.0:
            return -math.copysign(1.0, slope)
        return heads if generator(self.state, purpose).integers(2) else -heads

    def trial_point(self, step: cubic.CubicStep) -> Vector:
        """Return x + Qu; products are done with for now."""
        assert self.krylov is not None
        (s,) = self.krylov.combine(step.u)
        self.release()
        return s + self.x

    def vanishes(self, step: cubic.CubicStep) -> bool:
        """Whether a step is lost in the rounding of x."""
        return step.norm <= self.space.eps * self.size < math.inf

    def shortness(self, step: cubic.CubicStep) -> float:
        """Return how long a step is beside √eps‖x‖ where a σ decides on it with which nothing was tried, else 1."""
        assert self.spectrum is not None
        untried = self.record.trials == 0 and step.multiplier > self.spectrum.size
        return step.norm / (math.sqrt(self.space.eps) * self.size) if untried else 1.0

    def release(self) -> None:
        """Let go of what products need."""
        if self.operator is not None:
            self.operator.release()

    def value(self) -> float:
        """f(x) on S_f, asked for before the first trial."""
        if self.record.trials == 0 and not self.one_sample:
            self.record.value = self.oracle.value(self.x)
            if not math.isfinite(self.record.value):
                raise NonFiniteValueError("the loss of the objective sample is not finite")
        return self.record.value

    def try_value(self, point: Vector) -> float:
        """F at a trial point on S_f; not finite where the point is not, or where it is lower than can be believed."""
        value = self.oracle.trial(point) if self.one_sample else self.oracle.value(point)
        self.record.trials += 1
        if not math.isfinite(self.oracle.norm(point)):
            return math.nan
        before, unit = self.record.value, self.units.value
        absurd = unit > 0.0 and before - value > (abs(before) + unit) / self.space.eps**2
        return -math.inf if absurd else value

    def stay(self) -> Vector:
        """End the iteration at x; with samples, d = 0 says something only if g is 0."""
        record = self.record
        record.branch, record.step_norm = Branch.STAYED, 0.0
        decides = self.oracle.exact or record.grad_norm == 0.0
        self.at_rest = decides and self.cubic_norm <= self.settings.epsilon_s
        return self.x
