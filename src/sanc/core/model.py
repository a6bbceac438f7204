"""The first choice of a method: its model, that is the Krylov space (2.2, 2.4) and the cubic steps in it (2.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from sanc.core import cubic
from sanc.core.judge import LONGER
from sanc.core.krylov import Krylov, NonFiniteProductError
from sanc.core.oracle import Operator
from sanc.core.point import HARD_CASE_SIGN, Point
from sanc.core.settings import AT_LEAST_ONE, COUNT, NOT_NEGATIVE, POSITIVE, Piece, setting
from sanc.core.space import Vector
from sanc.core.units import FIRST_SIGMA, Units, measure_units

_FORCING = 0.2
"""Largest ‖∇m‖ over ‖g‖ at which an inexact Newton step is accepted."""
SAMPLED_KRYLOV_DIM = 5
"""J with samples where `krylov_dim` leaves it open, as in the paper: a sampled Hessian is not exact."""
_VANISHING_DIM = 10
"""Dimension at which the space ends if the step is below the working precision of x and the gradient is not zero."""
_TOLERANCE_SHARE = 0.5
"""Share of the caller's tolerance below which ‖∇m‖ need not fall."""


@dataclass(frozen=True, slots=True)
class KrylovSubspace:
    """The Krylov space that a model built, the eigenpairs of T, and the bounds on steps in it.

    Attributes
    ----------
    model : KrylovModel
        The model that built it.
    krylov : Krylov
        Q and T.
    operator : Operator
        The Hessian on S_B.
    spectrum : Spectrum or None
        Eigenpairs of T; None where a product was not finite.
    sigma : float
        σ, set at the first point, or raised while the space grew.
    units : Units
        Units of the first point.
    longest_step : float
        The largest step norm to which σ is left alone.
    sigma_is_guess : bool
        Whether σ was set by `longest_step` or is the first one, so that it does not follow from values of f.
    step : CubicStep or None
        The cubic step for `sigma`.
    problem : str
        Why no step can be made; empty where steps can be made.
    """

    model: KrylovModel
    krylov: Krylov
    operator: Operator
    spectrum: cubic.Spectrum | None
    sigma: float
    units: Units
    longest_step: float = math.inf
    sigma_is_guess: bool = False
    step: cubic.CubicStep | None = None
    problem: str = ""

    @property
    def dim(self) -> int:
        """Lanczos iterations made."""
        return self.krylov.dim

    @property
    def ritz_value(self) -> float:
        """λ1, the left-most Ritz value; NaN where a product was not finite."""
        return math.nan if self.spectrum is None else self.spectrum.leftmost

    @property
    def curvature(self) -> float:
        """The largest absolute Ritz value."""
        return 0.0 if self.spectrum is None else self.spectrum.norm

    def ritz_vector(self) -> Vector:
        """Return v of the left-most Ritz pair, with ‖v‖ = 1."""
        assert self.spectrum is not None
        (v,) = self.krylov.combine(self.spectrum.leftmost_vector)
        return v

    def trial_point(self, x: Vector, step: cubic.CubicStep) -> Vector:
        """Return x + Qu, and release what the products needed."""
        (s,) = self.krylov.combine(step.u)
        self.release()
        return s + x

    def failed(self, problem: str) -> KrylovSubspace:
        """Return the same space after a product that was not finite: it offers neither steps nor curvature."""
        return replace(self, spectrum=None, step=None, problem=problem)

    def release(self) -> None:
        """Release what the products needed; a later product builds it again."""
        self.operator.release()


