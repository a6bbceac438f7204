"""The loop around the iteration: when a minimisation ends, and how it continues after an interruption."""

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
from sanc.core.saved import refuse, require_count, require_fields, require_mapping, require_vector
from sanc.core.scaled import ScaledOracle, saved_exponent, scaling_exponent
from sanc.core.space import Vector
from sanc.core.units import Units, measure_units
from sanc.errors import ArgumentError, NonFiniteStartError

_STALL_LIMIT = 10
"""Consecutive iterations without progress beyond roundoff after which the run has stalled."""

_COMPARED, _MISFITS, _MISFIT = 5, 2, 0.15
"""Iterations in which gradients are compared with values, misfits allowed, and the relative size of a misfit."""

_SYMMETRY_CHECK = 50
"""The iteration after which the symmetry of the Hessian products is checked."""

_LARGE_ERROR = 1e4
"""Error of a differenced gradient, in units of the tolerance, that is large."""

_PROBE_PRODUCTS = 10
"""Hessian products that a run without certificate may at least spend on a probe for negative curvature."""


class Status(IntEnum):
    """How a minimisation ended; `sentence` describes it."""

    sentence: str

    def __new__(cls, number: int, sentence: str) -> Status:
        member = int.__new__(cls, number)
        member._value_ = number
        member.sentence = sentence
        return member

    SECOND_ORDER = 0, "Converged to a second-order point: the gradient is small and the curvature is certified."
    UNCERTIFIED = 1, "The gradient is small and no negative curvature was found, but it could not be certified."
    FIRST_ORDER = 2, "Converged to a first-order point only: negative curvature remains that was not escaped."
    AT_REST = 3, "The model has no step left to offer: the escape step is zero and the cubic step is below epsilon_s."
    STALLED = 4, "No step lowers the objective any further in this precision, and the gradient is above the tolerance."
    ITERATION_LIMIT = 5, "The limit on iterations was reached."
    CALL_LIMIT = 6, "The limit on oracle calls was reached."
    TIME_LIMIT = 7, "The limit on time was reached."
    CALLBACK = 8, "The callback asked to stop."
    NOT_FINITE = 9, "The objective, its gradient or a Hessian product is not finite at the starting point."
    UNBOUNDED = 10, "The objective seems to be unbounded below."
    NO_GRADIENT = (
        11,
        "The gradient is not finite at the points to which lower values lead; the last with one is returned.",
    )
    INCONSISTENT = 12, "The objective, its gradient and its Hessian products are inconsistent."

    @property
    def success(self) -> bool:
        """Whether a point of the wanted kind was found."""
        return self in (Status.SECOND_ORDER, Status.UNCERTIFIED)


