"""A minimisation in progress: its point, its limits and tolerances, and the numbers by which it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sanc.core.acceptance import NOISE_DEVIATIONS
from sanc.core.bounded.bounds import Box, FaceOracle
from sanc.core.oracle import Oracle
from sanc.core.protocol import IterationProtocol
from sanc.core.record import Note, Record
from sanc.core.runs.limits import Limits
from sanc.core.runs.ripples import LongDifferenceOracle, RippleMonitor, falls_ahead
from sanc.core.runs.scaled_objective import ScaledObjectiveOracle
from sanc.core.runs.stall import StallMonitor
from sanc.core.runs.status import Ending
from sanc.core.runs.step_checks import MadeStep, StepMonitor
from sanc.core.space import ROUNDING_ERRORS, Vector
from sanc.core.spectrum.curvature import Certificate, probe
from sanc.core.units import Units

_MAX_VALUE_ERROR = 1e-2
"""Largest relative error of f to which the steps of differences are adapted."""
_MIN_UNSCALED_ITERATIONS = 256
"""Iterations after which a run that has not stalled measures the scales of its variables, a power of two."""


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
    box : Box or None
        The bounds; None: there are none.
    history : list of Record
        The records of all iterations, in the units of f.
    certificate : Certificate or None
        The certificate of x, if it was computed.
    stall_monitor : StallMonitor
        Counts iterations without progress beyond roundoff.
    step_monitor : StepMonitor
        Compares steps with values, gradients and products.
    ripple_monitor : RippleMonitor
        Detects steps that ripples of f keep short, and the length of differences that replace products then.
    time_is_up : callable
        Whether the time limit has passed.
    first_value : float
        f at the start.
    cause : str
        A sentence about the ending, in addition to the sentence of its status.
    initial_units : Units
        Units of a first point that is stationary, where no iteration measures them. `units` returns those of the
        iteration instead, once it has measured its own.
    gradient_rounding : float
        Rounding error of the gradient at x, if the run stalled there.
    """

    oracle: Oracle
    iteration: IterationProtocol
    limits: Limits
    x: Vector
    seed: int
    box: Box | None = None
    history: list[Record] = field(default_factory=list)
    certificate: Certificate | None = None
    stall_monitor: StallMonitor = field(default_factory=StallMonitor)
    step_monitor: StepMonitor = field(default_factory=StepMonitor)
    ripple_monitor: RippleMonitor = field(default_factory=RippleMonitor)
    time_is_up: Callable[[], bool] = lambda: False
    first_value: float = math.nan
    cause: str = ""
    initial_units: Units = field(default_factory=Units)
    gradient_rounding: float = 0.0

    @property
    def iterations(self) -> int:
        """Number of iterations, including those before an interruption."""
        return int(self.iteration.state.iteration)

    @property
    def needs_products(self) -> bool:
        """Whether the method computes Hessian products."""
        return self.iteration.method.needs_products

    @property
    def tol(self) -> float:
        """Tolerance on ‖g‖: the default is raised to the error of differenced gradients."""
        return max(self.limits.tol, self.oracle.gradient_error(self.x) if self.limits.default_tol else 0.0)

    @property
    def gradient_tolerance(self) -> float:
        """Tolerance on the gradient norm of a certificate: `tol`, or the rounding error if the run stalled there."""
        return max(self.tol, self.gradient_rounding)

    @property
    def curvature_tolerance(self) -> float:
        """Tolerance on negative curvature of a certificate: by default √(L2 ε) with the estimate of L2, at most √ε.

        ε is `limits.tol` and not `tol`, which may have been raised to the error of differenced gradients: that error
        would then raise the tolerance with which it is compared.
        """
        if self.limits.curvature_tol is not None:
            return self.limits.curvature_tol
        unit = self.scale_of_f  # an L2 of 1, scaled as f
        return math.sqrt(self.limits.tol) * math.sqrt(min(unit, self.unit_cubic or unit))

    def gradient_norm(self, g: Vector) -> float:
        """Return the norm of the gradient at the current point, as `tol` bounds it."""
        return self.oracle.space.norm(g)

    @property
    def unit_cubic(self) -> float:
        """The unit of σ, an estimate of the Lipschitz constant of the Hessian; 0 if it is not known."""
        return self.units.cubic

    @property
    def units(self) -> Units:
        """The units of the first point: those that the iteration measured, otherwise `initial_units`."""
        units = self.iteration.units
        return units if units.length_scale else self.initial_units

    @property
    def first_length_scale(self) -> float:
        """The length scale of the first point, or 1 if it is not known."""
        return self.units.length_scale or 1.0

    @property
    def has_measured_sigma(self) -> bool:
        """Whether the initial σ was measured at the first point, and not given."""
        return self.iteration.method.initial_sigma_rule.measures_sigma0

    @property
    def can_scale_variables(self) -> bool:
        """Whether the run may continue in scaled variables (`sanc.core.runs.scaled_variables`); not with a given σ0."""
        return self._can_choose_curvature

    @property
    def can_use_long_differences(self) -> bool:
        """Whether the run may continue with other products where f has ripples (`sanc.core.runs.ripples`)."""
        return self._can_choose_curvature

    @property
    def _can_choose_curvature(self) -> bool:
        """Whether variables or products of the run may change: not with a given σ0, nor with bounds."""
        is_free = self.oracle.exact and self.box is None
        return self.has_measured_sigma and self.needs_products and is_free

    @property
    def variable_scaling_is_due(self) -> bool:
        """Whether the scales of the variables have to be measured: in long runs, when the iterations have doubled."""
        iterations = self.iterations
        return iterations >= _MIN_UNSCALED_ITERATIONS and iterations & (iterations - 1) == 0

    # Changes of the run.

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
        self.certificate = None
        oracle, length = self.oracle, self.ripple_monitor.length
        if length:
            oracle = LongDifferenceOracle(oracle, length)
        self.x, record = self.iteration.iterate(self.x, oracle, direction)
        if length:
            record = replace(record, note=record.note or Note.LONG_DIFFERENCES)
        self.history.append(self.unscaled_record(record))
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
        if not self.can_use_long_differences:
            return
        monitor = self.ripple_monitor.after(step.record)
        if monitor.is_complete:
            has_ripples = falls_ahead(self.oracle, step.before, step.after, monitor.path)
            monitor = monitor.with_differences() if has_ripples else RippleMonitor()
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

    def keep_first_value(self, value: float) -> None:
        """Keep the value of f at the first point; later values are ignored."""
        self.first_value = value if math.isnan(self.first_value) else self.first_value

    def keep_first_units(self, units: Units) -> None:
        """Keep the units of a first point at which no iteration measures them."""
        self.initial_units = units

    def keep_certificate(self, certificate: Certificate | None) -> None:
        """Keep the certificate of the current point; None: the one that is known already."""
        self.certificate = self.certificate if certificate is None else certificate

    def keep_gradient_rounding(self, error: float) -> None:
        """Keep the rounding error of the gradient at the point where the run stalled."""
        self.gradient_rounding = error

    def end(self, cause: str) -> None:
        """End the run, with a sentence about the cause."""
        self.cause = cause

    def reset_sigma_and_units(self) -> None:
        """Reset σ, the last norms and the units, so that the next iteration begins with σ0 and measures the units."""
        unknown = dict.fromkeys(("last_step_norm", "last_grad_norm", "first_length_scale", "unit_cubic"), 0.0)
        self.iteration.replace_numbers(sigma=self.iteration.method.initial_sigma_rule.sigma0, **unknown)

    def restart_at(self, x: Vector) -> None:
        """Continue from a point away from a saddle.

        σ, the units and the gradient norms of the run so far were measured below roundoff, so they are reset.
        """
        self.x, self.certificate, self.stall_monitor = x, None, StallMonitor()
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
        stall_monitor: StallMonitor,
        step_monitor: StepMonitor,
        ripple_monitor: RippleMonitor,
        first_value: float,
    ) -> None:
        """Continue with the monitors and the first value of a saved run."""
        self.stall_monitor, self.step_monitor, self.ripple_monitor = stall_monitor, step_monitor, ripple_monitor
        self.first_value = first_value

    def move_to(self, full_x: Vector) -> None:
        """Replace the current point, given with all its variables, before the first iteration of a resumed run."""
        self.x = full_x

    def enter_face(self, face: FaceOracle | None) -> None:
        """Continue on a face: oracle, point and vectors then have its free variables only. None: change nothing."""
        if face is None:
            return
        full_x = self.full_x
        if face is not self.oracle:
            vectors, iteration = self.full_vectors(), self.iteration
            self.oracle, self.x = face, face.compress(full_x)
            if vectors:
                compressed = {name: face.compress(vector) for name, vector in vectors.items()}
                iteration.restore(iteration.numbers(), compressed, iteration.tensors())
        face.keep(self.x, full_x)

    def before_iteration(self) -> None:
        """Prepare the next iteration on an exact objective; a subclass may change the variables of the run here."""

    # A certificate of the current point.

    def compute_certificate(self, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        """Return the certificate of the current point, and the left-most Ritz vector."""
        return self._probe(oracle, self.x, max_products, seed)

    def _probe(self, oracle: Oracle, x: Vector, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        return probe(
            oracle,
            x,
            gradient_tolerance=self.gradient_tolerance,
            curvature_tolerance=self.curvature_tolerance,
            max_products=max_products,
            seed=seed,
            time_is_up=self.time_is_up,
        )

    # A run with bounds, on the free variables.

    @property
    def full_oracle(self) -> Oracle:
        """The oracle of all variables, possibly scaled."""
        return self.oracle.full_oracle

    @property
    def full_x(self) -> Vector:
        """The current point with all its variables, also those that a face holds; `x` has those of the oracle."""
        return self.oracle.full_point(self.x)

    def full_vectors(self) -> dict[str, Any]:
        """Return the vectors in the state of the iteration with all variables; those held have the values of x."""
        return {name: self.oracle.full_vector(vector) for name, vector in self.iteration.vectors().items()}

    # A run on f times a power of two.

    @property
    def unscaled_oracle(self) -> Oracle:
        """The oracle of f; the run may use another one, of f times a power of two or of the free variables."""
        return self.full_oracle.unscaled_oracle

    @property
    def scale_of_f(self) -> float:
        """The power of two by which f is scaled."""
        return math.ldexp(1.0, self.full_oracle.exponent)

    def scale_objective(self, exponent: int) -> None:
        """Continue with 2^exponent · f and tolerances scaled alike, unless the one on the gradient would overflow."""
        factor = math.ldexp(1.0, exponent)
        if not exponent or self.limits.tol * factor == math.inf:
            return
        self.oracle = ScaledObjectiveOracle(self.oracle, exponent)
        self.limits = self.limits.with_scaled_objective(factor)
        self.iteration.set_tolerance(self.limits.tol)

    def unscaled_record(self, record: Record) -> Record:
        """Return the record in the units of f."""
        if not self.full_oracle.exponent:
            return record
        names = ("sigma", "grad_norm", "ritz_value", "model_decrease", "value", "trial_value")
        return replace(record, **{name: getattr(record, name) / self.scale_of_f for name in names})

    @property
    def unscaled_certificate(self) -> Certificate | None:
        """The certificate in the units of f."""
        cert = self.certificate
        if cert is None or self.scale_of_f == 1.0:
            return cert
        names = ["grad_norm", "lambda_min", "error_bound", "ritz_error", "residual", "asymmetry"]
        names += ["gradient_tolerance", "curvature_tolerance"]
        return replace(cert, **{name: getattr(cert, name) / self.scale_of_f for name in names})

    @property
    def message(self) -> str:
        """The cause of the ending, with remarks if f was scaled or its noise was tolerated."""
        sentences, exponent = [self.cause] if self.cause else [], self.full_oracle.exponent
        if self.cause and exponent:
            sentences.append(f"Numbers in this message are of f times 2^{exponent}.")
        if self.step_monitor.noise_tolerated:
            noise = self.iteration.state.value_noise / self.scale_of_f
            sentences.append(f"The run tolerated noise in f of about ±{noise:.1g}.")
        return " ".join(sentences)
