"""Models (2.2 to 2.4): the Krylov space with its left-most Ritz pair, and the cubic steps in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from sanc.core.oracle import Operator
from sanc.core.point import HARD_CASE_SIGN, Point
from sanc.core.settings import AT_LEAST_ONE, COUNT, NOT_NEGATIVE, POSITIVE, Piece, resolved_epsilon_g, setting
from sanc.core.sigma import MAX_GROWTH_FACTOR
from sanc.core.space import Vector
from sanc.core.spectrum import cubic
from sanc.core.spectrum.krylov import Krylov, NonFiniteProductError, StepBasis
from sanc.core.units import FIRST_SIGMA, Units, step_scale_at

MAX_FORCING_TERM = 0.2
"""Largest forcing term ‖∇m‖/‖g‖ of an inexact Newton step."""
SAMPLED_KRYLOV_DIM = 5
"""J with samples if `krylov_dim` is None, as in the paper: a sampled Hessian is not exact."""
_MAX_NEGLIGIBLE_STEP_DIM = 10
"""Largest Krylov dimension while the step is below the working precision of x and g ≠ 0."""
_TEST_DIVISOR, _MIN_TEST_INTERVAL = 5, 8
"""The next accuracy test follows after a fifth more products; after eight, if μ predicts ‖∇m‖ without eigenpairs."""
_PREDICTION_FACTOR = 2.0
"""The test is made if the predicted ‖∇m‖ is below this many tolerances."""
TOLERANCE_FRACTION = 0.5
"""‖∇m‖ is not reduced below this fraction of the caller's tolerance."""


class StepControl(NamedTuple):
    """What determines the step norm in a subspace: σ with its units, and the limit on the norm.

    Attributes
    ----------
    sigma, units, max_step_norm, allows_longer_steps
        As in `KrylovSubspace`.
    """

    sigma: float
    units: Units
    max_step_norm: float = math.inf
    allows_longer_steps: bool = False


@dataclass(frozen=True, slots=True)
class KrylovSubspace:
    """The Krylov space of a model, the eigenpairs of T, and the limit on steps in it.

    Attributes
    ----------
    model : KrylovModel
        The model that built it.
    krylov : StepBasis
        Q and T.
    operator : Operator
        The Hessian on S_B.
    spectrum : Spectrum or None
        Eigenpairs of T; None if a product was not finite.
    sigma : float
        σ of the first step: the σ of the state, the initial σ, or a larger one that limits the step norm.
    units : Units
        Units of the first point.
    max_step_norm : float
        Limit on the step norm: σ is raised for longer steps.
    allows_longer_steps : bool
        Whether longer steps may be tried if f decreases by more than predicted: the model tries them and limits step
        norms, and no value of f has confirmed σ. It is the initial one, or was raised to limit the step norm.
    step : CubicStep or None
        The cubic step for `sigma`.
    failure : str
        Why no step can be made; empty if steps can be made.
    """

    model: KrylovModel
    krylov: StepBasis
    operator: Operator
    spectrum: cubic.Spectrum | None
    sigma: float
    units: Units
    max_step_norm: float = math.inf
    allows_longer_steps: bool = False
    step: cubic.CubicStep | None = None
    failure: str = ""

    @property
    def products(self) -> int:
        """Hessian products computed for the basis; n if the Hessian is formed as a matrix."""
        return self.krylov.products

    @property
    def ritz_value(self) -> float:
        """λ1, the left-most Ritz value; NaN if a product was not finite."""
        return math.nan if self.spectrum is None else self.spectrum.leftmost

    @property
    def hessian_norm(self) -> float:
        """The largest absolute Ritz value, an estimate of ‖B‖; 0 if a product was not finite."""
        return 0.0 if self.spectrum is None else self.spectrum.norm

    @property
    def basis(self) -> StepBasis | None:
        """Q and T; None if Q is not stored, or if a product was not finite."""
        return None if self.spectrum is None or not self.krylov.is_stored else self.krylov

    def ritz_vector(self) -> Vector:
        """Return v of the left-most Ritz pair, with ‖v‖ = 1."""
        assert self.spectrum is not None
        (v,) = self.krylov.combine(self.spectrum.leftmost_vector)
        return v

    def trial_point(self, x: Vector, step: cubic.CubicStep) -> Vector:
        """Return x + Qu."""
        (s,) = self.krylov.combine(step.u)
        return s + x

    def longer_step(self, here: Point, sigma: float, trial_count: int) -> cubic.CubicStep | None:
        """Return the step of a smaller σ; None if the model allows no more than `trial_count` trial points."""
        return self.model.propose(here, self, sigma) if trial_count <= self.model.max_resolves else None

    def failed(self, failure: str) -> KrylovSubspace:
        """Return the same space after a product that was not finite: it has neither steps nor Ritz pairs."""
        return replace(self, spectrum=None, step=None, failure=failure)

    def release(self) -> None:
        """Release the memory of the products; a later product allocates it again."""
        self.operator.release()


