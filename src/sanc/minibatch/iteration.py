"""The iteration on samples: a second-order phase, then an averaged phase.

While the next batch confirms the decrease of a step on its own batch, a batch is as good as the objective: steps are
those of `sanc.core.iteration`, cubic, with a ratio test and escapes along negative curvature. When batches disagree,
the ratio of two noisy numbers shows little, and Hessian products cost more than they are worth. From there on

* the step minimises gᵀs + (σ/3)‖s‖³_M in a metric M that is learnt from gradients (`sanc.minibatch.metrics`),
* with σ such that the step has a size that is natural in M (`sanc.minibatch.scale`),
* and the parameters hold a running average of the iterates (`sanc.minibatch.averaging`).

Where the loss stagnates, a Krylov space is built, and negative curvature in it is followed by one step with a ratio
test. Where the loss has risen far, the run returns to an earlier point with a smaller step size
(`sanc.minibatch.watch`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sanc.core.iteration import Iteration
from sanc.core.method import Method
from sanc.core.oracle import Oracle
from sanc.core.point import LANCZOS_START, generator
from sanc.core.record import Branch, Record
from sanc.core.saved import numbers_of, require_fields, require_vector_names, state_error, vectors_of
from sanc.core.space import Space, Vector
from sanc.core.units import Units
from sanc.errors import ArgumentError, NonFiniteError, NonFiniteStartError
from sanc.minibatch import scale, watch
from sanc.minibatch.averaging import AveragedStep, StepNumbers, StepResults, advance
from sanc.minibatch.metrics.base import Metric, Preconditioner, check_saved
from sanc.minibatch.settings import Minibatch
from sanc.minibatch.state import State

_FACTOR_INTERVAL = 5
"""After the first steps, one step in so many updates the factors of the metric and the distance bound."""
_FIRST_PROBE = 100
"""The averaged step at which negative curvature is first probed for; each probe is twice as late as the last."""
_OUTLIER = 5.0
"""A gradient norm this many times the usual one is clipped to that, so that one bad batch changes little. The usual
norm is the root mean square, and in the first steps the largest norm so far: rare rows may have far larger ones."""
_FIRST_OUTLIER = 100.0
"""If the first gradient norm is this many times the second or third, it was an outlier, and averaging starts again."""
_START_LIMIT = 10
"""Batches at the start of which one must be finite: at a finite point a batch without a bad row is seldom so late."""
_SAME_NORM = 1e-5
"""Relative difference of ‖x‖² that roundoff may make; a larger one is a change by the caller."""
NONFINITE_WARNING, NONFINITE_LIMIT = 5, 100
"""Consecutive batches without a finite loss and gradient after which a warning is given, and an error is raised. Five
are too many for an occasional bad batch or for a loss scale that is lowered, and a hundred for any purpose."""
_LOST_AGE = 0.5
"""Share of their age in the average that parameters lose when others join, since their best values change then."""
_PROJECTION_STEPS = 20
"""Steps after a change of x by the caller in which further changes are expected, as after a projection."""


def _interval(refreshed: int, refresh: int) -> int:
    """Return after how many steps the metric is refreshed: few at first, more as gradients change less."""
    return min(max(refreshed, 1), refresh) if refreshed < 4 * refresh else refreshed // 4


class MinibatchIteration:
    """The iteration of an adaptive method on samples.

    Parameters
    ----------
    method : Method
        Its `minibatch` is not None.
    seed : int
        Seed of the random starts and signs.

    Attributes
    ----------
    went_back : bool
        Whether the last iteration returned to an earlier point.
    rates : sequence of float
        Factors of the step size, one for each parameter; empty: 1.
    create_metric : callable
        Creates a preconditioner from a metric, the shapes of the parameters and a vector like theirs.
    """

    at_rest = False  # with samples only limits end a run
    averages = True

    def __init__(self, method: Method, seed: int) -> None:
        assert method.minibatch is not None
        settings: Minibatch = method.minibatch
        self.method, self.settings = method, settings
        self.second_order = Iteration(method, seed, one_sample=True)
        self.state = State(seed, averaged=not self.settings.curvature)
        self.went_back = False
        self.rates: Sequence[float] = ()
        self.create_metric: Callable[[Metric, Sequence[tuple[int, ...]], Tensor], Preconditioner] = _create
        self._metric: Preconditioner | None = None
        self._steps: dict[tuple[bool, bool], AveragedStep] = {}  # by whether x is projected and factors are updated
        self._saved: Sequence[Mapping[str, Tensor]] = ()  # the metric of a resumed run, until the next averaged step

    @property
    def units(self) -> Units:
        """No units: they belong to an exact objective."""
        return Units()

    @property
    def grad_norm(self) -> float:
        """‖g‖ in the last second-order step; 0 before the first."""
        return self.second_order.grad_norm

    def iterate(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]:
        """Make one iteration from `x`: return the next point, which is `x` itself where it stayed, and the record."""
        clock, before, second_order = time.perf_counter(), self.state, self.second_order.state
        self.went_back = False
        try:
            point, record = self._advance(x, oracle)
        except BaseException:
            self.state, self.second_order.state = before, second_order
            raise
        seconds = before.seconds + time.perf_counter() - clock
        self._write(iteration=before.iteration + 1, seconds=seconds)
        return point, replace(record, calls=oracle.meter.snapshot(), seconds=seconds, hvp=oracle.hvp)

    def _write(self, **changes: Any) -> State:
        """Replace fields of the state; return the new state."""
        self.state = replace(self.state, **changes)
        return self.state

    def _advance(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record]:
        """Make a step of the phase that the losses of batches ask for."""
        state = self._write(averaged=True) if not oracle.has_values and not self.state.averaged else self.state
        oracle.begin(state.iteration, products=not state.averaged)
        if state.weight_unit == 0.0:
            if oracle.has_values:
                value, g = oracle.gradient(x)
                if not math.isfinite(value + oracle.norm(g)):
                    return self._not_finite(x, oracle, value, oracle.norm(g))
            state = self._write(nonfinite=0, weight_unit=self._weight_unit(x, oracle))
        if not state.averaged:
            value, _ = oracle.gradient(x)
            if self._batches_agree(x, value, oracle.space.eps):
                return self._second_order_step(x, oracle)
            return self._first_averaged_step(x, value, oracle)
        escaped = self._probe(x, oracle)
        return self._averaged_step(x, oracle) if escaped is None else escaped

    def _weight_unit(self, x: Vector, oracle: Oracle) -> float:
        """Return the unit of the step size, from the first point."""
        space, value, gradient_sum = oracle.space, math.nan, math.nan
        if oracle.has_values:
            value, g = oracle.gradient(x)
            total = space.tensor(g).abs().sum(dtype=torch.float64)
            gradient_sum = float(total if space.sum_over_ranks is None else space.sum_over_ranks(total))
        typical = scale.typical_weight(space.tensor(x), oracle.shapes, space.sum_over_ranks)
        return scale.weight_unit(typical, value, gradient_sum)

    # ------------------------------------------------------------------ the second-order phase

    def _batches_agree(self, x: Vector, value: float, eps: float) -> bool:
        """Whether the second-order phase continues, given the loss of a new batch."""
        if math.isnan(self.state.last_loss):  # the first batch
            self._write(level=value, first_loss=value, safe=x)
            return True
        continues, *counts = watch.agreement(self.state, value, self.settings.noise, eps)
        self._write(**dict(zip(watch.Agreement._fields[1:], counts, strict=True)))
        return continues

    def _second_order_step(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]:
        """Make an iteration as if the batch were the objective, and remember its decrease."""
        state, inner = self.state, self.second_order
        inner.state = replace(inner.state, iteration=state.iteration)
        point, record = inner.iterate(x, oracle, start)
        moved = point is not x
        self._write(
            last_loss=record.trial_value if moved else record.value,
            decrease=record.value - record.trial_value if moved else 0.0,
            long_step=record.step_norm > scale.typical_step_norm(state, self.settings.step, oracle.space.dim),
        )
        return point, record

    def _first_averaged_step(self, x: Vector, value: float, oracle: Oracle) -> tuple[Vector, Record]:
        """End the second-order phase: average from x, or from where that phase began if it fitted other batches."""
        last_norm, dim = self.second_order.state.step_norm, oracle.space.dim
        reduction = scale.first_reduction(self.state, self.settings.step, value, last_norm, dim)
        self._write(averaged=True, reduction=reduction)
        began = self._start_of_averaging(x, value, oracle)
        point, record = self._averaged_step(began, oracle)
        if began is not x:
            note = "second-order steps had fitted other batches: back to where they began"
            record = replace(record, note=record.note or note)
        return point, record

    def _start_of_averaging(self, x: Vector, value: float, oracle: Oracle) -> Vector:
        """Return where the second-order phase began, if this batch has a lower loss there; otherwise x."""
        state = self.state
        if state.safe is None or value <= state.first_loss:
            return x
        first = oracle.gradient_sample_value(state.safe)
        return state.safe if first < value or (math.isfinite(first) and not math.isfinite(value)) else x

    def _probe(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record] | None:
        """Now and then, where the loss stagnates, follow negative curvature that Lanczos finds from a random start.

        The step passes the ratio test, and is kept if curvature earns most of its predicted decrease.
        """
        state, before = self.state, self.second_order.state
        probes = oracle.has_values and self.settings.curvature and self.method.escape.needs_products
        if not probes or state.steps < _FIRST_PROBE << state.probes:
            return None
        stagnates = watch.stagnates(state)
        self._write(probes=state.probes + 1, probed_mean=state.mean)
        if not stagnates:
            return None
        start = oracle.space.normal(generator(state.seed, state.iteration, LANCZOS_START))
        point, record = self._second_order_step(x, oracle, start)
        if point is not x and record.curvature_share > 0.5:
            self._write(offset=None)
            return point, replace(record, note="the loss stagnated: a step along negative curvature")
        self.second_order.state = before
        return None

    # ------------------------------------------------------------------ the averaged phase

    def _averaged_step(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record]:
        """Make an averaged step, or return to an earlier point where the loss has risen."""
        outcome = self._return_if_risen(x, oracle)
        if outcome is None and self._metric is None:
            outcome = self._begin(x, oracle)
        if outcome is None:
            outcome = self._step(x, oracle)
        oracle.meter.paper_calls += oracle.sizes[0]
        return outcome

    def _return_if_risen(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record] | None:
        """Return to an earlier point if the loss has risen and the same batch shows that the steps caused it."""
        state = self.state
        if not oracle.has_values or not watch.rises(state):
            return None
        rise, safe = state.mean - state.best, state.safe
        self._write(mean=math.nan)  # the watch starts again whatever the cause
        if safe is None or safe is x:
            return None
        if oracle.gradient_sample_value(x) - oracle.gradient_sample_value(safe) < 0.5 * rise:
            return None
        value, g = oracle.gradient(self.gradient_point(x))
        self._write(reduction=0.5 * state.reduction)
        record = Record(state.iteration, value=value, grad_norm=oracle.norm(g), trials=2, note="the loss rose")
        return self._go_back(x, oracle, record)

    def _begin(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record] | None:
        """Create the metric: that of a resumed run, or one set up by a first gradient; return a failure to do so."""
        settings, space = self.settings, oracle.space
        metric = self.create_metric(settings.metric, oracle.shapes, space.tensor(x))
        new = self._new_parameters(oracle.shapes, space)
        if self._saved and not any(new):
            metric.restore(self._saved)
        else:
            value, g = oracle.gradient(self.gradient_point(x))
            norm = oracle.norm(g)
            if not math.isfinite(norm + (value if oracle.has_values else 0.0)):
                return self._not_finite(x, oracle, value, norm)
            unit = self.state.gradient_unit if self._saved else norm or 1.0
            metric.update(space.tensor(g) / unit, 1.0, 1.0)
            metric.refresh()
            if self._saved:
                fresh = zip(metric.save(), self._saved, new, strict=True)
                metric.restore([first if is_new else saved for first, saved, is_new in fresh])
                self._write(mean_square=self.state.mean_square * self._growth(g, norm, oracle))
            else:
                distance_vectors = {"start": x, "drift": space.zeros()} if settings.step.distance else {}
                self._write(gradient_unit=unit, **distance_vectors)
        self._metric, self._steps = metric, {}
        return None

    def _new_parameters(self, shapes: Sequence[tuple[int, ...]], space: Space) -> list[bool]:
        """Return which parameters have joined since the last step, so that the metric knows no gradient of theirs."""
        if self.state.joined is None:
            return []
        parts = torch.split_with_sizes(space.tensor(self.state.joined), [math.prod(shape) for shape in shapes])
        new = torch.stack([(part == self.state.steps).sum() for part in parts])
        return [count > 0 for count in (new if space.sum_over_ranks is None else space.sum_over_ranks(new)).tolist()]

    def _growth(self, g: Vector, norm: float, oracle: Oracle) -> float:
        """Return the factor by which new entries raise ‖g‖²."""
        assert self.state.joined is not None
        is_new = oracle.space.tensor(self.state.joined) == self.state.steps
        before = oracle.norm(oracle.space.vector(oracle.space.tensor(g).masked_fill(is_new, 0.0)))
        return (norm / before) ** 2 if before > 0.0 else 1.0

    def _step(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record]:
        """Make the step, and update the state."""
        state, space = self.state, oracle.space
        assert self._metric is not None
        x_tensor = space.tensor(x)
        rate, rates = self._rates_of_parameters(x_tensor, oracle.shapes)
        numbers = self._step_numbers(rate)
        offset, change = self._adapted_offset(x_tensor, space)
        updates_factors = self._updates_factors
        start, drift = (state.start, state.drift) if updates_factors else (None, None)
        results, point, new_offset, *new_drift = advance(
            oracle,
            self._averaged_work(updates_factors, space),
            x_tensor,
            offset,
            x_tensor.new_tensor(numbers, dtype=torch.float64),
            rates,
            None if start is None else space.tensor(start),
            None if drift is None else space.tensor(drift),
            change,
            self._average_weights(numbers.average_weight, space),
        )
        read = StepResults(*results.tolist())
        if not math.isfinite(read.value + read.grad_norm):
            return self._not_finite(x, oracle, read.value, read.grad_norm)
        if state.steps in (1, 2) and _FIRST_OUTLIER * read.grad_norm < state.gradient_unit:
            return self._start_again(x, read.value if oracle.has_values else math.nan, read.grad_norm)
        vectors = {"offset": space.vector(new_offset)} | ({"drift": space.vector(new_drift[0])} if new_drift else {})
        self._after_step(x, numbers, read, vectors, values=oracle.has_values)
        new = space.vector(point)
        if self.state.projected or self.state.written is not None:
            self._write(written=new if self.state.projected else None)
        return new, self._averaged_record(numbers, read, oracle)

    @property
    def _updates_factors(self) -> bool:
        """Whether the next step updates the factors of the metric and the distance bound."""
        return self.state.steps < watch.WARM_STEPS or self.state.steps % _FACTOR_INTERVAL == 0

    def _step_numbers(self, rate: float) -> StepNumbers:
        """Return the numbers of the next step, with `rate` as a factor of η."""
        state, memory, average = self.state, self.settings.metric.memory, self.settings.average
        usual = math.sqrt(state.mean_square) if state.steps > watch.WARM_STEPS else state.largest_norm
        point_weight = self._point_weight
        return StepNumbers(
            clip_norm=max(_OUTLIER * usual * state.gradient_unit, 1e-300) if state.steps else 1e300,
            gradient_factor=1.0 / state.gradient_unit,
            moment_weight=max(1.0 - memory, 1.0 / (state.steps + 1)),
            factor_weight=max(1.0 - memory, 1.0 / (state.factor_updates + 1)),
            eta=rate * scale.step_size(state, self.settings.step),
            average_weight=point_weight / (state.weight_sum + point_weight) if average.averaging else 1.0,
            distance_weight=scale.distance_weight(state),
        )

    @property
    def _point_weight(self) -> float:
        """The weight of the next iterate in the average, k^p."""
        weight: float = (self.state.steps + 1.0) ** self.settings.average.weighting
        return weight

    def _average_weights(self, average_weight: float, space: Space) -> Tensor | None:
        """Return c of each entry, if some have joined later than others; None if all have `average_weight`.

        The weight of the k-th iterate of an entry is (p + 1)/(k + p): for large k the same as k^p / Σ_i i^p.
        """
        state, p = self.state, self.settings.average.weighting
        if state.joined is None or not self.settings.average.averaging:
            return None
        joined = space.tensor(state.joined)
        return torch.where(joined > 0.0, (p + 1.0) / (state.steps - joined + (p + 1.0)), average_weight)

    def _after_step(
        self, x: Vector, numbers: StepNumbers, read: StepResults, vectors: Mapping[str, Vector], *, values: bool
    ) -> None:
        """Write what a step from x shows, and refresh the metric where that is due."""
        assert self._metric is not None
        state = self.state
        changes: dict[str, Any] = {"nonfinite": 0, **vectors}
        if values:
            loss_mean = watch.mean_with(state, read.value)
            is_best = math.isnan(state.mean) or loss_mean.mean <= state.best or state.safe is None
            changes |= loss_mean._asdict() | ({"safe": x} if is_best else {})
        norm = min(read.grad_norm, numbers.clip_norm) / state.gradient_unit
        changes["mean_square"] = state.mean_square + numbers.moment_weight * (norm**2 - state.mean_square)
        if state.steps <= watch.WARM_STEPS:
            changes["largest_norm"] = max(state.largest_norm, norm)
        changes |= self._norms_after(read) | self._distance_after(numbers, read)
        steps = state.steps + 1
        interval = _interval(state.refreshed - state.extended, self.settings.metric.refresh)
        is_due = steps - state.refreshed >= interval
        self._write(
            **changes,
            weight_sum=state.weight_sum + self._point_weight,
            steps=steps,
            factor_updates=state.factor_updates + self._updates_factors,
            refreshed=steps if is_due else state.refreshed,
        )
        if is_due:
            self._metric.refresh()

    def _norms_after(self, read: StepResults) -> dict[str, Any]:
        """Return the changes of the state that ‖x‖² shows: whether the caller changed x since the last step."""
        state = self.state
        changed = not abs(read.square_norm_before - state.square_norm) <= _SAME_NORM * state.square_norm
        by_caller = changed and state.steps > 0 and not math.isnan(state.square_norm)
        projected = _PROJECTION_STEPS if by_caller else max(0, state.projected - 1)
        changes: dict[str, Any] = {"square_norm": read.square_norm, "projected": projected}
        return changes | ({"mean": math.nan, "safe": None} if changed else {})  # a change by the caller is kept

    def _distance_after(self, numbers: StepNumbers, read: StepResults) -> dict[str, float]:
        """Return the changes of the distance bound; none if the step did not compute its numbers."""
        if read.direction_norm is None:
            return {}
        state = self.state
        remaining, steps = 1.0 - numbers.average_weight, 1 if state.steps < watch.WARM_STEPS else _FACTOR_INTERVAL
        path = remaining**steps * state.path + remaining * steps * numbers.eta * read.direction_norm
        return scale.distance_bound(state, path, read.offset_norm, read.along, read.drift_norm)._asdict()

    def _averaged_record(self, numbers: StepNumbers, read: StepResults, oracle: Oracle) -> Record:
        """Return the record of an averaged step."""
        state, eta = self.state, numbers.eta
        dual = max(read.dual, 0.0) * state.gradient_unit
        return Record(
            state.iteration,
            branch=Branch.AVERAGED,
            sigma=self._sigma(eta, dual, oracle.space.eps),
            grad_norm=read.grad_norm,
            step_norm=numbers.average_weight * math.sqrt(max(read.offset_square, 0.0)),
            model_decrease=2.0 / 3.0 * eta * dual,
            value=read.value if oracle.has_values else math.nan,
            note="the gradient is an outlier and was clipped" if read.grad_norm > numbers.clip_norm else "",
        )

    def _start_again(self, x: Vector, value: float, grad_norm: float) -> tuple[Vector, Record]:
        """Stay at x and drop metric and average, which an outlier has spoilt; the next gradient sets them up."""
        zeros = dict.fromkeys(("nonfinite", "steps", "factor_updates", "refreshed", "extended"), 0)
        self._write(**zeros, weight_sum=0.0, mean_square=1.0, largest_norm=1.0, offset=None, joined=None)
        self._metric, self._saved = None, ()
        note = "the first gradient was an outlier: averaging starts again"
        return x, Record(self.state.iteration, value=value, grad_norm=grad_norm, note=note)

    def _adapted_offset(self, x: Tensor, space: Space) -> tuple[Tensor | None, Tensor | None]:
        """Return z − x, and while the caller projects x, what it did to x after the last step.

        The change d of a projection points into the feasible set. An entry of the offset of the other sign would lead
        out of it again, and grow from step to step: it is set to zero. Other entries are kept.
        """
        state = self.state
        offset = None if state.offset is None else space.tensor(state.offset)
        if not state.projected or state.written is None:
            return offset, None
        change = x - space.tensor(state.written)
        return None if offset is None else torch.where(change * offset < 0.0, 0.0, offset), change

    def _averaged_work(self, updates_factors: bool, space: Space) -> AveragedStep:
        """Return the vector work of a step; while the caller projects x, gradients are taken at x itself."""
        projected = self.state.projected > 0
        if (projected, updates_factors) not in self._steps:
            assert self._metric is not None
            work = AveragedStep(self._metric, self._averaging, updates_factors, space.sum_over_ranks)
            self._steps[projected, updates_factors] = work
        return self._steps[projected, updates_factors]

    @property
    def _averaging(self) -> float:
        """β: 1 while the caller projects x, because other points than x may be infeasible."""
        return 1.0 if self.state.projected else self.settings.average.averaging

    def _sigma(self, eta: float, dual: float, eps: float) -> float:
        """Return σ = 1/(η‖s‖_M) for the record, with ‖s‖_M = η√(gᵀM⁻¹g) and `dual` = gᵀM⁻¹g.

        The σ of second-order steps is left alone.
        """
        if eta > 0.0 and dual > 0.0:
            return self.method.sigma.judge(eps).bounded(1.0 / (eta * eta * math.sqrt(dual)))
        return self.second_order.state.sigma

    def _rates_of_parameters(self, like: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[float, Tensor | None]:
        """Return the factor of η, and a vector of factors where parameters have different ones."""
        if len(set(self.rates)) <= 1:
            return (self.rates[0] if self.rates else 1.0), None
        sizes = torch.tensor([math.prod(shape) for shape in shapes], device=like.device)
        return 1.0, torch.repeat_interleave(like.new_tensor(self.rates), sizes)

    # ------------------------------------------------------------------ returning to an earlier point

    def _not_finite(self, x: Vector, oracle: Oracle, value: float, grad_norm: float) -> tuple[Vector, Record]:
        """Stay if this batch alone is not finite; return to an earlier point if others are not either."""
        value = value if oracle.has_values else math.nan
        what = "gradient" if math.isfinite(value) or not oracle.has_values else "loss"
        note = f"the {what} of the gradient sample is not finite"
        state = self._write(nonfinite=self.state.nonfinite + 1)
        self._report_nonfinite(note, value, grad_norm)
        record = Record(state.iteration, value=value, grad_norm=grad_norm, note=note)
        if state.nonfinite < 2:
            return x, record
        if state.safe is not None and oracle.has_values:
            record = replace(record, trials=1)
            # earlier batches were finite there: the data are not
            if not math.isfinite(oracle.gradient_sample_value(state.safe)):
                return x, record
        self._write(reduction=0.5 * state.reduction)
        return self._go_back(x, oracle, record)

    def _report_nonfinite(self, note: str, value: float, grad_norm: float) -> None:
        """Warn after a few consecutive batches that were skipped, and raise after many."""
        state = self.state
        if state.nonfinite == state.iteration + 1 == _START_LIMIT:  # no batch was finite so far
            raise NonFiniteStartError(
                f"{note} at the starting point, on each of {state.nonfinite} batches (loss {value!r}, gradient norm "
                f"{grad_norm!r}). Start where the loss is finite, and check the data and the initial weights."
            )
        if state.nonfinite < NONFINITE_WARNING:
            return
        text = (
            f"{note} for {state.nonfinite} consecutive batches, and no step was made on them (loss {value!r}, gradient "
            f"norm {grad_norm!r}): check the data and the model, or lower lr or the loss scale"
        )
        if state.nonfinite >= NONFINITE_LIMIT:
            raise NonFiniteError(f"{text}. Restore a checkpoint from before these batches.")
        if state.nonfinite == NONFINITE_WARNING:
            warnings.warn(f"{text}. After {NONFINITE_LIMIT} of them this is an error.", RuntimeWarning, stacklevel=2)

    def _go_back(self, x: Vector, oracle: Oracle, record: Record) -> tuple[Vector, Record]:
        """Return to the last safe point; the metric ignores the batch."""
        state = self._write(offset=None)
        if state.safe is None or state.safe is x:
            return x, record
        self.went_back = True
        note = f"{record.note}: back to the last safe point"
        return state.safe, replace(record, step_norm=oracle.space.norm(state.safe - x), note=note)

    # ------------------------------------------------------------------ where gradients are taken

    def gradient_point(self, x: Vector) -> Vector:
        """Return y for an average x."""
        offset = self.state.offset
        return x if offset is None or self.state.projected else x + offset * (1.0 - self._averaging)

    def average(self, y: Vector) -> Vector:
        """Return the average x for a y."""
        offset = self.state.offset
        return y if offset is None or self.state.projected else y - offset * (1.0 - self._averaging)

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        return numbers_of(self.state) | {"second_order": self.second_order.numbers()}

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state."""
        return vectors_of(self.state)

    def tensors(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the tensors of the metric, by parameter; none before the first averaged step."""
        return self._saved if self._metric is None else self._metric.save()

    def check(
        self,
        where: str,
        numbers: Any,
        vectors: Collection[str],
        shapes: Sequence[tuple[int, ...]] | None = None,
        tensors: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        """Refuse what `numbers`, `vectors` (given by name) and `tensors` cannot have returned.

        `shapes` are those of the parameters; without them the metric is not checked.
        """
        require_fields(where, numbers, State, ("second_order",))
        self.second_order.check(f"{where}['second_order']", numbers["second_order"], ())
        require_vector_names(where, vectors, State)
        if numbers["steps"] and not any(tensors):
            raise state_error(f"{where}['steps']", numbers["steps"], "0, since the metric is missing,")
        second_order = not numbers["averaged"] and not math.isnan(numbers["last_loss"])
        bounded = numbers["distance"] > State(0).distance or not {"start", "drift"}.isdisjoint(vectors)
        for name, needed in (("safe", second_order), ("start", bounded), ("drift", bounded)):
            if needed and name not in vectors:
                raise ArgumentError(f"{where} comes without the vector {name!r}: pass all that was saved.")
        if shapes is not None:
            check_saved(f"{where}, the metric", self.settings.metric, shapes, tensors if any(tensors) else ())

    def restore(
        self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], tensors: Sequence[Mapping[str, Tensor]] = ()
    ) -> None:
        """Continue from what `numbers`, `vectors` and `tensors` returned."""
        plain = {name: held for name, held in numbers.items() if name != "second_order"}
        self.state = State(**plain, **vectors)
        self.second_order.restore(numbers["second_order"], {})
        self._metric, self._saved = None, tensors if any(tensors) else ()

    def snapshot(self) -> Any:
        """Return everything that an iteration changes, except the content of the metric."""
        return self.state, self.second_order.state, self._metric, self._saved, self._steps

    def roll_back(self, snapshot: Any) -> None:
        """Return to a snapshot."""
        self.state, self.second_order.state, self._metric, self._saved, self._steps = snapshot

    def rearrange(
        self,
        places: Sequence[int | None],
        fitted: Callable[[Tensor | None, Tensor], Tensor],
        x: Tensor,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        """Continue with other parameters, of these shapes and with the values x.

        `places` has for each of them its place among the parameters before, or None if it was not there. `fitted`
        takes from a vector of the parameters before (None: zero) what belongs to these, and the rest from its second
        argument.
        """
        state, zeros = self.state, torch.zeros_like(x)
        fills = {"offset": zeros, "drift": zeros, "start": x, "safe": x, "written": x, "joined": zeros + state.steps}
        changes: dict[str, Any] = {name: fitted(vector, fills[name]) for name, vector in self.vectors().items()}
        saved = list(self.tensors()) if state.steps else []
        if saved and None in places:
            joined = fitted(self.vectors().get("joined"), fills["joined"]).clamp(min=_LOST_AGE * state.steps)
            changes |= {"joined": joined, "extended": state.steps}
            blank = self.create_metric(self.settings.metric, shapes, x).save()
            saved = [new if place is None else saved[place] for place, new in zip(places, blank, strict=True)]
        elif saved:
            saved = [saved[place] for place in places if place is not None]
        self._write(**changes, square_norm=math.nan)
        self.second_order.reset()
        self._metric, self._saved, self._steps = None, saved, {}

    def reset(self) -> None:
        """Start again with vectors of another length; the counts stay."""
        state = self.state
        self.state = State(state.seed, state.iteration, state.seconds, state.averaged)
        self.second_order.reset()
        self._metric, self._saved = None, ()


def _create(metric: Metric, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Preconditioner:
    """Create a preconditioner on one process."""
    return metric.create(shapes, like)
