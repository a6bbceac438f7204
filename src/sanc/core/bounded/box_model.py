"""The cubic step with bounds: a minimiser of the model in the box, from the Krylov space of the step without bounds.

Lanczos gives B on its space, Q and T. If x + Qu lies in the box, that is the step. Otherwise

    m(s) = gᵀs + ½ sᵀB̂s + (σ/3)‖s‖³,   lower ≤ x + s ≤ upper,

is minimised by projected Newton steps, which add and release many bounds at once. B̂ is the symmetric matrix with the
products of Lanczos, B̂Q = BQ = QT + β q eᵀ, where q is the next vector. Outside that space, where only truncated steps
lead, its curvature is τ, the mean of |Ritz values|. If the space is the whole face, B̂ = B. So a truncated step needs no
further product, also not after a rejection. Its predicted decrease is m(0) − m(s), and the ratio test is as without
bounds.

A subspace may have no basis: a user's model has none, or the basis of a Krylov space is not stored. Its step is then
projected on the box, and one product gives m(s) with the Hessian as B̂. If m does not decrease, the step is the Cauchy
point on the projected gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from sanc.core.bounded.bounds import FaceOracle
from sanc.core.pieces import Model, Subspace, paper_products
from sanc.core.point import Point
from sanc.core.space import Floats, Vector, host_array
from sanc.core.spectrum.cubic import CubicStep, compute_spectrum
from sanc.core.spectrum.krylov import NonFiniteProductError, StepBasis
from sanc.core.units import Units

_MAX_MODEL_NEWTON_STEPS = 40
"""Largest number of projected Newton steps; each costs at most n products with B̂ and no evaluation of f."""
_MODEL_GRADIENT_TOLERANCE = 1e-3
"""The model is minimised until its projected gradient is below this fraction of ‖g‖."""
ARMIJO_FRACTION = 1e-4
"""Fraction of the linear decrease that a projected step has to attain (Bertsekas 1982)."""
MAX_MODEL_HALVINGS = 30
"""Largest number of halvings in the projected search on the model."""
REPEATED_STEP_RATIO = 0.7
"""After a rejection the next step has at most this fraction of the norm; σ is raised until it does."""
SIGMA_INCREASE_FACTOR = 4.0
"""Factor on σ until the step is shorter. A step norm that σ limits falls as 1/√σ, so each factor halves it."""
_CG_TOLERANCE = 1e-2
"""Relative residual of a projected Newton step. Later steps reduce the rest, up to `_MODEL_GRADIENT_TOLERANCE`."""


@dataclass(frozen=True, slots=True)
class BoxStep(CubicStep):
    """A step in the box, with its trial point.

    Attributes
    ----------
    trial_point : vector
        The trial point.
    truncated : bool
        Whether bounds changed the step of the model; norm and decrease then belong to the truncated step.
    """

    trial_point: Any = None
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class BoundedModel:
    """Keeps the steps of another model in the box of a `FaceOracle`.

    Attributes
    ----------
    inner : Model
        The model without bounds.
    """

    inner: Model

    @property
    def proposes(self) -> bool:
        """Whether the inner model proposes steps."""
        return self.inner.proposes

    @property
    def needs_products(self) -> bool:
        """Whether the inner model needs Hessian products."""
        return self.inner.needs_products

    @property
    def max_resolves(self) -> int:
        """How many further steps may be proposed after a rejection."""
        return self.inner.max_resolves

    def build(self, here: Point) -> Subspace | None:
        """Return the subspace of the inner model, with steps in the box."""
        subspace = self.inner.build(here)
        return None if subspace is None else BoundedSubspace(self.inner, subspace, here)

    def propose(self, here: Point, subspace: BoundedSubspace, sigma: float) -> CubicStep | None:
        """Return the step of `sigma` in the box."""
        return subspace.propose(here, sigma)

    def paper_products(self, here: Point, products: int) -> int:
        """Return the products to count in `paper_calls`."""
        return paper_products(self.inner, here, products)


@dataclass(frozen=True)
class BoundedSubspace:
    """The subspace of a model, and the steps in it that the box truncates.

    Attributes
    ----------
    model : Model
        The model without bounds, which built the subspace.
    inner : Subspace
        The subspace of that model.
    here : Point
        The point at which it was built.
    """

    model: Model
    inner: Subspace
    here: Point

    @cached_property
    def _quadratic(self) -> _Quadratic | _Products:
        """The quadratic model in the basis of the subspace, or by products of the Hessian if no basis is known."""
        return _Products(self.here) if self.basis is None else _Quadratic.from_basis(self.here, self.basis)

    @property
    def basis(self) -> StepBasis | None:
        """The basis of the subspace."""
        return self.inner.basis

    @property
    def sigma(self) -> float:
        """σ of the first step."""
        return self.inner.sigma

    @property
    def allows_longer_steps(self) -> bool:
        """Whether longer steps may be tried."""
        return self.inner.allows_longer_steps

    @property
    def units(self) -> Units:
        """Units of the first point."""
        return self.inner.units

    @property
    def ritz_value(self) -> float:
        """The left-most Ritz value."""
        return self.inner.ritz_value

    @property
    def hessian_norm(self) -> float:
        """An estimate of ‖B‖."""
        return self.inner.hessian_norm

    @property
    def products(self) -> int:
        """Hessian products computed."""
        return self.inner.products

    @property
    def failure(self) -> str:
        """Why no step can be made."""
        return self.inner.failure

    def ritz_vector(self) -> Vector:
        """Return the vector of the left-most Ritz pair."""
        return self.inner.ritz_vector()

    def failed(self, failure: str) -> BoundedSubspace:
        """Return the subspace after a product that was not finite."""
        return BoundedSubspace(self.model, self.inner.failed(failure), self.here)

    def release(self) -> None:
        """Release the memory of the products."""
        self.inner.release()

    def trial_point(self, x: Vector, step: CubicStep) -> Vector:
        """Return x + s."""
        if isinstance(step, BoxStep):
            point: Vector = step.trial_point
            return point
        return self.inner.trial_point(x, step)

    def longer_step(self, here: Point, sigma: float, trial_count: int) -> CubicStep | None:
        """Return the step of a smaller σ; None if no step is to be tried after `trial_count` trial points."""
        step = self.inner.longer_step(here, sigma, trial_count)
        return step if step is None or not step.decrease > 0.0 else self._in_box(here, step)

    def propose(self, here: Point, sigma: float) -> CubicStep | None:
        """Return the step of `sigma` in the box.

        If bounds and not σ determine a rejected step, a larger σ may leave it as it is. σ is then raised until the step
        is shorter, since f is known there.
        """
        rejected = here.rejected if isinstance(here.rejected, BoxStep) and here.rejected.truncated else None
        while True:
            step: CubicStep | None = self.model.propose(here, self.inner, sigma)
            if step is None or not step.decrease > 0.0:
                return step
            boxed = self._in_box(here, step)
            raised = rejected is not None and sigma > rejected.sigma
            is_repeated = rejected is not None and raised and boxed.norm > REPEATED_STEP_RATIO * rejected.norm
            if not is_repeated or sigma >= here.sigma_rule.ceiling:
                return boxed
            sigma = here.sigma_rule.bounded(SIGMA_INCREASE_FACTOR * sigma)

    def _in_box(self, here: Point, step: CubicStep) -> BoxStep:
        """Return the step itself if it ends in the box; otherwise the minimiser of the model in the box."""
        oracle, space, subspace = here.oracle, here.space, self.inner
        assert isinstance(oracle, FaceOracle)
        trial = subspace.trial_point(here.x, step)
        if oracle.is_inside(trial):
            return BoxStep(**_fields_of(step), trial_point=trial)
        x = space.tensor(here.x)
        box = oracle.box
        projected = space.tensor(trial).clamp(box.lower, box.upper)
        quadratic = self._quadratic
        lower, upper = (host_array(bound - x) for bound in (box.lower, box.upper))
        model = _BoxModel(quadratic, step.sigma, lower, upper)
        initial_step = host_array(projected - x)
        s, decrease = model.improve(initial_step) if isinstance(quadratic, _Products) else model.minimise(initial_step)
        # Entries at a bound are set to it, since x + (bound − x) may differ from it by roundoff.
        point = (x + x.new_tensor(s)).clamp(box.lower, box.upper)
        point = point.where(x.new_tensor(s > lower).bool(), box.lower).where(x.new_tensor(s < upper).bool(), box.upper)
        norm = float(np.linalg.norm(s))
        changes = {"norm": norm, "decrease": decrease, "multiplier": step.sigma * norm}
        return BoxStep(**_fields_of(step) | changes, trial_point=space.vector(point), truncated=True)


def _fields_of(step: CubicStep) -> dict[str, Any]:
    """Return the fields that every cubic step has."""
    return {item.name: getattr(step, item.name) for item in fields(CubicStep)}


@dataclass(frozen=True, slots=True)
class _Quadratic:
    """gᵀs + ½ sᵀB̂s with B̂ = τI + QᵀCQ.

    Attributes
    ----------
    g : ndarray
        The gradient.
    basis : ndarray
        Q and the next Lanczos vector, as rows.
    coefficients : ndarray
        C: T − τI, bordered by β.
    shift : float
        τ, the curvature outside the space.
    """

    g: Floats
    basis: Floats
    coefficients: Floats
    shift: float

    @classmethod
    def from_basis(cls, here: Point, basis: StepBasis) -> _Quadratic:
        """Return the quadratic model in the basis of a subspace."""
        space, (diagonal, off_diagonal) = here.space, basis.tridiagonal()
        rows, shift = host_array(basis.basis), 0.0
        if len(rows) < space.dim:
            shift = float(np.mean(np.abs(compute_spectrum(diagonal, off_diagonal).values)))
        if basis.last_beta > 0.0:
            # B is known on Q only. With T positive definite, β²/pivot is the smallest curvature of the next vector for
            # which the bordered T stays semidefinite.
            rows = np.vstack([rows, host_array(basis.next_vector)])
            diagonal = np.append(diagonal, max(basis.schur_complement, shift))
            off_diagonal = np.append(off_diagonal, basis.last_beta)
        coefficients = np.diag(diagonal - shift) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
        return cls(host_array(here.g), rows, coefficients, shift)

    def multiply(self, v: Floats) -> Floats:
        """Return B̂v."""
        product: Floats = self.basis.T @ (self.coefficients @ (self.basis @ v)) + self.shift * v
        return product


class _Products:
    """gᵀs + ½ sᵀBs with products of the Hessian B, for subspaces of which no basis is known."""

    def __init__(self, here: Point) -> None:
        self._here = here
        self.g = host_array(here.g)

    def multiply(self, v: Floats) -> Floats:
        """Return Bv."""
        oracle, space = self._here.oracle, self._here.space
        operator = oracle.hessian(self._here.x)
        try:
            product = host_array(operator(space.vector(space.tensor(self._here.x).new_tensor(v))))
        finally:
            operator.release()
        if not np.isfinite(product).all():
            raise NonFiniteProductError("a Hessian product is not finite")
        return product


class _BoxModel:
    """The cubic model in a box: m(s) = q(s) + (σ/3)‖s‖³ with lower ≤ s ≤ upper, where 0 is in the box."""

    def __init__(self, quadratic: _Quadratic | _Products, sigma: float, lower: Floats, upper: Floats) -> None:
        self.quadratic, self._cubic_coefficient, self.lower, self.upper = quadratic, sigma, lower, upper

    def minimise(self, initial_step: Floats) -> tuple[Floats, float]:
        """Return a step that is no worse than `initial_step` and the Cauchy step, and the decrease of m there."""
        cauchy = self._cauchy_point()
        s = min((initial_step, cauchy), key=lambda candidate: self.evaluate(candidate)[0])
        value, model_gradient = self.evaluate(s)
        tolerance = _MODEL_GRADIENT_TOLERANCE * float(np.linalg.norm(self.quadratic.g))
        for _ in range(_MAX_MODEL_NEWTON_STEPS):
            free = ((s > self.lower) | (model_gradient < 0.0)) & ((s < self.upper) | (model_gradient > 0.0))
            if float(np.linalg.norm(model_gradient[free])) <= tolerance:
                break
            direction = self._newton_direction(s, model_gradient, free)
            trial = self._search(s, direction, model_gradient)
            trial_value, trial_gradient = self.evaluate(trial)
            if not trial_value < value:
                break
            s, value, model_gradient = trial, trial_value, trial_gradient
        return s, -value

    def improve(self, initial_step: Floats) -> tuple[Floats, float]:
        """Return `initial_step` if m decreases there, otherwise the Cauchy step, and the decrease of m there."""
        value = self.evaluate(initial_step)[0]
        if value < 0.0:
            return initial_step, -value
        cauchy = self._cauchy_point()
        return cauchy, -self.evaluate(cauchy)[0]

    def evaluate(self, s: Floats) -> tuple[float, Floats]:
        """Return m(s) and its gradient."""
        norm, product = float(np.linalg.norm(s)), self.quadratic.multiply(s)
        value = (
            float(self.quadratic.g @ s) + 0.5 * float(s @ product) + self._cubic_coefficient / 3.0 * norm * norm * norm
        )
        return value, self.quadratic.g + product + (self._cubic_coefficient * norm) * s

    def _cauchy_point(self) -> Floats:
        """Return a point on the projected gradient at which m decreases, from its minimiser along −g without bounds."""
        g = self.quadratic.g
        square = float(g @ g)
        curvature, cubic = float(g @ self.quadratic.multiply(g)), self._cubic_coefficient * square * math.sqrt(square)
        return self._search(np.zeros_like(g), -g * _positive_root(-square, curvature, cubic))

    def _step_length(self, norm: float, derivative: float, curvature: float) -> float:
        """Return t > 0 of the minimiser t·d of m along a descent direction d, given ‖d‖, gᵀd and dᵀB̂d."""
        return _positive_root(derivative, curvature, self._cubic_coefficient * norm * norm * norm)

    def _newton_direction(self, s: Floats, model_gradient: Floats, free: Any) -> Floats:
        """Return a descent direction of the free variables: truncated conjugate gradients on m'' d = −∇m(s).

        Along negative curvature the direction ends at the minimiser of m along it.
        """
        norm = float(np.linalg.norm(s))
        s_direction = s / norm if norm > 0.0 else s

        def multiply(v: Floats) -> Floats:
            along_s = (s_direction @ v) * s_direction
            product: Floats = self.quadratic.multiply(v) + self._cubic_coefficient * norm * (v + along_s)
            return np.where(free, product, 0.0)

        residual = np.where(free, -model_gradient, 0.0)
        return _conjugate_gradients(multiply, residual, self._step_length)

    def _search(self, s: Floats, direction: Floats, model_gradient: Floats | None = None) -> Floats:
        """Return the first of the projections of s + d, s + d/2, … at which m decreases enough."""
        value, model_gradient = self.evaluate(s) if model_gradient is None else (self.evaluate(s)[0], model_gradient)
        for _ in range(MAX_MODEL_HALVINGS):
            trial = np.clip(s + direction, self.lower, self.upper)
            if self.evaluate(trial)[0] <= value + ARMIJO_FRACTION * min(float(model_gradient @ (trial - s)), 0.0):
                return trial
            direction = 0.5 * direction
        return s


def _positive_root(derivative: float, curvature: float, cubic: float) -> float:
    """Return t > 0 with derivative + curvature·t + cubic·t² = 0, for a directional derivative below zero."""
    root = math.sqrt(curvature * curvature - 4.0 * cubic * derivative)
    denominator = curvature + root
    return -2.0 * derivative / denominator if denominator > 0.0 else (-curvature / cubic if cubic > 0.0 else 1.0)


def _conjugate_gradients(
    multiply: Callable[[Floats], Floats], residual: Floats, step_length: Callable[[float, float, float], float]
) -> Floats:
    """Solve A d = residual to `_CG_TOLERANCE`. Return d, or its value at the first direction of negative curvature."""
    d, p, square = np.zeros_like(residual), residual, float(residual @ residual)
    tolerance = _CG_TOLERANCE**2 * square
    for _ in range(len(residual)):
        if square <= tolerance:
            break
        product = multiply(p)
        curvature = float(p @ product)
        if curvature <= 0.0:
            derivative = min(-float(residual @ p), -square)
            return d + step_length(math.sqrt(float(p @ p)), derivative, curvature) * p
        step = square / curvature
        d = d + step * p
        residual = residual - step * product
        last, square = square, float(residual @ residual)
        p = residual + (square / last) * p
    return d