@dataclass(frozen=True, kw_only=True)
class KrylovModel(Piece):
    """Builds a Krylov space and proposes no step. The escape rule uses the left-most Ritz pair.

    Attributes
    ----------
    krylov_dim : int or None
        Largest number J of Lanczos iterations; 5 is the paper's. None: as many as the stopping rule needs; with samples
        5, because a sampled Hessian is not exact.
    krylov_stop : {"paper", "forcing"}
        "paper": stop when ‖∇m(s)‖ ≤ ε_g and the Ritz residual ≤ max(ε, ‖g‖)/2. "forcing": stop when
        ‖∇m(s)‖ ≤ min(0.2, r, ‖s‖/ℓ)·‖g‖, an inexact Newton condition, or ≤ 0.5 `tol` of `minimize`. Here r is ‖g‖ over
        ‖g‖ in the iteration before, and ℓ the length scale (see `first_radius`). With an exact f it also stops at
        the first negative curvature. A stored basis is then reorthogonalised.
    lanczos : {"store", "regenerate"}
        Keep the basis, or compute it again in a second pass, which stores three vectors for any J.
    epsilon, epsilon_g : float
        ε and ε_g of the paper. The authors' program has ε = 1e-4, and ε_g = ε/4, which None means.

    A subclass may override these class attributes, which are no options:

    - `first_sigma_in_units`: the initial σ in its unit, if it is measured;
    - `tries_longer_steps`: whether longer steps are tried where f decreases by more than predicted;
    - `limits_newton_steps`, of a `CubicModel`: whether the first step is limited even if σ does not determine its norm.
    """

    krylov_dim: int | None = setting(5, AT_LEAST_ONE)
    krylov_stop: Literal["paper", "forcing"] = "paper"
    lanczos: Literal["store", "regenerate"] = "store"
    epsilon: float = setting(1e-4, POSITIVE)
    epsilon_g: float | None = setting(None, NOT_NEGATIVE)

    proposes = False
    needs_products = True
    max_resolves = 0
    first_sigma_in_units = FIRST_SIGMA
    tries_longer_steps = True

    def without_effect(self) -> Mapping[str, str]:
        """Return ε and ε_g if the stopping rule of Lanczos does not use them."""
        remedy = 'leave it out, or pass krylov_stop="paper" or escape=sanc.PaperEscape(), which use it'
        return dict.fromkeys(("epsilon", "epsilon_g"), remedy) if self.uses_forcing_term else {}

    @property
    def reorthogonalise(self) -> bool:
        """Whether each Lanczos vector is orthogonalised against all earlier ones."""
        return self.krylov_stop == "forcing" and self.lanczos == "store"

    @property
    def uses_forcing_term(self) -> bool:
        """Whether an inexact Newton condition ends the Lanczos process."""
        return self.krylov_stop == "forcing"

    def largest_dim(self, here: Point) -> int | None:
        """Return the largest number of Lanczos iterations; None: no limit."""
        return SAMPLED_KRYLOV_DIM if self.krylov_dim is None and here.one_sample else self.krylov_dim

    def build(self, here: Point) -> KrylovSubspace:
        """Return the Krylov space of the Hessian at the point (2.2, 2.4)."""
        operator = here.oracle.hessian(here.x)
        try:
            return self.build_in(here, operator)
        except BaseException:
            operator.release()
            raise

    def build_in(self, here: Point, operator: Operator) -> KrylovSubspace:
        """Return the Krylov space that starts at the direction given or at the gradient; at random if that is zero."""
        start = here.lanczos_start
        if start is None and here.grad_norm == 0.0:
            start = here.random_lanczos_start()
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

    def propose(self, here: Point, subspace: KrylovSubspace, sigma: float) -> cubic.CubicStep | None:
        """Propose no step."""
        return None

    def max_step_norm(self, here: Point, first_units: Units) -> float:
        """Return the limit on the step norm; infinite: there is none."""
        return math.inf

    def limited_step(
        self, here: Point, krylov: StepBasis, spectrum: cubic.Spectrum, control: StepControl
    ) -> tuple[cubic.CubicStep | None, StepControl]:
        """Return the cubic step within the limit on its norm, and `control` with its σ; None: no step is proposed."""
        return None, control

    def paper_products(self, here: Point, products: int) -> int:
        """Return J as the authors' program counts it (D4), whether or not Lanczos stopped earlier.

        If the stopping rule determines the dimension, the products actually computed are counted.
        """
        if self.krylov_stop == "paper" and self.krylov_dim is not None:
            return min(self.krylov_dim, here.space.dim)
        return products