@dataclass(frozen=True, kw_only=True)
class KrylovModel(Piece):
    """Builds a Krylov space and proposes no step; the escape rule uses its left-most Ritz pair.

    Attributes
    ----------
    krylov_dim : int or None
        Largest number J of Lanczos iterations. None: as many as the stopping rule needs; with samples 5, as in the
        paper, because a sampled Hessian is not exact.
    krylov_stop : {"paper", "forcing"}
        "paper": stop when ‖∇m(s)‖ ≤ ε_g and the Ritz residual ≤ max(ε, ‖g‖)/2. "forcing": stop when
        ‖∇m(s)‖ ≤ min(0.2, r, ‖s‖/ℓ)·‖g‖, an inexact Newton condition, or ≤ 0.5 `tol` of `minimize`; r is ‖g‖ over
        that of the iteration before, and ℓ the unit of length (see `first_radius`). With an exact f it also stops at
        the first negative curvature. A stored basis is then reorthogonalised.
    lanczos : {"store", "regenerate"}
        Keep the basis, or compute it again in a second pass and hold three vectors whatever J is.
    epsilon, epsilon_g : float
        ε and ε_g of the paper; an ε_g of None is ε/4.
    """

    krylov_dim: int | None = setting(5, AT_LEAST_ONE)
    krylov_stop: Literal["paper", "forcing"] = "paper"
    lanczos: Literal["store", "regenerate"] = "store"
    epsilon: float = setting(1e-4, POSITIVE)
    epsilon_g: float | None = setting(None, NOT_NEGATIVE)

    proposes = False
    needs_products = True
    resolves = 0

    @property
    def reorthogonalise(self) -> bool:
        """Whether each Lanczos vector is orthogonalised against all earlier ones."""
        return self.krylov_stop == "forcing" and self.lanczos == "store"

    @property
    def forcing(self) -> bool:
        """Whether the space ends by an inexact Newton condition."""
        return self.krylov_stop == "forcing"

    def largest_dim(self, here: Point) -> int | None:
        """Return the largest number of Lanczos iterations; None: no limit."""
        return SAMPLED_KRYLOV_DIM if self.krylov_dim is None and here.one_sample else self.krylov_dim

    def build(self, here: Point) -> KrylovSubspace:
        """2.2 and 2.4: start Lanczos at the gradient; if that is zero, at the direction given or at random."""
        start = here.start
        if start is None and here.grad_norm == 0.0:
            start = here.random_start()
        operator = here.oracle.hessian(here.x)
        try:
            krylov = Krylov(
                here.oracle.lanczos(
                    operator,
                    here.g if start is None else start,
                    max_dim=self.largest_dim(here),
                    store=self.lanczos == "store",
                    reorthogonalise=self.reorthogonalise,
                    gradient=None if start is None else here.g,
                )
            )
            return _build_subspace(self, here, krylov, operator)
        except BaseException:
            operator.release()
            raise

    def propose(self, here: Point, subspace: KrylovSubspace, sigma: float) -> cubic.CubicStep | None:
        """Propose no step."""
        return None

    def longest_step(self, here: Point, first_units: Units) -> float:
        """Return the largest step norm to which σ is left alone."""
        return math.inf

    def with_step(self, here: Point, subspace: KrylovSubspace) -> KrylovSubspace:
        """Return the subspace with the step of its σ, which may be raised; without a step if the model makes none."""
        return subspace

    def charge(self, here: Point, dim: int) -> int:
        """Return J as the paper's program counts it (D4): whether or not Lanczos stopped before.

        A space whose dimension follows need is charged for the products it used.
        """
        if self.krylov_stop == "paper" and self.krylov_dim is not None:
            return min(self.krylov_dim, here.space.dim)
        return dim


