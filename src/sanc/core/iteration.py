"""One iteration of the family: section 2 of the specification, line by line.

A method is a composition of three objects: a model (Krylov space and cubic steps), an acceptance, and what to do on
rejection. The iteration knows vectors only through a `Space` and the objective only through an `Oracle`; σ belongs to
the judge. Its random draws are functions of (seed, iteration), so its whole state is a handful of numbers, and a run
that is resumed repeats a run that was not interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sanc.core.family import Method
from sanc.core.iterate import LOST, Draws, Iterate, NonFiniteValueError
from sanc.core.judge import Judge
from sanc.core.krylov import NonFiniteProductError
from sanc.core.oracle import Oracle
from sanc.core.record import Record
from sanc.core.saved import require_fields
from sanc.core.settings import Settings
from sanc.core.space import Vector
from sanc.core.units import Units
from sanc.errors import ArgumentError, NonFiniteStartError


@dataclass(frozen=True, slots=True)
class State:
    """All that is carried from one iteration to the next."""

    seed: int
    iteration: int = 0
    sigma: float = 1.0
    seconds: float = 0.0
    reach: float = 0.0  # length of the last step
    slope: float = 0.0  # ‖g‖ one iteration ago; 0: none
    length: float = 0.0  # the units of the first point, see `sanc.core.units`
    cubic: float = 0.0
    previous: Vector | None = None  # the last cubic point, where momentum needs it


class Iteration:
    """The iteration of a method.

    Parameters
    ----------
    seed : int
        Seed of the coin, the random start and the sign in the hard case.
    goal : float
        ‖g‖ that the caller is content with: the model is not minimised far beyond it.
    one_sample : bool
        Whether steps are judged on the gradient sample.
    ahead : bool
        Whether the gradient at the next point may be asked for at once, since it is the same in the next iteration.

    Attributes
    ----------
    at_rest : bool
        Whether the last iteration stayed where it was with a cubic step no longer than ε_s: the paper's ending (2.7).
    """

    def __init__(
        self,
        method: Method,
        settings: Settings,
        seed: int,
        goal: float = 0.0,
        *,
        one_sample: bool = False,
        ahead: bool = False,
    ) -> None:
        self.method = method
        self.settings = settings
        self.acceptance = method.acceptance(settings)
        for_model = settings if method.tested else replace(settings, resolves=0, first_radius=None)
        self.model = method.model(for_model, goal)
        self.on_rejection = method.on_rejection(settings)
        self.state = State(seed=seed, sigma=settings.first_sigma)
        self.at_rest = False
        self._one_sample = one_sample
        self._ahead = ahead

    def iterate(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]:
        """Make one iteration from `x`.

        Parameters
        ----------
        x : vector
            The current point; never changed.
        oracle : Oracle
            Answers f, g and Hv.
        start : vector, optional
            Where to start Lanczos instead of at the gradient: a direction of negative curvature known from
            elsewhere, at a point where the gradient vanishes.

        Returns
        -------
        point : vector
            The next point; `x` itself where the iteration stayed.
        record : Record
        """
        clock, state = time.perf_counter(), self.state
        judge = Judge(self.settings, oracle.space.eps, state.sigma, exact=oracle.exact)
        record = Record(state.iteration, sigma=state.sigma if self.method.has_model else math.nan)
        draws = Draws(state.seed, state.iteration)
        at = Iterate(x, oracle, judge, record, draws, state.reach, start, state.previous, self._one_sample)
        at.slope, at.units, at.ahead = state.slope, Units(state.length, state.cubic), self._ahead
        oracle.begin(state.iteration, products=self.method.uses_krylov)
        try:
            point = self._advance(at)
        finally:
            at.release()
        self._charge(oracle, record.krylov_dim)
        self.at_rest = at.at_rest
        seconds = state.seconds + time.perf_counter() - clock
        reach = record.step_norm or state.reach
        self.state = State(
            state.seed,
            state.iteration + 1,
            judge.sigma,
            seconds,
            reach,
            record.grad_norm,
            at.units.length,
            at.units.cubic,
            at.previous,
        )
        record.calls, record.seconds, record.hvp = oracle.meter.snapshot(), seconds, oracle.hvp
        return point, record

    def _advance(self, at: Iterate) -> Vector:
        """Algorithm 1, with the numbers of the specification."""
        at.measure()  # 2.1  g = ∇f on S_g at x, γ0 = ‖g‖
        if not at.finite:
            what = "gradient" if math.isfinite(at.record.value) else "loss"
            return self._refuse(at, f"the {what} of the gradient sample is not finite")
        try:
            point = self._cubic_step(at)
            if point is None:
                point = self.on_rejection.point(at, only=not self.method.has_model)  # 2.6  x ← x + d;  2.7  or the end
            return point
        except NonFiniteValueError as problem:
            return self._refuse(at, str(problem))

    def _cubic_step(self, at: Iterate) -> Vector | None:
        """Return the next point where a cubic step is accepted, or None."""
        try:
            if self.method.uses_krylov:
                self.model.build(at)  # 2.2  Lanczos on B from g: Q, T;  2.4  the left-most Ritz pair λ1, v
            for step in self.model.steps(at):  # 2.3  u minimises the cubic model in the space, globally
                if at.vanishes(step):
                    at.judge.forget(at.shortness(step))
                    at.record.note = LOST
                    break
                trial = at.trial_point(step)  # s = Qu
                point = self.acceptance.judge(at, step, trial)  # 2.5  ρ;  2.6  σ, and x ← x + s where ρ ≥ η1
                if point is not None:
                    return point
        except NonFiniteProductError as problem:  # there is no cubic step, but the gradient step of 2.6 is still open
            self._refuse(at, str(problem))
            at.spectrum = None
        return None

    def _refuse(self, at: Iterate, note: str) -> Vector:
        """Stay at x because something is not finite; at the very start that is an error."""
        if at.record.iteration == 0:
            raise NonFiniteStartError(
                f"{note} at the starting point (loss {at.record.value!r}, gradient norm {at.record.grad_norm!r}). "
                "Start where the loss is finite, and check the data and the initial weights."
            )
        at.judge.reject()
        at.record.note = note
        return at.x

    def _charge(self, oracle: Oracle, krylov_dim: int) -> None:
        """Count as the paper's program does (D4): |S_g| + J·|S_B|, whether or not Lanczos stopped before J.

        A Krylov space whose length follows need is charged for what it used.
        """
        s = self.settings
        if self.method.uses_krylov and s.krylov_stop == "paper" and s.krylov_dim is not None:
            krylov_dim = min(s.krylov_dim, oracle.space.dim)
        size_g, size_b, _ = oracle.sizes
        oracle.meter.paper_calls += size_g + krylov_dim * size_b

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        return {
            name: getattr(self.state, name)
            for name in ("seed", "iteration", "sigma", "seconds", "reach", "slope", "length", "cubic")
        }

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state."""
        return {} if self.state.previous is None else {"previous": self.state.previous}

    def check(self, where: str, numbers: Any, vectors: Collection[str], shapes: Any = (), factors: Any = ()) -> None:
        """Refuse what `numbers` and `vectors` (of which the names are asked) cannot have returned."""
        require_fields(where, numbers, State)
        for name in vectors:
            if name != "previous":
                raise ArgumentError(f"{where} comes with a vector {name!r}: pass a state of the same preset.")

    def restore(self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], factors: Any = ()) -> None:
        """Go on from what `numbers` and `vectors` returned."""
        self.state = State(**numbers, **vectors)

    def forget(self) -> None:
        """Drop what belongs to vectors of another length."""
        self.state = replace(self.state, previous=None)
