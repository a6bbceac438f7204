"""The loop around the iteration: endings of a minimisation, and its saved state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
import torch

from sanc.core import consistency
from sanc.core.curvature import Certificate, probe
from sanc.core.krylov import NonFiniteProductError
from sanc.core.method import Method
from sanc.core.oracle import Meter, Oracle
from sanc.core.record import Branch, Note, Record
from sanc.core.saved import require_count, require_fields, require_mapping, require_vector, state_error
from sanc.core.scaled import ScaledOracle, require_exponent, scaling_exponent
from sanc.core.space import Vector
from sanc.core.units import Units, measure_units
from sanc.errors import ArgumentError, NonFiniteStartError

_STALL_LIMIT = 10
"""Consecutive iterations without progress beyond roundoff after which the run has stalled."""

_COMPARED_ITERATIONS = 5
"""Number of first iterations in which changes of f are compared with its gradients."""

_ALLOWED_MISMATCHES = 2
"""Mismatches allowed in these iterations. After one more, differences of values decide."""

_MISMATCH_TOLERANCE = 0.15
"""A step is a mismatch if the change of f differs by more than this, relatively, from the change that the gradients
predict."""

_SYMMETRY_ITERATION = 50
"""The iteration after which the symmetry of the Hessian products is checked."""

_REPORTED_DIFFERENCE_ERROR = 1e4
"""Errors of differenced gradients are reported as a cause only if they are of the order of this many tolerances."""

_PROBE_PRODUCTS = 10
"""Smallest limit on the Hessian products of a probe for negative curvature if `certify` is False."""


class Status(IntEnum):
    """The ending of a minimisation; `sentence` describes it."""

    sentence: str

    def __new__(cls, number: int, sentence: str) -> Status:
        member = int.__new__(cls, number)
        member._value_ = number
        member.sentence = sentence
        return member

    SECOND_ORDER = 0, "Converged to a second-order point: the gradient is small and the curvature is certified."
    UNCERTIFIED = 1, "The gradient is small and no negative curvature was found, but it could not be certified."
    FIRST_ORDER = 2, "Converged to a first-order point only: negative curvature remains that was not escaped."
    AT_REST = 3, "Stagnated: the escape step is zero, and the norm of the cubic step is at most epsilon_s."
    STALLED = 4, "No step lowers the objective any further in this precision, and the gradient is above the tolerance."
    ITERATION_LIMIT = 5, "The limit on iterations was reached."
    CALL_LIMIT = 6, "The limit on oracle calls was reached."
    TIME_LIMIT = 7, "The limit on time was reached."
    CALLBACK = 8, "The callback asked to stop."
    NOT_FINITE = 9, "The objective, its gradient or a Hessian product is not finite at the starting point."
    UNBOUNDED = 10, "The objective seems to be unbounded below."
    NO_GRADIENT = (
        11,
        "The gradient is not finite at points with lower values; the last point with a finite gradient is returned.",
    )
    INCONSISTENT = 12, "The objective, its gradient and its Hessian products are inconsistent."

    @property
    def success(self) -> bool:
        """Whether the point is stationary to tolerance, without known negative curvature."""
        return self in (Status.SECOND_ORDER, Status.UNCERTIFIED)


class IterationProtocol(Protocol):
    """The members of an iteration that runs and optimisers use. `Iteration` and `MinibatchIteration` have them.

    `numbers`, `vectors` and `tensors` are its saved state, which `check` validates and `restore` reads. `snapshot` and
    `roll_back` undo an iteration that raised. `rearrange` adapts vectors of the state after parameters have joined or
    left; `reset` deletes them. `average` and `gradient_point` convert between the two points of the averaged phase.

    Attributes
    ----------
    method : Method
        The composition of pieces.
    state : State
        That of the last iteration; its `iteration` counts the iterations.
    at_rest : bool
        Whether the paper's stopping test (2.7) holds.
    averages : bool
        Whether it has an averaged phase, which needs gradients only.
    rates : sequence of float
        Factors of the step size, one for each parameter.
    went_back : bool
        Whether the last iteration returned to an earlier point.
    units : Units
        Units of the first point of an exact objective.
    grad_norm : float
        ‖g‖ in the last second-order iteration; 0 before the first.
    """

    method: Method
    state: Any
    at_rest: bool
    averages: bool
    rates: Sequence[float]
    went_back: bool

    @property
    def units(self) -> Units: ...
    @property
    def grad_norm(self) -> float: ...
    def iterate(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]: ...
    def numbers(self) -> dict[str, Any]: ...
    def vectors(self) -> dict[str, Any]: ...
    def tensors(self) -> Sequence[Mapping[str, Any]]: ...
    def check(
        self, where: str, numbers: Any, vectors: Collection[str], shapes: Any = None, tensors: Any = ()
    ) -> None: ...
    def restore(self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], tensors: Any = ()) -> None: ...
    def snapshot(self) -> Any: ...
    def roll_back(self, snapshot: Any) -> None: ...
    def rearrange(self, places: Sequence[int | None], fitted: Any, x: Any, shapes: Any) -> None: ...
    def reset(self) -> None: ...
    def average(self, y: Vector) -> Vector: ...
    def gradient_point(self, x: Vector) -> Vector: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a run, and the tolerances of its certificate.

    Attributes
    ----------
    tol, curvature_tol : float
        Tolerances on ‖g‖ and on negative curvature; a `curvature_tol` of None follows from `tol` and the units.
    default_tol : bool
        Whether `tol` is the default and not a number of the caller.
    max_iter, max_calls, max_time, max_nfev : float
        Limits on iterations, calls as the paper counts them, seconds and values.
    certify : bool
        Whether a certificate is required, and not only a short probe for negative curvature.
    max_products : int or None
        Limit on the products of a certificate.
    """

    tol: float
    default_tol: bool
    curvature_tol: float | None
    max_iter: float
    max_calls: float
    max_time: float
    certify: bool
    max_products: int | None
    max_nfev: float = math.inf


