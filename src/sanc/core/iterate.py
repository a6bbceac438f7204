"""A point of the run, and what an iteration knows there: what its pieces share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sanc.core import cubic
from sanc.core.judge import Judge
from sanc.core.krylov import Krylov
from sanc.core.oracle import Operator, Oracle
from sanc.core.record import Branch, Record
from sanc.core.space import Space, Vector
from sanc.core.units import Units

LOST = "the cubic step vanishes in the rounding of x"


class NonFiniteValueError(ArithmeticError):
    """f is not finite at the current point."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The random draws of one iteration: functions of (seed, iteration), so that a resumed run repeats them."""

    seed: int
    iteration: int

    def generator(self, purpose: int) -> np.random.Generator:
        """Return a generator of its own for each purpose."""
        return np.random.default_rng((self.seed, self.iteration, purpose))

    def escape_sign(self) -> float:
        """Toss the coin z of step 2.6."""
        return -1.0 if self.generator(1).integers(2) else 1.0

    def start(self, space: Space) -> Vector:
        """Draw the start of Lanczos where the gradient vanishes."""
        return space.normal(self.generator(2))

    def hard_sign(self) -> float:
        """Toss the coin of the hard case, in which both signs minimise the model."""
        return 1.0 if self.generator(3).integers(2) else -1.0


@dataclass(slots=True)
class Iterate:
    """The current point x and everything that this iteration has found out there."""

    x: Vector  # never changed
    oracle: Oracle
    judge: Judge  # holds σ
    record: Record
    draws: Draws
    reach: float = 0.0  # length of the last step that was taken
    start: Vector | None = None  # where to start Lanczos instead of at the gradient
    previous: Vector | None = None  # the cubic point of the iteration before, where momentum needs it
    one_sample: bool = False  # whether S_f is S_g
    g: Vector = field(init=False)  # on S_g
    operator: Operator | None = None  # B on S_B
    krylov: Krylov | None = None
    spectrum: cubic.Spectrum | None = None  # of the T of that Krylov space
    slope: float = 0.0  # ‖g‖ one iteration ago; 0: none
    units: Units = field(default_factory=Units)  # of the first point
    ahead: bool = False  # whether the gradient at the next point may be asked for already
    longest: float = math.inf  # of the steps that may be tried without a value on the way
    guessed: bool = False  # whether σ says nothing about f yet: it is the first, or that of `longest`
    cubic_norm: float = 0.0  # length of the last cubic step that was tried
    at_rest: bool = False  # whether it stays with d = 0 and ‖s‖ ≤ ε_s: the paper's ending (2.7)
    _solved: tuple[cubic.Spectrum, float, cubic.CubicStep] | None = None  # the last step, which is asked for twice

    @property
    def space(self) -> Space:
        """The vectors' arithmetic."""
        return self.oracle.space

    def measure(self) -> None:
        """2.1: g = ∇f on S_g at x, and γ0 = ‖g‖."""
        self.record.value, self.g = self.oracle.gradient(self.x)
        self.record.grad_norm = self.space.norm(self.g)

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are."""
        return math.isfinite(self.record.value) and math.isfinite(self.record.grad_norm)

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
            sign = self.sign(lambda: float(eigen.leftmost_vector @ linear), self.draws.hard_sign)
            step = cubic.solve(eigen, linear, sigma, sign)
        self._solved = (eigen, sigma, step)
        return step

    def sign(self, slope: Callable[[], float], coin: Callable[[], float]) -> float:
        """Choose between v and −v: downhill where the settings ask for that and v has a slope, else by the coin."""
        along = slope() if self.judge.settings.sign == "descent" else 0.0
        return coin() if along == 0.0 else -math.copysign(1.0, along)

    def trial_point(self, step: cubic.CubicStep) -> Vector:
        """Return x + Qu; products are done with for now."""
        assert self.krylov is not None
        (s,) = self.krylov.combine(step.u)
        self.release()
        return s + self.x

    def vanishes(self, step: cubic.CubicStep) -> bool:
        """Whether a step is lost in the rounding of x."""
        return step.norm <= self.space.eps * self.space.norm(self.x) < math.inf

    def shortness(self, step: cubic.CubicStep) -> float:
        """Return how long a step is beside √eps‖x‖ where a σ decides on it with which nothing was tried, else 1."""
        assert self.spectrum is not None
        untried = self.record.trials == 0 and step.multiplier > self.spectrum.size
        return step.norm / (math.sqrt(self.space.eps) * self.space.norm(self.x)) if untried else 1.0

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
        if not math.isfinite(self.space.norm(point)):
            return math.nan
        before, unit = self.record.value, self.units.value
        absurd = unit > 0.0 and before - value > (abs(before) + unit) / self.space.eps**2
        return -math.inf if absurd else value

    def stay(self, note: str = "") -> Vector:
        """End the iteration at x; with samples, d = 0 says something only if g is 0."""
        record = self.record
        record.branch, record.step_norm = Branch.STAYED, 0.0
        record.note = note or record.note
        decides = self.oracle.exact or record.grad_norm == 0.0
        self.at_rest = decides and self.cubic_norm <= self.judge.settings.epsilon_s
        return self.x
