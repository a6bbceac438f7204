"""One iteration: basis, cubic step, judgement, and what to do when the step fails.

The engine composes the three choices of a method. It knows vectors only through a `Space` and the objective only
through an `Oracle`; σ belongs to the judge. Its random draws are functions of (seed, iteration), so its whole state
is a handful of numbers, and a run that is resumed repeats a run that was not interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sanc import cubic, escape
from sanc.errors import NonFiniteStartError
from sanc.judge import LONGER, Judge, Verdict, ratio
from sanc.krylov import Krylov, NonFiniteProductError
from sanc.lanczos import Recorded
from sanc.oracles.base import Operator, Oracle, Tally
from sanc.record import Branch, Record
from sanc.settings import Method, Settings
from sanc.vectors import Space, Vector

_COIN, _START, _HARD = 1, 2, 3  # which random draw of an iteration
_FORCING = 0.2
"""Share of ‖g‖ to which ‖∇m‖ is brought at least, far from a solution."""
_ENOUGH = 0.5
"""Share of the gradient asked for below which ‖∇m‖ is not brought."""
_BETTER = 1.2
"""ρ above which the model is not trusted to have made a step long enough."""


@dataclass(slots=True)
class Draft:
    """The record in the making."""

    branch: Branch = Branch.STAYED
    rho: float = math.nan
    sigma: float = math.nan
    grad_norm: float = math.nan
    ritz_value: float = math.nan
    step_norm: float = 0.0
    model_decrease: float = math.nan
    value: float = math.nan
    trial_value: float = math.nan
    krylov_dim: int = 0
    trials: int = 0
    cubic_norm: float = 0.0
    curvature_share: float = math.nan
    note: str = ""


@dataclass(frozen=True, slots=True)
class EngineState:
    """All that the engine carries from one iteration to the next."""

    seed: int
    iteration: int = 0
    sigma: float = 1.0
    seconds: float = 0.0
    reach: float = 0.0  # length of the last step
    previous: Vector | None = None


class Engine:
    """The iteration of a method.

    Parameters
    ----------
    method : Method
        Model, acceptance and what to do on rejection.
    settings : Settings
        Numbers and rules.
    seed : int
        Seed of the coin, the random start and the sign in the hard case.
    goal : float
        ‖g‖ that the caller is content with: the model is not minimised far beyond it.

    Attributes
    ----------
    at_rest : bool
        Whether the last iteration stayed where it was with a cubic step no longer than ε_s: the paper's ending.
    """

    def __init__(self, method: Method, settings: Settings, seed: int, goal: float = 0.0) -> None:
        self.method = method
        self.settings = settings
        self.goal = goal
        self._longest = math.inf  # of the steps to which negative curvature may lead in this iteration
        self._guessed = False  # whether σ of this iteration says nothing about f: it is the first, or that bound's
        self.state = EngineState(seed=seed, sigma=settings.sigma0)
        self.at_rest = False

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
        clock = time.perf_counter()
        before = self.state
        self.judge = Judge(self.settings, oracle.space.eps, before.sigma)
        draft = Draft(sigma=math.nan if self.method.model == "none" else before.sigma)
        oracle.begin(before.iteration, products=self.method.uses_krylov)
        try:
            point = self._advance(x, oracle, start, draft)
        except BaseException:
            self.state = before
            raise
        return point, self.finish(oracle, draft, time.perf_counter() - clock)

    def finish(self, oracle: Tally, draft: Draft, seconds: float, sigma: float | None = None) -> Record:
        """End an iteration: charge its calls, and keep σ (by default the judge's), the time and the number."""
        before = self.state
        self._charge(oracle, draft.krylov_dim)
        sigma = self.judge.sigma if sigma is None else sigma
        reach, seconds = draft.step_norm or before.reach, before.seconds + seconds
        self.state = EngineState(before.seed, before.iteration + 1, sigma, seconds, reach, before.previous)
        return Record(
            iteration=before.iteration,
            branch=draft.branch,
            rho=draft.rho,
            sigma=draft.sigma,
            grad_norm=draft.grad_norm,
            ritz_value=draft.ritz_value,
            step_norm=draft.step_norm,
            model_decrease=draft.model_decrease,
            value=draft.value,
            trial_value=draft.trial_value,
            krylov_dim=draft.krylov_dim,
            trials=draft.trials,
            calls=oracle.meter.snapshot(),
            seconds=self.state.seconds,
            curvature_share=draft.curvature_share,
            note=draft.note,
            hvp=oracle.hvp,
        )

    def _charge(self, oracle: Tally, krylov_dim: int) -> None:
        """Count as the paper's program does: |S_g| + J·|S_B|, whether or not Lanczos stopped before J.

        A Krylov space whose length follows need is charged for what it used.
        """
        s = self.settings
        if self.method.uses_krylov and s.krylov_stop == "paper" and s.krylov_dim is not None:
            krylov_dim = min(s.krylov_dim, oracle.space.dim)
        size_g, size_b, _ = oracle.sizes
        oracle.meter.paper_calls += size_g + krylov_dim * size_b

    def _advance(self, x: Vector, oracle: Oracle, start: Vector | None, draft: Draft) -> Vector:
        self.at_rest = False
        space = oracle.space
        draft.value, g = oracle.gradient(x)
        draft.grad_norm = space.norm(g)
        if not (math.isfinite(draft.value) and math.isfinite(draft.grad_norm)):
            what = "gradient" if math.isfinite(draft.value) else "loss"
            return self._refuse(x, draft, f"the {what} of the gradient sample is not finite")
        if not self.method.uses_krylov:
            return self._escape(x, g, None, None, None, oracle, draft)
        if not self.method.momentum:
            oracle.dismiss("gradient")
        operator = oracle.hessian(x)
        self._longest = self._bound(x, space)
        self._guessed = self._longest < math.inf and self.state.iteration == 0
        try:
            krylov = self._krylov(operator, g, start, oracle, draft)
            eigen, step = self.grow(krylov, oracle.space, draft)
            if self.method.model != "none":
                point = self._cubic(x, krylov, eigen, step, operator, oracle, draft)
                if point is not None:
                    return point
            if self.method.on_rejection == "escape":
                return self._escape(x, g, krylov, eigen, operator, oracle, draft)
        except NonFiniteProductError as problem:
            self._refuse(x, draft, str(problem))
            if self.method.on_rejection == "escape":
                return self._escape(x, g, None, None, operator, oracle, draft)
        finally:
            operator.release()
        self._rest(oracle, draft)
        return x

    def _refuse(self, x: Vector, draft: Draft, note: str) -> Vector:
        """Stay at `x` because something is not finite; at the very start that is an error."""
        if self.state.iteration == 0:
            raise NonFiniteStartError(
                f"{note} at the starting point (loss {draft.value!r}, gradient norm {draft.grad_norm!r}). "
                "Start where the loss is finite, and check the data and the initial weights."
            )
        self.judge.reject()
        draft.note = note
        return x

    def _random(self, purpose: int, ahead: int = 0) -> np.random.Generator:
        return np.random.default_rng((self.state.seed, self.state.iteration + ahead, purpose))

    def _coin(self, purpose: int, ahead: int = 0) -> float:
        return 1.0 if self._random(purpose, ahead).integers(2) else -1.0

    # ------------------------------------------------------------------ saving and restoring

    def numbers(self) -> dict[str, Any]:
        """Return the part of the state that is plain numbers."""
        state = self.state
        return {name: getattr(state, name) for name in ("seed", "iteration", "sigma", "seconds", "reach")}

    def vectors(self) -> dict[str, Any]:
        """Return the vectors of the state."""
        return {} if self.state.previous is None else {"previous": self.state.previous}

    def restore(self, numbers: Mapping[str, Any], vectors: Mapping[str, Any]) -> None:
        """Go on from what `numbers` and `vectors` returned."""
        self.state = EngineState(**numbers, **vectors)

    def forget(self) -> None:
        """Drop what belongs to vectors of another length."""
        self.state = replace(self.state, previous=None)

    # ------------------------------------------------------------------ the Krylov space

    def _krylov(self, operator: Operator, g: Vector, start: Vector | None, oracle: Oracle, draft: Draft) -> Krylov:
        """Start a Krylov space at the gradient; where that vanishes, at `start` or at random."""
        s = self.settings
        linear = None
        if start is None and draft.grad_norm == 0.0:
            start = oracle.space.normal(self._random(_START))
        if start is not None:
            linear = g
        return Krylov(
            operator,
            g if start is None else start,
            oracle.space,
            store=s.lanczos == "store",
            reorthogonalise=s.reorthogonalise,
            linear=linear,
            limit=s.krylov_dim,
            add=operator.add,
            write=operator,
            prepare=operator.prepare,
            start_norm=draft.grad_norm if start is None else None,
        )

    def grow(
        self, krylov: Krylov | Recorded, space: Space, draft: Draft
    ) -> tuple[cubic.Spectrum, cubic.CubicStep | None]:
        """Lanczos until both tests hold (then with their step), the space is invariant, or J iterations are made."""
        s = self.settings
        limit = min(s.krylov_dim or space.dim, space.dim)
        tolerance = self._tolerance(draft.grad_norm)
        test_at, shift, latest = 1, math.nan, 0
        growing: Krylov | None = None  # where a bound that costs nothing may say that ‖∇m‖ is above its tolerance
        if isinstance(krylov, Recorded):
            alpha, beta = krylov.everything
            test_at = cubic.first_doubt(alpha, beta, krylov.start_norm, self.judge.sigma, tolerance)
        elif self.method.model != "none" and krylov.from_gradient:
            growing = krylov
        while True:
            krylov.extend()
            draft.krylov_dim = j = krylov.dim
            residual = krylov.residual if j < limit else 0.0
            if residual > 0.0:
                if j < test_at or (j < latest and krylov.slope(shift) > 2.0 * tolerance):
                    continue
                if growing is not None and residual * growing.least_last(self.judge.sigma) > tolerance:
                    continue
            eigen = cubic.spectrum(*krylov.tridiagonal())
            converged, step = True, None
            if residual > 0.0:
                converged, step = self._converged(krylov, eigen, residual, draft.grad_norm)
            if converged:
                draft.ritz_value = eigen.leftmost
                return eigen, step
            test_at = j + max(1, j // 5)  # eigenpairs are O(j²): test a long basis less often …
            if s.krylov_stop == "forcing" and step is not None and krylov.from_gradient:
                # … and where the μ of this step would not do either: that is known without eigenpairs.
                test_at, latest, shift = j + 1, max(j + 8, test_at), step.multiplier

    def _tolerance(self, grad_norm: float) -> float:
        """Return what ‖∇m‖ may be at most; "forcing" may ask for less where the step is short."""
        if self.settings.krylov_stop == "paper":
            return self.settings.gradient_tolerance
        return max(min(_FORCING, math.sqrt(grad_norm)) * grad_norm, _ENOUGH * self.goal)

    def _converged(
        self, krylov: Krylov | Recorded, eigen: cubic.Spectrum, residual: float, grad_norm: float
    ) -> tuple[bool, cubic.CubicStep | None]:
        s = self.settings
        if s.krylov_stop == "paper":
            ritz_residual = residual * abs(float(eigen.vectors[-1, 0]))
            if ritz_residual > max(s.epsilon, grad_norm) / 2:
                return False, None
        tolerance = self._tolerance(grad_norm)
        if self.method.model == "none":
            return True, None
        step = self._step(krylov, eigen)
        if s.krylov_stop == "forcing":
            tolerance = min(tolerance, max(step.norm * grad_norm, _ENOUGH * self.goal))
        return residual * abs(float(step.u[-1])) <= tolerance, step

    def _bound(self, x: Vector, space: Space) -> float:
        """Return the longest step to which negative curvature may lead from here."""
        radius = self.settings.first_radius
        if radius is None or self.method.acceptance != "ratio":
            return math.inf
        return max(radius * max(1.0, 0.1 * space.norm(x)), LONGER * self.state.reach)

    def _step(self, krylov: Krylov | Recorded, eigen: cubic.Spectrum) -> cubic.CubicStep:
        """Minimise the model, with σ raised where negative curvature leaves the length to σ and that is too long.

        At first σ is a guess, and steps along which the curvature was positive let it fall as far as they like.
        """
        step = cubic.minimise(eigen, krylov.linear, self.judge.sigma)
        if eigen.leftmost >= 0.0 or step.norm <= self._longest:
            return step

        def length(sigma: float) -> float:
            nonlocal step
            step = cubic.minimise(eigen, krylov.linear, sigma)
            return step.norm

        self._guessed = True
        self.judge.shorten(length, self._longest)
        return step

    # ------------------------------------------------------------------ the cubic step

    def _cubic(
        self,
        x: Vector,
        krylov: Krylov,
        eigen: cubic.Spectrum,
        known: cubic.CubicStep | None,
        operator: Operator,
        oracle: Oracle,
        draft: Draft,
    ) -> Vector | None:
        """Try the cubic step, then those of larger σ in the same space; None when all were rejected."""
        tested = self.method.acceptance == "ratio"
        eps = oracle.space.eps
        known = known or self._step(krylov, eigen)
        for _ in range(1 + (self.settings.resolves if tested else 0)):
            draft.sigma = self.judge.sigma
            step = known or cubic.minimise(eigen, krylov.linear, draft.sigma)
            known = None  # it belongs to the first σ
            if step.hard:
                step = cubic.minimise(eigen, krylov.linear, draft.sigma, self.hard_sign(krylov, eigen))
            draft.model_decrease, draft.cubic_norm = step.decrease, step.norm
            draft.curvature_share = step.curvature_share
            if step.decrease <= 0.0:  # g = 0 and no negative curvature: a second-order point of this space
                draft.note = "the model has its minimum here"
                self._rest(oracle, draft)
                return x
            trial = krylov.added(x, step.u)
            trial_norm = oracle.space.norm(trial)
            if step.norm <= eps * trial_norm < math.inf:
                draft.note = "the cubic step vanishes in the rounding of x"
                self.judge.forget()
                return None
            if self.settings.rounding_guard:  # such an f has a rounding error of its own
                operator.moved(trial, step.u)
            operator.release()
            if self.settings.lanczos == "store" and self.settings.fallback_sample == "gradient":
                oracle.dismiss("hessian")
            if draft.trials == 0:
                draft.value = oracle.value(x)
                if not math.isfinite(draft.value):
                    return self._refuse(x, draft, "the loss of the objective sample is not finite")
            draft.trial_value = oracle.value(trial)
            draft.trials += 1
            if not math.isfinite(trial_norm):
                draft.trial_value = math.nan
            actual = draft.value - draft.trial_value
            if not tested:
                if not math.isfinite(draft.trial_value):
                    self.judge.reject()
                    draft.note = "the trial value is not finite"
                    return None
                self.judge.relax()
                draft.rho = ratio(actual, step.decrease)
                draft.branch = Branch.UNTESTED
                point = self._momentum(x, trial, step.norm, oracle, draft) if self.method.momentum else trial
                draft.step_norm = step.norm if point is trial else oracle.space.norm(point - x)
                return point
            noise = 0.0
            if self.settings.rounding_guard:
                noise = 10.0 * eps * abs(draft.value)
                actual = self._told(actual, step.decrease, trial, oracle, draft)
            draft.rho = ratio(actual, step.decrease, noise)
            verdict = self.judge.try_step(actual, step.decrease, step.norm, draft.grad_norm, noise)
            if verdict.accepted:
                very = verdict is Verdict.VERY_SUCCESSFUL
                draft.branch = Branch.VERY_SUCCESSFUL if very else Branch.SUCCESSFUL
                draft.step_norm = step.norm
                if self._guessed:
                    trial = self._farther(x, trial, krylov, eigen, operator, oracle, draft)
                return trial
            if not math.isfinite(draft.trial_value):
                draft.note = "the trial value is not finite"
        return None

    def _farther(
        self,
        x: Vector,
        point: Vector,
        krylov: Krylov,
        eigen: cubic.Spectrum,
        operator: Operator,
        oracle: Oracle,
        draft: Draft,
    ) -> Vector:
        """Go on to steps of smaller σ in the same space while f falls by more than the model says."""
        while draft.rho > _BETTER and self.judge.sigma < draft.sigma and draft.trials <= self.settings.resolves:
            sigma = self.judge.sigma
            step = cubic.minimise(eigen, krylov.linear, sigma)
            if step.hard:
                step = cubic.minimise(eigen, krylov.linear, sigma, self.hard_sign(krylov, eigen))
            if step.norm < 2.0 * draft.step_norm:
                break
            trial = krylov.added(x, step.u)
            if self.settings.rounding_guard:
                operator.moved(trial, step.u)
            operator.release()
            value = oracle.value(trial)
            draft.trials += 1
            if not (value < draft.trial_value and oracle.space.finite(trial)):
                break
            actual = draft.value - value
            verdict = self.judge.try_step(actual, step.decrease, step.norm, draft.grad_norm, 0.0)
            very = verdict is Verdict.VERY_SUCCESSFUL
            draft.branch = Branch.VERY_SUCCESSFUL if very else Branch.SUCCESSFUL
            draft.sigma, draft.rho = sigma, ratio(actual, step.decrease)
            draft.model_decrease, draft.cubic_norm, draft.step_norm = step.decrease, step.norm, step.norm
            draft.curvature_share, draft.trial_value = step.curvature_share, value
            point = trial
        return point

    def _told(self, actual: float, predicted: float, trial: Vector, oracle: Oracle, draft: Draft) -> float:
        """Let the gradient decide where the values are lost in rounding: the step is as good as promised if it halves.

        A value may carry the rounding error of terms far larger than itself, so that its own size says too little.
        """
        eps, size = oracle.space.eps, max(1.0, abs(draft.value))
        hidden = abs(actual) <= 1e3 * eps * size and predicted <= math.sqrt(eps) * size
        if hidden and actual < self.settings.eta1 * predicted and draft.trials == 1 and oracle.exact:
            _, g = oracle.gradient(trial)
            if oracle.space.norm(g) <= 0.5 * draft.grad_norm:
                draft.note = "the values are lost in rounding and the gradient decided"
                return predicted
        return actual

    def hard_sign(self, krylov: Krylov | Recorded, eigen: cubic.Spectrum, coin: float | None = None) -> float:
        """Sign of the left-most vector in the hard case: both are minimisers of the model. `coin` was tossed before."""
        if self.settings.sign == "descent":
            slope = float(eigen.leftmost_vector @ krylov.linear)
            if slope != 0.0:
                return -math.copysign(1.0, slope)
        return self._coin(_HARD) if coin is None else coin

    def _momentum(self, x: Vector, trial: Vector, norm: float, oracle: Oracle, draft: Draft) -> Vector:
        """CRM (Wang, Zhou, Liang and Lan 2018): extrapolate beyond the cubic point, keep the better of the two."""
        previous = self.state.previous if self.state.previous is not None else x
        self.state = replace(self.state, previous=trial)
        _, g = oracle.gradient(trial)
        oracle.meter.paper_calls += oracle.sizes[0]  # a second gradient is a second |S_g|
        beta = min(self.settings.momentum, oracle.space.norm(g), norm)
        if not (math.isfinite(beta) and beta > 0.0):
            return trial
        ahead = trial + beta * (trial - previous)
        value = oracle.value(ahead)
        draft.trials += 1
        if math.isfinite(value) and value < draft.trial_value and oracle.space.finite(ahead):
            draft.trial_value = value
            draft.note = "momentum"
            return ahead
        return trial

    # ------------------------------------------------------------------ when the cubic step failed

    def _escape(
        self,
        x: Vector,
        g: Vector,
        krylov: Krylov | None,
        eigen: cubic.Spectrum | None,
        operator: Operator | None,
        oracle: Oracle,
        draft: Draft,
    ) -> Vector:
        """Step along negative curvature or the gradient; stay where that cannot be done safely."""
        s = self.settings
        if self.method.on_rejection == "gradient":
            plan = escape.Escape(Branch.GRADIENT, s.lr)
        else:
            L1, L2 = self._constants(eigen)
            has_model = self.method.model != "none"
            plan = escape.choose(draft.ritz_value, draft.grad_norm, L1, L2, s, may_stay=has_model)
        if plan.branch is Branch.CURVATURE and krylov is not None and eigen is not None:
            (d,) = krylov.combine(eigen.leftmost_vector)
            d *= plan.length * self._curvature_sign(g, d, oracle)
        elif plan.branch is Branch.GRADIENT:
            on_hessian_sample = operator if s.fallback_sample == "hessian" else None
            d = -plan.length * (g if on_hessian_sample is None else on_hessian_sample.gradient())
        else:
            self._rest(oracle, draft)
            return x
        if operator is not None:
            operator.release()
        if self.method.model == "none":  # there σ measures nothing but how often a step was not finite
            d *= s.sigma0 / self.judge.sigma
        return self._checked(x, d, plan.branch, oracle, draft)

    def _checked(self, x: Vector, d: Vector, branch: Branch, oracle: Oracle, draft: Draft) -> Vector:
        """Take the step d if f is finite there (or lower, as the settings ask)."""
        norm = oracle.space.norm(d)
        if norm == 0.0:
            self._rest(oracle, draft)
            return x
        must_fall = self.settings.escape_check == "decrease"
        if must_fall and draft.trials == 0:
            draft.value = oracle.value(x)
        for _ in range(40 if must_fall else 1):
            trial = x + d
            value = oracle.value(trial)
            draft.trials += 1
            good = math.isfinite(value) and oracle.space.finite(trial)
            if good and not (must_fall and value >= draft.value):
                draft.branch, draft.step_norm, draft.trial_value = branch, norm, value
                draft.curvature_share = 1.0 if branch is Branch.CURVATURE else 0.0
                if self.method.acceptance == "always":
                    self.judge.relax()
                return trial
            d *= 0.5
            norm *= 0.5
            if norm <= oracle.space.eps * max(oracle.space.norm(x), 1e-300):
                break
        if self.method.acceptance == "always":
            self.judge.reject()
        draft.note = f"the {branch} step " + ("does not lower the loss" if must_fall else "is not finite")
        return x

    def _constants(self, eigen: cubic.Spectrum | None) -> tuple[float, float]:
        s = self.settings
        if not s.estimate_constants or eigen is None:
            return s.L1, s.L2
        steepest = float(np.max(np.abs(eigen.values)))
        return (steepest or s.L1), 2.0 * self.judge.sigma

    def _curvature_sign(self, g: Vector, v: Vector, oracle: Oracle) -> float:
        if self.settings.sign == "descent":
            slope = oracle.space.dot(g, v)
            if slope != 0.0:
                return -math.copysign(1.0, slope)
        return -self._coin(_COIN)

    def coins(self, ahead: int = 0) -> tuple[float, float]:
        """Toss the coins of an iteration that may lie ahead: the sign of a curvature step and that of a hard case."""
        return -self._coin(_COIN, ahead), self._coin(_HARD, ahead)

    def _rest(self, oracle: Oracle, draft: Draft) -> None:
        """Note whether staying here is the paper's ending: d = 0 and ‖s‖ ≤ ε_s."""
        draft.branch, draft.step_norm = Branch.STAYED, 0.0
        decides = oracle.exact or draft.grad_norm == 0.0  # with samples, d = 0 says something only if g is 0
        self.at_rest = decides and draft.cubic_norm <= self.settings.epsilon_s