@dataclass(frozen=True)
class _Ending:
    """The result of a test whether the run ends.

    Attributes
    ----------
    status : Status or None
        How the run ends; None if it continues.
    cause : str
        A sentence about the ending, in addition to that of its status.
    direction : vector or None
        A direction of negative curvature, along which the next iteration leaves a stationary point.
    """

    status: Status | None = None
    cause: str = ""
    direction: Vector | None = None


_CONTINUE = _Ending()


@dataclass
class Run:
    """A minimisation in progress.

    Attributes
    ----------
    oracle, iteration, limits, x, seed
        The objective, possibly scaled; the iteration with its state; the limits, scaled alike; the current point; and
        the seed of probes.
    history : list of Record
        The records of all iterations, in the units of f.
    certificate : Certificate or None
        That of x, if it was computed.
    stalled_iterations : int
        Consecutive iterations without progress beyond roundoff.
    best_grad_norm : float
        Smallest gradient norm so far.
    time_is_up : callable
        Whether the time limit has passed.
    first_value : float
        f at the start.
    mismatches : int
        Steps along which values and gradients disagree.
    gradient_verified : bool
        Whether differences of values confirmed the gradient.
    noise_checked : bool
        Whether the values were checked for noise.
    cause : str
        A sentence about the ending, in addition to that of its status.
    initial_units : Units
        Units of a first point that is stationary. Those of the iteration replace them.
    gradient_rounding : float
        Rounding error of the gradient at x, if the run stalled there.
    """

    oracle: Oracle
    iteration: IterationProtocol
    limits: Limits
    x: Vector
    seed: int
    history: list[Record] = field(default_factory=list)
    certificate: Certificate | None = None
    stalled_iterations: int = 0
    best_grad_norm: float = math.inf
    time_is_up: Callable[[], bool] = lambda: False
    first_value: float = math.nan
    mismatches: int = 0
    gradient_verified: bool = False
    noise_checked: bool = False
    cause: str = ""
    initial_units: Units = field(default_factory=Units)
    gradient_rounding: float = 0.0

    def run_to_end(self, report: Callable[[Run], bool], clock: Callable[[], float] = time.perf_counter) -> Status:
        """Iterate until the run ends. `report` is called after each iteration, and may ask to stop."""
        if self.limits.max_time < math.inf:
            deadline = clock() + self.limits.max_time
            self.time_is_up = lambda: clock() >= deadline
        if self.oracle.exact and not self.iterations and self.iteration.method.sigma.judge(0.0).measures_sigma0:
            self._scale_objective(scaling_exponent(self.oracle, self.x))
        while True:
            ending = self._iterate(report)
            if ending.status is not None:
                self.cause = ending.cause
                return ending.status

    def _iterate(self, report: Callable[[Run], bool]) -> _Ending:
        """Make one iteration, unless the run ends before it; return the ending, if it is reached."""
        direction = g = None
        if self.oracle.exact:
            value, g = self.oracle.gradient(self.x)
            ending = self._test_point(value, self.oracle.space.norm(g))
            if ending.status is not None:
                return ending
            if self.stalled_iterations >= _STALL_LIMIT:
                return _CONTINUE if self._leave_saddle() else self._stall_ending()
            direction = ending.direction
        limit = self._reached_limit()
        if limit is not None:
            return _Ending(limit)
        before, self.certificate = self.x, None
        try:
            self.x, record = self.iteration.iterate(before, self.oracle, direction)
        except NonFiniteStartError:
            return _Ending(Status.NOT_FINITE)
        self.history.append(self._unscaled_record(record))
        self._count_stall(record)
        self.oracle.end(record.step_norm)
        if report(self):
            return _Ending(Status.CALLBACK)
        ending = self._consistency_test(record, before, g)
        if ending.status is None and self.iteration.at_rest and not self.oracle.exact:
            return _Ending(Status.AT_REST)  # for an exact objective it counts as a stall
        return ending

    def _test_point(self, value: float, grad_norm: float) -> _Ending:
        """Test the current point of an exact objective: finite, bounded, and second-order if it is stationary."""
        if not (math.isfinite(value) and math.isfinite(grad_norm)):
            return _Ending(Status.NO_GRADIENT if self.iterations else Status.NOT_FINITE)
        self.first_value = value if math.isnan(self.first_value) else self.first_value
        if self.first_value - value > (abs(self.first_value) + self._units.value) / self.oracle.space.eps**2:
            return _Ending(Status.UNBOUNDED)
        return self._second_order_test() if grad_norm <= self._tol else _CONTINUE

    def _reached_limit(self) -> Status | None:
        """Return the status of a limit that the run has reached."""
        if self.iterations >= self.limits.max_iter:
            return Status.ITERATION_LIMIT
        meter = self.oracle.meter
        if meter.paper_calls >= self.limits.max_calls or meter.nfev >= self.limits.max_nfev:
            return Status.CALL_LIMIT
        return Status.TIME_LIMIT if self.time_is_up() else None

    @property
    def iterations(self) -> int:
        """Number of iterations, including those before an interruption."""
        return int(self.iteration.state.iteration)

    @property
    def objective(self) -> Oracle:
        """The oracle of f; the run may use one of f times a power of two."""
        return self.oracle.inner if isinstance(self.oracle, ScaledOracle) else self.oracle

    @property
    def _factor(self) -> float:
        """The power of two by which f is scaled."""
        return self.oracle.factor if isinstance(self.oracle, ScaledOracle) else 1.0

    def _scale_objective(self, exponent: int) -> None:
        """Continue with 2^exponent · f and tolerances scaled alike, unless the one on the gradient would overflow."""
        factor = math.ldexp(1.0, exponent)
        if not exponent or self.limits.tol * factor == math.inf:
            return
        self.oracle = ScaledOracle(self.oracle, exponent)
        curvature_tol = self.limits.curvature_tol
        self.limits = replace(
            self.limits,
            tol=self.limits.tol * factor,
            curvature_tol=None if curvature_tol is None else curvature_tol * factor,
        )
        iteration: Any = self.iteration  # that of the core: objectives on samples are not scaled
        iteration.tol = self.limits.tol

    def _unscaled_record(self, record: Record) -> Record:
        """Return the record in the units of f."""
        if self._factor == 1.0:
            return record
        names = ("sigma", "grad_norm", "ritz_value", "model_decrease", "value", "trial_value")
        return replace(record, **{name: getattr(record, name) / self._factor for name in names})

    @property
    def unscaled_certificate(self) -> Certificate | None:
        """The certificate in the units of f."""
        cert = self.certificate
        if cert is None or self._factor == 1.0:
            return cert
        names = ["grad_norm", "lambda_min", "error_bound", "rounding", "residual", "asymmetry"]
        names += ["eps_gradient", "eps_curvature"]
        return replace(cert, **{name: getattr(cert, name) / self._factor for name in names})

    @property
    def message(self) -> str:
        """The cause of the ending, with a remark if f was scaled."""
        if not self.cause or not isinstance(self.oracle, ScaledOracle):
            return self.cause
        return f"{self.cause} Numbers in this message are of f times 2^{self.oracle.exponent}."

    def state(self) -> dict[str, Any]:
        """Return the state from which `resume` continues bit for bit: plain numbers, vectors and tensors."""
        return {
            "method": self.iteration.method.name,
            "x": self.x * 1.0,  # copies, so that a caller cannot change the run through them
            "numbers": self.iteration.numbers(),
            "vectors": {name: vector * 1.0 for name, vector in self.iteration.vectors().items()},
            "tensors": [dict(tensors) for tensors in self.iteration.tensors()],
            "meter": asdict(self.oracle.meter),
            "cached": self.oracle.is_cached(self.x),
            "stalled_iterations": self.stalled_iterations,
            "best_grad_norm": self.best_grad_norm,
            "first_value": self.first_value,
            "consistency": [self.mismatches, self.gradient_verified, self.noise_checked],
            "oracle": self.oracle.numbers(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that an earlier run passed to its callback."""
        tensors = self._check_iteration_state(state)
        _check_progress(state)
        oracle_names = self.oracle.numbers().keys()
        oracle_numbers = require_mapping("resume['oracle']", state["oracle"])
        if set(oracle_numbers) - {"exponent"} != set(oracle_names):
            raise state_error("resume['oracle']", sorted(map(str, oracle_numbers)), f"{sorted(oracle_names)}")
        exponent = require_exponent(self.oracle, self.x, oracle_numbers)
        self.oracle.restore({name: oracle_numbers[name] for name in oracle_names})
        self._scale_objective(exponent)
        self.x = state["x"]
        self.iteration.restore(state["numbers"], state["vectors"], tensors)
        self.stalled_iterations, self.best_grad_norm = state["stalled_iterations"], state["best_grad_norm"]
        self.first_value = state["first_value"]
        self.mismatches, self.gradient_verified, self.noise_checked = state["consistency"]
        value_is_cached, gradient_is_cached = state["cached"]
        if value_is_cached:  # evaluate again; the saved counters include it already
            self.oracle.value(self.x)
        if gradient_is_cached:
            self.oracle.gradient(self.x)
        self.oracle.meter = Meter(**state["meter"])

    def _check_iteration_state(self, state: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Raise an error unless a state belongs to this problem and iteration; return its tensors."""
        missing = self.state().keys() - state.keys()
        if missing:
            raise ArgumentError(
                f"resume lacks {sorted(missing)}: pass the state of an intermediate result of this version."
            )
        if not isinstance(state["method"], str) or state["method"] != self.iteration.method.name:
            raise ArgumentError(
                f"resume is of method {state['method']!r}, not {self.iteration.method.name!r}: use that one."
            )
        dim = self.oracle.space.dim
        if getattr(state["x"], "ndim", None) == 1 and len(state["x"]) != dim:
            raise ArgumentError(f"resume has {len(state['x'])} variables, not {dim}: use its problem.")
        numbers, vectors = state["numbers"], require_mapping("resume['vectors']", state["vectors"])
        if set(require_mapping("resume['numbers']", numbers)) != set(self.iteration.numbers()):
            raise ArgumentError(
                "resume is of another iteration than this one: pass the same preset, minibatch and batch_size as in "
                "the run that was interrupted, and a state of this version."
            )
        tensors = _as_tensors(state["tensors"], self.oracle.space.tensor(self.x).dtype)
        self.iteration.check("resume['numbers']", numbers, vectors, self.oracle.shapes, tensors)
        for name, vector in {"x": state["x"], **vectors}.items():
            where = f"resume[{name!r}]"
            require_vector(where, vector, (dim,))
            if type(vector) is not type(self.x) or vector.dtype != self.x.dtype:  # type: ignore[attr-defined]
                raise state_error(where, f"{type(vector).__name__} of {vector.dtype}", "one of the type of x0")
        return tensors

    def _count_stall(self, record: Record) -> None:
        """Count iterations that decreased neither the gradient norm nor, beyond roundoff, the value."""
        if not self.oracle.exact:
            return
        gradient_decreased = record.grad_norm < 0.99 * self.best_grad_norm
        self.best_grad_norm = min(self.best_grad_norm, record.grad_norm)
        moved = record.branch is not Branch.STAYED
        roundoff = self.oracle.space.eps * abs(record.value)
        value_decreased = record.note != Note.BELOW_PRECISION and record.value - record.trial_value > roundoff
        # With the paper's rule a rejection is not a stall, because σ grows in the next iteration. With interpolation σ
        # was already raised to its bound in this iteration.
        rejection_stalls = self.iteration.method.sigma.judge(0.0).interpolates
        if gradient_decreased or (moved and value_decreased):
            self.stalled_iterations = 0
        elif moved or self.iteration.at_rest or rejection_stalls:
            self.stalled_iterations += 1

    @property
    def _units(self) -> Units:
        """The units of the first point, from the iteration or as measured before it."""
        units = self.iteration.units
        return units if units.length else self.initial_units

    @property
    def _length(self) -> float:
        """The unit of length, or 1 if it is not known."""
        return self._units.length or 1.0

    def _leave_saddle(self) -> bool:
        """Move x along negative curvature, if a probe finds it and f decreases there by more than its roundoff.

        Near a strong saddle or maximum the steps of the model may change f by less than its roundoff, so that the
        ratio test cannot detect that they are too short. Along v with vᵀHv = λ < 0 the predicted decrease ½|λ|t²
        exceeds the roundoff of f from t = √(2 eps|f|/|λ|) on. Longer steps are tried from there, each twice the last,
        up to √(|f|/|λ|), ‖x‖ or the unit of length. σ, the units and the gradient norms of the run so far were measured
        below roundoff, so they are reset.
        """
        if not self.iteration.method.needs_products or self.limits.max_iter <= self.iterations:
            return False
        cert, v = self.compute_certificate(self.oracle, self.limits.max_products, self.seed + self.iterations)
        self.certificate = cert
        if not cert.saddle:
            return False
        space, (value, g) = self.oracle.space, self.oracle.gradient(self.x)
        f_length = math.sqrt(abs(value) / -cert.lambda_min)
        max_step = max(f_length, space.norm(self.x), self._units.length)
        first_step = max(math.sqrt(2.0 * space.eps) * f_length, math.sqrt(space.eps) * max_step)
        sign = -math.copysign(1.0, space.dot(g, v))
        for direction in (v * sign, v * -sign):
            lower_point = self._search_along(direction, first_step, max_step, value - space.eps * abs(value))
            if lower_point is not None:
                break
        else:
            return False
        self.x, self.certificate = lower_point, None
        self.stalled_iterations, self.best_grad_norm = 0, math.inf
        initial = {"sigma": self.iteration.method.sigma.judge(0.0).sigma0}
        initial |= dict.fromkeys(("last_step_norm", "last_grad_norm", "unit_length", "unit_cubic"), 0.0)
        self.iteration.restore(self.iteration.numbers() | initial, self.iteration.vectors(), self.iteration.tensors())
        return True

    def _search_along(self, direction: Vector, step: float, max_step: float, below: float) -> Vector | None:
        """Return the first minimum of f over x + t·direction, t = step, 2·step, … ≤ `max_step`, with f < `below`.

        Points with a gradient that is not finite are skipped. None if there is no such minimum.
        """
        lowest = None
        while step <= max_step:
            trial = self.x + direction * step
            value = self.oracle.value(trial)
            if -math.inf < value < below and math.isfinite(self.oracle.space.norm(self.oracle.gradient(trial)[1])):
                lowest, below = trial, value
            elif lowest is not None:
                break
            step *= 2.0
        return lowest

    def _stall_ending(self) -> _Ending:
        """Return the ending of a stalled run, with its cause."""
        stays = takewhile(lambda record: record.branch is Branch.STAYED, reversed(self.history))
        if any(record.note == Note.GRADIENT_NOT_FINITE for record in stays):
            return _Ending(Status.NO_GRADIENT)
        cause = self._difference_error_cause() or consistency.find_stall_cause(self.oracle, self.x, self._length)
        return _Ending(Status.STALLED, cause) if cause else self._roundoff_ending()

    def _roundoff_ending(self) -> _Ending:
        """Return the ending of a stalled run whose gradient may be within its rounding error.

        The default tolerance is raised to that error. One that the caller passed is kept, and the cause names the
        error. In an ill-conditioned valley the error across it may exceed the gradient along it. The models of the last
        iterations must therefore predict no decrease beyond the roundoff of f.
        """
        last_records = self.history[-_STALL_LIMIT:]
        roundoff = 10.0 * self.oracle.space.eps
        if not all(record.model_decrease <= roundoff * abs(record.value) for record in last_records):
            return _Ending(Status.STALLED)
        meter = replace(self.oracle.meter)
        error = consistency.estimate_gradient_rounding(self.oracle, self.x, self._length)
        self.oracle.meter = meter
        if not self.oracle.space.norm(self.oracle.gradient(self.x)[1]) <= error:
            return _Ending(Status.STALLED)
        if not self.limits.default_tol:
            cause = f"Roundoff alone may cause a gradient of {error:.1g} here: pass a tol of at least that."
            return _Ending(Status.STALLED, cause)
        self.gradient_rounding = error
        ending = self._second_order_test()
        return _Ending(Status.STALLED) if ending.status is None else ending

    def _consistency_test(self, record: Record, before: Vector, g: Vector | None) -> _Ending:
        """End the run if gradient, values and products contradict each other.

        Between two points f changes by about the mean of its directional derivatives there, and a step reaches at
        least half of the predicted decrease. If three of the first steps contradict that, or one stays, differences of
        values decide. An iteration that stays has tried every step, so a few evaluations to find the cause are cheap.
        After iteration `_SYMMETRY_ITERATION` the symmetry of the products is checked once.
        """
        if g is None or record.note == Note.GRADIENT_NOT_FINITE:
            return _CONTINUE
        stays, cause = self.x is before and record.trials > 0, ""
        is_compared = not self.gradient_verified and record.iteration < _COMPARED_ITERATIONS
        if is_compared and (stays or self._is_mismatch(record, before, g)):
            self.mismatches += 1
            if stays or self.mismatches > _ALLOWED_MISMATCHES:
                cause = consistency.check_gradient(self.oracle, self.x, self._length)
                self.gradient_verified = not cause
        checks_symmetry = (stays or record.iteration == _SYMMETRY_ITERATION) and self.iteration.method.needs_products
        if checks_symmetry and not cause:
            cause = consistency.check_symmetry(self.oracle, self.x)
        if cause:
            return _Ending(Status.INCONSISTENT, cause)
        if stays and not self.noise_checked:
            self.noise_checked = True
            cause = consistency.check_noise(self.oracle, self.x, self._length, consistency.ENDING_NOISE)
        return _Ending(Status.STALLED, cause) if cause else _CONTINUE

    def _is_mismatch(self, record: Record, before: Vector, g: Vector) -> bool:
        """Whether the change of f differs from the mean of its directional derivatives at both ends of the step."""
        if self.x is before:
            return False
        space = self.oracle.space
        s = self.x - before
        first, last = space.dot(g, s), space.dot(self.oracle.gradient(self.x)[1], s)
        difference = abs(record.trial_value - record.value - 0.5 * (first + last))
        is_large = difference > _MISMATCH_TOLERANCE * (abs(first) + abs(last)) + 1e3 * space.eps * abs(record.value)
        return is_large or record.rho < 0.5

    def compute_certificate(self, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        """Return the certificate of the current point, and the left-most Ritz vector."""
        eps_curvature = self.limits.curvature_tol
        if eps_curvature is None:  # √(L2 ε) with the estimate of L2, at most √ε
            unit = self._factor  # an L2 of 1, scaled as f
            eps_curvature = math.sqrt(self._tol) * math.sqrt(min(unit, self._units.cubic or unit))
        return probe(
            oracle,
            self.x,
            eps=max(self._tol, self.gradient_rounding),
            eps_curvature=eps_curvature,
            max_products=max_products,
            seed=seed,
            time_is_up=self.time_is_up,
        )

    def _difference_error_cause(self) -> str:
        """Return a cause if no gradient of this run exceeded the error of differences, where that error is reported."""
        norms = [record.grad_norm * self._factor for record in self.history]
        largest_norm = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
        largest_norm = max(largest_norm, self.iteration.grad_norm, _REPORTED_DIFFERENCE_ERROR * self.limits.tol)
        return consistency.check_gradient_norms(self.oracle, self.x, largest_norm)

    def _difference_limit_cause(self, cert: Certificate) -> str:
        """Return a cause if the error of differenced gradients exceeds the tolerances of the certificate.

        If the caller passed the tolerance on the gradient norm, the error is compared with that. The default is raised
        to the error, so that the gradient norm shows little. Then the curvature has to be certified, or at least
        positive beyond the error of one product.
        """
        error = self.oracle.gradient_error(self.x)
        cause = consistency.check_difference_error(self.oracle, self.x, self._tol)
        product_error = cert.rounding / math.sqrt(max(cert.products, 1))  # `rounding` is a sum over all products
        undecided = not cert.second_order and cert.rounding > cert.eps_curvature
        if not cause and error > self.limits.tol and undecided and not cert.lambda_min > product_error:
            return consistency.difference_error_message(error, cert.rounding)
        return cause

    def _missed_curvature_cause(self, cert: Certificate) -> str:
        """Return a cause if values contradict products that are differences of the caller's gradient."""
        if not (self.oracle.gradient_of_caller and self.oracle.differenced_products):
            return ""
        length, meter = max(self._units.length, self.oracle.space.norm(self.x)) or 1.0, replace(self.oracle.meter)
        try:
            return consistency.check_curvature(self.oracle, self.x, length, cert.eps_curvature)
        finally:
            self.oracle.meter = meter

    @property
    def _tol(self) -> float:
        """Tolerance on ‖g‖: the default is raised to the error of differenced gradients."""
        return max(self.limits.tol, self.oracle.gradient_error(self.x) if self.limits.default_tol else 0.0)

    def _measure_first_units(self) -> Units:
        """Measure the units with one product, before the first iteration."""
        space, meter, operator = self.oracle.space, replace(self.oracle.meter), self.oracle.hessian(self.x)
        v = space.normal(np.random.default_rng(self.seed))
        try:
            product_norm = space.norm(operator(v)) / space.norm(v)
        except NonFiniteProductError:
            product_norm = math.nan
        finally:
            operator.release()
            self.oracle.meter = meter
        return measure_units(self.oracle.gradient(self.x)[0], 0.0, product_norm, space.norm(self.x))

    def _second_order_test(self) -> _Ending:
        """Return the ending at a stationary point, or a direction of negative curvature to leave it."""
        max_products = self.limits.max_products
        measures_units = not self.iterations and max_products is None
        if measures_units:
            self.initial_units = self._measure_first_units()
            if self.oracle.gradient_of_caller:
                cause = consistency.check_small_gradient(self.oracle, self.x, self.initial_units.length)
                if cause:
                    return _Ending(Status.INCONSISTENT, cause)
        if self.iterations and not self.limits.certify:
            affordable = max(_PROBE_PRODUCTS, self.oracle.meter.nhev // 10)
            max_products = affordable if max_products is None else min(max_products, affordable)
        cert, v = self.compute_certificate(self.oracle, max_products, self.seed + self.iterations)
        self.certificate = cert = replace(cert, products=cert.products + measures_units)
        if not cert.saddle:
            return self._ending_without_saddle(cert)
        if cert.inconsistent:
            return _asymmetry_ending(cert)
        if not self.iteration.method.needs_products:
            return _Ending(Status.FIRST_ORDER)
        if self.stalled_iterations >= _STALL_LIMIT:
            return _CONTINUE if self._leave_saddle() else _Ending(Status.FIRST_ORDER)
        return _Ending(direction=v)

    def _ending_without_saddle(self, cert: Certificate) -> _Ending:
        """Return the ending at a stationary point at which no negative curvature was found."""
        if not cert.inconsistent:
            if cause := self._missed_curvature_cause(cert):
                return _Ending(Status.INCONSISTENT, cause)
            if cause := self._difference_limit_cause(cert):
                return _Ending(Status.STALLED, cause)
        if cert.second_order:
            return _Ending(Status.SECOND_ORDER)
        if cert.inconsistent:
            return _asymmetry_ending(cert)
        if cause := self._difference_error_cause():
            return _Ending(Status.STALLED, cause)
        return _Ending(Status.TIME_LIMIT if self.time_is_up() else Status.UNCERTIFIED)


def _asymmetry_ending(cert: Certificate) -> _Ending:
    """Return the ending of a run whose Hessian products are asymmetric."""
    cause = f"The Hessian product is not symmetric, by {cert.asymmetry:.2g}: check hess or hessp."
    return _Ending(Status.INCONSISTENT, cause)


def _check_progress(state: Mapping[str, Any]) -> None:
    """Raise an error unless the numbers of a saved run have their types and ranges."""
    require_fields("resume['meter']", state["meter"], Meter)
    require_count("resume['stalled_iterations']", state["stalled_iterations"])
    best_grad_norm, cached = state["best_grad_norm"], state["cached"]
    if not isinstance(best_grad_norm, float) or not best_grad_norm >= 0.0:
        raise state_error("resume['best_grad_norm']", best_grad_norm, "a number ≥ 0")
    if _types_of(cached) != [bool, bool]:
        raise state_error("resume['cached']", cached, "two of True and False")
    first_value, checks = state["first_value"], state["consistency"]
    if not isinstance(first_value, float):
        raise state_error("resume['first_value']", first_value, "a number")
    if _types_of(checks) != [int, bool, bool] or checks[0] < 0:
        raise state_error("resume['consistency']", checks, "an integer ≥ 0 and two of True and False")


def _types_of(entries: Any) -> list[type]:
    """Return the types of the entries of a list or tuple; an empty list for anything else."""
    return [type(entry) for entry in entries] if isinstance(entries, (tuple, list)) else []


def _as_tensors(saved: Any, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return saved tensors of the iteration, of the type of x; a file may have them as arrays."""
    if not isinstance(saved, (list, tuple)):
        raise state_error("resume['tensors']", saved, "a list of mappings")
    result = []
    for entry in saved:
        items = require_mapping("an entry of resume['tensors']", entry).items()
        if not all(isinstance(array, np.ndarray | torch.Tensor) for _, array in items):
            raise state_error("an entry of resume['tensors']", entry, "tensors by name")
        tensors = {name: torch.as_tensor(array) for name, array in items}
        for name, tensor in tensors.items():
            if tensor.dtype != dtype:
                raise state_error(f"{name!r} in resume['tensors']", f"a tensor of {tensor.dtype}", f"one of {dtype}")
        result.append(tensors)
    return result