@dataclass(frozen=True, kw_only=True)
class CubicModel(KrylovModel):
    """2.3: minimises m(s) = gᵀs + ½sᵀBs + (σ/3)‖s‖³ in the Krylov space, globally.

    Attributes
    ----------
    resolves : int
        How often a rejected step is solved again with a larger σ in the same Krylov space, without Hessian products.
    first_radius : float or None
        σ is at least so large that a step norm is at most this times the unit of length, or three times the last step
        norm. The first step of a run is limited only where σ alone limits it, because its Krylov space shows little or
        negative curvature. The unit is max(ℓ₀, ‖x‖/10), where
        ℓ₀ = min(‖g‖²/‖Bg‖, max(‖x₀‖/10, |f|/‖g‖)) at the first point x₀.
        Where this rule or `sigma0` set σ, and f falls by more than the model predicts,
        longer steps in the same space are tried at once. None: no limit.
    """

    resolves: int = setting(0, COUNT)
    first_radius: float | None = setting(None, POSITIVE)

    proposes = True

    def propose(self, here: Point, subspace: KrylovSubspace, sigma: float) -> cubic.CubicStep | None:
        """Return the minimiser of the model with this σ; None where a product was not finite."""
        if subspace.spectrum is None:
            return None
        if subspace.step is not None and subspace.step.sigma == sigma:
            return subspace.step
        return self._solve(here, subspace.krylov, subspace.spectrum, sigma)

    def _solve(self, here: Point, krylov: Krylov, spectrum: cubic.Spectrum, sigma: float) -> cubic.CubicStep:
        linear = krylov.projected_gradient
        step = cubic.solve(spectrum, linear, sigma)
        if step.hard_case and not here.coin(HARD_CASE_SIGN):  # both signs minimise the model
            step = cubic.solve(spectrum, linear, sigma, -1.0)
        return step

    def longest_step(self, here: Point, first_units: Units) -> float:
        if self.first_radius is None:
            return math.inf
        return max(self.first_radius * length_scale(here, first_units), LONGER * here.state.step_norm)

    def with_step(self, here: Point, subspace: KrylovSubspace) -> KrylovSubspace:
        """Minimise the model, with σ raised where the step is far longer than the last.

        σ follows from the last steps, and along another direction the model may be wrong that far from x. The first
        step of a run is Newton's, unless negative curvature leaves its norm to a guess of σ.
        """
        spectrum, krylov, sigma_is_guess = subspace.spectrum, subspace.krylov, subspace.sigma_is_guess
        assert spectrum is not None
        step = self._solve(here, krylov, spectrum, subspace.sigma)
        if step.norm > subspace.longest_step and (here.state.step_norm > 0.0 or spectrum.leftmost < step.multiplier):
            sigma_is_guess = True
            least = cubic.sigma_lower_bound(spectrum, krylov.projected_gradient, step, subspace.longest_step)
            solve = partial(self._solve, here, krylov, spectrum)
            step = here.judge.shorten(step, subspace.sigma, solve, subspace.longest_step, least)
        return replace(subspace, sigma=step.sigma, sigma_is_guess=sigma_is_guess, step=step)


@dataclass(frozen=True, kw_only=True)
class NoModel(Piece):
    """Asks for no Hessian products and proposes no step."""

    proposes = False
    needs_products = False
    resolves = 0

    def build(self, here: Point) -> None:
        """Build nothing."""

    def propose(self, here: Point, subspace: None, sigma: float) -> None:
        """Propose no step."""

    def charge(self, here: Point, dim: int) -> int:
        """Return 0: there are no products."""
        return 0


def length_scale(here: Point, first_units: Units) -> float:
    """Return a length that is neither large nor small at x."""
    return max(first_units.length, 0.1 * here.norm)


