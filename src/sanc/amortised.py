"""The iteration for mini-batches: one Krylov space serves many steps, and the next batch judges the last ones.

With samples, a Krylov space in every step costs more than it earns, a step that is confined to it throws most of the
gradient away, and the ratio of two noisy numbers says little. This engine keeps the idea, a cubic model in a Krylov
space that is judged and whose negative curvature is not wasted, and changes what noise asks for:

* the space is built once in `refresh` steps; outside of it the model has no curvature, so the step is not confined;
* the gradient is a moving average, and the norm that of a diagonal metric, a power of the gradient's mean square;
* σ follows the slope that the *next* batch, which knows nothing of them, sees along the last steps;
* now and then a step is judged on its own batch, with that batch's own gradient on both sides of the ratio;
* where the loss jumps the run goes back to the last safe point.

A run begins with a few steps that need none of this: as long as a step gains more than two batches differ, it is judged
on its batch alone, σ is interpolated, and a Krylov space is built wherever it earns its products.

Like the other engine it knows vectors only through a `Space` and the objective only through an `Oracle`, its random
draws are functions of (seed, iteration), and its whole state is one object of numbers and vectors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from sanc import cubic
from sanc.errors import NonFiniteStartError
from sanc.judge import ratio
from sanc.krylov import Krylov, NonFiniteProductError
from sanc.lanczos import Recorded
from sanc.oracles.base import Oracle
from sanc.record import Branch, Record
from sanc.settings import Method, Settings
from sanc.survey import Look, Memory, Move, Survey, vector_of
from sanc.vectors import Floats, Vector

_START, _HARD = 2, 3  # which random draw of an iteration

KRYLOV_DIM = 5
"""Dimension of the Krylov space where the settings leave it open: a sampled Hessian deserves no more."""

_SLOPE_MEMORY = 0.9  # of the mean of the slopes that judge the steps …
_SCALE_MEMORY = 0.99  # … and of their mean square
_CURVATURE_MEMORY = 0.8
_LOSS_MEMORY = 0.95
_MISSED_MEMORY = 0.7
_FORGET_BEST = 0.01
_SAFE_EVERY = 5
_GROWTH = 0.3  # steps grow this much slower than they shrink: the moving average answers late
_BOOST = 1.5
_CEILING = 1e8  # of σ: what lies above is noise
_SAFE_LENGTH = 1e30  # of a step that cannot overflow in float32, whose length need not be looked at
_JUMP = 5.0
"""A batch whose loss lies this many standard deviations (and a fiftieth) above the best mean is a jump."""


@dataclass(slots=True)
class AmortisedState:
    """All that the engine carries from one iteration to the next; changed within an iteration only."""

    seed: int
    iteration: int = 0
    sigma: float = 1.0
    seconds: float = 0.0
    settled: int = -1  # iteration at which noise took over; −1 before
    averaged: int = 0  # gradients in the mean
    squared: int = 0  # gradients in the mean square
    refreshed: int = -1  # iteration of the last Krylov space; −1 before the first
    worth: bool = False  # whether that space earned its products
    gained: float = math.nan  # decrease of the last step on its own batch …
    reached: float = math.nan  # … and the loss it reached there
    missed: float = 0.0  # how often the next batch said otherwise
    slope: float = 0.0
    slope_square: float = 0.0
    slopes: int = 0
    lean: float = 0.0  # from −1, steps should be longer, to 1, they should be shorter
    curvature: float = math.nan  # along recent steps, as values showed it
    loss: float = math.nan
    loss_variance: float = 0.0
    best: float = math.nan  # lowest mean loss, slowly forgotten
    stretch: float = 1.0  # largest entry of `scale`
    momentum: Vector | None = None
    square: Vector | None = None
    scale: Vector | None = None  # M^(−1/2)
    path: Vector | None = None  # the last steps, weighted like the gradients in the mean
    safe: Vector | None = None
    basis: Any = None
    ritz: Floats | None = None
    ritz_vectors: Floats | None = None


_VECTORS = ("momentum", "square", "scale", "path", "safe", "basis")
_SMALL = ("ritz", "ritz_vectors")


@dataclass(frozen=True, slots=True)
class _Mean:
    """The mean gradient in the coordinates of the metric, before it is divided by its bias.

    Attributes
    ----------
    vector : Vector
        M^(−1/2) times the moving average.
    bias : float
        What the average has to be divided by.
    inside : ndarray
        Its inner products with the basis.
    square : float
        Its squared length.
    """

    vector: Vector
    bias: float
    inside: Floats
    square: float

    @property
    def linear(self) -> Floats:
        """The linear term of the model: the parts in the basis, and the length of what is outside."""
        outside = math.sqrt(max(self.square - float(self.inside @ self.inside), 0.0))
        return np.append(self.inside, outside) / self.bias


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the model and what the model says of it."""

    move: Move | None = None
    norm: float = 0.0  # in the metric
    decrease: float = 0.0
    bend: float = 0.0  # sᵀBs
    curvature_share: float = 0.0  # of the decrease, earned along negative curvature


