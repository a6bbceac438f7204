"""One iteration of the family: section 2 of the specification, line by line.

A method is a composition of pieces: a model (Krylov space and cubic steps), an acceptance rule and an escape rule. Each
piece returns what it decided; the iteration alone writes the state and the record. It knows vectors only through a
`Space` and the objective only through an `Oracle`. Its random draws are functions of (seed, iteration), so a resumed
run repeats a run that was not interrupted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sanc.core.krylov import NonFiniteProductError
from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.pieces import Decision
from sanc.core.point import NonFiniteValueError, Point, State
from sanc.core.record import Branch, Note, Record
from sanc.core.saved import numbers_of, require_fields, state_error
from sanc.core.space import Vector
from sanc.core.units import Units
from sanc.errors import ArgumentError, NonFiniteStartError

_MEMORY = "memory."
"""What the names of vectors begin with that the acceptance rule remembers."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What an iteration has decided so far."""

    decision: Decision  # of the rule that decided last
    here: Point  # with the units that the first product shows
    tried: Decision | None = None  # of the acceptance rule, with the trials of all its calls
    subspace: Any = None
    note: str = ""
    value: float = math.nan  # f(x) on S_f where that is not finite
    ended: bool = False  # whether no escape follows


class Iteration:
    """The iteration of a method.

    Parameters
    ----------
    seed : int
        Seed of the coin, the random start and the sign in the hard case.
    tol : float
        ‖g‖ that the caller asks for: the model is not minimised far beyond it.
    one_sample : bool
        Whether ρ is formed on the gradient sample.
    ahead : bool
        Whether the gradient at the next point may be evaluated at once, since the next iteration starts with it.

    Attributes
    ----------
    at_rest : bool
        Whether the last iteration stayed with a cubic step norm of at most ε_s: the paper's ending (2.7). With samples
        only where the gradient was zero.
    """

    averages = False
    went_back = False

    def __init__(
        self, method: Method, seed: int, tol: float = 0.0, *, one_sample: bool = False, ahead: bool = False
    ) -> None:
        self.method = method
        self.state = State(seed=seed, sigma=method.sigma.judge(0.0).first)
        self.at_rest = False
        self.rates: Sequence[float] = ()
        self.tol, self._one_sample, self._ahead = tol, one_sample, ahead

    @property
    def units(self) -> Units:
        """The units of the first point; zero where they are not known yet."""
        return self.state.units

    @property
    def grad_norm(self) -> float:
        """‖g‖ in the last iteration; 0 before the first."""
        return self.state.grad_norm

    def iterate(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]:
        """Make one iteration from `x`.

        Parameters
        ----------
        x : vector
            The current point; never changed.
        oracle : Oracle
            Evaluates f, g and Hv.
        start : vector, optional
            Where to start Lanczos instead of at the gradient: a known direction of negative curvature at a point where
            the gradient vanishes.

        Returns
        -------
        point : vector
            The next point; `x` itself where the iteration stayed.
        record : Record
        """
        clock, state, method = time.perf_counter(), self.state, self.method
        oracle.begin(state.iteration, products=method.needs_products)
        value, g = oracle.gradient(x)  # 2.1  g = ∇f on S_g at x, γ0 = ‖g‖
        judge = method.sigma.judge(oracle.space.eps, exact=oracle.exact)
        options = (self.tol, self._one_sample, self._ahead, start)
        here = Point(x, g, value, oracle.norm(g), oracle, judge, state, state.units, *options)
        outcome = self._advance(here)
        size_g, size_b, _ = oracle.sizes
        dim = 0 if outcome.subspace is None else outcome.subspace.dim
        oracle.meter.paper_calls += size_g + (method.model.charge(here, dim) if method.needs_products else 0) * size_b
        decision, seconds = outcome.decision, state.seconds + time.perf_counter() - clock
        self.at_rest = self._rests(outcome)
        self.state = State(
            seed=state.seed,
            iteration=state.iteration + 1,
            sigma=decision.sigma,
            seconds=seconds,
            step_norm=decision.step_norm or state.step_norm,
            grad_norm=here.grad_norm if math.isfinite(here.grad_norm) else state.grad_norm,
            unit_length=outcome.here.units.length,
            unit_cubic=outcome.here.units.cubic,
            memory=state.memory if decision.memory is None else decision.memory,
        )
        return x if decision.point is None else decision.point, self._record(outcome, seconds)

    def _advance(self, here: Point) -> _Outcome:
        """Algorithm 1, with the numbers of the specification."""
        outcome, subspace = _Outcome(Decision(here.state.sigma), here), None
        for what, number in (("loss", here.value), ("gradient", here.grad_norm)):
            if not math.isfinite(number):
                return self._failed(outcome, f"the {what} of the gradient sample is not finite")
        try:
            if self.method.needs_products:
                subspace = self.method.model.build(here)  # 2.2  Lanczos on B from g: Q, T;  2.4  the left-most λ1
                here = replace(here, units=subspace.units)
                outcome = _Outcome(Decision(subspace.sigma), here, subspace=subspace)
            outcome = self._cubic_step(outcome)  # 2.3 to 2.6
            if outcome.decision.point is not None or outcome.ended:
                return outcome
            sigma, without_model = outcome.decision.sigma, not self.method.model.proposes
            escaped = self.method.escape(here, outcome.subspace, sigma, without_model=without_model)  # 2.6  x ← x + d
            keeps = escaped.point is None and outcome.note == Note.NO_GRADIENT
            return replace(outcome, decision=escaped, note=outcome.note if keeps else escaped.note or outcome.note)
        except (NonFiniteValueError, NonFiniteProductError) as problem:
            return self._failed(outcome, str(problem), getattr(problem, "value", math.nan))
        finally:
            if subspace is not None:
                subspace.release()

    def _cubic_step(self, outcome: _Outcome) -> _Outcome:
        """Return the outcome with the decision on the last cubic step; its point is None where all were rejected."""
        here, subspace, model = outcome.here, outcome.subspace, self.method.model
        if subspace is not None and subspace.problem:  # there is no cubic step, but the gradient step of 2.6
            return self._failed(outcome, subspace.problem)
        trials = 0
        for _ in range(1 + model.resolves if model.proposes else 0):
            sigma = outcome.decision.sigma
            step = model.propose(here, subspace, sigma)  # 2.3  u minimises the cubic model in the space, globally
            if step is None:
                break
            outcome = replace(outcome, tried=replace(outcome.tried or Decision(sigma), step=step))
            if step.decrease <= 0.0:  # g = 0 and no negative curvature: a second-order point of this space
                return replace(outcome, note=Note.AT_MINIMUM)
            if here.vanishes(step.norm):
                share = _informative_share(here, subspace, step, trials)
                decision = Decision(here.judge.after_vanishing(sigma, share))
                return replace(outcome, decision=decision, note=Note.VANISHES)
            try:
                trial = subspace.trial_point(here.x, step)  # s = Qu
            except NonFiniteProductError as problem:
                return replace(self._failed(outcome, str(problem)), subspace=subspace.failed(str(problem)))
            try:
                decision = self.method.acceptance(here, subspace, step, trial, trials)  # 2.5  ρ;  2.6  σ, x ← x + s
            except NonFiniteValueError as problem:
                return replace(self._failed(outcome, str(problem), problem.value), ended=True)
            trials += decision.trials
            tried, note = replace(decision, trials=trials), decision.note or outcome.note
            outcome = replace(outcome, decision=decision, tried=tried, note=note)
            if decision.point is not None:
                break
        return outcome

    def _failed(self, outcome: _Outcome, note: str, value: float = math.nan) -> _Outcome:
        """Stay at x with a larger σ because something is not finite; in the first iteration that is an error."""
        here = outcome.here
        if here.state.iteration == 0:
            raise NonFiniteStartError(
                f"{note} at the starting point (loss {here.known_value!r}, gradient norm {here.grad_norm!r}). "
                "Start where the loss is finite, and check the data and the initial weights."
            )
        sigma = here.judge.after_failure(outcome.decision.sigma)
        return replace(outcome, decision=Decision(sigma), note=note, value=value)

    def _rests(self, outcome: _Outcome) -> bool:
        """2.7: whether d = 0 and ‖s‖ ≤ ε_s; with samples, d = 0 counts only if g = 0."""
        here, tried = outcome.here, outcome.tried
        norm = 0.0 if tried is None or tried.step is None else tried.step.norm
        decides = here.oracle.exact or here.grad_norm == 0.0
        return outcome.decision.at_rest and decides and norm <= self.method.epsilon_s

    def _record(self, outcome: _Outcome, seconds: float) -> Record:
        """Write down what the pieces decided."""
        here, decision, subspace = outcome.here, outcome.decision, outcome.subspace
        tried = outcome.tried or Decision(decision.sigma)
        step, escaped = tried.step, decision.point is not None and decision.step is None
        last = decision if decision.step is not None or escaped else tried
        first_sigma = here.state.sigma if self.method.model.proposes else math.nan
        share = math.nan if step is None else step.curvature_share
        return Record(
            here.state.iteration,
            branch=decision.branch,
            rho=tried.rho,
            sigma=first_sigma if step is None else step.sigma,
            grad_norm=here.grad_norm,
            ritz_value=math.nan if subspace is None else subspace.ritz_value,
            step_norm=decision.step_norm,
            model_decrease=math.nan if step is None else step.decrease,
            value=here.known_value if math.isnan(outcome.value) else outcome.value,
            trial_value=last.trial_value,
            krylov_dim=0 if subspace is None else subspace.dim,
            trials=tried.trials + (decision.trials if decision.step is None else 0),
            calls=here.oracle.meter.snapshot(),
            seconds=seconds,
            curvature_share=float(decision.branch is Branch.CURVATURE) if escaped else share,
            note=str(outcome.note),
            hvp=here.oracle.hvp,
        )

    def gradient_point(self, x: Vector) -> Vector:
        """Return where gradients are taken: at x."""
        return x

    def average(self, y: Vector) -> Vector:
        """Return y: nothing is averaged."""
        return y

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        memory = {name: held for name, held in self.state.memory.items() if isinstance(held, float)}
        return numbers_of(self.state) | {"memory": json.dumps(memory)}  # torch.distributed.checkpoint drops empty ones

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state."""
        memory = self.state.memory.items()
        return {_MEMORY + name: held for name, held in memory if not isinstance(held, float)}

    def tensors(self) -> Sequence[Mapping[str, Any]]:
        """Return further tensors of the state, by parameter; this iteration has none."""
        return ()

    def check(self, where: str, numbers: Any, vectors: Collection[str], shapes: Any = None, tensors: Any = ()) -> None:
        """Refuse what `numbers` and `vectors` (given by name) cannot have returned."""
        require_fields(where, numbers, State, ("memory",))
        _memory(where, numbers)
        for name in vectors:
            if not name.startswith(_MEMORY):
                raise ArgumentError(f"{where} comes with a vector {name!r}: pass a state of the same preset.")

    def restore(self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], tensors: Any = ()) -> None:
        """Continue from what `numbers` and `vectors` returned."""
        plain = {name: held for name, held in numbers.items() if name != "memory"}
        memory = {name.removeprefix(_MEMORY): held for name, held in vectors.items()}
        self.state = State(**plain, memory={**_memory("numbers", numbers), **memory})

    def snapshot(self) -> Any:
        """Return everything that an iteration changes."""
        return self.state

    def roll_back(self, snapshot: Any) -> None:
        """Return to a snapshot."""
        self.state = snapshot

    def rearrange(self, places: Sequence[int | None], fitted: Any, x: Vector, shapes: Any) -> None:
        """Continue with other parameters: vectors of the acceptance rule are dropped."""
        self.reset()

    def reset(self) -> None:
        """Drop what belongs to vectors of another length."""
        memory = {name: held for name, held in self.state.memory.items() if isinstance(held, float)}
        self.state = replace(self.state, memory=memory)


def _memory(where: str, numbers: Any) -> dict[str, float]:
    """Return the numbers that the acceptance rule remembers."""
    text = numbers.get("memory")
    try:
        memory = json.loads(text)
    except (TypeError, ValueError):
        memory = None
    if not isinstance(memory, dict) or not all(isinstance(held, float) for held in memory.values()):
        raise state_error(f"{where}['memory']", text, "a text of numbers by name")
    return memory


def _informative_share(here: Point, subspace: Any, step: Any, trials: int) -> float:
    """Ratio of the step norm to √eps·‖x‖ if the first trial step is limited by σ; 1 otherwise."""
    limited = trials == 0 and step.multiplier > subspace.curvature
    return float(step.norm / (math.sqrt(here.space.eps) * here.norm)) if limited else 1.0