@dataclass(frozen=True, kw_only=True)
class CubicModel(KrylovModel):
    """2.3: minimises m(s) = gᵀs + ½sᵀBs + (σ/3)‖s‖³ in the Krylov space, globally.

    Attributes
    ----------
    krylov_dim, krylov_stop, lanczos, epsilon, epsilon_g
        As in `KrylovModel`.
    max_resolves : int
        How often a rejected step is solved again with a larger σ in the same Krylov space, without Hessian products.
        The paper does not (0). Preset "robust" has 12: each rejection halves the step norm at least, so that the last
        step has at most 1/4096 of the first norm. Then the escape rule follows.
    first_radius : float or None
        Limit on the step norm; None: no limit. σ is raised until

            ‖s‖ ≤ max(first_radius·ℓ, 3‖s_last‖),  ℓ = max(ℓ₀, ‖x‖/10),  ℓ₀ = min(‖g‖²/‖Bg‖, max(‖x₀‖/10, |f|/‖g‖)),

        where s_last is the last step, and ℓ₀ is the length scale of the first point x₀. The first step is limited only
        if σ determines its norm, as with little or negative curvature. While no value of f has confirmed σ, a decrease
        that exceeds the prediction leads to longer steps in the same space.
    """

    max_resolves: int = setting(0, COUNT)
    first_radius: float | None = setting(None, POSITIVE)

    proposes = True
    limits_newton_steps = False

    def propose(self, here: Point, subspace: KrylovSubspace, sigma: float) -> cubic.CubicStep | None:
        """Return the minimiser of the model with this σ; None if a product was not finite."""
        if subspace.spectrum is None:
            return None
        if subspace.step is not None and subspace.step.sigma == sigma:
            return subspace.step
        return self._solve(here, subspace.krylov, subspace.spectrum, sigma)

    def _solve(self, here: Point, krylov: StepBasis, spectrum: cubic.Spectrum, sigma: float) -> cubic.CubicStep:
        """Return the global minimiser of the model with this σ; in the hard case its sign is random."""
        linear = krylov.projected_gradient
        step = cubic.solve(spectrum, linear, sigma)
        if step.hard_case and not here.random_bit(HARD_CASE_SIGN):  # both signs minimise the model
            step = cubic.solve(spectrum, linear, sigma, -1.0)
        return step

    def max_step_norm(self, here: Point, first_units: Units) -> float:
        """Return the limit on the step norm that `first_radius` describes."""
        if self.first_radius is None:
            return math.inf
        step_scale = step_scale_at(first_units.length_scale, here.x_norm)
        return max(self.first_radius * step_scale, MAX_GROWTH_FACTOR * here.state.last_step_norm)

    def limited_step(
        self, here: Point, krylov: StepBasis, spectrum: cubic.Spectrum, control: StepControl
    ) -> tuple[cubic.CubicStep, StepControl]:
        """Return the minimiser of the model, and `control` with its σ, which is raised for steps beyond the limit.

        σ was adapted to earlier steps, and along a new direction the model may be inaccurate at that distance. The
        first step of a run is limited only if σ‖s‖ exceeds the left-most Ritz value, so that σ determines its norm; a
        model with `limits_newton_steps` limits it always.
        """
        max_norm = control.max_step_norm
        step = self._solve(here, krylov, spectrum, control.sigma)
        is_limited = self.limits_newton_steps or here.state.last_step_norm > 0.0 or spectrum.leftmost < step.multiplier
        if not (step.norm > max_norm and is_limited):
            return step, control
        sigma_lower_bound = cubic.sigma_lower_bound(spectrum, krylov.projected_gradient, step, max_norm)
        solve = partial(self._solve, here, krylov, spectrum)
        step = here.sigma_rule.limit_step(step, control.sigma, solve, max_norm, sigma_lower_bound)
        return step, StepControl(step.sigma, control.units, max_norm, self.tries_longer_steps)