class AmortisedEngine:
    """The iteration of an adaptive method on samples.

    Parameters
    ----------
    method : Method
        SANC; or SCR, which stays where its cubic step was rejected.
    settings : Settings
        Numbers and rules; `refresh` is positive.
    seed : int
        Seed of the random starts and signs.

    Attributes
    ----------
    at_rest : bool
        Always false: with samples nothing ends a run but its limits.
    went_back : bool
        Whether the last iteration returned to an earlier point.
    """

    def __init__(self, method: Method, settings: Settings, seed: int) -> None:
        self.method = method
        self.settings = settings
        self.state = AmortisedState(seed=seed, sigma=settings.sigma0)
        self.at_rest = False
        self.went_back = False
        self._before = self.state  # what this iteration began with
        self._last: Vector | None = None  # where the last iteration ended

    # ------------------------------------------------------------------ the iteration

    def iterate(self, x: Vector, oracle: Oracle) -> tuple[Vector, Record]:
        """Make one iteration from `x`: the next point, which is `x` itself where it stayed, and the record."""
        clock = time.perf_counter()
        before = self._before = self.state  # which is never changed: whoever holds it can go back to it
        self.state = replace(before)
        self.went_back = False
        try:
            point, entries = self._advance(x, oracle)
        except BaseException:
            self.state = before
            raise
        self._before = self.state
        seconds = before.seconds + time.perf_counter() - clock
        state = self.state
        self._set(iteration=before.iteration + 1, seconds=seconds)
        if state.momentum is not None:
            self._set(momentum=oracle.keep(state.momentum))
        if state.square is not None:
            self._set(square=oracle.keep(state.square))
        self._last = oracle.keep(point)
        calls = oracle.meter.snapshot()
        return point, Record(iteration=before.iteration, calls=calls, seconds=seconds, hvp=oracle.hvp, **entries)

    def _advance(self, x: Vector, oracle: Oracle) -> tuple[Vector, dict[str, Any]]:
        refresh = self._due()
        oracle.begin(self.state.iteration, products=refresh)
        ready = self.state.settled >= 0 and (self.state.scale is not None or not self.settings.metric)
        seen = oracle.survey(x, self.memory(project=ready and not refresh))
        oracle.meter.paper_calls += oracle.sizes[0]
        value, grad_norm = seen.value, seen.grad_norm
        entries: dict[str, Any] = {
            "branch": Branch.STAYED,
            "rho": math.nan,
            "sigma": self.state.sigma,
            "grad_norm": grad_norm,
            "ritz_value": math.nan,
            "step_norm": 0.0,
            "model_decrease": math.nan,
            "value": value,
            "trial_value": math.nan,
            "krylov_dim": 0,
            "trials": 0,
            "curvature_share": math.nan,
            "note": "",
        }
        if not (math.isfinite(value) and math.isfinite(grad_norm)):
            what = "gradient" if math.isfinite(value) else "loss"
            entries["note"] = f"the {what} of the gradient sample is not finite"
            if self.state.iteration == 0:
                raise NonFiniteStartError(
                    f"{entries['note']} at the starting point (loss {value!r}, gradient norm {grad_norm!r}). "
                    "Start where the loss is finite, and check the data and the initial weights."
                )
            return self._go_back(x, oracle, entries), entries
        if value > self._ceiling() and self._worse_than_before(x, value, oracle, entries):
            entries["note"] = "the loss jumped"
            return self._go_back(x, oracle, entries), entries
        self._settle(value)
        self._follow_slopes(seen)
        self._watch_loss(x, value, oracle)
        self._average(seen, oracle)
        model = None if seen.look.mean is None else _Mean(seen.look.mean, self._bias(), seen.inside, seen.mean_square)
        fresh = False
        if model is None:
            self._measure(oracle)
        look, building = seen.look, refresh or grad_norm == 0.0
        light = building and oracle.lends
        if light:
            del seen
            look = self._lighten(x, look, oracle)
        if building:
            model = self._build(x, look.gradient, oracle, entries)
            fresh = model is not None
        if model is None:
            model = self._project(look.gradient, oracle)
        point = self._move(x, look, oracle, model, fresh, entries)
        if light:
            del model
            self._make_means(look.gradient, oracle)
        return point, entries

    def memory(self, *, project: bool) -> Memory:
        """Return what the next batch is to be compared with."""
        state, s = self.state, self.settings
        averaging = s.averaging if state.settled >= 0 else None
        metric_averaging = s.metric_averaging if s.metric else None
        vectors = (state.momentum, state.square, state.scale, state.path, state.basis)
        return Memory(averaging, metric_averaging, project, *vectors)

    def _set(self, **changes: Any) -> None:
        """Change entries of the state of this iteration."""
        for name, value in changes.items():
            setattr(self.state, name, value)

    def _due(self) -> bool:
        """Whether a new Krylov space is due."""
        state, refresh = self.state, self.settings.refresh
        k, last = state.iteration, state.refreshed
        if state.settled < 0:
            return k >= 1 and (last < 0 or state.worth or k - last >= refresh)
        return last <= state.settled or k - last >= refresh

    # ------------------------------------------------------------------ what a batch teaches

    def _settle(self, value: float) -> None:
        """End the first phase where two batches differ by more than a step gains, or after `warm_up` steps."""
        state = self.state
        if state.settled >= 0:
            return
        missed = state.missed
        if not math.isnan(state.reached):
            missed = _MISSED_MEMORY * missed + (1 - _MISSED_MEMORY) * (abs(value - state.reached) > state.gained)
        over = missed > 0.6 or state.iteration >= self.settings.warm_up
        self._set(missed=missed, settled=state.iteration if over else -1)

    def _follow_slopes(self, seen: Survey) -> None:
        """Move σ by the slope that this batch sees at the end of the last steps.

        On a quadratic that slope is 0 where the steps were the best for the value now, and half their curvature where
        nothing is gained any more. `margin` says where between the two σ rests.
        """
        state, s = self.state, self.settings
        if state.path is None:
            return
        end = seen.slope
        if not math.isnan(state.curvature):
            end -= 0.5 * s.margin * state.curvature * seen.path_square
        count = state.slopes + 1
        slope = _SLOPE_MEMORY * state.slope + (1 - _SLOPE_MEMORY) * end
        square = _SCALE_MEMORY * state.slope_square + (1 - _SCALE_MEMORY) * end * end
        size = math.sqrt(square / (1 - _SCALE_MEMORY**count))
        if not (size > 0.0 and math.isfinite(size)):
            return
        lean = max(-1.0, min(1.0, slope / (1 - _SLOPE_MEMORY**count) / size))
        rate = s.sigma_rate if lean > 0.0 else _GROWTH * s.sigma_rate
        sigma = self._bounded(state.sigma * math.exp(2.0 * rate * lean))
        self._set(slope=slope, slope_square=square, slopes=count, lean=lean, sigma=sigma)

    def _watch_loss(self, x: Vector, value: float, oracle: Oracle) -> None:
        """Keep mean and spread of the loss, the best mean, and a point to go back to."""
        state = self.state
        if math.isnan(state.loss):
            loss, variance = value, 0.0
        else:
            weight = 0.5 if state.settled < 0 else max(1 - _LOSS_MEMORY, 1.0 / (state.averaged + 2))
            off = value - state.loss
            loss = state.loss + weight * off
            variance = min((1 - weight) * (state.loss_variance + weight * off * off), 1e300)
        best = loss if math.isnan(state.best) or state.settled == state.iteration else state.best
        best = min(loss, best + _FORGET_BEST * (loss - best))
        rising = loss - best > math.sqrt(variance) + 0.01 * abs(best)
        safe = state.safe
        if safe is None or (state.iteration % _SAFE_EVERY == 0 and not rising):
            safe = oracle.keep(x)
        self._set(loss=loss, loss_variance=variance, best=best, safe=safe)

    def _ceiling(self) -> float:
        """Return the loss above which a batch is taken for the sign of a bad step."""
        state = self.state
        if state.settled < 0:
            return math.inf
        return state.best + _JUMP * math.sqrt(state.loss_variance) + 0.02 * abs(state.best)

    def _worse_than_before(self, x: Vector, value: float, oracle: Oracle, entries: dict[str, Any]) -> bool:
        """Whether it is the last steps that made the loss of this batch high, and not the batch.

        The same batch tells, at the last safe point. Where somebody else moved the parameters there is none any more.
        """
        if self._last is not None and oracle.space.norm(self._last - x) > 0.0:
            self._set(safe=oracle.keep(x))
            return False
        safe = self.state.safe
        if safe is None or safe is x:
            return False
        entries["trials"] += 1
        return value - oracle.trial(safe) > 0.5 * (value - self.state.best)

    def _go_back(self, x: Vector, oracle: Oracle, entries: dict[str, Any]) -> Vector:
        """Return to the last safe point with a larger σ; what the batch said of the bad point is not learnt."""
        state = self.state
        moved = 0.0 if state.safe is None else oracle.space.norm(state.safe - x)
        if moved == 0.0:  # it was no step of ours
            return x
        sigma = self._bounded(self.settings.gamma**2 * state.sigma)
        self._set(sigma=sigma, path=None, reached=math.nan)
        entries["step_norm"] = moved
        entries["note"] += ": back to the last safe point"
        self.went_back = True
        return state.safe

    def _average(self, seen: Survey, oracle: Oracle) -> None:
        """Bring the means of the gradient and of its square up to date; there is no mean before noise took over."""
        state, look = self.state, seen.look
        if state.settled >= 0:
            momentum = look.momentum
            if momentum is None:  # this is the batch that ended the first phase
                momentum = oracle.space.blend(None, look.gradient, self.settings.averaging)
            self._set(momentum=momentum, averaged=state.averaged + 1)
        if look.square is not None:
            self._set(square=look.square, squared=state.squared + 1)

    def _measure(self, oracle: Oracle) -> None:
        """Set the metric: M is the root of the gradient's mean square to the power `metric`."""
        state, s, space = self.state, self.settings, oracle.space
        if state.square is None:
            return
        root = (state.square / (1 - s.metric_averaging**state.squared)) ** 0.5
        typical = space.norm(root) / math.sqrt(space.dim)
        if typical > 0.0 and math.isfinite(typical):
            scale = (root + 1e-6 * typical) ** (-0.5 * s.metric)
            self._set(scale=scale, stretch=space.largest(scale))

    def _lighten(self, x: Vector, look: Look, oracle: Oracle) -> Look:
        """Let go of what can be made again, because a Krylov space is to be built beside the one before.

        `x` stands for the end of the last iteration too, where nobody else moved the parameters since, and the means
        follow from those before and the gradient.
        """
        if self._last is not None and oracle.space.norm(self._last - x) == 0.0:
            self._last = x
        self._set(momentum=None, square=None)
        return Look(look.gradient, None, None, None)

    def _momentum(self, g: Vector, oracle: Oracle) -> Vector:
        """Return the mean gradient, made again where it was let go."""
        momentum = self.state.momentum
        return oracle.space.blend(self._before.momentum, g, self.settings.averaging) if momentum is None else momentum

    def _make_means(self, g: Vector, oracle: Oracle) -> None:
        """Make the means again that were let go."""
        if self.state.squared > self._before.squared:
            self._set(square=oracle.space.blend(self._before.square, g * g, self.settings.metric_averaging))
        if self.state.averaged:
            self._set(momentum=self._momentum(g, oracle))

    def _bias(self) -> float:
        """Return what the mean gradient has to be divided by."""
        state = self.state
        return 1.0 if state.averaged == 0 else 1.0 - self.settings.averaging**state.averaged

    def _mean(self, g: Vector, oracle: Oracle) -> Vector:
        """Return the mean gradient in the coordinates of the metric; that of this batch where there is no mean yet."""
        mean = g if self.state.averaged == 0 else self._momentum(g, oracle)
        return mean if self.state.scale is None else mean * self.state.scale

    def _project(self, g: Vector, oracle: Oracle) -> _Mean:
        """Bring the mean gradient into the coordinates of the metric and of the basis."""
        state, space = self.state, oracle.space
        mean = self._mean(g, oracle)
        parts = [space.inner(mean, mean)] + ([] if state.basis is None else [space.products(state.basis, mean)])
        square, *inside = space.read(space.gather(parts))
        return _Mean(mean, self._bias(), np.array(inside, np.float64), square)

    # ------------------------------------------------------------------ the model

    def _build(self, x: Vector, g: Vector, oracle: Oracle, entries: dict[str, Any]) -> _Mean | None:
        """Build a new Krylov space of M^(−1/2) B M^(−1/2) and start it at the mean; None where that is not possible.

        The old one stays beside it, since a failure leads back there.
        """
        state, space = self.state, oracle.space
        start = [self._mean(g, oracle)]
        zero = space.norm(start[0]) == 0.0
        if zero:
            start = [space.normal(self._random(_START))]
        try:
            krylov = self._lanczos(x, start, oracle)
        except NonFiniteProductError as problem:
            entries["note"] = str(problem)
            return None
        diagonal, off_diagonal = krylov.tridiagonal()
        eigen = cubic.spectrum(diagonal, off_diagonal)
        entries |= {"krylov_dim": krylov.dim, "ritz_value": eigen.leftmost}
        # The first vector alone is what a gradient step of the best length would earn, for one evaluation.
        bias = self._bias()
        linear = krylov.linear / bias
        alone = cubic.minimise(cubic.spectrum(diagonal[:1], off_diagonal[:0]), linear[:1], state.sigma)
        whole = cubic.minimise(eigen, linear, state.sigma)
        self._set(
            refreshed=state.iteration,
            worth=whole.decrease > (1 + krylov.dim) * alone.decrease,
            basis=krylov.basis(),
            ritz=eigen.values,
            ritz_vectors=eigen.vectors,
        )
        inside = np.zeros(krylov.dim) if zero else krylov.linear
        # The mean lies in the space that it started.
        return _Mean(self._mean(g, oracle), bias, inside, float(inside @ inside))

    def _lanczos(self, x: Vector, start: list[Vector], oracle: Oracle) -> Krylov | Recorded:
        """Make the Lanczos iterations, all at once where the oracle can; the start is taken out of its list."""
        scale = self.state.scale
        limit = min(self.settings.krylov_dim or KRYLOV_DIM, oracle.space.dim)
        operator = oracle.hessian(x)

        def product(v: Vector) -> Vector:
            if scale is None:
                return operator(v)
            image = operator(v * scale)
            image *= scale
            return image

        krylov = oracle.lanczos(x, start[0], scale, limit) or Krylov(
            product, start.pop(), oracle.space, reorthogonalise=True, limit=limit
        )
        try:
            while krylov.dim < limit and krylov.extend():
                pass
        finally:
            operator.release()
            oracle.meter.paper_calls += krylov.dim * oracle.sizes[1]
        return krylov

    def _model(self, fresh: bool) -> cubic.Spectrum:
        """Return the curvature of the model: that of the Krylov space, and none outside of it, as one more direction.

        A space that was built elsewhere tells how large the curvature is, but not its sign any more.
        """
        ritz, vectors = self.state.ritz, self.state.ritz_vectors
        if ritz is None or vectors is None:
            return cubic.Spectrum(np.zeros(1), np.ones((1, 1)))
        j = len(ritz)
        values = np.append(ritz if fresh else np.abs(ritz), 0.0)
        directions = np.zeros((j + 1, j + 1))
        directions[:j, :j] = vectors
        directions[j, j] = 1.0
        order = np.argsort(values, kind="stable")
        return cubic.Spectrum(values[order], directions[:, order])

    def _solve(self, eigen: cubic.Spectrum, mean: _Mean, look: Look, oracle: Oracle) -> _Step:
        """Minimise the cubic model; with μ = σ‖s‖ the step is Q(u + Qᵀḡ/μ) − ḡ/μ in the coordinates of the metric."""
        space, linear = oracle.space, mean.linear
        inside = linear[:-1]
        if len(inside) == space.dim:  # there is no outside, and what is left of it is rounding
            linear[-1] = 0.0
        least = cubic.minimise(eigen, linear, self.state.sigma)
        if least.hard:
            sign = 1.0 if self._random(_HARD).integers(2) else -1.0
            least = cubic.minimise(eigen, linear, self.state.sigma, sign)
        if least.multiplier == 0.0:
            return _Step()
        along, within = -1.0 / (least.multiplier * mean.bias), least.u[:-1] + inside / least.multiplier
        if len(inside) == space.dim:
            along, within = 0.0, least.u[:-1]
        state = self.state
        move = Move(look, mean.vector, along, state.basis, within, state.scale, state.path, self.settings.averaging)
        return _Step(move, least.norm, least.decrease, least.bend, least.curvature_share)

    # ------------------------------------------------------------------ the step

    def _move(self, x: Vector, look: Look, oracle: Oracle, mean: _Mean, fresh: bool, entries: dict[str, Any]) -> Vector:
        """Take the step of the model, judged where a judgement is due."""
        s, space = self.settings, oracle.space
        k, first_phase = self.state.iteration, self.state.settled < 0
        eigen = self._model(fresh)
        negative = fresh and eigen.leftmost < 0.0
        judged = first_phase or negative or self._young() or (s.check_every > 0 and k % s.check_every == 0)
        for attempt in range(1 + (0 if not judged else s.resolves if first_phase else 2)):
            step = self._solve(eigen, mean, look, oracle)
            entries |= {"sigma": self.state.sigma, "model_decrease": step.decrease}
            entries["curvature_share"] = step.curvature_share
            if step.move is None:
                entries["note"] = "the model has its minimum here"
                break
            if not judged and step.norm * self.state.stretch < _SAFE_LENGTH:
                moved = oracle.advance(x, step.move)
                self._set(path=moved.path)
                if moved.momentum is not None:
                    self._set(momentum=moved.momentum, square=moved.square)
                entries |= {"branch": Branch.UNTESTED, "step_norm": moved.length}
                return moved.point
            vector = vector_of(space, step.move)
            point = x + vector
            branch = Branch.UNTESTED
            if judged:
                if not self._judge(step, vector, point, look.gradient, oracle, entries, first=attempt == 0):
                    continue
                branch = Branch.VERY_SUCCESSFUL if entries["rho"] > s.eta2 else Branch.SUCCESSFUL
                branch = Branch.CURVATURE if step.curvature_share > 0.5 else branch
            length = space.norm(vector)
            if not math.isfinite(length):
                entries["note"] = "the step is not finite"
                self._set(sigma=self._bounded(s.gamma**2 * self.state.sigma))
                break
            entries |= {"branch": branch, "step_norm": length}
            if not first_phase:
                path = self.state.path
                path = vector if path is None else space.extended(path, s.averaging, vector)
                self._set(path=path)
            return point
        self._set(path=None, reached=math.nan)
        if negative and self.method.on_rejection == "escape":
            return self._escape(x, look.gradient, oracle, eigen, entries)
        return x

    def _young(self) -> bool:
        """Whether noise took over only a few steps ago, so that σ may still be far from where it belongs."""
        state = self.state
        return state.settled >= 0 and state.iteration < state.settled + self.settings.warm_up

    def _judge(
        self,
        step: _Step,
        vector: Vector,
        point: Vector,
        g: Vector,
        oracle: Oracle,
        entries: dict[str, Any],
        *,
        first: bool,
    ) -> bool:
        """Compare what the batch gained with what its own gradient and the curvature of the model promise."""
        s, space, state = self.settings, oracle.space, self.state
        first_phase = state.settled < 0
        value = oracle.trial(point)
        slope, length = space.read(space.gather([space.inner(g, vector), space.inner(vector, vector)]))
        promised = -slope - 0.5 * step.bend
        actual = entries["value"] - value
        entries |= {"trials": entries["trials"] + 1, "trial_value": value, "model_decrease": promised}
        entries["rho"] = ratio(actual, promised)
        finite = math.isfinite(value) and space.finite(point)
        # The cubic coefficient that f showed along the step.
        cube = step.norm * step.norm * step.norm
        shown = math.inf
        if finite:
            shown = 3.0 * (promised - actual) / cube if cube > 0.0 else state.sigma
        rejected = not finite or (actual < 0.0 and (slope < 0.0 or step.curvature_share > 0.5))
        rejected = rejected or (first_phase and promised > 0.0 and actual < s.eta1 * promised)
        if rejected:
            grown = s.gamma * state.sigma
            if first_phase:
                grown = min(max(shown, grown), 100.0 * state.sigma)
            self._set(sigma=self._bounded(grown))
            if not finite:
                entries["note"] = "the trial value is not finite"
            return False
        seen = -2.0 * (actual + slope) / length if length > 0.0 else math.nan
        if not first_phase and not math.isnan(state.curvature):
            seen = _CURVATURE_MEMORY * state.curvature + (1 - _CURVATURE_MEMORY) * seen
        sigma = state.sigma
        if first_phase:
            sigma = min(max(shown, 0.1 * sigma), 10.0 * sigma)
        elif self._young() and first and actual > s.eta2 * promised > 0.0 and state.lean < -0.5:
            sigma = sigma / _BOOST
        self._set(sigma=self._bounded(sigma), curvature=seen, gained=actual, reached=value if first_phase else math.nan)
        return True

    def _escape(self, x: Vector, g: Vector, oracle: Oracle, eigen: cubic.Spectrum, entries: dict[str, Any]) -> Vector:
        """Step along the left-most Ritz vector, downhill, half as far until the batch's loss falls."""
        state, space = self.state, oracle.space
        v = space.combine(state.basis, eigen.leftmost_vector[:-1])
        if state.scale is not None:
            v = v * state.scale
        d = v * (math.copysign(1.0, -space.dot(g, v)) * -eigen.leftmost / state.sigma)
        for _ in range(10):
            point = x + d
            value = oracle.trial(point)
            entries["trials"] += 1
            if math.isfinite(value) and value < entries["value"] and space.finite(point):
                entries |= {"branch": Branch.CURVATURE, "step_norm": space.norm(d), "trial_value": value}
                entries |= {"curvature_share": 1.0, "note": ""}
                return point
            d = 0.5 * d
        entries["note"] = "the curvature step does not lower the loss"
        return x

    def _bounded(self, sigma: float) -> float:
        return max(self.settings.sigma_floor or 0.0, min(sigma, self.settings.sigma_ceiling, _CEILING))

    def _random(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng((self.state.seed, self.state.iteration, purpose))

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        names = [item.name for item in fields(AmortisedState) if item.name not in _VECTORS]
        plain = {name: getattr(self.state, name) for name in names}
        return plain | {name: None if plain[name] is None else plain[name].tolist() for name in _SMALL}

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state, and the basis as a block of rows."""
        return {name: getattr(self.state, name) for name in _VECTORS if getattr(self.state, name) is not None}

    def restore(self, numbers: Mapping[str, Any], vectors: Mapping[str, Any]) -> None:
        """Go on from what `numbers` and `vectors` returned."""
        small = {name: None if numbers[name] is None else np.array(numbers[name], np.float64) for name in _SMALL}
        self.state = self._before = AmortisedState(**{**numbers, **small, **vectors})
        self._last = None

    def forget(self) -> None:
        """Begin anew with vectors of another length; σ and the counts stay."""
        state = self.state
        self.state = self._before = AmortisedState(state.seed, state.iteration, state.sigma, state.seconds)
        self._last = None
