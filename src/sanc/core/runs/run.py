"""A minimisation in progress: its point, its limits and tolerances, and the numbers by which it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

from sanc.core.acceptance import NOISE_DEVIATIONS
from sanc.core.bounded.bounds import Box, FaceOracle
from sanc.core.oracle import Oracle
from sanc.core.protocol import IterationProtocol
from sanc.core.record import Note, Record
from sanc.core.runs.consistency import find_wrong_product_at
from sanc.core.runs.limits import Limits
from sanc.core.runs.reporting import unscaled_record
from sanc.core.runs.ripples import LongDifferenceOracle, RippleMonitor, falls_ahead
from sanc.core.runs.scaled_objective import scaled_oracle
from sanc.core.runs.stall import StallMonitor
from sanc.core.runs.status import Ending, Findings
from sanc.core.runs.step_checks import MadeStep, StepMonitor
from sanc.core.space import ROUNDING_ERRORS, Vector
from sanc.core.spectrum.curvature import Certificate
from sanc.core.units import Units

_MAX_VALUE_ERROR = 1e-2
"""Largest relative error of f to which the steps of differences are adapted."""


class RunVariables(Protocol):
    """The variables of a run, a frozen value: which point, norms, tolerances and certificate belong to them.

    A run has one kind at a time (`PlainVariables` in `variables.py` is the simplest), and `Run.change_variables`
    replaces it.

    Attributes
    ----------
    can_be_scaled : bool
        Whether the run may continue in scaled variables (`sanc.core.runs.scaled_variables`).
    allows_long_differences : bool
        Whether the run may continue with other products where f has ripples (`sanc.core.runs.ripples`).
    remark : str
        A sentence about the variables for the message of the result; empty: none.
    """

    @property
    def can_be_scaled(self) -> bool: ...
    @property
    def allows_long_differences(self) -> bool: ...
    @property
    def remark(self) -> str: ...

    def objective(self, oracle: Oracle) -> Oracle:
        """Return the oracle of f in the original variables, given the one in these, without a factor."""

    def original(self, x: Vector) -> Vector:
        """Return the point in the original variables, the same object for the same x."""

    def from_original(self, x: Vector) -> Vector:
        """Return the point in these variables."""

    def gradient_norm(self, run: Run, g: Vector) -> float:
        """Return the norm of the gradient at the current point, as `tolerance` bounds it."""

    def tolerance(self, run: Run) -> float:
        """Return the tolerance on the gradient norm at the current point."""

    def gradient_tolerance(self, run: Run) -> float:
        """Return that of a certificate: the rounding error of the gradient, if the run stalled there."""

    def curvature_tolerance(self, run: Run) -> float:
        """Return the tolerance on negative curvature of a certificate."""

    def model_tolerance(self, limits: Limits) -> float:
        """Return the tolerance on the gradient norm to which models are minimised."""

    def scaling_is_due(self, iterations: int) -> bool:
        """Return whether the scales of the variables have to be measured after this many iterations."""

    def prepare(self, run: Run) -> None:
        """Prepare the next iteration on an exact objective; the run may get other variables here."""

    def certificate(self, run: Run, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        """Return the certificate of the current point, and the left-most Ritz vector in the variables of the run."""


@final
@dataclass
class Run:
    """A minimisation in progress. Only its methods write its attributes; other modules of the run decide.

    Attributes
    ----------
    oracle : Oracle
        The objective, possibly scaled; with bounds, as a function of the free variables.
    iteration : IterationProtocol
        The iteration with its state.
    limits : Limits
        The limits, scaled as the objective is.
    x : vector
        The current point; with bounds, its free variables.
    seed : int
        Seed of probes for negative curvature.
    variables : RunVariables
        What the entries of x are.
    box : Box or None
        The bounds; None: there are none.
    history : list of Record
        The records of all iterations, in the units of f.
    findings : Findings
        What the run has found: f at the start, the certificate of x, the cause of its ending.
    stall_monitor : StallMonitor
        Counts iterations without progress beyond roundoff.
    step_monitor : StepMonitor
        Compares steps with values, gradients and products.
    ripple_monitor : RippleMonitor
        Detects steps that ripples of f keep short, and the length of differences that replace products then.
    time_is_up : callable
        Whether the time limit has passed.
    """

    oracle: Oracle
    iteration: IterationProtocol
    limits: Limits
    x: Vector
    seed: int
    variables: RunVariables
    box: Box | None = None
    history: list[Record] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    stall_monitor: StallMonitor = field(default_factory=StallMonitor)
    step_monitor: StepMonitor = field(default_factory=StepMonitor)
    ripple_monitor: RippleMonitor = field(default_factory=RippleMonitor)
    time_is_up: Callable[[], bool] = lambda: False

    @property
    def iterations(self) -> int:
        """Number of iterations, including those before an interruption."""
        return int(self.iteration.state.iteration)

    @property
    def needs_products(self) -> bool:
        """Whether the method computes Hessian products."""
        return self.iteration.method.needs_products

    @property
    def units(self) -> Units:
        """The units of the first point: those that the iteration measured, otherwise `findings.initial_units`."""
        units = self.iteration.units
        return units if units.length_scale else self.findings.initial_units

    @property
    def first_length_scale(self) -> float:
        """The length scale of the first point, or 1 if it is not known."""
        return self.units.length_scale or 1.0

    @property
    def has_measured_sigma(self) -> bool:
        """Whether the initial σ was measured at the first point, and not given."""
        return self.iteration.method.initial_sigma_rule.measures_sigma0

    @property
    def can_choose_curvature(self) -> bool:
        """Whether variables or products of the run may change: not with a given σ0, nor with bounds."""
        is_free = self.oracle.exact and self.box is None
        return self.has_measured_sigma and self.needs_products and is_free

    # Changes of the run.

    def note(self, **changes: Any) -> None:
        """Replace fields of the findings."""
        self.findings = replace(self.findings, **changes)

    def start_clock(self, clock: Callable[[], float]) -> None:
        """Start the time limit, if there is one: `time_is_up` holds `limits.max_time` seconds from now."""
        if self.limits.max_time < math.inf:
            deadline = clock() + self.limits.max_time
            self.time_is_up = lambda: clock() >= deadline

    def make_iteration(self, direction: Vector | None) -> Record:
        """Make an iteration, count its progress, and return its record in the units of the run.

        `direction` is the start vector of Lanczos at a point with negative curvature. An exception leaves the point as
        it is.
        """
        if self.findings.certificate is not None:
            self.note(certificate=None)
        oracle, length = self.oracle, self.ripple_monitor.length
        if length:
            oracle = LongDifferenceOracle(oracle, length)
        self.x, record = self.iteration.iterate(self.x, oracle, direction)
        if length:
            record = replace(record, note=record.note or Note.LONG_DIFFERENCES)
        self.history.append(unscaled_record(record, self.oracle.full_oracle.exponent))
        if self.oracle.exact:
            self._count_progress(record)
        self.oracle.end(record.step_norm)
        return record

    def _count_progress(self, record: Record) -> None:
        """Count an iteration of an exact objective that makes no progress.

        Where −g is no direction of descent because of the error of a differenced gradient g, steps of a few rounding
        errors of x may decrease f for ever.
        """
        iteration, space = self.iteration, self.oracle.space
        self.stall_monitor = self.stall_monitor.after(
            record,
            space.eps,
            rejection_counts=iteration.stopping_test_holds or iteration.method.initial_sigma_rule.interpolates,
            min_step_norm=ROUNDING_ERRORS * space.eps * space.norm(self.x) if self.oracle.differenced_gradient else 0.0,
            min_decrease=NOISE_DEVIATIONS * iteration.state.value_noise,
        )

    def follow_ripples(self, step: MadeStep) -> None:
        """Use long differences from now on, or no longer, if an iteration of an exact objective shows that."""
        if not (self.variables.allows_long_differences and self.can_choose_curvature):
            return
        monitor = self.ripple_monitor.after(step.record)
        if monitor.is_complete:
            has_ripples = falls_ahead(self.oracle, step.before, step.after, monitor.path)
            with self.oracle.uncounted():  # products that contradict the gradient shorten steps, too
                defect = find_wrong_product_at(self.oracle, step.after, monitor.path / monitor.count)
            monitor = monitor.with_differences() if has_ripples and defect is None else RippleMonitor()
        self._set_ripple_monitor(monitor)

    def leave_ripples(self) -> bool:
        """Use the products of the oracle again, which test the point where the run may end; False: it used them."""
        if not self.ripple_monitor.length:
            return False
        self._set_ripple_monitor(RippleMonitor())
        self.stall_monitor = StallMonitor()
        return True

    def _set_ripple_monitor(self, monitor: RippleMonitor) -> None:
        """Replace the monitor; σ and the units belong to the curvature on one of both lengths."""
        if bool(monitor.length) is not bool(self.ripple_monitor.length):
            self.reset_sigma_and_units()
        self.ripple_monitor = monitor

    def check_step(self, step: MadeStep) -> Ending:
        """Compare a step of an exact objective with its derivatives, and return the ending that it causes."""
        self.step_monitor, ending = self.step_monitor.after(
            self.oracle, step, self.first_length_scale, self.needs_products
        )
        return ending

    def reset_sigma_and_units(self) -> None:
        """Reset σ, the last norms and the units, so that the next iteration begins with σ0 and measures the units."""
        unknown = dict.fromkeys(("last_step_norm", "last_grad_norm", "first_length_scale", "unit_cubic"), 0.0)
        self.iteration.replace_numbers(sigma=self.iteration.method.initial_sigma_rule.sigma0, **unknown)

    def restart_at(self, x: Vector) -> None:
        """Continue from a point away from a saddle.

        σ, the units and the gradient norms of the run so far were measured below roundoff, so they are reset.
        """
        self.x, self.stall_monitor = x, StallMonitor()
        self.note(certificate=None)
        self.reset_sigma_and_units()

    def continue_with_noise(self, noise: float) -> None:
        """Continue after a stall with a ratio test that tolerates this noise of f, and with longer differences.

        σ, which rejected steps have raised, is that of the first point.
        """
        method = self.iteration.method
        rule = method.sigma.rule(self.oracle.space.eps, exact=True)
        sigma = rule.first_sigma(method.initial_sigma_rule.sigma0, self.units)
        self.iteration.replace_numbers(sigma=sigma, last_step_norm=0.0, last_grad_norm=0.0, value_noise=noise)
        self.step_monitor = replace(self.step_monitor, noise_found=False, noise_tolerated=True)
        self.stall_monitor = StallMonitor()
        error, value = NOISE_DEVIATIONS * noise, abs(self.oracle.gradient(self.x)[0])
        relative_error = error / value if error < _MAX_VALUE_ERROR * value else _MAX_VALUE_ERROR
        if self.unscaled_oracle.adapt_differences(relative_error):
            self.x = self.x * 1.0  # a new object, for which no gradient is cached

    def restore_progress(
        self,
        original_x: Vector,
        stall_monitor: StallMonitor,
        step_monitor: StepMonitor,
        ripple_monitor: RippleMonitor,
        first_value: float,
    ) -> None:
        """Continue from the point of a saved run, with its monitors and its first value."""
        self.x = self.variables.from_original(original_x)
        self.stall_monitor, self.step_monitor, self.ripple_monitor = stall_monitor, step_monitor, ripple_monitor
        self.note(first_value=first_value)

    def change_variables(self, variables: RunVariables, oracle: Oracle, x: Vector) -> None:
        """Continue in other variables at the same point, which is x in them; `oracle` is that of f, without a factor.

        What was measured in the variables before remains; the caller converts it, or `restart_in` deletes it.
        """
        self.oracle, self.variables = scaled_oracle(oracle, self.exponent), variables
        self.x, self.box = x, oracle.box
        self._limit_accuracy()

    def update_variables(self, variables: RunVariables) -> None:
        """Replace the variables by ones with the same oracle and point, but other tolerances."""
        self.variables = variables

    def restart_in(self, variables: RunVariables, oracle: Oracle, x: Vector) -> None:
        """Continue in other variables without what was measured so far: σ, units, vectors, progress, findings."""
        self.iteration.reset()
        self.reset_sigma_and_units()
        self.change_variables(variables, oracle, x)
        self.stall_monitor, self.ripple_monitor = StallMonitor(), RippleMonitor()
        self.step_monitor = self.step_monitor.in_scaled_variables()
        self.findings = Findings(self.findings.first_value)

    def scale_progress(self, grad_norm_ratio: float) -> None:
        """Continue in variables in which the gradient norm is this multiple of the one so far."""
        self.stall_monitor = self.stall_monitor.with_scaled_gradients(grad_norm_ratio)

    def enter_face(self, face: FaceOracle | None) -> None:
        """Continue on a face: oracle, point and vectors then have its free variables only. None: change nothing."""
        if face is None:
            return
        full_x = self.oracle.full_point(self.x)
        if face is not self.oracle:
            vectors, iteration = self.full_vectors(), self.iteration
            self.oracle, self.x = face, face.compress(full_x)
            if vectors:
                compressed = {name: face.compress(vector) for name, vector in vectors.items()}
                iteration.restore(iteration.numbers(), compressed, iteration.tensors())
        face.keep(self.x, full_x)

    def compute_certificate(self, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        """Return the certificate of the current point, and the left-most Ritz vector."""
        return self.variables.certificate(self, oracle, max_products, seed)

    # A run with bounds, on the free variables.

    @property
    def full_oracle(self) -> Oracle:
        """The oracle of all variables, possibly scaled."""
        return self.oracle.full_oracle

    @property
    def full_x(self) -> Vector:
        """The current point with all the original variables, also those that a face holds; `x` has the oracle's."""
        return self.variables.original(self.oracle.full_point(self.x))

    def full_vectors(self) -> dict[str, Any]:
        """Return the vectors in the state of the iteration with all variables; those held have the values of x."""
        return {name: self.oracle.full_vector(vector) for name, vector in self.iteration.vectors().items()}

    # A run on f times a power of two.

    @property
    def unscaled_oracle(self) -> Oracle:
        """The oracle of f; that of the run may have a factor, other variables, or the free ones only."""
        return self.variables.objective(self.full_oracle.unscaled_oracle)

    @property
    def exponent(self) -> int:
        """The run minimises 2^exponent · f."""
        return self.full_oracle.exponent

    @property
    def scale_of_f(self) -> float:
        """The power of two by which f is scaled."""
        return math.ldexp(1.0, self.exponent)

    def scale_objective(self, exponent: int) -> None:
        """Continue with 2^exponent · f and tolerances scaled alike, unless the one on the gradient would overflow."""
        factor = math.ldexp(1.0, exponent)
        if not exponent or self.limits.tol * factor == math.inf:
            return
        self.oracle = scaled_oracle(self.oracle, exponent)
        self.limits = self.limits.with_scaled_objective(factor)
        self._limit_accuracy()

    def _limit_accuracy(self) -> None:
        """Set the tolerance to which models are minimised."""
        self.iteration.set_tolerance(self.variables.model_tolerance(self.limits))
