"""One iteration of a method of the family: Algorithm 1 of the paper, with the numbers of docs/method.md.

A method is a composition of pieces: a model (Krylov space and cubic steps), an acceptance rule and an escape rule. Each
piece returns a value; only the iteration writes the state and the record. Vectors are used only through a `Space`, and
the objective only through an `Oracle`. Random draws are functions of (seed, iteration, purpose), so that a resumed run
repeats a run that was not interrupted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.piece_checks import checked_subspace, completed_decision, description_of_x, is_like_x
from sanc.core.pieces import Decision, Subspace, paper_products
from sanc.core.point import NonFiniteValueError, Point, State
from sanc.core.record import Branch, Note, Record
from sanc.core.saved import numbers_of, require_fields, state_error, unknown_vector_error
from sanc.core.space import Vector
from sanc.core.spectrum.cubic import CubicStep
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.core.units import Units
from sanc.errors import ArgumentTypeError, NonFiniteStartError, shown

_VECTOR_PREFIX = "acceptance_state."
"""Prefix of the names of the acceptance rule's vectors in a saved state."""


class _Progress(NamedTuple):
    """An iteration in progress: its last decision, and what the next rule and the record need.

    Attributes
    ----------
    here : Point
        The current point, with the units that the first Hessian product determines.
    sigma : float
        σ for the next trial step, or for the next iteration.
    decision : Decision or None
        The last decision of an acceptance or escape rule; None if there was none, or if an evaluation failed since.
    last_acceptance : Decision or None
        The last decision of the acceptance rule.
    step : CubicStep or None
        The last cubic step.
    trial_count : int
        Trial points of the acceptance rule so far.
    subspace : Subspace or None
        The subspace of the model.
    note : str
        The note for the record.
    value : float
        f(x) on S_f if it was evaluated and is not finite; otherwise NaN.
    skips_escape : bool
        Whether the iteration ends without an escape step.
    """

    here: Point
    sigma: float
    decision: Decision | None = None
    last_acceptance: Decision | None = None
    step: CubicStep | None = None
    trial_count: int = 0
    subspace: Subspace | None = None
    note: str = ""
    value: float = math.nan
    skips_escape: bool = False


