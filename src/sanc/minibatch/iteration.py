"""The iteration for mini-batches.

As long as the next batch agrees with what a step gained on its own, a batch is as good as the objective: steps are
those of `sanc.core.iteration`, cubic, judged, with escapes along negative curvature. Where batches differ more than
that, the ratio of two noisy numbers says little, and Hessian products earn less than they cost. From there on

* the step minimises gᵀs + (σ/3)‖s‖³_M in a metric M that is learnt from the gradients (`sanc.minibatch.metric`),
* with σ such that the step has a length that is natural in M (`sanc.minibatch.scale`),
* and the parameters are a running average of the points it leads to (`sanc.minibatch.averaging`).

Where the loss stands still, a Krylov space is built and negative curvature that it shows is followed, by one judged
step; where the loss has risen far the run goes back to a safe point with a shorter scale (`sanc.minibatch.watch`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sanc.core.family import Method
from sanc.core.iterate import LANCZOS_START, generator
from sanc.core.iteration import Iteration
from sanc.core.judge import Judge
from sanc.core.oracle import Oracle
from sanc.core.record import Branch, Record
from sanc.core.saved import numbers_of, refuse, require_fields, require_vector_names, vectors_of
from sanc.core.settings import Settings
from sanc.core.space import Vector
from sanc.errors import ArgumentError, NonFiniteStartError
from sanc.minibatch import watch
from sanc.minibatch.averaging import AveragedStep
from sanc.minibatch.metric import Metric
from sanc.minibatch.scale import learn_distance, natural_length, scale, shrink, typical_weight, unit_of_length, weight
from sanc.minibatch.state import State

KRYLOV_DIM = 5
"""Dimension of the Krylov space where the settings leave it open: a sampled Hessian deserves no more."""

_LEARN = 5
"""Steps, after the first ones, of which one teaches the factors of the metric and the distance."""
_FIRST_LOOK = 100
"""The averaged step at which it is first looked for negative curvature; each look is twice as late."""
_OUTLIER = 5.0
"""A gradient this much longer than usual is cut to that, so that one bad batch teaches little."""
_SAME = 1e-5
"""Relative difference of ‖x‖² that rounding may make."""


def _gap(renewed: int, renew: int) -> int:
    """Return after how many steps the eigenbases are renewed: few at first, more as gradients change less."""
    return min(max(renewed, 1), renew) if renewed < 4 * renew else renewed // 4


class MinibatchIteration:
    """The iteration of an adaptive method on samples.

    Parameters
    ----------
    method : Method
        SANC; or SCR, which does not look for negative curvature where the loss stands still.
    settings : Settings
        Numbers and rules; `minibatch` is not None.
    seed : int
        Seed of the random starts and signs.

    Attributes
    ----------
    at_rest : bool
        Always false: with samples nothing ends a run but its limits.
    went_back : bool
        Whether the last iteration returned to an earlier point.
    rates : sequence of float
        Factors of the scale, one for each parameter; empty: 1.
    new_metric : callable
        Makes a metric as `Metric` does.
    """

    at_rest = False

    def __init__(self, method: Method, settings: Settings, seed: int) -> None:
        assert settings.minibatch is not None
        self.method, self.settings, self.own = method, settings, settings.minibatch
        judged = replace(settings, krylov_dim=settings.krylov_dim or KRYLOV_DIM)
        self.judged = Iteration(method, judged, seed, one_sample=True)
        self.state = State(seed, noisy=not self.own.curvature)
        self.went_back = False
        self.rates: Sequence[float] = ()
        self.new_metric: Callable[..., Metric] = Metric
        self._work: tuple[AveragedStep, AveragedStep] | None = None
        self._squares: Vector | None = None  # the metric of a run that is resumed, until there is work again
        self._factors: Sequence[Mapping[str, Tensor]] = ()
        self._floors: Sequence[float] = ()

    def iterate(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]:
        """Make one iteration from `x`: the next point, which is `x` itself where it stayed, and the record."""
        clock, before, judged = time.perf_counter(), self.state, self.judged.state
        self.state = state = replace(before)  # whoever holds the one before can go back to it
        self.went_back = False
        try:
            point, record = self._advance(x, oracle)
        except BaseException:
            self.state, self.judged.state = before, judged
            raise
        state.iteration += 1
        state.seconds += time.perf_counter() - clock
        record.calls, record.seconds, record.hvp = oracle.meter.snapshot(), state.seconds, oracle.hvp
        return point, record

    def _advance(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record]:
        """Make a step that is judged or, from where batches differ by more than steps gain (`noisy`), averaged."""
        state = self.state
        state.noisy = state.noisy or not oracle.values
        oracle.begin(state.iteration, products=not state.noisy)
        if state.length == 0.0:
            self._find_unit(x, oracle)
        if not state.noisy:
            value, _ = oracle.gradient(x)
            if watch.judged_on(state, x, value, self.own, oracle.space.eps):
                return self._judged_step(x, oracle)
            state.noisy = True
            shrink(state, self.own, value, self.judged.state.reach, oracle.space.dim)
            began = self._unmisled(x, value, oracle)
            if began is not x:
                point, record = self._averaged_step(began, oracle)
                record.note = record.note or "judged steps had fitted other batches: back to where they began"
                return point, record
        elif (found := self._look(x, oracle)) is not None:
            return found
        return self._averaged_step(x, oracle)

    def _find_unit(self, x: Vector, oracle: Oracle) -> None:
        """Find the length in which steps are measured, at the first point."""
        space, value, slope = oracle.space, math.nan, math.nan
        if oracle.values:
            value, g = oracle.gradient(x)
            total = space.tensor(g).abs().sum(dtype=torch.float64)
            slope = float(total if space.total is None else space.total(total))
        typical = typical_weight(space.tensor(x), oracle.shapes, space.total)
        self.state.length = unit_of_length(typical, value, slope)

    # ------------------------------------------------------------------ steps that are judged on their batch

    def _judged_step(self, x: Vector, oracle: Oracle, start: Vector | None = None) -> tuple[Vector, Record]:
        """Make an iteration as if the batch were the objective, and remember what it gained."""
        state = self.state
        self.judged.state = replace(self.judged.state, iteration=state.iteration)
        point, record = self.judged.iterate(x, oracle, start)
        moved = point is not x
        state.reached = record.trial_value if moved else record.value
        state.gained = record.value - record.trial_value if moved else 0.0
        state.far = record.step_norm > natural_length(state, self.own, oracle.space.dim)
        return point, record

    def _unmisled(self, x: Vector, value: float, oracle: Oracle) -> Vector:
        """Return where judged steps began, if they fitted batches that say little of this one; or else x."""
        state = self.state
        if state.safe is None or value <= state.entry:
            return x
        before = oracle.trial(state.safe)
        return state.safe if before < value or (math.isfinite(before) and not math.isfinite(value)) else x

    def _look(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record] | None:
        """Now and then, where the loss stands still, follow negative curvature if a random start of Lanczos shows it.

        A judged step is made from that start, and kept where it owes to curvature most of what it promised.
        """
        state, before = self.state, self.judged.state
        looks = oracle.values and self.own.curvature and self.method.escapes
        if not looks or state.steps < _FIRST_LOOK << state.looks:
            return None
        state.looks += 1
        if not watch.stands_still(state):
            return None
        point, record = self._judged_step(x, oracle, oracle.space.normal(generator(state, LANCZOS_START)))
        if point is not x and record.curvature_share > 0.5:
            record.note = "the loss stood still: a step along negative curvature"
            state.offset = None
            return point, record
        self.judged.state = before
        return None

    # ------------------------------------------------------------------ averaged steps in the metric

    def _averaged_step(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record]:
        """Make a step that is averaged, and count what it cost in the paper's measure."""
        record = Record(self.state.iteration)
        point = self._averaged_point(x, oracle, record)
        oracle.meter.paper_calls += oracle.sizes[0]
        return point, record

    def _averaged_point(self, x: Vector, oracle: Oracle, record: Record) -> Vector:
        """Take the gradient between z and x, step from z, and average; or go back, where the loss has risen."""
        state = self.state
        if oracle.values and watch.goes_wrong(state):
            rise, state.mean = state.mean - state.best, math.nan  # whoever is to blame, it is watched anew
            if self._worse_than_before(x, oracle, record, rise):
                record.value, g = oracle.gradient(self.gradient_point(x))
                record.grad_norm = oracle.norm(g)
                state.shrink *= 0.5
                record.note = "the loss rose"
                return self._go_back(x, oracle, record)
        if self._work is None and not self._begin(x, oracle, record):
            return self._not_finite(x, oracle, record)
        return self._step(x, oracle, record)

    def _begin(self, x: Vector, oracle: Oracle, record: Record) -> bool:
        """Make the metric: that of a run that is resumed, or set up by a first gradient, if that is finite."""
        state, own, space = self.state, self.own, oracle.space
        metric = self.new_metric(oracle.shapes, own.metric, space.tensor(x), own.largest_side)
        if self._squares is not None:
            metric.restore(space.tensor(self._squares), self._factors, self._floors)
        else:
            record.value, g = oracle.gradient(x)
            record.grad_norm = oracle.norm(g)
            if not math.isfinite(record.grad_norm + (record.value if oracle.values else 0.0)):
                return False
            state.unit = record.grad_norm or 1.0
            if own.distance:
                state.start, state.drift = x, space.zeros()
            metric.begin(space.tensor(g) / state.unit)
        plain, learning = (AveragedStep(metric, own.averaging, learns, space.total) for learns in (False, True))
        self._work = plain, learning
        self._space = space
        return True

    def _step(self, x: Vector, oracle: Oracle, record: Record) -> Vector:
        """Make the step, and keep the books."""
        state, own, space = self.state, self.own, oracle.space
        assert self._work is not None
        weights = [max(1.0 - own.memory, 1.0 / (count + 1)) for count in (state.steps, state.learnt)]
        usual = math.sqrt(state.size) * state.unit
        longest = max(_OUTLIER * usual, 1e-300) if state.steps > watch.YOUNG else 1e300
        late = float(state.steps + 1) ** own.weighting
        share = late / (state.weights + late) if own.averaging else 1.0
        here = space.tensor(x)
        factor, rates = self._factors_of_scale(here, oracle.shapes)
        eta = factor * scale(state, own)
        learns = state.steps < watch.YOUNG or state.steps % _LEARN == 0
        work = self._work[learns]
        numbers = here.new_tensor([longest, 1.0 / state.unit, *weights, eta, share, weight(state)], dtype=torch.float64)
        vectors = (state.offset, *((state.start, state.drift) if learns else (None, None)))
        offset, *bound_from = (None if v is None else space.tensor(v) for v in vectors)
        read, point, beyond, *drift = oracle.advance(work, here, offset, numbers, rates, *bound_from)
        value, record.grad_norm, dual, away, *more = read.tolist()
        record.value = value if oracle.values else math.nan
        if not math.isfinite(value + record.grad_norm):
            return self._not_finite(x, oracle, record)
        state.broken = 0
        if oracle.values:
            watch.watch_loss(state, x, value)
        cut = longest / max(longest, record.grad_norm)
        if cut < 1.0:
            record.note = "the gradient is an outlier and was cut"
        state.size += weights[0] * ((cut * record.grad_norm / state.unit) ** 2 - state.size)
        state.offset = space.vector(beyond)
        state.drift = space.vector(drift[0]) if drift else state.drift
        self._learn(more, eta, share)
        state.weights += late
        state.steps, state.learnt = state.steps + 1, state.learnt + learns
        if state.steps - state.renewed >= _gap(state.renewed, own.renew):
            state.renewed = state.steps
            work.metric.renew()
        self._tell(record, eta, max(dual, 0.0) * state.unit, share * math.sqrt(max(away, 0.0)), space.eps)
        return space.vector(point)

    def _learn(self, read: Sequence[float], eta: float, share: float) -> None:
        """Learn from ‖x‖² before and after the step and, where they were measured, from the numbers of the distance."""
        state, expected = self.state, self.state.square
        found, state.square, *bound = read
        if not abs(found - expected) <= _SAME * expected:  # somebody else moved the parameters: that is not undone
            state.mean, state.safe = math.nan, None
        if bound:
            direction, state.beyond, along, drift_norm = bound
            many = 1 if state.steps < watch.YOUNG else _LEARN
            state.path = (1.0 - share) ** many * state.path + (1.0 - share) * many * eta * direction
            learn_distance(state, along, drift_norm)

    def _tell(self, record: Record, eta: float, dual: float, step_norm: float, eps: float) -> None:
        """Write the record: with ‖s‖_M = η√(gᵀM⁻¹g), where `dual` is gᵀM⁻¹g, σ is such that σ‖s‖_M = 1/η.

        The σ of judged steps stays as it is.
        """
        judge = Judge(self.settings, eps, self.judged.state.sigma)
        if eta > 0.0 and dual > 0.0:
            judge.move(1.0 / (eta * eta * math.sqrt(dual)))
        record.sigma, record.model_decrease = judge.sigma, 2.0 / 3.0 * eta * dual
        record.branch, record.step_norm = Branch.UNTESTED, step_norm

    def _factors_of_scale(self, like: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[float, Tensor | None]:
        """Return the factor of the scale, and a vector of more where parameters have different ones."""
        if len(set(self.rates)) <= 1:
            return (self.rates[0] if self.rates else 1.0), None
        sizes = torch.tensor([math.prod(shape) for shape in shapes], device=like.device)
        return 1.0, torch.repeat_interleave(like.new_tensor(self.rates), sizes)

    # ------------------------------------------------------------------ going back

    def _not_finite(self, x: Vector, oracle: Oracle, record: Record) -> Vector:
        """Stay: the batch may be to blame; where it is not the only one, go back."""
        state = self.state
        what = "gradient" if math.isfinite(record.value) or not oracle.values else "loss"
        record.note = f"the {what} of the gradient sample is not finite"
        if state.iteration == 0 and oracle.values:
            raise NonFiniteStartError(
                f"{record.note} at the starting point (loss {record.value!r}, gradient norm {record.grad_norm!r})."
                " Start where the loss is finite, and check the data and the initial weights."
            )
        state.broken += 1
        if state.broken < 2 or self._batch_is_broken(oracle, record):
            return x
        state.shrink *= 0.5
        return self._go_back(x, oracle, record)

    def _batch_is_broken(self, oracle: Oracle, record: Record) -> bool:
        """Whether the loss of this batch is not finite where earlier ones were, so that the data are to blame."""
        if self.state.safe is None or not oracle.values:
            return False
        record.trials += 1
        return not math.isfinite(oracle.trial(self.state.safe))

    def _worse_than_before(self, x: Vector, oracle: Oracle, record: Record, rise: float) -> bool:
        """Whether the last steps made the loss high, and not the data: the same batch tells, at both points."""
        safe = self.state.safe
        if safe is None or safe is x:
            return False
        record.trials += 2
        return not oracle.trial(x) - oracle.trial(safe) < 0.5 * rise

    def _go_back(self, x: Vector, oracle: Oracle, record: Record) -> Vector:
        """Return to the last safe point; what the batch said of the bad one is not learnt."""
        state = self.state
        state.offset = None
        if state.safe is None or state.safe is x:
            return x
        record.step_norm = oracle.space.norm(state.safe - x)
        record.note += ": back to the last safe point"
        self.went_back = True
        return state.safe

    # ------------------------------------------------------------------ where gradients are taken

    def gradient_point(self, x: Vector) -> Vector:
        """Return y for an average x."""
        offset = self.state.offset
        return x if offset is None else x + offset * (1.0 - self.own.averaging)

    def average(self, y: Vector) -> Vector:
        """Return the average x for a y."""
        offset = self.state.offset
        return y if offset is None else y - offset * (1.0 - self.own.averaging)

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        floors = self._floors if self._work is None else self._work[0].metric.floors()
        return numbers_of(self.state) | {"judged": self.judged.numbers(), "floors": list(floors)}

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state, and the metric's second moments."""
        if self._work is not None:
            self._squares = self._space.vector(self._work[0].metric.squares())
        return vectors_of(self.state) | ({} if self._squares is None else {"squares": self._squares})

    def factors(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the rest of the metric: for every parameter the tensors that turn its basis."""
        return self._factors if self._work is None else self._work[0].metric.factors()

    def check(
        self,
        where: str,
        numbers: Any,
        vectors: Collection[str],
        shapes: Sequence[tuple[int, ...]] | None,
        factors: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        """Refuse what `numbers`, `vectors` (of which the names are asked) and `factors` cannot have returned.

        `shapes` are those of the parameters that the vectors belong to; without them the metric is not looked at.
        """
        require_fields(where, numbers, State, ("judged", "floors"))
        self.judged.check(f"{where}['judged']", numbers["judged"], ())
        require_vector_names(where, vectors, State, {"squares"})
        known = "squares" in vectors
        if numbers["steps"] and not known:
            raise refuse(f"{where}['steps']", numbers["steps"], "0, since the metric is missing,")
        judged = not numbers["noisy"] and not math.isnan(numbers["reached"])
        for name, needed in (("safe", judged), ("start", "drift" in vectors), ("drift", "start" in vectors)):
            if needed and name not in vectors:
                raise ArgumentError(f"{where} comes without the vector {name!r}: pass all that was saved.")
        if shapes is not None:
            metric = Metric(shapes, self.own.metric, torch.empty(0, device="meta"), self.own.largest_side)
            metric.check(f"{where}['floors']", numbers["floors"], factors, known=known)

    def restore(
        self, numbers: Mapping[str, Any], vectors: Mapping[str, Any], factors: Sequence[Mapping[str, Tensor]] = ()
    ) -> None:
        """Go on from what `numbers`, `vectors` and `factors` returned."""
        self.state = State(**{name: held for name, held in {**numbers, **vectors}.items() if name in State.__slots__})
        self.judged.restore(numbers["judged"], {})
        self._work, self._floors = None, numbers["floors"]
        self._squares, self._factors = vectors.get("squares"), factors

    def forget(self) -> None:
        """Begin anew with vectors of another length; the counts stay."""
        state = self.state
        self.state = State(state.seed, state.iteration, state.seconds, state.noisy)
        self.judged.forget()
        self._work, self._squares, self._factors, self._floors = None, None, (), ()
