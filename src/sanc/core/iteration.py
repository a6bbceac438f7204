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
from dataclasses import replace
from typing import Any

from sanc.core.family import Method
from sanc.core.iterate import LOST, Iterate, NonFiniteValueError, State
from sanc.core.judge import Judge
from sanc.core.krylov import NonFiniteProductError
from sanc.core.model import build
from sanc.core.oracle import Oracle
from sanc.core.record import Record
from sanc.core.saved import numbers_of, require_fields, require_vector_names, vectors_of
from sanc.core.settings import Settings
from sanc.core.space import Vector
from sanc.errors import NonFiniteStartError


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
        With samples only where the gradient was zero.
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
        self.settings = settings if method.tested else replace(settings, resolves=0, first_radius=None)
        self.state = State(seed=seed, sigma=settings.first_sigma)
        self.at_rest = False
        self._how = (goal, one_sample, ahead)

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
        at = Iterate(x, oracle, judge, record, state, start, *self._how)
        oracle.begin(state.iteration, products=self.method.uses_krylov)
        try:
            point = self._advance(at)
        finally:
            at.release()
        self._charge(oracle, record.krylov_dim)
        self.at_rest = at.at_rest
        seconds = state.seconds + time.perf_counter() - clock
        slope = record.grad_norm if math.isfinite(record.grad_norm) else state.slope
        carried = (judge.sigma, seconds, record.step_norm or state.reach, slope)
        self.state = State(state.seed, state.iteration + 1, *carried, at.units.length, at.units.cubic, at.previous)
        record.calls, record.seconds, record.hvp = oracle.meter.snapshot(), seconds, oracle.hvp
        return point, record

    def _advance(self, at: Iterate) -> Vector:
        """Algorithm 1, with the numbers of the specification."""
        at.measure()  # 2.1  g = ∇f on S_g at x, γ0 = ‖g‖
        for what, number in (("loss", at.record.value), ("gradient", at.record.grad_norm)):
            if not math.isfinite(number):
                return self._refuse(at, f"the {what} of the gradient sample is not finite")
        try:
            point = self._cubic_step(at)
            if point is None:
                point = self.method.on_rejection(at, not self.method.has_model)  # 2.6  x ← x + d;  2.7  or the end
            return point
        except (NonFiniteValueError, NonFiniteProductError) as problem:
            return self._refuse(at, str(problem))

    def _cubic_step(self, at: Iterate) -> Vector | None:
        """Return the next point where a cubic step is accepted, or None."""
        try:
            if self.method.uses_krylov:
                build(at, solves=self.method.has_model)  # 2.2  Lanczos on B from g: Q, T;  2.4  the left-most λ1
            for step in self.method.model(at):  # 2.3  u minimises the cubic model in the space, globally
                if at.vanishes(step):
                    at.judge.forget(at.shortness(step))
                    at.record.note = LOST
                    break
                trial = at.trial_point(step)  # s = Qu
                point = self.method.acceptance(at, step, trial)  # 2.5  ρ;  2.6  σ, and x ← x + s where ρ ≥ η1
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
        return numbers_of(self.state)

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state."""
        return vectors_of(self.state)

    def check(self, where: str, numbers: Any, vectors: Collection[str], shapes: Any = (), factors: Any = ()) -> None:
        """Refuse what `numbers` and `vectors` (of which the names are asked) cannot have returned."""
        require_fields(where, numbers, State)
        require_vector_names(where, vectors, State)

    def restore(self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], factors: Any = ()) -> None:
        """Go on from what `numbers` and `vectors` returned."""
        self.state = State(**numbers, **vectors)

    def forget(self) -> None:
        """Drop what belongs to vectors of another length."""
        self.state = replace(self.state, previous=None)