class Iteration:
    """The iteration of a method.

    Parameters
    ----------
    method : Method
        The composition of pieces.
    seed : int
        Seed of the random signs and of the random start of Lanczos.
    tol : float
        The caller's tolerance on ‖g‖. The model need not be minimised to a much smaller ‖∇m‖.
    one_sample : bool
        Whether ρ is formed on the gradient sample.
    evaluates_next_gradient : bool
        Whether the gradient at the next point may be evaluated at once, since the next iteration starts with it.

    Attributes
    ----------
    method : Method
        The composition of pieces.
    state : State
        The state after the last iteration.
    tol : float
        The parameter `tol`; a run that scales f scales it too.
    stopping_test_holds : bool
        Whether the paper's stopping test (2.7) holds: the last iteration stayed, and its cubic step norm was at most
        ε_s. With samples it holds only if the gradient was zero.
    """

    def __init__(
        self,
        method: Method,
        seed: int,
        tol: float = 0.0,
        *,
        one_sample: bool = False,
        evaluates_next_gradient: bool = False,
    ) -> None:
        self.method = method
        self.state = State(seed=seed, sigma=method.initial_sigma_rule.sigma0)
        self.stopping_test_holds = False
        self.tol, self._one_sample, self._evaluates_next_gradient = tol, one_sample, evaluates_next_gradient

    @property
    def units(self) -> Units:
        """The units of the first point; zero until they are measured."""
        return self.state.units

    @property
    def grad_norm(self) -> float:
        """‖g‖ in the last iteration; 0 before the first."""
        return self.state.last_grad_norm

    def iterate(self, x: Vector, oracle: Oracle, lanczos_start: Vector | None = None) -> tuple[Vector, Record]:
        """Make one iteration from `x`.

        Parameters
        ----------
        x : vector
            The current point; never changed.
        oracle : Oracle
            Evaluates f, g and Hv.
        lanczos_start : vector, optional
            Start vector of Lanczos instead of the gradient: a known direction of negative curvature at a point with a
            zero gradient.

        Returns
        -------
        point : vector
            The next point; `x` itself if the iteration stayed.
        record : Record
            What the iteration did.
        """
        clock, state, method = time.perf_counter(), self.state, self.method
        needs_products = method.needs_products
        oracle.begin(state.iteration, products=needs_products)
        value, g = oracle.gradient(x)  # 2.1  g = ∇f on S_g at x, γ0 = ‖g‖
        sigma_rule = method.sigma.rule(oracle.space.eps, exact=oracle.exact)
        here = Point(
            x=x,
            g=g,
            value=value,
            grad_norm=oracle.norm(g),
            oracle=oracle,
            sigma_rule=sigma_rule,
            state=state,
            units=state.units,
            tol=self.tol,
            one_sample=self._one_sample,
            evaluates_next_gradient=self._evaluates_next_gradient,
            lanczos_start=lanczos_start,
        )
        progress = self._make_steps(here)
        decision = progress.decision or Decision(progress.sigma)
        products = 0 if progress.subspace is None else progress.subspace.products
        counted_products = paper_products(method.model, here, products) if needs_products else 0
        oracle.count_paper_calls(1 + decision.extra_gradients, counted_products)
        seconds = state.seconds + time.perf_counter() - clock
        self.stopping_test_holds = self._stopping_test(progress, decision)
        self.state = State(
            seed=state.seed,
            iteration=state.iteration + 1,
            sigma=decision.sigma,
            seconds=seconds,
            last_step_norm=decision.step_norm or state.last_step_norm,
            last_grad_norm=here.grad_norm if math.isfinite(here.grad_norm) else state.last_grad_norm,
            first_length_scale=progress.here.units.length_scale,
            unit_cubic=progress.here.units.cubic,
            value_noise=state.value_noise,
            acceptance_state=self._next_acceptance_state(here, decision),
        )
        return x if decision.point is None else decision.point, self._record(progress, decision, seconds)

    def _make_steps(self, here: Point) -> _Progress:
        """Return the progress of the iteration after 2.2 to 2.6 at a point."""
        progress, model, subspace = _Progress(here, here.state.sigma), self.method.model, None
        for label, number in (("loss", here.value), ("gradient", here.grad_norm)):
            if not math.isfinite(number):
                return self._after_failure(progress, f"the {label} of the gradient sample is not finite")
        try:
            if self.method.needs_products or model.proposes:
                subspace = checked_subspace(model, model.build(here))  # 2.2  Lanczos from g: Q, T;  2.4  λ1
            if subspace is not None:
                here, sigma = _with_units(here, subspace)
                progress = _Progress(here, sigma, subspace=subspace)
                progress = self._try_cubic_steps(progress, subspace)  # 2.3, 2.5, 2.6
            moved = progress.decision is not None and progress.decision.point is not None
            if moved or progress.skips_escape:
                return progress
            sigma = progress.sigma
            decision = self.method.escape(here, progress.subspace, sigma, model_proposes=model.proposes)  # 2.6  x + d
            decision = completed_decision(here, "escape", self.method.escape, decision, Branch.GRADIENT)
            keeps_note = decision.point is None and progress.note == Note.GRADIENT_NOT_FINITE
            note = progress.note if keeps_note else decision.note or progress.note
            return progress._replace(sigma=decision.sigma, decision=decision, note=note)
        except NonFiniteValueError as error:
            return self._after_failure(progress, str(error), error.value)
        except NonFiniteProductError as error:
            return self._after_failure(progress, str(error))
        finally:
            if subspace is not None:
                subspace.release()

    def _try_cubic_steps(self, progress: _Progress, subspace: Subspace) -> _Progress:
        """Return the progress after the cubic steps; its decision has no point if all of them were rejected."""
        model = self.method.model
        if subspace.failure:
            return self._after_failure(progress, subspace.failure)
        here = progress.here
        for _ in range(1 + model.max_resolves if model.proposes else 0):
            step = model.propose(here, subspace, progress.sigma)  # 2.3  u minimises m, globally
            if step is None:
                break
            progress, rejected = self._try_step(progress, subspace, step)
            if rejected is None:
                break
            here = replace(progress.here, rejected=rejected)
        return progress

    def _try_step(self, progress: _Progress, subspace: Subspace, step: CubicStep) -> tuple[_Progress, CubicStep | None]:
        """Return the progress after one cubic step, and the step if it was rejected; then another σ may be tried.

        The second value is None if the step was accepted, or could not be tried.
        """
        here, sigma, trial_count = progress.here, progress.sigma, progress.trial_count
        if step.decrease <= 0.0:  # g = 0 and no negative curvature: a second-order point of this space
            return progress._replace(step=step, note=Note.AT_MINIMUM), None
        if here.below_precision(step.norm):
            norm_ratio = _norm_over_precision(here, subspace, step, trial_count)
            sigma = here.sigma_rule.after_negligible_step(sigma, norm_ratio)
            return progress._replace(sigma=sigma, decision=None, step=step, note=Note.BELOW_PRECISION), None
        try:
            trial = subspace.trial_point(here.x, step)  # s = Qu
            subspace.release()
        except NonFiniteProductError as error:
            failed = self._after_failure(progress._replace(step=step), str(error))
            return failed._replace(subspace=subspace.failed(str(error))), None
        try:
            decision = self.method.acceptance(here, subspace, step, trial, trial_count)  # 2.5  ρ;  2.6  σ, x ← x + s
        except NonFiniteValueError as error:
            failed = self._after_failure(progress._replace(step=step), str(error), error.value)
            return failed._replace(skips_escape=True), None
        decision = completed_decision(here, "acceptance", self.method.acceptance, decision, Branch.SUCCESSFUL)
        if decision.step is None:
            decision = replace(decision, step=step)
        trial_count, note = trial_count + decision.trials, decision.note or progress.note
        progress = _Progress(
            here=here,
            sigma=decision.sigma,
            decision=decision,
            last_acceptance=decision,
            step=decision.step,
            trial_count=trial_count,
            subspace=subspace,
            note=note,
        )
        return progress, decision.step if decision.point is None else None

    def _after_failure(self, progress: _Progress, note: str, value: float = math.nan) -> _Progress:
        """Return the progress with a larger σ after an evaluation that is not finite; raise an error at the start.

        Where only a product failed, the escape step of 2.6 still follows, along the gradient.
        """
        here = progress.here
        if here.state.iteration == 0:
            raise NonFiniteStartError(
                f"{note} at the starting point (loss {here.known_value!r}, gradient norm {here.grad_norm!r}). "
                "Start where the loss is finite, and check the data and the initial weights."
            )
        sigma = here.sigma_rule.after_failure(progress.sigma)
        return progress._replace(sigma=sigma, decision=None, note=note, value=value)

    def _next_acceptance_state(self, here: Point, decision: Decision) -> Mapping[str, Any]:
        """Return the state of the acceptance rule after a decision, with its numbers as floats."""
        if decision.acceptance_state is None:
            return here.state.acceptance_state
        entries = decision.acceptance_state.items()
        checked = {name: float(entry) if isinstance(entry, Real) else entry for name, entry in entries}
        for name, entry in checked.items():
            if not (isinstance(entry, float) or is_like_x(here, entry)):
                raise ArgumentTypeError(
                    f"acceptance_state[{name!r}] = {shown(entry)} of {shown(self.method.acceptance)} cannot be saved: "
                    f"pass a number, or {description_of_x(here)}."
                )
        return checked

    def _stopping_test(self, progress: _Progress, decision: Decision) -> bool:
        """Return whether d = 0 and ‖s‖ ≤ ε_s (2.7); with samples, d = 0 counts only if g = 0."""
        here, step = progress.here, progress.step
        is_conclusive = here.oracle.exact or here.grad_norm == 0.0
        return decision.zero_step and is_conclusive and (step is None or step.norm <= self.method.epsilon_s)

    def _record(self, progress: _Progress, decision: Decision, seconds: float) -> Record:
        """Return the record of the iteration."""
        here, step, subspace = progress.here, progress.step, progress.subspace
        last_acceptance = progress.last_acceptance
        is_escape = decision.point is not None and decision.step is None
        evaluated = decision if decision.step is not None or is_escape else last_acceptance
        first_sigma = here.state.sigma if self.method.model.proposes else math.nan
        curvature_fraction = math.nan if step is None else step.curvature_share
        return Record(
            here.state.iteration,
            branch=decision.branch,
            rho=math.nan if last_acceptance is None else last_acceptance.rho,
            sigma=first_sigma if step is None else step.sigma,
            grad_norm=here.grad_norm,
            ritz_value=math.nan if subspace is None else subspace.ritz_value,
            step_norm=decision.step_norm,
            model_decrease=math.nan if step is None else step.decrease,
            value=here.known_value if math.isnan(progress.value) else progress.value,
            trial_value=math.nan if evaluated is None else evaluated.trial_value,
            krylov_dim=0 if subspace is None else subspace.products,
            trials=progress.trial_count + (decision.trials if decision.step is None else 0),
            calls=here.oracle.meter.snapshot(),
            seconds=seconds,
            curvature_share=float(decision.branch is Branch.CURVATURE) if is_escape else curvature_fraction,
            note=str(progress.note),
            hvp=here.oracle.hvp,
        )

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        # The state of the rule is a text, because torch.distributed.checkpoint drops empty mappings.
        return numbers_of(self.state) | {"acceptance_state": json.dumps(self._acceptance_numbers())}

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state."""
        entries = self.state.acceptance_state.items()
        return {_VECTOR_PREFIX + name: entry for name, entry in entries if not isinstance(entry, float)}

    def _acceptance_numbers(self) -> dict[str, float]:
        """Return the numbers in the state of the acceptance rule."""
        return {name: entry for name, entry in self.state.acceptance_state.items() if isinstance(entry, float)}

    def tensors(self) -> Sequence[Mapping[str, Any]]:
        """Return further tensors of the state, by parameter; this iteration has none."""
        return ()

    def check(self, where: str, numbers: Any, vectors: Collection[str], shapes: Any = None, tensors: Any = ()) -> None:
        """Raise an error if `numbers`, or the names in `vectors`, do not belong to a saved state of this iteration."""
        require_fields(where, numbers, State, ("acceptance_state",))
        _parse_acceptance_numbers(where, numbers)
        for name in vectors:
            if not name.startswith(_VECTOR_PREFIX):
                raise unknown_vector_error(where, name)

    def restore(self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], tensors: Any = ()) -> None:
        """Continue from the numbers and vectors of a saved state."""
        fields = {name: number for name, number in numbers.items() if name != "acceptance_state"}
        acceptance_vectors = {name.removeprefix(_VECTOR_PREFIX): vector for name, vector in vectors.items()}
        self.state = State(
            **fields, acceptance_state={**_parse_acceptance_numbers("numbers", numbers), **acceptance_vectors}
        )

    def set_tolerance(self, tol: float) -> None:
        """Set the tolerance on ‖g‖, up to which models are minimised."""
        self.tol = tol

    def replace_numbers(self, **changes: Any) -> None:
        """Replace numbers of the state, such as σ and the units, for a run that resets or scales them."""
        self.state = replace(self.state, **changes)

    def snapshot(self) -> Any:
        """Return the state. `stopping_test_holds` is not part of it: every iteration sets it."""
        return self.state

    def roll_back(self, snapshot: Any) -> None:
        """Restore a snapshot."""
        self.state = snapshot

    def reset(self) -> None:
        """Delete the vectors of the state, because the dimension of x has changed."""
        self.state = replace(self.state, acceptance_state=self._acceptance_numbers())


def _with_units(here: Point, subspace: Subspace) -> tuple[Point, float]:
    """Return the point with its units, and σ. If the model did not measure the units, they are measured here."""
    units, sigma = subspace.units, subspace.sigma
    if not (units.length_scale or subspace.failure):
        units = here.measure_units(subspace.hessian_norm)
        sigma = here.sigma_rule.first_sigma(sigma, units)
    return here if units is here.units else replace(here, units=units), sigma


def _parse_acceptance_numbers(where: str, numbers: Any) -> dict[str, float]:
    """Return the numbers in the state of the acceptance rule from a saved state."""
    text = numbers.get("acceptance_state")
    try:
        acceptance_numbers = json.loads(text)
    except (TypeError, ValueError):
        acceptance_numbers = None
    if not isinstance(acceptance_numbers, dict) or not all(
        isinstance(entry, float) for entry in acceptance_numbers.values()
    ):
        raise state_error(f"{where}['acceptance_state']", text, "a text of numbers by name")
    return acceptance_numbers


def _norm_over_precision(here: Point, subspace: Subspace, step: CubicStep, trial_count: int) -> float:
    """Return the ratio of the step norm to √eps·‖x‖ if σ limits the norm of the first trial step; otherwise 1."""
    limited = trial_count == 0 and step.multiplier > subspace.hessian_norm
    return step.norm / (math.sqrt(here.space.eps) * here.x_norm) if limited else 1.0