def _build_subspace(model: KrylovModel, here: Point, krylov: Krylov, operator: Operator) -> KrylovSubspace:
    """Extend a Krylov space until the model is minimised well enough in it.

    Along negative curvature the model predicts most where it is least reliable. With "forcing" the space ends with the
    first negative curvature, close to the gradient, as truncated conjugate gradients do. A product that is not finite
    ends it without a spectrum.
    """
    subspace = KrylovSubspace(model, krylov, operator, None, here.state.sigma, here.units)
    tolerance = _gradient_tolerance(model, here)
    ritz_tolerance = math.inf if model.forcing else max(model.epsilon, here.grad_norm) / 2
    limit = min(model.largest_dim(here) or here.space.dim, here.space.dim)
    next_test, latest_test, multiplier = 1, 0, math.nan
    try:
        while True:
            krylov.extend()
            j = krylov.dim
            if j == 1:
                subspace = _with_units(model, here, subspace)
            last = krylov.invariant or j >= limit or (model.forcing and here.oracle.exact and not krylov.definite)
            if not last:
                # Eigenpairs are O(j²): a long basis is tested less often, or where μ of the last step predicts an end.
                is_early = j < next_test or (
                    j < latest_test and krylov.model_gradient_norm(multiplier) > 2.0 * tolerance
                )
                if is_early or (model.proposes and krylov.model_gradient_lower_bound(subspace.sigma) > tolerance):
                    continue
            spectrum = cubic.compute_spectrum(*krylov.tridiagonal())
            subspace = replace(subspace, spectrum=spectrum)
            if last or krylov.residual_of(spectrum.vectors[:, 0]) <= ritz_tolerance:
                subspace = model.with_step(here, subspace)
                if last or subspace.step is None or _is_accurate(model, here, subspace, tolerance):
                    return subspace
                if model.forcing and krylov.starts_at_gradient:
                    next_test, latest_test, multiplier = j + 1, max(j + 8, j + j // 5), subspace.step.multiplier
                    continue
            next_test = j + max(1, j // 5)
    except NonFiniteProductError as problem:
        return subspace.failed(str(problem))


def _gradient_tolerance(model: KrylovModel, here: Point) -> float:
    """Return the largest ‖∇m‖; "forcing" may ask for less where the step is short."""
    if not model.forcing:
        return resolved_epsilon_g(model.epsilon, model.epsilon_g)
    norm, before = here.grad_norm, here.state.grad_norm
    reduction = norm / before if before > 0.0 else 1.0
    return max(min(_FORCING, reduction) * norm, _TOLERANCE_SHARE * here.tol)


def _is_accurate(model: KrylovModel, here: Point, subspace: KrylovSubspace, tolerance: float) -> bool:
    """2.2: whether ‖∇m(s)‖ = β_j |u_j| is small enough."""
    assert subspace.step is not None
    step_norm, residual = subspace.step.norm, subspace.krylov.residual_of(subspace.step.u)
    if residual > tolerance:
        return False
    if not model.forcing:
        return True
    if here.vanishes(step_norm):  # across a valley it may, where a step along the valley does not
        return here.grad_norm > 0.0 and subspace.dim >= _VANISHING_DIM
    wanted = step_norm / length_scale(here, subspace.units) * here.grad_norm
    return residual <= max(wanted, _TOLERANCE_SHARE * here.tol)


def _with_units(model: KrylovModel, here: Point, subspace: KrylovSubspace) -> KrylovSubspace:
    """Return the space with the units and σ of the first point, and the largest step norm from here."""
    krylov, first_units = subspace.krylov, subspace.units
    if first_units.length:
        return replace(subspace, longest_step=model.longest_step(here, first_units))
    curvature = math.hypot(krylov.alpha[0], krylov.last_beta)
    norm, size = here.grad_norm, here.norm
    if not krylov.starts_at_gradient or norm <= here.space.eps * curvature * size:
        norm = 0.0  # a stationary point, whose gradient shows no length
    first_units = measure_units(here.value, norm, curvature, size)
    sigma = here.judge.bounded(FIRST_SIGMA * first_units.cubic) if here.judge.measures else subspace.sigma
    longest_step = model.longest_step(here, first_units)
    return replace(
        subspace, units=first_units, sigma=sigma, longest_step=longest_step, sigma_is_guess=longest_step < math.inf
    )


def resolved_epsilon_g(epsilon: float, epsilon_g: float | None) -> float:
    """Return ε_g: the number given, or ε/4 as in the authors' program."""
    return epsilon / 4 if epsilon_g is None else epsilon_g