class Iterates(Protocol):
    """An iteration with its state: that of the core, or that on samples.

    Attributes
    ----------
    averages : bool
        Whether it can make steps from gradients alone, in an averaged phase.
    rates : sequence of float
        Factors of the step size, one for each parameter.
    went_back : bool
        Whether the last iteration returned to an earlier point.
    units : Units
        Units of the first point of an exact objective.
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
    """Limits of a run, and the tolerances of its certificate."""

    tol: float
    default_tol: bool  # whether the caller left `tol` out
    curvature_tol: float | None
    max_iter: float
    max_calls: float
    max_time: float
    certify: bool
    max_products: int | None
    max_nfev: float = math.inf


@dataclass
class Run:
    """A minimisation in progress."""

    oracle: Oracle
    iterates: Iterates
    limits: Limits
    x: Vector
    seed: int
    history: list[Record] = field(default_factory=list)
    certificate: Certificate | None = None  # of x, if it was computed
    stalled: int = 0
    best_gradient: float = math.inf
    late: Callable[[], bool] = lambda: False  # whether the time limit has passed
    first_value: float = math.nan
    misfits: int = 0  # steps along which values and gradients disagree
    verified: bool = False  # whether differences of values confirmed the gradient
    smooth: bool = False  # whether the values were checked for noise
    cause: str = ""  # a sentence about the ending, beside that of its status
    units: Units = field(default_factory=Units)  # of the first point, if it is stationary
    rounding: float = 0.0  # rounding error of the gradient at x, if the run stalled there

    def go(self, report: Callable[[Run], bool], clock: Callable[[], float] = time.perf_counter) -> Status:
        """Iterate until an ending is reached."""
        if self.limits.max_time < math.inf:
            deadline = clock() + self.limits.max_time
            self.late = lambda: clock() >= deadline
        if self.oracle.exact and not self.iteration and self.iterates.method.sigma.judge(0.0).measures_sigma0:
            self._scale(scaling_exponent(self.oracle, self.x))
        while True:
            direction = g = None
            if self.oracle.exact:
                value, g = self.oracle.gradient(self.x)
                norm = self.oracle.space.norm(g)
                if not (math.isfinite(value) and math.isfinite(norm)):
                    return Status.NO_GRADIENT if self.iteration else Status.NOT_FINITE
                self.first_value = value if math.isnan(self.first_value) else self.first_value
                if self.first_value - value > (abs(self.first_value) + self._units.value) / self.oracle.space.eps**2:
                    return Status.UNBOUNDED
                if norm <= self._tol:
                    ending, direction = self._second_order_test()
                    if ending is not None:
                        return ending
                if self.stalled >= _STALL_LIMIT:
                    if self._leave_saddle():
                        continue
                    return self._stalled()
            if self.iteration >= self.limits.max_iter:
                return Status.ITERATION_LIMIT
            meter = self.oracle.meter
            if meter.paper_calls >= self.limits.max_calls or meter.nfev >= self.limits.max_nfev:
                return Status.CALL_LIMIT
            if self.late():
                return Status.TIME_LIMIT
            before, self.certificate = self.x, None
            try:
                self.x, record = self.iterates.iterate(before, self.oracle, direction)
            except NonFiniteStartError:
                return Status.NOT_FINITE
            self.history.append(self._unscaled_record(record))
            self._watch(record)
            self.oracle.end(record.step_norm)
            if report(self):
                return Status.CALLBACK
            ending = self._contradicted(record, before, g)
            if ending is not None:
                return ending
            if self.iterates.at_rest and not self.oracle.exact:  # with an exact objective it counts as a stall
                return Status.AT_REST

    @property
    def iteration(self) -> int:
        """Iterations made, including those before an interruption."""
        return int(self.iterates.state.iteration)

    @property
    def objective(self) -> Oracle:
        """The oracle of f, where the run may use one of f times a power of two."""
        return self.oracle.inner if isinstance(self.oracle, ScaledOracle) else self.oracle

    @property
    def _factor(self) -> float:
        """The power of two by which f is scaled."""
        return self.oracle.factor if isinstance(self.oracle, ScaledOracle) else 1.0

    def _scale(self, exponent: int) -> None:
        """Continue with 2^exponent · f and tolerances to match, unless the one on the gradient would overflow."""
        factor = math.ldexp(1.0, exponent)
        if not exponent or self.limits.tol * factor == math.inf:
            return
        self.oracle = ScaledOracle(self.oracle, exponent)
        curvature = self.limits.curvature_tol
        self.limits = replace(
            self.limits,
            tol=self.limits.tol * factor,
            curvature_tol=None if curvature is None else curvature * factor,
        )
        iterates: Any = self.iterates  # that of the core: objectives on samples are not scaled
        iterates.tol = self.limits.tol

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
        """The sentence about the cause of the ending, which may have numbers of the scaled f."""
        if not self.cause or not isinstance(self.oracle, ScaledOracle):
            return self.cause
        return f"{self.cause} Numbers in this message are of f times 2^{self.oracle.exponent}."

    def state(self) -> dict[str, Any]:
        """Return everything that `resume` needs to continue bit for bit: plain numbers, vectors and tensors."""
        return {
            "method": self.iterates.method.name,
            "x": self.x * 1.0,  # copies, so that a caller cannot change the run through them
            "numbers": self.iterates.numbers(),
            "vectors": {name: vector * 1.0 for name, vector in self.iterates.vectors().items()},
            "tensors": [dict(tensors) for tensors in self.iterates.tensors()],
            "meter": asdict(self.oracle.meter),
            "knows": self.oracle.knows(self.x),
            "stalled": self.stalled,
            "best_gradient": self.best_gradient,
            "first_value": self.first_value,
            "consistency": [self.misfits, self.verified, self.smooth],
            "oracle": self.oracle.numbers(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that an earlier run passed to its callback."""
        missing = self.state().keys() - state.keys()
        if missing:
            raise ArgumentError(
                f"resume lacks {sorted(missing)}: pass the state of an intermediate result of this version."
            )
        if not isinstance(state["method"], str) or state["method"] != self.iterates.method.name:
            raise ArgumentError(
                f"resume is of method {state['method']!r}, not {self.iterates.method.name!r}: use that one."
            )
        dim = self.oracle.space.dim
        if getattr(state["x"], "ndim", None) == 1 and len(state["x"]) != dim:
            raise ArgumentError(f"resume has {len(state['x'])} variables, not {dim}: use its problem.")
        numbers, vectors = state["numbers"], require_mapping("resume['vectors']", state["vectors"])
        if set(require_mapping("resume['numbers']", numbers)) != set(self.iterates.numbers()):
            raise ArgumentError(
                "resume is of another iteration than this one: pass the same preset, minibatch and batch_size as in "
                "the run that was interrupted, and a state of this version."
            )
        tensors = _as_tensors(state["tensors"], self.oracle.space.tensor(self.x).dtype)
        self.iterates.check("resume['numbers']", numbers, vectors, self.oracle.shapes, tensors)
        for name, vector in {"x": state["x"], **vectors}.items():
            require_vector(f"resume[{name!r}]", vector, (dim,))
            if type(vector) is not type(self.x) or vector.dtype != self.x.dtype:  # type: ignore[attr-defined]
                raise refuse(f"resume[{name!r}]", f"{type(vector).__name__} of {vector.dtype}", "one of the type of x0")
        require_fields("resume['meter']", state["meter"], Meter)
        require_count("resume['stalled']", state["stalled"])
        best, knows = state["best_gradient"], state["knows"]
        if not isinstance(best, float) or not best >= 0.0:
            raise refuse("resume['best_gradient']", best, "a number ≥ 0")
        if not isinstance(knows, (tuple, list)) or [type(known) for known in knows] != [bool, bool]:
            raise refuse("resume['knows']", knows, "two of True and False")
        first, known = state["first_value"], state["consistency"]
        if not isinstance(first, float):
            raise refuse("resume['first_value']", first, "a number")
        kinds = [type(entry) for entry in known] if isinstance(known, (tuple, list)) else []
        if kinds != [int, bool, bool] or known[0] < 0:
            raise refuse("resume['consistency']", known, "an integer ≥ 0 and two of True and False")
        meter = Meter(**state["meter"])
        saved, wanted = require_mapping("resume['oracle']", state["oracle"]), self.oracle.numbers()
        if set(saved) - {"exponent"} != set(wanted):
            raise refuse("resume['oracle']", sorted(map(str, saved)), f"{sorted(wanted)}")
        exponent = saved_exponent(self.oracle, self.x, saved)
        self.oracle.restore({name: saved[name] for name in wanted})
        self._scale(exponent)
        self.x = state["x"]
        self.iterates.restore(numbers, vectors, tensors)
        self.stalled, self.best_gradient = state["stalled"], best
        self.first_value = first
        self.misfits, self.verified, self.smooth = known
        value, gradient = knows
        if value:  # cached when the state was saved: evaluate again without counting
            self.oracle.value(self.x)
        if gradient:
            self.oracle.gradient(self.x)
        self.oracle.meter = meter

    def _watch(self, record: Record) -> None:
        """Count iterations that lowered neither the gradient norm nor, beyond roundoff, the value."""
        if not self.oracle.exact:
            return
        lower = record.grad_norm < 0.99 * self.best_gradient
        self.best_gradient = min(self.best_gradient, record.grad_norm)
        moved = record.branch is not Branch.STAYED
        roundoff = self.oracle.space.eps * abs(record.value)
        fell = record.note != Note.VANISHES and record.value - record.trial_value > roundoff
        # With the paper's rule a rejection is no stall: σ has grown. Interpolated σ was raised up to its bound.
        counts = self.iterates.method.sigma.judge(0.0).interpolates
        if lower or (moved and fell):
            self.stalled = 0
        elif moved or self.iterates.at_rest or counts:
            self.stalled += 1

    @property
    def _units(self) -> Units:
        """The units of the first point, from the iteration or as measured before it."""
        known = self.iterates.units
        return known if known.length else self.units

    def _leave_saddle(self) -> bool:
        """Move x along negative curvature, if a probe finds it and f decreases there by more than its roundoff.

        Beside a strong saddle or maximum the steps of the model may change f by less than its roundoff, so that nothing
        shows that they are too short. Along v with vᵀHv = λ < 0 the predicted decrease ½|λ|t² exceeds the roundoff of f
        from t = √(2 eps|f|/|λ|) on. Longer steps are tried from there, each twice the last, up to √(|f|/|λ|), ‖x‖ or
        the unit of length. σ, the units and the gradient norms of the run so far were measured below roundoff, so the
        iteration starts afresh.
        """
        if not self.iterates.method.needs_products or self.limits.max_iter <= self.iteration:
            return False
        cert, v = self.probe(self.oracle, self.limits.max_products, self.seed + self.iteration)
        self.certificate = cert
        if not cert.saddle:
            return False
        space, (value, g) = self.oracle.space, self.oracle.gradient(self.x)
        natural = math.sqrt(abs(value) / -cert.lambda_min)
        longest = max(natural, space.norm(self.x), self._units.length)
        first = max(math.sqrt(2.0 * space.eps) * natural, math.sqrt(space.eps) * longest)
        sign = -math.copysign(1.0, space.dot(g, v))
        for direction in (v * sign, v * -sign):
            found = self._lowest(direction, first, longest, value - space.eps * abs(value))
            if found is not None:
                break
        else:
            return False
        self.x, self.certificate = found, None
        self.stalled, self.best_gradient = 0, math.inf
        fresh = {"sigma": self.iterates.method.sigma.judge(0.0).sigma0}
        fresh |= dict.fromkeys(("last_step_norm", "last_grad_norm", "unit_length", "unit_cubic"), 0.0)
        self.iterates.restore(self.iterates.numbers() | fresh, self.iterates.vectors(), self.iterates.tensors())
        return True

    def _lowest(self, direction: Vector, step: float, longest: float, below: float) -> Vector | None:
        """Return x + t·direction for t = step, 2 step, … up to `longest` where f is below `below` and rises next."""
        lowest = None
        while step <= longest:
            trial = self.x + direction * step
            value = self.oracle.value(trial)
            if -math.inf < value < below and math.isfinite(self.oracle.space.norm(self.oracle.gradient(trial)[1])):
                lowest, below = trial, value
            elif lowest is not None:
                break
            step *= 2.0
        return lowest

    def _stalled(self) -> Status:
        """Return the ending of a run that found no step, with its cause."""
        stays = takewhile(lambda record: record.branch is Branch.STAYED, reversed(self.history))
        if any(record.note == Note.NO_GRADIENT for record in stays):
            return Status.NO_GRADIENT
        self.cause = self._below_difference_error() or consistency.cause(self.oracle, self.x, self._units.length or 1.0)
        return Status.STALLED if self.cause else self._stationary_to_roundoff()

    def _stationary_to_roundoff(self) -> Status:
        """Return the ending of a stalled run whose gradient may be within its rounding error.

        The default tolerance is raised to that error. One that the caller passed is kept, and the cause names the
        error. In a valley of extreme condition the error across it may hide the gradient along it. So the models of the
        last iterations also have to predict no decrease beyond the roundoff of f, as the ratio test measures it.
        """
        stalled = self.history[-_STALL_LIMIT:]
        roundoff = 10.0 * self.oracle.space.eps
        if not all(record.model_decrease <= roundoff * abs(record.value) for record in stalled):
            return Status.STALLED
        meter = replace(self.oracle.meter)
        error = consistency.gradient_rounding(self.oracle, self.x, self._units.length or 1.0)
        self.oracle.meter = meter
        if not self.oracle.space.norm(self.oracle.gradient(self.x)[1]) <= error:
            return Status.STALLED
        if not self.limits.default_tol:
            self.cause = f"Roundoff alone may cause a gradient of {error:.1g} here: pass a tol of at least that."
            return Status.STALLED
        self.rounding = error
        ending, _ = self._second_order_test()
        return Status.STALLED if ending is None else ending

    def _contradicted(self, record: Record, before: Vector, g: Vector | None) -> Status | None:
        """End the run where gradient, values and products contradict each other.

        Between two points f changes by about the mean of its directional derivatives there, and a step reaches at
        least half of the predicted decrease. If three of the first steps contradict that, or one stays, differences of
        values decide. An iteration that stays has tried every step, so a few evaluations to find the cause are cheap.
        After a long run they are spent on the symmetry of the products.
        """
        if g is None or record.note == Note.NO_GRADIENT:
            return None
        length, stays = self._units.length or 1.0, self.x is before and record.trials > 0
        if not self.verified and record.iteration < _COMPARED and (stays or self._misses(record, before, g)):
            self.misfits += 1
            if stays or self.misfits > _MISFITS:
                self.cause = consistency.gradient(self.oracle, self.x, length)
                self.verified = not self.cause
        if (stays or record.iteration == _SYMMETRY_CHECK) and not self.cause and self.iterates.method.needs_products:
            self.cause = consistency.asymmetry(self.oracle, self.x)
        if self.cause:
            return Status.INCONSISTENT
        if stays and not self.smooth:
            self.smooth = True
            self.cause = consistency.noise(self.oracle, self.x, length, consistency.GROSS)
        return Status.STALLED if self.cause else None

    def _misses(self, record: Record, before: Vector, g: Vector) -> bool:
        """Whether f changed by other than the mean of its directional derivatives at the two ends of the step."""
        if self.x is before:
            return False
        space = self.oracle.space
        s = self.x - before
        first, last = space.dot(g, s), space.dot(self.oracle.gradient(self.x)[1], s)
        missed = abs(record.trial_value - record.value - 0.5 * (first + last))
        contradicts = missed > _MISFIT * (abs(first) + abs(last)) + 1e3 * space.eps * abs(record.value)
        return contradicts or record.rho < 0.5

    def probe(self, oracle: Oracle, max_products: int | None, seed: int) -> tuple[Certificate, Vector]:
        """Return the certificate of the current point, and the left-most Ritz vector."""
        eps, eps_curvature = max(self._tol, self.rounding), self.limits.curvature_tol
        if eps_curvature is None:  # √(L2 ε) with the estimate of L2, at most √ε
            one = self._factor  # the unit of L2
            eps_curvature = math.sqrt(self._tol) * math.sqrt(min(one, self._units.cubic or one))
        return probe(
            oracle, self.x, eps=eps, eps_curvature=eps_curvature, max_products=max_products, seed=seed, late=self.late
        )

    def _below_difference_error(self) -> str:
        """Return a cause if no gradient of this run exceeded the error of differences, where that error is large."""
        known = [record.grad_norm * self._factor for record in self.history]
        longest = max((norm for norm in known if math.isfinite(norm)), default=0.0)
        longest = max(longest, self.iterates.grad_norm, _LARGE_ERROR * self.limits.tol)
        return consistency.coarse(self.oracle, self.x, longest)

    def _hidden_by_differences(self, cert: Certificate) -> str:
        """Return a cause if the error of differenced gradients exceeds what is to be certified.

        That is the gradient norm, where the caller passed the tolerance. The default is raised to the error. Then the
        gradient norm shows little, and the curvature has to be certified, or at least above the error of one product.
        """
        error = self.oracle.gradient_error(self.x)
        cause = consistency.too_coarse(self.oracle, self.x, self._tol)
        single = cert.rounding / math.sqrt(max(cert.products, 1))  # `rounding` is a sum over all products
        undecided = not cert.second_order and cert.rounding > cert.eps_curvature
        if not cause and error > self.limits.tol and undecided and not cert.lambda_min > single:
            return consistency.differenced(error, cert.rounding)
        return cause

    def _hidden_curvature(self, cert: Certificate) -> str:
        """Return a cause if values contradict products that are differences of the caller's gradient."""
        if not (self.oracle.written and self.oracle.differences):
            return ""
        length, meter = max(self._units.length, self.oracle.space.norm(self.x)) or 1.0, replace(self.oracle.meter)
        try:
            return consistency.curvature(self.oracle, self.x, length, cert.eps_curvature)
        finally:
            self.oracle.meter = meter

    @property
    def _tol(self) -> float:
        """‖g‖ at which the run may end: the default is raised to the error of differenced gradients."""
        return max(self.limits.tol, self.oracle.gradient_error(self.x) if self.limits.default_tol else 0.0)

    def _first_units(self) -> Units:
        """Measure the units with one product, before the first iteration."""
        space, meter, operator = self.oracle.space, replace(self.oracle.meter), self.oracle.hessian(self.x)
        v = space.normal(np.random.default_rng(self.seed))
        try:
            curvature = space.norm(operator(v)) / space.norm(v)
        except NonFiniteProductError:
            curvature = math.nan
        finally:
            operator.release()
            self.oracle.meter = meter
        return measure_units(self.oracle.gradient(self.x)[0], 0.0, curvature, space.norm(self.x))

    def _second_order_test(self) -> tuple[Status | None, Vector | None]:
        """Return the ending at a stationary point, or a direction of negative curvature to leave it."""
        most = self.limits.max_products
        measures = not self.iteration and most is None
        if measures:
            self.units = self._first_units()
            self.cause = (
                consistency.missing_derivative(self.oracle, self.x, self.units.length) if self.oracle.written else ""
            )
            if self.cause:
                return Status.INCONSISTENT, None
        if self.iteration and not self.limits.certify:
            affordable = max(_PROBE_PRODUCTS, self.oracle.meter.nhev // 10)
            most = affordable if most is None else min(most, affordable)
        cert, v = self.probe(self.oracle, most, self.seed + self.iteration)
        self.certificate = cert = replace(cert, products=cert.products + measures)
        if not cert.saddle and not cert.inconsistent:
            self.cause = self._hidden_curvature(cert)
            if self.cause:
                return Status.INCONSISTENT, None
            self.cause = self._hidden_by_differences(cert)
            if self.cause:
                return Status.STALLED, None
        if cert.second_order:
            return Status.SECOND_ORDER, None
        if cert.inconsistent:
            self.cause = f"The Hessian product is not symmetric, by {cert.asymmetry:.2g}: check hess or hessp."
            return Status.INCONSISTENT, None
        if not cert.saddle:
            self.cause = self._below_difference_error()
            missing = Status.TIME_LIMIT if self.late() else Status.UNCERTIFIED
            return Status.STALLED if self.cause else missing, None
        if not self.iterates.method.needs_products:
            return Status.FIRST_ORDER, None
        if self.stalled >= _STALL_LIMIT:
            return None if self._leave_saddle() else Status.FIRST_ORDER, None
        return None, v


def _as_tensors(saved: Any, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return saved tensors of the iteration, of the type of x; a file may hold them as arrays."""
    if not isinstance(saved, (list, tuple)):
        raise refuse("resume['tensors']", saved, "a list of mappings")
    found = []
    for entry in saved:
        items = require_mapping("an entry of resume['tensors']", entry).items()
        if not all(isinstance(held, np.ndarray | torch.Tensor) for _, held in items):
            raise refuse("an entry of resume['tensors']", entry, "tensors by name")
        tensors = {name: torch.as_tensor(held) for name, held in items}
        for name, tensor in tensors.items():
            if tensor.dtype != dtype:
                raise refuse(f"{name!r} in resume['tensors']", f"a tensor of {tensor.dtype}", f"one of {dtype}")
        found.append(tensors)
    return found