@dataclass(frozen=True, kw_only=True)
class NoModel(Piece):
    """Needs no Hessian products and proposes no step."""

    proposes = False
    needs_products = False
    max_resolves = 0

    def build(self, here: Point) -> None:
        """Return None: there is no subspace."""

    def propose(self, here: Point, subspace: None, sigma: float) -> None:
        """Propose no step."""


class _AccuracyTestSchedule(NamedTuple):
    """The dimensions at which the accuracy test is made: its eigenpairs cost O(j²), so a long basis is tested rarely.

    Attributes
    ----------
    next_dim : int
        No test is made below this dimension.
    forced_dim : int
        Below this dimension a test is made only if `multiplier` predicts that it holds.
    multiplier : float
        μ of the last step.
    """

    next_dim: int = 1
    forced_dim: int = 0
    multiplier: float = math.nan

    @classmethod
    def after(cls, dim: int, multiplier: float | None) -> _AccuracyTestSchedule:
        """Return the schedule after a test at a dimension; `multiplier` is the μ of its step if μ predicts ‖∇m‖."""
        if multiplier is None:
            return cls(dim + max(1, dim // _TEST_DIVISOR))
        return cls(dim + 1, dim + max(_MIN_TEST_INTERVAL, dim // _TEST_DIVISOR), multiplier)

    def is_early(self, krylov: Krylov, tolerance: float) -> bool:
        """Return whether the test is left out at the present dimension."""
        if krylov.dim < self.next_dim:
            return True
        threshold = _PREDICTION_FACTOR * tolerance
        return krylov.dim < self.forced_dim and krylov.shifted_norms(self.multiplier)[1] > threshold


def _build_subspace(model: KrylovModel, here: Point, krylov: Krylov, operator: Operator) -> KrylovSubspace:
    """Extend a Krylov space until the model is minimised well enough in it, and return it with its eigenpairs.

    Along negative curvature the predicted decrease is largest far from x, where the model is inaccurate. With "forcing"
    Lanczos therefore stops at the first negative curvature, close to the gradient, as truncated conjugate gradients do.
    It also stops at a product that is not finite; the subspace then has no spectrum.
    """
    control = StepControl(here.state.sigma, here.units)
    tolerance, uses_forcing_term = _gradient_tolerance(model, here), model.uses_forcing_term
    ritz_tolerance = math.inf if uses_forcing_term else max(model.epsilon, here.grad_norm) / 2
    schedule, multiplier_predicts = _AccuracyTestSchedule(), uses_forcing_term and krylov.starts_at_gradient
    stops_at_negative_curvature = uses_forcing_term and here.oracle.exact
    try:
        while True:
            krylov.extend()
            if krylov.dim == 1:
                control = step_control(model, here, math.hypot(krylov.alpha[0], krylov.last_beta))
            must_stop = krylov.is_complete or (stops_at_negative_curvature and not krylov.is_definite)
            if not must_stop and (
                schedule.is_early(krylov, tolerance)
                or (model.proposes and krylov.model_gradient_lower_bound(control.sigma) > tolerance)
            ):
                continue
            multiplier = None if must_stop else _inaccurate_multiplier(model, here, krylov, control, tolerance)
            if multiplier is None:
                spectrum = cubic.compute_spectrum(*krylov.tridiagonal())
                if must_stop or krylov.residual_of(spectrum.vectors[:, 0]) <= ritz_tolerance:
                    step, control = model.limited_step(here, krylov, spectrum, control)
                    if must_stop or step is None or _is_accurate(model, here, krylov, step, control.units, tolerance):
                        return KrylovSubspace(model, krylov, operator, spectrum, *control, step)
                    multiplier = step.multiplier
            schedule = _AccuracyTestSchedule.after(krylov.dim, multiplier if multiplier_predicts else None)
    except NonFiniteProductError as error:
        return KrylovSubspace(model, krylov, operator, None, *control, failure=str(error))


def _gradient_tolerance(model: KrylovModel, here: Point) -> float:
    """Return the tolerance on ‖∇m‖; with "forcing", `_step_tolerance` lowers it for short steps."""
    if not model.uses_forcing_term:
        return resolved_epsilon_g(model.epsilon, model.epsilon_g)
    return forcing_tolerance(here)


def forcing_tolerance(here: Point) -> float:
    """Return the tolerance on ‖∇m‖ of an inexact Newton step."""
    norm, last_norm = here.grad_norm, here.state.last_grad_norm
    reduction = norm / last_norm if last_norm > 0.0 else 1.0
    return max(min(MAX_FORCING_TERM, reduction) * norm, TOLERANCE_FRACTION * here.tol)


def _inaccurate_multiplier(
    model: KrylovModel, here: Point, krylov: Krylov, control: StepControl, tolerance: float
) -> float | None:
    """Return a lower bound of the step's μ if a lower bound of ‖∇m(s)‖ shows that the step is not accurate; else None.

    No eigenpairs are needed. If T is positive definite, the norm of Newton's step exceeds ‖s‖. So it bounds μ = σ‖s‖,
    with which ‖∇m(s)‖ decreases, and the tolerance, which grows with ‖s‖. A step beyond the limit on its norm has a
    larger σ, for which the bound does not hold.
    """
    if not (model.proposes and krylov.is_definite and krylov.starts_at_gradient):
        return None
    newton_norm, newton_residual = krylov.shifted_norms(0.0)
    if not newton_norm < control.max_step_norm or here.below_precision(newton_norm):
        return None
    tolerance = _step_tolerance(model, here, newton_norm, control.units, tolerance)
    if newton_residual <= tolerance:  # and so is that of a larger μ
        return None
    norm, residual = krylov.shifted_norms(control.sigma * newton_norm)
    return control.sigma * norm if residual > tolerance else None


def _is_accurate(
    model: KrylovModel, here: Point, krylov: Krylov, step: cubic.CubicStep, units: Units, tolerance: float
) -> bool:
    """Return whether ‖∇m(s)‖ = β_j |u_j| is small enough (2.2)."""
    residual = krylov.residual_of(step.u)
    if model.uses_forcing_term and here.below_precision(step.norm):
        # In a narrow valley only the step across it is so short: a larger space contains the step along the valley.
        return residual <= tolerance and here.grad_norm > 0.0 and krylov.dim >= _MAX_NEGLIGIBLE_STEP_DIM
    return residual <= _step_tolerance(model, here, step.norm, units, tolerance)


def _step_tolerance(model: KrylovModel, here: Point, step_norm: float, units: Units, tolerance: float) -> float:
    """Return the tolerance on ‖∇m(s)‖ for a step of this norm; with "forcing" it is smaller for short steps."""
    if not model.uses_forcing_term:
        return tolerance
    forcing_bound = step_norm / step_scale_at(units.length_scale, here.x_norm) * here.grad_norm
    return min(tolerance, max(forcing_bound, TOLERANCE_FRACTION * here.tol))


def step_control(model: KrylovModel, here: Point, product_norm: float) -> StepControl:
    """Return σ of the state and the limit on the step norm; at the first point, the units and the initial σ.

    `product_norm` is ‖Bq₁‖, with the unit vector q₁ of the start. Longer steps are allowed at the first point only,
    where no value of f has confirmed σ, if the step norm is limited and the model tries them.
    """
    units, sigma = here.units, here.state.sigma
    if units.length_scale:
        return StepControl(sigma, units, model.max_step_norm(here, units))
    units = here.measure_units(product_norm)
    sigma = here.sigma_rule.first_sigma(sigma, units, model.first_sigma_in_units)
    max_step_norm = model.max_step_norm(here, units)
    return StepControl(sigma, units, max_step_norm, model.tries_longer_steps and max_step_norm < math.inf)
